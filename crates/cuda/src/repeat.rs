//! Recordings: what a body enqueues, captured once as a CUDA graph and replayed.
//!
//! R1. The first call of a key runs the body: algorithms are chosen and functions looked up then. The second records, later ones replay.
//! R2. A recording has inputs of its own, which the caller's are copied to, and its outputs are copied from: it may be replayed at once
//!     while the caller still holds the last results.
//! R3. A body that cannot be recorded runs by itself from then on; that costs time and nothing else.
//! R4. As many recordings are kept as [`crate::CudaOptions::max_recordings`] says, the latest used ones; all are given up for memory.
//! R5. A body whose recordings found no memory, or were given up for it before they paid, runs by itself after a few of them.
//!
//! The capture is relaxed: this thread is the only one that uses the stream, and what it does meanwhile (memory and constants on the side
//! stream) is meant to happen at once.

use crate::{
    device::{Device, Launch, driver_failure},
    memory::{Arena, Memory},
};
use cudarc::driver::{
    result::{graph, stream},
    sys,
};
use denoised_tensor::{Backend, DType, Result, Tensor, TensorError, WeightSet};
use std::{
    cell::{Cell, RefCell},
    fmt,
    rc::Rc,
    sync::Arc,
};

/// A body, and the inputs that its ops were enqueued for.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Key {
    key: u64,
    inputs: Vec<(Vec<usize>, DType)>,
}

impl Key {
    fn new(key: u64, inputs: &[&Tensor]) -> Self {
        let inputs = inputs.iter().map(|input| (input.dims().to_vec(), input.dtype()));
        Self {
            key,
            inputs: inputs.collect(),
        }
    }
}

/// Recordings for nothing after which there are no more, and replays after which one was for something.
const MAX_WASTED: u32 = 3;
const MIN_REPLAYS: u32 = 8;

/// What is known of a key.
enum Entry {
    /// It ran, and so many recordings in a row were for nothing (R5).
    Seen {
        n_wasted: u32,
    },
    /// It cannot be recorded.
    Refused,
    Recorded(Rc<Recorded>),
}

impl Entry {
    /// After the last of `n_wasted` recordings that were for nothing.
    fn wasted(n_wasted: u32) -> Self {
        if n_wasted < MAX_WASTED {
            Self::Seen { n_wasted }
        } else {
            Self::Refused
        }
    }
}

/// A captured body.
struct Recorded {
    exec: sys::CUgraphExec,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
    n_launches: usize,
    n_replays: Cell<u32>,
    /// Of the same body, before this one (R5).
    n_wasted: u32,
    /// What its kernels have the addresses of.
    arena: Rc<Arena>,
    _weights: Vec<Arc<dyn WeightSet>>,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: instantiated once, destroyed once; the driver finishes replays that are under way.
        let _ = unsafe { graph::exec_destroy(self.exec) };
    }
}

/// All recordings of a backend, the latest used last.
#[derive(Clone)]
pub(crate) struct Recordings {
    entries: Rc<RefCell<Vec<(Key, Entry)>>>,
    max_recordings: usize,
}

/// Keys that are remembered beyond those that are recorded.
const MAX_KEYS: usize = 256;

impl fmt::Debug for Recordings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Recordings({} of {} bytes)",
            self.n_recordings(),
            self.n_bytes()
        )
    }
}

impl Recordings {
    pub(crate) fn new(max_recordings: usize) -> Self {
        Self {
            entries: Rc::default(),
            max_recordings,
        }
    }

    fn recorded(&self) -> Vec<Rc<Recorded>> {
        let of = |(_, entry): &(Key, Entry)| match entry {
            Entry::Recorded(recorded) => Some(Rc::clone(recorded)),
            Entry::Seen { .. } | Entry::Refused => None,
        };
        self.entries.borrow().iter().filter_map(of).collect()
    }

    /// How many there are.
    pub(crate) fn n_recordings(&self) -> usize {
        self.recorded().len()
    }

    /// Memory that they hold.
    pub(crate) fn n_bytes(&self) -> usize {
        self.recorded()
            .iter()
            .map(|recorded| recorded.arena.n_bytes())
            .sum()
    }

    /// Gives all of them up.
    pub(crate) fn clear(&self) {
        let mut given_up = Vec::new();
        for (_, entry) in self.entries.borrow_mut().iter_mut() {
            if let Entry::Recorded(recorded) = entry {
                let has_paid = recorded.n_replays.get() >= MIN_REPLAYS;
                let left = Entry::wasted(if has_paid { 0 } else { recorded.n_wasted + 1 });
                given_up.push(std::mem::replace(entry, left));
            }
        }
    }

    /// Takes what is known of a key out of the list.
    fn remove(&self, key: &Key) -> Option<Entry> {
        let mut entries = self.entries.borrow_mut();
        let idx = entries.iter().position(|(own, _)| own == key)?;
        Some(entries.remove(idx).1)
    }

    /// Puts it back as the latest used; the longest unused recordings go.
    fn put(&self, key: Key, entry: Entry) {
        let mut entries = self.entries.borrow_mut();
        entries.push((key, entry));
        let is_recorded = |(_, entry): &(Key, Entry)| matches!(entry, Entry::Recorded(_));
        let mut n_over = entries
            .iter()
            .filter(|entry| is_recorded(entry))
            .count()
            .saturating_sub(self.max_recordings);
        entries.retain(|entry| {
            let goes = n_over > 0 && is_recorded(entry);
            n_over -= usize::from(goes);
            !goes
        });
        let n_forgotten = entries.len().saturating_sub(MAX_KEYS);
        entries.drain(..n_forgotten);
    }
}

