//! The pipeline program on pipelines without a model.

use super::*;
use denoised_tensor::MemoryStats;
use denoised_types::{GenerateRequest, Image, ModelInfo, NamedTensor, Resolved};
use std::any::Any;

/// A pipeline without a model. The prompt says what happens: `key=K` sets the batch key, `begin=CODE`, `step=CODE` and
/// `decode=CODE` fail there, `device=CODE` fails the whole second step.
#[derive(Debug)]
struct FakePipeline(ModelInfo);

/// Pictures of this width cannot be made.
const BROKEN_GRID_PX: u32 = 9;
/// Pictures of this width are too small.
const SMALL_GRID_PX: u32 = 3;

#[derive(Debug)]
struct FakeRunning {
    prompt: String,
    resolved: Resolved,
    step_idx: u32,
    /// Stands for the latents: every step changes it, in a way that depends on which step it is.
    state: u64,
    trace: Vec<NamedTensor>,
    /// Stands for device memory: counted as long as this is alive.
    _memory: std::rc::Rc<()>,
}

thread_local! {
    /// Held once by itself, and once by every request that holds memory on this thread.
    static MEMORY: std::rc::Rc<()> = std::rc::Rc::new(());
}

impl Running for FakeRunning {
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
    fn resolved(&self) -> &Resolved {
        &self.resolved
    }
    fn step_idx(&self) -> u32 {
        self.step_idx
    }
    fn n_steps(&self) -> u32 {
        self.resolved.n_steps
    }
    fn batch_key(&self) -> u64 {
        match &self.prompt {
            prompt if prompt.contains("key=2") => 2,
            // Another denoiser from its second step on, as a model with two experts has it.
            prompt if prompt.contains("key=3 later") && self.step_idx > 0 => 3,
            _ => 1,
        }
    }
    fn take_trace(&mut self) -> Vec<NamedTensor> {
        std::mem::take(&mut self.trace)
    }
}

fn failure_in(prompt: &str, place: &str) -> Result<(), Failure> {
    let code = match prompt
        .split(' ')
        .find_map(|word| word.strip_prefix(place)?.strip_prefix('='))
    {
        None => return Ok(()),
        Some("non_finite") => FailureCode::NonFinite,
        Some("invalid_request") => FailureCode::InvalidRequest,
        Some("out_of_memory") => FailureCode::OutOfMemory,
        Some(_) => FailureCode::WorkerFailed,
    };
    Err(Failure::new(code, format!("{place} failed")))
}

fn fake(running: &mut dyn Running) -> &mut FakeRunning {
    running
        .as_any_mut()
        .downcast_mut()
        .expect("made by the fake pipeline")
}

