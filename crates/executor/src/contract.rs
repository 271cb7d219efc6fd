//! What an engine needs from an executor. An embedder's own executor implements this and runs the conformance suite.

use crate::Output;
use denoised_types::{CallId, Epoch, Failure, ModelInfo, Rank, RequestId, WaveId, WorkerDevice};
use denoised_wire::{MethodInfo, Wave};
use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

/// A set of workers behind one address. See the rules in the crate's head.
///
/// `FakeExecutor` in `denoised_testkit` is a complete one without workers; `denoised_testkit::executor_conformance!` makes the
/// tests that every one with workers must pass.
pub trait Executor: Send + Sync + fmt::Debug {
    /// What this world is. Constant over an epoch.
    fn world(&self) -> WorldInfo;

    /// Broadcasts a wave. Returns as soon as it is published; what happens then arrives through [`Executor::wait_events`].
    /// Exactly one [`ExecutorEvent::WaveDone`] follows, whatever happens, and exactly one [`ExecutorEvent::RequestDone`] per request
    /// that ever joined: in request mode before its wave's end, in step mode in the wave in which it does its last step, fails or is
    /// cancelled, or when the world fails.
    ///
    /// # Errors
    /// [`ExecutorError::Refused`]: a rank that is not there, a request that joins while it is under way, or goes on without being
    /// resident on these ranks; the failure names it. The world has failed or is closed, or `deadline` passed while the ring was full.
    /// No event follows then.
    fn dispatch(&self, wave: Wave, deadline: Instant) -> Result<CallId, ExecutorError>;

    /// Asks the workers to stop computing these requests, which a wave in request mode holds, at their next step. Unknown ids are
    /// ignored, and so are requests in step mode, which are cancelled by [`Wave::cancelled`].
    ///
    /// # Errors
    /// As [`Executor::dispatch`].
    fn cancel(&self, requests: &[RequestId], deadline: Instant) -> Result<(), ExecutorError>;

    /// Waits until something happened, `until` is reached or the [`Waker`] is used, and returns what happened (maybe nothing).
    /// For the one thread that owns this world's requests.
    fn wait_events(&self, until: Instant) -> Vec<ExecutorEvent>;

    /// Interrupts [`Executor::wait_events`] from any thread; a wake that comes first is not lost.
    fn waker(&self) -> Waker;

    /// Runs a worker method and waits until every executing rank has ended it; returns the replies that were asked for, in rank
    /// order. On which lane it runs is the method's own property ([`WorldInfo::methods`]).
    ///
    /// # Errors
    /// [`ExecutorError::Refused`]: a rank that is not there, or one that shall reply and does not run it; [`ExecutorError::Rank`] with
    /// the first failing rank's failure, whether or not its reply was wanted, and the ranks that
    /// succeeded; [`ExecutorError::UnknownMethod`]; [`ExecutorError::Deadline`] naming the ranks that did not answer; otherwise as
    /// [`Executor::dispatch`]. A deadline that has passed sends nothing.
    fn call(&self, call: &MethodCall<'_>) -> Result<Vec<RankReply>, ExecutorError>;

    /// Pings every rank on the control lane and waits for the answers.
    fn health(&self, limit: Duration) -> Health;

    /// The first cause, once the world has failed.
    fn failure(&self) -> Option<Failure>;

    /// Runs `callback` once when the world fails; at once if it already has. It must return soon: the workers that are left are ended
    /// after it.
    fn on_failure(&self, callback: Box<dyn FnOnce(&Failure) + Send>);

    /// Ends the world: graceful, then TERM, then KILL, all within `budget`. Idempotent; every caller gets the same report.
    fn shutdown(&self, budget: Duration) -> ShutdownReport;
}

/// Wakes the thread in [`Executor::wait_events`]. Cheap to clone.
#[derive(Clone)]
pub struct Waker(pub Arc<dyn Fn() + Send + Sync>);

impl Waker {
    /// Wakes.
    pub fn wake(&self) {
        (self.0)();
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waker")
    }
}

/// What a world is.
#[derive(Clone, Debug, PartialEq)]
pub struct WorldInfo {
    /// Executor name: `uni`, `mp`, ….
    pub kind: &'static str,
    /// Number of workers.
    pub world_size: u16,
    /// Ranks of each replica; today every rank is a replica of its own.
    pub replicas: Vec<Vec<Rank>>,
    /// Incarnation.
    pub epoch: Epoch,
    /// What the workers loaded.
    pub model: Option<ModelInfo>,
    /// What the workers compute with, by rank; empty for workers that have no device.
    pub devices: Vec<WorkerDevice>,
    /// Bytes of the prepared weights of one rank; all ranks of a host share them where the device is the CPU.
    pub weight_bytes: u64,
    /// Process ids of the workers by rank; empty for workers without processes.
    pub pids: Vec<u32>,
    /// Methods that every rank has, by name.
    pub methods: Vec<MethodInfo>,
    /// What can be asked of it.
    pub capabilities: Capabilities,
}

/// What differs between kinds of executors; the conformance suite tests what is declared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// A worker that crashes or hangs takes nothing else with it, and can be ended.
    pub is_isolated: bool,
    /// Results may stay in the worker's memory until their [`Output`] is read or dropped.
    pub defers_outputs: bool,
    /// Workers run on other machines.
    pub is_remote: bool,
}

