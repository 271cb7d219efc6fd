//! The keys of a `scheduler_config.json`, whatever its class, as far as a sampler here reads them.
//!
//! R1. Every key may be absent: what is then taken is the default of the solver that reads it, not of the class that the file names. That
//!     is how `from_config` of diffusers makes one scheduler of another one's file.
//! R2. A solver reads what its class in diffusers reads and ignores the rest.
//!
//! Knows nothing of files.

use crate::SamplerError;

/// Who refuses a name before a solver is chosen.
const ANY_CLASS: &str = "of any class";

/// An enum whose values have names in a `scheduler_config.json`.
macro_rules! named {
    ($(#[$doc:meta])* $name:ident, $key:literal, $expected:literal, $($(#[$value_doc:meta])* $value:ident = $text:literal,)+) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$value_doc])* $value,)+
        }

        impl $name {
            #[doc = concat!("Reads the value of the key `", $key, "`.")]
            ///
            /// # Errors
            /// [`SamplerError::Unsupported`] for any other text.
            pub fn from_name(name: &str) -> Result<Self, SamplerError> {
                match name {
                    $($text => Ok(Self::$value),)+
                    _ => Err(SamplerError::Unsupported {
                        sampler: ANY_CLASS,
                        key: $key,
                        value: name.to_owned(),
                        expected: $expected,
                    }),
                }
            }

            /// The value as a `scheduler_config.json` names it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $text,)+
                }
            }
        }
    };
}

named! {
    /// How betas run from `beta_start` to `beta_end`.
    BetaSchedule, "beta_schedule", "linear, scaled_linear or squaredcos_cap_v2",
    /// Evenly.
    Linear = "linear",
    /// Their square roots evenly.
    ScaledLinear = "scaled_linear",
    /// As a squared cosine of what is left of the signal demands; both ends are ignored.
    SquaredCosine = "squaredcos_cap_v2",
}

named! {
    /// What the denoiser predicts.
    PredictionType, "prediction_type", "epsilon, v_prediction, sample or flow_prediction",
    /// The noise.
    Epsilon = "epsilon",
    /// The velocity: `signal_scale noise - noise_scale picture`.
    VPrediction = "v_prediction",
    /// The picture.
    Sample = "sample",
    /// The way from the picture to the noise.
    Flow = "flow_prediction",
}

named! {
    /// Which of the training timesteps the steps visit.
    TimestepSpacing, "timestep_spacing", "leading, linspace or trailing",
    /// Multiples of a whole number, plus `steps_offset`: the noisiest timestep is left out.
    Leading = "leading",
    /// From the last to the first, both included.
    Linspace = "linspace",
    /// From the last down in equal strides: the first timestep is left out.
    Trailing = "trailing",
}

named! {
    /// How Euler finds a sigma between two training timesteps.
    InterpolationType, "interpolation_type", "linear or log_linear",
    /// On the line between the two neighbours.
    Linear = "linear",
    /// Not at all: logarithms of the sigmas run evenly, whatever the timesteps.
    LogLinear = "log_linear",
}

named! {
    /// What an Euler step tells a denoiser that predicts velocities.
    TimestepType, "timestep_type", "discrete or continuous",
    /// The timestep.
    Discrete = "discrete",
    /// A quarter of the logarithm of sigma.
    Continuous = "continuous",
}

named! {
    /// Where sampling ends.
    FinalSigmas, "final_sigmas_type", "zero or sigma_min",
    /// Without noise.
    Zero = "zero",
    /// With the noise of the first training timestep, or of the last step.
    SigmaMin = "sigma_min",
}

named! {
    /// How a shift that depends on the picture's size changes sigmas.
    TimeShift, "time_shift_type", "exponential or linear",
    /// By the exponential function of mu.
    Exponential = "exponential",
    /// By mu itself.
    Linear = "linear",
}

/// Which sigmas a flow has before they are shifted, where a request names none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlowSigmas {
    /// Those of the scheduler, which visit its first and last training timestep.
    #[default]
    Scheduler,
    /// `numpy.linspace(1, 1 / n, n)`: FLUX, Qwen-Image.
    Numpy,
    /// `torch.linspace(1, 1 / n, n)`, which rounds in another place: Z-Image.
    Torch,
}

