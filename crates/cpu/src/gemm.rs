//! Products with packed weights: micro-tiles, the loop around them, and what is done to a product before it is stored.
//!
//! Weights lie in panels of [`Simd::NR`] columns, `[n / NR][k][NR]`; the last panel is as wide as the columns left, rounded up to
//! [`Simd::LANES`], padded with zeros. Activations are packed on the way to strips of [`Simd::MR`] rows, `[m / MR][k][MR]`.
//!
//! R1. Each element is a sum of chains: fused multiply-adds from zero over [`CHAIN`] steps of ascending `k`, the chains added in
//!     their order, whatever tile, block or task the element falls into. Its value depends on the row, the weights and the
//!     instruction set, and on nothing else.
//! R2. A residual may lie where the output goes: partial sums wait in scratch, and an element is written right after its residual
//!     has been read, by the same thread.
//! R3. Tasks write disjoint parts of the output and own their thread's scratch.
#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the `# Safety` sections state what the pointers are valid for, once per function"
)]

use crate::{
    Context,
    operand::{Ptr, RowMap},
    simd::{ActivationFn, Kernel, Simd, with_activation},
};
use denoised_tensor::{Activation, Result};

/// Rows of activations in segments of equal length that follow each other along `k` (one segment for a plain matrix, one per tap
/// of a convolution).
pub(crate) trait RowSource: Copy + Send + Sync {
    /// Elements of a segment; divides `k`.
    fn segment_len(&self) -> usize;
    /// Where segment `segment_idx` of row `row_idx` lies.
    ///
    /// # Safety
    /// Both exist. The result is valid for reads of a segment.
    unsafe fn segment(&self, row_idx: usize, segment_idx: usize) -> *const f32;
}

/// A matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixRows {
    pub(crate) rows: RowMap<f32>,
    pub(crate) k: usize,
}

impl RowSource for MatrixRows {
    #[inline(always)]
    fn segment_len(&self) -> usize {
        self.k
    }
    #[inline(always)]
    unsafe fn segment(&self, row_idx: usize, _segment_idx: usize) -> *const f32 {
        self.rows.row(row_idx)
    }
}

/// Packed weights: see the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panels {
    pub(crate) start: Ptr<f32>,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

impl Panels {
    /// Number of panels.
    pub(crate) fn count(n: usize, nr: usize) -> usize {
        n.div_ceil(nr)
    }

    /// Columns of panel `panel_idx`, padding included.
    #[inline(always)]
    pub(crate) fn width(n: usize, panel_idx: usize, nr: usize, lanes: usize) -> usize {
        (n - panel_idx * nr).next_multiple_of(lanes).min(nr)
    }

    /// f32 that `n` columns of depth `k` occupy.
    pub(crate) fn n_elements(n: usize, k: usize, nr: usize, lanes: usize) -> usize {
        let last = Self::count(n, nr) - 1;
        k * (last * nr + Self::width(n, last, nr, lanes))
    }
}

/// `out = residual + gate[b] * activation(product + bias)` for rows of the output.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finish {
    pub(crate) bias: Option<Ptr<f32>>,
    pub(crate) activation: Activation,
    /// First row and distance of rows (0 for one row for all).
    pub(crate) gate: Option<(Ptr<f32>, usize)>,
    /// Output rows per batch element.
    pub(crate) rows_per_batch: usize,
    pub(crate) residual: Option<RowMap<f32>>,
    pub(crate) out: RowMap<f32>,
}

impl Finish {
    /// Stores the product as it is.
    pub(crate) fn plain(out: RowMap<f32>) -> Self {
        Self {
            bias: None,
            activation: Activation::None,
            gate: None,
            rows_per_batch: usize::MAX,
            residual: None,
            out,
        }
    }

    /// Finishes `n_cols` products of row `row_idx` from column `col_idx` on.
    ///
    /// # Safety
    /// Inside a kernel of `S`; `products` is valid for `n_cols` reads, the row and columns exist in all operands.
    #[inline(always)]
    pub(crate) unsafe fn row<S: Simd>(
        &self,
        products: *const f32,
        row_idx: usize,
        col_idx: usize,
        n_cols: usize,
    ) {
        let out = self.out.row(row_idx).add(col_idx);
        let is_plain = self.bias.is_none() && self.gate.is_none() && self.residual.is_none();
        if is_plain && self.activation == Activation::None {
            let mut i = 0;
            while i + S::LANES <= n_cols {
                S::store(out.add(i), S::load(products.add(i)));
                i += S::LANES;
            }
            if i < n_cols {
                S::store_first(out.add(i), S::load_first(products.add(i), n_cols - i), n_cols - i);
            }
            return;
        }
        let null = std::ptr::null::<f32>();
        let bias = self.bias.map_or(null, |bias| bias.at(col_idx));
        let gate = self.gate.map_or(null, |(gate, stride)| {
            gate.at(row_idx / self.rows_per_batch * stride + col_idx)
        });
        let residual = self
            .residual
            .map_or(null, |residual| residual.row(row_idx).wrapping_add(col_idx));
        with_activation!(self.activation, A => {
            let mut i = 0;
            while i < n_cols {
                let n = (n_cols - i).min(S::LANES);
                let mut value = load_up_to::<S>(products.add(i), n);
                if !bias.is_null() {
                    value = S::add(value, load_up_to::<S>(bias.add(i), n));
                }
                value = A::apply::<S>(value);
                if !gate.is_null() {
                    value = S::mul(value, load_up_to::<S>(gate.add(i), n));
                }
                if !residual.is_null() {
                    value = S::add(value, load_up_to::<S>(residual.add(i), n));
                }
                store_up_to::<S>(out.add(i), value, n);
                i += S::LANES;
            }
        });
    }
}

