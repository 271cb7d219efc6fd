//! What a denoiser is told of a text, and who makes it.

use denoised_nn::{Ctx, Result};
use denoised_tensor::Tensor;
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
}

/// What a request may choose about the encoding of a text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextOptions {
    /// Longest T5 text in tokens; 0 for families without T5.
    pub(crate) max_sequence_length: usize,
    /// CLIP layers left out beyond the family's own choice.
    pub(crate) clip_skip: usize,
}

/// A text in every tokenizer's ids.
#[derive(Clone, Debug)]
pub(crate) struct Tokenized {
    /// Per tokenizer: begin, all of the text, end.
    pub(crate) raw: Vec<Vec<u32>>,
    /// Per tokenizer: what the encoder is given.
    pub(crate) fitted: Vec<Vec<u32>>,
    /// What the author should know.
    pub(crate) warnings: Vec<String>,
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
    fn tokenize(&self, text: &str, what: &str, options: TextOptions) -> Tokenized;

    /// Encodes one text, with the options with which it was tokenized but for `clip_skip`. The result depends on nothing else, in
    /// particular not on what shares a batch.
    ///
    /// # Errors
    /// The device's.
    fn encode(&self, ctx: &Ctx<'_>, text: &Tokenized, options: TextOptions) -> Result<Conditioning>;

    /// Largest [`TextOptions::clip_skip`] that leaves a layer to take.
    fn max_clip_skip(&self) -> usize;

    /// Names under which reference cases hold the encodings: tokens of prompt and negative prompt, then pooled ones.
    fn trace_names(&self) -> [&'static str; 4];
}
