//! Qwen-Image and Qwen-Image-Edit: hidden states of Qwen2.5-VL, double transformer blocks, an autoencoder of one frame, rectified flow.
//!
//! As in diffusers' `QwenImagePipeline`, `QwenImageEditPipeline` and `QwenImageEditPlusPipeline`: guidance keeps the norm of the
//! prediction for the prompt and needs a negative prompt, if only " ". The models for editing see their pictures twice, as tokens of the
//! text and as latents beside those that are made. Padding is not seen by any network, so it is left out.

use super::{
    components::{
        Autoencoder, Loading, Reader, Sizes, config, expect_equal, expect_vocabulary, model_info, push_ids,
        qwen_tokenizer, unfit,
    },
    expect_class,
    schedulers::{self, Samplers},
};
use crate::{
    ModelError,
    conditioning::{Conditioner, Conditioning, EncodeArgs, TextOptions, Tokenized, trace_named},
    denoiser::{QwenImage, QwenImageConfig},
    layout::TensorLayout,
    parts::{Experts, GuidanceRule, LatentsLayout, Opened, Parts, References, Tasks},
    pixels::{Filter, resized_image},
    text::{
        chat::{Chat, IMAGE_PAD},
        pictures::QwenPictures,
        qwen::{QwenConfig, QwenEncoder},
        qwen_tokenizer::QwenTokenizer,
        qwen_vision::{QwenVision, QwenVisionConfig, Seen},
    },
    vae::CausalConfig,
};
use denoised_checkpoint::Folder;
use denoised_nn::{Ctx, Result};
use denoised_sampler::{FlowSigmas, Mu};
use denoised_tensor::TensorError;
use denoised_types::{Image, NamedTensor};

const DEFAULT_N_STEPS: u32 = 50;
const DEFAULT_GUIDANCE: f32 = 4.0;
/// Longest text without what is put around it: the default and the most. Those for editing cut nothing, whatever is asked for.
const TEXT_LENGTH: (u32, u32) = (512, 1024);
/// Longest text of the models for editing, with its pictures: diffusers' tables of positions end there.
const MAX_EDIT_TOKENS: usize = 4096;
/// Latents each way that make a token.
const PATCH: usize = 2;
const DEFAULT_SIDE_PX: usize = 1024;
const MAX_SIDE_PX: usize = 4096;
/// Tokens of the prompt, of the negative prompt. Nothing is pooled.
const TRACE_NAMES: [&str; 4] = ["encode_prompt.0.0", "encode_prompt.0.1", "", ""];

pub(super) fn open(folder: &Folder) -> std::result::Result<Opened, ModelError> {
    open_with(folder, None)
}

pub(super) fn open_edit(folder: &Folder) -> std::result::Result<Opened, ModelError> {
    let edit = Edit {
        are_numbered: false,
        seen_size: latents_size,
    };
    open_with(folder, Some((edit, 1)))
}

pub(super) fn open_edit_plus(folder: &Folder) -> std::result::Result<Opened, ModelError> {
    let edit = Edit {
        are_numbered: true,
        seen_size: |width, height| size_of_area(384.0 * 384.0, width, height),
    };
    // Trained with up to three; the text says which is which.
    open_with(folder, Some((edit, 4)))
}

/// How pictures are shown to the text encoder.
#[derive(Clone, Copy, Debug)]
struct Edit {
    /// Whether the text counts them.
    are_numbered: bool,
    /// Width and height to which they are brought for it.
    seen_size: fn(u32, u32) -> (u32, u32),
}

/// Width and height to which pictures are brought before they become latents.
fn latents_size(width: u32, height: u32) -> (u32, u32) {
    size_of_area(1024.0 * 1024.0, width, height)
}

/// Multiples of 32 with the shape of `width` x `height` and about `area`.
fn size_of_area(area: f64, width: u32, height: u32) -> (u32, u32) {
    let ratio = f64::from(width.max(1)) / f64::from(height.max(1));
    let wide = (area * ratio).sqrt();
    let side = |px: f64| ((px / 32.0).round_ties_even() * 32.0).clamp(32.0, f64::from(1u32 << 15)) as u32;
    (side(wide), side(wide / ratio))
}

