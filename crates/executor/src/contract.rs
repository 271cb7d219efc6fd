//! What an engine needs from an executor. An embedder's own executor implements this and runs the conformance suite.

use denoised_types::{CallId, Epoch, Failure, Generated, ModelInfo, Rank, RequestId, WaveId};
use denoised_wire::Wave;
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
    /// Exactly one [`ExecutorEvent::RequestDone`] per member and one [`ExecutorEvent::WaveDone`] follow, whatever happens.
    ///
    /// # Errors
    /// The world has failed or is closed (then no event follows), or `deadline` passed while the ring was full.
    fn dispatch(&self, wave: Wave, deadline: Instant) -> Result<CallId, ExecutorError>;

    /// Asks the workers to stop computing these requests at their next step. Unknown ids are ignored.
    ///
    /// # Errors
    /// As [`Executor::dispatch`].
    fn cancel(&self, requests: &[RequestId], deadline: Instant) -> Result<(), ExecutorError>;

    /// Waits until something happened, `until` is reached or the [`Waker`] is used, and returns what happened (maybe nothing).
    /// For the one thread that owns this world's requests.
    fn wait_events(&self, until: Instant) -> Vec<ExecutorEvent>;

    /// Interrupts [`Executor::wait_events`] from any thread; a wake that comes first is not lost.
    fn waker(&self) -> Waker;

    /// Runs a worker method and returns one reply per target rank, in rank order.
    ///
    /// # Errors
    /// [`ExecutorError::Rank`] with the first failing rank's failure and the ranks that succeeded; [`ExecutorError::Deadline`] naming
    /// the ranks that did not answer; otherwise as [`Executor::dispatch`].
    fn call(
        &self,
        method: &str,
        args: &[u8],
        target: CallTarget,
        deadline: Instant,
    ) -> Result<Vec<RankReply>, ExecutorError>;

    /// Pings every rank on the control lane and waits for the answers.
    fn health(&self, limit: Duration) -> Health;

    /// The first cause, once the world has failed.
    fn failure(&self) -> Option<Failure>;

    /// Runs `callback` once when the world fails; at once if it already has.
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
    /// Bytes of the prepared weights, shared by all ranks of a host.
    pub weight_bytes: u64,
    /// Process ids of the workers by rank; empty for workers without processes.
    pub pids: Vec<u32>,
}

/// Who runs a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallTarget {
    /// Every rank.
    All,
    /// One rank.
    One(Rank),
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
#[derive(Clone, Debug, PartialEq)]
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
        outcome: Result<Box<Generated>, Failure>,
    },
    /// A wave ended: its ranks are free again. After the `RequestDone` of all its members.
    WaveDone {
        /// Which.
        wave_id: WaveId,
    },
    /// The world failed; nothing follows this but silence. Every member of every wave has had its `RequestDone` before.
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
    /// The world has failed.
    #[error("{0}")]
    Failed(Failure),
    /// The executor was shut down.
    #[error("the executor is closed")]
    Closed,
    /// A rank's method failed.
    #[error("{failure} (succeeded on ranks {succeeded:?})")]
    Rank {
        /// The first failure.
        failure: Failure,
        /// Who succeeded.
        succeeded: Vec<Rank>,
    },
    /// Time ran out.
    #[error("{what}: deadline passed, no answer from ranks {silent:?}")]
    Deadline {
        /// What was waited for.
        what: String,
        /// Who did not answer.
        silent: Vec<Rank>,
    },
    /// The message is larger than the shared memory allows.
    #[error("message of {message_bytes} bytes exceeds the limit of {limit_bytes} bytes")]
    TooLarge {
        /// Size of the message.
        message_bytes: u64,
        /// Largest that fits.
        limit_bytes: u64,
    },
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
            ExecutorError::Failed(failure) | ExecutorError::Rank { failure, .. } => failure,
            ExecutorError::Closed => Failure::new(Code::Closed, error.to_string()),
            ExecutorError::Deadline { .. } => Failure::new(Code::DeadlineExceeded, error.to_string()),
            ExecutorError::TooLarge { .. } => Failure::new(Code::InvalidRequest, error.to_string()),
        }
    }
}
