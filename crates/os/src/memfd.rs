//! Memory shared between processes by descriptor, without a name anywhere.
//!
//! R1. The size is fixed for ever by seals before anybody maps, so a mapping never loses its pages.
//! R2. The pages exist before anybody maps (`fallocate`), so lack of space is an error here and not a
//!     bus error later. The size is compared with [`crate::memory_budget`] first, because the kernel
//!     does not refuse: it takes pages for memory without a name until something is killed.
//! R3. What others send is judged by `fstat` and its seals, never by its contents.

use crate::OsError;
use crate::memory_budget::{self, NotEnoughMemory};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// Why memory could not be made, taken over or mapped.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// More than the machine or the cgroup has left; nothing was taken.
    #[error(transparent)]
    NotEnough(#[from] NotEnoughMemory),
    /// The kernel found no room for it.
    #[error("no space for {bytes} bytes of shared memory")]
    NoSpace {
        /// What was asked for.
        bytes: usize,
    },
    /// Zero bytes, or more than the address space holds.
    #[error("{bytes} bytes is no size for shared memory")]
    BadSize {
        /// What was asked for, or what the descriptor claims.
        bytes: u64,
    },
    /// A descriptor that could still change its size (or its contents, where they must be fixed).
    #[error("descriptor is not sealed shared memory (seals {seals:#x}, needed {needed:#x})")]
    NotSealed {
        /// The seals found, as in `F_GET_SEALS`; 0 if the descriptor cannot have any.
        seals: u32,
        /// The seals that must be there.
        needed: u32,
    },
    /// A range outside the memory, or not on a page boundary.
    #[error("range of {len} bytes at {offset} does not lie on pages of the {bytes} bytes of memory")]
    BadRange {
        /// First byte wanted.
        offset: usize,
        /// Bytes wanted.
        len: usize,
        /// Bytes there are.
        bytes: usize,
    },
    /// The kernel refused for another reason.
    #[error(transparent)]
    Os(#[from] OsError),
}

const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Whether a mapping may be written through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only; a write faults.
    ReadOnly,
    /// Reads and writes, seen by every process that maps the same memory.
    ReadWrite,
}

/// Memory that several processes map and write: fixed size, sealed against any change of it.
#[derive(Debug)]
pub struct SealedMemory {
    fd: OwnedFd,
    bytes: usize,
}

impl SealedMemory {
    /// Makes `bytes` zeroed bytes. `name` shows in `/proc/<pid>/maps` and in errors.
    ///
    /// # Errors
    /// [`MemoryError::NotEnough`], [`MemoryError::NoSpace`], [`MemoryError::BadSize`], or no descriptor left.
    pub fn create(name: &str, bytes: usize) -> Result<Self, MemoryError> {
        let fd = allocate(name, bytes)?;
        add_seals(&fd, SIZE_SEALS | SealFlags::SEAL)?;
        Ok(Self { fd, bytes })
    }

    /// Takes over memory that another process made with [`SealedMemory::create`].
    ///
    /// # Errors
    /// [`MemoryError::NotSealed`] unless shrinking and growing are sealed off for ever.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, MemoryError> {
        let bytes = sealed_size(&fd, SIZE_SEALS | SealFlags::SEAL)?;
        Ok(Self { fd, bytes })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Maps all of it.
    ///
    /// # Errors
    /// The kernel refuses (address space or number of mappings exhausted).
    pub fn map(&self, access: Access) -> Result<Mapping, MemoryError> {
        self.map_range(0, self.bytes, access)
    }

    /// Maps `len` bytes from `offset`, which is a multiple of [`page_bytes`].
    ///
    /// # Errors
    /// [`MemoryError::BadRange`], or the kernel refuses.
    pub fn map_range(&self, offset: usize, len: usize, access: Access) -> Result<Mapping, MemoryError> {
        let in_bounds = offset.checked_add(len).is_some_and(|end| end <= self.bytes);
        if len == 0 || !in_bounds || !offset.is_multiple_of(page_bytes()) {
            return Err(MemoryError::BadRange {
                offset,
                len,
                bytes: self.bytes,
            });
        }
        map(&self.fd, offset, len, access, MapFlags::SHARED)
    }

    /// Another descriptor of the same memory.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn try_clone(&self) -> Result<Self, OsError> {
        let fd = self.fd.try_clone().map_err(OsError::of("copy a descriptor"))?;
        Ok(Self {
            fd,
            bytes: self.bytes,
        })
    }
}

impl AsFd for SealedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Memory under construction: only this process holds it, until [`MemoryBuilder::freeze`].
#[derive(Debug)]
pub struct MemoryBuilder {
    fd: OwnedFd,
    mapping: Mapping,
}

impl MemoryBuilder {
    /// Makes `bytes` zeroed bytes to be filled. `name` shows in `/proc/<pid>/maps` and in errors.
    ///
    /// # Errors
    /// As [`SealedMemory::create`].
    pub fn create(name: &str, bytes: usize) -> Result<Self, MemoryError> {
        let fd = allocate(name, bytes)?;
        add_seals(&fd, SIZE_SEALS)?;
        let mapping = map(&fd, 0, bytes, Access::ReadWrite, MapFlags::SHARED)?;
        Ok(Self { fd, mapping })
    }

