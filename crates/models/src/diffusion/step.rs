//! One step of a batch: which ops it takes, and those ops.
//!
//! The denoiser is called in one or two **passes**. With guidance a pass holds all members twice, negative prompts first; where a prompt
//! and its negative have other numbers of tokens, each is a pass of its own.

use super::{
    DiffusionPipeline, Generation,
    batch::{by_copy, rebuilt, repeated, stack},
};
use crate::{
    conditioning::{Conditioning, Form},
    denoiser::DenoiserInput,
    parts::GuidanceRule,
};
use denoised_nn::Ctx;
use denoised_tensor::{PatchOrder, StepArgs, Tensor, TensorError};
use std::hash::{DefaultHasher, Hash, Hasher};

/// What one step of a batch gave.
pub(super) struct Stepped {
    /// The sampler's state, latents first: f32 `[members, rows, w, c]` each.
    pub(super) state: Vec<Tensor>,
    /// Guided predictions of that shape, if a member traces.
    pub(super) guided: Option<Tensor>,
}

/// What decides which ops a step enqueues, beside the shapes of its inputs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct StepPlan {
    pipeline_id: u64,
    expert_idx: usize,
    n_members: usize,
    n_frames: usize,
    is_guided: bool,
    /// Whether the denoiser is given anything but the latents themselves.
    is_scaled: bool,
    is_traced: bool,
    has_noise: bool,
    has_channels: bool,
    has_known: bool,
    /// Whether what is known takes its place before the denoiser sees the latents, not after the step.
    is_known_first: bool,
    /// Tensors of the sampler's state beside the latents.
    n_kept: usize,
    n_references: usize,
    /// Per pass.
    forms: Vec<Form>,
}

impl StepPlan {
    /// Batch elements per member in one pass.
    fn n_copies(&self) -> usize {
        if self.is_guided && self.forms.len() == 1 {
            2
        } else {
            1
        }
    }

    fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    /// Terms of a row of the sampler's update: the state, the prediction, the noise.
    fn n_terms(&self) -> usize {
        1 + self.n_kept + 2
    }

    /// A mistake of this file, if it ever shows.
    fn unlike(&self) -> TensorError {
        TensorError::Operand {
            op: "step",
            detail: format!("inputs or outputs are not those of {self:?}"),
        }
    }
}

/// The inputs of a body, taken one after the other.
struct Inputs<'a, 'b>(&'a [&'b Tensor]);

impl<'a, 'b> Inputs<'a, 'b> {
    fn take(&mut self, n: usize, plan: &StepPlan) -> Result<&'a [&'b Tensor], TensorError> {
        let (taken, rest) = self.0.split_at_checked(n).ok_or_else(|| plan.unlike())?;
        self.0 = rest;
        Ok(taken)
    }

    fn one(&mut self, plan: &StepPlan) -> Result<&'b Tensor, TensorError> {
        let taken = self.take(1, plan)?;
        Ok(taken[0])
    }
}

