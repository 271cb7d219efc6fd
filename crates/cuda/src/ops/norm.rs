//! Norms.

use super::{Extents, Ops};
use crate::{
    module::Kernel,
    operand::{Rows, View, activation_code, small},
    weights::{self, Form},
};
use denoised_tensor::{Activation, DType, Modulation, Result, Tensor, Weight, check};

const fn kernel(name: &'static str) -> Kernel {
    Kernel { file: "norm", name }
}

const LAYER_NORM_NARROW: Kernel = kernel("layer_norm_narrow");
const LAYER_NORM_WIDE: Kernel = kernel("layer_norm_wide");
const RMS_NORM_NARROW: Kernel = kernel("rms_norm_narrow");
const RMS_NORM_WIDE: Kernel = kernel("rms_norm_wide");
const MATCH_NORM: Kernel = kernel("match_norm");
const GROUP_NORM_STATISTICS: Kernel = kernel("group_norm_statistics");
const GROUP_NORM_COMBINE: Kernel = kernel("group_norm_combine");
const GROUP_NORM_APPLY: Kernel = kernel("group_norm_apply");

/// Longer rows have a block each, shorter ones a warp.
const NARROW_COLS: usize = 1024;

/// Positions whose statistics are worth a block, and the most blocks per batch element.
const CHUNK_POSITIONS: usize = 32;
const MAX_CHUNKS: usize = 256;

/// Mirrors `LayerNormArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LayerNormArgs {
    x: Rows,
    out: Rows,
    weight: u64,
    bias: u64,
    scale: u64,
    shift: u64,
    scale_stride: i64,
    shift_stride: i64,
    n_rows: i64,
    rows_per_batch: i64,
    n_cols: i32,
    eps: f32,
    is_vector: i32,
}

/// Mirrors `RmsNormArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RmsNormArgs {
    x: Rows,
    out: Rows,
    weight: u64,
    n_units: i64,
    units_per_row: i32,
    group_len: i32,
    eps: f32,
    is_vector: i32,
}

/// Mirrors `MatchNormArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct MatchNormArgs {
    x: Rows,
    like: Rows,
    out: Rows,
    n_units: i64,
    units_per_row: i32,
    group_len: i32,
    is_vector: i32,
}

/// Mirrors `GroupNormArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GroupNormArgs {
    x: Rows,
    out: Rows,
    weight: u64,
    bias: u64,
    partials: u64,
    normals: u64,
    n_positions: i64,
    chunk_len: i64,
    n_chunks: i32,
    n_channels: i32,
    n_groups: i32,
    n_batch: i32,
    eps: f32,
    activation: i32,
    is_vector: i32,
}

pub(crate) fn layer_norm(
    ops: Ops<'_>,
    x: &Tensor,
    affine: Option<(&Weight, Option<&Weight>)>,
    eps: f32,
    modulation: Option<Modulation<'_>>,
    out: &Tensor,
) -> Result<()> {
    let op = "layer_norm";
    let extents = check::layer_norm(x, affine, modulation.as_ref(), out)?;
    let (x, out) = (ops.view(op, "x", x)?, ops.view(op, "out", out)?);
    let vector = |name, weight: &Weight| weights::start(op, name, weight, Form::Wide, ops.device);
    let (weight, bias) = match affine {
        None => (0, 0),
        Some((weight, None)) => (vector("weight", weight)?, 0),
        Some((weight, Some(bias))) => (vector("weight", weight)?, vector("bias", bias)?),
    };
    let mut is_vector = x.has_vector_rows() && out.has_vector_rows();
    let mut per_batch = [(0, 0); 2];
    if let Some(modulation) = modulation {
        for (place, (name, tensor)) in per_batch
            .iter_mut()
            .zip([("scale", modulation.scale), ("shift", modulation.shift)])
        {
            let view = ops.view(op, name, tensor)?;
            is_vector &= view.has_vector_rows();
            *place = (
                view.start,
                if view.dim(0) > 1 {
                    view.strides[0] as i64
                } else {
                    0
                },
            );
        }
    }
    let args = LayerNormArgs {
        x: x.rows(op)?,
        out: out.rows(op)?,
        weight,
        bias,
        scale: per_batch[0].0,
        shift: per_batch[1].0,
        scale_stride: per_batch[0].1,
        shift_stride: per_batch[1].1,
        n_rows: extents.n_rows as i64,
        rows_per_batch: extents.rows_per_batch as i64,
        n_cols: small(op, extents.n_cols)?,
        eps,
        is_vector: i32::from(is_vector),
    };
    let (kernel, extents) = by_width(
        ops,
        extents.n_cols,
        extents.n_rows,
        LAYER_NORM_NARROW,
        LAYER_NORM_WIDE,
    );
    // SAFETY: all operands were checked.
    unsafe { ops.launch(kernel, x.dtype, extents, &args) }
}

pub(crate) fn rms_norm(
    ops: Ops<'_>,
    x: &Tensor,
    weight: Option<&Weight>,
    group_len: usize,
    eps: f32,
    out: &Tensor,
) -> Result<()> {
    let op = "rms_norm";
    let extents = check::rms_norm(x, weight, group_len, out)?;
    let (x, out) = (ops.view(op, "x", x)?, ops.view(op, "out", out)?);
    let units_per_row = extents.n_cols / group_len;
    let n_units = extents.n_rows * units_per_row;
    let vector_len = 16 / x.dtype.size_bytes();
    let args = RmsNormArgs {
        x: x.rows(op)?,
        out: out.rows(op)?,
        weight: match weight {
            Some(weight) => weights::start(op, "weight", weight, Form::Wide, ops.device)?,
            None => 0,
        },
        n_units: n_units as i64,
        units_per_row: small(op, units_per_row)?,
        group_len: small(op, group_len)?,
        eps,
        is_vector: i32::from(
            x.has_vector_rows() && out.has_vector_rows() && group_len.is_multiple_of(vector_len),
        ),
    };
    let (kernel, extents) = by_width(ops, group_len, n_units, RMS_NORM_NARROW, RMS_NORM_WIDE);
    // SAFETY: all operands were checked.
    unsafe { ops.launch(kernel, x.dtype, extents, &args) }
}

