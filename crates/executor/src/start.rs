//! Starting worker processes, all or none.

use crate::{
    Capabilities, ExecutorError, MpOptions, WorkerProgram, WorldInfo,
    keeper::Keeper,
    mp::Processes,
    stderr::{StderrTail, StderrThread},
};
use denoised_link::{BootChannel, ExecutorEnd, INHERITED_NAME, LinkError, RingWorld, SetupError};
use denoised_os::{
    Deadline,
    child::{Child, Spawn, SpawnError},
    cpu,
    poll::wait_readable,
    signal::Signal,
};
use denoised_types::{Epoch, Failure, FailureCode, ModelInfo, Rank, WorkerDevice};
use denoised_wire::{BootUp, MethodInfo, StartPhase};
use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

/// Told how far each rank has come.
pub type Progress<'a> = &'a mut dyn FnMut(Rank, StartPhase);

/// A worker that said why it failed, or closed its socket, gets so long to exit before it is killed.
const EXIT_GRACE: Duration = Duration::from_millis(500);
/// Most messages of one rank that are taken in before the others and the limit are looked at. More than a socket holds, so that all
/// words of a rank that has ended are heard.
const MAX_MESSAGES_PER_LOOK: usize = 1024;
/// How long the kernel may take to end a killed process.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// A new world's number; never used twice by a program.
pub(crate) fn next_epoch() -> Epoch {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    Epoch(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Threads of each worker that was given no number: an equal share of the cores.
pub(crate) fn default_n_threads(n_workers: u16) -> u32 {
    let share = cpu::usable_cores() / usize::from(n_workers.max(1));
    u32::try_from(share).unwrap_or(u32::MAX).max(1)
}

/// What a rank said when it was ready.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ready {
    pub(crate) model: Option<ModelInfo>,
    pub(crate) device: Option<WorkerDevice>,
    pub(crate) weight_bytes: u64,
    pub(crate) methods: Vec<MethodInfo>,
}

/// A started world before it is one.
pub(crate) struct StartedWorld {
    pub(crate) info: WorldInfo,
    pub(crate) end: ExecutorEnd,
    pub(crate) processes: Processes,
    pub(crate) tails: Vec<StderrTail>,
    pub(crate) stderr: StderrThread,
}

/// A rank under way.
struct Starting {
    child: Child,
    socket: BootChannel,
    tail: StderrTail,
    phase: StartPhase,
    /// It has handed over prepared weights.
    has_published: bool,
    ready: Option<Ready>,
}

/// Starts all ranks and waits for all of them together.
pub(crate) fn start(options: &MpOptions, progress: Progress<'_>) -> Result<StartedWorld, ExecutorError> {
    if is_this_process(&options.program) {
        let text = "this process was started as a worker and would start workers without end; \
                    `denoised_worker::run` must come first in its `main`";
        return Err(undo(
            options,
            Vec::new(),
            Failure::new(FailureCode::InvalidRequest, text),
        ));
    }
    let deadline = Deadline::after(options.start_limit);
    let no_thread = |error: std::io::Error| {
        let text = format!("cannot start a thread: {error}");
        undo(options, Vec::new(), Failure::new(FailureCode::OutOfMemory, text))
    };
    // Before the ranks, so that it outlives them also when this function returns early.
    let keeper = Keeper::start().map_err(no_thread)?;
    let stderr = StderrThread::start(options.stderr.clone()).map_err(no_thread)?;
    let mut ranks = Vec::new();
    let undo = |stderr: StderrThread, ranks, cause| {
        let error = undo(options, ranks, cause);
        stderr.finish();
        error
    };
    match try_start(options, progress, deadline, &keeper, &mut ranks, &stderr) {
        Ok((memory, epoch)) => {
            let pids = ranks.iter().map(|rank| rank.child.pid()).collect();
            let common = |method: &MethodInfo| {
                let has_it = |ready: &Ready| ready.methods.contains(method);
                ranks.iter().filter_map(|rank| rank.ready.as_ref()).all(has_it)
            };
            let devices: Option<Vec<WorkerDevice>> = ranks
                .iter()
                .map(|rank| rank.ready.as_ref().and_then(|ready| ready.device.clone()))
                .collect();
            let Ready {
                model,
                device: _,
                weight_bytes,
                mut methods,
            } = ranks
                .first()
                .and_then(|rank| rank.ready.clone())
                .unwrap_or_default();
            methods.retain(common);
            let info = WorldInfo {
                kind: "mp",
                world_size: options.n_workers,
                replicas: (0..options.n_workers).map(|rank| vec![Rank(rank)]).collect(),
                epoch,
                model,
                devices: devices.unwrap_or_default(),
                weight_bytes,
                pids,
                methods,
                capabilities: Capabilities {
                    is_isolated: true,
                    defers_outputs: true,
                    is_remote: false,
                },
            };
            let sockets = ranks.iter().map(|rank| rank.socket.clone()).collect();
            let end = match memory.into_end(sockets) {
                Ok(end) => end,
                Err(error) => return Err(undo(stderr, ranks, setup_failure(&error))),
            };
            let (children, tails) = ranks.into_iter().map(|rank| (rank.child, rank.tail)).unzip();
            Ok(StartedWorld {
                info,
                end,
                processes: Processes::new(children, keeper),
                tails,
                stderr,
            })
        }
        Err(cause) => Err(undo(stderr, ranks, cause)),
    }
}

fn try_start(
    options: &MpOptions,
    progress: Progress<'_>,
    deadline: Deadline,
    keeper: &Keeper,
    ranks: &mut Vec<Starting>,
    stderr: &StderrThread,
) -> Result<(RingWorld, Epoch), Failure> {
    let memory = RingWorld::create(options.link, options.n_workers).map_err(|error| setup_failure(&error))?;
    let epoch = next_epoch();
    let mut worker = options.worker.clone();
    worker.n_threads = worker
        .n_threads
        .or_else(|| Some(default_n_threads(options.n_workers)));
    for rank in (0..options.n_workers).map(Rank) {
        let (child, socket) = spawn(options, keeper).map_err(|error| error.on_rank(rank))?;
        let mut child = child;
        let tail = StderrTail::new(rank, child.take_stderr(), stderr);
        ranks.push(Starting {
            child,
            socket,
            tail,
            phase: StartPhase::Spawned,
            has_published: false,
            ready: None,
        });
        progress(rank, StartPhase::Spawned);
    }
    for (starting, rank) in ranks.iter().zip((0..options.n_workers).map(Rank)) {
        let greeted = memory
            .hello(rank, epoch, worker.clone())
            .and_then(|(hello, fds)| Ok(starting.socket.greet(hello, &fds)?));
        match greeted {
            // It died at once; its exit status says more than the broken socket.
            Ok(()) | Err(SetupError::Link(LinkError::Closed)) => {}
            Err(error) => return Err(setup_failure(&error).on_rank(rank)),
        }
    }
    while ranks.iter().any(|rank| rank.ready.is_none()) {
        if !wait(ranks, deadline)? {
            let late: Vec<u16> = (0..options.n_workers)
                .filter(|&rank| ranks[usize::from(rank)].ready.is_none())
                .collect();
            let text = format!("rank(s) {late:?} not ready after {:?}", options.start_limit);
            return Err(Failure::new(FailureCode::DeadlineExceeded, text));
        }
        for rank_idx in 0..ranks.len() {
            listen(ranks, rank_idx, progress)?;
        }
    }
    Ok((memory, epoch))
}

/// Whether the workers would be started just as this process was: they would do what it does, and start workers in turn.
fn is_this_process(program: &WorkerProgram) -> bool {
    let args = || program.args.iter().cloned();
    program.path.is_none() && program.env.is_empty() && std::env::args_os().skip(1).eq(args())
}

fn spawn(options: &MpOptions, keeper: &Keeper) -> Result<(Child, BootChannel), Failure> {
    let os_failure = |error: &dyn std::error::Error| Failure::new(FailureCode::Internal, error.to_string());
    let (socket, theirs) = BootChannel::pair().map_err(|error| os_failure(&error))?;
    let program = &options.program;
    let mut spawn = match &program.path {
        Some(path) => Spawn::new(path),
        None => Spawn::this_program().map_err(|error| os_failure(&error))?,
    };
    for arg in &program.args {
        spawn = spawn.arg(arg);
    }
    for (name, value) in &program.env {
        spawn = spawn.env(name, value);
    }
    // Ctrl-C reaches the whole group; what it means is the supervisor's to decide.
    let spawn = spawn.ignore(Signal::INT).pass_fd(INHERITED_NAME, theirs);
    let child = keeper.spawn(spawn).map_err(|error| match error {
        SpawnError::Start { .. } => Failure::new(FailureCode::WorkerLost, error.to_string()),
        SpawnError::Os(_) => Failure::new(FailureCode::Internal, error.to_string()),
    })?;
    Ok((child, socket))
}

/// Waits until some rank has something to say; false from the deadline on.
fn wait(ranks: &mut [Starting], deadline: Deadline) -> Result<bool, Failure> {
    let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
    for rank in ranks.iter() {
        fds.push(rank.child.as_fd());
        fds.extend(rank.ready.is_none().then(|| rank.socket.as_fd()));
        fds.extend(rank.tail.fd());
    }
    wait_readable(&fds, deadline).map_err(|error| Failure::new(FailureCode::Internal, error.to_string()))?;
    // The limit holds also for ranks that always have something to say.
    Ok(!deadline.has_passed())
}

/// Takes in what rank `rank_idx` has said, or how it ended.
fn listen(ranks: &mut [Starting], rank_idx: usize, progress: Progress<'_>) -> Result<(), Failure> {
    // At most 64 ranks.
    let rank = Rank(rank_idx as u16);
    let starting = &mut ranks[rank_idx];
    if starting
        .tail
        .fd()
        .is_some_and(|fd| wait_readable(&[fd], Deadline::PASSED).is_ok_and(|ready| ready[0]))
    {
        starting.tail.read();
    }
    // Looked at before the socket: what it sent before it ended is then there.
    let status = starting
        .child
        .try_wait()
        .map_err(|e| Failure::new(FailureCode::Internal, e.to_string()))?;
    let mut is_closed = false;
    for _ in 0..MAX_MESSAGES_PER_LOOK {
        if is_closed || ranks[rank_idx].ready.is_some() {
            break;
        }
        match ranks[rank_idx].socket.try_receive() {
            Ok(None) => break,
            Ok(Some((BootUp::Phase(phase), _))) => {
                ranks[rank_idx].phase = phase;
                progress(rank, phase);
            }
            Ok(Some((
                BootUp::Ready {
                    model,
                    device,
                    weight_bytes,
                    methods,
                },
                _,
            ))) => {
                ranks[rank_idx].phase = StartPhase::Ready;
                ranks[rank_idx].ready = Some(Ready {
                    model,
                    device,
                    weight_bytes,
                    methods,
                });
                progress(rank, StartPhase::Ready);
            }
            Ok(Some((BootUp::StartFailed(failure), _))) => {
                // Its exit status follows at once.
                let _ = ranks[rank_idx].child.wait(Deadline::after(EXIT_GRACE));
                let failure = if failure.rank.is_none() {
                    failure.on_rank(rank)
                } else {
                    failure
                };
                return Err(failure);
            }
            Ok(Some((BootUp::PublishShared { .. }, _))) if rank_idx != 0 || ranks[0].has_published => {
                let text = "weights are published once, and by rank 0 only";
                return Err(Failure::new(FailureCode::Protocol, text).on_rank(rank));
            }
            Ok(Some((BootUp::PublishShared { .. }, fd))) => {
                ranks[0].has_published = true;
                for (other_idx, other) in ranks.iter().enumerate() {
                    if other_idx != rank_idx {
                        // One that is gone is noticed by its status.
                        let _ = other.socket.share(fd.as_ref().map(AsFd::as_fd));
                    }
                }
            }
            Err(SetupError::Link(LinkError::Closed)) => is_closed = true,
            Err(error) => return Err(setup_failure(&error).on_rank(rank)),
        }
    }
    let starting = &mut ranks[rank_idx];
    let status = match status {
        None if is_closed => starting.child.wait(Deadline::after(EXIT_GRACE)).ok().flatten(),
        status => status,
    };
    if status.is_none() && !is_closed {
        return Ok(());
    }
    starting.tail.read_rest();
    let how = status.map_or_else(|| "closed its socket".to_owned(), |status| status.to_string());
    let last = starting
        .tail
        .lines()
        .last()
        .map(|line| format!("; its last words: {line}"))
        .unwrap_or_default();
    let text = format!("worker {} {how}{last}", starting.child.pid());
    Err(Failure::new(FailureCode::WorkerLost, text)
        .on_rank(rank)
        .during(starting.phase.to_string()))
}

/// Ends what was started, and says how each rank fared.
fn undo(options: &MpOptions, ranks: Vec<Starting>, cause: Failure) -> ExecutorError {
    let ended: Vec<bool> = ranks
        .iter()
        .map(|rank| !matches!(rank.child.try_wait(), Ok(None)))
        .collect();
    for (rank, _) in ranks.iter().zip(&ended).filter(|(_, ended)| !**ended) {
        // One that ended meanwhile needs no signal.
        let _ = rank.child.signal(Signal::KILL);
    }
    let deadline = Deadline::after(KILL_LIMIT);
    let describe = |(rank_idx, (mut rank, ended)): (usize, (Starting, bool))| {
        let status = match rank.child.wait(deadline) {
            Ok(Some(_)) if !ended => "stopped".to_owned(),
            Ok(Some(status)) => status.to_string(),
            Ok(None) => "does not end".to_owned(),
            Err(error) => error.to_string(),
        };
        rank.tail.read_rest();
        let lines: String = rank.tail.lines().map(|line| format!("\n      {line}")).collect();
        format!("rank {rank_idx}: {}; {status}{lines}", rank.phase)
    };
    ExecutorError::Start {
        kind: "mp",
        world_size: options.n_workers,
        cause,
        ranks: ranks.into_iter().zip(ended).enumerate().map(describe).collect(),
    }
}

pub(crate) fn setup_failure(error: &SetupError) -> Failure {
    use denoised_ring::AttachError;
    let code = match error {
        SetupError::BadSpec { .. } => FailureCode::InvalidRequest,
        SetupError::Memory(_) => FailureCode::OutOfMemory,
        SetupError::Attach(AttachError::Memory(denoised_os::memfd::MemoryError::NoSpace { .. })) => {
            FailureCode::OutOfMemory
        }
        SetupError::Link(_) | SetupError::Decode(_) | SetupError::Unexpected { .. } => FailureCode::Protocol,
        SetupError::Attach(_) | SetupError::Os(_) => FailureCode::Internal,
    };
    Failure::new(code, error.to_string())
}
