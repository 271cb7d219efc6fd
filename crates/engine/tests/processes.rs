//! The engine over real worker processes, in both modes: thousands of requests, storms of cancels, deaths and closes in the middle.

use denoised_engine::{
    Engine, EngineHandle, EngineOptions, Executor, MethodCall, RequestEvent, SubmitOptions, policy,
};
use denoised_executor::MpExecutor;
use denoised_testkit::{
    process::{be_a_scripted_worker, is_running, kill, options, stop},
    script::{At, Script, What, picture, request},
    watchdog::Watchdog,
};
use denoised_types::{FailureCode, Mode, Rank};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Not a test: the worker processes of the others.
#[test]
fn scripted_worker_process() {
    be_a_scripted_worker();
}

fn watchdog(name: &str) -> Watchdog {
    Watchdog::new(name, Duration::from_secs(240))
}

/// Up to four requests share a wave.
fn engine(executor: Arc<dyn Executor>, mode: Mode, max_queued: usize) -> EngineHandle {
    let options = EngineOptions {
        cancel_grace: Duration::from_secs(60),
        ..EngineOptions::default()
    };
    Engine::start(executor, policy(mode, max_queued, 4).unwrap(), options).unwrap()
}

fn processes(n_workers: u16, script: &Script) -> Arc<MpExecutor> {
    Arc::new(MpExecutor::start(options(n_workers, script), &mut |_, _| {}).unwrap())
}

/// How many requests ended in which way.
type Ends = BTreeMap<Option<&'static str>, u64>;

fn assert_balanced(engine: &EngineHandle, ends: &Ends) {
    let stats = engine.stats();
    assert_eq!((stats.n_queued, stats.n_running), (0, 0), "{stats:?}");
    assert_eq!(
        stats.n_submitted,
        stats.n_finished + stats.failed_in_all(),
        "{stats:?}"
    );
    assert_eq!(
        ends.values().sum::<u64>(),
        stats.n_submitted,
        "{ends:?} {stats:?}"
    );
}

#[test]
fn ten_thousand_requests_in_a_storm_of_cancels_end_once_each() {
    storm_of_cancels(Mode::Request, 10_000);
}

#[test]
fn thousands_of_requests_in_a_storm_of_cancels_between_steps_end_once_each() {
    storm_of_cancels(Mode::Step, 5000);
}

fn storm_of_cancels(mode: Mode, n_requests: u64) {
    let _watchdog = watchdog("storm of cancels");
    let executor = processes(2, &Script::default());
    let engine = engine(executor.clone(), mode, 10_000);
    let ends = Mutex::new(Ends::new());
    let n_threads = 4;
    std::thread::scope(|scope| {
        for thread in 0..n_threads {
            let (engine, ends) = (&engine, &ends);
            scope.spawn(move || {
                let mut handles = Vec::new();
                for idx in 0..n_requests / n_threads {
                    let seed = thread * 10_000 + idx;
                    let handle = engine.submit(request(seed, 2), SubmitOptions::default()).unwrap();
                    if idx % 3 == 0 {
                        handle.cancel();
                    }
                    handles.push((seed, handle));
                }
                // Once more, and now some of them run or have ended.
                for (_, handle) in handles.iter().step_by(2) {
                    handle.cancel();
                    handle.cancel();
                }
                for (seed, handle) in handles {
                    let mut last = None;
                    for event in handle {
                        assert!(last.is_none(), "{event:?} after the end");
                        if event.is_terminal() {
                            last = Some(event);
                        }
                    }
                    let end = match last.unwrap() {
                        RequestEvent::Finished(generated) => {
                            assert_eq!(generated.into_generated().image, picture(seed, 8));
                            None
                        }
                        RequestEvent::Failed(failure) => {
                            assert_eq!(failure.code, FailureCode::Cancelled, "{failure}");
                            Some(failure.code.as_str())
                        }
                        other => panic!("{other:?}"),
                    };
                    *ends.lock().unwrap().entry(end).or_default() += 1;
                }
            });
        }
    });
    let ends = ends.into_inner().unwrap();
    assert_balanced(&engine, &ends);
    assert!(ends[&None] > 0 && ends[&Some("cancelled")] > 0, "{ends:?}");
    assert_eq!(engine.stats().n_stray, 0);
    // A request that was cancelled leaves nothing behind that would stop a later one.
    let handle = engine.submit(request(1, 3), SubmitOptions::default()).unwrap();
    assert_eq!(handle.wait().unwrap().image, picture(1, 8));
    let report = engine.close(Duration::from_secs(20));
    assert!(report.is_complete && report.n_failed == 0, "{report:?}");
    assert!(
        report.shutdown.ranks.iter().all(|rank| rank.means == "graceful"),
        "{report:?}"
    );
}

