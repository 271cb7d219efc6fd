//! What the rank is doing, for those who ask while it does it, and for a profile.
//!
//! R1. The runner writes and the control thread reads; the lock is held for as long as it takes to copy a few numbers, never while
//!     anything is computed or sent.
//! R2. A recording holds at most [`MAX_RECORDED`] spans and request ids together; what finds no room is counted.

use denoised_os::now_ns;
use denoised_tensor::MemoryStats;
use denoised_types::{CallId, Failure, FailureCode, Mode, Rank, RequestId, WaveId};
use denoised_wire::{Doing, MemberProgress, Profile, RankProgress, Span, Work};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Most spans and request ids of one recording: a reply of less than a megabyte.
const MAX_RECORDED: usize = 32_768;

/// What runner and control thread share about the present.
#[derive(Debug)]
pub(crate) struct Activity {
    rank: Rank,
    /// Commands that were taken off the data lane and not begun.
    pub(crate) n_waiting: AtomicU32,
    /// Waves carried out so far.
    pub(crate) n_waves: AtomicU64,
    /// Methods run so far, on both lanes.
    pub(crate) n_calls: AtomicU64,
    /// Of the device, as the program last told.
    pub(crate) device_used_bytes: AtomicU64,
    pub(crate) device_peak_bytes: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    now: Now,
    since_ns: u64,
    moved_ns: u64,
    last_call_id: CallId,
    /// Members of the present wave that have not ended.
    members: Vec<MemberProgress>,
    /// Requests that are between two waves.
    residents: Vec<MemberProgress>,
    /// The piece of the present wave, and since when.
    work: Option<(Work, u64)>,
    recording: Option<Recording>,
}

#[derive(Clone, Debug)]
enum Now {
    Start,
    Nothing,
    Method(Arc<str>),
    Wave(WaveId, Mode),
    End,
}

#[derive(Debug)]
struct Recording {
    begin_ns: u64,
    spans: Vec<Span>,
    room: usize,
    n_dropped: u64,
}

