//! Step mode: a wave is one step of everything that a replica has begun, so requests join and leave between waves.
//!
//! A replica that has begun something has a wave, always: the next follows at once on the last. It carries all residents in the order
//! in which they joined and, while places are free, requests that waited. A cancelled resident is in no further step: the next wave
//! says that it is given up, even if there is nothing else to say, and so do later ones until its end was reported.
//!
//! `max_batch` counts the requests that a replica computes in one wave, whatever their keys: it bounds the state that workers keep. Nor
//! does a replica take more than its share of all that waits and runs: what it leaves, another takes after the step that it is at.
//! Residents of unequal keys cost a forward per key, so the free places of a wave go
//!
//! 1. to the oldest waiting request, whatever its key, so that none is passed over by a wave that has a place;
//! 2. then to waiting requests with the key of somebody on that replica, in order of arrival;
//! 3. then to the others in order of arrival: no place within the share stays free while somebody waits.
//!
//! Of several idle replicas the one with the fewest residents takes a request (then the least recently used, then the lowest index).

use crate::{
    Action, BatchKey, Event, Load, Millis, Policy,
    replicas::{Replicas, Resident},
    waiting::{Queued, Waiting},
};
use denoised_types::Mode;
use std::{collections::BTreeSet, num::NonZeroUsize};

/// Continuous batching: one wave of one step per replica, up to `max_batch` requests in it; a bounded queue in order of arrival.
#[derive(Debug)]
pub struct StepPolicy {
    max_batch: NonZeroUsize,
    waiting: Waiting,
    replicas: Replicas,
}

impl StepPolicy {
    /// A policy without replicas (they come with [`Event::ReplicaUp`]) where at most `max_queued` requests wait, also for a step to end
    /// that they could join after, and a replica computes at most `max_batch` together. With a queue of 0 a request is taken only if a
    /// replica is idle.
    pub fn new(max_queued: usize, max_batch: NonZeroUsize) -> Self {
        Self {
            max_batch,
            waiting: Waiting::new(max_queued),
            replicas: Replicas::default(),
        }
    }

    /// How many requests each replica would have if all that wait and run were dealt out evenly.
    fn share(&self) -> usize {
        let (n_wanted, n_replicas) = self.replicas.n_wanted();
        (n_wanted + self.waiting.len()).div_ceil(n_replicas.max(1))
    }

    /// Who joins the next wave of a replica; see the module's head.
    fn take_joining(&mut self, residents: &[Resident]) -> Vec<Resident> {
        let wanted = residents.iter().filter(|resident| !resident.is_cancelled);
        let mut keys: BTreeSet<BatchKey> = wanted.clone().map(|resident| resident.key).collect();
        let n_most = self.max_batch.get().min(self.share());
        let n_places = n_most.saturating_sub(wanted.count());
        let mut joining = Vec::new();
        while joining.len() < n_places {
            let alike = match joining.is_empty() {
                true => None,
                false => self.waiting.take_oldest_of(keys.iter().copied()),
            };
            let Some(next) = alike.or_else(|| self.waiting.take_oldest()) else {
                break;
            };
            keys.insert(next.key);
            joining.push(Queued::begin(next));
        }
        joining
    }

    fn dispatch(&mut self, actions: &mut Vec<Action>) {
        while let Some(replica_idx) = self.replicas.freest(|replica| {
            // A replica that has begun nothing has a place.
            !replica.residents.is_empty() || !self.waiting.is_empty()
        }) {
            let residents = self.replicas.get(replica_idx).residents.clone();
            let joining = self.take_joining(&residents);
            let (cancelled, wanted): (Vec<_>, Vec<_>) =
                residents.into_iter().partition(|resident| resident.is_cancelled);
            let members = wanted.iter().chain(&joining);
            let members = members.map(|member| member.request_id).collect();
            actions.push(Action::Dispatch {
                wave_id: self.replicas.begin_wave(replica_idx, joining),
                replica: replica_idx,
                members,
                cancelled: cancelled.iter().map(|member| member.request_id).collect(),
            });
        }
    }
}

