//! What can be said of a request without knowing the model. What needs the model is checked by the worker that loaded it.

use denoised_types::{Adapter, Failure, FailureCode, GenerateRequest, NamedTensor, TensorDType};

/// Longest sampler name that travels, in bytes.
const MAX_SAMPLER_BYTES: usize = 256;
/// Most adapters of one request.
const MAX_ADAPTERS: usize = 64;
/// Longest name of an adapter, in bytes.
const MAX_ADAPTER_NAME_BYTES: usize = 256;
/// Most dimensions of initial latents.
const MAX_LATENT_DIMS: usize = 8;

/// Refuses what no model could carry out, naming the field and the limit.
pub(crate) fn validate(request: &GenerateRequest) -> Result<(), Failure> {
    // Every field is named, so that a new one is not forgotten here.
    let GenerateRequest {
        prompt,
        negative_prompt,
        width,
        height,
        n_steps,
        guidance,
        seed: _,
        sampler,
        max_sequence_length,
        clip_skip: _,
        adapters,
        latents,
        capture: _,
    } = request;
    text("prompt", prompt)?;
    text("negative prompt", negative_prompt.as_deref().unwrap_or_default())?;
    for (name, side) in [("width", width), ("height", height)] {
        if *side == Some(0) {
            return Err(invalid(format!("a picture of {name} 0 cannot be made")));
        }
    }
    let max_steps = GenerateRequest::MAX_STEPS;
    if let Some(n_steps) = n_steps
        && !(1..=max_steps).contains(n_steps)
    {
        return Err(invalid(format!(
            "{n_steps} steps were asked for, 1 to {max_steps} are possible"
        )));
    }
    if let Some(guidance) = guidance
        && !guidance.is_finite()
    {
        return Err(invalid(format!(
            "the guidance scale is {guidance}, not a finite number"
        )));
    }
    if let Some(sampler) = sampler
        && sampler.len() > MAX_SAMPLER_BYTES
    {
        let n_bytes = sampler.len();
        return Err(invalid(format!("a sampler name of {n_bytes} bytes is unknown")));
    }
    if *max_sequence_length == Some(0) {
        return Err(invalid("the longest text is 0 tokens, at least 1 is needed"));
    }
    check_adapters(adapters)?;
    latents.as_ref().map_or(Ok(()), check_latents)
}

fn text(name: &str, text: &str) -> Result<(), Failure> {
    let (n_bytes, max_bytes) = (text.len(), GenerateRequest::MAX_PROMPT_BYTES);
    if n_bytes > max_bytes {
        return Err(invalid(format!(
            "the {name} has {n_bytes} bytes, at most {max_bytes} are accepted"
        )));
    }
    Ok(())
}

fn check_adapters(adapters: &[Adapter]) -> Result<(), Failure> {
    let n = adapters.len();
    if n > MAX_ADAPTERS {
        return Err(invalid(format!(
            "{n} adapters were asked for, at most {MAX_ADAPTERS} are possible"
        )));
    }
    for Adapter { name, scale } in adapters {
        let n_bytes = name.len();
        if !(1..=MAX_ADAPTER_NAME_BYTES).contains(&n_bytes) {
            return Err(invalid(format!(
                "an adapter's name has {n_bytes} bytes, 1 to {MAX_ADAPTER_NAME_BYTES} are possible"
            )));
        }
        if !scale.is_finite() {
            return Err(invalid(format!(
                "the scale of adapter `{name}` is {scale}, not a finite number"
            )));
        }
    }
    Ok(())
}

