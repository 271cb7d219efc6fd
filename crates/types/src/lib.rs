//! Ids, requests, results and failures: plain data that every other crate may name.
//!
//! Knows nothing of I/O, threads, tensors or the wire; all fields are public because none has an invariant of its own.
//! What is checked, and by whom, is said at each field.
#![forbid(unsafe_code)]

mod failure;
mod ids;
mod model;
mod request;
mod result;

pub use failure::{ExitCode, Failure, FailureCode};
pub use ids::{CallId, Epoch, Rank, RequestId, WaveId};
pub use model::{ModelInfo, Task, VideoInfo, WorkerConfig, WorkerDevice};
pub use request::{Adapter, Capture, GenerateRequest, Mask, Mode, NamedTensor, TensorDType};
pub use result::{Generated, Image, PhaseTimes, Resolved};
