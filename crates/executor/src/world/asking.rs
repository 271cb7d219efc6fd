//! Questions and their answers: methods on either lane, health.

use super::{World, moment, sending::refused};
use crate::{
    ExecutorError, Health, MethodCall, RankReply, Ranks,
    calls::{Call, OpenMethod, PingCall},
};
use denoised_link::{CONTROL_LIMIT_BYTES, LinkError, RankSet};
use denoised_os::Deadline;
use denoised_types::{CallId, Rank};
use denoised_wire::{BlobIdx, Command, Lane};
use std::{fmt, sync::atomic::Ordering, time::Duration};

/// How soon a rank whose control lane was full is tried again.
const RETRY: Duration = Duration::from_millis(5);

/// Who does what in a call.
#[derive(Clone, Copy)]
struct Shape {
    executing: RankSet,
    replying: RankSet,
}

/// A method in words; only errors need them.
#[derive(Clone, Copy)]
struct Named<'a>(&'a str);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "method `{}`", self.0)
    }
}

impl World {
    pub(crate) fn call(&self, call: &MethodCall<'_>) -> Result<Vec<RankReply>, ExecutorError> {
        let shape = self.shape(call)?;
        let lane = self.lane_of(call.method)?;
        let deadline = moment(call.deadline);
        let what = Named(call.method);
        if deadline.has_passed() {
            // What arrived is routed, so that polling in a loop makes progress; a command that no rank would begin is not sent.
            self.pump_if_free();
            self.lock().check_open()?;
            return Err(ExecutorError::Deadline {
                what: what.to_string(),
                silent: shape.executing.iter().collect(),
            });
        }
        let open = OpenMethod::new(call.method, shape.executing, shape.replying);
        match lane {
            Lane::Data => {
                let command = Command::Call {
                    method: call.method.to_owned(),
                    args: BlobIdx(0),
                    ranks: shape.executing.iter().collect(),
                    replying: shape.replying.iter().collect(),
                };
                let to = shape.executing;
                let call_id =
                    self.send_data(to, Call::Method(open), &command, &[call.args], deadline, &what)?;
                self.collect(call_id, RankSet::EMPTY, &mut |_| Ok(()), deadline, what)
            }
            Lane::Control => self.call_control(call, shape, open, deadline, what),
        }
    }

    fn shape(&self, call: &MethodCall<'_>) -> Result<Shape, ExecutorError> {
        let of = |ranks: Ranks| match ranks {
            Ranks::All => self.all,
            Ranks::One(rank) => RankSet::one(rank).and(self.all),
        };
        let method = call.method;
        let executing = of(call.execute);
        if executing.is_empty() {
            return Err(self.no_such_rank(&format!("method `{method}` for {}", call.execute)));
        }
        let replying = match call.reply {
            None => executing,
            // All of those who run it.
            Some(Ranks::All) => executing,
            Some(Ranks::One(rank)) if !executing.contains(rank) => {
                let runs = match call.execute {
                    Ranks::All => format!("ranks 0 to {} run it", self.info.world_size.saturating_sub(1)),
                    Ranks::One(rank) => format!("only rank {rank} runs it"),
                };
                return Err(refused(format!(
                    "rank {rank} cannot reply to method `{method}`: {runs}"
                )));
            }
            Some(one) => of(one),
        };
        Ok(Shape { executing, replying })
    }

    /// The lane that a method is for. Workers that told of no method at all judge themselves, on the data lane.
    fn lane_of(&self, method: &str) -> Result<Lane, ExecutorError> {
        let methods = &self.info.methods;
        match methods.iter().find(|info| info.name == method) {
            Some(info) => Ok(info.lane),
            None if methods.is_empty() => Ok(Lane::Data),
            None => Err(ExecutorError::UnknownMethod {
                method: method.to_owned(),
                known: methods.iter().map(|info| info.name.clone()).collect(),
            }),
        }
    }

