//! One rank: open the device, load the model, obey commands.
//!
//! Knows nothing of HTTP, scheduling or other ranks' lives.
//!
//! R1. Every command that is addressed to this rank is answered exactly once, also one that cannot be understood.
//! R2. The control lane has a thread of its own: ping, cancel and stop are obeyed while a forward runs.
//! R3. The data lane is emptied between steps and whenever an event waits for room, so that a busy rank holds nobody up.
//! R4. A panic in the program is a failure of the rank, reported with its text; a rank that failed does not go on.
//! R5. A worker process does not outlive its executor: the end of file on its socket ends it, whatever it is doing. (The executor
//!     also has the kernel kill its workers when it dies, for those that are stopped.)
//!
//! # A worker program of your own
//! The worker that draws with a checkpoint, with methods of its own. An executor calls them by name, on the ranks it wants:
//! this is how training code reaches the model.
//! ```no_run
//! use denoised_types::{Failure, FailureCode};
//! use denoised_worker::{MethodContext, PipelineProgram, Registry, RegistryError};
//!
//! /// Runs in turn with waves, on the thread that computes them.
//! fn family(context: &mut MethodContext<'_>, _args: &[u8]) -> Result<Vec<u8>, Failure> {
//!     let program = context
//!         .program::<PipelineProgram>()
//!         .ok_or_else(|| Failure::new(FailureCode::Internal, "no pipeline"))?;
//!     Ok(program.pipeline().info().family.clone().into_bytes())
//! }
//!
//! fn registry() -> Result<Registry, RegistryError> {
//!     let mut n_rewards = 0_u64;
//!     Registry::pipeline()
//!         .method("family", family)?
//!         // What a method remembers from call to call is its closure's.
//!         .method("reward", move |_, _| {
//!             n_rewards += 1;
//!             Ok(n_rewards.to_le_bytes().to_vec())
//!         })?
//!         // Answered at once, also while a forward runs.
//!         .control_method("where", |context, _| {
//!             Ok(format!("rank {} of {}", context.rank(), context.world_size()).into_bytes())
//!         })?
//!         // A name that every worker has is taken on purpose or not at all.
//!         .replace("echo", |_, args| Ok(args.iter().rev().copied().collect()))
//! }
//!
//! fn main() -> Result<std::process::ExitCode, RegistryError> {
//!     // A program that is only a worker calls `run` first thing. One that is a supervisor too asks first:
//!     // its executor starts it again with `WORKER_ARG` as the first argument.
//!     if denoised_worker::is_worker_invocation() {
//!         return Ok(denoised_worker::run(registry()?).into());
//!     }
//!     Ok(std::process::ExitCode::SUCCESS)
//! }
//! ```
//! The same worker on a thread of the supervisor: `UniExecutor` and `ExecutorRegistry` (`denoised_executor`) take a function that hands
//! its argument and the registry to [`serve`].
//!
//! # A program of your own
//! In place of the pipeline: whatever turns requests into pictures. [`Registry::new`] takes what starts it.
//! ```
//! use denoised_types::{Failure, FailureCode, GenerateRequest, Generated, Image, PhaseTimes, Rank, RequestId, Resolved};
//! use denoised_worker::{Program, Registry, Start, StartContext, Started, StepWave, WaveMember, WaveSink};
//! use std::collections::HashMap;
//!
//! struct PainterStart;
//!
//! impl Start for PainterStart {
//!     fn start(&mut self, _: &mut dyn StartContext) -> Result<(Box<dyn Program>, Started), Failure> {
//!         Ok((Box::new(Painter::default()), Started::default()))
//!     }
//! }
//!
//! /// Paints one colour, in three steps.
//! #[derive(Default)]
//! struct Painter {
//!     /// Step mode: what is between two waves, and how many steps of it are done.
//!     residents: HashMap<RequestId, (GenerateRequest, u32)>,
//! }
//!
//! impl Program for Painter {
//!     fn run_wave(&mut self, members: Vec<WaveMember>, sink: &mut dyn WaveSink) -> Result<(), Failure> {
//!         for WaveMember { request_id, request, deadline_ns } in members {
//!             sink.started(request_id);
//!             let stopped = (1..=3).find_map(|n_done| {
//!                 let stopped = sink.stop_reason(request_id, deadline_ns);
//!                 if stopped.is_none() {
//!                     sink.step(request_id, n_done, 3);
//!                 }
//!                 stopped
//!             });
//!             sink.done(request_id, stopped.map_or_else(|| Ok(paint(&request)), Err));
//!         }
//!         Ok(())
//!     }
//!
//!     fn run_step(&mut self, wave: StepWave, sink: &mut dyn WaveSink) -> Result<(), Failure> {
//!         for request_id in wave.cancelled {
//!             self.residents.remove(&request_id);
//!             sink.done(request_id, Err(Failure::new(FailureCode::Cancelled, "cancelled")));
//!         }
//!         let mut members = wave.continuing;
//!         for WaveMember { request_id, request, .. } in wave.joining {
//!             sink.started(request_id);
//!             self.residents.insert(request_id, (request, 0));
//!             members.push(request_id);
//!         }
//!         for request_id in members {
//!             let Some((request, n_done)) = self.residents.get_mut(&request_id) else { continue };
//!             *n_done += 1;
//!             sink.step(request_id, *n_done, 3);
//!             if *n_done == 3 {
//!                 let picture = paint(request);
//!                 self.residents.remove(&request_id);
//!                 sink.done(request_id, Ok(picture));
//!             }
//!         }
//!         Ok(())
//!     }
//! }
//!
//! fn paint(request: &GenerateRequest) -> Generated {
//!     let resolved = Resolved {
//!         width: 8,
//!         height: 8,
//!         n_frames: 1,
//!         n_steps: 3,
//!         guidance: 1.0,
//!         seed: request.seed,
//!         sampler: "none".into(),
//!         warnings: Vec::new(),
//!     };
//!     let image = Image::picture(8, 8, vec![request.seed as u8; 8 * 8 * 3]);
//!     Generated { image, tensors: Vec::new(), resolved, rank: Rank(0), times: PhaseTimes::default() }
//! }
//!
//! let registry = Registry::new(PainterStart);
//! # assert_eq!(registry.methods()[0].name, "echo");
//! ```
#![forbid(unsafe_code)]

mod program;
mod registry;

mod run;
mod serve;
mod step_plan;

mod device;
mod load;
mod pipeline_program;

mod activity;
mod context;
mod control;
mod methods;
mod sink;

pub mod bench;

pub use denoised_link::WORKER_ARG;
/// What [`StartContext::phase`] reports.
pub use denoised_wire::StartPhase;
pub use device::{Opened, check_device, open_device};
pub use load::{Loaded, load_pipeline};
pub use pipeline_program::{PipelineProgram, PipelineStart};
pub use program::{Program, Stage, Start, StartContext, Started, StepWave, WaveMember, WaveSink};
pub use registry::{ControlContext, MethodContext, Registry, RegistryError};
pub use run::{is_worker_invocation, run};
pub use serve::{Ending, serve};
