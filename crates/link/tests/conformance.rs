//! Both links do what the traits say.

use denoised_link::{
    BootChannel, ControlInput, ExecutorEnd, LinkError, LinkSpec, RankSet, RingWorld, Waiting, WorkerEnd,
    attach, local_link,
};
use denoised_os::{Deadline, socket::Channel};
use denoised_ring::{Board, RingMemory};
use denoised_types::{Epoch, Rank, WorkerConfig};
use denoised_wire::{BlobIdx, BootUp, FdUse, StartPhase};
use std::{
    ops::ControlFlow,
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

fn config() -> WorkerConfig {
    WorkerConfig {
        model: "none".into(),
        device: "cpu".into(),
        dtype: "f32".into(),
        n_threads: Some(1),
        warm_up: false,
    }
}

/// 64 KiB rings and arenas of 1 MiB.
fn spec() -> LinkSpec {
    LinkSpec {
        command_ring_bytes: 64 << 10,
        command_arena_bytes: 1 << 20,
        event_ring_bytes: 64 << 10,
        event_arena_bytes: 1 << 20,
        ..LinkSpec::default()
    }
}

fn late() -> Deadline {
    Deadline::after_ms(60_000)
}

fn on() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A world of rings whose worker ends live in this process.
fn ring_world(world_size: u16) -> (ExecutorEnd, Vec<BootChannel>, Vec<WorkerEnd>) {
    let memory = RingWorld::create(spec(), world_size).unwrap();
    let mut sockets = Vec::new();
    let mut workers = Vec::new();
    for rank in (0..world_size).map(Rank) {
        let (ours, theirs) = BootChannel::pair().unwrap();
        let (hello, fds) = memory.hello(rank, Epoch(9), config()).unwrap();
        ours.greet(hello, &fds).unwrap();
        workers.push(attach(Channel::from_fd(theirs).unwrap(), None).unwrap());
        sockets.push(ours);
    }
    (memory.into_end(sockets.clone()).unwrap(), sockets, workers)
}

fn ring() -> (ExecutorEnd, WorkerEnd) {
    let (executor, _, mut workers) = ring_world(1);
    (executor, workers.remove(0))
}

fn local() -> (ExecutorEnd, WorkerEnd) {
    let (executor, _, worker) = local_link(spec(), Epoch(9), config()).unwrap();
    (executor, worker)
}

macro_rules! conformance {
    ($($test:ident),+ $(,)?) => {
        mod ring_link {
            $(#[test] fn $test() { super::$test(super::ring()); })+
        }
        mod local_link {
            $(#[test] fn $test() { super::$test(super::local()); })+
        }
    };
}

conformance!(
    commands_arrive_whole_and_in_order_whatever_their_size,
    events_arrive_whole_and_in_order_whatever_their_size,
    blobs_that_were_dropped_make_room,
    what_can_never_fit_is_refused_with_both_numbers,
    a_full_path_calls_back_and_ends_at_the_deadline,
    held_blobs_hold_the_sender_back,
    waits_are_interrupted_and_no_interrupt_is_lost,
    waits_end_at_their_deadline,
    control_messages_are_an_order_of_their_own,
    a_worker_hears_that_the_executor_is_gone,
    many_threads_send_events,
    quiet_events_wake_nobody_and_are_not_lost,
    the_hello_is_what_was_said,
);

/// Sizes around every limit: empty, inline, the inline limits, a record, large.
const SIZES: [usize; 12] = [
    0, 1, 63, 64, 4095, 4096, 4097, 16_384, 16_385, 65_535, 65_536, 300_000,
];

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + seed * 13 + len) as u8).collect()
}

/// The message and the two blobs of round `round`.
fn parts(round: usize) -> [Vec<u8>; 3] {
    let size = |factor: usize| SIZES[(round * factor) % SIZES.len()];
    [
        bytes(size(5), round),
        bytes(size(1), round + 1),
        bytes(size(7), round + 2),
    ]
}

