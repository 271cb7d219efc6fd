//! Random histories from a seed: whatever happens in whatever order, the rules in the crate's head hold after every event.
//!
//! The model below keeps its own books from events and actions alone and compares. A failure prints the seed and the event's
//! index; running that seed again replays it exactly.

use denoised_scheduler::{Action, BatchKey, EndReason, Event, Millis, Policy, ReplicaIdx, policy};
use denoised_types::{Mode, RequestId, WaveId};
use std::collections::{BTreeMap, BTreeSet};

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
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Queued { deadline: Millis },
    Running { replica: ReplicaIdx, is_cancelled: bool },
    Ended,
}

/// A replica that is up, as the events and actions so far imply.
#[derive(Default)]
struct Replica {
    wave: Option<WaveId>,
    last_wave: u64,
    /// What it has begun and not ended, in the order of joining.
    residents: Vec<RequestId>,
}

/// What the events and actions so far imply.
struct Books {
    mode: Mode,
    max_queued: usize,
    max_batch: usize,
    fates: BTreeMap<RequestId, Fate>,
    keys: BTreeMap<RequestId, BatchKey>,
    /// Waiting requests in the order they were admitted.
    order: Vec<RequestId>,
    replicas: BTreeMap<ReplicaIdx, Replica>,
    last_wave: u64,
    n_waves: u64,
    is_draining: bool,
    is_closed: bool,
}

impl Books {
    fn new(mode: Mode, max_queued: usize, max_batch: usize) -> Self {
        Self {
            mode,
            max_queued,
            max_batch,
            fates: BTreeMap::new(),
            keys: BTreeMap::new(),
            order: Vec::new(),
            replicas: BTreeMap::new(),
            last_wave: 0,
            n_waves: 0,
            is_draining: false,
            is_closed: false,
        }
    }

    fn is_cancelled(&self, request_id: RequestId) -> bool {
        let fate = self.fates[&request_id];
        matches!(
            fate,
            Fate::Running {
                is_cancelled: true,
                ..
            }
        )
    }

    /// Residents that somebody wants.
    fn wanted(&self, replica: &Replica) -> Vec<RequestId> {
        let residents = replica.residents.iter().copied();
        residents.filter(|id| !self.is_cancelled(*id)).collect()
    }

    fn waves(&self) -> Vec<WaveId> {
        self.replicas
            .values()
            .filter_map(|replica| replica.wave)
            .collect()
    }

    /// Notes what an event itself says, before the policy has answered.
    fn before(&mut self, event: &Event) {
        match event {
            Event::MemberDone { request_id } => {
                if let Some(Fate::Running { replica, .. }) = self.fates.get(request_id).copied() {
                    self.fates.insert(*request_id, Fate::Ended);
                    let residents = &mut self.replicas.get_mut(&replica).unwrap().residents;
                    residents.retain(|id| id != request_id);
                }
            }
            Event::WaveDone { wave_id } => {
                let mut replicas = self.replicas.values_mut();
                if let Some(replica) = replicas.find(|replica| replica.wave == Some(*wave_id)) {
                    replica.wave = None;
                    if self.mode == Mode::Request {
                        for request_id in std::mem::take(&mut replica.residents) {
                            self.fates.insert(request_id, Fate::Ended);
                        }
                    }
                }
            }
            Event::ReplicaUp { replica } => {
                self.replicas.entry(*replica).or_default();
            }
            Event::Submit { request_id, key, .. } => {
                self.keys.entry(*request_id).or_insert(*key);
            }
            Event::Cancel { request_id } if self.mode == Mode::Step => {
                if let Some(Fate::Running { is_cancelled, .. }) = self.fates.get_mut(request_id) {
                    *is_cancelled = true;
                }
            }
            Event::Drain => self.is_draining = true,
            Event::Close => {
                self.is_closed = true;
                if self.mode == Mode::Step {
                    for fate in self.fates.values_mut() {
                        if let Fate::Running { is_cancelled, .. } = fate {
                            *is_cancelled = true;
                        }
                    }
                }
            }
            Event::Cancel { .. } | Event::ReplicaDown { .. } | Event::Tick => {}
        }
    }

