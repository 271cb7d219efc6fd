//! `--profile`: what each rank did and when, as a file that trace viewers read (the JSON trace events of Chrome).
//!
//! One process per rank, one row in it: waits and waves, and within a wave its pieces. Knows nothing of what is computed.

use crate::error::Error;
use crate::{interrupt, output};
use denoised_executor::{Executor, status};
use denoised_types::{Mode, RequestId};
use denoised_wire::{Profile, Span, Work};
use serde_json::{Value, json};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Time for the workers to begin or to hand over. They answer while they compute.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// The same after Ctrl-C, when a worker may be hung.
const INTERRUPTED_LIMIT: Duration = Duration::from_secs(1);
/// The only thread of each process of a trace. Viewers take 0 for the idle thread of the system, hence also the ranks' numbers there.
const THREAD: u32 = 1;

/// Workers that record what they do.
#[derive(Debug)]
pub(crate) struct Recording {
    executor: Arc<dyn Executor>,
    path: PathBuf,
}

/// Refuses a file that could not be written, before anything is started.
///
/// # Errors
/// `path` is `-`, a folder, or lies in a folder that is not there or not writable.
pub(crate) fn check(path: Option<&Path>) -> Result<(), Error> {
    match path {
        None => Ok(()),
        Some(path) if path == Path::new("-") => Err(Error::usage("--profile writes to a file; name one")),
        Some(path) => output::check(path),
    }
}

impl Recording {
    /// Has all workers begin to record, if there is a path to write to.
    ///
    /// # Errors
    /// A worker did not answer, or has no such method.
    pub(crate) fn start(path: Option<&Path>, executor: &Arc<dyn Executor>) -> Result<Option<Self>, Error> {
        let Some(path) = path else { return Ok(None) };
        status::profile_start(executor.as_ref(), CALL_LIMIT)?;
        Ok(Some(Self {
            executor: Arc::clone(executor),
            path: path.to_owned(),
        }))
    }

    /// Collects what was recorded and writes it.
    ///
    /// # Errors
    /// A worker did not answer in time, or the file cannot be written.
    pub(crate) fn write(self) -> Result<(), Error> {
        let limit = if interrupt::is_interrupted() {
            INTERRUPTED_LIMIT
        } else {
            CALL_LIMIT
        };
        let profiles = status::profile_stop(self.executor.as_ref(), limit)?;
        let profiles: Vec<Profile> = profiles.into_iter().map(|(_, profile)| profile).collect();
        for profile in profiles.iter().filter(|profile| profile.n_dropped > 0) {
            tracing::warn!(
                "rank {}: the profile lacks {} spans that found no room",
                profile.rank,
                profile.n_dropped
            );
        }
        let document = document(&profiles);
        output::write_file(&self.path, |file| {
            let mut file = BufWriter::new(file);
            serde_json::to_writer(&mut file, &document)?;
            file.write_all(b"\n")?;
            file.flush()
        })
    }
}

/// The trace; its clock starts with the first recording.
fn document(profiles: &[Profile]) -> Value {
    let origin_ns = profiles.iter().map(|profile| profile.begin_ns).min().unwrap_or(0);
    let mut events = Vec::new();
    for profile in profiles {
        let process = u32::from(profile.rank.0) + 1;
        let about = |name: &str, text: Value| json!({"ph": "M", "name": name, "pid": process, "tid": THREAD, "args": text});
        events.push(about(
            "process_name",
            json!({"name": format!("rank {}", profile.rank)}),
        ));
        events.push(about("process_sort_index", json!({"sort_index": profile.rank})));
        events.push(about("thread_name", json!({"name": "computes"})));
        // What was under way when the recording began counts from then on.
        let begin_ns = profile.begin_ns;
        events.extend(
            profile
                .spans
                .iter()
                .map(|span| event(span, process, begin_ns, origin_ns)),
        );
    }
    let n_dropped: u64 = profiles.iter().map(|profile| profile.n_dropped).sum();
    json!({
        "displayTimeUnit": "ms",
        "otherData": {
            "software": concat!("denoised ", env!("CARGO_PKG_VERSION")),
            "n_dropped": n_dropped,
        },
        "traceEvents": events,
    })
}

