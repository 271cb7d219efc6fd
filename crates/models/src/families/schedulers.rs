//! Samplers by a checkpoint's `scheduler_config.json`: the one it asks for, and those that carry out its settings as well.
//!
//! R1. What the checkpoint is made for must work or is refused by key; of the others, those that can carry out its settings are offered.
//! R2. A key that nothing here knows is refused.

use super::expect_class;
use crate::ModelError;
use denoised_checkpoint::{Config, Folder};
use denoised_sampler::{
    BetaSchedule, FinalSigmas, FlowSigmas, InterpolationType, Kind, Mu, PredictionType, Sampler,
    SamplerConfig, SamplerError, TimeShift, TimestepSpacing, TimestepType, build_sampler, names_of,
    own_sampler,
};
use serde_json::Value;

/// Classes for discrete timesteps: all are made for the same noise schedules, so that each can take another's file.
const DISCRETE_CLASSES: [&str; 16] = [
    "DDIMScheduler",
    "DDPMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSDEScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LCMScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "TCDScheduler",
    "UniPCMultistepScheduler",
];
/// Classes for flows; the last three only with `use_flow_sigmas`.
const FLOW_CLASSES: [&str; 5] = [
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "UniPCMultistepScheduler",
];
/// Keys that only matter beside a setting that is refused, or for noise that is drawn elsewhere here.
const KEYS_WITHOUT_EFFECT: [&str; 4] = [
    "clip_sample_range",
    "dynamic_thresholding_ratio",
    "noise_sampler_seed",
    "sample_max_value",
];

/// What a request may choose from.
#[derive(Debug)]
pub(super) struct Samplers {
    /// The checkpoint's own first, if it is implemented.
    pub(super) samplers: Vec<Box<dyn Sampler>>,
    /// Its class if it is not.
    pub(super) foreign_scheduler: Option<String>,
}

/// What a pipeline makes of a file for discrete timesteps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiscreteRule {
    /// What it says.
    AsWritten,
    /// `StableDiffusionPipeline` and its relatives put a `steps_offset` of 1 and `clip_sample = false` in place of whatever it says.
    StableDiffusion,
    /// `StableDiffusionInpaintPipeline` puts a `steps_offset` of 1 and `skip_prk_steps = true` in place of it.
    StableDiffusionInpaint,
}

/// Samplers of a denoiser with discrete timesteps.
pub(super) fn discrete(folder: &Folder, rule: DiscreteRule) -> Result<Samplers, ModelError> {
    expect_class(folder, "scheduler", "scheduler", &DISCRETE_CLASSES)?;
    let config = folder.config("scheduler")?;
    let read = Reader::new(&config);
    // It would make another model of it: one that flows in a straight line.
    config.only("use_flow_sigmas", &[false.into(), Value::Null])?;
    let mut settings = SamplerConfig::default();
    read.discrete(&mut settings)?;
    read.multistep(&mut settings)?;
    config.only("use_dynamic_shifting", &[false.into(), Value::Null])?;
    config.only("shift_terminal", &[Value::Null])?;
    config.deny_unread(&KEYS_WITHOUT_EFFECT)?;
    match rule {
        DiscreteRule::AsWritten => {}
        DiscreteRule::StableDiffusion => {
            settings.steps_offset = Some(1);
            settings.clip_sample = Some(false);
        }
        DiscreteRule::StableDiffusionInpaint => {
            settings.steps_offset = Some(1);
            settings.skip_prk_steps = Some(true);
        }
    }
    choose(folder, &config, Kind::Discrete, &settings)
}

