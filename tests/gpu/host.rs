//! What the host does around kernels.

use denoised_cuda::{CudaBackend, CudaOptions};
use denoised_tensor::{Activation, Backend, DType, Result, Tensor};
use serde_json::{Value, json};

const N: usize = 4096;

fn values(seed: u32) -> Vec<u8> {
    let value =
        |i: u32| (i.wrapping_mul(747_796_405).wrapping_add(seed) >> 8) as f32 / (1 << 23) as f32 - 1.0;
    (0..N as u32).flat_map(|i| value(i).to_le_bytes()).collect()
}

/// A few ops in a row, of which every call of `repeat` makes the same.
fn body(backend: &dyn Backend, x: &Tensor) -> Result<Vec<Tensor>> {
    let scaled = backend.alloc(x.dims(), DType::F32)?;
    backend.affine(x, 1.5, 0.25, &scaled)?;
    let active = backend.alloc(x.dims(), DType::F32)?;
    backend.activation(&scaled, Activation::Silu, &active)?;
    backend.layer_norm(&active, None, 1e-5, None, &scaled)?;
    Ok(vec![scaled])
}

fn bytes(backend: &dyn Backend, x: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![0; N * 4];
    backend.download(x, &mut bytes)?;
    Ok(bytes)
}

/// `{"checks": [{"name", "ok", "detail"}]}`
pub(crate) fn run() -> Value {
    let mut checks = Vec::new();
    let mut check = |name: &str, outcome: Result<bool>| {
        let (ok, detail) = match outcome {
            Ok(ok) => (ok, String::new()),
            Err(error) => (false, error.to_string()),
        };
        checks.push(json!({"name": name, "ok": ok, "detail": detail}));
    };
    let backend = super::open(DType::F32);
    let run = |backend: &dyn Backend, seed: u32| -> Result<[Vec<u8>; 2]> {
        let x = backend.upload(&values(seed), &[1, N], DType::F32)?;
        let eager = body(backend, &x)?;
        let repeated = backend.repeat(1, &[&x], &mut |inputs| body(backend, inputs[0]))?;
        Ok([bytes(backend, &eager[0])?, bytes(backend, &repeated[0])?])
    };
    let all_equal = |backend: &dyn Backend| -> Result<bool> {
        for seed in 0..6 {
            let [eager, repeated] = run(backend, seed)?;
            if eager != repeated {
                return Ok(false);
            }
        }
        Ok(true)
    };
    check("a recording gives the bits that ops give", all_equal(&backend));
    check("it was recorded", Ok(backend.recordings().0 == 1));
    check(
        "two runs give the same bits",
        run(&backend, 7).and_then(|first| Ok(first == run(&backend, 7)?)),
    );
    let other = super::open(DType::F32);
    check(
        "two backends on one device agree",
        run(&backend, 8).and_then(|first| Ok(first == run(&other, 8)?)),
    );
    drop(other);
    let used = backend.memory().used_bytes;
    check(
        "memory is back to base",
        run(&backend, 9).map(|_| backend.memory().used_bytes == used),
    );
    let unrecorded = CudaBackend::open(CudaOptions {
        dtype: DType::F32,
        max_recordings: 0,
        ..CudaOptions::default()
    });
    check(
        "no recordings where none are wanted",
        unrecorded.and_then(|backend| Ok(all_equal(&backend)? && backend.recordings().0 == 0)),
    );
    json!({"checks": checks})
}
