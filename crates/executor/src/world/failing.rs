//! How a world ends: the first cause, then whoever waits, then the callbacks (W4). Teardown is its owner's.

use super::{
    World,
    state::{Callback, Life},
};
use crate::ExecutorEvent;
use denoised_link::RankSet;
use denoised_types::{Failure, FailureCode, Rank};

impl World {
    /// Latches `failure` if it is the first, fails everything in flight, and has the rest torn down.
    pub(crate) fn fence(&self, failure: Failure) {
        let wake = {
            let mut state = self.lock();
            if state.failure.is_some() || state.life != Life::Open {
                return;
            }
            tracing::error!(code = failure.code.as_str(), %failure, "the world has failed");
            state.failure = Some(failure.clone());
            state.end_waves(&failure);
            state.queue.push_back(ExecutorEvent::WorldFailed(failure));
            state.everybody()
        };
        self.wake(wake);
        self.call_monitor();
    }

    /// Rank `rank` has ended with this `status` (`killed by signal 9 (SIGKILL)`) and will never send again.
    pub(crate) fn rank_gone(&self, rank: Rank, status: &str, last_words: Option<&str>) {
        self.evictor.evict(rank);
        // What it sent before counts: results that are done, or its own words on why it dies.
        self.drain_all_of(RankSet::one(rank));
        let failure = {
            let mut state = self.lock();
            state.gone.insert(rank);
            let doing = state.doing(rank);
            let pid = self
                .info
                .pids
                .get(usize::from(rank.0))
                .map(|pid| format!(" {pid}"))
                .unwrap_or_default();
            match state.ranks[usize::from(rank.0)].dying.clone() {
                Some(said) => said.on_rank(rank),
                None => {
                    let words = last_words
                        .map(|words| format!("; its last words: {words}"))
                        .unwrap_or_default();
                    let text = format!("worker{pid} {status}{words}");
                    Failure::new(FailureCode::WorkerLost, text)
                        .on_rank(rank)
                        .during(doing)
                }
            }
        };
        self.fence(failure);
        // Health checks and closing waits look at who is gone.
        let everybody = self.lock().everybody();
        self.wake(everybody);
    }

    pub(crate) fn on_failure(&self, callback: Callback) {
        let failure = {
            let mut state = self.lock();
            match state.failure.clone() {
                Some(failure) => failure,
                None => {
                    state.callbacks.push(callback);
                    return;
                }
            }
        };
        callback(&failure);
    }

    /// Runs the callbacks that are registered, if the world has failed; true if it has.
    pub(crate) fn run_callbacks(&self) -> bool {
        let (failure, callbacks) = {
            let mut state = self.lock();
            let Some(failure) = state.failure.clone() else {
                return false;
            };
            (failure, std::mem::take(&mut state.callbacks))
        };
        for callback in callbacks {
            let called = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| callback(&failure)));
            if called.is_err() {
                tracing::error!("a failure callback panicked");
            }
        }
        true
    }

    /// Nothing new is accepted from here on; true if the world was open and well.
    pub(crate) fn begin_closing(&self) -> bool {
        let mut state = self.lock();
        let was_open = state.life == Life::Open && state.failure.is_none();
        if state.life == Life::Open {
            state.life = Life::Closing;
        }
        was_open
    }

    /// The ranks in `ended` are gone, the others were given up: ends what is still in flight.
    pub(crate) fn close(&self, ended: RankSet) {
        self.drain_all_of(ended);
        let wake = {
            let mut state = self.lock();
            state.life = Life::Closed;
            let text = "the executor was shut down";
            let failure = state
                .failure
                .clone()
                .unwrap_or_else(|| Failure::new(FailureCode::Closed, text));
            state.end_waves(&failure);
            state.everybody()
        };
        self.wake(wake);
    }
}
