//! Slow or hung (W5), looked after by the monitor's thread; and the requests' deadlines, by the engine's.
//!
//! H1. Slow is not dead: whatever a rank reports on the data lane, or says on the control lane that it got done, extends its time;
//!     silence does not.
//! H2. A rank that owes an answer on the data lane and gets nothing done for [`Limits::silence`] is hung. So is one that owes an answer
//!     and does not answer on the control lane for [`ANSWER_LIMIT`], and an idle one that does not for [`Limits::silence`].
//! H3. A rank that says that it does nothing, has begun a command and never answered it, has swallowed it, and is hung at once. It is
//!     asked when somebody has waited in vain for the answer, or half the silence is over.
//! H4. A caller that gives up ends its call and nothing else.

use super::{
    World,
    state::{Life, Owed, Probe, RankState, State, doing},
};
use crate::{
    Limits,
    calls::{Call, ProbeCall, Requests},
};
use denoised_os::{Deadline, now_ns};
use denoised_types::{CallId, Failure, FailureCode, Rank};
use denoised_wire::{Command, Doing, Lane, RankProgress};
use std::{sync::atomic::Ordering, time::Duration};

/// How long after a request's deadline the executor gives its worker to report it by itself.
const DEADLINE_GRACE: Duration = Duration::from_millis(500);
/// How long a rank that owes an answer may take for one on the control lane, whose thread does nothing else.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// How often an idle rank is asked for a sign of life.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// How often a rank is asked what it does while somebody has waited in vain.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// How long a rank must say of itself that it has swallowed a command.
const DOUBT: Duration = Duration::from_millis(100);
/// The monitor looks at least this often.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How soon it looks for the answer to a question, at first.
const ANSWER_LOOK: Duration = Duration::from_millis(10);

/// What the monitor found.
enum Found {
    /// This rank is hung.
    Hung(Failure),
    /// These are to be asked, and when to look next.
    Fine { ask: Vec<Rank>, next_ns: u64 },
}

impl World {
    /// Looks at every rank, and fences the world if one is hung. For the monitor's thread; returns when it is to look again.
    pub(crate) fn watch(&self) -> Deadline {
        if self.lock().may_have_news(&self.limits, now_ns()) {
            // A rank is judged by what it has sent, not by what somebody has read.
            self.drain_from_outside();
        }
        let found = self.lock().look(&self.limits, now_ns());
        match found {
            Found::Hung(failure) => {
                self.fence(failure);
                Deadline::after(LOOK_INTERVAL)
            }
            Found::Fine { ask, next_ns } => {
                for rank in ask {
                    self.probe(rank);
                }
                Deadline::at_ns(next_ns)
            }
        }
    }

    /// Asks a rank what it does, or for a sign of life if it has no words for that.
    fn probe(&self, rank: Rank) {
        let call_id = CallId(self.next_call.fetch_add(1, Ordering::Relaxed));
        let has_words = |method: &denoised_wire::MethodInfo| {
            method.name == crate::status::PROGRESS && method.lane == Lane::Control
        };
        let command = if self.info.methods.iter().any(has_words) {
            Command::ControlCall {
                method: crate::status::PROGRESS.to_owned(),
                args: Vec::new(),
                is_replying: true,
            }
        } else {
            Command::Ping
        };
        {
            let mut state = self.lock();
            state.calls.insert(call_id, Call::Probe(ProbeCall::new(rank)));
            let sent_ns = now_ns();
            if let Some(rank) = state.ranks.get_mut(usize::from(rank.0)) {
                rank.probe = Some(Probe { call_id, sent_ns });
            }
        }
        let message = self.encode(call_id, 0, &command);
        // A rank that cannot be reached does not answer.
        let _ = self.send_control(rank, &message);
    }

