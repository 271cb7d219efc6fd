//! Operands on their way from the contract's tensors to the kernels' pointers: everything is checked here, and nothing later.
//!
//! R1. A [`View`] of type `T` exists only for a tensor of that dtype in memory of this backend (or in prepared weights), and its
//!     elements lie inside that memory: [`Tensor`] has checked them against the buffer's length.
//! R2. Views do not keep the memory alive; they are used only inside the op that borrows the tensors.
//! R3. An output is writable, and overlaps no input except the ones that the op allows to be the very same view.

use crate::{
    Isa,
    memory::{CpuBuffer, Memory},
    weights::WeightBuffer,
};
use denoised_tensor::{DType, MAX_DIMS, Result, Shape, Tensor, TensorError};

/// Rust types of tensor elements.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// Its dtype.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}
impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for half::bf16 {
    const DTYPE: DType = DType::BF16;
}

/// A pointer that tasks may share: who touches which element is settled by the op.
#[derive(Debug)]
pub(crate) struct Ptr<T>(pub(crate) *mut T);

impl<T> Clone for Ptr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Ptr<T> {}
// SAFETY: a pointer is only a number; each dereference proves its own right.
unsafe impl<T> Send for Ptr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Ptr<T> {}

impl<T> Ptr<T> {
    /// The pointer; a method, so that closures capture the wrapper.
    #[inline(always)]
    pub(crate) fn get(self) -> *mut T {
        self.0
    }

    /// The element at `offset`, which lies in the same memory.
    #[inline(always)]
    pub(crate) fn at(self, offset: usize) -> *mut T {
        self.0.wrapping_add(offset)
    }
}

/// A checked operand: pointer to the first element, extents and strides. Inputs are never written through it.
#[derive(Debug)]
pub(crate) struct View<T> {
    pub(crate) start: Ptr<T>,
    pub(crate) shape: Shape,
    pub(crate) strides: [usize; MAX_DIMS],
}

impl<T> Clone for View<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for View<T> {}

impl<T> View<T> {
    pub(crate) fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    pub(crate) fn dim(&self, dim_idx: usize) -> usize {
        self.shape[dim_idx]
    }

    pub(crate) fn n_dims(&self) -> usize {
        self.shape.n_dims()
    }

    pub(crate) fn stride(&self, dim_idx: usize) -> usize {
        self.strides[dim_idx]
    }

    /// Columns of a row.
    pub(crate) fn n_cols(&self) -> usize {
        self.shape.last()
    }

    /// Element `idx` of dimension 0, without that dimension's stride in the way: same strides, extent 1.
    pub(crate) fn batch_element(&self, batch_idx: usize) -> Self {
        let mut dims = [1; MAX_DIMS];
        dims[..self.n_dims()].copy_from_slice(self.dims());
        dims[0] = 1;
        let shape = Shape::new(&dims[..self.n_dims()]).unwrap_or(self.shape);
        Self {
            start: Ptr(self.start.at(batch_idx * self.strides[0])),
            shape,
            strides: self.strides,
        }
    }

    /// All rows, with neighbouring levels merged where possible.
    pub(crate) fn rows(&self) -> RowMap<T> {
        let mut map = RowMap {
            start: self.start,
            n_levels: 0,
            extents: [1; MAX_DIMS],
            strides: [0; MAX_DIMS],
        };
        for dim_idx in (0..self.n_dims() - 1).rev() {
            let (extent, stride) = (self.dim(dim_idx), self.stride(dim_idx));
            if extent == 1 {
                continue;
            }
            match map.n_levels.checked_sub(1) {
                Some(last) if map.strides[last] * map.extents[last] == stride => map.extents[last] *= extent,
                _ => {
                    (map.extents[map.n_levels], map.strides[map.n_levels]) = (extent, stride);
                    map.n_levels += 1;
                }
            }
        }
        map
    }
}

/// Where the rows of a view start: as many levels as its strides need, innermost first.
#[derive(Debug)]
pub(crate) struct RowMap<T> {
    pub(crate) start: Ptr<T>,
    n_levels: usize,
    extents: [usize; MAX_DIMS],
    strides: [usize; MAX_DIMS],
}

impl<T> Clone for RowMap<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for RowMap<T> {}

