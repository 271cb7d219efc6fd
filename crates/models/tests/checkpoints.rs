//! Checkpoints that cannot be used say why, where, and what would do.

mod support;

use denoised_types::{Failure, FailureCode};
use std::path::Path;
use support::{copy_of, replace};

/// The failure of opening `folder`.
fn refusal(folder: &Path) -> Failure {
    let error = denoised_models::open(folder).expect_err("it cannot be used");
    let failure = Failure::from(error);
    assert_eq!(failure.code, FailureCode::InvalidModel, "{failure}");
    failure
}

/// Changes one text in one file of sd35m; the refusal must hold all of `words`.
fn refused_after(file: &str, from: &str, to: &str, words: &[&str]) {
    let folder = copy_of("sd35m");
    replace(&folder.path().join(file), from, to);
    let message = refusal(folder.path()).message;
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
}

#[test]
fn an_unknown_pipeline_class_is_refused_with_the_known_ones() {
    let words = [
        "model_index.json",
        "StableDiffusion9Pipeline",
        "StableDiffusion3Pipeline",
    ];
    refused_after(
        "model_index.json",
        "StableDiffusion3Pipeline",
        "StableDiffusion9Pipeline",
        &words,
    );
}

#[test]
fn a_third_encoder_that_is_no_t5_is_refused_by_name() {
    let from = "\"text_encoder_3\": [\n    null,\n    null\n  ]";
    let to = "\"text_encoder_3\": [\"transformers\", \"UMT5EncoderModel\"]";
    let words = ["text encoder class UMT5EncoderModel", "T5EncoderModel is"];
    refused_after("model_index.json", from, to, &words);
    let to = "\"text_encoder_3\": [\"transformers\", \"T5EncoderModel\"]";
    refused_after("model_index.json", from, to, &["text_encoder_3"]);
}

#[test]
fn other_classes_of_components_are_refused_by_name() {
    let words = ["CLIPTextModel ", "CLIPTextModelWithProjection"];
    refused_after(
        "model_index.json",
        "CLIPTextModelWithProjection",
        "CLIPTextModel",
        &words,
    );
    let words = ["AutoencoderTiny", "AutoencoderKL"];
    refused_after("model_index.json", "AutoencoderKL", "AutoencoderTiny", &words);
    let words = ["EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"];
    refused_after(
        "model_index.json",
        "FlowMatchEulerDiscreteScheduler",
        "EulerDiscreteScheduler",
        &words,
    );
}

#[test]
fn a_missing_tensor_and_one_that_nothing_reads_are_both_named() {
    let file = "transformer/diffusion_pytorch_model.safetensors";
    let words = [
        "missing",
        "transformer/proj_out.bias",
        "in the files but not in the model",
        "transformer/proj_out.bixs",
    ];
    refused_after(file, "\"proj_out.bias\"", "\"proj_out.bixs\"", &words);
}

#[test]
fn a_tensor_of_another_shape_is_named_with_both_shapes() {
    let file = "transformer/diffusion_pytorch_model.safetensors";
    let words = ["transformer/proj_out.weight", "[32, 64]", "[64, 32]"];
    refused_after(
        file,
        "\"proj_out.weight\":{\"dtype\":\"F16\",\"shape\":[64,32]",
        "\"proj_out.weight\":{\"dtype\":\"F16\",\"shape\":[32,64]",
        &words,
    );
}

