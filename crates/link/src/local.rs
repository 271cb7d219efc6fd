//! The link within a process, for one worker on a thread: the same rules over queues and locks.
//!
//! It has the limits of the ring link (queues bounded in bytes, largest message), so that a program that works here works there.

use crate::{
    Blob, BootSender, CONTROL_LIMIT_BYTES, ControlInput, ControlReceiver, ControlSender, DataReceiver,
    DataSender, EventReceiver, EventSender, Evictor, ExecutorEnd, Idle, Interrupter, LinkError, LinkSpec,
    RankSet, Received, SetupError, Waiting, WorkerEnd,
};
use denoised_os::Deadline;
use denoised_ring::{Doorbell, DoorbellWaiter, Wait};
use denoised_types::{Epoch, Rank, WorkerConfig};
use denoised_wire::{BootUp, Hello};
use std::{
    collections::VecDeque,
    ops::ControlFlow,
    os::fd::BorrowedFd,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

/// How long a waiting send sleeps before it calls back.
const SLICE: Duration = Duration::from_millis(2);
/// Most control messages that wait.
const MAX_CONTROL_MESSAGES: usize = 1024;
/// Most start-up messages that wait.
const MAX_BOOT_MESSAGES: usize = 1024;
/// What a queued message costs beside its bytes.
const MESSAGE_OVERHEAD_BYTES: usize = 64;

/// The executor's view of a starting worker on a thread.
#[derive(Debug)]
pub struct LocalBoot(mpsc::Receiver<BootUp>);

impl LocalBoot {
    /// The next message of the starting worker.
    ///
    /// # Errors
    /// [`LinkError::TimedOut`], or [`LinkError::Closed`] once the worker has dropped its end.
    pub fn receive(&self, deadline: Deadline) -> Result<BootUp, LinkError> {
        self.0
            .recv_timeout(deadline.remaining())
            .map_err(|error| match error {
                mpsc::RecvTimeoutError::Timeout => LinkError::TimedOut,
                mpsc::RecvTimeoutError::Disconnected => LinkError::Closed,
            })
    }
}

/// Both ends of a world of one worker in this process.
///
/// # Errors
/// [`SetupError::BadSpec`].
pub fn local_link(
    spec: LinkSpec,
    epoch: Epoch,
    config: WorkerConfig,
) -> Result<(ExecutorEnd, LocalBoot, WorkerEnd), SetupError> {
    spec.check(1)?;
    let spin_ns = spec.spin.spin_ns(1);
    let hello = Hello {
        epoch,
        rank: Rank(0),
        world_size: 1,
        config,
        fds: Vec::new(),
        // At most 16 KiB (`LinkSpec::check`).
        inline_limit_bytes: spec.inline_limit_bytes as u32,
        spin_ns,
        event_send_limit_ms: spec.event_send_limit_ms,
    };
    let commands = Queue::new(spec.command_ring_bytes + spec.command_arena_bytes, usize::MAX);
    let control = Queue::new(usize::MAX, MAX_CONTROL_MESSAGES);
    let events = Queue::new(spec.event_ring_bytes + spec.event_arena_bytes, usize::MAX);
    let (doorbell, waiter) = Doorbell::local();
    let interrupted = Arc::new(AtomicBool::new(false));
    let (boot_sender, boot_receiver) = mpsc::sync_channel(MAX_BOOT_MESSAGES);
    let executor = ExecutorEnd {
        data: Box::new(LocalCommands {
            queue: Arc::clone(&commands),
            limit_bytes: spec.command_arena_bytes,
        }),
        control: vec![Box::new(LocalControl(Arc::clone(&control)))],
        events: Box::new(LocalEvents {
            queue: Arc::clone(&events),
            waiter,
            wait: if spin_ns == 0 {
                Wait::Sleep
            } else {
                Wait::Spin { spin_ns }
            },
            interrupted: Arc::clone(&interrupted),
        }),
        interrupter: {
            let doorbell = doorbell.clone();
            Interrupter(Arc::new(move || {
                interrupted.store(true, Ordering::Release);
                doorbell.ring();
            }))
        },
        evictor: {
            let commands = Arc::clone(&commands);
            Evictor(Arc::new(move |_| commands.close()))
        },
    };
    let worker = WorkerEnd {
        hello,
        boot: Box::new(LocalBootSender(boot_sender)),
        data: Box::new(LocalData(commands)),
        control: Box::new(LocalControlReceiver(control)),
        events: Arc::new(LocalEventSender {
            queue: events,
            doorbell,
            limit_bytes: spec.event_arena_bytes,
        }),
    };
    Ok((executor, LocalBoot(boot_receiver), worker))
}

/// A queue bounded in bytes and messages.
#[derive(Debug)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
    max_bytes: usize,
    max_messages: usize,
}

