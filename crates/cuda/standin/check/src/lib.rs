//! How the stand-in is tested: its libraries are found by the loader as a program would find them, and every test's body runs in a
//! process of its own, since what the environment says is read once and a fault ends a device for good.
//!
//! Functions here pass pointers on unchecked, as the libraries' own do: tests are trusted.
#![allow(non_snake_case, clippy::not_unsafe_ptr_arg_deref, clippy::too_many_arguments)]

use std::{
    ffi::{CString, c_char, c_int, c_uint, c_void},
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    ptr::null_mut,
    sync::OnceLock,
};

/// Set in a child: the test whose body it runs.
const BODY_OF: &str = "STANDIN_CHECK_BODY_OF";
/// What a child says when a body has returned.
const DONE: &str = "the body has returned";

/// Variables of the two schedules that notice different mistakes.
pub const LATE_FORWARD: [(&str, &str); 2] = [("CPUCUDA_ORDER", "fwd"), ("CPUCUDA_ASYNC", "late")];
pub const EARLY_REVERSE: [(&str, &str); 2] = [("CPUCUDA_ORDER", "rev"), ("CPUCUDA_ASYNC", "early")];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../..")
}

/// Where the libraries lie: `STANDIN_LIB`, or what `scripts/standin` builds.
fn library_folder() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER
        .get_or_init(|| {
            if let Some(folder) = std::env::var_os("STANDIN_LIB") {
                return folder.into();
            }
            let output = Command::new(root().join("scripts/standin"))
                .stdin(Stdio::null())
                .output()
                .expect("scripts/standin runs");
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
            String::from_utf8_lossy(&output.stdout).trim().into()
        })
        .clone()
}

/// Runs `body` in a process of its own, which has `env` too; what became of it. Within that process this does not return.
pub fn child(test_name: &str, env: &[(&str, &str)], body: impl FnOnce()) -> Output {
    if std::env::var_os(BODY_OF).is_some_and(|name| name == test_name) {
        body();
        println!("{DONE}");
        std::process::exit(0);
    }
    let folder = library_folder();
    Command::new(std::env::current_exe().expect("a test program has a path"))
        .args([test_name, "--exact", "--nocapture", "--test-threads=1"])
        .env(BODY_OF, test_name)
        .env("LD_LIBRARY_PATH", &folder)
        .env("FAKECUDA_CACHE", folder.join("../cache/check"))
        .envs(env.iter().copied())
        .stdin(Stdio::null())
        .output()
        .expect("the test program starts once more")
}

/// As [`child`], and the body must return.
#[track_caller]
pub fn passes(test_name: &str, env: &[(&str, &str)], body: impl FnOnce()) {
    let output = child(test_name, env, body);
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success() && out.contains(DONE),
        "`{test_name}` under {env:?}: {}\n{out}\n{err}",
        output.status
    );
}

/// As [`child`], and the process must end with SIGABRT and these words.
#[track_caller]
pub fn aborts(test_name: &str, words: &str, body: impl FnOnce()) {
    use std::os::unix::process::ExitStatusExt;
    let output = child(test_name, &[], body);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.signal() == Some(libc::SIGABRT) && err.contains(words),
        "`{test_name}`: {}\n{err}",
        output.status
    );
}

fn symbol(library: &str, name: &str) -> usize {
    let (library, name) = (
        CString::new(library).expect("no zeros"),
        CString::new(name).expect("no zeros"),
    );
    // SAFETY: strings that end; the library's initialisers do nothing.
    let found = unsafe {
        let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOW);
        assert!(!handle.is_null(), "{library:?} is not found");
        libc::dlsym(handle, name.as_ptr())
    };
    assert!(!found.is_null(), "{library:?} has no {name:?}");
    found as usize
}

macro_rules! functions {
    ($library:literal: $(fn $name:ident($($arg:ident: $type:ty),*);)*) => { $(
        pub fn $name($($arg: $type),*) -> c_int {
            static FOUND: OnceLock<usize> = OnceLock::new();
            let found = *FOUND.get_or_init(|| symbol($library, stringify!($name)));
            // SAFETY: the function has this type; what its pointers must be is up to the test.
            unsafe { std::mem::transmute::<usize, unsafe extern "C" fn($($type),*) -> c_int>(found)($($arg),*) }
        }
    )* };
}

