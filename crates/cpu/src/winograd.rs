//! 3x3 convolutions of stride 1 by Winograd's F(4x4, 3x3): 36 products per 4x4 output pixels instead of 144.
//!
//! `Y = Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A` (Lavin and Gray, arXiv 1509.09308, section 4.1) with the points 0, ±5/8, ±3/2 and infinity, whose
//! error is half that of the usual 0, ±1, ±2 (Barabasz et al., arXiv 1803.10986, on the choice). The weights' part is done once, in
//! f64, and stored as 36 packed matrices: four times the memory of the kernel itself. Tiles of the image are transformed, multiplied
//! and transformed back in chunks that fit in the caches.
//!
//! R1. A tile lies in one batch element and starts at a multiple of 4: an element's value depends on its batch element only.
//! R2. Whether it is used depends on the weight's shape and stride ([`pays`]), since only one form of a weight is stored.
//!
//! The error is larger than that of a plain product, because the transforms subtract: the relative L2 error is 8e-7 instead of 2e-7 on
//! uniform random data of 320 channels, also where some channels are 1e4 times as large as the others. What a tile mixes it rounds
//! together: beside a pixel that is 1e4 times as large as its neighbours, outputs of the same tile that do not depend on it are off by
//! 1e-3 of their own size (1e-4 for 1e3), and infinity makes NaN of its whole tile. `tests/accuracy.rs` holds the numbers.
#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the `# Safety` sections state what the pointers are valid for, once per function"
)]

use crate::{
    Context,
    conv::Walk,
    gemm::{Block, Finish, MatrixRows, Panels, load_up_to, scratch_len},
    operand::{Ptr, RowMap},
    simd::{Kernel, Simd},
};
use denoised_tensor::Result;

/// Transformed positions of a tile: 6 x 6.
pub(crate) const N_POSITIONS: usize = 36;

/// Side of a tile of the output.
const TILE: usize = 4;

/// Fewest input and output channels for which the transforms cost less than they save.
const MIN_CHANNELS: usize = 32;

/// Transformed tiles that are in work at once stay below this, unless one block of rows is more.
const CHUNK_BYTES: usize = 24 << 20;

/// Channels that are transformed back and finished at a time.
const OUT_CHANNELS: usize = 128;

/// The table: whether a kernel `[c_out, c_in, height, width]` used with `stride` is stored transformed.
pub(crate) fn pays(shape: &[usize], stride: usize) -> bool {
    matches!(*shape, [c_out, c_in, 3, 3] if c_out >= MIN_CHANNELS && c_in >= MIN_CHANNELS) && stride == 1
}

/// The points other than 0 and infinity are `±P` and `±Q`. Their powers and the sums below are exact in f32.
const P: f64 = 0.625;
const Q: f64 = 1.5;
const P2: f64 = P * P;
const Q2: f64 = Q * Q;

/// `G`, which takes 3 taps to 6 positions: powers of the point over its product of differences to the other points.
const G: [[f64; 3]; 6] = {
    let (p, q) = (2.0 * P2 * (P2 - Q2), 2.0 * Q2 * (Q2 - P2));
    [
        [1.0 / (P2 * Q2), 0.0, 0.0],
        [1.0 / p, P / p, P2 / p],
        [1.0 / p, -P / p, P2 / p],
        [1.0 / q, Q / q, Q2 / q],
        [1.0 / q, -Q / q, Q2 / q],
        [0.0, 0.0, 1.0],
    ]
};

/// Kernels that are transformed together.
pub(crate) const GROUP: usize = 16;

/// `G g Gᵀ` of [`GROUP`] 3x3 kernels, tap by tap and position by position.
#[inline(always)]
pub(crate) fn transform_kernels(taps: &[[f64; GROUP]; 9]) -> [[f32; GROUP]; N_POSITIONS] {
    let mut halves = [[[0.0; GROUP]; 3]; 6];
    for i in 0..6 {
        for x in 0..3 {
            for y in 0..3 {
                for lane in 0..GROUP {
                    halves[i][x][lane] += G[i][y] * taps[y * 3 + x][lane];
                }
            }
        }
    }
    let mut positions = [[0.0; GROUP]; N_POSITIONS];
    for position in 0..N_POSITIONS {
        let mut sums = [0.0; GROUP];
        for x in 0..3 {
            for lane in 0..GROUP {
                sums[lane] += G[position % 6][x] * halves[position / 6][x][lane];
            }
        }
        for lane in 0..GROUP {
            positions[position][lane] = sums[lane] as f32;
        }
    }
    positions
}

