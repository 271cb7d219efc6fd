//! Stable Diffusion XL: two CLIP text encoders, a U-Net that is also told sizes, an autoencoder of 4 channels, noise schedules of
//! discrete timesteps.
//!
//! What is read and what is put in its place are those of diffusers' `StableDiffusionXLPipeline`; a refiner, which has the second text
//! encoder only, and checkpoints for inpainting are opened as well. No watermark is put on pictures.

use super::{
    components::{self, Loading, Reader, copy_columns, model_info},
    schedulers::{self, DiscreteRule, Samplers},
    sd::{unet_guidance, unet_sizes, unet_tasks},
};
use crate::{
    ModelError,
    conditioning::{
        Conditioner, Conditioning, ENCODE_PROMPT_NAMES, EncodeArgs, TextOptions, Tokenized, trace_named,
    },
    denoiser::{Unet, UnetConfig},
    parts::{Experts, LatentsLayout, Opened, Parts, Tasks},
    text::{ClipConfig, ClipEncoder, ClipText, ClipTokenizer},
};
use denoised_checkpoint::Folder;
use denoised_nn::{Ctx, Result};
use denoised_types::{Image, NamedTensor};

const DEFAULT_N_STEPS: u32 = 50;
const DEFAULT_GUIDANCE: f32 = 5.0;
/// Which hidden state of CLIP counts: the penultimate.
const N_SKIPPED_LAYERS: usize = 1;
/// How pleasing the picture and what it should not be are said to be, to refiners: diffusers' defaults.
const AESTHETIC_SCORES: [f32; 2] = [6.0, 2.5];

pub(super) fn open(folder: &Folder) -> std::result::Result<Opened, ModelError> {
    let options = folder.options();
    let forces_zeros = options.bool_or("force_zeros_for_empty_prompt", true)?;
    let is_scored = options.bool_or("requires_aesthetics_score", false)?;
    options.deny_unread(&[])?;
    let has_first = folder.class("text_encoder").is_some();
    let first = match has_first {
        true => {
            let config = components::config(folder, "text_encoder", "text encoder", &["CLIPTextModel"])?;
            let tokenizer = components::clip_tokenizer(folder, "tokenizer")?;
            Some((tokenizer, ClipConfig::read(&config)?))
        }
        false => None,
    };
    let role = "text encoder";
    let config = components::config(folder, "text_encoder_2", role, &["CLIPTextModelWithProjection"])?;
    let clip_2 = ClipConfig::read(&config)?;
    let tokenizer_2 = components::clip_tokenizer(folder, "tokenizer_2")?;
    let unet = components::config(folder, "unet", "denoiser", &["UNet2DConditionModel"])?;
    let unet = UnetConfig::read(&unet)?;
    let kl = components::kl(folder)?
        .without_shift()
        .with_statistics()
        .with_upcast();
    let Samplers {
        samplers,
        foreign_scheduler,
    } = schedulers::discrete(folder, DiscreteRule::AsWritten)?;

    let n_tokens = tokenizer_2.max_length();
    components::expect_clip(folder, (&tokenizer_2, n_tokens), &clip_2, " 2")?;
    let mut n_channels = clip_2.n_channels;
    let mut n_layers = clip_2.n_layers;
    if let Some((tokenizer, clip)) = &first {
        components::expect_clip(folder, (tokenizer, n_tokens), clip, "")?;
        let made = ("tokens of the tokenizer:", tokenizer.max_length());
        components::expect_equal(folder, made, ("of tokenizer 2:", n_tokens))?;
        n_channels += clip.n_channels;
        n_layers = n_layers.min(clip.n_layers);
    }
    if let Some(n_context) = unet.n_context() {
        let given = ("channels of the text encoders:", n_channels);
        components::expect_equal(folder, given, ("the unet takes", n_context))?;
    }
    // Height and width twice and the corner of the crop; refiners are told a score instead of the second size.
    let n_numbers = if is_scored { 5 } else { 6 };
    let (n_given, n_added) = match unet.addition {
        Some(added) => (clip_2.n_projected + n_numbers * added.n_sinusoids, added.n_in),
        None => (clip_2.n_projected, 0),
    };
    let given = ("channels of pooled text and sizes:", n_given);
    components::expect_equal(folder, given, ("the unet takes", n_added))?;
    let side = unet.sample_size.0;
    let sizes = unet_sizes(folder, &unet, &kl, (side, side))?;

    let mut names = vec!["unet", "vae", "text_encoder_2"];
    names.extend(has_first.then_some("text_encoder"));
    let mut loading = Loading::open(folder, &names)?;
    let conditioner = SdxlConditioner {
        first: first.map(|(tokenizer, clip)| (tokenizer, loading.clip("text_encoder", &clip))),
        second: (tokenizer_2, loading.clip_text("text_encoder_2", &clip_2)),
        n_layers,
        n_tokens,
        n_channels,
        n_pooled: clip_2.n_projected,
        forces_zeros,
        is_scored,
        has_guidance: unet.n_guidance.is_some(),
    };
    let denoiser = Unet::new(&mut loading.at("unet"), &unet);
    let autoencoder = loading.kl(&kl);
    let tasks = Tasks {
        default_strengths: Some((0.3, 0.9999)),
        ..unet_tasks(folder, &unet, &kl, &autoencoder)?
    };
    loading.finish(Parts {
        info: model_info("sdxl", &sizes, DEFAULT_N_STEPS, DEFAULT_GUIDANCE),
        latents: LatentsLayout::picture(unet.c_out, kl.factor(), unet.min_side()),
        max_sequence_length: None,
        conditioner: Box::new(conditioner),
        denoisers: Experts::one(denoiser),
        guidance: unet_guidance(&unet),
        decoder: autoencoder.decoder,
        encoder: autoencoder.encoder,
        tasks,
        samplers,
        foreign_scheduler,
    })
}

