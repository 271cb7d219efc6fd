//! Device memory of activations, in stream order: freed memory is used again by what is enqueued later, without a wait.

use crate::device::{Device, driver_failure};
use cudarc::driver::{DriverError, result, sys};
use denoised_tensor::{Buffer, MemoryStats, Result, TensorError};
use std::{any::Any, cell::Cell, rc::Rc};

/// The memory of one device. Cloning gives another handle to the same.
#[derive(Clone, Debug)]
pub(crate) struct Memory(Rc<State>);

#[derive(Debug)]
struct State {
    device: Rc<Device>,
    used_bytes: Cell<u64>,
    peak_bytes: Cell<u64>,
}

impl Memory {
    pub(crate) fn new(device: Rc<Device>) -> Self {
        Self(Rc::new(State {
            device,
            used_bytes: Cell::new(0),
            peak_bytes: Cell::new(0),
        }))
    }

    /// At least `len_bytes`, holding anything; `what` names them in errors.
    pub(crate) fn take(&self, what: impl Fn() -> String, len_bytes: usize) -> Result<Region> {
        let state = &self.0;
        state.device.check_alive()?;
        // SAFETY: the stream lives as long as the device, which the region keeps.
        let start = unsafe { result::malloc_async(state.device.stream(), len_bytes.max(1)) };
        let start = match start {
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let (available_bytes, _) = result::mem_get_info().unwrap_or_default();
                return Err(TensorError::OutOfMemory {
                    what: what(),
                    needed_bytes: len_bytes as u64,
                    available_bytes: available_bytes as u64,
                });
            }
            start => start.map_err(|error| driver_failure("taking memory", error))?,
        };
        let used_bytes = state.used_bytes.get() + len_bytes as u64;
        state.used_bytes.set(used_bytes);
        state.peak_bytes.set(state.peak_bytes.get().max(used_bytes));
        Ok(Region {
            start,
            len_bytes,
            memory: self.clone(),
        })
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        MemoryStats {
            used_bytes: self.0.used_bytes.get(),
            peak_bytes: self.0.peak_bytes.get(),
        }
    }

    pub(crate) fn device(&self) -> &Rc<Device> {
        &self.0.device
    }

    /// Whether both are handles to the same memory.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

/// Memory in use; given back, in stream order, when dropped.
#[derive(Debug)]
pub(crate) struct Region {
    start: sys::CUdeviceptr,
    len_bytes: usize,
    memory: Memory,
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
        state
            .used_bytes
            .set(state.used_bytes.get() - self.len_bytes as u64);
        // SAFETY: taken from this stream and freed once; whatever reads it was enqueued before. A device that has failed keeps its
        // memory until the process ends.
        let _ = unsafe { result::free_async(self.start, state.device.stream()) };
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
