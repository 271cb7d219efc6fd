//! What a family is made of, as the one loop wants it.

use crate::{conditioning::Conditioner, denoiser::Denoiser, vae::Decoder};
use denoised_checkpoint::Weights;
use denoised_sampler::Sampler;
use denoised_tensor::WeightSpec;
use denoised_types::ModelInfo;

/// A checkpoint whose structure is known. What is only for loading goes with the files that it keeps open.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) parts: Parts,
    pub(crate) specs: Vec<WeightSpec>,
    pub(crate) weights: Weights,
}

/// What the one loop needs of a family.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) info: ModelInfo,
    pub(crate) latents: LatentsLayout,
    /// Longest text of encoders whose length the request chooses: the default and the most. `None` if there is no such encoder.
    pub(crate) max_sequence_length: Option<(u32, u32)>,
    pub(crate) conditioner: Box<dyn Conditioner>,
    pub(crate) denoiser: Box<dyn Denoiser>,
    pub(crate) decoder: Box<dyn Decoder>,
    /// As many as `info.samplers`, in the same order.
    pub(crate) samplers: Vec<Box<dyn Sampler>>,
    /// Class of the checkpoint's own scheduler, if nothing here carries it out: every request must then name its sampler.
    pub(crate) foreign_scheduler: Option<String>,
}

/// Latents of a picture.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatentsLayout {
    pub(crate) n_channels: usize,
    /// Pixels per latent, each way.
    pub(crate) factor: usize,
    /// Fewest latents each way that the denoiser can compute.
    pub(crate) min_side: usize,
}
