//! DPM-Solver and DPM-Solver++ with earlier predictions, also with fresh noise, as diffusers' `DPMSolverMultistepScheduler`.
//!
//! "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models" (Lu et al., 2022). Scalars are float32 as in
//! diffusers.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{FinalSigmas, PredictionType, SamplerConfig, Solver},
    levels::Level,
    linear::{Form, Program, Terms},
    multistep::{Kind, Multistep},
};

pub(crate) const CLASS: &str = "DPMSolverMultistepScheduler";
/// With fewer steps the last ones are of lower order, if `lower_order_final` says so.
const FEW_STEPS: usize = 15;

/// What is integrated, and whether fresh noise is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Algorithm {
    /// The noise.
    Dpm,
    /// The picture.
    DpmPlusPlus,
    SdeDpm,
    SdeDpmPlusPlus,
}

impl Algorithm {
    pub(crate) fn read(config: &SamplerConfig, solver: Solver) -> Result<Self, SamplerError> {
        match config.algorithm_type.as_deref() {
            None | Some("dpmsolver++" | "deis") => Ok(Self::DpmPlusPlus),
            Some("dpmsolver") => Ok(Self::Dpm),
            Some("sde-dpmsolver++") => Ok(Self::SdeDpmPlusPlus),
            Some("sde-dpmsolver") => Ok(Self::SdeDpm),
            Some(other) => {
                let expected = "dpmsolver, dpmsolver++, sde-dpmsolver or sde-dpmsolver++";
                Err(solver.unsupported("algorithm_type", other, expected))
            }
        }
    }

    pub(crate) fn integrates_noise(self) -> bool {
        matches!(self, Self::Dpm | Self::SdeDpm)
    }
}

/// How the second-order step ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SecondOrder {
    Midpoint,
    Heun,
}

impl SecondOrder {
    pub(crate) fn read(config: &SamplerConfig, solver: Solver) -> Result<Self, SamplerError> {
        match config.solver_type.as_deref() {
            // Names of other classes' types, which diffusers replaces.
            None | Some("midpoint" | "logrho" | "bh1" | "bh2") => Ok(Self::Midpoint),
            Some("heun") => Ok(Self::Heun),
            Some(other) => Err(solver.unsupported("solver_type", other, "midpoint or heun")),
        }
    }
}

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Dpm {
    levels: Multistep,
    algorithm: Algorithm,
    second_order: SecondOrder,
    order: usize,
    is_lower_order_final: bool,
    is_euler_at_final: bool,
}

impl Dpm {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        let algorithm = Algorithm::read(config, solver)?;
        let second_order = SecondOrder::read(config, solver)?;
        let order = config.solver_order.unwrap_or(2);
        let most = if algorithm == Algorithm::SdeDpm { 2 } else { 3 };
        if !(1..=most).contains(&order) {
            let expected = match most {
                2 => "1 or 2 with sde-dpmsolver",
                _ => "1, 2 or 3",
            };
            return Err(solver.unsupported("solver_order", order, expected));
        }
        let levels = Multistep::new(Kind::Dpm, solver, config)?;
        if algorithm.integrates_noise() {
            if levels.final_sigmas == FinalSigmas::Zero {
                let expected = "sigma_min with dpmsolver and sde-dpmsolver";
                return Err(solver.unsupported("final_sigmas_type", "zero", expected));
            }
            if levels.prediction_type() == PredictionType::Flow {
                let expected = "epsilon, v_prediction or sample with dpmsolver and sde-dpmsolver";
                return Err(solver.unsupported("prediction_type", "flow_prediction", expected));
            }
        }
        if let Some(variance) = config
            .variance_type
            .as_deref()
            .filter(|v| v.starts_with("learned"))
        {
            return Err(solver.unsupported("variance_type", variance, "null"));
        }
        Ok(Self {
            levels,
            algorithm,
            second_order,
            order: order as usize,
            is_lower_order_final: config.lower_order_final.unwrap_or(true),
            is_euler_at_final: config.euler_at_final.unwrap_or(false),
        })
    }

    /// Order of step `idx` of `n`, of which `n_before` were done.
    fn order_of(&self, idx: usize, n: usize, n_before: usize) -> usize {
        let is_few = self.is_lower_order_final && n < FEW_STEPS;
        let is_final_first =
            self.is_euler_at_final || is_few || self.levels.final_sigmas == FinalSigmas::Zero;
        if self.order == 1 || n_before < 1 || (idx + 1 == n && is_final_first) {
            1
        } else if self.order == 2 || n_before < 2 || (idx + 2 == n && is_few) {
            2
        } else {
            3
        }
    }
}

/// What the exponential integrator makes of a step's terms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Factors {
    pub(crate) latents: f32,
    /// Of the prediction and of its first two derivatives.
    pub(crate) prediction: [f32; 3],
    pub(crate) noise: f32,
}

