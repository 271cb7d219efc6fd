//! Element-wise ops.

use super::{Extents, Ops};
use crate::{module::Kernel, operand::Rows};
use denoised_tensor::*;

pub(crate) fn add(ops: Ops<'_>, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    let _ = (ops, a, b, out);
    Err(TensorError::Operand {
        op: "add",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn mul(ops: Ops<'_>, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    let _ = (ops, a, b, out);
    Err(TensorError::Operand {
        op: "mul",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn gated_add(
    ops: Ops<'_>,
    residual: &Tensor,
    gate: &Tensor,
    x: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let _ = (ops, residual, gate, x, out);
    Err(TensorError::Operand {
        op: "gated_add",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn affine(ops: Ops<'_>, x: &Tensor, scale: f32, shift: f32, out: &Tensor) -> Result<()> {
    let _ = (ops, x, scale, shift, out);
    Err(TensorError::Operand {
        op: "affine",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn activation(ops: Ops<'_>, x: &Tensor, activation: Activation, out: &Tensor) -> Result<()> {
    let _ = (ops, x, activation, out);
    Err(TensorError::Operand {
        op: "activation",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn gated(
    ops: Ops<'_>,
    x: &Tensor,
    activation: Activation,
    order: GateOrder,
    out: &Tensor,
) -> Result<()> {
    let _ = (ops, x, activation, order, out);
    Err(TensorError::Operand {
        op: "gated",
        detail: "not built yet".to_owned(),
    })
}

pub(crate) fn copy(ops: Ops<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
    let _ = (ops, x, out);
    Err(TensorError::Operand {
        op: "copy",
        detail: "not built yet".to_owned(),
    })
}

const FILL: Kernel = Kernel {
    file: "elementwise",
    name: "fill",
};

/// Mirrors `FillArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FillArgs {
    out: Rows,
    n_rows: i64,
    n_cols: i64,
    value: f32,
}

pub(crate) fn fill(ops: Ops<'_>, out: &Tensor, value: f32) -> Result<()> {
    let view = ops.view("fill", "out", out)?;
    let args = FillArgs {
        out: view.rows("fill")?,
        n_rows: view.n_rows() as i64,
        n_cols: view.n_cols() as i64,
        value,
    };
    let extents = Extents::looping(view.shape.n_elements(), ops.device);
    // SAFETY: the view was checked, and every element of it is visited.
    unsafe { ops.launch(FILL, view.dtype, extents, &args) }
}
