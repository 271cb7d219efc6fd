//! diffusers' `UNet2DConditionModel`: a picture is halved block by block and doubled again, beside every doubling the states of the way
//! down (Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models").
//!
//! R1. What the way down leaves for the way up is written where it will be read: behind the channels that arrive from below, in one
//!     tensor that is allocated on the way down. So nothing is concatenated.
//! R2. A stage is layers (residual block and, where the configuration says so, transformer) and a change of size; the block types differ
//!     in nothing else.

mod config;

pub(crate) use config::{AdditionConfig, UnetConfig};

use self::config::MidConfig;
use super::{Denoiser, DenoiserInput, repeat_bias};

use crate::conditioning::Conditioning;
use denoised_nn::{
    After, Conv2d, Ctx, Downsample, GroupNorm, Linear, ResnetBlock, ResnetSpec, Result, Scope, Transformer2d,
    Transformer2dSpec, TwoLayer, Upsample,
};
use denoised_tensor::{Activation, DType, Tensor, TensorError, TimestepSpec};

/// The network.
#[derive(Debug)]
pub(crate) struct Unet {
    conv_in: Conv2d,
    time: TwoLayer,
    time_spec: TimestepSpec,
    n_time_sinusoids: usize,
    /// The guidance scale as a summand of the sinusoids.
    guidance: Option<(Linear, usize)>,
    time_activations: [Activation; 2],
    addition: Option<Addition>,
    /// The time embedding as every residual block takes it, side by side.
    shifts: Linear,
    downs: Vec<Stage>,
    mid: Vec<Layer>,
    ups: Vec<Stage>,
    /// Per state of the way down, in order: its channels and those it is joined with on the way up.
    joins: Vec<(usize, usize)>,
    norm_out: GroupNorm,
    conv_out: Conv2d,
    activation: Activation,
    c_out: usize,
    is_centered: bool,
}

/// Pooled text and numbers beside it as a summand of the time embedding.
#[derive(Debug)]
struct Addition {
    sinusoids: TimestepSpec,
    n_sinusoids: usize,
    n_in: usize,
    layers: TwoLayer,
}

impl Addition {
    fn new(scope: &mut Scope<'_>, config: &UnetConfig, addition: AdditionConfig) -> Self {
        let AdditionConfig { n_sinusoids, n_in } = addition;
        Self {
            sinusoids: config.time_spec,
            n_sinusoids,
            n_in,
            layers: TwoLayer::new(scope, n_in, config.n_time, Activation::Silu),
        }
    }

    /// `[batch, n_time]` of pooled text `[batch, c]` and of numbers, of which as many count as there is place for.
    fn forward(&self, ctx: &Ctx<'_>, pooled: &Tensor, numbers: &Tensor) -> Result<Tensor> {
        let (batch, c) = (numbers.dim(0), pooled.dim(1));
        let n_numbers = (self.n_in - c) / self.n_sinusoids;
        let sinusoids = ctx.alloc(&[batch * n_numbers, self.n_sinusoids])?;
        let flat = ctx.backend.alloc(&[batch, n_numbers], DType::F32)?;
        ctx.backend.copy(&numbers.narrow(1, 0, n_numbers)?, &flat)?;
        let flat = flat.reshape(&[batch * n_numbers])?;
        ctx.backend
            .timestep_embedding(&flat, &self.sinusoids, &sinusoids)?;
        let n_behind = n_numbers * self.n_sinusoids;
        let both = ctx.alloc(&[batch, self.n_in])?;
        ctx.backend.copy(pooled, &both.narrow(1, 0, c)?)?;
        ctx.backend.copy(
            &sinusoids.reshape(&[batch, n_behind])?,
            &both.narrow(1, c, n_behind)?,
        )?;
        self.layers.forward(ctx, &both, After::default())
    }
}

/// The layers of one resolution and the change to the next.
#[derive(Debug)]
struct Stage {
    layers: Vec<Layer>,
    resize: Option<Resize>,
}

#[derive(Debug)]
enum Resize {
    Down(Downsample),
    Up(Upsample),
}

/// A residual block and a transformer.
#[derive(Debug)]
struct Layer {
    resnet: ResnetBlock,
    /// Its columns in [`Unet::shifts`].
    shift_start: usize,
    n_channels: usize,
    transformer: Option<Transformer2d>,
}

/// Declares layers and counts what they share.
struct Builder<'a> {
    config: &'a UnetConfig,
    /// Places of the time projections and their widths.
    time_names: Vec<String>,
    n_shifts: usize,
}

