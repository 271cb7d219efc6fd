//! Damaged and hostile shared memory: refused or reported, never believed, never a panic.

use denoised_os::Deadline;
use denoised_os::memfd::{Access, Mapping, SealedMemory};
use denoised_ring::{
    ArenaHolder, ArenaOwner, ArenaSpec, AttachError, Board, RingError, RingMemory, RingSpec, Wait,
};
use std::os::fd::AsFd;

// Offsets as documented in `layout.rs`.
const TAIL: usize = 0x80;
const READER_0_CURSOR: usize = 0x200;
const DATA: usize = 0x3000;

/// SplitMix64: a fixed seed replays a failure.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// The same memory once more, to damage it.
struct Vandal(Mapping);

impl Vandal {
    fn of(fd: impl AsFd) -> Self {
        let memory = SealedMemory::from_fd(fd.as_fd().try_clone_to_owned().unwrap()).unwrap();
        Self(memory.map(Access::ReadWrite).unwrap())
    }

    fn read(&self, offset: usize) -> u8 {
        assert!(offset < self.0.len());
        // SAFETY: in bounds; no other thread runs in these tests.
        unsafe { self.0.as_ptr().add(offset).read_volatile() }
    }

    fn write(&self, offset: usize, byte: u8) {
        assert!(offset < self.0.len());
        // SAFETY: in bounds; no other thread runs in these tests, and nobody borrows the bytes now.
        unsafe { self.0.as_ptr().add(offset).write_volatile(byte) };
    }

    fn flip(&self, bit: usize) {
        self.write(bit / 8, self.read(bit / 8) ^ 1 << (bit % 8));
    }

    fn write_u64(&self, offset: usize, value: u64) {
        for (i, byte) in value.to_le_bytes().into_iter().enumerate() {
            self.write(offset + i, byte);
        }
    }
}

#[test]
fn random_headers_are_refused() {
    let ring = RingMemory::create("test", RingSpec { capacity_bytes: 512 }, 1).unwrap();
    let vandal = Vandal::of(&ring);
    let mut random = Random(1);
    for _ in 0..200_000 {
        for offset in (0..128).step_by(8) {
            vandal.write_u64(offset, random.next());
        }
        let result = RingMemory::attach(ring.fd().unwrap());
        assert!(matches!(result, Err(AttachError::BadHeader { .. })), "{result:?}");
    }
}

#[test]
fn every_flipped_bit_of_what_matters_in_a_header_is_refused() {
    let ring = RingMemory::create("test", RingSpec { capacity_bytes: 4096 }, 1).unwrap();
    let vandal = Vandal::of(&ring);
    // Magic, capacity, version.
    for bit in 0..160 {
        vandal.flip(bit);
        let result = RingMemory::attach(ring.fd().unwrap());
        assert!(
            matches!(result, Err(AttachError::BadHeader { .. })),
            "bit {bit}: {result:?}"
        );
        vandal.flip(bit);
    }
    RingMemory::attach(ring.fd().unwrap()).unwrap();
}

#[test]
fn every_flipped_bit_of_a_records_header_is_reported() {
    for bit in 0..128 {
        let ring = RingMemory::create("test", RingSpec { capacity_bytes: 4096 }, 1).unwrap();
        let (mut writer, mut reader) = (ring.writer(None).unwrap(), ring.reader(0).unwrap());
        writer.write(&[&[3; 100]], Deadline::PASSED).unwrap();
        writer.write(&[&[4; 100]], Deadline::PASSED).unwrap();
        Vandal::of(&ring).flip(8 * DATA + bit);
        for _ in 0..2 {
            let result = reader.try_read().map(|record| record.map(|record| record.len()));
            assert!(
                matches!(result, Err(RingError::Corrupt { position: 0, .. })),
                "bit {bit}: {result:?}"
            );
        }
    }
}

#[test]
fn an_impossible_tail_is_reported() {
    for tail in [1, 63, 65, 4096 + 64, 1 << 40, u64::MAX, u64::MAX - 63] {
        let ring = RingMemory::create("test", RingSpec { capacity_bytes: 4096 }, 1).unwrap();
        let (mut writer, mut reader) = (ring.writer(None).unwrap(), ring.reader(0).unwrap());
        writer.write(&[b"good"], Deadline::PASSED).unwrap();
        Vandal::of(&ring).write_u64(TAIL, tail);
        let result = reader
            .read(Wait::Sleep, Deadline::after_ms(100))
            .map(|record| record.len());
        assert!(
            matches!(result, Err(RingError::Corrupt { .. })),
            "tail {tail}: {result:?}"
        );
    }
    let ring = RingMemory::create("test", RingSpec { capacity_bytes: 4096 }, 1).unwrap();
    Vandal::of(&ring).write_u64(TAIL, 64);
    assert!(matches!(ring.writer(None), Err(AttachError::BadHeader { .. })));
}

