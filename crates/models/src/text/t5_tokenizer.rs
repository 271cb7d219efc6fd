//! T5's sentencepiece tokenizer, as transformers' `T5Tokenizer` applies it: the ids are equal, whatever the text.
//!
//! 1. Added tokens with `normalized: false` are cut out of the raw text, leftmost first, the longest of several.
//! 2. The pieces between are normalized by the model's compiled rules; added tokens with `normalized: true` are cut out.
//! 3. What is between white space is a word; it begins with U+2581, and so does each of the parts into which that character cuts it.
//! 4. A part becomes the pieces of the highest score.
//!
//! Of `tokenizer.json`, transformers takes the vocabulary, the added tokens and the compiled rules, and of `spiece.model` the first and
//! the last; its other settings (white space, prefix, byte fallback, the id of the unknown piece) are fixed in `T5Tokenizer`. Where both
//! files are there, the former counts.

use super::{
    charsmap::Charsmap,
    sentencepiece::{PieceKind, SentencePieceModel},
    tokenizer::Fitted,
    unigram::{PIECE_LIMIT_BYTES, Trie, Unigram},
};
use crate::ModelError;
use denoised_checkpoint::{Config, Folder};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

const JOINT_FILE: &str = "tokenizer.json";
const PIECES_FILE: &str = "spiece.model";
/// Stands for white space before a word.
const SPACE: char = '\u{2581}';
/// `T5Tokenizer` takes this id whatever the files say.
const UNK: u32 = 2;
const DEFAULT_N_EXTRA: usize = 100;
const N_EXTRA_LIMIT: usize = 1 << 16;
/// UMT5's `tokenizer.json`, the largest of this kind, has 16 MiB.
const FILE_LIMIT_BYTES: u64 = 64 << 20;

/// A tokenizer with its vocabulary.
pub(crate) struct T5Tokenizer {
    model: Unigram,
    charsmap: Option<Charsmap>,
    raw_tokens: AddedTokens,
    normalized_tokens: AddedTokens,
    /// Texts of added tokens, for messages.
    texts: HashMap<u32, String>,
    eos: u32,
    pad: u32,
}

impl std::fmt::Debug for T5Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("T5Tokenizer")
            .field("model", &self.model)
            .field("charsmap", &self.charsmap)
            .field("n_added", &self.texts.len())
            .finish_non_exhaustive()
    }
}

impl T5Tokenizer {
    /// Reads the files of the tokenizer `component`: `tokenizer_config.json`, and `tokenizer.json` or else `spiece.model`.
    ///
    /// # Errors
    /// A file is missing, damaged, or not of the form of T5's.
    pub(crate) fn open(folder: &Folder, component: &str) -> Result<Self, ModelError> {
        let config = folder.config(component)?;
        let classes = ["T5Tokenizer", "T5TokenizerFast"].map(Value::from);
        config.only("tokenizer_class", &classes)?;
        config.only("padding_side", &["right".into()])?;
        config.only("truncation_side", &["right".into()])?;
        config.only("split_special_tokens", &[false.into()])?;
        let n_extra = config.usize_or("extra_ids", DEFAULT_N_EXTRA)?;
        config.within("extra_ids", n_extra, 0..=N_EXTRA_LIMIT)?;

        let files = Files { folder, component };
        let vocabulary = read_vocabulary(&files, n_extra)?;
        let wrong = |problem| files.error("", problem);
        let added = added_tokens(&files, &config, &vocabulary, n_extra)?;
        let model =
            Unigram::new(vocabulary.pieces, UNK).map_err(|problem| files.error(vocabulary.file, problem))?;
        let charsmap = match vocabulary.charsmap {
            None => None,
            Some(bytes) => {
                let read = Charsmap::parse(&bytes);
                Some(read.map_err(|problem| files.error(vocabulary.file, problem))?)
            }
        };

        // Tokens that are in no vocabulary get the ids behind it, in order; of two with the same text, the flags of the later one count.
        let mut ids: HashMap<&str, u32> = HashMap::new();
        let mut by_id: BTreeMap<u32, &Added> = BTreeMap::new();
        let mut next_id = model.n_pieces();
        for token in &added.tokens {
            let known = ids.get(token.content.as_str()).copied();
            let id = known.or_else(|| model.id(&token.content)).unwrap_or_else(|| {
                next_id += 1;
                next_id - 1
            });
            ids.insert(&token.content, id);
            by_id.insert(id, token);
        }
        let id_of = |role: &str, content: &Option<String>| {
            let content = content
                .as_deref()
                .ok_or_else(|| wrong(format!("there is no {role}")))?;
            let id = ids.get(content).copied().or_else(|| model.id(content));
            id.ok_or_else(|| wrong(format!("{role} {content:?} is not in the vocabulary")))
        };
        let (eos, pad) = (id_of("eos_token", &added.eos)?, id_of("pad_token", &added.pad)?);
        let mut raw_tokens = Vec::new();
        let mut normalized_tokens = Vec::new();
        for (id, token) in &by_id {
            if !token.is_normalized {
                raw_tokens.push((token.content.clone(), *id, *token));
                continue;
            }
            let content = normalized(charsmap.as_ref(), &token.content);
            if content.is_empty() {
                let problem = format!("nothing remains of the added token {:?}", token.content);
                return Err(wrong(problem));
            }
            normalized_tokens.push((content, *id, *token));
        }
        Ok(Self {
            raw_tokens: AddedTokens::new(&raw_tokens),
            normalized_tokens: AddedTokens::new(&normalized_tokens),
            texts: by_id
                .iter()
                .map(|(id, token)| (*id, token.content.clone()))
                .collect(),
            model,
            charsmap,
            eos,
            pad,
        })
    }