/// Every rank or one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranks {
    /// Every rank.
    All,
    /// One rank.
    One(Rank),
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all ranks"),
            Self::One(rank) => write!(f, "rank {rank}"),
        }
    }
}

/// What [`Executor::call`] is asked for.
///
/// ```
/// # use denoised_executor::{MethodCall, Ranks};
/// # use denoised_types::Rank;
/// # use std::time::{Duration, Instant};
/// let deadline = Instant::now() + Duration::from_secs(10);
/// // Runs on all ranks; only rank 1 sends its result.
/// let call = MethodCall::new("checksum", b"", deadline).reply(Ranks::One(Rank(1)));
/// // Runs on rank 2 alone, which replies.
/// let call = MethodCall::new("checksum", b"", deadline).execute(Ranks::One(Rank(2)));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct MethodCall<'a> {
    /// Name of the method.
    pub method: &'a str,
    /// Its arguments: for a method of the control lane at most 64 KiB with its name, else what the command arena holds.
    pub args: &'a [u8],
    /// Who runs it.
    pub execute: Ranks,
    /// Whose result is returned; unset, or all: all of those who run it. One rank that does not run it is refused.
    pub reply: Option<Ranks>,
    /// When the answers must be there: covers queueing, sending, executing and collecting.
    pub deadline: Instant,
}

impl<'a> MethodCall<'a> {
    /// A call on all ranks, all of which reply.
    pub const fn new(method: &'a str, args: &'a [u8], deadline: Instant) -> Self {
        Self {
            method,
            args,
            execute: Ranks::All,
            reply: None,
            deadline,
        }
    }

    /// The same call, run by `ranks` only.
    #[must_use]
    pub const fn execute(mut self, ranks: Ranks) -> Self {
        self.execute = ranks;
        self
    }

    /// The same call, of which only `ranks` send their result.
    #[must_use]
    pub const fn reply(mut self, ranks: Ranks) -> Self {
        self.reply = Some(ranks);
        self
    }
}

/// One rank's answer to a method call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankReply {
    /// Who.
    pub rank: Rank,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// What [`Executor::wait_events`] reports.
#[derive(Debug, PartialEq)]
pub enum ExecutorEvent {
    /// A worker began a request.
    RequestStarted {
        /// Which.
        request_id: RequestId,
        /// Where.
        rank: Rank,
    },
    /// A worker finished a step of a request.
    Step {
        /// Which.
        request_id: RequestId,
        /// Steps that are done.
        n_done: u32,
        /// Steps there will be.
        n_steps: u32,
    },
    /// A request ended, exactly once.
    RequestDone {
        /// Which.
        request_id: RequestId,
        /// How.
        outcome: Result<Output, Failure>,
    },
    /// A wave ended: its ranks are free again. After the `RequestDone` of all requests that ended in it.
    WaveDone {
        /// Which.
        wave_id: WaveId,
    },
    /// The world failed; nothing follows this but silence. Every request that had joined a wave has had its `RequestDone` before.
    WorldFailed(Failure),
}

/// Answer to a health check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Ranks that answered in time.
    pub answered: Vec<Rank>,
    /// Ranks that did not.
    pub silent: Vec<Rank>,
    /// Why the world is dead, if it is.
    pub failure: Option<Failure>,
}

impl Health {
    /// Whether every rank answered.
    pub fn is_healthy(&self) -> bool {
        self.failure.is_none() && self.silent.is_empty()
    }
}

