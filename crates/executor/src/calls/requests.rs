//! Requests that have joined a wave and have not ended. In step mode they stay resident on their ranks from wave to wave.
//!
//! Q1. A request is in here from its first wave until its end is reported, which happens once.
//! Q2. With several ranks, the first one's progress and result count; a failure of any is the request's.
//! Q3. A resident that ended here without the word of all its ranks is given up by the next wave that goes to them.

use crate::{ExecutorEvent, Limits, Output};
use denoised_link::{RankSet, Received};
use denoised_types::{CallId, Failure, FailureCode, Mode, NamedTensor, Rank, RequestId};
use denoised_wire::{GeneratedMeta, Member, TensorMeta, Wave};
use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
};

/// What a kept tensor counts beside its elements, name and shape.
const TENSOR_OVERHEAD_BYTES: usize = size_of::<NamedTensor>();

/// All requests of a world that are under way.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    open: BTreeMap<RequestId, OpenRequest>,
    /// Residents that ended here, and the ranks that may still hold them (Q3).
    abandoned: BTreeMap<RequestId, RankSet>,
}

/// Why a wave makes no sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unfit(pub(crate) String);

/// One request under way.
#[derive(Debug)]
pub(crate) struct OpenRequest {
    mode: Mode,
    ranks: RankSet,
    /// The last wave that was sent with it, and whether that one is still under way.
    wave: (CallId, bool),
    deadline_ns: u64,
    has_begun: bool,
    n_done: u32,
    n_steps: u32,
    /// The last wave in which its first rank finished a step of it.
    stepped_in: CallId,
    /// Ranks that have ended it.
    reported: RankSet,
    /// What the first rank said, or the first failure.
    outcome: Option<Result<Output, Failure>>,
    tensors: Vec<NamedTensor>,
    tensor_bytes: u64,
    /// Why its result cannot be whole.
    broken: Option<Failure>,
}

impl Requests {
    /// Checks a wave for these ranks, and leaves out of it what has ended meanwhile. `is_told_soon` says whether a request's end waits
    /// to be handed to the engine, which cannot know of it yet.
    pub(crate) fn admit(
        &self,
        wave: &mut Wave,
        ranks: RankSet,
        is_told_soon: impl Fn(RequestId) -> bool,
    ) -> Result<(), Unfit> {
        let wave_id = wave.wave_id;
        if wave.mode == Mode::Request && !(wave.continuing.is_empty() && wave.cancelled.is_empty()) {
            let text = "only waves in step mode continue or cancel requests";
            return Err(Unfit(format!("wave {wave_id}: {text}")));
        }
        let mut seen = std::collections::BTreeSet::new();
        let ids = wave.request_ids().chain(wave.cancelled.iter().copied());
        for request_id in ids {
            if !seen.insert(request_id) {
                return Err(Unfit(format!("wave {wave_id} names request {request_id} twice")));
            }
        }
        if let Some(member) = wave
            .joining
            .iter()
            .find(|m| self.open.contains_key(&m.request_id))
        {
            let id = member.request_id;
            let text = format!("wave {wave_id}: request {id} cannot join, it is under way already");
            return Err(Unfit(text));
        }
        for &request_id in wave.continuing.iter().chain(&wave.cancelled) {
            if let Some(request) = self.open.get(&request_id)
                && (request.ranks != ranks || request.mode != Mode::Step)
            {
                let (there, here) = (Listed(request.ranks), Listed(ranks));
                let text = match request.mode {
                    Mode::Step => format!("request {request_id} is resident on rank(s) {there}, not {here}"),
                    Mode::Request => format!("request {request_id} is in request mode"),
                };
                return Err(Unfit(format!("wave {wave_id}: {text}")));
            }
        }
        let is_open = |request_id: &RequestId| self.open.contains_key(request_id);
        if let Some(stranger) = wave
            .continuing
            .iter()
            .find(|id| !is_open(id) && !is_told_soon(**id))
        {
            let text = format!("wave {wave_id}: request {stranger} cannot go on, it is not resident");
            return Err(Unfit(text));
        }
        wave.continuing.retain(is_open);
        wave.cancelled.retain(is_open);
        if wave.mode == Mode::Step {
            let left = self
                .abandoned
                .iter()
                .filter(|(_, held)| !held.and(ranks).is_empty());
            wave.cancelled.extend(left.map(|(request_id, _)| *request_id));
        }
        Ok(())
    }

    /// Takes in the members of an admitted wave that is about to be sent.
    pub(crate) fn enter(&mut self, wave: &Wave, call_id: CallId, ranks: RankSet) {
        for member in &wave.joining {
            let request = OpenRequest::new(member, wave.mode, ranks, call_id);
            self.open.insert(member.request_id, request);
        }
        for request_id in wave.continuing.iter().chain(&wave.cancelled) {
            if let Some(request) = self.open.get_mut(request_id) {
                request.wave = (call_id, true);
            }
        }
    }

