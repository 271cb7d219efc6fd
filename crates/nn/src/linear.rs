//! Matrix products with what may be fused behind them.

use crate::{Ctx, Result, Scope, WeightIdx};
use denoised_tensor::{Activation, Epilogue, Tensor, WeightKind};

/// What happens to a product before it is stored: `residual + gate * activation(product + bias)`.
#[derive(Clone, Copy, Debug, Default)]
pub struct After<'a> {
    /// Applied after the bias.
    pub activation: Activation,
    /// `[batch, n]`.
    pub gate: Option<&'a Tensor>,
    /// Shape of the output.
    pub residual: Option<&'a Tensor>,
}

impl<'a> After<'a> {
    /// Only an activation.
    pub fn activation(activation: Activation) -> Self {
        Self {
            activation,
            ..Self::default()
        }
    }

    /// Added to `residual`.
    pub fn residual(residual: &'a Tensor) -> Self {
        Self {
            residual: Some(residual),
            ..Self::default()
        }
    }

    /// Times `gate`, added to `residual`.
    pub fn gated(gate: &'a Tensor, residual: &'a Tensor) -> Self {
        Self {
            gate: Some(gate),
            residual: Some(residual),
            ..Self::default()
        }
    }

    pub(crate) fn epilogue(&self, ctx: &Ctx<'a>, bias: Option<WeightIdx>) -> Epilogue<'a> {
        Epilogue {
            bias: bias.map(|idx| ctx.weight(idx)),
            activation: self.activation,
            gate: self.gate,
            residual: self.residual,
        }
    }
}

/// `x wᵀ + bias`; may be several layers of the checkpoint in one, their outputs side by side.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: WeightIdx,
    bias: Option<WeightIdx>,
    n_out: usize,
}

impl Linear {
    /// `weight` `[n_out, n_in]` and `bias` `[n_out]` at this place.
    pub fn new(scope: &mut Scope<'_>, n_in: usize, n_out: usize) -> Self {
        Self::fused(scope, &[""], n_in, n_out, true)
    }

    /// `weight` `[n_out, n_in]` at this place, no bias.
    pub fn without_bias(scope: &mut Scope<'_>, n_in: usize, n_out: usize) -> Self {
        Self::fused(scope, &[""], n_in, n_out, false)
    }

    /// As [`Linear::new`], of a kernel over frames and no more, which is read as the suffix `reading` of its name says.
    pub fn of_frames(scope: &mut Scope<'_>, reading: &str, n_in: usize, n_out: usize) -> Self {
        let names = [format!("weight{reading}")];
        Self {
            weight: scope.weight(&names, WeightKind::Matrix, &[n_out, n_in]),
            bias: Some(scope.vector("bias", n_out)),
            n_out,
        }
    }

    /// The layers `names` below this place side by side; `n_out` counts them all.
    pub fn fused(scope: &mut Scope<'_>, names: &[&str], n_in: usize, n_out: usize, has_bias: bool) -> Self {
        Self {
            weight: scope.fused(names, "weight", WeightKind::Matrix, &[n_out, n_in]),
            bias: has_bias.then(|| scope.fused(names, "bias", WeightKind::Vector, &[n_out])),
            n_out,
        }
    }

    /// Output channels.
    pub fn n_out(&self) -> usize {
        self.n_out
    }

    /// `x` `[.., n_in]` to `[.., n_out]`.
    ///
    /// # Errors
    /// The device's.
    pub fn forward(&self, ctx: &Ctx<'_>, x: &Tensor, after: After<'_>) -> Result<Tensor> {
        let out = ctx.alloc_like(x, self.n_out)?;
        self.forward_into(ctx, x, after, &out)?;
        Ok(out)
    }

    /// As [`Linear::forward`], into `out` (which may be `after.residual` itself).
    ///
    /// # Errors
    /// The device's.
    pub fn forward_into(&self, ctx: &Ctx<'_>, x: &Tensor, after: After<'_>, out: &Tensor) -> Result<()> {
        let epilogue = after.epilogue(ctx, self.bias);
        ctx.backend.linear(x, ctx.weight(self.weight), &epilogue, out)
    }
}
