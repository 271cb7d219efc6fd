//! Stable Diffusion 3 and 3.5: two CLIP text encoders and T5, MMDiT, 16-channel autoencoder, rectified flow.
//!
//! As in diffusers' `StableDiffusion3Pipeline`, all encoders are given the same prompt, T5 without a mask of its padding. Without T5 its
//! tokens are zeros.

use super::{
    components::{self, Loading, Reader, Sizes, copy_columns, model_info},
    schedulers::{self, Samplers},
};
use crate::{
    ModelError,
    conditioning::{
        Conditioner, Conditioning, ENCODE_PROMPT_NAMES, EncodeArgs, TextOptions, Tokenized, trace_named,
    },
    denoiser::{Mmdit, MmditConfig},
    parts::{Experts, GuidanceRule, LatentsLayout, Opened, Parts, Tasks},
    text::{ClipConfig, ClipText, ClipTokenizer, T5Config, T5Encoder, T5Tokenizer},
    vae::KlConfig,
};
use denoised_checkpoint::Folder;
use denoised_nn::{Ctx, Result};
use denoised_sampler::{FlowSigmas, Mu};
use denoised_types::{Image, NamedTensor};

const DEFAULT_N_STEPS: u32 = 28;
const DEFAULT_GUIDANCE: f32 = 7.0;
const T5_LENGTH: (u32, u32) = (256, 512);
/// Which hidden state of CLIP counts: the penultimate.
const N_SKIPPED_LAYERS: usize = 1;

pub(super) fn open(folder: &Folder) -> Result<Opened, ModelError> {
    folder.options().deny_unread(&[])?;
    let clip = |component| {
        let classes = ["CLIPTextModelWithProjection"];
        ClipConfig::read(&components::config(folder, component, "text encoder", &classes)?)
    };
    let clips = [clip("text_encoder")?, clip("text_encoder_2")?];
    let t5 = match folder.class("text_encoder_3") {
        None => None,
        Some(_) => {
            let config = components::config(folder, "text_encoder_3", "text encoder", &["T5EncoderModel"])?;
            let tokenizer = components::t5_tokenizer(folder, "tokenizer_3")?;
            Some((tokenizer, T5Config::read(&config)?))
        }
    };
    let mmdit = components::config(folder, "transformer", "denoiser", &["SD3Transformer2DModel"])?;
    let mmdit = MmditConfig::read(&mmdit)?;
    let kl = components::kl(folder)?;
    let tokenizers = [
        components::clip_tokenizer(folder, "tokenizer")?,
        components::clip_tokenizer(folder, "tokenizer_2")?,
    ];
    check_fit(folder, &clips, &tokenizers, t5.as_ref(), &mmdit, &kl)?;
    let Samplers {
        samplers,
        foreign_scheduler,
    } = schedulers::flow(folder, FlowSigmas::Scheduler, Mu::Linear)?;

    let mut names = vec!["transformer", "vae", "text_encoder", "text_encoder_2"];
    names.extend(t5.as_ref().map(|_| "text_encoder_3"));
    let mut loading = Loading::open(folder, &names)?;
    let [tokenizer, tokenizer_2] = tokenizers;
    let conditioner = Sd3Conditioner {
        // diffusers takes the first tokenizer's length for both.
        n_tokens: tokenizer.max_length(),
        encoders: [
            (tokenizer, loading.clip_text("text_encoder", &clips[0])),
            (tokenizer_2, loading.clip_text("text_encoder_2", &clips[1])),
        ],
        t5: t5.map(|(tokenizer, config)| (tokenizer, loading.t5("text_encoder_3", config))),
        n_pooled: mmdit.n_pooled,
        n_layers: clips[0].n_layers.min(clips[1].n_layers),
        n_joint: mmdit.n_joint,
    };
    loading.ignore("transformer", Mmdit::unread_names(&mmdit));
    let denoiser = Mmdit::new(&mut loading.at("transformer"), mmdit.clone());
    let autoencoder = loading.kl(&kl);
    let factor = kl.factor();
    let side = mmdit.sample_size * factor;
    let sizes = Sizes {
        grid: mmdit.patch * factor,
        default: (side, side),
        max_side: mmdit.max_patches * mmdit.patch * factor,
    };
    loading.finish(Parts {
        info: model_info("sd3", &sizes, DEFAULT_N_STEPS, DEFAULT_GUIDANCE),
        latents: LatentsLayout {
            patch: mmdit.patch,
            ..LatentsLayout::picture(mmdit.c_in, factor, mmdit.patch)
        },
        max_sequence_length: Some(T5_LENGTH),
        conditioner: Box::new(conditioner),
        denoisers: Experts::one(denoiser),
        guidance: GuidanceRule::Classic,
        decoder: autoencoder.decoder,
        tasks: Tasks {
            image_to_image: autoencoder.encoder.is_some(),
            default_strengths: Some((0.6, 0.6)),
            ..Tasks::default()
        },
        encoder: autoencoder.encoder,
        samplers,
        foreign_scheduler,
    })
}

