//! Products of matrices: values by plain loops here, and refusals.

use standin_check::*;
use std::ffi::c_int;

const F32: c_int = 0;
const F16: c_int = 2;
const BF16: c_int = 14;
const INVALID_VALUE: c_int = 7;
const NOT_SUPPORTED: c_int = 15;

#[derive(Clone, Copy)]
struct Case {
    data_type: c_int,
    shape: [usize; 3],
    is_transposed: [bool; 2],
    n_batch: usize,
    has_bias: bool,
    beta: f32,
}

const PLAIN: Case = Case {
    data_type: F32,
    shape: [3, 5, 7],
    is_transposed: [false; 2],
    n_batch: 1,
    has_bias: false,
    beta: 0.0,
};

fn layout(data_type: c_int, rows: usize, cols: usize, leading: usize, n_batch: usize) -> usize {
    let layout = made(|layout| {
        cublasLtMatrixLayoutCreate(layout, data_type, rows as u64, cols as u64, leading as i64)
    });
    let (n_batch, stride) = (n_batch as i32, (leading * cols + 3) as i64);
    ok(cublasLtMatrixLayoutSetAttribute(
        layout,
        5,
        (&raw const n_batch).cast(),
        4,
    ));
    ok(cublasLtMatrixLayoutSetAttribute(
        layout,
        6,
        (&raw const stride).cast(),
        8,
    ));
    layout
}

/// Padding between columns and between matrices of a batch, in elements.
const PAD: usize = 2;

struct Asked {
    case: Case,
    handle: usize,
    desc: usize,
    /// Of a, b and the output.
    layouts: [usize; 3],
}

fn ask(case: Case) -> Asked {
    use_device();
    let [m, n, k] = case.shape;
    let desc = made(|desc| cublasLtMatmulDescCreate(desc, 68, F32));
    for (which, is_transposed) in [3, 4].into_iter().zip(case.is_transposed) {
        let value = i32::from(is_transposed);
        ok(cublasLtMatmulDescSetAttribute(
            desc,
            which,
            (&raw const value).cast(),
            4,
        ));
    }
    let swapped = |[rows, cols]: [usize; 2], is_swapped| if is_swapped { [cols, rows] } else { [rows, cols] };
    let of = |[rows, cols]: [usize; 2]| layout(case.data_type, rows, cols, rows + PAD, case.n_batch);
    let layouts = [
        of(swapped([m, k], case.is_transposed[0])),
        of(swapped([k, n], case.is_transposed[1])),
        of([m, n]),
    ];
    Asked {
        case,
        handle: made(|handle| cublasLtCreate(handle)),
        desc,
        layouts,
    }
}

impl Asked {
    fn set_bias(&self, start: usize) {
        let epilogue = 4;
        ok(cublasLtMatmulDescSetAttribute(
            self.desc,
            7,
            (&raw const epilogue).cast(),
            4,
        ));
        ok(cublasLtMatmulDescSetAttribute(
            self.desc,
            8,
            (&raw const start).cast(),
            8,
        ));
    }

    /// An algorithm for operands that lie on so many bytes.
    fn algorithm(&self, alignment: u32) -> Result<[u64; 16], c_int> {
        let preference = made(|preference| cublasLtMatmulPreferenceCreate(preference));
        for which in 5..=8 {
            ok(cublasLtMatmulPreferenceSetAttribute(
                preference,
                which,
                (&raw const alignment).cast(),
                4,
            ));
        }
        let ([a, b, out], mut found, mut n_found) = (self.layouts, [0u64; 16], 0);
        let code = cublasLtMatmulAlgoGetHeuristic(
            self.handle,
            self.desc,
            a,
            b,
            out,
            out,
            preference,
            1,
            found.as_mut_ptr(),
            &raw mut n_found,
        );
        if code == 0 {
            assert_eq!(n_found, 1)
        }
        if code == 0 { Ok(found) } else { Err(code) }
    }

