//! What a starting program is given.

use crate::{
    StartContext,
    control::{Shared, Stop},
};
use denoised_link::{BootSender, LinkError};
use denoised_types::{Failure, FailureCode, Rank, WorkerConfig};
use denoised_wire::{BootUp, Hello, StartPhase};
use std::{
    os::fd::{AsFd, OwnedFd},
    sync::mpsc,
    time::{Duration, Instant},
};

/// While it waits for shared weights, a rank looks this often whether anybody still wants it.
const SHARED_WAIT: Duration = Duration::from_millis(50);
/// Progress within a phase is reported at most this often.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) struct Context<'a> {
    pub(crate) hello: &'a Hello,
    pub(crate) shared: &'a Shared,
    pub(crate) boot: &'a dyn BootSender,
    pub(crate) weights: &'a mpsc::Receiver<Option<OwnedFd>>,
    pub(crate) last_progress: Option<Instant>,
}

impl StartContext for Context<'_> {
    fn config(&self) -> &WorkerConfig {
        &self.hello.config
    }

    fn place(&self) -> (Rank, u16) {
        (self.hello.rank, self.hello.world_size)
    }

    fn phase(&mut self, phase: StartPhase) {
        if let StartPhase::PreparingWeights {
            done_bytes,
            total_bytes,
        } = phase
        {
            let early = self
                .last_progress
                .is_some_and(|last| last.elapsed() < PROGRESS_INTERVAL);
            if early && done_bytes < total_bytes {
                return;
            }
            self.last_progress = Some(Instant::now());
        }
        // Progress that nobody can receive is not worth failing for.
        let _ = self.boot.send(&BootUp::Phase(phase), None);
    }

    fn publish_shared(&mut self, weights: Option<OwnedFd>) -> Result<(), Failure> {
        let message = BootUp::PublishShared {
            has_weights: weights.is_some(),
        };
        self.boot
            .send(&message, weights.as_ref().map(AsFd::as_fd))
            .map_err(|error| {
                let code = if error == LinkError::Closed {
                    FailureCode::Closed
                } else {
                    FailureCode::Protocol
                };
                Failure::new(
                    code,
                    format!("cannot hand the prepared weights to the executor: {error}"),
                )
                .on_rank(self.hello.rank)
            })
    }

    fn await_shared(&mut self) -> Result<Option<OwnedFd>, Failure> {
        loop {
            match self.weights.recv_timeout(SHARED_WAIT) {
                Ok(weights) => return Ok(weights),
                // The executor's own deadline of the start ends this wait: it stops the rank then.
                Err(mpsc::RecvTimeoutError::Timeout) if self.shared.stop() == Stop::No => {}
                Err(_) => {
                    let text = "the start was given up while waiting for rank 0's weights";
                    return Err(Failure::new(FailureCode::Closed, text).on_rank(self.hello.rank));
                }
            }
        }
    }
}
