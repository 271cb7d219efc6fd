//! Where the engine leaves a request's events and its one owner finds them.
//!
//! Knows nothing of the engine's thread or of who decides what.
//!
//! R1. One slot per kind of event: a newer one replaces an unread older one, so a mailbox never grows.
//! R2. The first terminal event stays; whatever comes later is dropped.
//! R3. Nothing foreign (a waker, a dropped picture) runs while the lock is held.

use crate::RequestEvent;
use denoised_executor::Output;
use denoised_types::{Failure, Rank};
use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Instant,
};

/// The slots of one request.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    slots: Mutex<Slots>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct Slots {
    queued: Option<usize>,
    started: Option<Rank>,
    /// `(n_done, n_steps)`.
    step: Option<(u32, u32)>,
    end: Option<Result<Output, Failure>>,
    /// A terminal event was left, read or not.
    is_ended: bool,
    /// Nobody will read any more.
    is_abandoned: bool,
    waker: Option<Waker>,
}

/// What a reader found.
enum Found {
    Event(RequestEvent),
    Nothing,
    /// The terminal event was read before.
    End,
}

impl Slots {
    fn take(&mut self) -> Found {
        let event = if let Some(position) = self.queued.take() {
            RequestEvent::Queued { position }
        } else if let Some(rank) = self.started.take() {
            RequestEvent::Started { rank }
        } else if let Some((n_done, n_steps)) = self.step.take() {
            RequestEvent::Step { n_done, n_steps }
        } else if let Some(end) = self.end.take() {
            match end {
                Ok(generated) => RequestEvent::Finished(generated),
                Err(failure) => RequestEvent::Failed(failure),
            }
        } else if self.is_ended {
            return Found::End;
        } else {
            return Found::Nothing;
        };
        Found::Event(event)
    }
}

impl Mailbox {
    /// Leaves an event. The waker returned is to be woken once no lock is held.
    #[must_use]
    pub(crate) fn put(&self, event: RequestEvent) -> Option<Waker> {
        let mut slots = self.lock();
        if slots.is_ended || slots.is_abandoned {
            slots.is_ended |= event.is_terminal();
            drop(slots);
            drop(event);
            return None;
        }
        match event {
            RequestEvent::Queued { position } => slots.queued = Some(position),
            RequestEvent::Started { rank } => slots.started = Some(rank),
            RequestEvent::Step { n_done, n_steps } => slots.step = Some((n_done, n_steps)),
            RequestEvent::Finished(generated) => slots.end = Some(Ok(generated)),
            RequestEvent::Failed(failure) => slots.end = Some(Err(failure)),
        }
        slots.is_ended = slots.end.is_some();
        self.arrived.notify_all();
        slots.waker.take()
    }

    /// The next event if there is one; `Err` once the terminal one was read.
    pub(crate) fn try_take(&self) -> Result<Option<RequestEvent>, Ended> {
        match self.lock().take() {
            Found::Event(event) => Ok(Some(event)),
            Found::Nothing => Ok(None),
            Found::End => Err(Ended),
        }
    }

    /// The next event, waiting for it until `until`; `Err` once the terminal one was read.
    pub(crate) fn take_until(&self, until: Instant) -> Result<Option<RequestEvent>, Ended> {
        let mut slots = self.lock();
        loop {
            match slots.take() {
                Found::Event(event) => return Ok(Some(event)),
                Found::End => return Err(Ended),
                Found::Nothing => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            slots = self
                .arrived
                .wait_timeout(slots, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// The next event, or a promise to wake the task; `None` once the terminal one was read.
    pub(crate) fn poll_take(&self, context: &mut Context<'_>) -> Poll<Option<RequestEvent>> {
        let new = context.waker().clone();
        let mut slots = self.lock();
        let (poll, old) = match slots.take() {
            Found::Event(event) => (Poll::Ready(Some(event)), Some(new)),
            Found::End => (Poll::Ready(None), Some(new)),
            Found::Nothing => (Poll::Pending, slots.waker.replace(new)),
        };
        drop(slots);
        // Dropping a waker may run a task's destructor.
        drop(old);
        poll
    }

    /// Empties the mailbox for good. Returns whether the request has ended.
    pub(crate) fn abandon(&self) -> bool {
        let mut slots = self.lock();
        let is_ended = slots.is_ended;
        let unread = std::mem::take(&mut *slots);
        slots.is_ended = is_ended;
        slots.is_abandoned = true;
        drop(slots);
        drop(unread);
        is_ended
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        // The slots are whole between any two statements, so a panic elsewhere does not spoil them.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The terminal event was read before.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ended;

#[cfg(test)]
mod tests {
    use super::*;
    use denoised_types::FailureCode;
    use std::time::Duration;

    fn failed(text: &str) -> RequestEvent {
        RequestEvent::Failed(Failure::new(FailureCode::Internal, text))
    }

    #[test]
    fn unread_progress_is_replaced_and_order_is_kept() {
        let mailbox = Mailbox::default();
        for n_done in 1..=1000 {
            assert!(
                mailbox
                    .put(RequestEvent::Step {
                        n_done,
                        n_steps: 1000
                    })
                    .is_none()
            );
        }
        let _ = mailbox.put(failed("first"));
        let _ = mailbox.put(RequestEvent::Queued { position: 3 });
        let _ = mailbox.put(failed("second"));
        assert_eq!(
            mailbox.try_take(),
            Ok(Some(RequestEvent::Step {
                n_done: 1000,
                n_steps: 1000
            }))
        );
        assert_eq!(mailbox.try_take(), Ok(Some(failed("first"))));
        assert_eq!(mailbox.try_take(), Err(Ended));
        assert_eq!(
            mailbox.take_until(Instant::now() + Duration::from_secs(60)),
            Err(Ended)
        );
    }

    #[test]
    fn a_deadline_that_has_passed_looks_once() {
        let mailbox = Mailbox::default();
        assert_eq!(mailbox.take_until(Instant::now()), Ok(None));
        let _ = mailbox.put(RequestEvent::Started { rank: Rank(0) });
        assert_eq!(
            mailbox.take_until(Instant::now()),
            Ok(Some(RequestEvent::Started { rank: Rank(0) }))
        );
    }

    #[test]
    fn an_abandoned_mailbox_keeps_nothing() {
        let mailbox = Mailbox::default();
        let _ = mailbox.put(RequestEvent::Queued { position: 0 });
        assert!(!mailbox.abandon());
        let _ = mailbox.put(failed("late"));
        assert!(mailbox.abandon());
        assert_eq!(mailbox.try_take(), Err(Ended));
    }
}
