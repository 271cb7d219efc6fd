//! What transformers over patches of latents have in common: the way from latents to tokens with sinusoids of their places, and back.

use denoised_checkpoint::Config;
use denoised_nn::{After, Attend, Conv2d, Ctx, Linear, Result, Scope, attend, split};
use denoised_tensor::{Activation, PatchOrder, Tensor};
use serde_json::Value;

/// diffusers' `PatchEmbed` without a stored table: squares of latents as tokens, to which sinusoids of row and column are added. However
/// many patches there are, their positions span the same range.
#[derive(Debug)]
pub(crate) struct PatchEmbed {
    patches: Conv2d,
    n_channels: usize,
    /// Patches each way that positions count: the span of all positions.
    base: usize,
    /// Positions are divided by it.
    scale: f32,
}

impl PatchEmbed {
    /// The weights `proj` at this place; `sample_size` is the side for which positions are whole numbers, in latents.
    pub(crate) fn new(
        scope: &mut Scope<'_>,
        (c_in, n_channels): (usize, usize),
        patch: usize,
        sample_size: usize,
        scale: f32,
    ) -> Self {
        Self {
            patches: Conv2d::patches(&mut scope.at("proj"), c_in, n_channels, patch),
            n_channels,
            base: sample_size / patch,
            scale,
        }
    }

    /// Latents `[batch, h, w, c_in]` to tokens `[batch, n, n_channels]`, row by row.
    pub(crate) fn forward(&self, ctx: &Ctx<'_>, latents: &Tensor) -> Result<Tensor> {
        let x = self.patches.forward(ctx, latents, After::default())?;
        let (h, w, half) = (x.dim(1), x.dim(2), self.n_channels / 2);
        let line = |len: usize, dims: &[usize]| {
            let values = position_line(self.n_channels, len, self.base, self.scale);
            ctx.cast(&ctx.upload_f32(&values, dims)?)
        };
        let columns = line(w, &[1, 1, w, half])?;
        let rows = line(h, &[1, h, 1, half])?;
        let (first, second) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
        ctx.backend.add(&first, &columns, &first)?;
        ctx.backend.add(&second, &rows, &second)?;
        x.reshape(&[x.dim(0), h * w, self.n_channels])
    }
}

/// diffusers' two-dimensional sinusoids in one dimension, `[len, n_channels / 2]`: the first half of the channels embeds the column, the
/// second the row, both by these values. Positions are scaled so that `base` patches span the same range at any `len`, then divided by
/// `scale`. Computed in float64 from float32 positions, as there.
pub(crate) fn position_line(n_channels: usize, len: usize, base: usize, scale: f32) -> Vec<f32> {
    let n_frequencies = n_channels / 4;
    let frequency = |idx: usize| 1.0 / 10_000f64.powf(idx as f64 / n_frequencies as f64);
    let mut line = Vec::with_capacity(len * n_channels / 2);
    for idx in 0..len {
        let position = f64::from(idx as f32 / (len as f64 / base as f64) as f32 / scale);
        let angles = (0..n_frequencies).map(|idx| position * frequency(idx));
        line.extend(angles.clone().map(|angle| angle.sin() as f32));
        line.extend(angles.map(|angle| angle.cos() as f32));
    }
    line
}

/// Tokens `[batch, n, patch patch c_out]` to a prediction of the shape of `latents`: of `c_out` channels the first ones. Others, which
/// a network that learned variances has, are left out.
pub(crate) fn to_prediction(
    ctx: &Ctx<'_>,
    tokens: &Tensor,
    (patch, c_out): (usize, usize),
    latents: &Tensor,
) -> Result<Tensor> {
    let mut dims = latents.dims().to_vec();
    let c_in = dims[3];
    dims[3] = c_out;
    let out = ctx.alloc(&dims)?;
    let order = PatchOrder::SpatialFirst;
    ctx.backend.unpatchify(tokens, patch, order, &out)?;
    out.narrow(3, 0, c_in)
}

/// diffusers' `Attention` of tokens among themselves.
#[derive(Debug)]
pub(crate) struct SelfAttention {
    qkv: Linear,
    out: Linear,
    n_heads: usize,
}

impl SelfAttention {
    pub(crate) fn new(scope: &mut Scope<'_>, n: usize, n_heads: usize, has_qkv_bias: bool) -> Self {
        Self {
            qkv: Linear::fused(scope, &["to_q", "to_k", "to_v"], n, 3 * n, has_qkv_bias),
            out: Linear::new(&mut scope.at("to_out.0"), n, n),
            n_heads,
        }
    }

    /// Of `h` `[batch, tokens, n]`, times `gate` `[batch, n]` added to `x`.
    pub(crate) fn add_to(&self, ctx: &Ctx<'_>, h: &Tensor, gate: &Tensor, x: &Tensor) -> Result<()> {
        let [q, k, v] = split(&self.qkv.forward(ctx, h, After::default())?)?;
        let h = attend(ctx, &q, &k, &v, Attend::all(self.n_heads))?;
        self.out.forward_into(ctx, &h, After::gated(gate, x), x)
    }
}

