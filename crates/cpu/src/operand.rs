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

/// Refuses what an op cannot take.
pub(crate) fn shape_error<T>(op: &'static str, detail: String) -> Result<T> {
    Err(TensorError::Shape { op, detail })
}

/// Refuses unless `is_true`.
pub(crate) fn ensure(op: &'static str, is_true: bool, detail: impl FnOnce() -> String) -> Result<()> {
    if is_true {
        Ok(())
    } else {
        shape_error(op, detail())
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

    /// Checks that `out` may be written while `inputs` are read; those marked `true` may be the very same view.
    pub(crate) fn writable(&self, out: &Tensor, inputs: &[(&str, &Tensor, bool)]) -> Result<()> {
        let refuse = |detail| Err(TensorError::Alias { op: self.op, detail });
        if !out.buffer().is_writable() {
            return refuse(format!("out {out:?} is read-only"));
        }
        for (name, input, may_be_same) in inputs {
            if overlaps(out, input) && !(*may_be_same && is_same_view(out, input)) {
                return refuse(format!("out {out:?} overlaps {name} {input:?}"));
            }
        }
        Ok(())
    }

    /// A checked output; see [`Operands::writable`].
    pub(crate) fn output<T: Element>(
        &self,
        out: &Tensor,
        inputs: &[(&str, &Tensor, bool)],
    ) -> Result<View<T>> {
        let view = self.input("out", out)?;
        self.writable(out, inputs)?;
        Ok(view)
    }

    /// Refuses unless `dims` are as expected.
    pub(crate) fn same_dims(&self, name: &str, dims: &[usize], expected: &[usize]) -> Result<()> {
        ensure(self.op, dims == expected, || {
            format!("{name} is {dims:?}, expected {expected:?}")
        })
    }
}

fn is_same_view(a: &Tensor, b: &Tensor) -> bool {
    let strides_count = |dim_idx: &usize| a.dim(*dim_idx) > 1;
    std::ptr::addr_eq(std::rc::Rc::as_ptr(a.buffer()), std::rc::Rc::as_ptr(b.buffer()))
        && (a.dtype(), a.offset(), a.dims()) == (b.dtype(), b.offset(), b.dims())
        && (0..a.dims().len())
            .filter(strides_count)
            .all(|dim_idx| a.strides()[dim_idx] == b.strides()[dim_idx])
}

/// Whether two views share a byte. Exact: in the doubtful case the rows of both are walked.
fn overlaps(a: &Tensor, b: &Tensor) -> bool {
    if !std::ptr::addr_eq(std::rc::Rc::as_ptr(a.buffer()), std::rc::Rc::as_ptr(b.buffer())) {
        return false;
    }
    let (a, b) = (Pieces::of(a), Pieces::of(b));
    if a.first >= b.end() || b.first >= a.end() {
        return false;
    }
    if a.lie_beside(&b) {
        return false;
    }
    // Both lists ascend, because views come from dense tensors by narrowing and reshaping only.
    let (mut a_idx, mut b_idx) = (0, 0);
    while a_idx < a.n_pieces() && b_idx < b.n_pieces() {
        let (a_start, b_start) = (a.start(a_idx), b.start(b_idx));
        if a_start + a.piece_bytes <= b_start {
            a_idx += 1;
        } else if b_start + b.piece_bytes <= a_start {
            b_idx += 1;
        } else {
            return true;
        }
    }
    false
}

/// A view as equally long pieces of consecutive bytes.
struct Pieces {
    first: usize,
    piece_bytes: usize,
    /// Innermost first: (extent, stride in bytes).
    levels: Vec<(usize, usize)>,
}

impl Pieces {
    fn of(tensor: &Tensor) -> Self {
        let element_bytes = tensor.dtype().size_bytes();
        let mut piece_bytes = element_bytes;
        let mut levels: Vec<(usize, usize)> = Vec::new();
        for (&extent, &stride) in tensor.dims().iter().zip(tensor.strides()).rev() {
            let stride_bytes = stride * element_bytes;
            match levels.last_mut() {
                _ if extent == 1 => {}
                None if stride_bytes == piece_bytes => piece_bytes *= extent,
                Some(level) if level.0 * level.1 == stride_bytes => level.0 *= extent,
                _ => levels.push((extent, stride_bytes)),
            }
        }
        Self {
            first: tensor.offset() * element_bytes,
            piece_bytes,
            levels,
        }
    }

    fn n_pieces(&self) -> usize {
        self.levels.iter().map(|level| level.0).product()
    }

    fn start(&self, piece_idx: usize) -> usize {
        let mut rest = piece_idx;
        let mut start = self.first;
        for (extent, stride) in &self.levels {
            start += rest % extent * stride;
            rest /= extent;
        }
        start
    }

    fn end(&self) -> usize {
        self.first
            + self
                .levels
                .iter()
                .map(|(extent, stride)| (extent - 1) * stride)
                .sum::<usize>()
            + self.piece_bytes
    }

    /// Whether both are columns of rows of one pitch, and no column is shared.
    fn lie_beside(&self, other: &Self) -> bool {
        let strides = self.levels.iter().chain(&other.levels).map(|level| level.1);
        let pitch = strides.fold(0, greatest_common_divisor);
        if pitch == 0 {
            return false;
        }
        let (a, b) = (self.first % pitch, other.first % pitch);
        let (a_end, b_end) = (a + self.piece_bytes, b + other.piece_bytes);
        a_end <= pitch && b_end <= pitch && (a_end <= b || b_end <= a)
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
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
    fn slices_beside_each_other_do_not_overlap() {
        let whole = tensor(&[3, 9, 12]);
        let column = |start, len| whole.narrow(2, start, len).expect("inside");
        let token = |start, len| whole.narrow(1, start, len).expect("inside");
        assert!(!overlaps(&column(0, 4), &column(4, 8)));
        assert!(overlaps(&column(0, 5), &column(4, 8)));
        assert!(!overlaps(&token(0, 6), &token(6, 3)));
        assert!(overlaps(&token(0, 7), &token(6, 3)));
        let corner = token(0, 6).narrow(2, 0, 5).expect("inside");
        assert!(!overlaps(&corner, &token(6, 3)));
        assert!(!overlaps(&corner, &column(5, 7)));
        assert!(overlaps(&corner, &column(4, 1)));
        assert!(overlaps(&whole, &whole.narrow(0, 2, 1).expect("inside")));
        assert!(!overlaps(&whole, &tensor(&[3, 9, 12])));
    }

    #[test]
    fn the_same_view_is_recognised_through_reshapes() {
        let whole = tensor(&[1, 6, 4]);
        assert!(is_same_view(&whole, &whole.reshape(&[1, 6, 4]).expect("same")));
        assert!(!is_same_view(
            &whole,
            &whole.reshape(&[6, 4]).expect("same elements")
        ));
        assert!(!is_same_view(&whole, &whole.narrow(1, 0, 5).expect("inside")));
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
