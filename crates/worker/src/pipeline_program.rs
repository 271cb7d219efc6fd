//! The program of a real worker: a [`Pipeline`] behind the [`Start`] and [`Program`] seam.
//!
//! R1. Between any two steps every member is asked whether it must stop; one that stops leaves the others untouched.
//! R2. Members with equal [`Running::batch_key`] share their steps; each gets bit for bit what it would get alone, and in either mode.
//! R3. A failure that only one request can have ends that request. One that makes the device unusable ends the wave with an error,
//!     and so the rank.

use crate::device::{Opened, open_device};
use crate::{Program, Stage, Start, StartContext, Started, StepWave, WaveMember, WaveSink};
use denoised_models::{Model, Pipeline, Running};
use denoised_tensor::{PrepareInput, Prepared};
use denoised_types::{
    Failure, FailureCode, GenerateRequest, Generated, Image, Mask, PhaseTimes, Rank, RequestId, Task,
};
use denoised_wire::StartPhase;
use std::collections::VecDeque;
use std::time::Instant;

/// Starts a [`PipelineProgram`] with the model and device of the worker's configuration.
#[derive(Clone, Copy, Debug, Default)]
pub struct PipelineStart;

impl Start for PipelineStart {
    fn start(&mut self, context: &mut dyn StartContext) -> Result<(Box<dyn Program>, Started), Failure> {
        let (rank, world_size) = context.place();
        context.phase(StartPhase::OpeningDevice);
        let opened = open_device(context.config(), (rank, world_size))?;
        context.phase(StartPhase::ReadingModel);
        let model = denoised_models::open(&context.config().model)?;
        let info = model.info().clone();
        let device = Some(opened.device());
        let prepared = prepare(model.as_ref(), &opened, rank, context)?;
        let weight_bytes = prepared.n_bytes;
        let pipeline = model.load(opened.backend, prepared)?;
        if context.config().warm_up {
            context.phase(StartPhase::WarmingUp);
            warm_up(pipeline.as_ref())
                .map_err(|failure| failure.during(StartPhase::WarmingUp.to_string()))?;
        }
        let started = Started {
            model: Some(info),
            device,
            weight_bytes,
            memory: pipeline.memory(),
        };
        Ok((Box::new(PipelineProgram::new(pipeline)), started))
    }
}

/// Rank 0 builds the weights and shares them; the others take what it built. Where every device has weights of its own, each rank builds
/// them and waits for nobody.
fn prepare(
    model: &dyn Model,
    opened: &Opened,
    rank: Rank,
    context: &mut dyn StartContext,
) -> Result<Prepared, Failure> {
    context.phase(StartPhase::PreparingWeights {
        done_bytes: 0,
        total_bytes: 0,
    });
    let shared = if rank == Rank(0) || !opened.shares_weights {
        None
    } else {
        context.await_shared()?
    };
    let input = match shared {
        Some(weights) => PrepareInput::Shared(weights),
        None => PrepareInput::Build(model.weight_source()),
    };
    let mut prepared = {
        let mut progress = |done_bytes, total_bytes| {
            context.phase(StartPhase::PreparingWeights {
                done_bytes,
                total_bytes,
            });
        };
        opened
            .backend
            .prepare(model.weight_specs(), input, &mut progress)
            .map_err(|error| denoised_models::tensor_failure(&error))?
    };
    if rank == Rank(0) && opened.shares_weights {
        context.publish_shared(prepared.shared.take())?;
    }
    Ok(prepared)
}

/// Computes a picture or video as small as the model makes them, which takes every part of it: a step or two, and its decoding.
fn warm_up(pipeline: &dyn Pipeline) -> Result<(), Failure> {
    let info = pipeline.info();
    let mut side_px = info.grid_px;
    let mut request = warm_up_request(pipeline, side_px, 1);
    // Some models make nothing as small as one step of their grid, and some schedules leave nothing to a single step.
    'sizes: while side_px <= info.max_side_px / 2 {
        for n_steps in [1, 2] {
            request = warm_up_request(pipeline, side_px, n_steps);
            match pipeline.resolve(&request) {
                Err(failure) if failure.code == FailureCode::InvalidRequest => {}
                _ => break 'sizes,
            }
        }
        side_px *= 2;
        request = warm_up_request(pipeline, side_px, 1);
    }
    let mut running = match pipeline.begin(&request) {
        Err(failure) if failure.code == FailureCode::InvalidRequest => {
            // It wants something in its requests that nobody can make up.
            tracing::warn!("the first picture will take longer, the model is not warmed up: {failure}");
            return Ok(());
        }
        running => running?,
    };
    while running.step_idx() < running.n_steps() {
        for outcome in pipeline.step(&mut [running.as_mut()])? {
            outcome?;
        }
    }
    pipeline.decode(running.as_mut())?;
    Ok(())
}

