//! Element-wise ops, with and without broadcasting.

use super::{
    Case, ELEMENT_LIMIT,
    functions::{ACTIVATIONS, activate},
    norms::{random_dims, same_shape, some_width},
    operands::*,
};
use denoised_tensor::{Backend, DType, GateOrder, Result, RopeStyle, Tensor};

/// Which dimensions, the batch first, a broadcast operand has itself.
pub(super) fn random_broadcast(random: &mut Random, n_dims: usize) -> Vec<bool> {
    (0..n_dims).map(|_| random.coin()).collect()
}

/// Extents of a broadcast operand without the batch.
pub(super) fn broadcast_dims(dims: &[usize], own: &[bool]) -> Vec<usize> {
    dims.iter()
        .zip(&own[1..])
        .map(|(extent, own)| if *own { *extent } else { 1 })
        .collect()
}

/// The operand as uploaded, and per element as a function of the flat index into `dims`.
pub(super) fn put_broadcast(
    backend: &dyn Backend,
    feed: Feed,
    operand: u64,
    elements: &[u64],
    dims: &[usize],
    own: &[bool],
) -> Result<Tensor> {
    let elements = if own[0] { elements } else { &[0] };
    feed.put(backend, operand, elements, &broadcast_dims(dims, own))
}

pub(super) fn broadcast_values(
    feed: Feed,
    operand: u64,
    element: u64,
    dims: &[usize],
    own: &[bool],
) -> Vec<f64> {
    let small = broadcast_dims(dims, own);
    let data = feed.values(operand, if own[0] { element } else { 0 }, small.iter().product());
    (0..dims.iter().product())
        .map(|flat: usize| {
            let (mut rest, mut offset, mut stride) = (flat, 0, 1);
            for (extent, own_extent) in dims.iter().zip(&small).rev() {
                offset += rest % extent % own_extent * stride;
                rest /= extent;
                stride *= own_extent;
            }
            f64::from(data[offset])
        })
        .collect()
}

fn binary(
    random: &mut Random,
    name: &str,
    op: fn(&dyn Backend, &Tensor, &Tensor, &Tensor) -> Result<()>,
    formula: fn(f64, f64) -> f64,
) -> Case {
    let feed = random.feed();
    let n_leading = random.within(0, 3);
    let last = some_width(random);
    let dims = random_dims(random, n_leading, last);
    let own = random_broadcast(random, dims.len() + 1);
    let name = format!("{name} {dims:?}, second has {own:?}");
    let (run_dims, run_own, ref_dims) = (dims.clone(), own.clone(), dims.clone());
    let run = move |backend: &dyn Backend, elements: &[u64], a: &Tensor, out: &Tensor| {
        let b = put_broadcast(backend, feed, 1, elements, &run_dims, &run_own)?;
        op(backend, a, &b, out)
    };
    let reference = move |element: u64, a: Vec<f64>| {
        let b = broadcast_values(feed, 1, element, &ref_dims, &own);
        a.iter().zip(&b).map(|(a, b)| formula(*a, *b)).collect()
    };
    same_shape(random, feed, name, ELEMENT_LIMIT, dims, run, reference)
}

pub(super) fn add(random: &mut Random) -> Case {
    binary(
        random,
        "add",
        |backend, a, b, out| backend.add(a, b, out),
        |a, b| a + b,
    )
}

pub(super) fn mul(random: &mut Random) -> Case {
    binary(
        random,
        "mul",
        |backend, a, b, out| backend.mul(a, b, out),
        |a, b| a * b,
    )
}

pub(super) fn gated_add(random: &mut Random) -> Case {
    let feed = random.feed();
    let n_leading = random.within(0, 2);
    let last = some_width(random);
    let dims = random_dims(random, n_leading, last);
    let own = random_broadcast(random, dims.len() + 1);
    let name = format!("gated_add {dims:?}, gate has {own:?}");
    let (run_dims, run_own, ref_dims) = (dims.clone(), own.clone(), dims.clone());
    let run = move |backend: &dyn Backend, elements: &[u64], residual: &Tensor, out: &Tensor| {
        let gate = put_broadcast(backend, feed, 1, elements, &run_dims, &run_own)?;
        let x = feed.put(backend, 2, elements, &run_dims)?;
        backend.gated_add(residual, &gate, &x, out)
    };
    let reference = move |element: u64, residual: Vec<f64>| {
        let gate = broadcast_values(feed, 1, element, &ref_dims, &own);
        let x = wide(&feed.values(2, element, residual.len()));
        (0..residual.len())
            .map(|i| residual[i] + gate[i] * x[i])
            .collect()
    };
    same_shape(random, feed, name, ELEMENT_LIMIT, dims, run, reference)
}

pub(super) fn affine(random: &mut Random) -> Case {
    let feed = random.feed();
    let last = some_width(random);
    let dims = random_dims(random, 2, last);
    let (scale, shift) = (random.value(), random.value());
    let name = format!("affine {dims:?}");
    let run = move |backend: &dyn Backend, _: &[u64], x: &Tensor, out: &Tensor| {
        backend.affine(x, scale, shift, out)
    };
    let reference = move |_: u64, x: Vec<f64>| {
        x.iter()
            .map(|x| x * f64::from(scale) + f64::from(shift))
            .collect::<Vec<_>>()
    };
    same_shape(random, feed, name, ELEMENT_LIMIT, dims, run, reference)
}

