//! The engine's decisions: who waits, who runs, who is told what. Events and the time go in, actions come out.
//!
//! Knows nothing of clocks, threads, locks, mailboxes or how an executor is called.
//!
//! R1. A request leaves the table exactly when its one terminal event is emitted; what is not in the table is never told anything.
//! R2. An executor is not believed: events about unknown, ended or waiting requests are counted and change nothing.
//! R3. Every request ends by its deadline plus `cancel_grace`, every wave by `stuck_limit` after the last moment it had a reason to run
//!     (in step mode: after the first of its members had none, for a step is the same for all).
//! R4. Once failed, the policy and the executor are not asked for anything again.
//! R5. A request's payload goes to the executor once, with the wave that it joins. In step mode the executor holds it until it reports
//!     its end, over any number of waves; whom to give up, it is told by waves alone, so that all ranks of a replica agree.
//!
//! A wave that cannot be sent ends the requests that would have joined with it. In step mode the others go on: their state is in the
//! workers, and a ring that is full now has room later, so the replica is tried again after a pause, until `stuck_limit` has passed.
//! A wave whose requests do not fit into one message together is sent in parts, one after the other: only a request that is too large by
//! itself fails for its size.

use crate::{RequestEvent, batch_key::batch_key, metrics::Stats};
use denoised_executor::{ExecutorError, ExecutorEvent, Output};
use denoised_scheduler::{
    Action as PolicyAction, EndReason, Event as PolicyEvent, Millis, Policy, ReplicaIdx,
};
use denoised_types::{Failure, FailureCode, GenerateRequest, Mode, ModelInfo, Rank, RequestId, WaveId};
use denoised_wire::{Member, Wave};
use std::collections::BTreeMap;

/// Pause before a replica in step mode is sent another wave after one that could not be sent.
const RETRY_MS: u64 = 100;

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
    DispatchFailed {
        wave_id: WaveId,
        error: ExecutorError,
        /// Who would have joined, if there were several.
        joining: Vec<Member>,
    },
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
    /// Request mode: ask the workers to stop computing these.
    Stop(Vec<RequestId>),
}

