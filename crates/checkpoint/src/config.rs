//! One component's JSON config, which remembers what was read of it.
//!
//! A key that nobody read may be one that changes results, so a model reads what it knows and ends with
//! [`Config::deny_unread`]. Keys that begin with `_` are metadata.

use crate::{CheckpointError, NameList, error::shown, json};
use serde_json::{Map, Value};
use std::{
    cell::RefCell,
    collections::BTreeSet,
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

/// Largest number that is taken for an extent or a count, so that products of two of them cannot overflow.
const EXTENT_LIMIT: u64 = 1 << 31;

const EXTENT: &str = "a whole number of 0 to 2147483648";
const NUMBER: &str = "a number";
const BOOL: &str = "true or false";
const STRING: &str = "a string";

/// A JSON object with typed getters; every error names file, key and what was found.
///
/// An absent key gives the default. An explicit `null` is Python's `None`, which is not the same: only the getters that
/// return an `Option` take it (as `None`, like an absent key).
#[derive(Clone, Debug)]
pub struct Config {
    path: PathBuf,
    map: Map<String, Value>,
    read: RefCell<BTreeSet<String>>,
}

impl Config {
    /// Reads the JSON object in the file at `path` (at most 1 MiB).
    ///
    /// # Errors
    /// The file is absent, unreadable, too large or no JSON object.
    pub fn read(path: &Path) -> Result<Self, CheckpointError> {
        Ok(Self::new(
            path,
            json::read_object(path, json::CONFIG_LIMIT_BYTES)?,
        ))
    }

    /// A config that is already parsed; `path` is for messages.
    pub fn new(path: &Path, map: Map<String, Value>) -> Self {
        Self {
            path: path.to_owned(),
            map,
            read: RefCell::default(),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the key is there, `null` or not. Does not count as reading it.
    pub fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The value as it stands.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.read.borrow_mut().insert(key.to_owned());
        self.map.get(key)
    }

    /// An extent or a count that must be there.
    ///
    /// # Errors
    /// Absent or no whole number of 0 to 2^31.
    pub fn usize(&self, key: &str) -> Result<usize, CheckpointError> {
        self.required(key, EXTENT, as_usize)
    }

    /// As [`Config::usize`], with a default.
    ///
    /// # Errors
    /// No whole number of 0 to 2^31.
    pub fn usize_or(&self, key: &str, default: usize) -> Result<usize, CheckpointError> {
        self.or(key, default, EXTENT, as_usize)
    }

    /// As [`Config::usize`], `None` if absent or null.
    ///
    /// # Errors
    /// No whole number of 0 to 2^31.
    pub fn opt_usize(&self, key: &str) -> Result<Option<usize>, CheckpointError> {
        self.optional(key, EXTENT, as_usize)
    }

    /// A number, with a default. `NaN`, `Infinity` and `-Infinity` as Python writes them are numbers.
    ///
    /// # Errors
    /// No number.
    pub fn f64_or(&self, key: &str, default: f64) -> Result<f64, CheckpointError> {
        self.or(key, default, NUMBER, as_f64)
    }

    /// As [`Config::f64_or`], `None` if absent or null.
    ///
    /// # Errors
    /// No number.
    pub fn opt_f64(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        self.optional(key, NUMBER, as_f64)
    }

    /// A switch.
    ///
    /// # Errors
    /// Neither true nor false.
    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool, CheckpointError> {
        self.or(key, default, BOOL, Value::as_bool)
    }

    /// As [`Config::bool_or`], `None` if absent or null.
    ///
    /// # Errors
    /// Neither true nor false.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        self.optional(key, BOOL, Value::as_bool)
    }

    /// A text that must be there.
    ///
    /// # Errors
    /// Absent or no string.
    pub fn str(&self, key: &str) -> Result<&str, CheckpointError> {
        self.required(key, STRING, Value::as_str)
    }

    /// As [`Config::str`], with a default.
    ///
    /// # Errors
    /// No string.
    pub fn str_or<'a>(&'a self, key: &str, default: &'a str) -> Result<&'a str, CheckpointError> {
        self.or(key, default, STRING, Value::as_str)
    }

    /// As [`Config::str`], `None` if absent or null.
    ///
    /// # Errors
    /// No string.
    pub fn opt_str(&self, key: &str) -> Result<Option<&str>, CheckpointError> {
        self.optional(key, STRING, Value::as_str)
    }

    /// A list of extents or counts, `None` if absent or null.
    ///
    /// # Errors
    /// No list of whole numbers of 0 to 2^31.
    pub fn usizes(&self, key: &str) -> Result<Option<Vec<usize>>, CheckpointError> {
        self.optional(key, "a list of whole numbers of 0 to 2147483648", |value| {
            each(value, as_usize)
        })
    }

    /// A list of texts, `None` if absent or null.
    ///
    /// # Errors
    /// No list of strings.
    pub fn strs(&self, key: &str) -> Result<Option<Vec<&str>>, CheckpointError> {
        self.optional(key, "a list of strings", |value| each(value, Value::as_str))
    }

    /// Insists that `key`, if it is there, has one of the values that the code can do.
    ///
    /// # Errors
    /// It has another one.
    pub fn only(&self, key: &str, accepted: &[Value]) -> Result<(), CheckpointError> {
        let Some(found) = self.value(key) else {
            return Ok(());
        };
        if accepted.iter().any(|value| same(value, found)) {
            return Ok(());
        }
        let accepted: Vec<String> = accepted.iter().map(Value::to_string).collect();
        let expected = format!("{} (nothing else is supported)", accepted.join(" or "));
        Err(self.wrong(key, &expected))
    }

    /// Refuses a number outside of what makes sense, so that no product of several can overflow and nothing absurd is allocated. `value`
    /// is what was read of `key`, or its default.
    ///
    /// # Errors
    /// It is outside.
    pub fn within(
        &self,
        key: &str,
        value: usize,
        range: RangeInclusive<usize>,
    ) -> Result<(), CheckpointError> {
        if range.contains(&value) {
            return Ok(());
        }
        let expected = format!("a number of {} to {}", range.start(), range.end());
        Err(self.wrong(key, &expected))
    }

    /// The error of a key whose value is unusable; `expected` says what would do, as in "must be {expected}".
    pub fn wrong(&self, key: &str, expected: &str) -> CheckpointError {
        CheckpointError::Field {
            path: self.path.clone(),
            key: shown(key),
            expected: expected.to_owned(),
            found: self
                .map
                .get(key)
                .map_or_else(|| "nothing".to_owned(), |value| shown(&value.to_string())),
        }
    }

    /// Keys that no getter was asked for, without those that begin with `_`.
    pub fn unread(&self) -> Vec<&str> {
        let read = self.read.borrow();
        self.map
            .keys()
            .map(String::as_str)
            .filter(|key| !key.starts_with('_') && !read.contains(*key))
            .collect()
    }

    /// Refuses keys that were never read and are not in `ignored`.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownKeys`] with all of them.
    pub fn deny_unread(&self, ignored: &[&str]) -> Result<(), CheckpointError> {
        let unknown = self.unread().into_iter().filter(|key| !ignored.contains(key));
        let keys: NameList = unknown.collect();
        if keys.0.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::UnknownKeys {
            path: self.path.clone(),
            keys,
        })
    }

    fn optional<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        match self.value(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => convert(value).map(Some).ok_or_else(|| self.wrong(key, expected)),
        }
    }

    fn required<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, CheckpointError> {
        self.value(key)
            .and_then(convert)
            .ok_or_else(|| self.wrong(key, expected))
    }

    fn or<'a, T>(
        &'a self,
        key: &str,
        default: T,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, CheckpointError> {
        match self.value(key) {
            None => Ok(default),
            Some(value) => convert(value).ok_or_else(|| self.wrong(key, expected)),
        }
    }
}

