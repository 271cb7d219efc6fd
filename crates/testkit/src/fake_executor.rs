//! An executor without workers: it plays a script per request, in real time, and can misbehave on command.
//!
//! For tests of what stands above the executor contract. Knows nothing of processes, rings or models; a picture is one pixel
//! that shows the request's seed. In step mode the members of a wave take their steps at the same time.

use denoised_executor::{
    Capabilities, Executor, ExecutorError, ExecutorEvent, Health, MethodCall, Output, RankExit, RankReply,
    Ranks, ShutdownReport, Waker, WorldInfo,
};
use denoised_types::{
    CallId, Epoch, Failure, FailureCode, Generated, Image, Mode, PhaseTimes, Rank, RequestId, Resolved,
    WaveId,
};
use denoised_wire::{Lane, Member, MethodInfo, Wave};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// What becomes of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct FakeRun {
    /// Steps it takes.
    pub n_steps: u32,
    /// Time of each step.
    pub step_time: Duration,
    /// How it ends.
    pub end: FakeEnd,
    /// Whether it goes on when told to stop. In step mode: whether it is not reported when it is given up.
    pub is_deaf: bool,
}

impl Default for FakeRun {
    /// Two steps of no time, then the picture.
    fn default() -> Self {
        Self {
            n_steps: 2,
            step_time: Duration::ZERO,
            end: FakeEnd::Picture,
            is_deaf: false,
        }
    }
}

/// How a request ends.
#[derive(Clone, Debug, PartialEq)]
pub enum FakeEnd {
    /// With a picture; see [`picture`].
    Picture,
    /// With this failure.
    Fail(Failure),
    /// Not at all: the worker swallowed it. It still heeds a stop unless it is deaf. In step mode its last step does not end, and so
    /// neither does the wave.
    Never,
    /// Against the contract: its wave ends, the request does not. In step mode no wave brings its end.
    Forgotten,
    /// Against the contract: twice, and in request mode its wave twice.
    Twice,
}

/// What the fake was told, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FakeCall {
    /// A wave was dispatched.
    Dispatch {
        /// Which.
        wave_id: WaveId,
        /// Where.
        ranks: Vec<Rank>,
        /// Who joined.
        request_ids: Vec<RequestId>,
        /// Who went on.
        continuing: Vec<RequestId>,
        /// Who was given up.
        cancelled: Vec<RequestId>,
        /// Adapters of those who were computed.
        adapters: Vec<String>,
        /// Deadline of the first who joined, on the host's monotonic clock, in nanoseconds.
        deadline_ns: u64,
    },
    /// Requests were cancelled.
    Cancel(Vec<RequestId>),
    /// The world was shut down.
    Shutdown,
}

type Script = Box<dyn Fn(&Member) -> FakeRun + Send + Sync>;
type FailureCallback = Box<dyn FnOnce(&Failure) + Send>;

/// See the module's head.
pub struct FakeExecutor {
    world: WorldInfo,
    script: Script,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// What will be reported, by time and order.
    planned: BTreeMap<(Instant, u64), Planned>,
    n_planned: u64,
    open: BTreeMap<RequestId, Open>,
    /// Requests whose end was not reported, against the contract.
    forgotten: BTreeSet<RequestId>,
    waves: BTreeMap<WaveId, OpenWave>,
    misuses: Vec<String>,
    calls: Vec<FakeCall>,
    n_calls: u64,
    refusals: VecDeque<ExecutorError>,
    joining_refusals: VecDeque<ExecutorError>,
    /// How many may join in one message.
    max_joining: Option<usize>,
    callbacks: Vec<FailureCallback>,
    failure: Option<Failure>,
    report: Option<ShutdownReport>,
    is_woken: bool,
    is_panic_due: bool,
}

struct Open {
    run: FakeRun,
    begun: Instant,
    mode: Mode,
    seed: u64,
    rank: Rank,
    n_done: u32,
}

struct OpenWave {
    mode: Mode,
    rank: Rank,
    /// In request mode the wave ends with the last of them.
    members: Vec<RequestId>,
}

enum Planned {
    Event(ExecutorEvent),
    /// The request's end: its own event, then in request mode its wave's if it was the last.
    Done(RequestId, Option<Result<Output, Failure>>),
    /// A wave's end in step mode.
    WaveDone(WaveId),
}

