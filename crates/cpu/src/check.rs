//! What each op accepts: from tensors to operands that kernels may trust.
//!
//! Kernels check nothing, so every promise in their `# Safety` sections is kept here: operands belong to this backend and have the
//! right dtype, extents agree, every index that strides and extents allow lies in the buffers, and the output overlaps no input except
//! where the op allows the very same view.

use crate::{
    attention::{Attention, Bias},
    conv::Walk,
    gemm::{Finish, MatrixRows, Panels},
    lookup::Rope,
    norm::{GroupNorm, LayerNorm, RmsNorm},
    operand::{Operands, Ptr, View, ensure, shape_error},
    weights::{self, Operator},
};
use denoised_tensor::{
    Activation, AttentionSpec, ConvSpec, Epilogue, Modulation, Result, RopeStyle, Tensor, TensorError,
    Weight, WeightKind,
};

/// Rows, their number, weights and finish of a product.
pub(crate) fn linear(
    operands: Operands<'_>,
    x: &Tensor,
    w: &Weight,
    epilogue: &Epilogue<'_>,
    out: &Tensor,
) -> Result<(MatrixRows, usize, Panels, Finish)> {
    let op = operands.op;
    let view = operands.input::<f32>("x", x)?;
    let panels = match (weights::packed(op, w, operands.isa)?, w.kind) {
        (Operator::Packed(panels), WeightKind::Matrix) => panels,
        _ => {
            let detail = format!("weight is a {:?}, expected a matrix", w.kind);
            return Err(TensorError::Operand { op, detail });
        }
    };
    let leading = &x.dims()[..x.dims().len() - 1];
    let fits = view.n_cols() == panels.k
        && out.shape().last() == panels.n
        && out.dims().len() == x.dims().len()
        && &out.dims()[..leading.len()] == leading;
    ensure(op, fits, || {
        format!("x {:?} times {:?} to out {:?}", x.dims(), w.shape, out.dims())
    })?;
    let finish = finish(operands, epilogue, out, x)?;
    let n_rows = view.shape.n_elements() / panels.k;
    let source = MatrixRows {
        rows: view.rows(),
        k: panels.k,
    };
    Ok((source, n_rows, panels, finish))
}

/// Walk, weights and finish of a convolution.
pub(crate) fn conv2d(
    operands: Operands<'_>,
    x: &Tensor,
    w: &Weight,
    spec: &ConvSpec,
    epilogue: &Epilogue<'_>,
    out: &Tensor,
) -> Result<(Walk, Operator, Finish)> {
    let op = operands.op;
    let image = operands.input::<f32>("x", x)?;
    let operator = weights::packed(op, w, operands.isa)?;
    if w.kind != (WeightKind::Conv { stride: spec.stride }) {
        let detail = format!(
            "weight is a {:?}, expected a convolution of stride {}",
            w.kind, spec.stride
        );
        return Err(TensorError::Operand { op, detail });
    }
    let &[c_out, c_in, kernel_height, kernel_width] = &*w.shape else {
        return shape_error(op, format!("weight {:?}", w.shape));
    };
    ensure(op, x.dims().len() == 4 && x.dim(3) == c_in, || {
        format!("x is {:?}, expected [batch, h, w, {c_in}]", x.dims())
    })?;
    ensure(op, matches!(spec.upsample, 1 | 2), || {
        format!("upsample is {}, expected 1 or 2", spec.upsample)
    })?;
    let [top, left, bottom, right] = spec.padding;
    let extent = |side: usize, before: usize, after: usize, taps: usize| {
        let padded = (side * spec.upsample).checked_add(before)?.checked_add(after)?;
        Some(padded.checked_sub(taps)? / spec.stride + 1)
    };
    let out_height = extent(x.dim(1), top, bottom, kernel_height);
    let out_width = extent(x.dim(2), left, right, kernel_width);
    let (Some(out_height), Some(out_width)) = (out_height, out_width) else {
        return shape_error(
            op,
            format!("{spec:?} of x {:?} with weight {:?}", x.dims(), w.shape),
        );
    };
    operands.same_dims("out", out.dims(), &[x.dim(0), out_height, out_width, c_out])?;
    let finish = finish(operands, epilogue, out, x)?;
    let walk = Walk {
        image,
        spec: *spec,
        kernel_height,
        kernel_width,
        out_height,
        out_width,
    };
    Ok((walk, operator, finish))
}

