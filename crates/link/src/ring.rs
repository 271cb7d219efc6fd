//! The link between processes: one ring of commands that all ranks read, one ring of events per rank, an arena on either side.
//!
//! A record is a table of parts and the short parts themselves; part 0 is the message, the others are its blobs in order. Long parts
//! lie in the sender's arena. All numbers are little-endian:
//!
//! ```text
//! to        u64   a bit per rank that shall read it (commands) or 1 (events: rank 0 of the executor's side)
//! n_parts   u16, then 6 zero bytes
//! n_parts × { len u64, arena u32 (all ones: inline), block u32, generation u32, 4 zero bytes }
//! inline parts, one after the other
//! ```
//!
//! R6. Room in the ring is reserved before blocks of the arena are published, so a message that cannot be sent leaves nothing held.

use crate::{
    Blob, BootChannel, ControlSender, DataReceiver, DataSender, EventReceiver, EventSender, Evictor,
    ExecutorEnd, Idle, Interrupter, LinkError, LinkSpec, RankSet, Received, SetupError, Waiting, WorkerEnd,
    socket::WorkerSocket, spec::RECORD_LIMIT_BYTES,
};
use denoised_os::{
    Deadline,
    memory_budget::{self, Available, LimitedBy},
    signal::EndSignals,
    socket::Channel,
};
use denoised_ring::{
    ArenaBlock, ArenaError, ArenaHolder, ArenaOwner, ArenaRef, Board, Canceller, Doorbell, DoorbellWaiter,
    Reader, RingError, RingMemory, Wait, Writer,
};
use denoised_types::{Epoch, Rank, WorkerConfig};
use denoised_wire::{FdUse, Hello};
use std::{
    collections::HashMap,
    ops::ControlFlow,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// Fixed bytes before the table of parts.
const HEAD_BYTES: usize = 16;
/// Bytes of a row of the table.
const ROW_BYTES: usize = 24;
/// In a row's `arena`: the part is in the record.
const INLINE: u32 = u32::MAX;
/// Number of the command arena; event arenas are `1 + rank`.
const COMMAND_ARENA: u32 = 0;
/// The executor is the only holder of event arenas and the only reader of event rings.
const EXECUTOR: usize = 0;
/// How long a waiting send sleeps before it calls back.
const SLICE_MS: u64 = 2;
/// Most events of one rank that one drain hands over, so that a chatty rank does not starve the others.
const MAX_DRAIN_PER_RANK: usize = 1024;
/// How long a started process waits for its first message.
const HELLO_LIMIT_MS: u64 = 60_000;

/// All shared memory of a world, on the executor's side.
#[derive(Debug)]
pub struct RingWorld {
    spec: LinkSpec,
    world_size: u16,
    commands: RingMemory,
    arena: ArenaOwner,
    board: Board,
    ranks: Vec<RankMemory>,
}

#[derive(Debug)]
struct RankMemory {
    events: RingMemory,
    arena: ArenaOwner,
}

impl RingWorld {
    /// Makes the memory, after comparing [`LinkSpec::total_bytes`] with its limit and with what is left.
    ///
    /// # Errors
    /// [`SetupError::BadSpec`], [`SetupError::Memory`] with both numbers, or the kernel's refusal.
    pub fn create(spec: LinkSpec, world_size: u16) -> Result<Self, SetupError> {
        spec.check(world_size)?;
        let what = format!("shared memory of {world_size} worker(s)");
        let needed_bytes = spec.total_bytes(world_size);
        let given = Available {
            bytes: spec.memory_limit_bytes,
            limited_by: LimitedBy::Setting("memory_limit_bytes"),
        };
        given.check(&what, needed_bytes)?;
        memory_budget::check(&what, needed_bytes)?;
        let rank = |rank: u16| -> Result<RankMemory, SetupError> {
            let events = RingMemory::create("denoised events", spec.event_ring(), 1)?;
            let arena = ArenaOwner::create("denoised event arena", spec.event_arena(), 1 + u32::from(rank))?;
            Ok(RankMemory { events, arena })
        };
        Ok(Self {
            spec,
            world_size,
            commands: RingMemory::create("denoised commands", spec.command_ring(), usize::from(world_size))?,
            arena: ArenaOwner::create("denoised command arena", spec.command_arena(), COMMAND_ARENA)?,
            board: Board::create("denoised board")?,
            ranks: (0..world_size).map(rank).collect::<Result<_, _>>()?,
        })
    }

    /// The first message to `rank`, with its descriptors.
    ///
    /// # Errors
    /// No such rank, or no descriptor left.
    pub fn hello(
        &self,
        rank: Rank,
        epoch: Epoch,
        config: WorkerConfig,
    ) -> Result<(Hello, Vec<OwnedFd>), SetupError> {
        let Some(own) = self.ranks.get(usize::from(rank.0)) else {
            return Err(SetupError::BadSpec {
                what: "rank",
                value: rank.0.into(),
                limits: "below the world's size",
            });
        };
        let fds = [
            (FdUse::CommandRing, self.commands.fd()?),
            (FdUse::CommandArena, self.arena.fd()?),
            (FdUse::EventRing, own.events.fd()?),
            (FdUse::EventArena, own.arena.fd()?),
            (FdUse::EventDoorbell, self.board.fd()?),
        ];
        let (uses, fds): (Vec<FdUse>, Vec<OwnedFd>) = fds.into_iter().unzip();
        let hello = Hello {
            epoch,
            rank,
            world_size: self.world_size,
            config,
            fds: uses,
            // At most 16 KiB (`LinkSpec::check`).
            inline_limit_bytes: self.spec.inline_limit_bytes as u32,
            spin_ns: self.spec.spin.spin_ns(self.world_size),
            event_send_limit_ms: self.spec.event_send_limit_ms,
        };
        Ok((hello, fds))
    }

    /// Turns the memory into the executor's end. `sockets` are the ranks' sockets, by rank.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn into_end(self, sockets: Vec<BootChannel>) -> Result<ExecutorEnd, SetupError> {
        let writer = self.commands.writer(None)?;
        let waiter = self.board.waiter()?;
        let doorbell = self.board.doorbell();
        let mut ranks = Vec::with_capacity(self.ranks.len());
        for rank in &self.ranks {
            let reader = rank.events.reader(EXECUTOR)?;
            let holder = ArenaHolder::attach(rank.arena.fd()?, EXECUTOR)?;
            ranks.push(RankEvents {
                reader,
                holder,
                failed: None,
            });
        }
        let (evictor, reaper) = (writer.evictor(), self.arena.reaper());
        let interrupted = Arc::new(AtomicBool::new(false));
        let events = RingEvents {
            ranks,
            waiter,
            wait: wait_for(self.spec.spin.spin_ns(self.world_size)),
            interrupted: Arc::clone(&interrupted),
        };
        let sender = Parts {
            writer,
            inline_limit_bytes: self.spec.inline_limit_bytes,
        };
        Ok(ExecutorEnd {
            data: Box::new(RingCommands {
                sender,
                arena: self.arena,
            }),
            control: sockets
                .into_iter()
                .map(|socket| Box::new(socket) as Box<dyn ControlSender>)
                .collect(),
            events: Box::new(events),
            interrupter: Interrupter(Arc::new(move || {
                interrupted.store(true, Ordering::Release);
                doorbell.ring();
            })),
            evictor: Evictor(Arc::new(move |rank| {
                evictor.evict(usize::from(rank.0));
                reaper.reap(usize::from(rank.0));
            })),
        })
    }
}

