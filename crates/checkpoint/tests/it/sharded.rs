//! Components of several files with an index. File names as diffusers 0.42 writes them with `max_shard_size`.

use crate::support::{file_with, put, refusal, temp};
use denoised_checkpoint::Component;
use serde_json::json;
use std::{collections::HashSet, fs, os::unix::fs::symlink, path::Path};

const FIRST: &str = "diffusion_pytorch_model-00001-of-00002.safetensors";
const SECOND: &str = "diffusion_pytorch_model-00002-of-00002.safetensors";
const STEM: &str = "diffusion_pytorch_model";

fn put_shards(folder: &Path) {
    put(&folder.join(FIRST), file_with(&["a", "c"]));
    put(&folder.join(SECOND), file_with(&["b"]));
    put_index(folder, &json!({"a": FIRST, "b": SECOND, "c": FIRST}));
}

fn put_index(folder: &Path, weight_map: &serde_json::Value) {
    let index = json!({"metadata": {"total_size": 24}, "weight_map": weight_map});
    put(
        &folder.join("diffusion_pytorch_model.safetensors.index.json"),
        index.to_string(),
    );
}

fn open(folder: &Path) -> Result<Component, denoised_checkpoint::CheckpointError> {
    Component::open("transformer", folder, &[STEM])
}

#[test]
fn shards_are_one_view() {
    let folder = temp();
    put_shards(folder.path());
    let component = open(folder.path()).unwrap();
    assert_eq!(component.names().collect::<Vec<_>>(), ["a", "c", "b"]);
    assert_eq!(component.total_bytes(), 24);
    assert_eq!(component.paths().count(), 2);
    for name in ["a", "b", "c"] {
        assert_eq!(component.weight(name).unwrap().bytes[..4], 1f32.to_le_bytes());
        assert_eq!(component.shape(name), Some(&[2][..]));
    }
    assert!(refusal(component.weight("d")).contains("has no tensor `d`"));
    assert_eq!(component.unused_names(&HashSet::from(["a", "b"])), ["c"]);
}

#[test]
fn shards_of_a_variant_are_found_by_both_places_of_the_infix() {
    let folder = temp();
    // Today's name of a shard, and the one that older versions of diffusers wrote; the index decides.
    for shard in [
        "model.fp16-00001-of-00001.safetensors",
        "model-00001-of-00001.fp16.safetensors",
    ] {
        let folder = folder.path().join(shard);
        put(&folder.join(shard), file_with(&["a"]));
        put(
            &folder.join("model.safetensors.index.fp16.json"),
            json!({"weight_map": {"a": shard}}).to_string(),
        );
        let component = Component::open("text_encoder", &folder, &["model"]).unwrap();
        assert_eq!(component.variant(), Some("fp16"));
        assert_eq!(component.names().collect::<Vec<_>>(), ["a"]);
    }
}

#[test]
fn a_missing_or_cut_shard_is_named() {
    let folder = temp();
    put_shards(folder.path());
    let whole = fs::read(folder.path().join(SECOND)).unwrap();
    put(&folder.path().join(SECOND), &whole[..whole.len() - 5]);
    let message = refusal(open(folder.path()));
    assert!(
        message.contains(&format!(
            "{SECOND} is not a sound safetensors file: it is truncated: 5 of"
        )),
        "{message}"
    );
    fs::remove_file(folder.path().join(SECOND)).unwrap();
    let message = refusal(open(folder.path()));
    assert!(
        message.contains(&format!("index.json: 1 of its 2 files are missing: `{SECOND}`")),
        "{message}"
    );
}

