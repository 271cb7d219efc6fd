//! Scheduler and core together over random histories: a seed decides mode and batch, and what owners, workers, time and a lying
//! executor do.
//!
//! Owners' view is checked after every event (order, exactly one end, deadlines), and so are the dispatches and the counters.
//! A failure prints its seed, which replays the same history.

use crate::{
    RequestEvent, Stats,
    core::{Action, Core, CoreOptions, Event},
};
use denoised_executor::{ExecutorError, ExecutorEvent, Output};
use denoised_scheduler::{Millis, policy};
use denoised_types::{
    Adapter, Failure, FailureCode, GenerateRequest, Generated, Image, Mode, PhaseTimes, Rank, RequestId,
    Resolved, WaveId,
};
use denoised_wire::Member;
use std::collections::{BTreeMap, BTreeSet};

const GRACE_MS: u64 = 50;
const STUCK_MS: u64 = 400;
const MAX_QUEUED: usize = 6;

/// SplitMix64 (Steele, Lea and Flood 2014), for repeatable choices.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        of.get(self.below(of.len() as u64) as usize).copied()
    }
}

/// What an owner has seen.
#[derive(Debug)]
struct Owner {
    deadline: Millis,
    is_queued: bool,
    is_dispatched: bool,
    /// It was dispatched in a message that was too large, and is to be dispatched again in a part of it.
    is_deferred: bool,
    is_started: bool,
    n_done: u32,
    end: Option<Result<(), FailureCode>>,
    is_cancelled: bool,
    is_stop_asked: bool,
    /// The rank that holds it: from the wave that it joins until the executor says that it ended.
    held_by: Option<Rank>,
    /// Step mode: a wave told the workers to give it up.
    is_given_up: bool,
}

/// A wave inside the simulated executor.
#[derive(Debug)]
struct Wave {
    rank: Rank,
    /// Who is computed in it.
    members: Vec<RequestId>,
    joining: Vec<RequestId>,
    cancelled: Vec<RequestId>,
    /// Who joined, with what they asked for.
    payload: Vec<Member>,
    /// Since when nobody wants it to go on.
    unwanted_since: Option<Millis>,
    /// The executor did not take it.
    is_refused: bool,
}

struct World {
    core: Core,
    mode: Mode,
    max_batch: usize,
    random: Random,
    now: Millis,
    owners: BTreeMap<RequestId, Owner>,
    waves: BTreeMap<WaveId, Wave>,
    n_submitted: u64,
    is_failed: bool,
    is_closing: bool,
    is_closed: bool,
    /// No wave can be sent any more.
    is_ring_full: bool,
    /// Waves that were sent just now.
    fresh: Vec<WaveId>,
    /// Waves that were too large for one message.
    divided: BTreeSet<WaveId>,
    n_parts: u64,
    /// Step mode: since when a rank could not be sent a wave.
    unsent_since: BTreeMap<Rank, Millis>,
    n_shared_waves: u64,
    n_refused_steps: u64,
    /// The history in words, if it is wanted.
    log: Option<Vec<String>>,
}

/// Requests use one of three adapters.
fn adapter_of(seed: u64) -> String {
    format!("adapter {}", seed % 3)
}

fn generated(rank: Rank) -> Generated {
    Generated {
        image: Image {
            width: 0,
            height: 0,
            n_frames: 1,
            rgb: Vec::new(),
        },
        tensors: Vec::new(),
        resolved: Resolved {
            width: 0,
            height: 0,
            n_frames: 1,
            n_steps: 1,
            guidance: 1.0,
            seed: 0,
            sampler: String::new(),
            warnings: Vec::new(),
        },
        rank,
        times: PhaseTimes::default(),
    }
}

