//! What is in flight: waves, method calls, pings. Pure: events in, outcomes out.

use crate::{ExecutorError, ExecutorEvent, Limits, Output, RankReply};
use denoised_link::{RankSet, Received};
use denoised_types::{CallId, Failure, FailureCode, Generated, Image, NamedTensor, Rank, RequestId, WaveId};
use denoised_wire::{BlobIdx, Event, GeneratedMeta, TensorMeta, Wave};
use std::{collections::VecDeque, thread::Thread, time::Duration};

/// What a kept tensor counts beside its elements, name and shape.
const TENSOR_OVERHEAD_BYTES: usize = size_of::<NamedTensor>();

/// One call in flight.
#[derive(Debug)]
pub(crate) enum Call {
    Method(OpenMethod),
    Wave(WaveCall),
    Ping(PingCall),
}

impl Call {
    /// The thread that waits for it; waves are the engine's.
    pub(crate) fn waiter(&self) -> Option<&Thread> {
        match self {
            Self::Method(call) => Some(&call.waiter),
            Self::Ping(ping) => Some(&ping.waiter),
            Self::Wave(_) => None,
        }
    }

    /// Whether its waiter has what it waits for.
    pub(crate) fn is_answered(&self) -> bool {
        match self {
            Self::Method(call) => call.is_complete(),
            Self::Ping(ping) => ping.is_complete(),
            Self::Wave(_) => false,
        }
    }

    /// What `rank` is doing for it, in words.
    pub(crate) fn doing(&self, rank: Rank) -> Option<String> {
        match self {
            Self::Method(call) => call
                .silent()
                .contains(rank)
                .then(|| format!("method `{}`", call.method)),
            Self::Wave(wave) => wave.doing(rank),
            Self::Ping(_) => None,
        }
    }
}

/// Blobs of a rank that have come in pieces so far, for the event of the same call that follows.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    call_id: CallId,
    blobs: Vec<(BlobIdx, Vec<u8>)>,
    n_bytes: u64,
}

impl Pieces {
    /// Takes one more; what exceeds the limit is only counted.
    pub(crate) fn take(&mut self, call_id: CallId, of: BlobIdx, received: &Received, limit_bytes: u64) {
        if self.call_id != call_id {
            *self = Self {
                call_id,
                ..Self::default()
            };
        }
        let piece = received.blob(BlobIdx(0)).unwrap_or_default();
        self.n_bytes = self.n_bytes.saturating_add(piece.len() as u64);
        if self.n_bytes > limit_bytes {
            self.blobs = Vec::new();
            return;
        }
        match self.blobs.last_mut() {
            Some((last, bytes)) if *last == of => bytes.extend_from_slice(piece),
            // Blobs come one after the other and are not empty, so there are few of them.
            Some((last, _)) if last.0 > of.0 => {}
            _ if piece.is_empty() => {}
            _ => self.blobs.push((of, piece.to_vec())),
        }
    }

    /// Puts the blobs in their places, if they are this call's.
    ///
    /// # Errors
    /// They were more than the limit.
    pub(crate) fn put(
        self,
        call_id: CallId,
        received: &mut Received,
        limit_bytes: u64,
    ) -> Result<(), Failure> {
        if self.call_id != call_id {
            return Ok(());
        }
        if self.n_bytes > limit_bytes {
            let text = format!(
                "a result of {} bytes exceeds the limit of {limit_bytes} bytes",
                self.n_bytes
            );
            return Err(Failure::new(FailureCode::OutOfMemory, text));
        }
        for (blob, bytes) in self.blobs {
            received.put_blob(blob, bytes);
        }
        Ok(())
    }
}

/// A worker method on some ranks.
#[derive(Debug)]
pub(crate) struct OpenMethod {
    method: String,
    targets: RankSet,
    /// In the order of arrival.
    replies: Vec<(Rank, Result<Vec<u8>, Failure>)>,
    waiter: Thread,
}

impl OpenMethod {
    /// To be waited for by the calling thread.
    pub(crate) fn new(method: &str, targets: RankSet) -> Self {
        Self {
            method: method.to_owned(),
            targets,
            replies: Vec::new(),
            waiter: std::thread::current(),
        }
    }

