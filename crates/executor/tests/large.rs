//! Results larger than the shared memory that they travel through, and requests that are too large for it.

use denoised_executor::{
    Executor, ExecutorError, ExecutorEvent, Limits, LinkSpec, MethodCall, MpExecutor, UniExecutor, UniOptions,
};
use denoised_testkit::{
    process::{be_a_scripted_worker, options, small_link},
    script::{Script, picture, request, scripted_registry, wave},
    watchdog::Watchdog,
};
use denoised_types::{Capture, Failure, FailureCode, GenerateRequest, Generated, NamedTensor};
use std::time::{Duration, Instant};

/// Not a test: the worker processes of the others.
#[test]
fn scripted_worker_process() {
    be_a_scripted_worker();
}

fn late() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

/// A world of one process and one of one thread.
fn worlds(link: LinkSpec, limits: Limits, script: &Script) -> [Box<dyn Executor>; 2] {
    let mut mp = options(1, script);
    (mp.link, mp.limits) = (link, limits);
    let mut uni = UniOptions::new(script.config());
    (uni.link, uni.limits) = (link, limits);
    let serve = Box::new(|end| {
        // How it ended is known to the executor.
        let _ = denoised_worker::serve(end, scripted_registry());
    });
    [
        Box::new(MpExecutor::start(mp, &mut |_, _| {}).unwrap()),
        Box::new(UniExecutor::start(uni, serve, &mut |_, _| {}).unwrap()),
    ]
}

fn run(executor: &dyn Executor, id: u64, request: GenerateRequest) -> Result<Generated, Failure> {
    executor
        .dispatch(wave(id, &[0], &[(id, request)]), late())
        .unwrap();
    let mut ended = None;
    loop {
        for event in executor.wait_events(late()) {
            match event {
                ExecutorEvent::RequestDone { outcome, .. } => assert!(
                    ended
                        .replace(outcome.map(denoised_executor::Output::into_generated))
                        .is_none()
                ),
                ExecutorEvent::WaveDone { .. } => return ended.unwrap(),
                ExecutorEvent::RequestStarted { .. } | ExecutorEvent::Step { .. } => {}
                ExecutorEvent::WorldFailed(failure) => panic!("{failure}"),
            }
        }
    }
}

fn picture_of(side_px: u32) -> GenerateRequest {
    GenerateRequest {
        width: Some(side_px),
        ..request(5, 1)
    }
}

#[test]
fn a_picture_larger_than_the_arena_arrives_whole() {
    let _watchdog = Watchdog::new("large picture", Duration::from_secs(240));
    // 4096 x 4096 x 3 bytes are 48 MiB, the default arena has 32.
    for executor in worlds(LinkSpec::default(), Limits::default(), &Script::default()) {
        let generated = run(&*executor, 1, picture_of(4096)).unwrap();
        assert!(generated.image == picture(5, 4096), "the picture is another one");
    }
}

#[test]
fn sizes_about_the_bounds_of_pieces_arrive_whole() {
    let _watchdog = Watchdog::new("bounds of pieces", Duration::from_secs(240));
    let link = LinkSpec {
        event_arena_bytes: 192 << 10,
        ..small_link()
    };
    for executor in worlds(link, Limits::default(), &Script::default()) {
        // From below half of the arena, where pieces begin, to above all of it: side * side * 3 bytes.
        for (id, side_px) in [150, 181, 182, 210, 256, 257, 700].into_iter().enumerate() {
            let generated = run(&*executor, 1 + id as u64, picture_of(side_px)).unwrap();
            assert!(generated.image == picture(5, side_px), "{side_px}");
        }
    }
}

#[test]
fn traces_larger_than_the_arena_arrive_whole_and_in_order() {
    let _watchdog = Watchdog::new("large traces", Duration::from_secs(240));
    let script = Script {
        // 6 MB; the arena has 2 MiB.
        n_trace_values: 1_500_000,
        ..Script::default()
    };
    for executor in worlds(small_link(), Limits::default(), &script) {
        let mut request = request(5, 3);
        request.capture = Capture::Trace;
        let generated = run(&*executor, 1, request).unwrap();
        assert_eq!(generated.tensors.len(), 3);
        for (step_idx, tensor) in generated.tensors.iter().enumerate() {
            assert_eq!(tensor.name, format!("latents.step_{step_idx}"));
            assert!(tensor.is_consistent());
            assert!(
                tensor
                    .to_f32()
                    .unwrap()
                    .iter()
                    .all(|value| *value == step_idx as f32)
            );
        }
        assert_eq!(generated.image, picture(5, 8));
    }
}

