//! Lookups and the small networks that embed timesteps and pooled texts.

use crate::{After, Ctx, Linear, Result, Scope, WeightIdx};
use denoised_tensor::{Activation, Tensor, TimestepSpec, WeightKind};

/// A table that is read by row.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: WeightIdx,
    n_columns: usize,
}

impl Embedding {
    /// `weight` `[n_rows, n_columns]` at this place.
    pub fn new(scope: &mut Scope<'_>, n_rows: usize, n_columns: usize) -> Self {
        let shape = [n_rows, n_columns];
        Self {
            weight: scope.weight(&["weight".to_owned()], WeightKind::Table, &shape),
            n_columns,
        }
    }

    /// Rows of the i32 ids `[..]` as `[.., n_columns]`.
    ///
    /// # Errors
    /// An id that is no row, or the device's.
    pub fn forward(&self, ctx: &Ctx<'_>, ids: &Tensor) -> Result<Tensor> {
        let mut dims = ids.dims().to_vec();
        dims.push(self.n_columns);
        let out = ctx.alloc(&dims)?;
        ctx.backend.embedding(ids, ctx.weight(self.weight), &out)?;
        Ok(out)
    }
}

/// A tensor of the checkpoint that is used as it is, such as a table of positions.
#[derive(Clone, Debug)]
pub struct Parameter {
    weight: WeightIdx,
}

impl Parameter {
    /// The tensor `name` at this place.
    pub fn new(scope: &mut Scope<'_>, name: &str, shape: &[usize]) -> Self {
        Self {
            weight: scope.weight(&[name.to_owned()], WeightKind::Vector, shape),
        }
    }

    /// The tensor, f32 and read-only.
    ///
    /// # Errors
    /// The device's.
    pub fn tensor(&self, ctx: &Ctx<'_>) -> Result<Tensor> {
        ctx.backend.weight_tensor(ctx.weight(self.weight))
    }
}

/// `linear_1`, an activation, `linear_2`.
#[derive(Clone, Debug)]
pub struct TwoLayer {
    linear_1: Linear,
    linear_2: Linear,
    activation: Activation,
}

impl TwoLayer {
    /// Both layers at this place; the inner width is the outer one.
    pub fn new(scope: &mut Scope<'_>, n_in: usize, n_out: usize, activation: Activation) -> Self {
        Self {
            linear_1: Linear::new(&mut scope.at("linear_1"), n_in, n_out),
            linear_2: Linear::new(&mut scope.at("linear_2"), n_out, n_out),
            activation,
        }
    }

    /// `x` `[.., n_in]` to `[.., n_out]`.
    ///
    /// # Errors
    /// The device's.
    pub fn forward(&self, ctx: &Ctx<'_>, x: &Tensor, after: After<'_>) -> Result<Tensor> {
        let inner = self
            .linear_1
            .forward(ctx, x, After::activation(self.activation))?;
        self.linear_2.forward(ctx, &inner, after)
    }
}

/// Sinusoids of a timestep, then [`TwoLayer`].
#[derive(Clone, Debug)]
pub struct TimestepEmbedding {
    spec: TimestepSpec,
    n_sinusoids: usize,
    layers: TwoLayer,
}

impl TimestepEmbedding {
    /// `linear_1` and `linear_2` at this place behind `n_sinusoids` sinusoids, SiLU between them.
    pub fn new(scope: &mut Scope<'_>, spec: TimestepSpec, n_sinusoids: usize, n_out: usize) -> Self {
        Self::with_activation(scope, spec, n_sinusoids, n_out, Activation::Silu)
    }

    /// As [`TimestepEmbedding::new`] with another activation.
    pub fn with_activation(
        scope: &mut Scope<'_>,
        spec: TimestepSpec,
        n_sinusoids: usize,
        n_out: usize,
        activation: Activation,
    ) -> Self {
        Self {
            spec,
            n_sinusoids,
            layers: TwoLayer::new(scope, n_sinusoids, n_out, activation),
        }
    }

    /// f32 timesteps `[batch]` to `[batch, n_out]`, with `after` behind the second layer.
    ///
    /// # Errors
    /// The device's.
    pub fn forward(&self, ctx: &Ctx<'_>, timesteps: &Tensor, after: After<'_>) -> Result<Tensor> {
        let sinusoids = ctx.alloc(&[timesteps.dim(0), self.n_sinusoids])?;
        ctx.backend
            .timestep_embedding(timesteps, &self.spec, &sinusoids)?;
        self.layers.forward(ctx, &sinusoids, after)
    }
}
