//! The shell around the core: one thread, the clock, the executor's calls, the mailboxes.
//!
//! Knows nothing of which request comes next or how one ends; it carries out what the core says.
//!
//! R1. The core is asked under one lock, by whichever thread has something to say; only the engine's thread calls the executor.
//! R2. A panic in the core or the policy, in any thread, ends the engine: every mailbox gets its terminal event, `submit` refuses.
//! R3. Wakers run after the lock is released: they are foreign code and may call back.
//! R4. Every wait has an end; an executor that returns at once for no reason does not make the thread spin.

use crate::{
    CloseReport, EngineOptions, RequestEvent, RequestHandle, Stats, SubmitOptions,
    core::{Action, Core, CoreOptions, Event},
    mailbox::Mailbox,
    validate::validate,
};
use denoised_executor::{Executor, ExecutorError, Health, MethodCall, RankReply, ShutdownReport, WorldInfo};
use denoised_scheduler::{Millis, Policy};
use denoised_types::{Failure, FailureCode, GenerateRequest, Rank, RequestId};
use denoised_wire::Wave;
use std::{
    any::Any,
    collections::{HashMap, VecDeque},
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::Waker,
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

/// Longest sleep of the thread, however little there is to do.
const IDLE_WAIT: Duration = Duration::from_secs(60);
/// Pause before a stop that could not be sent is sent again.
const RETRY_WAIT: Duration = Duration::from_millis(100);
/// How often the executor may wake the thread for nothing before the thread pauses.
const MAX_EMPTY_WAKES: u32 = 1000;
/// Most of a close's budget that is kept for the executor's shutdown.
const MAX_SHUTDOWN_SHARE: Duration = Duration::from_secs(10);
/// How long the executor may take to end a world that has failed.
const FAILED_SHUTDOWN: Duration = Duration::from_secs(10);
/// How long past its budget a close waits for the thread's report.
const CLOSE_SLACK: Duration = Duration::from_secs(1);
/// How long past the engine's own limits a blocking reader waits.
const READER_SLACK: Duration = Duration::from_secs(60);

/// What handles, requests and the thread share.
pub(crate) struct Shared {
    executor: Arc<dyn Executor>,
    wake: denoised_executor::Waker,
    world: WorldInfo,
    clock: Clock,
    options: EngineOptions,
    state: Mutex<State>,
    /// The report is there.
    closed: Condvar,
}

struct State {
    core: Core,
    mailboxes: HashMap<RequestId, Arc<Mailbox>>,
    /// What the thread has to tell the executor, in order. At most a wave per replica and a stop per running request.
    orders: VecDeque<Order>,
    last_id: u64,
    close: Option<CloseOrder>,
    report: Option<CloseReport>,
    thread: Option<ThreadId>,
}

#[derive(Debug)]
enum Order {
    Dispatch(Wave),
    Stop(Vec<RequestId>),
}

/// How a close is to go.
#[derive(Clone, Copy, Debug)]
struct CloseOrder {
    /// Until when requests may still finish.
    drain_until: Instant,
    /// Until when the executor may take to stop.
    end: Instant,
}

/// Relates the engine's milliseconds to the host's monotonic clock.
#[derive(Clone, Copy, Debug)]
struct Clock {
    origin: Instant,
    /// What the host's clock showed at `origin`.
    origin_ns: u64,
}

impl Clock {
    fn millis(self, at: Instant) -> Millis {
        let elapsed = at.saturating_duration_since(self.origin).as_millis();
        Millis(u64::try_from(elapsed).unwrap_or(u64::MAX))
    }

    /// The first millisecond at or after `at`.
    fn deadline(self, at: Instant) -> Millis {
        self.millis(at.checked_add(Duration::from_nanos(999_999)).unwrap_or(at))
    }

    /// A moment of the host's clock.
    fn host_instant(self, at_ns: u64) -> Option<Instant> {
        self.origin
            .checked_add(Duration::from_nanos(at_ns.saturating_sub(self.origin_ns)))
    }

    /// `None` when the clock cannot show it.
    fn instant(self, at: Millis) -> Option<Instant> {
        self.origin.checked_add(Duration::from_millis(at.0))
    }
}

/// What is left to do once the lock is released.
#[derive(Default)]
#[must_use]
struct After {
    wakers: Vec<Waker>,
    /// The refusal of the request that was being submitted.
    refusal: Option<Failure>,
}

impl After {
    fn run(self) -> Option<Failure> {
        for waker in self.wakers {
            // One owner's broken task is not the other requests' concern.
            if let Err(cause) = catch_unwind(AssertUnwindSafe(|| waker.wake())) {
                tracing::error!(
                    "{}",
                    panic_failure("the waker of a request's owner", cause.as_ref())
                );
            }
        }
        self.refusal
    }
}

impl Shared {
    /// Builds the state; nothing runs yet.
    pub(crate) fn new(
        executor: Arc<dyn Executor>,
        policy: Box<dyn Policy>,
        options: EngineOptions,
    ) -> Result<Arc<Self>, Failure> {
        let world = executor.world();
        if world.replicas.is_empty() || world.replicas.iter().any(Vec::is_empty) {
            let message = format!(
                "the {} executor offers no replica, or one without ranks",
                world.kind
            );
            return Err(Failure::new(FailureCode::Internal, message));
        }
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        // Two readings of one clock, so that workers can compare deadlines with their own reading.
        let (origin, origin_ns) = (Instant::now(), denoised_os::now_ns());
        let core = CoreOptions {
            replicas: world.replicas.clone(),
            model: world.model.clone(),
            cancel_grace_ms: millis(options.cancel_grace),
            stuck_limit_ms: millis(options.stuck_limit),
            origin_ns,
        };
        let core = catch_unwind(AssertUnwindSafe(|| Core::new(Millis(0), policy, core)))
            .map_err(|cause| panic_failure("the scheduling policy", cause.as_ref()))?;
        let state = State {
            core,
            mailboxes: HashMap::new(),
            orders: VecDeque::new(),
            last_id: 0,
            close: None,
            report: None,
            thread: None,
        };
        Ok(Arc::new(Self {
            wake: executor.waker(),
            executor,
            world,
            clock: Clock { origin, origin_ns },
            options,
            state: Mutex::new(state),
            closed: Condvar::new(),
        }))
    }

    /// Checks and admits a request, or says at once why not.
    pub(crate) fn submit(
        self: &Arc<Self>,
        request: GenerateRequest,
        options: SubmitOptions,
    ) -> Result<RequestHandle, Failure> {
        let deadline = self
            .admissible(&request, options)
            .inspect_err(|_| self.lock().core.count_refused())?;
        let mailbox = Arc::new(Mailbox::default());
        let mut state = self.lock();
        state.last_id += 1;
        let request_id = RequestId(state.last_id);
        state.mailboxes.insert(request_id, Arc::clone(&mailbox));
        let event = Event::Submit {
            request_id,
            request: Box::new(request),
            deadline: self.clock.deadline(deadline),
        };
        let after = self.apply(&mut state, event);
        drop(state);
        let refusal = after.run();
        // Also after a refusal: the policy may have panicked just now, which the thread has to hear.
        self.wake.wake();
        if let Some(failure) = refusal {
            return Err(failure);
        }
        let slack = self.options.cancel_grace.saturating_add(READER_SLACK);
        let give_up_at = deadline.checked_add(slack).unwrap_or(deadline);
        Ok(RequestHandle::new(
            request_id,
            mailbox,
            Arc::clone(self),
            give_up_at,
        ))
    }

    /// The deadline of a request that may go to the core.
    fn admissible(&self, request: &GenerateRequest, options: SubmitOptions) -> Result<Instant, Failure> {
        validate(request)?;
        let now = Instant::now();
        // A clock that cannot show the default's end is met by no real default; a century then does as well.
        let default = now.checked_add(self.options.default_deadline);
        let default = default.unwrap_or(now + Duration::from_secs(100 * 365 * 24 * 3600));
        let deadline = options.deadline.unwrap_or(default);
        if deadline <= now {
            let message = "the deadline had passed when the request was submitted";
            return Err(Failure::new(FailureCode::DeadlineExceeded, message));
        }
        // The world may be known to be dead before the engine's thread has heard of it.
        self.executor.failure().map_or(Ok(deadline), Err)
    }

    pub(crate) fn cancel(&self, request_id: RequestId) {
        self.step(Event::Cancel { request_id });
        self.wake.wake();
    }

    pub(crate) fn world(&self) -> &WorldInfo {
        &self.world
    }

    pub(crate) fn stats(&self) -> Stats {
        self.lock().core.stats()
    }

    pub(crate) fn executor(&self) -> &Arc<dyn Executor> {
        &self.executor
    }

    /// Runs a worker method, unless the engine knows already that nobody would.
    pub(crate) fn call(&self, call: &MethodCall<'_>) -> Result<Vec<RankReply>, ExecutorError> {
        let state = self.lock();
        let (failure, is_closed) = (state.core.failure().cloned(), state.report.is_some());
        drop(state);
        match (failure, is_closed) {
            (Some(failure), _) => Err(ExecutorError::Failed(failure)),
            (None, true) => Err(ExecutorError::Closed),
            (None, false) => self.executor.call(call),
        }
    }

    /// The executor's health, or why there is none.
    pub(crate) fn health(&self, limit: Duration) -> Health {
        let state = self.lock();
        let failure = match (state.core.failure(), &state.report) {
            (Some(failure), _) => Some(failure.clone()),
            (None, Some(_)) => Some(Failure::new(FailureCode::Closed, "the engine is closed")),
            (None, None) => None,
        };
        drop(state);
        if failure.is_some() {
            // Nobody is asked: the workers are gone, or going.
            let silent = (0..self.world.world_size).map(Rank).collect();
            return Health {
                answered: Vec::new(),
                silent,
                failure,
            };
        }
        self.executor.health(limit)
    }

    /// Closes within `budget` and returns the one report.
    pub(crate) fn close(&self, budget: Duration) -> CloseReport {
        let now = Instant::now();
        let end = now
            .checked_add(budget)
            .unwrap_or(now + Duration::from_secs(24 * 3600));
        let drain_until = end - MAX_SHUTDOWN_SHARE.min(budget / 3);
        let mut state = self.lock();
        let close = state.close.unwrap_or(CloseOrder { drain_until, end });
        // Whoever is in the greatest hurry decides.
        state.close = Some(CloseOrder {
            drain_until: close.drain_until.min(drain_until),
            end: close.end.min(end),
        });
        let after = self.apply(&mut state, Event::Drain);
        drop(state);
        after.run();
        self.wake.wake();

        let mut state = self.lock();
        // The engine's own thread (a waker or callback of the embedder runs on it) cannot wait for itself.
        let may_wait = state.thread != Some(thread::current().id());
        let until = end.checked_add(CLOSE_SLACK).unwrap_or(end);
        while may_wait && state.report.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self
                .closed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        if let Some(report) = &state.report {
            return report.clone();
        }
        let failure = state.core.failure().cloned();
        drop(state);
        if !may_wait {
            return CloseReport {
                failure,
                is_complete: false,
                ..CloseReport::default()
            };
        }
        // The thread is held up in the executor. What can be done without it is done.
        let n_failed = self.fail_rest(Event::Close);
        let shutdown = self.shut_down(Duration::ZERO);
        CloseReport {
            n_failed,
            failure,
            shutdown,
            is_complete: false,
        }
    }

    pub(crate) fn drop_budget(&self) -> Duration {
        self.options.drop_budget
    }

    /// Whether the thread has left its last report.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().report.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock is caught under the lock (`apply`), which leaves the state usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step(&self, event: Event) {
        let mut state = self.lock();
        let after = self.apply(&mut state, event);
        drop(state);
        after.run();
    }

    /// Asks the core and carries out what it says, up to what must wait for the lock's release.
    fn apply(&self, state: &mut State, event: Event) -> After {
        let mut submitted = match &event {
            Event::Submit { request_id, .. } => Some(*request_id),
            _ => None,
        };
        let now = self.clock.millis(Instant::now());
        let mut after = After::default();
        let actions =
            catch_unwind(AssertUnwindSafe(|| state.core.on_event(now, event))).unwrap_or_else(|cause| {
                let failure = panic_failure("the engine's scheduling", cause.as_ref());
                state.core.on_event(now, Event::Fail(failure))
            });
        for action in actions {
            match action {
                Action::Notify { request_id, event } => {
                    if submitted == Some(request_id) {
                        match &event {
                            // Admitted: whatever comes next goes to its owner.
                            RequestEvent::Queued { .. } => submitted = None,
                            RequestEvent::Failed(failure) => after.refusal = Some(failure.clone()),
                            RequestEvent::Started { .. }
                            | RequestEvent::Step { .. }
                            | RequestEvent::Finished(_) => {}
                        }
                    }
                    state.notify(request_id, event, &mut after.wakers);
                }
                Action::Dispatch(wave) => state.orders.push_back(Order::Dispatch(wave)),
                Action::Stop(request_ids) => state.orders.push_back(Order::Stop(request_ids)),
            }
        }
        if let Some(failure) = state.core.failure().cloned() {
            state.orders.clear();
            // A panic may have swallowed actions with terminal events in them.
            let left: Vec<RequestId> = state.mailboxes.keys().copied().collect();
            for request_id in left {
                if submitted == Some(request_id) {
                    after.refusal = Some(failure.clone());
                }
                state.notify(
                    request_id,
                    RequestEvent::Failed(failure.clone()),
                    &mut after.wakers,
                );
            }
        }
        after
    }

    /// Ends every request that is left; returns how many there were.
    fn fail_rest(&self, event: Event) -> usize {
        let mut state = self.lock();
        let n_failed = state.mailboxes.len();
        let after = self.apply(&mut state, event);
        drop(state);
        after.run();
        n_failed
    }

    fn shut_down(&self, budget: Duration) -> ShutdownReport {
        let shutdown = catch_unwind(AssertUnwindSafe(|| self.executor.shutdown(budget)));
        shutdown.unwrap_or_else(|cause| {
            let failure = panic_failure("the executor's shutdown", cause.as_ref());
            tracing::error!("{failure}");
            ShutdownReport::default()
        })
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("world", &self.world)
            .finish_non_exhaustive()
    }
}

