//! The entry points.

use crate::product::{BF16, Desc, F16, F32, Layout, Product};
use std::{
    ffi::{c_int, c_void},
    hash::{DefaultHasher, Hash, Hasher},
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
};

const SUCCESS: c_int = 0;
const NOT_INITIALIZED: c_int = 1;
const INVALID_VALUE: c_int = 7;
const EXECUTION_FAILED: c_int = 13;
const NOT_SUPPORTED: c_int = 15;

const EPILOGUE_DEFAULT: i32 = 1;
const EPILOGUE_BIAS: i32 = 4;
const COMPUTE_32F: c_int = 68;

/// Least alignment that is promised for the four operands, and the workspace.
#[derive(Clone, Copy)]
pub struct Preference {
    alignments: [u32; 4],
    workspace_bytes: usize,
}

/// What an algorithm begins with: what it was asked for, and the promises.
#[derive(Clone, Copy)]
#[repr(C)]
struct Algorithm {
    question: u64,
    alignments: [u32; 4],
    workspace_bytes: u64,
}

/// # Safety
/// The library's documentation says what pointers must be, here and below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtCreate(handle: *mut usize) -> c_int {
    unsafe { *handle = 0x10 };
    SUCCESS
}

/// # Safety
/// See [`cublasLtCreate`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtDestroy(_handle: usize) -> c_int {
    SUCCESS
}

/// # Safety
/// See [`cublasLtCreate`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutCreate(handle: *mut usize, data_type: c_int, rows: u64, cols: u64, leading: i64) -> c_int {
    let Ok(leading) = usize::try_from(leading) else { return INVALID_VALUE };
    let layout = Layout {
        data_type,
        rows: rows as usize,
        cols: cols as usize,
        leading,
        n_batch: 1,
        batch_stride: 0,
    };
    unsafe { *handle = Box::into_raw(Box::new(layout)) as usize };
    SUCCESS
}

/// # Safety
/// See [`cublasLtCreate`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutDestroy(handle: usize) -> c_int {
    drop(unsafe { Box::from_raw(handle as *mut Layout) });
    SUCCESS
}

/// # Safety
/// See [`cublasLtCreate`]. 5: how many matrices; 6: elements between them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutSetAttribute(handle: usize, attribute: c_int, value: *const c_void, len: usize) -> c_int {
    let layout = unsafe { &mut *(handle as *mut Layout) };
    match (attribute, len) {
        (5, 4) => layout.n_batch = unsafe { *value.cast::<i32>() } as usize,
        (6, 8) => layout.batch_stride = unsafe { *value.cast::<i64>() } as usize,
        _ => return NOT_SUPPORTED,
    }
    SUCCESS
}

/// # Safety
/// See [`cublasLtCreate`]. Only sums in f32 that are what they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescCreate(handle: *mut usize, compute: c_int, scale: c_int) -> c_int {
    if compute != COMPUTE_32F || scale != F32 {
        return NOT_SUPPORTED;
    }
    let desc = Desc {
        is_a_transposed: false,
        is_b_transposed: false,
        has_bias: false,
        bias: 0,
        bias_type: -1,
    };
    unsafe { *handle = Box::into_raw(Box::new(desc)) as usize };
    SUCCESS
}

/// # Safety
/// See [`cublasLtCreate`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescDestroy(handle: usize) -> c_int {
    drop(unsafe { Box::from_raw(handle as *mut Desc) });
    SUCCESS
}

/// # Safety
/// See [`cublasLtCreate`]. 3, 4: transpositions; 7, 8, 26: the bias.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescSetAttribute(handle: usize, attribute: c_int, value: *const c_void, len: usize) -> c_int {
    let desc = unsafe { &mut *(handle as *mut Desc) };
    let int = || unsafe { *value.cast::<i32>() };
    match (attribute, len) {
        (3, 4) => desc.is_a_transposed = int() != 0,
        (4, 4) => desc.is_b_transposed = int() != 0,
        (7, 4) if [EPILOGUE_DEFAULT, EPILOGUE_BIAS].contains(&int()) => desc.has_bias = int() == EPILOGUE_BIAS,
        (8, 8) => desc.bias = unsafe { *value.cast::<usize>() },
        (26, 4) => desc.bias_type = int(),
        _ => return NOT_SUPPORTED,
    }
    SUCCESS
}