impl Pipeline for FakePipeline {
    fn info(&self) -> &ModelInfo {
        &self.0
    }
    fn resolve(&self, request: &GenerateRequest) -> Result<Resolved, Failure> {
        if request.width == Some(BROKEN_GRID_PX) {
            return Err(Failure::new(FailureCode::OutOfMemory, "no room"));
        }
        if request.width == Some(SMALL_GRID_PX) {
            return Err(Failure::new(FailureCode::InvalidRequest, "too small"));
        }
        Ok(Resolved {
            width: 8,
            height: 8,
            n_frames: 1,
            n_steps: request.n_steps.unwrap_or(2),
            guidance: 1.0,
            seed: request.seed,
            sampler: "fake".to_owned(),
            warnings: Vec::new(),
        })
    }
    fn begin(&self, request: &GenerateRequest) -> Result<Box<dyn Running>, Failure> {
        failure_in(&request.prompt, "begin")?;
        Ok(Box::new(FakeRunning {
            prompt: request.prompt.clone(),
            resolved: self.resolve(request)?,
            step_idx: 0,
            state: request.seed,
            trace: vec![NamedTensor::from_f32("latents.init", &[1], &[0.0])],
            _memory: MEMORY.with(std::rc::Rc::clone),
        }))
    }
    fn step(&self, members: &mut [&mut dyn Running]) -> Result<Vec<Result<(), Failure>>, Failure> {
        let key = members[0].batch_key();
        let mut outcomes = Vec::new();
        for member in members {
            assert_eq!(member.batch_key(), key, "members of a step share a key");
            let running = fake(*member);
            if running.step_idx == 1 {
                failure_in(&running.prompt, "device")?;
            }
            outcomes.push(failure_in(&running.prompt, "step"));
            running.step_idx += 1;
            running.state = (running.state ^ u64::from(running.step_idx)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let name = format!("latents.step_{}", running.step_idx - 1);
            running.trace.push(NamedTensor::from_f32(name, &[1], &[0.0]));
        }
        Ok(outcomes)
    }
    fn decode(&self, running: &mut dyn Running) -> Result<Image, Failure> {
        let running = fake(running);
        failure_in(&running.prompt, "decode")?;
        running.trace.push(NamedTensor::from_f32("image", &[1], &[0.0]));
        Ok(Image {
            width: 8,
            height: 8,
            n_frames: 1,
            rgb: running.state.to_le_bytes().repeat(24),
        })
    }
    fn memory(&self) -> MemoryStats {
        let used_bytes = MEMORY.with(|memory| std::rc::Rc::strong_count(memory) - 1) as u64;
        MemoryStats {
            used_bytes,
            peak_bytes: used_bytes,
        }
    }
}

/// Writes down what it is told, and stops `cancel.0` once it has done `cancel.1` steps.
#[derive(Default)]
struct Log {
    lines: Vec<String>,
    cancel: Option<(u64, u32)>,
    pictures: std::collections::BTreeMap<u64, Vec<u8>>,
    stages: Vec<String>,
    n_done: std::collections::BTreeMap<u64, u32>,
    /// How many requests held memory at each end.
    n_holding: Vec<usize>,
    /// What was told last of the device's memory.
    memory: MemoryStats,
}

impl WaveSink for Log {
    fn enter(&mut self, stage: Stage<'_>) {
        self.stages.push(match stage {
            Stage::Encode(id) => format!("encode {id}"),
            Stage::Step(ids) => {
                let ids: Vec<String> = ids.iter().map(RequestId::to_string).collect();
                format!("step {}", ids.join(" "))
            }
            Stage::Decode(id) => format!("decode {id}"),
        });
    }
    fn memory(&mut self, memory: MemoryStats) {
        self.memory = memory;
    }
    fn started(&mut self, request_id: RequestId) {
        self.lines.push(format!("{request_id} started"));
    }
    fn step(&mut self, request_id: RequestId, n_done: u32, n_steps: u32) {
        self.n_done.insert(request_id.0, n_done);
        self.lines.push(format!("{request_id} step {n_done}/{n_steps}"));
    }
    fn tensor(&mut self, request_id: RequestId, tensor: NamedTensor) {
        self.lines.push(format!("{request_id} tensor {}", tensor.name));
    }
    fn done(&mut self, request_id: RequestId, outcome: Result<Generated, Failure>) {
        self.n_holding
            .push(MEMORY.with(|memory| std::rc::Rc::strong_count(memory) - 1));
        let outcome = match outcome {
            Ok(generated) => {
                self.pictures.insert(request_id.0, generated.image.rgb);
                format!("seed {}", generated.resolved.seed)
            }
            Err(failure) => format!("{}, {}", failure.code.as_str(), failure.phase.unwrap_or_default()),
        };
        self.lines.push(format!("{request_id} done: {outcome}"));
    }
    fn stop_reason(&self, request_id: RequestId, _deadline_ns: u64) -> Option<Failure> {
        let (id, after) = self.cancel?;
        let n_done = self.n_done.get(&request_id.0).copied().unwrap_or(0);
        (id == request_id.0 && n_done >= after).then(|| Failure::new(FailureCode::Cancelled, "cancelled"))
    }
}

fn program() -> PipelineProgram {
    program_with_grid(8)
}

fn program_with_grid(grid_px: u32) -> PipelineProgram {
    PipelineProgram::new(Box::new(FakePipeline(ModelInfo {
        family: "fake".to_owned(),
        grid_px,
        default_size: (8, 8),
        max_side_px: 8,
        default_n_steps: 2,
        default_guidance: 1.0,
        samplers: vec!["fake".to_owned()],
        checkpoint_bytes: 0,
        ..ModelInfo::default()
    })))
}

fn members(members: &[(u64, &str, u32)]) -> Vec<WaveMember> {
    let member = |&(id, prompt, n_steps): &(u64, &str, u32)| WaveMember {
        request_id: RequestId(id),
        request: GenerateRequest {
            seed: id,
            n_steps: Some(n_steps),
            ..GenerateRequest::new(prompt)
        },
        deadline_ns: 0,
    };
    members.iter().map(member).collect()
}

fn run(of: &[(u64, &str, u32)], cancel: Option<(u64, u32)>) -> (Vec<String>, Result<(), Failure>) {
    let mut log = Log {
        cancel,
        ..Log::default()
    };
    let result = program().run_wave(members(of), &mut log);
    (log.lines, result)
}

/// Drives a program in step mode as an engine does: what has not ended goes on.
struct Stepper {
    program: PipelineProgram,
    log: Log,
    going_on: Vec<RequestId>,
}

impl Stepper {
    fn new() -> Self {
        Self {
            program: program(),
            log: Log::default(),
            going_on: Vec::new(),
        }
    }

