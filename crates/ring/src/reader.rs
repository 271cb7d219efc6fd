//! One reader of a ring.

use crate::alarm::{Wait, spin};
use crate::error::RingError;
use crate::layout::{HEADER_BYTES, Header, LEFT, READING, RECORD_ALIGN, RingSpec, record_span};
use crate::region::Region;
use crate::sync::{AtomicU32, Ordering};
use crate::writer::Canceller;
use denoised_os::Deadline;
use std::sync::Arc;

/// Reads every record, in order. There is one per place, and it is not shared: reading takes `&mut self`.
///
/// Dropping it leaves the ring: the writer no longer waits for it.
#[derive(Debug)]
pub struct Reader {
    region: Arc<Region>,
    cancelled: Arc<AtomicU32>,
    reader_idx: usize,
    record_limit_bytes: usize,
    /// Position of the next record.
    position: u64,
    /// Its sequence number.
    seq: u32,
    /// The last tail seen.
    tail: u64,
    /// Set once the ring was found damaged.
    damage: Option<RingError>,
    stats: ReaderStats,
}

/// Counts since the reader was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReaderStats {
    /// Records given back.
    pub n_records: u64,
    /// Times that it went to sleep.
    pub n_sleeps: u64,
    /// Sleeps that only the safety bound ended. A bug if not 0.
    pub n_missed_wakes: u64,
}

/// Where the body of the next record lies.
#[derive(Clone, Copy, Debug)]
struct Found {
    body_position: u64,
    body_bytes: usize,
}

impl Reader {
    /// For a place that the caller has taken.
    pub(crate) fn new(region: Arc<Region>, spec: RingSpec, reader_idx: usize) -> Self {
        let line = &region.control().readers.0[reader_idx];
        let position = line.cursor.load(Ordering::Acquire);
        let seq = line.first_seq.load(Ordering::Acquire);
        Self {
            region,
            cancelled: Arc::new(AtomicU32::new(0)),
            reader_idx,
            record_limit_bytes: spec.record_limit_bytes(),
            position,
            seq,
            tail: position,
            damage: None,
            stats: ReaderStats::default(),
        }
    }

    /// Its place in the ring.
    pub fn reader_idx(&self) -> usize {
        self.reader_idx
    }

    /// Counts so far.
    pub fn stats(&self) -> ReaderStats {
        self.stats
    }

    /// A handle that ends this reader's waits, for other threads.
    pub fn canceller(&self) -> Canceller {
        Canceller::of_reader(Arc::clone(&self.region), Arc::clone(&self.cancelled))
    }

