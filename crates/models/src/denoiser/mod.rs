//! Networks that are called at each step.

mod dit;
mod flux;
mod flux2;
mod flux_blocks;
mod mmdit;
mod pixart;
mod qwen_image;
mod rope;
mod unet;
mod wan;
mod zimage;

mod patches;

pub(crate) use dit::{ClassTables, Dit, DitConfig};
pub(crate) use flux::{Flux, FluxConfig};
pub(crate) use flux2::{Flux2, Flux2Config};
pub(crate) use mmdit::{Mmdit, MmditConfig};
pub(crate) use pixart::{Pixart, PixartConfig};
pub(crate) use qwen_image::{QwenImage, QwenImageConfig};
pub(crate) use unet::{Unet, UnetConfig};
pub(crate) use wan::{Wan, WanConfig};
pub(crate) use zimage::{PATCH as ZIMAGE_PATCH, ZImage, ZImageConfig};

use crate::conditioning::Conditioning;
use denoised_nn::{Ctx, Result};
use denoised_tensor::{DType, Tensor};
use std::fmt::Debug;

/// What a denoiser computes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DenoiserInput<'a> {
    /// `[batch, n_frames h, w, c]` in the element type of activations, scaled as the sampler wants it, with whatever channels the family
    /// takes beside the latents.
    pub(crate) latents: &'a Tensor,
    /// Frames of a video, one above the other; 1 for a picture.
    pub(crate) n_frames: usize,
    /// f32 `[batch]`, or `[batch, n_frames]` where frames have timesteps of their own.
    pub(crate) timesteps: &'a Tensor,
    pub(crate) conditioning: &'a Conditioning,
    /// Latents of pictures to edit, `[batch, h_i, w_i, c]` each.
    pub(crate) references: &'a [Tensor],
}

/// A denoiser. No result for one batch element depends on the others.
pub(crate) trait Denoiser: Debug {
    /// A prediction of the latents' shape, as the sampler takes it.
    ///
    /// # Errors
    /// The device's.
    fn forward(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<Tensor>;
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