impl Builder<'_> {
    fn layer(
        &mut self,
        block: &mut Scope<'_>,
        block_name: &str,
        layer_idx: usize,
        (c_in, c_out): (usize, usize),
        spec: ResnetSpec,
        transformer: Option<Transformer2dSpec>,
    ) -> Layer {
        let resnet = ResnetBlock::new(
            &mut block.at(format_args!("resnets.{layer_idx}")),
            c_in,
            c_out,
            spec,
        );
        let transformer = transformer
            .map(|spec| Transformer2d::new(&mut block.at(format_args!("attentions.{layer_idx}")), &spec));
        let shift_start = self.n_shifts;
        self.n_shifts += c_out;
        self.time_names
            .push(format!("{block_name}.resnets.{layer_idx}.time_emb_proj"));
        Layer {
            resnet,
            shift_start,
            n_channels: c_out,
            transformer,
        }
    }

    fn mid(&mut self, root: &mut Scope<'_>) -> Vec<Layer> {
        let config = self.config;
        let stage = &config.stages[config.stages.len() - 1];
        let widths = (stage.n_channels, stage.n_channels);
        let spec = ResnetSpec {
            divisor: config.mid_divisor,
            ..config.resnet
        };
        let name = "mid_block";
        let mut block = root.at(name);
        match config.mid {
            MidConfig::Absent => Vec::new(),
            MidConfig::Resnet => vec![self.layer(&mut block, name, 0, widths, spec, None)],
            MidConfig::Transformer(n_layers) => {
                let transformer = Transformer2dSpec {
                    is_only_cross: false,
                    ..config.transformer(stage, n_layers)
                };
                vec![
                    self.layer(&mut block, name, 0, widths, spec, Some(transformer)),
                    self.layer(&mut block, name, 1, widths, spec, None),
                ]
            }
        }
    }
}

impl Unet {
    pub(crate) fn new(root: &mut Scope<'_>, config: &UnetConfig) -> Self {
        let n_stages = config.stages.len();
        let finest = config.n_channels(0);
        let conv_in = Conv2d::same(&mut root.at("conv_in"), config.c_in, finest, config.conv_in_side);
        let mut scope = root.at("time_embedding");
        let guidance = config.n_guidance.map(|n| {
            let projection = Linear::without_bias(&mut scope.at("cond_proj"), n, finest);
            (projection, n)
        });
        let time = TwoLayer::new(&mut scope, finest, config.n_time, config.resnet.activation);
        let addition = config
            .addition
            .map(|addition| Addition::new(&mut root.at("add_embedding"), config, addition));
        let mut builder = Builder {
            config,
            time_names: Vec::new(),
            n_shifts: 0,
        };
        let mut width = finest;
        // Channels of each state that the way up will read.
        let mut skips = vec![finest];
        let mut downs = Vec::with_capacity(n_stages);
        for (stage_idx, stage) in config.stages.iter().enumerate() {
            let name = format!("down_blocks.{stage_idx}");
            let mut block = root.at(&name);
            let mut layers = Vec::with_capacity(stage.n_layers);
            for layer_idx in 0..stage.n_layers {
                let depth = stage.down.as_ref().map(|depths| depths[layer_idx]);
                let transformer = depth.map(|depth| config.transformer(stage, depth));
                let widths = (width, stage.n_channels);
                layers.push(builder.layer(&mut block, &name, layer_idx, widths, config.resnet, transformer));
                width = stage.n_channels;
                skips.push(width);
            }
            let resize = (stage_idx + 1 < n_stages).then(|| {
                skips.push(width);
                let mut scope = block.at("downsamplers.0");
                Resize::Down(Downsample::new(&mut scope, width, config.downsample_padding))
            });
            downs.push(Stage { layers, resize });
        }
        let mid = builder.mid(root);
        let mut ups = Vec::with_capacity(n_stages);
        let mut joins = Vec::with_capacity(skips.len());
        for (up_idx, stage) in config.stages.iter().rev().enumerate() {
            let name = format!("up_blocks.{up_idx}");
            let mut block = root.at(&name);
            let mut layers = Vec::with_capacity(stage.n_layers + 1);
            for layer_idx in 0..=stage.n_layers {
                let depth = stage.up.as_ref().map(|depths| depths[layer_idx]);
                let transformer = depth.map(|depth| config.transformer(stage, depth));
                // There are as many states as layers on the way up, whatever the configuration.
                let skip = skips.pop().unwrap_or_default();
                joins.push((skip, width));
                let widths = (width + skip, stage.n_channels);
                layers.push(builder.layer(&mut block, &name, layer_idx, widths, config.resnet, transformer));
                width = stage.n_channels;
            }
            let resize = (up_idx + 1 < n_stages)
                .then(|| Resize::Up(Upsample::new(&mut block.at("upsamplers.0"), width)));
            ups.push(Stage { layers, resize });
        }
        joins.reverse();
        let time_names: Vec<&str> = builder.time_names.iter().map(String::as_str).collect();
        let shifts = Linear::fused(root, &time_names, config.n_time, builder.n_shifts, true);
        let (n_groups, eps) = (config.resnet.n_groups, config.resnet.eps);
        Self {
            conv_in,
            time,
            time_spec: config.time_spec,
            n_time_sinusoids: finest,
            guidance,
            time_activations: config.time_activations,
            addition,
            shifts,
            downs,
            mid,
            ups,
            joins,
            norm_out: GroupNorm::new(&mut root.at("conv_norm_out"), finest, n_groups, eps),
            conv_out: Conv2d::same(
                &mut root.at("conv_out"),
                finest,
                config.c_out,
                config.conv_out_side,
            ),
            activation: config.resnet.activation,
            c_out: config.c_out,
            is_centered: config.is_centered,
        }
    }

