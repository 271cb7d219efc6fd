//! Exponential integration of the noise by a polynomial of its logarithm, as diffusers' `DEISMultistepScheduler`.
//!
//! "Fast Sampling of Diffusion Models with Exponential Integrator" (Zhang and Chen, 2022), the variant "log rho". Scalars are float32 as
//! in diffusers.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{SamplerConfig, Solver},
    levels::Level,
    linear::{Form, Program},
    multistep::{Kind, Multistep},
    spacing::numpy_ln,
};

pub(crate) const CLASS: &str = "DEISMultistepScheduler";
/// With fewer steps the last ones are of lower order, if `lower_order_final` says so.
const FEW_STEPS: usize = 15;

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Deis {
    levels: Multistep,
    order: usize,
    is_lower_order_final: bool,
}

impl Deis {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        match config.algorithm_type.as_deref() {
            // diffusers replaces the latter two.
            None | Some("deis" | "dpmsolver" | "dpmsolver++") => {}
            Some(other) => return Err(solver.unsupported("algorithm_type", other, "deis")),
        }
        match config.solver_type.as_deref() {
            None | Some("logrho" | "midpoint" | "heun" | "bh1" | "bh2") => {}
            Some(other) => return Err(solver.unsupported("solver_type", other, "logrho")),
        }
        let order = config.solver_order.unwrap_or(2);
        if !(1..=3).contains(&order) {
            return Err(solver.unsupported("solver_order", order, "1, 2 or 3"));
        }
        Ok(Self {
            levels: Multistep::new(Kind::Deis, solver, config)?,
            order: order as usize,
            is_lower_order_final: config.lower_order_final.unwrap_or(true),
        })
    }

    /// Order of step `idx` of `n`, of which `n_before` were done.
    fn order_of(&self, idx: usize, n: usize, n_before: usize) -> usize {
        let is_few = self.is_lower_order_final && n < FEW_STEPS;
        let most = match n - idx {
            left @ (1 | 2) if is_few => left,
            _ => self.order,
        };
        self.order.min(n_before + 1).min(most)
    }
}

/// The integral of `(ln t - ln c) / (ln b - ln c)`.
fn integral_2(t: f32, b: f32, c: f32) -> f32 {
    let [ln_t, ln_b, ln_c] = [t, b, c].map(numpy_ln);
    t * (-ln_c + ln_t - 1.0) / (ln_b - ln_c)
}

/// The integral of `(ln t - ln c) (ln t - ln d) / ((ln b - ln c) (ln b - ln d))`.
fn integral_3(t: f32, b: f32, c: f32, d: f32) -> f32 {
    let [ln_t, ln_b, ln_c, ln_d] = [t, b, c, d].map(numpy_ln);
    let numerator = t * (ln_c * (ln_d - ln_t + 1.0) - ln_d * ln_t + ln_d + ln_t * ln_t - 2.0 * ln_t + 2.0);
    numerator / ((ln_b - ln_c) * (ln_b - ln_d))
}

/// A step to `to`; levels and predictions `m` are newest first, as many as the order.
fn step(latents: &Form, to: Level, from: &[Level], m: &[&Form]) -> Form {
    let now = from[0];
    let rho = |level: Level| level.sigma / level.alpha;
    let rhos: Vec<f32> = from.iter().map(|level| rho(*level)).collect();
    let (there, here) = (rho(to), rhos[0]);
    let weights = match from.len() {
        1 => {
            let growth = (to.lambda - now.lambda).exp() - 1.0;
            return (to.alpha / now.alpha) * latents - (to.sigma * growth) * m[0];
        }
        2 => {
            let weight = |b: f32, c: f32| integral_2(there, b, c) - integral_2(here, b, c);
            vec![weight(rhos[0], rhos[1]), weight(rhos[1], rhos[0])]
        }
        _ => {
            let weight = |b: f32, c: f32, d: f32| integral_3(there, b, c, d) - integral_3(here, b, c, d);
            vec![
                weight(rhos[0], rhos[1], rhos[2]),
                weight(rhos[1], rhos[2], rhos[0]),
                weight(rhos[2], rhos[0], rhos[1]),
            ]
        }
    };
    let alpha = f64::from(to.alpha);
    let latents = (alpha / f64::from(now.alpha)) * latents;
    weights.iter().zip(m).fold(latents, |sum, (weight, prediction)| {
        sum + (alpha * f64::from(*weight)) * *prediction
    })
}

impl Sampler for Deis {
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
            let converted = self.levels.noise(levels[idx], &t.latents, &t.prediction);
            let order = self.order_of(idx, n_steps, idx - first);
            let mut predictions = vec![&converted];
            predictions.extend(&t.kept);
            let from: Vec<Level> = (0..order).map(|back| levels[idx - back]).collect();
            let next = step(&t.latents, levels[idx + 1], &from, &predictions[..order]);
            let mut kept = vec![converted.clone()];
            kept.extend(t.kept.iter().cloned());
            kept.truncate(n_kept);
            program.push(next, kept);
        }
        plan.schedule(self.levels.solver, n_steps, first, program)
    }
}
