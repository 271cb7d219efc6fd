//! Convolutions: pointwise ones are products; those that tensor cores take are one kernel; the rest are gathered into rows first.

use super::{
    Extents, Ops,
    linear::{Finish, product},
};
use crate::{
    module::Kernel,
    operand::{Rows, View, activation_code, small},
    weights::{self, Form},
};
use denoised_tensor::{
    ConvSpec, DType, Epilogue, MAX_DIMS, Result, Shape, Tensor, Weight,
    check::{self, ConvExtents},
};

const IM2COL: Kernel = Kernel {
    file: "im2col",
    name: "im2col",
};
const CONV: Kernel = Kernel {
    file: "conv",
    name: "conv",
};
const CONV_SUM: Kernel = Kernel {
    file: "conv",
    name: "conv_sum",
};

/// Most memory that gathered rows take at once.
const COLUMN_BYTES: usize = 128 << 20;

/// Of `conv.cu`: pixels and channels of a block, its slice of the reduction, and the slices under way.
const TILE: usize = 128;
const TILE_K: usize = 32;
const STAGES: usize = 4;

/// Fewest slices that are worth a block of a split reduction.
const MIN_SLICES: usize = 16;

/// Mirrors `ColumnArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ColumnArgs {
    x: u64,
    columns: u64,
    strides: [i64; 3],
    first: i64,
    n_pixels: i64,
    height: i32,
    width: i32,
    c_in: i32,
    kernel_height: i32,
    kernel_width: i32,
    out_height: i32,
    out_width: i32,
    stride: i32,
    top: i32,
    left: i32,
    upsample: i32,
    is_vector: i32,
}

/// Mirrors `ConvArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ConvArgs {
    x: u64,
    w: u64,
    strides: [i64; 3],
    out: Rows,
    bias: u64,
    gate: u64,
    gate_stride: i64,
    residual: Rows,
    partials: u64,
    n_pixels: i64,
    pixels_per_batch: i64,
    height: i32,
    width: i32,
    c_in: i32,
    c_out: i32,
    kernel_width: i32,
    n_taps: i32,
    out_height: i32,
    out_width: i32,
    stride: i32,
    top: i32,
    left: i32,
    upsample: i32,
    activation: i32,
    slices_per_split: i32,
    n_splits: i32,
}

/// A checked convolution.
struct Conv<'a> {
    ops: Ops<'a>,
    x: View,
    w: u64,
    spec: ConvSpec,
    extents: ConvExtents,
    finish: Finish,
    out: View,
}

pub(crate) fn conv2d(
    ops: Ops<'_>,
    x: &Tensor,
    w: &Weight,
    spec: &ConvSpec,
    epilogue: &Epilogue<'_>,
    out: &Tensor,
) -> Result<()> {
    let op = "conv2d";
    let extents = check::conv2d(x, w, spec, epilogue, out)?;
    let (x, out) = (ops.view(op, "x", x)?, ops.view(op, "out", out)?);
    let conv = Conv {
        ops,
        x,
        w: weights::start(op, "weight", w, Form::For(x.dtype), ops.device)?,
        spec: *spec,
        extents,
        finish: Finish::new(ops, op, epilogue, x.dtype)?,
        out,
    };
    let is_pointwise = extents.kernel_height * extents.kernel_width == 1
        && spec.stride == 1
        && spec.upsample == 1
        && spec.padding == [0; 4];
    if is_pointwise {
        return product(
            ops,
            op,
            &x,
            conv.w,
            [extents.c_out, extents.c_in],
            &conv.finish,
            &out,
        );
    }
    if conv.suits_tensor_cores() {
        return conv.implicit();
    }
    conv.gathered()
}

