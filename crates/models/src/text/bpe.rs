//! Byte-level BPE: bytes as printable characters, which ranked merges join.
//!
//! Which characters combine and which are letters, in the tokenizers that use this, depends on the version of Unicode. The workspace pins the two crates of
//! tables to the versions of the tokenizers library; with newer ones a character assigned since then gives other ids.

use super::files::Files;
use crate::ModelError;
use serde_json::Value;
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};
use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory};

/// A vocabulary and its merges.
pub(super) struct Bpe {
    ids: HashMap<String, u32>,
    texts: HashMap<u32, String>,
    /// Pairs of ids that are joined: rank (low first) and the id of the result.
    merges: HashMap<(u32, u32), (u32, u32)>,
    /// Printable character of each byte.
    byte_chars: [char; 256],
    bytes: HashMap<char, u8>,
}

impl std::fmt::Debug for Bpe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bpe")
            .field("n_tokens", &self.ids.len())
            .field("n_merges", &self.merges.len())
            .finish_non_exhaustive()
    }
}

impl Bpe {
    /// Reads `tokenizer.json`, of which `check_joint` judges the rest, or where it is absent `vocab.json` and `merges.txt`.
    ///
    /// # Errors
    /// A file is missing or damaged.
    pub(super) fn read(
        files: &Files<'_>,
        check_joint: impl FnOnce(&Value) -> Result<(), String>,
    ) -> Result<Self, ModelError> {
        let (ids, merge_names) = read_vocabulary(files, check_joint)?;
        let mut merges = HashMap::with_capacity(merge_names.len());
        for (rank, (left, right)) in merge_names.iter().enumerate() {
            let joined = format!("{left}{right}");
            match (ids.get(left), ids.get(right), ids.get(&joined)) {
                (Some(&l), Some(&r), Some(&new)) => merges.insert((l, r), (rank as u32, new)),
                _ => {
                    let problem = format!("merge {rank} of {left:?} and {right:?} is not in the vocabulary");
                    return Err(files.error("", problem));
                }
            };
        }
        let byte_chars = byte_chars();
        Ok(Self {
            texts: ids.iter().map(|(text, &id)| (id, text.clone())).collect(),
            ids,
            merges,
            byte_chars,
            bytes: byte_chars.into_iter().zip(0..=255).collect(),
        })
    }

    /// The id of a token of the vocabulary.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// The token with this id, as the vocabulary writes it.
    pub(super) fn text(&self, id: u32) -> Option<&str> {
        self.texts.get(&id).map(String::as_str)
    }

    /// How many tokens there are.
    pub(super) fn n_tokens(&self) -> usize {
        self.ids.len()
    }

    /// Largest id there is.
    pub(super) fn max_id(&self) -> u32 {
        self.texts.keys().copied().max().unwrap_or(0)
    }

    /// The bytes that printable characters stand for.
    pub(super) fn push_bytes(&self, text: &str, out: &mut Vec<u8>) {
        out.extend(text.chars().filter_map(|c| self.bytes.get(&c)));
    }

    /// Joins the characters of a word, the last of which is written with `end`, by rank, lowest first and leftmost first. What is in
    /// no vocabulary becomes `unk`, or nothing.
    pub(super) fn encode(&self, word: &str, end: &str, unk: Option<u32>, out: &mut Vec<u32>) {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(word.len());
        for (byte_idx, byte) in word.bytes().enumerate() {
            let mut text = self.byte_chars[usize::from(byte)].to_string();
            if byte_idx + 1 == word.len() {
                text.push_str(end);
            }
            if let Some(id) = self.ids.get(&text).copied().or(unk) {
                let at = symbols.len();
                symbols.push(Symbol {
                    id,
                    previous: at.checked_sub(1),
                    next: Some(at + 1),
                    is_gone: false,
                });
            }
        }
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }
        let mut queue = BinaryHeap::new();
        let push = |symbols: &[Symbol], left: usize, right: usize, queue: &mut BinaryHeap<_>| {
            if let Some(&(rank, new_id)) = self.merges.get(&(symbols[left].id, symbols[right].id)) {
                queue.push(Reverse((rank, left, new_id)));
            }
        };
        for left in 1..symbols.len() {
            push(&symbols, left - 1, left, &mut queue);
        }
        while let Some(Reverse((_, left, new_id))) = queue.pop() {
            let Some(right) = symbols[left].next.filter(|_| !symbols[left].is_gone) else {
                continue;
            };
            // The pair may have changed since it was queued.
            let pair = (symbols[left].id, symbols[right].id);
            if self.merges.get(&pair).is_none_or(|(_, id)| *id != new_id) {
                continue;
            }
            symbols[left].id = new_id;
            symbols[left].next = symbols[right].next;
            symbols[right].is_gone = true;
            if let Some(previous) = symbols[left].previous {
                push(&symbols, previous, left, &mut queue);
            }
            if let Some(next) = symbols[left].next {
                symbols[next].previous = Some(left);
                push(&symbols, left, next, &mut queue);
            }
        }
        out.extend(
            symbols
                .iter()
                .filter(|symbol| !symbol.is_gone)
                .map(|symbol| symbol.id),
        );
    }
}

