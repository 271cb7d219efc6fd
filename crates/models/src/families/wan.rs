//! Wan 2.1 and 2.2: UMT5, a transformer over all frames (or two, for high and low noise), an autoencoder of videos, rectified flow.
//!
//! What is read and what is put in its place are those of diffusers' `WanPipeline` and `WanImageToVideoPipeline`. What a given first
//! frame is to the denoiser is told by the checkpoint: channels beside the latents, tokens of a CLIP vision tower as well, or a first
//! frame without noise.

use super::{
    components::{self, Loading, Reader, Sizes, expect_equal, expect_vocabulary, model_info, push_ids},
    schedulers::{self, Samplers},
};
use crate::{
    ModelError,
    conditioning::{
        Conditioner, Conditioning, ENCODE_PROMPT_NAMES, EncodeArgs, TextOptions, Tokenized, trace_named,
    },
    denoiser::{Wan, WanConfig},
    layout::TensorLayout,
    parts::{Channels, Experts, GuidanceRule, LatentsLayout, Opened, Parts, Tasks, Temporal},
    text::{
        T5Config, T5Encoder, T5Tokenizer,
        clean::clean_wan,
        clip_vision::{ClipVision, ClipVisionConfig},
        pictures::ClipPictures,
    },
    vae::CausalConfig,
};
use denoised_checkpoint::Folder;
use denoised_nn::{Ctx, Result};
use denoised_sampler::{FlowSigmas, Mu};
use denoised_tensor::TensorError;
use denoised_types::{Image, ModelInfo, NamedTensor, VideoInfo};

const DEFAULT_N_STEPS: u32 = 50;
const DEFAULT_GUIDANCE: f32 = 5.0;
const DEFAULT_SIZE: (usize, usize) = (832, 480);
const DEFAULT_N_FRAMES: u32 = 81;
/// Frames per second; those of models whose frames have timesteps of their own.
const FPS: u32 = 16;
const FPS_2: u32 = 24;
/// Text in tokens; shorter ones are followed by zeros that the denoiser sees.
const TEXT_LENGTH: (u32, u32) = (512, 512);
/// Which hidden state of the image encoder counts: the penultimate.
const N_SKIPPED_LAYERS: usize = 1;

/// Opens `WanPipeline`.
pub(super) fn open(folder: &Folder) -> std::result::Result<Opened, ModelError> {
    open_for(folder, false)
}

/// Opens `WanImageToVideoPipeline`.
pub(super) fn open_image_to_video(folder: &Folder) -> std::result::Result<Opened, ModelError> {
    open_for(folder, true)
}

