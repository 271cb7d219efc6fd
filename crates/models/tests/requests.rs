//! What a loaded model does with requests: defaults, refusals, sharing a step, numbers that run away.

mod support;

use denoised_models::Pipeline;
use denoised_types::{Capture, FailureCode, GenerateRequest, NamedTensor};
use support::{load, run, step};

fn model() -> Box<dyn Pipeline> {
    load(&support::data("sd35m").join("model"))
}

fn small(prompt: &str, seed: u64, n_steps: u32) -> GenerateRequest {
    GenerateRequest {
        width: Some(64),
        height: Some(48),
        n_steps: Some(n_steps),
        seed,
        ..GenerateRequest::new(prompt)
    }
}

fn latents(values: &[f32]) -> Option<NamedTensor> {
    Some(NamedTensor::from_f32("latents", &[1, 16, 6, 8], values))
}

#[test]
fn requests_that_make_no_sense_are_refused_with_what_would_do() {
    let pipeline = model();
    type Change = fn(&mut GenerateRequest);
    let cases: [(Change, &[&str]); 15] = [
        (|r| r.width = Some(100), &["width is 100", "96 or 112"]),
        (
            |r| r.height = Some(3),
            &["height is 3", "multiple of 16", "16 would do"],
        ),
        (|r| r.height = Some(0), &["height is 0", "16 would do"]),
        (|r| r.width = Some(383), &["width is 383", "368 or 384"]),
        (|r| r.width = Some(400), &["width is 400", "at most 384"]),
        (|r| r.n_steps = Some(0), &["steps is 0", "1 to 1000"]),
        (|r| r.n_steps = Some(1001), &["steps is 1001"]),
        (|r| r.guidance = Some(f32::NAN), &["guidance is NaN"]),
        (|r| r.sampler = Some("ddim".into()), &["\"ddim\"", "flow-euler"]),
        (|r| r.max_sequence_length = Some(0), &["max_sequence_length is 0"]),
        (
            |r| r.max_sequence_length = Some(513),
            &["max_sequence_length is 513", "512"],
        ),
        (
            |r| r.latents = latents(&[f32::NAN; 768]),
            &["latents hold NaN or infinity"],
        ),
        (
            |r| r.latents = latents(&[0.0; 700]),
            &["[1, 16, 6, 8]", "2800 bytes"],
        ),
        (
            |r| r.latents = Some(NamedTensor::from_f32("x", &[1, 16, 8, 6], &[0.0; 768])),
            &["[1, 16, 8, 6]", "[1, 16, 6, 8]"],
        ),
        (
            |r| r.latents = Some(NamedTensor::from_i64("x", &[1, 16, 6, 8], &[0; 768])),
            &["latents"],
        ),
    ];
    for (change, words) in cases {
        let mut request = small("a cat", 1, 2);
        change(&mut request);
        for failure in [
            pipeline.resolve(&request).expect_err("refused"),
            pipeline.begin(&request).expect_err("refused"),
        ] {
            assert_eq!(failure.code, FailureCode::InvalidRequest, "{failure}");
            for word in words {
                assert!(failure.message.contains(word), "{word:?} is not in: {failure}");
            }
        }
    }
}

#[test]
fn what_a_request_leaves_open_is_the_models_default() {
    let pipeline = model();
    let resolved = pipeline.resolve(&GenerateRequest::new("a cat")).expect("valid");
    assert_eq!((resolved.width, resolved.height), (128, 128));
    assert_eq!((resolved.n_steps, resolved.guidance, resolved.seed), (28, 7.0, 0));
    assert_eq!(resolved.sampler, "flow-euler");
    assert!(resolved.warnings.is_empty());
}

#[test]
fn a_prompt_that_is_too_long_is_cut_with_a_warning_and_still_drawn() {
    let pipeline = model();
    let mut request = small(&"a very long story ".repeat(40), 1, 1);
    request.negative_prompt = Some("another long story ".repeat(40));
    let running = pipeline.begin(&request).expect("valid");
    let warnings = &running.resolved().warnings;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(
        warnings[0].contains("the prompt") && warnings[0].contains("reads 77"),
        "{warnings:?}"
    );
    assert!(warnings[1].contains("the negative prompt"), "{warnings:?}");
    // A prompt may have 128 KiB; a warning shows the beginning of what was cut off.
    assert!(warnings.iter().all(|warning| warning.len() < 400), "{warnings:?}");
    request.guidance = Some(1.0);
    let warnings = pipeline.resolve(&request).expect("valid").warnings;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert_eq!(warnings[1], "the negative prompt has no effect at guidance 1");
}

