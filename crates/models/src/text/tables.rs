//! For the tests of encoders: tables of weights and of what transformers made of them.

use denoised_checkpoint::Config;
use denoised_cpu::{CpuBackend, CpuOptions};
use denoised_nn::{Ctx, Declare, Result, Scope};
use denoised_tensor::{
    Backend, DType, PrepareInput, Prepared, SourceDType, SourceError, SourceTensor, Tensor, WeightSource,
};
use serde_json::Value;
use std::{borrow::Cow, fs, path::Path};

/// The file `name` of `tests/tables`; the script that made it stands beside it.
pub(super) fn table(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/tables")
        .join(name);
    serde_json::from_str(&fs::read_to_string(path).expect("the table is part of the crate")).expect("JSON")
}

pub(super) fn config_of(value: &Value) -> Config {
    let map = value.as_object().expect("an object").clone();
    Config::new(Path::new("config.json"), map)
}

pub(super) fn numbers(value: &Value) -> Vec<f64> {
    let list = value.as_array().expect("a list").iter();
    list.map(|number| number.as_f64().expect("a number")).collect()
}

pub(super) fn ids_of(value: &Value) -> Vec<u32> {
    numbers(value).into_iter().map(|id| id as u32).collect()
}

/// Norm of the difference over the norm of `theirs`; infinite where anything is no number.
pub(super) fn relative_error(ours: &[f32], theirs: &[f64]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let square = |x: f64| x * x;
    let pairs = ours.iter().zip(theirs);
    let difference: f64 = pairs.map(|(a, b)| square(f64::from(*a) - b)).sum();
    let norm: f64 = theirs.iter().copied().map(square).sum();
    let error = (difference / norm).sqrt();
    if error.is_nan() { f64::INFINITY } else { error }
}

/// Weights by name: their shapes, and the bits of bfloat16 in hexadecimal.
struct Weights<'a>(&'a Value);

impl WeightSource for Weights<'_> {
    fn layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), SourceError> {
        let shape = &self.0[name]["shape"];
        if shape.is_null() {
            return Err(SourceError(format!("there is no {name}")));
        }
        let shape = numbers(shape).into_iter().map(|extent| extent as usize);
        Ok((SourceDType::BF16, shape.collect()))
    }

    fn tensor(&self, name: &str) -> Result<SourceTensor<'_>, SourceError> {
        let (dtype, shape) = self.layout(name)?;
        let digits = self.0[name]["bf16"].as_str().expect("digits");
        let bits = (0..digits.len() / 4).map(|idx| &digits[4 * idx..][..4]);
        let bits = bits.map(|four| u16::from_str_radix(four, 16).expect("hexadecimal"));
        Ok(SourceTensor {
            dtype,
            shape,
            bytes: Cow::Owned(bits.flat_map(u16::to_le_bytes).collect()),
        })
    }
}

/// A network with its weights on the CPU.
pub(super) struct TestModel<T> {
    network: T,
    backend: CpuBackend,
    prepared: Prepared,
}

impl<T> TestModel<T> {
    /// What `new` makes of `weights`.
    pub(super) fn new(weights: &Value, new: impl FnOnce(&mut Scope<'_>) -> T) -> Self {
        let names = weights.as_object().expect("weights").keys().cloned();
        let mut declare = Declare::new(names);
        let network = new(&mut declare.at(""));
        let backend = CpuBackend::new(CpuOptions {
            n_threads: 1,
            ..CpuOptions::default()
        });
        let backend = backend.expect("a backend of one thread");
        let weights = Weights(weights);
        let input = PrepareInput::Build(&weights);
        let prepared = backend.prepare(&declare.finish(), input, &mut |_, _| {});
        Self {
            network,
            prepared: prepared.expect("the weights are prepared"),
            backend,
        }
    }

    /// The numbers that `forward` computes.
    pub(super) fn run(&self, forward: impl FnOnce(&T, &Ctx<'_>) -> Result<Tensor>) -> Vec<f32> {
        let ctx = Ctx {
            backend: &self.backend,
            weights: &self.prepared.weights,
            dtype: DType::F32,
        };
        let out = forward(&self.network, &ctx).expect("a forward");
        ctx.download_f32(&out).expect("its numbers")
    }
}
