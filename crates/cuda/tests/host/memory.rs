use crate::{bits, exact, name_of, open, put, under};
use denoised_cuda::CudaBackend;
use denoised_tensor::{Backend, DType, Tensor, TensorError};
use denoised_testkit::standin::Standin;

fn small() -> Standin {
    Standin {
        memory_bytes: Some(128 << 20),
        ..Standin::default()
    }
}

#[test]
fn what_does_not_fit_is_refused_with_its_shape_and_bytes() {
    let body = || {
        let backend = open(exact());
        let base = backend.memory().used_bytes;
        match backend.alloc(&[1 << 10, 1 << 16], DType::F32) {
            Err(TensorError::OutOfMemory {
                what,
                needed_bytes,
                available_bytes,
            }) => {
                assert!(what.contains("[1024, 65536]"), "{what}");
                assert_eq!(needed_bytes, 256 << 20);
                assert!((1..128 << 20).contains(&available_bytes), "{available_bytes}");
            }
            other => panic!("{other:?}"),
        }
        // The device goes on.
        let x = put(&backend, &[2], &[1.0, 2.0]);
        assert_eq!(bits(&backend, &x), [1f32.to_bits(), 2f32.to_bits()]);
        drop(x);
        assert_eq!(backend.memory().used_bytes, base);
        assert!(backend.memory().peak_bytes >= base + 8);
    };
    under(
        name_of!(what_does_not_fit_is_refused_with_its_shape_and_bytes),
        &small(),
        body,
    );
}

/// Bytes that one tensor may have at most.
fn available_bytes(backend: &dyn Backend) -> usize {
    match backend.alloc(&[1 << 10, 1 << 16], DType::F32) {
        Err(TensorError::OutOfMemory { available_bytes, .. }) => available_bytes as usize,
        other => panic!("{other:?}"),
    }
}

/// Runs a body that has tensors of these lengths, one after the other.
fn run(backend: &CudaBackend, input: &Tensor, lens: &[usize]) {
    let outputs = backend.repeat(1, &[input], &mut |inputs| {
        let out = backend.alloc(&[1], DType::F32)?;
        backend.copy(inputs[0], &out)?;
        for len in lens {
            let large = backend.alloc(&[*len], DType::F32)?;
            backend.copy(&out, &large)?;
            backend.copy(&large.narrow(0, len - 1, 1)?, &out)?;
        }
        Ok(vec![out])
    });
    let outputs = outputs.expect("runs");
    assert_eq!(bits(backend, &outputs[0]), [3f32.to_bits()]);
}

#[test]
fn recordings_are_given_up_for_memory() {
    let body = || {
        let backend = open(exact());
        let available = available_bytes(&backend);
        let input = put(&backend, &[1], &[3.0]);
        for _ in 0..3 {
            run(&backend, &input, &[10 << 20]);
        }
        assert_eq!(backend.recordings().0, 1);
        assert!(backend.recordings().1 >= 40 << 20);
        let large = backend.alloc(&[(available - (8 << 20)) / 4], DType::F32);
        assert!(large.is_ok(), "{large:?}");
        assert_eq!(backend.recordings(), (0, 0));
        drop(large);
        run(&backend, &input, &[10 << 20]);
    };
    under(name_of!(recordings_are_given_up_for_memory), &small(), body);
}

#[test]
fn a_body_that_does_not_fit_as_a_recording_runs_op_by_op() {
    let body = || {
        let backend = open(exact());
        let base = backend.memory().used_bytes;
        let input = put(&backend, &[1], &[3.0]);
        // One after the other they fit; a recording cannot use the first one's memory for one that is so much smaller.
        let lens = [10 << 20, 4 << 20];
        let held_bytes = available_bytes(&backend) - (48 << 20);
        let held = backend.alloc(&[held_bytes / 4], DType::F32).expect("memory");
        for _ in 0..4 {
            run(&backend, &input, &lens);
            assert_eq!(backend.recordings(), (0, 0));
        }
        drop((held, input));
        assert_eq!(backend.memory().used_bytes, base);
    };
    under(
        name_of!(a_body_that_does_not_fit_as_a_recording_runs_op_by_op),
        &small(),
        body,
    );
}
