//! Linear multistep: the integral of a polynomial through the derivatives of the last four steps, as diffusers'
//! `LMSDiscreteScheduler`.

use crate::{
    Ask, Sampler, SamplerError, Schedule,
    config::{SamplerConfig, Solver, TimestepSpacing},
    discrete::{Defaults, Discrete, LINEAR_BETAS},
    euler::{init_noise_scale, input_scale, refuse_flow},
    heun::derivative,
    levels::{Spacing, TrainSigmas},
    linear::{Form, Plan, Program},
};

pub(crate) const CLASS: &str = "LMSDiscreteScheduler";
const DEFAULTS: Defaults = Defaults {
    betas: LINEAR_BETAS,
    spacing: TimestepSpacing::Linspace,
};
const ORDER: usize = 4;
/// Gauss and Legendre's two points: exact for polynomials of a degree below [`ORDER`].
const POINT: f64 = 0.577_350_269_189_625_8;

/// The sampler.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Lms {
    solver: Solver,
    discrete: Discrete,
    train_sigmas: TrainSigmas,
    spacing: Spacing,
}

impl Lms {
    pub(crate) fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        // The class does not know this key.
        let config = SamplerConfig {
            rescale_betas_zero_snr: None,
            ..config.clone()
        };
        let discrete = Discrete::with_signal(&config, solver, DEFAULTS)?;
        refuse_flow(&discrete, solver)?;
        Ok(Self {
            solver,
            train_sigmas: TrainSigmas::new(&discrete.alphas_cumprod),
            spacing: Spacing::read(&config, solver)?,
            discrete,
        })
    }
}

/// The weight of the derivative `back` steps ago, of `order`, in the step from `sigmas[idx]`.
fn weight(sigmas: &[f32], idx: usize, order: usize, back: usize) -> f64 {
    let sigma = |idx: usize| f64::from(sigmas[idx]);
    let basis = |tau: f64| -> f64 {
        let others = (0..order).filter(|other| *other != back);
        let ratio = |other: usize| (tau - sigma(idx - other)) / (sigma(idx - back) - sigma(idx - other));
        others.map(ratio).product()
    };
    let (from, to) = (sigma(idx), sigma(idx + 1));
    let (middle, half) = (0.5 * (from + to), 0.5 * (to - from));
    half * (basis(middle - half * POINT) + basis(middle + half * POINT))
}

impl Sampler for Lms {
    fn name(&self) -> &'static str {
        self.solver.name
    }

    fn schedule(&self, ask: &Ask<'_>) -> Result<Schedule, SamplerError> {
        self.solver.no_sigmas(ask.sigmas)?;
        let n_steps = ask.n_steps;
        let timesteps = self.discrete.timesteps(n_steps)?;
        let (timesteps, mut sigmas) = self.train_sigmas.spaced(timesteps, self.spacing);
        let first = ask.n_skipped(false)?;
        let levels = sigmas.iter().map(|sigma| [1.0, *sigma]).collect();
        let input_scales = sigmas.iter().map(|sigma| input_scale(*sigma)).collect();
        sigmas.push(0.0);
        // Earlier derivatives, newest first.
        let mut program = Program::new(ORDER - 1);
        for idx in first..n_steps {
            let t = program.terms();
            let slope = derivative(
                self.discrete.prediction_type,
                sigmas[idx],
                &t.latents,
                &t.prediction,
            );
            let mut slopes = vec![slope];
            slopes.extend(t.kept);
            // As in diffusers, steps that were left out count for the order, though there is no derivative of them.
            let order = ORDER.min(idx + 1);
            let n_known = order.min(idx - first + 1);
            let next = (0..n_known).fold(t.latents, |sum: Form, back| {
                sum + weight(&sigmas, idx, order, back) * &slopes[back]
            });
            slopes.truncate(ORDER - 1);
            program.push(next, slopes);
        }
        let plan = Plan {
            timesteps,
            input_scales,
            init_noise_scale: init_noise_scale(&self.discrete, &sigmas),
            sigmas,
            levels,
        };
        plan.schedule(self.solver, n_steps, first, program)
    }
}
