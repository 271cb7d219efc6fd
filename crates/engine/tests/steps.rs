//! The engine in step mode, over a fake executor and in real time: who joins, who leaves, and what may go wrong between two waves.

mod common;

use common::*;
use denoised_engine::{
    Engine, EngineHandle, EngineOptions, RequestEvent, RequestHandle, StepPolicy, SubmitOptions, policy,
};
use denoised_executor::ExecutorError;
use denoised_scheduler::Event;
use denoised_testkit::fake_executor::{FakeCall, FakeEnd, FakeExecutor, FakeRun};
use denoised_types::{Adapter, Failure, FailureCode, GenerateRequest, Mode, Rank, RequestId};
use std::{
    collections::BTreeMap,
    num::NonZeroUsize,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

fn start_steps(executor: &Arc<FakeExecutor>, max_batch: usize, options: EngineOptions) -> EngineHandle {
    let policy = policy(Mode::Step, 1000, max_batch).unwrap();
    Engine::start(Arc::clone(executor) as _, policy, options).unwrap()
}

fn submit_steps(engine: &EngineHandle, seed: u64, n_steps: u32) -> RequestHandle {
    let mut request = request(seed);
    request.n_steps = Some(n_steps);
    engine.submit(request, SubmitOptions::default()).unwrap()
}

/// A dispatch, as the fake was told.
#[derive(Clone, Debug, PartialEq)]
struct Wave {
    rank: Rank,
    joining: Vec<RequestId>,
    continuing: Vec<RequestId>,
    cancelled: Vec<RequestId>,
    adapters: Vec<String>,
    deadline_ns: u64,
}

fn waves(executor: &FakeExecutor) -> Vec<Wave> {
    let dispatch = |call| match call {
        FakeCall::Dispatch {
            wave_id: _,
            ranks,
            request_ids,
            continuing,
            cancelled,
            adapters,
            deadline_ns,
        } => Some(Wave {
            rank: ranks[0],
            joining: request_ids,
            continuing,
            cancelled,
            adapters,
            deadline_ns,
        }),
        FakeCall::Cancel(ids) => panic!("requests {ids:?} were cancelled beside the waves"),
        FakeCall::Shutdown => None,
    };
    executor.calls().into_iter().filter_map(dispatch).collect()
}

/// What holds for every history of waves: a payload travels once, nobody is computed before that or after having been given up.
fn assert_in_order(executor: &FakeExecutor) {
    assert_eq!(executor.misuses(), Vec::<String>::new());
    let mut joined = Vec::new();
    let mut given_up = Vec::new();
    for wave in waves(executor) {
        assert_eq!(wave.deadline_ns, 0, "ranks do not look at the clock themselves");
        for request_id in &wave.joining {
            assert!(!joined.contains(request_id), "{request_id} joined twice");
            joined.push(*request_id);
        }
        for request_id in &wave.continuing {
            assert!(
                joined.contains(request_id) && !given_up.contains(request_id),
                "{wave:?}"
            );
        }
        given_up.extend(wave.cancelled);
    }
}

fn wait_for_step(handle: &mut RequestHandle, at_least: u32) {
    let is_there =
        |event: &RequestEvent| matches!(event, RequestEvent::Step { n_done, .. } if *n_done >= at_least);
    handle.find(is_there).expect("it gets that far");
}

#[test]
fn requests_join_and_leave_between_waves() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(10));
        let engine = start_steps(&executor, 4, EngineOptions::default());
        let mut long = submit_steps(&engine, 1, 200);
        wait_for_step(&mut long, 2);
        let short = submit_steps(&engine, 2, 3);
        let (long_id, short_id) = (long.id(), short.id());
        assert_eq!(short.wait().unwrap().resolved.seed, 2);
        assert_eq!(
            engine.stats().n_finished,
            1,
            "the short one ends before the long one"
        );
        let events: Vec<RequestEvent> = long.collect();
        let steps = events.iter().filter_map(|event| match event {
            RequestEvent::Step { n_done, n_steps } => Some((*n_done, *n_steps)),
            _ => None,
        });
        assert!(steps.map(|step| step.0).is_sorted(), "{events:?}");
        let Some(RequestEvent::Finished(output)) = events.last() else {
            panic!("{events:?}")
        };
        assert_eq!(output.resolved().seed, 1);
        let waves = waves(&executor);
        assert_eq!(waves.len(), 200, "one step each, whoever shares it");
        let of = |wave: &Wave| (wave.joining.clone(), wave.continuing.clone());
        assert_eq!(of(&waves[0]), (vec![long_id], vec![]));
        let join = waves.iter().position(|wave| wave.joining == [short_id]).unwrap();
        assert_eq!(waves[join].continuing, [long_id]);
        for wave in &waves[join + 1..join + 3] {
            assert_eq!(of(wave), (vec![], vec![long_id, short_id]));
        }
        assert_eq!(of(&waves[join + 3]), (vec![], vec![long_id]));
        assert_in_order(&executor);
        assert_balanced(&engine);
    });
}

