//! Workers that lie, flood, freeze and leave: what they do reaches nobody but themselves, and every request still ends once.

use denoised_executor::{
    Executor, ExecutorError, ExecutorEvent, Limits, LinkSpec, MethodCall, MpExecutor, MpOptions, Ranks,
    StderrSink, WorkerProgram,
};
use denoised_link::{INHERITED_NAME, WorkerEnd, attach};
use denoised_os::{Deadline, child::inherited_fd, socket::Channel};
use denoised_testkit::{
    process::{be_a_scripted_worker, eventually, is_running, is_worker, kill, options, stop},
    script::{At, Script, What, request, scripted_registry, wave},
    watchdog::Watchdog,
};
use denoised_types::{
    CallId, Epoch, Failure, FailureCode, Generated, PhaseTimes, Rank, RequestId, Resolved, TensorDType,
};
use denoised_wire::{
    BlobIdx, BootUp, Command, Event, GeneratedMeta, Header, PROTOCOL_VERSION, StartPhase, TensorMeta,
    decode_command, encode_event, split_header,
};
use std::{
    collections::BTreeMap,
    io::Write,
    ops::ControlFlow,
    path::PathBuf,
    sync::{Arc, Mutex, mpsc},
    time::{Duration, Instant},
};

/// Says in a worker's environment what is wrong with it.
const ROLE: &str = "DENOISED_TEST_ROLE";

/// Not a test: the worker processes of the others.
#[test]
fn scripted_worker_process() {
    if !is_worker() {
        return;
    }
    match std::env::var(ROLE).as_deref() {
        Ok("floods standard error") => {
            std::thread::spawn(|| flood(b"a line that says next to nothing, again and again\n"));
        }
        Ok("floods standard error without lines") => {
            std::thread::spawn(|| flood(b"no end of it "));
        }
        Ok(role) => lie(role),
        Err(_) => {}
    }
    be_a_scripted_worker();
}

/// Writes to standard error as fast as it goes.
fn flood(text: &[u8]) {
    let text = text.repeat(1000);
    while std::io::stderr().write_all(&text).is_ok() {}
}

fn watchdog(name: &str) -> Watchdog {
    Watchdog::new(name, Duration::from_secs(120))
}

fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn soon() -> Duration {
    Duration::from_secs(20)
}

fn options_of(n_workers: u16, script: &Script, role: &str) -> MpOptions {
    let mut options = options(n_workers, script);
    options.program.env.push((ROLE.into(), role.into()));
    options
}

fn start(options: MpOptions) -> MpExecutor {
    MpExecutor::start(options, &mut |_, _| {}).unwrap()
}

fn start_error(options: MpOptions) -> Failure {
    match MpExecutor::start(options, &mut |_, _| {}) {
        Ok(executor) => panic!("started: {executor:?}"),
        Err(ExecutorError::Start { cause, .. }) => cause,
        Err(other) => panic!("{other:?}"),
    }
}

type Outcomes = BTreeMap<RequestId, Result<Generated, Failure>>;

/// The ends of all requests until `n_waves` waves are over, each once.
fn outcomes(executor: &dyn Executor, n_waves: usize) -> Outcomes {
    let mut ended = Outcomes::new();
    let mut n_over = 0;
    while n_over < n_waves {
        for event in executor.wait_events(late()) {
            match event {
                ExecutorEvent::RequestDone { request_id, outcome } => {
                    assert!(
                        ended
                            .insert(request_id, outcome.map(denoised_executor::Output::into_generated))
                            .is_none(),
                        "request {request_id} ended twice"
                    );
                }
                ExecutorEvent::WaveDone { .. } => n_over += 1,
                ExecutorEvent::RequestStarted { .. } | ExecutorEvent::Step { .. } => {}
                ExecutorEvent::WorldFailed(failure) => panic!("{failure}"),
            }
        }
    }
    ended
}