impl World {
    fn new(seed: u64, mode: Mode) -> Self {
        let mut random = Random(seed);
        let n_replicas = 1 + random.below(3) as u16;
        let options = CoreOptions {
            replicas: (0..n_replicas).map(|rank| vec![Rank(rank)]).collect(),
            cancel_grace_ms: GRACE_MS,
            stuck_limit_ms: STUCK_MS,
            origin_ns: 7,
            model: None,
        };
        let max_batch = 1 + random.below(4) as usize;
        let core = Core::new(Millis(0), policy(mode, MAX_QUEUED, max_batch).unwrap(), options);
        Self {
            core,
            mode,
            max_batch,
            random,
            now: Millis(0),
            owners: BTreeMap::new(),
            waves: BTreeMap::new(),
            n_submitted: 0,
            is_failed: false,
            is_closing: false,
            is_closed: false,
            is_ring_full: false,
            fresh: Vec::new(),
            divided: BTreeSet::new(),
            n_parts: 0,
            unsent_since: BTreeMap::new(),
            n_shared_waves: 0,
            n_refused_steps: 0,
            log: None,
        }
    }

    fn step(&mut self, event: Event) {
        match &event {
            Event::Submit {
                request_id, deadline, ..
            } => {
                let owner = Owner {
                    deadline: *deadline,
                    is_queued: false,
                    is_dispatched: false,
                    is_deferred: false,
                    is_started: false,
                    n_done: 0,
                    end: None,
                    is_cancelled: false,
                    is_stop_asked: false,
                    held_by: None,
                    is_given_up: false,
                };
                self.owners.insert(*request_id, owner);
            }
            Event::Cancel { request_id } => {
                if let Some(owner) = self.owners.get_mut(request_id) {
                    owner.is_cancelled = true;
                    // In step mode the policy knows, and the next wave says so.
                    owner.is_stop_asked |= self.mode == Mode::Step && owner.held_by.is_some();
                }
            }
            Event::Executor(ExecutorEvent::WaveDone { wave_id }) => {
                if let Some(wave) = self.waves.get(wave_id)
                    && !wave.is_refused
                    && let Some(wave) = self.waves.remove(wave_id)
                {
                    self.unsent_since.remove(&wave.rank);
                    let forgotten = match self.mode {
                        Mode::Request => wave.members,
                        Mode::Step => wave.cancelled,
                    };
                    self.release(&forgotten);
                }
            }
            Event::Executor(ExecutorEvent::RequestDone { request_id, .. }) => self.release(&[*request_id]),
            Event::DispatchFailed {
                wave_id,
                error,
                joining: handed_back,
            } => {
                self.is_failed |= *error == ExecutorError::Closed;
                let wave = self.waves.get_mut(wave_id).unwrap();
                wave.is_refused = true;
                let joining = wave.joining.clone();
                self.release(&joining);
                if let ExecutorError::TooLarge { .. } = error {
                    for member in handed_back {
                        self.owners.get_mut(&member.request_id).unwrap().is_deferred = true;
                        self.divided.insert(*wave_id);
                    }
                }
            }
            Event::Executor(ExecutorEvent::WorldFailed(_)) | Event::Fail(_) => self.is_failed = true,
            Event::Drain => self.is_closing = true,
            Event::Close => (self.is_closing, self.is_closed) = (true, true),
            Event::Executor(_) | Event::Tick => {}
        }
        if let Some(log) = &mut self.log {
            log.push(format!("{} {event:?}", self.now));
        }
        let actions = self.core.on_event(self.now, event);
        if let Some(log) = &mut self.log {
            log.extend(actions.iter().map(|action| format!("  {action:?}")));
        }
        for action in actions {
            self.act(action);
        }
        if let Some(failure) = self.core.failure()
            && !self.is_failed
        {
            self.is_failed = true;
            // Nobody said so: the core has lost patience, with reason and in time.
            let sent = self.waves.values().filter(|wave| !wave.is_refused);
            let since = sent.filter_map(|wave| wave.unwanted_since).min();
            let is_stuck = since.map(|since| since.plus(STUCK_MS)) == Some(self.now);
            let unsent = self.unsent_since.values().min();
            let is_unsendable = unsent.is_some_and(|since| since.plus(STUCK_MS) <= self.now);
            let is_final = ["exceeds the limit", "makes no sense"]
                .iter()
                .any(|text| failure.message.contains(text));
            assert!(is_stuck || is_unsendable || is_final, "{failure}");
        }
        if self.is_failed {
            self.waves.clear();
        }
        // In step mode what is due is known to the policy as soon as it is due.
        for owner in self.owners.values_mut() {
            let is_due = owner.held_by.is_some() && owner.deadline <= self.now;
            owner.is_stop_asked |= self.mode == Mode::Step && (is_due || self.is_closed);
        }
        for wave in self.waves.values_mut() {
            let is_unwanted = |id: &RequestId| {
                let owner = &self.owners[id];
                owner.is_stop_asked || owner.end.is_some()
            };
            let is_unwanted = match self.mode {
                Mode::Request => wave.members.iter().all(is_unwanted),
                Mode::Step => wave.members.is_empty() || wave.members.iter().any(is_unwanted),
            };
            if is_unwanted && wave.unwanted_since.is_none() {
                wave.unwanted_since = Some(self.now);
            }
        }
        self.check();
        while let Some(wave_id) = self.fresh.pop() {
            if self.is_ring_full && self.waves.get(&wave_id).is_some_and(|wave| !wave.is_refused) {
                let error = ExecutorError::Deadline {
                    what: "dispatching a wave".into(),
                    silent: Vec::new(),
                };
                self.refuse_wave(wave_id, error);
            }
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Notify { request_id, event } => self.notify(request_id, event),
            Action::Dispatch(wave) => self.dispatched(wave),
            Action::Stop(request_ids) => {
                assert_eq!(self.mode, Mode::Request);
                for request_id in request_ids {
                    let owner = self.owners.get_mut(&request_id).unwrap();
                    assert!(owner.is_dispatched && !owner.is_stop_asked);
                    owner.is_stop_asked = true;
                    let is_due = owner.deadline <= self.now;
                    assert!(
                        owner.is_cancelled || is_due || self.is_closed,
                        "nobody asked to stop"
                    );
                }
            }
        }
    }