fn commands_arrive_whole_and_in_order_whatever_their_size(
    (mut executor, mut worker): (ExecutorEnd, WorkerEnd),
) {
    std::thread::scope(|scope| {
        let data = &mut executor.data;
        scope.spawn(move || {
            for round in 0..60 {
                let [message, first, second] = parts(round);
                data.send(
                    RankSet::one(Rank(0)),
                    &message,
                    &[&first, &second],
                    late(),
                    &mut on,
                )
                .unwrap();
            }
        });
        for round in 0..60 {
            let [message, first, second] = parts(round);
            let mut received = worker.data.receive(late()).unwrap();
            assert_eq!(*received.message, message);
            assert_eq!(received.blobs.len(), 2);
            assert_eq!(received.blob(BlobIdx(0)).unwrap(), first);
            assert_eq!(received.take_blob(BlobIdx(1)).unwrap(), second);
            assert!(received.blob(BlobIdx(2)).is_none() && received.take_blob(BlobIdx(9)).is_none());
        }
    });
    assert!(worker.data.try_receive().unwrap().is_none());
}

fn events_arrive_whole_and_in_order_whatever_their_size((mut executor, worker): (ExecutorEnd, WorkerEnd)) {
    std::thread::scope(|scope| {
        let events = &worker.events;
        scope.spawn(move || {
            for round in 0..60 {
                let [message, first, second] = parts(round);
                events
                    .send(&message, &[&first, &second], late(), &mut on)
                    .unwrap();
            }
        });
        let mut round = 0;
        while round < 60 {
            assert_eq!(executor.events.wait(late()), Waiting::Ready);
            let drained = executor.events.drain(&mut |rank, received| {
                let [message, first, second] = parts(round);
                assert_eq!((rank, received.blobs.len()), (Rank(0), 2));
                assert_eq!(*received.message, message);
                assert_eq!(received.blob(BlobIdx(0)).unwrap(), first);
                assert_eq!(received.blob(BlobIdx(1)).unwrap(), second);
                round += 1;
            });
            drained.unwrap();
        }
    });
}

fn blobs_that_were_dropped_make_room((mut executor, mut worker): (ExecutorEnd, WorkerEnd)) {
    let blob = bytes(700_000, 3);
    // Together many times the arenas.
    for _ in 0..20 {
        executor
            .data
            .send(RankSet::all(1), b"m", &[&blob], Deadline::PASSED, &mut on)
            .unwrap();
        assert_eq!(
            worker.data.receive(late()).unwrap().blob(BlobIdx(0)).unwrap(),
            blob
        );
        worker
            .events
            .send(b"m", &[&blob], Deadline::PASSED, &mut on)
            .unwrap();
        let mut n_received = 0;
        executor
            .events
            .drain(&mut |_, received| n_received += received.blobs[0].len())
            .unwrap();
        assert_eq!(n_received, blob.len());
    }
}

fn what_can_never_fit_is_refused_with_both_numbers((mut executor, mut worker): (ExecutorEnd, WorkerEnd)) {
    let too_long = vec![0; (1 << 20) + 1];
    let refused = |error: LinkError| match error {
        LinkError::TooLarge {
            message_bytes,
            limit_bytes,
            ..
        } => (message_bytes, limit_bytes),
        other => panic!("{other:?}"),
    };
    let to = RankSet::all(1);
    let error = executor
        .data
        .send(to, b"", &[&too_long], late(), &mut on)
        .unwrap_err();
    assert_eq!(refused(error), (too_long.len() as u64, 1 << 20));
    // Two that fit alone but not together.
    let half = vec![0; 600_000];
    let error = executor
        .data
        .send(to, b"", &[&half, &half], late(), &mut on)
        .unwrap_err();
    assert_eq!(refused(error), (1_200_000, 1 << 20));
    let error = worker
        .events
        .send(b"", &[&too_long], late(), &mut on)
        .unwrap_err();
    assert_eq!(refused(error), (too_long.len() as u64, 1 << 20));
    // Nothing of it arrived, and the path goes on.
    executor
        .data
        .send(to, b"next", &[&half], late(), &mut on)
        .unwrap();
    assert_eq!(*worker.data.receive(late()).unwrap().message, *b"next");
    worker.events.send(b"next", &[&half], late(), &mut on).unwrap();
    let mut seen = Vec::new();
    executor
        .events
        .drain(&mut |_, received| seen.push(received.message.to_vec()))
        .unwrap();
    assert_eq!(seen, [b"next"]);
}

