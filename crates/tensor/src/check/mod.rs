//! What each op accepts: the contract's rules on dtypes, extents and aliases, checked in one place for all backends.
//!
//! Knows nothing of memory: whether a tensor belongs to a backend is that backend's own question. A function takes the operands of the op
//! of its name and returns the extents that kernels need. Errors are [`TensorError::Shape`], [`TensorError::DType`] for a dtype that the
//! contract does not take there (R7 of [`crate::Backend`]'s module), [`TensorError::Alias`] for an output that is read-only or overlaps an input, and
//! [`TensorError::Operand`] for a weight of another kind.

mod alias;
mod layout;
mod products;
mod rows;
#[cfg(test)]
mod tests;
pub mod weights;

pub use alias::writable;
pub use layout::{
    Pixels, Rotated, StepExtents, binary, copy, embedding, fill, gated, gated_add, gather_rows, patchify,
    permute, rope, step, timestep_embedding, to_pixels, unary, unpatchify, upsample_nearest,
};
pub use products::{AttentionExtents, ConvExtents, ProductExtents, attention, conv2d, linear};
pub use rows::{GroupExtents, RowExtents, group_norm, layer_norm, match_norm, rms_norm};

use crate::{DType, Result, Tensor, TensorError};

/// Refuses shapes unless `is_true`.
///
/// # Errors
/// [`TensorError::Shape`] with `detail`.
pub fn ensure(op: &'static str, is_true: bool, detail: impl FnOnce() -> String) -> Result<()> {
    if is_true {
        Ok(())
    } else {
        Err(TensorError::Shape { op, detail: detail() })
    }
}

/// Refuses unless `dims` are as expected.
///
/// # Errors
/// [`TensorError::Shape`].
pub fn same_dims(op: &'static str, name: &str, dims: &[usize], expected: &[usize]) -> Result<()> {
    ensure(op, dims == expected, || {
        format!("{name} is {dims:?}, expected {expected:?}")
    })
}

/// Refuses unless `tensor` has the dtype.
///
/// # Errors
/// [`TensorError::DType`].
pub fn has_dtype(op: &'static str, tensor: &Tensor, dtype: DType) -> Result<()> {
    if tensor.dtype() == dtype {
        Ok(())
    } else {
        Err(TensorError::DType {
            op,
            dtype: tensor.dtype(),
            expected: dtype.as_str(),
        })
    }
}

/// Refuses unless all have one dtype, which is a float; returns it.
fn one_float(op: &'static str, tensors: &[&Tensor]) -> Result<DType> {
    let dtype = tensors[0].dtype();
    if !dtype.is_float() {
        return Err(TensorError::DType {
            op,
            dtype,
            expected: "f32, bf16 or f16",
        });
    }
    for tensor in tensors {
        has_dtype(op, tensor, dtype)?;
    }
    Ok(dtype)
}

/// Refuses unless `own` broadcasts to `whole` by numpy's rule.
///
/// # Errors
/// [`TensorError::Shape`].
pub fn broadcasts(op: &'static str, name: &str, own: &[usize], whole: &[usize]) -> Result<()> {
    let n_missing = whole.len().checked_sub(own.len());
    let fits = n_missing.is_some_and(|n_missing| {
        let mut pairs = own.iter().zip(&whole[n_missing..]);
        pairs.all(|(own, whole)| own == whole || *own == 1)
    });
    ensure(op, fits, || {
        format!("{name} {own:?} does not broadcast to {whole:?}")
    })
}

/// Extent of dimension 0 where there is another behind it: what a per-element operand is counted by.
fn n_batch(tensor: &Tensor) -> usize {
    if tensor.dims().len() > 1 { tensor.dim(0) } else { 1 }
}

/// Refuses unless `tensor` is `[n_batch, n]` or `[1, n]`.
fn per_batch(op: &'static str, name: &str, tensor: &Tensor, n_batch: usize, n: usize) -> Result<()> {
    let fits = matches!(*tensor.dims(), [own, cols] if cols == n && (own == n_batch || own == 1));
    ensure(op, fits, || {
        format!(
            "{name} is {:?}, expected [{n_batch}, {n}] or [1, {n}]",
            tensor.dims()
        )
    })
}
