//! PixArt Sigma and PixArt Alpha: T5 as the text encoder, a transformer that attends to its tokens, an autoencoder of 4 channels, noise
//! schedules of discrete timesteps.
//!
//! As in diffusers' pipelines with `clean_caption` and `use_resolution_binning` off: prompts are put in lower case, and pictures have the
//! size that is asked for. Padding is not seen by any network, so it is left out.

use super::{
    components::{Loading, Sizes, config, expect_equal, expect_vocabulary, kl, model_info, t5_tokenizer},
    schedulers::{self, DiscreteRule, Samplers},
};
use crate::{
    ModelError,
    conditioning::{Conditioner, Conditioning, EncodeArgs, TextOptions, Tokenized, cut_warning},
    denoiser::{Pixart, PixartConfig},
    parts::{Experts, GuidanceRule, LatentsLayout, Opened, Parts, Tasks},
    text::{T5Config, T5Encoder, T5Tokenizer, clean::clean_pixart},
    trace,
};
use denoised_checkpoint::Folder;
use denoised_nn::{Ctx, Result};
use denoised_types::{Image, NamedTensor};

const DEFAULT_N_STEPS: u32 = 20;
const DEFAULT_GUIDANCE: f32 = 4.5;
const SIGMA_LENGTH: u32 = 300;
const ALPHA_LENGTH: u32 = 120;
/// T5 has no longest text; beyond, nobody has anything to say.
const MAX_LENGTH: u32 = 1024;
/// Nothing in the network ends here; beyond, attention over all positions takes hours.
const MAX_SIDE_PX: usize = 4096;

pub(super) fn open_sigma(folder: &Folder) -> std::result::Result<Opened, ModelError> {
    open(folder, false, SIGMA_LENGTH)
}

pub(super) fn open_alpha(folder: &Folder) -> std::result::Result<Opened, ModelError> {
    open(folder, true, ALPHA_LENGTH)
}

/// `tells_sizes`: whether the pipeline tells the transformer the size of the picture, if that embeds it.
fn open(folder: &Folder, tells_sizes: bool, length: u32) -> std::result::Result<Opened, ModelError> {
    folder.options().deny_unread(&[])?;
    let t5 = config(folder, "text_encoder", "text encoder", &["T5EncoderModel"])?;
    let t5 = T5Config::read(&t5)?;
    let tokenizer = t5_tokenizer(folder, "tokenizer")?;
    let classes = ["PixArtTransformer2DModel", "Transformer2DModel"];
    let transformer = config(folder, "transformer", "denoiser", &classes)?;
    let pixart = PixartConfig::read(&transformer)?;
    if pixart.has_sizes && !tells_sizes {
        let expected = "false for this pipeline, which does not tell the transformer the size of the picture";
        return Err(transformer.wrong("use_additional_conditions", expected).into());
    }
    // The pipelines do not shift latents, whatever the autoencoder says.
    let kl = kl(folder)?.without_shift();
    let (vocabulary, max_id) = (t5.vocab_size, tokenizer.max_id());
    expect_vocabulary(folder, max_id, vocabulary, "")?;
    expect_equal(
        folder,
        ("the text encoder gives channels:", t5.n_channels),
        ("the transformer takes:", pixart.n_text()),
    )?;
    expect_equal(
        folder,
        ("the transformer's latents have channels:", pixart.base.c_in),
        ("the autoencoder's:", kl.n_latent),
    )?;
    let Samplers {
        samplers,
        foreign_scheduler,
    } = schedulers::discrete(folder, DiscreteRule::AsWritten)?;

    let mut loading = Loading::open(folder, &["transformer", "vae", "text_encoder"])?;
    let encoder = loading.t5("text_encoder", t5);
    let denoiser = Pixart::new(&mut loading.at("transformer"), pixart.clone());
    let vae = loading.kl(&kl);

    let (base, factor) = (&pixart.base, kl.factor());
    let side = base.sample_size * factor;
    let sizes = Sizes {
        grid: base.patch * factor,
        default: (side, side),
        max_side: MAX_SIDE_PX.max(side),
    };
    loading.finish(Parts {
        info: model_info("pixart", &sizes, DEFAULT_N_STEPS, DEFAULT_GUIDANCE),
        latents: LatentsLayout::picture(base.c_in, factor, base.patch),
        max_sequence_length: Some((length, MAX_LENGTH)),
        conditioner: Box::new(PixartConditioner {
            tokenizer,
            encoder,
            has_sizes: pixart.has_sizes,
        }),
        denoisers: Experts::one(denoiser),
        guidance: GuidanceRule::Classic,
        decoder: vae.decoder,
        tasks: Tasks {
            image_to_image: vae.encoder.is_some(),
            ..Tasks::default()
        },
        encoder: vae.encoder,
        samplers,
        foreign_scheduler,
    })
}

/// The text side.
#[derive(Debug)]
struct PixartConditioner {
    tokenizer: T5Tokenizer,
    encoder: T5Encoder,
    has_sizes: bool,
}

impl Conditioner for PixartConditioner {
    /// `fitted` are the ids of the text, then the same with the padding.
    fn tokenize(
        &self,
        text: &str,
        what: &str,
        options: TextOptions,
        _: &[Image],
    ) -> std::result::Result<Tokenized, String> {
        let n_tokens = options.max_sequence_length;
        let ids = self.tokenizer.encode(&clean_pixart(text));
        let fitted = self.tokenizer.cut(&ids, n_tokens);
        let cut = fitted
            .cut
            .map(|cut| cut_warning(what, ids.len(), "the model", n_tokens, &cut));
        Ok(Tokenized {
            raw: vec![self.tokenizer.encode(text)],
            fitted: vec![fitted.ids, self.tokenizer.fit(&ids, n_tokens).ids],
            warnings: cut.into_iter().collect(),
            is_absent: false,
        })
    }

    fn encode(&self, ctx: &Ctx<'_>, text: &Tokenized, args: &EncodeArgs<'_>) -> Result<Conditioning> {
        let [ids, padded_ids] = [0, 1].map(|idx| &text.fitted[idx]);
        let mut conditioning = Conditioning::of_tokens(self.encoder.forward(ctx, ids)?);
        if args.is_traced {
            conditioning.padded = Some(self.encoder.forward_seen(ctx, padded_ids, ids.len())?);
        }
        if self.has_sizes {
            let (height, width) = (args.height as f32, args.width as f32);
            conditioning.numbers = Some(ctx.upload_f32(&[height, width, height / width], &[1, 3])?);
        }
        Ok(conditioning)
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
        let mut tensors = Vec::new();
        for (idx, conditioning) in [(0, Some(conditional)), (2, unconditional)] {
            let Some(one) = conditioning else { continue };
            let tokens = one.padded.as_ref().unwrap_or(&one.tokens);
            tensors.push(trace::plain(ctx, format!("encode_prompt.{idx}.0"), tokens)?);
            let (n_seen, n_all) = (one.tokens.dim(1), tokens.dim(1));
            let mask: Vec<i64> = (0..n_all).map(|idx| i64::from(idx < n_seen)).collect();
            let name = format!("encode_prompt.{}.0", idx + 1);
            tensors.push(NamedTensor::from_i64(name, &[1, n_all as u64], &mask));
        }
        Ok(tensors)
    }
}
