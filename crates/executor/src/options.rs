//! What a world is started with.

use denoised_link::{LinkSpec, WORKER_ARG};
use denoised_types::{Rank, WorkerConfig};
use std::{ffi::OsString, fmt, io::Write, path::PathBuf, sync::Arc, time::Duration};

/// Bounds of a running world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of traced tensors, names and shapes included, that are kept for one request until it ends, and of one result or
    /// reply that comes in pieces; more fails that request or call with `OutOfMemory`.
    pub trace_bytes: u64,
    /// A rank that owes an answer, to a wave or a method, and gets nothing done for so long is taken for hung: the world fails. Longer
    /// than the longest step of the largest picture. So is an idle rank that shows no sign of life for so long.
    pub silence: Duration,
    /// Time for TERM, then KILL, of the ranks that are left when a world has failed.
    pub fence: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            trace_bytes: 1 << 30,
            silence: Duration::from_secs(600),
            fence: Duration::from_secs(1),
        }
    }
}

/// The program that a worker process runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerProgram {
    /// Its file; `None` is the program that runs now.
    pub path: Option<PathBuf>,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Changes to the environment that it inherits.
    pub env: Vec<(OsString, OsString)>,
}

impl Default for WorkerProgram {
    /// This program, with [`WORKER_ARG`] as its only argument.
    fn default() -> Self {
        Self {
            path: None,
            args: vec![WORKER_ARG.into()],
            env: Vec::new(),
        }
    }
}

/// Where the lines go that workers write to standard error. Called on a thread of its own; lines that come much faster than it takes
/// them are left out.
#[derive(Clone)]
pub struct StderrSink(pub Arc<TakeLine>);

/// Takes one line of a rank.
pub type TakeLine = dyn Fn(Rank, &str) + Send + Sync;

impl StderrSink {
    /// To this program's standard error, with the rank in front.
    pub fn forward() -> Self {
        Self(Arc::new(|rank, line| {
            // Nobody may be left to read it.
            let _ = writeln!(std::io::stderr(), "[rank {rank}] {line}");
        }))
    }

    /// Nowhere. The last lines are kept for errors all the same.
    pub fn quiet() -> Self {
        Self(Arc::new(|_, _| {}))
    }
}

impl fmt::Debug for StderrSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StderrSink")
    }
}

/// What [`crate::MpExecutor`] is started with.
#[derive(Clone, Debug)]
pub struct MpOptions {
    /// Worker processes, 1 to 64.
    pub n_workers: u16,
    /// What each of them loads. `n_threads` of `None` becomes the usable cores divided by the number of workers, at least one.
    pub worker: WorkerConfig,
    /// What each of them runs.
    pub program: WorkerProgram,
    /// Sizes of the shared memory.
    pub link: LinkSpec,
    /// All ranks must be ready within this time.
    pub start_limit: Duration,
    /// Bounds of the running world.
    pub limits: Limits,
    /// Where the workers' standard error goes.
    pub stderr: StderrSink,
}

impl MpOptions {
    /// `n_workers` processes of this program, ten minutes to start, everything else at its default.
    pub fn new(n_workers: u16, worker: WorkerConfig) -> Self {
        Self {
            n_workers,
            worker,
            program: WorkerProgram::default(),
            link: LinkSpec::default(),
            start_limit: Duration::from_secs(600),
            limits: Limits::default(),
            stderr: StderrSink::forward(),
        }
    }
}

/// What [`crate::UniExecutor`] is started with.
#[derive(Clone, Debug)]
pub struct UniOptions {
    /// What the worker loads. `n_threads` of `None` becomes the usable cores.
    pub worker: WorkerConfig,
    /// Bounds of the queues between the threads.
    pub link: LinkSpec,
    /// The worker must be ready within this time.
    pub start_limit: Duration,
    /// Bounds of the running world.
    pub limits: Limits,
}

impl UniOptions {
    /// Ten minutes to start, everything else at its default.
    pub fn new(worker: WorkerConfig) -> Self {
        Self {
            worker,
            link: LinkSpec::default(),
            start_limit: Duration::from_secs(600),
            limits: Limits::default(),
        }
    }
}
