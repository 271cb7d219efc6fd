//! Attention in one pass over the keys (Dao et al., arXiv 2205.14135), with the scores transposed.
//!
//! Scores are computed with keys as the rows of a micro-tile and [`Simd::NR`] queries as its columns. Maxima, exponentials and sums
//! are then operations on lanes, and the tile of probabilities is already the packed right-hand side of the second product. Keys and
//! values are packed once per head, to strips like those of a product.
//!
//! Scores keep their products' digits: they are scaled after the largest has been subtracted, on the way to `2^x`. Scaling queries
//! instead would save a multiplication and round every summand once more, and what is lost of a score is lost of its probability.
//!
//! R1. A query's result depends on its own row, the keys and values of its head and the number of keys: lanes do not mix, and keys are
//!     taken in blocks of a length that the head's size alone determines.
//! R2. A hidden key's probability is exactly zero. A query that sees no key at all gets zeros, as torch's `scaled_dot_product_attention`.
//! R3. NaN in a query, or in a key that it sees, makes its result NaN: nothing clamps it away.
#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the `# Safety` sections state what the pointers are valid for, once per function"
)]

use crate::{
    Context,
    gemm::{CHAIN, Depth, STRIP_SPILL, load_up_to, pack_strip, store_up_to, tile},
    operand::{Ptr, View},
    simd::{Kernel, Simd, exp2},
};
use denoised_tensor::Result;
use std::f32::consts::LOG2_E;

/// Panels of queries that share a block of keys while it is in the cache.
const PANELS: usize = 4;

/// Steps of a score's chains: four chains, or more, since an error of a score is one of its probability. Sharp attention, such as T5's
/// without a scale, comes out more than twice as exact as with one chain, for 2 % of the time.
fn score_chain(head_dim: usize) -> usize {
    (head_dim / 4).next_multiple_of(4).clamp(16, CHAIN)
}

/// Checked operands, all `[batch, rows, heads * head_dim]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attention {
    pub(crate) q: View<f32>,
    pub(crate) k: View<f32>,
    pub(crate) v: View<f32>,
    pub(crate) out: View<f32>,
    pub(crate) n_heads: usize,
    pub(crate) n_kv_heads: usize,
    pub(crate) scale: f32,
    pub(crate) is_causal: bool,
    pub(crate) bias: Option<Bias>,
}

/// Bias of the scores: element `(b, h, i, j)` lies at the sum of index times stride; a broadcast dimension has stride 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bias {
    pub(crate) start: Ptr<f32>,
    pub(crate) strides: [usize; 4],
}

impl Attention {
    fn head_dim(&self) -> usize {
        self.q.n_cols() / self.n_heads
    }
    fn n_queries(&self) -> usize {
        self.q.dim(1)
    }
    fn n_keys(&self) -> usize {
        self.k.dim(1)
    }
}

/// Where packed keys and values lie: blocks of keys, each with its strips and room for their spill.
#[derive(Clone, Copy, Debug)]
struct Packed {
    start: Ptr<f32>,
    block_keys: usize,
    n_blocks: usize,
    /// f32 of a block of keys, and of a block of values.
    keys_len: usize,
    values_len: usize,
}

impl Packed {
    fn new<S: Simd>(head_dim: usize, n_keys: usize) -> Self {
        // A block of keys and one of values stay in the second cache.
        let target = if head_dim <= 160 { 192 } else { 96 };
        let block_keys = (target / S::MR * S::MR).min(n_keys.next_multiple_of(S::MR));
        let strips = head_dim.div_ceil(S::MR) * S::MR;
        let pad = |len: usize| (len + STRIP_SPILL).next_multiple_of(16);
        Self {
            start: Ptr(std::ptr::null_mut()),
            block_keys,
            n_blocks: n_keys.div_ceil(block_keys),
            keys_len: pad(block_keys * head_dim),
            values_len: pad(block_keys * strips),
        }
    }

    fn block_len(&self) -> usize {
        self.keys_len + self.values_len
    }

