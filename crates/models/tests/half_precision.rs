//! What half precision cannot hold: autoencoders that are computed again in f32, and what is an error all the same.
//!
//! Expected pictures are those of the f32 backend, which other tests compare with diffusers.

mod support;

use denoised_models::Pipeline;
use denoised_tensor::{Backend, DType};
use denoised_testkit::rounding::RoundingBackend;
use denoised_types::{Capture, Failure, FailureCode, GenerateRequest, Image};
use half::f16;
use std::{
    fs,
    path::Path,
    rc::Rc,
    sync::{Arc, Mutex},
};
use support::{copy_of, data, load, load_on, replace, run, step};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

/// Relative L2 error of a picture whose text and steps were computed in f16; the decoder was not, so it is far below that of bf16.
const F16_LIMIT: f64 = 1e-2;
const VAE: &str = "vae/diffusion_pytorch_model.safetensors";
/// A kernel's factor that leaves its weights in the range of f16 and takes what they make of latents or pixels out of it.
const HUGE: f32 = 65536.0;

/// Changes every element of some f16 tensors of a file.
fn change(file: &Path, names: &[&str], change: impl Fn(f32) -> f32) {
    let mut bytes = fs::read(file).expect("readable");
    let n_header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n_header]).expect("JSON");
    for name in names {
        let entry = &header[name];
        assert_eq!(entry["dtype"], "F16", "{name}");
        let [begin, end] = [0, 1].map(|i| entry["data_offsets"][i].as_u64().expect("an offset") as usize);
        for pair in bytes[8 + n_header..][begin..end].chunks_exact_mut(2) {
            let value = f16::from_le_bytes([pair[0], pair[1]]).to_f32();
            let changed = f16::from_f32(change(value));
            assert!(!changed.is_infinite(), "{name} stays in range");
            pair.copy_from_slice(&changed.to_le_bytes());
        }
    }
    fs::write(file, bytes).expect("written");
}

/// A copy of `case` with those kernels of the autoencoder enlarged.
fn overflowing(case: &str, names: &[&str]) -> tempfile::TempDir {
    let folder = copy_of(case);
    change(&folder.path().join(VAE), names, |x| x * HUGE);
    folder
}

fn in_dtype(folder: &Path, dtype: DType) -> Box<dyn Pipeline> {
    load_on(
        folder,
        Rc::new(RoundingBackend::new(support::cpu(), dtype)) as Rc<dyn Backend>,
    )
}

fn small() -> GenerateRequest {
    GenerateRequest {
        width: Some(32),
        height: Some(32),
        n_steps: Some(2),
        seed: 7,
        capture: Capture::Trace,
        ..GenerateRequest::new("a cat")
    }
}

/// The picture of `request` as floats.
fn picture(pipeline: &dyn Pipeline, request: &GenerateRequest) -> Result<Vec<f32>, Failure> {
    let trace = run(pipeline, request)?.trace;
    let image = trace
        .iter()
        .find(|tensor| tensor.name == "image")
        .expect("traced");
    Ok(image.to_f32().expect("floats"))
}

#[track_caller]
fn assert_close(ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len());
    let norm =
        |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let error = norm(&mut ours.iter().zip(theirs).map(|(a, b)| a - b)) / norm(&mut theirs.iter().copied());
    support::report(&format!("error {error:.2e}"));
    assert!(error <= F16_LIMIT, "relative L2 error {error:.2e}");
    // A picture, and not one colour.
    let mean = theirs.iter().sum::<f32>() / theirs.len() as f32;
    let deviation = norm(&mut theirs.iter().map(|x| x - mean)) / (theirs.len() as f64).sqrt();
    assert!(deviation > 0.02, "deviation {deviation}");
}

