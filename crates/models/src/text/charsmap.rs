//! sentencepiece's precompiled rules of normalization (its `precompiled_charsmap`), as the tokenizers library applies them.
//!
//! The bytes are a length, a double-array trie (Darts) over UTF-8 whose leaves are positions, and texts that end with a zero.
//!
//! R1. Everything that can be reached is checked once, when the bytes are read; a cycle ends with the text that is looked up.
//! R2. A text grows at most [`REPLACEMENT_LIMIT_BYTES`] times.

use unicode_segmentation::UnicodeSegmentation;

/// Unicode's longest (U+FDFA) has 33 bytes.
const REPLACEMENT_LIMIT_BYTES: usize = 256;
/// Published ones have about 60 thousand.
const UNIT_LIMIT: usize = 1 << 20;
/// Longer grapheme clusters are looked up character by character.
const CLUSTER_LIMIT_BYTES: usize = 5;
/// Marks units that hold a value, which no byte can match.
const LABEL_MASK: u32 = 1 << 31 | 0xff;

/// Which texts are replaced by which.
#[derive(Clone)]
pub(super) struct Charsmap {
    units: Vec<u32>,
    /// Replacements, each up to the next zero.
    texts: String,
}

impl std::fmt::Debug for Charsmap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Charsmap")
            .field("n_units", &self.units.len())
            .field("texts_bytes", &self.texts.len())
            .finish()
    }
}

impl Charsmap {
    /// Reads and checks the bytes.
    ///
    /// # Errors
    /// What is wrong with them, and where.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let (size, rest) = bytes
            .split_first_chunk()
            .ok_or_else(|| format!("the charsmap has {} bytes", bytes.len()))?;
        let trie_bytes = u32::from_le_bytes(*size) as usize / 4 * 4;
        let n_units = trie_bytes / 4;
        if !(1..=UNIT_LIMIT).contains(&n_units) {
            return Err(format!(
                "the charsmap has a trie of {n_units} units, it may have 1 to {UNIT_LIMIT}"
            ));
        }
        let Some((trie, texts)) = rest.split_at_checked(trie_bytes) else {
            return Err(format!(
                "the charsmap has a trie of {trie_bytes} bytes, {} are there",
                rest.len()
            ));
        };
        let texts = std::str::from_utf8(texts)
            .map_err(|error| format!("the replacements of the charsmap are no text: {error}"))?;
        let (units, _) = trie.as_chunks();
        let map = Self {
            units: units.iter().map(|unit| u32::from_le_bytes(*unit)).collect(),
            texts: texts.to_owned(),
        };
        map.check()?;
        Ok(map)
    }

    /// Grapheme cluster by cluster: what the shortest rule that begins a short one says of it, else the same for each character.
    ///
    /// That a cluster is replaced as a whole although a rule has only its beginning is the library's way, and the ids depend on it.
    pub(super) fn normalize(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        for cluster in text.graphemes(true) {
            if cluster.len() <= CLUSTER_LIMIT_BYTES
                && let Some(replacement) = self.replacement(cluster)
            {
                out.push_str(replacement);
                continue;
            }
            for c in cluster.chars() {
                match self.replacement(c.encode_utf8(&mut [0; 4])) {
                    Some(replacement) => out.push_str(replacement),
                    None => out.push(c),
                }
            }
        }
        out
    }

    /// What the shortest rule that begins `chunk` says.
    fn replacement(&self, chunk: &str) -> Option<&str> {
        let mut base = offset(*self.units.first()?);
        for byte in chunk.bytes().take_while(|byte| *byte != 0) {
            let (next, value) = self.child(base, byte).ok()??;
            if let Some(start) = value {
                return self.text_at(start).ok();
            }
            base = next;
        }
        None
    }

    /// Where the edge `byte` leads from `base`, and the value that is there, if there is such an edge.
    fn child(&self, base: usize, byte: u8) -> Result<Option<(usize, Option<usize>)>, String> {
        let unit_at = |unit_idx: usize| {
            self.units.get(unit_idx).copied().ok_or_else(|| {
                format!(
                    "the trie of the charsmap leads to unit {unit_idx} of {}",
                    self.units.len()
                )
            })
        };
        let unit_idx = base ^ usize::from(byte);
        let unit = unit_at(unit_idx)?;
        if unit & LABEL_MASK != u32::from(byte) {
            return Ok(None);
        }
        let base = unit_idx ^ offset(unit);
        let has_value = unit >> 8 & 1 == 1;
        let value = has_value.then(|| unit_at(base)).transpose()?;
        Ok(Some((base, value.map(|unit| (unit & !(1 << 31)) as usize))))
    }

    fn text_at(&self, start: usize) -> Result<&str, String> {
        let wrong = |problem: &str| format!("the replacement at byte {start} of the charsmap {problem}");
        let rest = self
            .texts
            .get(start..)
            .ok_or_else(|| wrong("is outside of its texts"))?;
        let len = rest
            .bytes()
            .take(REPLACEMENT_LIMIT_BYTES + 1)
            .position(|byte| byte == 0);
        let len = len.or((rest.len() <= REPLACEMENT_LIMIT_BYTES).then_some(rest.len()));
        match len {
            Some(len) if len <= REPLACEMENT_LIMIT_BYTES => Ok(&rest[..len]),
            _ => Err(wrong(&format!("has more than {REPLACEMENT_LIMIT_BYTES} bytes"))),
        }
    }

    /// Follows every edge once.
    fn check(&self) -> Result<(), String> {
        let mut is_known = vec![false; self.units.len()];
        let mut bases = vec![offset(self.units[0])];
        while let Some(base) = bases.pop() {
            match is_known.get_mut(base) {
                Some(is_known) if *is_known => continue,
                Some(is_known) => *is_known = true,
                None => {}
            }
            for byte in 1..=u8::MAX {
                let Some((next, value)) = self.child(base, byte)? else {
                    continue;
                };
                if let Some(start) = value {
                    self.text_at(start)?;
                }
                bases.push(next);
            }
        }
        Ok(())
    }
}

/// How far, bit by bit, the edges of a unit are from it.
fn offset(unit: u32) -> usize {
    ((unit >> 10) << ((unit & 1 << 9) >> 6)) as usize
}
