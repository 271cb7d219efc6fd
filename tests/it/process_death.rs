//! Processes that die: workers, the supervisor, both by Ctrl-C. Nobody waits for ever, nothing is left behind.

use crate::support::{
    Running, case, children_of, demo_model, denoised, is_alive, send, send_to_group, wait_until,
};
use denoised_engine::{Engine, EngineOptions, RequestEvent, RequestHandle, RequestPolicy, SubmitOptions};
use denoised_executor::{Executor, MpExecutor, MpOptions};
use denoised_types::{FailureCode, GenerateRequest, Rank, WorkerConfig};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const N_PROMPTS: usize = 16;

/// A `generate` that would run for minutes, with both workers computing, and its workers' process ids.
fn busy(folder: &Path, extra: &[&str]) -> (Running, Vec<u32>) {
    let mut command = denoised(folder);
    command
        .args([
            "generate",
            "--prompts",
            "-",
            "--steps",
            "1000",
            "--seed",
            "1",
            "--workers",
            "2",
            "--threads",
            "1",
            "-v",
        ])
        .args(extra)
        // A group of its own, as a shell gives it.
        .process_group(0);
    let mut running = Running::start(command, "a rocket\n".repeat(N_PROMPTS).as_bytes());
    running.wait_for_stderr("begun on rank 0");
    running.wait_for_stderr("begun on rank 1");
    let workers = children_of(running.pid());
    assert_eq!(workers.len(), 2, "{workers:?}");
    (running, workers)
}

#[test]
fn a_killed_worker_ends_every_picture_with_one_error_that_names_rank_and_signal() {
    for mode in ["request", "step"] {
        a_killed_worker_in_mode(mode);
    }
}

fn a_killed_worker_in_mode(mode: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (running, workers) = busy(folder.path(), &["--json", "--mode", mode]);
    send(Signal::KILL, workers[1]);
    let outcome = running.finish().expect_code(5);
    let lines = outcome.json_lines();
    let indices: BTreeSet<u64> = lines.iter().filter_map(|line| line["index"].as_u64()).collect();
    assert_eq!((lines.len(), indices.len()), (N_PROMPTS, N_PROMPTS), "{lines:?}");
    for line in &lines {
        let message = line["error"]["message"].as_str().expect("a message");
        assert!(
            message.contains("SIGKILL") && message.contains("rank"),
            "{message}"
        );
    }
    assert_eq!(lines[0]["error"]["code"], "worker_lost");
    assert!(outcome.stderr.contains("SIGKILL"), "{}", outcome.stderr);
    assert!(
        workers.iter().all(|&worker| !is_alive(worker)),
        "a worker outlived its supervisor"
    );
    assert_eq!(
        fs::read_dir(folder.path()).expect("a readable folder").count(),
        0,
        "files are left"
    );
}

#[test]
fn a_killed_worker_fails_each_waiting_request_once_within_a_second() {
    let config = WorkerConfig {
        model: demo_model(),
        device: "cpu".to_owned(),
        dtype: "f32".to_owned(),
        n_threads: Some(1),
        warm_up: false,
    };
    let mut options = MpOptions::new(2, config);
    options.program.path = Some(env!("CARGO_BIN_EXE_denoised").into());
    let executor = Arc::new(MpExecutor::start(options, &mut |_, _| {}).expect("the workers start"));
    let pids = executor.world().pids;
    let policy = Box::new(RequestPolicy::new(N_PROMPTS));
    let engine = Engine::start(executor, policy, EngineOptions::default()).expect("the engine starts");
    let request = |seed| GenerateRequest {
        seed,
        n_steps: Some(GenerateRequest::MAX_STEPS),
        ..GenerateRequest::new("a rocket")
    };
    let mut handles: Vec<RequestHandle> = (0..N_PROMPTS as u64)
        .map(|seed| {
            engine
                .submit(request(seed), SubmitOptions::default())
                .expect("there is room")
        })
        .collect();
    // Two are computed, the others wait.
    for handle in &mut handles[..2] {
        assert!(handle.any(|event| matches!(event, RequestEvent::Step { .. })));
    }
    send(Signal::KILL, pids[1]);
    let killed_at = Instant::now();
    for handle in &mut handles {
        let ends: Vec<RequestEvent> = handle.filter(RequestEvent::is_terminal).collect();
        let [RequestEvent::Failed(failure)] = ends.as_slice() else {
            panic!("not one failure: {ends:?}")
        };
        assert_eq!(
            (failure.code, failure.rank),
            (FailureCode::WorkerLost, Some(Rank(1))),
            "{failure}"
        );
        assert!(
            failure.message.contains("killed by signal 9 (SIGKILL)"),
            "{failure}"
        );
    }
    let took = killed_at.elapsed();
    assert!(
        took < Duration::from_secs(1),
        "the last request heard of it after {took:?}"
    );
    let refused = engine
        .submit(request(0), SubmitOptions::default())
        .expect_err("the world is gone");
    assert_eq!(refused.code, FailureCode::WorkerLost);
    engine.close(Duration::from_secs(10));
    assert!(pids.iter().all(|&pid| !is_alive(pid)), "a worker is left");
}

