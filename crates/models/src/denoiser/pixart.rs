//! diffusers' `PixArtTransformer2DModel`: a transformer over patches that attends to a text and whose norms one embedding of the timestep
//! modulates (Chen et al. 2023, "PixArt-alpha: Fast Training of Diffusion Transformer for Photorealistic Text-to-Image Synthesis").

use super::{
    Denoiser, DenoiserInput,
    patches::{PatchEmbed, PatchTransformerConfig, PatchTransformerDefaults, SelfAttention, to_prediction},
};
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{
    After, Attend, Ctx, FeedForward, Linear, Parameter, Result, Scope, TimestepEmbedding, TwoLayer, attend,
    modulated_norm, split,
};
use denoised_tensor::{Activation, Tensor, TensorError, TimestepSpec};

/// Of the norm whose epsilon no configuration changes.
const EPS_OUT: f32 = 1e-6;
const N_SINUSOIDS: usize = 256;
const DEFAULTS: PatchTransformerDefaults = PatchTransformerDefaults {
    norm_type: "ada_norm_single",
    out_channels: Some(8),
    sample_size: 128,
    norm_eps: 1e-6,
};
/// Latents each way that positions are counted in without an `interpolation_scale`.
const SCALE_SIDE: usize = 64;
/// The side for which sizes are embedded without a `use_additional_conditions`.
const SIZED_SIDE: usize = 128;

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct PixartConfig {
    pub(crate) base: PatchTransformerConfig,
    /// Whether height, width and their ratio are embedded beside the timestep.
    pub(crate) has_sizes: bool,
    interpolation_scale: f32,
    /// Channels of texts where they are projected.
    n_caption: Option<usize>,
    n_context: usize,
}

impl PixartConfig {
    /// Reads the configuration; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        let base = PatchTransformerConfig::read(config, &DEFAULTS)?;
        let scale = config.opt_f64("interpolation_scale")?;
        let scale = scale.unwrap_or_else(|| (base.sample_size / SCALE_SIDE).max(1) as f64);
        if !(scale.is_finite() && scale > 0.0) {
            return Err(config.wrong("interpolation_scale", "a number above 0").into());
        }
        let has_sizes = config.opt_bool("use_additional_conditions")?;
        let read = Self {
            has_sizes: has_sizes.unwrap_or(base.sample_size == SIZED_SIDE),
            interpolation_scale: scale as f32,
            n_caption: config.opt_usize("caption_channels")?,
            n_context: match config.has("cross_attention_dim") {
                true => config.usize("cross_attention_dim")?,
                false => 1152,
            },
            base,
        };
        config.opt_usize("num_embeds_ada_norm")?;
        let n = read.base.n_channels();
        if read.has_sizes && !n.is_multiple_of(3) {
            let expected = "a multiple of 3 over all heads where sizes are embedded";
            return Err(config.wrong("attention_head_dim", expected).into());
        }
        if let Some(n_caption) = read.n_caption {
            config.within("caption_channels", n_caption, 1..=1 << 16)?;
            if read.n_context != n {
                let expected =
                    format!("num_attention_heads * attention_head_dim = {n}, as texts are projected");
                return Err(config.wrong("cross_attention_dim", &expected).into());
            }
        }
        config.within("cross_attention_dim", read.n_context, 1..=1 << 16)?;
        PatchTransformerConfig::deny_unread(config)?;
        Ok(read)
    }

    /// Channels of the texts that it is given.
    pub(crate) fn n_text(&self) -> usize {
        self.n_caption.unwrap_or(self.n_context)
    }
}

/// The network.
#[derive(Debug)]
pub(crate) struct Pixart {
    patches: PatchEmbed,
    time: TimestepEmbedding,
    sizes: Option<SizeEmbedding>,
    modulation: Linear,
    caption: Option<TwoLayer>,
    blocks: Vec<Block>,
    table_out: Parameter,
    proj_out: Linear,
    config: PixartConfig,
}

/// Embeddings of height and width, and of their ratio.
#[derive(Debug)]
struct SizeEmbedding {
    resolution: TimestepEmbedding,
    ratio: TimestepEmbedding,
}

impl SizeEmbedding {
    fn new(scope: &mut Scope<'_>, n: usize) -> Self {
        let mut embedding = |name: &str| {
            TimestepEmbedding::new(
                &mut scope.at(name),
                TimestepSpec::COSINES_FIRST,
                N_SINUSOIDS,
                n / 3,
            )
        };
        Self {
            resolution: embedding("resolution_embedder"),
            ratio: embedding("aspect_ratio_embedder"),
        }
    }

