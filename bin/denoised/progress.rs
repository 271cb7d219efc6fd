//! What a person sees while waiting: start-up phases, then steps. On stderr, and only if that is a terminal.

use crate::output::say;
use denoised_executor::StderrSink;
use denoised_types::Rank;
use denoised_wire::StartPhase;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, stderr};
use std::sync::Arc;
use std::time::Duration;

/// One line at the bottom of the terminal, gone when this is dropped; nothing at all elsewhere.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Shown if `is_wanted` and stderr is a terminal.
    pub(crate) fn new(is_wanted: bool) -> Self {
        let target = if is_wanted && stderr().is_terminal() {
            ProgressDrawTarget::stderr_with_hz(10)
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(None, target);
        bar.set_style(style("{spinner} {msg} [{elapsed}]"));
        bar.set_message("starting workers");
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Self(bar)
    }

    /// A worker went on with its start.
    pub(crate) fn phase(&self, rank: Rank, phase: &StartPhase) {
        self.0.set_message(format!("worker {rank}: {phase}"));
    }

    /// The workers are ready; pictures are computed from here on.
    pub(crate) fn begin_pictures(&self) {
        self.0
            .set_style(style("{msg} {wide_bar} {pos}/{len} steps [{elapsed}<{eta}]"));
        self.0.reset();
    }

    /// `n_done` of `n_steps` steps of all pictures are done.
    pub(crate) fn steps(&self, n_done: u64, n_steps: u64, message: String) {
        self.0.set_length(n_steps);
        self.0.set_position(n_done);
        self.0.set_message(message);
    }

    /// Where workers' lines go: above the bar.
    pub(crate) fn stderr_sink(&self) -> StderrSink {
        let bar = self.0.clone();
        StderrSink(Arc::new(move |rank, line| {
            bar.suspend(|| say(&format!("[rank {rank}] {line}")));
        }))
    }

    /// Writes a line above the bar; `write` gets it when the bar is out of the way.
    pub(crate) fn suspend<R>(&self, write: impl FnOnce() -> R) -> R {
        self.0.suspend(write)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is a constant that the tests have parsed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hidden_bar_goes_through_all_its_styles() {
        let progress = Progress::new(false);
        let phase = StartPhase::PreparingWeights {
            done_bytes: 1,
            total_bytes: 3,
        };
        progress.phase(Rank(1), &phase);
        assert_eq!(progress.0.message(), "worker 1: preparing weights, 33 % done");
        progress.begin_pictures();
        progress.steps(3, 20, "picture 1 of 1".to_owned());
        assert_eq!(progress.0.position(), 3);
        assert_eq!(progress.suspend(|| 7), 7);
    }
}
