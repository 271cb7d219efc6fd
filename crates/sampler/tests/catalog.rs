//! Names of samplers, and what every one of them makes of odd settings.

mod support;

use denoised_sampler::{
    Ask, BetaSchedule, FinalSigmas, Kind, PredictionType, SamplerConfig, SamplerError, TimestepSpacing,
    find_sampler, names_of, own_sampler, sampler_names, summarize_samplers,
};
use support::build;

fn find(asked: &str, kind: Kind) -> Option<&'static str> {
    find_sampler(asked, names_of(kind))
}

/// Names of AUTOMATIC1111's web UI, of ComfyUI and of k-diffusion, and classes of diffusers.
#[test]
fn names_that_others_give_are_understood_whatever_their_case() {
    for (asked, name) in [
        ("ddim", "ddim"),
        ("DDIM", "ddim"),
        ("DDIMScheduler", "ddim"),
        ("Euler", "euler"),
        ("Euler a", "euler-a"),
        ("euler_ancestral", "euler-a"),
        ("EulerAncestralDiscreteScheduler", "euler-a"),
        ("Heun", "heun"),
        ("heun_karras", "heun-karras"),
        ("DPM++ 2M", "dpm++-2m"),
        ("dpmpp_2m", "dpm++-2m"),
        ("DPM++ 2M Karras", "dpm++-2m-karras"),
        ("dpmpp_2m_karras", "dpm++-2m-karras"),
        ("k_dpmpp_2m_exponential", "dpm++-2m-exponential"),
        ("DPMSolverMultistepScheduler", "dpm++-2m"),
        ("DPM++ 2M SDE", "dpm++-2m-sde"),
        ("DPM++ 2M SDE Karras", "dpm++-2m-sde-karras"),
        ("dpmpp_2m_sde_gpu", "dpm++-2m-sde"),
        ("DPM++ 3M SDE Exponential", "dpm++-3m-sde-exponential"),
        ("DPM++ SDE", "dpm++-sde"),
        ("DPM++ SDE Karras", "dpm++-sde-karras"),
        ("dpmpp_sde", "dpm++-sde"),
        ("UniPC", "unipc"),
        ("uni_pc", "unipc"),
        ("uni_pc_bh2", "unipc"),
        ("LCM", "lcm"),
        ("PLMS", "pndm"),
        ("PNDMScheduler", "pndm"),
        ("DDPM", "ddpm"),
        ("TCD", "tcd"),
        ("LMS", "lms"),
        ("LMS Karras", "lms-karras"),
        ("DPM2", "dpm2"),
        ("dpm_2", "dpm2"),
        ("DPM2 a", "dpm2-a"),
        ("dpm_2_ancestral", "dpm2-a"),
        ("DEIS", "deis"),
        ("euler_sgm_uniform", "euler-trailing"),
        ("euler_ancestral_sgm_uniform", "euler-a-trailing"),
    ] {
        assert_eq!(find(asked, Kind::Discrete), Some(name), "{asked}");
    }
    for (asked, name) in [
        ("Euler", "flow-euler"),
        ("euler", "flow-euler"),
        ("euler_beta", "flow-euler-beta"),
        ("FlowMatchEulerDiscreteScheduler", "flow-euler"),
        ("Heun", "flow-heun"),
        ("dpmpp_2m", "dpm++-2m"),
        ("UniPC", "unipc"),
    ] {
        assert_eq!(find(asked, Kind::Flow), Some(name), "{asked}");
    }
    for asked in ["", "magic", "flow-euler", "eulers"] {
        assert_eq!(find(asked, Kind::Discrete), None, "{asked}");
    }
    // Only what a model offers.
    assert_eq!(find_sampler("Euler a", ["ddim", "euler"]), None);
}

#[test]
fn a_summary_names_each_solver_once() {
    let names = ["ddim", "euler", "euler-karras", "euler-beta", "lms-karras", "own"];
    assert_eq!(
        summarize_samplers(names),
        "ddim, euler[-karras|-beta], lms(-karras), own"
    );
}