#[test]
fn a_result_over_the_limit_fails_alone_with_the_number() {
    let _watchdog = Watchdog::new("over the limit", Duration::from_secs(240));
    let limits = Limits {
        trace_bytes: 4 << 20,
        ..Limits::default()
    };
    let script = Script {
        n_trace_values: 1_500_000,
        ..Script::default()
    };
    for executor in worlds(small_link(), limits, &script) {
        let failure = run(&*executor, 1, picture_of(1500)).unwrap_err();
        assert_eq!(failure.code, FailureCode::OutOfMemory);
        assert!(failure.message.contains("4194304 bytes"), "{failure}");
        let mut traced = request(5, 2);
        traced.capture = Capture::Trace;
        let failure = run(&*executor, 2, traced).unwrap_err();
        assert_eq!(failure.code, FailureCode::OutOfMemory, "{failure}");
        assert!(run(&*executor, 3, picture_of(1000)).is_ok());
    }
}

#[test]
fn large_latents_arrive_and_larger_ones_are_refused_before_they_are_sent() {
    let _watchdog = Watchdog::new("large latents", Duration::from_secs(240));
    let link = LinkSpec {
        command_arena_bytes: 40 << 20,
        ..small_link()
    };
    for executor in worlds(link, Limits::default(), &Script::default()) {
        // 36 MB; the scripted worker sends them back as its first tensor.
        let values = vec![0.5; 9_000_000];
        let mut request = request(5, 1);
        request.latents = Some(NamedTensor::from_f32("latents", &[3000, 3000], &values));
        let generated = run(&*executor, 1, request.clone()).unwrap();
        assert!(generated.tensors[0] == *request.latents.as_ref().unwrap());

        request.latents = Some(NamedTensor::from_f32(
            "latents",
            &[11_000_000],
            &vec![0.5; 11_000_000],
        ));
        let error = executor
            .dispatch(wave(2, &[0], &[(2, request)]), late())
            .unwrap_err();
        let ExecutorError::TooLarge {
            message_bytes,
            limit_bytes,
            ..
        } = error
        else {
            panic!("{error:?}")
        };
        assert!(message_bytes >= 44_000_000 && limit_bytes == 40 << 20);
        assert!(run(&*executor, 3, picture_of(8)).is_ok());
    }
}

/// Fault case P3, as far as results that have arrived go: a request that nobody waits for leaves nothing behind.
#[test]
fn a_thousand_dropped_results_leave_nothing_behind() {
    let _watchdog = Watchdog::new("dropped results", Duration::from_secs(300));
    let [executor, uni] = worlds(LinkSpec::default(), Limits::default(), &Script::default());
    drop(uni);
    let pid = executor.world().pids[0];
    let memory = || {
        let of = |pid| denoised_os::process::memory_of(pid).unwrap().private_bytes;
        (of(std::process::id()), of(pid))
    };
    let mut base = None;
    for id in 0..1020 {
        // 724 x 724 x 3 bytes are 1.5 MiB.
        executor
            .dispatch(wave(id, &[0], &[(id, picture_of(724))]), late())
            .unwrap();
        let mut is_over = false;
        while !is_over {
            for event in executor.wait_events(late()) {
                match event {
                    // Where the worker left it, every time: the one before is free.
                    ExecutorEvent::RequestDone { outcome, .. } => {
                        assert!(outcome.unwrap().held_bytes() >= 724 * 724 * 3, "request {id}");
                    }
                    ExecutorEvent::WaveDone { .. } => is_over = true,
                    _ => {}
                }
            }
        }
        if id == 20 {
            base = Some(memory());
        }
    }
    let ((before, worker_before), (after, worker_after)) = (base.unwrap(), memory());
    // Less than ten of the thousand pictures.
    let limit_bytes = 16 << 20;
    assert!(after < before + limit_bytes, "{before} bytes grew to {after}");
    assert!(
        worker_after < worker_before + limit_bytes,
        "{worker_before} bytes of the worker grew to {worker_after}"
    );
}

#[test]
fn a_reply_over_the_limit_fails_its_call_alone_with_the_number() {
    let _watchdog = Watchdog::new("large replies", Duration::from_secs(240));
    let limits = Limits {
        trace_bytes: 4 << 20,
        ..Limits::default()
    };
    for executor in worlds(small_link(), limits, &Script::default()) {
        let call = |n_bytes: usize| {
            let args = n_bytes.to_string();
            executor.call(&MethodCall::new("payload", args.as_bytes(), late()))
        };
        match call(5 << 20).unwrap_err() {
            ExecutorError::Rank { failure, .. } => {
                assert_eq!(failure.code, FailureCode::OutOfMemory);
                assert!(failure.message.contains("4194304 bytes"), "{failure}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(call(4 << 20).unwrap()[0].bytes.len(), 4 << 20);
    }
}
