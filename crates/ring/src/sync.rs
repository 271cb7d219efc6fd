//! Atomics, fences and the futex word, from `std` or from loom: the one place that says which.
//!
//! Under `--cfg loom` the same protocol code runs on loom's model of memory, where a futex is a mutex with
//! a condition variable, time stands still and nothing spins.

pub(crate) use imp::*;

#[cfg(not(loom))]
mod imp {
    pub(crate) use denoised_os::futex::WaitEnd;
    use denoised_os::{Deadline, futex};
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    /// Orders everything before it against everything after it, with all other such fences.
    #[inline]
    pub(crate) fn fence() {
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    #[inline]
    pub(crate) fn now_ns() -> u64 {
        denoised_os::now_ns()
    }

    #[inline]
    pub(crate) fn has_passed(deadline: Deadline) -> bool {
        deadline.has_passed()
    }

    /// Whether a fault is wanted here; only the model checker has any.
    #[inline]
    pub(crate) fn bumps_before_clearing() -> bool {
        false
    }

    pub(crate) const MAY_SPIN: bool = true;

    /// A word to sleep on.
    #[derive(Debug, Default)]
    #[repr(transparent)]
    pub(crate) struct FutexWord(AtomicU32);

    impl FutexWord {
        pub(crate) fn load(&self) -> u32 {
            self.0.load(Ordering::Acquire)
        }

        pub(crate) fn bump(&self) {
            self.0.fetch_add(1, Ordering::AcqRel);
        }

        pub(crate) fn wait(&self, expected: u32, deadline: Deadline) -> WaitEnd {
            futex::wait(&self.0, expected, deadline)
        }

        pub(crate) fn wake_all(&self) {
            futex::wake(&self.0, u32::MAX);
        }
    }
}

#[cfg(loom)]
mod imp {
    use denoised_os::Deadline;
    pub(crate) use denoised_os::futex::WaitEnd;
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    use loom::sync::{Condvar, Mutex};
    use std::sync::OnceLock;

    /// The fault named by the environment: each must make the model deadlock, or the model proves nothing.
    fn fault() -> &'static str {
        static FAULT: OnceLock<String> = OnceLock::new();
        FAULT.get_or_init(|| std::env::var("DENOISED_LOOM_FAULT").unwrap_or_default())
    }

    pub(crate) fn fence() {
        if fault() != "no-fences" {
            loom::sync::atomic::fence(Ordering::SeqCst);
        }
    }

    pub(crate) fn now_ns() -> u64 {
        0
    }

    pub(crate) fn has_passed(deadline: Deadline) -> bool {
        deadline == Deadline::PASSED
    }

    pub(crate) fn bumps_before_clearing() -> bool {
        fault() == "bump-before-clear"
    }

    pub(crate) const MAY_SPIN: bool = false;

    /// The kernel's contract: to compare and to fall asleep is one step against a wake.
    #[derive(Debug)]
    pub(crate) struct FutexWord {
        word: AtomicU32,
        mutex: Mutex<()>,
        condition: Condvar,
    }

    impl Default for FutexWord {
        fn default() -> Self {
            Self {
                word: AtomicU32::new(0),
                mutex: Mutex::new(()),
                condition: Condvar::new(),
            }
        }
    }

    impl FutexWord {
        pub(crate) fn load(&self) -> u32 {
            self.word.load(Ordering::Acquire)
        }

        pub(crate) fn bump(&self) {
            self.word.fetch_add(1, Ordering::AcqRel);
        }

        /// Never times out: a lost wake-up is a deadlock, which loom reports.
        pub(crate) fn wait(&self, expected: u32, _deadline: Deadline) -> WaitEnd {
            let guard = self.mutex.lock().expect("no thread panics with the lock");
            if self.word.load(Ordering::Relaxed) != expected {
                return WaitEnd::Changed;
            }
            drop(
                self.condition
                    .wait(guard)
                    .expect("no thread panics with the lock"),
            );
            WaitEnd::Woken
        }

        pub(crate) fn wake_all(&self) {
            let _guard = self.mutex.lock().expect("no thread panics with the lock");
            self.condition.notify_all();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    /// An atomic that loom does not see would be left out of the model without a word.
    #[test]
    fn no_other_module_names_the_atomics_of_std() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut n_files = 0;
        for entry in std::fs::read_dir(folder).expect("the sources are there") {
            let path = entry.expect("a readable folder").path();
            let text = std::fs::read_to_string(&path).expect("a source file");
            let may = path.ends_with("sync.rs");
            assert!(may || !text.contains("sync::atomic"), "{}", path.display());
            n_files += 1;
        }
        assert!(n_files > 8, "only {n_files} files seen");
    }
}
