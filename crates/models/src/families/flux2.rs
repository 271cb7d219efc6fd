//! FLUX.2 klein: hidden states of Qwen3, double and single transformer blocks, an autoencoder with patched and normalized latents, rectified
//! flow.
//!
//! As in diffusers' `Flux2KleinPipeline` the transformer sees the text's padding. Distilled checkpoints have no guidance.

use super::components::{
    Loading, Reader, Sizes, config, copy_columns, expect_equal, expect_vocabulary, model_info, push_ids,
    qwen_tokenizer,
};
use super::schedulers::{self, Samplers};
use crate::{
    ModelError,
    conditioning::{Conditioner, Conditioning, EncodeArgs, TextOptions, Tokenized, trace_named},
    denoiser::{Flux2, Flux2Config},
    layout::TensorLayout,
    parts::{Experts, GuidanceRule, LatentsLayout, Opened, Parts, References, Tasks},
    text::{
        chat::Chat,
        qwen::{QwenConfig, QwenEncoder},
        qwen_tokenizer::QwenTokenizer,
    },
    vae::{
        Encoder, FLUX2_UNREAD_NAMES, Flux2Decoder, Flux2Encoder, Flux2VaeConfig, KL_UNREAD_NAMES, KlEncoder,
    },
};
use denoised_checkpoint::Folder;
use denoised_nn::{Ctx, Result};
use denoised_sampler::{FlowSigmas, Mu};
use denoised_types::{Image, NamedTensor};

const DEFAULT_N_STEPS: u32 = 50;
const DEFAULT_GUIDANCE: f32 = 4.0;
const DEFAULT_N_STEPS_DISTILLED: u32 = 4;
/// Longest text with what the chat template adds: the default and the most.
const TEXT_LENGTH: (u32, u32) = (512, 2048);
/// Hidden states that make up the text, if a request names no others.
const TEXT_LAYERS: [u32; 3] = [9, 18, 27];
const DEFAULT_SIDE_PX: usize = 1024;
const MAX_SIDE_PX: usize = 4096;
/// How klein takes pictures to edit.
const REFERENCES: References = References {
    most: 10,
    size: reference_size,
    last_gives_size: false,
};
/// Most pixels of a picture to edit.
const MAX_REFERENCE_PX: f64 = 1024.0 * 1024.0;
/// Fewest pixels each way of a picture to edit, and how much longer one side may be than the other.
const MIN_REFERENCE_SIDE_PX: u32 = 64;
const MAX_REFERENCE_ASPECT: f64 = 8.0;
/// Per call of `encode_prompt`: tokens of the prompt, of the negative prompt. Nothing is pooled.
const TRACE_NAMES: [&str; 4] = ["encode_prompt.0.0", "encode_prompt.0.1", "", ""];

