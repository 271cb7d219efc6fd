//! DDIM and Euler against the numbers of diffusers, as `make_tables.py` wrote them to `discrete.json`.

mod support;

use denoised_sampler::{
    Ask, BetaSchedule, FinalSigmas, Kind, PredictionType, Sampler, SamplerConfig, SamplerError,
    TimestepSpacing, TimestepType, Update,
};
use serde_json::Value;
use support::{build, config, list, table};

fn float(value: &Value) -> f32 {
    value.as_f64().map_or(f32::INFINITY, |value| value as f32)
}

fn floats(value: &Value) -> [f32; 2] {
    support::floats(value).try_into().expect("two numbers")
}

/// Relative to the second; NaN is infinitely far, infinity equals itself.
fn distance(ours: f32, theirs: f32) -> f64 {
    if ours == theirs {
        return 0.0;
    }
    let distance = f64::from((ours - theirs).abs()) / f64::from(theirs.abs());
    if distance.is_nan() {
        f64::INFINITY
    } else {
        distance
    }
}

fn norm(values: [f32; 2]) -> f64 {
    values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt()
}

/// Largest differences of one case.
#[derive(Debug, Default, PartialEq, PartialOrd)]
struct Differences {
    timesteps: f64,
    sigmas: f64,
    input_scales: f64,
    /// One step from diffusers' latents, relative to the larger of the latents before and after it: where the noise of thousands
    /// goes in one step, diffusers' own rounding is of that size.
    steps: f64,
    /// All steps from the first latents on, relative to the largest latents on the way.
    trajectory: f64,
}

fn differences(case: &Value, predictions: &[[f32; 2]], noise: [f32; 2]) -> Differences {
    let name = case["sampler"].as_str().expect("a name");
    let n_steps = case["n_steps"].as_u64().expect("a number") as usize;
    let sampler = build(Kind::Discrete, name, &config(&case["config"])).expect("supported settings");
    let schedule = sampler
        .schedule(&Ask::steps(n_steps))
        .expect("a step count that works");
    assert_eq!(sampler.name(), name);
    assert_eq!(schedule.n_steps(), n_steps);
    assert_eq!(schedule.sigmas.len(), n_steps + 1);
    assert_eq!(schedule.input_scales.len(), n_steps);
    assert_eq!(schedule.updates.len(), n_steps);

    let mut worst = Differences {
        sigmas: distance(schedule.init_noise_scale, float(&case["init_noise_scale"])),
        ..Differences::default()
    };
    let raise = |worst: &mut f64, value: f64| *worst = worst.max(value);
    for pair in list(&case["sigmas"]) {
        let idx = pair[0].as_u64().expect("an index") as usize;
        raise(&mut worst.sigmas, distance(schedule.sigmas[idx], float(&pair[1])));
    }
    let step = |idx: usize, latents: [f32; 2]| {
        let [c0, c1, c2] = schedule.updates[idx].rows[0][..] else {
            panic!("three factors")
        };
        assert_eq!(c2, 0.0);
        let prediction = predictions[idx % predictions.len()];
        [0, 1].map(|i| c0 * latents[i] + c1 * prediction[i])
    };
    let far = |ours: [f32; 2], theirs: [f32; 2]| {
        let far = norm([0, 1].map(|i| ours[i] - theirs[i]));
        if far.is_nan() { f64::INFINITY } else { far }
    };
    let steps = list(&case["steps"]);
    let is_whole = steps.len() == n_steps;
    let mut ours = noise.map(|x| x * schedule.init_noise_scale);
    let mut largest = norm(ours);
    for kept in steps {
        let idx = kept[0].as_u64().expect("an index") as usize;
        raise(
            &mut worst.timesteps,
            distance(schedule.timesteps[idx], float(&kept[1])),
        );
        raise(
            &mut worst.input_scales,
            distance(schedule.input_scales[idx], float(&kept[2])),
        );
        let (latents, theirs) = (floats(&kept[3]), floats(&kept[4]));
        let larger = norm(latents).max(norm(theirs));
        raise(&mut worst.steps, far(step(idx, latents), theirs) / larger);
        if is_whole {
            ours = step(idx, ours);
            largest = largest.max(larger);
            raise(&mut worst.trajectory, far(ours, theirs) / largest);
        }
    }
    worst
}