#[test]
fn an_index_that_contradicts_its_shards_is_refused() {
    let folder = temp();
    put_shards(folder.path());
    let cases = [
        (
            json!({"a": FIRST, "b": SECOND}),
            format!("tensors in `{FIRST}` that the index does not place there (1): `c`"),
        ),
        (
            json!({"a": FIRST, "b": FIRST, "c": FIRST}),
            format!("tensors missing in `{FIRST}` (1): `b`"),
        ),
        (
            json!({"a": FIRST, "b": SECOND, "c": SECOND}),
            format!("tensors in `{FIRST}` that the index does not place there (1): `c`"),
        ),
        (
            json!({"a": FIRST, "b": SECOND, "c": FIRST, "d": SECOND}),
            format!("tensors missing in `{SECOND}` (1): `d`"),
        ),
        (json!({}), "it lists no tensor".into()),
    ];
    for (weight_map, expected) in cases {
        put_index(folder.path(), &weight_map);
        let message = refusal(open(folder.path()));
        assert!(message.contains(&expected), "{weight_map}: {message}");
    }
}

#[test]
fn an_index_cannot_lead_out_of_its_folder() {
    let folder = temp();
    let inside = folder.path().join("transformer");
    put_shards(&inside);
    put(&folder.path().join("outside.safetensors"), file_with(&["a"]));
    put(&inside.join("sub/inner.safetensors"), file_with(&["a"]));
    let absolute = folder
        .path()
        .join("outside.safetensors")
        .to_str()
        .unwrap()
        .to_owned();
    for file in [
        "../outside.safetensors",
        "..",
        ".",
        "",
        "/etc/passwd",
        &absolute,
        "sub/inner.safetensors",
    ] {
        put_index(&inside, &json!({"a": file}));
        let message = refusal(open(&inside));
        assert!(
            message.contains("is not the name of a file beside it"),
            "{file}: {message}"
        );
    }
    // A link that the folder's owner made is another matter: hub caches are made of them.
    symlink("../outside.safetensors", inside.join("linked.safetensors")).unwrap();
    put_index(&inside, &json!({"a": "linked.safetensors"}));
    assert_eq!(open(&inside).unwrap().total_bytes(), 8);
}

#[test]
fn an_index_of_pickles_or_of_nonsense_is_refused() {
    let folder = temp();
    let index = folder
        .path()
        .join("diffusion_pytorch_model.safetensors.index.json");
    put_index(folder.path(), &json!({"a": "model-00001-of-00001.bin"}));
    assert!(refusal(open(folder.path())).contains("model-00001-of-00001.bin is a pickle checkpoint"));
    put_index(folder.path(), &json!({"a": "a.txt"}));
    assert!(refusal(open(folder.path())).contains("`a.txt` is not the name of a safetensors file"));
    put_index(folder.path(), &json!({"a": "nul\0.safetensors"}));
    assert!(refusal(open(folder.path())).contains("`nul\\0.safetensors`"));
    let many: serde_json::Map<_, _> = (0..1025)
        .map(|idx| (format!("t{idx}"), json!(format!("{idx}.safetensors"))))
        .collect();
    put_index(folder.path(), &many.into());
    assert!(refusal(open(folder.path())).contains("it lists 1025 files (at most 1024 are read)"));
    for (content, expected) in [
        ("{}", "missing field `weight_map`"),
        (
            r#"{"weight_map": []}"#,
            "invalid type: sequence, expected an object",
        ),
        (
            r#"{"weight_map": {"a": 1}}"#,
            "invalid type: integer `1`, expected a string",
        ),
        (
            r#"{"weight_map": {"a": "x", "a": "y"}}"#,
            "`a` stands there twice",
        ),
        (
            r#"{"weight_map": {}, "weight_map": {}}"#,
            "duplicate field `weight_map`",
        ),
    ] {
        put(&index, content);
        let message = refusal(open(folder.path()));
        assert!(
            message.contains(expected) && message.contains("index.json is not valid JSON"),
            "{content}: {message}"
        );
    }
}

#[test]
fn a_single_file_goes_before_an_index() {
    let folder = temp();
    put_shards(folder.path());
    put(
        &folder.path().join("diffusion_pytorch_model.safetensors"),
        file_with(&["a"]),
    );
    assert_eq!(open(folder.path()).unwrap().paths().count(), 1);
}
