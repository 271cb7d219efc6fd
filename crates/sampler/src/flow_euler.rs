//! Euler steps along a rectified flow, as diffusers' `FlowMatchEulerDiscreteScheduler`.
//!
//! The schedule is computed in float64 from ends that were rounded to float32, then rounded to float32; where a pipeline names the
//! sigmas, in float32 throughout: the same order of operations as diffusers 0.42, whose numbers the tests hold.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{FlowSigmas, SamplerConfig, Solver},
    flow::Shift,
    levels::Spacing,
    linear::{Plan, Program},
    spacing::{linspace, torch_linspace},
};

pub(crate) const CLASS: &str = "FlowMatchEulerDiscreteScheduler";

/// The noise levels of a flow.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FlowLevels {
    pub(crate) solver: Solver,
    n_train_timesteps: u32,
    shift: Shift,
    spacing: Spacing,
    default: FlowSigmas,
}

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FlowEuler {
    levels: FlowLevels,
    is_stochastic: bool,
}

impl FlowLevels {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        if config.invert_sigmas.unwrap_or(false) {
            return Err(solver.unsupported("invert_sigmas", true, "false"));
        }
        let n_train_timesteps = config.num_train_timesteps.unwrap_or(1000);
        if n_train_timesteps == 0 {
            let expected = "a positive whole number";
            return Err(solver.invalid("num_train_timesteps", n_train_timesteps, expected));
        }
        Ok(Self {
            solver,
            n_train_timesteps,
            shift: Shift::new(solver, config, config.shift, "shift")?,
            spacing: Spacing::read(config, solver)?,
            default: config.flow_sigmas,
        })
    }

    /// A train-time sigma after a constant shift, in float32 throughout as torch computes it.
    fn train_sigma(&self, timestep: u32) -> f64 {
        let sigma = timestep as f32 / self.n_train_timesteps as f32;
        if self.shift.is_dynamic() {
            return f64::from(sigma);
        }
        let shift = self.shift.constant;
        f64::from((shift as f32 * sigma) / (1.0 + (shift - 1.0) as f32 * sigma))
    }

    /// Sigmas of the steps and their timesteps.
    pub(crate) fn of(&self, ask: &Ask<'_>) -> Result<(Vec<f32>, Vec<f32>), SamplerError> {
        let n_steps = ask.n_steps;
        if n_steps == 0 {
            return Err(self.solver.step_count(n_steps, "at least 1".to_owned()));
        }
        let inverse = 1.0 / n_steps as f64;
        let (mut sigmas, is_f32): (Vec<f64>, bool) = match (ask.sigmas, self.default) {
            (Some(sigmas), _) => (self.shift.given(self.solver, sigmas)?, true),
            (None, FlowSigmas::Numpy) => {
                let sigmas = linspace(1.0, inverse, n_steps).into_iter();
                (sigmas.map(|sigma| f64::from(sigma as f32)).collect(), true)
            }
            (None, FlowSigmas::Torch) => {
                let sigmas = torch_linspace(1.0, inverse as f32, n_steps).into_iter();
                (sigmas.map(f64::from).collect(), true)
            }
            (None, FlowSigmas::Scheduler) => {
                let n_train = f64::from(self.n_train_timesteps);
                let first = self.train_sigma(self.n_train_timesteps) * n_train;
                let last = self.train_sigma(1) * n_train;
                let timesteps = linspace(first, last, n_steps).into_iter();
                (timesteps.map(|timestep| timestep / n_train).collect(), false)
            }
        };
        self.shift.apply(&mut sigmas, ask, is_f32);
        let (first, last) = (sigmas[0], sigmas[sigmas.len() - 1]);
        let sigmas = self
            .spacing
            .sigmas(first, last, sigmas.len())
            .unwrap_or(sigmas)
            .into_iter();
        let sigmas: Vec<f32> = sigmas.map(|sigma| sigma as f32).collect();
        if !sigmas.iter().all(|sigma| sigma.is_finite()) {
            let expected = match self.shift.terminal {
                // One that is all noise cannot be stretched to end anywhere.
                Some(_) => "at least 2".to_owned(),
                None => "a number whose sigmas are finite".to_owned(),
            };
            return Err(self.solver.step_count(n_steps, expected));
        }
        let timestep = |sigma: &f32| sigma * self.n_train_timesteps as f32;
        let timesteps = sigmas.iter().map(timestep).collect();
        Ok((sigmas, timesteps))
    }
}

impl FlowEuler {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        Ok(Self {
            levels: FlowLevels::new(solver, config)?,
            is_stochastic: config.stochastic_sampling.unwrap_or(false),
        })
    }
}

impl Sampler for FlowEuler {
    fn name(&self) -> &'static str {
        self.levels.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        let (mut sigmas, timesteps) = self.levels.of(ask)?;
        let n_steps = sigmas.len();
        let first = Ask { n_steps, ..*ask }.n_skipped(true)?;
        let levels = sigmas.iter().map(|sigma| [1.0 - sigma, *sigma]).collect();
        sigmas.push(0.0);
        let mut program = Program::new(0);
        for pair in sigmas.windows(2).skip(first) {
            let t = program.terms();
            let (sigma, next_sigma) = (pair[0], pair[1]);
            let latents = if self.is_stochastic {
                let picture = t.latents.clone() - sigma * &t.prediction;
                (1.0 - next_sigma) * &picture + next_sigma * &t.noise
            } else {
                t.latents.clone() + (next_sigma - sigma) * &t.prediction
            };
            program.push(latents, Vec::new());
        }
        let plan = Plan {
            timesteps,
            input_scales: vec![1.0; n_steps],
            sigmas,
            levels,
            init_noise_scale: 1.0,
        };
        plan.schedule(self.levels.solver, n_steps, first, program)
    }
}
