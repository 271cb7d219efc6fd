//! Where an event goes: to the call that it answers.

use super::{
    World,
    state::{Life, State},
};
use crate::{Limits, calls::Call};
use denoised_link::Received;
use denoised_os::now_ns;
use denoised_types::{CallId, Failure, FailureCode, Rank};
use denoised_wire::{Event, HEADER_BYTES, Header, decode_event};

/// Most events that wait for the engine; steps beyond it are not reported (ends always are).
const MAX_QUEUED_EVENTS: usize = 65_536;

impl World {
    pub(super) fn route(&self, rank: Rank, received: Received) {
        let mut received = received;
        let Some((header, body)) = received.message.split_first_chunk::<HEADER_BYTES>() else {
            self.lock().stats.n_bad_events += 1;
            return;
        };
        let header = Header::from_bytes(header);
        if header.epoch != self.info.epoch || header.rank != rank {
            self.lock().stats.n_bad_events += 1;
            return;
        }
        // Of another version, too long or damaged: the header still says whose call it was to answer.
        let event = decode_event(&header, body);
        let event = event.unwrap_or_else(|error| {
            let text = format!("an event cannot be understood: {error}");
            Event::CallDone {
                outcome: Err(Failure::new(FailureCode::Protocol, text).on_rank(rank)),
            }
        });
        let mut state = self.lock();
        // What the control thread answers says nothing about the runner.
        let of_control = matches!(event, Event::Pong) || !state.is_owed(rank, header.call_id);
        let now_ns = now_ns();
        if let Some(rank) = state.ranks.get_mut(usize::from(rank.0)) {
            if of_control {
                rank.answered_ns = now_ns;
            } else {
                rank.heard_ns = now_ns;
            }
        }
        if let Event::Dying(failure) = event {
            let failure = if failure.phase.is_none() {
                failure.during(state.doing(rank))
            } else {
                failure
            };
            state.ranks[usize::from(rank.0)].dying = Some(failure.clone());
            // A rank that was told to stop may fail to clean up: that is in the report, not a failure of the world.
            if state.life == Life::Open {
                drop(state);
                self.fence(failure);
            }
            return;
        }
        state.route(header.call_id, rank, event, &mut received, &self.limits);
    }
}

impl State {
    fn route(&mut self, call_id: CallId, rank: Rank, event: Event, received: &mut Received, limits: &Limits) {
        if matches!(event, Event::CallDone { .. }) {
            self.settle(rank, call_id);
        }
        let Self {
            calls,
            requests,
            queue,
            stats,
            engine,
            ..
        } = self;
        let Some(call) = calls.get_mut(&call_id) else {
            stats.n_late_events += 1;
            return;
        };
        let n_queued = queue.len();
        let (is_over, is_known) = match call {
            Call::Method(call) => (false, call.route(rank, event, received, limits.trace_bytes)),
            Call::Ping(ping) => (false, ping.route(rank, &event)),
            Call::Probe(probe) => (false, probe.route(rank, &event, received)),
            Call::Wave(wave) if matches!(event, Event::Step { .. }) && n_queued >= MAX_QUEUED_EVENTS => {
                stats.n_dropped_steps += 1;
                wave.note((call_id, rank), &event, requests);
                return;
            }
            Call::Wave(wave) => {
                let is_known = wave.route((call_id, rank), event, received, limits, requests, queue);
                (wave.is_over(), is_known)
            }
        };
        if !is_known {
            stats.n_bad_events += 1;
        }
        let me = std::thread::current().id();
        // The pumper looks for itself after routing; a call's own thread may be parked.
        if call.is_answered()
            && let Some(waiter) = call.waiter()
            && waiter.id() != me
        {
            waiter.unpark();
        }
        if queue.len() > n_queued
            && let Some(engine) = engine
            && engine.id() != me
        {
            engine.unpark();
        }
        if is_over {
            calls.remove(&call_id);
        }
    }
}
