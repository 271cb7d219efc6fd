//! Message paths between an executor and its workers: a data lane and a control lane down, events up.
//!
//! Knows nothing of what a message says beyond its bytes and blobs, what a worker does, or how processes live and die.
//!
//! R1. The data lane is one order for any size: a message and its blobs arrive whole, in the order sent, once, on every rank they
//!     are addressed to. Large bodies lie in an arena; who receives them cannot tell.
//! R2. The control lane is an order of its own for each rank. One rank that does not listen delays nobody else.
//! R3. Every wait has a deadline, and while it waits it calls back regularly, so that nobody waits for somebody who waits for him.
//! R4. Every queue is bounded in bytes by [`LinkSpec`]; what can never fit is refused with both numbers, before anything is sent.
//! R5. What a peer writes is checked before it is used; damage is an error, never a panic.
#![forbid(unsafe_code)]

mod error;
mod message;
mod path;
mod spec;

mod local;
mod ring;
mod socket;

pub use error::{LinkError, SetupError};
pub use local::{LocalBoot, local_link};
pub use message::{Blob, RankSet, Received};
pub use path::{
    BootSender, ControlInput, ControlReceiver, ControlSender, DataReceiver, DataSender, EventReceiver,
    EventSender, Evictor, ExecutorEnd, Idle, Interrupter, Waiting, WorkerEnd,
};
pub use ring::{RingWorld, attach};
pub use socket::{BootChannel, CONTROL_LIMIT_BYTES, INHERITED_NAME, WORKER_ARG};
pub use spec::{LinkSpec, MAX_WORLD_SIZE, SpinPolicy};
