//! The data lane: start the program, then carry out one command after the other.

use crate::{
    MethodContext, Program, Registry, Start, Started, StepWave, WaveMember,
    context::Context,
    control::{Shared, Stop, serve_control},
    program::WaveSink,
    registry::{ControlMethods, DataMethods},
    sink::{Reporter, Sink},
    step_plan::StepPlan,
};
use denoised_link::{BootSender, DataReceiver, LinkError, Received, WorkerEnd};
use denoised_os::{Deadline, now_ns};
use denoised_types::{CallId, Failure, FailureCode, Mode, RequestId, WaveId};
use denoised_wire::{
    BlobIdx, BootUp, Command, Event, Header, Hello, Member, StartPhase, Wave, decode_command, split_header,
};
use std::{
    any::Any,
    collections::{BTreeMap, HashMap, VecDeque},
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering, mpsc},
    time::Duration,
};

/// A wait without anything to wait for ends so often, for no other reason than to be bounded.
const LONG_WAIT: Duration = Duration::from_secs(3600);
/// Most commands that wait in the worker; after that the ring fills up, and the executor hears of it.
const MAX_QUEUED: usize = 256;
/// How long a failing rank tries to say why.
const DYING_LIMIT: Duration = Duration::from_secs(2);

/// Where a worker lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    /// In a process of its own, which may be ended.
    Process,
    /// On a thread of the supervisor.
    Thread,
}

/// How serving ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The executor said so, or TERM arrived; the program was dropped in order.
    Stopped,
    /// The program did not start; the executor knows why.
    StartFailed(Failure),
    /// The executor is gone.
    ExecutorGone,
    /// The program failed as a whole; the executor was told, if it could be reached.
    Failed(Failure),
}

/// Serves as a worker on the calling thread until told to stop: for executors that keep their worker in the supervisor's process.
/// A worker process calls [`crate::run`].
pub fn serve(end: WorkerEnd, registry: Registry) -> Ending {
    serve_in(Home::Thread, end, registry)
}

pub(crate) fn serve_in(home: Home, end: WorkerEnd, registry: Registry) -> Ending {
    let WorkerEnd {
        hello,
        boot,
        data,
        control,
        events,
    } = end;
    let interrupter = data.interrupter();
    let hello = Arc::new(hello);
    let shared = Arc::new(Shared::new(hello.epoch, hello.rank, events, interrupter));
    let (weights_sender, weights) = mpsc::channel();
    let methods = registry.methods();
    let Registry {
        start,
        data: data_methods,
        control: control_methods,
    } = registry;
    let control_methods = Arc::new(control_methods);
    let (methods_beside, infos) = (Arc::clone(&control_methods), methods.clone());
    let (control_hello, control_shared) = (Arc::clone(&hello), Arc::clone(&shared));
    let spawned = std::thread::Builder::new()
        .name(format!("control {}", hello.rank))
        .spawn(move || {
            let (hello, shared) = (&control_hello, &control_shared);
            serve_control(
                home,
                control,
                hello,
                shared,
                &methods_beside,
                &infos,
                &weights_sender,
            );
        });
    let ending = match spawned {
        Ok(_) => match start_program(&hello, &shared, &*boot, &weights, start) {
            Ok((program, started)) => {
                shared.activity.note_memory(started.memory);
                let ready = BootUp::Ready {
                    model: started.model,
                    device: started.device,
                    weight_bytes: started.weight_bytes,
                    methods,
                };
                // Whoever hears that it is ready may ask what it does.
                shared.activity.wait();
                match boot.send(&ready, None) {
                    Ok(()) => {
                        drop(boot);
                        serve_data(&hello, &shared, data, program, data_methods, &control_methods)
                    }
                    Err(_) => Ending::ExecutorGone,
                }
            }
            Err(failure) => {
                let _ = boot.send(&BootUp::StartFailed(failure.clone()), None);
                Ending::StartFailed(failure)
            }
        },
        Err(error) => {
            let failure = Failure::new(
                FailureCode::OutOfMemory,
                format!("cannot start a thread: {error}"),
            );
            let _ = boot.send(&BootUp::StartFailed(failure.clone()), None);
            Ending::StartFailed(failure)
        }
    };
    // The control thread ends by itself: at the latest when its lane does.
    shared.finish();
    ending
}

type StartedProgram = (Box<dyn Program>, Started);

