//! A mapped ring: its control lines, and its bytes addressed by position.
//!
//! Under loom the bytes are lines of the model's cells, so that the checker sees who touches which when.

#[cfg(loom)]
pub(crate) use modelled::Region;
#[cfg(not(loom))]
pub(crate) use shared::Region;

#[cfg(not(loom))]
mod shared {
    use crate::layout::{Control, DATA_OFFSET};
    use denoised_os::memfd::{Access, Mapping};

    /// A writable mapping of at least `DATA_OFFSET + capacity_bytes` bytes.
    #[derive(Debug)]
    pub(crate) struct Region {
        mapping: Mapping,
        capacity_bytes: u64,
    }

    impl Region {
        /// `None` unless the mapping is writable and as long as that capacity, a power of two, needs.
        pub(crate) fn new(mapping: Mapping, capacity_bytes: usize) -> Option<Self> {
            let fits = DATA_OFFSET
                .checked_add(capacity_bytes)
                .is_some_and(|bytes| bytes <= mapping.len());
            let usable = fits && capacity_bytes.is_power_of_two() && mapping.access() == Access::ReadWrite;
            usable.then_some(Self {
                mapping,
                capacity_bytes: capacity_bytes as u64,
            })
        }

        #[inline]
        pub(crate) fn capacity_bytes(&self) -> u64 {
            self.capacity_bytes
        }

        #[inline]
        pub(crate) fn control(&self) -> &Control {
            // SAFETY: the mapping starts on a page, is longer than `Control` (asserted in `layout`), and
            // lives as long as `self`. `Control` holds only atomics, for which any bytes are valid and
            // which other processes may change at any time.
            unsafe { &*self.mapping.as_ptr().cast::<Control>() }
        }

        /// Address of `position`; the bytes from there to the ring's end are mapped.
        #[inline]
        fn address(&self, position: u64) -> *mut u8 {
            let offset = (position & (self.capacity_bytes - 1)) as usize;
            // SAFETY: the offset is below the capacity, and the mapping holds that many bytes (`new`).
            unsafe { self.mapping.as_ptr().add(DATA_OFFSET + offset) }
        }

        /// Whether `len` bytes from `position` lie in one piece.
        #[inline]
        fn in_one_piece(&self, position: u64, len: usize) -> bool {
            (position & (self.capacity_bytes - 1)) + len as u64 <= self.capacity_bytes
        }

        /// Reads four words at `position`, a multiple of 16, each exactly once.
        #[inline]
        pub(crate) fn read_words(&self, position: u64) -> [u32; 4] {
            let start = self.address(position & !15).cast::<u32>();
            std::array::from_fn(|word_idx| {
                // SAFETY: 16 bytes from a multiple of 16 lie before the ring's end and are aligned for
                // `u32`. Volatile: a faulty peer may write them now, and they must be read only once.
                unsafe { start.add(word_idx).read_volatile() }
            })
        }

        /// # Safety
        /// The caller is the writer, and no reader may read these 16 bytes now (R3).
        #[inline]
        pub(crate) unsafe fn write_words(&self, position: u64, words: [u32; 4]) {
            let start = self.address(position & !15).cast::<u32>();
            for (word_idx, word) in words.into_iter().enumerate() {
                // SAFETY: in bounds and aligned as in `read_words`; nobody else uses them (caller).
                unsafe { start.add(word_idx).write_volatile(word) };
            }
        }

        /// Writes `bytes` in one piece; what would not fit before the ring's end is an error of the caller
        /// and not written.
        ///
        /// # Safety
        /// The caller is the writer, and no reader may read these bytes now (R3).
        #[inline]
        pub(crate) unsafe fn write_bytes(&self, position: u64, bytes: &[u8]) {
            if self.in_one_piece(position, bytes.len()) {
                // SAFETY: the target is in bounds (just checked) and used by nobody else (caller); the
                // source is a borrowed slice, which cannot be that target.
                unsafe {
                    bytes
                        .as_ptr()
                        .copy_to_nonoverlapping(self.address(position), bytes.len())
                };
            }
        }

