//! Attention.

use super::Ops;
use denoised_tensor::*;

pub(crate) fn attention(
    ops: Ops<'_>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec<'_>,
    out: &Tensor,
) -> Result<()> {
    let _ = (ops, q, k, v, spec, out);
    Err(TensorError::Operand {
        op: "attention",
        detail: "not built yet".to_owned(),
    })
}
