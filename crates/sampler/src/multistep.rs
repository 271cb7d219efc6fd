//! What the multistep solvers DPM-Solver and UniPC have in common: noise levels with or without flow, and what a prediction says of the
//! picture or of the noise.

use crate::{
    Ask, SamplerError,
    config::{BetaSchedule, FinalSigmas, PredictionType, SamplerConfig, Solver, TimestepSpacing},
    discrete::{Defaults, Discrete, LINEAR_BETAS},
    flow::Shift,
    levels::{Level, Spacing, TrainSigmas, ends, timestep_of},
    linear::{Form, Plan},
    spacing::{linspace, numpy_ln},
};

const DEFAULTS: Defaults = Defaults {
    betas: LINEAR_BETAS,
    spacing: TimestepSpacing::Linspace,
};

/// Where the two solvers differ in how they find their levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Dpm,
    /// DPM-Solver whose steps begin anew every few evaluations: it always visits timesteps as `linspace` does.
    DpmSingle,
    /// It always ends at the noise of the last step or of the first training timestep.
    Deis,
    Unipc,
}

/// Noise levels of a multistep solver.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Multistep {
    pub(crate) solver: Solver,
    pub(crate) is_flow: bool,
    kind: Kind,
    discrete: Discrete,
    train_sigmas: TrainSigmas,
    spacing: Spacing,
    is_lu: bool,
    ends: [Option<f64>; 2],
    pub(crate) final_sigmas: FinalSigmas,
    is_cosine: bool,
    /// Training timesteps whose `lambda` is not clipped.
    n_used: usize,
    shift: Shift,
}

impl Multistep {
    pub(crate) fn new(kind: Kind, solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        solver.check_linear(config, None)?;
        let spacing = Spacing::read(config, solver)?;
        let is_flow = config.use_flow_sigmas.unwrap_or(false);
        let mut config = config.clone();
        if kind == Kind::DpmSingle {
            config.timestep_spacing = Some(TimestepSpacing::Linspace);
            config.rescale_betas_zero_snr = None;
        }
        if kind == Kind::Deis {
            config.rescale_betas_zero_snr = None;
            config.lambda_min_clipped = None;
            config.final_sigmas_type = Some(FinalSigmas::SigmaMin);
        }
        let config = &config;
        let discrete = Discrete::with_signal(config, solver, DEFAULTS)?;
        let train_sigmas = TrainSigmas::new(&discrete.alphas_cumprod);
        let is_lu = kind == Kind::Dpm && config.use_lu_lambdas.unwrap_or(false);
        // Karras' sigmas become a flow's in UniPC; all other spacings would be taken for a flow's as they are, beyond all noise.
        let is_karras_flow = kind == Kind::Unipc && spacing == Spacing::Karras;
        if is_flow && (is_lu || (spacing != Spacing::Timesteps && !is_karras_flow)) {
            let expected = "false with these sigmas";
            return Err(solver.unsupported("use_flow_sigmas", true, expected));
        }
        let ends = match kind {
            Kind::Dpm | Kind::DpmSingle | Kind::Deis => [None, None],
            Kind::Unipc => ends(config, solver)?,
        };
        let shift = Shift::new(solver, config, config.flow_shift, "flow_shift")?;
        if shift.terminal.is_some() && (kind != Kind::Unipc || !is_flow) {
            let value = config.shift_terminal.unwrap_or_default();
            return Err(solver.unsupported("shift_terminal", value, "null"));
        }
        if kind != Kind::Unipc && is_flow && shift.is_linear_in_time() {
            return Err(solver.unsupported("time_shift_type", "linear", "exponential"));
        }
        let lambda_min = config.lambda_min_clipped.filter(|_| kind != Kind::Unipc);
        let lambda_min = lambda_min.unwrap_or(f64::NEG_INFINITY);
        if lambda_min.is_nan() {
            return Err(solver.invalid("lambda_min_clipped", lambda_min, "a number"));
        }
        let lambda = |alpha: &f32| f64::from(alpha.sqrt().ln() - (1.0 - alpha).sqrt().ln());
        let n_used = discrete.alphas_cumprod.iter().map(lambda);
        let n_used = n_used.filter(|lambda| *lambda >= lambda_min).count();
        Ok(Self {
            solver,
            is_flow,
            kind,
            spacing,
            is_lu,
            ends,
            final_sigmas: config.final_sigmas_type.unwrap_or(FinalSigmas::Zero),
            is_cosine: config.trained_betas.is_none()
                && config.beta_schedule == Some(BetaSchedule::SquaredCosine),
            n_used,
            shift,
            discrete,
            train_sigmas,
        })
    }