fn a_full_path_calls_back_and_ends_at_the_deadline((mut executor, mut worker): (ExecutorEnd, WorkerEnd)) {
    let message = bytes(5000, 0);
    let to = RankSet::all(1);
    let (mut n_sent, mut n_calls) = (0, 0);
    let error = loop {
        let begin = Instant::now();
        let mut idle = || {
            n_calls += 1;
            on()
        };
        match executor
            .data
            .send(to, &message, &[], Deadline::after_ms(50), &mut idle)
        {
            Ok(()) => n_sent += 1,
            Err(error) => {
                assert!(begin.elapsed() >= Duration::from_millis(50));
                break error;
            }
        }
    };
    assert!(
        matches!(
            error,
            LinkError::Full {
                laggard: None | Some(Rank(0))
            }
        ),
        "{error:?}"
    );
    assert!(n_sent >= 5 && n_calls >= 2, "{n_sent} sent, {n_calls} calls back");
    let error = executor
        .data
        .send(to, &message, &[], late(), &mut || ControlFlow::Break(()))
        .unwrap_err();
    assert_eq!(error, LinkError::Interrupted);
    for _ in 0..n_sent {
        assert_eq!(*worker.data.receive(late()).unwrap().message, message);
    }
    assert!(
        worker.data.try_receive().unwrap().is_none(),
        "what failed was not sent"
    );

    let mut n_sent = 0;
    let full = loop {
        match worker.events.send(&message, &[], Deadline::after_ms(20), &mut on) {
            Ok(()) => n_sent += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(full, LinkError::Full { .. }), "{full:?}");
    let mut n_received = 0;
    while executor.events.drain(&mut |_, _| n_received += 1).unwrap() > 0 {}
    assert_eq!(n_received, n_sent);
}

fn held_blobs_hold_the_sender_back((mut executor, mut worker): (ExecutorEnd, WorkerEnd)) {
    let blob = bytes(500_000, 1);
    let to = RankSet::all(1);
    let mut held = Vec::new();
    while executor
        .data
        .send(to, b"", &[&blob], Deadline::after_ms(20), &mut on)
        .is_ok()
    {
        held.push(worker.data.receive(late()).unwrap());
        // A link within a process hands the memory itself over; then nothing is held back.
        if held.len() == 50 {
            return;
        }
    }
    assert_eq!(held.len(), 2);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| executor.data.send(to, b"after", &[&blob], late(), &mut on));
        std::thread::sleep(Duration::from_millis(20));
        held.remove(0);
        sender.join().unwrap().unwrap();
    });
    assert_eq!(*held[0].blobs[0], blob, "a held blob is not written over");
    assert_eq!(*worker.data.receive(late()).unwrap().message, *b"after");
}

fn waits_are_interrupted_and_no_interrupt_is_lost((mut executor, mut worker): (ExecutorEnd, WorkerEnd)) {
    executor.interrupter.interrupt();
    assert_eq!(executor.events.wait(late()), Waiting::Interrupted);
    for _ in 0..50 {
        let interrupter = executor.interrupter.clone();
        std::thread::scope(|scope| {
            scope.spawn(move || interrupter.interrupt());
            assert_eq!(executor.events.wait(late()), Waiting::Interrupted);
        });
    }
    let interrupter = worker.data.interrupter();
    executor
        .data
        .send(RankSet::all(1), b"first", &[], late(), &mut on)
        .unwrap();
    std::thread::scope(|scope| {
        assert_eq!(*worker.data.receive(late()).unwrap().message, *b"first");
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            interrupter.interrupt();
        });
        assert_eq!(worker.data.receive(late()).unwrap_err(), LinkError::Interrupted);
    });
    // What is there is still received.
    executor
        .data
        .send(RankSet::all(1), b"second", &[], late(), &mut on)
        .unwrap();
    assert_eq!(*worker.data.receive(late()).unwrap().message, *b"second");
    assert_eq!(worker.data.receive(late()).unwrap_err(), LinkError::Interrupted);
}

