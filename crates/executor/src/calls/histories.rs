//! Random histories of waves and of what ranks say, sense or nonsense: every request that joined ends exactly once, every wave too.

use super::{Requests, WaveCall};
use crate::{ExecutorEvent, Limits};
use denoised_link::{Blob, RankSet, Received};
use denoised_types::{
    CallId, Failure, FailureCode, GenerateRequest, Mode, PhaseTimes, Rank, RequestId, Resolved, WaveId,
};
use denoised_wire::{BlobIdx, Event, GeneratedMeta, Member, Wave};
use std::collections::{BTreeMap, VecDeque};

/// The generator of Knuth's MMIX; only its high bits are used.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n.max(1)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

fn nothing() -> Received {
    Received {
        message: Blob::default(),
        blobs: Vec::new(),
    }
}

fn generated() -> GeneratedMeta {
    GeneratedMeta {
        width: 0,
        height: 0,
        n_frames: 1,
        rgb: BlobIdx(0),
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
        times: PhaseTimes::default(),
    }
}

/// One world's requests, and what was reported of them.
struct History {
    random: Random,
    mode: Mode,
    ranks: RankSet,
    requests: Requests,
    out: VecDeque<ExecutorEvent>,
    /// How often each request that joined has ended.
    ends: BTreeMap<RequestId, u32>,
    waves: BTreeMap<WaveId, u32>,
    steps: BTreeMap<RequestId, u32>,
    n_waves: u64,
    next_request: u64,
}

