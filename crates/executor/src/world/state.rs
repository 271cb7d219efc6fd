//! What a world knows, under one lock.

use super::WorldStats;
use crate::{
    ExecutorError, ExecutorEvent,
    calls::{Call, Requests},
};
use denoised_link::RankSet;
use denoised_os::now_ns;
use denoised_types::{CallId, Failure, Rank, RequestId};
use std::{
    collections::{BTreeMap, VecDeque},
    thread::Thread,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Open,
    Closing,
    Closed,
}

pub(super) type Callback = Box<dyn FnOnce(&Failure) + Send>;

pub(super) struct State {
    pub(super) life: Life,
    pub(super) failure: Option<Failure>,
    pub(super) callbacks: Vec<Callback>,
    pub(super) calls: BTreeMap<CallId, Call>,
    pub(super) requests: Requests,
    /// For `wait_events`.
    pub(super) queue: VecDeque<ExecutorEvent>,
    pub(super) engine: Option<Thread>,
    pub(super) woken: bool,
    pub(super) has_pumper: bool,
    pub(super) parked: VecDeque<Thread>,
    pub(super) ranks: Vec<RankState>,
    pub(super) gone: RankSet,
    pub(super) stats: WorldStats,
}

/// What is known of a rank.
#[derive(Debug)]
pub(super) struct RankState {
    /// What it said of its own end.
    pub(super) dying: Option<Failure>,
    /// When its runner was last heard of.
    pub(super) heard_ns: u64,
    /// When its control thread was last heard of.
    pub(super) answered_ns: u64,
    /// Commands of the data lane that it has not answered, oldest first (W5). No more than fit the ring and the rank's own queue.
    pub(super) owed: VecDeque<Owed>,
    /// Somebody waited in vain for its answer.
    pub(super) is_doubted: bool,
    /// What the monitor asked it.
    pub(super) probe: Option<Probe>,
    /// The call that it seems to have swallowed, and since when that is so.
    pub(super) suspect: Option<(CallId, u64)>,
}

/// An answer that is owed.
#[derive(Debug)]
pub(super) struct Owed {
    pub(super) call_id: CallId,
    pub(super) sent_ns: u64,
    /// What it was, once its caller has given up and the call is forgotten.
    pub(super) given_up: Option<String>,
}

/// A question of the monitor under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe {
    pub(super) call_id: CallId,
    pub(super) sent_ns: u64,
}

impl State {
    pub(super) fn new(n_ranks: usize) -> Self {
        let now_ns = now_ns();
        let rank = || RankState {
            dying: None,
            heard_ns: now_ns,
            answered_ns: now_ns,
            owed: VecDeque::new(),
            is_doubted: false,
            probe: None,
            suspect: None,
        };
        Self {
            life: Life::Open,
            failure: None,
            callbacks: Vec::new(),
            calls: BTreeMap::new(),
            requests: Requests::default(),
            queue: VecDeque::new(),
            engine: None,
            woken: false,
            has_pumper: false,
            parked: VecDeque::new(),
            ranks: std::iter::repeat_with(rank).take(n_ranks).collect(),
            gone: RankSet::EMPTY,
            stats: WorldStats::default(),
        }
    }

    /// Whether answers may still come.
    pub(super) fn can_still_answer(&self) -> bool {
        self.failure.is_none() && self.life != Life::Closed
    }

    pub(super) fn check_open(&self) -> Result<(), ExecutorError> {
        if self.failure.is_none() && self.life == Life::Open {
            Ok(())
        } else {
            Err(self.why_not_open())
        }
    }

    pub(super) fn why_not_open(&self) -> ExecutorError {
        self.failure
            .clone()
            .map_or(ExecutorError::Closed, ExecutorError::Failed)
    }

    /// What `rank` is doing, in words.
    pub(super) fn doing(&self, rank: Rank) -> String {
        doing(&self.calls, &self.ranks, &self.requests, rank)
    }