/// Distance of rows of transformed tiles: whole vectors, and off the powers of two that collide in caches.
fn padded(n_channels: usize) -> usize {
    n_channels.next_multiple_of(16) + 16
}

/// Tiles `tiles.0 .. tiles.1` of all batch elements, row-major.
#[derive(Clone, Copy)]
struct Tiles {
    walk: Walk,
    /// Tiles per column and row of an image.
    high: usize,
    wide: usize,
    /// First and end.
    range: (usize, usize),
}

impl Tiles {
    /// Batch element, and the output pixel of the upper left corner.
    #[inline(always)]
    fn corner(&self, tile_idx: usize) -> (usize, usize, usize) {
        let (rest, x) = (tile_idx / self.wide, tile_idx % self.wide);
        (rest / self.high, rest % self.high * TILE, x * TILE)
    }
}

/// `Bᵀ d B` of tiles, to `[36][tile][channel]`.
#[derive(Clone, Copy)]
struct TransformIn {
    tiles: Tiles,
    /// Where the first of the tiles goes.
    to: *mut f32,
    position_stride: usize,
    row_stride: usize,
}

#[inline(always)]
unsafe fn b_transposed<S: Simd>(d: [S::V; 6]) -> [S::V; 6] {
    let number = |x: f64| S::splat(x as f32);
    let even_p = S::mul_add(number(-Q2), d[2], d[4]);
    let odd_p = S::mul_add(number(-Q2), d[1], d[3]);
    let even_q = S::mul_add(number(-P2), d[2], d[4]);
    let odd_q = S::mul_add(number(-P2), d[1], d[3]);
    let (product, minus_sum) = (number(P2 * Q2), number(-P2 - Q2));
    [
        S::mul_add(product, d[0], S::mul_add(minus_sum, d[2], d[4])),
        S::mul_add(number(P), odd_p, even_p),
        S::mul_add(number(-P), odd_p, even_p),
        S::mul_add(number(Q), odd_q, even_q),
        S::mul_add(number(-Q), odd_q, even_q),
        S::mul_add(product, d[1], S::mul_add(minus_sum, d[3], d[5])),
    ]
}

impl Kernel for TransformIn {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self {
            tiles,
            to,
            position_stride,
            row_stride,
        } = self;
        let n_channels = tiles.walk.image.n_cols();
        let [top, left, ..] = tiles.walk.spec.padding;
        for tile_idx in tiles.range.0..tiles.range.1 {
            let (batch_idx, out_y, out_x) = tiles.corner(tile_idx);
            let mut pixels = [std::ptr::null(); N_POSITIONS];
            for i in 0..6 {
                for j in 0..6 {
                    let (y, x) = (
                        (out_y + i) as isize - top as isize,
                        (out_x + j) as isize - left as isize,
                    );
                    pixels[i * 6 + j] = tiles.walk.pixel(batch_idx, y, x);
                }
            }
            let to = to.add((tile_idx - tiles.range.0) * row_stride);
            let mut channel = 0;
            while channel < n_channels {
                let n = (n_channels - channel).min(S::LANES);
                let mut half = [[S::splat(0.0); 6]; 6];
                for j in 0..6 {
                    let mut column = [S::splat(0.0); 6];
                    for i in 0..6 {
                        let pixel = pixels[i * 6 + j];
                        if !pixel.is_null() {
                            column[i] = load_up_to::<S>(pixel.add(channel), n);
                        }
                    }
                    let column = b_transposed::<S>(column);
                    for i in 0..6 {
                        half[i][j] = column[i];
                    }
                }
                for i in 0..6 {
                    let row = b_transposed::<S>(half[i]);
                    for j in 0..6 {
                        // Rows are padded to whole vectors.
                        S::store(to.add((i * 6 + j) * position_stride + channel), row[j]);
                    }
                }
                channel += S::LANES;
            }
        }
    }
}