impl History {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let mode = if random.one_in(3) {
            Mode::Request
        } else {
            Mode::Step
        };
        let ranks = RankSet::all(1 + random.below(3) as u16);
        Self {
            random,
            mode,
            ranks,
            requests: Requests::default(),
            out: VecDeque::new(),
            ends: BTreeMap::new(),
            waves: BTreeMap::new(),
            steps: BTreeMap::new(),
            n_waves: 0,
            next_request: 0,
        }
    }

    fn open(&self) -> Vec<RequestId> {
        self.ends
            .iter()
            .filter(|(_, n)| **n == 0)
            .map(|(id, _)| *id)
            .collect()
    }

    fn wave(&mut self) -> Wave {
        self.n_waves += 1;
        let mut joining = Vec::new();
        for _ in 0..self.random.below(3) {
            self.next_request += 1;
            let request_id = RequestId(self.next_request);
            let deadline_ns = if self.random.one_in(4) {
                1 + self.random.below(100)
            } else {
                0
            };
            joining.push(Member {
                request_id,
                request: GenerateRequest::new(""),
                blobs: Vec::new(),
                deadline_ns,
            });
        }
        let (mut continuing, mut cancelled) = (Vec::new(), Vec::new());
        for id in self.open().into_iter().filter(|_| self.mode == Mode::Step) {
            match self.random.below(5) {
                0 => cancelled.push(id),
                1 => {}
                _ => continuing.push(id),
            }
        }
        Wave {
            wave_id: WaveId(self.n_waves),
            mode: self.mode,
            ranks: self.ranks.iter().collect(),
            joining,
            continuing,
            cancelled,
            adapters: Vec::new(),
        }
    }

    fn play(&mut self) {
        let mut wave = self.wave();
        if self.random.one_in(8) {
            let mut strange = wave.clone();
            strange.continuing.push(RequestId(1_000_000));
            let before = format!("{:?}", self.requests);
            assert!(self.requests.admit(&mut strange, self.ranks, |_| false).is_err());
            assert_eq!(format!("{:?}", self.requests), before);
        }
        let call_id = CallId(self.n_waves);
        self.requests.admit(&mut wave, self.ranks, |_| false).unwrap();
        self.requests.enter(&wave, call_id, self.ranks);
        let mut call = WaveCall::new(&wave, self.ranks);
        if self.random.one_in(10) {
            let (joined, members) = (call.joined.clone(), call.members.clone());
            self.requests.withdraw(&joined, &members, call_id);
            return;
        }
        for member in &wave.joining {
            self.ends.insert(member.request_id, 0);
        }
        self.waves.insert(wave.wave_id, 0);
        for rank in self.ranks.iter() {
            self.say(&mut call, call_id, rank);
            self.tell();
        }
        if !call.is_over() {
            let failure = Failure::new(FailureCode::WorkerLost, "gone");
            call.fail(&failure, &mut self.requests, &mut self.out);
        }
        if self.random.one_in(3) {
            let now_ns = self.random.below(120);
            let doing = |_: &Requests, _: Rank| String::new();
            self.requests
                .expire(now_ns, 5, doing, &mut Vec::new(), &mut self.out);
        }
        self.tell();
    }

    /// What one rank says of a wave, maybe with an end missing.
    fn say(&mut self, call: &mut WaveCall, call_id: CallId, rank: Rank) {
        for request_id in call.members.clone() {
            let mut said = Vec::new();
            let n_done = self.steps.get(&request_id).copied().unwrap_or(0) + 1;
            if !self.random.one_in(6) {
                said.push(Event::RequestStarted { request_id });
                said.push(Event::Step {
                    request_id,
                    n_done,
                    n_steps: 5,
                });
                self.steps.insert(request_id, n_done);
            }
            let outcome = match self.random.below(4) {
                0 => Some(Ok(generated())),
                1 => Some(Err(Failure::new(FailureCode::NonFinite, "no number"))),
                _ => None,
            };
            if let Some(outcome) = outcome {
                let n_times = if self.random.one_in(6) { 2 } else { 1 };
                said.extend((0..n_times).map(|_| Event::RequestDone {
                    request_id,
                    outcome: outcome.clone(),
                }));
            }
            for event in said {
                self.route(call, call_id, rank, event);
            }
        }
        let stranger = RequestId(2_000_000);
        self.route(
            call,
            call_id,
            rank,
            Event::RequestStarted { request_id: stranger },
        );
        let outcome = match self.random.below(12) {
            0 => return,
            1 => Err(Failure::new(FailureCode::Protocol, "not understood")),
            _ => Ok(None),
        };
        self.route(call, call_id, rank, Event::CallDone { outcome });
    }

    fn route(&mut self, call: &mut WaveCall, call_id: CallId, rank: Rank, event: Event) {
        let limits = Limits::default();
        let (requests, out) = (&mut self.requests, &mut self.out);
        call.route((call_id, rank), event, &mut nothing(), &limits, requests, out);
    }

    /// What the engine hears.
    fn tell(&mut self) {
        for event in self.out.drain(..) {
            match event {
                ExecutorEvent::RequestDone { request_id, .. } => {
                    *self.ends.get_mut(&request_id).expect("only what joined ends") += 1;
                }
                ExecutorEvent::WaveDone { wave_id } => {
                    *self.waves.get_mut(&wave_id).expect("only what was sent ends") += 1;
                }
                ExecutorEvent::RequestStarted { request_id, .. } | ExecutorEvent::Step { request_id, .. } => {
                    assert_eq!(
                        self.ends[&request_id], 0,
                        "nothing is heard of request {request_id} after its end"
                    );
                }
                ExecutorEvent::WorldFailed(_) => {}
            }
        }
        assert!(self.ends.values().chain(self.waves.values()).all(|n| *n <= 1));
    }
}

#[test]
fn every_request_and_wave_ends_once_whatever_ranks_say() {
    let mut n_requests = 0;
    for seed in 0..2000 {
        let mut history = History::new(seed);
        for _ in 0..20 {
            history.play();
            if history.mode == Mode::Request {
                assert!(
                    history.open().is_empty(),
                    "seed {seed}: a wave's requests end with it"
                );
            }
        }
        let failure = Failure::new(FailureCode::Closed, "closed");
        history.requests.fail_all(&failure, &mut history.out);
        history.tell();
        assert!(history.ends.values().all(|n| *n == 1), "seed {seed}");
        assert!(history.waves.values().all(|n| *n == 1), "seed {seed}");
        n_requests += history.ends.len();
    }
    assert!(n_requests > 20_000, "{n_requests} requests");
}
