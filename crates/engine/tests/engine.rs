//! The engine over a fake executor, in real time: owners, threads, deaths and lies. The exact rules are checked in the crate's
//! simulation; here the threads, locks and waits around them are.

mod common;

use common::*;
use denoised_engine::{
    Engine, EngineHandle, EngineOptions, Executor, Health, RequestEvent, RequestHandle, RequestPolicy,
    ShutdownReport, SubmitOptions,
};
use denoised_executor::{ExecutorError, ExecutorEvent, MethodCall, RankReply, WorldInfo};
use denoised_scheduler::Event;
use denoised_testkit::fake_executor::{FakeCall, FakeEnd, FakeExecutor, FakeRun};
use denoised_types::{CallId, Failure, FailureCode, Rank, RequestId, WaveId};
use denoised_wire::Wave;
use std::{
    pin::pin,
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::{Duration, Instant},
};

#[test]
fn events_come_in_order_and_end_with_the_requests_own_picture() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(5));
        let engine = start(&executor, 4);
        let before_ns = denoised_os::now_ns();
        let handle = submit_for(&engine, 0x0a0b0c, Duration::from_secs(100));
        let id = handle.id();
        let events: Vec<RequestEvent> = handle.collect();
        assert_eq!(events[0], RequestEvent::Queued { position: 0 });
        assert_eq!(events[1], RequestEvent::Started { rank: Rank(0) });
        let [.., RequestEvent::Finished(generated)] = &events[..] else {
            panic!("{events:?}")
        };
        assert_eq!(generated.rgb(), [0x0c, 0x0b, 0x0a]);
        for event in &events[2..events.len() - 1] {
            assert!(
                matches!(
                    event,
                    RequestEvent::Step {
                        n_done: 1..=2,
                        n_steps: 2
                    }
                ),
                "{event:?}"
            );
        }
        // The workers are given the deadline on the clock they can read.
        let [
            FakeCall::Dispatch {
                wave_id,
                ranks,
                request_ids,
                deadline_ns,
                ..
            },
        ] = &executor.calls()[..]
        else {
            panic!("{:?}", executor.calls());
        };
        assert_eq!(
            (*wave_id, &ranks[..], &request_ids[..]),
            (WaveId(1), &[Rank(0)][..], &[id][..])
        );
        let ahead_ns = deadline_ns - before_ns;
        assert!(
            (100_000_000_000..160_000_000_000).contains(&ahead_ns),
            "{ahead_ns}"
        );
        assert_eq!(engine.stats().n_finished, 1);
        assert_balanced(&engine);
    });
}

#[test]
fn many_threads_get_their_own_pictures_from_several_replicas() {
    watched(|| {
        let executor = FakeExecutor::start(3);
        let engine = start(&executor, 16 * 50);
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
        let of_rank = |rank| {
            let calls = executor.calls();
            let is_it =
                |call: &&FakeCall| matches!(call, FakeCall::Dispatch { ranks, .. } if *ranks == [rank]);
            calls.iter().filter(is_it).count()
        };
        for rank in 0..3 {
            assert!(
                of_rank(Rank(rank)) > 100,
                "rank {rank} did {} of 800",
                of_rank(Rank(rank))
            );
        }
    });
}

#[test]
fn a_full_queue_refuses_now_with_the_numbers() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, swallow(false));
        let engine = start(&executor, 2);
        let held: Vec<_> = (0..3).map(|seed| submit(&engine, seed)).collect();
        let failure = engine.submit(request(3), SubmitOptions::default()).unwrap_err();
        assert_eq!(failure.code, FailureCode::QueueFull);
        assert_eq!(
            failure.message,
            "2 requests wait already, and at most 2 may; try again later"
        );
        assert_eq!(engine.stats().n_refused, 1);
        drop(held);
        // Their places are free again.
        drop(submit(&engine, 4));
        assert_balanced(&engine);
    });
}

#[test]
fn what_makes_no_sense_is_refused_and_counted() {
    watched(|| {
        let engine = start(&FakeExecutor::start(1), 2);
        let mut zero_steps = request(0);
        zero_steps.n_steps = Some(0);
        let failure = engine.submit(zero_steps, SubmitOptions::default()).unwrap_err();
        assert_eq!(failure.code, FailureCode::InvalidRequest);
        let deadline = Some(Instant::now());
        let failure = engine.submit(request(0), SubmitOptions { deadline }).unwrap_err();
        assert_eq!(failure.code, FailureCode::DeadlineExceeded);
        assert_eq!((engine.stats().n_refused, engine.stats().n_submitted), (2, 0));
    });
}

