//! What the machine can do between two processes, and what the ring makes of it, measured side by side.
//!
//! Every figure of the ring stands next to the raw one of the same seconds: the rounds alternate, because
//! the time that a cache line or a wake-up takes between cores changes with where the cores happen to be.
//! The program that measures is started again for the other ends and calls [`child_main`] there. A program
//! that offers this hands over to it when its first argument is [`CHILD_ARG`].

use crate::sync::{AtomicU64, FutexWord, Ordering};
use crate::{
    ArenaError, ArenaHolder, ArenaOwner, ArenaRef, ArenaSpec, AttachError, Board, RingError, RingMemory,
    RingSpec, Wait,
};
use denoised_os::child::{Child, ExitStatus, InheritedFdError, Spawn, SpawnError, inherited_fd};
use denoised_os::memfd::{Access, Mapping, MemoryError, SealedMemory};
use denoised_os::socket::{Channel, ChannelError};
use denoised_os::{Deadline, OsError, cpu, now_ns, process};
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

/// First argument of a program started for the other end of a measurement.
pub const CHILD_ARG: &str = "__ring-bench-end";

/// Name of the channel that such a program inherits.
const CHANNEL: &str = "ring_bench";
/// Longest time that any single step of a measurement may take.
const PATIENCE_MS: u64 = 60_000;
/// How long before a sleeping end is surely asleep.
const FALL_ASLEEP: Duration = Duration::from_micros(200);
/// Capacity of the rings that are measured.
const CAPACITY_BYTES: usize = 4 << 20;
/// Tensor that is handed over in place.
const TENSOR_BYTES: usize = 20_000_000;

/// How to start this program for the other ends.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The program file.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
}

impl Launcher {
    /// The running program, with [`CHILD_ARG`].
    pub fn this_program() -> Self {
        Self {
            program: "/proc/self/exe".into(),
            args: vec![CHILD_ARG.into()],
        }
    }

    fn start(&self) -> Result<End, BenchError> {
        let (ours, theirs) = Channel::pair()?;
        let spawn = self.args.iter().fold(Spawn::new(&self.program), Spawn::arg);
        let child = spawn.pass_fd(CHANNEL, theirs.into_fd()).start()?;
        Ok(End { channel: ours, child })
    }
}

/// How much to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Rounds of each alternating measurement.
    pub n_rounds: usize,
    /// Records of each throughput measurement.
    pub n_records: u64,
    /// How often each throughput is measured.
    pub n_repeats: usize,
    /// Seconds for which sleeping readers are watched.
    pub idle_s: u64,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            n_rounds: 200,
            n_records: 1_000_000,
            n_repeats: 7,
            idle_s: 10,
        }
    }
}

/// Times of one kind, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Half were at most this long.
    pub p50_ns: u64,
    /// 99 in 100 were at most this long.
    pub p99_ns: u64,
    /// How many were measured; each may be the mean of a short series.
    pub n: usize,
}

impl Times {
    fn of(mut times_ns: Vec<u64>) -> Self {
        times_ns.sort_unstable();
        let at = |share: usize| {
            times_ns
                .get(times_ns.len().saturating_sub(1) * share / 100)
                .copied()
        };
        Self {
            p50_ns: at(50).unwrap_or(0),
            p99_ns: at(99).unwrap_or(0),
            n: times_ns.len(),
        }
    }
}

/// Records that one writer got to all readers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Throughput {
    /// How many readers.
    pub n_readers: usize,
    /// Records per second, each read by all of them: the median of the repeats.
    pub records_per_s: f64,
    /// The fastest repeat, which other processes of the machine disturbed least.
    pub best_records_per_s: f64,
}

