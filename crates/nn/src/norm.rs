//! Norms with learned factors.

use crate::{Ctx, Result, Scope, WeightIdx};
use denoised_tensor::{Activation, Modulation, Tensor};

/// Layer norm with `weight` and `bias`.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: WeightIdx,
    bias: WeightIdx,
    eps: f32,
}

impl LayerNorm {
    /// `weight` and `bias` of `n_channels` at this place.
    pub fn new(scope: &mut Scope<'_>, n_channels: usize, eps: f32) -> Self {
        Self {
            weight: scope.vector("weight", n_channels),
            bias: scope.vector("bias", n_channels),
            eps,
        }
    }

    /// Over the last dimension of `x`.
    ///
    /// # Errors
    /// The device's.
    pub fn forward(&self, ctx: &Ctx<'_>, x: &Tensor) -> Result<Tensor> {
        let out = ctx.alloc(x.dims())?;
        let affine = Some((ctx.weight(self.weight), Some(ctx.weight(self.bias))));
        ctx.backend.layer_norm(x, affine, self.eps, None, &out)?;
        Ok(out)
    }
}

/// Root-mean-square norm of each head, with a `weight` of `head_dim`.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: WeightIdx,
    group_len: usize,
    eps: f32,
}

impl RmsNorm {
    /// `weight` of `group_len` at this place.
    pub fn new(scope: &mut Scope<'_>, group_len: usize, eps: f32) -> Self {
        Self::named(scope, "weight", group_len, eps)
    }

    /// As [`RmsNorm::new`] with another name of the factors.
    pub fn named(scope: &mut Scope<'_>, name: &str, group_len: usize, eps: f32) -> Self {
        Self {
            weight: scope.vector(name, group_len),
            group_len,
            eps,
        }
    }

    /// Over consecutive groups of `x`, in place.
    ///
    /// # Errors
    /// The device's.
    pub fn apply(&self, ctx: &Ctx<'_>, x: &Tensor) -> Result<()> {
        self.forward_into(ctx, x, x)
    }

    /// As [`RmsNorm::apply`], into `out`.
    ///
    /// # Errors
    /// The device's.
    pub fn forward_into(&self, ctx: &Ctx<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
        let weight = Some(ctx.weight(self.weight));
        ctx.backend.rms_norm(x, weight, self.group_len, self.eps, out)
    }

    /// As [`RmsNorm::apply`], of a copy.
    ///
    /// # Errors
    /// The device's.
    pub fn forward(&self, ctx: &Ctx<'_>, x: &Tensor) -> Result<Tensor> {
        let out = ctx.alloc(x.dims())?;
        let weight = Some(ctx.weight(self.weight));
        ctx.backend.rms_norm(x, weight, self.group_len, self.eps, &out)?;
        Ok(out)
    }
}

/// Group norm, optionally with an activation behind it.
#[derive(Clone, Debug)]
pub struct GroupNorm {
    weight: WeightIdx,
    bias: WeightIdx,
    n_groups: usize,
    eps: f32,
}

impl GroupNorm {
    /// `weight` and `bias` of `n_channels` at this place.
    pub fn new(scope: &mut Scope<'_>, n_channels: usize, n_groups: usize, eps: f32) -> Self {
        Self {
            weight: scope.vector("weight", n_channels),
            bias: scope.vector("bias", n_channels),
            n_groups,
            eps,
        }
    }

    /// Over all positions and the channels of a group.
    ///
    /// # Errors
    /// The device's.
    pub fn forward(&self, ctx: &Ctx<'_>, x: &Tensor, activation: Activation) -> Result<Tensor> {
        let out = ctx.alloc(x.dims())?;
        self.forward_into(ctx, x, activation, &out)?;
        Ok(out)
    }

    /// As [`GroupNorm::forward`], into `out`, which may be `x` itself.
    ///
    /// # Errors
    /// The device's.
    pub fn forward_into(
        &self,
        ctx: &Ctx<'_>,
        x: &Tensor,
        activation: Activation,
        out: &Tensor,
    ) -> Result<()> {
        let affine = (ctx.weight(self.weight), ctx.weight(self.bias));
        ctx.backend
            .group_norm(x, affine, self.n_groups, self.eps, activation, out)
    }
}

/// `norm(x) (1 + scale) + shift`: a layer norm without weights of its own, modulated by `[batch, c]` each.
///
/// # Errors
/// The device's.
pub fn modulated_norm(ctx: &Ctx<'_>, x: &Tensor, shift: &Tensor, scale: &Tensor, eps: f32) -> Result<Tensor> {
    let out = ctx.alloc(x.dims())?;
    modulated_norm_into(ctx, x, shift, scale, eps, &out)?;
    Ok(out)
}

/// As [`modulated_norm`], into `out`, which may be `x` itself.
///
/// # Errors
/// The device's.
pub fn modulated_norm_into(
    ctx: &Ctx<'_>,
    x: &Tensor,
    shift: &Tensor,
    scale: &Tensor,
    eps: f32,
    out: &Tensor,
) -> Result<()> {
    let modulation = Some(Modulation { scale, shift });
    ctx.backend.layer_norm(x, None, eps, modulation, out)
}
