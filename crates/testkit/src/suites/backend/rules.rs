//! Rules of the contract beside the values.

use super::{functions::ACTIVATIONS, operands::*};
use denoised_tensor::{
    Activation, AttentionSpec, Backend, ConvSpec, DType, Epilogue, Precision, PrepareInput, Prepared, Result,
    SourceDType, Tensor, TensorError, WeightKind, WeightSpec,
};
use std::collections::HashMap;

/// NaN and infinity in an input reach the output, through clamps, maxima and sums.
///
/// # Panics
/// One of them is swallowed.
pub fn nan_passes_through(backend: &dyn Backend) {
    let outcome = (|| -> Result<()> {
        let n = 70;
        for position in [0, 37, 69] {
            let mut data = vec![0.25; n];
            data[position] = f32::NAN;
            let x = put_as(backend, backend.dtype(), Place::Dense, &[1, 1, n], &data)?;
            assert!(!backend.all_finite(&x)?);
            let out = backend.alloc(&[1, 1, n], backend.dtype())?;
            let must_be_nan = |what: &str| -> Result<()> {
                let got = fetch(backend, &out)?;
                assert!(got[position].is_nan(), "{what} made {} of NaN", got[position]);
                Ok(())
            };
            for activation in ACTIVATIONS {
                backend.activation(&x, activation, &out)?;
                must_be_nan(&format!("{activation:?}"))?;
            }
            let pixels = backend.alloc(&[1, 1, n], DType::F32)?;
            backend.to_pixels(&x, &pixels)?;
            let got = fetch(backend, &pixels)?;
            assert!(got[position].is_nan(), "to_pixels made {} of NaN", got[position]);
            backend.layer_norm(&x, None, 1e-5, None, &out)?;
            must_be_nan("layer_norm")?;
            backend.rms_norm(&x, None, 10, 1e-5, &out)?;
            must_be_nan("rms_norm")?;
            let ordinary = put_as(backend, backend.dtype(), Place::Dense, &[1, 1, n], &vec![0.25; n])?;
            backend.match_norm(&x, &ordinary, 10, &out)?;
            must_be_nan("match_norm")?;
            backend.match_norm(&ordinary, &x, 10, &out)?;
            must_be_nan("match_norm of what is NaN")?;
            // Nothing can be given a norm that has none.
            backend.affine(&ordinary, 0.0, 0.0, &ordinary)?;
            backend.match_norm(&ordinary, &x, 10, &out)?;
            must_be_nan("match_norm of zeros")?;
            let got = fetch(backend, &out)?;
            let other = (position + 10) % n;
            assert_eq!(got[other], 0.0, "match_norm made {} of 0", got[other]);
            let ones = vec![1.0; n * n];
            let weights = prepare(
                backend,
                &[
                    (WeightKind::Matrix, &[n, n], &ones),
                    (WeightKind::Vector, &[n], &ones[..n]),
                    (
                        WeightKind::Conv { stride: 1 },
                        &[n, n, 3, 3],
                        &vec![1.0; n * n * 9],
                    ),
                ],
            )?;
            backend.linear(&x, &weights[0], &Epilogue::default(), &out)?;
            must_be_nan("linear")?;
            let image = x.reshape(&[1, 1, 1, n])?;
            let image_out = out.reshape(&[1, 1, 1, n])?;
            let conv_spec = ConvSpec {
                stride: 1,
                padding: [1; 4],
                upsample: 1,
            };
            backend.conv2d(&image, &weights[2], &conv_spec, &Epilogue::default(), &image_out)?;
            must_be_nan("conv2d")?;
            backend.group_norm(&x, (&weights[1], &weights[1]), 10, 1e-5, Activation::Silu, &out)?;
            must_be_nan("group_norm")?;
            // The NaN as the query, a key and a value, among keys that are not.
            let rows = |nan_row: usize| -> Result<Tensor> {
                let mut rows = vec![0.5; 3 * n];
                rows[nan_row * n + position] = f32::NAN;
                put_as(backend, backend.dtype(), Place::Dense, &[1, 3, n], &rows)
            };
            let plain = put_as(
                backend,
                backend.dtype(),
                Place::Dense,
                &[1, 3, n],
                &vec![0.5; 3 * n],
            )?;
            let spec = AttentionSpec {
                n_heads: 1,
                n_kv_heads: 1,
                scale: 0.1,
                is_causal: false,
                bias: None,
            };
            for nan_row in 0..3 {
                backend.attention(&x, &plain, &plain, &spec, &out)?;
                must_be_nan("attention, query")?;
                let query = put_as(backend, backend.dtype(), Place::Dense, &[1, 1, n], &vec![0.5; n])?;
                backend.attention(&query, &rows(nan_row)?, &plain, &spec, &out)?;
                must_be_nan("attention, key")?;
                backend.attention(&query, &plain, &rows(nan_row)?, &spec, &out)?;
                must_be_nan("attention, value")?;
            }
        }
        for bad in [f32::INFINITY, f32::NEG_INFINITY] {
            let x = put_as(
                backend,
                backend.dtype(),
                Place::Columns,
                &[2, 3],
                &[1.0, 2.0, 3.0, 4.0, bad, 5.0],
            )?;
            assert!(!backend.all_finite(&x)?);
        }
        let largest = put(
            backend,
            Place::Both,
            &[1, 2, 3],
            &[60_000.0, -60_000.0, 0.0, 1e-40, -0.0, 1.0],
        )?;
        assert!(backend.all_finite(&largest)?);
        Ok(())
    })();
    outcome.expect("sound operands");
}

