//! diffusers' `ZImageTransformer2DModel`: tokens of picture and text, each first refined on its own, then one sequence with weights that
//! both share (Z-Image team 2025, "Z-Image: An Efficient Image Generation Foundation Model with Single-Stream Diffusion Transformer").
//!
//! R1. Both sequences are filled up to multiples of 32 with a token of the checkpoint, which everything sees. Those of the text have
//!     places behind it, those of the picture all the first place.
//! R2. The network predicts the direction from noise to picture and is told how far it has come; samplers ask for the opposite of both.

use super::{
    Denoiser, DenoiserInput,
    rope::{Angles, Rope, RopeAxes},
};
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{After, Attend, Ctx, Linear, Parameter, Result, RmsNorm, Scope, attend, split};
use denoised_tensor::{Activation, DType, GateOrder, Modulation, PatchOrder, Tensor, TimestepSpec};
use serde_json::Value;

/// Of the norms whose epsilon no configuration changes: those of queries and keys, and the last one.
const QK_EPS: f32 = 1e-5;
const OUT_EPS: f32 = 1e-6;
/// Sequences have a multiple of this many tokens.
const GRANULE: usize = 32;
/// Latents each way of a token. Networks may bring weights for other sides, which no pipeline uses.
pub(crate) const PATCH: usize = 2;
const N_SINUSOIDS: usize = 256;
/// Widths of the embedding of timesteps: inner, and outer in networks that are not narrower.
const N_TIME_INNER: usize = 1024;
const N_TIME: usize = 256;
/// Timesteps of the scheduler, the last of which is noise only.
const N_TRAIN: f64 = 1000.0;

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct ZImageConfig {
    pub(crate) c_in: usize,
    /// Channels of texts.
    pub(crate) n_text: usize,
    /// Places on the axes of text (and of the picture as a whole), rows and columns.
    n_places: [usize; 3],
    axes: Vec<usize>,
    theta: f64,
    n_channels: usize,
    n_layers: usize,
    n_refiner_layers: usize,
    n_heads: usize,
    has_qk_norm: bool,
    eps: f32,
    t_scale: f64,
}

impl ZImageConfig {
    /// Reads the configuration; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> std::result::Result<Self, ModelError> {
        let list = |key: &str, default: &[usize]| {
            Ok::<_, ModelError>(config.usizes(key)?.unwrap_or_else(|| default.to_vec()))
        };
        let places = list("axes_lens", &[1024, 512, 512])?;
        let read = Self {
            c_in: config.usize_or("in_channels", 16)?,
            n_text: config.usize_or("cap_feat_dim", 2560)?,
            n_places: places
                .try_into()
                .map_err(|_| config.wrong("axes_lens", "three numbers"))?,
            axes: list("axes_dims", &[32, 48, 48])?,
            theta: config.f64_or("rope_theta", 256.0)?,
            n_channels: config.usize_or("dim", 3840)?,
            n_layers: config.usize_or("n_layers", 30)?,
            n_refiner_layers: config.usize_or("n_refiner_layers", 2)?,
            n_heads: config.usize_or("n_heads", 30)?,
            has_qk_norm: config.bool_or("qk_norm", true)?,
            eps: config.f64_or("norm_eps", 1e-5)? as f32,
            t_scale: config.f64_or("t_scale", 1000.0)?,
        };
        let (patches, depths) = (list("all_patch_size", &[PATCH])?, list("all_f_patch_size", &[1])?);
        let mut sides = patches.iter().zip(&depths);
        if patches.len() != depths.len() || !sides.any(|pair| pair == (&PATCH, &1)) {
            let expected = format!("a list with {PATCH} where all_f_patch_size has 1");
            return Err(config.wrong("all_patch_size", &expected).into());
        }
        // diffusers gives keys and values as many heads as queries, whatever this says.
        config.usize_or("n_kv_heads", 30)?;
        config.only("siglip_feat_dim", &[Value::Null])?;
        config.within("in_channels", read.c_in, 1..=1 << 12)?;
        config.within("cap_feat_dim", read.n_text, 1..=1 << 16)?;
        config.within("dim", read.n_channels, 1..=1 << 16)?;
        config.within("n_layers", read.n_layers, 1..=512)?;
        config.within("n_refiner_layers", read.n_refiner_layers, 0..=512)?;
        config.within("n_heads", read.n_heads, 1..=1 << 10)?;
        if !read.n_channels.is_multiple_of(read.n_heads) {
            return Err(config.wrong("n_heads", "a divisor of dim").into());
        }
        let head_dim = read.n_channels / read.n_heads;
        let are_even = read.axes.iter().all(|width| width.is_multiple_of(2));
        if read.axes.len() != 3 || !are_even || read.axes.iter().sum::<usize>() != head_dim {
            let expected = format!("three even numbers that add up to dim / n_heads = {head_dim}");
            return Err(config.wrong("axes_dims", &expected).into());
        }
        let [of_text, rows, columns] = read.n_places;
        config.within("axes_lens", of_text, GRANULE + 2..=1 << 20)?;
        config.within("axes_lens", rows.min(columns), 1..=1 << 20)?;
        config.within("axes_lens", rows.max(columns), 1..=1 << 20)?;
        for (key, number) in [("rope_theta", read.theta), ("norm_eps", f64::from(read.eps))] {
            if !(number.is_finite() && number > 0.0) {
                return Err(config.wrong(key, "a number above 0").into());
            }
        }
        if !read.t_scale.is_finite() {
            return Err(config.wrong("t_scale", "a finite number").into());
        }
        config.deny_unread(&[])?;
        Ok(read)
    }

    /// Longest text: it, what fills it up and the picture behind it have places.
    pub(crate) fn max_text(&self) -> usize {
        (self.n_places[0] - 2) / GRANULE * GRANULE
    }

    /// Most latents each way.
    pub(crate) fn max_side(&self) -> usize {
        self.n_places[1].min(self.n_places[2]) * PATCH
    }

    fn n_time(&self) -> usize {
        self.n_channels.min(N_TIME)
    }
}

