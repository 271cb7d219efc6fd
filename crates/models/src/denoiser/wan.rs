//! diffusers' `WanTransformer3DModel`: tokens of all frames attend to each other, then to the text, and to a picture where the model
//! was made for one (Wan team 2025, "Wan: Open and Advanced Large-Scale Video Generative Models").
//!
//! Frames with timesteps of their own are batch elements to the norms and gates, and one sequence to the attention.

use super::{
    Denoiser, DenoiserInput, repeat_bias,
    rope::{Angles, Rope, RopeAxes},
};
use crate::ModelError;
use denoised_checkpoint::Config;
use denoised_nn::{
    After, Attend, Ctx, FeedForward, LayerNorm, Linear, Parameter, Result, RmsNorm, Scope, TimestepEmbedding,
    TwoLayer, attend, modulated_norm_into, split,
};
use denoised_tensor::{Activation, PatchOrder, Tensor, TensorError, TimestepSpec};

/// Of the picture's norms, whatever the others have.
const IMAGE_EPS: f32 = 1e-5;
/// Of the rotations.
const THETA: f64 = 10_000.0;

/// Widths and switches, as `config.json` says.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WanConfig {
    /// Side of a patch; it is one frame deep.
    pub(crate) patch: usize,
    pub(crate) c_in: usize,
    pub(crate) c_out: usize,
    pub(crate) n_layers: usize,
    pub(crate) head_dim: usize,
    pub(crate) n_heads: usize,
    pub(crate) n_text: usize,
    /// Channels of a picture's tokens, where the model takes any.
    pub(crate) n_image: Option<usize>,
    /// Most frames, and most patches each way.
    pub(crate) max_positions: usize,
    n_sinusoids: usize,
    n_inner: usize,
    has_cross_norm: bool,
    eps: f32,
}

