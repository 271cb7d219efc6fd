//! Pseudo numerical methods: predictions of earlier steps extrapolated by a linear multistep formula, as diffusers' `PNDMScheduler`.
//!
//! "Pseudo Numerical Methods for Diffusion Models on Manifolds" (Liu et al., 2022), formulas 9 and 12. With `skip_prk_steps` the first
//! step is one by Heun's method, which takes an evaluation more; without, the first three are Runge-Kutta steps of four evaluations
//! each. Scalars are float32 as in diffusers.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{PredictionType, SamplerConfig, Solver, TimestepSpacing},
    discrete::{Defaults, Discrete, LINEAR_BETAS},
    linear::{Form, Plan, Program},
};

pub(crate) const CLASS: &str = "PNDMScheduler";
const DEFAULTS: Defaults = Defaults {
    betas: LINEAR_BETAS,
    spacing: TimestepSpacing::Leading,
};
/// Earlier predictions that a step uses beside its own.
const N_EARLIER: usize = 3;

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pndm {
    solver: Solver,
    discrete: Discrete,
    final_alpha: f32,
    skips_runge_kutta: bool,
}

impl Pndm {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        // The class does not know this key.
        let config = SamplerConfig {
            rescale_betas_zero_snr: None,
            ..config.clone()
        };
        let discrete = Discrete::new(&config, solver, DEFAULTS)?;
        let prediction_type = discrete.prediction_type;
        if !matches!(
            prediction_type,
            PredictionType::Epsilon | PredictionType::VPrediction
        ) {
            let expected = "epsilon or v_prediction";
            return Err(solver.unsupported("prediction_type", prediction_type.name(), expected));
        }
        let final_alpha = match config.set_alpha_to_one.unwrap_or(false) {
            true => 1.0,
            false => discrete.alphas_cumprod[0],
        };
        Ok(Self {
            solver,
            discrete,
            final_alpha,
            skips_runge_kutta: config.skip_prk_steps.unwrap_or(false),
        })
    }

    /// Timesteps of all evaluations, and how many of them are Runge-Kutta's.
    fn evaluations(&self, n_steps: usize) -> Result<(Vec<usize>, usize), SamplerError> {
        let falling = self.discrete.whole_timesteps(n_steps)?;
        if self.skips_runge_kutta {
            // The second is evaluated twice: Heun's method.
            let mut timesteps = falling[..1].to_vec();
            timesteps.extend(falling.get(1));
            timesteps.extend(&falling[1..]);
            return Ok((timesteps, 0));
        }
        if n_steps <= N_EARLIER {
            return Err(self.solver.step_count(n_steps, "at least 4".to_owned()));
        }
        let half = self.discrete.n_train() / n_steps / 2;
        // Rising, the last four and what is half a step behind each of them but the last.
        let mut rising: Vec<usize> = Vec::new();
        for (idx, timestep) in falling[..=N_EARLIER].iter().rev().enumerate() {
            rising.push(*timestep);
            if idx < N_EARLIER {
                rising.push(timestep + half);
            }
        }
        let twice: Vec<usize> = rising.iter().flat_map(|t| [*t, *t]).collect();
        let mut timesteps: Vec<usize> = twice[1..twice.len() - 1].iter().rev().copied().collect();
        let n_runge_kutta = timesteps.len();
        timesteps.extend(&falling[N_EARLIER..]);
        Ok((timesteps, n_runge_kutta))
    }

    /// Formula 9: from one timestep to another by a noise that is made of predictions.
    fn transfer(
        &self,
        n_steps: usize,
        latents: &Form,
        prediction: &Form,
        from: isize,
        to: isize,
    ) -> Result<Form, SamplerError> {
        let alphas = &self.discrete.alphas_cumprod;
        let at = |timestep: isize| match usize::try_from(timestep) {
            Ok(timestep) => alphas.get(timestep).copied().ok_or_else(|| {
                let expected = format!(
                    "a number whose steps stay below timestep {} ({timestep} is not)",
                    alphas.len()
                );
                self.solver.step_count(n_steps, expected)
            }),
            Err(_) => Ok(self.final_alpha),
        };
        let (alpha, next_alpha) = (at(from)?, at(to)?);
        let (noise, next_noise) = (1.0 - alpha, 1.0 - next_alpha);
        let prediction = match self.discrete.prediction_type {
            PredictionType::VPrediction => alpha.sqrt() * prediction + noise.sqrt() * latents,
            _ => prediction.clone(),
        };
        let divisor = alpha * next_noise.sqrt() + (alpha * noise * next_alpha).sqrt();
        let scale = f64::from(next_alpha - alpha) / f64::from(divisor);
        Ok((next_alpha / alpha).sqrt() * latents - scale * &prediction)
    }
}

