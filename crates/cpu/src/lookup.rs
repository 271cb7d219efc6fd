//! Ops that move elements and compute nothing: tables, patches, axes, enlarging, dtypes; and the embeddings of positions in time.
//!
//! R1. Rows of the output are copied or gathered independently of each other; the operands were checked by the caller.
#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the `# Safety` sections state what the pointers are valid for, once per function"
)]

use crate::{
    Context,
    norm::by_rows,
    operand::{RowMap, View},
    simd::{Kernel, Simd},
};
use denoised_tensor::{DType, MAX_DIMS, PatchOrder, Result, RopeStyle, TimestepSpec};

/// Copies row `row_of(i)` of somewhere to row `i` of `out`.
///
/// # Safety
/// `row_of` gives addresses valid for a row's reads; `out` has `n_rows` rows of `n_cols` and overlaps none of them.
pub(crate) unsafe fn gather(
    context: &Context<'_>,
    out: RowMap<f32>,
    n_rows: usize,
    n_cols: usize,
    row_of: &(dyn Fn(usize) -> *const f32 + Sync),
) -> Result<()> {
    by_rows(context, n_rows, n_cols, &|range| {
        for row_idx in range.0..range.1 {
            // SAFETY: as the caller vouches; rows of the output are disjoint.
            unsafe { out.row(row_idx).copy_from_nonoverlapping(row_of(row_idx), n_cols) };
        }
    })
}

/// Sinusoidal embedding. Every step is rounded to f32 as in the reference (diffusers' `get_timestep_embedding`), because the
/// rounding of a large angle is larger than everything else; sine and cosine themselves are exact.
///
/// # Safety
/// `out` has a row of even length for each of the timesteps.
pub(crate) unsafe fn timestep_embedding(timesteps: &View<f32>, spec: &TimestepSpec, out: &View<f32>) {
    let half = out.n_cols() / 2;
    let rows = out.rows();
    let log_period = -f64::from(spec.max_period).ln() as f32;
    let n_steps = half as f32 - spec.downscale_freq_shift;
    for batch_idx in 0..timesteps.dim(0) {
        let timestep = *timesteps.start.at(batch_idx * timesteps.stride(0));
        let row = rows.row(batch_idx);
        for i in 0..half {
            let exponent = log_period * i as f32 / n_steps;
            let frequency = f64::from(exponent).exp() as f32;
            let angle = f64::from(spec.scale * (timestep * frequency));
            let (sin, cos) = (angle.sin() as f32, angle.cos() as f32);
            let (first, second) = if spec.flip_sin_to_cos {
                (cos, sin)
            } else {
                (sin, cos)
            };
            *row.add(i) = first;
            *row.add(half + i) = second;
        }
    }
}

/// Between an image `[batch, h, w, c]` and its patches `[batch, tokens, p p c]`; `to_tokens` says which way.
///
/// # Safety
/// The shapes fit each other; the destination is writable and overlaps nothing.
pub(crate) unsafe fn patches(
    context: &Context<'_>,
    image: &View<f32>,
    tokens: &View<f32>,
    patch: usize,
    order: PatchOrder,
    to_tokens: bool,
) -> Result<()> {
    let (wide, per_image) = (image.dim(2) / patch, tokens.dim(1));
    let n_channels = image.n_cols();
    let token_rows = tokens.rows();
    by_rows(context, tokens.dim(0) * per_image, tokens.n_cols(), &|range| {
        for row_idx in range.0..range.1 {
            let (batch_idx, token_idx) = (row_idx / per_image, row_idx % per_image);
            let (y, x) = (token_idx / wide * patch, token_idx % wide * patch);
            let token = token_rows.row(row_idx);
            for i in 0..patch * patch {
                let (dy, dx) = (i / patch, i % patch);
                let offset =
                    batch_idx * image.stride(0) + (y + dy) * image.stride(1) + (x + dx) * image.stride(2);
                let pixel = image.start.at(offset);
                // Features of this pixel: first one and their distance.
                let (first, step) = match order {
                    PatchOrder::SpatialFirst => (i * n_channels, 1),
                    PatchOrder::ChannelFirst => (i, patch * patch),
                };
                for channel in 0..n_channels {
                    let (feature, channel) = (
                        token.wrapping_add(first + channel * step),
                        pixel.wrapping_add(channel),
                    );
                    let (from, to) = if to_tokens {
                        (channel, feature)
                    } else {
                        (feature, channel)
                    };
                    // SAFETY: both lie in their views; each destination belongs to one token.
                    unsafe { *to = *from };
                }
            }
        }
    })
}

/// `out`'s dimension `i` is `x`'s dimension `axes[i]`.
///
/// # Safety
/// The shapes fit; `out` is writable and overlaps nothing.
pub(crate) unsafe fn permute(
    context: &Context<'_>,
    x: &View<f32>,
    axes: &[usize],
    out: &View<f32>,
) -> Result<()> {
    let n_dims = out.n_dims();
    let mut strides = [0; MAX_DIMS];
    for (stride, &axis) in strides.iter_mut().zip(axes) {
        *stride = x.stride(axis);
    }
    let (n_cols, step) = (out.n_cols(), strides[n_dims - 1]);
    let out_rows = out.rows();
    by_rows(context, out.shape.n_elements() / n_cols, n_cols, &|range| {
        for row_idx in range.0..range.1 {
            let mut rest = row_idx;
            let mut offset = 0;
            for dim_idx in (0..n_dims - 1).rev() {
                offset += rest % out.dim(dim_idx) * strides[dim_idx];
                rest /= out.dim(dim_idx);
            }
            let to = out_rows.row(row_idx);
            for i in 0..n_cols {
                // SAFETY: the element lies in `x`; rows of the output are disjoint.
                unsafe { *to.add(i) = *x.start.at(offset + i * step) };
            }
        }
    })
}

