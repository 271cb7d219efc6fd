//! What is particular to FLUX: guidance as an input of the denoiser, hidden layers to choose, pictures to edit.

mod support;

use denoised_models::Pipeline;
use denoised_types::{Capture, Failure, GenerateRequest, Image};
use support::{copy_of, data, load, replace, run, step};

fn open(case: &str) -> Box<dyn Pipeline> {
    load(&data(case).join("model"))
}

fn small(prompt: &str, seed: u64) -> GenerateRequest {
    GenerateRequest {
        seed,
        width: Some(64),
        height: Some(48),
        n_steps: Some(2),
        max_sequence_length: Some(16),
        ..GenerateRequest::new(prompt)
    }
}

fn picture(width: u32, height: u32, seed: u32) -> Image {
    let n_bytes = 3 * width * height;
    let rgb = (0..n_bytes).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 24) as u8);
    Image::picture(width, height, rgb.collect())
}

/// Every tensor of two requests that share each step, compared with what each gives alone.
fn check_shared(pipeline: &dyn Pipeline, requests: [GenerateRequest; 2]) {
    let requests = requests.map(|request| GenerateRequest {
        capture: Capture::Trace,
        ..request
    });
    let alone = requests
        .each_ref()
        .map(|request| run(pipeline, request).expect("valid"));
    let [mut a, mut b] = requests
        .each_ref()
        .map(|request| pipeline.begin(request).expect("valid"));
    assert_eq!(a.batch_key(), b.batch_key());
    for _ in 0..a.n_steps() {
        let outcomes = step(pipeline, [&mut *a, &mut *b]).expect("no device error");
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    }
    for (running, alone) in [a, b].iter_mut().zip(&alone) {
        let image = pipeline.decode(&mut **running).expect("finite");
        assert!(image == alone.image);
        let trace = running.take_trace();
        assert_eq!(trace.len(), alone.trace.len());
        for (ours, theirs) in trace.iter().zip(&alone.trace) {
            assert!(ours == theirs, "{} differs bit by bit", ours.name);
        }
    }
    let [first, second] = alone;
    assert!(
        first.image != second.image,
        "the two requests ask for the same picture"
    );
}

#[test]
fn members_of_a_step_have_guidance_and_true_guidance_of_their_own() {
    let pipeline = open("flux-dev");
    let request = |guidance: f32, scale: Option<f32>| GenerateRequest {
        guidance: Some(guidance),
        true_guidance: scale,
        negative_prompt: scale.map(|_| "blurry".to_owned()),
        ..small("a cat", 7)
    };
    check_shared(&*pipeline, [request(1.0, None), request(6.0, None)]);
    check_shared(&*pipeline, [request(3.5, Some(2.0)), request(3.5, Some(4.0))]);
}

#[test]
fn members_of_a_step_have_pictures_of_their_own() {
    let pipeline = open("flux2-edit-two");
    let request = |seed: u32| GenerateRequest {
        text_layers: vec![1, 3, 5],
        images: vec![picture(64, 80, seed), picture(70, 64, seed + 1)],
        ..small("a cat", 7)
    };
    check_shared(&*pipeline, [request(0), request(1 << 30)]);
}

#[test]
fn true_guidance_needs_a_negative_prompt_and_more_than_one() {
    let pipeline = open("flux-dev");
    let plain = run(&*pipeline, &small("a cat", 7)).expect("valid").image;
    for (scale, negative) in [(3.0, None), (1.0, Some("blurry".to_owned()))] {
        let request = GenerateRequest {
            true_guidance: Some(scale),
            negative_prompt: negative,
            ..small("a cat", 7)
        };
        assert!(run(&*pipeline, &request).expect("valid").image == plain);
    }
}

#[test]
fn checkpoints_that_are_not_told_a_guidance_scale_ignore_it() {
    for case in ["flux-schnell", "flux-dev"] {
        let pipeline = open(case);
        let image = |guidance: f32| {
            let request = GenerateRequest {
                guidance: Some(guidance),
                ..small("a cat", 7)
            };
            run(&*pipeline, &request).expect("valid").image
        };
        assert_eq!(image(0.0) == image(7.0), case == "flux-schnell", "{case}");
    }
}

