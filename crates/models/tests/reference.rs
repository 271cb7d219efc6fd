//! Every family against the numbers that diffusers computed (`tests/data`, `scripts/reference`).
//!
//! `DENOISED_REFERENCE_CASES` may name folders (separated by `:`) with further cases of the same layout.

#[path = "../../../bin/denoised/case_call.rs"]
mod case_call;
mod support;

use case_call::{Inputs, requests_of};

use denoised_checkpoint::{FileDType, SafeTensors};
use denoised_tensor::{Backend, DType};
use denoised_testkit::rounding::RoundingBackend;
use denoised_types::{GenerateRequest, NamedTensor, TensorDType};
use serde_json::Value;
use std::{collections::BTreeMap, fs, path::Path, rc::Rc};

/// Largest relative L2 error of a tensor, and of a picture after the decoder has amplified it.
const TENSOR_LIMIT: f64 = 1e-4;
const IMAGE_LIMIT: f64 = 1e-3;
/// In bf16 the larger of this and a multiple of what diffusers' own bf16 differs from its f32.
const BF16_LIMIT: f64 = 2e-2;
const BF16_FACTOR: f64 = 1.25;

#[test]
fn sd35m_is_diffusers() {
    check_case(&support::data("sd35m"));
}

#[test]
fn sd35m_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("sd35m"));
}

#[test]
fn sd15_is_diffusers() {
    check_case(&support::data("sd15"));
}

#[test]
fn sd15_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("sd15"));
}

#[test]
fn sd21v_is_diffusers() {
    check_case(&support::data("sd21v"));
}

#[test]
fn sd21v_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("sd21v"));
}

#[test]
fn emoji_unet_is_diffusers() {
    check_case(&support::data("emoji-unet"));
}

#[test]
fn emoji_unet_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("emoji-unet"));
}

#[test]
fn sdxl_is_diffusers() {
    check_case(&support::data("sdxl"));
}

#[test]
fn sdxl_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("sdxl"));
}

#[test]
fn sd3_with_t5_is_diffusers() {
    check_case(&support::data("sd3"));
}

#[test]
fn sd3_with_t5_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("sd3"));
}

#[test]
fn emoji_dit_is_diffusers() {
    check_case(&support::data("emoji-dit"));
}

#[test]
fn emoji_dit_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("emoji-dit"));
}

#[test]
fn qwen_image_is_diffusers() {
    check_case(&support::data("qwen-image"));
}

#[test]
fn qwen_image_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("qwen-image"));
}

#[test]
fn dit_is_diffusers() {
    check_case(&support::data("dit"));
}

#[test]
fn dit_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("dit"));
}

#[test]
fn wan21_is_diffusers() {
    check_case(&support::data("wan21-t2v"));
}

#[test]
fn wan21_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("wan21-t2v"));
}

#[test]
fn wan22_is_diffusers() {
    check_case(&support::data("wan22-t2v"));
}

#[test]
fn wan22_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("wan22-t2v"));
}

#[test]
fn flux_dev_is_diffusers() {
    check_case(&support::data("flux-dev"));
}

#[test]
fn flux_dev_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("flux-dev"));
}

#[test]
fn flux_schnell_is_diffusers() {
    check_case(&support::data("flux-schnell"));
}

#[test]
fn flux_schnell_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("flux-schnell"));
}

#[test]
fn flux2_klein_is_diffusers() {
    check_case(&support::data("flux2-klein"));
}

#[test]
fn flux2_klein_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("flux2-klein"));
}

#[test]
fn pixart_is_diffusers() {
    check_case(&support::data("pixart"));
}

#[test]
fn pixart_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("pixart"));
}

#[test]
fn zimage_is_diffusers() {
    check_case(&support::data("zimage"));
}

#[test]
fn zimage_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("zimage"));
}

#[test]
fn wan21_from_a_first_frame_is_diffusers() {
    check_case(&support::data("wan21-i2v"));
}

#[test]
fn wan21_from_a_first_frame_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("wan21-i2v"));
}

#[test]
fn wan22_with_timesteps_per_frame_is_diffusers() {
    check_case(&support::data("wan22-ti2v-i2v"));
}

#[test]
fn wan22_with_timesteps_per_frame_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("wan22-ti2v-i2v"));
}

#[test]
fn sd15_img2img_is_diffusers() {
    check_case(&support::data("sd15-img2img"));
}

#[test]
fn sd15_inpaint_part_is_diffusers() {
    check_case(&support::data("sd15-inpaint-part"));
}

#[test]
fn sd15_inpaint9_is_diffusers() {
    check_case(&support::data("sd15-inpaint9"));
}

#[test]
fn sd15_inpaint9_part_is_diffusers() {
    check_case(&support::data("sd15-inpaint9-part"));
}

#[test]
fn sdxl_img2img_resized_is_diffusers() {
    check_case(&support::data("sdxl-img2img-resized"));
}

#[test]
fn sdxl_lcm_is_diffusers() {
    check_case(&support::data("sdxl-lcm"));
}

#[test]
fn sdxl_inpaint_is_diffusers() {
    check_case(&support::data("sdxl-inpaint"));
}

