//! Every sampler against whole trajectories of diffusers, as `make_tables.py` wrote them to `trajectories.json`: timesteps, noise levels,
//! where pictures made from pictures start, what is known at each noise level, and the latents after each evaluation of a small model.

mod support;

use denoised_sampler::{Ask, FlowSigmas, Kind, Mu, Schedule};
use serde_json::Value;
use support::{build, config, floats, list, table};

/// Of the largest latents on the way: some units of a float32's last place.
const ROUNDING: f64 = 2e-7;

/// Relative L2; NaN is infinitely far.
fn distance(ours: &[f32], theirs: &[f32]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    if ours == theirs {
        return 0.0;
    }
    let square = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).powi(2);
    let norm: f64 = theirs.iter().map(|x| f64::from(*x).powi(2)).sum();
    let distance = (ours.iter().zip(theirs).map(square).sum::<f64>() / norm).sqrt();
    if distance.is_nan() {
        f64::INFINITY
    } else {
        distance
    }
}

/// The script's model of no depth.
fn predict(latents: &[f32], scale: f32, timestep: f32, drift: &[f32]) -> Vec<f32> {
    let x: Vec<f64> = latents.iter().map(|x| f64::from(x * scale)).collect();
    let n = x.len();
    let share = f64::from(timestep) / 1000.0;
    let y = |i: usize| {
        let pull = 0.7 * x[i] + 0.2 * x[(i + 1) % n] + f64::from(drift[i]) * share;
        (pull / (1.0 + 0.05 * x[i] * x[i])) as f32
    };
    (0..n).map(y).collect()
}

/// The first latents and those after every evaluation, as a pipeline would carry the schedule out.
fn run(schedule: &Schedule, start: Vec<f32>, drift: &[f32], draws: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let n = start.len();
    let mut all = vec![start.clone()];
    let mut state = vec![start];
    state.resize(1 + schedule.n_kept, vec![0.0; n]);
    let mut draws = draws.iter().cycle();
    for (idx, update) in schedule.updates.iter().enumerate() {
        let prediction = predict(
            &state[0],
            schedule.input_scales[idx],
            schedule.timesteps[idx],
            drift,
        );
        let adds_noise = update.rows.iter().any(|row| row[row.len() - 1] != 0.0);
        let noise = match adds_noise {
            true => draws.next().expect("they go round").clone(),
            false => vec![0.0; n],
        };
        let terms: Vec<&Vec<f32>> = state.iter().chain([&prediction, &noise]).collect();
        assert_eq!(update.rows.len(), state.len());
        let slot = |row: &Vec<f32>| -> Vec<f32> {
            assert_eq!(row.len(), terms.len());
            let sum = |i: usize| {
                row.iter()
                    .zip(&terms)
                    .map(|(factor, term)| factor * term[i])
                    .sum()
            };
            (0..n).map(sum).collect()
        };
        state = update.rows.iter().map(slot).collect();
        all.push(state[0].clone());
    }
    all
}

/// Largest differences of one case.
#[derive(Debug, Default)]
struct Differences {
    timesteps: f64,
    sigmas: f64,
    levels: f64,
    steps: f64,
}

struct Inputs {
    image: Vec<f32>,
    noise: Vec<f32>,
    drift: Vec<f32>,
    draws: Vec<Vec<f32>>,
}

