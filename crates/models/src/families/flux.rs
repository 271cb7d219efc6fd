//! FLUX.1: CLIP's pooled vector and T5's tokens, double and single transformer blocks, 16-channel autoencoder, rectified flow.
//!
//! As in diffusers' `FluxPipeline`, both encoders are given the same prompt and the transformer sees T5's padding. Distilled checkpoints
//! take the guidance scale as an input; a negative prompt only counts with a true guidance scale beside it. Unlike there, Kontext makes
//! the size that is asked for, by default that of the picture as it is encoded, and not always a million pixels.

use super::components::{
    Loading, Reader, Sizes, clip_tokenizer, config, expect_clip, expect_equal, expect_vocabulary, kl,
    model_info, push_clip_ids, push_ids, t5_tokenizer,
};
use super::schedulers::{self, Samplers};
use crate::{
    ModelError,
    conditioning::{Conditioner, Conditioning, EncodeArgs, TextOptions, Tokenized, trace_named},
    denoiser::{Flux, FluxConfig},
    layout::TensorLayout,
    parts::{Experts, GuidanceRule, LatentsLayout, Opened, Parts, References, Tasks},
    text::{ClipConfig, ClipEncoder, ClipTokenizer, T5Config, T5Encoder, T5Tokenizer},
};
use denoised_checkpoint::Folder;
use denoised_nn::{Ctx, Result};
use denoised_sampler::{FlowSigmas, Mu};
use denoised_types::{Image, NamedTensor};

/// The class of checkpoints that edit a picture.
const KONTEXT: &str = "FluxKontextPipeline";
const DEFAULT_N_STEPS: u32 = 28;
const DEFAULT_GUIDANCE: f32 = 3.5;
/// Of checkpoints that are not told a guidance scale, which are distilled to few steps.
const DEFAULT_N_STEPS_DISTILLED: u32 = 4;
const T5_LENGTH: (u32, u32) = (512, 512);
/// Latents each way that make a token.
const PATCH: usize = 2;
const DEFAULT_SAMPLE_SIZE: usize = 128;
const MAX_SIDE_PX: usize = 4096;
/// How Kontext takes the picture that it edits.
const REFERENCES: References = References {
    most: 1,
    size: kontext_size,
    last_gives_size: false,
};
/// Widths of the sizes that Kontext was trained on; the heights are these from behind.
const KONTEXT_WIDTHS: [u32; 17] = [
    672, 688, 720, 752, 800, 832, 880, 944, 1024, 1104, 1184, 1248, 1328, 1392, 1456, 1504, 1568,
];
/// The guidance scale is embedded like a timestep of this many times its value.
const GUIDANCE_FACTOR: f32 = 1000.0;
/// Per call of `encode_prompt`: tokens and pooled vector of the prompt, of the negative prompt.
const TRACE_NAMES: [&str; 4] = [
    "encode_prompt.0.0",
    "encode_prompt.0.1",
    "encode_prompt.1.0",
    "encode_prompt.1.1",
];

pub(super) fn open(folder: &Folder) -> Result<Opened, ModelError> {
    folder.options().deny_unread(&[])?;
    let encoder = "text encoder";
    let clip = ClipConfig::read(&config(folder, "text_encoder", encoder, &["CLIPTextModel"])?)?;
    let t5 = T5Config::read(&config(folder, "text_encoder_2", encoder, &["T5EncoderModel"])?)?;
    let flux = config(folder, "transformer", "denoiser", &["FluxTransformer2DModel"])?;
    let flux = FluxConfig::read(&flux)?;
    let kl = kl(folder)?;
    let tokenizer = clip_tokenizer(folder, "tokenizer")?;
    let tokenizer_2 = t5_tokenizer(folder, "tokenizer_2")?;
    let n_tokens = tokenizer.max_length();
    expect_clip(folder, (&tokenizer, n_tokens), &clip, "")?;
    expect_vocabulary(folder, tokenizer_2.max_id(), t5.vocab_size, " 2")?;
    expect_equal(
        folder,
        ("channels of the text encoder:", clip.n_channels),
        ("pooled channels that the transformer takes:", flux.n_pooled),
    )?;
    expect_equal(
        folder,
        ("channels of text encoder 2:", t5.n_channels),
        ("text channels that the transformer takes:", flux.n_joint),
    )?;
    expect_equal(
        folder,
        ("channels of the autoencoder's latents:", kl.n_latent),
        ("of those that the transformer takes:", flux.n_latent()),
    )?;

    let Samplers {
        samplers,
        foreign_scheduler,
    } = schedulers::flow(folder, FlowSigmas::Numpy, Mu::Linear)?;
    let mut loading = Loading::open(folder, &["transformer", "vae", "text_encoder", "text_encoder_2"])?;
    let conditioner = FluxConditioner {
        tokenizer,
        clip: loading.clip("text_encoder", &clip),
        tokenizer_2,
        t5: loading.t5("text_encoder_2", t5),
        has_guidance: flux.has_guidance,
    };
    let denoiser = Flux::new(&mut loading.at("transformer"), &flux);
    let autoencoder = loading.kl(&kl);
    let has_encoder = autoencoder.encoder.is_some();
    let is_kontext = folder.pipeline_class() == KONTEXT;
    let factor = kl.factor();
    let side = DEFAULT_SAMPLE_SIZE * factor;
    let sizes = Sizes {
        grid: PATCH * factor,
        default: (side, side),
        max_side: MAX_SIDE_PX,
    };
    let (n_steps, guidance) = match flux.has_guidance {
        true => (DEFAULT_N_STEPS, DEFAULT_GUIDANCE),
        false => (DEFAULT_N_STEPS_DISTILLED, 0.0),
    };
    loading.finish(Parts {
        info: model_info("flux", &sizes, n_steps, guidance),
        latents: LatentsLayout {
            given: TensorLayout::Packed2x2,
            steps: TensorLayout::Packed2x2,
            patch: PATCH,
            ..LatentsLayout::picture(flux.n_latent(), factor, PATCH)
        },
        max_sequence_length: Some(T5_LENGTH),
        conditioner: Box::new(conditioner),
        denoisers: Experts::one(denoiser),
        guidance: GuidanceRule::Embedded,
        decoder: autoencoder.decoder,
        encoder: autoencoder.encoder,
        tasks: Tasks {
            image_to_image: has_encoder && !is_kontext,
            default_strengths: Some((0.6, 0.6)),
            references: (has_encoder && is_kontext).then_some(REFERENCES),
            ..Tasks::default()
        },
        samplers,
        foreign_scheduler,
    })
}

