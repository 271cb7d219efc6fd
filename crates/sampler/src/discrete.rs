//! The noise schedule that a denoiser of discrete timesteps was trained with: betas, what is left of the signal, and the timesteps of
//! a number of steps. Knows nothing of solvers.
//!
//! R1. Values are rounded to float32 where torch rounds them; sums and products that torch accumulates in float64 are in float64. What
//!     is left to differ is torch's square root of arrays, which is off by one unit in the last place for one value in six.
//! R2. Where diffusers 0.42 makes one timestep too many (`trailing`, 62 of the step counts up to 1000, by rounding in
//!     `numpy.arange`), the stray last one, -1, is not made.

use crate::{
    SamplerError,
    config::{BetaSchedule, PredictionType, SamplerConfig, Solver, TimestepSpacing},
    linear::Form,
    spacing::{linspace, torch_linspace},
};
use std::f64::consts::FRAC_PI_2;

/// Most training timesteps; more is taken for a mistake.
const MAX_TRAIN_TIMESTEPS: u32 = 100_000;
/// Largest beta of the cosine schedule.
const MAX_COSINE_BETA: f64 = 0.999;
/// What is left of the signal at the last timestep of a schedule rescaled to leave nothing, in solvers that divide by it: a float16 can
/// still hold it.
const LEAST_ALPHA: f32 = 1.0 / 16_777_216.0;

/// What a class takes for keys that the file does not hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    pub(crate) betas: (f64, f64, BetaSchedule),
    pub(crate) spacing: TimestepSpacing,
}

/// `beta_start`, `beta_end` and `beta_schedule` of most classes.
pub(crate) const LINEAR_BETAS: (f64, f64, BetaSchedule) = (0.0001, 0.02, BetaSchedule::Linear);
/// Those of classes for models distilled from Stable Diffusion.
pub(crate) const SCALED_BETAS: (f64, f64, BetaSchedule) = (0.00085, 0.012, BetaSchedule::ScaledLinear);

/// The schedule of the training.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Discrete {
    /// How much of the signal's variance is left, per training timestep: at least one value, each in `0..=1`.
    pub(crate) alphas_cumprod: Vec<f32>,
    pub(crate) prediction_type: PredictionType,
    pub(crate) spacing: TimestepSpacing,
    steps_offset: u32,
    solver: Solver,
}

impl Discrete {
    pub(crate) fn new(
        config: &SamplerConfig,
        solver: Solver,
        defaults: Defaults,
    ) -> Result<Self, SamplerError> {
        let mut betas = betas(config, solver, defaults.betas)?;
        let is_rescaled = config.rescale_betas_zero_snr.unwrap_or(false);
        if is_rescaled {
            betas = rescale_to_zero_snr(&betas);
        }
        let spacing = config.timestep_spacing.unwrap_or(defaults.spacing);
        let steps_offset = config.steps_offset.unwrap_or(0);
        if spacing == TimestepSpacing::Leading && steps_offset as usize >= betas.len() {
            let expected = "less than num_train_timesteps";
            return Err(solver.invalid("steps_offset", steps_offset, expected));
        }
        let alphas_cumprod = cumulative_product(&betas);
        if !alphas_cumprod.iter().all(|alpha| (0.0..=1.0).contains(alpha)) {
            // Nothing else can: the betas were checked.
            let expected = "false with these betas";
            return Err(solver.invalid("rescale_betas_zero_snr", is_rescaled, expected));
        }
        Ok(Self {
            alphas_cumprod,
            prediction_type: config.prediction_type.unwrap_or(PredictionType::Epsilon),
            spacing,
            steps_offset,
            solver,
        })
    }

    /// As [`Discrete::new`], for solvers that need some signal at every timestep: what rescaling leaves nothing of keeps 2^-24.
    pub(crate) fn with_signal(
        config: &SamplerConfig,
        solver: Solver,
        defaults: Defaults,
    ) -> Result<Self, SamplerError> {
        let mut discrete = Self::new(config, solver, defaults)?;
        let is_rescaled = config.rescale_betas_zero_snr.unwrap_or(false);
        if let (true, Some(last)) = (is_rescaled, discrete.alphas_cumprod.last_mut()) {
            *last = LEAST_ALPHA;
        }
        let sigma = |alpha: &f32| ((1.0 - alpha) / alpha).sqrt();
        if !discrete.alphas_cumprod.iter().map(sigma).all(f32::is_finite) {
            let (key, value) = match &config.trained_betas {
                Some(betas) => ("trained_betas", format!("{} numbers", betas.len())),
                None => (
                    "beta_end",
                    config.beta_end.unwrap_or(defaults.betas.1).to_string(),
                ),
            };
            let expected = "betas that leave some signal at every timestep";
            return Err(solver.invalid(key, value, expected));
        }
        Ok(discrete)
    }

