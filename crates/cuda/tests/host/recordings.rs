use crate::{bits, exact, name_of, open, put, under};
use denoised_cuda::{CudaBackend, CudaOptions};
use denoised_tensor::{Activation, AttentionSpec, Backend, DType, Result, Tensor, TensorError};
use denoised_testkit::standin::{Schedule, Standin};
use std::cell::{Cell, RefCell};

fn values(seed: usize, n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| ((i * 37 + seed * 11) % 64) as f32 / 32.0 - 1.0)
        .collect()
}

/// Temporaries of several sizes that come and go, and a constant.
fn body(backend: &dyn Backend, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let x = inputs[0];
    let constant = backend.upload(&0.25f32.to_le_bytes(), &[1, 1, 1], DType::F32)?;
    let sum = backend.alloc(x.dims(), DType::F32)?;
    backend.add(x, &constant, &sum)?;
    let mixed = backend.alloc(x.dims(), DType::F32)?;
    let spec = AttentionSpec {
        n_heads: 1,
        n_kv_heads: 1,
        scale: 0.5,
        is_causal: false,
        bias: None,
    };
    backend.attention(&sum, x, x, &spec, &mixed)?;
    drop(sum);
    let active = backend.alloc(x.dims(), DType::F32)?;
    backend.activation(&mixed, Activation::Silu, &active)?;
    let doubled = backend.alloc(x.dims(), DType::F32)?;
    backend.affine(&active, 2.0, 0.0, &doubled)?;
    Ok(vec![active, doubled])
}

fn eager(backend: &dyn Backend, input: &Tensor) -> Vec<Vec<u32>> {
    let outputs = body(backend, &[input]).expect("runs");
    outputs.iter().map(|output| bits(backend, output)).collect()
}

fn replays_equal_runs() {
    let backend = open(exact());
    let base = backend.memory().used_bytes;
    {
        let mut kept = Vec::new();
        for call in 0..5 {
            for (key, dims) in [(1, [1, 6, 8]), (2, [1, 6, 8]), (1, [2, 3, 8])] {
                let input = put(&backend, &dims, &values(call, 48));
                let expected = eager(&backend, &input);
                let outputs = backend.repeat(key, &[&input], &mut |inputs| body(&backend, inputs));
                kept.push((outputs.expect("runs"), expected));
            }
        }
        // What was returned earlier is as it was.
        for (call, (outputs, expected)) in kept.iter().enumerate() {
            let got: Vec<_> = outputs.iter().map(|output| bits(&backend, output)).collect();
            assert_eq!(&got, expected, "call {call}");
        }
        assert_eq!(backend.recordings().0, 3);
        assert!(backend.recordings().1 > 0);
    }
    assert_eq!(backend.memory().used_bytes, base);
}

#[test]
fn replays_equal_runs_late() {
    under(
        name_of!(replays_equal_runs_late),
        &Standin::new(Schedule::LateForward),
        replays_equal_runs,
    );
}

#[test]
fn replays_equal_runs_early() {
    under(
        name_of!(replays_equal_runs_early),
        &Standin::new(Schedule::EarlyReverse),
        replays_equal_runs,
    );
}

/// `n_calls` calls of `body` under one key: how often it was called.
fn count(backend: &CudaBackend, n_calls: usize, body: &dyn Fn(&[&Tensor]) -> Result<Vec<Tensor>>) -> usize {
    let n_runs = Cell::new(0);
    for call in 0..n_calls {
        let input = put(backend, &[2, 4], &values(call, 8));
        let outputs = backend.repeat(7, &[&input], &mut |inputs| {
            n_runs.set(n_runs.get() + 1);
            body(inputs)
        });
        let outputs = outputs.expect("runs");
        let expected: Vec<u32> = values(call, 8).iter().map(|x| (2.0 * x).to_bits()).collect();
        assert_eq!(bits(backend, &outputs[0]), expected, "call {call}");
    }
    n_runs.get()
}

fn twice(backend: &dyn Backend, x: &Tensor) -> Result<Tensor> {
    let out = backend.alloc(x.dims(), DType::F32)?;
    backend.affine(x, 2.0, 0.0, &out)?;
    Ok(out)
}

#[test]
fn bodies_that_wait_run_by_themselves() {
    let body = || {
        let backend = open(exact());
        let base = backend.memory().used_bytes;
        let n_runs = count(&backend, 5, &|inputs| {
            let out = twice(&backend, inputs[0])?;
            assert!(backend.all_finite(&out)?);
            Ok(vec![out])
        });
        // Once more for the attempt.
        assert_eq!((n_runs, backend.recordings()), (6, (0, 0)));
        assert_eq!(backend.memory().used_bytes, base);
        assert_eq!(
            count(&backend, 4, &|inputs| Ok(vec![twice(&backend, inputs[0])?])),
            4
        );
    };
    under(
        name_of!(bodies_that_wait_run_by_themselves),
        &Standin::default(),
        body,
    );
}