fn check_latents(latents: &NamedTensor) -> Result<(), Failure> {
    let NamedTensor {
        dtype, shape, data, ..
    } = latents;
    if *dtype != TensorDType::F32 {
        return Err(invalid(format!(
            "the initial latents are {dtype:?}, they must be F32"
        )));
    }
    if shape.is_empty() || shape.len() > MAX_LATENT_DIMS || data.is_empty() {
        let message = format!(
            "the initial latents have shape {shape:?}, 1 to {MAX_LATENT_DIMS} dimensions above 0 are possible"
        );
        return Err(invalid(message));
    }
    if !latents.is_consistent() {
        let n_bytes = data.len();
        return Err(invalid(format!(
            "the initial latents have shape {shape:?} and {n_bytes} bytes, which do not agree"
        )));
    }
    let mut values = data
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    if let Some(element_idx) = values.position(|value| !value.is_finite()) {
        return Err(invalid(format!(
            "element {element_idx} of the initial latents is not a finite number"
        )));
    }
    Ok(())
}

fn invalid(message: impl Into<String>) -> Failure {
    Failure::new(FailureCode::InvalidRequest, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut GenerateRequest)) -> String {
        let mut request = GenerateRequest::new("a cat");
        change(&mut request);
        let failure = validate(&request).expect_err("should be refused");
        assert_eq!(failure.code, FailureCode::InvalidRequest);
        failure.message
    }

    fn latents(shape: &[u64], values: &[f32]) -> Option<NamedTensor> {
        Some(NamedTensor::from_f32("latents", shape, values))
    }

    #[test]
    fn defaults_and_extremes_are_accepted() {
        let mut request = GenerateRequest::new("");
        validate(&request).unwrap();
        request.prompt = "x".repeat(GenerateRequest::MAX_PROMPT_BYTES);
        request.negative_prompt = Some(request.prompt.clone());
        request.n_steps = Some(GenerateRequest::MAX_STEPS);
        request.guidance = Some(-3.0);
        request.seed = u64::MAX;
        request.latents = latents(&[1, 2], &[f32::MAX, -0.0]);
        validate(&request).unwrap();
    }

    #[test]
    fn what_no_model_could_do_is_refused_with_the_numbers() {
        assert_eq!(
            refusal(|r| r.n_steps = Some(0)),
            "0 steps were asked for, 1 to 1000 are possible"
        );
        assert_eq!(
            refusal(|r| r.n_steps = Some(1001)),
            "1001 steps were asked for, 1 to 1000 are possible"
        );
        for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(refusal(|r| r.guidance = Some(scale)).contains("not a finite number"));
        }
        let long = "x".repeat(GenerateRequest::MAX_PROMPT_BYTES + 1);
        assert_eq!(
            refusal(|r| r.prompt = long.clone()),
            "the prompt has 131073 bytes, at most 131072 are accepted"
        );
        assert!(refusal(|r| r.negative_prompt = Some(long.clone())).starts_with("the negative prompt"));
        assert!(refusal(|r| r.sampler = Some(long.clone())).contains("131073 bytes"));
        assert!(refusal(|r| r.width = Some(0)).contains("width 0"));
        assert!(refusal(|r| r.height = Some(0)).contains("height 0"));
        assert!(refusal(|r| r.max_sequence_length = Some(0)).contains("0 tokens"));
    }

    #[test]
    fn latents_that_contradict_themselves_are_refused() {
        assert!(refusal(|r| r.latents = latents(&[2, 2], &[0.0; 3])).contains("12 bytes"));
        assert!(refusal(|r| r.latents = latents(&[u64::MAX, 8], &[0.0; 3])).contains("do not agree"));
        assert!(refusal(|r| r.latents = latents(&[], &[0.0])).contains("shape []"));
        assert!(refusal(|r| r.latents = latents(&[1, 0], &[])).contains("shape [1, 0]"));
        assert!(refusal(|r| r.latents = latents(&[1; 9], &[0.0])).contains("1 to 8 dimensions"));
        assert!(refusal(|r| r.latents = latents(&[2], &[0.0, f32::NAN])).starts_with("element 1 "));
        let ids = NamedTensor::from_i64("latents", &[1], &[0]);
        assert!(refusal(|r| r.latents = Some(ids)).contains("I64"));
    }
}
