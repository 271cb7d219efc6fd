//! Every stored case against what diffusers computed, on every kind of world, in both modes, alone and among other requests; the bits
//! must be the same in all of them.

use crate::support::{case, copy_of, run};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A way to run a case.
#[derive(Clone, Copy, Debug)]
struct Way {
    executor: &'static str,
    workers: &'static str,
    threads: &'static str,
    mode: &'static str,
    /// Other requests in the case's waves; the case runs alone too, in the same world, before they come.
    share: &'static str,
}

const fn way(
    executor: &'static str,
    workers: &'static str,
    threads: &'static str,
    mode: &'static str,
    share: &'static str,
) -> Way {
    Way {
        executor,
        workers,
        threads,
        mode,
        share,
    }
}

/// Not every combination, of which there are 24, but every pair: each world with each mode and each number of threads, each mode with
/// each number of threads, and each mode alone and shared.
const WAYS: [Way; 6] = [
    way("uni", "1", "1", "request", "3"),
    way("uni", "1", "2", "step", "3"),
    way("mp", "1", "1", "step", "0"),
    way("mp", "1", "2", "request", "3"),
    way("mp", "3", "1", "request", "0"),
    way("mp", "3", "2", "step", "3"),
];

/// Name to SHA-256 of every tensor of a run that was right.
fn verified(folder: &Path, case: &Path, way: Way) -> BTreeMap<String, String> {
    let case = case.to_str().expect("a readable path");
    let args = [
        "verify",
        case,
        "--executor",
        way.executor,
        "--workers",
        way.workers,
        "--threads",
        way.threads,
        "--mode",
        way.mode,
        "--share",
        way.share,
        "--json",
    ];
    let lines = run(folder, &args).expect_code(0).json_lines();
    assert_eq!((lines.len(), &lines[0]["ok"]), (1, &Value::Bool(true)));
    assert_eq!(lines[0]["mode"], way.mode);
    assert_eq!(lines[0]["n_sharing"].to_string(), way.share);
    let tensors = lines[0]["tensors"].as_array().expect("a list of tensors");
    let sum_of = |tensor: &Value| {
        let name = tensor["name"].as_str().expect("a name").to_owned();
        let sum = tensor["sha256"]
            .as_str()
            .unwrap_or_else(|| panic!("{way:?}: no one sum of {name}"));
        assert!(tensor["problem"].is_null(), "{tensor}");
        (name, sum.to_owned())
    };
    tensors.iter().map(sum_of).collect()
}

/// How many tensors a file holds, without the pictures that a call brings.
fn tensors_of(path: &Path) -> usize {
    let bytes = fs::read(path).expect("it is there");
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header: serde_json::Map<String, Value> =
        serde_json::from_slice(&bytes[8..8 + header_bytes]).expect("it is JSON");
    let is_computed = |name: &&String| *name != "__metadata__" && !name.starts_with("input.");
    header.keys().filter(is_computed).count()
}

#[track_caller]
fn all_ways_agree(name: &str) {
    // What the reference holds, and the initial latents of the seed beside those it gives.
    let n_tensors = 1 + tensors_of(&case(name).join("reference.safetensors"));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut first = None;
    for way in WAYS {
        let sums = verified(folder.path(), &case(name), way);
        assert_eq!(sums.len(), n_tensors, "{sums:?}");
        let first = first.get_or_insert_with(|| sums.clone());
        assert_eq!(*first, sums, "{way:?} differs from {:?}", WAYS[0]);
    }
}

/// One test per case, so that they run beside each other.
macro_rules! right_and_the_same_in_every_way {
    ($($test:ident: $case:literal,)*) => {
        $(#[test]
        fn $test() {
            all_ways_agree($case);
        })*
    };
}

right_and_the_same_in_every_way! {
    sd35m: "sd35m",
    sd15: "sd15",
    sd21v: "sd21v",
    emoji_unet: "emoji-unet",
    sd3: "sd3",
    emoji_dit: "emoji-dit",
    sdxl: "sdxl",
    dit: "dit",
    pixart: "pixart",
    zimage: "zimage",
    flux_dev: "flux-dev",
    flux_schnell: "flux-schnell",
    flux2_klein: "flux2-klein",
    qwen_image: "qwen-image",
    wan21_t2v: "wan21-t2v",
    wan22_t2v: "wan22-t2v",
}