#[test]
fn sd3_img2img_is_diffusers() {
    check_case(&support::data("sd3-img2img"));
}

#[test]
fn sd15_inpaint_part_in_bf16_is_as_close_as_diffusers_in_bf16() {
    check_case_in_bf16(&support::data("sd15-inpaint-part"));
}

#[test]
fn flux_kontext_is_diffusers() {
    check_case(&support::data("flux-kontext"));
}

#[test]
fn qwen_image_under_a_mask_is_diffusers() {
    check_case(&support::data("qwen-inpaint"));
}

#[test]
fn qwen_image_edit_is_diffusers() {
    check_case(&support::data("qwen-edit"));
}

#[test]
fn qwen_image_edit_plus_is_diffusers() {
    check_case(&support::data("qwen-edit-plus"));
}

#[test]
fn flux2_klein_with_two_pictures_is_diffusers() {
    check_case(&support::data("flux2-edit-two"));
}

#[test]
fn flux_inpaint_is_diffusers() {
    check_case(&support::data("flux-inpaint"));
}

#[test]
fn further_cases_are_diffusers() {
    let folders = std::env::var("DENOISED_REFERENCE_CASES").unwrap_or_default();
    for folder in folders.split(':').filter(|folder| !folder.is_empty()) {
        check_case(Path::new(folder));
    }
}

fn check_case(folder: &Path) {
    check_case_on(folder, support::cpu(), |name, _| {
        if name.ends_with("image") {
            IMAGE_LIMIT
        } else {
            TENSOR_LIMIT
        }
    });
}

/// Every op rounds its output to bf16, and every step is a repetition that [`RoundingBackend`] checks.
fn check_case_in_bf16(folder: &Path) {
    let backend = Rc::new(RoundingBackend::new(support::cpu(), DType::BF16));
    check_case_on(
        folder,
        Rc::clone(&backend) as Rc<dyn Backend>,
        |name, bf16_error| {
            if name.ends_with("latents.init") {
                return TENSOR_LIMIT;
            }
            bf16_error[name]
                .as_f64()
                .map_or(BF16_LIMIT, |error| BF16_LIMIT.max(BF16_FACTOR * error))
        },
    );
    assert!(backend.n_repeated() >= 2, "steps of one request are alike");
}

/// `limit` is told the name of a tensor and the reference's own errors in bf16.
fn check_case_on(folder: &Path, backend: Rc<dyn Backend>, limit: impl Fn(&str, &Value) -> f64) {
    let text = fs::read_to_string(folder.join("reference.json")).expect("a case has a reference.json");
    let case: Value = serde_json::from_str(&text).expect("JSON");
    let mut reference = read_tensors(&folder.join("reference.safetensors"));
    let pipeline = support::load_on(&folder.join("model"), backend);

    let inputs = Inputs::take(&mut reference).expect("pictures");
    let call = case["call"].as_object().expect("a call");
    let seed = case["seed"].as_u64().expect("a seed");
    let (requests, is_batch) = requests_of(call, seed, &inputs).expect("a call that a request can be");
    // Pipelines that start from a picture draw all noise themselves.
    let is_from_seed_alone = requests[0].strength.is_some();
    let mut requests_with_latents = requests.clone();
    if !is_from_seed_alone {
        let latents = rows(&reference["latents.init"]);
        for (request, latents) in requests_with_latents.iter_mut().zip(latents) {
            request.latents = Some(latents);
        }
    }
    let run_all = |requests: &[GenerateRequest]| -> Vec<support::Outcome> {
        let run = |request| support::run(&*pipeline, request).expect("the call");
        requests.iter().map(run).collect()
    };
    let given = run_all(&requests_with_latents);
    let mut tensors = stacked(&given);
    if is_batch {
        // One draw made the noise of the whole batch, which is not how requests of their own are made.
        reference.remove("seeded.image");
    } else {
        let seeded = run_all(&requests)
            .remove(0)
            .trace
            .pop()
            .expect("a trace ends with the picture");
        tensors.push(NamedTensor {
            name: "seeded.image".to_owned(),
            ..seeded
        });
    }

    let mut worst: BTreeMap<String, f64> = BTreeMap::new();
    let mut wrong = Vec::new();
    let mut compare = |name: &str, ours: &NamedTensor| {
        let Some(theirs) = reference.remove(name) else {
            wrong.push(format!("{name} is not in the reference"));
            return;
        };
        let limit = limit(name, &case["bf16_error"]);
        let error = relative_error(ours, &theirs);
        let group = name.split_once(".step_").map_or(name, |(group, _)| group);
        let group = group.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
        let group = if name.starts_with("encode") {
            name.to_owned()
        } else {
            group
        };
        let slot = worst.entry(group).or_default();
        *slot = slot.max(error);
        if error.is_nan() || error > limit {
            wrong.push(format!("{name} has the error {error:e}, the limit is {limit:e}"));
        }
    };
    for tensor in &tensors {
        compare(&tensor.name, tensor);
    }
    wrong.extend(reference.keys().map(|name| format!("{name} was not computed")));
    support::report(&format!("{}: {worst:?}", folder.display()));
    assert!(wrong.is_empty(), "{}:\n{}", folder.display(), wrong.join("\n"));

    for outcome in &given {
        check_rounding(outcome);
    }
}

