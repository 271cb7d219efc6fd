//! Ctrl-C and TERM: the first asks the running command to end properly, the second ends the program at once, workers first.

use crate::error::Error;
use crate::output::say;
use denoised_os::Deadline;
use denoised_os::child::kill_all;
use denoised_os::poll::wait_readable;
use denoised_os::signal::{EndSignals, Signal};
use denoised_types::{ExitCode, Failure, FailureCode};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Budget for closing an interrupted world, whose workers may be stopped or hung: graceful, TERM and KILL share it.
pub(crate) const CLOSE_BUDGET: Duration = Duration::from_secs(3);
/// How long the kernel may take to end killed workers.
const KILL_LIMIT: Duration = Duration::from_secs(5);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
/// The program ends at once: the workers are being killed.
static IS_ENDING: AtomicBool = AtomicBool::new(false);
/// Wakes whoever waits for something else.
static WAKE: Mutex<Option<Box<dyn Fn() + Send>>> = Mutex::new(None);
/// Whether the command watches [`is_interrupted`]; while it does not, the first signal ends the program at once.
static IS_WATCHED: AtomicBool = AtomicBool::new(false);

/// Starts to listen. Called once, before anything is started.
///
/// # Errors
/// `Internal` if the system lets no signal be caught or no thread be started.
pub(crate) fn listen() -> Result<(), Error> {
    let failed = |cause: &dyn std::fmt::Display| {
        Error::from(Failure::new(
            FailureCode::Internal,
            format!("cannot listen for Ctrl-C: {cause}"),
        ))
    };
    let signals = EndSignals::catch(&[Signal::INT, Signal::TERM]).map_err(|cause| failed(&cause))?;
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || watch(&signals))
        .map_err(|cause| failed(&cause))?;
    Ok(())
}

/// Lives as long as the program, hence the one wait without an end: it is woken by signals alone.
fn watch(signals: &EndSignals) {
    loop {
        // The deadline only bounds a lost wake-up.
        if wait_readable(&[signals.as_fd()], Deadline::after_ms(60_000)).is_err() {
            return;
        }
        if signals.take().is_empty() {
            continue;
        }
        let is_second = INTERRUPTED.swap(true, Ordering::SeqCst);
        if is_second || !IS_WATCHED.load(Ordering::SeqCst) {
            end_at_once();
        }
        if let Ok(wake) = WAKE.lock()
            && let Some(wake) = wake.as_ref()
        {
            wake();
        }
    }
}

/// Ends workers that are running, starting or stopped, and then the program.
fn end_at_once() -> ! {
    // Before the first worker dies of it: what that leads to is nobody's error.
    IS_ENDING.store(true, Ordering::SeqCst);
    // One that the kernel cannot end in time is left to it: the signal stays.
    let _ = kill_all(Deadline::after(KILL_LIMIT));
    say("denoised: interrupted");
    #[expect(clippy::exit, reason = "the main thread is busy and may stay so")]
    std::process::exit(ExitCode::Interrupted as i32);
}

/// Whether the program is ending at once.
pub(crate) fn is_ending() -> bool {
    IS_ENDING.load(Ordering::SeqCst)
}

/// Returns unless the program is ending at once. What the command would report then is what killing its workers has led to, and its
/// exit code would be of that.
pub(crate) fn stand_by_if_ending() {
    if is_ending() {
        // The signals' thread exits long before.
        std::thread::sleep(2 * KILL_LIMIT);
    }
}

/// Whether the command was asked to end.
pub(crate) fn is_interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// What an interrupted command returns.
pub(crate) fn interrupted() -> Error {
    Failure::new(FailureCode::Cancelled, "interrupted").into()
}

/// From here until the value is dropped, the command looks at [`is_interrupted`] and ends by itself; `wake` runs on the first signal.
#[must_use]
#[derive(Debug)]
pub(crate) struct Watched(());

/// See [`Watched`].
pub(crate) fn watched(wake: impl Fn() + Send + 'static) -> Watched {
    if let Ok(mut slot) = WAKE.lock() {
        *slot = Some(Box::new(wake));
    }
    IS_WATCHED.store(true, Ordering::SeqCst);
    Watched(())
}

impl Drop for Watched {
    fn drop(&mut self) {
        IS_WATCHED.store(false, Ordering::SeqCst);
        if let Ok(mut slot) = WAKE.lock() {
            *slot = None;
        }
    }
}