/// All results.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Cores this process may use.
    pub n_cores: usize,
    /// A cache line there and back.
    pub line_round_trip: Times,
    /// A record there and one back, both ends spinning. Compare with `line_round_trip`.
    pub spinning_round_trip: Times,
    /// A futex wake there and back.
    pub futex_round_trip: Times,
    /// A record there and one back, both ends asleep. Compare with `futex_round_trip`.
    pub sleeping_round_trip: Times,
    /// 200-byte records to 1, 2 and 4 readers.
    pub throughput: Vec<Throughput>,
    /// From writing an empty record until its reader has it.
    pub empty_delivery: Times,
    /// From publishing 20 MB written in place until the reader has read the first and last byte.
    pub tensor_delivery: Times,
    /// Share of one core that 8 sleeping readers take together.
    pub idle_core_share: f64,
    /// Waits that only the safety bound ended. A bug if not 0.
    pub n_missed_wakes: u64,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// An end was not started.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// An end did not answer.
    #[error("no answer from the other end: {0}")]
    Channel(#[from] ChannelError),
    /// An end failed.
    #[error("the other end {status}: {stderr}")]
    End {
        /// How it ended.
        status: ExitStatus,
        /// What it said.
        stderr: String,
    },
    /// This program was not started for a measurement.
    #[error(transparent)]
    NotAnEnd(#[from] InheritedFdError),
    /// A message that is none of a measurement.
    #[error("the other end was asked for an unknown part")]
    UnknownPart,
    /// Shared memory was not made.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// Shared memory was not made.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A record was not written or read.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// A block was not allocated or leased.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] OsError),
}

/// Measures everything. Takes about `idle_s` plus ten seconds with the default plan.
///
/// # Errors
/// An end did not start, answer or succeed.
pub fn run(launcher: &Launcher, plan: &Plan) -> Result<Report, BenchError> {
    let mut n_missed_wakes = 0;
    let (line_round_trip, spinning_round_trip) = round_trips(
        launcher,
        plan.n_rounds,
        200,
        Wait::Spin { spin_ns: u64::MAX },
        &mut n_missed_wakes,
    )?;
    let (futex_round_trip, sleeping_round_trip) =
        round_trips(launcher, plan.n_rounds, 20, Wait::Sleep, &mut n_missed_wakes)?;
    let mut throughput = Vec::new();
    for n_readers in [1, 2, 4] {
        let mut rates = Vec::new();
        for _ in 0..plan.n_repeats.max(1) {
            rates.push(records_per_s(
                launcher,
                n_readers,
                plan.n_records,
                &mut n_missed_wakes,
            )?);
        }
        rates.sort_by(f64::total_cmp);
        let best_records_per_s = rates[rates.len() - 1];
        throughput.push(Throughput {
            n_readers,
            records_per_s: rates[rates.len() / 2],
            best_records_per_s,
        });
    }
    let (empty_delivery, tensor_delivery) = deliveries(launcher, plan.n_rounds, &mut n_missed_wakes)?;
    let idle_core_share = idle(launcher, 8, plan.idle_s)?;
    Ok(Report {
        n_cores: cpu::usable_cores(),
        line_round_trip,
        spinning_round_trip,
        futex_round_trip,
        sleeping_round_trip,
        throughput,
        empty_delivery,
        tensor_delivery,
        idle_core_share,
        n_missed_wakes,
    })
}

/// The other end of a measurement: does what its parent asks, until the parent is gone.
///
/// # Errors
/// The program was not started for this, or its part failed.
pub fn child_main() -> Result<(), BenchError> {
    let channel = Channel::from_fd(inherited_fd(CHANNEL)?)?;
    let received = match channel.receive(patience()) {
        Err(ChannelError::Closed) => return Ok(()),
        received => received?,
    };
    let mut fds = received.fds.into_iter();
    let mut next_fd = || fds.next().ok_or(BenchError::UnknownPart);
    let part = Part::decode(&received.bytes).ok_or(BenchError::UnknownPart)?;
    match part {
        Part::Echo {
            n_rounds,
            n_per_round,
            wait,
        } => {
            let raw = Raw::new(&SealedMemory::from_fd(next_fd()?)?)?;
            let (commands, replies, board) = (next_fd()?, next_fd()?, next_fd()?);
            let mut reader = RingMemory::attach(commands)?.reader(0)?;
            let doorbell = Board::attach(board)?.doorbell();
            let mut writer = RingMemory::attach(replies)?.writer(Some(doorbell))?;
            writer.set_wait(wait);
            let _pinned = Pinned::to(1);
            channel.send(b"up", &[], patience())?;
            for round in 0..n_rounds {
                raw.echo(round, n_per_round, wait)?;
                let deadline = patience();
                for _ in 0..n_per_round {
                    let record = reader.read(wait, deadline)?;
                    writer.write(&[&record], deadline)?;
                }
            }
            let n_missed_wakes = reader.stats().n_missed_wakes + writer.stats().n_missed_wakes;
            channel.send(&n_missed_wakes.to_le_bytes(), &[], patience())?;
        }
        Part::Count {
            reader_idx,
            n_records,
            wait,
        } => {
            let mut reader = RingMemory::attach(next_fd()?)?.reader(reader_idx)?;
            channel.send(b"up", &[], patience())?;
            let (mut sum, deadline) = (0u64, patience());
            for _ in 0..n_records {
                let record = reader.read(wait, deadline)?;
                sum = record
                    .first_chunk()
                    .map_or(sum, |head| sum.wrapping_add(u64::from_le_bytes(*head)));
            }
            if sum != (0..n_records).fold(0, u64::wrapping_add) {
                return Err(RingError::Corrupt {
                    position: 0,
                    what: "the sum of the records",
                }
                .into());
            }
            channel.send(&reader.stats().n_missed_wakes.to_le_bytes(), &[], patience())?;
        }
        Part::Take { wait } => {
            let mut reader = RingMemory::attach(next_fd()?)?.reader(0)?;
            let arena = ArenaHolder::attach(next_fd()?, 0)?;
            let _pinned = Pinned::to(1);
            channel.send(b"up", &[], patience())?;
            loop {
                let reference = match reader.read(wait, patience()) {
                    Err(RingError::Closed) => break,
                    record => decode_reference(&record?),
                };
                let body = reference.map(|reference| arena.lease(reference)).transpose()?;
                let ends = body
                    .as_ref()
                    .and_then(|body| Some((*body.first()?, *body.last()?)));
                let at_ns = now_ns();
                if ends.is_some_and(|ends| ends != (7, 7)) {
                    return Err(RingError::Corrupt {
                        position: 0,
                        what: "the tensor",
                    }
                    .into());
                }
                drop(body);
                channel.send(&at_ns.to_le_bytes(), &[], patience())?;
            }
        }
        Part::Idle { reader_idx } => {
            let mut reader = RingMemory::attach(next_fd()?)?.reader(reader_idx)?;
            channel.send(b"up", &[], patience())?;
            loop {
                match reader.read(Wait::Sleep, patience()) {
                    Err(RingError::Closed) => break,
                    Err(RingError::TimedOut) => {}
                    record => drop(record?),
                }
            }
        }
    }
    channel.wait_closed(patience())?;
    Ok(())
}

/// What another end is asked to do.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    Echo {
        n_rounds: u64,
        n_per_round: u64,
        wait: Wait,
    },
    Count {
        reader_idx: usize,
        n_records: u64,
        wait: Wait,
    },
    Take {
        wait: Wait,
    },
    Idle {
        reader_idx: usize,
    },
}

