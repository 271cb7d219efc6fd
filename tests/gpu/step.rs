//! Denoise steps of a checkpoint, op by op and recorded.

use denoised_cuda::{CudaBackend, CudaOptions};
use denoised_tensor::{Backend, DType, PrepareInput};
use denoised_types::GenerateRequest;
use serde_json::{Value, json};
use std::{path::Path, rc::Rc, time::Instant};

/// What one way to run the steps gave.
struct Run {
    step_ms: Vec<f64>,
    peak_bytes: u64,
    n_recordings: usize,
    picture: Vec<u8>,
}

/// `{"measured", "eager_ms", "recorded_ms", "peak_bytes", "weight_bytes", "same_bits", "repeatable", ..}`
pub(crate) fn run(model: &Path, side: u32, n_steps: u32, small: bool) -> Value {
    let outcome = (|| {
        let eager = steps(model, side, n_steps, 0)?;
        let recorded = steps(model, side, n_steps, 8)?;
        let again = steps(model, side, n_steps, 8)?;
        Ok::<_, String>((eager, recorded, again))
    })();
    match outcome {
        Err(problem) => json!({"measured": false, "problem": problem}),
        Ok((eager, recorded, again)) => json!({
            "measured": !small,
            "model": model.file_name().map(|name| name.to_string_lossy()),
            "side_px": side,
            "steps": n_steps,
            "eager_ms": median(&eager.step_ms),
            "recorded_ms": median(&recorded.step_ms),
            "all_recorded_ms": recorded.step_ms,
            "peak_bytes": recorded.peak_bytes,
            "eager_peak_bytes": eager.peak_bytes,
            "was_recorded": recorded.n_recordings > 0 && eager.n_recordings == 0,
            "same_bits": eager.picture == recorded.picture,
            "repeatable": recorded.picture == again.picture,
        }),
    }
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

fn steps(model: &Path, side: u32, n_steps: u32, max_recordings: usize) -> Result<Run, String> {
    let text = |error: denoised_types::Failure| error.to_string();
    let cuda = Rc::new(
        CudaBackend::open(CudaOptions {
            dtype: DType::BF16,
            max_recordings,
            ..CudaOptions::default()
        })
        .map_err(|error| error.to_string())?,
    );
    let opened = denoised_models::open(model).map_err(|error| error.to_string())?;
    let input = PrepareInput::Build(opened.weight_source());
    let prepared = cuda
        .prepare(opened.weight_specs(), input, &mut |_, _| {})
        .map_err(|error| error.to_string())?;
    let backend: Rc<dyn Backend> = Rc::clone(&cuda) as Rc<dyn Backend>;
    let pipeline = opened
        .load(backend, prepared)
        .map_err(|error| error.to_string())?;
    let request = GenerateRequest {
        width: Some(side),
        height: Some(side),
        // Two to get going: the first runs op by op, the second is recorded.
        n_steps: Some(n_steps + 2),
        guidance: Some(5.0),
        negative_prompt: Some("blurred".to_owned()),
        seed: 1,
        sampler: pipeline.info().samplers.first().cloned(),
        ..GenerateRequest::new("a red apple")
    };
    let mut running = pipeline.begin(&request).map_err(text)?;
    let mut step_ms = Vec::new();
    for step_idx in 0..n_steps + 2 {
        let started = Instant::now();
        for outcome in pipeline.step(&mut [&mut *running]).map_err(text)? {
            outcome.map_err(text)?;
        }
        if step_idx >= 2 {
            step_ms.push(started.elapsed().as_secs_f64() * 1e3);
        }
    }
    let picture = pipeline.decode(&mut *running).map_err(text)?.rgb;
    Ok(Run {
        step_ms,
        peak_bytes: cuda.memory().peak_bytes,
        n_recordings: cuda.recordings().0,
        picture,
    })
}
