//! Identity of a message.

use denoised_types::{CallId, Epoch, Rank, TensorDType};
use serde::{Deserialize, Serialize};

/// Version of this crate's messages. Raised whenever one changes; peers of different versions refuse each other at the handshake
/// and at every message.
pub const PROTOCOL_VERSION: u16 = 1;

/// First bytes of every message, in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// [`PROTOCOL_VERSION`] of the sender.
    pub version: u16,
    /// Incarnation of the world; other epochs are dropped.
    pub epoch: Epoch,
    /// The call this belongs to. Events that belong to no call carry 0.
    pub call_id: CallId,
    /// Events: who sent it. Commands: 0, since they are broadcast.
    pub rank: Rank,
    /// Commands: absolute deadline on the host's monotonic clock in nanoseconds, 0 for none; a worker answers an expired command
    /// with `DeadlineExceeded` instead of carrying it out. Events: 0.
    pub deadline_ns: u64,
}

/// Position of a blob in the list that travels with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlobIdx(pub u16);

/// A tensor whose elements are a blob: row-major, little-endian.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorMeta {
    /// Name in reference cases' words.
    pub name: String,
    /// Element type.
    pub dtype: TensorDType,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
    /// The elements.
    pub blob: BlobIdx,
}