/// The 8-bit picture is the float picture, rounded, frame by frame.
fn check_rounding(outcome: &support::Outcome) {
    let image = outcome.trace.iter().find(|tensor| tensor.name == "image");
    let floats = image.and_then(NamedTensor::to_f32).expect("a float picture");
    let n_pixels = floats.len() / 3 / outcome.image.n_frames as usize;
    let byte = |value: f32| (value * 255.0).round_ties_even() as u8;
    let mut rounded = Vec::with_capacity(floats.len());
    for frame in floats.chunks_exact(3 * n_pixels) {
        for pixel in 0..n_pixels {
            rounded.extend([0, 1, 2].map(|channel| byte(frame[channel * n_pixels + pixel])));
        }
    }
    assert!(rounded == outcome.image.rgb, "the 8-bit picture differs");
}

/// The batch elements of a tensor.
fn rows(tensor: &NamedTensor) -> Vec<NamedTensor> {
    let n_bytes = tensor.data.len() / tensor.shape[0] as usize;
    let row = |data: &[u8]| NamedTensor {
        shape: [&[1], &tensor.shape[1..]].concat(),
        data: data.to_vec(),
        ..tensor.clone()
    };
    tensor.data.chunks_exact(n_bytes).map(row).collect()
}

/// The tensors of several requests as one batch, where one has several rows all first ones before all second ones; ids and encodings
/// of which the reference holds a list stay apart, as their lengths differ.
fn stacked(outcomes: &[support::Outcome]) -> Vec<NamedTensor> {
    let mut all = outcomes[0].trace.clone();
    for (tensor_idx, whole) in all.iter_mut().enumerate() {
        let same: Vec<&NamedTensor> = outcomes.iter().map(|one| &one.trace[tensor_idx]).collect();
        assert!(same.iter().all(|one| one.name == whole.name));
        if is_apart(&whole.name) || whole.shape[0] == 0 {
            continue;
        }
        if is_shared(whole) {
            assert!(same.iter().all(|one| one.data == whole.data));
            continue;
        }
        let rows: Vec<Vec<NamedTensor>> = same.iter().map(|one| rows(one)).collect();
        whole.shape[0] *= outcomes.len() as u64;
        whole.data = (0..rows[0].len())
            .flat_map(|row_idx| rows.iter().flat_map(move |of_one| of_one[row_idx].data.clone()))
            .collect();
    }
    for (idx, outcome) in outcomes.iter().enumerate().skip(1) {
        let apart = outcome.trace.iter().filter(|one| is_apart(&one.name));
        all.extend(apart.map(|one| NamedTensor {
            name: match one.name.split_once(LIST) {
                Some((tuple, call)) => format!("{tuple}.list{idx}.{call}"),
                None => format!("{}.prompt{idx}", one.name),
            },
            ..one.clone()
        }));
    }
    all
}

/// In the names of a first prompt's encodings where the reference holds a list of them.
const LIST: &str = ".list0.";

/// Whether an encoding has no dimension for prompts: positions that are those of all texts (FLUX.1).
fn is_shared(tensor: &NamedTensor) -> bool {
    tensor.name.starts_with("encode_prompt.") && tensor.shape[0] != 1
}

fn is_apart(name: &str) -> bool {
    name.starts_with("token_ids") || name.contains(LIST)
}

fn read_tensors(path: &Path) -> BTreeMap<String, NamedTensor> {
    let file = SafeTensors::open(path).expect("a case has a reference.safetensors");
    let read = |name: &String| {
        let raw = file.raw(name).expect("readable");
        let dtype = match raw.dtype {
            FileDType::Float(_) => TensorDType::F32,
            FileDType::Other(name) if name == "U8" => TensorDType::U8,
            _ => TensorDType::I64,
        };
        let tensor = NamedTensor {
            name: name.clone(),
            dtype,
            shape: raw.shape.iter().map(|extent| *extent as u64).collect(),
            data: raw.bytes.to_vec(),
        };
        assert!(tensor.is_consistent(), "{name} is float32, int64 or uint8");
        (name.clone(), tensor)
    };
    file.tensors().keys().map(read).collect()
}

/// `||ours - theirs|| / ||theirs||`; infinite where shapes differ, where ids differ, and where anything is NaN.
fn relative_error(ours: &NamedTensor, theirs: &NamedTensor) -> f64 {
    if ours.shape != theirs.shape || ours.dtype != theirs.dtype {
        return f64::INFINITY;
    }
    let (Some(a), Some(b)) = (ours.to_f32(), theirs.to_f32()) else {
        return if ours.data == theirs.data {
            0.0
        } else {
            f64::INFINITY
        };
    };
    let sum = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = sum(&mut a.iter().zip(&b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    let norm = sum(&mut b.iter().map(|b| f64::from(*b)));
    match (difference, norm) {
        (difference, _) if difference.is_nan() => f64::INFINITY,
        (0.0, 0.0) => 0.0,
        _ => difference / norm,
    }
}
