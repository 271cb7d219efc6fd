//! What is particular to Stable Diffusion 1 and 2: samplers by name, sizes, settings that are refused, files of all ages.

mod support;

use denoised_models::Pipeline;
use denoised_types::{Capture, FailureCode, GenerateRequest};
use serde_json::{Value, json};
use std::{fs, path::Path};
use support::{copy_of, data, load, run, step};

fn model(case: &str) -> Box<dyn Pipeline> {
    load(&data(case).join("model"))
}

fn small(prompt: &str, seed: u64, n_steps: u32, sampler: &str) -> GenerateRequest {
    GenerateRequest {
        width: Some(32),
        height: Some(24),
        n_steps: Some(n_steps),
        sampler: Some(sampler.to_owned()),
        seed,
        ..GenerateRequest::new(prompt)
    }
}

/// A copy of `case` in which `change` was done to one JSON file.
fn changed(case: &str, file: &str, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let folder = copy_of(case);
    let path = folder.path().join(file);
    let mut json = serde_json::from_slice(&fs::read(&path).expect("readable")).expect("JSON");
    change(&mut json);
    fs::write(path, json.to_string()).expect("written");
    folder
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

#[test]
fn info_says_what_the_files_and_the_pipeline_say() {
    let of = |case: &str| denoised_models::open(&data(case).join("model")).expect("it opens");
    let (sd15, sd21v) = (of("sd15"), of("sd21v"));
    let info = sd15.info();
    assert_eq!(info.family, "sd");
    assert_eq!(
        (info.grid_px, info.default_size, info.max_side_px),
        (8, (64, 64), 4096)
    );
    assert_eq!((info.default_n_steps, info.default_guidance), (50, 7.5));
    // The checkpoint's own sampler is the default, the other is there by name.
    assert_eq!(info.samplers[0], "ddim");
    assert_eq!(sd21v.info().samplers[0], "euler");
    for name in ["ddim", "euler", "euler-a", "dpm++-2m-karras", "lcm"] {
        assert!(info.samplers.contains(&name.to_owned()), "{name}");
    }
    assert_eq!(sd21v.info().default_size, (48, 48));
}

#[test]
fn members_with_other_samplers_and_step_counts_share_a_step_and_get_what_they_would_get_alone() {
    let pipeline = model("sd15");
    let requests = [
        small("a cat", 1, 3, "euler"),
        small("two dogs", 2, 5, "ddim"),
        small("", 3, 4, "euler"),
    ]
    .map(|request| GenerateRequest {
        capture: Capture::Trace,
        ..request
    });
    let alone = requests
        .each_ref()
        .map(|request| run(&*pipeline, request).expect("valid"));
    let mut together = requests
        .each_ref()
        .map(|request| pipeline.begin(request).expect("valid"));
    let [a, b, c] = &mut together;
    assert_eq!(a.batch_key(), b.batch_key());
    let mut outcomes = Vec::new();
    for _ in 0..3 {
        outcomes.extend(step(&*pipeline, [&mut **c, &mut **b, &mut **a]).expect("no device error"));
    }
    outcomes.extend(step(&*pipeline, [&mut **b, &mut **c]).expect("no device error"));
    outcomes.extend(step(&*pipeline, [&mut **b]).expect("no device error"));
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    for (running, alone) in together.iter_mut().zip(&alone) {
        let image = pipeline.decode(&mut **running).expect("finite");
        assert!(image == alone.image);
        for (ours, theirs) in running.take_trace().iter().zip(&alone.trace) {
            assert!(ours == theirs, "{} differs bit by bit", ours.name);
        }
    }
    assert!(alone[0].image != alone[2].image);
}

#[test]
fn sizes_that_do_not_halve_evenly_are_drawn() {
    // 26x10 latents become 13x5 and 7x3.
    let pipeline = model("emoji-unet");
    let request = GenerateRequest {
        width: Some(104),
        height: Some(40),
        n_steps: Some(2),
        ..GenerateRequest::new("a red apple")
    };
    let image = run(&*pipeline, &request).expect("valid").image;
    assert_eq!((image.width, image.height), (104, 40));
}

#[test]
fn sizes_that_cannot_be_halved_as_often_as_the_unet_does_are_refused() {
    // Without padding in front a side of 1 has no half; three resolutions halve twice, and a latent is 4 pixels.
    let folder = changed("emoji-unet", "unet/config.json", |config| {
        config["downsample_padding"] = 0.into();
    });
    let pipeline = load(folder.path());
    let square = |side_px| GenerateRequest {
        width: Some(side_px),
        height: Some(side_px),
        n_steps: Some(1),
        ..GenerateRequest::new("a red apple")
    };
    let failure = pipeline.begin(&square(8)).expect_err("too small");
    assert_eq!(failure.code, FailureCode::InvalidRequest, "{failure}");
    assert!(
        failure.message.contains("width is 8") && failure.message.contains("at least 16"),
        "{failure}"
    );
    let image = run(&*pipeline, &square(16)).expect("large enough").image;
    assert_eq!(image.width, 16);
}

#[test]
fn what_a_request_cannot_have_is_refused_by_name() {
    let pipeline = model("sd15");
    type Change = fn(&mut GenerateRequest);
    let cases: [(Change, &[&str]); 5] = [
        (|r| r.width = Some(100), &["width is 100", "96 or 104"]),
        (|r| r.width = Some(4104), &["width is 4104", "at most 4096"]),
        (
            |r| r.sampler = Some("magic".into()),
            &["\"magic\"", "ddim[-trailing], ddpm, euler["],
        ),
        (
            |r| r.max_sequence_length = Some(77),
            &["max_sequence_length is 77", "no text encoder"],
        ),
        (|r| r.clip_skip = Some(4), &["clip_skip is 4", "at most 3"]),
    ];
    for (change, words) in cases {
        let mut request = small("a cat", 1, 2, "ddim");
        change(&mut request);
        let failure = pipeline.resolve(&request).expect_err("refused");
        assert_eq!(failure.code, FailureCode::InvalidRequest, "{failure}");
        for word in words {
            assert!(failure.message.contains(word), "{word:?} is not in: {failure}");
        }
    }
}

#[test]
fn a_checkpoint_with_a_scheduler_that_is_not_implemented_wants_a_sampler_named() {
    // The schedule of Stable Diffusion 1.5 under a class that draws its noise from a tree.
    let folder = changed("sd15", "model_index.json", |json| {
        json["scheduler"][1] = "DPMSolverSDEScheduler".into();
        json["safety_checker"] = json!(["stable_diffusion", "StableDiffusionSafetyChecker"]);
        json["feature_extractor"] = json!(["transformers", "CLIPImageProcessor"]);
        json["requires_safety_checker"] = true.into();
    });
    let path = folder.path().join("scheduler/scheduler_config.json");
    let published = json!({
        "_class_name": "DPMSolverSDEScheduler", "_diffusers_version": "0.6.0", "beta_end": 0.012,
        "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": false, "num_train_timesteps": 1000,
        "noise_sampler_seed": null, "set_alpha_to_one": false, "steps_offset": 1, "trained_betas": null,
    });
    fs::write(path, published.to_string()).expect("written");
    let pipeline = load(folder.path());
    let mut request = small("a cat", 1, 2, "ddim");
    let named = run(&*pipeline, &request).expect("valid");
    // The same betas as the case's own DDIM.
    assert!(named.image == run(&*model("sd15"), &request).expect("valid").image);
    request.sampler = None;
    let failure = pipeline.resolve(&request).expect_err("refused");
    assert_eq!(failure.code, FailureCode::InvalidRequest);
    for word in ["DPMSolverSDEScheduler", "ddim[-trailing], ddpm"] {
        assert!(failure.message.contains(word), "{word:?} is not in: {failure}");
    }
}

#[test]
fn settings_of_the_unet_that_are_not_carried_out_are_refused_by_key() {
    let cases = [
        ("in_channels", json!(7), "inpainting"),
        ("class_embed_type", json!("timestep"), "class_embed_type"),
        (
            "addition_embed_type",
            json!("text_time"),
            "addition_time_embed_dim",
        ),
        ("addition_embed_type", json!("text_image"), "addition_embed_type"),
        ("encoder_hid_dim", json!(64), "encoder_hid_dim"),
        ("num_class_embeds", json!(10), "num_class_embeds"),
        ("time_cond_proj_dim", json!(7), "time_cond_proj_dim"),
        ("num_attention_heads", json!(4), "num_attention_heads"),
        ("dual_cross_attention", json!(true), "dual_cross_attention"),
        ("attention_type", json!("gated"), "attention_type"),
        (
            "resnet_time_scale_shift",
            json!("scale_shift"),
            "resnet_time_scale_shift",
        ),
        ("time_embedding_type", json!("fourier"), "time_embedding_type"),
        (
            "down_block_types",
            json!(["AttnDownBlock2D", "DownBlock2D"]),
            "CrossAttnDownBlock2D",
        ),
        ("up_block_types", json!(["UpBlock2D"]), "up_block_types"),
        (
            "mid_block_type",
            json!("UNetMidBlock2DSimpleCrossAttn"),
            "mid_block_type",
        ),
        ("act_fn", json!("mish"), "silu, swish or gelu"),
        ("attention_head_dim", json!([4]), "attention_head_dim"),
        ("attention_head_dim", json!(0), "attention_head_dim"),
        ("attention_head_dim", json!(1000), "attention_head_dim"),
        ("layers_per_block", json!([1, 2, 3]), "layers_per_block"),
        ("layers_per_block", json!(0), "layers_per_block"),
        (
            "transformer_layers_per_block",
            json!([[1, 1], [1, 1]]),
            "reverse_transformer_layers_per_block",
        ),
        (
            "transformer_layers_per_block",
            json!(0),
            "transformer_layers_per_block",
        ),
        ("cross_attention_dim", json!([32, 64]), "cross_attention_dim"),
        ("cross_attention_dim", json!(768), "the unet takes 768"),
        ("conv_in_kernel", json!(4), "conv_in_kernel"),
        ("downsample_padding", json!(2), "downsample_padding"),
        ("norm_num_groups", json!(5), "norm_num_groups"),
        ("norm_num_groups", json!(null), "norm_num_groups"),
        ("block_out_channels", json!([]), "block_out_channels"),
        ("freq_shift", json!(16), "freq_shift"),
        ("mid_block_scale_factor", json!(0), "mid_block_scale_factor"),
        ("sample_size", json!([32, 32, 3]), "sample_size"),
        ("out_channels", json!(8), "out_channels"),
        ("flux_capacitor", json!(1), "flux_capacitor"),
    ];
    for (key, value, word) in cases {
        let folder = changed("sd15", "unet/config.json", |json| {
            json[key] = value;
            if word == "inpainting" {
                json["out_channels"] = 4.into();
            }
        });
        refused(folder.path(), &[word]);
    }
}

#[test]
fn settings_of_the_scheduler_that_are_not_carried_out_are_refused_by_key() {
    let cases = [
        ("thresholding", json!(true)),
        ("beta_schedule", json!("sigmoid")),
        ("prediction_type", json!("flow_prediction")),
        ("timestep_spacing", json!("random")),
        ("use_flow_sigmas", json!(true)),
        ("trained_betas", json!(["a"])),
        ("num_train_timesteps", json!(0)),
        ("warp_factor", json!(9)),
    ];
    for (key, value) in cases {
        let folder = changed("sd15", "scheduler/scheduler_config.json", |json| {
            json[key] = value
        });
        refused(folder.path(), &[key]);
    }
    let folder = changed("sd15", "model_index.json", |json| {
        json["scheduler"][1] = "FlowMatchEulerDiscreteScheduler".into();
    });
    refused(
        folder.path(),
        &["FlowMatchEulerDiscreteScheduler", "DDIMScheduler"],
    );
}

#[test]
fn other_components_and_options_are_refused_by_name() {
    let cases = [
        (
            "text_encoder",
            json!(["transformers", "T5EncoderModel"]),
            "CLIPTextModel",
        ),
        (
            "unet",
            json!(["diffusers", "UNet2DModel"]),
            "UNet2DConditionModel",
        ),
        ("vae", json!(["diffusers", "AutoencoderTiny"]), "AutoencoderKL"),
        ("warp_drive", json!(true), "warp_drive"),
    ];
    for (key, value, word) in cases {
        let folder = changed("sd15", "model_index.json", |json| json[key] = value);
        refused(folder.path(), &[word]);
    }
    let folder = changed("sd15", "text_encoder/config.json", |json| {
        json["use_attention_mask"] = true.into();
    });
    refused(folder.path(), &["use_attention_mask"]);
}

#[test]
fn weights_of_the_text_encoder_have_the_names_of_every_version_of_transformers() {
    let request = small("a cat", 1, 1, "ddim");
    let folder = copy_of("sd15");
    let path = folder.path().join("text_encoder/model.safetensors");
    let bytes = fs::read(&path).expect("readable");
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header: serde_json::Map<String, Value> =
        serde_json::from_slice(&bytes[8..8 + header_bytes]).expect("JSON");
    let rename = |(name, entry): (String, Value)| match name.as_str() {
        "__metadata__" => (name, entry),
        _ => (format!("text_model.{name}"), entry),
    };
    let header: serde_json::Map<String, Value> = header.into_iter().map(rename).collect();
    assert!(header.contains_key("text_model.final_layer_norm.weight"));
    let header = Value::Object(header).to_string();
    let mut renamed = (header.len() as u64).to_le_bytes().to_vec();
    renamed.extend(header.as_bytes());
    renamed.extend(&bytes[8 + header_bytes..]);
    fs::write(path, renamed).expect("written");
    let image = run(&*load(folder.path()), &request).expect("valid").image;
    assert!(image == run(&*model("sd15"), &request).expect("valid").image);
}

#[test]
fn small_sizes_in_files_from_before_0_9_are_not_believed() {
    // diffusers' pipeline puts 64 in their place.
    let size = |version: &str| {
        let folder = changed("sd15", "unet/config.json", |json| {
            json["_diffusers_version"] = version.into();
        });
        let model = denoised_models::open(folder.path()).expect("it opens");
        model.info().default_size
    };
    assert_eq!(size("0.8.1"), (128, 128));
    assert_eq!(size("0.9.0"), (64, 64));
    assert_eq!(size("1.0.0"), (64, 64));
}
