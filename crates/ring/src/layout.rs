//! Where everything lies in a ring, and how large each kind of shared memory is.
//!
//! ```text
//! 0x000           fixed line: magic, version, capacity, writer claim
//! 0x080           tail line: tail (byte position, never wraps), closed         written by the writer
//! 0x100           data alarm: sleeping readers                                 written by readers
//! 0x180           space alarm: the sleeping writer
//! 0x200 + 128*i   reader i: cursor, state, first sequence number
//! 0x3000          the bytes, a power of two; records on 64-byte boundaries
//! ```
//! Lines are 128 bytes apart, because processors fetch 64-byte lines in pairs.

use crate::alarm::Alarm;
use crate::sync::{AtomicU32, AtomicU64};

/// Most readers of one ring, and most holders of one arena.
pub const MAX_READERS: usize = 64;
/// Longest record of a ring that is large enough; longer bodies go through an arena.
pub const INLINE_LIMIT_BYTES: usize = 64 * 1024;

/// Bytes before a record's body.
pub(crate) const HEADER_BYTES: usize = 16;
/// Boundary on which records lie.
pub(crate) const RECORD_ALIGN: usize = 64;
/// Where the bytes of a ring begin.
pub(crate) const DATA_OFFSET: usize = 0x3000;
/// The smallest ring: a few short records.
const MIN_CAPACITY_BYTES: usize = 512;
/// The largest ring; more bytes belong into an arena.
const MAX_CAPACITY_BYTES: usize = 1 << 30;

pub(crate) const RING_MAGIC: u64 = u64::from_le_bytes(*b"dn ring\0");
pub(crate) const ARENA_MAGIC: u64 = u64::from_le_bytes(*b"dn arena");
pub(crate) const BOARD_MAGIC: u64 = u64::from_le_bytes(*b"dn board");
/// Of all three layouts; both ends of a world come from one build, this only catches mistakes.
pub(crate) const LAYOUT_VERSION: u32 = 1;

/// States of a reader's place.
pub(crate) const FREE: u32 = 0;
pub(crate) const ADMITTED: u32 = 1;
pub(crate) const READING: u32 = 2;
pub(crate) const LEFT: u32 = 3;
pub(crate) const EVICTED: u32 = 4;

/// Everything of a ring but its bytes.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Control {
    pub(crate) fixed: FixedLine,
    pub(crate) tail: TailLine,
    pub(crate) data: Alarm,
    pub(crate) space: Alarm,
    pub(crate) readers: Readers,
}

#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct FixedLine {
    pub(crate) magic: AtomicU64,
    pub(crate) capacity_bytes: AtomicU64,
    pub(crate) version: AtomicU32,
    pub(crate) writer_taken: AtomicU32,
}

#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct TailLine {
    pub(crate) tail: AtomicU64,
    pub(crate) closed: AtomicU32,
}

#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct ReaderLine {
    pub(crate) cursor: AtomicU64,
    pub(crate) state: AtomicU32,
    pub(crate) first_seq: AtomicU32,
}

/// The model checker's rings have fewer readers: each atomic of theirs costs it memory.
#[cfg(loom)]
const N_READER_LINES: usize = 2;
#[cfg(not(loom))]
const N_READER_LINES: usize = MAX_READERS;

#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Readers(pub(crate) [ReaderLine; N_READER_LINES]);

impl Default for Readers {
    fn default() -> Self {
        Self(std::array::from_fn(|_| ReaderLine::default()))
    }
}

#[cfg(not(loom))]
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(offset_of!(Control, fixed) == 0);
    assert!(offset_of!(Control, tail) == 0x80);
    assert!(offset_of!(Control, data) == 0x100);
    assert!(offset_of!(Control, space) == 0x180);
    assert!(offset_of!(Control, readers) == 0x200);
    assert!(size_of::<ReaderLine>() == 128 && size_of::<Alarm>() == 128);
    assert!(size_of::<Control>() == 0x200 + 128 * MAX_READERS && size_of::<Control>() <= DATA_OFFSET);
};

/// Size of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSpec {
    /// Bytes for records: a power of two from 512 to 2^30. Deep rings are fast: 4 MiB hold
    /// many thousand short records, and a writer that rarely finds the ring full rarely sleeps.
    pub capacity_bytes: usize,
}

impl RingSpec {
    /// Longest record: [`INLINE_LIMIT_BYTES`], or less in a ring so small that two of them would not fit.
    pub const fn record_limit_bytes(self) -> usize {
        let half = (self.capacity_bytes / 2).saturating_sub(HEADER_BYTES);
        if half < INLINE_LIMIT_BYTES {
            half
        } else {
            INLINE_LIMIT_BYTES
        }
    }

    /// Bytes of shared memory.
    pub const fn total_bytes(self) -> usize {
        DATA_OFFSET.saturating_add(self.capacity_bytes)
    }

    pub(crate) const fn fault(self) -> Option<&'static str> {
        if !self.capacity_bytes.is_power_of_two() {
            return Some("capacity is not a power of two");
        }
        if self.capacity_bytes < MIN_CAPACITY_BYTES || self.capacity_bytes > MAX_CAPACITY_BYTES {
            return Some("capacity is not between 512 bytes and 1 GiB");
        }
        None
    }
}

/// Size of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaSpec {
    /// Unit of allocation: a power of two from 4 KiB to 1 GiB; 64 KiB serves pictures and tensors.
    pub granule_bytes: usize,
    /// Number of granules, 1 to 2^20.
    pub n_granules: usize,
}