#[test]
fn cancelling_a_running_request_ends_it_at_the_next_step_and_the_next_one_runs() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(20));
        let engine = start(&executor, 4);
        let mut long = request(1);
        long.n_steps = Some(50);
        let mut running = engine.submit(long, SubmitOptions::default()).unwrap();
        let waiting = submit(&engine, 2);
        running
            .find(|event| matches!(event, RequestEvent::Step { n_done: 5.., .. }))
            .unwrap();
        running.cancel();
        running.cancel();
        let rest: Vec<RequestEvent> = running.by_ref().collect();
        let [.., RequestEvent::Failed(failure)] = &rest[..] else {
            panic!("{rest:?}")
        };
        assert_eq!(failure.code, FailureCode::Cancelled);
        // Nothing computes it once its owner has heard of the end.
        assert!(!executor.calls().contains(&FakeCall::Shutdown) && executor.n_open() <= 1);
        assert_eq!(waiting.wait().unwrap().resolved.seed, 2);
        running.cancel();
        assert_eq!(running.next(), None);
        let n_cancels = executor
            .calls()
            .iter()
            .filter(|call| matches!(call, FakeCall::Cancel(_)))
            .count();
        assert_eq!(n_cancels, 1);
        assert_eq!(engine.stats().cancelled(), 1);
    });
}

#[test]
fn a_cancelled_request_that_waits_ends_at_once() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, swallow(false));
        let engine = start(&executor, 4);
        let _running = submit(&engine, 1);
        let mut waiting = submit(&engine, 2);
        waiting.cancel();
        assert_eq!(waiting.try_next(), Some(RequestEvent::Queued { position: 0 }));
        assert!(
            matches!(waiting.try_next(), Some(RequestEvent::Failed(f)) if f.code == FailureCode::Cancelled)
        );
        assert_eq!(waiting.try_next(), None);
        assert_eq!(code(waiting.wait()), FailureCode::Internal);
    });
}

#[test]
fn dropping_a_handle_cancels() {
    watched(|| {
        let executor = FakeExecutor::scripted(2, swallow(false));
        let engine = start(&executor, 8);
        let mut handles: Vec<_> = (0..6).map(|seed| submit(&engine, seed)).collect();
        wait_for_start(&mut handles[0]);
        drop(handles);
        until(|| engine.stats().cancelled() == 6 && executor.n_open() == 0);
        assert_balanced(&engine);
    });
}

#[test]
fn a_deadline_ends_what_waits_and_what_runs() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(50));
        let engine = start(&executor, 4);
        let mut long = request(1);
        long.n_steps = Some(1000);
        let deadline = Some(Instant::now() + ms(1500));
        let running = engine.submit(long, SubmitOptions { deadline }).unwrap();
        let waiting = submit_for(&engine, 2, ms(500));
        let patient = submit(&engine, 3);
        let failure = waiting.wait().unwrap_err();
        assert_eq!(failure.code, FailureCode::DeadlineExceeded);
        assert_eq!(failure.message, "the deadline passed while the request waited");
        let failure = running.wait().unwrap_err();
        assert_eq!(failure.code, FailureCode::DeadlineExceeded, "{failure}");
        assert_eq!(patient.wait().unwrap().resolved.seed, 3);
    });
}

#[test]
fn a_worker_deaf_to_the_deadline_does_not_hold_its_owner_and_its_late_result_is_dropped() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, |member| FakeRun {
            n_steps: 1,
            step_time: if member.request.seed == 1 { ms(4000) } else { ms(0) },
            is_deaf: true,
            ..FakeRun::default()
        });
        let options = EngineOptions {
            cancel_grace: ms(50),
            ..EngineOptions::default()
        };
        let engine = start_with(&executor, 4, options);
        let failure = submit_for(&engine, 1, ms(500)).wait().unwrap_err();
        assert_eq!(failure.code, FailureCode::DeadlineExceeded);
        assert!(
            failure.message.contains("no result came in 50 ms more"),
            "{failure}"
        );
        assert_eq!(executor.n_open(), 1, "the worker still computes");
        // The replica is not given to others before it is free.
        assert_eq!(submit(&engine, 2).wait().unwrap().resolved.seed, 2);
        let stats = engine.stats();
        assert_eq!((stats.n_late, stats.n_stray, stats.n_finished), (1, 0, 1));
    });
}

