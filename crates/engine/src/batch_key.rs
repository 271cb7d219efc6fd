//! What two requests must have in common to be computed together, as one number for the policies.
//!
//! A promise of speed, not of correctness: workers look at the tensors themselves and compute unequal ones one after the other. So two
//! keys that are unequal without need (a limit that is spelled out and equals the default) cost a shared forward, and no more; and two
//! that are equal by chance of the hash cost nothing at all.
//!
//! | in the key | why |
//! |---|---|
//! | width, height | the latents' extents; one forward has one shape |
//! | guidance on or off | with guidance a request is two elements of the batch; its strength is applied to each by itself |
//! | frames | as width and height |
//! | sizes of pictures, a mask | what is edited goes into the forward beside the latents |
//! | longest text, number of text layers | the length of the conditioning, where the family pads to it |
//! | adapters and their strengths | a forward has one set of weights |
//! | capture | a traced request copies tensors to the host in every step, and others would wait for that |
//! | steps, noise levels, strength (request mode) | the wave lasts as long as its longest member |
//! | sampler (request mode) | as steps: samplers differ in evaluations per step |
//!
//! Prompts, seeds, given latents and CLIP layers are not: they change values, not shapes. In step mode neither steps nor sampler are,
//! for there requests share a single step, wherever each of them is.

use denoised_scheduler::BatchKey;
use denoised_types::{Adapter, GenerateRequest, Mode, ModelInfo};
use std::hash::{DefaultHasher, Hash, Hasher};

/// The key of a checked request. Without a model's defaults, what is left open is equal to itself only.
pub(crate) fn batch_key(request: &GenerateRequest, model: Option<&ModelInfo>, mode: Mode) -> BatchKey {
    // Every field is named, so that a new one is not forgotten here.
    let GenerateRequest {
        prompt: _,
        negative_prompt: _,
        width,
        height,
        n_frames,
        n_steps,
        guidance,
        guidance_2: _,
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
        latents: _,
        capture,
    } = request;
    // Equal on every call of one program, which is all that is asked of it.
    let mut hasher = DefaultHasher::new();
    let default_size = model.map(|model| model.default_size);
    width.or(default_size.map(|size| size.0)).hash(&mut hasher);
    height.or(default_size.map(|size| size.1)).hash(&mut hasher);
    let guidance = guidance.or(model.map(|model| model.default_guidance));
    guidance.map(|guidance| guidance > 1.0).hash(&mut hasher);
    true_guidance.map(|guidance| guidance > 1.0).hash(&mut hasher);
    let default_n_frames = model.and_then(|model| model.video.map(|video| video.default_n_frames));
    n_frames.or(default_n_frames).hash(&mut hasher);
    max_sequence_length.hash(&mut hasher);
    text_layers.len().hash(&mut hasher);
    for image in images {
        (image.width, image.height).hash(&mut hasher);
    }
    (images.len(), mask.is_some()).hash(&mut hasher);
    for Adapter { name, scale } in adapters {
        (name, scale.to_bits()).hash(&mut hasher);
    }
    adapters.len().hash(&mut hasher);
    std::mem::discriminant(capture).hash(&mut hasher);
    if mode == Mode::Request {
        let default_n_steps = model.map(|model| model.default_n_steps);
        n_steps.or(default_n_steps).hash(&mut hasher);
        let default_sampler = model.and_then(|model| model.samplers.first());
        sampler.as_ref().or(default_sampler).hash(&mut hasher);
        sigmas.len().hash(&mut hasher);
        strength.map(f32::to_bits).hash(&mut hasher);
    }
    BatchKey(hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use denoised_types::{Capture, Image};

    fn model() -> ModelInfo {
        ModelInfo {
            family: "sd3".into(),
            grid_px: 16,
            default_size: (64, 48),
            max_side_px: 1024,
            default_n_steps: 20,
            default_guidance: 7.0,
            samplers: vec!["flow-euler".into()],
            checkpoint_bytes: 0,
            ..ModelInfo::default()
        }
    }

    fn key(mode: Mode, change: impl FnOnce(&mut GenerateRequest)) -> BatchKey {
        let mut request = GenerateRequest::new("a cat");
        change(&mut request);
        batch_key(&request, Some(&model()), mode)
    }

    #[test]
    fn a_default_equals_its_value_spelled_out() {
        for mode in [Mode::Request, Mode::Step] {
            let spelled = key(mode, |r| {
                (r.width, r.height, r.n_steps) = (Some(64), Some(48), Some(20));
                (r.guidance, r.sampler) = (Some(3.0), Some("flow-euler".into()));
                (r.seed, r.prompt, r.clip_skip) = (7, "a dog".into(), Some(1));
            });
            assert_eq!(spelled, key(mode, |_| {}));
        }
    }

    #[test]
    fn what_shares_no_forward_has_another_key() {
        let adapter = |name: &str, scale| {
            vec![Adapter {
                name: name.into(),
                scale,
            }]
        };
        for mode in [Mode::Request, Mode::Step] {
            let keys = [
                key(mode, |_| {}),
                key(mode, |r| (r.width, r.height) = (Some(48), Some(64))),
                key(mode, |r| r.height = Some(64)),
                key(mode, |r| r.guidance = Some(1.0)),
                key(mode, |r| r.true_guidance = Some(2.0)),
                key(mode, |r| r.n_frames = Some(5)),
                key(mode, |r| r.text_layers = vec![1, 2]),
                key(mode, |r| r.images = vec![Image::picture(1, 2, vec![0; 6])]),
                key(mode, |r| r.images = vec![Image::picture(2, 1, vec![0; 6])]),
                key(mode, |r| r.max_sequence_length = Some(77)),
                key(mode, |r| r.capture = Capture::Trace),
                key(mode, |r| r.adapters = adapter("ink", 1.0)),
                key(mode, |r| r.adapters = adapter("ink", 0.5)),
                key(mode, |r| r.adapters = adapter("oil", 1.0)),
            ];
            for (idx, key) in keys.iter().enumerate() {
                assert!(!keys[..idx].contains(key), "{mode:?} {idx}");
            }
        }
    }

    #[test]
    fn steps_and_sampler_count_where_a_wave_is_whole_generations() {
        for (mode, is_equal) in [(Mode::Request, false), (Mode::Step, true)] {
            assert_eq!(key(mode, |r| r.n_steps = Some(4)) == key(mode, |_| {}), is_equal);
            assert_eq!(
                key(mode, |r| r.strength = Some(0.5)) == key(mode, |_| {}),
                is_equal
            );
            let other = key(mode, |r| r.sampler = Some("ddim".into()));
            assert_eq!(other == key(mode, |_| {}), is_equal);
        }
    }
}
