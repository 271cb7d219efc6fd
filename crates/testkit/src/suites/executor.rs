//! What every executor must do, whatever its workers are. Written against [`Executor`] and scripted workers alone.
//! The beginning of a name (`c1`) is the id of a case that some system of this kind got wrong.
//!
//! ```text
//! denoised_testkit::executor_conformance!(mine, |script| Box::new(MyExecutor::start(script.config())));
//! ```

mod outputs;
mod shapes;
mod steps;

pub use outputs::*;
pub use shapes::*;
pub use steps::*;

use crate::{
    process::eventually,
    script::{At, Script, What, picture, request, wave},
};
use denoised_executor::{Executor, ExecutorError, ExecutorEvent, MethodCall, Output, Ranks};
use denoised_types::{Capture, Failure, FailureCode, Generated, NamedTensor, Rank, RequestId, WaveId};
use denoised_wire::WorkerStatus;
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// Starts the executor under test with scripted workers.
pub type StartFn = dyn Fn(&Script) -> Box<dyn Executor>;

/// Runs the whole suite as tests of a module `$name`, each under a watchdog. `$start` is a `Fn(&Script) -> Box<dyn Executor>`.
#[macro_export]
macro_rules! executor_conformance {
    ($name:ident, $start:expr) => {
        $crate::executor_conformance!(@tests $name, $start,
            world_says_what_it_is,
            requests_of_a_wave_end_once_in_order_and_then_the_wave,
            traces_and_latents_travel_whole,
            large_pictures_arguments_and_replies_travel_whole,
            c1_every_caller_gets_its_own_answer,
            failing_ranks_are_named_and_the_others_listed,
            c3_old_answers_do_not_reach_new_calls,
            c5_late_answers_do_no_harm,
            t5_a_passed_deadline_is_refused_at_once,
            an_unanswered_call_names_the_silent_ranks,
            l5_messages_over_the_limit_are_refused_and_the_path_goes_on,
            unknown_methods_and_ranks_are_refused,
            built_in_methods_answer,
            k1_cancelled_requests_end_soon_and_the_next_starts,
            a_cancel_may_overtake_its_wave,
            requests_end_at_their_deadline,
            failures_of_requests_have_one_shape_and_spare_the_world,
            forgotten_requests_are_failed,
            c7_concurrent_requests_are_answered_like_serial_ones,
            calls_are_answered_beside_a_thread_that_waits_for_events,
            q9_unread_events_hold_the_worker_back_and_none_is_lost,
            wakes_are_not_lost,
            a_failing_rank_ends_the_world_and_every_request_once,
            a_panic_ends_the_world_with_its_text,
            callers_that_wait_hear_of_the_failure,
            health_is_an_answer_also_while_a_step_runs,
            shutdown_is_one_teardown_for_all_callers,
            shutdown_ends_what_is_in_flight,
            calls_of_every_shape_are_answered_by_those_who_are_asked,
            failures_of_ranks_that_do_not_reply_fail_the_call,
            failures_of_control_methods_have_the_same_shape,
            control_methods_are_answered_while_a_step_runs,
            control_messages_over_the_limit_are_refused,
            a_profile_holds_what_was_done_between_its_calls,
            requests_join_and_leave_between_waves,
            what_is_traced_in_many_waves_comes_with_the_request,
            a_wave_says_who_is_given_up,
            waves_that_name_strangers_are_refused_before_sending,
            a_failing_step_ends_its_request_and_spares_the_others,
            forgotten_residents_are_failed,
            a_resident_ends_at_its_deadline_between_waves,
            residents_end_once_before_the_world_is_reported_failed,
            shutdown_ends_residents_once,
            waves_of_several_ranks_end_requests_once,
            held_results_do_not_hold_the_worker_up,
            results_outlive_their_world,
        );
    };
    (@tests $name:ident, $start:expr, $($test:ident),+ $(,)?) => {
        mod $name {
            #[allow(unused_imports, reason = "the start expression may need them or not")]
            use super::*;

            $(
                #[test]
                fn $test() {
                    let name = concat!(stringify!($name), "::", stringify!($test));
                    let _watchdog = $crate::watchdog::Watchdog::new(name, std::time::Duration::from_secs(120));
                    $crate::suites::executor::$test(&$start);
                }
            )+
        }
    };
}

