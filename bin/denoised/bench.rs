//! `denoised bench`: what the message paths of this machine can do, beside the raw limits measured in the same run.

use crate::args::{BenchArgs, BenchWhat, IdleArgs};
use crate::error::Error;
use crate::every_rank::EveryRank;
use crate::model_folder;
use crate::output::write_stdout;
use crate::{bench_memory, bench_step, sharing};
use denoised_executor::bench as executor;
use denoised_executor::{Executor, MpExecutor, MpOptions, WorkerProgram};
use denoised_ring::bench::{self as ring, Times};
use denoised_types::{Failure, FailureCode, GenerateRequest, Mode, Rank, WorkerConfig};
use denoised_worker::{Program, Registry, Start, StartContext, Started, StepWave, WaveMember, WaveSink};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

/// Second argument of a worker without a model.
const BENCH_WORKER_ARG: &str = "bench";
/// Pictures whose steps are timed.
const N_DEMO_PICTURES: u64 = 5;

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
    let (text, document) = match &args.what {
        BenchWhat::Ring(args) => ring_report(args)?,
        BenchWhat::Executor(args) => executor_report(args)?,
        BenchWhat::Step(args) => bench_step::report(args)?,
        BenchWhat::Memory(args) => bench_memory::report(args)?,
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

fn ring_report(args: &IdleArgs) -> Result<(String, Value), Error> {
    let plan = ring::Plan {
        idle_s: args.idle_seconds,
        ..ring::Plan::default()
    };
    let report = ring::run(&ring::Launcher::this_program(), &plan).map_err(|error| failed(&error))?;
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
        let label = format!("200-byte records to {} reader(s), median and best", one.n_readers);
        let (median, best) = (one.records_per_s / 1e6, one.best_records_per_s / 1e6);
        let _ = writeln!(text, "{label:54} {median:>10.2} {best:>10.2}  million/s");
        throughput.push(json!({
            "n_readers": one.n_readers,
            "records_per_s": one.records_per_s,
            "best_records_per_s": one.best_records_per_s,
        }));
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

fn executor_report(args: &IdleArgs) -> Result<(String, Value), Error> {
    let mut program = WorkerProgram::default();
    program.args.push(BENCH_WORKER_ARG.into());
    let nothing = worker_config(PathBuf::new(), None);
    let mut plan = executor::Plan::new(program, nothing, ring::Launcher::this_program());
    plan.idle = Duration::from_secs(args.idle_seconds);
    let report = executor::run(&plan).map_err(|error| failed(&error))?;
    let step = demo_step()?;

    let mut text = format!("executor, {} core(s)\n\n", report.n_cores);
    let _ = writeln!(
        text,
        "{:54} {:>10} {:>10}  {:>10}",
        "", "p50", "p99", "to raw p50"
    );
    let mut row = |label: &str, times: Times, raw: Option<Times>| {
        let ratio = raw.map_or(String::new(), |raw| ratio(times, raw));
        let line = format!(
            "{label:54} {:>10} {:>10}  {ratio:>10}",
            shown(times.p50_ns),
            shown(times.p99_ns)
        );
        let _ = writeln!(text, "{}", line.trim_end());
    };
    row("a cache line there and back (raw)", report.line_round_trip, None);
    row("a futex wake there and back (raw)", report.futex_round_trip, None);
    let mut calls = Vec::new();
    for call in &report.calls {
        let (how, raw) = if call.is_spinning {
            ("spinning", report.line_round_trip)
        } else {
            ("sleeping", report.futex_round_trip)
        };
        let label = format!("a call and all replies, {} {how} worker(s)", call.n_workers);
        row(&label, call.times, Some(raw));
        let mut entry = as_json(call.times);
        entry["n_workers"] = json!(call.n_workers);
        entry["is_spinning"] = json!(call.is_spinning);
        calls.push(entry);
    }
    for (label, times) in [
        ("a step wave, one sleeping worker", report.step_wave),
        ("the step wave after it", report.next_step_wave),
    ] {
        row(label, times, Some(report.futex_round_trip));
    }
    let label = format!(
        "{} idle workers together, over {} s",
        report.n_idle_workers, args.idle_seconds
    );
    let _ = writeln!(
        text,
        "\n{label:54} {:>10.4} % of a core",
        report.idle_core_share * 100.0
    );
    let of_step = |times: Times| times.p50_ns as f64 / step.as_nanos().max(1) as f64;
    let one_call = report
        .calls
        .iter()
        .find(|call| call.n_workers == 1 && !call.is_spinning);
    let call_share = one_call.map(|call| of_step(call.times));
    let report_share = of_step(report.step_report);
    let _ = writeln!(
        text,
        "{:54} {:>10}",
        "a denoise step of the demo checkpoint",
        shown(step.as_nanos() as u64)
    );
    // A wave is one call for all its steps; each step adds its report.
    let _ = writeln!(
        text,
        "{:54} {:>10.3} % of that step ({})",
        "reporting a step to a sleeping executor",
        report_share * 100.0,
        shown(report.step_report.p50_ns)
    );
    if let Some(share) = call_share {
        let _ = writeln!(
            text,
            "{:54} {:>10.3} % of that step",
            "a call to one sleeping worker, once per wave",
            share * 100.0
        );
    }
    let document = json!({
        "n_cores": report.n_cores,
        "line_round_trip": as_json(report.line_round_trip),
        "futex_round_trip": as_json(report.futex_round_trip),
        "calls": calls,
        "step_wave": as_json(report.step_wave),
        "next_step_wave": as_json(report.next_step_wave),
        "n_idle_workers": report.n_idle_workers,
        "idle_seconds": args.idle_seconds,
        "idle_core_share": report.idle_core_share,
        "demo_step_ns": step.as_nanos() as u64,
        "step_report": as_json(report.step_report),
        "share_of_demo_step": report_share,
        "call_share_of_demo_step": call_share,
    });
    Ok((text, document))
}

fn worker_config(model: PathBuf, n_threads: Option<u32>) -> WorkerConfig {
    WorkerConfig {
        model,
        device: "cpu".to_owned(),
        dtype: "f32".to_owned(),
        n_threads,
        warm_up: false,
    }
}

/// How long a denoise step takes, on one worker with all cores: the fastest of a few pictures.
fn demo_step() -> Result<Duration, Error> {
    let model = model_folder::choose(None)?;
    let worker = MpExecutor::start(MpOptions::new(1, worker_config(model, None)), &mut |_, _| {})?;
    let mut every_rank = EveryRank::new(&worker, Mode::Request);
    let mut fastest = Duration::MAX;
    for seed in 0..N_DEMO_PICTURES {
        let request = GenerateRequest {
            seed,
            ..GenerateRequest::new("a red apple")
        };
        for generated in every_rank.run(&sharing::alone(&request))? {
            let step_s = generated.times.denoise_ms / 1e3 / f64::from(generated.resolved.n_steps.max(1));
            fastest = fastest.min(Duration::from_secs_f64(step_s.max(0.0)));
        }
    }
    worker.shutdown(Duration::from_secs(10));
    Ok(fastest)
}

/// Whether this worker is one of `bench executor`: it has no model.
pub(crate) fn is_bench_worker() -> bool {
    std::env::args_os()
        .nth(2)
        .is_some_and(|arg| arg == BENCH_WORKER_ARG)
}

/// A worker that answers calls and computes nothing.
pub(crate) fn worker() -> Registry {
    denoised_worker::bench::register(Registry::new(NoModel)).expect("no other method has this name")
}

#[derive(Debug)]
struct NoModel;

impl Start for NoModel {
    fn start(&mut self, context: &mut dyn StartContext) -> Result<(Box<dyn Program>, Started), Failure> {
        if context.place().0 == Rank(0) {
            context.publish_shared(None)?;
        }
        Ok((Box::new(Self), Started::default()))
    }
}

impl Program for NoModel {
    fn run_wave(&mut self, members: Vec<WaveMember>, sink: &mut dyn WaveSink) -> Result<(), Failure> {
        for member in members {
            let failure = Failure::new(FailureCode::InvalidRequest, "this worker has no model");
            sink.done(member.request_id, Err(failure));
        }
        Ok(())
    }

    fn run_step(&mut self, wave: StepWave, sink: &mut dyn WaveSink) -> Result<(), Failure> {
        self.run_wave(wave.joining, sink)
    }
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
