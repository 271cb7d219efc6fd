//! CLIP's byte-level BPE, as transformers' `CLIPTokenizer` applies it: the ids are equal, whatever the text.
//!
//! 1. Special tokens with `normalized: false` are cut out of the raw text, longest first.
//! 2. The pieces between are normalized: NFC, white space to one space, lower case; special tokens with `normalized: true` are cut out.
//! 3. The rest is split into contractions, runs of letters, single digits and runs of other characters; white space is dropped.
//! 4. A word's bytes become printable characters, the last with `</w>`, which the ranked merges join.

use super::{
    bpe::{Bpe, is_letter, is_number},
    files::Files,
};
use crate::ModelError;
use denoised_checkpoint::{Config, Folder};
use serde_json::Value;
use std::{cmp::Reverse, collections::BTreeMap};
use unicode_normalization::UnicodeNormalization;

const BOS: &str = "<|startoftext|>";
const EOS: &str = "<|endoftext|>";
const WORD_END: &str = "</w>";
/// Contractions that are words of their own, in the order in which they are tried.
const CONTRACTIONS: [&str; 7] = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"];

/// A tokenizer with its vocabulary.
pub(crate) struct ClipTokenizer {
    model: Bpe,
    raw_specials: Vec<Special>,
    normalized_specials: Vec<Special>,
    bos: u32,
    eos: u32,
    unk: u32,
    pad: u32,
    max_length: usize,
}

impl std::fmt::Debug for ClipTokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClipTokenizer")
            .field("model", &self.model)
            .field("max_length", &self.max_length)
            .finish_non_exhaustive()
    }
}

/// A token that is looked for in the text itself.
#[derive(Clone, Debug)]
struct Special {
    content: String,
    id: u32,
}

/// Ids for a text encoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fitted {
    /// Begin, text, end, then padding if there is any.
    pub(crate) ids: Vec<u32>,
    /// The part of the text that did not fit.
    pub(crate) cut: Option<String>,
}

impl Fitted {
    /// Cuts `ids`, the last of which is `eos`, to `len >= 1`, so that they end with `eos` all the same. `text_of` decodes what is cut
    /// off.
    pub(super) fn new(ids: &[u32], len: usize, eos: u32, text_of: impl FnOnce(&[u32]) -> String) -> Self {
        if ids.len() <= len {
            return Self {
                ids: ids.to_vec(),
                cut: None,
            };
        }
        let n_kept = len.saturating_sub(1);
        Self {
            ids: ids[..n_kept].iter().copied().chain([eos]).collect(),
            cut: Some(text_of(&ids[n_kept..ids.len() - 1])),
        }
    }

    /// Fills up to `len` ids.
    pub(super) fn padded(mut self, len: usize, pad: u32) -> Self {
        if self.ids.len() < len {
            self.ids.resize(len, pad);
        }
        self
    }
}

impl ClipTokenizer {
    /// Reads the files of the tokenizer `component`: `tokenizer_config.json`, and `tokenizer.json` or else `vocab.json` and `merges.txt`.
    ///
    /// # Errors
    /// A file is missing or not of the form of CLIP's.
    pub(crate) fn open(folder: &Folder, component: &str) -> Result<Self, ModelError> {
        let config = folder.config(component)?;
        check_config(&config)?;
        let files = Files { folder, component };
        let model = Bpe::read(&files, check_joint)?;
        let wrong = |problem: String| files.error("", problem);
        let id_of = |content: &str| {
            let id = model.id(content);
            id.ok_or_else(|| wrong(format!("special token {content:?} is not in the vocabulary")))
        };
        let names = special_names(&files, &config)?;
        let mut raw_specials = Vec::new();
        let mut normalized_specials = Vec::new();
        for (content, is_normalized) in listed_specials(&files, &config, &names)? {
            let id = id_of(&content)?;
            if is_normalized {
                let content = normalize(&content);
                normalized_specials.push(Special { content, id });
            } else {
                raw_specials.push(Special { content, id });
            }
        }
        // The longest match wins, as with transformers.
        raw_specials.sort_by_key(|special| Reverse(special.content.len()));
        normalized_specials.sort_by_key(|special| Reverse(special.content.len()));
        let name_of = |key: &str, default: &str| {
            names
                .get(key)
                .map_or(default, |special| &special.content)
                .to_owned()
        };
        let max_length = config.usize("model_max_length")?;
        if max_length < 2 {
            return Err(config
                .wrong(
                    "model_max_length",
                    "at least 2, for the tokens that begin and end a text",
                )
                .into());
        }
        Ok(Self {
            bos: id_of(&name_of("bos_token", BOS))?,
            eos: id_of(&name_of("eos_token", EOS))?,
            unk: id_of(&name_of("unk_token", EOS))?,
            pad: id_of(&name_of("pad_token", EOS))?,
            model,
            raw_specials,
            normalized_specials,
            max_length,
        })
    }