/// `Aᵀ m A` of tiles, then the finish.
#[derive(Clone, Copy)]
struct TransformOut {
    tiles: Tiles,
    /// Products of the first of the tiles.
    from: *const f32,
    position_stride: usize,
    row_stride: usize,
    n_channels: usize,
    finish: Finish,
    /// Room for `16 * OUT_CHANNELS`.
    scratch: *mut f32,
}

#[inline(always)]
unsafe fn a_transposed<S: Simd>(m: [S::V; 6]) -> [S::V; 4] {
    let number = |x: f64| S::splat(x as f32);
    let (sum_p, difference_p) = (S::add(m[1], m[2]), S::sub(m[1], m[2]));
    let (sum_q, difference_q) = (S::add(m[3], m[4]), S::sub(m[3], m[4]));
    [
        S::add(S::add(m[0], sum_p), sum_q),
        S::mul_add(number(Q), difference_q, S::mul(number(P), difference_p)),
        S::mul_add(number(Q2), sum_q, S::mul(number(P2), sum_p)),
        S::mul_add(
            number(Q2 * Q),
            difference_q,
            S::mul_add(number(P2 * P), difference_p, m[5]),
        ),
    ]
}

impl Kernel for TransformOut {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self {
            tiles,
            from,
            position_stride,
            row_stride,
            n_channels,
            finish,
            scratch,
        } = self;
        let (height, width) = (tiles.walk.out_height, tiles.walk.out_width);
        for tile_idx in tiles.range.0..tiles.range.1 {
            let (batch_idx, out_y, out_x) = tiles.corner(tile_idx);
            let from = from.add((tile_idx - tiles.range.0) * row_stride);
            let mut start = 0;
            while start < n_channels {
                let n_block = (n_channels - start).min(OUT_CHANNELS);
                let mut channel = 0;
                while channel < n_block {
                    let mut half = [[S::splat(0.0); 6]; TILE];
                    for j in 0..6 {
                        let mut column = [S::splat(0.0); 6];
                        for i in 0..6 {
                            column[i] = S::load(from.add((i * 6 + j) * position_stride + start + channel));
                        }
                        let column = a_transposed::<S>(column);
                        for i in 0..TILE {
                            half[i][j] = column[i];
                        }
                    }
                    for i in 0..TILE {
                        let row = a_transposed::<S>(half[i]);
                        for j in 0..TILE {
                            S::store(scratch.add((i * TILE + j) * OUT_CHANNELS + channel), row[j]);
                        }
                    }
                    channel += S::LANES;
                }
                for i in 0..TILE.min(height - out_y) {
                    for j in 0..TILE.min(width - out_x) {
                        let row_idx = (batch_idx * height + out_y + i) * width + out_x + j;
                        let pixel = scratch.add((i * TILE + j) * OUT_CHANNELS);
                        finish.row::<S>(pixel, row_idx, start, n_block);
                    }
                }
                start += OUT_CHANNELS;
            }
        }
    }
}

