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
            let (next, value) = self.child(base, byte)?;
            if let Some(start) = value {
                return self.text_at(start).ok();
            }
            base = next;
        }
        None
    }

    /// Where the edge `byte` leads from `base`, and the value that is there, if there is such an edge.
    fn child(&self, base: usize, byte: u8) -> Option<(usize, Option<usize>)> {
        let unit_idx = base ^ usize::from(byte);
        let unit = *self.units.get(unit_idx)?;
        (unit & LABEL_MASK == u32::from(byte)).then(|| self.behind(unit_idx, unit))
    }

    /// From where the edges behind a unit go on, and the value that is there.
    fn behind(&self, unit_idx: usize, unit: u32) -> (usize, Option<usize>) {
        let base = unit_idx ^ offset(unit);
        let has_value = unit >> 8 & 1 == 1;
        let value = self.units.get(base).filter(|_| has_value);
        (base, value.map(|unit| (unit & !(1 << 31)) as usize))
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
        const NONE: usize = usize::MAX;
        // The units that are edges of a base, as lists: the newest of a base, and before each the next older one.
        let n_units = self.units.len();
        let (mut newest, mut older) = (vec![NONE; n_units], vec![NONE; n_units]);
        for (unit_idx, unit) in self.units.iter().enumerate() {
            let byte = (unit & LABEL_MASK) as usize;
            if (1..=0xff).contains(&byte) && (unit_idx ^ byte) < n_units {
                older[unit_idx] = std::mem::replace(&mut newest[unit_idx ^ byte], unit_idx);
            }
        }
        let mut is_known = vec![false; n_units];
        let mut bases = vec![offset(self.units[0])];
        while let Some(base) = bases.pop() {
            // All edges of a base are in its 256 units.
            if base | 0xff >= n_units {
                return Err(format!(
                    "the trie of the charsmap leads to unit {} of {n_units}",
                    base | 0xff
                ));
            }
            if std::mem::replace(&mut is_known[base], true) {
                continue;
            }
            let mut unit_idx = newest[base];
            while unit_idx != NONE {
                let (next, value) = self.behind(unit_idx, self.units[unit_idx]);
                if let Some(start) = value {
                    self.text_at(start)?;
                }
                bases.push(next);
                unit_idx = older[unit_idx];
            }
        }
        Ok(())
    }
}

/// How far, bit by bit, the edges of a unit are from it.
fn offset(unit: u32) -> usize {
    ((unit >> 10) << ((unit & 1 << 9) >> 6)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a charsmap.
    fn bytes(units: &[u32], texts: &str) -> Vec<u8> {
        let units: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
        let size = (units.len() as u32).to_le_bytes();
        [&size, &units[..], texts.as_bytes()].concat()
    }

    /// A trie with the one rule `a` by hand: the root's edges begin at 256, the leaf of `a` is at 512.
    fn one_rule(value: u32) -> Vec<u32> {
        let mut units = vec![0; 768];
        units[0] = 256 << 10;
        let a = 256 ^ usize::from(b'a');
        units[a] = ((a as u32) ^ 512) << 10 | 1 << 8 | u32::from(b'a');
        units[512] = 1 << 31 | value;
        units
    }

    #[test]
    fn a_rule_replaces_and_the_rest_stays() {
        let map = Charsmap::parse(&bytes(&one_rule(2), "x\0yz\0")).expect("a charsmap");
        assert_eq!(map.normalize("banana, \0é"), "byznyznyz, \0é");
        // A short cluster is replaced as a whole, a long one by characters.
        assert_eq!(map.normalize("a\u{301}"), "yz");
        assert_eq!(map.normalize("a\u{301}\u{301}\u{301}"), "yz\u{301}\u{301}\u{301}");
        assert_eq!(
            Charsmap::parse(&bytes(&one_rule(0), ""))
                .expect("empty text")
                .normalize("bad"),
            "bd"
        );
    }

    #[test]
    fn a_trie_that_leads_in_a_circle_ends() {
        let mut units = one_rule(0);
        let a = 256 ^ usize::from(b'a');
        units[a] = ((a as u32) ^ 256) << 10 | u32::from(b'a');
        let map = Charsmap::parse(&bytes(&units, "")).expect("nothing is out of reach");
        assert_eq!(map.normalize("aaaa"), "aaaa");
    }

    #[test]
    fn what_leads_outside_is_refused() {
        let long = "x".repeat(REPLACEMENT_LIMIT_BYTES + 1);
        let mut outside = one_rule(0);
        outside[0] = 1 << 20 << 10;
        for (bytes, problem) in [
            (vec![1, 2], "has 2 bytes"),
            (bytes(&[], ""), "0 units"),
            (bytes(&outside, ""), "leads to unit"),
            (bytes(&one_rule(0)[..512], ""), "leads to unit 767 of 512"),
            (bytes(&one_rule(9), "x\0"), "byte 9 of the charsmap is outside"),
            (bytes(&one_rule(1), "é\0"), "byte 1 of the charsmap is outside"),
            (bytes(&one_rule(0), &long), "more than 256 bytes"),
            ([&bytes(&one_rule(0), "")[..], b"\xff"].concat(), "no text"),
        ] {
            let error = Charsmap::parse(&bytes).expect_err("it is damaged");
            assert!(error.contains(problem), "{error}");
        }
    }
}
