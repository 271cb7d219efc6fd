//! Shared memory for bodies too long for a ring: written in place by one owner, read in place by holders.
//!
//! ```text
//! 0x000           fixed line: magic, version, arena id, granule size, number of granules
//! 0x080           space alarm: the owner, asleep until memory comes back
//! 0x100 + 64*g    block line of granule g: holders, length, generation     (of the block that begins there)
//! data offset     the granules
//! ```
//! A block is a run of granules. Its holders are a set and not a count, so that giving back twice changes
//! nothing and a dead holder can be removed from all sets.
//!
//! - A1. Only the owner allocates, and only where no block is being written or held.
//! - A2. A holder reads a block only while its bit is set in the block's holders.
//! - A3. The owner writes a block only before it is published.
//! - A4. Holders map the bodies read-only; what they find in a reference or a block line is checked.

use crate::alarm::Alarm;
use crate::error::AttachError;
use crate::layout::{ARENA_MAGIC, ArenaSpec, LAYOUT_VERSION, MAX_READERS};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use denoised_os::memfd::{Access, Mapping, SealedMemory};
use denoised_os::{Deadline, OsError};
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

const BLOCK_LINES_OFFSET: usize = 256;
const BLOCK_LINE_BYTES: usize = 64;
/// The space alarm has one sleeper, the owner.
const OWNER_BIT: u64 = 1;

/// Names a published block; travels in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ArenaRef {
    /// Which arena, see [`ArenaOwner::create`].
    pub arena: u32,
    /// The block's first granule.
    pub block: u32,
    /// How often that granule has begun a block: tells this block from earlier ones.
    pub generation: u32,
    /// Bytes of the body.
    pub len: u64,
}

/// Why a block was not allocated or leased.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// Longer than the whole arena.
    #[error("body of {len} bytes exceeds the arena's limit of {limit_bytes} bytes")]
    TooLarge {
        /// Bytes wanted.
        len: usize,
        /// Bytes of the arena.
        limit_bytes: usize,
    },
    /// No room now (or, from [`ArenaOwner::allocate`], until the deadline).
    #[error("no room in the arena for {len} bytes: the largest free run has {largest_free_bytes}")]
    Full {
        /// Bytes wanted.
        len: usize,
        /// Bytes of the longest free run.
        largest_free_bytes: usize,
    },
    /// The reference belongs to another arena.
    #[error("reference to arena {found}, this is arena {expected}")]
    OtherArena {
        /// This arena.
        expected: u32,
        /// The reference's.
        found: u32,
    },
    /// The reference does not lie in the arena.
    #[error("reference to {len} bytes at block {block} is out of the arena's bounds")]
    OutOfBounds {
        /// First granule.
        block: u32,
        /// Bytes.
        len: u64,
    },
    /// The block is not this holder's: it was given back, or never published to it.
    #[error("block {block} of generation {generation} is not held by holder {holder_idx}")]
    NotHeld {
        /// First granule.
        block: u32,
        /// Generation of the reference.
        generation: u32,
        /// Who asked.
        holder_idx: usize,
    },
    /// The block has been leased by this holder before; clone that lease.
    #[error("block {block} of generation {generation} was leased before")]
    LeasedBefore {
        /// First granule.
        block: u32,
        /// Generation of the reference.
        generation: u32,
    },
}

#[repr(C, align(128))]
struct FixedLine {
    magic: AtomicU64,
    granule_bytes: AtomicU64,
    n_granules: AtomicU64,
    version: AtomicU32,
    arena: AtomicU32,
}

#[repr(C, align(64))]
struct BlockLine {
    /// A bit per holder.
    holders: AtomicU64,
    /// Bytes of the body.
    len: AtomicU64,
    generation: AtomicU32,
}

const _: () = {
    assert!(size_of::<FixedLine>() == 128 && size_of::<BlockLine>() == BLOCK_LINE_BYTES);
    assert!(size_of::<FixedLine>() + size_of::<Alarm>() == BLOCK_LINES_OFFSET);
};

/// An arena mapped in this process: the lines writable, the bodies as far as `data` allows.
struct Mapped {
    lines: Mapping,
    data: Mapping,
    spec: ArenaSpec,
    arena: u32,
}

impl Mapped {
    fn fixed(&self) -> &FixedLine {
        // SAFETY: `map` made `lines` long enough and writable, it starts on a page and lives as long as
        // `self`. Atomics are valid with any bytes.
        unsafe { &*self.lines.as_ptr().cast::<FixedLine>() }
    }

