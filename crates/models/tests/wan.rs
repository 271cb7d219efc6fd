//! Requests for videos: frames, first frames, two denoisers, sharing a step.

mod support;

use denoised_models::{Pipeline, Running};
use denoised_types::{Capture, FailureCode, GenerateRequest, Image, Mask, Task};
use support::{load, run};

fn model(case: &str) -> Box<dyn Pipeline> {
    load(&support::data(case).join("model"))
}

fn small(prompt: &str, seed: u64, n_steps: u32) -> GenerateRequest {
    GenerateRequest {
        width: Some(32),
        height: Some(48),
        n_frames: Some(5),
        n_steps: Some(n_steps),
        seed,
        ..GenerateRequest::new(prompt)
    }
}

fn picture(width: u32, height: u32) -> Image {
    let n_bytes = (width * height * 3) as usize;
    Image::picture(width, height, (0..n_bytes).map(|i| (i * 7 % 251) as u8).collect())
}

#[test]
fn requests_that_make_no_sense_are_refused_with_what_would_do() {
    type Change = fn(&mut GenerateRequest);
    let check = |case: &str, cases: &[(Change, &[&str])]| {
        let pipeline = model(case);
        for (change, words) in cases {
            let mut request = small("a cat", 1, 2);
            change(&mut request);
            for failure in [
                pipeline.resolve(&request).expect_err("refused"),
                pipeline.begin(&request).expect_err("refused"),
            ] {
                assert_eq!(failure.code, FailureCode::InvalidRequest, "{failure}");
                for word in *words {
                    assert!(failure.message.contains(word), "{word:?} is not in: {failure}");
                }
            }
        }
    };
    let of_text: &[(Change, &[&str])] = &[
        (
            |r| r.n_frames = Some(0),
            &["frames is 0", "multiple of 4", "1 would do"],
        ),
        (|r| r.n_frames = Some(7), &["frames is 7", "5 or 9 would do"]),
        // The table of positions has 32 rows, one per latent frame.
        (|r| r.n_frames = Some(129), &["frames is 129", "at most 125"]),
        (
            |r| r.n_frames = Some(124),
            &["frames is 124", "121 or 125 would do"],
        ),
        (|r| r.width = Some(24), &["width is 24", "16 or 32 would do"]),
        (|r| r.height = Some(528), &["height is 528", "at most 512"]),
        (|r| r.images = vec![picture(32, 48)], &["takes none"]),
        (|r| r.strength = Some(0.5), &["without a picture"]),
        (|r| r.max_sequence_length = Some(513), &["513", "at most 512"]),
    ];
    check("wan21-t2v", of_text);
    check("wan21-t2v", &[(|r| r.guidance_2 = Some(2.0), &["one denoiser"])]);
    check("wan22-t2v", of_text);
    check(
        "wan22-t2v",
        &[(|r| r.guidance_2 = Some(f32::INFINITY), &["finite"])],
    );
    check(
        "wan21-i2v",
        &[
            (|_| (), &["starts from a picture"]),
            (
                |r| r.images = vec![picture(8, 8); 2],
                &["2 pictures", "takes one"],
            ),
            (
                |r| {
                    r.images = vec![picture(8, 8)];
                    r.strength = Some(0.5);
                },
                &["strength"],
            ),
            (
                |r| {
                    r.images = vec![picture(8, 8)];
                    r.mask = Some(Mask {
                        width: 8,
                        height: 8,
                        luma: vec![0; 64],
                    });
                },
                &["mask"],
            ),
            (|r| r.images = vec![picture(1, 4000)], &["1x4000", "too narrow"]),
        ],
    );
}

#[test]
fn what_a_request_leaves_open_is_the_models_default() {
    let pipeline = model("wan21-t2v");
    let info = pipeline.info();
    let video = info.video.expect("it makes videos");
    assert_eq!((video.default_n_frames, video.frame_step, video.fps), (81, 4, 16));
    assert_eq!(info.tasks, [Task::TextToVideo]);
    // diffusers' 832x480, where this small transformer has positions for 512 pixels.
    assert_eq!((info.default_size, info.max_side_px), ((512, 480), 512));
    let request = GenerateRequest {
        width: Some(64),
        height: Some(64),
        ..GenerateRequest::new("a cat")
    };
    let resolved = pipeline.resolve(&request).expect("valid");
    assert_eq!(
        (resolved.n_frames, resolved.n_steps, resolved.guidance),
        (81, 50, 5.0)
    );
    assert_eq!(model("wan21-i2v").info().tasks, [Task::ImageToVideo]);
    let with_frame_timesteps = model("wan22-ti2v-i2v");
    assert_eq!(with_frame_timesteps.info().tasks, [Task::ImageToVideo]);
    assert_eq!(with_frame_timesteps.info().video.map(|video| video.fps), Some(24));
}

#[test]
fn a_picture_of_any_size_becomes_the_first_frame() {
    for case in ["wan21-i2v", "wan22-ti2v-i2v"] {
        let pipeline = model(case);
        let with = |image: Image| {
            let request = GenerateRequest {
                images: vec![image],
                width: Some(64),
                height: Some(32),
                n_frames: Some(5),
                ..small("a cat", 1, 1)
            };
            run(&*pipeline, &request).expect("valid").image
        };
        let video = with(picture(20, 50));
        assert_eq!((video.width, video.height, video.n_frames), (64, 32, 5));
        assert_eq!(video.rgb.len(), 64 * 32 * 5 * 3);
        assert!(video != with(picture(50, 20)), "{case}");
    }
}

