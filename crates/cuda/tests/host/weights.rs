use crate::{exact, name_of, open, under};
use denoised_cuda::CudaOptions;
use denoised_tensor::{Backend, DType, Precision, PrepareInput, TensorError, WeightKind, WeightSpec};
use denoised_testkit::{
    standin::{Schedule, Standin},
    suites::backend::{MemorySource, fetch},
};

fn spec(sources: &[&str], kind: WeightKind, shape: &[usize]) -> WeightSpec {
    WeightSpec {
        sources: sources.iter().map(|name| (*name).to_owned()).collect(),
        kind,
        shape: shape.to_vec(),
        precision: Precision::Device,
    }
}

/// More than both buffers hold, of two tensors that do not end where a buffer does.
fn arrive_whole() {
    let backend = open(exact());
    let value = |i: usize| (i % 16_777_213) as f32;
    let mut source = MemorySource::default();
    let (n_first, n_second) = (4_100_003, 6_000_001);
    source.insert("first", &[n_first], &(0..n_first).map(value).collect::<Vec<_>>());
    source.insert(
        "second",
        &[n_second],
        &(n_first..n_first + n_second).map(value).collect::<Vec<_>>(),
    );
    let specs = [
        spec(&["first", "second"], WeightKind::Vector, &[n_first + n_second]),
        spec(&["first"], WeightKind::Vector, &[n_first]),
    ];
    let mut told = Vec::new();
    let prepared = backend.prepare(&specs, PrepareInput::Build(&source), &mut |done, total| {
        told.push((done, total))
    });
    let prepared = prepared.expect("memory");
    assert_eq!(told.first(), Some(&(0, prepared.n_bytes)));
    assert_eq!(told.last(), Some(&(prepared.n_bytes, prepared.n_bytes)));
    assert!(told.is_sorted());
    for weight in &prepared.weights {
        let got = fetch(&backend, &backend.weight_tensor(weight).unwrap()).unwrap();
        assert_eq!(got.len(), weight.shape[0]);
        let wrong = got
            .iter()
            .enumerate()
            .find(|(i, x)| x.to_bits() != value(*i).to_bits());
        assert_eq!(wrong, None);
    }
}

#[test]
fn weights_arrive_whole_late() {
    under(
        name_of!(weights_arrive_whole_late),
        &Standin::new(Schedule::LateForward),
        arrive_whole,
    );
}

#[test]
fn weights_arrive_whole_early() {
    under(
        name_of!(weights_arrive_whole_early),
        &Standin::new(Schedule::EarlyReverse),
        arrive_whole,
    );
}

#[test]
fn everything_that_is_missing_is_named_and_what_is_too_large_is_refused() {
    let body = || {
        let backend = open(CudaOptions {
            dtype: DType::F16,
            ..exact()
        });
        let mut source = MemorySource::default();
        source.insert("narrow", &[2], &[1.0, 2.0]);
        source.insert("large", &[1, 2], &[1.0, 70_000.0]);
        let prepare = |specs: &[WeightSpec]| {
            backend
                .prepare(specs, PrepareInput::Build(&source), &mut |_, _| {})
                .map(|prepared| prepared.n_bytes)
        };
        let error = prepare(&[
            spec(&["gone"], WeightKind::Vector, &[2]),
            spec(&["narrow"], WeightKind::Vector, &[3]),
        ]);
        let text = error.unwrap_err().to_string();
        assert!(text.contains("gone") && text.contains("narrow"), "{text}");
        match prepare(&[spec(&["large"], WeightKind::Matrix, &[1, 2])]) {
            Err(TensorError::Weight { name, detail }) => {
                assert_eq!(name, "large");
                assert!(detail.contains("70000") && detail.contains("f16"), "{detail}");
            }
            other => panic!("{other:?}"),
        }
        prepare(&[spec(&["narrow"], WeightKind::Vector, &[2])]).unwrap();
    };
    under(
        name_of!(everything_that_is_missing_is_named_and_what_is_too_large_is_refused),
        &Standin::default(),
        body,
    );
}

#[test]
fn weights_that_do_not_fit_are_refused_before_any_is_read() {
    let body = || {
        let backend = open(exact());
        let mut source = MemorySource::default();
        source.insert("table", &[40 << 20], &vec![0.0; 40 << 20]);
        let mut n_told = 0;
        let specs = [spec(&["table"], WeightKind::Vector, &[40 << 20])];
        match backend.prepare(&specs, PrepareInput::Build(&source), &mut |_, _| n_told += 1) {
            Err(TensorError::OutOfMemory {
                needed_bytes,
                available_bytes,
                ..
            }) => assert!(needed_bytes >= 160 << 20 && available_bytes < needed_bytes),
            other => panic!("{other:?}"),
        }
        assert_eq!(n_told, 0);
    };
    let standin = Standin {
        memory_bytes: Some(128 << 20),
        ..Standin::default()
    };
    under(
        name_of!(weights_that_do_not_fit_are_refused_before_any_is_read),
        &standin,
        body,
    );
}