fn waits_end_at_their_deadline((mut executor, mut worker): (ExecutorEnd, WorkerEnd)) {
    for deadline in [Deadline::PASSED, Deadline::after_ms(20)] {
        assert_eq!(executor.events.wait(deadline), Waiting::TimedOut);
        assert_eq!(worker.data.receive(deadline).unwrap_err(), LinkError::TimedOut);
        assert_eq!(worker.control.receive(deadline).unwrap_err(), LinkError::TimedOut);
        assert!(deadline.has_passed());
    }
}

fn control_messages_are_an_order_of_their_own((mut executor, mut worker): (ExecutorEnd, WorkerEnd)) {
    executor
        .data
        .send(RankSet::all(1), b"data", &[], late(), &mut on)
        .unwrap();
    for idx in 0..10u8 {
        executor.control[0].send(&[idx, 1]).unwrap();
    }
    for idx in 0..10u8 {
        match worker.control.receive(late()).unwrap() {
            ControlInput::Message(message) => assert_eq!(message, [idx, 1]),
            other => panic!("{other:?}"),
        }
    }
    // A rank that does not listen: refused at once, not waited for.
    let error = loop {
        if let Err(error) = executor.control[0].send(&[7; 1000]) {
            break error;
        }
    };
    assert_eq!(error, LinkError::Full { laggard: None });
    assert_eq!(*worker.data.receive(late()).unwrap().message, *b"data");
}

fn a_worker_hears_that_the_executor_is_gone((executor, mut worker): (ExecutorEnd, WorkerEnd)) {
    executor.control[0].send(b"last").unwrap();
    drop(executor);
    assert!(matches!(worker.control.receive(late()).unwrap(), ControlInput::Message(m) if m == b"last"));
    assert!(matches!(
        worker.control.receive(late()).unwrap(),
        ControlInput::Gone
    ));
    assert_eq!(worker.data.receive(late()).unwrap_err(), LinkError::Closed);
}

fn many_threads_send_events((mut executor, worker): (ExecutorEnd, WorkerEnd)) {
    const N_EVENTS: u32 = 500;
    std::thread::scope(|scope| {
        for thread_idx in 0..4u8 {
            let events = Arc::clone(&worker.events);
            scope.spawn(move || {
                for event_idx in 0..N_EVENTS {
                    let blob = vec![thread_idx; if event_idx % 50 == 0 { 100_000 } else { 100 }];
                    let message = [&[thread_idx], &event_idx.to_le_bytes()[..]].concat();
                    events.send(&message, &[&blob], late(), &mut on).unwrap();
                }
            });
        }
        let mut next = [0u32; 4];
        while next.iter().any(|&n| n < N_EVENTS) {
            assert_eq!(executor.events.wait(late()), Waiting::Ready);
            let drained = executor.events.drain(&mut |_, received| {
                let thread_idx = usize::from(received.message[0]);
                assert_eq!(
                    received.message[1..],
                    next[thread_idx].to_le_bytes(),
                    "in each thread's order"
                );
                assert!(
                    received.blobs[0]
                        .iter()
                        .all(|&byte| usize::from(byte) == thread_idx)
                );
                next[thread_idx] += 1;
            });
            drained.unwrap();
        }
    });
}

