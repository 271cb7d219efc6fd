//! What happens to worlds of processes when processes, machines and people misbehave. One module per kind of
//! fault; the beginning of a test's name (`d1`) is the id of a case that some system of this kind got wrong.
#![expect(
    clippy::print_stdout,
    reason = "times of the run, for whoever looks (`--nocapture`)"
)]

mod death;
mod orphans;
mod shutdown;
mod start;

mod large;
mod memory;
mod ring;

mod deadlines;
mod errors;

mod cancel;
mod device;
mod methods;

mod selection;

mod relay;

use denoised_executor::{
    Executor, ExecutorError, ExecutorEvent, Limits, LinkSpec, MethodCall, MpExecutor, MpOptions, Ranks,
    StderrSink,
};
use denoised_os::{child::ExitStatus, process::cpu_time_ns, process::memory_of, signal::Signal};
use denoised_testkit::{
    process::{
        be_a_worker, eventually, is_running, kill, links_of, options, sockets_of, stop, this_test_again,
        wait_for,
    },
    script::{At, Script, What, picture, request, wave},
    watchdog::Watchdog,
};
use denoised_types::{Failure, FailureCode, Image, Rank, RequestId, WaveId};
use denoised_wire::{StartPhase, WorkerStatus};
use std::{
    collections::BTreeMap,
    io::Read,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// Not a test: the worker processes of the others.
#[test]
fn scripted_worker_process() {
    be_a_worker(large::registry);
}

pub(crate) fn watchdog(name: &str) -> Watchdog {
    Watchdog::new(name, Duration::from_secs(120))
}

pub(crate) fn start(n_workers: u16, script: &Script) -> MpExecutor {
    start_with(options(n_workers, script))
}

pub(crate) fn start_with(options: MpOptions) -> MpExecutor {
    MpExecutor::start(options, &mut |_, _| {}).unwrap()
}

pub(crate) fn start_error(options: MpOptions) -> ExecutorError {
    match MpExecutor::start(options, &mut |_, _| {}) {
        Ok(executor) => panic!("started: {executor:?}"),
        Err(error) => error,
    }
}

pub(crate) fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

pub(crate) fn soon() -> Duration {
    Duration::from_secs(30)
}

pub(crate) fn events_until_failed(executor: &dyn Executor) -> Vec<ExecutorEvent> {
    let mut events = Vec::new();
    while !matches!(events.last(), Some(ExecutorEvent::WorldFailed(_))) {
        let more = executor.wait_events(late());
        assert!(!more.is_empty(), "silence after {events:?}");
        events.extend(more);
    }
    events
}

pub(crate) fn image(output: &denoised_executor::Output) -> Image {
    let (width, height) = output.size();
    let rgb = output.rgb().to_vec();
    Image::picture(width, height, rgb)
}

pub(crate) fn outcomes(events: &[ExecutorEvent]) -> BTreeMap<RequestId, Result<Image, Failure>> {
    let mut outcomes = BTreeMap::new();
    for event in events {
        if let ExecutorEvent::RequestDone { request_id, outcome } = event {
            assert!(
                outcomes
                    .insert(*request_id, outcome.as_ref().map(image).map_err(Clone::clone))
                    .is_none(),
                "{request_id} ended twice"
            );
        }
    }
    outcomes
}

/// Waits for the step after which something shall happen.
pub(crate) fn wait_for_step(executor: &dyn Executor, request_id: u64, step: u32) -> Vec<ExecutorEvent> {
    let mut events = Vec::new();
    loop {
        events.extend(executor.wait_events(late()));
        let reached = |event: &ExecutorEvent| {
            matches!(event, ExecutorEvent::Step { request_id: of, n_done, .. }
                if *of == RequestId(request_id) && *n_done >= step)
        };
        if events.iter().any(reached) {
            return events;
        }
    }
}