/// Rotates pairs of each head.
#[derive(Clone, Copy)]
pub(crate) struct Rope {
    pub(crate) x: RowMap<f32>,
    pub(crate) out: RowMap<f32>,
    pub(crate) cos: RowMap<f32>,
    pub(crate) sin: RowMap<f32>,
    pub(crate) n_tokens: usize,
    pub(crate) n_heads: usize,
    pub(crate) half: usize,
    pub(crate) style: RopeStyle,
}

#[derive(Clone, Copy)]
struct RopeRows {
    rope: Rope,
    rows: (usize, usize),
}

impl Kernel for RopeRows {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { rope, rows } = self;
        let half = rope.half;
        for row_idx in rows.0..rows.1 {
            let (cos, sin) = (
                rope.cos.row(row_idx % rope.n_tokens),
                rope.sin.row(row_idx % rope.n_tokens),
            );
            for head_idx in 0..rope.n_heads {
                let x = rope.x.row(row_idx).add(head_idx * 2 * half);
                let out = rope.out.row(row_idx).add(head_idx * 2 * half);
                let (second, step) = match rope.style {
                    RopeStyle::Interleaved => (1, 2),
                    RopeStyle::Halves => (half, 1),
                };
                for i in 0..half {
                    let (c, s) = (*cos.add(i), *sin.add(i));
                    let (p, q) = (*x.add(i * step), *x.add(i * step + second));
                    *out.add(i * step) = p * c - q * s;
                    *out.add(i * step + second) = q * c + p * s;
                }
            }
        }
    }
}

/// Rotary embedding of `n_rows` rows.
///
/// # Safety
/// The operands are checked; `out` overlaps `x` only if it is `x`.
pub(crate) unsafe fn rope<S: Simd>(context: &Context<'_>, rope: Rope, n_rows: usize) -> Result<()> {
    by_rows(context, n_rows, rope.n_heads * rope.half * 2, &|rows| {
        // SAFETY: the caller vouches for the operands; tasks have disjoint rows.
        unsafe { S::vectorize(RopeRows { rope, rows }) };
    })
}

/// Copies `x` to `out` with conversion. Views of bytes: strides count elements of the dtypes. Float to float rounds to nearest even,
/// and so does an integer to a float.
///
/// # Safety
/// The views are checked, `x` broadcasts to `out`, and the pair of dtypes is one of [`converts`].
pub(crate) unsafe fn convert(
    context: &Context<'_>,
    x: &View<u8>,
    from: DType,
    out: &View<u8>,
    to: DType,
) -> Result<()> {
    let n_dims = out.n_dims();
    let n_missing = n_dims - x.n_dims();
    let n_cols = out.n_cols();
    let stride = |dim_idx: usize| match dim_idx.checked_sub(n_missing) {
        Some(own_idx) if x.dim(own_idx) > 1 => x.stride(own_idx),
        _ => 0,
    };
    let step = stride(n_dims - 1);
    by_rows(context, out.shape.n_elements() / n_cols, n_cols, &|range| {
        for row_idx in range.0..range.1 {
            let mut rest = row_idx;
            let (mut source, mut target) = (0, 0);
            for dim_idx in (0..n_dims - 1).rev() {
                let i = rest % out.dim(dim_idx);
                rest /= out.dim(dim_idx);
                source += i * stride(dim_idx);
                target += i * out.stride(dim_idx);
            }
            let source = x.start.at(source * from.size_bytes());
            let target = out.start.at(target * to.size_bytes());
            // SAFETY: both rows lie in their views; rows of the output are disjoint.
            unsafe { convert_row(source, from, step, target, to, n_cols) };
        }
    })
}

unsafe fn convert_row(
    from: *const u8,
    from_dtype: DType,
    step: usize,
    to: *mut u8,
    to_dtype: DType,
    n: usize,
) {
    if from_dtype == to_dtype {
        let size = to_dtype.size_bytes();
        if step == 1 {
            to.copy_from_nonoverlapping(from, n * size);
        } else {
            for i in 0..n {
                to.add(i * size)
                    .copy_from_nonoverlapping(from.add(i * step * size), size);
            }
        }
        return;
    }
    for i in 0..n {
        let value = match from_dtype {
            DType::F32 => *from.cast::<f32>().add(i * step),
            DType::F16 => (*from.cast::<half::f16>().add(i * step)).to_f32(),
            DType::BF16 => (*from.cast::<half::bf16>().add(i * step)).to_f32(),
            DType::I32 => *from.cast::<i32>().add(i * step) as f32,
            DType::U8 => f32::from(*from.add(i * step)),
        };
        match to_dtype {
            DType::F32 => *to.cast::<f32>().add(i) = value,
            DType::F16 => *to.cast::<half::f16>().add(i) = half::f16::from_f32(value),
            DType::BF16 => *to.cast::<half::bf16>().add(i) = half::bf16::from_f32(value),
            // Refused by the contract's check of `copy`.
            DType::I32 | DType::U8 => {}
        }
    }
}
