//! Errors swallowed or unclear.

use super::{relay::start_with_relay, *};
use denoised_testkit::{process::small_link, script::scripted_registry};

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
