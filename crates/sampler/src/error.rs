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
    /// A number of steps with which these settings make no schedule; the only error of [`Sampler::schedule`](crate::Sampler::schedule).
    #[error("steps is {n_steps}, sampler {sampler} takes {expected} with this model")]
    StepCount {
        /// Name of the sampler on the command line.
        sampler: &'static str,
        /// Steps asked for.
        n_steps: usize,
        /// What would do.
        expected: String,
    },
}
