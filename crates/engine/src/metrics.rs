//! What an engine counts.

use denoised_types::FailureCode;

/// Counters since the start, and present numbers. At any moment
/// `n_submitted = n_finished + failed in all + n_queued + n_running`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that were admitted.
    pub n_submitted: u64,
    /// Requests that `submit` refused: invalid, queue full, closed, world failed.
    pub n_refused: u64,
    /// Requests that ended with a picture.
    pub n_finished: u64,
    /// Requests that were admitted and then failed, by code; codes that did not occur are absent.
    pub n_failed: Vec<(FailureCode, u64)>,
    /// Requests that wait now.
    pub n_queued: usize,
    /// Requests that run now.
    pub n_running: usize,
    /// Results that came after their request had been given up.
    pub n_late: u64,
    /// Events of the executor that made no sense and were ignored.
    pub n_stray: u64,
}

impl Stats {
    /// How many requests failed with `code`.
    pub fn failed(&self, code: FailureCode) -> u64 {
        self.n_failed
            .iter()
            .find(|(failed, _)| *failed == code)
            .map_or(0, |(_, n)| *n)
    }

    /// How many requests failed.
    pub fn failed_in_all(&self) -> u64 {
        self.n_failed.iter().map(|(_, n)| n).sum()
    }

    /// How many requests were cancelled by their owners.
    pub fn cancelled(&self) -> u64 {
        self.failed(FailureCode::Cancelled)
    }

    pub(crate) fn count_failed(&mut self, code: FailureCode) {
        match self.n_failed.iter_mut().find(|(failed, _)| *failed == code) {
            Some((_, n)) => *n += 1,
            None => self.n_failed.push((code, 1)),
        }
    }
}
