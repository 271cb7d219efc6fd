//! Attention: on tensor cores for 16-bit types and heads of up to 512 channels, by plain arithmetic for f32 and wider heads.

use super::{Extents, MAX_GRID, Ops};
use crate::{
    module::Kernel,
    operand::{View, small},
};
use denoised_tensor::{AttentionSpec, DType, Result, Tensor, check};

/// A width that heads are padded to on tensor cores.
struct Flash {
    width: usize,
    /// Keys of a tile.
    n_keys: usize,
    /// With one tile of queries per warp.
    short: Kernel,
    /// With two, if there is one: for rows of whole pieces of 16 bytes.
    tall: Option<Kernel>,
}

const fn flash(width: usize, n_keys: usize, short: &'static str, tall: Option<&'static str>) -> Flash {
    const fn kernel(name: &'static str) -> Kernel {
        Kernel { file: "flash", name }
    }
    Flash {
        width,
        n_keys,
        short: kernel(short),
        tall: match tall {
            Some(name) => Some(kernel(name)),
            None => None,
        },
    }
}

/// As `flash.cu` defines them, narrowest first.
const WIDTHS: [Flash; 9] = [
    flash(32, 64, "flash_32", None),
    flash(48, 64, "flash_48", Some("flash_48_tall")),
    flash(64, 64, "flash_64", Some("flash_64_tall")),
    flash(80, 64, "flash_80", Some("flash_80_tall")),
    flash(96, 64, "flash_96", None),
    flash(128, 48, "flash_128", Some("flash_128_tall")),
    flash(160, 64, "flash_160", None),
    flash(256, 32, "flash_256", None),
    flash(512, 16, "flash_512", None),
];

impl Flash {
    /// The kernel for so many queries and heads, and what a batch of them is launched with. The size of the batch has no say, so that it
    /// does not change results.
    fn launch(
        &self,
        n_queries: usize,
        n_heads: usize,
        n_batch: u32,
        is_vector: bool,
        n_multiprocessors: usize,
    ) -> (Kernel, Extents) {
        let tall_is_busy =
            n_queries > GROUP && n_queries.div_ceil(2 * GROUP) * n_heads >= n_multiprocessors / 2;
        let (kernel, n_tiles) = match self.tall {
            Some(tall) if is_vector && tall_is_busy => (tall, 2),
            _ => (self.short, 1),
        };
        let n_own = n_tiles * GROUP;
        // Wide rows of queries stay beside the keys and values; others make room for them.
        let slice = self.width.min(SLICE);
        let query_len = n_own * (self.width + 8);
        let key_len = self.n_keys * (self.width + 8 + slice + 8);
        let shared_len = if n_tiles * self.width > 128 {
            query_len + key_len
        } else {
            query_len.max(key_len)
        };
        let extents = Extents {
            grid: [
                n_queries.div_ceil(n_own) as u32,
                (n_heads * (self.width / slice)) as u32,
                n_batch,
            ],
            block: 128,
            shared_bytes: (shared_len * 2) as u32,
        };
        (kernel, extents)
    }
}

const ATTENTION: Kernel = Kernel {
    file: "attention",
    name: "attention",
};

/// Queries of a block on tensor cores with one tile per warp.
const GROUP: usize = 64;

/// Most channels that a block makes.
const SLICE: usize = 256;

/// Without tensor cores: queries of a block, and keys of a tile.
const QUERIES: usize = 16;
const KEYS: usize = 32;

/// Mirrors `AttentionArgs` of `flash.cu` and `attention.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct AttentionArgs {
    q: u64,
    k: u64,
    v: u64,
    out: u64,
    bias: u64,
    q_strides: [i64; 2],
    k_strides: [i64; 2],
    v_strides: [i64; 2],
    out_strides: [i64; 2],
    bias_strides: [i64; 4],
    n_queries: i32,
    n_keys: i32,
    n_heads: i32,
    n_kv_heads: i32,
    head_dim: i32,
    scale: f32,
    is_causal: i32,
    is_vector: i32,
    out_is_vector: i32,
}

pub(crate) fn attention(
    ops: Ops<'_>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec<'_>,
    out: &Tensor,
) -> Result<()> {
    let op = "attention";
    let extents = check::attention(q, k, v, spec, out)?;
    let (q, k, v) = (
        ops.view(op, "q", q)?,
        ops.view(op, "k", k)?,
        ops.view(op, "v", v)?,
    );
    let out = ops.view(op, "out", out)?;
    let bias = spec.bias.map(|bias| ops.view(op, "bias", bias)).transpose()?;
    let head_dim = extents.head_dim;
    let has_pieces = |view: &View| view.has_vector_rows() && head_dim.is_multiple_of(8);
    for view in [&q, &k, &v] {
        small(op, view.strides[1])?;
    }
    let strides = |view: &View| [view.strides[0] as i64, view.strides[1] as i64];
    let is_vector = [&q, &k, &v].into_iter().all(has_pieces);
    let args = AttentionArgs {
        q: q.start,
        k: k.start,
        v: v.start,
        out: out.start,
        bias: bias.map_or(0, |bias| bias.start),
        q_strides: strides(&q),
        k_strides: strides(&k),
        v_strides: strides(&v),
        out_strides: strides(&out),
        bias_strides: extents.bias_strides.map(|stride| stride as i64),
        n_queries: small(op, extents.n_queries)?,
        n_keys: small(op, extents.n_keys)?,
        n_heads: small(op, spec.n_heads)?,
        n_kv_heads: small(op, spec.n_kv_heads)?,
        head_dim: small(op, head_dim)?,
        scale: spec.scale,
        is_causal: i32::from(spec.is_causal),
        is_vector: i32::from(is_vector),
        out_is_vector: i32::from(has_pieces(&out)),
    };
    let n_batch = small(op, extents.n_batch)? as u32;
    let flash = WIDTHS.iter().find(|flash| head_dim <= flash.width);
    let (kernel, launch) = match flash.filter(|_| q.dtype != DType::F32) {
        Some(flash) => flash.launch(
            extents.n_queries,
            spec.n_heads,
            n_batch,
            is_vector,
            ops.device.n_multiprocessors() as usize,
        ),
        None => {
            let n_slices = head_dim.div_ceil(SLICE);
            let launch = Extents {
                grid: [
                    extents.n_queries.div_ceil(QUERIES) as u32,
                    (spec.n_heads * n_slices) as u32,
                    n_batch,
                ],
                block: 128,
                shared_bytes: (KEYS * (SLICE + 1) * 4) as u32,
            };
            (ATTENTION, launch)
        }
    };
    // A grid counts to so many: larger batches in turns.
    for first in (0..n_batch).step_by(MAX_GRID as usize) {
        let at = |start: u64, stride: i64, size: u64| start + u64::from(first) * stride as u64 * size;
        let size = q.dtype.size_bytes() as u64;
        let part = AttentionArgs {
            q: at(args.q, args.q_strides[0], size),
            k: at(args.k, args.k_strides[0], size),
            v: at(args.v, args.v_strides[0], size),
            out: at(args.out, args.out_strides[0], size),
            bias: at(args.bias, args.bias_strides[0], 4),
            ..args
        };
        let [x, y, _] = launch.grid;
        let part_launch = Extents {
            grid: [x, y, (n_batch - first).min(MAX_GRID)],
            ..launch
        };
        // SAFETY: all operands were checked.
        unsafe { ops.launch(kernel, q.dtype, part_launch, &part)? };
    }
    Ok(())
}
