//! A lock that is waited for with a deadline, and with something to do meanwhile.

use denoised_os::Deadline;
use std::{
    ops::{ControlFlow, Deref, DerefMut},
    sync::{Condvar, Mutex, PoisonError},
    time::Duration,
};

/// How long a waiter sleeps before it calls back.
const SLICE: Duration = Duration::from_millis(2);

/// Holds one value; whoever enters has it alone until the guard is dropped.
pub(crate) struct Gate<T> {
    value: Mutex<Option<T>>,
    freed: Condvar,
}

impl<T> Gate<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: Mutex::new(Some(value)),
            freed: Condvar::new(),
        }
    }

    /// Enters, or gives up at the deadline or when `idle`, called every few milliseconds, breaks.
    pub(crate) fn enter(
        &self,
        deadline: Deadline,
        idle: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Option<GateGuard<'_, T>> {
        loop {
            {
                let mut slot = self.value.lock().unwrap_or_else(PoisonError::into_inner);
                if slot.is_none() {
                    let wait = SLICE.min(deadline.remaining());
                    let waited = self.freed.wait_timeout(slot, wait);
                    slot = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                if let Some(value) = slot.take() {
                    return Some(GateGuard {
                        gate: self,
                        value: Some(value),
                    });
                }
            }
            if deadline.has_passed() || idle() == ControlFlow::Break(()) {
                return None;
            }
        }
    }
}

pub(crate) struct GateGuard<'a, T> {
    gate: &'a Gate<T>,
    /// Taken out by the drop alone.
    value: Option<T>,
}

impl<T> Deref for GateGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value
            .as_ref()
            .expect("the value leaves its guard in drop alone")
    }
}

impl<T> DerefMut for GateGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value
            .as_mut()
            .expect("the value leaves its guard in drop alone")
    }
}

impl<T> Drop for GateGuard<'_, T> {
    fn drop(&mut self) {
        *self.gate.value.lock().unwrap_or_else(PoisonError::into_inner) = self.value.take();
        self.gate.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_with_a_deadline() {
        let gate = Gate::new(0);
        let mut never = || ControlFlow::Continue(());
        {
            let mut inside = gate.enter(Deadline::PASSED, &mut never).unwrap();
            *inside += 1;
            assert!(gate.enter(Deadline::PASSED, &mut never).is_none());
            assert!(gate.enter(Deadline::after_ms(20), &mut never).is_none());
            assert!(
                gate.enter(Deadline::after_ms(60_000), &mut || ControlFlow::Break(()))
                    .is_none()
            );
        }
        assert_eq!(*gate.enter(Deadline::PASSED, &mut never).unwrap(), 1);
    }

    #[test]
    fn a_waiter_gets_in_when_the_other_leaves() {
        let gate = Gate::new(());
        let mut never = || ControlFlow::Continue(());
        let inside = gate.enter(Deadline::PASSED, &mut never).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                gate.enter(Deadline::after_ms(60_000), &mut || ControlFlow::Continue(()))
                    .is_some()
            });
            drop(inside);
            assert!(waiter.join().unwrap());
        });
    }
}