/// A square, given what the model cannot do without.
fn warm_up_request(pipeline: &dyn Pipeline, side_px: u32, n_steps: u32) -> GenerateRequest {
    let info = pipeline.info();
    let from_nothing = [Task::TextToImage, Task::ClassToImage, Task::TextToVideo];
    let needs_picture = !info.tasks.is_empty() && !info.tasks.iter().any(|task| from_nothing.contains(task));
    let needs_mask = needs_picture && info.tasks.iter().all(|task| *task == Task::Inpaint);
    let n_pixels = side_px as usize * side_px as usize;
    let picture = || Image::picture(side_px, side_px, vec![128; 3 * n_pixels]);
    let mask = || Mask {
        width: side_px,
        height: side_px,
        luma: vec![255; n_pixels],
    };
    GenerateRequest {
        // A checkpoint's own may be none of those that are known.
        sampler: info.samplers.first().cloned(),
        width: Some(side_px),
        height: Some(side_px),
        n_frames: info.video.map(|video| 1 + video.frame_step),
        n_steps: Some(n_steps),
        images: needs_picture.then(picture).into_iter().collect(),
        mask: needs_mask.then(mask),
        ..GenerateRequest::new("")
    }
}

/// Runs requests on one pipeline.
#[derive(Debug)]
pub struct PipelineProgram {
    pipeline: Box<dyn Pipeline>,
    /// Step mode: requests between two waves, in the order in which they joined.
    residents: Vec<Active>,
}

/// A request between its begin and its end.
#[derive(Debug)]
struct Active {
    request_id: RequestId,
    deadline_ns: u64,
    running: Box<dyn Running>,
    times: PhaseTimes,
}

impl Active {
    /// The step it is about to do, in words.
    fn phase(&self) -> String {
        format!(
            "step {} of {}",
            self.running.step_idx() + 1,
            self.running.n_steps()
        )
    }

    /// Ends it. What it holds of the device is free before anybody hears of it.
    fn end(self, outcome: Result<Generated, Failure>, sink: &mut dyn WaveSink) {
        let request_id = self.request_id;
        drop(self);
        sink.done(request_id, outcome);
    }

    /// As [`Active::end`] with `failure`; an error if the rank cannot go on after it.
    fn fail(self, failure: Failure, sink: &mut dyn WaveSink) -> Result<(), Failure> {
        let request_id = self.request_id;
        drop(self);
        end_with(request_id, failure, sink)
    }
}

impl PipelineProgram {
    /// A program that runs requests on `pipeline`.
    pub fn new(pipeline: Box<dyn Pipeline>) -> Self {
        Self {
            pipeline,
            residents: Vec::new(),
        }
    }

    /// The pipeline, for methods of an embedder's own.
    pub fn pipeline(&self) -> &dyn Pipeline {
        self.pipeline.as_ref()
    }

    /// How many requests in step mode are between two waves.
    pub fn n_residents(&self) -> usize {
        self.residents.len()
    }

