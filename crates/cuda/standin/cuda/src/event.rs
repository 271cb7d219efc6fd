//! Events: marks in streams that others wait for.

use crate::{
    api, device,
    error::{CAPTURED_EVENT, INVALID_HANDLE, NOT_READY, Outcome, STREAM_CAPTURE_ISOLATION, STREAM_CAPTURE_MERGE},
    stream::{self, Capture, fresh_handle, locked},
};
use std::{
    collections::BTreeMap,
    ffi::c_uint,
    sync::{Arc, Condvar, LazyLock, Mutex},
    time::Instant,
};

#[derive(Default)]
struct Event {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Records that were asked for and that were reached.
    issued: u64,
    reached: u64,
    when: Option<Instant>,
    /// The capture and stream that it was last recorded in, if it was one.
    captured: Option<(Arc<Capture>, usize)>,
}

static EVENTS: LazyLock<Mutex<BTreeMap<usize, Arc<Event>>>> = LazyLock::new(Mutex::default);

fn event(handle: usize) -> Outcome<Arc<Event>> {
    locked(&EVENTS).get(&handle).cloned().ok_or(INVALID_HANDLE)
}

impl Event {
    /// An event of a capture tells nothing outside of it.
    fn refuse_captured(&self) -> Outcome {
        match &locked(&self.state).captured {
            None => Ok(()),
            Some((capture, _)) => {
                capture.invalidate();
                Err(CAPTURED_EVENT)
            }
        }
    }

    fn wait_for(&self, ticket: u64) {
        let mut state = locked(&self.state);
        while state.reached < ticket {
            state = self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }
}

api! {
    /// A new event.
    fn cuEventCreate(handle: *mut usize, _flags: c_uint) {
        let own = fresh_handle();
        locked(&EVENTS).insert(own, Arc::default());
        unsafe { *handle = own };
        Ok(())
    }
    /// Gives an event back.
    fn cuEventDestroy_v2(handle: usize) { locked(&EVENTS).remove(&handle).map(|_| ()).ok_or(INVALID_HANDLE) }
    /// Marks where the stream is.
    fn cuEventRecord(handle: usize, stream_handle: usize) {
        let (event, stream) = (event(handle)?, stream::stream(stream_handle)?);
        let mut state = locked(&event.state);
        if let Some(capture) = stream.capture() {
            state.captured = Some((capture, stream_handle));
            return Ok(());
        }
        state.captured = None;
        state.issued += 1;
        let ticket = state.issued;
        drop(state);
        let told = Arc::clone(&event);
        stream.push(Arc::new(move || {
            let mut state = locked(&told.state);
            state.reached = state.reached.max(ticket);
            state.when = Some(Instant::now());
            told.changed.notify_all();
            Ok(())
        }))
    }
    /// Has a stream wait for the mark.
    fn cuStreamWaitEvent(stream_handle: usize, handle: usize, _flags: c_uint) {
        let (event, stream) = (event(handle)?, stream::stream(stream_handle)?);
        let state = locked(&event.state);
        match (&state.captured, stream.capture()) {
            (Some((captured, from)), Some(own)) if Arc::ptr_eq(captured, &own) => own.rejoin(stream_handle, *from),
            (Some((captured, _)), Some(own)) => {
                captured.invalidate();
                own.invalidate();
                return Err(STREAM_CAPTURE_MERGE);
            }
            (Some((captured, _)), None) => stream.join(captured),
            (None, Some(own)) => {
                own.invalidate();
                return Err(STREAM_CAPTURE_ISOLATION);
            }
            (None, None) => {
                let ticket = state.issued;
                drop(state);
                let waited = Arc::clone(&event);
                return stream.push(Arc::new(move || { waited.wait_for(ticket); Ok(()) }));
            }
        }
        Ok(())
    }
    /// Waits for the mark.
    fn cuEventSynchronize(handle: usize) {
        let event = event(handle)?;
        event.refuse_captured()?;
        let ticket = locked(&event.state).issued;
        event.wait_for(ticket);
        device::current().map(|_| ())
    }
    /// Whether the mark was reached.
    fn cuEventQuery(handle: usize) {
        let event = event(handle)?;
        event.refuse_captured()?;
        let state = locked(&event.state);
        if state.reached < state.issued { Err(NOT_READY) } else { Ok(()) }
    }
    /// Milliseconds between two marks.
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, first: usize, second: usize) {
        let when = |handle| -> Outcome<Instant> {
            let event = event(handle)?;
            event.refuse_captured()?;
            let state = locked(&event.state);
            if state.reached < state.issued { return Err(NOT_READY) }
            state.when.ok_or(INVALID_HANDLE)
        };
        let (first, second) = (when(first)?, when(second)?);
        unsafe { *milliseconds = second.saturating_duration_since(first).as_secs_f32() * 1e3 };
        Ok(())
    }
}
