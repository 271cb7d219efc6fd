//! The autoencoder's own precision: f32 where half precision does not hold what it computes.
//!
//! R1. What half precision makes NaN or infinite is computed once more in f32, with weights that are read from the files for it.
//! R2. A result does not depend on the requests before it: each is tried in the device's element type first. Only weights are kept.
//!
//! Does not know what is computed, nor whether its input was finite.

use crate::parts::is_of_autoencoder;
use denoised_checkpoint::Weights;
use denoised_nn::Ctx;
use denoised_tensor::{DType, Precision, PrepareInput, Tensor, TensorError, Weight, WeightSpec};
use std::cell::OnceCell;

/// See the module's head.
#[derive(Debug)]
pub(super) struct Autoencoder {
    /// Of its activations.
    dtype: DType,
    /// `None` if it computes in f32 as it is.
    retry: Option<Retry>,
}

#[derive(Debug)]
struct Retry {
    files: Weights,
    /// The autoencoder's weights in f32.
    specs: Vec<WeightSpec>,
    /// Where they are in the model's list.
    places: Vec<usize>,
    /// Since they were needed first.
    kept: OnceCell<Kept>,
}

#[derive(Debug)]
struct Kept {
    /// The model's list, the autoencoder's in f32.
    weights: Vec<Weight>,
    n_bytes: u64,
}

impl Autoencoder {
    /// Of a model with the weights `specs` from `files`, on a device of `device_dtype`.
    pub(super) fn new(specs: &[WeightSpec], files: Weights, device_dtype: DType) -> Self {
        let (places, mut specs): (Vec<usize>, Vec<WeightSpec>) = specs
            .iter()
            .cloned()
            .enumerate()
            .filter(|(_, spec)| is_of_autoencoder(spec))
            .unzip();
        let dtype = specs
            .first()
            .map_or(device_dtype, |spec| spec.precision.dtype(device_dtype));
        for spec in &mut specs {
            spec.precision = Precision::F32;
        }
        Self {
            dtype,
            retry: (dtype != DType::F32).then(|| Retry {
                files,
                specs,
                places,
                kept: OnceCell::new(),
            }),
        }
    }

    /// What `compute`, which `what` names, makes of a finite input on the device of `ctx`; `None` if that is NaN or infinite in f32 too.
    pub(super) fn run(
        &self,
        ctx: &Ctx<'_>,
        what: &str,
        compute: impl Fn(&Ctx<'_>) -> Result<Tensor, TensorError>,
    ) -> Result<Option<Tensor>, TensorError> {
        let finite = |ctx: &Ctx<'_>| {
            let out = compute(ctx)?;
            let is_finite = ctx.backend.all_finite(&out)?;
            Ok(is_finite.then_some(out))
        };
        let own = Ctx {
            dtype: self.dtype,
            ..*ctx
        };
        let out = finite(&own)?;
        let Some(retry) = self.retry.as_ref().filter(|_| out.is_none()) else {
            return Ok(out);
        };
        let dtype = self.dtype;
        tracing::warn!("{what} gave NaN or infinity in {dtype}, of a finite input; it is done again in f32");
        finite(&Ctx {
            weights: retry.weights(ctx)?,
            dtype: DType::F32,
            ..*ctx
        })
    }

    /// Bytes of weights that were read since the model was loaded.
    pub(super) fn kept_bytes(&self) -> u64 {
        let kept = self.retry.as_ref().and_then(|retry| retry.kept.get());
        kept.map_or(0, |kept| kept.n_bytes)
    }
}

impl Retry {
    fn weights(&self, ctx: &Ctx<'_>) -> Result<&[Weight], TensorError> {
        if let Some(kept) = self.kept.get() {
            return Ok(&kept.weights);
        }
        let input = PrepareInput::Build(&self.files);
        let prepared = ctx.backend.prepare(&self.specs, input, &mut |_, _| {})?;
        let n_bytes = prepared.n_bytes;
        tracing::info!("the autoencoder's weights in f32, {n_bytes} bytes, are kept beside the others");
        let mut weights = ctx.weights.to_vec();
        for (place, weight) in self.places.iter().zip(prepared.weights) {
            weights[*place] = weight;
        }
        Ok(&self.kept.get_or_init(|| Kept { weights, n_bytes }).weights)
    }
}