#[test]
fn no_name_means_two_samplers() {
    for kind in [Kind::Discrete, Kind::Flow] {
        let rows: Vec<_> = sampler_names()
            .into_iter()
            .filter(|row| row.kind == kind)
            .collect();
        let names: Vec<&str> = rows.iter().map(|row| row.name).collect();
        assert_eq!(names, names_of(kind).collect::<Vec<_>>());
        for row in &rows {
            assert_eq!(find(row.name, kind), Some(row.name));
            for alias in &row.aliases {
                assert_eq!(find(alias, kind), Some(row.name), "{alias}");
                assert!(!names.contains(&alias.as_str()), "{alias}");
            }
        }
    }
}

#[test]
fn a_checkpoint_asks_for_the_sampler_that_changes_none_of_its_settings() {
    let own = |class, algorithm: Option<&str>| {
        let config = SamplerConfig {
            algorithm_type: algorithm.map(str::to_owned),
            ..SamplerConfig::default()
        };
        own_sampler(Kind::Discrete, class, &config)
    };
    assert_eq!(own("DDIMScheduler", None), Some("ddim"));
    assert_eq!(own("PNDMScheduler", None), Some("pndm"));
    assert_eq!(own("DPMSolverMultistepScheduler", None), Some("dpm++-2m"));
    assert_eq!(own("DPMSolverMultistepScheduler", Some("deis")), Some("dpm++-2m"));
    assert_eq!(
        own("DPMSolverMultistepScheduler", Some("sde-dpmsolver++")),
        Some("dpm++-2m-sde")
    );
    assert_eq!(
        own("DPMSolverMultistepScheduler", Some("dpmsolver")),
        Some("dpm-solver")
    );
    assert_eq!(
        own("DPMSolverSinglestepScheduler", Some("sde-dpmsolver++")),
        Some("dpm++-sde")
    );
    assert_eq!(
        own("EulerDiscreteScheduler", Some("sde-dpmsolver++")),
        Some("euler")
    );
    assert_eq!(own("DPMSolverSDEScheduler", None), None);
    assert_eq!(own("FlowMatchEulerDiscreteScheduler", None), None);
    let config = SamplerConfig::default();
    assert_eq!(
        own_sampler(Kind::Flow, "UniPCMultistepScheduler", &config),
        Some("unipc")
    );
}

#[test]
fn sigmas_and_strengths_that_make_no_schedule_are_refused() {
    let config = SamplerConfig {
        clip_sample: Some(false),
        skip_prk_steps: Some(true),
        ..SamplerConfig::default()
    };
    for kind in [Kind::Discrete, Kind::Flow] {
        for name in names_of(kind) {
            let Ok(sampler) = build(kind, name, &config) else {
                continue;
            };
            let mut takes_sigmas = false;
            for sigmas in [&[1.0, 0.5, 0.25][..], &[0.5, 0.5], &[f32::NAN], &[]] {
                let ask = Ask {
                    sigmas: Some(sigmas),
                    ..Ask::steps(3)
                };
                match sampler.schedule(&ask) {
                    Ok(_) => {
                        assert_eq!(sigmas, [1.0, 0.5, 0.25], "{name}");
                        takes_sigmas = true;
                    }
                    Err(SamplerError::Sigmas { sampler, .. }) => assert_eq!(sampler, name),
                    Err(error) => panic!("{name}: {error}"),
                }
            }
            let expected = name.starts_with("euler") && !name.starts_with("euler-a")
                || kind == Kind::Flow && !name.starts_with("dpm") && name != "deis";
            assert_eq!(takes_sigmas, expected, "{name}");
            for strength in [-0.1, 0.0, 1.5, f32::NAN] {
                let ask = Ask {
                    strength: Some(strength),
                    ..Ask::steps(4)
                };
                let error = sampler.schedule(&ask).expect_err("no step is left");
                assert!(matches!(error, SamplerError::Strength { .. }), "{name}: {error}");
            }
        }
    }
}

