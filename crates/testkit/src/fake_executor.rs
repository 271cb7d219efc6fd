//! An executor without workers: it plays a script per request, in real time, and can misbehave on command.
//!
//! For tests of what stands above the executor contract. Knows nothing of processes, rings or models; a picture is one pixel
//! that shows the request's seed.

use denoised_executor::{
    Capabilities, Executor, ExecutorError, ExecutorEvent, Health, MethodCall, Output, RankExit, RankReply,
    Ranks, ShutdownReport, Waker, WorldInfo,
};
use denoised_types::{
    CallId, Epoch, Failure, FailureCode, Generated, Image, PhaseTimes, Rank, RequestId, Resolved, WaveId,
};
use denoised_wire::{Member, Wave};
use std::{
    collections::{BTreeMap, VecDeque},
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
    /// Whether it goes on when told to stop.
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
    /// Not at all: the worker swallowed it. It still heeds a stop unless it is deaf.
    Never,
    /// Against the contract: its wave ends, the request does not.
    Forgotten,
    /// Against the contract: twice, and its wave twice.
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
        /// Who.
        request_ids: Vec<RequestId>,
        /// Deadline of the first member on the host's monotonic clock, in nanoseconds.
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
    waves: BTreeMap<WaveId, Vec<RequestId>>,
    calls: Vec<FakeCall>,
    n_calls: u64,
    refusals: VecDeque<ExecutorError>,
    callbacks: Vec<FailureCallback>,
    failure: Option<Failure>,
    report: Option<ShutdownReport>,
    is_woken: bool,
    is_panic_due: bool,
}

struct Open {
    run: FakeRun,
    begun: Instant,
}

enum Planned {
    Event(ExecutorEvent),
    /// The request's end: its own event, then its wave's if it was the last.
    Done(RequestId, Option<Result<Output, Failure>>),
}

/// The picture of a seed: one pixel, of the seed's three lowest bytes.
pub fn picture(seed: u64, n_steps: u32, rank: Rank) -> Generated {
    Generated {
        image: Image {
            width: 1,
            height: 1,
            rgb: seed.to_le_bytes()[..3].to_vec(),
        },
        tensors: Vec::new(),
        resolved: Resolved {
            width: 1,
            height: 1,
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
            weight_bytes: 0,
            pids: Vec::new(),
            methods: Vec::new(),
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

    fn begin(&mut self, wave: &Wave, script: &Script) {
        let rank = wave.ranks.first().copied().unwrap_or_default();
        let now = Instant::now();
        for member in &wave.joining {
            let run = script(member);
            let request_id = member.request_id;
            self.plan(
                now,
                Planned::Event(ExecutorEvent::RequestStarted { request_id, rank }),
            );
            let n_steps = run.n_steps;
            for n_done in 1..=n_steps {
                let step = ExecutorEvent::Step {
                    request_id,
                    n_done,
                    n_steps,
                };
                self.plan(now + run.step_time * n_done, Planned::Event(step));
            }
            let end = now + run.step_time * n_steps;
            let done = || Output::from(picture(member.request.seed, n_steps, rank));
            match &run.end {
                FakeEnd::Picture => self.plan(end, Planned::Done(request_id, Some(Ok(done())))),
                FakeEnd::Fail(failure) => {
                    self.plan(end, Planned::Done(request_id, Some(Err(failure.clone()))))
                }
                FakeEnd::Never => {}
                FakeEnd::Forgotten => self.plan(end, Planned::Done(request_id, None)),
                FakeEnd::Twice => {
                    self.plan(end, Planned::Done(request_id, Some(Ok(done()))));
                    let outcome = Ok(done());
                    self.plan(
                        end,
                        Planned::Event(ExecutorEvent::RequestDone { request_id, outcome }),
                    );
                    let wave_id = wave.wave_id;
                    self.plan(end, Planned::Event(ExecutorEvent::WaveDone { wave_id }));
                }
            }
            self.open.insert(request_id, Open { run, begun: now });
        }
        let members = wave.request_ids().collect();
        self.waves.insert(wave.wave_id, members);
    }

    /// Ends a request at its next step boundary, as a worker does.
    fn stop(&mut self, request_id: RequestId) {
        let Some(Open { run, begun }) = self.open.get(&request_id) else {
            return;
        };
        if run.is_deaf {
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
            Planned::Event(_) => true,
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
                    self.waves.retain(|&wave_id, members| {
                        let is_over =
                            members.contains(&request_id) && members.iter().all(|id| !open.contains_key(id));
                        if is_over {
                            events.push(ExecutorEvent::WaveDone { wave_id });
                        }
                        !is_over
                    });
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
        state.calls.push(FakeCall::Dispatch {
            wave_id: wave.wave_id,
            ranks: wave.ranks.clone(),
            request_ids: wave.request_ids().collect(),
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
        let ranks = match call.reply.unwrap_or(call.execute) {
            Ranks::All => (0..self.world.world_size).map(Rank).collect(),
            Ranks::One(rank) => vec![rank],
        };
        if call.method != "echo" {
            return Err(ExecutorError::UnknownMethod {
                method: call.method.to_owned(),
                known: vec!["echo".to_owned()],
            });
        }
        Ok(ranks
            .into_iter()
            .map(|rank| RankReply {
                rank,
                bytes: call.args.to_vec(),
            })
            .collect())
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
