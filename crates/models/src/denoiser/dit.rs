//! diffusers' `DiTTransformer2DModel`: a transformer over patches whose norms are modulated by timestep and class (Peebles and Xie 2022,
//! "Scalable Diffusion Models with Transformers").
//!
//! Every block embeds timestep and class with weights of its own. The classes are embedded by [`ClassTables`], before the first step.

use super::{
    Denoiser, DenoiserInput,
    patches::{PatchEmbed, PatchTransformerConfig, PatchTransformerDefaults, SelfAttention, to_prediction},
};
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{
    After, Ctx, Embedding, FeedForward, Linear, Result, Scope, TimestepEmbedding, modulated_norm, split,
};
use denoised_tensor::{Activation, DType, Tensor, TimestepSpec};
use serde_json::Value;

/// Of the norms whose epsilon no configuration changes.
const EPS: f32 = 1e-6;
const N_SINUSOIDS: usize = 256;
const TIMESTEP_SPEC: TimestepSpec = TimestepSpec {
    downscale_freq_shift: 1.0,
    ..TimestepSpec::COSINES_FIRST
};
const DEFAULTS: PatchTransformerDefaults = PatchTransformerDefaults {
    norm_type: "ada_norm_zero",
    out_channels: None,
    sample_size: 32,
    norm_eps: 1e-5,
};

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct DitConfig {
    pub(crate) base: PatchTransformerConfig,
    pub(crate) n_classes: usize,
}

impl DitConfig {
    /// Reads the configuration; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        let read = Self {
            base: PatchTransformerConfig::read(config, &DEFAULTS)?,
            n_classes: config.usize_or("num_embeds_ada_norm", 1000)?,
        };
        config.within("num_embeds_ada_norm", read.n_classes, 1..=1 << 20)?;
        config.only("cross_attention_dim", &[Value::Null])?;
        PatchTransformerConfig::deny_unread(config)?;
        Ok(read)
    }
}

/// The embeddings of classes, a table per block; the row behind the last class is for none.
#[derive(Debug)]
pub(crate) struct ClassTables {
    tables: Vec<Embedding>,
    n_channels: usize,
}

impl ClassTables {
    /// At the root of the network.
    pub(crate) fn new(root: &mut Scope<'_>, config: &DitConfig) -> Self {
        let n_channels = config.base.n_channels();
        let table = |layer_idx: usize| {
            let mut scope = root.at(format_args!("transformer_blocks.{layer_idx}.norm1.emb"));
            let mut scope = scope.at("class_embedder.embedding_table");
            Embedding::new(&mut scope, config.n_classes + 1, n_channels)
        };
        Self {
            tables: (0..config.base.n_layers).map(table).collect(),
            n_channels,
        }
    }

    /// The row `class` of every table, `[1, blocks, n]`.
    ///
    /// # Errors
    /// A class that there is not, or the device's.
    pub(crate) fn forward(&self, ctx: &Ctx<'_>, class: u32) -> Result<Tensor> {
        let out = ctx.alloc(&[1, self.tables.len(), self.n_channels])?;
        let id = i32::try_from(class).unwrap_or(-1);
        let id = ctx.backend.upload(&id.to_le_bytes(), &[1], DType::I32)?;
        for (layer_idx, table) in self.tables.iter().enumerate() {
            let row = table.forward(ctx, &id)?.reshape(&[1, 1, self.n_channels])?;
            ctx.backend.copy(&row, &out.narrow(1, layer_idx, 1)?)?;
        }
        Ok(out)
    }
}

/// The network, without its classes' embeddings.
#[derive(Debug)]
pub(crate) struct Dit {
    patches: PatchEmbed,
    blocks: Vec<Block>,
    modulation_out: Linear,
    proj_out: Linear,
    config: DitConfig,
}

impl Dit {
    pub(crate) fn new(root: &mut Scope<'_>, config: DitConfig) -> Self {
        let base = &config.base;
        let n = base.n_channels();
        let widths = (base.c_in, n);
        let patches = PatchEmbed::new(
            &mut root.at("pos_embed"),
            widths,
            base.patch,
            base.sample_size,
            1.0,
        );
        let blocks = (0..base.n_layers)
            .map(|layer_idx| Block::new(&mut root.at(format_args!("transformer_blocks.{layer_idx}")), base))
            .collect();
        Self {
            patches,
            blocks,
            modulation_out: Linear::new(&mut root.at("proj_out_1"), n, 2 * n),
            proj_out: Linear::new(
                &mut root.at("proj_out_2"),
                n,
                base.patch * base.patch * base.c_out,
            ),
            config,
        }
    }
}

