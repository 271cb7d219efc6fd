//! Element types of tensors on a device.

/// Element type of a [`crate::Tensor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// bfloat16.
    BF16,
    /// IEEE half precision.
    F16,
    /// 32-bit signed integer (token ids, row indices).
    I32,
    /// 8-bit unsigned integer (pixels).
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::BF16 | Self::F16 => 2,
            Self::U8 => 1,
        }
    }

    /// Whether it is one of the three that activations may have.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::BF16 | Self::F16)
    }

    /// Name as people write it on a command line (`f32`, `bf16`, …).
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::BF16 => "bf16",
            Self::F16 => "f16",
            Self::I32 => "i32",
            Self::U8 => "u8",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}
