//! The scripted program: what happens in waves of either mode.

use super::{At, Script, What, device::Buffer, device::Device, meeting::Meeting, picture, seed_with};
use denoised_types::{
    Adapter, Capture, Failure, FailureCode, Generated, NamedTensor, PhaseTimes, Rank, RequestId, Resolved,
};
use denoised_worker::{Program, Stage, StepWave, WaveMember, WaveSink};
use std::{
    collections::BTreeSet,
    io::Write,
    path::Path,
    time::{Duration, Instant},
};

/// Steps of a request that does not say.
const DEFAULT_N_STEPS: u32 = 3;

pub(super) struct Scripted {
    rank: Rank,
    script: Script,
    pub(super) device: Device,
    pub(super) adapters: BTreeSet<String>,
    meeting: Option<Meeting>,
    /// Step mode: requests between two waves.
    residents: Vec<Active>,
}

/// What the script has for a moment.
pub(super) enum Fate {
    /// Nothing, or nothing that outlasts the moment.
    Spared,
    /// The request is not ended.
    Forgotten,
    /// The request fails.
    Fails(Failure),
    /// The rank fails.
    Dooms(Failure),
}

/// A request between its begin and its end.
struct Active {
    request_id: RequestId,
    request: denoised_types::GenerateRequest,
    deadline_ns: u64,
    n_done: u32,
    n_steps: u32,
    denoise_ms: f64,
    /// Steps in waves whose adapters were not those of their members. They spoil the picture.
    n_wrong_steps: u64,
    /// What it holds of the device, until it is dropped.
    _memory: Buffer,
}

impl Active {
    fn phase(&self) -> String {
        format!("step {} of {}", self.n_done + 1, self.n_steps)
    }

    /// Ends it. Its memory is free before anybody hears of it.
    fn end(self, outcome: Result<Generated, Failure>, sink: &mut dyn WaveSink) {
        let request_id = self.request_id;
        drop(self);
        sink.done(request_id, outcome);
    }
}

impl Scripted {
    pub(super) fn new(rank: Rank, script: Script, device: Device, meeting: Option<Meeting>) -> Self {
        Self {
            rank,
            script,
            device,
            adapters: BTreeSet::new(),
            meeting,
            residents: Vec::new(),
        }
    }

    pub(super) fn script(&self) -> &Script {
        &self.script
    }

    /// Lets happen what the script has for this moment.
    pub(super) fn strike(&self, at: At) -> Fate {
        let mut fate = Fate::Spared;
        for fault in &self.script.faults {
            if fault.at != at || fault.rank.is_some_and(|rank| Rank(rank) != self.rank) {
                continue;
            }
            match &fault.what {
                What::Fail(code, text) => return Fate::Fails(Failure::new(*code, text.clone())),
                What::FailRank(code, text) => return Fate::Dooms(Failure::new(*code, text.clone())),
                What::Panic(text) => panic!("{text}"),
                What::Exit(code) => exit(*code),
                What::Say(text) => {
                    // A test looks for the line where it should arrive.
                    let _ = writeln!(std::io::stderr(), "{text}");
                }
                What::Sleep(ms) => std::thread::sleep(Duration::from_millis(*ms)),
                What::Busy(ms) => busy(Duration::from_millis(*ms)),
                What::Hang => std::thread::sleep(Duration::from_secs(3600)),
                What::Forget => fate = Fate::Forgotten,
            }
        }
        fate
    }

    /// The wave as a whole; true if it is not to be carried out.
    fn strike_wave(
        &mut self,
        members: impl Iterator<Item = RequestId>,
        sink: &mut dyn WaveSink,
    ) -> Result<bool, Failure> {
        match self.strike(At::Wave) {
            Fate::Spared => Ok(false),
            Fate::Forgotten => Ok(true),
            Fate::Dooms(failure) => Err(failure),
            Fate::Fails(failure) => {
                for request_id in members {
                    self.residents.retain(|active| active.request_id != request_id);
                    sink.done(request_id, Err(failure.clone()));
                }
                Ok(true)
            }
        }
    }

    /// Begins a request; `None` if it has ended already.
    fn begin(&self, member: WaveMember, sink: &mut dyn WaveSink) -> Option<Active> {
        let WaveMember {
            request_id,
            request,
            deadline_ns,
        } = member;
        sink.started(request_id);
        sink.enter(Stage::Encode(request_id));
        if let Some(adapter) = request
            .adapters
            .iter()
            .find(|adapter| !self.adapters.contains(&adapter.name))
        {
            let known: Vec<&str> = self.adapters.iter().map(String::as_str).collect();
            let text = format!(
                "adapter `{}` is not loaded; this worker has {known:?}",
                adapter.name
            );
            sink.done(request_id, Err(Failure::new(FailureCode::InvalidRequest, text)));
            return None;
        }
        if let Some(latents) = &request.latents {
            sink.tensor(request_id, latents.clone());
        }
        Some(Active {
            request_id,
            deadline_ns,
            n_done: 0,
            n_steps: request.n_steps.unwrap_or(DEFAULT_N_STEPS),
            denoise_ms: 0.0,
            n_wrong_steps: 0,
            _memory: self.device.allocate(super::REQUEST_BYTES),
            request,
        })
    }

