//! The contract between models and devices: every op with its formula, shapes and what may be fused into it.
//!
//! R1. One backend instance is one device with one ordered stream. Ops are enqueued in program order and may return before they
//!     have run; only [`Backend::download`], [`Backend::all_finite`] and [`Backend::synchronize`] wait. A device fault may be
//!     reported by a later op.
//! R2. The caller allocates outputs ([`Backend::alloc`]) and ops write into them, so that views, arenas and captured graphs work.
//!     Values that change from step to step (timesteps, guidance, sampler coefficients) are small tensors, never host scalars.
//! R3. An output must not overlap an input, except that it may be the very same view where an op says so ("in place").
//! R4. Statistics (means, variances, softmax sums) and accumulations are f32 or better, whatever the dtype.
//! R5. `b` below is the batch element, `c` the channel. Broadcast means numpy's rule: extents of 1 (or missing leading ones) repeat.
//! R6. No method has a default body: every backend answers for every op.
//! R7. All float operands of an op have one dtype, the output's, except where the op or its operands say otherwise: small tables and
//!     scalars (`timesteps`, `coefficients`, `guidance`, attention's `bias`, `cos`, `sin`) and the sampler's state are always f32,
//!     [`Backend::copy`] converts, and [`Backend::to_pixels`] takes any float. Vectors and tables of weights are f32 on every backend.
//!     A backend may take fewer dtypes than that. What each op accepts is checked by [`crate::check`], alike for all backends.

use crate::{DType, PrepareInput, Prepared, Result, Tensor, Weight, WeightSpec};

