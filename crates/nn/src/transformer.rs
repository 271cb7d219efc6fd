//! The transformer of a U-Net: positions of a picture attend to each other and to a text.

use crate::{
    After, Attend, Ctx, GatedFeedForward, GroupNorm, LayerNorm, Linear, Result, Scope, attend, split,
};
use denoised_tensor::{Activation, Tensor};

/// Constants of diffusers' classes that no configuration changes.
const GROUP_EPS: f32 = 1e-6;
const LAYER_EPS: f32 = 1e-5;

/// Widths and switches of a [`Transformer2d`].
#[derive(Clone, Copy, Debug)]
pub struct Transformer2dSpec {
    /// Channels of the picture.
    pub n_channels: usize,
    /// Heads of every attention; the inner width is the largest multiple of it within `n_channels`.
    pub n_heads: usize,
    /// Transformer blocks.
    pub n_layers: usize,
    /// Channels of the text.
    pub n_context: usize,
    /// Groups of the norm at the beginning.
    pub n_groups: usize,
    /// Whether the first attention of a block is to the text as well.
    pub is_only_cross: bool,
}

/// diffusers' `Transformer2DModel` on pictures: norm, a projection, blocks of self-attention, cross-attention and GEGLU, a projection;
/// plus the input.
#[derive(Clone, Debug)]
pub struct Transformer2d {
    norm: GroupNorm,
    proj_in: Linear,
    blocks: Vec<Block>,
    proj_out: Linear,
}

impl Transformer2d {
    /// `norm`, `proj_in`, `transformer_blocks` and `proj_out` at this place. The projections may be 1x1 convolutions in the files.
    pub fn new(scope: &mut Scope<'_>, spec: &Transformer2dSpec) -> Self {
        let n = spec.n_channels;
        let n_inner = n / spec.n_heads * spec.n_heads;
        Self {
            norm: GroupNorm::new(&mut scope.at("norm"), n, spec.n_groups, GROUP_EPS),
            proj_in: Linear::new(&mut scope.at("proj_in"), n, n_inner),
            blocks: (0..spec.n_layers)
                .map(|layer_idx| {
                    let mut scope = scope.at(format_args!("transformer_blocks.{layer_idx}"));
                    Block::new(&mut scope, n_inner, spec)
                })
                .collect(),
            proj_out: Linear::new(&mut scope.at("proj_out"), n_inner, n),
        }
    }

    /// `x` `[batch, h, w, c]` with the text `context` `[batch, tokens, n_context]` to `out` of the shape of `x`. `bias` is added to the
    /// scores of the text, broadcast to `[batch, n_heads, h w, tokens]`.
    ///
    /// # Errors
    /// The device's.
    pub fn forward_into(
        &self,
        ctx: &Ctx<'_>,
        x: &Tensor,
        context: &Tensor,
        bias: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<()> {
        let dims = [x.dim(0), x.dim(1) * x.dim(2), x.dim(3)];
        let h = self.norm.forward(ctx, x, Activation::None)?.reshape(&dims)?;
        let h = self.proj_in.forward(ctx, &h, After::default())?;
        for block in &self.blocks {
            block.forward(ctx, &h, context, bias)?;
        }
        let (x, out) = (x.reshape(&dims)?, out.reshape(&dims)?);
        self.proj_out.forward_into(ctx, &h, After::residual(&x), &out)
    }
}

/// diffusers' `BasicTransformerBlock` with layer norms.
#[derive(Clone, Debug)]
struct Block {
    norm1: LayerNorm,
    first: First,
    norm2: LayerNorm,
    cross: CrossAttention,
    norm3: LayerNorm,
    feed_forward: GatedFeedForward,
}

#[derive(Clone, Debug)]
enum First {
    Own(SelfAttention),
    Cross(CrossAttention),
}

impl Block {
    fn new(scope: &mut Scope<'_>, n: usize, spec: &Transformer2dSpec) -> Self {
        let first = if spec.is_only_cross {
            First::Cross(CrossAttention::new(&mut scope.at("attn1"), n, spec))
        } else {
            First::Own(SelfAttention::new(&mut scope.at("attn1"), n, spec))
        };
        Self {
            norm1: LayerNorm::new(&mut scope.at("norm1"), n, LAYER_EPS),
            first,
            norm2: LayerNorm::new(&mut scope.at("norm2"), n, LAYER_EPS),
            cross: CrossAttention::new(&mut scope.at("attn2"), n, spec),
            norm3: LayerNorm::new(&mut scope.at("norm3"), n, LAYER_EPS),
            feed_forward: GatedFeedForward::new(&mut scope.at("ff"), n, 4 * n),
        }
    }

    /// In place.
    fn forward(&self, ctx: &Ctx<'_>, x: &Tensor, context: &Tensor, bias: Option<&Tensor>) -> Result<()> {
        let h = self.norm1.forward(ctx, x)?;
        match &self.first {
            First::Own(attention) => attention.forward(ctx, &h, x)?,
            First::Cross(attention) => attention.forward(ctx, &h, context, bias, x)?,
        }
        let h = self.norm2.forward(ctx, x)?;
        self.cross.forward(ctx, &h, context, bias, x)?;
        let h = self.norm3.forward(ctx, x)?;
        self.feed_forward.forward_into(ctx, &h, After::residual(x), x)
    }
}

/// Attention of tokens to each other.
#[derive(Clone, Debug)]
struct SelfAttention {
    qkv: Linear,
    out: Linear,
    n_heads: usize,
}

impl SelfAttention {
    fn new(scope: &mut Scope<'_>, n: usize, spec: &Transformer2dSpec) -> Self {
        Self {
            qkv: Linear::fused(scope, &["to_q", "to_k", "to_v"], n, 3 * n, false),
            out: Linear::new(&mut scope.at("to_out.0"), n, n),
            n_heads: spec.n_heads,
        }
    }

    /// Added to `out`.
    fn forward(&self, ctx: &Ctx<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
        let [q, k, v] = split(&self.qkv.forward(ctx, x, After::default())?)?;
        let h = attend(ctx, &q, &k, &v, Attend::all(self.n_heads))?;
        self.out.forward_into(ctx, &h, After::residual(out), out)
    }
}

/// Attention of tokens to a text.
#[derive(Clone, Debug)]
struct CrossAttention {
    q: Linear,
    kv: Linear,
    out: Linear,
    n_heads: usize,
}

impl CrossAttention {
    fn new(scope: &mut Scope<'_>, n: usize, spec: &Transformer2dSpec) -> Self {
        Self {
            q: Linear::without_bias(&mut scope.at("to_q"), n, n),
            kv: Linear::fused(scope, &["to_k", "to_v"], spec.n_context, 2 * n, false),
            out: Linear::new(&mut scope.at("to_out.0"), n, n),
            n_heads: spec.n_heads,
        }
    }

    /// Added to `out`.
    fn forward(
        &self,
        ctx: &Ctx<'_>,
        x: &Tensor,
        context: &Tensor,
        bias: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<()> {
        let q = self.q.forward(ctx, x, After::default())?;
        let [k, v] = split(&self.kv.forward(ctx, context, After::default())?)?;
        let h = attend(ctx, &q, &k, &v, Attend::biased(self.n_heads, bias))?;
        self.out.forward_into(ctx, &h, After::residual(out), out)
    }
}
