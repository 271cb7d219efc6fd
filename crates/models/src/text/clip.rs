//! transformers' `CLIPTextModel`, with and without projection: OpenAI's and OpenCLIP's text encoders.

use super::TRANSFORMERS_KEYS_WITHOUT_EFFECT;
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{
    After, Attend, Ctx, Embedding, FeedForward, LayerNorm, Linear, Result, Scope, attend, split,
};
use denoised_tensor::{Activation, DType, Tensor};

/// Tensors that older files bring and nothing reads: the numbers from 0.
pub(crate) const UNREAD_NAMES: [&str; 2] = ["embeddings.position_ids", "text_model.embeddings.position_ids"];

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct ClipConfig {
    pub(crate) vocab_size: usize,
    pub(crate) n_channels: usize,
    pub(crate) n_inner: usize,
    pub(crate) n_layers: usize,
    pub(crate) n_heads: usize,
    pub(crate) n_positions: usize,
    pub(crate) n_projected: usize,
    activation: Activation,
    eps: f32,
    eos: usize,
}

impl ClipConfig {
    /// Reads the configuration; missing keys have transformers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        config.only("model_type", &["clip_text_model".into()])?;
        let activation = activation(config)?;
        let read = Self {
            vocab_size: config.usize_or("vocab_size", 49408)?,
            n_channels: config.usize_or("hidden_size", 512)?,
            n_inner: config.usize_or("intermediate_size", 2048)?,
            n_layers: config.usize_or("num_hidden_layers", 12)?,
            n_heads: config.usize_or("num_attention_heads", 8)?,
            n_positions: config.usize_or("max_position_embeddings", 77)?,
            n_projected: config.usize_or("projection_dim", 512)?,
            activation,
            eps: config.f64_or("layer_norm_eps", 1e-5)? as f32,
            eos: config.usize_or("eos_token_id", 49407)?,
        };
        config.within("vocab_size", read.vocab_size, 1..=1 << 22)?;
        config.within("hidden_size", read.n_channels, 1..=1 << 16)?;
        config.within("intermediate_size", read.n_inner, 1..=1 << 18)?;
        config.within("num_hidden_layers", read.n_layers, 1..=512)?;
        config.within("max_position_embeddings", read.n_positions, 2..=1 << 16)?;
        config.within("projection_dim", read.n_projected, 1..=1 << 16)?;
        config.within("eos_token_id", read.eos, 0..=1 << 22)?;
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
        // diffusers would hide the padding from the encoder.
        config.only("use_attention_mask", &[false.into()])?;
        config.deny_unread(TRANSFORMERS_KEYS_WITHOUT_EFFECT)?;
        Ok(read)
    }
}

/// What stands between the two products of a layer.
pub(super) fn activation(config: &Config) -> Result<Activation, ModelError> {
    match config.str_or("hidden_act", "quick_gelu")? {
        "quick_gelu" => Ok(Activation::QuickGelu),
        "gelu" => Ok(Activation::GeluErf),
        "gelu_new" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        "silu" | "swish" => Ok(Activation::Silu),
        _ => Err(config
            .wrong("hidden_act", "quick_gelu, gelu, gelu_new or silu")
            .into()),
    }
}

/// What a text becomes.
#[derive(Clone, Debug)]
pub(crate) struct ClipOutput {
    /// Hidden states of the layer that was asked for, not normalized, `[1, tokens, n_channels]`.
    pub(crate) tokens: Tensor,
    /// Normalized last hidden state of the end token, projected, `[1, n_projected]`.
    pub(crate) pooled: Tensor,
}

/// transformers' `CLIPTextModel`: the layers, and the norm behind them.
#[derive(Debug)]
pub(crate) struct ClipEncoder {
    tokens: Embedding,
    positions: Embedding,
    layers: Vec<Layer>,
    final_norm: LayerNorm,
    n_heads: usize,
    eos: u32,
}

