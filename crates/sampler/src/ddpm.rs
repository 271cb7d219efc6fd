//! The reverse of the training's noising, with fresh noise in every step, as diffusers' `DDPMScheduler`.
//!
//! "Denoising Diffusion Probabilistic Models" (Ho et al., 2020), formula 7. Scalars are float32 as in diffusers.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{SamplerConfig, Solver, TimestepSpacing},
    discrete::{Defaults, Discrete, LINEAR_BETAS},
    euler::refuse_flow,
    linear::{Plan, Program},
};

pub(crate) const CLASS: &str = "DDPMScheduler";
const DEFAULTS: Defaults = Defaults {
    betas: LINEAR_BETAS,
    spacing: TimestepSpacing::Leading,
};
/// Keeps logarithms of variances finite.
const LEAST_VARIANCE: f32 = 1e-20;

/// How much noise a step adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variance {
    FixedSmall,
    FixedLarge,
}

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ddpm {
    solver: Solver,
    discrete: Discrete,
    variance: Variance,
}

impl Ddpm {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        solver.check_linear(config, Some(true))?;
        let variance = match config.variance_type.as_deref() {
            // The logarithm is taken and undone.
            None | Some("fixed_small" | "fixed_small_log") => Variance::FixedSmall,
            Some("fixed_large") => Variance::FixedLarge,
            Some(other) => {
                let expected = "fixed_small, fixed_small_log or fixed_large";
                return Err(solver.unsupported("variance_type", other, expected));
            }
        };
        let discrete = Discrete::new(config, solver, DEFAULTS)?;
        refuse_flow(&discrete, solver)?;
        Ok(Self {
            solver,
            discrete,
            variance,
        })
    }
}

impl Sampler for Ddpm {
    fn name(&self) -> &'static str {
        self.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        self.solver.no_sigmas(ask.sigmas)?;
        let n_steps = ask.n_steps;
        let timesteps = self.discrete.whole_timesteps(n_steps)?;
        let first = ask.n_skipped(false)?;
        let alphas = &self.discrete.alphas_cumprod;
        let mut program = Program::new(0);
        for (idx, timestep) in timesteps.iter().enumerate().skip(first) {
            let t = program.terms();
            let alpha = alphas[*timestep];
            let next_alpha = timesteps.get(idx + 1).map_or(1.0, |next| alphas[*next]);
            let (noise, next_noise) = (1.0 - alpha, 1.0 - next_alpha);
            let step_alpha = alpha / next_alpha;
            let step_beta = 1.0 - step_alpha;
            let picture = self.discrete.picture(*timestep, &t.latents, &t.prediction);
            let mut next = (next_alpha.sqrt() * step_beta / noise) * &picture
                + (step_alpha.sqrt() * next_noise / noise) * &t.latents;
            if *timestep > 0 {
                let variance = match self.variance {
                    Variance::FixedSmall => (next_noise / noise * step_beta).max(LEAST_VARIANCE),
                    Variance::FixedLarge => step_beta,
                };
                next = next + variance.sqrt() * &t.noise;
            }
            program.push(next, Vec::new());
        }
        let plan = Plan::of_timesteps(&self.discrete, &timesteps);
        plan.schedule(self.solver, n_steps, first, program)
    }
}
