//! Signals: their names, ignoring Ctrl-C in workers, and hearing of requests to end.

use crate::OsError;
use crate::poll::Wakeup;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A signal's number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Signal(i32);

impl Signal {
    /// Ctrl-C in a terminal.
    pub const INT: Self = Self(libc::SIGINT);
    /// A polite request to end.
    pub const TERM: Self = Self(libc::SIGTERM);
    /// Ends a process at once; cannot be handled.
    pub const KILL: Self = Self(libc::SIGKILL);
    /// Stops a process until [`Signal::CONT`]; cannot be handled.
    pub const STOP: Self = Self(libc::SIGSTOP);
    /// Lets a stopped process go on.
    pub const CONT: Self = Self(libc::SIGCONT);

    /// The signal with this number.
    pub const fn from_number(number: i32) -> Self {
        Self(number)
    }

    /// Its number on this machine.
    pub const fn number(self) -> i32 {
        self.0
    }

    /// Its usual name; "unknown" for real-time and unknown ones.
    pub const fn name(self) -> &'static str {
        match self.0 {
            libc::SIGHUP => "SIGHUP",
            libc::SIGINT => "SIGINT",
            libc::SIGQUIT => "SIGQUIT",
            libc::SIGILL => "SIGILL",
            libc::SIGTRAP => "SIGTRAP",
            libc::SIGABRT => "SIGABRT",
            libc::SIGBUS => "SIGBUS",
            libc::SIGFPE => "SIGFPE",
            libc::SIGKILL => "SIGKILL",
            libc::SIGUSR1 => "SIGUSR1",
            libc::SIGSEGV => "SIGSEGV",
            libc::SIGUSR2 => "SIGUSR2",
            libc::SIGPIPE => "SIGPIPE",
            libc::SIGALRM => "SIGALRM",
            libc::SIGTERM => "SIGTERM",
            libc::SIGCHLD => "SIGCHLD",
            libc::SIGCONT => "SIGCONT",
            libc::SIGSTOP => "SIGSTOP",
            libc::SIGTSTP => "SIGTSTP",
            libc::SIGXCPU => "SIGXCPU",
            libc::SIGXFSZ => "SIGXFSZ",
            libc::SIGSYS => "SIGSYS",
            _ => "unknown",
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0, self.name())
    }
}

impl fmt::Debug for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// From now on this process ignores `signal`, and so do processes that it starts.
///
/// Workers ignore [`Signal::INT`]: Ctrl-C reaches the whole group, and the supervisor decides what it
/// means. (Rust programs ignore SIGPIPE from the start; a write to a closed pipe is an error instead.)
///
/// # Errors
/// The signal cannot be ignored.
pub fn ignore(signal: Signal) -> Result<(), OsError> {
    set_handler(signal, libc::SIG_IGN, "ignore a signal")
}

/// Requests to end, turned from interruptions into something a thread can wait for.
///
/// The first of each signal is caught and announced; a second one of the same kind while the first has
/// not been [taken](EndSignals::take) changes nothing. One per process.
#[derive(Debug)]
pub struct EndSignals(&'static Wakeup);

static CAUGHT: AtomicU64 = AtomicU64::new(0);
static WAKEUP: OnceLock<Wakeup> = OnceLock::new();

extern "C" fn catch(number: libc::c_int) {
    // Only what POSIX allows here: atomics and one write, with errno kept.
    // SAFETY: errno is a thread's own variable.
    let errno = unsafe { *libc::__errno_location() };
    CAUGHT.fetch_or(1u64 << (number as u32 % 64), Ordering::Release);
    if let Some(wakeup) = WAKEUP.get() {
        wakeup.ring();
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

impl EndSignals {
    /// Catches `signals` from now on, in whichever thread they arrive.
    ///
    /// # Errors
    /// A signal that cannot be caught, or no descriptor left.
    pub fn catch(signals: &[Signal]) -> Result<Self, OsError> {
        if WAKEUP.get().is_none() {
            let wakeup = Wakeup::new()?;
            // Another thread may have been first; then its descriptor serves both.
            let _ = WAKEUP.set(wakeup);
        }
        let Some(wakeup) = WAKEUP.get() else {
            return Err(OsError {
                action: "catch signals",
                source: std::io::ErrorKind::Other.into(),
            });
        };
        for &signal in signals {
            let handler: extern "C" fn(libc::c_int) = catch;
            set_handler(signal, handler as libc::sighandler_t, "catch a signal")?;
        }
        Ok(Self(wakeup))
    }

    /// The signals caught since the last call, and makes the descriptor unreadable again.
    pub fn take(&self) -> Vec<Signal> {
        self.0.clear();
        let caught = CAUGHT.swap(0, Ordering::Acquire);
        (1..64)
            .filter(|number| caught >> number & 1 == 1)
            .map(Signal)
            .collect()
    }
}

/// Readable while a caught signal waits to be [taken](EndSignals::take).
impl AsFd for EndSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn set_handler(signal: Signal, handler: libc::sighandler_t, action: &'static str) -> Result<(), OsError> {
    // SAFETY: an all-zero sigaction is a valid value: default handler, empty mask, no flags.
    let mut new: libc::sigaction = unsafe { std::mem::zeroed() };
    new.sa_sigaction = handler;
    new.sa_flags = libc::SA_RESTART;
    // SAFETY: the pointers are to a live local and null; `catch` is safe to run at any moment.
    if unsafe { libc::sigaction(signal.0, &new, std::ptr::null_mut()) } != 0 {
        return Err(OsError {
            action,
            source: std::io::Error::last_os_error(),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poll::wait_readable;
    use crate::{Deadline, child};

    #[test]
    fn a_caught_signal_is_announced_and_taken_once() {
        let signals = EndSignals::catch(&[Signal::from_number(libc::SIGUSR2)]).unwrap();
        child::signal_self(Signal::from_number(libc::SIGUSR2));
        assert_eq!(
            wait_readable(&[signals.as_fd()], Deadline::after_ms(60_000)).unwrap(),
            [true]
        );
        assert_eq!(signals.take(), [Signal::from_number(libc::SIGUSR2)]);
        assert!(signals.take().is_empty());
        assert_eq!(
            wait_readable(&[signals.as_fd()], Deadline::PASSED).unwrap(),
            [false]
        );
    }

    #[test]
    fn signals_have_names() {
        assert_eq!(Signal::KILL.to_string(), "9 (SIGKILL)");
        assert_eq!(Signal::from_number(40).to_string(), "40 (unknown)");
        assert!(EndSignals::catch(&[Signal::KILL]).is_err());
        assert!(ignore(Signal::STOP).is_err());
    }
}
