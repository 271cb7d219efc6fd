//! Layer norm, RMS norm and group norm, each with what follows it fused in, and norms taken over from other rows.
//!
//! R1. Sums run in an order that the length of a row (layer, RMS) or the shape of a batch element (group) determines, never the
//!     threads: group norm takes fixed blocks of rows and adds their statistics in order, in f64.
//! R2. Variances are sums of squared distances from a mean, not differences of squares: a large mean costs no digits.
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
use denoised_tensor::{Activation, Result};

/// Elements that a task of rows should at least have.
const TASK_ELEMENTS: usize = 16 << 10;

/// `sum_i x_i`, or `sum_i (x_i - centre)^2`.
///
/// # Safety
/// Inside a kernel of `S`; valid for `n` reads.
#[inline(always)]
unsafe fn sum<S: Simd, const SQUARED: bool>(x: *const f32, n: usize, centre: f32) -> f32 {
    let mut sums = [S::splat(0.0); 4];
    let mut i = 0;
    while i + 4 * S::LANES <= n {
        for j in 0..4 {
            sums[j] = accumulate::<S, SQUARED>(sums[j], S::load(x.add(i + j * S::LANES)), S::splat(centre));
        }
        i += 4 * S::LANES;
    }
    while i + S::LANES <= n {
        sums[0] = accumulate::<S, SQUARED>(sums[0], S::load(x.add(i)), S::splat(centre));
        i += S::LANES;
    }
    if i < n {
        // The lanes behind the end are at the centre, so they add nothing.
        let centres = [centre; 16];
        let centre = S::load_first(centres.as_ptr(), n - i);
        sums[1] = accumulate::<S, SQUARED>(sums[1], S::load_first(x.add(i), n - i), centre);
    }
    S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
}

#[inline(always)]
unsafe fn accumulate<S: Simd, const SQUARED: bool>(sum: S::V, x: S::V, centre: S::V) -> S::V {
    if SQUARED {
        let distance = S::sub(x, centre);
        S::mul_add(distance, distance, sum)
    } else {
        S::add(sum, x)
    }
}

/// Operands of a layer norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerNorm {
    pub(crate) x: RowMap<f32>,
    pub(crate) out: RowMap<f32>,
    pub(crate) n_cols: usize,
    pub(crate) eps: f32,
    pub(crate) weight: Option<Ptr<f32>>,
    pub(crate) bias: Option<Ptr<f32>>,
    /// Scale and shift: first row and distance of rows (0 for one row for all).
    pub(crate) modulation: Option<[(Ptr<f32>, usize); 2]>,
    pub(crate) rows_per_batch: usize,
}

#[derive(Clone, Copy)]
struct LayerNormRows {
    norm: LayerNorm,
    rows: (usize, usize),
}

impl Kernel for LayerNormRows {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { norm, rows } = self;
        let n = norm.n_cols;
        for row_idx in rows.0..rows.1 {
            let (x, out) = (norm.x.row(row_idx).cast_const(), norm.out.row(row_idx));
            let mean = sum::<S, false>(x, n, 0.0) / n as f32;
            let variance = sum::<S, true>(x, n, mean) / n as f32;
            let (mean, inverse) = (S::splat(mean), S::splat(1.0 / (variance + norm.eps).sqrt()));
            let batch_idx = row_idx / norm.rows_per_batch;
            let modulation = norm
                .modulation
                .map(|m| m.map(|(start, stride)| start.at(batch_idx * stride)));
            let mut i = 0;
            while i < n {
                let len = (n - i).min(S::LANES);
                let mut y = S::mul(S::sub(load_up_to::<S>(x.add(i), len), mean), inverse);
                if let Some(weight) = norm.weight {
                    y = S::mul(y, load_up_to::<S>(weight.at(i), len));
                }
                if let Some(bias) = norm.bias {
                    y = S::add(y, load_up_to::<S>(bias.at(i), len));
                }
                if let Some([scale, shift]) = modulation {
                    let scale = S::add(S::splat(1.0), load_up_to::<S>(scale.add(i), len));
                    y = S::mul_add(y, scale, load_up_to::<S>(shift.add(i), len));
                }
                store_up_to::<S>(out.add(i), y, len);
                i += S::LANES;
            }
        }
    }
}

/// Layer norm of `n_rows` rows.
///
/// # Safety
/// All operands are checked; `out` overlaps `x` only if it is `x`.
pub(crate) unsafe fn layer_norm<S: Simd>(
    context: &Context<'_>,
    norm: LayerNorm,
    n_rows: usize,
) -> Result<()> {
    by_rows(context, n_rows, norm.n_cols, &|rows| {
        // SAFETY: the caller vouches for the operands; tasks have disjoint rows.
        unsafe { S::vectorize(LayerNormRows { norm, rows }) };
    })
}