    pub(crate) fn prediction_type(&self) -> PredictionType {
        self.discrete.prediction_type
    }

    /// Timesteps, sigmas and levels of the steps.
    pub(crate) fn plan(&self, ask: &Ask<'_>) -> Result<(Plan, Vec<Level>), SamplerError> {
        let (timesteps, mut sigmas, last) = match (self.is_flow, self.spacing) {
            (true, Spacing::Timesteps) => self.flow_levels(ask)?,
            _ => {
                self.solver.no_sigmas(ask.sigmas)?;
                self.discrete_levels(ask.n_steps)?
            }
        };
        sigmas.push(match self.final_sigmas {
            FinalSigmas::Zero => 0.0,
            FinalSigmas::SigmaMin => last,
        });
        let sigmas: Vec<f32> = sigmas.into_iter().map(|sigma| sigma as f32).collect();
        let levels: Vec<Level> = sigmas
            .iter()
            .map(|sigma| Level::new(*sigma, self.is_flow))
            .collect();
        let plan = Plan {
            input_scales: vec![1.0; timesteps.len()],
            levels: levels[..timesteps.len()]
                .iter()
                .map(|level| [level.alpha, level.sigma])
                .collect(),
            timesteps: timesteps.into_iter().map(|t| t as f32).collect(),
            sigmas,
            init_noise_scale: 1.0,
        };
        Ok((plan, levels))
    }

    /// Timesteps, sigmas and the one that `sigma_min` ends at.
    fn discrete_levels(&self, n_steps: usize) -> Result<(Vec<f64>, Vec<f64>, f64), SamplerError> {
        let timesteps = self.discrete.multistep_timesteps(n_steps, self.n_used)?;
        let train = &self.train_sigmas;
        let [sigma_min, sigma_max] = self.ends;
        let (first, last) = (f64::from(train.last()), f64::from(train.first()));
        let spaced = if self.is_lu && self.spacing != Spacing::Karras {
            let [first, last] = [train.last(), train.first()].map(|sigma| f64::from(numpy_ln(sigma)));
            let lambda = |ramp: f64| (first + ramp * (last - first)).exp();
            Some(linspace(0.0, 1.0, n_steps).into_iter().map(lambda).collect())
        } else {
            let [first, last] = [sigma_max.unwrap_or(first), sigma_min.unwrap_or(last)];
            self.spacing.sigmas(first, last, n_steps)
        };
        let Some(mut sigmas): Option<Vec<f64>> = spaced else {
            let sigmas = timesteps.iter().map(|t| train.at(*t as f64)).collect();
            let timesteps = timesteps.into_iter().map(|t| t as f64).collect();
            return Ok((timesteps, sigmas, last));
        };
        if self.is_flow {
            sigmas.iter_mut().for_each(|sigma| *sigma /= *sigma + 1.0);
            let timestep = |sigma: &f64| (sigma * self.discrete.n_train() as f64).trunc();
            let timesteps = sigmas.iter().map(timestep).collect();
            let last = sigmas[sigmas.len() - 1];
            return Ok((timesteps, sigmas, last));
        }
        let logs = train.logs();
        let is_rounded = match self.kind {
            Kind::Unipc | Kind::DpmSingle | Kind::Deis => self.spacing == Spacing::Karras,
            Kind::Dpm => (self.spacing == Spacing::Karras || self.is_lu) && !self.is_cosine,
        };
        let timestep = |sigma: &f64| {
            let timestep = timestep_of(*sigma, &logs);
            if is_rounded {
                timestep.round_ties_even()
            } else {
                timestep.trunc()
            }
        };
        let timesteps = sigmas.iter().map(timestep).collect();
        let last = match self.kind {
            Kind::Unipc | Kind::Deis => sigmas[sigmas.len() - 1],
            Kind::Dpm | Kind::DpmSingle => last,
        };
        Ok((timesteps, sigmas, last))
    }