#[test]
fn the_table_names_every_tensor_and_the_dump_can_be_verified_again() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    let sd35m = case("sd35m");
    let args = [
        "verify",
        sd35m.to_str().expect("a readable path"),
        "--dump",
        "ours.safetensors",
    ];
    let table = run(folder, &args).expect_code(0).text();
    for word in [
        "token_ids.2",
        "encode_prompt.3.0",
        "latents.step_2",
        "seeded.image",
        "16 tensors, all right on 1 rank(s)",
    ] {
        assert!(table.contains(word), "no `{word}` in\n{table}");
    }
    // With our own tensors as the reference, the error of each is 0.
    let again = folder.join("again");
    copy_of(&sd35m, &again);
    fs::copy(
        folder.join("ours.safetensors"),
        again.join("reference.safetensors"),
    )
    .expect("it was dumped");
    let lines = run(folder, &["verify", "again", "--json"])
        .expect_code(0)
        .json_lines();
    let errors = lines[0]["tensors"]
        .as_array()
        .expect("a list of tensors")
        .iter()
        .map(|tensor| &tensor["error"]);
    assert!(
        errors
            .clone()
            .all(|error| error.is_null() || error == &Value::from(0.0)),
        "{lines:?}"
    );
    assert_eq!(
        errors.filter(|error| error.is_null()).count(),
        2,
        "token ids are compared exactly"
    );
}

/// A copy of sd35m with its reference changed, verified; returns the names that are wrong.
fn wrong_after(change: impl FnOnce(&mut serde_json::Map<String, Value>, &mut Vec<u8>)) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    copy_of(&case("sd35m"), &folder.path().join("case"));
    let path = folder.path().join("case/reference.safetensors");
    let bytes = fs::read(&path).expect("it is there");
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let mut header: serde_json::Map<String, Value> =
        serde_json::from_slice(&bytes[8..8 + header_bytes]).expect("it is JSON");
    let mut data = bytes[8 + header_bytes..].to_vec();
    change(&mut header, &mut data);
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    fs::write(&path, bytes).expect("it can be written");

    let outcome = run(folder.path(), &["verify", "case", "--json"]).expect_code(1);
    let lines = outcome.json_lines();
    assert_eq!(lines[0]["ok"], false);
    let tensors = lines[0]["tensors"].as_array().expect("a list of tensors");
    let wrong = tensors.iter().filter(|tensor| !tensor["problem"].is_null());
    wrong
        .map(|tensor| tensor["name"].as_str().expect("a name").to_owned())
        .collect()
}

fn first_element(header: &serde_json::Map<String, Value>, name: &str) -> usize {
    header[name]["data_offsets"][0].as_u64().expect("an offset") as usize
}

#[test]
fn one_wrong_element_is_found() {
    let wrong = wrong_after(|header, data| {
        let at = first_element(header, "latents.step_1");
        data[at..at + 4].copy_from_slice(&1000f32.to_le_bytes());
    });
    assert_eq!(wrong, ["latents.step_1"]);
    let wrong = wrong_after(|header, data| {
        let at = first_element(header, "token_ids");
        data[at] ^= 1;
    });
    assert_eq!(wrong, ["token_ids"]);
    let wrong = wrong_after(|header, data| {
        let at = first_element(header, "image");
        data[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    assert_eq!(wrong, ["image"]);
}

#[test]
fn a_tensor_on_one_side_only_is_found() {
    let wrong = wrong_after(|header, _| {
        let entry = header.remove("noise_pred.1").expect("it is there");
        header.insert("noise_pred.7".to_owned(), entry);
    });
    assert_eq!(wrong, ["noise_pred.1", "noise_pred.7"]);
    let wrong = wrong_after(|header, _| header["image"]["shape"] = serde_json::json!([3, 1, 128, 128]));
    assert_eq!(wrong, ["image"]);
}

#[test]
fn a_case_that_cannot_be_run_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    let outcome = run(folder, &["verify", "absent"]).expect_code(2);
    assert!(outcome.stderr.contains("absent"), "{}", outcome.stderr);

    copy_of(&case("sd35m"), &folder.join("case"));
    let path = folder.join("case/reference.json");
    let text = fs::read_to_string(&path).expect("it is there");
    fs::write(
        &path,
        text.replace("\"num_images_per_prompt\": 1", "\"eta\": 1.0"),
    )
    .expect("it can be written");
    let outcome = run(folder, &["verify", "case"]).expect_code(2);
    assert!(outcome.stderr.contains("`eta` = 1.0"), "{}", outcome.stderr);

    fs::write(&path, text.replace("\"sd3\"", "\"sdxl\"")).expect("it can be written");
    let outcome = run(folder, &["verify", "case"]).expect_code(2);
    assert!(outcome.stderr.contains("sdxl"), "{}", outcome.stderr);

    fs::write(&path, text).expect("it can be written");
    fs::remove_dir_all(folder.join("case/model/vae")).expect("it is there");
    let outcome = run(folder, &["verify", "case", "--json"]).expect_code(3);
    assert_eq!(outcome.json_lines()[0]["error"]["code"], "invalid_model");
}