impl State {
    fn notify(&mut self, request_id: RequestId, event: RequestEvent, wakers: &mut Vec<Waker>) {
        let mailbox = if event.is_terminal() {
            self.mailboxes.remove(&request_id)
        } else {
            self.mailboxes.get(&request_id).cloned()
        };
        wakers.extend(mailbox.and_then(|mailbox| mailbox.put(event)));
    }
}

/// The engine's thread, from start to report.
pub(crate) fn run(shared: &Shared) {
    shared.lock().thread = Some(thread::current().id());
    let ended = catch_unwind(AssertUnwindSafe(|| serve(shared)));
    if let Err(cause) = ended {
        let failure = panic_failure("the engine's thread", cause.as_ref());
        shared.step(Event::Fail(failure));
    }
    let failure = shared.lock().core.failure().cloned();
    if let Some(failure) = &failure {
        tracing::error!("the engine stops: {failure}");
    }
    // After a failure nothing is left here and the table is not asked.
    let n_failed = shared.fail_rest(Event::Close);
    if failure.is_none() {
        let sent = catch_unwind(AssertUnwindSafe(|| carry_out_orders(shared, Duration::ZERO)));
        drop(sent);
    }
    let until = shared.lock().close.map(|close| close.end);
    let budget = until.map_or(FAILED_SHUTDOWN, |end| {
        end.saturating_duration_since(Instant::now())
    });
    let shutdown = shared.shut_down(budget);
    let mut state = shared.lock();
    state.report = Some(CloseReport {
        n_failed,
        failure,
        shutdown,
        is_complete: true,
    });
    shared.closed.notify_all();
}

