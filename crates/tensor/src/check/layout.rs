//! Element-wise ops, lookups, layout, sampling and output.

use super::{broadcasts, ensure, has_dtype, one_float, same_dims, writable};
use crate::{DType, Result, StepArgs, Tensor, TensorError, Weight, WeightKind};

/// Checks [`crate::Backend::add`] and [`crate::Backend::mul`].
///
/// # Errors
/// See the module's head.
pub fn binary(op: &'static str, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    one_float(op, &[out, a, b])?;
    same_dims(op, "a", a.dims(), out.dims())?;
    writable(op, out, &[("a", a, true), ("b", b, false)])?;
    broadcasts(op, "b", b.dims(), out.dims())
}

/// Checks [`crate::Backend::gated_add`].
///
/// # Errors
/// See the module's head.
pub fn gated_add(residual: &Tensor, gate: &Tensor, x: &Tensor, out: &Tensor) -> Result<()> {
    let op = "gated_add";
    one_float(op, &[out, residual, gate, x])?;
    same_dims(op, "residual", residual.dims(), out.dims())?;
    same_dims(op, "x", x.dims(), out.dims())?;
    writable(
        op,
        out,
        &[
            ("residual", residual, true),
            ("gate", gate, false),
            ("x", x, false),
        ],
    )?;
    broadcasts(op, "gate", gate.dims(), out.dims())
}

/// Checks an op on one input that may be the output: [`crate::Backend::affine`], [`crate::Backend::activation`].
///
/// # Errors
/// See the module's head.
pub fn unary(op: &'static str, x: &Tensor, out: &Tensor) -> Result<()> {
    one_float(op, &[out, x])?;
    same_dims(op, "x", x.dims(), out.dims())?;
    writable(op, out, &[("x", x, true)])
}

/// Checks [`crate::Backend::gated`]; the two halves of `x`, each of the shape of `out`.
///
/// # Errors
/// See the module's head.
pub fn gated(x: &Tensor, out: &Tensor) -> Result<[Tensor; 2]> {
    let op = "gated";
    one_float(op, &[out, x])?;
    let last = x.dims().len() - 1;
    let half = x.dim(last) / 2;
    let fits = x.dim(last).is_multiple_of(2)
        && out.dims().len() == x.dims().len()
        && out.dims()[..last] == x.dims()[..last]
        && out.dim(last) == half;
    ensure(op, fits, || format!("x {:?} to out {:?}", x.dims(), out.dims()))?;
    writable(op, out, &[("x", x, false)])?;
    Ok([x.narrow(last, 0, half)?, x.narrow(last, half, half)?])
}

/// Heads and tokens of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotated {
    /// Tokens of a batch element.
    pub n_tokens: usize,
    /// Heads.
    pub n_heads: usize,
    /// Half the channels of a head.
    pub half: usize,
}

/// Checks [`crate::Backend::rope`].
///
/// # Errors
/// See the module's head.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, out: &Tensor) -> Result<Rotated> {
    let op = "rope";
    one_float(op, &[out, x])?;
    has_dtype(op, cos, DType::F32)?;
    has_dtype(op, sin, DType::F32)?;
    writable(
        op,
        out,
        &[("x", x, true), ("cos", cos, false), ("sin", sin, false)],
    )?;
    same_dims(op, "out", out.dims(), x.dims())?;
    same_dims(op, "sin", sin.dims(), cos.dims())?;
    let fits = x.dims().len() == 3
        && cos.dims().len() == 2
        && cos.dim(0) == x.dim(1)
        && x.dim(2).is_multiple_of(2 * cos.dim(1));
    ensure(op, fits, || {
        format!("x {:?} with angles {:?}", x.dims(), cos.dims())
    })?;
    Ok(Rotated {
        n_tokens: x.dim(1),
        n_heads: x.dim(2) / (2 * cos.dim(1)),
        half: cos.dim(1),
    })
}

