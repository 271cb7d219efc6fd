//! Prints what the kernels reach on this machine: `cargo run --release -p denoised-cpu --example rates [SET] [THREADS]`.
#![expect(clippy::print_stdout, reason = "a program for people")]

use denoised_cpu::{CpuBackend, CpuOptions, Isa, bench};
use denoised_tensor::{
    Activation, AttentionSpec, Backend, ConvSpec, DType, Epilogue, GateOrder, Precision, PrepareInput,
    Result, SourceDType, SourceError, SourceTensor, Weight, WeightKind, WeightSource, WeightSpec,
};

/// `m, n, k` of products in diffusion models.
const PRODUCTS: [[usize; 3]; 8] = [
    [4096, 320, 320],
    [1024, 1280, 5120],
    [256, 384, 1536],
    [77, 1536, 4096],
    [2, 9216, 1536],
    [1024, 6144, 1536],
    [1101, 1536, 6144],
    [4096, 3072, 3072],
];

/// Channels and side of 3x3 convolutions.
const CONVOLUTIONS: [[usize; 2]; 5] = [[320, 64], [640, 32], [1280, 16], [512, 64], [128, 256]];

/// Tokens, heads, head size.
const ATTENTIONS: [[usize; 3]; 4] = [[4096, 8, 40], [1024, 24, 64], [1024, 24, 128], [4096, 1, 512]];

/// Any tensor, of small numbers.
#[derive(Debug)]
struct Anything(Vec<WeightSpec>);

impl WeightSource for Anything {
    fn layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), SourceError> {
        let spec = self.0.iter().find(|spec| spec.sources[0] == name);
        let spec = spec.ok_or_else(|| SourceError(name.to_owned()))?;
        Ok((SourceDType::F32, spec.shape.clone()))
    }

    fn tensor(&self, name: &str) -> Result<SourceTensor<'_>, SourceError> {
        let (dtype, shape) = self.layout(name)?;
        let n: usize = shape.iter().product();
        let bytes: Vec<u8> = (0..n)
            .flat_map(|i| ((i % 13) as f32 / 100.0 - 0.06).to_le_bytes())
            .collect();
        Ok(SourceTensor {
            dtype,
            shape,
            bytes: bytes.into(),
        })
    }
}

fn weight(backend: &CpuBackend, kind: WeightKind, shape: &[usize]) -> Result<Weight> {
    let specs = vec![WeightSpec {
        sources: vec!["w".to_owned()],
        kind,
        shape: shape.to_vec(),
        precision: Precision::Device,
    }];
    let prepared = backend.prepare(
        &specs,
        PrepareInput::Build(&Anything(specs.clone())),
        &mut |_, _| {},
    )?;
    Ok(prepared.weights[0].clone())
}

fn filled(backend: &CpuBackend, dims: &[usize]) -> Result<denoised_tensor::Tensor> {
    let n: usize = dims.iter().product();
    let bytes: Vec<u8> = (0..n)
        .flat_map(|i| ((i % 29) as f32 / 30.0 - 0.5).to_le_bytes())
        .collect();
    backend.upload(&bytes, dims, DType::F32)
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let isa = match arguments.next() {
        Some(name) => Isa::ALL
            .iter()
            .copied()
            .find(|isa| isa.as_str() == name)
            .unwrap_or_else(Isa::best),
        None => Isa::best(),
    };
    let n_threads = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(1);
    let backend = CpuBackend::new(CpuOptions {
        n_threads,
        isa: Some(isa),
        winograd: true,
    })?;
    let plain = CpuBackend::new(CpuOptions {
        n_threads,
        isa: Some(isa),
        winograd: false,
    })?;
    println!("{:?}", backend.info());
    let peak = bench::fma_peak(isa, n_threads)?;
    println!("peak {peak:.0} GFLOP/s");
    for [m, n, k] in PRODUCTS {
        let rate = bench::gemm_rate(isa, n_threads, m, n, k)?;
        println!(
            "product {m} x {n} x {k}: {rate:.0} GFLOP/s, {:.0} % of peak",
            100.0 * rate / peak
        );
    }
    for [c, side] in CONVOLUTIONS {
        let flops = 2.0 * 9.0 * (c * c * side * side) as f64;
        for backend in [&backend, &plain] {
            let w = weight(backend, WeightKind::Conv { stride: 1 }, &[c, c, 3, 3])?;
            let x = filled(backend, &[1, side, side, c])?;
            let out = backend.alloc(&[1, side, side, c], DType::F32)?;
            let spec = ConvSpec {
                stride: 1,
                padding: [1; 4],
                upsample: 1,
            };
            let seconds =
                bench::op_seconds(backend, |b| b.conv2d(&x, &w, &spec, &Epilogue::default(), &out))?;
            println!(
                "conv {c} ch {side}x{side}: {:.2} ms, {:.0} GFLOP/s",
                seconds * 1e3,
                flops / seconds / 1e9
            );
        }
    }
    for [n, n_heads, head_dim] in ATTENTIONS {
        let qkv = filled(&backend, &[1, n, 3 * n_heads * head_dim])?;
        let part = |i: usize| qkv.narrow(2, i * n_heads * head_dim, n_heads * head_dim);
        let (q, k, v) = (part(0)?, part(1)?, part(2)?);
        let out = backend.alloc(&[1, n, n_heads * head_dim], DType::F32)?;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let spec = AttentionSpec {
            n_heads,
            n_kv_heads: n_heads,
            scale,
            is_causal: false,
            bias: None,
        };
        let seconds = bench::op_seconds(&backend, |b| b.attention(&q, &k, &v, &spec, &out))?;
        let flops = 4.0 * (n * n * n_heads * head_dim) as f64;
        let rate = flops / seconds / 1e9;
        println!(
            "attention {n} x {n_heads} x {head_dim}: {:.1} ms, {rate:.0} GFLOP/s, {:.0} % of peak",
            seconds * 1e3,
            100.0 * rate / peak
        );
    }
    let image = filled(&backend, &[1, 64, 64, 320])?;
    let ones = weight(&backend, WeightKind::Vector, &[320])?;
    let seconds = bench::op_seconds(&backend, |b| {
        b.group_norm(&image, (&ones, &ones), 32, 1e-5, Activation::Silu, &image)
    })?;
    println!("group norm + silu 320 ch 64x64: {:.2} ms", seconds * 1e3);
    let tokens = filled(&backend, &[1, 4096, 1536])?;
    let out = backend.alloc(&[1, 4096, 1536], DType::F32)?;
    let seconds = bench::op_seconds(&backend, |b| b.layer_norm(&tokens, None, 1e-6, None, &out))?;
    println!("layer norm 4096 x 1536: {:.2} ms", seconds * 1e3);
    let pairs = filled(&backend, &[1, 4096, 2560])?;
    let out = backend.alloc(&[1, 4096, 1280], DType::F32)?;
    let order = GateOrder::SecondActivated;
    let seconds = bench::op_seconds(&backend, |b| b.gated(&pairs, Activation::GeluErf, order, &out))?;
    println!("geglu 4096 x 1280: {:.2} ms", seconds * 1e3);
    Ok(())
}
