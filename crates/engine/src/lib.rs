//! The loop that owns requests: admits them, has an executor compute them, and tells each owner what became of it.
//!
//! This is the crate to embed. Start an executor, give it to [`Engine::start`], submit from any thread, and read each request's
//! events from its own [`RequestHandle`], blocking or from any async runtime. Knows nothing of sockets, JSON, tensors, or
//! of how workers live and die.
//!
//! R1. Every admitted request ends exactly once: finished or failed, whatever workers, executor, policy or owner do.
//! R2. What waits is bounded, unread events are bounded, and every request has a deadline; a full queue refuses at once.
//! R3. A dead world refuses fast, with its first cause.
//! R4. Dropping a [`RequestHandle`] cancels; dropping the last [`EngineHandle`] closes.
//!
//! How requests run is the policy's choice: [`RequestPolicy`] gives a worker whole generations, one or several of a kind at a time;
//! [`StepPolicy`] one step of everything it has begun, so that requests join and leave at any step. [`policy()`] picks by mode; one of
//! your own implements [`Policy`] with what is in [`scheduler`].
//!
//! # Example
//!
//! `FakeExecutor` stands for the executor: it paints without workers. With real ones, only its line changes.
//!
//! ```
//! use denoised_engine::{Engine, EngineOptions, RequestEvent, RequestPolicy, SubmitOptions};
//! use denoised_testkit::fake_executor::FakeExecutor;
//! use denoised_types::{Failure, GenerateRequest};
//! use std::time::{Duration, Instant};
//!
//! # fn main() -> Result<(), Failure> {
//! let executor = FakeExecutor::start(2);
//! let max_queued = 64;
//! let engine = Engine::start(executor, Box::new(RequestPolicy::new(max_queued)), EngineOptions::default())?;
//!
//! let mut request = GenerateRequest::new("a lighthouse in the fog");
//! request.seed = 7;
//! let deadline = Some(Instant::now() + Duration::from_secs(60));
//! let handle = engine.submit(request, SubmitOptions { deadline })?;
//! for event in handle {
//!     match event {
//!         RequestEvent::Queued { position } => println!("{position} in front"),
//!         RequestEvent::Started { rank } => println!("begun by rank {rank}"),
//!         RequestEvent::Step { n_done, n_steps } => println!("step {n_done} of {n_steps}"),
//!         RequestEvent::Finished(output) => println!("{:?}", output.into_generated().image),
//!         RequestEvent::Failed(failure) => return Err(failure),
//!     }
//! }
//!
//! let report = engine.close(Duration::from_secs(10));
//! assert_eq!(report.n_failed, 0);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod batch_key;
mod core;
mod mailbox;
mod metrics;
mod request;
mod run;
mod validate;

#[cfg(test)]
mod simulation;

pub use denoised_executor::{
    Executor, ExecutorError, Health, MethodCall, Output, RankReply, Ranks, ShutdownReport, WorldInfo,
};
/// What a policy of one's own is written with: [`Policy`], and the events it is told and the actions it answers with.
pub use denoised_scheduler as scheduler;
pub use denoised_scheduler::{Policy, RequestPolicy, StepPolicy, policy};
pub use metrics::Stats;
pub use request::{RequestEvent, RequestHandle};

use denoised_types::{Failure, FailureCode, GenerateRequest};
use run::Shared;
use std::{
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Limits of an engine. How many requests may wait is the policy's to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Deadline of a request whose [`SubmitOptions`] name none, from its submission.
    pub default_deadline: Duration,
    /// How long a running request's own end is awaited after its deadline, before it fails without.
    pub cancel_grace: Duration,
    /// How long a worker may go on after everything it computes was told to stop, and how long a replica that has begun requests may
    /// take no further message; then the world counts as failed and is ended. Must exceed the longest single denoiser step or decode,
    /// for workers heed a stop between steps.
    pub stuck_limit: Duration,
    /// How long the executor may take to accept one message.
    pub dispatch_limit: Duration,
    /// Budget of the close when the last [`EngineHandle`] is dropped.
    pub drop_budget: Duration,
}

impl Default for EngineOptions {
    /// One hour, 5 s, 10 minutes, 5 s, 30 s.
    fn default() -> Self {
        Self {
            default_deadline: Duration::from_secs(3600),
            cancel_grace: Duration::from_secs(5),
            stuck_limit: Duration::from_secs(600),
            dispatch_limit: Duration::from_secs(5),
            drop_budget: Duration::from_secs(30),
        }
    }
}

