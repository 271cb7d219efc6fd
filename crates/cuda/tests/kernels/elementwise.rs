//! `elementwise.cu`, which also moves elements for patches and permutations and finishes products.

use crate::{in_both_schedules, operands::*};
use denoised_tensor::{Activation, Backend, DType, Epilogue, WeightKind};

in_both_schedules!(
    formulas_hold,
    vectors_and_scalars_agree,
    integers_are_copied,
    finishes_hold
);

fn formulas_hold() {
    let ops = [
        "add",
        "mul",
        "gated_add",
        "affine",
        "activation",
        "gated",
        "copy",
        "fill",
        "patchify",
        "unpatchify",
        "permute",
        "upsample_nearest",
    ];
    formulas(&FLOATS, &ops, 12);
}

/// Every class of alignment, and lengths around whole vectors; more items than one round of threads takes.
fn vectors_and_scalars_agree() {
    for dtype in FLOATS {
        let backend = backend(dtype);
        for n in [1, 2, 3, 4, 7, 8, 9, 16, 17, 24] {
            let n_rows = 37;
            let (a, b) = (values(dtype, 1, n_rows * n), values(dtype, 2, n_rows * n));
            for (offset, gap) in [(0, 0), (1, 0), (2, 2), (4, 4), (8, 8), (0, 8), (3, 5)] {
                let x = put_apart(&backend, dtype, &[n_rows, n], &a, offset, gap);
                let y = put_apart(&backend, dtype, &[n_rows, n], &b, 0, gap);
                let out = backend.alloc(&[n_rows, n], dtype).expect("memory");
                backend.mul(&x, &y, &out).expect("shapes that fit");
                let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| rounded(dtype, a * b)).collect();
                assert_eq!(
                    get(&backend, &out),
                    expected,
                    "{dtype} {n} columns at {offset} + {gap}"
                );
            }
        }
        // The grid has at most 32 blocks of 256 threads per multiprocessor; the loop takes the rest.
        let n = 256 * 32 * 16 + 13;
        let a = values(dtype, 3, n);
        let x = put_apart(&backend, dtype, &[1, n], &a, 1, 0);
        let out = backend.alloc(&[1, n], dtype).expect("memory");
        backend.affine(&x, 2.0, 0.0, &out).expect("shapes that fit");
        let expected: Vec<f32> = a.iter().map(|a| 2.0 * a).collect();
        assert_eq!(get(&backend, &out), expected);
    }
}

fn integers_are_copied() {
    let backend = backend(DType::F32);
    let ints: Vec<i32> = (0..77).map(|i| i * 1_000_003 - 30_000_000).collect();
    let raw: Vec<u8> = ints.iter().flat_map(|i| i.to_le_bytes()).collect();
    for offset in [0, 1] {
        let x = backend.upload(&raw, &[7, 11], DType::I32).expect("memory");
        let x = x.narrow(1, offset, 8).expect("inside");
        let out = backend.alloc(&[7, 8], DType::I32).expect("memory");
        backend.copy(&x, &out).expect("one dtype");
        let mut got = vec![0; 7 * 8 * 4];
        backend.download(&out, &mut got).expect("downloaded");
        let expected: Vec<u8> = (0..7)
            .flat_map(|row| &ints[11 * row + offset..][..8])
            .flat_map(|i| i.to_le_bytes())
            .collect();
        assert_eq!(got, expected);
    }
    let bytes: Vec<u8> = (0..=255).collect();
    let x = backend.upload(&bytes, &[16, 16], DType::U8).expect("memory");
    let out = backend.alloc(&[16, 16], DType::U8).expect("memory");
    backend.copy(&x, &out).expect("one dtype");
    let mut got = vec![0; 256];
    backend.download(&out, &mut got).expect("downloaded");
    assert_eq!(got, bytes);
    let out = backend.alloc(&[16, 16], DType::F32).expect("memory");
    backend.copy(&x, &out).expect("to floats");
    let expected: Vec<f32> = bytes.iter().map(|x| f32::from(*x)).collect();
    assert_eq!(get(&backend, &out), expected);
}

/// What follows a product, with and without each of its parts; the product itself is that with the unit matrix.
fn finishes_hold() {
    for dtype in FLOATS {
        let backend = backend(dtype);
        let (n_batch, n_rows, n) = (3, 5, 24);
        let unit: Vec<f32> = (0..n * n).map(|i| f32::from(i % (n + 1) == 0)).collect();
        let weights = weights(&backend, &[(WeightKind::Matrix, &[n, n], &unit)]);
        let dims = [n_batch, n_rows, n];
        let count = n_batch * n_rows * n;
        let (x, residual) = (values(dtype, 1, count), values(dtype, 2, count));
        let gate = values(dtype, 3, n_batch * n);
        for (has_gate, gate_rows, has_residual) in [
            (true, n_batch, true),
            (true, 1, true),
            (true, n_batch, false),
            (false, 1, true),
            (false, 1, false),
        ] {
            let (x_view, residual_view) = (
                put(&backend, dtype, &dims, &x),
                put(&backend, dtype, &dims, &residual),
            );
            let gate_view = put(&backend, dtype, &[gate_rows, n], &gate[..gate_rows * n]);
            let out = backend.alloc(&dims, dtype).expect("memory");
            let epilogue = Epilogue {
                bias: None,
                activation: Activation::Relu,
                gate: has_gate.then_some(&gate_view),
                residual: has_residual.then_some(&residual_view),
            };
            backend
                .linear(&x_view, &weights[0], &epilogue, &out)
                .expect("shapes that fit");
            let expected: Vec<f64> = (0..count)
                .map(|i| {
                    let batch = if gate_rows == 1 { 0 } else { i / (n_rows * n) };
                    let gate = if has_gate { gate[batch * n + i % n] } else { 1.0 };
                    f64::from(x[i].max(0.0)) * f64::from(gate)
                        + if has_residual { f64::from(residual[i]) } else { 0.0 }
                })
                .collect();
            assert_close("a finish", &get(&backend, &out), &expected, limit(dtype));
        }
    }
}