    /// Place for the next state of the way down, of the shape `dims`.
    fn join(&self, ctx: &Ctx<'_>, joined: &mut Vec<Join>, dims: [usize; 4]) -> Result<Tensor> {
        let &(n_skip, n_below) = self.joins.get(joined.len()).ok_or_else(unbalanced)?;
        let whole = ctx.alloc(&[dims[0], dims[1], dims[2], n_below + n_skip])?;
        let skip = whole.narrow(3, n_below, n_skip)?;
        let below = whole.narrow(3, 0, n_below)?;
        joined.push(Join { whole, below });
        Ok(skip)
    }

    /// The time embedding for all residual blocks, `[batch, n_shifts]`.
    fn shifts(&self, ctx: &Ctx<'_>, timesteps: &Tensor, conditioning: &Conditioning) -> Result<Tensor> {
        let [last, whole] = self.time_activations;
        let numbers = || conditioning.numbers.as_ref().ok_or_else(untold);
        let addition = match &self.addition {
            Some(addition) => {
                let pooled = conditioning.pooled.as_ref().ok_or_else(untold)?;
                Some(addition.forward(ctx, pooled, numbers()?)?)
            }
            None => None,
        };
        let after = After {
            residual: addition.as_ref(),
            ..After::activation(last)
        };
        let sinusoids = ctx.alloc(&[timesteps.dim(0), self.n_time_sinusoids])?;
        ctx.backend
            .timestep_embedding(timesteps, &self.time_spec, &sinusoids)?;
        if let Some((projection, n)) = &self.guidance {
            let of_guidance = guidance_sinusoids(ctx, numbers()?, *n)?;
            let after = After::residual(&sinusoids);
            projection.forward_into(ctx, &of_guidance, after, &sinusoids)?;
        }
        let time = self.time.forward(ctx, &sinusoids, after)?;
        for activation in [whole, self.activation] {
            if activation != Activation::None {
                ctx.backend.activation(&time, activation, &time)?;
            }
        }
        self.shifts.forward(ctx, &time, After::default())
    }
}

/// One tensor for a layer of the way up.
struct Join {
    whole: Tensor,
    /// Its first channels, which come from below.
    below: Tensor,
}

/// What every layer reads.
struct Inputs<'a> {
    shifts: Tensor,
    context: &'a Tensor,
    bias: Option<Tensor>,
}

impl Layer {
    /// `x` `[batch, h, w, c]` to `out`.
    fn forward_into(&self, ctx: &Ctx<'_>, x: &Tensor, inputs: &Inputs<'_>, out: &Tensor) -> Result<()> {
        let n = self.n_channels;
        let shift = inputs.shifts.narrow(1, self.shift_start, n)?;
        let shift = shift.reshape(&[x.dim(0), 1, 1, n])?;
        let Some(transformer) = &self.transformer else {
            return self.resnet.forward_into(ctx, x, &shift, out);
        };
        let h = ctx.alloc(out.dims())?;
        self.resnet.forward_into(ctx, x, &shift, &h)?;
        transformer.forward_into(ctx, &h, inputs.context, inputs.bias.as_ref(), out)
    }

