//! What a sampler yields for a number of steps.

/// A sampler with its settings.
pub trait Sampler: std::fmt::Debug {
    /// Name on the command line, e.g. `flow-euler`.
    fn name(&self) -> &'static str;

    /// The schedule for `n_steps` steps, `n_steps >= 1`.
    fn schedule(&self, n_steps: usize) -> Schedule;
}

/// Timesteps and coefficients of every step. A step computes `latents = c0 latents + c1 prediction + c2 noise`.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// What the denoiser is told, one per evaluation.
    pub timesteps: Vec<f32>,
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