    fn space(&self) -> &Alarm {
        // SAFETY: as above; 128 bytes from the start lies the alarm, aligned to 128.
        unsafe { &*self.lines.as_ptr().add(size_of::<FixedLine>()).cast::<Alarm>() }
    }

    fn block_lines(&self) -> &[BlockLine] {
        // SAFETY: as above; `data_offset`, the length of `lines`, leaves room for a line per granule.
        unsafe {
            let first = self.lines.as_ptr().add(BLOCK_LINES_OFFSET).cast::<BlockLine>();
            std::slice::from_raw_parts(first, self.spec.n_granules)
        }
    }

    fn granules_for(&self, len: usize) -> usize {
        len.div_ceil(self.spec.granule_bytes).max(1)
    }

    /// The bytes of granule `block` on, as far as `len` goes; `None` if that is out of bounds.
    fn body(&self, block: usize, len: usize) -> Option<*mut u8> {
        let start = block.checked_mul(self.spec.granule_bytes)?;
        let end = start.checked_add(len)?;
        // SAFETY: `data` has `data_bytes` bytes (`map`), and the block's first byte is among them.
        (block < self.spec.n_granules && end <= self.spec.data_bytes())
            .then(|| unsafe { self.data.as_ptr().add(start) })
    }
}

impl std::fmt::Debug for Mapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapped")
            .field("arena", &self.arena)
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}

fn map(memory: &SealedMemory, spec: ArenaSpec, arena: u32, access: Access) -> Result<Mapped, AttachError> {
    let data_offset = spec.data_offset();
    let lines = memory.map_range(0, data_offset, Access::ReadWrite)?;
    let data = memory.map_range(data_offset, spec.data_bytes(), access)?;
    lines.prefault()?;
    data.prefault()?;
    Ok(Mapped {
        lines,
        data,
        spec,
        arena,
    })
}

/// The side that allocates and writes. One per arena; allocating takes `&mut self`.
#[derive(Debug)]
pub struct ArenaOwner {
    memory: SealedMemory,
    mapped: Arc<Mapped>,
    /// 1 per granule at which a block begins that is still being written.
    writing: Arc<[AtomicU32]>,
    /// Per granule: length of the block that begins there, 0 if none does.
    runs: Vec<u32>,
    /// Per granule: generation of the last block that began there.
    generations: Vec<u32>,
    n_missed_wakes: u64,
}

impl ArenaOwner {
    /// Makes an arena, all its pages present. `arena` goes into its references and distinguishes a world's
    /// arenas; `name` shows in `/proc/<pid>/maps` and in errors.
    ///
    /// # Errors
    /// [`AttachError::BadSpec`], or [`AttachError::Memory`] if there is not enough of it.
    pub fn create(name: &str, spec: ArenaSpec, arena: u32) -> Result<Self, AttachError> {
        if let Some(what) = spec.fault() {
            return Err(AttachError::BadSpec { what });
        }
        let memory = SealedMemory::create(name, spec.total_bytes())?;
        let mapped = map(&memory, spec, arena, Access::ReadWrite)?;
        let fixed = mapped.fixed();
        fixed
            .granule_bytes
            .store(spec.granule_bytes as u64, Ordering::Relaxed);
        fixed.n_granules.store(spec.n_granules as u64, Ordering::Relaxed);
        fixed.version.store(LAYOUT_VERSION, Ordering::Relaxed);
        fixed.arena.store(arena, Ordering::Relaxed);
        fixed.magic.store(ARENA_MAGIC, Ordering::Release);
        Ok(Self::of(memory, mapped))
    }

    /// Takes over, as its owner, an arena that another process made for this one and never allocated from.
    ///
    /// # Errors
    /// As [`ArenaHolder::attach`].
    pub fn attach(fd: OwnedFd) -> Result<Self, AttachError> {
        let (memory, mapped) = attach(fd, Access::ReadWrite)?;
        Ok(Self::of(memory, mapped))
    }

    fn of(memory: SealedMemory, mapped: Mapped) -> Self {
        let n_granules = mapped.spec.n_granules;
        Self {
            memory,
            mapped: Arc::new(mapped),
            writing: (0..n_granules).map(|_| AtomicU32::new(0)).collect(),
            runs: vec![0; n_granules],
            generations: vec![0; n_granules],
            n_missed_wakes: 0,
        }
    }

    /// A descriptor for a peer to attach to.
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

    /// Size of the arena.
    pub fn spec(&self) -> ArenaSpec {
        self.mapped.spec
    }