pub(super) fn activation(random: &mut Random) -> Case {
    let feed = random.feed();
    let last = some_width(random);
    let dims = random_dims(random, 2, last);
    let activation = random.pick(&ACTIVATIONS);
    // Through the transition and both tails.
    let factor = random.pick(&[0.01, 1.0, 6.0, 40.0]);
    let name = format!("activation {activation:?} {dims:?} times {factor}");
    let run = move |backend: &dyn Backend, _: &[u64], x: &Tensor, out: &Tensor| {
        let scaled = backend.alloc(x.dims(), feed.dtype)?;
        backend.affine(x, factor, 0.0, &scaled)?;
        backend.copy(&scaled, out)?;
        backend.activation(out, activation, out)
    };
    let reference = move |_: u64, x: Vec<f64>| {
        // The input is rounded once more, which is not the activation's error.
        x.iter()
            .map(|x| activate(activation, f64::from(rounded(feed.dtype, *x as f32 * factor))))
            .collect::<Vec<_>>()
    };
    same_shape(random, feed, name, ELEMENT_LIMIT, dims, run, reference)
}

/// A case of one input and an output of another shape.
pub(super) fn other_shape(
    feed: Feed,
    out_dtype: DType,
    name: String,
    limit: f64,
    (dims, out_dims): (Vec<usize>, Vec<usize>),
    run: impl Fn(&dyn Backend, &Tensor, &Tensor) -> Result<()> + 'static,
    reference: impl Fn(Vec<f64>) -> Vec<f64> + 'static,
) -> Case {
    let n = dims.iter().product();
    Case {
        name,
        limit,
        run: Box::new(move |backend, elements| {
            let x = feed.put(backend, 0, elements, &dims)?;
            let out = Output::new(
                backend,
                out_dtype,
                feed.place(20),
                &with_batch(elements, &out_dims),
            )?;
            run(backend, &x, &out.view)?;
            out.results(backend)
        }),
        reference: Box::new(move |element| reference(wide(&feed.values(0, element, n)))),
    }
}

pub(super) fn gated(random: &mut Random) -> Case {
    let feed = random.feed();
    let half = some_width(random);
    let dims = random_dims(random, 1, 2 * half);
    let out_dims = [&dims[..1], &[half]].concat();
    let activation = random.pick(&ACTIVATIONS);
    let order = random.pick(&[GateOrder::SecondActivated, GateOrder::FirstActivated]);
    let name = format!("gated {dims:?}, {activation:?}, {order:?}");
    let reference = move |x: Vec<f64>| {
        let row = |row: &[f64]| {
            let (first, second) = row.split_at(half);
            let pairs = first.iter().zip(second);
            match order {
                GateOrder::SecondActivated => pairs
                    .map(|(a, b)| a * activate(activation, *b))
                    .collect::<Vec<_>>(),
                GateOrder::FirstActivated => pairs.map(|(a, b)| activate(activation, *a) * b).collect(),
            }
        };
        x.chunks_exact(2 * half).flat_map(row).collect()
    };
    let run = move |backend: &dyn Backend, x: &Tensor, out: &Tensor| backend.gated(x, activation, order, out);
    other_shape(
        feed,
        feed.dtype,
        name,
        ELEMENT_LIMIT,
        (dims, out_dims),
        run,
        reference,
    )
}

pub(super) fn rope(random: &mut Random) -> Case {
    let feed = random.feed();
    let (n_tokens, n_heads, half) = (random.within(1, 20), random.within(1, 3), random.within(1, 40));
    let style = random.pick(&[RopeStyle::Interleaved, RopeStyle::Halves]);
    let (cos, sin) = (
        feed.values(1, 0, n_tokens * half),
        feed.values(2, 0, n_tokens * half),
    );
    let (run_cos, run_sin) = (cos.clone(), sin.clone());
    let name = format!(
        "rope {n_tokens} tokens, {n_heads} heads of {}, {style:?}",
        2 * half
    );
    let run = move |backend: &dyn Backend, _: &[u64], x: &Tensor, out: &Tensor| {
        let cos = put(backend, feed.place(1), &[n_tokens, half], &run_cos)?;
        let sin = put(backend, feed.place(2), &[n_tokens, half], &run_sin)?;
        backend.rope(x, &cos, &sin, style, out)
    };
    let reference = move |_: u64, x: Vec<f64>| {
        let mut out = x.clone();
        for (head, start) in (0..n_tokens * n_heads).map(|head| (head, head * 2 * half)) {
            for i in 0..half {
                let (p, q) = match style {
                    RopeStyle::Interleaved => (start + 2 * i, start + 2 * i + 1),
                    RopeStyle::Halves => (start + i, start + half + i),
                };
                let angle = head / n_heads * half + i;
                let (c, s) = (f64::from(cos[angle]), f64::from(sin[angle]));
                (out[p], out[q]) = (x[p] * c - x[q] * s, x[q] * c + x[p] * s);
            }
        }
        out
    };
    same_shape(
        random,
        feed,
        name,
        ELEMENT_LIMIT,
        vec![n_tokens, 2 * half * n_heads],
        run,
        reference,
    )
}