/// Its address would be in the recording, and what lies there at a replay nobody knows.
#[test]
fn bodies_that_use_what_was_made_before_run_by_themselves() {
    let body = || {
        let backend = open(exact());
        let input = put(&backend, &[2, 4], &values(0, 8));
        for call in 0..4 {
            let outside = put(&backend, &[2, 4], &values(call, 8));
            let outputs = backend.repeat(1, &[&input], &mut |_| Ok(vec![twice(&backend, &outside)?]));
            let expected: Vec<u32> = values(call, 8).iter().map(|x| (2.0 * x).to_bits()).collect();
            assert_eq!(bits(&backend, &outputs.unwrap()[0]), expected, "call {call}");
            assert_eq!(backend.recordings(), (0, 0));
        }
    };
    under(
        name_of!(bodies_that_use_what_was_made_before_run_by_themselves),
        &Standin::default(),
        body,
    );
}

/// Each time it is recorded its memory is wanted for something else.
#[test]
fn a_body_that_is_given_up_again_and_again_is_not_recorded_any_more() {
    let body = || {
        let backend = open(exact());
        let input = put(&backend, &[2, 4], &values(0, 8));
        let n_runs = Cell::new(0);
        let run = || {
            let outputs = backend.repeat(1, &[&input], &mut |inputs| {
                n_runs.set(n_runs.get() + 1);
                Ok(vec![twice(&backend, inputs[0])?])
            });
            outputs.expect("runs");
        };
        run();
        for _ in 0..3 {
            run();
            assert_eq!(backend.recordings().0, 1);
            // More than there is: everything is given up before it is refused.
            assert!(backend.alloc(&[1 << 30, 1 << 10], DType::F32).is_err());
            assert_eq!(backend.recordings(), (0, 0));
        }
        run();
        assert_eq!((n_runs.get(), backend.recordings()), (5, (0, 0)));
    };
    under(
        name_of!(a_body_that_is_given_up_again_and_again_is_not_recorded_any_more),
        &Standin::default(),
        body,
    );
}

#[test]
fn a_bodys_error_is_returned_and_nothing_is_recorded() {
    let body = || {
        let backend = open(exact());
        let base = backend.memory().used_bytes;
        let input = put(&backend, &[2, 4], &values(0, 8));
        let run = |fails: bool| {
            backend.repeat(3, &[&input], &mut |inputs| {
                let out = twice(&backend, inputs[0])?;
                if fails {
                    return Err(TensorError::Device("as planned".to_owned()));
                }
                Ok(vec![out])
            })
        };
        run(false).unwrap();
        for _ in 0..2 {
            assert_eq!(run(true).unwrap_err().to_string(), "device: as planned");
            assert_eq!(backend.recordings(), (0, 0));
        }
        let outputs = run(false).unwrap();
        assert_eq!(bits(&backend, &outputs[0])[0], (2.0 * values(0, 1)[0]).to_bits());
        drop((outputs, input));
        assert_eq!(backend.memory().used_bytes, base);
    };
    under(
        name_of!(a_bodys_error_is_returned_and_nothing_is_recorded),
        &Standin::default(),
        body,
    );
}

#[test]
fn the_longest_unused_recording_goes() {
    let body = || {
        let backend = open(CudaOptions {
            max_recordings: 2,
            ..exact()
        });
        let input = put(&backend, &[2, 4], &values(0, 8));
        let n_runs = Cell::new(0);
        let run = |key| {
            n_runs.set(0);
            let outputs = backend.repeat(key, &[&input], &mut |inputs| {
                n_runs.set(n_runs.get() + 1);
                Ok(vec![twice(&backend, inputs[0])?])
            });
            outputs.expect("runs");
            n_runs.get()
        };
        for key in [1, 1, 2, 2, 1, 3, 3] {
            run(key);
        }
        assert_eq!(backend.recordings().0, 2);
        assert_eq!([run(1), run(3), run(2)], [0, 0, 1]);
        let none = open(CudaOptions {
            max_recordings: 0,
            ..exact()
        });
        assert_eq!(count(&none, 3, &|inputs| Ok(vec![twice(&none, inputs[0])?])), 3);
    };
    under(
        name_of!(the_longest_unused_recording_goes),
        &Standin::default(),
        body,
    );
}

#[test]
fn what_is_dropped_during_a_recording_is_freed_once() {
    let body = || {
        let backend = open(exact());
        let base = backend.memory().used_bytes;
        let held = RefCell::new(None);
        for call in 0..4 {
            // Freed by the body's second call, which is the one that is recorded.
            *held.borrow_mut() = Some(put(&backend, &[1000], &values(call, 1000)));
            let input = put(&backend, &[2, 4], &values(call, 8));
            let outputs = backend.repeat(1, &[&input], &mut |inputs| {
                held.borrow_mut().take();
                Ok(vec![twice(&backend, inputs[0])?])
            });
            let expected: Vec<u32> = values(call, 8).iter().map(|x| (2.0 * x).to_bits()).collect();
            assert_eq!(bits(&backend, &outputs.unwrap()[0]), expected, "call {call}");
        }
        held.borrow_mut().take();
        backend.synchronize().unwrap();
        assert_eq!(backend.memory().used_bytes, base);
    };
    under(
        name_of!(what_is_dropped_during_a_recording_is_freed_once),
        &Standin::default(),
        body,
    );
}
