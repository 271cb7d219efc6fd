//! The language models of Qwen3 and Qwen2.5-VL as text encoders: transformers' `Qwen3Model` and `Qwen2_5_VLTextModel`.
//!
//! R1. Hidden state 0 is the embedded text, state `i` what `i` layers make of it; that of all layers is normalized.
//! R2. A token sees the text up to itself, padding behind the text sees all of the text and no padding. So what a token of the text
//!     becomes does not depend on the padding, which can be left out altogether where nobody reads it.
//! R3. A channel pair of a head turns by one of three positions of its token; they differ in pictures only.

use super::TRANSFORMERS_KEYS_WITHOUT_EFFECT;
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{After, Ctx, Embedding, Linear, Result, Scope, WeightIdx};
use denoised_tensor::{Activation, AttentionSpec, DType, GateOrder, RopeStyle, Tensor, WeightKind};
use serde_json::{Map, Value};

const KEYS_WITHOUT_EFFECT: &[&str] = &[
    "eos_token_id",
    "image_token_id",
    // Rotary positions have no end here, and windows are refused where they are used.
    "max_position_embeddings",
    "max_window_layers",
    "sliding_window",
    "tie_word_embeddings",
    "use_cache",
    "video_token_id",
    "vision_end_token_id",
    "vision_start_token_id",
    "vision_token_id",
];
/// Positions of a token: time, row, column.
pub(super) type Position = [u32; 3];

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct QwenConfig {
    pub(crate) vocab_size: usize,
    pub(crate) n_channels: usize,
    pub(crate) n_layers: usize,
    n_inner: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    eps: f32,
    /// Base of the frequencies of rotary positions.
    theta: f64,
    /// Which of the three positions each channel pair turns by.
    pair_axes: Vec<u8>,
    /// Qwen3: queries and keys are normalized.
    has_qk_norm: bool,
    has_qkv_bias: bool,
    has_out_bias: bool,
}