    /// Ends requests whose deadline their worker ignores; for the engine's thread. Returns when it wants to look again.
    pub(super) fn run_deadlines(&self) -> Option<Deadline> {
        let mut in_vain = Vec::new();
        let next_ns = {
            let mut state = self.lock();
            let State {
                calls,
                requests,
                ranks,
                queue,
                ..
            } = &mut *state;
            let doing = |requests: &Requests, rank| doing(calls, ranks, requests, rank);
            let grace_ns = nanoseconds(DEADLINE_GRACE);
            let next_ns = requests.expire(now_ns(), grace_ns, doing, &mut in_vain, queue);
            for (ranks, call_id) in &in_vain {
                state.give_up(*ranks, *call_id, "a wave");
            }
            next_ns
        };
        if !in_vain.is_empty() {
            self.call_monitor();
        }
        next_ns.map(Deadline::at_ns)
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl RankState {
    /// Since when the rank owes an answer and was not heard of; `None` if it owes nothing.
    fn quiet_since_ns(&self) -> Option<u64> {
        self.owed.front().map(|owed| owed.sent_ns.max(self.heard_ns))
    }

    /// When there was any sign of life.
    fn alive_ns(&self) -> u64 {
        self.heard_ns.max(self.answered_ns)
    }

    /// The command that a rank that says this of itself has swallowed.
    fn swallowed(&self, progress: &RankProgress) -> Option<&Owed> {
        let is_idle = progress.doing == Doing::Nothing && progress.n_waiting == 0;
        self.owed
            .front()
            .filter(|owed| is_idle && owed.call_id <= progress.last_call_id)
    }

    /// Whether to ask the rank now.
    fn is_to_be_asked(&self, limits: &Limits, now_ns: u64) -> bool {
        let silence_ns = nanoseconds(limits.silence);
        let since = |ns: u64| now_ns.saturating_sub(ns);
        if self.probe.is_some() {
            return false;
        }
        if self.is_doubted || self.suspect.is_some() {
            return true;
        }
        let Some(quiet_since_ns) = self.quiet_since_ns() else {
            return since(self.alive_ns()) >= nanoseconds(PING_INTERVAL).min(silence_ns / 2);
        };
        let in_vain = self.owed.iter().any(|owed| owed.given_up.is_some());
        let is_quiet = since(quiet_since_ns) >= silence_ns / 2;
        (in_vain || is_quiet) && since(self.answered_ns) >= nanoseconds(PROBE_INTERVAL).min(silence_ns / 8)
    }
}

impl State {
    /// Whether the event path may hold what changes a judgement.
    fn may_have_news(&self, limits: &Limits, now_ns: u64) -> bool {
        let quarter_ns = nanoseconds(limits.silence) / 4;
        self.can_still_answer()
            && self.ranks.iter().any(|rank| {
                let quiet = rank.quiet_since_ns().map(|ns| now_ns.saturating_sub(ns));
                rank.probe.is_some() || quiet.is_some_and(|quiet| quiet >= quarter_ns)
            })
    }

    fn look(&mut self, limits: &Limits, now_ns: u64) -> Found {
        let silence_ns = nanoseconds(limits.silence);
        let tick_ns = nanoseconds(LOOK_INTERVAL).min((silence_ns / 8).max(1_000_000));
        let mut next_ns = now_ns.saturating_add(tick_ns);
        let mut ask = Vec::new();
        if self.life != Life::Open || self.failure.is_some() {
            return Found::Fine { ask, next_ns };
        }
        for rank_idx in 0..self.ranks.len() {
            // At most 64 ranks.
            let rank = Rank(rank_idx as u16);
            if self.gone.contains(rank) {
                continue;
            }
            if let Some(failure) = self.hear_probe(rank_idx, limits, now_ns) {
                return Found::Hung(failure.on_rank(rank).during(self.doing(rank)));
            }
            let state = &self.ranks[rank_idx];
            if let Some(quiet_since_ns) = state.quiet_since_ns() {
                let end_ns = quiet_since_ns.saturating_add(silence_ns);
                if now_ns >= end_ns {
                    let text = format!("the worker has reported nothing for {:?}", limits.silence);
                    let failure = Failure::new(FailureCode::WorkerLost, text).on_rank(rank);
                    return Found::Hung(failure.during(self.doing(rank)));
                }
                next_ns = next_ns.min(end_ns);
            }
            if state.is_to_be_asked(limits, now_ns) {
                ask.push(rank);
            }
            if state.probe.is_some() || ask.last() == Some(&rank) {
                let sent_ns = state.probe.map_or(now_ns, |probe| probe.sent_ns);
                let is_fresh = now_ns.saturating_sub(sent_ns) < 5 * nanoseconds(ANSWER_LOOK);
                if is_fresh {
                    next_ns = next_ns.min(now_ns.saturating_add(nanoseconds(ANSWER_LOOK)));
                }
            }
        }
        Found::Fine { ask, next_ns }
    }

    /// Takes the answer to the monitor's question, if there is one; what is wrong with the rank, if something is.
    fn hear_probe(&mut self, rank_idx: usize, limits: &Limits, now_ns: u64) -> Option<Failure> {
        let state = &mut self.ranks[rank_idx];
        let Probe { call_id, sent_ns } = state.probe?;
        let is_answered = match self.calls.get(&call_id) {
            Some(Call::Probe(probe)) => probe.is_answered,
            _ => true,
        };
        if !is_answered {
            let limit = match state.owed.is_empty() {
                true => limits.silence,
                false => limits.silence.min(ANSWER_LIMIT),
            };
            if now_ns.saturating_sub(sent_ns.max(state.alive_ns())) < nanoseconds(limit) {
                return None;
            }
            let text = format!("the worker has answered nothing on its control lane for {limit:?}");
            return Some(Failure::new(FailureCode::WorkerLost, text));
        }
        state.probe = None;
        state.is_doubted = false;
        let progress = match self.calls.remove(&call_id) {
            Some(Call::Probe(probe)) => probe.progress,
            _ => None,
        };
        let before = state.suspect.take();
        let progress = progress?;
        state.heard_ns = state.heard_ns.max(progress.moved_ns.min(now_ns));
        let swallowed = state.swallowed(&progress)?.call_id;
        let suspect_since_ns = match before {
            Some((call_id, since_ns)) if call_id == swallowed => since_ns,
            _ => now_ns,
        };
        if now_ns.saturating_sub(suspect_since_ns) < nanoseconds(DOUBT) {
            // Asked once more: it may be between two things.
            state.suspect = Some((swallowed, suspect_since_ns));
            return None;
        }
        let text = format!(
            "the worker has swallowed a command: it is idle, has begun call {}, and never answered call {swallowed}",
            progress.last_call_id
        );
        Some(Failure::new(FailureCode::WorkerLost, text))
    }
}