/// Variances of data whose mean is 200 times its spread come out right: a difference of squares would lose four more digits.
///
/// # Panics
/// They do not.
pub fn norms_hold_with_a_large_mean(backend: &dyn Backend) {
    let (rows, n, n_groups) = (300, 96, 8);
    let data: Vec<f32> = Feed {
        seed: 9,
        dtype: DType::F32,
    }
    .values(0, 0, rows * n)
    .iter()
    .map(|x| 100.0 + x)
    .collect();
    let normal = |group: &dyn Fn(usize) -> usize| -> Vec<f64> {
        let mut sums: HashMap<usize, [f64; 3]> = HashMap::new();
        for (i, x) in data.iter().enumerate() {
            let sum = sums.entry(group(i)).or_default();
            *sum = [
                sum[0] + 1.0,
                sum[1] + f64::from(*x),
                sum[2] + f64::from(*x - 100.0).powi(2),
            ];
        }
        let value = |(i, x): (usize, &f32)| {
            let [count, sum, squares] = sums[&group(i)];
            let mean = sum / count;
            (f64::from(*x) - mean) / (squares / count - (mean - 100.0).powi(2) + 1e-5).sqrt()
        };
        data.iter().enumerate().map(value).collect()
    };
    let outcome = (|| -> Result<()> {
        let x = put(backend, Place::Dense, &[1, rows, n], &data)?;
        let out = backend.alloc(&[1, rows, n], DType::F32)?;
        let ones = vec![1.0; n];
        let weights = prepare(
            backend,
            &[
                (WeightKind::Vector, &[n], &ones),
                (WeightKind::Vector, &[n], &vec![0.0; n]),
            ],
        )?;
        let compare = |what: &str, expected: &[f64]| -> Result<()> {
            let got = fetch(backend, &out)?;
            let distance: f64 = got
                .iter()
                .zip(expected)
                .map(|(a, b)| (f64::from(*a) - b).powi(2))
                .sum();
            let error = (distance / expected.iter().map(|x| x * x).sum::<f64>()).sqrt();
            // The mean itself is rounded to 4e-6.
            assert!(error < 3e-5, "{what}: {error:.1e}");
            Ok(())
        };
        backend.layer_norm(&x, None, 1e-5, None, &out)?;
        compare("layer_norm", &normal(&|i| i / n))?;
        backend.group_norm(
            &x,
            (&weights[0], &weights[1]),
            n_groups,
            1e-5,
            Activation::None,
            &out,
        )?;
        compare("group_norm", &normal(&|i| i % n / (n / n_groups)))
    })();
    outcome.expect("sound operands");
}

