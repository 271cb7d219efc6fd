//! diffusers' `AutoencoderKL`: its configuration, and its decoder.

use super::Decoder;
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{
    After, Conv2d, Ctx, GroupNorm, Linear, ResnetBlock, ResnetSpec, Result, Scope, SpatialAttention, Upsample,
};
use denoised_tensor::{Activation, Precision, Tensor};
use serde_json::Value;

const EPS: f32 = 1e-6;

/// Tensors of the encoder half, which pictures from text do not need.
pub(crate) const UNREAD_NAMES: [&str; 2] = ["encoder.*", "quant_conv.*"];

/// Keys that only concern tiling.
const KEYS_WITHOUT_EFFECT: [&str; 1] = ["sample_size"];

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct KlConfig {
    pub(crate) n_latent: usize,
    /// Width per resolution, finest first.
    pub(super) widths: Vec<usize>,
    pub(super) layers_per_block: usize,
    pub(super) n_groups: usize,
    scaling_factor: f64,
    shift_factor: f64,
    /// Means and deviations of the channels.
    statistics: Option<[Vec<f32>; 2]>,
    has_statistics: bool,
    /// Whether f16 is said to be too narrow for it.
    exceeds_f16: bool,
    /// Of its weights, where the pipeline heeds what the file says of f16.
    pub(crate) precision: Precision,
    pub(super) has_quant_conv: bool,
    has_post_quant_conv: bool,
    pub(super) has_mid_attention: bool,
}

/// How latents of the network differ from those that a denoiser is given: `network = denoiser * scale + shift`, per channel.
#[derive(Debug)]
pub(super) struct Normalization {
    pub(super) scales: Vec<f32>,
    pub(super) shifts: Vec<f32>,
}

