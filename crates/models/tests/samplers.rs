//! Samplers through the whole loop, on one small model, against diffusers' schedulers on the same (`scripts/reference/make_samplers.py`):
//! what they keep from step to step, and the noise that they add, which is drawn after the noise that a picture begins with.

mod support;

use denoised_checkpoint::SafeTensors;
use denoised_types::{Capture, GenerateRequest};
use support::{data, load, run};

const LIMIT: f64 = 1e-4;

#[test]
fn latents_are_those_of_diffusers_by_every_sampler() {
    let file = SafeTensors::open(&data("sd15").join("samplers.safetensors")).expect("the case has them");
    let pipeline = load(&data("sd15").join("model"));
    let names: Vec<String> = file.tensors().keys().cloned().collect();
    assert!(names.len() >= 20, "{} samplers", names.len());
    for name in names {
        let raw = file.raw(&name).expect("readable");
        let theirs = raw.bytes.chunks_exact(4).map(|bytes| {
            let bytes = bytes.try_into().expect("four bytes");
            f64::from(f32::from_le_bytes(bytes))
        });
        let theirs: Vec<f64> = theirs.collect();
        let request = GenerateRequest {
            width: Some(32),
            height: Some(24),
            n_steps: Some(6),
            guidance: Some(7.5),
            sampler: Some(name.clone()),
            seed: 7,
            capture: Capture::Trace,
            ..GenerateRequest::new("a cat")
        };
        let trace = run(&*pipeline, &request).expect("valid").trace;
        let last = trace
            .iter()
            .rfind(|tensor| tensor.name.starts_with("latents.step_"));
        let ours = last
            .and_then(|tensor| tensor.to_f32())
            .expect("latents in float32");
        assert_eq!(ours.len(), theirs.len(), "{name}");
        let square = |(ours, theirs): (&f32, &f64)| (f64::from(*ours) - theirs).powi(2);
        let difference: f64 = ours.iter().zip(&theirs).map(square).sum();
        let norm: f64 = theirs.iter().map(|x| x * x).sum();
        let error = (difference / norm).sqrt();
        assert!(error <= LIMIT, "{name}: relative L2 error {error:e}");
    }
}
