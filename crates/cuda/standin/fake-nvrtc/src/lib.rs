//! Stand-in libnvrtc.so (prototype): "compiles" CUDA C++ with g++ and the CPU shim, and
//! returns as PTX the text `CPUMOD:<path of the shared object>` for the stand-in driver.
#![allow(non_snake_case, clippy::missing_safety_doc)]
use std::ffi::{c_char, c_int, CStr};
use std::process::Command;

pub struct Prog { src: String, ptx: Vec<u8>, log: Vec<u8> }
fn env(k: &str) -> String { std::env::var(k).unwrap_or_default() }

/// Where shared objects are kept: `FAKECUDA_CACHE`, else the folder for temporary files.
fn cache_folder() -> std::path::PathBuf {
    let folder = std::env::var_os("FAKECUDA_CACHE").map_or_else(std::env::temp_dir, Into::into);
    let _ = std::fs::create_dir_all(&folder);
    folder
}

/// The folder `shim` beside this library.
fn shim_folder() -> String {
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let found = unsafe { libc::dladdr(shim_folder as *const libc::c_void, &mut info) } != 0 && !info.dli_fname.is_null();
    let own = if found { unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned() } else { String::new() };
    format!("{}/shim", own.rsplit_once('/').map_or(".", |(folder, _)| folder))
}

fn hash(s: &str) -> u64 { s.bytes().fold(0xcbf29ce484222325, |h, b| (h ^ b as u64).wrapping_mul(0x100000001b3)) }

#[no_mangle] pub unsafe extern "C" fn nvrtcVersion(a: *mut c_int, b: *mut c_int) -> c_int { *a = 13; *b = 0; 0 }
#[no_mangle] pub unsafe extern "C" fn nvrtcGetErrorString(_r: c_int) -> *const c_char { c"NVRTC stand-in error".as_ptr() }
#[no_mangle] pub unsafe extern "C" fn nvrtcCreateProgram(p: *mut *mut Prog, src: *const c_char, _n: *const c_char, _k: c_int, _h: *const *const c_char, _i: *const *const c_char) -> c_int {
    *p = Box::into_raw(Box::new(Prog { src: CStr::from_ptr(src).to_string_lossy().into_owned(), ptx: vec![0], log: vec![0] })); 0
}
#[no_mangle] pub unsafe extern "C" fn nvrtcDestroyProgram(p: *mut *mut Prog) -> c_int { drop(Box::from_raw(*p)); *p = std::ptr::null_mut(); 0 }
#[no_mangle] pub unsafe extern "C" fn nvrtcCompileProgram(p: *mut Prog, n: c_int, opts: *const *const c_char) -> c_int {
    let p = &mut *p;
    let mut args: Vec<String> = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-g", "-fPIC", "-shared", "-w", "-U_FORTIFY_SOURCE", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-x", "c++"].map(String::from).to_vec();
    args.push(format!("-I{}", shim_folder()));
    args.extend(env("FAKECUDA_CXXFLAGS").split_whitespace().map(String::from));
    for i in 0..n as usize {
        let o = CStr::from_ptr(*opts.add(i)).to_string_lossy().into_owned();
        if o.starts_with("-D") || o.starts_with("-I") { args.push(o) }
        else if let Some(d) = o.strip_prefix("--include-path=") { args.push(format!("-I{d}")) }
    }
    let text = format!("#include \"cpucuda.h\"\n#line 1 \"kernel.cu\"\n{}\n", p.src);
    let stem = cache_folder().join(format!("cpucuda-{:016x}", hash(&format!("{text}{args:?}{}", std::fs::read_to_string(format!("{}/cpucuda.h", shim_folder())).unwrap_or_default()))));
    let (so, tmp) = (stem.with_extension("so"), stem.with_extension(format!("{}.tmp", std::process::id())));
    if !so.exists() {
        let cpp = stem.with_extension(format!("{}.cpp", std::process::id()));
        std::fs::write(&cpp, &text).unwrap();
        match Command::new("g++").args(&args).arg("-o").arg(&tmp).arg(&cpp).output() {
            Ok(o) if o.status.success() => { std::fs::rename(&tmp, &so).unwrap(); let _ = std::fs::remove_file(&cpp); }
            Ok(o) => { p.log = o.stderr; p.log.push(0); return 6 } // NVRTC_ERROR_COMPILATION
            Err(e) => { p.log = format!("g++: {e}\0").into_bytes(); return 6 }
        }
    }
    p.ptx = format!("CPUMOD:{}\0", so.display()).into_bytes();
    0
}
#[no_mangle] pub unsafe extern "C" fn nvrtcGetPTXSize(p: *const Prog, n: *mut usize) -> c_int { *n = (&(*p).ptx).len(); 0 }
#[no_mangle] pub unsafe extern "C" fn nvrtcGetPTX(p: *const Prog, out: *mut u8) -> c_int { let v = &(*p).ptx; std::ptr::copy_nonoverlapping(v.as_ptr(), out, v.len()); 0 }
#[no_mangle] pub unsafe extern "C" fn nvrtcGetCUBINSize(p: *const Prog, n: *mut usize) -> c_int { nvrtcGetPTXSize(p, n) }
#[no_mangle] pub unsafe extern "C" fn nvrtcGetCUBIN(p: *const Prog, out: *mut u8) -> c_int { nvrtcGetPTX(p, out) }
#[no_mangle] pub unsafe extern "C" fn nvrtcGetProgramLogSize(p: *const Prog, n: *mut usize) -> c_int { *n = (&(*p).log).len(); 0 }
#[no_mangle] pub unsafe extern "C" fn nvrtcGetProgramLog(p: *const Prog, out: *mut u8) -> c_int { let v = &(*p).log; std::ptr::copy_nonoverlapping(v.as_ptr(), out, v.len()); 0 }
