//! What opening a family's checkpoint has in common: components by class, whether they fit each other, their weights.
//!
//! Knows nothing of what any network computes.

use super::expect_class;
use crate::{
    ModelError,
    conditioning::{Tokenized, cut_warning},
    parts::{AUTOENCODER, Opened, Parts, is_of_autoencoder},
    text::{
        CLIP_UNREAD_NAMES, ClipConfig, ClipEncoder, ClipText, ClipTokenizer, Fitted, T5Config, T5Encoder,
        T5Tokenizer, qwen_tokenizer::QwenTokenizer,
    },
    vae::{
        CAUSAL_ENCODER_NAMES, CAUSAL_TIME_NAMES, CausalConfig, CausalDecoder, CausalEncoder, Decoder,
        Encoder, KL_UNREAD_NAMES, KlConfig, KlDecoder, KlEncoder,
    },
};
use denoised_checkpoint::{Config, Folder, Weights};
use denoised_nn::{Ctx, Declare, Result, Scope};
use denoised_tensor::{Precision, Tensor};
use denoised_types::ModelInfo;

const CLIP_TOKENIZERS: [&str; 2] = ["CLIPTokenizer", "CLIPTokenizerFast"];
const T5_TOKENIZERS: [&str; 2] = ["T5Tokenizer", "T5TokenizerFast"];
const QWEN_TOKENIZERS: [&str; 2] = ["Qwen2Tokenizer", "Qwen2TokenizerFast"];

/// The configuration of `component`, whose class must be one of `classes`; `role` is what it is for, in messages.
pub(super) fn config(
    folder: &Folder,
    component: &str,
    role: &'static str,
    classes: &[&str],
) -> std::result::Result<Config, ModelError> {
    expect_class(folder, component, role, classes)?;
    Ok(folder.config(component)?)
}

/// The configuration of an `AutoencoderKL`.
pub(super) fn kl(folder: &Folder) -> std::result::Result<KlConfig, ModelError> {
    KlConfig::read(&config(folder, AUTOENCODER, "autoencoder", &["AutoencoderKL"])?)
}

/// CLIP's tokenizer in the folder `component`.
pub(super) fn clip_tokenizer(
    folder: &Folder,
    component: &str,
) -> std::result::Result<ClipTokenizer, ModelError> {
    expect_class(folder, component, "tokenizer", &CLIP_TOKENIZERS)?;
    ClipTokenizer::open(folder, component)
}

/// T5's tokenizer in the folder `component`.
pub(super) fn t5_tokenizer(folder: &Folder, component: &str) -> std::result::Result<T5Tokenizer, ModelError> {
    expect_class(folder, component, "tokenizer", &T5_TOKENIZERS)?;
    T5Tokenizer::open(folder, component)
}

/// Qwen's tokenizer in the folder `component`.
pub(super) fn qwen_tokenizer(
    folder: &Folder,
    component: &str,
) -> std::result::Result<QwenTokenizer, ModelError> {
    expect_class(folder, component, "tokenizer", &QWEN_TOKENIZERS)?;
    QwenTokenizer::open(folder, component)
}

/// Components that do not fit each other.
pub(super) fn unfit(folder: &Folder, problem: String) -> ModelError {
    ModelError::Unfit {
        path: folder.path().to_owned(),
        problem,
    }
}

/// Refuses two numbers that differ; what is said of each ends where its number follows: `("channels of the text encoder:", 768)`.
pub(super) fn expect_equal(
    folder: &Folder,
    (one, n_one): (&str, usize),
    (other, n_other): (&str, usize),
) -> std::result::Result<(), ModelError> {
    if n_one == n_other {
        return Ok(());
    }
    Err(unfit(
        folder,
        format!("{one} {n_one}, {other} {n_other}; they must be equal"),
    ))
}

/// Refuses a CLIP tokenizer that makes more tokens, or others, than its encoder takes. Components are told apart by `suffix`: ` 2`.
pub(super) fn expect_clip(
    folder: &Folder,
    (tokenizer, n_tokens): (&ClipTokenizer, usize),
    clip: &ClipConfig,
    suffix: &str,
) -> std::result::Result<(), ModelError> {
    if n_tokens > clip.n_positions {
        let n_positions = clip.n_positions;
        let problem =
            format!("the tokenizer makes {n_tokens} tokens, text encoder{suffix} takes {n_positions}");
        return Err(unfit(folder, problem));
    }
    expect_vocabulary(folder, tokenizer.max_id(), clip.vocab_size, suffix)
}