/// Cuts rows of `n_cols` elements into tasks.
pub(crate) fn by_rows(
    context: &Context<'_>,
    n_rows: usize,
    n_cols: usize,
    task: &(dyn Fn((usize, usize)) + Sync),
) -> Result<()> {
    let rows_per_task = (TASK_ELEMENTS / n_cols).max(1);
    context.run(n_rows.div_ceil(rows_per_task), &|task_idx, _| {
        let start = task_idx * rows_per_task;
        task((start, (start + rows_per_task).min(n_rows)));
    })
}

/// Operands of an RMS norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RmsNorm {
    pub(crate) x: RowMap<f32>,
    pub(crate) out: RowMap<f32>,
    pub(crate) n_cols: usize,
    pub(crate) group_len: usize,
    pub(crate) eps: f32,
    pub(crate) weight: Option<Ptr<f32>>,
}

#[derive(Clone, Copy)]
struct RmsNormRows {
    norm: RmsNorm,
    rows: (usize, usize),
}

impl Kernel for RmsNormRows {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { norm, rows } = self;
        let n = norm.group_len;
        for row_idx in rows.0..rows.1 {
            let mut start = 0;
            while start < norm.n_cols {
                let x = norm.x.row(row_idx).add(start).cast_const();
                let out = norm.out.row(row_idx).add(start);
                let mean_square = sum::<S, true>(x, n, 0.0) / n as f32;
                let inverse = S::splat(1.0 / (mean_square + norm.eps).sqrt());
                let mut i = 0;
                while i < n {
                    let len = (n - i).min(S::LANES);
                    let mut y = S::mul(load_up_to::<S>(x.add(i), len), inverse);
                    if let Some(weight) = norm.weight {
                        y = S::mul(y, load_up_to::<S>(weight.at(i), len));
                    }
                    store_up_to::<S>(out.add(i), y, len);
                    i += S::LANES;
                }
                start += n;
            }
        }
    }
}

/// RMS norm of `n_rows` rows.
///
/// # Safety
/// As [`layer_norm`]; `group_len` divides `n_cols`.
pub(crate) unsafe fn rms_norm<S: Simd>(context: &Context<'_>, norm: RmsNorm, n_rows: usize) -> Result<()> {
    by_rows(context, n_rows, norm.n_cols, &|rows| {
        // SAFETY: the caller vouches for the operands; tasks have disjoint rows.
        unsafe { S::vectorize(RmsNormRows { norm, rows }) };
    })
}

/// Operands of [`match_norm`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatchNorm {
    pub(crate) x: RowMap<f32>,
    pub(crate) like: RowMap<f32>,
    pub(crate) out: RowMap<f32>,
    pub(crate) n_cols: usize,
    pub(crate) group_len: usize,
}

#[derive(Clone, Copy)]
struct MatchNormRows {
    norm: MatchNorm,
    rows: (usize, usize),
}

impl Kernel for MatchNormRows {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { norm, rows } = self;
        let n = norm.group_len;
        for row_idx in rows.0..rows.1 {
            let mut start = 0;
            while start < norm.n_cols {
                let x = norm.x.row(row_idx).add(start).cast_const();
                let like = norm.like.row(row_idx).add(start).cast_const();
                let out = norm.out.row(row_idx).add(start);
                let (own, wanted) = (
                    sum::<S, true>(x, n, 0.0).sqrt(),
                    sum::<S, true>(like, n, 0.0).sqrt(),
                );
                // By zero where there is nothing to enlarge; a NaN in `like` comes through.
                let factor = S::splat(wanted * if own == 0.0 { 0.0 } else { 1.0 / own });
                let mut i = 0;
                while i < n {
                    let len = (n - i).min(S::LANES);
                    store_up_to::<S>(out.add(i), S::mul(load_up_to::<S>(x.add(i), len), factor), len);
                    i += S::LANES;
                }
                start += n;
            }
        }
    }
}

/// Gives each group of `n_rows` rows the norm of the group of `like`.
///
/// # Safety
/// As [`layer_norm`]; `group_len` divides `n_cols`.
pub(crate) unsafe fn match_norm<S: Simd>(
    context: &Context<'_>,
    norm: MatchNorm,
    n_rows: usize,
) -> Result<()> {
    by_rows(context, n_rows, norm.n_cols, &|rows| {
        // SAFETY: the caller vouches for the operands; tasks have disjoint rows.
        unsafe { S::vectorize(MatchNormRows { norm, rows }) };
    })
}

