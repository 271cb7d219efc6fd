//! Stand-in libcuda.so (prototype): N fake devices, asynchronous streams (one thread each),
//! events, guarded device memory, modules that are shared objects of CPU-compiled kernels,
//! graph capture by recording, and memory handles for other processes.
#![allow(non_snake_case, clippy::missing_safety_doc)]
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_char, c_int, c_uint, c_void, CStr, CString};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering::SeqCst};
use std::sync::{mpsc, Arc, Condvar, LazyLock, Mutex};
use std::time::Instant;

type R = c_int;
const OK: R = 0;
const INVALID_VALUE: R = 1;
const OOM: R = 2;
const NO_DEVICE: R = 100;
const INVALID_DEVICE: R = 101;
const INVALID_IMAGE: R = 200;
const INVALID_CONTEXT: R = 201;
const NOT_FOUND: R = 500;
const NOT_READY: R = 600;
const ILLEGAL_ADDRESS: R = 700;

static CALLED: LazyLock<Mutex<BTreeSet<&'static str>>> = LazyLock::new(Default::default);
/// Declares entry points; FAKECUDA_TRACE makes each first use visible on stderr.
macro_rules! api {
    ($(fn $name:ident($($a:ident : $t:ty),* $(,)?) $body:block)*) => { $(
        #[no_mangle] pub unsafe extern "C" fn $name($($a: $t),*) -> R {
            if *TRACE && CALLED.lock().unwrap().insert(stringify!($name)) {
                eprintln!("fakecuda: {:2} {}", CALLED.lock().unwrap().len(), stringify!($name));
            }
            #[allow(unused_mut)] let mut f = move || -> R { $body };
            f()
        } )* };
}
static TRACE: LazyLock<bool> = LazyLock::new(|| std::env::var_os("FAKECUDA_TRACE").is_some());
fn env_num(k: &str, d: usize) -> usize { std::env::var(k).ok().and_then(|v| v.parse().ok()).unwrap_or(d) }
static DEVICES: LazyLock<usize> = LazyLock::new(|| env_num("FAKECUDA_DEVICES", 2).min(16));
static MEM_TOTAL: LazyLock<usize> = LazyLock::new(|| env_num("FAKECUDA_MEM", 2 << 30));
static USED: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];
static STICKY: [AtomicI32; 16] = [const { AtomicI32::new(0) }; 16]; // kernel faults poison a device

// ---- contexts: the primary context of device d is the fake pointer d+1
thread_local! { static CUR: Cell<usize> = const { Cell::new(0) }; }
fn dev() -> Result<usize, R> {
    match CUR.get() { 0 => Err(INVALID_CONTEXT), c => match STICKY[c - 1].load(SeqCst) { 0 => Ok(c - 1), e => Err(e) } }
}
macro_rules! tri { ($e:expr) => { match $e { Ok(v) => v, Err(e) => return e } }; }

