//! Memory of a device that is not there: who holds how much of it.

use denoised_types::{Failure, FailureCode, Rank};
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// What a worker holds from its start to its end.
pub const BASE_BYTES: u64 = 1000;
/// What a request holds from its begin to its end.
pub const REQUEST_BYTES: u64 = 1_000_000;

/// A rank's share of the device. Clones are the same one.
#[derive(Clone, Debug)]
pub(super) struct Device {
    account: Arc<Account>,
    /// What the worker itself holds.
    _base: Arc<Buffer>,
}

#[derive(Debug)]
struct Account {
    n_bytes: AtomicU64,
    file: Option<PathBuf>,
}

/// Memory of the device until it is dropped.
#[derive(Debug)]
pub(super) struct Buffer {
    account: Arc<Account>,
    n_bytes: u64,
}

impl Device {
    /// Opens it; what is held is written to a file in `folder`.
    pub(super) fn open(folder: Option<&Path>, rank: Rank) -> Result<Self, Failure> {
        if let Some(folder) = folder {
            std::fs::create_dir_all(folder).map_err(|error| {
                Failure::new(FailureCode::NoDevice, format!("{}: {error}", folder.display()))
            })?;
        }
        let account = Arc::new(Account {
            n_bytes: AtomicU64::new(0),
            file: folder.map(|folder| folder.join(format!("{}.{rank}", std::process::id()))),
        });
        let base = Arc::new(Buffer::new(&account, BASE_BYTES));
        Ok(Self { account, _base: base })
    }

    pub(super) fn allocate(&self, n_bytes: u64) -> Buffer {
        Buffer::new(&self.account, n_bytes)
    }

    pub(super) fn n_bytes(&self) -> u64 {
        self.account.n_bytes.load(Ordering::Acquire)
    }
}

impl Buffer {
    fn new(account: &Arc<Account>, n_bytes: u64) -> Self {
        account.n_bytes.fetch_add(n_bytes, Ordering::AcqRel);
        account.write();
        Self {
            account: Arc::clone(account),
            n_bytes,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.account.n_bytes.fetch_sub(self.n_bytes, Ordering::AcqRel);
        self.account.write();
    }
}

impl Account {
    fn write(&self) {
        if let Some(file) = &self.file {
            // A wrong figure is what the test would see.
            let _ = std::fs::write(file, self.n_bytes.load(Ordering::Acquire).to_string());
        }
    }
}

/// What all running processes together hold, by the accounts in `folder`. The memory of a process that has ended is free, as with a real
/// device.
pub fn device_bytes(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return 0;
    };
    let held = |entry: std::fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let pid = name.split('.').next()?.parse().ok()?;
        if !crate::process::is_running(pid) {
            return None;
        }
        std::fs::read_to_string(entry.path()).ok()?.parse::<u64>().ok()
    };
    entries.flatten().filter_map(held).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_counted_until_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let held = || device_bytes(folder.path());
        assert_eq!(held(), 0);
        let device = Device::open(Some(folder.path()), Rank(0)).unwrap();
        let other = Device::open(Some(folder.path()), Rank(1)).unwrap();
        let buffer = device.allocate(50);
        assert_eq!((held(), device.n_bytes()), (2 * BASE_BYTES + 50, BASE_BYTES + 50));
        drop(device);
        // A buffer may outlive the worker, which is a leak that shows.
        assert_eq!(held(), BASE_BYTES + 50);
        drop((buffer, other));
        assert_eq!(held(), 0);
        // A process that has ended holds nothing: no process has this id.
        std::fs::write(folder.path().join(format!("{}.0", u32::MAX)), "12").unwrap();
        assert_eq!(held(), 0);
    }
}
