//! Euler steps along the flow of noise levels, as diffusers' `EulerDiscreteScheduler` without churn.
//!
//! Latents are the picture plus `sigma` times noise, so the denoiser is given them scaled down to unit variance. A step goes along the
//! derivative `(latents - picture) / sigma`, where the prediction implies the picture.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{
        FinalSigmas, InterpolationType, PredictionType, SamplerConfig, Solver, TimestepSpacing, TimestepType,
    },
    discrete::{Defaults, Discrete, LINEAR_BETAS},
    levels::{Spacing, TrainSigmas, ends},
    linear::{Form, Plan, Program, Terms},
    spacing::{numpy_ln, torch_linspace},
};

pub(crate) const CLASS: &str = "EulerDiscreteScheduler";
const DEFAULTS: Defaults = Defaults {
    betas: LINEAR_BETAS,
    spacing: TimestepSpacing::Linspace,
};

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Euler {
    solver: Solver,
    discrete: Discrete,
    train_sigmas: TrainSigmas,
    interpolation_type: InterpolationType,
    spacing: Spacing,
    ends: [Option<f64>; 2],
    is_continuous: bool,
    final_sigma: f32,
}

impl Euler {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        let spacing = Spacing::read(config, solver)?;
        let ends = ends(config, solver)?;
        let discrete = Discrete::with_signal(config, solver, DEFAULTS)?;
        refuse_flow(&discrete, solver)?;
        let train_sigmas = TrainSigmas::new(&discrete.alphas_cumprod);
        Ok(Self {
            solver,
            interpolation_type: config.interpolation_type.unwrap_or(InterpolationType::Linear),
            spacing,
            ends,
            is_continuous: config.timestep_type == Some(TimestepType::Continuous)
                && discrete.prediction_type == PredictionType::VPrediction,
            final_sigma: match config.final_sigmas_type.unwrap_or(FinalSigmas::Zero) {
                FinalSigmas::Zero => 0.0,
                FinalSigmas::SigmaMin => train_sigmas.first(),
            },
            discrete,
            train_sigmas,
        })
    }

    /// Timesteps and as many sigmas or one more; what is more is where sampling ends.
    fn levels(&self, n_steps: usize) -> Result<(Vec<f32>, Vec<f64>), SamplerError> {
        let timesteps = self.discrete.timesteps(n_steps)?;
        let mut timesteps: Vec<f32> = timesteps.into_iter().map(|t| t as f32).collect();
        let mut sigmas: Vec<f64> = match self.interpolation_type {
            InterpolationType::Linear => {
                let sigma = |t: &f32| self.train_sigmas.at(f64::from(*t));
                timesteps.iter().map(sigma).collect()
            }
            InterpolationType::LogLinear => {
                let ends = [self.train_sigmas.last(), self.train_sigmas.first()];
                let [first, last] = ends.map(numpy_ln);
                let logs = torch_linspace(first, last, n_steps + 1);
                logs.into_iter()
                    .map(|log| f64::from(f64::from(log).exp() as f32))
                    .collect()
            }
        };
        let [sigma_min, sigma_max] = self.ends;
        let first = sigma_max.unwrap_or(sigmas[0]);
        let last = sigma_min.unwrap_or(sigmas[sigmas.len() - 1]);
        if let Some(spaced) = self.spacing.sigmas(first, last, n_steps) {
            timesteps = self.train_sigmas.timesteps_of(&spaced);
            sigmas = spaced;
        }
        Ok((timesteps, sigmas))
    }

    /// Those of a request: the last is where sampling ends.
    fn given(&self, sigmas: &[f32]) -> Result<(Vec<f32>, Vec<f32>), SamplerError> {
        let n_steps = sigmas.len().saturating_sub(1);
        let are_levels = sigmas.iter().all(|sigma| (0.0..1e10).contains(sigma));
        let are_falling = sigmas.windows(2).all(|pair| pair[0] > pair[1]);
        if n_steps == 0 || !are_levels || !are_falling {
            return Err(self
                .solver
                .sigmas("takes at least 2 sigmas, falling, the last one where sampling ends"));
        }
        let steps: Vec<f64> = sigmas[..n_steps].iter().map(|sigma| f64::from(*sigma)).collect();
        Ok((self.train_sigmas.timesteps_of(&steps), sigmas.to_vec()))
    }
}