/// Activations stay defined far out.
///
/// # Panics
/// One of them is not.
pub fn activations_hold_in_the_tails(backend: &dyn Backend) {
    let inputs = [
        -3e38, -1e30, -1000.0, -200.0, -90.0, -50.0, 50.0, 90.0, 200.0, 1000.0, 1e30, 3e38f32,
    ];
    let outcome = (|| -> Result<()> {
        let x = put(backend, Place::Dense, &[1, inputs.len()], &inputs)?;
        let out = backend.alloc(&[1, inputs.len()], DType::F32)?;
        for activation in ACTIVATIONS {
            backend.activation(&x, activation, &out)?;
            for (x, y) in inputs.iter().zip(fetch(backend, &out)?) {
                let expected = match activation {
                    Activation::Tanh => x.signum(),
                    Activation::None => *x,
                    _ => x.max(0.0),
                };
                // The true value in the lower tail is below 1e-18 for all of these.
                let is_close = (y - expected).abs() <= expected.abs() * 1e-6 + 1e-18;
                assert!(is_close, "{activation:?} of {x} is {y}");
            }
        }
        Ok(())
    })();
    outcome.expect("sound operands");
}

/// Conversions of dtypes round to nearest even, and float bits survive a copy of the same dtype.
///
/// # Panics
/// They do not.
pub fn copies_convert_dtypes(backend: &dyn Backend) {
    let outcome = (|| -> Result<()> {
        // 1 + 2^-8 lies between the bf16 neighbours 1 and 1 + 2^-7 and goes to the even one; likewise 1 + 3 * 2^-8. For f16 the unit
        // is 2^-10.
        let values = [
            1.0,
            1.0 + 2f32.powi(-8),
            1.0 + 3.0 * 2f32.powi(-8),
            1.0 + 2f32.powi(-11),
            1.0 + 3.0 * 2f32.powi(-11),
            -0.0,
        ];
        let bf16 = [0x3f80u16, 0x3f80, 0x3f82, 0x3f80, 0x3f80, 0x8000];
        let f16 = [0x3c00u16, 0x3c04, 0x3c0c, 0x3c00, 0x3c02, 0x8000];
        let x = put(backend, Place::Columns, &[2, 3], &values)?;
        for (dtype, expected) in [(DType::BF16, bf16), (DType::F16, f16)] {
            let narrow = backend.alloc(&[2, 3], dtype)?;
            backend.copy(&x, &narrow)?;
            let mut bytes = [0; 12];
            backend.download(&narrow, &mut bytes)?;
            let got: Vec<u16> = bytes
                .chunks_exact(2)
                .map(|x| u16::from_le_bytes([x[0], x[1]]))
                .collect();
            assert_eq!(got, expected, "{dtype}");
            let back = backend.alloc(&[2, 3], DType::F32)?;
            backend.copy(&narrow, &back)?;
            let other = backend.alloc(&[2, 3], dtype)?;
            backend.copy(&back, &other)?;
            let mut again = [0; 12];
            backend.download(&other, &mut again)?;
            assert_eq!(again, bytes, "{dtype} there and back");
        }
        Ok(())
    })();
    outcome.expect("sound operands");
}

