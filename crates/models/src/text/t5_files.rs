//! What transformers' `T5Tokenizer` takes from the files of a tokenizer.
//!
//! R1. Where `tokenizer.json` and `spiece.model` are both there, the former counts.
//! R2. Of `tokenizer.json`, the vocabulary, the added tokens and the compiled rules are taken, of `spiece.model` the first and the last
//!     and its control and user-defined pieces. All other settings (white space, prefix, byte fallback, the id of the unknown piece)
//!     are fixed in `T5Tokenizer`.

use super::{
    added::{Added, AddedList, AddedRules, added_tokens},
    files::Files,
    sentencepiece::{PieceKind, SentencePieceModel},
};
use crate::ModelError;
use denoised_checkpoint::Config;
use serde_json::Value;

pub(super) const JOINT_FILE: &str = "tokenizer.json";
pub(super) const PIECES_FILE: &str = "spiece.model";
const DEFAULT_N_EXTRA: usize = 100;
const N_EXTRA_LIMIT: usize = 1 << 16;

/// All that the ids depend on.
#[derive(Debug)]
pub(super) struct T5Files {
    /// Where the vocabulary and the rules come from, for messages.
    pub(super) file: &'static str,
    /// The position of a piece is its id.
    pub(super) pieces: Vec<(String, f64)>,
    /// Compiled rules of normalization.
    pub(super) charsmap: Option<Vec<u8>>,
    pub(super) added: AddedList,
}

impl T5Files {
    /// Reads them.
    ///
    /// # Errors
    /// A file is missing, damaged, or not of the form of T5's.
    pub(super) fn read(files: &Files<'_>, config: &Config) -> Result<Self, ModelError> {
        let classes = ["T5Tokenizer", "T5TokenizerFast"].map(Value::from);
        config.only("tokenizer_class", &classes)?;
        config.only("padding_side", &["right".into()])?;
        config.only("truncation_side", &["right".into()])?;
        config.only("split_special_tokens", &[false.into()])?;
        let n_extra = config.usize_or("extra_ids", DEFAULT_N_EXTRA)?;
        config.within("extra_ids", n_extra, 0..=N_EXTRA_LIMIT)?;
        let vocabulary = read_vocabulary(files, n_extra)?;
        let added = added_tokens(
            files,
            config,
            &AddedRules {
                defaults: &[
                    ("eos_token", "</s>"),
                    ("unk_token", "<unk>"),
                    ("pad_token", "<pad>"),
                ],
                listed: &vocabulary.listed,
                additional: &|listed| with_extra(vocabulary.of_model.clone().or(listed), n_extra, files),
            },
        )?;
        Ok(Self {
            file: vocabulary.file,
            pieces: vocabulary.pieces,
            charsmap: vocabulary.charsmap,
            added,
        })
    }
}

/// The additional tokens with the extra ones, which need not be listed.
fn with_extra(
    listed: Option<Vec<Added>>,
    n_extra: usize,
    files: &Files<'_>,
) -> Result<Vec<Added>, ModelError> {
    let mut additional = listed.unwrap_or_default();
    match additional
        .iter()
        .filter(|token| token.content.contains("<extra_id_"))
        .count()
    {
        0 => additional.extend((0..n_extra).map(|idx| Added::special(&extra_token(idx)))),
        n if n_extra > 0 && n != n_extra => {
            let problem = format!("extra_ids is {n_extra}, but {n} such tokens are listed");
            return Err(files.error("", problem));
        }
        _ => {}
    }
    Ok(additional)
}

/// What is read of the one file or the other.
pub(super) struct Vocabulary {
    file: &'static str,
    pub(super) pieces: Vec<(String, f64)>,
    charsmap: Option<Vec<u8>>,
    /// `added_tokens` of `tokenizer.json`.
    listed: Vec<Value>,
    /// Control tokens and user-defined ones of `spiece.model`.
    of_model: Option<Vec<Added>>,
}

fn read_vocabulary(files: &Files<'_>, n_extra: usize) -> Result<Vocabulary, ModelError> {
    let of = |file| move |problem| files.error(file, problem);
    if files.has(JOINT_FILE) {
        return read_joint(files.json(JOINT_FILE)?).map_err(of(JOINT_FILE));
    }
    let read = SentencePieceModel::parse(&files.bytes(PIECES_FILE)?).map_err(of(PIECES_FILE))?;
    let of_model = read.pieces.iter().filter(|piece| piece.kind != PieceKind::Plain);
    let of_model = of_model.map(|piece| Added::sized(Added::special(&piece.text)));
    let of_model = of_model.collect::<Result<_, String>>().map_err(of(PIECES_FILE))?;
    let pieces = read
        .pieces
        .into_iter()
        .map(|piece| (piece.text, f64::from(piece.score)));
    let extra = (0..n_extra).rev().map(|idx| (extra_token(idx), 0.0));
    Ok(Vocabulary {
        file: PIECES_FILE,
        pieces: pieces.chain(extra).collect(),
        charsmap: Some(read.charsmap).filter(|bytes| !bytes.is_empty()),
        listed: Vec::new(),
        of_model: Some(of_model),
    })
}

fn extra_token(idx: usize) -> String {
    format!("<extra_id_{idx}>")
}

pub(super) fn read_joint(mut json: Value) -> Result<Vocabulary, String> {
    let kind = &json["model"]["type"];
    if kind.as_str().is_some_and(|kind| kind != "Unigram") {
        return Err(format!("model type {kind} is not supported, Unigram is"));
    }
    for key in ["padding", "truncation"] {
        let direction = &json[key]["direction"];
        if direction.as_str().is_some_and(|side| side != "Right") {
            return Err(format!("{key} direction {direction} is not supported, Right is"));
        }
    }
    let pieces = json["model"]["vocab"].as_array_mut();
    let pieces = pieces.ok_or("the vocabulary is no list")?;
    let pieces = std::mem::take(pieces).into_iter().map(|piece| match &piece {
        Value::Array(pair) => match &pair[..] {
            [Value::String(text), Value::Number(score)] => {
                Ok((text.clone(), score.as_f64().unwrap_or(f64::NAN)))
            }
            _ => Err(format!("{piece} is no piece with its score")),
        },
        _ => Err(format!("{piece} is no piece with its score")),
    });
    let pieces = pieces.collect::<Result<_, _>>()?;
    let normalizer = &json["normalizer"];
    let normalizers = match normalizer["type"].as_str() {
        Some("Sequence") => normalizer["normalizers"]
            .as_array()
            .ok_or("the sequence of normalizers is no list")?,
        _ => std::slice::from_ref(normalizer),
    };
    let rules = normalizers
        .iter()
        .filter(|one| one["type"] == "Precompiled")
        .find_map(|one| one.get("precompiled_charsmap"));
    let charsmap = rules.map(|rules| {
        let text = rules.as_str().ok_or("the charsmap is no text")?;
        base64(text).ok_or("the charsmap is no base64")
    });
    Ok(Vocabulary {
        file: JOINT_FILE,
        pieces,
        charsmap: charsmap.transpose()?,
        listed: match json["added_tokens"].take() {
            Value::Array(tokens) => tokens,
            _ => Vec::new(),
        },
        of_model: None,
    })
}

/// The standard alphabet, padded.
pub(super) fn base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - digits.len() > 2 {
        return None;
    }
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut n_bits) = (0_u32, 0);
    for digit in digits.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        n_bits += 6;
        if n_bits >= 8 {
            n_bits -= 8;
            out.push((bits >> n_bits) as u8);
        }
    }
    Some(out)
}
