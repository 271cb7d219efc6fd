//! A reference case on disk: which call it records, and what the reference computed.
//!
//! The layout is described in the docstring of `scripts/reference/make_reference.py`.

use crate::case_call::{Inputs, requests_of};
use crate::compare::{Tensors, part};
use crate::error::Error;
use crate::tensor_file;
use denoised_types::{Failure, FailureCode, GenerateRequest, NamedTensor};
use serde_json::Value;
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
    /// Whether the call was given no latents: pipelines that start from a picture draw all noise themselves.
    pub(crate) is_from_seed_alone: bool,
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
        let tensors = folder.join("reference.safetensors");
        let mut reference = tensor_file::read(&tensors)?;
        let inputs = Inputs::take(&mut reference);
        let inputs = inputs.map_err(|message| Error::usage(format!("{}: {message}", tensors.display())))?;
        let (requests, is_batch) = requests_of(call, seed, &inputs).map_err(in_file)?;
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
            is_from_seed_alone: call.get("strength").is_some_and(|strength| !strength.is_null()),
            reference,
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
