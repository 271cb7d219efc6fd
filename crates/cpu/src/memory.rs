//! Memory of activations and scratch: blocks that are used again, so that a steady step allocates nothing.
//!
//! Knows nothing of shapes or of weights. Belongs to one thread, as tensors do.
//! R1. Blocks start on 64 bytes, are zeroed when they come from the system and always initialised.
//! R2. A freed block waits for the next request of about its size. At most as much waits as was ever in use at once; the blocks that
//!     have waited longest go back to the system first.
//! R3. A request that needs new memory of [`CHECKED_BYTES`] or more is first compared with what the machine and the cgroup have.

use denoised_tensor::{Buffer, MemoryStats, Result, TensorError};
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    any::Any,
    cell::RefCell,
    collections::VecDeque,
    ptr::NonNull,
    rc::Rc,
};

/// Alignment of blocks: a cache line and the widest vector.
pub(crate) const ALIGN: usize = 64;

/// New blocks below this are not worth asking the system how much memory is left.
const CHECKED_BYTES: usize = 16 << 20;

/// Memory from the system, given back when dropped.
#[derive(Debug)]
struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

impl Block {
    fn new(what: &str, len_bytes: usize) -> Result<Self> {
        let out_of_memory = |available_bytes| TensorError::OutOfMemory {
            what: what.to_owned(),
            needed_bytes: len_bytes as u64,
            available_bytes,
        };
        if len_bytes >= CHECKED_BYTES {
            denoised_os::memory_budget::check(what, len_bytes as u64)
                .map_err(|error| out_of_memory(error.available_bytes))?;
        }
        let layout = Layout::from_size_align(len_bytes.max(ALIGN), ALIGN).map_err(|_| out_of_memory(0))?;
        // SAFETY: the layout has a size above zero.
        let start = unsafe { alloc_zeroed(layout) };
        let available = || denoised_os::memory_budget::available().map_or(0, |available| available.bytes);
        let start = NonNull::new(start).ok_or_else(|| out_of_memory(available()))?;
        Ok(Self { start, layout })
    }