    /// Begins a member; `None` if it has ended already.
    fn begin(&self, member: WaveMember, sink: &mut dyn WaveSink) -> Result<Option<Active>, Failure> {
        let WaveMember {
            request_id,
            request,
            deadline_ns,
        } = member;
        sink.started(request_id);
        if let Some(reason) = sink.stop_reason(request_id, deadline_ns) {
            sink.done(request_id, Err(reason));
            return Ok(None);
        }
        if let Some(adapter) = request.adapters.first() {
            let text = format!("adapter `{}` is not loaded; this worker has none", adapter.name);
            sink.done(request_id, Err(Failure::new(FailureCode::InvalidRequest, text)));
            return Ok(None);
        }
        sink.enter(Stage::Encode(request_id));
        let begun_at = Instant::now();
        let mut running = match self.pipeline.begin(&request) {
            Ok(running) => running,
            Err(failure) => {
                let failure = match failure.code {
                    // Found before anything was computed.
                    FailureCode::InvalidRequest => failure,
                    _ => failure.during("prompt encoding"),
                };
                end_with(request_id, failure, sink)?;
                return Ok(None);
            }
        };
        sink.memory(self.pipeline.memory());
        send_trace(request_id, running.as_mut(), sink);
        Ok(Some(Active {
            request_id,
            deadline_ns,
            running,
            times: PhaseTimes {
                encode_ms: ms_since(begun_at),
                ..PhaseTimes::default()
            },
        }))
    }

    /// Runs one step of `group`, whose members share a batch key, and drops those that ended.
    fn step(&self, group: &mut Vec<Active>, sink: &mut dyn WaveSink) -> Result<(), Failure> {
        let mut idx = 0;
        while let Some(active) = group.get(idx) {
            match sink.stop_reason(active.request_id, active.deadline_ns) {
                Some(reason) => {
                    let reason = reason.during(active.phase());
                    group.remove(idx).end(Err(reason), sink);
                }
                None => idx += 1,
            }
        }
        if group.is_empty() {
            return Ok(());
        }
        // Named before the step, since a member that fails in it may or may not have counted it.
        let phases: Vec<String> = group.iter().map(Active::phase).collect();
        let request_ids: Vec<RequestId> = group.iter().map(|active| active.request_id).collect();
        sink.enter(Stage::Step(&request_ids));
        let begun_at = Instant::now();
        let outcomes = {
            let mut members: Vec<&mut dyn Running> = group
                .iter_mut()
                .map(|active| &mut *active.running as &mut dyn Running)
                .collect();
            self.pipeline.step(&mut members)
        };
        let step_ms = ms_since(begun_at);
        let outcomes = match outcomes {
            Ok(outcomes) if outcomes.len() == group.len() => outcomes,
            Ok(outcomes) => {
                return Err(Failure::new(
                    FailureCode::Internal,
                    format!(
                        "a step of {} members returned {} outcomes",
                        group.len(),
                        outcomes.len()
                    ),
                ));
            }
            Err(failure) => {
                // All members are lost, one by one; whether the rank is too depends on the failure.
                for (active, phase) in group.drain(..).zip(phases) {
                    active.fail(failure.clone().during(phase), sink)?;
                }
                return Ok(());
            }
        };
        let members = std::mem::take(group);
        for ((mut active, phase), outcome) in members.into_iter().zip(phases).zip(outcomes) {
            if let Err(failure) = outcome {
                active.fail(failure.during(phase), sink)?;
                continue;
            }
            active.times.denoise_ms += step_ms;
            send_trace(active.request_id, active.running.as_mut(), sink);
            sink.step(
                active.request_id,
                active.running.step_idx(),
                active.running.n_steps(),
            );
            group.push(active);
        }
        sink.memory(self.pipeline.memory());
        Ok(())
    }

    fn decode(&self, mut active: Active, sink: &mut dyn WaveSink) -> Result<(), Failure> {
        if let Some(reason) = sink.stop_reason(active.request_id, active.deadline_ns) {
            active.end(Err(reason.during("decoding")), sink);
            return Ok(());
        }
        sink.enter(Stage::Decode(active.request_id));
        let begun_at = Instant::now();
        match self.pipeline.decode(active.running.as_mut()) {
            Ok(image) => {
                active.times.decode_ms = ms_since(begun_at);
                sink.memory(self.pipeline.memory());
                send_trace(active.request_id, active.running.as_mut(), sink);
                let generated = Generated {
                    image,
                    tensors: Vec::new(),
                    resolved: active.running.resolved().clone(),
                    rank: Rank::default(),
                    times: active.times,
                };
                active.end(Ok(generated), sink);
                Ok(())
            }
            Err(failure) => active.fail(failure.during("decoding"), sink),
        }
    }
}

