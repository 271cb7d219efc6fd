//! Requests on every rank at the same time, without an engine, which would choose the ranks itself.
//!
//! Each rank gets waves of its own: one for everything in request mode, one per step in step mode, the next as soon as the last has
//! ended. Knows nothing of why who takes part.

use crate::error::Error;
use crate::interrupt;
use crate::sharing::Participant;
use denoised_executor::{Executor, ExecutorEvent, Output};
use denoised_types::{Failure, FailureCode, GenerateRequest, Generated, Mode, Rank, RequestId, WaveId};
use denoised_wire::{Member, Wave};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Time for a command to enter the ring.
const DISPATCH_LIMIT: Duration = Duration::from_secs(30);
/// After this long without news the workers are asked whether they are there.
const SILENCE: Duration = Duration::from_secs(30);
/// Time for that answer, in attempts of a second: between them it is looked at Ctrl-C.
const MAX_HEALTH_CHECKS: u32 = 10;
const HEALTH_LIMIT: Duration = Duration::from_secs(1);
/// Most waves of one run: those of the longest request, and some in which others join.
const MAX_WAVES: u32 = GenerateRequest::MAX_STEPS + 64;

/// Sends requests to ranks by name, which an engine would not let one choose.
#[derive(Debug)]
pub(crate) struct EveryRank<'a> {
    executor: &'a dyn Executor,
    mode: Mode,
    n_ranks: u16,
    /// For requests and waves, which are counted together.
    last_id: u64,
}

/// How far one participant is on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Running,
    Ended,
}

/// The run on one rank.
#[derive(Debug)]
struct OnRank<'a> {
    rank: Rank,
    mode: Mode,
    participants: &'a [Participant],
    /// As the participants.
    request_ids: Vec<RequestId>,
    states: Vec<State>,
    /// Position of the next wave.
    wave_idx: u32,
    /// The wave under way.
    wave_id: Option<WaveId>,
}

impl OnRank<'_> {
    fn is_over(&self) -> bool {
        self.states.iter().all(|&state| state == State::Ended)
    }

    /// What the rank does next, or `None` if everybody has ended.
    ///
    /// # Errors
    /// `Protocol`: a request goes on for longer than it has steps, or outlived its wave in request mode.
    fn next_wave(&mut self, wave_id: WaveId) -> Result<Option<Wave>, Failure> {
        if self.is_over() {
            return Ok(None);
        }
        let max_waves = match self.mode {
            Mode::Request => 1,
            Mode::Step => MAX_WAVES,
        };
        let is_running = self.states.contains(&State::Running);
        let waiting = self.participants.iter().zip(&self.states);
        let next_join = waiting
            .filter(|(_, state)| **state == State::Waiting)
            .map(|(one, _)| one.joins_at)
            .min();
        if let (false, Mode::Step, Some(next_join)) = (is_running, self.mode, next_join) {
            // A wave needs somebody in it.
            self.wave_idx = self.wave_idx.max(next_join);
        }
        let wave_idx = self.wave_idx;
        if wave_idx >= max_waves {
            let n_open = self.states.iter().filter(|&&state| state != State::Ended).count();
            let message = format!("{n_open} request(s) have not ended after {max_waves} wave(s)");
            return Err(Failure::new(FailureCode::Protocol, message).on_rank(self.rank));
        }
        let mut wave = Wave {
            wave_id,
            mode: self.mode,
            ranks: vec![self.rank],
            joining: Vec::new(),
            continuing: Vec::new(),
            cancelled: Vec::new(),
            adapters: Vec::new(),
        };
        for ((one, &request_id), state) in self
            .participants
            .iter()
            .zip(&self.request_ids)
            .zip(&mut self.states)
        {
            match (self.mode, *state) {
                (_, State::Ended) => {}
                (Mode::Step, State::Running) if one.given_up_at == Some(wave_idx) => {
                    wave.cancelled.push(request_id);
                }
                (_, State::Running) => wave.continuing.push(request_id),
                (Mode::Step, State::Waiting) if one.joins_at > wave_idx => {}
                (_, State::Waiting) => {
                    *state = State::Running;
                    wave.joining.push(Member {
                        request_id,
                        request: one.request.clone(),
                        blobs: Vec::new(),
                        deadline_ns: 0,
                    });
                }
            }
        }
        self.wave_idx += 1;
        self.wave_id = Some(wave_id);
        Ok(Some(wave))
    }

    /// Takes note of an end; `Ok` with the output if it is the case's.
    ///
    /// # Errors
    /// The request's failure, unless it was to be given up; a request that was given up has a result all the same.
    fn ended(
        &mut self,
        participant_idx: usize,
        outcome: Result<Output, Failure>,
    ) -> Result<Option<Output>, Failure> {
        self.states[participant_idx] = State::Ended;
        let one = &self.participants[participant_idx];
        match (outcome, one.given_up_at, self.mode) {
            (Ok(output), None, _) => Ok(one.is_case.then_some(output)),
            // Its last step may have been faster than the word to stop.
            (Ok(_), Some(_), Mode::Request) => Ok(None),
            (Ok(_), Some(_), Mode::Step) => {
                let message = "a request that was given up between two steps has a result";
                Err(Failure::new(FailureCode::Protocol, message).on_rank(self.rank))
            }
            (Err(failure), Some(_), _) if failure.code == FailureCode::Cancelled => Ok(None),
            (Err(failure), _, _) if one.is_case => Err(failure),
            (Err(failure), _, _) => Err(Failure {
                message: format!("a request that shares the waves: {}", failure.message),
                ..failure
            }),
        }
    }
}

