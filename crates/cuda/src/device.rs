//! One device: its context, its streams, the log of what was launched, and the error that lasts.
//!
//! R1. Every launch is in the log. Before each one the stream writes its number into memory of the host, so that after a fault the
//!     number that was written last names the launch that caused it. Replays of recordings have one number in all.
//! R2. An error after which a context is of no use is latched: every later op returns it.
//! R3. A thread may have several devices open. Whatever calls the driver enters its own device first ([`Device::enter`]): another may have
//!     been used since.

use crate::library;
use cudarc::{
    cublaslt::{result::CublasError, sys as lt},
    driver::{
        DriverError,
        result::{self, ctx, device, primary_ctx, stream},
        sys,
    },
};
use denoised_tensor::{Result, TensorError, WeightSet};
use std::{cell::RefCell, collections::VecDeque, ffi::c_void, fmt, sync::Arc};

/// Launches that are remembered for the report of a fault.
const LOG_LEN: usize = 4096;

/// One enqueued piece of work, as a fault's report shows it.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    /// Kernel, product or recording.
    pub(crate) name: String,
    /// All zero where the extents are not ours.
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
}

impl Launch {
    /// Work whose extents are not ours.
    pub(crate) fn named(name: String) -> Self {
        Self {
            name,
            grid: [0; 3],
            block: [0; 3],
            shared_bytes: 0,
        }
    }
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([gx, gy, gz], [bx, by, bz]) = (self.grid, self.block);
        if gx == 0 {
            return f.write_str(&self.name);
        }
        let shared_bytes = self.shared_bytes;
        write!(
            f,
            "kernel {}, grid {gx}x{gy}x{gz}, block {bx}x{by}x{bz}, {shared_bytes} bytes of shared memory",
            self.name
        )
    }
}

/// An open device. Belongs to the thread that opened it.
pub(crate) struct Device {
    device: sys::CUdevice,
    /// The device's primary one, which this retains.
    context: sys::CUcontext,
    device_idx: usize,
    stream: sys::CUstream,
    /// For what must happen while the other is being recorded.
    side_stream: sys::CUstream,
    name: String,
    compute_capability: (u32, u32),
    n_multiprocessors: u32,
    /// Most shared memory that a block may have.
    max_shared_bytes: u32,
    /// Whether every launch is waited for.
    is_checked: bool,
    mark: Option<Mark>,
    log: RefCell<Log>,
    fault: RefCell<Option<TensorError>>,
    recording: RefCell<Option<Recording>>,
}

/// The latest launches with their numbers.
#[derive(Default)]
struct Log {
    next: u32,
    launches: VecDeque<(u32, Launch)>,
}

/// What is noted while launches are recorded instead of run.
#[derive(Default)]
pub(crate) struct Recording {
    pub(crate) n_launches: usize,
    /// Weights whose addresses are in the recording.
    pub(crate) weights: Vec<Arc<dyn WeightSet>>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device(cuda:{} {})", self.device_idx, self.name)
    }
}