    /// Longest text in tokens, with its begin and end.
    pub(crate) fn max_length(&self) -> usize {
        self.max_length
    }

    /// Largest id there is.
    pub(crate) fn max_id(&self) -> u32 {
        self.model.max_id()
    }

    /// Begin, all of the text, end.
    pub(crate) fn encode(&self, text: &str) -> Vec<u32> {
        let mut out = vec![self.bos];
        for piece in cut_out(text, &self.raw_specials) {
            match piece {
                Piece::Special(id) => out.push(id),
                Piece::Text(text) => {
                    let text = normalize(text);
                    for piece in cut_out(&text, &self.normalized_specials) {
                        match piece {
                            Piece::Special(id) => out.push(id),
                            Piece::Text(text) => self.encode_words(text, &mut out),
                        }
                    }
                }
            }
        }
        out.push(self.eos);
        out
    }

    /// Cuts or pads what [`ClipTokenizer::encode`] gave to `len >= 2` ids.
    pub(crate) fn fit(&self, ids: &[u32], len: usize) -> Fitted {
        Fitted::new(ids, len, self.eos, |cut| self.decode(cut)).padded(len, self.pad)
    }

    /// Text of ids, for messages.
    fn decode(&self, ids: &[u32]) -> String {
        let mut out = Vec::new();
        for text in ids.iter().filter_map(|id| self.model.text(*id)) {
            let word_end = text.strip_suffix(WORD_END);
            self.model.push_bytes(word_end.unwrap_or(text), &mut out);
            if word_end.is_some() {
                out.push(b' ');
            }
        }
        String::from_utf8_lossy(&out).trim().to_owned()
    }

    fn encode_words(&self, text: &str, out: &mut Vec<u32>) {
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let len = word_len(rest, first);
            let (word, tail) = rest.split_at(len.max(first.len_utf8()));
            rest = tail;
            match word {
                _ if len == 0 => {}
                // Text that only looks like a special token is one word for the first rule and three for byte-level BPE's own.
                BOS | EOS => {
                    for part in ["<|", &word[2..word.len() - 2], "|>"] {
                        self.model.encode(part, WORD_END, Some(self.unk), out);
                    }
                }
                _ => self.model.encode(word, WORD_END, Some(self.unk), out),
            }
        }
    }
}

enum Piece<'a> {
    Text(&'a str),
    Special(u32),
}

/// Splits `text` at the leftmost special tokens; `specials` are sorted by length, longest first.
fn cut_out<'a>(text: &'a str, specials: &[Special]) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    let mut start = 0;
    let mut at = 0;
    while at < text.len() {
        let found = specials
            .iter()
            .find(|special| text[at..].starts_with(&special.content));
        match found {
            Some(special) => {
                if start < at {
                    pieces.push(Piece::Text(&text[start..at]));
                }
                pieces.push(Piece::Special(special.id));
                at += special.content.len();
                start = at;
            }
            None => at += text[at..].chars().next().map_or(1, char::len_utf8),
        }
    }
    if start < text.len() {
        pieces.push(Piece::Text(&text[start..]));
    }
    pieces
}

/// NFC, runs of white space to one space, lower case character by character.
fn normalize(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_space = false;
    for c in text.nfc() {
        if c.is_whitespace() {
            if !in_space {
                out.push(' ');
            }
            in_space = true;
        } else {
            in_space = false;
            out.extend(c.to_lowercase());
        }
    }
    out
}