/// Samplers of a rectified flow. `flow_sigmas` and `mu` are those that the family's pipeline hands to its scheduler.
pub(super) fn flow(folder: &Folder, flow_sigmas: FlowSigmas, mu: Mu) -> Result<Samplers, ModelError> {
    expect_class(folder, "scheduler", "scheduler", &FLOW_CLASSES)?;
    let config = folder.config("scheduler")?;
    let read = Reader::new(&config);
    let mut settings = SamplerConfig {
        flow_sigmas,
        mu,
        ..SamplerConfig::default()
    };
    read.flow(&mut settings)?;
    if class_of(folder).starts_with("FlowMatch") {
        config.deny_unread(&[])?;
    } else {
        read.discrete(&mut settings)?;
        read.multistep(&mut settings)?;
        config.only("use_flow_sigmas", &[true.into()])?;
        if settings.use_flow_sigmas.is_none() {
            return Err(config.wrong("use_flow_sigmas", "true").into());
        }
        config.only("prediction_type", &["flow_prediction".into()])?;
        config.deny_unread(&KEYS_WITHOUT_EFFECT)?;
    }
    choose(folder, &config, Kind::Flow, &settings)
}

fn class_of(folder: &Folder) -> &str {
    folder.class("scheduler").map_or("", |class| class.class.as_str())
}

fn choose(
    folder: &Folder,
    config: &Config,
    kind: Kind,
    settings: &SamplerConfig,
) -> Result<Samplers, ModelError> {
    let error = |source: SamplerError| sampler_error(config, source);
    let class = class_of(folder);
    let own = own_sampler(kind, class, settings);
    let mut samplers = Vec::new();
    let mut refused = None;
    for name in own
        .into_iter()
        .chain(names_of(kind).filter(|name| Some(*name) != own))
    {
        match build_sampler(kind, name, settings) {
            Some(Ok(sampler)) => samplers.push(sampler),
            Some(Err(source)) if Some(name) == own => return Err(error(source)),
            Some(Err(source)) => refused = refused.or(Some(source)),
            None => {}
        }
    }
    match refused {
        Some(source) if samplers.is_empty() => Err(error(source)),
        _ => Ok(Samplers {
            samplers,
            foreign_scheduler: own.is_none().then(|| class.to_owned()),
        }),
    }
}

fn sampler_error(config: &Config, source: SamplerError) -> ModelError {
    ModelError::Sampler {
        path: config.path().to_owned(),
        source,
    }
}

/// Reads keys of a `scheduler_config.json`.
struct Reader<'a> {
    config: &'a Config,
}

impl<'a> Reader<'a> {
    fn new(config: &'a Config) -> Self {
        Self { config }
    }

    /// The value of an enum.
    fn named<T>(
        &self,
        key: &str,
        from_name: fn(&str) -> Result<T, SamplerError>,
    ) -> Result<Option<T>, ModelError> {
        let name = self.config.opt_str(key)?;
        let value = name.map(from_name).transpose();
        value.map_err(|source| sampler_error(self.config, source))
    }

    fn count(&self, key: &str) -> Result<Option<u32>, ModelError> {
        let count = self.config.opt_usize(key)?;
        Ok(count.map(|count| u32::try_from(count).unwrap_or(u32::MAX)))
    }

    /// Keys of discrete timesteps.
    fn discrete(&self, settings: &mut SamplerConfig) -> Result<(), ModelError> {
        let config = self.config;
        settings.num_train_timesteps = self.count("num_train_timesteps")?;
        settings.beta_start = config.opt_f64("beta_start")?;
        settings.beta_end = config.opt_f64("beta_end")?;
        settings.beta_schedule = self.named("beta_schedule", BetaSchedule::from_name)?;
        settings.trained_betas = self.numbers("trained_betas")?;
        settings.rescale_betas_zero_snr = config.opt_bool("rescale_betas_zero_snr")?;
        settings.prediction_type = self.named("prediction_type", PredictionType::from_name)?;
        settings.timestep_spacing = self.named("timestep_spacing", TimestepSpacing::from_name)?;
        settings.steps_offset = self.count("steps_offset")?;
        settings.set_alpha_to_one = config.opt_bool("set_alpha_to_one")?;
        settings.clip_sample = config.opt_bool("clip_sample")?;
        settings.thresholding = config.opt_bool("thresholding")?;
        settings.variance_type = config.opt_str("variance_type")?.map(str::to_owned);
        settings.interpolation_type = self.named("interpolation_type", InterpolationType::from_name)?;
        settings.timestep_type = self.named("timestep_type", TimestepType::from_name)?;
        settings.skip_prk_steps = config.opt_bool("skip_prk_steps")?;
        settings.original_inference_steps = self.count("original_inference_steps")?;
        settings.timestep_scaling = config.opt_f64("timestep_scaling")?;
        self.spacing(settings)
    }