fn run_on(executor: &dyn Executor, rank: u16, request_id: u64) -> Result<Generated, Failure> {
    let wave = wave(request_id, &[rank], &[(request_id, request(request_id, 2))]);
    executor.dispatch(wave, late()).unwrap();
    outcomes(executor, 1).remove(&RequestId(request_id)).unwrap()
}

// ---- The liar ----

struct Liar {
    end: WorkerEnd,
    call_id: CallId,
}

impl Liar {
    fn header(&self) -> Header {
        Header {
            version: PROTOCOL_VERSION,
            epoch: self.end.hello.epoch,
            call_id: self.call_id,
            rank: self.end.hello.rank,
            deadline_ns: 0,
        }
    }

    fn send_bytes(&self, message: &[u8], blobs: &[&[u8]]) {
        let mut go_on = || ControlFlow::Continue(());
        self.end
            .events
            .send(message, blobs, Deadline::after(soon()), &mut go_on)
            .unwrap();
    }

    fn send_as(&self, header: Header, event: &Event, blobs: &[&[u8]]) {
        let mut message = Vec::new();
        encode_event(&mut message, header, event);
        self.send_bytes(&message, blobs);
    }

    fn send(&self, event: &Event) {
        self.send_as(self.header(), event, &[]);
    }

    fn tensor(&self, request_id: RequestId, name: String, shape: Vec<u64>, blob: BlobIdx) {
        let tensor = TensorMeta {
            name,
            dtype: TensorDType::F32,
            shape,
            blob,
        };
        self.send_as(self.header(), &Event::Tensor { request_id, tensor }, &[&[]]);
    }

    fn picture(&self, request_id: RequestId, side_px: u32) {
        let rgb = [7; 12];
        self.send_as(self.header(), &done(request_id, side_px), &[&rgb]);
    }

    fn call_done(&self) {
        self.send(&Event::CallDone { outcome: Ok(None) });
    }
}

fn done(request_id: RequestId, side_px: u32) -> Event {
    let outcome = Ok(GeneratedMeta {
        width: side_px,
        height: side_px,
        n_frames: 1,
        rgb: BlobIdx(0),
        resolved: Resolved {
            width: side_px,
            height: side_px,
            n_frames: 1,
            n_steps: 1,
            guidance: f32::NAN,
            seed: 0,
            sampler: String::new(),
            warnings: Vec::new(),
        },
        times: PhaseTimes::default(),
    });
    Event::RequestDone { request_id, outcome }
}

/// The last rank does what `role` says, all others are honest. Does not return.
fn lie(role: &str) {
    let socket = Channel::from_fd(inherited_fd(INHERITED_NAME).unwrap()).unwrap();
    let end = attach(socket, None).unwrap();
    if end.hello.rank.0 + 1 < end.hello.world_size {
        let _ = denoised_worker::serve(end, scripted_registry());
        leave(0);
    }
    match role {
        "never ends its phases" => loop {
            if end
                .boot
                .send(&BootUp::Phase(StartPhase::OpeningDevice), None)
                .is_err()
            {
                leave(1);
            }
        },
        "says much and is never ready" => {
            flood(b"still not ready\n");
            leave(1);
        }
        "publishes without end" => loop {
            if end
                .boot
                .send(&BootUp::PublishShared { has_weights: false }, None)
                .is_err()
            {
                leave(1);
            }
        },
        _ => {}
    }
    let ready = BootUp::Ready {
        model: None,
        device: None,
        weight_bytes: 0,
        methods: Vec::new(),
    };
    end.boot.send(&ready, None).unwrap();
    let mut liar = Liar {
        end,
        call_id: CallId(0),
    };
    loop {
        let Ok(received) = liar.end.data.receive(Deadline::after(soon())) else {
            leave(1);
        };
        let (header, body) = split_header(&received.message).unwrap();
        liar.call_id = header.call_id;
        match decode_command(&header, body).unwrap() {
            Command::Execute(wave) => carry_out(role, &liar, wave.joining[0].request_id),
            Command::Call { .. } => liar.send_as(
                liar.header(),
                &Event::CallDone {
                    outcome: Ok(Some(BlobIdx(0))),
                },
                &[b"honest"],
            ),
            other => panic!("{other:?}"),
        }
    }
}

