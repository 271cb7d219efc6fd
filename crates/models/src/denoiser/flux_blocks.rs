//! What FLUX.1 and FLUX.2 have in common: blocks that work on the tokens of text and picture side by side in one buffer, text first.
//!
//! In a **double** block either kind of token has weights of its own and they meet in the attention; in a **single** block all share the
//! weights, and attention and feed-forward run beside each other. Both change the buffer in place.

use super::rope::Rope;
use denoised_nn::{After, Ctx, Linear, Result, RmsNorm, Scope, modulated_norm, split};
use denoised_tensor::{Activation, AttentionSpec, GateOrder, Tensor};

/// Widths and switches of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockSpec {
    pub(super) n_heads: usize,
    pub(super) head_dim: usize,
    /// Width between the two products of the feed-forward.
    pub(super) n_inner: usize,
    pub(super) kind: Kind,
    pub(super) eps: f32,
}

impl BlockSpec {
    pub(super) fn n_channels(&self) -> usize {
        self.n_heads * self.head_dim
    }

    fn has_bias(&self) -> bool {
        self.kind == Kind::Gelu
    }
}

/// The feed-forward, with which other things go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// GELU, with biases (FLUX.1).
    Gelu,
    /// SwiGLU, without biases anywhere (FLUX.2).
    SwiGlu,
}

/// What becomes of tokens before and after a part of a block; `[batch, n]` each.
#[derive(Clone, Debug)]
pub(super) struct Modulated {
    shift: Tensor,
    scale: Tensor,
    gate: Tensor,
}

impl Modulated {
    /// Cuts `[batch, 3 N n]` into `N` of them.
    ///
    /// # Errors
    /// A width that is no multiple of `3 N`.
    pub(super) fn cut<const N: usize>(all: &Tensor) -> Result<[Self; N]> {
        let mut parts = Vec::with_capacity(N);
        for part in split::<N>(all)? {
            let [shift, scale, gate] = split(&part)?;
            parts.push(Self { shift, scale, gate });
        }
        parts.try_into().map_err(|_| denoised_tensor::TensorError::Shape {
            op: "split",
            detail: format!("{:?} into {N} modulations", all.dims()),
        })
    }

    fn norm(&self, ctx: &Ctx<'_>, x: &Tensor, eps: f32) -> Result<Tensor> {
        modulated_norm(ctx, x, &self.shift, &self.scale, eps)
    }
}

/// Tokens of text and picture in one buffer `[batch, n_text + n_picture, n]`.
#[derive(Clone, Debug)]
pub(super) struct Tokens {
    pub(super) all: Tensor,
    pub(super) text: Tensor,
    pub(super) picture: Tensor,
}

impl Tokens {
    /// Of a buffer whose first `n_text` tokens are the text's.
    ///
    /// # Errors
    /// More of them than there are tokens.
    pub(super) fn new(all: Tensor, n_text: usize) -> Result<Self> {
        Ok(Self {
            text: all.narrow(1, 0, n_text)?,
            picture: all.narrow(1, n_text, all.dim(1) - n_text)?,
            all,
        })
    }
}

/// A block with weights of its own for either kind of token.
#[derive(Debug)]
pub(super) struct DoubleBlock {
    text: Stream,
    picture: Stream,
    spec: BlockSpec,
}

/// One kind of token in a double block.
#[derive(Debug)]
struct Stream {
    qkv: Linear,
    norm_qk: [RmsNorm; 2],
    out: Linear,
    feed_forward: FeedForward,
}

impl DoubleBlock {
    pub(super) fn new(scope: &mut Scope<'_>, spec: BlockSpec) -> Self {
        Self::named(scope, spec, ["ff_context", "ff"])
    }

    /// As [`DoubleBlock::new`] with other names of the feed-forwards of text and picture.
    pub(super) fn named(scope: &mut Scope<'_>, spec: BlockSpec, [of_text, of_picture]: [&str; 2]) -> Self {
        let n = spec.n_channels();
        let mut stream = |qkv: [&str; 3], norms: [&str; 2], out: &str, feed_forward: &str| {
            let mut attention = scope.at("attn");
            Stream {
                qkv: Linear::fused(&mut attention, &qkv, n, 3 * n, spec.has_bias()),
                norm_qk: norms.map(|name| RmsNorm::new(&mut attention.at(name), spec.head_dim, spec.eps)),
                out: Linear::fused(&mut attention, &[out], n, n, spec.has_bias()),
                feed_forward: FeedForward::new(&mut scope.at(feed_forward), &spec),
            }
        };
        let names = ["add_q_proj", "add_k_proj", "add_v_proj"];
        let norms = ["norm_added_q", "norm_added_k"];
        Self {
            text: stream(names, norms, "to_add_out", of_text),
            picture: stream(
                ["to_q", "to_k", "to_v"],
                ["norm_q", "norm_k"],
                "to_out.0",
                of_picture,
            ),
            spec,
        }
    }

