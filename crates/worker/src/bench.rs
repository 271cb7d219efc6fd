//! What reporting costs a worker, as a method that a program for measurements registers.

use crate::{MethodContext, Registry, RegistryError};
use denoised_os::now_ns;
use denoised_types::Failure;

/// Most steps that one call reports.
const MAX_STEPS: u32 = 2000;
/// How long it computes between two of them: long enough for an executor to fall asleep.
const STEP_NS: u64 = 1_000_000;

/// Adds the method `step_cost`: it reports steps as a wave does, a millisecond apart (argument: how many, as text), and returns how
/// many nanoseconds each report took, as little-endian `u64`s.
///
/// # Errors
/// There is a method of this name.
pub fn register(registry: Registry) -> Result<Registry, RegistryError> {
    registry.method("step_cost", step_cost)
}

fn step_cost(context: &mut MethodContext<'_>, args: &[u8]) -> Result<Vec<u8>, Failure> {
    let n_steps = std::str::from_utf8(args)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(0);
    let n_steps = u32::min(n_steps, MAX_STEPS);
    let mut times = Vec::with_capacity(n_steps as usize * 8);
    for n_done in 1..=n_steps {
        let end_ns = now_ns() + STEP_NS;
        while now_ns() < end_ns {
            std::hint::spin_loop();
        }
        let begin_ns = now_ns();
        context.progress(n_done, n_steps);
        times.extend_from_slice(&(now_ns() - begin_ns).to_le_bytes());
    }
    Ok(times)
}