    fn act(&mut self, now: Millis, event: &Event, action: &Action) {
        match action {
            Action::Admitted { request_id, n_ahead } => {
                let Event::Submit {
                    request_id: submitted,
                    deadline,
                    ..
                } = event
                else {
                    panic!("admitted without a submit");
                };
                assert_eq!(request_id, submitted);
                assert!(!self.is_draining && !self.is_closed, "admitted while closing");
                assert!(*deadline > now, "admitted past its deadline");
                assert_eq!(*n_ahead, self.order.len());
                let fate = self
                    .fates
                    .insert(*request_id, Fate::Queued { deadline: *deadline });
                assert_eq!(fate, None, "admitted twice");
                self.order.push(*request_id);
            }
            Action::Dispatch {
                wave_id,
                replica,
                members,
                cancelled,
            } => self.dispatched(now, *wave_id, *replica, members, cancelled),
            Action::Stop { request_ids } => {
                assert_eq!(
                    self.mode,
                    Mode::Request,
                    "step mode tells the workers with a wave"
                );
                for request_id in request_ids {
                    let Some(Fate::Running { is_cancelled, .. }) = self.fates.get_mut(request_id) else {
                        panic!("stop for request {request_id}, which does not run");
                    };
                    assert!(!*is_cancelled, "stop asked twice");
                    *is_cancelled = true;
                    let wanted = match event {
                        Event::Cancel {
                            request_id: cancelled,
                        } => cancelled == request_id,
                        _ => *event == Event::Close,
                    };
                    assert!(wanted, "nobody asked to stop request {request_id}");
                }
            }
            Action::End { request_id, reason } => self.end(now, event, *request_id, *reason),
        }
    }

    fn dispatched(
        &mut self,
        now: Millis,
        wave_id: WaveId,
        replica_idx: ReplicaIdx,
        members: &[RequestId],
        cancelled: &[RequestId],
    ) {
        assert!(wave_id.0 > self.last_wave, "wave ids grow");
        self.last_wave = wave_id.0;
        self.n_waves += 1;
        assert!(members.len() <= self.max_batch, "more members than may be");
        assert!(!members.is_empty() || !cancelled.is_empty(), "an empty wave");
        let replica = self.replicas.get(&replica_idx);
        let replica = replica.expect("dispatched to a replica that is down");
        assert_eq!(replica.wave, None, "two waves on replica {replica_idx}");
        let wanted = self.wanted(replica);
        let residents = replica.residents.iter().copied();
        let given_up: Vec<RequestId> = residents.filter(|id| self.is_cancelled(*id)).collect();
        assert_eq!(
            cancelled, given_up,
            "every cancelled resident is given up, nobody else"
        );
        let (going_on, joining) = members.split_at(wanted.len().min(members.len()));
        assert_eq!(
            going_on, wanted,
            "every resident goes on, in the order of joining"
        );
        let rank =
            |(idx, replica): (&ReplicaIdx, &Replica)| (self.wanted(replica).len(), replica.last_wave, *idx);
        if !joining.is_empty() {
            assert!(!self.is_closed, "dispatched after close");
            let idle = self
                .replicas
                .iter()
                .filter(|(_, other)| other.wave.is_none() && self.wanted(other).len() < self.max_batch);
            let freest = idle.map(rank).min();
            assert_eq!(
                freest,
                Some(rank((&replica_idx, replica))),
                "not the freest replica"
            );
        }
        assert_eq!(joining, self.may_join(&wanted), "not who should join");
        for request_id in joining {
            let Some(Fate::Queued { deadline }) = self.fates.get(request_id) else {
                panic!("dispatched request {request_id}, which does not wait");
            };
            assert!(*deadline > now, "dispatched past its deadline");
            let fate = Fate::Running {
                replica: replica_idx,
                is_cancelled: false,
            };
            self.fates.insert(*request_id, fate);
            self.order.retain(|id| id != request_id);
        }
        let replica = self.replicas.get_mut(&replica_idx).unwrap();
        replica.wave = Some(wave_id);
        replica.last_wave = wave_id.0;
        replica.residents.extend(joining);
    }