    fn wave(&mut self, joining: &[(u64, &str, u32)], cancelled: &[u64]) -> Result<(), Failure> {
        let cancelled: Vec<RequestId> = cancelled.iter().copied().map(RequestId).collect();
        self.going_on.retain(|id| !cancelled.contains(id));
        let wave = StepWave {
            joining: members(joining),
            continuing: self.going_on.clone(),
            cancelled,
            adapters: Vec::new(),
        };
        self.going_on
            .extend(joining.iter().map(|(id, ..)| RequestId(*id)));
        let result = self.program.run_step(wave, &mut self.log);
        let lines = &self.log.lines;
        let has_ended = |id: &RequestId| lines.iter().any(|line| line.starts_with(&format!("{id} done")));
        self.going_on.retain(|id| !has_ended(id));
        result
    }

    /// Waves without anything new, until all have ended.
    fn finish(&mut self) {
        for _ in 0..100 {
            if self.going_on.is_empty() {
                return;
            }
            self.wave(&[], &[]).unwrap();
        }
        panic!("{:?} never end", self.going_on);
    }
}

fn of<'a>(lines: &'a [String], id: &str) -> Vec<&'a str> {
    let prefix = format!("{id} ");
    lines
        .iter()
        .filter_map(|line| line.strip_prefix(&prefix))
        .collect()
}

#[test]
fn a_generation_is_reported_as_it_goes() {
    let (lines, result) = run(&[(1, "", 2)], None);
    assert_eq!(result, Ok(()));
    assert_eq!(
        of(&lines, "1"),
        [
            "started",
            "tensor latents.init",
            "tensor latents.step_0",
            "step 1/2",
            "tensor latents.step_1",
            "step 2/2",
            "tensor image",
            "done: seed 1",
        ]
    );
}

#[test]
fn members_of_different_shapes_and_lengths_all_end() {
    let (lines, result) = run(&[(1, "", 1), (2, "key=2", 3), (3, "", 4)], None);
    assert_eq!(result, Ok(()));
    for id in ["1", "2", "3"] {
        assert_eq!(of(&lines, id).last().unwrap(), &format!("done: seed {id}"));
    }
    // Members of one key go step by step together, so the shorter one ends first.
    let end_of = |id: &str| {
        lines
            .iter()
            .position(|line| line.starts_with(&format!("{id} done")))
            .unwrap()
    };
    assert!(end_of("1") < lines.iter().position(|line| line == "3 step 2/4").unwrap());
}

#[test]
fn members_whose_keys_part_on_the_way_go_on_apart() {
    // The pipeline itself asserts that the members of a step share a key.
    let (lines, result) = run(&[(1, "", 3), (2, "key=3 later", 3), (3, "", 3)], None);
    assert_eq!(result, Ok(()));
    for id in ["1", "2", "3"] {
        assert_eq!(of(&lines, id).last().unwrap(), &format!("done: seed {id}"));
    }
}

#[test]
fn a_cancelled_member_stops_at_the_next_step_and_the_other_goes_on() {
    let (lines, result) = run(&[(1, "", 5), (2, "", 5)], Some((1, 2)));
    assert_eq!(result, Ok(()));
    let first = of(&lines, "1");
    assert_eq!(first.last().unwrap(), &"done: cancelled, step 3 of 5");
    assert!(first.contains(&"step 2/5") && !first.contains(&"step 3/5"));
    assert_eq!(of(&lines, "2").last().unwrap(), &"done: seed 2");
}

#[test]
fn a_request_cancelled_before_its_start_is_not_computed() {
    let (lines, _) = run(&[(1, "", 5)], Some((1, 0)));
    assert_eq!(of(&lines, "1"), ["started", "done: cancelled, "]);
}

#[test]
fn a_members_own_failure_is_its_own() {
    for (place, phase) in [
        // What the caller got wrong happened nowhere.
        ("begin=invalid_request", "invalid_request, "),
        ("begin=out_of_memory", "out_of_memory, prompt encoding"),
        ("step=non_finite", "non_finite, step 1 of 2"),
        ("decode=non_finite", "non_finite, decoding"),
    ] {
        let (lines, result) = run(&[(1, place, 2), (2, "", 2)], None);
        assert_eq!(result, Ok(()), "{place}");
        assert_eq!(lines.iter().filter(|line| line.starts_with("1 done")).count(), 1);
        let end = *of(&lines, "1").last().unwrap();
        assert_eq!(end, format!("done: {phase}"));
        assert_eq!(of(&lines, "2").last().unwrap(), &"done: seed 2");
    }
}