impl Sampler for Pndm {
    fn name(&self) -> &'static str {
        self.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        self.solver.no_sigmas(ask.sigmas)?;
        let n_steps = ask.n_steps;
        let (timesteps, n_runge_kutta) = self.evaluations(n_steps)?;
        let first = ask.n_skipped(false)?;
        let stride = (self.discrete.n_train() / n_steps) as isize;
        // Latents at the beginning of a step of several evaluations, the sum of what they predicted, earlier predictions (newest first).
        let mut program = Program::new(2 + N_EARLIER);
        let mut n_earlier = 0;
        for (counter, timestep) in timesteps[first..].iter().map(|t| *t as isize).enumerate() {
            let t = program.terms();
            let mut begin = t.kept[0].clone();
            let mut sum = t.kept[1].clone();
            let mut earlier = t.kept[2..].to_vec();
            let mut is_kept = true;
            let next = if counter < n_runge_kutta {
                let to = match counter % 2 {
                    0 => timestep - stride / 2,
                    _ => timestep,
                };
                let from = timesteps[counter / 4 * 4] as isize;
                is_kept = counter % 4 == 0;
                let prediction = match counter % 4 {
                    0 => {
                        sum = sum + (1.0 / 6.0) * &t.prediction;
                        begin = t.latents.clone();
                        t.prediction.clone()
                    }
                    1 | 2 => {
                        sum = sum + (1.0 / 3.0) * &t.prediction;
                        t.prediction.clone()
                    }
                    _ => {
                        let all = sum + (1.0 / 6.0) * &t.prediction;
                        sum = t.zero.clone();
                        all
                    }
                };
                self.transfer(n_steps, &begin, &prediction, from, to)?
            } else if counter == 0 {
                begin = t.latents.clone();
                self.transfer(n_steps, &t.latents, &t.prediction, timestep, timestep - stride)?
            } else if counter == 1 {
                is_kept = false;
                let mean = 0.5 * &(t.prediction.clone() + earlier[0].clone());
                self.transfer(n_steps, &begin, &mean, timestep + stride, timestep)?
            } else {
                let e: Vec<&Form> = std::iter::once(&t.prediction).chain(&earlier).collect();
                let prediction = match n_earlier {
                    1 => 1.5 * e[0] - 0.5 * e[1],
                    2 => (23.0 / 12.0) * e[0] - (16.0 / 12.0) * e[1] + (5.0 / 12.0) * e[2],
                    _ => {
                        (55.0 / 24.0) * e[0] - (59.0 / 24.0) * e[1] + (37.0 / 24.0) * e[2]
                            - (9.0 / 24.0) * e[3]
                    }
                };
                self.transfer(n_steps, &t.latents, &prediction, timestep, timestep - stride)?
            };
            if is_kept {
                earlier.insert(0, t.prediction.clone());
                earlier.truncate(N_EARLIER);
                n_earlier = (n_earlier + 1).min(N_EARLIER);
            }
            let mut kept = vec![begin, sum];
            kept.extend(earlier);
            program.push(next, kept);
        }
        let plan = Plan::of_timesteps(&self.discrete, &timesteps);
        plan.schedule(self.solver, n_steps, first, program)
    }
}