    /// The executor has done with these.
    fn release(&mut self, request_ids: &[RequestId]) {
        for request_id in request_ids {
            if let Some(owner) = self.owners.get_mut(request_id) {
                owner.held_by = None;
            }
        }
        for wave in self.waves.values_mut() {
            for list in [&mut wave.members, &mut wave.joining, &mut wave.cancelled] {
                list.retain(|member| !request_ids.contains(member));
            }
        }
    }

    fn dispatched(&mut self, wave: denoised_wire::Wave) {
        assert!(!self.is_failed, "a dispatch in a dead world");
        assert_eq!(wave.mode, self.mode);
        let [rank] = wave.ranks[..] else {
            panic!("one rank per replica")
        };
        // A wave that could not be sent is over once its replica is tried again.
        let refused = |open: &Wave| open.rank == rank && open.is_refused;
        self.waves.retain(|_, open| !refused(open));
        let is_busy = self.waves.values().any(|open| open.rank == rank);
        assert!(!is_busy, "two waves on rank {rank}");
        let members: Vec<RequestId> = wave.request_ids().collect();
        assert!(members.len() <= self.max_batch, "too many members");
        assert!(!members.is_empty() || !wave.cancelled.is_empty(), "an empty wave");
        for member in &wave.joining {
            assert!(!self.is_closed, "joined after the close");
            let owner = self.owners.get_mut(&member.request_id).unwrap();
            let is_new = !owner.is_dispatched || std::mem::take(&mut owner.is_deferred);
            assert!(owner.is_queued && owner.end.is_none() && is_new);
            assert!(!owner.is_cancelled, "joined though cancelled");
            assert!(owner.deadline > self.now, "dispatched too late");
            let deadline_ns = match self.mode {
                Mode::Request => owner.deadline.0 * 1_000_000 + 7,
                Mode::Step => 0,
            };
            assert_eq!(member.deadline_ns, deadline_ns);
            assert_eq!(
                member.request.seed, member.request_id.0,
                "another request's arguments"
            );
            owner.is_dispatched = true;
            owner.held_by = Some(rank);
        }
        for request_id in &wave.continuing {
            let owner = &self.owners[request_id];
            assert_eq!(
                owner.held_by,
                Some(rank),
                "request {request_id} goes on elsewhere"
            );
            assert!(
                !owner.is_stop_asked,
                "request {request_id} is computed though given up"
            );
        }
        for request_id in &wave.cancelled {
            let owner = self.owners.get_mut(request_id).unwrap();
            assert_eq!(owner.held_by, Some(rank), "gave up what is not there");
            let is_wanted = !owner.is_cancelled && owner.deadline > self.now && !self.is_closed;
            assert!(!is_wanted, "gave up what its owner wants");
            owner.is_given_up = true;
        }
        let here = self
            .owners
            .iter()
            .filter(|(_, owner)| owner.held_by == Some(rank));
        let n_here = here.count();
        let is_part = self.divided.contains(&wave.wave_id);
        assert!(
            is_part || n_here == members.len() + wave.cancelled.len(),
            "somebody was left out"
        );
        self.n_parts += u64::from(is_part);
        let mut adapters: Vec<String> = members.iter().map(|id| adapter_of(id.0)).collect();
        adapters.dedup();
        let mut seen = Vec::new();
        adapters.retain(|name| {
            let is_new = !seen.contains(name);
            seen.push(name.clone());
            is_new
        });
        assert_eq!(wave.adapters, adapters);
        self.n_shared_waves += u64::from(members.len() > 1);
        let open = Wave {
            rank,
            members,
            joining: wave.joining.iter().map(|member| member.request_id).collect(),
            cancelled: wave.cancelled,
            payload: wave.joining,
            unwanted_since: None,
            is_refused: false,
        };
        self.fresh.push(wave.wave_id);
        self.waves.insert(wave.wave_id, open);
    }