/// Far in the future: a test that reaches it has failed.
fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn close(executor: &dyn Executor) {
    executor.shutdown(Duration::from_secs(20));
}

/// Reads events until these waves have ended or the world has failed.
fn events_until_done(executor: &dyn Executor, waves: &[u64]) -> Vec<ExecutorEvent> {
    let mut left: Vec<WaveId> = waves.iter().copied().map(WaveId).collect();
    let mut seen = Vec::new();
    while !left.is_empty() {
        assert!(Instant::now() < late());
        let events = executor.wait_events(late());
        assert!(!events.is_empty(), "no event for a minute; so far {seen:?}");
        for event in events {
            match &event {
                ExecutorEvent::WaveDone { wave_id } => left.retain(|left| left != wave_id),
                ExecutorEvent::WorldFailed(_) => left.clear(),
                _ => {}
            }
            seen.push(event);
        }
    }
    seen
}

type Outcome = Result<Generated, Failure>;

/// The outcomes by request.
///
/// # Panics
/// A request ended twice.
fn outcomes(events: Vec<ExecutorEvent>) -> BTreeMap<RequestId, Outcome> {
    let mut outcomes = BTreeMap::new();
    for event in events {
        if let ExecutorEvent::RequestDone { request_id, outcome } = event {
            assert!(
                outcomes
                    .insert(request_id, outcome.map(Output::into_generated))
                    .is_none(),
                "request {request_id} ended twice"
            );
        }
    }
    outcomes
}

fn ranks(executor: &dyn Executor) -> Vec<Rank> {
    (0..executor.world().world_size).map(Rank).collect()
}

/// See the name.
pub fn world_says_what_it_is(start: &StartFn) {
    let executor = start(&Script::default());
    let world = executor.world();
    assert!(world.world_size >= 1);
    assert_eq!(world.replicas.concat(), ranks(&*executor));
    assert_eq!((world.model.clone(), executor.failure()), (None, None));
    assert!(world.pids.is_empty() || world.pids.len() == usize::from(world.world_size));
    assert_eq!(executor.world(), world);
    close(&*executor);
    let second = start(&Script::default());
    assert_ne!(second.world().epoch, world.epoch, "an epoch is used once");
    close(&*second);
}

