//! Ending a world: one owner, three means, one budget.
//!
//! S1. Whoever comes first owns the teardown; everybody else waits for its report. It runs once.
//! S2. Graceful first, then TERM, then KILL, each to the ranks that are still there, each within its share of the budget.
//! S3. While it waits, events are still taken, so that no rank hangs in sending its last ones.

use crate::{RankExit, ShutdownReport, world::World};
use denoised_os::{Deadline, signal::Signal};
use denoised_types::Rank;
use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Shares of the budget, in percent, after which TERM and KILL follow.
const TERM_AFTER_PERCENT: u32 = 70;
const KILL_AFTER_PERCENT: u32 = 90;
/// Longer budgets count as this one.
const MAX_BUDGET: Duration = Duration::from_secs(24 * 3600);
/// KILL gets at least so long, whatever the budget: the kernel ends a process in a few milliseconds.
const KILL_MIN: Duration = Duration::from_millis(500);
/// How often events are taken and ranks are looked at.
const SLICE: Duration = Duration::from_millis(10);
/// How much longer than its own budget a caller waits for the owner's report.
const REPORT_GRACE: Duration = Duration::from_secs(1);

/// How the ranks of a world live, for those who end it.
pub(crate) trait Lives: Send + Sync {
    /// How `rank_idx` ended, once it has.
    fn ended(&self, rank_idx: usize) -> Option<String>;

    /// Waits until some rank may have ended, or the deadline.
    fn wait(&self, deadline: Deadline);

    /// Sends a signal; nothing happens to a rank that is no process.
    fn signal(&self, rank_idx: usize, signal: Signal);
}

/// How the teardown begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum First {
    /// Ask on the control lane.
    Graceful,
    /// The world has failed: signals at once.
    Term,
}

#[derive(Debug, Default)]
pub(crate) struct Stopper {
    phase: Mutex<Phase>,
    done: Condvar,
}

#[derive(Debug, Default)]
enum Phase {
    #[default]
    Running,
    Stopping,
    Done(ShutdownReport),
}

impl Stopper {
    pub(crate) fn is_done(&self) -> bool {
        matches!(*self.lock(), Phase::Done(_))
    }

    /// Ends the world, or waits for whoever is ending it.
    pub(crate) fn stop(
        &self,
        world: &World,
        lives: &dyn Lives,
        budget: Duration,
        first: First,
    ) -> ShutdownReport {
        let budget = budget.min(MAX_BUDGET);
        {
            let mut phase = self.lock();
            let wait_end = Instant::now() + budget + REPORT_GRACE;
            loop {
                match &*phase {
                    Phase::Done(report) => return report.clone(),
                    Phase::Running => break,
                    Phase::Stopping => {}
                }
                let left = wait_end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return so_far(world, lives);
                }
                phase = self
                    .done
                    .wait_timeout(phase, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
            *phase = Phase::Stopping;
        }
        let report = tear_down(world, lives, budget, first);
        *self.lock() = Phase::Done(report.clone());
        self.done.notify_all();
        report
    }

    fn lock(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a caller that ran out of patience knows.
fn so_far(world: &World, lives: &dyn Lives) -> ShutdownReport {
    let exit = |rank: u16| RankExit {
        rank: Rank(rank),
        status: lives
            .ended(usize::from(rank))
            .unwrap_or_else(|| "still stopping".to_owned()),
        means: "another caller's shutdown",
        took: Duration::ZERO,
    };
    ShutdownReport {
        ranks: (0..world.info().world_size).map(exit).collect(),
    }
}

fn tear_down(world: &World, lives: &dyn Lives, budget: Duration, first: First) -> ShutdownReport {
    let begin = Instant::now();
    let end = Deadline::after(budget);
    let mut exits: Vec<Option<RankExit>> = vec![None; usize::from(world.info().world_size)];
    let mut collect = |means: &'static str| {
        let mut n_left = 0;
        for (rank_idx, exit) in exits.iter_mut().enumerate() {
            if exit.is_none() {
                // At most 64 ranks.
                let rank = Rank(rank_idx as u16);
                let found = lives.ended(rank_idx);
                n_left += usize::from(found.is_none());
                *exit = found.map(|status| RankExit {
                    rank,
                    status,
                    means,
                    took: begin.elapsed(),
                });
            }
        }
        n_left
    };
    collect("already dead");
    let was_open = world.begin_closing();
    let stages: [(&'static str, Option<Signal>, Duration); 3] = [
        ("graceful", None, budget * TERM_AFTER_PERCENT / 100),
        ("TERM", Some(Signal::TERM), budget * KILL_AFTER_PERCENT / 100),
        ("KILL", Some(Signal::KILL), budget),
    ];
    let n_skipped = if first == First::Graceful && was_open {
        0
    } else {
        1
    };
    for (means, signal, until) in stages.into_iter().skip(n_skipped) {
        if collect(means) == 0 {
            break;
        }
        match signal {
            None => world.send_stop(),
            Some(signal) => {
                for rank_idx in 0..usize::from(world.info().world_size) {
                    if lives.ended(rank_idx).is_none() {
                        lives.signal(rank_idx, signal);
                    }
                }
            }
        }
        let stage_end = match signal {
            Some(Signal::KILL) => Deadline::after(KILL_MIN).max(end),
            _ => Deadline::after(until.saturating_sub(begin.elapsed())),
        };
        while collect(means) > 0 && !stage_end.has_passed() {
            lives.wait(stage_end.earlier(Deadline::after(SLICE)));
            world.drain_from_outside();
        }
    }
    world.close(exits.iter().flatten().map(|exit| exit.rank).collect());
    let left = |(rank_idx, exit): (usize, Option<RankExit>)| {
        exit.unwrap_or_else(|| RankExit {
            rank: Rank(rank_idx as u16),
            status: "still running".to_owned(),
            means: "KILL",
            took: begin.elapsed(),
        })
    };
    let report = ShutdownReport {
        ranks: exits.into_iter().enumerate().map(left).collect(),
    };
    tracing::debug!(?report, "the world has ended");
    report
}