#[test]
fn a_cancelled_request_is_in_no_further_step_and_the_others_go_on() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(20));
        let engine = start_steps(&executor, 4, EngineOptions::default());
        let mut first = submit_steps(&engine, 1, 1000);
        let mut second = submit_steps(&engine, 2, 1000);
        wait_for_step(&mut second, 3);
        first.cancel();
        first.cancel();
        let n_waves = waves(&executor).len();
        let last = first.by_ref().last();
        assert!(
            matches!(&last, Some(RequestEvent::Failed(failure)) if failure.code == FailureCode::Cancelled),
            "{last:?}"
        );
        let (first_id, second_id) = (first.id(), second.id());
        let sent = waves(&executor);
        let given_up = sent.iter().position(|wave| wave.cancelled == [first_id]).unwrap();
        // One that was on its way, at most, and then the one that gives it up.
        assert!(given_up <= n_waves + 1, "{given_up} after {n_waves}");
        assert_eq!(sent[given_up].continuing, [second_id]);
        // Alone, it is given up by a wave that computes nothing.
        second.cancel();
        let code = second.by_ref().find_map(|event| match event {
            RequestEvent::Failed(failure) => Some(failure.code),
            _ => None,
        });
        assert_eq!(code, Some(FailureCode::Cancelled));
        until(|| engine.stats().n_running == 0);
        let last = waves(&executor).pop().unwrap();
        assert_eq!(
            (last.joining.len() + last.continuing.len(), last.cancelled),
            (0, vec![second_id])
        );
        assert_in_order(&executor);
        // Its end frees the replica as any other.
        assert_eq!(submit_steps(&engine, 3, 2).wait().unwrap().resolved.seed, 3);
        assert_eq!(executor.n_open(), 0);
    });
}

#[test]
fn a_deadline_gives_a_request_up_and_is_reported_as_one() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(20));
        let engine = start_steps(&executor, 4, EngineOptions::default());
        let mut long = request(1);
        long.n_steps = Some(1000);
        let deadline = Some(Instant::now() + ms(600));
        let hasty = engine.submit(long, SubmitOptions { deadline }).unwrap();
        let hasty_id = hasty.id();
        let patient = submit_steps(&engine, 2, 60);
        let failure = hasty.wait().unwrap_err();
        assert_eq!(failure.code, FailureCode::DeadlineExceeded, "{failure}");
        assert!(failure.message.contains("of 1000"), "{failure}");
        assert_eq!(patient.wait().unwrap().resolved.seed, 2);
        assert!(waves(&executor).iter().any(|wave| wave.cancelled == [hasty_id]));
        assert_in_order(&executor);
        assert_balanced(&engine);
    });
}