/// Checks [`crate::Backend::embedding`]; rows and columns of the table. Whether ids are rows of it is the backend's question.
///
/// # Errors
/// See the module's head.
pub fn embedding(ids: &Tensor, table: &Weight, out: &Tensor) -> Result<[usize; 2]> {
    let op = "embedding";
    has_dtype(op, ids, DType::I32)?;
    one_float(op, &[out])?;
    let [n_rows, n_cols] = match (table.kind, &*table.shape) {
        (WeightKind::Table, &[n_rows, n_cols]) => [n_rows, n_cols],
        _ => {
            let detail = format!("weight is a {:?} {:?}, expected a table", table.kind, table.shape);
            return Err(TensorError::Operand { op, detail });
        }
    };
    writable(op, out, &[("ids", ids, false)])?;
    let n_leading = ids.dims().len();
    let fits = out.dims().len() == n_leading + 1
        && &out.dims()[..n_leading] == ids.dims()
        && out.shape().last() == n_cols;
    ensure(op, fits, || {
        format!(
            "ids {:?} of table {:?} to out {:?}",
            ids.dims(),
            table.shape,
            out.dims()
        )
    })?;
    Ok([n_rows, n_cols])
}

/// Checks [`crate::Backend::gather_rows`]. Whether the numbers are rows is the backend's question.
///
/// # Errors
/// See the module's head.
pub fn gather_rows(x: &Tensor, rows: &Tensor, out: &Tensor) -> Result<()> {
    let op = "gather_rows";
    one_float(op, &[out, x])?;
    has_dtype(op, rows, DType::I32)?;
    writable(op, out, &[("x", x, false), ("rows", rows, false)])?;
    let fits = x.dims().len() == 3 && rows.dims() == [x.dim(0)] && out.dims() == [x.dim(0), x.dim(2)];
    ensure(op, fits, || {
        format!(
            "rows {:?} of x {:?} to out {:?}",
            rows.dims(),
            x.dims(),
            out.dims()
        )
    })
}

/// Checks [`crate::Backend::timestep_embedding`].
///
/// # Errors
/// See the module's head.
pub fn timestep_embedding(timesteps: &Tensor, out: &Tensor) -> Result<()> {
    let op = "timestep_embedding";
    has_dtype(op, timesteps, DType::F32)?;
    one_float(op, &[out])?;
    writable(op, out, &[("timesteps", timesteps, false)])?;
    let fits = timesteps.dims().len() == 1
        && out.dims().len() == 2
        && out.dim(0) == timesteps.dim(0)
        && out.dim(1).is_multiple_of(2);
    ensure(op, fits, || {
        format!("timesteps {:?} to out {:?}", timesteps.dims(), out.dims())
    })
}

/// Extents of a picture that is cut into patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pixels {
    /// Pictures.
    pub n_batch: usize,
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
    /// Channels.
    pub n_channels: usize,
}

/// Checks [`crate::Backend::patchify`].
///
/// # Errors
/// See the module's head.
pub fn patchify(x: &Tensor, patch: usize, out: &Tensor) -> Result<Pixels> {
    let op = "patchify";
    one_float(op, &[out, x])?;
    writable(op, out, &[("x", x, false)])?;
    patches(op, x, out, patch)
}

/// Checks [`crate::Backend::unpatchify`].
///
/// # Errors
/// See the module's head.
pub fn unpatchify(x: &Tensor, patch: usize, out: &Tensor) -> Result<Pixels> {
    let op = "unpatchify";
    one_float(op, &[out, x])?;
    writable(op, out, &[("x", x, false)])?;
    patches(op, out, x, patch)
}

fn patches(op: &'static str, image: &Tensor, tokens: &Tensor, patch: usize) -> Result<Pixels> {
    let fits = image.dims().len() == 4
        && tokens.dims().len() == 3
        && patch > 0
        && image.dim(1).is_multiple_of(patch)
        && image.dim(2).is_multiple_of(patch)
        && tokens.dim(0) == image.dim(0)
        && tokens.dim(1) == (image.dim(1) / patch) * (image.dim(2) / patch)
        && Some(tokens.dim(2)) == patch.checked_mul(patch).and_then(|n| n.checked_mul(image.dim(3)));
    ensure(op, fits, || {
        format!(
            "image {:?} in patches of {patch} and tokens {:?}",
            image.dims(),
            tokens.dims()
        )
    })?;
    Ok(Pixels {
        n_batch: image.dim(0),
        height: image.dim(1),
        width: image.dim(2),
        n_channels: image.dim(3),
    })
}

/// Checks [`crate::Backend::permute`].
///
/// # Errors
/// See the module's head.
pub fn permute(x: &Tensor, axes: &[usize], out: &Tensor) -> Result<()> {
    let op = "permute";
    one_float(op, &[out, x])?;
    writable(op, out, &[("x", x, false)])?;
    let n_dims = x.dims().len();
    let is_permutation = axes.len() == n_dims && (0..n_dims).all(|dim_idx| axes.contains(&dim_idx));
    let fits = is_permutation
        && out.dims().len() == n_dims
        && axes
            .iter()
            .zip(out.dims())
            .all(|(axis, extent)| x.dim(*axis) == *extent);
    ensure(op, fits, || {
        format!("axes {axes:?} of x {:?} to out {:?}", x.dims(), out.dims())
    })
}