    /// One step of all of `group`, less those that end before it. `adapters` are the wave's, in step mode.
    fn step(
        &self,
        group: &mut Vec<Active>,
        adapters: Option<&[String]>,
        sink: &mut dyn WaveSink,
    ) -> Result<(), Failure> {
        for active in std::mem::take(group) {
            if let Some(reason) = sink.stop_reason(active.request_id, active.deadline_ns) {
                active.end(Err(reason), sink);
                continue;
            }
            match self.strike(At::Step(active.n_done)) {
                Fate::Spared => group.push(active),
                Fate::Forgotten => {}
                Fate::Fails(failure) => {
                    let failure = failure.during(active.phase());
                    active.end(Err(failure), sink);
                }
                Fate::Dooms(failure) => return Err(failure.during(active.phase())),
            }
        }
        if group.is_empty() {
            return Ok(());
        }
        let request_ids: Vec<RequestId> = group.iter().map(|active| active.request_id).collect();
        sink.enter(Stage::Step(&request_ids));
        if let Some(meeting) = &self.meeting {
            let steps = group.iter().map(|active| (active.request_id.0, active.n_done));
            meeting.meet(steps)?;
        }
        let begin = Instant::now();
        std::thread::sleep(Duration::from_millis(self.script.step_ms));
        let step_ms = begin.elapsed().as_secs_f64() * 1e3;
        let used: BTreeSet<&str> = group
            .iter()
            .flat_map(|active| &active.request.adapters)
            .map(|adapter: &Adapter| adapter.name.as_str())
            .collect();
        let is_wrong = adapters
            .is_some_and(|adapters| adapters.iter().map(String::as_str).collect::<BTreeSet<_>>() != used);
        for active in group {
            active.n_wrong_steps += u64::from(is_wrong);
            active.denoise_ms += step_ms;
            if active.request.capture == Capture::Trace {
                let values = vec![active.n_done as f32; self.script.n_trace_values];
                let name = format!("latents.step_{}", active.n_done);
                let tensor = NamedTensor::from_f32(name, &[values.len() as u64], &values);
                sink.tensor(active.request_id, tensor);
            }
            active.n_done += 1;
            sink.step(active.request_id, active.n_done, active.n_steps);
        }
        Ok(())
    }

    /// Ends those of `group` that have done all their steps.
    fn decode_finished(&self, group: &mut Vec<Active>, sink: &mut dyn WaveSink) -> Result<(), Failure> {
        let is_finished = |active: &mut Active| active.n_done >= active.n_steps;
        for active in group.extract_if(.., is_finished).collect::<Vec<_>>() {
            sink.enter(Stage::Decode(active.request_id));
            match self.strike(At::Decode) {
                Fate::Spared => {
                    let result = self.result_of(&active);
                    active.end(Ok(result), sink);
                }
                Fate::Forgotten => {}
                Fate::Fails(failure) => active.end(Err(failure), sink),
                Fate::Dooms(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    fn result_of(&self, active: &Active) -> Generated {
        let request = &active.request;
        let side_px = request.width.unwrap_or(self.script.side_px);
        let seed = seed_with(request.seed, &request.adapters).wrapping_add(active.n_wrong_steps);
        Generated {
            image: picture(seed, side_px),
            tensors: Vec::new(),
            resolved: Resolved {
                width: side_px,
                height: side_px,
                n_frames: 1,
                n_steps: active.n_steps,
                guidance: request.guidance.unwrap_or(1.0),
                seed: request.seed,
                sampler: request.sampler.clone().unwrap_or_else(|| "script".to_owned()),
                warnings: Vec::new(),
            },
            rank: self.rank,
            times: PhaseTimes {
                denoise_ms: active.denoise_ms,
                ..PhaseTimes::default()
            },
        }
    }
}

impl Program for Scripted {
    fn run_wave(&mut self, members: Vec<WaveMember>, sink: &mut dyn WaveSink) -> Result<(), Failure> {
        if self.strike_wave(members.iter().map(|member| member.request_id), sink)? {
            return Ok(());
        }
        for member in members {
            let mut alone: Vec<Active> = self.begin(member, sink).into_iter().collect();
            while !alone.is_empty() {
                self.decode_finished(&mut alone, sink)?;
                self.step(&mut alone, None, sink)?;
            }
        }
        Ok(())
    }

    fn run_step(&mut self, wave: StepWave, sink: &mut dyn WaveSink) -> Result<(), Failure> {
        let StepWave {
            joining,
            continuing,
            cancelled,
            adapters,
        } = wave;
        let is_cancelled = |active: &mut Active| cancelled.contains(&active.request_id);
        for active in self.residents.extract_if(.., is_cancelled) {
            let failure = Failure::new(FailureCode::Cancelled, "cancelled").during(active.phase());
            active.end(Err(failure), sink);
        }
        if joining.is_empty() && continuing.is_empty() {
            return Ok(());
        }
        let joining_ids = joining.iter().map(|member| member.request_id);
        let all: Vec<RequestId> = continuing.iter().copied().chain(joining_ids).collect();
        if self.strike_wave(all.into_iter(), sink)? {
            return Ok(());
        }
        let is_going_on = |active: &mut Active| continuing.contains(&active.request_id);
        let mut group: Vec<Active> = self.residents.extract_if(.., is_going_on).collect();
        for member in joining {
            group.extend(self.begin(member, sink));
        }
        self.step(&mut group, Some(&adapters), sink)?;
        self.decode_finished(&mut group, sink)?;
        self.residents.append(&mut group);
        Ok(())
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

pub(super) fn busy(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

pub(super) fn exit(code: i32) -> ! {
    if !crate::process::is_worker() {
        panic!("a thread cannot exit with code {code}");
    }
    #[expect(clippy::exit, reason = "the script says so")]
    std::process::exit(code)
}