fn carry_out(role: &str, liar: &Liar, request_id: RequestId) {
    let honest = liar.header();
    let failed = |text: &str| Event::RequestDone {
        request_id,
        outcome: Err(Failure::new(FailureCode::InvalidRequest, text)),
    };
    match role {
        "misaddresses" => {
            let lie = failed("a lie");
            let epoch = Epoch(honest.epoch.0 + 1);
            liar.send_as(Header { epoch, ..honest }, &lie, &[]);
            for call_id in [CallId(0), CallId(u64::MAX), CallId(honest.call_id.0 + 1)] {
                liar.send_as(Header { call_id, ..honest }, &lie, &[]);
            }
            for rank in [Rank(0), Rank(64), Rank(u16::MAX)] {
                liar.send_as(Header { rank, ..honest }, &lie, &[]);
            }
            // The wave before this one is rank 0's, with the request before this one.
            let other = RequestId(request_id.0 - 1);
            let call_id = CallId(honest.call_id.0 - 1);
            liar.send_as(Header { call_id, ..honest }, &done(other, 2), &[&[0; 12]]);
            liar.send_as(
                Header { call_id, ..honest },
                &Event::CallDone { outcome: Ok(None) },
                &[],
            );
            liar.send(&done(other, 2));
            liar.send(&done(RequestId(u64::MAX), 2));
            liar.send(&Event::Pong);
            liar.send(&Event::Step {
                request_id,
                n_done: u32::MAX,
                n_steps: 0,
            });
            // The truth, and then more of it than there is.
            liar.send(&failed("the truth"));
            liar.picture(request_id, 2);
            liar.send(&failed("the truth again"));
            liar.call_done();
            liar.call_done();
            liar.picture(request_id, 2);
        }
        "exaggerates" => {
            let side_px = [u32::MAX, 1 << 31, 3, 0][request_id.0 as usize % 4];
            liar.picture(request_id, side_px);
            liar.call_done();
        }
        "has impossible tensors" => {
            let shapes = [
                vec![u64::MAX, u64::MAX],
                vec![1 << 62; 4],
                vec![1],
                vec![0; 60_000],
            ];
            let shape = shapes[request_id.0 as usize % 4].clone();
            liar.tensor(request_id, String::new(), shape, BlobIdx(u16::MAX));
            liar.picture(request_id, 2);
            liar.call_done();
        }
        "has tensors of nothing but names" => {
            for _ in 0..64 {
                liar.tensor(request_id, "n".repeat(64 << 10), vec![0], BlobIdx(0));
            }
            liar.picture(request_id, 2);
            liar.call_done();
        }
        "has many empty tensors" => {
            for _ in 0..50_000 {
                liar.tensor(request_id, String::new(), vec![0], BlobIdx(0));
            }
            liar.picture(request_id, 2);
            liar.call_done();
        }
        "babbles" => {
            let mut random = request_id.0;
            for len in (0..200).chain([4000]) {
                let mut bytes = honest.to_bytes().to_vec();
                bytes.truncate(len);
                bytes.extend((0..len).map(|_| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (random >> 56) as u8
                }));
                liar.send_bytes(&bytes, &[]);
            }
            liar.call_done();
        }
        "says too much" => {
            let mut message = honest.to_bytes().to_vec();
            message.resize(9 << 20, 0);
            liar.send_bytes(&message, &[]);
        }
        "is of another version" => {
            let version = PROTOCOL_VERSION + 1;
            liar.send_as(
                Header { version, ..honest },
                &Event::CallDone { outcome: Ok(None) },
                &[],
            );
        }
        "hurries and leaves" => {
            for n_done in 1..=5000 {
                liar.send(&Event::Step {
                    request_id,
                    n_done,
                    n_steps: 5000,
                });
            }
            liar.picture(request_id, 2);
            liar.call_done();
            leave(0);
        }
        role => panic!("unknown role {role}"),
    }
}

