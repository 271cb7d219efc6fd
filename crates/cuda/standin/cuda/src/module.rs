//! Modules: shared objects that the stand-in's compiler made, and launches of their kernels.

use crate::{
    api, device,
    env::{Mishap, OPTED_SHARED_BYTES, mishap},
    error::{
        INVALID_HANDLE, INVALID_IMAGE, INVALID_VALUE, LAUNCH_OUT_OF_RESOURCES, NOT_FOUND, Outcome,
    },
    stream::{self, enqueue},
};
use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread,
    time::Duration,
};

/// What an image begins with; the path of a shared object follows.
const IMAGE: &CStr = c"CPUMOD:";
/// Most dynamic shared memory without opting in.
const SHARED_BYTES: usize = 48 << 10;

type Run = extern "C" fn(*mut *mut c_void, *const c_uint, *const c_uint, usize) -> c_int;

/// What a shared object says of a kernel; mirrors `KernelRecord` of the shim.
#[repr(C)]
struct KernelRecord {
    n_parameters: c_int,
    max_threads: c_int,
    parameter_bytes: *const c_uint,
    run: Run,
}

/// A kernel that was looked up.
struct Function {
    device: usize,
    record: &'static KernelRecord,
    name: String,
    max_shared_bytes: AtomicUsize,
}

impl Function {
    fn parameter_bytes(&self) -> &[c_uint] {
        // SAFETY: as many as the record says, for as long as the module is loaded.
        unsafe { std::slice::from_raw_parts(self.record.parameter_bytes, self.record.n_parameters as usize) }
    }
}

/// # Safety
/// `handle` is one that `cuModuleGetFunction` gave.
unsafe fn function<'a>(handle: usize) -> Outcome<&'a Function> {
    // SAFETY: the caller's promise; functions are never given back.
    unsafe { (handle as *const Function).as_ref() }.ok_or(INVALID_VALUE)
}

fn open(path: &CStr) -> Outcome<usize> {
    // SAFETY: a path of our compiler's; its initialisers do nothing.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        eprintln!("fakecuda: cannot open {}", path.to_string_lossy());
        return Err(INVALID_IMAGE);
    }
    Ok(handle as usize)
}

api! {
    /// Opens an image of the stand-in's compiler; others cannot run here.
    fn cuModuleLoadData(module: *mut usize, image: *const c_char) {
        device::current()?;
        stream::refuse_unsafe_call()?;
        let is_ours = unsafe { libc::strncmp(image, IMAGE.as_ptr(), IMAGE.count_bytes()) } == 0;
        if !is_ours { return Err(INVALID_IMAGE) }
        unsafe { *module = open(CStr::from_ptr(image.add(IMAGE.count_bytes())))? };
        Ok(())
    }
    /// Closes a module when nothing runs any more.
    fn cuModuleUnload(module: usize) {
        if let Ok(device) = device::current() { let _ = stream::synchronize_device(device); }
        unsafe { libc::dlclose(module as *mut c_void) };
        Ok(())
    }
    /// A kernel by its name.
    fn cuModuleGetFunction(handle: *mut usize, module: usize, name: *const c_char) {
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        let symbol = CString::new(format!("cpucuda_kernel_{name}")).map_err(|_| INVALID_VALUE)?;
        let record = unsafe { libc::dlsym(module as *mut c_void, symbol.as_ptr()).cast::<KernelRecord>().as_ref() };
        let record = record.ok_or(NOT_FOUND)?;
        let function = Function { device: device::entered()?, record, name, max_shared_bytes: AtomicUsize::new(SHARED_BYTES) };
        unsafe { *handle = Box::into_raw(Box::new(function)) as usize };
        Ok(())
    }
    /// 8: opts in for more dynamic shared memory.
    fn cuFuncSetAttribute(handle: usize, attribute: c_int, value: c_int) {
        let function = unsafe { function(handle)? };
        if attribute == 8 {
            let bytes = usize::try_from(value).map_err(|_| INVALID_VALUE)?;
            if bytes > *OPTED_SHARED_BYTES { return Err(INVALID_VALUE) }
            function.max_shared_bytes.store(bytes, SeqCst);
        }
        Ok(())
    }
    /// 0: most threads of a block; 8: most dynamic shared memory.
    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, handle: usize) {
        let function = unsafe { function(handle)? };
        unsafe { *value = match attribute {
            0 => function.record.max_threads,
            8 => function.max_shared_bytes.load(SeqCst) as c_int,
            _ => 0,
        } };
        Ok(())
    }
    /// Where a parameter lies and how long it is.
    fn cuFuncGetParamInfo(handle: usize, idx: usize, offset: *mut usize, len_bytes: *mut usize) {
        let function = unsafe { function(handle)? };
        let sizes = function.parameter_bytes();
        let own = *sizes.get(idx).ok_or(INVALID_VALUE)? as usize;
        let mut at = 0usize;
        for size in &sizes[..=idx] {
            at = at.next_multiple_of((*size as usize).next_power_of_two().min(16));
            at += *size as usize;
        }
        unsafe { *offset = at - own };
        if !len_bytes.is_null() { unsafe { *len_bytes = own } }
        Ok(())
    }
    /// Enqueues a kernel. The values of its parameters are copied now.
    fn cuLaunchKernel(handle: usize, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared_bytes: c_uint,
                      stream: usize, parameters: *mut *mut c_void, _extra: *mut *mut c_void) {
        let function = unsafe { function(handle)? };
        // Function, stream and current context belong together.
        let device = stream::stream(stream)?.device();
        if function.device != device || device::current()? != device { return Err(INVALID_HANDLE) }
        let (grid, block) = ([gx, gy, gz], [bx, by, bz]);
        let n_threads = u64::from(bx) * u64::from(by) * u64::from(bz);
        let is_sound = !grid.contains(&0) && !block.contains(&0) && gy <= 65_535 && gz <= 65_535 && bz <= 64
            && shared_bytes as usize <= function.max_shared_bytes.load(SeqCst);
        if !is_sound { return Err(INVALID_VALUE) }
        if n_threads > function.record.max_threads as u64 { return Err(LAUNCH_OUT_OF_RESOURCES) }
        // Slots of 16 bytes, as aligned as any parameter.
        let values: Vec<Vec<u128>> = function.parameter_bytes().iter().enumerate().map(|(i, size)| {
            let mut value = vec![0u128; (*size as usize).div_ceil(16)];
            // SAFETY: the caller passes as many parameters as the kernel has, each as long as it says.
            unsafe { std::ptr::copy_nonoverlapping((*parameters.add(i)).cast::<u8>(), value.as_mut_ptr().cast(), *size as usize) };
            value
        }).collect();
        let (run, name) = (function.record.run, &function.name);
        enqueue(stream, move || {
            match mishap(name) {
                Some(Mishap::Fault(code)) => return Err(code),
                Some(Mishap::Hang) => loop { thread::sleep(Duration::from_secs(1)) },
                Some(Mishap::Slow(us)) => thread::sleep(Duration::from_micros(us)),
                None => {}
            }
            let mut pointers: Vec<*mut c_void> = values.iter().map(|value| value.as_ptr().cast_mut().cast()).collect();
            match run(pointers.as_mut_ptr(), grid.as_ptr(), block.as_ptr(), shared_bytes as usize) {
                0 => Ok(()),
                code => Err(code),
            }
        })
    }
}
