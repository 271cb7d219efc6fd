//! `denoised verify`: a reference case on every rank at the same time, every tensor compared.

use crate::args::VerifyArgs;
use crate::case::Case;
use crate::compare::{Demand, Row, Tensors, compare, shown, stack};
use crate::error::Error;
use crate::every_rank::EveryRank;
use crate::output::write_stdout;
use crate::profile::{self, Recording};
use crate::progress::Progress;
use crate::{interrupt, sharing, tensor_file, world};
use denoised_executor::Executor;
use denoised_types::{GenerateRequest, Generated, NamedTensor, WorkerDevice};
use serde_json::json;
use std::fmt::Write;
use std::time::Duration;

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
    profile::check(args.profile.as_deref())?;
    let progress = Progress::new(!args.json);
    let executor = world::start(&args.world(), &case.model, &progress)?;
    let devices = executor.world().devices;
    let waker = executor.waker();
    let watched = interrupt::watched(move || waker.wake());
    let n_ranks = usize::from(executor.world().world_size);
    let computed = Recording::start(args.profile.as_deref(), &executor).and_then(|recording| {
        let computed = compute(args, &case, executor.as_ref())?;
        recording.map_or(Ok(()), Recording::write)?;
        Ok(computed)
    });
    drop(watched);
    drop(progress);
    executor.shutdown(if interrupt::is_interrupted() {
        interrupt::CLOSE_BUDGET
    } else {
        CLOSE_BUDGET
    });
    let runs = computed?;

    if let (Some(path), Some(tensors)) = (&args.dump, runs.first()) {
        tensor_file::write(path, tensors)?;
    }
    let demand = Demand {
        half: devices
            .iter()
            .any(|device| device.dtype != "f32")
            .then_some(&case.bf16_error),
        is_batch_exact: devices.iter().all(|device| device.name == "cpu"),
    };
    let mut reference = case.reference.clone();
    let ours = runs.first().and_then(|tensors| tensors.get(SEEDED_LATENTS));
    let drawn = reference.get("latents.init");
    if let Some(expected) = ours.zip(drawn).and_then(|(ours, drawn)| in_order_of(ours, drawn)) {
        reference.insert(SEEDED_LATENTS.to_owned(), expected);
    }
    let renamed: &[(&str, &str)] = match reference.contains_key(SEEDED_LATENTS) {
        true => &[],
        false => &[(SEEDED_LATENTS, "latents.init")],
    };
    let rows = compare(&runs, n_ranks, &reference, renamed, demand);
    // In a batch the reference's own noise is one draw for all prompts, which no single request repeats.
    let is_compared = |row: &Row| !(case.is_batch && row.name == "seeded.image" && row.sha256.is_empty());
    let rows: Vec<Row> = rows.into_iter().filter(is_compared).collect();
    let n_wrong = rows.iter().filter(|row| row.problem.is_some()).count();
    let text = if args.json {
        as_json(args, &case, &devices, demand, &rows, n_wrong)
    } else {
        as_table(args, &case, &devices, demand, &rows, n_wrong)
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

/// The numbers of `drawn` in the order that those of `ours` have, where both are packed to tokens: a reference's latents are drawn in the
/// shape that its pipeline is given, while a seed's are drawn before they are packed.
fn in_order_of(ours: &NamedTensor, drawn: &NamedTensor) -> Option<NamedTensor> {
    if drawn.shape.len() != 3 || drawn.shape != ours.shape {
        return None;
    }
    let (ours, mut numbers) = (ours.to_f32()?, drawn.to_f32()?);
    numbers.sort_by(f32::total_cmp);
    let mut places: Vec<usize> = (0..ours.len()).collect();
    places.sort_by(|a, b| ours[*a].total_cmp(&ours[*b]));
    let mut ordered = vec![0.0; numbers.len()];
    for (place, number) in places.into_iter().zip(numbers) {
        ordered[place] = number;
    }
    Some(NamedTensor::from_f32(SEEDED_LATENTS, &drawn.shape, &ordered))
}

/// The tensors of every rank, by rank: of the run from the reference's latents under their own names, of the run from the seed
/// under `seeded.…`. Where others are to share the waves, all ranks come once more, with them.
fn compute(args: &VerifyArgs, case: &Case, executor: &dyn Executor) -> Result<Vec<Tensors>, Error> {
    let world = executor.world();
    let Some(model) = world.model else {
        return Err(Error::usage("the workers have no model"));
    };
    let plain = |name: &str| name.replace('-', "");
    if plain(&model.family) != plain(&case.family) {
        return Err(Error::usage(format!(
            "the checkpoint is of family `{}`, the reference was made with `{}`",
            model.family, case.family
        )));
    }
    let n_ranks = usize::from(world.world_size);
    let mut every_rank = EveryRank::new(executor, args.mode.into());
    let mut alone = |request: &GenerateRequest| every_rank.run(&sharing::alone(request));
    let mut runs = compute_all(case, n_ranks, &mut alone)?;
    if args.n_sharing > 0 {
        let mut among =
            |request: &GenerateRequest| every_rank.run(&sharing::among(request, args.n_sharing, &model));
        runs.extend(compute_all(case, n_ranks, &mut among)?);
    }
    Ok(runs)
}

/// One request's results by rank.
type RunOnRanks<'a> = &'a mut dyn FnMut(&GenerateRequest) -> Result<Vec<Generated>, Error>;

fn compute_all(case: &Case, n_ranks: usize, run: RunOnRanks<'_>) -> Result<Vec<Tensors>, Error> {
    let mut given: Vec<Vec<_>> = vec![Vec::new(); n_ranks];
    let mut seeded: Vec<Tensors> = vec![Tensors::new(); n_ranks];
    for (request_idx, request) in case.requests.iter().enumerate() {
        let mut from_latents = request.clone();
        if !case.is_from_seed_alone {
            from_latents.latents = Some(case.latents_of(request_idx)?);
        }
        for (rank_idx, generated) in run(&from_latents)?.into_iter().enumerate() {
            given[rank_idx].push(generated.tensors);
        }
        if case.is_batch {
            continue;
        }
        for (rank_idx, generated) in run(request)?.into_iter().enumerate() {
            for mut tensor in generated.tensors {
                if tensor.name == "image" || tensor.name == "latents.init" {
                    tensor.name = format!("seeded.{}", tensor.name);
                    seeded[rank_idx].insert(tensor.name.clone(), tensor);
                }
            }
        }
    }
    let mut runs = Vec::new();
    for (rank_idx, (given, seeded)) in given.into_iter().zip(seeded).enumerate() {
        let mut tensors =
            stack(given).map_err(|problem| Error::Difference(format!("rank {rank_idx}: {problem}")))?;
        tensors.extend(seeded);
        runs.push(tensors);
    }
    Ok(runs)
}

fn as_table(
    args: &VerifyArgs,
    case: &Case,
    devices: &[WorkerDevice],
    demand: Demand<'_>,
    rows: &[Row],
    n_wrong: usize,
) -> String {
    let world = &args.world;
    let mut text = String::new();
    let mut line = |line: std::fmt::Arguments<'_>| {
        let _ = writeln!(text, "{}", line.to_string().trim_end());
    };
    line(format_args!(
        "case {} ({}), {} with {} worker(s) on {}, {} mode{}",
        case.name,
        case.family,
        world.executor,
        world.workers,
        world::shown_devices(devices),
        args.mode.name(),
        match args.n_sharing {
            0 => String::new(),
            n_sharing => format!(", alone and with {n_sharing} other request(s) in its waves"),
        }
    ));
    line(format_args!("limits: {}", demand.rule()));
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
            format!("{:.1e}", row.limit)
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
            "{} tensors, all right on {} rank(s){}",
            rows.len(),
            world.workers,
            match args.n_sharing {
                0 => String::new(),
                n if demand.is_batch_exact => format!(", and the same bits again among {n} other request(s)"),
                n => format!(", and within the limits again among {n} other request(s)"),
            }
        )),
        _ => line(format_args!("{n_wrong} of {} tensors are wrong", rows.len())),
    }
    text
}

fn as_json(
    args: &VerifyArgs,
    case: &Case,
    devices: &[WorkerDevice],
    demand: Demand<'_>,
    rows: &[Row],
    n_wrong: usize,
) -> String {
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
        "dtype": devices.first().map(|device| &device.dtype),
        "devices": devices
            .iter()
            .map(|device| json!({
                "name": device.name,
                "description": device.description,
                "dtype": device.dtype,
                "reason": device.reason,
            }))
            .collect::<Vec<_>>(),
        "limit_rule": demand.rule(),
        "mode": args.mode.name(),
        "n_sharing": args.n_sharing,
        "tensors": tensors,
        "n_wrong": n_wrong,
        "ok": n_wrong == 0,
    });
    format!("{document}\n")
}
