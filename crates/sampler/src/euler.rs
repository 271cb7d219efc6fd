//! Euler steps along the flow of noise levels, as diffusers' `EulerDiscreteScheduler` without churn.
//!
//! Latents are the picture plus `sigma` times noise, so the denoiser is given them scaled down to unit variance. A step goes along the
//! derivative `(latents - picture) / sigma`, where the prediction implies the picture.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    discrete::{
        Discrete, DiscreteConfig, FinalSigmas, InterpolationType, PredictionType, Solver, TimestepSpacing,
        TimestepType, betas_key,
    },
    spacing::{linspace, numpy_ln, torch_linspace},
};

/// What is left of the signal at the last timestep of a schedule rescaled to leave nothing: a float16 can still hold it.
const LEAST_ALPHA: f32 = 1.0 / 16_777_216.0;
/// Exponent of Karras' spacing ("Elucidating the Design Space of Diffusion-Based Generative Models", Karras et al., 2022).
const KARRAS_RHO: f64 = 7.0;
const SOLVER: Solver = Solver {
    class: "EulerDiscreteScheduler",
    name: Euler::NAME,
};

/// How the sigmas between the ends are spaced.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Spacing {
    /// As the timesteps are.
    Timesteps,
    Karras,
    Exponential,
}

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub struct Euler {
    discrete: Discrete,
    /// Noise levels of the training timesteps.
    train_sigmas: Vec<f32>,
    prediction_type: PredictionType,
    interpolation_type: InterpolationType,
    spacing: Spacing,
    sigma_min: Option<f64>,
    sigma_max: Option<f64>,
    is_continuous: bool,
    is_unit_variance: bool,
    final_sigma: f32,
}

impl Euler {
    /// Name on the command line.
    pub const NAME: &str = "euler";

    /// Takes the settings of a checkpoint of whatever class. Those of DDIM alone are ignored: `set_alpha_to_one`, `clip_sample`,
    /// `thresholding`.
    ///
    /// # Errors
    /// [`SamplerError::Unsupported`] for a setting that would change the result and is not implemented,
    /// [`SamplerError::Invalid`] for numbers that make no schedule.
    pub fn new(config: &DiscreteConfig) -> Result<Self, SamplerError> {
        if config.use_beta_sigmas {
            return Err(SOLVER.unsupported("use_beta_sigmas", true, "false"));
        }
        let spacing = match (config.use_karras_sigmas, config.use_exponential_sigmas) {
            (false, false) => Spacing::Timesteps,
            (true, false) => Spacing::Karras,
            (false, true) => Spacing::Exponential,
            (true, true) => {
                let expected = "one of use_karras_sigmas and use_exponential_sigmas";
                return Err(SOLVER.invalid("use_karras_sigmas", true, expected));
            }
        };
        for (key, sigma) in [("sigma_min", config.sigma_min), ("sigma_max", config.sigma_max)] {
            // Also as a float32, so that its square is finite.
            let is_usable = |sigma: f64| (1e-10..=1e10).contains(&sigma);
            if let Some(sigma) = sigma.filter(|sigma| !is_usable(*sigma)) {
                return Err(SOLVER.invalid(key, sigma, "a number of 1e-10 to 1e10"));
            }
        }
        let default_spacing = TimestepSpacing::Linspace;
        let timestep_spacing = config.timestep_spacing.unwrap_or(default_spacing);
        let mut discrete = Discrete::new(config, SOLVER, timestep_spacing)?;
        if let (true, Some(last)) = (config.rescale_betas_zero_snr, discrete.alphas_cumprod.last_mut()) {
            *last = LEAST_ALPHA;
        }
        let sigma = |alpha: &f32| ((1.0 - alpha) / alpha).sqrt();
        let train_sigmas: Vec<f32> = discrete.alphas_cumprod.iter().map(sigma).collect();
        if !train_sigmas.iter().all(|sigma| sigma.is_finite()) {
            let (key, value) = betas_key(config);
            let expected = "betas that leave some signal at every timestep";
            return Err(SOLVER.invalid(key, value, expected));
        }
        Ok(Self {
            prediction_type: config.prediction_type,
            interpolation_type: config.interpolation_type,
            spacing,
            sigma_min: config.sigma_min,
            sigma_max: config.sigma_max,
            is_continuous: config.timestep_type == TimestepType::Continuous
                && config.prediction_type == PredictionType::VPrediction,
            is_unit_variance: timestep_spacing == TimestepSpacing::Leading,
            final_sigma: match config.final_sigmas_type {
                FinalSigmas::Zero => 0.0,
                FinalSigmas::SigmaMin => train_sigmas[0],
            },
            discrete,
            train_sigmas,
        })
    }

    /// `numpy.interp` of the training sigmas.
    fn sigma_at(&self, timestep: f64) -> f64 {
        let last_idx = self.train_sigmas.len() - 1;
        let below = (timestep as usize).min(last_idx);
        let sigma = f64::from(self.train_sigmas[below]);
        if below == last_idx {
            return sigma;
        }
        let slope = f64::from(self.train_sigmas[below + 1]) - sigma;
        slope * (timestep - below as f64) + sigma
    }

