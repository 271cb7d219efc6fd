//! Who shares the waves of a case, and when each comes and goes. Decides; runs nothing.
//!
//! S1. Everything follows from the case, the model and the number of others: two runs are the same.
//! S2. The others bracket the case: there are requests that begin before, with and after it, that end earlier and later, that are
//!     computed in one batch with it and that cannot be, and some that are given up on the way.

use denoised_types::{Capture, GenerateRequest, ModelInfo, Task};

/// The wave that the case joins when others take part, counted from 0: one that came before has done a step by then.
const CASE_JOINS_AT: u32 = 1;
/// Prompts of the others; none is a case's.
const PROMPTS: [&str; 4] = [
    "a blue teapot",
    "two green pears",
    "a fox in the snow",
    "an old clock",
];

/// One request of a run, with when it comes and goes. In request mode all come with the one wave.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Participant {
    /// What it asks for.
    pub(crate) request: GenerateRequest,
    /// Step mode: the wave that it joins, counted from 0.
    pub(crate) joins_at: u32,
    /// The wave in which it is given up, in request mode after its first step; `None` if it runs to its end.
    pub(crate) given_up_at: Option<u32>,
    /// Whether it is the one that everything is about.
    pub(crate) is_case: bool,
}

/// The case alone.
pub(crate) fn alone(case: &GenerateRequest) -> Vec<Participant> {
    vec![Participant {
        request: case.clone(),
        joins_at: 0,
        given_up_at: None,
        is_case: true,
    }]
}

/// The case among `n_others` requests, in the order in which they join.
pub(crate) fn among(case: &GenerateRequest, n_others: u16, model: &ModelInfo) -> Vec<Participant> {
    let mut all: Vec<Participant> = (0..n_others)
        .map(|other_idx| other(case, other_idx, model))
        .collect();
    all.push(Participant {
        joins_at: CASE_JOINS_AT,
        ..alone(case).remove(0)
    });
    // Stable: with those that join in its wave, the case is the last.
    all.sort_by_key(|one| one.joins_at);
    all
}

fn other(case: &GenerateRequest, other_idx: u16, model: &ModelInfo) -> Participant {
    let case_steps = case.n_steps.unwrap_or(model.default_n_steps);
    let steps = |n: u32| Some(n.clamp(1, GenerateRequest::MAX_STEPS));
    let prompt = PROMPTS[usize::from(other_idx) % PROMPTS.len()];
    let is_of_class = model.tasks.contains(&Task::ClassToImage);
    let alike = GenerateRequest {
        prompt: if is_of_class {
            case.prompt.clone()
        } else {
            prompt.to_owned()
        },
        // They have other numbers of steps.
        sigmas: Vec::new(),
        seed: case.seed.wrapping_add(1 + u64::from(other_idx)),
        latents: None,
        capture: Capture::Image,
        ..case.clone()
    };
    let case_is_halfway = CASE_JOINS_AT + case_steps / 2;
    let (request, joins_at, given_up_at) = match other_idx % 4 {
        // Comes before the case and ends earlier. Its trace travels with the case's.
        0 => (
            GenerateRequest {
                n_steps: steps((case_steps / 2).max(2)),
                capture: Capture::Trace,
                ..alike
            },
            CASE_JOINS_AT - 1,
            None,
        ),
        // Comes with the case and ends later; cannot be computed in one batch with it.
        1 => (unlike(alike, case_steps, model), CASE_JOINS_AT, None),
        // Comes after the case and is given up while the case runs.
        2 => (
            GenerateRequest {
                n_steps: steps(case_steps.saturating_add(1)),
                ..alike
            },
            CASE_JOINS_AT + 1,
            Some(case_is_halfway.max(CASE_JOINS_AT + 2)),
        ),
        // Comes after the case and ends later.
        _ => (
            GenerateRequest {
                n_steps: steps(case_steps.saturating_add(3)),
                ..alike
            },
            CASE_JOINS_AT + 1,
            None,
        ),
    };
    Participant {
        request,
        joins_at,
        given_up_at,
        is_case: false,
    }
}