/// See the name.
pub fn requests_of_a_wave_end_once_in_order_and_then_the_wave(start: &StartFn) {
    let executor = start(&Script::default());
    let members = [(1, request(7, 2)), (2, request(8, 3))];
    executor.dispatch(wave(5, &[0], &members), late()).unwrap();
    let events = events_until_done(&*executor, &[5]);
    let of = |id: u64| {
        let id = RequestId(id);
        events
            .iter()
            .filter_map(|event| match event {
                ExecutorEvent::RequestStarted {
                    request_id,
                    rank: Rank(0),
                } if *request_id == id => Some("started".to_owned()),
                ExecutorEvent::Step {
                    request_id,
                    n_done,
                    n_steps,
                } if *request_id == id => Some(format!("{n_done}/{n_steps}")),
                ExecutorEvent::RequestDone { request_id, .. } if *request_id == id => Some("done".to_owned()),
                _ => None,
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(of(1), ["started", "1/2", "2/2", "done"]);
    assert_eq!(of(2), ["started", "1/3", "2/3", "3/3", "done"]);
    assert_eq!(
        events.last(),
        Some(&ExecutorEvent::WaveDone { wave_id: WaveId(5) })
    );
    for (id, outcome) in outcomes(events) {
        let generated = outcome.unwrap();
        let seed = id.0 + 6;
        assert_eq!(generated.image, picture(seed, 8));
        assert_eq!((generated.rank, generated.resolved.seed), (Rank(0), seed));
        assert!(generated.tensors.is_empty());
    }
    close(&*executor);
}

/// See the name.
pub fn traces_and_latents_travel_whole(start: &StartFn) {
    let executor = start(&Script {
        n_trace_values: 50_000,
        ..Script::default()
    });
    let values: Vec<f32> = (0..40_000).map(|i| i as f32 * 0.5).collect();
    let latents = NamedTensor::from_f32("latents.initial", &[1, 4, 100, 100], &values);
    let mut traced = request(1, 4);
    traced.capture = Capture::Trace;
    traced.latents = Some(latents.clone());
    let small = NamedTensor::from_f32("latents.initial", &[2], &[0.25, f32::MIN]);
    let mut plain = request(2, 1);
    plain.latents = Some(small.clone());
    executor
        .dispatch(wave(1, &[0], &[(1, traced), (2, plain)]), late())
        .unwrap();
    let mut outcomes = outcomes(events_until_done(&*executor, &[1]));
    let tensors = outcomes.remove(&RequestId(1)).unwrap().unwrap().tensors;
    assert_eq!(tensors.len(), 5);
    assert_eq!(tensors[0], latents);
    for (step_idx, tensor) in tensors[1..].iter().enumerate() {
        let expected = vec![step_idx as f32; 50_000];
        assert_eq!(
            *tensor,
            NamedTensor::from_f32(format!("latents.step_{step_idx}"), &[50_000], &expected)
        );
    }
    assert_eq!(outcomes.remove(&RequestId(2)).unwrap().unwrap().tensors, [small]);

    // A tensor whose bytes are not those of its shape is its request's own failure.
    let mut wrong = request(3, 1);
    wrong.latents = Some(NamedTensor {
        shape: vec![3],
        ..NamedTensor::from_f32("latents", &[2], &[1.0, 2.0])
    });
    executor
        .dispatch(wave(2, &[0], &[(3, wrong), (4, request(4, 1))]), late())
        .unwrap();
    let outcomes = self::outcomes(events_until_done(&*executor, &[2]));
    assert_eq!(
        outcomes[&RequestId(3)].as_ref().unwrap_err().code,
        FailureCode::InvalidRequest
    );
    assert!(outcomes[&RequestId(4)].is_ok());
    close(&*executor);
}

/// See the name.
pub fn large_pictures_arguments_and_replies_travel_whole(start: &StartFn) {
    let executor = start(&Script {
        side_px: 512,
        ..Script::default()
    });
    for round in 0..8 {
        executor
            .dispatch(wave(round, &[0], &[(round, request(round, 1))]), late())
            .unwrap();
        let outcomes = outcomes(events_until_done(&*executor, &[round]));
        assert_eq!(
            outcomes[&RequestId(round)].as_ref().unwrap().image,
            picture(round, 512)
        );
    }
    for n_bytes in [0usize, 1, 4096, 4097, 16_384, 65_536, 1_000_000] {
        let args: Vec<u8> = (0..n_bytes).map(|i| (i * 31 + n_bytes) as u8).collect();
        let replies = executor.call(&MethodCall::new("echo", &args, late())).unwrap();
        assert_eq!(
            replies.iter().map(|reply| reply.rank).collect::<Vec<_>>(),
            ranks(&*executor)
        );
        assert!(replies.iter().all(|reply| reply.bytes == args), "{n_bytes} bytes");
    }
    close(&*executor);
}

/// See the name.
pub fn c1_every_caller_gets_its_own_answer(start: &StartFn) {
    let executor = start(&Script::default());
    let executor = &*executor;
    std::thread::scope(|scope| {
        for thread_idx in 0..16u32 {
            scope.spawn(move || {
                for call_idx in 0..1000u32 {
                    let mine = (u64::from(thread_idx) << 32 | u64::from(call_idx)).to_le_bytes();
                    let replies = executor.call(&MethodCall::new("echo", &mine, late())).unwrap();
                    assert!(replies.iter().all(|reply| reply.bytes == mine));
                }
            });
        }
    });
    close(executor);
}

/// Fault case E1.
pub fn failing_ranks_are_named_and_the_others_listed(start: &StartFn) {
    let executor = start(&Script::default());
    let last = *ranks(&*executor).last().unwrap();
    let args = format!("{last} adapter is broken");
    match executor
        .call(&MethodCall::new("fail_on", args.as_bytes(), late()))
        .unwrap_err()
    {
        ExecutorError::Rank { failure, succeeded } => {
            assert_eq!(
                (failure.code, failure.rank),
                (FailureCode::WorkerFailed, Some(last))
            );
            assert_eq!(failure.message, "adapter is broken");
            assert_eq!(succeeded, ranks(&*executor)[..usize::from(last.0)]);
        }
        other => panic!("{other:?}"),
    }
    close(&*executor);
}

/// See the name.
pub fn c3_old_answers_do_not_reach_new_calls(start: &StartFn) {
    let executor = start(&Script::default());
    for round in 0..20 {
        executor
            .call(&MethodCall::new("fail_on", b"0 old", late()))
            .unwrap_err();
        let new = format!("new {round}");
        let replies = executor
            .call(&MethodCall::new("echo", new.as_bytes(), late()))
            .unwrap();
        assert!(replies.iter().all(|reply| reply.bytes == new.as_bytes()));
    }
    close(&*executor);
}

/// See the name.
pub fn c5_late_answers_do_no_harm(start: &StartFn) {
    let executor = start(&Script::default());
    for _ in 0..50 {
        // A worker that comes to it later refuses it, or answers late.
        let soon = Instant::now() + Duration::from_millis(2);
        match executor.call(&MethodCall::new("sleep", b"5", soon)) {
            Err(ExecutorError::Deadline { .. } | ExecutorError::Rank { .. }) => {}
            // The answer was there before this thread was.
            Ok(_) => {}
            Err(other) => panic!("{other:?}"),
        }
    }
    let replies = executor.call(&MethodCall::new("echo", b"after", late())).unwrap();
    assert!(replies.iter().all(|reply| reply.bytes == b"after"));
    assert_eq!(replies.len(), ranks(&*executor).len());
    close(&*executor);
}

/// There is no negative time left, but a moment may have passed.
pub fn t5_a_passed_deadline_is_refused_at_once(start: &StartFn) {
    let executor = start(&Script::default());
    for past in [Duration::ZERO, Duration::from_secs(1)] {
        let deadline = Instant::now().checked_sub(past).unwrap_or_else(Instant::now);
        match executor
            .call(&MethodCall::new("echo", b"x", deadline))
            .unwrap_err()
        {
            ExecutorError::Deadline { silent, .. } => assert_eq!(silent, ranks(&*executor)),
            other => panic!("{other:?}"),
        }
        assert!(executor.wait_events(deadline).is_empty());
    }
    executor.call(&MethodCall::new("echo", b"x", late())).unwrap();
    close(&*executor);
}

/// Fault case T1, for methods.
pub fn an_unanswered_call_names_the_silent_ranks(start: &StartFn) {
    let executor = start(&Script::default());
    let begin = Instant::now();
    let deadline = begin + Duration::from_millis(100);
    match executor
        .call(&MethodCall::new("sleep", b"500", deadline).execute(Ranks::One(Rank(0))))
        .unwrap_err()
    {
        ExecutorError::Deadline { what, silent } => {
            assert!(what.contains("sleep"), "{what}");
            assert_eq!(silent, [Rank(0)]);
        }
        other => panic!("{other:?}"),
    }
    assert!(begin.elapsed() >= Duration::from_millis(100));
    // The rank is late, not lost.
    executor.call(&MethodCall::new("echo", b"x", late())).unwrap();
    assert_eq!(executor.failure(), None);
    close(&*executor);
}

/// See the name.
pub fn l5_messages_over_the_limit_are_refused_and_the_path_goes_on(start: &StartFn) {
    let executor = start(&Script::default());
    let args = vec![0; 256 << 20];
    let limit_bytes = match executor
        .call(&MethodCall::new("echo", &args, late()))
        .unwrap_err()
    {
        ExecutorError::TooLarge {
            message_bytes,
            limit_bytes,
            ..
        } => {
            assert!(message_bytes > limit_bytes && message_bytes >= args.len() as u64);
            limit_bytes
        }
        other => panic!("{other:?}"),
    };
    let one_more = vec![0; usize::try_from(limit_bytes).unwrap() + 1];
    let error = executor
        .call(&MethodCall::new("echo", &one_more, late()))
        .unwrap_err();
    assert!(matches!(error, ExecutorError::TooLarge { .. }), "{error:?}");
    // A reply is not known before it is there, so it comes whatever its size, in pieces.
    let n_bytes = 40 << 20;
    let replies = executor
        .call(
            &MethodCall::new("payload", n_bytes.to_string().as_bytes(), late()).execute(Ranks::One(Rank(0))),
        )
        .unwrap();
    assert_eq!(replies[0].bytes.len(), n_bytes);
    executor.call(&MethodCall::new("echo", b"x", late())).unwrap();
    close(&*executor);
}

/// See the name.
pub fn unknown_methods_and_ranks_are_refused(start: &StartFn) {
    let executor = start(&Script::default());
    match executor
        .call(&MethodCall::new("no such", b"", late()))
        .unwrap_err()
    {
        ExecutorError::UnknownMethod { method, known } => {
            assert_eq!(method, "no such");
            for name in ["echo", "progress", "payload"] {
                assert!(
                    known.iter().any(|known| known == name),
                    "{known:?} without {name}"
                );
            }
        }
        other => panic!("{other:?}"),
    }
    for rank in [executor.world().world_size, 63, 64, u16::MAX] {
        let error = executor
            .call(&MethodCall::new("echo", b"", late()).execute(Ranks::One(Rank(rank))))
            .unwrap_err();
        assert!(matches!(error, ExecutorError::Refused(_)), "{error:?}");
        let error = executor
            .dispatch(wave(1, &[rank], &[(1, request(1, 1))]), late())
            .unwrap_err();
        assert!(matches!(error, ExecutorError::Refused(_)), "{error:?}");
    }
    let error = executor
        .dispatch(wave(1, &[], &[(1, request(1, 1))]), late())
        .unwrap_err();
    assert!(matches!(error, ExecutorError::Refused(_)), "{error:?}");
    close(&*executor);
}

/// See the name.
pub fn built_in_methods_answer(start: &StartFn) {
    let executor = start(&Script::default());
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 1))]), late())
        .unwrap();
    events_until_done(&*executor, &[1]);
    for reply in executor.call(&MethodCall::new("status", b"", late())).unwrap() {
        let status = WorkerStatus::from_bytes(&reply.bytes).unwrap();
        assert_eq!((status.rank, status.n_calls), (reply.rank, 0));
        assert_eq!(status.n_waves, u64::from(reply.rank == Rank(0)));
        assert!(status.memory.rss_bytes > 0 && status.n_threads.is_some_and(|n| n >= 1));
        if let Some(pid) = executor.world().pids.get(usize::from(reply.rank.0)) {
            assert_eq!(status.pid, *pid);
        }
    }
    close(&*executor);
}

