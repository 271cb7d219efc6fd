//! Ten million checksummed records of mixed sizes from one process to four (fewer in debug builds).

mod support;

use denoised_ring::{RingError, RingMemory, RingSpec, Wait};
use std::os::fd::AsFd;
use support::{Peer, part, soon};

const N_RECORDS: u64 = if cfg!(debug_assertions) {
    2_000_000
} else {
    10_000_000
};
const N_READERS: usize = 4;
const LONGEST_BYTES: usize = 65_536 - 16;
/// Bodies are windows of this many arbitrary bytes.
const SOURCE_BYTES: usize = 1 << 18;

/// SplitMix64 of the record's number: both ends know every length and every byte.
fn mix(number: u64) -> u64 {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ mixed >> 27
}

fn source() -> Vec<u8> {
    (0..SOURCE_BYTES as u64).map(|i| mix(i) as u8).collect()
}

/// Length and offset of a body: mostly up to 256 bytes, a quarter up to 2 KiB, some up to the limit.
fn window(number: u64) -> (usize, usize) {
    let random = mix(number);
    let longest = match random % 1024 {
        0 => LONGEST_BYTES,
        1..256 => 2048,
        _ => 256,
    };
    let body_bytes = (random >> 10) as usize % (longest + 1);
    (
        body_bytes,
        (random >> 32) as usize % (SOURCE_BYTES - LONGEST_BYTES),
    )
}

/// Of the whole body, position included, eight bytes at a time.
fn checksum(bytes: &[u8]) -> u64 {
    let mut sum = bytes.len() as u64;
    let mut words = bytes.chunks_exact(8);
    for word in &mut words {
        let word = word.try_into().map_or(0, u64::from_le_bytes);
        sum = (sum.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    words
        .remainder()
        .iter()
        .fold(sum, |sum, &byte| sum.rotate_left(8) ^ u64::from(byte))
}

#[test]
#[expect(clippy::exit, reason = "a peer's part ends its process")]
fn child_main() {
    let Some((part, channel, fds)) = part() else {
        return;
    };
    let memory = RingMemory::attach(fds.into_iter().next().unwrap()).unwrap();
    let mut reader = memory.reader(part.parse().unwrap()).unwrap();
    let source = source();
    let deadline = soon();
    for number in 0..N_RECORDS {
        let record = reader.read(Wait::Sleep, deadline).unwrap();
        let (head, body) = record.split_at(16);
        assert_eq!(head[..8], number.to_le_bytes(), "order");
        let (body_bytes, offset) = window(number);
        assert_eq!(body.len(), body_bytes, "length of record {number}");
        assert_eq!(
            head[8..],
            checksum(body).to_le_bytes(),
            "checksum of record {number}"
        );
        // The checksum says that it is what was sent; now and then, that what was sent is right.
        if number % 64 == 0 {
            assert_eq!(*body, source[offset..][..body_bytes], "bytes of record {number}");
        }
    }
    assert_eq!(reader.read(Wait::Sleep, deadline).unwrap_err(), RingError::Closed);
    assert_eq!(reader.stats().n_missed_wakes, 0, "missed wakes");
    channel.send(b"all right", &[], soon()).unwrap();
    std::process::exit(0);
}

#[test]
fn q1_every_record_arrives_whole_at_every_reader() {
    let memory = RingMemory::create(
        "test",
        RingSpec {
            capacity_bytes: 1 << 20,
        },
        N_READERS,
    )
    .unwrap();
    let mut writer = memory.writer(None).unwrap();
    let mut peers: Vec<Peer> = (0..N_READERS)
        .map(|idx| Peer::start(&idx.to_string(), &[memory.as_fd()]))
        .collect();
    let source = source();
    let deadline = soon();
    for number in 0..N_RECORDS {
        let (body_bytes, offset) = window(number);
        let body = &source[offset..][..body_bytes];
        writer
            .write(
                &[&number.to_le_bytes(), &checksum(body).to_le_bytes(), body],
                deadline,
            )
            .unwrap();
    }
    let stats = writer.stats();
    assert_eq!(
        (stats.n_records, stats.n_missed_wakes, stats.wild_cursors),
        (N_RECORDS, 0, 0)
    );
    writer.close();
    peers
        .iter_mut()
        .for_each(|peer| assert_eq!(peer.hear(), "all right"));
}