fn leave(code: i32) -> ! {
    #[expect(clippy::exit, reason = "a worker process that ends")]
    std::process::exit(code)
}

// ---- Lies ----

#[test]
fn misaddressed_and_repeated_events_change_nothing() {
    let _watchdog = watchdog("misaddressed");
    let executor = start(options_of(2, &Script::with_steps_of(100), "misaddresses"));
    for round in 0..3u64 {
        let first = 1 + 2 * round;
        for (rank, request_id) in [(0, first), (1, first + 1)] {
            let wave = wave(request_id, &[rank], &[(request_id, request(request_id, 3))]);
            executor.dispatch(wave, late()).unwrap();
        }
        let ended = outcomes(&executor, 2);
        assert_eq!(ended.len(), 2);
        let honest = ended[&RequestId(first)].as_ref().unwrap();
        assert_eq!((honest.rank, honest.image.width), (Rank(0), 8));
        let failure = ended[&RequestId(first + 1)].as_ref().unwrap_err();
        assert_eq!(failure.message, "the truth");
    }
    let stats = executor.stats();
    assert!(
        stats.n_bad_events >= 3 * 6 && stats.n_late_events > 0,
        "{stats:?}"
    );
    let replies = executor.call(&MethodCall::new("rank", b"", late())).unwrap();
    assert_eq!(replies[1].bytes, b"honest");
}

#[test]
fn pictures_that_do_not_have_their_bytes_are_failures() {
    let _watchdog = watchdog("exaggerates");
    let executor = start(options_of(1, &Script::default(), "exaggerates"));
    for request_id in 1..=8 {
        let failure = run_on(&executor, 0, request_id).unwrap_err();
        assert_eq!(
            (failure.code, failure.rank),
            (FailureCode::Protocol, Some(Rank(0))),
            "{failure}"
        );
        assert!(failure.message.contains("12 bytes instead of"), "{failure}");
    }
}

#[test]
fn tensors_that_cannot_be_are_failures() {
    let _watchdog = watchdog("impossible tensors");
    let executor = start(options_of(1, &Script::default(), "has impossible tensors"));
    for request_id in 4..=6 {
        let failure = run_on(&executor, 0, request_id).unwrap_err();
        assert_eq!(failure.code, FailureCode::Protocol, "{failure}");
        assert!(
            failure.message.len() < 4096,
            "{} bytes of text",
            failure.message.len()
        );
    }
    // Absurd, but as empty as it says.
    assert!(run_on(&executor, 0, 7).is_ok());
}

#[test]
fn what_is_kept_of_a_trace_is_bounded_in_names_and_numbers_too() {
    let _watchdog = watchdog("trace bound");
    for role in ["has tensors of nothing but names", "has many empty tensors"] {
        let mut options = options_of(1, &Script::default(), role);
        options.limits = Limits {
            trace_bytes: 1 << 20,
            ..Limits::default()
        };
        let executor = start(options);
        let failure = run_on(&executor, 0, 1).unwrap_err();
        assert_eq!(failure.code, FailureCode::OutOfMemory, "{role}: {failure}");
    }
}

#[test]
fn babble_ends_the_call_it_names_and_no_other() {
    let _watchdog = watchdog("babble");
    let executor = start(options_of(2, &Script::default(), "babbles"));
    for request_id in 1..=5 {
        let failure = run_on(&executor, 1, request_id).unwrap_err();
        assert_eq!(
            (failure.code, failure.rank),
            (FailureCode::Protocol, Some(Rank(1))),
            "{failure}"
        );
        assert!(run_on(&executor, 0, 100 + request_id).is_ok());
    }
}

