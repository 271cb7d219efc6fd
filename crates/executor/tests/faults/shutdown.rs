//! Shutdown and signals.

use super::{orphans::supervisor, *};

#[test]
fn s1_an_interrupt_for_the_whole_group_ends_in_order() {
    let _watchdog = watchdog("s1");
    let folder = tempfile::tempdir().unwrap();
    let (supervisor, pids) = supervisor("marker", folder.path());
    // As a terminal does it: everybody gets it, the supervisor too.
    let group: Vec<u32> = pids.iter().copied().chain([supervisor.pid()]).collect();
    kill("INT", &group);
    assert_eq!(wait_for(&supervisor, soon()), ExitStatus::Code(130));
    let mut lines: Vec<String> = std::fs::read_to_string(folder.path().join("pids.marker"))
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect();
    lines.sort();
    assert_eq!(lines, ["rank 0", "rank 1"], "each rank cleaned up once");
    assert!(pids.iter().all(|pid| !is_running(*pid)));
}

#[test]
fn s3_a_worker_gets_its_time_to_clean_up_and_no_signal_meanwhile() {
    let _watchdog = watchdog("s3");
    let folder = tempfile::tempdir().unwrap();
    let marker = folder.path().join("marker");
    let script = Script {
        cleanup_marker: Some(marker.clone()),
        cleanup_ms: 500,
        ..Script::default()
    };
    let mut options = options(1, &script);
    // What is signalled is a shell that notes it, and that ends as the worker does which it runs.
    let mut args = vec![
        "-c".into(),
        "trap 'echo TERM >> \"$1\"' TERM; shift; \"$@\"; exit $?".into(),
        "shell".into(),
        marker.clone().into_os_string(),
        std::env::current_exe().unwrap().into_os_string(),
    ];
    args.append(&mut options.program.args);
    options.program.path = Some("/bin/sh".into());
    options.program.args = args;
    let executor = start_with(options);
    let report = executor.shutdown(soon());
    assert_eq!(
        (report.ranks[0].means, report.ranks[0].status.as_str()),
        ("graceful", "exited with code 0")
    );
    assert!(report.ranks[0].took >= Duration::from_millis(500));
    assert_eq!(std::fs::read_to_string(marker).unwrap(), "rank 0\n");
}

#[test]
fn s5_shutdown_and_death_at_once_are_one_teardown() {
    let _watchdog = watchdog("s5");
    for round in 0..10 {
        let executor = start(2, &Script::default());
        let executor = &executor;
        let pid = executor.world().pids[1];
        let n_called = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&n_called);
        executor.on_failure(Box::new(move |_| {
            counted.fetch_add(1, Ordering::SeqCst);
        }));
        let reports: Vec<_> = std::thread::scope(|scope| {
            let killer = scope.spawn(move || kill("KILL", &[pid]));
            let callers: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(move || {
                        std::thread::sleep(Duration::from_millis(round / 2));
                        executor.shutdown(soon())
                    })
                })
                .collect();
            killer.join().unwrap();
            callers.into_iter().map(|caller| caller.join().unwrap()).collect()
        });
        assert!(reports.iter().all(|report| *report == reports[0]), "{reports:?}");
        assert_eq!(executor.shutdown(soon()), reports[0]);
        assert!(n_called.load(Ordering::SeqCst) <= 1);
        assert!(executor.world().pids.iter().all(|pid| !is_running(*pid)));
    }
}

#[test]
fn s7_a_shutdown_during_a_long_call_keeps_its_budget() {
    let _watchdog = watchdog("s7");
    let executor = start(2, &Script::default());
    let executor = &executor;
    let budget = Duration::from_secs(2);
    std::thread::scope(|scope| {
        let caller = scope.spawn(move || {
            executor.call(&MethodCall::new("sleep", b"30000", late()).execute(Ranks::One(Rank(0))))
        });
        std::thread::sleep(Duration::from_millis(100));
        let begin = Instant::now();
        let report = executor.shutdown(budget);
        let took = begin.elapsed();
        println!("shutdown took {took:?}: {report:?}");
        assert!(took < Duration::from_secs(10), "{took:?}");
        assert_eq!(
            (report.ranks[0].means, report.ranks[1].means),
            ("KILL", "graceful")
        );
        assert_eq!(report.ranks[0].status, "killed by signal 9 (SIGKILL)");
        assert!(matches!(caller.join().unwrap(), Err(ExecutorError::Closed)));
    });
    assert!(executor.world().pids.iter().all(|pid| !is_running(*pid)));
}

#[test]
fn a_shutdown_ends_stopped_workers_within_its_budget() {
    let _watchdog = watchdog("stopped");
    for budget in [Duration::ZERO, Duration::from_secs(1)] {
        let executor = start(2, &Script::default());
        let pids = executor.world().pids;
        stop(&pids);
        let begin = Instant::now();
        let report = executor.shutdown(budget);
        // KILL has half a second of its own; the rest is for a loaded machine.
        assert!(begin.elapsed() < budget + Duration::from_secs(10), "{report:?}");
        for exit in &report.ranks {
            assert_eq!(
                (exit.means, exit.status.as_str()),
                ("KILL", "killed by signal 9 (SIGKILL)")
            );
        }
        assert!(pids.iter().all(|pid| !is_running(*pid)));
    }
}

#[test]
fn a_dropped_executor_leaves_no_process() {
    let _watchdog = watchdog("dropped");
    let executor = start(2, &Script::with_steps_of(5));
    let pids = executor.world().pids;
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 1000))]), late())
        .unwrap();
    drop(executor);
    assert!(
        pids.iter().all(|pid| memory_of(*pid).is_err()),
        "ended and reaped"
    );
}

#[test]
fn a_callback_may_shut_the_executor_down_and_drop_it() {
    let _watchdog = watchdog("callback");
    let executor = Arc::new(start(2, &Script::default()));
    let pids = executor.world().pids;
    let (sender, receiver) = std::sync::mpsc::channel();
    let owned = Arc::clone(&executor);
    executor.on_failure(Box::new(move |_| {
        let report = owned.shutdown(Duration::from_secs(5));
        drop(owned);
        sender.send(report).unwrap();
    }));
    drop(executor);
    kill("KILL", &pids[..1]);
    let report = receiver.recv_timeout(soon()).unwrap();
    assert_eq!(report.ranks.len(), 2);
    assert!(eventually(soon(), || pids.iter().all(|pid| !is_running(*pid))));
}