/// How one request is to be treated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubmitOptions {
    /// When its result is worthless; covers waiting and computing. `None` takes [`EngineOptions::default_deadline`].
    pub deadline: Option<Instant>,
}

/// What a close did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloseReport {
    /// Requests that were left when the time to drain was over, and failed with [`FailureCode::Closed`].
    pub n_failed: usize,
    /// The first cause, if the world or the engine had failed.
    pub failure: Option<Failure>,
    /// How each rank ended.
    pub shutdown: ShutdownReport,
    /// `false` if the engine's thread did not report in time (it is held up in the executor), or is the caller.
    pub is_complete: bool,
}

/// Starts engines.
#[derive(Debug)]
pub struct Engine;

impl Engine {
    /// Starts the loop on a thread of its own. The engine is from now on the one that drives `executor`'s events and ends it.
    ///
    /// # Errors
    /// The executor offers no replica, the policy panicked, or no thread could be had ([`FailureCode::OutOfMemory`]).
    pub fn start(
        executor: Arc<dyn Executor>,
        policy: Box<dyn Policy>,
        options: EngineOptions,
    ) -> Result<EngineHandle, Failure> {
        let shared = Shared::new(executor, policy, options)?;
        let for_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("denoised-engine".into())
            .spawn(move || run::run(&for_thread));
        let thread = thread.map_err(|error| {
            Failure::new(
                FailureCode::OutOfMemory,
                format!("cannot start the engine's thread: {error}"),
            )
        })?;
        let owner = Owner {
            shared,
            thread: Mutex::new(Some(thread)),
        };
        Ok(EngineHandle {
            owner: Arc::new(owner),
        })
    }
}

/// An engine, for any number of threads. Cheap to clone; dropping the last one closes the engine, and the requests that are
/// left then end as with [`EngineHandle::close`].
#[derive(Clone, Debug)]
pub struct EngineHandle {
    owner: Arc<Owner>,
}

impl EngineHandle {
    /// Checks and admits a request. Never waits for room or for a worker.
    ///
    /// # Errors
    /// [`FailureCode::InvalidRequest`] if no model could carry it out, [`FailureCode::QueueFull`],
    /// [`FailureCode::DeadlineExceeded`] for a deadline that has passed, [`FailureCode::Closed`], or the world's first failure.
    pub fn submit(&self, request: GenerateRequest, options: SubmitOptions) -> Result<RequestHandle, Failure> {
        self.owner.shared.submit(request, options)
    }

    /// Asks every worker for a sign of life and waits up to `limit`. After a failure or close it says so at once.
    pub fn health(&self, limit: Duration) -> Health {
        self.owner.shared.health(limit)
    }

    /// Runs a method of the workers beside whatever runs, and waits for it; see [`Executor::call`].
    ///
    /// # Errors
    /// As [`Executor::call`]; [`ExecutorError::Failed`] and [`ExecutorError::Closed`] also for the engine itself.
    pub fn call(&self, call: &MethodCall<'_>) -> Result<Vec<RankReply>, ExecutorError> {
        self.owner.shared.call(call)
    }

    /// The executor, for what the engine does not pass on. Waves, events and the shutdown stay the engine's to drive.
    pub fn executor(&self) -> &Arc<dyn Executor> {
        self.owner.shared.executor()
    }

    /// Counters and present numbers.
    pub fn stats(&self) -> Stats {
        self.owner.shared.stats()
    }

    /// The world as it was at the start.
    pub fn world(&self) -> &WorldInfo {
        self.owner.shared.world()
    }

    /// Takes nothing new, lets what was admitted finish, fails what has not after about two thirds of `budget` (all but 10 s of
    /// a long one), and ends the workers in the rest. Returns when they are gone, within `budget` and a second of slack.
    /// Idempotent, from any thread; the shortest of several budgets counts, and all callers get the same report.
    pub fn close(&self, budget: Duration) -> CloseReport {
        self.owner.shared.close(budget)
    }
}

/// What the handles own together; its end is the engine's end.
#[derive(Debug)]
struct Owner {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.close(self.shared.drop_budget());
        let thread = self
            .thread
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        // Without a report the thread is held up, or is this one; either way joining it would not end.
        if let Some(thread) = thread
            && self.shared.is_closed()
            && thread.thread().id() != thread::current().id()
        {
            // A panic of the thread was handled there.
            drop(thread.join());
        }
    }
}
