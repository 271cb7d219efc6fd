//! Processes: the one place that starts, signals and reaps them.
//!
//! R1. A child is started by fork and exec; the threads of this process never see a bare fork.
//! R2. A child inherits its three standard streams and the descriptors its [`Spawn`] names, no others:
//!     all descriptors are close-on-exec, and only the new process lifts that, for its own.
//! R3. A child is signalled through its pidfd only, so a signal never reaches a recycled process id.
//! R4. A status is reported only after the child has been reaped, so it is always the true one.
//! R5. Only children started here are waited for or signalled; a program's other children are its own.
//! R6. After [`kill_all`] no child is left and none is started any more.

use crate::poll::wait_readable;
use crate::signal::Signal;
use crate::{Deadline, OsError};
use rustix::io::Errno;
use rustix::io::FdFlags;
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};
use std::time::Duration;

/// How long dropping a live [`Child`] waits for the kernel to end it after KILL.
const DROP_WAIT: Duration = Duration::from_secs(5);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// It called exit with this code.
    Code(i32),
    /// This signal ended it.
    Signal(Signal),
}

impl ExitStatus {
    /// Whether it exited with code 0.
    pub fn is_success(self) -> bool {
        self == Self::Code(0)
    }
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(signal) => write!(f, "killed by signal {signal}"),
        }
    }
}

/// Why a process could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// Fork or exec failed.
    #[error("cannot start {program}: {source}")]
    Start {
        /// The program file.
        program: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A step around it failed.
    #[error(transparent)]
    Os(#[from] OsError),
}

/// What is to be started: program, arguments, environment and the descriptors the child inherits.
///
/// Standard input is empty, standard output goes nowhere unless [`Spawn::stdout`] says otherwise,
/// standard error comes back as a pipe ([`Child::take_stderr`]). The environment is inherited, with the
/// changes made here.
#[derive(Debug)]
pub struct Spawn {
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, Option<OsString>)>,
    fds: Vec<(String, OwnedFd)>,
    stdout: Option<OwnedFd>,
    ignored: Vec<Signal>,
    ends_with_thread: bool,
}

impl Spawn {
    /// The program file at `program`.
    pub fn new(program: &Path) -> Self {
        Self {
            program: program.to_owned(),
            args: Vec::new(),
            env: Vec::new(),
            fds: Vec::new(),
            stdout: None,
            ignored: Vec::new(),
            ends_with_thread: false,
        }
    }

    /// The program that is running now, to be started once more. It shows as "exe" in `ps` until it
    /// names itself ([`crate::process::set_thread_name`]).
    ///
    /// # Errors
    /// `/proc` does not tell.
    pub fn this_program() -> Result<Self, OsError> {
        // The link itself, not its target: it still works after the file was replaced or deleted.
        let link = Path::new("/proc/self/exe");
        std::fs::symlink_metadata(link).map_err(OsError::of("find this program"))?;
        Ok(Self::new(link))
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env
            .push((name.as_ref().to_owned(), Some(value.as_ref().to_owned())));
        self
    }