    /// Its number in references.
    pub fn arena(&self) -> u32 {
        self.mapped.arena
    }

    /// Takes `len` bytes in one piece if they are free now; the contents are arbitrary.
    ///
    /// # Errors
    /// [`ArenaError::TooLarge`], [`ArenaError::Full`].
    pub fn try_allocate(&mut self, len: usize) -> Result<ArenaBlock, ArenaError> {
        let limit_bytes = self.mapped.spec.data_bytes();
        if len > limit_bytes {
            return Err(ArenaError::TooLarge { len, limit_bytes });
        }
        let n_wanted = self.mapped.granules_for(len);
        let (found, longest) = self.find_run(n_wanted);
        let Some(block) = found else {
            let largest_free_bytes = longest * self.mapped.spec.granule_bytes;
            return Err(ArenaError::Full {
                len,
                largest_free_bytes,
            });
        };
        // At most 2^20 granules (`ArenaSpec::fault`).
        self.runs[block] = n_wanted as u32;
        let generation = self.generations[block].wrapping_add(1);
        self.generations[block] = generation;
        let line = &self.mapped.block_lines()[block];
        line.generation.store(generation, Ordering::Relaxed);
        line.len.store(len as u64, Ordering::Relaxed);
        self.writing[block].store(1, Ordering::Relaxed);
        Ok(ArenaBlock {
            mapped: Arc::clone(&self.mapped),
            writing: Arc::clone(&self.writing),
            block,
            generation,
            len,
        })
    }

    /// Takes `len` bytes in one piece; waits until the deadline for holders to give back enough.
    ///
    /// # Errors
    /// [`ArenaError::TooLarge`] at once, [`ArenaError::Full`] at the deadline.
    pub fn allocate(&mut self, len: usize, deadline: Deadline) -> Result<ArenaBlock, ArenaError> {
        let full = match self.try_allocate(len) {
            Err(full @ ArenaError::Full { .. }) => full,
            other => return other,
        };
        let mapped = Arc::clone(&self.mapped);
        let mut missed_wakes = 0;
        let mut last_full = full;
        let found = mapped.space().sleep(OWNER_BIT, deadline, &mut missed_wakes, || {
            match self.try_allocate(len) {
                Err(full @ ArenaError::Full { .. }) => {
                    last_full = full;
                    None
                }
                other => Some(other),
            }
        });
        self.n_missed_wakes += missed_wakes;
        found.unwrap_or(Err(last_full))
    }

    /// Bytes that are neither written nor held now.
    pub fn free_bytes(&mut self) -> usize {
        let mut granule = 0;
        let mut n_free = 0;
        while granule < self.runs.len() {
            let run = self.run_at(granule);
            n_free += usize::from(run == 0);
            granule += run.max(1);
        }
        n_free * self.mapped.spec.granule_bytes
    }

    /// Waits that only the safety bound ended. A bug if not 0.
    pub fn n_missed_wakes(&self) -> u64 {
        self.n_missed_wakes
    }

    /// A handle that takes blocks back from dead holders, for other threads.
    pub fn reaper(&self) -> ArenaReaper {
        ArenaReaper(Arc::clone(&self.mapped))
    }

    /// Length of the block at `granule`, 0 if it is free; collects a block that all have given back.
    fn run_at(&mut self, granule: usize) -> usize {
        let run = self.runs[granule];
        if run != 0 {
            // The owner first, then the holders: publishing sets the holders before it ends the writing.
            let writing = self.writing[granule].load(Ordering::Acquire) != 0;
            // Pairs with `give_back`: the holder's reads come before the owner's next writes.
            let held = self.mapped.block_lines()[granule].holders.load(Ordering::Acquire) != 0;
            if writing || held {
                return run as usize;
            }
            self.runs[granule] = 0;
        }
        0
    }

    /// The first run of `n_wanted` free granules, or else the length of the longest.
    fn find_run(&mut self, n_wanted: usize) -> (Option<usize>, usize) {
        let (mut granule, mut start, mut longest) = (0, 0, 0);
        while granule < self.runs.len() {
            let run = self.run_at(granule);
            if run > 0 {
                granule += run;
                start = granule;
                continue;
            }
            granule += 1;
            longest = longest.max(granule - start);
            if granule - start == n_wanted {
                return (Some(start), longest);
            }
        }
        (None, longest)
    }
}

