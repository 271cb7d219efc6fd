//! What a denoiser is told of a text (and pictures beside it), and who makes it.

use crate::trace;
use denoised_nn::{Ctx, Result};
use denoised_tensor::Tensor;
use denoised_types::{Image, NamedTensor};
use std::fmt::Debug;

/// A text as the denoiser takes it.
#[derive(Clone, Debug)]
pub(crate) struct Conditioning {
    /// `[batch, tokens, channels]`.
    pub(crate) tokens: Tensor,
    /// How many equal tokens the last one stands for, itself included. Tokens that are equal on entry and have no positions stay equal
    /// in every block, so one of them, weighted in the softmax, does for all.
    pub(crate) n_last_repeats: usize,
    /// `[batch, channels]`, of families whose denoiser takes it.
    pub(crate) pooled: Option<Tensor>,
    /// f32 `[batch, n]`: numbers that the denoiser embeds itself, such as sizes or a guidance scale.
    pub(crate) numbers: Option<Tensor>,
    /// `[batch, tokens, channels]` of a picture, of families whose denoiser takes it.
    pub(crate) image_tokens: Option<Tensor>,
    /// For traces, `[batch, tokens, channels]`: the tokens with the padding behind them that the reference's encoder is given and its
    /// denoiser does not see. No denoiser is given it here.
    pub(crate) padded: Option<Tensor>,
}

/// Which tensors a [`Conditioning`] has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    n_last_repeats: usize,
    has_pooled: bool,
    has_numbers: bool,
    has_image_tokens: bool,
}

impl Form {
    /// How many tensors there are.
    pub(crate) fn n_tensors(self) -> usize {
        1 + [self.has_pooled, self.has_numbers, self.has_image_tokens]
            .iter()
            .filter(|has| **has)
            .count()
    }
}

impl Conditioning {
    /// Tokens, and nothing else.
    pub(crate) fn of_tokens(tokens: Tensor) -> Self {
        Self {
            tokens,
            n_last_repeats: 1,
            pooled: None,
            numbers: None,
            image_tokens: None,
            padded: None,
        }
    }

    pub(crate) fn form(&self) -> Form {
        Form {
            n_last_repeats: self.n_last_repeats,
            has_pooled: self.pooled.is_some(),
            has_numbers: self.numbers.is_some(),
            has_image_tokens: self.image_tokens.is_some(),
        }
    }

    /// What a denoiser is given, in the order of [`Conditioning::from_tensors`].
    pub(crate) fn tensors(&self) -> Vec<&Tensor> {
        let optional = [&self.pooled, &self.numbers, &self.image_tokens];
        std::iter::once(&self.tokens)
            .chain(optional.into_iter().flatten())
            .collect()
    }

    /// Inverse of [`Conditioning::tensors`]; `None` if there are not as many tensors as the form says.
    pub(crate) fn from_tensors(form: Form, tensors: Vec<Tensor>) -> Option<Self> {
        let mut tensors = tensors.into_iter();
        let tokens = tensors.next()?;
        let mut next = |has: bool| if has { tensors.next().map(Some) } else { Some(None) };
        Some(Self {
            tokens,
            n_last_repeats: form.n_last_repeats,
            pooled: next(form.has_pooled)?,
            numbers: next(form.has_numbers)?,
            image_tokens: next(form.has_image_tokens)?,
            padded: None,
        })
    }
}

/// What a request may choose about the encoding of a text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextOptions {
    /// Longest text in tokens; 0 for families whose length nobody chooses.
    pub(crate) max_sequence_length: usize,
    /// CLIP layers left out beyond the family's own choice.
    pub(crate) clip_skip: usize,
}

/// Beside the text, what an encoding may depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EncodeArgs<'a> {
    pub(crate) options: TextOptions,
    /// Of the picture that will be made.
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) guidance: f32,
    /// Whether this is the negative prompt.
    pub(crate) is_negative: bool,
    /// Whether anybody will ask for [`Conditioner::trace`].
    pub(crate) is_traced: bool,
    /// Hidden layers of the text encoder to take; empty for the family's own choice.
    pub(crate) text_layers: &'a [u32],
    /// Pictures that the request brings.
    pub(crate) images: &'a [Image],
}