#[test]
fn schedules_and_steps_are_diffusers() {
    let table = table("discrete.json");
    let predictions: Vec<[f32; 2]> = list(&table["predictions"]).iter().map(floats).collect();
    let noise = floats(&table["noise"]);
    let cases = list(&table["cases"]);
    assert!(cases.len() > 200, "the table has {} cases", cases.len());
    for case in cases {
        let config = config(&case["config"]);
        let worst = differences(case, &predictions, noise);
        // Timesteps are equal but where they come from logarithms: of sigmas, whose square roots torch rounds in its own way, or,
        // continuous ones, by torch.
        let is_interpolated = config.use_karras_sigmas.or(config.use_exponential_sigmas) == Some(true);
        let is_continuous = config.timestep_type == Some(TimestepType::Continuous);
        // The rescaling subtracts nearly equal numbers, which raises the last place of torch's square roots.
        let is_rescaled = config.rescale_betas_zero_snr == Some(true);
        let allowed = Differences {
            timesteps: match (is_continuous, is_interpolated) {
                (true, _) => 2e-6,
                (false, true) => 5e-7,
                (false, false) => 0.0,
            },
            sigmas: if is_rescaled { 5e-6 } else { 2e-7 },
            input_scales: if is_rescaled { 1e-6 } else { 2e-7 },
            steps: if is_rescaled { 2e-6 } else { 4e-7 },
            trajectory: if is_rescaled { 5e-6 } else { 2e-6 },
        };
        let is_within = worst.timesteps <= allowed.timesteps
            && worst.sigmas <= allowed.sigmas
            && worst.input_scales <= allowed.input_scales
            && worst.steps <= allowed.steps
            && worst.trajectory <= allowed.trajectory;
        assert!(
            is_within,
            "{} of {} with {} steps: {worst:?} exceeds {allowed:?}",
            case["sampler"], case["config"], case["n_steps"]
        );
    }
}

/// Stable Diffusion's training schedule.
fn sd() -> SamplerConfig {
    SamplerConfig {
        beta_start: Some(0.00085),
        beta_end: Some(0.012),
        beta_schedule: Some(BetaSchedule::ScaledLinear),
        clip_sample: Some(false),
        ..SamplerConfig::default()
    }
}

/// Both samplers on one configuration.
fn both(config: &SamplerConfig) -> [Result<Box<dyn Sampler>, SamplerError>; 2] {
    ["ddim", "euler"].map(|name| build(Kind::Discrete, name, config))
}

#[test]
fn a_spacing_that_the_file_does_not_hold_is_that_of_the_sampler() {
    let [ddim, euler] = both(&sd()).map(|sampler| sampler.expect("supported"));
    assert_eq!(
        ddim.schedule(&Ask::steps(2)).expect("two steps").timesteps,
        [500.0, 0.0]
    );
    assert_eq!(
        euler.schedule(&Ask::steps(2)).expect("two steps").timesteps,
        [999.0, 0.0]
    );
}

#[test]
fn a_prediction_of_velocity_is_the_first_picture_where_no_signal_is_left() {
    let config = SamplerConfig {
        rescale_betas_zero_snr: Some(true),
        prediction_type: Some(PredictionType::VPrediction),
        timestep_spacing: Some(TimestepSpacing::Trailing),
        ..sd()
    };
    let schedule = build(Kind::Discrete, "ddim", &config)
        .expect("supported")
        .schedule(&Ask::steps(1))
        .expect("one step");
    // The velocity is minus the picture there, and the only step ends at the picture.
    assert_eq!(schedule.timesteps, [999.0]);
    assert_eq!(schedule.sigmas, [f32::INFINITY, 0.0]);
    let rows = vec![vec![0.0, -1.0, 0.0]];
    assert_eq!(schedule.updates, [Update { rows }]);
}