impl KlConfig {
    /// Reads the configuration; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        let default = Self {
            n_latent: 4,
            widths: vec![64],
            layers_per_block: 1,
            n_groups: 32,
            scaling_factor: 0.18215,
            shift_factor: 0.0,
            statistics: None,
            has_statistics: false,
            exceeds_f16: true,
            precision: Precision::Device,
            has_quant_conv: true,
            has_post_quant_conv: true,
            has_mid_attention: true,
        };
        let default = Self {
            exceeds_f16: config.bool_or("force_upcast", default.exceeds_f16)?,
            scaling_factor: config.f64_or("scaling_factor", default.scaling_factor)?,
            shift_factor: config.opt_f64("shift_factor")?.unwrap_or(default.shift_factor),
            ..default
        };
        let mut read = Self::read_over(config, default)?;
        if !(read.scaling_factor.is_finite() && read.scaling_factor != 0.0) {
            return Err(config.wrong("scaling_factor", "a number other than 0").into());
        }
        if !read.shift_factor.is_finite() {
            return Err(config.wrong("shift_factor", "a finite number").into());
        }
        let means = statistic(config, "latents_mean", read.n_latent, |_| true)?;
        let deviations = statistic(config, "latents_std", read.n_latent, |std| std != 0.0)?;
        read.statistics = means
            .zip(deviations)
            .map(|(means, deviations)| [means, deviations]);
        config.deny_unread(&KEYS_WITHOUT_EFFECT)?;
        Ok(read)
    }

    /// For pipelines that take means and deviations of the channels into account, if the file has them.
    pub(crate) fn with_statistics(self) -> Self {
        Self {
            has_statistics: true,
            ..self
        }
    }

    /// For pipelines that compute in f32 instead of f16 where the file says that f16 is too narrow.
    pub(crate) fn with_upcast(self) -> Self {
        Self {
            precision: match self.exceeds_f16 {
                true => Precision::WideRange,
                false => Precision::Device,
            },
            ..self
        }
    }

    pub(super) fn normalization(&self) -> Normalization {
        let scale = (1.0 / self.scaling_factor) as f32;
        match &self.statistics {
            Some([means, deviations]) if self.has_statistics => Normalization {
                scales: deviations.iter().map(|std| std * scale).collect(),
                shifts: means.clone(),
            },
            _ => Normalization {
                scales: vec![scale; self.n_latent],
                shifts: vec![self.shift_factor as f32; self.n_latent],
            },
        }
    }

    /// Of `AutoencoderKLFlux2`: encoder and decoder may differ in their widths; what the latents are scaled by is in its weights. Keys that
    /// nobody read are left to the caller.
    ///
    /// # Errors
    /// A value that is not carried out here.
    pub(super) fn read_flux2(config: &Config) -> Result<[Self; 2], ModelError> {
        let default = Self {
            n_latent: 32,
            widths: vec![128, 256, 512, 512],
            layers_per_block: 2,
            n_groups: 32,
            scaling_factor: 1.0,
            shift_factor: 0.0,
            statistics: None,
            has_statistics: false,
            exceeds_f16: true,
            precision: Precision::Device,
            has_quant_conv: true,
            has_post_quant_conv: true,
            has_mid_attention: true,
        };
        let encoder = Self::read_over(config, default)?;
        let mut decoder = encoder.clone();
        if let Some(widths) = config.usizes("decoder_block_out_channels")? {
            decoder.widths = widths;
            decoder.check_widths(config, "decoder_block_out_channels")?;
            if decoder.widths.len() != encoder.widths.len() {
                let expected = "as many widths as block_out_channels";
                return Err(config.wrong("decoder_block_out_channels", expected).into());
            }
        }
        Ok([encoder, decoder])
    }

    /// Reads what all classes of this architecture have in common; missing keys have the values of `default`.
    fn read_over(config: &Config, default: Self) -> Result<Self, ModelError> {
        let n_default_blocks = default.widths.len();
        let read = Self {
            n_latent: config.usize_or("latent_channels", default.n_latent)?,
            layers_per_block: config.usize_or("layers_per_block", default.layers_per_block)?,
            n_groups: config.usize_or("norm_num_groups", default.n_groups)?,
            has_quant_conv: config.bool_or("use_quant_conv", default.has_quant_conv)?,
            has_post_quant_conv: config.bool_or("use_post_quant_conv", default.has_post_quant_conv)?,
            has_mid_attention: config.bool_or("mid_block_add_attention", default.has_mid_attention)?,
            widths: config.usizes("block_out_channels")?.unwrap_or(default.widths),
            ..default
        };
        config.only("act_fn", &["silu".into(), "swish".into()])?;
        config.only("out_channels", &[3.into()])?;
        config.only("in_channels", &[3.into()])?;
        let n_blocks = read.widths.len();
        for (key, class) in [
            ("up_block_types", "UpDecoderBlock2D"),
            ("down_block_types", "DownEncoderBlock2D"),
        ] {
            let only = vec![Value::from(class); n_blocks];
            if config.has(key) || n_blocks != n_default_blocks {
                config.only(key, &[only.into()])?;
                config.strs(key)?;
            }
        }
        config.within("layers_per_block", read.layers_per_block, 0..=64)?;
        config.within("norm_num_groups", read.n_groups, 1..=1 << 16)?;
        config.within("latent_channels", read.n_latent, 1..=1 << 12)?;
        read.check_widths(config, "block_out_channels")?;
        Ok(read)
    }

    fn check_widths(&self, config: &Config, key: &str) -> Result<(), ModelError> {
        let divides = |width: &usize| (1..=1 << 16).contains(width) && width.is_multiple_of(self.n_groups);
        if (1..=8).contains(&self.widths.len()) && self.widths.iter().all(divides) {
            return Ok(());
        }
        let expected = format!("1 to 8 multiples of norm_num_groups = {}", self.n_groups);
        Err(config.wrong(key, &expected).into())
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

impl Normalization {
    /// f32 latents of a denoiser `[.., c]` to those of the network.
    fn undo(&self, ctx: &Ctx<'_>, latents: &Tensor, out: &Tensor) -> denoised_nn::Result<()> {
        let all_equal = |values: &[f32]| values.iter().all(|value| *value == values[0]);
        if all_equal(&self.scales) && all_equal(&self.shifts) {
            return ctx.backend.affine(latents, self.scales[0], self.shifts[0], out);
        }
        let dims = [1, 1, 1, self.scales.len()];
        ctx.backend
            .mul(latents, &ctx.upload_f32(&self.scales, &dims)?, out)?;
        ctx.backend.add(out, &ctx.upload_f32(&self.shifts, &dims)?, out)
    }
}

/// A finite number per channel of the latents, or null.
fn statistic(
    config: &Config,
    key: &str,
    n_latent: usize,
    accepts: impl Fn(f32) -> bool,
) -> Result<Option<Vec<f32>>, ModelError> {
    let Some(value) = config.value(key).filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let number = |value: &Value| value.as_f64().map(|number| number as f32);
    let accepted = |number: &f32| number.is_finite() && accepts(*number);
    let numbers: Option<Vec<f32>> = value.as_array().and_then(|all| all.iter().map(number).collect());
    match numbers {
        Some(numbers) if numbers.len() == n_latent && numbers.iter().all(accepted) => Ok(Some(numbers)),
        _ => {
            let expected = format!("a list of {n_latent} numbers, deviations other than 0, or null");
            Err(config.wrong(key, &expected).into())
        }
    }
}

impl KlConfig {
    pub(super) fn groups(&self) -> (usize, f32) {
        (self.n_groups, EPS)
    }

    pub(super) fn resnet(&self) -> ResnetSpec {
        ResnetSpec {
            n_groups: self.n_groups,
            eps: EPS,
            activation: Activation::Silu,
            divisor: 1.0,
        }
    }
}

/// What is at the coarsest resolution of either half.
#[derive(Debug)]
pub(super) struct Mid {
    first: ResnetBlock,
    attention: Option<SpatialAttention>,
    last: ResnetBlock,
}

impl Mid {
    pub(super) fn new(mid: &mut Scope<'_>, config: &KlConfig) -> Self {
        let width = config.widths[config.widths.len() - 1];
        let resnet = config.resnet();
        Self {
            first: ResnetBlock::new(&mut mid.at("resnets.0"), width, width, resnet),
            attention: config
                .has_mid_attention
                .then(|| SpatialAttention::new(&mut mid.at("attentions.0"), width, config.groups())),
            last: ResnetBlock::new(&mut mid.at("resnets.1"), width, width, resnet),
        }
    }

    pub(super) fn forward(&self, ctx: &Ctx<'_>, x: Tensor) -> denoised_nn::Result<Tensor> {
        let mut x = self.first.forward(ctx, x)?;
        if let Some(attention) = &self.attention {
            x = attention.forward(ctx, &x)?;
        }
        self.last.forward(ctx, x)
    }
}

/// The network.
#[derive(Debug)]
pub(crate) struct KlDecoder {
    post_quant: Option<Linear>,
    conv_in: Conv2d,
    mid: Mid,
    ups: Vec<Up>,
    norm_out: GroupNorm,
    conv_out: Conv2d,
    normalization: Normalization,
}

#[derive(Debug)]
struct Up {
    resnets: Vec<ResnetBlock>,
    upsample: Option<Upsample>,
}

impl KlDecoder {
    pub(crate) fn new(root: &mut Scope<'_>, config: &KlConfig) -> Self {
        let c_latent = config.n_latent;
        let resnet = config.resnet();
        let deepest = config.widths[config.widths.len() - 1];
        // A 1x1 convolution is a product over channels.
        let post_quant = config
            .has_post_quant_conv
            .then(|| Linear::new(&mut root.at("post_quant_conv"), c_latent, c_latent));
        let mut decoder = root.at("decoder");
        let conv_in = Conv2d::same3(&mut decoder.at("conv_in"), c_latent, deepest);
        let mid = Mid::new(&mut decoder.at("mid_block"), config);
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
            mid,
            ups,
            norm_out: GroupNorm::new(&mut decoder.at("conv_norm_out"), width, config.n_groups, EPS),
            conv_out: Conv2d::same3(&mut decoder.at("conv_out"), width, 3),
            normalization: config.normalization(),
        }
    }
}

impl Decoder for KlDecoder {
    fn decode(&self, ctx: &Ctx<'_>, latents: &Tensor, _: usize) -> Result<Tensor> {
        let scaled = ctx.backend.alloc(latents.dims(), latents.dtype())?;
        self.normalization.undo(ctx, latents, &scaled)?;
        let mut x = ctx.cast(&scaled)?;
        drop(scaled);
        if let Some(post_quant) = &self.post_quant {
            x = post_quant.forward(ctx, &x, After::default())?;
        }
        x = self.conv_in.forward(ctx, &x, After::default())?;
        x = self.mid.forward(ctx, x)?;
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