    fn multiply(&self, algorithm: &[u64; 16], [a, b, out]: [usize; 3]) -> c_int {
        let (alpha, beta, layouts) = (0.5f32, self.case.beta, self.layouts);
        cublasLtMatmul(
            self.handle,
            self.desc,
            &raw const alpha,
            a,
            layouts[0],
            b,
            layouts[1],
            &raw const beta,
            out,
            layouts[2],
            out,
            layouts[2],
            algorithm.as_ptr(),
            0,
            0,
            0,
        )
    }
}

/// Small integers, which all types hold exactly, as their sums are.
fn integers(n: usize, seed: usize) -> Vec<f32> {
    (0..n)
        .map(|i| ((i * 7 + seed * 3 + i * i) % 5) as f32 - 2.0)
        .collect()
}

fn upload(values: &[f32], data_type: c_int) -> usize {
    let bits = |x: &f32| -> u16 {
        let wide = x.to_bits();
        match data_type {
            BF16 => (wide >> 16) as u16,
            _ if *x == 0.0 => 0,
            _ => {
                (wide >> 16 & 0x8000) as u16
                    | ((((wide >> 23 & 0xff) - 112) << 10) | (wide >> 13 & 0x3ff)) as u16
            }
        }
    };
    if data_type == F32 {
        device_copy(values)
    } else {
        device_copy(&values.iter().map(bits).collect::<Vec<_>>())
    }
}

fn download(start: usize, n: usize, data_type: c_int) -> Vec<f32> {
    let value = |bits: &u16| -> f32 {
        let wide = u32::from(*bits);
        match data_type {
            BF16 => f32::from_bits(wide << 16),
            _ if wide & 0x7fff == 0 => 0.0,
            _ => {
                f32::from_bits((wide & 0x8000) << 16 | ((wide >> 10 & 31) + 112) << 23 | (wide & 0x3ff) << 13)
            }
        }
    };
    if data_type == F32 {
        host_copy(start, n)
    } else {
        host_copy::<u16>(start, n).iter().map(value).collect()
    }
}

/// Even integers come out halved by alpha, so that f16 and bf16 hold the results as well.
fn compare(case: Case) {
    let asked = ask(case);
    let [m, n, k] = case.shape;
    let [ta, tb] = case.is_transposed;
    let len = |rows: usize, cols: usize| ((rows + PAD) * cols + 3) * case.n_batch;
    let (a_dims, b_dims) = (if ta { [k, m] } else { [m, k] }, if tb { [n, k] } else { [k, n] });
    let doubled = |values: Vec<f32>| values.into_iter().map(|x| 2.0 * x).collect::<Vec<_>>();
    let (a, b) = (
        doubled(integers(len(a_dims[0], a_dims[1]), 1)),
        integers(len(b_dims[0], b_dims[1]), 2),
    );
    let (before, bias) = (integers(len(m, n), 3), integers(m, 4));
    let [a_at, b_at, out_at] = [&a, &b, &before].map(|values| upload(values, case.data_type));
    if case.has_bias {
        asked.set_bias(upload(&bias, case.data_type));
    }
    let algorithm = asked.algorithm(4).expect("there is one");
    ok(asked.multiply(&algorithm, [a_at, b_at, out_at]));
    ok(cuCtxSynchronize());
    let seen = download(out_at, before.len(), case.data_type);
    let mut expected = before.clone();
    for batch in 0..case.n_batch {
        let at = |[rows, cols]: [usize; 2], row: usize, col: usize| {
            batch * ((rows + PAD) * cols + 3) + col * (rows + PAD) + row
        };
        for row in 0..m {
            for col in 0..n {
                let sum: f32 = (0..k)
                    .map(|i| {
                        let a = a[if ta {
                            at(a_dims, i, row)
                        } else {
                            at(a_dims, row, i)
                        }];
                        a * b[if tb {
                            at(b_dims, col, i)
                        } else {
                            at(b_dims, i, col)
                        }]
                    })
                    .sum();
                let place = at([m, n], row, col);
                expected[place] =
                    0.5 * sum + case.beta * before[place] + if case.has_bias { bias[row] } else { 0.0 };
            }
        }
    }
    // What lies between columns and matrices stays.
    assert_eq!(seen, expected);
}

