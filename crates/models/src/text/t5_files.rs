//! What transformers' `T5Tokenizer` takes from the files of a tokenizer.
//!
//! R1. Where `tokenizer.json` and `spiece.model` are both there, the former counts.
//! R2. Of `tokenizer.json`, the vocabulary, the added tokens and the compiled rules are taken, of `spiece.model` the first and the last
//!     and its control and user-defined pieces. All other settings (white space, prefix, byte fallback, the id of the unknown piece)
//!     are fixed in `T5Tokenizer`.

use super::{
    files::Files,
    sentencepiece::{PieceKind, SentencePieceModel},
    unigram::PIECE_LIMIT_BYTES,
};
use crate::ModelError;
use denoised_checkpoint::Config;
use serde_json::Value;
use std::collections::{BTreeMap, HashSet};

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
    /// Every token that is looked for in the text, in the order in which transformers adds them; none is empty.
    pub(super) added: Vec<Added>,
    /// Ends a text.
    pub(super) eos: Option<String>,
    /// Fills a text up.
    pub(super) pad: Option<String>,
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
        let added = added_tokens(files, config, &vocabulary, n_extra)?;
        Ok(Self {
            file: vocabulary.file,
            pieces: vocabulary.pieces,
            charsmap: vocabulary.charsmap,
            added: added.tokens,
            eos: added.eos,
            pad: added.pad,
        })
    }
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

/// A token that is looked for in the text itself.
#[derive(Clone, Debug)]
pub(super) struct Added {
    pub(super) content: String,
    /// Whether it is looked for in the normalized text.
    pub(super) is_normalized: bool,
    /// Takes the white space before it with it.
    pub(super) lstrip: bool,
    /// Takes the white space behind it with it.
    pub(super) rstrip: bool,
}

impl Added {
    fn special(content: &str) -> Self {
        Self {
            content: content.to_owned(),
            is_normalized: false,
            lstrip: false,
            rstrip: false,
        }
    }

    /// Of a configuration: the text, or an object with flags; special tokens are looked for in the raw text unless they say otherwise.
    fn read(value: &Value, is_special: bool) -> Result<Self, String> {
        if let Some(content) = value.as_str() {
            return Self::sized(Self::special(content));
        }
        let content = value["content"].as_str();
        let content = content.ok_or_else(|| format!("{value} is no token"))?;
        if value["single_word"] == true {
            return Err(format!(
                "the added token {content:?} is single_word, which is not supported"
            ));
        }
        let flag = |key: &str| value[key].as_bool();
        let is_special = is_special || flag("special").unwrap_or(false);
        Self::sized(Self {
            content: content.to_owned(),
            is_normalized: flag("normalized").unwrap_or(!is_special),
            lstrip: flag("lstrip").unwrap_or(false),
            rstrip: flag("rstrip").unwrap_or(false),
        })
    }

    fn sized(token: Self) -> Result<Self, String> {
        match token.content.len() {
            0..=PIECE_LIMIT_BYTES => Ok(token),
            len => Err(format!(
                "an added token has {len} bytes, at most {PIECE_LIMIT_BYTES} are taken"
            )),
        }
    }
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

/// Roles of tokens, in the order in which transformers adds them.
const ROLES: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];
const EXTRA: &str = "extra_special_tokens";
/// What [`EXTRA`] was called before.
const ADDITIONAL: &str = "additional_special_tokens";

struct AddedList {
    tokens: Vec<Added>,
    eos: Option<String>,
    pad: Option<String>,
}