#[test]
fn requests_that_make_no_sense_for_flux_are_refused() {
    let kontext = open("flux-kontext");
    let klein = open("flux2-edit-two");
    let refused = |pipeline: &dyn Pipeline, request: &GenerateRequest, words: &str| {
        let failure = pipeline.resolve(request).expect_err("it is refused");
        assert!(failure.message.contains(words), "{}", failure.message);
    };
    let with = |images: &[(u32, u32)], text_layers: &[u32]| GenerateRequest {
        images: images
            .iter()
            .map(|(width, height)| picture(*width, *height, 0))
            .collect(),
        text_layers: text_layers.to_vec(),
        ..small("a cat", 7)
    };
    refused(&*kontext, &with(&[(64, 64); 2], &[]), "at most 1");
    refused(&*kontext, &with(&[(64, 64)], &[1]), "layers");
    refused(&*klein, &with(&[], &[]), "text_layers must be given");
    refused(&*klein, &with(&[], &[1, 7, 5]), "text_layers has 7");
    refused(&*klein, &with(&[], &[1, 5]), "text_layers has 2 numbers");
    refused(&*klein, &with(&[(64, 64), (63, 64)], &[1, 3, 5]), "63x64");
    refused(&*klein, &with(&[(1000, 64)], &[1, 3, 5]), "1000x64");
    assert!(klein.resolve(&with(&[(64, 64)], &[5, 5, 0])).is_ok());
    assert!(kontext.resolve(&with(&[(20, 20)], &[])).is_ok());
}

#[test]
fn settings_of_flux_that_are_not_carried_out_are_refused_by_key() {
    let transformer = "transformer/config.json";
    for (case, file, from, to, word) in [
        (
            "flux-dev",
            transformer,
            "\"patch_size\": 1",
            "\"patch_size\": 2",
            "patch_size",
        ),
        (
            "flux-dev",
            transformer,
            "\"out_channels\": null",
            "\"out_channels\": 16",
            "out_channels",
        ),
        (
            "flux-dev",
            transformer,
            "\"in_channels\": 64",
            "\"in_channels\": 66",
            "in_channels",
        ),
        (
            "flux-dev",
            transformer,
            "\"in_channels\": 64",
            "\"in_channels\": 128",
            "32",
        ),
        ("flux-dev", transformer, "    4,\n", "    6,\n", "axes_dims_rope"),
        (
            "flux-dev",
            transformer,
            "\"num_layers\": 2",
            "\"num_layers\": 2, \"theta\": 5",
            "theta",
        ),
        (
            "flux-dev",
            transformer,
            "\"pooled_projection_dim\": 32",
            "\"pooled_projection_dim\": 48",
            "48",
        ),
        (
            "flux-dev",
            transformer,
            "\"joint_attention_dim\": 32",
            "\"joint_attention_dim\": 48",
            "48",
        ),
        (
            "flux-dev",
            transformer,
            "\"guidance_embeds\": true",
            "\"guidance_embeds\": false",
            "guidance_embedder",
        ),
        (
            "flux-schnell",
            transformer,
            "\"guidance_embeds\": false",
            "\"guidance_embeds\": true",
            "guidance_embedder",
        ),
        (
            "flux2-klein",
            transformer,
            "\"guidance_embeds\": false",
            "\"guidance_embeds\": true",
            "guidance_embeds",
        ),
        (
            "flux2-klein",
            transformer,
            "\"rope_theta\": 2000",
            "\"rope_theta\": 0",
            "rope_theta",
        ),
        (
            "flux2-klein",
            transformer,
            "\"mlp_ratio\": 3.0",
            "\"mlp_ratio\": 0.0",
            "mlp_ratio",
        ),
        (
            "flux2-klein",
            transformer,
            "\"mlp_ratio\": 3.0",
            "\"mlp_ratio\": 1e99",
            "mlp_ratio",
        ),
        ("flux2-klein", transformer, "\"eps\": 1e-06", "\"eps\": -1", "eps"),
        (
            "flux2-klein",
            transformer,
            "_channels\": 32\n",
            "_channels\": 31\n",
            "timestep_guidance_channels",
        ),
        (
            "flux2-klein",
            transformer,
            "\"in_channels\": 32",
            "\"in_channels\": 64",
            "64",
        ),
        (
            "flux2-klein",
            "model_index.json",
            "\"is_distilled\"",
            "\"is_turbo\"",
            "is_turbo",
        ),
        (
            "flux2-klein",
            "tokenizer/chat_template.jinja",
            "enable_thinking",
            "thinking",
            "template",
        ),
    ] {
        let folder = copy_of(case);
        replace(&folder.path().join(file), from, to);
        let error = denoised_models::open(folder.path()).expect_err("it cannot be used");
        let message = Failure::from(error).message;
        assert!(message.contains(word), "{word} is not in: {message}");
    }
}

#[test]
fn a_component_without_weights_names_the_file_that_was_expected() {
    for (case, component, file) in [
        ("flux-dev", "text_encoder_2", "model.safetensors"),
        (
            "flux2-klein",
            "transformer",
            "diffusion_pytorch_model.safetensors",
        ),
    ] {
        let folder = copy_of(case);
        std::fs::remove_file(folder.path().join(component).join(file)).expect("it was there");
        let error = denoised_models::open(folder.path()).expect_err("it cannot be used");
        let message = Failure::from(error).message;
        assert!(message.contains(component) && message.contains(file), "{message}");
    }
}
