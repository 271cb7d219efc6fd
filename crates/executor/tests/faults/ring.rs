//! Ring and queue.

use super::*;

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
    std::thread::sleep(Duration::from_secs(4));
    let share = (used() - before) as f64 / begin.elapsed().as_nanos() as f64;
    println!("8 idle workers used {:.4} % of a core", share * 100.0);
    assert!(share < 0.01, "{share}");
    let begin = Instant::now();
    executor.call(&MethodCall::new("echo", b"awake", late())).unwrap();
    println!("the first call afterwards took {:?}", begin.elapsed());
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
    kill("STOP", &[pid]);
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
