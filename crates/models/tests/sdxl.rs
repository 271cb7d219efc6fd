//! What is particular to Stable Diffusion XL: a negative prompt that nobody gave, sizes that the denoiser is told, files that do not fit.

mod support;

use denoised_models::Pipeline;
use denoised_types::{Capture, FailureCode, GenerateRequest, NamedTensor};
use serde_json::{Value, json};
use std::{fs, path::Path};
use support::{Outcome, copy_of, data, load, run, step};

fn model() -> Box<dyn Pipeline> {
    load(&data("sdxl").join("model"))
}

fn small(prompt: &str, seed: u64, n_steps: u32) -> GenerateRequest {
    GenerateRequest {
        width: Some(32),
        height: Some(24),
        n_steps: Some(n_steps),
        seed,
        capture: Capture::Trace,
        ..GenerateRequest::new(prompt)
    }
}

#[track_caller]
fn refused(folder: &Path, words: &[&str]) {
    let error = denoised_models::open(folder).expect_err("it cannot be used");
    let failure = denoised_types::Failure::from(error);
    assert_eq!(failure.code, FailureCode::InvalidModel, "{failure}");
    for word in words {
        assert!(failure.message.contains(word), "{word:?} is not in: {failure}");
    }
}

/// Opening fails after `key` of the JSON file became `value`.
#[track_caller]
fn refused_with(file: &str, key: &str, value: Value, words: &[&str]) {
    let folder = copy_of("sdxl");
    let path = folder.path().join(file);
    let mut json: Value = serde_json::from_slice(&fs::read(&path).expect("readable")).expect("JSON");
    json[key] = value;
    fs::write(path, json.to_string()).expect("written");
    refused(folder.path(), words);
}

fn is_zero(outcome: &Outcome, name: &str) -> bool {
    let tensor = outcome.trace.iter().find(|tensor| tensor.name == name);
    let values = tensor.and_then(NamedTensor::to_f32).expect("traced");
    values.iter().all(|value| *value == 0.0)
}

#[test]
fn an_absent_negative_prompt_is_zeros_and_an_empty_one_is_encoded() {
    let pipeline = model();
    let absent = run(&*pipeline, &small("a cat", 1, 1)).expect("valid");
    let empty = GenerateRequest {
        negative_prompt: Some(String::new()),
        ..small("a cat", 1, 1)
    };
    let empty = run(&*pipeline, &empty).expect("valid");
    for name in ["encode_prompt.1.0", "encode_prompt.3.0"] {
        assert!(is_zero(&absent, name) && !is_zero(&empty, name), "{name}");
    }
    assert!(absent.image != empty.image);

    let folder = copy_of("sdxl");
    support::replace(
        &folder.path().join("model_index.json"),
        "\"force_zeros_for_empty_prompt\": true",
        "\"force_zeros_for_empty_prompt\": false",
    );
    let encoded = run(&*load(folder.path()), &small("a cat", 1, 1)).expect("valid");
    assert!(encoded.image == empty.image);
}

#[test]
fn members_of_a_shared_step_get_what_they_would_get_alone() {
    let pipeline = model();
    let requests = [
        small("a cat", 1, 2),
        GenerateRequest {
            negative_prompt: Some("blurry".to_owned()),
            ..small("two dogs", 2, 3)
        },
    ];
    let alone = requests
        .each_ref()
        .map(|request| run(&*pipeline, request).expect("valid"));
    let mut together = requests
        .each_ref()
        .map(|request| pipeline.begin(request).expect("valid"));
    let [a, b] = &mut together;
    assert_eq!(a.batch_key(), b.batch_key());
    let mut outcomes = Vec::new();
    for _ in 0..2 {
        outcomes.extend(step(&*pipeline, [&mut **b, &mut **a]).expect("no device error"));
    }
    outcomes.extend(step(&*pipeline, [&mut **b]).expect("no device error"));
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    for (running, alone) in together.iter_mut().zip(&alone) {
        let image = pipeline.decode(&mut **running).expect("finite");
        assert!(image == alone.image);
        for (ours, theirs) in running.take_trace().iter().zip(&alone.trace) {
            assert!(ours == theirs, "{} differs bit by bit", ours.name);
        }
    }
}

#[test]
fn a_text_that_is_cut_is_told_of_once() {
    let pipeline = model();
    let request = small(&"a cat and ".repeat(60), 1, 1);
    let running = pipeline.begin(&request).expect("valid");
    let warnings = &running.resolved().warnings;
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("the model reads 77"), "{warnings:?}");
}

#[test]
fn a_component_without_weights_names_the_file_that_was_expected() {
    for (file, folder_name) in [
        ("diffusion_pytorch_model.safetensors", "unet"),
        ("diffusion_pytorch_model.safetensors", "vae"),
        ("model.safetensors", "text_encoder"),
        ("model.safetensors", "text_encoder_2"),
    ] {
        let folder = copy_of("sdxl");
        fs::remove_file(folder.path().join(folder_name).join(file)).expect("it was there");
        refused(folder.path(), &[file, folder_name]);
    }
}

#[test]
fn what_does_not_fit_is_refused_by_its_numbers() {
    let unet = "unet/config.json";
    let key = "projection_class_embeddings_input_dim";
    refused_with(unet, key, json!(104), &["96", "104"]);
    refused_with(
        unet,
        "addition_time_embed_dim",
        json!(7),
        &["addition_time_embed_dim"],
    );
    refused_with(
        unet,
        "addition_time_embed_dim",
        json!(null),
        &["addition_time_embed_dim"],
    );
    refused_with(
        unet,
        "addition_embed_type",
        json!("text"),
        &["addition_embed_type", "text_time"],
    );
    refused_with(unet, "addition_embed_type", json!(null), &["48", "0"]);
    refused_with(unet, "cross_attention_dim", json!(64), &["80", "64"]);
    refused_with(
        "tokenizer_2/tokenizer_config.json",
        "model_max_length",
        json!(60),
        &["77", "60"],
    );
    refused_with(
        "vae/config.json",
        "latents_mean",
        json!([0.0, 0.0]),
        &["latents_mean"],
    );
    let index = "model_index.json";
    refused_with(index, "requires_aesthetics_score", json!(true), &["88", "96"]);
    refused_with(index, "warp_drive", json!(true), &["warp_drive"]);
    let class = json!(["transformers", "CLIPTextModel"]);
    refused_with(index, "text_encoder_2", class, &["CLIPTextModelWithProjection"]);
    // The U-Net of this family in the pipeline of the other.
    refused_with(
        index,
        "_class_name",
        json!("StableDiffusionPipeline"),
        &["force_zeros_for_empty_prompt"],
    );
}
