//! What the documentation says about rounding errors, measured.

use denoised_cpu::{CpuBackend, CpuOptions, Isa};
use denoised_tensor::{Backend, ConvSpec, DType, Epilogue, PrepareInput, WeightKind, WeightSpec};
use denoised_testkit::suites::backend::MemorySource;

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

/// Relative L2 error of a 3x3 convolution of 320 channels.
fn error_of_a_convolution(isa: Isa, winograd: bool) -> f64 {
    let x = values(1, SIDE * SIDE * CHANNELS);
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
    };
    let mut source = MemorySource::default();
    source.insert("w", &shape, &w);
    let prepared = backend
        .prepare(&[spec], PrepareInput::Build(&source), &mut |_, _| {})
        .expect("a weight");
    let input = backend
        .upload(&bytes(&x), &[1, SIDE, SIDE, CHANNELS], DType::F32)
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
    let mut got = vec![0; SIDE * SIDE * OUTPUTS * 4];
    backend.download(&out, &mut got).expect("the right size");
    let (mut distance, mut norm) = (0.0, 0.0);
    for (i, got) in got.chunks_exact(4).enumerate() {
        let (y, col, o) = (i / OUTPUTS / SIDE, i / OUTPUTS % SIDE, i % OUTPUTS);
        let mut exact = 0.0;
        for (dy, dx) in (0..3).flat_map(|dy| (0..3).map(move |dx| (dy, dx))) {
            let (Some(y), Some(col)) = ((y + dy).checked_sub(1), (col + dx).checked_sub(1)) else {
                continue;
            };
            if y < SIDE && col < SIDE {
                let pixel = &x[(y * SIDE + col) * CHANNELS..][..CHANNELS];
                let tap = |c: usize| f64::from(w[((o * CHANNELS + c) * 3 + dy) * 3 + dx]);
                exact += pixel
                    .iter()
                    .enumerate()
                    .map(|(c, x)| f64::from(*x) * tap(c))
                    .sum::<f64>();
            }
        }
        let got = f64::from(f32::from_le_bytes([got[0], got[1], got[2], got[3]]));
        distance += (got - exact).powi(2);
        norm += exact * exact;
    }
    (distance / norm).sqrt()
}

#[test]
fn a_winograd_convolution_is_good_to_4e_6_and_a_plain_one_to_2e_6() {
    for isa in Isa::ALL.iter().copied().filter(|isa| isa.is_available()) {
        let (winograd, plain) = (
            error_of_a_convolution(isa, true),
            error_of_a_convolution(isa, false),
        );
        assert!(
            plain < 2e-6 && winograd < 4e-6,
            "{isa}: plain {plain:.2e}, Winograd {winograd:.2e}"
        );
        assert!(
            plain < winograd,
            "{isa}: plain {plain:.2e}, Winograd {winograd:.2e}"
        );
    }
}
