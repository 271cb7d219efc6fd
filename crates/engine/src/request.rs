//! What the owner of a submitted request holds.

use crate::{mailbox::Ended, mailbox::Mailbox, run::Shared};
use denoised_executor::Output;
use denoised_types::{Failure, FailureCode, Generated, Rank, RequestId};
use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

/// How far a request is. A request has any number of the first three, in this order, then exactly one of the last two.
#[derive(Debug, PartialEq)]
pub enum RequestEvent {
    /// It was admitted.
    Queued {
        /// How many requests wait in front of it; 0 also for one that is begun at once.
        position: usize,
    },
    /// A worker began it.
    Started {
        /// Which.
        rank: Rank,
    },
    /// Denoiser steps were done. Steps between two reads are reported as one.
    Step {
        /// Steps that are done, `1..=n_steps`, always growing.
        n_done: u32,
        /// Steps there will be.
        n_steps: u32,
    },
    /// It is done. The last event.
    Finished(Output),
    /// It failed, was cancelled or came too late. The last event.
    Failed(Failure),
}

impl RequestEvent {
    /// Whether nothing follows.
    pub fn is_terminal(&self) -> bool {
        match self {
            Self::Finished(_) | Self::Failed(_) => true,
            Self::Queued { .. } | Self::Started { .. } | Self::Step { .. } => false,
        }
    }
}

/// A submitted request: its events, and the right to cancel it. Dropping it cancels.
///
/// Read it in one of three ways: blocking ([`RequestHandle::next_until`], [`RequestHandle::wait`], or as an iterator), by looking
/// ([`RequestHandle::try_next`]), or from any async runtime ([`RequestHandle::next_async`], [`RequestHandle::poll_next`],
/// [`RequestHandle::wait_async`]). Unread progress is replaced by newer progress, so a handle that nobody reads stays small.
#[derive(Debug)]
pub struct RequestHandle {
    id: RequestId,
    mailbox: Arc<Mailbox>,
    shared: Arc<Shared>,
    /// A little after the engine must have ended the request: blocking reads do not outlast it.
    give_up_at: Instant,
}

impl RequestHandle {
    pub(crate) fn new(
        id: RequestId,
        mailbox: Arc<Mailbox>,
        shared: Arc<Shared>,
        give_up_at: Instant,
    ) -> Self {
        Self {
            id,
            mailbox,
            shared,
            give_up_at,
        }
    }

    /// The request's id, as in logs.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The next event, if it has happened already. `None` also after the last one.
    pub fn try_next(&mut self) -> Option<RequestEvent> {
        self.mailbox.try_take().unwrap_or_default()
    }

    /// The next event, waiting for it until `until` at most. `None` if none came in time, and after the last one.
    pub fn next_until(&mut self, until: Instant) -> Option<RequestEvent> {
        if until < self.give_up_at {
            return self.mailbox.take_until(until).unwrap_or_default();
        }
        match self.mailbox.take_until(self.give_up_at) {
            Ok(Some(event)) => Some(event),
            Err(Ended) => None,
            Ok(None) => {
                // The engine's thread is held up in an executor that does not return.
                let message = "the engine did not end the request after its deadline";
                let event = RequestEvent::Failed(Failure::new(FailureCode::Internal, message));
                drop(self.mailbox.put(event));
                self.mailbox.try_take().unwrap_or_default()
            }
        }
    }

    /// The next event for a task that polls: `Ready(None)` after the last one.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<RequestEvent>> {
        self.mailbox.poll_take(context)
    }

    /// The next event, for any async runtime. `None` after the last one. Dropping the future loses nothing.
    pub async fn next_async(&mut self) -> Option<RequestEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Asks for the request's end. Idempotent; returns at once. The last event then is [`RequestEvent::Failed`] with
    /// [`FailureCode::Cancelled`], and comes when no worker computes it any more; a picture that was faster still arrives.
    pub fn cancel(&self) {
        self.shared.cancel(self.id);
    }

    /// Waits for the end. Bounded: every request has a deadline.
    ///
    /// # Errors
    /// What the last event says, e.g. [`FailureCode::DeadlineExceeded`] or [`FailureCode::WorkerLost`];
    /// [`FailureCode::Internal`] if the last event was read before.
    pub fn wait(mut self) -> Result<Generated, Failure> {
        let last = self.by_ref().find(RequestEvent::is_terminal);
        Self::outcome(last)
    }

    /// Waits for the end without blocking a thread.
    ///
    /// # Errors
    /// As [`RequestHandle::wait`].
    pub async fn wait_async(mut self) -> Result<Generated, Failure> {
        loop {
            match self.next_async().await {
                Some(event) if !event.is_terminal() => {}
                last => return Self::outcome(last),
            }
        }
    }

    fn outcome(last: Option<RequestEvent>) -> Result<Generated, Failure> {
        match last {
            Some(RequestEvent::Finished(output)) => Ok(output.into_generated()),
            Some(RequestEvent::Failed(failure)) => Err(failure),
            _ => Err(Failure::new(
                FailureCode::Internal,
                "the request's last event was read before",
            )),
        }
    }
}

/// Blocks for each event; ends after the last one.
impl Iterator for RequestHandle {
    type Item = RequestEvent;

    fn next(&mut self) -> Option<RequestEvent> {
        self.next_until(self.give_up_at)
    }
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        if !self.mailbox.abandon() {
            self.shared.cancel(self.id);
        }
    }
}