/// Weights serve activations of the dtype that their precision names, whatever the device's, and no others.
///
/// # Panics
/// They do not, or take others.
pub fn precisions_hold(backend: &dyn Backend) {
    let outcome = (|| -> Result<()> {
        // No 16-bit type has this number, and f16 no sum of the inputs in f32.
        let fine = 1.0 + 2f32.powi(-12);
        let (n, k, c_in) = (5, 24, 8);
        let kernel = [n, c_in, 3, 3];
        let kinds: [(&str, WeightKind, &[usize]); 3] = [
            ("matrix", WeightKind::Matrix, &[n, k]),
            ("kernel", WeightKind::Conv { stride: 1 }, &kernel),
            ("vector", WeightKind::Vector, &[n]),
        ];
        let mut source = MemorySource::default();
        for (name, _, shape) in kinds {
            source.insert(name, shape, &vec![fine; shape.iter().product()]);
        }
        for precision in [Precision::Device, Precision::WideRange, Precision::F32] {
            let dtype = precision.dtype(backend.dtype());
            let specs = kinds.map(|(name, kind, shape)| WeightSpec {
                precision,
                ..spec(&[name], kind, shape)
            });
            let prepared = backend.prepare(&specs, PrepareInput::Build(&source), &mut |_, _| {})?;
            let [matrix, kernel, vector] = &prepared.weights[..] else {
                panic!("three weights of three specs")
            };
            assert_eq!(fetch(backend, &backend.weight_tensor(vector)?)?, [fine; 5]);
            let epilogue = Epilogue {
                bias: Some(vector),
                ..Epilogue::default()
            };
            let padded = ConvSpec {
                stride: 1,
                padding: [1; 4],
                upsample: 1,
            };
            let product = |dtype: DType, value: f32| {
                let x = put_as(backend, dtype, Place::Dense, &[1, 3, k], &vec![value; 3 * k])?;
                let out = backend.alloc(&[1, 3, n], dtype)?;
                backend.linear(&x, matrix, &epilogue, &out)?;
                fetch(backend, &out)
            };
            let convolution = |dtype: DType, value: f32| {
                let x = put_as(
                    backend,
                    dtype,
                    Place::Dense,
                    &[1, 2, 2, c_in],
                    &vec![value; 4 * c_in],
                )?;
                let out = backend.alloc(&[1, 2, 2, n], dtype)?;
                backend.conv2d(&x, kernel, &padded, &epilogue, &out)?;
                fetch(backend, &out)
            };
            let (value, weight, limit) = match dtype {
                DType::F32 => (4096.0, f64::from(fine), 1e-6),
                _ => (1.0, 1.0, 0.0),
            };
            // Every pixel of a padded square of 2 x 2 sees all four.
            for (got, n_terms) in [
                (product(dtype, value)?, k),
                (convolution(dtype, value)?, 4 * c_in),
            ] {
                let expected = (n_terms as f64 * f64::from(value) + 1.0) * weight;
                let is_close = |got: &f32| (f64::from(*got) - expected).abs() <= limit * expected;
                assert!(
                    got.iter().all(is_close),
                    "{precision:?}: {got:?}, expected {expected}"
                );
            }
            for other in [DType::F32, backend.dtype()] {
                let is_refused = |outcome| matches!(outcome, Err(TensorError::DType { .. }));
                let are_refused = [
                    is_refused(product(other, 1.0)),
                    is_refused(convolution(other, 1.0)),
                ];
                assert_eq!(
                    are_refused,
                    [other != dtype; 2],
                    "{precision:?}, {other} activations"
                );
            }
        }
        Ok(())
    })();
    outcome.expect("sound operands");
}

