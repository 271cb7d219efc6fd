//! Why a checkpoint cannot become a model, and how device errors become failures of a request.

use denoised_checkpoint::CheckpointError;
use denoised_sampler::SamplerError;
use denoised_tensor::TensorError;
use denoised_types::{Failure, FailureCode};
use std::{error::Error, path::PathBuf};

/// Errors of opening and loading a model. Every text names the file and, where there is one, the way out.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The files themselves.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// No family has this pipeline class.
    #[error("{} is a {class}, which this version does not know; it knows {}", path.display(), known.join(", "))]
    UnknownPipeline {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The class its index names.
        class: String,
        /// All classes of the family table.
        known: Vec<&'static str>,
    },
    /// A component of a class that is not implemented.
    #[error("{}: {role} class {class} is not supported yet by this version; {expected}", path.display())]
    UnsupportedComponent {
        /// The component's folder.
        path: PathBuf,
        /// What the component is for.
        role: &'static str,
        /// The class its index names.
        class: String,
        /// What would do.
        expected: String,
    },
    /// Tokenizer files that cannot be used.
    #[error("tokenizer {}: {problem}", path.display())]
    Tokenizer {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Settings of the noise schedule.
    #[error("{}", path.display())]
    Sampler {
        /// The configuration file.
        path: PathBuf,
        /// What is wrong.
        source: SamplerError,
    },
    /// Components that do not fit each other.
    #[error("{}: {problem}", path.display())]
    Unfit {
        /// The component's folder or the checkpoint's.
        path: PathBuf,
        /// Which numbers disagree.
        problem: String,
    },
    /// Prepared weights of something else.
    #[error("{n_prepared} weights were prepared for a model that declares {n_declared}")]
    OtherWeights {
        /// Handles given.
        n_prepared: usize,
        /// Specs declared.
        n_declared: usize,
    },
    /// The device failed while the model was set up.
    #[error("cannot set up the model on the device")]
    Device(#[from] TensorError),
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Device(error) => tensor_failure(&error),
            ModelError::Checkpoint(_)
            | ModelError::UnknownPipeline { .. }
            | ModelError::UnsupportedComponent { .. }
            | ModelError::Tokenizer { .. }
            | ModelError::Sampler { .. }
            | ModelError::Unfit { .. } => Self::new(FailureCode::InvalidModel, chain(&error)),
            ModelError::OtherWeights { .. } => Self::new(FailureCode::Internal, chain(&error)),
        }
    }
}

/// The failure that a device's error is for whoever waits.
pub fn tensor_failure(error: &TensorError) -> Failure {
    let code = match error {
        TensorError::OutOfMemory { .. } => FailureCode::OutOfMemory,
        TensorError::Weight { .. } => FailureCode::InvalidModel,
        TensorError::Device(_) => FailureCode::WorkerFailed,
        TensorError::Shape { .. }
        | TensorError::DType { .. }
        | TensorError::Alias { .. }
        | TensorError::Operand { .. }
        | TensorError::SharedWeights(_) => FailureCode::Internal,
    };
    Failure::new(code, error.to_string())
}

/// The text of an error and of what caused it.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text.push_str(": ");
        text.push_str(&source.to_string());
        cause = source.source();
    }
    text
}
