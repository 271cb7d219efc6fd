//! The one writer of a ring, and the handles by which other threads help it.

use crate::alarm::{Wait, spin};
use crate::doorbell::Doorbell;
use crate::error::RingError;
use crate::layout::{
    ADMITTED, EVICTED, FREE, HEADER_BYTES, Header, LEFT, MAX_READERS, READING, RECORD_ALIGN, RingSpec,
    record_span,
};
use crate::region::Region;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use denoised_os::Deadline;
use std::sync::Arc;

/// The space alarm has one sleeper, the writer.
const WRITER_BIT: u64 = 1;

/// Writes records. There is one per ring, and it is not shared: writing takes `&mut self`.
///
/// Dropping it closes the ring: readers get [`RingError::Closed`] after the last record.
#[derive(Debug)]
pub struct Writer {
    region: Arc<Region>,
    doorbell: Option<Doorbell>,
    shared: Arc<Shared>,
    record_limit_bytes: usize,
    wait: Wait,
    /// Position after the last published record.
    tail: u64,
    /// Sequence number of the next record.
    seq: u32,
    /// No living reader's cursor is below; only a new look at the cursors moves it.
    min_cursor: u64,
    /// The last believable cursor of each reader.
    cursors: [u64; MAX_READERS],
    stats: WriterStats,
}

/// What the writer's thread shares with its handles, in this process.
#[derive(Debug)]
struct Shared {
    /// A bit per reader that is waited for.
    readers: AtomicU64,
    cancelled: AtomicU32,
}

/// Counts since the writer was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriterStats {
    /// Records published.
    pub n_records: u64,
    /// Times that sleepers had to be woken.
    pub n_wakes: u64,
    /// Times that the ring was full.
    pub n_full_waits: u64,
    /// Waits that only the safety bound ended. A bug if not 0.
    pub n_missed_wakes: u64,
    /// A bit per reader whose cursor once had an impossible value, which was not believed.
    pub wild_cursors: u64,
}

impl Writer {
    /// For a ring whose writer's place the caller has taken, which nobody has written to yet.
    pub(crate) fn new(region: Arc<Region>, spec: RingSpec, doorbell: Option<Doorbell>) -> Self {
        let control = region.control();
        let mut readers = 0;
        for (reader_idx, line) in control.readers.0.iter().enumerate() {
            if matches!(line.state.load(Ordering::Acquire), ADMITTED | READING) {
                readers |= 1 << reader_idx;
            }
        }
        let shared = Shared {
            readers: AtomicU64::new(readers),
            cancelled: AtomicU32::new(0),
        };
        Self {
            region,
            doorbell,
            shared: Arc::new(shared),
            record_limit_bytes: spec.record_limit_bytes(),
            wait: Wait::Sleep,
            tail: 0,
            seq: 0,
            min_cursor: 0,
            cursors: [0; MAX_READERS],
            stats: WriterStats::default(),
        }
    }

    /// How to wait for room; without this call, asleep.
    pub fn set_wait(&mut self, wait: Wait) {
        self.wait = wait;
    }

    /// Longest record this ring carries.
    pub fn record_limit_bytes(&self) -> usize {
        self.record_limit_bytes
    }

    /// Counts so far.
    pub fn stats(&self) -> WriterStats {
        self.stats
    }

    /// Readers that are waited for, a bit each.
    pub fn readers(&self) -> u64 {
        self.shared.readers.load(Ordering::Acquire)
    }

    /// Lets reader `reader_idx` attach; it will see every record written from here on.
    ///
    /// A place can be admitted once in the life of a ring; false if it was before (or does not exist).
    pub fn admit(&mut self, reader_idx: usize) -> bool {
        let Some(line) = self.region.control().readers.0.get(reader_idx) else {
            return false;
        };
        if line.state.load(Ordering::Acquire) != FREE {
            return false;
        }
        line.cursor.store(self.tail, Ordering::Relaxed);
        line.first_seq.store(self.seq, Ordering::Relaxed);
        line.state.swap(ADMITTED, Ordering::AcqRel);
        self.cursors[reader_idx] = self.tail;
        self.shared.readers.fetch_or(1 << reader_idx, Ordering::AcqRel);
        true
    }

