//! Rotations, tables, rows by number and embeddings of timesteps.

use super::{Extents, Ops};
use crate::{
    module::Kernel,
    operand::{Rows, small},
    weights::{self, Form},
};
use denoised_tensor::{Result, RopeStyle, Tensor, TimestepSpec, Weight, check};

const fn kernel(name: &'static str) -> Kernel {
    Kernel { file: "lookup", name }
}

const ROPE: Kernel = kernel("rope");
const EMBEDDING: Kernel = kernel("embedding");
const GATHER_ROWS: Kernel = kernel("gather_rows");
const TIMESTEP_EMBEDDING: Kernel = kernel("timestep_embedding");

/// Mirrors `RopeArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RopeArgs {
    x: Rows,
    out: Rows,
    cos: u64,
    sin: u64,
    cos_stride: i64,
    sin_stride: i64,
    n_rows: i64,
    n_tokens: i64,
    n_heads: i32,
    half: i32,
    is_interleaved: i32,
    is_vector: i32,
}

/// Mirrors `GatherArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GatherArgs {
    start: u64,
    batch_stride: i64,
    row_stride: i64,
    numbers: Rows,
    out: Rows,
    flag: u64,
    n_out_rows: i64,
    n_numbers_per_row: i32,
    n_cols: i32,
    n_rows: i32,
    op: i32,
}

/// Mirrors `TimestepArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct TimestepArgs {
    out: Rows,
    timesteps: u64,
    timestep_stride: i64,
    n_batch: i32,
    half: i32,
    log_period: f32,
    n_steps: f32,
    scale: f32,
    cos_first: i32,
}

pub(crate) fn rope(
    ops: Ops<'_>,
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    style: RopeStyle,
    out: &Tensor,
) -> Result<()> {
    let op = "rope";
    let extents = check::rope(x, cos, sin, out)?;
    let (x, out) = (ops.view(op, "x", x)?, ops.view(op, "out", out)?);
    let (cos, sin) = (ops.view(op, "cos", cos)?, ops.view(op, "sin", sin)?);
    let len = 16 / x.dtype.size_bytes();
    let is_vector = x.has_vector_rows() && out.has_vector_rows() && extents.half.is_multiple_of(len);
    let n_rows = x.dim(0) * x.dim(1);
    let args = RopeArgs {
        x: x.rows(op)?,
        out: out.rows(op)?,
        cos: cos.start,
        sin: sin.start,
        cos_stride: cos.strides[0] as i64,
        sin_stride: sin.strides[0] as i64,
        n_rows: n_rows as i64,
        n_tokens: extents.n_tokens as i64,
        n_heads: small(op, extents.n_heads)?,
        half: small(op, extents.half)?,
        is_interleaved: i32::from(style == RopeStyle::Interleaved),
        is_vector: i32::from(is_vector),
    };
    let n_items = n_rows * extents.n_heads * extents.half / if is_vector { len } else { 1 };
    // SAFETY: all operands were checked.
    unsafe { ops.launch(ROPE, x.dtype, Extents::looping(n_items, ops.device), &args) }
}

pub(crate) fn embedding(ops: Ops<'_>, ids: &Tensor, table: &Weight, out: &Tensor) -> Result<()> {
    let op = "embedding";
    let [n_rows, n_cols] = check::embedding(ids, table, out)?;
    let (ids, out) = (ops.view(op, "ids", ids)?, ops.view(op, "out", out)?);
    let (flag, op_number) = ops.reports.place(op);
    let args = GatherArgs {
        start: weights::start(op, "table", table, Form::Wide, ops.device)?,
        batch_stride: 0,
        row_stride: n_cols as i64,
        numbers: ids.rows(op)?,
        out: out.rows(op)?,
        flag,
        n_out_rows: out.n_rows() as i64,
        n_numbers_per_row: small(op, ids.n_cols())?,
        n_cols: small(op, n_cols)?,
        n_rows: small(op, n_rows)?,
        op: op_number,
    };
    // SAFETY: all operands were checked; ids are compared with the table's rows by the kernel.
    unsafe {
        ops.launch(
            EMBEDDING,
            out.dtype,
            Extents::looping(out.shape.n_elements(), ops.device),
            &args,
        )
    }
}

pub(crate) fn gather_rows(ops: Ops<'_>, x: &Tensor, rows: &Tensor, out: &Tensor) -> Result<()> {
    let op = "gather_rows";
    check::gather_rows(x, rows, out)?;
    let (x, rows, out) = (
        ops.view(op, "x", x)?,
        ops.view(op, "rows", rows)?,
        ops.view(op, "out", out)?,
    );
    let (flag, op_number) = ops.reports.place(op);
    let args = GatherArgs {
        start: x.start,
        batch_stride: x.strides[0] as i64,
        row_stride: x.strides[1] as i64,
        numbers: rows.rows(op)?,
        out: out.rows(op)?,
        flag,
        n_out_rows: out.n_rows() as i64,
        n_numbers_per_row: small(op, rows.n_cols())?,
        n_cols: small(op, out.n_cols())?,
        n_rows: small(op, x.dim(1))?,
        op: op_number,
    };
    // SAFETY: all operands were checked; the numbers are compared with the rows there are by the kernel.
    unsafe {
        ops.launch(
            GATHER_ROWS,
            out.dtype,
            Extents::looping(out.shape.n_elements(), ops.device),
            &args,
        )
    }
}

pub(crate) fn timestep_embedding(
    ops: Ops<'_>,
    timesteps: &Tensor,
    spec: &TimestepSpec,
    out: &Tensor,
) -> Result<()> {
    let op = "timestep_embedding";
    check::timestep_embedding(timesteps, out)?;
    let (timesteps, out) = (ops.view(op, "timesteps", timesteps)?, ops.view(op, "out", out)?);
    let half = out.n_cols() / 2;
    let args = TimestepArgs {
        out: out.rows(op)?,
        timesteps: timesteps.start,
        timestep_stride: timesteps.strides[0] as i64,
        n_batch: small(op, timesteps.dim(0))?,
        half: small(op, half)?,
        log_period: -f64::from(spec.max_period).ln() as f32,
        n_steps: half as f32 - spec.downscale_freq_shift,
        scale: spec.scale,
        cos_first: i32::from(spec.flip_sin_to_cos),
    };
    // SAFETY: both operands were checked.
    unsafe {
        ops.launch(
            TIMESTEP_EMBEDDING,
            out.dtype,
            Extents::looping(out.shape.n_elements() / 2, ops.device),
            &args,
        )
    }
}
