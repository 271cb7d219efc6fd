//! What can be said of a request without knowing the model. What needs the model is checked by the worker that loaded it.

use denoised_types::{Adapter, Failure, FailureCode, GenerateRequest, Image, Mask, NamedTensor, TensorDType};

/// Longest sampler name that travels, in bytes.
const MAX_SAMPLER_BYTES: usize = 256;
/// Most adapters of one request.
const MAX_ADAPTERS: usize = 64;
/// Longest name of an adapter, in bytes.
const MAX_ADAPTER_NAME_BYTES: usize = 256;
/// Most hidden layers of a text encoder that a request names.
const MAX_TEXT_LAYERS: usize = 64;
/// Largest side of a picture that a request brings.
const MAX_PICTURE_SIDE_PX: u32 = 8192;
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
        n_frames,
        n_steps,
        guidance,
        guidance_2,
        true_guidance,
        seed: _,
        sampler,
        sigmas,
        max_sequence_length,
        clip_skip: _,
        text_layers,
        images,
        mask,
        strength,
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
    if *n_frames == Some(0) {
        return Err(invalid("a video of 0 frames cannot be made"));
    }
    for (name, guidance) in [
        ("guidance scale", guidance),
        ("second guidance scale", guidance_2),
        ("true guidance scale", true_guidance),
    ] {
        if let Some(guidance) = guidance
            && !guidance.is_finite()
        {
            return Err(invalid(format!("the {name} is {guidance}, not a finite number")));
        }
    }
    check_sigmas(sigmas)?;
    if text_layers.len() > MAX_TEXT_LAYERS {
        let n = text_layers.len();
        return Err(invalid(format!(
            "{n} text layers were asked for, at most {MAX_TEXT_LAYERS} are possible"
        )));
    }
    check_pictures(images, mask.as_ref(), *strength)?;
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

fn check_sigmas(sigmas: &[f32]) -> Result<(), Failure> {
    let (n, max) = (sigmas.len(), GenerateRequest::MAX_STEPS as usize);
    if n > max {
        return Err(invalid(format!(
            "{n} noise levels were given, at most {max} are possible"
        )));
    }
    if let Some(sigma) = sigmas.iter().find(|sigma| !(sigma.is_finite() && **sigma > 0.0)) {
        return Err(invalid(format!(
            "a noise level is {sigma}, each must be a finite number above 0"
        )));
    }
    if let Some(pair) = sigmas.windows(2).find(|pair| pair[1] >= pair[0]) {
        return Err(invalid(format!(
            "noise level {} follows {}, each must be below the one before",
            pair[1], pair[0]
        )));
    }
    Ok(())
}

fn check_pictures(images: &[Image], mask: Option<&Mask>, strength: Option<f32>) -> Result<(), Failure> {
    let (n, max) = (images.len(), GenerateRequest::MAX_IMAGES);
    if n > max {
        return Err(invalid(format!(
            "{n} pictures were given, at most {max} are possible"
        )));
    }
    for (idx, image) in images.iter().enumerate() {
        let Image {
            width,
            height,
            n_frames,
            rgb,
        } = image;
        if *n_frames != 1 {
            return Err(invalid(format!(
                "picture {idx} has {n_frames} frames, it must have one"
            )));
        }
        check_extent(&format!("picture {idx}"), *width, *height, rgb.len(), 3)?;
    }
    if let Some(Mask { width, height, luma }) = mask {
        check_extent("the mask", *width, *height, luma.len(), 1)?;
        if images.is_empty() {
            return Err(invalid("a mask was given without the picture that it is for"));
        }
        let (image_width, image_height) = (images[0].width, images[0].height);
        if (*width, *height) != (image_width, image_height) {
            return Err(invalid(format!(
                "the mask is {width}x{height}, its picture is {image_width}x{image_height}: they must be of one size"
            )));
        }
    }
    if let Some(strength) = strength {
        if !(strength > 0.0 && strength <= 1.0) {
            return Err(invalid(format!(
                "the strength is {strength}, it must be above 0 and at most 1"
            )));
        }
        if images.is_empty() {
            return Err(invalid("a strength was given without a picture to start from"));
        }
    }
    Ok(())
}

fn check_extent(what: &str, width: u32, height: u32, n_bytes: usize, n_channels: u64) -> Result<(), Failure> {
    let sides = 1..=MAX_PICTURE_SIDE_PX;
    if !sides.contains(&width) || !sides.contains(&height) {
        return Err(invalid(format!(
            "{what} is {width}x{height} pixels, 1 to {MAX_PICTURE_SIDE_PX} each way are possible"
        )));
    }
    if u64::from(width) * u64::from(height) * n_channels != n_bytes as u64 {
        return Err(invalid(format!(
            "{what} is {width}x{height} pixels and has {n_bytes} bytes, which do not agree"
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
            assert!(refusal(|r| r.guidance_2 = Some(scale)).contains("second guidance scale"));
            assert!(refusal(|r| r.true_guidance = Some(scale)).contains("true guidance scale"));
            assert!(refusal(|r| r.sigmas = vec![1.0, scale]).contains("noise level"));
            assert!(refusal(|r| (r.images, r.strength) = (vec![dot()], Some(scale))).contains("strength"));
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

    fn dot() -> Image {
        Image::picture(1, 1, vec![1, 2, 3])
    }

    fn mask(width: u32, height: u32, n_bytes: usize) -> Option<Mask> {
        Some(Mask {
            width,
            height,
            luma: vec![255; n_bytes],
        })
    }

    #[test]
    fn pictures_and_masks_that_contradict_themselves_are_refused() {
        let mut request = GenerateRequest::new("");
        (request.images, request.mask, request.strength) = (vec![dot()], mask(1, 1, 1), Some(1.0));
        validate(&request).unwrap();
        assert!(refusal(|r| r.images = vec![Image::picture(2, 1, vec![0; 3])]).contains("3 bytes"));
        assert!(refusal(|r| r.images = vec![Image::picture(0, 1, vec![])]).contains("0x1 pixels"));
        let huge = Image::picture(u32::MAX, u32::MAX, vec![0; 3]);
        assert!(refusal(|r| r.images = vec![huge.clone()]).contains("1 to 8192"));
        assert!(refusal(|r| r.images = vec![dot(); 17]).contains("at most 16"));
        assert!(refusal(|r| r.mask = mask(1, 1, 1)).contains("without the picture"));
        assert!(refusal(|r| (r.images, r.mask) = (vec![dot()], mask(1, 2, 2))).contains("1x2"));
        assert!(refusal(|r| (r.images, r.mask) = (vec![dot()], mask(1, 1, 2))).contains("2 bytes"));
        assert!(refusal(|r| r.strength = Some(0.5)).contains("without a picture"));
        for strength in [0.0, -0.1, 1.1] {
            let message = refusal(|r| (r.images, r.strength) = (vec![dot()], Some(strength)));
            assert!(message.contains("above 0 and at most 1"), "{message}");
        }
    }

    #[test]
    fn noise_levels_must_fall() {
        assert!(refusal(|r| r.sigmas = vec![1.0, 1.0]).contains("below the one before"));
        assert!(refusal(|r| r.sigmas = vec![1.0, 0.0]).contains("above 0"));
        assert!(refusal(|r| r.sigmas = vec![0.5; 1001]).contains("1001 noise levels"));
        assert!(refusal(|r| r.n_frames = Some(0)).contains("0 frames"));
        assert!(refusal(|r| r.text_layers = vec![1; 65]).contains("65 text layers"));
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
