//! Drills: a kernel that leaves its output, memory beyond the device's.

use denoised_cuda::{CudaBackend, CudaOptions};
use denoised_tensor::{Backend, DType, TensorError};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// `{"checks": [{"name", "ok", "detail"}]}`
pub(crate) fn run(kernels: &Path) -> Value {
    let mut checks = Vec::new();
    let mut check =
        |name: &str, ok: bool, detail: String| checks.push(json!({"name": name, "ok": ok, "detail": detail}));
    match break_a_kernel(kernels) {
        Err(error) => check("a kernel can be broken", false, error),
        Ok(folder) => {
            let output = in_a_process_of_its_own(&folder);
            let text = output.map_or_else(
                |error| error.to_string(),
                |output| String::from_utf8_lossy(&output.stdout).into_owned(),
            );
            let told: Value = serde_json::from_str(&text).unwrap_or_default();
            let fault = told["fault"].as_str().unwrap_or_default().to_owned();
            check(
                "a kernel outside its output is a fault with its name",
                fault.contains("CUDA_ERROR_") && fault.contains("fill_f32"),
                fault.clone(),
            );
            check(
                "and its launch",
                fault.contains("grid ") && fault.contains("block "),
                fault.clone(),
            );
            check(
                "and the same error ever after",
                told["later"] == told["fault"] && !fault.is_empty(),
                told["later"].to_string(),
            );
            let _ = fs::remove_dir_all(folder);
        }
    }
    let backend = super::open(DType::F32);
    check(
        "the next process finds a sound device",
        backend.synchronize().is_ok(),
        String::new(),
    );
    let beyond = backend.alloc(&[1 << 20, 1 << 20], DType::F32);
    let detail = beyond
        .as_ref()
        .map_or_else(ToString::to_string, |_| "it was granted".to_owned());
    let is_refused =
        matches!(&beyond, Err(TensorError::OutOfMemory { what, .. }) if what.contains("[1048576, 1048576]"));
    check(
        "memory beyond the device's is refused with its shape",
        is_refused,
        detail,
    );
    let after = backend
        .alloc(&[16], DType::F32)
        .and_then(|x| backend.fill(&x, 1.0))
        .and_then(|()| backend.synchronize());
    check("and the device goes on", after.is_ok(), format!("{after:?}"));
    json!({"checks": checks})
}

#[expect(
    clippy::disallowed_methods,
    reason = "this program once more, not a process of the product"
)]
fn in_a_process_of_its_own(folder: &Path) -> std::io::Result<Output> {
    Command::new(std::env::current_exe()?)
        .arg("broken")
        .arg(folder)
        .output()
}

/// A copy of the kernels in which `fill` writes far behind its output.
fn break_a_kernel(kernels: &Path) -> Result<PathBuf, String> {
    let folder = std::env::temp_dir().join(format!("broken-kernels-{}", std::process::id()));
    let copy = || -> std::io::Result<bool> {
        fs::create_dir_all(&folder)?;
        for entry in fs::read_dir(kernels)? {
            let path = entry?.path();
            if path.is_file() {
                fs::copy(&path, folder.join(path.file_name().unwrap_or_default()))?;
            }
        }
        let path = folder.join("elementwise.cu");
        let text = fs::read_to_string(&path)?;
        let sound = "locate(args.walk, item, offsets);\n        store<T, V>(static_cast<T*>(args.walk.starts[0]) + offsets[0], out);";
        let broken = text.replace(sound, "locate(args.walk, item, offsets);\n        store<T, V>(static_cast<T*>(args.walk.starts[0]) + offsets[0] + (1ll << 44), out);");
        fs::write(&path, &broken)?;
        Ok(broken != text)
    };
    match copy() {
        Ok(true) => Ok(folder),
        Ok(false) => Err("`fill` is not as this drill knows it".to_owned()),
        Err(error) => Err(format!("{}: {error}", folder.display())),
    }
}

/// `{"fault", "later"}`: what the broken kernel's error is at the next wait, and at the one after it.
pub(crate) fn broken(kernels: PathBuf) -> Value {
    let backend = CudaBackend::open(CudaOptions {
        dtype: DType::F32,
        kernel_folder: Some(kernels),
        ..CudaOptions::default()
    });
    let backend = match backend {
        Ok(backend) => backend,
        Err(error) => return json!({"fault": error.to_string()}),
    };
    let told = |outcome: Result<(), TensorError>| outcome.err().map(|error| error.to_string());
    let filled = backend.alloc(&[1000], DType::F32).and_then(|x| {
        backend.fill(&x, 1.0)?;
        backend.synchronize()
    });
    json!({"fault": told(filled), "later": told(backend.synchronize())})
}