/// The network.
#[derive(Debug)]
pub(crate) struct ZImage {
    time_in: Linear,
    time_out: Linear,
    patches: Linear,
    patch_pad: Parameter,
    text_norm: RmsNorm,
    text: Linear,
    text_pad: Parameter,
    noise_refiner: Vec<Block>,
    text_refiner: Vec<Block>,
    blocks: Vec<Block>,
    modulation_out: Linear,
    proj_out: Linear,
    axes: RopeAxes,
    config: ZImageConfig,
}

impl ZImage {
    pub(crate) fn new(root: &mut Scope<'_>, config: ZImageConfig) -> Self {
        let (n, n_patch) = (config.n_channels, PATCH * PATCH * config.c_in);
        let mut time = root.at("t_embedder.mlp");
        let time_in = Linear::new(&mut time.at(0), N_SINUSOIDS, N_TIME_INNER);
        let time_out = Linear::new(&mut time.at(2), N_TIME_INNER, config.n_time());
        let patches = Linear::new(&mut root.at("all_x_embedder.2-1"), n_patch, n);
        let mut text = root.at("cap_embedder");
        let text_norm = RmsNorm::new(&mut text.at(0), config.n_text, config.eps);
        let text = Linear::new(&mut text.at(1), config.n_text, n);
        let mut blocks = |name: &str, n_layers: usize, is_modulated: bool| -> Vec<Block> {
            let mut block = |layer_idx: usize| {
                let mut scope = root.at(format_args!("{name}.{layer_idx}"));
                Block::new(&mut scope, &config, is_modulated)
            };
            (0..n_layers).map(&mut block).collect()
        };
        let noise_refiner = blocks("noise_refiner", config.n_refiner_layers, true);
        let text_refiner = blocks("context_refiner", config.n_refiner_layers, false);
        let blocks = blocks("layers", config.n_layers, true);
        let mut last = root.at("all_final_layer.2-1");
        Self {
            time_in,
            time_out,
            patches,
            text_norm,
            text,
            noise_refiner,
            text_refiner,
            blocks,
            modulation_out: Linear::new(&mut last.at("adaLN_modulation.1"), config.n_time(), n),
            proj_out: Linear::new(&mut last.at("linear"), n, n_patch),
            patch_pad: Parameter::new(root, "x_pad_token", &[1, n]),
            text_pad: Parameter::new(root, "cap_pad_token", &[1, n]),
            axes: RopeAxes::new(config.theta, &config.axes, Angles::Rounded),
            config,
        }
    }

