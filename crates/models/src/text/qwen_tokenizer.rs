//! Qwen2's byte-level BPE, as transformers' `Qwen2Tokenizer` applies it: the ids are equal, whatever the text.
//!
//! 1. Added tokens with `normalized: false` are cut out of the raw text, leftmost first, the longest of several.
//! 2. The pieces between are normalized to NFC; added tokens with `normalized: true` are cut out.
//! 3. The rest is split into contractions, runs of letters with what stands before them, single digits, runs of other characters, and
//!    white space.
//! 4. The bytes of a word become printable characters, which the ranked merges join.
//!
//! Nothing is added at the beginning or the end of a text: that is the business of templates.

use super::{
    added::{Added, AddedRules, Numbered, added_tokens},
    bpe::{Bpe, is_letter, is_number},
    files::Files,
    tokenizer::Fitted,
};
use crate::ModelError;
use denoised_checkpoint::{Config, Folder};
use serde_json::Value;
use unicode_normalization::UnicodeNormalization;

const DEFAULT_SPECIAL: &str = "<|endoftext|>";
/// Contractions that are words of their own, in lower case, in the order in which they are tried.
const CONTRACTIONS: [&str; 7] = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"];

/// A tokenizer with its vocabulary.
pub(crate) struct QwenTokenizer {
    model: Bpe,
    added: Numbered,
    pad: u32,
}

impl std::fmt::Debug for QwenTokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QwenTokenizer")
            .field("model", &self.model)
            .field("n_added", &self.added.texts.len())
            .finish_non_exhaustive()
    }
}

impl QwenTokenizer {
    /// Reads the files of the tokenizer `component`: `tokenizer_config.json`, and `tokenizer.json` or else `vocab.json` and `merges.txt`.
    ///
    /// # Errors
    /// A file is missing, damaged, or not of the form of Qwen2's.
    pub(crate) fn open(folder: &Folder, component: &str) -> Result<Self, ModelError> {
        let config = folder.config(component)?;
        check_config(&config)?;
        let files = Files { folder, component };
        let model = Bpe::read(&files, check_joint)?;
        let joint = "tokenizer.json";
        let listed = match files.has(joint) {
            true => match files.json(joint)?["added_tokens"].take() {
                Value::Array(tokens) => tokens,
                _ => Vec::new(),
            },
            false => Vec::new(),
        };
        let mut list = added_tokens(
            &files,
            &config,
            &AddedRules {
                defaults: &["eos_token", "unk_token", "pad_token"].map(|role| (role, DEFAULT_SPECIAL)),
                listed: &listed,
                additional: &|listed| Ok(listed.unwrap_or_default()),
            },
        )?;
        // `Qwen2Tokenizer` adds its special tokens once more, without flags.
        list.tokens
            .extend(list.specials.iter().map(|content| Added::special(content)));
        let next_id = u32::try_from(model.n_tokens()).unwrap_or(u32::MAX);
        let added = Numbered::new(&list.tokens, next_id, |text| model.id(text), normalize);
        let added = added.map_err(|problem| files.error("", problem))?;
        let pad = list.pad.and_then(|pad| added.id(&pad).or_else(|| model.id(&pad)));
        let pad = pad.ok_or_else(|| files.error("", "there is no pad_token".to_owned()))?;
        Ok(Self { model, added, pad })
    }

    /// Largest id there is.
    pub(crate) fn max_id(&self) -> u32 {
        self.added.max_id().unwrap_or(0).max(self.model.max_id())
    }

    /// The id of a token.
    pub(crate) fn id(&self, content: &str) -> Option<u32> {
        self.added.id(content).or_else(|| self.model.id(content))
    }

    /// All of the text.
    pub(crate) fn encode(&self, text: &str) -> Vec<u32> {
        let mut out = Vec::new();
        let words = |text: &str, out: &mut Vec<u32>| self.encode_words(text, out);
        self.added.encode(text, normalize, words, &mut out);
        out
    }

    /// Cuts what [`QwenTokenizer::encode`] gave to `len` ids.
    pub(crate) fn cut(&self, ids: &[u32], len: usize) -> Fitted {
        match ids.split_at_checked(len) {
            Some((kept, rest)) if !rest.is_empty() => Fitted {
                ids: kept.to_vec(),
                cut: Some(self.decode(rest)),
            },
            _ => Fitted {
                ids: ids.to_vec(),
                cut: None,
            },
        }
    }

    /// Cuts or pads what [`QwenTokenizer::encode`] gave to `len` ids.
    pub(crate) fn fit(&self, ids: &[u32], len: usize) -> Fitted {
        self.cut(ids, len).padded(len, self.pad)
    }

