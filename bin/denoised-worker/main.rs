//! `denoised-worker`: the worker of an embedder's executor, in a program of its own.
//!
//! Takes over the socket that the executor passes on, loads the model it is told, and obeys commands until told to stop.
#![forbid(unsafe_code)]

use denoised_types::ExitCode;
use denoised_worker::Registry;
use std::io::Write;

const PURPOSE: &str = "\
denoised-worker is started by an executor (denoised-executor), not by hand: it takes over a socket from the
program that starts it and computes what that program sends. To make a picture, run `denoised generate`.";

fn main() -> std::process::ExitCode {
    let code = if denoised_worker::is_worker_invocation() {
        denoised_worker::run(Registry::pipeline())
    } else {
        // Nobody may be left to read it.
        let _ = writeln!(std::io::stderr(), "{PURPOSE}");
        ExitCode::Usage
    };
    std::process::ExitCode::from(code as u8)
}