/// Fixed numbers of a core.
#[derive(Clone, Debug)]
pub(crate) struct CoreOptions {
    /// Ranks of each replica.
    pub(crate) replicas: Vec<Vec<Rank>>,
    /// What the workers loaded; its defaults decide which requests are alike.
    pub(crate) model: Option<ModelInfo>,
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
    mode: Mode,
    requests: BTreeMap<RequestId, Record>,
    /// What the executor was given and has not reported as done, whether or not owners still wait.
    held: BTreeMap<RequestId, Held>,
    waves: BTreeMap<WaveId, OpenWave>,
    /// Replicas whose waves cannot be sent, since when.
    unsent_since: BTreeMap<ReplicaIdx, Millis>,
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
    /// The workers, or in step mode the policy, were told to give it up.
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

/// A request inside the executor.
#[derive(Debug)]
struct Held {
    replica: ReplicaIdx,
    /// Names of the adapters that it is computed with.
    adapters: Vec<String>,
}

/// A wave the executor has and has not ended. Whoever was reported as done is in none of its lists.
#[derive(Debug)]
struct OpenWave {
    replica: ReplicaIdx,
    joining: Vec<RequestId>,
    continuing: Vec<RequestId>,
    cancelled: Vec<RequestId>,
    /// Who joins in a later part, since not all fit into one message; the executor does not have them yet.
    rest: Vec<Member>,
    /// When the world counts as stuck, once nothing justifies further work on this wave.
    due: Option<Millis>,
    /// Step mode: the executor did not take it; when its replica may be tried again.
    retry_at: Option<Millis>,
}

impl OpenWave {
    fn lists(&mut self) -> [&mut Vec<RequestId>; 3] {
        [&mut self.joining, &mut self.continuing, &mut self.cancelled]
    }
}

impl Core {
    pub(crate) fn new(now: Millis, policy: Box<dyn Policy>, options: CoreOptions) -> Self {
        let n_replicas = options.replicas.len();
        let mut core = Self {
            options,
            mode: policy.mode(),
            policy,
            requests: BTreeMap::new(),
            held: BTreeMap::new(),
            waves: BTreeMap::new(),
            unsent_since: BTreeMap::new(),
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
                let key = batch_key(&request, self.options.model.as_ref(), self.mode);
                let stage = Stage::New(request);
                self.requests.insert(request_id, Record { deadline, stage });
                let submit = PolicyEvent::Submit {
                    request_id,
                    deadline,
                    key,
                };
                self.tell(now, submit, &mut actions);
            }
            Event::Cancel { request_id } => self.cancel(now, request_id, &mut actions),
            Event::Executor(event) => self.executor_event(now, event, &mut actions),
            Event::DispatchFailed {
                wave_id,
                error,
                joining,
            } => self.dispatch_failed(now, wave_id, error, joining, &mut actions),
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
        let running = self.held.keys().filter_map(|id| {
            let record = self.requests.get(id)?;
            let is_expired = matches!(&record.stage, Stage::Running(running) if running.is_expired);
            Some(if is_expired {
                record.deadline.plus(self.options.cancel_grace_ms)
            } else {
                record.deadline
            })
        });
        let waves = self.waves.values().filter_map(|wave| wave.retry_at.or(wave.due));
        let rest = self.waves.values().flat_map(|wave| &wave.rest);
        let rest = rest.filter_map(|member| Some(self.requests.get(&member.request_id)?.deadline));
        running
            .chain(rest)
            .chain(waves)
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
        self.requests.is_empty() && self.held.is_empty() && self.waves.is_empty()
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
                    cancelled,
                } => {
                    let wave = self.begin_wave(wave_id, replica, &members, cancelled);
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

    fn begin_wave(
        &mut self,
        wave_id: WaveId,
        replica: ReplicaIdx,
        members: &[RequestId],
        cancelled: Vec<RequestId>,
    ) -> Wave {
        let (mut joining, mut continuing) = (Vec::new(), Vec::new());
        for &request_id in members {
            if let Some(held) = self.held.get(&request_id) {
                let is_here = held.replica == replica && self.mode == Mode::Step;
                assert!(is_here, "the policy dispatched request {request_id}, which runs");
                continuing.push(request_id);
            } else {
                joining.push(self.join(request_id));
            }
        }
        for request_id in &cancelled {
            let held = self.held.get(request_id);
            let is_here = held.is_some_and(|held| held.replica == replica);
            assert!(
                is_here,
                "the policy gave up request {request_id}, which does not run there"
            );
        }
        let open = OpenWave {
            replica,
            joining: Vec::new(),
            continuing,
            cancelled,
            rest: Vec::new(),
            due: None,
            retry_at: None,
        };
        self.send(wave_id, open, joining)
    }

    /// Gives the executor a wave, or a part of one: who goes on or is given up according to `open`, and `joining`.
    fn send(&mut self, wave_id: WaveId, mut open: OpenWave, joining: Vec<Member>) -> Wave {
        let replica = open.replica;
        for member in &joining {
            let names = member.request.adapters.iter().map(|adapter| adapter.name.clone());
            let held = Held {
                replica,
                adapters: names.collect(),
            };
            self.held.insert(member.request_id, held);
        }
        open.joining = joining.iter().map(|member| member.request_id).collect();
        open.due = None;
        let mut adapters = Vec::<String>::new();
        for request_id in open.continuing.iter().chain(&open.joining) {
            for adapter in &self.held[request_id].adapters {
                if !adapters.contains(adapter) {
                    adapters.push(adapter.clone());
                }
            }
        }
        let ranks = self.options.replicas.get(usize::from(replica.0));
        let wave = Wave {
            wave_id,
            mode: self.mode,
            ranks: ranks
                .expect("the policy dispatches only to replicas that are up")
                .clone(),
            joining,
            continuing: open.continuing.clone(),
            cancelled: open.cancelled.clone(),
            adapters,
        };
        self.waves.insert(wave_id, open);
        wave
    }

    /// Sends what is left of a wave, but lets at most `max_joining` join, or ends it if nothing is left.
    fn send_rest(&mut self, now: Millis, wave_id: WaveId, max_joining: usize, actions: &mut Vec<Action>) {
        self.end_unwanted_rest(now, actions);
        let Some(mut open) = self.waves.remove(&wave_id) else {
            return;
        };
        let n_joining = open.rest.len().min(max_joining);
        let joining: Vec<Member> = open.rest.drain(..n_joining).collect();
        // Who was given up since the policy formed the wave is in no further step.
        let is_given_up = |id: &RequestId| match self.requests.get(id).map(|record| &record.stage) {
            Some(Stage::Running(running)) => running.is_stop_asked,
            Some(Stage::New(_) | Stage::Queued(_)) | None => true,
        };
        open.cancelled
            .extend(open.continuing.extract_if(.., |id| is_given_up(id)));
        if joining.is_empty() && open.continuing.is_empty() && open.cancelled.is_empty() {
            self.waves.insert(wave_id, open);
            return self.end_wave(now, wave_id, actions);
        }
        let wave = self.send(wave_id, open, joining);
        actions.push(Action::Dispatch(wave));
    }

    /// Ends whom nobody wants any more among those that have still to be sent.
    fn end_unwanted_rest(&mut self, now: Millis, actions: &mut Vec<Action>) {
        let requests = &self.requests;
        let is_unwanted = |member: &mut Member| match requests.get(&member.request_id) {
            Some(Record {
                deadline,
                stage: Stage::Running(running),
            }) => running.is_stop_asked || *deadline <= now,
            Some(_) | None => true,
        };
        let waves = self.waves.values_mut();
        let unwanted: Vec<RequestId> = waves
            .flat_map(|wave| wave.rest.extract_if(.., is_unwanted))
            .map(|member| member.request_id)
            .collect();
        for request_id in unwanted {
            let reason = match self.requests.get(&request_id).map(|record| &record.stage) {
                Some(Stage::Running(running)) if running.is_cancelled => EndReason::Cancelled,
                _ => EndReason::Expired,
            };
            let failure = self.describe(reason);
            self.give_back(now, request_id, failure, actions);
        }
    }

    /// Takes a waiting request to be handed to the executor.
    fn join(&mut self, request_id: RequestId) -> Member {
        let record = self
            .requests
            .remove(&request_id)
            .expect("the policy dispatches only what waits");
        let Stage::Queued(request) = record.stage else {
            panic!("the policy dispatched request {request_id}, which does not wait");
        };
        let stage = Stage::Running(Running::default());
        self.requests.insert(request_id, Record { stage, ..record });
        let deadline = record.deadline.0.saturating_mul(1_000_000);
        Member {
            request_id,
            request: *request,
            blobs: Vec::new(),
            deadline_ns: match self.mode {
                Mode::Request => deadline.saturating_add(self.options.origin_ns),
                // Ranks that looked at the clock themselves could disagree on the step at which to stop.
                Mode::Step => 0,
            },
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
        if self.mode == Mode::Step {
            self.stop(&[request_id], actions);
        }
        self.tell(now, PolicyEvent::Cancel { request_id }, actions);
    }

    /// Notes that nobody wants these to go on. In request mode the workers are told so by an action; in step mode by the wave that the
    /// policy forms next.
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
                // One that has still to be sent ends here.
                if self.held.contains_key(&request_id) {
                    stopped.push(request_id);
                }
            }
        }
        if !stopped.is_empty() && self.mode == Mode::Request {
            actions.push(Action::Stop(stopped));
        }
    }

