//! One bell for a reader of many rings.

use crate::alarm::{Alarm, Wait, spin};
use denoised_os::Deadline;
use std::fmt;
use std::sync::Arc;

/// The waiter is the doorbell's only sleeper.
const WAITER_BIT: u64 = 1;

/// Where a doorbell's alarm lives: shared memory, or this process.
pub(crate) trait AlarmHome: Send + Sync {
    fn alarm(&self) -> &Alarm;
}

struct Local(Alarm);

impl AlarmHome for Local {
    fn alarm(&self) -> &Alarm {
        &self.0
    }
}

/// Rings. Any number of threads and processes may hold one.
#[derive(Clone)]
pub struct Doorbell(Arc<dyn AlarmHome>);

impl Doorbell {
    /// A doorbell within this process, with its waiter. [`crate::Board`] makes those between processes.
    pub fn local() -> (Self, DoorbellWaiter) {
        Self::at(Arc::new(Local(Alarm::default())))
    }

    pub(crate) fn at(home: Arc<dyn AlarmHome>) -> (Self, DoorbellWaiter) {
        (
            Self(Arc::clone(&home)),
            DoorbellWaiter {
                doorbell: Self(home),
                n_missed_wakes: 0,
            },
        )
    }

    #[cfg(not(loom))]
    pub(crate) fn ringing(home: Arc<dyn AlarmHome>) -> Self {
        Self(home)
    }

    /// Lets the waiter look again. Store the change it is to find before; costs no system call unless it
    /// sleeps.
    pub fn ring(&self) {
        self.0.alarm().announce();
    }

    /// The same for a caller that has fenced since its store.
    #[inline]
    pub(crate) fn ring_after_fence(&self) -> bool {
        self.0.alarm().ring_sleepers()
    }
}

impl fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Doorbell")
    }
}

/// The one that sleeps until the doorbell rings.
#[derive(Debug)]
pub struct DoorbellWaiter {
    doorbell: Doorbell,
    n_missed_wakes: u64,
}

impl DoorbellWaiter {
    /// Looks until `look` finds something; `None` once the deadline has passed (after at least one look).
    ///
    /// `look` is called again after every ring, and now and then without one. What it looks at must be
    /// changed before the ring that announces the change: records of rings whose writers hold this
    /// doorbell are; other things by whoever calls [`Doorbell::ring`].
    pub fn wait<T>(
        &mut self,
        wait: Wait,
        deadline: Deadline,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        if let Some(found) = look() {
            return Some(found);
        }
        let alarm = self.doorbell.0.alarm();
        spin(wait, deadline, &mut look)
            .or_else(|| alarm.sleep(WAITER_BIT, deadline, &mut self.n_missed_wakes, &mut look))
    }

    /// A handle to ring with.
    pub fn doorbell(&self) -> Doorbell {
        self.doorbell.clone()
    }

    /// Waits that only the safety bound ended. A bug if not 0.
    pub fn n_missed_wakes(&self) -> u64 {
        self.n_missed_wakes
    }
}