#[test]
fn what_has_no_effect_is_told() {
    let told = |case: &str, change: &dyn Fn(&mut GenerateRequest)| {
        let pipeline = support::load(&support::data(case).join("model"));
        let mut request = GenerateRequest::new("a cat");
        (request.width, request.height) = (Some(64), Some(64));
        change(&mut request);
        pipeline.resolve(&request).expect("valid").warnings.join("; ")
    };
    assert_eq!(told("flux-schnell", &|_| ()), "");
    let said = told("flux-dev", &|r| {
        (r.true_guidance, r.negative_prompt) = (Some(3.0), None)
    });
    assert_eq!(
        said,
        "the true guidance scale has no effect without a negative prompt"
    );
    let said = told("flux-dev", &|r| r.negative_prompt = Some("a dog".into()));
    assert_eq!(
        said,
        "the negative prompt has no effect without a true guidance scale above 1"
    );
    let said = told("qwen-image", &|r| r.guidance = Some(4.0));
    assert_eq!(said, "guidance 4 has no effect without a negative prompt");
    let said = told("wan22-t2v", &|r| {
        (r.guidance, r.guidance_2, r.n_frames) = (Some(1.0), Some(3.0), Some(5));
    });
    assert_eq!(said, "the second guidance scale has no effect at guidance 1");
}

#[test]
fn results_that_no_machine_has_the_memory_for_are_refused_as_a_whole() {
    // An autoencoder that halves pictures once, where those of that size halve them thrice.
    let pipeline = support::load(&support::data("sd15").join("model"));
    let mut request = GenerateRequest::new("a cat");
    (request.width, request.height) = (Some(4096), Some(4096));
    let failure = pipeline.resolve(&request).expect_err("four million tokens");
    // By hand: 4096 * 4096 pixels, 2048 * 2048 latents.
    let words = "16777216 pixels in 4194304 tokens";
    assert!(failure.message.contains(words), "{failure}");
}

#[test]
fn t5_reads_as_many_tokens_as_the_request_says() {
    let pipeline = support::load(&support::data("sd3").join("model"));
    let warnings = |text: &str, max_sequence_length| {
        let mut request = small(text, 1, 1);
        request.max_sequence_length = max_sequence_length;
        let running = pipeline.begin(&request).expect("valid");
        running.resolved().warnings.clone()
    };
    let text = "a red fox ".repeat(8);
    assert_eq!(warnings(&text, None), Vec::<String>::new());
    let cut = warnings(&text, Some(4));
    assert_eq!(cut.len(), 1, "{cut:?}");
    assert!(
        cut[0].contains("the prompt") && cut[0].contains("T5 reads 4"),
        "{cut:?}"
    );
    // CLIP takes 77, T5 256 unless told otherwise.
    let both = warnings(&text.repeat(40), None);
    let readers = ["CLIP reads 77", "T5 reads 256"];
    assert_eq!(both.len(), 2, "{both:?}");
    assert!(
        both.iter().zip(readers).all(|(one, reader)| one.contains(reader)),
        "{both:?}"
    );
}