impl Conv<'_> {
    const OP: &'static str = "conv2d";

    fn strides(&self) -> [i64; 3] {
        std::array::from_fn(|dim_idx| self.x.strides[dim_idx] as i64)
    }

    /// Whether every tap's channels are whole pieces of 16 bytes of a 16-bit type, each on its boundary.
    fn suits_tensor_cores(&self) -> bool {
        self.x.dtype != DType::F32 && self.x.has_vector_rows()
    }

    /// One kernel, or two where the reduction is split.
    fn implicit(&self) -> Result<()> {
        let (op, ops, extents) = (Self::OP, self.ops, &self.extents);
        let int = |n| small(op, n);
        let pixels_per_batch = extents.out_height * extents.out_width;
        let n_pixels = extents.n_batch * pixels_per_batch;
        let n_taps = extents.kernel_height * extents.kernel_width;
        let n_slices = (n_taps * extents.c_in).div_ceil(TILE_K);
        let channel_tiles = extents.c_out.div_ceil(TILE);
        // By the shape of one picture, so that a picture does not depend on its company.
        let tiles = pixels_per_batch.div_ceil(TILE) * channel_tiles;
        let wanted = (ops.device.n_multiprocessors() as usize).div_ceil(tiles);
        let n_splits = wanted.min(n_slices / MIN_SLICES).max(1);
        let slices_per_split = n_slices.div_ceil(n_splits);
        let n_splits = n_slices.div_ceil(slices_per_split);
        let partials = match n_splits {
            1 => None,
            _ => {
                let n_bytes = 4 * n_splits * n_pixels * extents.c_out;
                Some(ops.memory.take(
                    || format!("parts of a convolution to {:?}", self.out.dims()),
                    n_bytes,
                )?)
            }
        };
        let args = ConvArgs {
            x: self.x.start,
            w: self.w,
            strides: self.strides(),
            out: self.out.rows(op)?,
            bias: self.finish.bias.map_or(0, |[_, wide]| wide),
            gate: self.finish.gate.map_or(0, |gate| gate.start),
            gate_stride: self.finish.gate.map_or(0, |gate| {
                if gate.dim(0) > 1 {
                    gate.strides[0] as i64
                } else {
                    0
                }
            }),
            residual: match &self.finish.residual {
                Some(residual) => residual.rows(op)?,
                None => Rows::NONE,
            },
            partials: partials.as_ref().map_or(0, |partials| partials.start()),
            n_pixels: n_pixels as i64,
            pixels_per_batch: pixels_per_batch as i64,
            height: int(extents.height)?,
            width: int(extents.width)?,
            c_in: int(extents.c_in)?,
            c_out: int(extents.c_out)?,
            kernel_width: int(extents.kernel_width)?,
            n_taps: int(n_taps)?,
            out_height: int(extents.out_height)?,
            out_width: int(extents.out_width)?,
            stride: int(self.spec.stride)?,
            top: int(self.spec.padding[0])?,
            left: int(self.spec.padding[1])?,
            upsample: int(self.spec.upsample)?,
            activation: activation_code(self.finish.activation),
            slices_per_split: int(slices_per_split)?,
            n_splits: int(n_splits)?,
        };
        let tiled = Extents {
            grid: [
                int(n_pixels.div_ceil(TILE))? as u32,
                int(channel_tiles)? as u32,
                n_splits as u32,
            ],
            block: 256,
            shared_bytes: (STAGES * 2 * TILE * TILE_K * 2) as u32,
        };
        // SAFETY: all operands were checked; the parts are given back in stream order.
        unsafe {
            ops.launch(CONV, self.x.dtype, tiled, &args)?;
            if partials.is_some() {
                ops.launch(
                    CONV_SUM,
                    self.x.dtype,
                    Extents::looping(n_pixels * extents.c_out, ops.device),
                    &args,
                )?;
            }
        }
        Ok(())
    }

    /// Rows of all taps' channels, as many pictures or rows of one at a time as memory is granted for, and a product of each.
    fn gathered(&self) -> Result<()> {
        let (op, ops, extents) = (Self::OP, self.ops, &self.extents);
        let k = extents.kernel_height * extents.kernel_width * extents.c_in;
        let row_bytes = extents.out_width * k * self.x.dtype.size_bytes();
        let image_bytes = row_bytes * extents.out_height;
        let images_at_once = (COLUMN_BYTES / image_bytes).clamp(1, extents.n_batch);
        let rows_at_once = if image_bytes <= COLUMN_BYTES {
            extents.out_height
        } else {
            (COLUMN_BYTES / row_bytes).clamp(1, extents.out_height)
        };
        let n_bytes = images_at_once * rows_at_once * row_bytes;
        let what = || format!("gathered rows of a convolution to {:?}", self.out.dims());
        let columns = ops.memory.take(what, n_bytes)?;
        let vector_len = 16 / self.x.dtype.size_bytes();
        let is_vector = self.x.has_vector_rows();
        for image in (0..extents.n_batch).step_by(images_at_once) {
            let n_images = images_at_once.min(extents.n_batch - image);
            for row in (0..extents.out_height).step_by(rows_at_once) {
                let n_rows = rows_at_once.min(extents.out_height - row);
                let n_pixels = n_images * n_rows * extents.out_width;
                let int = |n| small(op, n);
                let args = ColumnArgs {
                    x: self.x.start,
                    columns: columns.start(),
                    strides: self.strides(),
                    first: ((image * extents.out_height + row) * extents.out_width) as i64,
                    n_pixels: n_pixels as i64,
                    height: int(extents.height)?,
                    width: int(extents.width)?,
                    c_in: int(extents.c_in)?,
                    kernel_height: int(extents.kernel_height)?,
                    kernel_width: int(extents.kernel_width)?,
                    out_height: int(extents.out_height)?,
                    out_width: int(extents.out_width)?,
                    stride: int(self.spec.stride)?,
                    top: int(self.spec.padding[0])?,
                    left: int(self.spec.padding[1])?,
                    upsample: int(self.spec.upsample)?,
                    is_vector: i32::from(is_vector),
                };
                let n_items = n_pixels * k / if is_vector { vector_len } else { 1 };
                // SAFETY: all operands were checked; the columns hold what is gathered at once.
                unsafe { ops.launch(IM2COL, self.x.dtype, Extents::looping(n_items, ops.device), &args)? };
                let gathered = View {
                    start: columns.start(),
                    dtype: self.x.dtype,
                    shape: Shape::new(&[n_images, n_rows, extents.out_width, k])?,
                    strides: dense([n_images, n_rows, extents.out_width, k]),
                };
                let part = |view: &View| view.part([(image, n_images), (row, n_rows)]);
                let finish = Finish {
                    gate: match &self.finish.gate {
                        Some(gate) if gate.dim(0) > 1 => Some(gate.part([(image, n_images)])?),
                        gate => *gate,
                    },
                    residual: self.finish.residual.as_ref().map(part).transpose()?,
                    ..self.finish
                };
                product(
                    ops,
                    op,
                    &gathered,
                    self.w,
                    [extents.c_out, k],
                    &finish,
                    &part(&self.out)?,
                )?;
            }
        }
        Ok(())
    }
}

fn dense(dims: [usize; 4]) -> [usize; MAX_DIMS] {
    let mut strides = [1; MAX_DIMS];
    for dim_idx in (0..3).rev() {
        strides[dim_idx] = strides[dim_idx + 1] * dims[dim_idx + 1];
    }
    strides
}

impl View {
    /// `(start, len)` of the first dimensions, which are inside.
    fn part<const N: usize>(&self, ranges: [(usize, usize); N]) -> Result<Self> {
        let mut dims = [1; MAX_DIMS];
        dims[..self.n_dims()].copy_from_slice(self.dims());
        let mut offset = 0;
        for (dim_idx, (start, len)) in ranges.into_iter().enumerate() {
            dims[dim_idx] = len;
            offset += start * self.strides[dim_idx];
        }
        Ok(Self {
            start: self.start + (offset * self.dtype.size_bytes()) as u64,
            shape: Shape::new(&dims[..self.n_dims()])?,
            ..*self
        })
    }
}
