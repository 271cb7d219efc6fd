//! What the documentation says about rounding errors, measured.

use denoised_cpu::{CpuBackend, CpuOptions, Isa};
use denoised_tensor::{
    AttentionSpec, Backend, ConvSpec, DType, Epilogue, Precision, PrepareInput, WeightKind, WeightSpec,
};
use denoised_testkit::suites::backend::{MemorySource, fetch};

const CHANNELS: usize = 320;
const OUTPUTS: usize = 32;
const SIDE: usize = 8;

/// Uniform in -1..1 (an LCG of Knuth's, upper bits).
fn values(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// A 3x3 convolution of 320 channels beside its value in f64.
struct Convolved {
    got: Vec<f32>,
    exact: Vec<f64>,
}

impl Convolved {
    fn new(isa: Isa, winograd: bool, x: &[f32]) -> Self {
        let w = values(2, OUTPUTS * CHANNELS * 9);
        let backend = CpuBackend::new(CpuOptions {
            n_threads: 1,
            isa: Some(isa),
            winograd,
        })
        .expect("available");
        let shape = [OUTPUTS, CHANNELS, 3, 3];
        let spec = WeightSpec {
            sources: vec!["w".to_owned()],
            kind: WeightKind::Conv { stride: 1 },
            shape: shape.to_vec(),
            precision: Precision::Device,
        };
        let mut source = MemorySource::default();
        source.insert("w", &shape, &w);
        let prepared = backend
            .prepare(&[spec], PrepareInput::Build(&source), &mut |_, _| {})
            .expect("a weight");
        let input = backend
            .upload(&bytes(x), &[1, SIDE, SIDE, CHANNELS], DType::F32)
            .expect("memory");
        let out = backend
            .alloc(&[1, SIDE, SIDE, OUTPUTS], DType::F32)
            .expect("memory");
        let spec = ConvSpec {
            stride: 1,
            padding: [1; 4],
            upsample: 1,
        };
        backend
            .conv2d(&input, &prepared.weights[0], &spec, &Epilogue::default(), &out)
            .expect("shapes that fit");
        let exact = |i: usize| {
            let (y, col, o) = (i / OUTPUTS / SIDE, i / OUTPUTS % SIDE, i % OUTPUTS);
            let mut exact = 0.0;
            for (dy, dx) in (0..3).flat_map(|dy| (0..3).map(move |dx| (dy, dx))) {
                let (Some(y), Some(col)) = ((y + dy).checked_sub(1), (col + dx).checked_sub(1)) else {
                    continue;
                };
                if y < SIDE && col < SIDE {
                    let pixel = &x[(y * SIDE + col) * CHANNELS..][..CHANNELS];
                    let tap = |c: usize| f64::from(w[((o * CHANNELS + c) * 3 + dy) * 3 + dx]);
                    let products = pixel.iter().enumerate().map(|(c, x)| f64::from(*x) * tap(c));
                    exact += products.sum::<f64>();
                }
            }
            exact
        };
        Self {
            got: fetch(&backend, &out).expect("f32"),
            exact: (0..SIDE * SIDE * OUTPUTS).map(exact).collect(),
        }
    }

    /// Relative L2 error over the pixels for which `counts` holds.
    fn error(&self, counts: impl Fn(usize, usize) -> bool) -> f64 {
        let (mut distance, mut norm) = (0.0, 0.0);
        for (i, (got, exact)) in self.got.iter().zip(&self.exact).enumerate() {
            if counts(i / OUTPUTS / SIDE, i / OUTPUTS % SIDE) {
                distance += (f64::from(*got) - exact).powi(2);
                norm += exact * exact;
            }
        }
        (distance / norm).sqrt()
    }
}

fn sets() -> impl Iterator<Item = Isa> {
    Isa::ALL.iter().copied().filter(|isa| isa.is_available())
}

#[test]
fn a_winograd_convolution_is_good_to_1_2e_6_and_a_plain_one_to_4e_7() {
    let x = values(1, SIDE * SIDE * CHANNELS);
    for isa in sets() {
        let error = |winograd| Convolved::new(isa, winograd, &x).error(|_, _| true);
        let (winograd, plain) = (error(true), error(false));
        assert!(
            plain < 4e-7 && winograd < 1.2e-6,
            "{isa}: plain {plain:.2e}, Winograd {winograd:.2e}"
        );
        assert!(
            plain < winograd,
            "{isa}: plain {plain:.2e}, Winograd {winograd:.2e}"
        );
    }
}

/// What autoencoders have: a few channels, or everything at one place, a thousand or ten thousand times as large as the rest.
#[test]
fn outliers_cost_winograd_digits_in_their_own_tile_only() {
    let (spot_y, spot_x) = (2, 1);
    for (factor, beside_limit) in [(1e3, 4e-4), (1e4, 4e-3)] {
        let mut channels = values(1, SIDE * SIDE * CHANNELS);
        for pixel in channels.chunks_exact_mut(CHANNELS) {
            for channel in [7, 100, 101, 319] {
                pixel[channel] *= factor;
            }
        }
        let mut spot = values(1, SIDE * SIDE * CHANNELS);
        let pixel = &mut spot[(spot_y * SIDE + spot_x) * CHANNELS..][..CHANNELS];
        pixel.iter_mut().for_each(|x| *x *= factor);
        for isa in sets() {
            let channels = Convolved::new(isa, true, &channels).error(|_, _| true);
            let convolved = Convolved::new(isa, true, &spot);
            let is_in_tile = |y: usize, x: usize| y / 4 == spot_y / 4 && x / 4 == spot_x / 4;
            let sees_spot = |y: usize, x: usize| y.abs_diff(spot_y) <= 1 && x.abs_diff(spot_x) <= 1;
            let all = convolved.error(|_, _| true);
            let elsewhere = convolved.error(|y, x| !is_in_tile(y, x));
            let beside = convolved.error(|y, x| is_in_tile(y, x) && !sees_spot(y, x));
            assert!(
                channels < 2e-6 && all < 2e-6 && elsewhere < 2e-6 && beside < beside_limit,
                "{isa}, {factor:e}: channels {channels:.1e}, spot {all:.1e}, elsewhere {elsewhere:.1e}, beside {beside:.1e}"
            );
            let plain = Convolved::new(isa, false, &spot).error(|y, x| !sees_spot(y, x));
            assert!(plain < 4e-7, "{isa}, {factor:e}: plain {plain:.1e}");
        }
    }
}

/// Attention as sharp as T5's, which has no scale: scores of tens, where a rounding error of a score is one of its probability.
#[test]
fn sharp_attention_is_good_to_7e_7() {
    const TOKENS: usize = 300;
    const HEAD_DIM: usize = 64;
    let [q, k, v] = [1, 2, 3].map(|seed| {
        let values = values(seed, TOKENS * HEAD_DIM);
        values.iter().map(|x| 2.0 * x).collect::<Vec<f32>>()
    });
    let row = |x: &[f32], i: usize| -> Vec<f64> {
        let row = &x[i * HEAD_DIM..(i + 1) * HEAD_DIM];
        row.iter().map(|x| f64::from(*x)).collect()
    };
    let exact: Vec<f64> = (0..TOKENS)
        .flat_map(|query_idx| {
            let query = row(&q, query_idx);
            let dot = |key_idx| -> f64 { row(&k, key_idx).iter().zip(&query).map(|(a, b)| a * b).sum() };
            let scores: Vec<f64> = (0..TOKENS).map(dot).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut result = vec![0.0; HEAD_DIM];
            for (key_idx, weight) in weights.iter().enumerate() {
                for (result, value) in result.iter_mut().zip(row(&v, key_idx)) {
                    *result += weight / sum * value;
                }
            }
            result
        })
        .collect();
    for isa in sets() {
        let backend = CpuBackend::new(CpuOptions {
            n_threads: 1,
            isa: Some(isa),
            winograd: true,
        })
        .expect("available");
        let shape = [1, TOKENS, HEAD_DIM];
        let [q, k, v] = [&q, &k, &v].map(|x| backend.upload(&bytes(x), &shape, DType::F32).expect("memory"));
        let out = backend.alloc(&shape, DType::F32).expect("memory");
        let spec = AttentionSpec {
            n_heads: 1,
            n_kv_heads: 1,
            scale: 1.0,
            is_causal: false,
            bias: None,
        };
        backend
            .attention(&q, &k, &v, &spec, &out)
            .expect("shapes that fit");
        let got = fetch(&backend, &out).expect("f32");
        let (mut distance, mut norm) = (0.0, 0.0);
        for (got, exact) in got.iter().zip(&exact) {
            distance += (f64::from(*got) - exact).powi(2);
            norm += exact * exact;
        }
        let error = (distance / norm).sqrt();
        assert!(error < 7e-7, "{isa}: {error:.2e}");
    }
}