#[test]
fn a_worker_that_never_stops_ends_the_world() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, swallow(true));
        let options = EngineOptions {
            cancel_grace: ms(20),
            stuck_limit: ms(100),
            ..EngineOptions::default()
        };
        let engine = start_with(&executor, 4, options);
        let swallowed = submit_for(&engine, 1, ms(500));
        let waiting = submit(&engine, 2);
        assert_eq!(code(swallowed.wait()), FailureCode::DeadlineExceeded);
        let failure = waiting.wait().unwrap_err();
        assert_eq!(
            (failure.code, failure.rank),
            (FailureCode::WorkerLost, Some(Rank(0)))
        );
        assert_eq!(
            engine.submit(request(3), SubmitOptions::default()).unwrap_err(),
            failure
        );
        until(|| executor.calls().contains(&FakeCall::Shutdown));
        assert_eq!(engine.close(LONG).failure, Some(failure));
    });
}

#[test]
fn a_dead_world_fails_everyone_once_with_its_cause_and_refuses_fast() {
    for is_polite in [true, false] {
        watched(move || {
            let executor = FakeExecutor::scripted(1, swallow(false));
            let engine = start(&executor, 15);
            let mut handles: Vec<_> = (0..16).map(|seed| submit(&engine, seed)).collect();
            wait_for_start(&mut handles[0]);
            assert!(engine.health(ms(100)).is_healthy());
            if is_polite {
                executor.fail_world(killed());
            } else {
                executor.fail_world_rudely(killed());
            }
            assert_eq!(
                engine.submit(request(99), SubmitOptions::default()).unwrap_err(),
                killed()
            );
            for mut handle in handles {
                let ends: Vec<RequestEvent> = handle.by_ref().filter(RequestEvent::is_terminal).collect();
                assert_eq!(ends, [RequestEvent::Failed(killed())]);
            }
            until(|| engine.health(ms(100)).failure == Some(killed()));
            let stats = engine.stats();
            assert_eq!(
                (
                    stats.failed(FailureCode::WorkerLost),
                    stats.n_running,
                    stats.n_queued
                ),
                (16, 0, 0)
            );
            let report = engine.close(LONG);
            assert_eq!(
                (report.failure, report.n_failed, report.is_complete),
                (Some(killed()), 0, true)
            );
            assert_eq!(
                engine.submit(request(99), SubmitOptions::default()).unwrap_err(),
                killed()
            );
        });
    }
}

#[test]
fn lies_are_counted_and_harm_nobody() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, |member| FakeRun {
            end: match member.request.seed {
                1 => FakeEnd::Twice,
                2 => FakeEnd::Forgotten,
                3 => {
                    FakeEnd::Fail(Failure::new(FailureCode::NonFinite, "latents hold a NaN").on_rank(Rank(0)))
                }
                _ => FakeEnd::Picture,
            },
            ..FakeRun::default()
        });
        let engine = start(&executor, 8);
        for request_id in [RequestId(0), RequestId(3), RequestId(u64::MAX)] {
            executor.inject(ExecutorEvent::RequestStarted {
                request_id,
                rank: Rank(9),
            });
            executor.inject(ExecutorEvent::Step {
                request_id,
                n_done: 9,
                n_steps: 3,
            });
            let outcome = Err(Failure::new(FailureCode::Internal, "a lie"));
            executor.inject(ExecutorEvent::RequestDone { request_id, outcome });
        }
        executor.inject(ExecutorEvent::WaveDone { wave_id: WaveId(77) });
        until(|| engine.stats().n_stray == 10);
        let handles: Vec<_> = (1..=4).map(|seed| submit(&engine, seed)).collect();
        let mut outcomes = handles.into_iter().map(RequestHandle::wait);
        assert_eq!(outcomes.next().unwrap().unwrap().resolved.seed, 1);
        let failure = outcomes.next().unwrap().unwrap_err();
        assert_eq!(failure.code, FailureCode::Internal);
        assert_eq!(
            failure.message,
            "the executor ended wave 2 without a result of request 2"
        );
        let failure = outcomes.next().unwrap().unwrap_err();
        assert_eq!(
            (failure.code, failure.rank),
            (FailureCode::NonFinite, Some(Rank(0)))
        );
        assert_eq!(outcomes.next().unwrap().unwrap().resolved.seed, 4);
        // Twice: one result and one wave too many. Forgotten: one.
        until(|| engine.stats().n_stray == 13);
        assert!(engine.health(ms(100)).is_healthy());
        assert_balanced(&engine);
    });
}

