//! A running world: calls in flight by id, who waits for what, and the first cause of its failure.
//!
//! Knows nothing of how ranks live or die; `mp` and `uni` tell it who is gone.
//!
//! W1. There is no pump thread: whoever waits, pumps. One waiting thread at a time has the role of the pumper, sleeps on the event
//!     path and routes what arrives to everybody; the others are parked and take over when it leaves. So an answer to a lone
//!     caller costs one wake on each side, or none while both spin.
//! W2. Whoever changes something that the pumper may be waiting for interrupts it; whoever completes somebody else's call unparks
//!     that thread. Both are sticky, so neither is lost.
//! W3. Locks are taken in this order: gate of the data lane, events, state. None is held while user code runs.
//! W4. The first failure is latched together with failing everything that is in flight, in one step under one lock; nothing is
//!     accepted after it, so every member of every wave gets exactly one end.

use crate::{
    ExecutorError, ExecutorEvent, Health, Limits, MethodCall, RankReply, Ranks, Waker, WorldInfo,
    calls::{Call, OpenMethod, Pieces, PingCall, WaveCall},
    gate::Gate,
};
use denoised_link::{
    ControlSender, DataSender, EventReceiver, Evictor, ExecutorEnd, Interrupter, LinkError, RankSet,
    Received, Waiting,
};
use denoised_os::{Deadline, now_ns};
use denoised_types::{CallId, Failure, FailureCode, Rank, RequestId};
use denoised_wire::{
    BlobIdx, Command, Event, HEADER_BYTES, Header, MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Wave, decode_event,
    encode_command,
};
use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    ops::ControlFlow,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread::Thread,
    time::{Duration, Instant},
};

/// Requests per cancel message, so that each fits the control lane.
const CANCELS_PER_MESSAGE: usize = 1024;
/// Most events that wait for the engine; steps beyond it are not reported (ends always are).
const MAX_QUEUED_EVENTS: usize = 65_536;
/// Most times in a row that the event path is drained for ranks that have ended. Each time takes a thousand events of each rank, so
/// this is more than a ring of the largest size holds.
const MAX_DRAINS: usize = 1 << 15;
/// How old the news of a step may be: workers do not wake the executor for it. Ends and answers come at once.
const PROGRESS_DELAY: Duration = Duration::from_millis(20);
/// How long after a request's deadline the executor gives its worker to report it by itself.
const DEADLINE_GRACE: Duration = Duration::from_millis(500);

/// What was dropped, and what a world has done so far. For diagnosis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorldStats {
    /// Calls sent, waves and pings included.
    pub n_calls: u64,
    /// Events of calls that were over already: late answers.
    pub n_late_events: u64,
    /// Events without a header, of another epoch or rank, or that made no sense for their call.
    pub n_bad_events: u64,
    /// Steps that were not reported because the engine did not listen.
    pub n_dropped_steps: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Open,
    Closing,
    Closed,
}

