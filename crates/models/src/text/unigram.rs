//! The unigram model of sentencepiece: the sequence of pieces of the highest score, as the tokenizers library finds it.
//!
//! R1. Time is linear in the text: a character is looked at no more often than the longest piece is long.
//! R2. Scores are added in f64 from the left, and of equal sums the one found first stays: other orders give other ids.

use std::collections::HashMap;

/// sentencepiece's default is 16 characters; a longer piece would make hostile texts slow.
pub(super) const PIECE_LIMIT_BYTES: usize = 1024;
/// How far below the least piece a character is that is none.
const UNKNOWN_PENALTY: f64 = 10.0;

/// Pieces of text with their scores; the position of a piece is its id.
#[derive(Clone)]
pub(super) struct Unigram {
    pieces: Vec<(String, f64)>,
    trie: Trie,
    unk: u32,
    unk_score: f64,
}

impl std::fmt::Debug for Unigram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unigram")
            .field("n_pieces", &self.pieces.len())
            .field("unk", &self.unk)
            .finish_non_exhaustive()
    }
}

/// The best way to reach an end within a text.
#[derive(Clone, Copy, Debug)]
struct Best {
    score: f64,
    /// `usize::MAX` where no piece ends.
    start: usize,
    id: u32,
}

const NOWHERE: Best = Best {
    score: 0.0,
    start: usize::MAX,
    id: 0,
};

impl Unigram {
    /// A model whose piece `unk` stands for what is in no other. Of equal pieces the last one counts.
    ///
    /// # Errors
    /// A piece that is too long or whose score is no number, or there is no piece `unk`.
    pub(super) fn new(pieces: Vec<(String, f64)>, unk: u32) -> Result<Self, String> {
        if pieces.len() <= unk as usize || u32::try_from(pieces.len()).is_err() {
            return Err(format!(
                "the vocabulary has {} pieces, the unknown one is number {unk}",
                pieces.len()
            ));
        }
        for (id, (piece, score)) in pieces.iter().enumerate() {
            if piece.len() > PIECE_LIMIT_BYTES {
                return Err(format!(
                    "piece {id} has {} bytes, at most {PIECE_LIMIT_BYTES} are taken",
                    piece.len()
                ));
            }
            if !score.is_finite() {
                return Err(format!("piece {id} ({piece:?}) has the score {score}"));
            }
        }
        let least = pieces
            .iter()
            .map(|(_, score)| *score)
            .fold(f64::INFINITY, f64::min);
        Ok(Self {
            trie: Trie::new(pieces.iter().map(|(piece, _)| piece.as_str()).zip(0..)),
            pieces,
            unk,
            unk_score: least - UNKNOWN_PENALTY,
        })
    }

    /// The id of a piece.
    pub(super) fn id(&self, piece: &str) -> Option<u32> {
        self.trie.get(piece)
    }

    /// The text of a piece.
    pub(super) fn piece(&self, id: u32) -> Option<&str> {
        self.pieces.get(id as usize).map(|(piece, _)| piece.as_str())
    }

    /// Number of ids.
    pub(super) fn n_pieces(&self) -> u32 {
        self.pieces.len() as u32
    }

    /// Appends the ids of `text`; unknown characters in a row are one id.
    pub(super) fn encode(&self, text: &str, out: &mut Vec<u32>) {
        let mut best = vec![NOWHERE; text.len() + 1];
        for (start, c) in text.char_indices() {
            let so_far = best[start].score;
            let mut reach = |end: usize, score: f64, id: u32| {
                let best = &mut best[end];
                if best.start == usize::MAX || score + so_far > best.score {
                    *best = Best {
                        score: score + so_far,
                        start,
                        id,
                    };
                }
            };
            let mut is_piece = false;
            for (len, id) in self.trie.prefixes(&text[start..]) {
                reach(start + len, self.pieces[id as usize].1, id);
                is_piece |= len == c.len_utf8();
            }
            if !is_piece {
                reach(start + c.len_utf8(), self.unk_score, self.unk);
            }
        }
        let n_before = out.len();
        let mut end = text.len();
        while end > 0 {
            let last = best[end];
            let mut start = last.start;
            if last.id == self.unk {
                while start > 0 && best[start].id == self.unk {
                    start = best[start].start;
                }
                // What is unknown one by one may be a piece of a very low score as a whole.
                out.push(self.id(&text[start..end]).unwrap_or(self.unk));
            } else {
                out.push(last.id);
            }
            end = start;
        }
        out[n_before..].reverse();
    }
}

/// Texts by their beginnings; children of a node lie side by side, sorted.
#[derive(Clone, Debug)]
pub(super) struct Trie {
    nodes: Vec<Node>,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    first_child: u32,
    n_children: u16,
    byte: u8,
    /// `NO_ID` where no text ends.
    id: u32,
}

const NO_ID: u32 = u32::MAX;

