//! Whether the standard output was open when the program was started.
//!
//! The standard library's runtime opens `/dev/null` in the place of a closed descriptor before `main`, so that what is written to it is
//! lost without an error. This looks before that, from the list of functions that the loader calls first.

use std::sync::atomic::{AtomicBool, Ordering};

static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Calls [`look`] before the runtime of the standard library starts.
#[used]
// SAFETY: the loader calls every pointer in this section once, on the main thread, as a function of the C calling convention; what it
// passes (argc, argv, envp) may be ignored. `look` needs nothing that is set up later.
#[unsafe(link_section = ".init_array")]
static FIRST: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: takes no pointer; any number is allowed.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    WAS_CLOSED.store(flags == -1, Ordering::Relaxed);
}

/// Whether descriptor 1 was closed when the process began: what is written there now reaches nobody.
pub fn stdout_was_closed() -> bool {
    WAS_CLOSED.load(Ordering::Relaxed)
}
