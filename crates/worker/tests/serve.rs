//! A worker on a thread, told what to do over its link.

use denoised_link::{ExecutorEnd, LinkSpec, RankSet, Received, RingWorld, attach, local_link};
use denoised_os::{Deadline, now_ns, socket::Channel};
use denoised_testkit::{
    script::{
        At, BASE_BYTES, REQUEST_BYTES, Script, What, device_bytes, picture_of, request, scripted_registry,
        step_wave, wave,
    },
    watchdog::Watchdog,
};
use denoised_types::{
    Adapter, CallId, Epoch, Failure, FailureCode, GenerateRequest, Mode, Rank, RequestId, WorkerConfig,
};
use denoised_wire::{
    BlobIdx, BootUp, Command, Doing, Event, Header, Lane, MemberProgress, MethodInfo, PROTOCOL_VERSION,
    Profile, RankProgress, Wave, Work, WorkerStatus, decode_event, encode_command, split_header,
};
use denoised_worker::{Ending, Registry, serve};
use std::{ops::ControlFlow, sync::mpsc, thread::JoinHandle, time::Duration};

const EPOCH: Epoch = Epoch(3);

/// An event with its blobs, and who sent it for which call.
#[derive(Debug)]
struct Heard {
    rank: Rank,
    call_id: CallId,
    event: Event,
    blobs: Vec<Vec<u8>>,
}

/// The executor's side, by hand.
struct World {
    end: Option<ExecutorEnd>,
    methods: Vec<MethodInfo>,
    threads: Vec<JoinHandle<Ending>>,
    next_call: u64,
    all: RankSet,
    heard: Vec<Heard>,
    _watchdog: Watchdog,
}

fn spec() -> LinkSpec {
    LinkSpec {
        command_ring_bytes: 1 << 20,
        command_arena_bytes: 2 << 20,
        event_ring_bytes: 64 << 10,
        event_arena_bytes: 2 << 20,
        ..LinkSpec::default()
    }
}

fn late() -> Deadline {
    Deadline::after_ms(60_000)
}

impl World {
    fn start(script: &Script) -> Self {
        Self::start_with(script.config(), scripted_registry)
    }

    fn start_with(config: WorkerConfig, registry: impl FnOnce() -> Registry + Send + 'static) -> Self {
        let (end, boot, worker) = local_link(spec(), EPOCH, config).unwrap();
        let thread = std::thread::spawn(move || serve(worker, registry()));
        let methods = loop {
            match boot.receive(late()).unwrap() {
                BootUp::Ready { methods, .. } => break methods,
                BootUp::StartFailed(failure) => panic!("{failure}"),
                BootUp::Phase(_) | BootUp::PublishShared { .. } => {}
            }
        };
        Self::new(end, methods, vec![thread], 1)
    }

