//! The encoder of diffusers' `AutoencoderKL`.

use super::{
    Encoder,
    kl::{KlConfig, Mid, Normalization},
    latents_of,
};
use denoised_nn::{After, Conv2d, Ctx, Downsample, GroupNorm, Linear, ResnetBlock, Result, Scope};
use denoised_tensor::{Activation, Tensor};

/// The network.
#[derive(Debug)]
pub(crate) struct KlEncoder {
    conv_in: Conv2d,
    downs: Vec<Down>,
    mid: Mid,
    norm_out: GroupNorm,
    conv_out: Conv2d,
    quant: Option<Linear>,
    normalization: Normalization,
}

#[derive(Debug)]
struct Down {
    resnets: Vec<ResnetBlock>,
    downsample: Option<Downsample>,
}

impl KlEncoder {
    /// Whether the files have this half.
    pub(crate) fn is_stored(root: &Scope<'_>) -> bool {
        root.is_stored("encoder.conv_in.weight")
    }

    pub(crate) fn new(root: &mut Scope<'_>, config: &KlConfig) -> Self {
        let n_moments = 2 * config.n_latent;
        let resnet = config.resnet();
        let quant = config
            .has_quant_conv
            .then(|| Linear::new(&mut root.at("quant_conv"), n_moments, n_moments));
        let mut encoder = root.at("encoder");
        let mut width = config.widths[0];
        let conv_in = Conv2d::same3(&mut encoder.at("conv_in"), 3, width);
        let n_blocks = config.widths.len();
        let mut downs = Vec::with_capacity(n_blocks);
        for (block_idx, &block_width) in config.widths.iter().enumerate() {
            let mut block = encoder.at(format_args!("down_blocks.{block_idx}"));
            let mut resnets = Vec::with_capacity(config.layers_per_block);
            for layer_idx in 0..config.layers_per_block {
                let mut scope = block.at(format_args!("resnets.{layer_idx}"));
                resnets.push(ResnetBlock::new(&mut scope, width, block_width, resnet));
                width = block_width;
            }
            let is_last = block_idx + 1 == n_blocks;
            let downsample = (!is_last).then(|| Downsample::new(&mut block.at("downsamplers.0"), width, 0));
            downs.push(Down { resnets, downsample });
        }
        let (n_groups, eps) = config.groups();
        Self {
            conv_in,
            downs,
            mid: Mid::new(&mut encoder.at("mid_block"), config),
            norm_out: GroupNorm::new(&mut encoder.at("conv_norm_out"), width, n_groups, eps),
            conv_out: Conv2d::same3(&mut encoder.at("conv_out"), width, n_moments),
            quant,
            normalization: config.normalization(),
        }
    }

    /// Mean and log variance of every latent, `[batch, h, w, 2 c]`.
    fn moments(&self, ctx: &Ctx<'_>, pixels: &Tensor) -> Result<Tensor> {
        let mut x = self.conv_in.forward(ctx, &ctx.cast(pixels)?, After::default())?;
        for down in &self.downs {
            for resnet in &down.resnets {
                x = resnet.forward(ctx, x)?;
            }
            if let Some(downsample) = &down.downsample {
                let out = ctx.alloc(&downsample.out_dims(&x))?;
                downsample.forward_into(ctx, &x, &out)?;
                x = out;
            }
        }
        x = self.mid.forward(ctx, x)?;
        self.norm_out.forward_into(ctx, &x, Activation::Silu, &x)?;
        x = self.conv_out.forward(ctx, &x, After::default())?;
        match &self.quant {
            Some(quant) => quant.forward(ctx, &x, After::default()),
            None => Ok(x),
        }
    }
}

impl Encoder for KlEncoder {
    fn encode(&self, ctx: &Ctx<'_>, pixels: &Tensor, _: usize, noise: Option<&Tensor>) -> Result<Tensor> {
        let moments = self.moments(ctx, pixels)?;
        let Normalization { scales, shifts } = &self.normalization;
        latents_of(ctx, &moments, noise, (scales, shifts))
    }
}
