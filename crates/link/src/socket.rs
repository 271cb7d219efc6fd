//! Each worker's own socket: handshake, control lane and lifeline in one.
//!
//! Control commands are few and tiny, so they need no ring; a rank that does not listen fills its own socket and nobody else's.
//! The first byte of each message says what follows: a handshake message or a command.

use crate::{BootSender, ControlInput, ControlReceiver, ControlSender, LinkError, SetupError};
use denoised_os::{
    Deadline, OsError,
    poll::wait_readable,
    signal::EndSignals,
    socket::{Channel, ChannelError, MAX_MESSAGE_BYTES, Received},
};
use denoised_wire::{
    BootDown, BootUp, Hello, decode_boot_down, decode_boot_up, encode_boot_down, encode_boot_up,
};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

/// Name under which a worker inherits its socket.
pub const INHERITED_NAME: &str = "LINK";

/// First argument of a program that is started to be a worker, unless its executor's options say otherwise.
pub const WORKER_ARG: &str = "worker-process";

/// Most bytes of a message on the control lane of any link.
pub const CONTROL_LIMIT_BYTES: usize = MAX_MESSAGE_BYTES - 1;

const HANDSHAKE: u8 = 0;
const COMMAND: u8 = 1;

/// How long a handshake message may wait for a full socket.
const BOOT_SEND_LIMIT_MS: u64 = 10_000;

/// The executor's end of one worker's socket. Dropping the last clone tells the worker that the executor is gone.
#[derive(Clone, Debug)]
pub struct BootChannel(Arc<Channel>);

impl BootChannel {
    /// A new socket, and the descriptor for the worker to inherit under [`INHERITED_NAME`].
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn pair() -> Result<(Self, OwnedFd), OsError> {
        let (ours, theirs) = Channel::pair()?;
        Ok((Self(Arc::new(ours)), theirs.into_fd()))
    }

    /// Sends the first message.
    ///
    /// # Errors
    /// The worker is gone, or the configuration is too long for a message.
    pub fn greet(&self, hello: Hello, fds: &[OwnedFd]) -> Result<(), LinkError> {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        self.send_down(&BootDown::Hello(hello), &fds)
    }

    /// Passes on what rank 0 published.
    ///
    /// # Errors
    /// The worker is gone.
    pub fn share(&self, weights: Option<BorrowedFd<'_>>) -> Result<(), LinkError> {
        let fds: Vec<BorrowedFd<'_>> = weights.into_iter().collect();
        self.send_down(
            &BootDown::SharedWeights {
                has_weights: weights.is_some(),
            },
            &fds,
        )
    }

    /// The next message of a starting worker if there is one now, with its descriptor.
    ///
    /// # Errors
    /// The worker is gone, or what it sent is no handshake message of this version.
    pub fn try_receive(&self) -> Result<Option<(BootUp, Option<OwnedFd>)>, SetupError> {
        let received = match self.0.receive(Deadline::PASSED) {
            Err(ChannelError::TimedOut) => return Ok(None),
            other => other.map_err(LinkError::from)?,
        };
        let message = decode_boot_up(strip(HANDSHAKE, &received)?)?;
        Ok(Some((message, received.fds.into_iter().next())))
    }

    fn send_down(&self, message: &BootDown, fds: &[BorrowedFd<'_>]) -> Result<(), LinkError> {
        let bytes = tagged(HANDSHAKE, &encode_boot_down(message));
        Ok(self.0.send(&bytes, fds, Deadline::after_ms(BOOT_SEND_LIMIT_MS))?)
    }
}

/// Readable when a message waits or the worker is gone.
impl AsFd for BootChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl ControlSender for BootChannel {
    fn send(&self, message: &[u8]) -> Result<(), LinkError> {
        match self.0.send(&tagged(COMMAND, message), &[], Deadline::PASSED) {
            Err(ChannelError::TimedOut) => Err(LinkError::Full { laggard: None }),
            other => Ok(other?),
        }
    }
}

/// The worker's end.
#[derive(Debug)]
pub(crate) struct WorkerSocket {
    channel: Arc<Channel>,
    signals: Option<EndSignals>,
}

impl WorkerSocket {
    pub(crate) fn new(channel: Channel, signals: Option<EndSignals>) -> Self {
        Self {
            channel: Arc::new(channel),
            signals,
        }
    }