fn open_for(folder: &Folder, needs_image: bool) -> std::result::Result<Opened, ModelError> {
    let options = folder.options();
    let boundary_ratio = options.opt_f64("boundary_ratio")?;
    let has_frame_timesteps = options.bool_or("expand_timesteps", false)?;
    options.deny_unread(&[])?;
    let wan = transformer(folder, "transformer")?;
    let wan_2 = match (folder.class("transformer_2"), boundary_ratio) {
        (None, None) => None,
        (Some(_), Some(ratio)) => Some((ratio, transformer(folder, "transformer_2")?)),
        _ => {
            let problem = "transformer_2 and boundary_ratio come only together".to_owned();
            return Err(components::unfit(folder, problem));
        }
    };
    let vae = components::config(folder, "vae", "autoencoder", &["AutoencoderKLWan"])?;
    let vae = CausalConfig::read_wan(&vae)?;
    let t5 = components::config(folder, "text_encoder", "text encoder", &["UMT5EncoderModel"])?;
    let t5 = T5Config::read(&t5)?;
    let tokenizer = components::t5_tokenizer(folder, "tokenizer")?;
    let vision = match wan.n_image {
        None => None,
        Some(n_image) if needs_image => Some(image_encoder(folder, n_image)?),
        Some(_) => {
            let problem = "the transformer takes tokens of a picture, the pipeline has none".to_owned();
            return Err(components::unfit(folder, problem));
        }
    };
    let (channels, n_beside) = match needs_image && !has_frame_timesteps {
        true => (Channels::FirstFrame, vae.temporal_factor() + vae.n_latent),
        false => (Channels::None, 0),
    };

    expect_vocabulary(folder, tokenizer.max_id(), t5.vocab_size, "")?;
    for config in std::iter::once(&wan).chain(wan_2.iter().map(|(_, config)| config)) {
        let n_seen = vae.n_latent + n_beside;
        for (one, other) in [
            (
                ("channels of latents:", vae.n_latent),
                ("the transformer makes", config.c_out),
            ),
            (
                ("channels of latents and of what is beside them:", n_seen),
                ("the transformer takes", config.c_in),
            ),
            (
                ("channels of the text encoder:", t5.n_channels),
                ("the transformer takes", config.n_text),
            ),
            (
                ("side of a patch of the transformer:", wan.patch),
                ("of the other", config.patch),
            ),
            (
                ("channels of a picture's tokens:", wan.n_image.unwrap_or(0)),
                ("of the other", config.n_image.unwrap_or(0)),
            ),
        ] {
            expect_equal(folder, one, other)?;
        }
    }

    let Samplers {
        samplers,
        foreign_scheduler,
    } = schedulers::flow(folder, FlowSigmas::default(), Mu::default())?;
    let n_train = folder
        .config("scheduler")?
        .usize_or("num_train_timesteps", 1000)?;

    let (patch, max_positions) = (wan.patch, wan.max_positions);
    let (factor, step) = (vae.factor(), vae.temporal_factor());
    let mut names = vec!["transformer", "vae", "text_encoder"];
    names.extend(wan_2.as_ref().map(|_| "transformer_2"));
    names.extend(vision.as_ref().map(|_| "image_encoder"));
    let mut loading = Loading::open(folder, &names)?;
    let mut denoisers = Experts::one(denoiser(&mut loading, "transformer", wan));
    if let Some((ratio, config)) = wan_2 {
        let boundary = (ratio * n_train as f64) as f32;
        denoisers.low_noise = Some((
            boundary,
            Box::new(denoiser(&mut loading, "transformer_2", config)),
        ));
    }
    let conditioner = WanConditioner {
        tokenizer,
        encoder: loading.t5("text_encoder", t5),
        vision: vision.map(|(pictures, config)| {
            loading.ignore(
                "image_encoder",
                ClipVision::unread_names(&config, N_SKIPPED_LAYERS),
            );
            let mut scope = loading.at("image_encoder");
            (pictures, ClipVision::new(&mut scope, config, N_SKIPPED_LAYERS))
        }),
    };
    let autoencoder = loading.causal(&vae);
    if needs_image && autoencoder.encoder.is_none() {
        let problem = "pictures are encoded, and vae has no encoder.conv_in.weight".to_owned();
        return Err(components::unfit(folder, problem));
    }
    let tasks = Tasks {
        channels,
        is_first_frame_kept: has_frame_timesteps && autoencoder.encoder.is_some(),
        needs_image,
        ..Tasks::default()
    };
    let sizes = Sizes {
        grid: patch * factor,
        default: DEFAULT_SIZE,
        max_side: max_positions * patch * factor,
    };
    let video = VideoInfo {
        default_n_frames: DEFAULT_N_FRAMES,
        frame_step: u32::try_from(step).unwrap_or(u32::MAX),
        fps: if has_frame_timesteps { FPS_2 } else { FPS },
    };
    loading.finish(Parts {
        info: ModelInfo {
            video: Some(video),
            ..model_info("wan", &sizes, DEFAULT_N_STEPS, DEFAULT_GUIDANCE)
        },
        latents: LatentsLayout {
            noise: TensorLayout::Ncfhw,
            given: TensorLayout::Ncfhw,
            steps: TensorLayout::Ncfhw,
            patch,
            temporal: Some(Temporal {
                step,
                most: 1 + step * (max_positions - 1),
            }),
            ..LatentsLayout::picture(vae.n_latent, factor, patch)
        },
        max_sequence_length: Some(TEXT_LENGTH),
        conditioner: Box::new(conditioner),
        denoisers,
        guidance: GuidanceRule::Classic,
        decoder: autoencoder.decoder,
        encoder: autoencoder.encoder,
        tasks,
        samplers,
        foreign_scheduler,
    })
}

