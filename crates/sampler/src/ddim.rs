//! DDIM without fresh noise, as diffusers' `DDIMScheduler` with `eta = 0`.
//!
//! A step takes the picture and the noise that a prediction implies and mixes them anew for the timestep it goes to. Both are linear
//! in latents and prediction, so the step is.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    discrete::{Discrete, DiscreteConfig, PredictionType, Solver, TimestepSpacing},
};

const SOLVER: Solver = Solver {
    class: "DDIMScheduler",
    name: Ddim::NAME,
};

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub struct Ddim {
    discrete: Discrete,
    prediction_type: PredictionType,
    final_alpha: f32,
}

impl Ddim {
    /// Name on the command line.
    pub const NAME: &str = "ddim";

    /// Takes the settings of a checkpoint of whatever class. Those of Euler alone are ignored: `interpolation_type`,
    /// `use_*_sigmas`, `sigma_min`, `sigma_max`, `timestep_type`, `final_sigmas_type`.
    ///
    /// # Errors
    /// [`SamplerError::Unsupported`] for a setting that would change the result and is not implemented,
    /// [`SamplerError::Invalid`] for numbers that make no schedule.
    pub fn new(config: &DiscreteConfig) -> Result<Self, SamplerError> {
        // Both make a step non-linear.
        for (key, is_set) in [
            ("clip_sample", config.clip_sample),
            ("thresholding", config.thresholding),
        ] {
            if is_set {
                return Err(SOLVER.unsupported(key, true, "false"));
            }
        }
        let spacing = config.timestep_spacing.unwrap_or(TimestepSpacing::Leading);
        let discrete = Discrete::new(config, SOLVER, spacing)?;
        // Noise tells nothing of the picture where it is all there is, and only `leading` avoids that timestep.
        if config.prediction_type == PredictionType::Epsilon
            && spacing != TimestepSpacing::Leading
            && discrete.alphas_cumprod.last() == Some(&0.0)
        {
            return Err(SOLVER.unsupported(
                "prediction_type",
                config.prediction_type.name(),
                "v_prediction or sample where the last timestep has no signal left",
            ));
        }
        let final_alpha = match config.set_alpha_to_one {
            true => 1.0,
            false => discrete.alphas_cumprod[0],
        };
        Ok(Self {
            discrete,
            prediction_type: config.prediction_type,
            final_alpha,
        })
    }

    /// Factors of the latents and of the prediction in a step from one amount of signal to another.
    fn factors(&self, alpha: f32, next_alpha: f32) -> [f64; 2] {
        let roots = |alpha: f32| [alpha.sqrt(), (1.0 - alpha).sqrt()].map(f64::from);
        let [signal, noise] = roots(alpha);
        let [next_signal, next_noise] = roots(next_alpha);
        match self.prediction_type {
            PredictionType::Epsilon => {
                let scale = next_signal / signal;
                [scale, next_noise - scale * noise]
            }
            PredictionType::Sample => {
                let scale = next_noise / noise;
                [scale, next_signal - scale * signal]
            }
            PredictionType::VPrediction => [
                next_signal * signal + next_noise * noise,
                next_noise * signal - next_signal * noise,
            ],
        }
    }
}

impl Sampler for Ddim {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    /// The schedule that is asked for. `sigmas` are noise per signal, infinite where no signal is left.
    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        let n_steps = ask.n_steps;
        let alphas = &self.discrete.alphas_cumprod;
        let timesteps = self.discrete.timesteps(n_steps)?;
        let n_train = alphas.len();
        // diffusers steps by this stride from every timestep, also where the next one it visits is nearer or farther.
        let stride = n_train / n_steps;
        let mut sigmas = Vec::with_capacity(n_steps + 1);
        let mut coefficients = Vec::with_capacity(n_steps);
        let sigma = |alpha: f32| ((1.0 - alpha) / alpha).sqrt();
        let level = |alpha: f32| [alpha.sqrt(), (1.0 - alpha).sqrt()];
        let mut levels = Vec::with_capacity(n_steps + 1);
        let mut last_alpha = self.final_alpha;
        for timestep in &timesteps {
            let timestep = timestep.round_ties_even() as usize;
            let Some(&alpha) = alphas.get(timestep) else {
                return Err(SOLVER.step_count(
                    n_steps,
                    format!("a number whose first timestep, {timestep}, is below {n_train}"),
                ));
            };
            last_alpha = match timestep.checked_sub(stride) {
                Some(next) => alphas[next],
                None => self.final_alpha,
            };
            let [c0, c1] = self.factors(alpha, last_alpha);
            sigmas.push(sigma(alpha));
            levels.push(level(alpha));
            coefficients.push([c0 as f32, c1 as f32, 0.0]);
        }
        sigmas.push(sigma(last_alpha));
        levels.push([1.0, 0.0]);
        let schedule = self.discrete.checked(Schedule::plain(
            timesteps.iter().map(|t| t.round_ties_even() as f32).collect(),
            vec![1.0; n_steps],
            sigmas,
            coefficients,
            1.0,
            &levels,
        ))?;
        Ok(schedule.without_first(ask.n_skipped()))
    }
}
