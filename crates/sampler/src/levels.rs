//! Noise levels between training timesteps: spacings of sigmas, and the timestep that belongs to a sigma.
//!
//! Computed in float64 from float32 ends, as numpy does for diffusers.

use crate::{
    SamplerError, beta,
    config::{SamplerConfig, Solver},
    spacing::{linspace, numpy_ln},
};

/// Exponent of Karras' spacing ("Elucidating the Design Space of Diffusion-Based Generative Models", Karras et al., 2022).
const KARRAS_RHO: f64 = 7.0;

/// How the sigmas between the ends are spaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spacing {
    /// As the timesteps are.
    Timesteps,
    Karras,
    Exponential,
    Beta,
}

impl Spacing {
    pub(crate) fn read(config: &SamplerConfig, solver: Solver) -> Result<Self, SamplerError> {
        let flags = [
            ("use_karras_sigmas", config.use_karras_sigmas, Self::Karras),
            (
                "use_exponential_sigmas",
                config.use_exponential_sigmas,
                Self::Exponential,
            ),
            ("use_beta_sigmas", config.use_beta_sigmas, Self::Beta),
        ];
        let mut set = flags.iter().filter(|(_, is_set, _)| is_set.unwrap_or(false));
        match (set.next(), set.next()) {
            (None, _) => Ok(Self::Timesteps),
            (Some((_, _, spacing)), None) => Ok(*spacing),
            (Some((key, _, _)), Some(_)) => {
                let expected = "one of use_karras_sigmas, use_exponential_sigmas and use_beta_sigmas";
                Err(solver.invalid(key, true, expected))
            }
        }
    }

    /// `n` sigmas from `first` down to `last`; `None` where the timesteps decide.
    pub(crate) fn sigmas(self, first: f64, last: f64, n: usize) -> Option<Vec<f64>> {
        match self {
            Self::Timesteps => None,
            Self::Karras => {
                let [first, last] = [first, last].map(|sigma| sigma.powf(1.0 / KARRAS_RHO));
                let sigma = |ramp: f64| (first + ramp * (last - first)).powf(KARRAS_RHO);
                Some(linspace(0.0, 1.0, n).into_iter().map(sigma).collect())
            }
            Self::Exponential => {
                let logs = linspace(first.ln(), last.ln(), n);
                Some(logs.into_iter().map(f64::exp).collect())
            }
            Self::Beta => {
                let sigma = |ramp: f64| last + beta::quantile(1.0 - ramp) * (first - last);
                Some(linspace(0.0, 1.0, n).into_iter().map(sigma).collect())
            }
        }
    }
}

/// `sigma_min` and `sigma_max`, if a file holds them.
pub(crate) fn ends(config: &SamplerConfig, solver: Solver) -> Result<[Option<f64>; 2], SamplerError> {
    for (key, sigma) in [("sigma_min", config.sigma_min), ("sigma_max", config.sigma_max)] {
        // Also as a float32, so that its square is finite.
        let is_usable = |sigma: f64| (1e-10..=1e10).contains(&sigma);
        if let Some(sigma) = sigma.filter(|sigma| !is_usable(*sigma)) {
            return Err(solver.invalid(key, sigma, "a number of 1e-10 to 1e10"));
        }
    }
    Ok([config.sigma_min, config.sigma_max])
}

/// Noise per signal at every training timestep.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TrainSigmas(pub(crate) Vec<f32>);

impl TrainSigmas {
    pub(crate) fn new(alphas_cumprod: &[f32]) -> Self {
        let sigma = |alpha: &f32| ((1.0 - alpha) / alpha).sqrt();
        Self(alphas_cumprod.iter().map(sigma).collect())
    }

    /// Logarithms as numpy takes them of float32.
    pub(crate) fn logs(&self) -> Vec<f64> {
        self.0.iter().map(|s| f64::from(numpy_ln(*s))).collect()
    }

