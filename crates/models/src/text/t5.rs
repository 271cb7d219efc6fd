//! transformers' `T5EncoderModel` and `UMT5EncoderModel`: T5 with plain ReLU layers, T5 v1.1 and UMT5 with gated ones.
//!
//! R1. Scores are not scaled; what a query thinks of a distance is added: in T5 the same in every block (its table is in block 0), in
//!     UMT5 each block has a table of its own.
//! R2. Every token sees the first `n_seen` tokens: all of them, padding included, where diffusers gives no mask; those of the text where
//!     it does. What a token becomes does not depend on tokens that are not seen, so that padding can be left out altogether then.

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
    // Written for UMT5; transformers has no such switch.
    "scalable_attention",
    "scale_decoder_outputs",
    "task_specific_params",
    "tie_word_embeddings",
    "tokenizer_class",
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
    /// UMT5: a table of distances in every block.
    has_own_distances: bool,
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
        config.only("model_type", &["t5".into(), "umt5".into()])?;
        config.only("is_decoder", &[false.into()])?;
        let is_umt5 = config.str_or("model_type", "t5")? == "umt5";
        let of = |t5, umt5| if is_umt5 { umt5 } else { t5 };
        let default_projection = if is_umt5 { "gated-gelu" } else { "relu" };
        let projection = config.str_or("feed_forward_proj", default_projection)?;
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
            vocab_size: config.usize_or("vocab_size", of(32128, 250_112))?,
            n_channels: config.usize_or("d_model", 512)?,
            n_inner: config.usize_or("d_ff", of(2048, 1024))?,
            n_layers: config.usize_or("num_layers", of(6, 8))?,
            n_heads: config.usize_or("num_heads", of(8, 6))?,
            head_dim: config.usize_or("d_kv", 64)?,
            activation,
            is_gated,
            has_own_distances: is_umt5,
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
    blocks: Vec<Block>,
    final_norm: Norm,
    config: T5Config,
}

