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
    /// `[batch, channels]`.
    pub(crate) pooled: Tensor,
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

/// All text encoders of a family together.
pub(crate) trait Conditioner: Debug {
    /// Ids of `text`; `what` names it in warnings (`prompt`).
    fn tokenize(&self, text: &str, what: &str) -> Tokenized;

    /// Encodes one text. The result depends on nothing else, in particular not on what shares a batch.
    ///
    /// # Errors
    /// The device's.
    fn encode(&self, ctx: &Ctx<'_>, text: &Tokenized, max_sequence_length: usize) -> Result<Conditioning>;

    /// Names under which reference cases hold the encodings: tokens of prompt and negative prompt, then pooled ones.
    fn trace_names(&self) -> [&'static str; 4];
}
