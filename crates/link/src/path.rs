//! The ends of a link, as traits: what `ring` and `local` both are.

use crate::{LinkError, RankSet, Received};
use denoised_os::{Deadline, signal::Signal};
use denoised_types::Rank;
use denoised_wire::{BootUp, Hello};
use std::{
    fmt,
    ops::ControlFlow,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

/// Called every few milliseconds while a send waits for room; a break ends the wait with [`LinkError::Interrupted`].
pub type Idle<'a> = &'a mut dyn FnMut() -> ControlFlow<()>;

/// The executor's end.
#[derive(Debug)]
pub struct ExecutorEnd {
    /// The data lane to all ranks.
    pub data: Box<dyn DataSender>,
    /// The control lane to each rank, by rank.
    pub control: Vec<Box<dyn ControlSender>>,
    /// The events of all ranks.
    pub events: Box<dyn EventReceiver>,
    /// Ends a wait of `events`.
    pub interrupter: Interrupter,
    /// Stops waiting for ranks that are gone.
    pub evictor: Evictor,
}

/// Removes a rank that is known to be gone: a send that waits for it waits no longer, and its blobs are freed.
#[derive(Clone)]
pub struct Evictor(pub(crate) Arc<dyn Fn(Rank) + Send + Sync>);

impl Evictor {
    /// Removes `rank`, whose process or thread has ended.
    pub fn evict(&self, rank: Rank) {
        (self.0)(rank);
    }
}

impl fmt::Debug for Evictor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Evictor")
    }
}

/// A worker's end.
#[derive(Debug)]
pub struct WorkerEnd {
    /// Who the worker is and what it shall do.
    pub hello: Hello,
    /// The way up until the worker is ready.
    pub boot: Box<dyn BootSender>,
    /// The data lane.
    pub data: Box<dyn DataReceiver>,
    /// The control lane.
    pub control: Box<dyn ControlReceiver>,
    /// The way up for events.
    pub events: Arc<dyn EventSender>,
}

/// Ends a wait on another thread. A use that comes before the wait is not lost.
#[derive(Clone)]
pub struct Interrupter(pub(crate) Arc<dyn Fn() + Send + Sync>);

impl Interrupter {
    /// Ends the wait.
    pub fn interrupt(&self) {
        (self.0)();
    }
}

impl fmt::Debug for Interrupter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interrupter")
    }
}

/// Broadcasts on the data lane.
pub trait DataSender: Send + fmt::Debug {
    /// Sends a message with its blobs to the ranks in `to`; the others never see it.
    ///
    /// # Errors
    /// [`LinkError::TooLarge`], [`LinkError::Full`], [`LinkError::Interrupted`] by `idle`, or [`LinkError::Closed`] if no rank is
    /// left to read. Nothing was sent then.
    fn send(
        &mut self,
        to: RankSet,
        message: &[u8],
        blobs: &[&[u8]],
        deadline: Deadline,
        idle: Idle<'_>,
    ) -> Result<(), LinkError>;
}

/// Receives from the data lane what is addressed to this rank.
pub trait DataReceiver: Send + fmt::Debug {
    /// The next message, waiting for it.
    ///
    /// # Errors
    /// [`LinkError::TimedOut`], [`LinkError::Interrupted`], [`LinkError::Closed`], [`LinkError::Corrupt`].
    fn receive(&mut self, deadline: Deadline) -> Result<Received, LinkError>;

    /// The next message if there is one now.
    ///
    /// # Errors
    /// As [`DataReceiver::receive`], but never `TimedOut`.
    fn try_receive(&mut self) -> Result<Option<Received>, LinkError>;

    /// Ends [`DataReceiver::receive`] from another thread, and every later one that would have to wait.
    fn interrupter(&self) -> Interrupter;
}

/// Sends on the control lane of one rank.
pub trait ControlSender: Send + Sync + fmt::Debug {
    /// Sends a message without blobs. Never waits: a rank whose lane is full does not listen.
    ///
    /// # Errors
    /// [`LinkError::Full`], [`LinkError::Closed`], [`LinkError::TooLarge`].
    fn send(&self, message: &[u8]) -> Result<(), LinkError>;
}

/// What arrives on a worker's control lane.
#[derive(Debug)]
pub enum ControlInput {
    /// A command.
    Message(Vec<u8>),
    /// What rank 0 published, for a starting worker.
    Shared(Option<OwnedFd>),
    /// The process was asked to end, by this signal.
    Terminate(Signal),
    /// The executor is gone.
    Gone,
}

/// Receives from the control lane.
pub trait ControlReceiver: Send + fmt::Debug {
    /// The next input, waiting for it.
    ///
    /// # Errors
    /// [`LinkError::TimedOut`], or the kernel's refusal.
    fn receive(&mut self, deadline: Deadline) -> Result<ControlInput, LinkError>;
}

/// Sends events of one rank. Any thread of the worker may.
pub trait EventSender: Send + Sync + fmt::Debug {
    /// Most bytes of a message with its blobs.
    fn limit_bytes(&self) -> usize;

    /// Sends a message with its blobs; blobs too large for a record are copied once, into the arena.
    ///
    /// # Errors
    /// As [`DataSender::send`].
    fn send(
        &self,
        message: &[u8],
        blobs: &[&[u8]],
        deadline: Deadline,
        idle: Idle<'_>,
    ) -> Result<(), LinkError>;

    /// Sends a short message that may be seen a little later: a sleeping executor is not woken, which costs more than all the rest.
    /// It looks by itself now and then while it expects such messages, and finds it with the next one that wakes it.
    ///
    /// # Errors
    /// As [`DataSender::send`].
    fn send_quietly(&self, message: &[u8], deadline: Deadline, idle: Idle<'_>) -> Result<(), LinkError>;
}

/// Sends the messages of a starting worker.
pub trait BootSender: Send + Sync + fmt::Debug {
    /// Sends one, with a descriptor where the message says so.
    ///
    /// # Errors
    /// [`LinkError::Closed`] if the executor is gone, [`LinkError::Full`] if it does not listen.
    fn send(&self, message: &BootUp, fd: Option<BorrowedFd<'_>>) -> Result<(), LinkError>;
}

/// How a wait of an [`EventReceiver`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// There is an event.
    Ready,
    /// It was interrupted.
    Interrupted,
    /// The deadline passed.
    TimedOut,
}

/// Receives the events of all ranks. Each rank's events stay in order; there is no order between ranks.
pub trait EventReceiver: Send + fmt::Debug {
    /// Hands every event that is there now to `sink`, at most a bounded number; returns how many it were.
    ///
    /// # Errors
    /// The rank whose path is damaged; the other ranks' events are still received.
    fn drain(&mut self, sink: &mut dyn FnMut(Rank, Received)) -> Result<usize, (Rank, LinkError)>;

    /// Waits until there is an event. Spins first where the policy says so. Events that were sent quietly end the wait only if they are
    /// there at its beginning; drain after a timeout too where they are expected.
    fn wait(&mut self, deadline: Deadline) -> Waiting;
}