    /// Names below the root that may be in the files though nothing reads them: weights for patches of other sides.
    pub(crate) const UNREAD_NAMES: [&'static str; 2] = ["all_x_embedder.*", "all_final_layer.*"];

    /// Embeds f32 timesteps `[batch]` to `[batch, n_time]`.
    fn embed_time(&self, ctx: &Ctx<'_>, timesteps: &Tensor) -> Result<Tensor> {
        let come = ctx.backend.alloc(timesteps.dims(), DType::F32)?;
        let t_scale = self.config.t_scale;
        let per_timestep = (-t_scale / N_TRAIN) as f32;
        ctx.backend
            .affine(timesteps, per_timestep, t_scale as f32, &come)?;
        let sinusoids = ctx.alloc(&[timesteps.dim(0), N_SINUSOIDS])?;
        ctx.backend
            .timestep_embedding(&come, &TimestepSpec::COSINES_FIRST, &sinusoids)?;
        let inner = After::activation(Activation::Silu);
        let inner = self.time_in.forward(ctx, &sinusoids, inner)?;
        self.time_out.forward(ctx, &inner, After::default())
    }

    /// Rotations of a grid of `sides` patches with what fills it up, then of a text of `n_text` with what fills that up.
    fn rope(&self, ctx: &Ctx<'_>, sides: (usize, usize), n_text: usize) -> Result<Rope> {
        let (n_grid, n_text) = (sides.0 * sides.1, n_text.next_multiple_of(GRANULE));
        let mut positions = self.axes.positions();
        positions.push_grid(sides, |y, x| [(n_text + 1) as f32, y, x]);
        positions.push(n_grid.next_multiple_of(GRANULE) - n_grid, |_| [0.0; 3]);
        positions.push(n_text, |idx| [(idx + 1) as f32, 0.0, 0.0]);
        self.axes.tables(ctx, &positions)
    }
}

/// Writes a token of the checkpoint to all of `out` `[batch, tokens, n]` from `start` on.
fn fill_up(ctx: &Ctx<'_>, pad: &Parameter, out: &Tensor, start: usize) -> Result<()> {
    let n_missing = out.dim(1) - start;
    if n_missing == 0 {
        return Ok(());
    }
    let pad = pad.tensor(ctx)?.reshape(&[1, 1, out.dim(2)])?;
    ctx.backend.copy(&pad, &out.narrow(1, start, n_missing)?)
}

impl Denoiser for ZImage {
    fn forward(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<Tensor> {
        let (latents, tokens) = (input.latents, &input.conditioning.tokens);
        let (n_batch, n) = (latents.dim(0), self.config.n_channels);
        let sides = (latents.dim(1) / PATCH, latents.dim(2) / PATCH);
        let (n_patches, n_text) = (sides.0 * sides.1, tokens.dim(1));
        let [n_grid, n_words] = [n_patches, n_text].map(|n| n.next_multiple_of(GRANULE));
        let time = self.embed_time(ctx, input.timesteps)?;
        let rope = self.rope(ctx, sides, n_text)?;

        // Both kinds of token side by side from the start, picture first.
        let all = ctx.alloc(&[n_batch, n_grid + n_words, n])?;
        let picture = all.narrow(1, 0, n_grid)?;
        let patches = ctx.alloc(&[n_batch, n_patches, PATCH * PATCH * self.config.c_in])?;
        let order = PatchOrder::SpatialFirst;
        ctx.backend.patchify(latents, PATCH, order, &patches)?;
        let embedded = picture.narrow(1, 0, n_patches)?;
        self.patches
            .forward_into(ctx, &patches, After::default(), &embedded)?;
        fill_up(ctx, &self.patch_pad, &picture, n_patches)?;
        let picture_rope = rope.narrow(0, n_grid)?;
        for block in &self.noise_refiner {
            block.forward(ctx, &picture, &picture_rope, &time)?;
        }

        let words = all.narrow(1, n_grid, n_words)?;
        let normed = self.text_norm.forward(ctx, tokens)?;
        let embedded = words.narrow(1, 0, n_text)?;
        self.text
            .forward_into(ctx, &normed, After::default(), &embedded)?;
        fill_up(ctx, &self.text_pad, &words, n_text)?;
        let words_rope = rope.narrow(n_grid, n_words)?;
        for block in &self.text_refiner {
            block.forward(ctx, &words, &words_rope, &time)?;
        }

        for block in &self.blocks {
            block.forward(ctx, &all, &rope, &time)?;
        }
        ctx.backend.activation(&time, Activation::Silu, &time)?;
        let scale = self.modulation_out.forward(ctx, &time, After::default())?;
        let shift = ctx.alloc(&[1, n])?;
        ctx.backend.fill(&shift, 0.0)?;
        let modulation = Some(Modulation {
            scale: &scale,
            shift: &shift,
        });
        let x = ctx.alloc(&[n_batch, n_patches, n])?;
        let seen = all.narrow(1, 0, n_patches)?;
        ctx.backend.layer_norm(&seen, None, OUT_EPS, modulation, &x)?;
        let x = self.proj_out.forward(ctx, &x, After::default())?;
        let out = ctx.alloc(latents.dims())?;
        ctx.backend.unpatchify(&x, PATCH, order, &out)?;
        ctx.backend.affine(&out, -1.0, 0.0, &out)?;
        Ok(out)
    }
}

/// A block; what it adds is normalized before it is added.
#[derive(Debug)]
struct Block {
    /// Scales and gates by the timestep.
    modulation: Option<Linear>,
    attention_norms: [RmsNorm; 2],
    qkv: Linear,
    qk_norms: Option<[RmsNorm; 2]>,
    out: Linear,
    feed_forward_norms: [RmsNorm; 2],
    /// To the activated half and the other.
    wide: Linear,
    narrow: Linear,
    n_inner: usize,
    n_heads: usize,
}

impl Block {
    fn new(scope: &mut Scope<'_>, config: &ZImageConfig, is_modulated: bool) -> Self {
        let n = config.n_channels;
        let modulation =
            is_modulated.then(|| Linear::new(&mut scope.at("adaLN_modulation.0"), config.n_time(), 4 * n));
        let mut norms = |names: [&str; 2]| names.map(|name| RmsNorm::new(&mut scope.at(name), n, config.eps));
        let attention_norms = norms(["attention_norm1", "attention_norm2"]);
        let feed_forward_norms = norms(["ffn_norm1", "ffn_norm2"]);
        let mut attention = scope.at("attention");
        let qkv = Linear::fused(&mut attention, &["to_q", "to_k", "to_v"], n, 3 * n, false);
        let head_dim = n / config.n_heads;
        let qk_norms = config.has_qk_norm.then(|| {
            ["norm_q", "norm_k"].map(|name| RmsNorm::new(&mut attention.at(name), head_dim, QK_EPS))
        });
        let out = Linear::without_bias(&mut attention.at("to_out.0"), n, n);
        // As diffusers computes it.
        let n_inner = (n as f64 / 3.0 * 8.0) as usize;
        let mut feed_forward = scope.at("feed_forward");
        Self {
            modulation,
            attention_norms,
            qkv,
            qk_norms,
            out,
            feed_forward_norms,
            wide: Linear::fused(&mut feed_forward, &["w1", "w3"], n, 2 * n_inner, false),
            narrow: Linear::without_bias(&mut feed_forward.at("w2"), n_inner, n),
            n_inner,
            n_heads: config.n_heads,
        }
    }

