//! What an op can fail with.

/// Errors of the contract. Shapes and dtypes that do not fit are faults of the caller; the others are the device's.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TensorError {
    /// Shapes that the op cannot take.
    #[error("{op}: {detail}")]
    Shape {
        /// The op.
        op: &'static str,
        /// Which shapes, and what was expected.
        detail: String,
    },
    /// A dtype that the op, or the backend, does not take.
    #[error("{op}: dtype {dtype} is not supported, expected {expected}")]
    DType {
        /// The op.
        op: &'static str,
        /// What was given.
        dtype: crate::DType,
        /// What would do.
        expected: &'static str,
    },
    /// An output overlaps an input, or is read-only.
    #[error("{op}: {detail}")]
    Alias {
        /// The op.
        op: &'static str,
        /// Which operands.
        detail: String,
    },
    /// A tensor or weight of another backend, or a weight of another kind.
    #[error("{op}: {detail}")]
    Operand {
        /// The op.
        op: &'static str,
        /// Which operand.
        detail: String,
    },
    /// A weight cannot be taken from the checkpoint.
    #[error("weight {name}: {detail}")]
    Weight {
        /// Name of the tensor in the checkpoint.
        name: String,
        /// What is wrong with it.
        detail: String,
    },
    /// Shared weights that were not made from the same specifications by the same kernels.
    #[error("shared weights do not fit this model: {0}")]
    SharedWeights(String),
    /// Not enough memory on the device or host.
    #[error("out of memory: {what} needs {}, {available_bytes} are available", needed(*needed_bytes))]
    OutOfMemory {
        /// What the memory is for.
        what: String,
        /// Bytes that are needed; 0 where whoever needs them does not say how many.
        needed_bytes: u64,
        /// Bytes that are there.
        available_bytes: u64,
    },
    /// The device failed; it may not be usable any more.
    #[error("device: {0}")]
    Device(String),
}

fn needed(n_bytes: u64) -> String {
    match n_bytes {
        0 => "more bytes than there are".to_owned(),
        _ => format!("{n_bytes} bytes"),
    }
}
