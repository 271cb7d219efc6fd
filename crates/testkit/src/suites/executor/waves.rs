//! Waves of whole generations: what becomes of their requests.

use super::{Outcome, StartFn, close, events_until_done, late, outcomes};
use crate::script::{At, Script, What, picture, request, wave};
use denoised_executor::{ExecutorEvent, Output};
use denoised_types::{Capture, FailureCode, NamedTensor, Rank, RequestId, WaveId};
use std::collections::BTreeMap;
use std::time::Duration;

/// See the name.
pub fn requests_of_a_wave_end_once_in_order_and_then_the_wave(start: &StartFn) {
    let executor = start(&Script::default());
    let members = [(1, request(7, 2)), (2, request(8, 3))];
    executor.dispatch(wave(5, &[0], &members), late()).unwrap();
    let events = events_until_done(&*executor, &[5]);
    let of = |id: u64| {
        let id = RequestId(id);
        events
            .iter()
            .filter_map(|event| match event {
                ExecutorEvent::RequestStarted {
                    request_id,
                    rank: Rank(0),
                } if *request_id == id => Some("started".to_owned()),
                ExecutorEvent::Step {
                    request_id,
                    n_done,
                    n_steps,
                } if *request_id == id => Some(format!("{n_done}/{n_steps}")),
                ExecutorEvent::RequestDone { request_id, .. } if *request_id == id => Some("done".to_owned()),
                _ => None,
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(of(1), ["started", "1/2", "2/2", "done"]);
    assert_eq!(of(2), ["started", "1/3", "2/3", "3/3", "done"]);
    assert_eq!(
        events.last(),
        Some(&ExecutorEvent::WaveDone { wave_id: WaveId(5) })
    );
    for (id, outcome) in outcomes(events) {
        let generated = outcome.unwrap();
        let seed = id.0 + 6;
        assert_eq!(generated.image, picture(seed, 8));
        assert_eq!((generated.rank, generated.resolved.seed), (Rank(0), seed));
        assert!(generated.tensors.is_empty());
    }
    close(&*executor);
}

/// See the name.
pub fn traces_and_latents_travel_whole(start: &StartFn) {
    let executor = start(&Script {
        n_trace_values: 50_000,
        ..Script::default()
    });
    let values: Vec<f32> = (0..40_000).map(|i| i as f32 * 0.5).collect();
    let latents = NamedTensor::from_f32("latents.initial", &[1, 4, 100, 100], &values);
    let mut traced = request(1, 4);
    traced.capture = Capture::Trace;
    traced.latents = Some(latents.clone());
    let small = NamedTensor::from_f32("latents.initial", &[2], &[0.25, f32::MIN]);
    let mut plain = request(2, 1);
    plain.latents = Some(small.clone());
    executor
        .dispatch(wave(1, &[0], &[(1, traced), (2, plain)]), late())
        .unwrap();
    let mut outcomes = outcomes(events_until_done(&*executor, &[1]));
    let tensors = outcomes.remove(&RequestId(1)).unwrap().unwrap().tensors;
    assert_eq!(tensors.len(), 5);
    assert_eq!(tensors[0], latents);
    for (step_idx, tensor) in tensors[1..].iter().enumerate() {
        let expected = vec![step_idx as f32; 50_000];
        assert_eq!(
            *tensor,
            NamedTensor::from_f32(format!("latents.step_{step_idx}"), &[50_000], &expected)
        );
    }
    assert_eq!(outcomes.remove(&RequestId(2)).unwrap().unwrap().tensors, [small]);

    // A tensor whose bytes are not those of its shape is its request's own failure.
    let mut wrong = request(3, 1);
    wrong.latents = Some(NamedTensor {
        shape: vec![3],
        ..NamedTensor::from_f32("latents", &[2], &[1.0, 2.0])
    });
    executor
        .dispatch(wave(2, &[0], &[(3, wrong), (4, request(4, 1))]), late())
        .unwrap();
    let outcomes = self::outcomes(events_until_done(&*executor, &[2]));
    assert_eq!(
        outcomes[&RequestId(3)].as_ref().unwrap_err().code,
        FailureCode::InvalidRequest
    );
    assert!(outcomes[&RequestId(4)].is_ok());
    close(&*executor);
}

/// See the name.
pub fn k1_cancelled_requests_end_soon_and_the_next_starts(start: &StartFn) {
    let executor = start(&Script::with_steps_of(20));
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 50)), (2, request(2, 2))]), late())
        .unwrap();
    let mut n_done_at_end = 0;
    let mut is_cancelled = false;
    let mut outcomes: BTreeMap<RequestId, Outcome> = BTreeMap::new();
    while outcomes.len() < 2 {
        for event in executor.wait_events(late()) {
            match event {
                ExecutorEvent::Step {
                    request_id: RequestId(1),
                    n_done,
                    ..
                } => {
                    n_done_at_end = n_done;
                    if n_done == 5 && !is_cancelled {
                        is_cancelled = true;
                        // Unknown ids are ignored.
                        executor.cancel(&[RequestId(1), RequestId(999)], late()).unwrap();
                    }
                }
                ExecutorEvent::RequestDone { request_id, outcome } => {
                    assert!(
                        outcomes
                            .insert(request_id, outcome.map(Output::into_generated))
                            .is_none()
                    );
                }
                _ => {}
            }
        }
    }
    let failure = outcomes[&RequestId(1)].as_ref().unwrap_err();
    assert_eq!(
        (failure.code, failure.rank),
        (FailureCode::Cancelled, Some(Rank(0)))
    );
    // A loaded machine may be late in sending the cancel, not by 30 steps of 20 ms.
    assert!(n_done_at_end < 35, "{n_done_at_end} steps");
    assert!(outcomes[&RequestId(2)].is_ok());
    close(&*executor);
}

