//! Messages between an executor and its workers, and their codec.
//!
//! Knows nothing of how bytes travel (that is `link`) or what a command does (that is `worker`).
//!
//! R1. Every message starts with a [`Header`]: version, epoch, call, rank. Replies are matched by call id, never by order.
//! R2. Big bodies (tensors, pictures) travel beside the message as blobs; the message names them by [`BlobIdx`].
//! R3. Decoding is bounded and never panics; what cannot be decoded is answered, not skipped.
#![forbid(unsafe_code)]

mod command;
mod event;
mod header;

pub use command::{Command, Member, Wave};
pub use event::{Event, GeneratedMeta, StartPhase};
pub use header::{BlobIdx, Header, PROTOCOL_VERSION, TensorMeta};
