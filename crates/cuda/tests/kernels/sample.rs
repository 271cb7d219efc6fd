//! `sample.cu`.

use crate::{in_both_schedules, operands::*};
use denoised_tensor::{Backend, DType, StepArgs};

in_both_schedules!(
    formulas_hold,
    whatever_is_not_finite_is_found,
    halves_go_to_even,
    more_than_one_round_of_threads,
);

fn formulas_hold() {
    formulas(&FLOATS, &["step", "to_pixels"], 16);
}

/// One bad element anywhere, in vectors and in scalars, and in the part that a second round of the loop looks at.
fn whatever_is_not_finite_is_found() {
    for dtype in FLOATS {
        let backend = backend(dtype);
        for (n_rows, n, offset) in [(1, 1, 0), (3, 16, 0), (3, 17, 1), (1, 256 * 32 * 16 * 8 + 24, 0)] {
            let x = values(dtype, 1, n_rows * n);
            let view = |x: &[f32]| put_apart(&backend, dtype, &[n_rows, n], x, offset, offset);
            assert_eq!(backend.all_finite(&view(&x)), Ok(true), "{dtype} {n_rows}x{n}");
            // The last is the first of what a second round looks at, of 4 multiprocessors, 32 blocks and 256 threads.
            let second_round = 4 * 32 * 256 * (16 / dtype.size_bytes());
            for place in [0, n - 1, n_rows * n - 1, second_round.min(n_rows * n - 1)] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut x = x.clone();
                    x[place] = bad;
                    assert_eq!(
                        backend.all_finite(&view(&x)),
                        Ok(false),
                        "{dtype} {bad} at {place} of {n_rows}x{n}"
                    );
                }
            }
        }
    }
}

/// `255 u` of exactly one half more than a whole number: 0.5 to 0, 1.5 to 2, 2.5 to 2 (by hand).
fn halves_go_to_even() {
    let backend = backend(DType::F32);
    // u = (i + 1/2) / 255 is not exact in f32, so the halves are made by u = 1/2, where 255 u = 127.5.
    let x = put(&backend, DType::F32, &[1, 5], &[0.0, -1.0, 1.0, 7.0, -7.0]);
    let out = backend.alloc(&[1, 5], DType::U8).expect("memory");
    backend.to_pixels(&x, &out).expect("shapes that fit");
    let mut got = [0; 5];
    backend.download(&out, &mut got).expect("downloaded");
    assert_eq!(got, [128, 0, 255, 255, 0]);
}

/// More elements than the grid has threads.
fn more_than_one_round_of_threads() {
    let backend = backend(DType::F32);
    let n = 4 * 32 * 256 + 77;
    let x = values(DType::F32, 1, n);
    let view = put(&backend, DType::F32, &[1, n], &x);
    let out = backend.alloc(&[1, n], DType::F32).expect("memory");
    backend.to_pixels(&view, &out).expect("shapes that fit");
    let expected: Vec<f64> = x.iter().map(|x| f64::from(*x) / 2.0 + 0.5).collect();
    assert_close("to_pixels", &get(&backend, &out), &expected, limit(DType::F32));
    // Latents less the prediction.
    let prediction = values(DType::F32, 2, n);
    let args = StepArgs {
        latents: &view,
        conditional: &put(&backend, DType::F32, &[1, n], &prediction),
        unconditional: None,
        coefficients: &put(&backend, DType::F32, &[1, 3], &[1.0, -1.0, f32::NAN]),
        noise: None,
        guided_out: None,
    };
    backend.step(&args, &out).expect("shapes that fit");
    let expected: Vec<f32> = x.iter().zip(&prediction).map(|(x, y)| x - y).collect();
    assert_eq!(get(&backend, &out), expected);
}
