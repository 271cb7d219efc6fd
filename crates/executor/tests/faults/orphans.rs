//! Orphans and parent death.

use super::*;

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
pub(crate) fn supervisor(role: &str, folder: &Path) -> (denoised_os::child::Child, Vec<u32>) {
    let report = folder.join("pids");
    let child = this_test_again(
        "orphans::supervisor_process",
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
        stop(&pids);
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
    let executor = start(3, &Script::default());
    let pids = executor.world().pids;
    // One needs every means, one is dead already (from then on the world is ended), and one ends when it is told to.
    stop(&pids[1..2]);
    kill("KILL", &pids[..1]);
    executor.shutdown(Duration::from_secs(1));
    assert!(pids.iter().all(|pid| !is_running(*pid)));
    drop(executor);
    assert!(is_running(own.pid()));
    assert_eq!(own.try_wait().unwrap(), None);
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
