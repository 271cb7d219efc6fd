//! diffusers' `SD3Transformer2DModel`: picture and text tokens attend jointly, each with weights of its own (Esser et al. 2024,
//! "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis").
//!
//! Keys and values of both kinds of token are written side by side into one buffer by the projections themselves. What the last block
//! would compute of the text is left out, since nothing reads it; its query weights are not loaded.

use super::{Denoiser, DenoiserInput, patches::position_line, repeat_bias};
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{
    After, Attend, Conv2d, Ctx, FeedForward, Linear, Parameter, Result, RmsNorm, Scope, TimestepEmbedding,
    TwoLayer, attend, modulated_norm, split,
};
use denoised_tensor::{Activation, PatchOrder, Tensor, TensorError, TimestepSpec};

const EPS: f32 = 1e-6;
const N_SINUSOIDS: usize = 256;

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug)]
pub(crate) struct MmditConfig {
    pub(crate) sample_size: usize,
    pub(crate) patch: usize,
    pub(crate) c_in: usize,
    pub(crate) c_out: usize,
    pub(crate) n_layers: usize,
    pub(crate) head_dim: usize,
    pub(crate) n_heads: usize,
    pub(crate) n_joint: usize,
    pub(crate) n_pooled: usize,
    /// Side of the position table in patches.
    pub(crate) max_patches: usize,
    dual_layers: Vec<usize>,
    has_qk_norm: bool,
}

impl MmditConfig {
    /// Reads the configuration; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        let c_in = config.usize_or("in_channels", 16)?;
        let read = Self {
            sample_size: config.usize_or("sample_size", 128)?,
            patch: config.usize_or("patch_size", 2)?,
            c_in,
            c_out: match config.has("out_channels") {
                true => config.opt_usize("out_channels")?.unwrap_or(c_in),
                false => 16,
            },
            n_layers: config.usize_or("num_layers", 18)?,
            head_dim: config.usize_or("attention_head_dim", 64)?,
            n_heads: config.usize_or("num_attention_heads", 18)?,
            n_joint: config.usize_or("joint_attention_dim", 4096)?,
            n_pooled: config.usize_or("pooled_projection_dim", 2048)?,
            max_patches: config.usize_or("pos_embed_max_size", 96)?,
            dual_layers: config.usizes("dual_attention_layers")?.unwrap_or_default(),
            has_qk_norm: match config.opt_str("qk_norm")? {
                None => false,
                Some("rms_norm") => true,
                Some(_) => return Err(config.wrong("qk_norm", "rms_norm or null").into()),
            },
        };
        config.within("patch_size", read.patch, 1..=64)?;
        config.within("sample_size", read.sample_size, read.patch..=1 << 14)?;
        config.within("in_channels", read.c_in, 1..=1 << 12)?;
        config.within("num_layers", read.n_layers, 1..=512)?;
        config.within("attention_head_dim", read.head_dim, 1..=1 << 10)?;
        config.within("num_attention_heads", read.n_heads, 1..=1 << 10)?;
        config.within("joint_attention_dim", read.n_joint, 1..=1 << 16)?;
        config.within("pooled_projection_dim", read.n_pooled, 1..=1 << 16)?;
        config.within("pos_embed_max_size", read.max_patches, 1..=1 << 12)?;
        if read.c_out != read.c_in {
            return Err(config.wrong("out_channels", "equal to in_channels").into());
        }
        let n = read.n_channels();
        if config.usize_or("caption_projection_dim", 1152)? != n {
            let expected = format!("num_attention_heads * attention_head_dim = {n}");
            return Err(config.wrong("caption_projection_dim", &expected).into());
        }
        if !n.is_multiple_of(4) {
            return Err(config
                .wrong("attention_head_dim", "a multiple of 4 over all heads")
                .into());
        }
        config.deny_unread(&[])?;
        Ok(read)
    }

    fn n_channels(&self) -> usize {
        self.n_heads * self.head_dim
    }
}

