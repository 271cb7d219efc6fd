//! Matrix products, convolutions and attention.

use super::{ensure, has_dtype, n_batch, one_float, per_batch, same_dims, writable};
use crate::{AttentionSpec, ConvSpec, DType, Epilogue, Result, Tensor, TensorError, Weight, WeightKind};

/// Extents of a product `[n_rows, k] x [k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductExtents {
    /// Rows of all batch elements.
    pub n_rows: usize,
    /// Columns of the input.
    pub k: usize,
    /// Columns of the output.
    pub n: usize,
    /// Rows that share a row of the gate.
    pub rows_per_batch: usize,
}

/// Checks [`crate::Backend::linear`].
///
/// # Errors
/// See the module's head.
pub fn linear(x: &Tensor, w: &Weight, epilogue: &Epilogue<'_>, out: &Tensor) -> Result<ProductExtents> {
    let op = "linear";
    kind(op, w, WeightKind::Matrix)?;
    let &[n, k] = &*w.shape else {
        return Err(odd_weight(op, w));
    };
    let leading = &x.dims()[..x.dims().len() - 1];
    let fits = x.shape().last() == k
        && out.shape().last() == n
        && out.dims().len() == x.dims().len()
        && &out.dims()[..leading.len()] == leading;
    ensure(op, fits, || {
        format!("x {:?} times {:?} to out {:?}", x.dims(), w.shape, out.dims())
    })?;
    let rows_per_batch = finish(op, x, epilogue, out)?;
    Ok(ProductExtents {
        n_rows: leading.iter().product(),
        k,
        n,
        rows_per_batch,
    })
}

/// Extents of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvExtents {
    /// Pictures.
    pub n_batch: usize,
    /// Rows of the input, before it is enlarged.
    pub height: usize,
    /// Columns of the input, before it is enlarged.
    pub width: usize,
    /// Channels of the input.
    pub c_in: usize,
    /// Channels of the output.
    pub c_out: usize,
    /// Rows of the kernel.
    pub kernel_height: usize,
    /// Columns of the kernel.
    pub kernel_width: usize,
    /// Rows of the output.
    pub out_height: usize,
    /// Columns of the output.
    pub out_width: usize,
}

/// Checks [`crate::Backend::conv2d`].
///
/// # Errors
/// See the module's head.
pub fn conv2d(
    x: &Tensor,
    w: &Weight,
    spec: &ConvSpec,
    epilogue: &Epilogue<'_>,
    out: &Tensor,
) -> Result<ConvExtents> {
    let op = "conv2d";
    kind(op, w, WeightKind::Conv { stride: spec.stride })?;
    let &[c_out, c_in, kernel_height, kernel_width] = &*w.shape else {
        return Err(odd_weight(op, w));
    };
    ensure(op, spec.stride > 0, || "stride is 0".to_owned())?;
    ensure(op, !w.shape.contains(&0), || {
        format!("weight {:?} has a side of 0", w.shape)
    })?;
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
        let detail = format!("{spec:?} of x {:?} with weight {:?}", x.dims(), w.shape);
        return Err(TensorError::Shape { op, detail });
    };
    same_dims(op, "out", out.dims(), &[x.dim(0), out_height, out_width, c_out])?;
    finish(op, x, epilogue, out)?;
    Ok(ConvExtents {
        n_batch: x.dim(0),
        height: x.dim(1),
        width: x.dim(2),
        c_in,
        c_out,
        kernel_height,
        kernel_width,
        out_height,
        out_width,
    })
}

fn odd_weight(op: &'static str, w: &Weight) -> TensorError {
    let detail = format!("weight {:?}", w.shape);
    TensorError::Shape { op, detail }
}

fn kind(op: &'static str, w: &Weight, expected: WeightKind) -> Result<()> {
    if w.kind == expected {
        return Ok(());
    }
    let detail = format!("weight is a {:?}, expected a {expected:?}", w.kind);
    Err(TensorError::Operand { op, detail })
}

/// Refuses unless `vector` is one of `n` elements.
///
/// # Errors
/// [`TensorError::Operand`] for another kind, [`TensorError::Shape`] for another length.
pub(super) fn vector(op: &'static str, name: &str, vector: &Weight, n: usize) -> Result<()> {
    if vector.kind != WeightKind::Vector {
        let detail = format!("{name} is a {:?}, expected a vector", vector.kind);
        return Err(TensorError::Operand { op, detail });
    }
    ensure(op, vector.shape.iter().product::<usize>() == n, || {
        format!("{name} is {:?}, expected {n} elements", vector.shape)
    })
}

/// The epilogue of a product whose output is `out`; returns how many rows share a row of the gate.
fn finish(op: &'static str, x: &Tensor, epilogue: &Epilogue<'_>, out: &Tensor) -> Result<usize> {
    let n = out.shape().last();
    let n_batch = n_batch(out);
    let dtype = one_float(op, &[out, x])?;
    if let Some(bias) = epilogue.bias {
        vector(op, "bias", bias, n)?;
    }
    let mut inputs = [("x", x, false); 3];
    let mut n_inputs = 1;
    if let Some(gate) = epilogue.gate {
        has_dtype(op, gate, dtype)?;
        per_batch(op, "gate", gate, n_batch, n)?;
        inputs[n_inputs] = ("gate", gate, false);
        n_inputs += 1;
    }
    if let Some(residual) = epilogue.residual {
        has_dtype(op, residual, dtype)?;
        same_dims(op, "residual", residual.dims(), out.dims())?;
        inputs[n_inputs] = ("residual", residual, true);
        n_inputs += 1;
    }
    writable(op, out, &inputs[..n_inputs])?;
    Ok(out.shape().n_elements() / n / n_batch)
}

/// Extents of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionExtents {
    /// Batch elements.
    pub n_batch: usize,
    /// Rows of `q` in a batch element.
    pub n_queries: usize,
    /// Rows of `k` and `v` in a batch element.
    pub n_keys: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Elements between neighbours of the bias per dimension, 0 where it is broadcast.
    pub bias_strides: [usize; 4],
}

/// Checks [`crate::Backend::attention`].
///
/// # Errors
/// See the module's head.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec<'_>,
    out: &Tensor,
) -> Result<AttentionExtents> {
    let op = "attention";
    one_float(op, &[out, q, k, v])?;
    let mut inputs = [("q", q, false), ("k", k, false), ("v", v, false), ("q", q, false)];
    if let Some(bias) = spec.bias {
        inputs[3] = ("bias", bias, false);
    }
    writable(op, out, &inputs)?;
    same_dims(op, "out", out.dims(), q.dims())?;
    same_dims(op, "v", v.dims(), k.dims())?;
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
    let mut bias_strides = [0; 4];
    if let Some(bias) = spec.bias {
        has_dtype(op, bias, DType::F32)?;
        let whole = [q.dim(0), n_heads, q.dim(1), k.dim(1)];
        let fits = bias.dims().len() == 4
            && bias
                .dims()
                .iter()
                .zip(&whole)
                .all(|(own, whole)| own == whole || *own == 1);
        ensure(op, fits, || {
            format!("bias {:?} does not broadcast to {whole:?}", bias.dims())
        })?;
        for (dim_idx, stride) in bias_strides.iter_mut().enumerate() {
            if bias.dim(dim_idx) > 1 {
                *stride = bias.strides()[dim_idx];
            }
        }
    }
    Ok(AttentionExtents {
        n_batch: q.dim(0),
        n_queries: q.dim(1),
        n_keys: k.dim(1),
        head_dim: q.dim(2) / n_heads,
        bias_strides,
    })
}
