//! Our tensors against a reference's: what `verify` decides, without running anything.

use denoised_types::{NamedTensor, TensorDType};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};

/// Largest relative L2 error of a tensor.
const TENSOR_LIMIT: f64 = 1e-4;
/// Largest relative L2 error of a picture, the end of a long chain.
const IMAGE_LIMIT: f64 = 1e-3;

/// Least limit of a tensor that was computed in 16 bits.
const HALF_LIMIT: f64 = 2e-2;
/// What a tensor that was computed in 16 bits may differ, as a multiple of what the reference's own pipeline in bf16 does.
const HALF_FACTOR: f64 = 1.25;

/// What is demanded of the tensors of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand<'a> {
    /// Errors of the reference's own pipeline in bf16 by tensor, where ours computed in 16 bits too.
    pub(crate) half: Option<&'a BTreeMap<String, f64>>,
    /// Whether a case gets the same bits among other requests as alone. On a GPU the size of a batch decides how a product is summed:
    /// there it is only held to the limits.
    pub(crate) is_batch_exact: bool,
}

impl Demand<'_> {
    /// What holds for f32 on the CPU.
    #[cfg(test)]
    const EXACT: Self = Self {
        half: None,
        is_batch_exact: true,
    };

    /// Largest error of the tensor `name`.
    fn limit(&self, name: &str) -> f64 {
        let is_image = name == "image" || name == "seeded.image";
        match self.half {
            // Initial latents are drawn on the host, and f32 in any case.
            Some(bf16_error) if !name.ends_with("latents.init") => bf16_error
                .get(name)
                .map_or(HALF_LIMIT, |error| HALF_LIMIT.max(HALF_FACTOR * error)),
            _ if is_image => IMAGE_LIMIT,
            _ => TENSOR_LIMIT,
        }
    }

    /// The rule behind the limits, in words.
    pub(crate) fn rule(&self) -> &'static str {
        match self.half {
            None => "1e-4, pictures 1e-3",
            Some(_) => "the larger of 2e-2 and 1.25 times what diffusers' own bf16 differs from its f32",
        }
    }
}

/// Tensors by name.
pub(crate) type Tensors = BTreeMap<String, NamedTensor>;

/// One line of the result.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    /// Name of the tensor.
    pub(crate) name: String,
    /// Its shape: ours, or the reference's if we have none.
    pub(crate) shape: Vec<u64>,
    /// Relative L2 error over runs, the largest; `None` if the tensors cannot be compared or are compared exactly.
    pub(crate) error: Option<f64>,
    /// What the error may be; 0 means exact.
    pub(crate) limit: f64,
    /// SHA-256 of our elements, one entry if equal in all runs that must be, else one per run; empty if we have no such tensor.
    pub(crate) sha256: Vec<String>,
    /// What is wrong; `None` if nothing is.
    pub(crate) problem: Option<String>,
}

/// Compares what every run computed with the reference, names of both sides. The first `n_ranks` runs are those of the ranks, by
/// rank; further ones, if any, those of the same ranks when other requests shared the waves.
///
/// `renamed` maps names of ours to the name in the reference that they must equal, where it is not the same name.
pub(crate) fn compare(
    runs: &[Tensors],
    n_ranks: usize,
    reference: &Tensors,
    renamed: &[(&str, &str)],
    demand: Demand<'_>,
) -> Vec<Row> {
    let reference_name = |name: &str| -> String {
        let found = renamed.iter().find(|(ours, _)| *ours == name);
        found.map_or(name, |(_, theirs)| theirs).to_owned()
    };
    let ours = runs.iter().flat_map(|tensors| tensors.keys().cloned());
    let names: BTreeSet<String> = ours.chain(reference.keys().cloned()).collect();
    let mut names: Vec<String> = names.into_iter().collect();
    names.sort_by_key(|name| order_of(name));
    names
        .into_iter()
        .map(|name| {
            let expected = reference.get(&reference_name(&name));
            let found: Vec<Option<&NamedTensor>> = runs.iter().map(|tensors| tensors.get(&name)).collect();
            row(name, &found, n_ranks, expected, demand)
        })
        .collect()
}

