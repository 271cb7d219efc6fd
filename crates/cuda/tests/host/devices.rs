use crate::{bits, exact, name_of, open, put, under};
use denoised_cuda::{CudaBackend, CudaOptions, Unavailable, device_count};
use denoised_tensor::{
    Activation, AttentionSpec, Backend, DType, Epilogue, Precision, PrepareInput, Result, Tensor,
    TensorError, Weight, WeightKind, WeightSpec,
};
use denoised_testkit::{
    standin::{Schedule, Standin},
    suites::backend::{MemorySource, fetch},
};

fn with(more: &[(&'static str, &str)]) -> Standin {
    let owned = more.iter().map(|(name, value)| (*name, (*value).to_owned()));
    Standin {
        more: owned.collect(),
        ..Standin::new(Schedule::EarlyReverse)
    }
}

fn weight(backend: &dyn Backend, kind: WeightKind, shape: &[usize], values: &[f32]) -> Weight {
    let mut source = MemorySource::default();
    source.insert("w", shape, values);
    let spec = WeightSpec {
        sources: vec!["w".to_owned()],
        kind,
        shape: shape.to_vec(),
        precision: Precision::Device,
    };
    let prepared = backend.prepare(&[spec], PrepareInput::Build(&source), &mut |_, _| {});
    prepared.expect("memory").weights.remove(0)
}

fn float(x: f32) -> Vec<u32> {
    vec![x.to_bits()]
}

// ---- several devices in a thread ----

/// `3 x + 1`, the product by the library, recorded from the second call on.
fn tripled(backend: &CudaBackend, w: &Weight, x: f32) -> Vec<u32> {
    let x = put(backend, &[1, 1], &[x]);
    let outputs = backend.repeat(1, &[&x], &mut |inputs| {
        let out = backend.alloc(&[1, 1], DType::F32)?;
        backend.linear(inputs[0], w, &Epilogue::default(), &out)?;
        backend.affine(&out, 1.0, 1.0, &out)?;
        Ok(vec![out])
    });
    bits(backend, &outputs.expect("runs")[0])
}

#[test]
fn backends_of_two_devices_take_turns_in_one_thread() {
    let body = || {
        let on = |device_idx| {
            open(CudaOptions {
                device_idx,
                ..exact()
            })
        };
        let (first, second) = (on(0), on(1));
        let first_w = weight(&first, WeightKind::Matrix, &[1, 1], &[3.0]);
        let second_w = weight(&second, WeightKind::Matrix, &[1, 1], &[3.0]);
        for i in 0..4 {
            let x = i as f32;
            assert_eq!(tripled(&first, &first_w, x), float(3.0 * x + 1.0));
            assert_eq!(tripled(&second, &second_w, -x), float(1.0 - 3.0 * x));
        }
        assert_eq!((first.recordings().0, second.recordings().0), (1, 1));
        // Weights and tensors that go leave the other device as it is.
        let kept = put(&first, &[1], &[5.0]);
        drop((second_w, second));
        assert_eq!(bits(&first, &kept), float(5.0));
        let third = on(1);
        let other = put(&third, &[1], &[6.0]);
        drop((first_w, kept, first));
        third.fill(&other, 7.0).unwrap();
        assert_eq!(bits(&third, &other), float(7.0));
    };
    under(
        name_of!(backends_of_two_devices_take_turns_in_one_thread),
        &Standin::default(),
        body,
    );
}

// ---- devices and drivers that will not do ----

fn refusal_of_the_first_device(words: &[&str]) {
    let text = CudaBackend::open(exact()).unwrap_err().to_string();
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn an_old_driver_is_named_with_what_is_needed_and_the_way_out() {
    let body = || {
        assert_eq!(device_count(), Err(Unavailable::OldDriver { driver: 12_030 }));
        refusal_of_the_first_device(&["12.3", "12.4", "update the driver", "--device cpu"]);
    };
    under(
        name_of!(an_old_driver_is_named_with_what_is_needed_and_the_way_out),
        &with(&[("FAKECUDA_DRIVER", "12030")]),
        body,
    );
}

#[test]
fn an_old_device_is_named_with_what_is_needed_and_the_way_out() {
    let body = || refusal_of_the_first_device(&["cuda:0 (CPU stand-in 0)", "7.5", "8.0", "--device cpu"]);
    under(
        name_of!(an_old_device_is_named_with_what_is_needed_and_the_way_out),
        &with(&[("FAKECUDA_CC", "75")]),
        body,
    );
}

#[test]
fn a_kernel_that_does_not_compile_is_named_with_the_way_out() {
    let body = || refusal_of_the_first_device(&["compiling ", ".cu for sm_90a", "NVRTC", "--device cpu"]);
    under(
        name_of!(a_kernel_that_does_not_compile_is_named_with_the_way_out),
        &with(&[
            ("FAKECUDA_CXXFLAGS", "-include no-such-file.h"),
            ("XDG_CACHE_HOME", "/dev/null/nowhere"),
        ]),
        body,
    );
}

// ---- what the driver and the library answer ----

fn is_out_of_memory<T: std::fmt::Debug>(outcome: Result<T>, word: &str) {
    match outcome {
        Err(error @ TensorError::OutOfMemory { .. }) => {
            assert!(error.to_string().contains(word), "{word}: {error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_driver_without_memory_for_kernels_says_so() {
    let body = || is_out_of_memory(CudaBackend::open(exact()), ".cu needs more bytes than there are");
    under(
        name_of!(a_driver_without_memory_for_kernels_says_so),
        &with(&[("FAKECUDA_CALL_FAULT", "cuModuleLoadData:2:2")]),
        body,
    );
}

#[test]
fn a_recording_that_finds_no_memory_is_tried_again() {
    let body = || {
        let backend = open(exact());
        let w = weight(&backend, WeightKind::Matrix, &[1, 1], &[3.0]);
        for (i, n_recordings) in [0, 0, 1, 1].into_iter().enumerate() {
            assert_eq!(tripled(&backend, &w, i as f32), float(3.0 * i as f32 + 1.0));
            assert_eq!(backend.recordings().0, n_recordings, "call {i}");
        }
    };
    under(
        name_of!(a_recording_that_finds_no_memory_is_tried_again),
        &with(&[("FAKECUDA_CALL_FAULT", "cuGraphInstantiateWithFlags:1:2")]),
        body,
    );
}

/// One product after the other, of which the second fails.
fn second_product() -> (CudaBackend, Result<()>) {
    let backend = open(exact());
    let w = weight(&backend, WeightKind::Matrix, &[2, 1], &[3.0, 4.0]);
    let x = put(&backend, &[1, 1], &[2.0]);
    let out = backend.alloc(&[1, 2], DType::F32).unwrap();
    let product = || backend.linear(&x, &w, &Epilogue::default(), &out);
    product().unwrap();
    let outcome = product();
    // The device goes on.
    backend.fill(&out, 0.0).unwrap();
    product().unwrap();
    assert_eq!(fetch(&backend, &out).unwrap(), [6.0, 8.0]);
    (backend, outcome)
}

#[test]
fn a_product_without_memory_says_so_and_others_name_themselves() {
    // CUBLAS_STATUS_ALLOC_FAILED
    let body = || is_out_of_memory(second_product().1, "product 1x2x1 f32");
    under(
        name_of!(a_product_without_memory_says_so_and_others_name_themselves),
        &with(&[("FAKECUDA_PRODUCT_FAULT", "2:3")]),
        body,
    );
}

#[test]
fn a_product_that_fails_names_itself_and_the_answer() {
    // CUBLAS_STATUS_EXECUTION_FAILED
    let body = || {
        let text = second_product().1.unwrap_err().to_string();
        let words = ["product 1x2x1 f32", "cuBLASLt", "EXECUTION_FAILED"];
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    under(
        name_of!(a_product_that_fails_names_itself_and_the_answer),
        &with(&[("FAKECUDA_PRODUCT_FAULT", "2:13")]),
        body,
    );
}

/// Codes that end a context and have come with newer drivers, or only with some.
fn is_latched() {
    let backend = open(exact());
    let x = put(&backend, &[8], &[1.0; 8]);
    let error = backend
        .fill(&x, 1.0)
        .and_then(|()| backend.synchronize())
        .unwrap_err();
    assert!(error.to_string().contains("kernel fill_f32"), "{error}");
    assert_eq!(backend.alloc(&[1], DType::F32).unwrap_err(), error);
}

macro_rules! latched_tests {
    ($($test:ident: $code:literal;)+) => {$(
        #[test]
        fn $test() {
            let standin = Standin {
                fault: Some(concat!("fill_f32:1:", $code).to_owned()),
                ..Standin::default()
            };
            under(name_of!($test), &standin, is_latched);
        }
    )+};
}

latched_tests! {
    a_contained_fault_is_latched: "226";
    a_lost_server_is_latched: "806";
    an_unknown_fault_is_latched: "999";
}

// ---- limits ----

#[test]
fn shared_memory_beyond_the_devices_is_refused_and_the_device_goes_on() {
    let body = || {
        let backend = open(CudaOptions::default());
        let attend = |width: usize| {
            let x = backend.alloc(&[1, 2, width], DType::BF16).unwrap();
            backend.fill(&x, 0.5).unwrap();
            let out = backend.alloc(x.dims(), DType::BF16).unwrap();
            let spec = AttentionSpec {
                n_heads: 1,
                n_kv_heads: 1,
                scale: 1.0,
                is_causal: false,
                bias: None,
            };
            backend.attention(&x, &x, &x, &spec, &out)?;
            fetch(&backend, &out)
        };
        let text = attend(512).unwrap_err().to_string();
        for word in ["flash_512_bf16", "shared memory", "65536"] {
            assert!(text.contains(word), "{text}");
        }
        assert_eq!(attend(64).unwrap(), [0.5; 128]);
    };
    under(
        name_of!(shared_memory_beyond_the_devices_is_refused_and_the_device_goes_on),
        &with(&[("FAKECUDA_SHARED", "65536")]),
        body,
    );
}

#[test]
fn a_kernel_gets_more_shared_memory_than_its_first_launch_had() {
    let body = || {
        let backend = open(exact());
        // Statistics of so many channels take more than 48 KiB.
        for n in [4, 12_800] {
            let ones = vec![1.0; n];
            let affine = weight(&backend, WeightKind::Vector, &[n], &ones);
            let values: Vec<f32> = (0..2 * n).map(|i| if i < n { 1.0 } else { 3.0 }).collect();
            let x = put(&backend, &[1, 2, n], &values);
            backend
                .group_norm(&x, (&affine, &affine), 2, 0.0, Activation::None, &x)
                .unwrap();
            let expected: Vec<f32> = (0..2 * n).map(|i| if i < n { 0.0 } else { 2.0 }).collect();
            assert_eq!(fetch(&backend, &x).unwrap(), expected);
        }
    };
    under(
        name_of!(a_kernel_gets_more_shared_memory_than_its_first_launch_had),
        &Standin::default(),
        body,
    );
}

#[test]
fn plans_of_products_are_bounded() {
    let body = || {
        let backend = open(exact());
        let w = weight(&backend, WeightKind::Matrix, &[1, 1], &[2.0]);
        let n = 2100;
        let x = put(&backend, &[n, 1], &vec![1.5; n]);
        let out = backend.alloc(&[n, 1], DType::F32).unwrap();
        for rows in 1..=n {
            let part = |tensor: &Tensor| tensor.narrow(0, 0, rows).unwrap();
            backend
                .linear(&part(&x), &w, &Epilogue::default(), &part(&out))
                .unwrap();
        }
        assert_eq!(fetch(&backend, &out).unwrap(), vec![3.0; n]);
        let text = format!("{backend:?}");
        let (_, counted) = text.split_once("Products(").expect("it tells how many there are");
        let n_plans: usize = counted.split(' ').next().unwrap().parse().unwrap();
        assert!((1..=2048).contains(&n_plans), "{n_plans}");
    };
    under(name_of!(plans_of_products_are_bounded), &Standin::default(), body);
}

#[test]
fn batches_beyond_a_grid_are_done_in_turns_and_heads_beyond_it_are_refused() {
    let body = || {
        let backend = open(exact());
        let n_batch = 65_540;
        let values: Vec<f32> = (0..n_batch).map(|i| i as f32).collect();
        let x = put(&backend, &[n_batch, 1, 1], &values);
        let out = backend.alloc(x.dims(), DType::F32).unwrap();
        let spec = AttentionSpec {
            n_heads: 1,
            n_kv_heads: 1,
            scale: 1.0,
            is_causal: false,
            bias: None,
        };
        backend.attention(&x, &x, &x, &spec, &out).unwrap();
        assert_eq!(fetch(&backend, &out).unwrap(), values);
        let affine = weight(&backend, WeightKind::Vector, &[1], &[1.0]);
        let pairs = put(&backend, &[n_batch, 1, 1], &values);
        backend
            .group_norm(&pairs, (&affine, &affine), 1, 1.0, Activation::None, &out)
            .unwrap();
        assert_eq!(fetch(&backend, &out).unwrap(), vec![1.0; n_batch]);
        let heads = x.reshape(&[1, 1, n_batch]).unwrap();
        let many = AttentionSpec {
            n_heads: n_batch,
            n_kv_heads: n_batch,
            ..spec
        };
        let outcome = backend.attention(
            &heads,
            &heads,
            &heads,
            &many,
            &out.reshape(&[1, 1, n_batch]).unwrap(),
        );
        match outcome {
            Err(TensorError::Shape { detail, .. }) => assert!(detail.contains("65535"), "{detail}"),
            other => panic!("{other:?}"),
        }
    };
    under(
        name_of!(batches_beyond_a_grid_are_done_in_turns_and_heads_beyond_it_are_refused),
        &Standin::new(Schedule::LateForward),
        body,
    );
}
