//! Device memory of activations, in stream order: freed memory is used again by what is enqueued later, without a wait.
//!
//! R1. Memory comes from the device's pool, which keeps what is freed (up to everything: workers own their device), so that a steady step
//!     does not go to the system.
//! R2. While a recording is made, memory comes from the recording's own [`Arena`], and what is freed goes to what is recorded later. The
//!     arena lives as long as the recording.
//!     It is counted as the recordings', not as used: between requests nothing is in use.
//! R3. Memory that was taken before a recording and is freed during it is given back after it: a free must not be recorded.

use crate::device::Device;
use cudarc::driver::{
    DriverError,
    result::{self, device, mem_pool},
    sys,
};
use denoised_tensor::{Buffer, MemoryStats, Result, TensorError};
use std::{
    any::Any,
    cell::{Cell, RefCell},
    rc::Rc,
};

/// The memory of one device. Cloning gives another handle to the same.
#[derive(Clone, Debug)]
pub(crate) struct Memory(Rc<State>);

#[derive(Debug)]
struct State {
    device: Rc<Device>,
    used_bytes: Cell<u64>,
    peak_bytes: Cell<u64>,
    /// What all arenas hold.
    kept_bytes: Rc<Cell<u64>>,
    arena: RefCell<Option<Rc<Arena>>>,
    /// What R3 keeps back.
    deferred: RefCell<Vec<sys::CUdeviceptr>>,
    /// Gives up what is only kept for later.
    release: RefCell<Option<Release>>,
}

/// What [`Memory::on_shortage`] takes.
struct Release(Box<dyn Fn()>);

impl std::fmt::Debug for Release {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Release")
    }
}

impl Memory {
    pub(crate) fn new(device: Rc<Device>) -> Self {
        keep_freed(&device);
        Self(Rc::new(State {
            device,
            used_bytes: Cell::new(0),
            peak_bytes: Cell::new(0),
            kept_bytes: Rc::default(),
            arena: RefCell::default(),
            deferred: RefCell::default(),
            release: RefCell::default(),
        }))
    }

    pub(crate) fn device(&self) -> &Rc<Device> {
        &self.0.device
    }

    /// What is asked to give up memory before a request for more fails.
    pub(crate) fn on_shortage(&self, release: Box<dyn Fn()>) {
        *self.0.release.borrow_mut() = Some(Release(release));
    }

    /// At least `len_bytes`, holding anything; `what` names them in errors.
    pub(crate) fn take(&self, what: impl Fn() -> String, len_bytes: usize) -> Result<Region> {
        self.take_for(what, len_bytes, true)
    }

    /// As [`Memory::take`]; what a recording writes there once stays there.
    pub(crate) fn take_constant(&self, what: impl Fn() -> String, len_bytes: usize) -> Result<Region> {
        self.take_for(what, len_bytes, false)
    }

