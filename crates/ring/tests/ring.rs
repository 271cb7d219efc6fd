//! The ring within one process: what each end may expect of the other.

use denoised_os::Deadline;
use denoised_ring::{AttachError, Board, Doorbell, RingError, RingMemory, RingSpec, Wait};
use std::time::Duration;

const SMALL: RingSpec = RingSpec { capacity_bytes: 1024 };

fn soon() -> Deadline {
    Deadline::after_ms(60_000)
}

fn ring(capacity_bytes: usize, n_readers: usize) -> RingMemory {
    RingMemory::create("test", RingSpec { capacity_bytes }, n_readers).unwrap()
}

/// A body that depends on its number in length and contents.
fn body(number: u64, max_bytes: usize) -> Vec<u8> {
    let len = (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize % (max_bytes + 1);
    (0..len)
        .map(|i| (number as usize).wrapping_mul(31).wrapping_add(i) as u8)
        .collect()
}

#[test]
fn every_reader_gets_every_record_in_order() {
    let memory = ring(4096, 3);
    let mut writer = memory.writer(None).unwrap();
    std::thread::scope(|scope| {
        for reader_idx in 0..3 {
            let mut reader = memory.reader(reader_idx).unwrap();
            scope.spawn(move || {
                for number in 0..20_000 {
                    let record = reader.read(Wait::Sleep, soon()).unwrap();
                    assert_eq!(*record, *body(number, 500), "record {number}");
                }
                assert_eq!(reader.read(Wait::Sleep, soon()).unwrap_err(), RingError::Closed);
                assert_eq!(reader.stats().n_missed_wakes, 0);
                assert_eq!(reader.stats().n_records, 20_000);
            });
        }
        for number in 0..20_000 {
            let body = body(number, 500);
            let (head, rest) = body.split_at(body.len() / 3);
            writer.write(&[head, rest, &[]], soon()).unwrap();
        }
        assert_eq!(writer.stats().n_missed_wakes, 0);
        assert_eq!(writer.stats().wild_cursors, 0);
        writer.close();
    });
}

#[test]
fn a_record_may_be_written_in_place_or_given_up() {
    let memory = ring(1024, 1);
    let (mut writer, mut reader) = (memory.writer(None).unwrap(), memory.reader(0).unwrap());
    writer.reserve(100, soon()).unwrap().fill(1);
    assert!(reader.try_read().unwrap().is_none());
    let mut sent = writer.reserve(7, soon()).unwrap();
    sent.copy_from_slice(b"written");
    sent.publish();
    assert_eq!(&*reader.try_read().unwrap().unwrap(), b"written");
    assert!(reader.try_read().unwrap().is_none());
}

#[test]
fn a_full_ring_names_its_laggard_and_goes_on_when_it_reads() {
    let memory = ring(1024, 2);
    let mut writer = memory.writer(None).unwrap();
    let (mut quick, mut slow) = (memory.reader(0).unwrap(), memory.reader(1).unwrap());
    let mut n_written = 0;
    while writer.try_write(&[&[n_written; 100]]).is_ok() {
        n_written += 1;
        drop(quick.read(Wait::Sleep, soon()).unwrap());
    }
    assert_eq!(n_written, 8, "128 bytes per record of 100");
    assert_eq!(
        writer.try_write(&[&[0; 100]]),
        Err(RingError::Full { laggard_idx: 1 })
    );
    let laggard = Err(RingError::Laggard { laggard_idx: 1 });
    assert_eq!(writer.write(&[&[0; 100]], Deadline::after_ms(20)), laggard);
    assert_eq!(writer.write(&[&[0; 100]], Deadline::PASSED), laggard);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            for number in 0..n_written {
                assert_eq!(*slow.read(Wait::Sleep, soon()).unwrap(), [number; 100]);
            }
        });
        writer.write(&[b"after"], soon()).unwrap();
    });
    assert_eq!(&*slow.read(Wait::Sleep, soon()).unwrap(), b"after");
    assert_eq!(&*quick.read(Wait::Sleep, soon()).unwrap(), b"after");
}

