//! How a world of workers comes to exist, is addressed, fails and dies.
//!
//! Knows nothing of families, tensors, scheduling or HTTP.
//!
//! R1. Start is a transaction: either every rank is ready, or everything is undone and the error lists each rank.
//! R2. Failing has an order: latch the first cause, fail the pending calls, run callbacks, only then tear down.
//! R3. Every wait has a deadline. Nobody but this crate signals or reaps a worker.
//! R4. One thread drives [`Executor::wait_events`]; every other method may be called from any thread at any time.
#![forbid(unsafe_code)]

mod contract;

pub use contract::{
    CallTarget, Executor, ExecutorError, ExecutorEvent, Health, RankExit, RankReply, ShutdownReport, Waker,
    WorldInfo,
};