#[test]
fn workers_do_not_outlive_a_killed_supervisor() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (running, workers) = busy(folder.path(), &[]);
    send(Signal::KILL, running.pid());
    let gone = wait_until(Duration::from_secs(2), || {
        workers.iter().all(|&worker| !is_alive(worker))
    });
    assert!(gone, "alive 2 s after their supervisor: {workers:?}");
}

#[test]
fn stopped_workers_do_not_outlive_a_killed_supervisor() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (running, workers) = busy(folder.path(), &[]);
    workers.iter().for_each(|&worker| send(Signal::STOP, worker));
    send(Signal::KILL, running.pid());
    let gone = wait_until(Duration::from_secs(2), || {
        workers.iter().all(|&worker| !is_alive(worker))
    });
    assert!(gone, "alive 2 s after their supervisor: {workers:?}");
}

#[test]
fn ctrl_c_ends_stopped_workers_too() {
    // The second signal does not wait for anything.
    for (mode, signal, n_signals) in [
        ("request", Signal::INT, 1),
        ("step", Signal::INT, 1),
        ("request", Signal::TERM, 1),
        ("request", Signal::INT, 2),
    ] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (running, workers) = busy(folder.path(), &["--json", "--mode", mode]);
        workers.iter().for_each(|&worker| send(Signal::STOP, worker));
        let begin = Instant::now();
        send(signal, running.pid());
        if n_signals == 2 {
            // Two that come at once are one.
            std::thread::sleep(Duration::from_millis(500));
            send(signal, running.pid());
        }
        let outcome = running.finish().expect_code(130);
        // About 6 s after one signal, and at once after two.
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(30), "{took:?}");
        assert!(
            workers.iter().all(|&worker| !is_alive(worker)),
            "{signal:?}: a worker outlived its supervisor"
        );
        let lines = outcome.json_lines();
        assert!(n_signals == 2 || lines.len() == N_PROMPTS, "{lines:?}");
        assert!(
            lines.iter().all(|line| line["error"]["code"] == "cancelled"),
            "{lines:?}"
        );
    }
}

#[test]
fn ctrl_c_ends_other_commands_with_stopped_workers() {
    let emoji_dit = case("emoji-dit");
    let commands: [&[&OsStr]; 3] = [
        &[
            "verify".as_ref(),
            emoji_dit.as_os_str(),
            "--workers".as_ref(),
            "2".as_ref(),
        ],
        &[
            "verify".as_ref(),
            emoji_dit.as_os_str(),
            "--mode".as_ref(),
            "step".as_ref(),
            "--share".as_ref(),
            "64".as_ref(),
        ],
        &[
            "bench".as_ref(),
            "executor".as_ref(),
            "--idle-seconds".as_ref(),
            "60".as_ref(),
        ],
    ];
    for args in commands {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut command = denoised(folder.path());
        command.args(args);
        let running = Running::start(command, b"");
        let pid = running.pid();
        // One that is stopped between fork and exec is no worker yet: it still has the arguments, and the pipes, of its parent.
        let arguments = |pid: u32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let has_begun = |child: &u32| is_alive(*child) && arguments(*child) != arguments(pid);
        let begun = || -> Vec<u32> { children_of(pid).into_iter().filter(has_begun).collect() };
        assert!(
            wait_until(Duration::from_secs(60), || !begun().is_empty()),
            "no worker was started"
        );
        let workers = begun();
        for worker in &workers {
            send(Signal::STOP, *worker);
        }
        send(Signal::INT, pid);
        running.finish().expect_code(130);
        // One that was stopped between fork and exec is ended by the kernel, after its parent.
        let gone = wait_until(Duration::from_secs(2), || {
            workers.iter().all(|&worker| !is_alive(worker))
        });
        assert!(gone, "{args:?}: {workers:?}");
    }
}