fn open_with(folder: &Folder, edit: Option<(Edit, usize)>) -> std::result::Result<Opened, ModelError> {
    folder.options().deny_unread(&[])?;
    let encoder = ["Qwen2_5_VLForConditionalGeneration"];
    let encoder = config(folder, "text_encoder", "text encoder", &encoder)?;
    let qwen = QwenConfig::read_qwen2_5_vl(&encoder)?;
    let transformer = config(
        folder,
        "transformer",
        "denoiser",
        &["QwenImageTransformer2DModel"],
    )?;
    let transformer = QwenImageConfig::read(&transformer)?;
    let vae = config(folder, "vae", "autoencoder", &["AutoencoderKLQwenImage"])?;
    let vae = CausalConfig::read_qwen_image(&vae)?;
    let tokenizer = qwen_tokenizer(folder, "tokenizer")?;
    Chat::check_tokens(&tokenizer, folder, "tokenizer")?;
    let Samplers {
        samplers,
        foreign_scheduler,
    } = schedulers::flow(folder, FlowSigmas::Numpy, Mu::Linear)?;

    expect_vocabulary(folder, tokenizer.max_id(), qwen.vocab_size, "")?;
    expect_equal(
        folder,
        ("channels of the text encoder:", qwen.n_channels),
        ("the transformer takes", transformer.n_joint),
    )?;
    expect_equal(
        folder,
        ("channels of the autoencoder's latents:", vae.n_latent),
        ("of those that the transformer takes:", transformer.n_latent()),
    )?;
    let vision = match edit {
        None => None,
        Some((edit, _)) => {
            let classes = ["Qwen2VLProcessor", "Qwen2_5_VLProcessor"];
            expect_class(folder, "processor", "processor", &classes)?;
            let pictures = QwenPictures::open(folder, "processor")?;
            let vision = QwenVisionConfig::read(&encoder)?;
            vision
                .check_fit(&pictures)
                .map_err(|problem| unfit(folder, problem))?;
            expect_equal(
                folder,
                ("channels of the text encoder's pictures:", vision.n_out),
                ("of its text:", qwen.n_channels),
            )?;
            let pad = tokenizer.id(IMAGE_PAD);
            let pad = pad.ok_or_else(|| unfit(folder, format!("the tokenizer has no token {IMAGE_PAD}")))?;
            Some((edit, pictures, vision, pad))
        }
    };

    let mut loading = Loading::open(folder, &["transformer", "vae", "text_encoder"])?;
    let n_states = qwen.n_layers;
    loading.ignore("text_encoder", QwenEncoder::unread_names(&qwen, n_states));
    if vision.is_none() {
        loading.ignore("text_encoder", QwenVision::NAMES);
    }
    let conditioner = QwenImageConditioner {
        tokenizer,
        vision: vision.map(|(edit, pictures, config, pad)| Vision {
            edit,
            pictures,
            network: QwenVision::new(&mut loading.at("text_encoder"), config),
            pad,
        }),
        qwen: QwenEncoder::new(&mut loading.at("text_encoder"), qwen, n_states),
        n_states,
    };
    let denoiser = QwenImage::new(&mut loading.at("transformer"), &transformer);
    let Autoencoder { encoder, decoder } = loading.qwen_image_vae(&vae);
    if edit.is_some() && encoder.is_none() {
        let problem = "the autoencoder has no encoder, with which pictures to edit are read".to_owned();
        return Err(unfit(folder, problem));
    }
    let grid = PATCH * vae.factor();
    let side = DEFAULT_SIDE_PX.next_multiple_of(grid);
    let sizes = Sizes {
        grid,
        default: (side, side),
        max_side: MAX_SIDE_PX / grid * grid,
    };
    let tasks = match edit {
        Some((_, most)) => Tasks {
            references: Some(References {
                most,
                size: |width, height, _| Ok(latents_size(width, height)),
                last_gives_size: true,
            }),
            needs_image: true,
            ..Tasks::default()
        },
        None => Tasks {
            image_to_image: encoder.is_some(),
            default_strengths: Some((0.6, 0.6)),
            ..Tasks::default()
        },
    };
    loading.finish(Parts {
        info: model_info("qwen-image", &sizes, DEFAULT_N_STEPS, DEFAULT_GUIDANCE),
        latents: LatentsLayout {
            given: TensorLayout::Packed2x2,
            steps: TensorLayout::Packed2x2,
            patch: PATCH,
            ..LatentsLayout::picture(transformer.n_latent(), vae.factor(), PATCH)
        },
        max_sequence_length: Some(TEXT_LENGTH),
        conditioner: Box::new(conditioner),
        denoisers: Experts::one(denoiser),
        guidance: GuidanceRule::NormPreserving { patch: PATCH },
        decoder,
        encoder,
        tasks,
        samplers,
        foreign_scheduler,
    })
}

/// The text side.
#[derive(Debug)]
struct QwenImageConditioner {
    tokenizer: QwenTokenizer,
    /// Of the models for editing.
    vision: Option<Vision>,
    qwen: QwenEncoder,
    /// Which hidden state counts: the last.
    n_states: usize,
}

/// How the text encoder sees pictures.
#[derive(Debug)]
struct Vision {
    edit: Edit,
    pictures: QwenPictures,
    network: QwenVision,
    /// The id of the tokens in whose place pictures are put.
    pad: u32,
}