impl DiffusionPipeline {
    /// The next step of members that share a key. `noises` holds, per member, fresh noise for its latents or nothing.
    pub(super) fn step_batch(
        &self,
        ctx: &Ctx<'_>,
        members: &[&mut Generation],
        noises: &[Option<Tensor>],
    ) -> Result<Stepped, TensorError> {
        let first = &members[0];
        let mut plan = StepPlan {
            pipeline_id: self.id,
            expert_idx: self.expert_idx(first),
            n_members: members.len(),
            n_frames: first.shape.n_frames,
            is_guided: first.is_guided,
            is_scaled: false,
            is_traced: members.iter().any(|member| member.trace.is_some()),
            has_noise: noises.iter().any(Option::is_some),
            has_channels: first.channels.is_some(),
            has_known: first.known.is_some(),
            is_known_first: first.is_first_frame_given,
            n_kept: first.schedule.n_kept,
            n_references: first.references.len(),
            forms: first.passes.iter().map(Conditioning::form).collect(),
        };
        let (n_members, n_copies) = (plan.n_members, plan.n_copies());
        let scale = |member: &&mut Generation| member.schedule.input_scales[member.step_idx];
        let scales: Vec<f32> = members.iter().map(scale).collect();
        // A member that shares its batch with others may be multiplied by 1, which changes no bit.
        plan.is_scaled = scales.iter().any(|scale| *scale != 1.0);
        let guidance: Vec<f32> = members
            .iter()
            .map(|member| member.scales[plan.expert_idx.min(1)])
            .collect();

        let mut numbers = vec![
            self.timesteps(ctx, members, n_copies)?,
            ctx.upload_f32(&scales, &[n_members, 1, 1, 1])?,
            ctx.upload_f32(&guidance, &[n_members])?,
        ];
        numbers.extend(self.coefficients(ctx, members, &plan)?);
        let mut owned = Vec::new();
        if plan.has_noise {
            for (noise, member) in noises.iter().zip(members) {
                owned.push(match noise {
                    Some(noise) => noise.clone(),
                    None => {
                        let nothing = ctx
                            .backend
                            .alloc(member.state[0].dims(), member.state[0].dtype())?;
                        ctx.backend.fill(&nothing, 0.0)?;
                        nothing
                    }
                });
            }
        }
        if plan.has_known {
            let factors: Vec<f32> = members
                .iter()
                .flat_map(|member| {
                    let [image, noise] = member.known_factors();
                    [image, noise, 0.0]
                })
                .collect();
            numbers.push(ctx.upload_f32(&factors, &[n_members, 3])?);
        }
        let mut inputs: Vec<&Tensor> = numbers.iter().collect();
        for slot_idx in 0..=plan.n_kept {
            inputs.extend(members.iter().map(|member| &member.state[slot_idx]));
        }
        inputs.extend(&owned);
        for member in members {
            inputs.extend(&member.channels);
        }
        for reference_idx in 0..plan.n_references {
            inputs.extend(members.iter().map(|member| &member.references[reference_idx]));
        }
        for known_idx in 0..if plan.has_known { 4 } else { 0 } {
            let of_member = |member: &&'_ mut Generation| member.known.is_some();
            if !members.iter().all(of_member) {
                return Err(plan.unlike());
            }
            inputs.extend(
                members
                    .iter()
                    .filter_map(|member| member.known.as_ref())
                    .map(|known| known.tensors()[known_idx]),
            );
        }
        for (pass_idx, form) in plan.forms.iter().enumerate() {
            for tensor_idx in 0..form.n_tensors() {
                inputs.extend(
                    members
                        .iter()
                        .map(|member| member.passes[pass_idx].tensors()[tensor_idx]),
                );
            }
        }
        let mut body = |inputs: &[&Tensor]| self.step_body(ctx, &plan, inputs);
        let mut outputs = ctx.backend.repeat(plan.key(), &inputs, &mut body)?;
        if outputs.len() != 1 + plan.n_kept + usize::from(plan.is_traced) {
            return Err(plan.unlike());
        }
        let guided = if plan.is_traced { outputs.pop() } else { None };
        Ok(Stepped {
            state: outputs,
            guided,
        })
    }

    /// f32 `[copies * members]`, or `[copies * members, n_frames]` where the first frame is given and so has none.
    fn timesteps(
        &self,
        ctx: &Ctx<'_>,
        members: &[&mut Generation],
        n_copies: usize,
    ) -> Result<Tensor, TensorError> {
        let n_frames = members[0].shape.n_frames;
        let timesteps = members.iter().map(|member| {
            (
                member.schedule.timesteps[member.step_idx],
                member.is_first_frame_given,
            )
        });
        if !members[0].is_first_frame_given {
            let timesteps: Vec<f32> = timesteps.map(|(timestep, _)| timestep).collect();
            return ctx.upload_f32(&timesteps.repeat(n_copies), &[n_copies * members.len()]);
        }
        let mut by_frame = Vec::with_capacity(members.len() * n_frames);
        for (timestep, _) in timesteps {
            by_frame.push(0.0);
            by_frame.extend(std::iter::repeat_n(timestep, n_frames.saturating_sub(1)));
        }
        ctx.upload_f32(&by_frame.repeat(n_copies), &[n_copies * members.len(), n_frames])
    }

