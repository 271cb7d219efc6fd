//! Times of kernels at real shapes, each beside the ceiling that it has on this card.
//!
//! A body enqueues an op several times and is recorded; the recording is replayed and waited for. Bytes are those that an op must read
//! and write once, operations those of its products.

use denoised_tensor::{
    Activation, AttentionSpec, Backend, ConvSpec, DType, Epilogue, GateOrder, Modulation, Precision,
    PrepareInput, Result, Tensor, Weight, WeightKind, WeightSpec,
};
use denoised_testkit::suites::backend::MemorySource;
use serde_json::{Value, json};
use std::{
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

const LAUNCHES: usize = 20;
const REPLAYS: usize = 10;
const DTYPE: DType = DType::BF16;

/// What an op costs at the least.
struct Cost {
    n_bytes: f64,
    n_operations: f64,
}

/// `{"measured", "entries": [{"name", "op", "ms", "gbps", "tflops", "of_ceiling"}]}`
pub(crate) fn run(shapes: &Path, small: bool) -> Value {
    let text =
        std::fs::read_to_string(shapes).unwrap_or_else(|error| panic!("{}: {error}", shapes.display()));
    let shapes: Vec<Value> = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}"));
    let backend = super::open(DTYPE);
    let mut entries = Vec::new();
    // The first two are the ceilings: what a copy moves, and what a large product computes.
    let (mut most_gbps, mut most_tflops) = (f64::NAN, f64::NAN);
    for shape in &shapes {
        let (name, op) = (
            shape["name"].as_str().unwrap_or_default(),
            shape["op"].as_str().unwrap_or_default(),
        );
        let dims = if small { &shape["small"] } else { &shape["dims"] };
        let dim = |key: &str| {
            dims[key]
                .as_u64()
                .unwrap_or_else(|| panic!("{name} has no {key}")) as usize
        };
        match time(&backend, op, &dim) {
            Err(error) => entries.push(json!({"name": name, "op": op, "problem": error.to_string()})),
            Ok((ms, cost)) => {
                let (gbps, tflops) = (cost.n_bytes / ms / 1e6, cost.n_operations / ms / 1e9);
                if op == "copy" && most_gbps.is_nan() {
                    most_gbps = gbps;
                }
                if op == "linear" && most_tflops.is_nan() {
                    most_tflops = tflops;
                }
                let of_ceiling = (gbps / most_gbps).max(if cost.n_operations > 0.0 {
                    tflops / most_tflops
                } else {
                    0.0
                });
                entries.push(json!({"name": name, "op": op, "ms": ms, "gbps": gbps, "tflops": tflops, "of_ceiling": of_ceiling}));
            }
        }
    }
    json!({"measured": !small, "entries": entries})
}

