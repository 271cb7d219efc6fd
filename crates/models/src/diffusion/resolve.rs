//! A request's numbers against the model: defaults, and refusals that say what would do.

use super::{DiffusionPipeline, invalid, task::Task};
use crate::{
    conditioning::{TextOptions, Tokenized},
    layout::LatentsShape,
    parts::{GuidanceRule, Temporal},
};
use denoised_sampler::{Ask, Sampler, Schedule, find_sampler, summarize_samplers};
use denoised_types::{Failure, GenerateRequest, Resolved};

/// Most pixels of a result, all frames together, and most tokens of its latents: beyond them one request could take all memory there is.
const MAX_PIXELS: u64 = 1 << 28;
const MAX_TOKENS: usize = 1 << 20;

impl DiffusionPipeline {
    pub(super) fn resolve_numbers(&self, request: &GenerateRequest) -> Result<Resolved, Failure> {
        let info = &self.parts.info;
        let task = self.task(request)?;
        let default_size = self.default_size(&task);
        let width = self.side("width", request.width.unwrap_or(default_size.0))?;
        let height = self.side("height", request.height.unwrap_or(default_size.1))?;
        let n_frames = self.n_frames(request)?;
        let n_sigmas = u32::try_from(request.sigmas.len()).unwrap_or(u32::MAX);
        if let Some(n_steps) = request.n_steps.filter(|n| n_sigmas > 0 && *n != n_sigmas) {
            return Err(invalid(format!(
                "steps is {n_steps} and {n_sigmas} noise levels were given: leave one of them out"
            )));
        }
        let n_steps = match n_sigmas {
            0 => request.n_steps.unwrap_or(info.default_n_steps),
            n => n,
        };
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
        self.check_guidance(request)?;
        let sampler = self.sampler_name(request)?.to_owned();
        let resolved = Resolved {
            width,
            height,
            n_frames,
            n_steps,
            guidance,
            seed: request.seed,
            sampler,
            warnings: Vec::new(),
        };
        self.check_size(&resolved)?;
        self.schedule(request, &resolved, &task)?;
        self.text_options(request)?;
        self.given_latents(request, &resolved)?;
        Ok(resolved)
    }

    /// Refuses scales that this model has no use for: they would be ignored.
    fn check_guidance(&self, request: &GenerateRequest) -> Result<(), Failure> {
        let is_embedded = self.parts.guidance == GuidanceRule::Embedded;
        if request.guidance_2.is_some() && self.parts.denoisers.low_noise.is_none() {
            return Err(invalid(
                "a second guidance scale was given, this model has one denoiser for all noise levels"
                    .to_owned(),
            ));
        }
        if request.true_guidance.is_some_and(|scale| scale != 1.0) && !is_embedded {
            return Err(invalid(
                "a true guidance scale was given, this model's guidance is that: name the scale there"
                    .to_owned(),
            ));
        }
        for scale in [request.guidance_2, request.true_guidance].into_iter().flatten() {
            if !scale.is_finite() {
                return Err(invalid(format!(
                    "guidance is {scale}, it must be a finite number"
                )));
            }
        }
        Ok(())
    }

    /// What was asked for and changes nothing, in words.
    pub(super) fn idle_arguments(&self, request: &GenerateRequest, guidance: f32) -> Vec<String> {
        let rule = self.parts.guidance;
        let has_negative = request
            .negative_prompt
            .as_deref()
            .is_some_and(|text| !text.is_empty());
        let mut idle = Vec::new();
        if self.is_guided(request, guidance) {
            return idle;
        }
        if has_negative {
            idle.push(match rule {
                GuidanceRule::None => {
                    "the negative prompt has no effect: this model has no guidance".to_owned()
                }
                GuidanceRule::Embedded => {
                    "the negative prompt has no effect without a true guidance scale above 1".to_owned()
                }
                _ => format!("the negative prompt has no effect at guidance {guidance}"),
            });
        }
        match rule {
            GuidanceRule::None if request.guidance.is_some_and(|scale| scale > 1.0) => {
                idle.push(format!("guidance {guidance} has no effect: this model has none"));
            }
            GuidanceRule::NormPreserving { .. } if request.guidance.is_some_and(|scale| scale > 1.0) => {
                idle.push(format!(
                    "guidance {guidance} has no effect without a negative prompt"
                ));
            }
            GuidanceRule::Embedded if request.true_guidance.is_some_and(|scale| scale > 1.0) => {
                idle.push("the true guidance scale has no effect without a negative prompt".to_owned());
            }
            _ => {}
        }
        if request.guidance_2.is_some() {
            idle.push(format!(
                "the second guidance scale has no effect at guidance {guidance}"
            ));
        }
        idle
    }

