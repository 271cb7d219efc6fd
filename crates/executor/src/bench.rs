//! What a call costs: typed, with ids, to every rank and back, beside the raw limits measured in the same run.
//!
//! The method is `echo`, which every worker has, so any worker program will do.

use crate::{
    Executor, ExecutorError, LinkSpec, MethodCall, MpExecutor, MpOptions, SpinPolicy, StderrSink,
    WorkerProgram,
};
use denoised_os::{cpu, process::cpu_time_ns};
use denoised_ring::bench as ring;
use denoised_types::{Mode, Rank, WaveId, WorkerConfig};
use denoised_wire::Wave;
use std::time::{Duration, Instant};

pub use denoised_ring::bench::Times;

/// Arguments of the calls: about what a step command carries.
const ARGS: [u8; 64] = [7; 64];
/// Calls before the first one that counts.
const N_WARM_UP: u32 = 200;
/// Steps that are reported in one go, and how often: less than a second each.
const N_STEPS_PER_CALL: u32 = 250;
const N_STEP_CALLS: u32 = 4;
/// No call takes longer unless something is broken.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// How long workers settle before they count as idle.
const SETTLE: Duration = Duration::from_millis(500);
/// How long sleeping ends are left alone before a call.
const FALL_ASLEEP: Duration = Duration::from_micros(300);
/// How long spinning ends spin: longer than any pause between two calls.
const SPIN_NS: u64 = 1_000_000;

/// What to measure, and with which workers.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The worker program.
    pub program: WorkerProgram,
    /// What the workers load.
    pub worker: WorkerConfig,
    /// Numbers of workers to measure calls with.
    pub world_sizes: Vec<u16>,
    /// Spinning calls; a fifth of it sleeping ones per world.
    pub n_calls: u32,
    /// Workers that are watched while idle.
    pub n_idle_workers: u16,
    /// For how long.
    pub idle: Duration,
    /// The other end of the raw measurements.
    pub raw: ring::Launcher,
    /// Rounds of the raw measurements.
    pub n_raw_rounds: usize,
}

impl Plan {
    /// Worlds of 1, 2, 4 and 8 workers, 5000 calls each, 8 idle workers for 10 seconds. Takes about half a minute and the time to
    /// start the workers.
    pub fn new(program: WorkerProgram, worker: WorkerConfig, raw: ring::Launcher) -> Self {
        Self {
            program,
            worker,
            world_sizes: vec![1, 2, 4, 8],
            n_calls: 5000,
            n_idle_workers: 8,
            idle: Duration::from_secs(10),
            raw,
            n_raw_rounds: 100,
        }
    }
}

/// Calls to all ranks of a world and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallTimes {
    /// Its number of workers; every one replies. One alone has a core of its own, like the ends of the raw measurements.
    pub n_workers: u16,
    /// Whether all ends spin; otherwise all sleep.
    pub is_spinning: bool,
    /// From the call until the last reply is in the caller's hands.
    pub times: Times,
}