    fn len_bytes(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

#[derive(Debug, Default)]
struct State {
    /// Freed blocks, the longest waiting first.
    waiting: VecDeque<Block>,
    waiting_bytes: usize,
    used_bytes: usize,
    peak_bytes: usize,
}

/// The memory of one backend. Cloning gives another handle to the same memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory(Rc<RefCell<State>>);

impl Memory {
    /// A block of at least `len_bytes`; `what` names it in errors. The bytes hold anything.
    pub(crate) fn take(&self, what: &str, len_bytes: usize) -> Result<Region> {
        let class_bytes = size_class(len_bytes);
        let mut state = self.0.borrow_mut();
        let block = match state.take_waiting(class_bytes) {
            Some(block) => block,
            None => match Block::new(what, class_bytes) {
                Ok(block) => block,
                // What waits may be all that is missing.
                Err(_) if state.waiting_bytes > 0 => {
                    state.waiting.clear();
                    state.waiting_bytes = 0;
                    Block::new(what, class_bytes)?
                }
                Err(error) => return Err(error),
            },
        };
        state.used_bytes += block.len_bytes();
        state.peak_bytes = state.peak_bytes.max(state.used_bytes);
        Ok(Region {
            block: Some(block),
            len_bytes,
            memory: self.clone(),
        })
    }

    /// What is in use, and the most that was.
    pub(crate) fn stats(&self) -> MemoryStats {
        let state = self.0.borrow();
        MemoryStats {
            used_bytes: state.used_bytes as u64,
            peak_bytes: state.peak_bytes as u64,
        }
    }

    /// Whether both are handles to the same memory.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

impl State {
    /// The best fitting waiting block, if one wastes at most a quarter of itself. The last freed one of equals: it is warm.
    fn take_waiting(&mut self, class_bytes: usize) -> Option<Block> {
        let fits = |block: &Block| {
            let len_bytes = block.len_bytes();
            len_bytes >= class_bytes && len_bytes - class_bytes <= len_bytes / 4
        };
        let candidates = self
            .waiting
            .iter()
            .enumerate()
            .rev()
            .filter(|(_, block)| fits(block));
        let (block_idx, _) = candidates.min_by_key(|(_, block)| block.len_bytes())?;
        let block = self.waiting.remove(block_idx)?;
        self.waiting_bytes -= block.len_bytes();
        Some(block)
    }

    fn give_back(&mut self, block: Block) {
        self.used_bytes -= block.len_bytes();
        self.waiting_bytes += block.len_bytes();
        self.waiting.push_back(block);
        while self.waiting_bytes > self.peak_bytes {
            let Some(oldest) = self.waiting.pop_front() else {
                break;
            };
            self.waiting_bytes -= oldest.len_bytes();
        }
    }
}

/// Rounds up so that requests of nearly equal size share blocks: at most an eighth is wasted.
fn size_class(len_bytes: usize) -> usize {
    let len_bytes = len_bytes.max(ALIGN);
    let step = (len_bytes.checked_next_power_of_two().unwrap_or(0) / 16).max(ALIGN);
    len_bytes.checked_next_multiple_of(step).unwrap_or(len_bytes)
}

/// A block in use; waits for the next user when dropped.
#[derive(Debug)]
pub(crate) struct Region {
    /// Always there until the drop.
    block: Option<Block>,
    len_bytes: usize,
    memory: Memory,
}

impl Region {
    /// First byte, on [`ALIGN`]. Valid for reads and writes of [`Region::len_bytes`] bytes while the region lives.
    pub(crate) fn start(&self) -> *mut u8 {
        self.block
            .as_ref()
            .map_or(NonNull::dangling().as_ptr(), |block| block.start.as_ptr())
    }

    /// Bytes that were asked for.
    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Whose memory this is.
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.memory.0.borrow_mut().give_back(block);
        }
    }
}

/// A tensor's memory.
#[derive(Debug)]
pub(crate) struct CpuBuffer(pub(crate) Region);

impl Buffer for CpuBuffer {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn len_bytes(&self) -> usize {
        self.0.len_bytes()
    }
    fn is_writable(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_step_gets_the_same_blocks_again() {
        let memory = Memory::default();
        let step = || {
            let a = memory.take("a", 1_000_000).expect("memory");
            let b = memory.take("b", 300).expect("memory");
            drop(a);
            let c = memory.take("c", 999_000).expect("memory");
            assert_eq!(c.start() as usize % ALIGN, 0);
            (c.start() as usize, b.start() as usize)
        };
        let first = step();
        assert_eq!(step(), first);
        assert_eq!(step(), first);
        let stats = memory.stats();
        assert_eq!(stats.used_bytes, 0);
        assert!((1_000_300..1_200_000).contains(&stats.peak_bytes), "{stats:?}");
    }

    #[test]
    fn no_more_waits_than_was_ever_in_use_at_once() {
        let memory = Memory::default();
        for len_bytes in [1_000, 5_000, 70_000, 900_000, 80_000, 6_000] {
            drop(memory.take("x", len_bytes).expect("memory"));
            let state = memory.0.borrow();
            assert!(state.waiting_bytes <= state.peak_bytes);
            assert_eq!(
                state.waiting_bytes,
                state.waiting.iter().map(Block::len_bytes).sum::<usize>()
            );
        }
    }

    #[test]
    fn a_request_beyond_the_machine_is_a_typed_error() {
        let memory = Memory::default();
        for len_bytes in [1 << 50, isize::MAX as usize, usize::MAX] {
            let outcome = memory.take("the moon", len_bytes);
            assert!(
                matches!(&outcome, Err(TensorError::OutOfMemory { what, .. }) if what == "the moon"),
                "{outcome:?}"
            );
        }
        assert_eq!(memory.stats(), MemoryStats::default());
    }

    #[test]
    fn size_classes_waste_at_most_an_eighth() {
        for len_bytes in [1, 64, 65, 1000, 4096, 4097, 1 << 20, (1 << 20) + 1, 12_345_678] {
            let class_bytes = size_class(len_bytes);
            assert!(class_bytes >= len_bytes && class_bytes.is_multiple_of(ALIGN));
            assert!(
                class_bytes <= (len_bytes + len_bytes / 8).max(len_bytes + ALIGN),
                "{len_bytes} {class_bytes}"
            );
        }
    }
}
