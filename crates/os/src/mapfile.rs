//! Files mapped for reading.

use crate::OsError;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;

/// A whole file as bytes, read by the kernel page by page as they are touched; unmapped when dropped.
///
/// The file must not be changed while it is mapped, which no program can enforce for a file system:
/// another process that writes to it changes the bytes under the reader, and one that shortens it makes
/// reading the missing pages end this process with SIGBUS; [`MappedFile::populate`] finds that out first in
/// all but a race. Replace checkpoints by renaming a new file over the old one; never edit them in place. A
/// file that is already too short is a plain error: check offsets against the length of the slice as usual.
#[derive(Debug)]
pub struct MappedFile {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a read-only range of the process's address space belongs to no thread.
unsafe impl Send for MappedFile {}
// SAFETY: as above; all access through `&self` is reading.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    /// Maps the regular file at `path`; an empty file gives no bytes.
    ///
    /// # Errors
    /// The file cannot be opened, is no regular file, or does not fit the address space.
    pub fn open(path: &Path) -> Result<Self, OsError> {
        let action = "map a file";
        let file = File::open(path).map_err(OsError::of("open a file"))?;
        let metadata = file.metadata().map_err(OsError::of("read a file's size"))?;
        if !metadata.is_file() {
            let source = std::io::Error::other("not a regular file");
            return Err(OsError { action, source });
        }
        let len = usize::try_from(metadata.len()).map_err(|_| OsError {
            action,
            source: std::io::ErrorKind::FileTooLarge.into(),
        })?;
        if len == 0 {
            return Ok(Self {
                start: NonNull::dangling(),
                len,
            });
        }
        // SAFETY: a new range chosen by the kernel; it replaces no existing mapping (no MAP_FIXED).
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ,
                MapFlags::PRIVATE,
                &file,
                0,
            )
        }
        .map_err(OsError::of(action))?;
        match NonNull::new(start.cast::<u8>()) {
            Some(start) => Ok(Self { start, len }),
            None => Err(OsError {
                action,
                source: std::io::ErrorKind::OutOfMemory.into(),
            }),
        }
    }

    /// Tells the kernel that `range` of the bytes will be wanted soon; out-of-bounds parts are ignored.
    pub fn will_need(&self, range: Range<usize>) {
        let _ = self.advise(range, Advice::WillNeed);
    }

    /// Reads `range` into memory and maps it, so that touching it does not fault; out-of-bounds parts are ignored.
    ///
    /// Where the file has become shorter since it was mapped, or its disk fails, this is an error instead of
    /// the SIGBUS that touching the bytes would be (a later change can still cause one).
    ///
    /// # Errors
    /// The bytes cannot be read.
    pub fn populate(&self, range: Range<usize>) -> Result<(), OsError> {
        loop {
            match self.advise(range.clone(), Advice::LinuxPopulateRead) {
                // Sandboxes without this advice read the pages as they are touched.
                Ok(()) | Err(Errno::INVAL) => return Ok(()),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => return Err(OsError::of("read mapped bytes of a file")(errno)),
            }
        }
    }

    /// Takes the pages of `range` out of this process's memory; out-of-bounds parts are ignored. Touching
    /// them again reads them again, so this is never wrong, even while others hold slices of them.
    pub fn evict(&self, range: Range<usize>) {
        let _ = self.advise(range, Advice::LinuxDontNeed);
    }

    fn advise(&self, range: Range<usize>, advice: Advice) -> rustix::io::Result<()> {
        let page_bytes = crate::memfd::page_bytes();
        let start = range.start.min(self.len) / page_bytes * page_bytes;
        let end = range.end.min(self.len);
        if start >= end {
            return Ok(());
        }
        // SAFETY: the range lies in the mapping, and none of these advices changes what is read there: the
        // pages are clean copies of the file, because the mapping is read-only.
        unsafe {
            rustix::mm::madvise(
                self.start.as_ptr().add(start).cast::<c_void>(),
                end - start,
                advice,
            )
        }
    }
}

impl std::ops::Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` is a live read-only mapping of `len` bytes (or dangling with length 0), and the
        // type's contract demands that nobody changes the file.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: exactly the range that mmap returned, given back once; slices borrow `self`.
            let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast::<c_void>(), self.len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_file_shows_its_bytes_and_its_length() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, vec![3u8; 10_000]).unwrap();
        let mapped = MappedFile::open(&path).unwrap();
        mapped.will_need(5_000..usize::MAX);
        mapped.will_need(20_000..30_000);
        assert_eq!(mapped.len(), 10_000);
        assert!(mapped.iter().all(|&byte| byte == 3));
    }

    #[test]
    fn evicted_pages_show_the_same_bytes_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, vec![5u8; 100_000]).unwrap();
        let mapped = MappedFile::open(&path).unwrap();
        let slice = &mapped[10_000..60_000];
        mapped.populate(10_000..60_000).unwrap();
        assert!(slice.iter().all(|&byte| byte == 5));
        mapped.evict(0..usize::MAX);
        assert!(slice.iter().all(|&byte| byte == 5));
    }

    #[test]
    fn populating_a_shortened_file_is_an_error_and_no_signal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, vec![5u8; 100_000]).unwrap();
        let mapped = MappedFile::open(&path).unwrap();
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(20_000)
            .unwrap();
        mapped.populate(0..20_000).unwrap();
        let error = mapped.populate(50_000..60_000).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("cannot read mapped bytes of a file"),
            "{error}"
        );
    }

    #[test]
    fn an_empty_file_has_no_bytes_and_a_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("empty");
        std::fs::write(&path, b"").unwrap();
        assert!(MappedFile::open(&path).unwrap().is_empty());
        assert!(MappedFile::open(folder.path()).is_err());
        assert!(MappedFile::open(&folder.path().join("absent")).is_err());
    }
}