    /// The bytes to fill.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the descriptor never left this value and the mapping is writable, so nobody else
        // reaches these bytes while `self` is borrowed; zeroed pages are valid bytes.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.as_ptr(), self.mapping.len()) }
    }

    /// Ends the construction: from here on no process, this one included, can write the bytes.
    ///
    /// # Errors
    /// The kernel refuses the seal.
    pub fn freeze(self) -> Result<FrozenMemory, MemoryError> {
        let Self { fd, mapping } = self;
        let bytes = mapping.len();
        // The kernel refuses the write seal while a writable mapping exists.
        drop(mapping);
        add_seals(&fd, SealFlags::WRITE | SealFlags::SEAL)?;
        Ok(FrozenMemory { fd, bytes })
    }
}

/// Memory that nobody can ever write again: built once, read by every process that maps it.
#[derive(Debug)]
pub struct FrozenMemory {
    fd: OwnedFd,
    bytes: usize,
}

impl FrozenMemory {
    /// Takes over memory that another process froze.
    ///
    /// # Errors
    /// [`MemoryError::NotSealed`] unless size and contents are sealed for ever.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, MemoryError> {
        let bytes = sealed_size(&fd, SIZE_SEALS | SealFlags::WRITE)?;
        Ok(Self { fd, bytes })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Maps all of it for reading.
    ///
    /// # Errors
    /// The kernel refuses (address space or number of mappings exhausted).
    pub fn map(&self) -> Result<FrozenMapping, MemoryError> {
        // Private, since kernels before 6.7 refuse shared mappings of write-sealed memory even for reading. Nobody writes, so
        // nothing is ever copied: the pages are the same for all.
        map(&self.fd, 0, self.bytes, Access::ReadOnly, MapFlags::PRIVATE).map(FrozenMapping)
    }

    /// Another descriptor of the same memory.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn try_clone(&self) -> Result<Self, OsError> {
        let fd = self.fd.try_clone().map_err(OsError::of("copy a descriptor"))?;
        Ok(Self {
            fd,
            bytes: self.bytes,
        })
    }
}

impl AsFd for FrozenMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// [`FrozenMemory`] mapped for reading; unmapped when dropped.
#[derive(Debug)]
pub struct FrozenMapping(Mapping);

impl std::ops::Deref for FrozenMapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the memory carries the write seal, which the kernel grants only when no writable
        // mapping exists and which forbids new ones and write(2): the bytes never change again.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.0.len()) }
    }
}

/// A piece of address space that shows shared memory; unmapped when dropped.
///
/// Only gives out its address: who may read or write what, and when, is the business of the protocol
/// that lives in the memory.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    access: Access,
}

// SAFETY: an address range of the process belongs to no thread; `Mapping` itself never dereferences it.
unsafe impl Send for Mapping {}
// SAFETY: as above; all methods only read the range's own description or ask the kernel.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// First byte, on a page boundary.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether writes are allowed.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Brings all pages into the page table, so that the first touch of each costs no fault.
    ///
    /// # Errors
    /// The kernel refuses (memory exhausted).
    pub fn prefault(&self) -> Result<(), OsError> {
        let advice = match self.access {
            Access::ReadOnly => Advice::LinuxPopulateRead,
            Access::ReadWrite => Advice::LinuxPopulateWrite,
        };
        loop {
            // SAFETY: the range is ours, and populating changes no byte of it.
            match unsafe { rustix::mm::madvise(self.start.as_ptr().cast::<c_void>(), self.len, advice) } {
                Ok(()) => return Ok(()),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => return Err(OsError::of("populate shared memory")(errno)),
            }
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that mmap returned to `map`, given back once. Whoever handed out
        // references into it keeps the mapping alive for as long as they live.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast::<c_void>(), self.len) };
    }
}

/// Bytes of a page of this machine.
pub fn page_bytes() -> usize {
    rustix::param::page_size()
}

fn allocate(name: &str, bytes: usize) -> Result<OwnedFd, MemoryError> {
    let bytes_u64 = bytes as u64;
    if bytes == 0 || i64::try_from(bytes).is_err() {
        return Err(MemoryError::BadSize { bytes: bytes_u64 });
    }
    memory_budget::check(name, bytes_u64)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create(name, flags).map_err(OsError::of("make shared memory"))?;
    let no_space = |action| {
        move |errno| match errno {
            Errno::NOSPC | Errno::NOMEM | Errno::FBIG => MemoryError::NoSpace { bytes },
            errno => MemoryError::Os(OsError::of(action)(errno)),
        }
    };
    rustix::fs::ftruncate(&fd, bytes_u64).map_err(no_space("set the size of shared memory"))?;
    loop {
        match rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes_u64) {
            Ok(()) => return Ok(fd),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(no_space("allocate shared memory")(errno)),
        }
    }
}

