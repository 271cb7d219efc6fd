//! Other ends of a test as processes: this test program, started again to play a part.

use denoised_os::Deadline;
use denoised_os::child::{Child, ExitStatus, Spawn, inherited_fd};
use denoised_os::socket::Channel;
use std::os::fd::{BorrowedFd, OwnedFd};

const PART: &str = "DENOISED_RING_TEST_PART";

/// A deadline that only a stuck test reaches.
pub(crate) fn soon() -> Deadline {
    Deadline::after_ms(300_000)
}

/// A process that plays a part, and the channel to it.
pub(crate) struct Peer {
    pub(crate) child: Child,
    pub(crate) channel: Channel,
}

impl Peer {
    /// Starts `child_main` of this test program with the part's name and descriptors.
    pub(crate) fn start(part: &str, fds: &[BorrowedFd<'_>]) -> Self {
        let (ours, theirs) = Channel::pair().unwrap();
        let spawn = Spawn::this_program()
            .unwrap()
            .arg("--exact")
            .arg("child_main")
            .arg("--nocapture");
        let child = spawn
            .env(PART, part)
            .pass_fd("test", theirs.into_fd())
            .start()
            .unwrap();
        ours.send(b"part", fds, soon()).unwrap();
        Self { child, channel: ours }
    }

    /// How it ended, and what it wrote to standard error.
    #[allow(dead_code, reason = "not every test program asks")]
    pub(crate) fn end(&mut self) -> (Option<ExitStatus>, String) {
        let status = self.child.wait(soon()).unwrap();
        let stderr = std::fs::File::from(self.child.take_stderr().unwrap());
        (status, std::io::read_to_string(stderr).unwrap())
    }

    /// What it says next; a peer that fails says what it failed with.
    pub(crate) fn hear(&mut self) -> String {
        match self.channel.receive(soon()) {
            Ok(received) => String::from_utf8(received.bytes).unwrap(),
            Err(error) => {
                let status = self.child.wait(soon());
                let stderr = std::fs::File::from(self.child.take_stderr().unwrap());
                let said = std::io::read_to_string(stderr).unwrap();
                panic!("{error}; the peer ended: {status:?}; it said: {said}");
            }
        }
    }
}

/// In a started peer: its part, channel and descriptors. `None` in the test program itself.
pub(crate) fn part() -> Option<(String, Channel, Vec<OwnedFd>)> {
    let part = std::env::var(PART).ok()?;
    let channel = Channel::from_fd(inherited_fd("test").unwrap()).unwrap();
    let fds = channel.receive(soon()).unwrap().fds;
    Some((part, channel, fds))
}