    /// Waits for the first message and its descriptors.
    pub(crate) fn hello(&self, deadline: Deadline) -> Result<(Hello, Vec<OwnedFd>), SetupError> {
        let received = self.channel.receive(deadline).map_err(LinkError::from)?;
        match decode_boot_down(strip(HANDSHAKE, &received)?)? {
            BootDown::Hello(hello) => Ok((hello, received.fds)),
            other => Err(SetupError::Unexpected {
                expected: "a hello",
                got: format!("{other:?}"),
            }),
        }
    }

    pub(crate) fn boot_sender(&self) -> Box<dyn BootSender> {
        Box::new(WorkerBoot(Arc::clone(&self.channel)))
    }
}

impl ControlReceiver for WorkerSocket {
    fn receive(&mut self, deadline: Deadline) -> Result<ControlInput, LinkError> {
        let refused = |error: OsError| LinkError::Refused(error.to_string());
        loop {
            let mut fds = vec![self.channel.as_fd()];
            fds.extend(self.signals.as_ref().map(AsFd::as_fd));
            let ready = wait_readable(&fds, deadline).map_err(refused)?;
            if ready.get(1) == Some(&true)
                && let Some(signal) = self.signals.as_ref().and_then(|signals| signals.take().pop())
            {
                return Ok(ControlInput::Terminate(signal));
            }
            match self.channel.receive(Deadline::PASSED) {
                Ok(received) => match received.bytes.split_first() {
                    Some((&COMMAND, message)) => return Ok(ControlInput::Message(message.to_vec())),
                    _ => {
                        let message = strip(HANDSHAKE, &received)
                            .and_then(|bytes| decode_boot_down(bytes).map_err(|error| corrupt(&error)));
                        if let BootDown::SharedWeights { .. } = message? {
                            return Ok(ControlInput::Shared(received.fds.into_iter().next()));
                        }
                        return Err(LinkError::Corrupt {
                            what: "a second hello".to_owned(),
                        });
                    }
                },
                Err(ChannelError::Closed) => return Ok(ControlInput::Gone),
                Err(ChannelError::TimedOut) if deadline.has_passed() => return Err(LinkError::TimedOut),
                Err(ChannelError::TimedOut) => {}
                Err(other) => return Err(other.into()),
            }
        }
    }
}

#[derive(Debug)]
struct WorkerBoot(Arc<Channel>);

impl BootSender for WorkerBoot {
    fn send(&self, message: &BootUp, fd: Option<BorrowedFd<'_>>) -> Result<(), LinkError> {
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        let bytes = tagged(HANDSHAKE, &encode_boot_up(message));
        match self.0.send(&bytes, &fds, Deadline::after_ms(BOOT_SEND_LIMIT_MS)) {
            Err(ChannelError::TimedOut) => Err(LinkError::Full { laggard: None }),
            other => Ok(other?),
        }
    }
}

fn tagged(tag: u8, message: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1 + message.len());
    bytes.push(tag);
    bytes.extend_from_slice(message);
    bytes
}

fn strip(tag: u8, received: &Received) -> Result<&[u8], LinkError> {
    match received.bytes.split_first() {
        Some((&found, message)) if found == tag => Ok(message),
        _ => Err(LinkError::Corrupt {
            what: "a message of an unknown kind on the socket".to_owned(),
        }),
    }
}

fn corrupt(error: &dyn std::error::Error) -> LinkError {
    LinkError::Corrupt {
        what: error.to_string(),
    }
}
