//! Folders: what is found in sound ones, and what is said of others.

use crate::support::{Random, file_with, put, refusal, temp, text};
use denoised_checkpoint::{CheckpointError, ComponentClass, Folder};
use serde_json::{Value, json};
use std::{fs, os::unix::fs::symlink, path::Path};

const INDEX: &str = r#"{
  "_class_name": "StableDiffusion3Pipeline",
  "_diffusers_version": "0.42.1",
  "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
  "text_encoder_3": [null, null],
  "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
  "transformer": ["diffusers", "SD3Transformer2DModel"],
  "boundary_ratio": null,
  "is_distilled": true
}"#;

/// A folder of the components above, with a config each and one tensor per weight file.
fn put_folder(root: &Path) {
    put(&root.join("model_index.json"), INDEX);
    put(&root.join("scheduler/scheduler_config.json"), r#"{"shift": 3.0}"#);
    put(
        &root.join("transformer/config.json"),
        r#"{"num_layers": 2, "_name_or_path": "x"}"#,
    );
    put(
        &root.join("transformer/diffusion_pytorch_model.safetensors"),
        file_with(&["proj.weight"]),
    );
    put(&root.join("text_encoder/config.json"), r#"{"hidden_size": 8}"#);
    put(
        &root.join("text_encoder/model.safetensors"),
        file_with(&["embed.weight", "head.bias"]),
    );
}

#[test]
fn a_folder_shows_its_class_components_options_and_tensors() {
    let folder = temp();
    put_folder(folder.path());
    let checkpoint = Folder::open(folder.path()).unwrap();
    assert_eq!(checkpoint.path(), folder.path());
    assert_eq!(checkpoint.pipeline_class(), "StableDiffusion3Pipeline");
    let names: Vec<&str> = checkpoint.components().keys().map(String::as_str).collect();
    assert_eq!(names, ["scheduler", "text_encoder", "transformer"]);
    let class = ComponentClass {
        library: "diffusers".into(),
        class: "SD3Transformer2DModel".into(),
    };
    assert_eq!(checkpoint.class("transformer"), Some(&class));
    assert_eq!(checkpoint.class("text_encoder_3"), None);
    assert_eq!(checkpoint.options().unread(), ["boundary_ratio", "is_distilled"]);
    assert!(checkpoint.options().bool_or("is_distilled", false).unwrap());
    assert_eq!(
        checkpoint
            .config("scheduler")
            .unwrap()
            .f64_or("shift", 1.0)
            .unwrap(),
        3.0
    );
    let config = checkpoint.config("transformer").unwrap();
    assert_eq!(config.usize("num_layers").unwrap(), 2);
    config.deny_unread(&[]).unwrap();

    let weights = checkpoint.weights(&["text_encoder", "transformer"]).unwrap();
    let names: Vec<String> = weights.names().collect();
    assert_eq!(
        names,
        [
            "text_encoder/embed.weight",
            "text_encoder/head.bias",
            "transformer/proj.weight"
        ]
    );
    assert_eq!(weights.total_bytes(), 24);
    assert_eq!(weights.shape("transformer/proj.weight"), Some(&[2][..]));
    assert_eq!(
        weights.weight("text_encoder/head.bias").unwrap().bytes[4..],
        2f32.to_le_bytes()
    );
    for name in [
        "proj.weight",
        "vae/proj.weight",
        "transformer/",
        "transformer/proj",
        "",
    ] {
        assert!(refusal(weights.weight(name)).contains("has no tensor"), "{name}");
    }
    assert_eq!(weights.components()[0].variant(), None);
    assert_eq!(weights.components()[1].name(), "transformer");
}

#[test]
fn paths_that_are_no_checkpoint_folder_say_what_to_give_instead() {
    let folder = temp();
    let root = folder.path();
    let open = |name: &str| refusal(Folder::open(&root.join(name)));
    put_folder(&root.join("good"));
    put(&root.join("one.safetensors"), file_with(&["a"]));
    put(&root.join("one.ckpt"), b"\x80\x02");
    put(&root.join("one.gguf"), b"GGUF");
    put(&root.join("single/one.safetensors"), file_with(&["a"]));
    put(&root.join("old/v1-5.ckpt"), b"PK\x03\x04");
    put(
        &root.join("models--org--name/snapshots/0123abc/model_index.json"),
        INDEX,
    );
    fs::create_dir_all(root.join("empty")).unwrap();

    assert!(
        open("absent").contains("absent; give the path of a local diffusers folder (nothing is downloaded)")
    );
    assert!(open("one.safetensors").contains("is a file, not a checkpoint folder; single-file"));
    assert!(open("one.ckpt").contains("one.ckpt is a pickle checkpoint, which is refused"));
    assert!(open("one.gguf").contains("GGUF files are not read"));
    assert!(open("good/model_index.json").contains("give the folder that contains it"));
    assert!(open("good/transformer").contains("one component of a checkpoint: give the folder above it"));
    assert!(open("models--org--name").contains("a hub cache: give its folder snapshots/0123abc"));
    assert!(open("single").contains("has no model_index.json; single-file checkpoints are not read"));
    assert!(open("old").contains("v1-5.ckpt is a pickle checkpoint"));
    assert!(open("empty").contains("give a folder as diffusers' save_pretrained writes it (found nothing)"));
    assert!(matches!(
        Folder::open(Path::new("nul\0")),
        Err(CheckpointError::Io { .. })
    ));
}

#[test]
fn a_wrong_model_index_is_refused_with_file_and_key() {
    let folder = temp();
    let deep = "[".repeat(5_000);
    let nested = format!(r#"{{"_class_name": "X", "a": {deep}{}}}"#, "]".repeat(5_000));
    let huge = format!(r#"{{"_class_name": "{}"}}"#, "x".repeat(1 << 20));
    let cases = [
        ("", "is not valid JSON of the expected form: EOF"),
        ("{", "EOF while parsing"),
        ("[]", "invalid type: sequence, expected a map"),
        ("null", "invalid type: null"),
        ("\u{feff}{}", "expected value"),
        ("{\"_class_name\": \"X\",}", "trailing comma at line 1 column 21"),
        ("{}", "`_class_name` must be a string, found nothing"),
        (
            r#"{"_class_name": ["X"]}"#,
            "`_class_name` must be a string, found [\"X\"]",
        ),
        (
            r#"{"_class_name": null}"#,
            "`_class_name` must be a string, found null",
        ),
        (
            r#"{"_class_name": "X", "vae": [null, "Y"]}"#,
            "`vae` must be a library and a class, or two nulls",
        ),
        (
            r#"{"_class_name": "X", "vae": ["Y", null]}"#,
            "`vae` must be a library and a class, or two nulls",
        ),
        (
            r#"{"_class_name": "X", "../vae": ["a", "b"]}"#,
            "`../vae` must be named like a folder beside it",
        ),
        (
            r#"{"_class_name": "X", "/etc": ["a", "b"]}"#,
            "`/etc` must be named like a folder beside it",
        ),
        (
            r#"{"_class_name": "X", "..": ["a", "b"]}"#,
            "`..` must be named like a folder beside it",
        ),
        (
            r#"{"_class_name": "X", "": ["a", "b"]}"#,
            "`` must be named like a folder beside it",
        ),
        (
            r#"{"_class_name": "X", "a\u0000": ["a", "b"]}"#,
            "`a\\0` must be named like a folder beside it",
        ),
        (&nested, "recursion limit exceeded"),
        (&huge, "more than the limit of 1048576 bytes"),
        (
            "version https://git-lfs.github.com/spec/v1\n",
            "is a git-lfs pointer",
        ),
    ];
    for (content, expected) in cases {
        put(&folder.path().join("model_index.json"), content);
        let message = refusal(Folder::open(folder.path()));
        let start: String = content.chars().take(80).collect();
        assert!(
            message.contains(expected) && message.contains("model_index.json"),
            "{start}: {message}"
        );
        assert!(
            message.len() < 1_000,
            "{start}: a message of {} bytes",
            message.len()
        );
    }
    put(
        &folder.path().join("model_index.json"),
        b"{\"_class_name\": \"\xff\"}",
    );
    assert!(refusal(Folder::open(folder.path())).contains("is not valid JSON"));
}

#[test]
fn no_json_whatever_causes_a_panic() {
    let keys = [
        "_class_name",
        "vae",
        "transformer",
        "weight_map",
        "metadata",
        "diffusers",
        "../x",
        "a",
        "",
    ];
    let folder = temp();
    let root = folder.path();
    put_folder(root);
    put(
        &root.join("text_encoder/model-00001-of-00001.safetensors"),
        file_with(&["a"]),
    );
    fs::remove_file(root.join("text_encoder/model.safetensors")).unwrap();
    let shards =
        br#"{"metadata": {"total_size": 8}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}"#;
    let mut random = Random(3);
    let mut n_sound = [0; 3];
    for round in 0..2_000 {
        let (index, config, shard_index) = match round % 2 {
            0 => {
                let mut any = || random.json(&keys, 4).to_string().into_bytes();
                (any(), any(), any())
            }
            _ => (
                random.damage(INDEX.as_bytes()),
                random.damage(br#"{"hidden_size": 8}"#),
                random.damage(shards),
            ),
        };
        put(&root.join("model_index.json"), index);
        if let Ok(checkpoint) = Folder::open(root) {
            n_sound[0] += 1;
            for component in checkpoint.components().keys() {
                let _ = checkpoint.weights(&[component]);
            }
        }
        put(&root.join("model_index.json"), INDEX);
        put(&root.join("text_encoder/config.json"), config);
        put(
            &root.join("text_encoder/model.safetensors.index.json"),
            shard_index,
        );
        let checkpoint = Folder::open(root).unwrap();
        if let Ok(config) = checkpoint.config("text_encoder") {
            n_sound[1] += 1;
            for key in keys {
                let _ = (
                    config.opt_f64(key),
                    config.opt_usize(key),
                    config.usizes(key),
                    config.strs(key),
                );
            }
        }
        n_sound[2] += usize::from(checkpoint.component("text_encoder").is_ok());
    }
    assert!(
        n_sound.iter().all(|&n| n > 20),
        "{n_sound:?} of 2000 inputs were sound"
    );
}

#[test]
fn a_component_that_is_not_there_is_named_with_those_that_are() {
    let folder = temp();
    put_folder(folder.path());
    let checkpoint = Folder::open(folder.path()).unwrap();
    let expected = "lists no component `vae` (it lists `scheduler`, `text_encoder`, `transformer`)";
    assert!(refusal(checkpoint.component("vae")).contains(expected));
    assert!(refusal(checkpoint.config("vae")).contains(expected));
    assert!(refusal(checkpoint.weights(&["transformer", "vae"])).contains(expected));
    assert_eq!(checkpoint.file("vae", "config.json"), None);
    assert!(checkpoint.file("transformer", "config.json").is_some());
    assert_eq!(checkpoint.file("transformer", "absent.json"), None);
    assert_eq!(
        checkpoint
            .read("scheduler", "scheduler_config.json", 100)
            .unwrap(),
        br#"{"shift": 3.0}"#
    );
    assert!(refusal(checkpoint.read("scheduler", "scheduler_config.json", 3)).contains("limit of 3 bytes"));

    fs::remove_dir_all(folder.path().join("transformer")).unwrap();
    assert!(refusal(checkpoint.component("transformer")).contains("transformer does not exist"));
    assert!(refusal(checkpoint.config("transformer")).contains("transformer/config.json does not exist"));
}

#[test]
fn a_pickle_in_place_of_weights_is_refused_with_the_way_to_convert_it() {
    for name in [
        "diffusion_pytorch_model.bin",
        "model.ckpt",
        "x.pt",
        "x.pth",
        "pytorch_model.bin.index.json",
    ] {
        let folder = temp();
        put_folder(folder.path());
        let weights = folder
            .path()
            .join("transformer/diffusion_pytorch_model.safetensors");
        put(&folder.path().join("transformer").join(name), b"");
        let checkpoint = Folder::open(folder.path()).unwrap();
        checkpoint
            .component("transformer")
            .expect("a pickle beside safetensors does no harm");
        fs::remove_file(weights).unwrap();
        let error = checkpoint.component("transformer").unwrap_err();
        assert!(matches!(error, CheckpointError::Pickle { .. }));
        assert!(
            text(&error).contains(name)
                && text(&error).contains("save_pretrained(folder, safe_serialization=True)")
        );
    }
}

#[test]
fn a_component_without_weights_says_what_was_looked_for_and_what_is_there() {
    let folder = temp();
    put_folder(folder.path());
    let from = folder
        .path()
        .join("transformer/diffusion_pytorch_model.safetensors");
    // Weights before averaging, which SD 1.5 ships beside the others and which are not meant.
    fs::rename(
        from,
        folder
            .path()
            .join("transformer/diffusion_pytorch_model.non_ema.safetensors"),
    )
    .unwrap();
    let message = refusal(Folder::open(folder.path()).unwrap().component("transformer"));
    assert!(
        message.contains("expected diffusion_pytorch_model.safetensors or model.safetensors"),
        "{message}"
    );
    assert!(
        message.ends_with("found `config.json`, `diffusion_pytorch_model.non_ema.safetensors`"),
        "{message}"
    );
}

#[test]
fn quantized_weights_are_refused_by_the_name_of_the_quantizer() {
    let folder = temp();
    put_folder(folder.path());
    let path = folder.path().join("transformer/config.json");
    let checkpoint = Folder::open(folder.path()).unwrap();
    put(
        &path,
        r#"{"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true}}"#,
    );
    assert!(
        refusal(checkpoint.config("transformer"))
            .contains("quantized (bitsandbytes), which is not supported")
    );
    put(&path, r#"{"quantization_config": true}"#);
    assert!(refusal(checkpoint.config("transformer")).contains("quantized (unknown method)"));
    put(&path, r#"{"quantization_config": null}"#);
    checkpoint.config("transformer").unwrap();
}

#[test]
fn a_precision_variant_is_taken_where_the_plain_file_is_missing() {
    let folder = temp();
    put_folder(folder.path());
    let root = folder.path();
    let taken = |component: &str| {
        let component = Folder::open(root).unwrap().component(component).unwrap();
        let path = component
            .paths()
            .next()
            .unwrap()
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned();
        (component.variant(), path)
    };
    let bf16 = root.join("transformer/diffusion_pytorch_model.bf16.safetensors");
    put(&bf16, file_with(&["proj.weight"]));
    assert_eq!(
        taken("transformer"),
        (None, "diffusion_pytorch_model.safetensors".into())
    );
    fs::remove_file(root.join("transformer/diffusion_pytorch_model.safetensors")).unwrap();
    assert_eq!(
        taken("transformer"),
        (Some("bf16"), "diffusion_pytorch_model.bf16.safetensors".into())
    );
    put(
        &root.join("transformer/diffusion_pytorch_model.fp16.safetensors"),
        file_with(&["proj.weight"]),
    );
    assert_eq!(
        taken("transformer"),
        (Some("fp16"), "diffusion_pytorch_model.fp16.safetensors".into())
    );
    // Each component for itself: this one still has its plain file.
    assert_eq!(taken("text_encoder"), (None, "model.safetensors".into()));
}

#[test]
fn a_hub_cache_made_of_symbolic_links_is_read_like_a_folder() {
    let folder = temp();
    let blobs = folder.path().join("blobs");
    let snapshot = folder.path().join("snapshots/0123abc");
    put_folder(&blobs);
    for file in [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
    ] {
        fs::create_dir_all(snapshot.join(file).parent().unwrap()).unwrap();
        symlink(blobs.join(file), snapshot.join(file)).unwrap();
    }
    let checkpoint = Folder::open(&snapshot).unwrap();
    assert_eq!(checkpoint.weights(&["transformer"]).unwrap().total_bytes(), 8);
    // A link whose blob is gone is reported as itself, and not passed over for another file.
    put(
        &snapshot.join("transformer/diffusion_pytorch_model.fp16.safetensors"),
        file_with(&["proj.weight"]),
    );
    fs::remove_file(blobs.join("transformer/diffusion_pytorch_model.safetensors")).unwrap();
    let message = refusal(checkpoint.component("transformer"));
    assert!(
        message.contains("transformer/diffusion_pytorch_model.safetensors does not exist"),
        "{message}"
    );
}

#[test]
fn devices_in_place_of_configs_are_refused_without_reading_them() {
    let folder = temp();
    put_folder(folder.path());
    let config = folder.path().join("transformer/config.json");
    fs::remove_file(&config).unwrap();
    symlink("/dev/zero", &config).unwrap();
    let checkpoint = Folder::open(folder.path()).unwrap();
    assert!(refusal(checkpoint.config("transformer")).contains("config.json: not a regular file"));
}

#[test]
fn options_that_are_lists_or_objects_stay_options() {
    let folder = temp();
    let index =
        json!({"_class_name": "DiTPipeline", "id2label": {"0": "tench"}, "sizes": [1, 2], "pair": ["a", 1]});
    put(&folder.path().join("model_index.json"), index.to_string());
    let checkpoint = Folder::open(folder.path()).unwrap();
    assert!(checkpoint.components().is_empty());
    assert_eq!(checkpoint.options().unread(), ["id2label", "pair", "sizes"]);
    assert_eq!(
        checkpoint.options().value("pair"),
        Some(&Value::from(vec![json!("a"), json!(1)]))
    );
}
