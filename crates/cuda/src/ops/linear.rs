//! Matrix products, and what is done to them before they are stored.
//!
//! The library adds the bias (rounded to the output's type) and a residual without a gate; an activation or a gate is a pass of ours over
//! the stored product, as it is where frameworks run one op after another.

use super::{Extents, Ops, walk::Walk};
use crate::{
    module::Kernel,
    operand::{View, activation_code},
    products::{Operands, Shape, Stride},
    weights::{self, Form},
};
use denoised_tensor::{
    Activation, DType, Epilogue, MAX_DIMS, Result, Shape as Extent, Tensor, Weight, check,
};

const FINISH: Kernel = Kernel {
    file: "elementwise",
    name: "finish",
};

/// Mirrors `FinishArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FinishArgs {
    walk: Walk<4>,
    code: i32,
    has_gate: i32,
    has_residual: i32,
}

/// A checked epilogue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finish {
    /// Address of the bias in the output's dtype, and as f32.
    pub(super) bias: Option<[u64; 2]>,
    pub(super) activation: Activation,
    /// `[batch, n]` or `[1, n]`.
    pub(super) gate: Option<View>,
    pub(super) residual: Option<View>,
}

impl Finish {
    pub(super) fn new(ops: Ops<'_>, op: &'static str, epilogue: &Epilogue<'_>, dtype: DType) -> Result<Self> {
        let view =
            |name, tensor: Option<&Tensor>| tensor.map(|tensor| ops.view(op, name, tensor)).transpose();
        let bias = |weight: &Weight| {
            let form = |form| weights::start(op, "bias", weight, form, ops.device);
            Ok([form(Form::For(dtype))?, form(Form::Wide)?])
        };
        Ok(Self {
            bias: epilogue.bias.map(bias).transpose()?,
            activation: epilogue.activation,
            gate: view("gate", epilogue.gate)?,
            residual: view("residual", epilogue.residual)?,
        })
    }

    /// Whether the library can do all of it.
    fn is_plain(&self) -> bool {
        self.activation == Activation::None && self.gate.is_none()
    }
}

pub(crate) fn linear(
    ops: Ops<'_>,
    x: &Tensor,
    w: &Weight,
    epilogue: &Epilogue<'_>,
    out: &Tensor,
) -> Result<()> {
    let op = "linear";
    let extents = check::linear(x, w, epilogue, out)?;
    let (x, out) = (ops.view(op, "x", x)?, ops.view(op, "out", out)?);
    let finish = Finish::new(ops, op, epilogue, x.dtype)?;
    let w = weights::start(op, "weight", w, Form::For(x.dtype), ops.device)?;
    product(ops, op, &x, w, [extents.n, extents.k], &finish, &out)
}

/// `out = finish(x wᵀ)`; `w` is `[n, k]` without gaps, `x` and `out` have equal leading extents.
pub(super) fn product(
    ops: Ops<'_>,
    op: &'static str,
    x: &View,
    w: u64,
    [n, k]: [usize; 2],
    finish: &Finish,
    out: &View,
) -> Result<()> {
    let residual = finish.residual.filter(|_| finish.is_plain());
    // A product must not be stored where a residual is still to be read.
    let is_in_place = finish
        .residual
        .is_some_and(|residual| residual.start == out.start);
    let scratch;
    let target = if finish.is_plain() || !is_in_place {
        *out
    } else {
        let dims = out.dims();
        scratch = ops.memory.take(
            || format!("a product {dims:?} of {}", out.dtype),
            out.shape.n_elements() * out.dtype.size_bytes(),
        )?;
        out.dense_at(scratch.start())
    };
    for part in parts(x, &target, residual.as_ref()) {
        let shape = Shape {
            n_batch: part.n_batch,
            m: part.m,
            n,
            k,
            x: part.strides[0],
            w: Stride { row: k, batch: 0 },
            residual: residual.map(|_| part.strides[2]),
            out: part.strides[1],
            has_bias: finish.bias.is_some(),
            dtype: x.dtype,
        };
        let element_bytes = x.dtype.size_bytes() as u64;
        let at = |start: u64, offset: usize| start + offset as u64 * element_bytes;
        let operands = Operands {
            x: at(x.start, part.offsets[0]),
            w,
            bias: finish.bias.map_or(0, |[in_dtype, _]| in_dtype),
            residual: residual.map_or(0, |residual| at(residual.start, part.offsets[2])),
            out: at(target.start, part.offsets[1]),
        };
        // SAFETY: all operands were checked; the parts are rows of theirs.
        unsafe { ops.products.run(ops.device, &shape, &operands)? };
    }
    if finish.is_plain() {
        return Ok(());
    }
    let gate = match &finish.gate {
        Some(gate) => gate.per_batch(out.n_dims())?,
        None => target,
    };
    let args = FinishArgs {
        walk: Walk::new(
            op,
            [out, &target, &gate, finish.residual.as_ref().unwrap_or(&target)],
        )?,
        code: activation_code(finish.activation),
        has_gate: i32::from(finish.gate.is_some()),
        has_residual: i32::from(finish.residual.is_some()),
    };
    // SAFETY: all operands were checked; the scratch is given back in stream order.
    unsafe {
        ops.launch(
            FINISH,
            out.dtype,
            Extents::looping(args.walk.n_items(), ops.device),
            &args,
        )
    }
}

