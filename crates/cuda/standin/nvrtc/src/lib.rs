//! Stand-in `libnvrtc.so`: compiles CUDA C++ with g++ and the shim beside it, and returns as the image the text `CPUMOD:<path of the
//! shared object>`, which the stand-in's driver opens.
//!
//! The shared object is kept in `FAKECUDA_CACHE` (the folder for temporary files unless set) under a name that depends on everything that
//! goes into it. `FAKECUDA_CXXFLAGS` are passed on to g++. Sources include nothing that is not in them.
#![allow(non_snake_case)]

use std::{
    ffi::{CStr, c_char, c_int},
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

const SUCCESS: c_int = 0;
const INVALID_INPUT: c_int = 3;
const COMPILATION: c_int = 6;

const FLAGS: [&str; 13] = [
    "-std=c++17",
    "-O2",
    "-march=native",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    // Signal handlers and what threads leave behind point into it.
    "-Wl,-z,nodelete",
    "-w",
    "-U_FORTIFY_SOURCE",
    // A misaligned access traps, as it does on a device.
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
    "-x",
    "c++",
];

/// A source and what came of it.
pub struct Program {
    source: String,
    image: Vec<u8>,
    log: Vec<u8>,
}

/// The folder `shim` beside this library.
fn shim_folder() -> PathBuf {
    // SAFETY: the structure is plain data; the address is one of this library.
    let file = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let is_found = libc::dladdr(shim_folder as *const libc::c_void, &raw mut info) != 0;
        (is_found && !info.dli_fname.is_null()).then(|| CStr::from_ptr(info.dli_fname).to_string_lossy().into_owned())
    };
    let file = PathBuf::from(file.unwrap_or_default());
    file.parent().unwrap_or(Path::new(".")).join("shim")
}

/// FNV-1a, which is enough to tell a few sources apart.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

impl Program {
    /// Compiles, unless that was done before; the shared object, or what the compiler says.
    fn compile(&self, options: &[String]) -> Result<PathBuf, String> {
        let shim = shim_folder();
        let mut flags: Vec<String> = FLAGS.map(str::to_owned).to_vec();
        flags.push(format!("-I{}", shim.display()));
        flags.extend(std::env::var("FAKECUDA_CXXFLAGS").unwrap_or_default().split_whitespace().map(str::to_owned));
        flags.extend(options.iter().filter(|option| option.starts_with("-D")).cloned());
        let text = format!("#include \"cpucuda.h\"\n{}\n", self.source);
        let header = fs::read_to_string(shim.join("cpucuda.h")).map_err(|error| format!("{}: {error}", shim.display()))?;
        let folder = std::env::var_os("FAKECUDA_CACHE").map_or_else(std::env::temp_dir, PathBuf::from);
        let stem = folder.join(format!("cpucuda-{:016x}", digest(&format!("{text}{header}{flags:?}"))));
        let object = stem.with_extension("so");
        if object.exists() {
            return Ok(object);
        }
        // Others may compile the same at the same time; the last one's file stays.
        let own = format!("{}-{}-{:?}", stem.display(), std::process::id(), std::thread::current().id());
        let (source, draft) = (PathBuf::from(format!("{own}.cpp")), PathBuf::from(format!("{own}.tmp")));
        let write = || -> io::Result<()> {
            fs::create_dir_all(&folder)?;
            fs::write(&source, &text)
        };
        write().map_err(|error| format!("{}: {error}", source.display()))?;
        let output = Command::new("g++").args(&flags).arg("-o").arg(&draft).arg(&source).output();
        let _ = fs::remove_file(&source);
        let output = output.map_err(|error| format!("g++: {error}"))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        fs::rename(&draft, &object).map_err(|error| format!("{}: {error}", object.display()))?;
        Ok(object)
    }
}

fn give(bytes: &[u8], out: *mut u8) -> c_int {
    // SAFETY: the caller has room for what the size was told of.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out, bytes.len()) };
    SUCCESS
}

/// 13.0.
///
/// # Safety
/// As the library's documentation says, for this and all that follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    unsafe { (*major, *minor) = (13, 0) };
    SUCCESS
}

/// # Safety
/// None needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetErrorString(code: c_int) -> *const c_char {
    match code {
        SUCCESS => c"NVRTC_SUCCESS",
        INVALID_INPUT => c"NVRTC_ERROR_INVALID_INPUT",
        COMPILATION => c"NVRTC_ERROR_COMPILATION",
        _ => c"NVRTC_ERROR",
    }
    .as_ptr()
}

/// # Safety
/// See [`nvrtcVersion`]. Headers in memory are refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut *mut Program,
    source: *const c_char,
    _name: *const c_char,
    n_headers: c_int,
    _headers: *const *const c_char,
    _names: *const *const c_char,
) -> c_int {
    if source.is_null() || n_headers != 0 {
        return INVALID_INPUT;
    }
    let source = unsafe { CStr::from_ptr(source) }.to_string_lossy().into_owned();
    let new = Program {
        source,
        image: Vec::new(),
        log: vec![0],
    };
    unsafe { *program = Box::into_raw(Box::new(new)) };
    SUCCESS
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut Program) -> c_int {
    unsafe {
        drop(Box::from_raw(*program));
        *program = std::ptr::null_mut();
    }
    SUCCESS
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(program: *mut Program, n_options: c_int, options: *const *const c_char) -> c_int {
    let program = unsafe { &mut *program };
    let option = |i: usize| unsafe { CStr::from_ptr(*options.add(i)) }.to_string_lossy().into_owned();
    let options: Vec<String> = (0..n_options as usize).map(option).collect();
    match program.compile(&options) {
        Ok(object) => {
            program.image = format!("CPUMOD:{}\0", object.display()).into_bytes();
            SUCCESS
        }
        Err(log) => {
            program.log = log.into_bytes();
            program.log.push(0);
            COMPILATION
        }
    }
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBINSize(program: *const Program, len: *mut usize) -> c_int {
    unsafe { *len = (&*program).image.len() };
    SUCCESS
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBIN(program: *const Program, image: *mut u8) -> c_int {
    give(&unsafe { &*program }.image, image)
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetPTXSize(program: *const Program, len: *mut usize) -> c_int {
    unsafe { nvrtcGetCUBINSize(program, len) }
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetPTX(program: *const Program, text: *mut u8) -> c_int {
    unsafe { nvrtcGetCUBIN(program, text) }
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLogSize(program: *const Program, len: *mut usize) -> c_int {
    unsafe { *len = (&*program).log.len() };
    SUCCESS
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLog(program: *const Program, log: *mut u8) -> c_int {
    give(&unsafe { &*program }.log, log)
}
