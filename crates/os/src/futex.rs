//! Sleeping on a 32-bit word that several processes map.

use crate::clock::Deadline;
use rustix::io::Errno;
use rustix::thread::futex;
use std::num::NonZeroU32;
use std::sync::atomic::AtomicU32;

/// Why [`wait`] came back. Any end may be spurious: the caller looks at its condition again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitEnd {
    /// Somebody woke this word, or a signal arrived.
    Woken,
    /// The word did not hold the expected value, so nobody slept.
    Changed,
    /// The deadline passed.
    TimedOut,
}

/// Sleeps while `word` holds `expected`, until woken or until the deadline.
///
/// Comparing and falling asleep are one step against [`wake`]: a caller that changes the word before it
/// wakes cannot be missed. The word may lie in memory shared between processes.
pub fn wait(word: &AtomicU32, expected: u32, deadline: Deadline) -> WaitEnd {
    // FUTEX_WAIT_BITSET takes an absolute time; no PRIVATE flag, since the word may be shared.
    let any = NonZeroU32::MAX;
    match futex::wait_bitset(
        word,
        futex::Flags::empty(),
        expected,
        Some(&deadline.timespec()),
        any,
    ) {
        Err(Errno::TIMEDOUT) => WaitEnd::TimedOut,
        Err(Errno::AGAIN) => WaitEnd::Changed,
        Ok(()) | Err(_) => WaitEnd::Woken,
    }
}

/// Wakes up to `n_waiters` sleepers of `word` in all processes; returns how many were woken.
pub fn wake(word: &AtomicU32, n_waiters: u32) -> usize {
    // The kernel reads the number as a signed one.
    let n_waiters = n_waiters.min(i32::MAX as u32);
    // A valid, aligned word cannot be refused; a refusal could only mean that nobody was woken.
    futex::wake(word, futex::Flags::empty(), n_waiters).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_changed_word_is_not_slept_on() {
        let word = AtomicU32::new(1);
        assert_eq!(wait(&word, 0, Deadline::after_ms(60_000)), WaitEnd::Changed);
    }

    #[test]
    fn an_unchanged_word_times_out_at_the_absolute_deadline() {
        let word = AtomicU32::new(0);
        let deadline = Deadline::after_ms(20);
        while wait(&word, 0, deadline) != WaitEnd::TimedOut {}
        assert!(deadline.has_passed());
        assert_eq!(wait(&word, 0, Deadline::PASSED), WaitEnd::TimedOut);
    }

    #[test]
    fn a_sleeper_is_woken() {
        let word = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                while word.load(Ordering::Acquire) == 0 {
                    assert_ne!(wait(&word, 0, Deadline::after_ms(60_000)), WaitEnd::TimedOut);
                }
            });
            word.store(1, Ordering::Release);
            while !sleeper.is_finished() {
                wake(&word, u32::MAX);
                std::thread::yield_now();
            }
        });
    }
}
