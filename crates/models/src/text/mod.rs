//! Text encoders and their tokenizers.

mod clip;
mod t5;

pub(crate) mod clip_vision;
pub(crate) mod pictures;
pub(crate) mod qwen;
pub(crate) mod qwen_tokenizer;
pub(crate) mod qwen_vision;
mod t5_tokenizer;
mod tokenizer;

mod added;
mod bpe;
mod charsmap;
mod unigram;

mod files;
mod sentencepiece;
mod t5_files;

pub(crate) mod chat;
pub(crate) mod clean;

#[cfg(test)]
mod tables;

pub(crate) use clip::{ClipConfig, ClipEncoder, ClipText, UNREAD_NAMES as CLIP_UNREAD_NAMES};
pub(crate) use t5::{T5Config, T5Encoder};
pub(crate) use t5_tokenizer::T5Tokenizer;
pub(crate) use tokenizer::{ClipTokenizer, Fitted};

/// Keys that transformers writes into every `config.json` and that change nothing of what a text encoder computes.
const TRANSFORMERS_KEYS_WITHOUT_EFFECT: &[&str] = &[
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dropout",
    "dtype",
    "gradient_checkpointing",
    "initializer_factor",
    "initializer_range",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
];
