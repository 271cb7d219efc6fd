//! Samplers of consistency models: each step jumps to the picture and, noise added anew or not, back to the next timestep, as
//! diffusers' `LCMScheduler` and `TCDScheduler` (the latter without fresh noise, `eta = 0`).
//!
//! Both visit timesteps of the distillation, of which there are `original_inference_steps`.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{SamplerConfig, Solver, TimestepSpacing},
    discrete::{Defaults, Discrete, SCALED_BETAS, roots},
    euler::refuse_flow,
    linear::{Plan, Program},
};

pub(crate) const CLASS: &str = "LCMScheduler";
pub(crate) const TCD_CLASS: &str = "TCDScheduler";
const DEFAULTS: Defaults = Defaults {
    betas: SCALED_BETAS,
    spacing: TimestepSpacing::Leading,
};
/// Standard deviation of the data that the boundary conditions assume.
const SIGMA_DATA: f32 = 0.5;

/// What the two have in common.
#[derive(Clone, Debug, PartialEq)]
struct Distilled {
    solver: Solver,
    discrete: Discrete,
    n_original: usize,
}

impl Distilled {
    fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        solver.check_linear(config, Some(false))?;
        let discrete = Discrete::new(config, solver, DEFAULTS)?;
        refuse_flow(&discrete, solver)?;
        let n_original = config.original_inference_steps.unwrap_or(50) as usize;
        if !(1..=discrete.n_train()).contains(&n_original) {
            let expected = "1 to num_train_timesteps";
            return Err(solver.invalid("original_inference_steps", n_original, expected));
        }
        Ok(Self {
            solver,
            discrete,
            n_original,
        })
    }

    /// Evenly chosen from those of the distillation.
    fn timesteps(&self, ask: &Ask<'_>) -> Result<Vec<usize>, SamplerError> {
        self.solver.no_sigmas(ask.sigmas)?;
        let (n_steps, n_original) = (ask.n_steps, self.n_original);
        if !(1..=n_original).contains(&n_steps) {
            return Err(self.solver.step_count(n_steps, format!("1 to {n_original}")));
        }
        let stride = self.discrete.n_train() / n_original;
        let step = n_original as f64 / n_steps as f64;
        let timestep = |i: usize| (n_original - (i as f64 * step) as usize) * stride - 1;
        Ok((0..n_steps).map(timestep).collect())
    }
}

/// The sampler of latent consistency models.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Lcm {
    distilled: Distilled,
    timestep_scaling: f32,
}

impl Lcm {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        let timestep_scaling = config.timestep_scaling.unwrap_or(10.0);
        if !timestep_scaling.is_finite() {
            return Err(solver.invalid("timestep_scaling", timestep_scaling, "a number"));
        }
        Ok(Self {
            distilled: Distilled::new(solver, config)?,
            timestep_scaling: timestep_scaling as f32,
        })
    }
}

impl Sampler for Lcm {
    fn name(&self) -> &'static str {
        self.distilled.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        let timesteps = self.distilled.timesteps(ask)?;
        let first = ask.n_skipped(false)?;
        let discrete = &self.distilled.discrete;
        let mut program = Program::new(0);
        for (idx, timestep) in timesteps.iter().enumerate().skip(first) {
            let t = program.terms();
            // Where no noise is left, the latents are the picture.
            let scaled = *timestep as f32 * self.timestep_scaling;
            let square = scaled * scaled + SIGMA_DATA * SIGMA_DATA;
            let (skip, out) = (SIGMA_DATA * SIGMA_DATA / square, scaled / square.sqrt());
            let picture = discrete.picture(*timestep, &t.latents, &t.prediction);
            let mut next = out * &picture + skip * &t.latents;
            if let Some(following) = timesteps.get(idx + 1) {
                let [signal, noise] = discrete.level(*following);
                next = signal * &next + noise * &t.noise;
            }
            program.push(next, Vec::new());
        }
        let plan = Plan::of_timesteps(discrete, &timesteps);
        plan.schedule(self.distilled.solver, ask.n_steps, first, program)
    }
}

/// The sampler of trajectory consistency models.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tcd(Distilled);

impl Tcd {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        Ok(Self(Distilled::new(solver, config)?))
    }
}

impl Sampler for Tcd {
    fn name(&self) -> &'static str {
        self.0.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        let timesteps = self.0.timesteps(ask)?;
        let first = ask.n_skipped(false)?;
        let discrete = &self.0.discrete;
        let mut program = Program::new(0);
        for (idx, timestep) in timesteps.iter().enumerate().skip(first) {
            let t = program.terms();
            // The last step ends at the first training timestep, with the little noise that it has.
            let following = timesteps.get(idx + 1).copied().unwrap_or(0);
            let [signal, noise] = roots(discrete.alphas_cumprod[following]);
            let next = signal * &discrete.picture(*timestep, &t.latents, &t.prediction)
                + noise * &discrete.noise(*timestep, &t.latents, &t.prediction);
            program.push(next, Vec::new());
        }
        let plan = Plan::of_timesteps(discrete, &timesteps);
        plan.schedule(self.0.solver, ask.n_steps, first, program)
    }
}