    /// Whether `rank` owes an answer to this call.
    pub(super) fn is_owed(&self, rank: Rank, call_id: CallId) -> bool {
        let state = self.ranks.get(usize::from(rank.0));
        state.is_some_and(|state| state.owed.iter().any(|owed| owed.call_id == call_id))
    }

    /// Every thread that may wait here but the pumper, which is interrupted instead.
    pub(super) fn everybody(&self) -> Vec<Thread> {
        let waiters = self.calls.values().filter_map(Call::waiter);
        waiters.chain(&self.engine).cloned().collect()
    }

    /// Whether a request's end waits for the engine.
    pub(super) fn is_told_soon(&self, request_id: RequestId) -> bool {
        self.queue.iter().any(
            |event| matches!(event, ExecutorEvent::RequestDone { request_id: of, .. } if *of == request_id),
        )
    }

    /// Ends all waves, and the requests that wait for their next one, with `failure`.
    pub(super) fn end_waves(&mut self, failure: &Failure) {
        let Self {
            calls,
            queue,
            requests,
            ..
        } = self;
        calls.retain(|_, call| match call {
            Call::Wave(wave) => {
                wave.fail(failure, requests, queue);
                false
            }
            // These have a waiting thread, which sees what happened.
            Call::Method(_) | Call::Ping(_) => true,
            Call::Probe(_) => false,
        });
        requests.fail_all(failure, queue);
    }

    /// `ranks` owe an answer to this call.
    pub(super) fn owe(&mut self, ranks: RankSet, call_id: CallId) {
        let sent_ns = now_ns();
        for rank in ranks.iter() {
            if let Some(state) = self.ranks.get_mut(usize::from(rank.0)) {
                state.owed.push_back(Owed {
                    call_id,
                    sent_ns,
                    given_up: None,
                });
            }
        }
    }

    /// `rank` owes this answer no more.
    pub(super) fn settle(&mut self, rank: Rank, call_id: CallId) {
        let Some(state) = self.ranks.get_mut(usize::from(rank.0)) else {
            return;
        };
        // Answers come in the order of the calls, as long as nothing is wrong.
        if let Some(idx) = state.owed.iter().position(|owed| owed.call_id == call_id) {
            state.owed.remove(idx);
        }
    }

    /// Somebody has waited in vain for these ranks: the monitor asks them what they do.
    pub(super) fn doubt(&mut self, ranks: RankSet) {
        for rank in ranks.iter() {
            if let Some(state) = self.ranks.get_mut(usize::from(rank.0)) {
                state.is_doubted = true;
            }
        }
    }

    /// A caller has waited in vain for these ranks.
    pub(super) fn give_up(&mut self, ranks: RankSet, call_id: CallId, what: &str) {
        self.doubt(ranks);
        for rank in ranks.iter() {
            let owed = self
                .ranks
                .get_mut(usize::from(rank.0))
                .map(|state| &mut state.owed);
            if let Some(owed) = owed.and_then(|owed| owed.iter_mut().find(|owed| owed.call_id == call_id)) {
                owed.given_up = Some(what.to_owned());
            }
        }
    }
}

/// What `rank` is doing, in words: the oldest command that it owes an answer.
pub(super) fn doing(
    calls: &BTreeMap<CallId, Call>,
    ranks: &[RankState],
    requests: &Requests,
    rank: Rank,
) -> String {
    let idle = || "idle".to_owned();
    let Some(owed) = ranks
        .get(usize::from(rank.0))
        .and_then(|state| state.owed.front())
    else {
        return idle();
    };
    match calls.get(&owed.call_id) {
        Some(Call::Method(call)) => format!("method `{}`", call.method),
        Some(Call::Wave(wave)) => wave.doing(rank, owed.call_id, requests),
        Some(Call::Ping(_) | Call::Probe(_)) | None => owed.given_up.clone().unwrap_or_else(idle),
    }
}