/// Runs, records or replays `body`.
pub(crate) fn repeat(
    backend: &dyn Backend,
    device: &Device,
    memory: &Memory,
    recordings: &Recordings,
    key: u64,
    inputs: &[&Tensor],
    body: &mut dyn FnMut(&[&Tensor]) -> Result<Vec<Tensor>>,
) -> Result<Vec<Tensor>> {
    if recordings.max_recordings == 0 || device.is_checked() || device.is_recording() {
        return body(inputs);
    }
    let key = Key::new(key, inputs);
    match recordings.remove(&key) {
        None => {
            let outputs = body(inputs)?;
            recordings.put(key, Entry::Seen { n_wasted: 0 });
            Ok(outputs)
        }
        Some(Entry::Refused) => {
            recordings.put(key, Entry::Refused);
            body(inputs)
        }
        Some(Entry::Recorded(recorded)) => {
            let outputs = recorded.replay(backend, device, inputs);
            recordings.put(key, Entry::Recorded(recorded));
            outputs
        }
        Some(Entry::Seen { n_wasted }) => match record(backend, device, memory, inputs, body) {
            Ok(mut recorded) => {
                recorded.n_wasted = n_wasted;
                let recorded = Rc::new(recorded);
                let outputs = recorded.replay(backend, device, inputs);
                recordings.put(key, Entry::Recorded(recorded));
                outputs
            }
            Err(error) => {
                device.check_alive()?;
                // Without the other recordings there may be memory enough; anything else will be the same again.
                let entry = match &error {
                    TensorError::OutOfMemory { .. } => {
                        recordings.clear();
                        Entry::wasted(n_wasted + 1)
                    }
                    _ => Entry::Refused,
                };
                tracing::warn!("a step is not recorded and runs op by op, which is slower: {error}");
                let outputs = body(inputs)?;
                recordings.put(key, entry);
                Ok(outputs)
            }
        },
    }
}

fn record(
    backend: &dyn Backend,
    device: &Device,
    memory: &Memory,
    inputs: &[&Tensor],
    body: &mut dyn FnMut(&[&Tensor]) -> Result<Vec<Tensor>>,
) -> Result<Recorded> {
    let arena = memory.begin_arena();
    let own = inputs
        .iter()
        .map(|input| backend.alloc(input.dims(), input.dtype()));
    let own: Result<Vec<Tensor>> = own.collect();
    let captured = own.and_then(|own| capture(device, &own, body).map(|captured| (own, captured)));
    memory.end_arena();
    let (inputs, (graph, outputs, noted)) = captured?;
    // SAFETY: `graph` was captured above and is destroyed here, once.
    let exec = unsafe {
        let exec = graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
        let _ = graph::destroy(graph);
        device.check("making a recording", exec)?
    };
    Ok(Recorded {
        exec,
        inputs,
        outputs,
        n_launches: noted.n_launches,
        n_replays: Cell::new(0),
        n_wasted: 0,
        arena,
        _weights: noted.weights,
    })
}

/// Runs `body` while the stream records instead of executing.
fn capture(
    device: &Device,
    inputs: &[Tensor],
    body: &mut dyn FnMut(&[&Tensor]) -> Result<Vec<Tensor>>,
) -> Result<(sys::CUgraph, Vec<Tensor>, crate::device::Recording)> {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream is this device's, and no capture is under way: repetitions do not nest.
    let began = unsafe { stream::begin_capture(device.stream(), mode) };
    device.check("beginning a recording", began)?;
    device.begin_recording();
    let outputs = body(&inputs.iter().collect::<Vec<_>>());
    let noted = device.end_recording();
    // SAFETY: begun above; ended whatever the body did.
    let graph = unsafe { stream::end_capture(device.stream()) };
    match (outputs, graph) {
        (Ok(outputs), Ok(graph)) if !graph.is_null() => Ok((graph, outputs, noted)),
        (outputs, graph) => {
            if let Ok(graph) = graph {
                // SAFETY: captured above, destroyed once; a null graph is refused by the driver.
                let _ = unsafe { graph::destroy(graph) };
            }
            outputs?;
            let error = graph.err().unwrap_or(cudarc::driver::DriverError(
                sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            ));
            Err(driver_failure("ending a recording", error))
        }
    }
}

impl Recorded {
    fn replay(&self, backend: &dyn Backend, device: &Device, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        self.n_replays.set(self.n_replays.get().saturating_add(1));
        for (input, own) in inputs.iter().zip(&self.inputs) {
            backend.copy(input, own)?;
        }
        let launch = Launch::named(format!("a recording of {} launches", self.n_launches));
        device.enqueue(launch, || {
            // SAFETY: the graph's memory, weights and functions live as long as `self`.
            let answer = unsafe { graph::launch(self.exec, device.stream()) };
            device.check("a recording", answer)
        })?;
        let copied = self.outputs.iter().map(|output| {
            let copy = backend.alloc(output.dims(), output.dtype())?;
            backend.copy(output, &copy)?;
            Ok(copy)
        });
        copied.collect()
    }
}
