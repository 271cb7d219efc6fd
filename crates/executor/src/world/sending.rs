//! Commands on their way down.

use super::{State, World, moment};
use crate::{
    ExecutorError,
    calls::{Call, Unfit, WaveCall},
    gate::GateGuard,
};
use denoised_link::{DataSender, LinkError, RankSet};
use denoised_os::Deadline;
use denoised_types::{CallId, Failure, FailureCode, Mode, Rank, RequestId};
use denoised_wire::{BlobIdx, Command, Header, MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Wave, encode_command};
use std::{fmt, ops::ControlFlow, sync::atomic::Ordering, time::Instant};

/// Requests per cancel message, so that each fits the control lane.
const CANCELS_PER_MESSAGE: usize = 1024;

impl World {
    pub(crate) fn dispatch(&self, wave: Wave, deadline: Instant) -> Result<CallId, ExecutorError> {
        let deadline = moment(deadline);
        let to: RankSet = wave.ranks.iter().copied().collect();
        if to.is_empty() || !to.without(self.all).is_empty() || wave.ranks.iter().any(|rank| rank.0 >= 64) {
            return Err(self.no_such_rank(&format!("wave {} for ranks {:?}", wave.wave_id, wave.ranks)));
        }
        let mut wave = wave;
        let parts = take_large_parts(&mut wave);
        let blobs: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let mut sender = self.enter_gate(deadline, &"dispatching a wave")?;
        // Under the gate, so that calls reach the ranks in the order of their ids.
        let call_id = CallId(self.next_call.fetch_add(1, Ordering::Relaxed));
        let (joined, members) = {
            let mut state = self.lock();
            state.check_open()?;
            let is_told_soon = |request_id| state.is_told_soon(request_id);
            let admitted = state.requests.admit(&mut wave, to, is_told_soon);
            admitted.map_err(|Unfit(text)| refused(text))?;
            let call = WaveCall::new(&wave, to);
            let names = (call.joined.clone(), call.members.clone());
            state.requests.enter(&wave, call_id, to);
            state.owe(to, call_id);
            state.stats.n_calls += 1;
            state.calls.insert(call_id, Call::Wave(call));
            names
        };
        let command = Command::Execute(wave);
        let sent = self.transmit(&mut sender, to, (call_id, 0), &command, &blobs, deadline);
        drop(sender);
        let Err(error) = sent else { return Ok(call_id) };
        let mut state = self.lock();
        if state.calls.remove(&call_id).is_none() {
            // The world failed meanwhile and the wave got its end; its caller must not hear of both.
            return Ok(call_id);
        }
        state.requests.withdraw(&joined, &members, call_id);
        Err(not_sent(&mut state, to, call_id, error, &"dispatching a wave"))
    }

    /// Sends a command other than a wave on the data lane, with `call` waiting for its answers.
    pub(super) fn send_data(
        &self,
        to: RankSet,
        call: Call,
        command: &Command,
        blobs: &[&[u8]],
        deadline: Deadline,
        what: &dyn fmt::Display,
    ) -> Result<CallId, ExecutorError> {
        let mut sender = self.enter_gate(deadline, what)?;
        let call_id = CallId(self.next_call.fetch_add(1, Ordering::Relaxed));
        {
            let mut state = self.lock();
            state.check_open()?;
            state.owe(to, call_id);
            state.stats.n_calls += 1;
            state.calls.insert(call_id, call);
        }
        let sent = self.transmit(
            &mut sender,
            to,
            (call_id, deadline.ns()),
            command,
            blobs,
            deadline,
        );
        drop(sender);
        let Err(error) = sent else { return Ok(call_id) };
        let mut state = self.lock();
        state.calls.remove(&call_id);
        Err(not_sent(&mut state, to, call_id, error, what))
    }

