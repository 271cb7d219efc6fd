//! Networks that are called at each step.

mod mmdit;

pub(crate) use mmdit::{Mmdit, MmditConfig};

use crate::conditioning::Conditioning;
use denoised_nn::{Ctx, Result};
use denoised_tensor::Tensor;
use std::fmt::Debug;

/// A denoiser. No result for one batch element depends on the others.
pub(crate) trait Denoiser: Debug {
    /// Latents `[batch, h, w, c]`, timesteps `[batch]` f32, to a prediction of the latents' shape.
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