/// The picture of a seed: one pixel, of the seed's three lowest bytes.
pub fn picture(seed: u64, n_steps: u32, rank: Rank) -> Generated {
    Generated {
        image: Image {
            width: 1,
            height: 1,
            n_frames: 1,
            rgb: seed.to_le_bytes()[..3].to_vec(),
        },
        tensors: Vec::new(),
        resolved: Resolved {
            width: 1,
            height: 1,
            n_frames: 1,
            n_steps,
            guidance: 1.0,
            seed,
            sampler: "fake".into(),
            warnings: Vec::new(),
        },
        rank,
        times: PhaseTimes::default(),
    }
}

impl FakeExecutor {
    /// `n_replicas` replicas of one rank each, where every request runs as [`FakeRun::default`] says.
    pub fn start(n_replicas: u16) -> Arc<Self> {
        Self::scripted(n_replicas, |_| FakeRun::default())
    }

    /// `n_replicas` replicas of one rank each, where a request runs as `script` says.
    pub fn scripted(
        n_replicas: u16,
        script: impl Fn(&Member) -> FakeRun + Send + Sync + 'static,
    ) -> Arc<Self> {
        let world = WorldInfo {
            kind: "fake",
            world_size: n_replicas,
            replicas: (0..n_replicas).map(|rank| vec![Rank(rank)]).collect(),
            epoch: Epoch(1),
            model: None,
            devices: Vec::new(),
            weight_bytes: 0,
            pids: Vec::new(),
            methods: vec![MethodInfo {
                name: "echo".into(),
                lane: Lane::Data,
            }],
            capabilities: Capabilities {
                is_isolated: false,
                defers_outputs: false,
                is_remote: false,
            },
        };
        Arc::new(Self {
            world,
            script: Box::new(script),
            shared: Arc::default(),
        })
    }

    /// Everything it was told so far.
    pub fn calls(&self) -> Vec<FakeCall> {
        self.lock().calls.clone()
    }

    /// What it refused since it was against the contract, in words; empty for a good engine.
    pub fn misuses(&self) -> Vec<String> {
        self.lock().misuses.clone()
    }

    /// Requests that were dispatched and have not been reported as done.
    pub fn n_open(&self) -> usize {
        self.lock().open.len()
    }

    /// Reports any event, sensible or not, as soon as possible.
    pub fn inject(&self, event: ExecutorEvent) {
        let mut state = self.lock();
        state.plan(Instant::now(), Planned::Event(event));
        self.shared.changed.notify_all();
    }

    /// The next dispatch is refused with `error`.
    pub fn refuse_next(&self, error: ExecutorError) {
        self.lock().refusals.push_back(error);
    }

    /// The next dispatch of a wave that somebody joins is refused with `error`.
    pub fn refuse_next_joining(&self, error: ExecutorError) {
        self.lock().joining_refusals.push_back(error);
    }

    /// From now on a wave that more than `max_joining` requests join is too large for a message.
    pub fn limit_joining(&self, max_joining: usize) {
        self.lock().max_joining = Some(max_joining);
    }

    /// The next [`Executor::wait_events`] panics.
    pub fn panic_next(&self) {
        self.lock().is_panic_due = true;
        self.shared.changed.notify_all();
    }

    /// The world fails as the contract says: every member, every wave, then the world.
    pub fn fail_world(&self, failure: Failure) {
        self.end_world(failure, true);
    }

    /// The world fails against the contract: without a word about its members and waves.
    pub fn fail_world_rudely(&self, failure: Failure) {
        self.end_world(failure, false);
    }

