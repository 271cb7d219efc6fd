//! The two products of a transformer block with an activation between them.

use crate::{After, Ctx, Linear, Result, Scope};
use denoised_tensor::{Activation, GateOrder, Tensor};

/// diffusers' `FeedForward` without gating: `net.0.proj`, activation, `net.2`.
#[derive(Clone, Debug)]
pub struct FeedForward {
    first: Linear,
    second: Linear,
    activation: Activation,
}

impl FeedForward {
    /// Widths `n_channels`, `n_inner`, `n_channels` with diffusers' names.
    pub fn new(scope: &mut Scope<'_>, n_channels: usize, n_inner: usize, activation: Activation) -> Self {
        Self::named(scope, ["net.0.proj", "net.2"], n_channels, n_inner, activation)
    }

    /// As [`FeedForward::new`] with other names of the two layers.
    pub fn named(
        scope: &mut Scope<'_>,
        names: [&str; 2],
        n_channels: usize,
        n_inner: usize,
        activation: Activation,
    ) -> Self {
        Self {
            first: Linear::new(&mut scope.at(names[0]), n_channels, n_inner),
            second: Linear::new(&mut scope.at(names[1]), n_inner, n_channels),
            activation,
        }
    }

    /// Into `out`, with `after` behind the second product.
    ///
    /// # Errors
    /// The device's.
    pub fn forward_into(&self, ctx: &Ctx<'_>, x: &Tensor, after: After<'_>, out: &Tensor) -> Result<()> {
        let inner = self.first.forward(ctx, x, After::activation(self.activation))?;
        self.second.forward_into(ctx, &inner, after, out)
    }
}

/// diffusers' `FeedForward` with GEGLU: `net.0.proj` to twice the inner width, the first half times GELU of the second, `net.2`.
#[derive(Clone, Debug)]
pub struct GatedFeedForward {
    first: Linear,
    second: Linear,
    n_inner: usize,
}

impl GatedFeedForward {
    /// Widths `n_channels`, `n_inner`, `n_channels` with diffusers' names.
    pub fn new(scope: &mut Scope<'_>, n_channels: usize, n_inner: usize) -> Self {
        Self {
            first: Linear::new(&mut scope.at("net.0.proj"), n_channels, 2 * n_inner),
            second: Linear::new(&mut scope.at("net.2"), n_inner, n_channels),
            n_inner,
        }
    }

    /// Into `out`, with `after` behind the second product.
    ///
    /// # Errors
    /// The device's.
    pub fn forward_into(&self, ctx: &Ctx<'_>, x: &Tensor, after: After<'_>, out: &Tensor) -> Result<()> {
        let halves = self.first.forward(ctx, x, After::default())?;
        let inner = ctx.alloc_like(&halves, self.n_inner)?;
        ctx.backend
            .gated(&halves, Activation::GeluErf, GateOrder::SecondActivated, &inner)?;
        self.second.forward_into(ctx, &inner, after, out)
    }
}