    fn executor_event(&mut self, now: Millis, event: ExecutorEvent, actions: &mut Vec<Action>) {
        match event {
            ExecutorEvent::RequestStarted { request_id, rank } => match self.computed(request_id) {
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
            } => match self.computed(request_id) {
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
            ExecutorEvent::WaveDone { wave_id } => self.wave_done(now, wave_id, actions),
            ExecutorEvent::WorldFailed(failure) => self.fail(failure, actions),
        }
    }

    /// A request that the executor has and that has not ended.
    fn computed(&mut self, request_id: RequestId) -> Option<&mut Running> {
        let is_held = self.held.contains_key(&request_id);
        self.running(request_id).filter(|_| is_held)
    }

    fn running(&mut self, request_id: RequestId) -> Option<&mut Running> {
        match &mut self.requests.get_mut(&request_id)?.stage {
            Stage::Running(running) => Some(running),
            Stage::New(_) | Stage::Queued(_) => None,
        }
    }

    /// Counts an event that makes no sense, unless it is merely late: its request was given up and the executor still holds it.
    fn stray(&mut self, request_id: RequestId) {
        let is_late = !self.is_open(request_id) && self.held.contains_key(&request_id);
        self.stats.n_stray += u64::from(!is_late);
    }

    /// Notes that the executor has done with a request. Returns whether it had it.
    fn release(&mut self, request_id: RequestId) -> bool {
        let is_held = self.held.remove(&request_id).is_some();
        if is_held {
            let lists = self.waves.values_mut().flat_map(OpenWave::lists);
            lists.for_each(|list| list.retain(|member| *member != request_id));
        }
        is_held
    }

    fn request_done(
        &mut self,
        now: Millis,
        request_id: RequestId,
        outcome: Result<Output, Failure>,
        actions: &mut Vec<Action>,
    ) {
        if !self.release(request_id) {
            self.stats.n_stray += 1;
            return;
        }
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

    /// The executor ended a wave. Whoever had to end in it and was not reported as done is told that the executor forgot it.
    fn wave_done(&mut self, now: Millis, wave_id: WaveId, actions: &mut Vec<Action>) {
        let is_sent = |wave: &OpenWave| wave.retry_at.is_none();
        let Some(wave) = self.waves.get(&wave_id).filter(|wave| is_sent(wave)) else {
            self.stats.n_stray += 1;
            return;
        };
        self.unsent_since.remove(&wave.replica);
        let forgotten = match self.mode {
            Mode::Request => wave.joining.clone(),
            Mode::Step => wave.cancelled.clone(),
        };
        for request_id in forgotten {
            self.stats.n_stray += 1;
            let message =
                format!("the executor ended wave {wave_id} without a result of request {request_id}");
            let failure = Failure::new(FailureCode::Internal, message);
            self.give_back(now, request_id, failure, actions);
        }
        if let Some(wave) = self.waves.get_mut(&wave_id)
            && !wave.rest.is_empty()
        {
            wave.lists().into_iter().for_each(Vec::clear);
            return self.send_rest(now, wave_id, usize::MAX, actions);
        }
        self.end_wave(now, wave_id, actions);
    }

    /// Ends a request that the executor had, or was to have, and will not report.
    fn give_back(&mut self, now: Millis, request_id: RequestId, failure: Failure, actions: &mut Vec<Action>) {
        self.release(request_id);
        self.end(request_id, Err(failure), actions);
        self.tell(now, PolicyEvent::MemberDone { request_id }, actions);
    }

    fn end_wave(&mut self, now: Millis, wave_id: WaveId, actions: &mut Vec<Action>) {
        self.waves.remove(&wave_id);
        self.tell(now, PolicyEvent::WaveDone { wave_id }, actions);
    }

    fn dispatch_failed(
        &mut self,
        now: Millis,
        wave_id: WaveId,
        error: ExecutorError,
        refused: Vec<Member>,
        actions: &mut Vec<Action>,
    ) {
        let Some(wave) = self.waves.get_mut(&wave_id) else {
            self.stats.n_stray += 1;
            return;
        };
        let is_too_large = matches!(error, ExecutorError::TooLarge { .. });
        let n_refused = refused.len();
        if is_too_large && n_refused > 1 {
            for member in &refused {
                self.held.remove(&member.request_id);
            }
            wave.joining.clear();
            wave.rest.splice(..0, refused);
            return self.send_rest(now, wave_id, n_refused / 2, actions);
        }
        let (replica, mut joining) = (wave.replica, wave.joining.clone());
        let has_rest = !wave.rest.is_empty();
        if !is_too_large {
            // What is in the way of this part is in the way of the others.
            joining.extend(wave.rest.drain(..).map(|member| member.request_id));
        }
        let n_others = wave.continuing.len() + wave.cancelled.len();
        let is_world_dead = matches!(error, ExecutorError::Failed(_) | ExecutorError::Closed);
        // Waiting does not change that.
        let is_final = matches!(error, ExecutorError::TooLarge { .. } | ExecutorError::Refused(_));
        let failure = Failure::from(error);
        if is_world_dead {
            return self.fail(failure, actions);
        }
        for &request_id in &joining {
            self.give_back(now, request_id, failure.clone(), actions);
        }
        if is_too_large && has_rest {
            return self.send_rest(now, wave_id, usize::MAX, actions);
        }
        if n_others == 0 || (is_final && !joining.is_empty()) {
            // What may have been in the way is gone.
            return self.end_wave(now, wave_id, actions);
        }
        let since = *self.unsent_since.entry(replica).or_insert(now);
        let limit_ms = self.options.stuck_limit_ms;
        if is_final || now >= since.plus(limit_ms) {
            let message = format!(
                "replica {replica} cannot be sent the next step of the {n_others} requests that it has begun, \
                 tried for {} ms: {failure}",
                now.0 - since.0
            );
            let rank = self.options.replicas[usize::from(replica.0)].first().copied();
            let code = FailureCode::WorkerLost;
            return self.fail(
                Failure {
                    rank,
                    ..Failure::new(code, message)
                },
                actions,
            );
        }
        if let Some(wave) = self.waves.get_mut(&wave_id) {
            wave.retry_at = Some(now.plus(RETRY_MS.min(limit_ms)));
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
        self.held.clear();
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

    /// Deadlines of what runs, waves that do not end, and waves that are to be tried again.
    fn enforce_limits(&mut self, now: Millis, actions: &mut Vec<Action>) {
        let held: Vec<RequestId> = self.held.keys().copied().collect();
        for request_id in held {
            self.enforce_deadline(now, request_id, actions);
        }
        self.end_unwanted_rest(now, actions);
        let is_ripe = |(_, wave): &(&WaveId, &OpenWave)| wave.retry_at.is_some_and(|at| at <= now);
        let ripe: Vec<WaveId> = self.waves.iter().filter(is_ripe).map(|(id, _)| *id).collect();
        for wave_id in ripe {
            // The policy forms the next one from who is left.
            self.end_wave(now, wave_id, actions);
        }
        let mut stuck = None;
        for (wave_id, wave) in &mut self.waves {
            let is_wanted = |id: &RequestId| match self.requests.get(id).map(|record| &record.stage) {
                Some(Stage::Running(running)) => !running.is_stop_asked,
                Some(Stage::New(_) | Stage::Queued(_)) | None => false,
            };
            let n_computed = wave.joining.len() + wave.continuing.len();
            let mut computed = wave.joining.iter().chain(&wave.continuing);
            let is_due = match self.mode {
                Mode::Request => !computed.any(is_wanted),
                // A step ends for all its members at once, so whoever has to go waits for no one else's sake.
                Mode::Step => n_computed == 0 || !computed.all(is_wanted),
            };
            if wave.due.is_none() && is_due {
                wave.due = Some(now.plus(self.options.stuck_limit_ms));
            }
            if wave.retry_at.is_none() && wave.due.is_some_and(|due| due <= now) {
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

    fn enforce_deadline(&mut self, now: Millis, request_id: RequestId, actions: &mut Vec<Action>) {
        let Some(Record {
            deadline,
            stage: Stage::Running(running),
        }) = self.requests.get_mut(&request_id)
        else {
            return;
        };
        if now < *deadline {
            return;
        }
        running.is_expired = true;
        let grace_ms = self.options.cancel_grace_ms;
        let gave_up = (now >= deadline.plus(grace_ms)).then(|| {
            let progress = running.progress();
            if running.is_cancelled {
                let message = format!("cancelled {progress}; the worker had not stopped at the deadline");
                Failure::new(FailureCode::Cancelled, message)
            } else {
                let message = format!("the deadline passed {progress}; no result came in {grace_ms} ms more");
                Failure::new(FailureCode::DeadlineExceeded, message)
            }
        });
        let is_news = !running.is_stop_asked;
        self.stop(&[request_id], actions);
        if is_news && self.mode == Mode::Step {
            self.tell(now, PolicyEvent::Cancel { request_id }, actions);
        }
        if let Some(failure) = gave_up {
            self.end(request_id, Err(failure), actions);
        }
    }
}
