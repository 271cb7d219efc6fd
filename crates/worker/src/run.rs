//! What a program does when an executor has started it to be a worker.

use crate::{
    Ending, Registry,
    serve::{self, Home},
};
use denoised_link::{INHERITED_NAME, SetupError, WORKER_ARG, attach};
use denoised_os::{
    child::{InheritedFdError, inherited_fd},
    signal::{self, EndSignals, Signal},
    socket::Channel,
};
use denoised_types::ExitCode;
use std::io::Write;

/// Whether this process was started to be a worker: its first argument is [`WORKER_ARG`].
pub fn is_worker_invocation() -> bool {
    std::env::args_os().nth(1).is_some_and(|arg| arg == WORKER_ARG)
}

/// Takes over the inherited socket, starts the program, obeys commands until told to stop, and returns the exit code of the process:
/// 0 after a stop, the failure's code after a failed start, 5 otherwise.
///
/// Call it from `main`, once: it ignores INT (Ctrl-C is the supervisor's to obey) and catches TERM. If the executor dies, it ends
/// the process within half a second, whatever the program is doing.
pub fn run(registry: Registry) -> ExitCode {
    match try_run(registry) {
        Ok(Ending::Stopped) => ExitCode::Success,
        Ok(Ending::StartFailed(failure)) => ExitCode::from(failure.code),
        Ok(Ending::ExecutorGone) => ExitCode::Worker,
        Ok(Ending::Failed(failure)) => say(&failure),
        Err(error) => say(&error),
    }
}

/// Last words: the executor shows them with the exit status.
fn say(error: &dyn std::fmt::Display) -> ExitCode {
    // Nobody may be left to read them.
    let _ = writeln!(std::io::stderr(), "worker: {error}");
    ExitCode::Worker
}

#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error("not started by an executor: {0}")]
    NotInherited(#[from] InheritedFdError),
    #[error(transparent)]
    Os(#[from] denoised_os::OsError),
    #[error(transparent)]
    Setup(#[from] SetupError),
}

fn try_run(registry: Registry) -> Result<Ending, RunError> {
    let socket = Channel::from_fd(inherited_fd(INHERITED_NAME)?)?;
    signal::ignore(Signal::INT)?;
    let signals = EndSignals::catch(&[Signal::TERM])?;
    let end = attach(socket, Some(signals))?;
    // Otherwise `ps` and `top` show it as "exe", after the link that it was started by.
    denoised_os::process::set_thread_name(&format!("denoised:{}", end.hello.rank))?;
    Ok(serve::serve_in(Home::Process, end, registry))
}
