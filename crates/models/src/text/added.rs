//! Added tokens: texts that are cut out before a tokenizer's model sees the rest. Which ones there are, as transformers collects them.

use super::files::Files;
use super::unigram::{PIECE_LIMIT_BYTES, Trie};
use crate::ModelError;
use denoised_checkpoint::Config;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap, HashSet};

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
    pub(super) fn special(content: &str) -> Self {
        Self {
            content: content.to_owned(),
            is_normalized: false,
            lstrip: false,
            rstrip: false,
        }
    }

    /// Of a configuration: the text, or an object with flags; special tokens are looked for in the raw text unless they say otherwise.
    pub(super) fn read(value: &Value, is_special: bool) -> Result<Self, String> {
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

    pub(super) fn sized(token: Self) -> Result<Self, String> {
        match token.content.len() {
            0..=PIECE_LIMIT_BYTES => Ok(token),
            len => Err(format!(
                "an added token has {len} bytes, at most {PIECE_LIMIT_BYTES} are taken"
            )),
        }
    }
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

/// Every token that is looked for in the text, in the order in which transformers adds them; none is empty.
#[derive(Debug)]
pub(super) struct AddedList {
    pub(super) tokens: Vec<Added>,
    /// Those among them that have a role or are listed as extra ones.
    pub(super) specials: Vec<String>,
    /// Ends a text.
    pub(super) eos: Option<String>,
    /// Fills a text up.
    pub(super) pad: Option<String>,
}

/// What differs between classes of tokenizers.
pub(super) struct AddedRules<'a> {
    /// Tokens of roles that no file names.
    pub(super) defaults: &'a [(&'a str, &'a str)],
    /// `added_tokens` of `tokenizer.json`.
    pub(super) listed: &'a [Value],
    /// Makes the additional tokens of those that the files list, if they do.
    pub(super) additional: &'a dyn Fn(Option<Vec<Added>>) -> Result<Vec<Added>, ModelError>,
}

/// First the listed ones, then those with a role, then the extra ones; what is listed is not added again by a role.
pub(super) fn added_tokens(
    files: &Files<'_>,
    config: &Config,
    rules: &AddedRules<'_>,
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
        let default = rules.defaults.iter().find(|(role, _)| *role == key);
        let default = default.map_or(Value::Null, |(_, content)| Value::from(*content));
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
    let additional = (rules.additional)(additional)?;
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
        for token in rules.listed {
            let id = token["id"].as_u64();
            let id = id.ok_or_else(|| files.error("tokenizer.json", format!("{token} has no id")))?;
            let token = Added::read(token, false).map_err(of("tokenizer.json"))?;
            listed.insert(id, token);
        }
    }

    let mut tokens: Vec<Added> = listed.into_values().collect();
    let mut known: HashSet<String> = tokens.iter().map(|token| token.content.clone()).collect();
    let (eos, pad) = (roles.get("eos_token"), roles.get("pad_token"));
    let (eos, pad) = (eos.cloned(), pad.cloned());
    let by_role = ROLES.iter().filter_map(|role| roles.remove(role));
    let mut specials = Vec::new();
    for token in by_role.chain(extra) {
        specials.push(token.content.clone());
        if known.insert(token.content.clone()) {
            tokens.push(token);
        }
    }
    tokens.retain(|token| !token.content.is_empty());
    specials.retain(|content| !content.is_empty());
    Ok(AddedList {
        tokens,
        specials,
        eos: eos.map(|token| token.content),
        pad: pad.map(|token| token.content),
    })
}

/// Added tokens with their ids.
pub(super) struct Numbered {
    /// Looked for in the raw text.
    raw: AddedTokens,
    /// Looked for in the normalized text.
    normalized: AddedTokens,
    /// Text of each id.
    pub(super) texts: HashMap<u32, String>,
}

impl Numbered {
    /// Tokens that `id_in_vocabulary` does not know get the ids from `next_id` on, in order; of two with the same text, the flags of the
    /// later one count.
    ///
    /// # Errors
    /// Nothing remains of a token when it is normalized.
    pub(super) fn new(
        tokens: &[Added],
        mut next_id: u32,
        id_in_vocabulary: impl Fn(&str) -> Option<u32>,
        normalize: impl Fn(&str) -> String,
    ) -> Result<Self, String> {
        let mut ids: HashMap<&str, u32> = HashMap::new();
        let mut by_id: BTreeMap<u32, &Added> = BTreeMap::new();
        for token in tokens {
            let known = ids.get(token.content.as_str()).copied();
            let id = known
                .or_else(|| id_in_vocabulary(&token.content))
                .unwrap_or_else(|| {
                    next_id += 1;
                    next_id - 1
                });
            ids.insert(&token.content, id);
            by_id.insert(id, token);
        }
        let mut raw = Vec::new();
        let mut normalized = Vec::new();
        for (id, token) in &by_id {
            if !token.is_normalized {
                raw.push((token.content.clone(), *id, *token));
                continue;
            }
            let content = normalize(&token.content);
            if content.is_empty() {
                return Err(format!("nothing remains of the added token {:?}", token.content));
            }
            normalized.push((content, *id, *token));
        }
        let texts = by_id.iter().map(|(id, token)| (*id, token.content.clone()));
        Ok(Self {
            raw: AddedTokens::new(&raw),
            normalized: AddedTokens::new(&normalized),
            texts: texts.collect(),
        })
    }

    /// The id of an added token.
    pub(super) fn id(&self, content: &str) -> Option<u32> {
        let mut found = self.texts.iter().filter(|(_, text)| *text == content);
        found.next().map(|(id, _)| *id)
    }

    /// Largest id of an added token.
    pub(super) fn max_id(&self) -> Option<u32> {
        self.texts.keys().copied().max()
    }

    /// Cuts `text` into added tokens, whose ids go to `out`, and normalized text between them, which goes through `encode`.
    pub(super) fn encode(
        &self,
        text: &str,
        normalize: impl Fn(&str) -> String,
        mut encode: impl FnMut(&str, &mut Vec<u32>),
        out: &mut Vec<u32>,
    ) {
        for piece in self.raw.cut_out(text) {
            match piece {
                Cut::Token(id) => out.push(id),
                Cut::Text(text) => {
                    let text = normalize(text);
                    for piece in self.normalized.cut_out(&text) {
                        match piece {
                            Cut::Token(id) => out.push(id),
                            Cut::Text(text) => encode(text, out),
                        }
                    }
                }
            }
        }
    }
}

/// A text between added tokens, or one of them.
enum Cut<'a> {
    Text(&'a str),
    Token(u32),
}

/// Tokens that are cut out of the same text, leftmost first, the longest of several.
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