/// How one rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankExit {
    /// Who.
    pub rank: Rank,
    /// `exit code 0`, `killed by signal 9 (SIGKILL)`.
    pub status: String,
    /// What it took: `graceful`, `TERM`, `KILL`, or `already dead`.
    pub means: &'static str,
    /// Time until it was gone.
    pub took: Duration,
}

/// What a shutdown did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShutdownReport {
    /// One entry per rank.
    pub ranks: Vec<RankExit>,
}

/// Errors of an executor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecutorError {
    /// The world could not be started; everything was undone.
    #[error("cannot start {kind} with {world_size} worker(s): {cause}{}", RankList(.ranks))]
    Start {
        /// Executor name.
        kind: &'static str,
        /// Workers asked for.
        world_size: u16,
        /// The first cause.
        cause: Failure,
        /// Each rank's phase, exit status and last words, one line or more per rank.
        ranks: Vec<String>,
    },
    /// The call or wave makes no sense; nothing was sent.
    #[error("{0}")]
    Refused(Failure),
    /// The world has failed.
    #[error("{0}")]
    Failed(Failure),
    /// The executor was shut down.
    #[error("the executor is closed")]
    Closed,
    /// A rank's method failed.
    #[error("{failure}{}", RankNames(" (succeeded on ", .succeeded, ")"))]
    Rank {
        /// The first failure.
        failure: Failure,
        /// Who succeeded.
        succeeded: Vec<Rank>,
    },
    /// No rank has this method.
    #[error("the workers have no method `{method}`; they have {}", .known.join(", "))]
    UnknownMethod {
        /// What was asked for.
        method: String,
        /// What there is.
        known: Vec<String>,
    },
    /// Time ran out.
    #[error("{what}: deadline passed{}", RankNames(", no answer from ", .silent, ""))]
    Deadline {
        /// What was waited for.
        what: String,
        /// Who did not answer.
        silent: Vec<Rank>,
    },
    /// The message is larger than the shared memory allows.
    #[error("message of {message_bytes} bytes exceeds the limit of {limit_bytes} bytes ({limited_by})")]
    TooLarge {
        /// Size of the message.
        message_bytes: u64,
        /// Largest that fits.
        limit_bytes: u64,
        /// What sets the limit.
        limited_by: &'static str,
    },
}

/// `ranks 0, 2` between two texts; nothing for no rank.
struct RankNames<'a>(&'static str, &'a [Rank], &'static str);

impl fmt::Display for RankNames<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(before, [first, others @ ..], after) = self else {
            return Ok(());
        };
        let word = if others.is_empty() { "rank" } else { "ranks" };
        write!(f, "{before}{word} {first}")?;
        for rank in others.iter() {
            write!(f, ", {rank}")?;
        }
        f.write_str(after)
    }
}

struct RankList<'a>(&'a [String]);

impl fmt::Display for RankList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for rank in self.0 {
            write!(f, "\n  {rank}")?;
        }
        Ok(())
    }
}

impl From<ExecutorError> for Failure {
    fn from(error: ExecutorError) -> Self {
        use denoised_types::FailureCode as Code;
        match error {
            ExecutorError::Start { ref cause, .. } => Failure {
                code: cause.code,
                message: error.to_string(),
                rank: None,
                phase: None,
            },
            ExecutorError::Refused(failure)
            | ExecutorError::Failed(failure)
            | ExecutorError::Rank { failure, .. } => failure,
            ExecutorError::Closed => Failure::new(Code::Closed, error.to_string()),
            ExecutorError::Deadline { .. } => Failure::new(Code::DeadlineExceeded, error.to_string()),
            ExecutorError::TooLarge { .. } | ExecutorError::UnknownMethod { .. } => {
                Failure::new(Code::InvalidRequest, error.to_string())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_named_in_words_and_nobody_is_not_named() {
        let failure = Failure::new(denoised_types::FailureCode::OutOfMemory, "no room").on_rank(Rank(1));
        let error = |succeeded| ExecutorError::Rank {
            failure: failure.clone(),
            succeeded,
        };
        assert_eq!(error(Vec::new()).to_string(), "rank 1: no room");
        assert_eq!(
            error(vec![Rank(0), Rank(2)]).to_string(),
            "rank 1: no room (succeeded on ranks 0, 2)"
        );
        let late = ExecutorError::Deadline {
            what: "method `echo`".to_owned(),
            silent: vec![Rank(3)],
        };
        assert_eq!(
            late.to_string(),
            "method `echo`: deadline passed, no answer from rank 3"
        );
    }
}
