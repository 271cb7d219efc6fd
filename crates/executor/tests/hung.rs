//! Slow ranks are waited for, hung ones are not: with nobody waiting for events, while idle, and when a command was swallowed.

use denoised_executor::{
    Executor, ExecutorError, ExecutorEvent, Limits, MethodCall, MpExecutor, Ranks, UniExecutor, UniOptions,
};
use denoised_link::{ControlInput, LinkError, WorkerEnd};
use denoised_os::{Deadline, now_ns};
use denoised_testkit::{
    process::{be_a_scripted_worker, eventually, kill, options},
    script::{At, Script, What, request, step_wave, wave},
    watchdog::Watchdog,
};
use denoised_types::{CallId, Failure, FailureCode, Rank, RequestId};
use denoised_wire::{
    BlobIdx, BootUp, Command, Doing, Event, Header, Lane, MethodInfo, PROTOCOL_VERSION, RankProgress,
    decode_command, encode_event, split_header,
};
use std::{
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Not a test: the worker processes of the others.
#[test]
fn scripted_worker_process() {
    be_a_scripted_worker();
}

fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn watchdog(name: &str) -> Watchdog {
    Watchdog::new(name, Duration::from_secs(120))
}

fn limits(silence_ms: u64) -> Limits {
    Limits {
        silence: Duration::from_millis(silence_ms),
        ..Limits::default()
    }
}

fn mp(n_workers: u16, silence_ms: u64, script: &Script) -> MpExecutor {
    let mut options = options(n_workers, script);
    options.limits = limits(silence_ms);
    MpExecutor::start(options, &mut |_, _| {}).unwrap()
}

/// The first cause, once there is one, without taking part in anything.
fn failure(executor: &dyn Executor) -> Failure {
    assert!(eventually(Duration::from_secs(60), || executor
        .failure()
        .is_some()));
    executor.failure().unwrap()
}

fn call_in_vain(executor: &dyn Executor, method: &str, rank: u16) {
    let soon = Instant::now() + Duration::from_millis(100);
    let error = executor
        .call(&MethodCall::new(method, b"", soon).execute(Ranks::One(Rank(rank))))
        .unwrap_err();
    match error {
        ExecutorError::Deadline { silent, .. } => assert_eq!(silent, [Rank(rank)]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_method_that_hangs_ends_the_world_although_its_caller_has_left() {
    let _watchdog = watchdog("method");
    let executor = mp(2, 1500, &Script::default());
    call_in_vain(&executor, "hang", 1);
    assert_eq!(
        executor.failure(),
        None,
        "a caller that gives up ends its call and nothing else"
    );
    let failure = failure(&executor);
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::WorkerLost, Some(Rank(1)))
    );
    assert!(failure.message.contains("reported nothing for 1.5s"), "{failure}");
    assert_eq!(failure.phase.as_deref(), Some("method `hang`"));
    let events = executor.wait_events(late());
    assert_eq!(events, [ExecutorEvent::WorldFailed(failure)]);
}

#[test]
fn a_step_wave_that_hangs_ends_the_world_and_all_residents() {
    let _watchdog = watchdog("step wave");
    let script = Script::default().fault(Some(0), At::Step(1), What::Hang);
    let executor = mp(2, 1500, &script);
    for (wave_id, rank) in [(1, 0), (2, 1)] {
        let joining = [(wave_id, request(wave_id, 5))];
        executor
            .dispatch(step_wave(wave_id, &[rank], &joining, &[], &[]), late())
            .unwrap();
    }
    let mut events = Vec::new();
    let ended = |events: &[ExecutorEvent]| {
        let is_end = |event: &&ExecutorEvent| matches!(event, ExecutorEvent::WaveDone { .. });
        events.iter().filter(is_end).count()
    };
    while ended(&events) < 2 {
        events.extend(executor.wait_events(late()));
    }
    executor
        .dispatch(step_wave(3, &[0], &[], &[1], &[]), late())
        .unwrap();
    let failure = failure(&executor);
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::WorkerLost, Some(Rank(0)))
    );
    assert_eq!(failure.phase.as_deref(), Some("step 2 of 5"));
    let events = executor.wait_events(late());
    let ends: Vec<RequestId> = events
        .iter()
        .filter_map(|event| match event {
            ExecutorEvent::RequestDone {
                request_id,
                outcome: Err(of),
            } if *of == failure => Some(*request_id),
            _ => None,
        })
        .collect();
    // The one in the wave, and the one that waited for its next wave on the other rank.
    assert_eq!(ends, [RequestId(1), RequestId(2)]);
    assert_eq!(events.last(), Some(&ExecutorEvent::WorldFailed(failure)));
}

