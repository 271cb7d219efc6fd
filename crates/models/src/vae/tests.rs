//! Autoencoders against what diffusers computes in float64 (`tests/tables/make_vaes.py`), from weights that both draw.

use super::{
    CausalConfig, CausalDecoder, CausalEncoder, Decoder, Encoder, Flux2Decoder, Flux2Encoder, Flux2VaeConfig,
    KlConfig, KlDecoder, KlEncoder,
};
use crate::drawn::{Drawn, normal, relative_error};
use denoised_checkpoint::Config;
use denoised_cpu::{CpuBackend, CpuOptions};
use denoised_nn::{Ctx, Declare, Scope};
use denoised_tensor::{Backend, DType, PrepareInput, Tensor};
use serde_json::Value;
use std::path::Path;

const LIMIT: f64 = 1e-5;

/// Which half of an autoencoder a case looks at.
enum Half {
    Decoder(Box<dyn Decoder>),
    Encoder(Box<dyn Encoder>),
}

fn decoder(class: &str, config: &Config, scope: &mut Scope<'_>) -> Half {
    match class {
        "AutoencoderKL" => {
            let config = KlConfig::read(config).expect("a configuration").with_statistics();
            Half::Decoder(Box::new(KlDecoder::new(scope, &config)))
        }
        "AutoencoderKLFlux2" => {
            let config = Flux2VaeConfig::read(config).expect("a configuration");
            Half::Decoder(Box::new(Flux2Decoder::new(scope, &config)))
        }
        _ => Half::Decoder(Box::new(CausalDecoder::new(scope, &causal(class, config)))),
    }
}

fn encoder(class: &str, config: &Config, scope: &mut Scope<'_>) -> Half {
    match class {
        "AutoencoderKL" => {
            let config = KlConfig::read(config).expect("a configuration").with_statistics();
            Half::Encoder(Box::new(KlEncoder::new(scope, &config)))
        }
        "AutoencoderKLFlux2" => {
            let config = Flux2VaeConfig::read(config).expect("a configuration");
            Half::Encoder(Box::new(Flux2Encoder::new(scope, &config)))
        }
        _ => Half::Encoder(Box::new(CausalEncoder::new(scope, &causal(class, config)))),
    }
}

fn causal(class: &str, config: &Config) -> CausalConfig {
    let read = match class {
        "AutoencoderKLQwenImage" => CausalConfig::read_qwen_image(config),
        "AutoencoderKLWan" => CausalConfig::read_wan(config),
        _ => panic!("no {class}"),
    };
    read.expect("a configuration")
}