/// The settings of transformers over patches that diffusers once kept in one class, `Transformer2DModel`.
#[derive(Clone, Debug)]
pub(crate) struct PatchTransformerConfig {
    pub(crate) sample_size: usize,
    pub(crate) patch: usize,
    pub(crate) c_in: usize,
    /// Those of the latents, or twice as many where variances were learned.
    pub(crate) c_out: usize,
    pub(crate) n_layers: usize,
    pub(crate) n_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) has_qkv_bias: bool,
    pub(crate) activation: Activation,
    pub(crate) norm_eps: f32,
}

/// Defaults of diffusers' classes that differ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PatchTransformerDefaults {
    pub(crate) norm_type: &'static str,
    pub(crate) out_channels: Option<usize>,
    pub(crate) sample_size: usize,
    pub(crate) norm_eps: f64,
}

/// Keys that belong to other uses of that class, or change nothing without training.
const KEYS_WITHOUT_EFFECT: [&str; 3] = ["dropout", "norm_num_groups", "upcast_attention"];

impl PatchTransformerConfig {
    /// Reads what both classes have in common; the rest is the caller's, who ends with [`PatchTransformerConfig::deny_unread`].
    pub(crate) fn read(
        config: &Config,
        defaults: &PatchTransformerDefaults,
    ) -> std::result::Result<Self, crate::ModelError> {
        let c_in = config.usize_or("in_channels", 4)?;
        let eps = config.f64_or("norm_eps", defaults.norm_eps)?;
        let read = Self {
            sample_size: config.usize_or("sample_size", defaults.sample_size)?,
            patch: config.usize_or("patch_size", 2)?,
            c_in,
            c_out: match config.has("out_channels") {
                true => config.opt_usize("out_channels")?.unwrap_or(c_in),
                false => defaults.out_channels.unwrap_or(c_in),
            },
            n_layers: config.usize_or("num_layers", 28)?,
            n_heads: config.usize_or("num_attention_heads", 16)?,
            head_dim: config.usize_or("attention_head_dim", 72)?,
            has_qkv_bias: config.bool_or("attention_bias", true)?,
            activation: match config.str_or("activation_fn", "gelu-approximate")? {
                "gelu-approximate" => Activation::GeluTanh,
                "gelu" => Activation::GeluErf,
                _ => return Err(config.wrong("activation_fn", "gelu-approximate or gelu").into()),
            },
            norm_eps: eps as f32,
        };
        config.within("patch_size", read.patch, 1..=64)?;
        config.within("sample_size", read.sample_size, read.patch..=1 << 12)?;
        config.within("in_channels", read.c_in, 1..=1 << 12)?;
        config.within("num_layers", read.n_layers, 1..=512)?;
        config.within("num_attention_heads", read.n_heads, 1..=1 << 10)?;
        config.within("attention_head_dim", read.head_dim, 1..=1 << 10)?;
        if ![c_in, 2 * c_in].contains(&read.c_out) {
            let expected = format!("in_channels = {c_in}, or twice that where variances were learned");
            return Err(config.wrong("out_channels", &expected).into());
        }
        if !read.n_channels().is_multiple_of(4) {
            let expected = "a multiple of 4 over all heads";
            return Err(config.wrong("attention_head_dim", expected).into());
        }
        if !(eps.is_finite() && eps > 0.0) {
            return Err(config.wrong("norm_eps", "a number above 0").into());
        }
        if config.str_or("norm_type", defaults.norm_type)? != defaults.norm_type {
            return Err(config.wrong("norm_type", defaults.norm_type).into());
        }
        for key in [
            "norm_elementwise_affine",
            "double_self_attention",
            "only_cross_attention",
            "use_linear_projection",
        ] {
            config.only(key, &[false.into(), Value::Null])?;
        }
        config.only("attention_type", &["default".into(), Value::Null])?;
        config.only("num_vector_embeds", &[Value::Null])?;
        Ok(read)
    }

    /// Width of the network.
    pub(crate) fn n_channels(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Refuses keys that nobody has read.
    pub(crate) fn deny_unread(config: &Config) -> std::result::Result<(), crate::ModelError> {
        Ok(config.deny_unread(&KEYS_WITHOUT_EFFECT)?)
    }
}

#[cfg(test)]
mod tests {
    use super::position_line;

    #[test]
    fn positions_span_the_same_range_at_any_size_and_are_divided_by_the_scale() {
        // Arithmetic by hand: 8 channels have the frequencies 1 and 1/100; of 4 patches in the span of 2, the last is at
        // 3 / (4 / 2) / 2 = 0.75.
        let line = position_line(8, 4, 2, 2.0);
        assert_eq!(line.len(), 16);
        let expected = [0.75f64.sin(), 0.0075f64.sin(), 0.75f64.cos(), 0.0075f64.cos()];
        for (ours, expected) in line[12..].iter().zip(expected) {
            assert!((f64::from(*ours) - expected).abs() < 1e-7, "{ours} {expected}");
        }
    }
}
