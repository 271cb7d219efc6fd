//! Abort and cancel.

use super::*;
use denoised_os::now_ns;
use denoised_testkit::script::step_wave;

#[test]
fn k1_a_cancelled_request_ends_within_two_steps_and_the_next_begins() {
    let _watchdog = watchdog("k1");
    let executor = start(1, &Script::with_steps_of(20));
    // On a busy machine a cancel may be late, but not each time.
    let mut last_steps = Vec::new();
    for round in 0..10u64 {
        let (cancelled, next) = (2 * round, 2 * round + 1);
        executor
            .dispatch(wave(cancelled, &[0], &[(cancelled, request(1, 50))]), late())
            .unwrap();
        executor
            .dispatch(wave(next, &[0], &[(next, request(2, 1))]), late())
            .unwrap();
        let mut events = wait_for_step(&executor, cancelled, 5);
        executor.cancel(&[RequestId(cancelled)], late()).unwrap();
        while outcomes(&events).len() < 2 {
            events.extend(executor.wait_events(late()));
        }
        let outcomes = outcomes(&events);
        let failure = outcomes[&RequestId(cancelled)].as_ref().unwrap_err();
        assert_eq!(
            (failure.code, failure.rank),
            (FailureCode::Cancelled, Some(Rank(0)))
        );
        assert_eq!(outcomes[&RequestId(next)].as_ref().unwrap(), &picture(2, 8));
        let last_step = events.iter().filter_map(|event| match event {
            ExecutorEvent::Step {
                request_id, n_done, ..
            } if request_id.0 == cancelled => Some(*n_done),
            _ => None,
        });
        last_steps.push(last_step.max().unwrap());
        assert!(last_steps[round as usize] < 35, "{last_steps:?}");
        if last_steps[round as usize] <= 7 {
            break;
        }
    }
    println!("cancelled at step 5 of 50, the last step was {last_steps:?}");
    assert!(
        last_steps.last().is_some_and(|last_step| *last_step <= 7),
        "{last_steps:?}"
    );
}

/// Takes events until this wave is over.
fn run_wave(executor: &dyn Executor, wave: denoised_wire::Wave) -> Vec<ExecutorEvent> {
    let wave_id = wave.wave_id;
    executor.dispatch(wave, late()).unwrap();
    let mut events = Vec::new();
    loop {
        let more = executor.wait_events(late());
        assert!(!more.is_empty(), "silence after {events:?}");
        events.extend(more);
        assert!(
            !events
                .iter()
                .any(|event| matches!(event, ExecutorEvent::WorldFailed(_))),
            "{events:?}"
        );
        if events.contains(&ExecutorEvent::WaveDone { wave_id }) {
            return events;
        }
    }
}

#[test]
fn k3_cancelling_one_of_a_batch_changes_nothing_for_the_other() {
    let _watchdog = watchdog("k3");
    let executor = start(
        1,
        &Script {
            n_trace_values: 1000,
            ..Script::with_steps_of(2)
        },
    );
    let traced = |seed, n_steps| {
        let mut request = request(seed, n_steps);
        request.capture = denoised_types::Capture::Trace;
        request
    };
    let result = |events: &[ExecutorEvent], id: u64| {
        events.iter().find_map(|event| match event {
            ExecutorEvent::RequestDone { request_id, outcome } if request_id.0 == id => Some(
                outcome
                    .as_ref()
                    .map(|output| (image(output), output.tensors().to_vec()))
                    .map_err(|f| f.code),
            ),
            _ => None,
        })
    };
    let alone = result(&run_wave(&executor, wave(1, &[0], &[(1, traced(7, 20))])), 1).unwrap();
    assert!(alone.is_ok());

    // Whole generations: one of two is cancelled while it runs.
    executor
        .dispatch(
            wave(2, &[0], &[(20, traced(8, 1000)), (21, traced(7, 20))]),
            late(),
        )
        .unwrap();
    let mut events = wait_for_step(&executor, 20, 3);
    executor.cancel(&[RequestId(20)], late()).unwrap();
    while !events.contains(&ExecutorEvent::WaveDone { wave_id: WaveId(2) }) {
        events.extend(executor.wait_events(late()));
    }
    assert_eq!(result(&events, 20), Some(Err(FailureCode::Cancelled)));
    assert_eq!(result(&events, 21), Some(alone.clone()));

    // One step a wave: both share the first three, then one is given up.
    let mut events = run_wave(
        &executor,
        step_wave(3, &[0], &[(30, traced(8, 1000)), (31, traced(7, 20))], &[], &[]),
    );
    for wave_id in 4..6 {
        events.extend(run_wave(&executor, step_wave(wave_id, &[0], &[], &[30, 31], &[])));
    }
    for wave_id in 6..23 {
        let cancelled: &[u64] = if wave_id == 6 { &[30] } else { &[] };
        events.extend(run_wave(
            &executor,
            step_wave(wave_id, &[0], &[], &[31], cancelled),
        ));
    }
    assert_eq!(result(&events, 30), Some(Err(FailureCode::Cancelled)));
    assert_eq!(result(&events, 31), Some(alone));
}

#[test]
fn k5_ranks_that_meet_in_every_step_agree_on_a_cancel() {
    let _watchdog = watchdog("k5");
    let folder = tempfile::tempdir().unwrap();
    let script = Script {
        meeting: Some(folder.path().to_owned()),
        ..Script::default()
    };
    let executor = start(4, &script);
    let ranks = [0, 1, 2, 3];
    let n_runs = 500;
    let mut next_wave = 0;
    let (mut n_cancelled, mut n_finished) = (0, 0);
    for run in 0..n_runs {
        // Two requests that share waves; the first is cancelled at a random moment, by those who may try it: the next wave, and the
        // control lane, which must not reach ranks that are in different steps.
        let (given_up, stays) = (2 * run, 2 * run + 1);
        let moment = Duration::from_micros(now_ns() % 3000);
        let begin = Instant::now();
        let mut open = vec![given_up, stays];
        let mut joining = vec![(given_up, request(given_up, 8)), (stays, request(stays, 4))];
        let mut is_told = false;
        while !open.is_empty() {
            next_wave += 1;
            let is_due = begin.elapsed() >= moment && !is_told && joining.is_empty();
            is_told |= is_due;
            let cancelled: &[u64] = if is_due { &[given_up] } else { &[] };
            let mut continuing = open.clone();
            continuing.retain(|id| !cancelled.contains(id));
            if !joining.is_empty() {
                continuing.clear();
            }
            let wave = step_wave(
                next_wave,
                &ranks,
                &std::mem::take(&mut joining),
                &continuing,
                cancelled,
            );
            let events = std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(moment / 8);
                    executor.cancel(&[RequestId(given_up)], late()).unwrap();
                });
                run_wave(&executor, wave)
            });
            for (id, outcome) in outcomes(&events) {
                open.retain(|open| *open != id.0);
                match outcome {
                    Ok(image) => {
                        n_finished += 1;
                        assert_eq!(image, picture(id.0, 8));
                    }
                    Err(failure) => {
                        n_cancelled += 1;
                        assert_eq!(
                            (id.0, failure.code),
                            (given_up, FailureCode::Cancelled),
                            "{failure}"
                        );
                    }
                }
            }
        }
    }
    println!("{n_runs} runs on 4 ranks: {n_cancelled} requests cancelled, {n_finished} finished");
    assert_eq!(n_cancelled + n_finished, 2 * n_runs);
    assert!(n_cancelled > n_runs / 20 && n_finished >= n_runs);
    assert_eq!(executor.failure(), None);
}