/// Serves until the world fails or a close has drained or run out of time.
fn serve(shared: &Shared) {
    let mut n_empty_wakes = 0;
    loop {
        let is_all_sent = carry_out_orders(shared, shared.options.dispatch_limit);
        let Some(mut until) = next_wake(shared) else {
            return;
        };
        if !is_all_sent {
            until = until.min(Instant::now() + RETRY_WAIT);
        }
        let events = shared.executor.wait_events(until);
        n_empty_wakes = if events.is_empty() && Instant::now() < until {
            n_empty_wakes + 1
        } else {
            0
        };
        for event in events {
            shared.step(Event::Executor(event));
        }
        if n_empty_wakes > 0 {
            if let Some(failure) = shared.executor.failure() {
                shared.step(Event::Fail(failure));
            } else if n_empty_wakes > MAX_EMPTY_WAKES {
                thread::sleep(Duration::from_millis(1));
            }
        }
        shared.step(Event::Tick);
    }
}

/// Until when there is nothing to do; `None` when the engine is to stop.
fn next_wake(shared: &Shared) -> Option<Instant> {
    let state = shared.lock();
    if state.core.failure().is_some() {
        return None;
    }
    let now = Instant::now();
    let tick = state.core.next_tick().and_then(|tick| shared.clock.instant(tick));
    let until = tick.map_or(now + IDLE_WAIT, |tick| tick.min(now + IDLE_WAIT));
    match state.close {
        None => Some(until),
        Some(close) if state.core.is_idle() || now >= close.drain_until => None,
        Some(close) => Some(until.min(close.drain_until)),
    }
}

