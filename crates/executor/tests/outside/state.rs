//! What is in flight, and what an event does to it.

use denoised_executor::{ExecutorError, ExecutorEvent, RankReply, Wave};
use denoised_link::Received;
use denoised_types::{
    CallId, Failure, FailureCode, Generated, Image, Mode, NamedTensor, Rank, RequestId, WaveId,
};
use denoised_wire::{BlobIdx, Event, GeneratedMeta, TensorMeta};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub(crate) type Callback = Box<dyn FnOnce(&Failure) + Send>;
type Ranks = BTreeSet<Rank>;
type Blobs = Vec<(BlobIdx, Vec<u8>)>;

#[derive(Default)]
pub(crate) struct State {
    pub(crate) failure: Option<Failure>,
    pub(crate) is_closing: bool,
    pub(crate) callbacks: Vec<Callback>,
    pub(crate) calls: BTreeMap<CallId, Call>,
    pub(crate) requests: BTreeMap<RequestId, Request>,
    /// Requests that ended here while these ranks may still hold them.
    abandoned: BTreeMap<RequestId, Ranks>,
    pub(crate) queue: VecDeque<ExecutorEvent>,
    pub(crate) is_woken: bool,
    /// Ranks whose worker has returned.
    pub(crate) gone: Ranks,
    /// Blobs that came in pieces, by call and rank.
    pieces: BTreeMap<(CallId, Rank), Blobs>,
}

pub(crate) enum Call {
    Method {
        replying: Ranks,
        silent: Ranks,
        answers: Vec<(Rank, Result<Vec<u8>, Failure>)>,
    },
    Wave(WaveCall),
    Ping {
        silent: Ranks,
    },
}

pub(crate) struct WaveCall {
    wave_id: WaveId,
    mode: Mode,
    pub(crate) silent: Ranks,
    pub(crate) members: Vec<RequestId>,
    cancelled: Vec<RequestId>,
}

pub(crate) struct Request {
    mode: Mode,
    ranks: Ranks,
    deadline_ns: u64,
    is_in_wave: bool,
    has_begun: bool,
    n_left: u32,
    stepped_in: CallId,
    reported: Ranks,
    outcome: Option<Result<Generated, Failure>>,
    tensors: Vec<NamedTensor>,
}

pub(crate) fn refused(text: String) -> ExecutorError {
    ExecutorError::Refused(Failure::new(FailureCode::InvalidRequest, text))
}

impl State {
    pub(crate) fn check_open(&self) -> Result<(), ExecutorError> {
        match &self.failure {
            Some(failure) => Err(ExecutorError::Failed(failure.clone())),
            None if self.is_closing => Err(ExecutorError::Closed),
            None => Ok(()),
        }
    }

    /// Whether this call is to be waited for no longer.
    pub(crate) fn is_settled(&self, call_id: CallId) -> bool {
        match self.calls.get(&call_id) {
            Some(Call::Method { silent, .. } | Call::Ping { silent }) => {
                silent.is_empty() || self.failure.is_some()
            }
            Some(Call::Wave(_)) | None => true,
        }
    }

    /// Checks a wave and takes it in.
    pub(crate) fn admit(
        &mut self,
        wave: &mut Wave,
        ranks: Ranks,
        call_id: CallId,
    ) -> Result<(), ExecutorError> {
        let mut seen = BTreeSet::new();
        let cancelled = wave.cancelled.iter().copied();
        if let Some(twice) = wave.request_ids().chain(cancelled).find(|id| !seen.insert(*id)) {
            return Err(refused(format!("the wave names request {twice} twice")));
        }
        if wave.mode == Mode::Request && !(wave.continuing.is_empty() && wave.cancelled.is_empty()) {
            return Err(refused("only waves in step mode go on with requests".into()));
        }
        for id in wave.joining.iter().map(|member| member.request_id) {
            if self.requests.contains_key(&id) {
                return Err(refused(format!(
                    "request {id} cannot join, it is under way already"
                )));
            }
        }
        for id in &wave.continuing {
            match self.requests.get(id) {
                None => return Err(refused(format!("request {id} cannot go on, it is not resident"))),
                Some(request) if request.ranks != ranks => {
                    let list =
                        |ranks: &Ranks| ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ");
                    let (there, here) = (list(&request.ranks), list(&ranks));
                    return Err(refused(format!(
                        "request {id} is resident on rank(s) {there}, not {here}"
                    )));
                }
                Some(_) => {}
            }
        }
        wave.cancelled.retain(|id| self.requests.contains_key(id));
        if wave.mode == Mode::Step {
            let held = |held: &Ranks| !held.is_disjoint(&ranks);
            let left = self.abandoned.iter().filter(|(_, ranks)| held(ranks));
            wave.cancelled.extend(left.map(|(id, _)| *id));
        }
        for member in &wave.joining {
            self.requests.insert(
                member.request_id,
                Request {
                    mode: wave.mode,
                    ranks: ranks.clone(),
                    deadline_ns: member.deadline_ns,
                    is_in_wave: true,
                    has_begun: false,
                    n_left: u32::MAX,
                    stepped_in: CallId(0),
                    reported: Ranks::new(),
                    outcome: None,
                    tensors: Vec::new(),
                },
            );
        }
        let members: Vec<RequestId> = wave.cancelled.iter().copied().chain(wave.request_ids()).collect();
        for id in &members {
            if let Some(request) = self.requests.get_mut(id) {
                request.is_in_wave = true;
            }
        }
        let call = WaveCall {
            wave_id: wave.wave_id,
            mode: wave.mode,
            silent: ranks,
            members,
            cancelled: wave.cancelled.clone(),
        };
        self.calls.insert(call_id, Call::Wave(call));
        Ok(())
    }