/// Weights of every source dtype arrive, concatenations too, and what is wrong with a checkpoint is said in full.
///
/// # Panics
/// They do not, or it is not.
pub fn weights_come_from_any_float(backend: &dyn Backend) {
    let outcome = (|| -> Result<()> {
        // Numbers that all four dtypes hold: n / 8 for |n| <= 64.
        let mut random = Random::new(3);
        let (rows, k) = ([3, 40, 2, 33], 37);
        let n: usize = rows.iter().sum();
        let data: Vec<f32> = (0..n * k)
            .map(|_| random.within(0, 128) as f32 / 8.0 - 8.0)
            .collect();
        let mut source = MemorySource::default();
        let mut start = 0;
        let dtypes = [
            SourceDType::F32,
            SourceDType::F64,
            SourceDType::BF16,
            SourceDType::F16,
        ];
        for (i, (n_rows, dtype)) in rows.into_iter().zip(dtypes).enumerate() {
            let part = &data[start * k..(start + n_rows) * k];
            let bytes = part.iter().flat_map(|x| encode(dtype, *x)).collect();
            // A convolution whose patches do not overlap counts as a matrix.
            let shape = match i {
                1 => vec![n_rows, k, 1, 1],
                3 => vec![n_rows, 1, k],
                _ => vec![n_rows, k],
            };
            source.insert_bytes(&format!("part.{i}"), dtype, &shape, bytes);
            start += n_rows;
        }
        let names = ["part.0", "part.1", "part.2", "part.3"];
        let specs = [spec(&names, WeightKind::Matrix, &[n, k])];
        let mut last = (0, 0);
        let mut progress = |done: u64, total: u64| {
            assert!(done >= last.0 && done <= total, "{done} of {total}");
            last = (done, total);
        };
        let prepared = backend.prepare(&specs, PrepareInput::Build(&source), &mut progress)?;
        assert!(last.0 == last.1 && last.1 > 0, "progress ended at {last:?}");
        assert!(prepared.n_bytes >= (n * k) as u64, "{} bytes", prepared.n_bytes);
        let x = put(backend, Place::Dense, &[1, k], &vec![1.0; k])?;
        let out = backend.alloc(&[1, n], DType::F32)?;
        backend.linear(&x, &prepared.weights[0], &Epilogue::default(), &out)?;
        for (row, got) in data.chunks_exact(k).zip(fetch(backend, &out)?) {
            // Sums of eighths are exact.
            assert_eq!(row.iter().sum::<f32>(), got);
        }

        let bad = [
            spec(&["part.0"], WeightKind::Matrix, &[3, k]),
            spec(&["missing.1"], WeightKind::Vector, &[4]),
            spec(&["part.2"], WeightKind::Matrix, &[2, k + 1]),
            spec(&["part.0", "part.2"], WeightKind::Matrix, &[7, k]),
        ];
        match backend.prepare(&bad, PrepareInput::Build(&source), &mut |_, _| {}) {
            Err(error @ TensorError::Weight { .. }) => {
                let text = error.to_string();
                for expected in [
                    "missing.1",
                    "part.2",
                    "part.0 + part.2",
                    "[5, 37]",
                    "[7, 37]",
                    "[2, 38]",
                ] {
                    assert!(text.contains(expected), "{expected} is not in: {text}");
                }
            }
            outcome => panic!("accepted or other error: {outcome:?}"),
        }
        let many: Vec<WeightSpec> = (0..40)
            .map(|i| spec(&[&format!("gone.{i}")], WeightKind::Vector, &[4]))
            .collect();
        let error = backend
            .prepare(&many, PrepareInput::Build(&source), &mut |_, _| {})
            .map(|_| ());
        let text = error.expect_err("nothing is there").to_string();
        assert!(text.contains("and 30 more") && text.len() < 1000, "{text}");
        Ok(())
    })();
    outcome.expect("sound weights");
}

fn encode(dtype: SourceDType, x: f32) -> Vec<u8> {
    match dtype {
        SourceDType::F64 => f64::from(x).to_le_bytes().to_vec(),
        SourceDType::F32 => x.to_le_bytes().to_vec(),
        SourceDType::BF16 => ((x.to_bits() >> 16) as u16).to_le_bytes().to_vec(),
        SourceDType::F16 => {
            // Exact for the numbers of the test, which are normal and short.
            if x == 0.0 {
                return vec![0, 0];
            }
            let bits = x.to_bits();
            let exponent = ((bits >> 23) & 0xff) as i32 - 127 + 15;
            let half =
                ((bits >> 16) & 0x8000) as u16 | ((exponent as u16) << 10) | ((bits >> 13) & 0x3ff) as u16;
            half.to_le_bytes().to_vec()
        }
    }
}

