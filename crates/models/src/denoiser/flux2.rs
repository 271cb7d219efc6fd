//! diffusers' `Flux2Transformer2DModel`: FLUX.2 without an embedded guidance scale, which is [klein].
//!
//! One modulation serves all double blocks and one all single blocks. Latents come in patches already. Positions have four axes: which
//! picture (0 what is made, 10, 20, .. those that are edited), row, column, and the number of a text's token.
//!
//! [klein]: https://bfl.ai/models/flux-2-klein

use super::{
    Denoiser, DenoiserInput,
    flux::expect_axes,
    flux_blocks::{BlockSpec, DoubleBlock, Kind, Modulated, SingleBlock, Tokens},
    rope::{Angles, Rope, RopeAxes},
};
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{After, Ctx, Linear, Result, Scope, modulated_norm, split};
use denoised_tensor::{Activation, Tensor, TimestepSpec};

/// What two pictures to edit are apart on the first axis.
const PICTURE_STEP: f32 = 10.0;

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct Flux2Config {
    pub(crate) c_in: usize,
    n_layers: usize,
    n_single_layers: usize,
    pub(crate) n_joint: usize,
    n_sinusoids: usize,
    axes: Vec<usize>,
    theta: f64,
    block: BlockSpec,
}

impl Flux2Config {
    /// Reads the configuration; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        let head_dim = config.usize_or("attention_head_dim", 128)?;
        let n_heads = config.usize_or("num_attention_heads", 48)?;
        config.within("attention_head_dim", head_dim, 1..=1 << 10)?;
        config.within("num_attention_heads", n_heads, 1..=1 << 10)?;
        let mlp_ratio = config.f64_or("mlp_ratio", 3.0)?;
        let n_inner = (n_heads * head_dim) as f64 * mlp_ratio;
        if !(1.0..=f64::from(1 << 20)).contains(&n_inner) {
            let expected = format!("1 to 2^20 channels over {}", n_heads * head_dim);
            return Err(config.wrong("mlp_ratio", &expected).into());
        }
        let eps = config.f64_or("eps", 1e-6)?;
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(config.wrong("eps", "a finite number of at least 0").into());
        }
        let c_in = config.usize_or("in_channels", 128)?;
        let read = Self {
            c_in,
            n_layers: config.usize_or("num_layers", 8)?,
            n_single_layers: config.usize_or("num_single_layers", 48)?,
            n_joint: config.usize_or("joint_attention_dim", 15360)?,
            n_sinusoids: config.usize_or("timestep_guidance_channels", 256)?,
            axes: config.usizes("axes_dims_rope")?.unwrap_or_else(|| vec![32; 4]),
            theta: config.f64_or("rope_theta", 2000.0)?,
            block: BlockSpec {
                n_heads,
                head_dim,
                // As Python's `int`, towards zero.
                n_inner: n_inner as usize,
                kind: Kind::SwiGlu,
                eps: eps as f32,
            },
        };
        config.only("patch_size", &[1.into()])?;
        if config.bool_or("guidance_embeds", true)? {
            let expected = "false: a guidance scale as an input is not supported";
            return Err(config.wrong("guidance_embeds", expected).into());
        }
        config.within("in_channels", read.c_in, 4..=1 << 12)?;
        config.within("num_layers", read.n_layers, 0..=512)?;
        config.within("num_single_layers", read.n_single_layers, 0..=512)?;
        config.within("joint_attention_dim", read.n_joint, 1..=1 << 16)?;
        config.within("timestep_guidance_channels", read.n_sinusoids, 2..=1 << 16)?;
        if !read.n_sinusoids.is_multiple_of(2) {
            return Err(config
                .wrong("timestep_guidance_channels", "an even number")
                .into());
        }
        if !(read.theta.is_finite() && read.theta > 0.0) {
            return Err(config.wrong("rope_theta", "a positive number").into());
        }
        if config.opt_usize("out_channels")?.unwrap_or(c_in) != c_in {
            return Err(config
                .wrong("out_channels", "equal to in_channels or null")
                .into());
        }
        expect_axes(config, &read.axes, 4, head_dim)?;
        config.deny_unread(&[])?;
        Ok(read)
    }
}

/// The network.
#[derive(Debug)]
pub(crate) struct Flux2 {
    n_sinusoids: usize,
    time: [Linear; 2],
    text_modulation: Linear,
    picture_modulation: Linear,
    single_modulation: Linear,
    context: Linear,
    latents: Linear,
    blocks: Vec<DoubleBlock>,
    singles: Vec<SingleBlock>,
    norm_out: Linear,
    proj_out: Linear,
    axes: RopeAxes,
    spec: BlockSpec,
}