impl Device {
    /// Opens device `device_idx` for the calling thread. With `is_checked` every launch is waited for.
    pub(crate) fn open(device_idx: usize, is_checked: bool) -> Result<Self> {
        let n_devices = library::device_count().map_err(|error| TensorError::Device(error.to_string()))?;
        if device_idx >= n_devices {
            return Err(TensorError::Device(format!(
                "cuda:{device_idx} does not exist, there are {n_devices} CUDA devices (cuda:0 to cuda:{})",
                n_devices - 1
            )));
        }
        library::device_is_supported(device_idx).map_err(|error| TensorError::Device(error.to_string()))?;
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
            let name = device::get_name(device)?;
            let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
            let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
            let n_multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
            let max_shared_bytes =
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
            let stream = stream::create(stream::StreamKind::NonBlocking)?;
            let side_stream = stream::create(stream::StreamKind::NonBlocking)?;
            Ok(Self {
                device,
                context,
                device_idx,
                stream,
                side_stream,
                name,
                compute_capability: (major, minor),
                n_multiprocessors,
                max_shared_bytes,
                is_checked,
                mark: None,
                log: RefCell::default(),
                fault: RefCell::default(),
                recording: RefCell::default(),
            })
        };
        match opened() {
            Ok(mut opened) => {
                opened.mark = Mark::new(opened.stream);
                Ok(opened)
            }
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

    /// Most shared memory that a block may have.
    pub(crate) fn max_shared_bytes(&self) -> u32 {
        self.max_shared_bytes
    }

    /// Whether every launch is waited for, so that nothing is recorded either.
    pub(crate) fn is_checked(&self) -> bool {
        self.is_checked
    }

    pub(crate) fn raw(&self) -> sys::CUdevice {
        self.device
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    pub(crate) fn side_stream(&self) -> sys::CUstream {
        self.side_stream
    }

    /// Refuses if the device has failed for good.
    pub(crate) fn check_alive(&self) -> Result<()> {
        match &*self.fault.borrow() {
            Some(fault) => Err(fault.clone()),
            None => Ok(()),
        }
    }

    /// Makes this the device that the calling thread's calls of the driver are about (R3).
    ///
    /// # Errors
    /// What the device failed with for good.
    pub(crate) fn enter(&self) -> Result<()> {
        self.check_alive()?;
        // SAFETY: the context is retained as long as `self`.
        let entered = unsafe { ctx::set_current(self.context) };
        self.check("entering the device", entered)
    }

    /// As [`Device::enter`], for giving back what a device that failed may still hold.
    pub(crate) fn enter_to_free(&self) {
        // SAFETY: as above. What is given back next says whether it could be.
        let _ = unsafe { ctx::set_current(self.context) };
    }

    /// The answer of cuBLASLt to something that `what` names. It tells little of what went wrong, so the driver is asked first.
    pub(crate) fn check_product<T>(
        &self,
        what: &str,
        answer: std::result::Result<T, CublasError>,
    ) -> Result<T> {
        answer.map_err(|CublasError(status)| {
            if !self.is_recording() {
                // SAFETY: the stream lives as long as `self`. It is not asked while it is captured, which would end the capture.
                let state = unsafe { sys::cuStreamQuery(self.stream) }.result();
                if let Err(error) = state
                    && is_sticky(error)
                    && let Err(failure) = self.check::<()>(what, Err(error))
                {
                    return failure;
                }
            }
            match status {
                lt::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED => out_of_memory(what),
                _ => TensorError::Device(format!("{what}: cuBLASLt answers {status:?}")),
            }
        })
    }

    /// The driver's answer to something that `what` names; an error that lasts is latched.
    pub(crate) fn check<T>(&self, what: &str, answer: std::result::Result<T, DriverError>) -> Result<T> {
        answer.map_err(|error| {
            if !is_sticky(error) {
                return driver_failure(what, error);
            }
            let (name, text) = library::error_texts(error);
            let failure =
                TensorError::Device(format!("{name} ({text}) {}; noticed at {what}", self.culprit()));
            self.fault.borrow_mut().get_or_insert(failure).clone()
        })
    }

    /// Which launch the device was at.
    fn culprit(&self) -> String {
        let log = self.log.borrow();
        let marked = self.mark.as_ref().map(Mark::read);
        let entry = log.launches.iter().find(|(number, _)| Some(*number) == marked);
        match (entry, log.launches.back()) {
            (Some((_, launch)), _) => format!("in {launch}"),
            (None, Some((_, last))) => format!(
                "in one of {} launches, the last of them {last}",
                log.launches.len()
            ),
            (None, None) => "outside of launches".to_owned(),
        }
    }

    /// Enqueues work that is not a kernel of ours; `launch` is what a report of a fault shows.
    pub(crate) fn enqueue(&self, launch: Launch, work: impl FnOnce() -> Result<()>) -> Result<()> {
        self.enter()?;
        self.note(launch)?;
        work()?;
        self.wait_if_checked()
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
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        let shared_bytes = launch.shared_bytes;
        let what = launch.name.clone();
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        self.enqueue(launch, || {
            // SAFETY: the caller vouches for `args`, which the driver copies before it returns; `function` belongs to this context.
            let answer = unsafe {
                let (grid, block) = ((gx, gy, gz), (bx, by, bz));
                result::launch_kernel(function, grid, block, shared_bytes, self.stream, &mut params)
            };
            self.check(&what, answer)
        })
    }

    /// Puts a launch into the log and its number in front of it (R1).
    fn note(&self, launch: Launch) -> Result<()> {
        if let Some(recording) = &mut *self.recording.borrow_mut() {
            recording.n_launches += 1;
            return Ok(());
        }
        let mut log = self.log.borrow_mut();
        // Zero is what stands there before the first.
        log.next = log.next.wrapping_add(1).max(1);
        let number = log.next;
        if log.launches.len() == LOG_LEN {
            log.launches.pop_front();
        }
        log.launches.push_back((number, launch));
        drop(log);
        match &self.mark {
            Some(mark) => self.check("marking a launch", mark.write(self.stream, number)),
            None => Ok(()),
        }
    }

    fn wait_if_checked(&self) -> Result<()> {
        if self.is_checked && !self.is_recording() {
            // SAFETY: the stream lives as long as `self`.
            let answer = unsafe { stream::synchronize(self.stream) };
            self.check("the wait behind it", answer)?;
        }
        Ok(())
    }

    /// Waits until all that was enqueued has run.
    ///
    /// # Errors
    /// The device's; [`TensorError::Operand`] while a recording is being made, which cannot wait.
    pub(crate) fn synchronize(&self, what: &'static str) -> Result<()> {
        self.enter()?;
        self.refuse_in_recording(what)?;
        // SAFETY: the stream lives as long as `self`.
        let answer = unsafe { stream::synchronize(self.stream) };
        self.check(what, answer)?;
        self.log.borrow_mut().launches.clear();
        Ok(())
    }

    /// Waits for the side stream.
    pub(crate) fn synchronize_side(&self, what: &str) -> Result<()> {
        // SAFETY: the stream lives as long as `self`.
        let answer = unsafe { stream::synchronize(self.side_stream) };
        self.check(what, answer)
    }

    /// Refuses what a recording cannot hold.
    pub(crate) fn refuse_in_recording(&self, op: &'static str) -> Result<()> {
        if !self.is_recording() {
            return Ok(());
        }
        let detail = "it waits, which a repeated body must not".to_owned();
        Err(TensorError::Operand { op, detail })
    }

    pub(crate) fn is_recording(&self) -> bool {
        self.recording.borrow().is_some()
    }

    /// From now on launches are recorded, until [`Device::end_recording`].
    pub(crate) fn begin_recording(&self) {
        *self.recording.borrow_mut() = Some(Recording::default());
    }

    /// What was noted since [`Device::begin_recording`].
    pub(crate) fn end_recording(&self) -> Recording {
        self.recording.borrow_mut().take().unwrap_or_default()
    }

    /// Keeps weights alive as long as the recording that is being made, if one is.
    pub(crate) fn keep(&self, weights: &Arc<dyn WeightSet>) {
        if let Some(recording) = &mut *self.recording.borrow_mut() {
            let is_same = |own: &Arc<dyn WeightSet>| Arc::ptr_eq(own, weights);
            if !recording.weights.iter().any(is_same) {
                recording.weights.push(Arc::clone(weights));
            }
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.enter_to_free();
        // SAFETY: all were made in `open` and are given back once. What they answer does not matter any more.
        unsafe {
            let _ = stream::synchronize(self.stream);
            self.mark = None;
            let _ = stream::destroy(self.side_stream);
            let _ = stream::destroy(self.stream);
            let _ = primary_ctx::release(self.device);
        }
    }
}

/// A number in memory of the host that the stream writes.
struct Mark {
    host: *mut c_void,
    device: sys::CUdeviceptr,
}

impl Mark {
    /// `None` where the driver has no such memory or no such writes.
    fn new(stream: sys::CUstream) -> Option<Self> {
        // SAFETY: the memory is given back once, in `drop`; the device address is that of this memory.
        unsafe {
            let host = result::malloc_host(4, sys::CU_MEMHOSTALLOC_DEVICEMAP).ok()?;
            host.cast::<u32>().write(0);
            let mut mark = Self { host, device: 0 };
            sys::cuMemHostGetDevicePointer_v2(&raw mut mark.device, host, 0)
                .result()
                .ok()?;
            mark.write(stream, 0).ok()?;
            Some(mark)
        }
    }

    fn write(&self, stream: sys::CUstream, number: u32) -> std::result::Result<(), DriverError> {
        // SAFETY: four bytes of mapped memory that live as long as the device.
        unsafe { sys::cuStreamWriteValue32_v2(stream, self.device, number, 0) }.result()
    }

    fn read(&self) -> u32 {
        // SAFETY: four bytes of ours, which only the device writes.
        unsafe { self.host.cast::<u32>().read_volatile() }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: made in `new`, given back once; the stream was waited for.
        let _ = unsafe { result::free_host(self.host) };
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
            | E::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | E::CUDA_ERROR_CONTAINED
            | E::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | E::CUDA_ERROR_MPS_RPC_FAILURE
            | E::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | E::CUDA_ERROR_EXTERNAL_DEVICE
            | E::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | E::CUDA_ERROR_DEINITIALIZED
            | E::CUDA_ERROR_UNKNOWN
    )
}

/// What the driver could not do; that it had no memory for it is told as such.
pub(crate) fn driver_failure(what: &str, error: DriverError) -> TensorError {
    if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return out_of_memory(what);
    }
    let (name, text) = library::error_texts(error);
    TensorError::Device(format!("{what}: {name} ({text})"))
}

/// For what does not say how much it needed. The device was entered.
fn out_of_memory(what: &str) -> TensorError {
    TensorError::OutOfMemory {
        what: what.to_owned(),
        needed_bytes: 0,
        available_bytes: result::mem_get_info().map_or(0, |(free_bytes, _)| free_bytes as u64),
    }
}