impl PipelineProgram {
    /// Begins those of `members` that can be.
    fn begin_all(&self, members: Vec<WaveMember>, sink: &mut dyn WaveSink) -> Result<Vec<Active>, Failure> {
        let mut begun = Vec::with_capacity(members.len());
        for member in members {
            begun.extend(self.begin(member, sink)?);
        }
        Ok(begun)
    }

    /// Ends those of `group` that have done all their steps.
    fn decode_finished(&self, group: &mut Vec<Active>, sink: &mut dyn WaveSink) -> Result<(), Failure> {
        let is_finished = |active: &mut Active| active.running.step_idx() >= active.running.n_steps();
        for active in group.extract_if(.., is_finished).collect::<Vec<_>>() {
            self.decode(active, sink)?;
        }
        Ok(())
    }
}

impl Program for PipelineProgram {
    fn run_wave(&mut self, members: Vec<WaveMember>, sink: &mut dyn WaveSink) -> Result<(), Failure> {
        let mut waiting: VecDeque<Vec<Active>> = groups(self.begin_all(members, sink)?).into();
        while let Some(mut group) = waiting.pop_front() {
            self.decode_finished(&mut group, sink)?;
            self.step(&mut group, sink)?;
            // A step may change keys (a model with a denoiser per range of noise), and those that part go on apart.
            for part in groups(group).into_iter().rev() {
                waiting.push_front(part);
            }
        }
        sink.memory(self.pipeline.memory());
        Ok(())
    }

    fn run_step(&mut self, wave: StepWave, sink: &mut dyn WaveSink) -> Result<(), Failure> {
        let StepWave {
            joining,
            continuing,
            cancelled,
            ..
        } = wave;
        let is_cancelled = |active: &mut Active| cancelled.contains(&active.request_id);
        for active in self.residents.extract_if(.., is_cancelled) {
            let failure = Failure::new(FailureCode::Cancelled, "cancelled").during(active.phase());
            active.end(Err(failure), sink);
        }
        let is_going_on = |active: &mut Active| continuing.contains(&active.request_id);
        let mut members: Vec<Active> = self.residents.extract_if(.., is_going_on).collect();
        members.extend(self.begin_all(joining, sink)?);
        for mut group in groups(members) {
            self.decode_finished(&mut group, sink)?;
            self.step(&mut group, sink)?;
            self.decode_finished(&mut group, sink)?;
            self.residents.append(&mut group);
        }
        sink.memory(self.pipeline.memory());
        Ok(())
    }
}

/// Members with equal batch keys together, in the order of their first.
fn groups(members: Vec<Active>) -> Vec<Vec<Active>> {
    let mut groups: Vec<(u64, Vec<Active>)> = Vec::new();
    for active in members {
        let key = active.running.batch_key();
        match groups.iter_mut().find(|(group_key, _)| *group_key == key) {
            Some((_, group)) => group.push(active),
            None => groups.push((key, vec![active])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// Ends a member with `failure`; an error if the rank cannot go on after it.
fn end_with(request_id: RequestId, failure: Failure, sink: &mut dyn WaveSink) -> Result<(), Failure> {
    if ends_the_rank(failure.code) {
        // The caller fails this member too, with the same cause as all others.
        return Err(failure);
    }
    sink.done(request_id, Err(failure));
    Ok(())
}

/// Whether the device cannot be trusted after a failure of this kind.
fn ends_the_rank(code: FailureCode) -> bool {
    match code {
        FailureCode::WorkerFailed | FailureCode::WorkerLost | FailureCode::NoDevice => true,
        FailureCode::InvalidRequest
        | FailureCode::InvalidModel
        | FailureCode::OutOfMemory
        | FailureCode::NonFinite
        | FailureCode::Cancelled
        | FailureCode::DeadlineExceeded
        | FailureCode::QueueFull
        | FailureCode::Closed
        | FailureCode::Protocol
        | FailureCode::Internal => false,
    }
}

fn send_trace(request_id: RequestId, running: &mut dyn Running, sink: &mut dyn WaveSink) {
    for tensor in running.take_trace() {
        sink.tensor(request_id, tensor);
    }
}

fn ms_since(instant: Instant) -> f64 {
    instant.elapsed().as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests;