#[test]
fn a_wave_that_cannot_be_sent_fails_alone() {
    watched(|| {
        let executor = FakeExecutor::start(1);
        executor.refuse_next(ExecutorError::TooLarge {
            message_bytes: 9,
            limit_bytes: 8,
            limited_by: "test",
        });
        executor.refuse_next(ExecutorError::Deadline {
            what: "execute".into(),
            silent: vec![Rank(0)],
        });
        let engine = start(&executor, 4);
        let handles: Vec<_> = (0..3).map(|seed| submit(&engine, seed)).collect();
        let codes: Vec<_> = handles
            .into_iter()
            .map(|handle| handle.wait().map_err(|f| f.code))
            .collect();
        assert_eq!(codes[0], Err(FailureCode::InvalidRequest));
        assert_eq!(codes[1], Err(FailureCode::DeadlineExceeded));
        assert!(codes[2].is_ok());
    });
}

#[test]
fn a_panic_in_the_policy_on_the_engines_thread_fails_everyone() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(50));
        let panics_at = |event: &Event| matches!(event, Event::WaveDone { .. });
        let policy = Fragile {
            inner: Box::new(RequestPolicy::new(8)),
            panics_at,
        };
        let engine = Engine::start(
            Arc::clone(&executor) as _,
            Box::new(policy),
            EngineOptions::default(),
        )
        .unwrap();
        let handles: Vec<_> = (0..5).map(|seed| submit(&engine, seed)).collect();
        let outcomes: Vec<_> = handles.into_iter().map(RequestHandle::wait).collect();
        // The first had its result before the wave's end; the event was delivered on its own.
        assert!(outcomes[0].is_ok());
        for outcome in outcomes.into_iter().skip(1) {
            assert_eq!(code(outcome), FailureCode::Internal);
        }
        assert_engine_is_dead(&engine, &executor);
    });
}

#[test]
fn a_panic_in_the_policy_on_an_owners_thread_fails_everyone_and_only_refuses_the_owner() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, swallow(false));
        let panics_at =
            |event: &Event| matches!(event, Event::Submit { request_id, .. } if *request_id == RequestId(3));
        let policy = Fragile {
            inner: Box::new(RequestPolicy::new(8)),
            panics_at,
        };
        let engine = Engine::start(
            Arc::clone(&executor) as _,
            Box::new(policy),
            EngineOptions::default(),
        )
        .unwrap();
        let mut handles: Vec<_> = (0..2).map(|seed| submit(&engine, seed)).collect();
        // The engine's thread is to be asleep when it happens.
        handles[0]
            .find(|event| matches!(event, RequestEvent::Step { n_done: 2, .. }))
            .unwrap();
        thread::sleep(ms(100));
        let failure = engine.submit(request(2), SubmitOptions::default()).unwrap_err();
        assert_eq!(failure.code, FailureCode::Internal);
        for handle in handles {
            assert_eq!(handle.wait().unwrap_err(), failure);
        }
        assert_engine_is_dead(&engine, &executor);
    });
}

#[test]
fn a_panic_in_the_executor_fails_everyone() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, swallow(false));
        let engine = start(&executor, 8);
        let handles: Vec<_> = (0..3).map(|seed| submit(&engine, seed)).collect();
        executor.panic_next();
        for handle in handles {
            assert_eq!(code(handle.wait()), FailureCode::Internal);
        }
        assert_engine_is_dead(&engine, &executor);
    });
}

#[test]
fn close_drains_what_was_admitted_and_refuses_the_rest() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(20));
        let engine = start(&executor, 8);
        let handles: Vec<_> = (0..4).map(|seed| submit(&engine, seed)).collect();
        let report = engine.close(LONG);
        assert!(
            report.is_complete && report.failure.is_none() && report.n_failed == 0,
            "{report:?}"
        );
        assert_eq!(report.shutdown.ranks.len(), 1);
        for (seed, handle) in handles.into_iter().enumerate() {
            assert_eq!(handle.wait().unwrap().resolved.seed, seed as u64);
        }
        let failure = engine.submit(request(9), SubmitOptions::default()).unwrap_err();
        assert_eq!(failure.code, FailureCode::Closed);
        assert_eq!(
            engine.health(ms(100)).failure.map(|f| f.code),
            Some(FailureCode::Closed)
        );
        assert_eq!(engine.close(ms(1)), report);
        assert_eq!(executor.calls().last(), Some(&FakeCall::Shutdown));
    });
}