pub(crate) struct World {
    info: WorldInfo,
    limits: Limits,
    all: RankSet,
    gate: Gate<Box<dyn DataSender>>,
    control: Vec<Box<dyn ControlSender>>,
    events: Mutex<Box<dyn EventReceiver>>,
    /// Threads that want the events' lock from the pumper.
    n_wanting_events: AtomicU32,
    interrupter: Interrupter,
    evictor: Evictor,
    next_call: AtomicU64,
    state: Mutex<State>,
    /// Told when a failure is latched, so that callbacks run and the rest is torn down.
    on_latched: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

type Callback = Box<dyn FnOnce(&Failure) + Send>;

struct State {
    life: Life,
    failure: Option<Failure>,
    callbacks: Vec<Callback>,
    calls: BTreeMap<CallId, Call>,
    /// For [`World::wait_events`].
    queue: VecDeque<ExecutorEvent>,
    engine: Option<Thread>,
    woken: bool,
    has_pumper: bool,
    parked: VecDeque<Thread>,
    /// What a rank said of its own end.
    dying: Vec<Option<Failure>>,
    /// What a rank has sent in pieces.
    pieces: Vec<Pieces>,
    /// When a rank was last heard of.
    heard_ns: Vec<u64>,
    gone: RankSet,
    stats: WorldStats,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    None,
    Pumper,
    Parked,
}

impl World {
    pub(crate) fn new(info: WorldInfo, limits: Limits, end: ExecutorEnd) -> Self {
        let ExecutorEnd {
            data,
            control,
            events,
            interrupter,
            evictor,
        } = end;
        let n_ranks = usize::from(info.world_size);
        let state = State {
            life: Life::Open,
            failure: None,
            callbacks: Vec::new(),
            calls: BTreeMap::new(),
            queue: VecDeque::new(),
            engine: None,
            woken: false,
            has_pumper: false,
            parked: VecDeque::new(),
            dying: vec![None; n_ranks],
            pieces: std::iter::repeat_with(Pieces::default).take(n_ranks).collect(),
            heard_ns: vec![now_ns(); n_ranks],
            gone: RankSet::EMPTY,
            stats: WorldStats::default(),
        };
        Self {
            all: RankSet::all(info.world_size),
            info,
            limits,
            gate: Gate::new(data),
            control,
            events: Mutex::new(events),
            n_wanting_events: AtomicU32::new(0),
            interrupter,
            evictor,
            next_call: AtomicU64::new(1),
            state: Mutex::new(state),
            on_latched: OnceLock::new(),
        }
    }

    /// Sets who is told of a latched failure; once.
    pub(crate) fn set_on_latched(&self, told: Box<dyn Fn() + Send + Sync>) {
        // A second setter would be this crate's own mistake; the first stays.
        let _ = self.on_latched.set(told);
    }

    pub(crate) fn info(&self) -> &WorldInfo {
        &self.info
    }

