//! Identity of a message.

use denoised_types::{CallId, Epoch, Rank, TensorDType};
use serde::{Deserialize, Serialize};

/// Version of this crate's messages. Raised whenever one changes; peers of different versions refuse each other at the handshake
/// and at every message.
pub const PROTOCOL_VERSION: u16 = 5;

/// Bytes of an encoded [`Header`].
pub const HEADER_BYTES: usize = 24;

/// First bytes of every message, in both directions: fixed-size, little-endian, in the order of the fields. This layout is the same
/// in all versions, so that a message of another version can still be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

impl Header {
    /// The encoded header.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..2].copy_from_slice(&self.version.to_le_bytes());
        bytes[2..6].copy_from_slice(&self.epoch.0.to_le_bytes());
        bytes[6..14].copy_from_slice(&self.call_id.0.to_le_bytes());
        bytes[14..16].copy_from_slice(&self.rank.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.deadline_ns.to_le_bytes());
        bytes
    }

    /// The header with these bytes. Any bytes are a header; what its fields mean is checked by whoever uses them.
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Self {
        let part = |at: usize, len: usize| {
            bytes[at..at + len]
                .iter()
                .rev()
                .fold(0u64, |value, &byte| value << 8 | u64::from(byte))
        };
        Self {
            version: part(0, 2) as u16,
            epoch: Epoch(part(2, 4) as u32),
            call_id: CallId(part(6, 8)),
            rank: Rank(part(14, 2) as u16),
            deadline_ns: part(16, 8),
        }
    }
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