    /// Training timesteps.
    pub(crate) fn n_train(&self) -> usize {
        self.alphas_cumprod.len()
    }

    fn check_steps(&self, n_steps: usize) -> Result<(), SamplerError> {
        let n_train = self.n_train();
        if (1..=n_train).contains(&n_steps) {
            return Ok(());
        }
        Err(self.solver.step_count(n_steps, format!("1 to {n_train}")))
    }

    /// The timesteps of `n_steps` steps, falling; those of `linspace` are no whole numbers.
    pub(crate) fn timesteps(&self, n_steps: usize) -> Result<Vec<f64>, SamplerError> {
        self.check_steps(n_steps)?;
        let n_train = self.n_train();
        Ok(match self.spacing {
            TimestepSpacing::Leading => {
                let stride = n_train / n_steps;
                let timestep = |i| (i * stride) as f64 + f64::from(self.steps_offset);
                (0..n_steps).rev().map(timestep).collect()
            }
            TimestepSpacing::Linspace => {
                let mut rising = linspace(0.0, (n_train - 1) as f64, n_steps);
                rising.reverse();
                rising
            }
            TimestepSpacing::Trailing => self.trailing(n_steps, n_train),
        })
    }

    /// As [`Discrete::timesteps`], whole and within the training's.
    pub(crate) fn whole_timesteps(&self, n_steps: usize) -> Result<Vec<usize>, SamplerError> {
        let whole = self.timesteps(n_steps)?.into_iter();
        self.within(n_steps, whole.map(|t| t.round_ties_even() as usize).collect())
    }

    /// Those of the multistep solvers, which leave out the last one, timestep 0 mostly, of one step more. `n_used` is the number of
    /// training timesteps that have a part in it.
    pub(crate) fn multistep_timesteps(
        &self,
        n_steps: usize,
        n_used: usize,
    ) -> Result<Vec<usize>, SamplerError> {
        self.check_steps(n_steps)?;
        let timesteps: Vec<usize> = match self.spacing {
            TimestepSpacing::Linspace => {
                let rising = linspace(0.0, n_used.saturating_sub(1) as f64, n_steps + 1);
                let falling = rising.into_iter().rev().take(n_steps);
                falling.map(|t| t.round_ties_even() as usize).collect()
            }
            TimestepSpacing::Leading => {
                let stride = n_used / (n_steps + 1);
                let timestep = |i| i * stride + self.steps_offset as usize;
                (1..=n_steps).rev().map(timestep).collect()
            }
            TimestepSpacing::Trailing => {
                let all = self.trailing(n_steps, n_used).into_iter();
                all.filter(|t| *t >= 0.0).map(|t| t as usize).collect()
            }
        };
        self.within(n_steps, timesteps)
    }

    /// As `numpy.arange` counts down from `n_used`: the stride is the difference of the first two values.
    fn trailing(&self, n_steps: usize, n_used: usize) -> Vec<f64> {
        let last = n_used as f64;
        let step = self.n_train() as f64 / n_steps as f64;
        let stride = (last - step) - last;
        let n = ((last / step).ceil() as usize).min(n_steps);
        let timestep = |i| (last + i as f64 * stride).round_ties_even() - 1.0;
        (0..n).map(timestep).collect()
    }

    fn within(&self, n_steps: usize, timesteps: Vec<usize>) -> Result<Vec<usize>, SamplerError> {
        let n_train = self.n_train();
        match timesteps.first() {
            Some(first) if *first < n_train => Ok(timesteps),
            first => {
                let first = first.copied().unwrap_or_default();
                Err(self.solver.step_count(
                    n_steps,
                    format!("a number whose first timestep, {first}, is below {n_train}"),
                ))
            }
        }
    }

    /// The picture that a prediction at a timestep implies.
    pub(crate) fn picture(&self, timestep: usize, latents: &Form, prediction: &Form) -> Form {
        let [signal, noise] = self.level(timestep).map(f64::from);
        match self.prediction_type {
            PredictionType::Sample => prediction.clone(),
            PredictionType::VPrediction => signal * latents - noise * prediction,
            // Those who ask refuse flows.
            PredictionType::Epsilon | PredictionType::Flow => {
                (1.0 / signal) * latents - (noise / signal) * prediction
            }
        }
    }

