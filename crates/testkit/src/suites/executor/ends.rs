//! How requests and worlds fail, what health means, and how a world is closed.

use super::{StartFn, close, events_until_done, late, outcomes, ranks};
use crate::process::eventually;
use crate::script::{At, Script, What, request, wave};
use denoised_executor::{Executor, ExecutorError, ExecutorEvent, MethodCall, Ranks};
use denoised_types::{Failure, FailureCode, Rank, RequestId};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Fault case E3.
pub fn failures_of_requests_have_one_shape_and_spare_the_world(start: &StartFn) {
    let what = What::Fail(FailureCode::NonFinite, "latents are not finite".to_owned());
    let executor = start(&Script::default().fault(None, At::Step(2), what));
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 5)), (2, request(2, 2))]), late())
        .unwrap();
    let outcomes = outcomes(events_until_done(&*executor, &[1]));
    let failure = outcomes[&RequestId(1)].as_ref().unwrap_err();
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::NonFinite, Some(Rank(0)))
    );
    assert_eq!(
        failure.to_string(),
        "rank 0: latents are not finite (during step 3 of 5)"
    );
    assert!(outcomes[&RequestId(2)].is_ok());
    match executor
        .call(&MethodCall::new("fail", b"no adapter", late()).execute(Ranks::One(Rank(0))))
        .unwrap_err()
    {
        ExecutorError::Rank { failure, .. } => {
            assert_eq!(
                (failure.code, failure.rank),
                (FailureCode::WorkerFailed, Some(Rank(0)))
            );
            assert_eq!(failure.message, "no adapter");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(executor.failure(), None);
    executor.call(&MethodCall::new("echo", b"x", late())).unwrap();
    close(&*executor);
}

/// What a failure must look like to everybody, once.
fn assert_world_failed(executor: &dyn Executor, events: Vec<ExecutorEvent>, n_requests: usize) -> Failure {
    let failure = executor.failure().expect("the world has failed");
    assert_eq!(events.last(), Some(&ExecutorEvent::WorldFailed(failure.clone())));
    let outcomes = outcomes(events);
    assert_eq!(outcomes.len(), n_requests);
    // Nothing follows.
    assert!(
        executor
            .wait_events(Instant::now() + Duration::from_millis(50))
            .is_empty()
    );
    assert!(matches!(
        executor.dispatch(wave(99, &[0], &[(99, request(1, 1))]), late()),
        Err(ExecutorError::Failed(_))
    ));
    assert!(matches!(
        executor.call(&MethodCall::new("echo", b"", late())),
        Err(ExecutorError::Failed(_))
    ));
    assert!(matches!(
        executor.cancel(&[RequestId(1)], late()),
        Err(ExecutorError::Failed(_))
    ));
    assert!(!executor.health(Duration::from_secs(1)).is_healthy());
    failure
}

/// Fault case D7's kind: first state, then requests, then callbacks; late callbacks too.
pub fn a_failing_rank_ends_the_world_and_every_request_once(start: &StartFn) {
    let what = What::FailRank(FailureCode::WorkerFailed, "the device is lost".to_owned());
    let executor = start(&Script::with_steps_of(1).fault(Some(0), At::Step(2), what));
    let n_called = Arc::new(AtomicU32::new(0));
    let seen = Arc::new(Mutex::new(None));
    {
        let (n_called, seen) = (Arc::clone(&n_called), Arc::clone(&seen));
        executor.on_failure(Box::new(move |failure| {
            n_called.fetch_add(1, Ordering::SeqCst);
            *seen.lock().unwrap() = Some(failure.clone());
        }));
    }
    for id in 0..16 {
        executor
            .dispatch(wave(id, &[0], &[(id, request(id, 5))]), late())
            .unwrap_or_default();
    }
    let mut events = Vec::new();
    while !matches!(events.last(), Some(ExecutorEvent::WorldFailed(_))) {
        events.extend(executor.wait_events(late()));
    }
    let n_requests = events
        .iter()
        .filter(|event| matches!(event, ExecutorEvent::RequestDone { .. }))
        .count();
    let failure = assert_world_failed(&*executor, events, n_requests);
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::WorkerFailed, Some(Rank(0)))
    );
    assert_eq!(failure.message, "the device is lost");
    assert!(eventually(Duration::from_secs(30), || n_called
        .load(Ordering::SeqCst)
        == 1));
    assert_eq!(seen.lock().unwrap().as_ref(), Some(&failure));
    let late_called = Arc::new(AtomicU32::new(0));
    {
        let late_called = Arc::clone(&late_called);
        executor.on_failure(Box::new(move |_| {
            late_called.fetch_add(1, Ordering::SeqCst);
        }));
    }
    assert_eq!(
        late_called.load(Ordering::SeqCst),
        1,
        "a late callback runs at once"
    );
    close(&*executor);
    assert_eq!(n_called.load(Ordering::SeqCst), 1);
}