/// Operands of a group norm, `[batch, .., c]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupNorm {
    pub(crate) x: View<f32>,
    pub(crate) out: View<f32>,
    pub(crate) weight: Ptr<f32>,
    pub(crate) bias: Ptr<f32>,
    pub(crate) n_groups: usize,
    pub(crate) eps: f32,
    pub(crate) activation: Activation,
}

/// Mean and sum of squared distances from it, per group, of a block of rows.
#[derive(Clone, Copy)]
struct BlockStatistics {
    x: RowMap<f32>,
    rows: (usize, usize),
    n_cols: usize,
    n_groups: usize,
    /// `[n_groups][2]`
    out: *mut f64,
    /// Room for `2 * n_cols + 64`.
    scratch: *mut f32,
}

/// `sum over rows` of `x`, or of `(x - centre)^2`, per column.
#[inline(always)]
unsafe fn column_sums<S: Simd, const SQUARED: bool>(
    block: &BlockStatistics,
    centres: *const f32,
    sums: *mut f32,
) {
    let n = block.n_cols;
    let mut col_idx = 0;
    while col_idx + 4 * S::LANES <= n {
        let mut acc = [S::splat(0.0); 4];
        for row_idx in block.rows.0..block.rows.1 {
            let x = block.x.row(row_idx).add(col_idx).cast_const();
            for j in 0..4 {
                let centre = if SQUARED {
                    S::load(centres.add(col_idx + j * S::LANES))
                } else {
                    S::splat(0.0)
                };
                acc[j] = accumulate::<S, SQUARED>(acc[j], S::load(x.add(j * S::LANES)), centre);
            }
        }
        for j in 0..4 {
            S::store(sums.add(col_idx + j * S::LANES), acc[j]);
        }
        col_idx += 4 * S::LANES;
    }
    while col_idx < n {
        let len = (n - col_idx).min(S::LANES);
        let centre = if SQUARED {
            load_up_to::<S>(centres.add(col_idx), len)
        } else {
            S::splat(0.0)
        };
        let mut acc = S::splat(0.0);
        for row_idx in block.rows.0..block.rows.1 {
            let x = load_up_to::<S>(block.x.row(row_idx).add(col_idx).cast_const(), len);
            acc = accumulate::<S, SQUARED>(acc, x, centre);
        }
        store_up_to::<S>(sums.add(col_idx), acc, len);
        col_idx += S::LANES;
    }
}

impl Kernel for BlockStatistics {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (centres, sums) = (self.scratch, self.scratch.add(self.n_cols.next_multiple_of(16)));
        let group_len = self.n_cols / self.n_groups;
        let count = (group_len * (self.rows.1 - self.rows.0)) as f64;
        column_sums::<S, false>(&self, centres, sums);
        for group_idx in 0..self.n_groups {
            let mut total = 0.0;
            for col_idx in group_idx * group_len..(group_idx + 1) * group_len {
                total += f64::from(*sums.add(col_idx));
            }
            // The distances are taken from the rounded mean, which is what is passed on.
            let mean = (total / count) as f32;
            for col_idx in group_idx * group_len..(group_idx + 1) * group_len {
                *centres.add(col_idx) = mean;
            }
            *self.out.add(group_idx * 2) = total / count;
        }
        column_sums::<S, true>(&self, centres, sums);
        for group_idx in 0..self.n_groups {
            let mut total = 0.0;
            for col_idx in group_idx * group_len..(group_idx + 1) * group_len {
                total += f64::from(*sums.add(col_idx));
            }
            // Back from the rounded to the true mean.
            let rounding = f64::from(*centres.add(group_idx * group_len)) - *self.out.add(group_idx * 2);
            *self.out.add(group_idx * 2 + 1) = total - count * rounding * rounding;
        }
    }
}

/// `activation((x - mean) * factor + bias)` of rows, with one mean and factor per column.
#[derive(Clone, Copy)]
struct GroupNormApply {
    x: RowMap<f32>,
    out: RowMap<f32>,
    rows: (usize, usize),
    n_cols: usize,
    means: *const f32,
    factors: *const f32,
    bias: *const f32,
    activation: Activation,
}

