//! A worker that computes nothing and does what its script says: steps that last, failures, panics, exits, silence.
//!
//! The script travels as text in [`WorkerConfig::model`], so the same one runs in a process and on a thread.

use denoised_types::{
    Capture, Failure, FailureCode, Generated, Image, NamedTensor, PhaseTimes, Rank, RequestId, Resolved,
    WorkerConfig,
};
use denoised_wire::StartPhase;
use denoised_worker::{Program, Start, StartContext, Started, WaveMember, WaveSink};
use serde::{Deserialize, Serialize};
use std::{
    io::Write,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// What the workers of a world shall do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Script {
    /// How long each step lasts.
    pub step_ms: u64,
    /// Width and height of the pictures, which depend on the request's seed alone.
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

    fn from_config(config: &WorkerConfig) -> Result<Self, Failure> {
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
        rgb: (0..n_bytes).map(byte).collect(),
    }
}

/// Starts scripted programs.
#[derive(Debug, Default)]
pub struct ScriptedStart;

impl Start for ScriptedStart {
    fn start(&mut self, context: &mut dyn StartContext) -> Result<(Box<dyn Program>, Started), Failure> {
        let script = Script::from_config(context.config())?;
        let (rank, world_size) = context.place();
        context.phase(StartPhase::OpeningDevice);
        context.phase(StartPhase::ReadingModel);
        let program = Scripted {
            rank,
            world_size,
            n_threads: context.config().n_threads,
            script,
        };
        if program.strike(At::Start)? {
            return Err(Failure::new(FailureCode::Internal, "a start cannot be forgotten"));
        }
        let mut weight_bytes = 0;
        if program.script.shares_weights {
            context.phase(StartPhase::PreparingWeights {
                done_bytes: 0,
                total_bytes: 4,
            });
            weight_bytes = share(context, rank)?;
        }
        Ok((
            Box::new(program),
            Started {
                model: None,
                weight_bytes,
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

struct Scripted {
    rank: Rank,
    world_size: u16,
    n_threads: Option<u32>,
    script: Script,
}

impl Scripted {
    /// Lets happen what the script has for this moment. True for [`What::Forget`].
    fn strike(&self, at: At) -> Result<bool, Failure> {
        let mut forgets = false;
        for fault in &self.script.faults {
            if fault.at != at || fault.rank.is_some_and(|rank| Rank(rank) != self.rank) {
                continue;
            }
            match &fault.what {
                What::Fail(code, text) => return Err(Failure::new(*code, text.clone())),
                // Told apart from `Fail` by `fails_rank`.
                What::FailRank(code, text) => return Err(Failure::new(*code, text.clone())),
                other => forgets |= self.suffer(other),
            }
        }
        Ok(forgets)
    }

    fn fails_rank(&self, at: At) -> bool {
        let here = |fault: &&Fault| fault.at == at && fault.rank.is_none_or(|rank| Rank(rank) == self.rank);
        self.script
            .faults
            .iter()
            .filter(here)
            .any(|fault| matches!(fault.what, What::FailRank(..)))
    }

    fn suffer(&self, what: &What) -> bool {
        match what {
            What::Panic(text) => panic!("{text}"),
            What::Exit(code) => exit(*code),
            What::Say(text) => {
                // A test looks for the line where it should arrive.
                let _ = writeln!(std::io::stderr(), "{text}");
            }
            What::Sleep(ms) => std::thread::sleep(Duration::from_millis(*ms)),
            What::Busy(ms) => busy(Duration::from_millis(*ms)),
            What::Hang => std::thread::sleep(Duration::from_secs(3600)),
            What::Forget => return true,
            What::Fail(..) | What::FailRank(..) => {}
        }
        false
    }

    fn generate(&self, member: &WaveMember, sink: &mut dyn WaveSink) -> Option<Result<Generated, Failure>> {
        let WaveMember {
            request_id,
            request,
            deadline_ns,
        } = member;
        let n_steps = request.n_steps.unwrap_or(3);
        sink.started(*request_id);
        if let Some(latents) = &request.latents {
            sink.tensor(*request_id, latents.clone());
        }
        let begin = Instant::now();
        for step_idx in 0..n_steps {
            if let Some(reason) = sink.stop_reason(*request_id, *deadline_ns) {
                return Some(Err(reason));
            }
            match self.strike(At::Step(step_idx)) {
                Ok(false) => {}
                Ok(true) => return None,
                Err(failure) => {
                    return Some(Err(failure.during(format!("step {} of {n_steps}", step_idx + 1))));
                }
            }
            std::thread::sleep(Duration::from_millis(self.script.step_ms));
            if request.capture == Capture::Trace {
                let values = vec![step_idx as f32; self.script.n_trace_values];
                let shape = [values.len() as u64];
                sink.tensor(
                    *request_id,
                    NamedTensor::from_f32(format!("latents.step_{step_idx}"), &shape, &values),
                );
            }
            sink.step(*request_id, step_idx + 1, n_steps);
        }
        match self.strike(At::Decode) {
            Ok(false) => {}
            Ok(true) => return None,
            Err(failure) => return Some(Err(failure)),
        }
        let side_px = request.width.unwrap_or(self.script.side_px);
        Some(Ok(Generated {
            image: picture(request.seed, side_px),
            tensors: Vec::new(),
            resolved: Resolved {
                width: side_px,
                height: side_px,
                n_steps,
                guidance: request.guidance.unwrap_or(1.0),
                seed: request.seed,
                sampler: request.sampler.clone().unwrap_or_else(|| "script".to_owned()),
                warnings: Vec::new(),
            },
            rank: self.rank,
            times: PhaseTimes {
                denoise_ms: begin.elapsed().as_secs_f64() * 1e3,
                ..PhaseTimes::default()
            },
        }))
    }
}

impl Program for Scripted {
    fn run_wave(&mut self, members: Vec<WaveMember>, sink: &mut dyn WaveSink) -> Result<(), Failure> {
        let moments = std::iter::once(At::Wave)
            .chain((0..64).map(At::Step))
            .chain([At::Decode]);
        let fatal: Vec<At> = moments.filter(|at| self.fails_rank(*at)).collect();
        match self.strike(At::Wave) {
            Ok(false) => {}
            Ok(true) => return Ok(()),
            Err(failure) if fatal.contains(&At::Wave) => return Err(failure),
            Err(failure) => {
                for member in members {
                    sink.done(member.request_id, Err(failure.clone()));
                }
                return Ok(());
            }
        }
        for member in members {
            let Some(outcome) = self.generate(&member, sink) else {
                continue;
            };
            if let (Err(failure), false) = (&outcome, fatal.is_empty())
                && !matches!(
                    failure.code,
                    FailureCode::Cancelled | FailureCode::Closed | FailureCode::DeadlineExceeded
                )
            {
                return Err(failure.clone());
            }
            sink.done(member.request_id, outcome);
        }
        Ok(())
    }

    /// Methods: `rank`, `world_size`, `n_threads` (numbers as text); `payload` (argument: a number of bytes, as text);
    /// `sleep`, `busy` (milliseconds, as text; returns the argument); `fail` (always, with the argument as text); `fail_on` (argument
    /// `rank text`: fails there, elsewhere returns the text); `panic`, `exit`, `hang`.
    fn call(&mut self, method: &str, args: &[u8]) -> Option<Result<Vec<u8>, Failure>> {
        let text = String::from_utf8_lossy(args).into_owned();
        let number = || text.trim().parse::<u64>().unwrap_or(0);
        let reply = match method {
            "rank" => self.rank.to_string().into_bytes(),
            "world_size" => self.world_size.to_string().into_bytes(),
            "n_threads" => self
                .n_threads
                .map(|n| n.to_string())
                .unwrap_or_default()
                .into_bytes(),
            "payload" => vec![self.rank.0 as u8; number() as usize],
            "sleep" => {
                std::thread::sleep(Duration::from_millis(number()));
                args.to_vec()
            }
            "busy" => {
                busy(Duration::from_millis(number()));
                args.to_vec()
            }
            "fail" => return Some(Err(Failure::new(FailureCode::WorkerFailed, text))),
            "fail_on" => match text.split_once(' ') {
                Some((rank, text)) if rank.parse() == Ok(self.rank.0) => {
                    return Some(Err(Failure::new(FailureCode::WorkerFailed, text)));
                }
                Some((_, text)) => text.as_bytes().to_vec(),
                None => return Some(Err(Failure::new(FailureCode::InvalidRequest, "no rank and text"))),
            },
            "panic" => panic!("{text}"),
            "exit" => exit(i32::try_from(number()).unwrap_or(1)),
            "hang" => {
                std::thread::sleep(Duration::from_secs(3600));
                Vec::new()
            }
            _ => return None,
        };
        Some(Ok(reply))
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        let Some(path) = &self.script.cleanup_marker else {
            return;
        };
        std::thread::sleep(Duration::from_millis(self.script.cleanup_ms));
        // A missing line is what the test looks for.
        let _ = append(path, &format!("rank {}\n", self.rank));
    }
}

fn append(path: &Path, line: &str) -> std::io::Result<()> {
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path)?;
    file.write_all(line.as_bytes())
}

fn busy(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

fn exit(code: i32) -> ! {
    if !crate::process::is_worker() {
        panic!("a thread cannot exit with code {code}");
    }
    #[expect(clippy::exit, reason = "the script says so")]
    std::process::exit(code)
}

/// A wave of `requests` for `ranks`.
pub fn wave(
    wave_id: u64,
    ranks: &[u16],
    requests: &[(u64, denoised_types::GenerateRequest)],
) -> denoised_wire::Wave {
    let member = |(request_id, request): &(u64, denoised_types::GenerateRequest)| denoised_wire::Member {
        request_id: RequestId(*request_id),
        request: request.clone(),
        latents: None,
        deadline_ns: 0,
    };
    denoised_wire::Wave {
        wave_id: denoised_types::WaveId(wave_id),
        mode: denoised_types::Mode::Request,
        ranks: ranks.iter().copied().map(Rank).collect(),
        joining: requests.iter().map(member).collect(),
        continuing: Vec::new(),
        cancelled: Vec::new(),
        adapters: Vec::new(),
    }
}

/// A request with this seed and number of steps.
pub fn request(seed: u64, n_steps: u32) -> denoised_types::GenerateRequest {
    denoised_types::GenerateRequest {
        seed,
        n_steps: Some(n_steps),
        ..denoised_types::GenerateRequest::new("a test picture")
    }
}
