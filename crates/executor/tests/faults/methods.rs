//! Methods that an embedder's own worker program adds.

use super::*;
use denoised_types::ExitCode;
use denoised_wire::{Lane, MethodInfo};
use denoised_worker::Registry;
use std::io::Write;

/// Says in a worker's environment how it is extended.
pub(crate) const EXTENSION: &str = "DENOISED_TEST_EXTENSION";

/// A worker program that adds methods; it ends if it cannot.
pub(crate) fn extended(registry: Registry, extension: &str) -> Registry {
    let mine = |_: &mut denoised_worker::MethodContext<'_>, _: &[u8]| Ok(b"mine".to_vec());
    let extended = match extension {
        "clashes with a built-in" => registry.method("echo", mine),
        "clashes with a built-in of the control lane" => registry.method("progress", mine),
        "clashes with itself" => registry
            .method("checksum", mine)
            .and_then(|registry| registry.method("checksum", mine)),
        "replaces a built-in" => registry.replace("echo", mine),
        "replaces nothing" => registry.replace("checksum", mine),
        "adds" => registry.method("checksum", mine),
        other => panic!("unknown extension {other}"),
    };
    extended.unwrap_or_else(|error| {
        // Nobody may be left to read it.
        let _ = writeln!(std::io::stderr(), "worker: {error}");
        #[expect(clippy::exit, reason = "as the worker's `main` would return it")]
        std::process::exit(ExitCode::Usage as i32)
    })
}

fn options_of(extension: &str) -> MpOptions {
    let mut options = options(2, &Script::default());
    options.program.env.push((EXTENSION.into(), extension.into()));
    options
}

#[test]
fn x5_a_method_with_the_name_of_another_is_refused_unless_it_shall_replace_it() {
    let _watchdog = watchdog("x5");
    for (extension, text) in [
        ("clashes with a built-in", "there is a method `echo` already"),
        (
            "clashes with a built-in of the control lane",
            "there is a method `progress` already",
        ),
        ("clashes with itself", "there is a method `checksum` already"),
        ("replaces nothing", "there is no method `checksum` to replace"),
    ] {
        let error = start_error(options_of(extension));
        let ExecutorError::Start { ref cause, .. } = error else {
            panic!("{error:?}")
        };
        assert_eq!(cause.code, FailureCode::WorkerLost, "{extension}");
        assert!(error.to_string().contains(text), "{extension}: {error}");
    }
    let call = |executor: &MpExecutor, method: &str| {
        let replies = executor
            .call(&MethodCall::new(method, b"theirs", late()))
            .unwrap();
        assert_eq!(replies.len(), 2);
        assert_eq!(replies[0].bytes, replies[1].bytes);
        replies[0].bytes.clone()
    };
    let executor = start_with(options_of("replaces a built-in"));
    assert_eq!(call(&executor, "echo"), b"mine");
    let executor = start_with(options_of("adds"));
    assert_eq!(call(&executor, "echo"), b"theirs");
    assert_eq!(call(&executor, "checksum"), b"mine");
    let info = MethodInfo {
        name: "checksum".to_owned(),
        lane: Lane::Data,
    };
    assert!(executor.world().methods.contains(&info));
}