#[test]
fn members_of_a_step_get_what_they_would_get_alone() {
    let pipeline = model();
    for guidance in [5.0, 1.0] {
        let requests: Vec<GenerateRequest> = [("a cat", 1, 3), ("two dogs in the snow", 2, 5), ("", 3, 3)]
            .map(|(prompt, seed, n_steps)| GenerateRequest {
                guidance: Some(guidance + seed as f32 * (guidance - 1.0)),
                capture: Capture::Trace,
                ..small(prompt, seed, n_steps)
            })
            .to_vec();
        let alone: Vec<_> = requests
            .iter()
            .map(|request| run(&*pipeline, request).expect("valid"))
            .collect();
        let mut together: Vec<_> = requests
            .iter()
            .map(|request| pipeline.begin(request).expect("valid"))
            .collect();
        let [a, b, c] = &mut together[..] else {
            panic!("three members")
        };
        assert_eq!(a.batch_key(), b.batch_key());
        // The second is a step ahead of the others and goes on alone at the end.
        let mut outcomes = Vec::new();
        outcomes.extend(step(&*pipeline, [&mut **b]).expect("no device error"));
        for _ in 0..3 {
            outcomes.extend(step(&*pipeline, [&mut **a, &mut **b, &mut **c]).expect("no device error"));
        }
        outcomes.extend(step(&*pipeline, [&mut **b]).expect("no device error"));
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        for (running, alone) in together.iter_mut().zip(&alone) {
            assert_eq!(running.step_idx(), running.n_steps());
            let image = pipeline.decode(&mut **running).expect("finite");
            assert!(image == alone.image);
            let trace = running.take_trace();
            assert_eq!(trace.len(), alone.trace.len());
            for (ours, theirs) in trace.iter().zip(&alone.trace) {
                assert!(ours == theirs, "{} differs bit by bit", ours.name);
            }
        }
    }
}

#[test]
fn requests_of_other_shapes_have_other_keys() {
    let pipeline = model();
    let key = |change: fn(&mut GenerateRequest)| {
        let mut request = small("a cat", 1, 2);
        change(&mut request);
        pipeline.begin(&request).expect("valid").batch_key()
    };
    let base = key(|_| ());
    assert_eq!(base, key(|r| r.prompt = "another prompt".into()));
    assert_ne!(base, key(|r| r.width = Some(48)));
    assert_ne!(base, key(|r| r.guidance = Some(1.0)));
    assert_ne!(base, key(|r| r.max_sequence_length = Some(100)));
}

#[test]
fn latents_that_run_away_fail_their_member_alone_and_name_the_step() {
    let pipeline = model();
    let mut request = small("a cat", 1, 2);
    let mut good = pipeline.begin(&request).expect("valid");
    request.latents = latents(&[3e38; 768]);
    let mut bad = pipeline.begin(&request).expect("finite so far");
    let [of_good, of_bad] = step(&*pipeline, [&mut *good, &mut *bad]).expect("no device error");
    of_good.expect("it has nothing to do with the other");
    let failure = of_bad.expect_err("infinite");
    assert_eq!(failure.code, FailureCode::NonFinite);
    assert!(failure.message.contains("step 1 of 2"), "{failure}");
    assert_eq!((good.step_idx(), bad.step_idx()), (1, 0));
}

#[test]
fn a_picture_that_is_not_finite_is_no_black_picture() {
    let pipeline = model();
    let mut request = small("a cat", 1, 1);
    request.latents = latents(&[3e38; 768]);
    let mut running = pipeline.begin(&request).expect("finite so far");
    let failure = pipeline.decode(&mut *running).expect_err("infinite");
    assert_eq!(failure.code, FailureCode::NonFinite);
    assert!(failure.message.contains("picture"), "{failure}");
}

#[test]
fn steps_that_cannot_be_are_refused_and_not_run() {
    let pipeline = model();
    assert!(pipeline.step(&mut []).expect("nothing to do").is_empty());
    let mut one = pipeline.begin(&small("a cat", 1, 1)).expect("valid");
    let mut wide = small("a cat", 1, 1);
    wide.width = Some(96);
    let mut other = pipeline.begin(&wide).expect("valid");
    let failure = step(&*pipeline, [&mut *one, &mut *other]).expect_err("different shapes");
    assert_eq!(failure.code, FailureCode::Internal);
    let [outcome] = step(&*pipeline, [&mut *one]).expect("no device error");
    outcome.expect("finite");
    let failure = step(&*pipeline, [&mut *one]).expect_err("it has done its only step");
    assert_eq!(failure.code, FailureCode::Internal);
}

#[test]
fn an_empty_prompt_has_its_ids_in_the_trace_though_there_are_none() {
    // Qwen's tokenizer adds nothing of its own.
    let pipeline = load(&support::data("zimage").join("model"));
    let request = GenerateRequest {
        width: Some(32),
        height: Some(32),
        n_steps: Some(1),
        capture: Capture::Trace,
        ..GenerateRequest::new("")
    };
    let trace = run(&*pipeline, &request).expect("a picture").trace;
    let ids = trace.iter().find(|tensor| tensor.name == "token_ids");
    assert_eq!(ids.expect("ids").shape, [1, 0]);
}
