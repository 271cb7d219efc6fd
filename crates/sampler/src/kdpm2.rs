//! Midpoint steps on a scale of logarithms: a step to the geometric mean of two noise levels, then the whole step along the derivative
//! there, as diffusers' `KDPM2DiscreteScheduler` and, with fresh noise, `KDPM2AncestralDiscreteScheduler`. A step takes two evaluations,
//! the last one.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{BetaSchedule, PredictionType, SamplerConfig, Solver, TimestepSpacing},
    discrete::{Defaults, Discrete},
    euler::{init_noise_scale, input_scale, refuse_flow},
    euler_ancestral::ancestral,
    heun::{derivative, doubled},
    levels::{Spacing, TrainSigmas},
    linear::{Plan, Program},
};

pub(crate) const CLASS: &str = "KDPM2DiscreteScheduler";
pub(crate) const ANCESTRAL_CLASS: &str = "KDPM2AncestralDiscreteScheduler";
const DEFAULTS: Defaults = Defaults {
    betas: (0.00085, 0.012, BetaSchedule::Linear),
    spacing: TimestepSpacing::Linspace,
};

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Kdpm2 {
    solver: Solver,
    discrete: Discrete,
    train_sigmas: TrainSigmas,
    spacing: Spacing,
}

impl Kdpm2 {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        // The class does not know this key.
        let config = SamplerConfig {
            rescale_betas_zero_snr: None,
            ..config.clone()
        };
        let discrete = Discrete::with_signal(&config, solver, DEFAULTS)?;
        refuse_flow(&discrete, solver)?;
        if discrete.prediction_type == PredictionType::Sample {
            return Err(solver.unsupported("prediction_type", "sample", "epsilon or v_prediction"));
        }
        Ok(Self {
            solver,
            train_sigmas: TrainSigmas::new(&discrete.alphas_cumprod),
            spacing: Spacing::read(&config, solver)?,
            discrete,
        })
    }

    /// Where a step from one sigma to another looks at the derivative, goes to, and how much noise it adds there.
    fn targets(&self, sigma: f32, next: f32) -> (f32, f32, f32) {
        let (down, up) = match self.solver.class == ANCESTRAL_CLASS {
            true => ancestral(sigma, next),
            false => (next, 0.0),
        };
        let middle = match next > 0.0 {
            true => (0.5 * (sigma.ln() + down.ln())).exp(),
            false => 0.0,
        };
        (middle, down, up)
    }
}

impl Sampler for Kdpm2 {
    fn name(&self) -> &'static str {
        self.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        self.solver.no_sigmas(ask.sigmas)?;
        let n_steps = ask.n_steps;
        let timesteps = self.discrete.timesteps(n_steps)?;
        let (mut timesteps, mut sigmas) = self.train_sigmas.spaced(timesteps, self.spacing);
        if self.spacing == Spacing::Karras {
            timesteps.iter_mut().for_each(|t| *t = t.round_ties_even());
        }
        let first = ask.n_skipped(false)?;
        sigmas.push(0.0);
        let prediction_type = self.discrete.prediction_type;
        // Latents at the beginning of the step.
        let mut program = Program::new(1);
        let mut of_evaluations = Vec::new();
        let mut all_timesteps = Vec::new();
        for (idx, timestep) in timesteps.iter().enumerate() {
            let (sigma, next) = (sigmas[idx], sigmas[idx + 1]);
            let (middle, down, up) = self.targets(sigma, next);
            of_evaluations.push(sigma);
            all_timesteps.push(*timestep);
            if idx + 1 < n_steps {
                of_evaluations.push(middle);
                all_timesteps.push(self.train_sigmas.timestep_of_f32(middle));
            }
            if idx < first {
                continue;
            }
            let t = program.terms();
            let slope = derivative(prediction_type, sigma, &t.latents, &t.prediction);
            program.push(
                t.latents.clone() + (middle - sigma) * &slope,
                vec![t.latents.clone()],
            );
            if idx + 1 < n_steps {
                let t = program.terms();
                let slope = derivative(prediction_type, middle, &t.latents, &t.prediction);
                let next = t.kept[0].clone() + (down - sigma) * &slope + up * &t.noise;
                program.push(next, vec![t.zero]);
            }
        }
        let init_noise_scale = init_noise_scale(&self.discrete, &sigmas);
        let mut all_sigmas = doubled(&sigmas[..n_steps]);
        let levels = all_sigmas.iter().map(|sigma| [1.0, *sigma]).collect();
        all_sigmas.push(0.0);
        let plan = Plan {
            timesteps: all_timesteps,
            input_scales: of_evaluations.iter().map(|sigma| input_scale(*sigma)).collect(),
            sigmas: all_sigmas,
            levels,
            init_noise_scale,
        };
        plan.schedule(self.solver, n_steps, 2 * first, program)
    }
}
