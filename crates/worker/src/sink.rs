//! Where a wave's results go: events on the way up, while the data lane is kept empty.

use crate::{
    Stage, WaveSink,
    control::{Shared, Stop},
    serve::Inbox,
};
use denoised_link::LinkError;
use denoised_os::{Deadline, now_ns};
use denoised_tensor::MemoryStats;
use denoised_types::{CallId, Failure, FailureCode, Generated, Mode, NamedTensor, RequestId};
use denoised_wire::{BlobIdx, Event, GeneratedMeta, TensorMeta, Work};
use std::{
    collections::{HashMap, HashSet},
    ops::ControlFlow,
    time::Duration,
};

/// Blobs of an event that make more than this share of the way up travel in pieces, each half as large.
const SHARE_AT_ONCE: usize = 2;

/// Sends events of one call.
pub(crate) struct Reporter<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) inbox: &'a mut Inbox,
    pub(crate) call_id: CallId,
    pub(crate) limit: Duration,
}

impl Reporter<'_> {
    /// Sends an event; while it waits for room, commands are still taken from the data lane (R3).
    pub(crate) fn send(&mut self, event: &Event, blobs: &[&[u8]]) -> Result<(), LinkError> {
        let message = self.shared.encode(self.call_id, event);
        let Self {
            shared, inbox, limit, ..
        } = self;
        shared
            .events
            .send(&message, blobs, Deadline::after(*limit), &mut || {
                while_waiting(shared, inbox)
            })
    }

    /// As [`Reporter::send`], for progress that may be seen a little later: a computation is not held up by waking the executor.
    pub(crate) fn send_quietly(&mut self, event: &Event) -> Result<(), LinkError> {
        let message = self.shared.encode(self.call_id, event);
        let Self {
            shared, inbox, limit, ..
        } = self;
        shared
            .events
            .send_quietly(&message, Deadline::after(*limit), &mut || {
                while_waiting(shared, inbox)
            })
    }

    /// As [`Reporter::send`], with blobs of any size.
    pub(crate) fn send_in_pieces(&mut self, event: &Event, blobs: &[&[u8]]) -> Result<(), LinkError> {
        let at_once_bytes = (self.shared.events.limit_bytes() / SHARE_AT_ONCE).max(2);
        if blobs.iter().map(|blob| blob.len()).sum::<usize>() <= at_once_bytes {
            return self.send(event, blobs);
        }
        for (of, blob) in (0..).map(BlobIdx).zip(blobs) {
            for piece in blob.chunks(at_once_bytes / 2) {
                self.send(&Event::Piece { of }, &[piece])?;
            }
        }
        self.send(event, &vec![&[][..]; blobs.len()])
    }
}

/// What a rank does while an event waits for room.
fn while_waiting(shared: &Shared, inbox: &mut Inbox) -> ControlFlow<()> {
    inbox.take_in(shared);
    if shared.stop() == Stop::Gone {
        ControlFlow::Break(())
    } else {
        ControlFlow::Continue(())
    }
}

/// The sink of one wave.
pub(crate) struct Sink<'a> {
    pub(crate) reporter: Reporter<'a>,
    /// Members that have not ended.
    pub(crate) open: HashSet<RequestId>,
    /// Members that end with this failure whatever the program says: a part of what they produced could not be sent, or they should not
    /// be there.
    pub(crate) broken: HashMap<RequestId, Failure>,
    mode: Mode,
    /// Step mode: members that did a step.
    pub(crate) stepped: Vec<RequestId>,
    /// The way up is gone.
    pub(crate) lost: Option<LinkError>,
}

impl<'a> Sink<'a> {
    pub(crate) fn new(
        reporter: Reporter<'a>,
        mode: Mode,
        members: impl Iterator<Item = RequestId>,
        broken: HashMap<RequestId, Failure>,
    ) -> Self {
        Self {
            reporter,
            open: members.collect(),
            broken,
            mode,
            stepped: Vec::new(),
            lost: None,
        }
    }

    /// Sends an event; true if it went. A message that is too large is the request's own failure.
    fn send(&mut self, request_id: RequestId, event: &Event, blobs: &[&[u8]]) -> bool {
        if self.lost.is_some() {
            return false;
        }
        match self.reporter.send_in_pieces(event, blobs) {
            Ok(()) => true,
            Err(error @ LinkError::TooLarge { .. }) => {
                let text = format!("a result cannot be sent: {error}");
                self.broken
                    .entry(request_id)
                    .or_insert_with(|| Failure::new(FailureCode::OutOfMemory, text));
                false
            }
            Err(error) => {
                self.lost = Some(error);
                false
            }
        }
    }