#[derive(Debug)]
struct Block {
    /// `[n_buckets, n_heads]`; without it, that of the block before counts.
    distances: Option<Embedding>,
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
        let blocks = (0..config.n_layers)
            .map(|block_idx| {
                let has_distances = block_idx == 0 || config.has_own_distances;
                let mut layers = encoder.at(format_args!("block.{block_idx}.layer"));
                Block::new(&mut layers, &config, has_distances)
            })
            .collect();
        let final_norm = Norm::new(&mut encoder.at("final_layer_norm"), &config);
        Self {
            tokens,
            blocks,
            final_norm,
            config,
        }
    }

    /// Encodes one text of any number of ids, all of which see each other; `[1, tokens, n_channels]`.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn forward(&self, ctx: &Ctx<'_>, ids: &[u32]) -> Result<Tensor> {
        self.forward_seen(ctx, ids, ids.len())
    }

    /// As [`T5Encoder::forward`], but only the first `n_seen` tokens are seen (by all): what transformers makes of a text with a mask of
    /// its padding.
    ///
    /// # Errors
    /// The device's, or an `n_seen` that is not in `1..=ids.len()`.
    pub(crate) fn forward_seen(&self, ctx: &Ctx<'_>, ids: &[u32], n_seen: usize) -> Result<Tensor> {
        let n_tokens = ids.len();
        let id_tensor = upload_i32(ctx, ids.iter().copied(), &[1, n_tokens])?;
        let x = self.tokens.forward(ctx, &id_tensor)?;
        let buckets = self.buckets(ctx, n_tokens, n_seen)?;
        let mut bias = None;
        for block in &self.blocks {
            if let Some(distances) = &block.distances {
                // The one before goes first: in a long text it is large.
                drop(bias.take());
                bias = Some(self.position_bias(ctx, distances, &buckets)?);
            }
            block.forward(ctx, &self.config, &x, bias.as_ref(), n_seen)?;
        }
        self.final_norm.forward(ctx, &x)
    }

    /// Row of the table of distances for each query and each key that is seen: i32 `[1, n_tokens, n_seen]`.
    fn buckets(&self, ctx: &Ctx<'_>, n_tokens: usize, n_seen: usize) -> Result<Tensor> {
        let (n_buckets, max_distance) = (self.config.n_buckets, self.config.max_distance);
        // Of the distances `1 - n_tokens..n_tokens`.
        let buckets: Vec<u32> = (0..2 * n_tokens - 1)
            .map(|idx| bucket(idx as i64 - (n_tokens as i64 - 1), n_buckets, max_distance))
            .collect();
        let of_pairs = (0..n_tokens)
            .flat_map(|query| buckets[n_tokens - 1 - query..].iter().take(n_seen))
            .copied();
        upload_i32(ctx, of_pairs, &[1, n_tokens, n_seen])
    }

    /// What is added to the scores: f32 `[1, n_heads, n_tokens, n_seen]`.
    fn position_bias(&self, ctx: &Ctx<'_>, distances: &Embedding, buckets: &Tensor) -> Result<Tensor> {
        let by_pair = distances.forward(ctx, buckets)?;
        let [n_tokens, n_seen] = [by_pair.dim(1), by_pair.dim(2)];
        let bias = ctx
            .backend
            .alloc(&[1, self.config.n_heads, n_tokens, n_seen], by_pair.dtype())?;
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
    fn new(layers: &mut Scope<'_>, config: &T5Config, has_distances: bool) -> Self {
        let (n, n_attention) = (config.n_channels, config.n_heads * config.head_dim);
        let mut first = layers.at(0);
        let mut attention = first.at("SelfAttention");
        let distances = has_distances.then(|| {
            let mut scope = attention.at("relative_attention_bias");
            Embedding::new(&mut scope, config.n_buckets, config.n_heads)
        });
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
            distances,
            norm1,
            qkv,
            out,
            norm2,
            wi,
            wo,
        }
    }

    /// In place.
    fn forward(
        &self,
        ctx: &Ctx<'_>,
        config: &T5Config,
        x: &Tensor,
        bias: Option<&Tensor>,
        n_seen: usize,
    ) -> Result<()> {
        let h = self.norm1.forward(ctx, x)?;
        let [q, k, v] = split(&self.qkv.forward(ctx, &h, After::default())?)?;
        let [k, v] = [k.narrow(1, 0, n_seen)?, v.narrow(1, 0, n_seen)?];
        let spec = AttentionSpec {
            n_heads: config.n_heads,
            n_kv_heads: config.n_heads,
            scale: 1.0,
            is_causal: false,
            bias,
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
    use crate::text::tables::{TestModel, config_of, ids_of, numbers, relative_error, table};

    // `tests/tables/make_t5_encoder.py`.
    const TABLE: &str = "t5_encoder.json";

    #[test]
    fn hidden_states_are_transformers_hidden_states() {
        let mut worst: f64 = 0.0;
        for case in table(TABLE)["cases"].as_array().expect("cases") {
            let config = T5Config::read(&config_of(&case["config"])).expect("a configuration");
            let model = TestModel::new(&case["weights"], |scope| T5Encoder::new(scope, config));
            for run in case["runs"].as_array().expect("a list") {
                let ids = ids_of(&run["ids"]);
                let n_seen = run["n_seen"].as_u64().expect("a number") as usize;
                let ours = model.run(|encoder, ctx| encoder.forward_seen(ctx, &ids, n_seen));
                let theirs = numbers(&run["output"]);
                worst = worst.max(relative_error(&ours, &theirs));
                // Without the padding, what remains is the same.
                let ours = model.run(|encoder, ctx| encoder.forward(ctx, &ids[..n_seen]));
                let n_values = theirs.len() / ids.len() * n_seen;
                worst = worst.max(relative_error(&ours, &theirs[..n_values]));
            }
        }
        assert!(worst < 2e-6, "{worst:e}");
    }

    #[test]
    fn buckets_are_transformers_buckets() {
        for row in table(TABLE)["buckets"].as_array().expect("a list") {
            let [n_buckets, max_distance] = [0, 1].map(|idx| row[idx].as_u64().expect("a number") as usize);
            let theirs = numbers(&row[2]).into_iter().map(|bucket| bucket as u32);
            let ours = (-600..=600).map(|distance| bucket(distance, n_buckets, max_distance));
            assert!(ours.eq(theirs), "{n_buckets} buckets up to {max_distance}");
        }
    }

    #[test]
    fn configurations_that_are_not_carried_out_are_refused_by_name() {
        for (config, word) in [
            (r#"{"model_type": "mt5"}"#, "model_type"),
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