#[test]
fn a_step_that_does_not_end_ends_the_world() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, |member| FakeRun {
            n_steps: 1,
            end: if member.request.seed == 1 {
                FakeEnd::Never
            } else {
                FakeEnd::Picture
            },
            ..FakeRun::default()
        });
        let options = EngineOptions {
            cancel_grace: ms(20),
            stuck_limit: ms(200),
            ..EngineOptions::default()
        };
        let engine = start_steps(&executor, 4, options);
        let swallowed = submit_for(&engine, 1, ms(400));
        let beside = submit(&engine, 2);
        assert_eq!(code(swallowed.wait()), FailureCode::DeadlineExceeded);
        let failure = beside.wait().unwrap_err();
        assert_eq!(
            (failure.code, failure.rank),
            (FailureCode::WorkerLost, Some(Rank(0))),
            "{failure}"
        );
        assert_eq!(engine.close(LONG).failure, Some(failure));
    });
}

#[test]
fn a_worker_that_forgets_whom_it_gave_up_is_found_out() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, |member| FakeRun {
            n_steps: 1000,
            step_time: ms(10),
            is_deaf: member.request.seed == 1,
            ..FakeRun::default()
        });
        let engine = start_steps(&executor, 4, EngineOptions::default());
        let mut deaf = submit(&engine, 1);
        let other = submit(&engine, 2);
        wait_for_step(&mut deaf, 2);
        deaf.cancel();
        let failure = deaf.wait().unwrap_err();
        assert_eq!(failure.code, FailureCode::Internal);
        assert!(
            failure.message.contains("without a result of request 1"),
            "{failure}"
        );
        let n_waves = waves(&executor).len();
        until(|| waves(&executor).len() > n_waves + 2);
        drop(other);
        until(|| engine.stats().n_running == 0);
        let n_given_up = |id| {
            waves(&executor)
                .iter()
                .filter(|wave| wave.cancelled.contains(&id))
                .count()
        };
        assert_eq!((n_given_up(RequestId(1)), engine.stats().n_stray), (1, 1));
        assert_balanced(&engine);
    });
}

#[test]
fn a_wave_that_cannot_be_sent_ends_who_would_have_joined_and_the_others_go_on() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(40));
        let engine = start_steps(&executor, 4, EngineOptions::default());
        let mut first = submit_steps(&engine, 1, 40);
        wait_for_step(&mut first, 1);
        let full = || ExecutorError::Deadline {
            what: "dispatching a wave".into(),
            silent: vec![Rank(0)],
        };
        executor.refuse_next_joining(full());
        let second = submit_steps(&engine, 2, 2);
        let failure = second.wait().unwrap_err();
        assert_eq!(failure.code, FailureCode::DeadlineExceeded, "{failure}");
        wait_for_step(&mut first, 3);
        executor.refuse_next_joining(ExecutorError::TooLarge {
            message_bytes: 9,
            limit_bytes: 8,
            limited_by: "test",
        });
        let third = submit_steps(&engine, 3, 2);
        assert_eq!(code(third.wait()), FailureCode::InvalidRequest);
        // Twice in a row, with nobody who joins.
        wait_for_step(&mut first, 4);
        executor.refuse_next(full());
        executor.refuse_next(full());
        assert_eq!(first.wait().unwrap().resolved.seed, 1);
        // No step was lost or doubled by the tries.
        assert_eq!(waves(&executor).len(), 40);
        assert_in_order(&executor);
        assert_eq!(engine.stats().n_stray, 0);
    });
}

