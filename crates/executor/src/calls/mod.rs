//! What is in flight: waves and their requests, method calls, questions for signs of life. Pure: events in, outcomes out.

mod method;
mod pieces;
mod ping;
mod requests;
mod wave;

#[cfg(test)]
mod histories;

pub(crate) use method::OpenMethod;
pub(crate) use ping::{PingCall, ProbeCall};
pub(crate) use requests::{Requests, Unfit};
pub(crate) use wave::WaveCall;

use std::thread::Thread;

/// One call in flight.
#[derive(Debug)]
pub(crate) enum Call {
    Method(OpenMethod),
    Wave(WaveCall),
    Ping(PingCall),
    Probe(ProbeCall),
}

impl Call {
    /// The thread that waits for it; waves are the engine's, probes the monitor's.
    pub(crate) fn waiter(&self) -> Option<&Thread> {
        match self {
            Self::Method(call) => Some(&call.waiter),
            Self::Ping(ping) => Some(&ping.waiter),
            Self::Wave(_) | Self::Probe(_) => None,
        }
    }

    /// Whether its waiter has what it waits for.
    pub(crate) fn is_answered(&self) -> bool {
        match self {
            Self::Method(call) => call.is_complete(),
            Self::Ping(ping) => ping.is_complete(),
            Self::Wave(_) | Self::Probe(_) => false,
        }
    }
}
