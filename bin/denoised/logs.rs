//! Logs go to stderr; how many is said by `-v` or, stronger, by `DENOISED_LOG`.

use crate::interrupt;
use crate::output::say;
use std::io::{IsTerminal, Write};
use std::sync::OnceLock;
use tracing_subscriber::EnvFilter;

/// The variable that workers inherit too.
pub(crate) const VARIABLE: &str = "DENOISED_LOG";

/// What `-v` chose, if there was no variable.
static CHOSEN: OnceLock<&'static str> = OnceLock::new();

/// What workers are to be told, unless they inherit the variable already.
pub(crate) fn filter_for_workers() -> Option<&'static str> {
    CHOSEN.get().copied()
}

/// The filter that `-v` given `n_verbose` times stands for.
fn filter_of(n_verbose: u8) -> &'static str {
    match n_verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    }
}

/// Starts to log. A filter that cannot be read is told and replaced by the default.
pub(crate) fn start(n_verbose: u8) {
    let default = || EnvFilter::new(filter_of(n_verbose));
    let filter = match std::env::var(VARIABLE) {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(&text).unwrap_or_else(|cause| {
            say(&format!("denoised: warning: {VARIABLE}={text}: {cause}"));
            default()
        }),
        _ => {
            let _ = CHOSEN.set(filter_of(n_verbose));
            default()
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| -> Box<dyn Write> {
            // Workers that this program kills on its way out are no news.
            if interrupt::is_ending() {
                Box::new(std::io::sink())
            } else {
                Box::new(std::io::stderr())
            }
        })
        .with_ansi(std::io::stderr().is_terminal())
        // It would panic where stderr is closed.
        .log_internal_errors(false)
        .init();
}
