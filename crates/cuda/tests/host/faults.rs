use crate::{exact, name_of, open, put, under};
use denoised_cuda::{CudaBackend, CudaOptions};
use denoised_tensor::{Backend, DType, Precision, PrepareInput, TensorError, WeightKind, WeightSpec};
use denoised_testkit::{
    standin::{Schedule, Standin},
    suites::backend::MemorySource,
};

fn failing(launch: &str) -> Standin {
    Standin {
        fault: Some(format!("{launch}:700")),
        ..Standin::new(Schedule::EarlyReverse)
    }
}

/// The fault's text names all of `words`, and every later op says the same.
fn is_latched(backend: &CudaBackend, error: TensorError, words: &[&str]) {
    let text = error.to_string();
    for word in ["CUDA_ERROR_ILLEGAL_ADDRESS"].iter().chain(words) {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert_eq!(backend.alloc(&[1], DType::F32).unwrap_err(), error);
    assert_eq!(backend.synchronize().unwrap_err(), error);
}

#[test]
fn a_fault_names_its_kernel_and_launch_though_others_followed() {
    let body = || {
        let backend = open(exact());
        let x = put(&backend, &[1000], &[1.0; 1000]);
        let mut ended = Ok(());
        for value in 0..3 {
            ended = ended.and_then(|()| backend.fill(&x, value as f32));
            ended = ended.and_then(|()| backend.affine(&x, 2.0, 0.0, &x));
        }
        let error = ended.and_then(|()| backend.synchronize()).unwrap_err();
        is_latched(
            &backend,
            error,
            &["kernel fill_f32", "grid ", "block 256", "noticed at"],
        );
    };
    under(
        name_of!(a_fault_names_its_kernel_and_launch_though_others_followed),
        &failing("fill_f32:2"),
        body,
    );
}

#[test]
fn a_fault_in_a_replay_names_the_recording() {
    let body = || {
        let backend = open(exact());
        let x = put(&backend, &[8], &[1.0; 8]);
        let run = || {
            let outputs = backend.repeat(1, &[&x], &mut |inputs| {
                let out = backend.alloc(&[8], DType::F32)?;
                backend.fill(&out, 1.0)?;
                backend.add(&out, inputs[0], &out)?;
                Ok(vec![out])
            })?;
            backend.synchronize()?;
            Ok(outputs)
        };
        let error = (0..6).find_map(|_| run().err()).expect("the fault is noticed");
        is_latched(&backend, error, &["recording of 2 launches"]);
    };
    under(
        name_of!(a_fault_in_a_replay_names_the_recording),
        &failing("fill_f32:3"),
        body,
    );
}

#[test]
fn with_every_launch_checked_the_op_itself_fails() {
    let body = || {
        let backend = open(CudaOptions {
            check_launches: true,
            ..exact()
        });
        let x = put(&backend, &[8], &[1.0; 8]);
        backend.fill(&x, 1.0).unwrap();
        let error = backend.fill(&x, 2.0).unwrap_err();
        is_latched(&backend, error, &["kernel fill_f32"]);
    };
    under(
        name_of!(with_every_launch_checked_the_op_itself_fails),
        &failing("fill_f32:2"),
        body,
    );
}

#[test]
fn a_number_out_of_range_is_told_at_the_next_wait_and_once() {
    let body = || {
        let backend = open(exact());
        let spec = WeightSpec {
            sources: vec!["table".to_owned()],
            kind: WeightKind::Table,
            shape: vec![3, 4],
            precision: Precision::Device,
        };
        let mut source = MemorySource::default();
        source.insert("table", &[3, 4], &[1.0; 12]);
        let prepared = backend.prepare(&[spec], PrepareInput::Build(&source), &mut |_, _| {});
        let table = &prepared.expect("memory").weights[0];
        let ids = |id: i32| {
            backend
                .upload(&id.to_le_bytes(), &[1], DType::I32)
                .expect("memory")
        };
        let out = backend.alloc(&[1, 4], DType::F32).unwrap();
        backend.embedding(&ids(3), table, &out).unwrap();
        match backend.synchronize() {
            Err(TensorError::Shape {
                op: "embedding",
                detail,
            }) => assert!(detail.contains('3'), "{detail}"),
            other => panic!("{other:?}"),
        }
        backend.embedding(&ids(2), table, &out).unwrap();
        backend.synchronize().unwrap();
    };
    under(
        name_of!(a_number_out_of_range_is_told_at_the_next_wait_and_once),
        &Standin::default(),
        body,
    );
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let body = || {
        let error = CudaBackend::open(CudaOptions {
            device_idx: 2,
            ..exact()
        });
        let text = error.unwrap_err().to_string();
        assert!(
            text.contains("cuda:2") && text.contains("2 CUDA devices"),
            "{text}"
        );
    };
    under(
        name_of!(a_device_that_is_not_there_is_named),
        &Standin::default(),
        body,
    );
}
