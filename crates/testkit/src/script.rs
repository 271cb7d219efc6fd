//! A worker that computes nothing and does what its script says: steps that last, failures, panics, exits, silence.
//!
//! The script travels as text in [`WorkerConfig::model`], so the same one runs in a process and on a thread.

mod device;
mod meeting;
mod methods;
mod program;

pub use device::{BASE_BYTES, REQUEST_BYTES, device_bytes};
pub use methods::scripted_registry;

use denoised_types::{
    Adapter, Failure, FailureCode, GenerateRequest, Image, Mode, Rank, RequestId, WaveId, WorkerConfig,
};
use denoised_wire::{Member, StartPhase, Wave};
use denoised_worker::{Program, Start, StartContext, Started};
use device::Device;
use meeting::Meeting;
use program::{Fate, Scripted};
use serde::{Deserialize, Serialize};
use std::{io::Write, os::fd::OwnedFd, path::PathBuf};

/// What the workers of a world shall do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Script {
    /// How long each step lasts. In step mode all members of a wave share it.
    pub step_ms: u64,
    /// Width and height of the pictures, which depend on the request's seed and adapters alone.
    pub side_px: u32,
    /// With trace capture: a tensor of so many f32 values per step.
    pub n_trace_values: usize,
    /// What goes wrong, and where.
    pub faults: Vec<Fault>,
    /// Each rank appends a line `rank <n>` to this file when it is dropped in order.
    pub cleanup_marker: Option<PathBuf>,
    /// How long that clean-up takes before the line is written.
    pub cleanup_ms: u64,
    /// Ranks other than 0 wait for weights that rank 0 publishes.
    pub shares_weights: bool,
    /// Ranks meet before each step in this folder, which must be empty, and fail when they do not mean the same step of the same
    /// requests, or when one does not come.
    pub meeting: Option<PathBuf>,
    /// Each rank keeps account here of its device memory; [`device_bytes`] adds up.
    pub device_account: Option<PathBuf>,
}

/// One thing that goes wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// On which rank; `None` on all.
    pub rank: Option<u16>,
    /// When.
    pub at: At,
    /// What happens then.
    pub what: What,
}

/// A moment in a worker's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum At {
    /// While it starts.
    Start,
    /// When a wave begins.
    Wave,
    /// Before step `0..n_steps` of any request.
    Step(u32),
    /// Before the request ends.
    Decode,
    /// In the method `add_adapter`.
    AddAdapter,
}

/// What happens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum What {
    /// The request (or the start) fails with this text.
    Fail(FailureCode, String),
    /// The rank as a whole fails with this text.
    FailRank(FailureCode, String),
    /// A panic with this text.
    Panic(String),
    /// The process exits with this code. On a thread: a panic.
    Exit(i32),
    /// The process writes this line to standard error.
    Say(String),
    /// It sleeps for so many milliseconds.
    Sleep(u64),
    /// It keeps its thread busy for so many milliseconds.
    Busy(u64),
    /// It does nothing any more (for an hour).
    Hang,
    /// It breaks the promise to end every request.
    Forget,
}

impl Default for Script {
    /// Quick steps, small pictures, nothing goes wrong.
    fn default() -> Self {
        Self {
            step_ms: 0,
            side_px: 8,
            n_trace_values: 16,
            faults: Vec::new(),
            cleanup_marker: None,
            cleanup_ms: 0,
            shares_weights: false,
            meeting: None,
            device_account: None,
        }
    }
}

impl Script {
    /// Steps that last.
    pub fn with_steps_of(step_ms: u64) -> Self {
        Self {
            step_ms,
            ..Self::default()
        }
    }

    /// Adds a fault.
    #[must_use]
    pub fn fault(mut self, rank: Option<u16>, at: At, what: What) -> Self {
        self.faults.push(Fault { rank, at, what });
        self
    }

    /// The configuration that carries this script to a worker.
    pub fn config(&self) -> WorkerConfig {
        let text = serde_json::to_string(self).expect("a script is plain data");
        WorkerConfig {
            model: text.into(),
            device: "script".into(),
            dtype: "f32".into(),
            n_threads: None,
            warm_up: false,
        }
    }

    pub(crate) fn from_config(config: &WorkerConfig) -> Result<Self, Failure> {
        let text = config.model.to_string_lossy();
        serde_json::from_str(&text)
            .map_err(|error| Failure::new(FailureCode::InvalidModel, error.to_string()))
    }
}

