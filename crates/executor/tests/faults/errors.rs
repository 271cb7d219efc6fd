//! Errors swallowed or unclear.

use super::{relay::start_with_relay, *};
use denoised_testkit::{
    process::small_link,
    script::{scripted_registry, step_wave},
};

#[test]
fn e1_a_failure_on_one_rank_fails_the_call_and_is_named() {
    let _watchdog = watchdog("e1");
    let text = "adapter `lora` does not fit this model";
    let what = What::Fail(FailureCode::InvalidModel, text.to_owned());
    let executor = start(4, &Script::default().fault(Some(2), At::AddAdapter, what));
    // Whoever is to reply, also if it is a rank that succeeded.
    for reply in [Ranks::All, Ranks::One(Rank(0)), Ranks::One(Rank(2))] {
        let call = MethodCall::new("add_adapter", b"lora", late()).reply(reply);
        match executor.call(&call).unwrap_err() {
            ExecutorError::Rank { failure, succeeded } => {
                assert_eq!(
                    (failure.code, failure.rank, failure.message.as_str()),
                    (FailureCode::InvalidModel, Some(Rank(2)), text)
                );
                assert_eq!(succeeded, [Rank(0), Rank(1), Rank(3)]);
            }
            other => panic!("{other:?}"),
        }
    }
    // What it says is true.
    for reply in executor.call(&MethodCall::new("adapters", b"", late())).unwrap() {
        let has_it = reply.rank != Rank(2);
        assert_eq!(reply.bytes, if has_it { b"lora".to_vec() } else { Vec::new() });
    }
}

#[test]
fn e3_failures_look_alike_in_generations_steps_and_methods_of_either_lane() {
    let _watchdog = watchdog("e3");
    let text = "not with these arguments";
    let what = What::Fail(FailureCode::WorkerFailed, text.to_owned());
    let executor = start(2, &Script::default().fault(Some(1), At::Step(1), what));
    let expected = (FailureCode::WorkerFailed, Some(Rank(1)), text);
    for method in ["fail", "control_fail"] {
        for execute in [Ranks::One(Rank(1)), Ranks::All] {
            let call = MethodCall::new(method, text.as_bytes(), late()).execute(execute);
            match executor.call(&call).unwrap_err() {
                ExecutorError::Rank { failure, succeeded } => {
                    assert_eq!(
                        (failure.code, failure.message.as_str()),
                        (expected.0, text),
                        "{method}"
                    );
                    assert!(failure.rank.is_some() && succeeded.is_empty(), "{method}");
                    if execute == Ranks::One(Rank(1)) {
                        assert_eq!(failure.rank, expected.1);
                    }
                }
                other => panic!("{method}: {other:?}"),
            }
        }
    }
    // On both ranks, the failing one not the first to be asked.
    let waves = [
        wave(1, &[1], &[(1, request(1, 3))]),
        step_wave(2, &[1], &[(2, request(2, 3))], &[], &[]),
        step_wave(3, &[1], &[], &[2], &[]),
        wave(4, &[0, 1], &[(3, request(3, 3))]),
    ];
    let mut events = Vec::new();
    for wave in waves {
        let done = ExecutorEvent::WaveDone {
            wave_id: wave.wave_id,
        };
        executor.dispatch(wave, late()).unwrap();
        while !events.contains(&done) {
            events.extend(executor.wait_events(late()));
        }
    }
    let ended = outcomes(&events);
    assert_eq!(ended.len(), 3);
    for (id, outcome) in ended {
        let failure = outcome.unwrap_err();
        assert_eq!(
            (failure.code, failure.rank, failure.message.as_str()),
            expected,
            "{id}"
        );
        assert_eq!(failure.phase.as_deref(), Some("step 2 of 3"));
    }
    assert_eq!(executor.failure(), None);
}

#[test]
fn e7_a_recoverable_fault_ends_a_request_and_a_fatal_one_the_world() {
    let _watchdog = watchdog("e7");
    let code = FailureCode::OutOfMemory;
    let out_of_memory = What::Fail(code, "out of memory on the device".to_owned());
    let executor = start(2, &Script::default().fault(Some(1), At::Step(1), out_of_memory));
    executor
        .dispatch(wave(1, &[1], &[(1, request(1, 3)), (2, request(2, 1))]), late())
        .unwrap();
    let mut events = Vec::new();
    while outcomes(&events).len() < 2 {
        events.extend(executor.wait_events(late()));
    }
    let ended = outcomes(&events);
    let failure = ended[&RequestId(1)].as_ref().unwrap_err();
    assert_eq!((failure.code, failure.rank), (code, Some(Rank(1))));
    assert!(
        ended[&RequestId(2)].is_ok(),
        "its neighbour in the wave is none the worse"
    );
    assert!(executor.health(soon()).is_healthy());
    assert_eq!(executor.failure(), None);
    drop(executor);

    let poisoned = What::FailRank(FailureCode::WorkerFailed, "the context is poisoned".to_owned());
    let executor = start(2, &Script::default().fault(Some(1), At::Step(1), poisoned));
    executor
        .dispatch(wave(1, &[1], &[(1, request(1, 3)), (2, request(2, 1))]), late())
        .unwrap();
    let ended = outcomes(&events_until_failed(&executor));
    assert_eq!(ended.len(), 2);
    let failure = executor.failure().unwrap();
    assert_eq!(
        (failure.code, failure.rank, failure.message.as_str()),
        (
            FailureCode::WorkerFailed,
            Some(Rank(1)),
            "the context is poisoned"
        )
    );
    assert_eq!(
        ended[&RequestId(1)].as_ref().unwrap_err().message,
        failure.message
    );
    assert!(!executor.health(soon()).is_healthy());
    let refused = executor.call(&MethodCall::new("echo", b"", late())).unwrap_err();
    assert_eq!(refused, ExecutorError::Failed(failure));
}

#[test]
fn e5_what_cannot_be_decoded_is_answered_and_the_next_message_works() {
    let _watchdog = watchdog("e5");
    let (executor, _) = start_with_relay(small_link(), scripted_registry);
    let spells = [
        ("command of no kind", "no command"),
        ("command cut short", "no command"),
        ("command too long", "left over behind a command"),
        ("command without its blob", "did not come with it"),
        ("event of no kind", "no event"),
        ("event cut short", "no event"),
        ("event without its blob", "did not come with its answer"),
    ];
    for (spell, text) in spells {
        match executor.call(&MethodCall::new("echo", spell.as_bytes(), late())) {
            Err(ExecutorError::Rank { failure, succeeded }) => {
                assert_eq!(
                    (failure.code, failure.rank),
                    (FailureCode::Protocol, Some(Rank(0))),
                    "{spell}"
                );
                assert!(failure.message.contains(text), "{spell}: {failure}");
                assert!(succeeded.is_empty());
            }
            other => panic!("{spell}: {other:?}"),
        }
        let next = executor.call(&MethodCall::new("echo", b"a plain word", late()));
        assert_eq!(next.unwrap()[0].bytes, b"a plain word");
    }
    assert_eq!(executor.failure(), None);
}