    /// Removes an environment variable.
    #[must_use]
    pub fn env_remove(mut self, name: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_owned(), None));
        self
    }

    /// Lets the child inherit `fd`; there it is taken with [`inherited_fd`] under the same `name`
    /// (letters, digits and `_`). This process's copy is closed once the child runs.
    #[must_use]
    pub fn pass_fd(mut self, name: &str, fd: OwnedFd) -> Self {
        self.fds.push((name.to_owned(), fd));
        self
    }

    /// Sends standard output to `fd`.
    #[must_use]
    pub fn stdout(mut self, fd: OwnedFd) -> Self {
        self.stdout = Some(fd);
        self
    }

    /// Lets the child ignore `signal` from its first instruction on.
    #[must_use]
    pub fn ignore(mut self, signal: Signal) -> Self {
        self.ignored.push(signal);
        self
    }

    /// Has the kernel KILL the child as soon as the thread that calls [`Spawn::start`] has ended, and with it
    /// at the latest when this process ends, however it ends. It also ends a child that is stopped, which
    /// sees no end of file.
    ///
    /// The kernel watches the thread, not the process: start such a child on a thread that lives until the
    /// child has been reaped, never on one that belongs to a caller.
    #[must_use]
    pub fn end_with_thread(mut self) -> Self {
        self.ends_with_thread = true;
        self
    }

    /// Starts it.
    ///
    /// # Errors
    /// [`SpawnError::Start`] if fork or exec fails (no such file, not executable, too many processes), or
    /// after [`kill_all`]; no process is left then.
    pub fn start(self) -> Result<Child, SpawnError> {
        // Held until the child is listed, so that `kill_all` misses none.
        let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
        if started.is_over {
            return Err(SpawnError::Start {
                program: self.program,
                source: io::Error::other("this program is ending"),
            });
        }
        #[expect(clippy::disallowed_methods, reason = "the one place that starts processes")]
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        command.stdout(self.stdout.map_or_else(Stdio::null, Stdio::from));
        for (name, value) in &self.env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let mut numbers: Vec<RawFd> = Vec::with_capacity(self.fds.len());
        for (name, fd) in &self.fds {
            numbers.push(fd.as_raw_fd());
            command.env(variable(name), Announced::of(fd.as_fd())?.to_string());
        }
        let ignored = self.ignored;
        let ends_with_thread = self.ends_with_thread;
        // SAFETY: takes nothing and cannot fail.
        let parent = unsafe { libc::getpid() };
        let prepare = move || {
            if ends_with_thread {
                // The kernel reads a whole unsigned long.
                let kill: libc::c_ulong = libc::SIGKILL as libc::c_ulong;
                // SAFETY: sets an attribute of the calling process; it survives exec.
                if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, kill) } != 0 {
                    return Err(io::Error::last_os_error());
                }
                // A parent that died before that sends no signal: then this process has another one by now.
                // SAFETY: takes nothing and cannot fail.
                if unsafe { libc::getppid() } != parent {
                    // SAFETY: takes a number and does not return; nobody is left who would hear of it.
                    unsafe { libc::_exit(1) };
                }
            }
            for &number in &numbers {
                // SAFETY: `self.fds` keeps the descriptor open until after the fork.
                let fd = unsafe { BorrowedFd::borrow_raw(number) };
                rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
            }
            for signal in &ignored {
                // SAFETY: setting a disposition is async-signal-safe; SIG_IGN survives exec.
                unsafe { libc::signal(signal.number(), libc::SIG_IGN) };
            }
            Ok(())
        };
        // SAFETY: the closure runs between fork and exec and makes only async-signal-safe calls (fcntl,
        // signal, getppid, _exit, and prctl, which is a bare system call) on values made before the fork;
        // it neither allocates nor locks.
        unsafe { command.pre_exec(prepare) };
        let mut process = command.spawn().map_err(|source| SpawnError::Start {
            program: self.program.clone(),
            source,
        })?;
        // Only now may the parent's copies go.
        drop(self.fds);
        let pid = process.id();
        let pidfd = Pid::from_raw(pid.cast_signed())
            .ok_or(Errno::SRCH)
            .and_then(|raw| rustix::process::pidfd_open(raw, PidfdFlags::empty()));
        // The child has not been reaped, so its id is still its own.
        match pidfd {
            Ok(pidfd) => {
                let stderr = process.stderr.take().map(OwnedFd::from);
                let process = Arc::new(Process {
                    pid,
                    pidfd,
                    status: Mutex::new(None),
                });
                started.processes.retain(|known| known.strong_count() > 0);
                started.processes.push(Arc::downgrade(&process));
                Ok(Child { process, stderr })
            }
            Err(errno) => {
                // Without a pidfd nobody could watch it: undo the start.
                let _ = process.kill();
                let _ = process.wait();
                Err(OsError::of("watch a new process")(errno).into())
            }
        }
    }
}

/// A process started here. Killed and reaped when dropped alive.
///
/// All methods take `&self`: one thread may wait while others signal.
#[derive(Debug)]
pub struct Child {
    process: Arc<Process>,
    stderr: Option<OwnedFd>,
}