    /// Updates `x` `[batch, tokens, n]` in place; `time` is `[batch, n_time]`.
    fn forward(&self, ctx: &Ctx<'_>, x: &Tensor, rope: &Rope, time: &Tensor) -> Result<()> {
        let modulation = match &self.modulation {
            Some(modulation) => Some(Gates::new(
                ctx,
                &modulation.forward(ctx, time, After::default())?,
            )?),
            None => None,
        };
        let (of_attention, of_feed_forward) = match &modulation {
            Some([first, second]) => (Some(first), Some(second)),
            None => (None, None),
        };

        let [before, after] = &self.attention_norms;
        let h = scaled_norm(ctx, before, x, of_attention)?;
        let qkv = self.qkv.forward(ctx, &h, After::default())?;
        let [q, k, v] = split(&qkv)?;
        if let Some([norm_q, norm_k]) = &self.qk_norms {
            norm_q.apply(ctx, &q)?;
            norm_k.apply(ctx, &k)?;
        }
        rope.apply(ctx, &q)?;
        rope.apply(ctx, &k)?;
        let h = attend(ctx, &q, &k, &v, Attend::all(self.n_heads))?;
        let h = self.out.forward(ctx, &h, After::default())?;
        add_normed(ctx, after, &h, of_attention, x)?;

        let [before, after] = &self.feed_forward_norms;
        let h = scaled_norm(ctx, before, x, of_feed_forward)?;
        let halves = self.wide.forward(ctx, &h, After::default())?;
        let inner = ctx.alloc_like(&halves, self.n_inner)?;
        let order = GateOrder::FirstActivated;
        ctx.backend.gated(&halves, Activation::Silu, order, &inner)?;
        let h = self.narrow.forward(ctx, &inner, After::default())?;
        add_normed(ctx, after, &h, of_feed_forward, x)
    }
}

/// What the timestep does to one half of a block, `[batch, 1, n]` each.
struct Gates {
    /// Multiplies what comes in.
    scale: Tensor,
    /// Multiplies what is added.
    gate: Tensor,
}

impl Gates {
    /// Of the attention and of the feed-forward, from `modulation` `[batch, 4n]`, which is used up.
    fn new(ctx: &Ctx<'_>, modulation: &Tensor) -> Result<[Self; 2]> {
        let [scale, gate, scale_ff, gate_ff] = split(modulation)?;
        let gates = |scale: &Tensor, gate: &Tensor| {
            ctx.backend.affine(scale, 1.0, 1.0, scale)?;
            ctx.backend.activation(gate, Activation::Tanh, gate)?;
            let dims = [scale.dim(0), 1, scale.dim(1)];
            Ok(Self {
                scale: scale.reshape(&dims)?,
                gate: gate.reshape(&dims)?,
            })
        };
        Ok([gates(&scale, &gate)?, gates(&scale_ff, &gate_ff)?])
    }
}

fn scaled_norm(ctx: &Ctx<'_>, norm: &RmsNorm, x: &Tensor, gates: Option<&Gates>) -> Result<Tensor> {
    let h = norm.forward(ctx, x)?;
    if let Some(gates) = gates {
        ctx.backend.mul(&h, &gates.scale, &h)?;
    }
    Ok(h)
}

/// Adds the norm of `h`, which is used up, to `x`.
fn add_normed(ctx: &Ctx<'_>, norm: &RmsNorm, h: &Tensor, gates: Option<&Gates>, x: &Tensor) -> Result<()> {
    norm.apply(ctx, h)?;
    match gates {
        Some(gates) => ctx.backend.gated_add(x, &gates.gate, h, x),
        None => ctx.backend.add(x, h, x),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::path::Path;

    fn read(settings: Value) -> std::result::Result<ZImageConfig, String> {
        let map = settings.as_object().expect("an object").clone();
        ZImageConfig::read(&Config::new(Path::new("config.json"), map)).map_err(|error| error.to_string())
    }

    #[test]
    fn missing_keys_are_those_of_diffusers() {
        // ZImageTransformer2DModel() of diffusers 0.42.1.
        let config = read(json!({})).expect("supported");
        assert_eq!(
            (config.n_channels, config.n_heads, config.n_layers),
            (3840, 30, 30)
        );
        assert_eq!((config.n_text, config.c_in, config.n_time()), (2560, 16, 256));
        assert_eq!((config.max_text(), config.max_side()), (992, 1024));
    }

    #[test]
    fn settings_that_are_not_carried_out_are_refused_by_key() {
        for (settings, key) in [
            (json!({"axes_dims": [32, 48, 50]}), "axes_dims"),
            (json!({"axes_dims": [31, 49, 48]}), "axes_dims"),
            (json!({"axes_lens": [1024, 512]}), "axes_lens"),
            (json!({"axes_lens": [16, 512, 512]}), "axes_lens"),
            (json!({"all_patch_size": [4]}), "all_patch_size"),
            (
                json!({"all_patch_size": [2], "all_f_patch_size": [2]}),
                "all_patch_size",
            ),
            (json!({"n_heads": 7}), "n_heads"),
            (json!({"siglip_feat_dim": 1152}), "siglip_feat_dim"),
            (json!({"norm_eps": 0}), "norm_eps"),
            (json!({"something_new": 1}), "something_new"),
        ] {
            let message = read(settings).expect_err("refused");
            assert!(message.contains(key), "{message}");
        }
        read(json!({"all_patch_size": [4, 2], "all_f_patch_size": [1, 1]})).expect("one pair is ours");
    }
}
