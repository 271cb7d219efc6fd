//! What a worker tells its executor.

use crate::{BlobIdx, TensorMeta};
use denoised_types::{Failure, PhaseTimes, RequestId, Resolved};
use serde::{Deserialize, Serialize};

/// How far a starting worker has come. Shown by start-up errors and progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StartPhase {
    /// The process exists; nothing was heard from it.
    Spawned,
    /// It has attached to the shared memory.
    Attached,
    /// It opens its device.
    OpeningDevice,
    /// It reads the checkpoint's configs.
    ReadingModel,
    /// It builds the packed weights, or waits for the rank that does.
    PreparingWeights {
        /// Bytes done.
        done_bytes: u64,
        /// Bytes in all; 0 when unknown.
        total_bytes: u64,
    },
    /// It computes one small picture.
    WarmingUp,
    /// It can take commands.
    Ready,
}

impl std::fmt::Display for StartPhase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::Spawned => f.write_str("spawning"),
            Self::Attached => f.write_str("attaching"),
            Self::OpeningDevice => f.write_str("opening the device"),
            Self::ReadingModel => f.write_str("reading the model"),
            Self::PreparingWeights { total_bytes: 0, .. } => f.write_str("preparing weights"),
            Self::PreparingWeights {
                done_bytes,
                total_bytes,
            } => {
                // Any numbers may come from a worker.
                let percent = u128::from(done_bytes) * 100 / u128::from(total_bytes);
                write!(f, "preparing weights, {percent} % done")
            }
            Self::WarmingUp => f.write_str("warming up"),
            Self::Ready => f.write_str("ready"),
        }
    }
}

/// A finished request without its bulk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GeneratedMeta {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Frames; 1 for a picture.
    pub n_frames: u32,
    /// `n_frames * height * width * 3` bytes of RGB.
    pub rgb: BlobIdx,
    /// Arguments with defaults filled in.
    pub resolved: Resolved,
    /// Where the time went.
    pub times: PhaseTimes,
}

/// Messages up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A member of a wave was begun.
    RequestStarted {
        /// Which.
        request_id: RequestId,
    },
    /// A step of a request was done.
    Step {
        /// Which.
        request_id: RequestId,
        /// Steps that are done now, `1..=n_steps`.
        n_done: u32,
        /// Steps there will be.
        n_steps: u32,
    },
    /// A traced tensor of a request.
    Tensor {
        /// Which.
        request_id: RequestId,
        /// The tensor.
        tensor: TensorMeta,
    },
    /// A request ended on this rank. Exactly once per member.
    RequestDone {
        /// Which.
        request_id: RequestId,
        /// How.
        outcome: Result<GeneratedMeta, Failure>,
    },
    /// A call (wave or method) ended on this rank. Exactly once per call and executing rank.
    CallDone {
        /// The method's result (none for waves), or why it failed.
        outcome: Result<Option<BlobIdx>, Failure>,
    },
    /// Answer to a ping, from the control lane.
    Pong,
    /// The worker fails as a whole and is about to exit.
    Dying(Failure),
    /// The next bytes of a blob that is too large to travel at once; they are this message's only blob. The event that the blob
    /// belongs to follows on the same call, with an empty blob in its place.
    Piece {
        /// Position of the blob in the event that follows.
        of: BlobIdx,
    },
}