/// The first `n <= LANES` elements.
///
/// # Safety
/// Inside a kernel of `S`; valid for `n` reads.
#[inline(always)]
pub(crate) unsafe fn load_up_to<S: Simd>(from: *const f32, n: usize) -> S::V {
    if n == S::LANES {
        S::load(from)
    } else {
        S::load_first(from, n)
    }
}

/// The first `n <= LANES` elements.
///
/// # Safety
/// Inside a kernel of `S`; valid for `n` writes.
#[inline(always)]
pub(crate) unsafe fn store_up_to<S: Simd>(to: *mut f32, x: S::V, n: usize) {
    if n == S::LANES {
        S::store(to, x)
    } else {
        S::store_first(to, x, n)
    }
}

/// Steps of a chain of fused multiply-adds (R1). Rounding errors grow with a chain's length, so a product of depth 3000 comes out
/// five times as exact as in one chain; shorter ones gain little more and cost loads and stores of the sums.
pub(crate) const CHAIN: usize = 64;

/// Steps of a tile's sums, and of each of their chains (R1; at least one).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Depth {
    pub(crate) steps: usize,
    pub(crate) chain: usize,
}

/// One micro-tile: `out[i][j] = initial[i][j] + sum_k a[k][i] b[k][j]` for `M` rows and `NV` vectors of columns, in chains (R1).
#[derive(Clone, Copy)]
struct Tile<const M: usize, const NV: usize> {
    depth: Depth,
    /// A strip, `[depth][MR]`.
    a: *const f32,
    /// A panel, `[depth][NV * LANES]`.
    b: *const f32,
    /// `[M][NV * LANES]`; null for zeros.
    initial: *const f32,
    /// `[M][NV * LANES]`; may be `initial`.
    out: *mut f32,
}

impl<const M: usize, const NV: usize> Kernel for Tile<M, NV> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let width = NV * S::LANES;
        let (mut a, mut b) = (self.a, self.b);
        let (mut initial, mut n_left) = (self.initial, self.depth.steps);
        loop {
            let length = n_left.min(self.depth.chain);
            let mut sums = [[S::splat(0.0); NV]; M];
            for _ in 0..length / 4 {
                // Panels are read once per strip and come from the second cache or beyond.
                for u in 0..4 {
                    S::prefetch(b.wrapping_add(width * (16 + u)));
                    if NV * S::LANES > 16 {
                        S::prefetch(b.wrapping_add(width * (16 + u) + 16));
                    }
                }
                S::prefetch(a.wrapping_add(S::MR * 32));
                sums = rank_one::<S, M, NV>(sums, a, b);
                sums = rank_one::<S, M, NV>(sums, a.add(S::MR), b.add(width));
                sums = rank_one::<S, M, NV>(sums, a.add(2 * S::MR), b.add(2 * width));
                sums = rank_one::<S, M, NV>(sums, a.add(3 * S::MR), b.add(3 * width));
                a = a.add(4 * S::MR);
                b = b.add(4 * width);
            }
            for _ in 0..length % 4 {
                sums = rank_one::<S, M, NV>(sums, a, b);
                a = a.add(S::MR);
                b = b.add(width);
            }
            for i in 0..M {
                for j in 0..NV {
                    let offset = i * width + j * S::LANES;
                    if !initial.is_null() {
                        sums[i][j] = S::add(S::load(initial.add(offset)), sums[i][j]);
                    }
                    S::store(self.out.add(offset), sums[i][j]);
                }
            }
            n_left -= length;
            if n_left == 0 {
                break;
            }
            initial = self.out.cast_const();
        }
    }
}

