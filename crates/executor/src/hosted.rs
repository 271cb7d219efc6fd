//! Executors of this crate: a [`World`], and a way to end it. Everything else is the world's.

use crate::world::World;
use crate::{
    Executor, ExecutorError, ExecutorEvent, Health, MethodCall, RankReply, ShutdownReport, Waker, WorldInfo,
};
use denoised_types::{CallId, Failure, RequestId};
use denoised_wire::Wave;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What differs between the executors here.
pub(crate) trait Hosted: Send + Sync + fmt::Debug {
    /// The world it started.
    fn hosted(&self) -> &Arc<World>;

    /// As [`Executor::shutdown`].
    fn end(&self, budget: Duration) -> ShutdownReport;
}

impl<T: Hosted> Executor for T {
    fn world(&self) -> WorldInfo {
        self.hosted().info().clone()
    }

    fn dispatch(&self, wave: Wave, deadline: Instant) -> Result<CallId, ExecutorError> {
        self.hosted().dispatch(wave, deadline)
    }

    fn cancel(&self, requests: &[RequestId], _deadline: Instant) -> Result<(), ExecutorError> {
        self.hosted().cancel(requests)
    }

    fn wait_events(&self, until: Instant) -> Vec<ExecutorEvent> {
        self.hosted().wait_events(until)
    }

    fn waker(&self) -> Waker {
        self.hosted().waker()
    }

    fn call(&self, call: &MethodCall<'_>) -> Result<Vec<RankReply>, ExecutorError> {
        self.hosted().call(call)
    }

    fn health(&self, limit: Duration) -> Health {
        self.hosted().health(limit)
    }

    fn failure(&self) -> Option<Failure> {
        self.hosted().failure()
    }

    fn on_failure(&self, callback: Box<dyn FnOnce(&Failure) + Send>) {
        self.hosted().on_failure(callback);
    }

    fn shutdown(&self, budget: Duration) -> ShutdownReport {
        self.end(budget)
    }
}