/// The executor's contract bounds a message, not what a caller submits: each of these fits into one by itself.
#[test]
fn requests_that_are_too_large_only_together_are_sent_in_parts() {
    for mode in [Mode::Step, Mode::Request] {
        watched(move || {
            let executor = FakeExecutor::scripted(1, slow(40));
            executor.limit_joining(2);
            let policy = policy(mode, 1000, 8).unwrap();
            let engine = Engine::start(Arc::clone(&executor) as _, policy, EngineOptions::default()).unwrap();
            // The first holds the replica while the others come; in step mode it goes on beside their parts.
            let mut first = submit_steps(&engine, 1, 20);
            wait_for_step(&mut first, 1);
            let cancelled = submit_steps(&engine, 2, 3);
            let others: Vec<_> = (3..10).map(|seed| submit_steps(&engine, seed, 3)).collect();
            cancelled.cancel();
            assert_eq!(code(cancelled.wait()), FailureCode::Cancelled);
            for (handle, seed) in others.into_iter().zip(3..10) {
                assert_eq!(handle.wait().unwrap().resolved.seed, seed);
            }
            assert_eq!(first.wait().unwrap().resolved.seed, 1);
            assert_eq!(executor.misuses(), Vec::<String>::new());
            let n_joining = executor.calls().into_iter().filter_map(|call| match call {
                FakeCall::Dispatch { request_ids, .. } => Some(request_ids.len()),
                FakeCall::Cancel(_) | FakeCall::Shutdown => None,
            });
            assert!(n_joining.max() <= Some(2));
            let stats = engine.stats();
            assert_eq!((stats.n_finished, stats.n_stray), (8, 0));
        });
    }
}

#[test]
fn a_replica_that_takes_no_more_waves_ends_the_world() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(20));
        let options = EngineOptions {
            stuck_limit: ms(300),
            ..EngineOptions::default()
        };
        let engine = start_steps(&executor, 4, options);
        let mut handle = submit_steps(&engine, 1, 1000);
        wait_for_step(&mut handle, 2);
        for _ in 0..1000 {
            executor.refuse_next(ExecutorError::Deadline {
                what: "dispatching a wave".into(),
                silent: vec![Rank(0)],
            });
        }
        let failure = handle.wait().unwrap_err();
        assert_eq!(
            (failure.code, failure.rank),
            (FailureCode::WorkerLost, Some(Rank(0)))
        );
        assert!(
            failure.message.contains("cannot be sent the next step"),
            "{failure}"
        );
        until(|| executor.calls().contains(&FakeCall::Shutdown));
    });
}

/// S7: a close during a step of half a minute.
#[test]
fn s7_close_in_a_long_step_returns_within_its_budget() {
    watched(|| {
        let executor = FakeExecutor::scripted(2, slow(30_000));
        let engine = start_steps(&executor, 4, EngineOptions::default());
        let mut handles: Vec<_> = (0..5).map(|seed| submit(&engine, seed)).collect();
        wait_for_start(&mut handles[0]);
        let before = Instant::now();
        let report = engine.close(ms(1500));
        assert!(
            before.elapsed() < Duration::from_secs(20),
            "{:?}",
            before.elapsed()
        );
        assert_eq!((report.n_failed, report.is_complete), (5, true));
        for handle in handles {
            assert_eq!(code(handle.wait()), FailureCode::Closed);
        }
        assert_eq!(executor.calls().last(), Some(&FakeCall::Shutdown));
        assert_balanced(&engine);
    });
}

#[test]
fn close_drains_what_runs_and_what_waits() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(10));
        let engine = start_steps(&executor, 2, EngineOptions::default());
        let handles: Vec<_> = (0..6).map(|seed| submit_steps(&engine, seed, 4)).collect();
        let report = engine.close(LONG);
        assert_eq!((report.n_failed, report.is_complete), (0, true), "{report:?}");
        for (seed, handle) in handles.into_iter().enumerate() {
            assert_eq!(handle.wait().unwrap().resolved.seed, seed as u64);
        }
        assert_in_order(&executor);
    });
}

/// D7: the policy panics between two waves, with requests in the workers.
#[test]
fn d7_a_panic_in_the_policy_between_waves_fails_everyone() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(30));
        static IS_DUE: AtomicBool = AtomicBool::new(false);
        let panics_at =
            |event: &Event| matches!(event, Event::WaveDone { .. }) && IS_DUE.load(Ordering::Relaxed);
        let policy = Fragile {
            inner: Box::new(StepPolicy::new(8, NonZeroUsize::new(2).unwrap())),
            panics_at,
        };
        let engine = Engine::start(
            Arc::clone(&executor) as _,
            Box::new(policy),
            EngineOptions::default(),
        )
        .unwrap();
        let mut handles: Vec<_> = (0..4).map(|seed| submit_steps(&engine, seed, 1000)).collect();
        wait_for_step(&mut handles[1], 2);
        IS_DUE.store(true, Ordering::Relaxed);
        for mut handle in handles {
            let ends: Vec<RequestEvent> = handle.by_ref().filter(RequestEvent::is_terminal).collect();
            let [RequestEvent::Failed(failure)] = &ends[..] else {
                panic!("{ends:?}")
            };
            assert_eq!(failure.code, FailureCode::Internal);
        }
        assert_engine_is_dead(&engine, &executor);
    });
}