/// Length in bytes of the word at the start of `text`; 0 for white space.
fn word_len(text: &str, first: char) -> usize {
    if let Some(special) = [BOS, EOS].into_iter().find(|special| text.starts_with(special)) {
        return special.len();
    }
    if let Some(contraction) = CONTRACTIONS.into_iter().find(|c| text.starts_with(c)) {
        return contraction.len();
    }
    let run = |is_in: fn(char) -> bool| text.find(|c| !is_in(c)).unwrap_or(text.len());
    if is_letter(first) {
        run(is_letter)
    } else if is_number(first) {
        first.len_utf8()
    } else {
        run(|c| !c.is_whitespace() && !is_letter(c) && !is_number(c))
    }
}

/// Settings under which transformers would give other ids.
fn check_config(config: &Config) -> Result<(), ModelError> {
    let classes = ["CLIPTokenizer", "CLIPTokenizerFast"].map(Value::from);
    config.only("tokenizer_class", &classes)?;
    config.only("padding_side", &["right".into()])?;
    config.only("truncation_side", &["right".into()])?;
    config.only("split_special_tokens", &[false.into()])?;
    Ok(())
}

/// What `tokenizer.json` says beside the vocabulary.
fn check_joint(json: &Value) -> Result<(), String> {
    let end = &json["post_processor"];
    if end.is_null() || end["type"] == "RobertaProcessing" {
        return Ok(());
    }
    Err(format!(
        "post-processor {} is not supported, RobertaProcessing is",
        end["type"]
    ))
}

/// A token as configurations write it: its text, or an object with flags.
#[derive(Clone, Debug)]
struct Named {
    content: String,
    is_normalized: bool,
}