    /// The next record, in place, if there is one. Dropping it gives the bytes back; a record that is kept
    /// holds up the writer once the ring is full.
    ///
    /// # Errors
    /// [`RingError::Closed`] after the last record, [`RingError::Evicted`], [`RingError::Corrupt`].
    #[inline]
    pub fn try_read(&mut self) -> Result<Option<Record<'_>>, RingError> {
        match self.look().map_or_else(
            || self.look_at_the_end().transpose(),
            |found| Some(found).transpose(),
        )? {
            Some(found) => Ok(Some(Record { reader: self, found })),
            None => Ok(None),
        }
    }

    /// The next record, in place; waits for it until the deadline.
    ///
    /// # Errors
    /// As [`Reader::try_read`]; [`RingError::TimedOut`] at the deadline (at once if it has passed),
    /// [`RingError::Cancelled`] while waiting.
    #[inline]
    pub fn read(&mut self, wait: Wait, deadline: Deadline) -> Result<Record<'_>, RingError> {
        let found = match self.look() {
            Some(found) => found?,
            None => self.wait(wait, deadline)?,
        };
        Ok(Record { reader: self, found })
    }

    /// Whether [`Reader::try_read`] would give a record or an error.
    pub fn is_ready(&mut self) -> bool {
        self.look().is_some() || self.look_at_the_end().is_some()
    }

    fn wait(&mut self, wait: Wait, deadline: Deadline) -> Result<Found, RingError> {
        let region = Arc::clone(&self.region);
        let sleeper_bit = 1 << self.reader_idx;
        let mut missed_wakes = 0;
        let mut n_sleeps = 0;
        let mut look = || {
            let found = self.look().or_else(|| self.look_at_the_end());
            if found.is_none() && self.cancelled.load(Ordering::Acquire) != 0 {
                return Some(Err(RingError::Cancelled));
            }
            found
        };
        let found = spin(wait, deadline, &mut look).or_else(|| {
            n_sleeps = 1;
            region
                .control()
                .data
                .sleep(sleeper_bit, deadline, &mut missed_wakes, &mut look)
        });
        self.stats.n_sleeps += n_sleeps;
        self.stats.n_missed_wakes += missed_wakes;
        found.unwrap_or(Err(RingError::TimedOut))
    }

    /// The next record, if it is published. Changes nothing that matters: a second look finds the same.
    #[inline]
    fn look(&mut self) -> Option<Result<Found, RingError>> {
        loop {
            if self.position == self.tail {
                // Pairs with `Writer::publish`: record published.
                self.tail = self.region.control().tail.tail.load(Ordering::Acquire);
                if self.position == self.tail {
                    return None;
                }
            }
            match self.check_next() {
                Ok(Some(found)) => return Some(Ok(found)),
                Ok(None) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// Checks the record at `position`, which the tail says is there (R6); passes over padding.
    #[inline]
    fn check_next(&mut self) -> Result<Option<Found>, RingError> {
        if let Some(damage) = &self.damage {
            return Err(damage.clone());
        }
        if self.is_evicted() {
            return Err(RingError::Evicted);
        }
        let published = self.tail.wrapping_sub(self.position);
        if published > self.region.capacity_bytes() || !published.is_multiple_of(RECORD_ALIGN as u64) {
            return Err(self.damaged("the tail is out of reach"));
        }
        let Some(header) = Header::from_words(self.region.read_words(self.position)) else {
            return Err(self.damaged("the header does not match its check"));
        };
        let span = record_span(header.body_bytes as usize);
        let capacity_bytes = self.region.capacity_bytes();
        let to_end = capacity_bytes - (self.position & (capacity_bytes - 1));
        if span > published || span > to_end {
            return Err(self.damaged("the record reaches past what is published"));
        }
        if header.seq != self.seq {
            return Err(self.damaged("the record is not the next one"));
        }
        match header.kind {
            Header::PAD if span == to_end && span < published => {
                self.position = self.position.wrapping_add(span);
                self.seq = self.seq.wrapping_add(1);
                Ok(None)
            }
            Header::RECORD if header.body_bytes as usize <= self.record_limit_bytes => Ok(Some(Found {
                body_position: self.position.wrapping_add(HEADER_BYTES as u64),
                body_bytes: header.body_bytes as usize,
            })),
            _ => Err(self.damaged("the record is of no known kind or length")),
        }
    }

    #[cold]
    fn damaged(&mut self, what: &'static str) -> RingError {
        if self.is_evicted() {
            // The writer no longer waits for this reader and may have written over the record.
            return RingError::Evicted;
        }
        let damage = RingError::Corrupt {
            position: self.position,
            what,
        };
        self.damage = Some(damage.clone());
        damage
    }

    #[inline]
    fn is_evicted(&self) -> bool {
        self.region.control().readers.0[self.reader_idx]
            .state
            .load(Ordering::Acquire)
            != READING
    }

    /// Why no record may ever come, if so.
    #[inline]
    fn look_at_the_end(&mut self) -> Option<Result<Found, RingError>> {
        let control = self.region.control();
        if self.is_evicted() {
            return Some(Err(RingError::Evicted));
        }
        if control.tail.closed.load(Ordering::Acquire) != 0 {
            // Closing comes after the last record, which may have come since the last look.
            return Some(self.look().unwrap_or(Err(RingError::Closed)));
        }
        None
    }

    /// Gives the record at `position` back.
    #[inline]
    fn release(&mut self, body_bytes: usize) {
        self.position = self.position.wrapping_add(record_span(body_bytes));
        self.seq = self.seq.wrapping_add(1);
        self.stats.n_records += 1;
        let control = self.region.control();
        let cursor = &control.readers.0[self.reader_idx].cursor;
        cursor.store(self.position, Ordering::Release); // pairs with `Writer::look_at_cursors`: bytes given back
        control.space.announce();
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let control = self.region.control();
        let state = &control.readers.0[self.reader_idx].state;
        // An eviction stays one.
        let _ = state.compare_exchange(READING, LEFT, Ordering::AcqRel, Ordering::Acquire);
        control.space.ring_all();
    }
}

/// One record, in place in shared memory; given back when dropped, also by a panic.
///
/// The bytes are the writer's: a faulty writer process could change them while they are read. Decode a
/// copy where that matters more than the copy costs.
#[derive(Debug)]
pub struct Record<'a> {
    reader: &'a mut Reader,
    found: Found,
}

impl Record<'_> {
    /// Its length.
    pub fn body_bytes(&self) -> usize {
        self.found.body_bytes
    }
}

#[cfg(not(loom))]
impl std::ops::Deref for Record<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: R3: `look` saw the tail that publishes this record, bounds checked; the cursor stays
        // before it until `drop`, which this borrow precedes.
        unsafe {
            self.reader
                .region
                .bytes(self.found.body_position, self.found.body_bytes)
        }
    }
}

#[cfg(loom)]
impl Record<'_> {
    pub(crate) fn copied(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.found.body_bytes];
        self.reader
            .region
            .copy_bytes(self.found.body_position, &mut bytes);
        bytes
    }
}

impl Drop for Record<'_> {
    #[inline]
    fn drop(&mut self) {
        self.reader.release(self.found.body_bytes);
    }
}