/// # Safety
/// See [`cublasLtCreate`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceCreate(handle: *mut usize) -> c_int {
    let preference = Preference {
        alignments: [256; 4],
        workspace_bytes: 0,
    };
    unsafe { *handle = Box::into_raw(Box::new(preference)) as usize };
    SUCCESS
}

/// # Safety
/// See [`cublasLtCreate`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceDestroy(handle: usize) -> c_int {
    drop(unsafe { Box::from_raw(handle as *mut Preference) });
    SUCCESS
}

/// # Safety
/// See [`cublasLtCreate`]. 1: the workspace; 5 to 8: alignments of a, b, c and the output.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceSetAttribute(handle: usize, attribute: c_int, value: *const c_void, len: usize) -> c_int {
    let preference = unsafe { &mut *(handle as *mut Preference) };
    match (attribute, len) {
        (1, 8) => preference.workspace_bytes = unsafe { *value.cast::<usize>() },
        (5..=8, 4) => {
            let alignment = unsafe { *value.cast::<u32>() };
            if !alignment.is_power_of_two() {
                return INVALID_VALUE;
            }
            preference.alignments[attribute as usize - 5] = alignment;
        }
        _ => return NOT_SUPPORTED,
    }
    SUCCESS
}

/// Refuses what does not fit, as the library does.
///
/// # Safety
/// The handles are ones that were given.
unsafe fn check(desc: usize, layouts: [usize; 4]) -> Result<(Desc, [Layout; 4]), c_int> {
    let mut desc = unsafe { *(desc as *const Desc) };
    let [a, b, c, out] = layouts.map(|layout| unsafe { *(layout as *const Layout) });
    let (m, k) = if desc.is_a_transposed { (a.cols, a.rows) } else { (a.rows, a.cols) };
    let (k_of_b, n) = if desc.is_b_transposed { (b.cols, b.rows) } else { (b.rows, b.cols) };
    let all = [a, b, c, out];
    let is_sound = |layout: &Layout| layout.leading >= layout.rows && layout.n_batch == out.n_batch && layout.rows * layout.cols > 0;
    let fits = k == k_of_b && (out.rows, out.cols) == (m, n) && (c.rows, c.cols) == (m, n) && all.iter().all(is_sound);
    if !fits || desc.has_bias && desc.bias == 0 {
        return Err(INVALID_VALUE);
    }
    let one_type = all.iter().all(|layout| layout.data_type == a.data_type);
    if desc.bias_type < 0 {
        desc.bias_type = out.data_type;
    }
    if !one_type || ![F32, F16, BF16].contains(&a.data_type) || desc.has_bias && desc.bias_type != out.data_type {
        return Err(NOT_SUPPORTED);
    }
    Ok((desc, all))
}

/// What an algorithm is asked for; where the bias lies is no part of it.
fn question(desc: &Desc, layouts: &[Layout; 4]) -> u64 {
    let mut hasher = DefaultHasher::new();
    Desc { bias: 0, ..*desc }.hash(&mut hasher);
    layouts.hash(&mut hasher);
    hasher.finish()
}

