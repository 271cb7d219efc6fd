//! `denoised bench step`: what one denoise step of a checkpoint costs, in this process, without messages.

use crate::args::BenchModelArgs;
use crate::error::Error;
use crate::model_folder;
use denoised_types::{Failure, FailureCode, GenerateRequest, WorkerConfig};
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::Instant;

/// Prompt of the measured request; its words do not change the work.
const PROMPT: &str = "a red apple";

/// Text and JSON of the report.
///
/// # Errors
/// The checkpoint cannot be loaded, or refuses the size or guidance.
pub(crate) fn report(args: &BenchModelArgs) -> Result<(String, Value), Error> {
    let model = model_folder::choose(args.model.as_deref())?;
    let config = WorkerConfig {
        model: model.clone(),
        device: args.world.device.clone(),
        dtype: args.world.dtype().to_owned(),
        n_threads: args.world.threads,
        warm_up: false,
    };
    let started = Instant::now();
    let loaded = denoised_worker::load_pipeline(&config)?;
    let load_s = started.elapsed().as_secs_f64();

    let request = GenerateRequest {
        width: args.size.map(|(width, _)| width),
        height: args.size.map(|(_, height)| height),
        guidance: args.guidance,
        n_steps: Some(args.steps.saturating_add(1)),
        ..GenerateRequest::new(PROMPT)
    };
    let pipeline = loaded.pipeline;
    let mut running = pipeline.begin(&request)?;
    let mut step_ms = Vec::new();
    for step_idx in 0..=args.steps {
        let started = Instant::now();
        let outcomes = pipeline.step(&mut [&mut *running])?;
        outcomes.into_iter().collect::<Result<(), Failure>>()?;
        // The first one meets cold memory and caches.
        if step_idx > 0 {
            step_ms.push(started.elapsed().as_secs_f64() * 1e3);
        }
    }
    step_ms.sort_by(f64::total_cmp);
    let (Some(&least), Some(&median)) = (step_ms.first(), step_ms.get(step_ms.len() / 2)) else {
        let nothing = Failure::new(FailureCode::InvalidRequest, "--steps must be at least 1");
        return Err(nothing.into());
    };
    let started = Instant::now();
    pipeline.decode(&mut *running)?;
    let decode_ms = started.elapsed().as_secs_f64() * 1e3;

    let resolved = running.resolved();
    let memory = loaded.backend.memory();
    let document = json!({
        "model": model_folder::name_of(&model),
        "device": loaded.device.name,
        "device_description": loaded.device.description,
        "dtype": loaded.device.dtype,
        "n_threads": loaded.backend.info().n_threads,
        "width": resolved.width,
        "height": resolved.height,
        "guidance": resolved.guidance,
        "step_ms": {"median": median, "min": least, "all": step_ms},
        "decode_ms": decode_ms,
        "load_s": load_s,
        "weight_bytes": loaded.weight_bytes,
        "peak_activation_bytes": memory.peak_bytes,
    });
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{} at {}x{}, guidance {}, {} thread(s) on {} ({}), {}\n",
        model_folder::name_of(&model),
        resolved.width,
        resolved.height,
        resolved.guidance,
        loaded.backend.info().n_threads,
        loaded.device.name,
        loaded.device.description,
        loaded.device.dtype,
    );
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    for (label, value, unit) in [
        ("denoise step, median", median, "ms"),
        ("denoise step, least", least, "ms"),
        ("latents to picture", decode_ms, "ms"),
        ("loading", load_s, "s"),
        ("weights", mib(loaded.weight_bytes), "MiB"),
        ("activations at their peak", mib(memory.peak_bytes), "MiB"),
    ] {
        let _ = writeln!(text, "{label:28} {value:>10.2} {unit}");
    }
    Ok((text, document))
}