    /// The sampler's updates, as factors for [`weighted_sum`]: f32 `[members, 3]` per three terms of a row, row by row. With one row of
    /// three terms that is what [`denoised_tensor::Backend::step`] takes.
    fn coefficients(
        &self,
        ctx: &Ctx<'_>,
        members: &[&mut Generation],
        plan: &StepPlan,
    ) -> Result<Vec<Tensor>, TensorError> {
        let mut tensors = Vec::new();
        for row_idx in 0..=plan.n_kept {
            for terms in term_groups(plan.n_terms()) {
                let mut factors = Vec::with_capacity(3 * members.len());
                for member in members {
                    let row = &member.schedule.updates[member.step_idx].rows[row_idx];
                    factors.extend(terms.iter().map(|term| term.map_or(1.0, |term| row[term])));
                }
                tensors.push(ctx.upload_f32(&factors, &[members.len(), 3])?);
            }
        }
        Ok(tensors)
    }

    /// The ops of a step, of inputs in the order in which [`DiffusionPipeline::step_batch`] lists them, to the new state and, if traced,
    /// the guided predictions.
    fn step_body(
        &self,
        ctx: &Ctx<'_>,
        plan: &StepPlan,
        inputs: &[&Tensor],
    ) -> Result<Vec<Tensor>, TensorError> {
        let (n_members, n_copies) = (plan.n_members, plan.n_copies());
        let mut inputs = Inputs(inputs);
        let timesteps = inputs.one(plan)?;
        let scales = inputs.one(plan)?;
        let guidance = inputs.one(plan)?;
        let n_groups = term_groups(plan.n_terms()).len();
        let coefficients = inputs.take((1 + plan.n_kept) * n_groups, plan)?;
        let known_factors = match plan.has_known {
            true => Some(inputs.one(plan)?),
            false => None,
        };
        let mut state = Vec::with_capacity(1 + plan.n_kept);
        for _ in 0..=plan.n_kept {
            state.push(stack(ctx, inputs.take(n_members, plan)?)?);
        }
        let noise = match plan.has_noise {
            true => Some(stack(ctx, inputs.take(n_members, plan)?)?),
            false => None,
        };
        let channels = match plan.has_channels {
            true => Some(stack(ctx, inputs.take(n_members, plan)?)?),
            false => None,
        };
        let mut references = Vec::with_capacity(plan.n_references);
        for _ in 0..plan.n_references {
            let of_members = stack(ctx, inputs.take(n_members, plan)?)?;
            references.push(repeated(ctx, &of_members, n_copies)?);
        }
        let mut known = Vec::new();
        if plan.has_known {
            for _ in 0..4 {
                known.push(stack(ctx, inputs.take(n_members, plan)?)?);
            }
        }

        let latents = &state[0];
        let blend = |latents: &Tensor| match (known_factors, &known[..]) {
            (Some(factors), [image, noise, mask, inverse]) => {
                blended(ctx, latents, image, noise, factors, (mask, inverse))
            }
            _ => Ok(latents.clone()),
        };
        let seen = match plan.is_known_first {
            true => &blend(latents)?,
            false => latents,
        };
        let seen = self.seen(ctx, seen, plan.is_scaled.then_some(scales), channels.as_ref())?;
        let seen = repeated(ctx, &seen, n_copies)?;
        let mut predictions = Vec::with_capacity(2);
        for form in &plan.forms {
            let mut tensors = Vec::with_capacity(form.n_tensors());
            for _ in 0..form.n_tensors() {
                tensors.push(by_copy(ctx, inputs.take(n_members, plan)?, n_copies)?);
            }
            let conditioning = rebuilt(*form, tensors)?;
            let input = DenoiserInput {
                latents: &seen,
                n_frames: plan.n_frames,
                timesteps,
                conditioning: &conditioning,
                references: &references,
            };
            let denoiser = self.parts.denoisers.get(plan.expert_idx);
            let prediction = denoiser.forward(ctx, &input)?;
            for copy_idx in 0..n_copies {
                predictions.push(prediction.narrow(0, copy_idx * n_members, n_members)?);
            }
        }
        drop((seen, references));

        let conditional = predictions.pop().ok_or_else(|| plan.unlike())?;
        let unconditional = predictions.pop();
        let pair = Predictions {
            conditional: &conditional,
            unconditional: unconditional.as_ref().map(|u| (u, guidance)),
        };
        let mut outputs;
        let mut guided = None;
        let is_rescaled =
            plan.is_guided && matches!(self.parts.guidance, GuidanceRule::NormPreserving { .. });
        if plan.n_kept == 0 && !is_rescaled {
            let fresh = || ctx.backend.alloc(latents.dims(), latents.dtype());
            outputs = vec![fresh()?];
            if plan.is_traced {
                guided = Some(fresh()?);
            }
            let args = StepArgs {
                latents,
                conditional: pair.conditional,
                unconditional: pair.unconditional,
                coefficients: coefficients[0],
                noise: noise.as_ref(),
                guided_out: guided.as_ref(),
            };
            ctx.backend.step(&args, &outputs[0])?;
        } else {
            let prediction = self.guided(ctx, latents, &pair)?;
            drop((conditional, unconditional));
            let mut terms: Vec<Option<&Tensor>> = state.iter().map(Some).collect();
            terms.push(Some(&prediction));
            terms.push(noise.as_ref());
            outputs = Vec::with_capacity(1 + plan.n_kept);
            for row_idx in 0..=plan.n_kept {
                let factors = &coefficients[row_idx * n_groups..][..n_groups];
                outputs.push(weighted_sum(ctx, &terms, factors)?);
            }
            guided = plan.is_traced.then_some(prediction);
        }
        if !plan.is_known_first {
            outputs[0] = blend(&outputs[0])?;
        }
        outputs.extend(guided);
        Ok(outputs)
    }

