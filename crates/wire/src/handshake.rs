//! What an executor and a starting worker tell each other before there is a link, over the worker's own socket.
//!
//! Down: [`BootDown::Hello`] first, with the descriptors its `fds` lists; later at most one [`BootDown::SharedWeights`]. Control
//! commands (ping, cancel, stop) use the same socket once the worker is ready. Up: phases, at most one
//! [`BootUp::PublishShared`] (rank 0), then [`BootUp::Ready`] or [`BootUp::StartFailed`], which ends the handshake.
//! The socket stays open for the world's life: its end of file tells a worker that its executor is gone.

use crate::StartPhase;
use denoised_types::{Epoch, Failure, ModelInfo, Rank, WorkerConfig, WorkerDevice};
use serde::{Deserialize, Serialize};

/// What a descriptor sent with [`Hello`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FdUse {
    /// Ring of commands, read by all ranks.
    CommandRing,
    /// Arena of large command bodies, owned by the executor.
    CommandArena,
    /// This rank's ring of events.
    EventRing,
    /// This rank's arena of large event bodies.
    EventArena,
    /// The doorbell that wakes the executor, shared by all event rings.
    EventDoorbell,
}

/// The first message to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Incarnation of the world.
    pub epoch: Epoch,
    /// Who the worker is.
    pub rank: Rank,
    /// How many there are.
    pub world_size: u16,
    /// What to load.
    pub config: WorkerConfig,
    /// The descriptors that come with this message, in order.
    pub fds: Vec<FdUse>,
    /// Blobs up to this size travel inside the record, larger ones in an arena.
    pub inline_limit_bytes: u32,
    /// How long a waiting worker spins before it sleeps, in nanoseconds.
    pub spin_ns: u64,
    /// How long an event may wait for a full ring before the worker gives up, in milliseconds.
    pub event_send_limit_ms: u64,
}

/// Messages to a starting worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BootDown {
    /// Who you are and where the memory is.
    Hello(Hello),
    /// What rank 0 published; a descriptor comes along if `has_weights`. Not sent to rank 0.
    SharedWeights {
        /// Whether there is anything.
        has_weights: bool,
    },
}

/// Which order of messages a method is called in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Lane {
    /// In turn with waves; it may change what they compute.
    Data,
    /// At once, beside a forward; it only looks or sets flags.
    Control,
}

/// A method that a worker has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MethodInfo {
    /// What it is called by.
    pub name: String,
    /// Where it runs.
    pub lane: Lane,
}

/// Messages from a starting worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum BootUp {
    /// Start-up went on.
    Phase(StartPhase),
    /// Prepared weights for the other ranks; a descriptor comes along if `has_weights`. Rank 0 only.
    PublishShared {
        /// Whether there is anything.
        has_weights: bool,
    },
    /// Start-up is done. `model` is `None` for workers without a model (scripted ones).
    Ready {
        /// What was loaded.
        model: Option<ModelInfo>,
        /// What it computes with; `None` for programs without a device.
        device: Option<WorkerDevice>,
        /// Bytes of the prepared weights.
        weight_bytes: u64,
        /// The methods that it has, by name.
        methods: Vec<MethodInfo>,
    },
    /// Start-up failed; the process exits.
    StartFailed(Failure),
}
