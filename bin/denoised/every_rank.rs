//! One request on every rank at the same time, without an engine, which would choose the rank itself.

use crate::error::Error;
use crate::interrupt;
use denoised_executor::{Executor, ExecutorEvent};
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

/// Sends requests to ranks by name, which an engine would not let one choose.
#[derive(Debug)]
pub(crate) struct EveryRank<'a> {
    executor: &'a dyn Executor,
    n_ranks: u16,
    next_id: u64,
}

impl<'a> EveryRank<'a> {
    /// For a world that nothing else drives.
    pub(crate) fn new(executor: &'a dyn Executor) -> Self {
        Self {
            executor,
            n_ranks: executor.world().world_size,
            next_id: 1,
        }
    }

    /// Runs `request` once on every rank, all at the same time; results by rank.
    ///
    /// # Errors
    /// The first failure of any rank, or Ctrl-C.
    pub(crate) fn run(&mut self, request: &GenerateRequest) -> Result<Vec<Generated>, Error> {
        let mut rank_of: BTreeMap<RequestId, u16> = BTreeMap::new();
        for rank_idx in 0..self.n_ranks {
            let id = self.next_id;
            self.next_id += 1;
            rank_of.insert(RequestId(id), rank_idx);
            let wave = Wave {
                wave_id: WaveId(id),
                mode: Mode::Request,
                ranks: vec![Rank(rank_idx)],
                continuing: Vec::new(),
                cancelled: Vec::new(),
                adapters: Vec::new(),
                joining: vec![Member {
                    request_id: RequestId(id),
                    request: request.clone(),
                    latents: None,
                    deadline_ns: 0,
                }],
            };
            self.executor.dispatch(wave, Instant::now() + DISPATCH_LIMIT)?;
        }
        let mut results: BTreeMap<u16, Generated> = BTreeMap::new();
        let mut n_waves = self.n_ranks;
        let mut heard_at = Instant::now();
        while n_waves > 0 {
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
                    ExecutorEvent::RequestStarted { .. } | ExecutorEvent::Step { .. } => {}
                    ExecutorEvent::RequestDone { request_id, outcome } => {
                        let generated = outcome?;
                        if let Some(&rank_idx) = rank_of.get(&request_id) {
                            results.insert(rank_idx, generated.into_generated());
                        }
                    }
                    ExecutorEvent::WaveDone { .. } => n_waves = n_waves.saturating_sub(1),
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