impl Kernel for GroupNormApply {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        with_activation!(self.activation, A => {
            for row_idx in self.rows.0..self.rows.1 {
                let (x, out) = (self.x.row(row_idx).cast_const(), self.out.row(row_idx));
                let mut i = 0;
                while i < self.n_cols {
                    let n = (self.n_cols - i).min(S::LANES);
                    let distance = S::sub(load_up_to::<S>(x.add(i), n), load_up_to::<S>(self.means.add(i), n));
                    let factor = load_up_to::<S>(self.factors.add(i), n);
                    let y = S::mul_add(distance, factor, load_up_to::<S>(self.bias.add(i), n));
                    store_up_to::<S>(out.add(i), A::apply::<S>(y), n);
                    i += S::LANES;
                }
            }
        });
    }
}

/// Group norm.
///
/// # Safety
/// All operands are checked; `n_groups` divides the channels; `out` overlaps `x` only if it is `x`.
pub(crate) unsafe fn group_norm<S: Simd>(context: &Context<'_>, norm: GroupNorm) -> Result<()> {
    let GroupNorm { x, out, n_groups, .. } = norm;
    let (n_batch, n_cols) = (x.dim(0), x.n_cols());
    let n_rows = x.shape.n_elements() / n_batch / n_cols;
    // By the shape of one batch element alone (R1), and a block stays in the second cache for its second reading.
    let block_rows = (TASK_ELEMENTS / n_cols).clamp(1, 256);
    let n_blocks = n_rows.div_ceil(block_rows);
    let block = |block_idx: usize| (block_idx * block_rows, ((block_idx + 1) * block_rows).min(n_rows));
    let batch_rows = |view: &View<f32>, batch_idx: usize| view.batch_element(batch_idx).rows();

    let statistics = context
        .memory
        .take("a group norm", n_batch * n_blocks * n_groups * 16)?;
    let statistics_ptr = Ptr(statistics.start().cast::<f64>());
    let scratch = context.scratch("a group norm", 2 * n_cols + 64)?;
    let per_thread = scratch.per_thread;
    context.run(n_batch * n_blocks, &|task_idx, thread_idx| {
        let kernel = BlockStatistics {
            x: batch_rows(&x, task_idx / n_blocks),
            rows: block(task_idx % n_blocks),
            n_cols,
            n_groups,
            out: statistics_ptr.at(task_idx * n_groups * 2),
            scratch: per_thread.of(thread_idx),
        };
        // SAFETY: the caller vouches for `x`; each task has its own statistics and its thread's scratch.
        unsafe { S::vectorize(kernel) };
    })?;

    let columns = context.memory.take("a group norm", n_batch * 2 * n_cols * 4)?;
    let columns_ptr = Ptr(columns.start().cast::<f32>());
    let group_len = n_cols / n_groups;
    for batch_idx in 0..n_batch {
        for group_idx in 0..n_groups {
            let of_block = |block_idx: usize, which: usize| {
                let offset = ((batch_idx * n_blocks + block_idx) * n_groups + group_idx) * 2 + which;
                // SAFETY: inside the statistics, written above.
                unsafe { *statistics_ptr.at(offset) }
            };
            let count = |block_idx: usize| {
                let (start, end) = block(block_idx);
                ((end - start) * group_len) as f64
            };
            let total = (n_rows * group_len) as f64;
            let mean = (0..n_blocks).map(|i| count(i) * of_block(i, 0)).sum::<f64>() / total;
            let squares = |i: usize| of_block(i, 1) + count(i) * (of_block(i, 0) - mean).powi(2);
            let variance = (0..n_blocks).map(squares).sum::<f64>() / total;
            let inverse = 1.0 / (variance + f64::from(norm.eps)).sqrt();
            for col_idx in group_idx * group_len..(group_idx + 1) * group_len {
                // SAFETY: the weight has an element per channel.
                let weight = f64::from(unsafe { *norm.weight.at(col_idx) });
                let offset = batch_idx * 2 * n_cols + col_idx;
                // SAFETY: inside `columns`.
                unsafe { *columns_ptr.at(offset) = mean as f32 };
                // SAFETY: as above.
                unsafe { *columns_ptr.at(offset + n_cols) = (inverse * weight) as f32 };
            }
        }
    }
    context.run(n_batch * n_blocks, &|task_idx, _| {
        let (batch_idx, block_idx) = (task_idx / n_blocks, task_idx % n_blocks);
        let kernel = GroupNormApply {
            x: batch_rows(&x, batch_idx),
            out: batch_rows(&out, batch_idx),
            rows: block(block_idx),
            n_cols,
            means: columns_ptr.at(batch_idx * 2 * n_cols),
            factors: columns_ptr.at((batch_idx * 2 + 1) * n_cols),
            bias: norm.bias.get(),
            activation: norm.activation,
        };
        // SAFETY: the caller vouches for the operands; tasks have disjoint rows.
        unsafe { S::vectorize(kernel) };
    })
}