    /// The noise that it implies.
    pub(crate) fn noise(&self, timestep: usize, latents: &Form, prediction: &Form) -> Form {
        let [signal, noise] = self.level(timestep).map(f64::from);
        match self.prediction_type {
            PredictionType::Sample => (1.0 / noise) * latents - (signal / noise) * prediction,
            PredictionType::VPrediction => signal * prediction + noise * latents,
            PredictionType::Epsilon | PredictionType::Flow => prediction.clone(),
        }
    }

    /// Roots of how much is left of the signal and of what noise has taken: factors of a picture and of noise at a timestep.
    pub(crate) fn level(&self, timestep: usize) -> [f32; 2] {
        roots(self.alphas_cumprod[timestep])
    }
}

/// Factors of a picture and of noise where `alpha` is left of the signal's variance.
pub(crate) fn roots(alpha: f32) -> [f32; 2] {
    [alpha.sqrt(), (1.0 - alpha).sqrt()]
}

fn betas(
    config: &SamplerConfig,
    solver: Solver,
    defaults: (f64, f64, BetaSchedule),
) -> Result<Vec<f32>, SamplerError> {
    let n_train = config.num_train_timesteps.unwrap_or(1000);
    if !(1..=MAX_TRAIN_TIMESTEPS).contains(&n_train) {
        let expected = "a whole number of 1 to 100000";
        return Err(solver.invalid("num_train_timesteps", n_train, expected));
    }
    let n_train = n_train as usize;
    let is_beta = |beta: &f64| (0.0..=1.0).contains(beta);
    if let Some(trained) = &config.trained_betas {
        if trained.len() != n_train {
            let expected = "as many as num_train_timesteps";
            let value = format!("{} numbers", trained.len());
            return Err(solver.invalid("trained_betas", value, expected));
        }
        if let Some(beta) = trained.iter().find(|beta| !is_beta(beta)) {
            return Err(solver.invalid("trained_betas", beta, "numbers of 0 to 1"));
        }
        return Ok(trained.iter().map(|beta| *beta as f32).collect());
    }
    let schedule = config.beta_schedule.unwrap_or(defaults.2);
    if schedule == BetaSchedule::SquaredCosine {
        return Ok(cosine_betas(n_train));
    }
    let ends = [
        config.beta_start.unwrap_or(defaults.0),
        config.beta_end.unwrap_or(defaults.1),
    ];
    for (key, beta) in ["beta_start", "beta_end"].into_iter().zip(ends) {
        if !is_beta(&beta) {
            return Err(solver.invalid(key, beta, "a number of 0 to 1"));
        }
    }
    Ok(match schedule {
        BetaSchedule::ScaledLinear => {
            let [first, last] = ends.map(|beta| beta.sqrt() as f32);
            let roots = torch_linspace(first, last, n_train);
            roots.into_iter().map(|root| root * root).collect()
        }
        BetaSchedule::Linear | BetaSchedule::SquaredCosine => {
            torch_linspace(ends[0] as f32, ends[1] as f32, n_train)
        }
    })
}

/// Betas of which `cos^2` is left of the signal.
fn cosine_betas(n_train: usize) -> Vec<f32> {
    let left = |timestep: usize| {
        let t = timestep as f64 / n_train as f64;
        ((t + 0.008) / 1.008 * FRAC_PI_2).cos().powi(2)
    };
    let beta = |timestep| (1.0 - left(timestep + 1) / left(timestep)).min(MAX_COSINE_BETA);
    (0..n_train).map(|timestep| beta(timestep) as f32).collect()
}

/// Algorithm 1 of "Common Diffusion Noise Schedules and Sample Steps are Flawed" (Lin et al., 2023), in float32 throughout.
fn rescale_to_zero_snr(betas: &[f32]) -> Vec<f32> {
    let roots: Vec<f32> = cumulative_product(betas).into_iter().map(f32::sqrt).collect();
    let (first, last) = (roots[0], roots[roots.len() - 1]);
    let scale = first / (first - last);
    let rescaled = roots.into_iter().map(|root| {
        let root = (root - last) * scale;
        root * root
    });
    let mut previous = 1.0;
    rescaled
        .map(|left| {
            let beta = 1.0 - left / previous;
            previous = left;
            beta
        })
        .collect()
}

/// The running product of `1 - beta`; torch accumulates in float64.
fn cumulative_product(betas: &[f32]) -> Vec<f32> {
    let mut product = 1.0;
    let mut next = |beta: &f32| {
        product *= f64::from(1.0 - beta);
        product as f32
    };
    betas.iter().map(&mut next).collect()
}