impl Policy for StepPolicy {
    fn on_event(&mut self, now: Millis, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        // What has expired makes room for what comes.
        self.waiting.expire(now, &mut actions);
        match event {
            Event::Submit {
                request_id,
                deadline,
                key,
            } => {
                let request = Queued {
                    request_id,
                    key,
                    deadline,
                };
                self.waiting.submit(now, request, &self.replicas, &mut actions);
            }
            Event::Cancel { request_id } => {
                self.waiting.cancel(request_id, &mut actions);
                self.replicas.cancel(request_id);
            }
            Event::MemberDone { request_id } => self.replicas.end_request(request_id),
            // Who has not ended goes on.
            Event::WaveDone { wave_id } => drop(self.replicas.end_wave(wave_id)),
            Event::ReplicaUp { replica } => self.replicas.add(replica),
            Event::ReplicaDown { replica } => self.replicas.remove(replica, &mut actions),
            Event::Drain => self.waiting.drain(),
            Event::Close => {
                self.waiting.close(&mut actions);
                self.replicas.cancel_all();
            }
            Event::Tick => {}
        }
        self.dispatch(&mut actions);
        actions
    }

    fn next_tick(&self) -> Option<Millis> {
        self.waiting.next_tick()
    }

    fn mode(&self) -> Mode {
        Mode::Step
    }

