//! Monotonic time, the same for all processes of a machine, and absolute deadlines on it.

use std::time::Duration;

/// Nanoseconds of `CLOCK_MONOTONIC`: comparable between the processes of one machine until it restarts.
#[inline]
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // The monotonic clock starts at zero with the machine and never shows negative values.
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

/// A point of monotonic time after which a wait gives up.
///
/// Absolute, so that one deadline covers a whole chain of waits and may travel to another process of
/// the same machine (see [`Deadline::ns`] and [`Deadline::at_ns`]). Making one reads the clock, which takes
/// up to 0.1 microseconds on a virtual machine: make one per call, not one per record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Deadline(u64);

impl Deadline {
    /// Has always passed: a wait with it tries once and does not wait.
    pub const PASSED: Self = Self(0);

    /// The moment `wait` from now.
    pub fn after(wait: Duration) -> Self {
        Self(now_ns()).plus(wait)
    }

    /// The moment `wait_ms` milliseconds from now.
    pub fn after_ms(wait_ms: u64) -> Self {
        Self::after(Duration::from_millis(wait_ms))
    }

    /// The moment at which [`now_ns`] will show `ns`.
    pub const fn at_ns(ns: u64) -> Self {
        Self(ns)
    }

    /// The value [`now_ns`] will show at this moment.
    pub const fn ns(self) -> u64 {
        self.0
    }

    /// Time left; zero once passed.
    pub fn remaining(self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(now_ns()))
    }

    /// Whether the moment lies in the past.
    pub fn has_passed(self) -> bool {
        now_ns() >= self.0
    }

    /// The moment `wait` later.
    pub fn plus(self, wait: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX)),
        )
    }

    /// The nearer of two deadlines.
    pub fn earlier(self, other: Self) -> Self {
        Self(self.0.min(other.0))
    }

    /// The same moment as the kernel's absolute time.
    pub(crate) fn timespec(self) -> rustix::time::Timespec {
        rustix::time::Timespec {
            tv_sec: i64::try_from(self.0 / 1_000_000_000).unwrap_or(i64::MAX),
            // Always below 10^9.
            tv_nsec: (self.0 % 1_000_000_000) as _,
        }
    }

    /// Time left as the kernel's relative time.
    pub(crate) fn remaining_timespec(self) -> rustix::time::Timespec {
        Self(self.0.saturating_sub(now_ns())).timespec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_compare_by_moment_and_saturate() {
        let near = Deadline::after_ms(5_000);
        let far = Deadline::after(Duration::MAX);
        assert_eq!(far.ns(), u64::MAX);
        assert_eq!(far.earlier(near), near);
        assert!(!near.has_passed());
        assert!(Deadline::PASSED.has_passed());
        assert_eq!(Deadline::PASSED.remaining(), Duration::ZERO);
        assert!(near.remaining() > Duration::from_secs(1));
    }

    #[test]
    fn time_does_not_run_backwards() {
        let first_ns = now_ns();
        assert!(now_ns() >= first_ns);
    }
}
