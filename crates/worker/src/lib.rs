//! One rank: open the device, load the model, obey commands.
//!
//! Knows nothing of HTTP, scheduling or other ranks' lives.
//!
//! R1. Every command that is addressed to this rank is answered exactly once, also one that cannot be understood.
//! R2. The control lane has a thread of its own: ping, cancel and stop are obeyed while a forward runs.
//! R3. The data lane is emptied between steps and whenever an event waits for room, so that a busy rank holds nobody up.
//! R4. A panic in the program is a failure of the rank, reported with its text; a rank that failed does not go on.
//! R5. A worker process does not outlive its executor: the end of file on its socket ends it, whatever it is doing.
//!
//! # A worker program of your own
//! ```no_run
//! # struct MyStart;
//! # impl denoised_worker::Start for MyStart {
//! #     fn start(
//! #         &mut self,
//! #         _: &mut dyn denoised_worker::StartContext,
//! #     ) -> Result<(Box<dyn denoised_worker::Program>, denoised_worker::Started), denoised_types::Failure> {
//! #         unimplemented!()
//! #     }
//! # }
//! fn main() -> std::process::ExitCode {
//!     // A program that is only a worker calls `run` first thing. One that is a supervisor too asks first:
//!     // its executor starts it again with `WORKER_ARG` as the first argument.
//!     if denoised_worker::is_worker_invocation() {
//!         return std::process::ExitCode::from(denoised_worker::run(&mut MyStart) as u8);
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
pub use device::{check_device, open_device};
pub use load::{Loaded, load_pipeline};
pub use pipeline_program::{PipelineProgram, PipelineStart};
pub use program::{Program, Start, StartContext, Started, WaveMember, WaveSink};
pub use run::{is_worker_invocation, run};
pub use serve::{Ending, serve};
