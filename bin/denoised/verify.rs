//! `denoised verify`: a reference case on every rank at the same time, every tensor compared.

use crate::args::VerifyArgs;
use crate::case::Case;
use crate::compare::{Row, Tensors, compare, shown, stack};
use crate::error::Error;
use crate::output::write_stdout;
use crate::progress::Progress;
use crate::{interrupt, tensor_file, world};
use denoised_executor::{Executor, ExecutorEvent};
use denoised_types::{Failure, FailureCode, GenerateRequest, Generated, Mode, Rank, RequestId, WaveId};
use denoised_wire::{Member, Wave};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// Time for a command to enter the ring.
const DISPATCH_LIMIT: Duration = Duration::from_secs(30);
/// After this long without news the workers are asked whether they are there.
const SILENCE: Duration = Duration::from_secs(30);
/// Time for that answer.
const HEALTH_LIMIT: Duration = Duration::from_secs(10);
/// Time for workers to end.
const CLOSE_BUDGET: Duration = Duration::from_secs(10);

/// The tensor of the seeded run that must equal the reference's `latents.init`.
const SEEDED_LATENTS: &str = "seeded.latents.init";

/// Runs the command.
///
/// # Errors
/// [`Error::Difference`] if anything is not as the reference says; otherwise what kept the case from being run.
pub(crate) fn run(args: &VerifyArgs) -> Result<(), Error> {
    let case = Case::read(&args.case)?;
    let progress = Progress::new(!args.json);
    let executor = world::start(&args.world, &case.model, &progress)?;
    let waker = executor.waker();
    let watched = interrupt::watched(move || waker.wake());
    let computed = compute(&case, executor.as_ref());
    drop(watched);
    drop(progress);
    executor.shutdown(CLOSE_BUDGET);
    let ranks = computed?;

    if let (Some(path), Some(tensors)) = (&args.dump, ranks.first()) {
        tensor_file::write(path, tensors)?;
    }
    let rows = compare(&ranks, &case.reference, &[(SEEDED_LATENTS, "latents.init")]);
    // In a batch the reference's own noise is one draw for all prompts, which no single request repeats.
    let is_compared = |row: &Row| !(case.is_batch && row.name == "seeded.image" && row.sha256.is_empty());
    let rows: Vec<Row> = rows.into_iter().filter(is_compared).collect();
    let n_wrong = rows.iter().filter(|row| row.problem.is_some()).count();
    let text = if args.json {
        as_json(args, &case, &rows, n_wrong)
    } else {
        as_table(args, &case, &rows, n_wrong)
    };
    write_stdout(text.as_bytes())?;
    if n_wrong == 0 {
        Ok(())
    } else {
        Err(Error::Difference(format!(
            "{n_wrong} of {} tensors are wrong",
            rows.len()
        )))
    }
}

/// The tensors of every rank, by rank: of the run from the reference's latents under their own names, of the run from the seed
/// under `seeded.…`.
fn compute(case: &Case, executor: &dyn Executor) -> Result<Vec<Tensors>, Error> {
    let world = executor.world();
    let family = world.model.map(|model| model.family).unwrap_or_default();
    if family != case.family {
        return Err(Error::usage(format!(
            "the checkpoint is of family `{family}`, the reference was made with `{}`",
            case.family
        )));
    }
    let mut runner = Runner {
        executor,
        n_ranks: world.world_size,
        next_id: 1,
    };
    let n_ranks = usize::from(world.world_size);
    let mut given: Vec<Vec<_>> = vec![Vec::new(); n_ranks];
    let mut seeded: Vec<Tensors> = vec![Tensors::new(); n_ranks];
    for (request_idx, request) in case.requests.iter().enumerate() {
        let mut from_latents = request.clone();
        from_latents.latents = Some(case.latents_of(request_idx)?);
        for (rank_idx, generated) in runner.on_every_rank(&from_latents)?.into_iter().enumerate() {
            given[rank_idx].push(generated.tensors);
        }
        if case.is_batch {
            continue;
        }
        for (rank_idx, generated) in runner.on_every_rank(request)?.into_iter().enumerate() {
            for mut tensor in generated.tensors {
                if tensor.name == "image" || tensor.name == "latents.init" {
                    tensor.name = format!("seeded.{}", tensor.name);
                    seeded[rank_idx].insert(tensor.name.clone(), tensor);
                }
            }
        }
    }
    let mut ranks = Vec::new();
    for (rank_idx, (given, seeded)) in given.into_iter().zip(seeded).enumerate() {
        let mut tensors =
            stack(given).map_err(|problem| Error::Difference(format!("rank {rank_idx}: {problem}")))?;
        tensors.extend(seeded);
        ranks.push(tensors);
    }
    Ok(ranks)
}

/// Sends requests to ranks by name, which an engine would not let one choose.
struct Runner<'a> {
    executor: &'a dyn Executor,
    n_ranks: u16,
    next_id: u64,
}