        /// The `len` bytes at `position`, or none if they are not in one piece.
        ///
        /// # Safety
        /// The caller is a reader between having seen the tail that publishes these bytes and moving its
        /// cursor past them, so the writer leaves them alone (R3), for as long as the slice lives.
        #[inline]
        pub(crate) unsafe fn bytes(&self, position: u64, len: usize) -> &[u8] {
            if !self.in_one_piece(position, len) {
                return &[];
            }
            // SAFETY: in bounds (just checked), initialised (the memory began as zeros), unchanging (caller).
            unsafe { std::slice::from_raw_parts(self.address(position), len) }
        }

        /// The `len` bytes at `position` to be filled, or none if they are not in one piece.
        ///
        /// # Safety
        /// The caller is the writer, no reader may read these bytes (R3), and there is one slice at a time.
        #[inline]
        #[expect(
            clippy::mut_from_ref,
            reason = "shared memory; the caller proves that it is alone"
        )]
        pub(crate) unsafe fn bytes_mut(&self, position: u64, len: usize) -> &mut [u8] {
            if !self.in_one_piece(position, len) {
                return &mut [];
            }
            // SAFETY: in bounds (just checked), initialised (the memory began as zeros), unshared (caller).
            unsafe { std::slice::from_raw_parts_mut(self.address(position), len) }
        }
    }
}

#[cfg(loom)]
mod modelled {
    use crate::layout::Control;
    use loom::cell::UnsafeCell;

    const LINE_BYTES: usize = 64;

    #[derive(Debug)]
    pub(crate) struct Region {
        control: Control,
        lines: Vec<UnsafeCell<[u8; LINE_BYTES]>>,
    }

    // SAFETY: the lines are shared by the ring's protocol; loom reports any access that it does not order.
    unsafe impl Sync for Region {}
    // SAFETY: as above.
    unsafe impl Send for Region {}

    impl Region {
        pub(crate) fn new(capacity_bytes: usize) -> Self {
            let lines = (0..capacity_bytes / LINE_BYTES)
                .map(|_| UnsafeCell::new([0; LINE_BYTES]))
                .collect();
            Self {
                control: Control::default(),
                lines,
            }
        }

        pub(crate) fn capacity_bytes(&self) -> u64 {
            (self.lines.len() * LINE_BYTES) as u64
        }

        pub(crate) fn control(&self) -> &Control {
            &self.control
        }

        fn split(&self, position: u64) -> (&UnsafeCell<[u8; LINE_BYTES]>, usize) {
            let offset = (position % self.capacity_bytes()) as usize;
            (&self.lines[offset / LINE_BYTES], offset % LINE_BYTES)
        }

        pub(crate) fn read_words(&self, position: u64) -> [u32; 4] {
            let mut bytes = [0; 16];
            self.copy_bytes(position, &mut bytes);
            std::array::from_fn(|i| u32::from_le_bytes([0, 1, 2, 3].map(|j| bytes[4 * i + j])))
        }

        pub(crate) unsafe fn write_words(&self, position: u64, words: [u32; 4]) {
            let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
            // SAFETY: the caller's promise is the same.
            unsafe { self.write_bytes(position, &bytes) };
        }

        pub(crate) unsafe fn write_bytes(&self, position: u64, bytes: &[u8]) {
            let (line, start) = self.split(position);
            // SAFETY: loom checks that nobody else has this line now.
            line.with_mut(|line| unsafe { (&mut *line)[start..start + bytes.len()].copy_from_slice(bytes) });
        }

        pub(crate) fn copy_bytes(&self, position: u64, bytes: &mut [u8]) {
            let (line, start) = self.split(position);
            let end = start + bytes.len();
            // SAFETY: loom checks that nobody writes this line now.
            line.with(|line| bytes.copy_from_slice(unsafe { &(&*line)[start..end] }));
        }
    }
}
