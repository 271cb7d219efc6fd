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
#[allow(missing_docs)] // The keys are those of diffusers; each solver says what it makes of them.
pub struct SamplerConfig {
    pub num_train_timesteps: Option<u32>,
    pub beta_start: Option<f64>,
    pub beta_end: Option<f64>,
    pub beta_schedule: Option<BetaSchedule>,
    pub trained_betas: Option<Vec<f64>>,
    pub rescale_betas_zero_snr: Option<bool>,
    pub prediction_type: Option<PredictionType>,
    pub timestep_spacing: Option<TimestepSpacing>,
    pub steps_offset: Option<u32>,
    pub set_alpha_to_one: Option<bool>,
    pub clip_sample: Option<bool>,
    pub thresholding: Option<bool>,
    pub variance_type: Option<String>,

    pub interpolation_type: Option<InterpolationType>,
    pub timestep_type: Option<TimestepType>,
    pub final_sigmas_type: Option<FinalSigmas>,
    pub use_karras_sigmas: Option<bool>,
    pub use_exponential_sigmas: Option<bool>,
    pub use_beta_sigmas: Option<bool>,
    pub use_lu_lambdas: Option<bool>,
    pub sigma_min: Option<f64>,
    pub sigma_max: Option<f64>,
    pub lambda_min_clipped: Option<f64>,

    pub algorithm_type: Option<String>,
    pub solver_type: Option<String>,
    pub solver_order: Option<u32>,
    pub lower_order_final: Option<bool>,
    pub euler_at_final: Option<bool>,
    pub predict_x0: Option<bool>,
    pub disable_corrector: Option<Vec<usize>>,
    pub skip_prk_steps: Option<bool>,
    pub original_inference_steps: Option<u32>,
    pub timestep_scaling: Option<f64>,

    pub use_flow_sigmas: Option<bool>,
    pub flow_shift: Option<f64>,
    pub shift: Option<f64>,
    pub use_dynamic_shifting: Option<bool>,
    pub base_shift: Option<f64>,
    pub max_shift: Option<f64>,
    pub base_image_seq_len: Option<u32>,
    pub max_image_seq_len: Option<u32>,
    pub time_shift_type: Option<TimeShift>,
    pub shift_terminal: Option<f64>,
    pub invert_sigmas: Option<bool>,
    pub stochastic_sampling: Option<bool>,

    /// No key of the file but a matter of the pipeline.
    pub flow_sigmas: FlowSigmas,
    /// No key of the file but a matter of the pipeline.
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
