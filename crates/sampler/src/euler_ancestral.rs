//! Euler steps that go farther than they should and add fresh noise in return, as diffusers' `EulerAncestralDiscreteScheduler`.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{PredictionType, SamplerConfig, Solver, TimestepSpacing},
    discrete::{Defaults, Discrete, LINEAR_BETAS},
    euler::{init_noise_scale, input_scale, refuse_flow, stepped},
    levels::{Spacing, TrainSigmas},
    linear::{Plan, Program},
};

pub(crate) const CLASS: &str = "EulerAncestralDiscreteScheduler";
const DEFAULTS: Defaults = Defaults {
    betas: LINEAR_BETAS,
    spacing: TimestepSpacing::Linspace,
};

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EulerAncestral {
    solver: Solver,
    discrete: Discrete,
    train_sigmas: TrainSigmas,
}

impl EulerAncestral {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        let discrete = Discrete::with_signal(config, solver, DEFAULTS)?;
        refuse_flow(&discrete, solver)?;
        if discrete.prediction_type == PredictionType::Sample {
            return Err(solver.unsupported("prediction_type", "sample", "epsilon or v_prediction"));
        }
        Ok(Self {
            solver,
            train_sigmas: TrainSigmas::new(&discrete.alphas_cumprod),
            discrete,
        })
    }
}

/// Where a step to `next` goes and how much noise it adds there, in float32 as torch computes it.
pub(crate) fn ancestral(sigma: f32, next: f32) -> (f32, f32) {
    let (square, next_square) = (sigma * sigma, next * next);
    let up = (next_square * (square - next_square) / square).sqrt();
    ((next_square - up * up).sqrt(), up)
}

impl Sampler for EulerAncestral {
    fn name(&self) -> &'static str {
        self.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        self.solver.no_sigmas(ask.sigmas)?;
        let n_steps = ask.n_steps;
        let timesteps = self.discrete.timesteps(n_steps)?;
        let (timesteps, mut sigmas) = self.train_sigmas.spaced(timesteps, Spacing::Timesteps);
        let first = ask.n_skipped(false)?;
        let levels = sigmas.iter().map(|sigma| [1.0, *sigma]).collect();
        let input_scales = sigmas.iter().map(|sigma| input_scale(*sigma)).collect();
        sigmas.push(0.0);
        let mut program = Program::new(0);
        for pair in sigmas.windows(2).skip(first) {
            let t = program.terms();
            let (down, up) = ancestral(pair[0], pair[1]);
            let next = stepped(&t, self.discrete.prediction_type, pair[0], down);
            program.push(next + up * &t.noise, Vec::new());
        }
        let plan = Plan {
            timesteps,
            input_scales,
            init_noise_scale: init_noise_scale(&self.discrete, &sigmas),
            sigmas,
            levels,
        };
        plan.schedule(self.solver, n_steps, first, program)
    }
}
