//! Stable Diffusion 3 and 3.5: two CLIP text encoders and T5, MMDiT, 16-channel autoencoder, rectified flow.
//!
//! As in diffusers' `StableDiffusion3Pipeline`, all encoders are given the same prompt, T5 without a mask of its padding. Without T5 its
//! tokens are zeros.

use super::expect_class;
use crate::{
    ModelError,
    conditioning::{
        Conditioner, Conditioning, ENCODE_PROMPT_NAMES, EncodeArgs, TextOptions, Tokenized, cut_warning,
        trace_named,
    },
    denoiser::{Mmdit, MmditConfig},
    parts::{Experts, GuidanceRule, LatentsLayout, Opened, Parts, Tasks},
    text::{ClipConfig, ClipText, ClipTokenizer, T5Config, T5Encoder, T5Tokenizer},
    vae::{KL_UNREAD_NAMES, KlConfig, KlDecoder},
};
use denoised_checkpoint::Folder;
use denoised_nn::{Ctx, Declare, Result};
use denoised_sampler::{FlowEuler, FlowEulerConfig, Sampler};
use denoised_tensor::Tensor;
use denoised_types::{Image, ModelInfo, NamedTensor};

const DEFAULT_N_STEPS: u32 = 28;
const DEFAULT_GUIDANCE: f32 = 7.0;
const T5_LENGTH: (u32, u32) = (256, 512);
/// Which hidden state of CLIP counts: the penultimate.
const N_SKIPPED_LAYERS: usize = 1;

pub(super) fn open(folder: &Folder) -> Result<Opened, ModelError> {
    folder.options().deny_unread(&[])?;
    expect_class(folder, "text_encoder_3", "text encoder", &["T5EncoderModel"])?;
    expect_class(
        folder,
        "tokenizer_3",
        "tokenizer",
        &["T5Tokenizer", "T5TokenizerFast"],
    )?;
    for component in ["text_encoder", "text_encoder_2"] {
        expect_class(
            folder,
            component,
            "text encoder",
            &["CLIPTextModelWithProjection"],
        )?;
    }
    for component in ["tokenizer", "tokenizer_2"] {
        expect_class(
            folder,
            component,
            "tokenizer",
            &["CLIPTokenizer", "CLIPTokenizerFast"],
        )?;
    }
    expect_class(folder, "transformer", "denoiser", &["SD3Transformer2DModel"])?;
    expect_class(folder, "vae", "autoencoder", &["AutoencoderKL"])?;
    expect_class(
        folder,
        "scheduler",
        "scheduler",
        &["FlowMatchEulerDiscreteScheduler"],
    )?;

    let clips = ["text_encoder", "text_encoder_2"].map(|name| ClipConfig::read(&folder.config(name)?));
    let [clip, clip_2] = clips;
    let clips = [clip?, clip_2?];
    let mmdit = MmditConfig::read(&folder.config("transformer")?)?;
    let kl = KlConfig::read(&folder.config("vae")?)?;
    let tokenizers = [
        ClipTokenizer::open(folder, "tokenizer")?,
        ClipTokenizer::open(folder, "tokenizer_2")?,
    ];
    check_fit(folder, &clips, &tokenizers, &mmdit, &kl)?;
    let t5 = open_t5(folder, mmdit.n_joint)?;

    let mut components = vec!["transformer", "vae", "text_encoder", "text_encoder_2"];
    components.extend(t5.as_ref().map(|_| "text_encoder_3"));
    let weights = folder.weights(&components)?;
    let mut declare = Declare::new(weights.names());
    let first = ClipText::new(&mut declare.at("text_encoder/"), &clips[0]);
    let second = ClipText::new(&mut declare.at("text_encoder_2/"), &clips[1]);
    let t5 = t5.map(|(tokenizer, config)| {
        let encoder = T5Encoder::new(&mut declare.at("text_encoder_3/"), config);
        (tokenizer, encoder)
    });
    let denoiser = Mmdit::new(&mut declare.at("transformer/"), mmdit.clone());
    let decoder = KlDecoder::new(&mut declare.at("vae/"), &kl);
    let specs = declare.finish();
    let mut unread = vec!["*.embeddings.position_ids".to_owned()];
    unread.extend(KL_UNREAD_NAMES.map(|name| format!("vae/{name}")));
    unread.extend(T5Encoder::UNREAD_NAMES.map(|name| format!("text_encoder_3/{name}")));
    unread.extend(
        Mmdit::unread_names(&mmdit)
            .iter()
            .map(|name| format!("transformer/{name}")),
    );
    let unread: Vec<&str> = unread.iter().map(String::as_str).collect();
    weights.check(&specs, &unread)?;

    let sampler = flow_euler(folder)?;
    let factor = kl.factor();
    let px = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let default_px = px(mmdit.sample_size * factor);
    let info = ModelInfo {
        family: "sd3".to_owned(),
        grid_px: px(mmdit.patch * factor),
        default_size: (default_px, default_px),
        max_side_px: px(mmdit.max_patches * mmdit.patch * factor),
        default_n_steps: DEFAULT_N_STEPS,
        default_guidance: DEFAULT_GUIDANCE,
        samplers: vec![sampler.name().to_owned()],
        checkpoint_bytes: weights.total_bytes(),
        ..ModelInfo::default()
    };
    let [tokenizer, tokenizer_2] = tokenizers;
    // diffusers takes the first tokenizer's length for both.
    let n_tokens = tokenizer.max_length();
    let conditioner = Sd3Conditioner {
        encoders: [(tokenizer, first), (tokenizer_2, second)],
        t5,
        widths: clips.each_ref().map(|clip| clip.n_channels),
        pooled_widths: clips.each_ref().map(|clip| clip.n_projected),
        n_layers: clips[0].n_layers.min(clips[1].n_layers),
        n_tokens,
        n_joint: mmdit.n_joint,
    };
    let parts = Parts {
        info,
        latents: LatentsLayout::picture(mmdit.c_in, factor, mmdit.patch),
        max_sequence_length: Some(T5_LENGTH),
        conditioner: Box::new(conditioner),
        denoisers: Experts::one(denoiser),
        guidance: GuidanceRule::Classic,
        decoder: Box::new(decoder),
        encoder: None,
        tasks: Tasks::default(),
        samplers: vec![Box::new(sampler)],
        foreign_scheduler: None,
    };
    Ok(Opened {
        parts,
        specs,
        weights,
    })
}

