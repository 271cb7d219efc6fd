//! Element-wise ops.

use super::{Extents, Ops, walk::Walk};
use crate::{
    module::Kernel,
    operand::{View, activation_code},
};
use denoised_tensor::{Activation, DType, GateOrder, Result, Tensor, check};

const fn kernel(name: &'static str) -> Kernel {
    Kernel {
        file: "elementwise",
        name,
    }
}

const ADD: Kernel = kernel("add");
const MUL: Kernel = kernel("mul");
const GATED_ADD: Kernel = kernel("gated_add");
const AFFINE: Kernel = kernel("affine");
const ACTIVATION: Kernel = kernel("activation");
const GATED: Kernel = kernel("gated");
const FILL: Kernel = kernel("fill");
const COPY_FROM_F32: Kernel = kernel("copy_from_f32");
const COPY_FROM_BF16: Kernel = kernel("copy_from_bf16");
const COPY_FROM_F16: Kernel = kernel("copy_from_f16");
const COPY_FROM_I32: Kernel = kernel("copy_from_i32");
const COPY_FROM_U8: Kernel = kernel("copy_from_u8");

/// Mirrors `AffineArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct AffineArgs {
    walk: Walk<2>,
    scale: f32,
    shift: f32,
}

/// Mirrors `ActivationArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ActivationArgs {
    walk: Walk<2>,
    code: i32,
}

/// Mirrors `GatedArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GatedArgs {
    walk: Walk<3>,
    code: i32,
    first_is_activated: i32,
}

/// Mirrors `FillArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FillArgs {
    walk: Walk<1>,
    value: f32,
}

fn walk<const N: usize>(ops: Ops<'_>, op: &'static str, tensors: [(&str, &Tensor); N]) -> Result<Walk<N>> {
    let mut views = Vec::with_capacity(N);
    for (name, tensor) in tensors {
        views.push(ops.view(op, name, tensor)?);
    }
    Walk::new(op, std::array::from_fn(|n| &views[n]))
}

fn binary(
    ops: Ops<'_>,
    op: &'static str,
    kernel: Kernel,
    a: &Tensor,
    b: &Tensor,
    out: &Tensor,
) -> Result<()> {
    check::binary(op, a, b, out)?;
    let walk = walk(ops, op, [("out", out), ("a", a), ("b", b)])?;
    // SAFETY: the operands were checked, and the walk stays inside them.
    unsafe {
        ops.launch(
            kernel,
            out.dtype(),
            Extents::looping(walk.n_items(), ops.device),
            &walk,
        )
    }
}

pub(crate) fn add(ops: Ops<'_>, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    binary(ops, "add", ADD, a, b, out)
}

pub(crate) fn mul(ops: Ops<'_>, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    binary(ops, "mul", MUL, a, b, out)
}

pub(crate) fn gated_add(
    ops: Ops<'_>,
    residual: &Tensor,
    gate: &Tensor,
    x: &Tensor,
    out: &Tensor,
) -> Result<()> {
    check::gated_add(residual, gate, x, out)?;
    let walk = walk(
        ops,
        "gated_add",
        [("out", out), ("residual", residual), ("gate", gate), ("x", x)],
    )?;
    // SAFETY: as above.
    unsafe {
        ops.launch(
            GATED_ADD,
            out.dtype(),
            Extents::looping(walk.n_items(), ops.device),
            &walk,
        )
    }
}

pub(crate) fn affine(ops: Ops<'_>, x: &Tensor, scale: f32, shift: f32, out: &Tensor) -> Result<()> {
    check::unary("affine", x, out)?;
    let walk = walk(ops, "affine", [("out", out), ("x", x)])?;
    let args = AffineArgs { walk, scale, shift };
    // SAFETY: as above.
    unsafe {
        ops.launch(
            AFFINE,
            out.dtype(),
            Extents::looping(walk.n_items(), ops.device),
            &args,
        )
    }
}

pub(crate) fn activation(ops: Ops<'_>, x: &Tensor, activation: Activation, out: &Tensor) -> Result<()> {
    check::unary("activation", x, out)?;
    let walk = walk(ops, "activation", [("out", out), ("x", x)])?;
    let code = activation_code(activation);
    let args = ActivationArgs { walk, code };
    // SAFETY: as above.
    unsafe {
        ops.launch(
            ACTIVATION,
            out.dtype(),
            Extents::looping(walk.n_items(), ops.device),
            &args,
        )
    }
}

pub(crate) fn gated(
    ops: Ops<'_>,
    x: &Tensor,
    activation: Activation,
    order: GateOrder,
    out: &Tensor,
) -> Result<()> {
    let [first, second] = check::gated(x, out)?;
    let walk = walk(ops, "gated", [("out", out), ("x", &first), ("x", &second)])?;
    let args = GatedArgs {
        walk,
        code: activation_code(activation),
        first_is_activated: i32::from(order == GateOrder::FirstActivated),
    };
    // SAFETY: as above.
    unsafe {
        ops.launch(
            GATED,
            out.dtype(),
            Extents::looping(walk.n_items(), ops.device),
            &args,
        )
    }
}

pub(crate) fn copy(ops: Ops<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
    check::copy(x, out)?;
    move_elements(
        ops,
        "copy",
        &ops.view("copy", "out", out)?,
        &ops.view("copy", "x", x)?,
    )
}

/// Copies `x`, broadcast to `out`, converting its dtype.
pub(super) fn move_elements(ops: Ops<'_>, op: &'static str, out: &View, x: &View) -> Result<()> {
    let walk = Walk::new(op, [out, x])?;
    let kernel = match x.dtype {
        DType::F32 => COPY_FROM_F32,
        DType::BF16 => COPY_FROM_BF16,
        DType::F16 => COPY_FROM_F16,
        DType::I32 => COPY_FROM_I32,
        DType::U8 => COPY_FROM_U8,
    };
    // SAFETY: as above.
    unsafe {
        ops.launch(
            kernel,
            out.dtype,
            Extents::looping(walk.n_items(), ops.device),
            &walk,
        )
    }
}

pub(crate) fn fill(ops: Ops<'_>, out: &Tensor, value: f32) -> Result<()> {
    check::fill(out)?;
    let walk = walk(ops, "fill", [("out", out)])?;
    let args = FillArgs { walk, value };
    // SAFETY: as above.
    unsafe {
        ops.launch(
            FILL,
            out.dtype(),
            Extents::looping(walk.n_items(), ops.device),
            &args,
        )
    }
}