fn event(span: &Span, process: u32, not_before_ns: u64, origin_ns: u64) -> Value {
    let begin_ns = span.begin_ns.max(not_before_ns);
    let end_ns = span.begin_ns.saturating_add(span.duration_ns);
    let micros = |ns: u64| ns as f64 / 1e3;
    let id = |request_id: &RequestId| json!({"request": request_id});
    let (name, args) = match &span.work {
        Work::Wait => ("wait", json!({})),
        Work::Wave { wave_id, mode } => {
            let mode = match mode {
                Mode::Request => "request",
                Mode::Step => "step",
            };
            ("wave", json!({"wave": wave_id, "mode": mode}))
        }
        Work::Encode { request_id } => ("encode", id(request_id)),
        Work::Step { members } => {
            let members: Vec<Value> = members
                .iter()
                .map(|(request_id, step_idx)| json!({"request": request_id, "step": step_idx}))
                .collect();
            ("step", json!({"n_members": members.len(), "members": members}))
        }
        Work::Decode { request_id } => ("decode", id(request_id)),
        Work::Method { name } => ("method", json!({"name": name})),
    };
    json!({
        "ph": "X",
        "name": name,
        "cat": "worker",
        "ts": micros(begin_ns.saturating_sub(origin_ns)),
        "dur": micros(end_ns.saturating_sub(begin_ns)),
        "pid": process,
        "tid": THREAD,
        "args": args,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use denoised_types::{Rank, WaveId};

    #[test]
    fn every_rank_is_a_process_with_its_spans_on_one_clock() {
        let span = |work, begin_ns, duration_ns| Span {
            work,
            begin_ns,
            duration_ns,
        };
        let wave = Work::Wave {
            wave_id: WaveId(3),
            mode: Mode::Step,
        };
        let step = Work::Step {
            members: vec![(RequestId(7), 0), (RequestId(8), 4)],
        };
        let profile = |rank, begin_ns, spans| Profile {
            rank: Rank(rank),
            begin_ns,
            end_ns: begin_ns + 10_000,
            spans,
            n_dropped: 1,
        };
        let document = document(&[
            profile(0, 5_000, vec![span(step, 6_500, 1_000), span(wave, 6_000, 2_000)]),
            profile(1, 5_500, vec![span(Work::Wait, 4_500, 9_000)]),
        ]);
        let events = document["traceEvents"].as_array().unwrap();
        let names: Vec<&Value> = events
            .iter()
            .filter(|event| event["name"] == "process_name")
            .map(|event| &event["args"]["name"])
            .collect();
        assert_eq!(names, ["rank 0", "rank 1"]);
        let spans: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
        let times = |event: &Value| (event["pid"].as_u64(), event["ts"].as_f64(), event["dur"].as_f64());
        assert_eq!(times(spans[0]), (Some(1), Some(1.5), Some(1.0)));
        assert_eq!(times(spans[1]), (Some(1), Some(1.0), Some(2.0)));
        assert_eq!(times(spans[2]), (Some(2), Some(0.5), Some(8.0)));
        assert_eq!(spans[0]["args"]["members"][1], json!({"request": 8, "step": 4}));
        assert_eq!(spans[1]["args"], json!({"wave": 3, "mode": "step"}));
        assert_eq!(document["otherData"]["n_dropped"], 2);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_refused_before_anything_is_started() {
        assert!(check(None).is_ok());
        assert!(check(Some(Path::new("-"))).is_err());
        let folder = tempfile::tempdir().unwrap();
        assert!(check(Some(folder.path())).is_err());
        assert!(check(Some(&folder.path().join("absent/trace.json"))).is_err());
        assert!(check(Some(&folder.path().join("trace.json"))).is_ok());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