#[test]
fn an_event_over_the_limit_ends_its_call_at_once() {
    let _watchdog = watchdog("too much");
    let mut options = options_of(1, &Script::default(), "says too much");
    options.link.event_arena_bytes = 16 << 20;
    let executor = start(options);
    let failure = run_on(&executor, 0, 1).unwrap_err();
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::Protocol, Some(Rank(0)))
    );
    assert!(
        failure.message.contains("exceeds the limit of 8388608 bytes"),
        "{failure}"
    );
}

#[test]
fn an_event_of_another_version_is_a_typed_failure_with_both_versions() {
    let _watchdog = watchdog("version");
    let executor = start(options_of(1, &Script::default(), "is of another version"));
    let failure = run_on(&executor, 0, 1).unwrap_err();
    assert_eq!(failure.code, FailureCode::Protocol);
    let (theirs, ours) = (PROTOCOL_VERSION + 1, PROTOCOL_VERSION);
    assert!(
        failure.message.contains(&format!("version {theirs}")),
        "{failure}"
    );
    assert!(failure.message.contains(&format!("version {ours}")), "{failure}");
}

// ---- Floods ----

#[test]
fn a_worker_that_talks_without_being_ready_does_not_outlast_the_start_limit() {
    let _watchdog = watchdog("start floods");
    for role in ["never ends its phases", "says much and is never ready"] {
        for n_workers in [1, 3] {
            let mut options = options_of(n_workers, &Script::default(), role);
            options.start_limit = Duration::from_secs(2);
            let cause = start_error(options);
            assert_eq!(cause.code, FailureCode::DeadlineExceeded, "{role}: {cause}");
        }
    }
}

#[test]
fn weights_are_published_by_rank_0_and_once() {
    let _watchdog = watchdog("publishes");
    for n_workers in [1, 3] {
        let mut options = options_of(n_workers, &Script::default(), "publishes without end");
        options.start_limit = Duration::from_secs(20);
        let cause = start_error(options);
        assert_eq!(cause.code, FailureCode::Protocol, "{cause}");
        assert_eq!(cause.rank, Some(Rank(n_workers - 1)));
    }
}

#[test]
fn a_flood_on_standard_error_hides_neither_results_nor_a_death() {
    let _watchdog = watchdog("stderr floods");
    for role in ["floods standard error", "floods standard error without lines"] {
        let executor = start(options_of(2, &Script::with_steps_of(5), role));
        for request_id in 1..=5 {
            assert!(run_on(&executor, 1, request_id).is_ok());
        }
        assert!(executor.health(soon()).is_healthy());
        kill("KILL", &executor.world().pids[..1]);
        assert!(eventually(soon(), || executor.failure().is_some()));
        let failure = executor.failure().unwrap();
        assert_eq!(failure.rank, Some(Rank(0)));
        assert!(failure.message.contains("signal 9"), "{failure}");
        assert!(
            failure.message.len() < 10_000,
            "last words of {} bytes",
            failure.message.len()
        );
    }
}

