//! What an executor tells its workers. A closed set: a new variant makes the compiler list the places.

use crate::BlobIdx;
use denoised_types::{GenerateRequest, Mode, Rank, RequestId, WaveId};
use serde::{Deserialize, Serialize};

/// One dispatch: member requests for one replica. All ranks that carry it out see the same lists, so what they do agrees without
/// their asking each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Wave {
    /// Its id.
    pub wave_id: WaveId,
    /// Whole generations or one step.
    pub mode: Mode,
    /// Ranks that carry it out; the others skip it.
    pub ranks: Vec<Rank>,
    /// Requests that begin with this wave. In request mode these are all its members, and each ends with it.
    pub joining: Vec<Member>,
    /// Step mode: requests that an earlier wave began on these ranks and that do one more step in this one, before the joining ones.
    pub continuing: Vec<RequestId>,
    /// Step mode: requests that an earlier wave began and that are given up before anything of this wave is computed. Each ends with
    /// `Cancelled`; ids that have ended already are ignored. A wave may hold nothing else.
    pub cancelled: Vec<RequestId>,
    /// Names of all adapters that joining and continuing requests use.
    pub adapters: Vec<String>,
}

impl Wave {
    /// Every request that is computed in this wave, those that go on first.
    pub fn request_ids(&self) -> impl Iterator<Item = RequestId> + '_ {
        let joining = self.joining.iter().map(|member| member.request_id);
        self.continuing.iter().copied().chain(joining)
    }
}

/// A request inside a wave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Its id.
    pub request_id: RequestId,
    /// What was asked. On the wire its [`GenerateRequest::large_parts`] are empty.
    pub request: GenerateRequest,
    /// Where its large parts are, in their order.
    pub blobs: Vec<BlobIdx>,
    /// Absolute deadline on the host's monotonic clock in nanoseconds, 0 for none; checked between steps.
    pub deadline_ns: u64,
}

/// Messages down.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Data lane. Carry out a wave; answer with [`crate::Event::RequestDone`] per member that ends (in request mode: all of them), then
    /// [`crate::Event::CallDone`].
    Execute(Wave),
    /// Data lane. Run a worker method by name on `ranks`; each answers with [`crate::Event::CallDone`], without the result unless it is
    /// in `replying`.
    Call {
        /// Registered name (`echo`, `status`, …).
        method: String,
        /// Its arguments, postcard unless the method says otherwise.
        args: BlobIdx,
        /// Who runs it.
        ranks: Vec<Rank>,
        /// Whose result is wanted; among `ranks`.
        replying: Vec<Rank>,
    },
    /// Control lane. Run a worker method that is registered for this lane, also while a forward runs; answer with
    /// [`crate::Event::CallDone`].
    ControlCall {
        /// Registered name (`progress`, `profile_start`, …).
        method: String,
        /// Its arguments. A few kilobytes at most.
        args: Vec<u8>,
        /// Whether its result is wanted.
        is_replying: bool,
    },
    /// Control lane, request mode. Stop computing these requests of the wave with the header's call id at the next step (or do not
    /// begin them); each ends with `Cancelled` in its own `RequestDone`. May overtake its wave. In step mode waves say themselves who
    /// is cancelled, so that several ranks stop at the same step.
    Cancel {
        /// Which.
        requests: Vec<RequestId>,
    },
    /// Control lane. Answer with [`crate::Event::Pong`] at once, also while a forward runs.
    Ping,
    /// Control lane. Finish: no further wave is started, a running one ends at the next step; clean up, exit 0.
    Stop,
}