    fn take_for(&self, what: impl Fn() -> String, len_bytes: usize, is_reusable: bool) -> Result<Region> {
        let state = &self.0;
        state.device.enter()?;
        let arena = state.arena.borrow().clone();
        let start = match &arena {
            Some(arena) => arena.take(&state.device, len_bytes, is_reusable),
            None => allocate(state.device.stream(), len_bytes),
        };
        let start = match start {
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                self.take_harder(&what(), len_bytes, arena.as_deref())?
            }
            start => state.device.check("taking memory", start)?,
        };
        if arena.is_none() {
            state.used_bytes.set(state.used_bytes.get() + len_bytes as u64);
        }
        let in_use = state.used_bytes.get() + state.kept_bytes.get();
        state.peak_bytes.set(state.peak_bytes.get().max(in_use));
        Ok(Region {
            start,
            len_bytes,
            memory: self.clone(),
            arena: arena.map(|arena| (arena, is_reusable)),
        })
    }

    /// Once more after everything that can be given up is.
    fn take_harder(&self, what: &str, len_bytes: usize, arena: Option<&Arena>) -> Result<sys::CUdeviceptr> {
        let state = &self.0;
        // A recording is not given up while another is made: it may be the same body's.
        if arena.is_none() {
            if let Some(release) = &*state.release.borrow() {
                (release.0)();
            }
            // Freed memory comes back when the stream is there.
            state.device.synchronize("waiting for memory")?;
            trim(&state.device);
            if let Ok(start) = allocate(state.device.stream(), len_bytes) {
                return Ok(start);
            }
        }
        let (free_bytes, _) = result::mem_get_info().unwrap_or_default();
        Err(TensorError::OutOfMemory {
            what: what.to_owned(),
            needed_bytes: len_bytes as u64,
            available_bytes: free_bytes as u64 + unused_bytes(&state.device),
        })
    }

    /// What others than activations may take; if that is less than `needed_bytes`, after everything that is only kept was given up.
    pub(crate) fn available_to_others(&self, needed_bytes: u64) -> Result<u64> {
        let device = &self.0.device;
        device.enter()?;
        let ask = || device.check("asking for memory", result::mem_get_info());
        let (free_bytes, _) = ask()?;
        if free_bytes as u64 >= needed_bytes {
            return Ok(free_bytes as u64);
        }
        if let Some(release) = &*self.0.release.borrow() {
            (release.0)();
        }
        device.synchronize("waiting for memory")?;
        trim(device);
        Ok(ask()?.0 as u64)
    }

    /// From now on memory comes from a new arena (R2), until [`Memory::end_arena`].
    pub(crate) fn begin_arena(&self) -> Rc<Arena> {
        let arena = Rc::new(Arena {
            device: Rc::clone(&self.0.device),
            kept_bytes: Rc::clone(&self.0.kept_bytes),
            blocks: RefCell::default(),
            free: RefCell::default(),
        });
        *self.0.arena.borrow_mut() = Some(Rc::clone(&arena));
        arena
    }

    /// Refuses memory that a recording which is being made must not have the address of: it may be freed, or used for something else, by
    /// the time of a replay.
    pub(crate) fn check_recordable(&self, op: &'static str, name: &str, region: &Region) -> Result<()> {
        let arena = self.0.arena.borrow();
        let own = region.arena.as_ref().map(|(arena, _)| arena);
        match (&*arena, own) {
            (Some(arena), Some(own)) if Rc::ptr_eq(arena, own) => Ok(()),
            (Some(_), _) => Err(TensorError::Operand {
                op,
                detail: format!(
                    "{name} was made before the body that is being recorded: pass it as one of its inputs"
                ),
            }),
            (None, _) => Ok(()),
        }
    }

    /// Back to the device's pool.
    pub(crate) fn end_arena(&self) {
        self.0.device.enter_to_free();
        *self.0.arena.borrow_mut() = None;
        for start in self.0.deferred.take() {
            free(self.0.device.stream(), start);
        }
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        MemoryStats {
            used_bytes: self.0.used_bytes.get(),
            peak_bytes: self.0.peak_bytes.get(),
        }
    }

    /// Whether both are handles to the same memory.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

fn allocate(stream: sys::CUstream, len_bytes: usize) -> std::result::Result<sys::CUdeviceptr, DriverError> {
    // SAFETY: streams live as long as their device, which every region keeps.
    unsafe { result::malloc_async(stream, len_bytes.max(1)) }
}

fn free(stream: sys::CUstream, start: sys::CUdeviceptr) {
    // SAFETY: taken from the pool and freed once; whatever reads it was enqueued before. A device that has failed keeps its memory
    // until the process ends.
    let _ = unsafe { result::free_async(start, stream) };
}

/// Has the device's pool keep what is freed (R1). A driver without pools would have refused the first request.
fn keep_freed(device: &Device) {
    let keep = u64::MAX;
    // SAFETY: the pool belongs to the device; the attribute is a 64-bit number.
    let answer = unsafe {
        device::get_default_mem_pool(device.raw()).and_then(|pool| {
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            mem_pool::set_attribute(pool, attribute, (&raw const keep).cast_mut().cast())
        })
    };
    if answer.is_err() {
        tracing::warn!("the device's memory pool cannot be told to keep what is freed; steps may be slower");
    }
}

/// Gives what the pool holds and nobody uses back to the system. That it cannot shows in what is there afterwards.
fn trim(device: &Device) {
    // SAFETY: the pool belongs to the device.
    let _ = unsafe { device::get_default_mem_pool(device.raw()).and_then(|pool| mem_pool::trim_to(pool, 0)) };
}

