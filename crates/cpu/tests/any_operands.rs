//! Operands of any shape, layout and dtype, some overlapping: each op refuses them or carries them out. None panics, and none writes
//! outside of its output.

use denoised_cpu::{CpuBackend, CpuOptions, Isa};
use denoised_tensor::{
    Activation, AttentionSpec, Backend, ConvSpec, DType, Epilogue, GateOrder, Modulation, PatchOrder,
    Precision, PrepareInput, RopeStyle, StepArgs, Tensor, TimestepSpec, Weight, WeightKind, WeightSpec,
};
use denoised_testkit::suites::backend::{MemorySource, Random};

/// What lies in a buffer that an op may write to a part of.
const MARK: u8 = 0x5a;

// The ops by number.
const LINEAR: usize = 0;
const CONV2D: usize = 1;
const ATTENTION: usize = 2;
const LAYER_NORM: usize = 3;
const RMS_NORM: usize = 4;
const GROUP_NORM: usize = 5;
const ADD: usize = 6;
const MUL: usize = 7;
const GATED_ADD: usize = 8;
const AFFINE: usize = 9;
const ACTIVATION: usize = 10;
const GATED: usize = 11;
const ROPE: usize = 12;
const EMBEDDING: usize = 13;
const GATHER_ROWS: usize = 14;
const TIMESTEP_EMBEDDING: usize = 15;
const PATCHIFY: usize = 16;
const UNPATCHIFY: usize = 17;
const PERMUTE: usize = 18;
const UPSAMPLE_NEAREST: usize = 19;
const COPY: usize = 20;
const FILL: usize = 21;
const STEP: usize = 22;
const TO_PIXELS: usize = 23;
const MATCH_NORM: usize = 24;
const ALL_FINITE: usize = 25;

/// Few extents, so that shapes often agree.
fn random_dims(random: &mut Random) -> Vec<usize> {
    let n_dims = random.pick(&[1, 2, 2, 3, 3, 3, 4, 4, 5]);
    (0..n_dims).map(|_| random.pick(&[1, 2, 2, 4, 4, 8])).collect()
}

fn random_dtype(random: &mut Random) -> DType {
    match random.within(0, 11) {
        0 => DType::F16,
        1 => DType::U8,
        2 => DType::I32,
        _ => DType::F32,
    }
}

