//! What ends a command early: the text for a person, the code for a script.

use denoised_executor::ExecutorError;
use denoised_types::{ExitCode, Failure, FailureCode};
use std::fmt;

/// Why a command failed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Error {
    /// A failure of the request, the model or a worker.
    Failure(Failure),
    /// An output could not be written.
    Output(String),
    /// `verify` found a difference; the table has said which.
    Difference(String),
}

impl Error {
    /// Arguments or input files that make no sense.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::Failure(Failure::new(FailureCode::InvalidRequest, message))
    }

    /// The code that scripts see in `--json`.
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::Failure(failure) => failure.code.as_str(),
            Self::Output(_) => "output",
            Self::Difference(_) => "difference",
        }
    }

    /// The program's exit code.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Self::Failure(failure) => failure.code.into(),
            Self::Output(_) => ExitCode::Output,
            Self::Difference(_) => ExitCode::Failed,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failure(failure) => failure.fmt(f),
            Self::Output(message) | Self::Difference(message) => f.write_str(message),
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

impl From<ExecutorError> for Error {
    fn from(error: ExecutorError) -> Self {
        Self::Failure(error.into())
    }
}
