//! The data lane: start the program, then carry out one command after the other.

use crate::{
    Program, Start, WaveMember,
    context::Context,
    control::{Shared, Stop, serve_control},
    methods::{self, Counts},
    program::WaveSink,
    sink::{Reporter, Sink},
};
use denoised_link::{BootSender, DataReceiver, LinkError, Received, WorkerEnd};
use denoised_os::{Deadline, now_ns};
use denoised_types::{CallId, Failure, FailureCode, NamedTensor, RequestId};
use denoised_wire::{
    BlobIdx, BootUp, Command, Event, Header, Hello, Member, StartPhase, TensorMeta, Wave, decode_command,
    split_header,
};
use std::{
    any::Any,
    collections::VecDeque,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc},
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
pub fn serve(end: WorkerEnd, start: &mut dyn Start) -> Ending {
    serve_in(Home::Thread, end, start)
}

pub(crate) fn serve_in(home: Home, end: WorkerEnd, start: &mut dyn Start) -> Ending {
    let WorkerEnd {
        hello,
        boot,
        data,
        control,
        events,
    } = end;
    let interrupter = data.interrupter();
    let shared = Arc::new(Shared::new(hello.epoch, hello.rank, events, interrupter));
    let (weights_sender, weights) = mpsc::channel();
    let control_shared = Arc::clone(&shared);
    let spawned = std::thread::Builder::new()
        .name(format!("control {}", hello.rank))
        .spawn(move || serve_control(home, control, &control_shared, &weights_sender));
    let ending = match spawned {
        Ok(_) => serve_data(&hello, &shared, boot, data, &weights, start),
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

fn serve_data(
    hello: &Hello,
    shared: &Shared,
    boot: Box<dyn BootSender>,
    data: Box<dyn DataReceiver>,
    weights: &mpsc::Receiver<Option<OwnedFd>>,
    start: &mut dyn Start,
) -> Ending {
    // Whoever started this rank notices by itself if it is gone.
    let _ = boot.send(&BootUp::Phase(StartPhase::Attached), None);
    let mut context = Context {
        hello,
        shared,
        boot: &*boot,
        weights,
        last_progress: None,
    };
    let started = catch_unwind(AssertUnwindSafe(|| start.start(&mut context)));
    let (program, started) = match started.unwrap_or_else(|panic| Err(panicked("starting", &*panic))) {
        Ok(started) => started,
        Err(failure) => {
            let failure = if failure.rank.is_none() {
                failure.on_rank(hello.rank)
            } else {
                failure
            };
            let _ = boot.send(&BootUp::StartFailed(failure.clone()), None);
            return Ending::StartFailed(failure);
        }
    };
    let ready = BootUp::Ready {
        model: started.model,
        weight_bytes: started.weight_bytes,
        methods: Vec::new(),
    };
    if boot.send(&ready, None).is_err() {
        return Ending::ExecutorGone;
    }
    drop(boot);
    let counts = Counts {
        rank: hello.rank,
        n_threads: hello.config.n_threads,
        n_waves: 0,
        n_calls: 0,
    };
    let limit = Duration::from_millis(hello.event_send_limit_ms);
    let inbox = Inbox {
        data,
        queued: VecDeque::new(),
        failed: None,
    };
    let mut runner = Runner {
        shared,
        program,
        inbox,
        counts,
        limit,
    };
    let ending = runner.run();
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
    pub(crate) fn take_in(&mut self) {
        while self.failed.is_none() && self.queued.len() < MAX_QUEUED {
            match self.data.try_receive() {
                Ok(Some(received)) => self.queued.push_back(received),
                Ok(None) => return,
                Err(error) => self.failed = Some(error),
            }
        }
    }

    /// The next command, waiting for it.
    fn next(&mut self) -> Result<Received, LinkError> {
        match (self.queued.pop_front(), &self.failed) {
            (Some(received), _) => Ok(received),
            (None, Some(error)) => Err(error.clone()),
            (None, None) => self.data.receive(Deadline::after(LONG_WAIT)),
        }
    }
}

struct Runner<'a> {
    shared: &'a Shared,
    program: Box<dyn Program>,
    inbox: Inbox,
    counts: Counts,
    limit: Duration,
}

impl Runner<'_> {
    fn run(&mut self) -> Ending {
        loop {
            match self.shared.stop() {
                Stop::No => {}
                Stop::Asked => return self.refuse_the_rest(),
                Stop::Gone => return Ending::ExecutorGone,
            }
            let received = match self.inbox.next() {
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
        self.inbox.take_in();
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
            Ok(Some(bytes)) => reporter.send(
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
        if header.deadline_ns != 0 && now_ns() >= header.deadline_ns {
            let text = "the command's deadline passed before it was begun";
            return self.answer(
                header.call_id,
                Err(Failure::new(FailureCode::DeadlineExceeded, text)),
            );
        }
        match command {
            Command::Execute(wave) => self.run_wave(header, wave, received),
            Command::Call { method, args, .. } => self.call(header.call_id, &method, args, &received),
            Command::ControlCall { .. } | Command::Cancel { .. } | Command::Ping | Command::Stop => {
                let text = "a control command came on the data lane";
                self.answer(header.call_id, Err(Failure::new(FailureCode::Protocol, text)))
            }
        }
    }

    fn call(
        &mut self,
        call_id: CallId,
        method: &str,
        args: BlobIdx,
        received: &Received,
    ) -> Result<(), Failure> {
        let Some(args) = received.blob(args) else {
            let text = format!("the arguments of method `{method}` did not come with it");
            return self.answer(call_id, Err(Failure::new(FailureCode::Protocol, text)));
        };
        if method == methods::STEP_COST {
            self.counts.n_calls += 1;
            let times =
                methods::step_cost(args, &mut self.reporter(call_id)).map_err(|error| lost(&error))?;
            return self.answer(call_id, Ok(Some(times)));
        }
        let (counts, program) = (self.counts, &mut self.program);
        let called = catch_unwind(AssertUnwindSafe(|| {
            methods::call(counts, method, args).or_else(|| program.call(method, args))
        }));
        self.counts.n_calls += 1;
        let outcome = match called {
            Ok(Some(outcome)) => outcome.map(Some),
            Ok(None) => {
                let text = format!("this worker has no method `{method}`");
                Err(Failure::new(FailureCode::InvalidRequest, text))
            }
            Err(panic) => return Err(panicked(&format!("method `{method}`"), &*panic)),
        };
        self.answer(call_id, outcome)
    }

    fn run_wave(&mut self, header: Header, wave: Wave, mut received: Received) -> Result<(), Failure> {
        let rank = self.shared.rank;
        let request_ids: Vec<RequestId> = wave.joining.iter().map(|member| member.request_id).collect();
        let Self {
            shared,
            program,
            inbox,
            limit,
            ..
        } = self;
        let reporter = Reporter {
            shared,
            inbox,
            call_id: header.call_id,
            limit: *limit,
        };
        let mut sink = Sink::new(reporter, request_ids.iter().copied());
        let mut members = Vec::with_capacity(wave.joining.len());
        for member in wave.joining {
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
        let ran = match members.is_empty() {
            true => Ok(Ok(())),
            false => catch_unwind(AssertUnwindSafe(|| program.run_wave(members, &mut sink))),
        };
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
            if sink.open.contains(&request_id) {
                let text = "the program ended the wave without an outcome for this request";
                let failure = failed
                    .clone()
                    .unwrap_or_else(|| Failure::new(FailureCode::Internal, text));
                sink.end(request_id, Err(failure));
            }
        }
        let lost_to = sink.lost.take();
        self.counts.n_waves += 1;
        match (failed, lost_to) {
            (Some(failure), _) => Err(failure),
            (None, Some(error)) => Err(lost(&error)),
            (None, None) => self.answer(header.call_id, Ok(None)),
        }
    }
}

/// A member with its latents.
fn unpack(member: Member, received: &mut Received) -> Result<WaveMember, Failure> {
    let Member {
        request_id,
        mut request,
        latents,
        deadline_ns,
    } = member;
    if let Some(TensorMeta {
        name,
        dtype,
        shape,
        blob,
    }) = latents
    {
        let data = received.take_blob(blob).ok_or_else(|| {
            Failure::new(
                FailureCode::Protocol,
                "the request's latents did not come with it",
            )
        })?;
        let tensor = NamedTensor {
            name,
            dtype,
            shape,
            data,
        };
        if !tensor.is_consistent() {
            let text = format!(
                "latents of shape {:?} do not have {} bytes",
                tensor.shape,
                tensor.data.len()
            );
            return Err(Failure::new(FailureCode::InvalidRequest, text));
        }
        request.latents = Some(tensor);
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

fn panicked(doing: &str, panic: &(dyn Any + Send)) -> Failure {
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
