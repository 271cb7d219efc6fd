//! The decoder of diffusers' `AutoencoderKL`.

use super::Decoder;
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{
    After, Conv2d, Ctx, GroupNorm, Linear, ResnetBlock, ResnetSpec, Result, Scope, SpatialAttention, Upsample,
};
use denoised_tensor::{Activation, Tensor};
use serde_json::Value;

const EPS: f32 = 1e-6;

/// Tensors of the encoder half, which generation does not use.
pub(crate) const UNREAD_NAMES: [&str; 2] = ["encoder.*", "quant_conv.*"];

/// Keys that only concern the encoder, half precision or tiling.
const KEYS_WITHOUT_EFFECT: [&str; 6] = [
    "in_channels",
    "down_block_types",
    "sample_size",
    "force_upcast",
    "latents_mean",
    "latents_std",
];

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct KlConfig {
    pub(crate) n_latent: usize,
    /// Width per resolution, finest first.
    widths: Vec<usize>,
    layers_per_block: usize,
    n_groups: usize,
    scaling_factor: f64,
    shift_factor: f64,
    has_post_quant_conv: bool,
    has_mid_attention: bool,
}

impl KlConfig {
    /// Reads the configuration; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        let widths = config.usizes("block_out_channels")?.unwrap_or_else(|| vec![64]);
        let read = Self {
            n_latent: config.usize_or("latent_channels", 4)?,
            layers_per_block: config.usize_or("layers_per_block", 1)?,
            n_groups: config.usize_or("norm_num_groups", 32)?,
            scaling_factor: config.f64_or("scaling_factor", 0.18215)?,
            shift_factor: config.opt_f64("shift_factor")?.unwrap_or(0.0),
            has_post_quant_conv: config.bool_or("use_post_quant_conv", true)?,
            has_mid_attention: config.bool_or("mid_block_add_attention", true)?,
            widths,
        };
        config.only("act_fn", &["silu".into(), "swish".into()])?;
        config.only("out_channels", &[3.into()])?;
        // Whether there is an encoder-side convolution does not matter here.
        config.bool_or("use_quant_conv", true)?;
        let n_blocks = read.widths.len();
        let only = vec![Value::from("UpDecoderBlock2D"); n_blocks];
        if config.has("up_block_types") || n_blocks != 1 {
            config.only("up_block_types", &[only.into()])?;
            config.strs("up_block_types")?;
        }
        config.within("layers_per_block", read.layers_per_block, 0..=64)?;
        config.within("norm_num_groups", read.n_groups, 1..=1 << 16)?;
        config.within("latent_channels", read.n_latent, 1..=1 << 12)?;
        let divides = |width: &usize| (1..=1 << 16).contains(width) && width.is_multiple_of(read.n_groups);
        if n_blocks == 0 || n_blocks > 8 || !read.widths.iter().all(divides) {
            let expected = format!("1 to 8 multiples of norm_num_groups = {}", read.n_groups);
            return Err(config.wrong("block_out_channels", &expected).into());
        }
        if !(read.scaling_factor.is_finite() && read.scaling_factor != 0.0) {
            return Err(config.wrong("scaling_factor", "a number other than 0").into());
        }
        if !read.shift_factor.is_finite() {
            return Err(config.wrong("shift_factor", "a finite number").into());
        }
        config.deny_unread(&KEYS_WITHOUT_EFFECT)?;
        Ok(read)
    }

    /// For pipelines that leave the shift out.
    pub(crate) fn without_shift(self) -> Self {
        Self {
            shift_factor: 0.0,
            ..self
        }
    }

    /// Pixels per latent, each way.
    pub(crate) fn factor(&self) -> usize {
        1 << (self.widths.len() - 1)
    }
}

/// The network.
#[derive(Debug)]
pub(crate) struct KlDecoder {
    post_quant: Option<Linear>,
    conv_in: Conv2d,
    mid_first: ResnetBlock,
    mid_attention: Option<SpatialAttention>,
    mid_last: ResnetBlock,
    ups: Vec<Up>,
    norm_out: GroupNorm,
    conv_out: Conv2d,
    scale: f32,
    shift: f32,
}

