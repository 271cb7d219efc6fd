//! Noise schedules, solvers and torch's CPU noise, as host arithmetic: a step count goes in, timesteps and coefficients come out.
//!
//! Knows nothing of tensors, devices, families or files. Numbers agree with diffusers and torch to the last bit where the tests say
//! so; the order of operations and their precision follow those libraries on purpose.
#![forbid(unsafe_code)]

mod ddim;
mod discrete;
mod error;
mod euler;
mod flow_euler;
mod noise;
mod schedule;
mod spacing;

pub use ddim::Ddim;
pub use discrete::{
    BetaSchedule, DiscreteConfig, FinalSigmas, InterpolationType, PredictionType, TimestepSpacing,
    TimestepType,
};
pub use error::SamplerError;
pub use euler::Euler;
pub use flow_euler::{FlowEuler, FlowEulerConfig};
pub use noise::TorchGenerator;
pub use schedule::{Ask, Sampler, Schedule, Update};
