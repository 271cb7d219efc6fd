//! Rings and arenas between processes that die, stop, come late and leave early.

mod support;

use denoised_os::Deadline;
use denoised_os::child::ExitStatus;
use denoised_os::poll::wait_readable;
use denoised_os::signal::Signal;
use denoised_ring::{ArenaHolder, ArenaOwner, ArenaSpec, Board, RingError, RingMemory, RingSpec, Wait};
use std::os::fd::AsFd;
use support::{Peer, part, soon};

const CAPACITY_BYTES: usize = 4096;

fn ring(n_readers: usize) -> RingMemory {
    RingMemory::create(
        "test",
        RingSpec {
            capacity_bytes: CAPACITY_BYTES,
        },
        n_readers,
    )
    .unwrap()
}

/// What the other processes do.
#[test]
#[expect(clippy::exit, reason = "a peer's part ends its process")]
fn child_main() {
    let Some((part, channel, fds)) = part() else {
        return;
    };
    let mut fds = fds.into_iter();
    let mut next_fd = || fds.next().unwrap();
    let say = |text: &str| channel.send(text.as_bytes(), &[], soon()).unwrap();
    let forever = || std::thread::sleep(std::time::Duration::from_secs(600));
    let (part, number) = part.split_once(' ').unwrap_or((&part, "0"));
    let number: usize = number.parse().unwrap();
    match part {
        // Reads records 0, 1, 2, .. until the ring is closed, and says how many.
        "read" => {
            let mut reader = RingMemory::attach(next_fd()).unwrap().reader(number).unwrap();
            say("up");
            let mut n_read = 0u64;
            loop {
                match reader.read(Wait::Sleep, soon()) {
                    Ok(record) => assert_eq!(*record, n_read.to_le_bytes()),
                    Err(RingError::Closed) => break,
                    Err(error) => panic!("{error}"),
                }
                n_read += 1;
            }
            assert_eq!(reader.stats().n_missed_wakes, 0);
            say(&n_read.to_string());
        }
        // Reads from wherever it was admitted, and says the first and the number of records.
        "late" => {
            let mut reader = RingMemory::attach(next_fd()).unwrap().reader(number).unwrap();
            let first = u64::from_le_bytes((*reader.read(Wait::Sleep, soon()).unwrap()).try_into().unwrap());
            let mut n_read = 1;
            while reader.read(Wait::Sleep, soon()).is_ok() {
                n_read += 1;
            }
            say(&format!("{first} {n_read}"));
        }
        "hold" => {
            let mut reader = RingMemory::attach(next_fd()).unwrap().reader(number).unwrap();
            let _record = reader.read(Wait::Sleep, soon()).unwrap();
            say("holding");
            forever();
        }
        "leave" => {
            let mut reader = RingMemory::attach(next_fd()).unwrap().reader(number).unwrap();
            drop(reader.read(Wait::Sleep, soon()).unwrap());
            drop(reader);
            say("left");
        }
        "half" => {
            let mut writer = RingMemory::attach(next_fd()).unwrap().writer(None).unwrap();
            for record in 0..3u64 {
                writer.write(&[&record.to_le_bytes()], soon()).unwrap();
            }
            let mut reservation = writer.reserve(100, soon()).unwrap();
            reservation[..50].fill(1);
            say("half");
            forever();
        }
        // Makes a ring, fills it, hands it over and is gone.
        "create" => {
            let spec = RingSpec {
                capacity_bytes: CAPACITY_BYTES,
            };
            let memory = RingMemory::create("left by its creator", spec, 1).unwrap();
            let mut writer = memory.writer(None).unwrap();
            for record in 0..10u64 {
                writer.write(&[&record.to_le_bytes()], soon()).unwrap();
            }
            channel.send(b"ring", &[memory.as_fd()], soon()).unwrap();
        }
        // Replies with twice the number of each command, ringing the board's doorbell.
        "double" => {
            let mut reader = RingMemory::attach(next_fd()).unwrap().reader(number).unwrap();
            let doorbell = Board::attach(next_fd()).unwrap().doorbell();
            let mut writer = RingMemory::attach(next_fd())
                .unwrap()
                .writer(Some(doorbell))
                .unwrap();
            say("up");
            while let Ok(record) = reader.read(Wait::Sleep, soon()) {
                let asked = u64::from_le_bytes((*record).try_into().unwrap());
                drop(record);
                writer.write(&[&(2 * asked).to_le_bytes()], soon()).unwrap();
            }
            assert_eq!(reader.stats().n_missed_wakes + writer.stats().n_missed_wakes, 0);
            say("done");
        }
        "lease" => {
            let mut reader = RingMemory::attach(next_fd()).unwrap().reader(number).unwrap();
            let arena = ArenaHolder::attach(next_fd(), number).unwrap();
            let record = reader.read(Wait::Sleep, soon()).unwrap();
            let words: Vec<u64> = record
                .chunks(8)
                .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
                .collect();
            let reference = denoised_ring::ArenaRef {
                arena: words[0] as u32,
                block: words[1] as u32,
                generation: words[2] as u32,
                len: words[3],
            };
            let body = arena.lease(reference).unwrap();
            let sum: u64 = body.iter().map(|&byte| u64::from(byte)).sum();
            say(&sum.to_string());
            forever();
        }
        other => panic!("unknown part {other}"),
    }
    std::process::exit(0);
}

