//! The control lane: a thread that answers while the runner computes.

use crate::{
    ControlContext,
    activity::Activity,
    registry::ControlMethods,
    serve::{Home, panicked},
};
use denoised_link::{ControlInput, ControlReceiver, EventSender, Interrupter, LinkError};
use denoised_os::{Deadline, now_ns, process::exit_at_once};
use denoised_types::{CallId, Epoch, ExitCode, Failure, FailureCode, Rank, RequestId};
use denoised_wire::{
    BlobIdx, Command, Event, Header, Hello, MethodInfo, PROTOCOL_VERSION, decode_command, encode_event,
    split_header,
};
use std::{
    collections::HashSet,
    ops::ControlFlow,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, Ordering},
        mpsc,
    },
    time::Duration,
};

/// A wait without anything to wait for ends so often, for no other reason than to be bounded.
const LONG_WAIT: Duration = Duration::from_secs(3600);
/// While a stopped rank finishes, the control thread looks for its end this often.
const FINISHING_WAIT: Duration = Duration::from_millis(20);
/// How long an event of the control thread may wait for room.
const TELL_LIMIT: Duration = Duration::from_secs(1);
/// How long a process whose executor is gone may take to end by itself.
const GONE_GRACE: Duration = Duration::from_millis(500);
/// Most requests that are remembered as cancelled; far more than a world has under way.
const MAX_CANCELLED: usize = 65_536;

/// Why the rank shall end, if it shall. Only grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Stop {
    /// Go on.
    No = 0,
    /// Finish the step under way, answer, clean up.
    Asked = 1,
    /// Nobody is left to answer to.
    Gone = 2,
}

/// What runner and control thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) epoch: Epoch,
    pub(crate) rank: Rank,
    pub(crate) events: Arc<dyn EventSender>,
    pub(crate) activity: Activity,
    /// Why the rank cannot go on, if it failed on the control thread.
    fatal: Mutex<Option<Failure>>,
    stop: AtomicU8,
    finished: AtomicBool,
    interrupter: Interrupter,
    cancelled: Mutex<Cancelled>,
}

#[derive(Debug, Default)]
struct Cancelled {
    /// A cancel may overtake its wave on the data lane, so its call is remembered until a later or equal one has ended. Calls reach
    /// a rank in the order of their ids.
    requests: HashSet<(CallId, RequestId)>,
    last_ended: CallId,
}

impl Shared {
    pub(crate) fn new(
        epoch: Epoch,
        rank: Rank,
        events: Arc<dyn EventSender>,
        interrupter: Interrupter,
    ) -> Self {
        Self {
            epoch,
            rank,
            events,
            activity: Activity::new(rank),
            fatal: Mutex::default(),
            stop: AtomicU8::new(Stop::No as u8),
            finished: AtomicBool::new(false),
            interrupter,
            cancelled: Mutex::default(),
        }
    }

    pub(crate) fn stop(&self) -> Stop {
        match self.stop.load(Ordering::Acquire) {
            0 => Stop::No,
            1 => Stop::Asked,
            _ => Stop::Gone,
        }
    }

    pub(crate) fn ask_to_stop(&self, why: Stop) {
        self.stop.fetch_max(why as u8, Ordering::AcqRel);
        self.interrupter.interrupt();
    }

    /// The rank failed on the control thread (R4).
    fn fail(&self, failure: Failure) {
        self.fatal
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_with(|| failure.clone());
        self.tell(CallId(0), &Event::Dying(failure), &[]);
        self.ask_to_stop(Stop::Asked);
    }

    pub(crate) fn fatal(&self) -> Option<Failure> {
        self.fatal.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The runner has returned; the control thread may end.
    pub(crate) fn finish(&self) {
        self.finished.store(true, Ordering::Release);
    }

    fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }

    pub(crate) fn is_cancelled(&self, call_id: CallId, request_id: RequestId) -> bool {
        self.lock_cancelled().requests.contains(&(call_id, request_id))
    }

    fn cancel(&self, call_id: CallId, requests: Vec<RequestId>) {
        let mut cancelled = self.lock_cancelled();
        if call_id > cancelled.last_ended {
            let room = MAX_CANCELLED.saturating_sub(cancelled.requests.len());
            cancelled.requests.extend(
                requests
                    .into_iter()
                    .take(room)
                    .map(|request_id| (call_id, request_id)),
            );
        }
    }

    /// Forgets the cancels of this call and of those before it.
    pub(crate) fn call_ended(&self, call_id: CallId) {
        let mut cancelled = self.lock_cancelled();
        cancelled.last_ended = cancelled.last_ended.max(call_id);
        cancelled.requests.retain(|(of, _)| *of > call_id);
    }

    fn lock_cancelled(&self) -> MutexGuard<'_, Cancelled> {
        // Nothing that can panic runs under the lock.
        self.cancelled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends an event from the control thread.
    fn tell(&self, call_id: CallId, event: &Event, blobs: &[&[u8]]) {
        let message = self.encode(call_id, event);
        let sent = self
            .events
            .send(&message, blobs, Deadline::after(TELL_LIMIT), &mut || {
                ControlFlow::Continue(())
            });
        if let Err(error @ LinkError::TooLarge { .. }) = sent {
            let text = format!("the reply cannot be sent: {error}");
            let outcome = Err(Failure::new(FailureCode::OutOfMemory, text).on_rank(self.rank));
            self.tell(call_id, &Event::CallDone { outcome }, &[]);
        }
        // An executor that does not read its events finds the rank silent, which is the truth.
    }

    /// An encoded event of this rank.
    pub(crate) fn encode(&self, call_id: CallId, event: &Event) -> Vec<u8> {
        let header = Header {
            version: PROTOCOL_VERSION,
            epoch: self.epoch,
            call_id,
            rank: self.rank,
            deadline_ns: 0,
        };
        let mut message = Vec::with_capacity(64);
        encode_event(&mut message, header, event);
        message
    }
}

