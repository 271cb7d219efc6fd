//! Rotations, tables and embeddings.

use super::Ops;
use denoised_tensor::*;

pub(crate) fn rope(
    ops: Ops<'_>,
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    style: RopeStyle,
    out: &Tensor,
) -> Result<()> {
    let _ = (ops, x, cos, sin, style, out);
    Err(TensorError::Operand {
        op: "rope",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn embedding(ops: Ops<'_>, ids: &Tensor, table: &Weight, out: &Tensor) -> Result<()> {
    let _ = (ops, ids, table, out);
    Err(TensorError::Operand {
        op: "embedding",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn gather_rows(ops: Ops<'_>, x: &Tensor, rows: &Tensor, out: &Tensor) -> Result<()> {
    let _ = (ops, x, rows, out);
    Err(TensorError::Operand {
        op: "gather_rows",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn timestep_embedding(
    ops: Ops<'_>,
    timesteps: &Tensor,
    spec: &TimestepSpec,
    out: &Tensor,
) -> Result<()> {
    let _ = (ops, timesteps, spec, out);
    Err(TensorError::Operand {
        op: "timestep_embedding",
        detail: "not built yet".to_owned(),
    })
}
