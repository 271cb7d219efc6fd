//! Ops that move elements. Each is a copy between two ways to walk the same elements.

use super::{Ops, elementwise::move_elements};
use crate::operand::View;
use denoised_tensor::{MAX_DIMS, PatchOrder, Result, Shape, Tensor, check};

/// `view` under other extents and strides.
fn walked<const N: usize>(view: &View, dims: [usize; N], strides: [usize; N]) -> Result<View> {
    let mut all = [1; MAX_DIMS];
    all[..N].copy_from_slice(&strides);
    Ok(View {
        shape: Shape::new(&dims)?,
        strides: all,
        ..*view
    })
}

/// A picture and its tokens, both as `[batch, row of patches, patch, dy, dx, c]`.
fn patches(image: &View, tokens: &View, patch: usize, order: PatchOrder) -> Result<(View, View)> {
    let (n_batch, n_channels) = (image.dim(0), image.dim(3));
    let (high, wide) = (image.dim(1) / patch, image.dim(2) / patch);
    let dims = [n_batch, high, wide, patch, patch, n_channels];
    let [batch, row, col, channel] = [0, 1, 2, 3].map(|dim_idx| image.strides[dim_idx]);
    let image = walked(image, dims, [batch, patch * row, patch * col, row, col, channel])?;
    let [batch, token, _] = [0, 1, 2].map(|dim_idx| tokens.strides[dim_idx]);
    let [dy, dx, c] = match order {
        PatchOrder::SpatialFirst => [patch * n_channels, n_channels, 1],
        PatchOrder::ChannelFirst => [patch, 1, patch * patch],
    };
    let tokens = walked(tokens, dims, [batch, wide * token, token, dy, dx, c])?;
    Ok((image, tokens))
}

pub(crate) fn patchify(
    ops: Ops<'_>,
    x: &Tensor,
    patch: usize,
    order: PatchOrder,
    out: &Tensor,
) -> Result<()> {
    let op = "patchify";
    check::patchify(x, patch, out)?;
    let (image, tokens) = patches(&ops.view(op, "x", x)?, &ops.view(op, "out", out)?, patch, order)?;
    move_elements(ops, op, &tokens, &image)
}

pub(crate) fn unpatchify(
    ops: Ops<'_>,
    x: &Tensor,
    patch: usize,
    order: PatchOrder,
    out: &Tensor,
) -> Result<()> {
    let op = "unpatchify";
    check::unpatchify(x, patch, out)?;
    let (image, tokens) = patches(&ops.view(op, "out", out)?, &ops.view(op, "x", x)?, patch, order)?;
    move_elements(ops, op, &image, &tokens)
}

pub(crate) fn permute(ops: Ops<'_>, x: &Tensor, axes: &[usize], out: &Tensor) -> Result<()> {
    let op = "permute";
    check::permute(x, axes, out)?;
    let (x, out) = (ops.view(op, "x", x)?, ops.view(op, "out", out)?);
    let mut strides = [1; MAX_DIMS];
    for (stride, axis) in strides.iter_mut().zip(axes) {
        *stride = x.strides[*axis];
    }
    let from = View {
        shape: out.shape,
        strides,
        ..x
    };
    move_elements(ops, op, &out, &from)
}

pub(crate) fn upsample_nearest(ops: Ops<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
    let op = "upsample_nearest";
    check::upsample_nearest(x, out)?;
    let (x, out) = (ops.view(op, "x", x)?, ops.view(op, "out", out)?);
    let [batch, row, col, channel] = [0, 1, 2, 3].map(|dim_idx| x.strides[dim_idx]);
    let (n_batch, high, wide, n_channels) = (x.dim(0), x.dim(1), x.dim(2), x.dim(3));
    // Each pixel goes to two rows and two columns.
    let from = walked(
        &x,
        [n_batch, high, 1, wide, 1, n_channels],
        [batch, row, 1, col, 1, channel],
    )?;
    let [batch, row, col, channel] = [0, 1, 2, 3].map(|dim_idx| out.strides[dim_idx]);
    let dims = [n_batch, high, 2, wide, 2, n_channels];
    let to = walked(&out, dims, [batch, 2 * row, row, 2 * col, col, channel])?;
    move_elements(ops, op, &to, &from)
}