    /// Adds to `time` `[batch, n]` what `numbers` `[batch, 3]` (height, width, ratio) are embedded to.
    fn add_to(&self, ctx: &Ctx<'_>, numbers: &Tensor, time: &Tensor) -> Result<()> {
        let n_third = time.dim(1) / 3;
        for (column, embedding) in [(0, &self.resolution), (1, &self.resolution), (2, &self.ratio)] {
            // A column of its own, as embeddings take vectors without gaps.
            let number = ctx.backend.alloc(&[numbers.dim(0), 1], numbers.dtype())?;
            ctx.backend.copy(&numbers.narrow(1, column, 1)?, &number)?;
            let number = number.reshape(&[numbers.dim(0)])?;
            let part = time.narrow(1, column * n_third, n_third)?;
            let embedded = embedding.forward(ctx, &number, After::default())?;
            ctx.backend.add(&part, &embedded, &part)?;
        }
        Ok(())
    }
}

impl Pixart {
    pub(crate) fn new(root: &mut Scope<'_>, config: PixartConfig) -> Self {
        let base = &config.base;
        let n = base.n_channels();
        let mut scope = root.at("pos_embed");
        let scale = config.interpolation_scale;
        let patches = PatchEmbed::new(&mut scope, (base.c_in, n), base.patch, base.sample_size, scale);
        let mut modulation = root.at("adaln_single");
        let mut embed = modulation.at("emb");
        let time = TimestepEmbedding::new(
            &mut embed.at("timestep_embedder"),
            TimestepSpec::COSINES_FIRST,
            N_SINUSOIDS,
            n,
        );
        let sizes = config.has_sizes.then(|| SizeEmbedding::new(&mut embed, n));
        let modulation = Linear::new(&mut modulation.at("linear"), n, 6 * n);
        let caption = config
            .n_caption
            .map(|n_in| TwoLayer::new(&mut root.at("caption_projection"), n_in, n, Activation::GeluTanh));
        let blocks = (0..base.n_layers)
            .map(|layer_idx| {
                let mut scope = root.at(format_args!("transformer_blocks.{layer_idx}"));
                Block::new(&mut scope, &config)
            })
            .collect();
        Self {
            patches,
            time,
            sizes,
            modulation,
            caption,
            blocks,
            table_out: Parameter::new(root, "scale_shift_table", &[2, n]),
            proj_out: Linear::new(&mut root.at("proj_out"), n, base.patch * base.patch * base.c_out),
            config,
        }
    }
}

impl Denoiser for Pixart {
    fn forward(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<Tensor> {
        let conditioning = input.conditioning;
        let x = self.patches.forward(ctx, input.latents)?;
        let time = self.time.forward(ctx, input.timesteps, After::default())?;
        if let Some(sizes) = &self.sizes {
            sizes.add_to(ctx, conditioning.numbers.as_ref().ok_or_else(no_sizes)?, &time)?;
        }
        let vector = ctx.alloc(time.dims())?;
        ctx.backend.activation(&time, Activation::Silu, &vector)?;
        let modulation = self.modulation.forward(ctx, &vector, After::default())?;
        let projected;
        let text = match &self.caption {
            Some(caption) => {
                projected = caption.forward(ctx, &conditioning.tokens, After::default())?;
                &projected
            }
            None => &conditioning.tokens,
        };
        for block in &self.blocks {
            block.forward(ctx, &x, text, &modulation)?;
        }
        // Shift and scale are the timestep's embedding itself, moved by the table.
        let n = time.dim(1);
        let twice = ctx.alloc(&[time.dim(0), 2 * n])?;
        for part in split::<2>(&twice)? {
            ctx.backend.copy(&time, &part)?;
        }
        let [shift, scale] = split(&with_table(ctx, &self.table_out, &twice)?)?;
        let x = modulated_norm(ctx, &x, &shift, &scale, EPS_OUT)?;
        let x = self.proj_out.forward(ctx, &x, After::default())?;
        let base = &self.config.base;
        to_prediction(ctx, &x, (base.patch, base.c_out), input.latents)
    }
}

#[derive(Debug)]
struct Block {
    table: Parameter,
    attention: SelfAttention,
    cross_q: Linear,
    cross_kv: Linear,
    cross_out: Linear,
    feed_forward: FeedForward,
    n_heads: usize,
    eps: f32,
}

impl Block {
    fn new(scope: &mut Scope<'_>, config: &PixartConfig) -> Self {
        let base = &config.base;
        let (n, has_bias) = (base.n_channels(), base.has_qkv_bias);
        let table = Parameter::new(scope, "scale_shift_table", &[6, n]);
        let attention = SelfAttention::new(&mut scope.at("attn1"), n, base.n_heads, has_bias);
        let mut cross = scope.at("attn2");
        Self {
            table,
            attention,
            cross_q: Linear::fused(&mut cross, &["to_q"], n, n, has_bias),
            cross_kv: Linear::fused(&mut cross, &["to_k", "to_v"], config.n_context, 2 * n, has_bias),
            cross_out: Linear::new(&mut cross.at("to_out.0"), n, n),
            feed_forward: FeedForward::new(&mut scope.at("ff"), n, 4 * n, base.activation),
            n_heads: base.n_heads,
            eps: base.norm_eps,
        }
    }