/// Takes over a worker's end from its socket: waits for the first message and maps what came with it. TERM arrives on the control
/// lane if `signals` catches it.
///
/// # Errors
/// The executor is gone or of another version, or the memory is not what it should be.
pub fn attach(socket: Channel, signals: Option<EndSignals>) -> Result<WorkerEnd, SetupError> {
    let socket = WorkerSocket::new(socket, signals);
    let (hello, fds) = socket.hello(Deadline::after_ms(HELLO_LIMIT_MS))?;
    let mut fds: HashMap<FdUse, OwnedFd> = hello.fds.iter().copied().zip(fds).collect();
    let mut take = |fd_use: FdUse| {
        let got = || format!("a hello without the descriptor {fd_use:?}");
        fds.remove(&fd_use).ok_or_else(|| SetupError::Unexpected {
            expected: "five descriptors",
            got: got(),
        })
    };
    let rank_idx = usize::from(hello.rank.0);
    let reader = RingMemory::attach(take(FdUse::CommandRing)?)?.reader(rank_idx)?;
    let holder = ArenaHolder::attach(take(FdUse::CommandArena)?, rank_idx)?;
    let doorbell = Board::attach(take(FdUse::EventDoorbell)?)?.doorbell();
    let writer = RingMemory::attach(take(FdUse::EventRing)?)?.writer(None)?;
    let arena = ArenaOwner::attach(take(FdUse::EventArena)?)?;
    let inline_limit_bytes = (hello.inline_limit_bytes as usize).min(LinkSpec::MAX_INLINE_LIMIT_BYTES);
    let data = RingData {
        canceller: reader.canceller(),
        reader,
        holder,
        wait: wait_for(hello.spin_ns),
        rank: hello.rank,
    };
    let events = RingEventSender {
        doorbell,
        limit_bytes: arena.spec().data_bytes(),
        sender: Mutex::new(Parts {
            writer,
            inline_limit_bytes,
        }),
        arena: Mutex::new(arena),
    };
    Ok(WorkerEnd {
        hello,
        boot: socket.boot_sender(),
        data: Box::new(data),
        control: Box::new(socket),
        events: Arc::new(events),
    })
}