pub(super) fn open(folder: &Folder) -> Result<Opened, ModelError> {
    let is_distilled = folder.options().bool_or("is_distilled", false)?;
    folder.options().deny_unread(&[])?;
    let classes = ["Qwen3ForCausalLM", "Qwen3Model"];
    let qwen = QwenConfig::read_qwen3(&config(folder, "text_encoder", "text encoder", &classes)?)?;
    let flux = config(folder, "transformer", "denoiser", &["Flux2Transformer2DModel"])?;
    let flux = Flux2Config::read(&flux)?;
    let vae = Flux2VaeConfig::read(&config(folder, "vae", "autoencoder", &["AutoencoderKLFlux2"])?)?;
    let tokenizer = qwen_tokenizer(folder, "tokenizer")?;
    Chat::check_qwen3(folder, "tokenizer")?;
    expect_vocabulary(folder, tokenizer.max_id(), qwen.vocab_size, "")?;
    expect_equal(
        folder,
        ("channels of the autoencoder's latents:", vae.n_channels()),
        ("of those that the transformer takes:", flux.c_in),
    )?;

    let Samplers {
        samplers,
        foreign_scheduler,
    } = schedulers::flow(folder, FlowSigmas::Numpy, Mu::Flux2)?;
    let mut loading = Loading::open(folder, &["transformer", "vae", "text_encoder"])?;
    // The layers behind the last that counts are a quarter of the encoder.
    let last_default = TEXT_LAYERS[TEXT_LAYERS.len() - 1] as usize;
    let last_state = last_default.min(qwen.n_layers);
    loading.ignore("text_encoder", QwenEncoder::unread_names(&qwen, last_state));
    let conditioner = Flux2Conditioner {
        tokenizer,
        n_channels: qwen.n_channels,
        qwen: QwenEncoder::new(&mut loading.at("text_encoder"), qwen, last_state),
        last_state,
        n_joint: flux.n_joint,
    };
    let denoiser = Flux2::new(&mut loading.at("transformer"), &flux);
    loading.ignore("vae", FLUX2_UNREAD_NAMES);
    loading.ignore("vae", KL_UNREAD_NAMES);
    let decoder = Flux2Decoder::new(&mut loading.at("vae"), &vae);
    let mut scope = loading.at("vae");
    let encoder = KlEncoder::is_stored(&scope)
        .then(|| Box::new(Flux2Encoder::new(&mut scope, &vae)) as Box<dyn Encoder>);
    let factor = vae.factor();
    let side = DEFAULT_SIDE_PX.next_multiple_of(factor);
    let sizes = Sizes {
        grid: factor,
        default: (side, side),
        max_side: MAX_SIDE_PX,
    };
    let (n_steps, guidance) = match is_distilled {
        true => (DEFAULT_N_STEPS_DISTILLED, 1.0),
        false => (DEFAULT_N_STEPS, DEFAULT_GUIDANCE),
    };
    loading.finish(Parts {
        info: model_info("flux2-klein", &sizes, n_steps, guidance),
        latents: LatentsLayout {
            steps: TensorLayout::Tokens,
            ..LatentsLayout::picture(flux.c_in, factor, 1)
        },
        max_sequence_length: Some(TEXT_LENGTH),
        conditioner: Box::new(conditioner),
        denoisers: Experts::one(denoiser),
        guidance: match is_distilled {
            true => GuidanceRule::None,
            false => GuidanceRule::Classic,
        },
        decoder: Box::new(decoder),
        tasks: Tasks {
            references: encoder.is_some().then_some(REFERENCES),
            ..Tasks::default()
        },
        encoder,
        samplers,
        foreign_scheduler,
    })
}

/// A picture to edit as it is or, where that is more than a square of 1024, smaller.
fn reference_size(width: u32, height: u32, _: u32) -> std::result::Result<(u32, u32), String> {
    let (long, short) = (width.max(height), width.min(height));
    if short < MIN_REFERENCE_SIDE_PX || f64::from(long) / f64::from(short) > MAX_REFERENCE_ASPECT {
        return Err(format!(
            "a picture is {width}x{height}, this model takes pictures of at least {MIN_REFERENCE_SIDE_PX} pixels each way, one side at \
             most {MAX_REFERENCE_ASPECT} times the other"
        ));
    }
    let area = f64::from(width) * f64::from(height);
    if area <= MAX_REFERENCE_PX {
        return Ok((width, height));
    }
    let scale = (MAX_REFERENCE_PX / area).sqrt();
    let side = |px: u32| ((f64::from(px) * scale) as u32).max(1);
    Ok((side(width), side(height)))
}

/// The text side.
#[derive(Debug)]
struct Flux2Conditioner {
    tokenizer: QwenTokenizer,
    qwen: QwenEncoder,
    n_channels: usize,
    /// Last hidden state that the encoder is loaded for.
    last_state: usize,
    n_joint: usize,
}

impl Conditioner for Flux2Conditioner {
    fn tokenize(
        &self,
        text: &str,
        what: &str,
        options: TextOptions,
        _: &[Image],
    ) -> std::result::Result<Tokenized, String> {
        let reader = Reader {
            what,
            reader: "the model",
            n_tokens: options.max_sequence_length,
        };
        let whole = self.tokenizer.encode(&Chat::NOT_THINKING.apply(text));
        let fitted = self.tokenizer.cut(&whole, options.max_sequence_length);
        let mut tokenized = Tokenized::default();
        push_ids(&mut tokenized, whole, fitted, reader);
        // The reference holds the ids of the text alone.
        tokenized.raw = vec![self.tokenizer.encode(text)];
        Ok(tokenized)
    }