    /// Updates `x` `[batch, tokens, n]` in place; `text` is `[batch, n_text, n_context]`, `modulation` `[batch, 6n]`.
    fn forward(&self, ctx: &Ctx<'_>, x: &Tensor, text: &Tensor, modulation: &Tensor) -> Result<()> {
        let modulation = with_table(ctx, &self.table, modulation)?;
        let [shift, scale, gate, shift_ff, scale_ff, gate_ff] = split(&modulation)?;
        let h = modulated_norm(ctx, x, &shift, &scale, self.eps)?;
        self.attention.add_to(ctx, &h, &gate, x)?;
        let q = self.cross_q.forward(ctx, x, After::default())?;
        let [k, v] = split(&self.cross_kv.forward(ctx, text, After::default())?)?;
        let h = attend(ctx, &q, &k, &v, Attend::all(self.n_heads))?;
        self.cross_out.forward_into(ctx, &h, After::residual(x), x)?;
        let h = modulated_norm(ctx, x, &shift_ff, &scale_ff, self.eps)?;
        self.feed_forward
            .forward_into(ctx, &h, After::gated(&gate_ff, x), x)
    }
}

/// `x` `[batch, k n]` plus a table `[k, n]`.
fn with_table(ctx: &Ctx<'_>, table: &Parameter, x: &Tensor) -> Result<Tensor> {
    let table = table.tensor(ctx)?.reshape(&[1, x.dim(1)])?;
    ctx.add(x, &ctx.cast(&table)?)
}

/// The error of a conditioner that does not fit this network.
fn no_sizes() -> TensorError {
    TensorError::Operand {
        op: "pixart",
        detail: "the conditioning has no sizes".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::path::Path;

    fn read(settings: Value) -> std::result::Result<PixartConfig, String> {
        let map = settings.as_object().expect("an object").clone();
        PixartConfig::read(&Config::new(Path::new("config.json"), map)).map_err(|error| error.to_string())
    }

    #[test]
    fn missing_keys_are_those_of_diffusers() {
        // PixArtTransformer2DModel() of diffusers 0.42.1: sizes are embedded where the sample has 128 latents a side.
        let config = read(json!({})).expect("supported");
        assert_eq!((config.base.n_channels(), config.base.n_layers), (1152, 28));
        assert_eq!(
            (config.base.c_in, config.base.c_out, config.n_text()),
            (4, 8, 1152)
        );
        assert_eq!((config.has_sizes, config.interpolation_scale), (true, 2.0));
        // The configuration of PixArt Sigma, as its first checkpoints have it.
        let config = read(json!({
            "activation_fn": "gelu-approximate", "attention_bias": true, "attention_head_dim": 72, "attention_type": "default",
            "caption_channels": 4096, "cross_attention_dim": 1152, "double_self_attention": false, "dropout": 0.0,
            "in_channels": 4, "interpolation_scale": 2, "norm_elementwise_affine": false, "norm_eps": 1e-06,
            "norm_num_groups": 32, "norm_type": "ada_norm_single", "num_attention_heads": 16, "num_embeds_ada_norm": 1000,
            "num_layers": 28, "num_vector_embeds": null, "only_cross_attention": false, "out_channels": 8, "patch_size": 2,
            "sample_size": 128, "upcast_attention": false, "use_additional_conditions": false, "use_linear_projection": false,
        }))
        .expect("supported");
        assert_eq!((config.n_text(), config.has_sizes), (4096, false));
    }

    #[test]
    fn settings_that_are_not_carried_out_are_refused_by_key() {
        for (settings, key) in [
            (json!({"norm_type": "ada_norm_zero"}), "norm_type"),
            (json!({"activation_fn": "geglu"}), "activation_fn"),
            (json!({"out_channels": 9}), "out_channels"),
            (
                json!({"norm_elementwise_affine": true}),
                "norm_elementwise_affine",
            ),
            (json!({"attention_type": "gated"}), "attention_type"),
            (json!({"interpolation_scale": 0}), "interpolation_scale"),
            (
                json!({"caption_channels": 4096, "cross_attention_dim": 768}),
                "cross_attention_dim",
            ),
            (json!({"cross_attention_dim": null}), "cross_attention_dim"),
            (json!({"attention_head_dim": 64}), "attention_head_dim"),
            (json!({"num_vector_embeds": 8}), "num_vector_embeds"),
            (json!({"something_new": 1}), "something_new"),
        ] {
            let message = read(settings).expect_err("refused");
            assert!(message.contains(key), "{message}");
        }
    }
}