#[test]
fn settings_that_are_not_carried_out_are_refused_by_key() {
    let cases = [
        (
            "transformer/config.json",
            "\"num_layers\": 3",
            "\"num_layers\": 3, \"cross_gate\": 1",
            "cross_gate",
        ),
        (
            "transformer/config.json",
            "\"rms_norm\"",
            "\"layer_norm\"",
            "qk_norm",
        ),
        (
            "transformer/config.json",
            "\"num_layers\": 3",
            "\"num_layers\": 100000",
            "num_layers",
        ),
        (
            "transformer/config.json",
            "\"caption_projection_dim\": 32",
            "\"caption_projection_dim\": 48",
            "caption_projection_dim",
        ),
        ("vae/config.json", "\"silu\"", "\"relu\"", "act_fn"),
        (
            "vae/config.json",
            "\"UpDecoderBlock2D\"",
            "\"AttnUpDecoderBlock2D\"",
            "up_block_types",
        ),
        (
            "vae/config.json",
            "\"norm_num_groups\": 8",
            "\"norm_num_groups\": 7",
            "block_out_channels",
        ),
        (
            "scheduler/scheduler_config.json",
            "\"invert_sigmas\": false",
            "\"invert_sigmas\": true",
            "invert_sigmas",
        ),
        (
            "scheduler/scheduler_config.json",
            "\"shift\": 3.0",
            "\"shift\": 3.0, \"sigma_max\": 1",
            "sigma_max",
        ),
        (
            "text_encoder/config.json",
            "\"quick_gelu\"",
            "\"relu\"",
            "hidden_act",
        ),
        (
            "text_encoder/config.json",
            "\"hidden_size\": 32",
            "\"hidden_size\": 32, \"rope\": true",
            "rope",
        ),
        (
            "text_encoder/config.json",
            "\"layer_norm_eps\": 1e-05",
            "\"layer_norm_eps\": -1",
            "layer_norm_eps",
        ),
        (
            "text_encoder/config.json",
            "\"layer_norm_eps\": 1e-05",
            "\"layer_norm_eps\": NaN",
            "layer_norm_eps",
        ),
        (
            "tokenizer/tokenizer_config.json",
            "\"CLIPTokenizer\"",
            "\"T5Tokenizer\"",
            "tokenizer_class",
        ),
    ];
    for (file, from, to, key) in cases {
        refused_after(file, from, to, &[file, key]);
    }
}

#[test]
fn components_that_do_not_fit_each_other_are_refused_with_both_numbers() {
    let file = "transformer/config.json";
    let words = ["80", "64"];
    refused_after(
        file,
        "\"joint_attention_dim\": 96",
        "\"joint_attention_dim\": 64",
        &words,
    );
    let words = ["pool", "80", "96"];
    refused_after(
        file,
        "\"pooled_projection_dim\": 80",
        "\"pooled_projection_dim\": 96",
        &words,
    );
    refused_after("tokenizer/tokenizer_config.json", "77", "78", &["78", "77"]);
}

#[test]
fn damaged_tokenizers_are_refused() {
    let folder = copy_of("emoji-dit");
    let merges = folder.path().join("tokenizer/merges.txt");
    std::fs::remove_file(&merges).expect("it was there");
    assert!(refusal(folder.path()).message.contains("merges.txt"));
    std::fs::write(&merges, "#version: 0.2\nq zz</w> x\n").expect("written");
    let message = refusal(folder.path()).message;
    assert!(
        message.contains("merges.txt") && message.contains("no merge"),
        "{message}"
    );
    std::fs::write(&merges, "#version: 0.2\nzzz qqq\n").expect("written");
    assert!(refusal(folder.path()).message.contains("not in the vocabulary"));
    // A file of no bytes is what an interrupted download leaves; without merges the picture would be of another text.
    for nothing in ["", "#version: 0.2\n"] {
        std::fs::write(&merges, nothing).expect("written");
        let message = refusal(folder.path()).message;
        assert!(
            message.contains("merges.txt") && message.contains("no merge"),
            "{message}"
        );
    }
    let folder = copy_of("emoji-dit");
    std::fs::write(folder.path().join("tokenizer/special_tokens_map.json"), "[]").expect("written");
    let message = refusal(folder.path()).message;
    assert!(message.contains("special_tokens_map.json"), "{message}");
}

#[test]
fn info_says_what_the_files_say() {
    let model = denoised_models::open(&support::data("sd35m").join("model")).expect("it opens");
    let info = model.info();
    assert_eq!(info.family, "sd3");
    assert_eq!(
        (info.grid_px, info.default_size, info.max_side_px),
        (16, (128, 128), 384)
    );
    assert_eq!((info.default_n_steps, info.default_guidance), (28, 7.0));
    assert_eq!(info.samplers[0], "flow-euler");
    assert!(info.samplers.contains(&"unipc".to_owned()));
    assert!(info.checkpoint_bytes > 100_000);
}
