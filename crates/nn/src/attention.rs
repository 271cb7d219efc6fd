//! Attention over projections that lie side by side.

use crate::{Ctx, Result};
use denoised_tensor::{AttentionSpec, Tensor};

/// Heads and masks of an attention; the scale is `1 / sqrt(head_dim)`.
#[derive(Clone, Copy, Debug)]
pub struct Attend<'a> {
    /// Heads of queries, keys and values.
    pub n_heads: usize,
    /// Whether a query sees only itself and what is before it.
    pub is_causal: bool,
    /// Added to the scaled scores, broadcast to `[batch, n_heads, n_queries, n_keys]`.
    pub bias: Option<&'a Tensor>,
}

impl<'a> Attend<'a> {
    /// Every query sees every key.
    pub fn all(n_heads: usize) -> Self {
        Self::biased(n_heads, None)
    }

    /// As [`Attend::all`], with `bias` in the scores.
    pub fn biased(n_heads: usize, bias: Option<&'a Tensor>) -> Self {
        Self {
            n_heads,
            is_causal: false,
            bias,
        }
    }
}

/// `softmax(q kᵀ / sqrt(head_dim) + bias) v`; all `[batch, tokens, n_heads * head_dim]`.
///
/// # Errors
/// The device's.
pub fn attend(ctx: &Ctx<'_>, q: &Tensor, k: &Tensor, v: &Tensor, how: Attend<'_>) -> Result<Tensor> {
    let head_dim = q.shape().last() / how.n_heads.max(1);
    let spec = AttentionSpec {
        n_heads: how.n_heads,
        n_kv_heads: how.n_heads,
        scale: (1.0 / (head_dim as f64).sqrt()) as f32,
        is_causal: how.is_causal,
        bias: how.bias,
    };
    let out = ctx.alloc(q.dims())?;
    ctx.backend.attention(q, k, v, &spec, &out)?;
    Ok(out)
}

/// Cuts the last dimension into `N` equal parts, sharing memory.
///
/// # Errors
/// A last dimension that is no multiple of `N`.
pub fn split<const N: usize>(x: &Tensor) -> Result<[Tensor; N]> {
    let last_idx = x.dims().len() - 1;
    let len = x.shape().last() / N;
    let parts: Vec<Tensor> = (0..N)
        .map(|part_idx| x.narrow(last_idx, part_idx * len, len))
        .collect::<Result<_>>()?;
    parts.try_into().map_err(|_| denoised_tensor::TensorError::Shape {
        op: "split",
        detail: format!("{:?} into {N} parts", x.dims()),
    })
}