    fn end_world(&self, failure: Failure, is_polite: bool) {
        let mut state = self.lock();
        if state.failure.is_some() || state.report.is_some() {
            return;
        }
        state.failure = Some(failure.clone());
        state.end_members(&failure, is_polite);
        state.plan(
            Instant::now(),
            Planned::Event(ExecutorEvent::WorldFailed(failure.clone())),
        );
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        self.shared.changed.notify_all();
        callbacks.into_iter().for_each(|callback| callback(&failure));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn plan(&mut self, at: Instant, planned: Planned) {
        self.n_planned += 1;
        self.planned.insert((at, self.n_planned), planned);
    }

    fn usable(&self) -> Result<(), ExecutorError> {
        match (&self.failure, &self.report) {
            (Some(failure), _) => Err(ExecutorError::Failed(failure.clone())),
            (None, Some(_)) => Err(ExecutorError::Closed),
            (None, None) => Ok(()),
        }
    }

    fn end_members(&mut self, failure: &Failure, is_polite: bool) {
        self.planned.clear();
        let open: Vec<RequestId> = std::mem::take(&mut self.open).into_keys().collect();
        let waves: Vec<WaveId> = std::mem::take(&mut self.waves).into_keys().collect();
        if is_polite {
            let now = Instant::now();
            for request_id in open {
                let outcome = Err(failure.clone());
                self.plan(
                    now,
                    Planned::Event(ExecutorEvent::RequestDone { request_id, outcome }),
                );
            }
            for wave_id in waves {
                self.plan(now, Planned::Event(ExecutorEvent::WaveDone { wave_id }));
            }
        }
    }

    /// Refuses what a good engine does not do.
    fn inspect(&mut self, wave: &Wave) -> Result<(), ExecutorError> {
        let (wave_id, rank) = (wave.wave_id, wave.ranks.first().copied());
        let mut found = Vec::new();
        if self.waves.values().any(|open| Some(open.rank) == rank) {
            found.push(format!(
                "wave {wave_id} came before the last one on its ranks had ended"
            ));
        }
        for request_id in wave.joining.iter().map(|member| member.request_id) {
            if self.open.contains_key(&request_id) {
                found.push(format!("request {request_id} joined twice"));
            }
        }
        for request_id in wave.continuing.iter().chain(&wave.cancelled) {
            let is_here = self
                .open
                .get(request_id)
                .is_some_and(|open| Some(open.rank) == rank);
            if !is_here && !self.forgotten.contains(request_id) {
                found.push(format!(
                    "wave {wave_id} names request {request_id}, which is not here"
                ));
            }
        }
        if wave.mode == Mode::Request && !(wave.continuing.is_empty() && wave.cancelled.is_empty()) {
            found.push(format!("wave {wave_id} goes on in request mode"));
        }
        let Some(first) = found.first() else {
            return Ok(());
        };
        let failure = Failure::new(FailureCode::InvalidRequest, first.clone());
        self.misuses.extend(found);
        Err(ExecutorError::Refused(failure))
    }

    fn begin(&mut self, wave: &Wave, script: &Script) {
        let rank = wave.ranks.first().copied().unwrap_or_default();
        let (mode, now) = (wave.mode, Instant::now());
        for &request_id in &wave.cancelled {
            if self.open.get(&request_id).is_some_and(|open| !open.run.is_deaf) {
                let failure = Failure::new(FailureCode::Cancelled, "given up between two steps");
                self.plan(now, Planned::Done(request_id, Some(Err(failure))));
            }
        }
        for member in &wave.joining {
            let request_id = member.request_id;
            self.plan(
                now,
                Planned::Event(ExecutorEvent::RequestStarted { request_id, rank }),
            );
            let open = Open {
                run: script(member),
                begun: now,
                mode,
                seed: member.request.seed,
                rank,
                n_done: 0,
            };
            self.open.insert(request_id, open);
        }
        let members: Vec<RequestId> = wave.request_ids().collect();
        let open = OpenWave {
            mode,
            rank,
            members: members.clone(),
        };
        self.waves.insert(wave.wave_id, open);
        let mut is_endless = false;
        let mut end = now;
        for request_id in members {
            match self.advance(wave.wave_id, request_id, now) {
                Some(at) => end = end.max(at),
                None => is_endless = true,
            }
        }
        if mode == Mode::Step && !is_endless {
            self.plan(end, Planned::WaveDone(wave.wave_id));
        }
    }

    /// Plans what a request does in a wave: one step or all of them. Returns when it will be done with that.
    fn advance(&mut self, wave_id: WaveId, request_id: RequestId, now: Instant) -> Option<Instant> {
        let Some(open) = self.open.get_mut(&request_id) else {
            return Some(now);
        };
        let FakeRun {
            n_steps,
            step_time,
            ref end,
            ..
        } = open.run;
        let end = end.clone();
        let (mode, seed, rank, first) = (open.mode, open.seed, open.rank, open.n_done + 1);
        let last = match mode {
            Mode::Request => n_steps,
            Mode::Step => first.min(n_steps),
        };
        open.n_done = last;
        for n_done in first..=last {
            let step = ExecutorEvent::Step {
                request_id,
                n_done,
                n_steps,
            };
            self.plan(now + step_time * (n_done - first + 1), Planned::Event(step));
        }
        let at = now + step_time * (last + 1 - first.min(last + 1));
        if last < n_steps {
            return Some(at);
        }
        let done = || Output::from(picture(seed, n_steps, rank));
        match end {
            FakeEnd::Picture => self.plan(at, Planned::Done(request_id, Some(Ok(done())))),
            FakeEnd::Fail(failure) => self.plan(at, Planned::Done(request_id, Some(Err(failure)))),
            FakeEnd::Never => return None,
            FakeEnd::Forgotten => {
                self.forgotten.insert(request_id);
                self.plan(at, Planned::Done(request_id, None));
            }
            FakeEnd::Twice => {
                self.plan(at, Planned::Done(request_id, Some(Ok(done()))));
                let outcome = Ok(done());
                self.plan(
                    at,
                    Planned::Event(ExecutorEvent::RequestDone { request_id, outcome }),
                );
                if mode == Mode::Request {
                    self.plan(at, Planned::Event(ExecutorEvent::WaveDone { wave_id }));
                }
            }
        }
        Some(at)
    }

    /// Ends a request at its next step boundary, as a worker does.
    fn stop(&mut self, request_id: RequestId) {
        let Some(Open { run, begun, mode, .. }) = self.open.get(&request_id) else {
            return;
        };
        // In step mode only a wave gives requests up.
        if run.is_deaf || *mode == Mode::Step {
            return;
        }
        let now = Instant::now();
        let passed = now.saturating_duration_since(*begun);
        let n_begun = passed
            .as_nanos()
            .checked_div(run.step_time.as_nanos())
            .unwrap_or(0)
            + 1;
        let boundary = *begun + run.step_time * u32::try_from(n_begun).unwrap_or(u32::MAX);
        let is_kept = |(at, _): &(Instant, u64), planned: &Planned| match planned {
            Planned::Done(done, _) => *done != request_id,
            Planned::Event(ExecutorEvent::Step {
                request_id: stepped, ..
            }) => *stepped != request_id || *at < boundary,
            Planned::Event(_) | Planned::WaveDone(_) => true,
        };
        self.planned.retain(|at, planned| is_kept(at, planned));
        let failure = Failure::new(FailureCode::Cancelled, "stopped between two steps");
        self.plan(boundary.max(now), Planned::Done(request_id, Some(Err(failure))));
    }

    /// What has happened by now.
    fn due(&mut self) -> Vec<ExecutorEvent> {
        let now = Instant::now();
        let mut events = Vec::new();
        while let Some(first) = self.planned.first_entry() {
            if first.key().0 > now {
                break;
            }
            match first.remove() {
                Planned::Event(event) => events.push(event),
                Planned::Done(request_id, outcome) => {
                    self.open.remove(&request_id);
                    if let Some(outcome) = outcome {
                        events.push(ExecutorEvent::RequestDone { request_id, outcome });
                    }
                    let open = &self.open;
                    self.waves.retain(|&wave_id, wave| {
                        let is_over = wave.mode == Mode::Request
                            && wave.members.contains(&request_id)
                            && wave.members.iter().all(|id| !open.contains_key(id));
                        if is_over {
                            events.push(ExecutorEvent::WaveDone { wave_id });
                        }
                        !is_over
                    });
                }
                Planned::WaveDone(wave_id) => {
                    self.waves.remove(&wave_id);
                    events.push(ExecutorEvent::WaveDone { wave_id });
                }
            }
        }
        events
    }
}

impl Executor for FakeExecutor {
    fn world(&self) -> WorldInfo {
        self.world.clone()
    }