/// Which run it was, in words.
fn run_name(run_idx: usize, n_ranks: usize) -> String {
    match run_idx.checked_sub(n_ranks) {
        None => format!("on rank {run_idx}"),
        Some(rank_idx) => format!("on rank {rank_idx} among other requests"),
    }
}

fn row(
    name: String,
    found: &[Option<&NamedTensor>],
    n_ranks: usize,
    expected: Option<&NamedTensor>,
    demand: Demand<'_>,
) -> Row {
    let mut row = Row {
        shape: found
            .iter()
            .flatten()
            .next()
            .copied()
            .or(expected)
            .map_or(Vec::new(), |tensor| tensor.shape.clone()),
        limit: match expected {
            Some(tensor) if tensor.dtype != TensorDType::F32 => 0.0,
            _ => demand.limit(&name),
        },
        name,
        error: None,
        sha256: Vec::new(),
        problem: None,
    };
    let sums: Vec<Option<String>> = found
        .iter()
        .map(|tensor| tensor.map(|tensor| hex(&Sha256::digest(&tensor.data))))
        .collect();
    if let Some((run_idx, _)) = sums.iter().enumerate().find(|(_, sum)| sum.is_none()) {
        row.sha256 = sums.iter().flatten().cloned().collect();
        row.sha256.dedup();
        row.problem = Some(if row.sha256.is_empty() {
            "in the reference only".to_owned()
        } else {
            format!("missing {}", run_name(run_idx, n_ranks))
        });
        return row;
    }
    row.sha256 = sums.into_iter().flatten().collect();
    let Some(expected) = expected else {
        row.sha256.dedup();
        row.problem = Some("not in the reference".to_owned());
        return row;
    };
    for (run_idx, tensor) in found.iter().flatten().enumerate() {
        match compare_one(tensor, expected) {
            Ok(error) => {
                if expected.dtype == TensorDType::F32 {
                    row.error = Some(row.error.map_or(error, |largest| largest.max(error)));
                }
                // Written so that NaN fails.
                let is_within = error <= row.limit;
                if !is_within && row.problem.is_none() {
                    row.problem = Some(if row.limit == 0.0 {
                        "not equal".to_owned()
                    } else {
                        "above the limit".to_owned()
                    });
                }
            }
            Err(problem) => {
                row.error = None;
                row.problem = Some(if found.len() > 1 {
                    format!("{problem} {}", run_name(run_idx, n_ranks))
                } else {
                    problem
                });
                break;
            }
        }
    }
    if !demand.is_batch_exact {
        row.sha256.truncate(n_ranks);
    }
    match row.sha256.iter().position(|sum| *sum != row.sha256[0]) {
        None => row.sha256.truncate(1),
        Some(run_idx) if row.problem.is_none() => {
            row.problem = Some(if run_idx < n_ranks {
                "not the same on all ranks".to_owned()
            } else {
                "not the same among other requests as alone".to_owned()
            });
        }
        Some(_) => {}
    }
    row
}

/// The error of one tensor; for integers 0 (equal) or infinity.
fn compare_one(found: &NamedTensor, expected: &NamedTensor) -> Result<f64, String> {
    if found.dtype != expected.dtype {
        return Err(format!("is {:?}, expected {:?}", found.dtype, expected.dtype));
    }
    if found.shape != expected.shape {
        return Err(format!(
            "has shape {}, expected {}",
            shown(&found.shape),
            shown(&expected.shape)
        ));
    }
    if !found.is_consistent() || !expected.is_consistent() {
        return Err("has another number of elements than its shape".to_owned());
    }
    let (Some(found_values), Some(expected_values)) = (found.to_f32(), expected.to_f32()) else {
        return Ok(if found.data == expected.data {
            0.0
        } else {
            f64::INFINITY
        });
    };
    if let Some(position) = found_values.iter().position(|value| !value.is_finite()) {
        return Err(format!("is {} at element {position}", found_values[position]));
    }
    if let Some(position) = expected_values.iter().position(|value| !value.is_finite()) {
        return Err(format!(
            "is {} at element {position} of the reference",
            expected_values[position]
        ));
    }
    Ok(relative_l2(&found_values, &expected_values))
}

