//! Devices and their primary contexts. The context of device `d` is the number `d + 1`, made to look like a pointer.

use crate::{
    api, env,
    error::{INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, Outcome},
    stream,
};
use std::{
    cell::Cell,
    ffi::{CString, c_char, c_int, c_uint},
    sync::atomic::{AtomicI32, AtomicUsize, Ordering::SeqCst},
};

thread_local! { static CURRENT: Cell<usize> = const { Cell::new(0) }; }

/// A fault of a kernel is the end of its device, for this process.
static FAULTS: [AtomicI32; env::MAX_DEVICES] = [const { AtomicI32::new(0) }; env::MAX_DEVICES];
static RETAINED: [AtomicUsize; env::MAX_DEVICES] = [const { AtomicUsize::new(0) }; env::MAX_DEVICES];

/// The calling thread's device, sound or not.
pub(crate) fn entered() -> Outcome<usize> {
    CURRENT.get().checked_sub(1).ok_or(INVALID_CONTEXT)
}

/// The calling thread's device, if it is sound.
pub(crate) fn current() -> Outcome<usize> {
    let device = entered()?;
    check(device)?;
    Ok(device)
}

/// Fails with the fault that ended `device`, if one did.
pub(crate) fn check(device: usize) -> Outcome {
    match FAULTS[device].load(SeqCst) {
        0 => Ok(()),
        code => Err(code),
    }
}

/// Ends `device` with `code`; the first fault stays.
pub(crate) fn fail(device: usize, code: c_int) {
    let _ = FAULTS[device].compare_exchange(0, code, SeqCst, SeqCst);
}

pub(crate) fn make_current(device: usize) {
    CURRENT.set(device + 1);
}

fn known(device: c_int) -> Outcome<usize> {
    let device = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
    if device < *env::N_DEVICES { Ok(device) } else { Err(INVALID_DEVICE) }
}

/// Numbers of `CUdevice_attribute` that a runtime asks for.
fn attribute(attribute: c_int) -> c_int {
    match attribute {
        // Threads of a block and of each of its dimensions.
        1..=3 => 1024,
        4 => 64,
        // Blocks of each dimension of a grid.
        5 => i32::MAX,
        6 | 7 => 65_535,
        // Shared memory of a block, and the most that it may opt in for.
        8 => 48 << 10,
        81 | 97 => *env::OPTED_SHARED_BYTES as c_int,
        10 => 32,
        12 => 65_536,
        // Clock in kHz, multiprocessors, memory clock, width of its bus, second-level cache.
        13 => 1_000_000,
        16 => 4,
        36 => 1_000_000,
        37 => 512,
        38 => 4 << 20,
        // Unified addresses, memory mapped from the host, memory pools.
        41 | 19 | 115 => 1,
        75 => *env::COMPUTE_CAPABILITY as c_int / 10,
        76 => *env::COMPUTE_CAPABILITY as c_int % 10,
        _ => 0,
    }
}

api! {
    /// Starts the driver.
    fn cuInit(_flags: c_uint) { if *env::N_DEVICES == 0 { Err(NO_DEVICE) } else { Ok(()) } }
    /// 13.0, or what the environment says.
    fn cuDriverGetVersion(version: *mut c_int) { unsafe { *version = *env::DRIVER as c_int }; Ok(()) }
    /// How many devices there are.
    fn cuDeviceGetCount(count: *mut c_int) { unsafe { *count = *env::N_DEVICES as c_int }; Ok(()) }
    /// A device by its number.
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) { known(ordinal)?; unsafe { *device = ordinal }; Ok(()) }
    /// `CPU stand-in N`.
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) {
        let text = CString::new(format!("CPU stand-in {}", known(device)?)).map_err(|_| INVALID_VALUE)?;
        let n = text.as_bytes_with_nul().len().min(usize::try_from(len).map_err(|_| INVALID_VALUE)?);
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), name, n) };
        Ok(())
    }
    /// Sixteen equal bytes.
    fn cuDeviceGetUuid_v2(uuid: *mut u8, device: c_int) {
        unsafe { std::ptr::write_bytes(uuid, known(device)? as u8 + 1, 16) };
        Ok(())
    }
    /// The limit that the environment sets.
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) { known(device)?; unsafe { *bytes = *env::MEMORY_BYTES }; Ok(()) }
    /// One of the device's numbers.
    fn cuDeviceGetAttribute(value: *mut c_int, number: c_int, device: c_int) {
        known(device)?;
        unsafe { *value = attribute(number) };
        Ok(())
    }
    /// Takes a reference to the device's context.
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        let device = known(device)?;
        RETAINED[device].fetch_add(1, SeqCst);
        unsafe { *context = device + 1 };
        Ok(())
    }
    /// Gives a reference back.
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let released = RETAINED[known(device)?].fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1));
        released.map(|_| ()).map_err(|_| INVALID_CONTEXT)
    }
    /// The calling thread's context.
    fn cuCtxGetCurrent(context: *mut usize) { unsafe { *context = CURRENT.get() }; Ok(()) }
    /// Makes a context the calling thread's.
    fn cuCtxSetCurrent(context: usize) {
        let is_retained = context == 0 || RETAINED.get(context - 1).is_some_and(|n| n.load(SeqCst) > 0);
        if !is_retained { return Err(INVALID_CONTEXT) }
        CURRENT.set(context);
        Ok(())
    }
    /// Nothing here depends on flags.
    fn cuCtxSetFlags(_flags: c_uint) { Ok(()) }
    /// Waits for all streams of the device.
    fn cuCtxSynchronize() {
        stream::refuse_unsafe_call()?;
        stream::synchronize_device(current()?)
    }
}