    fn notify(&mut self, request_id: RequestId, event: RequestEvent) {
        let owner = self.owners.get_mut(&request_id).unwrap();
        assert_eq!(owner.end, None, "an event after the end");
        match event {
            RequestEvent::Queued { position } => {
                assert!(!owner.is_queued && position < MAX_QUEUED);
                owner.is_queued = true;
            }
            RequestEvent::Started { .. } => {
                assert!(owner.is_dispatched && !owner.is_started);
                owner.is_started = true;
            }
            RequestEvent::Step { n_done, n_steps } => {
                assert!(owner.is_dispatched && n_done > owner.n_done && n_done <= n_steps);
                owner.n_done = n_done;
            }
            RequestEvent::Finished(_) => {
                assert!(owner.is_dispatched);
                owner.end = Some(Ok(()));
            }
            RequestEvent::Failed(failure) => {
                match failure.code {
                    FailureCode::Cancelled => {
                        assert!(
                            owner.is_cancelled,
                            "request {request_id} was not cancelled: {failure}"
                        );
                    }
                    FailureCode::DeadlineExceeded => {
                        let is_unsent = failure.message.starts_with("dispatching a wave");
                        assert!(is_unsent || owner.deadline <= self.now, "too early: {failure}");
                    }
                    FailureCode::QueueFull => assert!(!owner.is_queued),
                    FailureCode::Closed => assert!(self.is_closing),
                    _ => {}
                }
                owner.end = Some(Err(failure.code));
            }
        }
    }

    fn check(&self) {
        let open = || self.owners.values().filter(|owner| owner.end.is_none());
        for owner in open() {
            assert!(!self.is_failed && !self.is_closed, "left waiting by a dead world");
            assert!(owner.is_queued, "neither admitted nor refused");
            let limit = if owner.is_dispatched {
                owner.deadline.plus(GRACE_MS)
            } else {
                owner.deadline
            };
            assert!(limit > self.now, "overdue");
        }
        let stats = self.core.stats();
        let n_dispatched = open().filter(|owner| owner.is_dispatched).count();
        let n_ended = |code: Option<FailureCode>| {
            let is_it = |owner: &&Owner| match (owner.end, code) {
                (Some(Ok(())), None) => true,
                (Some(Err(ended)), Some(code)) => ended == code && owner.is_queued,
                _ => false,
            };
            self.owners.values().filter(is_it).count() as u64
        };
        assert_eq!(stats.n_running, n_dispatched);
        assert_eq!(stats.n_queued, open().count() - n_dispatched);
        assert!(stats.n_queued <= MAX_QUEUED);
        assert_eq!(stats.n_finished, n_ended(None));
        for (code, n) in &stats.n_failed {
            assert_eq!(*n, n_ended(Some(*code)), "{code:?}");
        }
        let admitted = self.owners.values().filter(|owner| owner.is_queued).count() as u64;
        assert_eq!(stats.n_submitted, admitted);
        assert_eq!(stats.n_refused, self.owners.len() as u64 - admitted);
        assert_eq!(balance(&stats), stats.n_submitted);
        let is_held = self.owners.values().any(|owner| owner.held_by.is_some());
        let is_over = self.waves.values().all(|wave| wave.is_refused) && !is_held;
        let is_idle = open().count() == 0 && (is_over || self.is_failed);
        assert_eq!(self.core.is_idle(), is_idle);
        if let Some(tick) = self.core.next_tick() {
            assert!(tick > self.now, "a tick is due that was just given");
        } else {
            assert!(is_idle, "nothing will ever end what is open");
        }
    }

