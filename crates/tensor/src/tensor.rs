//! A view into a backend's buffer. Host arithmetic on shapes and strides; never touches the elements.

use crate::{DType, MAX_DIMS, Result, Shape, TensorError};
use std::{any::Any, fmt, rc::Rc};

/// Memory of one backend. The backend that made it finds its own type through [`Buffer::as_any`].
pub trait Buffer: Any + fmt::Debug {
    /// For the downcast.
    fn as_any(&self) -> &dyn Any;
    /// Bytes that the buffer holds.
    fn len_bytes(&self) -> usize;
    /// Whether ops may write to it (weights are shared and read-only).
    fn is_writable(&self) -> bool;
}

/// A view: dense in its last dimension, any strides in the others (a stride of 0 is not allowed; ops broadcast by shape).
///
/// Cloning shares the elements. Not `Send` (see R2 of the crate).
#[derive(Clone)]
pub struct Tensor {
    buffer: Rc<dyn Buffer>,
    dtype: DType,
    /// In elements.
    offset: usize,
    shape: Shape,
    /// In elements; `strides[n_dims - 1] == 1`.
    strides: [usize; MAX_DIMS],
}

impl Tensor {
    /// The whole of `buffer` (or its start) as a dense tensor. For backends.
    ///
    /// # Errors
    /// [`TensorError::Shape`] if the buffer is too small.
    pub fn from_buffer(buffer: Rc<dyn Buffer>, shape: &[usize], dtype: DType) -> Result<Self> {
        let shape = Shape::new(shape)?;
        let n_bytes = shape.n_elements().checked_mul(dtype.size_bytes());
        if n_bytes.is_none_or(|n_bytes| n_bytes > buffer.len_bytes()) {
            let detail = format!(
                "{shape:?} {dtype} exceeds a buffer of {} bytes",
                buffer.len_bytes()
            );
            return Err(TensorError::Shape {
                op: "from_buffer",
                detail,
            });
        }
        Ok(Self {
            buffer,
            dtype,
            offset: 0,
            shape,
            strides: dense_strides(&shape),
        })
    }

    /// The buffer behind the view. For backends.
    pub fn buffer(&self) -> &Rc<dyn Buffer> {
        &self.buffer
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extents.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Extents as a slice.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Extent of dimension `dim_idx`.
    pub fn dim(&self, dim_idx: usize) -> usize {
        self.shape[dim_idx]
    }

    /// First element, in elements from the start of the buffer.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Elements between neighbours, per dimension; the last is 1.
    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.shape.n_dims()]
    }

    /// Whether the elements lie without gaps in row-major order.
    pub fn is_dense(&self) -> bool {
        let dense = dense_strides(&self.shape);
        let mut strides = self.dims().iter().zip(self.strides()).zip(dense);
        strides.all(|((&extent, &stride), dense)| stride == dense || extent == 1)
    }

    /// Elements `start .. start + len` of dimension `dim_idx`, sharing memory.
    ///
    /// # Errors
    /// [`TensorError::Shape`] if that is out of range or empty.
    pub fn narrow(&self, dim_idx: usize, start: usize, len: usize) -> Result<Self> {
        let dims = self.dims();
        if dim_idx >= dims.len() || len == 0 || start.checked_add(len).is_none_or(|end| end > dims[dim_idx]) {
            let detail = format!("{start}..+{len} of dimension {dim_idx} of {dims:?}");
            return Err(TensorError::Shape { op: "narrow", detail });
        }
        let mut new_dims = [1; MAX_DIMS];
        new_dims[..dims.len()].copy_from_slice(dims);
        new_dims[dim_idx] = len;
        let mut view = self.clone();
        view.shape = Shape::new(&new_dims[..dims.len()])?;
        view.offset += start * self.strides[dim_idx];
        Ok(view)
    }

    /// The same elements under another shape, sharing memory. Leading dimensions may be merged or split where the strides allow
    /// it; the last dimension may change only for a dense tensor.
    ///
    /// # Errors
    /// [`TensorError::Shape`] if the number of elements differs or the strides do not allow it.
    pub fn reshape(&self, dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        let refuse = || TensorError::Shape {
            op: "reshape",
            detail: format!("{:?} with strides {:?} to {dims:?}", self.dims(), self.strides()),
        };
        if shape.n_elements() != self.shape.n_elements() {
            return Err(refuse());
        }
        let mut view = self.clone();
        view.shape = shape;
        view.strides = if self.is_dense() {
            dense_strides(&shape)
        } else {
            self.split_strides(&shape).ok_or_else(refuse)?
        };
        Ok(view)
    }

    /// Strides of `shape` over this view's elements, as numpy would find them without a copy; `None` where it cannot.
    fn split_strides(&self, shape: &Shape) -> Option<[usize; MAX_DIMS]> {
        // Runs of old dimensions that are dense among themselves, outermost first, as (extent, innermost stride).
        let mut runs: Vec<(usize, usize)> = Vec::with_capacity(MAX_DIMS);
        for (&extent, &stride) in self.dims().iter().zip(self.strides()) {
            match runs.last_mut() {
                _ if extent == 1 => {}
                Some(run) if run.1 == stride * extent => *run = (run.0 * extent, stride),
                _ => runs.push((extent, stride)),
            }
        }
        let mut strides = [1; MAX_DIMS];
        let mut run = runs.pop().unwrap_or((1, 1));
        // Fill from the innermost dimension; each new dimension must lie inside one run.
        for dim_idx in (0..shape.n_dims()).rev() {
            let extent = shape[dim_idx];
            if extent > 1 && run.0 == 1 {
                run = runs.pop()?;
            }
            if !run.0.is_multiple_of(extent) {
                return None;
            }
            strides[dim_idx] = run.1;
            run = (run.0 / extent, run.1 * extent);
        }
        strides[shape.n_dims() - 1] = 1;
        let last_is_dense = shape.last() == 1
            || self.strides()[self.shape.n_dims() - 1] == 1 && shape.last() <= self.shape.last();
        last_is_dense.then_some(strides)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?} {}", self.shape, self.dtype)?;
        if !self.is_dense() {
            write!(f, " strides {:?}", self.strides())?;
        }
        write!(f, ")")
    }
}

