//! Fault cases that need an engine, over real worker processes. The beginning of a test's name (`d3`) is the id of a case that some system
//! of this kind got wrong.
#![expect(
    clippy::print_stdout,
    reason = "figures of the run, for whoever looks (`--nocapture`)"
)]

use denoised_engine::{
    Engine, EngineHandle, EngineOptions, Executor, ExecutorError, MethodCall, Policy, RequestEvent,
    RequestHandle, SubmitOptions, policy,
};
use denoised_executor::{LinkSpec, MpExecutor, MpOptions};
use denoised_os::{child::ExitStatus, process::memory_of};
use denoised_scheduler::{Action, Event, Load, Millis};
use denoised_testkit::{
    process::{be_a_scripted_worker, eventually, is_running, kill, options, this_test_again, wait_for},
    script::{BASE_BYTES, Script, picture, request},
    watchdog::Watchdog,
};
use denoised_types::{FailureCode, GenerateRequest, Mode, Rank};
use denoised_wire::{Doing, RankProgress};
use std::{
    io::Read,
    sync::Arc,
    time::{Duration, Instant},
};

const MODES: [Mode; 2] = [Mode::Request, Mode::Step];

/// Not a test: the worker processes of the others.
#[test]
fn scripted_worker_process() {
    be_a_scripted_worker();
}

fn watchdog(name: &str) -> Watchdog {
    Watchdog::new(name, Duration::from_secs(120))
}

fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn soon() -> Duration {
    Duration::from_secs(30)
}

/// An engine over processes, and their ids.
fn start(options: MpOptions, mode: Mode) -> (EngineHandle, Vec<u32>) {
    start_with(options, policy(mode, 10_000, 8).unwrap())
}

fn start_with(options: MpOptions, policy: Box<dyn Policy>) -> (EngineHandle, Vec<u32>) {
    let executor = MpExecutor::start(options, &mut |_, _| {}).unwrap();
    let pids = executor.world().pids;
    let options = EngineOptions {
        cancel_grace: Duration::from_secs(60),
        ..EngineOptions::default()
    };
    (Engine::start(Arc::new(executor), policy, options).unwrap(), pids)
}

fn submit(engine: &EngineHandle, request: GenerateRequest) -> RequestHandle {
    engine.submit(request, SubmitOptions::default()).unwrap()
}

/// Reads the request's events until it has done so many steps.
fn wait_for_step(handle: &mut RequestHandle, step: u32) {
    let found = handle.find(|event| matches!(event, RequestEvent::Step { n_done, .. } if *n_done >= step));
    assert!(found.is_some(), "the request ended before step {step}");
}

#[test]
fn d3_one_that_runs_and_fifteen_that_wait_end_once_each_after_a_kill() {
    let _watchdog = watchdog("d3");
    for mode in MODES {
        // One at a time, so that fifteen wait in the engine.
        let policy = policy(mode, 15, 1).unwrap();
        let (engine, pids) = start_with(options(1, &Script::with_steps_of(20)), policy);
        let mut handles: Vec<_> = (0..16).map(|seed| submit(&engine, request(seed, 1000))).collect();
        wait_for_step(&mut handles[0], 2);
        let stats = engine.stats();
        assert_eq!((stats.n_running, stats.n_queued), (1, 15));
        kill("KILL", &pids);
        for handle in handles {
            let ends: Vec<RequestEvent> = handle.filter(RequestEvent::is_terminal).collect();
            let [RequestEvent::Failed(failure)] = &ends[..] else {
                panic!("{ends:?}")
            };
            assert_eq!(
                (failure.code, failure.rank),
                (FailureCode::WorkerLost, Some(Rank(0)))
            );
            assert!(failure.message.contains("9 (SIGKILL)"), "{failure}");
        }
        let stats = engine.stats();
        assert_eq!((stats.n_submitted, stats.failed_in_all()), (16, 16));
        assert!(!engine.health(soon()).is_healthy());
    }
}

/// A policy that panics once: when it is told that a wave is over.
#[derive(Debug)]
struct PanicsOnce {
    inner: Box<dyn Policy>,
    has_panicked: bool,
}