#[test]
fn products_are_right_for_all_types_transpositions_and_batches() {
    passes(
        "products_are_right_for_all_types_transpositions_and_batches",
        &[],
        || {
            for data_type in [F32, F16, BF16] {
                for transposed in 0..4 {
                    for (n_batch, has_bias, beta, k) in
                        [(1, false, 0.0, 7), (3, true, 0.0, 16), (2, true, 2.0, 35)]
                    {
                        let is_transposed = [transposed & 1 != 0, transposed & 2 != 0];
                        compare(Case {
                            data_type,
                            shape: [3, 5, k],
                            is_transposed,
                            n_batch,
                            has_bias,
                            beta,
                        });
                    }
                }
            }
        },
    );
}

#[test]
fn products_that_do_not_fit_are_refused() {
    passes("products_that_do_not_fit_are_refused", &[], || {
        let asked = |layouts| {
            Asked {
                layouts,
                ..ask(PLAIN)
            }
            .algorithm(4)
        };
        let good = [
            layout(F32, 3, 7, 3, 1),
            layout(F32, 7, 5, 7, 1),
            layout(F32, 3, 5, 3, 1),
        ];
        assert!(asked(good).is_ok());
        // A leading dimension below the rows; another k; another n; no rows; another batch.
        assert_eq!(
            asked([layout(F32, 3, 7, 2, 1), good[1], good[2]]).err(),
            Some(INVALID_VALUE)
        );
        assert_eq!(
            asked([layout(F32, 3, 8, 3, 1), good[1], good[2]]).err(),
            Some(INVALID_VALUE)
        );
        assert_eq!(
            asked([good[0], good[1], layout(F32, 3, 6, 3, 1)]).err(),
            Some(INVALID_VALUE)
        );
        assert_eq!(
            asked([layout(F32, 0, 7, 3, 1), good[1], layout(F32, 0, 5, 3, 1)]).err(),
            Some(INVALID_VALUE)
        );
        assert_eq!(
            asked([layout(F32, 3, 7, 3, 2), good[1], good[2]]).err(),
            Some(INVALID_VALUE)
        );
        assert_eq!(
            asked([layout(BF16, 3, 7, 3, 1), good[1], good[2]]).err(),
            Some(NOT_SUPPORTED)
        );
        // Sums in less than f32.
        assert_eq!(cublasLtMatmulDescCreate(&mut 0, 64, F16), NOT_SUPPORTED);
    });
}

#[test]
fn a_bias_needs_its_pointer() {
    passes("a_bias_needs_its_pointer", &[], || {
        let asked = ask(PLAIN);
        asked.set_bias(0);
        assert_eq!(asked.algorithm(4).err(), Some(INVALID_VALUE));
    });
}

#[test]
fn an_algorithm_is_needed() {
    passes("an_algorithm_is_needed", &[], || {
        let asked = ask(PLAIN);
        let operand = device_copy(&[0.0f32; 256]);
        let ([a, b, out], one) = (asked.layouts, 1.0f32);
        let (handle, desc, none) = (asked.handle, asked.desc, std::ptr::null());
        let code = cublasLtMatmul(
            handle, desc, &one, operand, a, operand, b, &one, operand, out, operand, out, none, 0, 0, 0,
        );
        assert_eq!(code, INVALID_VALUE);
    });
}

#[test]
fn an_algorithm_of_another_product_aborts() {
    aborts(
        "an_algorithm_of_another_product_aborts",
        "chosen for another product",
        || {
            let algorithm = ask(Case {
                shape: [4, 5, 7],
                ..PLAIN
            })
            .algorithm(4)
            .expect("there is one");
            let operand = device_copy(&[0.0f32; 256]);
            ask(PLAIN).multiply(&algorithm, [operand; 3]);
        },
    );
}

#[test]
fn a_broken_promise_of_alignment_aborts() {
    aborts(
        "a_broken_promise_of_alignment_aborts",
        "promised to lie on 16 bytes",
        || {
            let asked = ask(PLAIN);
            let algorithm = asked.algorithm(16).expect("there is one");
            let operand = device_copy(&[0.0f32; 256]);
            asked.multiply(&algorithm, [operand, operand + 4, operand]);
        },
    );
}
