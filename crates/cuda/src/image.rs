//! From kernel sources to an image that the driver loads: embedded where this build was given compiled kernels of exactly these sources,
//! otherwise by NVRTC, with a cache on disk.
//!
//! R1. What is in the cache is only worth trying: files that are cut off, damaged or refused by the driver are compiled again.
//! R2. A cache that cannot be read or written costs time and nothing else. Files appear whole, so processes may share the folder.

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

/// What [`PREBUILT`] is made of: aligned as the driver wants it.
#[repr(align(16))]
struct Aligned<T: ?Sized>(T);

/// Compiled kernels of this build, by the name of their source.
const PREBUILT: &[(&str, &Aligned<[u8]>)] = &include!(concat!(env!("OUT_DIR"), "/prebuilt.rs"));

/// This build's compiled kernels of `name`, for several architectures.
pub(crate) fn prebuilt(name: &str) -> Option<&'static [u8]> {
    let (_, image) = PREBUILT.iter().find(|(own, _)| *own == name)?;
    Some(&image.0)
}

/// Whether this build needs no compiler, unless the driver refuses what it holds.
pub(crate) fn are_all_prebuilt() -> bool {
    SOURCES.iter().all(|source| prebuilt(source.name).is_some())
}

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

/// NVRTC for one architecture, and where its images are kept.
#[derive(Debug)]
pub(crate) struct Compiler<'a> {
    sm: u32,
    version: (i32, i32),
    cache: Option<&'a Path>,
}

impl<'a> Compiler<'a> {
    /// For the architecture `sm` (90 for sm_90, and so on).
    ///
    /// # Errors
    /// [`TensorError::Device`] if NVRTC is not there.
    pub(crate) fn new(sm: u32, cache: Option<&'a Path>) -> Result<Self> {
        library::compiler_is_present().map_err(|error| TensorError::Device(error.to_string()))?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is present; both are written.
        let answer = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }.result();
        answer.map_err(|error| TensorError::Device(format!("NVRTC's version: {error:?}")))?;
        Ok(Self {
            sm,
            version: (major, minor),
            cache,
        })
    }

    /// What an earlier call left.
    pub(crate) fn cached(&self, name: &str, text: &str) -> Option<Vec<u8>> {
        read_cached(&self.path(name, text)?)
    }

    /// Compiles `text`, and keeps the image.
    pub(crate) fn compile(&self, name: &str, text: &str) -> Result<Vec<u8>> {
        let image = run_compiler(name, text, self.sm)?;
        if let Some(path) = self.path(name, text) {
            write_cached(&path, &image);
        }
        Ok(image)
    }

    fn path(&self, name: &str, text: &str) -> Option<PathBuf> {
        let mut hasher = Sha256::new();
        hasher.update(text);
        for option in options(&architecture(self.sm)) {
            hasher.update([0]);
            hasher.update(option);
        }
        hasher.update(format!("{:?}", self.version));
        let digest = hasher.finalize();
        let digits: String = digest[..12].iter().map(|byte| format!("{byte:02x}")).collect();
        Some(self.cache?.join(format!("{name}-{digits}.cubin")))
    }
}

/// The compiler's name of a device's own architecture.
fn architecture(sm: u32) -> String {
    // What wgmma and its like need is only there under the name with the letter.
    let letter = if sm == 90 { "a" } else { "" };
    format!("sm_{sm}{letter}")
}

/// What the compiler is told. Nothing that trades exactness for speed: kernels say themselves where that may be.
fn options(architecture: &str) -> [String; 3] {
    [
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
        "--extra-device-vectorization".to_owned(),
    ]
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

/// The newest architecture whose PTX is compiled for devices that the compiler does not know; their driver translates it.
const NEWEST_PTX: u32 = 90;

fn run_compiler(name: &str, text: &str, sm: u32) -> Result<Vec<u8>> {
    match compile_for(name, text, &architecture(sm)) {
        Err(Refusal {
            is_unknown_architecture: true,
            ..
        }) if sm > NEWEST_PTX => compile_for(name, text, &format!("compute_{NEWEST_PTX}")),
        image => image,
    }
    .map_err(|refusal| TensorError::Device(refusal.text))
}

/// Why there is no image.
struct Refusal {
    text: String,
    is_unknown_architecture: bool,
}

fn compile_for(name: &str, text: &str, architecture: &str) -> std::result::Result<Vec<u8>, Refusal> {
    let refusal = |text: String| Refusal {
        text,
        is_unknown_architecture: false,
    };
    let failure = |what: &str, error: nvrtc::NvrtcError| refusal(format!("{what} {name}.cu: {error:?}"));
    let text = CString::new(text).map_err(|_| refusal(format!("{name}.cu holds a zero byte")))?;
    let file = CString::new(format!("{name}.cu")).unwrap_or_default();
    let program = nvrtc::create_program(&text, Some(&file)).map_err(|error| failure("creating", error))?;
    // SAFETY: `program` was made above and is destroyed below; `text` and `file` outlive it.
    let image = unsafe {
        match nvrtc::compile_program(program, &options(architecture)) {
            Ok(()) if architecture.starts_with("sm_") => {
                cubin(program).map_err(|error| failure("taking the image of", error))
            }
            Ok(()) => nvrtc::get_ptx(program)
                .map(|ptx| ptx.iter().map(|c| *c as u8).collect())
                .map_err(|error| failure("taking the PTX of", error)),
            Err(error) => {
                let log = nvrtc::get_program_log(program).unwrap_or_default();
                let log: Vec<u8> = log
                    .iter()
                    .map(|c| *c as u8)
                    .take_while(|byte| *byte != 0)
                    .collect();
                let log = String::from_utf8_lossy(&log).into_owned();
                Err(Refusal {
                    text: format!(
                        "compiling {name}.cu for {architecture}: {error:?}; NVRTC of CUDA 12.4 or later can, --device cpu needs none: {}",
                        log.trim()
                    ),
                    is_unknown_architecture: error.0 == sys::nvrtcResult::NVRTC_ERROR_INVALID_OPTION,
                })
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
