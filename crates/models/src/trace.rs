//! Tensors on their way to the host, in the layouts of reference cases.

use crate::layout::{LatentsShape, TensorLayout};
use denoised_nn::{Ctx, Result};
use denoised_tensor::Tensor;
use denoised_types::NamedTensor;

/// Token ids `[1, n]`.
pub(crate) fn ids(name: String, ids: &[u32]) -> NamedTensor {
    let values: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    NamedTensor::from_i64(name, &[1, values.len() as u64], &values)
}

/// A tensor as it is.
pub(crate) fn plain(ctx: &Ctx<'_>, name: String, x: &Tensor) -> Result<NamedTensor> {
    let shape: Vec<u64> = x.dims().iter().map(|extent| *extent as u64).collect();
    Ok(NamedTensor::from_f32(name, &shape, &ctx.download_f32(x)?))
}

/// Tokens `[1, n, c]` with the last one written out `n_repeats` times.
pub(crate) fn repeated(ctx: &Ctx<'_>, name: String, x: &Tensor, n_repeats: usize) -> Result<NamedTensor> {
    let mut values = ctx.download_f32(x)?;
    let last = values[values.len() - x.dim(2)..].to_vec();
    for _ in 1..n_repeats {
        values.extend_from_slice(&last);
    }
    let shape = [1, (x.dim(1) + n_repeats - 1) as u64, x.dim(2) as u64];
    Ok(NamedTensor::from_f32(name, &shape, &values))
}

/// Latents of one member in a layout.
pub(crate) fn latents(
    ctx: &Ctx<'_>,
    name: String,
    x: &Tensor,
    layout: TensorLayout,
    shape: &LatentsShape,
) -> Result<NamedTensor> {
    let values = layout.of_loop(&ctx.download_f32(x)?, shape);
    Ok(NamedTensor::from_f32(name, &layout.dims(shape), &values))
}

/// A picture `[1, h, w, 3]` as `[1, 3, h, w]`; frames `[1, n_frames h, w, 3]` of a video as `[1, n_frames, 3, h, w]`.
pub(crate) fn pixels(
    ctx: &Ctx<'_>,
    name: String,
    x: &Tensor,
    n_frames: Option<usize>,
) -> Result<NamedTensor> {
    let (frames, h, w, c) = (
        n_frames.unwrap_or(1),
        x.dim(1) / n_frames.unwrap_or(1).max(1),
        x.dim(2),
        x.dim(3),
    );
    let values = ctx.download_f32(x)?;
    let mut planes = Vec::with_capacity(values.len());
    for frame in values.chunks_exact((h * w * c).max(1)) {
        for channel in 0..c {
            planes.extend(frame[channel..].iter().step_by(c));
        }
    }
    let shape: Vec<u64> = match n_frames {
        None => [1, c, h, w].map(|extent| extent as u64).to_vec(),
        Some(_) => [1, frames, c, h, w].map(|extent| extent as u64).to_vec(),
    };
    Ok(NamedTensor::from_f32(name, &shape, &planes))
}