impl QwenConfig {
    /// Reads the configuration of a `Qwen3Model` or `Qwen3ForCausalLM`; missing keys have transformers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read_qwen3(config: &Config) -> Result<Self, ModelError> {
        config.only("model_type", &["qwen3".into()])?;
        let has_bias = config.bool_or("attention_bias", false)?;
        let rope = Rope::read(config, 10_000.0, false)?;
        let n_heads = config.usize_or("num_attention_heads", 32)?;
        let read = Self {
            vocab_size: config.usize_or("vocab_size", 151_936)?,
            n_channels: config.usize_or("hidden_size", 4096)?,
            n_inner: config.usize_or("intermediate_size", 22_016)?,
            n_layers: config.usize_or("num_hidden_layers", 32)?,
            n_heads,
            n_kv_heads: config.opt_usize("num_key_value_heads")?.unwrap_or(
                match config.has("num_key_value_heads") {
                    true => n_heads,
                    false => 32,
                },
            ),
            head_dim: config.usize_or("head_dim", 128)?,
            eps: config.f64_or("rms_norm_eps", 1e-6)? as f32,
            theta: rope.theta,
            pair_axes: Vec::new(),
            has_qk_norm: true,
            has_qkv_bias: has_bias,
            has_out_bias: has_bias,
        };
        read.checked(config, &rope)
    }

    /// Reads the configuration of the language model in a `Qwen2_5_VLForConditionalGeneration`: `text_config`, or the whole where that is
    /// absent; missing keys have transformers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read_qwen2_5_vl(config: &Config) -> Result<Self, ModelError> {
        config.only("model_type", &["qwen2_5_vl".into()])?;
        match config.value("text_config") {
            None | Some(Value::Null) => {
                config.value("vision_config");
                Self::read_text(config)
            }
            Some(Value::Object(text)) => {
                // What transformers wrote beside it once is not read.
                Self::read_text(&Config::new(config.path(), text.clone()))
            }
            Some(_) => Err(config.wrong("text_config", "an object").into()),
        }
    }

    fn read_text(config: &Config) -> Result<Self, ModelError> {
        config.only("model_type", &["qwen2_5_vl_text".into(), "qwen2_5_vl".into()])?;
        let rope = Rope::read(config, 1_000_000.0, true)?;
        let n_heads = config.usize_or("num_attention_heads", 64)?;
        let n_channels = config.usize_or("hidden_size", 8192)?;
        let read = Self {
            vocab_size: config.usize_or("vocab_size", 152_064)?,
            n_channels,
            n_inner: config.usize_or("intermediate_size", 29_568)?,
            n_layers: config.usize_or("num_hidden_layers", 80)?,
            n_heads,
            n_kv_heads: config.opt_usize("num_key_value_heads")?.unwrap_or(
                match config.has("num_key_value_heads") {
                    true => n_heads,
                    false => 8,
                },
            ),
            head_dim: n_channels.checked_div(n_heads).unwrap_or(0),
            eps: config.f64_or("rms_norm_eps", 1e-5)? as f32,
            theta: rope.theta,
            pair_axes: Vec::new(),
            has_qk_norm: false,
            has_qkv_bias: true,
            has_out_bias: false,
        };
        if n_heads == 0 || !n_channels.is_multiple_of(n_heads) {
            return Err(config
                .wrong("num_attention_heads", "a divisor of hidden_size")
                .into());
        }
        read.checked(config, &rope)
    }

    fn checked(mut self, config: &Config, rope: &Rope) -> Result<Self, ModelError> {
        config.only("hidden_act", &["silu".into(), "swish".into()])?;
        config.only("use_sliding_window", &[false.into(), Value::Null])?;
        if let Some(types) = config.strs("layer_types")?
            && types.iter().any(|kind| *kind != "full_attention")
        {
            return Err(config
                .wrong("layer_types", "full_attention in every layer")
                .into());
        }
        config.within("vocab_size", self.vocab_size, 1..=1 << 22)?;
        config.within("hidden_size", self.n_channels, 1..=1 << 16)?;
        config.within("intermediate_size", self.n_inner, 1..=1 << 18)?;
        config.within("num_hidden_layers", self.n_layers, 1..=512)?;
        config.within("num_attention_heads", self.n_heads, 1..=1 << 12)?;
        config.within("num_key_value_heads", self.n_kv_heads, 1..=1 << 12)?;
        config.within("head_dim", self.head_dim, 2..=1 << 12)?;
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(config
                .wrong("num_key_value_heads", "a divisor of num_attention_heads")
                .into());
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(config.wrong("head_dim", "an even number").into());
        }
        if !(self.eps.is_finite() && self.eps >= 0.0) {
            return Err(config
                .wrong("rms_norm_eps", "a finite number of at least 0")
                .into());
        }
        self.pair_axes = rope.pair_axes(config, self.head_dim / 2)?;
        config.deny_unread(&[TRANSFORMERS_KEYS_WITHOUT_EFFECT, KEYS_WITHOUT_EFFECT].concat())?;
        Ok(self)
    }

    /// Angles of rotary positions: cosines and sines, f32 `[tokens, head_dim / 2]`.
    fn rotary(&self, ctx: &Ctx<'_>, positions: &[Position]) -> Result<[Tensor; 2]> {
        let n_pairs = self.head_dim / 2;
        // In f32 step by step, as transformers computes it.
        let frequencies: Vec<f32> = (0..n_pairs)
            .map(|pair| {
                let exponent = (2 * pair) as f32 / self.head_dim as f32;
                1.0 / self.theta.powf(f64::from(exponent)) as f32
            })
            .collect();
        let angles = positions.iter().flat_map(|position| {
            let pairs = frequencies.iter().zip(&self.pair_axes);
            pairs.map(|(frequency, axis)| f64::from(position[usize::from(*axis)] as f32 * frequency))
        });
        let (cosines, sines): (Vec<f32>, Vec<f32>) = angles.map(|a| (a.cos() as f32, a.sin() as f32)).unzip();
        let dims = [positions.len(), n_pairs];
        Ok([ctx.upload_f32(&cosines, &dims)?, ctx.upload_f32(&sines, &dims)?])
    }
}

/// Settings of rotary positions.
struct Rope {
    theta: f64,
    sections: Option<Vec<usize>>,
}

