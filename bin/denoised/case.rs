//! A reference case on disk: which call it records, and what the reference computed.
//!
//! The layout is described in the docstring of `scripts/reference/make_reference.py`.

use crate::compare::{Tensors, part};
use crate::error::Error;
use crate::tensor_file;
use denoised_types::{Capture, Failure, FailureCode, GenerateRequest, NamedTensor};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Largest `reference.json`.
const MAX_JSON_BYTES: u64 = 16 << 20;

/// A case, ready to be run.
#[derive(Debug)]
pub(crate) struct Case {
    /// Its name, as the reference says.
    pub(crate) name: String,
    /// Family that the reference ran.
    pub(crate) family: String,
    /// Folder of its checkpoint.
    pub(crate) model: PathBuf,
    /// One request per prompt, seeded, with trace.
    pub(crate) requests: Vec<GenerateRequest>,
    /// Whether the call had a list of prompts: its noise is then one draw for all, which no single request repeats.
    pub(crate) is_batch: bool,
    /// What the reference computed, in f32.
    pub(crate) reference: Tensors,
    /// Relative L2 error of the reference's own pipeline in bf16, by tensor.
    pub(crate) bf16_error: BTreeMap<String, f64>,
}

impl Case {
    /// Reads the case in `folder`.
    ///
    /// # Errors
    /// `InvalidRequest` naming the file and what is missing, damaged or not understood.
    pub(crate) fn read(folder: &Path) -> Result<Self, Error> {
        if !folder.is_dir() {
            return Err(Error::usage(format!(
                "there is no case folder {}",
                folder.display()
            )));
        }
        let path = folder.join("reference.json");
        let document = read_json(&path)?;
        let in_file = |message: String| Error::usage(format!("{}: {message}", path.display()));
        let field = |name: &str| {
            document
                .get(name)
                .ok_or_else(|| in_file(format!("there is no `{name}`")))
        };
        let call = field("call")?
            .as_object()
            .ok_or_else(|| in_file("`call` is no object".to_owned()))?;
        let seed = field("seed")?
            .as_u64()
            .ok_or_else(|| in_file("`seed` is no unsigned integer".to_owned()))?;
        let text = |name: &str| {
            document
                .get(name)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        let (requests, is_batch) = requests_of(call, seed).map_err(in_file)?;
        let model = folder.join("model");
        if !model.is_dir() {
            return Err(Failure::new(
                FailureCode::InvalidModel,
                format!("the case has no checkpoint folder {}", model.display()),
            )
            .into());
        }
        Ok(Self {
            name: text("case"),
            family: text("family"),
            model,
            requests,
            is_batch,
            bf16_error: bf16_error_of(&document).map_err(in_file)?,
            reference: tensor_file::read(&folder.join("reference.safetensors"))?,
        })
    }

    /// The initial latents of request `request_idx`, as the reference gave them.
    ///
    /// # Errors
    /// The reference has none, or not one row per request.
    pub(crate) fn latents_of(&self, request_idx: usize) -> Result<NamedTensor, Error> {
        let n_requests = self.requests.len();
        self.reference
            .get("latents.init")
            .and_then(|latents| part(latents, request_idx, n_requests))
            .ok_or_else(|| {
                Error::usage(format!(
                    "reference.safetensors has no `latents.init` with rows for {n_requests} prompt(s)"
                ))
            })
    }
}

/// Absent in cases that were made without it.
fn bf16_error_of(document: &Value) -> Result<BTreeMap<String, f64>, String> {
    let Some(value) = document.get("bf16_error") else {
        return Ok(BTreeMap::new());
    };
    let wrong = || "`bf16_error` is no object of finite numbers".to_owned();
    let entries = value.as_object().ok_or_else(wrong)?;
    let entry = |(name, value): (&String, &Value)| {
        let error = value.as_f64().filter(|error| error.is_finite() && *error >= 0.0);
        Ok((name.clone(), error.ok_or_else(wrong)?))
    };
    entries.iter().map(entry).collect()
}

fn read_json(path: &Path) -> Result<Value, Error> {
    let unreadable = |cause: &dyn std::fmt::Display| {
        Error::usage(format!(
            "cannot read {}: {cause}; a case is a folder with model/, reference.json and reference.safetensors",
            path.display()
        ))
    };
    let file = File::open(path).map_err(|cause| unreadable(&cause))?;
    let mut text = String::new();
    file.take(MAX_JSON_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(|cause| unreadable(&cause))?;
    if text.len() as u64 > MAX_JSON_BYTES {
        return Err(unreadable(&format!("it has more than {MAX_JSON_BYTES} bytes")));
    }
    serde_json::from_str(&text).map_err(|cause| unreadable(&cause))
}

/// What the recorded call asks for, one request per prompt, and whether its prompt was a list.
///
/// Every argument is either understood, or known not to matter at its value, or refused by name.
fn requests_of(call: &Map<String, Value>, seed: u64) -> Result<(Vec<GenerateRequest>, bool), String> {
    let mut shared = GenerateRequest {
        seed,
        capture: Capture::Trace,
        ..GenerateRequest::new("")
    };
    let (prompts, is_batch) = match call.get("prompt") {
        Some(Value::String(prompt)) => (vec![prompt.clone()], false),
        Some(Value::Array(list)) if !list.is_empty() => {
            let prompts: Option<Vec<String>> = list
                .iter()
                .map(|prompt| prompt.as_str().map(str::to_owned))
                .collect();
            (prompts.ok_or("`prompt` has an element that is no string")?, true)
        }
        _ => return Err("`prompt` is neither a string nor a list of strings".to_owned()),
    };
    let mut negatives = vec![None; prompts.len()];
    for (name, value) in call {
        let refused = || format!("the call argument `{name}` = {value} is not understood");
        match name.as_str() {
            "prompt" => {}
            "prompt_2" | "prompt_3" if value.is_null() || Some(value) == call.get("prompt") => {}
            "negative_prompt" => negatives = negatives_of(value, prompts.len()).ok_or_else(refused)?,
            "negative_prompt_2" | "negative_prompt_3"
                if value.is_null() || Some(value) == call.get("negative_prompt") => {}
            "height" => shared.height = Some(number(value).ok_or_else(refused)?),
            "width" => shared.width = Some(number(value).ok_or_else(refused)?),
            "num_inference_steps" => shared.n_steps = Some(number(value).ok_or_else(refused)?),
            "guidance_scale" => shared.guidance = Some(value.as_f64().ok_or_else(refused)? as f32),
            "max_sequence_length" => shared.max_sequence_length = Some(number(value).ok_or_else(refused)?),
            "clip_skip" if !value.is_null() => shared.clip_skip = Some(number(value).ok_or_else(refused)?),
            "num_images_per_prompt" if value.as_u64() == Some(1) => {}
            "eta" | "guidance_rescale" if value.as_f64() == Some(0.0) => {}
            // They matter only where `skip_guidance_layers` is set, which falls to the last arm.
            "skip_layer_guidance_scale" | "skip_layer_guidance_start" | "skip_layer_guidance_stop" => {}
            // What a callback may see, not what is computed.
            "callback_on_step_end_tensor_inputs" | "output_type" | "return_dict" => {}
            // `sigmas`, `timesteps`, `skip_guidance_layers`, …: null is the default everywhere.
            _ if value.is_null() => {}
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

fn number(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| number.try_into().ok())
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
        requests_of(call.as_object().unwrap(), 1234)
    }

    #[test]
    fn the_cases_of_this_repository_are_read() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
        for (name, n_steps, latents_shape) in
            [("sd35m", 3, [1, 16, 16, 16]), ("emoji-dit", 20, [1, 4, 16, 16])]
        {
            let case = Case::read(&data.join(name)).unwrap();
            assert_eq!((case.name.as_str(), case.family.as_str()), (name, "sd3"));
            assert_eq!((case.requests.len(), case.is_batch), (1, false));
            assert_eq!(case.requests[0].n_steps, Some(n_steps));
            assert_eq!(case.latents_of(0).unwrap().shape, latents_shape);
            assert!(case.latents_of(1).is_err());
            assert!(case.bf16_error["image"] > 0.0);
        }
        let error = Case::read(&data.join("absent")).unwrap_err();
        assert_eq!(error.code(), "invalid_request");
        assert!(error.to_string().contains("absent"), "{error}");
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
            ("sigmas", json!([1.0, 0.5])),
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
