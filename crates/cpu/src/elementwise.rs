//! Element-wise ops: operands with numpy's broadcasting, cut into runs of consecutive elements.
//!
//! R1. An op is a [`RunOp`]: what happens to a run of elements of which each operand lies densely or is one element repeated.
//! R2. Elements do not meet, so any cut into runs gives the same result.
#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the `# Safety` sections state what the pointers are valid for, once per function"
)]

use crate::{
    Context,
    gemm::{load_up_to, store_up_to},
    operand::{Ptr, RowMap, View},
    simd::{ActivationFn, Kernel, Simd, with_activation},
};
use denoised_tensor::{Activation, GateOrder, MAX_DIMS, Result};

/// Elements that a task should at least have, and the longest run.
const TASK_ELEMENTS: usize = 16 << 10;

/// An op on `N` operands, the output first.
pub(crate) trait RunOp<const N: usize>: Copy + Sync {
    /// Handles `n` elements of a run.
    ///
    /// # Safety
    /// Inside a kernel of `S`. `run[0]` is dense and valid for `n` writes; the others are valid for `n` reads if dense, for one otherwise.
    unsafe fn apply<S: Simd>(self, run: [Part; N], n: usize);
}

/// An operand of a run.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    start: *mut f32,
    is_dense: bool,
}

impl Part {
    /// Elements `i .. i + n`, for `n <= LANES`.
    #[inline(always)]
    unsafe fn load<S: Simd>(self, i: usize, n: usize) -> S::V {
        if self.is_dense {
            load_up_to::<S>(self.start.add(i), n)
        } else {
            S::splat(*self.start)
        }
    }
}

/// Operands as nested loops over runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loops<const N: usize> {
    starts: [Ptr<f32>; N],
    /// Outer loops, innermost first: extent, and the stride of each operand.
    n_levels: usize,
    extents: [usize; MAX_DIMS],
    strides: [[usize; N]; MAX_DIMS],
    /// The innermost loop: elements of a run, and whether each operand is dense in it.
    run_len: usize,
    is_dense: [bool; N],
}

impl<const N: usize> Loops<N> {
    /// Loops over the first operand; the others broadcast to its shape.
    pub(crate) fn new(operands: [&View<f32>; N]) -> Self {
        let shape = operands[0].shape;
        let n_dims = shape.n_dims();
        let mut strides = [[0; N]; MAX_DIMS];
        for (operand_idx, operand) in operands.iter().enumerate() {
            // At most as many as the first has: the operands were checked.
            let n_missing = n_dims.saturating_sub(operand.n_dims());
            for dim_idx in n_missing..n_dims {
                if operand.dim(dim_idx - n_missing) > 1 {
                    strides[dim_idx][operand_idx] = operand.stride(dim_idx - n_missing);
                }
            }
        }
        // A row of one element is dense everywhere.
        let innermost = strides[n_dims - 1].map(|stride| usize::from(stride > 0 || shape.last() == 1));
        let mut loops = Self {
            starts: operands.map(|operand| operand.start),
            n_levels: 0,
            extents: [1; MAX_DIMS],
            strides: [[0; N]; MAX_DIMS],
            run_len: shape.last(),
            is_dense: innermost.map(|step| step == 1),
        };
        let (mut extent, mut step) = (shape.last(), innermost);
        for dim_idx in (0..n_dims - 1).rev() {
            if shape[dim_idx] == 1 {
                continue;
            }
            let merges = (0..N).all(|i| step[i] * extent == strides[dim_idx][i]);
            if merges {
                extent *= shape[dim_idx];
                match loops.n_levels.checked_sub(1) {
                    Some(level) => loops.extents[level] = extent,
                    None => loops.run_len = extent,
                }
                continue;
            }
            (extent, step) = (shape[dim_idx], strides[dim_idx]);
            (loops.extents[loops.n_levels], loops.strides[loops.n_levels]) = (extent, step);
            loops.n_levels += 1;
        }
        loops
    }

    /// Runs `op` over everything.
    ///
    /// # Safety
    /// The operands are checked; the first is writable and overlaps another only if they are the same view.
    pub(crate) unsafe fn run<S: Simd, O: RunOp<N>>(&self, context: &Context<'_>, op: O) -> Result<()> {
        let n_runs: usize = self.extents[..self.n_levels].iter().product();
        // Long runs are cut, short ones are bundled.
        let n_cuts = self.run_len.div_ceil(TASK_ELEMENTS);
        let cut_len = self.run_len.div_ceil(n_cuts).next_multiple_of(16);
        let pieces_per_task = (TASK_ELEMENTS / cut_len).max(1);
        let n_pieces = n_runs * n_cuts;
        context.run(n_pieces.div_ceil(pieces_per_task), &|task_idx, _| {
            let start = task_idx * pieces_per_task;
            let pieces = (start, (start + pieces_per_task).min(n_pieces));
            let task = Pieces {
                loops: *self,
                op,
                pieces,
                n_cuts,
                cut_len,
            };
            // SAFETY: the caller vouches for the operands; pieces are disjoint in the output.
            unsafe { S::vectorize(task) };
        })
    }
}

