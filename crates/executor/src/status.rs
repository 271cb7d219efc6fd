//! The control methods that every worker has, typed.

use crate::{Executor, ExecutorError, MethodCall, RankReply};
use denoised_types::{Failure, FailureCode, Rank};
use denoised_wire::DecodeError;
/// What the calls of this module return, and what that is made of.
pub use denoised_wire::{
    Doing, MemberProgress, Profile, RankProgress, Span, Work, WorkerMemory, WorkerStatus,
};
use std::time::{Duration, Instant};

/// Name of the method behind [`progress`].
pub(crate) const PROGRESS: &str = "progress";

/// What every rank does, answered also while it computes.
///
/// # Errors
/// As [`Executor::call`].
pub fn progress(
    executor: &dyn Executor,
    limit: Duration,
) -> Result<Vec<(Rank, RankProgress)>, ExecutorError> {
    ask(executor, PROGRESS, limit, RankProgress::from_bytes)
}

/// What every rank is and holds.
///
/// # Errors
/// As [`Executor::call`].
pub fn status(executor: &dyn Executor, limit: Duration) -> Result<Vec<(Rank, WorkerStatus)>, ExecutorError> {
    ask(executor, "status", limit, WorkerStatus::from_bytes)
}

/// The memory of every rank's process.
///
/// # Errors
/// As [`Executor::call`].
pub fn memory(executor: &dyn Executor, limit: Duration) -> Result<Vec<(Rank, WorkerMemory)>, ExecutorError> {
    ask(executor, "memory", limit, WorkerMemory::from_bytes)
}

/// Lets every rank record what it spends its time on, from now on.
///
/// # Errors
/// As [`Executor::call`].
pub fn profile_start(executor: &dyn Executor, limit: Duration) -> Result<(), ExecutorError> {
    executor
        .call(&MethodCall::new("profile_start", b"", Instant::now() + limit))
        .map(|_| ())
}

/// Ends the recording and returns what each rank recorded.
///
/// # Errors
/// As [`Executor::call`]; nothing is being recorded.
pub fn profile_stop(executor: &dyn Executor, limit: Duration) -> Result<Vec<(Rank, Profile)>, ExecutorError> {
    ask(executor, "profile_stop", limit, Profile::from_bytes)
}

fn ask<T>(
    executor: &dyn Executor,
    method: &str,
    limit: Duration,
    decode: fn(&[u8]) -> Result<T, DecodeError>,
) -> Result<Vec<(Rank, T)>, ExecutorError> {
    let replies = executor.call(&MethodCall::new(method, b"", Instant::now() + limit))?;
    let decode = |RankReply { rank, bytes }: RankReply| match decode(&bytes) {
        Ok(reply) => Ok((rank, reply)),
        Err(error) => Err(ExecutorError::Rank {
            failure: Failure::new(FailureCode::Protocol, error.to_string()).on_rank(rank),
            succeeded: Vec::new(),
        }),
    };
    replies.into_iter().map(decode).collect()
}
