//! Calls of reference pipelines as requests: what the keywords of diffusers mean here.
//!
//! Every argument is either understood, or known not to matter at its value, or refused by name.

use denoised_types::{Capture, GenerateRequest, Image, Mask, NamedTensor, TensorDType};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// What a call brings beside numbers and texts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inputs {
    /// Pictures, in order.
    pub(crate) images: Vec<Image>,
    /// Where to repaint the first of them.
    pub(crate) mask: Option<Mask>,
}

impl Inputs {
    /// Takes the call's pictures and its mask out of the tensors: `input.image`, `input.image.2`, … `[h, w, 3]` and `input.mask` `[h, w]`.
    ///
    /// # Errors
    /// In words, naming the tensor that is none of these.
    pub(crate) fn take(tensors: &mut BTreeMap<String, NamedTensor>) -> Result<Self, String> {
        let mut inputs = Self::default();
        while let Some(tensor) = tensors.remove(&match inputs.images.len() {
            0 => "input.image".to_owned(),
            n => format!("input.image.{}", n + 1),
        }) {
            let (width, height, rgb) = pixels(tensor, 3)?;
            inputs.images.push(Image::picture(width, height, rgb));
        }
        if let Some(tensor) = tensors.remove("input.mask") {
            let (width, height, luma) = pixels(tensor, 1)?;
            inputs.mask = Some(Mask { width, height, luma });
        }
        Ok(inputs)
    }
}

fn pixels(tensor: NamedTensor, n_channels: u64) -> Result<(u32, u32, Vec<u8>), String> {
    let wrong = || format!("{tensor:?} is no u8 [height, width] of {n_channels} channel(s)");
    let (height, width) = match tensor.shape[..] {
        [height, width, n] if n == n_channels => (height, width),
        [height, width] if n_channels == 1 => (height, width),
        _ => return Err(wrong()),
    };
    let sides = u32::try_from(width).ok().zip(u32::try_from(height).ok());
    match sides.filter(|_| tensor.dtype == TensorDType::U8 && tensor.is_consistent()) {
        Some((width, height)) => Ok((width, height, tensor.data)),
        None => Err(wrong()),
    }
}

/// What the recorded call asks for, one request per prompt, and whether it was a list of several prompts.
///
/// # Errors
/// In words, naming the argument.
pub(crate) fn requests_of(
    call: &Map<String, Value>,
    seed: u64,
    inputs: &Inputs,
) -> Result<(Vec<GenerateRequest>, bool), String> {
    let mut shared = GenerateRequest {
        seed,
        capture: Capture::Trace,
        images: inputs.images.clone(),
        mask: inputs.mask.clone(),
        ..GenerateRequest::new("")
    };
    let (prompts, is_batch) = prompts_of(call)?;
    let mut negatives = vec![None; prompts.len()];
    // Where the scale is an input of the denoiser, guidance by a negative prompt has a scale beside it; elsewhere it is the only one.
    let has_guidance_input = call.get("guidance_scale").is_some_and(|scale| !scale.is_null());
    for (name, value) in call {
        let refused = || format!("the call argument `{name}` = {value} is not understood");
        let count = || number(value).ok_or_else(refused);
        let scale = || Ok::<_, String>(value.as_f64().ok_or_else(refused)? as f32);
        match name.as_str() {
            "prompt" | "class_labels" => {}
            "prompt_2" | "prompt_3" if value.is_null() || Some(value) == call.get("prompt") => {}
            "negative_prompt" => negatives = negatives_of(value, prompts.len()).ok_or_else(refused)?,
            "negative_prompt_2" | "negative_prompt_3"
                if value.is_null() || Some(value) == call.get("negative_prompt") => {}
            // `sigmas`, `timesteps`, `skip_guidance_layers`, …: null is the default everywhere.
            _ if value.is_null() => {}
            "height" => shared.height = Some(count()?),
            "width" => shared.width = Some(count()?),
            "num_frames" => shared.n_frames = Some(count()?),
            "num_inference_steps" => shared.n_steps = Some(count()?),
            "sigmas" => shared.sigmas = numbers(value).ok_or_else(refused)?,
            "guidance_scale" => shared.guidance = Some(scale()?),
            "guidance_scale_2" => shared.guidance_2 = Some(scale()?),
            "true_cfg_scale" if has_guidance_input => shared.true_guidance = Some(scale()?),
            "true_cfg_scale" => shared.guidance = Some(scale()?),
            "strength" => shared.strength = Some(scale()?),
            "max_sequence_length" => shared.max_sequence_length = Some(count()?),
            "clip_skip" => shared.clip_skip = Some(count()?),
            "text_encoder_out_layers" => {
                let layers: Option<_> = value
                    .as_array()
                    .and_then(|list| list.iter().map(number).collect());
                shared.text_layers = layers.ok_or_else(refused)?;
            }
            "num_images_per_prompt" | "num_videos_per_prompt" | "callback_steps"
                if value.as_u64() == Some(1) => {}
            "eta" | "guidance_rescale" if value.as_f64() == Some(0.0) => {}
            "cfg_truncation" if value.as_f64() == Some(1.0) => {}
            "aesthetic_score" if value.as_f64() == Some(6.0) => {}
            "negative_aesthetic_score" if value.as_f64() == Some(2.5) => {}
            // FLUX.1 Kontext: the area to which width and height are brought, which leaves them as they are; sizes it was trained on.
            "max_area" if area(call) == value.as_u64() => {}
            "_auto_resize" if value == &Value::Bool(true) => {}
            "clean_caption" | "use_resolution_binning" | "cfg_normalization"
                if value == &Value::Bool(false) => {}
            "crops_coords_top_left" | "negative_crops_coords_top_left"
                if value == &Value::from(vec![0, 0]) => {}
            "original_size" | "target_size" | "negative_original_size" | "negative_target_size"
                if value.as_array().is_some_and(|size| {
                    matches!(&size[..], [height, width]
                        if Some(height) == call.get("height") && Some(width) == call.get("width"))
                }) => {}
            // They matter only where `skip_guidance_layers` is set, which falls to the last arm.
            "skip_layer_guidance_scale" | "skip_layer_guidance_start" | "skip_layer_guidance_stop" => {}
            // What a callback may see, not what is computed.
            "callback_on_step_end_tensor_inputs" | "output_type" | "return_dict" => {}
            _ => return Err(refused()),
        }
    }
    let requests = prompts
        .into_iter()
        .zip(negatives)
        .map(|(prompt, negative_prompt)| GenerateRequest {
            prompt,
            negative_prompt,
            ..shared.clone()
        });
    Ok((requests.collect(), is_batch))
}