#[test]
fn a_death_among_thousands_of_requests_ends_each_once_with_its_cause() {
    for mode in [Mode::Request, Mode::Step] {
        death_among_thousands(mode);
    }
}

fn death_among_thousands(mode: Mode) {
    let _watchdog = watchdog("a death");
    let executor = processes(3, &Script::with_steps_of(1));
    let pids = executor.world().pids;
    let engine = engine(executor, mode, 5000);
    let handles: Vec<_> = (0..3000)
        .map(|seed| engine.submit(request(seed, 2), SubmitOptions::default()).unwrap())
        .collect();
    while engine.stats().n_finished < 100 {
        std::thread::sleep(Duration::from_millis(1));
    }
    kill("KILL", &pids[1..2]);
    let mut ends = Ends::new();
    for handle in handles {
        let end = match handle.wait() {
            Ok(_) => None,
            Err(failure) => {
                assert_eq!(
                    (failure.code, failure.rank),
                    (FailureCode::WorkerLost, Some(Rank(1)))
                );
                assert!(failure.message.contains("9 (SIGKILL)"), "{failure}");
                Some(failure.code.as_str())
            }
        };
        *ends.entry(end).or_default() += 1;
    }
    assert_balanced(&engine, &ends);
    assert!(ends[&None] >= 100 && ends[&Some("worker_lost")] > 0, "{ends:?}");
    let refused = engine
        .submit(request(0, 1), SubmitOptions::default())
        .unwrap_err();
    assert_eq!(
        (refused.code, refused.rank),
        (FailureCode::WorkerLost, Some(Rank(1)))
    );
    engine.close(Duration::from_secs(20));
    assert!(pids.iter().all(|pid| !is_running(*pid)));
}

#[test]
fn closes_deaths_and_submissions_at_once_lose_no_request() {
    let _watchdog = watchdog("all at once");
    for round in 0..6u64 {
        let executor = processes(2, &Script::with_steps_of(1));
        let pids = executor.world().pids;
        let mode = [Mode::Request, Mode::Step][round as usize % 2];
        let engine = engine(executor, mode, 100_000);
        let (n_admitted, n_ended) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut handles = Vec::new();
                    while let Ok(handle) = engine.submit(request(round, 2), SubmitOptions::default()) {
                        n_admitted.fetch_add(1, Ordering::Relaxed);
                        handles.push(handle);
                        std::thread::sleep(Duration::from_micros(200));
                    }
                    for handle in handles {
                        let n_ends = handle.filter(RequestEvent::is_terminal).count();
                        n_ended.fetch_add(n_ends as u64, Ordering::Relaxed);
                    }
                });
            }
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100 + 5 * round));
                kill("KILL", &pids[..1]);
            });
            for closer in 0..8 {
                let engine = &engine;
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(110));
                    engine.close(Duration::from_millis(300 * closer));
                });
            }
        });
        assert_eq!(n_admitted.into_inner(), n_ended.into_inner(), "round {round}");
        assert!(pids.iter().all(|pid| !is_running(*pid)), "round {round}");
    }
}

#[test]
fn a_close_ends_stopped_workers_within_its_budget() {
    for mode in [Mode::Request, Mode::Step] {
        close_stopped(mode);
    }
}

fn close_stopped(mode: Mode) {
    let _watchdog = watchdog("stopped");
    let executor = processes(2, &Script::with_steps_of(100));
    let pids = executor.world().pids;
    let engine = engine(executor, mode, 10);
    let mut handles: Vec<_> = (0..4)
        .map(|seed| {
            engine
                .submit(request(seed, 1000), SubmitOptions::default())
                .unwrap()
        })
        .collect();
    for handle in &mut handles[..2] {
        assert!(handle.any(|event| matches!(event, RequestEvent::Step { .. })));
    }
    stop(&pids);
    handles.iter().for_each(|handle| handle.cancel());
    let begin = Instant::now();
    let report = engine.close(Duration::from_secs(2));
    // The budget, half a second for KILL, and the rest for a loaded machine.
    assert!(begin.elapsed() < Duration::from_secs(20), "{report:?}");
    assert!(
        report.shutdown.ranks.iter().all(|rank| rank.means == "KILL"),
        "{report:?}"
    );
    assert!(pids.iter().all(|pid| !is_running(*pid)));
    for handle in handles {
        assert!(handle.wait().is_err());
    }
}

#[test]
fn a_deadline_within_a_long_step_ends_the_request_and_not_the_world() {
    for mode in [Mode::Request, Mode::Step] {
        deadline_within_a_step(mode);
    }
}

