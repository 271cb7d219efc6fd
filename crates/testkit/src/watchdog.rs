//! Ends a test program that hangs, and says where.

use std::{
    io::Write,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Aborts the program unless it is dropped in time.
#[derive(Debug)]
pub struct Watchdog(Arc<(Mutex<bool>, Condvar)>);

impl Watchdog {
    /// Watches over the test `name` for `limit`, which should be many times what it takes.
    pub fn new(name: &str, limit: Duration) -> Self {
        let shared = Arc::new((Mutex::new(false), Condvar::new()));
        let watched = Arc::clone(&shared);
        let name = name.to_owned();
        std::thread::spawn(move || {
            let (is_over, changed) = &*watched;
            let end = Instant::now() + limit;
            let mut is_over = is_over.lock().unwrap_or_else(PoisonError::into_inner);
            while !*is_over {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    dump(&name, limit);
                    std::process::abort();
                }
                is_over = changed
                    .wait_timeout(is_over, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
        });
        Self(shared)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.1.notify_all();
    }
}

/// Where every thread of this process is.
fn dump(name: &str, limit: Duration) {
    let mut err = std::io::stderr().lock();
    let _ = writeln!(err, "watchdog: `{name}` has not ended after {limit:?}; threads:");
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else {
        return;
    };
    for thread in threads.flatten() {
        let read = |file: &str| std::fs::read_to_string(thread.path().join(file)).unwrap_or_default();
        let state = read("stat")
            .rsplit_once(')')
            .map(|(_, rest)| rest.trim_start().chars().take(1).collect::<String>());
        let _ = writeln!(
            err,
            "  {} {} state {} in {} ({})",
            thread.file_name().to_string_lossy(),
            read("comm").trim(),
            state.unwrap_or_default(),
            read("wchan").trim(),
            read("syscall").trim(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_ends_is_left_alone() {
        drop(Watchdog::new("quick", Duration::from_millis(50)));
        std::thread::sleep(Duration::from_millis(150));
    }
}
