//! What happens to worlds of processes when processes, machines and people misbehave. Names such as D1 are fault cases of the design.
#![expect(
    clippy::print_stdout,
    reason = "times of the run, for whoever looks (`--nocapture`)"
)]

use denoised_executor::{
    Executor, ExecutorError, ExecutorEvent, Limits, LinkSpec, MethodCall, MpExecutor, MpOptions, Ranks,
    StderrSink,
};
use denoised_os::{child::ExitStatus, process::cpu_time_ns, process::memory_of, signal::Signal};
use denoised_testkit::{
    process::{
        be_a_scripted_worker, eventually, is_running, kill, links_of, options, sockets_of, this_test_again,
        wait_for,
    },
    script::{At, Script, What, picture, request, wave},
    watchdog::Watchdog,
};
use denoised_types::{Failure, FailureCode, Image, Rank, RequestId, WaveId};
use denoised_wire::{StartPhase, WorkerStatus};
use std::{
    collections::BTreeMap,
    io::Read,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// Not a test: the worker processes of the others.
#[test]
fn scripted_worker_process() {
    be_a_scripted_worker();
}

fn watchdog(name: &str) -> Watchdog {
    Watchdog::new(name, Duration::from_secs(120))
}

fn start(n_workers: u16, script: &Script) -> MpExecutor {
    start_with(options(n_workers, script))
}

fn start_with(options: MpOptions) -> MpExecutor {
    MpExecutor::start(options, &mut |_, _| {}).unwrap()
}

fn start_error(options: MpOptions) -> ExecutorError {
    match MpExecutor::start(options, &mut |_, _| {}) {
        Ok(executor) => panic!("started: {executor:?}"),
        Err(error) => error,
    }
}

fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn soon() -> Duration {
    Duration::from_secs(30)
}

fn events_until_failed(executor: &dyn Executor) -> Vec<ExecutorEvent> {
    let mut events = Vec::new();
    while !matches!(events.last(), Some(ExecutorEvent::WorldFailed(_))) {
        let more = executor.wait_events(late());
        assert!(!more.is_empty(), "silence after {events:?}");
        events.extend(more);
    }
    events
}

fn image(output: &denoised_executor::Output) -> Image {
    let (width, height) = output.size();
    let rgb = output.rgb().to_vec();
    Image { width, height, rgb }
}

fn outcomes(events: &[ExecutorEvent]) -> BTreeMap<RequestId, Result<Image, Failure>> {
    let mut outcomes = BTreeMap::new();
    for event in events {
        if let ExecutorEvent::RequestDone { request_id, outcome } = event {
            assert!(
                outcomes
                    .insert(*request_id, outcome.as_ref().map(image).map_err(Clone::clone))
                    .is_none(),
                "{request_id} ended twice"
            );
        }
    }
    outcomes
}

/// Waits for the step after which something shall happen.
fn wait_for_step(executor: &dyn Executor, request_id: u64, step: u32) -> Vec<ExecutorEvent> {
    let mut events = Vec::new();
    loop {
        events.extend(executor.wait_events(late()));
        let reached = |event: &ExecutorEvent| {
            matches!(event, ExecutorEvent::Step { request_id: of, n_done, .. }
                if *of == RequestId(request_id) && *n_done >= step)
        };
        if events.iter().any(reached) {
            return events;
        }
    }
}

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
    for round in 0..25 {
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
    println!("slowest of 25 deaths was reported {slowest:?} after the kill returned");
    for _ in 0..10 {
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

/// Variable that tells a copy of this program what to be.
const ROLE: &str = "DENOISED_TEST_ROLE";
/// File into which such a copy writes its workers' ids.
const REPORT: &str = "DENOISED_TEST_REPORT";

/// Not a test by itself: a supervisor for the tests that kill one.
#[test]
fn supervisor_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let report = std::env::var(REPORT).unwrap();
    let script = match role.as_str() {
        "busy" => Script::default().fault(None, At::Wave, What::Busy(60_000)),
        "marker" => Script {
            cleanup_marker: Some(format!("{report}.marker").into()),
            ..Script::default()
        },
        _ => Script::default(),
    };
    let executor = start(2, &script);
    if role == "busy" {
        for rank in 0..2 {
            executor
                .dispatch(wave(rank, &[rank as u16], &[(rank, request(1, 1))]), late())
                .unwrap();
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    let pids: Vec<String> = executor.world().pids.iter().map(u32::to_string).collect();
    std::fs::write(format!("{report}.new"), pids.join(" ")).unwrap();
    std::fs::rename(format!("{report}.new"), &report).unwrap();
    if role == "marker" {
        // Ctrl-C: what a program does that catches it.
        let signals = denoised_os::signal::EndSignals::catch(&[Signal::INT]).unwrap();
        while signals.take().is_empty() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let exits = executor.shutdown(soon());
        let clean = exits
            .ranks
            .iter()
            .all(|exit| exit.means == "graceful" && exit.status == "exited with code 0");
        #[expect(clippy::exit, reason = "the exit code is what the test looks at")]
        std::process::exit(if clean { 130 } else { 1 });
    }
    std::thread::sleep(Duration::from_secs(60));
}

/// Starts a supervisor of two workers; returns it and their ids.
fn supervisor(role: &str, folder: &Path) -> (denoised_os::child::Child, Vec<u32>) {
    let report = folder.join("pids");
    let child = this_test_again(
        "supervisor_process",
        &[(ROLE, role), (REPORT, report.to_str().unwrap())],
    );
    assert!(
        eventually(soon(), || report.exists()),
        "the supervisor has started"
    );
    let text = std::fs::read_to_string(report).unwrap();
    let pids = text
        .split(' ')
        .map(|pid| pid.parse().unwrap())
        .collect::<Vec<u32>>();
    assert!(pids.iter().all(|pid| is_running(*pid)));
    (child, pids)
}

#[test]
fn o1_workers_do_not_outlive_a_killed_supervisor() {
    let _watchdog = watchdog("o1");
    for role in ["idle", "busy"] {
        let folder = tempfile::tempdir().unwrap();
        let (supervisor, pids) = supervisor(role, folder.path());
        supervisor.signal(Signal::KILL).unwrap();
        assert_eq!(wait_for(&supervisor, soon()), ExitStatus::Signal(Signal::KILL));
        let begin = Instant::now();
        assert!(
            eventually(soon(), || pids.iter().all(|pid| !is_running(*pid))),
            "{role}"
        );
        println!(
            "{role} workers were gone {:?} after their supervisor",
            begin.elapsed()
        );
    }
}

#[test]
fn o1_also_holds_for_stopped_workers() {
    let _watchdog = watchdog("o1 stopped");
    for role in ["idle", "busy"] {
        let folder = tempfile::tempdir().unwrap();
        let (supervisor, pids) = supervisor(role, folder.path());
        kill("STOP", &pids);
        supervisor.signal(Signal::KILL).unwrap();
        assert_eq!(wait_for(&supervisor, soon()), ExitStatus::Signal(Signal::KILL));
        assert!(
            eventually(soon(), || pids.iter().all(|pid| !is_running(*pid))),
            "{role}"
        );
    }
}

#[test]
fn o3_a_world_outlives_the_thread_that_started_it() {
    let _watchdog = watchdog("o3");
    let executor = std::thread::spawn(|| start(2, &Script::default()))
        .join()
        .unwrap();
    std::thread::sleep(Duration::from_secs(2));
    assert!(executor.health(soon()).is_healthy());
    assert_eq!(
        executor
            .call(&MethodCall::new("echo", b"still", late()))
            .unwrap()
            .len(),
        2
    );
}

#[test]
fn o5_no_worker_holds_another_ones_descriptors() {
    let _watchdog = watchdog("o5");
    let executor = start(4, &Script::default());
    let sockets: Vec<Vec<String>> = executor.world().pids.iter().map(|pid| sockets_of(*pid)).collect();
    for (rank_idx, own) in sockets.iter().enumerate() {
        assert_eq!(own.len(), 1, "rank {rank_idx} has one socket: {own:?}");
        assert!(
            !sockets[..rank_idx].contains(own),
            "rank {rank_idx} shares {own:?}"
        );
    }
    // Nor another one's standard error, nor any memory but the arena that it owns itself.
    let stderr_of = |pid: &u32| std::fs::read_link(format!("/proc/{pid}/fd/2")).unwrap();
    let pids = executor.world().pids;
    for pid in &pids {
        let links = links_of(*pid);
        let others = pids.iter().filter(|other| *other != pid).map(stderr_of);
        for other in others {
            assert!(
                !links.iter().any(|link| Path::new(link) == other),
                "{links:?} holds {other:?}"
            );
        }
        let memory: Vec<&String> = links.iter().filter(|link| link.contains("memfd")).collect();
        assert!(
            memory.iter().all(|link| link.contains("denoised event arena")) && memory.len() <= 1,
            "{links:?}"
        );
    }
    executor.shutdown(soon());
}

#[test]
fn o7_a_shutdown_spares_children_it_did_not_start() {
    let _watchdog = watchdog("o7");
    let own = denoised_os::child::Spawn::new(Path::new("/bin/sleep"))
        .arg("60")
        .start()
        .unwrap();
    let executor = start(2, &Script::default());
    kill("KILL", &executor.world().pids[..1]);
    executor.shutdown(soon());
    drop(executor);
    assert!(is_running(own.pid()));
    assert_eq!(own.try_wait().unwrap(), None);
}

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
fn s3_a_worker_gets_its_time_to_clean_up() {
    let _watchdog = watchdog("s3");
    let folder = tempfile::tempdir().unwrap();
    let marker = folder.path().join("marker");
    let script = Script {
        cleanup_marker: Some(marker.clone()),
        cleanup_ms: 500,
        ..Script::default()
    };
    let executor = start(1, &script);
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
        kill("STOP", &pids);
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
fn r1_a_failing_rank_undoes_the_start_of_the_others() {
    let _watchdog = watchdog("r1");
    let script = Script::default()
        .fault(Some(1), At::Start, What::Say("no such card".to_owned()))
        .fault(Some(1), At::Start, What::Sleep(200))
        .fault(Some(1), At::Start, What::Exit(3));
    let mut marked = options(3, &script);
    marked.program.args.push(R1_MARK.into());
    let error = start_error(marked);
    let text = error.to_string();
    let ExecutorError::Start {
        world_size: 3,
        cause,
        ranks,
        ..
    } = error
    else {
        panic!("{text}")
    };
    assert_eq!((cause.code, cause.rank), (FailureCode::WorkerLost, Some(Rank(1))));
    assert!(cause.message.contains("exited with code 3"), "{text}");
    assert_eq!(cause.phase.as_deref(), Some("reading the model"));
    assert_eq!(ranks.len(), 3);
    assert!(ranks[0].starts_with("rank 0: ready; stopped"), "{text}");
    assert!(
        ranks[1].contains("exited with code 3") && ranks[1].contains("no such card"),
        "{text}"
    );
    assert_eq!(n_marked_processes(), 0);
}

/// An argument of the workers of `r1` (a name filter to the test harness), by which they are found.
const R1_MARK: &str = "worker_of_r1";

fn n_marked_processes() -> usize {
    let is_marked = |pid: &str| {
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&command).contains(R1_MARK)
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter(|entry| is_marked(&entry.file_name().to_string_lossy()))
        .count()
}

#[test]
fn r3_an_early_death_is_not_hidden_by_a_slow_rank() {
    let _watchdog = watchdog("r3");
    let script = Script::default()
        .fault(Some(0), At::Start, What::Sleep(100_000))
        .fault(Some(3), At::Start, What::Sleep(500))
        .fault(Some(3), At::Start, What::Exit(1));
    let begin = Instant::now();
    let error = start_error(options(4, &script));
    let took = begin.elapsed();
    let ExecutorError::Start { cause, ranks, .. } = error else {
        panic!("{error:?}")
    };
    assert_eq!(cause.rank, Some(Rank(3)));
    assert!(
        ranks[0].starts_with("rank 0: reading the model; stopped"),
        "{ranks:?}"
    );
    println!("the start failed after {took:?}");
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn r5_the_cause_of_a_failed_start_keeps_its_kind_and_text() {
    let _watchdog = watchdog("r5");
    let text = "transformer/model.safetensors is missing".to_owned();
    let what = What::Fail(FailureCode::InvalidModel, text.clone());
    let error = start_error(options(2, &Script::default().fault(Some(1), At::Start, what)));
    let ExecutorError::Start {
        ref cause, ref ranks, ..
    } = error
    else {
        panic!("{error:?}")
    };
    assert_eq!(
        (cause.code, cause.message.clone(), cause.rank),
        (FailureCode::InvalidModel, text, Some(Rank(1)))
    );
    assert!(
        ranks[1].contains("exited with code 3"),
        "as ExitCode::InvalidModel says: {ranks:?}"
    );
    assert_eq!(Failure::from(error).code, FailureCode::InvalidModel);
    // A panic while starting is a failure too.
    let error = start_error(options(
        1,
        &Script::default().fault(None, At::Start, What::Panic("oh".to_owned())),
    ));
    let ExecutorError::Start { cause, .. } = error else {
        panic!("{error:?}")
    };
    assert_eq!(
        (cause.code, cause.message.as_str()),
        (FailureCode::WorkerFailed, "panicked: oh")
    );
}

#[test]
fn a_start_that_takes_too_long_is_undone() {
    let _watchdog = watchdog("too long");
    let script = Script::default().fault(Some(1), At::Start, What::Hang);
    let options = MpOptions {
        start_limit: Duration::from_secs(2),
        ..options(2, &script)
    };
    let error = start_error(options);
    let ExecutorError::Start { cause, ranks, .. } = error else {
        panic!("{error:?}")
    };
    assert_eq!(cause.code, FailureCode::DeadlineExceeded);
    assert!(cause.message.contains("[1]"), "{cause}");
    assert!(ranks[1].contains("stopped"), "{ranks:?}");
}

#[test]
fn a_program_that_cannot_be_started_is_an_error_with_its_path() {
    let _watchdog = watchdog("no program");
    let mut absent = options(2, &Script::default());
    absent.program.path = Some("/absent/denoised-worker".into());
    let text = start_error(absent).to_string();
    assert!(text.contains("/absent/denoised-worker"), "{text}");
    // One that is no worker at all.
    let mut other = options(2, &Script::default());
    other.program.path = Some("/bin/true".into());
    let ExecutorError::Start { cause, .. } = start_error(other) else {
        panic!("another error")
    };
    assert!(cause.message.contains("exited with code 0"), "{cause}");
    assert_eq!(cause.phase.as_deref(), Some("spawning"));
}

#[test]
fn progress_shows_every_ranks_phases() {
    let _watchdog = watchdog("progress");
    let mut seen = Vec::new();
    let executor = MpExecutor::start(options(2, &Script::default()), &mut |rank, phase| {
        seen.push((rank, phase))
    })
    .unwrap();
    for rank in [Rank(0), Rank(1)] {
        let phases: Vec<StartPhase> = seen
            .iter()
            .filter(|(of, _)| *of == rank)
            .map(|(_, phase)| *phase)
            .collect();
        let expected = [
            StartPhase::Spawned,
            StartPhase::Attached,
            StartPhase::OpeningDevice,
            StartPhase::ReadingModel,
            StartPhase::Ready,
        ];
        assert_eq!(phases, expected);
    }
    drop(executor);
}

#[test]
fn weights_of_rank_0_reach_the_others() {
    let _watchdog = watchdog("weights");
    let script = Script {
        shares_weights: true,
        ..Script::default()
    };
    let executor = start(4, &script);
    assert_eq!(executor.world().weight_bytes, 4);
    drop(executor);
    // If rank 0 fails before it publishes, nobody waits for ever.
    let what = What::Fail(FailureCode::OutOfMemory, "no room for weights".to_owned());
    let script = Script {
        shares_weights: true,
        ..Script::default()
    }
    .fault(Some(0), At::Start, what);
    let ExecutorError::Start { cause, .. } = start_error(options(3, &script)) else {
        panic!("another error")
    };
    assert_eq!(
        (cause.code, cause.rank),
        (FailureCode::OutOfMemory, Some(Rank(0)))
    );
}

#[test]
fn m1_memory_that_is_not_there_is_an_error_with_both_numbers() {
    let _watchdog = watchdog("m1");
    let mut options = options(2, &Script::default());
    options.link = LinkSpec {
        event_arena_bytes: 64 << 30,
        ..LinkSpec::default()
    };
    let ExecutorError::Start { cause, ranks, .. } = start_error(options.clone()) else {
        panic!("another error")
    };
    assert_eq!(cause.code, FailureCode::OutOfMemory);
    let needed = options.link.total_bytes(2).to_string();
    assert!(
        cause.message.contains(&needed) && cause.message.contains("available"),
        "{cause}"
    );
    assert!(ranks.is_empty(), "no process was started");
}

#[test]
fn m3_killed_worlds_leave_nothing_behind() {
    let _watchdog = watchdog("m3");
    let names = || {
        std::fs::read_dir("/dev/shm")
            .map(|entries| entries.count())
            .unwrap_or(0)
    };
    let own_fds = || {
        links_of(std::process::id())
            .iter()
            .filter(|link| link.contains("memfd"))
            .count()
    };
    let names_before = names();
    let mut fds_after_first = None;
    for _ in 0..20 {
        let executor = start(2, &Script::default());
        executor
            .call(&MethodCall::new("echo", &[1; 100_000], late()))
            .unwrap();
        kill("KILL", &executor.world().pids);
        drop(executor);
        fds_after_first.get_or_insert_with(own_fds);
    }
    assert!(names() <= names_before, "nothing of ours has a name");
    // Tests beside this one open and close theirs.
    assert!(own_fds() <= fds_after_first.unwrap_or(0) + 64);
}

#[test]
fn the_shared_memory_is_what_the_formula_says() {
    let _watchdog = watchdog("formula");
    let options = options(2, &Script::default());
    let executor = start_with(options.clone());
    // Each rank maps the command ring and arena, its own event ring and arena, and the board.
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", executor.world().pids[0])).unwrap();
    let mapped: u64 = maps
        .lines()
        .filter(|line| line.contains("/memfd:denoised"))
        .map(|line| {
            let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
            u64::from_str_radix(end, 16).unwrap() - u64::from_str_radix(start, 16).unwrap()
        })
        .sum();
    let formula = options.link.total_bytes(1);
    // Five pieces, each rounded up to a page of 4 KiB.
    assert!(
        (formula..formula + 5 * 4096).contains(&mapped),
        "{mapped} mapped, {formula} by the formula"
    );
}

#[test]
fn q7_idle_workers_cost_next_to_nothing() {
    let _watchdog = watchdog("q7");
    let executor = start(8, &Script::default());
    executor.call(&MethodCall::new("echo", b"", late())).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let used = || -> u64 {
        executor
            .world()
            .pids
            .iter()
            .map(|pid| cpu_time_ns(*pid).unwrap())
            .sum()
    };
    let (begin, before) = (Instant::now(), used());
    std::thread::sleep(Duration::from_secs(4));
    let share = (used() - before) as f64 / begin.elapsed().as_nanos() as f64;
    println!("8 idle workers used {:.4} % of a core", share * 100.0);
    assert!(share < 0.01, "{share}");
    let begin = Instant::now();
    executor.call(&MethodCall::new("echo", b"awake", late())).unwrap();
    println!("the first call afterwards took {:?}", begin.elapsed());
}

#[test]
fn t1_a_swallowed_wave_is_a_typed_timeout_and_then_a_fence() {
    let _watchdog = watchdog("t1");
    let mut options = options(2, &Script::default().fault(Some(1), At::Wave, What::Hang));
    options.limits = Limits {
        silence: Duration::from_secs(3),
        ..options.limits
    };
    let executor = start_with(options);
    let mut wave = wave(1, &[1], &[(1, request(1, 3)), (2, request(2, 3))]);
    wave.joining[0].deadline_ns = denoised_os::Deadline::after_ms(200).ns();
    executor.dispatch(wave, late()).unwrap();
    let mut events = Vec::new();
    while outcomes(&events).is_empty() {
        events.extend(executor.wait_events(late()));
    }
    let outcomes_so_far = outcomes(&events);
    let failure = outcomes_so_far[&RequestId(1)].as_ref().unwrap_err();
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::DeadlineExceeded, Some(Rank(1)))
    );
    // The rank's control thread answers; its runner is not heard of. Rank 0 is well until the fence.
    assert!(executor.health(soon()).is_healthy());
    events.extend(events_until_failed(&executor));
    let outcomes = outcomes(&events);
    assert_eq!(outcomes.len(), 2);
    let failure = outcomes[&RequestId(2)].as_ref().unwrap_err();
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::WorkerLost, Some(Rank(1)))
    );
    assert!(failure.message.contains("reported nothing for 3s"), "{failure}");
    assert!(eventually(soon(), || executor
        .world()
        .pids
        .iter()
        .all(|pid| !is_running(*pid))));
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
    kill("STOP", &[pid]);
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
fn a_sender_that_waits_for_a_dead_rank_is_released() {
    let _watchdog = watchdog("released");
    let mut options = options(2, &Script::default());
    options.link = LinkSpec {
        command_ring_bytes: 8 << 10,
        ..options.link
    };
    let executor = start_with(options);
    let executor = &executor;
    let pid = executor.world().pids[1];
    kill("STOP", &[pid]);
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let mut id = 0;
            loop {
                id += 1;
                if let Err(error) = executor.dispatch(wave(id, &[0], &[(id, request(id, 1))]), late()) {
                    return error;
                }
            }
        });
        std::thread::sleep(Duration::from_millis(200));
        let begin = Instant::now();
        kill("KILL", &[pid]);
        let error = sender.join().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(30));
        assert!(
            matches!(&error, ExecutorError::Failed(failure) if failure.rank == Some(Rank(1))),
            "{error:?}"
        );
    });
}

