//! What an op runs with: the threads and the memory of its backend.

use crate::{
    memory::{Memory, Region},
    operand::Ptr,
    threads::Pool,
};
use denoised_tensor::{Result, TensorError};

/// Borrowed from the backend for one op.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) memory: &'a Memory,
}

impl Context<'_> {
    /// Runs the tasks on all threads.
    pub(crate) fn run(&self, n_tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
        let outcome = self.pool.run(n_tasks, task);
        outcome.map_err(|panicked| TensorError::Device(format!("a kernel failed: {}", panicked.0)))
    }

    /// `len` f32 for each thread, holding anything.
    pub(crate) fn scratch(&self, what: &str, len: usize) -> Result<Scratch> {
        // Whole cache lines and one more, so that threads share no line and do not collide in the cache's sets.
        let stride = len
            .checked_next_multiple_of(16)
            .and_then(|len| len.checked_add(16));
        let n_bytes = stride.and_then(|stride| stride.checked_mul(4 * self.pool.n_threads()));
        let region = self.memory.take(what, n_bytes.unwrap_or(usize::MAX))?;
        Ok(Scratch {
            per_thread: PerThread {
                start: Ptr(region.start().cast()),
                stride: stride.unwrap_or(0),
            },
            _region: region,
        })
    }
}

/// Scratch of all threads; free for others when dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// For the tasks.
    pub(crate) per_thread: PerThread,
    _region: Region,
}

/// Where each thread's scratch starts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerThread {
    start: Ptr<f32>,
    stride: usize,
}

impl PerThread {
    /// The scratch of thread `thread_idx`, on a cache line.
    pub(crate) fn of(self, thread_idx: usize) -> *mut f32 {
        self.start.at(thread_idx * self.stride)
    }
}
