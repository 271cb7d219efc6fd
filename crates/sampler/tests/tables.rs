//! The numbers of torch and diffusers, as `make_tables.py` wrote them.

mod support;

use denoised_sampler::{Ask, Kind, Sampler, SamplerConfig, SamplerError, TorchGenerator};
use support::{build, config, floats, table};

fn flow_euler(config: &SamplerConfig) -> Result<Box<dyn Sampler>, SamplerError> {
    build(Kind::Flow, "flow-euler", config)
}

fn largest_difference(ours: &[f32], theirs: &[f32]) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    let difference = |(a, b): (&f32, &f32)| {
        let d = (a - b).abs();
        if d.is_nan() { f32::INFINITY } else { d }
    };
    ours.iter().zip(theirs).map(difference).fold(0.0, f32::max)
}

fn normal(seed: u64, n: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; n];
    TorchGenerator::new(seed).fill_normal(&mut out);
    out
}

#[test]
fn noise_is_torchs_noise() {
    let table = table("noise.json");
    let mut worst = 0f32;
    for case in table["whole"].as_array().expect("a list") {
        let theirs = floats(&case["values"]);
        let ours = normal(case["seed"].as_u64().expect("a seed"), theirs.len());
        worst = worst.max(largest_difference(&ours, &theirs));
    }
    for case in table["sampled"].as_array().expect("a list") {
        let n = case["n"].as_u64().expect("a number") as usize;
        let ours = normal(case["seed"].as_u64().expect("a seed"), n);
        let stride = case["stride"].as_u64().expect("a number") as usize;
        let strided: Vec<f32> = ours.iter().copied().step_by(stride).collect();
        worst = worst.max(largest_difference(&strided, &floats(&case["values"])));
        worst = worst.max(largest_difference(&ours[n - 40..], &floats(&case["tail"])));
    }
    assert_eq!(worst, 0.0, "largest difference to torch's noise");
}

#[test]
fn consecutive_draws_share_the_kept_half_of_a_pair() {
    let table = table("noise.json");
    let case = &table["consecutive"];
    let mut generator = TorchGenerator::new(case["seed"].as_u64().expect("a seed"));
    for draw in case["draws"].as_array().expect("a list") {
        let theirs = floats(draw);
        let mut ours = vec![f32::NAN; theirs.len()];
        generator.fill_normal(&mut ours);
        assert_eq!(ours, theirs);
    }
}

#[test]
fn drawing_nothing_changes_nothing() {
    let mut generator = TorchGenerator::new(3);
    generator.fill_normal(&mut []);
    let mut out = [0.0; 4];
    generator.fill_normal(&mut out);
    assert_eq!(out.to_vec(), normal(3, 4));
}

#[test]
fn timesteps_sigmas_and_steps_are_diffusers() {
    let table = table("flow_euler.json");
    for case in table["cases"].as_array().expect("a list") {
        let config = config(&case["config"]);
        let sampler = flow_euler(&config).expect("supported settings");
        let n_steps = case["n_steps"].as_u64().expect("a number") as usize;
        let schedule = sampler
            .schedule(&Ask::steps(n_steps))
            .expect("a step count that works");
        let what = format!("{:?} with {n_steps} steps", case["config"]);
        assert_eq!(schedule.n_steps(), n_steps, "{what}");
        assert_eq!(schedule.input_scales, vec![1.0; n_steps], "{what}");
        assert_eq!(
            schedule.timesteps,
            floats(&case["timesteps"]),
            "timesteps of {what}"
        );
        assert_eq!(schedule.sigmas, floats(&case["sigmas"]), "sigmas of {what}");
        let prediction = floats(&case["prediction"]);
        let stepped = case["stepped"].as_array().expect("a list");
        let mut latents = floats(&stepped[0]);
        for (k, theirs) in stepped[1..].iter().enumerate() {
            let [c0, c1, c2] = schedule.updates[k].rows[0][..] else {
                panic!("three factors")
            };
            for (x, p) in latents.iter_mut().zip(&prediction) {
                *x = c0 * *x + c1 * p;
            }
            assert_eq!((c0, c2), (1.0, 0.0), "{what}");
            assert_eq!(latents, floats(theirs), "latents after step {k} of {what}");
        }
    }
}

#[test]
fn settings_that_would_change_the_result_are_refused_by_name() {
    type Set = fn(&mut SamplerConfig);
    let refused: [(&str, Set); 1] = [("invert_sigmas", |config| config.invert_sigmas = Some(true))];
    for (expected_key, set) in refused {
        let mut config = SamplerConfig::default();
        set(&mut config);
        match flow_euler(&config) {
            Err(SamplerError::Unsupported { key, .. }) => assert_eq!(key, expected_key),
            other => panic!("{expected_key} gave {other:?}"),
        }
    }
    let invalid: [Set; 9] = [
        |config| config.shift = Some(0.0),
        |config| config.shift = Some(f64::NAN),
        |config| config.shift = Some(-1.0),
        |config| config.num_train_timesteps = Some(0),
        |config| config.shift_terminal = Some(1.0),
        |config| config.shift_terminal = Some(f64::NAN),
        |config| {
            config.use_karras_sigmas = Some(true);
            config.use_beta_sigmas = Some(true);
        },
        |config| {
            config.use_dynamic_shifting = Some(true);
            config.base_shift = Some(f64::INFINITY);
        },
        |config| {
            config.use_dynamic_shifting = Some(true);
            config.max_image_seq_len = Some(256);
        },
    ];
    for set in invalid {
        let mut config = SamplerConfig::default();
        set(&mut config);
        let outcome = flow_euler(&config);
        assert!(matches!(outcome, Err(SamplerError::Invalid { .. })), "{config:?}");
    }
}

#[test]
fn a_terminal_shift_of_zero_is_none() {
    let config = SamplerConfig {
        shift: Some(3.0),
        shift_terminal: Some(0.0),
        ..SamplerConfig::default()
    };
    let sampler = flow_euler(&config).expect("supported");
    let schedule = sampler.schedule(&Ask::steps(1)).expect("one step");
    assert_eq!(schedule.sigmas, [1.0, 0.0]);
}

#[test]
fn no_steps_make_no_schedule() {
    let sampler = flow_euler(&SamplerConfig::default()).expect("supported");
    let error = sampler.schedule(&Ask::steps(0)).expect_err("no steps");
    assert_eq!(
        error.to_string(),
        "steps is 0, sampler flow-euler takes at least 1 with this model"
    );
}
