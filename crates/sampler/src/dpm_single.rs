//! DPM-Solver and DPM-Solver++ whose steps begin anew every few evaluations, also with fresh noise, as diffusers'
//! `DPMSolverSinglestepScheduler`. Scalars are float32 as in diffusers.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{FinalSigmas, PredictionType, SamplerConfig, Solver},
    dpm::{Algorithm, SecondOrder, factors},
    levels::Level,
    linear::{Form, Program},
    multistep::{Kind, Multistep},
};

pub(crate) const CLASS: &str = "DPMSolverSinglestepScheduler";

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DpmSingle {
    levels: Multistep,
    algorithm: Algorithm,
    second_order: SecondOrder,
    order: usize,
    is_lower_order_final: bool,
}

impl DpmSingle {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        let algorithm = Algorithm::read(config, solver)?;
        if algorithm == Algorithm::SdeDpm {
            let expected = "dpmsolver, dpmsolver++ or sde-dpmsolver++";
            return Err(solver.unsupported("algorithm_type", "sde-dpmsolver", expected));
        }
        let second_order = SecondOrder::read(config, solver)?;
        let order = config.solver_order.unwrap_or(2);
        if !(1..=3).contains(&order) {
            return Err(solver.unsupported("solver_order", order, "1, 2 or 3"));
        }
        let levels = Multistep::new(Kind::DpmSingle, solver, config)?;
        if algorithm.integrates_noise() {
            if levels.final_sigmas == FinalSigmas::Zero {
                let expected = "sigma_min with dpmsolver";
                return Err(solver.unsupported("final_sigmas_type", "zero", expected));
            }
            if levels.prediction_type() == PredictionType::Flow {
                let expected = "epsilon, v_prediction or sample with dpmsolver";
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
            is_lower_order_final: config.lower_order_final.unwrap_or(false),
        })
    }

    /// Order of every evaluation: 1, 2, 3, 1, 2, 3, .., with an end that fits.
    fn orders(&self, n: usize) -> Vec<usize> {
        let (order, is_zero) = (self.order, self.levels.final_sigmas == FinalSigmas::Zero);
        let is_lower_final = self.is_lower_order_final || !n.is_multiple_of(order) || is_zero;
        let mut orders: Vec<usize> = (0..n).map(|idx| idx % order + 1).collect();
        if is_lower_final && n.is_multiple_of(order) {
            // The last step is cut in two.
            if let Some(last) = orders.last_mut() {
                *last = 1;
            }
        }
        if let (true, Some(last)) = (is_zero, orders.last_mut()) {
            *last = 1;
        }
        orders
    }

    /// From the latents where the step began to `to`; `from` and `m` are levels and predictions, newest first, as many as the order.
    fn step(&self, begin: &Form, noise: &Form, to: Level, from: &[Level], m: &[&Form]) -> Form {
        let order = from.len();
        let base = from[order - 1];
        let h = to.lambda - base.lambda;
        let factors = factors(self.algorithm, self.second_order, order, to, base);
        let [c0, c1, c2] = factors.prediction;
        let mut next = factors.latents * begin + c0 * m[order - 1] + factors.noise * noise;
        let ratio = |idx: usize| (from[idx].lambda - base.lambda) / h;
        let difference = |idx: usize| (1.0 / ratio(idx)) * &(m[idx].clone() - m[order - 1].clone());
        match (order, self.second_order) {
            (1, _) => {}
            (2, _) | (_, SecondOrder::Midpoint) => next = next + c1 * &difference(0),
            (_, SecondOrder::Heun) => {
                let (r0, r1) = (ratio(0), ratio(1));
                let (near, far) = (difference(1), difference(0));
                let first = (1.0 / (r0 - r1)) * &(r0 * &near - r1 * &far);
                let second = (2.0 / (r0 - r1)) * &(far - near);
                next = next + c1 * &first + c2 * &second;
            }
        }
        next
    }
}

impl Sampler for DpmSingle {
    fn name(&self) -> &'static str {
        self.levels.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        let (plan, levels) = self.levels.plan(ask)?;
        let n_steps = plan.timesteps.len();
        let first = Ask { n_steps, ..*ask }.n_skipped(self.levels.is_flow)?;
        let orders = self.orders(n_steps);
        // Latents where the step began, then predictions, newest first.
        let mut program = Program::new(self.order);
        for idx in first..n_steps {
            let t = program.terms();
            let converted = match self.algorithm.integrates_noise() {
                true => self.levels.noise(levels[idx], &t.latents, &t.prediction),
                false => self.levels.picture(levels[idx], &t.latents, &t.prediction),
            };
            let order = orders[idx].min(idx - first + 1);
            let begin = match order {
                1 => t.latents.clone(),
                _ => t.kept[0].clone(),
            };
            let mut m = vec![&converted];
            m.extend(&t.kept[1..]);
            let from: Vec<Level> = (0..order).map(|back| levels[idx - back]).collect();
            let next = self.step(&begin, &t.noise, levels[idx + 1], &from, &m[..order]);
            let mut kept = vec![begin, converted.clone()];
            kept.extend(t.kept[1..].iter().cloned());
            kept.truncate(self.order);
            program.push(next, kept);
        }
        plan.schedule(self.levels.solver, n_steps, first, program)
    }
}