/// Element-wise functions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x`
    #[default]
    None,
    /// `x * sigmoid(x)`
    Silu,
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`
    GeluTanh,
    /// `0.5 x (1 + erf(x / sqrt(2)))`
    GeluErf,
    /// `x * sigmoid(1.702 x)`, CLIP's `quick_gelu`
    QuickGelu,
    /// `max(x, 0)`
    Relu,
    /// `tanh(x)`
    Tanh,
}

/// What is done to a product or convolution before it is stored:
/// `out = residual + gate[b] * activation(product + bias)`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Epilogue<'a> {
    /// `[n]`, a [`crate::WeightKind::Vector`].
    pub bias: Option<&'a Weight>,
    /// Applied after the bias.
    pub activation: Activation,
    /// `[batch, n]` (or `[1, n]`), one row per batch element (dimension 0 of the output); dtype of the output.
    pub gate: Option<&'a Tensor>,
    /// Shape and dtype of the output; may be the output itself (in place).
    pub residual: Option<&'a Tensor>,
}

/// How a convolution walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvSpec {
    /// Stride in both directions; the weight was declared with the same.
    pub stride: usize,
    /// Zero padding `[top, left, bottom, right]`.
    pub padding: [usize; 4],
    /// The input is first enlarged by this factor with nearest neighbours (1 or 2), without being stored.
    pub upsample: usize,
}

/// What attention does beside `softmax(scale q kᵀ) v`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSpec<'a> {
    /// Query heads; the last dimension of `q` is `n_heads * head_dim`.
    pub n_heads: usize,
    /// Key and value heads; `n_heads` is a multiple of it, query head `i` reads key head `i * n_kv_heads / n_heads`.
    pub n_kv_heads: usize,
    /// Factor of the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Query `i` sees keys `0..=i` only (queries and keys are equally many).
    pub is_causal: bool,
    /// f32, broadcast to `[batch, n_heads, n_queries, n_keys]`, added to the scaled scores; `-inf` hides a key, and a
    /// query that sees none yields zeros. Four dimensions.
    pub bias: Option<&'a Tensor>,
}

/// `x * (1 + scale[b]) + shift[b]`, each `[batch, c]` (or `[1, c]`) in the dtype of `x`.
#[derive(Clone, Copy, Debug)]
pub struct Modulation<'a> {
    /// Added to one, then multiplied.
    pub scale: &'a Tensor,
    /// Added.
    pub shift: &'a Tensor,
}

/// Which half of a gated unit is activated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GateOrder {
    /// `first * activation(second)` (GEGLU in diffusers).
    SecondActivated,
    /// `activation(first) * second` (SwiGLU).
    FirstActivated,
}

/// Order of the features of a patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PatchOrder {
    /// `(dy, dx, c)`
    SpatialFirst,
    /// `(c, dy, dx)`
    ChannelFirst,
}

/// Which channels a rotation pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// `2i` with `2i + 1`.
    Interleaved,
    /// `i` with `i + head_dim / 2`.
    Halves,
}

/// Sinusoidal embedding of timesteps, `n = dim / 2` frequencies:
/// `f_i = exp(-ln(max_period) i / (n - downscale_freq_shift))`, angles `scale t f_i`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimestepSpec {
    /// Cosines first, if set; sines first otherwise.
    pub flip_sin_to_cos: bool,
    /// See the formula.
    pub downscale_freq_shift: f32,
    /// Factor of the timestep.
    pub scale: f32,
    /// Longest period, usually 10000.
    pub max_period: f32,
}

impl TimestepSpec {
    /// As nearly all of diffusers' transformers have it: cosines first, timesteps as they are.
    pub const COSINES_FIRST: Self = Self {
        flip_sin_to_cos: true,
        downscale_freq_shift: 0.0,
        scale: 1.0,
        max_period: 10_000.0,
    };
}

/// Operands of [`Backend::step`].
#[derive(Clone, Copy, Debug)]
pub struct StepArgs<'a> {
    /// f32 `[batch, ..]`, what the sampler was given: its state is kept in f32 whatever the model's dtype.
    pub latents: &'a Tensor,
    /// Prediction for the prompt; shape of `latents`, any float dtype.
    pub conditional: &'a Tensor,
    /// Prediction for the negative prompt (shape and dtype of `conditional`) and the guidance scale, f32 `[batch]`; `None` means the
    /// conditional one alone.
    pub unconditional: Option<(&'a Tensor, &'a Tensor)>,
    /// f32 `[batch, 3]`, one row per batch element: factors of latents, guided prediction and noise.
    pub coefficients: &'a Tensor,
    /// Fresh noise, f32; shape of `latents`. Without it the third factor is not used.
    pub noise: Option<&'a Tensor>,
    /// Where to store the guided prediction, if anybody wants it: f32, shape of `latents`. Overlaps no other operand.
    pub guided_out: Option<&'a Tensor>,
}

/// What a backend runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// As the user names it: `cpu`, `cuda:0`.
    pub name: String,
    /// Processor or GPU model and the instruction set in use.
    pub description: String,
    /// Threads of a CPU backend; 1 otherwise.
    pub n_threads: usize,
}

/// Memory of activations and scratch; weights are counted by [`Prepared::n_bytes`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// In use now.
    pub used_bytes: u64,
    /// Most that was in use at once.
    pub peak_bytes: u64,
}

/// A device. See the rules in the module's head.
pub trait Backend: std::fmt::Debug {
    /// What this is.
    fn info(&self) -> DeviceInfo;

    /// Element type of activations: matrices and kernels are kept in it, or in what the device widens to it, unless their
    /// [`crate::Precision`] says otherwise.
    fn dtype(&self) -> DType;

    // ---- repetition ----

    /// What `body` makes of `inputs`. A backend may record the ops that `body` enqueues and replay them, without calling it, when `key`
    /// and the shapes, dtypes and order of `inputs` are the same again.
    ///
    /// So `body` must depend on nothing but `key`, the shapes of `inputs` and tensors that outlive the pipeline (weights); whatever may
    /// differ from call to call goes through `inputs`. Tensors that `body` uploads are constants of the recording. `body` must not wait
    /// ([`Backend::download`], [`Backend::all_finite`], [`Backend::synchronize`]). What is returned belongs to the caller and stays as it
    /// is when the recording runs again.
    ///
    /// # Errors
    /// Those of `body`; nothing is recorded then.
    fn repeat(
        &self,
        key: u64,
        inputs: &[&Tensor],
        body: &mut dyn FnMut(&[&Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>>;

    // ---- memory ----

    /// Fresh memory with undefined elements (debug builds fill floats with NaN).
    fn alloc(&self, dims: &[usize], dtype: DType) -> Result<Tensor>;

    /// A dense tensor holding `bytes` (little-endian, row-major).
    fn upload(&self, bytes: &[u8], dims: &[usize], dtype: DType) -> Result<Tensor>;

    /// Waits for `x` and writes its elements row-major, little-endian to `out`, which has exactly their size.
    fn download(&self, x: &Tensor, out: &mut [u8]) -> Result<()>;

    /// Waits until everything enqueued has run; reports faults.
    fn synchronize(&self) -> Result<()>;

    /// Activation memory so far.
    fn memory(&self) -> MemoryStats;

    // ---- weights ----

    /// Makes `specs` usable by this backend's kernels. `progress(done_bytes, total_bytes)` is called now and then.
    ///
    /// Building and taking a shared block give bit-identical results. A product or convolution whose activations are of another element type
    /// than the [`crate::Precision`] of its weight says is refused.
    ///
    /// # Errors
    /// [`crate::TensorError::Weight`] for a missing tensor or another shape (all of them are listed, not only the first);
    /// [`crate::TensorError::SharedWeights`] if the shared block was made from other specs or by another version or instruction set;
    /// [`crate::TensorError::OutOfMemory`] before anything is allocated.
    fn prepare(
        &self,
        specs: &[WeightSpec],
        input: PrepareInput<'_>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Prepared>;

    /// A [`crate::WeightKind::Vector`] or [`crate::WeightKind::Table`] as a read-only f32 tensor of its shape.
    fn weight_tensor(&self, weight: &Weight) -> Result<Tensor>;

    // ---- products ----

    /// `out[.., n] = epilogue(sum_k x[.., k] w[n, k])`. `x` is `[.., k]`, `out` is `[.., n]` with equal leading dimensions.
    fn linear(&self, x: &Tensor, w: &Weight, epilogue: &Epilogue<'_>, out: &Tensor) -> Result<()>;

    /// `out[b, y, x, o] = epilogue(sum_{i, j, c} in[b, y s + i - top, x s + j - left, c] w[o, c, i, j])`, zero outside.
    /// `x` is `[batch, h, w, c_in]`, `out` is `[batch, h_out, w_out, c_out]`.
    fn conv2d(
        &self,
        x: &Tensor,
        w: &Weight,
        spec: &ConvSpec,
        epilogue: &Epilogue<'_>,
        out: &Tensor,
    ) -> Result<()>;

    /// `out = softmax(scale q kᵀ + bias) v` per batch element and head.
    /// `q`, `out`: `[batch, n_queries, n_heads * head_dim]`; `k`, `v`: `[batch, n_keys, n_kv_heads * head_dim]`.
    fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        spec: &AttentionSpec<'_>,
        out: &Tensor,
    ) -> Result<()>;

    // ---- norms ----

    /// `y = (x - mean) / sqrt(var + eps)` over the last dimension (biased variance), then `y * weight + bias` with `affine`
    /// (weight first, bias optional), then `modulation`. In place allowed.
    fn layer_norm(
        &self,
        x: &Tensor,
        affine: Option<(&Weight, Option<&Weight>)>,
        eps: f32,
        modulation: Option<Modulation<'_>>,
        out: &Tensor,
    ) -> Result<()>;

    /// `y = x / sqrt(mean(x^2) + eps) * weight` over consecutive groups of `group_len` channels (a head, or the whole row);
    /// `weight` has `group_len` elements. In place allowed.
    fn rms_norm(
        &self,
        x: &Tensor,
        weight: Option<&Weight>,
        group_len: usize,
        eps: f32,
        out: &Tensor,
    ) -> Result<()>;

    /// `out = x |like| / |x|` over consecutive groups of `group_len` channels, where `|y|` is `sqrt(sum(y^2))`; zeros where `|x|` is zero.
    /// `like` has the shape of `x`. In place (`out` = `x`) allowed.
    fn match_norm(&self, x: &Tensor, like: &Tensor, group_len: usize, out: &Tensor) -> Result<()>;

    /// Group norm of `[batch, .., c]` over all positions and the `c / n_groups` channels of a group, `weight` and `bias` per
    /// channel, then `activation`. In place allowed.
    fn group_norm(
        &self,
        x: &Tensor,
        affine: (&Weight, &Weight),
        n_groups: usize,
        eps: f32,
        activation: Activation,
        out: &Tensor,
    ) -> Result<()>;

    // ---- element-wise ----

    /// `out = a + b`, `b` broadcast to `a`. In place (`out` = `a`) allowed.
    fn add(&self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()>;

    /// `out = a * b`, `b` broadcast to `a`. In place (`out` = `a`) allowed.
    fn mul(&self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()>;

    /// `out = residual + gate * x`, `gate` broadcast to `x`. In place (`out` = `residual`) allowed.
    fn gated_add(&self, residual: &Tensor, gate: &Tensor, x: &Tensor, out: &Tensor) -> Result<()>;

    /// `out = x * scale + shift`. In place allowed.
    fn affine(&self, x: &Tensor, scale: f32, shift: f32, out: &Tensor) -> Result<()>;

    /// `out = activation(x)`. In place allowed.
    fn activation(&self, x: &Tensor, activation: Activation, out: &Tensor) -> Result<()>;

    /// Halves `x` `[.., 2f]` along its last dimension and combines them to `out` `[.., f]`.
    fn gated(&self, x: &Tensor, activation: Activation, order: GateOrder, out: &Tensor) -> Result<()>;

    /// Rotates each head of `x` `[batch, tokens, n_heads * head_dim]` in place of `out`: pairs `(p, q)` become
    /// `(p cos - q sin, q cos + p sin)`; `cos`, `sin` are f32 `[tokens, head_dim / 2]` whatever the dtype of `x`. In place allowed.
    fn rope(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, style: RopeStyle, out: &Tensor) -> Result<()>;

    // ---- lookups and layout ----

    /// `out[.., c] = table[ids[..], c]`; `ids` is i32, `out` has one dimension more and any float dtype. An id out of range is an error.
    fn embedding(&self, ids: &Tensor, table: &Weight, out: &Tensor) -> Result<()>;

    /// `out[b, c] = x[b, rows[b], c]`; `rows` is i32 `[batch]`. A row out of range is an error.
    fn gather_rows(&self, x: &Tensor, rows: &Tensor, out: &Tensor) -> Result<()>;

    /// Embeds f32 timesteps `[batch]` to `[batch, dim]` of any float dtype, `dim` even.
    fn timestep_embedding(&self, timesteps: &Tensor, spec: &TimestepSpec, out: &Tensor) -> Result<()>;

    /// `[batch, h, w, c]` to tokens `[batch, (h/p)(w/p), p p c]`, row-major over patches.
    fn patchify(&self, x: &Tensor, patch: usize, order: PatchOrder, out: &Tensor) -> Result<()>;

    /// Inverse of [`Backend::patchify`]; `out` `[batch, h, w, c]` gives the sides.
    fn unpatchify(&self, x: &Tensor, patch: usize, order: PatchOrder, out: &Tensor) -> Result<()>;

    /// `out`'s dimension `i` is `x`'s dimension `axes[i]`. Copies.
    fn permute(&self, x: &Tensor, axes: &[usize], out: &Tensor) -> Result<()>;

    /// `[batch, h, w, c]` to `[batch, 2h, 2w, c]`, each pixel four times.
    fn upsample_nearest(&self, x: &Tensor, out: &Tensor) -> Result<()>;

    /// Copies `x`, broadcast to the shape of `out`, converting the dtype: to a float from any (float to float rounds to nearest
    /// even), to an integer only from the same.
    fn copy(&self, x: &Tensor, out: &Tensor) -> Result<()>;

    /// Sets every element of `out`, which is a float.
    fn fill(&self, out: &Tensor, value: f32) -> Result<()>;

    // ---- sampling and output ----

    /// Guidance and sampler update in one pass, per batch element:
    /// `g = unconditional + guidance (conditional - unconditional)`, `out = c0 latents + c1 g + c2 noise`. In place (`out` = `latents`) allowed.
    /// `out` is f32, as the state it replaces; see [`StepArgs`] for the others.
    fn step(&self, args: &StepArgs<'_>, out: &Tensor) -> Result<()>;

    /// `u = clamp(x / 2 + 0.5, 0, 1)`; stored as it is where `out` is f32, as `round_half_even(255 u)` where it is u8. `x` is any
    /// float. In place allowed where both are f32.
    fn to_pixels(&self, x: &Tensor, out: &Tensor) -> Result<()>;

    /// Whether no element of `x`, which is a float, is NaN or infinite. Waits.
    fn all_finite(&self, x: &Tensor) -> Result<bool>;
}