/// What a child's owner and [`kill_all`] share.
#[derive(Debug)]
struct Process {
    pid: u32,
    pidfd: OwnedFd,
    /// Set in the same step that reaps.
    status: Mutex<Option<ExitStatus>>,
}

/// The children of this process that somebody owns.
struct Started {
    processes: Vec<Weak<Process>>,
    is_over: bool,
}

/// Between two looks at the list while a child is being started.
const LOCK_PAUSE: Duration = Duration::from_millis(1);

static STARTED: Mutex<Started> = Mutex::new(Started {
    processes: Vec::new(),
    is_over: false,
});

/// Ends every child that was started here with KILL, whoever owns it, and waits until all are reaped; false if
/// the deadline passed first. No child can be started from then on: for a program that is about to exit at
/// once, while its other threads go on.
///
/// A child that somebody stopped between fork and exec keeps its start, and the list, to itself: then the answer is false after the
/// deadline, and a parent-death signal ([`Spawn::end_with_thread`]) is what ends that child.
pub fn kill_all(deadline: Deadline) -> bool {
    let mut started = loop {
        match STARTED.try_lock() {
            Ok(started) => break started,
            Err(TryLockError::Poisoned(started)) => break started.into_inner(),
            Err(TryLockError::WouldBlock) if deadline.has_passed() => return false,
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
        }
    };
    started.is_over = true;
    let processes: Vec<Arc<Process>> = started.processes.iter().filter_map(Weak::upgrade).collect();
    drop(started);
    for process in &processes {
        // One that has ended needs none; one that cannot be signalled is waited for all the same.
        let _ = process.signal(Signal::KILL);
    }
    // Each is looked at, also when one of them does not end.
    let is_left = |process: &&Arc<Process>| matches!(process.wait(deadline), Ok(None));
    processes.iter().filter(is_left).count() == 0
}

impl Child {
    /// Its process id, for reports; signals go by pidfd.
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// The reading end of its standard error; `None` after the first call.
    pub fn take_stderr(&mut self) -> Option<OwnedFd> {
        self.stderr.take()
    }

    /// How it ended, if it has; reaps it.
    ///
    /// # Errors
    /// The kernel does not know the child (somebody else reaped it, against R5).
    pub fn try_wait(&self) -> Result<Option<ExitStatus>, OsError> {
        self.process.try_wait()
    }

    /// Waits until it has ended and reaps it; `None` if the deadline passed first.
    ///
    /// # Errors
    /// As [`Child::try_wait`].
    pub fn wait(&self, deadline: Deadline) -> Result<Option<ExitStatus>, OsError> {
        self.process.wait(deadline)
    }

    /// Sends it `signal`; false if it had ended already.
    ///
    /// # Errors
    /// The kernel refuses (the child changed its user).
    pub fn signal(&self, signal: Signal) -> Result<bool, OsError> {
        self.process.signal(signal)
    }
}

impl Process {
    fn try_wait(&self) -> Result<Option<ExitStatus>, OsError> {
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        if status.is_none() {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            let end = loop {
                match rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), options) {
                    Err(Errno::INTR) => {}
                    other => break other.map_err(OsError::of("reap a child"))?,
                }
            };
            *status = end.and_then(|end| match (end.exit_status(), end.terminating_signal()) {
                (Some(code), _) => Some(ExitStatus::Code(code)),
                (None, Some(number)) => Some(ExitStatus::Signal(Signal::from_number(number))),
                (None, None) => None,
            });
        }
        Ok(*status)
    }

    fn wait(&self, deadline: Deadline) -> Result<Option<ExitStatus>, OsError> {
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(Some(status));
            }
            if !wait_readable(&[self.pidfd.as_fd()], deadline)?[0] {
                return self.try_wait();
            }
        }
    }

    fn signal(&self, signal: Signal) -> Result<bool, OsError> {
        let action = "signal a child";
        let Some(number) = rustix::process::Signal::from_named_raw(signal.number()) else {
            return Err(OsError {
                action,
                source: io::ErrorKind::InvalidInput.into(),
            });
        };
        match rustix::process::pidfd_send_signal(&self.pidfd, number) {
            Ok(()) => Ok(true),
            Err(Errno::SRCH) => Ok(false),
            Err(errno) => Err(OsError::of(action)(errno)),
        }
    }
}