/// Rows that one product takes: of the input, the output and the residual.
struct Part {
    n_batch: usize,
    m: usize,
    strides: [Stride; 3],
    /// In elements from the first.
    offsets: [usize; 3],
}

/// All rows, in products of up to two levels: rows and a batch. Whatever lies further out is one product each.
fn parts(x: &View, out: &View, residual: Option<&View>) -> Vec<Part> {
    let views = [x, out, residual.unwrap_or(out)];
    // Innermost first, merged where all three allow it.
    let mut levels: Vec<(usize, [usize; 3])> = Vec::with_capacity(MAX_DIMS);
    for dim_idx in (0..x.n_dims() - 1).rev() {
        let extent = x.dim(dim_idx);
        let strides = views.map(|view| view.strides[dim_idx]);
        match levels.last_mut() {
            _ if extent == 1 => {}
            Some((last, last_strides)) if (0..3).all(|i| strides[i] == last_strides[i] * *last) => {
                *last *= extent
            }
            _ => levels.push((extent, strides)),
        }
    }
    let level = |idx: usize| levels.get(idx).copied();
    // One row: its stride does not matter, but the library wants one that is no shorter than the row.
    let (m, rows) = level(0).unwrap_or((1, views.map(View::n_cols)));
    let (n_batch, batches) = level(1).unwrap_or((1, [0; 3]));
    let strides = std::array::from_fn(|i| Stride {
        row: rows[i],
        batch: batches[i],
    });
    let outer = levels.get(2..).unwrap_or_default();
    let n_parts = outer.iter().map(|(extent, _)| extent).product();
    (0..n_parts)
        .map(|part_idx: usize| {
            let (mut rest, mut offsets) = (part_idx, [0; 3]);
            for (extent, strides) in outer {
                for i in 0..3 {
                    offsets[i] += rest % extent * strides[i];
                }
                rest /= extent;
            }
            Part {
                n_batch,
                m,
                strides,
                offsets,
            }
        })
        .collect()
}

impl View {
    /// The same extents without gaps at another address.
    fn dense_at(&self, start: u64) -> Self {
        let mut strides = [1; MAX_DIMS];
        for dim_idx in (0..self.n_dims() - 1).rev() {
            strides[dim_idx] = strides[dim_idx + 1] * self.dim(dim_idx + 1);
        }
        Self {
            start,
            strides,
            ..*self
        }
    }

    /// `[batch, n]` with as many dimensions as its output has: one row per batch element.
    fn per_batch(&self, n_dims: usize) -> Result<Self> {
        // A single row broadcasts as it is; so does one for an output of one dimension.
        if self.dim(0) == 1 || n_dims < 2 {
            let mut strides = self.strides;
            strides[0] = self.strides[1];
            return Ok(Self {
                shape: Extent::new(&self.dims()[1..])?,
                strides,
                ..*self
            });
        }
        let (mut dims, mut strides) = ([1; MAX_DIMS], [1; MAX_DIMS]);
        (dims[0], dims[n_dims - 1]) = (self.dim(0), self.dim(1));
        (strides[0], strides[n_dims - 1]) = (self.strides[0], self.strides[1]);
        Ok(Self {
            shape: Extent::new(&dims[..n_dims])?,
            strides,
            ..*self
        })
    }
}
