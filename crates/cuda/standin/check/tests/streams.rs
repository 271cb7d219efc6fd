//! Streams, events, memory, launches and mishaps.

use standin_check::*;
use std::{ffi::c_int, thread::sleep, time::Duration};

const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const NOT_READY: i32 = 600;
const OUT_OF_RESOURCES: i32 = 701;
const SLOW: [(&str, &str); 1] = [("FAKECUDA_SLOW_US", "set_n:300000")];

fn set(out: usize, n: c_int, stream: usize) -> c_int {
    launch("set_n", [1, 1, 0], stream, Args { out, input: 0, n })
}

fn copy(out: usize, input: usize, stream: usize) {
    ok(launch("copy_ints", [1, 1, 0], stream, Args { out, input, n: 1 }));
}

#[test]
fn a_stream_runs_in_order_and_after_the_call() {
    passes("a_stream_runs_in_order_and_after_the_call", &SLOW, || {
        use_device();
        let (stream, first, second) = (stream(), device_copy(&[0i32]), device_copy(&[0i32]));
        kernel("set_n");
        ok(set(first, 5, stream));
        copy(second, first, stream);
        assert_eq!(cuStreamQuery(stream), NOT_READY);
        ok(cuStreamSynchronize(stream));
        ok(cuStreamQuery(stream));
        assert_eq!(host_copy::<i32>(second, 1), [5]);
    });
}

#[test]
fn streams_run_at_the_same_time_unless_an_event_orders_them() {
    passes(
        "streams_run_at_the_same_time_unless_an_event_orders_them",
        &SLOW,
        || {
            use_device();
            let (slow, other, value) = (stream(), stream(), device_copy(&[0i32]));
            let (unordered, ordered) = (device_copy(&[0i32]), device_copy(&[0i32]));
            let (start, done) = (event(), event());
            ok(cuEventRecord(start, slow));
            ok(set(value, 5, slow));
            ok(cuEventRecord(done, slow));
            assert_eq!(cuEventQuery(done), NOT_READY);
            copy(unordered, value, other);
            ok(cuStreamSynchronize(other));
            assert_eq!(cuEventQuery(done), NOT_READY);
            ok(cuStreamWaitEvent(other, done, 0));
            copy(ordered, value, other);
            ok(cuStreamSynchronize(other));
            ok(cuEventQuery(done));
            ok(cuEventSynchronize(done));
            let milliseconds = made(|milliseconds| cuEventElapsedTime_v2(milliseconds, start, done));
            assert!(milliseconds >= 300.0, "{milliseconds}");
            assert_eq!(host_copy::<i32>(unordered, 1), [0]);
            assert_eq!(host_copy::<i32>(ordered, 1), [5]);
        },
    );
}

#[test]
fn parameters_and_pageable_memory_are_read_by_the_call() {
    passes(
        "parameters_and_pageable_memory_are_read_by_the_call",
        &SLOW,
        || {
            use_device();
            let (stream, out) = (stream(), device_copy(&[0i32, 0]));
            let mut pageable = vec![3i32];
            ok(set(out, 5, stream));
            ok(cuMemcpyHtoDAsync_v2(out + 4, pageable.as_ptr().cast(), 4, stream));
            pageable[0] = 4;
            assert_eq!(host_copy::<i32>(out, 2), [5, 3]);
        },
    );
}

#[test]
fn page_locked_memory_is_read_when_the_stream_gets_there() {
    passes(
        "page_locked_memory_is_read_when_the_stream_gets_there",
        &SLOW,
        || {
            use_device();
            let (stream, out) = (stream(), device_copy(&[0i32, 0]));
            let locked = made(|start| cuMemHostAlloc(start, 4, 0)) as *mut i32;
            // SAFETY: four bytes that live as long as the process.
            unsafe { locked.write_volatile(3) };
            ok(set(out, 5, stream));
            ok(cuMemcpyHtoDAsync_v2(out + 4, locked.cast(), 4, stream));
            // SAFETY: as above; that the copy races with this is the point, and it starts 300 ms later.
            unsafe { locked.write_volatile(4) };
            assert_eq!(host_copy::<i32>(out, 2), [5, 4]);
        },
    );
}

#[test]
fn memory_ends_at_the_limit_and_comes_back() {
    passes(
        "memory_ends_at_the_limit_and_comes_back",
        &[("FAKECUDA_MEM", "1048576")],
        || {
            use_device();
            let stream = stream();
            let (mut start, mut none) = (0, 0);
            ok(cuMemAlloc_v2(&raw mut start, 1 << 20));
            assert_eq!(cuMemAlloc_v2(&raw mut none, 1), OUT_OF_MEMORY);
            assert_eq!(cuMemAllocAsync(&raw mut none, 1, stream), OUT_OF_MEMORY);
            ok(cuMemFree_v2(start));
            ok(cuMemAllocAsync(&raw mut start, 1 << 20, stream));
            ok(cuMemFreeAsync(start, stream));
            ok(cuStreamSynchronize(stream));
            let (mut free, mut total) = (0, 0);
            ok(cuMemGetInfo_v2(&raw mut free, &raw mut total));
            assert_eq!((free, total), (1 << 20, 1 << 20));
            assert_eq!(cuMemAlloc_v2(&raw mut none, 0), INVALID_VALUE);
            assert_eq!(cuMemFree_v2(start), INVALID_VALUE);
        },
    );
}