    fn dispatch(&self, wave: Wave, _deadline: Instant) -> Result<CallId, ExecutorError> {
        let mut state = self.lock();
        state.usable()?;
        if let Some(error) = state.refusals.pop_front() {
            return Err(error);
        }
        if !wave.joining.is_empty()
            && let Some(error) = state.joining_refusals.pop_front()
        {
            return Err(error);
        }
        if let Some(max_joining) = state.max_joining
            && wave.joining.len() > max_joining
        {
            return Err(ExecutorError::TooLarge {
                message_bytes: wave.joining.len() as u64,
                limit_bytes: max_joining as u64,
                limited_by: "requests that join",
            });
        }
        state.inspect(&wave)?;
        state.calls.push(FakeCall::Dispatch {
            wave_id: wave.wave_id,
            ranks: wave.ranks.clone(),
            request_ids: wave.joining.iter().map(|member| member.request_id).collect(),
            continuing: wave.continuing.clone(),
            cancelled: wave.cancelled.clone(),
            adapters: wave.adapters.clone(),
            deadline_ns: wave.joining.first().map_or(0, |member| member.deadline_ns),
        });
        state.begin(&wave, &self.script);
        state.n_calls += 1;
        self.shared.changed.notify_all();
        Ok(CallId(state.n_calls))
    }