#[test]
fn slow_is_not_dead_while_steps_are_reported() {
    let _watchdog = watchdog("slow");
    // Each step is longer than half the limit; all together are longer than the limit; nobody reads what is reported.
    let executor = mp(1, 4000, &Script::with_steps_of(2200));
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 3))]), late())
        .unwrap();
    std::thread::sleep(Duration::from_millis(7000));
    assert_eq!(executor.failure(), None);
    let mut events = Vec::new();
    while !matches!(events.last(), Some(ExecutorEvent::WaveDone { .. })) {
        events.extend(executor.wait_events(late()));
    }
    assert!(
        events
            .iter()
            .any(|e| matches!(e, ExecutorEvent::RequestDone { outcome: Ok(_), .. }))
    );
    executor.shutdown(Duration::from_secs(20));
}

#[test]
fn an_idle_rank_that_is_frozen_is_unhealthy_and_then_lost() {
    let _watchdog = watchdog("frozen");
    let executor = mp(2, 6000, &Script::default());
    kill("STOP", &[executor.world().pids[1]]);
    // A moment passes until the kernel has stopped all its threads.
    let is_silent = || {
        let health = executor.health(Duration::from_millis(300));
        (health.answered, health.silent) == (vec![Rank(0)], vec![Rank(1)])
    };
    assert!(eventually(Duration::from_secs(60), is_silent));
    let failure = failure(&executor);
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::WorkerLost, Some(Rank(1)))
    );
    assert_eq!(failure.phase.as_deref(), Some("idle"));
    assert!(failure.message.contains("control lane for 6s"), "{failure}");
}

/// A worker that takes every command of the data lane and answers none, and says the truth about itself: it does `doing`.
fn swallow(end: WorkerEnd, doing: Doing) {
    let WorkerEnd {
        hello,
        boot,
        mut data,
        mut control,
        events,
    } = end;
    let method = |name: &str, lane| MethodInfo {
        name: name.into(),
        lane,
    };
    let methods = vec![method("echo", Lane::Data), method("progress", Lane::Control)];
    let ready = BootUp::Ready {
        model: None,
        device: None,
        weight_bytes: 0,
        methods,
    };
    boot.send(&ready, None).unwrap();
    let last_call_id = Arc::new(AtomicU64::new(0));
    let begun = Arc::clone(&last_call_id);
    let took = std::thread::spawn(move || {
        loop {
            match data.receive(Deadline::after_ms(1000)) {
                Ok(received) => {
                    let (header, _) = split_header(&received.message).unwrap();
                    begun.store(header.call_id.0, Ordering::SeqCst);
                }
                Err(LinkError::TimedOut) => {}
                Err(_) => return,
            }
        }
    });
    loop {
        let message = match control.receive(Deadline::after_ms(1000)) {
            Ok(ControlInput::Message(message)) => message,
            Err(LinkError::TimedOut) => continue,
            _ => break,
        };
        let (header, body) = split_header(&message).unwrap();
        let (event, blob) = match decode_command(&header, body).unwrap() {
            Command::ControlCall { .. } => {
                let progress = RankProgress {
                    rank: hello.rank,
                    now_ns: now_ns(),
                    doing: doing.clone(),
                    since_ns: 0,
                    moved_ns: 0,
                    last_call_id: CallId(last_call_id.load(Ordering::SeqCst)),
                    n_waiting: 0,
                    residents: Vec::new(),
                };
                let outcome = Ok(Some(BlobIdx(0)));
                (Event::CallDone { outcome }, Some(progress.to_bytes()))
            }
            Command::Ping => (Event::Pong, None),
            _ => break,
        };
        let header = Header {
            version: PROTOCOL_VERSION,
            epoch: hello.epoch,
            call_id: header.call_id,
            rank: hello.rank,
            deadline_ns: 0,
        };
        let mut message = Vec::new();
        encode_event(&mut message, header, &event);
        let blobs: Vec<&[u8]> = blob.iter().map(Vec::as_slice).collect();
        let mut idle = || ControlFlow::Continue(());
        events
            .send(&message, &blobs, Deadline::after_ms(1000), &mut idle)
            .unwrap();
    }
    drop(control);
    // Dropping this end of the data lane is the executor's.
    drop(took);
}