// ---- device memory: a memfd mapping that ends at an inaccessible page and starts as NaN
struct Alloc { map: usize, len: usize, bytes: usize, fd: c_int, dev: usize, foreign: bool, pooled: bool }
static MEM: LazyLock<Mutex<BTreeMap<usize, Alloc>>> = LazyLock::new(Default::default);
const PAGE: usize = 4096;
unsafe fn map_guarded(fd: c_int, len: usize) -> usize {
    let base = libc::mmap(std::ptr::null_mut(), len + PAGE, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
    if base == libc::MAP_FAILED { return 0 }
    let p = libc::mmap(base, len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED, fd, 0);
    if p == libc::MAP_FAILED { 0 } else { base as usize }
}
unsafe fn alloc(d: usize, bytes: usize, pooled: bool) -> Result<usize, R> {
    if bytes == 0 { return Err(INVALID_VALUE) }
    if USED[d].fetch_add(bytes, SeqCst) + bytes > *MEM_TOTAL { USED[d].fetch_sub(bytes, SeqCst); return Err(OOM) }
    let len = bytes.div_ceil(PAGE) * PAGE;
    let fd = libc::memfd_create(c"fakecuda".as_ptr(), libc::MFD_CLOEXEC);
    if fd < 0 || libc::ftruncate(fd, len as i64) != 0 { return Err(OOM) }
    let map = map_guarded(fd, len);
    if map == 0 { libc::close(fd); return Err(OOM) }
    let ptr = map + ((len - bytes) & !15); // right-aligned; 16-byte alignment is kept for vector loads
    std::ptr::write_bytes(ptr as *mut u8, 0xff, map + len - ptr);
    MEM.lock().unwrap().insert(ptr, Alloc { map, len, bytes, fd, dev: d, foreign: false, pooled });
    Ok(ptr)
}
unsafe fn free(p: usize) -> R {
    let Some(a) = MEM.lock().unwrap().remove(&p) else { return if p == 0 { OK } else { INVALID_VALUE } };
    libc::munmap(a.map as *mut _, a.len + PAGE);
    libc::close(a.fd);
    if !a.foreign { USED[a.dev].fetch_sub(a.bytes, SeqCst); }
    OK
}
/// A copy or fill must stay inside one allocation, as the driver checks.
fn in_bounds(p: usize, n: usize) -> bool {
    n == 0 || MEM.lock().unwrap().range(..=p).next_back().is_some_and(|(s, a)| p + n <= s + a.bytes)
}

/// Page-locked host ranges: copies to and from these are truly asynchronous.
static PINNED: LazyLock<Mutex<BTreeMap<usize, usize>>> = LazyLock::new(Default::default);
fn pinned(p: usize, n: usize) -> bool { PINNED.lock().unwrap().range(..=p).next_back().is_some_and(|(s, l)| p + n <= s + l) }

// ---- streams
type Job = Arc<dyn Fn() -> R + Send + Sync>;
struct Stream { dev: usize, tx: Mutex<mpsc::Sender<Job>>, prog: Arc<(Mutex<(u64, u64)>, Condvar)>, capture: Mutex<Option<Vec<Job>>> }
impl Stream {
    fn new(dev: usize) -> Arc<Stream> {
        let (tx, rx) = mpsc::channel::<Job>();
        let prog = Arc::new((Mutex::new((0u64, 0u64)), Condvar::new()));
        let p = prog.clone();
        let delay = env_num("FAKECUDA_DELAY_US", 0); // makes asynchrony visible to tests
        std::thread::Builder::new().stack_size(1 << 20).spawn(move || {
            CUR.set(dev + 1);
            while let Ok(j) = rx.recv() {
                if delay > 0 { std::thread::sleep(std::time::Duration::from_micros(delay as u64)) }
                if STICKY[dev].load(SeqCst) == 0 { let rc = j(); if rc != 0 { STICKY[dev].store(rc, SeqCst) } }
                drop(j);
                p.0.lock().unwrap().1 += 1;
                p.1.notify_all();
            }
        }).unwrap();
        Arc::new(Stream { dev, tx: Mutex::new(tx), prog, capture: Mutex::new(None) })
    }
    fn push(&self, j: Job) -> R {
        if let Some(c) = self.capture.lock().unwrap().as_mut() { c.push(j); return OK }
        self.prog.0.lock().unwrap().0 += 1;
        if self.tx.lock().unwrap().send(j).is_err() { INVALID_CONTEXT } else { OK }
    }
    fn sync(&self) -> R {
        let mut g = self.prog.0.lock().unwrap();
        let upto = g.0;
        while g.1 < upto { g = self.prog.1.wait(g).unwrap() }
        STICKY[self.dev].load(SeqCst)
    }
}
static STREAMS: LazyLock<Mutex<BTreeMap<usize, Arc<Stream>>>> = LazyLock::new(Default::default);
fn stream(h: usize) -> Result<Arc<Stream>, R> {
    let d = dev()?;
    let mut m = STREAMS.lock().unwrap();
    if h == 0 { return Ok(m.entry(d + 1).or_insert_with(|| Stream::new(d)).clone()) } // per-device default stream
    m.get(&h).cloned().ok_or(400)
}
fn enqueue(h: usize, f: impl Fn() -> R + Send + Sync + 'static) -> R { tri!(stream(h)).push(Arc::new(f)) }

#[derive(Default)]
struct Event { st: Mutex<(u64, u64, Option<Instant>)>, cv: Condvar } // issued, reached, when
static EVENTS: LazyLock<Mutex<BTreeMap<usize, Arc<Event>>>> = LazyLock::new(Default::default);
fn event(h: usize) -> Result<Arc<Event>, R> { EVENTS.lock().unwrap().get(&h).cloned().ok_or(400) }
fn fresh() -> usize { static N: AtomicUsize = AtomicUsize::new(0x1000); N.fetch_add(16, SeqCst) }

// ---- modules
#[repr(C)]
struct KernelRecord { n: c_int, max_threads: c_int, sizes: *const c_uint, run: extern "C" fn(*mut *mut c_void, *const c_uint, *const c_uint, usize) -> c_int }
struct Func { rec: *const KernelRecord, dyn_limit: AtomicUsize }
unsafe fn open_module(path: &CStr, out: *mut usize) -> R {
    let h = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
    if h.is_null() { eprintln!("fakecuda: {}", CStr::from_ptr(libc::dlerror()).to_string_lossy()); return INVALID_IMAGE }
    *out = h as usize;
    OK
}
struct SendPtr<T>(*const T);
unsafe impl<T> Send for SendPtr<T> {}
unsafe impl<T> Sync for SendPtr<T> {}
struct Graph(Vec<Job>);
#[repr(C)]
pub struct IpcHandle([u64; 8]); // process, descriptor, mapping length, size

unsafe fn copy(dst: usize, src: usize, n: usize) -> R { std::ptr::copy(src as *const u8, dst as *mut u8, n); OK }

api! {
    fn cuInit(_f: c_uint) { if *DEVICES == 0 { NO_DEVICE } else { OK } }
    fn cuDriverGetVersion(v: *mut c_int) { *v = 13000; OK }
    fn cuDeviceGetCount(n: *mut c_int) { *n = *DEVICES as c_int; OK }
    fn cuDeviceGet(d: *mut c_int, i: c_int) { if i < 0 || i as usize >= *DEVICES { return INVALID_DEVICE } *d = i; OK }
    fn cuDeviceGetName(buf: *mut c_char, len: c_int, d: c_int) {
        let s = CString::new(format!("CPU stand-in {d}")).unwrap();
        let n = s.as_bytes_with_nul().len().min(len as usize);
        std::ptr::copy_nonoverlapping(s.as_ptr(), buf, n); OK
    }
    fn cuDeviceGetUuid_v2(u: *mut u8, d: c_int) { std::ptr::write_bytes(u, d as u8 + 1, 16); OK }
    fn cuDeviceTotalMem_v2(n: *mut usize, _d: c_int) { *n = *MEM_TOTAL; OK }
    fn cuDeviceGetAttribute(v: *mut c_int, attr: c_int, _d: c_int) {
        *v = match attr { 1 | 2 | 3 => 1024, 4 => 64, 5 => i32::MAX, 6 | 7 => 65535, 8 => 48 << 10, 10 => 32, 12 => 65536, 16 => 4,
            75 => env_num("FAKECUDA_CC", 90) as c_int / 10, 76 => env_num("FAKECUDA_CC", 90) as c_int % 10,
            81 | 97 => 227 << 10, 115 => 1, _ => 0 };
        OK
    }
    fn cuDeviceCanAccessPeer(v: *mut c_int, _a: c_int, _b: c_int) { *v = 1; OK }
    fn cuDevicePrimaryCtxRetain(c: *mut usize, d: c_int) { *c = d as usize + 1; OK }
    fn cuDevicePrimaryCtxRelease_v2(_d: c_int) { OK }
    fn cuCtxGetCurrent(c: *mut usize) { *c = CUR.get(); OK }
    fn cuCtxSetCurrent(c: usize) { CUR.set(c); OK }
    fn cuCtxSetFlags(_f: c_uint) { OK }
    fn cuCtxSynchronize() {
        let d = tri!(dev());
        let all: Vec<_> = STREAMS.lock().unwrap().values().filter(|s| s.dev == d).cloned().collect();
        all.iter().map(|s| s.sync()).max().unwrap_or(OK)
    }
    fn cuMemGetInfo_v2(f: *mut usize, t: *mut usize) { let d = tri!(dev()); *t = *MEM_TOTAL; *f = *MEM_TOTAL - USED[d].load(SeqCst); OK }
    fn cuMemAlloc_v2(p: *mut usize, n: usize) { *p = tri!(alloc(tri!(dev()), n, false)); OK }
    fn cuMemAllocAsync(p: *mut usize, n: usize, _s: usize) { *p = tri!(alloc(tri!(dev()), n, true)); OK }
    fn cuMemFree_v2(p: usize) { let rc = cuCtxSynchronize(); if rc != 0 { return rc } free(p) }
    fn cuMemFreeAsync(p: usize, s: usize) { enqueue(s, move || unsafe { free(p) }) }
    fn cuMemHostAlloc(p: *mut usize, n: usize, _f: c_uint) { *p = libc::memalign(PAGE, n) as usize; PINNED.lock().unwrap().insert(*p, n); OK }
    fn cuMemAllocHost_v2(p: *mut usize, n: usize) { cuMemHostAlloc(p, n, 0) }
    fn cuMemHostGetDevicePointer_v2(d: *mut usize, p: usize, _f: c_uint) { if !pinned(p, 1) { return INVALID_VALUE } *d = p; OK }
    fn cuStreamWriteValue32_v2(s: usize, p: usize, v: u32, _f: c_uint) {
        if !in_bounds(p, 4) && !pinned(p, 4) { return INVALID_VALUE }
        enqueue(s, move || { unsafe { std::ptr::write_volatile(p as *mut u32, v) }; OK })
    }
    fn cuDeviceGetDefaultMemPool(p: *mut usize, d: c_int) { *p = d as usize + 1; OK }
    fn cuMemPoolSetAttribute(_p: usize, _a: c_int, _v: *mut c_void) { OK }
    fn cuMemPoolGetAttribute(p: usize, a: c_int, v: *mut u64) {
        // 4 release threshold, 5 and 6 reserved now and at most, 7 and 8 used now and at most
        *v = match a { 5 | 7 => USED[p - 1].load(SeqCst) as u64, _ => 0 }; OK
    }
    fn cuMemPoolTrimTo(_p: usize, _n: usize) { OK }
    fn cuMemFreeHost(p: usize) { PINNED.lock().unwrap().remove(&p); libc::free(p as *mut _); OK }
    fn cuMemcpyHtoD_v2(d: usize, s: usize, n: usize) { if !in_bounds(d, n) { return INVALID_VALUE } let rc = cuCtxSynchronize(); if rc != 0 { return rc } copy(d, s, n) }
    fn cuMemcpyDtoH_v2(d: usize, s: usize, n: usize) { if !in_bounds(s, n) { return INVALID_VALUE } let rc = cuCtxSynchronize(); if rc != 0 { return rc } copy(d, s, n) }
    fn cuMemcpyHtoDAsync_v2(d: usize, s: usize, n: usize, h: usize) {
        if !in_bounds(d, n) { return INVALID_VALUE }
        if pinned(s, n) { return enqueue(h, move || unsafe { copy(d, s, n) }) }
        let staged = std::slice::from_raw_parts(s as *const u8, n).to_vec(); // pageable: the source may be reused at once
        enqueue(h, move || unsafe { copy(d, staged.as_ptr() as usize, n) })
    }
    fn cuMemcpyDtoHAsync_v2(d: usize, s: usize, n: usize, h: usize) {
        if !in_bounds(s, n) { return INVALID_VALUE }
        let rc = enqueue(h, move || unsafe { copy(d, s, n) });
        if rc != 0 || pinned(d, n) { return rc }
        cuStreamSynchronize(h) // pageable: returns when the data is there
    }
    fn cuMemcpyDtoDAsync_v2(d: usize, s: usize, n: usize, h: usize) { if !in_bounds(d, n) || !in_bounds(s, n) { return INVALID_VALUE } enqueue(h, move || unsafe { copy(d, s, n) }) }
    fn cuMemcpyPeerAsync(d: usize, _dc: usize, s: usize, _sc: usize, n: usize, h: usize) { if !in_bounds(d, n) || !in_bounds(s, n) { return INVALID_VALUE } enqueue(h, move || unsafe { copy(d, s, n) }) }
    fn cuMemsetD8Async(d: usize, v: u8, n: usize, h: usize) { if !in_bounds(d, n) { return INVALID_VALUE } enqueue(h, move || unsafe { std::ptr::write_bytes(d as *mut u8, v, n); OK }) }
    fn cuStreamCreate(s: *mut usize, _f: c_uint) { let d = tri!(dev()); *s = fresh(); STREAMS.lock().unwrap().insert(*s, Stream::new(d)); OK }
    fn cuStreamCreateWithPriority(s: *mut usize, f: c_uint, _p: c_int) { cuStreamCreate(s, f) }
    fn cuStreamDestroy_v2(s: usize) { STREAMS.lock().unwrap().remove(&s); OK } // its thread drains the queue, then ends
    fn cuStreamSynchronize(s: usize) { tri!(stream(s)).sync() }
    fn cuStreamQuery(s: usize) { let s = tri!(stream(s)); let g = s.prog.0.lock().unwrap(); if g.0 == g.1 { OK } else { NOT_READY } }
    fn cuStreamWaitEvent(s: usize, e: usize, _f: c_uint) {
        let ev = tri!(event(e));
        let ticket = ev.st.lock().unwrap().0;
        enqueue(s, move || { let mut g = ev.st.lock().unwrap(); while g.1 < ticket { g = ev.cv.wait(g).unwrap() } OK })
    }
    fn cuEventCreate(e: *mut usize, _f: c_uint) { *e = fresh(); EVENTS.lock().unwrap().insert(*e, Default::default()); OK }
    fn cuEventDestroy_v2(e: usize) { EVENTS.lock().unwrap().remove(&e); OK }
    fn cuEventRecord(e: usize, s: usize) {
        let ev = tri!(event(e));
        let ticket = { let mut g = ev.st.lock().unwrap(); g.0 += 1; g.0 };
        enqueue(s, move || { let mut g = ev.st.lock().unwrap(); g.1 = g.1.max(ticket); g.2 = Some(Instant::now()); ev.cv.notify_all(); OK })
    }
    fn cuEventSynchronize(e: usize) { let ev = tri!(event(e)); let mut g = ev.st.lock().unwrap(); while g.1 < g.0 { g = ev.cv.wait(g).unwrap() } OK }
    fn cuEventQuery(e: usize) { let ev = tri!(event(e)); let g = ev.st.lock().unwrap(); if g.1 < g.0 { NOT_READY } else { OK } }
    fn cuEventElapsedTime_v2(ms: *mut f32, a: usize, b: usize) {
        let (a, b) = (tri!(event(a)).st.lock().unwrap().2, tri!(event(b)).st.lock().unwrap().2);
        match (a, b) { (Some(a), Some(b)) => { *ms = b.duration_since(a).as_secs_f32() * 1e3; OK } _ => 400 }
    }
    fn cuModuleLoad(m: *mut usize, path: *const c_char) { open_module(CStr::from_ptr(path), m) }
    fn cuModuleLoadData(m: *mut usize, image: *const c_char) {
        if libc::strncmp(image, c"CPUMOD:".as_ptr(), 7) != 0 { eprintln!("fakecuda: this image is not a CPU module (PTX and CUBIN cannot run here)"); return INVALID_IMAGE }
        open_module(CStr::from_ptr(image.add(7)), m)
    }
    fn cuModuleGetFunction(f: *mut usize, m: usize, name: *const c_char) {
        let sym = CString::new(format!("cpucuda_kernel_{}", CStr::from_ptr(name).to_string_lossy())).unwrap();
        let rec = libc::dlsym(m as *mut _, sym.as_ptr()) as *const KernelRecord;
        if rec.is_null() { return NOT_FOUND }
        *f = Box::into_raw(Box::new(Func { rec, dyn_limit: AtomicUsize::new(48 << 10) })) as usize; OK
    }
    fn cuModuleUnload(m: usize) { let rc = cuCtxSynchronize(); let _ = rc; libc::dlclose(m as *mut _); OK }
    fn cuFuncSetAttribute(f: usize, attr: c_int, v: c_int) {
        if attr == 8 { if v as usize > 227 << 10 { return INVALID_VALUE } (*(f as *const Func)).dyn_limit.store(v as usize, SeqCst) } OK
    }
    fn cuFuncGetAttribute(v: *mut c_int, attr: c_int, f: usize) { *v = match attr { 0 => 1024, 8 => (*(f as *const Func)).dyn_limit.load(SeqCst) as c_int, _ => 0 }; OK }
    fn cuFuncGetParamInfo(f: usize, i: usize, off: *mut usize, size: *mut usize) {
        let r = &*(*(f as *const Func)).rec;
        if i >= r.n as usize { return INVALID_VALUE }
        let mut at = 0usize;
        for k in 0..=i { let s = *r.sizes.add(k) as usize; let al = s.next_power_of_two().min(16); at = at.div_ceil(al) * al; if k == i { *off = at; if !size.is_null() { *size = s } } at += s; }
        OK
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(n: *mut c_int, _f: usize, block: c_int, _d: usize) { *n = 2048 / block.max(1); OK }
    fn cuLaunchKernel(f: usize, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, smem: c_uint, s: usize, params: *mut *mut c_void, _extra: *mut *mut c_void) {
        let func = &*(f as *const Func);
        let rec = SendPtr(func.rec);
        let (g, b) = ([gx, gy, gz], [bx, by, bz]);
        if g.contains(&0) || b.contains(&0) || gy > 65535 || gz > 65535 || bx * by * bz > 1024 || bz > 64 || smem as usize > func.dyn_limit.load(SeqCst) { return INVALID_VALUE }
        // The driver copies argument values at launch; so does this, into 16-byte aligned slots.
        let r = &*func.rec;
        let vals: Vec<Vec<u128>> = (0..r.n as usize).map(|i| {
            let n = *r.sizes.add(i) as usize;
            let mut v = vec![0u128; n.div_ceil(16)];
            std::ptr::copy_nonoverlapping(*params.add(i) as *const u8, v.as_mut_ptr() as *mut u8, n); v }).collect();
        enqueue(s, move || {
            let rec = &rec; let mut p: Vec<*mut c_void> = vals.iter().map(|v| v.as_ptr() as *mut c_void).collect();
            unsafe { ((*rec.0).run)(p.as_mut_ptr(), g.as_ptr(), b.as_ptr(), smem as usize) }
        })
    }
    fn cuLaunchHostFunc(s: usize, f: extern "C" fn(*mut c_void), a: usize) { enqueue(s, move || { f(a as *mut c_void); OK }) }
    fn cuStreamIsCapturing(s: usize, st: *mut c_int) { *st = tri!(stream(s)).capture.lock().unwrap().is_some() as c_int; OK }
    fn cuStreamBeginCapture_v2(s: usize, _m: c_int) { *tri!(stream(s)).capture.lock().unwrap() = Some(vec![]); OK }
    fn cuStreamEndCapture(s: usize, g: *mut usize) {
        let Some(v) = tri!(stream(s)).capture.lock().unwrap().take() else { return 900 };
        *g = Box::into_raw(Box::new(Graph(v))) as usize; OK
    }
    fn cuGraphInstantiateWithFlags(x: *mut usize, g: usize, _f: u64) { *x = Box::into_raw(Box::new(Graph((*(g as *const Graph)).0.clone()))) as usize; OK }
    fn cuGraphUpload(_x: usize, _s: usize) { OK }
    fn cuGraphLaunch(x: usize, s: usize) { let st = tri!(stream(s)); for j in &(*(x as *const Graph)).0 { let rc = st.push(j.clone()); if rc != 0 { return rc } } OK }
    fn cuGraphExecDestroy(x: usize) { drop(Box::from_raw(x as *mut Graph)); OK }
    fn cuGraphDestroy(x: usize) { drop(Box::from_raw(x as *mut Graph)); OK }
    fn cuIpcGetMemHandle(h: *mut u64, p: usize) {
        let m = MEM.lock().unwrap(); let Some(a) = m.get(&p) else { return INVALID_VALUE };
        if a.pooled { return INVALID_VALUE } // stream-ordered memory has no such handle
        for (i, v) in [std::process::id() as u64, a.fd as u64, a.len as u64, a.bytes as u64, 0, 0, 0, 0].into_iter().enumerate() { *h.add(i) = v } OK
    }
    fn cuIpcOpenMemHandle_v2(p: *mut usize, h: IpcHandle, _flags: c_uint) {
        let (d, [a, b, len, bytes, ..]) = (tri!(dev()), h.0);
        let fd = libc::open(CString::new(format!("/proc/{a}/fd/{b}")).unwrap().as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        if fd < 0 { return INVALID_VALUE }
        let map = map_guarded(fd, len as usize);
        if map == 0 { return OOM }
        let ptr = map + ((len - bytes) as usize & !15);
        MEM.lock().unwrap().insert(ptr, Alloc { map, len: len as usize, bytes: bytes as usize, fd, dev: d, foreign: true, pooled: false });
        *p = ptr; OK
    }
    fn cuIpcCloseMemHandle(p: usize) { free(p) }
    fn cuGetErrorName(e: R, s: *mut *const c_char) { *s = err_text(e).0.as_ptr(); OK }
    fn cuGetErrorString(e: R, s: *mut *const c_char) { *s = err_text(e).1.as_ptr(); OK }
}
fn err_text(e: R) -> (&'static CStr, &'static CStr) {
    match e {
        OK => (c"CUDA_SUCCESS", c"no error"), INVALID_VALUE => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        OOM => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"), INVALID_IMAGE => (c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
        NOT_FOUND => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"), ILLEGAL_ADDRESS => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
        716 => (c"CUDA_ERROR_MISALIGNED_ADDRESS", c"misaligned address"),
        719 => (c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"), _ => (c"CUDA_ERROR", c"error"),
    }
}
