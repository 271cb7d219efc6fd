//! How a model turns a request into pixels, one phase at a time, so that a worker can report, cancel and batch between them.
//!
//! Knows nothing of processes, waves or who is waiting.

use crate::ModelError;
use denoised_tensor::{Backend, MemoryStats, Prepared, WeightSource, WeightSpec};
use denoised_types::{Failure, GenerateRequest, Image, ModelInfo, NamedTensor, Resolved};
use std::{any::Any, fmt, rc::Rc};

/// A checkpoint whose configs were read and whose structure is known; no weight was touched, no device needed.
pub trait Model: fmt::Debug {
    /// What it is.
    fn info(&self) -> &ModelInfo;

    /// Every weight the model needs, in the order in which [`Model::load`] wants the handles.
    fn weight_specs(&self) -> &[WeightSpec];

    /// Where they come from.
    fn weight_source(&self) -> &dyn WeightSource;

    /// Joins structure and prepared weights.
    ///
    /// # Errors
    /// [`ModelError`] if `prepared` does not match [`Model::weight_specs`].
    fn load(
        self: Box<Self>,
        backend: Rc<dyn Backend>,
        prepared: Prepared,
    ) -> Result<Box<dyn Pipeline>, ModelError>;
}

/// A loaded model. All calls come from one thread.
///
/// Every error is a [`Failure`] of one request; which ones end the world is decided by its code.
pub trait Pipeline: fmt::Debug {
    /// What it is.
    fn info(&self) -> &ModelInfo;

    /// Checks a request against the model and fills in its defaults.
    ///
    /// # Errors
    /// `InvalidRequest` naming the field, what was given and what would do (a size off the grid: the nearest valid sizes).
    fn resolve(&self, request: &GenerateRequest) -> Result<Resolved, Failure>;

    /// Tokenizes and encodes the prompt, makes the initial latents and the sampler's schedule.
    ///
    /// # Errors
    /// As [`Pipeline::resolve`], or the device's.
    fn begin(&self, request: &GenerateRequest) -> Result<Box<dyn Running>, Failure>;

    /// Runs the next step of every member, in one forward. Members share [`Running::batch_key`]; each gets bit for bit what it would
    /// get alone. Members whose latents become NaN or infinite fail alone.
    ///
    /// # Errors
    /// The outer result is the device's (all members are lost); the inner ones belong to their member.
    fn step(&self, members: &mut [&mut dyn Running]) -> Result<Vec<Result<(), Failure>>, Failure>;

    /// Latents to picture; in f32 if half precision gives NaN or infinity. With trace capture the f32 picture goes to the trace as `image`.
    ///
    /// # Errors
    /// `NonFinite` rather than a black picture, or the device's.
    fn decode(&self, running: &mut dyn Running) -> Result<Image, Failure>;

    /// What the device holds beside the weights that the model was loaded with.
    fn memory(&self) -> MemoryStats;
}

/// A request inside a pipeline: conditioning, latents and the state of its sampler.
pub trait Running: Any + fmt::Debug {
    /// For the pipeline that made it.
    fn as_any_mut(&mut self) -> &mut dyn Any;

    /// The arguments as they were resolved.
    fn resolved(&self) -> &Resolved;

    /// Steps that are done.
    fn step_idx(&self) -> u32;

    /// Steps there will be.
    fn n_steps(&self) -> u32;

    /// Requests with equal keys may share a step: same latents shape, same conditioning shape, guidance on or off alike.
    fn batch_key(&self) -> u64;

    /// Takes the tensors traced since the last call.
    fn take_trace(&mut self) -> Vec<NamedTensor>;
}