/// The same with another size, and with guidance off where it is on.
fn unlike(request: GenerateRequest, case_steps: u32, model: &ModelInfo) -> GenerateRequest {
    let (default_width, default_height) = model.default_size;
    let guidance = request.guidance.unwrap_or(model.default_guidance);
    let width = request.width.unwrap_or(default_width);
    GenerateRequest {
        width: Some(other_side(width, model)),
        height: Some(request.height.unwrap_or(default_height)),
        guidance: Some(if guidance > 1.0 { 1.0 } else { 3.0 }),
        n_steps: Some(case_steps.saturating_add(2).min(GenerateRequest::MAX_STEPS)),
        ..request
    }
}

/// About half of `side_px` on the model's grid; the next larger one where that is no other.
fn other_side(side_px: u32, model: &ModelInfo) -> u32 {
    let grid_px = model.grid_px.max(1);
    let half_px = (side_px / 2 / grid_px).max(1) * grid_px;
    if half_px == side_px {
        side_px.saturating_add(grid_px).min(model.max_side_px)
    } else {
        half_px
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> ModelInfo {
        ModelInfo {
            family: "sd3".to_owned(),
            grid_px: 16,
            default_size: (64, 64),
            max_side_px: 128,
            default_n_steps: 20,
            default_guidance: 4.0,
            samplers: vec!["flow-euler".to_owned()],
            checkpoint_bytes: 1,
            ..ModelInfo::default()
        }
    }

    fn last_wave(one: &Participant) -> u32 {
        let n_steps = one.request.n_steps.unwrap_or(20);
        one.given_up_at.unwrap_or(one.joins_at + n_steps - 1)
    }

    #[test]
    fn others_come_before_with_and_after_the_case_and_leave_earlier_and_later() {
        for n_steps in [1, 2, 3, 20, 1000] {
            let case = GenerateRequest {
                n_steps: Some(n_steps),
                ..GenerateRequest::new("a case")
            };
            let all = among(&case, 4, &model());
            let at = all.iter().position(|one| one.is_case).unwrap();
            let the_case = &all[at];
            assert_eq!((all.len(), &the_case.request), (5, &case));
            assert!(all.is_sorted_by_key(|one| one.joins_at));
            let others: Vec<_> = all.iter().filter(|one| !one.is_case).collect();
            for order in [
                std::cmp::Ordering::Less,
                std::cmp::Ordering::Equal,
                std::cmp::Ordering::Greater,
            ] {
                assert!(
                    others
                        .iter()
                        .any(|one| one.joins_at.cmp(&the_case.joins_at) == order)
                );
            }
            assert!(others.iter().any(|one| last_wave(one) > last_wave(the_case)));
            if n_steps >= 3 {
                assert!(others.iter().any(|one| last_wave(one) < last_wave(the_case)));
                // The one that is given up has done a step by then.
                let given_up = others.iter().find(|one| one.given_up_at.is_some()).unwrap();
                assert!(last_wave(given_up) > given_up.joins_at);
                assert!(last_wave(given_up) <= last_wave(the_case));
            }
        }
    }

    #[test]
    fn some_fit_into_a_batch_with_the_case_and_some_do_not() {
        let case = GenerateRequest::new("a case");
        let all = among(&case, 4, &model());
        let alike = |one: &&Participant| {
            let request = &one.request;
            (request.width, request.height, request.guidance) == (case.width, case.height, case.guidance)
        };
        assert_eq!(all.iter().filter(alike).count(), 4, "with the case itself");
        let other = all.iter().find(|one| !alike(one)).unwrap();
        assert_eq!(
            (other.request.width, other.request.height, other.request.guidance),
            (Some(32), Some(64), Some(1.0))
        );
        let seeds: std::collections::BTreeSet<u64> = all.iter().map(|one| one.request.seed).collect();
        assert_eq!(seeds.len(), 5);
    }

    #[test]
    fn another_side_is_on_the_grid_and_allowed() {
        assert_eq!(other_side(64, &model()), 32);
        assert_eq!(other_side(48, &model()), 16);
        assert_eq!(other_side(16, &model()), 32);
        let one_size = ModelInfo {
            max_side_px: 16,
            ..model()
        };
        assert_eq!(other_side(16, &one_size), 16);
    }

    #[test]
    fn without_others_the_case_is_alone() {
        let case = GenerateRequest::new("a case");
        let all = among(&case, 0, &model());
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].request, case);
    }
}
