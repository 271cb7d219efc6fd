//! A pair of connected local sockets that keep message boundaries and carry descriptors.
//!
//! The first path between a parent and its child: hands over memory, carries small early messages, and
//! its end of file tells either side that the other is gone (the *lifeline*).

use crate::{Deadline, OsError, poll};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Longest message a [`Channel`] carries.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024;
/// Most descriptors one message carries.
pub const MAX_MESSAGE_FDS: usize = 16;

/// One end of a connected pair. Messages arrive whole, in order, once.
///
/// Sending and receiving take `&self`: two threads may use one end, each message goes to one of them.
#[derive(Debug)]
pub struct Channel(OwnedFd);

/// A message with the descriptors that came with it.
#[derive(Debug)]
pub struct Received {
    /// What the peer sent, 1 to [`MAX_MESSAGE_BYTES`] bytes.
    pub bytes: Vec<u8>,
    /// The descriptors, in the order sent; close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// Why a message was not sent or received.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The peer closed its end or its process is gone; earlier messages have all been received.
    #[error("the peer is gone")]
    Closed,
    /// The deadline passed.
    #[error("the peer did not answer in time")]
    TimedOut,
    /// Empty or too long.
    #[error("a message has 1 to {limit_bytes} bytes, this one has {message_bytes}")]
    BadSize {
        /// Its length.
        message_bytes: usize,
        /// The limit, [`MAX_MESSAGE_BYTES`].
        limit_bytes: usize,
    },
    /// More descriptors than one message carries.
    #[error("a message carries at most {limit} descriptors, this one has {n_fds}")]
    TooManyFds {
        /// How many it had (on receipt: at least this many).
        n_fds: usize,
        /// The limit, [`MAX_MESSAGE_FDS`].
        limit: usize,
    },
    /// The kernel refused.
    #[error(transparent)]
    Os(#[from] OsError),
}

impl Channel {
    /// Two connected ends.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn pair() -> Result<(Self, Self), OsError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (left, right) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(OsError::of("make a socket pair"))?;
        Ok((Self(left), Self(right)))
    }

    /// Takes over an inherited end.
    ///
    /// # Errors
    /// The descriptor is not one end of a [`Channel::pair`].
    pub fn from_fd(fd: OwnedFd) -> Result<Self, OsError> {
        let action = "take over a socket";
        let kind = rustix::net::sockopt::socket_type(&fd).map_err(OsError::of(action))?;
        let domain = rustix::net::sockopt::socket_domain(&fd).map_err(OsError::of(action))?;
        if kind != SocketType::SEQPACKET || domain != AddressFamily::UNIX {
            return Err(OsError {
                action,
                source: std::io::Error::other("not a local message socket"),
            });
        }
        rustix::io::ioctl_fionbio(&fd, true).map_err(OsError::of(action))?;
        Ok(Self(fd))
    }

    /// The descriptor, to be handed to a child.
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }

    /// Sends one message with copies of `fds`; waits while the peer's buffer is full.
    ///
    /// # Errors
    /// Nothing was sent: the peer is gone, the deadline passed, or a size is over its limit.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>], deadline: Deadline) -> Result<(), ChannelError> {
        if bytes.is_empty() || bytes.len() > MAX_MESSAGE_BYTES {
            return Err(ChannelError::BadSize {
                message_bytes: bytes.len(),
                limit_bytes: MAX_MESSAGE_BYTES,
            });
        }
        if fds.len() > MAX_MESSAGE_FDS {
            return Err(ChannelError::TooManyFds {
                n_fds: fds.len(),
                limit: MAX_MESSAGE_FDS,
            });
        }
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MESSAGE_FDS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                // The buffer has room for the limit checked above.
                ancillary.push(SendAncillaryMessage::ScmRights(fds));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(&self.0, &[IoSlice::new(bytes)], &mut ancillary, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN | Errno::CONNREFUSED) => {
                    return Err(ChannelError::Closed);
                }
                Err(errno) => return Err(OsError::of("send a message")(errno).into()),
            }
        }
    }

    /// Receives the next message.
    ///
    /// # Errors
    /// [`ChannelError::Closed`] once the peer is gone and all its messages have been received, the
    /// deadline passed, or a message over the limits came (it is dropped).
    pub fn receive(&self, deadline: Deadline) -> Result<Received, ChannelError> {
        let mut bytes = vec![0; MAX_MESSAGE_BYTES];
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MESSAGE_FDS))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let mut parts = [IoSliceMut::new(&mut bytes)];
            match rustix::net::recvmsg(&self.0, &mut parts, &mut ancillary, flags) {
                Ok(message) => {
                    let fds: Vec<OwnedFd> = ancillary
                        .drain()
                        .flat_map(|part| match part {
                            RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
                            _ => Vec::new(),
                        })
                        .collect();
                    if message.flags.contains(ReturnFlags::TRUNC) {
                        let message_bytes = message.bytes.max(MAX_MESSAGE_BYTES + 1);
                        return Err(ChannelError::BadSize {
                            message_bytes,
                            limit_bytes: MAX_MESSAGE_BYTES,
                        });
                    }
                    if message.flags.contains(ReturnFlags::CTRUNC) {
                        let n_fds = fds.len() + 1;
                        return Err(ChannelError::TooManyFds {
                            n_fds,
                            limit: MAX_MESSAGE_FDS,
                        });
                    }
                    if message.bytes == 0 {
                        return Err(ChannelError::Closed);
                    }
                    bytes.truncate(message.bytes);
                    bytes.shrink_to_fit();
                    return Ok(Received { bytes, fds });
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, deadline)?,
                Err(Errno::CONNRESET) => return Err(ChannelError::Closed),
                Err(errno) => return Err(OsError::of("receive a message")(errno).into()),
            }
        }
    }

    /// Waits until the peer is gone, whatever messages wait; false if the deadline passed first.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub fn wait_closed(&self, deadline: Deadline) -> Result<bool, OsError> {
        // Without any asked-for event, only hang-up and error end the wait.
        poll::wait(&[self.0.as_fd()], PollFlags::empty(), deadline).map(|ready| ready[0])
    }

    fn wait(&self, events: PollFlags, deadline: Deadline) -> Result<(), ChannelError> {
        if poll::wait(&[self.0.as_fd()], events, deadline)?[0] {
            return Ok(());
        }
        Err(ChannelError::TimedOut)
    }
}

