//! What can go wrong with a ring.

use denoised_os::OsError;
use denoised_os::memfd::MemoryError;

/// Why a record was not written or read. After any of these but [`RingError::Corrupt`],
/// [`RingError::Closed`] and [`RingError::Evicted`] the ring goes on as if nothing had been tried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The record is longer than the ring's limit; nothing was written. Send it through an arena.
    #[error("record of {record_bytes} bytes exceeds the ring's limit of {limit_bytes} bytes")]
    TooLarge {
        /// Its length.
        record_bytes: usize,
        /// The limit, see [`crate::RingSpec::record_limit_bytes`].
        limit_bytes: usize,
    },
    /// No room now, and no wait was wanted.
    #[error("the ring is full: reader {laggard_idx} is behind")]
    Full {
        /// The reader furthest behind.
        laggard_idx: usize,
    },
    /// The deadline passed before there was room.
    #[error("no room in the ring before the deadline: reader {laggard_idx} is behind")]
    Laggard {
        /// The reader furthest behind.
        laggard_idx: usize,
    },
    /// The deadline passed before there was a record.
    #[error("no record before the deadline")]
    TimedOut,
    /// The writer closed the ring, and all its records have been read.
    #[error("the ring is closed")]
    Closed,
    /// Every reader has left or was evicted: nobody would read the record. That readers left is noticed
    /// when the writer next looks for room, at the latest once the ring is full.
    #[error("the ring has no reader left")]
    NoReaders,
    /// The wait was cancelled with a [`crate::Canceller`].
    #[error("the wait was cancelled")]
    Cancelled,
    /// This reader was taken for dead and removed; it has missed records.
    #[error("this reader was evicted from the ring")]
    Evicted,
    /// The ring's memory holds what no writer writes. The ring is unusable for this reader.
    #[error("the ring is damaged at position {position}: {what}")]
    Corrupt {
        /// Byte position of the record.
        position: u64,
        /// What is wrong with it.
        what: &'static str,
    },
}

/// Why shared memory was not made or not taken over.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// A size outside the documented limits.
    #[error("bad size for shared memory: {what}")]
    BadSpec {
        /// Which rule it breaks.
        what: &'static str,
    },
    /// The memory is not what its header says, or another version's.
    #[error("not usable shared memory: {what}")]
    BadHeader {
        /// What is wrong.
        what: &'static str,
    },
    /// The ring has a writer, or had one.
    #[error("the ring's writer is taken")]
    WriterTaken,
    /// The reader's place is taken, or its reader has left or was evicted.
    #[error("place of reader {reader_idx} is taken or has been given up")]
    ReaderTaken {
        /// Its place.
        reader_idx: usize,
    },
    /// The writer has not admitted this reader.
    #[error("reader {reader_idx} is not admitted to the ring")]
    NotAdmitted {
        /// Its place.
        reader_idx: usize,
    },
    /// The doorbell has a waiter.
    #[error("the doorbell's waiter is taken")]
    WaiterTaken,
    /// Memory could not be made, taken over or mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel refused.
    #[error(transparent)]
    Os(#[from] OsError),
}
