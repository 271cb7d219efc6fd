//! Why a checkpoint's sampler configuration or a request's number of steps cannot be carried out.

/// Errors of building a sampler and of asking it for a schedule.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplerError {
    /// A setting that would change the result and is not implemented.
    #[error("sampler {sampler}: {key} = {value} is not supported, {expected} is")]
    Unsupported {
        /// Class of the sampler in diffusers.
        sampler: &'static str,
        /// The configuration's key.
        key: &'static str,
        /// What it is set to.
        value: String,
        /// What would do.
        expected: &'static str,
    },
    /// A setting with which no schedule can be computed.
    #[error("sampler {sampler}: {key} = {value} makes no schedule, {expected} expected")]
    Invalid {
        /// Class of the sampler in diffusers.
        sampler: &'static str,
        /// The configuration's key.
        key: &'static str,
        /// What it is set to.
        value: String,
        /// What would do.
        expected: &'static str,
    },
    /// A number of steps with which these settings make no schedule.
    #[error("steps is {n_steps}, sampler {sampler} takes {expected} with this model")]
    StepCount {
        /// Name of the sampler on the command line.
        sampler: &'static str,
        /// Steps asked for.
        n_steps: usize,
        /// What would do.
        expected: String,
    },
    /// Noise levels in a request that make no schedule, or where the sampler takes none.
    #[error("sampler {sampler} {problem}")]
    Sigmas {
        /// Name of the sampler on the command line.
        sampler: &'static str,
        /// What is wrong with them.
        problem: String,
    },
    /// A strength that leaves no step to do, or none at all.
    #[error("strength is {strength}, with {n_steps} steps it must be {expected}")]
    Strength {
        /// The strength asked for.
        strength: f32,
        /// Steps asked for.
        n_steps: usize,
        /// What would do.
        expected: String,
    },
}
