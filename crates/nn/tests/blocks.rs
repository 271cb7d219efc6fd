//! The blocks of U-Nets against what diffusers computes in float64 (`tables/make_blocks.py`), from weights that both compute.

use denoised_cpu::{CpuBackend, CpuOptions};
use denoised_nn::{
    After, Ctx, Declare, Downsample, Linear, ResnetBlock, ResnetSpec, Scope, Transformer2d,
    Transformer2dSpec, Upsample,
};
use denoised_tensor::{
    Activation, Backend, DType, PrepareInput, SourceDType, SourceError, SourceTensor, Tensor, WeightSource,
};
use serde_json::Value;
use std::collections::BTreeMap;

/// Element `i` is `scale sin(0.37 i + 0.11 phase) + shift`.
fn wave(n: usize, phase: f64, scale: f64, shift: f64) -> Vec<f32> {
    (0..n)
        .map(|i| (scale * (0.37 * i as f64 + 0.11 * phase).sin() + shift) as f32)
        .collect()
}

/// Weights by name, of the shapes that diffusers gives them.
struct Waves(BTreeMap<String, Vec<usize>>);

impl WeightSource for Waves {
    fn layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), SourceError> {
        let shape = self
            .0
            .get(name)
            .ok_or_else(|| SourceError(format!("no {name}")))?;
        Ok((SourceDType::F32, shape.clone()))
    }

    fn tensor(&self, name: &str) -> Result<SourceTensor<'_>, SourceError> {
        let (dtype, shape) = self.layout(name)?;
        let is_factor = name.contains("norm") && name.ends_with("weight");
        let phase: f64 = name.bytes().map(f64::from).sum();
        let values = wave(
            shape.iter().product(),
            phase,
            0.3,
            if is_factor { 1.0 } else { 0.0 },
        );
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Ok(SourceTensor {
            dtype,
            shape,
            bytes: bytes.into(),
        })
    }
}

/// Builds a block, runs it on `inputs` (shape and phase) and compares with the table.
#[track_caller]
fn check<B>(
    name: &str,
    build: impl FnOnce(&mut Scope<'_>) -> B,
    inputs: &[(&[usize], f64)],
    run: impl FnOnce(&Ctx<'_>, &B, &[Tensor], &Tensor),
) {
    let table: Value = serde_json::from_str(include_str!("tables/blocks.json")).expect("JSON");
    let entry = &table[name];
    let weights: BTreeMap<String, Vec<usize>> =
        serde_json::from_value(entry["weights"].clone()).expect("shapes by name");
    let dims: Vec<usize> = serde_json::from_value(entry["shape"].clone()).expect("a shape");
    let theirs: Vec<f64> = serde_json::from_value(entry["out"].clone()).expect("numbers");

    let mut declare = Declare::new(weights.keys().cloned());
    let block = build(&mut declare.at(""));
    let specs = declare.finish();
    let mut declared: Vec<&String> = specs.iter().flat_map(|spec| &spec.sources).collect();
    declared.sort();
    assert_eq!(
        declared,
        weights.keys().collect::<Vec<_>>(),
        "{name}: every weight once"
    );
    let source = Waves(weights);
    let backend = CpuBackend::new(CpuOptions::default()).expect("a backend");
    let prepared = backend
        .prepare(&specs, PrepareInput::Build(&source), &mut |_, _| {})
        .expect("the shapes are diffusers'");
    let ctx = Ctx {
        backend: &backend,
        weights: &prepared.weights,
        dtype: DType::F32,
    };
    let upload = |(dims, phase): &(&[usize], f64)| {
        let values = wave(dims.iter().product(), *phase, 1.0, 0.0);
        ctx.upload_f32(&values, dims).expect("uploaded")
    };
    let inputs: Vec<Tensor> = inputs.iter().map(upload).collect();
    // Into a part of a wider tensor, as U-Nets have it.
    let last_idx = dims.len() - 1;
    let mut wide = dims.clone();
    wide[last_idx] += 3;
    let wide = ctx.alloc(&wide).expect("memory");
    let out = wide.narrow(last_idx, 1, dims[last_idx]).expect("inside");
    run(&ctx, &block, &inputs, &out);
    let ours = ctx.download_f32(&out).expect("downloaded");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut ours.iter().zip(&theirs).map(|(a, b)| f64::from(*a) - b));
    let error = difference / norm(&mut theirs.iter().copied());
    assert!(error <= 2e-6, "{name}: relative error {error:e}");
}

fn resnet(name: &str, c_out: usize, spec: ResnetSpec) {
    let build = |scope: &mut Scope<'_>| {
        let block = ResnetBlock::new(scope, 8, c_out, spec);
        (block, Linear::new(&mut scope.at("time_emb_proj"), 10, c_out))
    };
    let inputs: [(&[usize], f64); 2] = [(&[2, 4, 5, 8], 3.0), (&[2, 10], 5.0)];
    check(name, build, &inputs, |ctx, (block, projection), inputs, out| {
        let time = &inputs[1];
        ctx.backend.activation(time, spec.activation, time).expect("done");
        let shift = projection.forward(ctx, time, After::default()).expect("done");
        let shift = shift.reshape(&[2, 1, 1, c_out]).expect("dense");
        block.forward_into(ctx, &inputs[0], &shift, out).expect("done");
    });
}

