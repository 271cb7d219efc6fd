//! Worker processes of a test: the test program started once more.
//!
//! A test program that starts workers has one test that is only there to be a worker:
//!
//! ```no_run
//! // #[test]
//! fn scripted_worker_process() {
//!     denoised_testkit::process::be_a_scripted_worker();
//! }
//! ```
//! and starts worlds with [`options`], which runs the program with that test alone.

use crate::script::{Script, scripted_registry};
use denoised_executor::{LinkSpec, MpOptions, StderrSink, WorkerProgram};
use denoised_os::{
    Deadline,
    child::{Child, ExitStatus, Spawn},
};
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Set in worker processes only, by the executor.
const INHERITED_SOCKET: &str = "DENOISED_FD_LINK";
/// Name of the test that is a worker.
const WORKER_TEST: &str = "scripted_worker_process";

/// Whether this process was started as a worker.
pub fn is_worker() -> bool {
    std::env::var_os(INHERITED_SOCKET).is_some()
}

/// In a process that an executor started: serves as a scripted worker and exits. Elsewhere: returns at once.
pub fn be_a_scripted_worker() {
    be_a_worker(scripted_registry);
}

/// As [`be_a_scripted_worker`], with these methods.
pub fn be_a_worker(registry: impl FnOnce() -> denoised_worker::Registry) {
    if is_worker() {
        let code = denoised_worker::run(registry());
        #[expect(
            clippy::exit,
            reason = "the exit code of a worker is its own, not the test harness's"
        )]
        std::process::exit(code as i32);
    }
}

/// This test program as a worker's.
pub fn this_test_program() -> WorkerProgram {
    WorkerProgram {
        path: None,
        args: [WORKER_TEST, "--exact", "--nocapture", "--test-threads=1"]
            .map(Into::into)
            .to_vec(),
        env: Vec::new(),
    }
}

/// Worlds of `n_workers` scripted processes with little shared memory.
pub fn options(n_workers: u16, script: &Script) -> MpOptions {
    MpOptions {
        program: this_test_program(),
        link: small_link(),
        start_limit: Duration::from_secs(60),
        stderr: StderrSink::quiet(),
        ..MpOptions::new(n_workers, script.config())
    }
}

/// A link of about 3 MiB and 2 MiB per rank.
pub fn small_link() -> LinkSpec {
    LinkSpec {
        command_ring_bytes: 1 << 20,
        command_arena_bytes: 2 << 20,
        event_ring_bytes: 64 << 10,
        event_arena_bytes: 2 << 20,
        ..LinkSpec::default()
    }
}

/// Sends a signal to a process by its id, as a person would (`kill -KILL 123`).
///
/// # Panics
/// There is no shell to do it.
pub fn kill(signal: &str, pids: &[u32]) {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    let line = format!("kill -{signal} {}", pids.join(" "));
    let shell = Spawn::new(Path::new("/bin/sh"))
        .arg("-c")
        .arg(line)
        .start()
        .expect("a shell");
    shell
        .wait(Deadline::after_ms(60_000))
        .expect("the shell is ours to wait for");
}

/// Stops processes, and waits until each of their threads has stopped, which is some time after the signal.
///
/// # Panics
/// One does not stop within a minute.
pub fn stop(pids: &[u32]) {
    kill("STOP", pids);
    let is_stopped = |thread: std::io::Result<std::fs::DirEntry>| {
        let stat = thread.and_then(|thread| std::fs::read_to_string(thread.path().join("stat")));
        // A thread that has ended meanwhile does nothing either.
        stat.map_or(true, |stat| matches!(state_in(&stat), Some('T' | 'Z' | 'X')))
    };
    for pid in pids {
        let all_stopped = || {
            let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
            // Nor does a process that somebody has ended and reaped.
            threads.map_or(true, |mut threads| threads.all(is_stopped))
        };
        assert!(
            eventually(Duration::from_secs(60), all_stopped),
            "process {pid} goes on"
        );
    }
}

/// The state in the text of a `stat` file: it follows the program's name in parentheses.
fn state_in(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// Whether a process with this id runs (a zombie does not).
pub fn is_running(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    state_in(&stat).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Waits until `condition` holds; false after `limit`.
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs test `name` of this program once more, in a process of its own with these variables. For tests whose subject is the death of
/// the program that owns an executor.
///
/// # Panics
/// The program cannot be started.
pub fn this_test_again(name: &str, env: &[(&str, &str)]) -> Child {
    let mut spawn = Spawn::this_program()
        .expect("this program")
        .arg(name)
        .arg("--exact")
        .arg("--nocapture");
    for (name, value) in env {
        spawn = spawn.env(name, value);
    }
    spawn.start().expect("this program starts again")
}

/// Waits for a process of [`this_test_again`].
///
/// # Panics
/// It does not end within `limit`.
pub fn wait_for(child: &Child, limit: Duration) -> ExitStatus {
    child
        .wait(Deadline::after(limit))
        .expect("a child of ours")
        .expect("the process ends in time")
}

/// The sockets that a process has open, by their inode.
pub fn sockets_of(pid: u32) -> Vec<String> {
    links_of(pid)
        .into_iter()
        .filter(|link| link.starts_with("socket:"))
        .collect()
}

/// What a process's descriptors are.
pub fn links_of(pid: u32) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
        return Vec::new();
    };
    let link = |path: PathBuf| {
        std::fs::read_link(path)
            .ok()
            .map(|link| link.to_string_lossy().into_owned())
    };
    entries.flatten().filter_map(|entry| link(entry.path())).collect()
}