/// Collects warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Warnings {
    /// Those of `body`, and what it returns.
    fn of<T>(body: impl FnOnce() -> T) -> (Vec<String>, T) {
        let warnings = Self::default();
        let result = tracing::subscriber::with_default(warnings.clone(), body);
        let texts = warnings.0.lock().expect("no panic").clone();
        (texts, result)
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().expect("no panic").push(text.0);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, _: &Field, value: &dyn std::fmt::Debug) {
        self.0.push_str(&format!("{value:?}"));
    }
}

#[test]
fn a_decoder_that_overflows_f16_decodes_again_in_f32_with_weights_that_are_read_once() {
    let folder = overflowing("sd15", &["decoder.conv_in.weight"]);
    let expected = picture(&*load(folder.path()), &small()).expect("f32 holds it");
    let pipeline = in_dtype(folder.path(), DType::F16);
    let mut kept = Vec::new();
    for _ in 0..2 {
        let before = pipeline.memory().used_bytes;
        let (warnings, got) = Warnings::of(|| picture(&*pipeline, &small()));
        kept.push(pipeline.memory().used_bytes - before);
        assert_close(&got.expect("f32 holds it"), &expected);
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        for word in ["decoding", "f16", "f32", "NaN or infinity"] {
            assert!(warnings[0].contains(word), "{warnings:?}");
        }
    }
    // At least the two kernels of 32 x 32 x 3 x 3 of each of the decoder's resnets; nothing the second time.
    assert!(kept[0] > 2 * 32 * 32 * 9 * 4 && kept[1] == 0, "{kept:?}");
}

#[test]
fn a_picture_does_not_depend_on_whether_another_overflowed_before() {
    // Latents of 3000 overflow behind the first convolution of this decoder, and those of a request of its own do not.
    let folder = copy_of("sd15");
    change(&folder.path().join(VAE), &["decoder.conv_in.weight"], |x| {
        x * 16.0
    });
    let decoded = |pipeline: &dyn Pipeline, request: &GenerateRequest| {
        Warnings::of(|| {
            let mut running = pipeline.begin(request).expect("valid");
            pipeline.decode(&mut *running).expect("f32 holds it")
        })
    };
    let mut large = small();
    let values: Vec<f32> = (0..4 * 16 * 16).map(|i| (i % 7) as f32 * 1000.0).collect();
    large.latents = Some(denoised_types::NamedTensor::from_f32(
        "latents",
        &[1, 4, 16, 16],
        &values,
    ));
    let pipeline = in_dtype(folder.path(), DType::F16);
    let (warnings, first) = decoded(&*pipeline, &small());
    assert_eq!(warnings, Vec::<String>::new());
    let (warnings, _) = decoded(&*pipeline, &large);
    assert_eq!(warnings.len(), 1);
    let (warnings, again) = decoded(&*pipeline, &small());
    assert_eq!(warnings, Vec::<String>::new());
    assert!(first == again);
}

#[test]
fn a_file_that_says_that_its_autoencoder_exceeds_f16_is_believed_by_sdxl() {
    let folder = overflowing("sdxl", &["decoder.conv_in.weight", "encoder.conv_in.weight"]);
    let mut request = small();
    let expected = picture(&*load(folder.path()), &request).expect("f32 holds it");
    let pipeline = in_dtype(folder.path(), DType::F16);
    let (warnings, got) = Warnings::of(|| picture(&*pipeline, &request));
    assert_close(&got.expect("f32 holds it"), &expected);
    assert_eq!(warnings, Vec::<String>::new());
    request.images = vec![stripes()];
    request.strength = Some(0.5);
    let expected = picture(&*load(folder.path()), &request).expect("f32 holds it");
    let (warnings, got) = Warnings::of(|| picture(&*pipeline, &request));
    assert_close(&got.expect("f32 holds it"), &expected);
    assert_eq!(warnings, Vec::<String>::new());
    // It says otherwise, wrongly.
    replace(
        &folder.path().join("vae/config.json"),
        "\"force_upcast\": true",
        "\"force_upcast\": false",
    );
    let pipeline = in_dtype(folder.path(), DType::F16);
    let (warnings, got) = Warnings::of(|| picture(&*pipeline, &request));
    assert_close(&got.expect("f32 holds it"), &expected);
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(
        warnings[0].contains("encoding") && warnings[1].contains("decoding"),
        "{warnings:?}"
    );
}