#[test]
fn a_sink_that_blocks_hides_no_death() {
    let _watchdog = watchdog("blocking sink");
    let script = Script::default().fault(None, At::Wave, What::Say("stop here".to_owned()));
    let mut options = options(2, &script);
    let (release, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    options.stderr = StderrSink(Arc::new(move |_, line: &str| {
        if line == "stop here" {
            // Until the test ends.
            let _ = held.lock().unwrap().recv();
        }
    }));
    let executor = start(options);
    assert!(run_on(&executor, 0, 1).is_ok());
    kill("KILL", &executor.world().pids[1..]);
    assert!(eventually(soon(), || executor.failure().is_some()));
    assert!(executor.failure().unwrap().message.contains("signal 9"));
    // Nor does it hold up the end of the executor.
    drop(executor);
    drop(release);
}

// ---- Leaving ----

#[test]
fn what_was_sent_before_a_death_counts_however_much_it_is() {
    let _watchdog = watchdog("hurries");
    let mut options = options_of(1, &Script::default(), "hurries and leaves");
    options.link = LinkSpec {
        event_ring_bytes: 2 << 20,
        ..options.link
    };
    let executor = start(options);
    let wave = wave(1, &[0], &[(1, request(1, 5000))]);
    executor.dispatch(wave, late()).unwrap();
    // Nobody takes events until it is gone.
    assert!(eventually(soon(), || executor.failure().is_some()));
    assert!(executor.failure().unwrap().message.contains("exited with code 0"));
    let mut ends = Vec::new();
    while !ends
        .iter()
        .any(|event| matches!(event, ExecutorEvent::WorldFailed(_)))
    {
        ends.extend(
            executor
                .wait_events(late())
                .into_iter()
                .filter(|event| !matches!(event, ExecutorEvent::Step { .. })),
        );
    }
    let n_good = ends
        .iter()
        .filter(|event| matches!(event, ExecutorEvent::RequestDone { outcome: Ok(_), .. }));
    assert_eq!(n_good.count(), 1, "{ends:?}");
    let over = ends
        .iter()
        .filter(|event| matches!(event, ExecutorEvent::WaveDone { .. }));
    assert_eq!(over.count(), 1);
}

#[test]
fn a_worker_that_exits_with_0_is_lost_all_the_same() {
    let _watchdog = watchdog("exits 0");
    let cause = start_error(options(
        2,
        &Script::default().fault(Some(1), At::Start, What::Exit(0)),
    ));
    assert_eq!((cause.code, cause.rank), (FailureCode::WorkerLost, Some(Rank(1))));
    assert!(cause.message.contains("exited with code 0"), "{cause}");

    let executor = start(options(
        2,
        &Script::default().fault(Some(1), At::Step(1), What::Exit(0)),
    ));
    executor
        .dispatch(wave(1, &[1], &[(1, request(1, 3)), (2, request(2, 3))]), late())
        .unwrap();
    let mut events = Vec::new();
    while !events
        .iter()
        .any(|event| matches!(event, ExecutorEvent::WorldFailed(_)))
    {
        events.extend(executor.wait_events(late()));
    }
    let failures: Vec<&Failure> = events
        .iter()
        .filter_map(|event| match event {
            ExecutorEvent::RequestDone { outcome, .. } => outcome.as_ref().err(),
            _ => None,
        })
        .collect();
    assert_eq!(failures.len(), 2, "{events:?}");
    for failure in failures {
        assert_eq!(
            (failure.code, failure.rank),
            (FailureCode::WorkerLost, Some(Rank(1)))
        );
        assert!(failure.message.contains("exited with code 0"), "{failure}");
        assert_eq!(failure.phase.as_deref(), Some("step 2 of 3"));
    }
}

#[test]
fn a_worker_that_somebody_terminates_says_so_and_cleans_up() {
    let _watchdog = watchdog("terminated");
    let folder = tempfile::tempdir().unwrap();
    let script = Script {
        cleanup_marker: Some(folder.path().join("clean")),
        ..Script::with_steps_of(10)
    };
    let mut options = options(2, &script);
    // Time for the clean-up, also on a busy machine.
    options.limits.fence = soon();
    let executor = start(options);
    executor
        .dispatch(wave(1, &[1], &[(1, request(1, 1000))]), late())
        .unwrap();
    let mut events = executor.wait_events(late());
    kill("TERM", &executor.world().pids[1..]);
    while !matches!(events.last(), Some(ExecutorEvent::WorldFailed(_))) {
        events.extend(executor.wait_events(late()));
    }
    let ends: Vec<&Failure> = events
        .iter()
        .filter_map(|event| match event {
            ExecutorEvent::RequestDone { outcome, .. } => outcome.as_ref().err(),
            _ => None,
        })
        .collect();
    assert_eq!(ends.len(), 1, "{events:?}");
    assert_eq!(
        (ends[0].code, ends[0].rank),
        (FailureCode::WorkerLost, Some(Rank(1))),
        "{}",
        ends[0]
    );
    assert!(ends[0].message.contains("signal 15 (SIGTERM)"), "{}", ends[0]);
    let report = executor.shutdown(soon());
    assert_eq!(report.ranks[1].status, "exited with code 0");
    let cleaned = std::fs::read_to_string(folder.path().join("clean")).unwrap();
    assert!(cleaned.contains("rank 1"), "{cleaned}");
}

#[test]
fn a_worker_without_standard_error_serves_and_dies_like_any_other() {
    let _watchdog = watchdog("no stderr");
    let mut options = options(2, &Script::with_steps_of(1));
    let this = std::env::current_exe().unwrap();
    let mut args = vec![
        "-c".into(),
        "exec \"$0\" \"$@\" 2>&-".into(),
        this.into_os_string(),
    ];
    args.append(&mut options.program.args);
    options.program = WorkerProgram {
        path: Some(PathBuf::from("/bin/sh")),
        args,
        env: Vec::new(),
    };
    let executor = start(options);
    assert!(run_on(&executor, 1, 1).is_ok());
    kill("KILL", &executor.world().pids[..1]);
    assert!(eventually(soon(), || executor.failure().is_some()));
    let report = executor.shutdown(soon());
    assert_eq!(report.ranks.len(), 2);
}

#[test]
fn a_frozen_worker_is_unhealthy_misses_deadlines_and_is_killed() {
    let _watchdog = watchdog("frozen");
    let executor = start(options(2, &Script::with_steps_of(1)));
    let pids = executor.world().pids;
    stop(&pids[1..]);
    // All of its threads stop some time after the signal.
    assert!(eventually(soon(), || {
        let health = executor.health(Duration::from_millis(200));
        (health.answered, health.silent) == (vec![Rank(0)], vec![Rank(1)])
    }));
    let mut wave = wave(1, &[1], &[(1, request(1, 2))]);
    wave.joining[0].deadline_ns = Deadline::after_ms(200).ns();
    executor.dispatch(wave, late()).unwrap();
    let mut ended = None;
    while ended.is_none() {
        ended = executor
            .wait_events(late())
            .into_iter()
            .find_map(|event| match event {
                ExecutorEvent::RequestDone { outcome, .. } => Some(outcome),
                _ => None,
            });
    }
    let failure = ended.unwrap().unwrap_err();
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::DeadlineExceeded, Some(Rank(1)))
    );
    // The other rank is none the worse for it.
    assert!(
        executor
            .call(&MethodCall::new("rank", b"", late()).execute(Ranks::One(Rank(0))))
            .is_ok()
    );
    let report = executor.shutdown(Duration::from_secs(2));
    assert_eq!(
        (report.ranks[0].means, report.ranks[1].means),
        ("graceful", "KILL")
    );
    assert!(pids.iter().all(|pid| !is_running(*pid)));
}

#[test]
fn budgets_and_limits_without_end_are_no_special_case() {
    let _watchdog = watchdog("endless budgets");
    let mut options = options(2, &Script::default());
    options.start_limit = Duration::MAX;
    options.limits = Limits {
        silence: Duration::MAX,
        fence: Duration::MAX,
        ..Limits::default()
    };
    let executor = start(options.clone());
    assert!(executor.health(Duration::MAX).is_healthy());
    assert!(run_on(&executor, 0, 1).is_ok());
    let report = executor.shutdown(Duration::MAX);
    assert!(
        report.ranks.iter().all(|rank| rank.means == "graceful"),
        "{report:?}"
    );

    let executor = start(options);
    let pids = executor.world().pids;
    kill("KILL", &pids[1..]);
    assert!(eventually(soon(), || executor.failure().is_some()));
    let report = executor.shutdown(Duration::MAX);
    assert_eq!(report.ranks.len(), 2);
    assert!(pids.iter().all(|pid| !is_running(*pid)));
}
