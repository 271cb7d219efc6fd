//! What a process holds and has used: memory and CPU time, from `/proc`.

use crate::OsError;

/// Memory of a process in bytes, from `smaps_rollup`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Everything mapped and present.
    pub rss_bytes: u64,
    /// Like `rss_bytes`, but each shared page counts by its share of the processes that map it: the sum
    /// over a world's processes is what the world takes.
    pub pss_bytes: u64,
    /// Pages that no other process maps.
    pub private_bytes: u64,
}

/// Memory of process `pid`.
///
/// # Errors
/// The process is gone or belongs to somebody else.
pub fn memory_of(pid: u32) -> Result<ProcessMemory, OsError> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))
        .map_err(OsError::of("read a process's memory"))?;
    Ok(parse_smaps_rollup(&text))
}

/// CPU time in nanoseconds that all threads of process `pid` have used so far, in user and kernel mode.
///
/// # Errors
/// The process is gone.
pub fn cpu_time_ns(pid: u32) -> Result<u64, OsError> {
    let action = "read a process's CPU time";
    let raw_pid = libc::pid_t::try_from(pid).map_err(|_| OsError {
        action,
        source: std::io::ErrorKind::InvalidInput.into(),
    })?;
    let mut clock: libc::clockid_t = 0;
    // SAFETY: the pointer is to a live local of the right type.
    let errno = unsafe { libc::clock_getcpuclockid(raw_pid, &mut clock) };
    if errno != 0 {
        return Err(OsError {
            action,
            source: std::io::Error::from_raw_os_error(errno),
        });
    }
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a live local of the right type.
    if unsafe { libc::clock_gettime(clock, &mut time) } != 0 {
        return Err(OsError {
            action,
            source: std::io::Error::last_os_error(),
        });
    }
    Ok((time.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(time.tv_nsec as u64))
}

/// Names the calling thread; the main thread's name is the process's in `ps` and `top` (15 bytes show).
///
/// # Errors
/// The name contains a zero byte.
pub fn set_thread_name(name: &str) -> Result<(), OsError> {
    let action = "name a thread";
    let name = std::ffi::CString::new(name).map_err(|_| OsError {
        action,
        source: std::io::ErrorKind::InvalidInput.into(),
    })?;
    rustix::thread::set_name(&name).map_err(OsError::of(action))
}

/// Ends this process at once, whatever its other threads are doing: nothing is flushed, no destructor and no exit handler runs. For a
/// process that nobody waits for any more; an orderly exit may wait for a thread that is stuck.
pub fn exit_at_once(code: u8) -> ! {
    // SAFETY: takes a number and does not return; nothing of this process is used afterwards.
    unsafe { libc::_exit(libc::c_int::from(code)) }
}

fn parse_smaps_rollup(text: &str) -> ProcessMemory {
    let mut memory = ProcessMemory::default();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(key), Some(Ok(kib))) = (words.next(), words.next().map(str::parse::<u64>)) else {
            continue;
        };
        let bytes = kib.saturating_mul(1024);
        match key {
            "Rss:" => memory.rss_bytes = bytes,
            "Pss:" => memory.pss_bytes = bytes,
            "Private_Clean:" | "Private_Dirty:" => memory.private_bytes += bytes,
            _ => {}
        }
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollup_is_read_by_its_keys() {
        // Head of /proc/self/smaps_rollup of a shell on Linux 6.18.
        let text = "55d0c8e5f000-7ffd0b5f5000 ---p 00000000 00:00 0                          [rollup]\n\
                    Rss:                3496 kB\nPss:                1071 kB\nPss_Dirty:           652 kB\n\
                    Shared_Clean:       2844 kB\nPrivate_Clean:         4 kB\nPrivate_Dirty:       648 kB\n";
        let expected = ProcessMemory {
            rss_bytes: 3496 * 1024,
            pss_bytes: 1071 * 1024,
            private_bytes: 652 * 1024,
        };
        assert_eq!(parse_smaps_rollup(text), expected);
        assert_eq!(
            parse_smaps_rollup("Rss: many kB\n\nPss:"),
            ProcessMemory::default()
        );
    }

    #[test]
    fn this_process_has_memory_and_has_run() {
        let memory = memory_of(std::process::id()).unwrap();
        assert!(memory.rss_bytes >= memory.pss_bytes && memory.pss_bytes > 0);
        assert!(cpu_time_ns(std::process::id()).unwrap() > 0);
        assert!(memory_of(u32::MAX).is_err());
        assert!(cpu_time_ns(u32::MAX).is_err());
    }
}
