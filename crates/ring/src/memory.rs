//! A ring's memory: made once, handed to the peers as a descriptor, turned into a writer or a reader.

use crate::doorbell::Doorbell;
use crate::error::AttachError;
use crate::layout::{
    ADMITTED, DATA_OFFSET, FREE, LAYOUT_VERSION, MAX_READERS, READING, RING_MAGIC, RingSpec,
};
use crate::reader::Reader;
use crate::region::Region;
use crate::sync::Ordering;
use crate::writer::Writer;
use denoised_os::OsError;
use denoised_os::memfd::{Access, SealedMemory};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The memory of one ring in this process.
#[derive(Debug)]
pub struct RingMemory {
    memory: SealedMemory,
    region: Arc<Region>,
    spec: RingSpec,
}

impl RingMemory {
    /// Makes a ring with readers `0..n_readers` admitted: each sees every record from the first on,
    /// whenever it attaches. `name` shows in `/proc/<pid>/maps` and in errors.
    ///
    /// # Errors
    /// [`AttachError::BadSpec`], or [`AttachError::Memory`] if there is not enough of it.
    pub fn create(name: &str, spec: RingSpec, n_readers: usize) -> Result<Self, AttachError> {
        if let Some(what) = spec.fault() {
            return Err(AttachError::BadSpec { what });
        }
        if n_readers > MAX_READERS {
            return Err(AttachError::BadSpec {
                what: "a ring has at most 64 readers",
            });
        }
        let memory = SealedMemory::create(name, spec.total_bytes())?;
        let region = map(&memory, spec)?;
        let control = region.control();
        for line in &control.readers.0[..n_readers] {
            line.state.store(ADMITTED, Ordering::Relaxed);
        }
        control
            .fixed
            .capacity_bytes
            .store(spec.capacity_bytes as u64, Ordering::Relaxed);
        control.fixed.version.store(LAYOUT_VERSION, Ordering::Relaxed);
        control.fixed.magic.store(RING_MAGIC, Ordering::Release);
        Ok(Self {
            memory,
            region: Arc::new(region),
            spec,
        })
    }

    /// Takes over the memory of a ring that another process made.
    ///
    /// # Errors
    /// [`AttachError::Memory`] if it is not sealed, [`AttachError::BadHeader`] if it is no ring of its size.
    pub fn attach(fd: OwnedFd) -> Result<Self, AttachError> {
        let memory = SealedMemory::from_fd(fd)?;
        // The size alone gives the capacity; the header only has to agree (R6).
        let capacity_bytes = memory.bytes().saturating_sub(DATA_OFFSET);
        let spec = RingSpec { capacity_bytes };
        if spec.fault().is_some() {
            return Err(AttachError::BadHeader {
                what: "the size is no ring's",
            });
        }
        let region = map(&memory, spec)?;
        let fixed = &region.control().fixed;
        if fixed.magic.load(Ordering::Acquire) != RING_MAGIC {
            return Err(AttachError::BadHeader {
                what: "the magic is not a ring's",
            });
        }
        if fixed.version.load(Ordering::Relaxed) != LAYOUT_VERSION {
            return Err(AttachError::BadHeader {
                what: "the layout is of another version",
            });
        }
        if fixed.capacity_bytes.load(Ordering::Relaxed) != capacity_bytes as u64 {
            return Err(AttachError::BadHeader {
                what: "the capacity does not match the size",
            });
        }
        Ok(Self {
            memory,
            region: Arc::new(region),
            spec,
        })
    }

    /// A descriptor for a peer to [attach](RingMemory::attach) to.
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

    /// Size of the ring.
    pub fn spec(&self) -> RingSpec {
        self.spec
    }

    /// Takes the ring's only writer. Every record will also ring `doorbell`.
    ///
    /// # Errors
    /// [`AttachError::WriterTaken`]: it can be taken once in the life of the ring, by one process.
    pub fn writer(&self, doorbell: Option<Doorbell>) -> Result<Writer, AttachError> {
        if self.region.control().fixed.writer_taken.swap(1, Ordering::AcqRel) != 0 {
            return Err(AttachError::WriterTaken);
        }
        if self.region.control().tail.tail.load(Ordering::Acquire) != 0 {
            return Err(AttachError::BadHeader {
                what: "the ring has records but never had a writer",
            });
        }
        Ok(Writer::new(Arc::clone(&self.region), self.spec, doorbell))
    }

    /// Takes the reader's place `reader_idx`.
    ///
    /// # Errors
    /// [`AttachError::NotAdmitted`], or [`AttachError::ReaderTaken`]: it can be taken once.
    pub fn reader(&self, reader_idx: usize) -> Result<Reader, AttachError> {
        let Some(line) = self.region.control().readers.0.get(reader_idx) else {
            return Err(AttachError::NotAdmitted { reader_idx });
        };
        match line
            .state
            .compare_exchange(ADMITTED, READING, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => Ok(Reader::new(Arc::clone(&self.region), self.spec, reader_idx)),
            Err(FREE) => Err(AttachError::NotAdmitted { reader_idx }),
            Err(_) => Err(AttachError::ReaderTaken { reader_idx }),
        }
    }
}

impl AsFd for RingMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// Maps a ring of this size, present in the page table from the start.
fn map(memory: &SealedMemory, spec: RingSpec) -> Result<Region, AttachError> {
    let mapping = memory.map(Access::ReadWrite)?;
    mapping.prefault()?;
    Region::new(mapping, spec.capacity_bytes).ok_or(AttachError::BadHeader {
        what: "the memory is shorter than its ring",
    })
}
