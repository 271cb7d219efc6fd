//! The noise schedule that a denoiser of discrete timesteps was trained with: betas, what is left of the signal, and the timesteps of
//! a number of steps. Knows nothing of solvers.
//!
//! R1. One configuration serves every solver, as `from_config` of diffusers allows: betas and timesteps belong to the training, and a
//!     solver reads what concerns it. A key that the file does not hold has the default of the solver that reads it, not of the class
//!     that the file names.
//! R2. Values are rounded to float32 where torch rounds them; sums and products that torch accumulates in float64 are in float64. What
//!     is left to differ is torch's square root of arrays, which is off by one unit in the last place for one value in six.
//! R3. Where diffusers 0.42 makes one timestep too many (`trailing`, 62 of the step counts up to 1000, by rounding in
//!     `numpy.arange`), the stray last one, -1, is not made.

use crate::{
    SamplerError, Schedule, Update,
    spacing::{linspace, torch_linspace},
};
use std::f64::consts::FRAC_PI_2;

/// Most training timesteps; more is taken for a mistake.
const MAX_TRAIN_TIMESTEPS: u32 = 100_000;
/// Largest beta of the cosine schedule.
const MAX_COSINE_BETA: f64 = 0.999;
/// Who refuses a name before a solver is chosen.
const CLASSES: &str = "DDIMScheduler or EulerDiscreteScheduler";

/// An enum whose values have names in a `scheduler_config.json`.
macro_rules! named {
    ($(#[$doc:meta])* $name:ident, $key:literal, $expected:literal, $($(#[$value_doc:meta])* $value:ident = $text:literal,)+) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$value_doc])* $value,)+
        }

        impl $name {
            #[doc = concat!("Reads the value of the key `", $key, "`.")]
            ///
            /// # Errors
            /// [`SamplerError::Unsupported`] for any other text.
            pub fn from_name(name: &str) -> Result<Self, SamplerError> {
                match name {
                    $($text => Ok(Self::$value),)+
                    _ => Err(SamplerError::Unsupported {
                        sampler: CLASSES,
                        key: $key,
                        value: name.to_owned(),
                        expected: $expected,
                    }),
                }
            }

            /// The value as a `scheduler_config.json` names it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $text,)+
                }
            }
        }
    };
}

named! {
    /// How betas run from `beta_start` to `beta_end`.
    BetaSchedule, "beta_schedule", "linear, scaled_linear or squaredcos_cap_v2",
    /// Evenly.
    Linear = "linear",
    /// Their square roots evenly.
    ScaledLinear = "scaled_linear",
    /// As a squared cosine of what is left of the signal demands; both ends are ignored.
    SquaredCosine = "squaredcos_cap_v2",
}

named! {
    /// What the denoiser predicts.
    PredictionType, "prediction_type", "epsilon, v_prediction or sample",
    /// The noise.
    Epsilon = "epsilon",
    /// The velocity: `signal_scale noise - noise_scale picture`.
    VPrediction = "v_prediction",
    /// The picture.
    Sample = "sample",
}

named! {
    /// Which of the training timesteps the steps visit.
    TimestepSpacing, "timestep_spacing", "leading, linspace or trailing",
    /// Multiples of a whole number, plus `steps_offset`: the noisiest timestep is left out.
    Leading = "leading",
    /// From the last to the first, both included.
    Linspace = "linspace",
    /// From the last down in equal strides: the first timestep is left out.
    Trailing = "trailing",
}

named! {
    /// How Euler finds a sigma between two training timesteps.
    InterpolationType, "interpolation_type", "linear or log_linear",
    /// On the line between the two neighbours.
    Linear = "linear",
    /// Not at all: logarithms of the sigmas run evenly, whatever the timesteps.
    LogLinear = "log_linear",
}

named! {
    /// What an Euler step tells a denoiser that predicts velocities.
    TimestepType, "timestep_type", "discrete or continuous",
    /// The timestep.
    Discrete = "discrete",
    /// A quarter of the logarithm of sigma.
    Continuous = "continuous",
}

named! {
    /// Where Euler ends.
    FinalSigmas, "final_sigmas_type", "zero or sigma_min",
    /// Without noise.
    Zero = "zero",
    /// With the noise of the first training timestep.
    SigmaMin = "sigma_min",
}