#[test]
fn close_while_busy_fails_what_is_left_within_its_budget() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, swallow(true));
        let engine = start(&executor, 8);
        let handles: Vec<_> = (0..4).map(|seed| submit(&engine, seed)).collect();
        let barrier = Barrier::new(8);
        let reports: Vec<_> = thread::scope(|scope| {
            let close = || {
                barrier.wait();
                engine.close(ms(1500))
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(close)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!((reports[0].n_failed, reports[0].is_complete), (4, true));
        assert!(reports.iter().all(|report| *report == reports[0]));
        for handle in handles {
            assert_eq!(code(handle.wait()), FailureCode::Closed);
        }
        let n_shutdowns = executor
            .calls()
            .iter()
            .filter(|call| **call == FakeCall::Shutdown)
            .count();
        assert_eq!(n_shutdowns, 1);
        assert_balanced(&engine);
    });
}

#[test]
fn closing_with_no_budget_ends_at_once() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, swallow(true));
        let engine = start(&executor, 8);
        let handle = submit(&engine, 0);
        assert_eq!(engine.close(Duration::ZERO).n_failed, 1);
        assert_eq!(code(handle.wait()), FailureCode::Closed);
    });
}

#[test]
fn dropping_the_last_engine_handle_closes() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, swallow(true));
        let options = EngineOptions {
            drop_budget: ms(30),
            ..EngineOptions::default()
        };
        let engine = start_with(&executor, 8, options);
        let second = engine.clone();
        let handle = submit(&engine, 0);
        drop(engine);
        assert!(!executor.calls().contains(&FakeCall::Shutdown));
        drop(second);
        assert_eq!(executor.calls().last(), Some(&FakeCall::Shutdown));
        assert_eq!(code(handle.wait()), FailureCode::Closed);
    });
}

/// A waker that unparks the thread that made it: the smallest runtime.
struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}

#[test]
fn events_can_be_awaited_without_a_runtime() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(10));
        let engine = start(&executor, 8);
        let mut handle = submit(&engine, 1);
        let other = submit(&engine, 2);
        let n_events = block_on(async {
            let mut n_events = 0;
            while let Some(event) = handle.next_async().await {
                n_events += 1;
                assert_eq!(event.is_terminal(), matches!(event, RequestEvent::Finished(_)));
            }
            n_events
        });
        assert!(n_events >= 3, "{n_events}");
        assert_eq!(block_on(other.wait_async()).unwrap().resolved.seed, 2);
    });
}

/// A waker that owns the last engine handle, as a task of an async runtime may.
struct OwnsEngine(Mutex<Option<EngineHandle>>);

impl Wake for OwnsEngine {
    fn wake(self: Arc<Self>) {
        drop(self.0.lock().unwrap().take());
    }
}

#[test]
fn the_last_handle_may_be_dropped_on_the_engines_own_thread() {
    watched(|| {
        let executor = FakeExecutor::scripted(1, slow(50));
        let engine = start(&executor, 8);
        let mut handle = submit(&engine, 1);
        while handle.try_next().is_some() {}
        let waker = Waker::from(Arc::new(OwnsEngine(Mutex::new(Some(engine)))));
        let poll = handle.poll_next(&mut Context::from_waker(&waker));
        assert!(poll.is_pending() || poll.is_ready());
        drop(waker);
        until(|| executor.calls().contains(&FakeCall::Shutdown));
        // It drained as any close does; had the thread waited for itself, the request would have been given up.
        let last = handle.last();
        assert!(matches!(last, Some(RequestEvent::Finished(_))), "{last:?}");
    });
}

/// An executor whose wait returns at once, for nothing.
#[derive(Debug)]
struct Restless {
    inner: Arc<FakeExecutor>,
    n_waits: AtomicUsize,
}