    /// Who joins a wave with these residents, in the words of the policies' heads.
    fn may_join(&self, residents: &[RequestId]) -> Vec<RequestId> {
        let mut keys: BTreeSet<BatchKey> = residents.iter().map(|id| self.keys[id]).collect();
        let mut waiting = self.order.clone();
        let mut joining = Vec::new();
        let n_running: usize = self
            .replicas
            .values()
            .map(|replica| self.wanted(replica).len())
            .sum();
        let n_most = match self.mode {
            Mode::Request => self.max_batch,
            Mode::Step => {
                let share = (n_running + waiting.len()).div_ceil(self.replicas.len());
                self.max_batch.min(share)
            }
        };
        while residents.len() + joining.len() < n_most && !waiting.is_empty() {
            let alike = waiting.iter().position(|id| keys.contains(&self.keys[id]));
            let next = match (self.mode, joining.is_empty(), alike) {
                // The oldest always makes progress.
                (_, true, _) => 0,
                (_, false, Some(alike)) => alike,
                (Mode::Step, false, None) => 0,
                (Mode::Request, false, None) => break,
            };
            let next = waiting.remove(next);
            keys.insert(self.keys[&next]);
            joining.push(next);
        }
        joining
    }

    fn end(&mut self, now: Millis, event: &Event, request_id: RequestId, reason: EndReason) {
        let fate = self.fates.insert(request_id, Fate::Ended);
        assert_ne!(fate, Some(Fate::Ended), "request {request_id} ended twice");
        self.order.retain(|queued| *queued != request_id);
        match (reason, fate) {
            (EndReason::QueueFull { n_queued, max_queued }, None) => {
                assert!(matches!(event, Event::Submit { request_id: id, .. } if *id == request_id));
                assert_eq!((n_queued, max_queued), (self.order.len(), self.max_queued));
                let is_busy = self.replicas.values().all(|replica| replica.wave.is_some());
                assert!(n_queued >= max_queued && is_busy, "refused without need");
            }
            (EndReason::Closed, None) => assert!(self.is_draining || self.is_closed),
            (EndReason::Closed, Some(Fate::Queued { .. })) => assert_eq!(*event, Event::Close),
            (EndReason::Cancelled, Some(Fate::Queued { .. })) => {
                assert_eq!(*event, Event::Cancel { request_id });
            }
            (EndReason::Expired, None) => {
                assert!(matches!(event, Event::Submit { deadline, .. } if *deadline <= now));
            }
            (EndReason::Expired, Some(Fate::Queued { deadline })) => assert!(deadline <= now),
            (EndReason::ReplicaLost(lost), Some(Fate::Running { replica, .. })) => {
                assert_eq!((lost, event), (replica, &Event::ReplicaDown { replica }));
                let residents = &mut self.replicas.get_mut(&replica).unwrap().residents;
                residents.retain(|id| *id != request_id);
            }
            other => panic!("request {request_id} ended with {other:?}"),
        }
    }

    fn check(&mut self, now: Millis, event: &Event, policy: &dyn Policy) {
        if let Event::ReplicaDown { replica } = event
            && let Some(lost) = self.replicas.remove(replica)
        {
            let left = lost.residents;
            assert!(
                left.is_empty(),
                "requests {left:?} vanished with replica {replica}"
            );
        }
        let fates = self.fates.values();
        let n_running = fates.filter(|fate| matches!(fate, Fate::Running { .. })).count();
        let idle = || self.replicas.values().filter(|replica| replica.wave.is_none());
        let load = policy.load();
        assert_eq!(
            (load.n_queued, load.n_running, load.n_replicas, load.n_idle),
            (self.order.len(), n_running, self.replicas.len(), idle().count())
        );
        assert!(load.n_queued <= self.max_queued, "the queue outgrew its bound");
        assert!(
            load.n_queued == 0 || load.n_idle == 0,
            "requests wait beside an idle replica"
        );
        assert!(
            idle().all(|replica| replica.residents.is_empty()),
            "a replica idles with requests it has begun"
        );
        if let Event::Submit { request_id, .. } = event {
            assert!(self.fates.contains_key(request_id), "a submit got no answer");
        }
        if let Event::Cancel { request_id } = event {
            let fate = self.fates.get(request_id);
            let is_heard = match fate {
                Some(Fate::Queued { .. }) => false,
                Some(Fate::Running { is_cancelled, .. }) => *is_cancelled,
                Some(Fate::Ended) | None => true,
            };
            assert!(is_heard, "a cancel was ignored: {fate:?}");
        }
        let queued = self.order.iter().map(|id| match self.fates[id] {
            Fate::Queued { deadline } => deadline,
            fate => panic!("request {id} waits and is {fate:?}"),
        });
        let next = queued.min().filter(|deadline| *deadline < Millis::NEVER);
        assert_eq!(policy.next_tick(), next, "the next tick is the nearest deadline");
        assert!(
            next.is_none_or(|deadline| deadline > now),
            "an overdue request still waits"
        );
    }
}

