//! Workers as processes of this machine.

use crate::{
    Executor, ExecutorError, Limits, MpOptions, ShutdownReport, WorldStats,
    hosted::Hosted,
    keeper::Keeper,
    start::{self, Progress, StartedWorld},
    stderr::{StderrTail, StderrThread},
    stop::{First, Lives, Stopper},
    world::World,
};
use denoised_os::{Deadline, child::Child, poll::Wakeup, poll::wait_readable, signal::Signal};
use denoised_types::{Failure, Rank};
use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

/// Budget of the shutdown that dropping does.
const DROP_BUDGET: Duration = Duration::from_secs(5);

/// Worker processes, a monitor thread that watches over them, and the world they form.
///
/// Any rank's death ends the world: a new one is started by whoever owns it. Dropping shuts down within five seconds.
#[derive(Debug)]
pub struct MpExecutor {
    shared: Arc<Shared>,
    monitor: Mutex<Option<Monitor>>,
}

/// The threads that belong to the processes.
#[derive(Debug)]
struct Monitor {
    thread: JoinHandle<()>,
    stderr: StderrThread,
}

#[derive(Debug)]
struct Shared {
    world: Arc<World>,
    processes: Processes,
    stopper: Stopper,
    limits: Limits,
    wakeup: Arc<Wakeup>,
    quit: AtomicBool,
}

impl MpExecutor {
    /// Starts the workers, waits until all are ready, and tells `progress` how far they are.
    ///
    /// # Errors
    /// [`ExecutorError::Start`], with nothing left behind: not enough memory, a program that cannot be started, a rank that failed
    /// or died, or not all ranks ready in time.
    pub fn start(options: MpOptions, progress: Progress<'_>) -> Result<Self, ExecutorError> {
        let StartedWorld {
            info,
            end,
            processes,
            tails,
            stderr,
        } = start::start(&options, progress)?;
        let world_size = info.world_size;
        let refused = |error: &dyn std::fmt::Display| ExecutorError::Start {
            kind: "mp",
            world_size,
            cause: Failure::new(denoised_types::FailureCode::Internal, error.to_string()),
            ranks: Vec::new(),
        };
        let wakeup = Arc::new(Wakeup::new().map_err(|error| refused(&error))?);
        let world = Arc::new(World::new(info, options.limits, end));
        {
            let wakeup = Arc::clone(&wakeup);
            world.set_monitor(Box::new(move || wakeup.ring()));
        }
        let shared = Arc::new(Shared {
            world,
            processes,
            stopper: Stopper::default(),
            limits: options.limits,
            wakeup,
            quit: AtomicBool::new(false),
        });
        let monitored = Arc::clone(&shared);
        // Dropping `shared` on an error kills and reaps the children.
        let thread = std::thread::Builder::new()
            .name("executor monitor".to_owned())
            .spawn(move || monitor(&monitored, tails))
            .map_err(|error| refused(&error))?;
        Ok(Self {
            shared,
            monitor: Mutex::new(Some(Monitor { thread, stderr })),
        })
    }

    /// Counts of what was sent and dropped.
    pub fn stats(&self) -> WorldStats {
        self.shared.world.stats()
    }
}

impl Hosted for MpExecutor {
    fn hosted(&self) -> &Arc<World> {
        &self.shared.world
    }

    fn end(&self, budget: Duration) -> ShutdownReport {
        let Shared {
            world,
            processes,
            stopper,
            wakeup,
            ..
        } = &*self.shared;
        let report = stopper.stop(world, processes, budget, First::Graceful);
        wakeup.ring();
        report
    }
}

impl Drop for MpExecutor {
    fn drop(&mut self) {
        self.shutdown(DROP_BUDGET);
        self.shared.quit.store(true, Ordering::Release);
        self.shared.wakeup.ring();
        let monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A failure callback runs on the monitor's thread and may hold the last reference.
        if let Some(Monitor { thread, stderr }) = monitor
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic of the monitor has been printed by its own hook.
            let _ = thread.join();
            stderr.finish();
        }
    }
}

