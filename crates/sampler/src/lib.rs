//! Noise schedules, solvers and torch's CPU noise, as host arithmetic: a step count goes in, timesteps and coefficients come out.
//!
//! Knows nothing of tensors, devices, families or files. Numbers agree with diffusers and torch to the last bit where the tests say
//! so; the order of operations and their precision follow those libraries on purpose.
#![forbid(unsafe_code)]

mod error;
mod flow_euler;
mod noise;
mod schedule;

pub use error::SamplerError;
pub use flow_euler::{FlowEuler, FlowEulerConfig};
pub use noise::TorchGenerator;
pub use schedule::{Sampler, Schedule};