impl Rope {
    /// Of `rope_parameters`, or as transformers 4 wrote it of `rope_theta` and `rope_scaling`.
    fn read(config: &Config, default_theta: f64, may_have_sections: bool) -> Result<Self, ModelError> {
        let plain_theta = config.f64_or("rope_theta", default_theta)?;
        let object = |key: &str| match config.value(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map.clone())),
            Some(_) => Err(config.wrong(key, "an object or null")),
        };
        let (parameters, scaling) = (object("rope_parameters")?, object("rope_scaling")?);
        let inner = Config::new(config.path(), scaling.or(parameters).unwrap_or_else(Map::new));
        let kinds: &[Value] = match may_have_sections {
            true => &["default".into(), "mrope".into()],
            false => &["default".into()],
        };
        inner.only("rope_type", kinds)?;
        inner.only("type", kinds)?;
        let theta = inner.f64_or("rope_theta", plain_theta)?;
        let sections = match may_have_sections {
            true => Some(inner.usizes("mrope_section")?.unwrap_or_else(|| vec![16, 24, 24])),
            false => None,
        };
        inner.deny_unread(&[])?;
        if !(theta.is_finite() && theta > 1.0) {
            return Err(inner.wrong("rope_theta", "a finite number above 1").into());
        }
        Ok(Self { theta, sections })
    }

    fn pair_axes(&self, config: &Config, n_pairs: usize) -> Result<Vec<u8>, ModelError> {
        let Some(sections) = &self.sections else {
            return Ok(vec![0; n_pairs]);
        };
        let mut axes = Vec::with_capacity(n_pairs);
        for (n, axis) in sections.iter().zip([0, 1, 2].into_iter().cycle()) {
            axes.extend(std::iter::repeat_n(axis, (*n).min(n_pairs + 1)));
        }
        if axes.len() == n_pairs && sections.len() <= n_pairs {
            return Ok(axes);
        }
        let expected = format!("mrope_section with {n_pairs} channel pairs in all, half of a head");
        let key = if config.has("rope_parameters") {
            "rope_parameters"
        } else {
            "rope_scaling"
        };
        Err(config.wrong(key, &expected).into())
    }
}

/// The network, as far as it is used.
#[derive(Debug)]
pub(crate) struct QwenEncoder {
    tokens: Embedding,
    layers: Vec<Layer>,
    /// Behind the last layer, if that is used.
    final_norm: Option<Norm>,
    config: QwenConfig,
}

#[derive(Debug)]
struct Layer {
    norm1: Norm,
    qkv: Linear,
    /// Of the heads of queries and keys.
    qk_norms: Option<[Norm; 2]>,
    out: Linear,
    norm2: Norm,
    gate_up: Linear,
    down: Linear,
}

impl QwenEncoder {
    /// The network up to hidden state `last_state <= n_layers`, with names as `ForCausalLM`, the bare model or Qwen2.5-VL have them.
    pub(crate) fn new(root: &mut Scope<'_>, config: QwenConfig, last_state: usize) -> Self {
        let place = ["", "model.", "model.language_model.", "language_model.model."];
        let is_stored = |place: &&str| root.is_stored(&format!("{place}embed_tokens.weight"));
        match place
            .into_iter()
            .find(is_stored)
            .unwrap_or("model.")
            .strip_suffix('.')
        {
            Some(place) => Self::at(&mut root.at(place), config, last_state),
            None => Self::at(root, config, last_state),
        }
    }

    /// Tensors that are not read where the network is used up to hidden state `last_state`; an entry may end with `*` for any text.
    pub(crate) fn unread_names(config: &QwenConfig, last_state: usize) -> Vec<String> {
        let mut names = vec![
            "lm_head.weight".to_owned(),
            "language_model.lm_head.weight".to_owned(),
        ];
        for place in ["", "model.", "model.language_model.", "language_model.model."] {
            names.extend((last_state..config.n_layers).map(|idx| format!("{place}layers.{idx}.*")));
            if last_state < config.n_layers {
                names.push(format!("{place}norm.weight"));
            }
        }
        names
    }

    fn at(root: &mut Scope<'_>, config: QwenConfig, last_state: usize) -> Self {
        let n = config.n_channels;
        let n_used = last_state.min(config.n_layers);
        let tokens = Embedding::new(&mut root.at("embed_tokens"), config.vocab_size, n);
        let layers = (0..n_used)
            .map(|layer_idx| Layer::new(&mut root.at(format_args!("layers.{layer_idx}")), &config))
            .collect();
        let final_norm = (n_used == config.n_layers).then(|| Norm::new(&mut root.at("norm"), n, config.eps));
        Self {
            tokens,
            layers,
            final_norm,
            config,
        }
    }

    /// Encodes one text, of whose ids the first `n_text` are no padding; each of `states`, in their order, as `[1, tokens, n_channels]`.
    ///
    /// # Errors
    /// The device's, an `n_text` that is not in `1..=ids.len()`, or a state that is not there.
    pub(crate) fn forward(
        &self,
        ctx: &Ctx<'_>,
        ids: &[u32],
        n_text: usize,
        states: &[usize],
    ) -> Result<Vec<Tensor>> {
        let positions: Vec<Position> = (0..ids.len() as u32).map(|at| [at; 3]).collect();
        let x = self.embed(ctx, ids)?;
        self.forward_embedded(ctx, x, &positions, n_text, states)
    }

