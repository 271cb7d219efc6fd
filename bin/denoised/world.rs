//! The workers of a command: which executor, which program, which options.

use crate::args::WorldArgs;
use crate::error::Error;
use crate::logs;
use crate::progress::Progress;
use denoised_executor::{Executor, ExecutorRegistry, MpOptions, WorkerProgram};
use denoised_types::{Failure, WorkerConfig};
use denoised_worker::Registry;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Starts the workers that `args` ask for, each with the checkpoint in `model`, and waits until they are ready.
///
/// # Errors
/// `InvalidRequest` for an executor that is not there, or that cannot have so many workers; the device's and the dtype's refusal; what
/// went wrong in the workers, which are all gone then.
pub(crate) fn start(args: &WorldArgs, model: &Path, progress: &Progress) -> Result<Arc<dyn Executor>, Error> {
    // Refused here already, since it needs no worker to know.
    denoised_worker::check_device(&args.device, &args.dtype)?;
    let config = WorkerConfig {
        model: absolute(model),
        device: args.device.clone(),
        dtype: args.dtype.clone(),
        n_threads: args.threads,
        warm_up: !args.no_warm_up,
    };
    let registry = ExecutorRegistry::new(|end| {
        // How it ended is known to the executor.
        let _ = denoised_worker::serve(end, Registry::pipeline());
    });
    let mut options = MpOptions::new(args.workers, config);
    options.program = worker_program();
    options.stderr = progress.stderr_sink();
    let choice = args.executor.as_str().into();
    let executor = registry
        .start(&choice, options, &mut |rank, phase| progress.phase(rank, &phase))
        .map_err(Failure::from)?;
    let world = executor.world();
    tracing::info!(
        "{} with {} worker(s) {:?} is ready, {} bytes of weights",
        world.kind,
        world.world_size,
        world.pids,
        world.weight_bytes
    );
    Ok(executor)
}

/// This program, logging as much as this process.
fn worker_program() -> WorkerProgram {
    let mut program = WorkerProgram::default();
    if let Some(filter) = logs::filter_for_workers() {
        program.env.push((logs::VARIABLE.into(), filter.into()));
    }
    program
}

/// Workers may have another working folder.
fn absolute(model: &Path) -> PathBuf {
    std::path::absolute(model).unwrap_or_else(|_| model.to_owned())
}