fn start_program(
    hello: &Hello,
    shared: &Shared,
    boot: &dyn BootSender,
    weights: &mpsc::Receiver<Option<OwnedFd>>,
    mut start: Box<dyn Start>,
) -> Result<StartedProgram, Failure> {
    // Whoever started this rank notices by itself if it is gone.
    let _ = boot.send(&BootUp::Phase(StartPhase::Attached), None);
    let mut context = Context {
        hello,
        shared,
        boot,
        weights,
        last_progress: None,
    };
    let started = catch_unwind(AssertUnwindSafe(|| start.start(&mut context)));
    match started.unwrap_or_else(|panic| Err(panicked("starting", &*panic))) {
        Ok((program, started)) => Ok((program, started)),
        Err(failure) if failure.rank.is_none() => Err(failure.on_rank(hello.rank)),
        Err(failure) => Err(failure),
    }
}

fn serve_data(
    hello: &Hello,
    shared: &Shared,
    data: Box<dyn DataReceiver>,
    program: Box<dyn Program>,
    methods: DataMethods,
    control_methods: &ControlMethods,
) -> Ending {
    let limit = Duration::from_millis(hello.event_send_limit_ms);
    let inbox = Inbox {
        data,
        queued: VecDeque::new(),
        failed: None,
    };
    let mut runner = Runner {
        hello,
        shared,
        program,
        methods,
        control_methods,
        inbox,
        residents: BTreeMap::new(),
        limit,
    };
    let ending = runner.run();
    shared.activity.end();
    // Dropping the program is its clean-up; a panic there must not hide how the rank ended.
    let Runner { program, .. } = runner;
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(program))) {
        let failure = panicked("cleaning up", &*panic).on_rank(hello.rank);
        return if ending == Ending::Stopped {
            Ending::Failed(failure)
        } else {
            ending
        };
    }
    ending
}

/// Commands of the data lane that have been taken off it.
pub(crate) struct Inbox {
    data: Box<dyn DataReceiver>,
    queued: VecDeque<Received>,
    failed: Option<LinkError>,
}

impl Inbox {
    /// Takes in what is there now, up to the bound (R3).
    pub(crate) fn take_in(&mut self, shared: &Shared) {
        let n_before = self.queued.len();
        while self.failed.is_none() && self.queued.len() < MAX_QUEUED {
            match self.data.try_receive() {
                Ok(Some(received)) => self.queued.push_back(received),
                Ok(None) => break,
                Err(error) => self.failed = Some(error),
            }
        }
        if self.queued.len() != n_before {
            self.tell_length(shared);
        }
    }

    fn tell_length(&self, shared: &Shared) {
        // At most `MAX_QUEUED`.
        let n_waiting = self.queued.len() as u32;
        shared.activity.n_waiting.store(n_waiting, Ordering::Relaxed);
    }

    /// The next command, waiting for it.
    fn next(&mut self, shared: &Shared) -> Result<Received, LinkError> {
        match (self.queued.pop_front(), &self.failed) {
            (Some(received), _) => {
                self.tell_length(shared);
                Ok(received)
            }
            (None, Some(error)) => Err(error.clone()),
            (None, None) => self.data.receive(Deadline::after(LONG_WAIT)),
        }
    }
}

struct Runner<'a> {
    hello: &'a Hello,
    shared: &'a Shared,
    program: Box<dyn Program>,
    methods: DataMethods,
    control_methods: &'a ControlMethods,
    inbox: Inbox,
    /// Requests that waves in step mode began and that have not ended, with what the caller gets if it is more than the program knows.
    residents: BTreeMap<RequestId, Option<Failure>>,
    limit: Duration,
}

