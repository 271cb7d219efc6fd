//! Timeouts and deadlines.

use super::*;
use denoised_testkit::script::step_wave;

/// The ways to let workers do something.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Entry {
    Generation,
    Step,
    MethodOnAll,
    MethodOnOne,
    ControlMethod,
}

/// A worker swallows what comes this way: its caller hears in time, then the world ends.
fn swallow(entry: Entry) {
    let mut options = options(2, &Script::default().fault(Some(1), At::Wave, What::Hang));
    options.limits = Limits {
        silence: Duration::from_secs(3),
        ..options.limits
    };
    let executor = start_with(options);
    let limit = Duration::from_secs(1);
    let begin = Instant::now();
    match entry {
        Entry::Generation | Entry::Step => {
            let requests = [(1, request(1, 3)), (2, request(2, 3))];
            let mut wave = match entry {
                Entry::Step => step_wave(1, &[1], &requests, &[], &[]),
                _ => wave(1, &[1], &requests),
            };
            wave.joining[0].deadline_ns = denoised_os::Deadline::after(limit).ns();
            executor.dispatch(wave, late()).unwrap();
            let mut events = Vec::new();
            while outcomes(&events).is_empty() {
                events.extend(executor.wait_events(late()));
            }
            let ended = outcomes(&events);
            let failure = ended[&RequestId(1)].as_ref().unwrap_err();
            assert_eq!(
                (failure.code, failure.rank),
                (FailureCode::DeadlineExceeded, Some(Rank(1))),
                "{entry:?}"
            );
            events.extend(events_until_failed(&executor));
            // The other one had no limit of its own, and gets the world's.
            let ended = outcomes(&events);
            assert_eq!(ended.len(), 2);
            let failure = ended[&RequestId(2)].as_ref().unwrap_err();
            assert_eq!(
                (failure.code, failure.rank),
                (FailureCode::WorkerLost, Some(Rank(1))),
                "{entry:?}"
            );
        }
        Entry::MethodOnAll | Entry::MethodOnOne | Entry::ControlMethod => {
            let (method, execute) = match entry {
                Entry::MethodOnAll => ("hang", Ranks::All),
                Entry::MethodOnOne => ("hang", Ranks::One(Rank(1))),
                _ => ("control_sleep", Ranks::One(Rank(1))),
            };
            let call = MethodCall::new(method, b"3600000", begin + limit).execute(execute);
            match executor.call(&call).unwrap_err() {
                ExecutorError::Deadline { what, silent } => {
                    assert!(what.contains(method), "{what}");
                    assert!(silent.contains(&Rank(1)), "{entry:?}: {silent:?}");
                }
                other => panic!("{entry:?}: {other:?}"),
            }
            assert!(begin.elapsed() >= limit);
        }
    }
    // Nobody waits and nobody asks: the executor finds out by itself.
    assert!(
        eventually(soon(), || executor.failure().is_some()),
        "{entry:?}: the world goes on with a rank that hangs"
    );
    println!("{entry:?}: fenced after {:?}", begin.elapsed());
    let failure = executor.failure().unwrap();
    assert_eq!(failure.code, FailureCode::WorkerLost, "{entry:?}: {failure}");
    assert!(failure.message.contains("3s"), "{entry:?}: {failure}");
    let refused = executor.call(&MethodCall::new("echo", b"", late())).unwrap_err();
    assert_eq!(refused, ExecutorError::Failed(failure));
    assert!(eventually(soon(), || executor
        .world()
        .pids
        .iter()
        .all(|pid| !is_running(*pid))));
}

#[test]
fn t1_a_swallowed_command_is_a_typed_timeout_at_its_limit_and_then_a_fence() {
    let _watchdog = watchdog("t1");
    std::thread::scope(|scope| {
        for entry in [
            Entry::Generation,
            Entry::Step,
            Entry::MethodOnAll,
            Entry::MethodOnOne,
            Entry::ControlMethod,
        ] {
            scope.spawn(move || swallow(entry));
        }
    });
    // The first command of all: to start.
    let hanging = Script::default().fault(Some(1), At::Start, What::Hang);
    let options = MpOptions {
        start_limit: Duration::from_secs(1),
        ..options(2, &hanging)
    };
    let ExecutorError::Start { cause, ranks, .. } = start_error(options) else {
        panic!("another error")
    };
    assert_eq!(cause.code, FailureCode::DeadlineExceeded);
    assert!(ranks.iter().all(|rank| rank.contains("stopped")), "{ranks:?}");
}

