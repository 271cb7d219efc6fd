//! Scheduler and core together over random histories: a seed decides what owners, workers, time and a lying executor do.
//!
//! Owners' view is checked after every event (order, exactly one end, deadlines), and so are the dispatches and the counters.
//! A failure prints its seed, which replays the same history.

use crate::{
    RequestEvent, Stats,
    core::{Action, Core, CoreOptions, Event},
};
use denoised_executor::{ExecutorError, ExecutorEvent, Output};
use denoised_scheduler::{Millis, RequestPolicy};
use denoised_types::{
    Failure, FailureCode, GenerateRequest, Generated, Image, PhaseTimes, Rank, RequestId, Resolved, WaveId,
};
use std::collections::BTreeMap;

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
    is_started: bool,
    n_done: u32,
    end: Option<Result<(), FailureCode>>,
    is_cancelled: bool,
    is_stop_asked: bool,
}

/// A wave inside the simulated executor.
#[derive(Debug)]
struct Wave {
    rank: Rank,
    members: Vec<RequestId>,
    /// Since when nobody wants it to go on.
    unwanted_since: Option<Millis>,
}

struct World {
    core: Core,
    random: Random,
    now: Millis,
    owners: BTreeMap<RequestId, Owner>,
    waves: BTreeMap<WaveId, Wave>,
    n_submitted: u64,
    is_failed: bool,
    is_closing: bool,
    is_closed: bool,
    log: Vec<String>,
}

