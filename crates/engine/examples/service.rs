//! A program that embeds denoised: two worker processes, requests from threads and from async code, progress, a cancel, a deadline,
//! failures, an orderly end.
//!
//! ```sh
//! cargo run --release --example service [CHECKPOINT [EXECUTOR]]
//! ```
#![expect(clippy::print_stdout, reason = "this is what the program is for")]

use denoised_engine::{Engine, EngineHandle, EngineOptions, RequestEvent, SubmitOptions, policy};
use denoised_executor::{ExecutorChoice, ExecutorRegistry, MpOptions, status};
use denoised_types::{ExitCode, Failure, FailureCode, GenerateRequest, Mode, WorkerConfig};
use denoised_worker::{Registry, is_worker_invocation, run, serve};
use std::{
    future::Future,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

fn main() -> std::process::ExitCode {
    // The executor starts this program once more for each worker.
    if is_worker_invocation() {
        return run(Registry::pipeline()).into();
    }
    match service() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(failure) => {
            println!("{}: {failure}", failure.code);
            ExitCode::from(failure.code).into()
        }
    }
}

fn service() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/emoji-dit");
    let config = WorkerConfig::new(args.next().unwrap_or_else(|| demo.to_owned()));
    // What a worker on a thread does; those of `mp` are processes that call `run`.
    let executors = ExecutorRegistry::new(|end| {
        serve(end, Registry::pipeline());
    });
    let choice = args.next().map_or(ExecutorChoice::Unset, ExecutorChoice::Name);
    let n_workers = match &choice {
        ExecutorChoice::Name(name) if name == "uni" => 1,
        _ => 2,
    };
    let executor = executors.start(&choice, MpOptions::new(n_workers, config), &mut |rank, phase| {
        println!("rank {rank}: {phase}");
    })?;
    let (max_queued, max_batch) = (64, 4);
    let engine = Engine::start(
        executor,
        policy(Mode::Step, max_queued, max_batch)?,
        EngineOptions::default(),
    )?;

    // Blocking, event by event.
    for event in engine.submit(request("a red apple", 0, 8), SubmitOptions::default())? {
        match event {
            RequestEvent::Queued { position } => println!("queued, {position} in front"),
            RequestEvent::Started { rank } => println!("begun by rank {rank}"),
            RequestEvent::Step { n_done, n_steps } => println!("step {n_done} of {n_steps}"),
            RequestEvent::Finished(output) => println!("{} bytes of rgb", output.rgb().len()),
            RequestEvent::Failed(failure) => return Err(failure),
        }
    }

    // From several threads; any number of them may share an engine.
    let slow = engine.submit(request("a penguin", 0, 1000), SubmitOptions::default())?;
    thread::scope(|scope| {
        for seed in 0..4 {
            let engine = &engine;
            scope.spawn(move || {
                let handle = engine.submit(request("a rocket", seed, 8), SubmitOptions::default());
                println!("seed {seed}: {}", told(handle.and_then(|handle| handle.wait())));
            });
        }
    });
    // In step mode it is gone after its present step; dropping the handle would do the same.
    slow.cancel();
    println!("{}", told(slow.wait()));

    // From async code, whatever its runtime.
    block_on(from_async(&engine))?;

    // Nobody waits for a picture longer than for this.
    let deadline = Some(Instant::now() + Duration::from_millis(200));
    let late = engine.submit(request("a whale", 0, 1000), SubmitOptions { deadline })?;
    println!("{}", told(late.wait()));
    // What makes no sense fails alone, here or in the worker.
    let refused = engine.submit(request("a cat", 0, 0), SubmitOptions::default());
    println!("{}", told(refused.and_then(|handle| handle.wait())));

    for (rank, status) in status::status(&**engine.executor(), Duration::from_secs(5))? {
        println!(
            "rank {rank}: {} waves, {} bytes",
            status.n_waves, status.memory.pss_bytes
        );
    }
    println!("{:?}", engine.stats());
    // What was admitted finishes, then the workers end.
    let report = engine.close(Duration::from_secs(30));
    for rank in &report.shutdown.ranks {
        println!("rank {}: {} ({})", rank.rank, rank.status, rank.means);
    }
    report.failure.map_or(Ok(()), Err)
}

async fn from_async(engine: &EngineHandle) -> Result<(), Failure> {
    let mut handle = engine.submit(request("a lighthouse", 0, 8), SubmitOptions::default())?;
    while let Some(event) = handle.next_async().await {
        if let RequestEvent::Step { n_done, n_steps } = event {
            println!("async: step {n_done} of {n_steps}");
        }
    }
    Ok(())
}

fn request(prompt: &str, seed: u64, n_steps: u32) -> GenerateRequest {
    GenerateRequest {
        seed,
        n_steps: Some(n_steps),
        ..GenerateRequest::new(prompt)
    }
}

/// An outcome in words. Codes say what to do: try again, give up, or tell whoever runs the machine.
fn told(outcome: Result<denoised_types::Generated, Failure>) -> String {
    match outcome {
        Ok(generated) => format!("{:?} by rank {}", generated.image, generated.rank),
        Err(failure) => match failure.code {
            FailureCode::QueueFull => format!("try again later: {failure}"),
            FailureCode::WorkerLost => format!("the world is gone, start another: {failure}"),
            code => format!("{code}: {failure}"),
        },
    }
}

/// The smallest runtime; a real program has its own.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
