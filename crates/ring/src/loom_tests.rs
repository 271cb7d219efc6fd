//! The shipped protocol under a model checker: every interleaving up to a bound, every value a load may see.
//!
//! Run by `scripts/check-loom`. A lost wake-up is a deadlock, bytes reused too early are a data race, and
//! loom reports both. Its fences are exact; SeqCst accesses would be taken for AcqRel ones, so the protocol
//! has none. Rings have room for one or two records, so every writer also waits for room.

use crate::alarm::Wait;
use crate::doorbell::Doorbell;
use crate::error::RingError;
use crate::layout::{READING, RingSpec};
use crate::reader::Reader;
use crate::region::Region;
use crate::sync::Ordering;
use crate::writer::Writer;
use denoised_os::Deadline;
use denoised_os::child::Spawn;
use loom::thread;
use std::sync::Arc;

const FAR: Deadline = Deadline::at_ns(u64::MAX);
/// A record of 8 bytes takes one line of 64.
const LINE_BYTES: usize = 64;

fn model(max_preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(max_preemptions);
    builder.check(body);
}

fn ring(n_lines: usize, n_readers: usize, doorbell: Option<Doorbell>) -> (Writer, Vec<Reader>) {
    let spec = RingSpec {
        capacity_bytes: n_lines * LINE_BYTES,
    };
    let region = Arc::new(Region::new(spec.capacity_bytes));
    for line in &region.control().readers.0[..n_readers] {
        line.state.store(READING, Ordering::Relaxed);
    }
    let writer = Writer::new(Arc::clone(&region), spec, doorbell);
    let reader = |reader_idx| Reader::new(Arc::clone(&region), spec, reader_idx);
    (writer, (0..n_readers).map(reader).collect())
}

fn write(writer: &mut Writer, number: u64) {
    writer.write(&[&number.to_le_bytes()], FAR).expect("room comes");
}

fn expect(reader: &mut Reader, number: u64) {
    let record = reader.read(Wait::Sleep, FAR).expect("a record comes");
    assert_eq!(record.copied(), number.to_le_bytes());
}

/// One writer, and readers that read all it writes.
fn broadcast(max_preemptions: usize, n_readers: usize, n_records: u64) {
    model(max_preemptions, move || {
        let (mut writer, readers) = ring(1, n_readers, None);
        let threads: Vec<_> = readers
            .into_iter()
            .map(|mut reader| {
                thread::spawn(move || {
                    (0..n_records).for_each(|number| expect(&mut reader, number));
                    reader
                })
            })
            .collect();
        (0..n_records).for_each(|number| write(&mut writer, number));
        for thread in threads {
            thread.join().expect("the reader got all");
        }
    });
}

#[test]
fn q1_one_reader_two_records() {
    broadcast(4, 1, 2);
}

#[test]
fn q1_one_reader_three_records() {
    broadcast(3, 1, 3);
}

#[test]
fn q1_two_readers_two_records() {
    broadcast(2, 2, 2);
}

#[test]
fn a_closed_ring_ends_a_wait_after_the_last_record() {
    model(3, || {
        let (mut writer, mut readers) = ring(2, 1, None);
        let mut reader = readers.remove(0);
        let thread = thread::spawn(move || {
            expect(&mut reader, 0);
            assert_eq!(reader.read(Wait::Sleep, FAR).unwrap_err(), RingError::Closed);
        });
        write(&mut writer, 0);
        drop(writer);
        thread.join().expect("the reader heard it");
    });
}

#[test]
fn a_leaving_reader_ends_a_wait_for_room() {
    model(3, || {
        let (mut writer, mut readers) = ring(1, 1, None);
        let reader = readers.remove(0);
        let thread = thread::spawn(move || drop(reader));
        let mut result = writer.write(&[&[0; 8]], FAR);
        if result.is_ok() {
            result = writer.write(&[&[1; 8]], FAR);
        }
        assert_eq!(result, Err(RingError::NoReaders));
        thread.join().expect("the reader left");
    });
}