fn differences(case: &Value, inputs: &Inputs) -> Differences {
    let asked = &case["asked"];
    let kind = match asked["kind"].as_str() {
        Some("flow") => Kind::Flow,
        _ => Kind::Discrete,
    };
    let mut config = config(&case["config"]);
    config.flow_sigmas = match asked["flow_sigmas"].as_str() {
        Some("numpy") => FlowSigmas::Numpy,
        Some("torch") => FlowSigmas::Torch,
        _ => FlowSigmas::Scheduler,
    };
    config.mu = match asked["mu"].as_str() {
        Some("flux2") => Mu::Flux2,
        _ => Mu::Linear,
    };
    let name = case["sampler"].as_str().expect("a name");
    let sampler = build(kind, name, &config).expect("supported settings");
    assert_eq!(sampler.name(), name);
    let sigmas = asked["sigmas"].is_array().then(|| floats(&asked["sigmas"]));
    let ask = Ask {
        n_steps: case["n_steps"].as_u64().expect("a number") as usize,
        sigmas: sigmas.as_deref(),
        n_tokens: asked["n_tokens"].as_u64().unwrap_or(0) as usize,
        strength: asked["strength"].as_f64().map(|strength| strength as f32),
    };
    if case["timesteps"].is_null() {
        let error = sampler.schedule(&ask).expect_err("no step is left").to_string();
        assert!(error.starts_with("strength is "), "{error}");
        return Differences::default();
    }
    let schedule = sampler.schedule(&ask).expect("a step count that works");
    let n = schedule.n_steps();
    assert_eq!(schedule.input_scales.len(), n);
    assert_eq!(schedule.updates.len(), n);
    assert_eq!(schedule.renoise.len(), n);
    assert_eq!(schedule.sigmas.len(), n + 1);

    let theirs = list(&case["steps"]);
    let mut worst = Differences {
        timesteps: distance(&schedule.timesteps, &floats(&case["timesteps"])),
        levels: distance(&schedule.start, &floats(&case["start"])),
        ..Differences::default()
    };
    let raise = |worst: &mut f64, value: f64| *worst = worst.max(value);
    if case["sigmas"].is_array() {
        // One by one, so that the small ones count.
        for (ours, theirs) in schedule.sigmas.iter().zip(floats(&case["sigmas"])) {
            raise(&mut worst.sigmas, distance(&[*ours], &[theirs]));
        }
    }
    raise(
        &mut worst.sigmas,
        distance(
            &[schedule.init_noise_scale],
            &floats_of(&case["init_noise_scale"]),
        ),
    );
    let input_scales = match case["input_scales"].is_null() {
        true => vec![1.0; n],
        false => floats(&case["input_scales"]),
    };
    raise(&mut worst.levels, distance(&schedule.input_scales, &input_scales));
    for theirs in list(&case["renoise"]) {
        let ours = schedule.renoise[theirs[0].as_u64().expect("an index") as usize];
        raise(&mut worst.levels, distance(&ours, &floats(&theirs[1])));
    }
    let start = match ask.strength {
        None => inputs
            .noise
            .iter()
            .map(|x| x * schedule.init_noise_scale)
            .collect(),
        Some(_) => {
            let [of_image, of_noise] = schedule.start;
            let both = inputs.image.iter().zip(&inputs.noise);
            both.map(|(image, noise)| of_image * image + of_noise * noise)
                .collect()
        }
    };
    let ours = run(&schedule, start, &inputs.drift, &inputs.draws);
    let mut largest: f64 = 0.0;
    for theirs in theirs {
        let idx = theirs[0].as_u64().expect("an index") as usize;
        let (ours, theirs, before) = (&ours[idx + 1], floats(&theirs[1]), &ours[idx]);
        largest = largest.max(norm(before));
        let far = distance(ours, &theirs);
        // Where the noise of a large sigma went in a few steps, float32 is as far from itself.
        let is_rounding = far * norm(&theirs) <= ROUNDING * largest;
        if !is_rounding {
            raise(&mut worst.steps, far);
        }
    }
    worst
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
}

fn floats_of(value: &Value) -> Vec<f32> {
    vec![value.as_f64().expect("a number") as f32]
}

#[test]
fn trajectories_are_diffusers() {
    let table = table("trajectories.json");
    let inputs = Inputs {
        image: floats(&table["image"]),
        noise: floats(&table["noise"]),
        drift: floats(&table["drift"]),
        draws: list(&table["draws"]).iter().map(floats).collect(),
    };
    let cases = list(&table["cases"]);
    let mut failures = Vec::new();
    let mut worst = std::collections::BTreeMap::<String, f64>::new();
    for case in cases {
        let found = differences(case, &inputs);
        let allowed = allowed(case);
        let entry = worst.entry(case["sampler"].as_str().expect("a name").to_owned());
        let entry = entry.or_default();
        *entry = entry.max(found.steps);
        let is_within = found.timesteps <= allowed.timesteps
            && found.sigmas <= allowed.sigmas
            && found.levels <= allowed.levels
            && found.steps <= allowed.steps;
        if !is_within {
            failures.push(format!(
                "{} of {} with {} steps, {}: {found:?} exceeds {allowed:?}",
                case["sampler"], case["config"], case["n_steps"], case["asked"]
            ));
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {} (largest errors of latents: {worst:?}):
{}",
        failures.len(),
        cases.len(),
        failures.join(
            "
"
        )
    );
}

fn allowed(case: &Value) -> Differences {
    let config = &case["config"];
    let is_set = |key: &str| config[key].as_bool().unwrap_or(false);
    let name = case["sampler"].as_str().expect("a name");
    let spacings = ["-karras", "-exponential", "-beta"];
    let is_interpolated = case["asked"]["sigmas"].is_array()
        || spacings.iter().any(|end| name.ends_with(end))
        || is_set("use_karras_sigmas")
        || is_set("use_exponential_sigmas")
        || is_set("use_beta_sigmas");
    let is_rescaled = is_set("rescale_betas_zero_snr");
    let mut allowed = Differences {
        // Where they come from logarithms of float32 square roots.
        timesteps: if is_interpolated || name.starts_with("dpm2") {
            5e-7
        } else {
            0.0
        },
        sigmas: if is_rescaled { 5e-6 } else { 3e-7 },
        levels: if is_rescaled { 5e-6 } else { 3e-7 },
        steps: match name {
            // diffusers divides a difference of latents by the sigma that a step goes to, which multiplies its rounding.
            "heun" => 3e-5,
            // It subtracts integrals in float32 that are larger than their difference.
            "deis" => 5e-5,
            _ => 1e-5,
        },
    };
    if name == "dpm2-a" && case["n_steps"].as_u64() < Some(4) {
        // The sigma that such a step goes down to is the root of a difference of nearly equal float32 numbers.
        allowed = Differences {
            timesteps: 1e-5,
            levels: 1e-5,
            steps: 2e-4,
            ..allowed
        };
    }
    allowed
}
