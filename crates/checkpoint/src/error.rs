//! The error of this crate's boundary, and the rules by which text from files gets into messages.
//!
//! Names from files are escaped and cut: a checkpoint must not be able to write control characters or megabytes to a
//! log.

use crate::safetensors::FormatError;
use denoised_os::OsError;
use denoised_tensor::SourceError;
use std::{error::Error, fmt, io, path::PathBuf};

/// How many names of a list a message shows.
const SHOWN_NAMES: usize = 8;
/// How many characters of one name a message shows.
const SHOWN_CHARS: usize = 160;

/// Why a checkpoint cannot be used. Every message names the file or folder, and the way out where there is one.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The path given for a checkpoint is nowhere.
    #[error("there is no {}; give the path of a local diffusers folder (nothing is downloaded)", path.display())]
    NoFolder {
        /// What was given.
        path: PathBuf,
    },
    /// A file or folder of a checkpoint is not there.
    #[error("{} does not exist", path.display())]
    Missing {
        /// What was asked for.
        path: PathBuf,
    },
    /// The operating system refused to read.
    #[error("cannot read {}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The operating system refused to map a weight file.
    #[error("cannot map {}", path.display())]
    Map {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: OsError,
    },
    /// A file instead of a folder.
    #[error("{} is a file, not a checkpoint folder; {hint}", path.display())]
    NotAFolder {
        /// What was given.
        path: PathBuf,
        /// What to do.
        hint: String,
    },
    /// The folder is not the root of a diffusers checkpoint.
    #[error("{} has no model_index.json; {hint}", path.display())]
    NoModelIndex {
        /// The folder.
        path: PathBuf,
        /// What to do.
        hint: String,
    },
    /// A pickle stands where safetensors should.
    #[error(
        "{} is a pickle checkpoint, which is refused because reading one runs code; convert it where it is trusted: \
         load the pipeline in diffusers and call save_pretrained(folder, safe_serialization=True)",
        path.display()
    )]
    Pickle {
        /// The pickle file.
        path: PathBuf,
    },
    /// A placeholder that git left where a large file should be.
    #[error("{} is a git-lfs pointer, not the file itself; run `git lfs pull` in its repository", path.display())]
    LfsPointer {
        /// The pointer file.
        path: PathBuf,
    },
    /// A text file is larger than such files are.
    #[error("{} has {size_bytes} bytes, more than the limit of {limit_bytes} bytes for such files", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        size_bytes: u64,
        /// The most that is read.
        limit_bytes: u64,
    },
    /// A file is not the JSON it should be.
    #[error("{} is not valid JSON of the expected form", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What and where.
        source: serde_json::Error,
    },
    /// A key has no usable value.
    #[error("{}: `{key}` must be {expected}, found {found}", path.display())]
    Field {
        /// The JSON file.
        path: PathBuf,
        /// The key, with the keys of the objects around it.
        key: String,
        /// What would do.
        expected: String,
        /// What is there.
        found: String,
    },
    /// Keys that nothing understands and that may change results.
    #[error("{}: unknown keys {keys}; they may change results, so the checkpoint is refused", path.display())]
    UnknownKeys {
        /// The JSON file.
        path: PathBuf,
        /// The keys.
        keys: NameList,
    },
    /// The component's weights are packed by a quantizer.
    #[error("{} says the weights are quantized ({method}), which is not supported; use the unquantized checkpoint", path.display())]
    Quantized {
        /// The component's config.
        path: PathBuf,
        /// The quantizer's name.
        method: String,
    },
    /// `model_index.json` does not list a component that is needed.
    #[error("{} lists no component `{component}` (it lists {listed})", path.display())]
    NoComponent {
        /// The `model_index.json`.
        path: PathBuf,
        /// What was asked for.
        component: String,
        /// What there is.
        listed: NameList,
    },
    /// A component has no weight file.
    #[error("{} has no weights: expected {expected}, found {found}", folder.display())]
    NoWeights {
        /// The component's folder.
        folder: PathBuf,
        /// Names that would have done.
        expected: String,
        /// What is there.
        found: NameList,
    },
    /// The index of a sharded component is wrong, or it and its shards contradict each other.
    #[error("{}: {problem}", path.display())]
    Index {
        /// The `*.safetensors.index.json`.
        path: PathBuf,
        /// In what.
        problem: String,
    },
    /// A weight file is damaged.
    #[error("{} is not a sound safetensors file", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// In what way.
        source: FormatError,
    },
    /// A file has no such tensor.
    #[error("{} has no tensor `{name}`", path.display())]
    NoTensor {
        /// The file or folder.
        path: PathBuf,
        /// Asked for.
        name: String,
    },
    /// A tensor is no float, so it is no weight.
    #[error("{}: tensor `{name}` has dtype {dtype}; weights must be F64, F32, F16 or BF16", path.display())]
    DType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// As the file spells it.
        dtype: String,
    },
    /// The file became shorter after it was opened, or its disk fails.
    #[error("{}: the bytes of tensor `{name}` cannot be read (was the file changed after it was opened?)", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The system's answer.
        source: OsError,
    },
    /// Weights and model do not fit together.
    #[error("the weights in {} do not fit the model: {problems}", path.display())]
    Mismatch {
        /// The checkpoint's folder.
        path: PathBuf,
        /// Missing, differently shaped and unmatched tensors.
        problems: String,
    },
}

impl From<CheckpointError> for SourceError {
    fn from(error: CheckpointError) -> Self {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(source) = cause {
            text.push_str(": ");
            text.push_str(&source.to_string());
            cause = source.source();
        }
        Self(text)
    }
}

/// Names for a message: all of them are kept, the first few are shown.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct NameList(pub Vec<String>);

impl<S: Into<String>> FromIterator<S> for NameList {
    fn from_iter<I: IntoIterator<Item = S>>(names: I) -> Self {
        Self(names.into_iter().map(Into::into).collect())
    }
}

impl fmt::Display for NameList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nothing");
        }
        for (name_idx, name) in self.0.iter().take(SHOWN_NAMES).enumerate() {
            let separator = if name_idx == 0 { "" } else { ", " };
            write!(f, "{separator}`{}`", shown(name))?;
        }
        match self.0.len().saturating_sub(SHOWN_NAMES) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// Text from a file as it may stand in a message.
pub(crate) fn shown(text: &str) -> String {
    let mut out = String::new();
    for (char_idx, char) in text.chars().enumerate() {
        if char_idx == SHOWN_CHARS {
            out.push('…');
            break;
        }
        match char {
            '"' | '\'' | '\\' => out.push(char),
            _ => out.extend(char.escape_debug()),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_files_is_escaped_and_cut() {
        assert_eq!(shown("a\u{1b}[31m\n\"b\""), "a\\u{1b}[31m\\n\"b\"");
        assert_eq!(shown(&"x".repeat(10_000)).chars().count(), SHOWN_CHARS + 1);
        let names: NameList = (0..20).map(|name_idx| format!("t{name_idx}")).collect();
        assert_eq!(
            names.to_string(),
            "`t0`, `t1`, `t2`, `t3`, `t4`, `t5`, `t6`, `t7` and 12 more"
        );
    }
}
