//! diffusers' `AutoencoderKLFlux2`: the decoder of `AutoencoderKL` behind latents in patches, which a batch norm's statistics scale.
//!
//! The loop holds patches of 2x2 latents as one, features `(c, dy, dx)`.

use super::{Decoder, KlConfig, KlDecoder};
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{Ctx, Parameter, Result, Scope};
use denoised_tensor::{PatchOrder, Tensor};

const PATCH: usize = 2;

/// Keys that only concern training, half precision or tiling, and those that diffusers does not know.
const KEYS_WITHOUT_EFFECT: [&str; 5] = [
    "sample_size",
    "force_upcast",
    "batch_norm_momentum",
    "scaling_factor",
    "shift_factor",
];

/// Tensors that nothing reads: how often training updated the statistics.
pub(crate) const UNREAD_NAMES: [&str; 1] = ["bn.num_batches_tracked"];

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct Flux2VaeConfig {
    decoder: KlConfig,
    eps: f64,
}

impl Flux2VaeConfig {
    /// Reads the configuration; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        let [_, decoder] = KlConfig::read_flux2(config)?;
        let eps = config.f64_or("batch_norm_eps", 1e-4)?;
        if !(eps.is_finite() && eps > 0.0) {
            return Err(config.wrong("batch_norm_eps", "a positive number").into());
        }
        config.only("patch_size", &[vec![PATCH; 2].into()])?;
        config.deny_unread(&KEYS_WITHOUT_EFFECT)?;
        Ok(Self { decoder, eps })
    }

    /// Channels of the latents as the loop holds them.
    pub(crate) fn n_channels(&self) -> usize {
        PATCH * PATCH * self.decoder.n_latent
    }

    /// Pixels per latent as the loop holds them, each way.
    pub(crate) fn factor(&self) -> usize {
        PATCH * self.decoder.factor()
    }
}

/// The statistics of the latents' batch norm.
#[derive(Debug)]
struct Statistics {
    mean: Parameter,
    variance: Parameter,
    eps: f64,
}

impl Statistics {
    fn new(root: &mut Scope<'_>, config: &Flux2VaeConfig) -> Self {
        let mut scope = root.at("bn");
        let shape = [config.n_channels()];
        Self {
            mean: Parameter::new(&mut scope, "running_mean", &shape),
            variance: Parameter::new(&mut scope, "running_var", &shape),
            eps: config.eps,
        }
    }

    /// Mean and standard deviation, `[c]` each.
    fn read(&self, ctx: &Ctx<'_>) -> Result<[Tensor; 2]> {
        let mut deviations = ctx.download_f32(&self.variance.tensor(ctx)?)?;
        for value in &mut deviations {
            *value = (f64::from(*value) + self.eps).sqrt() as f32;
        }
        let deviations = ctx.upload_f32(&deviations, &[deviations.len()])?;
        Ok([self.mean.tensor(ctx)?, deviations])
    }
}

/// The network behind the latents.
#[derive(Debug)]
pub(crate) struct Flux2Decoder {
    statistics: Statistics,
    decoder: KlDecoder,
}

impl Flux2Decoder {
    pub(crate) fn new(root: &mut Scope<'_>, config: &Flux2VaeConfig) -> Self {
        Self {
            statistics: Statistics::new(root, config),
            decoder: KlDecoder::new(root, &config.decoder),
        }
    }
}

impl Decoder for Flux2Decoder {
    fn decode(&self, ctx: &Ctx<'_>, latents: &Tensor, n_frames: usize) -> Result<Tensor> {
        let [mean, deviation] = self.statistics.read(ctx)?;
        let scaled = ctx.backend.alloc(latents.dims(), latents.dtype())?;
        ctx.backend.mul(latents, &deviation, &scaled)?;
        ctx.backend.add(&scaled, &mean, &scaled)?;
        let [batch, h, w, c] = [0, 1, 2, 3].map(|dim| latents.dim(dim));
        let dims = [batch, PATCH * h, PATCH * w, c / (PATCH * PATCH)];
        let whole = ctx.backend.alloc(&dims, latents.dtype())?;
        let tokens = scaled.reshape(&[batch, h * w, c])?;
        ctx.backend
            .unpatchify(&tokens, PATCH, PatchOrder::ChannelFirst, &whole)?;
        self.decoder.decode(ctx, &whole, n_frames)
    }
}