impl Policy for PanicsOnce {
    fn on_event(&mut self, now: Millis, event: Event) -> Vec<Action> {
        if matches!(event, Event::WaveDone { .. }) && !self.has_panicked {
            self.has_panicked = true;
            panic!("the update went wrong");
        }
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

#[test]
fn d7_a_panic_in_the_scheduling_fails_what_is_pending_and_refuses_what_comes() {
    let _watchdog = watchdog("d7");
    for mode in MODES {
        let policy = PanicsOnce {
            inner: policy(mode, 100, 1).unwrap(),
            has_panicked: false,
        };
        let (engine, pids) = start_with(options(1, &Script::with_steps_of(20)), Box::new(policy));
        let handles: Vec<_> = (0..8).map(|seed| submit(&engine, request(seed, 5))).collect();
        let mut n_failed = 0;
        for handle in handles {
            // In request mode the first has its picture before its wave is over.
            if let Err(failure) = handle.wait() {
                n_failed += 1;
                assert_eq!(failure.code, FailureCode::Internal);
                assert!(failure.message.contains("the update went wrong"), "{failure}");
            }
        }
        assert!(n_failed >= 7, "{n_failed}");
        let refused = engine
            .submit(request(9, 1), SubmitOptions::default())
            .unwrap_err();
        assert!(refused.message.contains("the update went wrong"), "{refused}");
        let health = engine.health(soon());
        assert!(!health.is_healthy() && health.failure == Some(refused.clone()));
        // Nor do its workers stay: nobody will ask them for anything.
        assert!(eventually(soon(), || pids.iter().all(|pid| !is_running(*pid))));
        assert_eq!(engine.close(soon()).failure, Some(refused));
    }
}

#[test]
fn s7_a_close_during_a_long_call_keeps_its_budget_and_leaves_nobody() {
    let _watchdog = watchdog("s7");
    for mode in MODES {
        let (engine, pids) = start(options(2, &Script::default()), mode);
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| engine.call(&MethodCall::new("sleep", b"30000", late())));
            // Behind the call, so that it cannot finish.
            assert!(eventually(soon(), || is_busy(&engine)));
            let pending = submit(&engine, request(1, 3));
            let begin = Instant::now();
            let report = engine.close(Duration::from_secs(3));
            let took = begin.elapsed();
            println!("close took {took:?}: {report:?}");
            assert!(took < Duration::from_secs(15), "{took:?}");
            assert!(report.is_complete, "{report:?}");
            assert!(
                report.shutdown.ranks.iter().all(|rank| rank.means == "KILL"),
                "{report:?}"
            );
            assert!(pids.iter().all(|pid| !is_running(*pid)));
            assert_eq!(pending.wait().unwrap_err().code, FailureCode::Closed);
            assert!(matches!(
                caller.join().unwrap(),
                Err(ExecutorError::Closed | ExecutorError::Failed(_))
            ));
        });
    }
}

/// What each rank says that it does; asked beside what it does.
fn progress(engine: &EngineHandle) -> Vec<RankProgress> {
    let replies = engine.call(&MethodCall::new("progress", b"", late())).unwrap();
    let decode = |bytes: &[u8]| RankProgress::from_bytes(bytes).unwrap();
    replies.iter().map(|reply| decode(&reply.bytes)).collect()
}

fn is_busy(engine: &EngineHandle) -> bool {
    progress(engine).iter().all(|rank| rank.doing != Doing::Nothing)
}

#[test]
fn c7_concurrent_requests_get_what_each_gets_alone() {
    let _watchdog = watchdog("c7");
    for mode in MODES {
        for n_workers in [1, 2] {
            let (engine, _) = start(options(n_workers, &Script::with_steps_of(1)), mode);
            for n_threads in [2u64, 8] {
                std::thread::scope(|scope| {
                    for thread in 0..n_threads {
                        let engine = &engine;
                        scope.spawn(move || {
                            for idx in 0..5 {
                                let seed = thread * 100 + idx;
                                // Of unequal length, so that they do not end together.
                                let n_steps = 1 + (seed % 7) as u32;
                                let generated = submit(engine, request(seed, n_steps)).wait().unwrap();
                                assert_eq!(generated.image, picture(seed, 8));
                                assert_eq!(generated.resolved.n_steps, n_steps);
                            }
                        });
                    }
                });
            }
        }
    }
}

/// Says to a copy of this program that it shall measure itself.
const MEASURE: &str = "DENOISED_TEST_MEASURE";