/// The text side.
#[derive(Debug)]
struct SdxlConditioner {
    first: Option<(ClipTokenizer, ClipEncoder)>,
    second: (ClipTokenizer, ClipText),
    /// Of the encoder with fewer.
    n_layers: usize,
    n_tokens: usize,
    n_channels: usize,
    n_pooled: usize,
    /// Whether an absent negative prompt is zeros, and not the empty text.
    forces_zeros: bool,
    is_scored: bool,
    /// Whether the denoiser is told the guidance scale.
    has_guidance: bool,
}

impl SdxlConditioner {
    /// What the denoiser is told of the picture: its size, which counts as that of the original too, and that nothing was cut off. Behind
    /// that the guidance scale less one, if it is an input.
    fn numbers(&self, args: &EncodeArgs<'_>) -> Vec<f32> {
        let size = [args.height as f32, args.width as f32];
        let mut numbers = vec![size[0], size[1], 0.0, 0.0];
        match self.is_scored {
            true => numbers.push(AESTHETIC_SCORES[usize::from(args.is_negative)]),
            false => numbers.extend(size),
        }
        numbers.extend(self.has_guidance.then_some(args.guidance - 1.0));
        numbers
    }
}

impl Conditioner for SdxlConditioner {
    fn tokenize(
        &self,
        text: &str,
        what: &str,
        _: TextOptions,
        _: &[Image],
    ) -> std::result::Result<Tokenized, String> {
        let reader = Reader {
            what,
            reader: "the model",
            n_tokens: self.n_tokens,
        };
        let mut tokenized = Tokenized::default();
        match &self.first {
            Some((tokenizer, _)) => components::push_clip_ids(&mut tokenized, tokenizer, text, reader),
            None => {
                tokenized.raw.push(Vec::new());
                tokenized.fitted.push(Vec::new());
            }
        }
        components::push_clip_ids(&mut tokenized, &self.second.0, text, reader);
        Ok(tokenized)
    }

    fn max_clip_skip(&self) -> usize {
        self.n_layers - N_SKIPPED_LAYERS
    }

    fn encode(&self, ctx: &Ctx<'_>, text: &Tokenized, args: &EncodeArgs<'_>) -> Result<Conditioning> {
        let tokens = ctx.alloc(&[1, self.n_tokens, self.n_channels])?;
        let numbers = self.numbers(args);
        let numbers = ctx.upload_f32(&numbers, &[1, numbers.len()])?;
        let pooled = if text.is_absent && self.forces_zeros {
            ctx.backend.fill(&tokens, 0.0)?;
            let pooled = ctx.alloc(&[1, self.n_pooled])?;
            ctx.backend.fill(&pooled, 0.0)?;
            pooled
        } else {
            let n_skipped = N_SKIPPED_LAYERS + args.options.clip_skip;
            let mut column = 0;
            if let Some((_, encoder)) = &self.first {
                let hidden = encoder.hidden(ctx, &text.fitted[0], n_skipped)?;
                copy_columns(ctx, &hidden, &tokens, column)?;
                column += hidden.dim(2);
            }
            let out = self.second.1.forward(ctx, &text.fitted[1], n_skipped)?;
            copy_columns(ctx, &out.tokens, &tokens, column)?;
            out.pooled
        };
        Ok(Conditioning {
            pooled: Some(pooled),
            numbers: Some(numbers),
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
