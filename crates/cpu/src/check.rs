//! From tensors to operands that kernels may trust.
//!
//! Kernels check nothing, so every promise in their `# Safety` sections is kept here: `denoised_tensor::check` has the contract's rules on
//! extents and aliases; beyond them operands belong to this backend and are f32.

use crate::{
    attention::{Attention, Bias},
    conv::Walk,
    gemm::{Finish, MatrixRows, Panels},
    lookup::Rope,
    norm::{GroupNorm, LayerNorm, MatchNorm, RmsNorm},
    operand::{Operands, Ptr},
    weights::{self, Operator},
};
use denoised_tensor::{
    Activation, AttentionSpec, ConvSpec, Epilogue, Modulation, Result, RopeStyle, Tensor, TensorError,
    Weight, check,
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
    let extents = check::linear(x, w, epilogue, out)?;
    let view = operands.input::<f32>("x", x)?;
    let Operator::Packed(panels) = weights::packed(op, w, operands.isa)? else {
        let detail = format!("weight {:?} was packed for convolutions", w.shape);
        return Err(TensorError::Operand { op, detail });
    };
    let finish = finish(operands, epilogue, out)?;
    let source = MatrixRows {
        rows: view.rows(),
        k: panels.k,
    };
    Ok((source, extents.n_rows, panels, finish))
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
    let extents = check::conv2d(x, w, spec, epilogue, out)?;
    let image = operands.input::<f32>("x", x)?;
    let operator = weights::packed(operands.op, w, operands.isa)?;
    let finish = finish(operands, epilogue, out)?;
    let walk = Walk {
        image,
        spec: *spec,
        kernel_height: extents.kernel_height,
        kernel_width: extents.kernel_width,
        out_height: extents.out_height,
        out_width: extents.out_width,
    };
    Ok((walk, operator, finish))
}

/// The finish of a product or convolution whose output is `out` (`n` columns).
fn finish(operands: Operands<'_>, epilogue: &Epilogue<'_>, out: &Tensor) -> Result<Finish> {
    let op = operands.op;
    let view = operands.input::<f32>("out", out)?;
    let n = view.n_cols();
    let n_batch = if view.n_dims() > 1 { view.dim(0) } else { 1 };
    let bias = match epilogue.bias {
        Some(bias) => Some(weights::vector(op, "bias", bias, n, operands.isa)?),
        None => None,
    };
    let gate = match epilogue.gate {
        Some(gate) => Some(per_batch(operands, "gate", gate)?),
        None => None,
    };
    let residual = match epilogue.residual {
        Some(residual) => Some(operands.input::<f32>("residual", residual)?.rows()),
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
fn per_batch(operands: Operands<'_>, name: &str, tensor: &Tensor) -> Result<(Ptr<f32>, usize)> {
    let view = operands.input::<f32>(name, tensor)?;
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
    let extents = check::attention(q, k, v, spec, out)?;
    let bias = match spec.bias {
        Some(bias) => Some(Bias {
            start: operands.input::<f32>("bias", bias)?.start,
            strides: extents.bias_strides,
        }),
        None => None,
    };
    Ok(Attention {
        q: operands.input("q", q)?,
        k: operands.input("k", k)?,
        v: operands.input("v", v)?,
        out: operands.input("out", out)?,
        n_heads: spec.n_heads,
        n_kv_heads: spec.n_kv_heads,
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
    let extents = check::layer_norm(x, affine, modulation.as_ref(), out)?;
    let (n_rows, n_cols) = (extents.n_rows, extents.n_cols);
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
            per_batch(operands, "scale", modulation.scale)?,
            per_batch(operands, "shift", modulation.shift)?,
        ]),
        None => None,
    };
    let norm = LayerNorm {
        x: operands.input("x", x)?.rows(),
        out: operands.input("out", out)?.rows(),
        n_cols,
        eps,
        weight,
        bias,
        modulation,
        rows_per_batch: extents.rows_per_batch,
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
    let extents = check::rms_norm(x, weight, group_len, out)?;
    let weight = match weight {
        Some(weight) => Some(weights::vector(op, "weight", weight, group_len, operands.isa)?),
        None => None,
    };
    let norm = RmsNorm {
        x: operands.input("x", x)?.rows(),
        out: operands.input("out", out)?.rows(),
        n_cols: extents.n_cols,
        group_len,
        eps,
        weight,
    };
    Ok((norm, extents.n_rows))
}

/// Norms to be taken over, and the number of rows.
pub(crate) fn match_norm(
    operands: Operands<'_>,
    x: &Tensor,
    like: &Tensor,
    group_len: usize,
    out: &Tensor,
) -> Result<(MatchNorm, usize)> {
    let extents = check::match_norm(x, like, group_len, out)?;
    let norm = MatchNorm {
        x: operands.input("x", x)?.rows(),
        like: operands.input("like", like)?.rows(),
        out: operands.input("out", out)?.rows(),
        n_cols: extents.n_cols,
        group_len,
    };
    Ok((norm, extents.n_rows))
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
    let extents = check::group_norm(x, affine, n_groups, out)?;
    let n_cols = extents.n_channels;
    Ok(GroupNorm {
        x: operands.input("x", x)?,
        out: operands.input("out", out)?,
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
    let extents = check::rope(x, cos, sin, out)?;
    let rope = Rope {
        x: operands.input("x", x)?.rows(),
        out: operands.input("out", out)?.rows(),
        cos: operands.input("cos", cos)?.rows(),
        sin: operands.input("sin", sin)?.rows(),
        n_tokens: extents.n_tokens,
        n_heads: extents.n_heads,
        half: extents.half,
        style,
    };
    Ok((rope, x.dim(0) * extents.n_tokens))
}
