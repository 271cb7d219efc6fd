//! `gpu-check`: what `scripts/gpu` runs on a machine with a GPU, and on the stand-in. Each command prints one JSON document.
//!
//! A program of its own and no test, since it is carried to machines without Rust. Judging is not its business: `check.py` does that.

mod faults;
mod host;
mod parity;
mod perf;
mod step;

use clap::{Parser, Subcommand};
use denoised_cuda::{CudaBackend, CudaOptions};
use denoised_tensor::{Backend, DType};
use serde_json::{Value, json};
use std::{path::PathBuf, process::ExitCode};

/// Checks of the CUDA backend, each printing JSON.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    check: Check,
}

#[derive(Subcommand)]
enum Check {
    /// Device, driver and kernels' origin.
    Info,
    /// Every op in every dtype against its formula in f64.
    Parity {
        /// Random cases of each op.
        #[arg(long, default_value_t = 6)]
        rounds: u64,
        /// Only this op.
        #[arg(long)]
        op: Option<String>,
    },
    /// Recordings, repeatability, two backends on one device.
    Host,
    /// Kernels at the shapes of a file.
    Perf {
        /// `shapes.json`.
        shapes: PathBuf,
        /// Shapes for machines without a GPU; times mean nothing then.
        #[arg(long)]
        small: bool,
    },
    /// Denoise steps of a checkpoint, op by op and recorded.
    Step {
        /// Its folder.
        model: PathBuf,
        /// Side of the picture in pixels.
        #[arg(long)]
        side: u32,
        /// Steps that are timed.
        #[arg(long, default_value_t = 10)]
        steps: u32,
        /// Times mean nothing here.
        #[arg(long)]
        small: bool,
    },
    /// A kernel that leaves its output, and memory beyond the device's.
    Faults {
        /// Folder of the kernels' sources, which one is broken in a copy of.
        kernels: PathBuf,
    },
    /// The broken kernel, in a process of its own.
    #[command(hide = true)]
    Broken {
        /// Folder of the broken kernels.
        kernels: PathBuf,
    },
}

fn open(dtype: DType) -> CudaBackend {
    CudaBackend::open(CudaOptions {
        dtype,
        ..CudaOptions::default()
    })
    .unwrap_or_else(|error| panic!("{error}"))
}

fn info() -> Value {
    let info = open(DType::BF16).info();
    json!({"device": info.name, "description": info.description})
}

#[allow(clippy::print_stdout)] // It is what this program is for.
fn main() -> ExitCode {
    let document = match Args::parse().check {
        Check::Info => info(),
        Check::Parity { rounds, op } => parity::run(rounds, op.as_deref()),
        Check::Host => host::run(),
        Check::Perf { shapes, small } => perf::run(&shapes, small),
        Check::Step {
            model,
            side,
            steps,
            small,
        } => step::run(&model, side, steps, small),
        Check::Faults { kernels } => faults::run(&kernels),
        Check::Broken { kernels } => faults::broken(kernels),
    };
    println!("{document:#}");
    ExitCode::SUCCESS
}