/// transformers' `CLIPTextModelWithProjection`.
#[derive(Debug)]
pub(crate) struct ClipText {
    encoder: ClipEncoder,
    projection: Linear,
}

/// A layer of either encoder, of texts or of pictures.
#[derive(Debug)]
pub(super) struct Layer {
    norm1: LayerNorm,
    qkv: Linear,
    out: Linear,
    norm2: LayerNorm,
    mlp: FeedForward,
}

impl ClipEncoder {
    /// Below `text_model` or, as transformers 5 writes it, without that name.
    pub(crate) fn new(root: &mut Scope<'_>, config: &ClipConfig) -> Self {
        if root.is_stored("embeddings.token_embedding.weight") {
            Self::at(root, config)
        } else {
            Self::at(&mut root.at("text_model"), config)
        }
    }

    fn at(text: &mut Scope<'_>, config: &ClipConfig) -> Self {
        let n = config.n_channels;
        let mut embeddings = text.at("embeddings");
        let tokens = Embedding::new(&mut embeddings.at("token_embedding"), config.vocab_size, n);
        let positions = Embedding::new(&mut embeddings.at("position_embedding"), config.n_positions, n);
        let layers = (0..config.n_layers)
            .map(|layer_idx| {
                let mut layer = text.at(format_args!("encoder.layers.{layer_idx}"));
                Layer::new(&mut layer, [n, config.n_inner], config.activation, config.eps)
            })
            .collect();
        Self {
            tokens,
            positions,
            layers,
            final_norm: LayerNorm::new(&mut text.at("final_layer_norm"), n, config.eps),
            n_heads: config.n_heads,
            eos: config.eos as u32,
        }
    }

    /// Encodes one text of at most `max_position_embeddings` ids to `[1, tokens, n_channels]`: the states `n_skipped` layers before the
    /// last, normalized.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn forward(&self, ctx: &Ctx<'_>, ids: &[u32], n_skipped: usize) -> Result<Tensor> {
        self.final_norm.forward(ctx, &self.hidden(ctx, ids, n_skipped)?)
    }

    /// As [`ClipEncoder::forward`], not normalized.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn hidden(&self, ctx: &Ctx<'_>, ids: &[u32], n_skipped: usize) -> Result<Tensor> {
        let x = self.embed(ctx, ids)?;
        let n_layers = self.layers.len().saturating_sub(n_skipped);
        for layer in &self.layers[..n_layers] {
            layer.forward(ctx, &x, self.n_heads, true)?;
        }
        Ok(x)
    }

    /// Encodes one text of at most `max_position_embeddings` ids to the normalized last state of its end token, `[1, n_channels]`.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn forward_pooled(&self, ctx: &Ctx<'_>, ids: &[u32]) -> Result<Tensor> {
        let x = self.embed(ctx, ids)?;
        for layer in &self.layers {
            layer.forward(ctx, &x, self.n_heads, true)?;
        }
        self.pool(ctx, &x, ids)
    }

    /// The normalized state of the end token among the states `x` of all.
    fn pool(&self, ctx: &Ctx<'_>, x: &Tensor, ids: &[u32]) -> Result<Tensor> {
        let row = upload_i32(ctx, [self.end_row(ids)].into_iter(), &[1])?;
        let last = ctx.alloc(&[1, x.dim(2)])?;
        ctx.backend.gather_rows(x, &row, &last)?;
        self.final_norm.forward(ctx, &last)
    }

    /// Which token stands for the whole text: the first end token; in configurations from before that was recorded (2), the largest id.
    fn end_row(&self, ids: &[u32]) -> u32 {
        let row = if self.eos == 2 {
            let largest = ids.iter().max();
            ids.iter().position(|id| Some(id) == largest)
        } else {
            ids.iter().position(|id| *id == self.eos)
        };
        row.unwrap_or(0) as u32
    }

    /// Tokens and positions.
    fn embed(&self, ctx: &Ctx<'_>, ids: &[u32]) -> Result<Tensor> {
        let n_tokens = ids.len();
        let id_tensor = upload_i32(ctx, ids.iter().copied(), &[1, n_tokens])?;
        let position_tensor = upload_i32(ctx, 0..n_tokens as u32, &[1, n_tokens])?;
        let x = self.tokens.forward(ctx, &id_tensor)?;
        ctx.backend
            .add(&x, &self.positions.forward(ctx, &position_tensor)?, &x)?;
        Ok(x)
    }
}

