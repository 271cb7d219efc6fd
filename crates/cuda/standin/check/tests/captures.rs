//! The rules of captures, one by one, and what replays do.

use standin_check::*;
use std::{ffi::c_int, thread};

const GLOBAL: c_int = 0;
const THREAD_LOCAL: c_int = 1;
const RELAXED: c_int = 2;
const UNSUPPORTED: c_int = 900;
const INVALIDATED: c_int = 901;

fn begin(mode: c_int) -> usize {
    let stream = stream();
    ok(cuStreamBeginCapture_v2(stream, mode));
    stream
}

fn end(stream: usize) -> c_int {
    cuStreamEndCapture(stream, &mut 0)
}

fn instance(stream: usize) -> usize {
    let graph = made(|graph| cuStreamEndCapture(stream, graph));
    made(|instance| cuGraphInstantiateWithFlags(instance, graph, 0))
}

fn set(out: usize, n: c_int, stream: usize) -> c_int {
    launch("set_n", [1, 1, 0], stream, Args { out, input: 0, n })
}

fn allocate() -> c_int {
    cuMemAlloc_v2(&mut 0, 4)
}

fn elsewhere(call: impl FnOnce() -> c_int + Send) -> c_int {
    thread::scope(|scope| {
        let run = move || {
            use_device();
            call()
        };
        scope.spawn(run).join().expect("the call returns")
    })
}

#[test]
fn unsafe_calls_spoil_a_global_capture_from_any_thread() {
    passes("unsafe_calls_spoil_a_global_capture_from_any_thread", &[], || {
        use_device();
        for call in [
            || allocate(),
            || elsewhere(allocate),
            || cuCtxSynchronize(),
            || cuMemFree_v2(0),
        ] {
            let stream = begin(GLOBAL);
            assert_eq!(call(), UNSUPPORTED);
            assert_eq!(made(|status| cuStreamIsCapturing(stream, status)), 2);
            assert_eq!(end(stream), INVALIDATED);
            assert_eq!(made(|status| cuStreamIsCapturing(stream, status)), 0);
        }
    });
}

#[test]
fn unsafe_calls_spoil_a_thread_local_capture_from_its_thread() {
    passes(
        "unsafe_calls_spoil_a_thread_local_capture_from_its_thread",
        &[],
        || {
            use_device();
            let stream = begin(THREAD_LOCAL);
            ok(elsewhere(allocate));
            ok(end(stream));
            let stream = begin(THREAD_LOCAL);
            assert_eq!(allocate(), UNSUPPORTED);
            assert_eq!(end(stream), INVALIDATED);
        },
    );
}

#[test]
fn unsafe_calls_do_not_spoil_a_relaxed_capture() {
    passes("unsafe_calls_do_not_spoil_a_relaxed_capture", &[], || {
        use_device();
        let stream = begin(RELAXED);
        ok(allocate());
        ok(elsewhere(allocate));
        assert_eq!(made(|status| cuStreamIsCapturing(stream, status)), 1);
        ok(end(stream));
    });
}

#[test]
fn waiting_for_a_stream_spoils_its_capture_in_any_mode() {
    passes("waiting_for_a_stream_spoils_its_capture_in_any_mode", &[], || {
        use_device();
        for mode in [GLOBAL, THREAD_LOCAL, RELAXED] {
            for call in [cuStreamSynchronize, cuStreamQuery] {
                let stream = begin(mode);
                assert_eq!(call(stream), UNSUPPORTED);
                assert_eq!(end(stream), INVALIDATED);
            }
        }
    });
}

#[test]
fn a_spoilt_capture_takes_nothing_more() {
    passes("a_spoilt_capture_takes_nothing_more", &[], || {
        use_device();
        let out = device_copy(&[0i32]);
        kernel("set_n");
        let stream = begin(GLOBAL);
        ok(set(out, 5, stream));
        assert_eq!(allocate(), UNSUPPORTED);
        assert_eq!(set(out, 6, stream), INVALIDATED);
        assert_eq!(end(stream), INVALIDATED);
        // The stream itself is as good as before.
        ok(set(out, 7, stream));
        ok(cuStreamSynchronize(stream));
        assert_eq!(host_copy::<i32>(out, 1), [7]);
    });
}

#[test]
fn captures_do_not_merge() {
    passes("captures_do_not_merge", &[], || {
        use_device();
        let (first, second, mark) = (begin(RELAXED), begin(RELAXED), event());
        ok(cuEventRecord(mark, first));
        assert_eq!(cuStreamWaitEvent(second, mark, 0), 902);
        assert_eq!((end(first), end(second)), (INVALIDATED, INVALIDATED));
    });
}

/// A capture and a stream that joined it.
fn fork(mode: c_int) -> (usize, usize) {
    let (origin, joined, mark) = (begin(mode), stream(), event());
    ok(cuEventRecord(mark, origin));
    ok(cuStreamWaitEvent(joined, mark, 0));
    (origin, joined)
}

#[test]
fn a_capture_ends_where_it_began() {
    passes("a_capture_ends_where_it_began", &[], || {
        use_device();
        let (_origin, joined) = fork(RELAXED);
        assert_eq!(end(joined), 903);
    });
}