/// `sums[i][j] += a[i] * b[j]`
#[inline(always)]
unsafe fn rank_one<S: Simd, const M: usize, const NV: usize>(
    mut sums: [[S::V; NV]; M],
    a: *const f32,
    b: *const f32,
) -> [[S::V; NV]; M] {
    let mut columns = [S::splat(0.0); NV];
    for j in 0..NV {
        columns[j] = S::load(b.add(j * S::LANES));
    }
    for i in 0..M {
        let row = S::splat(*a.add(i));
        for j in 0..NV {
            sums[i][j] = S::mul_add(row, columns[j], sums[i][j]);
        }
    }
    sums
}

/// The micro-tile of `m <= MR` rows and `width` (one or two vectors of) columns; see [`Tile`].
///
/// # Safety
/// Inside a kernel of `S`; `a` is valid for `depth.steps * MR` reads, `b` for `depth.steps * width`, `initial` (unless null) and `out` for
/// `m * width`.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd>(
    m: usize,
    width: usize,
    depth: Depth,
    a: *const f32,
    b: *const f32,
    initial: *const f32,
    out: *mut f32,
) {
    macro_rules! by_height {
        ($nv:literal: $($m:literal)*) => {
            match m {
                $($m if $m <= S::MR => S::vectorize(Tile::<$m, $nv> { depth, a, b, initial, out }),)*
                _ => {}
            }
        };
    }
    debug_assert!(0 < m && m <= S::MR && S::MR <= 14 && (width == S::LANES || width == S::NR));
    if width == S::NR {
        by_height!(2: 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
    } else {
        by_height!(1: 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
    }
}

/// Elements behind a strip that packing may write to.
pub(crate) const STRIP_SPILL: usize = 16;

/// Packs `len` elements of [`Simd::MR`] rows to `[len][MR]`, and may write up to [`STRIP_SPILL`] elements behind that.
///
/// # Safety
/// Inside a kernel of `S`; each of the `MR` rows is valid for `len` reads, `to` for `len * MR + STRIP_SPILL` writes.
#[inline(always)]
pub(crate) unsafe fn pack_strip<S: Simd>(rows: &[*const f32; 16], len: usize, to: *mut f32) {
    let mut k = 0;
    while k + S::LANES <= len {
        S::transpose(rows.as_ptr(), S::MR, k, to.add(k * S::MR), S::MR);
        k += S::LANES;
    }
    while k < len {
        for i in 0..S::MR {
            *to.add(k * S::MR + i) = *rows[i].add(k);
        }
        k += 1;
    }
}

/// How `k` is cut into blocks: about equal depths of at most [`Simd::KC`], in whole chains (R1).
fn block_depth<S: Simd>(k: usize) -> usize {
    const { assert!(S::KC.is_multiple_of(CHAIN), "blocks end where chains end") };
    k.div_ceil(k.div_ceil(S::KC)).next_multiple_of(CHAIN)
}

/// One task: rows `rows.0 .. rows.1` times panels `panels.0 .. panels.1`.
#[derive(Clone, Copy)]
pub(crate) struct Block<A> {
    pub(crate) source: A,
    pub(crate) weights: Panels,
    pub(crate) finish: Finish,
    pub(crate) rows: (usize, usize),
    pub(crate) panels: (usize, usize),
    /// Room for [`scratch_len`] f32.
    pub(crate) scratch: *mut f32,
}

/// f32 of scratch for a block of `n_rows` and `n_panels`.
pub(crate) fn scratch_len<S: Simd>(n_rows: usize, n_panels: usize, k: usize) -> usize {
    let n_strips = n_rows.div_ceil(S::MR);
    let tile = S::MR * S::NR;
    let n_tiles = if k > S::KC { n_strips * n_panels } else { 1 };
    (n_strips * S::MR * block_depth::<S>(k) + STRIP_SPILL).next_multiple_of(16) + n_tiles * tile
}

impl<A: RowSource> Kernel for Block<A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self {
            source,
            weights,
            finish,
            rows,
            panels,
            scratch,
        } = self;
        let (k, segment_len) = (weights.k, source.segment_len());
        let depth = block_depth::<S>(k);
        let n_strips = (rows.1 - rows.0).div_ceil(S::MR);
        let tiles = scratch.add((n_strips * S::MR * depth + STRIP_SPILL).next_multiple_of(16));
        let mut k_start = 0;
        while k_start < k {
            let block = depth.min(k - k_start);
            let (is_first, is_last) = (k_start == 0, k_start + block == k);
            for strip_idx in 0..n_strips {
                let to = scratch.add(strip_idx * S::MR * block);
                let mut done = 0;
                while done < block {
                    let (segment_idx, offset) =
                        ((k_start + done) / segment_len, (k_start + done) % segment_len);
                    let len = (segment_len - offset).min(block - done);
                    let mut starts = [std::ptr::null(); 16];
                    for i in 0..S::MR {
                        // Rows beyond the end repeat the last one; nobody looks at their products.
                        let row_idx = (rows.0 + strip_idx * S::MR + i).min(rows.1 - 1);
                        starts[i] = source.segment(row_idx, segment_idx).add(offset);
                    }
                    pack_strip::<S>(&starts, len, to.add(done * S::MR));
                    done += len;
                }
            }
            for panel_idx in panels.0..panels.1 {
                let width = Panels::width(weights.n, panel_idx, S::NR, S::LANES);
                let panel = weights
                    .start
                    .get()
                    .add(panel_idx * k * S::NR + k_start * width)
                    .cast_const();
                let col_idx = panel_idx * S::NR;
                for strip_idx in 0..n_strips {
                    let row_idx = rows.0 + strip_idx * S::MR;
                    let m = S::MR.min(rows.1 - row_idx);
                    let tile_idx = if depth < k {
                        (panel_idx - panels.0) * n_strips + strip_idx
                    } else {
                        0
                    };
                    let out = tiles.add(tile_idx * S::MR * S::NR);
                    let initial = if is_first {
                        std::ptr::null()
                    } else {
                        out.cast_const()
                    };
                    let strip = scratch.add(strip_idx * S::MR * block).cast_const();
                    let depth = Depth {
                        steps: block,
                        chain: CHAIN,
                    };
                    tile::<S>(m, width, depth, strip, panel, initial, out);
                    if is_last {
                        for i in 0..m {
                            let n_cols = width.min(weights.n - col_idx);
                            finish.row::<S>(out.add(i * width), row_idx + i, col_idx, n_cols);
                        }
                    }
                }
            }
            k_start += block;
        }
    }
}