    /// Ends a member, once.
    pub(crate) fn end(&mut self, request_id: RequestId, outcome: Result<Generated, Failure>) {
        if !self.open.remove(&request_id) {
            tracing::error!(%request_id, "the program ended a request twice, or one that is not its own");
            return;
        }
        self.reporter.shared.activity.ended(request_id);
        let rank = self.reporter.shared.rank;
        let outcome = match self.broken.remove(&request_id) {
            Some(failure) => Err(failure),
            None => outcome,
        };
        let failed = |failure: Failure| {
            // What the caller got wrong is wrong on every rank.
            let is_placed = failure.rank.is_some() || failure.code == FailureCode::InvalidRequest;
            let failure = if is_placed { failure } else { failure.on_rank(rank) };
            Event::RequestDone {
                request_id,
                outcome: Err(failure),
            }
        };
        let sent = match outcome {
            Ok(Generated {
                image,
                resolved,
                times,
                ..
            }) => {
                let meta = GeneratedMeta {
                    width: image.width,
                    height: image.height,
                    n_frames: image.n_frames,
                    rgb: BlobIdx(0),
                    resolved,
                    times,
                };
                self.send(
                    request_id,
                    &Event::RequestDone {
                        request_id,
                        outcome: Ok(meta),
                    },
                    &[&image.rgb],
                )
            }
            Err(failure) => self.send(request_id, &failed(failure), &[]),
        };
        if !sent && let Some(failure) = self.broken.remove(&request_id) {
            self.send(request_id, &failed(failure), &[]);
        }
        self.reporter.inbox.take_in(self.reporter.shared);
    }
}

impl WaveSink for Sink<'_> {
    fn enter(&mut self, stage: Stage<'_>) {
        let activity = &self.reporter.shared.activity;
        match stage {
            Stage::Encode(request_id) => activity.enter(Work::Encode { request_id }),
            Stage::Step(request_ids) => activity.enter_step(request_ids),
            Stage::Decode(request_id) => activity.enter(Work::Decode { request_id }),
        }
    }

    fn memory(&mut self, memory: MemoryStats) {
        self.reporter.shared.activity.note_memory(memory);
    }

    fn started(&mut self, request_id: RequestId) {
        self.send(request_id, &Event::RequestStarted { request_id }, &[]);
        self.reporter.inbox.take_in(self.reporter.shared);
    }

    fn step(&mut self, request_id: RequestId, n_done: u32, n_steps: u32) {
        self.reporter.shared.activity.stepped(request_id, n_done, n_steps);
        if self.mode == Mode::Step {
            self.stepped.push(request_id);
        }
        if self.lost.is_none() {
            let step = Event::Step {
                request_id,
                n_done,
                n_steps,
            };
            self.lost = self.reporter.send_quietly(&step).err();
        }
        self.reporter.inbox.take_in(self.reporter.shared);
    }

    fn tensor(&mut self, request_id: RequestId, tensor: NamedTensor) {
        let NamedTensor {
            name,
            dtype,
            shape,
            data,
        } = tensor;
        let tensor = TensorMeta {
            name,
            dtype,
            shape,
            blob: BlobIdx(0),
        };
        self.send(request_id, &Event::Tensor { request_id, tensor }, &[&data]);
        self.reporter.inbox.take_in(self.reporter.shared);
    }

    fn done(&mut self, request_id: RequestId, outcome: Result<Generated, Failure>) {
        self.end(request_id, outcome);
    }

    fn stop_reason(&self, request_id: RequestId, deadline_ns: u64) -> Option<Failure> {
        let shared = self.reporter.shared;
        if let Some(failure) = self.broken.get(&request_id) {
            return Some(failure.clone());
        }
        let (code, text) = if self.lost.is_some() || shared.stop() == Stop::Gone {
            (FailureCode::Closed, "the executor is gone")
        } else if self.mode == Mode::Step {
            // Several ranks must stop at the same step, so the wave itself says who does.
            return None;
        } else if shared.is_cancelled(self.reporter.call_id, request_id) {
            (FailureCode::Cancelled, "cancelled")
        } else if shared.stop() != Stop::No {
            (FailureCode::Closed, "the worker was told to stop")
        } else if deadline_ns != 0 && now_ns() >= deadline_ns {
            (FailureCode::DeadlineExceeded, "the request's deadline passed")
        } else {
            return None;
        };
        Some(Failure::new(code, text).on_rank(shared.rank))
    }
}