impl ArenaSpec {
    /// Bytes for bodies: also the longest single body.
    pub const fn data_bytes(self) -> usize {
        self.granule_bytes.saturating_mul(self.n_granules)
    }

    /// Bytes of shared memory.
    pub const fn total_bytes(self) -> usize {
        self.data_offset().saturating_add(self.data_bytes())
    }

    /// Where the bodies begin: after two lines and a line of 64 bytes per granule, on a page of any machine.
    pub(crate) const fn data_offset(self) -> usize {
        self.n_granules
            .saturating_mul(64)
            .saturating_add(256)
            .next_multiple_of(64 * 1024)
    }

    pub(crate) const fn fault(self) -> Option<&'static str> {
        if !self.granule_bytes.is_power_of_two() || self.granule_bytes < 4096 || self.granule_bytes > 1 << 30
        {
            return Some("granule is not a power of two between 4 KiB and 1 GiB");
        }
        if self.n_granules == 0 || self.n_granules > 1 << 20 {
            return Some("number of granules is not between 1 and 2^20");
        }
        if self.total_bytes() > isize::MAX as usize {
            return Some("the arena is larger than the address space");
        }
        None
    }
}

/// One piece of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionSpec {
    /// A ring.
    Ring(RingSpec),
    /// An arena.
    Arena(ArenaSpec),
    /// A doorbell with its stamps.
    Board,
}

/// Bytes of a [`crate::Board`]: two lines, a line per stamp.
pub(crate) const BOARD_BYTES: usize = 128 * (2 + MAX_READERS);

/// Bytes of shared memory that these take together:
/// `12288 + capacity_bytes` per ring, `granule_bytes * n_granules` plus 64 bytes per granule and 256,
/// rounded up to 64 KiB, per arena, 8448 per board.
pub fn total_bytes<'a>(regions: impl IntoIterator<Item = &'a RegionSpec>) -> u64 {
    let bytes = |region: &RegionSpec| match region {
        RegionSpec::Ring(spec) => spec.total_bytes(),
        RegionSpec::Arena(spec) => spec.total_bytes(),
        RegionSpec::Board => BOARD_BYTES,
    };
    regions
        .into_iter()
        .fold(0, |total: u64, region| total.saturating_add(bytes(region) as u64))
}

/// Bytes of a record with its header, up to the next boundary.
pub(crate) const fn record_span(body_bytes: usize) -> u64 {
    (HEADER_BYTES + body_bytes).next_multiple_of(RECORD_ALIGN) as u64
}

/// What lies before a record's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) body_bytes: u32,
    pub(crate) kind: u32,
    pub(crate) seq: u32,
}

impl Header {
    /// A record for readers.
    pub(crate) const RECORD: u32 = 1;
    /// Fills the rest of the ring's end, where the next record would not have fitted in one piece.
    pub(crate) const PAD: u32 = 2;

    pub(crate) fn to_words(self) -> [u32; 4] {
        [self.body_bytes, self.kind, self.seq, self.check()]
    }

    /// `None` if the words are no header.
    pub(crate) fn from_words([body_bytes, kind, seq, check]: [u32; 4]) -> Option<Self> {
        let header = Self {
            body_bytes,
            kind,
            seq,
        };
        (check == header.check()).then_some(header)
    }

    /// A damaged header is noticed with a chance of 1 - 2^-32, any single flipped bit for certain: each
    /// step below is invertible in each word.
    fn check(self) -> u32 {
        let mixed = self.body_bytes.rotate_left(7) ^ self.kind.rotate_left(19) ^ self.seq;
        mixed.wrapping_mul(0x9e37_79b1) ^ 0x5bd1_e995
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_formula_is_the_documented_one() {
        let ring = RingSpec {
            capacity_bytes: 1 << 22,
        };
        let arena = ArenaSpec {
            granule_bytes: 65_536,
            n_granules: 1024,
        };
        assert_eq!(ring.total_bytes(), 12_288 + 4_194_304);
        assert_eq!(arena.total_bytes(), 131_072 + 67_108_864);
        let regions = [
            RegionSpec::Ring(ring),
            RegionSpec::Arena(arena),
            RegionSpec::Board,
        ];
        assert_eq!(total_bytes(&regions), 4_206_592 + 67_239_936 + 8448);
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_noticed() {
        let words = Header {
            body_bytes: 200,
            kind: Header::RECORD,
            seq: 77,
        }
        .to_words();
        for bit in 0..128 {
            let mut damaged = words;
            damaged[bit / 32] ^= 1 << (bit % 32);
            assert_eq!(Header::from_words(damaged), None, "bit {bit}");
        }
        assert!(Header::from_words(words).is_some());
    }

    #[test]
    fn sizes_outside_the_limits_are_named() {
        for capacity_bytes in [0, 1, 256, 3 << 20, 1 << 31] {
            assert!(RingSpec { capacity_bytes }.fault().is_some(), "{capacity_bytes}");
        }
        assert_eq!(RingSpec { capacity_bytes: 512 }.fault(), None);
        assert_eq!(RingSpec { capacity_bytes: 512 }.record_limit_bytes(), 240);
        assert_eq!(
            RingSpec {
                capacity_bytes: 1 << 22
            }
            .record_limit_bytes(),
            65_536
        );
        for (granule_bytes, n_granules) in [(0, 1), (4095, 1), (4096, 0), (1 << 31, 1), (4096, (1 << 20) + 1)]
        {
            assert!(
                ArenaSpec {
                    granule_bytes,
                    n_granules
                }
                .fault()
                .is_some(),
                "{granule_bytes} {n_granules}"
            );
        }
    }
}
