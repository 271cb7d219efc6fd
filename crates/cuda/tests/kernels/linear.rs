//! Products through cuBLASLt: edges of sizes, rows in several levels, operands that lie anyhow.

use crate::{in_both_schedules, operands::*};
use denoised_tensor::{Activation, Backend, DType, Epilogue, Tensor, Weight, WeightKind};

in_both_schedules!(formulas_hold, sizes_around_vectors_hold, rows_in_levels_hold);

fn formulas_hold() {
    formulas(&FLOATS, &["linear"], 24);
}

/// `x wᵀ + bias` of rows that lie one after another in `x`.
fn products(x: &[f32], w: &[f32], bias: &[f32], [n, k]: [usize; 2]) -> Vec<f64> {
    let dot = |row: &[f32], w: &[f32]| {
        row.iter()
            .zip(w)
            .map(|(x, w)| f64::from(*x) * f64::from(*w))
            .sum::<f64>()
    };
    let row = |row: &[f32]| {
        let columns = w.chunks_exact(k).zip(bias);
        columns
            .map(|(w, bias)| dot(row, w) + f64::from(*bias))
            .take(n)
            .collect::<Vec<_>>()
    };
    x.chunks_exact(k).flat_map(row).collect()
}

fn matrix(backend: &dyn Backend, dtype: DType, [n, k]: [usize; 2]) -> (Vec<f32>, Vec<f32>, Vec<Weight>) {
    let (w, bias) = (values(dtype, 1, n * k), values(dtype, 2, n));
    let all = [
        (WeightKind::Matrix, &[n, k][..], &w[..]),
        (WeightKind::Vector, &[n], &bias),
    ];
    let weights = weights(backend, &all);
    (w, bias, weights)
}

fn sizes_around_vectors_hold() {
    for dtype in FLOATS {
        let backend = backend(dtype);
        for [m, n, k] in [
            [1, 1, 1],
            [7, 8, 15],
            [16, 17, 7],
            [8, 129, 16],
            [127, 7, 128],
            [129, 15, 127],
            [2, 16, 129],
        ] {
            let (w, bias, weights) = matrix(&backend, dtype, [n, k]);
            let x = values(dtype, 3, m * k);
            let expected = products(&x, &w, &bias, [n, k]);
            for (offset, gap) in [(0, 0), (1, 0), (4, 4), (0, 8)] {
                let view = put_apart(&backend, dtype, &[1, m, k], &x, offset, gap);
                // Into columns of a larger tensor; what lies beside them stays.
                let whole = put(
                    &backend,
                    dtype,
                    &[1, m, n + offset + 1],
                    &vec![2.0; m * (n + offset + 1)],
                );
                let out = whole.narrow(2, offset, n).expect("inside");
                let epilogue = Epilogue {
                    bias: Some(&weights[1]),
                    ..Epilogue::default()
                };
                backend
                    .linear(&view, &weights[0], &epilogue, &out)
                    .expect("shapes that fit");
                let what = format!("{dtype} {m}x{n}x{k} at {offset} + {gap}");
                assert_close(&what, &get(&backend, &out), &expected, limit(dtype));
                let beside = get(&backend, &whole.narrow(2, offset + n, 1).expect("inside"));
                assert!(
                    beside.iter().all(|x| *x == 2.0),
                    "{what}: written beside the output"
                );
            }
        }
    }
}

/// Parts of larger tensors in two and three dimensions, whose rows no single stride walks: a batch, and several products.
fn rows_in_levels_hold() {
    for dtype in FLOATS {
        let backend = backend(dtype);
        let ([n, k], extents) = ([12, 24], [2, 3, 4]);
        let (w, bias, weights) = matrix(&backend, dtype, [n, k]);
        let part = |whole: &Tensor| {
            let part = whole.narrow(1, 1, extents[1]).expect("inside");
            part.narrow(2, 2, extents[2]).expect("inside")
        };
        let whole_dims = |n: usize| [extents[0], extents[1] + 2, extents[2] + 3, n];
        let count = |n: usize| whole_dims(n).iter().product::<usize>();
        let x = part(&put(&backend, dtype, &whole_dims(k), &values(dtype, 3, count(k))));
        let residual = part(&put(&backend, dtype, &whole_dims(n), &values(dtype, 4, count(n))));
        let gate = values(dtype, 5, extents[0] * n);
        let gate_view = put(&backend, dtype, &[extents[0], n], &gate);
        let products = products(&get(&backend, &x), &w, &bias, [n, k]);
        let added = get(&backend, &residual);
        for (is_gated, is_in_place) in [(false, false), (false, true), (true, false), (true, true)] {
            let whole = put(&backend, dtype, &whole_dims(n), &vec![2.0; count(n)]);
            let out = part(&whole);
            if is_in_place {
                backend.copy(&residual, &out).expect("one shape");
            }
            let epilogue = Epilogue {
                bias: Some(&weights[1]),
                activation: if is_gated {
                    Activation::Relu
                } else {
                    Activation::None
                },
                gate: is_gated.then_some(&gate_view),
                residual: Some(if is_in_place { &out } else { &residual }),
            };
            backend
                .linear(&x, &weights[0], &epilogue, &out)
                .expect("shapes that fit");
            let per_batch = extents[1] * extents[2] * n;
            let finished = |(i, product): (usize, &f64)| {
                let gate = f64::from(gate[i / per_batch * n + i % n]);
                let product = if is_gated {
                    product.max(0.0) * gate
                } else {
                    *product
                };
                product + f64::from(added[i])
            };
            let expected: Vec<f64> = products.iter().enumerate().map(finished).collect();
            let what = format!("{dtype}, gated {is_gated}, in place {is_in_place}");
            assert_close(&what, &get(&backend, &out), &expected, limit(dtype));
            let beside = get(&backend, &whole.narrow(1, 0, 1).expect("inside"));
            assert!(
                beside.iter().all(|x| *x == 2.0),
                "{what}: written beside the output"
            );
        }
    }
}
