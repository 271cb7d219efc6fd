//! Text encoders and their tokenizers.

mod clip;
mod tokenizer;

pub(crate) use clip::{ClipConfig, ClipText};
pub(crate) use tokenizer::ClipTokenizer;
