//! The one loop: encode, then step by step denoise, then decode, for every family that is made of a conditioner, a denoiser and a
//! decoder.
//!
//! R1. A step of several requests is one forward over a batch; no op mixes batch elements, so each gets what it would get alone: to the
//!     last bit where the backend's sums do not depend on the batch, within rounding where they do.
//! R2. A request's state is its own: latents, what its sampler keeps, and the generator of its noise.
//! R3. Nothing here is per family: what differs is data or a component.
//! R4. Latents are f32, whatever the denoiser computes in: what a step adds is small beside them.
//! R5. A step is one body for [`Backend::repeat`]: what may differ between two steps of equal shapes is an input of it or in its key.

mod autoencoder;
mod batch;
mod resolve;
mod step;
mod task;

use self::{
    autoencoder::Autoencoder,
    batch::{are_alike, stack_conditionings},
};
use crate::{
    ModelError,
    conditioning::{Conditioning, EncodeArgs, TextOptions, Tokenized},
    layout::LatentsShape,
    parts::{GuidanceRule, Opened, Parts},
    pipeline::{Model, Pipeline, Running},
    tensor_failure, trace,
};
use denoised_nn::Ctx;
use denoised_sampler::{Schedule, TorchGenerator};
use denoised_tensor::{
    Backend, DType, MemoryStats, Prepared, Tensor, TensorError, Weight, WeightSource, WeightSpec,
};
use denoised_types::{
    Capture, Failure, FailureCode, GenerateRequest, Image, ModelInfo, NamedTensor, Resolved,
};
use std::{
    any::Any,
    hash::{DefaultHasher, Hash, Hasher},
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering},
};

/// Of the pipeline that is loaded next.
static NEXT_PIPELINE_ID: AtomicU64 = AtomicU64::new(0);

/// A checkpoint that was opened.
#[derive(Debug)]
pub(crate) struct DiffusionModel {
    opened: Opened,
}

impl DiffusionModel {
    pub(crate) fn new(mut opened: Opened) -> Self {
        let parts = &mut opened.parts;
        if parts.info.tasks.is_empty() {
            parts.info.tasks = parts.tasks.list(parts.latents.temporal.is_some());
        }
        Self { opened }
    }
}

impl Model for DiffusionModel {
    fn info(&self) -> &ModelInfo {
        &self.opened.parts.info
    }

    fn weight_specs(&self) -> &[WeightSpec] {
        &self.opened.specs
    }

    fn weight_source(&self) -> &dyn WeightSource {
        &self.opened.weights
    }

    fn load(
        self: Box<Self>,
        backend: Rc<dyn Backend>,
        prepared: Prepared,
    ) -> Result<Box<dyn Pipeline>, ModelError> {
        let weights = prepared.weights;
        let Opened {
            parts,
            specs,
            weights: files,
        } = self.opened;
        let fits = |(weight, spec): (&Weight, &WeightSpec)| weight.shape[..] == spec.shape[..];
        if weights.len() != specs.len() || !weights.iter().zip(&specs).all(fits) {
            return Err(ModelError::OtherWeights {
                n_prepared: weights.len(),
                n_declared: specs.len(),
            });
        }
        Ok(Box::new(DiffusionPipeline {
            id: NEXT_PIPELINE_ID.fetch_add(1, Ordering::Relaxed),
            parts,
            autoencoder: Autoencoder::new(&specs, files, backend.dtype()),
            backend,
            weights,
        }))
    }
}

/// A loaded model.
#[derive(Debug)]
struct DiffusionPipeline {
    /// Of no other pipeline of this process, not even of one that is gone.
    id: u64,
    parts: Parts,
    autoencoder: Autoencoder,
    backend: Rc<dyn Backend>,
    weights: Vec<Weight>,
}

