//! Who waits for what, and who pumps (W1, W2).

use super::{World, moment, state::State};
use crate::{ExecutorEvent, Waker, calls::Call};
use denoised_link::{EventReceiver, RankSet, Waiting};
use denoised_os::Deadline;
use denoised_types::{Failure, FailureCode};
use std::{
    sync::{Arc, MutexGuard, PoisonError, atomic::Ordering},
    thread::Thread,
    time::{Duration, Instant},
};

/// Most times in a row that the event path is drained for ranks that have ended. Each time takes a thousand events of each rank, so
/// this is more than a ring of the largest size holds.
const MAX_DRAINS: usize = 1 << 15;
/// How old the news of a step may be: workers do not wake the executor for it. Ends and answers come at once.
const PROGRESS_DELAY: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    None,
    Pumper,
    Parked,
}

impl World {
    pub(crate) fn wait_events(&self, until: Instant) -> Vec<ExecutorEvent> {
        let until = moment(until);
        self.lock().engine = Some(std::thread::current());
        loop {
            let timer = self.run_deadlines();
            let wait = timer.map_or(until, |timer| until.earlier(timer));
            let woken = self.wait_for(wait, |state| {
                let woken = std::mem::take(&mut state.woken);
                (woken || !state.queue.is_empty()).then_some(())
            });
            if woken.is_some() || until.has_passed() {
                return self.lock().queue.drain(..).collect();
            }
        }
    }

    pub(crate) fn waker(self: &Arc<Self>) -> Waker {
        let world = Arc::downgrade(self);
        Waker(Arc::new(move || {
            let Some(world) = world.upgrade() else { return };
            let engine = {
                let mut state = world.lock();
                state.woken = true;
                state.engine.clone()
            };
            if let Some(engine) = engine {
                engine.unpark();
            }
            world.interrupter.interrupt();
        }))
    }

    /// Waits until `check` finds something; `None` once the deadline has passed, after at least one look at what has arrived.
    pub(super) fn wait_for<T>(
        &self,
        until: Deadline,
        mut check: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let me = std::thread::current();
        let mut role = Role::None;
        let mut has_looked = false;
        loop {
            let has_waves = {
                let mut state = self.lock();
                let found = check(&mut state);
                if found.is_some() || (has_looked && until.has_passed()) {
                    if role == Role::Pumper {
                        state.has_pumper = false;
                    }
                    state.parked.retain(|thread| thread.id() != me.id());
                    // The role goes to the next, also if we were on our way to take it (W1).
                    let next = if state.has_pumper {
                        None
                    } else {
                        state.parked.pop_front()
                    };
                    drop(state);
                    if let Some(next) = next {
                        next.unpark();
                    }
                    return found;
                }
                if role != Role::Pumper {
                    if !state.has_pumper {
                        state.has_pumper = true;
                        state.parked.retain(|thread| thread.id() != me.id());
                        role = Role::Pumper;
                    } else if !state.parked.iter().any(|thread| thread.id() == me.id()) {
                        state.parked.push_back(me.clone());
                        role = Role::Parked;
                    }
                }
                state.calls.values().any(|call| matches!(call, Call::Wave(_)))
            };
            match role {
                // Steps of waves are sent without waking anybody.
                Role::Pumper if has_waves => self.pump(until.earlier(Deadline::after(PROGRESS_DELAY))),
                Role::Pumper => self.pump(until),
                Role::Parked | Role::None => std::thread::park_timeout(until.remaining()),
            }
            has_looked = true;
        }
    }

    /// The pumper's turn: waits for events and routes them.
    fn pump(&self, until: Deadline) {
        while self.n_wanting_events.load(Ordering::Acquire) > 0 {
            // Whoever wants the lock only drains and leaves.
            std::thread::sleep(Duration::from_micros(20));
        }
        let mut events = self.lock_events();
        match events.wait(until) {
            Waiting::Ready | Waiting::TimedOut => self.drain(&mut **events, self.all),
            Waiting::Interrupted => 0,
        };
    }

    /// Routes what has arrived, from a thread that is not the pumper.
    pub(crate) fn drain_from_outside(&self) {
        self.drain_all_of(RankSet::EMPTY);
    }

    /// As [`World::drain_from_outside`], and all that `ended`, ranks that send no more, have left.
    pub(super) fn drain_all_of(&self, ended: RankSet) {
        self.n_wanting_events.fetch_add(1, Ordering::AcqRel);
        self.interrupter.interrupt();
        let mut events = self.lock_events();
        for _ in 0..MAX_DRAINS {
            if self.drain(&mut **events, ended) == 0 {
                break;
            }
        }
        drop(events);
        self.n_wanting_events.fetch_sub(1, Ordering::AcqRel);
        // The pumper may have got what it waits for.
        self.interrupter.interrupt();
    }

    /// Routes what has arrived, unless somebody else is at it.
    pub(super) fn pump_if_free(&self) {
        let Ok(mut events) = self.events.try_lock() else {
            return;
        };
        if self.drain(&mut **events, self.all) > 0 {
            drop(events);
            self.interrupter.interrupt();
        }
    }

    fn lock_events(&self) -> MutexGuard<'_, Box<dyn EventReceiver>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Routes what has arrived, up to the event path's bound; returns how much of it came from the ranks in `counted`.
    fn drain(&self, events: &mut dyn EventReceiver, counted: RankSet) -> usize {
        let mut n_counted = 0;
        let mut count = |rank| n_counted += usize::from(counted.contains(rank));
        let drained = events.drain(&mut |rank, received| {
            count(rank);
            self.route(rank, received);
        });
        if let Err((rank, error)) = drained {
            count(rank);
            let text = format!("what the worker sent cannot be read: {error}");
            self.fence(Failure::new(FailureCode::Protocol, text).on_rank(rank));
        }
        n_counted
    }

    pub(super) fn wake(&self, threads: Vec<Thread>) {
        for thread in threads {
            thread.unpark();
        }
        self.interrupter.interrupt();
    }
}