    /// Largest id there is.
    pub(crate) fn max_id(&self) -> u32 {
        let added = self.texts.keys().copied().max();
        added.unwrap_or(0).max(self.model.n_pieces() - 1)
    }

    /// All of the text, end.
    pub(crate) fn encode(&self, text: &str) -> Vec<u32> {
        let mut out = Vec::new();
        for piece in self.raw_tokens.cut_out(text) {
            match piece {
                Cut::Token(id) => out.push(id),
                Cut::Text(text) => {
                    let text = normalized(self.charsmap.as_ref(), text);
                    for piece in self.normalized_tokens.cut_out(&text) {
                        match piece {
                            Cut::Token(id) => out.push(id),
                            Cut::Text(text) => self.encode_words(text, &mut out),
                        }
                    }
                }
            }
        }
        out.push(self.eos);
        out
    }

    /// Cuts or pads what [`T5Tokenizer::encode`] gave to `len >= 1` ids.
    pub(crate) fn fit(&self, ids: &[u32], len: usize) -> Fitted {
        if ids.len() <= len {
            let mut fitted = ids.to_vec();
            fitted.resize(len, self.pad);
            return Fitted {
                ids: fitted,
                cut: None,
            };
        }
        let n_kept = len.saturating_sub(1);
        let mut fitted = ids[..n_kept].to_vec();
        fitted.push(self.eos);
        let cut = self.decode(&ids[n_kept..ids.len() - 1]);
        Fitted {
            ids: fitted,
            cut: Some(cut),
        }
    }

    /// Text of ids, for messages.
    fn decode(&self, ids: &[u32]) -> String {
        let text_of = |id: &u32| {
            let added = self.texts.get(id).map(String::as_str);
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

/// A token that is looked for in the text itself.
#[derive(Clone, Debug)]
struct Added {
    content: String,
    is_normalized: bool,
    /// Takes the white space before it with it.
    lstrip: bool,
    /// Takes the white space behind it with it.
    rstrip: bool,
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

/// A text between added tokens, or one of them.
enum Cut<'a> {
    Text(&'a str),
    Token(u32),
}

/// Tokens that are cut out of the same text.
struct AddedTokens {
    trie: Trie,
    /// Id, and whether the white space before and behind goes with it.
    tokens: Vec<(u32, bool, bool)>,
}

impl AddedTokens {
    fn new(tokens: &[(String, u32, &Added)]) -> Self {
        Self {
            trie: Trie::new(tokens.iter().map(|(content, ..)| content.as_str()).zip(0..)),
            tokens: tokens
                .iter()
                .map(|(_, id, token)| (*id, token.lstrip, token.rstrip))
                .collect(),
        }
    }

    fn cut_out<'a>(&self, text: &'a str) -> Vec<Cut<'a>> {
        let mut cuts = Vec::new();
        // Up to where the text is dealt with, and from where it is searched: white space behind a token is dealt with before.
        let (mut done, mut at) = (0, 0);
        while at < text.len() {
            let Some((len, token_idx)) = self.trie.longest(&text[at..]) else {
                at += text[at..].chars().next().map_or(1, char::len_utf8);
                continue;
            };
            let (id, lstrip, rstrip) = self.tokens[token_idx as usize];
            let (mut start, mut end) = (at, at + len);
            at = end;
            if lstrip {
                start = text[done.min(start)..start].trim_end().len() + done.min(start);
            }
            if rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            if done < start {
                cuts.push(Cut::Text(&text[done..start]));
            }
            cuts.push(Cut::Token(id));
            done = end;
        }
        if done < text.len() {
            cuts.push(Cut::Text(&text[done..]));
        }
        cuts
    }
}

/// The folder of one tokenizer.
struct Files<'a> {
    folder: &'a Folder,
    component: &'a str,
}

impl Files<'_> {
    fn has(&self, file: &str) -> bool {
        self.folder.file(self.component, file).is_some()
    }

    fn error(&self, file: &str, problem: String) -> ModelError {
        let path = self.folder.path().join(self.component);
        ModelError::Tokenizer {
            path: if file.is_empty() { path } else { path.join(file) },
            problem,
        }
    }

    fn bytes(&self, file: &str) -> Result<Vec<u8>, ModelError> {
        Ok(self.folder.read(self.component, file, FILE_LIMIT_BYTES)?)
    }

    fn json(&self, file: &str) -> Result<Value, ModelError> {
        serde_json::from_slice(&self.bytes(file)?)
            .map_err(|error| self.error(file, format!("is not valid JSON: {error}")))
    }
}

/// What is read of the one file or the other.
struct Vocabulary {
    file: &'static str,
    pieces: Vec<(String, f64)>,
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

fn read_joint(mut json: Value) -> Result<Vocabulary, String> {
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
fn base64(text: &str) -> Option<Vec<u8>> {
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

/// Every token that is looked for in the text, in the order in which transformers adds them.
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
    let mut known: std::collections::HashSet<String> =
        tokens.iter().map(|token| token.content.clone()).collect();
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

#[cfg(test)]
mod tests {
    use super::*;
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
