//! Replies of the methods that every worker has.

use crate::DecodeError;
use denoised_types::Rank;
use serde::{Deserialize, Serialize};

/// Reply of the method `memory`: what the worker's process holds. In `uni` that is the whole program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerMemory {
    /// Everything mapped and present, in bytes.
    pub rss_bytes: u64,
    /// As `rss_bytes`, but each shared page counts by its share of the processes that map it.
    pub pss_bytes: u64,
    /// Pages that no other process maps, in bytes.
    pub private_bytes: u64,
}

/// Reply of the method `status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Who.
    pub rank: Rank,
    /// Its process.
    pub pid: u32,
    /// Threads it computes with, where the executor set them.
    pub n_threads: Option<u32>,
    /// Waves carried out so far.
    pub n_waves: u64,
    /// Methods run so far, this one not counted.
    pub n_calls: u64,
    /// What it holds.
    pub memory: WorkerMemory,
}

impl WorkerStatus {
    /// The reply's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        crate::codec::body(self)
    }

    /// The status in a reply.
    ///
    /// # Errors
    /// The bytes are no status.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
        crate::codec::decode("worker status", bytes)
    }
}

impl WorkerMemory {
    /// The reply's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        crate::codec::body(self)
    }

    /// The memory in a reply.
    ///
    /// # Errors
    /// The bytes are no such reply.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
        crate::codec::decode("worker memory", bytes)
    }
}
