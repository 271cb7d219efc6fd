//! transformers' `CLIPVisionModel`, with and without projection: what Wan 2.1 is told of a picture.
//!
//! Only hidden states are taken: neither the last norm nor the projection is computed.

use super::{
    TRANSFORMERS_KEYS_WITHOUT_EFFECT,
    clip::{Layer, activation, upload_i32},
    pictures::Pixels,
};
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{After, Ctx, Embedding, LayerNorm, Linear, Parameter, Result, Scope};
use denoised_tensor::{Activation, PatchOrder, Tensor};

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct ClipVisionConfig {
    pub(crate) n_channels: usize,
    n_inner: usize,
    n_layers: usize,
    n_heads: usize,
    /// Width and height of a picture.
    pub(crate) side: usize,
    patch: usize,
    activation: Activation,
    eps: f32,
}

impl ClipVisionConfig {
    /// Reads the configuration; missing keys have transformers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        config.only("model_type", &["clip_vision_model".into()])?;
        config.only("num_channels", &[3.into()])?;
        let read = Self {
            n_channels: config.usize_or("hidden_size", 768)?,
            n_inner: config.usize_or("intermediate_size", 3072)?,
            n_layers: config.usize_or("num_hidden_layers", 12)?,
            n_heads: config.usize_or("num_attention_heads", 12)?,
            side: config.usize_or("image_size", 224)?,
            patch: config.usize_or("patch_size", 32)?,
            activation: activation(config)?,
            eps: config.f64_or("layer_norm_eps", 1e-5)? as f32,
        };
        config.within("hidden_size", read.n_channels, 1..=1 << 16)?;
        config.within("intermediate_size", read.n_inner, 1..=1 << 18)?;
        config.within("num_hidden_layers", read.n_layers, 1..=512)?;
        config.within("image_size", read.side, 1..=4096)?;
        config.within("patch_size", read.patch, 1..=read.side)?;
        if !(read.eps.is_finite() && read.eps >= 0.0) {
            return Err(config
                .wrong("layer_norm_eps", "a finite number of at least 0")
                .into());
        }
        if read.n_heads == 0 || !read.n_channels.is_multiple_of(read.n_heads) {
            return Err(config
                .wrong("num_attention_heads", "a divisor of hidden_size")
                .into());
        }
        if !read.side.is_multiple_of(read.patch) {
            return Err(config.wrong("patch_size", "a divisor of image_size").into());
        }
        config.deny_unread(&[TRANSFORMERS_KEYS_WITHOUT_EFFECT, &["projection_dim"]].concat())?;
        Ok(read)
    }

    /// Tokens of a picture: its patches behind one for the whole.
    pub(crate) fn n_tokens(&self) -> usize {
        (self.side / self.patch).pow(2) + 1
    }
}

/// The network up to a hidden state.
#[derive(Debug)]
pub(crate) struct ClipVision {
    whole: Parameter,
    patches: Linear,
    positions: Embedding,
    first_norm: LayerNorm,
    layers: Vec<Layer>,
    config: ClipVisionConfig,
}

impl ClipVision {
    /// Without the last `n_skipped` layers; below `vision_model` or, as transformers 5 writes it, without that name.
    pub(crate) fn new(root: &mut Scope<'_>, config: ClipVisionConfig, n_skipped: usize) -> Self {
        if root.is_stored("embeddings.class_embedding") {
            Self::at(root, config, n_skipped)
        } else {
            Self::at(&mut root.at("vision_model"), config, n_skipped)
        }
    }

    fn at(vision: &mut Scope<'_>, config: ClipVisionConfig, n_skipped: usize) -> Self {
        let n = config.n_channels;
        let mut embeddings = vision.at("embeddings");
        let whole = Parameter::new(&mut embeddings, "class_embedding", &[n]);
        let n_features = 3 * config.patch * config.patch;
        let patches = Linear::without_bias(&mut embeddings.at("patch_embedding"), n_features, n);
        let positions = Embedding::new(&mut embeddings.at("position_embedding"), config.n_tokens(), n);
        let first_norm = LayerNorm::new(&mut vision.at("pre_layrnorm"), n, config.eps);
        let layers = (0..config.n_layers.saturating_sub(n_skipped))
            .map(|layer_idx| {
                let mut layer = vision.at(format_args!("encoder.layers.{layer_idx}"));
                Layer::new(&mut layer, [n, config.n_inner], config.activation, config.eps)
            })
            .collect();
        Self {
            whole,
            patches,
            positions,
            first_norm,
            layers,
            config,
        }
    }