fn generated(rank: Rank) -> Generated {
    Generated {
        image: Image {
            width: 0,
            height: 0,
            rgb: Vec::new(),
        },
        tensors: Vec::new(),
        resolved: Resolved {
            width: 0,
            height: 0,
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
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let n_replicas = 1 + random.below(3) as u16;
        let options = CoreOptions {
            replicas: (0..n_replicas).map(|rank| vec![Rank(rank)]).collect(),
            cancel_grace_ms: GRACE_MS,
            stuck_limit_ms: STUCK_MS,
            origin_ns: 7,
        };
        let core = Core::new(Millis(0), Box::new(RequestPolicy::new(MAX_QUEUED)), options);
        Self {
            core,
            random,
            now: Millis(0),
            owners: BTreeMap::new(),
            waves: BTreeMap::new(),
            n_submitted: 0,
            is_failed: false,
            is_closing: false,
            is_closed: false,
            log: Vec::new(),
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
                    is_started: false,
                    n_done: 0,
                    end: None,
                    is_cancelled: false,
                    is_stop_asked: false,
                };
                self.owners.insert(*request_id, owner);
            }
            Event::Cancel { request_id } => {
                if let Some(owner) = self.owners.get_mut(request_id) {
                    owner.is_cancelled = true;
                }
            }
            Event::Executor(ExecutorEvent::WaveDone { wave_id }) => drop(self.waves.remove(wave_id)),
            Event::DispatchFailed { wave_id, error } => {
                self.is_failed |= *error == ExecutorError::Closed;
                self.waves.remove(wave_id);
            }
            Event::Executor(ExecutorEvent::WorldFailed(_)) | Event::Fail(_) => self.is_failed = true,
            Event::Drain => self.is_closing = true,
            Event::Close => (self.is_closing, self.is_closed) = (true, true),
            Event::Executor(_) | Event::Tick => {}
        }
        self.log.push(format!("{} {event:?}", self.now));
        let actions = self.core.on_event(self.now, event);
        self.log
            .extend(actions.iter().map(|action| format!("  {action:?}")));
        for action in actions {
            self.act(action);
        }
        if let Some(failure) = self.core.failure()
            && !self.is_failed
        {
            self.is_failed = true;
            // Nobody said so: the core has lost patience, with reason and in time.
            let since = self.waves.values().filter_map(|wave| wave.unwanted_since).min();
            assert_eq!(
                since.map(|since| since.plus(STUCK_MS)),
                Some(self.now),
                "{failure}"
            );
        }
        for wave in self.waves.values_mut() {
            let is_unwanted = wave.members.iter().all(|id| {
                let owner = &self.owners[id];
                owner.is_stop_asked || owner.end.is_some()
            });
            if is_unwanted && wave.unwanted_since.is_none() {
                wave.unwanted_since = Some(self.now);
            }
        }
        self.check();
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Notify { request_id, event } => self.notify(request_id, event),
            Action::Dispatch(wave) => {
                assert!(!self.is_failed && !self.is_closed);
                let [rank] = wave.ranks[..] else {
                    panic!("one rank per replica")
                };
                let is_busy = self.waves.values().any(|open| open.rank == rank);
                assert!(!is_busy, "two waves on rank {rank}");
                let members: Vec<RequestId> = wave.joining.iter().map(|member| member.request_id).collect();
                assert_eq!(members.len(), 1);
                for member in &wave.joining {
                    let owner = self.owners.get_mut(&member.request_id).unwrap();
                    assert!(owner.is_queued && owner.end.is_none() && !owner.is_dispatched);
                    assert!(owner.deadline > self.now, "dispatched too late");
                    assert_eq!(member.deadline_ns, owner.deadline.0 * 1_000_000 + 7);
                    assert_eq!(
                        member.request.seed, member.request_id.0,
                        "another request's arguments"
                    );
                    owner.is_dispatched = true;
                }
                self.waves.insert(
                    wave.wave_id,
                    Wave {
                        rank,
                        members,
                        unwanted_since: None,
                    },
                );
            }
            Action::Stop(request_ids) => {
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
                        assert!(owner.deadline <= self.now, "too early: {failure}");
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
        let is_idle = open().count() == 0 && (self.waves.is_empty() || self.is_failed);
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
        let ids: Vec<WaveId> = self.waves.keys().copied().collect();
        let Some(wave_id) = self.random.pick(&ids) else {
            return;
        };
        let wave = self.waves.get_mut(&wave_id).unwrap();
        let rank = wave.rank;
        let Some(&request_id) = wave.members.first() else {
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
                wave.members.clear();
                let outcome = match self.random.below(3) {
                    0 => Err(Failure::new(FailureCode::WorkerFailed, "a worker's error")),
                    1 if self.owners[&request_id].is_cancelled
                        || self.owners[&request_id].deadline <= self.now =>
                    {
                        Err(Failure::new(FailureCode::Cancelled, "stopped"))
                    }
                    _ => Ok(Output::from(generated(rank))),
                };
                ExecutorEvent::RequestDone { request_id, outcome }
            }
            // Against the contract: the member is forgotten.
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
                // A report about a running member would be believed: it is its executor's.
                let is_member = self.waves.values().any(|wave| wave.members.contains(&request_id));
                if is_member {
                    return;
                }
                ExecutorEvent::RequestDone {
                    request_id,
                    outcome: Ok(Output::from(generated(Rank(0)))),
                }
            }
            _ => {
                let wave_id = WaveId(self.random.below(1000));
                if self.waves.contains_key(&wave_id) {
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

    fn run(&mut self, n_events: usize) {
        let is_stuck_world = self.random.below(6) == 0;
        for event_idx in 0..n_events {
            let is_ending = event_idx > n_events * 3 / 4;
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
                90 if !self.is_failed => {
                    let fresh: Vec<WaveId> = self.waves.keys().copied().collect();
                    if let Some(wave_id) = self.random.pick(&fresh) {
                        let error = match self.random.below(3) {
                            0 => ExecutorError::TooLarge {
                                message_bytes: 2,
                                limit_bytes: 1,
                                limited_by: "test",
                            },
                            _ if self.random.below(10) == 0 => ExecutorError::Closed,
                            _ => {
                                let failure = Failure::new(FailureCode::Protocol, "cannot decode");
                                ExecutorError::Rank {
                                    failure,
                                    succeeded: Vec::new(),
                                }
                            }
                        };
                        self.is_closing |= error == ExecutorError::Closed;
                        self.step(Event::DispatchFailed { wave_id, error });
                    }
                }
                91 if is_ending => self.step(Event::Drain),
                92 if is_ending => self.step(Event::Close),
                93 if is_ending => {
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
    let mut totals = Stats::default();
    let mut n_failed_worlds = 0;
    for seed in 0..1500 {
        let mut world = World::new(seed);
        let run = std::panic::AssertUnwindSafe(|| world.run(200));
        if let Err(cause) = std::panic::catch_unwind(run) {
            let tail = world.log.len().saturating_sub(30);
            eprintln!(
                "seed {seed}, the last of its history:\n{}",
                world.log[tail..].join("\n")
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
    }
    // The histories reach what they are meant to reach.
    use FailureCode as Code;
    for code in [
        Code::Cancelled,
        Code::DeadlineExceeded,
        Code::WorkerLost,
        Code::WorkerFailed,
        Code::Closed,
    ] {
        assert!(totals.failed(code) > 100, "{code:?}: {totals:?}");
    }
    assert!(
        totals.n_finished > 5000 && totals.n_late > 20 && totals.n_stray > 1000,
        "{totals:?}"
    );
    assert!(n_failed_worlds > 200, "{n_failed_worlds}");
}

#[test]
fn a_seed_replays_its_history() {
    let log = |seed| {
        let mut world = World::new(seed);
        world.run(200);
        world.log
    };
    for seed in 0..5 {
        assert_eq!(log(seed), log(seed));
    }
}
