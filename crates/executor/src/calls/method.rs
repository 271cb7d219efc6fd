//! A worker method on some ranks, on either lane.

use super::pieces::Pieces;
use crate::{ExecutorError, RankReply};
use denoised_link::{RankSet, Received};
use denoised_types::{Failure, FailureCode, Rank};
use denoised_wire::Event;
use std::thread::Thread;

#[derive(Debug)]
pub(crate) struct OpenMethod {
    /// Its name.
    pub(crate) method: String,
    executing: RankSet,
    replying: RankSet,
    /// In the order of arrival.
    answers: Vec<(Rank, Result<Vec<u8>, Failure>)>,
    pieces: Pieces,
    pub(super) waiter: Thread,
}

impl OpenMethod {
    /// To be waited for by the calling thread.
    pub(crate) fn new(method: &str, executing: RankSet, replying: RankSet) -> Self {
        Self {
            method: method.to_owned(),
            executing,
            replying,
            answers: Vec::new(),
            pieces: Pieces::default(),
            waiter: std::thread::current(),
        }
    }

    /// Ranks that have not answered.
    pub(crate) fn silent(&self) -> RankSet {
        self.executing
            .without(self.answers.iter().map(|(rank, _)| *rank).collect())
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.silent().is_empty()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.answers.iter().any(|(_, answer)| answer.is_err())
    }

    /// Takes a rank's event; false if it makes no sense here.
    pub(crate) fn route(
        &mut self,
        rank: Rank,
        event: Event,
        received: &mut Received,
        limit_bytes: u64,
    ) -> bool {
        if !self.silent().contains(rank) {
            return false;
        }
        let outcome = match event {
            Event::CallDone { outcome } => outcome,
            Event::Piece { of } => {
                if self.replying.contains(rank) {
                    self.pieces.take(rank, of, received, limit_bytes);
                }
                return true;
            }
            // A method may show that it gets on; nobody asked.
            Event::Step { .. } => return true,
            Event::RequestStarted { .. }
            | Event::Tensor { .. }
            | Event::RequestDone { .. }
            | Event::Pong
            | Event::Dying(_) => return false,
        };
        let put = self.pieces.put(rank, received, limit_bytes);
        let answer = outcome.and_then(|blob| {
            put?;
            match blob {
                Some(blob) if self.replying.contains(rank) => received.take_blob(blob).ok_or_else(|| {
                    let text = "the reply did not come with its answer";
                    Failure::new(FailureCode::Protocol, text).on_rank(rank)
                }),
                // What nobody asked for is not kept.
                Some(_) | None => Ok(Vec::new()),
            }
        });
        self.answers.push((rank, answer));
        true
    }

    /// The replies by rank, or the first failure of any rank. If the call `is_late`, a rank that refused it for that counts as one that
    /// did not answer: which of the two happens is a matter of microseconds.
    pub(crate) fn into_result(self, is_late: bool) -> Result<Vec<RankReply>, ExecutorError> {
        let mut succeeded = Vec::new();
        let mut replies = Vec::new();
        let mut first_failure = None;
        for (rank, answer) in self.answers {
            match answer {
                Ok(bytes) => {
                    succeeded.push(rank);
                    if self.replying.contains(rank) {
                        replies.push(RankReply { rank, bytes });
                    }
                }
                Err(failure) => {
                    first_failure.get_or_insert(failure);
                }
            }
        }
        match first_failure {
            None => {
                replies.sort_by_key(|reply| reply.rank);
                Ok(replies)
            }
            Some(failure) if is_late && failure.code == FailureCode::DeadlineExceeded => {
                let succeeded: RankSet = succeeded.into_iter().collect();
                Err(ExecutorError::Deadline {
                    what: format!("method `{}`", self.method),
                    silent: self.executing.without(succeeded).iter().collect(),
                })
            }
            Some(failure) => {
                succeeded.sort_unstable();
                Err(ExecutorError::Rank { failure, succeeded })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_refused_a_late_call_counts_as_silent() {
        let ended = |code| {
            let mut call = OpenMethod::new("echo", RankSet::all(3), RankSet::all(3));
            let failure = Failure::new(code, "too late").on_rank(Rank(1));
            call.answers = vec![(Rank(1), Err(failure)), (Rank(0), Ok(Vec::new()))];
            call
        };
        let late = ended(FailureCode::DeadlineExceeded).into_result(true);
        let expected = ExecutorError::Deadline {
            what: "method `echo`".to_owned(),
            silent: vec![Rank(1), Rank(2)],
        };
        assert_eq!(late, Err(expected));
        // What a rank says in time, or for another reason, is its own failure.
        for (code, is_late) in [
            (FailureCode::DeadlineExceeded, false),
            (FailureCode::OutOfMemory, true),
        ] {
            let failed = ended(code).into_result(is_late);
            assert!(
                matches!(&failed, Err(ExecutorError::Rank { failure, succeeded })
                    if failure.code == code && *succeeded == [Rank(0)]),
                "{failed:?}"
            );
        }
    }
}
