//! From kernel sources to an image that the driver loads: NVRTC, with a cache on disk.

use crate::library;
use cudarc::nvrtc::{result as nvrtc, sys};
use denoised_tensor::{Result, TensorError};
use sha2::{Digest, Sha256};
use std::{
    ffi::CString,
    path::{Path, PathBuf},
};

/// What all kernels are written with.
const PORTABLE: &str = include_str!("../kernels/portable.cuh");

/// One file of kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    /// File name without its ending; kernels are found by it.
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
}

macro_rules! sources {
    ($($name:literal),* $(,)?) => {
        /// Every file of kernels.
        pub(crate) const SOURCES: &[Source] = &[$(Source {
            name: $name,
            text: include_str!(concat!("../kernels/", $name, ".cu")),
        }),*];
    };
}

sources![
    "elementwise",
    "norm",
    "lookup",
    "sample",
    "attention",
    "flash",
    "im2col",
    "conv",
];

/// The whole text of a file of kernels, with what it includes. Read from `folder` instead of this build where that is given.
pub(crate) fn text(source: &Source, folder: Option<&Path>) -> Result<String> {
    let (portable, own) = match folder {
        None => (PORTABLE.to_owned(), source.text.to_owned()),
        Some(folder) => {
            let read = |name: String| {
                let path = folder.join(name);
                std::fs::read_to_string(&path)
                    .map_err(|error| TensorError::Device(format!("cannot read {}: {error}", path.display())))
            };
            (
                read("portable.cuh".to_owned())?,
                read(format!("{}.cu", source.name))?,
            )
        }
    };
    let portable = portable.replace("#pragma once", "");
    let own = own.replace("#include \"portable.cuh\"", "");
    Ok(format!(
        "#line 1 \"portable.cuh\"\n{portable}\n#line 1 \"{}.cu\"\n{own}",
        source.name
    ))
}

/// Compiles `text` for the architecture `sm` (90 for sm_90, and so on), or takes what an earlier call left in `cache`.
pub(crate) fn compile(name: &str, text: &str, sm: u32, cache: Option<&Path>) -> Result<Vec<u8>> {
    library::compiler_is_present().map_err(|error| TensorError::Device(error.to_string()))?;
    // What wgmma and its like need is only there under the name with the letter.
    let letter = if sm == 90 { "a" } else { "" };
    let options = [
        format!("--gpu-architecture=sm_{sm}{letter}"),
        "--std=c++17".to_owned(),
        "--extra-device-vectorization".to_owned(),
    ];
    let key = key(text, &options);
    let cached = cache.map(|folder| folder.join(format!("{name}-{key}.cubin")));
    if let Some(image) = cached.as_deref().and_then(read_cached) {
        return Ok(image);
    }
    let image = run_compiler(name, text, &options)?;
    if let Some(path) = cached {
        write_cached(&path, &image);
    }
    Ok(image)
}

fn key(text: &str, options: &[String]) -> String {
    let mut hasher = Sha256::new();
    hasher.update(text);
    for option in options {
        hasher.update([0]);
        hasher.update(option);
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is present; both are written.
    let _ = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    hasher.update(format!("{major}.{minor}"));
    hasher.finalize()[..12]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// A file whose first 32 bytes are the digest of the others; anything else counts as absent.
fn read_cached(path: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(path).ok()?;
    let (digest, image) = bytes.split_at_checked(32)?;
    (Sha256::digest(image)[..] == *digest).then(|| image.to_vec())
}

/// A cache that cannot be written is worth a word, not a failure.
fn write_cached(path: &Path, image: &[u8]) {
    let write = || {
        let folder = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let draft = PathBuf::from(format!("{}.{}", path.display(), std::process::id()));
        std::fs::write(&draft, [&Sha256::digest(image)[..], image].concat())?;
        std::fs::rename(&draft, path)
    };
    if let Err(error) = write() {
        tracing::warn!("compiled kernels are not kept: {}: {error}", path.display());
    }
}

fn run_compiler(name: &str, text: &str, options: &[String]) -> Result<Vec<u8>> {
    let failure =
        |what: &str, error: nvrtc::NvrtcError| TensorError::Device(format!("{what} {name}.cu: {error:?}"));
    let text = CString::new(text).map_err(|_| TensorError::Device(format!("{name}.cu holds a zero byte")))?;
    let file = CString::new(format!("{name}.cu")).unwrap_or_default();
    let program = nvrtc::create_program(&text, Some(&file)).map_err(|error| failure("creating", error))?;
    // SAFETY: `program` was made above and is destroyed below; `text` and `file` outlive it.
    let image = unsafe {
        match nvrtc::compile_program(program, options) {
            Ok(()) => cubin(program).map_err(|error| failure("taking the image of", error)),
            Err(error) => {
                let log = nvrtc::get_program_log(program).unwrap_or_default();
                let log: Vec<u8> = log
                    .iter()
                    .map(|c| *c as u8)
                    .take_while(|byte| *byte != 0)
                    .collect();
                let log = String::from_utf8_lossy(&log).into_owned();
                Err(TensorError::Device(format!(
                    "compiling {name}.cu: {error:?}: {}",
                    log.trim()
                )))
            }
        }
    };
    // SAFETY: as above.
    let _ = unsafe { nvrtc::destroy_program(program) };
    image
}

/// # Safety
/// `program` was compiled for a real architecture.
unsafe fn cubin(program: sys::nvrtcProgram) -> std::result::Result<Vec<u8>, nvrtc::NvrtcError> {
    let mut len = 0;
    // SAFETY: `len` is written.
    unsafe { sys::nvrtcGetCUBINSize(program, &raw mut len) }.result()?;
    let mut image = vec![0u8; len];
    // SAFETY: the buffer has the size that was just told.
    unsafe { sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()) }.result()?;
    Ok(image)
}

/// `$XDG_CACHE_HOME/denoised/kernels`, or the same under `~/.cache`.
pub(crate) fn default_cache() -> Option<PathBuf> {
    let set = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let root = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
    Some(root.join("denoised").join("kernels"))
}

/// Only for names that were made here.
pub(crate) fn c_name(name: &str) -> Result<CString> {
    CString::new(name).map_err(|_| TensorError::Device(format!("kernel name {name:?}")))
}
