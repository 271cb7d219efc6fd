//! transformers' `T5EncoderModel`: T5 with plain ReLU layers, T5 v1.1 with gated ones.
//!
//! R1. Scores are not scaled; what a query thinks of a distance is added, the same in every block (its table is in block 0).
//! R2. Every token sees every token, padding included: diffusers gives no mask for the families here.

use super::TRANSFORMERS_KEYS_WITHOUT_EFFECT;
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{After, Ctx, Embedding, Linear, Result, Scope, WeightIdx, split};
use denoised_tensor::{Activation, AttentionSpec, DType, GateOrder, Tensor, WeightKind};

/// Keys of the decoder, of training and of generation.
const KEYS_WITHOUT_EFFECT: &[&str] = &[
    "classifier_dropout",
    "decoder_start_token_id",
    "dropout_rate",
    "eos_token_id",
    "is_encoder_decoder",
    "n_positions",
    "num_decoder_layers",
    "output_past",
    "scale_decoder_outputs",
    "task_specific_params",
    "tie_word_embeddings",
    "use_cache",
    // What transformers derives from `feed_forward_proj` and overwrites when it reads it.
    "dense_act_fn",
    "is_gated_act",
];

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct T5Config {
    pub(crate) vocab_size: usize,
    pub(crate) n_channels: usize,
    n_inner: usize,
    n_layers: usize,
    n_heads: usize,
    head_dim: usize,
    activation: Activation,
    is_gated: bool,
    n_buckets: usize,
    max_distance: usize,
    eps: f32,
}

impl T5Config {
    /// Reads the configuration; missing keys have transformers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        config.only("model_type", &["t5".into()])?;
        config.only("is_decoder", &[false.into()])?;
        let projection = config.str_or("feed_forward_proj", "relu")?;
        let (is_gated, function) = match projection.strip_prefix("gated-") {
            Some(function) => (true, function),
            None => (false, projection),
        };
        let activation = match function {
            "relu" => Activation::Relu,
            // `gated-gelu` has always been this one in T5.
            "gelu" if is_gated => Activation::GeluTanh,
            "gelu" => Activation::GeluErf,
            "gelu_new" | "gelu_pytorch_tanh" => Activation::GeluTanh,
            "silu" | "swish" => Activation::Silu,
            _ => {
                let expected = "relu, gelu, gelu_new or silu, or one of them behind `gated-`";
                return Err(config.wrong("feed_forward_proj", expected).into());
            }
        };
        let read = Self {
            vocab_size: config.usize_or("vocab_size", 32128)?,
            n_channels: config.usize_or("d_model", 512)?,
            n_inner: config.usize_or("d_ff", 2048)?,
            n_layers: config.usize_or("num_layers", 6)?,
            n_heads: config.usize_or("num_heads", 8)?,
            head_dim: config.usize_or("d_kv", 64)?,
            activation,
            is_gated,
            n_buckets: config.usize_or("relative_attention_num_buckets", 32)?,
            max_distance: config.usize_or("relative_attention_max_distance", 128)?,
            eps: config.f64_or("layer_norm_epsilon", 1e-6)? as f32,
        };
        config.within("vocab_size", read.vocab_size, 1..=1 << 22)?;
        config.within("d_model", read.n_channels, 1..=1 << 16)?;
        config.within("d_ff", read.n_inner, 1..=1 << 18)?;
        config.within("num_layers", read.n_layers, 1..=512)?;
        config.within("num_heads", read.n_heads, 1..=1 << 10)?;
        config.within("d_kv", read.head_dim, 1..=1 << 12)?;
        // With fewer there is no distance that has a bucket of its own, and transformers divides by zero.
        config.within("relative_attention_num_buckets", read.n_buckets, 4..=1 << 16)?;
        let n_exact = read.n_buckets / 4;
        config.within(
            "relative_attention_max_distance",
            read.max_distance,
            n_exact + 1..=1 << 24,
        )?;
        if !(read.eps.is_finite() && read.eps >= 0.0) {
            return Err(config
                .wrong("layer_norm_epsilon", "a finite number of at least 0")
                .into());
        }
        let ignored: Vec<&str> = [TRANSFORMERS_KEYS_WITHOUT_EFFECT, KEYS_WITHOUT_EFFECT].concat();
        config.deny_unread(&ignored)?;
        Ok(read)
    }
}