/// `||found - expected|| / ||expected||`; if the denominator is 0, 0 for equal tensors and infinity otherwise.
fn relative_l2(found: &[f32], expected: &[f32]) -> f64 {
    let mut difference = 0.0f64;
    let mut norm = 0.0f64;
    for (&found, &expected) in found.iter().zip(expected) {
        difference += (f64::from(found) - f64::from(expected)).powi(2);
        norm += f64::from(expected).powi(2);
    }
    if norm == 0.0 {
        return if difference == 0.0 { 0.0 } else { f64::INFINITY };
    }
    (difference / norm).sqrt()
}

/// Joins what the requests of a batch of prompts returned: stacked on dimension 0, where a request has several rows all first ones before
/// all second ones; token ids, and encodings of which the reference holds a list, under their prompt's number.
///
/// # Errors
/// A tensor that not every request returned, or whose shapes do not fit on each other.
pub(crate) fn stack(requests: Vec<Vec<NamedTensor>>) -> Result<Tensors, String> {
    let mut stacked = Tensors::new();
    let n_requests = requests.len();
    let mut parts: BTreeMap<String, Vec<NamedTensor>> = BTreeMap::new();
    for (prompt_idx, tensors) in requests.into_iter().enumerate() {
        let mut seen = BTreeSet::new();
        for mut tensor in tensors {
            if !seen.insert(tensor.name.clone()) {
                return Err(format!("the worker returned {} twice", tensor.name));
            }
            let of_list = tensor.name.split_once(".list0.");
            let own_name = match of_list {
                Some((tuple, call)) => Some(format!("{tuple}.list{prompt_idx}.{call}")),
                None if !tensor.name.starts_with("token_ids") => None,
                None if prompt_idx == 0 => Some(tensor.name.clone()),
                None => Some(format!("{}.prompt{prompt_idx}", tensor.name)),
            };
            match own_name {
                Some(name) => {
                    tensor.name = name;
                    stacked.insert(tensor.name.clone(), tensor);
                }
                None => parts.entry(tensor.name.clone()).or_default().push(tensor),
            }
        }
    }
    for (name, of_requests) in parts {
        if of_requests.len() != n_requests {
            let n_parts = of_requests.len();
            return Err(format!("{n_parts} of {n_requests} prompts returned {name}"));
        }
        // Encodings without a dimension for prompts are positions, those of all texts (FLUX.1).
        let is_shared = name.starts_with("encode_prompt.")
            && of_requests
                .iter()
                .all(|one| one.shape.first() != Some(&1) && one.data == of_requests[0].data);
        let joined = match of_requests.first() {
            Some(first) if is_shared => first.clone(),
            _ => {
                let (padded, mask) = padded(&name, of_requests);
                stacked.extend(mask.map(|mask| (mask.name.clone(), mask)));
                joined(padded)?
            }
        };
        stacked.insert(name, joined);
    }
    Ok(stacked)
}