#[test]
fn a_stream_that_joined_must_come_back() {
    passes("a_stream_that_joined_must_come_back", &[], || {
        use_device();
        let out = device_copy(&[0i32]);
        kernel("set_n");
        let (origin, joined) = fork(RELAXED);
        ok(set(out, 5, joined));
        assert_eq!(end(origin), 904);
        let (origin, joined) = fork(RELAXED);
        ok(set(out, 5, joined));
        let mark = event();
        ok(cuEventRecord(mark, joined));
        ok(cuStreamWaitEvent(origin, mark, 0));
        let replay = instance(origin);
        ok(cuGraphLaunch(replay, origin));
        ok(cuStreamSynchronize(origin));
        assert_eq!(host_copy::<i32>(out, 1), [5]);
        // Both are out of it.
        ok(cuStreamQuery(joined));
    });
}

#[test]
fn a_capture_depends_on_nothing_outside_of_it() {
    passes("a_capture_depends_on_nothing_outside_of_it", &[], || {
        use_device();
        let (other, mark) = (stream(), event());
        ok(cuEventRecord(mark, other));
        let stream = begin(RELAXED);
        assert_eq!(cuStreamWaitEvent(stream, mark, 0), 905);
        assert_eq!(end(stream), INVALIDATED);
    });
}

#[test]
fn the_legacy_stream_spoils_captures_of_blocking_streams() {
    passes(
        "the_legacy_stream_spoils_captures_of_blocking_streams",
        &[],
        || {
            use_device();
            let out = device_copy(&[0i32]);
            kernel("set_n");
            let blocking = made(|stream| cuStreamCreate(stream, 0));
            ok(cuStreamBeginCapture_v2(blocking, RELAXED));
            assert_eq!(set(out, 5, 0), 906);
            assert_eq!(end(blocking), INVALIDATED);
            let other = begin(RELAXED);
            ok(set(out, 5, 0));
            ok(end(other));
            assert_eq!(cuStreamBeginCapture_v2(0, RELAXED), 1);
        },
    );
}

#[test]
fn an_event_of_a_capture_cannot_be_asked() {
    passes("an_event_of_a_capture_cannot_be_asked", &[], || {
        use_device();
        for call in [cuEventSynchronize, cuEventQuery] {
            let (stream, mark) = (begin(RELAXED), event());
            ok(cuEventRecord(mark, stream));
            assert_eq!(call(mark), 907);
            assert_eq!(end(stream), INVALIDATED);
        }
    });
}

#[test]
fn a_capture_ends_in_its_thread_unless_it_is_relaxed() {
    passes("a_capture_ends_in_its_thread_unless_it_is_relaxed", &[], || {
        use_device();
        for mode in [GLOBAL, THREAD_LOCAL] {
            let stream = begin(mode);
            assert_eq!(elsewhere(|| end(stream)), 908);
            ok(end(stream));
        }
        let stream = begin(RELAXED);
        ok(elsewhere(|| end(stream)));
    });
}

#[test]
fn nothing_runs_until_the_replay_and_parameters_stay() {
    passes("nothing_runs_until_the_replay_and_parameters_stay", &[], || {
        use_device();
        let (out, input) = (device_copy(&[1i32, 2]), device_copy(&[5i32]));
        kernel("set_n");
        let stream = begin(RELAXED);
        ok(set(out, 3, stream));
        ok(launch(
            "copy_ints",
            [1, 1, 0],
            stream,
            Args {
                out: out + 4,
                input,
                n: 1,
            },
        ));
        let replay = instance(stream);
        assert_eq!(host_copy::<i32>(out, 2), [1, 2]);
        ok(cuGraphLaunch(replay, stream));
        assert_eq!(host_copy::<i32>(out, 2), [3, 5]);
        // What memory holds is read by each replay; what parameters were is not.
        ok(cuMemcpyHtoD_v2(input, [6i32].as_ptr().cast(), 4));
        ok(set(out, 4, stream));
        ok(cuGraphLaunch(replay, stream));
        assert_eq!(host_copy::<i32>(out, 2), [3, 6]);
    });
}

#[test]
fn pageable_memory_is_read_and_written_by_each_replay() {
    passes("pageable_memory_is_read_and_written_by_each_replay", &[], || {
        use_device();
        let out = device_copy(&[0i32]);
        let (source, target) = (
            Box::leak(Box::new([1i32])).as_mut_ptr(),
            Box::leak(Box::new([0i32])).as_mut_ptr(),
        );
        let stream = begin(RELAXED);
        ok(cuMemcpyHtoDAsync_v2(out, source.cast(), 4, stream));
        ok(cuMemcpyDtoHAsync_v2(target.cast(), out, 4, stream));
        let replay = instance(stream);
        for value in [2, 3] {
            // SAFETY: leaked above; no replay is under way.
            unsafe { source.write_volatile(value) };
            ok(cuGraphLaunch(replay, stream));
            ok(cuStreamSynchronize(stream));
            // SAFETY: as above.
            assert_eq!(unsafe { target.read_volatile() }, value);
        }
    });
}
