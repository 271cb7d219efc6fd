//! What a wave in step mode asks for, held against what earlier waves left behind.
//!
//! R1. No request is in two of the lists that the program is given, and those that shall go on or be given up are there.
//! R2. What contradicts the state ends the request that it names, and no other. One that the program holds all the same is dropped.
//! R3. Everything follows from the waves so far, so ranks that were sent the same waves plan the same.

use denoised_types::{Failure, FailureCode, RequestId, WaveId};
use denoised_wire::Member;
use std::collections::{BTreeMap, BTreeSet};

/// What the program is to do, and whom it is not to hear of.
#[derive(Debug, PartialEq)]
pub(crate) struct StepPlan {
    pub(crate) joining: Vec<Member>,
    pub(crate) continuing: Vec<RequestId>,
    pub(crate) cancelled: Vec<RequestId>,
    /// Requests that end with this failure. Those among `cancelled` too are held by the program.
    pub(crate) refused: Vec<(RequestId, Failure)>,
}

impl StepPlan {
    pub(crate) fn new<T>(
        wave_id: WaveId,
        residents: &BTreeMap<RequestId, T>,
        joining: Vec<Member>,
        continuing: &[RequestId],
        cancelled: &[RequestId],
    ) -> Self {
        let mut plan = Self {
            joining: Vec::with_capacity(joining.len()),
            continuing: Vec::with_capacity(continuing.len()),
            cancelled: Vec::new(),
            refused: Vec::new(),
        };
        let protocol = |text: String| Failure::new(FailureCode::Protocol, text);
        // Those that were named with a meaning that stands.
        let mut named = BTreeSet::new();
        for &request_id in cancelled {
            // Others have ended already, or never came.
            if residents.contains_key(&request_id) && named.insert(request_id) {
                plan.cancelled.push(request_id);
            }
        }
        for member in joining {
            let request_id = member.request_id;
            if residents.contains_key(&request_id) {
                let text = format!("the request joins wave {wave_id}, but an earlier wave began it");
                plan.refused.push((request_id, protocol(text)));
                if named.insert(request_id) {
                    plan.cancelled.push(request_id);
                }
            } else if named.insert(request_id) {
                plan.joining.push(member);
            } else {
                tracing::error!(%request_id, %wave_id, "a request joins a wave twice");
            }
        }
        for &request_id in continuing {
            if residents.contains_key(&request_id) {
                if named.insert(request_id) {
                    plan.continuing.push(request_id);
                }
            } else if named.insert(request_id) && !cancelled.contains(&request_id) {
                let text = format!("the request is to go on in wave {wave_id}, but no earlier wave began it");
                plan.refused.push((request_id, protocol(text)));
            }
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use denoised_types::GenerateRequest;

    fn ids(ids: &[u64]) -> Vec<RequestId> {
        ids.iter().copied().map(RequestId).collect()
    }

    fn plan(residents: &[u64], joining: &[u64], continuing: &[u64], cancelled: &[u64]) -> StepPlan {
        let residents = residents.iter().map(|&id| (RequestId(id), ())).collect();
        let member = |&id: &u64| Member {
            request_id: RequestId(id),
            request: GenerateRequest::new(""),
            blobs: Vec::new(),
            deadline_ns: 0,
        };
        let joining = joining.iter().map(member).collect();
        StepPlan::new(WaveId(9), &residents, joining, &ids(continuing), &ids(cancelled))
    }

    fn joining(plan: &StepPlan) -> Vec<RequestId> {
        plan.joining.iter().map(|member| member.request_id).collect()
    }

    fn refused(plan: &StepPlan) -> Vec<(RequestId, FailureCode)> {
        plan.refused
            .iter()
            .map(|(id, failure)| (*id, failure.code))
            .collect()
    }

    #[test]
    fn a_wave_that_fits_is_done_as_it_says() {
        let plan = plan(&[1, 2, 3], &[5, 4], &[3, 1], &[2]);
        assert_eq!(joining(&plan), ids(&[5, 4]));
        assert_eq!(plan.continuing, ids(&[3, 1]));
        assert_eq!(plan.cancelled, ids(&[2]));
        assert_eq!(plan.refused, []);
    }

    #[test]
    fn cancels_of_what_is_not_there_are_ignored_and_win_over_going_on() {
        let plan = plan(&[1], &[], &[1, 7], &[7, 1, 1, 8]);
        assert_eq!(plan.cancelled, ids(&[1]));
        assert_eq!(plan.continuing, []);
        assert_eq!(plan.refused, []);
    }

    #[test]
    fn a_request_that_nobody_began_cannot_go_on() {
        let plan = plan(&[1], &[], &[1, 7, 1, 7], &[]);
        assert_eq!(plan.continuing, ids(&[1]));
        assert_eq!(refused(&plan), [(RequestId(7), FailureCode::Protocol)]);
    }

    #[test]
    fn a_request_cannot_join_twice_and_is_not_left_behind() {
        let plan = plan(&[1, 2], &[1, 5, 5], &[1, 2], &[]);
        assert_eq!(refused(&plan), [(RequestId(1), FailureCode::Protocol)]);
        assert_eq!(plan.cancelled, ids(&[1]));
        assert_eq!(plan.continuing, ids(&[2]));
        assert_eq!(joining(&plan), ids(&[5]));
    }

    #[test]
    fn lists_never_overlap() {
        // Every way in which three requests can be named, resident or not: by hand it is one bit per list and request.
        for bits in 0..1u32 << 12 {
            let pick = |list: u32| -> Vec<u64> {
                (0..3)
                    .filter(|id| bits >> (list * 3 + id) & 1 == 1)
                    .map(u64::from)
                    .collect()
            };
            let plan = plan(&pick(0), &pick(1), &pick(2), &pick(3));
            let mut all = joining(&plan);
            all.extend(&plan.continuing);
            all.extend(&plan.cancelled);
            all.extend(
                plan.refused
                    .iter()
                    .map(|(id, _)| *id)
                    .filter(|id| !plan.cancelled.contains(id)),
            );
            let n_all = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), n_all, "{plan:?}");
            let is_resident = |id: &RequestId| pick(0).contains(&id.0);
            assert!(plan.continuing.iter().chain(&plan.cancelled).all(is_resident));
            assert!(!joining(&plan).iter().any(is_resident));
        }
    }
}
