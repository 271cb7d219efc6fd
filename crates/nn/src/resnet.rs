//! Convolutional blocks of autoencoders: residual block, attention over positions, enlargement.

use crate::{After, Attend, Conv2d, Ctx, GroupNorm, Linear, Result, Scope, attend, split};
use denoised_tensor::{Activation, Tensor};

/// Group norm's constants of a network.
type Groups = (usize, f32);

/// diffusers' `ResnetBlock2D` without time embedding: norm, SiLU, convolution, twice; plus the input.
#[derive(Clone, Debug)]
pub struct ResnetBlock {
    norm1: GroupNorm,
    conv1: Conv2d,
    norm2: GroupNorm,
    conv2: Conv2d,
    /// A 1x1 convolution of the input where the number of channels changes.
    shortcut: Option<Linear>,
}

impl ResnetBlock {
    /// `norm1`, `conv1`, `norm2`, `conv2` and, if the width changes, `conv_shortcut` at this place.
    pub fn new(scope: &mut Scope<'_>, c_in: usize, c_out: usize, (n_groups, eps): Groups) -> Self {
        Self {
            norm1: GroupNorm::new(&mut scope.at("norm1"), c_in, n_groups, eps),
            conv1: Conv2d::same3(&mut scope.at("conv1"), c_in, c_out),
            norm2: GroupNorm::new(&mut scope.at("norm2"), c_out, n_groups, eps),
            conv2: Conv2d::same3(&mut scope.at("conv2"), c_out, c_out),
            shortcut: (c_in != c_out).then(|| Linear::new(&mut scope.at("conv_shortcut"), c_in, c_out)),
        }
    }

    /// `x` `[batch, h, w, c_in]` to `[batch, h, w, c_out]`. Uses up `x`, in whose place the first norm may write.
    ///
    /// # Errors
    /// The device's.
    pub fn forward(&self, ctx: &Ctx<'_>, x: Tensor) -> Result<Tensor> {
        // These are the largest tensors of a whole generation: at most two live besides the input.
        let (residual, mut h) = match &self.shortcut {
            None => {
                let h = self.norm1.forward(ctx, &x, Activation::Silu)?;
                (x, h)
            }
            Some(shortcut) => {
                let residual = shortcut.forward(ctx, &x, After::default())?;
                self.norm1.forward_into(ctx, &x, Activation::Silu, &x)?;
                (residual, x)
            }
        };
        h = self.conv1.forward(ctx, &h, After::default())?;
        self.norm2.forward_into(ctx, &h, Activation::Silu, &h)?;
        self.conv2.forward(ctx, &h, After::residual(&residual))
    }
}

/// Attention of one head over all positions of a picture, added to its input.
#[derive(Clone, Debug)]
pub struct SpatialAttention {
    norm: GroupNorm,
    qkv: Linear,
    out: Linear,
}

impl SpatialAttention {
    /// `group_norm`, `to_q`, `to_k`, `to_v` and `to_out.0` at this place; older files call the latter `query`, `key`, `value` and
    /// `proj_attn`.
    pub fn new(scope: &mut Scope<'_>, n_channels: usize, (n_groups, eps): Groups) -> Self {
        let (names, out) = if scope.is_stored("query.weight") {
            (["query", "key", "value"], "proj_attn")
        } else {
            (["to_q", "to_k", "to_v"], "to_out.0")
        };
        Self {
            norm: GroupNorm::new(&mut scope.at("group_norm"), n_channels, n_groups, eps),
            qkv: Linear::fused(scope, &names, n_channels, 3 * n_channels, true),
            out: Linear::new(&mut scope.at(out), n_channels, n_channels),
        }
    }

    /// `x` `[batch, h, w, c]`; the same shape comes out.
    ///
    /// # Errors
    /// The device's.
    pub fn forward(&self, ctx: &Ctx<'_>, x: &Tensor) -> Result<Tensor> {
        let tokens = [x.dim(0), x.dim(1) * x.dim(2), x.dim(3)];
        let h = self.norm.forward(ctx, x, Activation::None)?.reshape(&tokens)?;
        let [q, k, v] = split(&self.qkv.forward(ctx, &h, After::default())?)?;
        let how = Attend {
            n_heads: 1,
            is_causal: false,
            bias: None,
        };
        let h = attend(ctx, &q, &k, &v, how)?;
        let x_tokens = x.reshape(&tokens)?;
        self.out
            .forward(ctx, &h, After::residual(&x_tokens))?
            .reshape(x.dims())
    }
}

/// Twice the size with nearest neighbours, then a convolution.
#[derive(Clone, Debug)]
pub struct Upsample {
    conv: Conv2d,
}

impl Upsample {
    /// `conv` at this place.
    pub fn new(scope: &mut Scope<'_>, n_channels: usize) -> Self {
        Self {
            conv: Conv2d::upsampled3(&mut scope.at("conv"), n_channels, n_channels),
        }
    }

    /// `x` `[batch, h, w, c]` to `[batch, 2h, 2w, c]`.
    ///
    /// # Errors
    /// The device's.
    pub fn forward(&self, ctx: &Ctx<'_>, x: &Tensor) -> Result<Tensor> {
        self.conv.forward(ctx, x, After::default())
    }
}
