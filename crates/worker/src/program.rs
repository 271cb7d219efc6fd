//! What a rank runs: the seam between obeying commands (`serve`, `control`) and computing (`pipeline_program`, or a test's script).

use denoised_types::{
    Failure, GenerateRequest, Generated, ModelInfo, NamedTensor, Rank, RequestId, WorkerConfig,
};
use denoised_wire::StartPhase;
use std::os::fd::OwnedFd;

/// Starts a program on this rank. Runs once, on the thread that will drive the program.
pub trait Start {
    /// Opens the device, reads the model, prepares the weights. Reports phases as it goes. A program that shares nothing calls
    /// neither [`StartContext::publish_shared`] nor [`StartContext::await_shared`].
    ///
    /// # Errors
    /// Ends the start of the whole world with this failure.
    fn start(&mut self, context: &mut dyn StartContext) -> Result<(Box<dyn Program>, Started), Failure>;
}

/// What a starting program may ask for.
pub trait StartContext {
    /// What to load.
    fn config(&self) -> &WorkerConfig;

    /// This rank, and how many there are.
    fn place(&self) -> (Rank, u16);

    /// Reports progress.
    fn phase(&mut self, phase: StartPhase);

    /// Hands prepared weights to the other ranks of this host. Called by rank 0 only, with `None` if there is nothing to share.
    ///
    /// # Errors
    /// The executor is gone.
    fn publish_shared(&mut self, weights: Option<OwnedFd>) -> Result<(), Failure>;

    /// Waits for what rank 0 of this host published. Called by the other ranks only.
    ///
    /// # Errors
    /// The executor is gone, or rank 0 failed.
    fn await_shared(&mut self) -> Result<Option<OwnedFd>, Failure>;
}

/// What a started program tells about itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Started {
    /// The model.
    pub model: Option<ModelInfo>,
    /// Bytes of its weights.
    pub weight_bytes: u64,
}

/// A member of a wave, on the worker's side.
#[derive(Clone, Debug)]
pub struct WaveMember {
    /// Its id.
    pub request_id: RequestId,
    /// What was asked, with its latents.
    pub request: GenerateRequest,
    /// Absolute deadline on the monotonic clock in nanoseconds, 0 for none.
    pub deadline_ns: u64,
}

/// One rank's computation.
pub trait Program {
    /// Carries out a wave of whole generations. Every member ends with exactly one [`WaveSink::done`].
    ///
    /// # Errors
    /// The rank as a whole cannot go on (a poisoned device): the world ends. Members without an end are failed by the caller.
    fn run_wave(&mut self, members: Vec<WaveMember>, sink: &mut dyn WaveSink) -> Result<(), Failure>;

    /// Runs one of the program's own methods.
    ///
    /// # Errors
    /// The method's; `None` if there is no such method.
    fn call(&mut self, method: &str, args: &[u8]) -> Option<Result<Vec<u8>, Failure>>;
}

/// Where a wave's results go, and what it must listen to between steps.
pub trait WaveSink {
    /// A member was begun.
    fn started(&mut self, request_id: RequestId);

    /// A step of a member is done (`n_done` in `1..=n_steps`).
    fn step(&mut self, request_id: RequestId, n_done: u32, n_steps: u32);

    /// A traced tensor of a member. Sent at once, so that a trace needs no more memory than its largest tensor.
    fn tensor(&mut self, request_id: RequestId, tensor: NamedTensor);

    /// A member ended. `Generated::tensors` is empty and `Generated::rank` is filled in by the sink.
    fn done(&mut self, request_id: RequestId, outcome: Result<Generated, Failure>);

    /// Why a member must stop now: cancelled, past its deadline, or the worker is stopping. Asked between steps.
    fn stop_reason(&self, request_id: RequestId, deadline_ns: u64) -> Option<Failure>;
}
