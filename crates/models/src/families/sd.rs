//! Stable Diffusion 1 and 2: a CLIP text encoder, a U-Net, an autoencoder of 4 channels, noise schedules of discrete timesteps.
//!
//! What is read and what is put in its place are those of diffusers' `StableDiffusionPipeline`. Its safety checker is no part of what
//! is computed here: a checkpoint may bring one, and it is not run.

use super::{
    components::{self, Autoencoder, Loading, Reader, Sizes, model_info},
    schedulers::{self, DiscreteRule, Samplers},
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
use denoised_checkpoint::Folder;
use denoised_nn::{Ctx, Result};
use denoised_types::{Image, NamedTensor};

/// Steps and guidance of `StableDiffusionPipeline`, and of `LatentConsistencyModelPipeline`.
const DEFAULTS: (u32, f32) = (50, 7.5);
const LCM_DEFAULTS: (u32, f32) = (4, 8.5);
/// The pipeline refuses other sizes, whatever the autoencoder makes of a latent.
const GRID_PX: usize = 8;
/// Nothing in the network ends here; beyond, attention over all positions takes hours.
const MAX_SIDE_PX: usize = 4096;

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
    let rule = match folder.pipeline_class() {
        "StableDiffusionInpaintPipeline" => DiscreteRule::StableDiffusionInpaint,
        _ => DiscreteRule::StableDiffusion,
    };
    let Samplers {
        samplers,
        foreign_scheduler,
    } = schedulers::discrete(folder, rule)?;

    let n_tokens = tokenizer.max_length();
    components::expect_clip(folder, (&tokenizer, n_tokens), &clip, "")?;
    if let Some(n_context) = unet.n_context() {
        let given = ("channels of the text encoder:", clip.n_channels);
        components::expect_equal(folder, given, ("the unet takes", n_context))?;
    }
    if unet.addition.is_some() {
        let problem = "the unet is also told a pooled text and sizes, which this pipeline does not have";
        return Err(components::unfit(folder, problem.to_owned()));
    }
    let sizes = unet_sizes(folder, &unet, &kl, unet.sample_size)?;

    let (n_steps, guidance) = match folder.pipeline_class() {
        "LatentConsistencyModelPipeline" => LCM_DEFAULTS,
        _ => DEFAULTS,
    };

    let mut loading = Loading::open(folder, &["unet", "vae", "text_encoder"])?;
    let encoder = loading.clip("text_encoder", &clip);
    let denoiser = Unet::new(&mut loading.at("unet"), &unet);
    let autoencoder = loading.kl(&kl);
    let tasks = unet_tasks(folder, &unet, &kl, &autoencoder)?;
    loading.finish(Parts {
        info: model_info("sd", &sizes, n_steps, guidance),
        latents: LatentsLayout::picture(unet.c_out, kl.factor(), unet.min_side()),
        max_sequence_length: None,
        conditioner: Box::new(SdConditioner {
            n_tokens,
            n_layers: clip.n_layers,
            tokenizer,
            encoder,
            has_guidance: unet.n_guidance.is_some(),
        }),
        denoisers: Experts::one(denoiser),
        guidance: unet_guidance(&unet),
        decoder: autoencoder.decoder,
        encoder: autoencoder.encoder,
        tasks,
        samplers,
        foreign_scheduler,
    })
}

/// Distilled U-Nets take the guidance scale as an input.
pub(super) fn unet_guidance(unet: &UnetConfig) -> GuidanceRule {
    match unet.n_guidance {
        Some(_) => GuidanceRule::Embedded,
        None => GuidanceRule::Classic,
    }
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

/// The text side.
#[derive(Debug)]
struct SdConditioner {
    tokenizer: ClipTokenizer,
    encoder: ClipEncoder,
    n_layers: usize,
    n_tokens: usize,
    /// Whether the denoiser is told the guidance scale.
    has_guidance: bool,
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
        let numbers = match self.has_guidance {
            true => Some(ctx.upload_f32(&[args.guidance - 1.0], &[1, 1])?),
            false => None,
        };
        Ok(Conditioning {
            numbers,
            ..Conditioning::of_tokens(tokens)
        })
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