#[derive(Debug)]
struct Up {
    resnets: Vec<ResnetBlock>,
    upsample: Option<Upsample>,
}

impl KlDecoder {
    pub(crate) fn new(root: &mut Scope<'_>, config: &KlConfig) -> Self {
        let c_latent = config.n_latent;
        let groups = (config.n_groups, EPS);
        let resnet = ResnetSpec {
            n_groups: config.n_groups,
            eps: EPS,
            activation: Activation::Silu,
            divisor: 1.0,
        };
        let deepest = config.widths[config.widths.len() - 1];
        // A 1x1 convolution is a product over channels.
        let post_quant = config
            .has_post_quant_conv
            .then(|| Linear::new(&mut root.at("post_quant_conv"), c_latent, c_latent));
        let mut decoder = root.at("decoder");
        let conv_in = Conv2d::same3(&mut decoder.at("conv_in"), c_latent, deepest);
        let mut mid = decoder.at("mid_block");
        let mid_first = ResnetBlock::new(&mut mid.at("resnets.0"), deepest, deepest, resnet);
        let mid_attention = config
            .has_mid_attention
            .then(|| SpatialAttention::new(&mut mid.at("attentions.0"), deepest, groups));
        let mid_last = ResnetBlock::new(&mut mid.at("resnets.1"), deepest, deepest, resnet);
        let mut width = deepest;
        let n_blocks = config.widths.len();
        let mut ups = Vec::with_capacity(n_blocks);
        for (block_idx, &block_width) in config.widths.iter().rev().enumerate() {
            let mut block = decoder.at(format_args!("up_blocks.{block_idx}"));
            let resnets = (0..=config.layers_per_block)
                .map(|layer_idx| {
                    let c_in = if layer_idx == 0 { width } else { block_width };
                    let mut scope = block.at(format_args!("resnets.{layer_idx}"));
                    ResnetBlock::new(&mut scope, c_in, block_width, resnet)
                })
                .collect();
            let is_last = block_idx + 1 == n_blocks;
            let upsample = (!is_last).then(|| Upsample::new(&mut block.at("upsamplers.0"), block_width));
            ups.push(Up { resnets, upsample });
            width = block_width;
        }
        Self {
            post_quant,
            conv_in,
            mid_first,
            mid_attention,
            mid_last,
            ups,
            norm_out: GroupNorm::new(&mut decoder.at("conv_norm_out"), width, config.n_groups, EPS),
            conv_out: Conv2d::same3(&mut decoder.at("conv_out"), width, 3),
            scale: (1.0 / config.scaling_factor) as f32,
            shift: config.shift_factor as f32,
        }
    }
}

impl Decoder for KlDecoder {
    fn decode(&self, ctx: &Ctx<'_>, latents: &Tensor, _: usize) -> Result<Tensor> {
        let scaled = ctx.backend.alloc(latents.dims(), latents.dtype())?;
        ctx.backend.affine(latents, self.scale, self.shift, &scaled)?;
        let mut x = ctx.cast(&scaled)?;
        drop(scaled);
        if let Some(post_quant) = &self.post_quant {
            x = post_quant.forward(ctx, &x, After::default())?;
        }
        x = self.conv_in.forward(ctx, &x, After::default())?;
        x = self.mid_first.forward(ctx, x)?;
        if let Some(attention) = &self.mid_attention {
            x = attention.forward(ctx, &x)?;
        }
        x = self.mid_last.forward(ctx, x)?;
        for up in &self.ups {
            for resnet in &up.resnets {
                x = resnet.forward(ctx, x)?;
            }
            if let Some(upsample) = &up.upsample {
                x = upsample.forward(ctx, &x)?;
            }
        }
        self.norm_out.forward_into(ctx, &x, Activation::Silu, &x)?;
        self.conv_out.forward(ctx, &x, After::default())
    }
}
