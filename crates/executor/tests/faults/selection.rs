//! Selection, identity, environment.

use super::{relay::start_with_relay, *};
use denoised_executor::{DEFAULT_EXECUTOR, ExecutorChoice, ExecutorRegistry, RegistryError};
use denoised_testkit::{process::small_link, script::scripted_registry};
use denoised_wire::PROTOCOL_VERSION;

#[test]
fn i1_an_executor_that_is_not_there_is_refused_and_an_unset_one_is_the_default() {
    let _watchdog = watchdog("i1");
    let registry = ExecutorRegistry::new(|end| {
        denoised_worker::serve(end, scripted_registry());
    });
    let start =
        |choice: &ExecutorChoice| registry.start(choice, options(1, &Script::default()), &mut |_, _| {});
    match start(&"nobody's".into()).unwrap_err() {
        RegistryError::Unknown { name, known } => {
            assert_eq!(
                (name.as_str(), known),
                ("nobody's", vec!["mp".to_owned(), "uni".to_owned()])
            );
        }
        other => panic!("{other:?}"),
    }
    for name in ["none", ""] {
        assert!(matches!(start(&name.into()), Err(RegistryError::Unknown { .. })));
    }
    for name in ["ray", "external_launcher"] {
        let error = start(&name.into()).unwrap_err();
        assert!(matches!(error, RegistryError::Absent { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(name) && text.contains("mp, uni"), "{text}");
    }
    assert_eq!(DEFAULT_EXECUTOR, "mp", "as documented");
    for (choice, kind) in [
        (ExecutorChoice::Unset, "mp"),
        ("mp".into(), "mp"),
        ("uni".into(), "uni"),
    ] {
        let executor = start(&choice).unwrap();
        assert_eq!(executor.world().kind, kind);
        assert_eq!(executor.world().pids.len(), usize::from(kind == "mp"));
        assert_eq!(
            executor
                .call(&MethodCall::new("echo", b"", late()))
                .unwrap()
                .len(),
            1
        );
    }
}

#[test]
fn i3_workers_share_the_cores() {
    let _watchdog = watchdog("i3");
    let n_threads = |options: MpOptions| -> Vec<Option<u32>> {
        let executor = start_with(options);
        let replies = executor.call(&MethodCall::new("status", b"", late())).unwrap();
        replies
            .iter()
            .map(|reply| WorkerStatus::from_bytes(&reply.bytes).unwrap().n_threads)
            .collect()
    };
    let cores = denoised_os::cpu::usable_cores() as u32;
    assert_eq!(
        n_threads(options(8, &Script::default())),
        [Some((cores / 8).max(1)); 8]
    );
    assert_eq!(n_threads(options(1, &Script::default())), [Some(cores)]);
    let mut given = options(2, &Script::default());
    given.worker.n_threads = Some(5);
    assert_eq!(n_threads(given), [Some(5); 2]);
}

#[test]
fn i5_a_message_of_a_newer_version_is_refused_with_both_versions() {
    let _watchdog = watchdog("i5");
    let (executor, _) = start_with_relay(small_link(), scripted_registry);
    let call = |args: &[u8]| executor.call(&MethodCall::new("echo", args, late()));
    match call(b"command of a newer version") {
        Err(ExecutorError::Rank { failure, succeeded }) => {
            assert_eq!(
                (failure.code, failure.rank),
                (FailureCode::Protocol, Some(Rank(0)))
            );
            let versions = format!(
                "protocol version {}, this program speaks version {PROTOCOL_VERSION}",
                PROTOCOL_VERSION + 1
            );
            assert!(failure.message.contains(&versions), "{failure}");
            assert!(succeeded.is_empty());
        }
        other => panic!("{other:?}"),
    }
    // Nor is it taken for a request: none was begun, and the worker goes on.
    assert_eq!(call(b"of this version").unwrap()[0].bytes, b"of this version");
    let replies = executor.call(&MethodCall::new("status", b"", late())).unwrap();
    assert_eq!(WorkerStatus::from_bytes(&replies[0].bytes).unwrap().n_waves, 0);
}