impl WanConfig {
    /// Reads the configuration; missing keys have diffusers' defaults.
    ///
    /// # Errors
    /// A value that is not carried out here, or a key that is unknown.
    pub(crate) fn read(config: &Config) -> Result<Self, ModelError> {
        let patch = match config.usizes("patch_size")?.as_deref() {
            None => 2,
            Some([1, height, width]) if height == width => *height,
            Some(_) => return Err(config.wrong("patch_size", "[1, p, p]").into()),
        };
        let c_in = config.usize_or("in_channels", 16)?;
        let read = Self {
            patch,
            c_in,
            c_out: match config.has("out_channels") {
                true => config.opt_usize("out_channels")?.unwrap_or(c_in),
                false => 16,
            },
            n_layers: config.usize_or("num_layers", 40)?,
            head_dim: config.usize_or("attention_head_dim", 128)?,
            n_heads: config.usize_or("num_attention_heads", 40)?,
            n_text: config.usize_or("text_dim", 4096)?,
            n_image: config.opt_usize("image_dim")?,
            max_positions: config.usize_or("rope_max_seq_len", 1024)?,
            n_sinusoids: config.usize_or("freq_dim", 256)?,
            n_inner: config.usize_or("ffn_dim", 13824)?,
            has_cross_norm: config.opt_bool("cross_attn_norm")?.unwrap_or(true),
            eps: config.f64_or("eps", 1e-6)? as f32,
        };
        config.within("patch_size", read.patch, 1..=64)?;
        config.within("in_channels", read.c_in, 1..=1 << 12)?;
        config.within("out_channels", read.c_out, 1..=read.c_in)?;
        config.within("num_layers", read.n_layers, 1..=512)?;
        config.within("attention_head_dim", read.head_dim, 2..=1 << 10)?;
        config.within("num_attention_heads", read.n_heads, 1..=1 << 10)?;
        config.within("text_dim", read.n_text, 1..=1 << 16)?;
        config.within("image_dim", read.n_image.unwrap_or(1), 1..=1 << 16)?;
        config.within("rope_max_seq_len", read.max_positions, 1..=1 << 16)?;
        config.within("freq_dim", read.n_sinusoids, 2..=1 << 16)?;
        config.within("ffn_dim", read.n_inner, 1..=1 << 20)?;
        if !read.head_dim.is_multiple_of(2) {
            return Err(config.wrong("attention_head_dim", "even").into());
        }
        if !read.n_sinusoids.is_multiple_of(2) {
            return Err(config.wrong("freq_dim", "even").into());
        }
        let across_heads = "rms_norm_across_heads";
        if config.has("qk_norm") && config.opt_str("qk_norm")? != Some(across_heads) {
            return Err(config.wrong("qk_norm", across_heads).into());
        }
        let n_added = config.opt_usize("added_kv_proj_dim")?;
        if n_added != read.n_image.map(|_| read.n_channels()) {
            let expected = match read.n_image {
                None => "null without image_dim".to_owned(),
                Some(_) => format!("num_attention_heads * attention_head_dim = {}", read.n_channels()),
            };
            return Err(config.wrong("added_kv_proj_dim", &expected).into());
        }
        if config.opt_usize("pos_embed_seq_len")?.is_some() {
            let expected = "null: models of a first and a last frame are not supported by this version";
            return Err(config.wrong("pos_embed_seq_len", expected).into());
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
pub(crate) struct Wan {
    patches: Linear,
    time: TimestepEmbedding,
    time_proj: Linear,
    text: TwoLayer,
    image: Option<ImageEmbedding>,
    blocks: Vec<Block>,
    /// Shift and scale.
    table_out: Parameter,
    proj_out: Linear,
    config: WanConfig,
}

impl Wan {
    /// Names below the root that may be in the files though nothing reads them.
    pub(crate) fn unread_names(config: &WanConfig) -> Vec<String> {
        (0..config.n_layers)
            .map(|layer_idx| format!("blocks.{layer_idx}.attn2.norm_added_q.weight"))
            .collect()
    }

    pub(crate) fn new(root: &mut Scope<'_>, config: WanConfig) -> Self {
        let n = config.n_channels();
        let patch_area = config.patch * config.patch;
        let patches = Linear::new(&mut root.at("patch_embedding"), config.c_in * patch_area, n);
        let mut embed = root.at("condition_embedder");
        let n_sinusoids = config.n_sinusoids;
        let time = TimestepEmbedding::new(
            &mut embed.at("time_embedder"),
            TimestepSpec::COSINES_FIRST,
            n_sinusoids,
            n,
        );
        let time_proj = Linear::new(&mut embed.at("time_proj"), n, 6 * n);
        let gelu = Activation::GeluTanh;
        let text = TwoLayer::new(&mut embed.at("text_embedder"), config.n_text, n, gelu);
        let image = config
            .n_image
            .map(|n_image| ImageEmbedding::new(&mut embed.at("image_embedder"), n_image, n));
        let blocks = (0..config.n_layers)
            .map(|layer_idx| Block::new(&mut root.at(format_args!("blocks.{layer_idx}")), &config))
            .collect();
        Self {
            patches,
            time,
            time_proj,
            text,
            image,
            blocks,
            table_out: Parameter::new(root, "scale_shift_table", &[1, 2, n]),
            proj_out: Linear::new(&mut root.at("proj_out"), n, patch_area * config.c_out),
            config,
        }
    }

    /// Refuses shapes that this network has no tokens or positions for; returns frames and patches each way.
    fn grid(&self, input: &DenoiserInput<'_>) -> Result<[usize; 3]> {
        let (latents, n_frames, patch) = (input.latents, input.n_frames, self.config.patch);
        let (rows, width) = (latents.dim(1), latents.dim(2));
        let n_timesteps = input.timesteps.dims().get(1).copied().unwrap_or(n_frames);
        let has_whole_patches =
            n_frames > 0 && rows.is_multiple_of(n_frames * patch) && width.is_multiple_of(patch);
        let grid = [n_frames, rows / n_frames.max(1) / patch, width / patch];
        if !has_whole_patches
            || n_timesteps != n_frames
            || grid.iter().any(|extent| *extent > self.config.max_positions)
        {
            return Err(unfit(format!(
                "{n_frames} frames in latents {:?} with timesteps {:?}: patches are {patch} each way, positions {}",
                latents.dims(),
                input.timesteps.dims(),
                self.config.max_positions
            )));
        }
        Ok(grid)
    }
}

impl Denoiser for Wan {
    fn forward(&self, ctx: &Ctx<'_>, input: &DenoiserInput<'_>) -> Result<Tensor> {
        let [n_frames, h, w] = self.grid(input)?;
        let (latents, conditioning) = (input.latents, input.conditioning);
        let (n_batch, n, patch) = (latents.dim(0), self.config.n_channels(), self.config.patch);
        let patches = ctx.alloc(&[n_batch, n_frames * h * w, patch * patch * self.config.c_in])?;
        ctx.backend
            .patchify(latents, patch, PatchOrder::ChannelFirst, &patches)?;
        let x = self.patches.forward(ctx, &patches, After::default())?;
        drop(patches);

        let timesteps = input.timesteps.reshape(&[input.timesteps.shape().n_elements()])?;
        let time = self.time.forward(ctx, &timesteps, After::default())?;
        let activated = ctx.alloc(time.dims())?;
        ctx.backend.activation(&time, Activation::Silu, &activated)?;
        let vector = self.time_proj.forward(ctx, &activated, After::default())?;
        let text = self.text.forward(ctx, &conditioning.tokens, After::default())?;
        let bias = repeat_bias(ctx, text.dim(1), conditioning.n_last_repeats)?;
        let image = match (&self.image, &conditioning.image_tokens) {
            (None, None) => None,
            (Some(embedding), Some(tokens)) => Some(embedding.forward(ctx, tokens)?),
            (embedding, _) => {
                let problem = if embedding.is_some() { "lacks" } else { "has" };
                return Err(unfit(format!("the conditioning {problem} tokens of a picture")));
            }
        };
        let axes = rope_axes(self.config.head_dim);
        let mut positions = axes.positions();
        for frame_idx in 0..n_frames {
            positions.push_grid((h, w), |y, x| [frame_idx as f32, y, x]);
        }
        let rope = axes.tables(ctx, &positions)?;
        let beside = Beside {
            vector: &vector,
            text: &text,
            bias: bias.as_ref(),
            image: image.as_ref(),
            rope: &rope,
        };
        for block in &self.blocks {
            block.forward(ctx, &x, &beside)?;
        }

        let table = ctx.cast(&self.table_out.tensor(ctx)?)?;
        let row = |idx: usize| table.narrow(1, idx, 1)?.reshape(&[1, n]);
        let (shift, scale) = (ctx.add(&time, &row(0)?)?, ctx.add(&time, &row(1)?)?);
        let by_vector = x.reshape(&by_vector(&x, &time))?;
        modulated_norm_into(ctx, &by_vector, &shift, &scale, self.config.eps, &by_vector)?;
        let x = self.proj_out.forward(ctx, &x, After::default())?;
        let out = ctx.alloc_like(latents, self.config.c_out)?;
        ctx.backend
            .unpatchify(&x, patch, PatchOrder::SpatialFirst, &out)?;
        Ok(out)
    }
}

/// Channels of a head that turn with the frame, with the row and with the column.
fn rope_axes(head_dim: usize) -> RopeAxes {
    let side = 2 * (head_dim / 6);
    RopeAxes::new(THETA, &[head_dim - 2 * side, side, side], Angles::F64)
}

/// A picture's tokens as the blocks take them.
#[derive(Debug)]
struct ImageEmbedding {
    norm1: LayerNorm,
    first: Linear,
    second: Linear,
    norm2: LayerNorm,
}

impl ImageEmbedding {
    fn new(scope: &mut Scope<'_>, n_in: usize, n_out: usize) -> Self {
        Self {
            norm1: LayerNorm::new(&mut scope.at("norm1"), n_in, IMAGE_EPS),
            first: Linear::new(&mut scope.at("ff.net.0.proj"), n_in, n_in),
            second: Linear::new(&mut scope.at("ff.net.2"), n_in, n_out),
            norm2: LayerNorm::new(&mut scope.at("norm2"), n_out, IMAGE_EPS),
        }
    }

    fn forward(&self, ctx: &Ctx<'_>, tokens: &Tensor) -> Result<Tensor> {
        let x = self.norm1.forward(ctx, tokens)?;
        let x = self
            .first
            .forward(ctx, &x, After::activation(Activation::GeluErf))?;
        let x = self.second.forward(ctx, &x, After::default())?;
        self.norm2.forward(ctx, &x)
    }
}

/// What a block is given beside its tokens.
struct Beside<'a> {
    /// `[vectors, 6 n]`: per batch element, or per frame of each.
    vector: &'a Tensor,
    /// `[batch, n_text, n]`
    text: &'a Tensor,
    bias: Option<&'a Tensor>,
    /// `[batch, n_image, n]`
    image: Option<&'a Tensor>,
    rope: &'a Rope,
}

#[derive(Debug)]
struct Block {
    /// Six rows, added to the embedding of the timestep.
    table: Parameter,
    qkv: Linear,
    norm_qk: [RmsNorm; 2],
    out: Linear,
    norm_cross: Option<LayerNorm>,
    cross: CrossAttention,
    feed_forward: FeedForward,
    n_heads: usize,
    eps: f32,
}

impl Block {
    fn new(scope: &mut Scope<'_>, config: &WanConfig) -> Self {
        let n = config.n_channels();
        let table = Parameter::new(scope, "scale_shift_table", &[1, 6, n]);
        let mut attention = scope.at("attn1");
        let qkv = Linear::fused(&mut attention, &["to_q", "to_k", "to_v"], n, 3 * n, true);
        let norm_qk = ["norm_q", "norm_k"].map(|name| RmsNorm::new(&mut attention.at(name), n, config.eps));
        let out = Linear::new(&mut attention.at("to_out.0"), n, n);
        let norm_cross = config
            .has_cross_norm
            .then(|| LayerNorm::new(&mut scope.at("norm2"), n, config.eps));
        let cross = CrossAttention::new(&mut scope.at("attn2"), config);
        let feed_forward = FeedForward::new(&mut scope.at("ffn"), n, config.n_inner, Activation::GeluTanh);
        Self {
            table,
            qkv,
            norm_qk,
            out,
            norm_cross,
            cross,
            feed_forward,
            n_heads: config.n_heads,
            eps: config.eps,
        }
    }

    /// Updates `x` `[batch, tokens, n]` in place.
    fn forward(&self, ctx: &Ctx<'_>, x: &Tensor, beside: &Beside<'_>) -> Result<()> {
        let n = x.dim(2);
        let table = ctx.cast(&self.table.tensor(ctx)?)?.reshape(&[1, 6 * n])?;
        let modulation = ctx.add(beside.vector, &table)?;
        let [shift, scale, gate, shift_ff, scale_ff, gate_ff] = split(&modulation)?;
        // The same memory, cut at every change of the modulation.
        let by_vector = by_vector(x, &modulation);
        let cut_x = x.reshape(&by_vector)?;

        let h = ctx.alloc(x.dims())?;
        let cut_h = h.reshape(&by_vector)?;
        modulated_norm_into(ctx, &cut_x, &shift, &scale, self.eps, &cut_h)?;
        let attended = self.self_attention(ctx, h, beside.rope)?;
        drop(cut_h);
        let cut = attended.reshape(&by_vector)?;
        self.out
            .forward_into(ctx, &cut, After::gated(&gate, &cut_x), &cut_x)?;
        drop((attended, cut));

        let normed;
        let h = match &self.norm_cross {
            None => x,
            Some(norm) => {
                normed = norm.forward(ctx, x)?;
                &normed
            }
        };
        let attended = self.cross.attend(ctx, h, beside, self.n_heads)?;
        self.cross
            .out
            .forward_into(ctx, &attended, After::residual(x), x)?;
        drop(attended);

        let h = ctx.alloc(&by_vector)?;
        modulated_norm_into(ctx, &cut_x, &shift_ff, &scale_ff, self.eps, &h)?;
        self.feed_forward
            .forward_into(ctx, &h, After::gated(&gate_ff, &cut_x), &cut_x)
    }

    /// Before the output projection. Uses up its input, whose memory the attention needs.
    fn self_attention(&self, ctx: &Ctx<'_>, h: Tensor, rope: &Rope) -> Result<Tensor> {
        let qkv = self.qkv.forward(ctx, &h, After::default())?;
        drop(h);
        let [q, k, v] = split(&qkv)?;
        for (x, norm) in [&q, &k].into_iter().zip(&self.norm_qk) {
            norm.apply(ctx, x)?;
            rope.apply(ctx, x)?;
        }
        attend(ctx, &q, &k, &v, Attend::all(self.n_heads))
    }
}

/// Attention to the text, and to a picture with the same queries.
#[derive(Debug)]
struct CrossAttention {
    q: Linear,
    norm_q: RmsNorm,
    text: KeysValues,
    image: Option<KeysValues>,
    out: Linear,
}

#[derive(Debug)]
struct KeysValues {
    kv: Linear,
    norm_k: RmsNorm,
}

impl KeysValues {
    fn new(scope: &mut Scope<'_>, names: [&str; 2], norm: &str, config: &WanConfig) -> Self {
        let n = config.n_channels();
        Self {
            kv: Linear::fused(scope, &names, n, 2 * n, true),
            norm_k: RmsNorm::new(&mut scope.at(norm), n, config.eps),
        }
    }

    fn attend(
        &self,
        ctx: &Ctx<'_>,
        q: &Tensor,
        tokens: &Tensor,
        n_heads: usize,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let kv = self.kv.forward(ctx, tokens, After::default())?;
        let [k, v] = split(&kv)?;
        self.norm_k.apply(ctx, &k)?;
        attend(ctx, q, &k, &v, Attend::biased(n_heads, bias))
    }
}

impl CrossAttention {
    fn new(scope: &mut Scope<'_>, config: &WanConfig) -> Self {
        let n = config.n_channels();
        Self {
            q: Linear::new(&mut scope.at("to_q"), n, n),
            norm_q: RmsNorm::new(&mut scope.at("norm_q"), n, config.eps),
            text: KeysValues::new(scope, ["to_k", "to_v"], "norm_k", config),
            image: config
                .n_image
                .map(|_| KeysValues::new(scope, ["add_k_proj", "add_v_proj"], "norm_added_k", config)),
            out: Linear::new(&mut scope.at("to_out.0"), n, n),
        }
    }

    /// Before the output projection.
    fn attend(&self, ctx: &Ctx<'_>, h: &Tensor, beside: &Beside<'_>, n_heads: usize) -> Result<Tensor> {
        let q = self.q.forward(ctx, h, After::default())?;
        self.norm_q.apply(ctx, &q)?;
        let out = self.text.attend(ctx, &q, beside.text, n_heads, beside.bias)?;
        if let (Some(of_image), Some(tokens)) = (&self.image, beside.image) {
            let from_image = of_image.attend(ctx, &q, tokens, n_heads, None)?;
            ctx.backend.add(&out, &from_image, &out)?;
        }
        Ok(out)
    }
}

/// Extents of `x` `[batch, tokens, n]` cut into as many batch elements as there are `vectors`.
fn by_vector(x: &Tensor, vectors: &Tensor) -> [usize; 3] {
    let n_vectors = vectors.dim(0);
    [n_vectors, x.dim(0) * x.dim(1) / n_vectors, x.dim(2)]
}

fn unfit(detail: String) -> TensorError {
    TensorError::Operand { op: "wan", detail }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        conditioning::Conditioning,
        layout::{LatentsShape, TensorLayout},
    };
    use denoised_cpu::{CpuBackend, CpuOptions};
    use denoised_nn::Declare;
    use denoised_sampler::TorchGenerator;
    use denoised_tensor::{
        Backend, DType, PrepareInput, SourceDType, SourceError, SourceTensor, WeightSource,
    };
    use serde_json::Value;
    use std::{borrow::Cow, fs, path::Path};

    // `tests/tables/make_wan.py`.
    fn cases() -> Vec<Value> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tables/wan.json");
        let text = fs::read_to_string(path).expect("the table is part of the crate");
        let table: Value = serde_json::from_str(&text).expect("JSON");
        table["cases"].as_array().expect("cases").clone()
    }