impl<'a> EveryRank<'a> {
    /// For a world that nothing else drives.
    pub(crate) fn new(executor: &'a dyn Executor, mode: Mode) -> Self {
        Self {
            executor,
            mode,
            n_ranks: executor.world().world_size,
            last_id: 0,
        }
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Runs the participants once on every rank, all ranks at the same time; the case's results by rank.
    ///
    /// # Errors
    /// The first failure of any rank, or Ctrl-C.
    pub(crate) fn run(&mut self, participants: &[Participant]) -> Result<Vec<Generated>, Error> {
        let mut places: BTreeMap<RequestId, (usize, usize)> = BTreeMap::new();
        let mut ranks: Vec<OnRank<'_>> = Vec::new();
        for rank_idx in 0..self.n_ranks {
            let mut request_ids = Vec::new();
            for participant_idx in 0..participants.len() {
                let request_id = RequestId(self.next_id());
                places.insert(request_id, (usize::from(rank_idx), participant_idx));
                request_ids.push(request_id);
            }
            ranks.push(OnRank {
                rank: Rank(rank_idx),
                mode: self.mode,
                participants,
                request_ids,
                states: vec![State::Waiting; participants.len()],
                wave_idx: 0,
                wave_id: None,
            });
        }
        for one in &mut ranks {
            self.go_on(one)?;
        }
        let mut results: BTreeMap<usize, Generated> = BTreeMap::new();
        let mut heard_at = Instant::now();
        while ranks.iter().any(|one| one.wave_id.is_some()) {
            if interrupt::is_interrupted() {
                return Err(interrupt::interrupted());
            }
            let events = self.executor.wait_events(Instant::now() + Duration::from_secs(1));
            if !events.is_empty() {
                heard_at = Instant::now();
            } else if heard_at.elapsed() > SILENCE {
                self.ask_for_a_sign_of_life()?;
                heard_at = Instant::now();
            }
            for event in events {
                match event {
                    ExecutorEvent::RequestStarted { .. } => {}
                    ExecutorEvent::Step { request_id, .. } => {
                        // In step mode the waves say who is given up.
                        if let (Mode::Request, Some(&(_, participant_idx))) =
                            (self.mode, places.get(&request_id))
                            && participants[participant_idx].given_up_at.is_some()
                        {
                            self.executor
                                .cancel(&[request_id], Instant::now() + DISPATCH_LIMIT)?;
                        }
                    }
                    ExecutorEvent::RequestDone { request_id, outcome } => {
                        let Some(&(rank_idx, participant_idx)) = places.get(&request_id) else {
                            continue;
                        };
                        if let Some(output) = ranks[rank_idx].ended(participant_idx, outcome)? {
                            results.insert(rank_idx, output.into_generated());
                        }
                    }
                    ExecutorEvent::WaveDone { wave_id } => {
                        if let Some(one) = ranks.iter_mut().find(|one| one.wave_id == Some(wave_id)) {
                            one.wave_id = None;
                            self.go_on(one)?;
                        }
                    }
                    ExecutorEvent::WorldFailed(failure) => return Err(failure.into()),
                }
            }
        }
        if results.len() != usize::from(self.n_ranks) {
            let message = format!("{} of {} ranks returned a result", results.len(), self.n_ranks);
            return Err(Failure::new(FailureCode::Protocol, message).into());
        }
        Ok(results.into_values().collect())
    }

    /// Sends the rank its next wave, if there is one.
    fn go_on(&mut self, one: &mut OnRank<'_>) -> Result<(), Error> {
        let wave_id = WaveId(self.next_id());
        if let Some(wave) = one.next_wave(wave_id)? {
            self.executor.dispatch(wave, Instant::now() + DISPATCH_LIMIT)?;
        }
        Ok(())
    }

    fn ask_for_a_sign_of_life(&self) -> Result<(), Error> {
        let mut silent = Vec::new();
        for _ in 0..MAX_HEALTH_CHECKS {
            if interrupt::is_interrupted() {
                return Err(interrupt::interrupted());
            }
            let health = self.executor.health(HEALTH_LIMIT);
            if health.is_healthy() {
                return Ok(());
            }
            if let Some(failure) = health.failure {
                return Err(failure.into());
            }
            silent = health.silent;
        }
        let limit = MAX_HEALTH_CHECKS * HEALTH_LIMIT;
        let message = format!("no answer from ranks {silent:?} within {limit:?}");
        Err(Failure::new(FailureCode::WorkerLost, message).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use denoised_types::{Image, PhaseTimes, Resolved};

    fn participant(joins_at: u32, given_up_at: Option<u32>, is_case: bool) -> Participant {
        Participant {
            request: GenerateRequest::new("x"),
            joins_at,
            given_up_at,
            is_case,
        }
    }

    fn on_rank(mode: Mode, participants: &[Participant]) -> OnRank<'_> {
        OnRank {
            rank: Rank(0),
            mode,
            participants,
            request_ids: (0..participants.len() as u64).map(RequestId).collect(),
            states: vec![State::Waiting; participants.len()],
            wave_idx: 0,
            wave_id: None,
        }
    }

    fn output() -> Output {
        let resolved = Resolved {
            width: 1,
            height: 1,
            n_frames: 1,
            n_steps: 1,
            guidance: 1.0,
            seed: 0,
            sampler: String::new(),
            warnings: Vec::new(),
        };
        let image = Image {
            width: 1,
            height: 1,
            n_frames: 1,
            rgb: vec![0; 3],
        };
        let generated = Generated {
            image,
            tensors: Vec::new(),
            resolved,
            rank: Rank(0),
            times: PhaseTimes::default(),
        };
        generated.into()
    }

    fn cancelled() -> Failure {
        Failure::new(FailureCode::Cancelled, "cancelled")
    }

    /// Ids that join, go on and are given up.
    fn lists(wave: &Wave) -> [Vec<u64>; 3] {
        let ids = |list: &[RequestId]| list.iter().map(|id| id.0).collect();
        let joining = wave.joining.iter().map(|member| member.request_id.0).collect();
        [joining, ids(&wave.continuing), ids(&wave.cancelled)]
    }

    #[test]
    fn in_step_mode_requests_come_and_go_between_waves() {
        let participants = [
            participant(0, None, false),
            participant(1, None, true),
            participant(1, Some(2), false),
        ];
        let mut run = on_rank(Mode::Step, &participants);
        let next = |run: &mut OnRank<'_>| run.next_wave(WaveId(9)).unwrap().map(|wave| lists(&wave));
        assert_eq!(next(&mut run), Some([vec![0], vec![], vec![]]));
        assert_eq!(next(&mut run), Some([vec![1, 2], vec![0], vec![]]));
        assert_eq!(run.ended(0, Ok(output())), Ok(None));
        assert_eq!(next(&mut run), Some([vec![], vec![1], vec![2]]));
        assert_eq!(run.ended(2, Err(cancelled())), Ok(None));
        assert!(run.ended(1, Ok(output())).unwrap().is_some());
        assert_eq!(next(&mut run), None);
    }

    #[test]
    fn in_request_mode_one_wave_holds_all_and_ends_them() {
        let participants = [participant(0, Some(2), false), participant(1, None, true)];
        let mut run = on_rank(Mode::Request, &participants);
        let wave = run.next_wave(WaveId(9)).unwrap().unwrap();
        assert_eq!(lists(&wave), [vec![0, 1], vec![], vec![]]);
        assert_eq!(run.ended(0, Ok(output())), Ok(None));
        let failure = run.next_wave(WaveId(10)).unwrap_err();
        assert_eq!(failure.code, FailureCode::Protocol);
    }

    #[test]
    fn an_end_that_nobody_asked_for_is_a_failure() {
        let participants = [
            participant(0, Some(1), false),
            participant(0, None, true),
            participant(0, None, false),
        ];
        let mut run = on_rank(Mode::Step, &participants);
        let code = |end: Result<Option<Output>, Failure>| end.unwrap_err().code;
        assert_eq!(code(run.ended(0, Ok(output()))), FailureCode::Protocol);
        assert_eq!(code(run.ended(1, Err(cancelled()))), FailureCode::Cancelled);
        let failure = run
            .ended(2, Err(Failure::new(FailureCode::NonFinite, "NaN")))
            .unwrap_err();
        assert_eq!(failure.message, "a request that shares the waves: NaN");
    }

    #[test]
    fn a_request_that_never_ends_does_not_go_on_for_ever() {
        let participants = [participant(0, None, true)];
        let mut run = on_rank(Mode::Step, &participants);
        let n_waves = (0..).take_while(|_| run.next_wave(WaveId(9)).is_ok()).count();
        assert_eq!(n_waves, MAX_WAVES as usize);
    }
}