/// All results.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Cores this process may use.
    pub n_cores: usize,
    /// A cache line there and back, raw.
    pub line_round_trip: Times,
    /// A futex wake there and back, raw. Compare sleeping calls with it.
    pub futex_round_trip: Times,
    /// Spinning with one worker (more do not own a core each on a small machine), then sleeping worlds by size.
    pub calls: Vec<CallTimes>,
    /// A wave in step mode without requests, to one sleeping worker and back: what a step of step mode costs beside its computation
    /// when the engine has been idle.
    pub step_wave: Times,
    /// The same, dispatched as soon as the one before is over, as an engine with work does.
    pub next_step_wave: Times,
    /// What reporting a step to a sleeping executor costs the worker: the executor's part in a denoise step of a wave.
    pub step_report: Times,
    /// Workers that were watched while idle.
    pub n_idle_workers: u16,
    /// Share of one core that they took together.
    pub idle_core_share: f64,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The raw limits.
    #[error(transparent)]
    Raw(#[from] ring::BenchError),
    /// A world did not start or answer.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// A worker's CPU time.
    #[error(transparent)]
    Os(#[from] denoised_os::OsError),
}

/// Measures everything.
///
/// # Errors
/// A program did not start or answer.
pub fn run(plan: &Plan) -> Result<Report, BenchError> {
    let raw_plan = ring::Plan {
        n_rounds: plan.n_raw_rounds,
        n_records: 1000,
        n_repeats: 1,
        idle_s: 0,
    };
    let raw = ring::run(&plan.raw, &raw_plan)?;
    let mut calls = vec![on_own_thread(|| call_times(plan, 1, true))?];
    for &n_workers in &plan.world_sizes {
        calls.push(on_own_thread(|| call_times(plan, n_workers, false))?);
    }
    Ok(Report {
        n_cores: cpu::usable_cores(),
        line_round_trip: raw.line_round_trip,
        futex_round_trip: raw.futex_round_trip,
        calls,
        step_wave: on_own_thread(|| step_wave(plan, FALL_ASLEEP))?,
        next_step_wave: on_own_thread(|| step_wave(plan, Duration::ZERO))?,
        step_report: on_own_thread(|| step_report(plan))?,
        n_idle_workers: plan.n_idle_workers,
        idle_core_share: idle_core_share(plan)?,
    })
}

fn start(plan: &Plan, n_workers: u16, spin: SpinPolicy) -> Result<MpExecutor, ExecutorError> {
    let options = MpOptions {
        program: plan.program.clone(),
        link: LinkSpec {
            spin,
            command_arena_bytes: 4 << 20,
            event_arena_bytes: 4 << 20,
            ..LinkSpec::default()
        },
        stderr: StderrSink::quiet(),
        ..MpOptions::new(n_workers, plan.worker.clone())
    };
    MpExecutor::start(options, &mut |_, _| {})
}

/// Runs `measure` on a thread that may be bound to a core and is gone afterwards.
fn on_own_thread<T: Send>(measure: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| match scope.spawn(measure).join() {
        Ok(measured) => measured,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

fn call_times(plan: &Plan, n_workers: u16, is_spinning: bool) -> Result<CallTimes, ExecutorError> {
    // Sleeping ends get time to fall asleep before each call, or else they would meet awake.
    let (spin, pause, n_calls) = if is_spinning {
        (SpinPolicy::ForNs(SPIN_NS), Duration::ZERO, plan.n_calls)
    } else {
        (SpinPolicy::Never, FALL_ASLEEP, plan.n_calls / 5)
    };
    // Caller and worker on a core each, as in the raw measurement; a process inherits the core of the thread that starts it. More
    // workers go where the kernel puts them.
    let executor = start_apart(plan, n_workers, spin)?;
    let mut times_ns = Vec::with_capacity(n_calls as usize);
    for call_idx in 0..N_WARM_UP.saturating_add(n_calls) {
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        let begin = Instant::now();
        executor.call(&MethodCall::new("echo", &ARGS, begin + CALL_LIMIT))?;
        if call_idx >= N_WARM_UP {
            times_ns.push(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
    }
    executor.shutdown(CALL_LIMIT);
    Ok(CallTimes {
        n_workers,
        is_spinning,
        times: times_of(times_ns),
    })
}

/// Starts a world whose one worker has a core of its own, if there are two.
fn start_apart(plan: &Plan, n_workers: u16, spin: SpinPolicy) -> Result<MpExecutor, ExecutorError> {
    let cores = cpu::allowed_core_ids().unwrap_or_default();
    let pin = |core_idx: usize| {
        if n_workers == 1 && cores.len() >= 2 {
            // Unpinned times are times too.
            let _ = cpu::pin_thread(&cores[core_idx..=core_idx]);
        }
    };
    pin(1);
    let executor = start(plan, n_workers, spin)?;
    pin(0);
    Ok(executor)
}

/// Waves without requests, one after the other, with a pause before each.
fn step_wave(plan: &Plan, pause: Duration) -> Result<Times, ExecutorError> {
    let executor = start_apart(plan, 1, SpinPolicy::Auto)?;
    let mut times_ns = Vec::new();
    for wave_idx in 0..u64::from(N_WARM_UP.saturating_add(plan.n_calls / 5)) {
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        let wave = Wave {
            wave_id: WaveId(wave_idx + 1),
            mode: Mode::Step,
            ranks: vec![Rank(0)],
            joining: Vec::new(),
            continuing: Vec::new(),
            cancelled: Vec::new(),
            adapters: Vec::new(),
        };
        let begin = Instant::now();
        executor.dispatch(wave, begin + CALL_LIMIT)?;
        while executor.wait_events(begin + CALL_LIMIT).is_empty() {
            if begin.elapsed() >= CALL_LIMIT {
                let (what, silent) = ("a wave".to_owned(), vec![Rank(0)]);
                return Err(ExecutorError::Deadline { what, silent });
            }
        }
        if wave_idx >= u64::from(N_WARM_UP) {
            times_ns.push(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
    }
    executor.shutdown(CALL_LIMIT);
    Ok(times_of(times_ns))
}

/// What the worker's own clock says of its reports.
fn step_report(plan: &Plan) -> Result<Times, ExecutorError> {
    let executor = start(plan, 1, SpinPolicy::Never)?;
    let n_steps = N_STEPS_PER_CALL.to_string();
    let mut times_ns = Vec::new();
    for _ in 0..N_STEP_CALLS {
        let deadline = Instant::now() + CALL_LIMIT;
        for reply in executor.call(&MethodCall::new("step_cost", n_steps.as_bytes(), deadline))? {
            let chunks = reply.bytes.chunks_exact(8);
            times_ns.extend(chunks.map(|ns| {
                ns.iter()
                    .rev()
                    .fold(0u64, |sum, &byte| sum << 8 | u64::from(byte))
            }));
        }
    }
    executor.shutdown(CALL_LIMIT);
    Ok(times_of(times_ns))
}

fn idle_core_share(plan: &Plan) -> Result<f64, BenchError> {
    let executor = start(plan, plan.n_idle_workers, SpinPolicy::Auto)?;
    executor.call(&MethodCall::new("echo", &ARGS, Instant::now() + CALL_LIMIT))?;
    std::thread::sleep(SETTLE);
    let pids = executor.world().pids;
    let used_ns = || {
        pids.iter().try_fold(0u64, |sum, pid| {
            cpu_time_ns(*pid).map(|ns| sum.saturating_add(ns))
        })
    };
    let (begin, before_ns) = (Instant::now(), used_ns()?);
    std::thread::sleep(plan.idle);
    let share = used_ns()?.saturating_sub(before_ns) as f64 / begin.elapsed().as_nanos() as f64;
    executor.shutdown(CALL_LIMIT);
    Ok(share)
}

fn times_of(mut times_ns: Vec<u64>) -> Times {
    times_ns.sort_unstable();
    let at = |percent: usize| {
        times_ns
            .get(times_ns.len().saturating_sub(1) * percent / 100)
            .copied()
            .unwrap_or(0)
    };
    Times {
        p50_ns: at(50),
        p99_ns: at(99),
        n: times_ns.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_sorted_times() {
        let times = times_of((1..=1000).rev().collect());
        assert_eq!(
            times,
            Times {
                p50_ns: 500,
                p99_ns: 990,
                n: 1000
            }
        );
        assert_eq!(times_of(Vec::new()), Times::default());
    }
}