#[test]
fn workers_do_not_outlive_a_supervisor_killed_while_it_starts() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = denoised(folder.path());
    command.args(["generate", "a rocket", "--workers", "3", "--steps", "1000"]);
    let running = Running::start(command, b"");
    let pid = running.pid();
    assert!(
        wait_until(Duration::from_secs(60), || !children_of(pid).is_empty()),
        "no worker was started"
    );
    let workers = children_of(pid);
    send(Signal::KILL, pid);
    let gone = wait_until(Duration::from_secs(2), || {
        workers.iter().all(|&worker| !is_alive(worker))
    });
    assert!(gone, "alive 2 s after their supervisor: {workers:?}");
}

#[test]
fn ctrl_c_ends_supervisor_and_workers_with_code_130() {
    // Ctrl-C in a terminal reaches the whole group; `kill` reaches the supervisor alone.
    for (mode, signal, to_group) in [
        ("request", Signal::INT, true),
        ("step", Signal::INT, true),
        ("request", Signal::INT, false),
        ("step", Signal::TERM, false),
    ] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (running, workers) = busy(folder.path(), &["--json", "--mode", mode]);
        if to_group {
            send_to_group(signal, running.pid());
        } else {
            send(signal, running.pid());
        }
        let outcome = running.finish().expect_code(130);
        let lines = outcome.json_lines();
        assert_eq!(lines.len(), N_PROMPTS);
        assert!(
            lines.iter().all(|line| line["error"]["code"] == "cancelled"),
            "{lines:?}"
        );
        assert!(
            workers.iter().all(|&worker| !is_alive(worker)),
            "{signal:?}: a worker outlived its supervisor"
        );
        assert_eq!(
            fs::read_dir(folder.path()).expect("a readable folder").count(),
            0,
            "files are left"
        );
    }
}

#[test]
fn ctrl_c_while_the_workers_start_ends_everything_too() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = denoised(folder.path());
    command
        .args(["generate", "a rocket", "--workers", "3", "--steps", "1000"])
        .process_group(0);
    let running = Running::start(command, b"");
    let pid = running.pid();
    assert!(
        wait_until(Duration::from_secs(60), || !children_of(pid).is_empty()),
        "no worker was started"
    );
    let workers = children_of(pid);
    // One of them will not hear of it.
    send(Signal::STOP, workers[0]);
    send_to_group(Signal::INT, pid);
    running.finish().expect_code(130);
    assert!(
        workers.iter().all(|&worker| !is_alive(worker)),
        "a worker outlived its supervisor: {workers:?}"
    );
}

#[test]
fn no_process_touches_dev_shm() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (running, workers) = busy(folder.path(), &[]);
    for pid in workers.iter().chain([&running.pid()]) {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
        assert!(
            !maps.contains("/dev/shm"),
            "process {pid} maps a file in /dev/shm:\n{maps}"
        );
        for fd in fs::read_dir(format!("/proc/{pid}/fd"))
            .expect("it runs")
            .flatten()
        {
            let target = fs::read_link(fd.path()).unwrap_or_default();
            assert!(
                !target.starts_with("/dev/shm"),
                "process {pid} holds {}",
                target.display()
            );
        }
    }
}