/// The keys of a `scheduler_config.json` of a denoiser with discrete timesteps (`DDIMScheduler`, `EulerDiscreteScheduler`,
/// `PNDMScheduler` and relatives) that [`Ddim`](crate::Ddim) or [`Euler`](crate::Euler) reads; any other key of these classes has no
/// effect on either.
///
/// [`Default`] holds what diffusers takes for keys that the file does not hold.
#[derive(Clone, Debug, PartialEq)]
pub struct DiscreteConfig {
    /// Timesteps of the training, 1 to 100 000.
    pub num_train_timesteps: u32,
    /// First beta, 0 to 1.
    pub beta_start: f64,
    /// Last beta, 0 to 1.
    pub beta_end: f64,
    /// How betas run between the two.
    pub beta_schedule: BetaSchedule,
    /// The betas themselves, one per training timestep, in place of the three above.
    pub trained_betas: Option<Vec<f64>>,
    /// Stretches the schedule so that nothing of the signal is left at the last timestep. Euler keeps 2^-24 of it there.
    pub rescale_betas_zero_snr: bool,
    /// What the denoiser predicts.
    pub prediction_type: PredictionType,
    /// Which timesteps are visited; `None` is `leading` for DDIM and `linspace` for Euler.
    pub timestep_spacing: Option<TimestepSpacing>,
    /// Added to the timesteps of `leading`. diffusers' `StableDiffusionPipeline` puts 1 in place of any other value that a checkpoint
    /// has.
    pub steps_offset: u32,

    /// DDIM only: the last step ends without noise, not with the noise of the first training timestep.
    pub set_alpha_to_one: bool,
    /// DDIM only: clips the predicted picture; not supported. diffusers' `StableDiffusionPipeline` puts `false` in place of `true`.
    pub clip_sample: bool,
    /// DDIM only: clips the predicted picture by its distribution; not supported.
    pub thresholding: bool,

    /// Euler only: how sigmas are found.
    pub interpolation_type: InterpolationType,
    /// Euler only: Karras' spacing of the sigmas, from `sigma_max` to `sigma_min`.
    pub use_karras_sigmas: bool,
    /// Euler only: even spacing of the logarithms of the sigmas, from `sigma_max` to `sigma_min`.
    pub use_exponential_sigmas: bool,
    /// Euler only: spacing of the sigmas by a beta distribution; not supported.
    pub use_beta_sigmas: bool,
    /// Euler only: last sigma of the two spacings above; `None` is the last one of the timesteps.
    pub sigma_min: Option<f64>,
    /// Euler only: first sigma of the two spacings above; `None` is the first one of the timesteps.
    pub sigma_max: Option<f64>,
    /// Euler only: what the denoiser is told.
    pub timestep_type: TimestepType,
    /// Euler only: where sampling ends.
    pub final_sigmas_type: FinalSigmas,
}

impl Default for DiscreteConfig {
    fn default() -> Self {
        Self {
            num_train_timesteps: 1000,
            beta_start: 0.0001,
            beta_end: 0.02,
            beta_schedule: BetaSchedule::Linear,
            trained_betas: None,
            rescale_betas_zero_snr: false,
            prediction_type: PredictionType::Epsilon,
            timestep_spacing: None,
            steps_offset: 0,
            set_alpha_to_one: true,
            clip_sample: true,
            thresholding: false,
            interpolation_type: InterpolationType::Linear,
            use_karras_sigmas: false,
            use_exponential_sigmas: false,
            use_beta_sigmas: false,
            sigma_min: None,
            sigma_max: None,
            timestep_type: TimestepType::Discrete,
            final_sigmas_type: FinalSigmas::Zero,
        }
    }
}

/// A solver as its errors name it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Solver {
    /// Class in diffusers.
    pub(crate) class: &'static str,
    /// Name on the command line.
    pub(crate) name: &'static str,
}

impl Solver {
    pub(crate) fn unsupported(
        self,
        key: &'static str,
        value: impl ToString,
        expected: &'static str,
    ) -> SamplerError {
        SamplerError::Unsupported {
            sampler: self.class,
            key,
            value: value.to_string(),
            expected,
        }
    }

