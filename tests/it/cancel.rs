//! Cancelling a picture that is computed together with another one, on the real model.

use crate::support::demo_model;
use denoised_engine::{
    Engine, EngineHandle, EngineOptions, RequestEvent, RequestHandle, SubmitOptions, policy,
};
use denoised_executor::{MpExecutor, MpOptions};
use denoised_types::{FailureCode, GenerateRequest, Generated, Mode, WorkerConfig};
use std::sync::Arc;

const N_STEPS: u32 = 12;

fn start(mode: Mode) -> EngineHandle {
    let config = WorkerConfig {
        model: demo_model(),
        device: "cpu".into(),
        dtype: "f32".into(),
        n_threads: Some(1),
        warm_up: false,
    };
    let mut options = MpOptions::new(1, config);
    options.program.path = Some(env!("CARGO_BIN_EXE_denoised-worker").into());
    let executor = MpExecutor::start(options, &mut |_, _| {}).expect("the worker starts");
    let policy = policy(mode, 16, 2).expect("a policy");
    Engine::start(Arc::new(executor), policy, EngineOptions::default()).expect("the engine starts")
}

fn submit(engine: &EngineHandle, prompt: &str, seed: u64, n_steps: u32) -> RequestHandle {
    let request = GenerateRequest {
        seed,
        n_steps: Some(n_steps),
        ..GenerateRequest::new(prompt)
    };
    let submitted = engine.submit(request, SubmitOptions::default());
    submitted.expect("there is room")
}

fn wait_for_step(handle: &mut RequestHandle, step: u32) {
    let reached = |event: RequestEvent| matches!(event, RequestEvent::Step { n_done, .. } if n_done >= step);
    assert!(handle.any(reached), "it ended before step {step}");
}

#[test]
fn k3_a_picture_is_the_same_bits_when_its_neighbour_is_cancelled() {
    let mut all: Vec<Generated> = Vec::new();
    for mode in [Mode::Request, Mode::Step] {
        let engine = start(mode);
        let wanted = || submit(&engine, "a rocket", 3, N_STEPS);
        all.push(wanted().wait().expect("a picture"));
        // While one of two that share a forward is cancelled. What runs first keeps them waiting until both are there.
        let mut first = submit(&engine, "a red heart", 1, 2);
        let (mut given_up, kept) = (submit(&engine, "a cat", 2, N_STEPS), wanted());
        wait_for_step(&mut first, 1);
        wait_for_step(&mut given_up, 3);
        given_up.cancel();
        let failure = given_up.wait().expect_err("it was cancelled");
        assert_eq!(failure.code, FailureCode::Cancelled, "{failure}");
        all.push(kept.wait().expect("a picture"));
    }
    for generated in &all[1..] {
        assert!(
            generated.image == all[0].image,
            "not the bits of the picture that was alone"
        );
    }
    assert!(
        all[0].image.rgb.iter().any(|byte| *byte != all[0].image.rgb[0]),
        "a picture"
    );
}