/// How rows and panels are cut into tasks. Any grid gives the same result (R1).
#[derive(Clone, Copy, Debug)]
struct Grid {
    n_strips: usize,
    n_panels: usize,
    n_row_blocks: usize,
    n_panel_blocks: usize,
}

impl Grid {
    fn new<S: Simd>(n_rows: usize, weights: &Panels, n_threads: usize) -> Self {
        // Partial sums of a task, where there are any, stay below this.
        const PARTIAL_BYTES: usize = 4 << 20;
        let n_strips = n_rows.div_ceil(S::MR);
        let n_panels = Panels::count(weights.n, S::NR);
        let mut n_row_blocks = n_strips.div_ceil(S::MC / S::MR);
        let mut n_panel_blocks = 1;
        if n_row_blocks >= 2 * n_threads {
            n_row_blocks = n_row_blocks.next_multiple_of(n_threads).min(n_strips);
        } else if n_threads > 1 {
            n_panel_blocks = (2 * n_threads).div_ceil(n_row_blocks).min(n_panels);
        }
        if weights.k > S::KC {
            let panel_bytes = n_strips.div_ceil(n_row_blocks) * S::MR * S::NR * 4;
            n_panel_blocks = n_panel_blocks.max(n_panels.div_ceil((PARTIAL_BYTES / panel_bytes).max(1)));
        }
        Self {
            n_strips,
            n_panels,
            n_row_blocks,
            n_panel_blocks,
        }
    }
}

/// Multiplies `n_rows` rows of `source` with `weights` and finishes the products.
///
/// # Safety
/// All pointers in `source`, `weights` and `finish` are valid for `n_rows` rows and their lengths; `finish.out` overlaps nothing
/// that is read, except that it may be `finish.residual`.
pub(crate) unsafe fn multiply<S: Simd, A: RowSource>(
    context: &Context<'_>,
    source: A,
    n_rows: usize,
    weights: Panels,
    finish: Finish,
) -> Result<()> {
    let grid = Grid::new::<S>(n_rows, &weights, context.pool.n_threads());
    let max_rows = grid.n_strips.div_ceil(grid.n_row_blocks) * S::MR;
    let max_panels = grid.n_panels.div_ceil(grid.n_panel_blocks);
    let scratch = context.scratch("a product", scratch_len::<S>(max_rows, max_panels, weights.k))?;
    let per_thread = scratch.per_thread;
    context.run(
        grid.n_row_blocks * grid.n_panel_blocks,
        &|task_idx, thread_idx| {
            let (row_block, panel_block) = (task_idx % grid.n_row_blocks, task_idx / grid.n_row_blocks);
            let strip = |i: usize| i * grid.n_strips / grid.n_row_blocks * S::MR;
            let panel = |i: usize| i * grid.n_panels / grid.n_panel_blocks;
            let block = Block {
                source,
                weights,
                finish,
                rows: (strip(row_block), strip(row_block + 1).min(n_rows)),
                panels: (panel(panel_block), panel(panel_block + 1)),
                scratch: per_thread.of(thread_idx),
            };
            // SAFETY: the caller vouches for the operands; blocks are disjoint, and the scratch is this thread's (R3).
            unsafe { S::vectorize(block) };
        },
    )
}