/// What the pool holds and nobody uses.
fn unused_bytes(device: &Device) -> u64 {
    let (mut reserved, mut used) = (0u64, 0u64);
    // SAFETY: as above.
    let answer = unsafe {
        device::get_default_mem_pool(device.raw()).and_then(|pool| {
            use sys::CUmemPool_attribute as Attribute;
            mem_pool::get_attribute(
                pool,
                Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                (&raw mut reserved).cast(),
            )?;
            mem_pool::get_attribute(
                pool,
                Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
                (&raw mut used).cast(),
            )
        })
    };
    if answer.is_ok() {
        reserved.saturating_sub(used)
    } else {
        0
    }
}

/// The memory of one recording.
#[derive(Debug)]
pub(crate) struct Arena {
    device: Rc<Device>,
    kept_bytes: Rc<Cell<u64>>,
    blocks: RefCell<Vec<(sys::CUdeviceptr, usize)>>,
    /// Blocks that what is recorded later may use.
    free: RefCell<Vec<(sys::CUdeviceptr, usize)>>,
}

impl Arena {
    /// Bytes that it holds.
    pub(crate) fn n_bytes(&self) -> usize {
        self.blocks.borrow().iter().map(|(_, len_bytes)| len_bytes).sum()
    }

    /// The best fitting freed block that wastes at most half of itself, or a new one.
    fn take(
        &self,
        device: &Device,
        len_bytes: usize,
        is_reusable: bool,
    ) -> std::result::Result<sys::CUdeviceptr, DriverError> {
        let len_bytes = len_bytes.max(1);
        if is_reusable {
            let mut free = self.free.borrow_mut();
            let fits = |own: usize| own >= len_bytes && own / 2 <= len_bytes;
            let fitting = free.iter().enumerate().filter(|(_, (_, own))| fits(*own));
            if let Some((idx, _)) = fitting.min_by_key(|(_, (_, own))| *own) {
                return Ok(free.swap_remove(idx).0);
            }
        }
        // The other stream is being recorded.
        let start = allocate(device.side_stream(), len_bytes)?;
        self.blocks.borrow_mut().push((start, len_bytes));
        self.kept_bytes.set(self.kept_bytes.get() + len_bytes as u64);
        // SAFETY: the stream lives as long as the device.
        unsafe { result::stream::synchronize(device.side_stream())? };
        Ok(start)
    }

    fn give_back(&self, start: sys::CUdeviceptr) {
        let block = self
            .blocks
            .borrow()
            .iter()
            .find(|(own, _)| *own == start)
            .copied();
        self.free.borrow_mut().extend(block);
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.device.enter_to_free();
        // Replays that were enqueued use it in this stream.
        for (start, len_bytes) in self.blocks.take() {
            self.kept_bytes.set(self.kept_bytes.get() - len_bytes as u64);
            free(self.device.stream(), start);
        }
    }
}

/// Memory in use; given back, in stream order, when dropped.
#[derive(Debug)]
pub(crate) struct Region {
    start: sys::CUdeviceptr,
    len_bytes: usize,
    memory: Memory,
    /// Whose it is, if a recording's, and whether others of the recording may use it afterwards.
    arena: Option<(Rc<Arena>, bool)>,
}

impl Region {
    /// First byte, on 256 at least.
    pub(crate) fn start(&self) -> sys::CUdeviceptr {
        self.start
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let state = &self.memory.0;
        if self.arena.is_none() {
            state
                .used_bytes
                .set(state.used_bytes.get() - self.len_bytes as u64);
        }
        match &self.arena {
            Some((arena, true)) => arena.give_back(self.start),
            Some((_, false)) => {}
            None if state.device.is_recording() => state.deferred.borrow_mut().push(self.start),
            None => {
                state.device.enter_to_free();
                free(state.device.stream(), self.start);
            }
        }
    }
}

/// A tensor's memory.
#[derive(Debug)]
pub(crate) struct CudaBuffer(pub(crate) Region);

impl Buffer for CudaBuffer {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn len_bytes(&self) -> usize {
        self.0.len_bytes
    }
    fn is_writable(&self) -> bool {
        true
    }
}