fn quiet_events_wake_nobody_and_are_not_lost((mut executor, worker): (ExecutorEnd, WorkerEnd)) {
    let drained = |executor: &mut ExecutorEnd| {
        let mut seen = Vec::new();
        executor
            .events
            .drain(&mut |_, received| seen.push(received.message.to_vec()))
            .unwrap();
        seen
    };
    // There at the beginning.
    worker.events.send_quietly(b"first", late(), &mut on).unwrap();
    assert_eq!(executor.events.wait(late()), Waiting::Ready);
    assert_eq!(drained(&mut executor), [b"first"]);
    for _ in 0..3 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                worker.events.send_quietly(b"quiet", late(), &mut on).unwrap();
            });
            // A loaded machine may be late to sleep, and then finds it there.
            let begin = Instant::now();
            let waited = executor.events.wait(Deadline::after_ms(200));
            assert!(
                waited == Waiting::Ready || begin.elapsed() >= Duration::from_millis(200),
                "{waited:?}"
            );
        });
        assert_eq!(drained(&mut executor), [b"quiet"]);
    }
    // One that wakes brings the others along, in order.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            worker.events.send_quietly(b"quiet", late(), &mut on).unwrap();
            worker.events.send(b"loud!", &[], late(), &mut on).unwrap();
        });
        assert_eq!(executor.events.wait(late()), Waiting::Ready);
    });
    assert_eq!(drained(&mut executor), [b"quiet", b"loud!"]);
    // A full path wakes whoever can empty it.
    let message = [3; 5000];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..1000 {
                worker.events.send_quietly(&message, late(), &mut on).unwrap();
            }
        });
        let mut n_received = 0;
        while n_received < 1000 {
            // The last ones do not fill the path.
            executor.events.wait(Deadline::after_ms(1000));
            n_received += drained(&mut executor).len();
        }
    });
}

fn the_hello_is_what_was_said((executor, worker): (ExecutorEnd, WorkerEnd)) {
    assert_eq!(
        (worker.hello.epoch, worker.hello.rank, worker.hello.world_size),
        (Epoch(9), Rank(0), 1)
    );
    assert_eq!(worker.hello.config, config());
    drop(executor);
}

#[test]
fn a_message_reaches_the_ranks_it_is_addressed_to() {
    let (mut executor, _sockets, mut workers) = ring_world(3);
    let large = bytes(200_000, 1);
    for (idx, bits) in [0b001u64, 0b110, 0b111, 0b100].into_iter().enumerate() {
        executor
            .data
            .send(RankSet::from_bits(bits), &[idx as u8], &[&large], late(), &mut on)
            .unwrap();
    }
    for (worker, expected) in workers.iter_mut().zip([vec![0u8, 2], vec![1, 2], vec![1, 2, 3]]) {
        let mut seen = Vec::new();
        while let Some(received) = worker.data.try_receive().unwrap() {
            assert_eq!(*received.blobs[0], large);
            seen.push(received.message[0]);
        }
        assert_eq!(seen, expected);
    }
    for (rank, worker) in workers.iter().enumerate() {
        worker.events.send(&[rank as u8], &[], late(), &mut on).unwrap();
    }
    let mut seen = Vec::new();
    executor
        .events
        .drain(&mut |rank, received| seen.push((rank.0, received.message[0])))
        .unwrap();
    assert_eq!(seen, [(0, 0), (1, 1), (2, 2)]);
}

#[test]
fn an_evicted_rank_is_no_longer_waited_for_and_its_blobs_are_freed() {
    let (mut executor, _sockets, mut workers) = ring_world(2);
    let blob = bytes(700_000, 2);
    let to = RankSet::all(2);
    executor
        .data
        .send(to, b"held by rank 1", &[&blob], late(), &mut on)
        .unwrap();
    drop(workers[0].data.receive(late()).unwrap());
    let error = executor
        .data
        .send(to, b"no room", &[&blob], Deadline::after_ms(20), &mut on)
        .unwrap_err();
    assert_eq!(error, LinkError::Full { laggard: None });
    let evictor = executor.evictor.clone();
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            executor
                .data
                .send(RankSet::one(Rank(0)), b"room", &[&blob], late(), &mut on)
        });
        std::thread::sleep(Duration::from_millis(20));
        evictor.evict(Rank(1));
        sender.join().unwrap().unwrap();
    });
    assert_eq!(*workers[0].data.receive(late()).unwrap().message, *b"room");
    // Many times the ring.
    for _ in 0..1000 {
        executor
            .data
            .send(RankSet::one(Rank(0)), &bytes(1000, 0), &[], late(), &mut on)
            .unwrap();
        workers[0].data.receive(late()).unwrap();
    }
    assert_eq!(workers[1].data.receive(late()).unwrap_err(), LinkError::Closed);
}

