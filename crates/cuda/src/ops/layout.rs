//! Ops that move elements.

use super::Ops;
use denoised_tensor::*;

pub(crate) fn patchify(
    ops: Ops<'_>,
    x: &Tensor,
    patch: usize,
    order: PatchOrder,
    out: &Tensor,
) -> Result<()> {
    let _ = (ops, x, patch, order, out);
    Err(TensorError::Operand {
        op: "patchify",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn unpatchify(
    ops: Ops<'_>,
    x: &Tensor,
    patch: usize,
    order: PatchOrder,
    out: &Tensor,
) -> Result<()> {
    let _ = (ops, x, patch, order, out);
    Err(TensorError::Operand {
        op: "unpatchify",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn permute(ops: Ops<'_>, x: &Tensor, axes: &[usize], out: &Tensor) -> Result<()> {
    let _ = (ops, x, axes, out);
    Err(TensorError::Operand {
        op: "permute",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn upsample_nearest(ops: Ops<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
    let _ = (ops, x, out);
    Err(TensorError::Operand {
        op: "upsample_nearest",
        detail: "not built yet".to_owned(),
    })
}