impl QwenImageConditioner {
    /// The ids of a text between its pictures and what is put around it.
    fn ids_with_pictures(
        &self,
        vision: &Vision,
        text: &str,
        what: &str,
        images: &[Image],
    ) -> std::result::Result<Vec<u32>, String> {
        let n_tokens = images
            .iter()
            .map(|image| {
                let (width, height) = (vision.edit.seen_size)(image.width, image.height);
                vision.pictures.n_tokens(width, height)
            })
            .collect::<std::result::Result<Vec<usize>, String>>()?;
        let n_pads: usize = n_tokens.iter().sum();
        let too_long = |n: usize| {
            format!("the {what} has {n} tokens with its pictures, the model reads at most {MAX_EDIT_TOKENS}")
        };
        // Before there is a text of that many words.
        if n_pads > MAX_EDIT_TOKENS {
            return Err(too_long(n_pads));
        }
        let are_numbered = vision.edit.are_numbered;
        let text = Chat::QWEN_IMAGE_EDIT.with_pictures(text, &n_tokens, are_numbered);
        let ids = self.tokenizer.encode(&text);
        if ids.len() > MAX_EDIT_TOKENS {
            return Err(too_long(ids.len()));
        }
        Chat::check_pictures(&ids, vision.pad, n_pads)?;
        Ok(ids)
    }
}

impl Conditioner for QwenImageConditioner {
    fn tokenize(
        &self,
        text: &str,
        what: &str,
        options: TextOptions,
        images: &[Image],
    ) -> std::result::Result<Tokenized, String> {
        let mut tokenized = Tokenized::default();
        match &self.vision {
            Some(vision) => {
                let ids = self.ids_with_pictures(vision, text, what, images)?;
                tokenized.fitted.push(ids);
            }
            None => {
                let whole = self.tokenizer.encode(&Chat::QWEN_IMAGE.apply(text));
                // What is left out of the result again does not count.
                let n_tokens = Chat::QWEN_IMAGE.n_dropped + options.max_sequence_length;
                let fitted = self.tokenizer.cut(&whole, n_tokens);
                let reader = Reader {
                    what,
                    reader: "the model",
                    n_tokens,
                };
                push_ids(&mut tokenized, whole, fitted, reader);
            }
        }
        // The reference holds the ids of the text alone.
        tokenized.raw = vec![self.tokenizer.encode(text)];
        Ok(tokenized)
    }

    fn max_clip_skip(&self) -> usize {
        0
    }

    fn encode(&self, ctx: &Ctx<'_>, text: &Tokenized, args: &EncodeArgs<'_>) -> Result<Conditioning> {
        let ids = &text.fitted[0];
        let states = [self.n_states];
        let (hidden, n_dropped) = match &self.vision {
            None => {
                let hidden = self.qwen.forward(ctx, ids, ids.len(), &states)?;
                (hidden, Chat::QWEN_IMAGE.n_dropped)
            }
            Some(vision) => {
                let seen = args.images.iter().map(|image| vision.see(ctx, image));
                let seen = seen.collect::<Result<Vec<Seen>>>()?;
                let hidden = self.qwen.forward_seeing(ctx, ids, vision.pad, &seen, &states)?;
                (hidden, Chat::QWEN_IMAGE_EDIT.n_dropped)
            }
        };
        let hidden = &hidden[0];
        let kept = hidden.narrow(1, n_dropped, hidden.dim(1) - n_dropped)?;
        let tokens = ctx.alloc(kept.dims())?;
        ctx.backend.copy(&kept, &tokens)?;
        Ok(Conditioning::of_tokens(tokens))
    }

    fn trace(
        &self,
        ctx: &Ctx<'_>,
        conditional: &Conditioning,
        unconditional: Option<&Conditioning>,
    ) -> Result<Vec<NamedTensor>> {
        trace_named(ctx, TRACE_NAMES, conditional, unconditional)
    }
}

impl Vision {
    /// A picture as tokens, by way of the size that the pipeline brings it to.
    fn see(&self, ctx: &Ctx<'_>, image: &Image) -> Result<Seen> {
        let (width, height) = (self.edit.seen_size)(image.width, image.height);
        let image = resized_image(image, width, height, Filter::Lanczos);
        let pixels = self
            .pictures
            .apply(&image)
            .map_err(|detail| TensorError::Operand {
                op: "pictures in a text",
                detail,
            })?;
        self.network.see(ctx, &pixels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_pipeline() {
        // calculate_dimensions(1024 * 1024, w / h) and (384 * 384, w / h) of diffusers 0.42.1.
        for (size, latents, seen) in [
            ((1024, 1024), (1024, 1024), (384, 384)),
            ((640, 480), (1184, 896), (448, 320)),
            ((48, 64), (896, 1184), (320, 448)),
            ((1920, 1080), (1376, 768), (512, 288)),
            ((100, 1), (10240, 96), (3840, 32)),
        ] {
            assert_eq!(latents_size(size.0, size.1), latents, "{size:?}");
            assert_eq!(size_of_area(384.0 * 384.0, size.0, size.1), seen, "{size:?}");
        }
    }
}