/// Milliseconds of one op, and its cost.
fn time(backend: &dyn Backend, op: &str, dim: &dyn Fn(&str) -> usize) -> Result<(f64, Cost)> {
    let element = DTYPE.size_bytes() as f64;
    let filled = |dims: &[usize]| filled(backend, dims);
    let count = |x: &Tensor| x.shape().n_elements() as f64;
    match op {
        "copy" => {
            let cols = (dim("n_bytes") / 2).min(1 << 20);
            let x = filled(&[dim("n_bytes") / 2 / cols, cols])?;
            let out = filled(x.dims())?;
            let cost = Cost {
                n_bytes: 2.0 * element * count(&x),
                n_operations: 0.0,
            };
            Ok((timed(backend, &|| backend.copy(&x, &out))?, cost))
        }
        "linear" => {
            let (m, n, k) = (dim("m"), dim("n"), dim("k"));
            let weights = weights(
                backend,
                &[(WeightKind::Matrix, &[n, k]), (WeightKind::Vector, &[n])],
            )?;
            let (x, out) = (filled(&[1, m, k])?, filled(&[1, m, n])?);
            let epilogue = Epilogue {
                bias: Some(&weights[1]),
                ..Epilogue::default()
            };
            let cost = Cost {
                n_bytes: element * (m * k + n * k + m * n) as f64,
                n_operations: 2.0 * (m as f64) * (n as f64) * (k as f64),
            };
            Ok((
                timed(backend, &|| backend.linear(&x, &weights[0], &epilogue, &out))?,
                cost,
            ))
        }
        "attention" => {
            let (batch, n_queries, n_keys) = (dim("batch"), dim("n_queries"), dim("n_keys"));
            let (n_heads, head_dim) = (dim("n_heads"), dim("head_dim"));
            let n = n_heads * head_dim;
            let (q, out) = (filled(&[batch, n_queries, n])?, filled(&[batch, n_queries, n])?);
            let (k, v) = (filled(&[batch, n_keys, n])?, filled(&[batch, n_keys, n])?);
            let spec = AttentionSpec {
                n_heads,
                n_kv_heads: n_heads,
                scale: 1.0 / (head_dim as f32).sqrt(),
                is_causal: false,
                bias: None,
            };
            let cost = Cost {
                n_bytes: 2.0 * element * (count(&q) + count(&k)),
                n_operations: 4.0 * (batch * n_queries) as f64 * (n_keys * n) as f64,
            };
            Ok((
                timed(backend, &|| backend.attention(&q, &k, &v, &spec, &out))?,
                cost,
            ))
        }
        "conv2d" => {
            let (c_in, c_out) = (dim("c_in"), dim("c_out"));
            let image = [dim("batch"), dim("height"), dim("width")];
            let weights = weights(
                backend,
                &[
                    (WeightKind::Conv { stride: 1 }, &[c_out, c_in, 3, 3]),
                    (WeightKind::Vector, &[c_out]),
                ],
            )?;
            let x = filled(&[image[0], image[1], image[2], c_in])?;
            let out = filled(&[image[0], image[1], image[2], c_out])?;
            let spec = ConvSpec {
                stride: 1,
                padding: [1; 4],
                upsample: 1,
            };
            let epilogue = Epilogue {
                bias: Some(&weights[1]),
                ..Epilogue::default()
            };
            let cost = Cost {
                n_bytes: element * (count(&x) + count(&out) + (9 * c_in * c_out) as f64),
                n_operations: 18.0 * count(&x) * c_out as f64,
            };
            Ok((
                timed(backend, &|| {
                    backend.conv2d(&x, &weights[0], &spec, &epilogue, &out)
                })?,
                cost,
            ))
        }
        "group_norm_silu" => {
            let n = dim("channels");
            let weights = weights(backend, &[(WeightKind::Vector, &[n]), (WeightKind::Vector, &[n])])?;
            let x = filled(&[dim("batch"), dim("height"), dim("width"), n])?;
            let out = filled(x.dims())?;
            let (affine, n_groups) = ((&weights[0], &weights[1]), dim("groups"));
            let cost = Cost {
                n_bytes: 2.0 * element * count(&x),
                n_operations: 0.0,
            };
            Ok((
                timed(backend, &|| {
                    backend.group_norm(&x, affine, n_groups, 1e-5, Activation::Silu, &out)
                })?,
                cost,
            ))
        }
        "layer_norm_modulated" => {
            let (batch, n) = (dim("batch"), dim("cols"));
            let x = filled(&[batch, dim("rows"), n])?;
            let (out, scale, shift) = (filled(x.dims())?, filled(&[batch, n])?, filled(&[batch, n])?);
            let run = || {
                let modulation = Some(Modulation {
                    scale: &scale,
                    shift: &shift,
                });
                backend.layer_norm(&x, None, 1e-6, modulation, &out)
            };
            let cost = Cost {
                n_bytes: 2.0 * element * count(&x),
                n_operations: 0.0,
            };
            Ok((timed(backend, &run)?, cost))
        }
        "geglu" => {
            let (batch, rows, n) = (dim("batch"), dim("rows"), dim("cols"));
            let (x, out) = (filled(&[batch, rows, 2 * n])?, filled(&[batch, rows, n])?);
            let cost = Cost {
                n_bytes: element * (count(&x) + count(&out)),
                n_operations: 0.0,
            };
            let run = || backend.gated(&x, Activation::GeluErf, GateOrder::SecondActivated, &out);
            Ok((timed(backend, &run)?, cost))
        }
        _ => panic!("no op is called {op}"),
    }
}

/// Rows of numbers around zero; constant ones would spare a card power, and so flatter it.
fn filled(backend: &dyn Backend, dims: &[usize]) -> Result<Tensor> {
    let n = dims.last().copied().unwrap_or(1);
    let value = |i: u32| (i.wrapping_mul(747_796_405) >> 8) as f32 / (1 << 24) as f32 - 0.5;
    let bytes: Vec<u8> = (0..n as u32).flat_map(|i| value(i).to_le_bytes()).collect();
    let row = backend.upload(&bytes, &[n], DType::F32)?;
    let x = backend.alloc(dims, DTYPE)?;
    backend.copy(&row, &x)?;
    Ok(x)
}

/// Median over replays of a recording of several launches, per launch.
fn timed(backend: &dyn Backend, op: &dyn Fn() -> Result<()>) -> Result<f64> {
    // Each op is a body of its own, though all have no inputs.
    static NEXT_KEY: AtomicU64 = AtomicU64::new(1 << 32);
    let key = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
    let repeated = || {
        let mut body = |_: &[&Tensor]| {
            for _ in 0..LAUNCHES {
                op()?;
            }
            Ok(Vec::new())
        };
        backend.repeat(key, &[], &mut body)
    };
    for _ in 0..3 {
        repeated()?;
    }
    backend.synchronize()?;
    let mut times = Vec::new();
    for _ in 0..REPLAYS {
        let started = Instant::now();
        repeated()?;
        backend.synchronize()?;
        times.push(started.elapsed().as_secs_f64() * 1e3 / LAUNCHES as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

fn weights(backend: &dyn Backend, all: &[(WeightKind, &[usize])]) -> Result<Vec<Weight>> {
    let mut source = MemorySource::default();
    let mut specs = Vec::new();
    for (i, (kind, shape)) in all.iter().enumerate() {
        let name = format!("w{i}");
        source.insert(&name, shape, &vec![0.01; shape.iter().product()]);
        specs.push(WeightSpec {
            sources: vec![name],
            kind: *kind,
            shape: shape.to_vec(),
            precision: Precision::Device,
        });
    }
    Ok(backend
        .prepare(&specs, PrepareInput::Build(&source), &mut |_, _| {})?
        .weights)
}
