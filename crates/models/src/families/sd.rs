//! Stable Diffusion 1 and 2: a CLIP text encoder, a U-Net, an autoencoder of 4 channels, noise schedules of discrete timesteps.
//!
//! What is read and what is put in its place are those of diffusers' `StableDiffusionPipeline`. Its safety checker is no part of what
//! is computed here: a checkpoint may bring one, and it is not run.

use super::{
    components::{self, Autoencoder, Loading, Reader, Sizes, model_info},
    expect_class,
};
use crate::{
    ModelError,
    conditioning::{
        Conditioner, Conditioning, ENCODE_PROMPT_NAMES, EncodeArgs, TextOptions, Tokenized, trace_named,
    },
    denoiser::{Unet, UnetConfig},
    parts::{Channels, Experts, GuidanceRule, LatentsLayout, Opened, Parts, Tasks},
    text::{ClipConfig, ClipEncoder, ClipTokenizer},
    vae::KlConfig,
};
use denoised_checkpoint::{Config, Folder};
use denoised_nn::{Ctx, Result};
use denoised_sampler::{
    BetaSchedule, Ddim, DiscreteConfig, Euler, FinalSigmas, InterpolationType, PredictionType, Sampler,
    SamplerError, TimestepSpacing, TimestepType,
};
use denoised_types::{Image, NamedTensor};
use serde_json::Value;

const DEFAULT_N_STEPS: u32 = 50;
const DEFAULT_GUIDANCE: f32 = 7.5;
/// The pipeline refuses other sizes, whatever the autoencoder makes of a latent.
const GRID_PX: usize = 8;
/// Nothing in the network ends here; beyond, attention over all positions takes hours.
const MAX_SIDE_PX: usize = 4096;

/// Classes whose checkpoints the two samplers below can run: all are made for the same noise schedules.
const FOREIGN_SCHEDULERS: [&str; 12] = [
    "DDPMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSDEScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "UniPCMultistepScheduler",
];

/// Keys of those classes, and keys that only matter beside a setting that is refused. diffusers leaves them out when it makes one of our
/// two samplers of such a configuration.
const SCHEDULER_KEYS_WITHOUT_EFFECT: [&str; 17] = [
    "algorithm_type",
    "clip_sample_range",
    "disable_corrector",
    "dynamic_thresholding_ratio",
    "euler_at_final",
    "lambda_min_clipped",
    "lower_order_final",
    "predict_x0",
    "sample_max_value",
    "skip_prk_steps",
    "solver_order",
    "solver_p",
    "solver_type",
    "flow_shift",
    "use_lu_lambdas",
    "variance_type",
    "noise_sampler_seed",
];

pub(super) fn open(folder: &Folder) -> Result<Opened, ModelError> {
    folder.options().bool_or("requires_safety_checker", true)?;
    folder.options().deny_unread(&[])?;
    if folder.class("safety_checker").is_some() {
        tracing::warn!("the checkpoint brings a safety checker, which this version does not run");
    }
    let tokenizer = components::clip_tokenizer(folder, "tokenizer")?;
    let clip = components::config(folder, "text_encoder", "text encoder", &["CLIPTextModel"])?;
    let clip = ClipConfig::read(&clip)?;
    let unet = components::config(folder, "unet", "denoiser", &["UNet2DConditionModel"])?;
    let unet = UnetConfig::read(&unet)?;
    // The pipeline does not shift latents, whatever the autoencoder says.
    let kl = components::kl(folder)?.without_shift();
    let Samplers {
        samplers,
        foreign_scheduler,
    } = Samplers::read(folder, true)?;

    let n_tokens = tokenizer.max_length();
    components::expect_clip(folder, (&tokenizer, n_tokens), &clip, "")?;
    if let Some(n_context) = unet.n_context() {
        let given = ("channels of the text encoder:", clip.n_channels);
        components::expect_equal(folder, given, ("the unet takes", n_context))?;
    }
    let sizes = unet_sizes(folder, &unet, &kl, unet.sample_size)?;

    let mut loading = Loading::open(folder, &["unet", "vae", "text_encoder"])?;
    let encoder = loading.clip("text_encoder", &clip);
    let denoiser = Unet::new(&mut loading.at("unet"), &unet);
    let autoencoder = loading.kl(&kl);
    let tasks = unet_tasks(folder, &unet, &kl, &autoencoder)?;
    loading.finish(Parts {
        info: model_info("sd", &sizes, DEFAULT_N_STEPS, DEFAULT_GUIDANCE),
        latents: LatentsLayout::picture(unet.c_out, kl.factor(), unet.min_side()),
        max_sequence_length: None,
        conditioner: Box::new(SdConditioner {
            n_tokens,
            n_layers: clip.n_layers,
            tokenizer,
            encoder,
        }),
        denoisers: Experts::one(denoiser),
        guidance: GuidanceRule::Classic,
        decoder: autoencoder.decoder,
        encoder: autoencoder.encoder,
        tasks,
        samplers,
        foreign_scheduler,
    })
}

