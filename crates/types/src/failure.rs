//! How things fail: one code, one text, where it happened. Every error that reaches a caller becomes a [`Failure`] once.

use crate::Rank;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What kind of thing went wrong; decides HTTP status and exit code. A closed set, matched without `_`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCode {
    /// The request cannot be served by this model, whoever asks: bad size, unknown sampler, 0 steps.
    InvalidRequest,
    /// A file of the checkpoint is missing, damaged, of an unknown class or of the wrong shape.
    InvalidModel,
    /// The device named does not exist or cannot be opened.
    NoDevice,
    /// Not enough host, shared or device memory.
    OutOfMemory,
    /// A worker process ended or stopped answering.
    WorkerLost,
    /// A worker failed inside the call (an error of its own, or a panic).
    WorkerFailed,
    /// NaN or infinity in latents or picture.
    NonFinite,
    /// The caller cancelled.
    Cancelled,
    /// The deadline passed.
    DeadlineExceeded,
    /// The queue is full; try again later.
    QueueFull,
    /// The engine or executor is closed, or is closing.
    Closed,
    /// A message could not be understood: wrong version, kind or body.
    Protocol,
    /// Something that should not happen; please report it.
    Internal,
}

impl FailureCode {
    /// The code as people and machines read it, e.g. `worker_lost`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::InvalidModel => "invalid_model",
            Self::NoDevice => "no_device",
            Self::OutOfMemory => "out_of_memory",
            Self::WorkerLost => "worker_lost",
            Self::WorkerFailed => "worker_failed",
            Self::NonFinite => "non_finite",
            Self::Cancelled => "cancelled",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::QueueFull => "queue_full",
            Self::Closed => "closed",
            Self::Protocol => "protocol",
            Self::Internal => "internal",
        }
    }
}

impl fmt::Display for FailureCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// One failure: what, where and why, ready to be shown to a person.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub struct Failure {
    /// Kind.
    pub code: FailureCode,
    /// Says what happened to what, with numbers and names, and the way out where there is one. Lower case, no full stop.
    pub message: String,
    /// The rank it happened on, where one is to blame.
    pub rank: Option<Rank>,
    /// What that rank was doing: `loading model`, `step 3 of 20`.
    pub phase: Option<String>,
}

impl Failure {
    /// A failure without a place.
    pub fn new(code: FailureCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            rank: None,
            phase: None,
        }
    }

    /// The same failure, on `rank`.
    #[must_use]
    pub fn on_rank(mut self, rank: Rank) -> Self {
        self.rank = Some(rank);
        self
    }

    /// The same failure, during `phase`.
    #[must_use]
    pub fn during(mut self, phase: impl Into<String>) -> Self {
        self.phase = Some(phase.into());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(rank) = self.rank {
            write!(f, "rank {rank}: ")?;
        }
        f.write_str(&self.message)?;
        if let Some(phase) = &self.phase {
            write!(f, " (during {phase})")?;
        }
        Ok(())
    }
}

/// Exit codes of the programs. Documented in the README; never renumbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    /// All went well.
    Success = 0,
    /// A check found a difference (`verify`), or something failed that has no code of its own.
    Failed = 1,
    /// The command line or the request makes no sense.
    Usage = 2,
    /// The checkpoint cannot be used.
    InvalidModel = 3,
    /// Not enough memory.
    OutOfMemory = 4,
    /// A worker died, hung or failed.
    Worker = 5,
    /// An output could not be written.
    Output = 6,
    /// No such device.
    NoDevice = 7,
    /// Interrupted by a signal (as shells report SIGINT).
    Interrupted = 130,
}

/// What `main` may return.
impl From<ExitCode> for std::process::ExitCode {
    fn from(code: ExitCode) -> Self {
        Self::from(code as u8)
    }
}

impl From<FailureCode> for ExitCode {
    fn from(code: FailureCode) -> Self {
        match code {
            FailureCode::InvalidRequest => Self::Usage,
            FailureCode::InvalidModel => Self::InvalidModel,
            FailureCode::NoDevice => Self::NoDevice,
            FailureCode::OutOfMemory => Self::OutOfMemory,
            FailureCode::WorkerLost
            | FailureCode::WorkerFailed
            | FailureCode::DeadlineExceeded
            | FailureCode::Protocol => Self::Worker,
            FailureCode::Cancelled => Self::Interrupted,
            FailureCode::NonFinite | FailureCode::QueueFull | FailureCode::Closed | FailureCode::Internal => {
                Self::Failed
            }
        }
    }
}
