//! Norms.

use super::Ops;
use denoised_tensor::*;

pub(crate) fn layer_norm(
    ops: Ops<'_>,
    x: &Tensor,
    affine: Option<(&Weight, Option<&Weight>)>,
    eps: f32,
    modulation: Option<Modulation<'_>>,
    out: &Tensor,
) -> Result<()> {
    let _ = (ops, x, affine, eps, modulation, out);
    Err(TensorError::Operand {
        op: "layer_norm",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn rms_norm(
    ops: Ops<'_>,
    x: &Tensor,
    weight: Option<&Weight>,
    group_len: usize,
    eps: f32,
    out: &Tensor,
) -> Result<()> {
    let _ = (ops, x, weight, group_len, eps, out);
    Err(TensorError::Operand {
        op: "rms_norm",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn group_norm(
    ops: Ops<'_>,
    x: &Tensor,
    affine: (&Weight, &Weight),
    n_groups: usize,
    eps: f32,
    activation: Activation,
    out: &Tensor,
) -> Result<()> {
    let _ = (ops, x, affine, n_groups, eps, activation, out);
    Err(TensorError::Operand {
        op: "group_norm",
        detail: "not built yet".to_owned(),
    })
}
