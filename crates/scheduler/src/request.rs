//! Request mode: a wave is whole generations on one replica, first come, first served.
//!
//! An idle replica takes the oldest waiting request at once, and with it up to `max_batch - 1` further ones of the same key in order of
//! arrival; of several idle replicas the least recently used (then the lowest index). So a request waits only while every replica is
//! busy or down, the queue is empty while one is idle, and whoever is overtaken by requests of another key is the oldest at last.

use crate::{
    Action, Event, Load, Millis, Policy,
    replicas::{Replicas, Resident},
    waiting::{Queued, Waiting},
};
use denoised_types::{Mode, RequestId};
use std::num::NonZeroUsize;

/// One wave per replica, which runs until all its members have ended; a bounded queue in order of arrival.
#[derive(Debug)]
pub struct RequestPolicy {
    max_batch: NonZeroUsize,
    waiting: Waiting,
    replicas: Replicas,
}

impl RequestPolicy {
    /// A policy without replicas (they come with [`Event::ReplicaUp`]) where at most `max_queued` requests wait and a wave carries one.
    /// With 0 a request is taken only if a replica is idle.
    pub fn new(max_queued: usize) -> Self {
        Self {
            max_batch: NonZeroUsize::MIN,
            waiting: Waiting::new(max_queued),
            replicas: Replicas::default(),
        }
    }

    /// The same policy where a wave carries up to `max_batch` requests of one key.
    #[must_use]
    pub fn with_max_batch(self, max_batch: NonZeroUsize) -> Self {
        Self { max_batch, ..self }
    }

    fn cancel(&mut self, request_id: RequestId, actions: &mut Vec<Action>) {
        self.waiting.cancel(request_id, actions);
        if self.replicas.cancel(request_id) {
            let request_ids = vec![request_id];
            actions.push(Action::Stop { request_ids });
        }
    }

    fn close(&mut self, actions: &mut Vec<Action>) {
        self.waiting.close(actions);
        let request_ids = self.replicas.cancel_all();
        if !request_ids.is_empty() {
            actions.push(Action::Stop { request_ids });
        }
    }

    fn dispatch(&mut self, actions: &mut Vec<Action>) {
        while let Some(replica) = self.replicas.freest(|_| true)
            && let Some(oldest) = self.waiting.take_oldest()
        {
            let key = oldest.key;
            let more = std::iter::from_fn(|| self.waiting.take_oldest_of([key]));
            let wave = std::iter::once(oldest).chain(more).take(self.max_batch.get());
            let joining: Vec<Resident> = wave.map(Queued::begin).collect();
            let members = joining.iter().map(|member| member.request_id).collect();
            actions.push(Action::Dispatch {
                wave_id: self.replicas.begin_wave(replica, joining),
                replica,
                members,
                cancelled: Vec::new(),
            });
        }
    }
}

impl Policy for RequestPolicy {
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
            Event::Cancel { request_id } => self.cancel(request_id, &mut actions),
            Event::MemberDone { request_id } => self.replicas.end_request(request_id),
            Event::WaveDone { wave_id } => {
                if let Some(replica) = self.replicas.end_wave(wave_id) {
                    self.replicas.end_residents(replica);
                }
            }
            Event::ReplicaUp { replica } => self.replicas.add(replica),
            Event::ReplicaDown { replica } => self.replicas.remove(replica, &mut actions),
            Event::Drain => self.waiting.drain(),
            Event::Close => self.close(&mut actions),
            Event::Tick => {}
        }
        self.dispatch(&mut actions);
        actions
    }

    fn next_tick(&self) -> Option<Millis> {
        self.waiting.next_tick()
    }

    fn mode(&self) -> Mode {
        Mode::Request
    }

    fn load(&self) -> Load {
        self.replicas.load(self.waiting.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BatchKey, EndReason, ReplicaIdx};
    use denoised_types::WaveId;

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

    #[test]
    fn a_wave_takes_the_oldest_and_those_of_its_key_in_order_of_arrival() {
        let mut policy = policy(9, 1).with_max_batch(NonZeroUsize::new(3).unwrap());
        let of_key = |id, key| Event::Submit {
            request_id: RequestId(id),
            deadline: Millis::NEVER,
            key: BatchKey(key),
        };
        for (id, key) in [(1, 7), (2, 8), (3, 7), (4, 8), (5, 8), (6, 8), (7, 7)] {
            policy.on_event(Millis(0), of_key(id, key));
        }
        let mut next = |wave| match &policy.on_event(
            Millis(1),
            Event::WaveDone {
                wave_id: WaveId(wave),
            },
        )[..]
        {
            [Action::Dispatch { members, .. }] => members.iter().map(|id| id.0).collect(),
            [] => Vec::new(),
            other => panic!("{other:?}"),
        };
        // The first ran alone, for it found an idle replica; nobody waits for company.
        assert_eq!(next(1), [2, 4, 5]);
        assert_eq!(next(2), [3, 7]);
        assert_eq!(next(3), [6]);
        assert_eq!(next(4), []);
    }
}
