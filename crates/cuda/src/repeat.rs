//! Recordings: what a body enqueues, captured once as a CUDA graph and replayed.

use denoised_tensor::{Result, Tensor};

/// Runs `body` itself.
pub(crate) fn repeat(
    inputs: &[&Tensor],
    body: &mut dyn FnMut(&[&Tensor]) -> Result<Vec<Tensor>>,
) -> Result<Vec<Tensor>> {
    body(inputs)
}