    /// Text of ids, for messages.
    fn decode(&self, ids: &[u32]) -> String {
        let mut out = Vec::new();
        for id in ids {
            match (self.added.texts.get(id), self.model.text(*id)) {
                (Some(text), _) => out.extend(text.bytes()),
                (None, Some(text)) => self.model.push_bytes(text, &mut out),
                (None, None) => {}
            }
        }
        String::from_utf8_lossy(&out).trim().to_owned()
    }

    fn encode_words(&self, text: &str, out: &mut Vec<u32>) {
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let (word, tail) = rest.split_at(word_len(rest, first));
            rest = tail;
            self.model.encode(word, "", None, out);
        }
    }
}

fn normalize(text: &str) -> String {
    text.nfc().collect()
}

/// Length in bytes of the word at the start of `text`, which begins with `first`; never 0.
fn word_len(text: &str, first: char) -> usize {
    let run = |from: usize, is_in: fn(char) -> bool| {
        let tail = &text[from..];
        from + tail.find(|c| !is_in(c)).unwrap_or(tail.len())
    };
    let is_end = |c: char| matches!(c, '\r' | '\n');
    let len = first.len_utf8();
    let second = text[len..].chars().next();
    if let Some(contraction) = contraction_len(text) {
        return contraction;
    }
    if is_letter(first) {
        return run(0, is_letter);
    }
    if !is_number(first) && !is_end(first) && second.is_some_and(is_letter) {
        return run(len, is_letter);
    }
    if is_number(first) {
        return len;
    }
    // Other characters, with the space before them and the ends of lines behind them.
    let prefix = match (first, second) {
        (' ', Some(second)) if is_other(second) => Some(len),
        _ if is_other(first) => Some(0),
        _ => None,
    };
    if let Some(prefix) = prefix {
        return run(run(prefix, is_other), |c| matches!(c, '\r' | '\n'));
    }
    // White space: to the last end of a line; without one, all but what stands before something else.
    let space = run(0, char::is_whitespace);
    if let Some(last) = text[..space].rfind(is_end) {
        return last + 1;
    }
    let last_len = text[..space].chars().next_back().map_or(0, char::len_utf8);
    if space < text.len() && last_len < space {
        space - last_len
    } else {
        space
    }
}

fn is_other(c: char) -> bool {
    !c.is_whitespace() && !is_letter(c) && !is_number(c)
}

/// Length in bytes of the contraction at the start of `text`, whatever its case.
fn contraction_len(text: &str) -> Option<usize> {
    let folded = |c: char| match c {
        // The long s is an s without its case.
        'ſ' => 's',
        _ => c.to_ascii_lowercase(),
    };
    CONTRACTIONS.iter().find_map(|contraction| {
        let mut chars = text.char_indices();
        for expected in contraction.chars() {
            let (_, c) = chars.next()?;
            if folded(c) != expected {
                return None;
            }
        }
        Some(chars.next().map_or(text.len(), |(at, _)| at))
    })
}

/// Settings under which transformers would give other ids.
fn check_config(config: &Config) -> Result<(), ModelError> {
    let classes = ["Qwen2Tokenizer", "Qwen2TokenizerFast"].map(Value::from);
    config.only("tokenizer_class", &classes)?;
    config.only("padding_side", &["right".into()])?;
    config.only("truncation_side", &["right".into()])?;
    config.only("split_special_tokens", &[false.into()])?;
    config.only("add_prefix_space", &[false.into(), Value::Null])?;
    config.only("add_bos_token", &[false.into(), Value::Null])?;
    config.only("add_eos_token", &[false.into(), Value::Null])?;
    Ok(())
}

