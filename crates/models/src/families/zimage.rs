//! Z-Image and Z-Image Turbo: a hidden state of Qwen3 as the text, one transformer for the tokens of both, an autoencoder of 16 channels,
//! rectified flow.
//!
//! As in diffusers' `ZImagePipeline` with `cfg_normalization` off and `cfg_truncation` 1: guidance is what is added beyond the prompt's
//! own prediction, so 0 leaves it out, as Turbo wants it.

use super::{
    components::{Loading, Sizes, config, expect_equal, expect_vocabulary, kl, model_info, qwen_tokenizer},
    schedulers::{self, Samplers},
};
use crate::{
    ModelError,
    conditioning::{Conditioner, Conditioning, EncodeArgs, TextOptions, Tokenized, cut_warning},
    denoiser::{ZIMAGE_PATCH, ZImage, ZImageConfig},
    parts::{Experts, GuidanceRule, LatentsLayout, Opened, Parts, Tasks},
    text::{
        chat::Chat,
        qwen::{QwenConfig, QwenEncoder},
        qwen_tokenizer::QwenTokenizer,
    },
    trace,
};
use denoised_checkpoint::Folder;
use denoised_nn::{Ctx, Result};
use denoised_sampler::{FlowSigmas, Mu};
use denoised_types::{Image, NamedTensor};

const DEFAULT_N_STEPS: u32 = 50;
const DEFAULT_GUIDANCE: f32 = 5.0;
const DEFAULT_SIDE_PX: usize = 1024;
/// What the pipeline takes, and the most that a request may ask for.
const LENGTH: (u32, u32) = (512, 4096);
/// The hidden state that counts, from the last one back.
const N_SKIPPED_LAYERS: usize = 1;

pub(super) fn open(folder: &Folder) -> std::result::Result<Opened, ModelError> {
    folder.options().deny_unread(&[])?;
    let classes = ["Qwen3Model", "Qwen3ForCausalLM"];
    let qwen = QwenConfig::read_qwen3(&config(folder, "text_encoder", "text encoder", &classes)?)?;
    let tokenizer = qwen_tokenizer(folder, "tokenizer")?;
    Chat::check_qwen3(folder, "tokenizer")?;
    let classes = ["ZImageTransformer2DModel"];
    let zimage = ZImageConfig::read(&config(folder, "transformer", "denoiser", &classes)?)?;
    let kl = kl(folder)?;
    expect_vocabulary(folder, tokenizer.max_id(), qwen.vocab_size, "")?;
    expect_equal(
        folder,
        ("the text encoder gives channels:", qwen.n_channels),
        ("the transformer takes:", zimage.n_text),
    )?;
    expect_equal(
        folder,
        ("the transformer's latents have channels:", zimage.c_in),
        ("the autoencoder's:", kl.n_latent),
    )?;
    let Samplers {
        samplers,
        foreign_scheduler,
    } = schedulers::flow(folder, FlowSigmas::Torch, Mu::Linear)?;

    let mut loading = Loading::open(folder, &["transformer", "vae", "text_encoder"])?;
    let state = qwen.n_layers.saturating_sub(N_SKIPPED_LAYERS);
    loading.ignore("text_encoder", QwenEncoder::unread_names(&qwen, state));
    let encoder = QwenEncoder::new(&mut loading.at("text_encoder"), qwen, state);
    loading.ignore("transformer", ZImage::UNREAD_NAMES);
    let denoiser = ZImage::new(&mut loading.at("transformer"), zimage.clone());
    let vae = loading.kl(&kl);

    let factor = kl.factor();
    let (grid, max_side) = (ZIMAGE_PATCH * factor, zimage.max_side() * factor);
    let side = DEFAULT_SIDE_PX.next_multiple_of(grid).min(max_side);
    let sizes = Sizes {
        grid,
        default: (side, side),
        max_side,
    };
    loading.finish(Parts {
        info: model_info("zimage", &sizes, DEFAULT_N_STEPS, DEFAULT_GUIDANCE),
        latents: LatentsLayout {
            patch: ZIMAGE_PATCH,
            ..LatentsLayout::picture(zimage.c_in, factor, ZIMAGE_PATCH)
        },
        max_sequence_length: Some(LENGTH),
        conditioner: Box::new(ZImageConditioner {
            tokenizer,
            encoder,
            state,
            n_tokens: zimage.max_text(),
        }),
        denoisers: Experts::one(denoiser),
        guidance: GuidanceRule::Offset,
        decoder: vae.decoder,
        tasks: Tasks {
            image_to_image: vae.encoder.is_some(),
            default_strengths: Some((0.6, 1.0)),
            ..Tasks::default()
        },
        encoder: vae.encoder,
        samplers,
        foreign_scheduler,
    })
}

/// The text side.
#[derive(Debug)]
struct ZImageConditioner {
    tokenizer: QwenTokenizer,
    encoder: QwenEncoder,
    /// The hidden state that counts.
    state: usize,
    /// Most tokens that have places in the transformer.
    n_tokens: usize,
}

impl Conditioner for ZImageConditioner {
    fn tokenize(
        &self,
        text: &str,
        what: &str,
        options: TextOptions,
        _: &[Image],
    ) -> std::result::Result<Tokenized, String> {
        let n_tokens = options.max_sequence_length.min(self.n_tokens);
        let ids = self.tokenizer.encode(&Chat::THINKING.apply(text));
        let fitted = self.tokenizer.cut(&ids, n_tokens);
        let cut = fitted
            .cut
            .map(|cut| cut_warning(what, ids.len(), "the model", n_tokens, &cut));
        Ok(Tokenized {
            raw: vec![self.tokenizer.encode(text)],
            fitted: vec![fitted.ids],
            warnings: cut.into_iter().collect(),
            is_absent: false,
        })
    }

    fn encode(&self, ctx: &Ctx<'_>, text: &Tokenized, _: &EncodeArgs<'_>) -> Result<Conditioning> {
        let ids = &text.fitted[0];
        let mut states = self.encoder.forward(ctx, ids, ids.len(), &[self.state])?;
        Ok(Conditioning::of_tokens(states.remove(0)))
    }

    fn max_clip_skip(&self) -> usize {
        0
    }

    fn trace(
        &self,
        ctx: &Ctx<'_>,
        conditional: &Conditioning,
        unconditional: Option<&Conditioning>,
    ) -> Result<Vec<NamedTensor>> {
        let encodings = std::iter::once(conditional).chain(unconditional).enumerate();
        encodings
            .map(|(idx, one)| {
                let tokens = one.tokens.reshape(&one.tokens.dims()[1..])?;
                trace::plain(ctx, format!("encode_prompt.{idx}.list0.0"), &tokens)
            })
            .collect()
    }
}