/// The workers' processes, by rank.
#[derive(Debug)]
pub(crate) struct Processes {
    // Fields are dropped in this order: the processes are reaped before the thread ends that they would end with.
    children: Vec<Child>,
    _keeper: Keeper,
}

impl Processes {
    pub(crate) fn new(children: Vec<Child>, keeper: Keeper) -> Self {
        Self {
            children,
            _keeper: keeper,
        }
    }
}

impl Lives for Processes {
    fn ended(&self, rank_idx: usize) -> Option<String> {
        match self.children.get(rank_idx)?.try_wait() {
            Ok(status) => status.map(|status| status.to_string()),
            Err(error) => Some(format!("is lost ({error})")),
        }
    }

    fn wait(&self, deadline: Deadline) {
        let living = self
            .children
            .iter()
            .filter(|child| matches!(child.try_wait(), Ok(None)));
        let fds: Vec<BorrowedFd<'_>> = living.map(|child| child.as_fd()).collect();
        if !fds.is_empty() {
            // A refusal shows in the statuses, which the caller looks at next.
            let _ = wait_readable(&fds, deadline);
        }
    }

    fn signal(&self, rank_idx: usize, signal: Signal) {
        if let Some(child) = self.children.get(rank_idx) {
            // One that ended meanwhile needs no signal.
            let _ = child.signal(signal);
        }
    }
}

/// Watches over the workers until they are gone: passes on their standard error, notices which are hung, reaps each before its end is
/// reported, and tears the world down when it has failed.
fn monitor(shared: &Shared, mut tails: Vec<StderrTail>) {
    let Shared {
        world,
        processes,
        stopper,
        limits,
        wakeup,
        quit,
    } = shared;
    let mut is_gone = vec![false; tails.len()];
    let mut is_torn_down = false;
    loop {
        let next_look = world.watch();
        let (n_pidfds, ready) = {
            let living = processes
                .children
                .iter()
                .zip(&is_gone)
                .filter(|(_, gone)| !**gone);
            let mut fds: Vec<BorrowedFd<'_>> = std::iter::once(wakeup.as_fd()).collect();
            fds.extend(living.map(|(child, _)| child.as_fd()));
            let n_pidfds = fds.len() - 1;
            fds.extend(tails.iter().filter_map(StderrTail::fd));
            match wait_readable(&fds, next_look) {
                Ok(ready) => (n_pidfds, ready),
                Err(error) => {
                    tracing::error!(%error, "the monitor cannot wait");
                    std::thread::sleep(Duration::from_millis(100));
                    // The processes can be looked at all the same; reading a pipe that has nothing to say would not end.
                    (n_pidfds, (0..fds.len()).map(|idx| idx <= n_pidfds).collect())
                }
            }
        };
        wakeup.clear();
        let mut tails_ready = ready[1 + n_pidfds..].iter();
        for tail in tails.iter_mut().filter(|tail| tail.fd().is_some()) {
            if tails_ready.next() == Some(&true) {
                tail.read();
            }
        }
        if ready[1..=n_pidfds].contains(&true) {
            for (rank_idx, gone) in is_gone.iter_mut().enumerate().filter(|(_, gone)| !**gone) {
                // Reaped before it is reported, so the status is the true one.
                let Some(status) = processes.ended(rank_idx) else {
                    continue;
                };
                *gone = true;
                tails[rank_idx].read_rest();
                // At most 64 ranks.
                world.rank_gone(Rank(rank_idx as u16), &status, tails[rank_idx].lines().last());
            }
        }
        if !is_torn_down && world.run_callbacks() {
            is_torn_down = true;
            stopper.stop(world, processes, limits.fence, First::Term);
            // Those that ended meanwhile are collected in the next round.
            wakeup.ring();
        }
        let all_read = is_gone.iter().all(|gone| *gone) && tails.iter().all(|tail| tail.fd().is_none());
        if stopper.is_done() && (all_read || quit.load(Ordering::Acquire)) {
            return;
        }
    }
}
