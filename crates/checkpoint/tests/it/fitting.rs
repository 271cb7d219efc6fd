//! Whether a model's weights and a checkpoint's tensors match, one for one.

use crate::support::{file_of, put, refusal, temp};
use denoised_checkpoint::{Component, Weights};
use denoised_tensor::{Precision, WeightKind, WeightSpec};
use std::path::Path;

/// One component `net` with F32 tensors of the given shapes, except that names ending in `ids` are I64.
fn weights(folder: &Path, tensors: &[(&str, &[usize])]) -> Weights {
    let mut begin = 0;
    let mut entries = Vec::new();
    for (name, shape) in tensors {
        let (dtype, element_bytes) = if name.ends_with("ids") {
            ("I64", 8)
        } else {
            ("F32", 4)
        };
        let end = begin + shape.iter().product::<usize>() * element_bytes;
        entries.push(format!(
            r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#
        ));
        begin = end;
    }
    put(
        &folder.join("model.safetensors"),
        file_of(&format!("{{{}}}", entries.join(",")), &vec![0; begin]),
    );
    Weights::new(folder, vec![Component::open("net", folder, &["model"]).unwrap()])
}

fn spec(kind: WeightKind, sources: &[&str], shape: &[usize]) -> WeightSpec {
    let sources = sources.iter().map(|name| format!("net/{name}")).collect();
    WeightSpec {
        sources,
        kind,
        shape: shape.to_vec(),
        precision: Precision::Device,
    }
}

#[test]
fn equal_sets_of_tensors_match_and_a_pointwise_kernel_is_a_matrix() {
    let folder = temp();
    let weights = weights(
        folder.path(),
        &[
            ("q", &[4, 8]),
            ("k", &[4, 8]),
            ("proj", &[8, 8, 1, 1]),
            ("conv", &[8, 4, 3, 3]),
            ("gamma", &[8]),
            ("pos", &[1, 16, 8]),
            ("scale", &[]),
            ("position_ids", &[1, 77]),
        ],
    );
    let conv = WeightKind::Conv { stride: 1 };
    let specs = [
        spec(WeightKind::Matrix, &["q", "k"], &[8, 8]),
        spec(WeightKind::Matrix, &["proj"], &[8, 8]),
        spec(conv, &["conv"], &[8, 4, 3, 3]),
        spec(WeightKind::Vector, &["gamma"], &[8]),
        spec(WeightKind::Vector, &["pos"], &[1, 16, 8]),
        spec(WeightKind::Vector, &["scale"], &[]),
    ];
    weights.check(&specs, &["*position_ids"]).unwrap();
    weights.check(&specs, &["net/pos*"]).unwrap();
    weights.check(&specs, &["net/position_ids"]).unwrap();
    let message = refusal(weights.check(&specs, &["position_ids"]));
    assert!(
        message.contains("in the files but not in the model (1): `net/position_ids`"),
        "{message}"
    );
}

#[test]
fn everything_that_does_not_fit_is_reported_at_once() {
    let folder = temp();
    let weights = weights(
        folder.path(),
        &[
            ("a", &[4, 8]),
            ("b", &[8]),
            ("ids", &[2]),
            ("left", &[1]),
            ("over", &[1]),
        ],
    );
    let specs = [
        spec(WeightKind::Matrix, &["a"], &[8, 4]),
        spec(WeightKind::Vector, &["b", "gone"], &[16]),
        spec(WeightKind::Vector, &["ids"], &[2]),
    ];
    let message = refusal(weights.check(&specs, &[]));
    for expected in [
        "missing (1): `net/gone`",
        "not fitting (2): `net/a` has shape [4, 8], the model needs [8, 4], `net/ids` has dtype I64, which is no float",
        "in the files but not in the model (2): `net/left`, `net/over`",
    ] {
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn shapes_that_only_look_alike_do_not_fit() {
    let folder = temp();
    let weights = weights(
        folder.path(),
        &[
            ("m", &[4, 8, 1, 3]),
            ("v", &[2, 4]),
            ("c", &[4, 8]),
            ("x", &[3, 8]),
            ("y", &[3, 7]),
            ("t", &[8, 1, 16]),
            ("u", &[4]),
            ("one", &[8, 1, 1]),
        ],
    );
    let conv = WeightKind::Conv { stride: 1 };
    let cases = [
        spec(WeightKind::Matrix, &["m"], &[4, 8]),
        spec(WeightKind::Vector, &["v"], &[8]),
        spec(conv, &["c"], &[4, 8, 1, 1]),
        spec(WeightKind::Matrix, &["x", "y"], &[6, 8]),
        spec(WeightKind::Matrix, &["x", "x"], &[8, 6]),
        spec(WeightKind::Matrix, &["x", "x"], &[5, 8]),
        spec(WeightKind::Table, &["t"], &[8, 16]),
        spec(WeightKind::Matrix, &["u"], &[4, 1]),
        spec(WeightKind::Vector, &["one"], &[1, 8]),
        spec(WeightKind::Matrix, &[], &[8, 8]),
    ];
    for case in cases {
        let message = refusal(weights.check(std::slice::from_ref(&case), &["*"]));
        assert!(message.contains("not fitting (1)"), "{case:?}: {message}");
    }
    let vectors = spec(WeightKind::Matrix, &["x", "c"], &[7, 8]);
    weights.check(&[vectors], &["*"]).unwrap();
    // Patches that do not overlap, and a factor that broadcasts over positions.
    let patches = spec(WeightKind::Matrix, &["m"], &[4, 24]);
    let factors = spec(WeightKind::Vector, &["one"], &[8]);
    weights.check(&[patches, factors], &["*"]).unwrap();
}

#[test]
fn parts_of_a_kernel_over_frames_are_read_by_a_suffix() {
    let folder = temp();
    let weights = weights(folder.path(), &[("k", &[2, 3, 4, 1, 1]), ("other", &[2])]);
    let conv = WeightKind::Conv { stride: 1 };
    let last = spec(conv, &["k@last"], &[2, 3, 1, 1]);
    let frames = spec(WeightKind::Matrix, &["k@frames"], &[2, 12]);
    weights.check(&[last, frames], &["net/other"]).unwrap();
    let message = refusal(weights.check(&[spec(conv, &["k@last"], &[2, 12, 1, 1])], &["*"]));
    assert!(message.contains("[2, 3, 1, 1]"), "{message}");
    let part = weights.weight("net/k@last").unwrap();
    assert_eq!((part.shape, part.bytes.len()), (vec![2, 3, 1, 1], 2 * 3 * 4));
}
