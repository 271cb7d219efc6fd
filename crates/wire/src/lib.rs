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
mod handshake;
mod header;
mod status;

mod codec;

pub use codec::{
    DecodeError, MAX_MESSAGE_BYTES, decode_boot_down, decode_boot_up, decode_command, decode_event,
    encode_boot_down, encode_boot_up, encode_command, encode_event, split_header,
};
pub use command::{Command, Member, Wave};
pub use event::{Event, GeneratedMeta, StartPhase};
pub use handshake::{BootDown, BootUp, FdUse, Hello, Lane, MethodInfo};
pub use header::{BlobIdx, HEADER_BYTES, Header, PROTOCOL_VERSION, TensorMeta};
pub use status::{Doing, MemberProgress, Profile, RankProgress, Span, Work, WorkerMemory, WorkerStatus};
