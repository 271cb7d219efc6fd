//! How the sigmas of a rectified flow are shifted towards noise: by a constant, or by the size of the picture.
//!
//! R1. Sigmas that a pipeline or a request names are float32 and stay so in every operation; those of the scheduler itself are float64:
//!     as in diffusers 0.42.

use crate::{
    Ask, SamplerError,
    config::{Mu, SamplerConfig, Solver, TimeShift},
};

/// A shift of sigmas.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shift {
    /// `s sigma / (1 + (s - 1) sigma)`.
    pub(crate) constant: f64,
    dynamic: Option<Dynamic>,
    /// The sigma to which the last one is stretched.
    pub(crate) terminal: Option<f64>,
}

/// A shift by the size of the picture.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Dynamic {
    time_shift: TimeShift,
    mu: Mu,
    base: (f64, f64),
    slope: f64,
}

impl Shift {
    /// `constant` is the value of `key`.
    pub(crate) fn new(
        solver: Solver,
        config: &SamplerConfig,
        constant: Option<f64>,
        key: &'static str,
    ) -> Result<Self, SamplerError> {
        let constant = constant.unwrap_or(1.0);
        if !(constant.is_finite() && constant > 0.0) {
            return Err(solver.invalid(key, constant, "a positive number"));
        }
        let is_dynamic = config.use_dynamic_shifting.unwrap_or(false);
        let dynamic = is_dynamic.then(|| Dynamic::new(solver, config)).transpose()?;
        // As in diffusers, 0 is none.
        let terminal = config.shift_terminal.filter(|terminal| *terminal != 0.0);
        if let Some(terminal) = terminal.filter(|terminal| !(0.0..1.0).contains(terminal)) {
            return Err(solver.invalid("shift_terminal", terminal, "a number of 0 to 1"));
        }
        Ok(Self {
            constant,
            dynamic,
            terminal,
        })
    }

    pub(crate) fn is_dynamic(&self) -> bool {
        self.dynamic.is_some()
    }

    pub(crate) fn is_linear_in_time(&self) -> bool {
        self.dynamic.is_some_and(|d| d.time_shift == TimeShift::Linear)
    }

    /// The constant that shifts the same way.
    pub(crate) fn factor(&self, ask: &Ask<'_>) -> f64 {
        match self.dynamic {
            None => self.constant,
            Some(dynamic) => dynamic.factor(ask),
        }
    }

    /// Sigmas that a request or a pipeline names.
    pub(crate) fn given(&self, solver: Solver, sigmas: &[f32]) -> Result<Vec<f64>, SamplerError> {
        let are_levels = sigmas.iter().all(|sigma| *sigma > 0.0 && *sigma <= 1.0);
        let are_falling = sigmas.windows(2).all(|pair| pair[0] > pair[1]);
        if sigmas.is_empty() || !are_levels || !are_falling {
            return Err(solver.sigmas("takes at least 1 sigma, falling, each above 0 and at most 1"));
        }
        Ok(sigmas.iter().map(|sigma| f64::from(*sigma)).collect())
    }

    /// Shifts and stretches; `is_f32` rounds every operation to float32.
    pub(crate) fn apply(&self, sigmas: &mut [f64], ask: &Ask<'_>, is_f32: bool) {
        // Of float32 operands, a float64 operation rounded to float32 is the float32 operation.
        let round = |x: f64| if is_f32 { f64::from(x as f32) } else { x };
        let shift = round(self.factor(ask));
        let less = round(self.constant - 1.0);
        for sigma in sigmas.iter_mut() {
            *sigma = match self.dynamic {
                None => round(round(shift * *sigma) / round(1.0 + round(less * *sigma))),
                Some(_) => round(shift / round(shift + round(round(1.0 / *sigma) - 1.0))),
            };
        }
        if let (Some(terminal), Some(last)) = (self.terminal, sigmas.last().copied()) {
            let scale = round(round(1.0 - last) / round(1.0 - terminal));
            for sigma in sigmas.iter_mut() {
                *sigma = round(1.0 - round(round(1.0 - *sigma) / scale));
            }
        }
    }
}

impl Dynamic {
    fn new(solver: Solver, config: &SamplerConfig) -> Result<Self, SamplerError> {
        let base = config.base_image_seq_len.unwrap_or(256);
        let most = config.max_image_seq_len.unwrap_or(4096);
        let base_shift = config.base_shift.unwrap_or(0.5);
        let max_shift = config.max_shift.unwrap_or(1.15);
        if base == most {
            let expected = "another number than base_image_seq_len";
            return Err(solver.invalid("max_image_seq_len", most, expected));
        }
        for (key, shift) in [("base_shift", base_shift), ("max_shift", max_shift)] {
            if !shift.is_finite() {
                return Err(solver.invalid(key, shift, "a number"));
            }
        }
        Ok(Self {
            time_shift: config.time_shift_type.unwrap_or(TimeShift::Exponential),
            mu: config.mu,
            base: (f64::from(base), base_shift),
            slope: (max_shift - base_shift) / (f64::from(most) - f64::from(base)),
        })
    }

    fn factor(self, ask: &Ask<'_>) -> f64 {
        let mu = self.mu(ask);
        match self.time_shift {
            TimeShift::Exponential => mu.exp(),
            TimeShift::Linear => mu,
        }
    }

    fn mu(self, ask: &Ask<'_>) -> f64 {
        let n_tokens = ask.n_tokens as f64;
        match self.mu {
            Mu::Linear => {
                let (base, base_shift) = self.base;
                n_tokens * self.slope + (base_shift - self.slope * base)
            }
            Mu::Flux2 => flux2_mu(n_tokens, ask.n_steps as f64),
        }
    }
}

/// `compute_empirical_mu` of FLUX.2: between lines fitted for 10 and for 200 steps; large pictures have the latter.
fn flux2_mu(n_tokens: f64, n_steps: f64) -> f64 {
    const MOST_TOKENS: f64 = 4300.0;
    let at_10 = 8.738_095_24e-5 * n_tokens + 1.898_333_33;
    let at_200 = 0.000_169_27 * n_tokens + 0.456_666_66;
    if n_tokens > MOST_TOKENS {
        return at_200;
    }
    let slope = (at_200 - at_10) / 190.0;
    slope * n_steps + (at_200 - 200.0 * slope)
}
