//! A wave on some ranks.

use super::{pieces::Pieces, requests::Requests};
use crate::{ExecutorEvent, Limits};
use denoised_link::{RankSet, Received};
use denoised_types::{CallId, Failure, FailureCode, Mode, Rank, RequestId, WaveId};
use denoised_wire::{Event, Wave};
use std::collections::VecDeque;

#[derive(Debug)]
pub(crate) struct WaveCall {
    wave_id: WaveId,
    pub(crate) mode: Mode,
    pub(crate) ranks: RankSet,
    /// Ranks that have ended it.
    pub(crate) ended: RankSet,
    /// Requests that began with it.
    pub(crate) joined: Vec<RequestId>,
    /// All requests that it names, in the order in which they are computed, those that it cancels first.
    pub(crate) members: Vec<RequestId>,
    n_cancelled: usize,
    pieces: Pieces,
    is_over: bool,
}

impl WaveCall {
    pub(crate) fn new(wave: &Wave, ranks: RankSet) -> Self {
        Self {
            wave_id: wave.wave_id,
            mode: wave.mode,
            ranks,
            ended: RankSet::EMPTY,
            joined: wave.joining.iter().map(|member| member.request_id).collect(),
            members: wave.cancelled.iter().copied().chain(wave.request_ids()).collect(),
            n_cancelled: wave.cancelled.len(),
            pieces: Pieces::default(),
            is_over: false,
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whether `rank` takes part and has not ended it.
    pub(crate) fn is_expected_of(&self, rank: Rank) -> bool {
        self.ranks.without(self.ended).contains(rank)
    }

    /// What `rank` is doing for it, in words.
    pub(crate) fn doing(&self, rank: Rank, call_id: CallId, requests: &Requests) -> String {
        let of = |request_id: &RequestId| requests.get(*request_id)?.doing(*request_id, rank, call_id);
        let doing = self.members.iter().find_map(of);
        doing.unwrap_or_else(|| "taking up a wave".to_owned())
    }

    /// Takes one event of `rank`; false if it makes no sense here.
    pub(crate) fn route(
        &mut self,
        (call_id, rank): (CallId, Rank),
        event: Event,
        received: &mut Received,
        limits: &Limits,
        requests: &mut Requests,
        out: &mut VecDeque<ExecutorEvent>,
    ) -> bool {
        if !self.is_expected_of(rank) {
            return false;
        }
        if let Event::Piece { of } = event {
            self.pieces.take(rank, of, received, limits.trace_bytes);
            return true;
        }
        if let Err(failure) = self.pieces.put(rank, received, limits.trace_bytes)
            && let Event::Tensor { request_id, .. } | Event::RequestDone { request_id, .. } = event
            && let Some(request) = requests.get_mut(request_id)
        {
            request.spoil(failure);
        }
        match event {
            Event::RequestStarted { request_id }
            | Event::Step { request_id, .. }
            | Event::Tensor { request_id, .. }
            | Event::RequestDone { request_id, .. } => {
                if !self.members.contains(&request_id) {
                    return false;
                }
                self.route_member(call_id, rank, request_id, event, received, limits, requests, out)
            }
            Event::CallDone { outcome } => {
                self.ended.insert(rank);
                self.rank_ended(call_id, rank, outcome.err(), requests, out);
                true
            }
            Event::Pong | Event::Dying(_) | Event::Piece { .. } => false,
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one half of `route`")]
    fn route_member(
        &mut self,
        call_id: CallId,
        rank: Rank,
        request_id: RequestId,
        event: Event,
        received: &mut Received,
        limits: &Limits,
        requests: &mut Requests,
        out: &mut VecDeque<ExecutorEvent>,
    ) -> bool {
        let Some(request) = requests.get_mut(request_id) else {
            // Its end was reported before this rank had its word.
            if matches!(event, Event::RequestDone { .. }) {
                requests.forget_abandoned(request_id, rank);
            }
            return true;
        };
        let is_first = request.is_first(rank);
        match event {
            Event::RequestStarted { .. } => {
                if request.begin() {
                    out.push_back(ExecutorEvent::RequestStarted { request_id, rank });
                }
            }
            Event::Step { n_done, n_steps, .. } if is_first => {
                request.note(call_id, n_done, n_steps);
                out.push_back(ExecutorEvent::Step {
                    request_id,
                    n_done,
                    n_steps,
                });
            }
            Event::Tensor { tensor, .. } if is_first => request.keep(tensor, received, limits),
            Event::RequestDone { outcome, .. } => match request.take(rank, outcome, received) {
                None => return false,
                Some(true) => requests.end(request_id, out),
                Some(false) => {}
            },
            Event::Step { .. }
            | Event::Tensor { .. }
            | Event::CallDone { .. }
            | Event::Pong
            | Event::Dying(_)
            | Event::Piece { .. } => {}
        }
        true
    }

    /// Remembers how far a member is, without reporting it.
    pub(crate) fn note(&self, (call_id, rank): (CallId, Rank), event: &Event, requests: &mut Requests) {
        if let Event::Step {
            request_id,
            n_done,
            n_steps,
        } = *event
            && self.members.contains(&request_id)
            && let Some(request) = requests.get_mut(request_id)
            && request.is_first(rank)
        {
            request.note(call_id, n_done, n_steps);
        }
    }

    /// One rank has ended the wave, with this failure or well.
    fn rank_ended(
        &mut self,
        call_id: CallId,
        rank: Rank,
        failure: Option<Failure>,
        requests: &mut Requests,
        out: &mut VecDeque<ExecutorEvent>,
    ) {
        let is_last = self.ranks.without(self.ended).is_empty();
        match &failure {
            Some(failure) => {
                for request_id in &self.members {
                    requests.fail(*request_id, failure, out);
                }
            }
            None => {
                for request_id in &self.members[..self.n_cancelled] {
                    requests.forget_abandoned(*request_id, rank);
                }
            }
        }
        if !is_last {
            return;
        }
        for request_id in &self.members {
            let Some(request) = requests.get(*request_id) else {
                continue;
            };
            // A rank of several has failed it while others go on: the next wave gives it up there.
            if request.has_failed() {
                requests.end(*request_id, out);
            } else if let Err(text) = request.goes_on(call_id) {
                let to_blame = request.silent().iter().next().unwrap_or(rank);
                let failure = Failure::new(FailureCode::Internal, text).on_rank(to_blame);
                requests.fail(*request_id, &failure, out);
            }
        }
        requests.leave(&self.members, call_id);
        if !std::mem::replace(&mut self.is_over, true) {
            out.push_back(ExecutorEvent::WaveDone {
                wave_id: self.wave_id,
            });
        }
    }

    /// Ends the wave and its requests with `failure`.
    pub(crate) fn fail(
        &mut self,
        failure: &Failure,
        requests: &mut Requests,
        out: &mut VecDeque<ExecutorEvent>,
    ) {
        for request_id in &self.members {
            requests.fail(*request_id, failure, out);
        }
        if !std::mem::replace(&mut self.is_over, true) {
            out.push_back(ExecutorEvent::WaveDone {
                wave_id: self.wave_id,
            });
        }
    }
}
