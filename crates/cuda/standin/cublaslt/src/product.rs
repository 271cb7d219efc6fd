//! The arithmetic.

use half::{bf16, f16};

/// `cudaDataType` numbers.
pub(crate) const F32: i32 = 0;
pub(crate) const F16: i32 = 2;
pub(crate) const BF16: i32 = 14;

/// A matrix of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    pub(crate) data_type: i32,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Elements between columns.
    pub(crate) leading: usize,
    pub(crate) n_batch: usize,
    /// Elements between the matrices of a batch.
    pub(crate) batch_stride: usize,
}

/// What is done beside the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Desc {
    pub(crate) is_a_transposed: bool,
    pub(crate) is_b_transposed: bool,
    pub(crate) has_bias: bool,
    pub(crate) bias: usize,
    pub(crate) bias_type: i32,
}

/// A product with its operands: `out = alpha op(a) op(b) + beta c + bias`.
pub(crate) struct Product {
    pub(crate) desc: Desc,
    pub(crate) a: (usize, Layout),
    pub(crate) b: (usize, Layout),
    pub(crate) c: (usize, Layout),
    pub(crate) out: (usize, Layout),
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
}

/// # Safety
/// `start` is an array with that element.
unsafe fn get(start: usize, idx: usize, data_type: i32) -> f32 {
    unsafe {
        match data_type {
            F32 => *(start as *const f32).add(idx),
            F16 => (*(start as *const f16).add(idx)).to_f32(),
            _ => (*(start as *const bf16).add(idx)).to_f32(),
        }
    }
}

/// # Safety
/// As [`get`].
unsafe fn put(start: usize, idx: usize, data_type: i32, value: f32) {
    unsafe {
        match data_type {
            F32 => *(start as *mut f32).add(idx) = value,
            F16 => *(start as *mut f16).add(idx) = f16::from_f32(value),
            _ => *(start as *mut bf16).add(idx) = bf16::from_f32(value),
        }
    }
}

/// Row-major `[n, k]` of the vectors along which the product sums.
///
/// # Safety
/// The matrix is there.
unsafe fn vectors((start, layout): (usize, Layout), batch: usize, are_columns: bool) -> Vec<f32> {
    let (n, k) = if are_columns { (layout.cols, layout.rows) } else { (layout.rows, layout.cols) };
    let base = batch * layout.batch_stride;
    let mut all = Vec::with_capacity(n * k);
    for i in 0..n {
        for j in 0..k {
            let (row, col) = if are_columns { (j, i) } else { (i, j) };
            all.push(unsafe { get(start, base + col * layout.leading + row, layout.data_type) });
        }
    }
    all
}

/// Sums in eight chains, which a compiler puts into one vector.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut chains = [0.0f32; 16];
    let (mut a_parts, mut b_parts) = (a.chunks_exact(16), b.chunks_exact(16));
    for (a, b) in (&mut a_parts).zip(&mut b_parts) {
        for i in 0..16 {
            chains[i] += a[i] * b[i];
        }
    }
    let rest: f32 = a_parts.remainder().iter().zip(b_parts.remainder()).map(|(a, b)| a * b).sum();
    chains.iter().sum::<f32>() + rest
}

impl Product {
    /// Carries it out.
    ///
    /// # Safety
    /// All operands are there and as their layouts say.
    pub(crate) unsafe fn run(&self) {
        let (out_start, out) = self.out;
        let (m, n) = (out.rows, out.cols);
        let mut a = Vec::new();
        for batch in 0..out.n_batch {
            // Weights are the same for a whole batch.
            if batch == 0 || self.a.1.batch_stride != 0 {
                a = unsafe { vectors(self.a, batch, self.desc.is_a_transposed) };
            }
            let b = unsafe { vectors(self.b, batch, !self.desc.is_b_transposed) };
            let k = a.len() / m.max(1);
            for col in 0..n {
                for row in 0..m {
                    let mut value = self.alpha * dot(&a[row * k..][..k], &b[col * k..][..k]);
                    unsafe {
                        if self.beta != 0.0 {
                            let (start, c) = self.c;
                            value += self.beta * get(start, batch * c.batch_stride + col * c.leading + row, c.data_type);
                        }
                        if self.desc.has_bias {
                            value += get(self.desc.bias, row, self.desc.bias_type);
                        }
                        put(out_start, batch * out.batch_stride + col * out.leading + row, out.data_type, value);
                    }
                }
            }
        }
    }
}
