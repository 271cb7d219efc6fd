//! diffusers' `AutoencoderKLFlux2`: `AutoencoderKL` with latents in patches, which a batch norm's statistics scale.
//!
//! The loop holds patches of 2x2 latents as one, features `(c, dy, dx)`.

use super::{Decoder, Encoder, KlConfig, KlDecoder, KlEncoder};
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
    encoder: KlConfig,
    decoder: KlConfig,
    eps: f64,
}

impl Flux2VaeConfig {
    /// Reads the configuration; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        let [encoder, decoder] = KlConfig::read_flux2(config)?;
        let eps = config.f64_or("batch_norm_eps", 1e-4)?;
        if !(eps.is_finite() && eps > 0.0) {
            return Err(config.wrong("batch_norm_eps", "a positive number").into());
        }
        config.only("patch_size", &[vec![PATCH; 2].into()])?;
        config.deny_unread(&KEYS_WITHOUT_EFFECT)?;
        Ok(Self {
            encoder,
            decoder,
            eps,
        })
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

    /// Mean and standard deviation of each channel.
    fn read(&self, ctx: &Ctx<'_>) -> Result<[Vec<f32>; 2]> {
        let mut deviations = ctx.download_f32(&self.variance.tensor(ctx)?)?;
        for value in &mut deviations {
            *value = (f64::from(*value) + self.eps).sqrt() as f32;
        }
        Ok([ctx.download_f32(&self.mean.tensor(ctx)?)?, deviations])
    }
}

/// Latents of patches `[batch, h, w, c]` one by one, `[batch, 2h, 2w, c / 4]`.
fn unpatchify(ctx: &Ctx<'_>, x: &Tensor) -> Result<Tensor> {
    let [batch, h, w, c] = [0, 1, 2, 3].map(|dim| x.dim(dim));
    let dims = [batch, PATCH * h, PATCH * w, c / (PATCH * PATCH)];
    let whole = ctx.backend.alloc(&dims, x.dtype())?;
    let tokens = x.reshape(&[batch, h * w, c])?;
    ctx.backend
        .unpatchify(&tokens, PATCH, PatchOrder::ChannelFirst, &whole)?;
    Ok(whole)
}

/// Inverse of [`unpatchify`].
fn patchify(ctx: &Ctx<'_>, x: &Tensor) -> Result<Tensor> {
    let [batch, h, w, c] = [0, 1, 2, 3].map(|dim| x.dim(dim));
    let (h, w, c) = (h / PATCH, w / PATCH, PATCH * PATCH * c);
    let tokens = ctx.backend.alloc(&[batch, h * w, c], x.dtype())?;
    ctx.backend
        .patchify(x, PATCH, PatchOrder::ChannelFirst, &tokens)?;
    tokens.reshape(&[batch, h, w, c])
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
        let [means, deviations] = self.statistics.read(ctx)?;
        let scaled = ctx.backend.alloc(latents.dims(), latents.dtype())?;
        let per_channel = |values: &[f32]| ctx.upload_f32(values, &[values.len()]);
        ctx.backend.mul(latents, &per_channel(&deviations)?, &scaled)?;
        ctx.backend.add(&scaled, &per_channel(&means)?, &scaled)?;
        self.decoder.decode(ctx, &unpatchify(ctx, &scaled)?, n_frames)
    }
}

/// The network before the latents.
#[derive(Debug)]
pub(crate) struct Flux2Encoder {
    statistics: Statistics,
    encoder: KlEncoder,
}

impl Flux2Encoder {
    pub(crate) fn new(root: &mut Scope<'_>, config: &Flux2VaeConfig) -> Self {
        Self {
            statistics: Statistics::new(root, config),
            encoder: KlEncoder::new(root, &config.encoder),
        }
    }
}

impl Encoder for Flux2Encoder {
    fn encode(
        &self,
        ctx: &Ctx<'_>,
        pixels: &Tensor,
        n_frames: usize,
        noise: Option<&Tensor>,
    ) -> Result<Tensor> {
        let noise = noise.map(|noise| unpatchify(ctx, noise)).transpose()?;
        let latents = self.encoder.encode(ctx, pixels, n_frames, noise.as_ref())?;
        let latents = patchify(ctx, &latents)?;
        let [means, deviations] = self.statistics.read(ctx)?;
        let shifts: Vec<f32> = means.iter().map(|mean| -mean).collect();
        let scales: Vec<f32> = deviations.iter().map(|deviation| 1.0 / deviation).collect();
        let per_channel = |values: &[f32]| ctx.upload_f32(values, &[values.len()]);
        ctx.backend.add(&latents, &per_channel(&shifts)?, &latents)?;
        ctx.backend.mul(&latents, &per_channel(&scales)?, &latents)?;
        Ok(latents)
    }
}