/// The finish of a product or convolution whose output is `out` (`n` columns, not yet checked against `inputs`).
fn finish(operands: Operands<'_>, epilogue: &Epilogue<'_>, out: &Tensor, x: &Tensor) -> Result<Finish> {
    let op = operands.op;
    let mut inputs = vec![("x", x, false)];
    inputs.extend(epilogue.gate.map(|gate| ("gate", gate, false)));
    inputs.extend(epilogue.residual.map(|residual| ("residual", residual, true)));
    let view = operands.output::<f32>(out, &inputs)?;
    let n = view.n_cols();
    let n_batch = if view.n_dims() > 1 { view.dim(0) } else { 1 };
    let bias = match epilogue.bias {
        Some(bias) => Some(weights::vector(op, "bias", bias, n, operands.isa)?),
        None => None,
    };
    let gate = match epilogue.gate {
        Some(gate) => Some(per_batch(operands, "gate", gate, n_batch, n)?),
        None => None,
    };
    let residual = match epilogue.residual {
        Some(residual) => {
            operands.same_dims("residual", residual.dims(), out.dims())?;
            Some(operands.input::<f32>("residual", residual)?.rows())
        }
        None => None,
    };
    Ok(Finish {
        bias,
        activation: epilogue.activation,
        gate,
        rows_per_batch: view.shape.n_elements() / n / n_batch,
        residual,
        out: view.rows(),
    })
}

/// `[batch, n]` or `[1, n]` as first row and distance of rows.
fn per_batch(
    operands: Operands<'_>,
    name: &str,
    tensor: &Tensor,
    n_batch: usize,
    n: usize,
) -> Result<(Ptr<f32>, usize)> {
    let view = operands.input::<f32>(name, tensor)?;
    let fits = view.n_dims() == 2 && view.dim(1) == n && (view.dim(0) == n_batch || view.dim(0) == 1);
    ensure(operands.op, fits, || {
        format!(
            "{name} is {:?}, expected [{n_batch}, {n}] or [1, {n}]",
            tensor.dims()
        )
    })?;
    Ok((view.start, if view.dim(0) == 1 { 0 } else { view.stride(0) }))
}

pub(crate) fn attention(
    operands: Operands<'_>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec<'_>,
    out: &Tensor,
) -> Result<Attention> {
    let op = operands.op;
    let (q_view, k_view, v_view) = (
        operands.input("q", q)?,
        operands.input("k", k)?,
        operands.input("v", v)?,
    );
    let mut inputs = vec![("q", q, false), ("k", k, false), ("v", v, false)];
    inputs.extend(spec.bias.map(|bias| ("bias", bias, false)));
    let out_view = operands.output(out, &inputs)?;
    operands.same_dims("out", out.dims(), q.dims())?;
    operands.same_dims("v", v.dims(), k.dims())?;
    let (n_heads, n_kv_heads) = (spec.n_heads, spec.n_kv_heads);
    let heads_fit = n_heads > 0 && n_kv_heads > 0 && n_heads.is_multiple_of(n_kv_heads);
    let fits = heads_fit
        && q.dims().len() == 3
        && k.dims().len() == 3
        && q.dim(0) == k.dim(0)
        && q.dim(2).is_multiple_of(n_heads)
        && Some(k.dim(2)) == (q.dim(2) / n_heads).checked_mul(n_kv_heads);
    ensure(op, fits, || {
        format!(
            "q {:?}, k {:?} with {n_heads} heads and {n_kv_heads} of keys",
            q.dims(),
            k.dims()
        )
    })?;
    ensure(op, !spec.is_causal || q.dim(1) == k.dim(1), || {
        format!("causal with {} queries and {} keys", q.dim(1), k.dim(1))
    })?;
    let bias = match spec.bias {
        Some(bias) => {
            let view = operands.input::<f32>("bias", bias)?;
            let whole = [q.dim(0), n_heads, q.dim(1), k.dim(1)];
            let fits = view.n_dims() == 4
                && view
                    .dims()
                    .iter()
                    .zip(&whole)
                    .all(|(own, whole)| own == whole || *own == 1);
            ensure(op, fits, || {
                format!("bias {:?} does not broadcast to {whole:?}", bias.dims())
            })?;
            let strides = std::array::from_fn(|i| if view.dim(i) > 1 { view.stride(i) } else { 0 });
            Some(Bias {
                start: view.start,
                strides,
            })
        }
        None => None,
    };
    Ok(Attention {
        q: q_view,
        k: k_view,
        v: v_view,
        out: out_view,
        n_heads,
        n_kv_heads,
        scale: spec.scale,
        is_causal: spec.is_causal,
        bias,
    })
}

