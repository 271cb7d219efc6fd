//! One device: its context, its stream, the log of what was launched, and the error that lasts.

use crate::library;
use cudarc::driver::{
    DriverError,
    result::{self, ctx, device, primary_ctx, stream},
    sys,
};
use denoised_tensor::{Result, TensorError};
use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    ffi::c_void,
    fmt,
};

/// Launches that are remembered for the report of a fault.
const LOG_LEN: usize = 4096;

/// One enqueued piece of work, as a fault's report shows it.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    /// Kernel, product or recording.
    pub(crate) name: String,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([gx, gy, gz], [bx, by, bz]) = (self.grid, self.block);
        write!(
            f,
            "{} (grid {gx}x{gy}x{gz}, block {bx}x{by}x{bz}, {} bytes of shared memory)",
            self.name, self.shared_bytes
        )
    }
}

/// An open device. Belongs to the thread that opened it.
pub(crate) struct Device {
    device: sys::CUdevice,
    device_idx: usize,
    stream: sys::CUstream,
    name: String,
    compute_capability: (u32, u32),
    n_multiprocessors: u32,
    log: RefCell<VecDeque<Launch>>,
    fault: RefCell<Option<TensorError>>,
    /// Whether a recording is being made: launches are not executed then.
    is_recording: Cell<bool>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device(cuda:{} {})", self.device_idx, self.name)
    }
}

impl Device {
    /// Opens device `device_idx` for the calling thread.
    pub(crate) fn open(device_idx: usize) -> Result<Self> {
        let n_devices = library::device_count().map_err(|error| TensorError::Device(error.to_string()))?;
        if device_idx >= n_devices {
            return Err(TensorError::Device(format!(
                "cuda:{device_idx} does not exist, there are {n_devices} CUDA devices (cuda:0 to cuda:{})",
                n_devices - 1
            )));
        }
        let opening = |error| driver_failure("opening the device", error);
        let device = device::get(device_idx as i32).map_err(opening)?;
        // SAFETY: `device` is valid; the context is released once, in `drop`.
        let context = unsafe { primary_ctx::retain(device) }.map_err(opening)?;
        let opened = || -> std::result::Result<_, DriverError> {
            // SAFETY: the context was retained above.
            unsafe { ctx::set_current(context)? };
            let attribute = |attribute| {
                // SAFETY: `device` is valid.
                unsafe { device::get_attribute(device, attribute) }.map(|value| value as u32)
            };
            use sys::CUdevice_attribute as Attribute;
            Ok((
                device::get_name(device)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
                stream::create(stream::StreamKind::NonBlocking)?,
            ))
        };
        match opened() {
            Ok((name, major, minor, n_multiprocessors, stream)) => Ok(Self {
                device,
                device_idx,
                stream,
                name,
                compute_capability: (major, minor),
                n_multiprocessors,
                log: RefCell::default(),
                fault: RefCell::default(),
                is_recording: Cell::new(false),
            }),
            Err(error) => {
                // SAFETY: retained above, not used any more.
                let _ = unsafe { primary_ctx::release(device) };
                Err(opening(error))
            }
        }
    }

    pub(crate) fn device_idx(&self) -> usize {
        self.device_idx
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Major and minor number, e.g. (9, 0).
    pub(crate) fn compute_capability(&self) -> (u32, u32) {
        self.compute_capability
    }

    pub(crate) fn n_multiprocessors(&self) -> u32 {
        self.n_multiprocessors
    }

    pub(crate) fn raw(&self) -> sys::CUdevice {
        self.device
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Refuses if the device has failed for good.
    pub(crate) fn check_alive(&self) -> Result<()> {
        match &*self.fault.borrow() {
            Some(fault) => Err(fault.clone()),
            None => Ok(()),
        }
    }

    /// The driver's answer to something that `what` names; an error that lasts is latched.
    pub(crate) fn check<T>(&self, what: &str, answer: std::result::Result<T, DriverError>) -> Result<T> {
        answer.map_err(|error| {
            let failure = match self.log.borrow().back() {
                Some(last) => {
                    TensorError::Device(format!("{}; the last launch was {last}", text(what, error)))
                }
                None => driver_failure(what, error),
            };
            if is_sticky(error) {
                self.fault.borrow_mut().get_or_insert_with(|| failure.clone());
            }
            failure
        })
    }

    /// Enqueues work that is not a kernel of ours; `launch` is what a report of a fault shows.
    pub(crate) fn enqueue(&self, launch: Launch, work: impl FnOnce() -> Result<()>) -> Result<()> {
        self.check_alive()?;
        self.note(launch);
        work()
    }

    /// Enqueues `function` with one argument.
    ///
    /// # Safety
    /// `args` is what the kernel takes, and everything it points to outlives the kernel (memory of this device's stream does).
    pub(crate) unsafe fn launch<A: Copy>(
        &self,
        function: sys::CUfunction,
        launch: Launch,
        args: &A,
    ) -> Result<()> {
        self.check_alive()?;
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        let shared_bytes = launch.shared_bytes;
        let what = launch.name.clone();
        self.note(launch);
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the caller vouches for `args`, which the driver copies before it returns; `function` belongs to this context.
        let answer = unsafe {
            result::launch_kernel(
                function,
                (gx, gy, gz),
                (bx, by, bz),
                shared_bytes,
                self.stream,
                &mut params,
            )
        };
        self.check(&what, answer)
    }

    fn note(&self, launch: Launch) {
        let mut log = self.log.borrow_mut();
        if log.len() == LOG_LEN {
            log.pop_front();
        }
        log.push_back(launch);
    }

    /// Waits until all that was enqueued has run.
    pub(crate) fn synchronize(&self, what: &str) -> Result<()> {
        self.check_alive()?;
        // SAFETY: the stream lives as long as `self`.
        let answer = unsafe { stream::synchronize(self.stream) };
        self.check(what, answer)?;
        self.log.borrow_mut().clear();
        Ok(())
    }

    pub(crate) fn is_recording(&self) -> bool {
        self.is_recording.get()
    }

    pub(crate) fn set_recording(&self, is_recording: bool) {
        self.is_recording.set(is_recording);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: both were made in `open` and are given back once. What they answer does not matter any more.
        unsafe {
            let _ = stream::synchronize(self.stream);
            let _ = stream::destroy(self.stream);
            let _ = primary_ctx::release(self.device);
        }
    }
}

/// Errors after which a context is of no use.
fn is_sticky(error: DriverError) -> bool {
    use sys::CUresult as E;
    matches!(
        error.0,
        E::CUDA_ERROR_ILLEGAL_ADDRESS
            | E::CUDA_ERROR_MISALIGNED_ADDRESS
            | E::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | E::CUDA_ERROR_INVALID_PC
            | E::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | E::CUDA_ERROR_HARDWARE_STACK_ERROR
            | E::CUDA_ERROR_LAUNCH_FAILED
            | E::CUDA_ERROR_LAUNCH_TIMEOUT
            | E::CUDA_ERROR_ASSERT
            | E::CUDA_ERROR_ECC_UNCORRECTABLE
            | E::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | E::CUDA_ERROR_DEINITIALIZED
    )
}

fn text(what: &str, error: DriverError) -> String {
    let (name, text) = library::error_texts(error);
    format!("{what}: {name} ({text})")
}

pub(crate) fn driver_failure(what: &str, error: DriverError) -> TensorError {
    TensorError::Device(text(what, error))
}