/// Encodings `[1, tokens, c]` of unequal texts as a reference has them in one batch (Qwen-Image): with zeros behind the shorter ones, and
/// the mask of what counts behind them in the tuple that `encode_prompt` returns.
fn padded(name: &str, mut parts: Vec<NamedTensor>) -> (Vec<NamedTensor>, Option<NamedTensor>) {
    let n_tokens = |one: &NamedTensor| match one.shape[..] {
        [1, n, _] => Some(n),
        _ => None,
    };
    let lengths: Option<Vec<u64>> = parts.iter().map(n_tokens).collect();
    let place = name.strip_prefix("encode_prompt.").and_then(|place| {
        let (idx, call) = place.split_once('.')?;
        Some((idx.parse::<u64>().ok()?, call))
    });
    let (Some(lengths), Some((idx, call))) = (lengths, place) else {
        return (parts, None);
    };
    let longest = lengths.iter().copied().max().unwrap_or(0);
    if lengths.iter().all(|n| *n == longest) {
        return (parts, None);
    }
    for (one, n) in parts.iter_mut().zip(&lengths) {
        let row_bytes = one.data.len() / (*n).max(1) as usize;
        one.shape[1] = longest;
        one.data.resize(row_bytes * longest as usize, 0);
    }
    let counts = lengths
        .iter()
        .flat_map(|n| (0..longest).map(move |token| i64::from(token < *n)));
    let shape = [lengths.len() as u64, longest];
    let mask_name = format!("encode_prompt.{}.{call}", idx + 1);
    let mask = NamedTensor::from_i64(mask_name, &shape, &counts.collect::<Vec<_>>());
    (parts, Some(mask))
}

fn joined(mut parts: Vec<NamedTensor>) -> Result<NamedTensor, String> {
    if parts.len() == 1 {
        return Ok(parts.remove(0));
    }
    let mut whole = parts[0].clone();
    let differs = |one: &&NamedTensor| one.dtype != whole.dtype || one.shape != whole.shape;
    let n_rows = whole.shape.first().map_or(0, |rows| *rows as usize);
    match parts.iter().find(differs) {
        None if n_rows > 0 && parts.iter().all(NamedTensor::is_consistent) => {}
        other => {
            return Err(format!(
                "{} of one prompt has shape {}, of another {}",
                whole.name,
                shown(&whole.shape),
                shown(&other.unwrap_or(&whole).shape)
            ));
        }
    }
    whole.shape[0] *= parts.len() as u64;
    let row_bytes = whole.data.len() / n_rows;
    let rows = (0..n_rows).flat_map(|row_idx| {
        let row = move |one: &NamedTensor| one.data[row_idx * row_bytes..][..row_bytes].to_vec();
        parts.iter().flat_map(row)
    });
    whole.data = rows.collect();
    Ok(whole)
}

/// Element `part_idx` of `n_parts` equal parts of dimension 0.
pub(crate) fn part(tensor: &NamedTensor, part_idx: usize, n_parts: usize) -> Option<NamedTensor> {
    let rows = *tensor.shape.first()?;
    if n_parts == 0 || rows % n_parts as u64 != 0 || part_idx >= n_parts || !tensor.is_consistent() {
        return None;
    }
    let part_bytes = tensor.data.len() / n_parts;
    let mut shape = tensor.shape.clone();
    shape[0] = rows / n_parts as u64;
    Some(NamedTensor {
        name: tensor.name.clone(),
        dtype: tensor.dtype,
        shape,
        data: tensor.data[part_idx * part_bytes..][..part_bytes].to_vec(),
    })
}

