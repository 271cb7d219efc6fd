//! Backends and operands of these tests.

use denoised_cuda::{CudaBackend, CudaOptions};
use denoised_tensor::{Backend, DType, Precision, PrepareInput, Tensor, Weight, WeightKind, WeightSpec};
use denoised_testkit::{
    standin::{Schedule, Standin, under_standin},
    suites::backend::{MemorySource, Random, fetch, values_match_the_formula_of},
};
use half::{bf16, f16};

pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
pub(crate) const SHORT: [DType; 2] = [DType::BF16, DType::F16];

/// Runs `body` where fake devices are found; `name` is the test's path with this crate's name in front.
pub(crate) fn under(name: &str, schedule: Schedule, body: fn()) {
    let name = name.split_once("::").map_or(name, |(_, name)| name);
    under_standin(name, &Standin::new(schedule), body);
}

pub(crate) fn options(dtype: DType) -> CudaOptions {
    CudaOptions {
        dtype,
        kernel_folder: std::env::var_os("DENOISED_KERNEL_FOLDER").map(Into::into),
        ..CudaOptions::default()
    }
}

pub(crate) fn backend(dtype: DType) -> CudaBackend {
    CudaBackend::open(options(dtype)).unwrap_or_else(|error| panic!("{error}"))
}

/// Random cases of these ops in each of the dtypes.
pub(crate) fn formulas(dtypes: &[DType], ops: &[&str], n_rounds: u64) {
    for dtype in dtypes {
        let backend = backend(*dtype);
        for op in ops {
            values_match_the_formula_of(&backend, op, n_rounds);
        }
    }
}

pub(crate) fn rounded(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(x).to_f32(),
        DType::F16 => f16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// Numbers between -1 and 1 that the dtype holds exactly.
pub(crate) fn values(dtype: DType, seed: u64, n: usize) -> Vec<f32> {
    let mut random = Random::new(seed);
    let mut value = || random.within(0, 1 << 20) as f32 / (1 << 19) as f32 - 1.0;
    (0..n).map(|_| rounded(dtype, value())).collect()
}

pub(crate) fn bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::BF16 => values
            .iter()
            .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
            .collect(),
        DType::F16 => values
            .iter()
            .flat_map(|x| f16::from_f32(*x).to_le_bytes())
            .collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

pub(crate) fn put(backend: &dyn Backend, dtype: DType, dims: &[usize], values: &[f32]) -> Tensor {
    backend
        .upload(&bytes(dtype, values), dims, dtype)
        .expect("memory")
}

/// A view of `dims` that starts `offset` elements after a boundary and whose rows are `gap` elements apart, NaN around it.
pub(crate) fn put_apart(
    backend: &dyn Backend,
    dtype: DType,
    dims: &[usize],
    values: &[f32],
    offset: usize,
    gap: usize,
) -> Tensor {
    let last = dims.len() - 1;
    let mut whole_dims = dims.to_vec();
    whole_dims[last] += offset + gap;
    let mut whole = Vec::new();
    for row in values.chunks_exact(dims[last]) {
        whole.extend(std::iter::repeat_n(f32::NAN, offset));
        whole.extend_from_slice(row);
        whole.extend(std::iter::repeat_n(f32::NAN, gap));
    }
    let whole = put(backend, dtype, &whole_dims, &whole);
    whole.narrow(last, offset, dims[last]).expect("inside")
}

pub(crate) fn get(backend: &dyn Backend, x: &Tensor) -> Vec<f32> {
    fetch(backend, x).expect("floats")
}

pub(crate) fn weights(backend: &dyn Backend, all: &[(WeightKind, &[usize], &[f32])]) -> Vec<Weight> {
    let mut source = MemorySource::default();
    let mut specs = Vec::new();
    for (i, (kind, shape, values)) in all.iter().enumerate() {
        let name = format!("w{i}");
        source.insert(&name, shape, values);
        specs.push(WeightSpec {
            sources: vec![name],
            kind: *kind,
            shape: shape.to_vec(),
            precision: Precision::Device,
        });
    }
    let prepared = backend.prepare(&specs, PrepareInput::Build(&source), &mut |_, _| {});
    prepared.expect("sound weights").weights
}

/// Relative L2 distance, where NaN is a failure.
#[track_caller]
pub(crate) fn assert_close(what: &str, got: &[f32], expected: &[f64], limit: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let (mut distance, mut norm) = (0.0, 0.0);
    for (got, expected) in got.iter().zip(expected) {
        distance += (f64::from(*got) - expected).powi(2);
        norm += expected * expected;
    }
    let error = (distance / norm.max(1e-30)).sqrt();
    assert!(
        error <= limit,
        "{what}: relative L2 error {error:.2e}, limit {limit:.0e}"
    );
}

/// Largest relative error of a rounding, with room for a few of them.
pub(crate) fn limit(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 6e-3,
        DType::F16 => 8e-4,
        _ => 3e-6,
    }
}