#[derive(Debug, Default)]
struct QueueState {
    messages: VecDeque<Received>,
    n_bytes: usize,
    closed: bool,
    interrupted: bool,
}

fn cost(received: &Received) -> usize {
    let blobs: usize = received
        .blobs
        .iter()
        .map(|blob| blob.len() + MESSAGE_OVERHEAD_BYTES)
        .sum();
    received.message.len() + MESSAGE_OVERHEAD_BYTES + blobs
}

impl Queue {
    fn new(max_bytes: usize, max_messages: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            max_bytes,
            max_messages,
        })
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        // Nothing that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, received: Received, deadline: Deadline, idle: Idle<'_>) -> Result<(), LinkError> {
        let n_bytes = cost(&received);
        loop {
            let mut state = self.lock();
            if state.closed {
                return Err(LinkError::Closed);
            }
            let fits = state.n_bytes.saturating_add(n_bytes) <= self.max_bytes || state.messages.is_empty();
            if fits && state.messages.len() < self.max_messages {
                state.n_bytes += n_bytes;
                state.messages.push_back(received);
                drop(state);
                self.changed.notify_all();
                return Ok(());
            }
            drop(state);
            if idle() == ControlFlow::Break(()) {
                return Err(LinkError::Interrupted);
            }
            if deadline.has_passed() {
                return Err(LinkError::Full { laggard: None });
            }
            let state = self.lock();
            let _ = self.changed.wait_timeout(state, SLICE.min(deadline.remaining()));
        }
    }

    fn try_pop(&self) -> Result<Option<Received>, LinkError> {
        let mut state = self.lock();
        match state.messages.pop_front() {
            Some(received) => {
                state.n_bytes -= cost(&received);
                drop(state);
                self.changed.notify_all();
                Ok(Some(received))
            }
            None if state.closed => Err(LinkError::Closed),
            None => Ok(None),
        }
    }

    fn pop(&self, deadline: Deadline) -> Result<Received, LinkError> {
        loop {
            if let Some(received) = self.try_pop()? {
                return Ok(received);
            }
            let state = self.lock();
            if !state.messages.is_empty() || state.closed {
                continue;
            }
            if state.interrupted {
                return Err(LinkError::Interrupted);
            }
            if deadline.has_passed() {
                return Err(LinkError::TimedOut);
            }
            let _ = self.changed.wait_timeout(state, deadline.remaining());
        }
    }

    fn is_empty(&self) -> bool {
        self.lock().messages.is_empty()
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    fn interrupt(&self) {
        self.lock().interrupted = true;
        self.changed.notify_all();
    }
}

fn received(message: &[u8], blobs: &[&[u8]]) -> Received {
    let blob = |bytes: &[u8]| Blob::owned(bytes.to_vec());
    Received {
        message: blob(message),
        blobs: blobs.iter().map(|bytes| blob(bytes)).collect(),
    }
}

fn check_size(
    message: &[u8],
    blobs: &[&[u8]],
    limit_bytes: usize,
    limited_by: &'static str,
) -> Result<(), LinkError> {
    let message_bytes = blobs
        .iter()
        .fold(message.len(), |sum, blob| sum.saturating_add(blob.len()));
    if message_bytes > limit_bytes {
        let (message_bytes, limit_bytes) = (message_bytes as u64, limit_bytes as u64);
        return Err(LinkError::TooLarge {
            message_bytes,
            limit_bytes,
            limited_by,
        });
    }
    Ok(())
}

#[derive(Debug)]
struct LocalCommands {
    queue: Arc<Queue>,
    limit_bytes: usize,
}

impl DataSender for LocalCommands {
    fn send(
        &mut self,
        to: RankSet,
        message: &[u8],
        blobs: &[&[u8]],
        deadline: Deadline,
        idle: Idle<'_>,
    ) -> Result<(), LinkError> {
        check_size(message, blobs, self.limit_bytes, "command_arena_bytes")?;
        if !to.contains(Rank(0)) {
            return Ok(());
        }
        self.queue.push(received(message, blobs), deadline, idle)
    }
}

impl Drop for LocalCommands {
    fn drop(&mut self) {
        self.queue.close();
    }
}

#[derive(Debug)]
struct LocalData(Arc<Queue>);

impl DataReceiver for LocalData {
    fn receive(&mut self, deadline: Deadline) -> Result<Received, LinkError> {
        self.0.pop(deadline)
    }