#[test]
fn a_strength_that_leaves_no_step_is_refused_with_one_that_would_do() {
    let config = SamplerConfig::default();
    let sampler = build(Kind::Discrete, "euler", &config).expect("supported");
    let ask = |strength| Ask {
        strength: Some(strength),
        ..Ask::steps(30)
    };
    assert_eq!(
        sampler
            .schedule(&ask(0.03))
            .expect_err("0.9 of a step")
            .to_string(),
        "strength is 0.03, with 30 steps it must be at least 0.034"
    );
    assert_eq!(sampler.schedule(&ask(0.034)).expect("one step").n_steps(), 1);
    // The nearest float32 of 0.7 is below 0.7.
    let n_steps = sampler.schedule(&ask(0.7)).expect("21 steps").n_steps();
    assert_eq!(n_steps, 21);
}

/// Every name, whatever the settings: a finite schedule of consistent lengths, or an error.
#[test]
fn odd_settings_make_finite_schedules_or_errors() {
    let mut n_schedules = 0;
    let mut check = |config: &SamplerConfig| {
        for kind in [Kind::Discrete, Kind::Flow] {
            for name in names_of(kind) {
                let Ok(sampler) = build(kind, name, config) else {
                    continue;
                };
                for n_steps in [1, 2, 3, 16] {
                    for strength in [None, Some(0.6)] {
                        let ask = Ask {
                            strength,
                            n_tokens: 64,
                            ..Ask::steps(n_steps)
                        };
                        let Ok(schedule) = sampler.schedule(&ask) else {
                            continue;
                        };
                        n_schedules += 1;
                        let n = schedule.n_steps();
                        assert!(n > 0);
                        assert_eq!(schedule.updates.len(), n);
                        assert_eq!(schedule.input_scales.len(), n);
                        assert_eq!(schedule.sigmas.len(), n + 1);
                        assert_eq!(schedule.renoise.len(), n);
                        assert_eq!(schedule.renoise[n - 1], [1.0, 0.0]);
                        let mut numbers = vec![schedule.init_noise_scale];
                        numbers.extend(schedule.start);
                        numbers.extend(schedule.renoise.concat());
                        numbers.extend(&schedule.timesteps);
                        numbers.extend(&schedule.input_scales);
                        for update in &schedule.updates {
                            assert_eq!(update.rows.len(), 1 + schedule.n_kept);
                            for row in &update.rows {
                                assert_eq!(row.len(), 3 + schedule.n_kept);
                                numbers.extend(row);
                            }
                        }
                        assert!(
                            numbers.iter().all(|number| number.is_finite()),
                            "{name} with {n_steps} steps of {config:?}"
                        );
                    }
                }
            }
        }
    };
    let ends = [(0.0, 0.0), (1e-8, 1.0), (0.0001, 0.02), (0.999, 0.999)];
    let predictions = [
        PredictionType::Epsilon,
        PredictionType::VPrediction,
        PredictionType::Sample,
        PredictionType::Flow,
    ];
    let spacings = [
        TimestepSpacing::Leading,
        TimestepSpacing::Linspace,
        TimestepSpacing::Trailing,
    ];
    for num_train_timesteps in [1, 2, 10, 60] {
        for (beta_start, beta_end) in ends {
            for (case_idx, prediction_type) in predictions.into_iter().enumerate() {
                for timestep_spacing in spacings {
                    check(&SamplerConfig {
                        num_train_timesteps: Some(num_train_timesteps),
                        beta_start: Some(beta_start),
                        beta_end: Some(beta_end),
                        beta_schedule: (case_idx == 2).then_some(BetaSchedule::SquaredCosine),
                        prediction_type: Some(prediction_type),
                        timestep_spacing: Some(timestep_spacing),
                        clip_sample: Some(false),
                        rescale_betas_zero_snr: Some(case_idx == 1),
                        final_sigmas_type: (case_idx % 2 == 0).then_some(FinalSigmas::SigmaMin),
                        solver_order: Some(1 + case_idx as u32),
                        lower_order_final: Some(case_idx % 2 == 1),
                        skip_prk_steps: Some(case_idx % 2 == 0),
                        original_inference_steps: Some(num_train_timesteps.min(20)),
                        shift: Some(3.0),
                        use_dynamic_shifting: Some(case_idx == 3),
                        shift_terminal: (case_idx == 0).then_some(0.1),
                        ..SamplerConfig::default()
                    });
                }
            }
        }
    }
    assert!(n_schedules > 5000, "{n_schedules} schedules");
}
