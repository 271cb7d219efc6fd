//! diffusers' `FluxTransformer2DModel`: FLUX.1, with or without an embedded guidance scale.
//!
//! Positions have three axes: which picture (0 what is made, 1 what is edited), row and column, in patches of 2x2 latents; text is at
//! the origin.

use super::{
    Denoiser, DenoiserInput,
    flux_blocks::{BlockSpec, DoubleBlock, Kind, Modulated, SingleBlock, Tokens},
    rope::{Angles, Rope, RopeAxes},
};
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{After, Ctx, Linear, Result, Scope, TimestepEmbedding, TwoLayer, modulated_norm, split};
use denoised_tensor::{Activation, PatchOrder, Tensor, TensorError, TimestepSpec};

/// Constants of diffusers' class that no configuration changes.
const EPS: f32 = 1e-6;
const N_SINUSOIDS: usize = 256;
const MLP_RATIO: usize = 4;
const THETA: f64 = 10_000.0;
/// Latents each way that make a token.
const PATCH: usize = 2;

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct FluxConfig {
    /// Of a patch.
    c_in: usize,
    n_layers: usize,
    n_single_layers: usize,
    head_dim: usize,
    n_heads: usize,
    pub(crate) n_joint: usize,
    pub(crate) n_pooled: usize,
    /// Whether the guidance scale is an input.
    pub(crate) has_guidance: bool,
    axes: Vec<usize>,
}

impl FluxConfig {
    /// Reads the configuration; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        let c_in = config.usize_or("in_channels", 64)?;
        let read = Self {
            c_in,
            n_layers: config.usize_or("num_layers", 19)?,
            n_single_layers: config.usize_or("num_single_layers", 38)?,
            head_dim: config.usize_or("attention_head_dim", 128)?,
            n_heads: config.usize_or("num_attention_heads", 24)?,
            n_joint: config.usize_or("joint_attention_dim", 4096)?,
            n_pooled: config.usize_or("pooled_projection_dim", 768)?,
            has_guidance: config.bool_or("guidance_embeds", false)?,
            axes: config
                .usizes("axes_dims_rope")?
                .unwrap_or_else(|| vec![16, 56, 56]),
        };
        config.only("patch_size", &[1.into()])?;
        config.within("in_channels", read.c_in, 1..=1 << 12)?;
        config.within("num_layers", read.n_layers, 0..=512)?;
        config.within("num_single_layers", read.n_single_layers, 0..=512)?;
        config.within("attention_head_dim", read.head_dim, 1..=1 << 10)?;
        config.within("num_attention_heads", read.n_heads, 1..=1 << 10)?;
        config.within("joint_attention_dim", read.n_joint, 1..=1 << 16)?;
        config.within("pooled_projection_dim", read.n_pooled, 1..=1 << 16)?;
        if !read.c_in.is_multiple_of(PATCH * PATCH) {
            return Err(config.wrong("in_channels", "a multiple of 4").into());
        }
        if config.opt_usize("out_channels")?.unwrap_or(c_in) != c_in {
            return Err(config
                .wrong("out_channels", "equal to in_channels or null")
                .into());
        }
        expect_axes(config, &read.axes, 3, read.head_dim)?;
        config.deny_unread(&[])?;
        Ok(read)
    }

    /// Channels of latents.
    pub(crate) fn n_latent(&self) -> usize {
        self.c_in / (PATCH * PATCH)
    }

    fn block(&self) -> BlockSpec {
        BlockSpec {
            n_heads: self.n_heads,
            head_dim: self.head_dim,
            n_inner: MLP_RATIO * self.n_heads * self.head_dim,
            kind: Kind::Gelu,
            eps: EPS,
        }
    }
}

/// Refuses widths of axes that do not make up a head.
pub(super) fn expect_axes(
    config: &Config,
    axes: &[usize],
    n_axes: usize,
    head_dim: usize,
) -> Result<(), ModelError> {
    let are_even = axes.iter().all(|width| width.is_multiple_of(2));
    if axes.len() == n_axes && are_even && axes.iter().copied().fold(0, usize::saturating_add) == head_dim {
        return Ok(());
    }
    let expected = format!("{n_axes} even numbers that make attention_head_dim = {head_dim} together");
    Err(config.wrong("axes_dims_rope", &expected).into())
}

/// The network.
#[derive(Debug)]
pub(crate) struct Flux {
    time: TimestepEmbedding,
    guidance: Option<TimestepEmbedding>,
    pooled: TwoLayer,
    context: Linear,
    latents: Linear,
    blocks: Vec<(DoubleBlock, [Linear; 2])>,
    singles: Vec<(SingleBlock, Linear)>,
    norm_out: Linear,
    proj_out: Linear,
    axes: RopeAxes,
    n: usize,
}

