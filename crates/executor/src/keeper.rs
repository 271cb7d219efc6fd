//! The thread that starts a world's worker processes.
//!
//! The kernel ends a worker when the thread that started it has ended, which is how workers that are stopped die with a supervisor
//! that is killed. So no worker is started on a caller's thread, which may end at any time, but on this one, which lives as long as
//! its [`Keeper`]; and the keeper is dropped after the workers.

use denoised_os::{
    OsError,
    child::{Child, Spawn, SpawnError},
};
use std::{io, sync::mpsc};

/// What is to be started, and whom to tell.
type Order = (Spawn, mpsc::SyncSender<Result<Child, SpawnError>>);

/// Starts processes that end with it at the latest.
#[derive(Debug)]
pub(crate) struct Keeper(mpsc::Sender<Order>);

impl Keeper {
    /// # Errors
    /// No thread could be had.
    pub(crate) fn start() -> io::Result<Self> {
        let (sender, orders) = mpsc::channel::<Order>();
        std::thread::Builder::new()
            .name("workers' keeper".to_owned())
            .spawn(move || {
                // Ends when the keeper is dropped.
                for (spawn, answer) in orders {
                    // Nobody who waits for it means that the child is dropped, and so killed.
                    let _ = answer.send(spawn.end_with_thread().start());
                }
            })?;
        Ok(Self(sender))
    }

    /// Starts a process.
    ///
    /// # Errors
    /// As [`Spawn::start`].
    pub(crate) fn spawn(&self, spawn: Spawn) -> Result<Child, SpawnError> {
        let is_gone = || OsError {
            action: "reach the thread that starts workers",
            source: io::ErrorKind::BrokenPipe.into(),
        };
        let (answer, started) = mpsc::sync_channel(1);
        self.0.send((spawn, answer)).map_err(|_| is_gone())?;
        // Not longer than fork and exec take; a thread that panicked has dropped its end.
        started.recv().unwrap_or_else(|_| Err(is_gone().into()))
    }
}