/// The next event: mostly sensible, sometimes late, doubled or about something that never was.
fn choose(random: &mut Random, books: &Books, now: Millis, n_submitted: &mut u64, ending: bool) -> Event {
    let any_id = |random: &mut Random, n: u64| RequestId(1 + random.below(n + 3));
    let busy = books.waves();
    match random.below(100) {
        0..35 => {
            // Now and then an id that is in use already (and not about to expire); the policy must ignore it.
            let lives = |id: &RequestId| match books.fates[id] {
                Fate::Queued { deadline } => deadline > now,
                Fate::Running { .. } => true,
                Fate::Ended => false,
            };
            let first = books
                .replicas
                .values()
                .find_map(|replica| replica.residents.first());
            let live = match random.below(40) {
                0 => books.order.last().copied(),
                1 => first.copied(),
                _ => None,
            };
            let request_id = live.filter(lives).unwrap_or_else(|| {
                *n_submitted += 1;
                RequestId(*n_submitted)
            });
            let deadline = match random.below(4) {
                0 => Millis::NEVER,
                1 => now.plus(random.below(20)),
                _ => now.plus(random.below(400)),
            };
            Event::Submit {
                request_id,
                deadline,
                key: BatchKey(random.below(3)),
            }
        }
        35..45 => Event::Cancel {
            request_id: any_id(random, *n_submitted),
        },
        45..48 => {
            let running = books
                .replicas
                .values()
                .find_map(|replica| replica.residents.last());
            let request_id = running.copied();
            Event::Cancel {
                request_id: request_id.unwrap_or(RequestId(0)),
            }
        }
        48..65 => {
            let busy: Vec<&Replica> = books.replicas.values().collect();
            let replica = busy.get(random.below(busy.len() as u64) as usize);
            let residents = replica.map_or(&[][..], |replica| &replica.residents[..]);
            let member = residents.get(random.below(residents.len() as u64) as usize);
            let request_id = member.copied().unwrap_or_else(|| any_id(random, *n_submitted));
            Event::MemberDone { request_id }
        }
        65..85 => {
            let wave = busy.get(random.below(busy.len() as u64) as usize).copied();
            let stray = random.below(10) == 0;
            let wave_id = wave
                .filter(|_| !stray)
                .unwrap_or(WaveId(random.below(books.last_wave + 3)));
            Event::WaveDone { wave_id }
        }
        85..88 => Event::ReplicaDown {
            replica: ReplicaIdx(random.below(5) as u16),
        },
        88..92 => Event::ReplicaUp {
            replica: ReplicaIdx(random.below(4) as u16),
        },
        92 if ending => Event::Drain,
        93 if ending => Event::Close,
        _ => Event::Tick,
    }
}

/// A policy under its books.
struct Watched {
    policy: Box<dyn Policy>,
    books: Books,
    n_events: u64,
}

impl Watched {
    fn step(&mut self, now: Millis, event: Event) {
        self.n_events += 1;
        self.books.before(&event);
        let actions = self.policy.on_event(now, event.clone());
        for action in &actions {
            self.books.act(now, &event, action);
        }
        self.books.check(now, &event, &*self.policy);
    }

