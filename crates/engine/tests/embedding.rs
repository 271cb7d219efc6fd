//! What a program that embeds the engine relies on: batches of its choice, calls beside running requests, results that cost nothing
//! once nobody wants them.

mod common;

use common::*;
use denoised_engine::{
    Engine, EngineHandle, EngineOptions, Executor, ExecutorError, Health, MethodCall, Output, RankReply,
    Ranks, RequestEvent, ShutdownReport, SubmitOptions, WorldInfo, policy,
};
use denoised_executor::ExecutorEvent;
use denoised_testkit::fake_executor::{FakeCall, FakeExecutor, FakeRun};
use denoised_types::{CallId, Failure, FailureCode, Mode, Rank, RequestId};
use denoised_wire::Wave;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

#[test]
fn a_wave_in_request_mode_holds_requests_of_a_kind() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, |member| FakeRun {
            n_steps: member.request.n_steps.unwrap_or(2),
            step_time: ms(if member.request.seed == 0 { 1000 } else { 1 }),
            ..FakeRun::default()
        });
        let policy = policy(Mode::Request, 64, 3).unwrap();
        let engine = Engine::start(Arc::clone(&executor) as _, policy, EngineOptions::default()).unwrap();
        let submit = |seed: u64, width, guidance| {
            let mut request = request(seed);
            (request.width, request.guidance) = (Some(width), Some(guidance));
            engine.submit(request, SubmitOptions::default()).unwrap()
        };
        // While the first one runs, the others gather.
        let handles = [
            submit(0, 64, 7.0),
            submit(1, 32, 7.0),
            submit(2, 64, 7.0),
            submit(3, 32, 7.5),
            submit(4, 32, 1.0),
            submit(5, 32, 2.0),
            submit(6, 32, 3.0),
        ];
        let ids: Vec<RequestId> = handles.iter().map(|handle| handle.id()).collect();
        for (seed, handle) in handles.into_iter().enumerate() {
            assert_eq!(handle.wait().unwrap().resolved.seed, seed as u64);
        }
        let waves: Vec<Vec<RequestId>> = executor
            .calls()
            .into_iter()
            .filter_map(|call| match call {
                FakeCall::Dispatch { request_ids, .. } => Some(request_ids),
                FakeCall::Cancel(_) | FakeCall::Shutdown => None,
            })
            .collect();
        let of = |seeds: &[usize]| -> Vec<RequestId> { seeds.iter().map(|seed| ids[*seed]).collect() };
        assert_eq!(waves, [of(&[0]), of(&[1, 3, 5]), of(&[2]), of(&[4]), of(&[6])]);
        assert_eq!(executor.misuses(), Vec::<String>::new());
    });
}

#[test]
fn methods_run_beside_requests() {
    watched(|| {
        for mode in [Mode::Request, Mode::Step] {
            let executor = FakeExecutor::scripted(3, swallow(true));
            let policy = policy(mode, 64, 2).unwrap();
            let engine = Engine::start(Arc::clone(&executor) as _, policy, EngineOptions::default()).unwrap();
            let mut running = submit(&engine, 1);
            wait_for_start(&mut running);
            let call = MethodCall::new("echo", b"weights", Instant::now() + LONG);
            let ranks =
                |replies: Vec<RankReply>| replies.iter().map(|reply| reply.rank.0).collect::<Vec<_>>();
            assert_eq!(ranks(engine.call(&call).unwrap()), [0, 1, 2]);
            assert_eq!(ranks(engine.call(&call.reply(Ranks::One(Rank(1)))).unwrap()), [1]);
            let one = call.execute(Ranks::One(Rank(2)));
            assert_eq!(ranks(engine.call(&one).unwrap()), [2]);
            let refused = engine.call(&one.reply(Ranks::All));
            assert!(matches!(refused, Err(ExecutorError::Refused(_))), "{refused:?}");
            let unknown = MethodCall::new("paint", b"", Instant::now() + LONG);
            assert!(matches!(
                engine.call(&unknown),
                Err(ExecutorError::UnknownMethod { known, .. }) if known == ["echo"]
            ));
            assert_eq!(engine.executor().world().methods[0].name, "echo");
            engine.close(Duration::ZERO);
            assert_eq!(engine.call(&call), Err(ExecutorError::Closed));
            assert_eq!(code(running.wait()), FailureCode::Closed);
        }
        let executor = FakeExecutor::start(1);
        let engine = start(&executor, 1);
        executor.fail_world(killed());
        let call = MethodCall::new("echo", b"", Instant::now() + LONG);
        assert_eq!(engine.call(&call), Err(ExecutorError::Failed(killed())));
    });
}

const PICTURE_BYTES: usize = 3 * 512 * 1024;