fn deadline_within_a_step(mode: Mode) {
    let _watchdog = watchdog("deadline in a step");
    let script = Script::default().fault(None, At::Step(1), What::Sleep(2500));
    let engine = engine(processes(1, &script), mode, 10);
    let deadline = Some(Instant::now() + Duration::from_millis(500));
    let handle = engine.submit(request(1, 3), SubmitOptions { deadline }).unwrap();
    let failure = handle.wait().unwrap_err();
    assert_eq!(failure.code, FailureCode::DeadlineExceeded, "{failure}");
    // The worker comes back from its step and takes the next one.
    let handle = engine.submit(request(2, 1), SubmitOptions::default()).unwrap();
    assert_eq!(handle.wait().unwrap().image, picture(2, 8));
    let stats = engine.stats();
    assert_eq!((stats.n_finished, stats.failed_in_all()), (1, 1));
    assert!(engine.close(Duration::from_secs(20)).is_complete);
}

#[test]
fn requests_that_share_steps_give_the_pictures_they_give_alone_and_calls_run_beside_them() {
    let _watchdog = watchdog("sharing");
    let executor = processes(2, &Script::with_steps_of(2));
    let engine = engine(executor, Mode::Step, 1000);
    let handles: Vec<_> = (0..300)
        .map(|seed| {
            let n_steps = 1 + (seed % 7) as u32;
            let handle = engine.submit(request(seed, n_steps), SubmitOptions::default());
            (seed, n_steps, handle.unwrap())
        })
        .collect();
    let mut n_calls = 0;
    while engine.stats().n_finished < 250 {
        let call = MethodCall::new("echo", b"beside", Instant::now() + Duration::from_secs(60));
        let replies = engine.call(&call).unwrap();
        assert!(replies.len() == 2 && replies.iter().all(|reply| reply.bytes == b"beside"));
        n_calls += 1;
    }
    for (seed, n_steps, handle) in handles {
        let generated = handle.wait().unwrap();
        assert_eq!(generated.image, picture(seed, 8));
        assert_eq!(generated.resolved.n_steps, n_steps);
    }
    assert!(n_calls > 1, "{n_calls}");
    let stats = engine.stats();
    assert_eq!((stats.n_finished, stats.n_stray, stats.n_late), (300, 0, 0));
    let report = engine.close(Duration::from_secs(20));
    assert!(
        report.shutdown.ranks.iter().all(|rank| rank.means == "graceful"),
        "{report:?}"
    );
}

/// P3: results that nobody takes free their memory, here and in the workers' arenas.
#[test]
fn p3_a_thousand_abandoned_results_of_processes_leave_nothing_behind() {
    let _watchdog = watchdog("abandoned");
    let side_px = 724_u32;
    let picture_bytes = u64::from(side_px) * u64::from(side_px) * 3;
    for mode in [Mode::Request, Mode::Step] {
        let script = Script {
            side_px,
            ..Script::default()
        };
        let mut options = options(2, &script);
        // Room for a result that is held, beside those that come.
        options.link.event_arena_bytes = 8 << 20;
        let executor = Arc::new(MpExecutor::start(options, &mut |_, _| {}).unwrap());
        let mut pids = executor.world().pids;
        pids.push(std::process::id());
        let taken_bytes = || -> u64 {
            let memory = pids
                .iter()
                .map(|pid| denoised_os::process::memory_of(*pid).unwrap());
            memory.map(|memory| memory.pss_bytes).sum()
        };
        let engine = engine(executor, mode, 1000);
        let abandon = |n: u64| {
            for seed in 0..n {
                let mut handle = engine.submit(request(seed, 1), SubmitOptions::default()).unwrap();
                match seed % 3 {
                    // Before it ends.
                    0 => {}
                    // After its end, unread.
                    1 => {
                        while engine.stats().n_running + engine.stats().n_queued > 0 {
                            std::thread::yield_now();
                        }
                    }
                    // Read and let go.
                    _ => {
                        let last = handle.by_ref().last();
                        assert!(matches!(last, Some(RequestEvent::Finished(_))), "{last:?}");
                    }
                }
            }
            while engine.stats().n_running + engine.stats().n_queued > 0 {
                std::thread::yield_now();
            }
        };
        abandon(60);
        let before = taken_bytes();
        abandon(1000);
        let grown = taken_bytes().saturating_sub(before);
        // A thousand are 1500 MiB; what allocators keep for themselves is a few pictures.
        assert!(
            grown < 60 * picture_bytes,
            "{grown} bytes are left behind in {mode:?} mode"
        );
        let report = engine.close(Duration::from_secs(20));
        assert!(report.is_complete, "{report:?}");
    }
}
