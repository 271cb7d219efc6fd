//! The methods that every worker has, whatever its program.

use denoised_os::process;
use denoised_types::{Failure, FailureCode, Rank};
use denoised_wire::{WorkerMemory, WorkerStatus};

/// What the built-in methods report.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    pub(crate) rank: Rank,
    pub(crate) n_threads: Option<u32>,
    pub(crate) n_waves: u64,
    pub(crate) n_calls: u64,
}

/// Runs a built-in method: `echo` returns its arguments, `status` a [`WorkerStatus`], `memory` a [`WorkerMemory`]. `None` if the
/// name is no built-in's.
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