#[test]
fn a_wild_cursor_frees_nothing_and_is_reported() {
    for cursor in [1 << 20, 129, u64::MAX] {
        let ring = RingMemory::create("test", RingSpec { capacity_bytes: 1024 }, 2).unwrap();
        let mut writer = ring.writer(None).unwrap();
        let (mut wild, mut good) = (ring.reader(0).unwrap(), ring.reader(1).unwrap());
        writer.write(&[&[1; 100]], Deadline::PASSED).unwrap();
        Vandal::of(&ring).write_u64(READER_0_CURSOR, cursor);
        let mut n_written = 1;
        let error = loop {
            drop(good.try_read().unwrap());
            match writer.try_write(&[&[2; 100]]) {
                Ok(()) => n_written += 1,
                Err(error) => break error,
            }
        };
        // 1024 bytes hold 8 records of 128: not one more, as if the reader had stayed where it was.
        assert_eq!(
            (n_written, error),
            (8, RingError::Full { laggard_idx: 0 }),
            "cursor {cursor}"
        );
        assert_eq!(writer.stats().wild_cursors, 0b01);
        assert_eq!(
            wild.try_read().unwrap().unwrap()[0],
            1,
            "the reader itself lost nothing"
        );
    }
}

#[test]
fn random_damage_never_panics() {
    let mut random = Random(2);
    for round in 0..3_000 {
        let ring = RingMemory::create("test", RingSpec { capacity_bytes: 1024 }, 2).unwrap();
        let vandal = Vandal::of(&ring);
        let mut writer = ring.writer(None).unwrap();
        if round % 3 == 0 {
            vandal.write_u64(READER_0_CURSOR, random.next());
        }
        let mut readers = [ring.reader(0).unwrap(), ring.reader(1).unwrap()];
        for _ in 0..40 {
            for _ in 0..random.below(3) {
                // Any bit of the control lines in use or of the records.
                let bit = random.below(8 * (0x300 + 1024));
                vandal.flip(if bit < 8 * 0x300 {
                    bit
                } else {
                    bit - 8 * 0x300 + 8 * DATA
                });
            }
            let body = [7; 300];
            let _ = writer.try_write(&[&body[..random.below(300)]]);
            for reader in &mut readers {
                if let Ok(Some(record)) = reader.try_read() {
                    assert!(record.len() <= 1024);
                    std::hint::black_box(record.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)));
                }
            }
        }
    }
}

#[test]
fn random_arenas_and_boards_are_refused() {
    let spec = ArenaSpec {
        granule_bytes: 4096,
        n_granules: 2,
    };
    let owner = ArenaOwner::create("test", spec, 1).unwrap();
    let board = Board::create("test").unwrap();
    let arena_vandal = Vandal::of(owner.fd().unwrap());
    let board_vandal = Vandal::of(board.fd().unwrap());
    // Magic, granule size, number of granules, version.
    for bit in 0..8 * 28 {
        arena_vandal.flip(bit);
        let result = ArenaHolder::attach(owner.fd().unwrap(), 0);
        assert!(
            matches!(result, Err(AttachError::BadHeader { .. })),
            "bit {bit}: {result:?}"
        );
        arena_vandal.flip(bit);
    }
    ArenaHolder::attach(owner.fd().unwrap(), 0).unwrap();
    let mut random = Random(3);
    for _ in 0..20_000 {
        for offset in (0..128).step_by(8) {
            arena_vandal.write_u64(offset, random.next());
            board_vandal.write_u64(offset, random.next());
        }
        assert!(matches!(
            ArenaHolder::attach(owner.fd().unwrap(), 0),
            Err(AttachError::BadHeader { .. })
        ));
        assert!(matches!(
            ArenaOwner::attach(owner.fd().unwrap()),
            Err(AttachError::BadHeader { .. })
        ));
        assert!(matches!(
            Board::attach(board.fd().unwrap()),
            Err(AttachError::BadHeader { .. })
        ));
    }
}

#[test]
fn memory_of_any_other_size_is_refused() {
    for bytes in [1, 64, 4096, DATA, DATA + 256, DATA + 513, DATA + 3 * 512, 1 << 16] {
        let memory = SealedMemory::create("test", bytes).unwrap();
        let fd = || memory.as_fd().try_clone_to_owned().unwrap();
        assert!(
            matches!(RingMemory::attach(fd()), Err(AttachError::BadHeader { .. })),
            "{bytes}"
        );
        assert!(
            matches!(ArenaHolder::attach(fd(), 0), Err(AttachError::BadHeader { .. })),
            "{bytes}"
        );
        assert!(
            matches!(Board::attach(fd()), Err(AttachError::BadHeader { .. })),
            "{bytes}"
        );
    }
}
