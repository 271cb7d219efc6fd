//! Questions for signs of life: a caller's to all ranks, the monitor's to one.

use denoised_link::{RankSet, Received};
use denoised_types::Rank;
use denoised_wire::{Event, RankProgress};
use std::thread::Thread;

/// A caller's question to all ranks.
#[derive(Debug)]
pub(crate) struct PingCall {
    targets: RankSet,
    pub(crate) answered: RankSet,
    pub(super) waiter: Thread,
}

impl PingCall {
    /// To be waited for by the calling thread.
    pub(crate) fn new(targets: RankSet) -> Self {
        Self {
            targets,
            answered: RankSet::EMPTY,
            waiter: std::thread::current(),
        }
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.targets.without(self.answered).is_empty()
    }

    pub(crate) fn route(&mut self, rank: Rank, event: &Event) -> bool {
        matches!(event, Event::Pong) && self.answered.insert(rank)
    }
}

/// The monitor's question to one rank, whose runner it doubts.
#[derive(Debug)]
pub(crate) struct ProbeCall {
    rank: Rank,
    pub(crate) is_answered: bool,
    /// What the rank says it does, where it can say so.
    pub(crate) progress: Option<RankProgress>,
}

impl ProbeCall {
    pub(crate) fn new(rank: Rank) -> Self {
        Self {
            rank,
            is_answered: false,
            progress: None,
        }
    }

    /// Any answer is a sign of life, a refusal too.
    pub(crate) fn route(&mut self, rank: Rank, event: &Event, received: &Received) -> bool {
        if rank != self.rank {
            return false;
        }
        self.is_answered = true;
        if let Event::CallDone {
            outcome: Ok(Some(blob)),
        } = event
            && let Some(bytes) = received.blob(*blob)
        {
            self.progress = RankProgress::from_bytes(bytes).ok();
        }
        true
    }
}
