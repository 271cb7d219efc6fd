//! What an executor tells its workers. A closed set: a new variant makes the compiler list the places.

use crate::{BlobIdx, TensorMeta};
use denoised_types::{GenerateRequest, Mode, Rank, RequestId, WaveId};
use serde::{Deserialize, Serialize};

/// One dispatch: member requests for one replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Wave {
    /// Its id.
    pub wave_id: WaveId,
    /// Whole generations or one step.
    pub mode: Mode,
    /// Ranks that carry it out; the others skip it.
    pub ranks: Vec<Rank>,
    /// Who takes part.
    pub members: Vec<Member>,
}

/// A request inside a wave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Its id.
    pub request_id: RequestId,
    /// What was asked. On the wire `request.latents` is `None`; the tensor travels as `latents`.
    pub request: GenerateRequest,
    /// Initial latents, if the request brought them.
    pub latents: Option<TensorMeta>,
    /// Absolute deadline on the host's monotonic clock in nanoseconds, 0 for none; checked between steps.
    pub deadline_ns: u64,
}

/// Messages down.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Data lane. Carry out a wave; answer with [`crate::Event::RequestDone`] per member, then [`crate::Event::CallDone`].
    Execute(Wave),
    /// Data lane. Run a worker method by name on `ranks`; each answers with [`crate::Event::CallDone`].
    Call {
        /// Registered name (`echo`, `status`, …).
        method: String,
        /// Its arguments, postcard unless the method says otherwise.
        args: BlobIdx,
        /// Who runs it.
        ranks: Vec<Rank>,
    },
    /// Control lane. Stop computing these requests of the wave with the header's call id at the next step (or do not begin them);
    /// each ends with `Cancelled` in its own `RequestDone`. May overtake its wave.
    Cancel {
        /// Which.
        requests: Vec<RequestId>,
    },
    /// Control lane. Answer with [`crate::Event::Pong`] at once, also while a forward runs.
    Ping,
    /// Control lane. Finish: no further wave is started, a running one ends at the next step; clean up, exit 0.
    Stop,
}
