//! Ring and queue.

use super::*;

#[test]
fn q5_what_many_threads_send_arrives_once() {
    let _watchdog = watchdog("q5");
    const N_THREADS: u64 = 8;
    const N_EACH: u64 = 10_000;
    let executor = start(1, &Script::default());
    let executor = &executor;
    std::thread::scope(|scope| {
        for thread in 0..N_THREADS {
            scope.spawn(move || {
                for idx in 0..N_EACH {
                    let mine = (thread << 32 | idx).to_le_bytes();
                    let replies = executor.call(&MethodCall::new("echo", &mine, late())).unwrap();
                    assert_eq!(replies[0].bytes, mine);
                }
            });
        }
    });
    let replies = executor.call(&MethodCall::new("status", b"", late())).unwrap();
    let status = WorkerStatus::from_bytes(&replies[0].bytes).unwrap();
    assert_eq!(status.n_calls, N_THREADS * N_EACH, "each was carried out once");
}

#[test]
fn q7_idle_workers_cost_next_to_nothing() {
    let _watchdog = watchdog("q7");
    let executor = start(8, &Script::default());
    executor.call(&MethodCall::new("echo", b"", late())).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let used = || -> u64 {
        executor
            .world()
            .pids
            .iter()
            .map(|pid| cpu_time_ns(*pid).unwrap())
            .sum()
    };
    let (begin, before) = (Instant::now(), used());
    std::thread::sleep(Duration::from_secs(10));
    let share = (used() - before) as f64 / begin.elapsed().as_nanos() as f64;
    println!("8 idle workers used {:.4} % of a core", share * 100.0);
    assert!(share < 0.01, "{share}");
    // On a busy machine one may be late, but not each time after a rest.
    let takes: Vec<Duration> = (0..20)
        .map(|_| {
            let begin = Instant::now();
            executor.call(&MethodCall::new("echo", b"awake", late())).unwrap();
            let took = begin.elapsed();
            std::thread::sleep(Duration::from_millis(20));
            took
        })
        .collect();
    println!("the first calls after a rest took {takes:?}");
    assert!(
        takes.iter().any(|took| *took < Duration::from_millis(5)),
        "{takes:?}"
    );
}

#[test]
fn q9_replies_for_a_busy_caller_wait_and_block_no_command() {
    let _watchdog = watchdog("q9");
    // The smallest memory there is: a ring of 8 KiB and an arena of 64 KiB either way.
    let mut options = options(
        1,
        &Script {
            n_trace_values: 2000,
            ..Script::default()
        },
    );
    options.link = LinkSpec {
        command_ring_bytes: 8 << 10,
        command_arena_bytes: 64 << 10,
        event_ring_bytes: 8 << 10,
        event_arena_bytes: 64 << 10,
        ..options.link
    };
    let executor = start_with(options);
    // 10 000 steps and as many tensors of 8 kB: more than a hundred times what the ring holds (an event takes 64 bytes at least),
    // and more than a thousand times the arena.
    const N_STEPS: u32 = 10_000;
    let mut traced = request(1, N_STEPS);
    traced.capture = denoised_types::Capture::Trace;
    executor.dispatch(wave(1, &[0], &[(1, traced)]), late()).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    // Nobody has taken an event, so the worker waits; and many times what the command ring holds gets through to it.
    let n_waves = 500;
    for id in 2..2 + n_waves {
        executor
            .dispatch(wave(id, &[0], &[(id, request(id, 1))]), late())
            .unwrap();
    }
    let mut n_over = 0;
    let mut events = Vec::new();
    while n_over < 1 + n_waves {
        let more = executor.wait_events(late());
        assert!(!more.is_empty(), "silence after {n_over} waves");
        n_over += more
            .iter()
            .filter(|event| matches!(event, ExecutorEvent::WaveDone { .. }))
            .count() as u64;
        events.extend(more);
    }
    let steps = events.iter().filter_map(|event| match event {
        ExecutorEvent::Step {
            request_id: RequestId(1),
            n_done,
            ..
        } => Some(*n_done),
        _ => None,
    });
    assert!(steps.eq(1..=N_STEPS), "no step is lost, and none out of order");
    let n_tensors = events.iter().find_map(|event| match event {
        ExecutorEvent::RequestDone {
            request_id: RequestId(1),
            outcome,
        } => Some(outcome.as_ref().unwrap().tensors().len()),
        _ => None,
    });
    assert_eq!(n_tensors, Some(N_STEPS as usize));
    assert!(
        outcomes(&events)
            .iter()
            .all(|(id, outcome)| outcome.as_ref().unwrap() == &picture(id.0, 8))
    );
    assert_eq!(executor.stats().n_dropped_steps, 0);
}

#[test]
fn a_sender_that_waits_for_a_dead_rank_is_released() {
    let _watchdog = watchdog("released");
    let mut options = options(2, &Script::default());
    options.link = LinkSpec {
        command_ring_bytes: 8 << 10,
        ..options.link
    };
    let executor = start_with(options);
    let executor = &executor;
    let pid = executor.world().pids[1];
    stop(&[pid]);
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let mut id = 0;
            loop {
                id += 1;
                if let Err(error) = executor.dispatch(wave(id, &[0], &[(id, request(id, 1))]), late()) {
                    return error;
                }
            }
        });
        std::thread::sleep(Duration::from_millis(200));
        let begin = Instant::now();
        kill("KILL", &[pid]);
        let error = sender.join().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(30));
        assert!(
            matches!(&error, ExecutorError::Failed(failure) if failure.rank == Some(Rank(1))),
            "{error:?}"
        );
    });
}