/// A block that is being written, by whichever thread has it. Dropped without [`ArenaBlock::publish`], its
/// memory is free again.
#[derive(Debug)]
pub struct ArenaBlock {
    mapped: Arc<Mapped>,
    writing: Arc<[AtomicU32]>,
    block: usize,
    generation: u32,
    len: usize,
}

impl ArenaBlock {
    /// Ends the writing and lets `holders`, a bit each, lease the block; with none its memory is free.
    ///
    /// Publish to readers that will get the reference: the memory comes back once each has given it back
    /// or was reaped.
    pub fn publish(self, holders: u64) -> ArenaRef {
        let line = &self.mapped.block_lines()[self.block];
        line.holders.swap(holders, Ordering::AcqRel);
        // At most 2^20 granules (`ArenaSpec::fault`). Dropping `self` ends the writing.
        ArenaRef {
            arena: self.mapped.arena,
            block: self.block as u32,
            generation: self.generation,
            len: self.len as u64,
        }
    }
}

impl std::ops::Deref for ArenaBlock {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self.mapped.body(self.block, self.len) {
            // SAFETY: A1, A3: this value alone has the block, in bounds, until it is published; bytes are
            // initialised (the memory began as zeros).
            Some(start) => unsafe { std::slice::from_raw_parts(start, self.len) },
            None => &[],
        }
    }
}

impl std::ops::DerefMut for ArenaBlock {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self.mapped.body(self.block, self.len) {
            // SAFETY: as above; the owner's mapping of the bodies is writable, and `&mut self` makes this
            // the only slice.
            Some(start) => unsafe { std::slice::from_raw_parts_mut(start, self.len) },
            None => &mut [],
        }
    }
}

impl Drop for ArenaBlock {
    fn drop(&mut self) {
        self.writing[self.block].swap(0, Ordering::AcqRel);
        self.mapped.space().announce();
    }
}

/// Takes blocks back from holders that are known to be dead, from any thread.
#[derive(Clone, Debug)]
pub struct ArenaReaper(Arc<Mapped>);

impl ArenaReaper {
    /// Removes `holder_idx` from the holders of every block; returns how many it still held.
    ///
    /// Its process must be gone: the memory may be written again at once.
    pub fn reap(&self, holder_idx: usize) -> usize {
        if holder_idx >= MAX_READERS {
            return 0;
        }
        let bit = 1 << holder_idx;
        let taken = |line: &&BlockLine| line.holders.fetch_and(!bit, Ordering::AcqRel) & bit != 0;
        let n_taken = self.0.block_lines().iter().filter(taken).count();
        self.0.space().announce();
        n_taken
    }
}

/// The side that reads, one per arena and holder. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ArenaHolder {
    mapped: Arc<Mapped>,
    holder_idx: usize,
    /// Per granule: generation of the last block leased there.
    leased: Arc<[AtomicU32]>,
}

impl ArenaHolder {
    /// Takes over an arena that another process made, to read as holder `holder_idx`.
    ///
    /// # Errors
    /// [`AttachError::Memory`] if it is not sealed, [`AttachError::BadHeader`] if it is no arena of its
    /// size, [`AttachError::BadSpec`] if there is no such holder.
    pub fn attach(fd: OwnedFd, holder_idx: usize) -> Result<Self, AttachError> {
        if holder_idx >= MAX_READERS {
            return Err(AttachError::BadSpec {
                what: "an arena has at most 64 holders",
            });
        }
        let (_memory, mapped) = attach(fd, Access::ReadOnly)?;
        let leased = (0..mapped.spec.n_granules).map(|_| AtomicU32::new(0)).collect();
        Ok(Self {
            mapped: Arc::new(mapped),
            holder_idx,
            leased,
        })
    }

    /// Its number in references.
    pub fn arena(&self) -> u32 {
        self.mapped.arena
    }

    /// Size of the arena.
    pub fn spec(&self) -> ArenaSpec {
        self.mapped.spec
    }

