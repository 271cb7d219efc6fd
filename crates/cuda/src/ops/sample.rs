//! The sampler's update, pixels, and the search for what is not finite.

use super::Ops;
use denoised_tensor::*;

pub(crate) fn step(ops: Ops<'_>, args: &StepArgs<'_>, out: &Tensor) -> Result<()> {
    let _ = (ops, args, out);
    Err(TensorError::Operand {
        op: "step",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn to_pixels(ops: Ops<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
    let _ = (ops, x, out);
    Err(TensorError::Operand {
        op: "to_pixels",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn all_finite(ops: Ops<'_>, x: &Tensor) -> Result<bool> {
    let _ = (ops, x);
    Err(TensorError::Operand {
        op: "all_finite",
        detail: "not built yet".to_owned(),
    })
}