    /// Timesteps of sigmas, where they need not be whole.
    pub(crate) fn timesteps_of(&self, sigmas: &[f64]) -> Vec<f32> {
        let logs = self.logs();
        let timestep = |sigma: &f64| timestep_of(*sigma, &logs) as f32;
        sigmas.iter().map(timestep).collect()
    }

    /// The timestep of a sigma, in float32 throughout.
    pub(crate) fn timestep_of_f32(&self, sigma: f32) -> f32 {
        let log_sigma = numpy_ln(sigma.max(1e-10));
        let logs: Vec<f32> = self.0.iter().map(|sigma| numpy_ln(*sigma)).collect();
        let Some(last_pair) = logs.len().checked_sub(2) else {
            return 0.0;
        };
        let below = logs.iter().rposition(|log| log_sigma - log >= 0.0);
        let below = below.unwrap_or(0).min(last_pair);
        let (low, high) = (logs[below], logs[below + 1]);
        let weight = ((low - log_sigma) / (low - high)).clamp(0.0, 1.0);
        (1.0 - weight) * below as f32 + weight * (below + 1) as f32
    }

    /// Timesteps and sigmas where the latter are those of `timesteps` or, between the first and the last of them, spaced otherwise.
    pub(crate) fn spaced(&self, timesteps: Vec<f64>, spacing: Spacing) -> (Vec<f32>, Vec<f32>) {
        let timesteps: Vec<f32> = timesteps.into_iter().map(|t| t as f32).collect();
        let sigmas: Vec<f64> = timesteps.iter().map(|t| self.at(f64::from(*t))).collect();
        let (first, last) = (sigmas[0], sigmas[sigmas.len() - 1]);
        let (timesteps, sigmas) = match spacing.sigmas(first, last, sigmas.len()) {
            None => (timesteps, sigmas),
            Some(spaced) => (self.timesteps_of(&spaced), spaced),
        };
        let sigmas = sigmas.into_iter().map(|sigma| sigma as f32).collect();
        (timesteps, sigmas)
    }

    pub(crate) fn first(&self) -> f32 {
        self.0[0]
    }

    pub(crate) fn last(&self) -> f32 {
        self.0[self.0.len() - 1]
    }

    /// `numpy.interp` between the training timesteps.
    pub(crate) fn at(&self, timestep: f64) -> f64 {
        let last_idx = self.0.len() - 1;
        let below = (timestep as usize).min(last_idx);
        let sigma = f64::from(self.0[below]);
        if below == last_idx {
            return sigma;
        }
        let slope = f64::from(self.0[below + 1]) - sigma;
        slope * (timestep - below as f64) + sigma
    }
}

/// The training timestep of a sigma, between two by its logarithm.
pub(crate) fn timestep_of(sigma: f64, log_sigmas: &[f64]) -> f64 {
    let log_sigma = sigma.max(1e-10).ln();
    let Some(last_pair) = log_sigmas.len().checked_sub(2) else {
        return 0.0;
    };
    let below = log_sigmas.iter().rposition(|log| log_sigma - log >= 0.0);
    let below = below.unwrap_or(0).min(last_pair);
    let (low, high) = (log_sigmas[below], log_sigmas[below + 1]);
    let weight = ((low - log_sigma) / (low - high)).clamp(0.0, 1.0);
    (1.0 - weight) * below as f64 + weight * (below + 1) as f64
}

/// A noise level as the multistep solvers see it, in float32 as torch computes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Level {
    /// As the schedule holds it.
    pub(crate) raw: f32,
    /// Factor of the picture.
    pub(crate) alpha: f32,
    /// Factor of the noise.
    pub(crate) sigma: f32,
    /// Logarithm of their ratio.
    pub(crate) lambda: f32,
}

impl Level {
    pub(crate) fn new(raw: f32, is_flow: bool) -> Self {
        let (alpha, sigma) = if is_flow {
            (1.0 - raw, raw)
        } else {
            let alpha = 1.0 / (raw * raw + 1.0).sqrt();
            (alpha, raw * alpha)
        };
        Self {
            raw,
            alpha,
            sigma,
            lambda: alpha.ln() - sigma.ln(),
        }
    }
}