    /// `[1, tokens, n_channels]`.
    pub(super) fn embed(&self, ctx: &Ctx<'_>, ids: &[u32]) -> Result<Tensor> {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| (*id as i32).to_le_bytes()).collect();
        let ids = ctx.backend.upload(&bytes, &[1, ids.len()], DType::I32)?;
        self.tokens.forward(ctx, &ids)
    }

    /// As [`QwenEncoder::forward`], of embedded tokens, which are overwritten, at `positions`.
    pub(super) fn forward_embedded(
        &self,
        ctx: &Ctx<'_>,
        x: Tensor,
        positions: &[Position],
        n_text: usize,
        states: &[usize],
    ) -> Result<Vec<Tensor>> {
        let [cosines, sines] = self.config.rotary(ctx, positions)?;
        let n_layers = states.iter().copied().max().unwrap_or(0).min(self.layers.len());
        let mut taken: Vec<Option<Tensor>> = vec![None; states.len()];
        for done in 0..=n_layers {
            if let Some(first) = states.iter().position(|state| *state == done) {
                let state = match &self.final_norm {
                    Some(norm) if done == self.layers.len() => norm.forward(ctx, &x)?,
                    _ if done == n_layers => x.clone(),
                    _ => copy(ctx, &x)?,
                };
                for (slot, wanted) in taken.iter_mut().zip(states).skip(first) {
                    if *wanted == done {
                        *slot = Some(state.clone());
                    }
                }
            }
            if let Some(layer) = self.layers.get(done).filter(|_| done < n_layers) {
                layer.forward(ctx, &self.config, &x, [&cosines, &sines], n_text)?;
            }
        }
        let all: Option<Vec<Tensor>> = taken.into_iter().collect();
        all.ok_or_else(|| denoised_tensor::TensorError::Shape {
            op: "hidden states",
            detail: format!("{states:?} of {} layers", self.layers.len()),
        })
    }
}

impl Layer {
    fn new(scope: &mut Scope<'_>, config: &QwenConfig) -> Self {
        let (n, eps) = (config.n_channels, config.eps);
        let (n_q, n_kv) = (
            config.n_heads * config.head_dim,
            config.n_kv_heads * config.head_dim,
        );
        let norm1 = Norm::new(&mut scope.at("input_layernorm"), n, eps);
        let mut attention = scope.at("self_attn");
        let names = ["q_proj", "k_proj", "v_proj"];
        let qkv = Linear::fused(&mut attention, &names, n, n_q + 2 * n_kv, config.has_qkv_bias);
        let out = Linear::fused(&mut attention, &["o_proj"], n_q, n, config.has_out_bias);
        let qk_norms = config.has_qk_norm.then(|| {
            ["q_norm", "k_norm"].map(|name| Norm::new(&mut attention.at(name), config.head_dim, eps))
        });
        let norm2 = Norm::new(&mut scope.at("post_attention_layernorm"), n, eps);
        let mut mlp = scope.at("mlp");
        let gate_up = Linear::fused(&mut mlp, &["gate_proj", "up_proj"], n, 2 * config.n_inner, false);
        let down = Linear::without_bias(&mut mlp.at("down_proj"), config.n_inner, n);
        Self {
            norm1,
            qkv,
            qk_norms,
            out,
            norm2,
            gate_up,
            down,
        }
    }

