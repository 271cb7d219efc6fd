//! A supervisor that is killed at any moment of its life, between fork and exec of a worker as well, leaves no process.

use denoised_executor::{Executor, ExecutorEvent, MpExecutor};
use denoised_os::{child::ExitStatus, signal::Signal};
use denoised_testkit::{
    process::{be_a_scripted_worker, eventually, options, this_test_again, wait_for},
    script::{At, Script, What, request, wave},
    watchdog::Watchdog,
};
use std::time::{Duration, Instant};

/// What the supervisor does. Its workers inherit the variable, which is how they are found.
const ROLE: &str = "DENOISED_TEST_LIFE";

/// Not a test: the worker processes of the others.
#[test]
fn scripted_worker_process() {
    be_a_scripted_worker();
}

fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Not a test by itself: a supervisor that lives until it is killed.
#[test]
fn supervisor_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let script = match role.split(' ').next() {
        Some("starts") => Script::default().fault(None, At::Start, What::Hang),
        Some("computes") => Script::default().fault(None, At::Step(1), What::Busy(60_000)),
        _ => Script {
            shares_weights: true,
            ..Script::default()
        },
    };
    loop {
        let executor = MpExecutor::start(options(3, &script), &mut |_, _| {}).unwrap();
        executor
            .dispatch(wave(1, &[0, 1, 2], &[(1, request(1, 2))]), late())
            .unwrap();
        let mut is_over = false;
        while !is_over {
            let events = executor.wait_events(late());
            is_over = events
                .iter()
                .any(|event| matches!(event, ExecutorEvent::WaveDone { .. }));
        }
        executor.shutdown(Duration::from_secs(10));
    }
}

/// How many processes have this variable in their environment. A zombie has none.
fn n_with(variable: &str) -> usize {
    let has_it = |pid: &str| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment
            .split(|byte| *byte == 0)
            .any(|entry| entry == variable.as_bytes())
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter(|entry| has_it(&entry.file_name().to_string_lossy()))
        .count()
}

#[test]
fn a_supervisor_killed_at_any_moment_leaves_no_process() {
    let _watchdog = Watchdog::new("any moment", Duration::from_secs(300));
    let mut n_seen = 0;
    for role in ["starts", "computes", "comes and goes"] {
        for age_ms in (0..60).step_by(5).chain([80, 120, 200, 500]) {
            // The number tells this run's processes from those of others.
            let role = format!("{role} {age_ms} {}", std::process::id());
            let supervisor = this_test_again("supervisor_process", &[(ROLE, &role)]);
            std::thread::sleep(Duration::from_millis(age_ms));
            let variable = format!("{ROLE}={role}");
            n_seen += n_with(&variable);
            supervisor.signal(Signal::KILL).unwrap();
            let status = wait_for(&supervisor, Duration::from_secs(20));
            assert_eq!(status, ExitStatus::Signal(Signal::KILL), "{role}");
            let is_alone = || n_with(&variable) == 0;
            assert!(
                eventually(Duration::from_secs(20), is_alone),
                "after {age_ms} ms: {role}"
            );
        }
    }
    // Supervisors alone would be 48.
    assert!(n_seen > 48, "{n_seen} processes");
}