/// See the name.
pub fn k1_cancelled_requests_end_soon_and_the_next_starts(start: &StartFn) {
    let executor = start(&Script::with_steps_of(20));
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 50)), (2, request(2, 2))]), late())
        .unwrap();
    let mut n_done_at_end = 0;
    let mut is_cancelled = false;
    let mut outcomes: BTreeMap<RequestId, Outcome> = BTreeMap::new();
    while outcomes.len() < 2 {
        for event in executor.wait_events(late()) {
            match event {
                ExecutorEvent::Step {
                    request_id: RequestId(1),
                    n_done,
                    ..
                } => {
                    n_done_at_end = n_done;
                    if n_done == 5 && !is_cancelled {
                        is_cancelled = true;
                        // Unknown ids are ignored.
                        executor.cancel(&[RequestId(1), RequestId(999)], late()).unwrap();
                    }
                }
                ExecutorEvent::RequestDone { request_id, outcome } => {
                    assert!(
                        outcomes
                            .insert(request_id, outcome.map(Output::into_generated))
                            .is_none()
                    );
                }
                _ => {}
            }
        }
    }
    let failure = outcomes[&RequestId(1)].as_ref().unwrap_err();
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::Cancelled, Some(Rank(0)))
    );
    // A loaded machine may be late in sending the cancel, not by 30 steps of 20 ms.
    assert!(n_done_at_end < 35, "{n_done_at_end} steps");
    assert!(outcomes[&RequestId(2)].is_ok());
    close(&*executor);
}

