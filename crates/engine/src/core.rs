//! The engine's decisions: who waits, who runs, who is told what. Events and the time go in, actions come out.
//!
//! Knows nothing of clocks, threads, locks, mailboxes or how an executor is called.
//!
//! R1. A request leaves the table exactly when its one terminal event is emitted; what is not in the table is never told anything.
//! R2. An executor is not believed: events about unknown, ended or waiting requests are counted and change nothing.
//! R3. Every request ends by its deadline plus `cancel_grace`, every wave by `stuck_limit` after the last moment it had a reason to run.
//! R4. Once failed, the policy and the executor are not asked for anything again.

use crate::{RequestEvent, metrics::Stats};
use denoised_executor::{ExecutorError, ExecutorEvent, Output};
use denoised_scheduler::{
    Action as PolicyAction, BatchKey, EndReason, Event as PolicyEvent, Millis, Policy, ReplicaIdx,
};
use denoised_types::{Failure, FailureCode, GenerateRequest, Rank, RequestId, WaveId};
use denoised_wire::{Member, Wave};
use std::collections::BTreeMap;

/// What happened.
#[derive(Debug)]
pub(crate) enum Event {
    /// A checked request with a fresh id.
    Submit {
        request_id: RequestId,
        request: Box<GenerateRequest>,
        deadline: Millis,
    },
    /// Nobody wants it any more.
    Cancel { request_id: RequestId },
    /// Something an executor reported.
    Executor(ExecutorEvent),
    /// A wave could not be sent; no event about it will follow.
    DispatchFailed { wave_id: WaveId, error: ExecutorError },
    /// Take nothing new.
    Drain,
    /// Fail what is left.
    Close,
    /// The world is not usable any more.
    Fail(Failure),
    /// Time passed.
    Tick,
}

/// What to do.
#[derive(Debug, PartialEq)]
pub(crate) enum Action {
    /// Tell a request's owner.
    Notify {
        request_id: RequestId,
        event: RequestEvent,
    },
    /// Send a wave.
    Dispatch(Wave),
    /// Ask the workers to stop computing these.
    Stop(Vec<RequestId>),
}

/// Fixed numbers of a core.
#[derive(Clone, Debug)]
pub(crate) struct CoreOptions {
    /// Ranks of each replica.
    pub(crate) replicas: Vec<Vec<Rank>>,
    /// How long a running request's own end is awaited after its deadline.
    pub(crate) cancel_grace_ms: u64,
    /// How long a wave may go on once all its members were asked to stop or have ended.
    pub(crate) stuck_limit_ms: u64,
    /// What the host's monotonic clock showed at [`Millis`] 0, in nanoseconds.
    pub(crate) origin_ns: u64,
}

/// The table of requests and what may be done with them.
#[derive(Debug)]
pub(crate) struct Core {
    options: CoreOptions,
    policy: Box<dyn Policy>,
    requests: BTreeMap<RequestId, Record>,
    waves: BTreeMap<WaveId, OpenWave>,
    is_draining: bool,
    is_closed: bool,
    failure: Option<Failure>,
    stats: Stats,
}

#[derive(Debug)]
struct Record {
    deadline: Millis,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// The policy has not answered yet.
    New(Box<GenerateRequest>),
    Queued(Box<GenerateRequest>),
    Running(Running),
}

#[derive(Debug, Default)]
struct Running {
    is_started: bool,
    n_done: u32,
    n_steps: u32,
    /// Its owner gave it up.
    is_cancelled: bool,
    /// Its deadline has come.
    is_expired: bool,
    is_stop_asked: bool,
}

impl Running {
    fn progress(&self) -> String {
        match (self.is_started, self.n_steps) {
            (_, 1..) => format!("after step {} of {}", self.n_done, self.n_steps),
            (true, 0) => "before its first step ended".into(),
            (false, 0) => "before a worker began it".into(),
        }
    }
}

/// A wave the executor has and has not ended.
#[derive(Debug)]
struct OpenWave {
    replica: ReplicaIdx,
    /// Members the executor has not reported as done, whether or not their owners still wait.
    members: Vec<RequestId>,
    /// When the world counts as stuck, once nothing justifies further work on this wave.
    due: Option<Millis>,
}

