//! Noise schedules, solvers and torch's CPU noise, as host arithmetic: a step count goes in, timesteps and coefficients come out.
//!
//! Knows nothing of tensors, devices, families or files. Numbers agree with diffusers and torch to the last bit where the tests say
//! so; the order of operations and their precision follow those libraries on purpose.
#![forbid(unsafe_code)]

mod beta;
mod catalog;
mod config;
mod ddim;
mod ddpm;
mod deis;
mod discrete;
mod dpm;
mod dpm_single;
mod error;
mod euler;
mod euler_ancestral;
mod flow;
mod flow_euler;
mod heun;
mod kdpm2;
mod lcm;
mod levels;
mod linear;
mod lms;
mod multistep;
mod noise;
mod pndm;
mod schedule;
mod spacing;
mod unipc;

pub use catalog::{
    Kind, SamplerName, build_sampler, find_sampler, names_of, own_sampler, sampler_names, summarize_samplers,
};
pub use config::{
    BetaSchedule, FinalSigmas, FlowSigmas, InterpolationType, Mu, PredictionType, SamplerConfig, TimeShift,
    TimestepSpacing, TimestepType,
};
pub use error::SamplerError;
pub use noise::TorchGenerator;
pub use schedule::{Ask, Sampler, Schedule, Update};
