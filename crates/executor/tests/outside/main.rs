//! An executor written as an embedder would write one, from public items alone: several workers on threads of this process, each on a
//! local link of its own. It passes the suite that the executors of the crate pass.
//!
//! It shows what the contract asks for where nothing else is in the way: no processes, no shared memory, one thread per rank that reads
//! events, one lock. What it leaves out: it does not notice a worker that hangs.

mod state;
mod threads;

use denoised_testkit::script::Script;

denoised_testkit::executor_conformance!(one_thread, |script: &Script| threads::start(1, script));
denoised_testkit::executor_conformance!(three_threads, |script: &Script| threads::start(3, script));

/// By name, beside those of the crate.
#[test]
fn an_embedder_s_executor_is_chosen_by_name_or_handed_over() {
    use denoised_executor::{ExecutorChoice, ExecutorRegistry, MpOptions};
    use std::{sync::Arc, time::Duration};

    let mut registry = ExecutorRegistry::new(|end| {
        // How it ended is known to the executor.
        let _ = denoised_worker::serve(end, denoised_testkit::script::scripted_registry());
    });
    registry
        .register("threads", |options, _| {
            Ok(Arc::from(threads::start_with(options.n_workers, options.worker)))
        })
        .unwrap();
    assert_eq!(registry.names(), ["mp", "threads", "uni"]);
    let options = |n_workers| MpOptions::new(n_workers, Script::default().config());
    let threads = registry
        .start(&"threads".into(), options(2), &mut |_, _| {})
        .unwrap();
    assert_eq!((threads.world().kind, threads.world().world_size), ("threads", 2));
    let handed = ExecutorChoice::Object(Arc::clone(&threads));
    let same = registry.start(&handed, options(9), &mut |_, _| {}).unwrap();
    assert!(Arc::ptr_eq(&threads, &same));
    let uni = registry.start(&"uni".into(), options(1), &mut |_, _| {}).unwrap();
    assert_eq!(uni.world().kind, "uni");
    for executor in [threads, uni] {
        executor.shutdown(Duration::from_secs(20));
    }
}