#[test]
fn i3_workers_share_the_cores() {
    let _watchdog = watchdog("i3");
    let n_threads = |options: MpOptions| -> Vec<Option<u32>> {
        let executor = start_with(options);
        let replies = executor.call(&MethodCall::new("status", b"", late())).unwrap();
        replies
            .iter()
            .map(|reply| WorkerStatus::from_bytes(&reply.bytes).unwrap().n_threads)
            .collect()
    };
    let cores = denoised_os::cpu::usable_cores() as u32;
    assert_eq!(
        n_threads(options(8, &Script::default())),
        [Some((cores / 8).max(1)); 8]
    );
    assert_eq!(n_threads(options(1, &Script::default())), [Some(cores)]);
    let mut given = options(2, &Script::default());
    given.worker.n_threads = Some(5);
    assert_eq!(n_threads(given), [Some(5); 2]);
}

#[test]
fn standard_error_is_passed_on_line_by_line() {
    let _watchdog = watchdog("stderr");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let mut options = options(
        2,
        &Script::default().fault(Some(1), At::Wave, What::Say("a warning".to_owned())),
    );
    {
        let seen = Arc::clone(&seen);
        options.stderr = StderrSink(Arc::new(move |rank, line: &str| {
            seen.lock().unwrap().push((rank, line.to_owned()))
        }));
    }
    let executor = start_with(options);
    executor
        .dispatch(wave(1, &[1], &[(1, request(1, 1))]), late())
        .unwrap();
    let expected = (Rank(1), "a warning".to_owned());
    assert!(eventually(soon(), || seen.lock().unwrap().contains(&expected)));
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

#[test]
fn o1_also_holds_while_the_worker_starts() {
    let _watchdog = watchdog("o1 start");
    // The executor's end of the socket is closed by hand: what a worker sees when its supervisor is killed.
    let (ours, theirs) = denoised_os::socket::Channel::pair().unwrap();
    let spawn = denoised_os::child::Spawn::this_program().unwrap();
    let mut worker = spawn
        .arg("scripted_worker_process")
        .arg("--exact")
        .arg("--nocapture")
        .pass_fd("LINK", theirs.into_fd())
        .start()
        .unwrap();
    drop(ours);
    assert_eq!(wait_for(&worker, soon()), ExitStatus::Code(5));
    let mut text = String::new();
    let stderr = worker.take_stderr().unwrap();
    std::fs::File::from(stderr).read_to_string(&mut text).unwrap();
    assert!(text.contains("the peer is gone"), "{text}");
}
