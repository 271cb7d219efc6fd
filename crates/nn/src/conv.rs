//! Two-dimensional convolutions.

use crate::{After, Ctx, Result, Scope, WeightIdx};
use denoised_tensor::{ConvSpec, Tensor, WeightKind};

/// A square convolution with bias.
#[derive(Clone, Debug)]
pub struct Conv2d {
    weight: WeightIdx,
    bias: WeightIdx,
    c_out: usize,
    side: usize,
    spec: ConvSpec,
}

impl Conv2d {
    /// Side 3, stride 1, the size of the picture stays.
    pub fn same3(scope: &mut Scope<'_>, c_in: usize, c_out: usize) -> Self {
        Self::same(scope, c_in, c_out, 3)
    }

    /// Odd `side`, stride 1, the size of the picture stays.
    pub fn same(scope: &mut Scope<'_>, c_in: usize, c_out: usize, side: usize) -> Self {
        Self::new(scope, c_in, c_out, side, 1, [side / 2; 4], 1)
    }

    /// Side 3, every second position; `padding` is `[top, left, bottom, right]`.
    pub fn halved3(scope: &mut Scope<'_>, c_in: usize, c_out: usize, padding: [usize; 4]) -> Self {
        Self::new(scope, c_in, c_out, 3, 2, padding, 1)
    }

    /// As [`Conv2d::same3`], on the input enlarged twice with nearest neighbours.
    pub fn upsampled3(scope: &mut Scope<'_>, c_in: usize, c_out: usize) -> Self {
        Self::new(scope, c_in, c_out, 3, 1, [1; 4], 2)
    }

    /// Squares of `patch` pixels without overlap.
    pub fn patches(scope: &mut Scope<'_>, c_in: usize, c_out: usize, patch: usize) -> Self {
        Self::new(scope, c_in, c_out, patch, patch, [0; 4], 1)
    }

    /// As [`Conv2d::same3`], with a kernel that is read as the suffix `reading` of its name says: a part of one over frames.
    pub fn same3_of_frames(scope: &mut Scope<'_>, reading: &str, c_in: usize, c_out: usize) -> Self {
        let spec = ConvSpec {
            stride: 1,
            padding: [1; 4],
            upsample: 1,
        };
        Self::named(scope, &format!("weight{reading}"), c_in, c_out, 3, spec)
    }

    fn new(
        scope: &mut Scope<'_>,
        c_in: usize,
        c_out: usize,
        side: usize,
        stride: usize,
        padding: [usize; 4],
        upsample: usize,
    ) -> Self {
        let spec = ConvSpec {
            stride,
            padding,
            upsample,
        };
        Self::named(scope, "weight", c_in, c_out, side, spec)
    }

    fn named(
        scope: &mut Scope<'_>,
        name: &str,
        c_in: usize,
        c_out: usize,
        side: usize,
        spec: ConvSpec,
    ) -> Self {
        let kind = WeightKind::Conv { stride: spec.stride };
        Self {
            weight: scope.weight(&[name.to_owned()], kind, &[c_out, c_in, side, side]),
            bias: scope.vector("bias", c_out),
            c_out,
            side,
            spec,
        }
    }

    /// `x` `[batch, h, w, c_in]` to `[batch, h_out, w_out, c_out]`.
    ///
    /// # Errors
    /// The device's.
    pub fn forward(&self, ctx: &Ctx<'_>, x: &Tensor, after: After<'_>) -> Result<Tensor> {
        let out = ctx.alloc(&self.out_dims(x))?;
        self.forward_into(ctx, x, after, &out)?;
        Ok(out)
    }

    /// As [`Conv2d::forward`], into `out`.
    ///
    /// # Errors
    /// The device's.
    pub fn forward_into(&self, ctx: &Ctx<'_>, x: &Tensor, after: After<'_>, out: &Tensor) -> Result<()> {
        self.walk(ctx, x, &self.spec, after, out)
    }

    /// As [`Conv2d::forward_into`], of an input that was already enlarged.
    pub(crate) fn forward_enlarged_into(&self, ctx: &Ctx<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
        let spec = ConvSpec {
            upsample: 1,
            ..self.spec
        };
        self.walk(ctx, x, &spec, After::default(), out)
    }

    /// Shape of the result for `x` `[batch, h, w, c_in]`.
    pub fn out_dims(&self, x: &Tensor) -> [usize; 4] {
        let [top, left, bottom, right] = self.spec.padding;
        let n_out = |n_in: usize, padding: usize| {
            (n_in * self.spec.upsample + padding).saturating_sub(self.side) / self.spec.stride + 1
        };
        let (h, w) = (n_out(x.dim(1), top + bottom), n_out(x.dim(2), left + right));
        [x.dim(0), h, w, self.c_out]
    }

    fn walk(&self, ctx: &Ctx<'_>, x: &Tensor, spec: &ConvSpec, after: After<'_>, out: &Tensor) -> Result<()> {
        let epilogue = after.epilogue(ctx, Some(self.bias));
        ctx.backend
            .conv2d(x, ctx.weight(self.weight), spec, &epilogue, out)
    }
}