pub(crate) fn match_norm(
    ops: Ops<'_>,
    x: &Tensor,
    like: &Tensor,
    group_len: usize,
    out: &Tensor,
) -> Result<()> {
    let op = "match_norm";
    let extents = check::match_norm(x, like, group_len, out)?;
    let (x, like, out) = (
        ops.view(op, "x", x)?,
        ops.view(op, "like", like)?,
        ops.view(op, "out", out)?,
    );
    let units_per_row = extents.n_cols / group_len;
    let n_units = extents.n_rows * units_per_row;
    let vector_len = 16 / x.dtype.size_bytes();
    let has_vectors = [x, like, out].iter().all(View::has_vector_rows);
    let args = MatchNormArgs {
        x: x.rows(op)?,
        like: like.rows(op)?,
        out: out.rows(op)?,
        n_units: n_units as i64,
        units_per_row: small(op, units_per_row)?,
        group_len: small(op, group_len)?,
        is_vector: i32::from(has_vectors && group_len.is_multiple_of(vector_len)),
    };
    let (kernel, extents) = by_width(ops, 1, n_units, MATCH_NORM, MATCH_NORM);
    // SAFETY: all operands were checked.
    unsafe { ops.launch(kernel, x.dtype, extents, &args) }
}

/// A warp or a block for each of `n_units` of `len` elements.
fn by_width(ops: Ops<'_>, len: usize, n_units: usize, narrow: Kernel, wide: Kernel) -> (Kernel, Extents) {
    let (kernel, per_block) = if len <= NARROW_COLS {
        (narrow, 8)
    } else {
        (wide, 1)
    };
    // Enough to keep the device busy; their loop takes the rest.
    let most = 32 * ops.device.n_multiprocessors() as usize;
    let extents = Extents {
        grid: [n_units.div_ceil(per_block).min(most) as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
    };
    (kernel, extents)
}

pub(crate) fn group_norm(
    ops: Ops<'_>,
    x: &Tensor,
    affine: (&Weight, &Weight),
    n_groups: usize,
    eps: f32,
    activation: Activation,
    out: &Tensor,
) -> Result<()> {
    let op = "group_norm";
    let extents = check::group_norm(x, affine, n_groups, out)?;
    let (x, out) = (ops.view(op, "x", x)?, ops.view(op, "out", out)?);
    let (n_batch, n_positions, n_channels) = (extents.n_batch, extents.n_positions, extents.n_channels);
    // By the shape of one batch element alone, as are all sums.
    let n_chunks = (n_positions / CHUNK_POSITIONS).clamp(1, MAX_CHUNKS);
    let chunk_len = n_positions.div_ceil(n_chunks);
    let n_chunks = n_positions.div_ceil(chunk_len);
    let n_partials = n_batch * n_chunks * n_groups * 2;
    let n_normals = n_batch * n_channels * 2;
    let scratch = ops.memory.take(
        || "statistics of a group norm".to_owned(),
        4 * (n_partials + n_normals),
    )?;
    let is_vector = x.has_vector_rows() && out.has_vector_rows();
    let args = GroupNormArgs {
        x: x.rows(op)?,
        out: out.rows(op)?,
        weight: weights::start(op, "weight", affine.0, Form::Wide, ops.device)?,
        bias: weights::start(op, "bias", affine.1, Form::Wide, ops.device)?,
        partials: scratch.start(),
        normals: scratch.start() + 4 * n_partials as u64,
        n_positions: n_positions as i64,
        chunk_len: chunk_len as i64,
        n_chunks: small(op, n_chunks)?,
        n_channels: small(op, n_channels)?,
        n_groups: small(op, n_groups)?,
        n_batch: small(op, n_batch)?,
        eps,
        activation: activation_code(activation),
        is_vector: i32::from(is_vector),
    };
    let vector_len = if is_vector { 16 / x.dtype.size_bytes() } else { 1 };
    let n_lanes = (256 / (n_channels / vector_len)).max(1);
    let statistics = Extents {
        grid: [small(op, n_chunks * n_batch)? as u32, 1, 1],
        block: 256,
        // Sums per group twice, and per lane and channel.
        shared_bytes: small(op, 4 * (2 * n_groups + n_lanes * n_channels))? as u32,
    };
    let combine = Extents {
        grid: [(n_batch * n_groups).div_ceil(256) as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
    };
    let apply = Extents::looping(n_batch * n_positions * (n_channels / vector_len), ops.device);
    // SAFETY: all operands were checked; the scratch holds what the args say, and is given back in stream order.
    unsafe {
        ops.launch(GROUP_NORM_STATISTICS, x.dtype, statistics, &args)?;
        ops.launch(GROUP_NORM_COMBINE, DType::F32, combine, &args)?;
        ops.launch(GROUP_NORM_APPLY, x.dtype, apply, &args)
    }
}

impl View {
    /// Whether every row is a whole number of vectors of 16 bytes, each on its boundary.
    pub(super) fn has_vector_rows(&self) -> bool {
        let len = 16 / self.dtype.size_bytes();
        let last = self.n_dims() - 1;
        self.start.is_multiple_of(16)
            && self.n_cols().is_multiple_of(len)
            && (0..last).all(|dim_idx| self.dim(dim_idx) == 1 || self.strides[dim_idx].is_multiple_of(len))
    }
}
