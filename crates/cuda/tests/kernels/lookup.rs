//! `lookup.cu`.

use crate::{in_both_schedules, operands::*};
use denoised_tensor::{Backend, DType, RopeStyle, TensorError, TimestepSpec, WeightKind};

in_both_schedules!(
    formulas_hold,
    heads_of_whole_vectors_are_rotated,
    more_than_one_round_of_threads,
    numbers_out_of_range_are_told,
);

fn formulas_hold() {
    formulas(
        &FLOATS,
        &["rope", "embedding", "gather_rows", "timestep_embedding"],
        16,
    );
}

/// Heads that are rotated by vectors, in a picture of several batch elements.
fn heads_of_whole_vectors_are_rotated() {
    for dtype in FLOATS {
        let backend = backend(dtype);
        let (n_batch, n_tokens, n_heads, half) = (2, 5, 3, 16);
        let x = values(dtype, 1, n_batch * n_tokens * n_heads * 2 * half);
        let (cos, sin) = (
            values(DType::F32, 2, n_tokens * half),
            values(DType::F32, 3, n_tokens * half),
        );
        let view = put(&backend, dtype, &[n_batch, n_tokens, n_heads * 2 * half], &x);
        let angles = |values: &[f32], gap| put_apart(&backend, DType::F32, &[n_tokens, half], values, 0, gap);
        for style in [RopeStyle::Interleaved, RopeStyle::Halves] {
            let out = backend.alloc(view.dims(), dtype).expect("memory");
            backend
                .rope(&view, &angles(&cos, 1), &angles(&sin, 4), style, &out)
                .expect("shapes that fit");
            let mut expected = vec![0.0; x.len()];
            for (head, start) in (0..n_batch * n_tokens * n_heads).map(|head| (head, head * 2 * half)) {
                for i in 0..half {
                    let (p, q) = match style {
                        RopeStyle::Interleaved => (start + 2 * i, start + 2 * i + 1),
                        RopeStyle::Halves => (start + i, start + half + i),
                    };
                    let angle = head / n_heads % n_tokens * half + i;
                    let (c, s) = (f64::from(cos[angle]), f64::from(sin[angle]));
                    let (x_p, x_q) = (f64::from(x[p]), f64::from(x[q]));
                    (expected[p], expected[q]) = (x_p * c - x_q * s, x_q * c + x_p * s);
                }
            }
            assert_close("rope", &get(&backend, &out), &expected, limit(dtype));
        }
    }
}

/// A number that is no row is named at the next wait, once; the device goes on.
fn numbers_out_of_range_are_told() {
    let backend = backend(DType::F32);
    let weights = weights(&backend, &[(WeightKind::Table, &[6, 4], &[0.5; 24])]);
    let ints = |values: &[i32], dims: &[usize]| {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        backend.upload(&bytes, dims, DType::I32).expect("memory")
    };
    for bad in [6, -1, i32::MAX, i32::MIN] {
        let out = backend.alloc(&[2, 4], DType::F32).expect("memory");
        backend
            .embedding(&ints(&[5, bad], &[2]), &weights[0], &out)
            .expect("not looked at yet");
        let told = backend.synchronize();
        let detail = format!("{bad} is no row of the table");
        assert_eq!(
            told,
            Err(TensorError::Shape {
                op: "embedding",
                detail
            })
        );
        assert_eq!(backend.synchronize(), Ok(()));
        let x = put(&backend, DType::F32, &[2, 3, 4], &[0.25; 24]);
        backend
            .gather_rows(&x, &ints(&[2, bad.clamp(-1, 3)], &[2]), &out)
            .expect("not looked at yet");
        let told = backend.synchronize();
        assert!(
            matches!(
                &told,
                Err(TensorError::Shape {
                    op: "gather_rows",
                    ..
                })
            ),
            "{told:?}"
        );
    }
    let out = backend.alloc(&[2, 4], DType::F32).expect("memory");
    backend
        .embedding(&ints(&[0, 5], &[2]), &weights[0], &out)
        .expect("rows that are there");
    assert_eq!(get(&backend, &out), [0.5; 8]);
}

/// More items than the grid has threads (32 blocks of 256 for each of the stand-in's 4 multiprocessors), so that loops come around.
fn more_than_one_round_of_threads() {
    const ITEMS: usize = 32 * 4 * 256;
    let backend = backend(DType::F32);
    let n = 100;
    let n_tokens = ITEMS / n + 3;
    let table = values(DType::F32, 1, 7 * n);
    let weights = weights(&backend, &[(WeightKind::Table, &[7, n], &table)]);
    let ids: Vec<u8> = (0..n_tokens as i32)
        .flat_map(|i| (i * 5 % 7).to_le_bytes())
        .collect();
    let ids = backend.upload(&ids, &[n_tokens], DType::I32).expect("memory");
    let out = backend.alloc(&[n_tokens, n], DType::F32).expect("memory");
    backend
        .embedding(&ids, &weights[0], &out)
        .expect("rows that are there");
    let expected: Vec<f32> = (0..n_tokens)
        .flat_map(|i| &table[i * 5 % 7 * n..][..n])
        .copied()
        .collect();
    assert_eq!(get(&backend, &out), expected);

    // A quarter turn: (p, q) becomes (-q, p).
    let (n_rows, half) = (ITEMS / 50 + 3, 50);
    let x = values(DType::F32, 2, n_rows * 2 * half);
    let view = put(&backend, DType::F32, &[1, n_rows, 2 * half], &x);
    let cos = put(&backend, DType::F32, &[n_rows, half], &vec![0.0; n_rows * half]);
    let sin = put(&backend, DType::F32, &[n_rows, half], &vec![1.0; n_rows * half]);
    let out = backend.alloc(view.dims(), DType::F32).expect("memory");
    backend
        .rope(&view, &cos, &sin, RopeStyle::Halves, &out)
        .expect("shapes that fit");
    let turned = |row: &[f32]| {
        [
            row[half..].iter().map(|q| -q).collect::<Vec<_>>(),
            row[..half].to_vec(),
        ]
        .concat()
    };
    let expected: Vec<f32> = x.chunks_exact(2 * half).flat_map(turned).collect();
    assert_eq!(get(&backend, &out), expected);

    // The embedding of zero: sines of 0 and cosines of 1.
    let timesteps = put(&backend, DType::F32, &[2], &[0.0; 2]);
    let half = ITEMS / 2 + 5;
    let out = backend.alloc(&[2, 2 * half], DType::F32).expect("memory");
    let spec = TimestepSpec {
        flip_sin_to_cos: false,
        downscale_freq_shift: 0.0,
        scale: 1.0,
        max_period: 1e4,
    };
    backend
        .timestep_embedding(&timesteps, &spec, &out)
        .expect("shapes that fit");
    for row in get(&backend, &out).chunks_exact(2 * half) {
        assert!(row[..half].iter().all(|x| *x == 0.0) && row[half..].iter().all(|x| *x == 1.0));
    }
}