    /// What the denoiser is given of `latents`, f32: scaled, with `channels` behind.
    fn seen(
        &self,
        ctx: &Ctx<'_>,
        latents: &Tensor,
        scales: Option<&Tensor>,
        channels: Option<&Tensor>,
    ) -> Result<Tensor, TensorError> {
        let mut seen = latents.clone();
        if let Some(scales) = scales {
            let scaled = ctx.backend.alloc(latents.dims(), latents.dtype())?;
            ctx.backend.mul(latents, scales, &scaled)?;
            seen = scaled;
        }
        let Some(channels) = channels else {
            return Ok(seen);
        };
        let mut dims = latents.dims().to_vec();
        let (n_latent, n_beside) = (dims[3], channels.dim(3));
        dims[3] = n_latent + n_beside;
        let all = ctx.backend.alloc(&dims, latents.dtype())?;
        ctx.backend.copy(&seen, &all.narrow(3, 0, n_latent)?)?;
        ctx.backend.copy(channels, &all.narrow(3, n_latent, n_beside)?)?;
        Ok(all)
    }

    /// The guided prediction, f32.
    fn guided(&self, ctx: &Ctx<'_>, latents: &Tensor, pair: &Predictions<'_>) -> Result<Tensor, TensorError> {
        let n_members = latents.dim(0);
        let out = ctx.backend.alloc(latents.dims(), latents.dtype())?;
        let prediction_alone = ctx.upload_f32(&[0.0, 1.0, 0.0].repeat(n_members), &[n_members, 3])?;
        let args = StepArgs {
            latents,
            conditional: pair.conditional,
            unconditional: pair.unconditional,
            coefficients: &prediction_alone,
            noise: None,
            guided_out: None,
        };
        ctx.backend.step(&args, &out)?;
        let GuidanceRule::NormPreserving { patch } = self.parts.guidance else {
            return Ok(out);
        };
        if pair.unconditional.is_none() {
            return Ok(out);
        }
        let conditional = ctx.backend.alloc(latents.dims(), latents.dtype())?;
        ctx.backend.copy(pair.conditional, &conditional)?;
        let [_, rows, w, c] = *latents.dims() else {
            return Err(TensorError::Operand {
                op: "step",
                detail: format!("latents have the shape {:?}", latents.dims()),
            });
        };
        let n_features = patch * patch * c;
        let token_dims = [n_members, rows / patch * (w / patch), n_features];
        let tokens = |x: &Tensor| {
            let tokens = ctx.backend.alloc(&token_dims, x.dtype())?;
            ctx.backend
                .patchify(x, patch, PatchOrder::ChannelFirst, &tokens)?;
            Ok::<_, TensorError>(tokens)
        };
        let (combined, like) = (tokens(&out)?, tokens(&conditional)?);
        ctx.backend.match_norm(&combined, &like, n_features, &combined)?;
        ctx.backend
            .unpatchify(&combined, patch, PatchOrder::ChannelFirst, &out)?;
        Ok(out)
    }
}

