//! Tables of numbers that torch and diffusers computed, and settings as the tables hold them.
#![allow(dead_code)] // Each test uses some of it.

use denoised_sampler::{
    BetaSchedule, FinalSigmas, InterpolationType, Kind, PredictionType, Sampler, SamplerConfig, SamplerError,
    TimeShift, TimestepSpacing, TimestepType, build_sampler,
};
use serde_json::Value;

pub(crate) fn table(name: &str) -> Value {
    let path = format!("{}/tests/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect("the table is part of the crate");
    serde_json::from_str(&text).expect("the table is JSON")
}

pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

pub(crate) fn floats(value: &Value) -> Vec<f32> {
    // JSON has no infinity; the tables write null.
    let float = |value: &Value| value.as_f64().map_or(f32::INFINITY, |value| value as f32);
    list(value).iter().map(float).collect()
}

/// A `scheduler_config.json` as a family would read it.
#[allow(clippy::too_many_lines)]
pub(crate) fn config(keys: &Value) -> SamplerConfig {
    let mut config = SamplerConfig::default();
    for (key, value) in keys.as_object().expect("an object") {
        if value.is_null() {
            continue;
        }
        let number = || Some(value.as_f64().expect("a number"));
        let whole = || Some(value.as_u64().expect("a whole number") as u32);
        let flag = || Some(value.as_bool().expect("true or false"));
        let text = || value.as_str().expect("a text");
        match key.as_str() {
            "num_train_timesteps" => config.num_train_timesteps = whole(),
            "beta_start" => config.beta_start = number(),
            "beta_end" => config.beta_end = number(),
            "beta_schedule" => config.beta_schedule = Some(BetaSchedule::from_name(text()).expect("known")),
            "trained_betas" => {
                let numbers = list(value).iter().map(|v| v.as_f64().expect("a number"));
                config.trained_betas = Some(numbers.collect());
            }
            "rescale_betas_zero_snr" => config.rescale_betas_zero_snr = flag(),
            "prediction_type" => {
                config.prediction_type = Some(PredictionType::from_name(text()).expect("known"));
            }
            "timestep_spacing" => {
                config.timestep_spacing = Some(TimestepSpacing::from_name(text()).expect("known"));
            }
            "steps_offset" => config.steps_offset = whole(),
            "set_alpha_to_one" => config.set_alpha_to_one = flag(),
            "clip_sample" => config.clip_sample = flag(),
            "variance_type" => config.variance_type = Some(text().to_owned()),
            "interpolation_type" => {
                config.interpolation_type = Some(InterpolationType::from_name(text()).expect("known"));
            }
            "timestep_type" => config.timestep_type = Some(TimestepType::from_name(text()).expect("known")),
            "final_sigmas_type" => {
                config.final_sigmas_type = Some(FinalSigmas::from_name(text()).expect("known"));
            }
            "use_karras_sigmas" => config.use_karras_sigmas = flag(),
            "use_exponential_sigmas" => config.use_exponential_sigmas = flag(),
            "use_beta_sigmas" => config.use_beta_sigmas = flag(),
            "use_lu_lambdas" => config.use_lu_lambdas = flag(),
            "sigma_min" => config.sigma_min = number(),
            "sigma_max" => config.sigma_max = number(),
            "lambda_min_clipped" => config.lambda_min_clipped = number(),
            "algorithm_type" => config.algorithm_type = Some(text().to_owned()),
            "solver_type" => config.solver_type = Some(text().to_owned()),
            "solver_order" => config.solver_order = whole(),
            "lower_order_final" => config.lower_order_final = flag(),
            "euler_at_final" => config.euler_at_final = flag(),
            "predict_x0" => config.predict_x0 = flag(),
            "disable_corrector" => {
                let steps = list(value).iter().map(|v| v.as_u64().expect("a step") as usize);
                config.disable_corrector = Some(steps.collect());
            }
            "skip_prk_steps" => config.skip_prk_steps = flag(),
            "original_inference_steps" => config.original_inference_steps = whole(),
            "timestep_scaling" => config.timestep_scaling = number(),
            "use_flow_sigmas" => config.use_flow_sigmas = flag(),
            "flow_shift" => config.flow_shift = number(),
            "shift" => config.shift = number(),
            "use_dynamic_shifting" => config.use_dynamic_shifting = flag(),
            "base_shift" => config.base_shift = number(),
            "max_shift" => config.max_shift = number(),
            "base_image_seq_len" => config.base_image_seq_len = whole(),
            "max_image_seq_len" => config.max_image_seq_len = whole(),
            "time_shift_type" => config.time_shift_type = Some(TimeShift::from_name(text()).expect("known")),
            "shift_terminal" => config.shift_terminal = number(),
            "stochastic_sampling" => config.stochastic_sampling = flag(),
            "_class_name" | "_diffusers_version" | "sample_max_value" => {}
            _ => panic!("the table sets {key}"),
        }
    }
    config
}

pub(crate) fn build(
    kind: Kind,
    name: &str,
    config: &SamplerConfig,
) -> Result<Box<dyn Sampler>, SamplerError> {
    build_sampler(kind, name, config).unwrap_or_else(|| panic!("no sampler is called {name}"))
}
