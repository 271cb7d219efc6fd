//! Text encoders, denoisers, autoencoders, the family table, and the one loop that turns a request into pixels.
//!
//! Knows nothing of processes, messages, waves or who is waiting; of devices it knows the [`denoised_tensor::Backend`] contract only.
#![forbid(unsafe_code)]

mod pipeline;

mod diffusion;
mod layout;
mod parts;
mod pixels;
mod trace;

mod families;

mod conditioning;
mod denoiser;
mod text;
mod vae;

#[cfg(test)]
mod drawn;

mod error;

pub use error::{ModelError, tensor_failure};
pub use families::open;
pub use pipeline::{Model, Pipeline, Running};
