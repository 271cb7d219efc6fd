//! Step mode: one step per wave, and requests that stay on their ranks from wave to wave.

use super::{Outcome, StartFn, close, events_until_done, late, outcomes};
use crate::process::eventually;
use crate::script::{At, Script, What, picture, request, step_wave};
use denoised_executor::{Executor, ExecutorError, ExecutorEvent, MethodCall, Ranks, status};
use denoised_types::{Capture, Failure, FailureCode, GenerateRequest, Rank, RequestId, WaveId};
use denoised_wire::RankProgress;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// Carries out one wave on rank 0.
fn run(
    executor: &dyn Executor,
    wave_id: u64,
    joining: &[(u64, GenerateRequest)],
    continuing: &[u64],
    cancelled: &[u64],
) -> Vec<ExecutorEvent> {
    let wave = step_wave(wave_id, &[0], joining, continuing, cancelled);
    executor.dispatch(wave, late()).unwrap();
    let events = events_until_done(executor, &[wave_id]);
    assert_eq!(
        events.last(),
        Some(&ExecutorEvent::WaveDone {
            wave_id: WaveId(wave_id)
        }),
        "the wave's end comes last, once"
    );
    events
}

/// The steps that were reported, in order.
fn steps(events: &[ExecutorEvent]) -> Vec<(u64, u32)> {
    let step = |event: &ExecutorEvent| match event {
        ExecutorEvent::Step {
            request_id, n_done, ..
        } => Some((request_id.0, *n_done)),
        _ => None,
    };
    events.iter().filter_map(step).collect()
}

/// Every rank that holds requests between waves holds these, as soon as it has put its last wave aside.
fn assert_residents(executor: &dyn Executor, ids: &[u64]) {
    let expected: Vec<RequestId> = ids.iter().copied().map(RequestId).collect();
    let mut seen = Vec::new();
    let is_so = eventually(Duration::from_secs(60), || {
        let of = |progress: &RankProgress| progress.residents.iter().map(|r| r.request_id).collect();
        let progress = status::progress(executor, Duration::from_secs(60)).unwrap();
        seen = progress
            .iter()
            .map(|(_, progress)| of(progress))
            .collect::<Vec<Vec<RequestId>>>();
        seen[0] == expected && seen[1..].iter().all(|residents| residents.is_empty())
    });
    assert!(is_so, "{seen:?} instead of {expected:?}");
}

fn failure_of(outcomes: &BTreeMap<RequestId, Outcome>, id: u64) -> &Failure {
    outcomes[&RequestId(id)].as_ref().unwrap_err()
}

/// Requests come and go between waves; each ends in the wave of its last step, like one that ran alone.
pub fn requests_join_and_leave_between_waves(start: &StartFn) {
    let executor = start(&Script::default());
    let executor = &*executor;
    let first = run(executor, 1, &[(1, request(5, 3))], &[], &[]);
    assert_eq!(steps(&first), [(1, 1)]);
    let started = ExecutorEvent::RequestStarted {
        request_id: RequestId(1),
        rank: Rank(0),
    };
    assert_eq!(first[0], started);
    let second = run(executor, 2, &[(2, request(6, 2)), (3, request(7, 1))], &[1], &[]);
    assert_eq!(steps(&second), [(1, 2), (2, 1), (3, 1)]);
    let mut ended = outcomes(second);
    assert_eq!(ended.keys().copied().collect::<Vec<_>>(), [RequestId(3)]);
    // Nothing is lost by waiting, or by other calls.
    std::thread::sleep(Duration::from_millis(50));
    executor
        .call(&MethodCall::new("echo", b"between", late()))
        .unwrap();
    let third = run(executor, 3, &[], &[1, 2], &[]);
    assert_eq!(steps(&third), [(1, 3), (2, 2)]);
    ended.extend(outcomes(third));
    for (id, seed) in [(1, 5), (2, 6), (3, 7)] {
        let generated = ended.remove(&RequestId(id)).unwrap().unwrap();
        assert_eq!(generated.image, picture(seed, 8));
        assert_eq!((generated.rank, generated.resolved.seed), (Rank(0), seed));
    }
    assert_residents(executor, &[]);
    close(executor);
}

/// See the name.
pub fn what_is_traced_in_many_waves_comes_with_the_request(start: &StartFn) {
    let executor = start(&Script::default());
    let mut traced = request(1, 4);
    traced.capture = Capture::Trace;
    run(&*executor, 1, &[(1, traced)], &[], &[]);
    for wave_id in 2..4 {
        assert!(outcomes(run(&*executor, wave_id, &[], &[1], &[])).is_empty());
    }
    let mut ended = outcomes(run(&*executor, 4, &[], &[1], &[]));
    let tensors = ended.remove(&RequestId(1)).unwrap().unwrap().tensors;
    let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "latents.step_0",
            "latents.step_1",
            "latents.step_2",
            "latents.step_3"
        ]
    );
    close(&*executor);
}