functions! { "libcuda.so":
    fn cuInit(flags: c_uint);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int);
    fn cuCtxSetCurrent(context: usize);
    fn cuCtxSynchronize();
    fn cuModuleLoadData(module: *mut usize, image: *const c_void);
    fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char);
    fn cuFuncSetAttribute(function: usize, attribute: c_int, value: c_int);
    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: usize);
    fn cuFuncGetParamInfo(function: usize, idx: usize, offset: *mut usize, len_bytes: *mut usize);
    fn cuLaunchKernel(function: usize, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared_bytes: c_uint,
        stream: usize, parameters: *mut *mut c_void, extra: *mut *mut c_void);
    fn cuMemAlloc_v2(start: *mut usize, len_bytes: usize);
    fn cuMemAllocAsync(start: *mut usize, len_bytes: usize, stream: usize);
    fn cuMemFree_v2(start: usize);
    fn cuMemFreeAsync(start: usize, stream: usize);
    fn cuMemHostAlloc(start: *mut usize, len_bytes: usize, flags: c_uint);
    fn cuMemcpyHtoD_v2(to: usize, from: *const c_void, len_bytes: usize);
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: usize, len_bytes: usize);
    fn cuMemcpyHtoDAsync_v2(to: usize, from: *const c_void, len_bytes: usize, stream: usize);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: usize, len_bytes: usize, stream: usize);
    fn cuMemsetD8Async(to: usize, value: u8, count: usize, stream: usize);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuStreamCreate(stream: *mut usize, flags: c_uint);
    fn cuStreamSynchronize(stream: usize);
    fn cuStreamQuery(stream: usize);
    fn cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint);
    fn cuStreamBeginCapture_v2(stream: usize, mode: c_int);
    fn cuStreamEndCapture(stream: usize, graph: *mut usize);
    fn cuStreamIsCapturing(stream: usize, status: *mut c_int);
    fn cuGraphInstantiateWithFlags(instance: *mut usize, graph: usize, flags: u64);
    fn cuGraphLaunch(instance: usize, stream: usize);
    fn cuEventCreate(event: *mut usize, flags: c_uint);
    fn cuEventRecord(event: usize, stream: usize);
    fn cuEventQuery(event: usize);
    fn cuEventSynchronize(event: usize);
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, first: usize, second: usize);
}
functions! { "libnvrtc.so":
    fn nvrtcCreateProgram(program: *mut usize, source: *const c_char, name: *const c_char, n_headers: c_int,
        headers: *const *const c_char, names: *const *const c_char);
    fn nvrtcCompileProgram(program: usize, n_options: c_int, options: *const *const c_char);
    fn nvrtcGetCUBINSize(program: usize, len: *mut usize);
    fn nvrtcGetCUBIN(program: usize, image: *mut u8);
    fn nvrtcGetProgramLogSize(program: usize, len: *mut usize);
    fn nvrtcGetProgramLog(program: usize, log: *mut u8);
}
functions! { "libcublasLt.so":
    fn cublasLtCreate(handle: *mut usize);
    fn cublasLtMatrixLayoutCreate(layout: *mut usize, data_type: c_int, rows: u64, cols: u64, leading: i64);
    fn cublasLtMatrixLayoutSetAttribute(layout: usize, attribute: c_int, value: *const c_void, len: usize);
    fn cublasLtMatmulDescCreate(desc: *mut usize, compute: c_int, scale: c_int);
    fn cublasLtMatmulDescSetAttribute(desc: usize, attribute: c_int, value: *const c_void, len: usize);
    fn cublasLtMatmulPreferenceCreate(preference: *mut usize);
    fn cublasLtMatmulPreferenceSetAttribute(preference: usize, attribute: c_int, value: *const c_void, len: usize);
    fn cublasLtMatmulAlgoGetHeuristic(handle: usize, desc: usize, a: usize, b: usize, c: usize, out: usize, preference: usize,
        n_wanted: c_int, results: *mut u64, n_found: *mut c_int);
    fn cublasLtMatmul(handle: usize, desc: usize, alpha: *const f32, a: usize, a_layout: usize, b: usize, b_layout: usize,
        beta: *const f32, c: usize, c_layout: usize, out: usize, out_layout: usize, algorithm: *const u64, workspace: usize,
        workspace_bytes: usize, stream: usize);
}