fn stripes() -> Image {
    Image {
        width: 32,
        height: 32,
        n_frames: 1,
        rgb: (0..32 * 32 * 3)
            .map(|i| if i / 12 % 2 == 0 { 230 } else { 20 })
            .collect(),
    }
}

#[test]
fn an_encoder_that_overflows_f16_encodes_again_in_f32() {
    let folder = overflowing("sd15", &["encoder.conv_in.weight"]);
    let request = GenerateRequest {
        images: vec![stripes()],
        strength: Some(0.5),
        n_steps: Some(4),
        ..small()
    };
    let expected = picture(&*load(folder.path()), &request).expect("f32 holds it");
    let (warnings, got) = Warnings::of(|| picture(&*in_dtype(folder.path(), DType::F16), &request));
    assert_close(&got.expect("f32 holds it"), &expected);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("encoding"), "{warnings:?}");
}

#[test]
fn what_f32_makes_nan_is_an_error_in_every_dtype() {
    let folder = copy_of("sd15");
    change(
        &folder.path().join(VAE),
        &["decoder.conv_out.bias", "quant_conv.bias"],
        |_| f32::NAN,
    );
    let with_picture = GenerateRequest {
        images: vec![stripes()],
        strength: Some(0.5),
        ..small()
    };
    let pipelines = [
        (load(folder.path()), 0),
        (in_dtype(folder.path(), DType::BF16), 1),
        (in_dtype(folder.path(), DType::F16), 1),
    ];
    for (pipeline, n_warnings) in pipelines {
        for (request, phase) in [(small(), "decoding"), (with_picture.clone(), "encoding")] {
            let (warnings, outcome) = Warnings::of(|| picture(&*pipeline, &request));
            let failure = outcome.expect_err("NaN");
            assert_eq!(failure.code, FailureCode::NonFinite, "{failure}");
            assert!(failure.message.contains(phase), "{failure}");
            assert_eq!(warnings.len(), n_warnings, "{warnings:?}");
        }
    }
}

#[test]
fn a_text_that_becomes_nan_is_an_error_before_the_first_step() {
    let folder = copy_of("sd15");
    let file = folder.path().join("text_encoder/model.safetensors");
    change(&file, &["final_layer_norm.bias"], |_| f32::NAN);
    for pipeline in [load(folder.path()), in_dtype(folder.path(), DType::F16)] {
        let failure = pipeline.begin(&small()).expect_err("NaN");
        assert_eq!(failure.code, FailureCode::NonFinite, "{failure}");
        assert!(failure.message.contains("prompt"), "{failure}");
    }
}

#[test]
fn latents_that_f16_cannot_hold_fail_their_member_alone() {
    let pipeline = in_dtype(&data("sd15").join("model"), DType::F16);
    let mut good = pipeline.begin(&small()).expect("valid");
    let mut request = small();
    let values = vec![1e6; 4 * 16 * 16];
    request.latents = Some(denoised_types::NamedTensor::from_f32(
        "latents",
        &[1, 4, 16, 16],
        &values,
    ));
    let mut bad = pipeline.begin(&request).expect("finite so far");
    let [of_bad, of_good] = step(&*pipeline, [&mut *bad, &mut *good]).expect("no device error");
    of_good.expect("it has nothing to do with the other");
    let failure = of_bad.expect_err("infinite");
    assert_eq!(failure.code, FailureCode::NonFinite);
    assert!(failure.message.contains("step 1 of 2"), "{failure}");
    // Nor is it decoded: f32 would not help.
    let (warnings, outcome) = Warnings::of(|| pipeline.decode(&mut *bad));
    assert_eq!(outcome.expect_err("infinite").code, FailureCode::NonFinite);
    assert_eq!(warnings, Vec::<String>::new());
}
