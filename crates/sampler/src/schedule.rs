//! What a sampler yields for a number of steps.

use crate::SamplerError;

/// A sampler with its settings.
pub trait Sampler: std::fmt::Debug {
    /// Name on the command line, e.g. `flow-euler`.
    fn name(&self) -> &'static str;

    /// The schedule for `n_steps` steps.
    ///
    /// # Errors
    /// [`SamplerError::StepCount`] for a number of steps that makes no schedule with these settings, a mistake of the request and not
    /// of the checkpoint.
    fn schedule(&self, n_steps: usize) -> Result<Schedule, SamplerError>;
}

/// Timesteps and coefficients of every step. A step gives the denoiser `input_scale latents` and computes
/// `latents = c0 latents + c1 prediction + c2 noise` from the latents as they were before that scaling.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// What the denoiser is told, one per evaluation.
    pub timesteps: Vec<f32>,
    /// Factor of the latents that the denoiser sees, one per evaluation.
    pub input_scales: Vec<f32>,
    /// Noise levels; one more than timesteps, the last is where sampling ends.
    pub sigmas: Vec<f32>,
    /// `[c0, c1, c2]` per evaluation: factors of latents, guided prediction and fresh noise.
    pub coefficients: Vec<[f32; 3]>,
    /// Factor of the unit normal noise that makes the initial latents.
    pub init_noise_scale: f32,
}

impl Schedule {
    /// Denoiser evaluations.
    pub fn n_steps(&self) -> usize {
        self.timesteps.len()
    }
}