    /// Writes one record made of `parts` if there is room now.
    ///
    /// # Errors
    /// [`RingError::Full`] names the laggard; else as [`Writer::write`].
    pub fn try_write(&mut self, parts: &[&[u8]]) -> Result<(), RingError> {
        match self.write(parts, Deadline::PASSED) {
            Err(RingError::Laggard { laggard_idx }) => Err(RingError::Full { laggard_idx }),
            result => result,
        }
    }

    /// Writes one record made of `parts`, one after the other; waits for room until the deadline.
    ///
    /// # Errors
    /// Nothing was written: [`RingError::TooLarge`], [`RingError::Laggard`] at the deadline (at once if it
    /// has passed), [`RingError::NoReaders`], [`RingError::Cancelled`] (while waiting).
    #[inline]
    pub fn write(&mut self, parts: &[&[u8]], deadline: Deadline) -> Result<(), RingError> {
        let body_bytes = parts
            .iter()
            .fold(0usize, |sum, part| sum.saturating_add(part.len()));
        let start = self.make_room(body_bytes, deadline)?;
        let mut position = start + HEADER_BYTES as u64;
        for part in parts {
            // SAFETY: R3: `make_room` saw every living reader past these bytes, and `&mut self` is the
            // only writer.
            unsafe { self.region.write_bytes(position, part) };
            position += part.len() as u64;
        }
        self.publish(start, body_bytes);
        Ok(())
    }

    /// Waits until a record of `body_bytes` fits in one piece; returns where it begins. What lies between
    /// the tail and there is padded by `publish`.
    #[inline]
    fn make_room(&mut self, body_bytes: usize, deadline: Deadline) -> Result<u64, RingError> {
        if body_bytes > self.record_limit_bytes {
            let limit_bytes = self.record_limit_bytes;
            return Err(RingError::TooLarge {
                record_bytes: body_bytes,
                limit_bytes,
            });
        }
        let capacity_bytes = self.region.capacity_bytes();
        let to_end = capacity_bytes - (self.tail & (capacity_bytes - 1));
        let span = record_span(body_bytes);
        let start = if span <= to_end {
            self.tail
        } else {
            self.tail + to_end
        };
        if self.readers() == 0 {
            return Err(RingError::NoReaders);
        }
        let end = start + span;
        if end - self.min_cursor > capacity_bytes {
            self.wait_for_cursors(end - capacity_bytes, deadline)?;
        }
        Ok(start)
    }

    /// Waits until every living reader's cursor is at `wanted` or past it.
    #[cold]
    fn wait_for_cursors(&mut self, wanted: u64, deadline: Deadline) -> Result<(), RingError> {
        if self.look_at_cursors(wanted) {
            return if self.readers() == 0 {
                Err(RingError::NoReaders)
            } else {
                Ok(())
            };
        }
        self.stats.n_full_waits += 1;
        let region = Arc::clone(&self.region);
        let wait = self.wait;
        let mut missed_wakes = 0;
        let mut look = || match () {
            () if self.look_at_cursors(wanted) => Some(Ok(())),
            () if self.readers() == 0 => Some(Err(RingError::NoReaders)),
            () if self.shared.cancelled.load(Ordering::Acquire) != 0 => Some(Err(RingError::Cancelled)),
            () => None,
        };
        let found = spin(wait, deadline, &mut look).or_else(|| {
            region
                .control()
                .space
                .sleep(WRITER_BIT, deadline, &mut missed_wakes, &mut look)
        });
        self.stats.n_missed_wakes += missed_wakes;
        found.unwrap_or_else(|| {
            Err(RingError::Laggard {
                laggard_idx: self.laggard_idx(),
            })
        })?;
        if self.readers() == 0 {
            Err(RingError::NoReaders)
        } else {
            Ok(())
        }
    }

