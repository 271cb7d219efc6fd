//! JSON from untrusted files: bounded in size and depth, and with the three constants that Python writes.

use crate::{CheckpointError, error::shown};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Map, Value};
use std::{collections::BTreeMap, fmt, fs::File, io::Read, marker::PhantomData, path::Path};

/// Largest config that is read; the largest real ones have a few tens of KiB.
pub(crate) const CONFIG_LIMIT_BYTES: u64 = 1 << 20;
/// Largest shard index that is read; one tensor takes about 100 bytes of it.
pub(crate) const INDEX_LIMIT_BYTES: u64 = 32 << 20;
/// First bytes of the text that git-lfs leaves in place of a file that was not fetched.
pub(crate) const LFS_START: &[u8] = b"version https://git-lfs";

/// The whole of the regular file at `path`, if it has at most `limit_bytes`.
pub(crate) fn read_bytes(path: &Path, limit_bytes: u64) -> Result<Vec<u8>, CheckpointError> {
    let io = |source| CheckpointError::Io {
        path: path.to_owned(),
        source,
    };
    require_regular(path)?;
    let file = File::open(path).map_err(io)?;
    let size_bytes = file.metadata().map_err(io)?.len();
    if size_bytes > limit_bytes {
        return Err(CheckpointError::TooLarge {
            path: path.to_owned(),
            size_bytes,
            limit_bytes,
        });
    }
    let mut bytes = Vec::new();
    file.take(limit_bytes).read_to_end(&mut bytes).map_err(io)?;
    if bytes.starts_with(LFS_START) {
        return Err(CheckpointError::LfsPointer {
            path: path.to_owned(),
        });
    }
    Ok(bytes)
}

/// Refuses pipes and devices before they are opened, because opening a pipe waits for its writer.
pub(crate) fn require_regular(path: &Path) -> Result<(), CheckpointError> {
    let metadata = path.metadata().map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => CheckpointError::Missing {
            path: path.to_owned(),
        },
        _ => CheckpointError::Io {
            path: path.to_owned(),
            source,
        },
    })?;
    if metadata.is_file() {
        return Ok(());
    }
    let source = std::io::Error::other("not a regular file");
    Err(CheckpointError::Io {
        path: path.to_owned(),
        source,
    })
}

/// The object in the file at `path`.
pub(crate) fn read_object(path: &Path, limit_bytes: u64) -> Result<Map<String, Value>, CheckpointError> {
    let bytes = read_bytes(path, limit_bytes)?;
    serde_json::from_slice(&quote_python_constants(bytes)).map_err(|source| CheckpointError::Json {
        path: path.to_owned(),
        source,
    })
}

/// Puts quotes around `NaN`, `Infinity` and `-Infinity` where they stand as values.
///
/// Python's `json` writes them, JSON has no such thing, and scheduler configs do contain them
/// (`"lambda_min_clipped": -Infinity`). The float getters of `Config` turn the strings into the numbers they mean.
fn quote_python_constants(bytes: Vec<u8>) -> Vec<u8> {
    const CONSTANTS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let has = |needle: &[u8]| bytes.windows(needle.len()).any(|window| window == needle);
    if !has(b"Infinity") && !has(b"NaN") {
        return bytes;
    }
    let mut out = Vec::with_capacity(bytes.len() + 64);
    let mut in_string = false;
    let mut position = 0;
    while let Some(&byte) = bytes.get(position) {
        let constant = CONSTANTS
            .iter()
            .find(|constant| !in_string && bytes[position..].starts_with(constant));
        if let Some(constant) = constant {
            out.push(b'"');
            out.extend_from_slice(constant);
            out.push(b'"');
            position += constant.len();
            continue;
        }
        out.push(byte);
        position += 1;
        match byte {
            b'"' => in_string = !in_string,
            b'\\' if in_string => {
                out.extend(bytes.get(position));
                position += 1;
            }
            _ => {}
        }
    }
    out
}

/// A JSON object in which every key stands once; `serde_json` alone would keep the last of several.
#[derive(Debug)]
pub(crate) struct UniqueMap<V>(pub(crate) BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
                let mut map = BTreeMap::new();
                while let Some(key) = entries.next_key::<String>()? {
                    if map.contains_key(&key) {
                        return Err(A::Error::custom(format!("`{}` stands there twice", shown(&key))));
                    }
                    let value = entries.next_value()?;
                    map.insert(key, value);
                }
                Ok(UniqueMap(map))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quoted(text: &str) -> String {
        String::from_utf8(quote_python_constants(text.into())).unwrap()
    }

    #[test]
    fn python_constants_become_strings_outside_of_strings_only() {
        assert_eq!(
            quoted(r#"{"a":-Infinity,"b":[NaN,Infinity]}"#),
            r#"{"a":"-Infinity","b":["NaN","Infinity"]}"#
        );
        assert_eq!(
            quoted(r#"{"NaN \" NaN":"Infinity"}"#),
            r#"{"NaN \" NaN":"Infinity"}"#
        );
        assert_eq!(quoted(r#"{"\\":NaN}"#), r#"{"\\":"NaN"}"#);
        assert_eq!(quoted(r#"NaN"\"#), r#""NaN""\"#);
    }

    #[test]
    fn a_key_that_stands_twice_is_refused() {
        let error = serde_json::from_str::<UniqueMap<u8>>(r#"{"a":1,"b":2,"a":1}"#).unwrap_err();
        assert!(error.to_string().contains("`a` stands there twice"), "{error}");
        assert_eq!(
            serde_json::from_str::<UniqueMap<u8>>(r#"{"a":1}"#)
                .unwrap()
                .0
                .len(),
            1
        );
    }
}
