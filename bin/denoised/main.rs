//! `denoised`: all that a person runs; started again by its own executor, it is a worker.
//!
//! Parses, dispatches, and maps the outcome to an exit code; every command has a module.
#![forbid(unsafe_code)]

mod args;

mod bench;
mod bench_memory;
mod bench_step;
mod generate;
mod samplers;
mod verify;
mod video_file;

mod case;
mod case_call;
mod compare;
mod tensor_file;

mod model_folder;
mod output;
mod picture_file;
mod png_file;
mod prompts;

mod every_rank;
mod sharing;

mod interrupt;
mod logs;
mod profile;
mod progress;
mod world;

mod error;

use args::{Cli, Command};
use clap::Parser;
use denoised_types::ExitCode;
use denoised_worker::Registry;
use error::Error;
use output::{say, write_stdout};

fn main() -> std::process::ExitCode {
    // Before anything else: a worker has no command line of its own.
    let code = if denoised_worker::is_worker_invocation() {
        logs::start(0);
        if bench::is_bench_worker() {
            denoised_worker::run(bench::worker())
        } else {
            denoised_worker::run(Registry::pipeline())
        }
    } else if bench::is_other_end() {
        ended(bench::other_end(), false)
    } else {
        supervise()
    };
    std::process::ExitCode::from(code as u8)
}

fn supervise() -> ExitCode {
    // After `--` everything is a prompt.
    let is_json = std::env::args_os()
        .take_while(|arg| arg != "--")
        .any(|arg| arg == "--json");
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            // Clap's own text says more than one line can; the JSON form gets its first paragraph.
            if is_json {
                let text = error.render().to_string();
                let first = text.split("\n\n").next().unwrap_or_default().replace('\n', " ");
                let first = first.strip_prefix("error: ").unwrap_or(&first).to_owned();
                let _ = write_stdout(Error::usage(first).to_json_line().as_bytes());
            }
            let _ = error.print();
            return ExitCode::Usage;
        }
        // Help and version; the exit code is what a script looks at.
        Err(text) => {
            let _ = text.print();
            return ExitCode::Success;
        }
    };
    logs::start(cli.verbose);
    let outcome = interrupt::listen().and_then(|()| match &cli.command {
        Command::Generate(args) => generate::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Samplers(args) => samplers::run(args),
        Command::Bench(args) => bench::run(args),
    });
    interrupt::stand_by_if_ending();
    ended(outcome, is_json)
}

/// Tells how a command ended, to a person and to a script.
fn ended(outcome: Result<(), Error>, is_json: bool) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::Success,
        Err(error) => {
            say(&format!("denoised: error: {error}"));
            if is_json && !error.is_told_in_json() {
                // If the standard output is what failed, there is nobody to tell.
                let _ = write_stdout(error.to_json_line().as_bytes());
            }
            error.exit_code()
        }
    }
}