/// The network.
#[derive(Debug)]
pub(crate) struct Mmdit {
    patches: Conv2d,
    positions: Positions,
    time: TimestepEmbedding,
    pooled: TwoLayer,
    context: Linear,
    blocks: Vec<Block>,
    norm_out: Linear,
    proj_out: Linear,
    config: MmditConfig,
}

/// Embeddings of positions.
#[derive(Debug)]
enum Positions {
    /// `[1, max_patches^2, n]`
    Stored(Parameter),
    /// For files that leave the table out: `[max_patches, n / 2]`, for the column in the first half of the channels and for the row in
    /// the second.
    Computed(Vec<f32>),
}

impl Mmdit {
    pub(crate) fn new(root: &mut Scope<'_>, config: MmditConfig) -> Self {
        let n = config.n_channels();
        let mut embed = root.at("pos_embed");
        let patches = Conv2d::patches(&mut embed.at("proj"), config.c_in, n, config.patch);
        let positions = if embed.is_stored("pos_embed") {
            let shape = [1, config.max_patches * config.max_patches, n];
            Positions::Stored(Parameter::new(&mut embed, "pos_embed", &shape))
        } else {
            Positions::Computed(position_line(
                n,
                config.max_patches,
                config.sample_size / config.patch,
                1.0,
            ))
        };
        let mut embed = root.at("time_text_embed");
        let time = TimestepEmbedding::new(
            &mut embed.at("timestep_embedder"),
            TimestepSpec::COSINES_FIRST,
            N_SINUSOIDS,
            n,
        );
        let pooled = TwoLayer::new(
            &mut embed.at("text_embedder"),
            config.n_pooled,
            n,
            Activation::Silu,
        );
        let context = Linear::new(&mut root.at("context_embedder"), config.n_joint, n);
        let blocks = (0..config.n_layers)
            .map(|layer_idx| {
                let mut scope = root.at(format_args!("transformer_blocks.{layer_idx}"));
                let is_dual = config.dual_layers.contains(&layer_idx);
                let is_last = layer_idx + 1 == config.n_layers;
                Block::new(&mut scope, &config, is_dual, is_last)
            })
            .collect();
        let n_patch = config.patch * config.patch * config.c_out;
        Self {
            patches,
            positions,
            time,
            pooled,
            context,
            blocks,
            norm_out: Linear::new(&mut root.at("norm_out.linear"), n, 2 * n),
            proj_out: Linear::new(&mut root.at("proj_out"), n, n_patch),
            config,
        }
    }

    /// Names below the root that may be in the files though nothing reads them.
    pub(crate) fn unread_names(config: &MmditConfig) -> Vec<String> {
        let last = config.n_layers - 1;
        ["add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight"]
            .map(|name| format!("transformer_blocks.{last}.attn.{name}"))
            .to_vec()
    }

    /// Adds the middle of the table to `x` `[batch, h, w, n]`, in place.
    fn add_positions(&self, ctx: &Ctx<'_>, x: &Tensor) -> Result<()> {
        let (h, w, n) = (x.dim(1), x.dim(2), x.dim(3));
        let side = self.config.max_patches;
        let start = |len: usize| side.saturating_sub(len) / 2;
        match &self.positions {
            Positions::Stored(table) => {
                let table = table.tensor(ctx)?.reshape(&[1, side, side, n])?;
                let middle = table.narrow(1, start(h), h)?.narrow(2, start(w), w)?;
                ctx.backend.add(x, &ctx.cast(&middle)?, x)
            }
            Positions::Computed(line) => {
                let half = n / 2;
                let line = ctx.cast(&ctx.upload_f32(line, &[1, 1, side, half])?)?;
                let columns = line.narrow(2, start(w), w)?;
                let rows = line.reshape(&[1, side, 1, half])?.narrow(1, start(h), h)?;
                let (first, second) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
                ctx.backend.add(&first, &columns, &first)?;
                ctx.backend.add(&second, &rows, &second)
            }
        }
    }
}