/// Predictions of all members, and how to guide them.
struct Predictions<'a> {
    conditional: &'a Tensor,
    /// With the scales, f32 `[members]`.
    unconditional: Option<(&'a Tensor, &'a Tensor)>,
}

/// Terms of a sum of `n` in groups for [`weighted_sum`]: three at first, then what there is already (`None`) and two more.
fn term_groups(n: usize) -> Vec<[Option<usize>; 3]> {
    // The last two terms are the prediction and the noise: the first group is what a sampler without memory has.
    let mut groups = vec![[Some(0), Some(n - 2), Some(n - 1)]];
    let kept: Vec<usize> = (1..n - 2).collect();
    for pair in kept.chunks(2) {
        groups.push([None, Some(pair[0]), pair.get(1).copied()]);
    }
    groups
}

/// `sum_j factors[j] terms[j]`, f32; a term that there is not counts as zero. `factors` are those of [`term_groups`].
fn weighted_sum(
    ctx: &Ctx<'_>,
    terms: &[Option<&Tensor>],
    factors: &[&Tensor],
) -> Result<Tensor, TensorError> {
    let missing = || TensorError::Operand {
        op: "step",
        detail: "a sampler's state has fewer tensors than its update".to_owned(),
    };
    let mut sum: Option<Tensor> = None;
    for (group, factors) in term_groups(terms.len()).into_iter().zip(factors) {
        let term = |idx: Option<usize>| idx.and_then(|idx| terms[idx]);
        let first = match (&sum, group[0]) {
            (Some(sum), None) => sum.clone(),
            (_, idx) => term(idx).ok_or_else(missing)?.clone(),
        };
        let out = match &sum {
            Some(sum) => sum.clone(),
            None => ctx.backend.alloc(first.dims(), first.dtype())?,
        };
        let args = StepArgs {
            latents: &first,
            conditional: term(group[1]).ok_or_else(missing)?,
            unconditional: None,
            coefficients: factors,
            noise: term(group[2]),
            guided_out: None,
        };
        ctx.backend.step(&args, &out)?;
        sum = Some(out);
    }
    sum.ok_or_else(missing)
}

/// `mask latents + inverse (a image + b noise)`, where `inverse` is `1 - mask` and a, b are the first two of `factors` `[members, 3]`.
pub(super) fn blended(
    ctx: &Ctx<'_>,
    latents: &Tensor,
    image: &Tensor,
    noise: &Tensor,
    factors: &Tensor,
    (mask, inverse): (&Tensor, &Tensor),
) -> Result<Tensor, TensorError> {
    let known = ctx.backend.alloc(latents.dims(), latents.dtype())?;
    let args = StepArgs {
        latents: image,
        conditional: noise,
        unconditional: None,
        coefficients: factors,
        noise: None,
        guided_out: None,
    };
    ctx.backend.step(&args, &known)?;
    let out = ctx.backend.alloc(latents.dims(), latents.dtype())?;
    ctx.backend.mul(latents, mask, &out)?;
    ctx.backend.gated_add(&out, inverse, &known, &out)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::term_groups;

    #[test]
    fn every_term_is_in_one_group() {
        for n in 3..12 {
            let groups = term_groups(n);
            let mut seen: Vec<usize> = groups.iter().flatten().copied().flatten().collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..n).collect::<Vec<_>>());
            let carried = groups.iter().filter(|group| group[0].is_none()).count();
            assert_eq!(carried, groups.len() - 1);
        }
    }
}