#[derive(Clone, Copy, Debug)]
struct Symbol {
    id: u32,
    previous: Option<usize>,
    next: Option<usize>,
    is_gone: bool,
}

pub(super) fn is_letter(c: char) -> bool {
    c.general_category_group() == GeneralCategoryGroup::Letter
}

pub(super) fn is_number(c: char) -> bool {
    c.general_category_group() == GeneralCategoryGroup::Number
}

/// GPT-2's table: printable bytes stand for themselves, the others for the characters from U+0100 on.
fn byte_chars() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| match byte as u32 {
        b @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => char::from_u32(b).unwrap_or('?'),
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap_or('?')
        }
    })
}

type Vocabulary = (HashMap<String, u32>, Vec<(String, String)>);

/// Token ids and merges; `tokenizer.json` decides where it exists.
fn read_vocabulary(
    files: &Files<'_>,
    check_joint: impl FnOnce(&Value) -> Result<(), String>,
) -> Result<Vocabulary, ModelError> {
    let joint = "tokenizer.json";
    if files.has(joint) {
        let json = files.json(joint)?;
        let read = check_joint(&json).and_then(|()| read_joint(&json));
        return read.map_err(|problem| files.error(joint, problem));
    }
    let ids = token_ids(&files.json("vocab.json")?).map_err(|problem| files.error("vocab.json", problem))?;
    let text = files.text("merges.txt")?;
    let lines = text.lines().filter(|line| !line.starts_with("#version"));
    let merges = lines.map(split_merge).collect::<Result<Vec<_>, _>>();
    let merges = merges.and_then(some_merges);
    let merges = merges.map_err(|problem| files.error("merges.txt", problem))?;
    Ok((ids, merges))
}

fn read_joint(json: &Value) -> Result<Vocabulary, String> {
    let model = &json["model"];
    if model["type"].as_str().is_some_and(|kind| kind != "BPE") {
        return Err(format!("model type {} is not supported, BPE is", model["type"]));
    }
    let ids = token_ids(&model["vocab"])?;
    let merges = model["merges"].as_array().ok_or("no list of merges")?;
    let merges = merges
        .iter()
        .map(
            |merge| match (merge.as_str(), merge.as_array().map(Vec::as_slice)) {
                (Some(line), _) => split_merge(line),
                (_, Some([Value::String(left), Value::String(right)])) => Ok((left.clone(), right.clone())),
                _ => Err(format!("{merge} is no merge")),
            },
        )
        .collect::<Result<Vec<_>, _>>()?;
    Ok((ids, some_merges(merges)?))
}

/// Without merges every text would be its bytes, which no text encoder was trained on: the list was lost.
fn some_merges(merges: Vec<(String, String)>) -> Result<Vec<(String, String)>, String> {
    if merges.is_empty() {
        return Err("lists no merge".to_owned());
    }
    Ok(merges)
}

fn token_ids(vocabulary: &Value) -> Result<HashMap<String, u32>, String> {
    let tokens = vocabulary.as_object().ok_or("the vocabulary is no object")?;
    let id = |(text, id): (&String, &Value)| {
        let number = id.as_u64().and_then(|id| i32::try_from(id).ok());
        number
            .map(|number| (text.clone(), number as u32))
            .ok_or_else(|| format!("token {text:?} has the id {id}"))
    };
    tokens.iter().map(id).collect()
}

fn split_merge(line: &str) -> Result<(String, String), String> {
    match line.split_once(' ') {
        Some((left, right)) if !right.contains(' ') => Ok((left.to_owned(), right.to_owned())),
        _ => Err(format!("{line:?} is no merge of two tokens")),
    }
}