#[test]
fn a_world_that_dies_between_waves_ends_each_request_once_with_its_cause() {
    for is_polite in [true, false] {
        watched(move || {
            let executor = FakeExecutor::scripted(2, slow(40));
            let engine = start_steps(&executor, 3, EngineOptions::default());
            let mut handles: Vec<_> = (0..9).map(|seed| submit_steps(&engine, seed, 1000)).collect();
            wait_for_step(&mut handles[0], 2);
            // From now on no wave is taken, so soon there is none: the requests live in the workers alone.
            for _ in 0..100_000 {
                executor.refuse_next(ExecutorError::Deadline {
                    what: "dispatching a wave".into(),
                    silent: Vec::new(),
                });
            }
            let n_waves = waves(&executor).len();
            thread::sleep(ms(200));
            assert_eq!(waves(&executor).len(), n_waves);
            if is_polite {
                executor.fail_world(killed());
            } else {
                executor.fail_world_rudely(killed());
            }
            for mut handle in handles {
                let ends: Vec<RequestEvent> = handle.by_ref().filter(RequestEvent::is_terminal).collect();
                assert_eq!(ends, [RequestEvent::Failed(killed())]);
            }
            let stats = engine.stats();
            assert_eq!((stats.n_queued, stats.n_running), (0, 0));
            assert_eq!(stats.failed(FailureCode::WorkerLost), 9);
            assert_eq!(engine.close(LONG).failure, Some(killed()));
        });
    }
}

#[test]
fn a_wave_names_the_adapters_of_all_it_computes_in_order_of_first_use() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(25));
        let engine = start_steps(&executor, 4, EngineOptions::default());
        let submit = |seed, n_steps, adapters: &[&str]| {
            let mut request = GenerateRequest::new("a cat");
            (request.seed, request.n_steps) = (seed, Some(n_steps));
            let named = |name: &&str| Adapter {
                name: (*name).into(),
                scale: 0.5,
            };
            request.adapters = adapters.iter().map(named).collect();
            engine.submit(request, SubmitOptions::default()).unwrap()
        };
        let mut first = submit(1, 80, &["ink", "oil"]);
        wait_for_step(&mut first, 1);
        let second = submit(2, 2, &["chalk", "ink"]);
        let second_id = second.id();
        second.wait().unwrap();
        first.wait().unwrap();
        let waves = waves(&executor);
        let join = waves.iter().position(|wave| wave.joining == [second_id]).unwrap();
        assert_eq!(waves[0].adapters, ["ink", "oil"]);
        assert_eq!(waves[join].adapters, ["ink", "oil", "chalk"]);
        assert_eq!(waves[join + 1].adapters, ["ink", "oil", "chalk"]);
        assert_eq!(waves[join + 2].adapters, ["ink", "oil"]);
    });
}

#[test]
fn many_threads_get_their_own_pictures_in_shared_steps() {
    watched(|| {
        let executor = FakeExecutor::scripted(3, |member| FakeRun {
            n_steps: 1 + (member.request.seed % 5) as u32,
            step_time: Duration::from_micros(300),
            ..FakeRun::default()
        });
        let engine = start_steps(&executor, 4, EngineOptions::default());
        thread::scope(|scope| {
            for thread_idx in 0..16 {
                let engine = engine.clone();
                scope.spawn(move || {
                    let seeds = (0..50).map(|idx| thread_idx * 1000 + idx);
                    let handles: Vec<_> = seeds.map(|seed| (seed, submit(&engine, seed))).collect();
                    for (seed, handle) in handles {
                        assert_eq!(handle.wait().unwrap().resolved.seed, seed);
                    }
                });
            }
        });
        let stats = engine.stats();
        assert_eq!(
            (stats.n_submitted, stats.n_finished, stats.n_stray),
            (800, 800, 0)
        );
        assert_in_order(&executor);
        let mut n_computed = BTreeMap::new();
        for wave in waves(&executor) {
            let n = wave.joining.len() + wave.continuing.len();
            assert!((1..=4).contains(&n), "{wave:?}");
            *n_computed.entry(n).or_insert(0) += 1;
        }
        assert!(n_computed[&4] > 100, "{n_computed:?}");
    });
}