#[test]
fn an_eviction_ends_a_wait_for_room() {
    model(3, || {
        let (mut writer, mut readers) = ring(1, 2, None);
        // Reader 1 never reads; reader 0 reads everything.
        let dead = readers.pop();
        let mut reader = readers.remove(0);
        let evictor = writer.evictor();
        let evicting = thread::spawn(move || assert!(evictor.evict(1)));
        write(&mut writer, 0);
        expect(&mut reader, 0);
        write(&mut writer, 1);
        expect(&mut reader, 1);
        evicting.join().expect("it was waited for");
        drop(dead);
    });
}

#[test]
fn cancelling_ends_a_wait_for_a_record() {
    model(3, || {
        let (writer, mut readers) = ring(1, 1, None);
        let mut reader = readers.remove(0);
        let canceller = reader.canceller();
        let cancelling = thread::spawn(move || canceller.cancel());
        assert_eq!(reader.read(Wait::Sleep, FAR).unwrap_err(), RingError::Cancelled);
        cancelling.join().expect("it cancelled");
        drop(writer);
    });
}

#[test]
fn one_doorbell_for_two_rings() {
    model(2, || {
        let (doorbell, mut waiter) = Doorbell::local();
        let mut readers = Vec::new();
        let mut threads = Vec::new();
        for number in 0..2 {
            let (mut writer, mut one) = ring(1, 1, Some(doorbell.clone()));
            readers.append(&mut one);
            threads.push(thread::spawn(move || {
                write(&mut writer, number);
                writer
            }));
        }
        let mut waiting = [true, true];
        while waiting != [false, false] {
            let mut ready = |ring_idx: &usize| waiting[*ring_idx] && readers[*ring_idx].is_ready();
            let ring_idx = waiter.wait(Wait::Sleep, FAR, || (0..2).find(|i| ready(i)));
            let ring_idx = ring_idx.expect("it only ends with a record");
            expect(&mut readers[ring_idx], ring_idx as u64);
            waiting[ring_idx] = false;
        }
        for thread in threads {
            thread.join().expect("the writer wrote");
        }
    });
}

#[test]
fn a_reply_ring_with_a_doorbell() {
    // A worker's replies, more than fit at once, to an executor that sleeps on the doorbell.
    model(2, || {
        let (doorbell, mut waiter) = Doorbell::local();
        let (mut writer, mut readers) = ring(1, 1, Some(doorbell));
        let mut reader = readers.remove(0);
        let thread = thread::spawn(move || {
            (0..2).for_each(|number| write(&mut writer, number));
            writer
        });
        for number in 0..2 {
            assert_eq!(
                waiter.wait(Wait::Sleep, FAR, || reader.is_ready().then_some(())),
                Some(())
            );
            expect(&mut reader, number);
        }
        thread.join().expect("the worker wrote");
    });
}

/// The model must be able to fail: with either mistake, found in earlier designs, it has to deadlock.
#[test]
fn without_fences_or_with_bump_before_clear_the_model_deadlocks() {
    for fault in ["no-fences", "bump-before-clear"] {
        for test in ["q1_one_reader_two_records", "q1_one_reader_three_records"] {
            let mut child = Spawn::this_program()
                .expect("this program is known")
                .arg("--exact")
                .arg(format!("loom_tests::{test}"))
                .arg("--nocapture")
                .env("DENOISED_LOOM_FAULT", fault)
                .start()
                .expect("it starts");
            let stderr = child.take_stderr().expect("taken once");
            let report = std::io::read_to_string(std::fs::File::from(stderr)).expect("text");
            let status = child.wait(Deadline::after_ms(120_000)).expect("it is a child");
            let status = status.expect("it ends");
            assert!(
                !status.is_success() && report.contains("deadlock"),
                "{fault}, {test}: {status}: {report}"
            );
        }
    }
}
