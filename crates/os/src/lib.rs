//! The operating system, and nothing else: the only crate that calls it beyond what `std` offers.
//!
//! Children and their exit status ([`child`]), memory without a name ([`memfd`]), mapped files
//! ([`mapfile`]), futexes ([`futex`]), sockets that carry descriptors ([`socket`]), signals
//! ([`signal`]), readiness of several descriptors ([`poll`]), time and cores ([`clock`], [`cpu`]),
//! how much memory may be taken and how much a process holds ([`memory_budget`], [`process`]).
//! Linux only (5.14 or newer: pidfd, `MADV_POPULATE_WRITE`).
//!
//! Knows nothing of messages, ranks, tensors or what any byte means.
//!
//! - Every wait takes a [`clock::Deadline`]; there is no wait for ever.
//! - Every descriptor is close-on-exec; a child gets exactly those its [`child::Spawn`] lists.
//! - Nothing here has a name in a file system, so nothing can be left behind.
//! - Nothing here logs or panics.

pub mod clock;
pub mod cpu;
mod error;
pub mod futex;

pub mod mapfile;
pub mod memfd;
pub mod memory_budget;
pub mod process;
pub mod stdio;

pub mod child;
pub mod poll;
pub mod signal;
pub mod socket;

pub use clock::{Deadline, now_ns};
pub use error::OsError;
