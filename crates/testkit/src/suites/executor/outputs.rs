//! Results: owned, left where they are, freed when they are dropped.

use super::{StartFn, close, events_until_done, late};
use crate::script::{Script, picture, request, wave};
use denoised_executor::{Executor, ExecutorEvent, Output};
use denoised_types::GenerateRequest;

/// 100 x 100 pixels: larger than what travels inside a message.
const SIDE_PX: u32 = 100;

fn run(executor: &dyn Executor, id: u64, request: GenerateRequest) -> Output {
    executor
        .dispatch(wave(id, &[0], &[(id, request)]), late())
        .unwrap();
    let mut outputs = Vec::new();
    for event in events_until_done(executor, &[id]) {
        if let ExecutorEvent::RequestDone { outcome, .. } = event {
            outputs.push(outcome.unwrap());
        }
    }
    assert_eq!(outputs.len(), 1);
    outputs.remove(0)
}

/// Any number of results may be held while the worker goes on, and what is dropped is free again.
pub fn held_results_do_not_hold_the_worker_up(start: &StartFn) {
    let executor = start(&Script {
        side_px: SIDE_PX,
        ..Script::default()
    });
    let executor = &*executor;
    let defers = executor.world().capabilities.defers_outputs;
    let picture_bytes = (SIDE_PX * SIDE_PX * 3) as usize;
    let mut held = Vec::new();
    for id in 0..200 {
        held.push(run(executor, id, request(id, 1)));
    }
    let n_left = held.iter().filter(|output| output.held_bytes() > 0).count();
    assert_eq!(n_left > 0, defers, "{n_left} results lie in the worker's memory");
    assert!(held[0].held_bytes() == 0 || held[0].held_bytes() >= picture_bytes);
    if defers {
        assert!(n_left < 200, "what is held is limited");
    }
    for (id, output) in (0..).zip(&held) {
        assert_eq!(output.rgb(), picture(id, SIDE_PX).rgb, "result {id}");
        assert_eq!(output.size(), (SIDE_PX, SIDE_PX));
    }
    // Large results find room beside them.
    let large = run(
        executor,
        1000,
        GenerateRequest {
            width: Some(500),
            ..request(3, 1)
        },
    );
    assert_eq!(large.rgb(), picture(3, 500).rgb);
    // What is dropped, or taken out, is free: the next results find the same room.
    let mut generated = Vec::new();
    for output in held.drain(..) {
        generated.push(output.into_generated());
    }
    assert!(
        (0..)
            .zip(&generated)
            .all(|(id, g)| g.image == picture(id, SIDE_PX))
    );
    drop(large);
    let again: Vec<Output> = (2000..2200).map(|id| run(executor, id, request(id, 1))).collect();
    let n_again = again.iter().filter(|output| output.held_bytes() > 0).count();
    assert_eq!(n_again, n_left);
    close(executor);
}

/// See the name.
pub fn results_outlive_their_world(start: &StartFn) {
    let executor = start(&Script {
        side_px: SIDE_PX,
        ..Script::default()
    });
    let output = run(&*executor, 1, request(4, 1));
    close(&*executor);
    drop(executor);
    assert_eq!(output.rgb(), picture(4, SIDE_PX).rgb);
    assert_eq!(output.into_generated().image, picture(4, SIDE_PX));
}