fn transformer(folder: &Folder, component: &str) -> std::result::Result<WanConfig, ModelError> {
    let config = components::config(folder, component, "denoiser", &["WanTransformer3DModel"])?;
    WanConfig::read(&config)
}

/// What makes tokens of `n_image` channels of a picture.
fn image_encoder(
    folder: &Folder,
    n_image: usize,
) -> std::result::Result<(ClipPictures, ClipVisionConfig), ModelError> {
    let config = components::config(folder, "image_encoder", "image encoder", &["CLIPVisionModel"])?;
    let config = ClipVisionConfig::read(&config)?;
    let n_made = ("channels of the image encoder:", config.n_channels);
    expect_equal(folder, n_made, ("the transformer takes", n_image))?;
    let pictures = ClipPictures::open(folder, "image_processor")?;
    if pictures.out_size() != Some((config.side, config.side)) {
        let side = config.side;
        let problem =
            format!("the image encoder takes pictures of {side}x{side}, image_processor makes others");
        return Err(components::unfit(folder, problem));
    }
    Ok((pictures, config))
}

fn denoiser(loading: &mut Loading, component: &str, config: WanConfig) -> Wan {
    loading.ignore(component, Wan::unread_names(&config));
    Wan::new(&mut loading.at(component), config)
}

fn too_narrow(image: &Image) -> String {
    format!("a picture of {}x{} is too narrow", image.width, image.height)
}

/// The text side, and what a picture is told by beside its latents.
#[derive(Debug)]
struct WanConditioner {
    tokenizer: T5Tokenizer,
    encoder: T5Encoder,
    vision: Option<(ClipPictures, ClipVision)>,
}

impl Conditioner for WanConditioner {
    fn tokenize(
        &self,
        text: &str,
        what: &str,
        options: TextOptions,
        images: &[Image],
    ) -> std::result::Result<Tokenized, String> {
        if let (Some((pictures, _)), Some(image)) = (&self.vision, images.first())
            && !pictures.takes(image)
        {
            return Err(too_narrow(image));
        }
        let mut tokenized = Tokenized::default();
        let n_tokens = options.max_sequence_length;
        let cleaned = self.tokenizer.encode(&clean_wan(text));
        let fitted = self.tokenizer.cut(&cleaned, n_tokens);
        let reader = Reader {
            what,
            reader: "UMT5",
            n_tokens,
        };
        push_ids(&mut tokenized, self.tokenizer.encode(text), fitted, reader);
        Ok(tokenized)
    }

    fn max_clip_skip(&self) -> usize {
        0
    }

    fn encode(&self, ctx: &Ctx<'_>, text: &Tokenized, args: &EncodeArgs<'_>) -> Result<Conditioning> {
        let tokens = self.encoder.forward(ctx, &text.fitted[0])?;
        let image_tokens = match (&self.vision, args.images.first()) {
            (Some((pictures, vision)), Some(image)) => {
                let pixels = pictures.apply(image).ok_or_else(|| TensorError::Operand {
                    op: "wan",
                    detail: too_narrow(image),
                })?;
                Some(vision.forward(ctx, &pixels)?)
            }
            _ => None,
        };
        let n_missing = args.options.max_sequence_length - tokens.dim(1);
        if n_missing == 0 {
            return Ok(Conditioning {
                image_tokens,
                ..Conditioning::of_tokens(tokens)
            });
        }
        // One token of zeros stands for all of them.
        let padded = ctx.alloc(&[1, tokens.dim(1) + 1, tokens.dim(2)])?;
        ctx.backend.fill(&padded, 0.0)?;
        ctx.backend.copy(&tokens, &padded.narrow(1, 0, tokens.dim(1))?)?;
        Ok(Conditioning {
            n_last_repeats: n_missing,
            image_tokens,
            ..Conditioning::of_tokens(padded)
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
