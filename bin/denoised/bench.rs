//! `denoised bench`: what the message paths of this machine can do, beside the raw limits measured in the same run.

use crate::args::{BenchArgs, BenchWhat};
use crate::error::Error;
use crate::output::write_stdout;
use denoised_ring::bench::{self as ring, Times};
use denoised_types::{Failure, FailureCode};
use serde_json::{Value, json};
use std::fmt::Write;

/// Whether this process is the other end of a measurement; then [`other_end`] is all it does.
pub(crate) fn is_other_end() -> bool {
    std::env::args_os()
        .nth(1)
        .is_some_and(|arg| arg == ring::CHILD_ARG)
}

/// The other end of a measurement.
pub(crate) fn other_end() -> Result<(), Error> {
    ring::child_main().map_err(|error| failed(&error))
}

/// Runs the command.
///
/// # Errors
/// An end did not start or answer; the standard output is closed.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Error> {
    let (text, document) = match args.what {
        BenchWhat::Ring => ring_report()?,
        BenchWhat::Executor => executor_report()?,
    };
    if args.json {
        write_stdout(format!("{document}\n").as_bytes())
    } else {
        write_stdout(text.as_bytes())
    }
}

fn failed(error: &dyn std::fmt::Display) -> Error {
    Failure::new(FailureCode::Internal, format!("cannot measure: {error}")).into()
}

fn ring_report() -> Result<(String, Value), Error> {
    let report =
        ring::run(&ring::Launcher::this_program(), &ring::Plan::default()).map_err(|error| failed(&error))?;
    let mut text = format!("ring, {} core(s)\n\n", report.n_cores);
    let mut document = serde_json::Map::new();
    document.insert("n_cores".to_owned(), json!(report.n_cores));
    let _ = writeln!(
        text,
        "{:54} {:>10} {:>10}  {:>10}",
        "", "p50", "p99", "to raw p50"
    );
    let rows = [
        (
            "a cache line there and back (raw)",
            "line_round_trip",
            report.line_round_trip,
            None,
        ),
        (
            "a record there and back, both spinning",
            "spinning_round_trip",
            report.spinning_round_trip,
            Some(report.line_round_trip),
        ),
        (
            "a futex wake there and back (raw)",
            "futex_round_trip",
            report.futex_round_trip,
            None,
        ),
        (
            "a record there and back, both asleep",
            "sleeping_round_trip",
            report.sleeping_round_trip,
            Some(report.futex_round_trip),
        ),
        (
            "an empty record until its reader has it",
            "empty_delivery",
            report.empty_delivery,
            None,
        ),
        (
            "20 MB written in place, until the reader has it",
            "tensor_delivery",
            report.tensor_delivery,
            Some(report.empty_delivery),
        ),
    ];
    for (label, name, times, raw) in rows {
        let ratio = raw.map_or(String::new(), |raw| ratio(times, raw));
        let (p50, p99) = (shown(times.p50_ns), shown(times.p99_ns));
        let _ = writeln!(
            text,
            "{}",
            format!("{label:54} {p50:>10} {p99:>10}  {ratio:>10}").trim_end()
        );
        document.insert(name.to_owned(), as_json(times));
    }
    text.push('\n');
    let mut throughput = Vec::new();
    for one in &report.throughput {
        let label = format!("200-byte records to {} spinning reader(s)", one.n_readers);
        let _ = writeln!(text, "{label:54} {:>10.2} million/s", one.records_per_s / 1e6);
        throughput.push(json!({"n_readers": one.n_readers, "records_per_s": one.records_per_s}));
    }
    let _ = writeln!(
        text,
        "{:54} {:>10.4} % of a core",
        "8 sleeping readers together",
        report.idle_core_share * 100.0
    );
    let _ = writeln!(
        text,
        "{:54} {:>10}",
        "waits that only the safety bound ended", report.n_missed_wakes
    );
    document.insert("throughput".to_owned(), json!(throughput));
    document.insert("idle_core_share".to_owned(), json!(report.idle_core_share));
    document.insert("n_missed_wakes".to_owned(), json!(report.n_missed_wakes));
    Ok((text, Value::Object(document)))
}

fn executor_report() -> Result<(String, Value), Error> {
    Err(failed(&"not yet"))
}

fn as_json(times: Times) -> Value {
    json!({"p50_ns": times.p50_ns, "p99_ns": times.p99_ns, "n": times.n})
}

fn ratio(times: Times, raw: Times) -> String {
    if raw.p50_ns == 0 {
        return String::new();
    }
    format!("{:.2} x", times.p50_ns as f64 / raw.p50_ns as f64)
}

/// Nanoseconds for people.
fn shown(ns: u64) -> String {
    match ns {
        0..10_000 => format!("{ns} ns"),
        10_000..10_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        _ => format!("{:.1} ms", ns as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_shown_in_a_fitting_unit() {
        assert_eq!(shown(0), "0 ns");
        assert_eq!(shown(9_999), "9999 ns");
        assert_eq!(shown(12_345), "12.3 us");
        assert_eq!(shown(12_345_678), "12.3 ms");
    }
}