    /// Whether a request of a wave in request mode is still under way.
    pub(crate) fn is_cancellable(&self, wave: &WaveCall, id: RequestId) -> bool {
        wave.mode == Mode::Request && wave.members.contains(&id) && self.requests.contains_key(&id)
    }

    /// Latches the first failure and ends everything; false if it is not the first.
    pub(crate) fn fail(&mut self, failure: Failure) -> bool {
        if self.failure.is_some() || self.is_closing {
            return false;
        }
        self.end_all(&failure);
        self.failure = Some(failure.clone());
        self.queue.push_back(ExecutorEvent::WorldFailed(failure));
        true
    }

    pub(crate) fn end_all(&mut self, failure: &Failure) {
        let calls = std::mem::take(&mut self.calls);
        let mut waves = Vec::new();
        for (call_id, call) in calls {
            match call {
                Call::Wave(wave) => waves.push(wave),
                other => drop(self.calls.insert(call_id, other)),
            }
        }
        for wave in waves {
            for id in &wave.members {
                self.end(*id, Some(failure.clone()));
            }
            let wave_id = wave.wave_id;
            self.queue.push_back(ExecutorEvent::WaveDone { wave_id });
        }
        for id in self.requests.keys().copied().collect::<Vec<_>>() {
            self.end(id, Some(failure.clone()));
        }
    }