fn uni(silence_ms: u64, doing: Doing) -> UniExecutor {
    let options = UniOptions {
        limits: limits(silence_ms),
        ..UniOptions::new(Script::default().config())
    };
    UniExecutor::start(options, Box::new(move |end| swallow(end, doing)), &mut |_, _| {}).unwrap()
}

/// Fault case T1: no need to wait for the end of the silence.
#[test]
fn a_swallowed_method_ends_the_world_once_its_caller_has_given_up() {
    let _watchdog = watchdog("swallowed method");
    let executor = uni(3_600_000, Doing::Nothing);
    call_in_vain(&executor, "echo", 0);
    let failure = failure(&executor);
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::WorkerLost, Some(Rank(0)))
    );
    assert!(failure.message.contains("swallowed"), "{failure}");
    assert_eq!(failure.phase.as_deref(), Some("method `echo`"));
}

#[test]
fn a_swallowed_wave_ends_the_world_after_half_the_silence() {
    let _watchdog = watchdog("swallowed wave");
    let executor = uni(20_000, Doing::Nothing);
    let begin = Instant::now();
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 1))]), late())
        .unwrap();
    let failure = failure(&executor);
    assert!(begin.elapsed() >= Duration::from_secs(10));
    assert!(failure.message.contains("swallowed"), "{failure}");
    assert_eq!(failure.phase.as_deref(), Some("taking up a wave"));
}

/// Fault case T1, for waves.
#[test]
fn a_swallowed_wave_ends_the_world_once_a_request_s_deadline_has_passed() {
    let _watchdog = watchdog("swallowed wave with a deadline");
    let executor = uni(3_600_000, Doing::Nothing);
    let mut wave = wave(1, &[0], &[(1, request(1, 1)), (2, request(2, 1))]);
    wave.joining[0].deadline_ns = Deadline::after_ms(100).ns();
    executor.dispatch(wave, late()).unwrap();
    let mut events = Vec::new();
    while !matches!(events.last(), Some(ExecutorEvent::WorldFailed(_))) {
        events.extend(executor.wait_events(late()));
    }
    let code_of = |id: u64| {
        events.iter().find_map(|event| match event {
            ExecutorEvent::RequestDone {
                request_id,
                outcome: Err(failure),
            } if *request_id == RequestId(id) => Some(failure.code),
            _ => None,
        })
    };
    assert_eq!(code_of(1), Some(FailureCode::DeadlineExceeded));
    assert_eq!(code_of(2), Some(FailureCode::WorkerLost));
    let failure = executor.failure().unwrap();
    assert!(failure.message.contains("swallowed"), "{failure}");
}

#[test]
fn a_busy_rank_is_waited_for_however_often_callers_give_up() {
    let _watchdog = watchdog("busy");
    let doing = Doing::Method { name: "echo".into() };
    let executor = uni(3_600_000, doing);
    for _ in 0..10 {
        call_in_vain(&executor, "echo", 0);
    }
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(executor.failure(), None);
}