    fn call_control(
        &self,
        call: &MethodCall<'_>,
        shape: Shape,
        open: OpenMethod,
        deadline: Deadline,
        what: Named<'_>,
    ) -> Result<Vec<RankReply>, ExecutorError> {
        let call_id = CallId(self.next_call.fetch_add(1, Ordering::Relaxed));
        let message = |is_replying: bool| {
            let command = Command::ControlCall {
                method: call.method.to_owned(),
                args: call.args.to_vec(),
                is_replying,
            };
            self.encode(call_id, deadline.ns(), &command)
        };
        let (asking, telling) = (message(true), message(false));
        let longest = asking.len().max(telling.len());
        if longest > CONTROL_LIMIT_BYTES {
            return Err(ExecutorError::TooLarge {
                message_bytes: longest as u64,
                limit_bytes: CONTROL_LIMIT_BYTES as u64,
                limited_by: "message of the control lane",
            });
        }
        {
            let mut state = self.lock();
            state.check_open()?;
            state.stats.n_calls += 1;
            state.calls.insert(call_id, Call::Method(open));
        }
        let mut send = |rank: Rank| {
            let message = if shape.replying.contains(rank) {
                &asking
            } else {
                &telling
            };
            self.send_control(rank, message)
        };
        self.collect(call_id, shape.executing, &mut send, deadline, what)
    }

    /// Sends to the ranks in `unsent`, again and again to those whose lane is full, and waits until every rank has answered.
    fn collect(
        &self,
        call_id: CallId,
        unsent: RankSet,
        send: &mut dyn FnMut(Rank) -> Result<(), LinkError>,
        deadline: Deadline,
        what: Named<'_>,
    ) -> Result<Vec<RankReply>, ExecutorError> {
        let mut unsent = unsent;
        let answered = loop {
            // One that is gone will be reported as such.
            let is_full = |rank: &Rank| matches!(send(*rank), Err(LinkError::Full { .. }));
            unsent = unsent.iter().filter(is_full).collect();
            let until = if unsent.is_empty() {
                deadline
            } else {
                deadline.earlier(Deadline::after(RETRY))
            };
            let answered = self.wait_for(until, |state| match state.calls.get(&call_id) {
                Some(Call::Method(call)) if !call.is_complete() && state.can_still_answer() => None,
                _ => Some(()),
            });
            if answered.is_some() || deadline.has_passed() {
                break answered;
            }
        };
        let mut state = self.lock();
        let Some(Call::Method(call)) = state.calls.remove(&call_id) else {
            // Only a failure or the end of the world takes a call from its waiter.
            return Err(state.why_not_open());
        };
        if call.is_complete() {
            return call.into_result(deadline.has_passed());
        }
        if answered.is_none() {
            state.give_up(call.silent(), call_id, &what.to_string());
        }
        let error = match answered {
            _ if call.has_failed() => return call.into_result(deadline.has_passed()),
            Some(()) => state.why_not_open(),
            None => ExecutorError::Deadline {
                what: what.to_string(),
                silent: call.silent().iter().collect(),
            },
        };
        drop(state);
        self.call_monitor();
        Err(error)
    }

    pub(crate) fn health(&self, limit: Duration) -> Health {
        let deadline = Deadline::after(limit);
        let call_id = CallId(self.next_call.fetch_add(1, Ordering::Relaxed));
        let ping = PingCall::new(self.all);
        {
            let mut state = self.lock();
            state.stats.n_calls += 1;
            if let Err(error) = state.check_open() {
                return Health {
                    answered: Vec::new(),
                    silent: self.all.iter().collect(),
                    failure: Some(error.into()),
                };
            }
            state.calls.insert(call_id, Call::Ping(ping));
        }
        let message = self.encode(call_id, deadline.ns(), &Command::Ping);
        for rank in self.all.iter() {
            // A rank that cannot be reached stays silent.
            let _ = self.send_control(rank, &message);
        }
        self.wait_for(deadline, |state| match state.calls.get(&call_id) {
            Some(Call::Ping(ping)) if !ping.is_complete() && state.can_still_answer() => None,
            _ => Some(()),
        });
        let mut state = self.lock();
        let answered = match state.calls.remove(&call_id) {
            Some(Call::Ping(ping)) => ping.answered.without(state.gone),
            _ => RankSet::EMPTY,
        };
        Health {
            answered: answered.iter().collect(),
            silent: self.all.without(answered).iter().collect(),
            failure: state.failure.clone(),
        }
    }
}