    /// Keys `[strip][head_dim][MR]` of a block of a head, counted over all batch elements.
    fn keys(&self, head_idx: usize, block_idx: usize) -> *mut f32 {
        self.start
            .at((head_idx * self.n_blocks + block_idx) * self.block_len())
    }

    /// Values `[strip of channels][key][MR]`.
    fn values(&self, head_idx: usize, block_idx: usize) -> *mut f32 {
        self.keys(head_idx, block_idx).wrapping_add(self.keys_len)
    }
}

/// Packs one block of keys and values of one head.
#[derive(Clone, Copy)]
struct Pack {
    keys: *mut f32,
    values: *mut f32,
    /// First element of the block's first row, and the distance of rows.
    k: *const f32,
    k_stride: usize,
    v: *const f32,
    v_stride: usize,
    n_keys: usize,
    head_dim: usize,
}

impl Kernel for Pack {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self {
            keys,
            values,
            k,
            k_stride,
            v,
            v_stride,
            n_keys,
            head_dim,
        } = self;
        let mut key_idx = 0;
        while key_idx < n_keys {
            let mut rows = [std::ptr::null(); 16];
            for i in 0..S::MR {
                rows[i] = k.add((key_idx + i).min(n_keys - 1) * k_stride);
            }
            pack_strip::<S>(&rows, head_dim, keys.add(key_idx * head_dim));
            key_idx += S::MR;
        }
        let mut channel = 0;
        while channel < head_dim {
            let n = (head_dim - channel).min(S::MR);
            let to = values.add(channel * n_keys);
            for key_idx in 0..n_keys {
                // Whole vectors: the next row writes over the spill, the last one spills into the padding.
                S::store(
                    to.add(key_idx * S::MR),
                    load_up_to::<S>(v.add(key_idx * v_stride + channel), n),
                );
            }
            channel += S::MR;
        }
    }
}

/// Queries `queries.0 .. queries.1` of one head of one batch element.
#[derive(Clone, Copy)]
struct Attend {
    attention: Attention,
    packed: Packed,
    batch_idx: usize,
    head_idx: usize,
    queries: (usize, usize),
    /// Room for [`attend_scratch`] f32.
    scratch: *mut f32,
}

/// f32 of scratch: panels of queries and of results, maxima and sums, a tile of scores and one of bias.
fn attend_scratch<S: Simd>(head_dim: usize, block_keys: usize) -> usize {
    // The tile of bias also serves to transpose a square of results.
    PANELS * S::NR * (2 * head_dim + 2) + block_keys * S::NR + (block_keys * S::NR).max(S::LANES * S::LANES)
}

impl Kernel for Attend {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self {
            attention,
            packed,
            batch_idx,
            head_idx,
            queries,
            scratch,
        } = self;
        let (head_dim, n_keys) = (attention.head_dim(), attention.n_keys());
        let kv_head_idx =
            batch_idx * attention.n_kv_heads + head_idx * attention.n_kv_heads / attention.n_heads;
        let n_panels = (queries.1 - queries.0).div_ceil(S::NR);
        let panel_len = head_dim * S::NR;
        let results = scratch.add(PANELS * panel_len);
        let maxima = results.add(PANELS * panel_len);
        let sums = maxima.add(PANELS * S::NR);
        let scores = sums.add(PANELS * S::NR);
        let bias_tile = scores.add(packed.block_keys * S::NR);
        let score_chain = score_chain(head_dim);
        let head = |view: &View<f32>, row_idx: usize| {
            view.start
                .at(batch_idx * view.stride(0) + row_idx * view.stride(1) + head_idx * head_dim)
        };