#[test]
fn a_step_without_memory_ends_its_members_and_not_the_rank() {
    let (lines, result) = run(
        &[(1, "device=out_of_memory", 3), (2, "", 3), (3, "key=2", 3)],
        None,
    );
    assert_eq!(result, Ok(()));
    assert_eq!(
        of(&lines, "1").last().unwrap(),
        &"done: out_of_memory, step 2 of 3"
    );
    assert_eq!(
        of(&lines, "2").last().unwrap(),
        &"done: out_of_memory, step 2 of 3"
    );
    assert_eq!(of(&lines, "3").last().unwrap(), &"done: seed 3");
}

#[test]
fn a_device_failure_ends_the_rank() {
    let (lines, result) = run(&[(1, "device=worker_failed", 3), (2, "", 3)], None);
    assert_eq!(result.unwrap_err().code, FailureCode::WorkerFailed);
    // The caller fails both members, with this cause.
    assert!(!lines.iter().any(|line| line.contains("done")));
}

/// What a request gets alone, in one wave.
fn alone(id: u64, prompt: &str, n_steps: u32) -> Vec<u8> {
    let mut log = Log::default();
    program()
        .run_wave(members(&[(id, prompt, n_steps)]), &mut log)
        .unwrap();
    log.pictures.remove(&id).unwrap()
}

#[test]
fn a_step_wave_does_one_step_of_each_and_decodes_with_the_last() {
    let mut stepper = Stepper::new();
    stepper.wave(&[(1, "", 2)], &[]).unwrap();
    assert_eq!(
        stepper.log.lines,
        [
            "1 started",
            "1 tensor latents.init",
            "1 tensor latents.step_0",
            "1 step 1/2"
        ]
    );
    stepper.log.lines.clear();
    stepper.wave(&[(2, "", 1), (3, "key=2", 2)], &[]).unwrap();
    assert_eq!(
        of(&stepper.log.lines, "1"),
        [
            "tensor latents.step_1",
            "step 2/2",
            "tensor image",
            "done: seed 1"
        ]
    );
    assert_eq!(of(&stepper.log.lines, "2").last().unwrap(), &"done: seed 2");
    assert_eq!(of(&stepper.log.lines, "3").last().unwrap(), &"step 1/2");
    assert_eq!(stepper.program.n_residents(), 1);
    // Those of one key share one forward.
    let steps: Vec<&String> = stepper
        .log
        .stages
        .iter()
        .filter(|stage| stage.starts_with("step"))
        .collect();
    assert_eq!(steps, ["step 1", "step 1 2", "step 3"]);
    stepper.finish();
    assert_eq!(stepper.program.n_residents(), 0);
}

#[test]
fn pictures_are_the_same_in_either_mode_and_in_any_company() {
    // Every request joins at its own wave, with lengths and keys that overlap in many ways.
    let requests: Vec<(u64, usize, &str, u32)> = (1..=12)
        .map(|id| {
            (
                id,
                (id * id % 7) as usize,
                ["", "key=2"][id as usize % 2],
                1 + (id % 5) as u32,
            )
        })
        .collect();
    let mut stepper = Stepper::new();
    for wave_idx in 0..7 {
        let joining: Vec<(u64, &str, u32)> = requests
            .iter()
            .filter(|(_, at, ..)| *at == wave_idx)
            .map(|&(id, _, prompt, n_steps)| (id, prompt, n_steps))
            .collect();
        stepper.wave(&joining, &[]).unwrap();
    }
    stepper.finish();
    let mut together = Log::default();
    let all: Vec<(u64, &str, u32)> = requests
        .iter()
        .map(|&(id, _, prompt, n)| (id, prompt, n))
        .collect();
    program().run_wave(members(&all), &mut together).unwrap();
    for (id, _, prompt, n_steps) in requests {
        let expected = alone(id, prompt, n_steps);
        assert_eq!(stepper.log.pictures[&id], expected, "request {id}");
        assert_eq!(together.pictures[&id], expected, "request {id}");
    }
}

