//! What every executor must do, whatever its workers are. Written against [`Executor`] and scripted workers alone.
//! The beginning of a name (`c1`) is the id of a case that some system of this kind got wrong.
//!
//! ```text
//! denoised_testkit::executor_conformance!(mine, |script| Box::new(MyExecutor::start(script.config())));
//! ```

mod waves;

mod calls;
mod shapes;

mod steps;

mod outputs;

mod ends;

pub use calls::*;
pub use ends::*;
pub use outputs::*;
pub use shapes::*;
pub use steps::*;
pub use waves::*;

use crate::script::Script;
use denoised_executor::{Executor, ExecutorEvent, Output};
use denoised_types::{Failure, Generated, Rank, RequestId, WaveId};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Starts the executor under test with scripted workers.
pub type StartFn = dyn Fn(&Script) -> Box<dyn Executor>;

/// Runs the whole suite as tests of a module `$name`, each under a watchdog. `$start` is a `Fn(&Script) -> Box<dyn Executor>`.
#[macro_export]
macro_rules! executor_conformance {
    ($name:ident, $start:expr) => {
        $crate::executor_conformance!(@tests $name, $start,
            world_says_what_it_is,
            requests_of_a_wave_end_once_in_order_and_then_the_wave,
            traces_and_latents_travel_whole,
            large_pictures_arguments_and_replies_travel_whole,
            c1_every_caller_gets_its_own_answer,
            failing_ranks_are_named_and_the_others_listed,
            c3_old_answers_do_not_reach_new_calls,
            c5_late_answers_do_no_harm,
            t5_a_passed_deadline_is_refused_at_once,
            an_unanswered_call_names_the_silent_ranks,
            l5_messages_over_the_limit_are_refused_and_the_path_goes_on,
            unknown_methods_and_ranks_are_refused,
            built_in_methods_answer,
            k1_cancelled_requests_end_soon_and_the_next_starts,
            a_cancel_may_overtake_its_wave,
            requests_end_at_their_deadline,
            failures_of_requests_have_one_shape_and_spare_the_world,
            forgotten_requests_are_failed,
            c7_concurrent_requests_are_answered_like_serial_ones,
            calls_are_answered_beside_a_thread_that_waits_for_events,
            q9_unread_events_hold_the_worker_back_and_none_is_lost,
            wakes_are_not_lost,
            a_failing_rank_ends_the_world_and_every_request_once,
            a_panic_ends_the_world_with_its_text,
            callers_that_wait_hear_of_the_failure,
            health_is_an_answer_also_while_a_step_runs,
            shutdown_is_one_teardown_for_all_callers,
            shutdown_ends_what_is_in_flight,
            calls_of_every_shape_are_answered_by_those_who_are_asked,
            failures_of_ranks_that_do_not_reply_fail_the_call,
            failures_of_control_methods_have_the_same_shape,
            control_methods_are_answered_while_a_step_runs,
            control_messages_over_the_limit_are_refused,
            a_profile_holds_what_was_done_between_its_calls,
            requests_join_and_leave_between_waves,
            what_is_traced_in_many_waves_comes_with_the_request,
            a_wave_says_who_is_given_up,
            waves_that_name_strangers_are_refused_before_sending,
            a_failing_step_ends_its_request_and_spares_the_others,
            forgotten_residents_are_failed,
            a_resident_ends_at_its_deadline_between_waves,
            residents_end_once_before_the_world_is_reported_failed,
            shutdown_ends_residents_once,
            waves_of_several_ranks_end_requests_once,
            held_results_do_not_hold_the_worker_up,
            results_outlive_their_world,
        );
    };
    (@tests $name:ident, $start:expr, $($test:ident),+ $(,)?) => {
        mod $name {
            #[allow(unused_imports, reason = "the start expression may need them or not")]
            use super::*;

            $(
                #[test]
                fn $test() {
                    let name = concat!(stringify!($name), "::", stringify!($test));
                    let _watchdog = $crate::watchdog::Watchdog::new(name, std::time::Duration::from_secs(120));
                    $crate::suites::executor::$test(&$start);
                }
            )+
        }
    };
}

/// Far in the future: a test that reaches it has failed.
fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn close(executor: &dyn Executor) {
    executor.shutdown(Duration::from_secs(20));
}

/// Reads events until these waves have ended or the world has failed.
fn events_until_done(executor: &dyn Executor, waves: &[u64]) -> Vec<ExecutorEvent> {
    let mut left: Vec<WaveId> = waves.iter().copied().map(WaveId).collect();
    let mut seen = Vec::new();
    while !left.is_empty() {
        assert!(Instant::now() < late());
        let events = executor.wait_events(late());
        assert!(!events.is_empty(), "no event for a minute; so far {seen:?}");
        for event in events {
            match &event {
                ExecutorEvent::WaveDone { wave_id } => left.retain(|left| left != wave_id),
                ExecutorEvent::WorldFailed(_) => left.clear(),
                _ => {}
            }
            seen.push(event);
        }
    }
    seen
}

type Outcome = Result<Generated, Failure>;

/// The outcomes by request.
///
/// # Panics
/// A request ended twice.
fn outcomes(events: Vec<ExecutorEvent>) -> BTreeMap<RequestId, Outcome> {
    let mut outcomes = BTreeMap::new();
    for event in events {
        if let ExecutorEvent::RequestDone { request_id, outcome } = event {
            assert!(
                outcomes
                    .insert(request_id, outcome.map(Output::into_generated))
                    .is_none(),
                "request {request_id} ended twice"
            );
        }
    }
    outcomes
}

fn ranks(executor: &dyn Executor) -> Vec<Rank> {
    (0..executor.world().world_size).map(Rank).collect()
}

/// See the name.
pub fn world_says_what_it_is(start: &StartFn) {
    let executor = start(&Script::default());
    let world = executor.world();
    assert!(world.world_size >= 1);
    assert_eq!(world.replicas.concat(), ranks(&*executor));
    assert_eq!((world.model.clone(), executor.failure()), (None, None));
    assert!(world.pids.is_empty() || world.pids.len() == usize::from(world.world_size));
    assert_eq!(executor.world(), world);
    close(&*executor);
    let second = start(&Script::default());
    assert_ne!(second.world().epoch, world.epoch, "an epoch is used once");
    close(&*second);
}