impl ClipText {
    pub(crate) fn new(root: &mut Scope<'_>, config: &ClipConfig) -> Self {
        let encoder = ClipEncoder::new(root, config);
        let mut scope = root.at("text_projection");
        Self {
            encoder,
            projection: Linear::without_bias(&mut scope, config.n_channels, config.n_projected),
        }
    }

    /// Encodes one text of at most `max_position_embeddings` ids. `tokens` are taken `n_skipped` layers before the last (1 is the
    /// penultimate, diffusers' default; its `clip_skip` adds to it).
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn forward(&self, ctx: &Ctx<'_>, ids: &[u32], n_skipped: usize) -> Result<ClipOutput> {
        let ClipEncoder { layers, n_heads, .. } = &self.encoder;
        let x = self.encoder.embed(ctx, ids)?;
        let taken_after = layers.len().saturating_sub(n_skipped);
        let mut tokens = None;
        for (layer_idx, layer) in layers.iter().enumerate() {
            if layer_idx == taken_after {
                tokens = Some(copy(ctx, &x)?);
            }
            layer.forward(ctx, &x, *n_heads, true)?;
        }
        let last = self.encoder.pool(ctx, &x, ids)?;
        Ok(ClipOutput {
            tokens: tokens.unwrap_or(x),
            pooled: self.projection.forward(ctx, &last, After::default())?,
        })
    }
}

impl Layer {
    /// Of `n` channels, `n_inner` within.
    pub(super) fn new(
        layer: &mut Scope<'_>,
        [n, n_inner]: [usize; 2],
        activation: Activation,
        eps: f32,
    ) -> Self {
        let norm1 = LayerNorm::new(&mut layer.at("layer_norm1"), n, eps);
        let mut attention = layer.at("self_attn");
        let names = ["q_proj", "k_proj", "v_proj"];
        let qkv = Linear::fused(&mut attention, &names, n, 3 * n, true);
        let out = Linear::new(&mut attention.at("out_proj"), n, n);
        let norm2 = LayerNorm::new(&mut layer.at("layer_norm2"), n, eps);
        let names = ["fc1", "fc2"];
        let mlp = FeedForward::named(&mut layer.at("mlp"), names, n, n_inner, activation);
        Self {
            norm1,
            qkv,
            out,
            norm2,
            mlp,
        }
    }

    /// In place.
    pub(super) fn forward(&self, ctx: &Ctx<'_>, x: &Tensor, n_heads: usize, is_causal: bool) -> Result<()> {
        let h = self.norm1.forward(ctx, x)?;
        let [q, k, v] = split(&self.qkv.forward(ctx, &h, After::default())?)?;
        let how = Attend {
            n_heads,
            is_causal,
            bias: None,
        };
        let h = attend(ctx, &q, &k, &v, how)?;
        self.out.forward_into(ctx, &h, After::residual(x), x)?;
        let h = self.norm2.forward(ctx, x)?;
        self.mlp.forward_into(ctx, &h, After::residual(x), x)
    }
}

pub(super) fn upload_i32(ctx: &Ctx<'_>, values: impl Iterator<Item = u32>, dims: &[usize]) -> Result<Tensor> {
    let bytes: Vec<u8> = values.flat_map(|value| (value as i32).to_le_bytes()).collect();
    ctx.backend.upload(&bytes, dims, DType::I32)
}

fn copy(ctx: &Ctx<'_>, x: &Tensor) -> Result<Tensor> {
    let out = ctx.alloc(x.dims())?;
    ctx.backend.copy(x, &out)?;
    Ok(out)
}
