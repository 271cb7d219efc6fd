//! Device memory: a mapping per allocation that ends at an inaccessible page, begins as NaN and goes when it is freed.

use crate::{
    api, device, env,
    error::{INVALID_VALUE, OUT_OF_MEMORY, Outcome},
    stream::{self, enqueue},
};
use std::{
    collections::BTreeMap,
    ffi::{c_int, c_uint, c_void},
    sync::{
        LazyLock, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

const PAGE: usize = 4096;
/// Vector loads and asynchronous copies need 16, products like 256.
const ALIGN: usize = 256;

struct Allocation {
    map: usize,
    map_len: usize,
    len_bytes: usize,
    device: usize,
}

static ALLOCATIONS: LazyLock<Mutex<BTreeMap<usize, Allocation>>> = LazyLock::new(Mutex::default);
/// Page-locked memory of the host: start and length. Copies from and to it are truly asynchronous.
static PINNED: LazyLock<Mutex<BTreeMap<usize, usize>>> = LazyLock::new(Mutex::default);
static USED: [AtomicUsize; env::MAX_DEVICES] = [const { AtomicUsize::new(0) }; env::MAX_DEVICES];
static MOST_USED: [AtomicUsize; env::MAX_DEVICES] = [const { AtomicUsize::new(0) }; env::MAX_DEVICES];

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn allocate(device: usize, len_bytes: usize) -> Outcome<usize> {
    if len_bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let within = |used: usize| used.checked_add(len_bytes).filter(|used| *used <= *env::MEMORY_BYTES);
    let used = USED[device].fetch_update(SeqCst, SeqCst, within).map_err(|_| OUT_OF_MEMORY)? + len_bytes;
    MOST_USED[device].fetch_max(used, SeqCst);
    let room = len_bytes.div_ceil(ALIGN) * ALIGN;
    let map_len = room.div_ceil(PAGE) * PAGE + PAGE;
    // SAFETY: a fresh private mapping; its last page is closed.
    let map = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let map = libc::mmap(std::ptr::null_mut(), map_len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        if map == libc::MAP_FAILED || libc::mprotect(map.byte_add(map_len - PAGE), PAGE, libc::PROT_NONE) != 0 {
            USED[device].fetch_sub(len_bytes, SeqCst);
            return Err(OUT_OF_MEMORY);
        }
        map as usize
    };
    // As far right as the alignment of what fits before the guard allows: 16 for short ones, so that a step beyond the end is seen.
    let align = if len_bytes.is_multiple_of(ALIGN) { ALIGN } else { 16 };
    let start = map + ((map_len - PAGE - len_bytes) & !(align - 1));
    // SAFETY: the mapping is that long; all bits set are a NaN of any float.
    unsafe { std::ptr::write_bytes(start as *mut u8, 0xff, map + map_len - PAGE - start) };
    let allocation = Allocation { map, map_len, len_bytes, device };
    locked(&ALLOCATIONS).insert(start, allocation);
    Ok(start)
}

fn free(start: usize) -> Outcome {
    let Some(allocation) = locked(&ALLOCATIONS).remove(&start) else {
        return if start == 0 { Ok(()) } else { Err(INVALID_VALUE) };
    };
    // SAFETY: mapped in `allocate`, unmapped once; whoever still reads it deserves the fault.
    unsafe { libc::munmap(allocation.map as *mut c_void, allocation.map_len) };
    USED[allocation.device].fetch_sub(allocation.len_bytes, SeqCst);
    Ok(())
}

/// Refuses a range of device memory that is not inside one allocation.
pub(crate) fn check_range(start: usize, len_bytes: usize) -> Outcome {
    let allocations = locked(&ALLOCATIONS);
    let holder = allocations.range(..=start).next_back();
    let is_inside = holder.is_some_and(|(own, allocation)| start + len_bytes <= own + allocation.len_bytes);
    if len_bytes == 0 || is_inside { Ok(()) } else { Err(INVALID_VALUE) }
}

fn is_pinned(start: usize, len_bytes: usize) -> bool {
    let pinned = locked(&PINNED);
    let holder = pinned.range(..=start).next_back();
    holder.is_some_and(|(own, len)| start + len_bytes <= own + len)
}

fn copy_now(to: usize, from: usize, len_bytes: usize) -> Outcome {
    // SAFETY: both ranges were checked, or are the caller's host memory.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len_bytes) };
    Ok(())
}

fn fill_now<T: Copy>(to: usize, value: T, count: usize) -> Outcome {
    for i in 0..count {
        // SAFETY: the range was checked.
        unsafe { (to as *mut T).add(i).write_unaligned(value) };
    }
    Ok(())
}

/// What waits for everything and then happens at once.
fn synchronous(work: impl FnOnce() -> Outcome) -> Outcome {
    stream::refuse_unsafe_call()?;
    stream::synchronize_device(device::current()?)?;
    work()
}

fn pool(handle: usize) -> Outcome<usize> {
    handle.checked_sub(1).filter(|device| device < &*env::N_DEVICES).ok_or(INVALID_VALUE)
}

api! {
    /// Free and total memory.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let used = USED[device::current()?].load(SeqCst);
        unsafe { (*free, *total) = (*env::MEMORY_BYTES - used, *env::MEMORY_BYTES) };
        Ok(())
    }
    /// Memory at once.
    fn cuMemAlloc_v2(start: *mut usize, len_bytes: usize) {
        stream::refuse_unsafe_call()?;
        unsafe { *start = allocate(device::current()?, len_bytes)? };
        Ok(())
    }
    /// Memory in stream order. Refused in a capture, which is stricter than the driver: it would make a node of the graph.
    fn cuMemAllocAsync(start: *mut usize, len_bytes: usize, stream: usize) {
        stream::refuse_capturing(stream)?;
        unsafe { *start = allocate(stream::stream(stream)?.device(), len_bytes)? };
        Ok(())
    }
    /// Frees when all streams have come so far.
    fn cuMemFree_v2(start: usize) { synchronous(|| free(start)) }
    /// Frees in stream order; refused in a capture, as is its counterpart.
    fn cuMemFreeAsync(start: usize, stream: usize) {
        stream::refuse_capturing(stream)?;
        check_range(start, 1)?;
        enqueue(stream, move || free(start))
    }
    /// Page-locked memory of the host.
    fn cuMemHostAlloc(start: *mut usize, len_bytes: usize, _flags: c_uint) {
        let memory = unsafe { libc::memalign(PAGE, len_bytes.max(1)) } as usize;
        if memory == 0 { return Err(OUT_OF_MEMORY) }
        locked(&PINNED).insert(memory, len_bytes);
        unsafe { *start = memory };
        Ok(())
    }
    /// Gives page-locked memory back.
    fn cuMemFreeHost(start: usize) {
        locked(&PINNED).remove(&start).ok_or(INVALID_VALUE)?;
        unsafe { libc::free(start as *mut c_void) };
        Ok(())
    }
    /// The device's address of page-locked memory, which is the same.
    fn cuMemHostGetDevicePointer_v2(device_start: *mut usize, start: usize, _flags: c_uint) {
        if !is_pinned(start, 1) { return Err(INVALID_VALUE) }
        unsafe { *device_start = start };
        Ok(())
    }
    /// To the device, at once.
    fn cuMemcpyHtoD_v2(to: usize, from: usize, len_bytes: usize) {
        check_range(to, len_bytes)?;
        synchronous(|| copy_now(to, from, len_bytes))
    }
    /// From the device, at once.
    fn cuMemcpyDtoH_v2(to: usize, from: usize, len_bytes: usize) {
        check_range(from, len_bytes)?;
        synchronous(|| copy_now(to, from, len_bytes))
    }
    /// To the device in stream order. What is pageable has been read when the call returns; in a capture it is read by each replay.
    fn cuMemcpyHtoDAsync_v2(to: usize, from: usize, len_bytes: usize, stream: usize) {
        check_range(to, len_bytes)?;
        if is_pinned(from, len_bytes) || stream::is_capturing(stream)? {
            return enqueue(stream, move || copy_now(to, from, len_bytes));
        }
        let staged = unsafe { std::slice::from_raw_parts(from as *const u8, len_bytes) }.to_vec();
        enqueue(stream, move || copy_now(to, staged.as_ptr() as usize, len_bytes))
    }
    /// From the device in stream order. What is pageable is there when the call returns; in a capture each replay writes it.
    fn cuMemcpyDtoHAsync_v2(to: usize, from: usize, len_bytes: usize, stream: usize) {
        check_range(from, len_bytes)?;
        let is_late = is_pinned(to, len_bytes) || stream::is_capturing(stream)?;
        enqueue(stream, move || copy_now(to, from, len_bytes))?;
        if is_late { Ok(()) } else { stream::synchronize(stream) }
    }
    /// On the device in stream order.
    fn cuMemcpyDtoDAsync_v2(to: usize, from: usize, len_bytes: usize, stream: usize) {
        check_range(to, len_bytes)?;
        check_range(from, len_bytes)?;
        enqueue(stream, move || copy_now(to, from, len_bytes))
    }
    /// Fills bytes in stream order.
    fn cuMemsetD8Async(to: usize, value: u8, count: usize, stream: usize) {
        check_range(to, count)?;
        enqueue(stream, move || fill_now(to, value, count))
    }
    /// Fills words in stream order.
    fn cuMemsetD32Async(to: usize, value: u32, count: usize, stream: usize) {
        check_range(to, 4 * count)?;
        enqueue(stream, move || fill_now(to, value, count))
    }
    /// Writes a word in stream order, to the device or to page-locked memory.
    fn cuStreamWriteValue32_v2(stream: usize, to: usize, value: u32, _flags: c_uint) {
        if !is_pinned(to, 4) { check_range(to, 4)? }
        enqueue(stream, move || {
            // SAFETY: four bytes that were checked.
            unsafe { (to as *mut u32).write_volatile(value) };
            Ok(())
        })
    }
    /// The device's one pool.
    fn cuDeviceGetDefaultMemPool(handle: *mut usize, device: c_int) {
        pool(device as usize + 1)?;
        unsafe { *handle = device as usize + 1 };
        Ok(())
    }
    /// The pool keeps nothing, whatever it is told.
    fn cuMemPoolSetAttribute(handle: usize, _attribute: c_int, _value: *mut c_void) { pool(handle).map(|_| ()) }
    /// What the pool holds (5, 7) and the most it held (6, 8).
    fn cuMemPoolGetAttribute(handle: usize, attribute: c_int, value: *mut u64) {
        let device = pool(handle)?;
        let bytes = match attribute {
            5 | 7 => USED[device].load(SeqCst),
            6 | 8 => MOST_USED[device].load(SeqCst),
            _ => 0,
        };
        unsafe { *value = bytes as u64 };
        Ok(())
    }
    /// Nothing to trim.
    fn cuMemPoolTrimTo(handle: usize, _keep: usize) { pool(handle).map(|_| ()) }
}