/// Steps all that are not done yet, those together that may be.
fn run_together(pipeline: &dyn Pipeline, members: &mut [Box<dyn Running>]) -> usize {
    let mut n_shared = 0;
    loop {
        let unfinished = |member: &&mut Box<dyn Running>| member.step_idx() < member.n_steps();
        let Some(key) = members
            .iter_mut()
            .find(unfinished)
            .map(|member| member.batch_key())
        else {
            return n_shared;
        };
        let mut batch: Vec<&mut dyn Running> = members
            .iter_mut()
            .filter(unfinished)
            .filter(|member| member.batch_key() == key)
            .map(|member| &mut **member)
            .collect();
        n_shared += usize::from(batch.len() > 1);
        let outcomes = pipeline.step(&mut batch).expect("no device error");
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    }
}

#[test]
fn members_of_a_step_get_what_they_would_get_alone() {
    for (case, n_images) in [("wan22-t2v", 0), ("wan21-i2v", 1), ("wan22-ti2v-i2v", 1)] {
        let pipeline = model(case);
        for guidance in [5.0, 1.0] {
            let has_second = case == "wan22-t2v";
            let requests =
                [("a cat", 1, 3), ("a dog", 2, 5), ("a cat", 3, 3)].map(|(prompt, seed, n_steps)| {
                    GenerateRequest {
                        width: Some(64),
                        height: Some(32),
                        guidance: Some(guidance + seed as f32 * (guidance - 1.0)),
                        guidance_2: has_second.then_some(guidance + 0.5),
                        images: vec![picture(30 + seed as u32, 20); n_images],
                        capture: Capture::Trace,
                        ..small(prompt, seed, n_steps)
                    }
                });
            let alone = requests
                .each_ref()
                .map(|request| run(&*pipeline, request).expect("valid"));
            let mut together = requests.map(|request| pipeline.begin(&request).expect("valid"));
            assert_eq!(together[0].batch_key(), together[2].batch_key());
            assert!(run_together(&*pipeline, &mut together) >= 2, "{case}");
            for (running, alone) in together.iter_mut().zip(&alone) {
                assert!(pipeline.decode(&mut **running).expect("finite") == alone.image);
                for (ours, theirs) in running.take_trace().iter().zip(&alone.trace) {
                    assert!(ours == theirs, "{} of {case} differs bit by bit", ours.name);
                }
            }
        }
    }
}

#[test]
fn requests_of_other_shapes_have_other_keys() {
    let pipeline = model("wan22-t2v");
    let key = |change: fn(&mut GenerateRequest)| {
        let mut request = small("a cat", 1, 2);
        change(&mut request);
        pipeline.begin(&request).expect("valid").batch_key()
    };
    let base = key(|_| ());
    assert_eq!(base, key(|r| r.seed = 2));
    assert_ne!(base, key(|r| r.n_frames = Some(9)));
    // As many rows of latents, cut into frames in another way.
    assert_ne!(
        key(|r| (r.height, r.n_frames) = (Some(96), Some(1))),
        key(|r| (r.height, r.n_frames) = (Some(48), Some(5)))
    );
    assert_ne!(base, key(|r| r.guidance = Some(1.0)));
    assert_ne!(base, key(|r| r.max_sequence_length = Some(100)));
}

#[test]
fn checkpoints_whose_parts_do_not_fit_are_refused_by_name() {
    let cases: [(&str, &str, &str, &str, &[&str]); 7] = [
        (
            "wan22-t2v",
            "model_index.json",
            "\"boundary_ratio\": 0.875",
            "\"boundary_ratio\": null",
            &["transformer_2", "boundary_ratio"],
        ),
        (
            "wan21-t2v",
            "model_index.json",
            "\"boundary_ratio\": null",
            "\"boundary_ratio\": 0.875",
            &["transformer_2", "boundary_ratio"],
        ),
        (
            "wan21-t2v",
            "model_index.json",
            "WanPipeline",
            "WanImageToVideoPipeline",
            &["what is beside them: 36", "takes 16"],
        ),
        (
            "wan21-i2v",
            "model_index.json",
            "WanImageToVideoPipeline",
            "WanPipeline",
            &["tokens of a picture"],
        ),
        (
            "wan21-i2v",
            "image_processor/preprocessor_config.json",
            "\"height\": 28",
            "\"height\": 27",
            &["28x28"],
        ),
        (
            "wan21-t2v",
            "transformer/config.json",
            "\"pos_embed_seq_len\": null",
            "\"pos_embed_seq_len\": 514",
            &["pos_embed_seq_len", "last frame"],
        ),
        (
            "wan22-t2v",
            "transformer_2/config.json",
            "\"text_dim\": 32",
            "\"text_dim\": 24",
            &["text encoder: 32", "takes 24"],
        ),
    ];
    for (case, file, from, to, words) in cases {
        let folder = support::copy_of(case);
        support::replace(&folder.path().join(file), from, to);
        let error = denoised_models::open(folder.path())
            .expect_err("refused")
            .to_string();
        for word in words {
            assert!(error.contains(word), "{word:?} is not in: {error}");
        }
    }
}
