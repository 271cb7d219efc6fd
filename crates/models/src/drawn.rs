//! Weights that tests and the scripts of their tables draw alike, so that tables need not hold them.

use denoised_checkpoint::Reading;
use denoised_sampler::TorchGenerator;
use denoised_tensor::{SourceDType, SourceError, SourceTensor, WeightSource};
use std::{borrow::Cow, collections::BTreeMap};

/// The first `n` numbers from `seed`.
pub(crate) fn normal(n: usize, seed: u64) -> Vec<f32> {
    let mut values = vec![0.0; n];
    TorchGenerator::new(seed).fill_normal(&mut values);
    values
}

/// Weights by name, each drawn from the sum of its name's bytes: see `set_weights` of `tests/tables/make_vaes.py`.
pub(crate) struct Drawn(pub(crate) BTreeMap<String, Vec<usize>>);

impl WeightSource for Drawn {
    fn layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), SourceError> {
        let (name, reading) = Reading::of(name);
        let shape = self.0.get(name);
        let shape = shape.ok_or_else(|| SourceError(format!("no {name}")))?;
        Ok((SourceDType::F32, reading.shape(shape)))
    }

    fn tensor(&self, name: &str) -> Result<SourceTensor<'_>, SourceError> {
        let (name, reading) = Reading::of(name);
        let (dtype, shape) = self.layout(name)?;
        let seed = name.bytes().map(u64::from).sum();
        let is_kernel = name.ends_with("weight") && shape.len() > 1;
        let is_factor = ["gamma", "weight", "running_var"]
            .iter()
            .any(|end| name.ends_with(end));
        let values = normal(shape.iter().product(), seed)
            .into_iter()
            .map(f64::from)
            .map(|x| match (is_kernel, is_factor) {
                (true, _) => x * (shape[1..].iter().product::<usize>() as f64).powf(-0.5),
                (false, true) => 1.0 + 0.1 * x,
                (false, false) => 0.1 * x,
            });
        let bytes: Vec<u8> = values.flat_map(|x| (x as f32).to_le_bytes()).collect();
        Ok(reading.tensor(SourceTensor {
            dtype,
            shape,
            bytes: Cow::Owned(bytes),
        }))
    }
}

/// Relative L2 error.
pub(crate) fn relative_error(ours: impl ExactSizeIterator<Item = f64>, theirs: &[f64]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut ours.zip(theirs).map(|(a, b)| a - b)) / norm(&mut theirs.iter().copied())
}