        // What the logarithms' base and, unless the scores are scaled before, the scale leave to do once a maximum is subtracted.
        let is_scaled_before = attention.bias.is_some() || attention.scale <= 0.0;
        let factor = if is_scaled_before {
            LOG2_E
        } else {
            attention.scale * LOG2_E
        };
        for panel_idx in 0..n_panels {
            let panel = scratch.add(panel_idx * panel_len);
            for half in 0..2 {
                let mut rows = [std::ptr::null(); 16];
                for lane in 0..S::LANES {
                    let query_idx = queries.0 + panel_idx * S::NR + half * S::LANES + lane;
                    rows[lane] = head(&attention.q, query_idx.min(queries.1 - 1)).cast_const();
                }
                let to = panel.add(half * S::LANES);
                let mut channel = 0;
                while channel + S::LANES <= head_dim {
                    S::transpose(rows.as_ptr(), S::LANES, channel, to.add(channel * S::NR), S::NR);
                    channel += S::LANES;
                }
                while channel < head_dim {
                    for lane in 0..S::LANES {
                        *to.add(channel * S::NR + lane) = *rows[lane].add(channel);
                    }
                    channel += 1;
                }
            }
            let mut i = 0;
            while i < panel_len {
                S::store(results.add(panel_idx * panel_len + i), S::splat(0.0));
                i += S::LANES;
            }
            for half in 0..2 {
                S::store(
                    maxima.add(panel_idx * S::NR + half * S::LANES),
                    S::splat(f32::NEG_INFINITY),
                );
                S::store(sums.add(panel_idx * S::NR + half * S::LANES), S::splat(0.0));
            }
        }

        for block_idx in 0..packed.n_blocks {
            let first_key = block_idx * packed.block_keys;
            let keys = packed.keys(kv_head_idx, block_idx).cast_const();
            let values = packed.values(kv_head_idx, block_idx).cast_const();
            let in_block = packed.block_keys.min(n_keys - first_key);
            for panel_idx in 0..n_panels {
                let first_query = queries.0 + panel_idx * S::NR;
                let mut n = in_block;
                if attention.is_causal {
                    // Keys that no query of the panel sees.
                    let end = (first_query + S::NR).min(queries.1);
                    n = n.min(end.saturating_sub(first_key));
                }
                if n == 0 {
                    continue;
                }
                let panel = scratch.add(panel_idx * panel_len).cast_const();
                let mut key_idx = 0;
                while key_idx < n {
                    let m = (n - key_idx).min(S::MR);
                    let to = scores.add(key_idx * S::NR);
                    tile::<S>(
                        m,
                        S::NR,
                        Depth {
                            steps: head_dim,
                            chain: score_chain,
                        },
                        keys.add(key_idx * head_dim),
                        panel,
                        std::ptr::null(),
                        to,
                    );
                    key_idx += m;
                }
                if let Some(bias) = attention.bias {
                    let of_head = bias.strides[0] * batch_idx + bias.strides[1] * head_idx;
                    let start = bias.start.at(of_head + bias.strides[3] * first_key).cast_const();
                    fill_bias::<S>(start, bias.strides, (first_query, queries.1), n, bias_tile);
                    let mut i = 0;
                    while i < n * S::NR {
                        let score = S::load(scores.add(i));
                        let biased = S::mul_add(score, S::splat(attention.scale), S::load(bias_tile.add(i)));
                        S::store(scores.add(i), biased);
                        i += S::LANES;
                    }
                } else if is_scaled_before {
                    let mut i = 0;
                    while i < n * S::NR {
                        let scaled = S::mul(S::load(scores.add(i)), S::splat(attention.scale));
                        S::store(scores.add(i), scaled);
                        i += S::LANES;
                    }
                }
                if attention.is_causal && first_key + n > first_query + 1 {
                    for key_idx in 0..n {
                        let n_hidden = (first_key + key_idx).saturating_sub(first_query).min(S::NR);
                        for lane in 0..n_hidden {
                            *scores.add(key_idx * S::NR + lane) = f32::NEG_INFINITY;
                        }
                    }
                }
                let maxima = maxima.add(panel_idx * S::NR);
                let sums = sums.add(panel_idx * S::NR);
                let results = results.add(panel_idx * panel_len);
                exponentials::<S>(scores, n, factor, maxima, sums, results, head_dim);
                let mut channel = 0;
                while channel < head_dim {
                    let m = (head_dim - channel).min(S::MR);
                    let to = results.add(channel * S::NR);
                    let from = values.add(channel * in_block);
                    let depth = Depth {
                        steps: n,
                        chain: CHAIN,
                    };
                    tile::<S>(m, S::NR, depth, from, scores, to, to);
                    channel += m;
                }
            }
        }