/// See the name.
pub fn a_panic_ends_the_world_with_its_text(start: &StartFn) {
    let executor = start(&Script::default().fault(None, At::Step(1), What::Panic("index 9 of 3".to_owned())));
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 3)), (2, request(2, 3))]), late())
        .unwrap();
    let mut events = Vec::new();
    while !matches!(events.last(), Some(ExecutorEvent::WorldFailed(_))) {
        events.extend(executor.wait_events(late()));
    }
    let failure = assert_world_failed(&*executor, events, 2);
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::WorkerFailed, Some(Rank(0)))
    );
    assert!(failure.message.contains("index 9 of 3"), "{failure}");
    close(&*executor);
}

/// See the name.
pub fn callers_that_wait_hear_of_the_failure(start: &StartFn) {
    let executor = start(&Script::default());
    let executor = &*executor;
    std::thread::scope(|scope| {
        let begin = Instant::now();
        let callers: Vec<_> = (0..4)
            .map(|_| scope.spawn(move || executor.call(&MethodCall::new("sleep", b"100", late()))))
            .collect();
        let engine = scope.spawn(move || {
            let mut events = Vec::new();
            while !matches!(events.last(), Some(ExecutorEvent::WorldFailed(_))) {
                events.extend(executor.wait_events(late()));
            }
            events
        });
        let panicked = executor
            .call(&MethodCall::new("panic", b"all over", late()).execute(Ranks::One(Rank(0))))
            .unwrap_err();
        assert!(matches!(&panicked, ExecutorError::Failed(failure) if failure.message.contains("all over")));
        for caller in callers {
            match caller.join().unwrap() {
                Ok(_) | Err(ExecutorError::Failed(_)) => {}
                Err(other) => panic!("{other:?}"),
            }
        }
        assert_eq!(engine.join().unwrap().len(), 1);
        assert!(begin.elapsed() < Duration::from_secs(30));
    });
    close(executor);
}

/// See the name.
pub fn health_is_an_answer_also_while_a_step_runs(start: &StartFn) {
    let executor = start(&Script::default());
    let executor = &*executor;
    let health = executor.health(Duration::from_secs(30));
    assert!(health.is_healthy());
    assert_eq!(health.answered, ranks(executor));
    std::thread::scope(|scope| {
        let caller = scope.spawn(move || executor.call(&MethodCall::new("busy", b"400", late())));
        std::thread::sleep(Duration::from_millis(50));
        let begin = Instant::now();
        assert!(executor.health(Duration::from_secs(30)).is_healthy());
        assert!(begin.elapsed() < Duration::from_secs(10));
        caller.join().unwrap().unwrap();
    });
    close(executor);
    let health = executor.health(Duration::from_secs(1));
    assert!(!health.is_healthy());
    assert_eq!(health.silent, ranks(executor));
}

/// Fault case S5, without the kill.
pub fn shutdown_is_one_teardown_for_all_callers(start: &StartFn) {
    let executor = start(&Script::default());
    let executor = &*executor;
    let reports: Vec<_> = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..8)
            .map(|_| scope.spawn(move || executor.shutdown(Duration::from_secs(20))))
            .collect();
        callers.into_iter().map(|caller| caller.join().unwrap()).collect()
    });
    assert!(reports.iter().all(|report| *report == reports[0]), "{reports:?}");
    assert_eq!(
        reports[0].ranks.iter().map(|exit| exit.rank).collect::<Vec<_>>(),
        ranks(executor)
    );
    assert!(
        reports[0].ranks.iter().all(|exit| exit.means == "graceful"),
        "{reports:?}"
    );
    let begin = Instant::now();
    assert_eq!(executor.shutdown(Duration::from_secs(20)), reports[0]);
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert_eq!(executor.failure(), None);
    assert!(matches!(
        executor.call(&MethodCall::new("echo", b"", late())),
        Err(ExecutorError::Closed)
    ));
    assert!(matches!(
        executor.dispatch(wave(1, &[0], &[(1, request(1, 1))]), late()),
        Err(ExecutorError::Closed)
    ));
}

/// See the name.
pub fn shutdown_ends_what_is_in_flight(start: &StartFn) {
    let executor = start(&Script::with_steps_of(10));
    executor
        .dispatch(
            wave(1, &[0], &[(1, request(1, 1000)), (2, request(2, 1000))]),
            late(),
        )
        .unwrap();
    executor
        .dispatch(wave(2, &[0], &[(3, request(3, 1000))]), late())
        .unwrap();
    let begin = Instant::now();
    let report = executor.shutdown(Duration::from_secs(20));
    assert!(begin.elapsed() < Duration::from_secs(15), "{report:?}");
    assert!(
        report.ranks.iter().all(|exit| exit.means == "graceful"),
        "{report:?}"
    );
    let outcomes = outcomes(executor.wait_events(Instant::now()));
    assert_eq!(outcomes.len(), 3);
    for outcome in outcomes.values() {
        assert_eq!(outcome.as_ref().unwrap_err().code, FailureCode::Closed);
    }
}