/// A layer norm and its number of rows.
pub(crate) fn layer_norm(
    operands: Operands<'_>,
    x: &Tensor,
    affine: Option<(&Weight, Option<&Weight>)>,
    eps: f32,
    modulation: Option<Modulation<'_>>,
    out: &Tensor,
) -> Result<(LayerNorm, usize)> {
    let op = operands.op;
    let view = operands.input::<f32>("x", x)?;
    let mut inputs = vec![("x", x, true)];
    if let Some(modulation) = &modulation {
        inputs.extend([
            ("scale", modulation.scale, false),
            ("shift", modulation.shift, false),
        ]);
    }
    let out_view = operands.output::<f32>(out, &inputs)?;
    operands.same_dims("out", out.dims(), x.dims())?;
    let n_cols = view.n_cols();
    let n_batch = if view.n_dims() > 1 { view.dim(0) } else { 1 };
    let n_rows = view.shape.n_elements() / n_cols;
    let weight = match affine {
        Some((weight, _)) => Some(weights::vector(op, "weight", weight, n_cols, operands.isa)?),
        None => None,
    };
    let bias = match affine {
        Some((_, Some(bias))) => Some(weights::vector(op, "bias", bias, n_cols, operands.isa)?),
        _ => None,
    };
    let modulation = match modulation {
        Some(modulation) => Some([
            per_batch(operands, "scale", modulation.scale, n_batch, n_cols)?,
            per_batch(operands, "shift", modulation.shift, n_batch, n_cols)?,
        ]),
        None => None,
    };
    let norm = LayerNorm {
        x: view.rows(),
        out: out_view.rows(),
        n_cols,
        eps,
        weight,
        bias,
        modulation,
        rows_per_batch: n_rows / n_batch,
    };
    Ok((norm, n_rows))
}

/// An RMS norm and its number of rows.
pub(crate) fn rms_norm(
    operands: Operands<'_>,
    x: &Tensor,
    weight: Option<&Weight>,
    group_len: usize,
    eps: f32,
    out: &Tensor,
) -> Result<(RmsNorm, usize)> {
    let op = operands.op;
    let view = operands.input::<f32>("x", x)?;
    let out_view = operands.output::<f32>(out, &[("x", x, true)])?;
    operands.same_dims("out", out.dims(), x.dims())?;
    let n_cols = view.n_cols();
    ensure(op, group_len > 0 && n_cols.is_multiple_of(group_len), || {
        format!("groups of {group_len} in rows of {n_cols}")
    })?;
    let weight = match weight {
        Some(weight) => Some(weights::vector(op, "weight", weight, group_len, operands.isa)?),
        None => None,
    };
    let norm = RmsNorm {
        x: view.rows(),
        out: out_view.rows(),
        n_cols,
        group_len,
        eps,
        weight,
    };
    let n_rows = view.shape.n_elements() / n_cols;
    Ok((norm, n_rows))
}

pub(crate) fn group_norm(
    operands: Operands<'_>,
    x: &Tensor,
    affine: (&Weight, &Weight),
    n_groups: usize,
    eps: f32,
    activation: Activation,
    out: &Tensor,
) -> Result<GroupNorm> {
    let op = operands.op;
    let view = operands.input::<f32>("x", x)?;
    let out_view = operands.output::<f32>(out, &[("x", x, true)])?;
    operands.same_dims("out", out.dims(), x.dims())?;
    let n_cols = view.n_cols();
    let fits = view.n_dims() > 1 && n_groups > 0 && n_cols.is_multiple_of(n_groups);
    ensure(op, fits, || format!("{n_groups} groups of x {:?}", x.dims()))?;
    Ok(GroupNorm {
        x: view,
        out: out_view,
        weight: weights::vector(op, "weight", affine.0, n_cols, operands.isa)?,
        bias: weights::vector(op, "bias", affine.1, n_cols, operands.isa)?,
        n_groups,
        eps,
        activation,
    })
}

/// A rotation and its number of rows.
pub(crate) fn rope(
    operands: Operands<'_>,
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    style: RopeStyle,
    out: &Tensor,
) -> Result<(Rope, usize)> {
    let op = operands.op;
    let view = operands.input::<f32>("x", x)?;
    let (cos_view, sin_view) = (
        operands.input::<f32>("cos", cos)?,
        operands.input::<f32>("sin", sin)?,
    );
    let out_view =
        operands.output::<f32>(out, &[("x", x, true), ("cos", cos, false), ("sin", sin, false)])?;
    operands.same_dims("out", out.dims(), x.dims())?;
    operands.same_dims("sin", sin.dims(), cos.dims())?;
    let fits = view.n_dims() == 3
        && cos.dims().len() == 2
        && cos.dim(0) == view.dim(1)
        && view.n_cols().is_multiple_of(2 * cos.dim(1));
    ensure(op, fits, || {
        format!("x {:?} with angles {:?}", x.dims(), cos.dims())
    })?;
    let half = cos.dim(1);
    let rope = Rope {
        x: view.rows(),
        out: out_view.rows(),
        cos: cos_view.rows(),
        sin: sin_view.rows(),
        n_tokens: view.dim(1),
        n_heads: view.n_cols() / (2 * half),
        half,
        style,
    };
    Ok((rope, view.dim(0) * view.dim(1)))
}

/// Whether an image `[batch, h, w, c]` and tokens fit each other.
pub(crate) fn patches(op: &'static str, image: &View<f32>, tokens: &View<f32>, patch: usize) -> Result<()> {
    let fits = image.n_dims() == 4
        && tokens.n_dims() == 3
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
    })
}
