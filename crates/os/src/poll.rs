//! Readiness of several descriptors at once, and a descriptor that a thread can be woken by.

use crate::{Deadline, OsError};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Waits until at least one of `fds` is readable, hung up or in error, or until the deadline.
///
/// Returns one flag per descriptor, in order; all false means that the deadline passed. A pidfd is
/// readable once its process has ended, a [`crate::socket::Channel`] when a message waits or the peer
/// is gone, a [`Wakeup`] after [`Wakeup::ring`].
///
/// # Errors
/// The kernel refuses the call (too many descriptors).
pub fn wait_readable(fds: &[BorrowedFd<'_>], deadline: Deadline) -> Result<Vec<bool>, OsError> {
    wait(fds, PollFlags::IN, deadline)
}

pub(crate) fn wait(
    fds: &[BorrowedFd<'_>],
    events: PollFlags,
    deadline: Deadline,
) -> Result<Vec<bool>, OsError> {
    let mut polled: Vec<PollFd<'_>> = fds
        .iter()
        .map(|fd| PollFd::from_borrowed_fd(*fd, events))
        .collect();
    loop {
        match rustix::event::poll(&mut polled, Some(&deadline.remaining_timespec())) {
            Ok(_) => return Ok(polled.iter().map(|fd| !fd.revents().is_empty()).collect()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(OsError::of("wait for descriptors")(errno)),
        }
    }
}

/// A descriptor that any thread can make readable: wakes a thread that waits in [`wait_readable`].
#[derive(Debug)]
pub struct Wakeup(OwnedFd);

impl Wakeup {
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> Result<Self, OsError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        eventfd(0, flags)
            .map(Self)
            .map_err(OsError::of("make an event descriptor"))
    }

    /// Makes the descriptor readable until [`Wakeup::clear`].
    pub fn ring(&self) {
        // Only a full counter can refuse, and then the descriptor is readable already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable again. Clear first, then look at what was announced.
    pub fn clear(&self) {
        // An empty counter refuses: it was clear already.
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rung_wakeup_is_readable_until_cleared() {
        let (first, second) = (Wakeup::new().unwrap(), Wakeup::new().unwrap());
        let fds = [first.as_fd(), second.as_fd()];
        assert_eq!(wait_readable(&fds, Deadline::PASSED).unwrap(), [false, false]);
        second.ring();
        second.ring();
        assert_eq!(
            wait_readable(&fds, Deadline::after_ms(60_000)).unwrap(),
            [false, true]
        );
        second.clear();
        assert_eq!(
            wait_readable(&fds, Deadline::after_ms(5)).unwrap(),
            [false, false]
        );
    }
}