    /// In place.
    fn forward(
        &self,
        ctx: &Ctx<'_>,
        config: &QwenConfig,
        x: &Tensor,
        [cosines, sines]: [&Tensor; 2],
        n_text: usize,
    ) -> Result<()> {
        let (n_q, n_kv) = (
            config.n_heads * config.head_dim,
            config.n_kv_heads * config.head_dim,
        );
        let h = self.norm1.forward(ctx, x)?;
        let qkv = self.qkv.forward(ctx, &h, After::default())?;
        let q = qkv.narrow(2, 0, n_q)?;
        let k = qkv.narrow(2, n_q, n_kv)?.narrow(1, 0, n_text)?;
        let v = qkv.narrow(2, n_q + n_kv, n_kv)?.narrow(1, 0, n_text)?;
        if let Some([q_norm, k_norm]) = &self.qk_norms {
            q_norm.apply(ctx, &q)?;
            k_norm.apply(ctx, &k)?;
        }
        ctx.backend.rope(&q, cosines, sines, RopeStyle::Halves, &q)?;
        let of_text = [cosines.narrow(0, 0, n_text)?, sines.narrow(0, 0, n_text)?];
        ctx.backend
            .rope(&k, &of_text[0], &of_text[1], RopeStyle::Halves, &k)?;
        let h = ctx.alloc(q.dims())?;
        let spec = |is_causal| AttentionSpec {
            n_heads: config.n_heads,
            n_kv_heads: config.n_kv_heads,
            scale: (1.0 / (config.head_dim as f64).sqrt()) as f32,
            is_causal,
            bias: None,
        };
        let n_padding = q.dim(1) - n_text;
        let text = (q.narrow(1, 0, n_text)?, h.narrow(1, 0, n_text)?);
        ctx.backend.attention(&text.0, &k, &v, &spec(true), &text.1)?;
        if n_padding > 0 {
            let padding = (q.narrow(1, n_text, n_padding)?, h.narrow(1, n_text, n_padding)?);
            ctx.backend
                .attention(&padding.0, &k, &v, &spec(false), &padding.1)?;
        }
        self.out.forward_into(ctx, &h, After::residual(x), x)?;

        let h = self.norm2.forward(ctx, x)?;
        let halves = self.gate_up.forward(ctx, &h, After::default())?;
        let inner = ctx.alloc_like(&halves, config.n_inner)?;
        ctx.backend
            .gated(&halves, Activation::Silu, GateOrder::FirstActivated, &inner)?;
        self.down.forward_into(ctx, &inner, After::residual(x), x)
    }
}

/// Root-mean-square norm of the last dimension, or of consecutive parts of it.
#[derive(Debug)]
pub(super) struct Norm {
    weight: WeightIdx,
    group_len: usize,
    eps: f32,
}

impl Norm {
    pub(super) fn new(scope: &mut Scope<'_>, group_len: usize, eps: f32) -> Self {
        Self {
            weight: scope.weight(&["weight".to_owned()], WeightKind::Vector, &[group_len]),
            group_len,
            eps,
        }
    }

    pub(super) fn forward(&self, ctx: &Ctx<'_>, x: &Tensor) -> Result<Tensor> {
        let out = ctx.alloc(x.dims())?;
        let weight = Some(ctx.weight(self.weight));
        ctx.backend.rms_norm(x, weight, self.group_len, self.eps, &out)?;
        Ok(out)
    }

    /// In place.
    fn apply(&self, ctx: &Ctx<'_>, x: &Tensor) -> Result<()> {
        let weight = Some(ctx.weight(self.weight));
        ctx.backend.rms_norm(x, weight, self.group_len, self.eps, x)
    }
}

