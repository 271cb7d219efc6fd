//! One worker on a thread of this process: no isolation, nothing to install, easy to debug.
//!
//! U1. A thread cannot be killed. A worker that does not return from its step outlives the shutdown's budget; the report says so, and
//!     its thread ends with that step.

use crate::{
    Capabilities, Executor, ExecutorError, Limits, ShutdownReport, UniOptions, WorldInfo, WorldStats,
    hosted::Hosted,
    start::{Progress, Ready, default_n_threads, next_epoch, setup_failure},
    stop::{First, Lives, Stopper},
    world::World,
};
use denoised_link::{LinkError, LocalBoot, WorkerEnd, local_link};
use denoised_os::{Deadline, signal::Signal};
use denoised_types::{Failure, FailureCode, Rank};
use denoised_wire::{BootUp, StartPhase};
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

/// Budget of the shutdown that dropping does.
const DROP_BUDGET: Duration = Duration::from_secs(5);

/// One worker on a thread, and the world it forms. Dropping shuts down within five seconds.
#[derive(Debug)]
pub struct UniExecutor {
    shared: Arc<Shared>,
    monitor: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    world: Arc<World>,
    thread: Arc<WorkerThread>,
    stopper: Stopper,
    limits: Limits,
}

impl UniExecutor {
    /// Runs `serve` on a new thread with the worker's end of the link (it is to call `denoised_worker::serve` or the like), waits
    /// until the worker is ready, and tells `progress` how far it is.
    ///
    /// # Errors
    /// [`ExecutorError::Start`]: bad sizes, the worker failed or panicked, or it was not ready in time.
    pub fn start(
        options: UniOptions,
        serve: Box<dyn FnOnce(WorkerEnd) + Send>,
        progress: Progress<'_>,
    ) -> Result<Self, ExecutorError> {
        let deadline = Deadline::after(options.start_limit);
        let failed = |cause: Failure| {
            let ranks = vec![format!(
                "rank 0: {}",
                cause.phase.as_deref().unwrap_or("on a thread of this process")
            )];
            ExecutorError::Start {
                kind: "uni",
                world_size: 1,
                cause,
                ranks,
            }
        };
        let epoch = next_epoch();
        let mut config = options.worker;
        config.n_threads = config.n_threads.or_else(|| Some(default_n_threads(1)));
        let (end, boot, worker_end) =
            local_link(options.link, epoch, config).map_err(|error| failed(setup_failure(&error)))?;
        let thread = Arc::new(WorkerThread::default());
        let running = Arc::clone(&thread);
        std::thread::Builder::new()
            .name("worker 0".to_owned())
            .spawn(move || {
                let served = catch_unwind(AssertUnwindSafe(|| serve(worker_end)));
                running.end(match served {
                    Ok(()) => "returned".to_owned(),
                    Err(panic) => format!("panicked: {}", panic_text(&*panic)),
                });
            })
            .map_err(|error| failed(Failure::new(FailureCode::OutOfMemory, error.to_string())))?;
        let ready = await_ready(&boot, &thread, deadline, progress).map_err(failed)?;
        let info = WorldInfo {
            kind: "uni",
            world_size: 1,
            replicas: vec![vec![Rank(0)]],
            epoch,
            model: ready.model,
            devices: ready.device.into_iter().collect(),
            weight_bytes: ready.weight_bytes,
            pids: Vec::new(),
            methods: ready.methods,
            capabilities: Capabilities {
                is_isolated: false,
                defers_outputs: false,
                is_remote: false,
            },
        };
        let world = Arc::new(World::new(info, options.limits, end));
        {
            let thread = Arc::clone(&thread);
            world.set_monitor(Box::new(move || thread.poke()));
        }
        let shared = Arc::new(Shared {
            world,
            thread,
            stopper: Stopper::default(),
            limits: options.limits,
        });
        let monitored = Arc::clone(&shared);
        let monitor = std::thread::Builder::new()
            .name("executor monitor".to_owned())
            .spawn(move || monitor(&monitored))
            .map_err(|error| failed(Failure::new(FailureCode::OutOfMemory, error.to_string())))?;
        Ok(Self {
            shared,
            monitor: Mutex::new(Some(monitor)),
        })
    }

    /// Counts of what was sent and dropped.
    pub fn stats(&self) -> WorldStats {
        self.shared.world.stats()
    }
}