    /// Several ranks on threads, over rings.
    fn start_ranks(script: &Script, world_size: u16) -> Self {
        let memory = RingWorld::create(spec(), world_size).unwrap();
        let mut sockets = Vec::new();
        let mut threads = Vec::new();
        for rank in (0..world_size).map(Rank) {
            let (ours, theirs) = denoised_link::BootChannel::pair().unwrap();
            let (hello, fds) = memory.hello(rank, EPOCH, script.config()).unwrap();
            ours.greet(hello, &fds).unwrap();
            let worker = attach(Channel::from_fd(theirs).unwrap(), None).unwrap();
            threads.push(std::thread::spawn(move || serve(worker, scripted_registry())));
            sockets.push(ours);
        }
        let mut methods = Vec::new();
        for socket in &sockets {
            methods = loop {
                match socket.try_receive().unwrap() {
                    Some((BootUp::Ready { methods, .. }, _)) => break methods,
                    Some((BootUp::StartFailed(failure), _)) => panic!("{failure}"),
                    Some(_) => {}
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
            };
        }
        Self::new(memory.into_end(sockets).unwrap(), methods, threads, world_size)
    }

    fn new(
        end: ExecutorEnd,
        methods: Vec<MethodInfo>,
        threads: Vec<JoinHandle<Ending>>,
        world_size: u16,
    ) -> Self {
        Self {
            end: Some(end),
            methods,
            threads,
            next_call: 1,
            all: RankSet::all(world_size),
            heard: Vec::new(),
            _watchdog: Watchdog::new("a worker on a thread", Duration::from_secs(120)),
        }
    }

    fn message(&mut self, command: &Command, deadline_ns: u64) -> (CallId, Vec<u8>) {
        let call_id = CallId(self.next_call);
        self.next_call += 1;
        let header = Header {
            version: PROTOCOL_VERSION,
            epoch: EPOCH,
            call_id,
            rank: Rank(0),
            deadline_ns,
        };
        let mut message = Vec::new();
        encode_command(&mut message, header, command);
        (call_id, message)
    }

    fn send(&mut self, command: &Command, blobs: &[&[u8]]) -> CallId {
        self.send_until(command, blobs, 0)
    }

    fn send_until(&mut self, command: &Command, blobs: &[&[u8]], deadline_ns: u64) -> CallId {
        let (call_id, message) = self.message(command, deadline_ns);
        let to = self.all;
        let end = self.end.as_mut().unwrap();
        end.data
            .send(to, &message, blobs, late(), &mut || ControlFlow::Continue(()))
            .unwrap();
        call_id
    }

    fn control(&mut self, command: &Command) -> CallId {
        let (call_id, message) = self.message(command, 0);
        for control in &self.end.as_ref().unwrap().control {
            control.send(&message).unwrap();
        }
        call_id
    }

    /// Takes in events until `done` holds of them.
    fn hear_until(&mut self, mut done: impl FnMut(&[Heard]) -> bool) {
        let limit = late();
        while !done(&self.heard) {
            assert!(!limit.has_passed(), "only {:?}", self.heard);
            let end = self.end.as_mut().unwrap();
            let heard = &mut self.heard;
            end.events
                .drain(&mut |rank, received| heard.push(take(rank, received)))
                .unwrap();
            if !done(heard) {
                // Steps are sent without a wake.
                end.events.wait(Deadline::after_ms(10));
            }
        }
    }

    fn answer_of(&mut self, call_id: CallId, rank: Rank) -> Result<Option<Vec<u8>>, Failure> {
        let is_it = |heard: &Heard| {
            heard.call_id == call_id && heard.rank == rank && matches!(heard.event, Event::CallDone { .. })
        };
        self.hear_until(|heard| heard.iter().any(is_it));
        let heard = self.heard.iter_mut().find(|heard| is_it(heard)).unwrap();
        match &heard.event {
            Event::CallDone { outcome: Ok(blob) } => {
                Ok(blob.map(|BlobIdx(idx)| heard.blobs[usize::from(idx)].clone()))
            }
            Event::CallDone {
                outcome: Err(failure),
            } => Err(failure.clone()),
            other => panic!("{other:?}"),
        }
    }

    fn answer(&mut self, call_id: CallId) -> Result<Option<Vec<u8>>, Failure> {
        self.answer_of(call_id, Rank(0))
    }

    /// Calls a method of the data lane.
    fn call(&mut self, method: &str, args: &[u8]) -> Result<Vec<u8>, Failure> {
        let call_id = self.send(&data_call(method, true), &[args]);
        Ok(self.answer(call_id)?.unwrap())
    }

    /// Calls a method of the control lane.
    fn ask(&mut self, method: &str, args: &[u8]) -> Result<Vec<u8>, Failure> {
        let call_id = self.control(&control_call(method, args, true));
        Ok(self.answer(call_id)?.unwrap())
    }

    fn progress(&mut self) -> RankProgress {
        RankProgress::from_bytes(&self.ask("progress", b"").unwrap()).unwrap()
    }

    /// Waits until the rank is where `is_there` says.
    fn until_progress(&mut self, is_there: impl Fn(&RankProgress) -> bool) -> RankProgress {
        let limit = late();
        loop {
            let progress = self.progress();
            if is_there(&progress) {
                return progress;
            }
            assert!(!limit.has_passed(), "stays at {progress:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Carries out a wave; returns what was said of requests during it, in order.
    fn run(&mut self, wave: Wave) -> Vec<String> {
        let call_id = self.send(&Command::Execute(wave), &[]);
        assert_eq!(self.answer(call_id), Ok(None));
        self.said(call_id)
    }

    fn said(&self, call_id: CallId) -> Vec<String> {
        self.heard
            .iter()
            .filter(|heard| heard.call_id == call_id && heard.rank == Rank(0))
            .filter_map(say)
            .collect()
    }

    /// How a request ended: its picture, or its failure. It ended once.
    fn end_of(&self, request_id: u64) -> Result<Vec<u8>, Failure> {
        let mut ends = self.heard.iter().filter_map(|heard| match &heard.event {
            Event::RequestDone {
                request_id: id,
                outcome,
            } if id.0 == request_id && heard.rank == Rank(0) => Some(
                outcome
                    .clone()
                    .map(|meta| heard.blobs[usize::from(meta.rgb.0)].clone()),
            ),
            _ => None,
        });
        let end = ends
            .next()
            .unwrap_or_else(|| panic!("request {request_id} has no end"));
        assert_eq!(ends.next(), None, "request {request_id} ended twice");
        end
    }

    fn dying(&mut self) -> Failure {
        let dying = |heard: &Heard| match &heard.event {
            Event::Dying(failure) => Some(failure.clone()),
            _ => None,
        };
        self.hear_until(|heard| heard.iter().any(|heard| dying(heard).is_some()));
        self.heard.iter().find_map(dying).unwrap()
    }

    fn device_memory(&mut self) -> u64 {
        String::from_utf8(self.call("device_memory", b"").unwrap())
            .unwrap()
            .parse()
            .unwrap()
    }

    fn stop(mut self) -> Vec<Ending> {
        self.control(&Command::Stop);
        self.join()
    }

    fn join(mut self) -> Vec<Ending> {
        self.threads
            .drain(..)
            .map(|thread| thread.join().unwrap())
            .collect()
    }
}

fn take(rank: Rank, received: Received) -> Heard {
    let (header, body) = split_header(&received.message).unwrap();
    assert_eq!((header.epoch, header.rank), (EPOCH, rank));
    Heard {
        rank,
        call_id: header.call_id,
        event: decode_event(&header, body).unwrap(),
        blobs: received.blobs.iter().map(|blob| blob.to_vec()).collect(),
    }
}

fn say(heard: &Heard) -> Option<String> {
    match &heard.event {
        Event::RequestStarted { request_id } => Some(format!("{request_id} started")),
        Event::Step {
            request_id,
            n_done,
            n_steps,
        } => Some(format!("{request_id} step {n_done}/{n_steps}")),
        Event::RequestDone { request_id, outcome } => Some(match outcome {
            Ok(_) => format!("{request_id} done"),
            Err(failure) => format!("{request_id} {}", failure.code.as_str()),
        }),
        _ => None,
    }
}

fn data_call(method: &str, is_replying: bool) -> Command {
    Command::Call {
        method: method.to_owned(),
        args: BlobIdx(0),
        ranks: vec![Rank(0)],
        replying: if is_replying { vec![Rank(0)] } else { Vec::new() },
    }
}

fn control_call(method: &str, args: &[u8], is_replying: bool) -> Command {
    Command::ControlCall {
        method: method.to_owned(),
        args: args.to_vec(),
        is_replying,
    }
}

fn steps(wave_id: u64, joining: &[(u64, GenerateRequest)], continuing: &[u64], cancelled: &[u64]) -> Wave {
    step_wave(wave_id, &[0], joining, continuing, cancelled)
}

fn expected(request: &GenerateRequest) -> Vec<u8> {
    picture_of(request, Script::default().side_px).rgb
}

// ---- methods

#[test]
fn methods_are_told_with_their_lanes_when_the_worker_is_ready() {
    let world = World::start(&Script::default());
    let lane_of = |name: &str| {
        world
            .methods
            .iter()
            .find(|info| info.name == name)
            .map(|info| info.lane)
    };
    for name in ["echo", "rank", "add_adapter"] {
        assert_eq!(lane_of(name), Some(Lane::Data), "{name}");
    }
    for name in [
        "status",
        "memory",
        "progress",
        "profile_start",
        "profile_stop",
        "control_echo",
    ] {
        assert_eq!(lane_of(name), Some(Lane::Control), "{name}");
    }
    assert_eq!(lane_of("nothing"), None);
    assert_eq!(world.stop(), [Ending::Stopped]);
}

#[test]
fn methods_of_an_embedder_remember_and_reach_their_worker() {
    let registry = || {
        let mut n_calls = 0_u32;
        scripted_registry()
            .method("count", move |context, args| {
                n_calls += 1;
                Ok(format!("{} {n_calls} {}", context.rank(), args.len()).into_bytes())
            })
            .unwrap()
            .replace("echo", |_, args| Ok(args.iter().rev().copied().collect()))
            .unwrap()
    };
    let mut world = World::start_with(Script::default().config(), registry);
    assert_eq!(world.call("count", b"abc").unwrap(), b"0 1 3");
    assert_eq!(world.call("count", b"").unwrap(), b"0 2 0");
    assert_eq!(world.call("echo", b"abc").unwrap(), b"cba");
    // The program itself.
    world.call("add_adapter", b"ink").unwrap();
    assert_eq!(world.call("adapters", b"").unwrap(), b"ink");
    assert_eq!(world.stop(), [Ending::Stopped]);
}

#[test]
fn who_is_not_asked_for_a_result_sends_none_but_tells_of_a_failure() {
    let mut world = World::start(&Script::default());
    let call_id = world.send(&data_call("payload", false), &[b"1000000"]);
    assert_eq!(world.answer(call_id), Ok(None));
    let call_id = world.send(&data_call("fail", false), &[b"on purpose"]);
    assert_eq!(world.answer(call_id).unwrap_err().message, "on purpose");
    let call_id = world.control(&control_call("control_echo", b"abc", false));
    assert_eq!(world.answer(call_id), Ok(None));
    let call_id = world.control(&control_call("control_fail", b"on purpose", false));
    assert_eq!(world.answer(call_id).unwrap_err().message, "on purpose");
    assert_eq!(world.stop(), [Ending::Stopped]);
}

#[test]
fn unknown_methods_and_wrong_lanes_are_typed() {
    let mut world = World::start(&Script::default());
    let failure = world.call("nothing", b"").unwrap_err();
    assert_eq!(failure.code, FailureCode::InvalidRequest);
    assert!(failure.message.contains("`nothing`"), "{failure}");
    assert_eq!(
        world.ask("nothing", b"").unwrap_err().code,
        FailureCode::InvalidRequest
    );
    // Of the other lane.
    for failure in [
        world.call("progress", b"").unwrap_err(),
        world.ask("echo", b"").unwrap_err(),
    ] {
        assert_eq!(failure.code, FailureCode::Protocol);
        assert!(failure.message.contains("lane"), "{failure}");
        assert_eq!(failure.rank, Some(Rank(0)));
    }
    // Commands of the other lane.
    let call_id = world.send(&control_call("progress", b"", true), &[]);
    assert_eq!(world.answer(call_id).unwrap_err().code, FailureCode::Protocol);
    let call_id = world.control(&data_call("echo", true));
    assert_eq!(world.answer(call_id).unwrap_err().code, FailureCode::Protocol);
    assert_eq!(world.stop(), [Ending::Stopped]);
}

#[test]
fn a_panic_in_a_method_ends_the_rank_with_its_text_on_either_lane() {
    for lane in [Lane::Data, Lane::Control] {
        let mut world = World::start(&Script::default());
        let name = match lane {
            Lane::Data => {
                world.send(&data_call("panic", true), &[b"no such tensor"]);
                "panic"
            }
            Lane::Control => {
                world.control(&control_call("control_panic", b"no such tensor", true));
                "control_panic"
            }
        };
        let failure = world.dying();
        assert_eq!(failure.code, FailureCode::WorkerFailed);
        assert_eq!(
            failure.to_string(),
            format!("rank 0: panicked: no such tensor (during method `{name}`)")
        );
        assert_eq!(world.join(), [Ending::Failed(failure)]);
    }
}

#[test]
fn a_panic_beside_a_wave_is_told_at_once_and_ends_the_rank_at_the_next_step() {
    let mut world = World::start(&Script::with_steps_of(20));
    world.send(&Command::Execute(wave(1, &[0], &[(1, request(1, 1000))])), &[]);
    world.until_progress(|progress| matches!(progress.doing, Doing::Wave { .. }));
    world.control(&control_call("control_panic", b"beside", true));
    let failure = world.dying();
    assert!(failure.message.contains("beside"));
    assert_eq!(world.join(), [Ending::Failed(failure)]);
}

// ---- the control lane

#[test]
fn progress_and_status_are_answered_while_a_wave_runs() {
    let mut world = World::start(&Script::with_steps_of(20));
    assert_eq!(world.progress().doing, Doing::Nothing);
    let call_id = world.send(&Command::Execute(wave(7, &[0], &[(4, request(1, 500))])), &[]);
    let behind = world.send(&data_call("echo", true), &[b"later"]);
    let progress = world.until_progress(|progress| match &progress.doing {
        Doing::Wave { members, .. } => {
            progress.n_waiting == 1 && members.iter().any(|member| member.n_done >= 2)
        }
        _ => false,
    });
    assert_eq!((progress.rank, progress.last_call_id), (Rank(0), call_id));
    let Doing::Wave {
        wave_id,
        mode,
        members,
        ..
    } = &progress.doing
    else {
        panic!("{progress:?}");
    };
    assert_eq!((wave_id.0, *mode), (7, Mode::Request));
    assert!(matches!(
        members[..],
        [MemberProgress {
            request_id: RequestId(4),
            n_steps: 500,
            ..
        }]
    ));
    assert!(progress.since_ns < progress.moved_ns && progress.moved_ns <= progress.now_ns);
    // It gets on.
    let later = world.until_progress(|later| later.moved_ns > progress.moved_ns);
    assert_eq!(later.since_ns, progress.since_ns);
    let status = WorkerStatus::from_bytes(&world.ask("status", b"").unwrap()).unwrap();
    assert_eq!((status.n_waves, status.pid), (0, std::process::id()));
    assert!(world.end_of_or_none(4).is_none());
    let (_, message) = world.message_of(
        call_id,
        &Command::Cancel {
            requests: vec![RequestId(4)],
        },
    );
    world.end.as_ref().unwrap().control[0].send(&message).unwrap();
    assert_eq!(world.answer(behind), Ok(Some(b"later".to_vec())));
    assert_eq!(world.end_of(4).unwrap_err().code, FailureCode::Cancelled);
    let progress = world.until_progress(|progress| progress.doing == Doing::Nothing);
    assert_eq!((progress.last_call_id, progress.n_waiting), (behind, 0));
    // A method is shown by its name.
    world.send(&data_call("sleep", true), &[b"300"]);
    world.until_progress(|progress| {
        progress.doing
            == Doing::Method {
                name: "sleep".to_owned(),
            }
    });
    assert_eq!(world.stop(), [Ending::Stopped]);
}

impl World {
    fn end_of_or_none(&self, request_id: u64) -> Option<&Heard> {
        let is_end = |heard: &&Heard| matches!(&heard.event, Event::RequestDone { request_id: id, .. } if id.0 == request_id);
        self.heard.iter().find(is_end)
    }

    /// A message that belongs to an earlier call.
    fn message_of(&mut self, call_id: CallId, command: &Command) -> (CallId, Vec<u8>) {
        let next = std::mem::replace(&mut self.next_call, call_id.0);
        let message = self.message(command, 0);
        self.next_call = next;
        message
    }
}

#[test]
fn replies_of_both_lanes_belong_to_their_calls_whatever_their_size() {
    let mut world = World::start(&Script::with_steps_of(1));
    let wave_call = world.send(&Command::Execute(wave(1, &[0], &[(1, request(1, 200))])), &[]);
    // Larger than what travels in a record, up to half of the arena.
    let sizes = [0, 10, 70_000, 1_000_000];
    let calls: Vec<(CallId, usize)> = sizes
        .iter()
        .map(|n| {
            (
                world.control(&control_call("control_payload", n.to_string().as_bytes(), true)),
                *n,
            )
        })
        .collect();
    let too_large = world.control(&control_call("control_payload", b"3000000", true));
    for (call_id, n_bytes) in calls {
        assert_eq!(world.answer(call_id).unwrap().unwrap().len(), n_bytes);
    }
    let failure = world.answer(too_large).unwrap_err();
    assert_eq!(failure.code, FailureCode::OutOfMemory);
    assert_eq!(world.answer(wave_call), Ok(None));
    assert_eq!(world.end_of(1).unwrap(), expected(&request(1, 200)));
    assert_eq!(world.stop(), [Ending::Stopped]);
}

#[test]
fn a_profile_shows_where_the_time_went() {
    let mut world = World::start(&Script::with_steps_of(2));
    assert_eq!(
        world.ask("profile_stop", b"").unwrap_err().code,
        FailureCode::InvalidRequest
    );
    assert_eq!(world.ask("profile_start", b"").unwrap(), b"");
    assert_eq!(
        world.ask("profile_start", b"").unwrap_err().code,
        FailureCode::InvalidRequest
    );
    world.run(wave(1, &[0], &[(1, request(1, 3))]));
    world.run(steps(2, &[(2, request(2, 3)), (3, request(3, 3))], &[], &[]));
    world.call("sleep", b"5").unwrap();
    world.until_progress(|progress| progress.doing == Doing::Nothing);
    let profile = Profile::from_bytes(&world.ask("profile_stop", b"").unwrap()).unwrap();
    let count = |is_it: &dyn Fn(&Work) -> bool| profile.spans.iter().filter(|span| is_it(&span.work)).count();
    assert_eq!(
        count(&|work| matches!(
            work,
            Work::Wave {
                mode: Mode::Request,
                ..
            }
        )),
        1
    );
    assert_eq!(
        count(&|work| matches!(work, Work::Wave { mode: Mode::Step, .. })),
        1
    );
    assert_eq!(count(&|work| matches!(work, Work::Encode { .. })), 3);
    assert_eq!(count(&|work| matches!(work, Work::Decode { .. })), 1);
    let shared = Work::Step {
        members: vec![(RequestId(2), 0), (RequestId(3), 0)],
    };
    assert_eq!(count(&|work| *work == shared), 1);
    for step_idx in 0..3 {
        let alone = Work::Step {
            members: vec![(RequestId(1), step_idx)],
        };
        let span = profile.spans.iter().find(|span| span.work == alone).unwrap();
        assert!(span.duration_ns >= 2_000_000, "{span:?}");
    }
    let slept = profile
        .spans
        .iter()
        .find(|span| {
            span.work
                == Work::Method {
                    name: "sleep".to_owned(),
                }
        })
        .unwrap();
    assert!(slept.duration_ns >= 5_000_000);
    assert!(count(&|work| *work == Work::Wait) >= 3);
    assert_eq!(profile.n_dropped, 0);
    assert!(profile.begin_ns < slept.begin_ns && slept.begin_ns < profile.end_ns);
    assert_eq!(world.stop(), [Ending::Stopped]);
}

// ---- step mode

#[test]
fn requests_join_go_on_and_leave_between_steps() {
    let mut world = World::start(&Script::default());
    let (first, second, third) = (request(1, 3), request(2, 2), request(3, 9));
    assert_eq!(
        world.run(steps(1, &[(1, first.clone())], &[], &[])),
        ["1 started", "1 step 1/3"]
    );
    assert_eq!(
        world.run(steps(2, &[(2, second.clone()), (3, third)], &[1], &[])),
        ["2 started", "3 started", "1 step 2/3", "2 step 1/2", "3 step 1/9"]
    );
    // The last steps of both, and their pictures in the same wave.
    assert_eq!(
        world.run(steps(3, &[], &[1, 2, 3], &[])),
        ["1 step 3/3", "2 step 2/2", "3 step 2/9", "1 done", "2 done"]
    );
    assert_eq!(world.progress().residents.len(), 1);
    // A wave of cancels alone; what is not there is ignored.
    assert_eq!(world.run(steps(4, &[], &[], &[3, 1, 77])), ["3 cancelled"]);
    let failure = world.end_of(3).unwrap_err();
    assert_eq!(failure.to_string(), "rank 0: cancelled (during step 3 of 9)");
    assert_eq!(world.end_of(1).unwrap(), expected(&first));
    assert_eq!(world.end_of(2).unwrap(), expected(&second));
    assert_eq!(world.progress().residents, []);
    assert_eq!(world.device_memory(), BASE_BYTES);
    // An empty wave is answered too.
    assert_eq!(world.run(steps(5, &[], &[], &[])), [""; 0]);
    assert_eq!(world.stop(), [Ending::Stopped]);
}

#[test]
fn what_contradicts_earlier_waves_ends_its_request_and_no_other() {
    let mut world = World::start(&Script::default());
    world.run(steps(1, &[(1, request(1, 3)), (2, request(2, 3))], &[], &[]));
    // 9 was never begun; 1 was and joins again; 2 goes on as if nothing had happened.
    assert_eq!(
        world.run(steps(2, &[(1, request(5, 3))], &[9, 2, 1], &[])),
        ["9 protocol", "1 protocol", "2 step 2/3"]
    );
    assert!(
        world
            .end_of(9)
            .unwrap_err()
            .message
            .contains("no earlier wave began it")
    );
    assert!(
        world
            .end_of(1)
            .unwrap_err()
            .message
            .contains("an earlier wave began it")
    );
    assert_eq!(world.device_memory(), BASE_BYTES + REQUEST_BYTES);
    // A cancelled one does not go on, whatever else is said of it.
    assert_eq!(world.run(steps(3, &[], &[2], &[2])), ["2 cancelled"]);
    // Whole generations cannot be mixed with what goes on.
    world.run(steps(4, &[(3, request(3, 3))], &[], &[]));
    let mut mixed = wave(5, &[0], &[(4, request(4, 3))]);
    mixed.continuing = vec![RequestId(3)];
    for wave in [mixed, wave(6, &[0], &[(3, request(3, 3))])] {
        let call_id = world.send(&Command::Execute(wave), &[]);
        assert_eq!(world.answer(call_id).unwrap_err().code, FailureCode::Protocol);
        assert_eq!(world.said(call_id), [""; 0]);
    }
    // Beside them they can.
    assert_eq!(
        world.run(wave(7, &[0], &[(5, request(5, 1))])),
        ["5 started", "5 step 1/1", "5 done"]
    );
    world.run(steps(8, &[], &[3], &[]));
    world.run(steps(9, &[], &[3], &[]));
    assert_eq!(world.end_of(3).unwrap(), expected(&request(3, 3)));
    assert_eq!(world.stop(), [Ending::Stopped]);
}

#[test]
fn in_step_mode_only_the_wave_says_who_is_cancelled() {
    let mut world = World::start(&Script::default());
    let mut joining = steps(1, &[(1, request(1, 2))], &[], &[]);
    // A deadline that has passed, and a cancel that overtakes the wave; both are the engine's to obey.
    joining.joining[0].deadline_ns = 1;
    // That of the wave, after one question.
    let call_id = CallId(world.next_call + 1);
    let (_, cancel) = world.message_of(
        call_id,
        &Command::Cancel {
            requests: vec![RequestId(1)],
        },
    );
    world.end.as_ref().unwrap().control[0].send(&cancel).unwrap();
    world.ask("control_echo", b"the cancel was read").unwrap();
    let sent = world.send_until(&Command::Execute(joining), &[], now_ns().saturating_sub(1));
    assert_eq!((sent, world.answer(sent)), (call_id, Ok(None)));
    assert_eq!(world.said(sent), ["1 started", "1 step 1/2"]);
    // In mode request a deadline that has passed is refused by the worker.
    let late_wave = wave(2, &[0], &[(2, request(2, 2))]);
    let sent = world.send_until(&Command::Execute(late_wave), &[], 1);
    assert_eq!(
        world.answer(sent).unwrap_err().code,
        FailureCode::DeadlineExceeded
    );
    world.run(steps(3, &[], &[1], &[]));
    assert_eq!(world.end_of(1).unwrap(), expected(&request(1, 2)));
    assert_eq!(world.stop(), [Ending::Stopped]);
}

#[test]
fn a_stop_between_waves_drops_what_is_left_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let marker = folder.path().join("cleaned");
    let account = folder.path().join("device");
    let script = Script {
        cleanup_marker: Some(marker.clone()),
        device_account: Some(account.clone()),
        ..Script::default()
    };
    let mut world = World::start(&script);
    world.run(steps(1, &[(1, request(1, 5)), (2, request(2, 5))], &[], &[]));
    assert_eq!(device_bytes(&account), BASE_BYTES + 2 * REQUEST_BYTES);
    assert_eq!(world.stop(), [Ending::Stopped]);
    assert_eq!(std::fs::read_to_string(marker).unwrap(), "rank 0\n");
    assert_eq!(device_bytes(&account), 0);
}

#[test]
fn faults_strike_in_step_mode_as_in_whole_generations() {
    let text = || "as the script says".to_owned();
    // A request's own failure, in its second step or at its end, leaves the other alone.
    for (at, phase) in [(At::Step(1), Some("step 2 of 3")), (At::Decode, None)] {
        let script = Script::default().fault(None, at, What::Fail(FailureCode::NonFinite, text()));
        let mut world = World::start(&script);
        world.run(steps(1, &[(1, request(1, 3))], &[], &[]));
        world.run(steps(2, &[(2, request(2, 1))], &[1], &[]));
        if at == At::Decode {
            world.run(steps(3, &[], &[1], &[]));
        }
        let failure = world.end_of(1).unwrap_err();
        assert_eq!(
            (failure.code, failure.phase.as_deref()),
            (FailureCode::NonFinite, phase)
        );
        assert_eq!(world.device_memory(), BASE_BYTES);
        assert_eq!(world.stop(), [Ending::Stopped]);
    }
    // The rank's failure, or a panic, ends all that it has.
    let dooms = [
        What::FailRank(FailureCode::WorkerFailed, text()),
        What::Panic(text()),
    ];
    for what in dooms {
        let script = Script::default().fault(None, At::Step(1), what);
        let mut world = World::start(&script);
        world.run(steps(1, &[(1, request(1, 3)), (2, request(2, 3))], &[], &[]));
        world.send(&Command::Execute(steps(2, &[], &[1], &[])), &[]);
        let failure = world.dying();
        assert_eq!(failure.code, FailureCode::WorkerFailed);
        assert!(failure.message.contains("as the script says"), "{failure}");
        assert_eq!(world.end_of(1).unwrap_err(), failure);
        assert_eq!(world.join(), [Ending::Failed(failure)]);
    }
    // The wave's, each time.
    let script = Script::default().fault(None, At::Wave, What::Fail(FailureCode::OutOfMemory, text()));
    let mut world = World::start(&script);
    assert_eq!(
        world.run(steps(1, &[(1, request(1, 3))], &[], &[])),
        ["1 out_of_memory"]
    );
    assert_eq!(world.stop(), [Ending::Stopped]);
    // A broken promise is noticed, and the request is not waited for.
    let script = Script::default().fault(None, At::Step(1), What::Forget);
    let mut world = World::start(&script);
    world.run(steps(1, &[(1, request(1, 3))], &[], &[]));
    assert_eq!(world.run(steps(2, &[], &[1], &[])), ["1 internal"]);
    assert_eq!(world.run(steps(3, &[], &[1], &[])), ["1 protocol"]);
    assert_eq!(world.stop(), [Ending::Stopped]);
}

#[test]
fn adapters_belong_to_requests_and_the_wave_names_them_all() {
    let with = |adapters: &[(&str, f32)], seed| GenerateRequest {
        adapters: adapters
            .iter()
            .map(|(name, scale)| Adapter {
                name: (*name).to_owned(),
                scale: *scale,
            })
            .collect(),
        ..request(seed, 2)
    };
    let mut world = World::start(&Script::default());
    let inked = with(&[("ink", 0.5)], 1);
    assert_eq!(
        world.run(steps(1, &[(1, inked.clone())], &[], &[])),
        ["1 started", "1 invalid_request"]
    );
    assert_eq!(
        world.end_of(1).unwrap_err().message,
        "adapter `ink` is not loaded; this worker has []"
    );
    world.call("add_adapter", b"ink").unwrap();
    world.call("add_adapter", b"oil").unwrap();
    let oiled = with(&[("oil", 1.0), ("ink", 2.0)], 1);
    world.run(steps(2, &[(2, inked.clone()), (3, oiled.clone())], &[], &[]));
    let mut last = steps(3, &[], &[2, 3], &[]);
    last.adapters = vec!["oil".to_owned(), "ink".to_owned()];
    world.run(last);
    assert_eq!(world.end_of(2).unwrap(), expected(&inked));
    assert_eq!(world.end_of(3).unwrap(), expected(&oiled));
    assert_ne!(expected(&inked), expected(&oiled));
    assert_ne!(expected(&inked), expected(&request(1, 2)));
    // Whole generations give the same.
    world.run(wave(4, &[0], &[(4, inked.clone())]));
    assert_eq!(world.end_of(4).unwrap(), expected(&inked));
    // A wave that does not name them spoils the picture.
    world.run(steps(5, &[(5, inked.clone())], &[], &[]));
    world.run(steps(6, &[], &[5], &[]));
    assert_ne!(world.end_of(5).unwrap(), expected(&inked));
    assert_eq!(world.stop(), [Ending::Stopped]);
}

#[test]
fn ranks_that_meet_at_every_step_part_with_a_request_at_the_same_one() {
    const N_RANKS: u16 = 4;
    let folder = tempfile::tempdir().unwrap();
    let script = Script {
        meeting: Some(folder.path().to_owned()),
        ..Script::default()
    };
    let mut world = World::start_ranks(&script, N_RANKS);
    let ranks: Vec<u16> = (0..N_RANKS).collect();
    // Requests join and are cancelled while earlier waves are still under way: the ring holds several at once, and ranks are never
    // at the same point of it.
    let mut going_on: Vec<u64> = Vec::new();
    let mut calls = Vec::new();
    for round in 0..200u64 {
        let joining = [(round, request(round, 1000))];
        // By hand: of every three that joined, two are cancelled one to three waves later.
        let cancelled: Vec<u64> = going_on
            .iter()
            .copied()
            .filter(|id| id % 3 != 0 && id + 1 + id % 3 <= round)
            .collect();
        going_on.retain(|id| !cancelled.contains(id));
        // The oldest survivors leave too, so that waves stay small.
        let oldest: Vec<u64> = going_on.iter().copied().filter(|id| id + 12 <= round).collect();
        going_on.retain(|id| !oldest.contains(id));
        let cancelled = [cancelled, oldest].concat();
        let wave = step_wave(round, &ranks, &joining, &going_on, &cancelled);
        going_on.push(round);
        calls.push(world.send(&Command::Execute(wave), &[]));
    }
    for call_id in calls {
        let said: Vec<Vec<String>> = ranks
            .iter()
            .map(|rank| {
                assert_eq!(world.answer_of(call_id, Rank(*rank)), Ok(None));
                let of_rank = |heard: &&Heard| heard.call_id == call_id && heard.rank == Rank(*rank);
                world.heard.iter().filter(of_rank).filter_map(say).collect()
            })
            .collect();
        assert!(said.windows(2).all(|pair| pair[0] == pair[1]), "{said:?}");
    }
    assert_eq!(world.stop(), vec![Ending::Stopped; usize::from(N_RANKS)]);
}

#[test]
fn an_executor_that_is_gone_ends_the_worker_between_two_steps() {
    let mut world = World::start(&Script::default());
    world.run(steps(1, &[(1, request(1, 5))], &[], &[]));
    let (sender, receiver) = mpsc::channel();
    drop(world.end.take());
    let threads = std::mem::take(&mut world.threads);
    std::thread::spawn(move || {
        let endings: Vec<Ending> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let _ = sender.send(endings);
    });
    assert_eq!(receiver.recv().unwrap(), [Ending::ExecutorGone]);
}