    pub(crate) fn silent(&self) -> RankSet {
        self.targets
            .without(self.replies.iter().map(|(rank, _)| *rank).collect())
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.silent().is_empty()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.replies.iter().any(|(_, reply)| reply.is_err())
    }

    /// Takes a rank's answer; false if none was expected.
    pub(crate) fn route(&mut self, rank: Rank, event: Event, received: &mut Received) -> bool {
        if !self.silent().contains(rank) {
            return false;
        }
        let outcome = match event {
            Event::CallDone { outcome } => outcome,
            // A method may show that it gets on; nobody asked.
            Event::Step { .. } => return true,
            _ => return false,
        };
        let reply = outcome.and_then(|blob| match blob {
            None => Ok(Vec::new()),
            Some(blob) => received.take_blob(blob).ok_or_else(|| {
                Failure::new(FailureCode::Protocol, "the reply did not come with its answer").on_rank(rank)
            }),
        });
        self.replies.push((rank, reply));
        true
    }

    /// The answers by rank, or the first failure.
    pub(crate) fn into_result(self) -> Result<Vec<RankReply>, ExecutorError> {
        let mut replies = Vec::new();
        let mut first_failure = None;
        for (rank, reply) in self.replies {
            match reply {
                Ok(bytes) => replies.push(RankReply { rank, bytes }),
                Err(failure) => {
                    first_failure.get_or_insert(failure);
                }
            }
        }
        replies.sort_by_key(|reply| reply.rank);
        match first_failure {
            None => Ok(replies),
            Some(failure) => {
                let succeeded = replies.iter().map(|reply| reply.rank).collect();
                Err(ExecutorError::Rank { failure, succeeded })
            }
        }
    }
}

/// A question for signs of life.
#[derive(Debug)]
pub(crate) struct PingCall {
    targets: RankSet,
    pub(crate) answered: RankSet,
    waiter: Thread,
}

impl PingCall {
    /// To be waited for by the calling thread.
    pub(crate) fn new(targets: RankSet) -> Self {
        Self {
            targets,
            answered: RankSet::EMPTY,
            waiter: std::thread::current(),
        }
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.targets.without(self.answered).is_empty()
    }

    pub(crate) fn route(&mut self, rank: Rank, event: &Event) -> bool {
        matches!(event, Event::Pong) && self.answered.insert(rank)
    }
}

/// A wave on some ranks.
#[derive(Debug)]
pub(crate) struct WaveCall {
    wave_id: WaveId,
    pub(crate) ranks: RankSet,
    /// Ranks that have ended it.
    pub(crate) ended: RankSet,
    pub(crate) sent_ns: u64,
    members: Vec<Member>,
    is_over: bool,
}

#[derive(Debug)]
struct Member {
    request_id: RequestId,
    deadline_ns: u64,
    /// Its end was reported to the engine.
    is_ended: bool,
    /// Ranks that have ended it.
    reported: RankSet,
    /// What the first rank said, or the first failure.
    outcome: Option<Result<Generated, Failure>>,
    has_begun: bool,
    n_done: u32,
    n_steps: u32,
    tensors: Vec<NamedTensor>,
    tensor_bytes: u64,
    /// Why its result cannot be whole.
    broken: Option<Failure>,
}

