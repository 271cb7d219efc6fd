//! Prints what `denoised_ring::bench` measures on this machine.

use denoised_ring::bench::{self, CHILD_ARG, Launcher, Plan};

#[expect(clippy::print_stdout, reason = "printing is what this program is for")]
fn main() -> Result<(), bench::BenchError> {
    if std::env::args().nth(1).as_deref() == Some(CHILD_ARG) {
        return bench::child_main();
    }
    println!("{:#?}", bench::run(&Launcher::this_program(), &Plan::default())?);
    Ok(())
}