    /// Looks at all cursors anew; whether the slowest is at `wanted` or past it.
    fn look_at_cursors(&mut self, wanted: u64) -> bool {
        let mut min_cursor = self.tail;
        let mut readers = self.readers();
        while readers != 0 {
            let reader_idx = readers.trailing_zeros() as usize;
            readers &= readers - 1;
            let line = &self.region.control().readers.0[reader_idx];
            if line.state.load(Ordering::Acquire) == LEFT {
                self.shared
                    .readers
                    .fetch_and(!(1 << reader_idx), Ordering::AcqRel);
                continue;
            }
            let cursor = line.cursor.load(Ordering::Acquire); // pairs with `Reader::release`: bytes given back
            let last = &mut self.cursors[reader_idx];
            // A cursor only grows, from record to record, up to the tail; anything else is damage and frees
            // nothing (R6).
            if (*last..=self.tail).contains(&cursor) && cursor.is_multiple_of(RECORD_ALIGN as u64) {
                *last = cursor;
            } else {
                self.stats.wild_cursors |= 1 << reader_idx;
            }
            min_cursor = min_cursor.min(*last);
        }
        self.min_cursor = min_cursor;
        min_cursor >= wanted
    }

    /// The living reader furthest behind.
    fn laggard_idx(&self) -> usize {
        let readers = self.readers();
        let living = (0..MAX_READERS).filter(|reader_idx| readers >> reader_idx & 1 == 1);
        living
            .min_by_key(|&reader_idx| self.cursors[reader_idx])
            .unwrap_or(0)
    }

    /// Makes the record at `start`, whose body is written, visible to all readers.
    #[inline]
    fn publish(&mut self, start: u64, body_bytes: usize) {
        if start != self.tail {
            let pad_bytes = (start - self.tail) as u32 - HEADER_BYTES as u32;
            let pad = Header {
                body_bytes: pad_bytes,
                kind: Header::PAD,
                seq: self.seq,
            };
            // SAFETY: R3: `make_room` waited for everything up to the record's end, the padding included.
            unsafe { self.region.write_words(self.tail, pad.to_words()) };
            self.seq = self.seq.wrapping_add(1);
        }
        // `make_room` keeps the length below the limit, which fits 32 bits.
        let header = Header {
            body_bytes: body_bytes as u32,
            kind: Header::RECORD,
            seq: self.seq,
        };
        // SAFETY: R3: as above.
        unsafe { self.region.write_words(start, header.to_words()) };
        self.seq = self.seq.wrapping_add(1);
        self.tail = start + record_span(body_bytes);
        self.stats.n_records += 1;
        let control = self.region.control();
        control.tail.tail.store(self.tail, Ordering::Release); // pairs with `Reader::look`: record published
        let mut woke = control.data.announce();
        if let Some(doorbell) = &self.doorbell {
            woke |= doorbell.ring_after_fence();
        }
        self.stats.n_wakes += u64::from(woke);
    }

    /// Ends the ring: readers get [`RingError::Closed`] after the last record. Dropping does the same.
    pub fn close(self) {
        drop(self);
    }

    /// A handle that removes dead readers, for other threads.
    pub fn evictor(&self) -> Evictor {
        Evictor {
            region: Arc::clone(&self.region),
            shared: Arc::clone(&self.shared),
        }
    }

    /// A handle that ends this writer's waits, for other threads.
    pub fn canceller(&self) -> Canceller {
        Canceller {
            region: Arc::clone(&self.region),
            side: Side::Writer(Arc::clone(&self.shared)),
        }
    }

    /// As [`Evictor::evict`].
    pub fn evict(&mut self, reader_idx: usize) -> bool {
        self.evictor().evict(reader_idx)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let control = self.region.control();
        control.tail.closed.swap(1, Ordering::AcqRel);
        control.data.ring_all();
        if let Some(doorbell) = &self.doorbell {
            doorbell.ring();
        }
    }
}