    fn cancel(&self, requests: &[RequestId], _deadline: Instant) -> Result<(), ExecutorError> {
        let mut state = self.lock();
        state.usable()?;
        state.calls.push(FakeCall::Cancel(requests.to_vec()));
        requests.iter().for_each(|request_id| state.stop(*request_id));
        self.shared.changed.notify_all();
        Ok(())
    }

    fn wait_events(&self, until: Instant) -> Vec<ExecutorEvent> {
        let mut state = self.lock();
        loop {
            if std::mem::take(&mut state.is_panic_due) {
                drop(state);
                panic!("the fake executor was told to panic");
            }
            let events = state.due();
            let now = Instant::now();
            if std::mem::take(&mut state.is_woken) || !events.is_empty() || now >= until {
                return events;
            }
            let next = state
                .planned
                .first_key_value()
                .map_or(until, |((at, _), _)| until.min(*at));
            let left = next.saturating_duration_since(now);
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn waker(&self) -> Waker {
        let shared = Arc::clone(&self.shared);
        Waker(Arc::new(move || {
            shared.lock().is_woken = true;
            shared.changed.notify_all();
        }))
    }

    /// `echo` returns its arguments; no other method is known.
    fn call(&self, call: &MethodCall<'_>) -> Result<Vec<RankReply>, ExecutorError> {
        self.lock().usable()?;
        let world_size = self.world.world_size;
        let chosen = |ranks: Ranks| -> Vec<Rank> {
            let all = (0..world_size).map(Rank);
            all.filter(|rank| ranks == Ranks::All || ranks == Ranks::One(*rank))
                .collect()
        };
        let executing = chosen(call.execute);
        let replying = call.reply.map_or_else(|| executing.clone(), chosen);
        if executing.is_empty() || !replying.iter().all(|rank| executing.contains(rank)) {
            let message = format!(
                "method `{}` cannot run on {:?} and reply from {:?} in a world of {world_size}",
                call.method, call.execute, call.reply
            );
            let failure = Failure::new(FailureCode::InvalidRequest, message);
            return Err(ExecutorError::Refused(failure));
        }
        if call.method != "echo" {
            return Err(ExecutorError::UnknownMethod {
                method: call.method.to_owned(),
                known: self
                    .world
                    .methods
                    .iter()
                    .map(|method| method.name.clone())
                    .collect(),
            });
        }
        if call.deadline <= Instant::now() {
            return Err(ExecutorError::Deadline {
                what: format!("method `{}`", call.method),
                silent: executing,
            });
        }
        let reply = |rank| RankReply {
            rank,
            bytes: call.args.to_vec(),
        };
        Ok(replying.into_iter().map(reply).collect())
    }

    fn health(&self, _limit: Duration) -> Health {
        let state = self.lock();
        let ranks: Vec<Rank> = (0..self.world.world_size).map(Rank).collect();
        let is_up = state.usable().is_ok();
        let (answered, silent) = if is_up {
            (ranks, Vec::new())
        } else {
            (Vec::new(), ranks)
        };
        Health {
            answered,
            silent,
            failure: state.failure.clone(),
        }
    }

    fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    fn on_failure(&self, callback: FailureCallback) {
        let mut state = self.lock();
        if let Some(failure) = state.failure.clone() {
            drop(state);
            callback(&failure);
        } else {
            state.callbacks.push(callback);
        }
    }

    fn shutdown(&self, _budget: Duration) -> ShutdownReport {
        let mut state = self.lock();
        if let Some(report) = &state.report {
            return report.clone();
        }
        state.calls.push(FakeCall::Shutdown);
        let failure = Failure::new(FailureCode::Closed, "the executor was shut down");
        state.end_members(&failure, true);
        let exit = |rank| RankExit {
            rank: Rank(rank),
            status: "exit code 0".into(),
            means: "graceful",
            took: Duration::ZERO,
        };
        let report = ShutdownReport {
            ranks: (0..self.world.world_size).map(exit).collect(),
        };
        state.report = Some(report.clone());
        self.shared.changed.notify_all();
        report
    }
}

impl fmt::Debug for FakeExecutor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeExecutor")
            .field("world", &self.world)
            .finish_non_exhaustive()
    }
}