/// What one rank built, another takes over with bit-identical results; anything else is refused. Does nothing for a backend whose
/// weights are not shared.
///
/// # Panics
/// Results differ, or a wrong block is taken.
pub fn shared_weights_are_the_same(make: &dyn Fn() -> Box<dyn Backend>) {
    let (first, second) = (make(), make());
    let outcome = (|| -> Result<()> {
        let mut random = Random::new(11);
        let mut source = MemorySource::default();
        let shapes: [(&str, WeightKind, &[usize]); 4] = [
            ("m", WeightKind::Matrix, &[40, 64]),
            ("c", WeightKind::Conv { stride: 1 }, &[48, 64, 3, 3]),
            ("v", WeightKind::Vector, &[48]),
            ("t", WeightKind::Table, &[9, 5]),
        ];
        for (name, _, shape) in shapes {
            let data: Vec<f32> = (0..shape.iter().product()).map(|_| random.value()).collect();
            source.insert(name, shape, &data);
        }
        let specs = shapes.map(|(name, kind, shape)| spec(&[name], kind, shape));
        let built = first.prepare(&specs, PrepareInput::Build(&source), &mut |_, _| {})?;
        let Some(fd) = &built.shared else { return Ok(()) };
        let copy = || fd.try_clone().expect("a descriptor");
        let taken = second.prepare(&specs, PrepareInput::Shared(copy()), &mut |_, _| {})?;
        let results = |backend: &dyn Backend, prepared: &Prepared| -> Result<Vec<f32>> {
            let [m, c, v, t] = &prepared.weights[..] else {
                unreachable!("four specs")
            };
            let data = Feed {
                seed: 5,
                dtype: DType::F32,
            }
            .values(0, 0, 2 * 6 * 7 * 64);
            let x = put(backend, Place::Dense, &[2, 6, 7, 64], &data)?;
            let out = backend.alloc(&[2, 6, 7, 48], DType::F32)?;
            let conv_spec = ConvSpec {
                stride: 1,
                padding: [1; 4],
                upsample: 1,
            };
            backend.conv2d(
                &x,
                c,
                &conv_spec,
                &Epilogue {
                    bias: Some(v),
                    ..Epilogue::default()
                },
                &out,
            )?;
            let product = backend.alloc(&[2, 6, 7, 40], DType::F32)?;
            backend.linear(&x, m, &Epilogue::default(), &product)?;
            let table = backend.weight_tensor(t)?;
            Ok([
                fetch(backend, &out)?,
                fetch(backend, &product)?,
                fetch(backend, &table)?,
            ]
            .concat())
        };
        assert_eq!(results(&*first, &built)?, results(&*second, &taken)?);

        let mut other = specs.clone();
        other[3].shape = vec![5, 9];
        let mut renamed = specs.clone();
        renamed[0].sources[0].push('x');
        for wrong in [&other[..], &renamed, &specs[..3]] {
            let outcome = second.prepare(wrong, PrepareInput::Shared(copy()), &mut |_, _| {});
            assert!(
                matches!(outcome, Err(TensorError::SharedWeights(_))),
                "{outcome:?}"
            );
        }
        let file = std::fs::File::open("/proc/self/exe").expect("this program");
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().expect("sockets");
        for hostile in [file.into(), std::os::fd::OwnedFd::from(socket)] {
            let outcome = second.prepare(&specs, PrepareInput::Shared(hostile), &mut |_, _| {});
            assert!(
                matches!(outcome, Err(TensorError::SharedWeights(_))),
                "{outcome:?}"
            );
        }
        // The other holder's weights outlive the builder.
        let expected = results(&*second, &taken)?;
        drop(built);
        assert_eq!(results(&*second, &taken)?, expected);
        Ok(())
    })();
    outcome.expect("sound weights");
}

/// Steady use takes no more memory, and what is freed is counted as free.
///
/// # Panics
/// It does, or is not.
pub fn memory_is_counted(backend: &dyn Backend) {
    let before = backend.memory().used_bytes;
    let x = backend.alloc(&[3, 1000], DType::F32).expect("12 kB");
    let used = backend.memory();
    assert!(
        used.used_bytes >= before + 12_000 && used.peak_bytes >= used.used_bytes,
        "{used:?}"
    );
    let view = x.narrow(0, 1, 1).expect("inside");
    drop(x);
    assert_eq!(
        backend.memory().used_bytes,
        used.used_bytes,
        "a view keeps the memory"
    );
    drop(view);
    assert_eq!(backend.memory().used_bytes, before);
    let outcome = backend.alloc(&[1 << 30, 1 << 20], DType::F32);
    assert!(
        matches!(outcome, Err(TensorError::OutOfMemory { .. })),
        "{outcome:?}"
    );
}