fn wait_for(spin_ns: u64) -> Wait {
    if spin_ns == 0 {
        Wait::Sleep
    } else {
        Wait::Spin { spin_ns }
    }
}

/// Writes records of parts.
#[derive(Debug)]
struct Parts {
    writer: Writer,
    inline_limit_bytes: usize,
}

/// Where a part of a message goes.
enum Place {
    Inline,
    Arena(ArenaBlock),
}

impl Parts {
    /// Which parts go inline: the message and its short blobs, as long as the record has room.
    fn plan(&self, message: &[u8], blobs: &[&[u8]]) -> Result<Vec<bool>, LinkError> {
        let record_limit = self.writer.record_limit_bytes().min(RECORD_LIMIT_BYTES);
        let n_parts = 1 + blobs.len();
        let table_bytes = HEAD_BYTES + n_parts * ROW_BYTES;
        if table_bytes > record_limit || n_parts > usize::from(u16::MAX) {
            return Err(LinkError::TooLarge {
                message_bytes: table_bytes as u64,
                limit_bytes: record_limit as u64,
                limited_by: "number of blobs",
            });
        }
        let mut room = record_limit - table_bytes;
        let mut fits = |part: &[u8], limit_bytes: usize| {
            let inline = part.len() <= limit_bytes && part.len() <= room;
            room -= if inline { part.len() } else { 0 };
            inline || part.is_empty()
        };
        let mut plan = vec![fits(message, LinkSpec::MAX_INLINE_LIMIT_BYTES)];
        plan.extend(blobs.iter().map(|blob| fits(blob, self.inline_limit_bytes)));
        Ok(plan)
    }

    /// Writes the record if there is room before `deadline`, taking the blocks out of `places`.
    fn write(
        &mut self,
        to: RankSet,
        parts: &[&[u8]],
        places: &mut Vec<Place>,
        deadline: Deadline,
    ) -> Result<(), RingError> {
        let is_inline = |place: &Place| matches!(place, Place::Inline);
        let inline_bytes: usize = parts
            .iter()
            .zip(places.iter())
            .filter(|(_, p)| is_inline(p))
            .map(|(part, _)| part.len())
            .sum();
        let table_bytes = HEAD_BYTES + parts.len() * ROW_BYTES;
        let mut record = self.writer.reserve(table_bytes + inline_bytes, deadline)?;
        let (table, mut body) = record.split_at_mut(table_bytes);
        table.fill(0);
        table[0..8].copy_from_slice(&to.bits().to_le_bytes());
        // At most 65 535 parts (`plan`).
        table[8..10].copy_from_slice(&(parts.len() as u16).to_le_bytes());
        for ((row, part), place) in table[HEAD_BYTES..]
            .chunks_exact_mut(ROW_BYTES)
            .zip(parts)
            .zip(places.drain(..))
        {
            row[0..8].copy_from_slice(&(part.len() as u64).to_le_bytes());
            match place {
                Place::Inline => {
                    row[8..12].copy_from_slice(&INLINE.to_le_bytes());
                    let (here, rest) = body.split_at_mut(part.len());
                    here.copy_from_slice(part);
                    body = rest;
                }
                Place::Arena(block) => {
                    // R6: from here on nothing can fail.
                    let reference = block.publish(to.bits());
                    row[8..12].copy_from_slice(&reference.arena.to_le_bytes());
                    row[12..16].copy_from_slice(&reference.block.to_le_bytes());
                    row[16..20].copy_from_slice(&reference.generation.to_le_bytes());
                }
            }
        }
        record.publish();
        Ok(())
    }
}

