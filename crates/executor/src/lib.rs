//! How a world of workers comes to exist, is addressed, fails and dies.
//!
//! Knows nothing of families, tensors, scheduling or HTTP.
//!
//! R1. Start is a transaction: either every rank is ready, or everything is undone and the error lists each rank.
//! R2. Failing has an order: latch the first cause, fail the pending calls, run callbacks, only then tear down.
//! R3. Every wait has a deadline. Nobody but this crate signals or reaps a worker.
//! R4. One thread drives [`Executor::wait_events`]; every other method may be called from any thread at any time.
//!
//! ```no_run
//! use denoised_executor::{Executor, MethodCall, MpExecutor, MpOptions};
//! use denoised_types::WorkerConfig;
//! use std::time::{Duration, Instant};
//!
//! let config =
//!     WorkerConfig { model: "model".into(), device: "cpu".into(), dtype: "f32".into(), n_threads: None, warm_up: true };
//! // Two more processes of this program, started with `WORKER_ARG` as their first argument: its `main` must begin with the lines
//! // that the head of `denoised_worker` shows, or they would start workers in turn.
//! let executor = MpExecutor::start(MpOptions::new(2, config), &mut |rank, phase| println!("rank {rank}: {phase}"))?;
//! let deadline = Instant::now() + Duration::from_secs(1);
//! for reply in executor.call(&MethodCall::new("echo", b"hello", deadline))? {
//!     assert_eq!(reply.bytes, b"hello");
//! }
//! executor.shutdown(Duration::from_secs(5));
//! # Ok::<(), denoised_executor::ExecutorError>(())
//! ```
#![forbid(unsafe_code)]

mod contract;
mod options;
mod output;
mod registry;
pub mod status;

mod hosted;
mod mp;
mod uni;

mod keeper;
mod start;
mod stderr;
mod stop;

mod calls;
mod gate;
mod world;

pub mod bench;

pub use contract::{
    Capabilities, Executor, ExecutorError, ExecutorEvent, Health, MethodCall, RankExit, RankReply, Ranks,
    ShutdownReport, Waker, WorldInfo,
};
/// What a [`ServeFn`] is given.
pub use denoised_link::WorkerEnd;
pub use denoised_link::{LinkSpec, SpinPolicy, WORKER_ARG};
/// What [`Executor::dispatch`] and [`Progress`] speak of.
pub use denoised_wire::{Lane, Member, MethodInfo, StartPhase, Wave};
pub use mp::MpExecutor;
pub use options::{Limits, MpOptions, StderrSink, TakeLine, UniOptions, WorkerProgram};
pub use output::Output;
pub use registry::{DEFAULT_EXECUTOR, ExecutorChoice, ExecutorRegistry, Factory, RegistryError, ServeFn};
pub use start::Progress;
pub use uni::UniExecutor;
pub use world::WorldStats;