    /// Tensors that are not read; an entry may begin or end with `*` for any text.
    pub(crate) fn unread_names(config: &ClipVisionConfig, n_skipped: usize) -> Vec<String> {
        let mut names = vec!["visual_projection.weight".to_owned()];
        for place in ["", "vision_model."] {
            let skipped = config.n_layers.saturating_sub(n_skipped)..config.n_layers;
            names.extend(skipped.map(|idx| format!("{place}encoder.layers.{idx}.*")));
            names.push(format!("{place}embeddings.position_ids"));
            names.push(format!("{place}post_layernorm.*"));
        }
        names
    }

    /// Hidden states of a picture of `side` by `side` pixels, not normalized, `[1, n_tokens, n_channels]`.
    ///
    /// # Errors
    /// The device's, or a picture of another size.
    pub(crate) fn forward(&self, ctx: &Ctx<'_>, pixels: &Pixels) -> Result<Tensor> {
        let (n, n_tokens, patch) = (self.config.n_channels, self.config.n_tokens(), self.config.patch);
        let pixels = ctx.upload_f32(&pixels.values, &[1, pixels.height, pixels.width, 3])?;
        let features = ctx.alloc(&[1, n_tokens - 1, 3 * patch * patch])?;
        ctx.backend
            .patchify(&ctx.cast(&pixels)?, patch, PatchOrder::ChannelFirst, &features)?;
        let x = ctx.alloc(&[1, n_tokens, n])?;
        let whole = self.whole.tensor(ctx)?.reshape(&[1, 1, n])?;
        ctx.backend.copy(&whole, &x.narrow(1, 0, 1)?)?;
        let of_patches = x.narrow(1, 1, n_tokens - 1)?;
        self.patches
            .forward_into(ctx, &features, After::default(), &of_patches)?;
        let ids = upload_i32(ctx, 0..n_tokens as u32, &[1, n_tokens])?;
        ctx.backend.add(&x, &self.positions.forward(ctx, &ids)?, &x)?;
        let x = self.first_norm.forward(ctx, &x)?;
        for layer in &self.layers {
            layer.forward(ctx, &x, self.config.n_heads, false)?;
        }
        Ok(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tables::{TestModel, config_of, numbers, relative_error, table};

    // `tests/tables/make_clip_vision.py`.
    const TABLE: &str = "clip_vision.json";

    #[test]
    fn hidden_states_are_transformers_hidden_states() {
        let mut worst: f64 = 0.0;
        for case in table(TABLE)["cases"].as_array().expect("cases") {
            let config = ClipVisionConfig::read(&config_of(&case["config"])).expect("a configuration");
            let side = config.side;
            // Number `i` is `((37 i + i² / 11) mod 101) / 50 - 1`.
            let values = (0..side * side * 3).map(|i| ((37 * i + i * i / 11) % 101) as f32 / 50.0 - 1.0);
            let pixels = Pixels {
                width: side,
                height: side,
                values: values.collect(),
            };
            let states = case["states"].as_array().expect("a list");
            for (n_skipped, theirs) in states.iter().rev().enumerate() {
                let model = TestModel::new(&case["weights"], |scope| {
                    ClipVision::new(scope, config.clone(), n_skipped)
                });
                let ours = model.run(|vision, ctx| vision.forward(ctx, &pixels));
                worst = worst.max(relative_error(&ours, &numbers(theirs)));
            }
        }
        assert!(worst < 2e-6, "{worst:e}");
    }

    #[test]
    fn configurations_that_are_not_carried_out_are_refused_by_name() {
        for (config, word) in [
            (r#"{"model_type": "siglip_vision_model"}"#, "model_type"),
            (r#"{"num_channels": 4}"#, "num_channels"),
            (r#"{"hidden_act": "relu"}"#, "hidden_act"),
            (r#"{"patch_size": 15}"#, "patch_size"),
            (r#"{"num_attention_heads": 5}"#, "num_attention_heads"),
            (r#"{"layer_norm_eps": -1}"#, "layer_norm_eps"),
            (r#"{"vision_use_head": true}"#, "vision_use_head"),
        ] {
            let value = serde_json::from_str(config).expect("JSON");
            let error = ClipVisionConfig::read(&config_of(&value)).expect_err("it is refused");
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
