//! Streams: a thread each, which does its jobs in order; and captures, in which jobs are noted instead.
//!
//! The rules of captures are the driver's. A capture is a sequence here, in the order of the calls, which is one of the orders that the
//! driver's graph allows.

use crate::{
    api, device, env,
    error::{
        INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, NOT_READY, Outcome, STREAM_CAPTURE_IMPLICIT, STREAM_CAPTURE_INVALIDATED,
        STREAM_CAPTURE_UNJOINED, STREAM_CAPTURE_UNMATCHED, STREAM_CAPTURE_UNSUPPORTED, STREAM_CAPTURE_WRONG_THREAD,
    },
    graph::Graph,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{c_int, c_uint, c_void},
    sync::{
        Arc, Condvar, LazyLock, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    thread::{self, ThreadId},
    time::Duration,
};

/// Something that a stream does.
pub(crate) type Job = Arc<dyn Fn() -> Outcome + Send + Sync>;

const NON_BLOCKING: c_uint = 1;
const MODE_GLOBAL: c_int = 0;
const MODE_RELAXED: c_int = 2;

pub(crate) struct Stream {
    handle: usize,
    device: usize,
    is_blocking: bool,
    jobs: Mutex<mpsc::Sender<Job>>,
    /// Jobs given and done.
    progress: Arc<(Mutex<(u64, u64)>, Condvar)>,
    capture: Mutex<Option<Arc<Capture>>>,
}

/// A sequence of jobs that is being noted.
pub(crate) struct Capture {
    origin: usize,
    mode: c_int,
    thread: ThreadId,
    state: Mutex<CaptureState>,
}

#[derive(Default)]
struct CaptureState {
    jobs: Vec<Job>,
    is_invalid: bool,
    /// Streams that joined, and those whose last work nobody of the origin has waited for.
    members: BTreeSet<usize>,
    unjoined: BTreeSet<usize>,
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A handle that was not given before.
pub(crate) fn fresh_handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
    NEXT.fetch_add(16, SeqCst)
}

static STREAMS: LazyLock<Mutex<BTreeMap<usize, Arc<Stream>>>> = LazyLock::new(Mutex::default);

impl Stream {
    fn new(handle: usize, device: usize, is_blocking: bool) -> Outcome<Arc<Self>> {
        let (jobs, received) = mpsc::channel::<Job>();
        let progress = Arc::new((Mutex::new((0, 0)), Condvar::new()));
        let told = Arc::clone(&progress);
        let work = move || {
            device::make_current(device);
            while let Ok(job) = received.recv() {
                if *env::DELAY_US > 0 {
                    thread::sleep(Duration::from_micros(*env::DELAY_US as u64));
                }
                // A failed device does nothing any more.
                if device::check(device).is_ok()
                    && let Err(code) = job()
                {
                    device::fail(device, code);
                }
                drop(job);
                locked(&told.0).1 += 1;
                told.1.notify_all();
            }
        };
        thread::Builder::new().stack_size(1 << 20).spawn(work).map_err(|_| INVALID_CONTEXT)?;
        Ok(Arc::new(Self {
            handle,
            device,
            is_blocking,
            jobs: Mutex::new(jobs),
            progress,
            capture: Mutex::new(None),
        }))
    }

    pub(crate) fn device(&self) -> usize {
        self.device
    }

    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        locked(&self.capture).clone()
    }

    /// Does the job later, or notes it.
    pub(crate) fn push(&self, job: Job) -> Outcome {
        if let Some(capture) = self.capture() {
            let mut state = locked(&capture.state);
            if state.is_invalid {
                return Err(STREAM_CAPTURE_INVALIDATED);
            }
            if self.handle != capture.origin {
                state.unjoined.insert(self.handle);
            }
            state.jobs.push(job);
            return Ok(());
        }
        locked(&self.progress.0).0 += 1;
        locked(&self.jobs).send(job).map_err(|_| INVALID_CONTEXT)
    }

    fn wait(&self) -> Outcome {
        let mut progress = locked(&self.progress.0);
        let until = progress.0;
        while progress.1 < until {
            progress = self.progress.1.wait(progress).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        device::check(self.device)
    }

    /// Makes this stream a part of `capture`.
    pub(crate) fn join(&self, capture: &Arc<Capture>) {
        let mut state = locked(&capture.state);
        state.members.insert(self.handle);
        state.unjoined.insert(self.handle);
        *locked(&self.capture) = Some(Arc::clone(capture));
    }
}

impl Capture {
    pub(crate) fn invalidate(&self) {
        locked(&self.state).is_invalid = true;
    }

    /// The origin has waited for what `stream` did.
    pub(crate) fn rejoin(&self, waiting: usize, stream: usize) {
        if waiting == self.origin {
            locked(&self.state).unjoined.remove(&stream);
        }
    }
}

pub(crate) fn stream(handle: usize) -> Outcome<Arc<Stream>> {
    let device = device::current()?;
    let mut streams = locked(&STREAMS);
    if handle != 0 {
        return streams.get(&handle).cloned().ok_or(INVALID_HANDLE);
    }
    // The legacy stream waits for blocking ones, which a capture cannot take part in.
    let captures = streams.values().filter(|stream| stream.is_blocking && stream.device == device).filter_map(|stream| stream.capture());
    let mut is_refused = false;
    for capture in captures {
        capture.invalidate();
        is_refused = true;
    }
    if is_refused {
        return Err(STREAM_CAPTURE_IMPLICIT);
    }
    let legacy = device + 1;
    if let Some(stream) = streams.get(&legacy) {
        return Ok(Arc::clone(stream));
    }
    let stream = Stream::new(legacy, device, false)?;
    streams.insert(legacy, Arc::clone(&stream));
    Ok(stream)
}

pub(crate) fn enqueue(handle: usize, job: impl Fn() -> Outcome + Send + Sync + 'static) -> Outcome {
    stream(handle)?.push(Arc::new(job))
}

pub(crate) fn is_capturing(handle: usize) -> Outcome<bool> {
    Ok(stream(handle)?.capture().is_some())
}

/// Refuses, and so invalidates, in the capture of this stream.
pub(crate) fn refuse_capturing(handle: usize) -> Outcome {
    match stream(handle)?.capture() {
        None => Ok(()),
        Some(capture) => {
            capture.invalidate();
            Err(STREAM_CAPTURE_UNSUPPORTED)
        }
    }
}

/// What may wait or change the device at once is refused to a thread with a capture that is not relaxed, and to all while there is a
/// global one.
pub(crate) fn refuse_unsafe_call() -> Outcome {
    let captures: Vec<_> = locked(&STREAMS).values().filter_map(|stream| stream.capture()).collect();
    let mut is_refused = false;
    for capture in captures {
        let is_own = capture.thread == thread::current().id() && capture.mode != MODE_RELAXED;
        if is_own || capture.mode == MODE_GLOBAL {
            capture.invalidate();
            is_refused = true;
        }
    }
    if is_refused { Err(STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

pub(crate) fn synchronize(handle: usize) -> Outcome {
    refuse_capturing(handle)?;
    stream(handle)?.wait()
}

pub(crate) fn synchronize_device(device: usize) -> Outcome {
    let streams: Vec<_> = locked(&STREAMS).values().filter(|stream| stream.device == device).cloned().collect();
    for stream in streams {
        if stream.capture().is_none() {
            stream.wait()?;
        }
    }
    device::check(device)
}

api! {
    /// A new stream.
    fn cuStreamCreate(handle: *mut usize, flags: c_uint) {
        let own = fresh_handle();
        let stream = Stream::new(own, device::current()?, flags & NON_BLOCKING == 0)?;
        locked(&STREAMS).insert(own, stream);
        unsafe { *handle = own };
        Ok(())
    }
    /// A new stream; priorities do not matter.
    fn cuStreamCreateWithPriority(handle: *mut usize, flags: c_uint, _priority: c_int) {
        match unsafe { cuStreamCreate(handle, flags) } { 0 => Ok(()), code => Err(code) }
    }
    /// Its thread finishes what it was given.
    fn cuStreamDestroy_v2(handle: usize) {
        let stream = locked(&STREAMS).remove(&handle).ok_or(INVALID_HANDLE)?;
        if let Some(capture) = stream.capture() { capture.invalidate() }
        Ok(())
    }
    /// Waits.
    fn cuStreamSynchronize(handle: usize) { synchronize(handle) }
    /// Whether all is done.
    fn cuStreamQuery(handle: usize) {
        refuse_capturing(handle)?;
        let stream = stream(handle)?;
        let progress = locked(&stream.progress.0);
        if progress.0 == progress.1 { Ok(()) } else { Err(NOT_READY) }
    }
    /// Calls a function of the host in stream order.
    fn cuLaunchHostFunc(handle: usize, function: extern "C" fn(*mut c_void), argument: usize) {
        enqueue(handle, move || { function(argument as *mut c_void); Ok(()) })
    }
    /// Begins to note what is given to the stream.
    fn cuStreamBeginCapture_v2(handle: usize, mode: c_int) {
        // The legacy stream cannot be captured.
        if handle == 0 || !(0..=2).contains(&mode) { return Err(INVALID_VALUE) }
        refuse_capturing(handle)?;
        let stream = stream(handle)?;
        let capture = Capture { origin: handle, mode, thread: thread::current().id(), state: Mutex::default() };
        *locked(&stream.capture) = Some(Arc::new(capture));
        Ok(())
    }
    /// Ends a capture where it began.
    fn cuStreamEndCapture(handle: usize, graph: *mut usize) {
        unsafe { *graph = 0 };
        let capture = stream(handle)?.capture().ok_or(STREAM_CAPTURE_UNMATCHED)?;
        if capture.origin != handle { return Err(STREAM_CAPTURE_UNMATCHED) }
        if capture.mode != MODE_RELAXED && capture.thread != thread::current().id() {
            return Err(STREAM_CAPTURE_WRONG_THREAD);
        }
        let mut state = locked(&capture.state);
        for stream in locked(&STREAMS).values() {
            if stream.handle == handle || state.members.contains(&stream.handle) { *locked(&stream.capture) = None }
        }
        if state.is_invalid { return Err(STREAM_CAPTURE_INVALIDATED) }
        if !state.unjoined.is_empty() { return Err(STREAM_CAPTURE_UNJOINED) }
        unsafe { *graph = Graph::into_handle(std::mem::take(&mut state.jobs)) };
        Ok(())
    }
    /// 0 for none, 1 for one under way, 2 for one that is spoilt.
    fn cuStreamIsCapturing(handle: usize, status: *mut c_int) {
        let capture = stream(handle)?.capture();
        unsafe { *status = capture.map_or(0, |capture| if locked(&capture.state).is_invalid { 2 } else { 1 }) };
        Ok(())
    }
}