impl Core {
    pub(crate) fn new(now: Millis, policy: Box<dyn Policy>, options: CoreOptions) -> Self {
        let n_replicas = options.replicas.len();
        let mut core = Self {
            options,
            policy,
            requests: BTreeMap::new(),
            waves: BTreeMap::new(),
            is_draining: false,
            is_closed: false,
            failure: None,
            stats: Stats::default(),
        };
        for replica_idx in 0..n_replicas {
            let replica = ReplicaIdx(u16::try_from(replica_idx).unwrap_or(u16::MAX));
            // Nothing waits yet, so nothing is to be done.
            core.tell(now, PolicyEvent::ReplicaUp { replica }, &mut Vec::new());
        }
        core
    }

    /// Takes note of what happened at `now` and says what to do, in this order. `now` never runs backwards.
    pub(crate) fn on_event(&mut self, now: Millis, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        if let Some(failure) = &self.failure {
            // The one event that still deserves an answer.
            if let Event::Submit { request_id, .. } = event {
                self.stats.n_refused += 1;
                let event = RequestEvent::Failed(failure.clone());
                actions.push(Action::Notify { request_id, event });
            }
            return actions;
        }
        match event {
            Event::Submit {
                request_id,
                request,
                deadline,
            } => {
                let stage = Stage::New(request);
                self.requests.insert(request_id, Record { deadline, stage });
                let key = BatchKey::default();
                let submit = PolicyEvent::Submit {
                    request_id,
                    deadline,
                    key,
                };
                self.tell(now, submit, &mut actions);
            }
            Event::Cancel { request_id } => self.cancel(now, request_id, &mut actions),
            Event::Executor(event) => self.executor_event(now, event, &mut actions),
            Event::DispatchFailed { wave_id, error } => {
                self.dispatch_failed(now, wave_id, error, &mut actions)
            }
            Event::Drain => {
                self.is_draining = true;
                self.tell(now, PolicyEvent::Drain, &mut actions);
            }
            Event::Close => self.close(now, &mut actions),
            Event::Fail(failure) => self.fail(failure, &mut actions),
            Event::Tick => self.tell(now, PolicyEvent::Tick, &mut actions),
        }
        self.enforce_limits(now, &mut actions);
        actions
    }

    /// When an [`Event::Tick`] is due if nothing happens before.
    pub(crate) fn next_tick(&self) -> Option<Millis> {
        if self.failure.is_some() {
            return None;
        }
        let running = self
            .waves
            .values()
            .flat_map(|wave| &wave.members)
            .filter_map(|id| {
                let record = self.requests.get(id)?;
                let is_expired = matches!(&record.stage, Stage::Running(running) if running.is_expired);
                Some(if is_expired {
                    record.deadline.plus(self.options.cancel_grace_ms)
                } else {
                    record.deadline
                })
            });
        let stuck = self.waves.values().filter_map(|wave| wave.due);
        running
            .chain(stuck)
            .chain(self.policy.next_tick())
            .min()
            .filter(|tick| *tick < Millis::NEVER)
    }

