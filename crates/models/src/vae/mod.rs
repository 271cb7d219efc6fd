//! Autoencoders: latents to pixels.

mod kl;

pub(crate) use kl::{KlConfig, KlDecoder, UNREAD_NAMES as KL_UNREAD_NAMES};

use denoised_nn::{Ctx, Result};
use denoised_tensor::Tensor;
use std::fmt::Debug;

/// The decoder of an autoencoder.
pub(crate) trait Decoder: Debug {
    /// f32 latents as the last step left them, `[batch, h, w, c]`, to pixels in about `[-1, 1]`, `[batch, H, W, 3]`.
    ///
    /// # Errors
    /// The device's.
    fn decode(&self, ctx: &Ctx<'_>, latents: &Tensor) -> Result<Tensor>;
}