    fn submit(&mut self) {
        self.n_submitted += 1;
        let mut request = Box::new(GenerateRequest::new("x"));
        request.seed = self.n_submitted;
        request.width = Some(64 * (1 + self.random.below(2) as u32));
        request.adapters.push(Adapter {
            name: adapter_of(self.n_submitted),
            scale: 1.0,
        });
        let wait_ms = 1 + self.random.below(600);
        let deadline = self.now.plus(wait_ms);
        self.step(Event::Submit {
            request_id: RequestId(self.n_submitted),
            request,
            deadline,
        });
    }

    /// A worker gets on with a wave, or ends it.
    fn work(&mut self) {
        let sent = self.waves.iter().filter(|(_, wave)| !wave.is_refused);
        let ids: Vec<WaveId> = sent.map(|(wave_id, _)| *wave_id).collect();
        let Some(wave_id) = self.random.pick(&ids) else {
            return;
        };
        let wave = &self.waves[&wave_id];
        let rank = wave.rank;
        if let Some(&request_id) = wave.cancelled.first()
            && self.random.below(8) > 0
        {
            let outcome = Err(Failure::new(FailureCode::Cancelled, "given up"));
            self.step(Event::Executor(ExecutorEvent::RequestDone {
                request_id,
                outcome,
            }));
            return;
        }
        let members = wave.members.clone();
        let Some(request_id) = self.random.pick(&members) else {
            // In step mode perhaps against the contract: who was to be given up is forgotten.
            self.step(Event::Executor(ExecutorEvent::WaveDone { wave_id }));
            return;
        };
        let n_done = self.owners[&request_id].n_done + 1;
        let event = match self.random.below(8) {
            0 | 1 => ExecutorEvent::RequestStarted { request_id, rank },
            2..5 => ExecutorEvent::Step {
                request_id,
                n_done,
                n_steps: 9,
            },
            5 | 6 => {
                let owner = &self.owners[&request_id];
                let may_stop = self.mode == Mode::Request && owner.is_stop_asked || owner.is_given_up;
                let outcome = match self.random.below(3) {
                    0 => Err(Failure::new(FailureCode::WorkerFailed, "a worker's error")),
                    1 if may_stop && (owner.is_cancelled || owner.deadline <= self.now) => {
                        Err(Failure::new(FailureCode::Cancelled, "stopped"))
                    }
                    _ => Ok(Output::from(generated(rank))),
                };
                ExecutorEvent::RequestDone { request_id, outcome }
            }
            // In request mode against the contract: its members are forgotten. In step mode they go on.
            _ => ExecutorEvent::WaveDone { wave_id },
        };
        self.step(Event::Executor(event));
    }

