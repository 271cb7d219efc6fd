//! DDIM without fresh noise, as diffusers' `DDIMScheduler` with `eta = 0`.
//!
//! A step takes the picture and the noise that a prediction implies and mixes them anew for the timestep it goes to.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{PredictionType, SamplerConfig, Solver, TimestepSpacing},
    discrete::{Defaults, Discrete, LINEAR_BETAS, roots},
    linear::{Plan, Program},
};

pub(crate) const CLASS: &str = "DDIMScheduler";
const DEFAULTS: Defaults = Defaults {
    betas: LINEAR_BETAS,
    spacing: TimestepSpacing::Leading,
};

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ddim {
    solver: Solver,
    discrete: Discrete,
    final_alpha: f32,
}

impl Ddim {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        solver.check_linear(config, Some(true))?;
        let discrete = Discrete::new(config, solver, DEFAULTS)?;
        let prediction_type = discrete.prediction_type;
        if prediction_type == PredictionType::Flow {
            let expected = "epsilon, v_prediction or sample";
            return Err(solver.unsupported("prediction_type", prediction_type.name(), expected));
        }
        // Noise tells nothing of the picture where it is all there is, and only `leading` avoids that timestep.
        if prediction_type == PredictionType::Epsilon
            && discrete.spacing != TimestepSpacing::Leading
            && discrete.alphas_cumprod.last() == Some(&0.0)
        {
            return Err(solver.unsupported(
                "prediction_type",
                prediction_type.name(),
                "v_prediction or sample where the last timestep has no signal left",
            ));
        }
        let final_alpha = match config.set_alpha_to_one.unwrap_or(true) {
            true => 1.0,
            false => discrete.alphas_cumprod[0],
        };
        Ok(Self {
            solver,
            discrete,
            final_alpha,
        })
    }

    /// Factors of the latents and of the prediction in a step from one amount of signal to another.
    fn factors(&self, alpha: f32, next_alpha: f32) -> [f64; 2] {
        let [signal, noise] = roots(alpha).map(f64::from);
        let [next_signal, next_noise] = roots(next_alpha).map(f64::from);
        match self.discrete.prediction_type {
            PredictionType::Sample => {
                let scale = next_noise / noise;
                [scale, next_signal - scale * signal]
            }
            PredictionType::VPrediction => [
                next_signal * signal + next_noise * noise,
                next_noise * signal - next_signal * noise,
            ],
            PredictionType::Epsilon | PredictionType::Flow => {
                let scale = next_signal / signal;
                [scale, next_noise - scale * noise]
            }
        }
    }
}

impl Sampler for Ddim {
    fn name(&self) -> &'static str {
        self.solver.name
    }

    /// The schedule that is asked for. `sigmas` are noise per signal, infinite where no signal is left.
    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        self.solver.no_sigmas(ask.sigmas)?;
        let n_steps = ask.n_steps;
        let timesteps = self.discrete.whole_timesteps(n_steps)?;
        let first = ask.n_skipped(false)?;
        let alphas = &self.discrete.alphas_cumprod;
        // diffusers steps by this stride from every timestep, also where the next one it visits is nearer or farther.
        let stride = alphas.len() / n_steps;
        let next_alpha = |timestep: usize| match timestep.checked_sub(stride) {
            Some(next) => alphas[next],
            None => self.final_alpha,
        };
        let mut program = Program::new(0);
        for timestep in timesteps.iter().skip(first) {
            let t = program.terms();
            let [c0, c1] = self.factors(alphas[*timestep], next_alpha(*timestep));
            program.push(c0 * &t.latents + c1 * &t.prediction, Vec::new());
        }
        let sigma = |alpha: f32| ((1.0 - alpha) / alpha).sqrt();
        let mut plan = Plan::of_timesteps(&self.discrete, &timesteps);
        if let (Some(last), Some(timestep)) = (plan.sigmas.last_mut(), timesteps.last()) {
            *last = sigma(next_alpha(*timestep));
        }
        plan.schedule(self.solver, n_steps, first, program)
    }
}
