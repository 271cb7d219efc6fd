//! Which cores this process may use.

use crate::OsError;
use rustix::thread::CpuSet;

/// How many cores this process can keep busy: its affinity, cut by the cgroup's CPU quota; at least 1.
pub fn usable_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The numbers of the cores in the calling thread's affinity, ascending.
///
/// # Errors
/// The kernel refuses (a machine with more than 1024 cores).
pub fn allowed_core_ids() -> Result<Vec<usize>, OsError> {
    let set = rustix::thread::sched_getaffinity(None).map_err(OsError::of("read the core affinity"))?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&core_idx| set.is_set(core_idx))
        .collect())
}

/// Lets the calling thread run on the cores `core_ids` alone; processes it starts inherit that.
///
/// # Errors
/// No core among them is one this process may use.
pub fn pin_thread(core_ids: &[usize]) -> Result<(), OsError> {
    let mut set = CpuSet::new();
    for &core_idx in core_ids.iter().filter(|&&core_idx| core_idx < CpuSet::MAX_CPU) {
        set.set(core_idx);
    }
    rustix::thread::sched_setaffinity(None, &set).map_err(OsError::of("pin the thread to cores"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_sees_one_core() {
        assert!(usable_cores() >= 1);
        let core_idx = allowed_core_ids().unwrap()[0];
        let seen = std::thread::spawn(move || {
            pin_thread(&[core_idx]).unwrap();
            allowed_core_ids().unwrap()
        });
        assert_eq!(seen.join().unwrap(), [core_idx]);
        assert!(pin_thread(&[usize::MAX]).is_err());
    }
}