impl Denoiser for Mmdit {
    fn forward(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<Tensor> {
        let DenoiserInput {
            latents,
            timesteps,
            conditioning,
            ..
        } = *input;
        let x = self.patches.forward(ctx, latents, After::default())?;
        self.add_positions(ctx, &x)?;
        let x = x.reshape(&[x.dim(0), x.dim(1) * x.dim(2), x.dim(3)])?;

        let time = self.time.forward(ctx, timesteps, After::default())?;
        let pooled = conditioning.pooled.as_ref().ok_or_else(no_pooled)?;
        let vector = self.pooled.forward(ctx, pooled, After::residual(&time))?;
        ctx.backend.activation(&vector, Activation::Silu, &vector)?;
        let text = self
            .context
            .forward(ctx, &conditioning.tokens, After::default())?;

        let bias = repeat_bias(ctx, x.dim(1) + text.dim(1), conditioning.n_last_repeats)?;
        for block in &self.blocks {
            block.forward(ctx, &x, &text, &vector, bias.as_ref())?;
        }

        let [scale, shift] = split(&self.norm_out.forward(ctx, &vector, After::default())?)?;
        let x = modulated_norm(ctx, &x, &shift, &scale, EPS)?;
        let x = self.proj_out.forward(ctx, &x, After::default())?;
        let out = ctx.alloc(latents.dims())?;
        ctx.backend
            .unpatchify(&x, self.config.patch, PatchOrder::SpatialFirst, &out)?;
        Ok(out)
    }
}

/// One joint block.
#[derive(Debug)]
struct Block {
    modulation: Linear,
    context_modulation: Linear,
    qkv: Linear,
    norm_qk: Option<[RmsNorm; 2]>,
    /// Query, key and value of the text; only key and value in the last block.
    context_qkv: Linear,
    norm_context_q: Option<RmsNorm>,
    norm_context_k: Option<RmsNorm>,
    out: Linear,
    dual: Option<SelfAttention>,
    feed_forward: FeedForward,
    /// What the text goes through after the attention; nothing in the last block.
    context: Option<ContextTail>,
    n_heads: usize,
}

#[derive(Debug)]
struct ContextTail {
    out: Linear,
    feed_forward: FeedForward,
}

/// Attention of the picture's tokens among themselves (`attn2`).
#[derive(Debug)]
struct SelfAttention {
    qkv: Linear,
    norm_qk: Option<[RmsNorm; 2]>,
    out: Linear,
}

impl Block {
    fn new(scope: &mut Scope<'_>, config: &MmditConfig, is_dual: bool, is_last: bool) -> Self {
        let n = config.n_channels();
        let norm = |scope: &mut Scope<'_>, name: &str| {
            config
                .has_qk_norm
                .then(|| RmsNorm::new(&mut scope.at(name), config.head_dim, EPS))
        };
        let norms = |scope: &mut Scope<'_>| {
            config.has_qk_norm.then(|| {
                ["norm_q", "norm_k"].map(|name| RmsNorm::new(&mut scope.at(name), config.head_dim, EPS))
            })
        };
        let modulation = Linear::new(
            &mut scope.at("norm1.linear"),
            n,
            if is_dual { 9 * n } else { 6 * n },
        );
        let n_context = if is_last { 2 * n } else { 6 * n };
        let context_modulation = Linear::new(&mut scope.at("norm1_context.linear"), n, n_context);
        let mut attention = scope.at("attn");
        let qkv = Linear::fused(&mut attention, &["to_q", "to_k", "to_v"], n, 3 * n, true);
        let norm_qk = norms(&mut attention);
        let names = ["add_q_proj", "add_k_proj", "add_v_proj"];
        let names = if is_last { &names[1..] } else { &names[..] };
        let context_qkv = Linear::fused(&mut attention, names, n, names.len() * n, true);
        let norm_context_q = if is_last {
            None
        } else {
            norm(&mut attention, "norm_added_q")
        };
        let norm_context_k = norm(&mut attention, "norm_added_k");
        let out = Linear::new(&mut attention.at("to_out.0"), n, n);
        let context_out = (!is_last).then(|| Linear::new(&mut attention.at("to_add_out"), n, n));
        let dual = is_dual.then(|| {
            let mut attention = scope.at("attn2");
            SelfAttention {
                qkv: Linear::fused(&mut attention, &["to_q", "to_k", "to_v"], n, 3 * n, true),
                norm_qk: norms(&mut attention),
                out: Linear::new(&mut attention.at("to_out.0"), n, n),
            }
        });
        let feed_forward = |scope: &mut Scope<'_>, name: &str| {
            FeedForward::new(&mut scope.at(name), n, 4 * n, Activation::GeluTanh)
        };
        Self {
            modulation,
            context_modulation,
            qkv,
            norm_qk,
            context_qkv,
            norm_context_q,
            norm_context_k,
            out,
            dual,
            feed_forward: feed_forward(scope, "ff"),
            context: context_out.map(|out| ContextTail {
                out,
                feed_forward: feed_forward(scope, "ff_context"),
            }),
            n_heads: config.n_heads,
        }
    }

    /// Updates `x` `[batch, n_picture, n]` and `text` `[batch, n_text, n]` in place; `vector` `[batch, n]` went through SiLU.
    fn forward(
        &self,
        ctx: &Ctx<'_>,
        x: &Tensor,
        text: &Tensor,
        vector: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<()> {
        let modulation = self.modulation.forward(ctx, vector, After::default())?;
        let part = |idx: usize| modulation.narrow(1, idx * x.dim(2), x.dim(2));
        let (shift, scale, gate) = (part(0)?, part(1)?, part(2)?);
        let (shift_ff, scale_ff, gate_ff) = (part(3)?, part(4)?, part(5)?);
        let context_modulation = self.context_modulation.forward(ctx, vector, After::default())?;
        let context_part = |idx: usize| context_modulation.narrow(1, idx * x.dim(2), x.dim(2));
        let (context_shift, context_scale) = match &self.context {
            Some(_) => (context_part(0)?, context_part(1)?),
            // Without a tail the modulation is that of an output norm, scale first.
            None => (context_part(1)?, context_part(0)?),
        };

        let h = modulated_norm(ctx, x, &shift, &scale, EPS)?;
        let h_text = modulated_norm(ctx, text, &context_shift, &context_scale, EPS)?;
        let dual = match &self.dual {
            None => None,
            Some(dual) => {
                let h = modulated_norm(ctx, x, &part(6)?, &part(7)?, EPS)?;
                Some((dual, dual.attend(ctx, &h, self.n_heads)?, part(8)?))
            }
        };
        let (from_x, from_text) = self.joint_attention(ctx, h, h_text, bias)?;
        // What is not needed any more makes room for the wide middle of the feed-forward.
        self.out.forward_into(ctx, &from_x, After::gated(&gate, x), x)?;
        drop(from_x);
        if let Some((dual, from_x, gate)) = dual {
            dual.out.forward_into(ctx, &from_x, After::gated(&gate, x), x)?;
        }
        let h = modulated_norm(ctx, x, &shift_ff, &scale_ff, EPS)?;
        self.feed_forward
            .forward_into(ctx, &h, After::gated(&gate_ff, x), x)?;
        drop(h);

        if let (Some(tail), Some(from_text)) = (&self.context, from_text) {
            let gate = context_part(2)?;
            tail.out
                .forward_into(ctx, &from_text, After::gated(&gate, text), text)?;
            drop(from_text);
            let h = modulated_norm(ctx, text, &context_part(3)?, &context_part(4)?, EPS)?;
            let gate = context_part(5)?;
            tail.feed_forward
                .forward_into(ctx, &h, After::gated(&gate, text), text)?;
        }
        Ok(())
    }

    /// Queries of the picture (and of the text, unless this is the last block) over the keys of both, picture first. Uses up its inputs,
    /// whose memory the attention needs.
    fn joint_attention(
        &self,
        ctx: &Ctx<'_>,
        h: Tensor,
        h_text: Tensor,
        bias: Option<&Tensor>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (n_picture, n_text, n) = (h.dim(1), h_text.dim(1), h.dim(2));
        let joint = ctx.alloc(&[h.dim(0), n_picture + n_text, 3 * n])?;
        let picture = joint.narrow(1, 0, n_picture)?;
        self.qkv.forward_into(ctx, &h, After::default(), &picture)?;
        let text = joint.narrow(1, n_picture, n_text)?;
        let [text_q, text_k, _] = split(&text)?;
        let n_context = self.context_qkv.n_out();
        let text_out = text.narrow(2, 3 * n - n_context, n_context)?;
        self.context_qkv
            .forward_into(ctx, &h_text, After::default(), &text_out)?;
        drop((h, h_text));
        apply_norms(ctx, self.norm_qk.as_ref(), &picture)?;
        if let Some(norm) = &self.norm_context_q {
            norm.apply(ctx, &text_q)?;
        }
        if let Some(norm) = &self.norm_context_k {
            norm.apply(ctx, &text_k)?;
        }
        let [q, k, v] = split(&joint)?;
        let how = Attend::biased(self.n_heads, bias);
        if self.context.is_none() {
            let q = q.narrow(1, 0, n_picture)?;
            return Ok((attend(ctx, &q, &k, &v, how)?, None));
        }
        let out = attend(ctx, &q, &k, &v, how)?;
        Ok((
            out.narrow(1, 0, n_picture)?,
            Some(out.narrow(1, n_picture, n_text)?),
        ))
    }
}

