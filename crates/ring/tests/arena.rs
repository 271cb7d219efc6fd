//! The arena within one process.

use denoised_os::Deadline;
use denoised_ring::{ArenaError, ArenaHolder, ArenaOwner, ArenaRef, ArenaSpec, AttachError};
use std::time::Duration;

const SPEC: ArenaSpec = ArenaSpec {
    granule_bytes: 4096,
    n_granules: 8,
};

fn soon() -> Deadline {
    Deadline::after_ms(60_000)
}

fn arena() -> (ArenaOwner, ArenaHolder, ArenaHolder) {
    let owner = ArenaOwner::create("test", SPEC, 7).unwrap();
    let holder = |holder_idx| ArenaHolder::attach(owner.fd().unwrap(), holder_idx).unwrap();
    let (first, second) = (holder(0), holder(1));
    (owner, first, second)
}

#[test]
fn a_body_written_in_place_is_read_in_place() {
    let (mut owner, first, second) = arena();
    let mut block = owner.try_allocate(10_000).unwrap();
    assert_eq!(block.len(), 10_000);
    block.fill(42);
    let reference = block.publish(0b11);
    assert_eq!((reference.arena, reference.len), (7, 10_000));
    let (one, two) = (first.lease(reference).unwrap(), second.lease(reference).unwrap());
    assert!(one.len() == 10_000 && one.iter().all(|&byte| byte == 42));
    assert_eq!(owner.free_bytes(), 5 * 4096);
    drop(one);
    let clone = two.clone();
    drop(two);
    assert_eq!(owner.free_bytes(), 5 * 4096, "a clone still holds it");
    assert_eq!(clone[9_999], 42);
    drop(clone);
    assert_eq!(owner.free_bytes(), 8 * 4096);
}

#[test]
fn blocks_given_up_or_published_to_nobody_are_free() {
    let (mut owner, ..) = arena();
    let block = owner.try_allocate(8 * 4096).unwrap();
    assert_eq!(owner.free_bytes(), 0);
    drop(block);
    let block = owner.try_allocate(0).unwrap();
    assert_eq!((block.len(), owner.free_bytes()), (0, 7 * 4096));
    block.publish(0);
    assert_eq!(owner.free_bytes(), 8 * 4096);
}

#[test]
fn a_full_arena_says_how_much_is_free_and_waits_for_more() {
    let (mut owner, first, _) = arena();
    assert!(matches!(
        owner.try_allocate(8 * 4096 + 1),
        Err(ArenaError::TooLarge {
            len: 32_769,
            limit_bytes: 32_768
        })
    ));
    let blocks: Vec<ArenaRef> = (0..4)
        .map(|_| owner.try_allocate(2 * 4096).unwrap().publish(0b1))
        .collect();
    // Free runs of two granules each, with one block between.
    drop(first.lease(blocks[0]).unwrap());
    drop(first.lease(blocks[2]).unwrap());
    match owner.allocate(3 * 4096, Deadline::after_ms(10)) {
        Err(ArenaError::Full {
            len,
            largest_free_bytes,
        }) => {
            assert_eq!((len, largest_free_bytes), (3 * 4096, 2 * 4096));
        }
        other => panic!("{other:?}"),
    }
    let last = first.lease(blocks[1]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(10));
            drop(last);
        });
        let block = owner.allocate(6 * 4096, soon()).unwrap();
        assert_eq!(block.len(), 6 * 4096);
    });
    assert_eq!(owner.n_missed_wakes(), 0);
}

#[test]
fn a_dead_holders_blocks_come_back_and_twice_changes_nothing() {
    let (mut owner, first, _) = arena();
    let reference = owner.try_allocate(8 * 4096).unwrap().publish(0b11);
    let reaper = owner.reaper();
    drop(first.lease(reference).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            assert_eq!((reaper.reap(1), reaper.reap(1), reaper.reap(64)), (1, 0, 0));
        });
        owner.allocate(4096, soon()).unwrap();
    });
}