impl Part {
    fn encode(self) -> Vec<u8> {
        let spin = |wait| match wait {
            Wait::Sleep => 0,
            Wait::Spin { spin_ns } => spin_ns,
        };
        let words = match self {
            Self::Echo {
                n_rounds,
                n_per_round,
                wait,
            } => [1, n_rounds, n_per_round, spin(wait)],
            Self::Count {
                reader_idx,
                n_records,
                wait,
            } => [2, reader_idx as u64, n_records, spin(wait)],
            Self::Take { wait } => [3, 0, 0, spin(wait)],
            Self::Idle { reader_idx } => [4, reader_idx as u64, 0, 0],
        };
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut words = bytes
            .chunks_exact(8)
            .filter_map(|word| Some(u64::from_le_bytes(word.try_into().ok()?)));
        let (part, first, second, spin_ns) = (words.next()?, words.next()?, words.next()?, words.next()?);
        let wait = if spin_ns == 0 {
            Wait::Sleep
        } else {
            Wait::Spin { spin_ns }
        };
        let reader_idx = usize::try_from(first).ok()?;
        Some(match part {
            1 => Self::Echo {
                n_rounds: first,
                n_per_round: second,
                wait,
            },
            2 => Self::Count {
                reader_idx,
                n_records: second,
                wait,
            },
            3 => Self::Take { wait },
            4 => Self::Idle { reader_idx },
            _ => return None,
        })
    }
}