    /// Members end and waves end, one after the other, until nothing runs. Returns how many waves that took.
    fn work_off(&mut self, now: Millis) -> u64 {
        let mut n_waves = 0;
        while let Some(wave_id) = self.books.waves().first().copied() {
            n_waves += 1;
            assert!(n_waves < 10_000, "waves without end");
            let replicas = self.books.replicas.values();
            let mut of_wave = replicas.filter(|replica| replica.wave == Some(wave_id));
            let residents = of_wave.next().unwrap().residents.clone();
            // In step mode the others go on; those that are given up end with the wave that says so.
            let ending = residents.iter().enumerate();
            let ending = ending.filter(|(idx, id)| *idx == 0 || self.books.is_cancelled(**id));
            let ending: Vec<RequestId> = ending.map(|(_, id)| *id).collect();
            for request_id in ending {
                self.step(now, Event::MemberDone { request_id });
            }
            self.step(now, Event::WaveDone { wave_id });
        }
        n_waves
    }
}

/// What some histories had in all.
#[derive(Debug, Default)]
struct Totals {
    n_events: u64,
    n_requests: u64,
    n_waves: u64,
}

/// Makes a policy from `max_queued` and `max_batch`.
type Make = dyn Fn(usize, usize) -> Box<dyn Policy>;

/// One history, checked after every event, and then brought to an end.
fn run_history(seed: u64, n_events: usize, make: &Make) -> Totals {
    let mut random = Random(seed);
    let max_queued = [0, 1, 3, 16, 200][random.below(5) as usize];
    let max_batch = [1, 2, 3, 8][random.below(4) as usize];
    let policy = make(max_queued, max_batch);
    let mode = policy.mode();
    let mut watched = Watched {
        policy,
        books: Books::new(mode, max_queued, max_batch),
        n_events: 0,
    };
    let mut now = Millis(random.below(1000));
    let mut n_submitted = 0;
    for replica in (0..random.below(4) as u16).map(ReplicaIdx) {
        watched.step(now, Event::ReplicaUp { replica });
    }
    for event_idx in 0..n_events {
        if random.below(3) == 0 {
            now = now.plus(random.below(60));
        }
        let ending = event_idx > n_events / 2;
        let event = choose(&mut random, &watched.books, now, &mut n_submitted, ending);
        watched.step(now, event);
    }
    // Whatever the history was: with a replica up and waves that end, everything ends, closed or not.
    let replica = ReplicaIdx(0);
    watched.step(now, Event::ReplicaUp { replica });
    if random.below(2) == 0 {
        watched.step(now, Event::Close);
    }
    watched.work_off(now);
    let books = &watched.books;
    let open = books.fates.iter().find(|(_, fate)| **fate != Fate::Ended);
    assert_eq!(open, None, "left over at the end");
    assert_eq!(books.fates.len() as u64, n_submitted, "an id was lost");
    Totals {
        n_events: watched.n_events,
        n_requests: n_submitted,
        n_waves: books.n_waves,
    }
}

/// Runs many seeds; a panic inside names the seed.
#[allow(
    clippy::print_stderr,
    reason = "a failing seed must be seen to be replayed, and the totals say what was covered"
)]
fn run_histories(n_seeds: u64, n_events: usize, make: &Make) {
    let name = format!("{:?}", make(1, 1));
    let name = name.split(' ').next().unwrap_or_default();
    let mut totals = Totals::default();
    for seed in 0..n_seeds {
        let run = std::panic::AssertUnwindSafe(|| run_history(seed, n_events, make));
        match std::panic::catch_unwind(run) {
            Ok(Totals {
                n_events,
                n_requests,
                n_waves,
            }) => {
                totals.n_events += n_events;
                totals.n_requests += n_requests;
                totals.n_waves += n_waves;
            }
            Err(cause) => {
                eprintln!("{name} broke a rule in the history of seed {seed}");
                std::panic::resume_unwind(cause);
            }
        }
    }
    eprintln!("{name}: {totals:?}");
    assert!(totals.n_waves > totals.n_requests / 10, "{totals:?}");
}

#[test]
fn request_policy_keeps_the_rules_in_random_histories() {
    run_histories(1000, 500, &|max_queued, max_batch| {
        policy(Mode::Request, max_queued, max_batch).unwrap()
    });
}