/// A text in every tokenizer's ids.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tokenized {
    /// Per tokenizer: begin, all of the text, end.
    pub(crate) raw: Vec<Vec<u32>>,
    /// Per tokenizer: what the encoder is given.
    pub(crate) fitted: Vec<Vec<u32>>,
    /// What the author should know.
    pub(crate) warnings: Vec<String>,
    /// Whether it stands for a negative prompt that nobody gave.
    pub(crate) is_absent: bool,
}

/// Names under which reference cases hold what diffusers' `encode_prompt` returns, for families where that is the tokens of prompt and
/// negative prompt, then their pooled vectors, if there are any.
pub(crate) const ENCODE_PROMPT_NAMES: [&str; 4] = [
    "encode_prompt.0.0",
    "encode_prompt.1.0",
    "encode_prompt.2.0",
    "encode_prompt.3.0",
];

/// How much of the part of a text that was cut off a warning shows.
const N_SHOWN_CHARS: usize = 200;

/// What to tell the author of a text of `n_tokens`, of which `reader` reads `n_read`; `cut` is the rest.
pub(crate) fn cut_warning(what: &str, n_tokens: usize, reader: &str, n_read: usize, cut: &str) -> String {
    let (shown, end) = match cut.char_indices().nth(N_SHOWN_CHARS) {
        Some((end, _)) => (&cut[..end], "…"),
        None => (cut, ""),
    };
    format!("the {what} has {n_tokens} tokens, {reader} reads {n_read}; it was cut before: {shown}{end}")
}

/// All text encoders of a family together.
pub(crate) trait Conditioner: Debug {
    /// Ids of `text`; `what` names it in warnings (`prompt`).
    ///
    /// # Errors
    /// In words, where not every text makes sense: the name of a class that there is not.
    fn tokenize(
        &self,
        text: &str,
        what: &str,
        options: TextOptions,
        images: &[Image],
    ) -> std::result::Result<Tokenized, String>;

    /// Encodes one text. The result depends on nothing else, in particular not on what shares a batch.
    ///
    /// # Errors
    /// The device's.
    fn encode(&self, ctx: &Ctx<'_>, text: &Tokenized, args: &EncodeArgs<'_>) -> Result<Conditioning>;

    /// Largest [`TextOptions::clip_skip`] that leaves a layer to take.
    fn max_clip_skip(&self) -> usize;

    /// Refuses [`EncodeArgs::text_layers`] that cannot be taken.
    ///
    /// # Errors
    /// In words. Where layers are not chosen, any.
    fn check_text_layers(&self, layers: &[u32]) -> std::result::Result<(), String> {
        match layers {
            [] => Ok(()),
            _ => Err("text layers were named, this model's are not to be chosen".to_owned()),
        }
    }

    /// The encodings under the names of reference cases.
    ///
    /// # Errors
    /// The device's.
    fn trace(
        &self,
        ctx: &Ctx<'_>,
        conditional: &Conditioning,
        unconditional: Option<&Conditioning>,
    ) -> Result<Vec<NamedTensor>>;
}

/// Encodings under `names`: tokens of prompt and negative prompt, then their pooled vectors.
pub(crate) fn trace_named(
    ctx: &Ctx<'_>,
    names: [&str; 4],
    conditional: &Conditioning,
    unconditional: Option<&Conditioning>,
) -> Result<Vec<NamedTensor>> {
    let [tokens, negative_tokens, pooled, negative_pooled] = names;
    let pairs = [
        (Some(conditional), tokens, pooled),
        (unconditional, negative_tokens, negative_pooled),
    ];
    let mut tensors = Vec::new();
    for (conditioning, tokens, pooled) in pairs {
        let Some(one) = conditioning else { continue };
        let repeated = trace::repeated(ctx, tokens.to_owned(), &one.tokens, one.n_last_repeats);
        tensors.push(repeated?);
        if let Some(x) = &one.pooled {
            tensors.push(trace::plain(ctx, pooled.to_owned(), x)?);
        }
    }
    Ok(tensors)
}
