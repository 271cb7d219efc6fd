//! The executor itself: threads, links, and the contract.

use crate::state::{Call, Callback, State, refused, replies_of};
use denoised_executor::{
    Capabilities, Executor, ExecutorError, ExecutorEvent, Health, Lane, LinkSpec, MethodCall, RankExit,
    RankReply, Ranks, ShutdownReport, Waker, Wave, WorldInfo,
};
use denoised_link::{
    ControlSender, DataSender, EventReceiver, ExecutorEnd, LinkError, RankSet, Waiting, local_link,
};
use denoised_os::{Deadline, now_ns};
use denoised_testkit::{
    process::small_link,
    script::{Script, scripted_registry},
};
use denoised_types::{CallId, Epoch, Failure, FailureCode, Rank, RequestId, WorkerConfig};
use denoised_wire::{
    BlobIdx, BootUp, Command, Event, HEADER_BYTES, Header, PROTOCOL_VERSION, decode_event, encode_command,
};
use std::{
    collections::BTreeSet,
    fmt,
    ops::ControlFlow,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// How long a worker may take to start.
const START_LIMIT_MS: u64 = 60_000;
/// How often a thread that reads events looks whether its worker is gone.
const LOOK_INTERVAL_MS: u64 = 20;

struct Threads {
    shared: Arc<Shared>,
    readers: Mutex<Vec<JoinHandle<()>>>,
    report: Mutex<Option<ShutdownReport>>,
}

struct Shared {
    info: WorldInfo,
    ranks: Vec<RankEnd>,
    /// Held while a command is sent, so that every rank gets them in one order.
    order: Mutex<u64>,
    next_question: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

struct RankEnd {
    data: Mutex<Box<dyn DataSender>>,
    control: Box<dyn ControlSender>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn start(n_workers: u16, script: &Script) -> Box<dyn Executor> {
    start_with(n_workers, script.config())
}

/// Workers that run the scripted program.
///
/// # Panics
/// One of them does not start.
pub(crate) fn start_with(n_workers: u16, config: WorkerConfig) -> Box<dyn Executor> {
    static EPOCHS: AtomicU32 = AtomicU32::new(1);
    let epoch = Epoch(EPOCHS.fetch_add(1, Ordering::Relaxed));
    let spec: LinkSpec = small_link();
    let config = WorkerConfig {
        n_threads: Some(1),
        ..config
    };
    let mut ranks = Vec::new();
    let mut events = Vec::new();
    let mut boots = Vec::new();
    for rank in (0..n_workers).map(Rank) {
        let (end, boot, mut worker) = local_link(spec, epoch, config.clone()).unwrap();
        // A local link is for one; who the worker is in this world is up to us.
        (worker.hello.rank, worker.hello.world_size) = (rank, n_workers);
        let thread = std::thread::spawn(move || denoised_worker::serve(worker, scripted_registry()));
        let ExecutorEnd {
            data,
            mut control,
            events: receiver,
            ..
        } = end;
        ranks.push(RankEnd {
            data: Mutex::new(data),
            control: control.remove(0),
        });
        events.push((receiver, thread));
        boots.push(boot);
    }
    let mut methods = Vec::new();
    for boot in boots {
        methods = loop {
            match boot.receive(Deadline::after_ms(START_LIMIT_MS)).unwrap() {
                BootUp::Ready { methods, .. } => break methods,
                BootUp::StartFailed(failure) => panic!("{failure}"),
                BootUp::Phase(_) | BootUp::PublishShared { .. } => {}
            }
        };
    }
    let shared = Arc::new(Shared {
        info: WorldInfo {
            kind: "threads",
            world_size: n_workers,
            replicas: (0..n_workers).map(|rank| vec![Rank(rank)]).collect(),
            epoch,
            model: None,
            devices: Vec::new(),
            weight_bytes: 0,
            pids: Vec::new(),
            methods,
            capabilities: Capabilities {
                is_isolated: false,
                defers_outputs: false,
                is_remote: false,
            },
        },
        ranks,
        // Questions on the control lane have ids of their own, far from those of commands.
        order: Mutex::new(0),
        next_question: AtomicU64::new(1 << 40),
        state: Mutex::new(State::default()),
        changed: Condvar::new(),
    });
    let read = |(rank, (receiver, thread)): (u16, (Box<dyn EventReceiver>, _))| {
        let shared = Arc::clone(&shared);
        std::thread::spawn(move || shared.read_events(Rank(rank), receiver, thread))
    };
    let readers = (0..).zip(events).map(read).collect();
    Box::new(Threads {
        shared,
        readers: Mutex::new(readers),
        report: Mutex::new(None),
    })
}

impl Shared {
    fn all(&self) -> BTreeSet<Rank> {
        (0..self.info.world_size).map(Rank).collect()
    }

    /// Takes the events of one rank until its worker has returned and all it left is read.
    fn read_events(
        &self,
        rank: Rank,
        mut receiver: Box<dyn EventReceiver>,
        worker: JoinHandle<denoised_worker::Ending>,
    ) {
        loop {
            let has_ended = worker.is_finished();
            let waited = receiver.wait(Deadline::after_ms(LOOK_INTERVAL_MS));
            let n_taken = receiver.drain(&mut |_, received| {
                let Some((header, body)) = received.message.split_first_chunk::<HEADER_BYTES>() else {
                    return;
                };
                let header = Header::from_bytes(header);
                let event = decode_event(&header, body).unwrap_or_else(|error| Event::CallDone {
                    outcome: Err(Failure::new(FailureCode::Protocol, error.to_string()).on_rank(rank)),
                });
                match event {
                    Event::Dying(failure) => self.fail(failure),
                    event => {
                        lock(&self.state).route(header.call_id, rank, event, received);
                        self.changed.notify_all();
                    }
                }
            });
            if has_ended && waited != Waiting::Ready && n_taken.is_ok_and(|n| n == 0) {
                break;
            }
        }
        let how = match worker.join() {
            Ok(ending) => format!("returned: {ending:?}"),
            Err(_) => "panicked".to_owned(),
        };
        lock(&self.state).gone.insert(rank);
        let text = format!("the worker's thread {how}");
        self.fail(Failure::new(FailureCode::WorkerLost, text).on_rank(rank));
        self.changed.notify_all();
    }

    /// First the state with everything in flight, then the callbacks, then the workers.
    fn fail(&self, failure: Failure) {
        let callbacks = {
            let mut state = lock(&self.state);
            if !state.fail(failure.clone()) {
                return;
            }
            std::mem::take(&mut state.callbacks)
        };
        self.changed.notify_all();
        for callback in callbacks {
            callback(&failure);
        }
        self.tell_to_stop();
    }

    fn tell_to_stop(&self) {
        let message = self.encode(CallId(0), 0, &Command::Stop);
        for rank in &self.ranks {
            // One that is gone has stopped.
            let _ = rank.control.send(&message);
        }
    }

    fn encode(&self, call_id: CallId, deadline_ns: u64, command: &Command) -> Vec<u8> {
        let header = Header {
            version: PROTOCOL_VERSION,
            epoch: self.info.epoch,
            call_id,
            rank: Rank(0),
            deadline_ns,
        };
        let mut message = Vec::new();
        encode_command(&mut message, header, command);
        message
    }

    /// Sends on the data lane of `to`. A rank that got a command which another cannot get any more would be out of step: that ends
    /// the world.
    fn send(
        &self,
        to: &BTreeSet<Rank>,
        message: &[u8],
        blobs: &[&[u8]],
        deadline: Deadline,
    ) -> Result<(), ExecutorError> {
        for (n_sent, rank) in to.iter().enumerate() {
            let mut idle = || match lock(&self.state).failure {
                None => ControlFlow::Continue(()),
                Some(_) => ControlFlow::Break(()),
            };
            let mut data = lock(&self.ranks[usize::from(rank.0)].data);
            // A local link knows its worker as rank 0.
            let sent = data.send(RankSet::one(Rank(0)), message, blobs, deadline, &mut idle);
            drop(data);
            let Err(error) = sent else { continue };
            lock(&self.state).check_open()?;
            if n_sent > 0 {
                let text = format!("a command reached only some ranks: {error}");
                self.fail(Failure::new(FailureCode::WorkerLost, text).on_rank(*rank));
            }
            return Err(error_of(error, *rank));
        }
        Ok(())
    }

    /// Waits until `check` says so; false at the deadline.
    fn wait(&self, until: Instant, mut check: impl FnMut(&mut State) -> bool) -> bool {
        let mut state = lock(&self.state);
        loop {
            if check(&mut state) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn ranks_of(&self, ranks: Ranks, what: &str) -> Result<BTreeSet<Rank>, ExecutorError> {
        match ranks {
            Ranks::All => Ok(self.all()),
            Ranks::One(rank) if rank.0 < self.info.world_size => Ok(BTreeSet::from([rank])),
            Ranks::One(rank) => Err(refused(format!("{what}: there is no rank {rank}"))),
        }
    }
}

fn error_of(error: LinkError, rank: Rank) -> ExecutorError {
    match error {
        LinkError::TooLarge {
            message_bytes,
            limit_bytes,
            limited_by,
        } => ExecutorError::TooLarge {
            message_bytes,
            limit_bytes,
            limited_by,
        },
        error => ExecutorError::Deadline {
            what: error.to_string(),
            silent: vec![rank],
        },
    }
}

fn moment(instant: Instant) -> Deadline {
    match instant.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Deadline::PASSED,
        left => Deadline::after(left),
    }
}

impl Executor for Threads {
    fn world(&self) -> WorldInfo {
        self.shared.info.clone()
    }

    fn dispatch(&self, wave: Wave, deadline: Instant) -> Result<CallId, ExecutorError> {
        let shared = &*self.shared;
        let mut wave = wave;
        let to: BTreeSet<Rank> = wave.ranks.iter().copied().collect();
        if to.is_empty() || !to.is_subset(&shared.all()) {
            return Err(refused(format!(
                "wave {} for ranks {:?}",
                wave.wave_id, wave.ranks
            )));
        }
        let mut blobs = Vec::new();
        for member in &mut wave.joining {
            member.blobs.clear();
            for part in member.request.large_parts() {
                member
                    .blobs
                    .push(BlobIdx(u16::try_from(blobs.len()).unwrap_or(u16::MAX)));
                blobs.push(std::mem::take(part));
            }
        }
        let mut last = lock(&shared.order);
        *last += 1;
        let call_id = CallId(*last);
        {
            let mut state = lock(&shared.state);
            state.check_open()?;
            state.admit(&mut wave, to.clone(), call_id)?;
        }
        let message = shared.encode(call_id, 0, &Command::Execute(wave.clone()));
        let blobs: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
        let sent = shared.send(&to, &message, &blobs, moment(deadline));
        let mut state = lock(&shared.state);
        if sent.is_err() && state.calls.remove(&call_id).is_some() {
            for member in &wave.joining {
                state.requests.remove(&member.request_id);
            }
            sent?;
        }
        Ok(call_id)
    }

    fn cancel(&self, requests: &[RequestId], _deadline: Instant) -> Result<(), ExecutorError> {
        let mut messages = Vec::new();
        {
            let state = lock(&self.shared.state);
            state.check_open()?;
            for (call_id, call) in &state.calls {
                let Call::Wave(wave) = call else { continue };
                let is_wanted = |id: &RequestId| state.is_cancellable(wave, *id);
                let requests: Vec<RequestId> = requests.iter().copied().filter(is_wanted).collect();
                if !requests.is_empty() {
                    let message = self.shared.encode(*call_id, 0, &Command::Cancel { requests });
                    messages.push((wave.silent.clone(), message));
                }
            }
        }
        for (ranks, message) in messages {
            for rank in ranks {
                let sent = self.shared.ranks[usize::from(rank.0)].control.send(&message);
                sent.map_err(|error| error_of(error, rank))?;
            }
        }
        Ok(())
    }

    fn wait_events(&self, until: Instant) -> Vec<ExecutorEvent> {
        loop {
            // Deadlines between waves are looked at now and then.
            let slice = until.min(Instant::now() + Duration::from_millis(20));
            let has_news = self.shared.wait(slice, |state| {
                state.expire(now_ns());
                std::mem::take(&mut state.is_woken) || !state.queue.is_empty()
            });
            if has_news || Instant::now() >= until {
                return lock(&self.shared.state).queue.drain(..).collect();
            }
        }
    }

    fn waker(&self) -> Waker {
        let shared = Arc::downgrade(&self.shared);
        Waker(Arc::new(move || {
            if let Some(shared) = shared.upgrade() {
                lock(&shared.state).is_woken = true;
                shared.changed.notify_all();
            }
        }))
    }

    fn call(&self, call: &MethodCall<'_>) -> Result<Vec<RankReply>, ExecutorError> {
        let shared = &*self.shared;
        let MethodCall {
            method,
            args,
            execute,
            reply,
            deadline,
        } = *call;
        let what = format!("method `{method}`");
        let executing = shared.ranks_of(execute, &what)?;
        let replying = match reply {
            None | Some(Ranks::All) => executing.clone(),
            Some(one) => shared.ranks_of(one, &what)?,
        };
        if let (Some(rank), Some(runs)) = (replying.difference(&executing).next(), executing.first()) {
            let text = format!("rank {rank} cannot reply to {what}: only rank {runs} runs it");
            return Err(refused(text));
        }
        let methods = &shared.info.methods;
        let Some(info) = methods.iter().find(|info| info.name == method) else {
            return Err(ExecutorError::UnknownMethod {
                method: method.to_owned(),
                known: methods.iter().map(|info| info.name.clone()).collect(),
            });
        };
        lock(&shared.state).check_open()?;
        if Instant::now() >= deadline {
            let silent = executing.into_iter().collect();
            return Err(ExecutorError::Deadline { what, silent });
        }
        let limit = moment(deadline);
        let open = Call::Method {
            replying: replying.clone(),
            silent: executing.clone(),
            answers: Vec::new(),
        };
        let call_id = match info.lane {
            Lane::Data => {
                let mut last = lock(&shared.order);
                *last += 1;
                let call_id = CallId(*last);
                lock(&shared.state).calls.insert(call_id, open);
                let command = Command::Call {
                    method: method.to_owned(),
                    args: BlobIdx(0),
                    ranks: executing.iter().copied().collect(),
                    replying: replying.iter().copied().collect(),
                };
                let message = shared.encode(call_id, limit.ns(), &command);
                if let Err(error) = shared.send(&executing, &message, &[args], limit) {
                    lock(&shared.state).calls.remove(&call_id);
                    return Err(error);
                }
                call_id
            }
            Lane::Control => {
                let call_id = CallId(shared.next_question.fetch_add(1, Ordering::Relaxed));
                lock(&shared.state).calls.insert(call_id, open);
                for rank in &executing {
                    let command = Command::ControlCall {
                        method: method.to_owned(),
                        args: args.to_vec(),
                        is_replying: replying.contains(rank),
                    };
                    let message = shared.encode(call_id, limit.ns(), &command);
                    if let Err(error) = shared.ranks[usize::from(rank.0)].control.send(&message) {
                        lock(&shared.state).calls.remove(&call_id);
                        return Err(error_of(error, *rank));
                    }
                }
                call_id
            }
        };
        shared.wait(deadline, |state| state.is_settled(call_id));
        let mut state = lock(&shared.state);
        let Some(Call::Method { silent, answers, .. }) = state.calls.remove(&call_id) else {
            state.check_open()?;
            return Err(ExecutorError::Closed);
        };
        if silent.is_empty() || answers.iter().any(|(_, answer)| answer.is_err()) {
            return replies_of(&replying, answers);
        }
        state.check_open()?;
        let silent = silent.into_iter().collect();
        Err(ExecutorError::Deadline { what, silent })
    }

    fn health(&self, limit: Duration) -> Health {
        let shared = &*self.shared;
        let call_id = CallId(shared.next_question.fetch_add(1, Ordering::Relaxed));
        let silent = shared.all();
        let is_open = {
            let mut state = lock(&shared.state);
            state.calls.insert(call_id, Call::Ping { silent });
            state.check_open().is_ok()
        };
        if is_open {
            let message = shared.encode(call_id, 0, &Command::Ping);
            for rank in &shared.ranks {
                // One that cannot be reached stays silent.
                let _ = rank.control.send(&message);
            }
            shared.wait(Instant::now() + limit, |state| state.is_settled(call_id));
        }
        let mut state = lock(&shared.state);
        let silent = match state.calls.remove(&call_id) {
            Some(Call::Ping { silent }) => silent,
            _ => shared.all(),
        };
        Health {
            answered: shared.all().difference(&silent).copied().collect(),
            silent: silent.into_iter().collect(),
            failure: state.failure.clone(),
        }
    }

    fn failure(&self) -> Option<Failure> {
        lock(&self.shared.state).failure.clone()
    }

    fn on_failure(&self, callback: Callback) {
        let failure = {
            let mut state = lock(&self.shared.state);
            match state.failure.clone() {
                Some(failure) => failure,
                None => return state.callbacks.push(callback),
            }
        };
        callback(&failure);
    }

    fn shutdown(&self, budget: Duration) -> ShutdownReport {
        // The first caller stops the world; the others wait for it here.
        let mut report = lock(&self.report);
        if let Some(report) = &*report {
            return report.clone();
        }
        let begin = Instant::now();
        lock(&self.shared.state).is_closing = true;
        self.shared.tell_to_stop();
        let all = self.shared.all();
        self.shared.wait(begin + budget, |state| state.gone == all);
        {
            let mut state = lock(&self.shared.state);
            state.end_all(&Failure::new(FailureCode::Closed, "the executor was shut down"));
        }
        self.shared.changed.notify_all();
        let gone = lock(&self.shared.state).gone.clone();
        for reader in lock(&self.readers).drain(..) {
            // A thread that is in a long step ends with it; nobody waits for that.
            if reader.is_finished() {
                let _ = reader.join();
            }
        }
        let exit = |rank: Rank| RankExit {
            rank,
            status: if gone.contains(&rank) {
                "returned"
            } else {
                "still running"
            }
            .to_owned(),
            means: "graceful",
            took: begin.elapsed(),
        };
        report
            .insert(ShutdownReport {
                ranks: all.iter().copied().map(exit).collect(),
            })
            .clone()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shutdown(Duration::from_secs(5));
    }
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads")
            .field("info", &self.shared.info)
            .finish_non_exhaustive()
    }
}