    fn load(&self) -> Load {
        self.replicas.load(self.waiting.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EndReason, ReplicaIdx};
    use denoised_types::{RequestId, WaveId};

    const R0: ReplicaIdx = ReplicaIdx(0);
    const R1: ReplicaIdx = ReplicaIdx(1);

    fn policy(max_queued: usize, max_batch: usize, n_replicas: u16) -> StepPolicy {
        let mut policy = StepPolicy::new(max_queued, NonZeroUsize::new(max_batch).unwrap());
        for replica in (0..n_replicas).map(ReplicaIdx) {
            assert_eq!(policy.on_event(Millis(0), Event::ReplicaUp { replica }), []);
        }
        policy
    }

    fn submit(policy: &mut StepPolicy, id: u64, key: u64) -> Vec<Action> {
        let submit = Event::Submit {
            request_id: RequestId(id),
            deadline: Millis::NEVER,
            key: BatchKey(key),
        };
        policy.on_event(Millis(0), submit)
    }

    fn cancel(policy: &mut StepPolicy, id: u64) -> Vec<Action> {
        let request_id = RequestId(id);
        policy.on_event(Millis(0), Event::Cancel { request_id })
    }

    fn member_done(policy: &mut StepPolicy, id: u64) {
        let request_id = RequestId(id);
        let actions = policy.on_event(Millis(0), Event::MemberDone { request_id });
        assert_eq!(actions, [], "nothing is decided within a wave");
    }

    fn wave_done(policy: &mut StepPolicy, wave: u64) -> Vec<Action> {
        let wave_id = WaveId(wave);
        policy.on_event(Millis(0), Event::WaveDone { wave_id })
    }

    fn dispatch(wave: u64, replica: ReplicaIdx, members: &[u64], cancelled: &[u64]) -> Action {
        let ids = |ids: &[u64]| ids.iter().map(|id| RequestId(*id)).collect();
        Action::Dispatch {
            wave_id: WaveId(wave),
            replica,
            members: ids(members),
            cancelled: ids(cancelled),
        }
    }

    #[test]
    fn requests_join_and_leave_between_waves() {
        let mut policy = policy(8, 3, 1);
        assert_eq!(submit(&mut policy, 1, 0)[1..], [dispatch(1, R0, &[1], &[])]);
        assert_eq!(submit(&mut policy, 2, 0).len(), 1, "it waits for the step to end");
        assert_eq!(wave_done(&mut policy, 1), [dispatch(2, R0, &[1, 2], &[])]);
        submit(&mut policy, 3, 0);
        submit(&mut policy, 4, 0);
        assert_eq!(wave_done(&mut policy, 2), [dispatch(3, R0, &[1, 2, 3], &[])]);
        member_done(&mut policy, 2);
        assert_eq!(wave_done(&mut policy, 3), [dispatch(4, R0, &[1, 3, 4], &[])]);
        for id in [1, 3, 4] {
            member_done(&mut policy, id);
        }
        assert_eq!(wave_done(&mut policy, 4), []);
        let nothing = Load {
            n_replicas: 1,
            n_idle: 1,
            ..Load::default()
        };
        assert_eq!(policy.load(), nothing);
    }

    #[test]
    fn a_cancelled_resident_is_given_up_by_the_next_wave_even_if_alone() {
        let mut policy = policy(8, 2, 1);
        submit(&mut policy, 1, 0);
        submit(&mut policy, 2, 0);
        submit(&mut policy, 3, 0);
        wave_done(&mut policy, 1);
        assert_eq!(cancel(&mut policy, 1), []);
        // Its place is free in the very wave that gives it up.
        assert_eq!(wave_done(&mut policy, 2), [dispatch(3, R0, &[2, 3], &[1])]);
        member_done(&mut policy, 1);
        member_done(&mut policy, 2);
        assert_eq!(cancel(&mut policy, 3), []);
        assert_eq!(wave_done(&mut policy, 3), [dispatch(4, R0, &[], &[3])]);
        // Nobody reported its end: it is said again.
        assert_eq!(wave_done(&mut policy, 4), [dispatch(5, R0, &[], &[3])]);
        member_done(&mut policy, 3);
        assert_eq!(wave_done(&mut policy, 5), []);
    }

    #[test]
    fn the_oldest_joins_first_then_its_likes_then_the_others() {
        let mut policy = policy(8, 4, 1);
        submit(&mut policy, 1, 7);
        for (id, key) in [(2, 8), (3, 9), (4, 7), (5, 8)] {
            submit(&mut policy, id, key);
        }
        assert_eq!(wave_done(&mut policy, 1), [dispatch(2, R0, &[1, 2, 4, 5], &[])]);
        for id in [1, 2, 4, 5] {
            member_done(&mut policy, id);
        }
        submit(&mut policy, 6, 7);
        // No place stays free because keys differ.
        assert_eq!(wave_done(&mut policy, 2), [dispatch(3, R0, &[3, 6], &[])]);
    }

    #[test]
    fn a_request_goes_to_the_idle_replica_with_the_fewest_residents() {
        let mut policy = policy(8, 4, 2);
        assert_eq!(submit(&mut policy, 1, 0)[1..], [dispatch(1, R0, &[1], &[])]);
        assert_eq!(submit(&mut policy, 2, 0)[1..], [dispatch(2, R1, &[2], &[])]);
        member_done(&mut policy, 2);
        assert_eq!(wave_done(&mut policy, 2), []);
        assert_eq!(submit(&mut policy, 3, 0)[1..], [dispatch(3, R1, &[3], &[])]);
        member_done(&mut policy, 3);
        member_done(&mut policy, 1);
        wave_done(&mut policy, 1);
        wave_done(&mut policy, 3);
        // Both are empty; the one that was used longest ago is first.
        assert_eq!(submit(&mut policy, 4, 0)[1..], [dispatch(4, R0, &[4], &[])]);
    }

    #[test]
    fn what_waits_is_dealt_out_evenly() {
        let mut policy = policy(8, 8, 2);
        for id in 1..=6 {
            submit(&mut policy, id, 0);
        }
        // Six requests on two replicas are three each, whichever ends its step first.
        assert_eq!(wave_done(&mut policy, 1), [dispatch(3, R0, &[1, 3, 4], &[])]);
        assert_eq!(wave_done(&mut policy, 3), [dispatch(4, R0, &[1, 3, 4], &[])]);
        assert_eq!(wave_done(&mut policy, 2), [dispatch(5, R1, &[2, 5, 6], &[])]);
        // What is alone on a replica is not held back by what ends elsewhere.
        for id in [2, 5, 6] {
            member_done(&mut policy, id);
        }
        assert_eq!(wave_done(&mut policy, 5), []);
        assert_eq!(submit(&mut policy, 7, 0)[1..], [dispatch(6, R1, &[7], &[])]);
    }

    #[test]
    fn close_gives_up_what_runs_and_a_lost_replica_ends_it() {
        let mut policy = policy(8, 2, 2);
        for id in 1..=4 {
            submit(&mut policy, id, 0);
        }
        wave_done(&mut policy, 1);
        let end = |id, reason| Action::End {
            request_id: RequestId(id),
            reason,
        };
        assert_eq!(
            policy.on_event(Millis(0), Event::ReplicaDown { replica: R0 }),
            [
                end(1, EndReason::ReplicaLost(R0)),
                end(3, EndReason::ReplicaLost(R0))
            ]
        );
        assert_eq!(
            policy.on_event(Millis(0), Event::Close),
            [end(4, EndReason::Closed)]
        );
        assert_eq!(submit(&mut policy, 5, 0), [end(5, EndReason::Closed)]);
        assert_eq!(wave_done(&mut policy, 2), [dispatch(4, R1, &[], &[2])]);
        member_done(&mut policy, 2);
        assert_eq!(wave_done(&mut policy, 4), []);
    }

    #[test]
    fn a_queue_of_nothing_feeds_idle_replicas_only() {
        let mut policy = policy(0, 2, 1);
        assert_eq!(submit(&mut policy, 1, 0)[1..], [dispatch(1, R0, &[1], &[])]);
        let reason = EndReason::QueueFull {
            n_queued: 0,
            max_queued: 0,
        };
        let request_id = RequestId(2);
        assert_eq!(submit(&mut policy, 2, 0), [Action::End { request_id, reason }]);
    }
}
