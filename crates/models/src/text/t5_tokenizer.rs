//! T5's sentencepiece tokenizer, as transformers' `T5Tokenizer` applies it: the ids are equal, whatever the text.
//!
//! 1. Added tokens with `normalized: false` are cut out of the raw text, leftmost first, the longest of several.
//! 2. The pieces between are normalized by the model's compiled rules; added tokens with `normalized: true` are cut out.
//! 3. What is between white space is a word; it begins with U+2581, and so does each of the parts into which that character cuts it.
//! 4. A part becomes the pieces of the highest score.

use super::{
    added::Numbered, charsmap::Charsmap, files::Files, t5_files::T5Files, tokenizer::Fitted, unigram::Unigram,
};
use crate::ModelError;
use denoised_checkpoint::Folder;

/// Stands for white space before a word.
const SPACE: char = '\u{2581}';
/// `T5Tokenizer` takes this id whatever the files say.
const UNK: u32 = 2;

/// A tokenizer with its vocabulary.
pub(crate) struct T5Tokenizer {
    model: Unigram,
    charsmap: Option<Charsmap>,
    added: Numbered,
    eos: u32,
    pad: u32,
}

impl std::fmt::Debug for T5Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("T5Tokenizer")
            .field("model", &self.model)
            .field("charsmap", &self.charsmap)
            .field("n_added", &self.added.texts.len())
            .finish_non_exhaustive()
    }
}

impl T5Tokenizer {
    /// Reads the files of the tokenizer `component`: `tokenizer_config.json`, and `tokenizer.json` or else `spiece.model`.
    ///
    /// # Errors
    /// A file is missing, damaged, or not of the form of T5's.
    pub(crate) fn open(folder: &Folder, component: &str) -> Result<Self, ModelError> {
        let files = Files { folder, component };
        let read = T5Files::read(&files, &folder.config(component)?)?;
        let wrong = |problem| files.error("", problem);
        let model = Unigram::new(read.pieces, UNK).map_err(|problem| files.error(read.file, problem))?;
        let charsmap = read.charsmap.map(|bytes| Charsmap::parse(&bytes));
        let charsmap = charsmap
            .transpose()
            .map_err(|problem| files.error(read.file, problem))?;

        let normalize = |text: &str| normalized(charsmap.as_ref(), text);
        let in_vocabulary = |text: &str| model.id(text);
        let added = Numbered::new(&read.added.tokens, model.n_pieces(), in_vocabulary, normalize);
        let added = added.map_err(wrong)?;
        let id_of = |role: &str, content: &Option<String>| {
            let content = content
                .as_deref()
                .ok_or_else(|| wrong(format!("there is no {role}")))?;
            let id = added.id(content).or_else(|| model.id(content));
            id.ok_or_else(|| wrong(format!("{role} {content:?} is not in the vocabulary")))
        };
        let eos = id_of("eos_token", &read.added.eos)?;
        let pad = id_of("pad_token", &read.added.pad)?;
        Ok(Self {
            added,
            model,
            charsmap,
            eos,
            pad,
        })
    }

    /// Largest id there is.
    pub(crate) fn max_id(&self) -> u32 {
        let added = self.added.max_id();
        added.unwrap_or(0).max(self.model.n_pieces() - 1)
    }

    /// All of the text, end.
    pub(crate) fn encode(&self, text: &str) -> Vec<u32> {
        let mut out = Vec::new();
        let normalize = |text: &str| normalized(self.charsmap.as_ref(), text);
        let words = |text: &str, out: &mut Vec<u32>| self.encode_words(text, out);
        self.added.encode(text, normalize, words, &mut out);
        out.push(self.eos);
        out
    }

    /// Cuts or pads what [`T5Tokenizer::encode`] gave to `len >= 1` ids.
    pub(crate) fn fit(&self, ids: &[u32], len: usize) -> Fitted {
        self.cut(ids, len).padded(len, self.pad)
    }

    /// As [`T5Tokenizer::fit`] without the padding, for encoders that are not shown it.
    pub(crate) fn cut(&self, ids: &[u32], len: usize) -> Fitted {
        Fitted::new(ids, len, self.eos, |cut| self.decode(cut))
    }

    /// Text of ids, for messages.
    fn decode(&self, ids: &[u32]) -> String {
        let text_of = |id: &u32| {
            let added = self.added.texts.get(id).map(String::as_str);
            added.or_else(|| self.model.piece(*id)).unwrap_or_default()
        };
        let text: String = ids.iter().map(text_of).collect();
        text.replace(SPACE, " ").trim().to_owned()
    }

    fn encode_words(&self, text: &str, out: &mut Vec<u32>) {
        let mut part = String::new();
        for word in text.split(char::is_whitespace).filter(|word| !word.is_empty()) {
            let mut rest = word;
            while !rest.is_empty() {
                rest = rest.strip_prefix(SPACE).unwrap_or(rest);
                let (this, next) = rest.split_at(rest.find(SPACE).unwrap_or(rest.len()));
                part.clear();
                part.push(SPACE);
                part.push_str(this);
                self.model.encode(&part, out);
                rest = next;
            }
        }
    }
}