    fn out_dims(&self, x: &Tensor) -> [usize; 4] {
        [x.dim(0), x.dim(1), x.dim(2), self.n_channels]
    }
}

impl Denoiser for Unet {
    fn forward(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<Tensor> {
        let DenoiserInput {
            latents,
            timesteps,
            conditioning,
            ..
        } = *input;
        let context = &conditioning.tokens;
        let inputs = Inputs {
            shifts: self.shifts(ctx, timesteps, conditioning)?,
            context,
            bias: repeat_bias(ctx, context.dim(1), conditioning.n_last_repeats)?,
        };
        let centered;
        let mut latents = latents;
        if self.is_centered {
            centered = ctx.alloc(latents.dims())?;
            ctx.backend.affine(latents, 2.0, -1.0, &centered)?;
            latents = &centered;
        }

        let mut joined = Vec::with_capacity(self.joins.len());
        let mut x = self.join(ctx, &mut joined, self.conv_in.out_dims(latents))?;
        self.conv_in.forward_into(ctx, latents, After::default(), &x)?;
        for stage in &self.downs {
            for layer in &stage.layers {
                let out = self.join(ctx, &mut joined, layer.out_dims(&x))?;
                layer.forward_into(ctx, &x, &inputs, &out)?;
                x = out;
            }
            if let Some(Resize::Down(downsample)) = &stage.resize {
                let out = self.join(ctx, &mut joined, downsample.out_dims(&x))?;
                downsample.forward_into(ctx, &x, &out)?;
                x = out;
            }
        }

        let mut join = joined.pop().ok_or_else(unbalanced)?;
        match self.mid.split_last() {
            None => ctx.backend.copy(&x, &join.below)?,
            Some((last, layers)) => {
                for layer in layers {
                    let out = ctx.alloc(&layer.out_dims(&x))?;
                    layer.forward_into(ctx, &x, &inputs, &out)?;
                    x = out;
                }
                last.forward_into(ctx, &x, &inputs, &join.below)?;
            }
        }

        for stage in &self.ups {
            for (layer_idx, layer) in stage.layers.iter().enumerate() {
                let is_last = layer_idx + 1 == stage.layers.len();
                let next = joined.pop();
                match next {
                    Some(next) if !is_last => {
                        layer.forward_into(ctx, &join.whole, &inputs, &next.below)?;
                        join = next;
                    }
                    next => {
                        x = ctx.alloc(&layer.out_dims(&join.whole))?;
                        layer.forward_into(ctx, &join.whole, &inputs, &x)?;
                        if let (Some(next), Some(Resize::Up(upsample))) = (next, &stage.resize) {
                            upsample.forward_into(ctx, &x, &next.below)?;
                            join = next;
                        }
                    }
                }
            }
        }
        self.norm_out.forward_into(ctx, &x, self.activation, &x)?;
        let out = ctx.alloc(&[x.dim(0), x.dim(1), x.dim(2), self.c_out])?;
        self.conv_out.forward_into(ctx, &x, After::default(), &out)?;
        Ok(out)
    }
}

/// Sinusoids `[batch, n]` of the last of the numbers `[batch, _]`, the guidance scale less one.
fn guidance_sinusoids(ctx: &Ctx<'_>, numbers: &Tensor, n: usize) -> Result<Tensor> {
    let spec = TimestepSpec {
        flip_sin_to_cos: false,
        downscale_freq_shift: 1.0,
        scale: 1000.0,
        max_period: 10_000.0,
    };
    let batch = numbers.dim(0);
    let scales = ctx.backend.alloc(&[batch, 1], DType::F32)?;
    ctx.backend
        .copy(&numbers.narrow(1, numbers.dim(1) - 1, 1)?, &scales)?;
    let sinusoids = ctx.alloc(&[batch, n])?;
    ctx.backend
        .timestep_embedding(&scales.reshape(&[batch])?, &spec, &sinusoids)?;
    Ok(sinusoids)
}

/// A family that does not say what its denoiser takes: a mistake of its file, if it ever shows.
fn untold() -> TensorError {
    TensorError::Operand {
        op: "unet",
        detail: "the family gives no pooled text or no numbers".to_owned(),
    }
}

/// As many states as layers that read them: a mistake of this file, if it ever shows.
fn unbalanced() -> TensorError {
    TensorError::Operand {
        op: "unet",
        detail: "the way up has not as many layers as the way down left states".to_owned(),
    }
}