/// The size that Kontext was trained on whose shape is closest to that of a picture on the grid; of two as close, the narrower.
fn kontext_size(width: u32, height: u32, grid: u32) -> std::result::Result<(u32, u32), String> {
    let on_grid = |px: u32| f64::from((px / grid * grid).max(1));
    let aspect = on_grid(width) / on_grid(height);
    let sizes = KONTEXT_WIDTHS.into_iter().zip(KONTEXT_WIDTHS.into_iter().rev());
    let distance = |(width, height): &(u32, u32)| (aspect - f64::from(*width) / f64::from(*height)).abs();
    let closest = sizes.min_by(|a, b| distance(a).total_cmp(&distance(b)));
    let (width, height) = closest.unwrap_or((1024, 1024));
    Ok((width / grid * grid, height / grid * grid))
}

/// The text side.
#[derive(Debug)]
struct FluxConditioner {
    tokenizer: ClipTokenizer,
    clip: ClipEncoder,
    tokenizer_2: T5Tokenizer,
    t5: T5Encoder,
    has_guidance: bool,
}

impl Conditioner for FluxConditioner {
    fn tokenize(
        &self,
        text: &str,
        what: &str,
        options: TextOptions,
        _: &[Image],
    ) -> std::result::Result<Tokenized, String> {
        let mut tokenized = Tokenized::default();
        let reader = |reader, n_tokens| Reader {
            what,
            reader,
            n_tokens,
        };
        let clip = reader("CLIP", self.tokenizer.max_length());
        push_clip_ids(&mut tokenized, &self.tokenizer, text, clip);
        let n_tokens = options.max_sequence_length;
        let raw = self.tokenizer_2.encode(text);
        let fitted = self.tokenizer_2.fit(&raw, n_tokens);
        push_ids(&mut tokenized, raw, fitted, reader("T5", n_tokens));
        Ok(tokenized)
    }

    fn max_clip_skip(&self) -> usize {
        0
    }

    fn encode(&self, ctx: &Ctx<'_>, text: &Tokenized, args: &EncodeArgs<'_>) -> Result<Conditioning> {
        let numbers = match self.has_guidance {
            true => Some(ctx.upload_f32(&[GUIDANCE_FACTOR * args.guidance], &[1, 1])?),
            false => None,
        };
        Ok(Conditioning {
            pooled: Some(self.clip.forward_pooled(ctx, &text.fitted[0])?),
            numbers,
            ..Conditioning::of_tokens(self.t5.forward(ctx, &text.fitted[1])?)
        })
    }

    fn trace(
        &self,
        ctx: &Ctx<'_>,
        conditional: &Conditioning,
        unconditional: Option<&Conditioning>,
    ) -> Result<Vec<NamedTensor>> {
        let mut tensors = trace_named(ctx, TRACE_NAMES, conditional, unconditional)?;
        // The third thing that is returned: positions of the text, all at the origin.
        for (idx, one) in std::iter::once(conditional).chain(unconditional).enumerate() {
            let shape = [one.tokens.dim(1) as u64, 3];
            let values = vec![0.0; 3 * one.tokens.dim(1)];
            tensors.push(NamedTensor::from_f32(
                format!("encode_prompt.2.{idx}"),
                &shape,
                &values,
            ));
        }
        Ok(tensors)
    }
}

#[cfg(test)]
mod tests {
    use super::kontext_size;

    #[test]
    fn kontext_takes_the_size_of_the_closest_shape() {
        // What FluxKontextPipeline of diffusers 0.42.1 resizes pictures of these sizes to.
        for (size, expected) in [
            ((72, 48), (1184, 880)),
            ((60, 300), (672, 1568)),
            ((1024, 1024), (1024, 1024)),
            ((1920, 1080), (1392, 752)),
            ((31, 17), (1024, 1024)),
            ((3000, 2000), (1248, 832)),
            ((500, 700), (880, 1184)),
        ] {
            assert_eq!(kontext_size(size.0, size.1, 16), Ok(expected), "{size:?}");
        }
    }
}
