//! Shared memory: lifetime and capacity.

use super::*;
use std::collections::BTreeSet;

#[test]
fn m1_memory_that_is_not_there_is_an_error_with_both_numbers() {
    let _watchdog = watchdog("m1");
    // A machine with 8 MiB to spare, and a world that wants more than 64 MiB.
    let mut wants = options(2, &Script::default());
    wants.link = LinkSpec {
        event_arena_bytes: 64 << 20,
        memory_limit_bytes: 8 << 20,
        ..wants.link
    };
    let ExecutorError::Start { cause, ranks, .. } = start_error(wants.clone()) else {
        panic!("another error")
    };
    assert_eq!(cause.code, FailureCode::OutOfMemory);
    let needed = wants.link.total_bytes(2);
    assert!(needed > 64 << 20);
    assert!(
        cause.message.contains(&format!("needs {needed} bytes"))
            && cause.message.contains("only 8388608 are available")
            && cause.message.contains("memory_limit_bytes"),
        "{cause}"
    );
    assert!(ranks.is_empty(), "no process was started");
    // Exactly as much as it needs is enough.
    wants.link.memory_limit_bytes = needed;
    let executor = start_with(wants);
    assert_eq!(
        executor
            .call(&MethodCall::new("echo", b"fits", late()))
            .unwrap()
            .len(),
        2
    );
}

#[test]
fn m1_also_holds_for_the_machines_own_limit() {
    let _watchdog = watchdog("m1 machine");
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

/// Says to a copy of this program that it shall count.
const COUNT: &str = "DENOISED_TEST_COUNT";

/// Not a test by itself: a program of its own, so that nobody else's descriptors are counted.
#[test]
fn counting_process() {
    if std::env::var_os(COUNT).is_none() {
        return;
    }
    let me = std::process::id();
    let descriptors = || {
        let mut links = links_of(me);
        // The one that lists them.
        links.retain(|link| !link.ends_with("/fd"));
        links.len()
    };
    let mapped = || shared_memory_of(&[me]).len();
    let mut first = None;
    for _ in 0..20 {
        let executor = start(2, &Script::default());
        let replies = executor.call(&MethodCall::new("echo", &[1; 100_000], late()));
        assert_eq!(replies.unwrap().len(), 2);
        assert!(
            mapped() >= 7,
            "two rings and arenas of events, those of commands, the board"
        );
        let pids = executor.world().pids;
        kill("KILL", &pids);
        drop(executor);
        assert!(pids.iter().all(|pid| !is_running(*pid)));
        // Memory without a name is in use as long as somebody maps it or has it open.
        assert_eq!(mapped(), 0);
        let n_open = descriptors();
        assert_eq!(*first.get_or_insert(n_open), n_open, "{:?}", links_of(me));
    }
    assert!(!links_of(me).iter().any(|link| link.contains("memfd")));
}

#[test]
fn m3_killed_worlds_leave_nothing_behind() {
    let _watchdog = watchdog("m3");
    let mut counting = this_test_again("memory::counting_process", &[(COUNT, "1")]);
    let status = wait_for(&counting, late() - Instant::now());
    let mut said = String::new();
    if let Some(stderr) = counting.take_stderr() {
        std::fs::File::from(stderr).read_to_string(&mut said).unwrap();
    }
    assert_eq!(status, ExitStatus::Code(0), "{said}");
    let names = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let mut ours = names.filter(|entry| entry.file_name().to_string_lossy().contains("denoised"));
    assert!(ours.next().is_none(), "nothing of ours has a name");
}

/// The shared memory that these processes map, by inode: its size.
fn shared_memory_of(pids: &[u32]) -> BTreeMap<u64, u64> {
    let mut sizes = BTreeMap::new();
    for pid in pids {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        for line in maps.lines().filter(|line| line.contains("/memfd:denoised")) {
            // "start-end perms offset device inode path", see proc(5).
            let mut fields = line.split_ascii_whitespace();
            let (start, end) = fields.next().unwrap().split_once('-').unwrap();
            let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
            let offset = hex(fields.nth(1).unwrap());
            let inode = fields.nth(1).unwrap().parse().unwrap();
            let size = sizes.entry(inode).or_insert(0);
            *size = u64::max(*size, offset + hex(end) - hex(start));
        }
    }
    sizes
}

#[test]
fn m7_every_queue_has_the_configured_size_and_the_sum_is_the_documented_one() {
    let _watchdog = watchdog("m7");
    let mut options = options(8, &Script::default());
    options.link = LinkSpec {
        command_ring_bytes: 1 << 20,
        command_arena_bytes: 2 << 20,
        event_ring_bytes: 1 << 20,
        event_arena_bytes: 1 << 20,
        ..options.link
    };
    let executor = start_with(options.clone());
    let sizes = shared_memory_of(&executor.world().pids);
    // By hand, as the head of `LinkSpec::total_bytes` has it: a ring takes 12 288 bytes more than its capacity, an arena's extra
    // (64 bytes per 65 536, and 256) rounds up to 65 536, and the board of 8 448 bytes to three pages.
    let ring = 1_048_576 + 12_288;
    let mut wanted = vec![ring, 2_097_152 + 65_536, 12_288];
    for _ in 0..8 {
        wanted.extend([ring, 1_048_576 + 65_536]);
    }
    let mut found: Vec<u64> = sizes.values().copied().collect();
    found.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(found, wanted, "one inode per queue");
    let in_all: u64 = found.iter().sum();
    assert_eq!(in_all, options.link.total_bytes(8) + (12_288 - 8_448));
    // And nothing but these: what the executor maps of this world is what its workers map.
    let own: BTreeSet<u64> = shared_memory_of(&[std::process::id()]).into_keys().collect();
    assert!(sizes.keys().all(|inode| own.contains(inode)));
}
