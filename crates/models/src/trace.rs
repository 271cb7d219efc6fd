//! Tensors on their way to the host, in the layouts of reference cases.

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

/// A picture or latents `[batch, h, w, c]` as `[batch, c, h, w]`.
pub(crate) fn nchw(ctx: &Ctx<'_>, name: String, x: &Tensor) -> Result<NamedTensor> {
    let dims = [x.dim(0), x.dim(3), x.dim(1), x.dim(2)];
    let values = channels_first(&ctx.download_f32(x)?, x.dim(3));
    Ok(NamedTensor::from_f32(
        name,
        &dims.map(|extent| extent as u64),
        &values,
    ))
}

/// One picture of `n_channels`, pixel by pixel, to plane by plane.
fn channels_first(values: &[f32], n_channels: usize) -> Vec<f32> {
    (0..n_channels)
        .flat_map(|channel| values[channel..].iter().step_by(n_channels).copied())
        .collect()
}

/// Inverse of [`channels_first`].
pub(crate) fn channels_last(values: &[f32], n_channels: usize) -> Vec<f32> {
    let n_pixels = values.len() / n_channels.max(1);
    (0..n_pixels)
        .flat_map(|pixel| values[pixel..].iter().step_by(n_pixels).copied())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_and_pixels_are_each_others_inverse() {
        // Two pixels of three channels.
        let pixels = [1.0, 2.0, 3.0, 10.0, 20.0, 30.0];
        let planes = channels_first(&pixels, 3);
        assert_eq!(planes, [1.0, 10.0, 2.0, 20.0, 3.0, 30.0]);
        assert_eq!(channels_last(&planes, 3), pixels);
    }
}
