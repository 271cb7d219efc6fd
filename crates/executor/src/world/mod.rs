//! A running world: calls in flight by id, requests under way, who waits for what, and the first cause of its failure.
//!
//! Knows nothing of how ranks live or die; `mp` and `uni` tell it who is gone.
//!
//! W1. There is no pump thread: whoever waits, pumps. One waiting thread at a time has the role of the pumper, sleeps on the event
//!     path and routes what arrives to everybody; the others are parked and take over when it leaves. So an answer to a lone
//!     caller costs one wake on each side, or none while both spin.
//! W2. Whoever changes something that the pumper may be waiting for interrupts it; whoever completes somebody else's call unparks
//!     that thread. Both are sticky, so neither is lost.
//! W3. Locks are taken in this order: gate of the data lane, events, state. None is held while user code runs.
//! W4. The first failure is latched together with failing everything that is in flight, in one step under one lock; nothing is
//!     accepted after it, so every request that joined a wave gets exactly one end.
//! W5. Every command of the data lane is owed an answer by each of its ranks until that has come, also after its caller has given
//!     up. Whether a rank is slow or hung is judged by what it owes, by the monitor's thread.

mod state;

mod asking;
mod sending;

mod failing;
mod routing;
mod waiting;
mod watching;

use crate::{Limits, WorldInfo, gate::Gate};
use denoised_link::{ControlSender, DataSender, EventReceiver, Evictor, ExecutorEnd, Interrupter, RankSet};
use denoised_os::Deadline;
use denoised_types::Failure;
use state::State;
use std::{
    fmt,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, AtomicU64},
    },
    time::Instant,
};

/// What was dropped, and what a world has done so far. For diagnosis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorldStats {
    /// Calls sent, waves and pings included.
    pub n_calls: u64,
    /// Events of calls that were over already: late answers.
    pub n_late_events: u64,
    /// Events without a header, of another epoch or rank, or that made no sense for their call.
    pub n_bad_events: u64,
    /// Steps that were not reported because the engine did not listen.
    pub n_dropped_steps: u64,
}

pub(crate) struct World {
    info: WorldInfo,
    limits: Limits,
    all: RankSet,
    gate: Gate<Box<dyn DataSender>>,
    control: Vec<Box<dyn ControlSender>>,
    events: Mutex<Box<dyn EventReceiver>>,
    /// Threads that want the events' lock from the pumper.
    n_wanting_events: AtomicU32,
    interrupter: Interrupter,
    evictor: Evictor,
    next_call: AtomicU64,
    state: Mutex<State>,
    /// Makes the monitor look: at a failure, whose callbacks and teardown are its work, or at a rank that is doubted.
    call_monitor: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl World {
    pub(crate) fn new(info: WorldInfo, limits: Limits, end: ExecutorEnd) -> Self {
        let ExecutorEnd {
            data,
            control,
            events,
            interrupter,
            evictor,
        } = end;
        Self {
            all: RankSet::all(info.world_size),
            state: Mutex::new(State::new(usize::from(info.world_size))),
            info,
            limits,
            gate: Gate::new(data),
            control,
            events: Mutex::new(events),
            n_wanting_events: AtomicU32::new(0),
            interrupter,
            evictor,
            next_call: AtomicU64::new(1),
            call_monitor: OnceLock::new(),
        }
    }

    /// Sets how the monitor is called; once.
    pub(crate) fn set_monitor(&self, call: Box<dyn Fn() + Send + Sync>) {
        // A second setter would be this crate's own mistake; the first stays.
        let _ = self.call_monitor.set(call);
    }

    fn call_monitor(&self) {
        if let Some(call) = self.call_monitor.get() {
            call();
        }
    }

    pub(crate) fn info(&self) -> &WorldInfo {
        &self.info
    }

    pub(crate) fn stats(&self) -> WorldStats {
        self.lock().stats
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under the lock but allocation.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("World");
        out.field("info", &self.info);
        if let Ok(state) = self.state.try_lock() {
            out.field("life", &state.life)
                .field("failure", &state.failure)
                .field("calls", &state.calls)
                .field("requests", &state.requests);
        }
        out.finish_non_exhaustive()
    }
}

fn moment(instant: Instant) -> Deadline {
    let left = instant.saturating_duration_since(Instant::now());
    if left.is_zero() {
        Deadline::PASSED
    } else {
        Deadline::after(left)
    }
}