    fn try_receive(&mut self) -> Result<Option<Received>, LinkError> {
        self.0.try_pop()
    }

    fn interrupter(&self) -> Interrupter {
        let queue = Arc::clone(&self.0);
        Interrupter(Arc::new(move || queue.interrupt()))
    }
}

impl Drop for LocalData {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[derive(Debug)]
struct LocalControl(Arc<Queue>);

impl ControlSender for LocalControl {
    fn send(&self, message: &[u8]) -> Result<(), LinkError> {
        check_size(message, &[], CONTROL_LIMIT_BYTES, "control message")?;
        self.0.push(received(message, &[]), Deadline::PASSED, &mut || {
            ControlFlow::Continue(())
        })
    }
}

impl Drop for LocalControl {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[derive(Debug)]
struct LocalControlReceiver(Arc<Queue>);

impl ControlReceiver for LocalControlReceiver {
    fn receive(&mut self, deadline: Deadline) -> Result<ControlInput, LinkError> {
        match self.0.pop(deadline) {
            Ok(received) => Ok(ControlInput::Message(received.message.into_vec())),
            Err(LinkError::Closed) => Ok(ControlInput::Gone),
            Err(other) => Err(other),
        }
    }
}

impl Drop for LocalControlReceiver {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[derive(Debug)]
struct LocalEventSender {
    queue: Arc<Queue>,
    doorbell: Doorbell,
    limit_bytes: usize,
}

impl EventSender for LocalEventSender {
    fn limit_bytes(&self) -> usize {
        self.limit_bytes
    }

    fn send(
        &self,
        message: &[u8],
        blobs: &[&[u8]],
        deadline: Deadline,
        idle: Idle<'_>,
    ) -> Result<(), LinkError> {
        check_size(message, blobs, self.limit_bytes, "event_arena_bytes")?;
        self.push(message, blobs, deadline, idle)?;
        self.doorbell.ring();
        Ok(())
    }

    fn send_quietly(&self, message: &[u8], deadline: Deadline, idle: Idle<'_>) -> Result<(), LinkError> {
        check_size(message, &[], self.limit_bytes, "event_arena_bytes")?;
        self.push(message, &[], deadline, idle)
    }
}

impl LocalEventSender {
    /// Queues the message; an executor that sleeps beside a full queue is woken.
    fn push(
        &self,
        message: &[u8],
        blobs: &[&[u8]],
        deadline: Deadline,
        idle: Idle<'_>,
    ) -> Result<(), LinkError> {
        let mut ring_and_idle = || {
            self.doorbell.ring();
            idle()
        };
        self.queue
            .push(received(message, blobs), deadline, &mut ring_and_idle)
    }
}

#[derive(Debug)]
struct LocalEvents {
    queue: Arc<Queue>,
    waiter: DoorbellWaiter,
    wait: Wait,
    interrupted: Arc<AtomicBool>,
}

impl EventReceiver for LocalEvents {
    fn drain(&mut self, sink: &mut dyn FnMut(Rank, Received)) -> Result<usize, (Rank, LinkError)> {
        let mut n_events = 0;
        while n_events < MAX_CONTROL_MESSAGES
            && let Ok(Some(received)) = self.queue.try_pop()
        {
            sink(Rank(0), received);
            n_events += 1;
        }
        Ok(n_events)
    }

    fn wait(&mut self, deadline: Deadline) -> Waiting {
        let Self {
            queue,
            waiter,
            wait,
            interrupted,
        } = self;
        let mut is_first_look = true;
        let found = waiter.wait(*wait, deadline, || {
            // What was not announced by a ring must not end a sleep, or it would look like a ring that got lost.
            let is_first = std::mem::replace(&mut is_first_look, false);
            if !queue.is_empty() && (is_first || !deadline.has_passed()) {
                return Some(Waiting::Ready);
            }
            (interrupted.load(Ordering::Acquire) && interrupted.swap(false, Ordering::AcqRel))
                .then_some(Waiting::Interrupted)
        });
        found.unwrap_or(Waiting::TimedOut)
    }
}

impl Drop for LocalEvents {
    fn drop(&mut self) {
        self.queue.close();
    }
}

#[derive(Debug)]
struct LocalBootSender(mpsc::SyncSender<BootUp>);

impl BootSender for LocalBootSender {
    fn send(&self, message: &BootUp, _fd: Option<BorrowedFd<'_>>) -> Result<(), LinkError> {
        self.0.try_send(message.clone()).map_err(|error| match error {
            mpsc::TrySendError::Full(_) => LinkError::Full { laggard: None },
            mpsc::TrySendError::Disconnected(_) => LinkError::Closed,
        })
    }
}