#[derive(Clone, Copy)]
struct Pieces<const N: usize, O> {
    loops: Loops<N>,
    op: O,
    pieces: (usize, usize),
    n_cuts: usize,
    cut_len: usize,
}

impl<const N: usize, O: RunOp<N>> Kernel for Pieces<N, O> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let loops = &self.loops;
        for piece_idx in self.pieces.0..self.pieces.1 {
            let (mut rest, cut_idx) = (piece_idx / self.n_cuts, piece_idx % self.n_cuts);
            let first = cut_idx * self.cut_len;
            if first >= loops.run_len {
                continue;
            }
            let mut offsets = [0; N];
            for level in 0..loops.n_levels {
                let i = rest % loops.extents[level];
                rest /= loops.extents[level];
                for operand_idx in 0..N {
                    offsets[operand_idx] += i * loops.strides[level][operand_idx];
                }
            }
            let mut run = [Part {
                start: std::ptr::null_mut(),
                is_dense: true,
            }; N];
            for operand_idx in 0..N {
                let is_dense = loops.is_dense[operand_idx];
                let offset = offsets[operand_idx] + if is_dense { first } else { 0 };
                run[operand_idx] = Part {
                    start: loops.starts[operand_idx].at(offset),
                    is_dense,
                };
            }
            self.op.apply::<S>(run, self.cut_len.min(loops.run_len - first));
        }
    }
}

/// A [`RunOp`] that computes each vector of the output from the same vectors of the inputs.
macro_rules! run_op {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* } ($($input:ident),*) |$self:ident, $simd:ident| $value:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $name { $(pub(crate) $field: $type),* }

        impl RunOp<{ 1 $(+ { let _ = stringify!($input); 1 })* }> for $name {
            #[inline(always)]
            unsafe fn apply<$simd: Simd>($self, run: [Part; 1 $(+ { let _ = stringify!($input); 1 })*], n: usize) {
                let [out, $($input),*] = run;
                let mut i = 0;
                while i < n {
                    let len = (n - i).min($simd::LANES);
                    $(let $input = $input.load::<$simd>(i, len);)*
                    store_up_to::<$simd>(out.start.add(i), $value, len);
                    i += $simd::LANES;
                }
            }
        }
    };
}

run_op! {
    /// `a + b`
    Add {} (a, b) |self, S| S::add(a, b)
}
run_op! {
    /// `a * b`
    Multiply {} (a, b) |self, S| S::mul(a, b)
}
run_op! {
    /// `residual + gate * x`
    GatedAdd {} (residual, gate, x) |self, S| S::mul_add(gate, x, residual)
}
run_op! {
    /// `x * scale + shift`
    Affine { scale: f32, shift: f32 } (x) |self, S| S::mul_add(x, S::splat(self.scale), S::splat(self.shift))
}
run_op! {
    /// `value`
    Fill { value: f32 } () |self, S| S::splat(self.value)
}
run_op! {
    /// `x`
    CopyElements {} (x) |self, S| x
}
run_op! {
    /// `unconditional + guidance * (conditional - unconditional)`
    Guide { guidance: f32 } (conditional, unconditional) |self, S|
        S::mul_add(S::splat(self.guidance), S::sub(conditional, unconditional), unconditional)
}
run_op! {
    /// `clamp(x / 2 + 0.5, 0, 1)`; NaN stays.
    ToUnit {} (x) |self, S|
        S::max(S::splat(0.0), S::min(S::splat(1.0), S::mul_add(x, S::splat(0.5), S::splat(0.5))))
}

/// `activation(x)`
#[derive(Clone, Copy, Debug)]
pub(crate) struct Activate(pub(crate) Activation);

impl RunOp<2> for Activate {
    #[inline(always)]
    unsafe fn apply<S: Simd>(self, run: [Part; 2], n: usize) {
        let [out, x] = run;
        with_activation!(self.0, A => {
            let mut i = 0;
            while i < n {
                let len = (n - i).min(S::LANES);
                store_up_to::<S>(out.start.add(i), A::apply::<S>(x.load::<S>(i, len)), len);
                i += S::LANES;
            }
        });
    }
}

/// A gated unit of two halves, in their order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gated(pub(crate) Activation, pub(crate) GateOrder);