    pub(crate) fn stats(&self) -> WorldStats {
        self.lock().stats
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under the lock but allocation.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- Sending ----

    pub(crate) fn dispatch(&self, wave: Wave, deadline: Instant) -> Result<CallId, ExecutorError> {
        let deadline = moment(deadline);
        let to: RankSet = wave.ranks.iter().copied().collect();
        if to.is_empty() || !to.without(self.all).is_empty() || wave.ranks.iter().any(|rank| rank.0 >= 64) {
            return Err(self.no_such_rank(&format!("wave {} for ranks {:?}", wave.wave_id, wave.ranks)));
        }
        let mut wave = wave;
        let mut latents = Vec::new();
        for member in &mut wave.joining {
            member.latents = member.request.latents.take().map(|tensor| {
                // More members than blob indices do not fit the record either, which the link reports.
                let blob = BlobIdx(u16::try_from(latents.len()).unwrap_or(u16::MAX));
                latents.push(tensor.data);
                denoised_wire::TensorMeta {
                    name: tensor.name,
                    dtype: tensor.dtype,
                    shape: tensor.shape,
                    blob,
                }
            });
        }
        let blobs: Vec<&[u8]> = latents.iter().map(Vec::as_slice).collect();
        let call = Call::Wave(WaveCall::new(&wave, to, now_ns()));
        self.send(
            to,
            call,
            0,
            &Command::Execute(wave),
            &blobs,
            deadline,
            "dispatching a wave",
        )
    }

    pub(crate) fn cancel(&self, requests: &[RequestId]) -> Result<(), ExecutorError> {
        // The call travels along, so that a worker can tell a cancel that comes too late from one that overtook its wave.
        let mut wanted: Vec<(CallId, RankSet, Vec<RequestId>)> = Vec::new();
        {
            let state = self.lock();
            self.check_open(&state)?;
            for (&call_id, call) in &state.calls {
                let Call::Wave(wave) = call else { continue };
                let members: Vec<RequestId> = requests
                    .iter()
                    .copied()
                    .filter(|request_id| wave.is_open(*request_id))
                    .collect();
                if !members.is_empty() {
                    wanted.push((call_id, wave.ranks.without(wave.ended), members));
                }
            }
        }
        for (call_id, ranks, members) in wanted {
            for part in members.chunks(CANCELS_PER_MESSAGE) {
                let message = self.encode(
                    call_id,
                    0,
                    &Command::Cancel {
                        requests: part.to_vec(),
                    },
                );
                for rank in ranks.iter() {
                    self.send_control(rank, &message)
                        .map_err(|error| ExecutorError::Deadline {
                            what: format!("cancelling requests ({error})"),
                            silent: vec![rank],
                        })?;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn call(&self, call: &MethodCall<'_>) -> Result<Vec<RankReply>, ExecutorError> {
        let MethodCall {
            method,
            args,
            execute,
            ..
        } = *call;
        let deadline = moment(call.deadline);
        let to = match execute {
            Ranks::All => self.all,
            Ranks::One(rank) => RankSet::one(rank).and(self.all),
        };
        if to.is_empty() {
            return Err(self.no_such_rank(&format!("method `{method}` for {execute:?}")));
        }
        let what = format!("method `{method}`");
        if deadline.has_passed() {
            // What arrived is routed, so that polling in a loop makes progress; a command that no rank would begin is not sent.
            self.pump_if_free();
            self.check_open(&self.lock())?;
            return Err(ExecutorError::Deadline {
                what,
                silent: to.iter().collect(),
            });
        }
        let ranks: Vec<Rank> = to.iter().collect();
        let command = Command::Call {
            method: method.to_owned(),
            args: BlobIdx(0),
            replying: ranks.clone(),
            ranks,
        };
        let call = Call::Method(OpenMethod::new(method, to));
        let call_id = self.send(to, call, deadline.ns(), &command, &[args], deadline, &what)?;
        let answered = self.wait_for(deadline, |state| match state.calls.get(&call_id) {
            Some(Call::Method(call)) if !call.is_complete() && state.can_still_answer() => None,
            _ => Some(()),
        });
        let mut state = self.lock();
        let Some(Call::Method(call)) = state.calls.remove(&call_id) else {
            // Only a failure or the end of the world takes a call from its waiter.
            return Err(state.why_not_open());
        };
        if call.is_complete() || call.has_failed() {
            return call.into_result();
        }
        match answered {
            Some(()) => Err(state.why_not_open()),
            None => Err(ExecutorError::Deadline {
                what,
                silent: call.silent().iter().collect(),
            }),
        }
    }

    pub(crate) fn health(&self, limit: Duration) -> Health {
        let deadline = Deadline::after(limit);
        let call_id = CallId(self.next_call.fetch_add(1, Ordering::Relaxed));
        let ping = PingCall::new(self.all);
        {
            let mut state = self.lock();
            state.stats.n_calls += 1;
            if let Err(error) = self.check_open(&state) {
                return Health {
                    answered: Vec::new(),
                    silent: self.all.iter().collect(),
                    failure: Some(error.into()),
                };
            }
            state.calls.insert(call_id, Call::Ping(ping));
        }
        let message = self.encode(call_id, deadline.ns(), &Command::Ping);
        for rank in self.all.iter() {
            // A rank that cannot be reached stays silent.
            let _ = self.send_control(rank, &message);
        }
        self.wait_for(deadline, |state| match state.calls.get(&call_id) {
            Some(Call::Ping(ping)) if !ping.is_complete() && state.can_still_answer() => None,
            _ => Some(()),
        });
        let mut state = self.lock();
        let answered = match state.calls.remove(&call_id) {
            Some(Call::Ping(ping)) => ping.answered.without(state.gone),
            _ => RankSet::EMPTY,
        };
        Health {
            answered: answered.iter().collect(),
            silent: self.all.without(answered).iter().collect(),
            failure: state.failure.clone(),
        }
    }

    /// Registers the call and broadcasts its command; undone if it cannot be sent.
    #[expect(
        clippy::too_many_arguments,
        reason = "one private path for every data command"
    )]
    fn send(
        &self,
        to: RankSet,
        call: Call,
        deadline_ns: u64,
        command: &Command,
        blobs: &[&[u8]],
        deadline: Deadline,
        what: &str,
    ) -> Result<CallId, ExecutorError> {
        // While we wait for room, the ranks may be waiting for us to take their events.
        let mut idle = || {
            self.pump_if_free();
            if self.lock().can_still_answer() {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        };
        let Some(mut sender) = self.gate.enter(deadline, &mut idle) else {
            self.check_open(&self.lock())?;
            return Err(ExecutorError::Deadline {
                what: what.to_owned(),
                silent: Vec::new(),
            });
        };
        // Under the gate, so that calls reach the ranks in the order of their ids.
        let call_id = CallId(self.next_call.fetch_add(1, Ordering::Relaxed));
        {
            let mut state = self.lock();
            self.check_open(&state)?;
            state.stats.n_calls += 1;
            state.calls.insert(call_id, call);
        }
        let message = self.encode(call_id, deadline_ns, command);
        let sent = if message.len() > MAX_MESSAGE_BYTES {
            Err(LinkError::TooLarge {
                message_bytes: message.len() as u64,
                limit_bytes: MAX_MESSAGE_BYTES as u64,
                limited_by: "message without its tensors",
            })
        } else {
            sender.send(to, &message, blobs, deadline, &mut idle)
        };
        drop(sender);
        let Err(error) = sent else { return Ok(call_id) };
        let mut state = self.lock();
        // If it is gone, the world failed meanwhile and the call got its end; its caller must not hear of both.
        let was_there = state.calls.remove(&call_id).is_some();
        if !was_there && matches!(command, Command::Execute(_)) {
            return Ok(call_id);
        }
        self.check_open(&state)?;
        Err(match error {
            LinkError::TooLarge {
                message_bytes,
                limit_bytes,
                limited_by,
            } => ExecutorError::TooLarge {
                message_bytes,
                limit_bytes,
                limited_by,
            },
            LinkError::Full { laggard } => ExecutorError::Deadline {
                what: what.to_owned(),
                silent: laggard.into_iter().collect(),
            },
            error => ExecutorError::Failed(Failure::new(FailureCode::WorkerLost, error.to_string())),
        })
    }

    /// Tells every living rank to finish.
    pub(crate) fn send_stop(&self) {
        let message = self.encode(CallId(0), 0, &Command::Stop);
        let gone = self.lock().gone;
        for rank in self.all.without(gone).iter() {
            // A rank that does not listen is dealt with by signals.
            let _ = self.send_control(rank, &message);
        }
    }

    fn send_control(&self, rank: Rank, message: &[u8]) -> Result<(), LinkError> {
        match self.control.get(usize::from(rank.0)) {
            Some(control) => control.send(message),
            None => Err(LinkError::Closed),
        }
    }

    fn encode(&self, call_id: CallId, deadline_ns: u64, command: &Command) -> Vec<u8> {
        let epoch = self.info.epoch;
        let header = Header {
            version: PROTOCOL_VERSION,
            epoch,
            call_id,
            rank: Rank(0),
            deadline_ns,
        };
        let mut message = Vec::with_capacity(128);
        encode_command(&mut message, header, command);
        message
    }

    fn check_open(&self, state: &State) -> Result<(), ExecutorError> {
        if state.failure.is_none() && state.life == Life::Open {
            Ok(())
        } else {
            Err(state.why_not_open())
        }
    }

    fn no_such_rank(&self, what: &str) -> ExecutorError {
        let text = format!(
            "{what}: the world has ranks 0 to {}",
            self.info.world_size.saturating_sub(1)
        );
        let failure = Failure::new(FailureCode::InvalidRequest, text);
        ExecutorError::Rank {
            failure,
            succeeded: Vec::new(),
        }
    }

    // ---- Waiting ----

    pub(crate) fn wait_events(&self, until: Instant) -> Vec<ExecutorEvent> {
        let until = moment(until);
        self.lock().engine = Some(std::thread::current());
        loop {
            let timer = self.run_timers();
            let wait = timer.map_or(until, |timer| until.earlier(timer));
            let woken = self.wait_for(wait, |state| {
                let woken = std::mem::take(&mut state.woken);
                (woken || !state.queue.is_empty()).then_some(())
            });
            if woken.is_some() || until.has_passed() {
                return self.lock().queue.drain(..).collect();
            }
        }
    }

    pub(crate) fn waker(self: &Arc<Self>) -> Waker {
        let world = Arc::downgrade(self);
        Waker(Arc::new(move || {
            let Some(world) = world.upgrade() else { return };
            let engine = {
                let mut state = world.lock();
                state.woken = true;
                state.engine.clone()
            };
            if let Some(engine) = engine {
                engine.unpark();
            }
            world.interrupter.interrupt();
        }))
    }

    /// Waits until `check` finds something; `None` once the deadline has passed, after at least one look at what has arrived.
    fn wait_for<T>(&self, until: Deadline, mut check: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        let me = std::thread::current();
        let mut role = Role::None;
        let mut has_looked = false;
        loop {
            let has_waves = {
                let mut state = self.lock();
                let found = check(&mut state);
                if found.is_some() || (has_looked && until.has_passed()) {
                    if role == Role::Pumper {
                        state.has_pumper = false;
                    }
                    state.parked.retain(|thread| thread.id() != me.id());
                    // The role goes to the next, also if we were on our way to take it (W1).
                    let next = if state.has_pumper {
                        None
                    } else {
                        state.parked.pop_front()
                    };
                    drop(state);
                    if let Some(next) = next {
                        next.unpark();
                    }
                    return found;
                }
                if role != Role::Pumper {
                    if !state.has_pumper {
                        state.has_pumper = true;
                        state.parked.retain(|thread| thread.id() != me.id());
                        role = Role::Pumper;
                    } else if !state.parked.iter().any(|thread| thread.id() == me.id()) {
                        state.parked.push_back(me.clone());
                        role = Role::Parked;
                    }
                }
                state.calls.values().any(|call| matches!(call, Call::Wave(_)))
            };
            match role {
                // Steps of waves are sent without waking anybody.
                Role::Pumper if has_waves => self.pump(until.earlier(Deadline::after(PROGRESS_DELAY))),
                Role::Pumper => self.pump(until),
                Role::Parked | Role::None => std::thread::park_timeout(until.remaining()),
            }
            has_looked = true;
        }
    }

    /// The pumper's turn: waits for events and routes them.
    fn pump(&self, until: Deadline) {
        while self.n_wanting_events.load(Ordering::Acquire) > 0 {
            // Whoever wants the lock only drains and leaves.
            std::thread::sleep(Duration::from_micros(20));
        }
        let mut events = self.lock_events();
        match events.wait(until) {
            Waiting::Ready | Waiting::TimedOut => self.drain(&mut **events, self.all),
            Waiting::Interrupted => 0,
        };
    }

    /// Routes what has arrived, from a thread that is not the pumper.
    pub(crate) fn drain_from_outside(&self) {
        self.drain_all_of(RankSet::EMPTY);
    }

    /// As [`World::drain_from_outside`], and all that `ended`, ranks that send no more, have left.
    fn drain_all_of(&self, ended: RankSet) {
        self.n_wanting_events.fetch_add(1, Ordering::AcqRel);
        self.interrupter.interrupt();
        let mut events = self.lock_events();
        for _ in 0..MAX_DRAINS {
            if self.drain(&mut **events, ended) == 0 {
                break;
            }
        }
        drop(events);
        self.n_wanting_events.fetch_sub(1, Ordering::AcqRel);
        // The pumper may have got what it waits for.
        self.interrupter.interrupt();
    }

    /// Routes what has arrived, unless somebody else is at it.
    fn pump_if_free(&self) {
        let Ok(mut events) = self.events.try_lock() else {
            return;
        };
        if self.drain(&mut **events, self.all) > 0 {
            drop(events);
            self.interrupter.interrupt();
        }
    }

    fn lock_events(&self) -> MutexGuard<'_, Box<dyn EventReceiver>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Routes what has arrived, up to the event path's bound; returns how much of it came from the ranks in `counted`.
    fn drain(&self, events: &mut dyn EventReceiver, counted: RankSet) -> usize {
        let mut n_counted = 0;
        let mut count = |rank| n_counted += usize::from(counted.contains(rank));
        let drained = events.drain(&mut |rank, received| {
            count(rank);
            self.route(rank, received);
        });
        if let Err((rank, error)) = drained {
            count(rank);
            let text = format!("what the worker sent cannot be read: {error}");
            self.fence(Failure::new(FailureCode::Protocol, text).on_rank(rank));
        }
        n_counted
    }

    // ---- Routing ----

    fn route(&self, rank: Rank, received: Received) {
        let mut received = received;
        let Some((header, body)) = received.message.split_first_chunk::<HEADER_BYTES>() else {
            self.lock().stats.n_bad_events += 1;
            return;
        };
        let header = Header::from_bytes(header);
        if header.epoch != self.info.epoch || header.rank != rank {
            self.lock().stats.n_bad_events += 1;
            return;
        }
        // Of another version, too long or damaged: the header still says whose call it was to answer.
        let event = decode_event(&header, body);
        let event = event.unwrap_or_else(|error| {
            let text = format!("an event cannot be understood: {error}");
            Event::CallDone {
                outcome: Err(Failure::new(FailureCode::Protocol, text).on_rank(rank)),
            }
        });
        let mut state = self.lock();
        // A pong comes from the control thread and says nothing about the runner.
        if !matches!(event, Event::Pong) {
            state.heard_ns[usize::from(rank.0)] = now_ns();
        }
        if let Event::Dying(failure) = event {
            let failure = if failure.phase.is_none() {
                failure.during(state.doing(rank))
            } else {
                failure
            };
            state.dying[usize::from(rank.0)] = Some(failure.clone());
            // A rank that was told to stop may fail to clean up: that is in the report, not a failure of the world.
            if state.life == Life::Open {
                drop(state);
                self.fence(failure);
            }
            return;
        }
        state.route(header.call_id, rank, event, &mut received, &self.limits);
    }

    // ---- Failing ----

    /// Latches `failure` if it is the first, fails everything in flight, and has the rest torn down.
    pub(crate) fn fence(&self, failure: Failure) {
        let wake = {
            let mut state = self.lock();
            if state.failure.is_some() || state.life != Life::Open {
                return;
            }
            tracing::error!(code = failure.code.as_str(), %failure, "the world has failed");
            state.failure = Some(failure.clone());
            state.end_waves(&failure);
            state.queue.push_back(ExecutorEvent::WorldFailed(failure));
            state.everybody()
        };
        self.wake(wake);
        if let Some(told) = self.on_latched.get() {
            told();
        }
    }

    /// Rank `rank` has ended with this `status` (`killed by signal 9 (SIGKILL)`) and will never send again.
    pub(crate) fn rank_gone(&self, rank: Rank, status: &str, last_words: Option<&str>) {
        self.evictor.evict(rank);
        // What it sent before counts: results that are done, or its own words on why it dies.
        self.drain_all_of(RankSet::one(rank));
        let failure = {
            let mut state = self.lock();
            state.gone.insert(rank);
            let doing = state.doing(rank);
            let pid = self
                .info
                .pids
                .get(usize::from(rank.0))
                .map(|pid| format!(" {pid}"))
                .unwrap_or_default();
            match state.dying[usize::from(rank.0)].clone() {
                Some(said) => said.on_rank(rank),
                None => {
                    let words = last_words
                        .map(|words| format!("; its last words: {words}"))
                        .unwrap_or_default();
                    let text = format!("worker{pid} {status}{words}");
                    Failure::new(FailureCode::WorkerLost, text)
                        .on_rank(rank)
                        .during(doing)
                }
            }
        };
        self.fence(failure);
        // Health checks and closing waits look at who is gone.
        let everybody = self.lock().everybody();
        self.wake(everybody);
    }

    pub(crate) fn on_failure(&self, callback: Callback) {
        let failure = {
            let mut state = self.lock();
            match state.failure.clone() {
                Some(failure) => failure,
                None => {
                    state.callbacks.push(callback);
                    return;
                }
            }
        };
        callback(&failure);
    }

    /// Runs the callbacks that are registered, if the world has failed; true if it has.
    pub(crate) fn run_callbacks(&self) -> bool {
        let (failure, callbacks) = {
            let mut state = self.lock();
            let Some(failure) = state.failure.clone() else {
                return false;
            };
            (failure, std::mem::take(&mut state.callbacks))
        };
        for callback in callbacks {
            let called = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| callback(&failure)));
            if called.is_err() {
                tracing::error!("a failure callback panicked");
            }
        }
        true
    }

    /// Nothing new is accepted from here on; true if the world was open and well.
    pub(crate) fn begin_closing(&self) -> bool {
        let mut state = self.lock();
        let was_open = state.life == Life::Open && state.failure.is_none();
        if state.life == Life::Open {
            state.life = Life::Closing;
        }
        was_open
    }

    /// The ranks in `ended` are gone, the others were given up: ends what is still in flight.
    pub(crate) fn close(&self, ended: RankSet) {
        self.drain_all_of(ended);
        let wake = {
            let mut state = self.lock();
            state.life = Life::Closed;
            let text = "the executor was shut down";
            let failure = state
                .failure
                .clone()
                .unwrap_or_else(|| Failure::new(FailureCode::Closed, text));
            state.end_waves(&failure);
            state.everybody()
        };
        self.wake(wake);
    }

    fn wake(&self, threads: Vec<Thread>) {
        for thread in threads {
            thread.unpark();
        }
        self.interrupter.interrupt();
    }

    /// Ends requests whose deadline their worker ignores, and fences a world with a rank that is silent for too long. Returns the
    /// moment at which it wants to look again.
    fn run_timers(&self) -> Option<Deadline> {
        let now_ns = now_ns();
        let limit_ns = u64::try_from(self.limits.silence.as_nanos()).unwrap_or(u64::MAX);
        let mut next_ns: Option<u64> = None;
        let mut at = |ns: u64| next_ns = Some(next_ns.map_or(ns, |next| next.min(ns)));
        let mut hung = None;
        {
            let mut state = self.lock();
            let State {
                calls,
                queue,
                heard_ns,
                ..
            } = &mut *state;
            for call in calls.values_mut() {
                let Call::Wave(wave) = call else { continue };
                for rank in wave.ranks.without(wave.ended).iter() {
                    let silent_at_ns = heard_ns[usize::from(rank.0)]
                        .max(wave.sent_ns)
                        .saturating_add(limit_ns);
                    if now_ns >= silent_at_ns {
                        hung.get_or_insert(rank);
                    } else {
                        at(silent_at_ns);
                    }
                }
                if let Some(ns) = wave.expire(now_ns, DEADLINE_GRACE, queue) {
                    at(ns);
                }
            }
        }
        if let Some(rank) = hung {
            let doing = self.lock().doing(rank);
            let text = format!("the worker has reported nothing for {:?}", self.limits.silence);
            self.fence(
                Failure::new(FailureCode::WorkerLost, text)
                    .on_rank(rank)
                    .during(doing),
            );
            return None;
        }
        next_ns.map(Deadline::at_ns)
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("World");
        out.field("info", &self.info);
        if let Ok(state) = self.state.try_lock() {
            out.field("life", &state.life)
                .field("failure", &state.failure)
                .field("calls", &state.calls);
        }
        out.finish_non_exhaustive()
    }
}

impl State {
    /// Whether answers may still come.
    fn can_still_answer(&self) -> bool {
        self.failure.is_none() && self.life != Life::Closed
    }

    fn why_not_open(&self) -> ExecutorError {
        self.failure
            .clone()
            .map_or(ExecutorError::Closed, ExecutorError::Failed)
    }

    /// What `rank` is doing, in words.
    fn doing(&self, rank: Rank) -> String {
        let doing = self.calls.values().find_map(|call| call.doing(rank));
        doing.unwrap_or_else(|| "idle".to_owned())
    }

    /// Every thread that may wait here but the pumper, which is interrupted instead.
    fn everybody(&self) -> Vec<Thread> {
        let waiters = self.calls.values().filter_map(Call::waiter);
        waiters.chain(&self.engine).cloned().collect()
    }

    /// Ends all waves with `failure`.
    fn end_waves(&mut self, failure: &Failure) {
        let Self { calls, queue, .. } = self;
        calls.retain(|_, call| match call {
            Call::Wave(wave) => {
                wave.fail(failure, queue);
                false
            }
            // These have a waiting thread, which sees what happened.
            Call::Method(_) | Call::Ping(_) => true,
        });
    }

    fn route(&mut self, call_id: CallId, rank: Rank, event: Event, received: &mut Received, limits: &Limits) {
        let Self {
            calls,
            queue,
            pieces,
            stats,
            engine,
            ..
        } = self;
        let pieces = &mut pieces[usize::from(rank.0)];
        let Some(call) = calls.get_mut(&call_id) else {
            stats.n_late_events += 1;
            return;
        };
        let n_queued = queue.len();
        let (is_over, is_known) = match call {
            Call::Method(call) => (false, call.route(rank, event, received)),
            Call::Ping(ping) => (false, ping.route(rank, &event)),
            Call::Wave(wave) => {
                if let Event::Piece { of } = event {
                    if wave.is_expected_of(rank) {
                        pieces.take(call_id, of, received, limits.trace_bytes);
                    } else {
                        stats.n_bad_events += 1;
                    }
                    return;
                }
                if let Err(failure) = std::mem::take(pieces).put(call_id, received, limits.trace_bytes)
                    && let Event::Tensor { request_id, .. } | Event::RequestDone { request_id, .. } = event
                {
                    wave.spoil(request_id, failure.on_rank(rank));
                }
                if matches!(event, Event::Step { .. }) && n_queued >= MAX_QUEUED_EVENTS {
                    stats.n_dropped_steps += 1;
                    wave.note(&event);
                    return;
                }
                let is_known = wave.route(rank, event, received, limits, queue);
                (wave.is_over(), is_known)
            }
        };
        if !is_known {
            stats.n_bad_events += 1;
        }
        let me = std::thread::current().id();
        // The pumper looks for itself after routing; a call's own thread may be parked.
        if call.is_answered()
            && let Some(waiter) = call.waiter()
            && waiter.id() != me
        {
            waiter.unpark();
        }
        if queue.len() > n_queued
            && let Some(engine) = engine
            && engine.id() != me
        {
            engine.unpark();
        }
        if is_over {
            calls.remove(&call_id);
        }
    }
}

fn moment(instant: Instant) -> Deadline {
    let left = instant.saturating_duration_since(Instant::now());
    if left.is_zero() {
        Deadline::PASSED
    } else {
        Deadline::after(left)
    }
}