    /// In place; modulations are those of attention and feed-forward.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn forward(
        &self,
        ctx: &Ctx<'_>,
        tokens: &Tokens,
        [text, picture]: [&[Modulated; 2]; 2],
        rope: &Rope,
    ) -> Result<()> {
        let parts = [(true, &tokens.text, text), (false, &tokens.picture, picture)];
        let parts = parts.map(|(is_text, x, modulated)| Part {
            is_text,
            n_tokens: x.dim(1),
            modulated,
        });
        self.forward_parts(ctx, &tokens.all, &parts, rope)
    }

    /// As [`DoubleBlock::forward`] where pictures are modulated in several ways: `all` `[batch, tokens, n]` consists of `parts`.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn forward_parts(
        &self,
        ctx: &Ctx<'_>,
        all: &Tensor,
        parts: &[Part<'_>],
        rope: &Rope,
    ) -> Result<()> {
        let cut = |of: &Tensor| -> Result<Vec<(Tensor, &Stream, &[Modulated; 2])>> {
            let mut first = 0;
            let mut cut = Vec::with_capacity(parts.len());
            for part in parts {
                let stream = if part.is_text { &self.text } else { &self.picture };
                cut.push((of.narrow(1, first, part.n_tokens)?, stream, part.modulated));
                first += part.n_tokens;
            }
            Ok(cut)
        };
        let parts = cut(all)?;
        let qkv = ctx.alloc_like(all, 3 * self.spec.n_channels())?;
        for ((x, stream, modulated), (out, ..)) in parts.iter().zip(cut(&qkv)?) {
            let h = modulated[0].norm(ctx, x, self.spec.eps)?;
            stream.qkv.forward_into(ctx, &h, After::default(), &out)?;
            let [q, k, _] = split(&out)?;
            stream.norm_qk[0].apply(ctx, &q)?;
            stream.norm_qk[1].apply(ctx, &k)?;
        }
        let attended = ctx.alloc(all.dims())?;
        attend_into(ctx, &qkv, &self.spec, rope, &attended)?;
        drop(qkv);
        for ((x, stream, modulated), (from, ..)) in parts.iter().zip(cut(&attended)?) {
            let after = After::gated(&modulated[0].gate, x);
            stream.out.forward_into(ctx, &from, after, x)?;
        }
        drop(attended);
        for (x, stream, modulated) in &parts {
            let h = modulated[1].norm(ctx, x, self.spec.eps)?;
            let after = After::gated(&modulated[1].gate, x);
            stream.feed_forward.forward_into(ctx, &h, after, x)?;
        }
        Ok(())
    }
}

/// Some tokens of a double block, and what becomes of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part<'a> {
    pub(super) is_text: bool,
    pub(super) n_tokens: usize,
    /// For attention and feed-forward.
    pub(super) modulated: &'a [Modulated; 2],
}

/// A block with one set of weights for all tokens.
#[derive(Debug)]
pub(super) struct SingleBlock {
    /// Queries, keys and values; behind them, with SwiGLU, both halves of the feed-forward.
    first: Linear,
    /// Of the feed-forward, where it is a layer of its own.
    mlp: Option<Linear>,
    norm_qk: [RmsNorm; 2],
    out: Linear,
    spec: BlockSpec,
}

