//! Norms.

use super::{ensure, has_dtype, n_batch, one_float, per_batch, products::vector, same_dims, writable};
use crate::{Modulation, Result, Tensor, Weight};

/// Extents of a norm over rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowExtents {
    /// Rows of all batch elements.
    pub n_rows: usize,
    /// Columns.
    pub n_cols: usize,
    /// Rows that share a row of the modulation.
    pub rows_per_batch: usize,
}

/// Extents of a norm over positions and the channels of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupExtents {
    /// Batch elements.
    pub n_batch: usize,
    /// Positions of a batch element.
    pub n_positions: usize,
    /// Channels.
    pub n_channels: usize,
}

/// Checks [`crate::Backend::layer_norm`].
///
/// # Errors
/// See the module's head.
pub fn layer_norm(
    x: &Tensor,
    affine: Option<(&Weight, Option<&Weight>)>,
    modulation: Option<&Modulation<'_>>,
    out: &Tensor,
) -> Result<RowExtents> {
    let op = "layer_norm";
    let dtype = one_float(op, &[out, x])?;
    let (n_cols, n_batch) = (x.shape().last(), n_batch(x));
    let mut inputs = [("x", x, true); 3];
    if let Some(modulation) = modulation {
        inputs[1] = ("scale", modulation.scale, false);
        inputs[2] = ("shift", modulation.shift, false);
        for (name, tensor, _) in &inputs[1..] {
            has_dtype(op, tensor, dtype)?;
            per_batch(op, name, tensor, n_batch, n_cols)?;
        }
    }
    writable(op, out, &inputs)?;
    same_dims(op, "out", out.dims(), x.dims())?;
    if let Some((weight, bias)) = affine {
        vector(op, "weight", weight, n_cols)?;
        if let Some(bias) = bias {
            vector(op, "bias", bias, n_cols)?;
        }
    }
    let n_rows = x.shape().n_elements() / n_cols;
    Ok(RowExtents {
        n_rows,
        n_cols,
        rows_per_batch: n_rows / n_batch,
    })
}

/// Checks [`crate::Backend::rms_norm`].
///
/// # Errors
/// See the module's head.
pub fn rms_norm(x: &Tensor, weight: Option<&Weight>, group_len: usize, out: &Tensor) -> Result<RowExtents> {
    let op = "rms_norm";
    one_float(op, &[out, x])?;
    writable(op, out, &[("x", x, true)])?;
    same_dims(op, "out", out.dims(), x.dims())?;
    let extents = grouped_rows(op, x, group_len)?;
    if let Some(weight) = weight {
        vector(op, "weight", weight, group_len)?;
    }
    Ok(extents)
}

/// Checks [`crate::Backend::match_norm`].
///
/// # Errors
/// See the module's head.
pub fn match_norm(x: &Tensor, like: &Tensor, group_len: usize, out: &Tensor) -> Result<RowExtents> {
    let op = "match_norm";
    one_float(op, &[out, x, like])?;
    writable(op, out, &[("x", x, true), ("like", like, false)])?;
    same_dims(op, "out", out.dims(), x.dims())?;
    same_dims(op, "like", like.dims(), x.dims())?;
    grouped_rows(op, x, group_len)
}

/// Extents of `x`, whose rows consist of groups of `group_len` channels.
fn grouped_rows(op: &'static str, x: &Tensor, group_len: usize) -> Result<RowExtents> {
    let n_cols = x.shape().last();
    ensure(op, group_len > 0 && n_cols.is_multiple_of(group_len), || {
        format!("groups of {group_len} in rows of {n_cols}")
    })?;
    let n_rows = x.shape().n_elements() / n_cols;
    Ok(RowExtents {
        n_rows,
        n_cols,
        rows_per_batch: n_rows / n_batch(x),
    })
}

/// Checks [`crate::Backend::group_norm`].
///
/// # Errors
/// See the module's head.
pub fn group_norm(
    x: &Tensor,
    affine: (&Weight, &Weight),
    n_groups: usize,
    out: &Tensor,
) -> Result<GroupExtents> {
    let op = "group_norm";
    one_float(op, &[out, x])?;
    writable(op, out, &[("x", x, true)])?;
    same_dims(op, "out", out.dims(), x.dims())?;
    let n_channels = x.shape().last();
    let fits = x.dims().len() > 1 && n_groups > 0 && n_channels.is_multiple_of(n_groups);
    ensure(op, fits, || format!("{n_groups} groups of x {:?}", x.dims()))?;
    vector(op, "weight", affine.0, n_channels)?;
    vector(op, "bias", affine.1, n_channels)?;
    Ok(GroupExtents {
        n_batch: x.dim(0),
        n_positions: x.shape().n_elements() / n_channels / x.dim(0),
        n_channels,
    })
}