/// Keys of the configuration that name special tokens, in the order in which transformers adds them.
const SPECIAL_KEYS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// The special tokens that are named by role. `special_tokens_map.json` counts where the configuration has no `added_tokens_decoder`.
fn special_names(files: &Files<'_>, config: &Config) -> Result<BTreeMap<&'static str, Named>, ModelError> {
    let map_file = "special_tokens_map.json";
    let map = if config.has("added_tokens_decoder") || !files.has(map_file) {
        Value::Null
    } else {
        files.json(map_file)?
    };
    if !map.is_null() && !map.is_object() {
        return Err(files.error(map_file, "is no JSON object".to_owned()));
    }
    let mut names = BTreeMap::new();
    for key in SPECIAL_KEYS {
        let default = match key {
            "bos_token" => Value::from(BOS),
            "eos_token" | "unk_token" | "pad_token" => Value::from(EOS),
            _ => Value::Null,
        };
        let value = map.get(key).or(config.value(key)).unwrap_or(&default);
        if !value.is_null() {
            names.insert(key, named(value, files)?);
        }
    }
    Ok(names)
}

fn named(value: &Value, files: &Files<'_>) -> Result<Named, ModelError> {
    let content = value.as_str().or(value["content"].as_str());
    let content = content
        .filter(|content| !content.is_empty())
        .ok_or_else(|| files.error("", format!("{value} is no special token")))?;
    if value["single_word"] == true {
        let problem = format!("special token {content:?} is single_word, which is not supported");
        return Err(files.error("", problem));
    }
    Ok(Named {
        content: content.to_owned(),
        is_normalized: value["normalized"].as_bool().unwrap_or(false),
    })
}

/// Every token that is looked for in the text, and whether in the normalized one: first the listed ones, then those with a role, then
/// the extra ones; of two with the same text, the first counts.
fn listed_specials(
    files: &Files<'_>,
    config: &Config,
    names: &BTreeMap<&'static str, Named>,
) -> Result<Vec<(String, bool)>, ModelError> {
    let mut listed: Vec<Named> = Vec::new();
    if let Some(tokens) = config.value("added_tokens_decoder").and_then(Value::as_object) {
        for token in tokens.values() {
            listed.push(named(token, files)?);
        }
    } else if files.has("tokenizer.json") {
        let joint = files.json("tokenizer.json")?;
        for token in joint["added_tokens"].as_array().into_iter().flatten() {
            listed.push(named(token, files)?);
        }
    }
    for key in SPECIAL_KEYS {
        // What is listed with flags keeps them where a role names it too.
        listed.extend(names.get(key).cloned());
    }
    for key in ["additional_special_tokens", "extra_special_tokens"] {
        for token in config.value(key).and_then(Value::as_array).into_iter().flatten() {
            listed.push(named(token, files)?);
        }
    }
    let mut specials: Vec<(String, bool)> = Vec::new();
    for token in listed {
        if specials.iter().all(|(content, _)| *content != token.content) {
            specials.push((token.content, token.is_normalized));
        }
    }
    Ok(specials)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::Path};

    fn table() -> Value {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tables/tokens.json");
        serde_json::from_str(&fs::read_to_string(path).expect("the table is part of the crate"))
            .expect("JSON")
    }

    /// A checkpoint folder with the tokenizer of a case of `tests/data`, and another configuration if there is one.
    fn tokenizer(source: &str, config: &Value) -> ClipTokenizer {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let component = folder.path().join("tokenizer");
        fs::create_dir(&component).expect("fresh");
        for entry in fs::read_dir(data.join(source)).expect("the case is there") {
            let entry = entry.expect("readable");
            fs::copy(entry.path(), component.join(entry.file_name())).expect("copied");
        }
        if !config.is_null() {
            fs::write(component.join("tokenizer_config.json"), config.to_string()).expect("written");
            let _ = fs::remove_file(component.join("special_tokens_map.json"));
        }
        let index = r#"{"_class_name": "Any", "tokenizer": ["transformers", "CLIPTokenizer"]}"#;
        fs::write(folder.path().join("model_index.json"), index).expect("written");
        ClipTokenizer::open(&Folder::open(folder.path()).expect("a folder"), "tokenizer")
            .expect("a tokenizer")
    }

    fn texts(list: &Value) -> impl Iterator<Item = (&str, Vec<u32>)> {
        list.as_array().expect("a list").iter().map(|pair| {
            let ids = pair[1].as_array().expect("ids").iter();
            let ids = ids.map(|id| id.as_u64().expect("an id") as u32).collect();
            (pair[0].as_str().expect("a text"), ids)
        })
    }

    #[test]
    fn ids_are_transformers_ids_whatever_the_text() {
        let table = table();
        let mut n_texts = 0;
        let mut wrong = Vec::new();
        for case in table["cases"].as_array().expect("cases") {
            let tokenizer = tokenizer(case["source"].as_str().expect("a path"), &case["config"]);
            assert_eq!(tokenizer.max_length() as u64, case["max_length"]);
            for (text, ids) in texts(&case["ids"]) {
                n_texts += 1;
                let ours = tokenizer.encode(text);
                if ours != ids {
                    wrong.push(format!("{text:?} of {}: {ours:?} is not {ids:?}", case["source"]));
                }
            }
            for (text, ids) in texts(&case["fitted"]) {
                n_texts += 1;
                let fitted = tokenizer.fit(&tokenizer.encode(text), tokenizer.max_length());
                if fitted.ids != ids {
                    wrong.push(format!("{text:?} cut: {:?} is not {ids:?}", fitted.ids));
                }
            }
        }
        assert!(
            wrong.is_empty(),
            "{} of {n_texts}:\n{}",
            wrong.len(),
            wrong.join("\n")
        );
        assert!(n_texts > 1000, "only {n_texts} texts were compared");
    }

    #[test]
    fn what_is_cut_is_named() {
        let tokenizer = tokenizer("emoji-dit/model/tokenizer", &Value::Null);
        let text = "a red apple ".repeat(6) + "and the END of it";
        let fitted = tokenizer.fit(&tokenizer.encode(&text), tokenizer.max_length());
        assert_eq!(fitted.ids.len(), 20);
        assert!(fitted.cut.expect("it is too long").ends_with("and the end of it"));
        assert_eq!(tokenizer.fit(&tokenizer.encode("a red apple"), 20).cut, None);
    }

    #[test]
    fn a_word_of_128_kib_takes_no_quadratic_time() {
        let tokenizer = tokenizer("sd35m/model/tokenizer", &Value::Null);
        assert!(tokenizer.encode(&"the".repeat(128 * 1024 / 3)).len() > 1000);
    }
}
