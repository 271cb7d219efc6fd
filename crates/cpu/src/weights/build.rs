//! Writes a block from a checkpoint's tensors: checks first, then widens, packs and transforms row by row.
//!
//! R1. Everything is checked before the block exists: all tensors are there and have their shape, and the memory is available.
//! R2. The block is written once, by the process that builds it, and then sealed: no process can write it any more.
//! R3. Tasks write disjoint rows of one weight, and hold a few rows of it besides, never a whole one.

use super::{
    layout::{Entry, Form, HEADER_BYTES, Layout},
    memory_error,
};
use crate::{
    Context, Isa,
    gemm::Panels,
    operand::Ptr,
    simd::{Kernel, Simd, with_isa},
    winograd,
};
use denoised_os::memfd::{FrozenMemory, MemoryBuilder};
use denoised_tensor::{
    Result, SourceDType, SourceTensor, TensorError, WeightKind, WeightSource, WeightSpec, check,
};

/// The finished block.
pub(super) fn build(
    context: &Context<'_>,
    isa: Isa,
    specs: &[WeightSpec],
    layout: &Layout,
    source: &dyn WeightSource,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<FrozenMemory> {
    check::weights::sources(specs, source)?;
    let total_bytes = layout.total_bytes;
    denoised_os::memory_budget::check("the weights", total_bytes as u64).map_err(|error| {
        TensorError::OutOfMemory {
            what: error.what,
            needed_bytes: error.needed_bytes,
            available_bytes: error.available_bytes,
        }
    })?;
    let memory = MemoryBuilder::create("cpu weights", total_bytes);
    let mut memory = memory.map_err(|error| memory_error(error, total_bytes))?;
    let block = Ptr(memory.bytes_mut().as_mut_ptr());
    // SAFETY: the header is shorter than the block.
    unsafe {
        block
            .get()
            .copy_from_nonoverlapping(layout.header.as_ptr(), HEADER_BYTES)
    };
    progress(0, total_bytes as u64);
    for (spec, entry) in specs.iter().zip(&layout.entries) {
        let mut first_row = 0;
        for name in &spec.sources {
            let tensor = source.tensor(name).map_err(|error| refused(name, error.0))?;
            let piece = Piece::new(name, spec, entry, &tensor, first_row)?;
            let to = Ptr(block.at(entry.offset).cast::<f32>());
            context.run(piece.n_tasks(), &|task_idx, _| {
                // SAFETY: the entry's room is as long as its layout says, and tasks write disjoint parts of it (R2, R3).
                with_isa!(isa, S => unsafe { piece.write::<S>(task_idx, to) });
            })?;
            first_row += piece.n_rows;
        }
        progress((entry.offset + entry.len_bytes) as u64, total_bytes as u64);
    }
    memory.freeze().map_err(|error| memory_error(error, total_bytes))
}

fn refused(name: &str, detail: String) -> TensorError {
    TensorError::Weight {
        name: name.to_owned(),
        detail,
    }
}

/// One tensor of a checkpoint on its way into an entry's room: rows `first_row ..` of the entry.
struct Piece<'a> {
    form: Form,
    /// Taps of a convolution, 1 otherwise: a row of the source is ordered `(c, tap)`.
    n_taps: usize,
    dtype: SourceDType,
    bytes: &'a [u8],
    first_row: usize,
    n_rows: usize,
    row_len: usize,
}

impl<'a> Piece<'a> {
    /// Rows of a task: few enough to spread, many enough to fill panels.
    const TASK_ROWS: usize = 32;

    /// Elements of a task where rows do not matter.
    const TASK_ELEMENTS: usize = 64 << 10;

    fn new(
        name: &str,
        spec: &WeightSpec,
        entry: &Entry,
        tensor: &'a SourceTensor<'_>,
        first_row: usize,
    ) -> Result<Self> {
        let n_rows = check::weights::piece(spec, name, tensor, first_row)?;
        let row_len: usize = entry.shape.iter().skip(1).product();
        let n_taps = match entry.kind {
            WeightKind::Conv { .. } => entry.shape[2..].iter().product(),
            WeightKind::Matrix | WeightKind::Vector | WeightKind::Table => 1,
        };
        Ok(Self {
            form: entry.form,
            n_taps,
            dtype: tensor.dtype,
            bytes: &tensor.bytes,
            first_row,
            n_rows,
            row_len,
        })
    }

