//! One rank: open the device, load the model, obey commands.
//!
//! Knows nothing of HTTP, scheduling or other ranks' lives.
#![forbid(unsafe_code)]

mod program;

pub use program::{Program, Start, StartContext, Started, WaveMember, WaveSink};
