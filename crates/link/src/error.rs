//! What can go wrong on a path.

use denoised_os::{OsError, memory_budget::NotEnoughMemory, socket::ChannelError};
use denoised_ring::{AttachError, RingError};
use denoised_types::Rank;
use denoised_wire::DecodeError;

/// Why a message was not sent or received. After a failed send nothing of it arrives anywhere.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The deadline passed while there was no room, because of a reader that is behind.
    #[error("no room on the path before the deadline{}", behind(.laggard))]
    Full {
        /// The rank that is furthest behind, where one is to blame.
        laggard: Option<Rank>,
    },
    /// The deadline passed before there was a message.
    #[error("no message before the deadline")]
    TimedOut,
    /// The wait was interrupted, by an [`crate::Interrupter`] or by its own callback.
    #[error("the wait was interrupted")]
    Interrupted,
    /// The peer is gone or has closed the path.
    #[error("the peer is gone")]
    Closed,
    /// The message can never fit.
    #[error("message of {message_bytes} bytes exceeds the limit of {limit_bytes} bytes ({limited_by})")]
    TooLarge {
        /// Bytes of the message with its blobs, or of one blob.
        message_bytes: u64,
        /// Largest that fits.
        limit_bytes: u64,
        /// The setting that sets the limit.
        limited_by: &'static str,
    },
    /// The path holds what no sender writes.
    #[error("the path is damaged: {what}")]
    Corrupt {
        /// What is wrong.
        what: String,
    },
    /// The kernel refused.
    #[error("{0}")]
    Refused(String),
}

fn behind(laggard: &Option<Rank>) -> String {
    laggard
        .map(|rank| format!(": rank {rank} is behind"))
        .unwrap_or_default()
}

impl From<RingError> for LinkError {
    fn from(error: RingError) -> Self {
        let rank = |idx: usize| u16::try_from(idx).ok().map(Rank);
        match error {
            RingError::TooLarge {
                record_bytes,
                limit_bytes,
            } => Self::TooLarge {
                message_bytes: record_bytes as u64,
                limit_bytes: limit_bytes as u64,
                limited_by: "ring record",
            },
            RingError::Full { laggard_idx } | RingError::Laggard { laggard_idx } => Self::Full {
                laggard: rank(laggard_idx),
            },
            RingError::TimedOut => Self::TimedOut,
            RingError::Closed | RingError::NoReaders | RingError::Evicted => Self::Closed,
            RingError::Cancelled => Self::Interrupted,
            RingError::Corrupt { .. } => Self::Corrupt {
                what: error.to_string(),
            },
        }
    }
}

impl From<ChannelError> for LinkError {
    fn from(error: ChannelError) -> Self {
        match error {
            ChannelError::Closed => Self::Closed,
            ChannelError::TimedOut => Self::TimedOut,
            ChannelError::BadSize {
                message_bytes,
                limit_bytes,
            } => Self::TooLarge {
                message_bytes: message_bytes as u64,
                limit_bytes: limit_bytes as u64,
                limited_by: "control message",
            },
            ChannelError::TooManyFds { .. } => Self::Corrupt {
                what: error.to_string(),
            },
            ChannelError::Os(error) => Self::Refused(error.to_string()),
        }
    }
}

/// Why a path could not be made or taken over.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A size outside the limits.
    #[error("{what} of {value} is outside its limits ({limits})")]
    BadSpec {
        /// Name of the setting.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What would do.
        limits: &'static str,
    },
    /// There is not enough memory for it.
    #[error(transparent)]
    Memory(#[from] NotEnoughMemory),
    /// Shared memory could not be made or taken over.
    #[error("shared memory of the link: {0}")]
    Attach(#[from] AttachError),
    /// The kernel refused.
    #[error(transparent)]
    Os(#[from] OsError),
    /// The peer did not speak as it should.
    #[error("handshake: {0}")]
    Link(#[from] LinkError),
    /// The peer's message was not understood.
    #[error("handshake: {0}")]
    Decode(#[from] DecodeError),
    /// The peer spoke out of turn.
    #[error("handshake: expected {expected}, got {got}")]
    Unexpected {
        /// What should have come.
        expected: &'static str,
        /// What came.
        got: String,
    },
}