        for panel_idx in 0..n_panels {
            for half in 0..2 {
                let first_query = queries.0 + panel_idx * S::NR + half * S::LANES;
                if first_query >= queries.1 {
                    break;
                }
                let n_queries = (queries.1 - first_query).min(S::LANES);
                let offset = half * S::LANES;
                let sum = S::load(sums.add(panel_idx * S::NR + offset));
                // R2: without keys the sum is zero and stays; NaN stays too (R3).
                let inverse = S::select_less(S::splat(0.0), sum, S::div(S::splat(1.0), sum), sum);
                let results = results.add(panel_idx * panel_len + offset);
                let mut channel = 0;
                while channel < head_dim {
                    let n = (head_dim - channel).min(S::LANES);
                    // The tile of scores is free by now.
                    let mut rows = [scores.cast_const(); 16];
                    for i in 0..n {
                        let row = results.add((channel + i) * S::NR);
                        S::store(row, S::mul(S::load(row), inverse));
                        rows[i] = row.cast_const();
                    }
                    S::transpose(rows.as_ptr(), n, 0, bias_tile, S::LANES);
                    for lane in 0..n_queries {
                        let to = head(&attention.out, first_query + lane).add(channel);
                        store_up_to::<S>(to, S::load(bias_tile.add(lane * S::LANES)), n);
                    }
                    channel += S::LANES;
                }
            }
        }
    }
}

/// Bias of `n_keys` keys for the [`Simd::NR`] queries from `queries.0` on, transposed as the scores; queries beyond `queries.1`
/// repeat the last one. `start` is the bias of query 0 and the block's first key.
#[inline(always)]
unsafe fn fill_bias<S: Simd>(
    start: *const f32,
    strides: [usize; 4],
    queries: (usize, usize),
    n_keys: usize,
    to: *mut f32,
) {
    let [.., query_stride, key_stride] = strides;
    for half in 0..2 {
        let to = to.add(half * S::LANES);
        let mut rows = [std::ptr::null(); 16];
        for lane in 0..S::LANES {
            let query_idx = (queries.0 + half * S::LANES + lane).min(queries.1 - 1);
            rows[lane] = start.add(query_idx * query_stride);
        }
        let mut key_idx = 0;
        if query_stride == 0 {
            while key_idx < n_keys {
                S::store(
                    to.add(key_idx * S::NR),
                    S::splat(*start.add(key_idx * key_stride)),
                );
                key_idx += 1;
            }
        } else if key_stride == 1 {
            while key_idx + S::LANES <= n_keys {
                S::transpose(rows.as_ptr(), S::LANES, key_idx, to.add(key_idx * S::NR), S::NR);
                key_idx += S::LANES;
            }
        }
        while key_idx < n_keys {
            for lane in 0..S::LANES {
                *to.add(key_idx * S::NR + lane) = *rows[lane].add(key_idx * key_stride);
            }
            key_idx += 1;
        }
    }
}