    fn max_clip_skip(&self) -> usize {
        0
    }

    fn check_text_layers(&self, layers: &[u32]) -> std::result::Result<(), String> {
        if layers.is_empty() && TEXT_LAYERS.iter().any(|layer| *layer as usize > self.last_state) {
            let most = self.last_state;
            return Err(format!(
                "text_layers must be given: the text encoder has hidden states up to {most}, not the usual {TEXT_LAYERS:?}"
            ));
        }
        let layers = if layers.is_empty() { &TEXT_LAYERS } else { layers };
        if let Some(layer) = layers.iter().find(|layer| **layer as usize > self.last_state) {
            let most = self.last_state;
            return Err(format!(
                "text_layers has {layer}, the text encoder has hidden states up to {most}"
            ));
        }
        if layers.len() * self.n_channels != self.n_joint {
            let n = self.n_joint / self.n_channels.max(1);
            let given = layers.len();
            return Err(format!(
                "text_layers has {given} numbers, the transformer takes {n}"
            ));
        }
        Ok(())
    }

    fn encode(&self, ctx: &Ctx<'_>, text: &Tokenized, args: &EncodeArgs<'_>) -> Result<Conditioning> {
        let layers = if args.text_layers.is_empty() {
            &TEXT_LAYERS
        } else {
            args.text_layers
        };
        let states: Vec<usize> = layers.iter().map(|layer| *layer as usize).collect();
        let ids = &text.fitted[0];
        let n_tokens = args.options.max_sequence_length;
        let padded = self.tokenizer.fit(ids, n_tokens).ids;
        let hidden = self.qwen.forward(ctx, &padded, ids.len(), &states)?;
        let tokens = ctx.alloc(&[1, n_tokens, hidden.len() * self.n_channels])?;
        for (idx, state) in hidden.iter().enumerate() {
            copy_columns(ctx, state, &tokens, idx * self.n_channels)?;
        }
        Ok(Conditioning::of_tokens(tokens))
    }

    fn trace(
        &self,
        ctx: &Ctx<'_>,
        conditional: &Conditioning,
        unconditional: Option<&Conditioning>,
    ) -> Result<Vec<NamedTensor>> {
        let mut tensors = trace_named(ctx, TRACE_NAMES, conditional, unconditional)?;
        // The second thing that is returned: positions of the text.
        for (idx, one) in std::iter::once(conditional).chain(unconditional).enumerate() {
            let n_tokens = one.tokens.dim(1);
            let positions: Vec<i64> = (0..n_tokens as i64).flat_map(|at| [0, 0, 0, at]).collect();
            let shape = [1, n_tokens as u64, 4];
            let name = format!("encode_prompt.1.{idx}");
            tensors.push(NamedTensor::from_i64(name, &shape, &positions));
        }
        Ok(tensors)
    }
}

#[cfg(test)]
mod tests {
    use super::reference_size;

    #[test]
    fn large_pictures_to_edit_shrink_and_odd_ones_are_refused() {
        // What Flux2KleinPipeline of diffusers 0.42.1 makes of pictures of these sizes before it cuts them to multiples of 16.
        for (size, expected) in [
            ((1024, 1024), (1024, 1024)),
            ((1025, 1024), (1024, 1023)),
            ((1300, 900), (1230, 852)),
            ((100, 70), (100, 70)),
            ((4000, 3000), (1182, 886)),
            ((2048, 512), (2048, 512)),
        ] {
            assert_eq!(reference_size(size.0, size.1, 16), Ok(expected), "{size:?}");
        }
        for (width, height) in [(63, 100), (64, 513), (2000, 64)] {
            let refusal = reference_size(width, height, 16).expect_err("it is refused");
            assert!(refusal.contains(&format!("{width}x{height}")), "{refusal}");
        }
    }
}