/// What a U-Net and an autoencoder do beside text to picture.
pub(super) fn unet_tasks(
    folder: &Folder,
    unet: &UnetConfig,
    kl: &KlConfig,
    autoencoder: &Autoencoder,
) -> Result<Tasks, ModelError> {
    let is_inpainting = unet.c_in == unet.c_out + 1 + kl.n_latent;
    if unet.c_in != unet.c_out && !is_inpainting {
        let (c_in, c_out) = (unet.c_in, unet.c_out);
        let problem = format!(
            "the unet takes {c_in} channels and makes {c_out}; supported are as many, and for inpainting {} more",
            1 + kl.n_latent
        );
        return Err(components::unfit(folder, problem));
    }
    if is_inpainting && autoencoder.encoder.is_none() {
        let problem = "the unet is one for inpainting, but the vae has no weights of an encoder (encoder.conv_in.weight)";
        return Err(components::unfit(folder, problem.to_owned()));
    }
    Ok(Tasks {
        image_to_image: autoencoder.encoder.is_some(),
        channels: match is_inpainting {
            true => Channels::Inpaint,
            false => Channels::None,
        },
        needs_image: is_inpainting,
        ..Tasks::default()
    })
}

/// Sizes of what a U-Net and an autoencoder make, which must fit each other; `sample_size` is the default, height and width in latents.
pub(super) fn unet_sizes(
    folder: &Folder,
    unet: &UnetConfig,
    kl: &KlConfig,
    (height, width): (usize, usize),
) -> Result<Sizes, ModelError> {
    let made = ("the unet makes latents of so many channels:", unet.c_out);
    components::expect_equal(folder, made, ("the autoencoder has", kl.n_latent))?;
    let factor = kl.factor();
    if factor > MAX_SIDE_PX {
        let problem =
            format!("the autoencoder makes {factor} pixels of a latent, at most {MAX_SIDE_PX} are supported");
        return Err(components::unfit(folder, problem));
    }
    let grid = GRID_PX.max(factor);
    let side = |latents: usize| (latents * factor).next_multiple_of(grid).min(MAX_SIDE_PX);
    Ok(Sizes {
        grid,
        default: (side(width), side(height)),
        max_side: MAX_SIDE_PX,
    })
}

/// What a request may choose from.
pub(super) struct Samplers {
    /// The checkpoint's own first, if it is one of the two.
    pub(super) samplers: Vec<Box<dyn Sampler>>,
    pub(super) foreign_scheduler: Option<String>,
}

impl Samplers {
    /// `is_corrected` where the pipeline puts its own `steps_offset` and `clip_sample` in place of whatever the file says.
    pub(super) fn read(folder: &Folder, is_corrected: bool) -> Result<Self, ModelError> {
        let own = ["DDIMScheduler", "EulerDiscreteScheduler"];
        let known: Vec<&str> = own.iter().chain(&FOREIGN_SCHEDULERS).copied().collect();
        expect_class(folder, "scheduler", "scheduler", &known)?;
        let config = folder.config("scheduler")?;
        let error = |source: SamplerError| ModelError::Sampler {
            path: config.path().to_owned(),
            source,
        };
        let read = read_scheduler(&config, is_corrected, &error)?;
        let ddim = || Ddim::new(&read).map(|sampler| Box::new(sampler) as Box<dyn Sampler>);
        let euler = || Euler::new(&read).map(|sampler| Box::new(sampler) as Box<dyn Sampler>);
        let class = folder.class("scheduler").map_or("", |class| class.class.as_str());
        // What the checkpoint is made for must work; of the others, those that can carry out its settings are offered.
        let (first, others) = match own.iter().position(|own| *own == class) {
            Some(0) => (Some(ddim()), vec![euler()]),
            Some(_) => (Some(euler()), vec![ddim()]),
            None => (None, vec![ddim(), euler()]),
        };
        let foreign_scheduler = first.is_none().then(|| class.to_owned());
        let mut samplers: Vec<Box<dyn Sampler>> = Vec::new();
        samplers.extend(first.transpose().map_err(error)?);
        let mut refused = None;
        for other in others {
            match other {
                Ok(sampler) => samplers.push(sampler),
                Err(source) => refused = Some(source),
            }
        }
        match refused {
            Some(source) if samplers.is_empty() => Err(error(source)),
            _ => Ok(Self {
                samplers,
                foreign_scheduler,
            }),
        }
    }
}