fn copy(ctx: &Ctx<'_>, x: &Tensor) -> Result<Tensor> {
    let out = ctx.alloc(x.dims())?;
    ctx.backend.copy(x, &out)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tables::{TestModel, config_of, ids_of, numbers, relative_error, table};

    // `tests/tables/make_qwen_encoder.py`.
    const TABLE: &str = "qwen_encoder.json";

    fn read(value: &Value) -> Result<QwenConfig, ModelError> {
        let config = config_of(value);
        match value["model_type"].as_str() {
            Some("qwen3") => QwenConfig::read_qwen3(&config),
            _ => QwenConfig::read_qwen2_5_vl(&config),
        }
    }

    #[test]
    fn hidden_states_are_transformers_hidden_states() {
        let mut worst: f64 = 0.0;
        for case in table(TABLE)["cases"].as_array().expect("cases") {
            let config = read(&case["config"]).expect("a configuration");
            let n_layers = config.n_layers;
            let whole = TestModel::new(&case["weights"], |scope| {
                QwenEncoder::new(scope, config.clone(), n_layers)
            });
            let part = TestModel::new(&case["weights"], |scope| {
                QwenEncoder::new(scope, config.clone(), n_layers - 1)
            });
            for run in case["runs"].as_array().expect("a list") {
                let ids = ids_of(&run["ids"]);
                let n_text = run["n_text"].as_u64().expect("a number") as usize;
                for (state, theirs) in run["states"].as_array().expect("a list").iter().enumerate() {
                    let theirs = numbers(theirs);
                    let mut check =
                        |model: &TestModel<QwenEncoder>, n_ids: usize, n_text: usize, states: &[usize]| {
                            let ours = model.run(|encoder, ctx| {
                                let mut all = encoder.forward(ctx, &ids[..n_ids], n_text, states)?;
                                Ok(all.swap_remove(0))
                            });
                            let n_values = theirs.len() / ids.len() * n_ids;
                            worst = worst.max(relative_error(&ours, &theirs[..n_values]));
                        };
                    check(&whole, ids.len(), n_text, &[state]);
                    check(&whole, ids.len(), n_text, &[state, n_layers, 0, state]);
                    // Without the padding, what remains is the same.
                    check(&whole, n_text, n_text, &[state]);
                    if state < n_layers {
                        check(&part, ids.len(), n_text, &[state, 0]);
                    }
                }
            }
        }
        assert!(worst < 3e-6, "{worst:e}");
    }

    #[test]
    fn published_configurations_are_read() {
        let qwen3 = r#"{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
            "intermediate_size": 9728, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null,
            "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}"#;
        let read_text = |text: &str| read(&serde_json::from_str(text).expect("JSON")).expect("it is read");
        let config = read_text(qwen3);
        assert_eq!(
            (config.n_channels, config.n_layers, config.head_dim),
            (2560, 36, 128)
        );
        assert!(config.theta == 1e6 && config.pair_axes == [0; 64] && !config.has_qkv_bias);
        let text = r#""attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
            "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000,
            "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
            "rope_theta": 1000000.0, "sliding_window": 32768, "torch_dtype": "bfloat16", "use_cache": true,
            "use_sliding_window": false, "vocab_size": 152064"#;
        let flat = format!(
            r#"{{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "image_token_id": 151655,
            "video_token_id": 151656, "vision_token_id": 151654, "tie_word_embeddings": false, "transformers_version": "4.41.2",
            "vision_config": {{}}, {text}}}"#
        );
        let nested = format!(
            r#"{{"model_type": "qwen2_5_vl", "text_config": {{"model_type": "qwen2_5_vl_text", "image_token_id": null, {text}}}, {text}}}"#
        );
        for config in [read_text(&flat), read_text(&nested)] {
            assert_eq!(
                (config.n_channels, config.n_layers, config.head_dim),
                (3584, 28, 128)
            );
            let axes: Vec<usize> = (0..3)
                .map(|axis| config.pair_axes.iter().filter(|a| **a == axis).count())
                .collect();
            assert!(
                config.theta == 1e6 && axes == [16, 24, 24] && config.has_qkv_bias && !config.has_out_bias
            );
        }
    }

    #[test]
    fn configurations_that_are_not_carried_out_are_refused_by_name() {
        for (config, word) in [
            (r#"{"model_type": "qwen2"}"#, "model_type"),
            (r#"{"model_type": "qwen3", "hidden_act": "gelu"}"#, "hidden_act"),
            (
                r#"{"model_type": "qwen3", "use_sliding_window": true}"#,
                "use_sliding_window",
            ),
            (
                r#"{"model_type": "qwen3", "layer_types": ["sliding_attention"]}"#,
                "layer_types",
            ),
            (
                r#"{"model_type": "qwen3", "num_key_value_heads": 5}"#,
                "num_key_value_heads",
            ),
            (r#"{"model_type": "qwen3", "head_dim": 3}"#, "head_dim"),
            (
                r#"{"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn"}}"#,
                "rope_type",
            ),
            (
                r#"{"model_type": "qwen3", "rope_scaling": {"rope_type": "default", "factor": 2}}"#,
                "factor",
            ),
            (r#"{"model_type": "qwen3", "rope_theta": 0}"#, "rope_theta"),
            (r#"{"model_type": "qwen3", "rms_norm_eps": -1}"#, "rms_norm_eps"),
            (r#"{"model_type": "qwen3", "num_experts": 8}"#, "num_experts"),
            (
                r#"{"model_type": "qwen2_5_vl", "text_config": {"rope_scaling": {"mrope_section": [1, 2]}}}"#,
                "mrope_section",
            ),
            (
                r#"{"model_type": "qwen2_5_vl", "text_config": {"num_attention_heads": 0}}"#,
                "num_attention_heads",
            ),
            (r#"{"model_type": "qwen2_5_vl", "text_config": 1}"#, "text_config"),
        ] {
            let value = serde_json::from_str(config).expect("JSON");
            let error = read(&value).expect_err("it is refused").to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