#[test]
fn step_counts_without_a_schedule_are_refused_with_their_numbers() {
    for sampler in both(&sd()) {
        let sampler = sampler.expect("supported");
        for n_steps in [0, 1001, usize::MAX] {
            let error = sampler.schedule(&Ask::steps(n_steps)).expect_err("out of range");
            let name = sampler.name();
            let expected = format!("steps is {n_steps}, sampler {name} takes 1 to 1000 with this model");
            assert_eq!(error.to_string(), expected);
        }
    }
    // 999 is the last training timestep, and the offset shifts the first step's beyond it. diffusers fails there too.
    let config = SamplerConfig {
        steps_offset: Some(1),
        ..sd()
    };
    let error = build(Kind::Discrete, "ddim", &config)
        .expect("supported")
        .schedule(&Ask::steps(1000));
    assert_eq!(
        error.expect_err("beyond the last").to_string(),
        "steps is 1000, sampler ddim takes a number whose first timestep, 1000, is below 1000 with this model"
    );
    // Noise alone tells nothing of the picture.
    let config = SamplerConfig {
        rescale_betas_zero_snr: Some(true),
        ..sd()
    };
    let ddim = build(Kind::Discrete, "ddim", &config).expect("supported");
    assert!(ddim.schedule(&Ask::steps(999)).is_ok());
    assert_eq!(
        ddim.schedule(&Ask::steps(1000))
            .expect_err("divides by zero")
            .to_string(),
        "steps is 1000, sampler ddim takes a number whose step 1 has both signal and noise to tell apart with this model"
    );
}

type Set = fn(&mut SamplerConfig);

