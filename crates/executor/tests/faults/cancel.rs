//! Abort and cancel.

use super::*;

#[test]
fn k1_a_cancelled_request_ends_within_two_steps_and_the_next_begins() {
    let _watchdog = watchdog("k1");
    let executor = start(1, &Script::with_steps_of(20));
    // On a busy machine a cancel may be late, but not each time.
    let mut last_steps = Vec::new();
    for round in 0..10u64 {
        let (cancelled, next) = (2 * round, 2 * round + 1);
        executor
            .dispatch(wave(cancelled, &[0], &[(cancelled, request(1, 50))]), late())
            .unwrap();
        executor
            .dispatch(wave(next, &[0], &[(next, request(2, 1))]), late())
            .unwrap();
        let mut events = wait_for_step(&executor, cancelled, 5);
        executor.cancel(&[RequestId(cancelled)], late()).unwrap();
        while outcomes(&events).len() < 2 {
            events.extend(executor.wait_events(late()));
        }
        let outcomes = outcomes(&events);
        let failure = outcomes[&RequestId(cancelled)].as_ref().unwrap_err();
        assert_eq!(
            (failure.code, failure.rank),
            (FailureCode::Cancelled, Some(Rank(0)))
        );
        assert_eq!(outcomes[&RequestId(next)].as_ref().unwrap(), &picture(2, 8));
        let last_step = events.iter().filter_map(|event| match event {
            ExecutorEvent::Step {
                request_id, n_done, ..
            } if request_id.0 == cancelled => Some(*n_done),
            _ => None,
        });
        last_steps.push(last_step.max().unwrap());
        assert!(last_steps[round as usize] < 35, "{last_steps:?}");
        if last_steps[round as usize] <= 7 {
            break;
        }
    }
    println!("cancelled at step 5 of 50, the last step was {last_steps:?}");
    assert!(
        last_steps.last().is_some_and(|last_step| *last_step <= 7),
        "{last_steps:?}"
    );
}