#[test]
fn handshake_messages_and_descriptors_travel() {
    let (_executor, sockets, mut workers) = ring_world(2);
    workers[0]
        .boot
        .send(&BootUp::Phase(StartPhase::Attached), None)
        .unwrap();
    assert_eq!(
        sockets[0].try_receive().unwrap().unwrap().0,
        BootUp::Phase(StartPhase::Attached)
    );
    let (reader, _writer) = std::io::pipe().unwrap();
    workers[0]
        .boot
        .send(&BootUp::PublishShared { has_weights: true }, Some(reader.as_fd()))
        .unwrap();
    let (message, fd) = sockets[0].try_receive().unwrap().unwrap();
    assert_eq!(message, BootUp::PublishShared { has_weights: true });
    sockets[1].share(fd.as_ref().map(AsFd::as_fd)).unwrap();
    assert!(matches!(
        workers[1].control.receive(late()).unwrap(),
        ControlInput::Shared(Some(_))
    ));
    sockets[1].share(None).unwrap();
    assert!(matches!(
        workers[1].control.receive(late()).unwrap(),
        ControlInput::Shared(None)
    ));
    assert!(sockets[0].try_receive().unwrap().is_none());
}

/// SplitMix64 (Steele, Lea, Flood 2014).
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[test]
fn hostile_records_are_errors_of_their_rank_alone() {
    for round in 0..200u64 {
        let memory = RingWorld::create(spec(), 2).unwrap();
        let (hello, fds) = memory.hello(Rank(0), Epoch(1), config()).unwrap();
        let mut fds = hello.fds.into_iter().zip(fds);
        let mut take = |wanted: FdUse| fds.find(|(fd_use, _)| *fd_use == wanted).unwrap().1;
        // In the place of rank 0, a writer that knows the ring but not the records.
        let ring = RingMemory::attach(take(FdUse::EventRing)).unwrap();
        let doorbell = Board::attach(take(FdUse::EventDoorbell)).unwrap().doorbell();
        let mut writer = ring.writer(Some(doorbell)).unwrap();
        let (socket, theirs) = BootChannel::pair().unwrap();
        let (hello, fds) = memory.hello(Rank(1), Epoch(1), config()).unwrap();
        socket.greet(hello, &fds).unwrap();
        let good = attach(Channel::from_fd(theirs).unwrap(), None).unwrap();
        let mut executor = memory.into_end(vec![socket.clone(), socket]).unwrap();

        let mut state = round;
        let len = (random(&mut state) % 200) as usize;
        let mut record: Vec<u8> = (0..len).map(|_| random(&mut state) as u8).collect();
        // Often with a table that looks right: up to three parts, the first in the arena or longer than the record.
        if record.len() >= 40 && round % 2 == 0 {
            record[8..10].copy_from_slice(&(1 + (round % 3) as u16).to_le_bytes());
            record[16..24].copy_from_slice(&(1000 + random(&mut state) % 70_000).to_le_bytes());
            let arena = if round % 4 == 0 { u32::MAX } else { 1 };
            record[24..28].copy_from_slice(&arena.to_le_bytes());
        }
        writer.write(&[&record], late()).unwrap();
        good.events.send(b"well", &[], late(), &mut on).unwrap();
        let mut seen = Vec::new();
        let drained = executor
            .events
            .drain(&mut |rank, received| seen.push((rank, received.message.to_vec())));
        match drained {
            Err((rank, LinkError::Corrupt { .. })) => assert_eq!(rank, Rank(0)),
            other => panic!("round {round}: {other:?}"),
        }
        assert_eq!(seen, [(Rank(1), b"well".to_vec())], "the other rank goes on");
        assert_eq!(
            executor.events.drain(&mut |_, _| {}),
            Ok(0),
            "damage is reported once"
        );
    }
}

#[test]
fn more_memory_than_there_is_is_refused_before_it_is_taken() {
    let spec = LinkSpec {
        event_arena_bytes: 64 << 30,
        ..spec()
    };
    let text = RingWorld::create(spec, 64).unwrap_err().to_string();
    assert!(
        text.contains(&spec.total_bytes(64).to_string()) && text.contains("available"),
        "{text}"
    );
}