#[test]
fn copies_beyond_an_allocation_are_refused() {
    passes("copies_beyond_an_allocation_are_refused", &[], || {
        use_device();
        let start = device_copy(&[1i32, 2]);
        let mut host = [0i32; 4];
        assert_eq!(
            cuMemcpyDtoH_v2(host.as_mut_ptr().cast(), start, 12),
            INVALID_VALUE
        );
        assert_eq!(cuMemcpyHtoD_v2(start + 4, host.as_ptr().cast(), 8), INVALID_VALUE);
        assert_eq!(cuMemsetD8Async(start, 0, 9, 0), INVALID_VALUE);
        assert_eq!(host_copy::<i32>(start, 2), [1, 2]);
    });
}

#[test]
fn the_nth_launch_fails_for_good() {
    passes(
        "the_nth_launch_fails_for_good",
        &[("FAKECUDA_FAULT", "set_n:2:719")],
        || {
            use_device();
            let out = device_copy(&[0i32]);
            ok(set(out, 5, 0));
            ok(cuCtxSynchronize());
            ok(set(out, 6, 0));
            assert_eq!(cuCtxSynchronize(), 719);
            assert_eq!(set(out, 7, 0), 719);
            assert_eq!(cuCtxSynchronize(), 719);
            let mut host = 0;
            assert_eq!(cuMemcpyDtoH_v2((&raw mut host).cast(), out, 4), 719);
        },
    );
}

#[test]
fn the_nth_launch_hangs() {
    passes("the_nth_launch_hangs", &[("FAKECUDA_HANG", "set_n:2")], || {
        use_device();
        let (stream, other, out) = (stream(), stream(), device_copy(&[0i32]));
        ok(set(out, 5, stream));
        ok(cuStreamSynchronize(stream));
        ok(set(out, 6, stream));
        sleep(Duration::from_millis(200));
        assert_eq!(cuStreamQuery(stream), NOT_READY);
        // Other streams and the end of the process do not wait for it.
        copy(out, out, other);
        ok(cuStreamSynchronize(other));
    });
}

#[test]
fn what_cannot_be_launched_is_refused_at_once() {
    passes("what_cannot_be_launched_is_refused_at_once", &[], || {
        use_device();
        let args = Args {
            out: device_copy(&[0i32; 96]),
            input: device_copy(&[0.0f32; 96]),
            n: 1,
        };
        assert_eq!(launch("set_n", [1, 65, 0], 0, args), OUT_OF_RESOURCES);
        assert_eq!(launch("set_n", [0, 1, 0], 0, args), INVALID_VALUE);
        assert_eq!(launch("set_n", [1, 0, 0], 0, args), INVALID_VALUE);
        assert_eq!(
            launch("reverse_right", [1, 96, 48 * 1024 + 1], 0, args),
            INVALID_VALUE
        );
        ok(launch("reverse_right", [1, 96, 48 * 1024], 0, args));
        let function = kernel("reverse_right");
        assert_eq!(cuFuncSetAttribute(function, 8, 227 * 1024 + 1), INVALID_VALUE);
        ok(cuFuncSetAttribute(function, 8, 227 * 1024));
        assert_eq!(made(|value| cuFuncGetAttribute(value, 8, function)), 227 * 1024);
        assert_eq!(made(|value| cuFuncGetAttribute(value, 0, function)), 256);
        ok(cuCtxSynchronize());
    });
}

#[test]
fn a_kernel_tells_of_its_parameters() {
    passes("a_kernel_tells_of_its_parameters", &[], || {
        use_device();
        let function = kernel("set_n");
        let (mut offset, mut len_bytes) = (9, 9);
        ok(cuFuncGetParamInfo(
            function,
            0,
            &raw mut offset,
            &raw mut len_bytes,
        ));
        assert_eq!((offset, len_bytes), (0, size_of::<Args>()));
        assert_eq!(
            cuFuncGetParamInfo(function, 1, &raw mut offset, &raw mut len_bytes),
            INVALID_VALUE
        );
        assert_eq!(cuModuleGetFunction(&raw mut offset, 0, c"nobody".as_ptr()), 500);
    });
}

#[test]
fn there_are_as_many_devices_as_asked_for() {
    passes(
        "there_are_as_many_devices_as_asked_for",
        &[("FAKECUDA_DEVICES", "3")],
        || {
            use_device();
            assert_eq!(made(|count| cuDeviceGetCount(count)), 3);
            assert_eq!(cuDevicePrimaryCtxRetain(&mut 0, 3), 101);
        },
    );
}
