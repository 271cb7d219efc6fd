//! A worker program with methods of its own, and a supervisor that calls them beside running pictures: how training code reaches the
//! workers.
//!
//! ```sh
//! cargo run --release --example methods [CHECKPOINT]
//! ```
#![expect(clippy::print_stdout, reason = "this is what the program is for")]

use denoised_engine::{
    Engine, EngineOptions, MethodCall, RankReply, Ranks, RequestEvent, SubmitOptions, policy,
};
use denoised_executor::{MpExecutor, MpOptions};
use denoised_types::{Failure, FailureCode, GenerateRequest, Mode, Rank, WorkerConfig};
use denoised_worker::{MethodContext, PipelineProgram, Registry, RegistryError, is_worker_invocation, run};
use std::{
    error::Error,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// What this worker is: a pipeline, and methods beside those that every worker has.
fn registry() -> Result<Registry, RegistryError> {
    // What methods of both lanes share is their closures' and, since the lanes are two threads, atomic or locked.
    let policy_version = Arc::new(AtomicU64::new(0));
    let shared = Arc::clone(&policy_version);
    Registry::pipeline()
        .method("model", model)?
        // Data lane: in turn with waves, so no picture sees it half done.
        .method("set_policy_version", move |context, args| {
            let version = <[u8; 8]>::try_from(args).map_err(|_| {
                let text = format!("a version has 8 bytes, these are {}", args.len());
                Failure::new(FailureCode::InvalidRequest, text).on_rank(context.rank())
            })?;
            shared.store(u64::from_le_bytes(version), Ordering::Relaxed);
            Ok(Vec::new())
        })?
        // Control lane: answered at once, also while a forward runs.
        .control_method("policy_version", move |_, _| {
            let version = policy_version.load(Ordering::Relaxed);
            Ok(format!("version {version}").into_bytes())
        })?
        // A name that every worker has is taken on purpose or not at all.
        .replace("echo", |_, args| Ok(args.to_ascii_uppercase()))
}

fn model(context: &mut MethodContext<'_>, _args: &[u8]) -> Result<Vec<u8>, Failure> {
    let program = context
        .program::<PipelineProgram>()
        .ok_or_else(|| Failure::new(FailureCode::Internal, "this worker has no pipeline"))?;
    let family = &program.pipeline().info().family;
    Ok(format!("{family}, {} request(s) between two steps", program.n_residents()).into_bytes())
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    if is_worker_invocation() {
        return Ok(run(registry()?).into());
    }
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/emoji-dit");
    let config = WorkerConfig::new(std::env::args().nth(1).unwrap_or_else(|| demo.to_owned()));
    let executor = MpExecutor::start(MpOptions::new(2, config), &mut |_, _| {})?;
    let engine = Engine::start(
        Arc::new(executor),
        policy(Mode::Step, 64, 4)?,
        EngineOptions::default(),
    )?;
    for method in &engine.world().methods {
        println!("{} ({:?} lane)", method.name, method.lane);
    }

    let request = GenerateRequest {
        n_steps: Some(200),
        ..GenerateRequest::new("a red apple")
    };
    let mut running = engine.submit(request, SubmitOptions::default())?;
    // Until it is under way.
    for event in running.by_ref() {
        if let RequestEvent::Step { .. } = event {
            break;
        }
    }
    // On all ranks, each of which replies; on one rank; on all ranks, of which one replies.
    show(&engine.call(&call("model", b""))?);
    engine.call(&call("set_policy_version", &7_u64.to_le_bytes()).execute(Ranks::One(Rank(1))))?;
    show(&engine.call(&call("policy_version", b""))?);
    show(&engine.call(&call("echo", b"one reply").reply(Ranks::One(Rank(1))))?);
    // Failures name the rank, and do not end the world: only a panic, or a failed wave, does.
    for refused in [call("set_policy_version", b"seven"), call("set_version", b"")] {
        match engine.call(&refused) {
            Ok(replies) => show(&replies),
            Err(error) => println!("{}: {error}", refused.method),
        }
    }
    println!("{:?}", running.wait()?.image);
    match Registry::pipeline().method("status", |_, _| Ok(Vec::new())) {
        Ok(_) => println!("a second `status`"),
        Err(error) => println!("{error}"),
    }
    engine.close(Duration::from_secs(30));
    Ok(ExitCode::SUCCESS)
}

/// On all ranks, each of which replies, within a minute.
fn call<'a>(method: &'a str, args: &'a [u8]) -> MethodCall<'a> {
    MethodCall::new(method, args, Instant::now() + Duration::from_secs(60))
}

fn show(replies: &[RankReply]) {
    for reply in replies {
        println!("rank {}: {}", reply.rank, String::from_utf8_lossy(&reply.bytes));
    }
}