/// `[1, 16, 16]` as `1x16x16`.
pub(crate) fn shown(shape: &[u64]) -> String {
    if shape.is_empty() {
        return "scalar".to_owned();
    }
    let extents: Vec<String> = shape.iter().map(u64::to_string).collect();
    extents.join("x")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Order of computation: ids, encodings, initial latents, steps, pictures; numbers by value.
fn order_of(name: &str) -> (usize, u64, usize, String) {
    const GROUPS: &[&str] = &[
        "token_ids",
        "encode_prompt",
        "latents.init",
        "",
        "image",
        "seeded",
    ];
    let number = || {
        name.rsplit(['.', '_'])
            .next()
            .and_then(|last| last.parse().ok())
            .unwrap_or(0)
    };
    if let Some(kind) = ["noise_pred.", "latents.step_"]
        .iter()
        .position(|prefix| name.starts_with(prefix))
    {
        return (3, number(), kind, name.to_owned());
    }
    let group = GROUPS
        .iter()
        .position(|group| !group.is_empty() && name.starts_with(group));
    (group.unwrap_or(GROUPS.len()), 0, 0, name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensors(list: &[NamedTensor]) -> Tensors {
        list.iter()
            .map(|tensor| (tensor.name.clone(), tensor.clone()))
            .collect()
    }

    fn one(name: &str, values: &[f32]) -> NamedTensor {
        NamedTensor::from_f32(name, &[1, values.len() as u64], values)
    }

    fn problem(found: &[NamedTensor], expected: &[NamedTensor]) -> Option<String> {
        let rows = compare(&[tensors(found)], 1, &tensors(expected), &[], Demand::EXACT);
        rows.into_iter().find_map(|row| row.problem)
    }

    #[test]
    fn relative_error_is_the_quotient_of_norms() {
        // ||(0.3, 0.4)|| = 0.5 over ||(3, 4)|| = 5.
        let rows = compare(
            &[tensors(&[one("x", &[3.3, 4.4])])],
            1,
            &tensors(&[one("x", &[3.0, 4.0])]),
            &[],
            Demand::EXACT,
        );
        assert!((rows[0].error.unwrap() - 0.1).abs() < 1e-6);
        assert_eq!(rows[0].problem.as_deref(), Some("above the limit"));
    }

    #[test]
    fn limits_are_1e_4_and_1e_3_for_pictures() {
        let expected = |name: &str| [one(name, &[1.0])];
        assert_eq!(problem(&[one("x", &[1.00009])], &expected("x")), None);
        assert!(problem(&[one("x", &[1.0002])], &expected("x")).is_some());
        for name in ["image", "seeded.image"] {
            assert_eq!(problem(&[one(name, &[1.0009])], &expected(name)), None);
            assert!(problem(&[one(name, &[1.002])], &expected(name)).is_some());
        }
    }

    #[test]
    fn limits_in_16_bits_follow_the_reference_in_bf16() {
        let bf16_error = BTreeMap::from([("x".to_owned(), 0.04), ("image".to_owned(), 0.001)]);
        let demand = Demand {
            half: Some(&bf16_error),
            is_batch_exact: false,
        };
        for (name, limit) in [
            ("x", 0.05),
            ("image", 0.02),
            ("unknown", 0.02),
            ("latents.init", 1e-4),
            ("seeded.latents.init", 1e-4),
        ] {
            assert!((demand.limit(name) - limit).abs() < 1e-12, "{name}");
        }
        // Among others it may differ within the limit, on another rank it may not.
        let reference = tensors(&[one("x", &[1.0])]);
        let (alone, among) = (tensors(&[one("x", &[1.0])]), tensors(&[one("x", &[1.04])]));
        let problem = |n_ranks| {
            let rows = compare(&[alone.clone(), among.clone()], n_ranks, &reference, &[], demand);
            rows[0].problem.clone()
        };
        assert_eq!(problem(1), None);
        assert_eq!(problem(2).as_deref(), Some("not the same on all ranks"));
        let far = tensors(&[one("x", &[1.06])]);
        let rows = compare(&[alone.clone(), far], 1, &reference, &[], demand);
        assert_eq!(rows[0].problem.as_deref(), Some("above the limit"));
    }

    #[test]
    fn nan_infinity_and_a_zero_reference_are_no_way_out() {
        assert!(
            problem(&[one("x", &[f32::NAN])], &[one("x", &[1.0])])
                .unwrap()
                .contains("NaN")
        );
        assert!(problem(&[one("x", &[f32::INFINITY])], &[one("x", &[1.0])]).is_some());
        assert!(problem(&[one("x", &[f32::NAN])], &[one("x", &[f32::NAN])]).is_some());
        assert!(problem(&[one("x", &[1e-30])], &[one("x", &[0.0])]).is_some());
        assert_eq!(problem(&[one("x", &[0.0])], &[one("x", &[0.0])]), None);
    }

    #[test]
    fn integers_are_compared_exactly() {
        let ids = |last| NamedTensor::from_i64("token_ids", &[1, 2], &[49406, last]);
        assert_eq!(problem(&[ids(7)], &[ids(7)]), None);
        assert_eq!(problem(&[ids(8)], &[ids(7)]).as_deref(), Some("not equal"));
        let floats = one("token_ids", &[49406.0, 7.0]);
        assert!(problem(&[floats], &[ids(7)]).unwrap().contains("I64"));
    }

    #[test]
    fn names_are_matched_both_ways_and_shapes_must_be_equal() {
        let (x, y) = (one("x", &[1.0]), one("y", &[1.0]));
        assert_eq!(
            problem(std::slice::from_ref(&x), &[x.clone(), y.clone()]).as_deref(),
            Some("in the reference only")
        );
        assert_eq!(
            problem(&[x.clone(), y], std::slice::from_ref(&x)).as_deref(),
            Some("not in the reference")
        );
        let flat = NamedTensor::from_f32("x", &[1], &[1.0]);
        assert_eq!(
            problem(&[flat], &[x]).as_deref(),
            Some("has shape 1, expected 1x1")
        );
    }

    #[test]
    fn ranks_must_agree_to_the_last_bit() {
        let reference = tensors(&[one("x", &[1.0])]);
        let (same, other) = (tensors(&[one("x", &[1.0])]), tensors(&[one("x", &[1.000001])]));
        let rows = compare(&[same.clone(), same.clone()], 2, &reference, &[], Demand::EXACT);
        assert_eq!((rows[0].problem.clone(), rows[0].sha256.len()), (None, 1));
        let rows = compare(&[same.clone(), other.clone()], 2, &reference, &[], Demand::EXACT);
        assert_eq!(rows[0].problem.as_deref(), Some("not the same on all ranks"));
        assert_eq!(rows[0].sha256.len(), 2);
        let rows = compare(&[same.clone(), Tensors::new()], 2, &reference, &[], Demand::EXACT);
        assert_eq!(rows[0].problem.as_deref(), Some("missing on rank 1"));
        // The same with other requests in the waves of one rank.
        let rows = compare(&[same.clone(), other], 1, &reference, &[], Demand::EXACT);
        assert_eq!(
            rows[0].problem.as_deref(),
            Some("not the same among other requests as alone")
        );
        let rows = compare(&[same, Tensors::new()], 1, &reference, &[], Demand::EXACT);
        assert_eq!(
            rows[0].problem.as_deref(),
            Some("missing on rank 0 among other requests")
        );
    }

    #[test]
    fn a_renamed_tensor_is_compared_with_its_namesake() {
        let ours = [one("latents.init", &[1.0]), one("seeded.latents.init", &[2.0])];
        let rows = compare(
            &[tensors(&ours)],
            1,
            &tensors(&[one("latents.init", &[1.0])]),
            &[("seeded.latents.init", "latents.init")],
            Demand::EXACT,
        );
        assert_eq!(rows[0].problem, None);
        assert_eq!(rows[1].problem.as_deref(), Some("above the limit"));
    }

    #[test]
    fn sha_256_is_that_of_the_elements() {
        // sha256 of the four bytes 00 00 80 3f, from coreutils' sha256sum.
        let rows = compare(
            &[tensors(&[one("x", &[1.0])])],
            1,
            &tensors(&[one("x", &[1.0])]),
            &[],
            Demand::EXACT,
        );
        assert_eq!(
            rows[0].sha256,
            ["e00e5eb9444182f352323374ef4e08ebcb784725fdd4fd612d7730540b3e0c8c"]
        );
    }

    #[test]
    fn prompts_of_a_batch_are_stacked_and_their_ids_numbered() {
        let request = |id: i64, value: f32| {
            vec![
                NamedTensor::from_i64("token_ids.2", &[1, 1], &[id]),
                NamedTensor::from_f32("image", &[1, 2], &[value, value]),
            ]
        };
        let stacked = stack(vec![request(5, 0.5), request(6, 0.25)]).unwrap();
        let names: Vec<&str> = stacked.keys().map(String::as_str).collect();
        assert_eq!(names, ["image", "token_ids.2", "token_ids.2.prompt1"]);
        assert_eq!(stacked["image"].shape, [2, 2]);
        assert_eq!(stacked["image"].to_f32().unwrap(), [0.5, 0.5, 0.25, 0.25]);
        let second = part(&stacked["image"], 1, 2).unwrap();
        assert_eq!((second.shape, second.data.len()), (vec![1, 2], 8));
        assert!(part(&stacked["image"], 0, 3).is_none());

        // Positions without a dimension for prompts are those of both.
        let positions = || vec![NamedTensor::from_f32("encode_prompt.2.0", &[3, 2], &[0.0; 6])];
        let stacked = stack(vec![positions(), positions()]).unwrap();
        assert_eq!(stacked["encode_prompt.2.0"].shape, [3, 2]);

        // Two rows each, as guidance that doubles the latents has them, and an encoding of its own length.
        let doubled = |value: f32, n_tokens: usize| {
            vec![
                NamedTensor::from_f32("noise_pred.0", &[2, 1], &[value, -value]),
                NamedTensor::from_f32(
                    "encode_prompt.0.list0.0",
                    &[n_tokens as u64, 1],
                    &vec![value; n_tokens],
                ),
            ]
        };
        let stacked = stack(vec![doubled(1.0, 2), doubled(2.0, 3)]).unwrap();
        assert_eq!(stacked["noise_pred.0"].to_f32().unwrap(), [1.0, 2.0, -1.0, -2.0]);
        assert_eq!(stacked["encode_prompt.0.list0.0"].shape, [2, 1]);
        assert_eq!(stacked["encode_prompt.0.list1.0"].shape, [3, 1]);

        let mut short = request(6, 0.25);
        short.pop();
        assert!(
            stack(vec![request(5, 0.5), short])
                .unwrap_err()
                .contains("1 of 2 prompts")
        );
    }

    #[test]
    fn encodings_of_unequal_texts_are_padded_and_masked_as_in_a_batch() {
        let tokens = |n: u64| {
            let values: Vec<f32> = (0..2 * n).map(|x| x as f32).collect();
            vec![NamedTensor::from_f32("encode_prompt.0.1", &[1, n, 2], &values)]
        };
        let stacked = stack(vec![tokens(1), tokens(2)]).unwrap();
        let whole = &stacked["encode_prompt.0.1"];
        assert_eq!(whole.shape, [2, 2, 2]);
        assert_eq!(whole.to_f32().unwrap(), [0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0]);
        let mask = NamedTensor::from_i64("encode_prompt.1.1", &[2, 2], &[1, 0, 1, 1]);
        assert_eq!(stacked["encode_prompt.1.1"], mask);
        assert_eq!(stack(vec![tokens(2), tokens(2)]).unwrap().len(), 1);
    }

    #[test]
    fn rows_come_in_order_of_computation() {
        let mut names = vec![
            "seeded.image",
            "image",
            "latents.step_10",
            "noise_pred.10",
            "noise_pred.9",
            "latents.step_9",
            "latents.init",
            "encode_prompt.0.0",
            "token_ids.2",
            "token_ids",
        ];
        names.sort_by_key(|name| order_of(name));
        names.reverse();
        assert_eq!(
            names,
            [
                "seeded.image",
                "image",
                "latents.step_10",
                "noise_pred.10",
                "latents.step_9",
                "noise_pred.9",
                "latents.init",
                "encode_prompt.0.0",
                "token_ids.2",
                "token_ids",
            ]
        );
    }
}
