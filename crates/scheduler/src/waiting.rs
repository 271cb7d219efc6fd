//! Who waits: a bounded queue in order of arrival, with deadlines, and whether anything new is taken.
//!
//! What every policy has in common. Knows nothing of waves, and of replicas only what they have begun and whether one is idle.

use crate::{
    Action, BatchKey, EndReason, Millis,
    replicas::{Replicas, Resident},
};
use denoised_types::RequestId;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The waiting requests of one policy.
#[derive(Debug)]
pub(crate) struct Waiting {
    max_queued: usize,
    phase: Phase,
    /// Waiting requests by arrival.
    queue: BTreeMap<u64, Queued>,
    /// The same ones by deadline, then arrival.
    deadlines: BTreeSet<(Millis, u64)>,
    /// The same ones by key, then arrival.
    keys: BTreeSet<(BatchKey, u64)>,
    arrivals: HashMap<RequestId, u64>,
    n_arrived: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    Draining,
    Closed,
}

/// A request that asks to wait, waits, or has just been taken.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) request_id: RequestId,
    pub(crate) key: BatchKey,
    pub(crate) deadline: Millis,
}

impl Queued {
    /// The same request, begun by a replica.
    pub(crate) fn begin(self) -> Resident {
        Resident {
            request_id: self.request_id,
            key: self.key,
            is_cancelled: false,
        }
    }
}

impl Waiting {
    pub(crate) fn new(max_queued: usize) -> Self {
        Self {
            max_queued,
            phase: Phase::Open,
            queue: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            keys: BTreeSet::new(),
            arrivals: HashMap::new(),
            n_arrived: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The nearest deadline.
    pub(crate) fn next_tick(&self) -> Option<Millis> {
        let first = self.deadlines.first();
        first
            .map(|&(deadline, _)| deadline)
            .filter(|&deadline| deadline < Millis::NEVER)
    }

    /// Admits or refuses a request that is not known yet. One that an idle replica takes at once is forbidden by no bound of the queue.
    pub(crate) fn submit(
        &mut self,
        now: Millis,
        queued: Queued,
        replicas: &Replicas,
        actions: &mut Vec<Action>,
    ) {
        let Queued {
            request_id, deadline, ..
        } = queued;
        if self.arrivals.contains_key(&request_id) || replicas.contains(request_id) {
            return;
        }
        let has_place = replicas.freest(|_| true).is_some();
        let n_queued = self.queue.len();
        let refusal = if self.phase != Phase::Open {
            Some(EndReason::Closed)
        } else if deadline <= now {
            Some(EndReason::Expired)
        } else if n_queued >= self.max_queued && !has_place {
            let max_queued = self.max_queued;
            Some(EndReason::QueueFull { n_queued, max_queued })
        } else {
            None
        };
        if let Some(reason) = refusal {
            actions.push(Action::End { request_id, reason });
            return;
        }
        let arrival = self.n_arrived;
        self.n_arrived += 1;
        self.deadlines.insert((deadline, arrival));
        self.keys.insert((queued.key, arrival));
        self.arrivals.insert(request_id, arrival);
        self.queue.insert(arrival, queued);
        actions.push(Action::Admitted {
            request_id,
            n_ahead: n_queued,
        });
    }

    /// Ends a request that waits; nothing happens to any other.
    pub(crate) fn cancel(&mut self, request_id: RequestId, actions: &mut Vec<Action>) {
        if let Some(&arrival) = self.arrivals.get(&request_id) {
            self.end(arrival, EndReason::Cancelled, actions);
        }
    }

    /// Ends what is overdue.
    pub(crate) fn expire(&mut self, now: Millis, actions: &mut Vec<Action>) {
        while let Some(&(deadline, arrival)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            self.end(arrival, EndReason::Expired, actions);
        }
    }

    /// From now on nothing new is taken.
    pub(crate) fn drain(&mut self) {
        if self.phase == Phase::Open {
            self.phase = Phase::Draining;
        }
    }

    /// From now on nothing new is taken, and what waits ends.
    pub(crate) fn close(&mut self, actions: &mut Vec<Action>) {
        self.phase = Phase::Closed;
        while let Some((&arrival, _)) = self.queue.first_key_value() {
            self.end(arrival, EndReason::Closed, actions);
        }
    }

    /// Takes the one that has waited longest.
    pub(crate) fn take_oldest(&mut self) -> Option<Queued> {
        let arrival = *self.queue.first_key_value()?.0;
        self.take(arrival)
    }

    /// Takes the one that has waited longest among those with one of `keys`.
    pub(crate) fn take_oldest_of(&mut self, keys: impl IntoIterator<Item = BatchKey>) -> Option<Queued> {
        let of_key = |key| {
            let arrival = self.keys.range((key, 0)..=(key, u64::MAX)).next();
            arrival.map(|&(_, arrival)| arrival)
        };
        let arrival = keys.into_iter().filter_map(of_key).min()?;
        self.take(arrival)
    }

    fn end(&mut self, arrival: u64, reason: EndReason, actions: &mut Vec<Action>) {
        if let Some(Queued { request_id, .. }) = self.take(arrival) {
            actions.push(Action::End { request_id, reason });
        }
    }

    fn take(&mut self, arrival: u64) -> Option<Queued> {
        let queued = self.queue.remove(&arrival)?;
        self.deadlines.remove(&(queued.deadline, arrival));
        self.keys.remove(&(queued.key, arrival));
        self.arrivals.remove(&queued.request_id);
        Some(queued)
    }
}