#[test]
fn lengths_up_to_the_limit_pass_and_one_more_is_refused() {
    for capacity_bytes in [512, 1024, 65_536, 1 << 18] {
        let memory = ring(capacity_bytes, 1);
        let (mut writer, mut reader) = (memory.writer(None).unwrap(), memory.reader(0).unwrap());
        let limit_bytes = writer.record_limit_bytes();
        assert_eq!(limit_bytes, memory.spec().record_limit_bytes());
        let long = vec![5; limit_bytes + 1];
        for body_bytes in [
            limit_bytes,
            0,
            1,
            48,
            49,
            limit_bytes - 1,
            limit_bytes,
            limit_bytes,
        ] {
            writer.write(&[&long[..body_bytes]], soon()).unwrap();
            assert_eq!(*reader.read(Wait::Sleep, soon()).unwrap(), long[..body_bytes]);
        }
        let error = writer.write(&[&long], soon()).unwrap_err();
        assert_eq!(
            error,
            RingError::TooLarge {
                record_bytes: limit_bytes + 1,
                limit_bytes
            }
        );
        writer.write(&[b"usable"], soon()).unwrap();
        assert_eq!(&*reader.read(Wait::Sleep, soon()).unwrap(), b"usable");
    }
}

#[test]
fn a_record_is_given_back_by_a_panic_too() {
    let memory = ring(1024, 1);
    let (mut writer, mut reader) = (memory.writer(None).unwrap(), memory.reader(0).unwrap());
    writer.write(&[b"bad"], soon()).unwrap();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let record = reader.read(Wait::Sleep, soon()).unwrap();
        assert_eq!(&*record, b"good", "cannot decode this");
    }));
    assert!(caught.is_err());
    for number in 0..100 {
        writer.write(&[&[number; 200]], soon()).unwrap();
        assert_eq!(*reader.read(Wait::Sleep, soon()).unwrap(), [number; 200]);
    }
}

#[test]
fn q3_a_reader_that_cannot_decode_a_record_loses_that_one_and_holds_nobody_up() {
    const CAPACITY_BYTES: usize = 4096;
    let memory = ring(CAPACITY_BYTES, 2);
    let mut writer = memory.writer(None).unwrap();
    let decode = |bytes: &[u8]| -> u64 {
        let bytes = bytes.try_into().expect("a number has eight bytes");
        u64::from_le_bytes(bytes)
    };
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|reader_idx| {
                let mut reader = memory.reader(reader_idx).unwrap();
                scope.spawn(move || {
                    let mut numbers = Vec::new();
                    loop {
                        // As a worker's loop does it: what goes wrong with one message is caught, and the next is read.
                        let decoded = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                            let record = reader.read(Wait::Sleep, soon())?;
                            Ok(match reader_idx {
                                0 => record.len() as u64,
                                _ => decode(&record),
                            })
                        }));
                        match decoded {
                            Ok(Ok(number)) => numbers.push(number),
                            Ok(Err(RingError::Closed)) => return numbers,
                            Ok(Err(error)) => panic!("{error}"),
                            Err(_) => numbers.push(u64::MAX),
                        }
                    }
                })
            })
            .collect();
        writer.write(&[b"no number"], soon()).unwrap();
        for number in 0..10 * CAPACITY_BYTES as u64 / 64 {
            writer.write(&[&number.to_le_bytes()], soon()).unwrap();
        }
        writer.close();
        let n_sent = 1 + 10 * CAPACITY_BYTES / 64;
        let mut read = readers.into_iter().map(|reader| reader.join().unwrap());
        let (of_0, of_1) = (read.next().unwrap(), read.next().unwrap());
        assert_eq!((of_0.len(), of_1.len()), (n_sent, n_sent));
        assert_eq!(of_1[0], u64::MAX, "reader 1 could not decode the first");
        assert!(
            of_1[1..].iter().copied().eq(0..n_sent as u64 - 1),
            "and got all that follow"
        );
    });
}

#[test]
fn q5_a_ring_has_one_writer_and_what_its_sharers_send_arrives_once() {
    const N_THREADS: u64 = 8;
    const N_EACH: u64 = 10_000;
    let memory = ring(65_536, 1);
    let mut reader = memory.reader(0).unwrap();
    // Each asks for the writer; one gets it.
    let taken: Vec<_> = std::thread::scope(|scope| {
        let askers: Vec<_> = (0..N_THREADS)
            .map(|_| scope.spawn(|| memory.writer(None)))
            .collect();
        askers.into_iter().map(|asker| asker.join().unwrap()).collect()
    });
    let (got, refused): (Vec<_>, Vec<_>) = taken.into_iter().partition(Result::is_ok);
    assert_eq!((got.len(), refused.len()), (1, 7));
    assert!(
        refused
            .iter()
            .all(|refusal| matches!(refusal, Err(AttachError::WriterTaken)))
    );
    // Writing takes `&mut self`, so that sharing it without a lock does not compile.
    let writer = std::sync::Mutex::new(got.into_iter().next().unwrap().unwrap());
    std::thread::scope(|scope| {
        for thread in 0..N_THREADS {
            let writer = &writer;
            scope.spawn(move || {
                for idx in 0..N_EACH {
                    let mine = (thread << 32 | idx).to_le_bytes();
                    writer.lock().unwrap().write(&[&mine], soon()).unwrap();
                }
            });
        }
        let mut next = [0; N_THREADS as usize];
        for _ in 0..N_THREADS * N_EACH {
            let record = reader.read(Wait::Sleep, soon()).unwrap();
            let mine = u64::from_le_bytes((*record).try_into().unwrap());
            let (thread, idx) = (mine >> 32, mine & 0xffff_ffff);
            assert_eq!(next[thread as usize], idx, "in the order of its thread");
            next[thread as usize] += 1;
        }
        assert_eq!(next, [N_EACH; N_THREADS as usize]);
        assert!(reader.try_read().unwrap().is_none());
    });
}

