//! Worker death and hangs.

use super::*;

#[test]
fn d1_a_worker_that_dies_idle_is_noticed_and_named() {
    let _watchdog = watchdog("d1");
    let executor = start(2, &Script::default());
    let pid = executor.world().pids[1];
    kill("TERM", &[pid]);
    let begin = Instant::now();
    assert!(eventually(soon(), || executor.failure().is_some()));
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    assert!(!executor.health(Duration::from_secs(1)).is_healthy());
    let begin = Instant::now();
    let error = executor
        .dispatch(wave(1, &[0], &[(1, request(1, 1))]), late())
        .unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(10));
    let ExecutorError::Failed(failure) = error else {
        panic!("{error:?}")
    };
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::WorkerLost, Some(Rank(1)))
    );
    assert!(failure.message.contains("15 (SIGTERM)"), "{failure}");
    assert_eq!(failure.phase.as_deref(), Some("idle"));
    let report = executor.shutdown(soon());
    assert_eq!(report.ranks[1].means, "already dead");
    assert!(eventually(soon(), || executor
        .world()
        .pids
        .iter()
        .all(|pid| !is_running(*pid))));
}

#[test]
fn d3_sixteen_requests_get_sixteen_ends_after_a_kill() {
    let _watchdog = watchdog("d3");
    let executor = start(2, &Script::with_steps_of(20));
    // Two run, the others wait in the workers.
    for id in 0..16 {
        executor
            .dispatch(wave(id, &[(id % 2) as u16], &[(id, request(id, 20))]), late())
            .unwrap();
    }
    let mut events = wait_for_step(&executor, 1, 2);
    kill("KILL", &[executor.world().pids[1]]);
    let killed = Instant::now();
    events.extend(events_until_failed(&executor));
    let took = killed.elapsed();
    let outcomes = outcomes(&events);
    assert_eq!(outcomes.len(), 16);
    for (id, outcome) in &outcomes {
        let failure = outcome.as_ref().unwrap_err();
        assert_eq!(
            (failure.code, failure.rank),
            (FailureCode::WorkerLost, Some(Rank(1))),
            "{id}: {failure}"
        );
        assert!(
            failure.message.contains("killed by signal 9 (SIGKILL)"),
            "{failure}"
        );
        let phase = failure.phase.as_deref().unwrap();
        assert!(phase.starts_with("step ") && phase.ends_with(" of 20"), "{phase}");
    }
    let n_ended = |of: u64| {
        events
            .iter()
            .filter(|e| matches!(e, ExecutorEvent::WaveDone { wave_id: WaveId(id) } if *id == of))
            .count()
    };
    assert!((0..16).all(|id| n_ended(id) == 1));
    println!("16 ends {took:?} after the kill");
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn d5_the_status_is_the_true_one_every_time() {
    let _watchdog = watchdog("d5");
    let mut slowest = Duration::ZERO;
    for round in 0..100 {
        let executor = start(1, &Script::default());
        kill("KILL", &executor.world().pids);
        let begin = Instant::now();
        assert!(eventually(soon(), || executor.failure().is_some()));
        slowest = slowest.max(begin.elapsed());
        let failure = executor.failure().unwrap();
        assert!(
            failure.message.contains("killed by signal 9 (SIGKILL)"),
            "{round}: {failure}"
        );
    }
    println!("slowest of 100 deaths was reported {slowest:?} after the kill returned");
    for _ in 0..25 {
        let executor = start(1, &Script::default());
        let error = executor.call(&MethodCall::new("exit", b"3", late())).unwrap_err();
        let ExecutorError::Failed(failure) = error else {
            panic!("{error:?}")
        };
        assert!(failure.message.contains("exited with code 3"), "{failure}");
        assert_eq!(failure.phase.as_deref(), Some("method `exit`"));
    }
}

#[test]
fn a_death_is_noticed_although_nobody_waits() {
    let _watchdog = watchdog("nobody waits");
    let executor = start(1, &Script::with_steps_of(1000));
    let (sender, receiver) = std::sync::mpsc::channel();
    executor.on_failure(Box::new(move |failure| sender.send(failure.clone()).unwrap()));
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 3))]), late())
        .unwrap();
    kill("KILL", &executor.world().pids);
    let failure = receiver.recv_timeout(soon()).unwrap();
    assert!(failure.message.contains("SIGKILL"), "{failure}");
    // Latched before anybody asked.
    assert_eq!(executor.failure(), Some(failure));
}

#[test]
fn results_that_were_sent_before_a_death_count() {
    let _watchdog = watchdog("results count");
    let script = Script::default().fault(None, At::Step(7), What::Exit(9));
    let executor = start(1, &script);
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 2)), (2, request(2, 8))]), late())
        .unwrap();
    let outcomes = outcomes(&events_until_failed(&executor));
    assert_eq!(outcomes[&RequestId(1)].as_ref().unwrap(), &picture(1, 8));
    let failure = outcomes[&RequestId(2)].as_ref().unwrap_err();
    assert!(failure.message.contains("exited with code 9"), "{failure}");
    assert_eq!(failure.phase.as_deref(), Some("step 8 of 8"));
}