/// Numbers that two components must agree on.
fn check_fit(
    folder: &Folder,
    clips: &[ClipConfig; 2],
    tokenizers: &[ClipTokenizer; 2],
    t5: Option<&(T5Tokenizer, T5Config)>,
    mmdit: &MmditConfig,
    kl: &KlConfig,
) -> Result<(), ModelError> {
    let n_tokens = tokenizers[0].max_length();
    for ((clip, tokenizer), suffix) in clips.iter().zip(tokenizers).zip(["", " 2"]) {
        components::expect_clip(folder, (tokenizer, n_tokens), clip, suffix)?;
    }
    if let Some((tokenizer, config)) = t5 {
        components::expect_vocabulary(folder, tokenizer.max_id(), config.vocab_size, " 3")?;
        let given = ("channels of text encoder 3:", config.n_channels);
        components::expect_equal(folder, given, ("the transformer takes", mmdit.n_joint))?;
    }
    let n_channels = clips[0].n_channels + clips[1].n_channels;
    if n_channels > mmdit.n_joint {
        let problem = format!(
            "the text encoders give {n_channels} channels, the transformer takes {}",
            mmdit.n_joint
        );
        return Err(components::unfit(folder, problem));
    }
    let n_pooled = clips[0].n_projected + clips[1].n_projected;
    let given = ("channels that the text encoders pool to:", n_pooled);
    components::expect_equal(folder, given, ("the transformer takes", mmdit.n_pooled))?;
    let made = ("the transformer makes latents of so many channels:", mmdit.c_in);
    components::expect_equal(folder, made, ("the autoencoder takes", kl.n_latent))
}

/// The text side.
#[derive(Debug)]
struct Sd3Conditioner {
    encoders: [(ClipTokenizer, ClipText); 2],
    t5: Option<(T5Tokenizer, T5Encoder)>,
    n_pooled: usize,
    /// Of the encoder with fewer.
    n_layers: usize,
    n_tokens: usize,
    n_joint: usize,
}

impl Conditioner for Sd3Conditioner {
    fn tokenize(
        &self,
        text: &str,
        what: &str,
        options: TextOptions,
        _: &[Image],
    ) -> std::result::Result<Tokenized, String> {
        let mut tokenized = Tokenized::default();
        let reader = Reader {
            what,
            reader: if self.t5.is_some() { "CLIP" } else { "the model" },
            n_tokens: self.n_tokens,
        };
        for (tokenizer, _) in &self.encoders {
            components::push_clip_ids(&mut tokenized, tokenizer, text, reader);
        }
        if let Some((tokenizer, _)) = &self.t5 {
            let n_tokens = options.max_sequence_length;
            let raw = tokenizer.encode(text);
            let fitted = tokenizer.fit(&raw, n_tokens);
            let reader = Reader {
                reader: "T5",
                n_tokens,
                ..reader
            };
            components::push_ids(&mut tokenized, raw, fitted, reader);
        }
        Ok(tokenized)
    }

    fn max_clip_skip(&self) -> usize {
        self.n_layers - N_SKIPPED_LAYERS
    }

    fn encode(&self, ctx: &Ctx<'_>, text: &Tokenized, args: &EncodeArgs<'_>) -> Result<Conditioning> {
        let options = args.options;
        // CLIP's tokens side by side, padded with zeros; behind them T5's, or one zero token for all of an absent T5's.
        let t5 = match &self.t5 {
            Some((_, encoder)) => Some(encoder.forward(ctx, &text.fitted[self.encoders.len()])?),
            None => None,
        };
        let n_behind = t5.as_ref().map_or(1, |tokens| tokens.dim(1));
        let tokens = ctx.alloc(&[1, self.n_tokens + n_behind, self.n_joint])?;
        ctx.backend.fill(&tokens, 0.0)?;
        if let Some(t5) = &t5 {
            ctx.backend
                .copy(t5, &tokens.narrow(1, self.n_tokens, n_behind)?)?;
        }
        let pooled = ctx.alloc(&[1, self.n_pooled])?;
        let of_clip = tokens.narrow(1, 0, self.n_tokens)?;
        let (mut column, mut pooled_column) = (0, 0);
        for (encoder_idx, (_, encoder)) in self.encoders.iter().enumerate() {
            let out = encoder.forward(
                ctx,
                &text.fitted[encoder_idx],
                N_SKIPPED_LAYERS + options.clip_skip,
            )?;
            copy_columns(ctx, &out.tokens, &of_clip, column)?;
            copy_columns(ctx, &out.pooled, &pooled, pooled_column)?;
            column += out.tokens.dim(2);
            pooled_column += out.pooled.dim(1);
        }
        Ok(Conditioning {
            n_last_repeats: match t5 {
                Some(_) => 1,
                None => options.max_sequence_length,
            },
            pooled: Some(pooled),
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