#[test]
fn a_reader_that_leaves_is_not_waited_for() {
    let memory = ring(1024, 2);
    let mut writer = memory.writer(None).unwrap();
    let (mut stays, leaves) = (memory.reader(0).unwrap(), memory.reader(1).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            drop(leaves);
        });
        for number in 0..100 {
            writer.write(&[&[number; 200]], soon()).unwrap();
            assert_eq!(*stays.read(Wait::Sleep, soon()).unwrap(), [number; 200]);
        }
    });
    drop(stays);
    let last = loop {
        if let Err(error) = writer.write(&[&[0; 200]], soon()) {
            break error;
        }
    };
    assert_eq!(last, RingError::NoReaders);
}

#[test]
fn an_evicted_reader_frees_a_waiting_writer_and_learns_of_it() {
    let memory = ring(1024, 2);
    let mut writer = memory.writer(None).unwrap();
    let (mut living, mut dead) = (memory.reader(0).unwrap(), memory.reader(1).unwrap());
    let evictor = writer.evictor();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            assert!(evictor.evict(1));
            assert!(!evictor.evict(1) && !evictor.evict(64) && !evictor.evict(usize::MAX));
        });
        for number in 0..100 {
            writer.write(&[&[number; 200]], soon()).unwrap();
            assert_eq!(*living.read(Wait::Sleep, soon()).unwrap(), [number; 200]);
        }
    });
    assert_eq!(writer.readers(), 1);
    assert_eq!(dead.read(Wait::Sleep, soon()).unwrap_err(), RingError::Evicted);
    assert!(matches!(
        memory.reader(1),
        Err(AttachError::ReaderTaken { reader_idx: 1 })
    ));
    assert!(!writer.admit(1), "a place is given once");
}

#[test]
fn a_late_reader_sees_what_follows_its_admission() {
    let memory = ring(1024, 1);
    let (mut writer, mut first) = (memory.writer(None).unwrap(), memory.reader(0).unwrap());
    for number in 0..50 {
        writer.write(&[&[number; 100]], soon()).unwrap();
        drop(first.read(Wait::Sleep, soon()).unwrap());
    }
    assert!(matches!(
        memory.reader(1),
        Err(AttachError::NotAdmitted { reader_idx: 1 })
    ));
    assert!(writer.admit(1) && !writer.admit(64));
    let mut late = memory.reader(1).unwrap();
    assert!(late.try_read().unwrap().is_none());
    writer.write(&[b"from here on"], soon()).unwrap();
    assert_eq!(&*late.read(Wait::Sleep, soon()).unwrap(), b"from here on");
}

#[test]
fn waits_end_at_the_deadline_and_when_cancelled() {
    let memory = ring(512, 1);
    let (mut writer, mut reader) = (memory.writer(None).unwrap(), memory.reader(0).unwrap());
    for wait in [Wait::Sleep, Wait::Spin { spin_ns: 1_000_000 }] {
        let deadline = Deadline::after_ms(5);
        assert_eq!(reader.read(wait, deadline).unwrap_err(), RingError::TimedOut);
        assert!(deadline.has_passed());
        assert_eq!(
            reader.read(wait, Deadline::PASSED).unwrap_err(),
            RingError::TimedOut
        );
    }
    let canceller = reader.canceller();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(10));
            canceller.cancel();
        });
        assert_eq!(
            reader.read(Wait::Sleep, soon()).unwrap_err(),
            RingError::Cancelled
        );
    });
    writer.write(&[b"no wait needed"], soon()).unwrap();
    assert_eq!(&*reader.read(Wait::Sleep, soon()).unwrap(), b"no wait needed");
    assert!(canceller.is_cancelled());
    canceller.reset();
    assert_eq!(
        reader.read(Wait::Sleep, Deadline::after_ms(5)).unwrap_err(),
        RingError::TimedOut
    );

    while writer.try_write(&[&[0; 100]]).is_ok() {}
    let canceller = writer.canceller();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(10));
            canceller.cancel();
        });
        assert_eq!(
            writer.write(&[&[0; 100]], soon()).unwrap_err(),
            RingError::Cancelled
        );
    });
    drop(reader.read(Wait::Sleep, soon()).unwrap());
    writer.write(&[&[0; 100]], soon()).unwrap();
}

