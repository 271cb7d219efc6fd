//! Heun's method: an Euler step to look at the derivative there, then a step along the mean of both, as diffusers'
//! `HeunDiscreteScheduler` and, for flows, `FlowMatchHeunDiscreteScheduler`. A step takes two evaluations, the last one.
//!
//! For flows the noise levels are those of Euler's steps whatever the settings; the class in diffusers knows no other than a constant
//! shift, and computes the same with that.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{BetaSchedule, PredictionType, SamplerConfig, Solver, TimestepSpacing},
    discrete::{Defaults, Discrete},
    euler::{init_noise_scale, input_scale, refuse_flow},
    flow_euler::FlowLevels,
    levels::{Spacing, TrainSigmas},
    linear::{Form, Plan, Program},
};

pub(crate) const CLASS: &str = "HeunDiscreteScheduler";
pub(crate) const FLOW_CLASS: &str = "FlowMatchHeunDiscreteScheduler";
const DEFAULTS: Defaults = Defaults {
    betas: (0.00085, 0.012, BetaSchedule::Linear),
    spacing: TimestepSpacing::Linspace,
};

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Heun {
    solver: Solver,
    discrete: Discrete,
    train_sigmas: TrainSigmas,
    spacing: Spacing,
}

impl Heun {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        solver.check_linear(config, Some(false))?;
        // The class does not know this key.
        let config = SamplerConfig {
            rescale_betas_zero_snr: None,
            ..config.clone()
        };
        let discrete = Discrete::with_signal(&config, solver, DEFAULTS)?;
        refuse_flow(&discrete, solver)?;
        Ok(Self {
            solver,
            train_sigmas: TrainSigmas::new(&discrete.alphas_cumprod),
            spacing: Spacing::read(&config, solver)?,
            discrete,
        })
    }
}

/// `(latents - picture) / sigma`.
pub(crate) fn derivative(
    prediction_type: PredictionType,
    sigma: f32,
    latents: &Form,
    prediction: &Form,
) -> Form {
    let sigma = f64::from(sigma);
    let variance = sigma * sigma + 1.0;
    match prediction_type {
        PredictionType::Epsilon | PredictionType::Flow => prediction.clone(),
        PredictionType::Sample => (1.0 / sigma) * latents - (1.0 / sigma) * prediction,
        PredictionType::VPrediction => (sigma / variance) * latents + (1.0 / variance.sqrt()) * prediction,
    }
}

/// Each value twice but the first.
pub(crate) fn doubled(values: &[f32]) -> Vec<f32> {
    let rest = values.iter().skip(1).flat_map(|value| [*value, *value]);
    values.iter().take(1).copied().chain(rest).collect()
}

/// The steps from `sigmas[first]` on; the last sigma is where sampling ends.
fn steps(prediction_type: PredictionType, sigmas: &[f32], first: usize) -> Program {
    // Latents and derivative at the beginning of the step.
    let mut program = Program::new(2);
    for idx in first..sigmas.len() - 1 {
        let (sigma, next) = (sigmas[idx], sigmas[idx + 1]);
        let delta = next - sigma;
        let t = program.terms();
        let slope = derivative(prediction_type, sigma, &t.latents, &t.prediction);
        program.push(t.latents.clone() + delta * &slope, vec![t.latents.clone(), slope]);
        if idx + 2 < sigmas.len() {
            let t = program.terms();
            let there = derivative(prediction_type, next, &t.latents, &t.prediction);
            let mean = 0.5 * &(t.kept[1].clone() + there);
            program.push(
                t.kept[0].clone() + delta * &mean,
                vec![t.zero.clone(), t.zero.clone()],
            );
        }
    }
    program
}

/// Sigmas per evaluation, and where sampling ends.
fn sigmas_of_evaluations(sigmas: &[f32]) -> Vec<f32> {
    let mut all = doubled(&sigmas[..sigmas.len() - 1]);
    all.extend(sigmas.last());
    all
}

impl Sampler for Heun {
    fn name(&self) -> &'static str {
        self.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        self.solver.no_sigmas(ask.sigmas)?;
        let n_steps = ask.n_steps;
        let timesteps = self.discrete.timesteps(n_steps)?;
        let (timesteps, mut sigmas) = self.train_sigmas.spaced(timesteps, self.spacing);
        let first = ask.n_skipped(false)?;
        sigmas.push(0.0);
        let program = steps(self.discrete.prediction_type, &sigmas, first);
        let init_noise_scale = init_noise_scale(&self.discrete, &sigmas);
        let sigmas = sigmas_of_evaluations(&sigmas);
        let of_evaluations = &sigmas[..sigmas.len() - 1];
        let plan = Plan {
            timesteps: doubled(&timesteps),
            input_scales: of_evaluations.iter().map(|sigma| input_scale(*sigma)).collect(),
            levels: of_evaluations.iter().map(|sigma| [1.0, *sigma]).collect(),
            init_noise_scale,
            sigmas,
        };
        plan.schedule(self.solver, n_steps, 2 * first, program)
    }
}

/// The sampler of a flow.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FlowHeun(FlowLevels);

impl FlowHeun {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        Ok(Self(FlowLevels::new(solver, config)?))
    }
}

impl Sampler for FlowHeun {
    fn name(&self) -> &'static str {
        self.0.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        let (mut sigmas, timesteps) = self.0.of(ask)?;
        let n_steps = sigmas.len();
        let first = Ask { n_steps, ..*ask }.n_skipped(true)?;
        sigmas.push(0.0);
        let program = steps(PredictionType::Flow, &sigmas, first);
        let sigmas = sigmas_of_evaluations(&sigmas);
        let of_evaluations = &sigmas[..sigmas.len() - 1];
        let plan = Plan {
            timesteps: doubled(&timesteps),
            input_scales: vec![1.0; of_evaluations.len()],
            levels: of_evaluations.iter().map(|sigma| [1.0 - sigma, *sigma]).collect(),
            init_noise_scale: 1.0,
            sigmas,
        };
        plan.schedule(self.0.solver, n_steps, 2 * first, program)
    }
}