/// Factors in a step of `order` from one level to another.
pub(crate) fn factors(
    algorithm: Algorithm,
    second_order: SecondOrder,
    order: usize,
    to: Level,
    now: Level,
) -> Factors {
    let h = to.lambda - now.lambda;
    let is_midpoint = order == 2 && second_order == SecondOrder::Midpoint;
    match algorithm {
        Algorithm::DpmPlusPlus => {
            let decay = (-h).exp() - 1.0;
            let first = match is_midpoint {
                true => -0.5 * (to.alpha * decay),
                false => to.alpha * (decay / h + 1.0),
            };
            let second = -(to.alpha * ((decay + h) / (h * h) - 0.5));
            Factors {
                latents: to.sigma / now.sigma,
                prediction: [-(to.alpha * decay), first, second],
                noise: 0.0,
            }
        }
        Algorithm::Dpm => {
            let growth = h.exp() - 1.0;
            let first = match is_midpoint {
                true => -0.5 * (to.sigma * growth),
                false => -(to.sigma * (growth / h - 1.0)),
            };
            let second = -(to.sigma * ((growth - h) / (h * h) - 0.5));
            Factors {
                latents: to.alpha / now.alpha,
                prediction: [-(to.sigma * growth), first, second],
                noise: 0.0,
            }
        }
        Algorithm::SdeDpmPlusPlus => {
            let decay = 1.0 - (-2.0 * h).exp();
            let first = match is_midpoint {
                true => 0.5 * (to.alpha * decay),
                false => to.alpha * (decay / (-2.0 * h) + 1.0),
            };
            let second = to.alpha * ((decay - 2.0 * h) / ((2.0 * h) * (2.0 * h)) - 0.5);
            Factors {
                latents: to.sigma / now.sigma * (-h).exp(),
                prediction: [to.alpha * decay, first, second],
                noise: to.sigma * decay.sqrt(),
            }
        }
        Algorithm::SdeDpm => {
            let growth = h.exp() - 1.0;
            let first = match second_order {
                SecondOrder::Midpoint => -(to.sigma * growth),
                SecondOrder::Heun => -2.0 * (to.sigma * (growth / h - 1.0)),
            };
            Factors {
                latents: to.alpha / now.alpha,
                prediction: [-2.0 * (to.sigma * growth), first, 0.0],
                noise: to.sigma * ((2.0 * h).exp() - 1.0).sqrt(),
            }
        }
    }
}

/// One step from the levels and predictions `m` (newest first) to `to`; `from` are the levels of the predictions.
fn step(
    algorithm: Algorithm,
    second_order: SecondOrder,
    terms: &Terms,
    to: Level,
    from: &[Level],
    m: &[&Form],
) -> Form {
    let now = from[0];
    let h = to.lambda - now.lambda;
    let factors = factors(algorithm, second_order, from.len(), to, now);
    let [c0, c1, c2] = factors.prediction;
    let mut next = factors.latents * &terms.latents + c0 * m[0] + factors.noise * &terms.noise;
    // Derivatives, from differences between predictions.
    let ratio = |idx: usize| (from[idx].lambda - from[idx + 1].lambda) / h;
    let difference = |idx: usize| (1.0 / ratio(idx)) * &(m[idx].clone() - m[idx + 1].clone());
    match from.len() {
        1 => {}
        2 => next = next + c1 * &difference(0),
        _ => {
            let (r0, r1) = (ratio(0), ratio(1));
            let (first, second) = (difference(0), difference(1));
            let change = first.clone() - second;
            let derivative = first + (r0 / (r0 + r1)) * &change;
            next = next + c1 * &derivative + c2 * &((1.0 / (r0 + r1)) * &change);
        }
    }
    next
}

impl Sampler for Dpm {
    fn name(&self) -> &'static str {
        self.levels.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        let (plan, levels) = self.levels.plan(ask)?;
        let n_steps = plan.timesteps.len();
        let first = Ask { n_steps, ..*ask }.n_skipped(self.levels.is_flow)?;
        let n_kept = self.order - 1;
        let mut program = Program::new(n_kept);
        for idx in first..n_steps {
            let t = program.terms();
            let converted = match self.algorithm.integrates_noise() {
                true => self.levels.noise(levels[idx], &t.latents, &t.prediction),
                false => self.levels.picture(levels[idx], &t.latents, &t.prediction),
            };
            let order = self.order_of(idx, n_steps, idx - first);
            let mut predictions = vec![&converted];
            predictions.extend(&t.kept);
            let from: Vec<Level> = (0..order).map(|back| levels[idx - back]).collect();
            let next = step(
                self.algorithm,
                self.second_order,
                &t,
                levels[idx + 1],
                &from,
                &predictions[..order],
            );
            let mut kept = vec![converted.clone()];
            kept.extend(t.kept.iter().cloned());
            kept.truncate(n_kept);
            program.push(next, kept);
        }
        plan.schedule(self.levels.solver, n_steps, first, program)
    }
}