/// The network.
#[derive(Debug)]
pub(crate) struct T5Encoder {
    tokens: Embedding,
    /// `[n_buckets, n_heads]`.
    distances: Embedding,
    blocks: Vec<Block>,
    final_norm: Norm,
    config: T5Config,
}

#[derive(Debug)]
struct Block {
    norm1: Norm,
    qkv: Linear,
    out: Linear,
    norm2: Norm,
    /// The activated half before the other one, where it is gated.
    wi: Linear,
    wo: Linear,
}

impl T5Encoder {
    /// Names of the embedding, of which many files hold one and some both.
    pub(crate) const UNREAD_NAMES: [&'static str; 2] = ["shared.weight", "encoder.embed_tokens.weight"];

    pub(crate) fn new(root: &mut Scope<'_>, config: T5Config) -> Self {
        let n = config.n_channels;
        // Of the two names for one tensor, transformers takes this one where a file has both.
        let tokens = if root.is_stored("encoder.embed_tokens.weight") {
            "encoder.embed_tokens"
        } else {
            "shared"
        };
        let tokens = Embedding::new(&mut root.at(tokens), config.vocab_size, n);
        let mut encoder = root.at("encoder");
        let distances = Embedding::new(
            &mut encoder.at("block.0.layer.0.SelfAttention.relative_attention_bias"),
            config.n_buckets,
            config.n_heads,
        );
        let blocks = (0..config.n_layers)
            .map(|block_idx| Block::new(&mut encoder.at(format_args!("block.{block_idx}.layer")), &config))
            .collect();
        let final_norm = Norm::new(&mut encoder.at("final_layer_norm"), &config);
        Self {
            tokens,
            distances,
            blocks,
            final_norm,
            config,
        }
    }

    /// Encodes one text of any number of ids; `[1, tokens, n_channels]`.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn forward(&self, ctx: &Ctx<'_>, ids: &[u32]) -> Result<Tensor> {
        let id_tensor = upload_i32(ctx, ids.iter().copied(), &[1, ids.len()])?;
        let x = self.tokens.forward(ctx, &id_tensor)?;
        let bias = self.position_bias(ctx, ids.len())?;
        for block in &self.blocks {
            block.forward(ctx, &self.config, &x, &bias)?;
        }
        self.final_norm.forward(ctx, &x)
    }

    /// What is added to the scores: f32 `[1, n_heads, n_tokens, n_tokens]`.
    fn position_bias(&self, ctx: &Ctx<'_>, n_tokens: usize) -> Result<Tensor> {
        let (n_buckets, max_distance) = (self.config.n_buckets, self.config.max_distance);
        // Of the distances `1 - n_tokens..n_tokens`.
        let buckets: Vec<u32> = (0..2 * n_tokens - 1)
            .map(|idx| bucket(idx as i64 - (n_tokens as i64 - 1), n_buckets, max_distance))
            .collect();
        let of_pairs = (0..n_tokens)
            .flat_map(|query| buckets[n_tokens - 1 - query..][..n_tokens].iter())
            .copied();
        let ids = upload_i32(ctx, of_pairs, &[1, n_tokens, n_tokens])?;
        let by_pair = self.distances.forward(ctx, &ids)?;
        let bias = ctx
            .backend
            .alloc(&[1, self.config.n_heads, n_tokens, n_tokens], by_pair.dtype())?;
        ctx.backend.permute(&by_pair, &[0, 3, 1, 2], &bias)?;
        if bias.dtype() == DType::F32 {
            return Ok(bias);
        }
        let wide = ctx.backend.alloc(bias.dims(), DType::F32)?;
        ctx.backend.copy(&bias, &wide)?;
        Ok(wide)
    }
}

impl Block {
    fn new(layers: &mut Scope<'_>, config: &T5Config) -> Self {
        let (n, n_attention) = (config.n_channels, config.n_heads * config.head_dim);
        let mut first = layers.at(0);
        let mut attention = first.at("SelfAttention");
        let qkv = Linear::fused(&mut attention, &["q", "k", "v"], n, 3 * n_attention, false);
        let out = Linear::without_bias(&mut attention.at("o"), n_attention, n);
        let norm1 = Norm::new(&mut first.at("layer_norm"), config);
        let mut second = layers.at(1);
        let mut dense = second.at("DenseReluDense");
        let wi = if config.is_gated {
            Linear::fused(&mut dense, &["wi_0", "wi_1"], n, 2 * config.n_inner, false)
        } else {
            Linear::without_bias(&mut dense.at("wi"), n, config.n_inner)
        };
        let wo = Linear::without_bias(&mut dense.at("wo"), config.n_inner, n);
        let norm2 = Norm::new(&mut second.at("layer_norm"), config);
        Self {
            norm1,
            qkv,
            out,
            norm2,
            wi,
            wo,
        }
    }