impl Runner<'_> {
    fn run(&mut self) -> Ending {
        loop {
            match self.shared.stop() {
                Stop::No => {}
                Stop::Asked => {
                    return match self.shared.fatal() {
                        // The control thread has said why.
                        Some(failure) => Ending::Failed(failure),
                        None => self.refuse_the_rest(),
                    };
                }
                Stop::Gone => return Ending::ExecutorGone,
            }
            self.shared.activity.wait();
            let received = match self.inbox.next(self.shared) {
                Ok(received) => received,
                // The loop's head sees why.
                Err(LinkError::TimedOut | LinkError::Interrupted) => continue,
                Err(LinkError::Closed) => return Ending::ExecutorGone,
                Err(error) => return self.die(Failure::new(FailureCode::Protocol, error.to_string())),
            };
            if let Err(failure) = self.carry_out(received) {
                return self.die(failure);
            }
        }
    }

    /// Answers what was received but not begun.
    fn refuse_the_rest(&mut self) -> Ending {
        self.inbox.take_in(self.shared);
        while let Some(received) = self.inbox.queued.pop_front() {
            if let Ok((header, _)) = split_header(&received.message)
                && header.epoch == self.shared.epoch
            {
                let failure = Failure::new(FailureCode::Closed, "the worker was told to stop");
                let _ = self.answer(header.call_id, Err(failure));
            }
        }
        Ending::Stopped
    }

    /// Says why the rank ends.
    fn die(&mut self, failure: Failure) -> Ending {
        let failure = if failure.rank.is_none() {
            failure.on_rank(self.shared.rank)
        } else {
            failure
        };
        self.limit = DYING_LIMIT;
        let _ = self.reporter(CallId(0)).send(&Event::Dying(failure.clone()), &[]);
        Ending::Failed(failure)
    }

    fn reporter(&mut self, call_id: CallId) -> Reporter<'_> {
        Reporter {
            shared: self.shared,
            inbox: &mut self.inbox,
            call_id,
            limit: self.limit,
        }
    }

    /// Ends a call.
    fn answer(&mut self, call_id: CallId, outcome: Result<Option<Vec<u8>>, Failure>) -> Result<(), Failure> {
        let rank = self.shared.rank;
        let failed = |failure: Failure| {
            let failure = if failure.rank.is_none() {
                failure.on_rank(rank)
            } else {
                failure
            };
            Event::CallDone {
                outcome: Err(failure),
            }
        };
        self.shared.call_ended(call_id);
        let mut reporter = self.reporter(call_id);
        let sent = match outcome {
            Ok(None) => reporter.send(&Event::CallDone { outcome: Ok(None) }, &[]),
            Ok(Some(bytes)) => reporter.send_in_pieces(
                &Event::CallDone {
                    outcome: Ok(Some(BlobIdx(0))),
                },
                &[&bytes],
            ),
            Err(failure) => reporter.send(&failed(failure), &[]),
        };
        match sent {
            Err(error @ LinkError::TooLarge { .. }) => {
                let failure = Failure::new(
                    FailureCode::OutOfMemory,
                    format!("the reply cannot be sent: {error}"),
                );
                reporter.send(&failed(failure), &[]).map_err(|error| lost(&error))
            }
            other => other.map_err(|error| lost(&error)),
        }
    }

    /// Carries out one command; the error is the rank's own.
    fn carry_out(&mut self, received: Received) -> Result<(), Failure> {
        let (header, body) = match split_header(&received.message) {
            Ok(split) => split,
            // Without a header there is no call to answer to; the executor's deadline ends it.
            Err(error) => {
                tracing::error!(%error, "data lane");
                return Ok(());
            }
        };
        if header.epoch != self.shared.epoch {
            return Ok(());
        }
        let command = match decode_command(&header, body) {
            Ok(command) => command,
            Err(error) => {
                return self.answer(
                    header.call_id,
                    Err(Failure::new(FailureCode::Protocol, error.to_string())),
                );
            }
        };
        self.shared.activity.begin(header.call_id);
        // Ranks that look at their clocks would not agree whether a step is done; the executor watches over its deadline.
        let is_step = matches!(&command, Command::Execute(wave) if wave.mode == Mode::Step);
        if !is_step && header.deadline_ns != 0 && now_ns() >= header.deadline_ns {
            let text = "the command's deadline passed before it was begun";
            return self.answer(
                header.call_id,
                Err(Failure::new(FailureCode::DeadlineExceeded, text)),
            );
        }
        match command {
            Command::Execute(wave) => match wave.mode {
                Mode::Request => self.run_wave(header, wave, received),
                Mode::Step => self.run_step(header, wave, received),
            },
            Command::Call {
                method,
                args,
                replying,
                ..
            } => {
                let is_replying = replying.contains(&self.shared.rank);
                self.call(header.call_id, &method, args, is_replying, &received)
            }
            Command::ControlCall { .. } | Command::Cancel { .. } | Command::Ping | Command::Stop => {
                let text = "a control command came on the data lane";
                self.answer(header.call_id, Err(Failure::new(FailureCode::Protocol, text)))
            }
        }
    }

    fn call(
        &mut self,
        call_id: CallId,
        name: &str,
        args: BlobIdx,
        is_replying: bool,
        received: &Received,
    ) -> Result<(), Failure> {
        let Some(args) = received.blob(args) else {
            let text = format!("the arguments of method `{name}` did not come with it");
            return self.answer(call_id, Err(Failure::new(FailureCode::Protocol, text)));
        };
        // The methods are taken out, since one of them borrows the rest of the rank.
        let mut methods = std::mem::take(&mut self.methods);
        let outcome = self.call_one(&mut methods, call_id, name, args);
        self.methods = methods;
        // What nobody asked for is dropped before anything is sent.
        let outcome = outcome?.map(|bytes| is_replying.then_some(bytes));
        self.answer(call_id, outcome)
    }

    /// Runs one method; the outer error is the rank's own.
    fn call_one(
        &mut self,
        methods: &mut DataMethods,
        call_id: CallId,
        name: &str,
        args: &[u8],
    ) -> Result<Result<Vec<u8>, Failure>, Failure> {
        let Some((name, _)) = methods.get_key_value(name) else {
            let failure = if self.control_methods.contains_key(name) {
                let text = format!("method `{name}` is of the control lane and was called on the data lane");
                Failure::new(FailureCode::Protocol, text)
            } else {
                let text = format!("this worker has no method `{name}`");
                Failure::new(FailureCode::InvalidRequest, text)
            };
            return Ok(Err(failure));
        };
        let name = Arc::clone(name);
        let Some(method) = methods.get_mut(&name) else {
            return Ok(Err(Failure::new(FailureCode::Internal, "a method has gone")));
        };
        self.shared.activity.begin_method(&name);
        let Self {
            hello,
            shared,
            program,
            inbox,
            limit,
            ..
        } = self;
        let mut context = MethodContext {
            hello,
            program: &mut **program,
            reporter: Reporter {
                shared,
                inbox,
                call_id,
                limit: *limit,
            },
            lost: None,
        };
        let called = catch_unwind(AssertUnwindSafe(|| method(&mut context, args)));
        let lost_to = context.lost;
        self.shared.activity.n_calls.fetch_add(1, Ordering::Relaxed);
        match (called, lost_to) {
            (Err(panic), _) => Err(panicked(&format!("method `{name}`"), &*panic)),
            (Ok(_), Some(error)) => Err(lost(&error)),
            (Ok(outcome), None) => Ok(outcome),
        }
    }

    fn run_wave(&mut self, header: Header, wave: Wave, received: Received) -> Result<(), Failure> {
        let is_new = |member: &Member| !self.residents.contains_key(&member.request_id);
        if !wave.continuing.is_empty() || !wave.cancelled.is_empty() || !wave.joining.iter().all(is_new) {
            let text = format!(
                "wave {} of whole generations names requests that earlier waves began",
                wave.wave_id
            );
            return self.answer(header.call_id, Err(Failure::new(FailureCode::Protocol, text)));
        }
        let request_ids: Vec<RequestId> = wave.joining.iter().map(|member| member.request_id).collect();
        let turn = Turn {
            header,
            wave_id: wave.wave_id,
            mode: Mode::Request,
            request_ids,
            refused: Vec::new(),
            broken: HashMap::new(),
        };
        self.take_turn(turn, wave.joining, received, |program, members, sink| {
            if members.is_empty() {
                return Ok(());
            }
            program.run_wave(members, sink)
        })
    }

    fn run_step(&mut self, header: Header, wave: Wave, received: Received) -> Result<(), Failure> {
        let Wave {
            wave_id,
            mode,
            joining,
            continuing,
            cancelled,
            adapters,
            ..
        } = wave;
        let plan = StepPlan::new(wave_id, &self.residents, joining, &continuing, &cancelled);
        let StepPlan {
            joining,
            continuing,
            cancelled,
            refused,
        } = plan;
        // A refused request that the program still holds is dropped by it, and ends as refused.
        let (held, unknown): (Vec<_>, Vec<_>) = refused
            .into_iter()
            .partition(|(request_id, _)| cancelled.contains(request_id));
        let mut request_ids = cancelled.clone();
        request_ids.extend(unknown.iter().map(|(request_id, _)| *request_id));
        request_ids.extend(&continuing);
        request_ids.extend(joining.iter().map(|member| member.request_id));
        let of_wave = |(request_id, broken): (&RequestId, &Option<Failure>)| {
            Some((*request_id, broken.clone()?)).filter(|(request_id, _)| request_ids.contains(request_id))
        };
        let mut broken: HashMap<RequestId, Failure> = self.residents.iter().filter_map(of_wave).collect();
        broken.extend(held);
        let turn = Turn {
            header,
            wave_id,
            mode,
            request_ids,
            refused: unknown,
            broken,
        };
        self.take_turn(turn, joining, received, |program, joining, sink| {
            let wave = StepWave {
                joining,
                continuing,
                cancelled,
                adapters,
            };
            if wave.joining.is_empty() && wave.continuing.is_empty() && wave.cancelled.is_empty() {
                return Ok(());
            }
            program.run_step(wave, sink)
        })
    }

    /// Carries out a wave with `compute`, and sees to it that each of its requests ends or stays.
    fn take_turn(
        &mut self,
        turn: Turn,
        joining: Vec<Member>,
        mut received: Received,
        compute: impl FnOnce(&mut dyn Program, Vec<WaveMember>, &mut Sink<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let Turn {
            header,
            wave_id,
            mode,
            request_ids,
            refused,
            broken,
        } = turn;
        let rank = self.shared.rank;
        let Self {
            shared,
            program,
            inbox,
            residents,
            limit,
            ..
        } = self;
        shared
            .activity
            .begin_wave(wave_id, mode, request_ids.iter().copied());
        let reporter = Reporter {
            shared,
            inbox,
            call_id: header.call_id,
            limit: *limit,
        };
        let mut sink = Sink::new(reporter, mode, request_ids.iter().copied(), broken);
        for (request_id, failure) in refused {
            sink.end(request_id, Err(failure));
        }
        let mut members = Vec::with_capacity(joining.len());
        for member in joining {
            let request_id = member.request_id;
            let unpacked = match sink.stop_reason(request_id, member.deadline_ns) {
                Some(failure) => Err(failure),
                None => unpack(member, &mut received),
            };
            match unpacked {
                Ok(member) => members.push(member),
                Err(failure) => sink.end(request_id, Err(failure)),
            }
        }
        // The blobs lie in the executor's arena: give them back before the long part.
        drop(received);
        let ran = catch_unwind(AssertUnwindSafe(|| compute(&mut **program, members, &mut sink)));
        let failed = match ran {
            Ok(Ok(())) => None,
            Ok(Err(failure)) => Some(failure),
            Err(panic) => Some(panicked("a wave", &*panic)),
        };
        let failed = failed.map(|failure| {
            if failure.rank.is_none() {
                failure.on_rank(rank)
            } else {
                failure
            }
        });
        // In the order of the wave, so that a failure is reported alike every time.
        for request_id in request_ids {
            residents.remove(&request_id);
            if !sink.open.contains(&request_id) {
                continue;
            }
            if failed.is_none() && sink.stepped.contains(&request_id) {
                let broken = sink.broken.get(&request_id).cloned();
                residents.insert(request_id, broken);
                continue;
            }
            let text = "the program ended the wave without an outcome for this request";
            let failure = failed
                .clone()
                .unwrap_or_else(|| Failure::new(FailureCode::Internal, text));
            sink.end(request_id, Err(failure));
        }
        let lost_to = sink.lost.take();
        shared.activity.n_waves.fetch_add(1, Ordering::Relaxed);
        match (failed, lost_to) {
            (Some(failure), _) => Err(failure),
            (None, Some(error)) => Err(lost(&error)),
            (None, None) => self.answer(header.call_id, Ok(None)),
        }
    }
}