/// Tells the executor what the core decided, each thing within `limit`. Returns whether all of it could be told.
fn carry_out_orders(shared: &Shared, limit: Duration) -> bool {
    let mut unsent = Vec::new();
    loop {
        // Taken one at a time: an order that fails may cancel those behind it.
        let Some(order) = shared.lock().orders.pop_front() else {
            break;
        };
        let now = Instant::now();
        let until = now.checked_add(limit).unwrap_or(now + IDLE_WAIT);
        match order {
            Order::Dispatch(wave) => {
                let wave_id = wave.wave_id;
                // Sending is part of the time that the requests have; 0 stands for none.
                let deadlines = wave.joining.iter().map(|member| member.deadline_ns);
                let deadline_ns = deadlines.max().filter(|at_ns| *at_ns > 0);
                let deadline = deadline_ns.and_then(|at_ns| shared.clock.host_instant(at_ns));
                let until = deadline.map_or(until, |deadline| deadline.min(until));
                // Several that are too large together may fit one by one.
                let joining = match wave.joining.len() {
                    2.. => wave.joining.clone(),
                    _ => Vec::new(),
                };
                if let Err(error) = shared.executor.dispatch(wave, until) {
                    tracing::warn!("wave {wave_id} could not be sent: {error}");
                    shared.step(Event::DispatchFailed {
                        wave_id,
                        error,
                        joining,
                    });
                }
            }
            Order::Stop(request_ids) => match shared.executor.cancel(&request_ids, until) {
                Ok(()) => {}
                Err(ExecutorError::Failed(failure)) => shared.step(Event::Fail(failure)),
                Err(error @ ExecutorError::Closed) => shared.step(Event::Fail(error.into())),
                Err(error) => {
                    tracing::warn!("requests {request_ids:?} could not be told to stop: {error}");
                    unsent.push(request_ids);
                }
            },
        }
    }
    let mut state = shared.lock();
    let mut is_all_sent = true;
    for mut request_ids in unsent {
        request_ids.retain(|request_id| state.core.is_open(*request_id));
        if !request_ids.is_empty() {
            is_all_sent = false;
            state.orders.push_back(Order::Stop(request_ids));
        }
    }
    is_all_sent
}

fn panic_failure(place: &str, cause: &(dyn Any + Send)) -> Failure {
    let text = cause.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text
        .or_else(|| cause.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into());
    Failure::new(FailureCode::Internal, format!("{place} panicked: {text}"))
}