    fn enter_gate(
        &self,
        deadline: Deadline,
        what: &dyn fmt::Display,
    ) -> Result<GateGuard<'_, Box<dyn DataSender>>, ExecutorError> {
        match self.gate.enter(deadline, &mut || self.while_waiting()) {
            Some(sender) => Ok(sender),
            None => {
                self.lock().check_open()?;
                Err(ExecutorError::Deadline {
                    what: what.to_string(),
                    silent: Vec::new(),
                })
            }
        }
    }

    /// While we wait for room, the ranks may be waiting for us to take their events.
    fn while_waiting(&self) -> ControlFlow<()> {
        self.pump_if_free();
        if self.lock().can_still_answer() {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    }

    fn transmit(
        &self,
        sender: &mut GateGuard<'_, Box<dyn DataSender>>,
        to: RankSet,
        (call_id, deadline_ns): (CallId, u64),
        command: &Command,
        blobs: &[&[u8]],
        deadline: Deadline,
    ) -> Result<(), LinkError> {
        let message = self.encode(call_id, deadline_ns, command);
        if message.len() > MAX_MESSAGE_BYTES {
            return Err(LinkError::TooLarge {
                message_bytes: message.len() as u64,
                limit_bytes: MAX_MESSAGE_BYTES as u64,
                limited_by: "message without its tensors",
            });
        }
        sender.send(to, &message, blobs, deadline, &mut || self.while_waiting())
    }

    pub(crate) fn cancel(&self, requests: &[RequestId]) -> Result<(), ExecutorError> {
        // The call travels along, so that a worker can tell a cancel that comes too late from one that overtook its wave.
        let mut wanted: Vec<(CallId, RankSet, Vec<RequestId>)> = Vec::new();
        {
            let state = self.lock();
            state.check_open()?;
            for (&call_id, call) in &state.calls {
                let Call::Wave(wave) = call else { continue };
                if wave.mode == Mode::Step {
                    continue;
                }
                let is_open = |id: &RequestId| wave.members.contains(id) && state.requests.get(*id).is_some();
                let members: Vec<RequestId> = requests.iter().copied().filter(is_open).collect();
                if !members.is_empty() {
                    wanted.push((call_id, wave.ranks.without(wave.ended), members));
                }
            }
        }
        for (call_id, ranks, members) in wanted {
            for part in members.chunks(CANCELS_PER_MESSAGE) {
                let requests = part.to_vec();
                let message = self.encode(call_id, 0, &Command::Cancel { requests });
                for rank in ranks.iter() {
                    self.send_control(rank, &message)
                        .map_err(|error| ExecutorError::Deadline {
                            what: format!("cancelling requests ({error})"),
                            silent: vec![rank],
                        })?;
                }
            }
        }
        Ok(())
    }

    /// Tells every living rank to finish.
    pub(crate) fn send_stop(&self) {
        let message = self.encode(CallId(0), 0, &Command::Stop);
        let gone = self.lock().gone;
        for rank in self.all.without(gone).iter() {
            // A rank that does not listen is dealt with by signals.
            let _ = self.send_control(rank, &message);
        }
    }

    pub(super) fn send_control(&self, rank: Rank, message: &[u8]) -> Result<(), LinkError> {
        match self.control.get(usize::from(rank.0)) {
            Some(control) => control.send(message),
            None => Err(LinkError::Closed),
        }
    }

    pub(super) fn encode(&self, call_id: CallId, deadline_ns: u64, command: &Command) -> Vec<u8> {
        let epoch = self.info.epoch;
        let header = Header {
            version: PROTOCOL_VERSION,
            epoch,
            call_id,
            rank: Rank(0),
            deadline_ns,
        };
        let mut message = Vec::with_capacity(128);
        encode_command(&mut message, header, command);
        message
    }

    pub(super) fn no_such_rank(&self, what: &str) -> ExecutorError {
        let last = self.info.world_size.saturating_sub(1);
        refused(format!("{what}: the world has ranks 0 to {last}"))
    }
}

pub(super) fn refused(text: String) -> ExecutorError {
    ExecutorError::Refused(Failure::new(FailureCode::InvalidRequest, text))
}

/// Takes what is large out of the requests, to travel beside the message.
fn take_large_parts(wave: &mut Wave) -> Vec<Vec<u8>> {
    let mut taken = Vec::new();
    for member in &mut wave.joining {
        member.blobs.clear();
        for part in member.request.large_parts() {
            // More parts than blob indices do not fit the record either, which the link reports.
            member
                .blobs
                .push(BlobIdx(u16::try_from(taken.len()).unwrap_or(u16::MAX)));
            taken.push(std::mem::take(part));
        }
    }
    taken
}

/// Nothing of the call was sent: nobody owes anything, and its caller hears why.
fn not_sent(
    state: &mut State,
    to: RankSet,
    call_id: CallId,
    error: LinkError,
    what: &dyn fmt::Display,
) -> ExecutorError {
    for rank in to.iter() {
        state.settle(rank, call_id);
    }
    if let Err(error) = state.check_open() {
        return error;
    }
    match error {
        LinkError::TooLarge {
            message_bytes,
            limit_bytes,
            limited_by,
        } => ExecutorError::TooLarge {
            message_bytes,
            limit_bytes,
            limited_by,
        },
        LinkError::Full { laggard } => {
            let laggard: RankSet = laggard.into_iter().collect();
            state.doubt(laggard);
            ExecutorError::Deadline {
                what: what.to_string(),
                silent: laggard.iter().collect(),
            }
        }
        error => ExecutorError::Failed(Failure::new(FailureCode::WorkerLost, error.to_string())),
    }
}