/// The other end, from here.
struct End {
    channel: Channel,
    child: Child,
}

impl End {
    fn ask(&mut self, part: Part, fds: &[BorrowedFd<'_>]) -> Result<(), BenchError> {
        self.channel.send(&part.encode(), fds, patience())?;
        self.answer().map(drop)
    }

    fn answer(&mut self) -> Result<u64, BenchError> {
        match self.channel.receive(patience()) {
            Ok(received) => Ok(received
                .bytes
                .first_chunk()
                .map_or(0, |word| u64::from_le_bytes(*word))),
            Err(ChannelError::Closed) => Err(self.failure()),
            Err(error) => Err(error.into()),
        }
    }

    fn failure(&mut self) -> BenchError {
        let status = match self.child.wait(patience()) {
            Ok(Some(status)) => status,
            _ => return ChannelError::Closed.into(),
        };
        let stderr = self.child.take_stderr().map(std::fs::File::from);
        let stderr = stderr
            .and_then(|pipe| std::io::read_to_string(pipe).ok())
            .unwrap_or_default();
        BenchError::End { status, stderr }
    }
}

/// Raw round trips: one line per direction, and one futex word per direction.
struct Raw(Mapping);

#[repr(C, align(128))]
struct RawLine {
    number: AtomicU64,
    word: FutexWord,
}

impl Raw {
    const BYTES: usize = 4096;

    fn new(memory: &SealedMemory) -> Result<Self, MemoryError> {
        let mapping = memory.map(Access::ReadWrite)?;
        if mapping.len() < Self::BYTES {
            return Err(MemoryError::BadSize {
                bytes: mapping.len() as u64,
            });
        }
        Ok(Self(mapping))
    }

    fn lines(&self) -> &[RawLine; 2] {
        // SAFETY: the mapping is writable, starts on a page, has 4096 bytes (`new`) and lives as long as
        // `self`; the lines hold only atomics, for which any bytes are valid.
        unsafe { &*self.0.as_ptr().cast::<[RawLine; 2]>() }
    }

    fn say(&self, line_idx: usize, number: u64, wait: Wait) {
        let line = &self.lines()[line_idx];
        line.number.store(number, Ordering::Release);
        if wait == Wait::Sleep {
            line.word.bump();
            line.word.wake_all();
        }
    }

    fn hear(&self, line_idx: usize, number: u64, wait: Wait) -> Result<(), BenchError> {
        let line = &self.lines()[line_idx];
        let mut n_looks = 0u32;
        let mut deadline = None;
        loop {
            let expected = if wait == Wait::Sleep { line.word.load() } else { 0 };
            if line.number.load(Ordering::Acquire) >= number {
                return Ok(());
            }
            n_looks = n_looks.wrapping_add(1);
            if (wait == Wait::Sleep || n_looks.is_multiple_of(1 << 16))
                && deadline.get_or_insert_with(patience).has_passed()
            {
                return Err(RingError::TimedOut.into());
            }
            match wait {
                Wait::Sleep => {
                    line.word.wait(expected, *deadline.get_or_insert_with(patience));
                }
                Wait::Spin { .. } => std::hint::spin_loop(),
            }
        }
    }

    fn ask(&self, number: u64, wait: Wait) -> Result<(), BenchError> {
        self.say(0, number, wait);
        self.hear(1, number, wait)
    }