/// The third encoder, if the checkpoint has it.
fn open_t5(folder: &Folder, n_joint: usize) -> Result<Option<(T5Tokenizer, T5Config)>, ModelError> {
    if folder.class("text_encoder_3").is_none() {
        return Ok(None);
    }
    let config = T5Config::read(&folder.config("text_encoder_3")?)?;
    let tokenizer = T5Tokenizer::open(folder, "tokenizer_3")?;
    let unfit = |problem: String| {
        Err(ModelError::Unfit {
            path: folder.path().to_owned(),
            problem,
        })
    };
    if tokenizer.max_id() as usize >= config.vocab_size {
        return unfit(format!(
            "tokenizer 3 has the id {}, its text encoder knows {}",
            tokenizer.max_id(),
            config.vocab_size
        ));
    }
    if config.n_channels != n_joint {
        return unfit(format!(
            "text encoder 3 gives {} channels, the transformer takes {n_joint}",
            config.n_channels
        ));
    }
    Ok(Some((tokenizer, config)))
}

/// Numbers that two components must agree on.
fn check_fit(
    folder: &Folder,
    clips: &[ClipConfig; 2],
    tokenizers: &[ClipTokenizer; 2],
    mmdit: &MmditConfig,
    kl: &KlConfig,
) -> Result<(), ModelError> {
    let unfit = |problem: String| {
        Err(ModelError::Unfit {
            path: folder.path().to_owned(),
            problem,
        })
    };
    let n_tokens = tokenizers[0].max_length();
    for ((clip, tokenizer), idx) in clips.iter().zip(tokenizers).zip(1..) {
        if n_tokens > clip.n_positions {
            return unfit(format!(
                "the tokenizer makes {n_tokens} tokens, text encoder {idx} takes {}",
                clip.n_positions
            ));
        }
        if tokenizer.max_id() as usize >= clip.vocab_size {
            return unfit(format!(
                "tokenizer {idx} has the id {}, its text encoder knows {}",
                tokenizer.max_id(),
                clip.vocab_size
            ));
        }
    }
    let n_channels = clips[0].n_channels + clips[1].n_channels;
    if n_channels > mmdit.n_joint {
        return unfit(format!(
            "the text encoders give {n_channels} channels, the transformer takes {}",
            mmdit.n_joint
        ));
    }
    let n_pooled = clips[0].n_projected + clips[1].n_projected;
    if n_pooled != mmdit.n_pooled {
        return unfit(format!(
            "the text encoders pool to {n_pooled} channels, the transformer takes {}",
            mmdit.n_pooled
        ));
    }
    if kl.n_latent != mmdit.c_in {
        return unfit(format!(
            "the transformer makes latents of {} channels, the autoencoder takes {}",
            mmdit.c_in, kl.n_latent
        ));
    }
    Ok(())
}