impl Activity {
    pub(crate) fn new(rank: Rank) -> Self {
        let now = now_ns();
        Self {
            rank,
            n_waiting: AtomicU32::new(0),
            n_waves: AtomicU64::new(0),
            n_calls: AtomicU64::new(0),
            device_used_bytes: AtomicU64::new(0),
            device_peak_bytes: AtomicU64::new(0),
            state: Mutex::new(State {
                now: Now::Start,
                since_ns: now,
                moved_ns: now,
                last_call_id: CallId(0),
                members: Vec::new(),
                residents: Vec::new(),
                work: None,
                recording: None,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rank waits for a command.
    pub(crate) fn wait(&self) {
        self.lock().turn_to(Now::Nothing);
    }

    /// What the device holds.
    pub(crate) fn note_memory(&self, memory: MemoryStats) {
        self.device_used_bytes.store(memory.used_bytes, Ordering::Relaxed);
        self.device_peak_bytes.store(memory.peak_bytes, Ordering::Relaxed);
    }

    /// The rank finishes.
    pub(crate) fn end(&self) {
        self.lock().turn_to(Now::End);
    }

    /// A command was begun.
    pub(crate) fn begin(&self, call_id: CallId) {
        self.lock().last_call_id = call_id;
    }

    /// A method was begun.
    pub(crate) fn begin_method(&self, name: &Arc<str>) {
        self.lock().turn_to(Now::Method(Arc::clone(name)));
    }

    /// A wave with these members was begun; those that an earlier wave left behind are where they were.
    pub(crate) fn begin_wave(&self, wave_id: WaveId, mode: Mode, members: impl Iterator<Item = RequestId>) {
        let mut state = self.lock();
        state.turn_to(Now::Wave(wave_id, mode));
        for request_id in members {
            let known = state
                .residents
                .iter()
                .position(|member| member.request_id == request_id);
            let member = match known {
                Some(idx) => state.residents.remove(idx),
                None => MemberProgress {
                    request_id,
                    n_done: 0,
                    n_steps: 0,
                },
            };
            state.members.push(member);
        }
    }

    /// The wave computes this from now on.
    pub(crate) fn enter(&self, work: Work) {
        let mut state = self.lock();
        let now = state.leave();
        state.work = Some((work, now));
    }

    /// As [`Activity::enter`] for one forward of these requests.
    pub(crate) fn enter_step(&self, request_ids: &[RequestId]) {
        let mut state = self.lock();
        let step_idx = |request_id: RequestId| {
            let member = state
                .members
                .iter()
                .find(|member| member.request_id == request_id);
            (request_id, member.map_or(0, |member| member.n_done))
        };
        let members = request_ids.iter().copied().map(step_idx).collect();
        let now = state.leave();
        state.work = Some((Work::Step { members }, now));
    }

    /// A step of a request is done.
    pub(crate) fn stepped(&self, request_id: RequestId, n_done: u32, n_steps: u32) {
        let mut state = self.lock();
        state.leave();
        if let Some(member) = state
            .members
            .iter_mut()
            .find(|member| member.request_id == request_id)
        {
            (member.n_done, member.n_steps) = (n_done, n_steps);
        }
    }

    /// A request of the wave ended.
    pub(crate) fn ended(&self, request_id: RequestId) {
        let mut state = self.lock();
        state.leave();
        state.members.retain(|member| member.request_id != request_id);
    }

    /// What the control lane answers.
    pub(crate) fn progress(&self) -> RankProgress {
        let state = self.lock();
        let doing = match &state.now {
            Now::Start => Doing::Start,
            Now::Nothing => Doing::Nothing,
            Now::Method(name) => Doing::Method {
                name: name.to_string(),
            },
            Now::Wave(wave_id, mode) => Doing::Wave {
                wave_id: *wave_id,
                mode: *mode,
                members: state.members.clone(),
                work: state.work.as_ref().map(|(work, _)| work.clone()),
            },
            Now::End => Doing::End,
        };
        RankProgress {
            rank: self.rank,
            now_ns: now_ns(),
            doing,
            since_ns: state.since_ns,
            moved_ns: state.moved_ns,
            last_call_id: state.last_call_id,
            n_waiting: self.n_waiting.load(Ordering::Relaxed),
            residents: state.residents.clone(),
        }
    }

    /// Begins a recording.
    ///
    /// # Errors
    /// There is one already.
    pub(crate) fn start_recording(&self) -> Result<(), Failure> {
        let mut state = self.lock();
        if state.recording.is_some() {
            let text = "a profile is being recorded already; `profile_stop` ends it";
            return Err(Failure::new(FailureCode::InvalidRequest, text));
        }
        state.recording = Some(Recording {
            begin_ns: now_ns(),
            spans: Vec::new(),
            room: MAX_RECORDED,
            n_dropped: 0,
        });
        Ok(())
    }

    /// Ends the recording.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn stop_recording(&self) -> Result<Profile, Failure> {
        let recording = self.lock().recording.take().ok_or_else(|| {
            let text = "no profile is being recorded; `profile_start` begins one";
            Failure::new(FailureCode::InvalidRequest, text)
        })?;
        Ok(Profile {
            rank: self.rank,
            begin_ns: recording.begin_ns,
            end_ns: now_ns(),
            spans: recording.spans,
            n_dropped: recording.n_dropped,
        })
    }
}

impl State {
    /// Ends what the rank does and begins something else. Members of a wave that have not ended are residents from now on.
    fn turn_to(&mut self, next: Now) {
        let now = self.leave();
        let (was, begin_ns) = (std::mem::replace(&mut self.now, next), self.since_ns);
        self.since_ns = now;
        self.residents.append(&mut self.members);
        if self.recording.is_none() {
            return;
        }
        let work = match was {
            Now::Start | Now::End => return,
            Now::Nothing => Work::Wait,
            Now::Method(name) => Work::Method {
                name: name.to_string(),
            },
            Now::Wave(wave_id, mode) => Work::Wave { wave_id, mode },
        };
        self.record(work, begin_ns, now);
    }

    /// Ends the piece of a wave that was computed, if any; returns the time.
    fn leave(&mut self) -> u64 {
        let now = now_ns();
        self.moved_ns = now;
        if let Some((work, begin_ns)) = self.work.take() {
            self.record(work, begin_ns, now);
        }
        now
    }

    fn record(&mut self, work: Work, begin_ns: u64, end_ns: u64) {
        let Some(recording) = &mut self.recording else {
            return;
        };
        let n_entries = match &work {
            Work::Step { members } => 1 + members.len(),
            _ => 1,
        };
        if n_entries > recording.room {
            recording.n_dropped += 1;
            return;
        }
        recording.room -= n_entries;
        recording.spans.push(Span {
            work,
            begin_ns,
            duration_ns: end_ns.saturating_sub(begin_ns),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAVE: WaveId = WaveId(4);

    fn ids(ids: &[u64]) -> impl Iterator<Item = RequestId> + '_ {
        ids.iter().copied().map(RequestId)
    }

    fn at(request_id: u64, n_done: u32, n_steps: u32) -> MemberProgress {
        MemberProgress {
            request_id: RequestId(request_id),
            n_done,
            n_steps,
        }
    }

    #[test]
    fn members_that_do_not_end_are_residents_until_a_wave_names_them() {
        let activity = Activity::new(Rank(1));
        assert_eq!(activity.progress().doing, Doing::Start);
        activity.wait();
        activity.begin(CallId(3));
        activity.begin_wave(WAVE, Mode::Step, ids(&[7, 8]));
        activity.stepped(RequestId(7), 1, 5);
        activity.ended(RequestId(8));
        activity.wait();
        let progress = activity.progress();
        assert_eq!((progress.rank, progress.doing), (Rank(1), Doing::Nothing));
        assert_eq!(progress.last_call_id, CallId(3));
        assert_eq!(progress.residents, [at(7, 1, 5)]);
        activity.begin_wave(WaveId(5), Mode::Step, ids(&[9, 7]));
        activity.enter_step(&[RequestId(7), RequestId(9)]);
        let progress = activity.progress();
        assert_eq!(progress.residents, []);
        assert_eq!(
            progress.doing,
            Doing::Wave {
                wave_id: WaveId(5),
                mode: Mode::Step,
                members: vec![at(9, 0, 0), at(7, 1, 5)],
                work: Some(Work::Step {
                    members: vec![(RequestId(7), 1), (RequestId(9), 0)]
                }),
            }
        );
        assert!(progress.since_ns <= progress.moved_ns && progress.moved_ns <= progress.now_ns);
    }

    #[test]
    fn a_profile_holds_what_ended_while_it_was_recorded() {
        let activity = Activity::new(Rank(0));
        assert_eq!(
            activity.stop_recording().unwrap_err().code,
            FailureCode::InvalidRequest
        );
        activity.wait();
        activity.start_recording().unwrap();
        assert_eq!(
            activity.start_recording().unwrap_err().code,
            FailureCode::InvalidRequest
        );
        activity.begin_wave(WAVE, Mode::Request, ids(&[1]));
        activity.enter(Work::Encode {
            request_id: RequestId(1),
        });
        activity.enter_step(&[RequestId(1)]);
        activity.stepped(RequestId(1), 1, 1);
        activity.enter(Work::Decode {
            request_id: RequestId(1),
        });
        activity.ended(RequestId(1));
        activity.wait();
        activity.begin_method(&"own".into());
        activity.wait();
        let profile = activity.stop_recording().unwrap();
        let work: Vec<&Work> = profile.spans.iter().map(|span| &span.work).collect();
        let request_id = RequestId(1);
        assert_eq!(
            work,
            [
                &Work::Wait,
                &Work::Encode { request_id },
                &Work::Step {
                    members: vec![(request_id, 0)]
                },
                &Work::Decode { request_id },
                &Work::Wave {
                    wave_id: WAVE,
                    mode: Mode::Request
                },
                &Work::Wait,
                &Work::Method {
                    name: "own".to_owned()
                },
            ]
        );
        let wave = &profile.spans[4];
        for piece in &profile.spans[1..4] {
            assert!(piece.begin_ns >= wave.begin_ns);
            assert!(piece.begin_ns + piece.duration_ns <= wave.begin_ns + wave.duration_ns);
        }
        assert_eq!(profile.n_dropped, 0);
        assert_eq!(
            activity.stop_recording().unwrap_err().code,
            FailureCode::InvalidRequest
        );
    }

    #[test]
    fn a_recording_is_bounded_and_says_what_it_dropped() {
        let activity = Activity::new(Rank(0));
        activity.wait();
        activity.start_recording().unwrap();
        for _ in 0..MAX_RECORDED {
            activity.begin_wave(WAVE, Mode::Step, ids(&[]));
            activity.wait();
        }
        let profile = activity.stop_recording().unwrap();
        assert_eq!(profile.spans.len(), MAX_RECORDED);
        assert_eq!(profile.n_dropped, MAX_RECORDED as u64);
        assert!(profile.to_bytes().len() < 1 << 20);
    }
}