    fn numbers(value: &Value) -> Vec<f64> {
        let list = value.as_array().expect("a list").iter();
        list.map(|number| number.as_f64().expect("a number")).collect()
    }

    fn usizes(value: &Value) -> Vec<usize> {
        numbers(value).into_iter().map(|number| number as usize).collect()
    }

    fn drawn(seed: u64, dims: &[usize]) -> Vec<f32> {
        let mut values = vec![0.0; dims.iter().product()];
        TorchGenerator::new(seed).fill_normal(&mut values);
        values
    }

    /// The weights of a case: name and shape of each.
    struct Weights(Vec<(String, Vec<usize>)>);

    impl Weights {
        fn find(&self, name: &str) -> Result<(usize, &[usize]), SourceError> {
            let place = self.0.iter().position(|(own, _)| own == name);
            let place = place.ok_or_else(|| SourceError(format!("there is no {name}")))?;
            Ok((place, &self.0[place].1))
        }
    }

    impl WeightSource for Weights {
        fn layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), SourceError> {
            Ok((SourceDType::F32, self.find(name)?.1.to_vec()))
        }

        fn tensor(&self, name: &str) -> Result<SourceTensor<'_>, SourceError> {
            let (place, shape) = self.find(name)?;
            let is_factor = name.contains("norm") && name.ends_with("weight");
            let around = if is_factor { 1.0 } else { 0.0 };
            let values = drawn(place as u64, shape).into_iter().map(|x| around + 0.3 * x);
            Ok(SourceTensor {
                dtype: SourceDType::F32,
                shape: shape.to_vec(),
                bytes: Cow::Owned(values.flat_map(f32::to_le_bytes).collect()),
            })
        }
    }

    /// `[batch, c, f, h, w]` as the loop holds them, and back.
    fn by_element(
        values: &[f32],
        dims: &[usize],
        convert: impl Fn(&[f32], &LatentsShape) -> Vec<f32>,
    ) -> Vec<f32> {
        let shape = LatentsShape {
            c: dims[1],
            n_frames: dims[2],
            h: dims[3],
            w: dims[4],
        };
        let rows = values.chunks_exact(shape.n_elements());
        rows.flat_map(|row| convert(row, &shape)).collect()
    }

    #[test]
    fn predictions_are_diffusers_predictions() {
        for case in cases() {
            let map = case["config"].as_object().expect("an object").clone();
            let config = WanConfig::read(&Config::new(Path::new("config.json"), map)).expect("supported");
            let list = case["weights"].as_array().expect("a list").iter();
            let named = |pair: &Value| (pair[0].as_str().expect("a name").to_owned(), usizes(&pair[1]));
            let weights = Weights(list.map(named).collect());
            let mut declare = Declare::new(weights.0.iter().map(|(name, _)| name.clone()));
            let wan = Wan::new(&mut declare.at(""), config.clone());
            let specs = declare.finish();
            let n_sources: usize = specs.iter().map(|spec| spec.sources.len()).sum();
            assert_eq!(n_sources, weights.0.len(), "every weight is used");
            let backend = CpuBackend::new(CpuOptions::default()).expect("a backend");
            let input = PrepareInput::Build(&weights);
            let prepared = backend.prepare(&specs, input, &mut |_, _| {}).expect("prepared");
            let ctx = Ctx {
                backend: &backend,
                weights: &prepared.weights,
                dtype: DType::F32,
            };

            let mut dims = usizes(&case["latents"]);
            let (n_batch, n_frames) = (dims[0], dims[2]);
            let layout = TensorLayout::Ncfhw;
            let latents = by_element(&drawn(1000, &dims), &dims, |x, shape| layout.to_loop(x, shape));
            let latents = ctx
                .upload_f32(&latents, &[n_batch, n_frames * dims[3], dims[4], dims[1]])
                .expect("uploaded");
            let [n_tokens, n_padded, n_image_tokens] = ["n_tokens", "n_padded", "n_image_tokens"]
                .map(|key| case[key].as_u64().expect("a count") as usize);
            let tokens = drawn(1001, &[n_batch, n_tokens, config.n_text]);
            // One token of zeros stands for all the padding.
            let n_kept = n_tokens + usize::from(n_padded > n_tokens);
            let mut padded = Vec::new();
            for element in tokens.chunks_exact(n_tokens * config.n_text) {
                padded.extend_from_slice(element);
                padded.resize(padded.len() + (n_kept - n_tokens) * config.n_text, 0.0);
            }
            let padded = ctx
                .upload_f32(&padded, &[n_batch, n_kept, config.n_text])
                .expect("uploaded");
            let image_tokens = config.n_image.map(|n_image| {
                let dims = [n_batch, n_image_tokens, n_image];
                ctx.upload_f32(&drawn(1002, &dims), &dims).expect("uploaded")
            });
            let conditioning = Conditioning {
                n_last_repeats: n_padded - n_kept + 1,
                image_tokens,
                ..Conditioning::of_tokens(padded)
            };
            let timesteps: Vec<Vec<f64>> = case["timesteps"]
                .as_array()
                .expect("a list")
                .iter()
                .map(numbers)
                .collect();
            let timestep_dims = match timesteps.len() {
                1 => vec![n_batch],
                n => vec![n, n_frames],
            };
            let timesteps: Vec<f32> = timesteps.concat().into_iter().map(|t| t as f32).collect();
            let timesteps = ctx.upload_f32(&timesteps, &timestep_dims).expect("uploaded");
            let input = DenoiserInput {
                latents: &latents,
                n_frames,
                timesteps: &timesteps,
                conditioning: &conditioning,
                references: &[],
            };
            let out = wan.forward(&ctx, &input).expect("it runs");
            let out = ctx.download_f32(&out).expect("downloaded");
            dims[1] = config.c_out;
            let ours = by_element(&out, &dims, |x, shape| layout.of_loop(x, shape));
            let theirs = numbers(&case["output"]);
            assert_eq!(ours.len(), theirs.len());
            let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
            let difference = norm(&mut ours.iter().zip(&theirs).map(|(a, b)| f64::from(*a) - b));
            let error = difference / norm(&mut theirs.iter().copied());
            assert!(error < 2e-6, "error {error:e} of {}", case["config"]);
        }
    }
}
