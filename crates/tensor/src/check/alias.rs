//! Which views share memory.

use crate::{MAX_DIMS, Result, Tensor, TensorError};

/// Checks that `out` may be written while `inputs` are read; those marked `true` may be the very same view.
///
/// # Errors
/// [`TensorError::Alias`].
pub fn writable(op: &'static str, out: &Tensor, inputs: &[(&str, &Tensor, bool)]) -> Result<()> {
    let refuse = |detail| Err(TensorError::Alias { op, detail });
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
    /// Innermost first: (extent, stride in bytes), `n_levels` of them.
    levels: [(usize, usize); MAX_DIMS],
    n_levels: usize,
}

impl Pieces {
    fn of(tensor: &Tensor) -> Self {
        let element_bytes = tensor.dtype().size_bytes();
        let mut piece_bytes = element_bytes;
        let mut levels = [(1, 0); MAX_DIMS];
        let mut n_levels = 0;
        for (&extent, &stride) in tensor.dims().iter().zip(tensor.strides()).rev() {
            let stride_bytes = stride * element_bytes;
            match levels[..n_levels].last_mut() {
                _ if extent == 1 => {}
                None if stride_bytes == piece_bytes => piece_bytes *= extent,
                Some(level) if level.0 * level.1 == stride_bytes => level.0 *= extent,
                _ => {
                    levels[n_levels] = (extent, stride_bytes);
                    n_levels += 1;
                }
            }
        }
        Self {
            first: tensor.offset() * element_bytes,
            piece_bytes,
            levels,
            n_levels,
        }
    }

    fn levels(&self) -> &[(usize, usize)] {
        &self.levels[..self.n_levels]
    }

    fn n_pieces(&self) -> usize {
        self.levels().iter().map(|level| level.0).product()
    }

    fn start(&self, piece_idx: usize) -> usize {
        let mut rest = piece_idx;
        let mut start = self.first;
        for (extent, stride) in self.levels() {
            start += rest % extent * stride;
            rest /= extent;
        }
        start
    }

    fn end(&self) -> usize {
        self.first
            + self
                .levels()
                .iter()
                .map(|(extent, stride)| (extent - 1) * stride)
                .sum::<usize>()
            + self.piece_bytes
    }

    /// Whether both are columns of rows of one pitch, and no column is shared.
    fn lie_beside(&self, other: &Self) -> bool {
        let strides = self.levels().iter().chain(other.levels()).map(|level| level.1);
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
    use crate::{Buffer, DType};
    use std::{any::Any, rc::Rc};

    #[derive(Debug)]
    struct Bytes;

    impl Buffer for Bytes {
        fn as_any(&self) -> &dyn Any {
            self
        }
        fn len_bytes(&self) -> usize {
            1 << 16
        }
        fn is_writable(&self) -> bool {
            true
        }
    }

    fn tensor(dims: &[usize]) -> Tensor {
        Tensor::from_buffer(Rc::new(Bytes), dims, DType::F32).expect("fits")
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
}