/// Pixels of the picture.
fn area(call: &Map<String, Value>) -> Option<u64> {
    let side = |name: &str| call.get(name).and_then(Value::as_u64);
    side("width")?.checked_mul(side("height")?)
}

/// The prompts, or the names of classes, and whether there was a list of them. A single class is a list of one in its pipeline.
fn prompts_of(call: &Map<String, Value>) -> Result<(Vec<String>, bool), String> {
    if let Some(Value::Array(labels)) = call.get("class_labels") {
        let labels: Option<Vec<String>> = labels
            .iter()
            .map(|label| label.as_u64().map(|label| label.to_string()))
            .collect();
        let labels = labels.filter(|labels| !labels.is_empty());
        let labels = labels.ok_or("`class_labels` is no list of class numbers")?;
        let is_batch = labels.len() > 1;
        return Ok((labels, is_batch));
    }
    match call.get("prompt") {
        Some(Value::String(prompt)) => Ok((vec![prompt.clone()], false)),
        Some(Value::Array(list)) if !list.is_empty() => {
            let prompts: Option<Vec<String>> = list
                .iter()
                .map(|prompt| prompt.as_str().map(str::to_owned))
                .collect();
            Ok((prompts.ok_or("`prompt` has an element that is no string")?, true))
        }
        _ => Err("`prompt` is neither a string nor a list of strings".to_owned()),
    }
}

fn number(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| number.try_into().ok())
}

fn numbers(value: &Value) -> Option<Vec<f32>> {
    let number = |value: &Value| value.as_f64().map(|number| number as f32);
    value.as_array()?.iter().map(number).collect()
}

