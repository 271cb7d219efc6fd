//! Request mode: a wave is one whole generation on one replica, first come, first served.
//!
//! An idle replica takes the oldest waiting request at once; of several idle ones the least recently used (then the lowest
//! index). So a request waits only while every replica is busy or down, and the queue is empty while one is idle.

use crate::{Action, EndReason, Event, Load, Millis, Policy, ReplicaIdx};
use denoised_types::{Mode, RequestId, WaveId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// One request per wave, one wave per replica, a bounded queue in order of arrival.
#[derive(Debug)]
pub struct RequestPolicy {
    max_queued: usize,
    phase: Phase,
    /// Waiting requests by arrival.
    queue: BTreeMap<u64, Queued>,
    /// The same ones by deadline, then arrival.
    deadlines: BTreeSet<(Millis, u64)>,
    /// Every id that waits or runs.
    places: HashMap<RequestId, Place>,
    replicas: BTreeMap<ReplicaIdx, Replica>,
    /// Which replica carries which wave.
    waves: HashMap<WaveId, ReplicaIdx>,
    n_arrived: u64,
    n_waves: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    Draining,
    Closed,
}

#[derive(Debug)]
struct Queued {
    request_id: RequestId,
    deadline: Millis,
}

#[derive(Debug)]
enum Place {
    Queued { arrival: u64 },
    Running { stop_asked: bool },
}

#[derive(Debug, Default)]
struct Replica {
    /// The wave it carries and the member that has not ended.
    busy: Option<(WaveId, Option<RequestId>)>,
    /// Its latest wave, as a clock of use; 0 before the first.
    last_wave: WaveId,
}

impl RequestPolicy {
    /// A policy without replicas (they come with [`Event::ReplicaUp`]) where at most `max_queued` requests wait.
    /// With 0 a request is taken only if a replica is idle.
    pub fn new(max_queued: usize) -> Self {
        Self {
            max_queued,
            phase: Phase::Open,
            queue: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            places: HashMap::new(),
            replicas: BTreeMap::new(),
            waves: HashMap::new(),
            n_arrived: 0,
            n_waves: 0,
        }
    }

    fn submit(&mut self, now: Millis, request_id: RequestId, deadline: Millis, actions: &mut Vec<Action>) {
        if self.places.contains_key(&request_id) {
            return;
        }
        let n_queued = self.queue.len();
        let refusal = if self.phase != Phase::Open {
            Some(EndReason::Closed)
        } else if deadline <= now {
            Some(EndReason::Expired)
        } else if n_queued >= self.max_queued && self.idle_replica().is_none() {
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
        self.queue.insert(arrival, Queued { request_id, deadline });
        self.deadlines.insert((deadline, arrival));
        self.places.insert(request_id, Place::Queued { arrival });
        actions.push(Action::Admitted {
            request_id,
            n_ahead: n_queued,
        });
    }

    fn cancel(&mut self, request_id: RequestId, actions: &mut Vec<Action>) {
        match self.places.get_mut(&request_id) {
            Some(Place::Queued { arrival }) => {
                let arrival = *arrival;
                self.end_queued(arrival, EndReason::Cancelled, actions);
            }
            Some(Place::Running { stop_asked }) if !*stop_asked => {
                *stop_asked = true;
                let request_ids = vec![request_id];
                actions.push(Action::Stop { request_ids });
            }
            Some(Place::Running { .. }) | None => {}
        }
    }

    fn member_done(&mut self, request_id: RequestId) {
        if !matches!(self.places.get(&request_id), Some(Place::Running { .. })) {
            return;
        }
        self.places.remove(&request_id);
        for replica in self.replicas.values_mut() {
            if let Some((_, member)) = &mut replica.busy
                && *member == Some(request_id)
            {
                *member = None;
            }
        }
    }

    fn wave_done(&mut self, wave_id: WaveId) {
        let Some(replica) = self.waves.remove(&wave_id) else {
            return;
        };
        let replica = self
            .replicas
            .get_mut(&replica)
            .expect("a wave is only kept while its replica is up");
        if let Some((_, Some(request_id))) = replica.busy.take() {
            self.places.remove(&request_id);
        }
    }

    fn replica_down(&mut self, replica_idx: ReplicaIdx, actions: &mut Vec<Action>) {
        let Some((wave_id, member)) = self
            .replicas
            .remove(&replica_idx)
            .and_then(|replica| replica.busy)
        else {
            return;
        };
        self.waves.remove(&wave_id);
        if let Some(request_id) = member {
            self.places.remove(&request_id);
            let reason = EndReason::ReplicaLost(replica_idx);
            actions.push(Action::End { request_id, reason });
        }
    }

    fn close(&mut self, actions: &mut Vec<Action>) {
        self.phase = Phase::Closed;
        while let Some((&arrival, _)) = self.queue.first_key_value() {
            self.end_queued(arrival, EndReason::Closed, actions);
        }
        let running = self.replicas.values().filter_map(|replica| replica.busy?.1);
        let mut request_ids = Vec::new();
        for request_id in running {
            if let Some(Place::Running { stop_asked }) = self.places.get_mut(&request_id)
                && !std::mem::replace(stop_asked, true)
            {
                request_ids.push(request_id);
            }
        }
        if !request_ids.is_empty() {
            actions.push(Action::Stop { request_ids });
        }
    }

    fn expire(&mut self, now: Millis, actions: &mut Vec<Action>) {
        while let Some(&(deadline, arrival)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            self.end_queued(arrival, EndReason::Expired, actions);
        }
    }

    fn end_queued(&mut self, arrival: u64, reason: EndReason, actions: &mut Vec<Action>) {
        if let Some(queued) = self.take_queued(arrival) {
            self.places.remove(&queued.request_id);
            actions.push(Action::End {
                request_id: queued.request_id,
                reason,
            });
        }
    }

    fn take_queued(&mut self, arrival: u64) -> Option<Queued> {
        let queued = self.queue.remove(&arrival)?;
        self.deadlines.remove(&(queued.deadline, arrival));
        Some(queued)
    }

    fn idle_replica(&self) -> Option<ReplicaIdx> {
        let idle = self.replicas.iter().filter(|(_, replica)| replica.busy.is_none());
        idle.min_by_key(|(idx, replica)| (replica.last_wave, **idx))
            .map(|(idx, _)| *idx)
    }

    fn dispatch(&mut self, actions: &mut Vec<Action>) {
        while let (Some((&arrival, _)), Some(replica_idx)) =
            (self.queue.first_key_value(), self.idle_replica())
        {
            let request_id = self
                .take_queued(arrival)
                .expect("the first key is in the queue")
                .request_id;
            self.places
                .insert(request_id, Place::Running { stop_asked: false });
            self.n_waves += 1;
            let wave_id = WaveId(self.n_waves);
            self.waves.insert(wave_id, replica_idx);
            let replica = self
                .replicas
                .get_mut(&replica_idx)
                .expect("an idle replica is up");
            replica.busy = Some((wave_id, Some(request_id)));
            replica.last_wave = wave_id;
            actions.push(Action::Dispatch {
                wave_id,
                replica: replica_idx,
                members: vec![request_id],
                cancelled: Vec::new(),
            });
        }
    }
}

impl Policy for RequestPolicy {
    fn on_event(&mut self, now: Millis, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        // What has expired makes room for what comes.
        self.expire(now, &mut actions);
        match event {
            Event::Submit {
                request_id,
                deadline,
                key: _,
            } => self.submit(now, request_id, deadline, &mut actions),
            Event::Cancel { request_id } => self.cancel(request_id, &mut actions),
            Event::MemberDone { request_id } => self.member_done(request_id),
            Event::WaveDone { wave_id } => self.wave_done(wave_id),
            Event::ReplicaUp { replica } => {
                self.replicas.entry(replica).or_default();
            }
            Event::ReplicaDown { replica } => self.replica_down(replica, &mut actions),
            Event::Drain => {
                if self.phase == Phase::Open {
                    self.phase = Phase::Draining;
                }
            }
            Event::Close => self.close(&mut actions),
            Event::Tick => {}
        }
        self.dispatch(&mut actions);
        actions
    }

    fn next_tick(&self) -> Option<Millis> {
        self.deadlines
            .first()
            .map(|&(deadline, _)| deadline)
            .filter(|&deadline| deadline < Millis::NEVER)
    }

    fn mode(&self) -> Mode {
        Mode::Request
    }

    fn load(&self) -> Load {
        Load {
            n_queued: self.queue.len(),
            n_running: self.places.len() - self.queue.len(),
            n_replicas: self.replicas.len(),
            n_idle: self
                .replicas
                .values()
                .filter(|replica| replica.busy.is_none())
                .count(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BatchKey;

    const R0: ReplicaIdx = ReplicaIdx(0);
    const R1: ReplicaIdx = ReplicaIdx(1);

    fn policy(max_queued: usize, n_replicas: u16) -> RequestPolicy {
        let mut policy = RequestPolicy::new(max_queued);
        for replica in 0..n_replicas {
            assert!(
                policy
                    .on_event(
                        Millis(0),
                        Event::ReplicaUp {
                            replica: ReplicaIdx(replica)
                        }
                    )
                    .is_empty()
            );
        }
        policy
    }

    fn submit(id: u64) -> Event {
        Event::Submit {
            request_id: RequestId(id),
            deadline: Millis::NEVER,
            key: BatchKey(0),
        }
    }

    fn cancel(id: u64) -> Event {
        Event::Cancel {
            request_id: RequestId(id),
        }
    }

    fn admitted(id: u64, n_ahead: usize) -> Action {
        Action::Admitted {
            request_id: RequestId(id),
            n_ahead,
        }
    }

    fn dispatch(wave: u64, replica: ReplicaIdx, id: u64) -> Action {
        Action::Dispatch {
            wave_id: WaveId(wave),
            replica,
            members: vec![RequestId(id)],
            cancelled: Vec::new(),
        }
    }

    fn end(id: u64, reason: EndReason) -> Action {
        Action::End {
            request_id: RequestId(id),
            reason,
        }
    }

    #[test]
    fn an_idle_replica_takes_a_request_at_once_and_the_rest_wait_in_order() {
        let mut policy = policy(8, 1);
        assert_eq!(
            policy.on_event(Millis(0), submit(1)),
            [admitted(1, 0), dispatch(1, R0, 1)]
        );
        assert_eq!(policy.on_event(Millis(0), submit(2)), [admitted(2, 0)]);
        assert_eq!(policy.on_event(Millis(0), submit(3)), [admitted(3, 1)]);
        assert_eq!(
            policy.load(),
            Load {
                n_queued: 2,
                n_running: 1,
                n_replicas: 1,
                n_idle: 0
            }
        );
        // The member's end alone does not free the replica.
        assert_eq!(
            policy.on_event(
                Millis(1),
                Event::MemberDone {
                    request_id: RequestId(1)
                }
            ),
            []
        );
        assert_eq!(
            policy.on_event(Millis(1), Event::WaveDone { wave_id: WaveId(1) }),
            [dispatch(2, R0, 2)]
        );
        // Doubled and unknown reports are harmless.
        assert_eq!(
            policy.on_event(Millis(1), Event::WaveDone { wave_id: WaveId(1) }),
            []
        );
        assert_eq!(
            policy.on_event(Millis(1), Event::WaveDone { wave_id: WaveId(99) }),
            []
        );
        assert_eq!(
            policy.on_event(
                Millis(1),
                Event::MemberDone {
                    request_id: RequestId(3)
                }
            ),
            []
        );
        assert_eq!(
            policy.load(),
            Load {
                n_queued: 1,
                n_running: 1,
                n_replicas: 1,
                n_idle: 0
            }
        );
    }

    #[test]
    fn replicas_take_turns_and_the_least_recently_used_comes_first() {
        let mut policy = policy(8, 2);
        assert_eq!(
            policy.on_event(Millis(0), submit(1)),
            [admitted(1, 0), dispatch(1, R0, 1)]
        );
        policy.on_event(Millis(0), Event::WaveDone { wave_id: WaveId(1) });
        assert_eq!(
            policy.on_event(Millis(0), submit(2)),
            [admitted(2, 0), dispatch(2, R1, 2)]
        );
        policy.on_event(Millis(0), Event::WaveDone { wave_id: WaveId(2) });
        assert_eq!(
            policy.on_event(Millis(0), submit(3)),
            [admitted(3, 0), dispatch(3, R0, 3)]
        );
    }

    #[test]
    fn a_full_queue_refuses_with_both_numbers() {
        let mut policy = policy(1, 1);
        policy.on_event(Millis(0), submit(1));
        policy.on_event(Millis(0), submit(2));
        let full = EndReason::QueueFull {
            n_queued: 1,
            max_queued: 1,
        };
        assert_eq!(policy.on_event(Millis(0), submit(3)), [end(3, full)]);
        // A place is free again once the one who waited has gone.
        assert_eq!(
            policy.on_event(Millis(0), cancel(2)),
            [end(2, EndReason::Cancelled)]
        );
        assert_eq!(policy.on_event(Millis(0), submit(4)), [admitted(4, 0)]);
    }

    #[test]
    fn a_queue_of_nothing_still_feeds_idle_replicas() {
        let mut policy = policy(0, 1);
        assert_eq!(
            policy.on_event(Millis(0), submit(1)),
            [admitted(1, 0), dispatch(1, R0, 1)]
        );
        let full = EndReason::QueueFull {
            n_queued: 0,
            max_queued: 0,
        };
        assert_eq!(policy.on_event(Millis(0), submit(2)), [end(2, full)]);
    }

    #[test]
    fn a_deadline_ends_what_waits_and_leaves_what_runs() {
        let mut policy = policy(8, 1);
        let at = |id, ms| Event::Submit {
            request_id: RequestId(id),
            deadline: Millis(ms),
            key: BatchKey(0),
        };
        policy.on_event(Millis(0), at(1, 10));
        policy.on_event(Millis(0), at(2, 30));
        policy.on_event(Millis(0), at(3, 20));
        assert_eq!(policy.next_tick(), Some(Millis(20)));
        assert_eq!(policy.on_event(Millis(19), Event::Tick), []);
        assert_eq!(
            policy.on_event(Millis(20), Event::Tick),
            [end(3, EndReason::Expired)]
        );
        // Expiry comes before the event, so the free replica does not take what is too late.
        assert_eq!(
            policy.on_event(Millis(30), Event::WaveDone { wave_id: WaveId(1) }),
            [end(2, EndReason::Expired)]
        );
        assert_eq!(policy.next_tick(), None);
        assert_eq!(
            policy.on_event(Millis(31), at(4, 31)),
            [end(4, EndReason::Expired)]
        );
    }

    #[test]
    fn cancelling_what_runs_asks_once() {
        let mut policy = policy(8, 1);
        policy.on_event(Millis(0), submit(1));
        assert_eq!(
            policy.on_event(Millis(0), cancel(1)),
            [Action::Stop {
                request_ids: vec![RequestId(1)]
            }]
        );
        assert_eq!(policy.on_event(Millis(0), cancel(1)), []);
        policy.on_event(Millis(0), Event::WaveDone { wave_id: WaveId(1) });
        assert_eq!(policy.on_event(Millis(0), cancel(1)), []);
        assert_eq!(policy.on_event(Millis(0), cancel(7)), []);
    }

    #[test]
    fn drain_runs_what_waits_and_close_ends_it() {
        let mut policy = policy(8, 1);
        for id in 1..=4 {
            policy.on_event(Millis(0), submit(id));
        }
        assert_eq!(policy.on_event(Millis(0), Event::Drain), []);
        assert_eq!(policy.on_event(Millis(0), submit(5)), [end(5, EndReason::Closed)]);
        assert_eq!(
            policy.on_event(Millis(0), Event::WaveDone { wave_id: WaveId(1) }),
            [dispatch(2, R0, 2)]
        );
        assert_eq!(
            policy.on_event(Millis(0), Event::Close),
            [
                end(3, EndReason::Closed),
                end(4, EndReason::Closed),
                Action::Stop {
                    request_ids: vec![RequestId(2)]
                }
            ]
        );
        assert_eq!(
            policy.on_event(Millis(0), Event::WaveDone { wave_id: WaveId(2) }),
            []
        );
        assert_eq!(policy.on_event(Millis(0), Event::Drain), []);
        assert_eq!(policy.on_event(Millis(0), submit(6)), [end(6, EndReason::Closed)]);
    }

    #[test]
    fn a_lost_replica_ends_its_member_and_a_new_one_goes_on() {
        let mut policy = policy(8, 1);
        policy.on_event(Millis(0), submit(1));
        policy.on_event(Millis(0), submit(2));
        assert_eq!(
            policy.on_event(Millis(0), Event::ReplicaDown { replica: R0 }),
            [end(1, EndReason::ReplicaLost(R0))]
        );
        assert_eq!(
            policy.on_event(Millis(0), Event::WaveDone { wave_id: WaveId(1) }),
            []
        );
        assert_eq!(
            policy.on_event(Millis(0), Event::ReplicaUp { replica: R1 }),
            [dispatch(2, R1, 2)]
        );
        assert_eq!(policy.on_event(Millis(0), Event::ReplicaUp { replica: R1 }), []);
    }
}