    /// Undoes [`Requests::enter`] of a wave that was not sent: nobody joined, and the residents are where they were.
    pub(crate) fn withdraw(&mut self, joined: &[RequestId], members: &[RequestId], call_id: CallId) {
        for request_id in joined {
            self.open.remove(request_id);
        }
        self.leave(members, call_id);
    }

    /// The wave is over for these.
    pub(crate) fn leave(&mut self, members: &[RequestId], call_id: CallId) {
        for request_id in members {
            if let Some(request) = self.open.get_mut(request_id)
                && request.wave.0 == call_id
            {
                request.wave.1 = false;
            }
        }
    }

    /// The request, while it is under way.
    pub(crate) fn get(&self, request_id: RequestId) -> Option<&OpenRequest> {
        self.open.get(&request_id)
    }

    pub(crate) fn get_mut(&mut self, request_id: RequestId) -> Option<&mut OpenRequest> {
        self.open.get_mut(&request_id)
    }

    /// `rank` holds nothing of this request any more.
    pub(crate) fn forget_abandoned(&mut self, request_id: RequestId, rank: Rank) {
        if let Some(held) = self.abandoned.get_mut(&request_id) {
            *held = held.without(RankSet::one(rank));
            if held.is_empty() {
                self.abandoned.remove(&request_id);
            }
        }
    }

    /// Reports a request's end, once.
    pub(crate) fn end(&mut self, request_id: RequestId, out: &mut VecDeque<ExecutorEvent>) {
        let Some(request) = self.open.remove(&request_id) else {
            return;
        };
        let held = request.silent();
        if request.mode == Mode::Step && !held.is_empty() {
            self.abandoned.insert(request_id, held);
        }
        let outcome = request.outcome.unwrap_or_else(|| {
            let text = "a request ended without an outcome";
            Err(Failure::new(FailureCode::Internal, text))
        });
        out.push_back(ExecutorEvent::RequestDone {
            request_id,
            outcome: outcome.map(|output| output.with_tensors(request.tensors)),
        });
    }

    /// Ends a request with this failure, unless it has one of its own.
    pub(crate) fn fail(
        &mut self,
        request_id: RequestId,
        failure: &Failure,
        out: &mut VecDeque<ExecutorEvent>,
    ) {
        if let Some(request) = self.open.get_mut(&request_id) {
            if !matches!(request.outcome, Some(Err(_))) {
                request.outcome = Some(Err(failure.clone()));
            }
            self.end(request_id, out);
        }
    }

    /// Ends every request that is left.
    pub(crate) fn fail_all(&mut self, failure: &Failure, out: &mut VecDeque<ExecutorEvent>) {
        let left: Vec<RequestId> = self.open.keys().copied().collect();
        for request_id in left {
            self.fail(request_id, failure, out);
        }
        self.abandoned.clear();
    }

    /// Ends the requests whose deadline has passed: those of a wave under way only after `grace_ns`, which their ranks have to say so
    /// themselves. `doing` tells what a rank does. Adds to `in_vain` which ranks were waited for, and for which wave; returns when the
    /// next request is due.
    pub(crate) fn expire(
        &mut self,
        now_ns: u64,
        grace_ns: u64,
        doing: impl Fn(&Self, Rank) -> String,
        in_vain: &mut Vec<(RankSet, CallId)>,
        out: &mut VecDeque<ExecutorEvent>,
    ) -> Option<u64> {
        let mut next_ns: Option<u64> = None;
        let mut due = Vec::new();
        for (request_id, request) in &self.open {
            if request.deadline_ns == 0 {
                continue;
            }
            let grace_ns = if request.wave.1 { grace_ns } else { 0 };
            let due_ns = request.deadline_ns.saturating_add(grace_ns);
            if now_ns < due_ns {
                next_ns = Some(next_ns.map_or(due_ns, |next| next.min(due_ns)));
            } else {
                due.push(*request_id);
            }
        }
        for request_id in due {
            let Some(request) = self.open.get(&request_id) else {
                continue;
            };
            let silent = request.silent();
            let (call_id, is_in_wave) = request.wave;
            let mut failure = if is_in_wave {
                in_vain.push((silent, call_id));
                let text = format!(
                    "the request's deadline passed and rank(s) {} did not answer",
                    Listed(silent)
                );
                Failure::new(FailureCode::DeadlineExceeded, text)
            } else {
                let text = "the request's deadline passed while it waited for its next step";
                let phase = format!("step {} of {}", request.n_done.saturating_add(1), request.n_steps);
                Failure::new(FailureCode::DeadlineExceeded, text).during(phase)
            };
            let mut ranks = silent.iter();
            if let (Some(rank), None, true) = (ranks.next(), ranks.next(), is_in_wave) {
                failure = failure.on_rank(rank).during(doing(self, rank));
            }
            self.fail(request_id, &failure, out);
        }
        next_ns
    }
}

/// Ranks for messages.
pub(super) struct Listed(pub(super) RankSet);

impl fmt::Display for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (idx, rank) in self.0.iter().enumerate() {
            let comma = if idx == 0 { "" } else { ", " };
            write!(f, "{comma}{rank}")?;
        }
        Ok(())
    }
}

