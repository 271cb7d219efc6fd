//! A page of shared memory with a doorbell and a stamp of progress per peer.

use crate::alarm::Alarm;
use crate::doorbell::{AlarmHome, Doorbell, DoorbellWaiter};
use crate::error::AttachError;
use crate::layout::{BOARD_BYTES, BOARD_MAGIC, LAYOUT_VERSION, MAX_READERS};
use crate::sync::{AtomicU32, AtomicU64, Ordering, now_ns};
use denoised_os::OsError;
use denoised_os::memfd::{Access, Mapping, SealedMemory};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

#[repr(C)]
struct Lines {
    fixed: FixedLine,
    doorbell: Alarm,
    stamps: [StampLine; MAX_READERS],
}

#[repr(C, align(128))]
struct FixedLine {
    magic: AtomicU64,
    version: AtomicU32,
    waiter_taken: AtomicU32,
}

#[repr(C, align(128))]
struct StampLine {
    at_ns: AtomicU64,
    n_marks: AtomicU64,
    note: AtomicU64,
}

const _: () = assert!(std::mem::size_of::<Lines>() == BOARD_BYTES);

struct Mapped(Mapping);

impl Mapped {
    fn lines(&self) -> &Lines {
        // SAFETY: the mapping is writable, starts on a page, has `BOARD_BYTES` bytes (checked in `map`),
        // and lives as long as `self`. `Lines` holds only atomics, for which any bytes are valid.
        unsafe { &*self.0.as_ptr().cast::<Lines>() }
    }
}

impl AlarmHome for Mapped {
    fn alarm(&self) -> &Alarm {
        &self.lines().doorbell
    }
}

/// A doorbell between processes, and the stamps of up to [`MAX_READERS`] peers.
pub struct Board {
    memory: SealedMemory,
    mapped: Arc<Mapped>,
}

/// What a peer last said of its progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// When, on the clock of [`denoised_os::now_ns`]; 0 if never.
    pub at_ns: u64,
    /// How often so far.
    pub n_marks: u64,
    /// A number of the peer's choice that it gave with the last mark.
    pub note: u64,
}

/// One peer's own stamp: it marks its progress, others look at [`Board::progress`].
pub struct Stamp {
    mapped: Arc<Mapped>,
    peer_idx: usize,
}

impl Board {
    /// Makes one, with no stamp marked.
    ///
    /// # Errors
    /// [`AttachError::Memory`].
    pub fn create(name: &str) -> Result<Self, AttachError> {
        let memory = SealedMemory::create(name, BOARD_BYTES)?;
        let mapped = map(&memory)?;
        let fixed = &mapped.lines().fixed;
        fixed.version.store(LAYOUT_VERSION, Ordering::Relaxed);
        fixed.magic.store(BOARD_MAGIC, Ordering::Release);
        Ok(Self {
            memory,
            mapped: Arc::new(mapped),
        })
    }

    /// Takes over one that another process made.
    ///
    /// # Errors
    /// [`AttachError::Memory`] if it is not sealed, [`AttachError::BadHeader`] if it is no board.
    pub fn attach(fd: OwnedFd) -> Result<Self, AttachError> {
        let memory = SealedMemory::from_fd(fd)?;
        let mapped = map(&memory)?;
        let fixed = &mapped.lines().fixed;
        if fixed.magic.load(Ordering::Acquire) != BOARD_MAGIC {
            return Err(AttachError::BadHeader {
                what: "the magic is not a board's",
            });
        }
        if fixed.version.load(Ordering::Relaxed) != LAYOUT_VERSION {
            return Err(AttachError::BadHeader {
                what: "the layout is of another version",
            });
        }
        Ok(Self {
            memory,
            mapped: Arc::new(mapped),
        })
    }

    /// A descriptor for a peer to [attach](Board::attach) to.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn fd(&self) -> Result<OwnedFd, OsError> {
        let copy = self.memory.as_fd().try_clone_to_owned();
        copy.map_err(|source| OsError {
            action: "copy a descriptor",
            source,
        })
    }

    /// A handle that rings its doorbell.
    pub fn doorbell(&self) -> Doorbell {
        Doorbell::ringing(Arc::clone(&self.mapped) as Arc<dyn AlarmHome>)
    }

    /// Takes the doorbell's only waiter.
    ///
    /// # Errors
    /// [`AttachError::WaiterTaken`]: it can be taken once in the life of the board, by one process.
    pub fn waiter(&self) -> Result<DoorbellWaiter, AttachError> {
        if self.mapped.lines().fixed.waiter_taken.swap(1, Ordering::AcqRel) != 0 {
            return Err(AttachError::WaiterTaken);
        }
        Ok(Doorbell::at(Arc::clone(&self.mapped) as Arc<dyn AlarmHome>).1)
    }

    /// The stamp of peer `peer_idx`, for that peer to mark; `None` from [`MAX_READERS`] on.
    pub fn stamp(&self, peer_idx: usize) -> Option<Stamp> {
        (peer_idx < MAX_READERS).then(|| Stamp {
            mapped: Arc::clone(&self.mapped),
            peer_idx,
        })
    }

    /// What peer `peer_idx` last said; nothing from [`MAX_READERS`] on. The fields are read one by one: a
    /// mark made at the same time may show in some of them only.
    pub fn progress(&self, peer_idx: usize) -> Progress {
        let Some(line) = self.mapped.lines().stamps.get(peer_idx) else {
            return Progress::default();
        };
        Progress {
            at_ns: line.at_ns.load(Ordering::Acquire),
            n_marks: line.n_marks.load(Ordering::Acquire),
            note: line.note.load(Ordering::Acquire),
        }
    }
}

impl Stamp {
    /// Marks progress now, with a number of the caller's choice. Costs a few stores.
    pub fn mark(&self, note: u64) {
        let line = &self.mapped.lines().stamps[self.peer_idx];
        line.note.store(note, Ordering::Release);
        line.n_marks.fetch_add(1, Ordering::Release);
        line.at_ns.store(now_ns(), Ordering::Release);
    }
}

impl std::fmt::Debug for Board {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Board")
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Stamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stamp")
            .field("peer_idx", &self.peer_idx)
            .finish_non_exhaustive()
    }
}

fn map(memory: &SealedMemory) -> Result<Mapped, AttachError> {
    if memory.bytes() != BOARD_BYTES {
        return Err(AttachError::BadHeader {
            what: "the size is no board's",
        });
    }
    let mapping = memory.map(Access::ReadWrite)?;
    mapping.prefault()?;
    Ok(Mapped(mapping))
}
