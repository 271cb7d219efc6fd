//! The one loop: encode, then step by step denoise, then decode, for every family that is made of a conditioner, a denoiser and a
//! decoder.
//!
//! R1. A step of several requests is one forward over a batch; no op mixes batch elements, so each gets what it would get alone: to the
//!     last bit where the backend's sums do not depend on the batch, within rounding where they do.
//! R2. With guidance the batch holds all negative prompts first, then all prompts.
//! R3. Nothing here is per family: what differs is data or a component.
//! R4. Latents are f32, whatever the denoiser computes in: what a step adds is small beside them.
//! R5. A step is one body for [`Backend::repeat`]: what may differ between two steps of equal shapes is an input of it or in its key.

use crate::{
    ModelError,
    conditioning::{Conditioning, TextOptions, Tokenized},
    parts::{Opened, Parts},
    pipeline::{Model, Pipeline, Running},
    tensor_failure, trace,
};
use denoised_nn::Ctx;
use denoised_sampler::{Sampler, Schedule, TorchGenerator};
use denoised_tensor::{
    Backend, DType, MemoryStats, Prepared, StepArgs, Tensor, TensorError, Weight, WeightSource, WeightSpec,
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
    pub(crate) fn new(opened: Opened) -> Self {
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
        let specs = &self.opened.specs;
        let fits = |(weight, spec): (&Weight, &WeightSpec)| weight.shape[..] == spec.shape[..];
        if weights.len() != specs.len() || !weights.iter().zip(specs).all(fits) {
            return Err(ModelError::OtherWeights {
                n_prepared: weights.len(),
                n_declared: specs.len(),
            });
        }
        Ok(Box::new(DiffusionPipeline {
            id: NEXT_PIPELINE_ID.fetch_add(1, Ordering::Relaxed),
            parts: self.opened.parts,
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
    backend: Rc<dyn Backend>,
    weights: Vec<Weight>,
}

/// A request on its way.
#[derive(Debug)]
struct Generation {
    resolved: Resolved,
    schedule: Schedule,
    step_idx: usize,
    /// f32 `[1, h, w, c]`.
    latents: Tensor,
    /// Of a batch of two with guidance, negative first, else of one.
    conditioning: Conditioning,
    is_guided: bool,
    batch_key: u64,
    /// `None` unless tracing.
    trace: Option<Vec<NamedTensor>>,
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
        self.batch_key
    }

    fn take_trace(&mut self) -> Vec<NamedTensor> {
        self.trace.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

impl Generation {
    fn phase(&self) -> String {
        format!("step {} of {}", self.step_idx + 1, self.schedule.n_steps())
    }
}

impl Pipeline for DiffusionPipeline {
    fn info(&self) -> &ModelInfo {
        &self.parts.info
    }

    fn resolve(&self, request: &GenerateRequest) -> Result<Resolved, Failure> {
        let mut resolved = self.resolve_numbers(request)?;
        let options = self.text_options(request)?;
        let (prompt, negative) = self.tokenize(request, resolved.guidance, options);
        resolved.warnings = warnings(&prompt, negative.as_ref());
        Ok(resolved)
    }

    fn begin(&self, request: &GenerateRequest) -> Result<Box<dyn Running>, Failure> {
        let mut resolved = self.resolve_numbers(request)?;
        let options = self.text_options(request)?;
        let given = self.given_latents(request, &resolved)?;
        let (prompt, negative) = self.tokenize(request, resolved.guidance, options);
        resolved.warnings = warnings(&prompt, negative.as_ref());
        let schedule = self.schedule(&resolved.sampler, resolved.n_steps)?;

        let ctx = self.ctx();
        let encode = |text: &Tokenized, options| self.parts.conditioner.encode(&ctx, text, options);
        let conditional = encode(&prompt, options).map_err(device)?;
        let unskipped = TextOptions {
            clip_skip: 0,
            ..options
        };
        let unconditional = negative.as_ref().map(|text| encode(text, unskipped));
        let unconditional = unconditional.transpose().map_err(device)?;
        let noise = match given {
            Some(values) => values,
            None => self.noise(&resolved),
        };
        let dims = self.latents_dims(&resolved);
        let mut trace = None;
        if request.capture == Capture::Trace {
            let begun = self.begin_trace(&ctx, &prompt, &conditional, unconditional.as_ref());
            let mut tensors = begun.map_err(device)?;
            let [_, h, w, c] = dims.map(|extent| extent as u64);
            tensors.push(NamedTensor::from_f32("latents.init", &[1, c, h, w], &noise));
            trace = Some(tensors);
        }
        let scaled: Vec<f32> = noise.iter().map(|x| x * schedule.init_noise_scale).collect();
        let latents = ctx.upload_f32(&trace::channels_last(&scaled, dims[3]), &dims);
        let latents = latents.map_err(device)?;
        let is_guided = unconditional.is_some();
        let conditioning = match unconditional {
            None => conditional,
            Some(unconditional) => stack(&ctx, &[&unconditional, &conditional]).map_err(device)?,
        };
        let batch_key = batch_key(&latents, &conditioning);
        Ok(Box::new(Generation {
            resolved,
            schedule,
            step_idx: 0,
            latents,
            conditioning,
            is_guided,
            batch_key,
            trace,
        }))
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
        let (key, is_guided) = (first.batch_key, first.is_guided);
        if generations.iter().any(|one| one.batch_key != key) {
            return Err(internal("members of different shapes in one step"));
        }
        if generations
            .iter()
            .any(|one| one.step_idx >= one.schedule.n_steps())
        {
            return Err(internal("a step of a member that has done all of its steps"));
        }
        let ctx = self.ctx();
        let stepped = self.step_batch(&ctx, &generations, is_guided).map_err(device)?;
        let are_finite = ctx.backend.all_finite(&stepped.latents).map_err(device)?;
        let mut outcomes = Vec::with_capacity(generations.len());
        for (member_idx, generation) in generations.into_iter().enumerate() {
            generation.latents = stepped.latents.narrow(0, member_idx, 1).map_err(device)?;
            let step_idx = generation.step_idx;
            if let (Some(trace), Some(guided)) = (&mut generation.trace, &stepped.guided) {
                let guided = guided.narrow(0, member_idx, 1).map_err(device)?;
                let name = format!("noise_pred.{step_idx}");
                trace.push(trace::nchw(&ctx, name, &guided).map_err(device)?);
                let name = format!("latents.step_{step_idx}");
                trace.push(trace::nchw(&ctx, name, &generation.latents).map_err(device)?);
            }
            if are_finite || ctx.backend.all_finite(&generation.latents).map_err(device)? {
                generation.step_idx += 1;
                outcomes.push(Ok(()));
            } else {
                outcomes.push(Err(non_finite("latents are", &generation.phase())));
            }
        }
        Ok(outcomes)
    }

    fn decode(&self, running: &mut dyn Running) -> Result<Image, Failure> {
        let generation = running.as_any_mut().downcast_mut::<Generation>();
        let generation = generation.ok_or_else(|| internal("a member of another pipeline"))?;
        let ctx = self.ctx();
        let pixels = self
            .parts
            .decoder
            .decode(&ctx, &generation.latents)
            .map_err(device)?;
        if !ctx.backend.all_finite(&pixels).map_err(device)? {
            return Err(non_finite("the picture is", "decoding"));
        }
        if let Some(trace) = &mut generation.trace {
            let floats = ctx.backend.alloc(pixels.dims(), DType::F32).map_err(device)?;
            ctx.backend.to_pixels(&pixels, &floats).map_err(device)?;
            trace.push(trace::nchw(&ctx, "image".to_owned(), &floats).map_err(device)?);
        }
        let bytes = ctx.backend.alloc(pixels.dims(), DType::U8).map_err(device)?;
        ctx.backend.to_pixels(&pixels, &bytes).map_err(device)?;
        let mut rgb = vec![0; bytes.shape().n_elements()];
        ctx.backend.download(&bytes, &mut rgb).map_err(device)?;
        Ok(Image {
            width: generation.resolved.width,
            height: generation.resolved.height,
            rgb,
        })
    }

    fn memory(&self) -> MemoryStats {
        self.backend.memory()
    }
}

/// What one step of a batch gave.
struct Stepped {
    /// f32 `[members, h, w, c]`.
    latents: Tensor,
    /// Guided predictions of that shape, if a member traces.
    guided: Option<Tensor>,
}

/// What decides which ops a step enqueues, beside the shapes of its inputs.
#[derive(Clone, Copy, Debug, Hash)]
struct StepPlan {
    pipeline_id: u64,
    n_members: usize,
    is_guided: bool,
    /// Whether the denoiser is given anything but the latents themselves.
    is_scaled: bool,
    is_traced: bool,
    n_last_repeats: usize,
    has_pooled: bool,
}

impl StepPlan {
    /// Batch elements per member.
    fn n_copies(&self) -> usize {
        if self.is_guided { 2 } else { 1 }
    }

    fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
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

    fn step_batch(
        &self,
        ctx: &Ctx<'_>,
        members: &[&mut Generation],
        is_guided: bool,
    ) -> Result<Stepped, TensorError> {
        let first = &members[0].conditioning;
        let mut plan = StepPlan {
            pipeline_id: self.id,
            n_members: members.len(),
            is_guided,
            is_scaled: false,
            is_traced: members.iter().any(|member| member.trace.is_some()),
            n_last_repeats: first.n_last_repeats,
            has_pooled: first.pooled.is_some(),
        };
        let (n_members, n_copies) = (plan.n_members, plan.n_copies());
        let current = |member: &&mut Generation| member.schedule.timesteps[member.step_idx];
        let timesteps: Vec<f32> = members.iter().map(current).collect();
        let scale = |member: &&mut Generation| member.schedule.input_scales[member.step_idx];
        let scales: Vec<f32> = members.iter().map(scale).collect();
        // A member that shares its batch with others may be multiplied by 1, which changes no bit.
        plan.is_scaled = scales.iter().any(|scale| *scale != 1.0);
        let guidance: Vec<f32> = members.iter().map(|member| member.resolved.guidance).collect();
        let coefficients: Vec<f32> = members
            .iter()
            .flat_map(|member| member.schedule.coefficients[member.step_idx])
            .collect();
        let numbers = [
            ctx.upload_f32(&timesteps.repeat(n_copies), &[n_copies * n_members])?,
            ctx.upload_f32(&scales, &[n_members, 1, 1, 1])?,
            ctx.upload_f32(&guidance, &[n_members])?,
            ctx.upload_f32(&coefficients, &[n_members, 3])?,
        ];
        let mut inputs: Vec<&Tensor> = numbers.iter().collect();
        inputs.extend(members.iter().map(|member| &member.latents));
        inputs.extend(members.iter().map(|member| &member.conditioning.tokens));
        inputs.extend(
            members
                .iter()
                .filter_map(|member| member.conditioning.pooled.as_ref()),
        );
        let mut body = |inputs: &[&Tensor]| self.step_body(ctx, &plan, inputs);
        let mut outputs = ctx.backend.repeat(plan.key(), &inputs, &mut body)?.into_iter();
        let latents = outputs.next().ok_or_else(|| unlike_plan(&plan))?;
        Ok(Stepped {
            latents,
            guided: outputs.next(),
        })
    }

    /// The ops of a step: timesteps `[batch]`, scales `[members, 1, 1, 1]`, guidance `[members]`, coefficients `[members, 3]`, then each
    /// member's latents, tokens and pooled texts, to the new latents and, if traced, the guided predictions. The batch holds all members
    /// once, or twice with guidance.
    fn step_body(
        &self,
        ctx: &Ctx<'_>,
        plan: &StepPlan,
        inputs: &[&Tensor],
    ) -> Result<Vec<Tensor>, TensorError> {
        let (n_members, n_copies) = (plan.n_members, plan.n_copies());
        let n_kinds = if plan.has_pooled { 3 } else { 2 };
        let [timesteps, scales, guidance, coefficients, of_members @ ..] = inputs else {
            return Err(unlike_plan(plan));
        };
        if of_members.len() != n_kinds * n_members {
            return Err(unlike_plan(plan));
        }
        let (members, texts) = of_members.split_at(n_members);
        let (tokens, pooled) = texts.split_at(n_members);

        let latents = stack_tensors(ctx, members)?;
        let scaled;
        let mut seen = &latents;
        if plan.is_scaled {
            scaled = ctx.backend.alloc(latents.dims(), latents.dtype())?;
            ctx.backend.mul(&latents, scales, &scaled)?;
            seen = &scaled;
        }
        let doubled;
        let seen = if n_copies == 1 {
            ctx.cast(seen)?
        } else {
            let mut dims = latents.dims().to_vec();
            dims[0] = n_copies * n_members;
            doubled = ctx.alloc(&dims)?;
            for copy_idx in 0..n_copies {
                let place = doubled.narrow(0, copy_idx * n_members, n_members)?;
                ctx.backend.copy(seen, &place)?;
            }
            doubled
        };
        let conditioning = Conditioning {
            tokens: by_copy(ctx, tokens, n_copies)?,
            n_last_repeats: plan.n_last_repeats,
            pooled: match pooled {
                [] => None,
                pooled => Some(by_copy(ctx, pooled, n_copies)?),
            },
        };
        let predictions = self
            .parts
            .denoiser
            .forward(ctx, &seen, timesteps, &conditioning)?;
        drop((seen, conditioning));

        let conditional = predictions.narrow(0, (n_copies - 1) * n_members, n_members)?;
        let unconditional = predictions.narrow(0, 0, n_members)?;
        let fresh = || ctx.backend.alloc(latents.dims(), latents.dtype());
        let mut outputs = vec![fresh()?];
        if plan.is_traced {
            outputs.push(fresh()?);
        }
        let args = StepArgs {
            latents: &latents,
            conditional: &conditional,
            unconditional: plan.is_guided.then_some((&unconditional, *guidance)),
            coefficients,
            noise: None,
            guided_out: outputs.get(1),
        };
        ctx.backend.step(&args, &outputs[0])?;
        Ok(outputs)
    }

    fn resolve_numbers(&self, request: &GenerateRequest) -> Result<Resolved, Failure> {
        let info = &self.parts.info;
        let width = self.side("width", request.width.unwrap_or(info.default_size.0))?;
        let height = self.side("height", request.height.unwrap_or(info.default_size.1))?;
        let n_steps = request.n_steps.unwrap_or(info.default_n_steps);
        if !(1..=GenerateRequest::MAX_STEPS).contains(&n_steps) {
            let most = GenerateRequest::MAX_STEPS;
            return Err(invalid(format!("steps is {n_steps}, it must be 1 to {most}")));
        }
        let guidance = request.guidance.unwrap_or(info.default_guidance);
        if !guidance.is_finite() {
            return Err(invalid(format!(
                "guidance is {guidance}, it must be a finite number"
            )));
        }
        let sampler = self.sampler_name(request)?.to_owned();
        self.schedule(&sampler, n_steps)?;
        self.text_options(request)?;
        let resolved = Resolved {
            width,
            height,
            n_steps,
            guidance,
            seed: request.seed,
            sampler,
            warnings: Vec::new(),
        };
        self.given_latents(request, &resolved)?;
        Ok(resolved)
    }

    /// A width or height on the grid.
    fn side(&self, name: &str, px: u32) -> Result<u32, Failure> {
        let info = &self.parts.info;
        let (grid, most) = (info.grid_px, info.max_side_px);
        if px > most {
            return Err(invalid(format!(
                "{name} is {px}, this model makes at most {most}"
            )));
        }
        let (factor, min_side) = (self.parts.latents.factor, self.parts.latents.min_side);
        let least = u32::try_from(min_side * factor).map_or(most, |px| px.next_multiple_of(grid));
        if 0 < px && px < least && px.is_multiple_of(grid) {
            return Err(invalid(format!(
                "{name} is {px}, this model makes at least {least}"
            )));
        }
        if px == 0 || !px.is_multiple_of(grid) {
            let below = px / grid * grid;
            let near = match (below, below + grid) {
                (0, above) => above.to_string(),
                (below, above) if above > most => below.to_string(),
                (below, above) => format!("{below} or {above}"),
            };
            return Err(invalid(format!(
                "{name} is {px}, it must be a multiple of {grid}: {near} would do"
            )));
        }
        Ok(px)
    }

    /// What the request names, or the checkpoint's own.
    fn sampler_name<'a>(&'a self, request: &'a GenerateRequest) -> Result<&'a str, Failure> {
        let samplers = &self.parts.info.samplers;
        match (&request.sampler, &self.parts.foreign_scheduler) {
            (Some(name), _) => Ok(name),
            (None, None) => Ok(samplers.first().map_or("", String::as_str)),
            (None, Some(class)) => Err(invalid(format!(
                "this model's own scheduler {class} is not supported yet by this version; name a sampler: {}",
                samplers.join(" or ")
            ))),
        }
    }

    fn sampler(&self, name: &str) -> Result<&dyn Sampler, Failure> {
        let samplers = &self.parts.samplers;
        match samplers.iter().find(|sampler| sampler.name() == name) {
            Some(sampler) => Ok(&**sampler),
            None => Err(invalid(format!(
                "sampler {name:?} is unknown, this model takes {}",
                self.parts.info.samplers.join(", ")
            ))),
        }
    }

    fn schedule(&self, sampler: &str, n_steps: u32) -> Result<Schedule, Failure> {
        let schedule = self.sampler(sampler)?.schedule(n_steps as usize);
        schedule.map_err(|error| invalid(error.to_string()))
    }

    fn text_options(&self, request: &GenerateRequest) -> Result<TextOptions, Failure> {
        let clip_skip = request.clip_skip.unwrap_or(0) as usize;
        let most = self.parts.conditioner.max_clip_skip();
        if clip_skip > most {
            return Err(invalid(format!(
                "clip_skip is {clip_skip}, this model has layers for at most {most}"
            )));
        }
        Ok(TextOptions {
            max_sequence_length: self.max_sequence_length(request)?,
            clip_skip,
        })
    }

    fn max_sequence_length(&self, request: &GenerateRequest) -> Result<usize, Failure> {
        let Some((default, most)) = self.parts.max_sequence_length else {
            return match request.max_sequence_length {
                None => Ok(0),
                Some(given) => Err(invalid(format!(
                    "max_sequence_length is {given}, this model has no text encoder whose length can be chosen"
                ))),
            };
        };
        match request.max_sequence_length.unwrap_or(default) {
            0 => Err(invalid(
                "max_sequence_length is 0, it must be at least 1".to_owned(),
            )),
            given if given > most => Err(invalid(format!(
                "max_sequence_length is {given}, this model takes at most {most}"
            ))),
            given => Ok(given as usize),
        }
    }

    /// `[1, h, w, c]`.
    fn latents_dims(&self, resolved: &Resolved) -> [usize; 4] {
        let layout = self.parts.latents;
        let [h, w] = [resolved.height, resolved.width].map(|px| px as usize / layout.factor);
        [1, h, w, layout.n_channels]
    }

    /// The request's own latents, channels first.
    fn given_latents(
        &self,
        request: &GenerateRequest,
        resolved: &Resolved,
    ) -> Result<Option<Vec<f32>>, Failure> {
        let Some(given) = &request.latents else {
            return Ok(None);
        };
        let [_, h, w, c] = self.latents_dims(resolved).map(|extent| extent as u64);
        let expected = [1, c, h, w];
        if given.shape != expected || !given.is_consistent() {
            return Err(invalid(format!(
                "latents have shape {:?} with {} bytes, a picture of {}x{} needs {expected:?} of 4 bytes each",
                given.shape,
                given.data.len(),
                resolved.width,
                resolved.height
            )));
        }
        let values = given
            .to_f32()
            .ok_or_else(|| invalid(format!("latents are {:?}, they must be f32", given.dtype)))?;
        if values.iter().any(|value| !value.is_finite()) {
            return Err(invalid("latents hold NaN or infinity".to_owned()));
        }
        Ok(Some(values))
    }

    /// Unit normal noise, channels first, as torch draws it.
    fn noise(&self, resolved: &Resolved) -> Vec<f32> {
        let mut values = vec![0.0; self.latents_dims(resolved).iter().product()];
        TorchGenerator::new(resolved.seed).fill_normal(&mut values);
        values
    }

    /// Ids of the prompt and, with guidance, of the negative prompt.
    fn tokenize(
        &self,
        request: &GenerateRequest,
        guidance: f32,
        options: TextOptions,
    ) -> (Tokenized, Option<Tokenized>) {
        let conditioner = &self.parts.conditioner;
        let prompt = conditioner.tokenize(&request.prompt, "prompt", options);
        let negative = request.negative_prompt.as_deref().unwrap_or_default();
        let negative = (guidance > 1.0).then(|| conditioner.tokenize(negative, "negative prompt", options));
        (prompt, negative)
    }

    fn begin_trace(
        &self,
        ctx: &Ctx<'_>,
        prompt: &Tokenized,
        conditional: &Conditioning,
        unconditional: Option<&Conditioning>,
    ) -> Result<Vec<NamedTensor>, TensorError> {
        let mut tensors = Vec::new();
        for (ids, idx) in prompt.raw.iter().zip(1..) {
            let name = match idx {
                1 => "token_ids".to_owned(),
                _ => format!("token_ids.{idx}"),
            };
            tensors.push(trace::ids(name, ids));
        }
        let [tokens, negative_tokens, pooled, negative_pooled] = self.parts.conditioner.trace_names();
        let pairs = [
            (Some(conditional), tokens, pooled),
            (unconditional, negative_tokens, negative_pooled),
        ];
        for (conditioning, tokens, pooled) in pairs {
            let Some(one) = conditioning else { continue };
            tensors.push(trace::repeated(
                ctx,
                tokens.to_owned(),
                &one.tokens,
                one.n_last_repeats,
            )?);
            if let Some(x) = &one.pooled {
                tensors.push(trace::plain(ctx, pooled.to_owned(), x)?);
            }
        }
        Ok(tensors)
    }
}

/// Conditionings of equal shapes as one batch, in order.
fn stack(ctx: &Ctx<'_>, parts: &[&Conditioning]) -> Result<Conditioning, TensorError> {
    let tokens: Vec<&Tensor> = parts.iter().map(|part| &part.tokens).collect();
    let pooled: Vec<&Tensor> = parts.iter().filter_map(|part| part.pooled.as_ref()).collect();
    Ok(Conditioning {
        tokens: stack_tensors(ctx, &tokens)?,
        n_last_repeats: parts[0].n_last_repeats,
        pooled: match pooled.is_empty() {
            true => None,
            false => Some(stack_tensors(ctx, &pooled)?),
        },
    })
}

/// Tensors that differ at most in their batch, one behind the other.
fn stack_tensors(ctx: &Ctx<'_>, parts: &[&Tensor]) -> Result<Tensor, TensorError> {
    let mut dims = parts[0].dims().to_vec();
    dims[0] = parts.iter().map(|part| part.dim(0)).sum();
    let out = ctx.backend.alloc(&dims, parts[0].dtype())?;
    let mut row = 0;
    for part in parts {
        ctx.backend.copy(part, &out.narrow(0, row, part.dim(0))?)?;
        row += part.dim(0);
    }
    Ok(out)
}

/// Rows of each member's text, `[copies, ..]` each, with all first copies before all second ones.
fn by_copy(ctx: &Ctx<'_>, members: &[&Tensor], n_copies: usize) -> Result<Tensor, TensorError> {
    if let [only] = members {
        return Ok((*only).clone());
    }
    let mut rows = Vec::with_capacity(n_copies * members.len());
    for copy_idx in 0..n_copies {
        for member in members {
            rows.push(member.narrow(0, copy_idx, 1)?);
        }
    }
    stack_tensors(ctx, &rows.iter().collect::<Vec<_>>())
}

/// A mistake of this file, if it ever shows.
fn unlike_plan(plan: &StepPlan) -> TensorError {
    TensorError::Operand {
        op: "step",
        detail: format!("inputs or outputs are not those of {plan:?}"),
    }
}

/// Equal for requests that may share a step: the batch of the conditioning tells whether there is guidance.
fn batch_key(latents: &Tensor, conditioning: &Conditioning) -> u64 {
    let mut hasher = DefaultHasher::new();
    latents.dims().hash(&mut hasher);
    conditioning.tokens.dims().hash(&mut hasher);
    conditioning.n_last_repeats.hash(&mut hasher);
    conditioning.pooled.as_ref().map(Tensor::dims).hash(&mut hasher);
    hasher.finish()
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
