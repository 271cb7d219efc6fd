//! Processes that die: workers, the supervisor, both by Ctrl-C. Nobody waits for ever, nothing is left behind.

use crate::support::{Running, children_of, denoised, is_alive, signal, signal_group, wait_until};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::Duration;

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
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (running, workers) = busy(folder.path(), &["--json"]);
    signal(workers[1], "KILL");
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
fn workers_do_not_outlive_a_killed_supervisor() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (running, workers) = busy(folder.path(), &[]);
    signal(running.pid(), "KILL");
    let gone = wait_until(Duration::from_secs(2), || {
        workers.iter().all(|&worker| !is_alive(worker))
    });
    assert!(gone, "alive 2 s after their supervisor: {workers:?}");
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
    signal(pid, "KILL");
    let gone = wait_until(Duration::from_secs(2), || {
        workers.iter().all(|&worker| !is_alive(worker))
    });
    assert!(gone, "alive 2 s after their supervisor: {workers:?}");
}

#[test]
fn ctrl_c_ends_supervisor_and_workers_with_code_130() {
    // Ctrl-C in a terminal reaches the whole group; `kill` reaches the supervisor alone.
    for (name, to_group) in [("INT", true), ("INT", false), ("TERM", false)] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (running, workers) = busy(folder.path(), &["--json"]);
        if to_group {
            signal_group(running.pid(), name);
        } else {
            signal(running.pid(), name);
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
            "{name}: a worker outlived its supervisor"
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
    signal_group(pid, "INT");
    running.finish().expect_code(130);
    let gone = wait_until(Duration::from_secs(2), || {
        workers.iter().all(|&worker| !is_alive(worker))
    });
    assert!(gone, "alive 2 s after their supervisor: {workers:?}");
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