impl WaveCall {
    pub(crate) fn new(wave: &Wave, ranks: RankSet, sent_ns: u64) -> Self {
        let member = |member: &denoised_wire::Member| Member {
            request_id: member.request_id,
            deadline_ns: member.deadline_ns,
            is_ended: false,
            reported: RankSet::EMPTY,
            outcome: None,
            has_begun: false,
            n_done: 0,
            n_steps: 0,
            tensors: Vec::new(),
            tensor_bytes: 0,
            broken: None,
        };
        let members = wave.joining.iter().map(member).collect();
        Self {
            wave_id: wave.wave_id,
            ranks,
            ended: RankSet::EMPTY,
            sent_ns,
            members,
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

    /// Whether the request is a member that has not ended.
    pub(crate) fn is_open(&self, request_id: RequestId) -> bool {
        self.members
            .iter()
            .any(|member| member.request_id == request_id && !member.is_ended)
    }

    fn member(&mut self, request_id: RequestId) -> Option<&mut Member> {
        self.members
            .iter_mut()
            .find(|member| member.request_id == request_id)
    }

    fn doing(&self, rank: Rank) -> Option<String> {
        if !self.is_expected_of(rank) {
            return None;
        }
        let open = self
            .members
            .iter()
            .find(|member| member.has_begun && !member.reported.contains(rank));
        Some(match open {
            None => "taking up a wave".to_owned(),
            Some(member) if member.n_steps == 0 => format!("preparing request {}", member.request_id),
            Some(member) if member.n_done >= member.n_steps => {
                format!("decoding request {}", member.request_id)
            }
            Some(member) => format!("step {} of {}", member.n_done + 1, member.n_steps),
        })
    }

    /// Remembers how far a member is, without reporting it.
    pub(crate) fn note(&mut self, event: &Event) {
        if let Event::Step {
            request_id,
            n_done,
            n_steps,
        } = *event
            && let Some(member) = self.member(request_id)
        {
            (member.n_done, member.n_steps) = (n_done, n_steps);
        }
    }

    /// Takes one event of `rank`; false if it makes no sense here.
    pub(crate) fn route(
        &mut self,
        rank: Rank,
        event: Event,
        received: &mut Received,
        limits: &Limits,
        out: &mut VecDeque<ExecutorEvent>,
    ) -> bool {
        if !self.is_expected_of(rank) {
            return false;
        }
        // With several ranks in a wave, the first one's progress and results count.
        let is_first = self.ranks.iter().next() == Some(rank);
        self.note(&event);
        match event {
            Event::RequestStarted { request_id } => {
                let Some(member) = self.member(request_id) else {
                    return false;
                };
                if !member.has_begun && !member.is_ended {
                    member.has_begun = true;
                    out.push_back(ExecutorEvent::RequestStarted { request_id, rank });
                }
            }
            Event::Step {
                request_id,
                n_done,
                n_steps,
            } => {
                let Some(member) = self.member(request_id) else {
                    return false;
                };
                if is_first && !member.is_ended {
                    out.push_back(ExecutorEvent::Step {
                        request_id,
                        n_done,
                        n_steps,
                    });
                }
            }
            Event::Tensor { request_id, tensor } => {
                let Some(member) = self.member(request_id) else {
                    return false;
                };
                if is_first && !member.is_ended {
                    member.keep(tensor, received, limits);
                }
            }
            Event::RequestDone { request_id, outcome } => {
                let ranks = self.ranks;
                let Some(member) = self.member(request_id) else {
                    return false;
                };
                if !member.reported.insert(rank) {
                    return false;
                }
                member.take(rank, is_first, outcome, received);
                if ranks.without(member.reported).is_empty() {
                    member.end(out);
                }
            }
            Event::CallDone { outcome } => {
                self.ended.insert(rank);
                if !self.ranks.without(self.ended).is_empty() && outcome.is_ok() {
                    return true;
                }
                let text = "the worker ended the wave without an outcome for this request";
                let failure = outcome.err();
                for member in &mut self.members {
                    let missing = || Failure::new(FailureCode::Internal, text).on_rank(rank);
                    if !member.is_ended {
                        let failure = failure.clone().unwrap_or_else(missing);
                        member.outcome = Some(Err(failure));
                        member.end(out);
                    }
                }
                if self.ranks.without(self.ended).is_empty() && !self.is_over {
                    self.is_over = true;
                    out.push_back(ExecutorEvent::WaveDone {
                        wave_id: self.wave_id,
                    });
                }
            }
            Event::Pong | Event::Dying(_) | Event::Piece { .. } => return false,
        }
        true
    }

    /// The result of a request cannot be whole any more.
    pub(crate) fn spoil(&mut self, request_id: RequestId, failure: Failure) {
        if let Some(member) = self.member(request_id) {
            member.broken.get_or_insert(failure);
        }
    }

    /// Ends whatever is open with `failure`.
    pub(crate) fn fail(&mut self, failure: &Failure, out: &mut VecDeque<ExecutorEvent>) {
        for member in &mut self.members {
            if !member.is_ended {
                member.outcome = Some(Err(failure.clone()));
                member.end(out);
            }
        }
        if !self.is_over {
            self.is_over = true;
            out.push_back(ExecutorEvent::WaveDone {
                wave_id: self.wave_id,
            });
        }
    }

    /// Ends the members whose deadline passed `grace` ago without a word of their ranks. Returns when the next one is due.
    pub(crate) fn expire(
        &mut self,
        now_ns: u64,
        grace: Duration,
        out: &mut VecDeque<ExecutorEvent>,
    ) -> Option<u64> {
        let grace_ns = u64::try_from(grace.as_nanos()).unwrap_or(u64::MAX);
        let mut next_ns: Option<u64> = None;
        for member_idx in 0..self.members.len() {
            let member = &self.members[member_idx];
            if member.is_ended || member.deadline_ns == 0 {
                continue;
            }
            let due_ns = member.deadline_ns.saturating_add(grace_ns);
            if now_ns < due_ns {
                next_ns = Some(next_ns.map_or(due_ns, |next| next.min(due_ns)));
                continue;
            }
            let silent: Vec<Rank> = self.ranks.without(member.reported).iter().collect();
            let text = format!(
                "the request's deadline passed and rank(s) {} did not answer",
                Listed(&silent)
            );
            let mut failure = Failure::new(FailureCode::DeadlineExceeded, text);
            if let [rank] = silent[..] {
                failure = failure.on_rank(rank);
                if let Some(doing) = self.doing(rank) {
                    failure = failure.during(doing);
                }
            }
            let member = &mut self.members[member_idx];
            member.outcome = Some(Err(failure));
            member.end(out);
        }
        next_ns
    }
}

struct Listed<'a>(&'a [Rank]);

impl std::fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (idx, rank) in self.0.iter().enumerate() {
            let comma = if idx == 0 { "" } else { ", " };
            write!(f, "{comma}{rank}")?;
        }
        Ok(())
    }
}

