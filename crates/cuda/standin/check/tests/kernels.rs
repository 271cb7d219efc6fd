//! Planted mistakes in kernels are noticed by at least one schedule; right ones are right in both.

use standin_check::*;

const ILLEGAL_ADDRESS: i32 = 700;
const MISALIGNED: i32 = 716;
const LAUNCH_FAILED: i32 = 719;

/// The code that a kernel of one block ends with.
fn outcome(name: &str, n_threads: u32, shared_bytes: u32, args: Args) -> i32 {
    ok(launch(name, [1, n_threads, shared_bytes], 0, args));
    cuCtxSynchronize()
}

fn floats(n: usize) -> Vec<f32> {
    (0..n).map(|i| i as f32).collect()
}

fn is_early() -> bool {
    std::env::var("CPUCUDA_ASYNC").is_ok_and(|value| value == "early")
}

/// The body in both schedules.
#[track_caller]
fn both(test_name: &str, body: impl Fn()) {
    passes(test_name, &LATE_FORWARD, &body);
    passes(test_name, &EARLY_REVERSE, &body);
}

/// A block of 96 threads, three warps, over 96 floats.
fn mapped(name: &str) -> Vec<f32> {
    use_device();
    let input = device_copy(&floats(96));
    let out = device_copy(&[0.0f32; 96]);
    ok(outcome(name, 96, 4 * 96, Args { out, input, n: 96 }));
    host_copy(out, 96)
}

#[test]
fn a_missing_barrier_shows_poison() {
    both("a_missing_barrier_shows_poison", || {
        let reversed: Vec<f32> = floats(96).into_iter().rev().collect();
        assert_eq!(mapped("reverse_right"), reversed);
        let wrong = mapped("reverse_without_barrier");
        // Threads that ran first read what nobody had written.
        assert!(wrong.iter().any(|x| x.is_nan()));
        assert!(
            wrong
                .iter()
                .zip(&reversed)
                .all(|(x, right)| x.is_nan() || x == right)
        );
    });
}

#[test]
fn a_shuffled_order_runs_right_kernels_too() {
    passes(
        "a_shuffled_order_runs_right_kernels_too",
        &[("CPUCUDA_ORDER", "rand")],
        || {
            let reversed: Vec<f32> = floats(96).into_iter().rev().collect();
            assert_eq!(mapped("reverse_right"), reversed);
            assert_eq!(mapped("warp_sums")[95], (64..96).sum::<i32>() as f32);
        },
    );
}

#[test]
fn a_shuffle_of_half_a_warp_is_a_deadlock() {
    both("a_shuffle_of_half_a_warp_is_a_deadlock", || {
        use_device();
        let out = device_copy(&[0.0f32; 64]);
        assert_eq!(
            outcome("divergent_shuffle", 64, 0, Args { out, input: 0, n: 0 }),
            LAUNCH_FAILED
        );
    });
}

#[test]
fn a_step_beyond_device_memory_is_a_fault_that_stays() {
    both("a_step_beyond_device_memory_is_a_fault_that_stays", || {
        use_device();
        let out = device_copy(&[0i32; 64]);
        assert_eq!(
            outcome("overrun_device", 1, 0, Args { out, input: 0, n: 64 }),
            ILLEGAL_ADDRESS
        );
        let mut start = 0;
        assert_eq!(cuMemAlloc_v2(&raw mut start, 4), ILLEGAL_ADDRESS);
        assert_eq!(
            launch("set_n", [1, 1, 0], 0, Args { out, input: 0, n: 1 }),
            ILLEGAL_ADDRESS
        );
    });
}

#[test]
fn a_fault_ends_its_device_only() {
    passes("a_fault_ends_its_device_only", &[], || {
        use_device();
        let out = device_copy(&[0i32; 64]);
        assert_eq!(
            outcome("overrun_device", 1, 0, Args { out, input: 0, n: 64 }),
            ILLEGAL_ADDRESS
        );
        ok(cuCtxSetCurrent(made(|context| {
            cuDevicePrimaryCtxRetain(context, 1)
        })));
        assert_eq!(host_copy::<i32>(device_copy(&[7i32]), 1), [7]);
    });
}