/// Runs what `build` makes of every case of `class` and compares it with the entry called `result`.
fn check(class: &str, result: &str, build: impl Fn(&str, &Config, &mut Scope<'_>) -> Half) {
    let table = include_str!("../../tests/tables/vaes.json");
    let table: Value = serde_json::from_str(table).expect("JSON");
    let mut errors = Vec::new();
    let stride = table["stride"].as_u64().expect("a number") as usize;
    let cases = table["cases"].as_array().expect("cases").iter();
    let cases: Vec<&Value> = cases.filter(|case| case["class"] == class).collect();
    assert!(!cases.is_empty(), "there are cases of {class}");
    for case in cases {
        let dims = |value: &Value| -> Vec<usize> { serde_json::from_value(value.clone()).expect("extents") };
        let map = case["config"].as_object().expect("an object").clone();
        let config = Config::new(Path::new("config.json"), map);
        let source = Drawn(serde_json::from_value(case["weights"].clone()).expect("shapes by name"));
        let mut declare = Declare::new(source.0.keys().cloned());
        let half = build(class, &config, &mut declare.at(""));
        let backend = CpuBackend::new(CpuOptions {
            n_threads: 2,
            ..CpuOptions::default()
        });
        let backend = backend.expect("a backend of two threads");
        let prepared = backend
            .prepare(&declare.finish(), PrepareInput::Build(&source), &mut |_, _| {})
            .expect("the shapes are diffusers'");
        let ctx = Ctx {
            backend: &backend,
            weights: &prepared.weights,
            dtype: DType::F32,
        };
        let given = |extents: &[usize], seed| -> Vec<f32> { normal(extents.iter().product(), seed) };
        let upload = |values: &[f32], extents: &[usize]| -> Tensor {
            let [batch, n_frames, h, w, c] = extents.try_into().expect("five extents");
            ctx.upload_f32(values, &[batch, n_frames * h, w, c])
                .expect("uploaded")
        };
        let latents = dims(&case["latents"]);
        let ours = match &half {
            Half::Decoder(decoder) => {
                decoder.decode(&ctx, &upload(&given(&latents, 1), &latents), latents[1])
            }
            Half::Encoder(encoder) => {
                let pixels = dims(&case["pixels"]);
                let values: Vec<f32> = given(&pixels, 2)
                    .iter()
                    .map(|x| (x * 0.5).clamp(-1.0, 1.0))
                    .collect();
                let noise = upload(&given(&latents, 3), &latents);
                let noise = (result == "sampled").then_some(&noise);
                encoder.encode(&ctx, &upload(&values, &pixels), pixels[1], noise)
            }
        };
        let ours = ours.expect("it runs");
        let theirs = &case[result];
        assert_eq!(ours.dims(), dims(&theirs["shape"]), "{result} of {config:?}");
        // The classes for videos clamp pixels themselves.
        let is_clamped =
            result == "decoded" && matches!(class, "AutoencoderKLQwenImage" | "AutoencoderKLWan");
        let ours = ctx.download_f32(&ours).expect("downloaded");
        let ours = ours.iter().step_by(stride).map(|x| match is_clamped {
            true => f64::from(x.clamp(-1.0, 1.0)),
            false => f64::from(*x),
        });
        let theirs: Vec<f64> = serde_json::from_value(theirs["values"].clone()).expect("numbers");
        errors.push((relative_error(ours, &theirs), config));
    }
    for (error, config) in errors {
        assert!(error <= LIMIT, "{result} of {config:?}: {error:e}");
    }
}

#[test]
fn the_decoder_of_stable_diffusion_is_diffusers() {
    check("AutoencoderKL", "decoded", decoder);
}

#[test]
fn the_encoder_of_stable_diffusion_is_diffusers() {
    check("AutoencoderKL", "encoded", encoder);
    check("AutoencoderKL", "sampled", encoder);
}

#[test]
fn the_decoder_of_flux_2_is_diffusers() {
    check("AutoencoderKLFlux2", "decoded", decoder);
}

#[test]
fn the_encoder_of_flux_2_is_diffusers() {
    check("AutoencoderKLFlux2", "encoded", encoder);
    check("AutoencoderKLFlux2", "sampled", encoder);
}

#[test]
fn the_decoder_of_qwen_image_is_diffusers() {
    check("AutoencoderKLQwenImage", "decoded", decoder);
}

#[test]
fn the_encoder_of_qwen_image_is_diffusers() {
    check("AutoencoderKLQwenImage", "encoded", encoder);
    check("AutoencoderKLQwenImage", "sampled", encoder);
}

#[test]
fn the_decoder_of_wan_is_diffusers() {
    check("AutoencoderKLWan", "decoded", decoder);
}

#[test]
fn the_encoder_of_wan_is_diffusers() {
    check("AutoencoderKLWan", "encoded", encoder);
    check("AutoencoderKLWan", "sampled", encoder);
}

#[test]
fn a_variance_that_overflowed_is_not_hidden_by_its_limits() {
    // torch.exp(0.5 * torch.clamp(torch.tensor([-100., 0., 100.]), -30, 20)), as diffusers' DiagonalGaussianDistribution has it.
    for (log_variance, deviation) in [(-100.0, 3.059_023_2e-7), (0.0, 1.0), (100.0, 22_026.465)] {
        let got = super::sampled(0.0, log_variance, 1.0);
        assert!((got / deviation - 1.0).abs() < 1e-6, "{got}");
    }
    for log_variance in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        assert!(super::sampled(0.0, log_variance, 1.0).is_nan());
    }
}