fn as_usize(value: &Value) -> Option<usize> {
    value
        .as_u64()
        .filter(|&number| number <= EXTENT_LIMIT)
        .and_then(|number| usize::try_from(number).ok())
}

fn as_f64(value: &Value) -> Option<f64> {
    match value.as_str() {
        None => value.as_f64(),
        Some("NaN") => Some(f64::NAN),
        Some("Infinity") => Some(f64::INFINITY),
        Some("-Infinity") => Some(f64::NEG_INFINITY),
        Some(_) => None,
    }
}

fn each<'a, T>(value: &'a Value, convert: impl Fn(&'a Value) -> Option<T>) -> Option<Vec<T>> {
    value.as_array()?.iter().map(convert).collect()
}

/// Equality in which `1` and `1.0` are the same, as they are in Python.
fn same(left: &Value, right: &Value) -> bool {
    match (left.as_f64(), right.as_f64()) {
        (Some(left), Some(right)) => left == right,
        _ => left == right,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(value: Value) -> Config {
        let Value::Object(map) = value else {
            panic!("tests give objects")
        };
        Config::new(Path::new("vae/config.json"), map)
    }

    fn text<T: std::fmt::Debug>(result: Result<T, CheckpointError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_default_stands_in_for_an_absent_key_but_not_for_null() {
        let config = config(json!({"none": null, "two": 2, "half": 0.5, "yes": true, "name": "silu"}));
        assert_eq!(config.usize_or("absent", 7).unwrap(), 7);
        assert_eq!(config.usize_or("two", 7).unwrap(), 2);
        assert_eq!(config.usize("two").unwrap(), 2);
        assert_eq!(config.f64_or("two", 1.0).unwrap(), 2.0);
        assert_eq!(config.f64_or("half", 1.0).unwrap(), 0.5);
        assert!(config.bool_or("yes", false).unwrap());
        assert_eq!(config.str_or("name", "gelu").unwrap(), "silu");
        assert_eq!(config.str_or("absent", "gelu").unwrap(), "gelu");
        assert_eq!(config.opt_f64("none").unwrap(), None);
        assert_eq!(
            text(config.f64_or("none", 1.0)),
            "vae/config.json: `none` must be a number, found null"
        );
        assert_eq!(
            text(config.str("absent")),
            "vae/config.json: `absent` must be a string, found nothing"
        );
    }

    #[test]
    fn values_of_another_type_are_refused_with_what_was_found() {
        let config =
            config(json!({"text": "4", "minus": -1, "half": 0.5, "huge": 4294967296u64, "list": [1, "x"]}));
        assert!(
            text(config.usize_or("text", 1))
                .ends_with("`text` must be a whole number of 0 to 2147483648, found \"4\"")
        );
        assert!(text(config.usize_or("minus", 1)).ends_with("found -1"));
        assert!(text(config.usize_or("half", 1)).ends_with("found 0.5"));
        assert!(text(config.usize("huge")).ends_with("found 4294967296"));
        assert!(text(config.bool_or("half", true)).ends_with("must be true or false, found 0.5"));
        assert!(text(config.usizes("list")).contains("found [1,\"x\"]"));
        assert!(text(config.usizes("half")).contains("must be a list"));
    }

    #[test]
    fn numbers_are_held_within_bounds() {
        let config = config(json!({"n_layers": 7}));
        config.within("n_layers", 7, 1..=7).unwrap();
        assert!(
            text(config.within("n_layers", 7, 1..=6))
                .ends_with("`n_layers` must be a number of 1 to 6, found 7")
        );
    }

    #[test]
    fn keys_that_nobody_read_are_listed_and_underscores_are_not() {
        let config = config(json!({"_class_name": "X", "a": 1, "b": 2}));
        assert_eq!(config.unread(), ["a", "b"]);
        config.usize_or("a", 0).unwrap();
        assert!(text(config.deny_unread(&[])).contains("unknown keys `b`;"));
        config.deny_unread(&["b"]).unwrap();
    }

    #[test]
    fn only_supported_values_pass() {
        let config = config(json!({"act": "silu", "p": 0, "none": null}));
        config.only("act", &[json!("silu"), json!("swish")]).unwrap();
        config.only("p", &[json!(0.0)]).unwrap();
        config.only("absent", &[json!(1)]).unwrap();
        config.only("none", &[Value::Null]).unwrap();
        assert!(
            text(config.only("act", &[json!("gelu")]))
                .contains("must be \"gelu\" (nothing else is supported)")
        );
        assert!(config.unread().is_empty());
    }

    #[test]
    fn python_infinities_are_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("scheduler_config.json");
        std::fs::write(&path, r#"{"lambda_min_clipped": -Infinity, "none": NaN}"#).unwrap();
        let config = Config::read(&path).unwrap();
        assert_eq!(
            config.f64_or("lambda_min_clipped", 0.0).unwrap(),
            f64::NEG_INFINITY
        );
        assert!(config.opt_f64("none").unwrap().unwrap().is_nan());
    }
}