/// Room for one record, to be filled in place. Dropped without [`Reservation::publish`], nothing is sent.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct Reservation<'a> {
    writer: &'a mut Writer,
    start: u64,
    body_bytes: usize,
}

#[cfg(not(loom))]
impl Writer {
    /// Makes room for a record of `body_bytes`, to be filled in place; its first contents are arbitrary.
    ///
    /// # Errors
    /// As [`Writer::write`].
    pub fn reserve(&mut self, body_bytes: usize, deadline: Deadline) -> Result<Reservation<'_>, RingError> {
        let start = self.make_room(body_bytes, deadline)?;
        Ok(Reservation {
            writer: self,
            start,
            body_bytes,
        })
    }
}

#[cfg(not(loom))]
impl Reservation<'_> {
    /// Sends the record.
    pub fn publish(self) {
        self.writer.publish(self.start, self.body_bytes);
    }
}

#[cfg(not(loom))]
impl std::ops::Deref for Reservation<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: R3: `make_room` saw every living reader past these bytes; only the writer, which this
        // borrows, could change them.
        unsafe {
            self.writer
                .region
                .bytes(self.start + HEADER_BYTES as u64, self.body_bytes)
        }
    }
}

#[cfg(not(loom))]
impl std::ops::DerefMut for Reservation<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes it the only slice.
        unsafe {
            self.writer
                .region
                .bytes_mut(self.start + HEADER_BYTES as u64, self.body_bytes)
        }
    }
}

/// Removes readers that are known to be dead, from any thread. The writer, also one that waits right now,
/// no longer waits for them; the other readers lose nothing.
#[derive(Clone, Debug)]
pub struct Evictor {
    region: Arc<Region>,
    shared: Arc<Shared>,
}

impl Evictor {
    /// Removes reader `reader_idx` for good; false if it was not waited for.
    ///
    /// Its process must be gone: a living one that holds a record in place would see it overwritten. (One
    /// that comes back all the same gets [`RingError::Evicted`] from its next read.)
    pub fn evict(&self, reader_idx: usize) -> bool {
        let Some(line) = self.region.control().readers.0.get(reader_idx) else {
            return false;
        };
        line.state.swap(EVICTED, Ordering::AcqRel);
        let waited_for = self
            .shared
            .readers
            .fetch_and(!(1 << reader_idx), Ordering::AcqRel);
        self.region.control().space.ring_all();
        self.region.control().data.ring_all();
        waited_for >> reader_idx & 1 == 1
    }
}

/// Ends the waits of one reader or writer of this process, from any thread.
#[derive(Clone, Debug)]
pub struct Canceller {
    region: Arc<Region>,
    side: Side,
}

#[derive(Clone, Debug)]
enum Side {
    Writer(Arc<Shared>),
    Reader(Arc<AtomicU32>),
}

impl Canceller {
    pub(crate) fn of_reader(region: Arc<Region>, cancelled: Arc<AtomicU32>) -> Self {
        Self {
            region,
            side: Side::Reader(cancelled),
        }
    }

    /// From now on waits end with [`RingError::Cancelled`], the one under way included. What needs no wait
    /// still succeeds.
    pub fn cancel(&self) {
        self.flag().swap(1, Ordering::AcqRel);
        match &self.side {
            Side::Writer(_) => self.region.control().space.ring_all(),
            Side::Reader(_) => self.region.control().data.ring_all(),
        }
    }

    /// Allows waits again.
    pub fn reset(&self) {
        self.flag().swap(0, Ordering::AcqRel);
    }

    /// Whether waits are cancelled now.
    pub fn is_cancelled(&self) -> bool {
        self.flag().load(Ordering::Acquire) != 0
    }

    fn flag(&self) -> &AtomicU32 {
        match &self.side {
            Side::Writer(shared) => &shared.cancelled,
            Side::Reader(cancelled) => cancelled,
        }
    }
}