#[test]
fn a_reader_killed_with_a_record_is_evicted_and_the_others_lose_nothing() {
    let memory = ring(3);
    let mut writer = memory.writer(None).unwrap();
    let mut living = [0, 1].map(|idx| Peer::start(&format!("read {idx}"), &[memory.as_fd()]));
    let mut dying = Peer::start("hold 2", &[memory.as_fd()]);
    assert_eq!(living.each_mut().map(Peer::hear), ["up", "up"]);
    writer.write(&[&0u64.to_le_bytes()], soon()).unwrap();
    assert_eq!(dying.hear(), "holding");
    let evictor = writer.evictor();
    std::thread::scope(|scope| {
        // As a death monitor does it: reaped first, then evicted.
        let monitor = scope.spawn(|| {
            assert!(wait_readable(&[dying.child.as_fd()], soon()).unwrap()[0]);
            let status = dying.child.try_wait().unwrap();
            assert_eq!(status, Some(ExitStatus::Signal(Signal::KILL)));
            assert!(evictor.evict(2));
        });
        let mut n_written = 1u64;
        loop {
            match writer.write(&[&n_written.to_le_bytes()], Deadline::after_ms(100)) {
                Ok(()) => n_written += 1,
                Err(error) => {
                    assert_eq!(error, RingError::Laggard { laggard_idx: 2 });
                    break;
                }
            }
        }
        assert_eq!(n_written as usize, CAPACITY_BYTES / 64);
        dying.child.signal(Signal::KILL).unwrap();
        for record in n_written..10_000 {
            writer.write(&[&record.to_le_bytes()], soon()).unwrap();
        }
        monitor.join().unwrap();
    });
    writer.close();
    assert_eq!(living.each_mut().map(Peer::hear), ["10000", "10000"]);
}

#[test]
fn a_record_half_written_by_a_killed_writer_is_never_seen() {
    let memory = ring(1);
    let mut reader = memory.reader(0).unwrap();
    let mut peer = Peer::start("half", &[memory.as_fd()]);
    assert_eq!(peer.hear(), "half");
    peer.child.signal(Signal::KILL).unwrap();
    assert_eq!(
        peer.child.wait(soon()).unwrap(),
        Some(ExitStatus::Signal(Signal::KILL))
    );
    for record in 0..3u64 {
        assert_eq!(*reader.read(Wait::Sleep, soon()).unwrap(), record.to_le_bytes());
    }
    assert_eq!(
        reader.read(Wait::Sleep, Deadline::after_ms(20)).unwrap_err(),
        RingError::TimedOut
    );
}