/// Two lanes have two orders.
pub fn a_cancel_may_overtake_its_wave(start: &StartFn) {
    let executor = start(&Script::with_steps_of(5));
    for round in 1..20 {
        let first = (2 * round, request(round, 20));
        executor
            .dispatch(
                wave(round, &[0], &[first, (2 * round + 1, request(round, 1))]),
                late(),
            )
            .unwrap();
        executor.cancel(&[RequestId(2 * round)], late()).unwrap();
        let outcomes = outcomes(events_until_done(&*executor, &[round]));
        assert_eq!(
            outcomes[&RequestId(2 * round)].as_ref().unwrap_err().code,
            FailureCode::Cancelled
        );
        assert!(outcomes[&RequestId(2 * round + 1)].is_ok());
    }
    close(&*executor);
}

/// See the name.
pub fn requests_end_at_their_deadline(start: &StartFn) {
    let executor = start(&Script::with_steps_of(10));
    let mut wave = wave(1, &[0], &[(1, request(1, 1000)), (2, request(2, 1))]);
    wave.joining[0].deadline_ns = denoised_os::Deadline::after_ms(200).ns();
    executor.dispatch(wave, late()).unwrap();
    let outcomes = outcomes(events_until_done(&*executor, &[1]));
    assert_eq!(
        outcomes[&RequestId(1)].as_ref().unwrap_err().code,
        FailureCode::DeadlineExceeded
    );
    assert!(outcomes[&RequestId(2)].is_ok());
    close(&*executor);
}

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