/// Waits in slices for `attempt` to succeed, calling back in between.
fn in_slices<T>(
    deadline: Deadline,
    idle: Idle<'_>,
    mut attempt: impl FnMut(Deadline) -> Result<T, LinkError>,
) -> Result<T, LinkError> {
    // Tries at once before it waits at all.
    let mut slice = Deadline::PASSED;
    loop {
        match attempt(slice) {
            Err(LinkError::Full { laggard }) => {
                if idle() == ControlFlow::Break(()) {
                    return Err(LinkError::Interrupted);
                }
                if deadline.has_passed() {
                    return Err(LinkError::Full { laggard });
                }
                slice = deadline.earlier(Deadline::after_ms(SLICE_MS));
            }
            other => return other,
        }
    }
}

/// Copies the parts that do not go inline into blocks; all or none.
fn place(
    plan: &[bool],
    parts: &[&[u8]],
    limit_bytes: usize,
    limited_by: &'static str,
    deadline: Deadline,
    idle: Idle<'_>,
    allocate: &mut dyn FnMut(usize, Deadline) -> Result<ArenaBlock, ArenaError>,
) -> Result<Vec<Place>, LinkError> {
    let granule_bytes = 64 << 10;
    let in_arena = parts.iter().zip(plan).filter(|(_, inline)| !**inline);
    let needed: usize = in_arena
        .map(|(part, _)| part.len().next_multiple_of(granule_bytes))
        .sum();
    if needed > limit_bytes {
        let message_bytes = parts.iter().map(|part| part.len() as u64).sum();
        return Err(LinkError::TooLarge {
            message_bytes,
            limit_bytes: limit_bytes as u64,
            limited_by,
        });
    }
    let mut places = Vec::with_capacity(parts.len());
    for (part, &inline) in parts.iter().zip(plan) {
        if inline {
            places.push(Place::Inline);
            continue;
        }
        let mut block = in_slices(deadline, &mut *idle, |slice| match allocate(part.len(), slice) {
            Err(ArenaError::Full { .. }) => Err(LinkError::Full { laggard: None }),
            other => other.map_err(|error| LinkError::Corrupt {
                what: error.to_string(),
            }),
        })?;
        block.copy_from_slice(part);
        places.push(Place::Arena(block));
    }
    Ok(places)
}

/// The executor's data lane.
#[derive(Debug)]
struct RingCommands {
    sender: Parts,
    arena: ArenaOwner,
}

impl DataSender for RingCommands {
    fn send(
        &mut self,
        to: RankSet,
        message: &[u8],
        blobs: &[&[u8]],
        deadline: Deadline,
        idle: Idle<'_>,
    ) -> Result<(), LinkError> {
        let plan = self.sender.plan(message, blobs)?;
        let parts: Vec<&[u8]> = std::iter::once(message).chain(blobs.iter().copied()).collect();
        let limit_bytes = self.arena.spec().data_bytes();
        let arena = &mut self.arena;
        let mut allocate = |len: usize, slice: Deadline| arena.allocate(len, slice);
        let mut places = place(
            &plan,
            &parts,
            limit_bytes,
            "command_arena_bytes",
            deadline,
            &mut *idle,
            &mut allocate,
        )?;
        in_slices(deadline, idle, |slice| {
            Ok(self.sender.write(to, &parts, &mut places, slice)?)
        })
    }
}