/// How the shift of a flow, mu, follows from the picture's size, where it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mu {
    /// On the line through `base_shift` and `max_shift` at `base_image_seq_len` and `max_image_seq_len` tokens.
    #[default]
    Linear,
    /// FLUX.2's, which also depends on the number of steps.
    Flux2,
}

/// Settings of a sampler.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplerConfig {
    /// Timesteps of the training, 1 to 100 000; 1000 where absent.
    pub num_train_timesteps: Option<u32>,
    /// First beta, 0 to 1.
    pub beta_start: Option<f64>,
    /// Last beta, 0 to 1.
    pub beta_end: Option<f64>,
    /// How betas run between the two.
    pub beta_schedule: Option<BetaSchedule>,
    /// The betas themselves, one per training timestep, in place of the three above.
    pub trained_betas: Option<Vec<f64>>,
    /// Stretches the schedule so that nothing of the signal is left at the last timestep.
    pub rescale_betas_zero_snr: Option<bool>,
    /// What the denoiser predicts; the noise where absent.
    pub prediction_type: Option<PredictionType>,
    /// Which timesteps are visited; `leading` or `linspace` where absent, by solver.
    pub timestep_spacing: Option<TimestepSpacing>,
    /// Added to the timesteps of `leading`.
    pub steps_offset: Option<u32>,
    /// DDIM, PNDM: the last step ends without noise, not with the noise of the first training timestep.
    pub set_alpha_to_one: Option<bool>,
    /// Clips the predicted picture; no step that does is supported.
    pub clip_sample: Option<bool>,
    /// Clips the predicted picture by its distribution; no step that does is supported.
    pub thresholding: Option<bool>,
    /// DDPM: how much noise a step adds. The solvers of DPM refuse learned variances.
    pub variance_type: Option<String>,

    /// Euler: how sigmas are found.
    pub interpolation_type: Option<InterpolationType>,
    /// Euler: what the denoiser is told.
    pub timestep_type: Option<TimestepType>,
    /// Euler, DPM, UniPC: where sampling ends; without noise where absent.
    pub final_sigmas_type: Option<FinalSigmas>,
    /// Karras' spacing of the sigmas.
    pub use_karras_sigmas: Option<bool>,
    /// Even spacing of the logarithms of the sigmas.
    pub use_exponential_sigmas: Option<bool>,
    /// Spacing of the sigmas by a beta distribution.
    pub use_beta_sigmas: Option<bool>,
    /// DPM: even spacing of the logarithms of the sigmas between those of the training.
    pub use_lu_lambdas: Option<bool>,
    /// Euler, UniPC: last sigma of these spacings; that of the timesteps where absent.
    pub sigma_min: Option<f64>,
    /// Euler, UniPC: first sigma of these spacings; that of the timesteps where absent.
    pub sigma_max: Option<f64>,
    /// DPM: timesteps whose logarithm of signal per noise is below this are not visited.
    pub lambda_min_clipped: Option<f64>,

    /// DPM: what is integrated, and whether noise is added; `dpmsolver++` where absent.
    pub algorithm_type: Option<String>,
    /// DPM: `midpoint` or `heun`; UniPC: `bh1` or `bh2`. The first of DPM and the last of UniPC where absent or of another class.
    pub solver_type: Option<String>,
    /// DPM, DEIS, UniPC: how many predictions a step uses; 2 where absent.
    pub solver_order: Option<u32>,
    /// DPM, DEIS, UniPC: the last steps are of lower order, in DPM and DEIS of few steps only.
    pub lower_order_final: Option<bool>,
    /// DPM: the last step is of first order.
    pub euler_at_final: Option<bool>,
    /// UniPC: integrates the picture, not the noise.
    pub predict_x0: Option<bool>,
    /// UniPC: steps after which nothing is corrected.
    pub disable_corrector: Option<Vec<usize>>,
    /// PNDM: begins with Heun's method, not Runge and Kutta's.
    pub skip_prk_steps: Option<bool>,
    /// LCM, TCD: timesteps of the distillation; 50 where absent.
    pub original_inference_steps: Option<u32>,
    /// LCM: factor of the timesteps in the boundary conditions; 10 where absent.
    pub timestep_scaling: Option<f64>,

    /// DPM, DEIS, UniPC: the noise levels are those of a rectified flow.
    pub use_flow_sigmas: Option<bool>,
    /// DPM, DEIS, UniPC: as `shift`.
    pub flow_shift: Option<f64>,
    /// Flows: constant shift of the sigmas, `s sigma / (1 + (s - 1) sigma)`.
    pub shift: Option<f64>,
    /// Flows: shifts by the size of the picture instead ([`Mu`]).
    pub use_dynamic_shifting: Option<bool>,
    /// Flows: mu of a small picture; 0.5 where absent.
    pub base_shift: Option<f64>,
    /// Flows: mu of a large picture; 1.15 where absent.
    pub max_shift: Option<f64>,
    /// Flows: tokens of the small picture; 256 where absent.
    pub base_image_seq_len: Option<u32>,
    /// Flows: tokens of the large picture; 4096 where absent.
    pub max_image_seq_len: Option<u32>,
    /// Flows: what mu does to the sigmas.
    pub time_shift_type: Option<TimeShift>,
    /// Flows: stretches the schedule to end at this sigma, 0 to 1; `None` and 0 are no stretching.
    pub shift_terminal: Option<f64>,
    /// Flows: counts sigmas from the other end; not supported.
    pub invert_sigmas: Option<bool>,
    /// Flows: each step jumps to the picture and adds fresh noise.
    pub stochastic_sampling: Option<bool>,

    /// Flows: sigmas before the shift, where a request names none. No key of the file but a matter of the pipeline.
    pub flow_sigmas: FlowSigmas,
    /// Flows: how mu follows from the picture's size. No key of the file but a matter of the pipeline.
    pub mu: Mu,
}