/// Shapes and dtypes with which an op can be carried out: of its output, and of two operands that differ from it.
struct Fitting {
    out: &'static [usize],
    first: (&'static [usize], DType),
    second: (&'static [usize], DType),
}

const fn fitting(out: &'static [usize], first: &'static [usize], second: &'static [usize]) -> Fitting {
    Fitting {
        out,
        first: (first, DType::F32),
        second: (second, DType::F32),
    }
}

impl Fitting {
    fn of(op_idx: usize) -> Self {
        match op_idx {
            LINEAR => fitting(&[2, 3, 4], &[2, 3, 4], &[2, 4]),
            CONV2D => fitting(&[1, 4, 4, 4], &[1, 4, 4, 4], &[1, 4]),
            ATTENTION => fitting(&[2, 4, 8], &[1, 2, 4, 4], &[2, 4, 8]),
            LAYER_NORM => fitting(&[2, 3, 4], &[2, 4], &[1, 4]),
            GATED => fitting(&[2, 3, 4], &[2, 3, 8], &[1]),
            ROPE => fitting(&[2, 4, 8], &[4, 4], &[4, 4]),
            EMBEDDING => Self {
                first: (&[2, 2], DType::I32),
                ..fitting(&[2, 2, 8], &[], &[1])
            },
            GATHER_ROWS => Self {
                second: (&[2], DType::I32),
                ..fitting(&[2, 4], &[2, 3, 4], &[])
            },
            TIMESTEP_EMBEDDING => fitting(&[2, 4], &[2], &[1]),
            PATCHIFY => fitting(&[2, 4, 16], &[2, 4, 4, 4], &[1]),
            UNPATCHIFY => fitting(&[2, 4, 4, 4], &[2, 4, 16], &[1]),
            UPSAMPLE_NEAREST => fitting(&[1, 4, 8, 2], &[1, 2, 4, 2], &[1]),
            STEP => fitting(&[2, 2, 4], &[2], &[2, 3]),
            _ => fitting(&[2, 3, 4], &[2, 1, 4], &[2, 3, 4]),
        }
    }
}

/// A tensor filled with `byte` and a part of it: of shape `dims` three times out of four.
fn operand(
    backend: &dyn Backend,
    random: &mut Random,
    (dims, dtype): (&[usize], DType),
    byte: u8,
) -> (Tensor, Tensor) {
    let (inner, dtype) = match random.within(0, 3) {
        0 => (random_dims(random), random_dtype(random)),
        _ => (dims.to_vec(), dtype),
    };
    let margins: Vec<usize> = inner.iter().map(|_| random.pick(&[0, 0, 0, 1, 3])).collect();
    let dims: Vec<usize> = inner.iter().zip(&margins).map(|(a, b)| a + b).collect();
    let n_bytes = dims.iter().product::<usize>() * dtype.size_bytes();
    let whole = backend
        .upload(&vec![byte; n_bytes], &dims, dtype)
        .expect("memory");
    let mut part = whole.clone();
    for (dim_idx, (&extent, &margin)) in inner.iter().zip(&margins).enumerate() {
        let start = random.within(0, margin);
        part = part.narrow(dim_idx, start, extent).expect("inside");
    }
    (whole, part)
}

/// A tensor of the same shape: other memory, the very same view, or (if it can be) the same memory from another place on.
fn partner(backend: &dyn Backend, random: &mut Random, of: &Tensor, whole: &Tensor) -> Tensor {
    match random.within(0, 7) {
        0 => of.clone(),
        1 => (0..of.dims().len().min(whole.dims().len()))
            .try_fold(whole.clone(), |part, dim_idx| {
                part.narrow(dim_idx, 0, of.dim(dim_idx))
            })
            .unwrap_or_else(|_| of.clone()),
        2 => operand(backend, random, (of.dims(), of.dtype()), 0).1,
        _ => backend.alloc(of.dims(), of.dtype()).expect("memory"),
    }
}

fn download(backend: &dyn Backend, x: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; x.shape().n_elements() * x.dtype().size_bytes()];
    backend.download(x, &mut bytes).expect("the right size");
    bytes
}

const MATRIX: usize = 0;
const VECTOR: usize = 2;
const TABLE: usize = 4;
const CONV: usize = 5;

fn weights(backend: &dyn Backend) -> Vec<Weight> {
    let shapes: [(WeightKind, &[usize]); 8] = [
        (WeightKind::Matrix, &[4, 4]),
        (WeightKind::Matrix, &[8, 2]),
        (WeightKind::Vector, &[4]),
        (WeightKind::Vector, &[2, 4]),
        (WeightKind::Table, &[4, 8]),
        (WeightKind::Conv { stride: 1 }, &[4, 4, 3, 3]),
        (WeightKind::Conv { stride: 2 }, &[8, 2, 2, 2]),
        (WeightKind::Conv { stride: 1 }, &[32, 32, 3, 3]),
    ];
    let mut source = MemorySource::default();
    let mut specs = Vec::new();
    for (i, (kind, shape)) in shapes.into_iter().enumerate() {
        let name = format!("w{i}");
        source.insert(&name, shape, &vec![0.5; shape.iter().product()]);
        specs.push(WeightSpec {
            sources: vec![name],
            kind,
            shape: shape.to_vec(),
            precision: Precision::Device,
        });
    }
    let prepared = backend.prepare(&specs, PrepareInput::Build(&source), &mut |_, _| {});
    prepared.expect("sound weights").weights
}

/// Calls op number `op_idx` on random operands with the output `out`; whether it was carried out.
fn call(
    backend: &dyn Backend,
    weights: &[Weight],
    random: &mut Random,
    op_idx: usize,
    (whole, out): (&Tensor, &Tensor),
) -> bool {
    let [x, y, z] = &[(); 3].map(|()| partner(backend, random, out, whole));
    let fitting = Fitting::of(op_idx);
    let first = &operand(backend, random, fitting.first, 0).1;
    let second = &operand(backend, random, fitting.second, 0).1;
    // The weight with which the op may be carried out, or any.
    let weight = |random: &mut Random, likely: usize| match random.within(0, 3) {
        0 => &weights[random.within(0, weights.len() - 1)],
        _ => &weights[likely],
    };
    let activation = random.pick(&[Activation::None, Activation::Silu, Activation::GeluErf]);
    let epilogue = Epilogue {
        bias: random.coin().then(|| weight(random, VECTOR)),
        activation,
        gate: random.coin().then_some(second),
        residual: random.coin().then_some(z),
    };
    let n = random.pick(&[0, 1, 2, 2, 3, 4, 4, 8, usize::MAX, usize::MAX / 2 + 1]);
    let outcome = match op_idx {
        LINEAR => backend.linear(first, weight(random, MATRIX), &epilogue, out),
        CONV2D => {
            let padding = match random.within(0, 1) {
                0 => [(); 4].map(|()| random.pick(&[0, 1, 1, 2, usize::MAX])),
                _ => [1; 4],
            };
            let spec = ConvSpec {
                stride: random.pick(&[1, 1, 2, 0]),
                padding,
                upsample: random.pick(&[1, 1, 1, 2, 0, usize::MAX]),
            };
            backend.conv2d(first, weight(random, CONV), &spec, &epilogue, out)
        }
        ATTENTION => {
            let spec = AttentionSpec {
                n_heads: n,
                n_kv_heads: random.pick(&[n, 1, 0, 2]),
                scale: 0.5,
                is_causal: random.coin(),
                bias: random.coin().then_some(first),
            };
            backend.attention(x, y, z, &spec, out)
        }
        LAYER_NORM => {
            let affine = random.coin().then(|| {
                (
                    weight(random, VECTOR),
                    random.coin().then(|| weight(random, VECTOR)),
                )
            });
            let modulation = random.coin().then_some(Modulation {
                scale: first,
                shift: second,
            });
            backend.layer_norm(x, affine, 1e-5, modulation, out)
        }
        RMS_NORM => backend.rms_norm(x, random.coin().then(|| weight(random, VECTOR)), n, 1e-5, out),
        MATCH_NORM => backend.match_norm(x, y, n, out),
        GROUP_NORM => backend.group_norm(
            x,
            (weight(random, VECTOR), weight(random, VECTOR)),
            n,
            1e-5,
            activation,
            out,
        ),
        ADD => backend.add(x, first, out),
        MUL => backend.mul(x, y, out),
        GATED_ADD => backend.gated_add(x, first, y, out),
        AFFINE => backend.affine(x, 2.0, 1.0, out),
        ACTIVATION => backend.activation(x, activation, out),
        GATED => backend.gated(first, activation, GateOrder::FirstActivated, out),
        ROPE => backend.rope(x, first, second, RopeStyle::Halves, out),
        EMBEDDING => backend.embedding(first, weight(random, TABLE), out),
        GATHER_ROWS => backend.gather_rows(first, second, out),
        TIMESTEP_EMBEDDING => {
            let spec = TimestepSpec {
                flip_sin_to_cos: random.coin(),
                downscale_freq_shift: 0.0,
                scale: 1.0,
                max_period: 10_000.0,
            };
            backend.timestep_embedding(first, &spec, out)
        }
        PATCHIFY => backend.patchify(first, n, PatchOrder::ChannelFirst, out),
        UNPATCHIFY => backend.unpatchify(first, n, PatchOrder::SpatialFirst, out),
        PERMUTE => {
            let n_dims = out.dims().len();
            let axes: Vec<usize> = match random.within(0, 1) {
                0 => (0..n_dims).map(|_| random.within(0, n_dims)).collect(),
                _ => (0..n_dims).collect(),
            };
            backend.permute(second, &axes, out)
        }
        UPSAMPLE_NEAREST => backend.upsample_nearest(first, out),
        COPY => backend.copy(first, out),
        FILL => backend.fill(out, 1.0),
        STEP => {
            let args = StepArgs {
                latents: x,
                conditional: y,
                unconditional: random.coin().then_some((z, first)),
                coefficients: second,
                noise: random.coin().then_some(z),
                guided_out: None,
            };
            backend.step(&args, out)
        }
        TO_PIXELS => backend.to_pixels(x, out),
        _ => backend.all_finite(first).map(drop),
    };
    outcome.is_ok()
}

#[test]
fn no_operands_make_an_op_panic_or_write_outside_of_its_output() {
    for isa in Isa::ALL.iter().copied().filter(|isa| isa.is_available()) {
        let backend = CpuBackend::new(CpuOptions {
            n_threads: 2,
            isa: Some(isa),
            winograd: true,
        })
        .expect("available");
        let weights = weights(&backend);
        let mut random = Random::new(7);
        for op_idx in LINEAR..=ALL_FINITE {
            let mut n_carried_out = 0;
            for round in 0..2000 {
                let dims = Fitting::of(op_idx).out;
                let (whole, out) = operand(&backend, &mut random, (dims, DType::F32), MARK);
                let before = download(&backend, &whole);
                let is_ok = call(&backend, &weights, &mut random, op_idx, (&whole, &out));
                n_carried_out += usize::from(is_ok);
                // With marks in place of what the op may have written, nothing has changed.
                let n_bytes = out.shape().n_elements() * out.dtype().size_bytes();
                let marks = backend
                    .upload(&vec![MARK; n_bytes], out.dims(), out.dtype())
                    .expect("memory");
                if is_ok {
                    backend.copy(&marks, &out).expect("equal shapes");
                }
                assert!(
                    download(&backend, &whole) == before,
                    "{isa}: op {op_idx} in round {round} wrote outside of {out:?} (carried out: {is_ok})"
                );
            }
            assert!(n_carried_out > 50, "{isa}: op {op_idx} was almost always refused");
        }
    }
}