    fn echo(&self, round: u64, n_per_round: u64, wait: Wait) -> Result<(), BenchError> {
        for turn in 1..=n_per_round {
            self.hear(0, round * n_per_round + turn, wait)?;
            self.say(1, round * n_per_round + turn, wait);
        }
        Ok(())
    }
}

/// Raw round trips and the ring's, alternating.
fn round_trips(
    launcher: &Launcher,
    n_rounds: usize,
    n_per_round: u64,
    wait: Wait,
    n_missed_wakes: &mut u64,
) -> Result<(Times, Times), BenchError> {
    let raw_memory = SealedMemory::create("bench raw", Raw::BYTES)?;
    let raw = Raw::new(&raw_memory)?;
    let board = Board::create("bench board")?;
    let (commands, replies) = (ring("bench commands", 1)?, ring("bench replies", 1)?);
    let (mut writer, mut reader) = (commands.writer(None)?, replies.reader(0)?);
    let mut waiter = board.waiter()?;
    let fds: [OwnedFd; 3] = [commands.fd()?, replies.fd()?, board.fd()?];
    let [commands_fd, replies_fd, board_fd] = &fds;
    let part = Part::Echo {
        n_rounds: n_rounds as u64,
        n_per_round,
        wait,
    };
    let fds = [
        raw_memory.as_fd(),
        commands_fd.as_fd(),
        replies_fd.as_fd(),
        board_fd.as_fd(),
    ];
    let mut end = launcher.start()?;
    end.ask(part, &fds)?;
    let _pinned = Pinned::to(0);
    let (mut raw_ns, mut ring_ns) = (Vec::new(), Vec::new());
    for round in 0..n_rounds as u64 {
        raw_ns.push(mean_ns(n_per_round, wait, |turn| {
            raw.ask(round * n_per_round + turn + 1, wait)
        })?);
        let deadline = patience();
        ring_ns.push(mean_ns(n_per_round, wait, |turn| {
            writer.write(&[&turn.to_le_bytes()], deadline)?;
            // As an executor does it, which reads many rings.
            waiter
                .wait(wait, deadline, || reader.is_ready().then_some(()))
                .ok_or(RingError::TimedOut)?;
            let answer = reader.read(wait, deadline)?;
            if *answer != turn.to_le_bytes() {
                return Err(RingError::Corrupt {
                    position: turn,
                    what: "the answer",
                }
                .into());
            }
            Ok(())
        })?);
    }
    *n_missed_wakes += end.answer()? + waiter.n_missed_wakes() + writer.stats().n_missed_wakes;
    Ok((Times::of(raw_ns), Times::of(ring_ns)))
}

/// Mean time of a turn. Before each, an end that sleeps is left alone until it is asleep for certain.
fn mean_ns(
    n_turns: u64,
    wait: Wait,
    mut turn: impl FnMut(u64) -> Result<(), BenchError>,
) -> Result<u64, BenchError> {
    let mut sum_ns = 0;
    match wait {
        Wait::Spin { .. } => {
            let start_ns = now_ns();
            (0..n_turns).try_for_each(turn)?;
            sum_ns += now_ns() - start_ns;
        }
        Wait::Sleep => {
            for turn_idx in 0..n_turns {
                std::thread::sleep(FALL_ASLEEP);
                let start_ns = now_ns();
                turn(turn_idx)?;
                sum_ns += now_ns() - start_ns;
            }
        }
    }
    Ok(sum_ns / n_turns.max(1))
}

/// Records of 200 bytes per second that one writer gets to all readers.
fn records_per_s(
    launcher: &Launcher,
    n_readers: usize,
    n_records: u64,
    n_missed_wakes: &mut u64,
) -> Result<f64, BenchError> {
    let memory = ring("bench ring", n_readers)?;
    let wait = Wait::for_world(n_readers + 1);
    let mut writer = memory.writer(None)?;
    writer.set_wait(wait);
    let mut ends = Vec::new();
    for reader_idx in 0..n_readers {
        let mut end = launcher.start()?;
        end.ask(
            Part::Count {
                reader_idx,
                n_records,
                wait,
            },
            &[memory.as_fd()],
        )?;
        ends.push(end);
    }
    let (mut body, deadline) = ([0; 200], patience());
    let start_ns = now_ns();
    for number in 0..n_records {
        body[..8].copy_from_slice(&number.to_le_bytes());
        writer.write(&[&body], deadline)?;
    }
    for end in &mut ends {
        *n_missed_wakes += end.answer()?;
    }
    let took_s = (now_ns() - start_ns) as f64 / 1e9;
    *n_missed_wakes += writer.stats().n_missed_wakes;
    Ok(n_records as f64 / took_s)
}

/// Delivery of an empty record and of a tensor in place, alternating.
fn deliveries(
    launcher: &Launcher,
    n_rounds: usize,
    n_missed_wakes: &mut u64,
) -> Result<(Times, Times), BenchError> {
    let spec = ArenaSpec {
        granule_bytes: 65_536,
        n_granules: 2 * TENSOR_BYTES.div_ceil(65_536),
    };
    let mut arena = ArenaOwner::create("bench arena", spec, 0)?;
    let memory = ring("bench ring", 1)?;
    let mut writer = memory.writer(None)?;
    let mut end = launcher.start()?;
    let arena_fd = arena.fd()?;
    end.ask(
        Part::Take {
            wait: Wait::for_world(2),
        },
        &[memory.as_fd(), arena_fd.as_fd()],
    )?;
    let _pinned = Pinned::to(0);
    let (mut empty_ns, mut tensor_ns) = (Vec::new(), Vec::new());
    for _ in 0..n_rounds {
        // Both are sent after the same work, so that the reader waits the same way for both.
        arena.allocate(TENSOR_BYTES, patience())?.fill(7);
        let start_ns = now_ns();
        writer.write(&[], patience())?;
        empty_ns.push(end.answer()?.saturating_sub(start_ns));
        let mut block = arena.allocate(TENSOR_BYTES, patience())?;
        block.fill(7);
        let start_ns = now_ns();
        let reference = block.publish(1);
        writer.write(&[&encode_reference(reference)], patience())?;
        tensor_ns.push(end.answer()?.saturating_sub(start_ns));
    }
    *n_missed_wakes += writer.stats().n_missed_wakes + arena.n_missed_wakes();
    writer.close();
    Ok((Times::of(empty_ns), Times::of(tensor_ns)))
}

/// Share of one core that `n_readers` sleeping readers take together.
fn idle(launcher: &Launcher, n_readers: usize, idle_s: u64) -> Result<f64, BenchError> {
    let memory = ring("bench ring", n_readers)?;
    let _writer = memory.writer(None)?;
    let mut ends = Vec::new();
    for reader_idx in 0..n_readers {
        let mut end = launcher.start()?;
        end.ask(Part::Idle { reader_idx }, &[memory.as_fd()])?;
        ends.push(end);
    }
    let used_ns = |ends: &[End]| -> Result<u64, OsError> {
        ends.iter().map(|end| process::cpu_time_ns(end.child.pid())).sum()
    };
    // Lets them fall asleep first.
    std::thread::sleep(Duration::from_millis(100));
    let (before_ns, start_ns) = (used_ns(&ends)?, now_ns());
    std::thread::sleep(Duration::from_secs(idle_s));
    let (after_ns, end_ns) = (used_ns(&ends)?, now_ns());
    Ok((after_ns - before_ns) as f64 / (end_ns - start_ns).max(1) as f64)
}

fn ring(name: &str, n_readers: usize) -> Result<RingMemory, AttachError> {
    RingMemory::create(
        name,
        RingSpec {
            capacity_bytes: CAPACITY_BYTES,
        },
        n_readers,
    )
}

fn patience() -> Deadline {
    Deadline::after_ms(PATIENCE_MS)
}

/// Keeps the calling thread on a core of its own while it measures, where there are two.
struct Pinned(Vec<usize>);

impl Pinned {
    fn to(end_idx: usize) -> Self {
        let core_ids = cpu::allowed_core_ids().unwrap_or_default();
        if core_ids.len() < 2 || cpu::pin_thread(&core_ids[end_idx..=end_idx]).is_err() {
            // A figure without pinning is still a figure.
            return Self(Vec::new());
        }
        Self(core_ids)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            let _ = cpu::pin_thread(&self.0);
        }
    }
}

fn encode_reference(reference: ArenaRef) -> [u8; 20] {
    let mut bytes = [0; 20];
    for (word, value) in bytes.chunks_exact_mut(4).zip([
        reference.arena,
        reference.block,
        reference.generation,
        reference.len as u32,
        (reference.len >> 32) as u32,
    ]) {
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// `None` for an empty record.
fn decode_reference(bytes: &[u8]) -> Option<ArenaRef> {
    let mut words = bytes
        .chunks_exact(4)
        .filter_map(|word| Some(u32::from_le_bytes(word.try_into().ok()?)));
    let (arena, block, generation) = (words.next()?, words.next()?, words.next()?);
    let len = u64::from(words.next()?) | u64::from(words.next()?) << 32;
    Some(ArenaRef {
        arena,
        block,
        generation,
        len,
    })
}