    /// Ends the requests between waves whose deadline has passed.
    pub(crate) fn expire(&mut self, now_ns: u64) {
        let is_due = |request: &Request| {
            request.deadline_ns != 0 && !request.is_in_wave && request.deadline_ns <= now_ns
        };
        let due: Vec<RequestId> = self
            .requests
            .iter()
            .filter(|(_, r)| is_due(r))
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            let text = "the request's deadline passed between two waves";
            self.end(id, Some(Failure::new(FailureCode::DeadlineExceeded, text)));
        }
    }

    /// Reports a request's end, with this failure unless it has an outcome of its own.
    fn end(&mut self, request_id: RequestId, failure: Option<Failure>) {
        let Some(request) = self.requests.remove(&request_id) else {
            return;
        };
        let held: Ranks = request.ranks.difference(&request.reported).copied().collect();
        if request.mode == Mode::Step && !held.is_empty() {
            self.abandoned.insert(request_id, held);
        }
        let outcome = match (request.outcome, failure) {
            (Some(Err(own)), _) => Err(own),
            (_, Some(failure)) => Err(failure),
            (Some(Ok(generated)), None) => Ok(Generated {
                tensors: request.tensors,
                ..generated
            }),
            (None, None) => Err(Failure::new(FailureCode::Internal, "no outcome")),
        };
        self.queue.push_back(ExecutorEvent::RequestDone {
            request_id,
            outcome: outcome.map(Into::into),
        });
    }

    /// Takes an event that answers `call_id`.
    pub(crate) fn route(&mut self, call_id: CallId, rank: Rank, event: Event, mut received: Received) {
        if !self.calls.contains_key(&call_id) {
            return;
        }
        if let Event::Piece { of } = event {
            let piece = received.take_blob(BlobIdx(0)).unwrap_or_default();
            let blobs = self.pieces.entry((call_id, rank)).or_default();
            match blobs.last_mut() {
                Some((last, bytes)) if *last == of => bytes.extend(piece),
                _ => blobs.push((of, piece)),
            }
            return;
        }
        for (blob, bytes) in self.pieces.remove(&(call_id, rank)).unwrap_or_default() {
            received.put_blob(blob, bytes);
        }
        match (self.calls.get_mut(&call_id), event) {
            (Some(Call::Ping { silent }), Event::Pong) => {
                silent.remove(&rank);
            }
            (
                Some(Call::Method {
                    replying,
                    silent,
                    answers,
                }),
                Event::CallDone { outcome },
            ) => {
                if !silent.remove(&rank) {
                    return;
                }
                let wanted = replying.contains(&rank);
                let answer = outcome.map(|blob| match blob {
                    Some(blob) if wanted => received.take_blob(blob).unwrap_or_default(),
                    _ => Vec::new(),
                });
                answers.push((rank, answer));
            }
            (Some(Call::Wave(_)), Event::CallDone { outcome }) => {
                self.wave_ended(call_id, rank, outcome.err())
            }
            (Some(Call::Wave(_)), event) => self.route_request(call_id, rank, event, received),
            _ => {}
        }
    }

    fn route_request(&mut self, call_id: CallId, rank: Rank, event: Event, mut received: Received) {
        let (Event::RequestStarted { request_id: id }
        | Event::Step { request_id: id, .. }
        | Event::Tensor { request_id: id, .. }
        | Event::RequestDone { request_id: id, .. }) = event
        else {
            return;
        };
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        let is_first = request.ranks.first() == Some(&rank);
        match event {
            Event::RequestStarted { request_id } => {
                let is_new = !std::mem::replace(&mut request.has_begun, true);
                let started = ExecutorEvent::RequestStarted { request_id, rank };
                self.queue.extend(is_new.then_some(started));
            }
            Event::Step {
                request_id,
                n_done,
                n_steps,
            } if is_first => {
                request.n_left = n_steps.saturating_sub(n_done);
                request.stepped_in = call_id;
                self.queue.push_back(ExecutorEvent::Step {
                    request_id,
                    n_done,
                    n_steps,
                });
            }
            Event::Tensor { tensor, .. } if is_first => {
                let TensorMeta {
                    name,
                    dtype,
                    shape,
                    blob,
                } = tensor;
                let data = received.take_blob(blob).unwrap_or_default();
                request.tensors.push(NamedTensor {
                    name,
                    dtype,
                    shape,
                    data,
                });
            }
            Event::RequestDone { request_id, outcome } => {
                request.reported.insert(rank);
                let outcome = outcome.map(|meta| generated(meta, rank, &mut received));
                if !matches!(request.outcome, Some(Err(_))) && (outcome.is_err() || is_first) {
                    request.outcome = Some(outcome);
                }
                if request.reported == request.ranks {
                    self.end(request_id, None);
                }
            }
            _ => {}
        }
    }

    fn wave_ended(&mut self, call_id: CallId, rank: Rank, failure: Option<Failure>) {
        let Some(Call::Wave(wave)) = self.calls.get_mut(&call_id) else {
            return;
        };
        wave.silent.remove(&rank);
        let is_over = wave.silent.is_empty();
        let (wave_id, members) = (wave.wave_id, wave.members.clone());
        for id in &wave.cancelled {
            if let Some(held) = self.abandoned.get_mut(id) {
                held.remove(&rank);
            }
        }
        self.abandoned.retain(|_, held| !held.is_empty());
        if let Some(failure) = failure {
            for id in &members {
                self.end(*id, Some(failure.clone()));
            }
        }
        if !is_over {
            return;
        }
        for id in members {
            let Some(request) = self.requests.get_mut(&id) else {
                continue;
            };
            let goes_on = request.mode == Mode::Step
                && request.stepped_in == call_id
                && request.n_left > 0
                && request.outcome.is_none();
            if goes_on {
                request.is_in_wave = false;
            } else {
                let text = "the worker ended the wave without an outcome for this request";
                self.end(id, Some(Failure::new(FailureCode::Internal, text).on_rank(rank)));
            }
        }
        self.calls.remove(&call_id);
        self.queue.push_back(ExecutorEvent::WaveDone { wave_id });
    }
}

fn generated(meta: GeneratedMeta, rank: Rank, received: &mut Received) -> Generated {
    Generated {
        image: Image {
            width: meta.width,
            height: meta.height,
            n_frames: 1,
            rgb: received.take_blob(meta.rgb).unwrap_or_default(),
        },
        tensors: Vec::new(),
        resolved: meta.resolved,
        rank,
        times: meta.times,
    }
}

/// What a finished method call returns.
pub(crate) fn replies_of(
    replying: &Ranks,
    answers: Vec<(Rank, Result<Vec<u8>, Failure>)>,
) -> Result<Vec<RankReply>, ExecutorError> {
    let mut succeeded: Vec<Rank> = answers
        .iter()
        .filter(|(_, a)| a.is_ok())
        .map(|(rank, _)| *rank)
        .collect();
    succeeded.sort_unstable();
    let mut replies = Vec::new();
    for (rank, answer) in answers {
        match answer {
            Ok(bytes) if replying.contains(&rank) => replies.push(RankReply { rank, bytes }),
            Ok(_) => {}
            Err(failure) => return Err(ExecutorError::Rank { failure, succeeded }),
        }
    }
    replies.sort_by_key(|reply| reply.rank);
    Ok(replies)
}
