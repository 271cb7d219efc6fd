//! How element-wise kernels walk their operands: dimensions merged where all allow it, broadcast by strides of zero, vectors where
//! everything lies on their boundaries.

use crate::operand::{View, small};
use denoised_tensor::{MAX_DIMS, Result};

/// Operands of an element-wise kernel, the output first, innermost dimension first; mirrors `Walk` of `elementwise.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk<const N: usize> {
    starts: [u64; N],
    n_items: i64,
    strides: [[i64; MAX_DIMS]; N],
    extents: [i32; MAX_DIMS],
    n_dims: i32,
    is_vector: i32,
}

impl<const N: usize> Walk<N> {
    /// Over the first operand; the others broadcast to it.
    pub(super) fn new(op: &'static str, operands: [&View; N]) -> Result<Self> {
        let whole = operands[0];
        let mut walk = Self {
            starts: operands.map(|operand| operand.start),
            n_items: whole.shape.n_elements() as i64,
            strides: [[0; MAX_DIMS]; N],
            extents: [1; MAX_DIMS],
            n_dims: 0,
            is_vector: 0,
        };
        let mut n_dims = 0;
        for dim_idx in (0..whole.n_dims()).rev() {
            let extent = whole.dim(dim_idx);
            if extent == 1 {
                continue;
            }
            let strides = operands.map(|operand| stride(operand, dim_idx, whole.n_dims()));
            let continues = n_dims > 0
                && (0..N)
                    .all(|n| strides[n] == walk.strides[n][n_dims - 1] * i64::from(walk.extents[n_dims - 1]));
            let merged = continues.then(|| walk.extents[n_dims - 1] as usize * extent);
            match merged.map(i32::try_from) {
                Some(Ok(merged)) => walk.extents[n_dims - 1] = merged,
                _ => {
                    walk.extents[n_dims] = small(op, extent)?;
                    for (own, stride) in walk.strides.iter_mut().zip(strides) {
                        own[n_dims] = stride;
                    }
                    n_dims += 1;
                }
            }
        }
        walk.n_dims = n_dims as i32;
        let widest = operands
            .map(|operand| operand.dtype.size_bytes())
            .into_iter()
            .max();
        walk.take_vectors(operands, 16 / widest.unwrap_or(16));
        Ok(walk)
    }

    /// Items of `len` neighbours, if rows are whole numbers of them and every operand has them side by side on a boundary, or one value
    /// for all.
    fn take_vectors(&mut self, operands: [&View; N], len: usize) {
        let len = len as i64;
        let n_dims = self.n_dims as usize;
        if n_dims == 0 || len == 1 || i64::from(self.extents[0]) % len != 0 {
            return;
        }
        for (n, operand) in operands.iter().enumerate() {
            let vector_bytes = operand.dtype.size_bytes() as u64 * len as u64;
            let lies_well = match self.strides[n][0] {
                0 => n > 0,
                1 => {
                    operand.start.is_multiple_of(vector_bytes)
                        && self.strides[n][1..n_dims].iter().all(|stride| stride % len == 0)
                }
                _ => false,
            };
            if !lies_well {
                return;
            }
        }
        self.extents[0] /= len as i32;
        self.n_items /= len;
        self.is_vector = 1;
        for strides in &mut self.strides {
            strides[0] *= len;
        }
    }

    pub(super) fn n_items(&self) -> usize {
        self.n_items as usize
    }
}

/// Elements between neighbours of `operand` along dimension `dim_idx` of the whole, which has `n_dims`; 0 where it is broadcast.
fn stride(operand: &View, dim_idx: usize, n_dims: usize) -> i64 {
    match (dim_idx + operand.n_dims()).checked_sub(n_dims) {
        Some(own_idx) if operand.dim(own_idx) > 1 => operand.strides[own_idx] as i64,
        _ => 0,
    }
}