    /// In place.
    fn forward(&self, ctx: &Ctx<'_>, config: &T5Config, x: &Tensor, bias: &Tensor) -> Result<()> {
        let h = self.norm1.forward(ctx, x)?;
        let [q, k, v] = split(&self.qkv.forward(ctx, &h, After::default())?)?;
        let spec = AttentionSpec {
            n_heads: config.n_heads,
            n_kv_heads: config.n_heads,
            scale: 1.0,
            is_causal: false,
            bias: Some(bias),
        };
        let h = ctx.alloc(q.dims())?;
        ctx.backend.attention(&q, &k, &v, &spec, &h)?;
        self.out.forward_into(ctx, &h, After::residual(x), x)?;

        let h = self.norm2.forward(ctx, x)?;
        let h = if config.is_gated {
            let both = self.wi.forward(ctx, &h, After::default())?;
            let gated = ctx.alloc_like(&both, config.n_inner)?;
            let order = GateOrder::FirstActivated;
            ctx.backend.gated(&both, config.activation, order, &gated)?;
            gated
        } else {
            self.wi.forward(ctx, &h, After::activation(config.activation))?
        };
        self.wo.forward_into(ctx, &h, After::residual(x), x)
    }
}

/// Root-mean-square norm of all channels.
#[derive(Debug)]
struct Norm {
    weight: WeightIdx,
    n_channels: usize,
    eps: f32,
}

impl Norm {
    fn new(scope: &mut Scope<'_>, config: &T5Config) -> Self {
        Self {
            weight: scope.weight(&["weight".to_owned()], WeightKind::Vector, &[config.n_channels]),
            n_channels: config.n_channels,
            eps: config.eps,
        }
    }

    fn forward(&self, ctx: &Ctx<'_>, x: &Tensor) -> Result<Tensor> {
        let out = ctx.alloc(x.dims())?;
        let weight = Some(ctx.weight(self.weight));
        ctx.backend.rms_norm(x, weight, self.n_channels, self.eps, &out)?;
        Ok(out)
    }
}

/// Row of the table for a key `distance` tokens behind the query: half of the rows for each direction, and of these half for a distance
/// each, the others for ranges that grow by a factor up to `max_distance`. In f32, since some limits are hit exactly.
fn bucket(distance: i64, n_buckets: usize, max_distance: usize) -> u32 {
    let n_each = n_buckets / 2;
    let first = if distance > 0 { n_each } else { 0 };
    let distance = distance.unsigned_abs() as usize;
    let n_exact = n_each / 2;
    if distance < n_exact {
        return (first + distance) as u32;
    }
    let rounded_ln = |x: f64| x.ln() as f32;
    let growth = rounded_ln(max_distance as f64 / n_exact as f64);
    let ln = rounded_ln(f64::from(distance as f32 / n_exact as f32));
    let far = ln / growth * (n_each - n_exact) as f32;
    (first + (n_exact + far as usize).min(n_each - 1)) as u32
}