/// See the name.
pub fn a_wave_says_who_is_given_up(start: &StartFn) {
    let executor = start(&Script::default());
    let executor = &*executor;
    run(executor, 1, &[(1, request(1, 9)), (2, request(2, 3))], &[], &[]);
    // The other way to cancel is for request mode.
    executor.cancel(&[RequestId(1), RequestId(2)], late()).unwrap();
    let second = run(executor, 2, &[(3, request(3, 1))], &[2], &[1]);
    assert_eq!(steps(&second), [(2, 2), (3, 1)]);
    let ended = outcomes(second);
    assert_eq!(failure_of(&ended, 1).code, FailureCode::Cancelled);
    assert!(ended[&RequestId(3)].is_ok() && ended.len() == 2);
    // A wave may hold nothing else, and names of requests that are over are no offence.
    let third = run(executor, 3, &[], &[], &[2, 1, 77]);
    assert!(steps(&third).is_empty());
    let ended = outcomes(third);
    assert_eq!(
        (failure_of(&ended, 2).code, ended.len()),
        (FailureCode::Cancelled, 1)
    );
    assert!(outcomes(run(executor, 4, &[], &[], &[])).is_empty());
    assert_residents(executor, &[]);
    close(executor);
}

/// See the name.
pub fn waves_that_name_strangers_are_refused_before_sending(start: &StartFn) {
    let executor = start(&Script::default());
    let executor = &*executor;
    run(executor, 1, &[(1, request(1, 4))], &[], &[]);
    let refused = |wave: denoised_wire::Wave, words: &str| match executor.dispatch(wave, late()) {
        Err(ExecutorError::Refused(failure)) => {
            assert_eq!(failure.code, FailureCode::InvalidRequest);
            assert!(failure.message.contains(words), "{failure}");
        }
        other => panic!("{other:?}"),
    };
    let step = |joining: &[(u64, GenerateRequest)], continuing: &[u64], cancelled: &[u64]| {
        step_wave(2, &[0], joining, continuing, cancelled)
    };
    refused(
        step(&[], &[1, 8], &[]),
        "request 8 cannot go on, it is not resident",
    );
    refused(step(&[(1, request(1, 1))], &[], &[]), "request 1 cannot join");
    refused(
        step(&[(5, request(1, 1)), (5, request(1, 1))], &[], &[]),
        "request 5 twice",
    );
    refused(step(&[], &[1], &[1]), "request 1 twice");
    let mut wrong_mode = step(&[], &[1], &[]);
    wrong_mode.mode = denoised_types::Mode::Request;
    refused(wrong_mode, "step mode");
    if executor.world().world_size > 1 {
        let elsewhere = step_wave(2, &[1], &[], &[1], &[]);
        refused(elsewhere, "request 1 is resident on rank(s) 0, not 1");
    }
    // Nothing of it was sent; the resident is where it was.
    let second = run(executor, 2, &[], &[1], &[]);
    assert_eq!(steps(&second), [(1, 2)]);
    close(executor);
}

/// See the name.
pub fn a_failing_step_ends_its_request_and_spares_the_others(start: &StartFn) {
    let what = What::Fail(FailureCode::OutOfMemory, "no room for it".to_owned());
    let executor = start(&Script::default().fault(None, At::Step(1), what));
    let executor = &*executor;
    let first = run(executor, 1, &[(1, request(1, 3)), (2, request(2, 1))], &[], &[]);
    assert!(outcomes(first)[&RequestId(2)].is_ok());
    let second = run(executor, 2, &[(3, request(3, 1))], &[1], &[]);
    let ended = outcomes(second);
    let failure = failure_of(&ended, 1);
    assert_eq!(
        (failure.code, failure.rank, failure.phase.as_deref()),
        (FailureCode::OutOfMemory, Some(Rank(0)), Some("step 2 of 3"))
    );
    assert!(ended[&RequestId(3)].is_ok());
    assert_eq!(executor.failure(), None);
    close(executor);
}

/// See the name.
pub fn forgotten_residents_are_failed(start: &StartFn) {
    let executor = start(&Script::default().fault(None, At::Decode, What::Forget));
    let executor = &*executor;
    let first = run(executor, 1, &[(1, request(1, 2)), (2, request(2, 1))], &[], &[]);
    assert_eq!(failure_of(&outcomes(first), 2).code, FailureCode::Internal);
    let ended = outcomes(run(executor, 2, &[], &[1], &[]));
    assert_eq!(failure_of(&ended, 1).code, FailureCode::Internal);
    executor.call(&MethodCall::new("echo", b"x", late())).unwrap();
    close(executor);
}

