//! `norm.cu`.

use crate::{in_both_schedules, operands::*};
use denoised_tensor::{Activation, Backend, Tensor, WeightKind};

in_both_schedules!(
    formulas_hold,
    long_rows_and_many_chunks_hold,
    rows_cut_in_every_dimension_hold,
);

fn formulas_hold() {
    formulas(
        &FLOATS,
        &["layer_norm", "rms_norm", "match_norm", "group_norm"],
        16,
    );
}

fn normal(group: &[f64], eps: f64) -> Vec<f64> {
    let n = group.len() as f64;
    let mean = group.iter().sum::<f64>() / n;
    let variance = group.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    group
        .iter()
        .map(|x| (x - mean) / (variance + eps).sqrt())
        .collect()
}

/// Rows that have a block each; groups whose statistics come from many chunks, the last of them shorter; rows of more vectors than a
/// block has threads.
fn long_rows_and_many_chunks_hold() {
    for dtype in FLOATS {
        let backend = backend(dtype);
        // The last two take the grid's loop more than one round, of warps and of blocks.
        for (n_rows, n, offset) in [
            (3, 1025, 0),
            (2, 2048, 0),
            (2, 2056, 8),
            (5, 1100, 1),
            (1301, 5, 0),
            (141, 1032, 0),
        ] {
            let x = values(dtype, n as u64, n_rows * n);
            let view = put_apart(&backend, dtype, &[n_rows, n], &x, offset, 8);
            let out = backend.alloc(&[n_rows, n], dtype).expect("memory");
            let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
            backend
                .layer_norm(&view, None, 1e-5, None, &out)
                .expect("shapes that fit");
            let expected: Vec<f64> = wide.chunks_exact(n).flat_map(|row| normal(row, 1e-5)).collect();
            assert_close("layer_norm", &get(&backend, &out), &expected, limit(dtype));
            backend
                .rms_norm(&view, None, n, 1e-5, &out)
                .expect("shapes that fit");
            let row = |row: &[f64]| {
                let factor = (row.iter().map(|x| x * x).sum::<f64>() / n as f64 + 1e-5).sqrt();
                row.iter().map(|x| x / factor).collect::<Vec<_>>()
            };
            let expected: Vec<f64> = wide.chunks_exact(n).flat_map(row).collect();
            assert_close("rms_norm", &get(&backend, &out), &expected, limit(dtype));
            let like = values(dtype, 1 + n as u64, n_rows * n);
            let like_view = put_apart(&backend, dtype, &[n_rows, n], &like, 2 * offset, 16);
            backend
                .match_norm(&view, &like_view, n, &out)
                .expect("shapes that fit");
            let like: Vec<f64> = like.iter().map(|x| f64::from(*x)).collect();
            let length = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt();
            let row = |(row, like): (&[f64], &[f64])| {
                let factor = length(like) / length(row);
                row.iter().map(|x| x * factor).collect::<Vec<_>>()
            };
            let expected: Vec<f64> = wide
                .chunks_exact(n)
                .zip(like.chunks_exact(n))
                .flat_map(row)
                .collect();
            assert_close("match_norm", &get(&backend, &out), &expected, limit(dtype));
        }
        for (n_batch, n_positions, n, n_groups) in [
            (2, 131, 40, 4),
            (1, 8300, 8, 2),
            (2, 3, 2304, 32),
            (1, 70, 300, 300),
        ] {
            let mut x = values(dtype, n as u64, n_batch * n_positions * n);
            // Positions differ in their mean, so that chunks do.
            for (i, x) in x.iter_mut().enumerate() {
                *x = rounded(
                    dtype,
                    *x + (i / n % n_positions) as f32 / n_positions as f32 * 4.0,
                );
            }
            let ones = vec![1.0; n];
            let bias = values(dtype, 9, n);
            let weights = weights(
                &backend,
                &[
                    (WeightKind::Vector, &[n], &ones),
                    (WeightKind::Vector, &[n], &bias),
                ],
            );
            let view = put(&backend, dtype, &[n_batch, n_positions, n], &x);
            let out = backend.alloc(view.dims(), dtype).expect("memory");
            let affine = (&weights[0], &weights[1]);
            backend
                .group_norm(&view, affine, n_groups, 1e-5, Activation::None, &out)
                .expect("shapes that fit");
            let mut expected = vec![0.0; x.len()];
            let group_len = n / n_groups;
            for (batch, group) in
                (0..n_batch).flat_map(|batch| (0..n_groups).map(move |group| (batch, group)))
            {
                let places: Vec<usize> = (0..n_positions * group_len)
                    .map(|i| (batch * n_positions + i / group_len) * n + group * group_len + i % group_len)
                    .collect();
                let own: Vec<f64> = places.iter().map(|place| f64::from(x[*place])).collect();
                for (place, value) in places.iter().zip(normal(&own, 1e-5)) {
                    expected[*place] = value + f64::from(bias[place % n]);
                }
            }
            assert_close("group_norm", &get(&backend, &out), &expected, limit(dtype));
        }
    }
}

/// Rows of views that are narrower in each dimension, so that none can be walked together with the next.
fn rows_cut_in_every_dimension_hold() {
    let (whole_dims, dims, starts) = ([3, 4, 5, 6], [2, 3, 4, 5], [1, 0, 1, 1]);
    let cut = |whole: &Tensor| {
        let cuts = dims.iter().zip(starts).enumerate();
        cuts.fold(whole.clone(), |part, (dim_idx, (extent, start))| {
            part.narrow(dim_idx, start, *extent).expect("inside")
        })
    };
    for dtype in FLOATS {
        let backend = backend(dtype);
        let whole = values(dtype, 7, whole_dims.iter().product());
        let x = cut(&put(&backend, dtype, &whole_dims, &whole));
        let mut expected = Vec::new();
        for row in 0..24 {
            let (batch, high, wide) = (row / 12 + 1, row / 4 % 3, row % 4 + 1);
            let first = ((batch * 4 + high) * 5 + wide) * 6 + 1;
            let row: Vec<f64> = whole[first..first + 5].iter().map(|x| f64::from(*x)).collect();
            expected.extend(normal(&row, 1e-5));
        }
        let surroundings = put(&backend, dtype, &whole_dims, &vec![0.5; whole.len()]);
        let out = cut(&surroundings);
        backend
            .layer_norm(&x, None, 1e-5, None, &out)
            .expect("shapes that fit");
        assert_close("layer_norm", &get(&backend, &out), &expected, limit(dtype));
        let n_kept = get(&backend, &surroundings).iter().filter(|x| **x == 0.5).count();
        assert!(n_kept >= whole.len() - expected.len(), "{n_kept} around it");
    }
}