fn await_ready(
    boot: &LocalBoot,
    thread: &WorkerThread,
    deadline: Deadline,
    progress: Progress<'_>,
) -> Result<Ready, Failure> {
    let rank = Rank(0);
    let mut phase = StartPhase::Spawned;
    progress(rank, phase);
    loop {
        match boot.receive(deadline) {
            Ok(BootUp::Phase(next)) => {
                phase = next;
                progress(rank, phase);
            }
            Ok(BootUp::Ready {
                model,
                device,
                weight_bytes,
                methods,
            }) => {
                progress(rank, StartPhase::Ready);
                return Ok(Ready {
                    model,
                    device,
                    weight_bytes,
                    methods,
                });
            }
            Ok(BootUp::StartFailed(failure)) => return Err(failure),
            // There is nobody to share with.
            Ok(BootUp::PublishShared { .. }) => {}
            Err(LinkError::TimedOut) => {
                let text = "rank 0 was not ready in time";
                return Err(Failure::new(FailureCode::DeadlineExceeded, text)
                    .on_rank(rank)
                    .during(phase.to_string()));
            }
            Err(_) => {
                // It has dropped its end; how its thread ended is known in a moment.
                thread.wait_ended(Deadline::after(Duration::from_secs(1)));
                let how = thread.ended(0).unwrap_or_else(|| "closed its link".to_owned());
                let text = format!("the worker's thread {how}");
                return Err(Failure::new(FailureCode::WorkerLost, text)
                    .on_rank(rank)
                    .during(phase.to_string()));
            }
        }
    }
}

impl Hosted for UniExecutor {
    fn hosted(&self) -> &Arc<World> {
        &self.shared.world
    }

    fn end(&self, budget: Duration) -> ShutdownReport {
        let Shared {
            world,
            thread,
            stopper,
            ..
        } = &*self.shared;
        let report = stopper.stop(world, &**thread, budget, First::Graceful);
        thread.poke();
        report
    }
}

impl Drop for UniExecutor {
    fn drop(&mut self) {
        self.shutdown(DROP_BUDGET);
        let monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A failure callback runs on the monitor's thread and may hold the last reference.
        if let Some(monitor) = monitor
            && monitor.thread().id() != std::thread::current().id()
        {
            // A panic of the monitor has been printed by its own hook.
            let _ = monitor.join();
        }
    }
}

/// The worker's thread, as its monitor sees it.
#[derive(Debug, Default)]
struct WorkerThread {
    state: Mutex<ThreadState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ThreadState {
    ended: Option<String>,
    poked: bool,
}

impl WorkerThread {
    fn lock(&self) -> MutexGuard<'_, ThreadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, how: String) {
        self.lock().ended = Some(how);
        self.changed.notify_all();
    }

    /// Lets the monitor look around.
    fn poke(&self) {
        self.lock().poked = true;
        self.changed.notify_all();
    }

    fn wait_ended(&self, deadline: Deadline) {
        let mut state = self.lock();
        while state.ended.is_none() && !deadline.has_passed() {
            let waited = self.changed.wait_timeout(state, deadline.remaining());
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until it has ended (unless that `is_known`), was poked, or `until` is reached.
    fn wait_news(&self, is_known: bool, until: Deadline) {
        let mut state = self.lock();
        while !state.poked && (state.ended.is_none() || is_known) && !until.has_passed() {
            let waited = self.changed.wait_timeout(state, until.remaining());
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.poked = false;
    }
}

impl Lives for WorkerThread {
    fn ended(&self, _rank_idx: usize) -> Option<String> {
        self.lock().ended.clone()
    }

    fn wait(&self, deadline: Deadline) {
        self.wait_ended(deadline);
    }

    fn signal(&self, _rank_idx: usize, _signal: Signal) {}
}

fn monitor(shared: &Shared) {
    let Shared {
        world,
        thread,
        stopper,
        limits,
    } = shared;
    let mut is_gone = false;
    let mut is_torn_down = false;
    loop {
        thread.wait_news(is_gone, world.watch());
        if let (false, Some(how)) = (is_gone, thread.ended(0)) {
            is_gone = true;
            world.rank_gone(Rank(0), &how, None);
        }
        if !is_torn_down && world.run_callbacks() {
            is_torn_down = true;
            // The control lane is the only way to tell a thread.
            world.send_stop();
            stopper.stop(world, &**thread, limits.fence, First::Term);
        }
        if stopper.is_done() {
            return;
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text,
        (None, None) => "no text",
    }
}
