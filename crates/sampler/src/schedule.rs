//! What a sampler yields for a number of steps.
//!
//! A sampler is a linear program over its state. Slot 0 of the state holds the latents, the slots behind it what the sampler keeps from
//! one evaluation to the next (earlier predictions, say); those are zero at the start. Each evaluation gives the denoiser
//! `input_scale * slot 0` and makes every slot anew from the old ones, the guided prediction and fresh noise ([`Update`]).

use crate::SamplerError;

/// What a schedule depends on beside a sampler's settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ask<'a> {
    /// Steps; a step may take more than one evaluation.
    pub n_steps: usize,
    /// Noise levels of the steps in place of the sampler's own and of `n_steps`, falling. Flows shift them as their own; Euler's are noise
    /// per signal, with where sampling ends behind those of the steps. The other samplers take none.
    pub sigmas: Option<&'a [f32]>,
    /// Tokens of the picture, which some schedules depend on.
    pub n_tokens: usize,
    /// For pictures made from a picture: the share of the steps that is done, counted from the end, 0 to 1.
    pub strength: Option<f32>,
}

impl Ask<'_> {
    /// For `n_steps` steps from noise.
    pub fn steps(n_steps: usize) -> Self {
        Self {
            n_steps,
            sigmas: None,
            n_tokens: 0,
            strength: None,
        }
    }

    /// Steps left out at the beginning: `n - int(n strength)` in pipelines of discrete timesteps, `int(n - n strength)` in those of flows,
    /// as diffusers counts them.
    ///
    /// # Errors
    /// [`SamplerError::Strength`] if it is not 0 to 1 or no step is left.
    pub(crate) fn n_skipped(&self, is_flow: bool) -> Result<usize, SamplerError> {
        let (Some(strength), n_steps) = (self.strength, self.n_steps) else {
            return Ok(0);
        };
        let refused = |expected: String| SamplerError::Strength {
            strength,
            n_steps,
            expected,
        };
        if !(0.0..=1.0).contains(&strength) {
            return Err(refused("0 to 1".to_owned()));
        }
        // The number that was written, not its nearest float32: 0.7 of 10 steps are 7.
        let written: f64 = strength.to_string().parse().unwrap_or(f64::from(strength));
        let n_done = (n_steps as f64 * written).min(n_steps as f64);
        let n_skipped = match is_flow {
            false => n_steps - n_done as usize,
            true => (n_steps as f64 - n_done) as usize,
        };
        if n_skipped >= n_steps {
            let least = (1000.0 / n_steps.max(1) as f64).ceil() / 1000.0;
            return Err(refused(format!("at least {least}")));
        }
        Ok(n_skipped)
    }
}

/// A sampler with its settings.
pub trait Sampler: std::fmt::Debug {
    /// Name on the command line, e.g. `flow-euler`.
    fn name(&self) -> &'static str;

    /// The schedule that is asked for.
    ///
    /// # Errors
    /// [`SamplerError::StepCount`], [`SamplerError::Sigmas`] or [`SamplerError::Strength`] for an ask that makes no schedule with these
    /// settings: a mistake of the request and not of the checkpoint.
    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError>;
}

/// New slot `i` of the state is `sum_j rows[i][j] * (old slot j)`, `j` up to the number of kept slots, plus the last two factors times the
/// guided prediction and fresh unit normal noise.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// One row per slot, as long as there are slots and two more.
    pub rows: Vec<Vec<f32>>,
}

/// Timesteps and updates of every evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// What the denoiser is told, one per evaluation.
    pub timesteps: Vec<f32>,
    /// Factor of the latents that the denoiser sees, one per evaluation.
    pub input_scales: Vec<f32>,
    /// Noise levels; one more than timesteps, the last is where sampling ends.
    pub sigmas: Vec<f32>,
    /// One per evaluation.
    pub updates: Vec<Update>,
    /// Slots of the state beside the latents.
    pub n_kept: usize,
    /// Factor of the unit normal noise that makes the initial latents.
    pub init_noise_scale: f32,
    /// Factors of a picture's latents and of unit normal noise that make the initial latents of a picture made from a picture.
    pub start: [f32; 2],
    /// The same factors for the noise level that each evaluation leaves; `[1, 0]` at the end.
    pub renoise: Vec<[f32; 2]>,
}

impl Schedule {
    /// Denoiser evaluations.
    pub fn n_steps(&self) -> usize {
        self.timesteps.len()
    }
}