/// Serves the control lane until the rank has finished or nobody is left to serve.
pub(crate) fn serve_control(
    home: Home,
    mut control: Box<dyn ControlReceiver>,
    hello: &Hello,
    shared: &Shared,
    methods: &ControlMethods,
    infos: &[MethodInfo],
    weights: &mpsc::Sender<Option<OwnedFd>>,
) {
    let context = ControlContext { hello, shared };
    while !shared.is_finished() {
        let wait = if shared.stop() == Stop::No {
            LONG_WAIT
        } else {
            FINISHING_WAIT
        };
        match control.receive(Deadline::after(wait)) {
            Ok(ControlInput::Message(message)) => obey(&context, methods, infos, &message),
            Ok(ControlInput::Shared(fd)) => {
                // A runner that does not wait for weights has no use for them.
                let _ = weights.send(fd);
            }
            Ok(ControlInput::Terminate(signal)) => {
                // Before the runner refuses what it has under way, so that this is the first cause. An executor that sent the signal
                // itself is not interested.
                let text = format!("the worker was asked to end by signal {signal}");
                let failure = Failure::new(FailureCode::WorkerLost, text).on_rank(shared.rank);
                shared.tell(CallId(0), &Event::Dying(failure), &[]);
                shared.ask_to_stop(Stop::Asked);
            }
            Ok(ControlInput::Gone) => {
                shared.ask_to_stop(Stop::Gone);
                if home == Home::Process {
                    end_process_unless_finished(shared);
                }
                return;
            }
            Err(LinkError::TimedOut) => {}
            Err(error) => {
                // A damaged message is dropped: it has no readable call to answer to.
                tracing::warn!(%error, "control lane");
                // What the kernel refuses now it may refuse for ever.
                std::thread::sleep(FINISHING_WAIT);
            }
        }
    }
}

fn obey(context: &ControlContext<'_>, methods: &ControlMethods, infos: &[MethodInfo], message: &[u8]) {
    let shared = context.shared;
    let Ok((header, body)) = split_header(message) else {
        return;
    };
    if header.epoch != shared.epoch {
        return;
    }
    let answer = match decode_command(&header, body) {
        Ok(Command::Ping) => Event::Pong,
        Ok(Command::Cancel { requests }) => return shared.cancel(header.call_id, requests),
        Ok(Command::Stop) => return shared.ask_to_stop(Stop::Asked),
        Ok(Command::ControlCall {
            method,
            args,
            is_replying,
        }) => {
            let outcome = match call(context, methods, infos, &header, &method, &args) {
                Ok(outcome) => outcome,
                // The rank has said why it ends.
                Err(failure) => return shared.fail(failure),
            };
            return answer_call(shared, header.call_id, outcome, is_replying);
        }
        Ok(Command::Execute(_) | Command::Call { .. }) => {
            let text = "a data command came on the control lane";
            failed(Failure::new(FailureCode::Protocol, text).on_rank(shared.rank))
        }
        Err(error) => failed(Failure::new(FailureCode::Protocol, error.to_string()).on_rank(shared.rank)),
    };
    shared.tell(header.call_id, &answer, &[]);
}

fn failed(failure: Failure) -> Event {
    Event::CallDone {
        outcome: Err(failure),
    }
}

/// Runs a method of this lane; the outer error is the rank's own.
fn call(
    context: &ControlContext<'_>,
    methods: &ControlMethods,
    infos: &[MethodInfo],
    header: &Header,
    name: &str,
    args: &[u8],
) -> Result<Result<Vec<u8>, Failure>, Failure> {
    let Some(method) = methods.get(name) else {
        return Ok(Err(if infos.iter().any(|info| info.name == name) {
            let text = format!("method `{name}` is of the data lane and was called on the control lane");
            Failure::new(FailureCode::Protocol, text)
        } else {
            let text = format!("this worker has no method `{name}`");
            Failure::new(FailureCode::InvalidRequest, text)
        }));
    };
    if header.deadline_ns != 0 && now_ns() >= header.deadline_ns {
        let text = "the command's deadline passed before it was begun";
        return Ok(Err(Failure::new(FailureCode::DeadlineExceeded, text)));
    }
    let called = catch_unwind(AssertUnwindSafe(|| method(context, args)));
    context.shared.activity.n_calls.fetch_add(1, Ordering::Relaxed);
    called.map_err(|panic| panicked(&format!("method `{name}`"), &*panic).on_rank(context.shared.rank))
}

fn answer_call(shared: &Shared, call_id: CallId, outcome: Result<Vec<u8>, Failure>, is_replying: bool) {
    match outcome {
        Ok(bytes) if is_replying => {
            let outcome = Ok(Some(BlobIdx(0)));
            shared.tell(call_id, &Event::CallDone { outcome }, &[&bytes]);
        }
        Ok(_) => shared.tell(call_id, &Event::CallDone { outcome: Ok(None) }, &[]),
        Err(failure) => {
            let failure = if failure.rank.is_none() {
                failure.on_rank(shared.rank)
            } else {
                failure
            };
            shared.tell(call_id, &failed(failure), &[]);
        }
    }
}

/// The executor is gone: nobody would stop this process any more (R5).
fn end_process_unless_finished(shared: &Shared) {
    let grace = Deadline::after(GONE_GRACE);
    while !shared.is_finished() && !grace.has_passed() {
        std::thread::sleep(FINISHING_WAIT);
    }
    if !shared.is_finished() {
        // The runner may be stuck in a computation, or in a driver, that nothing else can end.
        exit_at_once(ExitCode::Worker as u8);
    }
}
