//! `denoised bench memory`: what a world of workers holds, each shared page counted once.

use crate::args::BenchModelArgs;
use crate::error::Error;
use crate::progress::Progress;
use crate::{model_folder, world};
use denoised_engine::{Engine, EngineOptions, RequestPolicy, SubmitOptions};
use denoised_os::process;
use denoised_types::GenerateRequest;
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Between two looks at the processes.
const LOOK: Duration = Duration::from_millis(10);
/// For workers to end.
const CLOSE_BUDGET: Duration = Duration::from_secs(10);

/// The largest sum seen, with what each process had of it.
#[derive(Default)]
struct Peak {
    sum_bytes: u64,
    of_each: Vec<u64>,
}

/// Text and JSON of the report.
///
/// # Errors
/// The workers cannot start, or a picture fails.
pub(crate) fn report(args: &BenchModelArgs) -> Result<(String, Value), Error> {
    let model = model_folder::choose(args.model.as_deref())?;
    let executor = world::start(&args.world, &model, &Progress::new(false))?;
    let info = executor.world();
    let n_workers = usize::from(info.world_size);
    let mut pids = vec![std::process::id()];
    pids.extend(&info.pids);
    let engine = Engine::start(
        executor,
        Box::new(RequestPolicy::new(n_workers)),
        EngineOptions::default(),
    )?;
    let idle = look(&pids);
    let is_over = AtomicBool::new(false);
    let busy = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut peak = Peak::default();
            while !is_over.load(Ordering::Relaxed) {
                let now = look(&pids);
                if now.sum_bytes > peak.sum_bytes {
                    peak = now;
                }
                std::thread::sleep(LOOK);
            }
            peak
        });
        let made = make_one_each(args, &engine, n_workers);
        is_over.store(true, Ordering::Relaxed);
        let peak = watch.join().unwrap_or_default();
        made.map(|()| peak)
    });
    engine.close(CLOSE_BUDGET);
    let busy = busy?;
    let over_weights = busy.sum_bytes.saturating_sub(info.weight_bytes);
    let document = json!({
        "n_workers": n_workers,
        "weight_bytes": info.weight_bytes,
        "idle_pss_bytes": idle.sum_bytes,
        "peak_pss_bytes": busy.sum_bytes,
        "peak_pss_bytes_of_each": busy.of_each,
        "over_weights_bytes": over_weights,
    });
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let mut text = format!("{n_workers} worker(s), proportional set sizes summed over all processes\n\n");
    for (label, bytes) in [
        ("weights, held once", info.weight_bytes),
        ("all processes, idle", idle.sum_bytes),
        ("all processes, every worker making a picture", busy.sum_bytes),
        ("of that, beside the weights", over_weights),
    ] {
        let _ = writeln!(text, "{label:46} {:>10.1} MiB", mib(bytes));
    }
    let _ = writeln!(
        text,
        "{:46} {:>10.1} MiB",
        "the same for each worker",
        mib(over_weights) / n_workers as f64
    );
    Ok((text, document))
}

fn make_one_each(
    args: &BenchModelArgs,
    engine: &denoised_engine::EngineHandle,
    n: usize,
) -> Result<(), Error> {
    let mut handles = Vec::with_capacity(n);
    for seed in 0..n as u64 {
        let request = GenerateRequest {
            width: args.size.map(|(width, _)| width),
            height: args.size.map(|(_, height)| height),
            guidance: args.guidance,
            n_steps: Some(args.steps.max(1)),
            seed,
            ..GenerateRequest::new("a red apple")
        };
        handles.push(engine.submit(request, SubmitOptions::default())?);
    }
    for handle in handles {
        handle.wait()?;
    }
    Ok(())
}

/// What the processes have now; one that is gone has nothing.
fn look(pids: &[u32]) -> Peak {
    let of_each: Vec<u64> = pids
        .iter()
        .map(|&pid| process::memory_of(pid).map_or(0, |memory| memory.pss_bytes))
        .collect();
    Peak {
        sum_bytes: of_each.iter().sum(),
        of_each,
    }
}