/// First the listed ones, then those with a role, then the extra ones; what is listed is not added again by a role.
fn added_tokens(
    files: &Files<'_>,
    config: &Config,
    vocabulary: &Vocabulary,
    n_extra: usize,
) -> Result<AddedList, ModelError> {
    let map_file = "special_tokens_map.json";
    let of = |file: &'static str| move |problem| files.error(file, problem);
    let listed_in_config = match config.value("added_tokens_decoder") {
        None => None,
        Some(Value::Object(tokens)) => Some(tokens),
        Some(_) => return Err(config.wrong("added_tokens_decoder", "an object").into()),
    };
    let map = if listed_in_config.is_some() || !files.has(map_file) {
        Value::Object(serde_json::Map::new())
    } else {
        files.json(map_file)?
    };
    let Some(map) = map.as_object() else {
        return Err(files.error(map_file, "is no JSON object".to_owned()));
    };

    // Tokens with a role.
    let mut roles = BTreeMap::new();
    for key in ROLES {
        let default = match key {
            "eos_token" => "</s>".into(),
            "unk_token" => "<unk>".into(),
            "pad_token" => "<pad>".into(),
            _ => Value::Null,
        };
        let (value, is_special, file) = match (map.get(key), config.value(key)) {
            (Some(value), _) => (value, true, map_file),
            (None, Some(value)) => (value, false, "tokenizer_config.json"),
            (None, None) => (&default, true, ""),
        };
        if !value.is_null() {
            roles.insert(key, Added::read(value, is_special).map_err(of(file))?);
        }
    }

    // Extra tokens; `None` where no file speaks of them.
    let read_list = |value: &Value, is_special, file| match value {
        Value::Array(tokens) => {
            let tokens = tokens.iter().map(|token| Added::read(token, is_special));
            tokens.collect::<Result<Vec<_>, _>>().map_err(of(file))
        }
        Value::Null => Ok(Vec::new()),
        _ => Err(files.error(file, format!("the extra special tokens are no list: {value}"))),
    };
    let in_config = |key| {
        let list = config.value(key);
        list.map(|list| read_list(list, false, "tokenizer_config.json"))
            .transpose()
    };
    let is_empty = |list: &Option<Vec<Added>>| list.as_ref().is_none_or(Vec::is_empty);
    let mut extra = in_config(EXTRA)?;
    let mut additional = in_config(ADDITIONAL)?;
    if is_empty(&extra) && additional.is_some() {
        extra = additional.take();
    }
    if let Some(list) = map.get(ADDITIONAL) {
        additional = Some(read_list(list, true, map_file)?);
    }
    if let Some(list) = map.get(EXTRA) {
        let list = read_list(list, true, map_file)?;
        extra = Some(extra.into_iter().flatten().chain(list).collect());
    }
    if let Some(tokens) = &vocabulary.of_model {
        additional = Some(tokens.clone());
    }
    let mut additional = additional.unwrap_or_default();
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
    let extra = extra.unwrap_or(additional);

    // Listed tokens, by their numbers.
    let mut listed: BTreeMap<u64, Added> = BTreeMap::new();
    if let Some(tokens) = listed_in_config {
        for (id, token) in tokens {
            let id = id.parse();
            let id =
                id.map_err(|_| config.wrong("added_tokens_decoder", "an object with numbers as keys"))?;
            let token = Added::read(token, false).map_err(of("tokenizer_config.json"))?;
            listed.insert(id, token);
        }
    } else {
        let added_file = "added_tokens.json";
        if files.has(added_file) {
            let json = files.json(added_file)?;
            let json = json
                .as_object()
                .ok_or_else(|| files.error(added_file, "is no JSON object".to_owned()))?;
            for (content, id) in json {
                let id = id.as_u64();
                let id = id.ok_or_else(|| files.error(added_file, format!("{content:?} has no number")))?;
                let is_special = roles
                    .values()
                    .chain(&extra)
                    .any(|token| token.content == *content);
                let mut token = Added::sized(Added::special(content)).map_err(of(added_file))?;
                token.is_normalized = !is_special;
                listed.insert(id, token);
            }
        }
        for token in &vocabulary.listed {
            let id = token["id"].as_u64();
            let id = id.ok_or_else(|| files.error(JOINT_FILE, format!("{token} has no id")))?;
            let token = Added::read(token, false).map_err(of(JOINT_FILE))?;
            listed.insert(id, token);
        }
    }

    let mut tokens: Vec<Added> = listed.into_values().collect();
    let mut known: HashSet<String> = tokens.iter().map(|token| token.content.clone()).collect();
    let (eos, pad) = (roles.get("eos_token"), roles.get("pad_token"));
    let (eos, pad) = (eos.cloned(), pad.cloned());
    let by_role = ROLES.iter().filter_map(|role| roles.remove(role));
    for token in by_role.chain(extra) {
        if known.insert(token.content.clone()) {
            tokens.push(token);
        }
    }
    tokens.retain(|token| !token.content.is_empty());
    Ok(AddedList {
        tokens,
        eos: eos.map(|token| token.content),
        pad: pad.map(|token| token.content),
    })
}