/// Readable when a message waits or the peer is gone.
impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd::{Access, SealedMemory};

    fn soon() -> Deadline {
        Deadline::after_ms(60_000)
    }

    #[test]
    fn messages_keep_their_boundaries_and_descriptors() {
        let (left, right) = Channel::pair().unwrap();
        let memory = SealedMemory::create("test", 4096).unwrap();
        left.send(b"first", &[memory.as_fd(), memory.as_fd()], soon())
            .unwrap();
        left.send(&[7; MAX_MESSAGE_BYTES], &[], soon()).unwrap();
        let first = right.receive(soon()).unwrap();
        assert_eq!(
            (first.bytes.as_slice(), first.fds.len()),
            (b"first".as_slice(), 2)
        );
        for fd in first.fds {
            SealedMemory::from_fd(fd).unwrap().map(Access::ReadWrite).unwrap();
        }
        let second = right.receive(soon()).unwrap();
        assert_eq!((second.bytes.len(), second.fds.len()), (MAX_MESSAGE_BYTES, 0));
    }

    #[test]
    fn the_peers_end_is_reported_after_its_last_message() {
        let (left, right) = Channel::pair().unwrap();
        assert!(!right.wait_closed(Deadline::PASSED).unwrap());
        left.send(b"last words", &[], soon()).unwrap();
        drop(left);
        assert!(right.wait_closed(soon()).unwrap());
        assert_eq!(right.receive(soon()).unwrap().bytes, b"last words");
        assert!(matches!(right.receive(soon()), Err(ChannelError::Closed)));
        assert!(matches!(
            right.send(b"hello", &[], soon()),
            Err(ChannelError::Closed)
        ));
    }

    #[test]
    fn waits_end_at_their_deadline() {
        let (left, _right) = Channel::pair().unwrap();
        assert!(matches!(
            left.receive(Deadline::PASSED),
            Err(ChannelError::TimedOut)
        ));
        assert!(matches!(
            left.receive(Deadline::after_ms(10)),
            Err(ChannelError::TimedOut)
        ));
        let full = loop {
            if let Err(error) = left.send(&[0; MAX_MESSAGE_BYTES], &[], Deadline::after_ms(10)) {
                break error;
            }
        };
        assert!(matches!(full, ChannelError::TimedOut));
    }

    #[test]
    fn sizes_over_the_limits_are_refused_before_sending() {
        let (left, right) = Channel::pair().unwrap();
        assert!(matches!(
            left.send(b"", &[], soon()),
            Err(ChannelError::BadSize { message_bytes: 0, .. })
        ));
        let long = vec![0; MAX_MESSAGE_BYTES + 1];
        assert!(matches!(
            left.send(&long, &[], soon()),
            Err(ChannelError::BadSize { .. })
        ));
        let fds = vec![left.as_fd(); MAX_MESSAGE_FDS + 1];
        assert!(matches!(
            left.send(b"x", &fds, soon()),
            Err(ChannelError::TooManyFds { .. })
        ));
        left.send(b"x", &fds[1..], soon()).unwrap();
        assert_eq!(right.receive(soon()).unwrap().fds.len(), MAX_MESSAGE_FDS);
    }

    #[test]
    fn foreign_descriptors_are_refused() {
        let (stream, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(Channel::from_fd(stream.into()).is_err());
        assert!(Channel::from_fd(tempfile::tempfile().unwrap().into()).is_err());
    }
}