/// See the name.
pub fn forgotten_requests_are_failed(start: &StartFn) {
    let executor = start(&Script::default().fault(None, At::Decode, What::Forget));
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 1)), (2, request(2, 1))]), late())
        .unwrap();
    let outcomes = outcomes(events_until_done(&*executor, &[1]));
    assert_eq!(outcomes.len(), 2);
    assert!(
        outcomes
            .values()
            .all(|o| o.as_ref().is_err_and(|f| f.code == FailureCode::Internal))
    );
    close(&*executor);
}

/// See the name.
pub fn c7_concurrent_requests_are_answered_like_serial_ones(start: &StartFn) {
    let executor = start(&Script::with_steps_of(1));
    let n_ranks = executor.world().world_size;
    for n_waves in [2u64, 8] {
        let base = n_waves * 1000;
        for idx in 0..n_waves {
            let rank = (idx % u64::from(n_ranks)) as u16;
            executor
                .dispatch(
                    wave(base + idx, &[rank], &[(base + idx, request(idx, 3))]),
                    late(),
                )
                .unwrap();
        }
        let waves: Vec<u64> = (0..n_waves).map(|idx| base + idx).collect();
        let outcomes = outcomes(events_until_done(&*executor, &waves));
        assert_eq!(outcomes.len() as u64, n_waves);
        for (request_id, outcome) in outcomes {
            assert_eq!(outcome.unwrap().image, picture(request_id.0 - base, 8));
        }
    }
    close(&*executor);
}

