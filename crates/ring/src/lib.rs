//! Shared memory between the processes of one world: a broadcast byte ring, an arena for large bodies,
//! a doorbell to wake a reader of many rings, and stamps of progress.
//!
//! Knows nothing of messages, ranks, processes or how a descriptor travels.
//!
//! # The ring
//! One writer, up to [`MAX_READERS`] readers, records of any length up to a limit, no locks. Every reader
//! sees every record from its admission on, in order. A writer waits for the slowest reader, with a
//! deadline, and names it; a reader known to be dead is evicted and no longer waited for.
//!
//! - R1. Only the writer stores `tail` and record bytes; only reader `i` stores cursor `i`.
//! - R2. A record is filled before the Release store of `tail` that publishes it. A writer that dies
//!   before leaves nothing visible.
//! - R3. Bytes are reused only once the cursor of every admitted, living reader has passed them.
//! - R4. Whoever announces a change stores it, fences, and rings only if somebody sleeps: first clear
//!   the sleepers, then bump the word they sleep on, then wake. Whoever sleeps announces itself, fences,
//!   and looks once more (`alarm.rs`, the only place with this protocol; checked with loom).
//! - R5. Every write to a word of sleepers is a read-modify-write.
//! - R6. Sizes come from the descriptor and its seals; what peers write is checked before it is used. A
//!   wrong record is an error, a wild cursor is not believed.
//! - R7. Nothing here logs or panics, and no wait is without a deadline.
//!
//! ```
//! use denoised_os::Deadline;
//! use denoised_ring::{RingMemory, RingSpec, Wait};
//!
//! let soon = Deadline::after_ms(10_000);
//! // One process makes the memory, with readers 0 and 1 admitted from the first record on.
//! let memory = RingMemory::create("commands", RingSpec { capacity_bytes: 1 << 20 }, 2)?;
//! let mut writer = memory.writer(None)?;
//! // The others attach to the descriptor it hands them.
//! let mut first = RingMemory::attach(memory.fd()?)?.reader(0)?;
//! let mut second = RingMemory::attach(memory.fd()?)?.reader(1)?;
//!
//! writer.write(&[b"step ", b"7"], soon)?;
//! assert_eq!(&*first.read(Wait::Sleep, soon)?, b"step 7");
//! let record = second.read(Wait::Sleep, soon)?; // in place; dropping it gives the bytes back
//! assert_eq!(&record[..4], b"step");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Many rings, one reader
//! An executor reads one ring per worker. It makes a [`Board`], gives each worker's [`Writer`] its
//! [`Doorbell`], and waits in [`DoorbellWaiter::wait`] with a closure that looks at all rings. Its own
//! threads ring the same doorbell after they changed something that closure looks at.
//!
//! # The arena
//! Bodies too long for a record lie in an arena that their sender owns; the record carries an
//! [`ArenaRef`]. The owner writes a block in place, publishes it to a set of holders, and gets the memory
//! back when the last of them drops its [`ArenaLease`]. A dead holder is reaped.
//!
//! # How much memory
//! [`total_bytes`] is the formula; nothing else here takes shared memory. [`denoised_os::memory_budget`]
//! compares it with what is left, and each creation does so again for its own part.

// The models use the ring and the doorbell only.
#![cfg_attr(loom, allow(dead_code))]

mod alarm;
mod error;
mod layout;
mod region;
mod sync;

mod reader;
mod writer;

#[cfg(not(loom))]
mod arena;
#[cfg(not(loom))]
pub mod bench;
mod doorbell;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod stamp;

#[cfg(all(loom, test))]
mod loom_tests;

pub use alarm::Wait;
#[cfg(not(loom))]
pub use arena::{ArenaBlock, ArenaError, ArenaHolder, ArenaLease, ArenaOwner, ArenaReaper, ArenaRef};
pub use doorbell::{Doorbell, DoorbellWaiter};
pub use error::{AttachError, RingError};
pub use layout::{ArenaSpec, INLINE_LIMIT_BYTES, MAX_READERS, RegionSpec, RingSpec, total_bytes};
#[cfg(not(loom))]
pub use memory::RingMemory;
pub use reader::{Reader, ReaderStats, Record};
#[cfg(not(loom))]
pub use stamp::{Board, Progress, Stamp};
#[cfg(not(loom))]
pub use writer::Reservation;
pub use writer::{Canceller, Evictor, Writer, WriterStats};
