//! Convolutions.

use super::Ops;
use denoised_tensor::*;

pub(crate) fn conv2d(
    ops: Ops<'_>,
    x: &Tensor,
    w: &Weight,
    spec: &ConvSpec,
    epilogue: &Epilogue<'_>,
    out: &Tensor,
) -> Result<()> {
    let _ = (ops, x, w, spec, epilogue, out);
    Err(TensorError::Operand {
        op: "conv2d",
        detail: "not built yet".to_owned(),
    })
}
