//! Replies of the methods that every worker has.

use crate::DecodeError;
use denoised_types::{CallId, Mode, Rank, RequestId, WaveId};
use serde::{Deserialize, Serialize};

/// Reply of the method `memory`: what the worker's process holds. In `uni` that is the whole program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerMemory {
    /// Everything mapped and present, in bytes.
    pub rss_bytes: u64,
    /// As `rss_bytes`, but each shared page counts by its share of the processes that map it.
    pub pss_bytes: u64,
    /// Pages that no other process maps, in bytes.
    pub private_bytes: u64,
    /// Activations and scratch on the device when the program last told of them, in bytes; with device `cpu` they are part of the others.
    pub device_used_bytes: u64,
    /// Most that this was.
    pub device_peak_bytes: u64,
}

/// Reply of the method `status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Who.
    pub rank: Rank,
    /// Its process.
    pub pid: u32,
    /// Threads it computes with, where the executor set them.
    pub n_threads: Option<u32>,
    /// Waves carried out so far.
    pub n_waves: u64,
    /// Methods run so far, this one not counted.
    pub n_calls: u64,
    /// What it holds.
    pub memory: WorkerMemory,
}

/// A piece of what a rank does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// It waits for a command.
    Wait,
    /// A wave, from its first member's begin to its answer.
    Wave {
        /// Which.
        wave_id: WaveId,
        /// Whole generations or one step.
        mode: Mode,
    },
    /// The begin of a request: prompt encoding, initial latents.
    Encode {
        /// Which.
        request_id: RequestId,
    },
    /// One forward of the denoiser for these requests, each with the index of its step.
    Step {
        /// Who shares it.
        members: Vec<(RequestId, u32)>,
    },
    /// Latents to picture.
    Decode {
        /// Which.
        request_id: RequestId,
    },
    /// A method of the data lane.
    Method {
        /// Its name.
        name: String,
    },
}

/// How far a request is on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberProgress {
    /// Which.
    pub request_id: RequestId,
    /// Steps that are done.
    pub n_done: u32,
    /// Steps there will be; 0 until the first one is done.
    pub n_steps: u32,
}

/// What a rank is at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Doing {
    /// It has not told yet that it is ready.
    Start,
    /// Nothing: it waits for a command.
    Nothing,
    /// A method of the data lane.
    Method {
        /// Its name.
        name: String,
    },
    /// A wave.
    Wave {
        /// Which.
        wave_id: WaveId,
        /// Whole generations or one step.
        mode: Mode,
        /// Its members that have not ended.
        members: Vec<MemberProgress>,
        /// What is computed now; `None` between two pieces, and for programs that do not say.
        work: Option<Work>,
    },
    /// It finishes.
    End,
}

/// Reply of the method `progress`. Times are of the host's monotonic clock, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankProgress {
    /// Who.
    pub rank: Rank,
    /// When this was written.
    pub now_ns: u64,
    /// What it does.
    pub doing: Doing,
    /// Since when.
    pub since_ns: u64,
    /// When it last got on: began or ended something, or finished a step.
    pub moved_ns: u64,
    /// The last call of the data lane that it began; 0 for none. A rank that does nothing, has begun this call or a later one and has
    /// not answered it, never will.
    pub last_call_id: CallId,
    /// Commands of the data lane that it has taken in and not begun. More may lie in the ring: a rank that computes takes them in
    /// between steps.
    pub n_waiting: u32,
    /// Requests that earlier waves in step mode began, and that are in no wave now.
    pub residents: Vec<MemberProgress>,
}

/// A stretch of time that a rank spent on one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// On what.
    pub work: Work,
    /// From when on, on the host's monotonic clock in nanoseconds.
    pub begin_ns: u64,
    /// How long, in nanoseconds.
    pub duration_ns: u64,
}

/// Reply of the method `profile_stop`: what ended between the two calls, in the order in which it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// Who.
    pub rank: Rank,
    /// When the recording began, on the host's monotonic clock in nanoseconds.
    pub begin_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// What was recorded. Pieces of a wave lie within the wave's own span.
    pub spans: Vec<Span>,
    /// Spans that found no room.
    pub n_dropped: u64,
}

macro_rules! replies {
    ($($name:ident: $what:literal,)+) => {
        $(impl $name {
            /// The reply's bytes.
            pub fn to_bytes(&self) -> Vec<u8> {
                crate::codec::body(self)
            }

            #[doc = concat!("The ", $what, " in a reply.")]
            ///
            /// # Errors
            /// The bytes are no such reply.
            pub fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
                crate::codec::decode($what, bytes)
            }
        })+
    };
}

replies! {
    WorkerMemory: "worker memory",
    WorkerStatus: "worker status",
    RankProgress: "worker progress",
    Profile: "worker profile",
}
