//! A model that is told classes: prompts as numbers and as labels, and what it refuses.

mod support;

use denoised_models::Pipeline;
use denoised_types::{FailureCode, GenerateRequest};
use support::{copy_of, load, replace, run};

/// The case `dit` with labels in its index, as DiT's checkpoints have them.
fn labelled() -> (tempfile::TempDir, Box<dyn Pipeline>) {
    let folder = copy_of("dit");
    let labels = r#"{"_class_name": "DiTPipeline", "id2label": {
        "0": "tench, Tinca tinca", "2": "great white shark, white shark", "3": "tiger shark", "134": "crane", "517": "crane",
        "2000": "nothing"},"#;
    let index = folder.path().join("model_index.json");
    replace(&index, "{\n  \"_class_name\": \"DiTPipeline\",", labels);
    let pipeline = load(folder.path());
    (folder, pipeline)
}

fn request(prompt: &str) -> GenerateRequest {
    GenerateRequest {
        n_steps: Some(2),
        ..GenerateRequest::new(prompt)
    }
}

#[test]
fn labels_stand_for_their_classes() {
    let (_folder, pipeline) = labelled();
    let picture = |prompt: &str| {
        let outcome = run(&*pipeline, &request(prompt)).expect("a class");
        outcome.image.rgb
    };
    let shark = picture("2");
    assert_eq!(picture("white shark"), shark);
    assert_eq!(picture(" Great White Shark "), shark);
    assert_ne!(picture("tiger shark"), shark);
    // As in diffusers, of two classes with one label the later counts.
    assert_eq!(picture("crane"), picture("517"));
    // No class is one of its own.
    assert_ne!(picture(""), shark);
}

#[test]
fn what_is_no_class_is_refused_with_what_is_near() {
    let (_folder, pipeline) = labelled();
    let refused = |request: &GenerateRequest, words: &[&str]| {
        for failure in [
            pipeline.resolve(request).expect_err("refused"),
            pipeline.begin(request).expect_err("refused"),
        ] {
            assert_eq!(failure.code, FailureCode::InvalidRequest, "{failure}");
            for word in words {
                assert!(failure.message.contains(word), "{word:?} is not in: {failure}");
            }
        }
    };
    refused(
        &request("shark"),
        &["\"shark\"", "near are", "white shark", "tiger shark", "0 to 999"],
    );
    refused(&request("tinch"), &["near are tench"]);
    refused(&request("1000"), &["class 1000", "0 to 999"]);
    refused(&request("-1"), &["\"-1\""]);
    refused(&request("nothing"), &["class 2000", "0 to 999"]);
    let negative = GenerateRequest {
        negative_prompt: Some("crane".to_owned()),
        ..request("2")
    };
    refused(&negative, &["negative prompt", "leave it out"]);
    let wide = GenerateRequest {
        width: Some(256),
        ..request("2")
    };
    refused(&wide, &["width is 256", "at most 128"]);
    let narrow = GenerateRequest {
        width: Some(64),
        ..request("2")
    };
    refused(&narrow, &["width is 64", "128 would do"]);
}

#[test]
fn without_labels_classes_are_numbers() {
    let pipeline = load(&support::data("dit").join("model"));
    let failure = pipeline.resolve(&request("a cat")).expect_err("refused");
    for word in ["\"a cat\"", "by number, 0 to 999"] {
        assert!(failure.message.contains(word), "{failure}");
    }
    let unguided = GenerateRequest {
        guidance: Some(1.0),
        negative_prompt: Some("not read".to_owned()),
        ..request("999")
    };
    pipeline.resolve(&unguided).expect("nothing is guided");
}
