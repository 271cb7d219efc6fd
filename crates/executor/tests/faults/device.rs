//! Device memory: what outputs, requests and worlds leave behind.

use super::*;
use denoised_executor::{UniExecutor, UniOptions};
use denoised_testkit::{
    process::small_link,
    script::{BASE_BYTES, REQUEST_BYTES, device_bytes, scripted_registry, step_wave},
};

#[test]
fn p5_a_rank_that_does_not_reply_keeps_nothing_of_a_request() {
    let _watchdog = watchdog("p5");
    let folder = tempfile::tempdir().unwrap();
    let script = Script {
        device_account: Some(folder.path().to_owned()),
        side_px: 256,
        ..Script::default()
    };
    let executor = start(4, &script);
    let ranks = [0, 1, 2, 3];
    assert_eq!(device_bytes(folder.path()), 4 * BASE_BYTES);
    let waves = [
        wave(1, &ranks, &[(1, request(1, 3))]),
        step_wave(2, &ranks, &[(2, request(2, 2))], &[], &[]),
        step_wave(3, &ranks, &[], &[2], &[]),
    ];
    let mut events = Vec::new();
    for wave in waves {
        let wave_id = wave.wave_id;
        executor.dispatch(wave, late()).unwrap();
        let done = ExecutorEvent::WaveDone { wave_id };
        while !events.contains(&done) {
            events.extend(executor.wait_events(late()));
        }
        // Between two steps it is there, and on every rank.
        let expected = if wave_id == WaveId(2) {
            BASE_BYTES + REQUEST_BYTES
        } else {
            BASE_BYTES
        };
        for reply in executor
            .call(&MethodCall::new("device_memory", b"", late()))
            .unwrap()
        {
            assert_eq!(
                reply.bytes,
                expected.to_string().into_bytes(),
                "{wave_id}, rank {}",
                reply.rank
            );
        }
    }
    assert_eq!(device_bytes(folder.path()), 4 * BASE_BYTES);
    // Nobody has read the pictures, which only rank 0 was to send.
    let ended = outcomes(&events);
    assert_eq!(ended[&RequestId(1)].as_ref().unwrap(), &picture(1, 256));
    assert_eq!(ended[&RequestId(2)].as_ref().unwrap(), &picture(2, 256));
}

#[test]
fn g1_a_world_that_is_shut_down_holds_nothing_of_the_device() {
    let _watchdog = watchdog("g1");
    for kind in ["uni", "mp"] {
        let folder = tempfile::tempdir().unwrap();
        let script = Script {
            device_account: Some(folder.path().to_owned()),
            ..Script::default()
        };
        for round in 0..5 {
            let executor: Box<dyn Executor> = if kind == "mp" {
                Box::new(start(2, &script))
            } else {
                let options = UniOptions {
                    link: small_link(),
                    start_limit: soon(),
                    ..UniOptions::new(script.config())
                };
                let serve = Box::new(|end| {
                    denoised_worker::serve(end, scripted_registry());
                });
                Box::new(UniExecutor::start(options, serve, &mut |_, _| {}).unwrap())
            };
            let n_ranks = u64::from(executor.world().world_size);
            assert_eq!(
                device_bytes(folder.path()),
                n_ranks * BASE_BYTES,
                "{kind} {round}"
            );
            executor
                .dispatch(wave(1, &[0], &[(1, request(1, 2))]), late())
                .unwrap();
            // One that ends, and one that does not.
            executor
                .dispatch(step_wave(2, &[0], &[(2, request(2, 5))], &[], &[]), late())
                .unwrap();
            let mut events = Vec::new();
            let done = ExecutorEvent::WaveDone { wave_id: WaveId(2) };
            while !events.contains(&done) {
                events.extend(executor.wait_events(late()));
            }
            assert_eq!(
                device_bytes(folder.path()),
                n_ranks * BASE_BYTES + REQUEST_BYTES,
                "{kind} {round}"
            );
            executor.shutdown(soon());
            assert_eq!(
                device_bytes(folder.path()),
                0,
                "{kind} {round}: when the shutdown returns"
            );
            // The pictures are the caller's all the same.
            assert_eq!(outcomes(&events)[&RequestId(1)].as_ref().unwrap(), &picture(1, 8));
        }
    }
}
