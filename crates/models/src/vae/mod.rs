//! Autoencoders: latents to pixels and back.

mod causal;
mod causal_coder;
mod causal_config;
mod flux2;
mod kl;
mod kl_encoder;

pub(crate) use causal_coder::{
    CausalDecoder, CausalEncoder, ENCODER_NAMES as CAUSAL_ENCODER_NAMES, TIME_NAMES as CAUSAL_TIME_NAMES,
};
pub(crate) use causal_config::CausalConfig;
pub(crate) use flux2::{Flux2Decoder, Flux2Encoder, Flux2VaeConfig, UNREAD_NAMES as FLUX2_UNREAD_NAMES};
pub(crate) use kl::{KlConfig, KlDecoder, UNREAD_NAMES as KL_UNREAD_NAMES};
pub(crate) use kl_encoder::KlEncoder;

use denoised_nn::{Ctx, Result};
use denoised_tensor::Tensor;
use std::fmt::Debug;

/// The decoder of an autoencoder.
pub(crate) trait Decoder: Debug {
    /// f32 latents as the last step left them, `[batch, n_frames h, w, c]`, to pixels in about `[-1, 1]`, `[batch, n_frames_out H, W, 3]`.
    ///
    /// # Errors
    /// The device's.
    fn decode(&self, ctx: &Ctx<'_>, latents: &Tensor, n_frames: usize) -> Result<Tensor>;
}

/// The encoder of an autoencoder.
pub(crate) trait Encoder: Debug {
    /// f32 pixels in `[-1, 1]`, `[batch, n_frames H, W, 3]`, to f32 latents as a denoiser takes them, `[batch, n_frames_out h, w, c]`.
    ///
    /// `noise` is unit normal in the shape of the result and samples the distribution that the encoder gives,
    /// `mean + exp(clamp(log variance, -30, 20) / 2) noise`; without it its mode is taken.
    ///
    /// # Errors
    /// The device's.
    fn encode(
        &self,
        ctx: &Ctx<'_>,
        pixels: &Tensor,
        n_frames: usize,
        noise: Option<&Tensor>,
    ) -> Result<Tensor>;
}

/// f32 latents `[.., c]` as a denoiser takes them of what an encoder gives, `[.., 2 c]`: means, then log variances. The network's latents
/// are a denoiser's times `scales` plus `shifts`. Pictures are encoded once and their latents are few, so it is done on the host.
fn latents_of(
    ctx: &Ctx<'_>,
    moments: &Tensor,
    noise: Option<&Tensor>,
    (scales, shifts): (&[f32], &[f32]),
) -> Result<Tensor> {
    let n_latent = scales.len();
    let values = ctx.download_f32(moments)?;
    let noise = noise.map(|noise| ctx.download_f32(noise)).transpose()?;
    let mut latents = Vec::with_capacity(values.len() / 2);
    for moments in values.chunks_exact(2 * n_latent) {
        for channel in 0..n_latent {
            let (mean, log_variance) = (moments[channel], moments[n_latent + channel]);
            let value = match &noise {
                Some(noise) => sampled(mean, log_variance, noise[latents.len()]),
                None => mean,
            };
            latents.push((value - shifts[channel]) / scales[channel]);
        }
    }
    let mut dims = moments.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = n_latent;
    }
    ctx.upload_f32(&latents, &dims)
}

/// What an encoder's mean and log variance make of a unit normal number. NaN where the variance is infinite: in 16 bits it was too large
/// for its type, and the limits of its logarithm would hide that.
fn sampled(mean: f32, log_variance: f32, noise: f32) -> f32 {
    match log_variance.is_infinite() {
        true => f32::NAN,
        false => mean + (0.5 * log_variance.clamp(-30.0, 20.0)).exp() * noise,
    }
}

#[cfg(test)]
mod tests;