impl Runner<'_> {
    /// Runs `request` once on every rank, all at the same time; results by rank.
    fn on_every_rank(&mut self, request: &GenerateRequest) -> Result<Vec<Generated>, Error> {
        let mut rank_of: BTreeMap<RequestId, u16> = BTreeMap::new();
        for rank_idx in 0..self.n_ranks {
            let id = self.next_id;
            self.next_id += 1;
            rank_of.insert(RequestId(id), rank_idx);
            let wave = Wave {
                wave_id: WaveId(id),
                mode: Mode::Request,
                ranks: vec![Rank(rank_idx)],
                members: vec![Member {
                    request_id: RequestId(id),
                    request: request.clone(),
                    latents: None,
                    deadline_ns: 0,
                }],
            };
            self.executor.dispatch(wave, Instant::now() + DISPATCH_LIMIT)?;
        }
        let mut results: BTreeMap<u16, Generated> = BTreeMap::new();
        let mut n_waves = self.n_ranks;
        let mut heard_at = Instant::now();
        while n_waves > 0 {
            if interrupt::is_interrupted() {
                return Err(interrupt::interrupted());
            }
            let events = self.executor.wait_events(Instant::now() + Duration::from_secs(1));
            if !events.is_empty() {
                heard_at = Instant::now();
            } else if heard_at.elapsed() > SILENCE {
                self.ask_for_a_sign_of_life()?;
                heard_at = Instant::now();
            }
            for event in events {
                match event {
                    ExecutorEvent::RequestStarted { .. } | ExecutorEvent::Step { .. } => {}
                    ExecutorEvent::RequestDone { request_id, outcome } => {
                        let generated = outcome?;
                        if let Some(&rank_idx) = rank_of.get(&request_id) {
                            results.insert(rank_idx, *generated);
                        }
                    }
                    ExecutorEvent::WaveDone { .. } => n_waves = n_waves.saturating_sub(1),
                    ExecutorEvent::WorldFailed(failure) => return Err(failure.into()),
                }
            }
        }
        if results.len() != usize::from(self.n_ranks) {
            let message = format!("{} of {} ranks returned a result", results.len(), self.n_ranks);
            return Err(Failure::new(FailureCode::Protocol, message).into());
        }
        Ok(results.into_values().collect())
    }

    fn ask_for_a_sign_of_life(&self) -> Result<(), Error> {
        let health = self.executor.health(HEALTH_LIMIT);
        if health.is_healthy() {
            return Ok(());
        }
        let silent = || {
            let message = format!("no answer from ranks {:?} within {HEALTH_LIMIT:?}", health.silent);
            Failure::new(FailureCode::WorkerLost, message)
        };
        Err(health.failure.clone().unwrap_or_else(silent).into())
    }
}

fn as_table(args: &VerifyArgs, case: &Case, rows: &[Row], n_wrong: usize) -> String {
    let world = &args.world;
    let mut text = String::new();
    let mut line = |line: std::fmt::Arguments<'_>| {
        let _ = writeln!(text, "{}", line.to_string().trim_end());
    };
    line(format_args!(
        "case {} ({}), {} with {} worker(s), {} {}",
        case.name, case.family, world.executor, world.workers, world.device, world.dtype
    ));
    let name_width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(6);
    let shape_width = rows
        .iter()
        .map(|row| shown(&row.shape).len())
        .max()
        .unwrap_or(0)
        .max(5);
    line(format_args!(
        "{:name_width$}  {:shape_width$}  {:>8}  {:>7}  {:12}",
        "tensor", "shape", "error", "limit", "sha-256"
    ));
    for row in rows {
        let limit = if row.limit == 0.0 {
            "exact".to_owned()
        } else {
            format!("{:.0e}", row.limit)
        };
        let error = row
            .error
            .map_or_else(|| "-".to_owned(), |error| format!("{error:.2e}"));
        let sums: Vec<&str> = row.sha256.iter().map(|sum| &sum[..12]).collect();
        line(format_args!(
            "{:name_width$}  {:shape_width$}  {error:>8}  {limit:>7}  {}  {}",
            row.name,
            shown(&row.shape),
            if sums.is_empty() {
                format!("{:12}", "-")
            } else {
                sums.join(" ")
            },
            row.problem
                .as_ref()
                .map_or(String::new(), |problem| format!("WRONG: {problem}")),
        ));
    }
    match n_wrong {
        0 => line(format_args!(
            "{} tensors, all right on {} rank(s)",
            rows.len(),
            world.workers
        )),
        _ => line(format_args!("{n_wrong} of {} tensors are wrong", rows.len())),
    }
    text
}

fn as_json(args: &VerifyArgs, case: &Case, rows: &[Row], n_wrong: usize) -> String {
    let world = &args.world;
    let tensors: Vec<_> = rows
        .iter()
        .map(|row| {
            json!({
                "name": row.name,
                "shape": row.shape,
                "error": row.error,
                "limit": row.limit,
                "sha256": row.sha256.first().filter(|_| row.sha256.len() == 1),
                "sha256_by_rank": if row.sha256.len() > 1 { json!(row.sha256) } else { json!(null) },
                "problem": row.problem,
            })
        })
        .collect();
    let document = json!({
        "case": case.name,
        "family": case.family,
        "executor": world.executor,
        "workers": world.workers,
        "threads": world.threads,
        "device": world.device,
        "dtype": world.dtype,
        "tensors": tensors,
        "n_wrong": n_wrong,
        "ok": n_wrong == 0,
    });
    format!("{document}\n")
}