fn flow_euler(folder: &Folder) -> Result<FlowEuler, ModelError> {
    let config = folder.config("scheduler")?;
    let defaults = FlowEulerConfig::default();
    let flag = |key| Ok::<_, ModelError>(config.opt_bool(key)?.unwrap_or(false));
    let n_train = config.usize_or("num_train_timesteps", defaults.num_train_timesteps as usize)?;
    let read = FlowEulerConfig {
        num_train_timesteps: u32::try_from(n_train).unwrap_or(0),
        shift: config.f64_or("shift", defaults.shift)?,
        use_dynamic_shifting: flag("use_dynamic_shifting")?,
        invert_sigmas: flag("invert_sigmas")?,
        shift_terminal: config.opt_f64("shift_terminal")?,
        use_karras_sigmas: flag("use_karras_sigmas")?,
        use_exponential_sigmas: flag("use_exponential_sigmas")?,
        use_beta_sigmas: flag("use_beta_sigmas")?,
        stochastic_sampling: flag("stochastic_sampling")?,
    };
    // These only matter with dynamic shifting.
    config.deny_unread(&[
        "base_shift",
        "max_shift",
        "base_image_seq_len",
        "max_image_seq_len",
        "time_shift_type",
    ])?;
    FlowEuler::new(&read).map_err(|source| ModelError::Sampler {
        path: config.path().to_owned(),
        source,
    })
}

/// The text side.
#[derive(Debug)]
struct Sd3Conditioner {
    encoders: [(ClipTokenizer, ClipText); 2],
    t5: Option<(T5Tokenizer, T5Encoder)>,
    widths: [usize; 2],
    pooled_widths: [usize; 2],
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
        for (tokenizer, _) in &self.encoders {
            let raw = tokenizer.encode(text);
            let fitted = tokenizer.fit(&raw, self.n_tokens);
            if let Some(cut) = fitted.cut.filter(|_| tokenized.warnings.is_empty()) {
                let reader = if self.t5.is_some() { "CLIP" } else { "the model" };
                let warning = cut_warning(what, raw.len(), reader, self.n_tokens, &cut);
                tokenized.warnings.push(warning);
            }
            tokenized.raw.push(raw);
            tokenized.fitted.push(fitted.ids);
        }
        if let Some((tokenizer, _)) = &self.t5 {
            let n_tokens = options.max_sequence_length;
            let raw = tokenizer.encode(text);
            let fitted = tokenizer.fit(&raw, n_tokens);
            if let Some(cut) = fitted.cut {
                let warning = cut_warning(what, raw.len(), "T5", n_tokens, &cut);
                tokenized.warnings.push(warning);
            }
            tokenized.raw.push(raw);
            tokenized.fitted.push(fitted.ids);
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
        let pooled = ctx.alloc(&[1, self.pooled_widths.iter().sum()])?;
        let of_clip = tokens.narrow(1, 0, self.n_tokens)?;
        let (mut column, mut pooled_column) = (0, 0);
        for (encoder_idx, (_, encoder)) in self.encoders.iter().enumerate() {
            let out = encoder.forward(
                ctx,
                &text.fitted[encoder_idx],
                N_SKIPPED_LAYERS + options.clip_skip,
            )?;
            let (width, pooled_width) = (self.widths[encoder_idx], self.pooled_widths[encoder_idx]);
            copy_columns(ctx, &out.tokens, &of_clip, column, width)?;
            copy_columns(ctx, &out.pooled, &pooled, pooled_column, pooled_width)?;
            column += width;
            pooled_column += pooled_width;
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

fn copy_columns(ctx: &Ctx<'_>, x: &Tensor, out: &Tensor, column: usize, width: usize) -> Result<()> {
    let last_idx = out.dims().len() - 1;
    ctx.backend.copy(x, &out.narrow(last_idx, column, width)?)
}
