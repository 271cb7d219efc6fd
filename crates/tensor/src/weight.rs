//! Weights: what a model asks for, where it comes from, and what a backend made of it.
//!
//! A model first declares every weight as a [`WeightSpec`]; then [`crate::Backend::prepare`] turns all of them at once into the
//! form its kernels want (packed, transformed, widened), so that the result can be laid out in one block and shared by all ranks
//! of a host. Layers keep the index of their weight in that list.

use crate::DType;
use std::{any::Any, borrow::Cow, fmt, os::fd::OwnedFd, sync::Arc};

/// How a weight is used, hence how it is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightKind {
    /// `[n, k]`, the right-hand side of [`crate::Backend::linear`]. A source of more dimensions, the kernel of a
    /// convolution whose patches do not overlap, counts as flattened behind the first.
    Matrix,
    /// `[c_out, c_in, height, width]` (torch's order), the kernel of [`crate::Backend::conv2d`].
    Conv {
        /// Stride it will be used with: kernels are chosen by it.
        stride: usize,
    },
    /// Bias, norm or modulation values, kept as f32 in row-major order. In a source, extents of 1 may follow.
    Vector,
    /// `[rows, columns]`, read by row: embeddings and position tables, kept as f32.
    Table,
}

/// Element type of the activations that a weight is used with, hence the one that matrices and kernels are kept in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// The device's.
    #[default]
    Device,
    /// The device's, but f32 where that is f16: what is computed exceeds its range.
    WideRange,
    /// f32.
    F32,
}

impl Precision {
    /// The element type on a device of `device` ([`crate::Backend::dtype`]).
    pub const fn dtype(self, device: DType) -> DType {
        match (self, device) {
            (Self::Device, _) => device,
            (Self::WideRange, DType::F16) => DType::F32,
            (Self::WideRange, _) => device,
            (Self::F32, _) => DType::F32,
        }
    }
}

/// One weight that a model needs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WeightSpec {
    /// Names in the checkpoint whose tensors are concatenated along dimension 0 (fused q, k, v); usually one.
    pub sources: Vec<String>,
    /// Use.
    pub kind: WeightKind,
    /// Shape of the concatenation.
    pub shape: Vec<usize>,
    /// What it is used with. Says nothing of how vectors and tables are kept, which are f32 in any case.
    pub precision: Precision,
}

/// Element type of a tensor in a checkpoint file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceDType {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
}

impl SourceDType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }
}

/// A tensor of a checkpoint: dense, row-major, little-endian, not aligned.
#[derive(Clone, Debug)]
pub struct SourceTensor<'a> {
    /// Element type.
    pub dtype: SourceDType,
    /// Extents.
    pub shape: Vec<usize>,
    /// The elements; their number agrees with `shape` (the source vouches for it).
    pub bytes: Cow<'a, [u8]>,
}

/// Why a tensor cannot be had. The text names the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SourceError(pub String);

/// One name-to-tensor view of a checkpoint.
pub trait WeightSource: Sync {
    /// Element type and extents of the tensor called `name`, without reading its elements.
    ///
    /// # Errors
    /// As [`WeightSource::tensor`].
    fn layout(&self, name: &str) -> Result<(SourceDType, Vec<usize>), SourceError>;

    /// The tensor called `name`.
    ///
    /// # Errors
    /// [`SourceError`] if there is none, or its dtype is no float.
    fn tensor(&self, name: &str) -> Result<SourceTensor<'_>, SourceError>;
}

/// What [`crate::Backend::prepare`] builds from.
#[derive(Debug)]
pub enum PrepareInput<'a> {
    /// From the checkpoint's files.
    Build(&'a dyn WeightSource),
    /// From what another rank of this host has built: [`Prepared::shared`] of the same specs.
    Shared(OwnedFd),
}

impl fmt::Debug for dyn WeightSource + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeightSource")
    }
}

/// The weights as a backend holds them.
pub trait WeightSet: Any + Send + Sync + fmt::Debug {
    /// For the downcast by the backend that made it.
    fn as_any(&self) -> &dyn Any;
}

/// Handle to one prepared weight. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Weight {
    /// All weights that were prepared together.
    pub set: Arc<dyn WeightSet>,
    /// Position in the list of specs.
    pub spec_idx: usize,
    /// How it is used.
    pub kind: WeightKind,
    /// Its shape, as in its spec.
    pub shape: Arc<[usize]>,
}

/// Outcome of [`crate::Backend::prepare`].
#[derive(Debug)]
pub struct Prepared {
    /// One handle per spec, in the same order.
    pub weights: Vec<Weight>,
    /// Sealed, read-only memory that other ranks of this host can take instead of building; `None` where weights live on a device.
    pub shared: Option<OwnedFd>,
    /// Bytes that the prepared weights occupy.
    pub n_bytes: u64,
}