#[test]
fn a_stopped_reader_is_named_and_after_continuing_has_lost_nothing() {
    let memory = ring(2);
    let mut writer = memory.writer(None).unwrap();
    let mut peers = [0, 1].map(|idx| Peer::start(&format!("read {idx}"), &[memory.as_fd()]));
    assert_eq!(peers.each_mut().map(Peer::hear), ["up", "up"]);
    peers[1].child.signal(Signal::STOP).unwrap();
    let mut n_written = 0u64;
    let error = loop {
        match writer.write(&[&n_written.to_le_bytes()], Deadline::after_ms(200)) {
            Ok(()) => n_written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error, RingError::Laggard { laggard_idx: 1 });
    assert_eq!(peers[1].child.try_wait().unwrap(), None, "stopped is not dead");
    peers[1].child.signal(Signal::CONT).unwrap();
    while n_written < 5_000 {
        writer.write(&[&n_written.to_le_bytes()], soon()).unwrap();
        n_written += 1;
    }
    writer.close();
    assert_eq!(peers.each_mut().map(Peer::hear), ["5000", "5000"]);
}

#[test]
fn a_late_process_sees_what_follows_its_admission() {
    let memory = ring(1);
    let mut writer = memory.writer(None).unwrap();
    let mut first = Peer::start("read 0", &[memory.as_fd()]);
    for record in 0..1_000u64 {
        writer.write(&[&record.to_le_bytes()], soon()).unwrap();
    }
    assert!(writer.admit(1));
    let mut late = Peer::start("late 1", &[memory.as_fd()]);
    for record in 1_000..1_500u64 {
        writer.write(&[&record.to_le_bytes()], soon()).unwrap();
    }
    writer.close();
    assert_eq!(first.hear(), "up");
    assert_eq!(first.hear(), "1500");
    assert_eq!(late.hear(), "1000 500");
}

#[test]
fn m5_processes_may_leave_in_any_order() {
    let memory = ring(3);
    let mut writer = memory.writer(None).unwrap();
    let mut stay = [0, 1].map(|idx| Peer::start(&format!("read {idx}"), &[memory.as_fd()]));
    let mut leaves = Peer::start("leave 2", &[memory.as_fd()]);
    writer.write(&[&0u64.to_le_bytes()], soon()).unwrap();
    assert_eq!(leaves.hear(), "left");
    assert_eq!(leaves.end(), (Some(ExitStatus::Code(0)), String::new()));
    // Many times what the ring holds.
    for record in 1..1_000u64 {
        writer.write(&[&record.to_le_bytes()], soon()).unwrap();
    }
    // The maker's memory goes with its last user, not before.
    drop(memory);
    writer.close();
    assert_eq!(stay.each_mut().map(Peer::hear), ["up", "up"]);
    assert_eq!(stay.each_mut().map(Peer::hear), ["1000", "1000"]);
    for peer in &mut stay {
        assert_eq!(peer.end(), (Some(ExitStatus::Code(0)), String::new()));
    }

    let mut creator = Peer::start("create", &[]);
    let received = creator.channel.receive(soon()).unwrap();
    assert_eq!(creator.end(), (Some(ExitStatus::Code(0)), String::new()));
    let memory = RingMemory::attach(received.fds.into_iter().next().unwrap()).unwrap();
    let mut reader = memory.reader(0).unwrap();
    for record in 0..10u64 {
        assert_eq!(*reader.read(Wait::Sleep, soon()).unwrap(), record.to_le_bytes());
    }
    assert_eq!(reader.read(Wait::Sleep, soon()).unwrap_err(), RingError::Closed);
    // With the last user it is gone: it has no name under which anybody could find it, or forget it.
    let is_mapped = || {
        std::fs::read_to_string("/proc/self/maps")
            .unwrap()
            .contains("left by its creator")
    };
    assert!(is_mapped());
    drop(reader);
    drop(memory);
    assert!(!is_mapped());
}

#[test]
fn replies_of_many_workers_ring_one_doorbell() {
    const N_WORKERS: usize = 4;
    const N_CALLS: u64 = 500;
    let commands = ring(N_WORKERS);
    let board = Board::create("test").unwrap();
    let mut waiter = board.waiter().unwrap();
    let mut writer = commands.writer(None).unwrap();
    let replies: Vec<RingMemory> = (0..N_WORKERS).map(|_| ring(1)).collect();
    let mut readers: Vec<_> = replies.iter().map(|replies| replies.reader(0).unwrap()).collect();
    let board_fd = board.fd().unwrap();
    let start = |worker_idx: usize| {
        let fds = [commands.as_fd(), board_fd.as_fd(), replies[worker_idx].as_fd()];
        Peer::start(&format!("double {worker_idx}"), &fds)
    };
    let mut peers: Vec<Peer> = (0..N_WORKERS).map(start).collect();
    peers.iter_mut().for_each(|peer| assert_eq!(peer.hear(), "up"));
    for call in 0..N_CALLS {
        writer.write(&[&call.to_le_bytes()], soon()).unwrap();
        let mut missing: Vec<usize> = (0..N_WORKERS).collect();
        while !missing.is_empty() {
            let ready = waiter.wait(Wait::Sleep, soon(), || {
                missing.iter().position(|&idx| readers[idx].is_ready())
            });
            let worker_idx = missing.swap_remove(ready.expect("a reply before the deadline"));
            let reply = readers[worker_idx].try_read().unwrap().unwrap();
            assert_eq!(*reply, (2 * call).to_le_bytes());
        }
    }
    assert_eq!((waiter.n_missed_wakes(), writer.stats().n_missed_wakes), (0, 0));
    writer.close();
    peers.iter_mut().for_each(|peer| assert_eq!(peer.hear(), "done"));
}

#[test]
fn a_killed_holders_blocks_come_back() {
    let commands = ring(2);
    let mut writer = commands.writer(None).unwrap();
    let spec = ArenaSpec {
        granule_bytes: 65_536,
        n_granules: 16,
    };
    let mut arena = ArenaOwner::create("test", spec, 3).unwrap();
    let arena_fd = arena.fd().unwrap();
    let start = |idx: usize| Peer::start(&format!("lease {idx}"), &[commands.as_fd(), arena_fd.as_fd()]);
    let mut peers = [start(0), start(1)];
    let mut block = arena.try_allocate(1_000_000).unwrap();
    block.fill(3);
    let reference = block.publish(0b11);
    let words = [
        u64::from(reference.arena),
        u64::from(reference.block),
        u64::from(reference.generation),
        reference.len,
    ];
    writer
        .write(
            &words.map(u64::to_le_bytes).each_ref().map(<[u8; 8]>::as_slice),
            soon(),
        )
        .unwrap();
    assert_eq!(peers.each_mut().map(Peer::hear), ["3000000", "3000000"]);
    assert!(arena.try_allocate(1_000_000).is_err(), "both hold it");
    let reaper = arena.reaper();
    for (holder_idx, peer) in peers.iter().enumerate() {
        peer.child.signal(Signal::KILL).unwrap();
        peer.child.wait(soon()).unwrap().unwrap();
        assert_eq!(reaper.reap(holder_idx), 1);
    }
    arena.try_allocate(1_000_000).unwrap();
}