#[test]
fn references_are_checked_before_they_are_used() {
    let (mut owner, first, second) = arena();
    let reference = owner.try_allocate(5_000).unwrap().publish(0b01);
    let changed = |change: fn(&mut ArenaRef)| {
        let mut changed = reference;
        change(&mut changed);
        first.lease(changed).unwrap_err()
    };
    assert!(matches!(
        changed(|r| r.arena = 8),
        ArenaError::OtherArena {
            expected: 7,
            found: 8
        }
    ));
    assert!(matches!(changed(|r| r.block = 8), ArenaError::OutOfBounds { .. }));
    assert!(matches!(
        changed(|r| r.block = u32::MAX),
        ArenaError::OutOfBounds { .. }
    ));
    assert!(matches!(
        changed(|r| r.len = u64::MAX),
        ArenaError::OutOfBounds { .. }
    ));
    assert!(matches!(
        changed(|r| r.len = 40_000),
        ArenaError::OutOfBounds { .. }
    ));
    assert!(matches!(changed(|r| r.len = 5_001), ArenaError::NotHeld { .. }));
    assert!(matches!(changed(|r| r.block = 1), ArenaError::NotHeld { .. }));
    assert!(matches!(
        changed(|r| r.generation = 2),
        ArenaError::NotHeld { .. }
    ));
    assert!(matches!(
        second.lease(reference),
        Err(ArenaError::NotHeld { holder_idx: 1, .. })
    ));
    let lease = first.lease(reference).unwrap();
    assert!(matches!(
        first.lease(reference),
        Err(ArenaError::LeasedBefore { .. })
    ));
    drop(lease);
    assert!(matches!(first.lease(reference), Err(ArenaError::NotHeld { .. })));
    // The same granules again: the old reference stays stale.
    let next = owner.try_allocate(5_000).unwrap().publish(0b01);
    assert_eq!(
        (next.block, next.generation),
        (reference.block, reference.generation + 1)
    );
    assert!(matches!(first.lease(reference), Err(ArenaError::NotHeld { .. })));
    first.lease(next).unwrap();
}

#[test]
fn bodies_cross_threads_whole() {
    let owner = ArenaOwner::create(
        "test",
        ArenaSpec {
            granule_bytes: 4096,
            n_granules: 64,
        },
        0,
    );
    let mut owner = owner.unwrap();
    let holders = [0, 1].map(|idx| ArenaHolder::attach(owner.fd().unwrap(), idx).unwrap());
    std::thread::scope(|scope| {
        let mut senders = Vec::new();
        for holder in holders {
            let (sender, receiver) = std::sync::mpsc::channel::<(u8, ArenaRef)>();
            senders.push(sender);
            scope.spawn(move || {
                for (number, reference) in receiver {
                    let body = holder.lease(reference).unwrap();
                    assert!(body.iter().all(|&byte| byte == number), "body {number}");
                }
            });
        }
        for step in 0..3_000usize {
            let number = step as u8;
            let mut block = owner.allocate(step * 7919 % 40_000, soon()).unwrap();
            block.fill(number);
            let reference = block.publish(0b11);
            for sender in &senders {
                sender.send((number, reference)).unwrap();
            }
        }
        drop(senders);
    });
    assert_eq!(owner.free_bytes(), 64 * 4096);
    assert_eq!(owner.n_missed_wakes(), 0);
}

#[test]
fn leases_outlive_the_owner() {
    let (mut owner, first, _) = arena();
    let mut block = owner.try_allocate(100).unwrap();
    block.fill(9);
    let lease = first.lease(block.publish(0b1)).unwrap();
    drop((owner, first));
    assert_eq!(*lease, [9; 100]);
}

#[test]
fn foreign_memory_is_refused() {
    let ring = denoised_ring::RingMemory::create("t", denoised_ring::RingSpec { capacity_bytes: 512 }, 1);
    let fd = ring.unwrap().fd().unwrap();
    assert!(matches!(
        ArenaHolder::attach(fd, 0),
        Err(AttachError::BadHeader { .. })
    ));
    let (owner, ..) = arena();
    assert!(matches!(
        ArenaHolder::attach(owner.fd().unwrap(), 64),
        Err(AttachError::BadSpec { .. })
    ));
    assert!(matches!(
        denoised_ring::RingMemory::attach(owner.fd().unwrap()),
        Err(AttachError::BadHeader { .. })
    ));
}