impl SingleBlock {
    pub(super) fn new(scope: &mut Scope<'_>, spec: BlockSpec) -> Self {
        let (n, m) = (spec.n_channels(), spec.n_inner);
        let norm = |scope: &mut Scope<'_>, name: &str| {
            RmsNorm::new(&mut scope.at("attn").at(name), spec.head_dim, spec.eps)
        };
        let norm_qk = ["norm_q", "norm_k"].map(|name| norm(scope, name));
        let (first, mlp, out) = match spec.kind {
            Kind::Gelu => {
                let names = ["to_q", "to_k", "to_v"];
                let qkv = Linear::fused(&mut scope.at("attn"), &names, n, 3 * n, true);
                let mlp = Linear::new(&mut scope.at("proj_mlp"), n, m);
                (qkv, Some(mlp), Linear::new(&mut scope.at("proj_out"), n + m, n))
            }
            Kind::SwiGlu => {
                let mut attention = scope.at("attn");
                let mut first = attention.at("to_qkv_mlp_proj");
                let first = Linear::without_bias(&mut first, n, 3 * n + 2 * m);
                let out = Linear::without_bias(&mut attention.at("to_out"), n + m, n);
                (first, None, out)
            }
        };
        Self {
            first,
            mlp,
            norm_qk,
            out,
            spec,
        }
    }

    /// `x` `[batch, tokens, n]` in place.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn forward(
        &self,
        ctx: &Ctx<'_>,
        x: &Tensor,
        modulated: &Modulated,
        rope: &Rope,
    ) -> Result<()> {
        let (n, m) = (self.spec.n_channels(), self.spec.n_inner);
        let h = modulated.norm(ctx, x, self.spec.eps)?;
        let first = self.first.forward(ctx, &h, After::default())?;
        let joined = ctx.alloc_like(x, n + m)?;
        let middle = joined.narrow(2, n, m)?;
        match &self.mlp {
            Some(mlp) => {
                let after = After::activation(Activation::GeluTanh);
                mlp.forward_into(ctx, &h, after, &middle)?;
            }
            None => {
                let halves = first.narrow(2, 3 * n, 2 * m)?;
                let order = GateOrder::FirstActivated;
                ctx.backend.gated(&halves, Activation::Silu, order, &middle)?;
            }
        }
        drop(h);
        let qkv = first.narrow(2, 0, 3 * n)?;
        let [q, k, _] = split(&qkv)?;
        self.norm_qk[0].apply(ctx, &q)?;
        self.norm_qk[1].apply(ctx, &k)?;
        attend_into(ctx, &qkv, &self.spec, rope, &joined.narrow(2, 0, n)?)?;
        drop((first, qkv, q, k));
        let after = After::gated(&modulated.gate, x);
        self.out.forward_into(ctx, &joined, after, x)
    }
}

/// Attention of all tokens to each other, of `qkv` `[batch, tokens, 3 n]`; turns queries and keys in place.
fn attend_into(ctx: &Ctx<'_>, qkv: &Tensor, spec: &BlockSpec, rope: &Rope, out: &Tensor) -> Result<()> {
    let [q, k, v] = split(qkv)?;
    rope.apply(ctx, &q)?;
    rope.apply(ctx, &k)?;
    let spec = AttentionSpec {
        n_heads: spec.n_heads,
        n_kv_heads: spec.n_heads,
        scale: (1.0 / (spec.head_dim as f64).sqrt()) as f32,
        is_causal: false,
        bias: None,
    };
    ctx.backend.attention(&q, &k, &v, &spec, out)
}

#[derive(Debug)]
struct FeedForward {
    first: Linear,
    second: Linear,
    spec: BlockSpec,
}

impl FeedForward {
    fn new(scope: &mut Scope<'_>, spec: &BlockSpec) -> Self {
        let (names, n_first) = match spec.kind {
            Kind::Gelu => (["net.0.proj", "net.2"], spec.n_inner),
            Kind::SwiGlu => (["linear_in", "linear_out"], 2 * spec.n_inner),
        };
        let (n, has_bias) = (spec.n_channels(), spec.has_bias());
        Self {
            first: Linear::fused(scope, &names[..1], n, n_first, has_bias),
            second: Linear::fused(scope, &names[1..], spec.n_inner, n, has_bias),
            spec: *spec,
        }
    }

    fn forward_into(&self, ctx: &Ctx<'_>, x: &Tensor, after: After<'_>, out: &Tensor) -> Result<()> {
        let inner = match self.spec.kind {
            Kind::Gelu => {
                let activation = After::activation(Activation::GeluTanh);
                self.first.forward(ctx, x, activation)?
            }
            Kind::SwiGlu => {
                let halves = self.first.forward(ctx, x, After::default())?;
                let inner = ctx.alloc_like(x, self.spec.n_inner)?;
                let order = GateOrder::FirstActivated;
                ctx.backend.gated(&halves, Activation::Silu, order, &inner)?;
                inner
            }
        };
        self.second.forward_into(ctx, &inner, after, out)
    }
}