/// Asserts that a call succeeded.
#[track_caller]
pub fn ok(code: c_int) {
    assert_eq!(code, 0, "the call failed");
}

/// What a call writes through its pointer; it must succeed.
#[track_caller]
pub fn made<T: Default>(call: impl FnOnce(*mut T) -> c_int) -> T {
    let mut value = T::default();
    ok(call(&raw mut value));
    value
}

/// Makes device 0 this thread's.
pub fn use_device() {
    ok(cuInit(0));
    ok(cuCtxSetCurrent(made(|context| {
        cuDevicePrimaryCtxRetain(context, 0)
    })));
}

/// A stream that the legacy one has nothing to do with.
pub fn stream() -> usize {
    made(|stream| cuStreamCreate(stream, 1))
}

pub fn event() -> usize {
    made(|event| cuEventCreate(event, 0))
}

/// Device memory with these values.
pub fn device_copy<T: Copy>(values: &[T]) -> usize {
    let start = made(|start| cuMemAlloc_v2(start, size_of_val(values)));
    ok(cuMemcpyHtoD_v2(
        start,
        values.as_ptr().cast(),
        size_of_val(values),
    ));
    start
}

/// `n` values from device memory.
pub fn host_copy<T: Copy + Default>(start: usize, n: usize) -> Vec<T> {
    let mut values = vec![T::default(); n];
    ok(cuMemcpyDtoH_v2(
        values.as_mut_ptr().cast(),
        start,
        n * size_of::<T>(),
    ));
    values
}

/// What all kernels of `tests/kernels.cu` take.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Args {
    pub out: usize,
    pub input: usize,
    pub n: c_int,
}

/// The image of a source that begins with the product's `portable.cuh`, or the compiler's log.
pub fn compile(source: &str) -> Result<Vec<u8>, String> {
    let portable =
        fs::read_to_string(root().join("crates/cuda/kernels/portable.cuh")).expect("portable.cuh is there");
    let source = CString::new(portable + source).expect("no zeros");
    let program = made(|program| {
        nvrtcCreateProgram(
            program,
            source.as_ptr(),
            c"kernels.cu".as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        )
    });
    if nvrtcCompileProgram(program, 0, std::ptr::null()) != 0 {
        let mut log = vec![0; made(|len| nvrtcGetProgramLogSize(program, len))];
        ok(nvrtcGetProgramLog(program, log.as_mut_ptr()));
        return Err(String::from_utf8_lossy(&log).into_owned());
    }
    let mut image = vec![0; made(|len| nvrtcGetCUBINSize(program, len))];
    ok(nvrtcGetCUBIN(program, image.as_mut_ptr()));
    Ok(image)
}

/// A kernel of `tests/kernels.cu`.
pub fn kernel(name: &str) -> usize {
    static MODULE: OnceLock<usize> = OnceLock::new();
    let module = *MODULE.get_or_init(|| {
        let image = compile(include_str!("../tests/kernels.cu")).unwrap_or_else(|log| panic!("{log}"));
        made(|module| cuModuleLoadData(module, image.as_ptr().cast()))
    });
    let name = CString::new(name).expect("no zeros");
    made(|function| cuModuleGetFunction(function, module, name.as_ptr()))
}

/// Enqueues a kernel of `n_blocks` blocks of `n_threads` threads; the code.
pub fn launch(name: &str, [n_blocks, n_threads, shared_bytes]: [u32; 3], stream: usize, args: Args) -> c_int {
    let mut args = args;
    let mut parameters: [*mut c_void; 1] = [(&raw mut args).cast()];
    cuLaunchKernel(
        kernel(name),
        n_blocks,
        1,
        1,
        n_threads,
        1,
        1,
        shared_bytes,
        stream,
        parameters.as_mut_ptr(),
        null_mut(),
    )
}