/// The fake, with pictures of 1.5 MiB.
#[derive(Debug)]
struct Large(Arc<FakeExecutor>);

impl Executor for Large {
    fn world(&self) -> WorldInfo {
        self.0.world()
    }
    fn dispatch(&self, wave: Wave, deadline: Instant) -> Result<CallId, ExecutorError> {
        self.0.dispatch(wave, deadline)
    }
    fn cancel(&self, requests: &[RequestId], deadline: Instant) -> Result<(), ExecutorError> {
        self.0.cancel(requests, deadline)
    }
    fn wait_events(&self, until: Instant) -> Vec<ExecutorEvent> {
        let enlarge = |event| match event {
            ExecutorEvent::RequestDone {
                request_id,
                outcome: Ok(output),
            } => {
                let mut generated = output.into_generated();
                // Written, so that it takes real memory.
                generated.image.rgb = vec![1; PICTURE_BYTES];
                let outcome = Ok(Output::from(generated));
                ExecutorEvent::RequestDone { request_id, outcome }
            }
            other => other,
        };
        self.0.wait_events(until).into_iter().map(enlarge).collect()
    }
    fn waker(&self) -> denoised_executor::Waker {
        self.0.waker()
    }
    fn call(&self, call: &MethodCall<'_>) -> Result<Vec<RankReply>, ExecutorError> {
        self.0.call(call)
    }
    fn health(&self, limit: Duration) -> Health {
        self.0.health(limit)
    }
    fn failure(&self) -> Option<Failure> {
        self.0.failure()
    }
    fn on_failure(&self, callback: Box<dyn FnOnce(&Failure) + Send>) {
        self.0.on_failure(callback);
    }
    fn shutdown(&self, budget: Duration) -> ShutdownReport {
        self.0.shutdown(budget)
    }
}

/// Memory of this process that is present, in bytes.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let n_pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    n_pages * 4096
}

/// P3: results that nobody takes are gone with their handles, or at once if the handle went first.
#[test]
fn p3_a_thousand_abandoned_requests_leave_nothing_behind() {
    watched(|| {
        for mode in [Mode::Request, Mode::Step] {
            let executor = FakeExecutor::start(2);
            let policy = policy(mode, 1000, 4).unwrap();
            let large = Arc::new(Large(Arc::clone(&executor)));
            let engine = Engine::start(large, policy, EngineOptions::default()).unwrap();
            let abandon = |engine: &EngineHandle, n: u64| {
                for seed in 0..n {
                    let mut handle = submit(engine, seed);
                    match seed % 3 {
                        // Before it ends, perhaps.
                        0 => {}
                        // After its end, unread.
                        1 => {
                            let n_finished = engine.stats().n_finished;
                            until(|| {
                                let stats = engine.stats();
                                stats.n_running + stats.n_queued == 0 || stats.n_finished > n_finished
                            });
                        }
                        // Read and let go.
                        _ => {
                            let last = handle.by_ref().last();
                            assert!(matches!(last, Some(RequestEvent::Finished(_))), "{last:?}");
                        }
                    }
                }
                until(|| engine.stats().n_running + engine.stats().n_queued == 0);
            };
            abandon(&engine, 30);
            let before = resident_bytes();
            abandon(&engine, 1000);
            let grown = resident_bytes().saturating_sub(before);
            // A thousand are 1500 MiB; what an allocator keeps for itself is a few pictures.
            assert!(grown < 60 * PICTURE_BYTES, "{grown} bytes are left behind");
            assert_eq!(engine.stats().n_submitted, 1030);
            assert_balanced(&engine);
            assert_eq!(executor.n_open(), 0);
        }
    });
}

#[test]
fn a_result_that_comes_after_its_owner_has_gone_is_dropped_at_once() {
    watched(|| {
        // Deaf, so each result comes in spite of the cancel.
        let executor = FakeExecutor::scripted(1, |_| FakeRun {
            n_steps: 1,
            step_time: ms(2),
            is_deaf: true,
            ..FakeRun::default()
        });
        let large = Arc::new(Large(Arc::clone(&executor)));
        let policy = policy(Mode::Request, 1000, 1).unwrap();
        let engine = Engine::start(large, policy, EngineOptions::default()).unwrap();
        let mut before = 0;
        for idx in 0..220 {
            let mut handle = submit(&engine, idx);
            wait_for_start(&mut handle);
            drop(handle);
            until(|| engine.stats().n_running == 0);
            if idx == 19 {
                before = resident_bytes();
            }
        }
        let grown = resident_bytes().saturating_sub(before);
        assert!(grown < 60 * PICTURE_BYTES, "{grown} bytes are left behind");
        assert!(engine.stats().n_finished > 150, "{:?}", engine.stats());
    });
}
