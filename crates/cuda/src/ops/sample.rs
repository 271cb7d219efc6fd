//! The sampler's update, pixels, and the search for what is not finite.

use super::{Extents, Ops};
use crate::{
    module::Kernel,
    operand::{Rows, small},
};
use cudarc::driver::result;
use denoised_tensor::{DType, Result, StepArgs, Tensor, TensorError, check};

const fn kernel(name: &'static str) -> Kernel {
    Kernel { file: "sample", name }
}

const STEP: Kernel = kernel("step");
const TO_PIXELS: Kernel = kernel("to_pixels");
const ALL_FINITE: Kernel = kernel("all_finite");

/// Mirrors `StepArgs` of `sample.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct StepOperands {
    out: Rows,
    latents: Rows,
    conditional: Rows,
    unconditional: Rows,
    noise: Rows,
    guided_out: Rows,
    coefficients: u64,
    guidance: u64,
    coefficient_stride: i64,
    guidance_stride: i64,
    n_rows: i64,
    rows_per_batch: i64,
    n_cols: i32,
}

/// Mirrors `PixelArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PixelArgs {
    x: Rows,
    out: Rows,
    n_rows: i64,
    n_cols: i32,
    is_bytes: i32,
}

/// Mirrors `FiniteArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FiniteArgs {
    x: Rows,
    is_bad: u64,
    n_rows: i64,
    n_cols: i32,
    is_vector: i32,
}

pub(crate) fn step(ops: Ops<'_>, args: &StepArgs<'_>, out: &Tensor) -> Result<()> {
    let op = "step";
    let extents = check::step(args, out)?;
    let rows = |name, tensor: Option<&Tensor>| match tensor {
        Some(tensor) => ops.view(op, name, tensor)?.rows(op),
        None => Ok(Rows::NONE),
    };
    let coefficients = ops.view(op, "coefficients", args.coefficients)?;
    let (guidance, guidance_stride) = match args.unconditional {
        Some((_, guidance)) => {
            let view = ops.view(op, "guidance", guidance)?;
            (view.start, view.strides[0] as i64)
        }
        None => (0, 0),
    };
    let n_cols = out.shape().last();
    let n_rows = out.shape().n_elements() / n_cols;
    let operands = StepOperands {
        out: rows("out", Some(out))?,
        latents: rows("latents", Some(args.latents))?,
        conditional: rows("conditional", Some(args.conditional))?,
        unconditional: rows("unconditional", args.unconditional.map(|(tensor, _)| tensor))?,
        noise: rows("noise", args.noise)?,
        guided_out: rows("guided_out", args.guided_out)?,
        coefficients: coefficients.start,
        guidance,
        coefficient_stride: coefficients.strides[0] as i64,
        guidance_stride,
        n_rows: n_rows as i64,
        // A tensor of one dimension has one element per batch element.
        rows_per_batch: (n_rows / extents.n_batch).max(1) as i64,
        n_cols: small(op, n_cols)?,
    };
    // SAFETY: all operands were checked.
    unsafe {
        ops.launch(
            STEP,
            extents.prediction,
            Extents::looping(n_rows * n_cols, ops.device),
            &operands,
        )
    }
}

pub(crate) fn to_pixels(ops: Ops<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
    let op = "to_pixels";
    check::to_pixels(x, out)?;
    let (x, out) = (ops.view(op, "x", x)?, ops.view(op, "out", out)?);
    let args = PixelArgs {
        x: x.rows(op)?,
        out: out.rows(op)?,
        n_rows: x.n_rows() as i64,
        n_cols: small(op, x.n_cols())?,
        is_bytes: i32::from(out.dtype == DType::U8),
    };
    // SAFETY: both operands were checked.
    unsafe {
        ops.launch(
            TO_PIXELS,
            x.dtype,
            Extents::looping(x.shape.n_elements(), ops.device),
            &args,
        )
    }
}

pub(crate) fn all_finite(ops: Ops<'_>, x: &Tensor) -> Result<bool> {
    let op = "all_finite";
    ops.device.refuse_in_recording(op)?;
    let view = ops.view(op, "x", x)?;
    if !view.dtype.is_float() {
        return Err(TensorError::DType {
            op,
            dtype: view.dtype,
            expected: "f32, bf16 or f16",
        });
    }
    let is_bad = ops.memory.take(|| "an answer of all_finite".to_owned(), 4)?;
    // SAFETY: four bytes.
    let answer = unsafe { result::memset_d8_async(is_bad.start(), 0, 4, ops.device.stream()) };
    ops.device.check(op, answer)?;
    let is_vector = view.has_vector_rows();
    let args = FiniteArgs {
        x: view.rows(op)?,
        is_bad: is_bad.start(),
        n_rows: view.n_rows() as i64,
        n_cols: small(op, view.n_cols())?,
        is_vector: i32::from(is_vector),
    };
    let len = if is_vector {
        16 / view.dtype.size_bytes()
    } else {
        1
    };
    // SAFETY: the operand was checked, and the answer's memory is given back in stream order.
    unsafe {
        ops.launch(
            ALL_FINITE,
            view.dtype,
            Extents::looping(view.shape.n_elements() / len, ops.device),
            &args,
        )?
    };
    let mut bytes = [0u8; 4];
    // SAFETY: four bytes, read after the wait.
    let answer = unsafe { result::memcpy_dtoh_async(&mut bytes, is_bad.start(), ops.device.stream()) };
    ops.device.check(op, answer)?;
    ops.device.synchronize(op)?;
    ops.reports.look(ops.device)?;
    Ok(bytes == [0; 4])
}
