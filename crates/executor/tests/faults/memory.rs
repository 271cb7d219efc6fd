//! Shared memory: lifetime and capacity.

use super::*;

#[test]
fn m1_memory_that_is_not_there_is_an_error_with_both_numbers() {
    let _watchdog = watchdog("m1");
    let mut options = options(2, &Script::default());
    options.link = LinkSpec {
        event_arena_bytes: 64 << 30,
        ..LinkSpec::default()
    };
    let ExecutorError::Start { cause, ranks, .. } = start_error(options.clone()) else {
        panic!("another error")
    };
    assert_eq!(cause.code, FailureCode::OutOfMemory);
    let needed = options.link.total_bytes(2).to_string();
    assert!(
        cause.message.contains(&needed) && cause.message.contains("available"),
        "{cause}"
    );
    assert!(ranks.is_empty(), "no process was started");
}

#[test]
fn m3_killed_worlds_leave_nothing_behind() {
    let _watchdog = watchdog("m3");
    let names = || {
        std::fs::read_dir("/dev/shm")
            .map(|entries| entries.count())
            .unwrap_or(0)
    };
    let own_fds = || {
        links_of(std::process::id())
            .iter()
            .filter(|link| link.contains("memfd"))
            .count()
    };
    let names_before = names();
    let mut fds_after_first = None;
    for _ in 0..20 {
        let executor = start(2, &Script::default());
        executor
            .call(&MethodCall::new("echo", &[1; 100_000], late()))
            .unwrap();
        kill("KILL", &executor.world().pids);
        drop(executor);
        fds_after_first.get_or_insert_with(own_fds);
    }
    assert!(names() <= names_before, "nothing of ours has a name");
    // Tests beside this one open and close theirs.
    assert!(own_fds() <= fds_after_first.unwrap_or(0) + 64);
}

#[test]
fn the_shared_memory_is_what_the_formula_says() {
    let _watchdog = watchdog("formula");
    let options = options(2, &Script::default());
    let executor = start_with(options.clone());
    // Each rank maps the command ring and arena, its own event ring and arena, and the board.
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", executor.world().pids[0])).unwrap();
    let mapped: u64 = maps
        .lines()
        .filter(|line| line.contains("/memfd:denoised"))
        .map(|line| {
            let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
            u64::from_str_radix(end, 16).unwrap() - u64::from_str_radix(start, 16).unwrap()
        })
        .sum();
    let formula = options.link.total_bytes(1);
    // Five pieces, each rounded up to a page of 4 KiB.
    assert!(
        (formula..formula + 5 * 4096).contains(&mapped),
        "{mapped} mapped, {formula} by the formula"
    );
}