/// A convolution whose kernel [`pays`]; `weights` describes one of the 36 matrices, which follow each other.
///
/// # Safety
/// As [`crate::conv::convolve`].
pub(crate) unsafe fn convolve<S: Simd>(
    context: &Context<'_>,
    walk: Walk,
    weights: Panels,
    finish: Finish,
) -> Result<()> {
    let Panels {
        n: c_out, k: c_in, ..
    } = weights;
    let (high, wide) = (walk.out_height.div_ceil(TILE), walk.out_width.div_ceil(TILE));
    let n_tiles = walk.image.dim(0) * high * wide;
    let (in_stride, out_stride) = (padded(c_in), padded(c_out));
    let tile_bytes = N_POSITIONS * (in_stride + out_stride) * 4;
    let n_chunk = (CHUNK_BYTES / tile_bytes).max(S::MC).min(n_tiles);
    let n_chunks = n_tiles.div_ceil(n_chunk);
    let n_chunk = n_tiles.div_ceil(n_chunks);
    let transformed = context
        .memory
        .take("a Winograd convolution", n_chunk.saturating_mul(tile_bytes))?;
    let input = Ptr(transformed.start().cast::<f32>());
    let products = Ptr(input.at(N_POSITIONS * n_chunk * in_stride));

    let n_row_blocks = n_chunk.div_ceil(S::MC);
    let n_panels = Panels::count(c_out, S::NR);
    let n_panel_blocks = (4 * context.pool.n_threads())
        .div_ceil(N_POSITIONS * n_row_blocks)
        .min(n_panels);
    let n_strips = n_chunk.div_ceil(S::MR);
    let block_rows = n_strips.div_ceil(n_row_blocks) * S::MR;
    let block_len = scratch_len::<S>(block_rows, n_panels.div_ceil(n_panel_blocks), c_in);
    let scratch = context.scratch(
        "a Winograd convolution",
        block_len.max(TILE * TILE * OUT_CHANNELS),
    )?;
    let per_thread = scratch.per_thread;
    let matrix_len = Panels::n_elements(c_out, c_in, S::NR, S::LANES);

    // Tiles per task of the transforms.
    let n_group = (n_chunk / (4 * context.pool.n_threads())).clamp(1, 16);
    for chunk_start in (0..n_tiles).step_by(n_chunk) {
        let chunk_len = n_chunk.min(n_tiles - chunk_start);
        let n_groups = chunk_len.div_ceil(n_group);
        let tiles = |group_idx: usize| {
            let start = chunk_start + group_idx * n_group;
            Tiles {
                walk,
                high,
                wide,
                range: (start, (start + n_group).min(chunk_start + chunk_len)),
            }
        };
        context.run(n_groups, &|group_idx, _| {
            let kernel = TransformIn {
                tiles: tiles(group_idx),
                to: input.at(group_idx * n_group * in_stride),
                position_stride: n_chunk * in_stride,
                row_stride: in_stride,
            };
            // SAFETY: the caller vouches for the image; tasks write disjoint rows of the chunk.
            unsafe { S::vectorize(kernel) };
        })?;
        context.run(
            N_POSITIONS * n_row_blocks * n_panel_blocks,
            &|task_idx, thread_idx| {
                let (rest, row_block) = (task_idx / n_row_blocks, task_idx % n_row_blocks);
                let (position, panel_block) = (rest / n_panel_blocks, rest % n_panel_blocks);
                let strip = |i: usize| (i * n_strips / n_row_blocks * S::MR).min(chunk_len);
                let rows = (strip(row_block), strip(row_block + 1));
                if rows.0 == rows.1 {
                    return;
                }
                let panel = |i: usize| i * n_panels / n_panel_blocks;
                let input = RowMap::dense(Ptr(input.at(position * n_chunk * in_stride)), in_stride);
                let output = RowMap::dense(Ptr(products.at(position * n_chunk * out_stride)), out_stride);
                let block = Block {
                    source: MatrixRows { rows: input, k: c_in },
                    weights: Panels {
                        start: Ptr(weights.start.at(position * matrix_len)),
                        ..weights
                    },
                    finish: Finish::plain(output),
                    rows,
                    panels: (panel(panel_block), panel(panel_block + 1)),
                    scratch: per_thread.of(thread_idx),
                };
                // SAFETY: rows of transformed input were written above; blocks of the products are disjoint.
                unsafe { S::vectorize(block) };
            },
        )?;
        context.run(n_groups, &|group_idx, thread_idx| {
            let kernel = TransformOut {
                tiles: tiles(group_idx),
                from: products.at(group_idx * n_group * out_stride),
                position_stride: n_chunk * out_stride,
                row_stride: out_stride,
                n_channels: c_out,
                finish,
                scratch: per_thread.of(thread_idx),
            };
            // SAFETY: the products were written above; tiles are disjoint in the output.
            unsafe { S::vectorize(kernel) };
        })?;
    }
    Ok(())
}
