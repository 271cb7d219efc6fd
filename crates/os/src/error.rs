//! The error of a refused system call.

use std::io;

/// A system call was refused; `action` says what it was for, the source says why.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}: {source}")]
pub struct OsError {
    /// What was attempted, as in "cannot {action}".
    pub action: &'static str,
    /// The kernel's answer.
    pub source: io::Error,
}

impl OsError {
    /// For use in `map_err`: names the attempt, keeps the cause.
    pub(crate) fn of<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self {
            action,
            source: source.into(),
        }
    }
}