/// See the name.
pub fn calls_are_answered_beside_a_thread_that_waits_for_events(start: &StartFn) {
    let executor = start(&Script::with_steps_of(1));
    let executor = &*executor;
    std::thread::scope(|scope| {
        let engine = scope.spawn(move || {
            executor
                .dispatch(wave(1, &[0], &[(1, request(1, 100))]), late())
                .unwrap();
            outcomes(events_until_done(executor, &[1]))
        });
        for thread_idx in 0..3u64 {
            scope.spawn(move || {
                for call_idx in 0..50u64 {
                    let mine = (thread_idx * 1000 + call_idx).to_le_bytes();
                    let replies = executor.call(&MethodCall::new("echo", &mine, late())).unwrap();
                    assert!(replies.iter().all(|reply| reply.bytes == mine));
                }
            });
        }
        assert!(engine.join().unwrap()[&RequestId(1)].is_ok());
    });
    close(executor);
}

/// See the name.
pub fn q9_unread_events_hold_the_worker_back_and_none_is_lost(start: &StartFn) {
    const N_STEPS: u32 = 1000;
    let executor = start(&Script {
        n_trace_values: 2000,
        ..Script::default()
    });
    let members: Vec<(u64, _)> = (0..8)
        .map(|id| {
            let mut traced = request(id, N_STEPS);
            traced.capture = Capture::Trace;
            (id, traced)
        })
        .collect();
    // 8 x 1000 tensors of 8 kB and as many steps: many times what lies between executor and worker.
    executor.dispatch(wave(1, &[0], &members), late()).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    // Commands get through all the same.
    executor.cancel(&[RequestId(777)], late()).unwrap();
    executor
        .dispatch(wave(2, &[0], &[(100, request(100, 1))]), late())
        .unwrap();
    let events = events_until_done(&*executor, &[1, 2]);
    for id in 0..8 {
        let steps: Vec<u32> = events
            .iter()
            .filter_map(|event| match event {
                ExecutorEvent::Step {
                    request_id: RequestId(of),
                    n_done,
                    ..
                } if *of == id => Some(*n_done),
                _ => None,
            })
            .collect();
        assert_eq!(steps, (1..=N_STEPS).collect::<Vec<_>>());
    }
    let outcomes = outcomes(events);
    assert_eq!(outcomes.len(), 9);
    for id in 0..8 {
        let tensors = &outcomes[&RequestId(id)].as_ref().unwrap().tensors;
        assert_eq!(tensors.len(), N_STEPS as usize);
        let is_right =
            |(step_idx, tensor): (usize, &NamedTensor)| tensor.name == format!("latents.step_{step_idx}");
        assert!(tensors.iter().enumerate().all(is_right));
    }
    close(&*executor);
}

/// See the name.
pub fn wakes_are_not_lost(start: &StartFn) {
    let executor = start(&Script::default());
    let executor = &*executor;
    let waker = executor.waker();
    // A wake that comes first.
    waker.wake();
    assert!(executor.wait_events(late()).is_empty());
    for round in 0..200 {
        std::thread::scope(|scope| {
            let waiter = scope.spawn(move || executor.wait_events(late()));
            if round % 2 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            waker.wake();
            assert!(waiter.join().unwrap().is_empty());
        });
    }
    // A wake reaches the engine also while another thread does the waiting for both.
    std::thread::scope(|scope| {
        let caller = scope.spawn(move || {
            executor
                .call(&MethodCall::new("sleep", b"300", late()).execute(Ranks::One(Rank(0))))
                .unwrap()
        });
        std::thread::sleep(Duration::from_millis(20));
        let begin = Instant::now();
        let waiter = scope.spawn(move || executor.wait_events(late()));
        std::thread::sleep(Duration::from_millis(20));
        waker.wake();
        assert!(waiter.join().unwrap().is_empty());
        assert!(!caller.is_finished() || begin.elapsed() >= Duration::from_millis(280));
        assert_eq!(caller.join().unwrap()[0].bytes, b"300");
    });
    close(executor);
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