/// 16 threads submit, cancel, drop and wait while workers dawdle, fail, forget and lie; then the world dies, or is closed.
#[test]
fn in_any_chaos_of_steps_each_request_ends_exactly_once() {
    for round in 0..12_u64 {
        watched(move || {
            let executor = FakeExecutor::scripted(3, move |member| {
                let mut state = member.request.seed;
                FakeRun {
                    n_steps: random(&mut state, 6) as u32,
                    step_time: Duration::from_micros(random(&mut state, 1500)),
                    is_deaf: random(&mut state, 10) == 0,
                    end: match random(&mut state, 40) {
                        0..4 => FakeEnd::Fail(Failure::new(FailureCode::WorkerFailed, "an error of its own")),
                        4..6 => FakeEnd::Twice,
                        6..8 => FakeEnd::Forgotten,
                        // A step that does not end takes the whole world with it.
                        8 if round % 4 == 3 => FakeEnd::Never,
                        _ => FakeEnd::Picture,
                    },
                }
            });
            let options = EngineOptions {
                cancel_grace: ms(5),
                stuck_limit: ms(500),
                ..EngineOptions::default()
            };
            let engine = start_steps(&executor, 1 + round as usize % 5, options);
            let n_seen = AtomicUsize::new(0);
            thread::scope(|scope| {
                for thread_idx in 0..16 {
                    let (engine, executor, n_seen) = (engine.clone(), &executor, &n_seen);
                    scope.spawn(move || {
                        let mut state = round * 100 + thread_idx;
                        for _ in 0..40 {
                            let seed = random(&mut state, u64::MAX);
                            let deadline = Some(Instant::now() + ms(1 + random(&mut state, 60)));
                            let Ok(mut handle) = engine.submit(request(seed), SubmitOptions { deadline })
                            else {
                                thread::sleep(ms(1));
                                continue;
                            };
                            if random(&mut state, 30) == 0 {
                                executor.refuse_next(ExecutorError::Deadline {
                                    what: "dispatching a wave".into(),
                                    silent: Vec::new(),
                                });
                            }
                            let mut n_ends = 0;
                            match random(&mut state, 6) {
                                0 => handle.cancel(),
                                1 => {
                                    n_seen.fetch_add(1, Ordering::Relaxed);
                                    continue;
                                }
                                2 => {
                                    let event = handle.next_until(Instant::now() + ms(1));
                                    n_ends += usize::from(event.is_some_and(|event| event.is_terminal()));
                                }
                                _ => {}
                            }
                            n_ends += handle.filter(RequestEvent::is_terminal).count();
                            assert_eq!(n_ends, 1);
                            n_seen.fetch_add(n_ends, Ordering::Relaxed);
                        }
                    });
                }
                thread::sleep(ms(20 + 10 * round));
                match round % 3 {
                    0 => executor.fail_world(killed()),
                    1 => executor.fail_world_rudely(killed()),
                    _ => {}
                }
            });
            let report = engine.close(ms(900));
            assert!(report.is_complete);
            let stats = engine.stats();
            assert_eq!((stats.n_queued, stats.n_running), (0, 0));
            assert_balanced(&engine);
            assert_eq!(n_seen.into_inner() as u64, stats.n_submitted, "{stats:?}");
            assert_eq!(executor.misuses(), Vec::<String>::new());
        });
    }
}
