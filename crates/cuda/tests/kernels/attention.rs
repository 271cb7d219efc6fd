//! `attention.cu` and `flash.cu`.

use crate::{in_both_schedules, operands::*};
use denoised_tensor::{AttentionSpec, Backend, DType};

in_both_schedules!(
    plain_formulas_hold,
    flash_formulas_hold,
    plain_edges_hold,
    flash_edges_hold,
    plain_nan_is_seen,
    flash_nan_is_seen,
);

fn plain_formulas_hold() {
    formulas(&[DType::F32], &["attention"], 10);
}

fn flash_formulas_hold() {
    formulas(&SHORT, &["attention"], 14);
}

#[derive(Clone, Copy, Debug)]
struct Case {
    n_queries: usize,
    n_keys: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    is_causal: bool,
    /// Whether keys are hidden by a bias, all of them from the first query.
    is_hidden: bool,
    /// Elements that views start after a boundary.
    offset: usize,
    scale: f32,
}

const CASE: Case = Case {
    n_queries: 1,
    n_keys: 1,
    n_heads: 1,
    n_kv_heads: 1,
    head_dim: 8,
    is_causal: false,
    is_hidden: false,
    offset: 0,
    scale: 1.5,
};

fn run(dtype: DType, case: Case) {
    let backend = backend(dtype);
    let Case {
        n_queries,
        n_keys,
        n_heads,
        n_kv_heads,
        head_dim,
        offset,
        ..
    } = case;
    let n_batch = 2;
    let (n_q, n_kv) = (n_heads * head_dim, n_kv_heads * head_dim);
    let q = values(dtype, 1, n_batch * n_queries * n_q);
    let k = values(dtype, 2, n_batch * n_keys * n_kv);
    let v = values(dtype, 3, n_batch * n_keys * n_kv);
    let mut bias = values(DType::F32, 4, n_queries * n_keys);
    for (i, bias) in bias.iter_mut().enumerate() {
        if i / n_keys == 0 || i % 3 == 1 {
            *bias = f32::NEG_INFINITY;
        }
    }
    let view = |dims: &[usize], values: &[f32]| put_apart(&backend, dtype, dims, values, offset, 8);
    let (q_view, k_view) = (
        view(&[n_batch, n_queries, n_q], &q),
        view(&[n_batch, n_keys, n_kv], &k),
    );
    let v_view = view(&[n_batch, n_keys, n_kv], &v);
    let bias_view = put(&backend, DType::F32, &[1, 1, n_queries, n_keys], &bias);
    let scale = case.scale / (head_dim as f32).sqrt();
    let spec = AttentionSpec {
        n_heads,
        n_kv_heads,
        scale,
        is_causal: case.is_causal,
        bias: case.is_hidden.then_some(&bias_view),
    };
    // NaN, and still so around it when it has been written.
    let nan = vec![f32::NAN; n_batch * n_queries * (n_q + offset + 8)];
    let whole = put(&backend, dtype, &[n_batch, n_queries, n_q + offset + 8], &nan);
    let out = whole.narrow(2, offset, n_q).expect("inside");
    backend
        .attention(&q_view, &k_view, &v_view, &spec, &out)
        .expect("shapes that fit");
    let mut expected = vec![0.0; q.len()];
    for (batch, i, head) in (0..n_batch * n_queries * n_heads).map(|flat| {
        (
            flat / (n_queries * n_heads),
            flat / n_heads % n_queries,
            flat % n_heads,
        )
    }) {
        let own = &q[(batch * n_queries + i) * n_q + head * head_dim..][..head_dim];
        let kv = |values: &[f32], j: usize, c: usize| {
            f64::from(values[(batch * n_keys + j) * n_kv + head * n_kv_heads / n_heads * head_dim + c])
        };
        let scores: Vec<f64> = (0..n_keys)
            .map(|j| {
                let dot: f64 = own
                    .iter()
                    .enumerate()
                    .map(|(c, q)| f64::from(*q) * kv(&k, j, c))
                    .sum();
                let hidden = case.is_causal && j > i;
                let bias = if case.is_hidden {
                    f64::from(bias[i * n_keys + j])
                } else {
                    0.0
                };
                if hidden {
                    f64::NEG_INFINITY
                } else {
                    dot * f64::from(scale) + bias
                }
            })
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if largest == f64::NEG_INFINITY {
            continue;
        }
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        for c in 0..head_dim {
            expected[(batch * n_queries + i) * n_q + head * head_dim + c] =
                (0..n_keys).map(|j| weights[j] * kv(&v, j, c)).sum::<f64>() / total;
        }
    }
    assert_close(
        &format!("{dtype} {case:?}"),
        &get(&backend, &out),
        &expected,
        limit(dtype),
    );
    let is_inside = |i: usize| (offset..offset + n_q).contains(&(i % (n_q + offset + 8)));
    let is_kept = |(i, x): (usize, &f32)| is_inside(i) || x.is_nan();
    assert!(
        get(&backend, &whole).iter().enumerate().all(is_kept),
        "{dtype} {case:?}: written beside the output"
    );
}