impl Executor for Restless {
    fn world(&self) -> WorldInfo {
        self.inner.world()
    }
    fn dispatch(&self, wave: Wave, deadline: Instant) -> Result<CallId, ExecutorError> {
        self.inner.dispatch(wave, deadline)
    }
    fn cancel(&self, requests: &[RequestId], deadline: Instant) -> Result<(), ExecutorError> {
        self.inner.cancel(requests, deadline)
    }
    fn wait_events(&self, _until: Instant) -> Vec<ExecutorEvent> {
        self.n_waits.fetch_add(1, Ordering::Relaxed);
        self.inner.wait_events(Instant::now())
    }
    fn waker(&self) -> denoised_executor::Waker {
        self.inner.waker()
    }
    fn call(&self, call: &MethodCall<'_>) -> Result<Vec<RankReply>, ExecutorError> {
        self.inner.call(call)
    }
    fn health(&self, limit: Duration) -> Health {
        self.inner.health(limit)
    }
    fn failure(&self) -> Option<Failure> {
        self.inner.failure()
    }
    fn on_failure(&self, callback: Box<dyn FnOnce(&Failure) + Send>) {
        self.inner.on_failure(callback);
    }
    fn shutdown(&self, budget: Duration) -> ShutdownReport {
        self.inner.shutdown(budget)
    }
}

#[test]
fn an_executor_that_does_not_wait_does_not_make_the_engine_spin() {
    watched(|| {
        let inner = FakeExecutor::start(1);
        let executor = Arc::new(Restless {
            inner: Arc::clone(&inner),
            n_waits: AtomicUsize::new(0),
        });
        let policy = Box::new(RequestPolicy::new(4));
        let engine = Engine::start(Arc::clone(&executor) as _, policy, EngineOptions::default()).unwrap();
        assert_eq!(submit(&engine, 5).wait().unwrap().resolved.seed, 5);
        thread::sleep(ms(1000));
        // A thousand at once, then at most one in a millisecond; without the pause it would be hundreds of thousands.
        let n_waits = executor.n_waits.load(Ordering::Relaxed);
        assert!(n_waits < 20_000, "{n_waits} waits");
        // It hears of the world's end also without being told.
        inner.fail_world_rudely(killed());
        while !inner.wait_events(Instant::now()).is_empty() {}
        until(|| inner.calls().contains(&FakeCall::Shutdown));
        assert_eq!(engine.close(LONG).failure, Some(killed()));
    });
}

#[test]
fn handles_go_to_any_thread() {
    fn is_send<T: Send>() {}
    fn is_sync<T: Sync>() {}
    is_send::<EngineHandle>();
    is_sync::<EngineHandle>();
    is_send::<RequestHandle>();
}

#[test]
fn an_executor_without_replicas_is_refused() {
    let failure = Engine::start(
        FakeExecutor::start(0),
        Box::new(RequestPolicy::new(1)),
        EngineOptions::default(),
    );
    assert!(failure.unwrap_err().message.contains("no replica"));
}

/// 16 threads submit, cancel, drop, look and wait while workers dawdle, fail, go deaf and lie; then the world dies, or is closed.
#[test]
fn in_any_chaos_each_request_ends_exactly_once() {
    for round in 0..12_u64 {
        watched(move || {
            let executor = FakeExecutor::scripted(3, |member| {
                let mut state = member.request.seed;
                FakeRun {
                    n_steps: random(&mut state, 4) as u32,
                    step_time: Duration::from_micros(random(&mut state, 2000)),
                    is_deaf: random(&mut state, 10) == 0,
                    end: match random(&mut state, 12) {
                        0 => FakeEnd::Fail(Failure::new(FailureCode::WorkerFailed, "an error of its own")),
                        1 => FakeEnd::Twice,
                        2 => FakeEnd::Forgotten,
                        3 => FakeEnd::Never,
                        _ => FakeEnd::Picture,
                    },
                }
            });
            let options = EngineOptions {
                cancel_grace: ms(5),
                stuck_limit: ms(500),
                ..EngineOptions::default()
            };
            let engine = start_with(&executor, 20, options);
            let n_ended = AtomicUsize::new(0);
            let n_dropped = AtomicUsize::new(0);
            thread::scope(|scope| {
                for thread_idx in 0..16 {
                    let (engine, n_ended, n_dropped) = (engine.clone(), &n_ended, &n_dropped);
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
                            let mut n_ends = 0;
                            match random(&mut state, 6) {
                                0 => handle.cancel(),
                                1 => {
                                    n_dropped.fetch_add(1, Ordering::Relaxed);
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
                            n_ended.fetch_add(n_ends, Ordering::Relaxed);
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
            let n_seen = (n_ended.into_inner() + n_dropped.into_inner()) as u64;
            assert_eq!(n_seen, stats.n_submitted, "{stats:?}");
        });
    }
}