/// The pidfd: readable once the process has ended. For [`crate::poll::wait_readable`], which watches many
/// children at once, together with whatever else a monitor waits for.
impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.process.pidfd.as_fd()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if let Ok(None) = self.try_wait() {
            let _ = self.signal(Signal::KILL);
            let _ = self.wait(Deadline::after(DROP_WAIT));
        }
    }
}

/// Why an inherited descriptor could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum InheritedFdError {
    /// The parent passed none under this name.
    #[error("no descriptor was inherited under the name {name}")]
    Absent {
        /// The name asked for.
        name: String,
    },
    /// It was taken before.
    #[error("the inherited descriptor {name} was taken before")]
    Taken {
        /// The name asked for.
        name: String,
    },
    /// The environment names a descriptor that is not the one the parent passed.
    #[error("the environment announces a descriptor {name} that this process did not inherit")]
    NotInherited {
        /// The name asked for.
        name: String,
    },
}

/// Takes the descriptor that the parent passed under `name` ([`Spawn::pass_fd`]); close-on-exec from here.
///
/// # Errors
/// There is none, or it was taken before.
pub fn inherited_fd(name: &str) -> Result<OwnedFd, InheritedFdError> {
    static TAKEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    if taken.contains(name) {
        return Err(InheritedFdError::Taken {
            name: name.to_owned(),
        });
    }
    let Ok(text) = std::env::var(variable(name)) else {
        return Err(InheritedFdError::Absent {
            name: name.to_owned(),
        });
    };
    let not_inherited = || InheritedFdError::NotInherited {
        name: name.to_owned(),
    };
    let announced = Announced::parse(&text).ok_or_else(not_inherited)?;
    if announced.number <= 2 {
        return Err(not_inherited());
    }
    // SAFETY: used for one fstat and one fcntl below; a closed number makes them fail.
    let borrowed = unsafe { BorrowedFd::borrow_raw(announced.number) };
    let same = Announced::of(borrowed).is_ok_and(|found| found == announced);
    // A descriptor that this process opened itself is close-on-exec; an inherited one is not, yet.
    let open = rustix::io::fcntl_getfd(borrowed).is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC));
    if !same || !open || rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC).is_err() {
        return Err(not_inherited());
    }
    taken.insert(name.to_owned());
    // SAFETY: the parent announced this very descriptor (same file, not opened by this process) for this
    // process to own, and `TAKEN` lets it be taken once.
    Ok(unsafe { OwnedFd::from_raw_fd(announced.number) })
}

/// The identity of a passed descriptor: its number and the file behind it, so that a variable inherited
/// further down is not mistaken for a descriptor.
#[derive(PartialEq, Eq)]
struct Announced {
    number: RawFd,
    device: u64,
    inode: u64,
}

impl Announced {
    fn of(fd: BorrowedFd<'_>) -> Result<Self, OsError> {
        let stat = rustix::fs::fstat(fd).map_err(OsError::of("identify a descriptor"))?;
        Ok(Self {
            number: fd.as_raw_fd(),
            device: stat.st_dev,
            inode: stat.st_ino,
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let announced = Self {
            number: parts.next()?.parse().ok()?,
            device: parts.next()?.parse().ok()?,
            inode: parts.next()?.parse().ok()?,
        };
        parts.next().is_none().then_some(announced)
    }
}

impl fmt::Display for Announced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.number, self.device, self.inode)
    }
}

fn variable(name: &str) -> String {
    format!("DENOISED_FD_{}", name.to_ascii_uppercase())
}

/// Sends this process a signal, as a user would.
#[cfg(test)]
pub(crate) fn signal_self(signal: Signal) {
    let number = rustix::process::Signal::from_named_raw(signal.number()).expect("a named signal");
    rustix::process::kill_process(rustix::process::getpid(), number).expect("may signal itself");
}