#[test]
fn a_step_beyond_dynamic_shared_memory_is_a_fault() {
    both("a_step_beyond_dynamic_shared_memory_is_a_fault", || {
        use_device();
        let out = device_copy(&[0i32; 64]);
        assert_eq!(
            outcome("overrun_shared", 64, 256, Args { out, input: 0, n: 64 }),
            ILLEGAL_ADDRESS
        );
    });
}

#[test]
fn a_vector_load_off_its_boundary_is_a_fault() {
    both("a_vector_load_off_its_boundary_is_a_fault", || {
        use_device();
        let (input, out) = (device_copy(&[1i32; 64]), device_copy(&[0i32]));
        assert_eq!(outcome("vector_load", 1, 0, Args { out, input, n: 4 }), 0);
        assert_eq!(host_copy::<i32>(out, 1), [2]);
        assert_eq!(
            outcome("vector_load", 1, 0, Args { out, input, n: 1 }),
            MISALIGNED
        );
    });
}

#[test]
fn an_asynchronous_copy_off_its_boundary_is_a_fault() {
    both("an_asynchronous_copy_off_its_boundary_is_a_fault", || {
        use_device();
        let (input, out) = (device_copy(&[1i32; 64]), device_copy(&[0i32]));
        assert_eq!(
            outcome("async_misaligned", 1, 64, Args { out, input, n: 2 }),
            MISALIGNED
        );
    });
}

#[test]
fn late_copies_show_who_does_not_wait() {
    both("late_copies_show_who_does_not_wait", || {
        use_device();
        let (input, right) = (device_copy(&floats(256)), floats(256));
        let run = |name| {
            let out = device_copy(&[0.0f32; 256]);
            ok(outcome(name, 64, 1024, Args { out, input, n: 0 }));
            host_copy::<f32>(out, 256)
        };
        assert_eq!(run("async_right"), right);
        for wrong in ["async_without_wait", "async_weak_wait"] {
            let seen = run(wrong);
            if is_early() {
                assert_eq!(seen, right)
            } else {
                assert!(seen.iter().all(|x| x.is_nan()))
            }
        }
    });
}

#[test]
fn memory_that_was_freed_in_stream_order_is_gone() {
    both("memory_that_was_freed_in_stream_order_is_gone", || {
        use_device();
        let stream = stream();
        let out = made(|start| cuMemAllocAsync(start, 4, stream));
        ok(launch("set_n", [1, 1, 0], stream, Args { out, input: 0, n: 1 }));
        ok(cuMemFreeAsync(out, stream));
        ok(cuStreamSynchronize(stream));
        ok(launch("set_n", [1, 1, 0], stream, Args { out, input: 0, n: 1 }));
        assert_eq!(cuStreamSynchronize(stream), ILLEGAL_ADDRESS);
    });
}

#[test]
fn fresh_device_memory_is_nan() {
    passes("fresh_device_memory_is_nan", &[], || {
        use_device();
        let start = made(|start| cuMemAlloc_v2(start, 400));
        assert!(host_copy::<f32>(start, 100).iter().all(|x| x.is_nan()));
    });
}

#[test]
fn all_lanes_see_the_sum_of_their_warp() {
    both("all_lanes_see_the_sum_of_their_warp", || {
        let sums = mapped("warp_sums");
        for (i, sum) in sums.iter().enumerate() {
            let first = i / 32 * 32;
            assert_eq!(*sum, (first..first + 32).sum::<usize>() as f32);
        }
    });
}

#[test]
fn the_compiler_says_what_is_wrong() {
    passes("the_compiler_says_what_is_wrong", &[], || {
        let log = compile("int nobody() { return unheard_of; }").expect_err("it does not compile");
        assert!(log.contains("unheard_of"), "{log}");
    });
}