impl Flux {
    pub(crate) fn new(root: &mut Scope<'_>, config: &FluxConfig) -> Self {
        let block = config.block();
        let n = block.n_channels();
        let mut embed = root.at("time_text_embed");
        let time = TimestepEmbedding::new(
            &mut embed.at("timestep_embedder"),
            TimestepSpec::COSINES_FIRST,
            N_SINUSOIDS,
            n,
        );
        let guidance = config.has_guidance.then(|| {
            let mut scope = embed.at("guidance_embedder");
            TimestepEmbedding::new(&mut scope, TimestepSpec::COSINES_FIRST, N_SINUSOIDS, n)
        });
        let activation = Activation::Silu;
        let pooled = TwoLayer::new(&mut embed.at("text_embedder"), config.n_pooled, n, activation);
        let blocks = (0..config.n_layers)
            .map(|layer_idx| {
                let mut scope = root.at(format_args!("transformer_blocks.{layer_idx}"));
                let names = ["norm1_context.linear", "norm1.linear"];
                let modulations = names.map(|name| Linear::new(&mut scope.at(name), n, 6 * n));
                (DoubleBlock::new(&mut scope, block), modulations)
            })
            .collect();
        let singles = (0..config.n_single_layers)
            .map(|layer_idx| {
                let mut scope = root.at(format_args!("single_transformer_blocks.{layer_idx}"));
                let modulation = Linear::new(&mut scope.at("norm.linear"), n, 3 * n);
                (SingleBlock::new(&mut scope, block), modulation)
            })
            .collect();
        Self {
            time,
            guidance,
            pooled,
            context: Linear::new(&mut root.at("context_embedder"), config.n_joint, n),
            latents: Linear::new(&mut root.at("x_embedder"), config.c_in, n),
            blocks,
            singles,
            norm_out: Linear::new(&mut root.at("norm_out.linear"), n, 2 * n),
            proj_out: Linear::new(&mut root.at("proj_out"), n, config.c_in),
            axes: RopeAxes::new(THETA, &config.axes, Angles::F64),
            n,
        }
    }

    /// What modulates all blocks, `[batch, n]`: timestep, guidance and pooled text.
    fn vector(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<Tensor> {
        let missing = |detail: &str| TensorError::Operand {
            op: "flux",
            detail: detail.to_owned(),
        };
        let conditioning = input.conditioning;
        let mut vector = self.time.forward(ctx, input.timesteps, After::default())?;
        if let Some(embedding) = &self.guidance {
            let numbers = conditioning.numbers.as_ref();
            let guidance = numbers.ok_or_else(|| missing("the conditioning has no guidance scale"))?;
            let guidance = guidance.reshape(&[guidance.dim(0)])?;
            vector = embedding.forward(ctx, &guidance, After::residual(&vector))?;
        }
        let pooled = conditioning.pooled.as_ref();
        let pooled = pooled.ok_or_else(|| missing("the conditioning has no pooled text"))?;
        let vector = self.pooled.forward(ctx, pooled, After::residual(&vector))?;
        ctx.backend.activation(&vector, Activation::Silu, &vector)?;
        Ok(vector)
    }

    /// Text, then the picture that is made, then pictures to edit.
    fn tokens(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<(Tokens, Rope)> {
        let n_text = input.conditioning.tokens.dim(1);
        let mut positions = self.axes.positions();
        positions.push(n_text, |_| [0.0; 3]);
        let pictures: Vec<&Tensor> = std::iter::once(input.latents).chain(input.references).collect();
        for (idx, picture) in pictures.iter().enumerate() {
            let which = if idx == 0 { 0.0 } else { 1.0 };
            let sides = (picture.dim(1) / PATCH, picture.dim(2) / PATCH);
            positions.push_grid(sides, |y, x| [which, y, x]);
        }
        let all = ctx.alloc(&[input.latents.dim(0), positions.len(), self.n])?;
        let text = all.narrow(1, 0, n_text)?;
        let given = &input.conditioning.tokens;
        self.context.forward_into(ctx, given, After::default(), &text)?;
        let mut first = n_text;
        for picture in pictures {
            let n_tokens = (picture.dim(1) / PATCH) * (picture.dim(2) / PATCH);
            let dims = [picture.dim(0), n_tokens, PATCH * PATCH * picture.dim(3)];
            let patches = ctx.alloc(&dims)?;
            ctx.backend
                .patchify(picture, PATCH, PatchOrder::ChannelFirst, &patches)?;
            let out = all.narrow(1, first, n_tokens)?;
            self.latents.forward_into(ctx, &patches, After::default(), &out)?;
            first += n_tokens;
        }
        let rope = self.axes.tables(ctx, &positions)?;
        Ok((Tokens::new(all, n_text)?, rope))
    }
}

impl Denoiser for Flux {
    fn forward(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<Tensor> {
        let vector = self.vector(ctx, input)?;
        let (tokens, rope) = self.tokens(ctx, input)?;
        for (block, modulations) in &self.blocks {
            let [text, picture] = modulations;
            let text = text.forward(ctx, &vector, After::default())?;
            let picture = picture.forward(ctx, &vector, After::default())?;
            let modulated = [&Modulated::cut::<2>(&text)?, &Modulated::cut::<2>(&picture)?];
            block.forward(ctx, &tokens, modulated, &rope)?;
        }
        for (block, modulation) in &self.singles {
            let modulation = modulation.forward(ctx, &vector, After::default())?;
            let [modulated] = Modulated::cut(&modulation)?;
            block.forward(ctx, &tokens.all, &modulated, &rope)?;
        }
        let latents = input.latents;
        let n_made = (latents.dim(1) / PATCH) * (latents.dim(2) / PATCH);
        let made = tokens.picture.narrow(1, 0, n_made)?;
        let [scale, shift] = split(&self.norm_out.forward(ctx, &vector, After::default())?)?;
        let made = modulated_norm(ctx, &made, &shift, &scale, EPS)?;
        let made = self.proj_out.forward(ctx, &made, After::default())?;
        let out = ctx.alloc(latents.dims())?;
        ctx.backend
            .unpatchify(&made, PATCH, PatchOrder::ChannelFirst, &out)?;
        Ok(out)
    }
}
