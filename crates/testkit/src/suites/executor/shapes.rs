//! Methods: who runs them, who replies, and on which lane.

use super::{StartFn, close, events_until_done, late, outcomes, ranks};
use crate::script::{Script, request, wave};
use denoised_executor::{Executor, ExecutorError, ExecutorEvent, Lane, MethodCall, Ranks, status};
use denoised_types::{FailureCode, Rank, RequestId};
use denoised_wire::{Doing, Work};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// All, and each rank alone.
fn choices(executor: &dyn Executor) -> Vec<Ranks> {
    let ones = ranks(executor).into_iter().map(Ranks::One);
    std::iter::once(Ranks::All).chain(ones).collect()
}

fn members(executor: &dyn Executor, ranks: Ranks) -> Vec<Rank> {
    match ranks {
        Ranks::All => self::ranks(executor),
        Ranks::One(rank) => vec![rank],
    }
}

/// See the name.
pub fn calls_of_every_shape_are_answered_by_those_who_are_asked(start: &StartFn) {
    let executor = start(&Script::default());
    let executor = &*executor;
    let methods = executor.world().methods;
    let lane = |name: &str| methods.iter().find(|m| m.name == name).map(|m| m.lane);
    assert_eq!(
        (lane("payload"), lane("control_payload")),
        (Some(Lane::Data), Some(Lane::Control))
    );
    let mut n_refused = 0;
    for method in ["payload", "control_payload"] {
        for execute in choices(executor) {
            let shapes = std::iter::once(None).chain(choices(executor).into_iter().map(Some));
            for reply in shapes {
                let mut call = MethodCall::new(method, b"3", late()).execute(execute);
                call.reply = reply;
                let result = executor.call(&call);
                let running = members(executor, execute);
                if let Some(Ranks::One(rank)) = reply
                    && !running.contains(&rank)
                {
                    let Err(ExecutorError::Refused(failure)) = result else {
                        panic!("{result:?}");
                    };
                    assert_eq!(failure.code, FailureCode::InvalidRequest);
                    let names_both = failure.message.contains(&format!("rank {rank} cannot reply"))
                        && failure
                            .message
                            .contains(&format!("only rank {} runs it", running[0]));
                    assert!(names_both, "{failure}");
                    n_refused += 1;
                    continue;
                }
                let replying = match reply {
                    Some(one @ Ranks::One(_)) => members(executor, one),
                    Some(Ranks::All) | None => running,
                };
                let replies = result.unwrap();
                let who: Vec<Rank> = replies.iter().map(|reply| reply.rank).collect();
                assert_eq!(who, replying, "{method} {execute:?} {reply:?}");
                assert!(replies.iter().all(|reply| reply.bytes == [reply.rank.0 as u8; 3]));
            }
        }
    }
    // Each rank alone cannot be answered for by any other, on either lane.
    let n_ranks = ranks(executor).len();
    assert_eq!(n_refused, 2 * n_ranks * (n_ranks - 1));
    close(executor);
}

/// Fault case E1, for a rank whose reply nobody wants.
pub fn failures_of_ranks_that_do_not_reply_fail_the_call(start: &StartFn) {
    let executor = start(&Script::default());
    let last = *ranks(&*executor).last().unwrap();
    let args = format!("{last} no memory for it");
    let call = MethodCall::new("fail_on", args.as_bytes(), late()).reply(Ranks::One(Rank(0)));
    match executor.call(&call).unwrap_err() {
        ExecutorError::Rank { failure, succeeded } => {
            assert_eq!(
                (failure.rank, failure.message.as_str()),
                (Some(last), "no memory for it")
            );
            assert_eq!(succeeded, ranks(&*executor)[..usize::from(last.0)]);
        }
        other => panic!("{other:?}"),
    }
    // Those that went well say nothing beyond that.
    let call = MethodCall::new("fail_on", b"999 fine", late()).reply(Ranks::One(last));
    let replies = executor.call(&call).unwrap();
    assert_eq!((replies.len(), replies[0].rank), (1, last));
    close(&*executor);
}

