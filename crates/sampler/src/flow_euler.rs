//! Euler steps along a rectified flow, as diffusers' `FlowMatchEulerDiscreteScheduler` with a static shift.
//!
//! The schedule is computed in float64 from ends that were rounded to float32, then rounded to float32: the same order of
//! operations as diffusers 0.42, whose numbers the tests hold.

use crate::{Ask, Sampler, SamplerError, Schedule, spacing::linspace};

const CLASS: &str = "FlowMatchEulerDiscreteScheduler";

/// The keys of a `scheduler_config.json` of that class that have an effect without dynamic shifting, and their defaults in diffusers.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowEulerConfig {
    /// Timesteps run from this number down.
    pub num_train_timesteps: u32,
    /// Static shift of the sigmas: `s sigma / (1 + (s - 1) sigma)`.
    pub shift: f64,
    /// Shift by picture size instead; not supported.
    pub use_dynamic_shifting: bool,
    /// Sigmas counted from the other end; not supported.
    pub invert_sigmas: bool,
    /// Stretches the schedule to end at this sigma; not supported (`None` and 0 mean no stretching, as in diffusers).
    pub shift_terminal: Option<f64>,
    /// Karras' spacing; not supported.
    pub use_karras_sigmas: bool,
    /// Exponential spacing; not supported.
    pub use_exponential_sigmas: bool,
    /// Spacing by a beta distribution; not supported.
    pub use_beta_sigmas: bool,
    /// Fresh noise in every step; not supported.
    pub stochastic_sampling: bool,
}

impl Default for FlowEulerConfig {
    fn default() -> Self {
        Self {
            num_train_timesteps: 1000,
            shift: 1.0,
            use_dynamic_shifting: false,
            invert_sigmas: false,
            shift_terminal: None,
            use_karras_sigmas: false,
            use_exponential_sigmas: false,
            use_beta_sigmas: false,
            stochastic_sampling: false,
        }
    }
}

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowEuler {
    n_train_timesteps: u32,
    shift: f64,
}

impl FlowEuler {
    /// Name on the command line.
    pub const NAME: &str = "flow-euler";

    /// Takes the settings of a checkpoint.
    ///
    /// # Errors
    /// [`SamplerError::Unsupported`] for a setting that would change the result and is not implemented,
    /// [`SamplerError::Invalid`] for a shift or a number of timesteps that makes no schedule.
    pub fn new(config: &FlowEulerConfig) -> Result<Self, SamplerError> {
        let flags = [
            ("use_dynamic_shifting", config.use_dynamic_shifting),
            ("use_karras_sigmas", config.use_karras_sigmas),
            ("use_exponential_sigmas", config.use_exponential_sigmas),
            ("use_beta_sigmas", config.use_beta_sigmas),
            ("invert_sigmas", config.invert_sigmas),
            ("stochastic_sampling", config.stochastic_sampling),
        ];
        let refuse = |key, value, expected| SamplerError::Unsupported {
            sampler: CLASS,
            key,
            value,
            expected,
        };
        if let Some((key, _)) = flags.into_iter().find(|(_, is_set)| *is_set) {
            return Err(refuse(key, "true".into(), "false"));
        }
        if let Some(value) = config.shift_terminal.filter(|value| *value != 0.0) {
            return Err(refuse("shift_terminal", value.to_string(), "null"));
        }
        let invalid = |key, value, expected| SamplerError::Invalid {
            sampler: CLASS,
            key,
            value,
            expected,
        };
        if !(config.shift.is_finite() && config.shift > 0.0) {
            return Err(invalid("shift", config.shift.to_string(), "a positive number"));
        }
        if config.num_train_timesteps == 0 {
            return Err(invalid(
                "num_train_timesteps",
                "0".into(),
                "a positive whole number",
            ));
        }
        Ok(Self {
            n_train_timesteps: config.num_train_timesteps,
            shift: config.shift,
        })
    }

    /// A train-time sigma after shifting, in float32 throughout as torch computes it.
    fn train_sigma(&self, timestep: u32) -> f64 {
        let sigma = timestep as f32 / self.n_train_timesteps as f32;
        f64::from((self.shift as f32 * sigma) / (1.0 + (self.shift - 1.0) as f32 * sigma))
    }
}

impl Sampler for FlowEuler {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        let n_steps = ask.n_steps;
        if n_steps == 0 {
            return Err(SamplerError::StepCount {
                sampler: Self::NAME,
                n_steps,
                expected: "at least 1".to_owned(),
            });
        }
        let n_train = f64::from(self.n_train_timesteps);
        let first = self.train_sigma(self.n_train_timesteps) * n_train;
        let last = self.train_sigma(1) * n_train;
        let mut sigmas: Vec<f32> = linspace(first, last, n_steps)
            .into_iter()
            .map(|timestep| {
                let sigma = timestep / n_train;
                (self.shift * sigma / (1.0 + (self.shift - 1.0) * sigma)) as f32
            })
            .collect();
        let timesteps = sigmas
            .iter()
            .map(|sigma| sigma * self.n_train_timesteps as f32)
            .collect();
        let input_scales = vec![1.0; n_steps];
        sigmas.push(0.0);
        let factors = sigmas
            .windows(2)
            .map(|pair| [1.0, pair[1] - pair[0], 0.0])
            .collect();
        let levels: Vec<[f32; 2]> = sigmas.iter().map(|sigma| [1.0 - sigma, *sigma]).collect();
        let schedule = Schedule::plain(timesteps, input_scales, sigmas, factors, 1.0, &levels);
        Ok(schedule.without_first(ask.n_skipped()))
    }
}