/// # Safety
/// See [`cublasLtCreate`]. `results` are 16 words each: the algorithm (8), the workspace, the state and more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: usize,
    desc: usize,
    a: usize,
    b: usize,
    c: usize,
    out: usize,
    preference: usize,
    n_wanted: c_int,
    results: *mut u64,
    n_found: *mut c_int,
) -> c_int {
    unsafe { *n_found = 0 };
    let (desc, layouts) = match unsafe { check(desc, [a, b, c, out]) } {
        Ok(checked) => checked,
        Err(code) => return code,
    };
    let preference = unsafe { *(preference as *const Preference) };
    if n_wanted < 1 {
        return INVALID_VALUE;
    }
    let algorithm = Algorithm {
        question: question(&desc, &layouts),
        alignments: preference.alignments,
        workspace_bytes: preference.workspace_bytes as u64,
    };
    unsafe {
        // Eight words of algorithm, then workspace, state, waves and four reserved words of 32 bits.
        std::ptr::write_bytes(results, 0, 12);
        results.cast::<Algorithm>().write_unaligned(algorithm);
        *n_found = 1;
    }
    SUCCESS
}

/// `FAKECUDA_PRODUCT_FAULT=<nth>:<code>`: the nth product answers so, and does nothing. Counts from 1.
fn product_fault() -> Option<c_int> {
    static N_PRODUCTS: AtomicUsize = AtomicUsize::new(0);
    let value = std::env::var("FAKECUDA_PRODUCT_FAULT").ok()?;
    let (nth, code) = value.split_once(':')?;
    let count = N_PRODUCTS.fetch_add(1, SeqCst) + 1;
    (nth.parse() == Ok(count)).then(|| code.parse().ok()).flatten()
}

/// The driver's way to call a function of the host in stream order.
fn launch_host_function() -> Option<unsafe extern "C" fn(usize, extern "C" fn(*mut c_void), *mut c_void) -> c_int> {
    // SAFETY: the stand-in's driver is loaded already; the type is that of its function.
    unsafe {
        let library = libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOW);
        let function = if library.is_null() { library } else { libc::dlsym(library, c"cuLaunchHostFunc".as_ptr()) };
        (!function.is_null()).then(|| std::mem::transmute(function))
    }
}

extern "C" fn run(product: *mut c_void) {
    // SAFETY: made below; never freed, since a recorded graph may replay it.
    unsafe { (*(product as *const Product)).run() };
}

/// # Safety
/// See [`cublasLtCreate`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmul(
    _handle: usize,
    desc: usize,
    alpha: *const f32,
    a: usize,
    a_layout: usize,
    b: usize,
    b_layout: usize,
    beta: *const f32,
    c: usize,
    c_layout: usize,
    out: usize,
    out_layout: usize,
    algorithm: *const u64,
    workspace: usize,
    workspace_bytes: usize,
    stream: usize,
) -> c_int {
    if let Some(code) = product_fault() {
        return code;
    }
    let (desc, layouts) = match unsafe { check(desc, [a_layout, b_layout, c_layout, out_layout]) } {
        Ok(checked) => checked,
        Err(code) => return code,
    };
    if algorithm.is_null() {
        return INVALID_VALUE;
    }
    let algorithm = unsafe { algorithm.cast::<Algorithm>().read_unaligned() };
    if algorithm.question != question(&desc, &layouts) {
        eprintln!("fakecublaslt: the algorithm was chosen for another product");
        std::process::abort();
    }
    for (start, alignment) in [a, b, c, out].into_iter().zip(algorithm.alignments) {
        if start % alignment as usize != 0 {
            eprintln!("fakecublaslt: an operand at {start:#x} was promised to lie on {alignment} bytes");
            std::process::abort();
        }
    }
    if algorithm.workspace_bytes > workspace_bytes as u64 || workspace == 0 && workspace_bytes > 0 {
        return INVALID_VALUE;
    }
    let Some(launch) = launch_host_function() else { return NOT_INITIALIZED };
    let [a_of, b_of, c_of, out_of] = layouts;
    let product = Product {
        desc,
        a: (a, a_of),
        b: (b, b_of),
        c: (c, c_of),
        out: (out, out_of),
        alpha: unsafe { *alpha },
        beta: unsafe { *beta },
    };
    match unsafe { launch(stream, run, Box::into_raw(Box::new(product)).cast()) } {
        0 => SUCCESS,
        _ => EXECUTION_FAILED,
    }
}