fn normalized(charsmap: Option<&Charsmap>, text: &str) -> String {
    charsmap.map_or_else(|| text.to_owned(), |charsmap| charsmap.normalize(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{
        sentencepiece::SentencePieceModel,
        t5_files::{JOINT_FILE, PIECES_FILE, base64, read_joint},
    };
    use serde_json::Value;
    use std::{fs, path::Path};

    const SOURCE: &str = "sd3/model/tokenizer_3";

    fn data() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data")
    }

    /// A checkpoint folder with a tokenizer as a case of the table describes it.
    fn folder_of(case: &Value) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let component = folder.path().join("tokenizer_3");
        fs::create_dir(&component).expect("fresh");
        if let Some(source) = case["source"].as_str() {
            for entry in fs::read_dir(data().join(source)).expect("the case is there") {
                let entry = entry.expect("readable");
                let name = entry.file_name();
                let without = case["without"].as_array().into_iter().flatten();
                if without
                    .into_iter()
                    .all(|left_out| Some(left_out.as_str()) != Some(name.to_str()))
                {
                    fs::copy(entry.path(), component.join(name)).expect("copied");
                }
            }
        }
        for (name, content) in case["files"].as_object().into_iter().flatten() {
            fs::write(component.join(name), content.to_string()).expect("written");
        }
        if let Some(spiece) = case["spiece"].as_str() {
            fs::write(component.join(PIECES_FILE), base64(spiece).expect("base64")).expect("written");
        }
        if !case["config"].is_null() {
            let config = component.join("tokenizer_config.json");
            fs::write(config, case["config"].to_string()).expect("written");
        }
        let index = r#"{"_class_name": "Any", "tokenizer_3": ["transformers", "T5TokenizerFast"]}"#;
        fs::write(folder.path().join("model_index.json"), index).expect("written");
        folder
    }

    fn opened(folder: &Path) -> Result<T5Tokenizer, ModelError> {
        T5Tokenizer::open(&Folder::open(folder).expect("a folder"), "tokenizer_3")
    }

    fn tokenizer(case: &Value) -> T5Tokenizer {
        opened(folder_of(case).path()).expect("a tokenizer")
    }

    fn texts(list: &Value) -> impl Iterator<Item = (&str, Vec<u32>)> {
        list.as_array().expect("a list").iter().map(|pair| {
            let ids = pair[1].as_array().expect("ids").iter();
            let ids = ids.map(|id| id.as_u64().expect("an id") as u32).collect();
            (pair[0].as_str().expect("a text"), ids)
        })
    }

    // `tests/tables/make_t5_tokens.py`.
    fn cases() -> Vec<Value> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tables/t5_tokens.json");
        let text = fs::read_to_string(path).expect("the table is part of the crate");
        let mut table: Value = serde_json::from_str(&text).expect("JSON");
        match table["cases"].take() {
            Value::Array(cases) => cases,
            other => panic!("{other} is no list"),
        }
    }

    #[test]
    fn ids_are_transformers_ids_whatever_the_text() {
        let mut n_texts = 0;
        let mut wrong = Vec::new();
        for (case_idx, case) in cases().iter().enumerate() {
            let tokenizer = tokenizer(case);
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
        assert!(
            wrong.is_empty(),
            "{} of {n_texts}:\n{}",
            wrong.len(),
            wrong.join("\n")
        );
        assert!(n_texts > 1800, "only {n_texts} texts were compared");
    }

    #[test]
    fn what_is_cut_is_named() {
        let tokenizer = tokenizer(&serde_json::json!({"source": SOURCE}));
        let ids = tokenizer.encode("a photo of a cat and the END");
        let fitted = tokenizer.fit(&ids, 10);
        assert_eq!(fitted.ids.len(), 10);
        let cut = fitted.cut.expect("it is too long");
        // Capital letters are not in this vocabulary.
        assert!(cut.ends_with("d the <unk>"), "{cut}");
        assert_eq!(tokenizer.fit(&ids, ids.len()).cut, None);
        assert_eq!(tokenizer.cut(&ids, 10), tokenizer.fit(&ids, 10));
        assert_eq!(tokenizer.cut(&ids, ids.len() + 5).ids, ids);
        assert_eq!(tokenizer.fit(&ids, 1).ids, [1]);
    }

    #[test]
    fn long_texts_take_time_in_proportion() {
        let rules = serde_json::json!({"source": SOURCE, "without": ["tokenizer.json"]});
        for case in [serde_json::json!({"source": SOURCE}), rules] {
            let tokenizer = tokenizer(&case);
            // Anything quadratic in these would take many minutes.
            for unit in [
                "e",
                "th",
                "x ",
                "\u{2581}",
                "</s>",
                "e\u{301}",
                "\u{301}",
                "👩\u{200d}",
                "🇩",
                "\u{915}\u{94d}",
                "<extra_id_",
                "日",
            ] {
                let text = unit.repeat((1 << 18) / unit.len());
                assert!(!tokenizer.encode(&text).is_empty(), "{unit:?}");
            }
        }
    }

    #[test]
    fn files_that_cannot_be_used_are_refused_by_name() {
        let vocab = serde_json::json!([["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["a", -1.0]]);
        let joint = |key: &str, value: Value| {
            let mut joint = serde_json::json!({"model": {"type": "Unigram", "vocab": vocab}});
            joint[key] = value;
            serde_json::json!({"files": {"tokenizer.json": joint}, "config": {}})
        };
        let rules = |charsmap| {
            joint(
                "normalizer",
                serde_json::json!({"type": "Precompiled", "precompiled_charsmap": charsmap}),
            )
        };
        let config = |config| serde_json::json!({"source": SOURCE, "config": config});
        let list = |token| serde_json::json!({"added_tokens_decoder": {"0": token}});
        assert!(opened(folder_of(&joint("normalizer", Value::Null)).path()).is_ok());
        let refused = [
            (serde_json::json!({"config": {}}), "spiece.model"),
            (
                joint("model", serde_json::json!({"type": "BPE"})),
                "tokenizer.json: model type \"BPE\"",
            ),
            (
                joint("model", serde_json::json!({"vocab": {}})),
                "the vocabulary is no list",
            ),
            (
                joint("model", serde_json::json!({"vocab": [["a"]]})),
                "[\"a\"] is no piece",
            ),
            (
                joint("model", serde_json::json!({"vocab": [["a", 0.0]]})),
                "has 1 pieces",
            ),
            (
                joint("padding", serde_json::json!({"direction": "Left"})),
                "padding direction \"Left\"",
            ),
            (rules("AAA"), "no base64"),
            (rules(""), "has 0 bytes"),
            (rules("BAAAAA=="), "4 bytes, 0 are there"),
            (
                config(serde_json::json!({"tokenizer_class": "LlamaTokenizer"})),
                "LlamaTokenizer",
            ),
            (
                config(serde_json::json!({"padding_side": "left"})),
                "padding_side",
            ),
            (
                config(serde_json::json!({"pad_token": null})),
                "there is no pad_token",
            ),
            (
                config(serde_json::json!({"additional_special_tokens": "<a>"})),
                "no list",
            ),
            (
                config(serde_json::json!({"added_tokens_decoder": {"x": "<a>"}})),
                "added_tokens_decoder",
            ),
            (
                config(list(serde_json::json!({"content": "<a>", "single_word": true}))),
                "single_word",
            ),
            (config(list(serde_json::json!({"special": true}))), "is no token"),
        ];
        for (case, problem) in refused {
            let error = opened(folder_of(&case).path())
                .expect_err("it cannot be used")
                .to_string();
            assert!(error.contains(problem), "{problem:?} is not in: {error}");
        }
    }

    /// Whatever the bytes, the file is read or refused, and what is read can be used.
    #[test]
    fn damaged_files_do_no_harm() {
        let spiece = fs::read(data().join(SOURCE).join(PIECES_FILE)).expect("it is there");
        let text = "ﬁ é \u{301}Å 한국 ① ﷺ\u{200b}👩\u{200d}👩 \u{0}a</s>";
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |below: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random % below as u64) as usize
        };
        let mut n_read = 0;
        for round in 0..300 {
            let mut bytes = spiece.clone();
            // The ends of the file are where its structure is; the middle is the trie.
            for _ in 0..=next(4) {
                let at = if round % 2 == 0 {
                    next(bytes.len())
                } else {
                    next(4000)
                };
                bytes[at] = next(256) as u8;
            }
            if round % 5 == 0 {
                bytes.truncate(next(bytes.len()));
            }
            let Ok(model) = SentencePieceModel::parse(&bytes) else {
                continue;
            };
            let pieces = model.pieces.iter();
            let pieces = pieces.map(|piece| (piece.text.clone(), f64::from(piece.score)));
            let unigram = Unigram::new(pieces.collect(), UNK);
            if let (Ok(charsmap), Ok(unigram)) = (Charsmap::parse(&model.charsmap), unigram) {
                n_read += 1;
                unigram.encode(&charsmap.normalize(text), &mut Vec::new());
            }
        }
        assert!(n_read > 20, "{n_read} of 300 were read");

        let joint = fs::read(data().join(SOURCE).join(JOINT_FILE)).expect("it is there");
        for _ in 0..300 {
            let mut bytes = joint.clone();
            for _ in 0..=next(3) {
                let at = next(bytes.len());
                bytes[at] = b"0123456789[]{}\",:eE-+. ntfx"[next(27)];
            }
            if let Ok(json) = serde_json::from_slice::<Value>(&bytes)
                && let Ok(vocabulary) = read_joint(json)
                && let Ok(unigram) = Unigram::new(vocabulary.pieces, UNK)
            {
                unigram.encode(text, &mut Vec::new());
            }
        }
    }
}