impl Trie {
    /// Of equal texts the last one counts; empty ones are not found.
    pub(super) fn new<'a>(texts: impl IntoIterator<Item = (&'a str, u32)>) -> Self {
        let ids: HashMap<&[u8], u32> = texts
            .into_iter()
            .filter(|(text, _)| !text.is_empty())
            .map(|(text, id)| (text.as_bytes(), id))
            .collect();
        let mut sorted: Vec<(&[u8], u32)> = ids.into_iter().collect();
        sorted.sort_unstable();
        let mut nodes = vec![Node {
            first_child: 0,
            n_children: 0,
            byte: 0,
            id: NO_ID,
        }];
        // Per node that is not finished: which of the sorted texts go through it. They are finished in order of creation.
        let mut open = std::collections::VecDeque::from([(0, sorted.as_slice())]);
        let mut node_idx = 0;
        while let Some((depth, mut through)) = open.pop_front() {
            if let Some((text, id)) = through.first().filter(|(text, _)| text.len() == depth) {
                debug_assert_eq!(text.len(), depth);
                nodes[node_idx].id = *id;
                through = &through[1..];
            }
            nodes[node_idx].first_child = nodes.len() as u32;
            while let Some((text, _)) = through.first() {
                let byte = text[depth];
                let (of_child, rest) =
                    through.split_at(through.partition_point(|(text, _)| text[depth] == byte));
                nodes.push(Node {
                    first_child: 0,
                    n_children: 0,
                    byte,
                    id: NO_ID,
                });
                nodes[node_idx].n_children += 1;
                open.push_back((depth + 1, of_child));
                through = rest;
            }
            node_idx += 1;
        }
        Self { nodes }
    }

    /// All texts that `text` begins with, as their lengths and ids, shortest first.
    pub(super) fn prefixes<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (usize, u32)> + 'a {
        let mut node = &self.nodes[0];
        let mut bytes = text.bytes().enumerate();
        std::iter::from_fn(move || {
            loop {
                let (byte_idx, byte) = bytes.next()?;
                let first = node.first_child as usize;
                let children = &self.nodes[first..first + usize::from(node.n_children)];
                let child = children.binary_search_by_key(&byte, |child| child.byte).ok()?;
                node = &children[child];
                if node.id != NO_ID {
                    return Some((byte_idx + 1, node.id));
                }
            }
        })
    }

    /// The id of exactly this text.
    pub(super) fn get(&self, text: &str) -> Option<u32> {
        self.prefixes(text)
            .find(|(len, _)| *len == text.len())
            .map(|(_, id)| id)
    }

    /// The longest text that `text` begins with.
    pub(super) fn longest(&self, text: &str) -> Option<(usize, u32)> {
        self.prefixes(text).last()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(pieces: &[(&str, f64)], text: &str) -> Vec<u32> {
        let pieces = pieces
            .iter()
            .map(|(piece, score)| ((*piece).to_owned(), *score))
            .collect();
        let model = Unigram::new(pieces, 0).expect("a model");
        let mut ids = Vec::new();
        model.encode(text, &mut ids);
        ids
    }

    // The example of the tokenizers library's documentation.
    #[test]
    fn the_best_sum_wins_and_unknown_characters_are_one() {
        let pieces = [
            ("<unk>", 0.0),
            ("a", 0.0),
            ("b", 0.0),
            ("c", 0.0),
            ("d", 0.0),
            ("cd", 1.0),
            ("ab", 2.0),
            ("abc", 5.0),
            ("abcd", 10.0),
        ];
        assert_eq!(encode(&pieces, "abcdacdxx"), [8, 1, 5, 0]);
        assert_eq!(encode(&pieces, "xyaéé"), [0, 1, 0]);
        assert!(encode(&pieces, "").is_empty());
    }

    #[test]
    fn unknown_characters_that_are_a_piece_together_are_that_piece() {
        // By hand: each alone costs 50 - 10 above the least, so two of them beat the piece of both.
        assert_eq!(
            encode(&[("<unk>", 100.0), ("a", 100.0), ("xy", 50.0)], "axya"),
            [1, 2, 1]
        );
    }

    #[test]
    fn of_equal_pieces_the_last_one_counts() {
        assert_eq!(
            encode(&[("<unk>", 0.0), ("a", 9.0), ("a", -1.0), ("aa", -1.5)], "aa"),
            [3]
        );
    }

    #[test]
    fn what_no_text_could_mean_is_refused() {
        let long = "x".repeat(PIECE_LIMIT_BYTES + 1);
        for (pieces, unk) in [
            (vec![], 0),
            (vec![("a".to_owned(), 0.0)], 1),
            (vec![("a".to_owned(), f64::NAN)], 0),
            (vec![(long, 0.0)], 0),
        ] {
            assert!(Unigram::new(pieces, unk).is_err());
        }
    }
}
