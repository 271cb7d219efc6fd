//! What the engine's tests have in common.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its own part")]

use denoised_engine::{
    Engine, EngineHandle, EngineOptions, Executor, Policy, RequestEvent, RequestHandle, RequestPolicy,
    SubmitOptions,
};
use denoised_scheduler::{Action, Event, Load, Millis};
use denoised_testkit::fake_executor::{FakeCall, FakeEnd, FakeExecutor, FakeRun};
use denoised_types::{Failure, FailureCode, GenerateRequest, Mode, Rank};
use std::{
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

/// Far longer than anything here takes, on any machine.
pub const LONG: Duration = Duration::from_secs(120);

/// Runs a test's body under a watchdog: a hang becomes a failure.
pub fn watched(body: impl FnOnce() + Send + 'static) {
    let (done, wait) = mpsc::channel();
    let body = thread::spawn(move || {
        body();
        let _ = done.send(());
    });
    if let Err(mpsc::RecvTimeoutError::Timeout) = wait.recv_timeout(LONG) {
        panic!("the test hangs");
    }
    if let Err(cause) = body.join() {
        std::panic::resume_unwind(cause);
    }
}

pub fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub fn start(executor: &Arc<FakeExecutor>, max_queued: usize) -> EngineHandle {
    start_with(executor, max_queued, EngineOptions::default())
}

pub fn start_with(executor: &Arc<FakeExecutor>, max_queued: usize, options: EngineOptions) -> EngineHandle {
    let executor: Arc<dyn Executor> = Arc::clone(executor) as _;
    Engine::start(executor, Box::new(RequestPolicy::new(max_queued)), options).unwrap()
}

pub fn request(seed: u64) -> GenerateRequest {
    let mut request = GenerateRequest::new("a cat");
    request.seed = seed;
    request
}

pub fn submit(engine: &EngineHandle, seed: u64) -> RequestHandle {
    engine.submit(request(seed), SubmitOptions::default()).unwrap()
}

pub fn submit_for(engine: &EngineHandle, seed: u64, time: Duration) -> RequestHandle {
    let deadline = Some(Instant::now() + time);
    engine.submit(request(seed), SubmitOptions { deadline }).unwrap()
}

/// Steps of `step_ms` each, as many as the request names (default 2).
pub fn slow(step_ms: u64) -> impl Fn(&denoised_wire::Member) -> FakeRun {
    move |member| FakeRun {
        n_steps: member.request.n_steps.unwrap_or(2),
        step_time: ms(step_ms),
        ..FakeRun::default()
    }
}

/// A worker that swallows every request, and heeds a stop or not.
pub fn swallow(is_deaf: bool) -> impl Fn(&denoised_wire::Member) -> FakeRun {
    move |_| FakeRun {
        end: FakeEnd::Never,
        is_deaf,
        ..FakeRun::default()
    }
}

pub fn code(outcome: Result<denoised_types::Generated, Failure>) -> FailureCode {
    outcome.expect_err("should have failed").code
}

/// Waits until `is_so`; the watchdog bounds it.
pub fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        thread::sleep(ms(1));
    }
}

pub fn wait_for_start(handle: &mut RequestHandle) {
    handle
        .find(|event| matches!(event, RequestEvent::Started { .. }))
        .expect("the request starts");
}

pub fn killed() -> Failure {
    Failure::new(FailureCode::WorkerLost, "killed by signal 9 (SIGKILL)").on_rank(Rank(0))
}

pub fn assert_balanced(engine: &EngineHandle) {
    let stats = engine.stats();
    let n_open = (stats.n_queued + stats.n_running) as u64;
    assert_eq!(
        stats.n_submitted,
        stats.n_finished + stats.failed_in_all() + n_open,
        "{stats:?}"
    );
}

/// A policy that works until it panics.
#[derive(Debug)]
pub struct Fragile {
    pub inner: Box<dyn Policy>,
    pub panics_at: fn(&Event) -> bool,
}

impl Policy for Fragile {
    fn on_event(&mut self, now: Millis, event: Event) -> Vec<Action> {
        assert!(!(self.panics_at)(&event), "the policy was told to panic");
        self.inner.on_event(now, event)
    }
    fn next_tick(&self) -> Option<Millis> {
        self.inner.next_tick()
    }
    fn mode(&self) -> Mode {
        self.inner.mode()
    }
    fn load(&self) -> Load {
        self.inner.load()
    }
}

pub fn assert_engine_is_dead(engine: &EngineHandle, executor: &FakeExecutor) {
    let failure = engine.submit(request(9), SubmitOptions::default()).unwrap_err();
    assert_eq!(failure.code, FailureCode::Internal);
    assert!(
        failure.message.contains("panicked") && failure.message.contains("told to panic"),
        "{failure}"
    );
    assert!(!engine.health(ms(100)).is_healthy());
    // Nobody closes it: the thread hears of the panic by itself, long before its longest sleep of 60 s ends.
    let before = Instant::now();
    until(|| executor.calls().contains(&FakeCall::Shutdown));
    assert!(before.elapsed() < Duration::from_secs(40));
    assert_eq!(engine.close(LONG).failure, Some(failure));
}

/// SplitMix64 (Steele, Lea and Flood 2014), for repeatable choices.
pub fn random(state: &mut u64, below: u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) % below
}
