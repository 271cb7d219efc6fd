//! What ends a command early: the text for a person, the code for a script.

use denoised_executor::ExecutorError;
use denoised_types::{ExitCode, Failure, FailureCode};
use serde_json::json;
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
    /// Pictures failed; `--json` has told each one's failure.
    Pictures {
        /// The first of them.
        first: Box<Error>,
        /// How many.
        n_failed: usize,
        /// Of how many.
        n_pictures: usize,
    },
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
            Self::Pictures { first, .. } => first.code(),
        }
    }

    /// What `--json` prints for it.
    pub(crate) fn to_json_line(&self) -> String {
        let document = json!({"error": {"code": self.code(), "message": self.to_string()}});
        format!("{document}\n")
    }

    /// Whether the command's own `--json` output has told it already.
    pub(crate) fn is_told_in_json(&self) -> bool {
        match self {
            Self::Pictures { .. } | Self::Difference(_) => true,
            Self::Failure(_) | Self::Output(_) => false,
        }
    }

    /// The program's exit code.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Self::Failure(failure) => failure.code.into(),
            Self::Output(_) => ExitCode::Output,
            Self::Difference(_) => ExitCode::Failed,
            Self::Pictures { first, .. } => first.exit_code(),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failure(failure) => failure.fmt(f),
            Self::Output(message) | Self::Difference(message) => f.write_str(message),
            Self::Pictures {
                first, n_pictures: 1, ..
            } => first.fmt(f),
            Self::Pictures {
                first,
                n_failed,
                n_pictures,
            } => write!(f, "{n_failed} of {n_pictures} pictures failed: {first}"),
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