/// Turns `[n][NR]` scores, of base `2^(1/factor)`, into probabilities relative to the new maxima, and brings sums and results to those maxima.
#[inline(always)]
unsafe fn exponentials<S: Simd>(
    scores: *mut f32,
    n: usize,
    factor: f32,
    maxima: *mut f32,
    sums: *mut f32,
    results: *mut f32,
    head_dim: usize,
) {
    let factor = S::splat(factor);
    for half in 0..2 {
        let offset = half * S::LANES;
        let scores = scores.add(offset);
        let old = S::load(maxima.add(offset));
        let mut new = old;
        for i in 0..n {
            // A NaN score leaves the maximum alone and shows up in its exponential.
            new = S::max(S::load(scores.add(i * S::NR)), new);
        }
        S::store(maxima.add(offset), new);
        // While only hidden keys were seen the maximum is -inf, and any finite number may stand for it.
        let new = S::select_less(new, S::splat(f32::MIN), S::splat(0.0), new);
        let rescale = exp2::<S>(S::mul(S::sub(old, new), factor));
        let mut partial = [S::splat(0.0); 4];
        for i in 0..n {
            let distance = S::sub(S::load(scores.add(i * S::NR)), new);
            let probability = exp2::<S>(S::mul(distance, factor));
            partial[i % 4] = S::add(partial[i % 4], probability);
            S::store(scores.add(i * S::NR), probability);
        }
        let sum = S::add(S::add(partial[0], partial[1]), S::add(partial[2], partial[3]));
        S::store(
            sums.add(offset),
            S::mul_add(S::load(sums.add(offset)), rescale, sum),
        );
        for channel in 0..head_dim {
            let result = results.add(channel * S::NR + offset);
            S::store(result, S::mul(S::load(result), rescale));
        }
    }
}

/// Attention of all batch elements and heads.
///
/// # Safety
/// The views are checked: equal batch, `n_heads` divides the columns of `q`, `n_kv_heads` those of `k` and `v`, into heads of one
/// size; `out` overlaps nothing.
pub(crate) unsafe fn attend<S: Simd>(context: &Context<'_>, attention: Attention) -> Result<()> {
    let (head_dim, n_keys, n_queries) = (attention.head_dim(), attention.n_keys(), attention.n_queries());
    let (n_batch, n_heads, n_kv_heads) = (attention.q.dim(0), attention.n_heads, attention.n_kv_heads);
    let mut packed = Packed::new::<S>(head_dim, n_keys);
    let packed_len = (n_batch * n_kv_heads * packed.n_blocks).saturating_mul(packed.block_len());
    let region = context
        .memory
        .take("packed keys and values", packed_len.saturating_mul(4))?;
    packed.start = Ptr(region.start().cast());
    context.run(n_batch * n_kv_heads * packed.n_blocks, &|task_idx, _| {
        let (head_idx, block_idx) = (task_idx / packed.n_blocks, task_idx % packed.n_blocks);
        let (batch_idx, kv_head_idx) = (head_idx / n_kv_heads, head_idx % n_kv_heads);
        let first_key = block_idx * packed.block_keys;
        let first = |view: &View<f32>| {
            let offset = batch_idx * view.stride(0) + first_key * view.stride(1) + kv_head_idx * head_dim;
            view.start.at(offset).cast_const()
        };
        let pack = Pack {
            keys: packed.keys(head_idx, block_idx),
            values: packed.values(head_idx, block_idx),
            k: first(&attention.k),
            k_stride: attention.k.stride(1),
            v: first(&attention.v),
            v_stride: attention.v.stride(1),
            n_keys: packed.block_keys.min(n_keys - first_key),
            head_dim,
        };
        // SAFETY: the views are checked; each block has its own room, spill included.
        unsafe { S::vectorize(pack) };
    })?;
    let scratch = context.scratch("attention", attend_scratch::<S>(head_dim, packed.block_keys))?;
    let per_thread = scratch.per_thread;
    let group = PANELS * S::NR;
    let n_groups = n_queries.div_ceil(group);
    context.run(n_batch * n_heads * n_groups, &|task_idx, thread_idx| {
        let (rest, group_idx) = (task_idx / n_groups, task_idx % n_groups);
        let task = Attend {
            attention,
            packed,
            batch_idx: rest / n_heads,
            head_idx: rest % n_heads,
            queries: (group_idx * group, ((group_idx + 1) * group).min(n_queries)),
            scratch: per_thread.of(thread_idx),
        };
        // SAFETY: keys and values were packed above; tasks write disjoint queries and heads; the scratch is this thread's.
        unsafe { S::vectorize(task) };
    })
}