/// Two lanes have two orders.
pub fn a_cancel_may_overtake_its_wave(start: &StartFn) {
    let executor = start(&Script::with_steps_of(5));
    for round in 1..20 {
        // Five seconds if nobody stops it.
        let first = (2 * round, request(round, 1000));
        executor
            .dispatch(
                wave(round, &[0], &[first, (2 * round + 1, request(round, 1))]),
                late(),
            )
            .unwrap();
        executor.cancel(&[RequestId(2 * round)], late()).unwrap();
        let outcomes = outcomes(events_until_done(&*executor, &[round]));
        assert_eq!(
            outcomes[&RequestId(2 * round)].as_ref().unwrap_err().code,
            FailureCode::Cancelled
        );
        assert!(outcomes[&RequestId(2 * round + 1)].is_ok());
    }
    close(&*executor);
}

/// See the name.
pub fn requests_end_at_their_deadline(start: &StartFn) {
    let executor = start(&Script::with_steps_of(10));
    let mut wave = wave(1, &[0], &[(1, request(1, 1000)), (2, request(2, 1))]);
    wave.joining[0].deadline_ns = denoised_os::Deadline::after_ms(200).ns();
    executor.dispatch(wave, late()).unwrap();
    let outcomes = outcomes(events_until_done(&*executor, &[1]));
    assert_eq!(
        outcomes[&RequestId(1)].as_ref().unwrap_err().code,
        FailureCode::DeadlineExceeded
    );
    assert!(outcomes[&RequestId(2)].is_ok());
    close(&*executor);
}

/// See the name.
pub fn forgotten_requests_are_failed(start: &StartFn) {
    let executor = start(&Script::default().fault(None, At::Decode, What::Forget));
    executor
        .dispatch(wave(1, &[0], &[(1, request(1, 1)), (2, request(2, 1))]), late())
        .unwrap();
    let outcomes = outcomes(events_until_done(&*executor, &[1]));
    assert_eq!(outcomes.len(), 2);
    assert!(
        outcomes
            .values()
            .all(|o| o.as_ref().is_err_and(|f| f.code == FailureCode::Internal))
    );
    close(&*executor);
}

/// See the name.
pub fn c7_concurrent_requests_are_answered_like_serial_ones(start: &StartFn) {
    let executor = start(&Script::with_steps_of(1));
    let n_ranks = executor.world().world_size;
    for n_waves in [2u64, 8] {
        let base = n_waves * 1000;
        for idx in 0..n_waves {
            let rank = (idx % u64::from(n_ranks)) as u16;
            executor
                .dispatch(
                    wave(base + idx, &[rank], &[(base + idx, request(idx, 3))]),
                    late(),
                )
                .unwrap();
        }
        let waves: Vec<u64> = (0..n_waves).map(|idx| base + idx).collect();
        let outcomes = outcomes(events_until_done(&*executor, &waves));
        assert_eq!(outcomes.len() as u64, n_waves);
        for (request_id, outcome) in outcomes {
            assert_eq!(outcome.unwrap().image, picture(request_id.0 - base, 8));
        }
    }
    close(&*executor);
}

/// See the name.
pub fn q9_unread_events_hold_the_worker_back_and_none_is_lost(start: &StartFn) {
    const N_STEPS: u32 = 1000;
    let executor = start(&Script {
        n_trace_values: 2000,
        ..Script::default()
    });
    let members: Vec<(u64, _)> = (0..8)
        .map(|id| {
            let mut traced = request(id, N_STEPS);
            traced.capture = Capture::Trace;
            (id, traced)
        })
        .collect();
    // 8 x 1000 tensors of 8 kB and as many steps: many times what lies between executor and worker.
    executor.dispatch(wave(1, &[0], &members), late()).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    // Commands get through all the same.
    executor.cancel(&[RequestId(777)], late()).unwrap();
    executor
        .dispatch(wave(2, &[0], &[(100, request(100, 1))]), late())
        .unwrap();
    let events = events_until_done(&*executor, &[1, 2]);
    for id in 0..8 {
        let steps: Vec<u32> = events
            .iter()
            .filter_map(|event| match event {
                ExecutorEvent::Step {
                    request_id: RequestId(of),
                    n_done,
                    ..
                } if *of == id => Some(*n_done),
                _ => None,
            })
            .collect();
        assert_eq!(steps, (1..=N_STEPS).collect::<Vec<_>>());
    }
    let outcomes = outcomes(events);
    assert_eq!(outcomes.len(), 9);
    for id in 0..8 {
        let tensors = &outcomes[&RequestId(id)].as_ref().unwrap().tensors;
        assert_eq!(tensors.len(), N_STEPS as usize);
        let is_right =
            |(step_idx, tensor): (usize, &NamedTensor)| tensor.name == format!("latents.step_{step_idx}");
        assert!(tensors.iter().enumerate().all(is_right));
    }
    close(&*executor);
}