/// The picture that every scripted worker makes for this seed, by hand: byte `i` is the top byte of
/// `(seed + i + 1) * 0x9e3779b97f4a7c15`.
pub fn picture(seed: u64, side_px: u32) -> Image {
    let n_bytes = u64::from(side_px) * u64::from(side_px) * 3;
    let byte = |i: u64| (seed.wrapping_add(i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
    Image {
        width: side_px,
        height: side_px,
        n_frames: 1,
        rgb: (0..n_bytes).map(byte).collect(),
    }
}

/// The picture of a request: that of its seed, changed by its adapters' names and scales in their order.
pub fn picture_of(request: &GenerateRequest, side_px: u32) -> Image {
    picture(seed_with(request.seed, &request.adapters), side_px)
}

/// FNV-1a over the adapters, on top of the seed; the seed itself without adapters.
pub(crate) fn seed_with(seed: u64, adapters: &[Adapter]) -> u64 {
    adapters.iter().fold(seed, |seed, adapter| {
        let scale = adapter.scale.to_bits().to_le_bytes();
        adapter.name.bytes().chain(scale).fold(seed, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    })
}

/// Starts scripted programs; [`scripted_registry`] is the worker with its methods.
#[derive(Debug, Default)]
pub struct ScriptedStart;

impl Start for ScriptedStart {
    fn start(&mut self, context: &mut dyn StartContext) -> Result<(Box<dyn Program>, Started), Failure> {
        let script = Script::from_config(context.config())?;
        let (rank, world_size) = context.place();
        context.phase(StartPhase::OpeningDevice);
        context.phase(StartPhase::ReadingModel);
        let device = Device::open(script.device_account.as_deref(), rank)?;
        let meeting = script
            .meeting
            .as_deref()
            .map(|folder| Meeting::join(folder, rank, world_size))
            .transpose()?;
        let program = Scripted::new(rank, script, device, meeting);
        match program.strike(At::Start) {
            Fate::Spared => {}
            Fate::Forgotten => {
                return Err(Failure::new(FailureCode::Internal, "a start cannot be forgotten"));
            }
            Fate::Fails(failure) | Fate::Dooms(failure) => return Err(failure),
        }
        let mut weight_bytes = 0;
        if program.script().shares_weights {
            context.phase(StartPhase::PreparingWeights {
                done_bytes: 0,
                total_bytes: 4,
            });
            weight_bytes = share(context, rank)?;
        }
        Ok((
            Box::new(program),
            Started {
                weight_bytes,
                ..Started::default()
            },
        ))
    }
}

/// Rank 0 publishes the reading end of a pipe with four bytes in it; one of the others may read them. Returns whether a descriptor
/// was seen, as a number of bytes.
fn share(context: &mut dyn StartContext, rank: Rank) -> Result<u64, Failure> {
    if rank == Rank(0) {
        let internal = |error: std::io::Error| Failure::new(FailureCode::Internal, error.to_string());
        let (reader, mut writer) = std::io::pipe().map_err(internal)?;
        writer.write_all(b"abcd").map_err(internal)?;
        context.publish_shared(Some(OwnedFd::from(reader)))?;
        return Ok(4);
    }
    match context.await_shared()? {
        Some(_) => Ok(4),
        None => Err(Failure::new(FailureCode::Internal, "rank 0 published nothing")),
    }
}

/// A wave of `requests` for `ranks`.
pub fn wave(wave_id: u64, ranks: &[u16], requests: &[(u64, GenerateRequest)]) -> Wave {
    Wave {
        mode: Mode::Request,
        ..step_wave(wave_id, ranks, requests, &[], &[])
    }
}

/// A wave in step mode: `joining` begin, `continuing` go on, `cancelled` are given up. Its adapters are those of the joining requests; a
/// test whose continuing requests have some adds them.
pub fn step_wave(
    wave_id: u64,
    ranks: &[u16],
    joining: &[(u64, GenerateRequest)],
    continuing: &[u64],
    cancelled: &[u64],
) -> Wave {
    let member = |(request_id, request): &(u64, GenerateRequest)| Member {
        request_id: RequestId(*request_id),
        request: request.clone(),
        blobs: Vec::new(),
        deadline_ns: 0,
    };
    let ids = |ids: &[u64]| ids.iter().copied().map(RequestId).collect();
    let adapters = joining.iter().flat_map(|(_, request)| &request.adapters);
    let mut adapters: Vec<String> = adapters.map(|adapter| adapter.name.clone()).collect();
    adapters.sort_unstable();
    adapters.dedup();
    Wave {
        wave_id: WaveId(wave_id),
        mode: Mode::Step,
        ranks: ranks.iter().copied().map(Rank).collect(),
        joining: joining.iter().map(member).collect(),
        continuing: ids(continuing),
        cancelled: ids(cancelled),
        adapters,
    }
}

/// A request with this seed and number of steps.
pub fn request(seed: u64, n_steps: u32) -> GenerateRequest {
    GenerateRequest {
        seed,
        n_steps: Some(n_steps),
        ..GenerateRequest::new("a test picture")
    }
}