fn add_seals(fd: &OwnedFd, seals: SealFlags) -> Result<(), OsError> {
    rustix::fs::fcntl_add_seals(fd, seals).map_err(OsError::of("seal shared memory"))
}

fn sealed_size(fd: &OwnedFd, needed: SealFlags) -> Result<usize, MemoryError> {
    // A descriptor that is no memfd cannot have seals at all.
    let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
    if !seals.contains(needed) {
        return Err(MemoryError::NotSealed {
            seals: seals.bits(),
            needed: needed.bits(),
        });
    }
    let stat = rustix::fs::fstat(fd).map_err(OsError::of("read the size of shared memory"))?;
    match usize::try_from(stat.st_size) {
        Ok(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(MemoryError::BadSize {
            bytes: stat.st_size as u64,
        }),
    }
}

fn map(
    fd: &OwnedFd,
    offset: usize,
    len: usize,
    access: Access,
    flags: MapFlags,
) -> Result<Mapping, MemoryError> {
    let prot = match access {
        Access::ReadOnly => ProtFlags::READ,
        Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
    };
    // SAFETY: a new range chosen by the kernel; it replaces no existing mapping (no MAP_FIXED).
    let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, fd, offset as u64) }
        .map_err(OsError::of("map shared memory"))?;
    match NonNull::new(start.cast::<u8>()) {
        Some(start) => Ok(Mapping { start, len, access }),
        None => Err(OsError::of("map shared memory")(Errno::NOMEM).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_show_the_same_bytes() {
        let memory = SealedMemory::create("test", 8192).unwrap();
        let writer = memory.map(Access::ReadWrite).unwrap();
        let reader = SealedMemory::from_fd(memory.as_fd().try_clone_to_owned().unwrap())
            .unwrap()
            .map_range(4096, 4096, Access::ReadOnly)
            .unwrap();
        writer.prefault().unwrap();
        reader.prefault().unwrap();
        // SAFETY: offset 5000 lies in the writable mapping of 8192 bytes.
        unsafe { writer.as_ptr().add(5000).write_volatile(7) };
        // SAFETY: offset 904 lies in the mapping of 4096 bytes.
        assert_eq!(unsafe { reader.as_ptr().add(904).read_volatile() }, 7);
        assert_eq!((reader.len(), reader.access()), (4096, Access::ReadOnly));
    }

    #[test]
    fn the_size_cannot_change() {
        let memory = SealedMemory::create("test", 4096).unwrap();
        assert_eq!(rustix::fs::ftruncate(&memory, 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&memory, 1 << 20), Err(Errno::PERM));
    }

    #[test]
    fn foreign_descriptors_are_refused() {
        let file = tempfile::tempfile().unwrap();
        assert!(matches!(
            SealedMemory::from_fd(file.into()),
            Err(MemoryError::NotSealed { .. })
        ));
        let unsealed = allocate("test", 4096).unwrap();
        assert!(matches!(
            SealedMemory::from_fd(unsealed),
            Err(MemoryError::NotSealed { seals: 0, .. })
        ));
        let writable = SealedMemory::create("test", 4096).unwrap();
        assert!(matches!(
            FrozenMemory::from_fd(writable.fd),
            Err(MemoryError::NotSealed { .. })
        ));
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(matches!(
            SealedMemory::from_fd(socket.into()),
            Err(MemoryError::NotSealed { .. })
        ));
    }

    #[test]
    fn impossible_sizes_are_typed_errors() {
        assert!(matches!(
            SealedMemory::create("test", 0),
            Err(MemoryError::BadSize { bytes: 0 })
        ));
        let bytes = 1usize << 62;
        match SealedMemory::create("test", bytes) {
            Err(MemoryError::NotEnough(error)) => assert_eq!(error.needed_bytes, 1 << 62),
            other => panic!("{other:?}"),
        }
        let memory = SealedMemory::create("test", 8192).unwrap();
        for (offset, len) in [
            (0, 0),
            (1, 4096),
            (4096, 8192),
            (usize::MAX - 4095, 8192),
            (0, 8193),
        ] {
            assert!(
                matches!(
                    memory.map_range(offset, len, Access::ReadOnly),
                    Err(MemoryError::BadRange { .. })
                ),
                "{offset} {len}"
            );
        }
    }

    #[test]
    fn frozen_memory_is_read_only_for_everybody() {
        let mut builder = MemoryBuilder::create("test", 10_000).unwrap();
        builder.bytes_mut()[9_999] = 42;
        let frozen = builder.freeze().unwrap();
        let copy = FrozenMemory::from_fd(frozen.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(copy.bytes(), 10_000);
        assert_eq!(copy.map().unwrap()[9_999], 42);
        assert!(map(&frozen.fd, 0, 4096, Access::ReadWrite, MapFlags::SHARED).is_err());
        assert!(rustix::io::pwrite(&frozen, b"x", 0).is_err());
    }
}