/// A wave that is about to be carried out.
struct Turn {
    header: Header,
    wave_id: WaveId,
    mode: Mode,
    /// All that have to do with it.
    request_ids: Vec<RequestId>,
    /// Those that end before anything is computed, and why.
    refused: Vec<(RequestId, Failure)>,
    /// Those that the program knows and that end with this failure, whatever it says.
    broken: HashMap<RequestId, Failure>,
}

/// A member with the large parts of its request.
fn unpack(member: Member, received: &mut Received) -> Result<WaveMember, Failure> {
    let Member {
        request_id,
        mut request,
        blobs,
        deadline_ns,
    } = member;
    let mut blobs = blobs.into_iter();
    for part in request.large_parts() {
        let blob = blobs.next().and_then(|blob| received.take_blob(blob));
        *part = blob.ok_or_else(|| {
            let text = "a part of the request (latents, a picture or its mask) did not come with it";
            Failure::new(FailureCode::Protocol, text)
        })?;
    }
    if let Some(text) = request.inconsistency() {
        return Err(Failure::new(FailureCode::InvalidRequest, text));
    }
    Ok(WaveMember {
        request_id,
        request,
        deadline_ns,
    })
}

fn lost(error: &LinkError) -> Failure {
    Failure::new(
        FailureCode::Closed,
        format!("the executor cannot be reached: {error}"),
    )
}

pub(crate) fn panicked(doing: &str, panic: &(dyn Any + Send)) -> Failure {
    let text = match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text.as_str(),
        (None, None) => "no text",
    };
    Failure::new(FailureCode::WorkerFailed, format!("panicked: {text}")).during(doing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use denoised_types::Rank;

    #[test]
    fn a_panic_becomes_a_failure_with_its_text() {
        let panic = catch_unwind(|| panic!("step {}", 3)).unwrap_err();
        let failure = panicked("a wave", &*panic).on_rank(Rank(2));
        assert_eq!(failure.to_string(), "rank 2: panicked: step 3 (during a wave)");
    }
}