/// The settings of whatever class, as far as our samplers read them.
fn read_scheduler(
    config: &Config,
    is_corrected: bool,
    error: &dyn Fn(SamplerError) -> ModelError,
) -> Result<DiscreteConfig, ModelError> {
    let defaults = DiscreteConfig::default();
    let flag = |key, default| config.opt_bool(key).map(|value| value.unwrap_or(default));
    let n_train = config.usize_or("num_train_timesteps", defaults.num_train_timesteps as usize)?;
    let name = |key, default: &'static str| config.opt_str(key).map(|name| name.unwrap_or(default));
    let beta_schedule = name("beta_schedule", defaults.beta_schedule.name())?;
    let prediction_type = name("prediction_type", defaults.prediction_type.name())?;
    let interpolation_type = name("interpolation_type", defaults.interpolation_type.name())?;
    let timestep_type = name("timestep_type", defaults.timestep_type.name())?;
    let final_sigmas_type = name("final_sigmas_type", defaults.final_sigmas_type.name())?;
    let timestep_spacing = config
        .opt_str("timestep_spacing")?
        .map(TimestepSpacing::from_name);
    let steps_offset = config.usize_or("steps_offset", 0)?;
    let clip_sample = flag("clip_sample", defaults.clip_sample)?;
    let read = DiscreteConfig {
        num_train_timesteps: u32::try_from(n_train).unwrap_or(0),
        beta_start: config.f64_or("beta_start", defaults.beta_start)?,
        beta_end: config.f64_or("beta_end", defaults.beta_end)?,
        beta_schedule: BetaSchedule::from_name(beta_schedule).map_err(error)?,
        trained_betas: trained_betas(config)?,
        rescale_betas_zero_snr: flag("rescale_betas_zero_snr", defaults.rescale_betas_zero_snr)?,
        prediction_type: PredictionType::from_name(prediction_type).map_err(error)?,
        timestep_spacing: timestep_spacing.transpose().map_err(error)?,
        steps_offset: match is_corrected {
            true => 1,
            false => u32::try_from(steps_offset).unwrap_or(u32::MAX),
        },
        clip_sample: clip_sample && !is_corrected,
        set_alpha_to_one: flag("set_alpha_to_one", defaults.set_alpha_to_one)?,
        thresholding: flag("thresholding", defaults.thresholding)?,
        interpolation_type: InterpolationType::from_name(interpolation_type).map_err(error)?,
        use_karras_sigmas: flag("use_karras_sigmas", defaults.use_karras_sigmas)?,
        use_exponential_sigmas: flag("use_exponential_sigmas", defaults.use_exponential_sigmas)?,
        use_beta_sigmas: flag("use_beta_sigmas", defaults.use_beta_sigmas)?,
        sigma_min: config.opt_f64("sigma_min")?,
        sigma_max: config.opt_f64("sigma_max")?,
        timestep_type: TimestepType::from_name(timestep_type).map_err(error)?,
        final_sigmas_type: FinalSigmas::from_name(final_sigmas_type).map_err(error)?,
    };
    // These would make another model of it: one that flows in a straight line.
    config.only("use_flow_sigmas", &[false.into(), Value::Null])?;
    config.only("use_dynamic_shifting", &[false.into(), Value::Null])?;
    config.only("shift_terminal", &[Value::Null])?;
    config.deny_unread(&SCHEDULER_KEYS_WITHOUT_EFFECT)?;
    Ok(read)
}

fn trained_betas(config: &Config) -> Result<Option<Vec<f64>>, ModelError> {
    let key = "trained_betas";
    match config.value(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            let betas = value
                .as_array()
                .map(|all| all.iter().map(Value::as_f64).collect());
            match betas {
                Some(Some(betas)) => Ok(Some(betas)),
                _ => Err(config.wrong(key, "a list of numbers or null").into()),
            }
        }
    }
}

/// The text side.
#[derive(Debug)]
struct SdConditioner {
    tokenizer: ClipTokenizer,
    encoder: ClipEncoder,
    n_layers: usize,
    n_tokens: usize,
}

impl Conditioner for SdConditioner {
    fn tokenize(
        &self,
        text: &str,
        what: &str,
        _: TextOptions,
        _: &[Image],
    ) -> std::result::Result<Tokenized, String> {
        let mut tokenized = Tokenized::default();
        components::push_clip_ids(
            &mut tokenized,
            &self.tokenizer,
            text,
            Reader {
                what,
                reader: "the model",
                n_tokens: self.n_tokens,
            },
        );
        Ok(tokenized)
    }

    fn max_clip_skip(&self) -> usize {
        self.n_layers
    }

    fn encode(&self, ctx: &Ctx<'_>, text: &Tokenized, args: &EncodeArgs<'_>) -> Result<Conditioning> {
        let tokens = self
            .encoder
            .forward(ctx, &text.fitted[0], args.options.clip_skip)?;
        Ok(Conditioning::of_tokens(tokens))
    }

    fn trace(
        &self,
        ctx: &Ctx<'_>,
        conditional: &Conditioning,
        unconditional: Option<&Conditioning>,
    ) -> Result<Vec<NamedTensor>> {
        trace_named(ctx, ENCODE_PROMPT_NAMES, conditional, unconditional)
    }
}
