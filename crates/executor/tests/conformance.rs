//! Every executor of this crate does what the contract says.

use denoised_executor::{Executor, LinkSpec, MpExecutor, SpinPolicy, UniExecutor, UniOptions};
use denoised_testkit::{
    process::{be_a_scripted_worker, options, small_link},
    script::{Script, scripted_registry},
};
use std::time::Duration;

/// Not a test: the worker processes of the others.
#[test]
fn scripted_worker_process() {
    be_a_scripted_worker();
}

fn uni(script: &Script) -> Box<dyn Executor> {
    let options = UniOptions {
        link: small_link(),
        start_limit: Duration::from_secs(60),
        ..UniOptions::new(script.config())
    };
    let serve = Box::new(|end| {
        denoised_worker::serve(end, scripted_registry());
    });
    Box::new(UniExecutor::start(options, serve, &mut |_, _| {}).unwrap())
}

fn mp(n_workers: u16, spin: SpinPolicy, script: &Script) -> Box<dyn Executor> {
    let mut options = options(n_workers, script);
    options.link = LinkSpec { spin, ..small_link() };
    Box::new(MpExecutor::start(options, &mut |_, _| {}).unwrap())
}

denoised_testkit::executor_conformance!(uni_thread, uni);
denoised_testkit::executor_conformance!(mp_one_spinning, |script: &Script| mp(
    1,
    SpinPolicy::ForNs(20_000),
    script
));
denoised_testkit::executor_conformance!(mp_three, |script: &Script| mp(3, SpinPolicy::Never, script));
denoised_testkit::executor_conformance!(mp_two, |script: &Script| mp(2, SpinPolicy::Never, script));
