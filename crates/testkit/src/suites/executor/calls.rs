//! Methods: every caller gets its own answer, or hears why not.

use super::{StartFn, close, events_until_done, late, outcomes, ranks};
use crate::script::{Script, picture, request, wave};
use denoised_executor::{ExecutorError, MethodCall, Ranks};
use denoised_types::{FailureCode, Rank, RequestId};
use denoised_wire::WorkerStatus;
use std::time::{Duration, Instant};

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