    fn flow_levels(&self, ask: &Ask<'_>) -> Result<(Vec<f64>, Vec<f64>, f64), SamplerError> {
        let n_train = self.discrete.n_train() as f64;
        let n_steps = ask.n_steps;
        if n_steps == 0 {
            return Err(self.solver.step_count(n_steps, "at least 1".to_owned()));
        }
        let sigmas: Vec<f64> = match self.kind {
            Kind::Dpm | Kind::DpmSingle | Kind::Deis => {
                self.solver.no_sigmas(ask.sigmas)?;
                let shift = self.shift.factor(ask);
                let rising = linspace(1.0, 1.0 / n_train, n_steps + 1).into_iter();
                let mut sigmas: Vec<f64> = rising
                    .map(|alpha| 1.0 - alpha)
                    .map(|sigma| shift * sigma / (1.0 + (shift - 1.0) * sigma))
                    .collect();
                sigmas.reverse();
                sigmas.truncate(n_steps);
                sigmas
            }
            Kind::Unipc => {
                let given = ask.sigmas.map(|sigmas| self.shift.given(self.solver, sigmas));
                let own = || {
                    let mut own = linspace(1.0, 1.0 / n_train, n_steps + 1);
                    own.truncate(n_steps);
                    own
                };
                let mut sigmas = given.transpose()?.unwrap_or_else(own);
                self.shift.apply(&mut sigmas, ask, false);
                // All noise would have an infinite logarithm.
                const LEAST_SIGNAL: f64 = 1e-6;
                if let Some(first) = sigmas.first_mut().filter(|s| (**s - 1.0).abs() < LEAST_SIGNAL) {
                    *first -= LEAST_SIGNAL;
                }
                sigmas
            }
        };
        let timesteps = sigmas.iter().map(|sigma| (sigma * n_train).trunc()).collect();
        let last = match self.kind {
            Kind::Dpm | Kind::DpmSingle => f64::from(self.train_sigmas.first()),
            Kind::Unipc | Kind::Deis => sigmas[sigmas.len() - 1],
        };
        Ok((timesteps, sigmas, last))
    }

    /// The picture that a prediction implies.
    pub(crate) fn picture(&self, level: Level, latents: &Form, prediction: &Form) -> Form {
        let (alpha, sigma) = (f64::from(level.alpha), f64::from(level.sigma));
        match self.prediction_type() {
            PredictionType::Epsilon => (1.0 / alpha) * latents - (sigma / alpha) * prediction,
            PredictionType::Sample => prediction.clone(),
            PredictionType::VPrediction => alpha * latents - sigma * prediction,
            PredictionType::Flow => latents.clone() - level.raw * prediction,
        }
    }

    /// The noise that a prediction implies.
    pub(crate) fn noise(&self, level: Level, latents: &Form, prediction: &Form) -> Form {
        let (alpha, sigma) = (f64::from(level.alpha), f64::from(level.sigma));
        match self.prediction_type() {
            PredictionType::Epsilon => prediction.clone(),
            PredictionType::Flow => {
                ((1.0 - alpha) / sigma) * latents + (alpha * f64::from(level.raw) / sigma) * prediction
            }
            PredictionType::Sample => (1.0 / sigma) * latents - (alpha / sigma) * prediction,
            PredictionType::VPrediction => sigma * latents + alpha * prediction,
        }
    }
}