/// Checks [`crate::Backend::upsample_nearest`].
///
/// # Errors
/// See the module's head.
pub fn upsample_nearest(x: &Tensor, out: &Tensor) -> Result<()> {
    let op = "upsample_nearest";
    one_float(op, &[out, x])?;
    writable(op, out, &[("x", x, false)])?;
    let fits = x.dims().len() == 4 && out.dims() == [x.dim(0), x.dim(1) * 2, x.dim(2) * 2, x.dim(3)];
    ensure(op, fits, || format!("x {:?} to out {:?}", x.dims(), out.dims()))
}

/// Checks [`crate::Backend::copy`].
///
/// # Errors
/// See the module's head.
pub fn copy(x: &Tensor, out: &Tensor) -> Result<()> {
    let op = "copy";
    let converts = x.dtype() == out.dtype() || out.dtype().is_float();
    if !converts {
        return Err(TensorError::DType {
            op,
            dtype: out.dtype(),
            expected: "a float, or the dtype of x",
        });
    }
    writable(op, out, &[("x", x, false)])?;
    broadcasts(op, "x", x.dims(), out.dims())
}

/// Checks [`crate::Backend::fill`].
///
/// # Errors
/// See the module's head.
pub fn fill(out: &Tensor) -> Result<()> {
    one_float("fill", &[out])?;
    writable("fill", out, &[])
}

/// Extents of a sampler's update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepExtents {
    /// Batch elements.
    pub n_batch: usize,
    /// Elements of one of them.
    pub n_elements: usize,
    /// Dtype of the predictions.
    pub prediction: DType,
}

/// Checks [`crate::Backend::step`].
///
/// # Errors
/// See the module's head.
pub fn step(args: &StepArgs<'_>, out: &Tensor) -> Result<StepExtents> {
    let op = "step";
    let n_batch = out.dim(0);
    let state = |name: &str, tensor: &Tensor| {
        same_dims(op, name, tensor.dims(), out.dims())?;
        has_dtype(op, tensor, DType::F32)
    };
    state("latents", args.latents)?;
    state("out", out)?;
    same_dims(op, "conditional", args.conditional.dims(), out.dims())?;
    let prediction = one_float(op, &[args.conditional])?;
    has_dtype(op, args.coefficients, DType::F32)?;
    same_dims(op, "coefficients", args.coefficients.dims(), &[n_batch, 3])?;
    let mut inputs = [("conditional", args.conditional, false); 7];
    inputs[1] = ("coefficients", args.coefficients, false);
    if let Some((unconditional, guidance)) = args.unconditional {
        same_dims(op, "unconditional", unconditional.dims(), out.dims())?;
        has_dtype(op, unconditional, prediction)?;
        has_dtype(op, guidance, DType::F32)?;
        same_dims(op, "guidance", guidance.dims(), &[n_batch])?;
        inputs[2] = ("unconditional", unconditional, false);
        inputs[3] = ("guidance", guidance, false);
    }
    if let Some(noise) = args.noise {
        state("noise", noise)?;
        inputs[4] = ("noise", noise, false);
    }
    if let Some(guided_out) = args.guided_out {
        state("guided_out", guided_out)?;
        inputs[5] = ("latents", args.latents, false);
        inputs[6] = ("out", out, false);
        writable(op, guided_out, &inputs)?;
        inputs[6] = inputs[0];
    }
    inputs[5] = ("latents", args.latents, true);
    writable(op, out, &inputs)?;
    Ok(StepExtents {
        n_batch,
        n_elements: out.shape().n_elements() / n_batch,
        prediction,
    })
}

/// Checks [`crate::Backend::to_pixels`].
///
/// # Errors
/// See the module's head.
pub fn to_pixels(x: &Tensor, out: &Tensor) -> Result<()> {
    let op = "to_pixels";
    one_float(op, &[x])?;
    if !matches!(out.dtype(), DType::F32 | DType::U8) {
        return Err(TensorError::DType {
            op,
            dtype: out.dtype(),
            expected: "f32 or u8",
        });
    }
    same_dims(op, "x", x.dims(), out.dims())?;
    writable(op, out, &[("x", x, true)])
}
