//! Convolutional blocks of autoencoders and U-Nets: residual block, attention over positions, halving and doubling of the size.

use crate::{After, Attend, Conv2d, Ctx, GroupNorm, Linear, Result, Scope, attend, split};
use denoised_tensor::{Activation, Tensor};

/// Group norm's constants of a network.
type Groups = (usize, f32);

/// What the residual blocks of a network have in common.
#[derive(Clone, Copy, Debug)]
pub struct ResnetSpec {
    /// Groups of both norms.
    pub n_groups: usize,
    /// Of both norms.
    pub eps: f32,
    /// Between norm and convolution.
    pub activation: Activation,
    /// The sum with the input is divided by this.
    pub divisor: f32,
}

/// diffusers' `ResnetBlock2D`: norm, activation, convolution, twice; plus the input. A time embedding may be added between the two.
#[derive(Clone, Debug)]
pub struct ResnetBlock {
    norm1: GroupNorm,
    conv1: Conv2d,
    norm2: GroupNorm,
    conv2: Conv2d,
    /// A 1x1 convolution of the input where the number of channels changes.
    shortcut: Option<Linear>,
    activation: Activation,
    divisor: f32,
}

impl ResnetBlock {
    /// `norm1`, `conv1`, `norm2`, `conv2` and, if the width changes, `conv_shortcut` at this place.
    pub fn new(scope: &mut Scope<'_>, c_in: usize, c_out: usize, spec: ResnetSpec) -> Self {
        let ResnetSpec { n_groups, eps, .. } = spec;
        Self {
            norm1: GroupNorm::new(&mut scope.at("norm1"), c_in, n_groups, eps),
            conv1: Conv2d::same3(&mut scope.at("conv1"), c_in, c_out),
            norm2: GroupNorm::new(&mut scope.at("norm2"), c_out, n_groups, eps),
            conv2: Conv2d::same3(&mut scope.at("conv2"), c_out, c_out),
            shortcut: (c_in != c_out).then(|| Linear::new(&mut scope.at("conv_shortcut"), c_in, c_out)),
            activation: spec.activation,
            divisor: spec.divisor,
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
                let h = self.norm1.forward(ctx, &x, self.activation)?;
                (x, h)
            }
            Some(shortcut) => {
                let residual = shortcut.forward(ctx, &x, After::default())?;
                self.norm1.forward_into(ctx, &x, self.activation, &x)?;
                (residual, x)
            }
        };
        h = self.conv1.forward(ctx, &h, After::default())?;
        let out = ctx.alloc(h.dims())?;
        self.finish(ctx, &h, &residual, &out)?;
        Ok(out)
    }

    /// As [`ResnetBlock::forward`], into `out`, without touching `x`. The time embedding `shift` `[batch, 1, 1, c_out]` is added behind
    /// the first convolution.
    ///
    /// # Errors
    /// The device's.
    pub fn forward_into(&self, ctx: &Ctx<'_>, x: &Tensor, shift: &Tensor, out: &Tensor) -> Result<()> {
        let projected;
        let residual = match &self.shortcut {
            None => x,
            Some(shortcut) => {
                projected = shortcut.forward(ctx, x, After::default())?;
                &projected
            }
        };
        let h = self.norm1.forward(ctx, x, self.activation)?;
        let h = self.conv1.forward(ctx, &h, After::default())?;
        ctx.backend.add(&h, shift, &h)?;
        self.finish(ctx, &h, residual, out)
    }

    /// Second half of the block; overwrites `h`.
    fn finish(&self, ctx: &Ctx<'_>, h: &Tensor, residual: &Tensor, out: &Tensor) -> Result<()> {
        self.norm2.forward_into(ctx, h, self.activation, h)?;
        self.conv2.forward_into(ctx, h, After::residual(residual), out)?;
        if self.divisor != 1.0 {
            ctx.backend.affine(out, 1.0 / self.divisor, 0.0, out)?;
        }
        Ok(())
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
        let how = Attend::all(1);
        let h = attend(ctx, &q, &k, &v, how)?;
        let x_tokens = x.reshape(&tokens)?;
        self.out
            .forward(ctx, &h, After::residual(&x_tokens))?
            .reshape(x.dims())
    }
}

/// Half the size: a convolution that visits every second position.
#[derive(Clone, Debug)]
pub struct Downsample {
    conv: Conv2d,
}

impl Downsample {
    /// `conv` at this place. A size `n` becomes `n / 2`, rounded up with `padding` 1 (before and behind) and down with 0 (one behind).
    pub fn new(scope: &mut Scope<'_>, n_channels: usize, padding: usize) -> Self {
        let padding = if padding == 0 { [0, 0, 1, 1] } else { [padding; 4] };
        Self {
            conv: Conv2d::halved3(&mut scope.at("conv"), n_channels, n_channels, padding),
        }
    }

    /// Shape of the result for `x`.
    pub fn out_dims(&self, x: &Tensor) -> [usize; 4] {
        self.conv.out_dims(x)
    }

    /// `x` `[batch, h, w, c]` to `out`, which has the shape of [`Downsample::out_dims`].
    ///
    /// # Errors
    /// The device's.
    pub fn forward_into(&self, ctx: &Ctx<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
        self.conv.forward_into(ctx, x, After::default(), out)
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

    /// As [`Upsample::forward`], into `out`, whose sides may also be one pixel more or less than twice those of `x`: the sizes that
    /// [`Downsample`] makes into those of `x`. The enlarged picture is then the one of torch's `interpolate` to that size.
    ///
    /// # Errors
    /// Other sizes, or the device's.
    pub fn forward_into(&self, ctx: &Ctx<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
        let (twice, sides) = ([1, 2].map(|dim| 2 * x.dim(dim)), [1, 2].map(|dim| out.dim(dim)));
        if sides == twice {
            return self.conv.forward_into(ctx, x, After::default(), out);
        }
        // Pixel `i` of `n` is a copy of pixel `floor(i m / n)` of `m`. For `n = 2 m - 1` that is `floor(i / 2)`: the doubled picture
        // without its end. For `n = 2 m + 1` it is `floor((i - 1) / 2)` and 0 for the first: the doubled picture behind one more copy of
        // its beginning.
        let more = [0, 1].map(|side| usize::from(sides[side] > twice[side]));
        let dims = [x.dim(0), twice[0] + more[0], twice[1] + more[1], x.dim(3)];
        let enlarged = ctx.alloc(&dims)?;
        let doubled = enlarged
            .narrow(1, more[0], twice[0])?
            .narrow(2, more[1], twice[1])?;
        ctx.backend.upsample_nearest(x, &doubled)?;
        if more[1] == 1 {
            let rows = enlarged.narrow(1, more[0], twice[0])?;
            ctx.backend.copy(&rows.narrow(2, 1, 1)?, &rows.narrow(2, 0, 1)?)?;
        }
        if more[0] == 1 {
            ctx.backend
                .copy(&enlarged.narrow(1, 1, 1)?, &enlarged.narrow(1, 0, 1)?)?;
        }
        let enlarged = enlarged.narrow(1, 0, sides[0])?.narrow(2, 0, sides[1])?;
        self.conv.forward_enlarged_into(ctx, &enlarged, out)
    }
}
