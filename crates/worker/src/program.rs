//! What a rank runs: the seam between obeying commands (`serve`, `control`) and computing (`pipeline_program`, or a test's script).

use denoised_tensor::MemoryStats;
use denoised_types::{
    Failure, GenerateRequest, Generated, ModelInfo, NamedTensor, Rank, RequestId, WorkerConfig, WorkerDevice,
};
use denoised_wire::StartPhase;
use std::{any::Any, os::fd::OwnedFd};

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
    /// What it computes with.
    pub device: Option<WorkerDevice>,
    /// Bytes of its weights.
    pub weight_bytes: u64,
    /// Memory of the device beside the weights, after the start.
    pub memory: MemoryStats,
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

/// A wave in step mode, on the worker's side. No request is in two of its lists.
#[derive(Clone, Debug, Default)]
pub struct StepWave {
    /// Requests to begin, and to take one step.
    pub joining: Vec<WaveMember>,
    /// Requests that an earlier wave began and that have not ended: one more step each, before the joining ones.
    pub continuing: Vec<RequestId>,
    /// Requests that an earlier wave began and that are to be dropped before anything is computed.
    pub cancelled: Vec<RequestId>,
    /// Names of all adapters that joining and continuing requests use, the same on every rank.
    pub adapters: Vec<String>,
}

/// One rank's computation. What a request gets is the same bits in either mode, alone or with others.
pub trait Program: Any {
    /// Carries out a wave of whole generations. Every member ends with exactly one [`WaveSink::done`].
    ///
    /// # Errors
    /// The rank as a whole cannot go on (a poisoned device): the world ends. Members without an end are failed by the caller.
    fn run_wave(&mut self, members: Vec<WaveMember>, sink: &mut dyn WaveSink) -> Result<(), Failure>;

    /// Carries out one step of each member. A cancelled request ends with `Cancelled`; a member that did its last step is decoded and
    /// ends; one that fails ends; each other one reports its step ([`WaveSink::step`]) and stays, with all that it needs for the next
    /// one, until a later wave names it. A request that stays without having done a step is failed by the caller and named never
    /// again.
    ///
    /// All ranks of a replica are given equal waves and must do equal things: nothing here may depend on the time or on this rank
    /// alone. That is why cancels and deadlines come as [`StepWave::cancelled`]; [`WaveSink::stop_reason`] tells nothing of them here.
    ///
    /// # Errors
    /// As [`Program::run_wave`].
    fn run_step(&mut self, wave: StepWave, sink: &mut dyn WaveSink) -> Result<(), Failure>;
}

/// A piece of a wave's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage<'a> {
    /// The begin of a request.
    Encode(RequestId),
    /// One forward for these requests.
    Step(&'a [RequestId]),
    /// The picture of a request.
    Decode(RequestId),
}

/// Where a wave's results go, and what it must listen to between steps.
pub trait WaveSink {
    /// What is computed from now on, until the next event: shown by `progress` and recorded by profiles.
    fn enter(&mut self, stage: Stage<'_>);

    /// A member was begun.
    fn started(&mut self, request_id: RequestId);

    /// A step of a member is done (`n_done` in `1..=n_steps`).
    fn step(&mut self, request_id: RequestId, n_done: u32, n_steps: u32);

    /// A traced tensor of a member. Sent at once, so that a trace needs no more memory than its largest tensor.
    fn tensor(&mut self, request_id: RequestId, tensor: NamedTensor);

    /// A member ended. `Generated::tensors` is empty and `Generated::rank` is filled in by the sink.
    fn done(&mut self, request_id: RequestId, outcome: Result<Generated, Failure>);

    /// What the device holds beside the weights, now and at most: shown by `memory` and `status`.
    fn memory(&mut self, memory: MemoryStats);

    /// Why a member must stop now: in waves of whole generations cancelled, past its deadline, or the worker is stopping; in either
    /// mode, what it produced cannot be sent. Asked between steps.
    fn stop_reason(&self, request_id: RequestId, deadline_ns: u64) -> Option<Failure>;
}