fn negatives_of(value: &Value, n_prompts: usize) -> Option<Vec<Option<String>>> {
    match value {
        Value::Null => Some(vec![None; n_prompts]),
        Value::String(negative) => Some(vec![Some(negative.clone()); n_prompts]),
        Value::Array(list) if list.len() == n_prompts => list
            .iter()
            .map(|negative| negative.as_str().map(|text| Some(text.to_owned())))
            .collect(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(call: Value) -> Result<(Vec<GenerateRequest>, bool), String> {
        requests_of(call.as_object().unwrap(), 1234, &Inputs::default())
    }

    #[test]
    fn a_call_becomes_one_request_per_prompt() {
        let (requests, is_batch) = parse(json!({
            "prompt": ["a cat", "a dog"],
            "prompt_2": ["a cat", "a dog"],
            "negative_prompt": "blurry",
            "height": 64, "width": 128, "num_inference_steps": 3, "guidance_scale": 4.5,
            "num_images_per_prompt": 1, "max_sequence_length": 256, "clip_skip": 2, "eta": 0.0,
            "callback_on_step_end_tensor_inputs": ["latents"], "skip_layer_guidance_scale": 2.8,
        }))
        .unwrap();
        assert!(is_batch);
        assert_eq!(requests.len(), 2);
        let expected = GenerateRequest {
            negative_prompt: Some("blurry".to_owned()),
            width: Some(128),
            height: Some(64),
            n_steps: Some(3),
            guidance: Some(4.5),
            seed: 1234,
            max_sequence_length: Some(256),
            clip_skip: Some(2),
            capture: Capture::Trace,
            ..GenerateRequest::new("a dog")
        };
        assert_eq!(requests[1], expected);
        assert!(!parse(json!({"prompt": "a cat"})).unwrap().1);
        let (requests, is_batch) = parse(json!({"class_labels": [3], "guidance_scale": 4.0})).unwrap();
        assert_eq!(
            (requests[0].prompt.as_str(), requests[0].guidance, is_batch),
            ("3", Some(4.0), false)
        );
    }

    #[test]
    fn the_true_scale_is_the_guidance_where_no_other_is_an_input() {
        let scales = |call: Value| {
            let request = parse(call).unwrap().0.remove(0);
            (request.guidance, request.true_guidance)
        };
        let flux = json!({"prompt": "", "guidance_scale": 3.5, "true_cfg_scale": 2.0});
        assert_eq!(scales(flux), (Some(3.5), Some(2.0)));
        for qwen in [
            json!({"prompt": "", "true_cfg_scale": 4.0}),
            json!({"prompt": "", "guidance_scale": null, "true_cfg_scale": 4.0}),
        ] {
            assert_eq!(scales(qwen), (Some(4.0), None));
        }
    }

    #[test]
    fn pictures_come_in_order_and_only_as_bytes() {
        let tensor = |name: &str, dtype, shape: &[u64], data: &[u8]| {
            let tensor = NamedTensor {
                name: name.to_owned(),
                dtype,
                shape: shape.to_vec(),
                data: data.to_vec(),
            };
            (name.to_owned(), tensor)
        };
        let mut tensors = BTreeMap::from([
            tensor("input.image.2", TensorDType::U8, &[1, 1, 3], &[4, 5, 6]),
            tensor("input.image", TensorDType::U8, &[1, 2, 3], &[1; 6]),
            tensor("input.mask", TensorDType::U8, &[1, 2], &[0, 255]),
            tensor("image", TensorDType::U8, &[1], &[0]),
        ]);
        let inputs = Inputs::take(&mut tensors).unwrap();
        assert_eq!(inputs.images[0], Image::picture(2, 1, vec![1; 6]));
        assert_eq!(inputs.images[1], Image::picture(1, 1, vec![4, 5, 6]));
        assert_eq!(inputs.mask.unwrap().luma, [0, 255]);
        assert_eq!(tensors.into_keys().collect::<Vec<_>>(), ["image"]);
        let wrong = tensor("input.image", TensorDType::I64, &[1, 1, 3], &[0; 24]);
        assert!(
            Inputs::take(&mut BTreeMap::from([wrong]))
                .unwrap_err()
                .contains("input.image")
        );
    }

    #[test]
    fn an_argument_that_changes_the_result_is_refused_by_name() {
        for (name, value) in [
            ("clip_skip", json!("last")),
            ("eta", json!(0.5)),
            ("num_images_per_prompt", json!(2)),
            ("prompt_2", json!("another")),
            ("negative_prompt_3", json!("another")),
            ("skip_guidance_layers", json!([7])),
            ("timesteps", json!([999, 500])),
            ("sigmas", json!([1.0, "0.5"])),
            ("use_resolution_binning", json!(true)),
            ("crops_coords_top_left", json!([0, 8])),
            ("original_size", json!([64, 64])),
            ("num_inference_steps", json!(-3)),
            ("something_new", json!(true)),
        ] {
            let mut call = json!({"prompt": "a cat"});
            call[name] = value;
            let message = parse(call).unwrap_err();
            assert!(message.contains(&format!("`{name}`")), "{message}");
        }
        assert!(parse(json!({"prompt": []})).is_err());
        assert!(parse(json!({})).is_err());
        assert!(parse(json!({"prompt": ["a", "b"], "negative_prompt": ["c"]})).is_err());
    }
}