/// A solver as its errors name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Solver {
    /// Class in diffusers.
    pub(crate) class: &'static str,
    /// Name on the command line.
    pub(crate) name: &'static str,
}

impl Solver {
    pub(crate) fn unsupported(
        self,
        key: &'static str,
        value: impl ToString,
        expected: &'static str,
    ) -> SamplerError {
        SamplerError::Unsupported {
            sampler: self.class,
            key,
            value: value.to_string(),
            expected,
        }
    }

    pub(crate) fn invalid(
        self,
        key: &'static str,
        value: impl ToString,
        expected: &'static str,
    ) -> SamplerError {
        SamplerError::Invalid {
            sampler: self.class,
            key,
            value: value.to_string(),
            expected,
        }
    }

    pub(crate) fn step_count(self, n_steps: usize, expected: String) -> SamplerError {
        SamplerError::StepCount {
            sampler: self.name,
            n_steps,
            expected,
        }
    }

    /// Refuses settings that make a step non-linear; `clips` is the class's default of `clip_sample`, if it has one.
    pub(crate) fn check_linear(
        self,
        config: &SamplerConfig,
        clips: Option<bool>,
    ) -> Result<(), SamplerError> {
        let is_clipped = clips.is_some_and(|clips| config.clip_sample.unwrap_or(clips));
        for (key, is_set) in [
            ("clip_sample", is_clipped),
            ("thresholding", config.thresholding.unwrap_or(false)),
        ] {
            if is_set {
                return Err(self.unsupported(key, true, "false"));
            }
        }
        Ok(())
    }

    /// Refuses noise levels in a request, which the class in diffusers does not take.
    pub(crate) fn no_sigmas(self, sigmas: Option<&[f32]>) -> Result<(), SamplerError> {
        match sigmas {
            None => Ok(()),
            Some(_) => Err(self.sigmas("takes no sigmas with this model")),
        }
    }

    pub(crate) fn sigmas(self, problem: &str) -> SamplerError {
        SamplerError::Sigmas {
            sampler: self.name,
            problem: problem.to_owned(),
        }
    }
}