/// Fault case E3, for methods of the control lane.
pub fn failures_of_control_methods_have_the_same_shape(start: &StartFn) {
    let executor = start(&Script::default());
    let error = executor
        .call(&MethodCall::new("control_fail", b"not now", late()).execute(Ranks::One(Rank(0))))
        .unwrap_err();
    match error {
        ExecutorError::Rank { failure, succeeded } => {
            assert_eq!(
                (failure.code, failure.rank, failure.message.as_str()),
                (FailureCode::WorkerFailed, Some(Rank(0)), "not now")
            );
            assert!(succeeded.is_empty());
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(executor.failure(), None);
    executor
        .call(&MethodCall::new("control_echo", b"x", late()))
        .unwrap();
    close(&*executor);
}

/// See the name.
pub fn control_methods_are_answered_while_a_step_runs(start: &StartFn) {
    let executor = start(&Script::with_steps_of(2000));
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 1))]), late())
        .unwrap();
    let mut seen = Vec::new();
    while seen.is_empty() {
        seen.extend(executor.wait_events(late()));
    }
    let rank = Ranks::One(Rank(0));
    let echoed = executor
        .call(&MethodCall::new("control_echo", b"during", late()).execute(rank))
        .unwrap();
    assert_eq!(echoed[0].bytes, b"during");
    let progress = status::progress(&*executor, LIMIT).unwrap();
    assert_eq!(progress.len(), ranks(&*executor).len());
    assert!(executor.health(LIMIT).is_healthy());
    // All of it came before the step's end: otherwise the wave would be over in what follows next.
    match &progress[0].1.doing {
        Doing::Wave { members, .. } => assert_eq!(members[0].request_id, RequestId(1)),
        other => panic!("{other:?}"),
    }
    for (_, idle) in &progress[1..] {
        assert_eq!((&idle.doing, idle.n_waiting), (&Doing::Nothing, 0));
    }
    seen.extend(events_until_done(&*executor, &[1]));
    assert_eq!(
        seen.last(),
        Some(&ExecutorEvent::WaveDone {
            wave_id: denoised_types::WaveId(1)
        })
    );
    assert!(outcomes(seen)[&RequestId(1)].is_ok());
    close(&*executor);
}

/// See the name.
pub fn a_profile_holds_what_was_done_between_its_calls(start: &StartFn) {
    let executor = start(&Script::with_steps_of(1));
    status::profile_start(&*executor, LIMIT).unwrap();
    executor
        .dispatch(wave(7, &[0], &[(1, request(1, 4))]), late())
        .unwrap();
    events_until_done(&*executor, &[7]);
    // A rank puts its work aside after it has answered: the second one shows that it has done so with the first.
    for _ in 0..2 {
        executor.call(&MethodCall::new("echo", b"x", late())).unwrap();
    }
    let profiles = status::profile_stop(&*executor, LIMIT).unwrap();
    assert_eq!(profiles.len(), ranks(&*executor).len());
    let count = |rank_idx: usize, is_it: &dyn Fn(&Work) -> bool| {
        let spans = &profiles[rank_idx].1.spans;
        spans.iter().filter(|span| is_it(&span.work)).count()
    };
    assert_eq!(count(0, &|work| matches!(work, Work::Step { .. })), 4);
    for rank_idx in 0..profiles.len() {
        let n_echoes = count(
            rank_idx,
            &|work| matches!(work, Work::Method { name } if name == "echo"),
        );
        assert!((1..=2).contains(&n_echoes), "rank {rank_idx}: {n_echoes}");
        let n_waves = count(rank_idx, &|work| matches!(work, Work::Wave { .. }));
        assert_eq!(n_waves, usize::from(rank_idx == 0));
    }
    close(&*executor);
}

/// Fault case L5, for the control lane.
pub fn control_messages_over_the_limit_are_refused(start: &StartFn) {
    let executor = start(&Script::default());
    let args = vec![0; 1 << 20];
    match executor
        .call(&MethodCall::new("control_echo", &args, late()))
        .unwrap_err()
    {
        ExecutorError::TooLarge {
            message_bytes,
            limit_bytes,
            ..
        } => assert!(message_bytes > limit_bytes && message_bytes >= 1 << 20),
        other => panic!("{other:?}"),
    }
    let args = vec![7; 4000];
    let replies = executor
        .call(&MethodCall::new("control_echo", &args, late()))
        .unwrap();
    assert!(replies.iter().all(|reply| reply.bytes == args));
    close(&*executor);
}