/// What `tokenizer.json` says beside the vocabulary and the added tokens.
fn check_joint(json: &Value) -> Result<(), String> {
    for key in ["padding", "truncation"] {
        let direction = &json[key]["direction"];
        if direction.as_str().is_some_and(|side| side != "Right") {
            return Err(format!("{key} direction {direction} is not supported, Right is"));
        }
    }
    let end = &json["post_processor"];
    let adds_nothing = match end["type"].as_str() {
        None => end.is_null(),
        Some("ByteLevel") => true,
        Some("TemplateProcessing") => {
            let single = end["single"].as_array();
            single.is_some_and(|single| single.iter().all(|one| one.get("Sequence").is_some()))
        }
        Some(_) => false,
    };
    if adds_nothing {
        return Ok(());
    }
    Err(format!(
        "post-processor {} is not supported: it adds tokens, which those of Qwen do not",
        end["type"]
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tables::{ids_of, table};
    use std::{fs, path::Path};

    // `tests/tables/make_qwen_tokens.py`.
    const TABLE: &str = "qwen_tokens.json";

    /// A checkpoint folder with the tokenizer that a case describes.
    fn folder_of(table: &Value, case: &Value) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let component = folder.path().join("tokenizer");
        fs::create_dir(&component).expect("fresh");
        for (name, content) in case["files"].as_object().expect("files") {
            let content = match content {
                Value::Null => &table["vocabulary"][name],
                content => content,
            };
            let content = content
                .as_str()
                .map_or_else(|| content.to_string(), str::to_owned);
            fs::write(component.join(name), content).expect("written");
        }
        let config = case["config"].to_string();
        fs::write(component.join("tokenizer_config.json"), config).expect("written");
        let index = r#"{"_class_name": "Any", "tokenizer": ["transformers", "Qwen2Tokenizer"]}"#;
        fs::write(folder.path().join("model_index.json"), index).expect("written");
        folder
    }

    fn opened(folder: &Path) -> Result<QwenTokenizer, ModelError> {
        QwenTokenizer::open(&Folder::open(folder).expect("a folder"), "tokenizer")
    }

    fn texts(list: &Value) -> impl Iterator<Item = (&str, Vec<u32>)> {
        let pairs = list.as_array().expect("a list").iter();
        pairs.map(|pair| (pair[0].as_str().expect("a text"), ids_of(&pair[1])))
    }

    #[test]
    fn ids_are_transformers_ids_whatever_the_text() {
        let table = table(TABLE);
        let mut n_texts = 0;
        let mut wrong = Vec::new();
        for (case_idx, case) in table["cases"].as_array().expect("cases").iter().enumerate() {
            let tokenizer = opened(folder_of(&table, case).path()).expect("a tokenizer");
            assert_eq!(u64::from(tokenizer.max_id()), case["max_id"], "case {case_idx}");
            for (text, ids) in texts(&case["ids"]) {
                n_texts += 1;
                let ours = tokenizer.encode(text);
                if ours != ids {
                    wrong.push(format!("{text:?} of case {case_idx}: {ours:?} is not {ids:?}"));
                }
            }
            for (text, ids) in texts(&case["fitted"]) {
                n_texts += 1;
                let fitted = tokenizer.fit(&tokenizer.encode(text), ids.len());
                if fitted.ids != ids {
                    wrong.push(format!("{text:?} cut: {:?} is not {ids:?}", fitted.ids));
                }
            }
        }
        let (n_wrong, wrong) = (wrong.len(), wrong.join("\n"));
        assert!(n_wrong == 0, "{n_wrong} of {n_texts}:\n{wrong}");
        assert!(n_texts > 1000, "only {n_texts} texts were compared");
    }

    #[test]
    fn what_is_cut_is_named() {
        let table = table(TABLE);
        let tokenizer = opened(folder_of(&table, &table["cases"][1]).path()).expect("a tokenizer");
        let ids = tokenizer.encode("a photo of a cat<|im_end|> and the END");
        let fitted = tokenizer.cut(&ids, 5);
        assert_eq!(fitted.ids, ids[..5]);
        assert!(
            fitted
                .cut
                .expect("it is too long")
                .ends_with("<|im_end|> and the END")
        );
        assert_eq!(tokenizer.cut(&ids, ids.len()).cut, None);
        assert_eq!(tokenizer.cut(&ids, 1000).ids, ids);
        assert_eq!(
            tokenizer.id("<|im_end|>"),
            ids.iter().copied().find(|id| *id > 420)
        );
    }

    #[test]
    fn long_texts_take_time_in_proportion() {
        let table = table(TABLE);
        let tokenizer = opened(folder_of(&table, &table["cases"][1]).path()).expect("a tokenizer");
        // Anything quadratic in these would take many minutes.
        for unit in [
            "e", "the", " ", "\n", " \n", "!", "'", "<", "<tool>", "<tool> ", "e\u{301}", "1", "日",
        ] {
            let text = unit.repeat((1 << 18) / unit.len());
            assert!(!tokenizer.encode(&text).is_empty(), "{unit:?}");
        }
    }

    #[test]
    fn files_that_cannot_be_used_are_refused_by_name() {
        let table = table(TABLE);
        let changed = |pointer: &str, value: Value| {
            let mut case = table["cases"][0].clone();
            let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
            case.pointer_mut(parent).expect("it is there")[key] = value;
            case
        };
        for (pointer, value, problem) in [
            (
                "/config/tokenizer_class",
                "LlamaTokenizer".into(),
                "LlamaTokenizer",
            ),
            ("/config/padding_side", "left".into(), "padding_side"),
            ("/config/add_prefix_space", true.into(), "add_prefix_space"),
            ("/config/pad_token", Value::Null, "there is no pad_token"),
            ("/files/tokenizer.json/model/type", "Unigram".into(), "BPE is"),
            (
                "/files/tokenizer.json/model/merges",
                Vec::<Value>::new().into(),
                "lists no merge",
            ),
            (
                "/files/tokenizer.json/post_processor/type",
                "BertProcessing".into(),
                "BertProcessing",
            ),
        ] {
            let case = changed(pointer, value);
            let error = opened(folder_of(&table, &case).path()).expect_err("it cannot be used");
            let error = error.to_string();
            assert!(error.contains(problem), "{problem:?} is not in: {error}");
        }
    }
}
