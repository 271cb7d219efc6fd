//! Who runs where: the replicas that are up, the wave on each and the requests it has begun.
//!
//! What every policy has in common. Knows nothing of what waits, and decides nothing.

use crate::{Action, BatchKey, EndReason, Load, ReplicaIdx};
use denoised_types::{RequestId, WaveId};
use std::collections::{BTreeMap, HashMap};

/// The replicas of one policy.
#[derive(Debug, Default)]
pub(crate) struct Replicas {
    up: BTreeMap<ReplicaIdx, Replica>,
    /// Which replica carries which wave.
    waves: HashMap<WaveId, ReplicaIdx>,
    /// Which replica has begun which request.
    homes: HashMap<RequestId, ReplicaIdx>,
    n_waves: u64,
}

/// A replica that is up.
#[derive(Debug, Default)]
pub(crate) struct Replica {
    wave: Option<WaveId>,
    /// Its latest wave, as a clock of use; 0 before the first.
    last_wave: WaveId,
    /// What it has begun and not ended, in the order of joining.
    pub(crate) residents: Vec<Resident>,
}

/// A request that a replica has begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resident {
    pub(crate) request_id: RequestId,
    pub(crate) key: BatchKey,
    pub(crate) is_cancelled: bool,
}

impl Replica {
    /// Residents that nobody has cancelled.
    pub(crate) fn n_wanted(&self) -> usize {
        self.wanted().count()
    }

    /// The same ones, in the order of joining.
    pub(crate) fn wanted(&self) -> impl Iterator<Item = &Resident> {
        self.residents.iter().filter(|resident| !resident.is_cancelled)
    }
}

impl Replicas {
    pub(crate) fn load(&self, n_queued: usize) -> Load {
        Load {
            n_queued,
            n_running: self.homes.len(),
            n_replicas: self.up.len(),
            n_idle: self.idle().count(),
        }
    }

    /// How many residents nobody has cancelled, and how many replicas are up.
    pub(crate) fn n_wanted(&self) -> (usize, usize) {
        (self.up.values().map(Replica::n_wanted).sum(), self.up.len())
    }

    pub(crate) fn contains(&self, request_id: RequestId) -> bool {
        self.homes.contains_key(&request_id)
    }

    /// A replica that is up.
    pub(crate) fn get(&mut self, replica_idx: ReplicaIdx) -> &mut Replica {
        self.up
            .get_mut(&replica_idx)
            .expect("asked only for replicas that were found to be up")
    }

    pub(crate) fn add(&mut self, replica_idx: ReplicaIdx) {
        self.up.entry(replica_idx).or_default();
    }

    /// Forgets a replica; what it had begun ends.
    pub(crate) fn remove(&mut self, replica_idx: ReplicaIdx, actions: &mut Vec<Action>) {
        let Some(replica) = self.up.remove(&replica_idx) else {
            return;
        };
        if let Some(wave_id) = replica.wave {
            self.waves.remove(&wave_id);
        }
        for Resident { request_id, .. } in replica.residents {
            self.homes.remove(&request_id);
            let reason = EndReason::ReplicaLost(replica_idx);
            actions.push(Action::End { request_id, reason });
        }
    }

    /// Replicas without a wave.
    fn idle(&self) -> impl Iterator<Item = (ReplicaIdx, &Replica)> {
        let up = self.up.iter().map(|(idx, replica)| (*idx, replica));
        up.filter(|(_, replica)| replica.wave.is_none())
    }

    /// Of the idle replicas that `may_take` picks the one with the fewest wanted residents; of several the least recently used, then
    /// the lowest index.
    pub(crate) fn freest(&self, may_take: impl Fn(&Replica) -> bool) -> Option<ReplicaIdx> {
        let idle = self.idle().filter(|(_, replica)| may_take(replica));
        idle.min_by_key(|(idx, replica)| (replica.n_wanted(), replica.last_wave, *idx))
            .map(|(idx, _)| idx)
    }

    /// Notes a wave on an idle replica, which `joining` begin with it.
    pub(crate) fn begin_wave(&mut self, replica_idx: ReplicaIdx, joining: Vec<Resident>) -> WaveId {
        self.n_waves += 1;
        let wave_id = WaveId(self.n_waves);
        self.waves.insert(wave_id, replica_idx);
        for resident in &joining {
            self.homes.insert(resident.request_id, replica_idx);
        }
        let replica = self.get(replica_idx);
        replica.wave = Some(wave_id);
        replica.last_wave = wave_id;
        replica.residents.extend(joining);
        wave_id
    }

    /// Frees the replica that carries the wave and returns it; `None` for a wave that is not known.
    pub(crate) fn end_wave(&mut self, wave_id: WaveId) -> Option<ReplicaIdx> {
        let replica_idx = self.waves.remove(&wave_id)?;
        self.get(replica_idx).wave = None;
        Some(replica_idx)
    }

    /// Forgets a request that has ended.
    pub(crate) fn end_request(&mut self, request_id: RequestId) {
        if let Some(replica_idx) = self.homes.remove(&request_id) {
            let residents = &mut self.get(replica_idx).residents;
            residents.retain(|resident| resident.request_id != request_id);
        }
    }

    /// Forgets everything that a replica has begun.
    pub(crate) fn end_residents(&mut self, replica_idx: ReplicaIdx) {
        for Resident { request_id, .. } in std::mem::take(&mut self.get(replica_idx).residents) {
            self.homes.remove(&request_id);
        }
    }

    /// Marks a running request as cancelled; returns whether that is news.
    pub(crate) fn cancel(&mut self, request_id: RequestId) -> bool {
        let Some(&replica_idx) = self.homes.get(&request_id) else {
            return false;
        };
        let residents = self.get(replica_idx).residents.iter_mut();
        residents
            .filter(|resident| resident.request_id == request_id)
            .any(|resident| !std::mem::replace(&mut resident.is_cancelled, true))
    }

    /// Marks everything that runs as cancelled; returns those for which that is news, by replica and in the order of joining.
    pub(crate) fn cancel_all(&mut self) -> Vec<RequestId> {
        let residents = self.up.values_mut().flat_map(|replica| &mut replica.residents);
        residents
            .filter_map(|resident| {
                let is_news = !std::mem::replace(&mut resident.is_cancelled, true);
                is_news.then_some(resident.request_id)
            })
            .collect()
    }
}