    fn n_tasks(&self) -> usize {
        match self.form {
            Form::Plain => (self.n_rows * self.row_len).div_ceil(Self::TASK_ELEMENTS),
            Form::Packed { .. } | Form::Winograd { .. } => self.n_rows.div_ceil(Self::TASK_ROWS),
        }
    }

    /// Writes what belongs to a task.
    ///
    /// # Safety
    /// `to` is the entry's room; nobody else writes this task's part; the processor has the instruction set.
    unsafe fn write<S: Simd>(&self, task_idx: usize, to: Ptr<f32>) {
        match self.form {
            Form::Plain => {
                let start = task_idx * Self::TASK_ELEMENTS;
                let n = Self::TASK_ELEMENTS.min(self.n_rows * self.row_len - start);
                let to = to.at(self.first_row * self.row_len + start);
                // SAFETY: the elements lie in the room, which is initialised and which nobody else looks at.
                self.read(start, unsafe { std::slice::from_raw_parts_mut(to, n) });
            }
            // SAFETY: as the caller vouches.
            Form::Packed { n, k } | Form::Winograd { n, k } => unsafe {
                self.write_rows::<S>(task_idx, to, n, k)
            },
        }
    }

    /// Writes the rows of a task, in groups of consecutive columns of a panel.
    ///
    /// # Safety
    /// As [`Piece::write`].
    unsafe fn write_rows<S: Simd>(&self, task_idx: usize, to: Ptr<f32>, n_cols: usize, k: usize) {
        let end = ((task_idx + 1) * Self::TASK_ROWS).min(self.n_rows);
        let mut rows = vec![0.0; S::LANES.min(self.n_rows) * self.row_len];
        let mut row_idx = task_idx * Self::TASK_ROWS;
        while row_idx < end {
            let entry_row = self.first_row + row_idx;
            let n = (S::LANES - entry_row % S::LANES).min(end - row_idx);
            self.read(row_idx * self.row_len, &mut rows[..n * self.row_len]);
            let (to, step) = column::<S>(to, n_cols, k, entry_row);
            let rows = &rows[..n * self.row_len];
            if matches!(self.form, Form::Winograd { .. }) {
                let matrix_len = Panels::n_elements(n_cols, k, S::NR, S::LANES);
                let group = TransformGroup {
                    rows,
                    n,
                    k,
                    to,
                    step,
                    matrix_len,
                };
                // SAFETY: `n` columns from `entry_row` on lie in one panel of each of the 36 matrices; the set is there.
                unsafe { S::vectorize(group) };
            } else {
                let group = PackGroup {
                    rows,
                    n,
                    k,
                    n_taps: self.n_taps,
                    to,
                    step,
                };
                // SAFETY: `n` columns from `entry_row` on lie in one panel of the room; the set is there.
                unsafe { S::vectorize(group) };
            }
            row_idx += n;
        }
    }

    /// Elements from `start` on as f32.
    fn read(&self, start: usize, out: &mut [f32]) {
        let size = self.dtype.size_bytes();
        let bytes = &self.bytes[start * size..][..out.len() * size];
        match self.dtype {
            SourceDType::F64 => widen(bytes, out, |bytes| f64::from_le_bytes(bytes) as f32),
            SourceDType::F32 => widen(bytes, out, f32::from_le_bytes),
            SourceDType::F16 => widen(bytes, out, |bytes| half::f16::from_le_bytes(bytes).to_f32()),
            SourceDType::BF16 => widen(bytes, out, |bytes| half::bf16::from_le_bytes(bytes).to_f32()),
        }
    }
}

fn widen<const N: usize>(bytes: &[u8], out: &mut [f32], to_f32: impl Fn([u8; N]) -> f32) {
    for (value, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *value = to_f32(*bytes);
    }
}

/// Writes `n` rows of `n_taps * c_in` elements, ordered `(c, tap)`, as consecutive columns of a panel, ordered `(tap, c)`.
#[derive(Clone, Copy)]
struct PackGroup<'a> {
    rows: &'a [f32],
    n: usize,
    k: usize,
    n_taps: usize,
    to: *mut f32,
    step: usize,
}