impl Member {
    /// Keeps a traced tensor, up to the documented bound.
    fn keep(&mut self, tensor: TensorMeta, received: &mut Received, limits: &Limits) {
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
            self.broken
                .get_or_insert(Failure::new(FailureCode::Protocol, text));
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
            self.broken
                .get_or_insert(Failure::new(FailureCode::OutOfMemory, text));
            self.tensors = Vec::new();
            return;
        }
        if self.broken.is_none() {
            self.tensors.push(tensor);
        }
    }

    /// Takes one rank's outcome.
    fn take(
        &mut self,
        rank: Rank,
        is_first: bool,
        outcome: Result<GeneratedMeta, Failure>,
        received: &mut Received,
    ) {
        let outcome = outcome.and_then(|meta| {
            if let Some(broken) = &self.broken {
                return Err(broken.clone());
            }
            let GeneratedMeta {
                width,
                height,
                rgb,
                resolved,
                times,
            } = meta;
            let rgb = received.take_blob(rgb).unwrap_or_default();
            // Any numbers may come from a worker.
            let wanted = u128::from(width) * u128::from(height) * 3;
            if rgb.len() as u128 != wanted {
                let text = format!(
                    "a picture of {width}x{height} came with {} bytes instead of {wanted}",
                    rgb.len()
                );
                return Err(Failure::new(FailureCode::Protocol, text).on_rank(rank));
            }
            let image = Image { width, height, rgb };
            Ok(Generated {
                image,
                tensors: Vec::new(),
                resolved,
                rank,
                times,
            })
        });
        let first_failure = matches!(self.outcome, Some(Err(_)));
        if !first_failure && (outcome.is_err() || is_first || self.outcome.is_none()) {
            self.outcome = Some(outcome);
        }
    }

    /// Reports its end, once.
    fn end(&mut self, out: &mut VecDeque<ExecutorEvent>) {
        if self.is_ended {
            return;
        }
        self.is_ended = true;
        let tensors = std::mem::take(&mut self.tensors);
        let mut outcome = self.outcome.take().unwrap_or_else(|| {
            Err(Failure::new(
                FailureCode::Internal,
                "a request ended without an outcome",
            ))
        });
        if let Ok(generated) = &mut outcome {
            generated.tensors = tensors;
        }
        out.push_back(ExecutorEvent::RequestDone {
            request_id: self.request_id,
            outcome: outcome.map(Output::from),
        });
    }
}
