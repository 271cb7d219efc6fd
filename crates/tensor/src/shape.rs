//! Extents of up to [`MAX_DIMS`] dimensions, without an allocation.

use crate::{Result, TensorError};

/// Most dimensions of a tensor (video: batch, frame, height, width, channel; one to spare).
pub const MAX_DIMS: usize = 6;

/// Extents, outermost first. At least one dimension; none is zero; the product fits in `isize`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_DIMS],
    n_dims: usize,
}

impl Shape {
    /// Checks and takes `dims`.
    ///
    /// # Errors
    /// [`TensorError::Shape`] for no or too many dimensions, a zero extent or a product that overflows.
    pub fn new(dims: &[usize]) -> Result<Self> {
        let product = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let fits = product.is_some_and(|n| n > 0 && n <= isize::MAX as usize / 8);
        if dims.is_empty() || dims.len() > MAX_DIMS || !fits {
            return Err(TensorError::Shape {
                op: "shape",
                detail: format!("{dims:?} is no shape of 1 to {MAX_DIMS} positive extents"),
            });
        }
        let mut all = [1; MAX_DIMS];
        all[..dims.len()].copy_from_slice(dims);
        Ok(Self {
            dims: all,
            n_dims: dims.len(),
        })
    }

    /// The extents.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.n_dims]
    }

    /// Number of dimensions.
    pub fn n_dims(&self) -> usize {
        self.n_dims
    }

    /// Number of elements.
    pub fn n_elements(&self) -> usize {
        self.dims().iter().product()
    }

    /// The innermost extent (channels).
    pub fn last(&self) -> usize {
        self.dims[self.n_dims - 1]
    }
}

impl std::ops::Index<usize> for Shape {
    type Output = usize;

    fn index(&self, dim_idx: usize) -> &usize {
        &self.dims()[dim_idx]
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}
