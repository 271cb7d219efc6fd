//! Convolutions as products: the rows are patches of the image, read where they lie.
//!
//! Weights are packed with `k` ordered `(i, j, c)`, so that a tap's channels are one segment of a pixel's. Convolutions that
//! [`crate::winograd::pays`] go there instead.

use crate::{
    Context,
    gemm::{Finish, MatrixRows, Panels, RowSource, multiply},
    operand::{Ptr, View},
    simd::Simd,
};
use denoised_tensor::{ConvSpec, Result};

/// An image and how a convolution walks over it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk {
    /// `[batch, h, w, c]`
    pub(crate) image: View<f32>,
    pub(crate) spec: ConvSpec,
    pub(crate) kernel_height: usize,
    pub(crate) kernel_width: usize,
    pub(crate) out_height: usize,
    pub(crate) out_width: usize,
}

impl Walk {
    /// The pixel at `(y, x)` of the enlarged image of batch element `batch_idx`; null outside.
    #[inline(always)]
    pub(crate) fn pixel(&self, batch_idx: usize, y: isize, x: isize) -> *const f32 {
        let enlarge = self.spec.upsample;
        let (height, width) = (self.image.dim(1) * enlarge, self.image.dim(2) * enlarge);
        if y < 0 || x < 0 || y >= height as isize || x >= width as isize {
            return std::ptr::null();
        }
        let (mut y, mut x) = (y as usize, x as usize);
        if enlarge > 1 {
            (y, x) = (y / enlarge, x / enlarge);
        }
        let image = &self.image;
        let offset = batch_idx * image.stride(0) + y * image.stride(1) + x * image.stride(2);
        image.start.at(offset).cast_const()
    }

    fn n_rows(&self) -> usize {
        self.image.dim(0) * self.out_height * self.out_width
    }

    /// Whether patches are the pixels themselves.
    fn is_pointwise(&self) -> bool {
        let spec = &self.spec;
        (self.kernel_height, self.kernel_width, spec.stride, spec.upsample) == (1, 1, 1, 1)
            && spec.padding == [0; 4]
    }
}

/// A row per output pixel, a segment per tap.
#[derive(Clone, Copy, Debug)]
struct Patches {
    walk: Walk,
    /// A pixel of zeros.
    outside: Ptr<f32>,
}

impl RowSource for Patches {
    #[inline(always)]
    fn segment_len(&self) -> usize {
        self.walk.image.n_cols()
    }

    #[inline(always)]
    unsafe fn segment(&self, row_idx: usize, segment_idx: usize) -> *const f32 {
        let walk = &self.walk;
        let (rest, out_x) = (row_idx / walk.out_width, row_idx % walk.out_width);
        let (batch_idx, out_y) = (rest / walk.out_height, rest % walk.out_height);
        let [top, left, ..] = walk.spec.padding;
        let y = (out_y * walk.spec.stride + segment_idx / walk.kernel_width) as isize - top as isize;
        let x = (out_x * walk.spec.stride + segment_idx % walk.kernel_width) as isize - left as isize;
        let pixel = walk.pixel(batch_idx, y, x);
        if pixel.is_null() {
            self.outside.get()
        } else {
            pixel
        }
    }
}

/// Any convolution.
///
/// # Safety
/// As [`multiply`]; `finish.out` has a row for each output pixel of each batch element, in order.
pub(crate) unsafe fn convolve<S: Simd>(
    context: &Context<'_>,
    walk: Walk,
    weights: Panels,
    finish: Finish,
) -> Result<()> {
    if walk.is_pointwise() {
        let source = MatrixRows {
            rows: walk.image.rows(),
            k: weights.k,
        };
        // SAFETY: the caller vouches for the operands; the rows of the image are the rows of the product.
        return unsafe { multiply::<S, _>(context, source, walk.n_rows(), weights, finish) };
    }
    let n_channels = walk.image.n_cols();
    let outside = context.memory.take("a convolution's border", n_channels * 4)?;
    // SAFETY: the region is at least that long.
    unsafe { outside.start().write_bytes(0, n_channels * 4) };
    let source = Patches {
        walk,
        outside: Ptr(outside.start().cast()),
    };
    // SAFETY: as above; every segment is a pixel of the image or `outside`.
    unsafe { multiply::<S, _>(context, source, walk.n_rows(), weights, finish) }
}
