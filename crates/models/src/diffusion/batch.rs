//! Tensors of several requests as one batch, and one request's share of it.

use crate::conditioning::{Conditioning, Form};
use denoised_nn::Ctx;
use denoised_tensor::{Tensor, TensorError};

/// Conditionings of equal shapes as one batch, in order.
pub(super) fn stack_conditionings(
    ctx: &Ctx<'_>,
    parts: &[&Conditioning],
) -> Result<Conditioning, TensorError> {
    let form = parts[0].form();
    let tensors: Vec<Vec<&Tensor>> = parts.iter().map(|part| part.tensors()).collect();
    let stacked = (0..form.n_tensors())
        .map(|idx| {
            stack(
                ctx,
                &tensors.iter().map(|of_part| of_part[idx]).collect::<Vec<_>>(),
            )
        })
        .collect::<Result<_, _>>()?;
    rebuilt(form, stacked)
}

/// A conditioning of tensors in the order of [`Conditioning::tensors`].
pub(super) fn rebuilt(form: Form, tensors: Vec<Tensor>) -> Result<Conditioning, TensorError> {
    Conditioning::from_tensors(form, tensors).ok_or_else(|| TensorError::Operand {
        op: "step",
        detail: format!("a conditioning of {form:?} has other tensors"),
    })
}

/// Whether two conditionings may share a forward.
pub(super) fn are_alike(a: &Conditioning, b: &Conditioning) -> bool {
    let dims = |one: &Conditioning| -> Vec<Vec<usize>> {
        one.tensors()
            .iter()
            .map(|tensor| tensor.dims()[1..].to_vec())
            .collect()
    };
    a.form() == b.form() && dims(a) == dims(b)
}

/// Tensors that differ at most in their batch, one behind the other.
pub(super) fn stack(ctx: &Ctx<'_>, parts: &[&Tensor]) -> Result<Tensor, TensorError> {
    if let [only] = parts {
        return Ok((*only).clone());
    }
    let mut dims = parts[0].dims().to_vec();
    dims[0] = parts.iter().map(|part| part.dim(0)).sum();
    let out = ctx.backend.alloc(&dims, parts[0].dtype())?;
    let mut row = 0;
    for part in parts {
        ctx.backend.copy(part, &out.narrow(0, row, part.dim(0))?)?;
        row += part.dim(0);
    }
    Ok(out)
}

/// Rows of each member, `[copies, ..]` each, with all first copies before all second ones.
pub(super) fn by_copy(ctx: &Ctx<'_>, members: &[&Tensor], n_copies: usize) -> Result<Tensor, TensorError> {
    if let [only] = members {
        return Ok((*only).clone());
    }
    let mut rows = Vec::with_capacity(n_copies * members.len());
    for copy_idx in 0..n_copies {
        for member in members {
            rows.push(member.narrow(0, copy_idx, 1)?);
        }
    }
    stack(ctx, &rows.iter().collect::<Vec<_>>())
}

/// `x` in the element type of activations, `n_copies` times one behind the other.
pub(super) fn repeated(ctx: &Ctx<'_>, x: &Tensor, n_copies: usize) -> Result<Tensor, TensorError> {
    if n_copies == 1 {
        return ctx.cast(x);
    }
    let n_rows = x.dim(0);
    let mut dims = x.dims().to_vec();
    dims[0] = n_copies * n_rows;
    let out = ctx.alloc(&dims)?;
    for copy_idx in 0..n_copies {
        ctx.backend.copy(x, &out.narrow(0, copy_idx * n_rows, n_rows)?)?;
    }
    Ok(out)
}