impl Flux2 {
    pub(crate) fn new(root: &mut Scope<'_>, config: &Flux2Config) -> Self {
        let spec = config.block;
        let n = spec.n_channels();
        let blocks = (0..config.n_layers)
            .map(|layer_idx| {
                let mut scope = root.at(format_args!("transformer_blocks.{layer_idx}"));
                DoubleBlock::new(&mut scope, spec)
            })
            .collect();
        let singles = (0..config.n_single_layers)
            .map(|layer_idx| {
                let mut scope = root.at(format_args!("single_transformer_blocks.{layer_idx}"));
                SingleBlock::new(&mut scope, spec)
            })
            .collect();
        let mut plain =
            |name: &str, n_in: usize, n_out: usize| Linear::without_bias(&mut root.at(name), n_in, n_out);
        let time = "time_guidance_embed.timestep_embedder";
        Self {
            n_sinusoids: config.n_sinusoids,
            time: [
                plain(&format!("{time}.linear_1"), config.n_sinusoids, n),
                plain(&format!("{time}.linear_2"), n, n),
            ],
            text_modulation: plain("double_stream_modulation_txt.linear", n, 6 * n),
            picture_modulation: plain("double_stream_modulation_img.linear", n, 6 * n),
            single_modulation: plain("single_stream_modulation.linear", n, 3 * n),
            context: plain("context_embedder", config.n_joint, n),
            latents: plain("x_embedder", config.c_in, n),
            blocks,
            singles,
            norm_out: plain("norm_out.linear", n, 2 * n),
            proj_out: plain("proj_out", n, config.c_in),
            axes: RopeAxes::new(config.theta, &config.axes, Angles::F64),
            spec,
        }
    }

    /// What modulates all blocks, `[batch, n]`.
    fn vector(&self, ctx: &Ctx<'_>, timesteps: &Tensor) -> Result<Tensor> {
        let sinusoids = ctx.alloc(&[timesteps.dim(0), self.n_sinusoids])?;
        ctx.backend
            .timestep_embedding(timesteps, &TimestepSpec::COSINES_FIRST, &sinusoids)?;
        let silu = After::activation(Activation::Silu);
        let inner = self.time[0].forward(ctx, &sinusoids, silu)?;
        self.time[1].forward(ctx, &inner, silu)
    }

    /// Text, then the picture that is made, then pictures to edit.
    fn tokens(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<(Tokens, Rope)> {
        let n_text = input.conditioning.tokens.dim(1);
        let mut positions = self.axes.positions();
        positions.push(n_text, |idx| [0.0, 0.0, 0.0, idx as f32]);
        let pictures: Vec<&Tensor> = std::iter::once(input.latents).chain(input.references).collect();
        for (idx, picture) in pictures.iter().enumerate() {
            let which = PICTURE_STEP * idx as f32;
            positions.push_grid((picture.dim(1), picture.dim(2)), |y, x| [which, y, x, 0.0]);
        }
        let n = self.spec.n_channels();
        let all = ctx.alloc(&[input.latents.dim(0), positions.len(), n])?;
        let text = all.narrow(1, 0, n_text)?;
        let given = &input.conditioning.tokens;
        self.context.forward_into(ctx, given, After::default(), &text)?;
        let mut first = n_text;
        for picture in pictures {
            let n_tokens = picture.dim(1) * picture.dim(2);
            let flat = picture.reshape(&[picture.dim(0), n_tokens, picture.dim(3)])?;
            let out = all.narrow(1, first, n_tokens)?;
            self.latents.forward_into(ctx, &flat, After::default(), &out)?;
            first += n_tokens;
        }
        let rope = self.axes.tables(ctx, &positions)?;
        Ok((Tokens::new(all, n_text)?, rope))
    }
}

impl Denoiser for Flux2 {
    fn forward(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<Tensor> {
        let vector = self.vector(ctx, input.timesteps)?;
        let (tokens, rope) = self.tokens(ctx, input)?;
        let modulation = |linear: &Linear| linear.forward(ctx, &vector, After::default());
        let text = Modulated::cut::<2>(&modulation(&self.text_modulation)?)?;
        let picture = Modulated::cut::<2>(&modulation(&self.picture_modulation)?)?;
        for block in &self.blocks {
            block.forward(ctx, &tokens, [&text, &picture], &rope)?;
        }
        let [modulated] = Modulated::cut(&modulation(&self.single_modulation)?)?;
        for block in &self.singles {
            block.forward(ctx, &tokens.all, &modulated, &rope)?;
        }
        let latents = input.latents;
        let made = tokens.picture.narrow(1, 0, latents.dim(1) * latents.dim(2))?;
        let [scale, shift] = split(&modulation(&self.norm_out)?)?;
        let made = modulated_norm(ctx, &made, &shift, &scale, self.spec.eps)?;
        self.proj_out
            .forward(ctx, &made, After::default())?
            .reshape(latents.dims())
    }
}