    /// Keys of spacings.
    fn spacing(&self, settings: &mut SamplerConfig) -> Result<(), ModelError> {
        let config = self.config;
        settings.use_karras_sigmas = config.opt_bool("use_karras_sigmas")?;
        settings.use_exponential_sigmas = config.opt_bool("use_exponential_sigmas")?;
        settings.use_beta_sigmas = config.opt_bool("use_beta_sigmas")?;
        Ok(())
    }

    /// Keys of solvers that keep earlier predictions, without those of flows.
    fn multistep(&self, settings: &mut SamplerConfig) -> Result<(), ModelError> {
        let config = self.config;
        settings.final_sigmas_type = self.named("final_sigmas_type", FinalSigmas::from_name)?;
        settings.use_lu_lambdas = config.opt_bool("use_lu_lambdas")?;
        settings.sigma_min = config.opt_f64("sigma_min")?;
        settings.sigma_max = config.opt_f64("sigma_max")?;
        settings.lambda_min_clipped = config.opt_f64("lambda_min_clipped")?;
        settings.algorithm_type = config.opt_str("algorithm_type")?.map(str::to_owned);
        settings.solver_type = config.opt_str("solver_type")?.map(str::to_owned);
        settings.solver_order = self.count("solver_order")?;
        settings.lower_order_final = config.opt_bool("lower_order_final")?;
        settings.euler_at_final = config.opt_bool("euler_at_final")?;
        settings.predict_x0 = config.opt_bool("predict_x0")?;
        settings.disable_corrector = config.usizes("disable_corrector")?;
        settings.use_flow_sigmas = config.opt_bool("use_flow_sigmas")?;
        settings.flow_shift = config.opt_f64("flow_shift")?;
        settings.time_shift_type = self.named("time_shift_type", TimeShift::from_name)?;
        // Another scheduler inside this one.
        config.only("solver_p", &[Value::Null])?;
        Ok(())
    }

    /// Keys of flows.
    fn flow(&self, settings: &mut SamplerConfig) -> Result<(), ModelError> {
        let config = self.config;
        settings.num_train_timesteps = self.count("num_train_timesteps")?;
        settings.shift = config.opt_f64("shift")?;
        settings.use_dynamic_shifting = config.opt_bool("use_dynamic_shifting")?;
        settings.base_shift = config.opt_f64("base_shift")?;
        settings.max_shift = config.opt_f64("max_shift")?;
        settings.base_image_seq_len = self.count("base_image_seq_len")?;
        settings.max_image_seq_len = self.count("max_image_seq_len")?;
        settings.time_shift_type = self.named("time_shift_type", TimeShift::from_name)?;
        settings.shift_terminal = config.opt_f64("shift_terminal")?;
        settings.invert_sigmas = config.opt_bool("invert_sigmas")?;
        settings.stochastic_sampling = config.opt_bool("stochastic_sampling")?;
        self.spacing(settings)
    }

    fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>, ModelError> {
        match self.config.value(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let numbers = value
                    .as_array()
                    .map(|all| all.iter().map(Value::as_f64).collect());
                match numbers {
                    Some(Some(numbers)) => Ok(Some(numbers)),
                    _ => Err(self.config.wrong(key, "a list of numbers or null").into()),
                }
            }
        }
    }
}