fn unsupported_key(outcome: Result<impl std::fmt::Debug, SamplerError>) -> Option<&'static str> {
    match outcome {
        Ok(_) => None,
        Err(SamplerError::Unsupported { key, .. }) => Some(key),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn settings_that_would_change_the_result_are_refused_by_name_where_they_would() {
    let refused: [(&str, bool, bool, Set); 4] = [
        ("clip_sample", true, false, |config| {
            config.clip_sample = Some(true)
        }),
        ("thresholding", true, false, |config| {
            config.thresholding = Some(true)
        }),
        ("prediction_type", true, true, |config| {
            config.prediction_type = Some(PredictionType::Flow);
        }),
        ("prediction_type", true, false, |config| {
            config.rescale_betas_zero_snr = Some(true);
            config.timestep_spacing = Some(TimestepSpacing::Trailing);
        }),
    ];
    for (key, by_ddim, by_euler, set) in refused {
        let mut config = sd();
        set(&mut config);
        assert_eq!(
            unsupported_key(build(Kind::Discrete, "ddim", &config)),
            by_ddim.then_some(key)
        );
        assert_eq!(
            unsupported_key(build(Kind::Discrete, "euler", &config)),
            by_euler.then_some(key)
        );
    }
    let defaults = SamplerConfig::default();
    assert_eq!(
        build(Kind::Discrete, "ddim", &defaults)
            .expect_err("clips")
            .to_string(),
        "sampler DDIMScheduler: clip_sample = true is not supported, false is"
    );
}

#[test]
fn names_that_are_not_known_are_refused_with_those_that_are() {
    let error = BetaSchedule::from_name("sigmoid").expect_err("unknown");
    assert_eq!(
        error.to_string(),
        "sampler of any class: beta_schedule = sigmoid is not supported, \
         linear, scaled_linear or squaredcos_cap_v2 is"
    );
    assert!(PredictionType::from_name("").is_err());
    assert!(TimestepSpacing::from_name("").is_err());
    assert_eq!(FinalSigmas::SigmaMin.name(), "sigma_min");
}

#[test]
fn numbers_that_make_no_schedule_are_refused_by_name() {
    let invalid: [(&str, Set); 13] = [
        ("num_train_timesteps", |config| {
            config.num_train_timesteps = Some(0)
        }),
        ("num_train_timesteps", |config| {
            config.num_train_timesteps = Some(u32::MAX)
        }),
        ("beta_start", |config| config.beta_start = Some(f64::NAN)),
        ("beta_start", |config| config.beta_start = Some(-0.1)),
        ("beta_end", |config| config.beta_end = Some(f64::INFINITY)),
        ("beta_end", |config| config.beta_end = Some(1.5)),
        ("trained_betas", |config| config.trained_betas = Some(Vec::new())),
        ("trained_betas", |config| {
            config.trained_betas = Some(vec![0.1; 999])
        }),
        ("trained_betas", |config| {
            config.trained_betas = Some(vec![f64::NAN; 1000])
        }),
        ("steps_offset", |config| {
            config.timestep_spacing = Some(TimestepSpacing::Leading);
            config.steps_offset = Some(1000);
        }),
        // One timestep cannot keep its signal and have none.
        ("rescale_betas_zero_snr", |config| {
            config.num_train_timesteps = Some(1);
            config.rescale_betas_zero_snr = Some(true);
        }),
        ("rescale_betas_zero_snr", |config| {
            config.beta_start = Some(0.0);
            config.beta_end = Some(0.0);
            config.rescale_betas_zero_snr = Some(true);
        }),
        // Some signal is needed at each but the last.
        ("rescale_betas_zero_snr", |config| {
            config.trained_betas = Some(vec![1.0; 1000]);
            config.rescale_betas_zero_snr = Some(true);
        }),
    ];
    for (key, set) in invalid {
        let mut config = sd();
        set(&mut config);
        for outcome in both(&config) {
            match outcome {
                Err(SamplerError::Invalid { key: found, .. }) => assert_eq!(found, key),
                other => panic!("{key} gave {other:?}"),
            }
        }
    }
    let invalid: [(&str, Set); 5] = [
        ("sigma_min", |config| config.sigma_min = Some(0.0)),
        ("sigma_max", |config| config.sigma_max = Some(f64::NAN)),
        ("sigma_max", |config| config.sigma_max = Some(1e300)),
        ("beta_end", |config| config.beta_end = Some(1.0)),
        ("use_karras_sigmas", |config| {
            config.use_karras_sigmas = Some(true);
            config.use_exponential_sigmas = Some(true);
        }),
    ];
    for (key, set) in invalid {
        let mut config = sd();
        set(&mut config);
        match build(Kind::Discrete, "euler", &config) {
            Err(SamplerError::Invalid { key: found, .. }) => assert_eq!(found, key),
            other => panic!("{key} gave {other:?}"),
        }
    }
}

/// Schedules are finite or refused, whatever the settings.
#[test]
fn odd_settings_make_finite_schedules_or_errors() {
    let mut n_schedules = 0;
    let mut check = |config: &SamplerConfig| {
        for sampler in both(config).into_iter().flatten() {
            for n_steps in [1, 2, 3, 10, 999, 1000] {
                let Ok(schedule) = sampler.schedule(&Ask::steps(n_steps)) else {
                    continue;
                };
                n_schedules += 1;
                let factors: Vec<f32> = schedule
                    .updates
                    .iter()
                    .flat_map(|update| update.rows.concat())
                    .collect();
                let all = [&schedule.timesteps, &schedule.input_scales, &factors];
                let is_finite = all.into_iter().flatten().all(|value| value.is_finite());
                assert!(is_finite, "{} with {n_steps} steps of {config:?}", sampler.name());
                assert!(schedule.init_noise_scale.is_finite(), "{config:?}");
                assert!(schedule.sigmas.iter().all(|sigma| *sigma >= 0.0), "{config:?}");
            }
        }
    };
    let betas = [0.0, f64::MIN_POSITIVE, 1e-8, 0.02, 0.999, 1.0];
    let spacings = [
        None,
        Some(TimestepSpacing::Leading),
        Some(TimestepSpacing::Linspace),
        Some(TimestepSpacing::Trailing),
    ];
    let predictions = [
        PredictionType::Epsilon,
        PredictionType::VPrediction,
        PredictionType::Sample,
    ];
    let schedules = [
        BetaSchedule::Linear,
        BetaSchedule::ScaledLinear,
        BetaSchedule::SquaredCosine,
    ];
    for num_train_timesteps in [1, 2, 3, 10, 1000] {
        for (beta_start, beta_end) in betas.iter().flat_map(|a| betas.map(|b| (*a, b))) {
            for (beta_schedule, prediction_type) in
                schedules.iter().flat_map(|a| predictions.map(|b| (*a, b)))
            {
                for (case_idx, timestep_spacing) in spacings.into_iter().enumerate() {
                    check(&SamplerConfig {
                        num_train_timesteps: Some(num_train_timesteps),
                        beta_start: Some(beta_start),
                        beta_end: Some(beta_end),
                        beta_schedule: Some(beta_schedule),
                        prediction_type: Some(prediction_type),
                        timestep_spacing,
                        clip_sample: Some(false),
                        rescale_betas_zero_snr: Some(num_train_timesteps % 2 == 0),
                        use_karras_sigmas: Some(case_idx == 0),
                        use_exponential_sigmas: Some(case_idx == 2),
                        timestep_type: Some(TimestepType::Continuous),
                        ..SamplerConfig::default()
                    });
                }
            }
        }
    }
    assert!(n_schedules > 1000, "{n_schedules} schedules");
}