    pub(crate) fn invalid(
        self,
        key: &'static str,
        value: impl ToString,
        expected: &'static str,
    ) -> SamplerError {
        SamplerError::Invalid {
            sampler: self.class,
            key,
            value: value.to_string(),
            expected,
        }
    }

    pub(crate) fn step_count(self, n_steps: usize, expected: String) -> SamplerError {
        SamplerError::StepCount {
            sampler: self.name,
            n_steps,
            expected,
        }
    }
}

/// The schedule of the training.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Discrete {
    /// How much of the signal's variance is left, per training timestep: at least one value, each in `0..=1`.
    pub(crate) alphas_cumprod: Vec<f32>,
    spacing: TimestepSpacing,
    steps_offset: u32,
    solver: Solver,
}

impl Discrete {
    pub(crate) fn new(
        config: &DiscreteConfig,
        solver: Solver,
        spacing: TimestepSpacing,
    ) -> Result<Self, SamplerError> {
        let mut betas = betas(config, solver)?;
        if config.rescale_betas_zero_snr {
            betas = rescale_to_zero_snr(&betas);
        }
        if spacing == TimestepSpacing::Leading && config.steps_offset >= config.num_train_timesteps {
            let expected = "less than num_train_timesteps";
            return Err(solver.invalid("steps_offset", config.steps_offset, expected));
        }
        let alphas_cumprod = cumulative_product(&betas);
        if !alphas_cumprod.iter().all(|alpha| (0.0..=1.0).contains(alpha)) {
            // Nothing else can: the betas were checked.
            let expected = "false with these betas";
            return Err(solver.invalid("rescale_betas_zero_snr", true, expected));
        }
        Ok(Self {
            alphas_cumprod,
            spacing,
            steps_offset: config.steps_offset,
            solver,
        })
    }

    /// Training timesteps.
    pub(crate) fn n_train(&self) -> usize {
        self.alphas_cumprod.len()
    }

    /// The timesteps of `n_steps` steps, falling; those of `linspace` are no whole numbers.
    pub(crate) fn timesteps(&self, n_steps: usize) -> Result<Vec<f64>, SamplerError> {
        let n_train = self.n_train();
        if !(1..=n_train).contains(&n_steps) {
            return Err(self.solver.step_count(n_steps, format!("1 to {n_train}")));
        }
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
            TimestepSpacing::Trailing => {
                // numpy.arange: the stride is the difference of the first two values.
                let last = n_train as f64;
                let stride = (last - last / n_steps as f64) - last;
                let timestep = |i| (last + i as f64 * stride).round_ties_even() - 1.0;
                (0..n_steps).map(timestep).collect()
            }
        })
    }

    /// Refuses a schedule with a timestep or a coefficient that is not finite, naming the first step that has such.
    pub(crate) fn checked(&self, schedule: Schedule) -> Result<Schedule, SamplerError> {
        let mut steps = schedule.timesteps.iter().zip(&schedule.updates);
        let is_finite = |(timestep, update): (&f32, &Update)| {
            timestep.is_finite() && update.rows.iter().flatten().all(|factor| factor.is_finite())
        };
        match steps.position(|step| !is_finite(step)) {
            None => Ok(schedule),
            Some(step_idx) => Err(self.solver.step_count(
                schedule.n_steps(),
                format!(
                    "a number whose step {} has both signal and noise to tell apart",
                    step_idx + 1
                ),
            )),
        }
    }
}

/// The key to blame for betas, and its value.
pub(crate) fn betas_key(config: &DiscreteConfig) -> (&'static str, String) {
    match &config.trained_betas {
        Some(betas) => ("trained_betas", format!("{} numbers", betas.len())),
        None => ("beta_end", config.beta_end.to_string()),
    }
}

fn betas(config: &DiscreteConfig, solver: Solver) -> Result<Vec<f32>, SamplerError> {
    let n_train = config.num_train_timesteps;
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
    if config.beta_schedule == BetaSchedule::SquaredCosine {
        return Ok(cosine_betas(n_train));
    }
    for (key, beta) in [("beta_start", config.beta_start), ("beta_end", config.beta_end)] {
        if !is_beta(&beta) {
            return Err(solver.invalid(key, beta, "a number of 0 to 1"));
        }
    }
    let ends = [config.beta_start, config.beta_end];
    Ok(match config.beta_schedule {
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
