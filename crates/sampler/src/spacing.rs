//! Evenly spaced numbers and logarithms as numpy and torch round them.

use std::f32::consts::{LN_2, SQRT_2};

/// `torch.linspace` in float32: from both ends to the middle, with fused multiply-adds.
pub(crate) fn torch_linspace(first: f32, last: f32, n: usize) -> Vec<f32> {
    let step = (last - first) / (n.max(2) - 1) as f32;
    let value = |i| {
        if n == 1 || i < n / 2 {
            step.mul_add(i as f32, first)
        } else {
            (-step).mul_add((n - 1 - i) as f32, last)
        }
    };
    (0..n).map(value).collect()
}

/// `numpy.linspace` in float64: `i step + first`, the last one exact.
pub(crate) fn linspace(first: f64, last: f64, n: usize) -> Vec<f64> {
    let step = (last - first) / n.saturating_sub(1).max(1) as f64;
    let value = |i| {
        if i > 0 && i + 1 == n {
            last
        } else {
            i as f64 * step + first
        }
    };
    (0..n).map(value).collect()
}

/// `numpy.log` in float32, as numpy computes it on processors with fused multiply-adds: a rational function, which is off by a unit
/// of the last place for one number in twelve. Where timesteps are interpolated between logarithms that lie close together, that
/// unit is one of the timestep, and the denoiser's embedding of it multiplies it.
pub(crate) fn numpy_ln(x: f32) -> f32 {
    const NUMERATOR: [f32; 5] = [2.589_979e-2, 0.380_883_77, 1.480_000_6, 2.112_677_6, 1.0];
    const DENOMINATOR: [f32; 6] = [
        5.875_095e-3,
        0.154_647_64,
        0.986_494_3,
        2.453_006,
        2.612_677_6,
        1.0,
    ];
    if !x.is_normal() || x < 0.0 {
        return x.ln();
    }
    let bits = x.to_bits();
    let mut exponent = (bits >> 23) as f32 - 127.0;
    let mut mantissa = f32::from_bits(bits & 0x007f_ffff | 0x3f80_0000);
    if mantissa > SQRT_2 {
        exponent += 1.0;
        mantissa *= 0.5;
    }
    let x = mantissa - 1.0;
    let polynomial = |factors: &[f32]| {
        let (first, rest) = factors.split_first().unwrap_or((&0.0, &[]));
        rest.iter()
            .fold(*first, |value, factor| value.mul_add(x, *factor))
    };
    // The numerator has no constant term.
    let ratio = polynomial(&NUMERATOR).mul_add(x, 0.0) / polynomial(&DENOMINATOR);
    exponent.mul_add(LN_2, ratio)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bits of numpy 2.4 with AVX-512: the first six differ from the correctly rounded logarithm.
    #[test]
    fn logarithms_are_numpys_to_the_last_bit() {
        for (x, ln) in [
            (0x4105_8ddd, 0x4007_cd83),
            (0x3e63_7fff, 0xbfc0_8d9d),
            (0x3fb3_e385, 0x3eae_3ce6),
            (0x3f48_67b4, 0xbe7a_b67a),
            (0x4297_6368, 0x408a_7456),
            (0x43be_e4cb, 0x40be_3c54),
            (0x3f80_0000, 0),
            (0x4000_0000, 0x3f31_7218),
            (0x3fb5_04f3, 0x3eb1_7218),
            (0x3fb5_04f4, 0x3eb1_721b),
            (0x431d_684a, 0x40a1_e1ff),
            (0x3cee_efa2, 0xc062_38cf),
        ] {
            let found = numpy_ln(f32::from_bits(x)).to_bits();
            assert_eq!(found, ln, "{x:#x}: {found:#x}, not {ln:#x}");
        }
        assert_eq!(numpy_ln(0.0), f32::NEG_INFINITY);
    }
}