/// A request on its way.
#[derive(Debug)]
struct Generation {
    resolved: Resolved,
    schedule: Schedule,
    step_idx: usize,
    shape: LatentsShape,
    /// The sampler's state: the latents, then what it keeps. f32 `[1, rows, w, c]` each.
    state: Vec<Tensor>,
    /// What the denoiser is told, per pass (see [`step`]).
    passes: Vec<Conditioning>,
    is_guided: bool,
    /// The scale `s` of `u + s (c - u)`, per expert.
    scales: [f32; 2],
    /// Channels beside the latents, f32 `[1, rows, w, c]`.
    channels: Option<Tensor>,
    /// Latents of pictures to edit, in the element type of activations.
    references: Vec<Tensor>,
    /// What is known of the result.
    known: Option<Known>,
    /// Whether the first frame is known and so has no noise, whatever the step.
    is_first_frame_given: bool,
    /// Of the noise that a sampler adds from step to step.
    generator: TorchGenerator,
    /// `None` unless tracing.
    trace: Option<Vec<NamedTensor>>,
    key: u64,
}

/// A part of the result that is known beforehand.
#[derive(Debug)]
struct Known {
    /// f32, shape of the latents.
    image: Tensor,
    /// f32, shape of the latents: what `image` is mixed with at each step's noise level.
    noise: Tensor,
    /// f32 `[1, rows, w, 1]`: 1 where nothing is known.
    mask: Tensor,
    /// `1 - mask`.
    inverse: Tensor,
}

impl Known {
    fn tensors(&self) -> [&Tensor; 4] {
        [&self.image, &self.noise, &self.mask, &self.inverse]
    }
}

impl Running for Generation {
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn resolved(&self) -> &Resolved {
        &self.resolved
    }

    fn step_idx(&self) -> u32 {
        self.step_idx as u32
    }

    fn n_steps(&self) -> u32 {
        self.schedule.n_steps() as u32
    }

    fn batch_key(&self) -> u64 {
        self.key
    }