impl RunOp<3> for Gated {
    #[inline(always)]
    unsafe fn apply<S: Simd>(self, run: [Part; 3], n: usize) {
        let [out, first, second] = run;
        let (plain, activated) = match self.1 {
            GateOrder::SecondActivated => (first, second),
            GateOrder::FirstActivated => (second, first),
        };
        with_activation!(self.0, A => {
            let mut i = 0;
            while i < n {
                let len = (n - i).min(S::LANES);
                let value = S::mul(plain.load::<S>(i, len), A::apply::<S>(activated.load::<S>(i, len)));
                store_up_to::<S>(out.start.add(i), value, len);
                i += S::LANES;
            }
        });
    }
}

/// Guidance and sampler update of one batch element. Operands: output, latents, conditional, unconditional, noise; what is not used
/// is any readable operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    /// Factors of latents, guided prediction and noise.
    pub(crate) factors: [f32; 3],
    /// Without it the conditional prediction is taken as it is.
    pub(crate) guidance: Option<f32>,
    pub(crate) has_noise: bool,
}

impl RunOp<5> for Step {
    #[inline(always)]
    unsafe fn apply<S: Simd>(self, run: [Part; 5], n: usize) {
        let [out, latents, conditional, unconditional, noise] = run;
        let [of_latents, of_prediction, of_noise] = self.factors;
        let mut i = 0;
        while i < n {
            let len = (n - i).min(S::LANES);
            let mut guided = conditional.load::<S>(i, len);
            if let Some(guidance) = self.guidance {
                let unconditional = unconditional.load::<S>(i, len);
                guided = S::mul_add(S::splat(guidance), S::sub(guided, unconditional), unconditional);
            }
            let mut value = S::mul(S::splat(of_latents), latents.load::<S>(i, len));
            value = S::mul_add(S::splat(of_prediction), guided, value);
            if self.has_noise {
                value = S::mul_add(S::splat(of_noise), noise.load::<S>(i, len), value);
            }
            store_up_to::<S>(out.start.add(i), value, len);
            i += S::LANES;
        }
    }
}

/// `round_half_even(255 clamp(x / 2 + 0.5, 0, 1))` of rows.
///
/// # Safety
/// Both have `n_rows` rows of `n_cols`; `out` is writable.
pub(crate) unsafe fn to_bytes<S: Simd>(
    context: &Context<'_>,
    x: RowMap<f32>,
    out: RowMap<u8>,
    n_rows: usize,
    n_cols: usize,
) -> Result<()> {
    crate::norm::by_rows(context, n_rows, n_cols, &|range| {
        // SAFETY: the caller vouches for the operands; tasks have disjoint rows.
        unsafe {
            S::vectorize(ByteRows {
                x,
                out,
                range,
                n_cols,
            })
        };
    })
}

#[derive(Clone, Copy)]
struct ByteRows {
    x: RowMap<f32>,
    out: RowMap<u8>,
    range: (usize, usize),
    n_cols: usize,
}

impl Kernel for ByteRows {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for row_idx in self.range.0..self.range.1 {
            let (x, out) = (self.x.row(row_idx), self.out.row(row_idx));
            for i in 0..self.n_cols {
                let unit = (*x.add(i) * 0.5 + 0.5).clamp(0.0, 1.0);
                *out.add(i) = (unit * 255.0).round_ties_even() as u8;
            }
        }
    }
}

/// Whether all elements of a view are finite.
///
/// # Safety
/// The view is checked.
pub(crate) unsafe fn all_finite<S: Simd>(context: &Context<'_>, x: &View<f32>) -> Result<bool> {
    let rows = x.rows();
    let n_cols = x.n_cols();
    let found = std::sync::atomic::AtomicBool::new(false);
    crate::norm::by_rows(context, x.shape.n_elements() / n_cols, n_cols, &|range| {
        let task = FiniteRows { rows, range, n_cols };
        // SAFETY: the caller vouches for the view.
        if !unsafe { S::vectorize(task) } {
            found.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    })?;
    Ok(!found.into_inner())
}

#[derive(Clone, Copy)]
struct FiniteRows {
    rows: RowMap<f32>,
    range: (usize, usize),
    n_cols: usize,
}

impl Kernel for FiniteRows {
    type Output = bool;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> bool {
        let mut sum = S::splat(0.0);
        for row_idx in self.range.0..self.range.1 {
            let row = self.rows.row(row_idx).cast_const();
            let mut i = 0;
            while i < self.n_cols {
                let x = load_up_to::<S>(row.add(i), (self.n_cols - i).min(S::LANES));
                // Zero for finite elements, NaN for all others.
                sum = S::mul_add(x, S::splat(0.0), sum);
                i += S::LANES;
            }
        }
        S::sum(sum) == 0.0
    }
}
