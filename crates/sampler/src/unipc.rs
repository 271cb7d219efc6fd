//! UniPC with its corrector, as diffusers' `UniPCMultistepScheduler`, also along a rectified flow.
//!
//! "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models" (Zhao et al., 2023). A step first corrects the
//! latents that the step before predicted, with the prediction made at them, then predicts the next. Scalars are float32 as in diffusers.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{PredictionType, SamplerConfig, Solver},
    levels::Level,
    linear::{Form, Program},
    multistep::{Kind, Multistep},
};

pub(crate) const CLASS: &str = "UniPCMultistepScheduler";
/// Beyond, the equations of the coefficients are worthless in float32.
const MAX_ORDER: u32 = 6;

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Unipc {
    levels: Multistep,
    order: usize,
    /// `B(h) = h` in place of `e^h - 1`.
    is_bh1: bool,
    predicts_picture: bool,
    is_lower_order_final: bool,
    /// Steps after which nothing is corrected.
    uncorrected: Vec<usize>,
}

impl Unipc {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        let is_bh1 = match config.solver_type.as_deref() {
            // Names of other classes' types, which diffusers replaces.
            None | Some("bh2" | "midpoint" | "heun" | "logrho") => false,
            Some("bh1") => true,
            Some(other) => return Err(solver.unsupported("solver_type", other, "bh1 or bh2")),
        };
        let order = config.solver_order.unwrap_or(2);
        if !(1..=MAX_ORDER).contains(&order) {
            return Err(solver.unsupported("solver_order", order, "1 to 6"));
        }
        let levels = Multistep::new(Kind::Unipc, solver, config)?;
        let predicts_picture = config.predict_x0.unwrap_or(true);
        if !predicts_picture && levels.prediction_type() == PredictionType::Flow {
            return Err(solver.unsupported("predict_x0", false, "true with flow_prediction"));
        }
        Ok(Self {
            levels,
            order: order as usize,
            is_bh1,
            predicts_picture,
            is_lower_order_final: config.lower_order_final.unwrap_or(true),
            uncorrected: config.disable_corrector.clone().unwrap_or_default(),
        })
    }

    /// A step from level `from[0]` to `to`. `m` are the predictions at `from`, as many as the order, newest first; `corrects` is the one
    /// at `to`, of the corrector.
    fn step(
        &self,
        latents: &Form,
        to: Level,
        from: &[Level],
        m: &[&Form],
        corrects: Option<&Form>,
        zero: &Form,
    ) -> Form {
        let (now, order) = (from[0], from.len());
        let h = to.lambda - now.lambda;
        let mut ratios: Vec<f32> = from[1..]
            .iter()
            .map(|level| (level.lambda - now.lambda) / h)
            .collect();
        let differences: Vec<Form> = ratios
            .iter()
            .zip(&m[1..])
            .map(|(ratio, other)| (1.0 / f64::from(*ratio)) * &((*other).clone() - m[0].clone()))
            .collect();
        ratios.push(1.0);

        let hh = if self.predicts_picture { -h } else { h };
        let phi_1 = hh.exp_m1();
        let b_h = if self.is_bh1 { hh } else { phi_1 };
        let mut phi_k = phi_1 / hh - 1.0;
        let mut factorial = 1.0;
        let mut right = Vec::with_capacity(order);
        for i in 1..=order {
            right.push(f64::from(phi_k * factorial / b_h));
            factorial *= (i + 1) as f32;
            phi_k = phi_k / hh - 1.0 / factorial;
        }
        let rows = |n: usize| -> Vec<Vec<f64>> {
            let power = |i: usize| {
                let all = ratios[..n].iter();
                all.map(|ratio| f64::from(ratio.powi(i as i32))).collect()
            };
            (0..n).map(power).collect()
        };
        let weights = match (corrects, order) {
            (None, 1) => Vec::new(),
            (None, 2) | (Some(_), 1) => vec![0.5],
            (None, _) => solve(rows(order - 1), right[..order - 1].to_vec()),
            (Some(_), _) => solve(rows(order), right),
        };
        let mut residual = zero.clone();
        for (weight, difference) in weights.iter().zip(&differences) {
            residual = residual + *weight * difference;
        }
        if let (Some(prediction), Some(weight)) = (corrects, weights.last()) {
            residual = residual + *weight * &(prediction.clone() - m[0].clone());
        }
        let (of_latents, scale) = match self.predicts_picture {
            true => (to.sigma / now.sigma, to.alpha),
            false => (to.alpha / now.alpha, to.sigma),
        };
        of_latents * latents - (scale * phi_1) * m[0] - (scale * b_h) * &residual
    }
}

/// Solves `rows x = right` by elimination with row pivots.
fn solve(mut rows: Vec<Vec<f64>>, mut right: Vec<f64>) -> Vec<f64> {
    let n = right.len();
    for column in 0..n {
        let size = |row: &usize| rows[*row][column].abs();
        let pivot = (column..n).max_by(|a, b| size(a).total_cmp(&size(b)));
        rows.swap(column, pivot.unwrap_or(column));
        right.swap(column, pivot.unwrap_or(column));
        for row in column + 1..n {
            let factor = rows[row][column] / rows[column][column];
            let pivot_row = rows[column].clone();
            for (x, pivot) in rows[row].iter_mut().zip(pivot_row).skip(column) {
                *x -= factor * pivot;
            }
            right[row] -= factor * right[column];
        }
    }
    for column in (0..n).rev() {
        right[column] /= rows[column][column];
        for row in 0..column {
            right[row] -= rows[row][column] * right[column];
        }
    }
    right
}

impl Sampler for Unipc {
    fn name(&self) -> &'static str {
        self.levels.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        let (plan, levels) = self.levels.plan(ask)?;
        let n_steps = plan.timesteps.len();
        let first = Ask { n_steps, ..*ask }.n_skipped(self.levels.is_flow)?;
        // The latents that the step before started from, then predictions, newest first.
        let mut program = Program::new(1 + self.order);
        let mut order_before = 0;
        for idx in first..n_steps {
            let t = program.terms();
            let converted = match self.predicts_picture {
                true => self.levels.picture(levels[idx], &t.latents, &t.prediction),
                false => self.levels.noise(levels[idx], &t.latents, &t.prediction),
            };
            let earlier: Vec<&Form> = t.kept[1..].iter().collect();
            let latents = if idx > first && !self.uncorrected.contains(&(idx - 1)) {
                let from: Vec<Level> = (1..=order_before).map(|back| levels[idx - back]).collect();
                let m = &earlier[..order_before];
                self.step(&t.kept[0], levels[idx], &from, m, Some(&converted), &t.zero)
            } else {
                t.latents.clone()
            };
            let mut m = vec![&converted];
            m.extend(earlier);
            m.truncate(self.order);
            let mut order = self.order.min(idx - first + 1);
            if self.is_lower_order_final {
                order = order.min(n_steps - idx);
            }
            let from: Vec<Level> = (0..order).map(|back| levels[idx - back]).collect();
            let next = self.step(&latents, levels[idx + 1], &from, &m[..order], None, &t.zero);
            order_before = order;
            let mut kept = vec![latents];
            kept.extend(m.into_iter().cloned());
            kept.resize(1 + self.order, t.zero.clone());
            program.push(next, kept);
        }
        plan.schedule(self.levels.solver, n_steps, first, program)
    }
}
