//! Files and folders for tests, and numbers from a seed.

use denoised_checkpoint::CheckpointError;
use serde_json::Value;
use std::{error::Error, fs, path::Path};
use tempfile::TempDir;

/// An empty folder that goes away with the value.
pub(crate) fn temp() -> TempDir {
    tempfile::tempdir().expect("the temporary folder of the machine can be written")
}

/// Writes `content` to a new file at `path` and makes the folders above it. An old file goes first: overwriting it would
/// make some file systems wait for the disk.
pub(crate) fn put(path: &Path, content: impl AsRef<[u8]>) {
    fs::create_dir_all(path.parent().expect("tests write into folders")).unwrap();
    let _ = fs::remove_file(path);
    fs::write(path, content).unwrap();
}

/// A safetensors file put together by hand: the header as given, then `data`.
pub(crate) fn file_of(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// A safetensors file with one F32 tensor of shape `[2]` and values 1, 2 under each of `names`.
pub(crate) fn file_with(names: &[&str]) -> Vec<u8> {
    let entry = |(idx, name): (usize, &&str)| {
        let (begin, end) = (8 * idx, 8 * idx + 8);
        format!(r#""{name}":{{"dtype":"F32","shape":[2],"data_offsets":[{begin},{end}]}}"#)
    };
    let entries: Vec<String> = names.iter().enumerate().map(entry).collect();
    let data: Vec<u8> = [1f32, 2.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    file_of(&format!("{{{}}}", entries.join(",")), &data.repeat(names.len()))
}

/// The error with its causes, as a program prints it.
pub(crate) fn text(error: &CheckpointError) -> String {
    let mut out = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        out = format!("{out}: {source}");
        cause = source.source();
    }
    out
}

/// The text of an error that must have come.
pub(crate) fn refusal<T: std::fmt::Debug>(result: Result<T, CheckpointError>) -> String {
    text(&result.expect_err("this must be refused"))
}

/// SplitMix64 (Steele, Lea, Flood 2014): enough for test inputs, and the same everywhere.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(crate) fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// Any JSON, with `keys` among the keys and strings.
    pub(crate) fn json(&mut self, keys: &[&str], depth: usize) -> Value {
        let n_kinds = if depth == 0 { 6 } else { 8 };
        match self.below(n_kinds) {
            0 => Value::Null,
            1 => Value::Bool(self.next().is_multiple_of(2)),
            2 => Value::from(self.next()),
            3 => Value::from(self.next() as i64 >> self.below(64)),
            4 => Value::from(f64::from_bits(self.next())),
            5 => Value::from((*self.pick(keys)).to_owned()),
            6 => (0..self.below(4)).map(|_| self.json(keys, depth - 1)).collect(),
            _ => (0..self.below(5))
                .map(|_| ((*self.pick(keys)).to_owned(), self.json(keys, depth - 1)))
                .collect(),
        }
    }

    /// `bytes` with one to four changes of the kinds that disks, downloads and attackers make.
    pub(crate) fn damage(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = bytes.to_vec();
        for _ in 0..=self.below(4) {
            let Some(last) = out.len().checked_sub(1) else {
                return out;
            };
            let position = self.below(last + 1);
            match self.below(6) {
                0 => out[position] ^= 1 << self.below(8),
                1 => out[position] = self.next() as u8,
                2 => out[position] = *self.pick(b"{}[]\",:0123456789-.e\\"),
                3 => out.truncate(position),
                4 => {
                    let from = self.below(last + 1);
                    let piece: Vec<u8> = out[from..].iter().take(self.below(32)).copied().collect();
                    out.splice(position..position, piece);
                }
                _ => {
                    let end = (position + self.below(16)).min(out.len());
                    out.drain(position..end);
                }
            }
        }
        out
    }
}