#[test]
fn a_writer_that_goes_closes_the_ring_after_its_last_record() {
    let memory = ring(1024, 1);
    let (mut writer, mut reader) = (memory.writer(None).unwrap(), memory.reader(0).unwrap());
    writer.write(&[b"last"], soon()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(10));
            drop(writer);
        });
        assert_eq!(&*reader.read(Wait::Sleep, soon()).unwrap(), b"last");
        assert_eq!(reader.read(Wait::Sleep, soon()).unwrap_err(), RingError::Closed);
    });
    assert!(reader.is_ready());
    assert!(matches!(memory.writer(None), Err(AttachError::WriterTaken)));
}

#[test]
fn one_waiter_hears_many_rings_and_other_threads() {
    const N_RINGS: usize = 4;
    const N_RECORDS: u64 = 5_000;
    let board = Board::create("test").unwrap();
    let mut waiter = board.waiter().unwrap();
    assert!(matches!(board.waiter(), Err(AttachError::WaiterTaken)));
    let memories: Vec<_> = (0..N_RINGS).map(|_| ring(1024, 1)).collect();
    let mut readers: Vec<_> = memories.iter().map(|memory| memory.reader(0).unwrap()).collect();
    let stop = std::sync::Mutex::new(false);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for memory in &memories {
            let board = Board::attach(board.fd().unwrap()).unwrap();
            let mut writer = memory.writer(Some(board.doorbell())).unwrap();
            // The joined threads give their writers back: a closed ring would always be ready.
            threads.push(scope.spawn(move || {
                for number in 0..N_RECORDS {
                    writer.write(&[&body(number, 200)], soon()).unwrap();
                }
                writer
            }));
        }
        let mut next = [0; N_RINGS];
        while next != [N_RECORDS; N_RINGS] {
            let ready = waiter.wait(Wait::Sleep, soon(), || {
                readers.iter_mut().position(|r| r.is_ready())
            });
            let ring_idx = ready.expect("a record before the deadline");
            while let Ok(Some(record)) = readers[ring_idx].try_read() {
                assert_eq!(*record, *body(next[ring_idx], 200));
                next[ring_idx] += 1;
            }
        }
        let _writers: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let (doorbell, stop) = (board.doorbell(), &stop);
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            *stop.lock().unwrap() = true;
            doorbell.ring();
        });
        assert_eq!(
            waiter.wait(Wait::Sleep, soon(), || stop.lock().unwrap().then_some(7)),
            Some(7)
        );
    });
    assert_eq!(
        waiter.wait(Wait::Sleep, Deadline::after_ms(5), || None::<()>),
        None
    );
    assert_eq!(waiter.n_missed_wakes(), 0);
}

#[test]
fn a_local_doorbell_rings() {
    let (doorbell, mut waiter) = Doorbell::local();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..1_000 {
                sender.send(number).unwrap();
                doorbell.ring();
            }
        });
        for number in 0..1_000 {
            assert_eq!(
                waiter.wait(Wait::Sleep, soon(), || receiver.try_recv().ok()),
                Some(number)
            );
        }
    });
}

#[test]
fn stamps_show_progress() {
    let board = Board::create("test").unwrap();
    let peer = Board::attach(board.fd().unwrap()).unwrap();
    assert_eq!(board.progress(5), denoised_ring::Progress::default());
    let before_ns = denoised_os::now_ns();
    peer.stamp(5).unwrap().mark(3);
    peer.stamp(5).unwrap().mark(4);
    let progress = board.progress(5);
    assert_eq!((progress.n_marks, progress.note), (2, 4));
    assert!(progress.at_ns >= before_ns);
    assert!(board.stamp(64).is_none());
    assert_eq!(board.progress(usize::MAX).n_marks, 0);
}

#[test]
fn bad_sizes_are_refused() {
    for capacity_bytes in [0, 100, 1000, 1 << 40] {
        let spec = RingSpec { capacity_bytes };
        assert!(matches!(
            RingMemory::create("test", spec, 1),
            Err(AttachError::BadSpec { .. })
        ));
    }
    assert!(matches!(
        RingMemory::create("test", SMALL, 65),
        Err(AttachError::BadSpec { .. })
    ));
}