    /// Reports about anything at all, most of them senseless.
    fn lie(&mut self) {
        let request_id = RequestId(self.random.below(self.n_submitted + 3));
        let event = match self.random.below(4) {
            0 => ExecutorEvent::RequestStarted {
                request_id,
                rank: Rank(0),
            },
            1 => {
                let (n_done, n_steps) = (self.random.below(12) as u32, self.random.below(12) as u32);
                ExecutorEvent::Step {
                    request_id,
                    n_done,
                    n_steps,
                }
            }
            2 => {
                // A report about a request that the executor holds would be believed.
                let owner = self.owners.get(&request_id);
                if owner.is_some_and(|owner| owner.held_by.is_some()) {
                    return;
                }
                ExecutorEvent::RequestDone {
                    request_id,
                    outcome: Ok(Output::from(generated(Rank(0)))),
                }
            }
            _ => {
                let refused = self.waves.iter().find(|(_, wave)| wave.is_refused);
                let wave_id = match refused {
                    // It was never sent, so it cannot have ended; or it is long over.
                    Some((wave_id, _)) => *wave_id,
                    None => WaveId(self.random.below(1000)),
                };
                if self.waves.get(&wave_id).is_some_and(|wave| !wave.is_refused) {
                    return;
                }
                ExecutorEvent::WaveDone { wave_id }
            }
        };
        let is_certain = matches!(
            event,
            ExecutorEvent::RequestDone { .. } | ExecutorEvent::WaveDone { .. }
        );
        let before = self.core.stats();
        self.step(Event::Executor(event));
        let after = self.core.stats();
        assert_eq!(after.n_finished, before.n_finished, "a lie finished a request");
        if is_certain && !self.is_failed {
            assert_eq!(after.n_stray, before.n_stray + 1, "a lie was not counted");
        }
    }

    fn pass_time(&mut self, wait_ms: u64) {
        let until = self.now.plus(wait_ms);
        // As the shell does: a tick whenever one is due, and never past it.
        while let Some(tick) = self.core.next_tick()
            && tick <= until
        {
            self.now = tick;
            self.step(Event::Tick);
        }
        self.now = until;
    }

    /// A wave cannot be sent. (A real executor says so before it says anything else about the wave.)
    fn refuse(&mut self) {
        let sent = self.waves.iter().filter(|(_, wave)| !wave.is_refused);
        let fresh: Vec<WaveId> = sent.map(|(wave_id, _)| *wave_id).collect();
        let Some(wave_id) = self.random.pick(&fresh) else {
            return;
        };
        let wave = &self.waves[&wave_id];
        // Without anybody who joins these end the world; not often.
        let may_be_final = !wave.joining.is_empty() || self.random.below(8) == 0;
        let error = match self.random.below(6) {
            0 if may_be_final => ExecutorError::TooLarge {
                message_bytes: 2,
                limit_bytes: 1,
                limited_by: "test",
            },
            1 if may_be_final => {
                let failure = Failure::new(FailureCode::Protocol, "the wave makes no sense");
                ExecutorError::Refused(failure)
            }
            _ if self.random.below(10) == 0 => ExecutorError::Closed,
            _ => ExecutorError::Deadline {
                what: "dispatching a wave".into(),
                silent: Vec::new(),
            },
        };
        self.refuse_wave(wave_id, error);
    }

    fn refuse_wave(&mut self, wave_id: WaveId, error: ExecutorError) {
        let wave = &self.waves[&wave_id];
        let goes_on = wave.members.len() > wave.joining.len() || !wave.cancelled.is_empty();
        let is_final = matches!(error, ExecutorError::TooLarge { .. } | ExecutorError::Refused(_));
        if goes_on && (!is_final || wave.joining.is_empty()) {
            self.unsent_since.entry(wave.rank).or_insert(self.now);
            self.n_refused_steps += 1;
        }
        self.is_closing |= error == ExecutorError::Closed;
        // As the shell does.
        let joining = match wave.payload.len() {
            2.. => wave.payload.clone(),
            _ => Vec::new(),
        };
        self.step(Event::DispatchFailed {
            wave_id,
            error,
            joining,
        });
    }

