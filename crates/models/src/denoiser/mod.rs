//! Networks that are called at each step.

mod mmdit;
mod unet;

pub(crate) use mmdit::{Mmdit, MmditConfig};
pub(crate) use unet::{Unet, UnetConfig};

use crate::conditioning::Conditioning;
use denoised_nn::{Ctx, Result};
use denoised_tensor::{DType, Tensor};
use std::fmt::Debug;

/// A denoiser. No result for one batch element depends on the others.
pub(crate) trait Denoiser: Debug {
    /// Latents `[batch, h, w, c]` in the element type of activations, timesteps `[batch]` f32, to a prediction of the latents' shape.
    ///
    /// # Errors
    /// The device's.
    fn forward(
        &self,
        ctx: &Ctx<'_>,
        latents: &Tensor,
        timesteps: &Tensor,
        conditioning: &Conditioning,
    ) -> Result<Tensor>;
}

/// Scores that make the last key count as `n_repeats` equal ones: `n exp(s) = exp(s + ln n)`.
fn repeat_bias(ctx: &Ctx<'_>, n_keys: usize, n_repeats: usize) -> Result<Option<Tensor>> {
    if n_repeats == 1 {
        return Ok(None);
    }
    let mut bias = vec![0f32; n_keys];
    if let Some(last) = bias.last_mut() {
        *last = (n_repeats as f64).ln() as f32;
    }
    let bytes: Vec<u8> = bias.iter().flat_map(|value| value.to_le_bytes()).collect();
    let dims = [1, 1, 1, n_keys];
    ctx.backend.upload(&bytes, &dims, DType::F32).map(Some)
}