impl SelfAttention {
    fn attend(&self, ctx: &Ctx<'_>, h: &Tensor, n_heads: usize) -> Result<Tensor> {
        let qkv = self.qkv.forward(ctx, h, After::default())?;
        apply_norms(ctx, self.norm_qk.as_ref(), &qkv)?;
        let [q, k, v] = split(&qkv)?;
        let how = Attend::all(n_heads);
        attend(ctx, &q, &k, &v, how)
    }
}

/// Norms of query and key, the first two thirds of `qkv`, in place.
fn apply_norms(ctx: &Ctx<'_>, norms: Option<&[RmsNorm; 2]>, qkv: &Tensor) -> Result<()> {
    if let Some([norm_q, norm_k]) = norms {
        let [q, k, _] = split(qkv)?;
        norm_q.apply(ctx, &q)?;
        norm_k.apply(ctx, &k)?;
    }
    Ok(())
}

/// The error of a conditioner that does not fit this network.
fn no_pooled() -> TensorError {
    TensorError::Operand {
        op: "mmdit",
        detail: "the conditioning has no pooled text".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use denoised_checkpoint::Folder;
    use denoised_cpu::{CpuBackend, CpuOptions};
    use denoised_nn::Declare;
    use denoised_sampler::TorchGenerator;
    use denoised_tensor::{Backend, DType, PrepareInput};
    use std::path::Path;

    fn normal(seed: u64, len: usize) -> Vec<f32> {
        let mut values = vec![0.0; len];
        TorchGenerator::new(seed).fill_normal(&mut values);
        values
    }

    fn relative_error(ours: &[f32], theirs: &[f32]) -> f64 {
        let sum = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        let difference = sum(&mut ours
            .iter()
            .zip(theirs)
            .map(|(a, b)| f64::from(*a) - f64::from(*b)));
        difference / sum(&mut theirs.iter().map(|b| f64::from(*b)))
    }

    #[test]
    fn one_weighted_token_does_for_256_equal_ones() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/sd35m/model");
        let folder = Folder::open(&path).expect("a case");
        let config = MmditConfig::read(&folder.config("transformer").expect("a config")).expect("supported");
        let weights = folder.weights(&["transformer"]).expect("weights");
        let mut declare = Declare::new(weights.names());
        let mmdit = Mmdit::new(&mut declare.at("transformer/"), config);
        let backend = CpuBackend::new(CpuOptions::default()).expect("a backend");
        let input = PrepareInput::Build(&weights);
        let prepared = backend
            .prepare(&declare.finish(), input, &mut |_, _| {})
            .expect("prepared");
        let ctx = Ctx {
            backend: &backend,
            weights: &prepared.weights,
            dtype: DType::F32,
        };
        let (n_tokens, n_joint, n_repeats) = (7, 96, 256);
        let latents = ctx
            .upload_f32(&normal(1, 2 * 8 * 12 * 16), &[2, 8, 12, 16])
            .expect("uploaded");
        let timesteps = ctx.upload_f32(&[800.0, 3.5], &[2]).expect("uploaded");
        let pooled = ctx.upload_f32(&normal(2, 2 * 80), &[2, 80]).expect("uploaded");
        let tokens = normal(3, 2 * n_tokens * n_joint);
        let mut written_out = Vec::new();
        for row in tokens.chunks_exact(n_tokens * n_joint) {
            written_out.extend_from_slice(row);
            let last = &row[row.len() - n_joint..];
            (1..n_repeats).for_each(|_| written_out.extend_from_slice(last));
        }
        let run = |tokens: &[f32], n_last_repeats: usize| {
            let dims = [2, tokens.len() / 2 / n_joint, n_joint];
            let conditioning = crate::conditioning::Conditioning {
                n_last_repeats,
                pooled: Some(pooled.clone()),
                ..crate::conditioning::Conditioning::of_tokens(
                    ctx.upload_f32(tokens, &dims).expect("uploaded"),
                )
            };
            let input = DenoiserInput {
                latents: &latents,
                n_frames: 1,
                timesteps: &timesteps,
                conditioning: &conditioning,
                references: &[],
            };
            let out = mmdit.forward(&ctx, &input).expect("it runs");
            ctx.download_f32(&out).expect("downloaded")
        };
        let error = relative_error(&run(&tokens, n_repeats), &run(&written_out, 1));
        // Exact in real arithmetic; in f32 the two round differently, as two orders of summation do.
        assert!(error <= 5e-6, "relative error {error:e}");
        // The comparison means something: without the weight the result is another one.
        assert!(relative_error(&run(&tokens, 1), &run(&written_out, 1)) > 1e-3);
    }

    #[test]
    fn the_computed_table_is_the_one_in_the_files_to_half_precision() {
        for (case, n_channels, side, base) in [("sd35m", 32, 24, 8), ("emoji-dit", 128, 16, 8)] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../../tests/data")
                .join(case);
            let folder = Folder::open(&path.join("model")).expect("a case");
            let weights = folder.component("transformer").expect("weights");
            let stored = weights
                .weight("pos_embed.pos_embed")
                .expect("diffusers stores it");
            let stored: Vec<f32> = stored
                .bytes
                .chunks_exact(2)
                .map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect();
            let line = position_line(n_channels, side, base, 1.0);
            let at = |idx: usize| line.chunks_exact(n_channels / 2).nth(idx).expect("a position");
            let mut computed = Vec::new();
            for (row, column) in (0..side).flat_map(|row| (0..side).map(move |column| (row, column))) {
                computed.extend_from_slice(at(column));
                computed.extend_from_slice(at(row));
            }
            assert_eq!(computed.len(), stored.len());
            let rounded: Vec<f32> = computed
                .iter()
                .map(|x| half::f16::from_f32(*x).to_f32())
                .collect();
            assert!(relative_error(&rounded, &stored) < 1e-6, "{case}");
        }
    }
}
