//! Attention: on tensor cores for 16-bit types and heads of up to 256 channels, by plain arithmetic for f32 and wider heads.

use super::{Extents, Ops};
use crate::{
    module::Kernel,
    operand::{View, small},
};
use denoised_tensor::{AttentionSpec, DType, Result, Tensor, check};

/// A width that heads are padded to on tensor cores.
struct Flash {
    kernel: Kernel,
    width: usize,
    /// Rows in shared memory: two stages of keys and values, and the queries where they stay.
    n_shared_rows: usize,
}

const fn flash(name: &'static str, width: usize, n_shared_rows: usize) -> Flash {
    Flash {
        kernel: Kernel { file: "flash", name },
        width,
        n_shared_rows,
    }
}

/// As `flash.cu` defines them, narrowest first.
const WIDTHS: [Flash; 6] = [
    flash("flash_32", 32, 4 * 64),
    flash("flash_64", 64, 4 * 64),
    flash("flash_96", 96, 4 * 64),
    flash("flash_128", 128, 4 * 64),
    flash("flash_160", 160, 4 * 32),
    flash("flash_256", 256, 4 * 32 + 64),
];

const ATTENTION: Kernel = Kernel {
    file: "attention",
    name: "attention",
};

/// Queries of a block on tensor cores and without; there also the channels that a block makes, and its keys.
const FLASH_QUERIES: usize = 64;
const QUERIES: usize = 16;
const SLICE: usize = 256;
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
    let is_vector = [&q, &k, &v].iter().all(|view| view.has_vector_rows()) && head_dim.is_multiple_of(8);
    let strides = |view: &View| [view.strides[0] as i64, view.strides[1] as i64];
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
    };
    let n_batch = small(op, extents.n_batch)? as u32;
    let flash = WIDTHS.iter().find(|flash| head_dim <= flash.width);
    let (kernel, launch) = match flash.filter(|_| q.dtype != DType::F32) {
        Some(flash) => {
            let launch = Extents {
                grid: [
                    extents.n_queries.div_ceil(FLASH_QUERIES) as u32,
                    spec.n_heads as u32,
                    n_batch,
                ],
                block: 128,
                shared_bytes: (flash.n_shared_rows * (flash.width + 8) * 2) as u32,
            };
            (flash.kernel, launch)
        }
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
    // SAFETY: all operands were checked.
    unsafe { ops.launch(kernel, q.dtype, launch, &args) }
}
