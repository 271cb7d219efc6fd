//! Sleeping until somebody else changed something, without ever missing it (R4, R5).
//!
//! An alarm is a set of sleepers and the word they sleep on. The announcer stores its change, fences, and
//! looks for sleepers; the sleeper enters the set, fences, and looks for changes. The two fences order
//! one of the looks after the other side's store, so at least one side sees the other.

use crate::sync::{self, AtomicU64, FutexWord, Ordering, WaitEnd};
use denoised_os::{Deadline, cpu};
use std::time::Duration;

/// A sleep is looked after this often even if nobody rings. It should never matter: each time it does is
/// counted as a missed wake, and none may be.
const SAFETY_BOUND: Duration = Duration::from_secs(1);

/// Even who may not spin looks this long before it sleeps: far less than a wake-up costs, and enough for a
/// reader to keep up with a stream without one wake-up per record.
const LINGER_NS: u64 = 5_000;

/// How long an announcer may be between its store and its ring before the ring counts as missing.
const RING_GRACE: Duration = Duration::from_millis(250);

/// How a wait spends its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Sleeps almost at once (after 5 microseconds).
    Sleep,
    /// Looks again and again for `spin_ns` nanoseconds, then sleeps.
    Spin {
        /// How long to spin.
        spin_ns: u64,
    },
}

impl Wait {
    /// How long a wait spins where it may: about what a wake-up costs.
    pub const SPIN_NS: u64 = 50_000;

    /// Spinning pays only if every one of the world's `n_processes` can own a core: otherwise it takes the
    /// core from the very process it waits for.
    pub fn for_world(n_processes: usize) -> Self {
        if n_processes <= cpu::usable_cores() {
            Self::Spin {
                spin_ns: Self::SPIN_NS,
            }
        } else {
            Self::Sleep
        }
    }
}

/// Sleepers and the word they sleep on, on a cache line of their own.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct Alarm {
    /// A bit per sleeper; set by itself, cleared by whoever rings.
    sleepers: AtomicU64,
    word: FutexWord,
}

impl Alarm {
    /// Announces a change stored before; true if somebody had to be woken.
    #[inline]
    pub(crate) fn announce(&self) -> bool {
        if sync::bumps_before_clearing() {
            self.word.bump();
        }
        sync::fence(); // pairs with the fence in `sleep`
        self.ring_sleepers()
    }

    /// Like [`Alarm::announce`] for a caller that has fenced since its store.
    #[inline]
    pub(crate) fn ring_sleepers(&self) -> bool {
        if self.sleepers.load(Ordering::Relaxed) == 0 || self.sleepers.swap(0, Ordering::AcqRel) == 0 {
            return false;
        }
        // Clear, then bump: whoever was just cleared either is woken or finds the word changed.
        if !sync::bumps_before_clearing() {
            self.word.bump();
        }
        self.word.wake_all();
        true
    }

    /// Wakes everybody, whether it seems asleep or not: for rare changes.
    pub(crate) fn ring_all(&self) {
        self.sleepers.swap(0, Ordering::AcqRel);
        self.word.bump();
        self.word.wake_all();
    }

    /// Sleeps until `look` finds something; `None` once the deadline has passed. `bit` is the caller's own
    /// among the sleepers. Expiries of the safety bound that found something are added to `missed_wakes`.
    pub(crate) fn sleep<T>(
        &self,
        bit: u64,
        deadline: Deadline,
        missed_wakes: &mut u64,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        loop {
            let expected = self.word.load();
            self.sleepers.fetch_or(bit, Ordering::AcqRel);
            sync::fence(); // pairs with the fence in `announce`
            let found = look();
            if found.is_some() || sync::has_passed(deadline) {
                self.sleepers.fetch_and(!bit, Ordering::AcqRel);
                return found;
            }
            let bound = deadline.earlier(Deadline::at_ns(sync::now_ns()).plus(SAFETY_BOUND));
            if self.word.wait(expected, bound) == WaitEnd::TimedOut
                && !sync::has_passed(deadline)
                && let Some(found) = look()
            {
                // The announcer may be between its store and its ring; if it never rings, that is a bug.
                let grace = Deadline::after(RING_GRACE);
                while self.word.load() == expected && !grace.has_passed() {
                    self.word.wait(expected, grace);
                }
                if self.word.load() == expected {
                    *missed_wakes += 1;
                }
                self.sleepers.fetch_and(!bit, Ordering::AcqRel);
                return Some(found);
            }
        }
    }
}

/// Looks until something is found, the spin time is over or the deadline has passed.
#[inline]
pub(crate) fn spin<T>(wait: Wait, deadline: Deadline, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    if !sync::MAY_SPIN {
        return None;
    }
    let spin_ns = match wait {
        Wait::Sleep => LINGER_NS,
        Wait::Spin { spin_ns } => spin_ns,
    };
    let mut end_ns = None;
    loop {
        // Reading the clock costs more than many looks, so it comes after the first ones.
        for _ in 0..64 {
            if let Some(found) = look() {
                return Some(found);
            }
            std::hint::spin_loop();
        }
        let now_ns = sync::now_ns();
        if now_ns >= *end_ns.get_or_insert(now_ns.saturating_add(spin_ns).min(deadline.ns())) {
            return None;
        }
    }
}
