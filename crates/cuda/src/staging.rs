//! The way of weights to the device: two buffers of page-locked memory, so that one is filled while the other is copied.

use crate::device::{Device, driver_failure};
use cudarc::driver::{
    DriverError,
    result::{self, event},
    sys,
};
use denoised_tensor::{Result, TensorError};

/// Bytes of each buffer.
pub(crate) const BUFFER_BYTES: usize = 16 << 20;

/// Two buffers and the stream that copies from them.
#[derive(Debug)]
pub(crate) struct Staging<'a> {
    device: &'a Device,
    buffers: [Buffer; 2],
    next: usize,
}

#[derive(Debug)]
struct Buffer {
    start: *mut u8,
    /// Reached when what was copied from it last has arrived.
    is_free: sys::CUevent,
}

impl<'a> Staging<'a> {
    pub(crate) fn new(device: &'a Device) -> Result<Self> {
        Ok(Self {
            device,
            buffers: [Buffer::new()?, Buffer::new()?],
            next: 0,
        })
    }

    /// Has `write` fill `len_bytes` (at most [`BUFFER_BYTES`]), which are then copied to `to`. Waits only for the copy before the last.
    ///
    /// # Safety
    /// `to` has room for them, and outlives [`Staging::finish`] or the drop.
    pub(crate) unsafe fn send(
        &mut self,
        to: sys::CUdeviceptr,
        len_bytes: usize,
        write: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let what = "uploading weights";
        let buffer = &self.buffers[self.next];
        self.next = 1 - self.next;
        // SAFETY: the event lives as long as its buffer; one that was never recorded counts as reached.
        let waited = unsafe { event::synchronize(buffer.is_free) };
        self.device.check(what, waited)?;
        let len_bytes = len_bytes.min(BUFFER_BYTES);
        // SAFETY: the buffer is that long, was zeroed when it was made, and nothing is being copied from it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.start, len_bytes) };
        write(bytes)?;
        let stream = self.device.side_stream();
        // SAFETY: the caller vouches for `to`; the bytes are left alone until the event was reached.
        let sent = unsafe {
            result::memcpy_htod_async(to, bytes, stream).and_then(|()| event::record(buffer.is_free, stream))
        };
        self.device.check(what, sent)
    }

    /// Waits until everything has arrived.
    pub(crate) fn finish(self) -> Result<()> {
        self.device.synchronize_side("uploading weights")
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        // Buffers must not go while something is copied from them; a device that has failed copies nothing.
        let _ = self.device.synchronize_side("uploading weights");
    }
}

impl Buffer {
    fn new() -> Result<Self> {
        let failure = |error: DriverError| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => TensorError::OutOfMemory {
                what: "a buffer of the host for uploading weights".to_owned(),
                needed_bytes: BUFFER_BYTES as u64,
                available_bytes: 0,
            },
            _ => driver_failure("a buffer for uploading weights", error),
        };
        let is_free = event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(failure)?;
        let mut buffer = Self {
            start: std::ptr::null_mut(),
            is_free,
        };
        // SAFETY: given back once, in `drop`; zeroed, so that slices of it hold something.
        unsafe {
            buffer.start = result::malloc_host(BUFFER_BYTES, 0).map_err(failure)?.cast();
            buffer.start.write_bytes(0, BUFFER_BYTES);
        }
        Ok(buffer)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: both were made in `new` and are given back once; nothing is copied any more.
        unsafe {
            let _ = event::destroy(self.is_free);
            if !self.start.is_null() {
                let _ = result::free_host(self.start.cast());
            }
        }
    }
}