/// Refuses predictions of a flow.
pub(crate) fn refuse_flow(discrete: &Discrete, solver: Solver) -> Result<(), SamplerError> {
    let prediction_type = discrete.prediction_type;
    if prediction_type != PredictionType::Flow {
        return Ok(());
    }
    let expected = "epsilon, v_prediction or sample";
    Err(solver.unsupported("prediction_type", prediction_type.name(), expected))
}

/// The factor by which latents of unit variance plus noise of `sigma` have unit variance again.
pub(crate) fn input_scale(sigma: f32) -> f32 {
    (1.0 / (f64::from(sigma).powi(2) + 1.0).sqrt()) as f32
}

/// Factor of unit normal noise that makes the initial latents.
pub(crate) fn init_noise_scale(discrete: &Discrete, sigmas: &[f32]) -> f32 {
    let most = sigmas.iter().copied().fold(0.0, f32::max);
    match discrete.spacing {
        TimestepSpacing::Leading => (most * most + 1.0).sqrt(),
        TimestepSpacing::Linspace | TimestepSpacing::Trailing => most,
    }
}

/// Factors of latents and prediction in a step from one sigma to another along the derivative.
fn factors(prediction_type: PredictionType, sigma: f32, next_sigma: f32) -> [f64; 2] {
    let delta = f64::from(next_sigma - sigma);
    let (sigma, next_sigma) = (f64::from(sigma), f64::from(next_sigma));
    let variance = sigma * sigma + 1.0;
    match prediction_type {
        PredictionType::Epsilon | PredictionType::Flow => [1.0, delta],
        PredictionType::Sample => [next_sigma / sigma, -delta / sigma],
        // `1 + delta sigma / variance`, without the cancellation.
        PredictionType::VPrediction => [(1.0 + next_sigma * sigma) / variance, delta / variance.sqrt()],
    }
}

/// The latents after such a step.
pub(crate) fn stepped(terms: &Terms, prediction_type: PredictionType, sigma: f32, next_sigma: f32) -> Form {
    let [c0, c1] = factors(prediction_type, sigma, next_sigma);
    c0 * &terms.latents + c1 * &terms.prediction
}

impl Sampler for Euler {
    fn name(&self) -> &'static str {
        self.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        let mut ask = *ask;
        let (mut timesteps, sigmas) = match ask.sigmas {
            Some(sigmas) => self.given(sigmas)?,
            None => {
                let (timesteps, sigmas) = self.levels(ask.n_steps)?;
                let mut sigmas: Vec<f32> = sigmas.into_iter().map(|sigma| sigma as f32).collect();
                sigmas.push(self.final_sigma);
                (timesteps, sigmas)
            }
        };
        let n_steps = timesteps.len();
        ask.n_steps = n_steps;
        let first = ask.n_skipped(false)?;
        let init_noise_scale = init_noise_scale(&self.discrete, &sigmas);
        let sigmas = &sigmas[..=n_steps];
        let steps = &sigmas[..n_steps];
        if self.is_continuous {
            let quarter_log = |sigma: &f32| 0.25 * f64::from(*sigma).ln() as f32;
            timesteps = steps.iter().map(quarter_log).collect();
        }
        let mut program = Program::new(0);
        for pair in sigmas.windows(2).skip(first) {
            let t = program.terms();
            program.push(
                stepped(&t, self.discrete.prediction_type, pair[0], pair[1]),
                Vec::new(),
            );
        }
        let plan = Plan {
            timesteps,
            input_scales: steps.iter().map(|sigma| input_scale(*sigma)).collect(),
            sigmas: sigmas.to_vec(),
            levels: steps.iter().map(|sigma| [1.0, *sigma]).collect(),
            init_noise_scale,
        };
        plan.schedule(self.solver, n_steps, first, program)
    }
}