    /// Takes the block for reading in place. A block can be leased once; clone the lease to share it. A
    /// block that is not wanted is leased and dropped.
    ///
    /// # Errors
    /// The reference is not one to a block published to this holder.
    pub fn lease(&self, reference: ArenaRef) -> Result<ArenaLease, ArenaError> {
        let ArenaRef {
            arena,
            block,
            generation,
            len,
        } = reference;
        if arena != self.mapped.arena {
            return Err(ArenaError::OtherArena {
                expected: self.mapped.arena,
                found: arena,
            });
        }
        let block_idx = block as usize;
        let body_bytes = usize::try_from(len).ok();
        let Some((len_bytes, _)) = body_bytes.and_then(|len| Some((len, self.mapped.body(block_idx, len)?)))
        else {
            return Err(ArenaError::OutOfBounds { block, len });
        };
        let line = &self.mapped.block_lines()[block_idx];
        // Pairs with `ArenaBlock::publish`: the body is written.
        let held = line.holders.load(Ordering::Acquire) >> self.holder_idx & 1 == 1;
        let same = line.generation.load(Ordering::Relaxed) == generation;
        if !held || !same || line.len.load(Ordering::Relaxed) != len {
            return Err(ArenaError::NotHeld {
                block,
                generation,
                holder_idx: self.holder_idx,
            });
        }
        if self.leased[block_idx].swap(generation, Ordering::AcqRel) == generation {
            return Err(ArenaError::LeasedBefore { block, generation });
        }
        let held = Held {
            mapped: Arc::clone(&self.mapped),
            holder_idx: self.holder_idx,
            block: block_idx,
            len: len_bytes,
        };
        Ok(ArenaLease(Arc::new(held)))
    }
}

/// A block held for reading, in place; given back when the last clone is dropped, also by a panic. Keeps the
/// arena mapped, also after its owner is gone.
#[derive(Clone, Debug)]
pub struct ArenaLease(Arc<Held>);

impl ArenaLease {
    /// Bytes that this keeps from being allocated: whole granules.
    pub fn held_bytes(&self) -> usize {
        let Held { mapped, len, .. } = &*self.0;
        mapped.granules_for(*len) * mapped.spec.granule_bytes
    }

    /// The granule that follows the last one of the block.
    pub fn end_granule(&self) -> usize {
        let Held {
            mapped, block, len, ..
        } = &*self.0;
        block + mapped.granules_for(*len)
    }

    /// Granules of the whole arena.
    pub fn n_granules(&self) -> usize {
        self.0.mapped.spec.n_granules
    }
}

#[derive(Debug)]
struct Held {
    mapped: Arc<Mapped>,
    holder_idx: usize,
    block: usize,
    len: usize,
}

impl std::ops::Deref for ArenaLease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let Held {
            mapped, block, len, ..
        } = &*self.0;
        match mapped.body(*block, *len) {
            // SAFETY: A2: the holder's bit is set until this lease ends, so by A1 and A3 nobody writes the
            // block; in bounds, and initialised (the memory began as zeros).
            Some(start) => unsafe { std::slice::from_raw_parts(start, *len) },
            None => &[],
        }
    }
}

impl AsRef<[u8]> for ArenaLease {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let line = &self.mapped.block_lines()[self.block];
        line.holders.fetch_and(!(1 << self.holder_idx), Ordering::AcqRel); // pairs with `run_at`: given back
        self.mapped.space().announce();
    }
}

fn attach(fd: OwnedFd, access: Access) -> Result<(SealedMemory, Mapped), AttachError> {
    let memory = SealedMemory::from_fd(fd)?;
    let bad = |what| Err(AttachError::BadHeader { what });
    if memory.bytes() < BLOCK_LINES_OFFSET {
        return bad("the size is no arena's");
    }
    // Only the head is mapped until the sizes in it, each read once, are known to be right.
    let head_bytes = memory.bytes().min(denoised_os::memfd::page_bytes());
    let head = memory.map_range(0, head_bytes, Access::ReadWrite)?;
    // SAFETY: the mapping starts on a page and has at least 256 bytes; atomics are valid with any bytes.
    let fixed = unsafe { &*head.as_ptr().cast::<FixedLine>() };
    if fixed.magic.load(Ordering::Acquire) != ARENA_MAGIC {
        return bad("the magic is not an arena's");
    }
    if fixed.version.load(Ordering::Relaxed) != LAYOUT_VERSION {
        return bad("the layout is of another version");
    }
    let granule_bytes = usize::try_from(fixed.granule_bytes.load(Ordering::Relaxed));
    let n_granules = usize::try_from(fixed.n_granules.load(Ordering::Relaxed));
    let (Ok(granule_bytes), Ok(n_granules)) = (granule_bytes, n_granules) else {
        return bad("the sizes are no arena's");
    };
    let spec = ArenaSpec {
        granule_bytes,
        n_granules,
    };
    if spec.fault().is_some() || spec.total_bytes() != memory.bytes() {
        return bad("the sizes do not match the memory");
    }
    let arena = fixed.arena.load(Ordering::Relaxed);
    let mapped = map(&memory, spec, arena, access)?;
    Ok((memory, mapped))
}