fn edges() -> Vec<Case> {
    let mut cases = vec![CASE];
    // Around whole blocks of queries and tiles of keys.
    for (n_queries, n_keys) in [
        (15, 31),
        (16, 32),
        (17, 33),
        (63, 64),
        (64, 65),
        (65, 129),
        (1, 200),
    ] {
        cases.push(Case {
            n_queries,
            n_keys,
            n_heads: 2,
            ..CASE
        });
    }
    for n in [1, 16, 33, 70] {
        cases.push(Case {
            n_queries: n,
            n_keys: n,
            n_heads: 2,
            is_causal: true,
            head_dim: 40,
            ..CASE
        });
    }
    cases.push(Case {
        n_queries: 20,
        n_keys: 70,
        n_heads: 6,
        n_kv_heads: 2,
        head_dim: 16,
        is_hidden: true,
        ..CASE
    });
    cases.push(Case {
        n_queries: 34,
        n_keys: 34,
        n_heads: 2,
        head_dim: 16,
        is_hidden: true,
        is_causal: true,
        ..CASE
    });
    cases.push(Case {
        n_queries: 9,
        n_keys: 77,
        n_heads: 3,
        head_dim: 40,
        offset: 1,
        ..CASE
    });
    cases.push(Case {
        n_queries: 9,
        n_keys: 40,
        n_heads: 3,
        head_dim: 4,
        offset: 4,
        ..CASE
    });
    cases
}

fn plain_edges_hold() {
    for case in edges() {
        run(DType::F32, case);
    }
    // Wider than a slice, in every dtype.
    for dtype in FLOATS {
        for head_dim in [257, 300, 520] {
            run(
                dtype,
                Case {
                    n_queries: 17,
                    n_keys: 35,
                    n_heads: 2,
                    head_dim,
                    ..CASE
                },
            );
        }
    }
    run(
        DType::F32,
        Case {
            n_queries: 3,
            n_keys: 40,
            n_heads: 2,
            head_dim: 129,
            ..CASE
        },
    );
}

fn flash_edges_hold() {
    for dtype in SHORT {
        for case in edges() {
            run(dtype, case);
        }
    }
    // Two tiles of queries per warp, which needs many of them: the second just begun and whole, a second block, every tile with its end
    // hidden; and rows that are no whole pieces, for which there is no such thing.
    for (n_queries, n_keys, head_dim, offset) in [
        (65, 65, 40, 0),
        (129, 70, 64, 0),
        (128, 49, 80, 0),
        (130, 97, 128, 0),
        (96, 64, 36, 4),
        (70, 50, 64, 1),
    ] {
        let case = Case {
            n_queries,
            n_keys,
            n_heads: 2,
            head_dim,
            offset,
            ..CASE
        };
        run(DType::BF16, case);
    }
    for (n, head_dim) in [(130, 64), (100, 128)] {
        let case = Case {
            n_queries: n,
            n_keys: n,
            n_heads: 2,
            head_dim,
            is_causal: true,
            ..CASE
        };
        run(DType::F16, case);
    }
    run(
        DType::BF16,
        Case {
            n_queries: 129,
            n_keys: 67,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 48,
            is_hidden: true,
            ..CASE
        },
    );
    // Only the largest score keeps exponentials finite, and with a negative scale it is that of the smallest product.
    for scale in [400.0, -400.0] {
        let case = Case {
            n_queries: 3,
            n_keys: 128,
            scale,
            ..CASE
        };
        run(DType::BF16, case);
    }
    // Every padded width, full and not, with a second tile of keys.
    for head_dim in [
        20, 32, 36, 48, 64, 72, 80, 96, 104, 128, 132, 160, 168, 200, 256, 300, 384, 512,
    ] {
        run(
            DType::BF16,
            Case {
                n_queries: 5,
                n_keys: 70,
                n_heads: 2,
                head_dim,
                ..CASE
            },
        );
    }
}

/// A query of NaN has no largest score and yields NaN, not the zeros of a query that sees no key.
fn nan_is_seen(dtype: DType) {
    let backend = backend(dtype);
    let mut q = vec![0.5; 3 * 8];
    q[8..16].fill(f32::NAN);
    let (q, k) = (
        put(&backend, dtype, &[1, 3, 8], &q),
        put(&backend, dtype, &[1, 5, 8], &[0.25; 40]),
    );
    let out = backend.alloc(&[1, 3, 8], dtype).expect("memory");
    let spec = AttentionSpec {
        n_heads: 1,
        n_kv_heads: 1,
        scale: 1.0,
        is_causal: false,
        bias: None,
    };
    backend
        .attention(&q, &k, &k, &spec, &out)
        .expect("shapes that fit");
    let got = get(&backend, &out);
    assert!(got[8..16].iter().all(|x| x.is_nan()), "{got:?}");
    assert!(got[..8].iter().chain(&got[16..]).all(|x| *x == 0.25), "{got:?}");
}

fn plain_nan_is_seen() {
    nan_is_seen(DType::F32);
}

fn flash_nan_is_seen() {
    nan_is_seen(DType::BF16);
}