#[test]
fn residual_blocks_with_time_embedding_are_diffusers() {
    let spec = ResnetSpec {
        n_groups: 2,
        eps: 1e-3,
        activation: Activation::Silu,
        divisor: 1.7,
    };
    resnet("resnet-shortcut", 12, spec);
    let spec = ResnetSpec {
        eps: 1e-5,
        activation: Activation::GeluErf,
        divisor: 1.0,
        ..spec
    };
    resnet("resnet-plain", 8, spec);
}

#[test]
fn transformers_on_pictures_are_diffusers() {
    let spec = Transformer2dSpec {
        n_channels: 12,
        n_heads: 3,
        n_layers: 2,
        n_context: 10,
        n_groups: 3,
        is_only_cross: false,
    };
    let few_heads = ("transformer", spec);
    let spec = Transformer2dSpec {
        n_heads: 5,
        n_layers: 1,
        is_only_cross: true,
        ..spec
    };
    let inputs: [(&[usize], f64); 2] = [(&[2, 4, 5, 12], 3.0), (&[2, 7, 10], 5.0)];
    for (name, spec) in [few_heads, ("transformer-linear-cross", spec)] {
        let build = |scope: &mut Scope<'_>| Transformer2d::new(scope, &spec);
        check(name, build, &inputs, |ctx, block, inputs, out| {
            block
                .forward_into(ctx, &inputs[0], &inputs[1], None, out)
                .expect("done");
        });
    }
}

#[test]
fn halving_is_diffusers_with_and_without_padding_in_front() {
    for padding in [0, 1] {
        let build = |scope: &mut Scope<'_>| Downsample::new(scope, 8, padding);
        let inputs: [(&[usize], f64); 1] = [(&[2, 5, 6, 8], 3.0)];
        check(
            &format!("downsample-{padding}"),
            build,
            &inputs,
            |ctx, block, inputs, out| {
                assert_eq!(block.out_dims(&inputs[0]), out.dims());
                block.forward_into(ctx, &inputs[0], out).expect("done");
            },
        );
    }
}

#[test]
fn doubling_to_every_size_that_halving_may_have_come_from_is_diffusers() {
    for size in ["6x8", "5x8", "5x7", "7x9", "7x8", "5x9"] {
        let build = |scope: &mut Scope<'_>| Upsample::new(scope, 8);
        let inputs: [(&[usize], f64); 1] = [(&[2, 3, 4, 8], 3.0)];
        check(
            &format!("upsample-{size}"),
            build,
            &inputs,
            |ctx, block, inputs, out| {
                block.forward_into(ctx, &inputs[0], out).expect("done");
            },
        );
    }
}