/// See the name.
pub fn a_resident_ends_at_its_deadline_between_waves(start: &StartFn) {
    let executor = start(&Script::default());
    let mut wave = step_wave(1, &[0], &[(1, request(1, 9)), (2, request(2, 9))], &[], &[]);
    wave.joining[0].deadline_ns = denoised_os::Deadline::after_ms(300).ns();
    executor.dispatch(wave, late()).unwrap();
    let mut events = events_until_done(&*executor, &[1]);
    while outcomes_so_far(&events) == 0 {
        events.extend(executor.wait_events(late()));
    }
    let ended = outcomes(events);
    assert_eq!(failure_of(&ended, 1).code, FailureCode::DeadlineExceeded);
    assert_eq!(ended.len(), 1);
    // The rank gives it up with the next wave, whatever that one is about.
    let second = run(&*executor, 2, &[], &[2], &[]);
    assert!(outcomes(second).is_empty());
    assert_residents(&*executor, &[2]);
    close(&*executor);
}

fn outcomes_so_far(events: &[ExecutorEvent]) -> usize {
    let is_end = |event: &&ExecutorEvent| matches!(event, ExecutorEvent::RequestDone { .. });
    events.iter().filter(is_end).count()
}

/// Between two waves, and none of their fault.
pub fn residents_end_once_before_the_world_is_reported_failed(start: &StartFn) {
    let executor = start(&Script::default());
    let joining: Vec<(u64, GenerateRequest)> = (1..=4).map(|id| (id, request(id, 9))).collect();
    run(&*executor, 1, &joining, &[], &[]);
    executor
        .call(&MethodCall::new("panic", b"all over", late()).execute(Ranks::One(Rank(0))))
        .unwrap_err();
    let mut events = Vec::new();
    while !matches!(events.last(), Some(ExecutorEvent::WorldFailed(_))) {
        events.extend(executor.wait_events(late()));
    }
    assert_eq!(events.len(), 5, "{events:?}");
    let failure = executor.failure().unwrap();
    for (_, outcome) in outcomes(events) {
        assert_eq!(outcome.unwrap_err(), failure);
    }
    assert!(
        executor
            .wait_events(Instant::now() + Duration::from_millis(50))
            .is_empty()
    );
    close(&*executor);
}

/// See the name.
pub fn shutdown_ends_residents_once(start: &StartFn) {
    let executor = start(&Script::default());
    run(&*executor, 1, &[(1, request(1, 9)), (2, request(2, 9))], &[], &[]);
    close(&*executor);
    let events = executor.wait_events(Instant::now());
    let ended = outcomes(events);
    assert_eq!(ended.len(), 2);
    assert!(
        ended
            .values()
            .all(|o| o.as_ref().is_err_and(|f| f.code == FailureCode::Closed))
    );
    assert!(executor.wait_events(Instant::now()).is_empty());
}

/// All ranks carry out the same waves: the first one's results count, and any one's failure.
pub fn waves_of_several_ranks_end_requests_once(start: &StartFn) {
    let what = What::Fail(FailureCode::NonFinite, "latents are not finite".to_owned());
    let probe = start(&Script::default());
    let last = probe.world().world_size - 1;
    close(&*probe);
    let executor = start(&Script::default().fault(Some(last), At::Step(2), what));
    let all: Vec<u16> = (0..=last).collect();
    let mut events = Vec::new();
    let joining = [(1, request(1, 2)), (2, request(2, 5))];
    let waves = [
        step_wave(1, &all, &joining, &[], &[]),
        step_wave(2, &all, &[], &[1, 2], &[]),
        step_wave(3, &all, &[], &[2], &[]),
    ];
    for wave in waves {
        let wave_id = wave.wave_id.0;
        executor.dispatch(wave, late()).unwrap();
        events.extend(events_until_done(&*executor, &[wave_id]));
    }
    let expected = if last == 0 {
        vec![(1, 1), (2, 1), (1, 2), (2, 2)]
    } else {
        // Rank 0 has done the step that another has failed.
        vec![(1, 1), (2, 1), (1, 2), (2, 2), (2, 3)]
    };
    assert_eq!(steps(&events), expected);
    let ended = outcomes(events);
    assert_eq!(ended[&RequestId(1)].as_ref().unwrap().image, picture(1, 8));
    let failure = failure_of(&ended, 2);
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::NonFinite, Some(Rank(last)))
    );
    // Where it went on it is given up by the next wave, without a word to anybody.
    let wave = step_wave(4, &all, &[(3, request(3, 1))], &[], &[]);
    executor.dispatch(wave, late()).unwrap();
    let ended = outcomes(events_until_done(&*executor, &[4]));
    assert!(ended.len() == 1 && ended[&RequestId(3)].is_ok(), "{ended:?}");
    assert_residents(&*executor, &[]);
    close(&*executor);
}