#[test]
fn t3_a_full_ring_shares_the_budget_of_its_call() {
    let _watchdog = watchdog("t3");
    let mut options = options(1, &Script::default());
    options.link = LinkSpec {
        command_ring_bytes: 8 << 10,
        command_arena_bytes: 1 << 20,
        ..options.link
    };
    let executor = start_with(options);
    let pid = executor.world().pids[0];
    // A stopped process reads nothing; it is alive, so nobody is evicted.
    stop(&[pid]);
    let begin = Instant::now();
    let budget = Duration::from_millis(1000);
    let mut n_sent = 0;
    let error = loop {
        match executor.dispatch(
            wave(n_sent, &[0], &[(n_sent, request(n_sent, 1))]),
            begin + budget,
        ) {
            Ok(_) => n_sent += 1,
            Err(error) => break error,
        }
    };
    let took = begin.elapsed();
    match error {
        ExecutorError::Deadline { silent, .. } => assert_eq!(silent, [Rank(0)]),
        other => panic!("{other:?}"),
    }
    println!("gave up after {took:?} of {budget:?}, {n_sent} waves in the ring");
    assert!(took >= budget && took < budget * 10, "{took:?}");
    let health = executor.health(Duration::from_millis(200));
    assert_eq!((health.silent, health.failure), (vec![Rank(0)], None));
    assert_eq!(executor.failure(), None, "stopped is not dead");
    kill("CONT", &[pid]);
    let mut events = Vec::new();
    while outcomes(&events).len() < n_sent as usize {
        events.extend(executor.wait_events(late()));
    }
    assert!(outcomes(&events).values().all(Result::is_ok), "nothing was lost");
}

#[test]
fn t3_waiting_for_room_and_for_the_answer_share_one_budget() {
    let _watchdog = watchdog("t3 both");
    let mut options = options(1, &Script::default());
    options.link = LinkSpec {
        command_ring_bytes: 8 << 10,
        ..options.link
    };
    let executor = start_with(options);
    let executor = &executor;
    let pids = executor.world().pids;
    let budget = Duration::from_millis(1000);
    let mut next_id = 0;
    let mut fill = || loop {
        let id = next_id;
        next_id += 1;
        let wave = wave(id, &[0], &[(id, request(id, 1))]);
        if executor.dispatch(wave, Instant::now()).is_err() {
            return;
        }
    };
    // On a busy machine a try may take longer than it should, but not each of them; with a budget for each wait all would. A try
    // in which the worker came to the call too late, and says so, tells nothing.
    let is_in_time = |took: &Duration| *took < Duration::from_millis(1500);
    let mut takes = Vec::new();
    for _ in 0..20 {
        stop(&pids);
        fill();
        let mut is_refused = false;
        let took = std::thread::scope(|scope| {
            scope.spawn(|| {
                // The ring is full for 0.8 s of the call's one second.
                std::thread::sleep(Duration::from_millis(800));
                kill("CONT", &pids);
            });
            let begin = Instant::now();
            match executor.call(&MethodCall::new("sleep", b"1500", begin + budget)) {
                Err(ExecutorError::Deadline { silent, .. }) => assert_eq!(silent, [Rank(0)]),
                Err(ExecutorError::Rank { failure, .. }) => {
                    assert_eq!(failure.code, FailureCode::DeadlineExceeded);
                    is_refused = true;
                }
                other => panic!("{other:?}"),
            }
            begin.elapsed()
        });
        assert!(took >= budget, "{took:?}");
        // What was in the ring, and the call that is late, are over before the next try.
        executor.call(&MethodCall::new("echo", b"", late())).unwrap();
        if !is_refused {
            takes.push(took);
        }
        if takes.len() == 5 || takes.last().is_some_and(is_in_time) {
            break;
        }
    }
    println!("of 1 s: {takes:?}");
    assert!(takes.last().is_some_and(is_in_time), "{takes:?}");
    assert_eq!(executor.failure(), None);
}

#[test]
fn t5_no_time_is_a_look_at_what_is_there_and_sends_nothing() {
    let _watchdog = watchdog("t5");
    let executor = start(2, &Script::default());
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 1))]), late())
        .unwrap();
    // A wait of no time returns at once, with what has arrived; in a loop it gets everything.
    let mut events = Vec::new();
    while outcomes(&events).is_empty() {
        events.extend(executor.wait_events(Instant::now()));
    }
    let n_sent = executor.stats().n_calls;
    let now = Instant::now();
    for past in [now, now.checked_sub(Duration::from_secs(3600)).unwrap_or(now)] {
        for execute in [Ranks::All, Ranks::One(Rank(1))] {
            let begin = Instant::now();
            let call = MethodCall::new("echo", b"x", past).execute(execute);
            match executor.call(&call).unwrap_err() {
                ExecutorError::Deadline { silent, .. } => {
                    assert!(silent.contains(&Rank(1)), "{silent:?}");
                }
                other => panic!("{other:?}"),
            }
            assert!(begin.elapsed() < Duration::from_secs(10));
        }
    }
    assert_eq!(executor.stats().n_calls, n_sent, "nothing was sent");
    for reply in executor.call(&MethodCall::new("status", b"", late())).unwrap() {
        assert_eq!(WorkerStatus::from_bytes(&reply.bytes).unwrap().n_calls, 0);
    }
}