    /// The training timestep of a sigma, between two by its logarithm.
    fn timestep_of(&self, sigma: f64, log_sigmas: &[f64]) -> f64 {
        let log_sigma = sigma.max(1e-10).ln();
        let Some(last_pair) = log_sigmas.len().checked_sub(2) else {
            return 0.0;
        };
        let below = log_sigmas.iter().rposition(|log| log_sigma - log >= 0.0);
        let below = below.unwrap_or(0).min(last_pair);
        let (low, high) = (log_sigmas[below], log_sigmas[below + 1]);
        let weight = ((low - log_sigma) / (low - high)).clamp(0.0, 1.0);
        (1.0 - weight) * below as f64 + weight * (below + 1) as f64
    }

    /// Timesteps and as many sigmas or one more; what is more is where sampling ends.
    fn levels(&self, n_steps: usize) -> Result<(Vec<f32>, Vec<f64>), SamplerError> {
        let timesteps = self.discrete.timesteps(n_steps)?;
        let mut timesteps: Vec<f32> = timesteps.into_iter().map(|t| t as f32).collect();
        let mut sigmas: Vec<f64> = match self.interpolation_type {
            InterpolationType::Linear => {
                let sigma = |t: &f32| self.sigma_at(f64::from(*t));
                timesteps.iter().map(sigma).collect()
            }
            InterpolationType::LogLinear => {
                let last_idx = self.train_sigmas.len() - 1;
                let [first, last] = [last_idx, 0].map(|idx| numpy_ln(self.train_sigmas[idx]));
                let logs = torch_linspace(first, last, n_steps + 1);
                logs.into_iter()
                    .map(|log| f64::from(f64::from(log).exp() as f32))
                    .collect()
            }
        };
        let first = self.sigma_max.unwrap_or(sigmas[0]);
        let last = self.sigma_min.unwrap_or(sigmas[sigmas.len() - 1]);
        let spaced: Option<Vec<f64>> = match self.spacing {
            Spacing::Timesteps => None,
            Spacing::Karras => {
                let [first, last] = [first, last].map(|sigma| sigma.powf(1.0 / KARRAS_RHO));
                let sigma = |ramp: f64| (first + ramp * (last - first)).powf(KARRAS_RHO);
                Some(linspace(0.0, 1.0, n_steps).into_iter().map(sigma).collect())
            }
            Spacing::Exponential => {
                let logs = linspace(first.ln(), last.ln(), n_steps);
                Some(logs.into_iter().map(f64::exp).collect())
            }
        };
        if let Some(spaced) = spaced {
            let log_sigmas: Vec<f64> = self
                .train_sigmas
                .iter()
                .map(|s| f64::from(numpy_ln(*s)))
                .collect();
            let timestep = |sigma: &f64| self.timestep_of(*sigma, &log_sigmas) as f32;
            timesteps = spaced.iter().map(timestep).collect();
            sigmas = spaced;
        }
        Ok((timesteps, sigmas))
    }

    /// Factors of the latents and of the prediction in a step from one sigma to another.
    fn factors(&self, sigma: f32, next_sigma: f32) -> [f64; 2] {
        let delta = f64::from(next_sigma - sigma);
        let (sigma, next_sigma) = (f64::from(sigma), f64::from(next_sigma));
        let variance = sigma * sigma + 1.0;
        match self.prediction_type {
            PredictionType::Epsilon => [1.0, delta],
            PredictionType::Sample => [next_sigma / sigma, -delta / sigma],
            // `1 + delta sigma / variance`, without the cancellation.
            PredictionType::VPrediction => [(1.0 + next_sigma * sigma) / variance, delta / variance.sqrt()],
        }
    }
}

impl Sampler for Euler {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        let n_steps = ask.n_steps;
        let (mut timesteps, sigmas) = self.levels(n_steps)?;
        let mut sigmas: Vec<f32> = sigmas.into_iter().map(|sigma| sigma as f32).collect();
        sigmas.push(self.final_sigma);
        let most = sigmas.iter().copied().fold(0.0, f32::max);
        sigmas.truncate(n_steps + 1);
        let steps = &sigmas[..n_steps];
        if self.is_continuous {
            let quarter_log = |sigma: &f32| 0.25 * f64::from(*sigma).ln() as f32;
            timesteps = steps.iter().map(quarter_log).collect();
        }
        let input_scale = |sigma: &f32| (1.0 / (f64::from(*sigma).powi(2) + 1.0).sqrt()) as f32;
        let input_scales = steps.iter().map(input_scale).collect();
        let coefficients = sigmas
            .windows(2)
            .map(|pair| {
                let [c0, c1] = self.factors(pair[0], pair[1]);
                [c0 as f32, c1 as f32, 0.0]
            })
            .collect();
        let init_noise_scale = match self.is_unit_variance {
            true => (most * most + 1.0).sqrt(),
            false => most,
        };
        let mut levels: Vec<[f32; 2]> = sigmas.iter().map(|sigma| [1.0, *sigma]).collect();
        if let Some(last) = levels.last_mut() {
            *last = [1.0, 0.0];
        }
        let schedule = self.discrete.checked(Schedule::plain(
            timesteps,
            input_scales,
            sigmas,
            coefficients,
            init_noise_scale,
            &levels,
        ))?;
        Ok(schedule.without_first(ask.n_skipped()))
    }
}