    fn run(&mut self, n_events: usize) {
        let is_stuck_world = self.random.below(6) == 0;
        let ring_fills_up = self.random.below(8) == 0;
        for event_idx in 0..n_events {
            let is_ending = event_idx > n_events * 3 / 4;
            self.is_ring_full = ring_fills_up && event_idx > n_events / 2;
            match self.random.below(100) {
                0..30 => self.submit(),
                30..40 => {
                    let request_id = RequestId(self.random.below(self.n_submitted + 2));
                    self.step(Event::Cancel { request_id });
                }
                40..70 if !is_stuck_world && !self.is_failed => self.work(),
                70..76 => self.lie(),
                76..90 => {
                    let wait_ms = self.random.below(40);
                    self.pass_time(wait_ms);
                }
                90 if !self.is_failed => self.refuse(),
                91 if is_ending => self.step(Event::Drain),
                92 if is_ending => self.step(Event::Close),
                93 if is_ending && self.random.below(3) == 0 => {
                    let failure = Failure::new(FailureCode::WorkerLost, "killed").on_rank(Rank(0));
                    self.step(Event::Executor(ExecutorEvent::WorldFailed(failure)));
                }
                _ => self.step(Event::Tick),
            }
        }
        // Nobody says anything any more: time alone ends everything.
        self.pass_time(600 + GRACE_MS + STUCK_MS + 1);
        let open: Vec<_> = self
            .owners
            .iter()
            .filter(|(_, owner)| owner.end.is_none())
            .collect();
        assert!(open.is_empty(), "{open:?}");
        assert!(self.core.is_idle(), "a wave outlived its limit");
    }
}

fn balance(stats: &Stats) -> u64 {
    stats.n_finished + stats.failed_in_all() + (stats.n_queued + stats.n_running) as u64
}

#[test]
#[allow(
    clippy::print_stderr,
    reason = "a failing seed and its history must be seen to be replayed"
)]
fn every_request_ends_once_in_random_histories() {
    for mode in [Mode::Request, Mode::Step] {
        let mut totals = Stats::default();
        let (mut n_failed_worlds, mut n_shared_waves, mut n_refused_steps, mut n_parts) = (0, 0, 0, 0);
        for seed in 0..1500 {
            let mut world = World::new(seed, mode);
            let run =
                |world: &mut World| std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run(200)));
            if let Err(cause) = run(&mut world) {
                let mut again = World::new(seed, mode);
                again.log = Some(Vec::new());
                drop(run(&mut again));
                let log = again.log.unwrap_or_default();
                let tail = log.len().saturating_sub(30);
                eprintln!(
                    "seed {seed} in mode {mode:?}, the last of its history:\n{}",
                    log[tail..].join("\n")
                );
                std::panic::resume_unwind(cause);
            }
            let stats = world.core.stats();
            totals.n_finished += stats.n_finished;
            totals.n_late += stats.n_late;
            totals.n_stray += stats.n_stray;
            for (code, n) in stats.n_failed {
                (0..n).for_each(|_| totals.count_failed(code));
            }
            n_failed_worlds += u64::from(world.is_failed);
            n_shared_waves += world.n_shared_waves;
            n_refused_steps += world.n_refused_steps;
            n_parts += world.n_parts;
        }
        let reached = format!(
            "{mode:?}: {totals:?}, {n_failed_worlds} worlds failed, {n_shared_waves} waves of several, \
             {n_refused_steps} steps not sent, {n_parts} parts of waves"
        );
        eprintln!("{reached}");
        // The histories reach what they are meant to reach.
        use FailureCode as Code;
        for code in [
            Code::Cancelled,
            Code::DeadlineExceeded,
            Code::WorkerLost,
            Code::WorkerFailed,
            Code::Closed,
            Code::Internal,
        ] {
            assert!(totals.failed(code) > 10, "{code:?} is rare; {reached}");
        }
        assert!(
            totals.n_finished > 5000 && totals.n_late > 20 && totals.n_stray > 1000,
            "{reached}"
        );
        assert!(n_failed_worlds > 200 && n_shared_waves > 1000, "{reached}");
        assert!(mode == Mode::Request || n_refused_steps > 1000, "{reached}");
        assert!(n_parts > 100, "{reached}");
    }
}

#[test]
fn a_seed_replays_its_history() {
    let log = |seed, mode| {
        let mut world = World::new(seed, mode);
        world.log = Some(Vec::new());
        world.run(200);
        world.log
    };
    for seed in 0..5 {
        for mode in [Mode::Request, Mode::Step] {
            assert_eq!(log(seed, mode), log(seed, mode));
        }
    }
}