    /// Refuses pictures and videos that no machine has the memory for.
    fn check_size(&self, resolved: &Resolved) -> Result<(), Failure> {
        let frames = u64::from(resolved.n_frames);
        let n_pixels = u64::from(resolved.width) * u64::from(resolved.height) * frames;
        let shape = self.latents_shape(resolved);
        let n_tokens = shape.n_frames * shape.h * shape.w / self.parts.latents.patch_area();
        if n_pixels <= MAX_PIXELS && n_tokens <= MAX_TOKENS {
            return Ok(());
        }
        let what = match resolved.n_frames {
            1 => "a picture".to_owned(),
            n => format!("{n} frames"),
        };
        Err(invalid(format!(
            "{what} of {}x{} are {n_pixels} pixels in {n_tokens} tokens, possible are at most {MAX_PIXELS} in {MAX_TOKENS}",
            resolved.width, resolved.height
        )))
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

    /// Frames of the video, 1 for a picture.
    fn n_frames(&self, request: &GenerateRequest) -> Result<u32, Failure> {
        let default = self.parts.info.video.map_or(1, |video| video.default_n_frames);
        let n_frames = request.n_frames.unwrap_or(default);
        let Some(Temporal { step, most }) = self.parts.latents.temporal else {
            return match n_frames {
                1 => Ok(1),
                n => Err(invalid(format!("frames is {n}, this model makes pictures"))),
            };
        };
        let (step, given) = (step.max(1), n_frames as usize);
        if given > most {
            return Err(invalid(format!(
                "frames is {given}, this model makes at most {most}"
            )));
        }
        if given == 0 || given % step != 1 % step {
            let below = given.saturating_sub(1) / step * step + 1;
            let near = match below + step {
                above if given == 0 || above > most => below.to_string(),
                above => format!("{below} or {above}"),
            };
            return Err(invalid(format!(
                "frames is {given}, it must be one more than a multiple of {step}: {near} would do"
            )));
        }
        Ok(n_frames)
    }

    /// What the request names, or the checkpoint's own.
    fn sampler_name<'a>(&'a self, request: &'a GenerateRequest) -> Result<&'a str, Failure> {
        let samplers = &self.parts.info.samplers;
        match (&request.sampler, &self.parts.foreign_scheduler) {
            (Some(name), _) => {
                let known = find_sampler(name, samplers.iter().map(String::as_str));
                Ok(known.unwrap_or(name))
            }
            (None, None) => Ok(samplers.first().map_or("", String::as_str)),
            (None, Some(class)) => Err(invalid(format!(
                "this model's own scheduler {class} is not supported yet by this version; name a sampler: {}",
                summarize_samplers(samplers.iter().map(String::as_str))
            ))),
        }
    }

    fn sampler(&self, name: &str) -> Result<&dyn Sampler, Failure> {
        let samplers = &self.parts.samplers;
        match samplers.iter().find(|sampler| sampler.name() == name) {
            Some(sampler) => Ok(&**sampler),
            None => Err(invalid(format!(
                "sampler {name:?} is unknown, this model takes {}",
                summarize_samplers(self.parts.info.samplers.iter().map(String::as_str))
            ))),
        }
    }

    pub(super) fn schedule(
        &self,
        request: &GenerateRequest,
        resolved: &Resolved,
        task: &Task<'_>,
    ) -> Result<Schedule, Failure> {
        let shape = self.latents_shape(resolved);
        let ask = Ask {
            n_steps: resolved.n_steps as usize,
            sigmas: (!request.sigmas.is_empty()).then_some(&request.sigmas[..]),
            n_tokens: shape.n_frames * shape.h * shape.w / self.parts.latents.patch_area(),
            strength: task.strength(),
        };
        let schedule = self.sampler(&resolved.sampler)?.schedule(&ask);
        let schedule = schedule.map_err(|error| invalid(error.to_string()))?;
        if schedule.n_steps() == 0 {
            let (n_steps, strength) = (resolved.n_steps, task.strength().unwrap_or(1.0));
            return Err(invalid(format!(
                "strength {strength} of {n_steps} steps leaves none to do: more of either is needed"
            )));
        }
        Ok(schedule)
    }

    pub(super) fn text_options(&self, request: &GenerateRequest) -> Result<TextOptions, Failure> {
        let clip_skip = request.clip_skip.unwrap_or(0) as usize;
        let most = self.parts.conditioner.max_clip_skip();
        if clip_skip > most {
            return Err(invalid(format!(
                "clip_skip is {clip_skip}, this model has layers for at most {most}"
            )));
        }
        let layers = self.parts.conditioner.check_text_layers(&request.text_layers);
        layers.map_err(invalid)?;
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

    pub(super) fn latents_shape(&self, resolved: &Resolved) -> LatentsShape {
        let layout = self.parts.latents;
        let [h, w] = [resolved.height, resolved.width].map(|px| px as usize / layout.factor);
        let step = layout.temporal.map_or(1, |temporal| temporal.step.max(1));
        LatentsShape {
            n_frames: (resolved.n_frames as usize).saturating_sub(1) / step + 1,
            h,
            w,
            c: layout.n_channels,
        }
    }

    /// The request's own latents, as the loop holds them.
    pub(super) fn given_latents(
        &self,
        request: &GenerateRequest,
        resolved: &Resolved,
    ) -> Result<Option<Vec<f32>>, Failure> {
        let Some(given) = &request.latents else {
            return Ok(None);
        };
        let shape = self.latents_shape(resolved);
        let layout = self.parts.latents.given;
        let expected = layout.dims(&shape);
        if given.shape != expected || !given.is_consistent() {
            return Err(invalid(format!(
                "latents have shape {:?} with {} bytes, {} of {}x{} need {expected:?} of 4 bytes each",
                given.shape,
                given.data.len(),
                match resolved.n_frames {
                    1 => "pictures".to_owned(),
                    n => format!("{n} frames"),
                },
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
        Ok(Some(layout.to_loop(&values, &shape)))
    }

    /// Whether predictions for the negative prompt are computed.
    pub(super) fn is_guided(&self, request: &GenerateRequest, guidance: f32) -> bool {
        match self.parts.guidance {
            GuidanceRule::Classic => guidance > 1.0,
            GuidanceRule::Offset => guidance > 0.0,
            GuidanceRule::NormPreserving { .. } => guidance > 1.0 && request.negative_prompt.is_some(),
            GuidanceRule::Embedded => {
                request.true_guidance.is_some_and(|scale| scale > 1.0) && request.negative_prompt.is_some()
            }
            GuidanceRule::None => false,
        }
    }

    /// Ids of the prompt and, with guidance, of the negative prompt.
    pub(super) fn tokenize(
        &self,
        request: &GenerateRequest,
        guidance: f32,
        options: TextOptions,
    ) -> Result<(Tokenized, Option<Tokenized>), Failure> {
        let tokenize = |text: &str, what| {
            let tokenized = self
                .parts
                .conditioner
                .tokenize(text, what, options, &request.images);
            tokenized.map_err(invalid)
        };
        let prompt = tokenize(&request.prompt, "prompt")?;
        if !self.is_guided(request, guidance) {
            return Ok((prompt, None));
        }
        let negative = Tokenized {
            is_absent: request.negative_prompt.is_none(),
            ..tokenize(
                request.negative_prompt.as_deref().unwrap_or_default(),
                "negative prompt",
            )?
        };
        Ok((prompt, Some(negative)))
    }
}