    /// Why the world cannot be used, once that is so.
    pub(crate) fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Whether nothing waits and nothing runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.waves.is_empty()
    }

    /// Whether a request has not ended.
    pub(crate) fn is_open(&self, request_id: RequestId) -> bool {
        self.requests.contains_key(&request_id)
    }

    /// Counters, with the present numbers filled in.
    pub(crate) fn stats(&self) -> Stats {
        let is_running = |record: &&Record| matches!(record.stage, Stage::Running(_));
        let n_running = self.requests.values().filter(is_running).count();
        Stats {
            n_running,
            n_queued: self.requests.len() - n_running,
            ..self.stats.clone()
        }
    }

    /// Counts a request that was refused before it reached the core.
    pub(crate) fn count_refused(&mut self) {
        self.stats.n_refused += 1;
    }

    fn tell(&mut self, now: Millis, event: PolicyEvent, actions: &mut Vec<Action>) {
        for action in self.policy.on_event(now, event) {
            match action {
                PolicyAction::Admitted { request_id, n_ahead } => self.admitted(request_id, n_ahead, actions),
                PolicyAction::Dispatch {
                    wave_id,
                    replica,
                    members,
                    cancelled: _,
                } => {
                    let wave = self.begin_wave(wave_id, replica, members);
                    actions.push(Action::Dispatch(wave));
                }
                PolicyAction::Stop { request_ids } => self.stop(&request_ids, actions),
                PolicyAction::End { request_id, reason } => {
                    let failure = self.describe(reason);
                    self.end(request_id, Err(failure), actions);
                }
            }
        }
    }

    fn admitted(&mut self, request_id: RequestId, position: usize, actions: &mut Vec<Action>) {
        let record = self
            .requests
            .remove(&request_id)
            .expect("the policy admits only what was submitted");
        let (Stage::New(request) | Stage::Queued(request)) = record.stage else {
            panic!("the policy admitted request {request_id}, which runs");
        };
        let stage = Stage::Queued(request);
        self.requests.insert(request_id, Record { stage, ..record });
        self.stats.n_submitted += 1;
        let event = RequestEvent::Queued { position };
        actions.push(Action::Notify { request_id, event });
    }

    fn begin_wave(&mut self, wave_id: WaveId, replica: ReplicaIdx, request_ids: Vec<RequestId>) -> Wave {
        let mut members = Vec::with_capacity(request_ids.len());
        for &request_id in &request_ids {
            let record = self
                .requests
                .remove(&request_id)
                .expect("the policy dispatches only what waits");
            let Stage::Queued(request) = record.stage else {
                panic!("the policy dispatched request {request_id}, which does not wait");
            };
            let deadline_ns = record
                .deadline
                .0
                .saturating_mul(1_000_000)
                .saturating_add(self.options.origin_ns);
            members.push(Member {
                request_id,
                request: *request,
                latents: None,
                deadline_ns,
            });
            let stage = Stage::Running(Running::default());
            self.requests.insert(request_id, Record { stage, ..record });
        }
        let ranks = self.options.replicas.get(usize::from(replica.0));
        let ranks = ranks
            .expect("the policy dispatches only to replicas that are up")
            .clone();
        self.waves.insert(
            wave_id,
            OpenWave {
                replica,
                members: request_ids,
                due: None,
            },
        );
        Wave {
            wave_id,
            mode: self.policy.mode(),
            ranks,
            joining: members,
            continuing: Vec::new(),
            cancelled: Vec::new(),
            adapters: Vec::new(),
        }
    }

    fn describe(&self, reason: EndReason) -> Failure {
        let (code, message) = match reason {
            EndReason::QueueFull { n_queued, max_queued } => (
                FailureCode::QueueFull,
                format!("{n_queued} requests wait already, and at most {max_queued} may; try again later"),
            ),
            EndReason::Closed if self.is_closed => (
                FailureCode::Closed,
                "the engine was closed before the request was begun".into(),
            ),
            EndReason::Closed => (
                FailureCode::Closed,
                "the engine is closing and takes nothing new".into(),
            ),
            EndReason::Cancelled => (FailureCode::Cancelled, "cancelled while it waited".into()),
            EndReason::Expired => (
                FailureCode::DeadlineExceeded,
                "the deadline passed while the request waited".into(),
            ),
            EndReason::ReplicaLost(replica) => (
                FailureCode::WorkerLost,
                format!("replica {replica}, which computed it, is gone"),
            ),
        };
        Failure::new(code, message)
    }

    fn cancel(&mut self, now: Millis, request_id: RequestId, actions: &mut Vec<Action>) {
        if let Some(Record {
            stage: Stage::Running(running),
            ..
        }) = self.requests.get_mut(&request_id)
            && !running.is_expired
        {
            running.is_cancelled = true;
        }
        self.tell(now, PolicyEvent::Cancel { request_id }, actions);
    }

    fn stop(&mut self, request_ids: &[RequestId], actions: &mut Vec<Action>) {
        let mut stopped = Vec::new();
        for &request_id in request_ids {
            if let Some(Record {
                stage: Stage::Running(running),
                ..
            }) = self.requests.get_mut(&request_id)
                && !running.is_stop_asked
            {
                running.is_stop_asked = true;
                stopped.push(request_id);
            }
        }
        if !stopped.is_empty() {
            actions.push(Action::Stop(stopped));
        }
    }

    fn executor_event(&mut self, now: Millis, event: ExecutorEvent, actions: &mut Vec<Action>) {
        match event {
            ExecutorEvent::RequestStarted { request_id, rank } => match self.running(request_id) {
                Some(running) if !running.is_started => {
                    running.is_started = true;
                    let event = RequestEvent::Started { rank };
                    actions.push(Action::Notify { request_id, event });
                }
                Some(_) | None => self.stray(request_id),
            },
            ExecutorEvent::Step {
                request_id,
                n_done,
                n_steps,
            } => match self.running(request_id) {
                Some(running) if n_done > running.n_done && n_done <= n_steps => {
                    running.n_done = n_done;
                    running.n_steps = n_steps;
                    let event = RequestEvent::Step { n_done, n_steps };
                    actions.push(Action::Notify { request_id, event });
                }
                Some(_) | None => self.stray(request_id),
            },
            ExecutorEvent::RequestDone { request_id, outcome } => {
                self.request_done(now, request_id, outcome, actions);
            }
            ExecutorEvent::WaveDone { wave_id } => self.wave_done(now, wave_id, None, actions),
            ExecutorEvent::WorldFailed(failure) => self.fail(failure, actions),
        }
    }

    fn running(&mut self, request_id: RequestId) -> Option<&mut Running> {
        match &mut self.requests.get_mut(&request_id)?.stage {
            Stage::Running(running) => Some(running),
            Stage::New(_) | Stage::Queued(_) => None,
        }
    }

    /// Counts an event that makes no sense, unless it is merely late: its request was given up and its wave still runs.
    fn stray(&mut self, request_id: RequestId) {
        let is_late = !self.is_open(request_id) && self.wave_of(request_id).is_some();
        self.stats.n_stray += u64::from(!is_late);
    }

    fn wave_of(&mut self, request_id: RequestId) -> Option<&mut OpenWave> {
        self.waves
            .values_mut()
            .find(|wave| wave.members.contains(&request_id))
    }

    fn request_done(
        &mut self,
        now: Millis,
        request_id: RequestId,
        outcome: Result<Output, Failure>,
        actions: &mut Vec<Action>,
    ) {
        let Some(wave) = self.wave_of(request_id) else {
            self.stats.n_stray += 1;
            return;
        };
        wave.members.retain(|member| *member != request_id);
        let outcome = match (outcome, self.running(request_id)) {
            (outcome, None) => {
                self.stats.n_late += 1;
                outcome
            }
            // The worker was told to stop; only the engine knows that the deadline was why.
            (Err(failure), Some(running))
                if failure.code == FailureCode::Cancelled && running.is_expired && !running.is_cancelled =>
            {
                Err(Failure {
                    code: FailureCode::DeadlineExceeded,
                    message: format!("the deadline passed {}", running.progress()),
                    ..failure
                })
            }
            (outcome, Some(_)) => outcome,
        };
        self.end(request_id, outcome, actions);
        self.tell(now, PolicyEvent::MemberDone { request_id }, actions);
    }

    /// Ends a wave; members without a result get `failure`, or are told that the executor forgot them.
    fn wave_done(
        &mut self,
        now: Millis,
        wave_id: WaveId,
        failure: Option<&Failure>,
        actions: &mut Vec<Action>,
    ) {
        let Some(wave) = self.waves.remove(&wave_id) else {
            self.stats.n_stray += 1;
            return;
        };
        for request_id in wave.members {
            let failure = failure.cloned().unwrap_or_else(|| {
                self.stats.n_stray += 1;
                let message =
                    format!("the executor ended wave {wave_id} without a result of request {request_id}");
                Failure::new(FailureCode::Internal, message)
            });
            self.end(request_id, Err(failure), actions);
            self.tell(now, PolicyEvent::MemberDone { request_id }, actions);
        }
        self.tell(now, PolicyEvent::WaveDone { wave_id }, actions);
    }

    fn dispatch_failed(
        &mut self,
        now: Millis,
        wave_id: WaveId,
        error: ExecutorError,
        actions: &mut Vec<Action>,
    ) {
        let is_world_dead = matches!(error, ExecutorError::Failed(_) | ExecutorError::Closed);
        let failure = Failure::from(error);
        if is_world_dead {
            self.fail(failure, actions);
        } else {
            self.wave_done(now, wave_id, Some(&failure), actions);
        }
    }

    fn close(&mut self, now: Millis, actions: &mut Vec<Action>) {
        self.is_closed = true;
        self.tell(now, PolicyEvent::Close, actions);
        let open: Vec<RequestId> = self.requests.keys().copied().collect();
        self.stop(&open, actions);
        for request_id in open {
            let progress = self
                .running(request_id)
                .map(|running| running.progress())
                .unwrap_or_default();
            let failure = Failure::new(FailureCode::Closed, format!("the engine was closed {progress}"));
            self.end(request_id, Err(failure), actions);
        }
    }

    /// Ends every request with the cause. Does not ask the policy: it may be what failed.
    fn fail(&mut self, failure: Failure, actions: &mut Vec<Action>) {
        self.waves.clear();
        while let Some((&request_id, _)) = self.requests.first_key_value() {
            self.end(request_id, Err(failure.clone()), actions);
        }
        self.failure = Some(failure);
    }

    fn end(&mut self, request_id: RequestId, outcome: Result<Output, Failure>, actions: &mut Vec<Action>) {
        let Some(record) = self.requests.remove(&request_id) else {
            return;
        };
        match (&outcome, &record.stage) {
            (_, Stage::New(_)) => self.stats.n_refused += 1,
            (Ok(_), _) => self.stats.n_finished += 1,
            (Err(failure), _) => self.stats.count_failed(failure.code),
        }
        let event = match outcome {
            Ok(generated) => RequestEvent::Finished(generated),
            Err(failure) => RequestEvent::Failed(failure),
        };
        actions.push(Action::Notify { request_id, event });
    }

    /// Deadlines of what runs, and waves that do not end.
    fn enforce_limits(&mut self, now: Millis, actions: &mut Vec<Action>) {
        let running: Vec<RequestId> = self
            .waves
            .values()
            .flat_map(|wave| &wave.members)
            .copied()
            .collect();
        for request_id in running {
            let Some(Record {
                deadline,
                stage: Stage::Running(running),
            }) = self.requests.get_mut(&request_id)
            else {
                continue;
            };
            if now < *deadline {
                continue;
            }
            running.is_expired = true;
            let grace_ms = self.options.cancel_grace_ms;
            let gave_up = (now >= deadline.plus(grace_ms)).then(|| {
                let progress = running.progress();
                if running.is_cancelled {
                    let message = format!("cancelled {progress}; the worker had not stopped at the deadline");
                    Failure::new(FailureCode::Cancelled, message)
                } else {
                    let message =
                        format!("the deadline passed {progress}; no result came in {grace_ms} ms more");
                    Failure::new(FailureCode::DeadlineExceeded, message)
                }
            });
            self.stop(&[request_id], actions);
            if let Some(failure) = gave_up {
                self.end(request_id, Err(failure), actions);
            }
        }
        let mut stuck = None;
        for (wave_id, wave) in &mut self.waves {
            let is_wanted = |id: &RequestId| match self.requests.get(id).map(|record| &record.stage) {
                Some(Stage::Running(running)) => !running.is_stop_asked,
                Some(Stage::New(_) | Stage::Queued(_)) | None => false,
            };
            if wave.due.is_none() && !wave.members.iter().any(is_wanted) {
                wave.due = Some(now.plus(self.options.stuck_limit_ms));
            }
            if wave.due.is_some_and(|due| due <= now) {
                stuck = Some((*wave_id, wave.replica));
            }
        }
        if let Some((wave_id, replica)) = stuck {
            let limit_ms = self.options.stuck_limit_ms;
            let message =
                format!("replica {replica} did not end wave {wave_id} within {limit_ms} ms of being told to");
            let failure = Failure::new(FailureCode::WorkerLost, message);
            let rank = self.options.replicas[usize::from(replica.0)].first().copied();
            self.fail(Failure { rank, ..failure }, actions);
        }
    }
}
