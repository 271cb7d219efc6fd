//! Start-up and readiness, and what a started world looks like.

use super::*;
use denoised_testkit::script::{BASE_BYTES, device_bytes};

#[test]
fn r1_a_failing_rank_undoes_the_start_of_the_others() {
    let _watchdog = watchdog("r1");
    let folder = tempfile::tempdir().unwrap();
    let script = Script {
        device_account: Some(folder.path().to_owned()),
        ..Script::default()
            .fault(Some(1), At::Start, What::Say("no such card".to_owned()))
            .fault(Some(1), At::Start, What::Sleep(200))
            .fault(Some(1), At::Start, What::Exit(3))
    };
    let mut marked = options(3, &script);
    marked.program.args.push(R1_MARK.into());
    let mut most_bytes = 0;
    let started = MpExecutor::start(marked, &mut |_, _| {
        most_bytes = most_bytes.max(device_bytes(folder.path()));
    });
    let error = started.unwrap_err();
    let text = error.to_string();
    assert!(most_bytes >= BASE_BYTES, "the others held some of the device");
    assert_eq!(device_bytes(folder.path()), 0, "{text}");
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
        .fault(Some(0), At::Start, What::Sleep(20_000))
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

/// An embedder's `main` that does not ask whether it is a worker: every worker would start workers.
#[test]
fn a_process_that_was_started_as_a_worker_starts_no_workers() {
    let _watchdog = watchdog("itself");
    let mut itself = options(2, &Script::default());
    itself.program.args = std::env::args_os().skip(1).collect();
    let mut n_spawned = 0;
    let ExecutorError::Start { cause, ranks, .. } =
        MpExecutor::start(itself, &mut |_, _| n_spawned += 1).unwrap_err()
    else {
        panic!("another error")
    };
    assert_eq!(
        (cause.code, ranks.len(), n_spawned),
        (FailureCode::InvalidRequest, 0, 0)
    );
    assert!(cause.message.contains("without end"), "{cause}");
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