/// Not a test by itself: a program of its own, so that nobody else's memory is measured.
#[test]
fn aborting_process() {
    if std::env::var_os(MEASURE).is_none() {
        return;
    }
    for mode in MODES {
        // 724 x 724 x 3 bytes are 1.5 MiB.
        let script = Script {
            side_px: 724,
            ..Script::default()
        };
        let mut options = options(2, &script);
        options.link = LinkSpec {
            event_arena_bytes: 8 << 20,
            ..options.link
        };
        let (engine, pids) = start(options, mode);
        let held = || -> u64 {
            let own = memory_of(std::process::id()).unwrap().rss_bytes;
            let workers = pids.iter().map(|pid| memory_of(*pid).unwrap().private_bytes);
            own + workers.sum::<u64>()
        };
        let mut next_seed = 0;
        let mut abort_many = |n_requests: u64| {
            for _ in 0..n_requests / 10 {
                let handles: Vec<_> = (0..10)
                    .map(|_| {
                        next_seed += 1;
                        submit(&engine, request(next_seed, 2))
                    })
                    .collect();
                // Some are given up while they wait or run, the others when their pictures are there and nobody has read them.
                let (early, unread): (Vec<_>, Vec<_>) = handles.into_iter().partition(|h| h.id().0 % 3 == 0);
                drop(early);
                assert!(eventually(soon(), || {
                    let stats = engine.stats();
                    (stats.n_queued, stats.n_running) == (0, 0)
                }));
                drop(unread);
            }
        };
        abort_many(50);
        let base = held();
        abort_many(1000);
        let grown = held().saturating_sub(base);
        println!("{mode:?}: {base} bytes, and {grown} more after 1000 aborted requests");
        // Their pictures were 1500 MiB; allocators keep some of what they had.
        assert!(grown < 150 << 20, "{grown} bytes more");
        let stats = engine.stats();
        assert_eq!(stats.n_submitted, 1050);
        assert_eq!(stats.n_finished + stats.failed_in_all(), 1050);
        // What is shared is free too: one more comes through it.
        let last = submit(&engine, request(1, 1)).wait().unwrap();
        assert!(last.image == picture(1, 724));
        assert!(engine.close(soon()).is_complete);
    }
}

#[test]
fn p3_aborted_requests_leave_no_output_behind() {
    let _watchdog = watchdog("p3");
    let mut measuring = this_test_again("aborting_process", &[(MEASURE, "1")]);
    let stderr = measuring.take_stderr().unwrap();
    let said = std::thread::spawn(move || {
        let mut said = String::new();
        std::fs::File::from(stderr)
            .read_to_string(&mut said)
            .map(|_| said)
    });
    let status = wait_for(&measuring, late() - Instant::now());
    assert_eq!(status, ExitStatus::Code(0), "{}", said.join().unwrap().unwrap());
}

#[test]
fn k1_a_cancelled_request_leaves_the_device_to_the_next() {
    let _watchdog = watchdog("k1");
    for mode in MODES {
        let (engine, _) = start_with(
            options(1, &Script::with_steps_of(20)),
            policy(mode, 10, 1).unwrap(),
        );
        let mut cancelled = submit(&engine, request(1, 50));
        let next = submit(&engine, request(2, 1));
        wait_for_step(&mut cancelled, 5);
        cancelled.cancel();
        let mut last_step = 5;
        let failure = loop {
            match cancelled.next().unwrap() {
                RequestEvent::Step { n_done, .. } => last_step = n_done,
                RequestEvent::Failed(failure) => break failure,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(failure.code, FailureCode::Cancelled);
        println!("{mode:?}: cancelled at step 5, the last step was {last_step}");
        // Two more on an idle machine; this one may be busy.
        assert!(last_step < 35, "{last_step}");
        assert_eq!(next.wait().unwrap().image, picture(2, 8));
    }
}

#[test]
fn k7_when_an_abort_is_acknowledged_nobody_computes_it_and_its_memory_is_free() {
    let _watchdog = watchdog("k7");
    for mode in MODES {
        let (engine, _) = start(options(2, &Script::with_steps_of(3)), mode);
        for round in 0..30u64 {
            let mut handle = submit(&engine, request(round, 1000));
            wait_for_step(&mut handle, 1 + (round % 4) as u32);
            let id = handle.id();
            handle.cancel();
            let failure = handle.wait().unwrap_err();
            assert_eq!(failure.code, FailureCode::Cancelled);
            // Asked beside whatever they do, no rank does anything for it or keeps anything of it.
            for rank in progress(&engine) {
                let text = format!("{rank:?}");
                assert!(
                    !text.contains(&format!("RequestId({})", id.0)),
                    "round {round}: {text}"
                );
            }
            // Asked in turn with waves.
            for reply in engine
                .call(&MethodCall::new("device_memory", b"", late()))
                .unwrap()
            {
                assert_eq!(reply.bytes, BASE_BYTES.to_string().into_bytes(), "round {round}");
            }
        }
    }
}