impl OpenRequest {
    fn new(member: &Member, mode: Mode, ranks: RankSet, call_id: CallId) -> Self {
        Self {
            mode,
            ranks,
            wave: (call_id, true),
            deadline_ns: member.deadline_ns,
            has_begun: false,
            n_done: 0,
            n_steps: 0,
            stepped_in: CallId(0),
            reported: RankSet::EMPTY,
            outcome: None,
            tensors: Vec::new(),
            tensor_bytes: 0,
            broken: None,
        }
    }

    /// The first rank's progress and results count.
    pub(crate) fn is_first(&self, rank: Rank) -> bool {
        self.ranks.iter().next() == Some(rank)
    }

    /// Notes that it was begun; false if that was known.
    pub(crate) fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.has_begun, true)
    }

    /// Remembers how far the first rank is.
    pub(crate) fn note(&mut self, call_id: CallId, n_done: u32, n_steps: u32) {
        (self.n_done, self.n_steps, self.stepped_in) = (n_done, n_steps, call_id);
    }

    /// What `rank` does for it in this wave, in words; `None` if it has done its part.
    pub(crate) fn doing(&self, request_id: RequestId, rank: Rank, call_id: CallId) -> Option<String> {
        if !self.has_begun || self.reported.contains(rank) {
            return None;
        }
        let has_all_steps = self.n_steps > 0 && self.n_done >= self.n_steps;
        if self.n_steps == 0 {
            Some(format!("preparing request {request_id}"))
        } else if has_all_steps {
            Some(format!("decoding request {request_id}"))
        } else if self.mode == Mode::Step && self.stepped_in == call_id {
            None
        } else {
            Some(format!("step {} of {}", self.n_done + 1, self.n_steps))
        }
    }

    /// Whether the wave that is over with `call_id` has left it as a wave may: with one more step done, and more to do. `Err` says
    /// what is wrong.
    pub(crate) fn goes_on(&self, call_id: CallId) -> Result<(), &'static str> {
        if self.mode == Mode::Request || self.stepped_in != call_id {
            return Err("the worker ended the wave without an outcome for this request");
        }
        if self.n_done >= self.n_steps {
            return Err("the worker ended the last step's wave without an outcome for this request");
        }
        if !self.reported.is_empty() {
            return Err("the ranks do not agree whether this request has ended");
        }
        Ok(())
    }

    /// Ranks that have not ended it.
    pub(crate) fn silent(&self) -> RankSet {
        self.ranks.without(self.reported)
    }

    /// Whether a rank has failed it.
    pub(crate) fn has_failed(&self) -> bool {
        matches!(self.outcome, Some(Err(_)))
    }

    /// The result cannot be whole any more.
    pub(crate) fn spoil(&mut self, failure: Failure) {
        self.broken.get_or_insert(failure);
    }

    /// Keeps a traced tensor, up to the documented bound.
    pub(crate) fn keep(&mut self, tensor: TensorMeta, received: &mut Received, limits: &Limits) {
        let TensorMeta {
            name,
            dtype,
            shape,
            blob,
        } = tensor;
        let data = received.take_blob(blob).unwrap_or_default();
        let tensor = NamedTensor {
            name,
            dtype,
            shape,
            data,
        };
        if !tensor.is_consistent() {
            // Only the beginnings: a worker may send names and shapes of any length.
            let name: String = tensor.name.chars().take(100).collect();
            let (dtype, shape) = (tensor.dtype, &tensor.shape[..tensor.shape.len().min(8)]);
            let n_bytes = tensor.data.len();
            let text = format!("tensor `{name}` of {dtype:?} {shape:?} does not have {n_bytes} bytes");
            self.spoil(Failure::new(FailureCode::Protocol, text));
            return;
        }
        let n_bytes =
            tensor.data.len() + tensor.name.len() + size_of_val(&*tensor.shape) + TENSOR_OVERHEAD_BYTES;
        self.tensor_bytes = self.tensor_bytes.saturating_add(n_bytes as u64);
        if self.tensor_bytes > limits.trace_bytes {
            let text = format!(
                "the traced tensors exceed the limit of {} bytes",
                limits.trace_bytes
            );
            self.spoil(Failure::new(FailureCode::OutOfMemory, text));
            self.tensors = Vec::new();
            return;
        }
        if self.broken.is_none() {
            self.tensors.push(tensor);
        }
    }

    /// Takes one rank's outcome; `None` if it was ended there before, else whether all have.
    pub(crate) fn take(
        &mut self,
        rank: Rank,
        outcome: Result<GeneratedMeta, Failure>,
        received: &mut Received,
    ) -> Option<bool> {
        if !self.reported.insert(rank) {
            return None;
        }
        let outcome = outcome.and_then(|meta| match &self.broken {
            Some(broken) => Err(broken.clone()),
            None => Output::receive(meta, rank, received),
        });
        if !self.has_failed() && (outcome.is_err() || self.is_first(rank) || self.outcome.is_none()) {
            self.outcome = Some(outcome);
        }
        Some(self.silent().is_empty())
    }
}
