//! The methods that every worker has, whatever its program.

use crate::{ControlContext, Registry};
use denoised_os::process;
use denoised_types::{Failure, FailureCode};
use denoised_wire::{WorkerMemory, WorkerStatus};
use std::sync::atomic::Ordering;

/// Data lane: `echo` returns its arguments. Control lane: `status` returns a [`WorkerStatus`], `memory` a [`WorkerMemory`],
/// `progress` a [`denoised_wire::RankProgress`]; `profile_start` begins to record, `profile_stop` returns a
/// [`denoised_wire::Profile`].
pub(crate) fn register(registry: &mut Registry) {
    registry
        .data
        .insert("echo".into(), Box::new(|_, args| Ok(args.to_vec())));
    let control = &mut registry.control;
    control.insert(
        "memory".into(),
        Box::new(|context, _| memory(context).map(|memory| memory.to_bytes())),
    );
    control.insert("status".into(), Box::new(|context, _| status(context)));
    control.insert(
        "progress".into(),
        Box::new(|context, _| Ok(context.shared.activity.progress().to_bytes())),
    );
    control.insert(
        "profile_start".into(),
        Box::new(|context, _| context.shared.activity.start_recording().map(|()| Vec::new())),
    );
    control.insert(
        "profile_stop".into(),
        Box::new(|context, _| Ok(context.shared.activity.stop_recording()?.to_bytes())),
    );
}

fn status(context: &ControlContext<'_>) -> Result<Vec<u8>, Failure> {
    let activity = &context.shared.activity;
    let status = WorkerStatus {
        rank: context.rank(),
        pid: std::process::id(),
        n_threads: context.config().n_threads,
        n_waves: activity.n_waves.load(Ordering::Relaxed),
        n_calls: activity.n_calls.load(Ordering::Relaxed),
        memory: memory(context)?,
    };
    Ok(status.to_bytes())
}

fn memory(context: &ControlContext<'_>) -> Result<WorkerMemory, Failure> {
    let activity = &context.shared.activity;
    match process::memory_of(std::process::id()) {
        Ok(memory) => Ok(WorkerMemory {
            rss_bytes: memory.rss_bytes,
            pss_bytes: memory.pss_bytes,
            private_bytes: memory.private_bytes,
            device_used_bytes: activity.device_used_bytes.load(Ordering::Relaxed),
            device_peak_bytes: activity.device_peak_bytes.load(Ordering::Relaxed),
        }),
        Err(error) => Err(Failure::new(FailureCode::Internal, error.to_string())),
    }
}
