//! Checkpoints that diffusers and its Python safetensors wrote, and files of the `safetensors` crate.
//!
//! Counts and sizes below were read from the files' headers with Python's `json` and `struct` alone; elements of the demo
//! checkpoint with Python's `safetensors`.

use crate::support::{put, temp};
use denoised_checkpoint::{FileDType, Folder, SafeTensors};
use denoised_tensor::SourceDType;
use safetensors::{Dtype, tensor::TensorView};
use std::{
    fs,
    path::{Path, PathBuf},
};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Opens all weights and compares every tensor with what the format's own reader finds in the same files.
fn read_all(folder: &Path, expected: &[(&str, usize, u64)]) {
    let checkpoint = Folder::open(folder).unwrap();
    assert_eq!(checkpoint.pipeline_class(), "StableDiffusion3Pipeline");
    assert_eq!(checkpoint.class("text_encoder_3"), None);
    let components: Vec<&str> = expected.iter().map(|(component, ..)| *component).collect();
    let weights = checkpoint.weights(&components).unwrap();
    assert_eq!(
        weights.total_bytes(),
        expected.iter().map(|(_, _, n_bytes)| n_bytes).sum::<u64>()
    );
    for (component, (name, n_tensors, n_bytes)) in weights.components().iter().zip(expected) {
        assert_eq!(
            (component.names().count(), component.total_bytes()),
            (*n_tensors, *n_bytes),
            "{name}"
        );
        for path in component.paths() {
            let bytes = fs::read(path).unwrap();
            for (tensor, view) in safetensors::SafeTensors::deserialize(&bytes).unwrap().iter() {
                let read = weights.weight(&format!("{name}/{tensor}")).unwrap();
                assert_eq!(read.dtype, SourceDType::F16);
                assert_eq!(
                    (read.shape.as_slice(), &*read.bytes),
                    (view.shape(), view.data()),
                    "{name}/{tensor}"
                );
            }
        }
        checkpoint.config(name).unwrap();
    }
    assert_eq!(
        weights.names().count(),
        expected.iter().map(|(_, n_tensors, _)| n_tensors).sum::<usize>()
    );
}

#[test]
fn the_demo_checkpoint_is_read() {
    let folder = repository().join("crates/models/demo/emoji-dit");
    read_all(
        &folder,
        &[
            ("text_encoder", 53, 988_992),
            ("text_encoder_2", 53, 507_776),
            ("transformer", 171, 5_871_904),
            ("vae", 156, 1_363_822),
        ],
    );
    let checkpoint = Folder::open(&folder).unwrap();
    let transformer = checkpoint.component("transformer").unwrap();
    assert_eq!(transformer.shape("pos_embed.pos_embed"), Some(&[1, 256, 128][..]));
    let bias = transformer.weight("proj_out.bias").unwrap();
    let first: Vec<f64> = bias
        .bytes
        .chunks_exact(2)
        .take(4)
        .map(|pair| half_to_f64(u16::from_le_bytes([pair[0], pair[1]])))
        .collect();
    assert_eq!(
        first,
        [
            0.032806396484375,
            0.028778076171875,
            -0.0025615692138671875,
            -0.018707275390625
        ]
    );
    assert_eq!(
        checkpoint
            .config("scheduler")
            .unwrap()
            .str("_class_name")
            .unwrap(),
        "FlowMatchEulerDiscreteScheduler"
    );
    assert!(checkpoint.file("tokenizer", "vocab.json").is_some());
}

#[test]
fn the_reference_checkpoint_and_its_tensors_are_read() {
    let case = repository().join("tests/data/sd35m");
    read_all(
        &case.join("model"),
        &[
            ("text_encoder", 53, 99_072),
            ("text_encoder_2", 53, 187_008),
            ("transformer", 127, 311_040),
            ("vae", 176, 653_990),
        ],
    );
    let reference = SafeTensors::open(&case.join("reference.safetensors")).unwrap();
    let ids = reference.raw("token_ids").unwrap();
    assert_eq!(ids.dtype, FileDType::Other("I64".into()));
    assert_eq!(ids.bytes.len(), ids.shape.iter().product::<usize>() * 8);
}

/// A normal half-precision number, by the formula of IEEE 754: the tests' own, so as not to trust a library both times.
fn half_to_f64(bits: u16) -> f64 {
    let sign = if bits >> 15 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(bits >> 10 & 31);
    let fraction = f64::from(bits & 1023);
    sign * (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15)
}

#[test]
fn every_dtype_that_the_crate_writes_is_known_with_its_size() {
    let folder = temp();
    let path = folder.path().join("a.safetensors");
    let all = [
        (Dtype::BOOL, 8),
        (Dtype::F4, 4),
        (Dtype::F6_E2M3, 6),
        (Dtype::F6_E3M2, 6),
        (Dtype::U8, 8),
        (Dtype::I8, 8),
        (Dtype::F8_E5M2, 8),
        (Dtype::F8_E4M3, 8),
        (Dtype::F8_E8M0, 8),
        (Dtype::F8_E4M3FNUZ, 8),
        (Dtype::F8_E5M2FNUZ, 8),
        (Dtype::I16, 16),
        (Dtype::U16, 16),
        (Dtype::F16, 16),
        (Dtype::BF16, 16),
        (Dtype::I32, 32),
        (Dtype::U32, 32),
        (Dtype::F32, 32),
        (Dtype::C64, 64),
        (Dtype::F64, 64),
        (Dtype::I64, 64),
        (Dtype::U64, 64),
    ];
    for (dtype, bits) in all {
        let data: Vec<u8> = (0..bits).collect();
        let view = TensorView::new(dtype, vec![2, 4], &data).unwrap();
        put(&path, safetensors::serialize([("t", view)], None).unwrap());
        let file = SafeTensors::open(&path).unwrap();
        let raw = file.raw("t").unwrap();
        assert_eq!(
            (raw.dtype.to_string(), raw.dtype.bits()),
            (dtype.to_string(), Some(u32::from(bits)))
        );
        assert_eq!((raw.shape.as_slice(), raw.bytes), (&[2, 4][..], data.as_slice()));
        let is_float = matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
        assert_eq!(file.weight("t").is_ok(), is_float, "{dtype}");
    }
}