impl Denoiser for Dit {
    fn forward(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<Tensor> {
        let classes = &input.conditioning.tokens;
        let x = self.patches.forward(ctx, input.latents)?;
        // What the first block makes of timestep and class modulates the output as well.
        let mut first = None;
        for (layer_idx, block) in self.blocks.iter().enumerate() {
            let class = classes.narrow(1, layer_idx, 1)?;
            let class = class.reshape(&[classes.dim(0), classes.dim(2)])?;
            let vector = block
                .time
                .forward(ctx, input.timesteps, After::residual(&class))?;
            ctx.backend.activation(&vector, Activation::Silu, &vector)?;
            block.forward(ctx, &x, &vector)?;
            first.get_or_insert(vector);
        }
        let mut x = x;
        if let Some(vector) = first {
            let [shift, scale] = split(&self.modulation_out.forward(ctx, &vector, After::default())?)?;
            x = modulated_norm(ctx, &x, &shift, &scale, EPS)?;
        }
        let x = self.proj_out.forward(ctx, &x, After::default())?;
        let base = &self.config.base;
        to_prediction(ctx, &x, (base.patch, base.c_out), input.latents)
    }
}

#[derive(Debug)]
struct Block {
    time: TimestepEmbedding,
    modulation: Linear,
    attention: SelfAttention,
    feed_forward: FeedForward,
    feed_forward_eps: f32,
}

impl Block {
    fn new(scope: &mut Scope<'_>, config: &PatchTransformerConfig) -> Self {
        let n = config.n_channels();
        let mut norm = scope.at("norm1");
        let mut embed = norm.at("emb.timestep_embedder");
        let time = TimestepEmbedding::new(&mut embed, TIMESTEP_SPEC, N_SINUSOIDS, n);
        Self {
            time,
            modulation: Linear::new(&mut norm.at("linear"), n, 6 * n),
            attention: SelfAttention::new(&mut scope.at("attn1"), n, config.n_heads, config.has_qkv_bias),
            feed_forward: FeedForward::new(&mut scope.at("ff"), n, 4 * n, config.activation),
            feed_forward_eps: config.norm_eps,
        }
    }

    /// Updates `x` `[batch, tokens, n]` in place; `vector` `[batch, n]` went through SiLU.
    fn forward(&self, ctx: &Ctx<'_>, x: &Tensor, vector: &Tensor) -> Result<()> {
        let modulation = self.modulation.forward(ctx, vector, After::default())?;
        let [shift, scale, gate, shift_ff, scale_ff, gate_ff] = split(&modulation)?;
        let h = modulated_norm(ctx, x, &shift, &scale, EPS)?;
        self.attention.add_to(ctx, &h, &gate, x)?;
        let h = modulated_norm(ctx, x, &shift_ff, &scale_ff, self.feed_forward_eps)?;
        self.feed_forward
            .forward_into(ctx, &h, After::gated(&gate_ff, x), x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::path::Path;

    fn read(settings: Value) -> std::result::Result<DitConfig, String> {
        let map = settings.as_object().expect("an object").clone();
        DitConfig::read(&Config::new(Path::new("config.json"), map)).map_err(|error| error.to_string())
    }

    #[test]
    fn the_configuration_of_dit_is_read() {
        // DiT XL/2 for 256 pixels.
        let config = read(json!({
            "activation_fn": "gelu-approximate", "attention_bias": true, "attention_head_dim": 72, "cross_attention_dim": null,
            "dropout": 0.0, "in_channels": 4, "norm_elementwise_affine": false, "norm_num_groups": 32,
            "norm_type": "ada_norm_zero", "num_attention_heads": 16, "num_embeds_ada_norm": 1000, "num_layers": 28,
            "num_vector_embeds": null, "only_cross_attention": false, "out_channels": 8, "patch_size": 2, "sample_size": 32,
            "upcast_attention": false, "use_linear_projection": false,
        }))
        .expect("supported");
        assert_eq!((config.base.n_channels(), config.n_classes), (1152, 1000));
        assert_eq!((config.base.c_out, config.base.norm_eps), (8, 1e-5));
        // Without out_channels there are as many as come in.
        assert_eq!(read(json!({})).expect("supported").base.c_out, 4);
    }

    #[test]
    fn settings_that_are_not_carried_out_are_refused_by_key() {
        for (settings, key) in [
            (json!({"norm_type": "ada_norm_single"}), "norm_type"),
            (json!({"num_embeds_ada_norm": 0}), "num_embeds_ada_norm"),
            (json!({"cross_attention_dim": 1152}), "cross_attention_dim"),
            (
                json!({"attention_head_dim": 7, "num_attention_heads": 3}),
                "attention_head_dim",
            ),
            (json!({"something_new": 1}), "something_new"),
        ] {
            let message = read(settings).expect_err("refused");
            assert!(message.contains(key), "{message}");
        }
    }
}
