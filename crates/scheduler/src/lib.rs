//! Which requests form the next wave, and when: pure policies over events.
//!
//! A [`Policy`] is told what happened and when ([`Event`], [`Millis`]) and answers with what to do ([`Action`]). It has no
//! clock, thread, lock or file, so a seed replays any history (`tests/histories.rs` does, by the hundred thousand events).
//! Knows nothing of prompts, pictures, workers' lives or how a wave travels.
//!
//! R1. Every submitted id ends exactly once: by [`Action::End`] while it waits, or by [`Event::MemberDone`] once dispatched.
//! R2. A replica carries at most one wave; it is free again at [`Event::WaveDone`], not earlier.
//! R3. What waits is bounded; beyond the bound a request is refused in the same call, with both numbers.
//! R4. Nothing joins a wave after its deadline, after its cancellation or after [`Event::Close`]; what was cancelled is in no further
//!     step. In step mode a wave that only gives requests up may follow a close.
//! R5. An event about something unknown changes nothing: a late or doubled report is harmless.
//!
//! A new policy is a new file beside `request` and `step`, and a test in `tests/histories.rs` that runs histories of it. One outside
//! needs nothing but what is public here (`denoised_engine::scheduler` to those who embed).
#![forbid(unsafe_code)]

mod request;
mod step;

mod replicas;
mod waiting;

pub use request::RequestPolicy;
pub use step::StepPolicy;

use denoised_types::{Failure, FailureCode, Mode, RequestId, WaveId};
use std::{fmt, num::NonZeroUsize};

/// The policy of a mode: at most `max_queued` requests wait, at most `max_batch` are computed together.
///
/// # Errors
/// [`FailureCode::InvalidRequest`] for a `max_batch` of 0.
pub fn policy(mode: Mode, max_queued: usize, max_batch: usize) -> Result<Box<dyn Policy>, Failure> {
    let max_batch = NonZeroUsize::new(max_batch).ok_or_else(|| {
        let message = "at most 0 requests may be computed together, at least 1 is needed";
        Failure::new(FailureCode::InvalidRequest, message)
    })?;
    Ok(match mode {
        Mode::Request => Box::new(RequestPolicy::new(max_queued).with_max_batch(max_batch)),
        Mode::Step => Box::new(StepPolicy::new(max_queued, max_batch)),
    })
}

/// Decides which requests run, where and when.
pub trait Policy: Send + fmt::Debug {
    /// Takes note of `event`, which happened at `now`, and says what to do, in this order. `now` never runs backwards.
    ///
    /// Requests whose deadline has come by `now` expire in every call, whatever the event.
    fn on_event(&mut self, now: Millis, event: Event) -> Vec<Action>;

    /// When an [`Event::Tick`] is due if nothing else happens before; `None` if no time passing changes anything.
    fn next_tick(&self) -> Option<Millis>;

    /// How its waves run.
    fn mode(&self) -> Mode;

    /// How much there is.
    fn load(&self) -> Load;
}

/// Milliseconds since an origin that the caller chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Millis(pub u64);

impl Millis {
    /// A moment that never comes.
    pub const NEVER: Self = Self(u64::MAX);

    /// The moment `wait_ms` later; [`Millis::NEVER`] on overflow.
    #[must_use]
    pub const fn plus(self, wait_ms: u64) -> Self {
        Self(self.0.saturating_add(wait_ms))
    }
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ms", self.0)
    }
}

/// What two requests must have in common to be computed together: shape of the picture, guidance on or off and so on, as the engine
/// sums it up. Policies only compare it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchKey(pub u64);

/// Position of a replica in its world, `0..n_replicas`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaIdx(pub u16);

impl fmt::Display for ReplicaIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A request came. Its id is new; an id that is waiting or running already is ignored.
    Submit {
        /// Which.
        request_id: RequestId,
        /// When it must have been dispatched; a request that still waits then expires.
        deadline: Millis,
        /// Requests with equal keys may be computed together.
        key: BatchKey,
    },
    /// Nobody wants this request any more.
    Cancel {
        /// Which.
        request_id: RequestId,
    },
    /// A request that a replica had begun ended, well or not.
    MemberDone {
        /// Which.
        request_id: RequestId,
    },
    /// A wave ended; its replica is free. In request mode every member has ended with it, in step mode those that have not go on in the
    /// next.
    WaveDone {
        /// Which.
        wave_id: WaveId,
    },
    /// A replica can take waves.
    ReplicaUp {
        /// Which.
        replica: ReplicaIdx,
    },
    /// A replica is gone, and the wave on it.
    ReplicaDown {
        /// Which.
        replica: ReplicaIdx,
    },
    /// Take nothing new; what waits still runs.
    Drain,
    /// Take nothing new, dispatch nothing more, end what waits, ask what runs to stop.
    Close,
    /// Time passed; see [`Policy::next_tick`].
    Tick,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Tell the request that it was admitted.
    Admitted {
        /// Which.
        request_id: RequestId,
        /// How many requests wait in front of it; 0 also for one that is dispatched at once.
        n_ahead: usize,
    },
    /// Send a wave to a replica.
    Dispatch {
        /// Growing, starting at 1.
        wave_id: WaveId,
        /// Where.
        replica: ReplicaIdx,
        /// Who takes part: in request mode requests that waited, in step mode also those that this replica has begun, in the order in
        /// which they joined. Not empty unless somebody is cancelled.
        members: Vec<RequestId>,
        /// Step mode: requests that this replica has begun and that it gives up before it computes anything; each still ends with its
        /// own [`Event::MemberDone`] in this wave.
        cancelled: Vec<RequestId>,
    },
    /// Request mode: ask the workers to stop computing these; each still ends with its own [`Event::MemberDone`].
    Stop {
        /// Which. Each id at most once in its life.
        request_ids: Vec<RequestId>,
    },
    /// The request ends here and is not dispatched (or not again).
    End {
        /// Which.
        request_id: RequestId,
        /// Why.
        reason: EndReason,
    },
}

/// Why a request ended without having run to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// As many wait as may wait.
    QueueFull {
        /// How many wait.
        n_queued: usize,
        /// How many may.
        max_queued: usize,
    },
    /// It came after [`Event::Drain`], or waited at [`Event::Close`].
    Closed,
    /// It was cancelled while it waited.
    Cancelled,
    /// Its deadline came while it waited.
    Expired,
    /// The replica that computed it is gone.
    ReplicaLost(ReplicaIdx),
}

/// How much there is to do and to do it with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that wait.
    pub n_queued: usize,
    /// Requests that are dispatched and have not ended.
    pub n_running: usize,
    /// Replicas that are up.
    pub n_replicas: usize,
    /// Replicas that are up and have no wave.
    pub n_idle: usize,
}
