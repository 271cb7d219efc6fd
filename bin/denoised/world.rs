//! The workers of a command: which executor, which program, which options.

use crate::args::WorldArgs;
use crate::error::Error;
use crate::logs;
use crate::progress::Progress;
use denoised_executor::{Executor, ExecutorRegistry, MpOptions, WorkerProgram};
use denoised_types::{Failure, WorkerConfig, WorkerDevice};
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
    denoised_worker::check_device(&args.device, args.dtype())?;
    let config = WorkerConfig {
        model: absolute(model),
        device: args.device.clone(),
        dtype: args.dtype().to_owned(),
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
    for (rank, device) in world.devices.iter().enumerate() {
        tracing::info!("rank {rank}: {}", shown_devices(std::slice::from_ref(device)));
    }
    tracing::info!(
        "{} with {} worker(s) {:?} is ready, {} bytes of weights",
        world.kind,
        world.world_size,
        world.pids,
        world.weight_bytes
    );
    Ok(executor)
}

/// Name, model and dtype of the devices of a world, each kind once, and why they are not others: `cuda:0, cuda:1 (NVIDIA H200), bf16`.
pub(crate) fn shown_devices(devices: &[WorkerDevice]) -> String {
    let mut kinds: Vec<(&WorkerDevice, Vec<&str>)> = Vec::new();
    for device in devices {
        let is_alike = |(one, _): &&mut (&WorkerDevice, Vec<&str>)| {
            (&one.description, &one.dtype, &one.reason)
                == (&device.description, &device.dtype, &device.reason)
        };
        match kinds.iter_mut().find(is_alike) {
            Some((_, names)) if names.contains(&device.name.as_str()) => {}
            Some((_, names)) => names.push(&device.name),
            None => kinds.push((device, vec![&device.name])),
        }
    }
    let shown = kinds.iter().map(|(device, names)| {
        let reason = device
            .reason
            .as_ref()
            .map_or(String::new(), |reason| format!("; not CUDA: {reason}"));
        format!(
            "{} ({}), {}{reason}",
            names.join(", "),
            device.description,
            device.dtype
        )
    });
    shown.collect::<Vec<_>>().join("; ")
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

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, reason: Option<&str>) -> WorkerDevice {
        WorkerDevice {
            name: name.to_owned(),
            description: "NVIDIA H200".to_owned(),
            dtype: "bf16".to_owned(),
            reason: reason.map(str::to_owned),
        }
    }

    #[test]
    fn devices_alike_are_named_together() {
        let two = [
            device("cuda:0", None),
            device("cuda:1", None),
            device("cuda:1", None),
        ];
        assert_eq!(shown_devices(&two), "cuda:0, cuda:1 (NVIDIA H200), bf16");
        let one = [device("cpu", Some("there is no driver"))];
        assert_eq!(
            shown_devices(&one),
            "cpu (NVIDIA H200), bf16; not CUDA: there is no driver"
        );
        assert_eq!(shown_devices(&[]), "");
    }
}
