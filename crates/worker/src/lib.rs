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
//! With [`PipelineStart`] in place of `PainterStart` this is the worker that draws with a checkpoint.
//! ```no_run
//! use denoised_types::{Failure, GenerateRequest, Generated, Image, PhaseTimes, Rank, Resolved};
//! use denoised_worker::{Program, Start, StartContext, Started, WaveMember, WaveSink};
//!
//! struct PainterStart;
//!
//! impl Start for PainterStart {
//!     fn start(&mut self, _: &mut dyn StartContext) -> Result<(Box<dyn Program>, Started), Failure> {
//!         Ok((Box::new(Painter), Started::default()))
//!     }
//! }
//!
//! /// Paints one colour, in three steps.
//! struct Painter;
//!
//! impl Program for Painter {
//!     fn run_wave(&mut self, members: Vec<WaveMember>, sink: &mut dyn WaveSink) -> Result<(), Failure> {
//!         for member in members {
//!             let id = member.request_id;
//!             sink.started(id);
//!             let stopped = (1..=3).find_map(|n_done| {
//!                 let stopped = sink.stop_reason(id, member.deadline_ns);
//!                 if stopped.is_none() {
//!                     sink.step(id, n_done, 3);
//!                 }
//!                 stopped
//!             });
//!             sink.done(id, stopped.map_or_else(|| Ok(paint(&member.request)), Err));
//!         }
//!         Ok(())
//!     }
//!
//!     fn call(&mut self, _method: &str, _args: &[u8]) -> Option<Result<Vec<u8>, Failure>> {
//!         None
//!     }
//! }
//!
//! fn paint(request: &GenerateRequest) -> Generated {
//!     let resolved = Resolved {
//!         width: 8,
//!         height: 8,
//!         n_steps: 3,
//!         guidance: 1.0,
//!         seed: request.seed,
//!         sampler: "none".into(),
//!         warnings: Vec::new(),
//!     };
//!     let image = Image { width: 8, height: 8, rgb: vec![request.seed as u8; 8 * 8 * 3] };
//!     Generated { image, tensors: Vec::new(), resolved, rank: Rank(0), times: PhaseTimes::default() }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     // A program that is only a worker calls `run` first thing. One that is a supervisor too asks first:
//!     // its executor starts it again with `WORKER_ARG` as the first argument.
//!     if denoised_worker::is_worker_invocation() {
//!         return std::process::ExitCode::from(denoised_worker::run(&mut PainterStart) as u8);
//!     }
//!     std::process::ExitCode::SUCCESS
//! }
//! ```
//! The same program on a thread of the supervisor: hand the worker end of `denoised_link::local_link` to [`serve`].
#![forbid(unsafe_code)]

mod program;

mod run;
mod serve;

mod device;
mod load;
mod pipeline_program;

mod context;
mod control;
mod methods;
mod sink;

pub use denoised_link::WORKER_ARG;
/// What [`StartContext::phase`] reports.
pub use denoised_wire::StartPhase;
pub use device::{check_device, open_device};
pub use load::{Loaded, load_pipeline};
pub use pipeline_program::{PipelineProgram, PipelineStart};
pub use program::{Program, Start, StartContext, Started, WaveMember, WaveSink};
pub use run::{is_worker_invocation, run};
pub use serve::{Ending, serve};