impl Kernel for PackGroup<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self {
            rows,
            n,
            k,
            n_taps,
            to,
            step,
        } = self;
        let mut done = 0;
        if n == S::LANES && n_taps == 1 {
            let mut starts = [rows.as_ptr(); 16];
            for lane in 0..S::LANES {
                starts[lane] = rows.as_ptr().wrapping_add(lane * k);
            }
            while done + S::LANES <= k {
                // SAFETY: whole rows of whole vectors, and a panel is at least one vector wide.
                unsafe { S::transpose(starts.as_ptr(), S::LANES, done, to.add(done * step), step) };
                done += S::LANES;
            }
        }
        let c_in = k / n_taps;
        for depth_idx in done..k {
            let source_idx = depth_idx % c_in * n_taps + depth_idx / c_in;
            for lane in 0..n {
                // SAFETY: the caller vouches for the columns.
                unsafe { *to.add(depth_idx * step + lane) = rows[lane * k + source_idx] };
            }
        }
    }
}

/// Writes `n` rows of `k` 3x3 kernels as consecutive columns of 36 matrices.
#[derive(Clone, Copy)]
struct TransformGroup<'a> {
    rows: &'a [f32],
    n: usize,
    k: usize,
    to: *mut f32,
    step: usize,
    matrix_len: usize,
}

impl Kernel for TransformGroup<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self {
            rows,
            n,
            k,
            to,
            step,
            matrix_len,
        } = self;
        for channel in 0..k {
            let mut taps = [[0.0; winograd::GROUP]; 9];
            for lane in 0..n {
                let kernel = &rows[(lane * k + channel) * 9..][..9];
                for tap in 0..9 {
                    taps[tap][lane] = f64::from(kernel[tap]);
                }
            }
            let positions = winograd::transform_kernels(&taps);
            for (position, values) in positions.iter().enumerate() {
                let to = to.wrapping_add(position * matrix_len + channel * step);
                // SAFETY: the caller vouches for `n` columns, at most as many as the group.
                unsafe { to.copy_from_nonoverlapping(values.as_ptr(), n) };
            }
        }
    }
}

/// First element of column `col_idx` of packed weights, and the distance to the next deeper one.
fn column<S: Simd>(start: Ptr<f32>, n: usize, k: usize, col_idx: usize) -> (*mut f32, usize) {
    let panel_idx = col_idx / S::NR;
    let width = Panels::width(n, panel_idx, S::NR, S::LANES);
    (start.at(panel_idx * k * S::NR + col_idx % S::NR), width)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CpuBackend, CpuOptions};
    use denoised_tensor::{Backend, Precision, PrepareInput, SourceError};

    /// Announces 6 rows of 4, and then hands out something else.
    #[derive(Debug)]
    struct Fickle {
        shape: Vec<usize>,
        n_bytes: usize,
    }

    impl WeightSource for Fickle {
        fn layout(&self, _: &str) -> Result<(SourceDType, Vec<usize>), SourceError> {
            Ok((SourceDType::F16, vec![6, 4]))
        }

        fn tensor(&self, _: &str) -> Result<SourceTensor<'_>, SourceError> {
            Ok(SourceTensor {
                dtype: SourceDType::F16,
                shape: self.shape.clone(),
                bytes: vec![0; self.n_bytes].into(),
            })
        }
    }

    #[test]
    fn a_source_that_hands_out_something_else_than_it_announced_is_refused() {
        let backend = CpuBackend::new(CpuOptions::default()).expect("a backend");
        for kind in [WeightKind::Matrix, WeightKind::Vector, WeightKind::Table] {
            let spec = WeightSpec {
                sources: vec!["w".to_owned()],
                kind,
                shape: vec![6, 4],
                precision: Precision::Device,
            };
            let outcome = |shape: &[usize], n_bytes: usize| {
                let source = Fickle {
                    shape: shape.to_vec(),
                    n_bytes,
                };
                backend.prepare(
                    std::slice::from_ref(&spec),
                    PrepareInput::Build(&source),
                    &mut |_, _| {},
                )
            };
            assert!(outcome(&[6, 4], 48).is_ok());
            for (shape, n_bytes) in [
                (&[6, 4][..], 46),
                (&[6, 4], 0),
                (&[6, 4], 96),
                (&[7, 4], 56),
                (&[4, 6], 48),
                (&[24], 48),
                (&[], 2),
                (&[usize::MAX, 4], 8),
            ] {
                let error = outcome(shape, n_bytes).expect_err("something else");
                assert!(matches!(error, TensorError::Weight { .. }), "{shape:?}: {error}");
            }
        }
    }
}