/// A worker's way up.
#[derive(Debug)]
struct RingEventSender {
    /// Rung by hand, since not every event is worth waking the executor.
    doorbell: Doorbell,
    limit_bytes: usize,
    /// Held for one slice at a time, so that the control thread gets its answers through while the runner waits.
    sender: Mutex<Parts>,
    arena: Mutex<ArenaOwner>,
}

impl EventSender for RingEventSender {
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
        let plan = lock(&self.sender).plan(message, blobs)?;
        let parts: Vec<&[u8]> = std::iter::once(message).chain(blobs.iter().copied()).collect();
        let mut allocate = |len: usize, slice: Deadline| lock(&self.arena).allocate(len, slice);
        let places = place(
            &plan,
            &parts,
            self.limit_bytes,
            "event_arena_bytes",
            deadline,
            &mut *idle,
            &mut allocate,
        )?;
        self.write(&parts, places, deadline, idle)?;
        self.doorbell.ring();
        Ok(())
    }

    fn send_quietly(&self, message: &[u8], deadline: Deadline, idle: Idle<'_>) -> Result<(), LinkError> {
        if lock(&self.sender).plan(message, &[])? != [true] {
            return self.send(message, &[], deadline, idle);
        }
        self.write(&[message], vec![Place::Inline], deadline, idle)
    }
}

