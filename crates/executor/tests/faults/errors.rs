//! Errors swallowed or unclear.

use super::*;

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
