//! The methods that every worker has, whatever its program.

use crate::sink::Reporter;
use denoised_link::LinkError;
use denoised_os::{now_ns, process};
use denoised_types::{Failure, FailureCode, Rank, RequestId};
use denoised_wire::{Event, WorkerMemory, WorkerStatus};

/// Name of the method that [`step_cost`] is.
pub(crate) const STEP_COST: &str = "step_cost";
/// Most steps that it reports.
const MAX_COST_STEPS: u32 = 2000;
/// How long it computes between two of them: long enough for an executor to fall asleep.
const COST_STEP_NS: u64 = 1_000_000;

/// Reports steps as a wave does, a millisecond apart (argument: how many, as text), and returns how many nanoseconds each report
/// took, as little-endian `u64`s.
pub(crate) fn step_cost(args: &[u8], reporter: &mut Reporter<'_>) -> Result<Vec<u8>, LinkError> {
    let n_steps = std::str::from_utf8(args)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(0);
    let n_steps = u32::min(n_steps, MAX_COST_STEPS);
    let mut times = Vec::with_capacity(n_steps as usize * 8);
    for n_done in 1..=n_steps {
        let end_ns = now_ns() + COST_STEP_NS;
        while now_ns() < end_ns {
            std::hint::spin_loop();
        }
        let begin_ns = now_ns();
        reporter.send_quietly(&Event::Step {
            request_id: RequestId(0),
            n_done,
            n_steps,
        })?;
        reporter.inbox.take_in();
        times.extend_from_slice(&(now_ns() - begin_ns).to_le_bytes());
    }
    Ok(times)
}

/// What the built-in methods report.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    pub(crate) rank: Rank,
    pub(crate) n_threads: Option<u32>,
    pub(crate) n_waves: u64,
    pub(crate) n_calls: u64,
}

/// Runs a built-in method: `echo` returns its arguments, `status` a [`WorkerStatus`], `memory` a [`WorkerMemory`]; [`step_cost`] is
/// apart, since it reports. `None` if the name is no built-in's.
pub(crate) fn call(counts: Counts, method: &str, args: &[u8]) -> Option<Result<Vec<u8>, Failure>> {
    match method {
        "echo" => Some(Ok(args.to_vec())),
        "memory" => Some(memory().map(|memory| memory.to_bytes())),
        "status" => Some(memory().map(|memory| {
            let Counts {
                rank,
                n_threads,
                n_waves,
                n_calls,
            } = counts;
            WorkerStatus {
                rank,
                pid: std::process::id(),
                n_threads,
                n_waves,
                n_calls,
                memory,
            }
            .to_bytes()
        })),
        _ => None,
    }
}

fn memory() -> Result<WorkerMemory, Failure> {
    match process::memory_of(std::process::id()) {
        Ok(memory) => Ok(WorkerMemory {
            rss_bytes: memory.rss_bytes,
            pss_bytes: memory.pss_bytes,
            private_bytes: memory.private_bytes,
        }),
        Err(error) => Err(Failure::new(FailureCode::Internal, error.to_string())),
    }
}