/// Refuses a tokenizer with ids that its text encoder has no embedding for.
pub(super) fn expect_vocabulary(
    folder: &Folder,
    max_id: u32,
    vocab_size: usize,
    suffix: &str,
) -> std::result::Result<(), ModelError> {
    if (max_id as usize) < vocab_size {
        return Ok(());
    }
    let problem = format!("tokenizer{suffix} has the id {max_id}, text encoder{suffix} knows {vocab_size}");
    Err(unfit(folder, problem))
}

/// Sizes of the pictures of a family.
pub(super) struct Sizes {
    /// Width and height are multiples of this.
    pub(super) grid: usize,
    /// Width and height when none are asked for.
    pub(super) default: (usize, usize),
    pub(super) max_side: usize,
}

/// What is said of a model. Its samplers and the bytes of its files are filled in by [`Loading::finish`].
pub(super) fn model_info(family: &str, sizes: &Sizes, n_steps: u32, guidance: f32) -> ModelInfo {
    let px = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    // On the grid and within what the model makes, whatever its files say.
    let grid = sizes.grid.max(1);
    let side = |n: usize| px((n.min(sizes.max_side) / grid * grid).max(grid));
    ModelInfo {
        family: family.to_owned(),
        grid_px: px(sizes.grid),
        default_size: (side(sizes.default.0), side(sizes.default.1)),
        max_side_px: px(sizes.max_side),
        default_n_steps: n_steps,
        default_guidance: guidance,
        samplers: Vec::new(),
        checkpoint_bytes: 0,
        ..ModelInfo::default()
    }
}

/// The weights of a checkpoint while networks declare which of them they need.
pub(super) struct Loading {
    weights: Weights,
    declare: Declare,
    unread: Vec<String>,
    /// Of the autoencoder's weights.
    autoencoder_precision: Precision,
}

impl Loading {
    /// Opens the weight files of `components`; one that has none is refused with the names of the files that were expected.
    pub(super) fn open(folder: &Folder, components: &[&str]) -> std::result::Result<Self, ModelError> {
        let weights = folder.weights(components)?;
        Ok(Self {
            declare: Declare::new(weights.names()),
            weights,
            unread: Vec::new(),
            autoencoder_precision: Precision::Device,
        })
    }