impl RingEventSender {
    /// Writes the record; an executor that sleeps beside a full ring is woken.
    fn write(
        &self,
        parts: &[&[u8]],
        places: Vec<Place>,
        deadline: Deadline,
        idle: Idle<'_>,
    ) -> Result<(), LinkError> {
        let mut places = places;
        // The executor is holder 0 of an event arena.
        let to = RankSet::one(Rank(0));
        let mut ring_and_idle = || {
            self.doorbell.ring();
            idle()
        };
        in_slices(deadline, &mut ring_and_idle, |slice| {
            Ok(lock(&self.sender).write(to, parts, &mut places, slice)?)
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the lock was held left a sender that is still whole: a reservation is undone by its drop.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A worker's data lane.
#[derive(Debug)]
struct RingData {
    reader: Reader,
    canceller: Canceller,
    holder: ArenaHolder,
    wait: Wait,
    rank: Rank,
}

impl DataReceiver for RingData {
    fn receive(&mut self, deadline: Deadline) -> Result<Received, LinkError> {
        loop {
            let bytes = {
                let record = self.reader.read(self.wait, deadline)?;
                addressed(&record, self.rank)?.map(<[u8]>::to_vec)
            };
            if let Some(bytes) = bytes {
                return parse(&bytes, &self.holder);
            }
        }
    }

    fn try_receive(&mut self) -> Result<Option<Received>, LinkError> {
        loop {
            let bytes = match self.reader.try_read()? {
                None => return Ok(None),
                Some(record) => addressed(&record, self.rank)?.map(<[u8]>::to_vec),
            };
            if let Some(bytes) = bytes {
                return parse(&bytes, &self.holder).map(Some);
            }
        }
    }

    fn interrupter(&self) -> Interrupter {
        let canceller = self.canceller.clone();
        Interrupter(Arc::new(move || canceller.cancel()))
    }
}

/// The events of all ranks.
#[derive(Debug)]
struct RingEvents {
    ranks: Vec<RankEvents>,
    waiter: DoorbellWaiter,
    wait: Wait,
    interrupted: Arc<AtomicBool>,
}

#[derive(Debug)]
struct RankEvents {
    reader: Reader,
    holder: ArenaHolder,
    /// Set once the ring was found damaged; nothing more is read from it.
    failed: Option<LinkError>,
}

impl RankEvents {
    fn is_ready(&mut self) -> bool {
        // A ring that its writer closed is always ready; the end of a worker is known from elsewhere.
        self.failed.is_none() && self.reader.is_ready()
    }

    fn drain(&mut self, rank: Rank, sink: &mut dyn FnMut(Rank, Received)) -> Result<usize, LinkError> {
        for n_events in 0..MAX_DRAIN_PER_RANK {
            let bytes = match self.reader.try_read() {
                Ok(Some(record)) => record.to_vec(),
                Ok(None) => return Ok(n_events),
                Err(RingError::Closed | RingError::Evicted) => {
                    self.failed = Some(LinkError::Closed);
                    return Ok(n_events);
                }
                Err(error) => return Err(error.into()),
            };
            sink(rank, parse(&bytes, &self.holder)?);
        }
        Ok(MAX_DRAIN_PER_RANK)
    }
}

impl EventReceiver for RingEvents {
    fn drain(&mut self, sink: &mut dyn FnMut(Rank, Received)) -> Result<usize, (Rank, LinkError)> {
        let mut n_events = 0;
        let mut damage = None;
        for (rank_idx, events) in self.ranks.iter_mut().enumerate() {
            // At most 64 ranks (`LinkSpec::check`).
            let rank = Rank(rank_idx as u16);
            if events.failed.is_some() {
                continue;
            }
            match events.drain(rank, sink) {
                Ok(n) => n_events += n,
                Err(error) => {
                    events.failed = Some(error.clone());
                    damage.get_or_insert((rank, error));
                }
            }
        }
        damage.map_or(Ok(n_events), Err)
    }

    fn wait(&mut self, deadline: Deadline) -> Waiting {
        let Self {
            ranks,
            waiter,
            wait,
            interrupted,
        } = self;
        let mut is_first_look = true;
        let found = waiter.wait(*wait, deadline, || {
            // What was not announced by a ring must not end a sleep, or it would look like a ring that got lost.
            let is_first = std::mem::replace(&mut is_first_look, false);
            if ranks.iter_mut().any(RankEvents::is_ready) && (is_first || !deadline.has_passed()) {
                return Some(Waiting::Ready);
            }
            // Read before it is written: the flag is looked at in a spin loop, and rarely set.
            (interrupted.load(Ordering::Acquire) && interrupted.swap(false, Ordering::AcqRel))
                .then_some(Waiting::Interrupted)
        });
        found.unwrap_or(Waiting::TimedOut)
    }
}

/// The record if it is addressed to `rank`.
fn addressed(record: &[u8], rank: Rank) -> Result<Option<&[u8]>, LinkError> {
    let Some((to, _)) = record.split_first_chunk::<8>() else {
        return Err(short());
    };
    Ok(RankSet::from_bits(u64::from_le_bytes(*to))
        .contains(rank)
        .then_some(record))
}

/// Takes a copied record apart and leases its blobs.
fn parse(record: &[u8], holder: &ArenaHolder) -> Result<Received, LinkError> {
    let n_parts = record
        .get(8..10)
        .map(|b| usize::from(b[0]) | usize::from(b[1]) << 8)
        .ok_or_else(short)?;
    let table_bytes = HEAD_BYTES + n_parts * ROW_BYTES;
    let (table, mut body) = record.split_at_checked(table_bytes).ok_or_else(short)?;
    let mut parts = Vec::with_capacity(n_parts.saturating_sub(1));
    let mut message = None;
    for row in table[HEAD_BYTES..].chunks_exact(ROW_BYTES) {
        let word = |at: usize| u32::from_le_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]]);
        let len = u64::from(word(0)) | u64::from(word(4)) << 32;
        let part = if word(8) == INLINE {
            let len = usize::try_from(len).map_err(|_| short())?;
            let (part, rest) = body.split_at_checked(len).ok_or_else(short)?;
            body = rest;
            Blob::owned(part.to_vec())
        } else {
            let reference = ArenaRef {
                arena: word(8),
                block: word(12),
                generation: word(16),
                len,
            };
            Blob::leased(holder.lease(reference).map_err(|error| LinkError::Corrupt {
                what: error.to_string(),
            })?)
        };
        if message.is_none() {
            // Copied if it lies in the arena: its sender must not be able to change it while it is decoded.
            message = Some(Blob::owned(part.into_vec()));
        } else {
            parts.push(part);
        }
    }
    match message {
        Some(message) if body.is_empty() => Ok(Received {
            message,
            blobs: parts,
        }),
        _ => Err(LinkError::Corrupt {
            what: "a record without a message, or longer than its parts".to_owned(),
        }),
    }
}

fn short() -> LinkError {
    LinkError::Corrupt {
        what: "a record shorter than its table".to_owned(),
    }
}