#[test]
fn a_cancelled_resident_ends_before_the_step_and_leaves_the_others_as_they_were() {
    let mut stepper = Stepper::new();
    stepper.wave(&[(1, "", 5), (2, "", 5)], &[]).unwrap();
    stepper.wave(&[], &[]).unwrap();
    stepper.log.lines.clear();
    stepper.log.stages.clear();
    stepper.wave(&[], &[1]).unwrap();
    assert_eq!(of(&stepper.log.lines, "1"), ["done: cancelled, step 3 of 5"]);
    assert_eq!(stepper.log.stages, ["step 2"]);
    stepper.finish();
    assert_eq!(stepper.log.pictures[&2], alone(2, "", 5));
    // A wave may hold nothing but a cancel.
    let mut stepper = Stepper::new();
    stepper.wave(&[(1, "", 5)], &[]).unwrap();
    stepper.wave(&[], &[1]).unwrap();
    assert_eq!(
        of(&stepper.log.lines, "1").last().unwrap(),
        &"done: cancelled, step 2 of 5"
    );
    assert_eq!(stepper.program.n_residents(), 0);
}

#[test]
fn failures_in_step_mode_are_those_of_whole_generations() {
    for (place, phase) in [
        ("begin=invalid_request", "invalid_request, "),
        ("begin=out_of_memory", "out_of_memory, prompt encoding"),
        ("step=non_finite", "non_finite, step 1 of 2"),
        ("decode=non_finite", "non_finite, decoding"),
    ] {
        let mut stepper = Stepper::new();
        stepper.wave(&[(1, place, 2), (2, "", 2)], &[]).unwrap();
        stepper.finish();
        let end = *of(&stepper.log.lines, "1").last().unwrap();
        assert_eq!(end, format!("done: {phase}"));
        assert_eq!(stepper.log.pictures[&2], alone(2, "", 2));
        assert_eq!(stepper.program.n_residents(), 0);
    }
    // A forward without memory ends those who shared it.
    let mut stepper = Stepper::new();
    stepper
        .wave(
            &[(1, "device=out_of_memory", 3), (2, "", 3), (3, "key=2", 3)],
            &[],
        )
        .unwrap();
    stepper.finish();
    for id in ["1", "2"] {
        assert_eq!(
            of(&stepper.log.lines, id).last().unwrap(),
            &"done: out_of_memory, step 2 of 3"
        );
    }
    assert_eq!(stepper.log.pictures[&3], alone(3, "key=2", 3));
    // A broken device ends the rank.
    let mut stepper = Stepper::new();
    stepper
        .wave(&[(1, "device=worker_failed", 3), (2, "", 3)], &[])
        .unwrap();
    let failure = stepper.wave(&[], &[]).unwrap_err();
    assert_eq!(failure.code, FailureCode::WorkerFailed);
    assert!(!stepper.log.lines.iter().any(|line| line.contains("done")));
}

#[test]
fn adapters_that_are_not_there_are_refused_by_name() {
    let mut member = members(&[(1, "", 2)]);
    member[0].request.adapters = vec![denoised_types::Adapter {
        name: "ink".to_owned(),
        scale: 1.0,
    }];
    let mut log = Log::default();
    program().run_wave(member, &mut log).unwrap();
    assert_eq!(of(&log.lines, "1"), ["started", "done: invalid_request, "]);
}

#[test]
fn warming_up_computes_one_small_picture_and_fails_as_it_fails() {
    assert_eq!(warm_up(program().pipeline()), Ok(()));
    let failure = warm_up(program_with_grid(BROKEN_GRID_PX).pipeline()).unwrap_err();
    assert_eq!(failure.code, FailureCode::OutOfMemory);
    let with_larger_pictures = program_with_grid(SMALL_GRID_PX);
    assert_eq!(warm_up(with_larger_pictures.pipeline()), Ok(()));
}

#[test]
fn p5_what_a_request_held_is_free_before_its_end_is_told() {
    // One finishes and one fails; in step mode one is cancelled too. Whoever has ended holds nothing at that moment.
    let mut log = Log::default();
    program()
        .run_wave(members(&[(1, "", 1), (2, "", 3)]), &mut log)
        .unwrap();
    assert_eq!(log.n_holding, [1, 0]);
    assert_eq!(log.memory.used_bytes, 0, "it is told when all have ended");
    let mut stepper = Stepper::new();
    stepper
        .wave(&[(1, "", 5), (2, "", 2), (3, "step=non_finite", 5)], &[])
        .unwrap();
    stepper.wave(&[], &[1]).unwrap();
    assert_eq!(stepper.log.n_holding, [2, 1, 0]);
    assert_eq!(stepper.log.memory.used_bytes, 0, "it is told when all have ended");
}
