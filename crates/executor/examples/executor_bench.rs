//! `cargo run --release -p denoised-executor --example executor_bench`: what a call to worker processes costs on this machine, with
//! workers that compute nothing.
#![expect(clippy::print_stdout, reason = "this is what the program is for")]

use denoised_executor::{
    WorkerProgram,
    bench::{Plan, run},
};
use denoised_ring::bench::{CHILD_ARG, Launcher, child_main};
use denoised_testkit::script::{Script, scripted_registry};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if denoised_worker::is_worker_invocation() {
        denoised_worker::run(scripted_registry());
        return Ok(());
    }
    if std::env::args().nth(1).as_deref() == Some(CHILD_ARG) {
        return Ok(child_main()?);
    }
    let plan = Plan::new(
        WorkerProgram::default(),
        Script::default().config(),
        Launcher::this_program(),
    );
    println!("{:#?}", run(&plan)?);
    Ok(())
}