#[test]
fn step_policy_keeps_the_rules_in_random_histories() {
    run_histories(1000, 500, &|max_queued, max_batch| {
        policy(Mode::Step, max_queued, max_batch).unwrap()
    });
}

/// A stream of requests of one key never keeps one of another key from its turn.
#[test]
fn a_request_of_a_rare_key_is_dispatched_after_those_before_it() {
    for mode in [Mode::Request, Mode::Step] {
        for max_batch in [1, 2, 5] {
            let mut policy = policy(mode, 1000, max_batch).unwrap();
            let mut running = Vec::new();
            let mut n_begun_before = None;
            let mut n_begun = 0;
            let mut note = |actions: Vec<Action>, running: &mut Vec<RequestId>| {
                let mut last = None;
                for action in actions {
                    if let Action::Dispatch { wave_id, members, .. } = action {
                        let joining = members.iter().filter(|id| !running.contains(id));
                        for request_id in joining.copied().collect::<Vec<_>>() {
                            if request_id == RequestId(21) {
                                n_begun_before = Some(n_begun);
                            }
                            n_begun += 1;
                            running.push(request_id);
                        }
                        last = Some(wave_id);
                    }
                }
                last
            };
            let replica = ReplicaIdx(0);
            policy.on_event(Millis(0), Event::ReplicaUp { replica });
            let mut wave_id = None;
            for id in 1..=400 {
                let submit = Event::Submit {
                    request_id: RequestId(id),
                    deadline: Millis::NEVER,
                    key: BatchKey(u64::from(id == 21)),
                };
                wave_id = note(policy.on_event(Millis(0), submit), &mut running).or(wave_id);
                // One ends for each that comes once twenty wait, so there is always company for the common key.
                if id > 30
                    && let Some(request_id) = running.first().copied()
                {
                    running.remove(0);
                    note(
                        policy.on_event(Millis(0), Event::MemberDone { request_id }),
                        &mut running,
                    );
                    if mode == Mode::Step || running.is_empty() {
                        let wave_done = Event::WaveDone {
                            wave_id: wave_id.unwrap(),
                        };
                        wave_id = note(policy.on_event(Millis(0), wave_done), &mut running);
                    }
                }
            }
            // Before it come the twenty that are older, and those who shared their waves.
            let n_before = n_begun_before.expect("the rare request is dispatched");
            assert!(
                n_before <= 20 + 20 * (max_batch - 1),
                "{mode:?} {max_batch}: {n_before}"
            );
        }
    }
}

/// The same requests, cancels and ends give the same waves: nothing depends on a hash map's order.
#[test]
fn equal_histories_give_equal_actions() {
    for seed in 0..40 {
        let record = |seed| {
            let mut random = Random(seed);
            let mode = [Mode::Request, Mode::Step][random.below(2) as usize];
            let mut policy = policy(mode, 64, 1 + random.below(4) as usize).unwrap();
            let mut log = Vec::new();
            for replica in (0..3).map(ReplicaIdx) {
                log.extend(policy.on_event(Millis(0), Event::ReplicaUp { replica }));
            }
            for id in 1..400 {
                let now = Millis(id * 3);
                let deadline = now.plus(random.below(90));
                let submit = Event::Submit {
                    request_id: RequestId(id),
                    deadline,
                    key: BatchKey(random.below(3)),
                };
                log.extend(policy.on_event(now, submit));
                let request_id = RequestId(1 + random.below(id));
                log.extend(policy.on_event(now, Event::Cancel { request_id }));
                if random.below(2) == 0 {
                    let wave_id = WaveId(1 + random.below(id));
                    log.extend(policy.on_event(now, Event::WaveDone { wave_id }));
                }
            }
            log.extend(policy.on_event(Millis(1200), Event::Close));
            log
        };
        assert_eq!(record(seed), record(seed));
    }
}

#[test]
fn a_batch_of_nothing_is_refused() {
    for mode in [Mode::Request, Mode::Step] {
        let failure = policy(mode, 8, 0).unwrap_err();
        assert_eq!(
            failure.to_string(),
            "at most 0 requests may be computed together, at least 1 is needed"
        );
    }
}