    /// The place of a component's tensors.
    pub(super) fn at(&mut self, component: &str) -> Scope<'_> {
        self.declare.at(&format!("{component}/"))
    }

    /// Tensors of a component that no network needs; an entry may end with `*` for any text.
    pub(super) fn ignore(&mut self, component: &str, names: impl IntoIterator<Item = impl AsRef<str>>) {
        let full = |name: &str| format!("{component}/{name}");
        self.unread
            .extend(names.into_iter().map(|name| full(name.as_ref())));
    }

    /// CLIP without projection.
    pub(super) fn clip(&mut self, component: &str, config: &ClipConfig) -> ClipEncoder {
        self.ignore(component, CLIP_UNREAD_NAMES);
        ClipEncoder::new(&mut self.at(component), config)
    }

    /// CLIP with projection.
    pub(super) fn clip_text(&mut self, component: &str, config: &ClipConfig) -> ClipText {
        self.ignore(component, CLIP_UNREAD_NAMES);
        ClipText::new(&mut self.at(component), config)
    }

    /// T5's encoder.
    pub(super) fn t5(&mut self, component: &str, config: T5Config) -> T5Encoder {
        self.ignore(component, T5Encoder::UNREAD_NAMES);
        T5Encoder::new(&mut self.at(component), config)
    }

    /// Both halves of an `AutoencoderKL`, the first if the files have it.
    pub(super) fn kl(&mut self, config: &KlConfig) -> Autoencoder {
        let mut vae = self.at(AUTOENCODER);
        let encoder = KlEncoder::is_stored(&vae)
            .then(|| Box::new(KlEncoder::new(&mut vae, config)) as Box<dyn Encoder>);
        Autoencoder {
            encoder,
            decoder: Box::new(self.kl_decoder(config)),
        }
    }

    /// The half of an `AutoencoderKL` that makes pictures.
    pub(super) fn kl_decoder(&mut self, config: &KlConfig) -> KlDecoder {
        self.ignore(AUTOENCODER, KL_UNREAD_NAMES);
        self.autoencoder_precision = config.precision;
        KlDecoder::new(&mut self.at(AUTOENCODER), config)
    }

    /// Both halves of an `AutoencoderKLQwenImage`, the first if the files have it.
    pub(super) fn qwen_image_vae(&mut self, config: &CausalConfig) -> Autoencoder {
        self.unread.extend(CAUSAL_TIME_NAMES.map(str::to_owned));
        self.causal(config)
    }

    /// Both halves of an autoencoder of frames, the first if the files have it.
    pub(super) fn causal(&mut self, config: &CausalConfig) -> Autoencoder {
        self.ignore(AUTOENCODER, CAUSAL_ENCODER_NAMES);
        let mut scope = self.at(AUTOENCODER);
        let decoder = CausalDecoder::new(&mut scope, config);
        let encoder =
            CausalEncoder::is_stored(&scope).then(|| Box::new(CausalEncoder::new(&mut scope, config)) as _);
        Autoencoder {
            encoder,
            decoder: Box::new(decoder),
        }
    }

    /// Compares what was declared with the files, and finishes what `parts` say of themselves.
    pub(super) fn finish(self, mut parts: Parts) -> std::result::Result<Opened, ModelError> {
        let mut specs = self.declare.finish();
        for spec in specs.iter_mut().filter(|spec| is_of_autoencoder(spec)) {
            spec.precision = self.autoencoder_precision;
        }
        let unread: Vec<&str> = self.unread.iter().map(String::as_str).collect();
        self.weights.check(&specs, &unread)?;
        let info = &mut parts.info;
        info.samplers = parts
            .samplers
            .iter()
            .map(|sampler| sampler.name().to_owned())
            .collect();
        info.checkpoint_bytes = self.weights.total_bytes();
        Ok(Opened {
            parts,
            specs,
            weights: self.weights,
        })
    }
}

/// Pictures to latents and back.
pub(super) struct Autoencoder {
    pub(super) encoder: Option<Box<dyn Encoder>>,
    pub(super) decoder: Box<dyn Decoder>,
}

/// Who reads at most how many tokens of a text, for warnings.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    /// Name of the text, e.g. `prompt`.
    pub(super) what: &'a str,
    /// Name of the encoder.
    pub(super) reader: &'a str,
    pub(super) n_tokens: usize,
}

/// Adds the ids of one more tokenizer, and a warning if the text was cut and none of the same reader says so.
pub(super) fn push_ids(tokenized: &mut Tokenized, raw: Vec<u32>, fitted: Fitted, reader: Reader<'_>) {
    let Reader {
        what,
        reader,
        n_tokens,
    } = reader;
    if let Some(cut) = fitted.cut {
        let warning = cut_warning(what, raw.len(), reader, n_tokens, &cut);
        let is_said = format!("tokens, {reader} reads");
        if !tokenized.warnings.iter().any(|said| said.contains(&is_said)) {
            tokenized.warnings.push(warning);
        }
    }
    tokenized.raw.push(raw);
    tokenized.fitted.push(fitted.ids);
}

/// As [`push_ids`] with CLIP's tokenizer.
pub(super) fn push_clip_ids(
    tokenized: &mut Tokenized,
    tokenizer: &ClipTokenizer,
    text: &str,
    reader: Reader<'_>,
) {
    let raw = tokenizer.encode(text);
    let fitted = tokenizer.fit(&raw, reader.n_tokens);
    push_ids(tokenized, raw, fitted, reader);
}

/// Copies `x` `[.., width]` to the columns of `out` that begin at `column`.
pub(super) fn copy_columns(ctx: &Ctx<'_>, x: &Tensor, out: &Tensor, column: usize) -> Result<()> {
    let last_idx = out.dims().len() - 1;
    ctx.backend
        .copy(x, &out.narrow(last_idx, column, x.dim(last_idx))?)
}