    fn take_trace(&mut self) -> Vec<NamedTensor> {
        self.trace.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

impl Generation {
    fn phase(&self) -> String {
        format!("step {} of {}", self.step_idx + 1, self.schedule.n_steps())
    }

    /// Factors of image and noise that make what is known at the noise level after this step.
    fn known_factors(&self) -> [f32; 2] {
        match self.is_first_frame_given {
            true => [1.0, 0.0],
            false => self.schedule.renoise[self.step_idx],
        }
    }

    /// Equal for requests that may share a step, `expert_idx` being the denoiser that is next.
    fn shared_key(&self, expert_idx: usize) -> u64 {
        let mut hasher = DefaultHasher::new();
        expert_idx.hash(&mut hasher);
        self.shape.hash(&mut hasher);
        self.state.len().hash(&mut hasher);
        self.is_guided.hash(&mut hasher);
        self.is_first_frame_given.hash(&mut hasher);
        for pass in &self.passes {
            pass.form().hash(&mut hasher);
            for tensor in pass.tensors() {
                tensor.dims().hash(&mut hasher);
            }
        }
        self.channels.as_ref().map(Tensor::dims).hash(&mut hasher);
        for reference in &self.references {
            reference.dims().hash(&mut hasher);
        }
        self.known.is_some().hash(&mut hasher);
        hasher.finish()
    }
}

impl Pipeline for DiffusionPipeline {
    fn info(&self) -> &ModelInfo {
        &self.parts.info
    }

    fn resolve(&self, request: &GenerateRequest) -> Result<Resolved, Failure> {
        let mut resolved = self.resolve_numbers(request)?;
        let options = self.text_options(request)?;
        let (prompt, negative) = self.tokenize(request, resolved.guidance, options)?;
        resolved.warnings = warnings(&prompt, negative.as_ref());
        let idle = self.idle_arguments(request, resolved.guidance);
        resolved.warnings.extend(idle);
        Ok(resolved)
    }

    fn begin(&self, request: &GenerateRequest) -> Result<Box<dyn Running>, Failure> {
        let mut resolved = self.resolve_numbers(request)?;
        let options = self.text_options(request)?;
        let task = self.task(request)?;
        let given = self.given_latents(request, &resolved)?;
        let (prompt, negative) = self.tokenize(request, resolved.guidance, options)?;
        resolved.warnings = warnings(&prompt, negative.as_ref());
        let idle = self.idle_arguments(request, resolved.guidance);
        resolved.warnings.extend(idle);
        let schedule = self.schedule(request, &resolved, &task)?;
        let shape = self.latents_shape(&resolved);

        let ctx = self.ctx();
        let is_traced = request.capture == Capture::Trace;
        let conditional = self.encode(&ctx, &prompt, (request, &resolved), options, false)?;
        let unconditional = negative.as_ref().map(|text| {
            let unskipped = TextOptions {
                clip_skip: 0,
                ..options
            };
            self.encode(&ctx, text, (request, &resolved), unskipped, true)
        });
        let unconditional = unconditional.transpose()?;
        let mut generator = TorchGenerator::new(resolved.seed);
        let given = self.prepare(&ctx, &task, &resolved, &schedule, &mut generator, given)?;
        let mut trace = None;
        if is_traced {
            let mut tensors = token_ids(&prompt);
            let conditioner = &self.parts.conditioner;
            let encodings = conditioner.trace(&ctx, &conditional, unconditional.as_ref());
            tensors.extend(encodings.map_err(device)?);
            let layout = self.parts.latents.given;
            let values = layout.of_loop(&given.noise, &shape);
            tensors.push(NamedTensor::from_f32(
                "latents.init",
                &layout.dims(&shape),
                &values,
            ));
            trace = Some(tensors);
        }
        let mut state = vec![ctx.upload_f32(&given.start, &shape.dims()).map_err(device)?];
        for _ in 0..schedule.n_kept {
            let kept = ctx.backend.alloc(&shape.dims(), DType::F32).map_err(device)?;
            ctx.backend.fill(&kept, 0.0).map_err(device)?;
            state.push(kept);
        }
        let is_guided = unconditional.is_some();
        let passes = match unconditional {
            None => vec![conditional],
            Some(unconditional) if are_alike(&unconditional, &conditional) => {
                vec![stack_conditionings(&ctx, &[&unconditional, &conditional]).map_err(device)?]
            }
            Some(unconditional) => vec![unconditional, conditional],
        };
        let mut generation = Generation {
            resolved,
            schedule,
            step_idx: 0,
            shape,
            state,
            passes,
            is_guided,
            scales: self.guidance_scales(request),
            channels: given.channels,
            references: given.references,
            known: given.known,
            is_first_frame_given: given.is_first_frame_given,
            generator,
            trace,
            key: 0,
        };
        generation.key = generation.shared_key(self.expert_idx(&generation));
        Ok(Box::new(generation))
    }

    fn step(&self, members: &mut [&mut dyn Running]) -> Result<Vec<Result<(), Failure>>, Failure> {
        let mut generations = Vec::with_capacity(members.len());
        for member in members.iter_mut() {
            let generation = member.as_any_mut().downcast_mut::<Generation>();
            generations.push(generation.ok_or_else(|| internal("a member of another pipeline"))?);
        }
        let Some(first) = generations.first() else {
            return Ok(Vec::new());
        };
        let key = first.key;
        if generations.iter().any(|one| one.key != key) {
            return Err(internal("members of different shapes in one step"));
        }
        if generations
            .iter()
            .any(|one| one.step_idx >= one.schedule.n_steps())
        {
            return Err(internal("a step of a member that has done all of its steps"));
        }
        let ctx = self.ctx();
        let mut noises = Vec::with_capacity(generations.len());
        for generation in &mut generations {
            noises.push(self.fresh_noise(&ctx, generation).map_err(device)?);
        }
        let stepped = self.step_batch(&ctx, &generations, &noises).map_err(device)?;
        drop(noises);
        let mut are_finite = true;
        for slot in &stepped.state {
            are_finite &= ctx.backend.all_finite(slot).map_err(device)?;
        }
        let mut outcomes = Vec::with_capacity(generations.len());
        for (member_idx, generation) in generations.into_iter().enumerate() {
            let mut is_finite = true;
            for (slot, stepped) in generation.state.iter_mut().zip(&stepped.state) {
                *slot = stepped.narrow(0, member_idx, 1).map_err(device)?;
                is_finite &= are_finite || ctx.backend.all_finite(slot).map_err(device)?;
            }
            let step_idx = generation.step_idx;
            if let (Some(trace), Some(guided)) = (&mut generation.trace, &stepped.guided) {
                let guided = guided.narrow(0, member_idx, 1).map_err(device)?;
                let layout = self.parts.latents.steps.without_doubling(!generation.is_guided);
                let shape = &generation.shape;
                for (name, tensor) in [
                    (format!("noise_pred.{step_idx}"), &guided),
                    (format!("latents.step_{step_idx}"), &generation.state[0]),
                ] {
                    trace.push(trace::latents(&ctx, name, tensor, layout, shape).map_err(device)?);
                }
            }
            if !is_finite {
                outcomes.push(Err(non_finite("latents are", &generation.phase())));
                continue;
            }
            generation.step_idx += 1;
            if generation.step_idx < generation.schedule.n_steps() {
                generation.key = generation.shared_key(self.expert_idx(generation));
            }
            outcomes.push(Ok(()));
        }
        Ok(outcomes)
    }

    fn decode(&self, running: &mut dyn Running) -> Result<Image, Failure> {
        let generation = running.as_any_mut().downcast_mut::<Generation>();
        let generation = generation.ok_or_else(|| internal("a member of another pipeline"))?;
        let ctx = self.ctx();
        let decoder = &self.parts.decoder;
        let latents = generation.finished(&ctx).map_err(device)?;
        if !ctx.backend.all_finite(&latents).map_err(device)? {
            return Err(non_finite("latents are", "the last step"));
        }
        let n_frames = generation.shape.n_frames;
        let pixels = self
            .autoencoder
            .run(&ctx, "decoding", |ctx| decoder.decode(ctx, &latents, n_frames));
        let pixels = pixels.map_err(device)?;
        let pixels = pixels.ok_or_else(|| non_finite("the picture is", "decoding"))?;
        if let Some(trace) = &mut generation.trace {
            let floats = ctx.backend.alloc(pixels.dims(), DType::F32).map_err(device)?;
            ctx.backend.to_pixels(&pixels, &floats).map_err(device)?;
            let is_video = self.parts.latents.temporal.is_some();
            let n_frames = is_video.then_some(generation.resolved.n_frames as usize);
            trace.push(trace::pixels(&ctx, "image".to_owned(), &floats, n_frames).map_err(device)?);
        }
        let bytes = ctx.backend.alloc(pixels.dims(), DType::U8).map_err(device)?;
        ctx.backend.to_pixels(&pixels, &bytes).map_err(device)?;
        let mut rgb = vec![0; bytes.shape().n_elements()];
        ctx.backend.download(&bytes, &mut rgb).map_err(device)?;
        Ok(Image {
            width: generation.resolved.width,
            height: generation.resolved.height,
            n_frames: generation.resolved.n_frames,
            rgb,
        })
    }

    fn memory(&self) -> MemoryStats {
        let kept_bytes = self.autoencoder.kept_bytes();
        let memory = self.backend.memory();
        MemoryStats {
            used_bytes: memory.used_bytes + kept_bytes,
            peak_bytes: memory.peak_bytes + kept_bytes,
        }
    }
}

impl DiffusionPipeline {
    fn ctx(&self) -> Ctx<'_> {
        Ctx {
            backend: &*self.backend,
            weights: &self.weights,
            dtype: self.backend.dtype(),
        }
    }

    /// Which denoiser is next.
    fn expert_idx(&self, generation: &Generation) -> usize {
        let timesteps = &generation.schedule.timesteps;
        let timestep = timesteps.get(generation.step_idx).copied();
        self.parts.denoisers.idx(timestep.unwrap_or(f32::INFINITY))
    }

    /// The scale `s` of `u + s (c - u)`, per expert.
    fn guidance_scales(&self, request: &GenerateRequest) -> [f32; 2] {
        let guidance = request.guidance.unwrap_or(self.parts.info.default_guidance);
        match self.parts.guidance {
            GuidanceRule::Offset => [guidance + 1.0; 2],
            GuidanceRule::Embedded => [request.true_guidance.unwrap_or(1.0); 2],
            _ => [guidance, request.guidance_2.unwrap_or(guidance)],
        }
    }

    fn encode(
        &self,
        ctx: &Ctx<'_>,
        text: &Tokenized,
        (request, resolved): (&GenerateRequest, &Resolved),
        options: TextOptions,
        is_negative: bool,
    ) -> Result<Conditioning, Failure> {
        let args = EncodeArgs {
            options,
            width: resolved.width,
            height: resolved.height,
            guidance: resolved.guidance,
            is_negative,
            is_traced: request.capture == Capture::Trace,
            text_layers: &request.text_layers,
            images: &request.images,
        };
        let conditioning = self.parts.conditioner.encode(ctx, text, &args).map_err(device)?;
        for tensor in conditioning.tensors() {
            if !ctx.backend.all_finite(tensor).map_err(device)? {
                let what = if is_negative { "negative prompt" } else { "prompt" };
                return Err(non_finite(
                    &format!("what the {what} became is"),
                    "prompt encoding",
                ));
            }
        }
        Ok(conditioning)
    }

    /// Unit normal noise as torch draws it, as the loop holds latents.
    fn noise(&self, generator: &mut TorchGenerator, shape: &LatentsShape) -> Vec<f32> {
        let mut values = vec![0.0; shape.n_elements()];
        generator.fill_normal(&mut values);
        self.parts.latents.noise.to_loop(&values, shape)
    }

    /// The noise that the next step adds, if it adds any.
    fn fresh_noise(&self, ctx: &Ctx<'_>, generation: &mut Generation) -> Result<Option<Tensor>, TensorError> {
        let update = &generation.schedule.updates[generation.step_idx];
        let adds_noise = |row: &Vec<f32>| row.last().is_some_and(|factor| *factor != 0.0);
        if !update.rows.iter().any(adds_noise) {
            return Ok(None);
        }
        let shape = generation.shape;
        let mut values = vec![0.0; shape.n_elements()];
        generation.generator.fill_normal(&mut values);
        let values = self.parts.latents.steps.to_loop(&values, &shape);
        ctx.upload_f32(&values, &shape.dims()).map(Some)
    }
}

/// Ids of a prompt, under the names of reference cases.
fn token_ids(prompt: &Tokenized) -> Vec<NamedTensor> {
    let name = |idx: usize| match idx {
        1 => "token_ids".to_owned(),
        _ => format!("token_ids.{idx}"),
    };
    // Of several tokenizers, one that the checkpoint does not have made none; an only one makes none of an empty prompt.
    let is_only = prompt.raw.len() == 1;
    let ids = prompt.raw.iter().zip(1..);
    let ids = ids.filter(|(ids, _)| is_only || !ids.is_empty());
    ids.map(|(ids, idx)| trace::ids(name(idx), ids)).collect()
}

fn warnings(prompt: &Tokenized, negative: Option<&Tokenized>) -> Vec<String> {
    let negative = negative.into_iter().flat_map(|text| &text.warnings);
    prompt.warnings.iter().chain(negative).cloned().collect()
}

fn invalid(message: String) -> Failure {
    Failure::new(FailureCode::InvalidRequest, message)
}

fn internal(message: &str) -> Failure {
    Failure::new(FailureCode::Internal, message)
}

fn non_finite(what: &str, phase: &str) -> Failure {
    Failure::new(
        FailureCode::NonFinite,
        format!("{what} NaN or infinite after {phase}"),
    )
    .during(phase)
}

#[allow(clippy::needless_pass_by_value)] // It is the argument of `map_err`.
fn device(error: TensorError) -> Failure {
    tensor_failure(&error)
}
