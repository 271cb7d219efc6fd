//! The instruction sets that the kernels exist in.

/// Instruction set of the kernels. Results are bit-identical on any processor that has the set, and differ in rounding between sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// What the compiler makes of plain arrays: every processor.
    Portable,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, VL, BW and DQ.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// All sets that this target has kernels for, slowest first.
    #[cfg(target_arch = "x86_64")]
    pub const ALL: &[Self] = &[Self::Portable, Self::Avx2, Self::Avx512];
    /// All sets that this target has kernels for, slowest first.
    #[cfg(not(target_arch = "x86_64"))]
    pub const ALL: &[Self] = &[Self::Portable];

    /// Whether this processor (and the operating system) has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && Self::Avx2.is_available()
            }
        }
    }

    /// The fastest set that this processor has.
    pub fn best() -> Self {
        let available = Self::ALL.iter().rev().copied().find(|isa| isa.is_available());
        available.unwrap_or(Self::Portable)
    }

    /// Name in logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}