impl<T> RowMap<T> {
    /// Rows of `stride` elements each, one after another.
    pub(crate) fn dense(start: Ptr<T>, stride: usize) -> Self {
        let mut strides = [0; MAX_DIMS];
        strides[0] = stride;
        Self {
            start,
            n_levels: 1,
            extents: [1; MAX_DIMS],
            strides,
        }
    }

    /// First element of row `row_idx`, which exists.
    #[inline(always)]
    pub(crate) fn row(&self, row_idx: usize) -> *mut T {
        self.start.at(self.offset(row_idx))
    }

    /// Elements between the first row and row `row_idx`, which exists.
    #[inline(always)]
    pub(crate) fn offset(&self, row_idx: usize) -> usize {
        let mut rest = row_idx;
        let mut offset = 0;
        let mut level = 0;
        // The outermost level takes what is left, so the usual single level divides nothing.
        while level + 1 < self.n_levels {
            offset += rest % self.extents[level] * self.strides[level];
            rest /= self.extents[level];
            level += 1;
        }
        offset + rest * self.strides[level]
    }
}

/// The checks of one op of one backend.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands<'a> {
    pub(crate) op: &'static str,
    pub(crate) memory: &'a Memory,
    pub(crate) isa: Isa,
}

impl Operands<'_> {
    /// Where the buffer behind `tensor` starts.
    fn buffer_start(&self, name: &str, tensor: &Tensor) -> Result<*mut u8> {
        let buffer = tensor.buffer().as_any();
        if let Some(buffer) = buffer.downcast_ref::<CpuBuffer>() {
            if buffer.0.memory().is_same(self.memory) {
                return Ok(buffer.0.start());
            }
        } else if let Some(buffer) = buffer.downcast_ref::<WeightBuffer>() {
            return Ok(buffer.start());
        }
        let detail = format!("{name} {tensor:?} does not belong to this backend");
        Err(TensorError::Operand { op: self.op, detail })
    }

    /// A checked input of any dtype, as bytes: `start` is the first byte, strides count elements.
    pub(crate) fn untyped(&self, name: &str, tensor: &Tensor) -> Result<View<u8>> {
        let start = self.buffer_start(name, tensor)?;
        let mut strides = [1; MAX_DIMS];
        strides[..tensor.strides().len()].copy_from_slice(tensor.strides());
        let start = start.wrapping_add(tensor.offset() * tensor.dtype().size_bytes());
        Ok(View {
            start: Ptr(start),
            shape: *tensor.shape(),
            strides,
        })
    }

    /// A checked input.
    pub(crate) fn input<T: Element>(&self, name: &str, tensor: &Tensor) -> Result<View<T>> {
        if tensor.dtype() != T::DTYPE {
            return Err(TensorError::DType {
                op: self.op,
                dtype: tensor.dtype(),
                expected: T::DTYPE.as_str(),
            });
        }
        let view = self.untyped(name, tensor)?;
        Ok(View {
            start: Ptr(view.start.get().cast()),
            shape: view.shape,
            strides: view.strides,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    fn tensor(dims: &[usize]) -> Tensor {
        let region = Memory::default().take("test", 1 << 16).expect("memory");
        Tensor::from_buffer(Rc::new(CpuBuffer(region)), dims, DType::F32).expect("fits")
    }

    #[test]
    fn rows_of_three_levels_are_found() {
        let whole = tensor(&[2, 3, 4, 5]);
        let part = whole
            .narrow(1, 1, 2)
            .and_then(|t| t.narrow(2, 1, 2))
            .and_then(|t| t.narrow(3, 2, 3))
            .expect("inside");
        let buffer = Memory::default();
        let operands = Operands {
            op: "test",
            memory: &buffer,
            isa: Isa::Portable,
        };
        assert!(
            operands.input::<f32>("x", &part).is_err(),
            "memory of another backend"
        );
        let memory = part
            .buffer()
            .as_any()
            .downcast_ref::<CpuBuffer>()
            .expect("ours")
            .0
            .memory()
            .clone();
        let view = Operands {
            op: "test",
            memory: &memory,
            isa: Isa::Portable,
        }
        .input::<f32>("x", &part)
        .expect("ours");
        let rows = view.rows();
        for (row_idx, (b, y, x)) in (0..2)
            .flat_map(|b| (0..2).flat_map(move |y| (0..2).map(move |x| (b, y, x))))
            .enumerate()
        {
            let expected = view.start.at(b * 60 + y * 20 + x * 5);
            assert_eq!(rows.row(row_idx), expected);
        }
    }
}