fn dense_strides(shape: &Shape) -> [usize; MAX_DIMS] {
    let mut strides = [1; MAX_DIMS];
    for dim_idx in (0..shape.n_dims().saturating_sub(1)).rev() {
        strides[dim_idx] = strides[dim_idx + 1] * shape[dim_idx + 1];
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Bytes(usize);

    impl Buffer for Bytes {
        fn as_any(&self) -> &dyn Any {
            self
        }
        fn len_bytes(&self) -> usize {
            self.0
        }
        fn is_writable(&self) -> bool {
            true
        }
    }

    fn tensor(dims: &[usize]) -> Tensor {
        Tensor::from_buffer(Rc::new(Bytes(1 << 20)), dims, DType::F32).expect("fits in 1 MiB")
    }

    #[test]
    fn a_column_slice_of_a_fused_projection_keeps_its_row_stride() {
        let q = tensor(&[2, 5, 12]).narrow(2, 4, 4).expect("inside");
        assert_eq!((q.offset(), q.strides()), (4, &[60, 12, 1][..]));
    }

    #[test]
    fn a_slice_of_a_slice_adds_up() {
        let text = tensor(&[2, 9, 4]).narrow(1, 6, 3).expect("inside");
        let last = text
            .narrow(0, 1, 1)
            .and_then(|t| t.narrow(1, 1, 2))
            .expect("inside");
        assert_eq!((last.offset(), last.dims()), (36 + 7 * 4, &[1, 2, 4][..]));
        assert!(!text.is_dense() && last.is_dense());
    }

    #[test]
    fn reshape_splits_and_merges_leading_dimensions_without_a_copy() {
        let image = tensor(&[2, 4, 4, 8]).narrow(3, 0, 4).expect("inside");
        let tokens = image.reshape(&[2, 16, 4]).expect("rows merge");
        assert_eq!(tokens.strides(), [128, 8, 1]);
        assert_eq!(
            tokens.reshape(&[2, 4, 4, 4]).expect("rows split").strides(),
            image.strides()
        );
        assert!(
            image.reshape(&[2, 4, 16]).is_err(),
            "columns of a slice do not merge"
        );
        let heads = image.reshape(&[2, 4, 4, 2, 2]).expect("columns of a slice split");
        assert_eq!(heads.strides(), [128, 32, 8, 2, 1]);
    }

    #[test]
    fn wrong_shapes_are_refused() {
        assert!(Shape::new(&[]).is_err());
        assert!(Shape::new(&[3, 0]).is_err());
        assert!(Shape::new(&[usize::MAX, 2]).is_err());
        assert!(tensor(&[2, 3]).narrow(1, 2, 2).is_err());
        assert!(tensor(&[2, 3]).narrow(2, 0, 1).is_err());
        assert!(Tensor::from_buffer(Rc::new(Bytes(8)), &[3], DType::F32).is_err());
    }
}