fn upload_i32(ctx: &Ctx<'_>, values: impl Iterator<Item = u32>, dims: &[usize]) -> Result<Tensor> {
    let bytes: Vec<u8> = values.flat_map(|value| (value as i32).to_le_bytes()).collect();
    ctx.backend.upload(&bytes, dims, DType::I32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use denoised_cpu::{CpuBackend, CpuOptions};
    use denoised_nn::Declare;
    use denoised_tensor::{Backend, PrepareInput, SourceDType, SourceError, SourceTensor, WeightSource};
    use serde_json::Value;
    use std::{borrow::Cow, fs, path::Path};

    // `tests/tables/make_t5_encoder.py`.
    fn table() -> Value {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tables/t5_encoder.json");
        serde_json::from_str(&fs::read_to_string(path).expect("the table is part of the crate"))
            .expect("JSON")
    }

    fn config_of(value: &Value) -> Config {
        let map = value.as_object().expect("an object").clone();
        Config::new(Path::new("config.json"), map)
    }

    fn numbers(value: &Value) -> Vec<f64> {
        let list = value.as_array().expect("a list").iter();
        list.map(|number| number.as_f64().expect("a number")).collect()
    }

    /// The weights of a case, by name.
    struct Weights<'a>(&'a Value);

    impl WeightSource for Weights<'_> {
        fn layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), SourceError> {
            let shape = &self.0[name]["shape"];
            if shape.is_null() {
                return Err(SourceError(format!("there is no {name}")));
            }
            let shape = numbers(shape).into_iter().map(|extent| extent as usize);
            Ok((SourceDType::BF16, shape.collect()))
        }

        fn tensor(&self, name: &str) -> Result<SourceTensor<'_>, SourceError> {
            let (dtype, shape) = self.layout(name)?;
            let digits = self.0[name]["bf16"].as_str().expect("digits");
            let bits = (0..digits.len() / 4).map(|idx| &digits[4 * idx..][..4]);
            let bits = bits.map(|four| u16::from_str_radix(four, 16).expect("hexadecimal"));
            Ok(SourceTensor {
                dtype,
                shape,
                bytes: Cow::Owned(bits.flat_map(u16::to_le_bytes).collect()),
            })
        }
    }

    #[test]
    fn hidden_states_are_transformers_hidden_states() {
        for case in table()["cases"].as_array().expect("cases") {
            let weights = Weights(&case["weights"]);
            let names = case["weights"].as_object().expect("weights").keys().cloned();
            let mut declare = Declare::new(names);
            let config = T5Config::read(&config_of(&case["config"])).expect("a configuration");
            let encoder = T5Encoder::new(&mut declare.at(""), config);
            let backend = CpuBackend::new(CpuOptions {
                n_threads: 1,
                ..CpuOptions::default()
            });
            let backend = backend.expect("a backend of one thread");
            let input = PrepareInput::Build(&weights);
            let prepared = backend.prepare(&declare.finish(), input, &mut |_, _| {});
            let ctx = Ctx {
                backend: &backend,
                weights: &prepared.expect("the weights are prepared").weights,
                dtype: DType::F32,
            };
            let outputs = case["outputs"].as_array().expect("a list");
            for (ids, output) in case["ids"].as_array().expect("a list").iter().zip(outputs) {
                let ids: Vec<u32> = numbers(ids).into_iter().map(|id| id as u32).collect();
                let hidden = encoder.forward(&ctx, &ids).expect("a forward");
                let ours = ctx.download_f32(&hidden).expect("its numbers");
                let theirs = numbers(output);
                assert_eq!(ours.len(), theirs.len());
                let square = |x: f64| x * x;
                let difference: f64 = ours
                    .iter()
                    .zip(&theirs)
                    .map(|(a, b)| square(f64::from(*a) - b))
                    .sum();
                let norm: f64 = theirs.iter().copied().map(square).sum();
                let error = (difference / norm).sqrt();
                assert!(error < 2e-6, "{error:e} with {}", case["config"]);
            }
        }
    }

    #[test]
    fn buckets_are_transformers_buckets() {
        for row in table()["buckets"].as_array().expect("a list") {
            let [n_buckets, max_distance] = [0, 1].map(|idx| row[idx].as_u64().expect("a number") as usize);
            let theirs = numbers(&row[2]).into_iter().map(|bucket| bucket as u32);
            let ours = (-600..=600).map(|distance| bucket(distance, n_buckets, max_distance));
            assert!(ours.eq(theirs), "{n_buckets} buckets up to {max_distance}");
        }
    }

    #[test]
    fn configurations_that_are_not_carried_out_are_refused_by_name() {
        for (config, word) in [
            (r#"{"model_type": "umt5"}"#, "model_type"),
            (r#"{"is_decoder": true}"#, "is_decoder"),
            (r#"{"feed_forward_proj": "gated-tanh"}"#, "feed_forward_proj"),
            (
                r#"{"relative_attention_num_buckets": 3}"#,
                "relative_attention_num_buckets",
            ),
            (
                r#"{"relative_attention_max_distance": 8}"#,
                "relative_attention_max_distance",
            ),
            (r#"{"layer_norm_epsilon": -1}"#, "layer_norm_epsilon"),
            (r#"{"num_heads": 0}"#, "num_heads"),
            (r#"{"scale_scores": true}"#, "scale_scores"),
        ] {
            let value = serde_json::from_str(config).expect("JSON");
            let error = T5Config::read(&config_of(&value)).expect_err("it is refused");
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
