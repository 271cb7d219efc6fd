//! Shapes, dtypes, tensors and the [`Backend`] contract: what a device can do, each op with its formula.
//!
//! Knows nothing of which backends exist, of files, layers or families.
//!
//! R1. A [`Tensor`] is a view: a buffer of one backend, an offset, a shape and strides; its last dimension is dense.
//! R2. Tensors are not `Send`: activations belong to the thread that drives the backend, so `&Tensor` may be an output.
//! R3. Images are NHWC, token sequences `[batch, tokens, channels]`; the first dimension is always the batch.
//! R4. No op's result for one batch element depends on the other elements, on the batch size or on the number of threads.
#![forbid(unsafe_code)]

mod backend;
pub mod check;
mod dtype;
mod error;
mod shape;
mod tensor;
mod weight;

pub use backend::{
    Activation, AttentionSpec, Backend, ConvSpec, DeviceInfo, Epilogue, GateOrder, MemoryStats, Modulation,
    PatchOrder, RopeStyle, StepArgs, TimestepSpec,
};
pub use dtype::DType;
pub use error::TensorError;
pub use shape::{MAX_DIMS, Shape};
pub use tensor::{Buffer, Tensor};
pub use weight::{
    Precision, PrepareInput, Prepared, SourceDType, SourceError, SourceTensor, Weight, WeightKind, WeightSet,
    WeightSource, WeightSpec,
};

/// Result of an op.
pub type Result<T, E = TensorError> = std::result::Result<T, E>;
