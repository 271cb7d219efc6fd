//! What kernels are written in: vectors of f32 of one instruction set, and elementary functions on them.
//!
//! R1. A kernel is a [`Kernel`]; [`Simd::vectorize`] is the only way into it and switches the instruction set on.
//! R2. Everything that a kernel calls is `#[inline(always)]` down to the instructions, or another kernel. A helper that stays a
//!     function of its own is compiled without the instruction set and runs many times slower; so are closures, and there are none.
//! R3. Instruction sets differ in the constants and the one-instruction methods of [`Simd`]; no kernel exists twice.
//! R4. `min` and `max` return the second operand if one is NaN, `select_less` the last one: NaN passes through every function here.
#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "all bodies are plain arithmetic on vectors; the `# Safety` sections of `Simd` state the two obligations once"
)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

pub(crate) use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub(crate) use {avx2::Avx2, avx512::Avx512};

/// Code that runs with an instruction set switched on.
pub(crate) trait Kernel {
    /// What it returns.
    type Output;

    /// The code; implementations are `#[inline(always)]`.
    ///
    /// # Safety
    /// Called by [`Simd::vectorize`] only; what the kernel's fields promise holds.
    unsafe fn run<S: Simd>(self) -> Self::Output;
}

/// Vectors of [`Simd::LANES`] f32.
///
/// # Safety of the methods
/// The processor has the instruction set, and the caller is a [`Kernel`] (R1, R2). Pointers are valid for the elements that the
/// method names; they need no alignment.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// One vector.
    type V: Copy;
    /// Elements of a vector.
    const LANES: usize;
    /// Rows of a micro-tile: as many as the registers allow beside two vectors of columns; at most 14.
    const MR: usize;
    /// Columns of a micro-tile.
    const NR: usize = 2 * Self::LANES;
    /// Depth of a block of products: a panel of `KC * NR` weights stays in the first cache.
    const KC: usize;
    /// Rows of a block, a multiple of `MR`: `MC * KC` activations stay in the second cache.
    const MC: usize;

    /// Runs `kernel` with this instruction set.
    unsafe fn vectorize<K: Kernel>(kernel: K) -> K::Output;

    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self::V;
    /// `LANES` elements.
    unsafe fn load(from: *const f32) -> Self::V;
    /// The first `n < LANES` elements, zeros behind; reads nothing else.
    unsafe fn load_first(from: *const f32, n: usize) -> Self::V;
    /// `LANES` elements.
    unsafe fn store(to: *mut f32, x: Self::V);
    /// The first `n < LANES` elements; writes nothing else.
    unsafe fn store_first(to: *mut f32, x: Self::V, n: usize);
    /// `a + b`
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a < b ? a : b`
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `a > b ? a : b`
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `|x|`
    unsafe fn abs(x: Self::V) -> Self::V;
    /// Nearest integer, halves to even, for `|x| < 2^22`.
    unsafe fn round(x: Self::V) -> Self::V;
    /// `x * 2^n` by adding the integral `n` to the exponent; the caller sees to the range.
    unsafe fn add_exponent(x: Self::V, n: Self::V) -> Self::V;
    /// `a < b ? x : y`
    unsafe fn select_less(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// Sum of the lanes, in an order fixed per instruction set.
    unsafe fn sum(x: Self::V) -> f32;
    /// Asks for the cache line of an address that need not be valid.
    unsafe fn prefetch(address: *const f32);
    /// Reads `LANES` elements of each of the `n_rows <= LANES` `rows` from `offset` and writes their transpose: column `i` to
    /// `to + i * stride`, always `LANES` elements, those beyond `n_rows` undefined. Columns are written in ascending order: with a
    /// shorter stride, each writes over the end of the one before.
    unsafe fn transpose(rows: *const *const f32, n_rows: usize, offset: usize, to: *mut f32, stride: usize);
}

/// `2^x`, relative error below 2e-7. Zero below `2^-126`, infinite from `2^128` on.
#[inline(always)]
pub(crate) unsafe fn exp2<S: Simd>(x: S::V) -> S::V {
    let lowest = S::splat(-126.0);
    let clamped = S::max(lowest, S::min(S::splat(128.0), x));
    let whole = S::round(clamped);
    let rest = S::sub(clamped, whole);
    // Minimax polynomial of 2^f on [-1/2, 1/2].
    let mut p = S::splat(1.535_336_2e-4);
    p = S::mul_add(p, rest, S::splat(1.339_887_4e-3));
    p = S::mul_add(p, rest, S::splat(9.618_437e-3));
    p = S::mul_add(p, rest, S::splat(5.550_332_5e-2));
    p = S::mul_add(p, rest, S::splat(2.402_264_8e-1));
    p = S::mul_add(p, rest, S::splat(6.931_472e-1));
    p = S::mul_add(p, rest, S::splat(1.0));
    S::select_less(x, lowest, S::splat(0.0), S::add_exponent(p, whole))
}

/// `x * sigmoid(factor * inner)`, the form of all activations here but the exact GELU.
#[inline(always)]
unsafe fn times_sigmoid<S: Simd>(x: S::V, inner: S::V, factor: f32) -> S::V {
    let e = exp2::<S>(S::mul(inner, S::splat(-factor * std::f32::consts::LOG2_E)));
    S::div(x, S::add(S::splat(1.0), e))
}

/// `0.5 erfc(x / sqrt(2))` for `x >= 0` as `exp(-x^2 / 2) t P(t)` with `t = 1 / (1 + 0.27 x)`.
///
/// `P` is a least-squares fit with Lawson's weights to 40-digit values on `0..=14.5`; its relative error is 2.4e-8, so what remains
/// is the rounding of f32 (and of the exponent, where the value is small: relative 2e-6 at `x = 5`).
#[inline(always)]
unsafe fn half_erfc<S: Simd>(x: S::V) -> S::V {
    let t = S::div(S::splat(1.0), S::mul_add(x, S::splat(0.27), S::splat(1.0)));
    let mut p = S::splat(0.028_961_098);
    p = S::mul_add(p, t, S::splat(-0.126_485_84));
    p = S::mul_add(p, t, S::splat(0.169_786_13));
    p = S::mul_add(p, t, S::splat(-0.069_210_716));
    p = S::mul_add(p, t, S::splat(0.107_825_59));
    p = S::mul_add(p, t, S::splat(0.072_049_625));
    p = S::mul_add(p, t, S::splat(0.101_810_604));
    p = S::mul_add(p, t, S::splat(0.107_542_87));
    p = S::mul_add(p, t, S::splat(0.107_720_66));
    let e = exp2::<S>(S::mul(S::mul(x, x), S::splat(-0.5 * std::f32::consts::LOG2_E)));
    S::mul(S::mul(p, t), e)
}

/// A [`denoised_tensor::Activation`] as a type, so that inner loops do not choose.
pub(crate) trait ActivationFn: Copy {
    /// The function, element-wise.
    ///
    /// # Safety
    /// As the methods of [`Simd`].
    unsafe fn apply<S: Simd>(x: S::V) -> S::V;
}

/// [`denoised_tensor::Activation::None`].
#[derive(Clone, Copy)]
pub(crate) struct Identity;
/// [`denoised_tensor::Activation::Silu`].
#[derive(Clone, Copy)]
pub(crate) struct Silu;
/// [`denoised_tensor::Activation::GeluTanh`].
#[derive(Clone, Copy)]
pub(crate) struct GeluTanh;
/// [`denoised_tensor::Activation::GeluErf`].
#[derive(Clone, Copy)]
pub(crate) struct GeluErf;
/// [`denoised_tensor::Activation::QuickGelu`].
#[derive(Clone, Copy)]
pub(crate) struct QuickGelu;
/// [`denoised_tensor::Activation::Relu`].
#[derive(Clone, Copy)]
pub(crate) struct Relu;

/// [`denoised_tensor::Activation::Tanh`].
#[derive(Clone, Copy)]
pub(crate) struct Tanh;

impl ActivationFn for Identity {
    #[inline(always)]
    unsafe fn apply<S: Simd>(x: S::V) -> S::V {
        x
    }
}

impl ActivationFn for Silu {
    #[inline(always)]
    unsafe fn apply<S: Simd>(x: S::V) -> S::V {
        times_sigmoid::<S>(x, x, 1.0)
    }
}

impl ActivationFn for GeluTanh {
    #[inline(always)]
    unsafe fn apply<S: Simd>(x: S::V) -> S::V {
        // 0.5 (1 + tanh(u)) = sigmoid(2 u), and 2 sqrt(2/pi) = 1.5957691.
        let cubic = S::mul_add(S::mul(x, x), S::splat(0.044_715), S::splat(1.0));
        times_sigmoid::<S>(x, S::mul(x, cubic), 1.595_769)
    }
}

impl ActivationFn for QuickGelu {
    #[inline(always)]
    unsafe fn apply<S: Simd>(x: S::V) -> S::V {
        times_sigmoid::<S>(x, x, 1.702)
    }
}

impl ActivationFn for Relu {
    #[inline(always)]
    unsafe fn apply<S: Simd>(x: S::V) -> S::V {
        // In this order, so that NaN passes through (R4).
        S::max(S::splat(0.0), x)
    }
}

impl ActivationFn for GeluErf {
    #[inline(always)]
    unsafe fn apply<S: Simd>(x: S::V) -> S::V {
        // With z = |x| / sqrt(2): 1 + erf(-z) = erfc(z) and 1 + erf(z) = 2 - erfc(z), so no digits cancel in the negative tail.
        let half_erfc = half_erfc::<S>(S::abs(x));
        let upper = S::sub(S::splat(1.0), half_erfc);
        S::mul(x, S::select_less(x, S::splat(0.0), half_erfc, upper))
    }
}

impl ActivationFn for Tanh {
    #[inline(always)]
    unsafe fn apply<S: Simd>(x: S::V) -> S::V {
        // Near zero the quotient would cancel; there it is Cephes' `tanhf`, x + x^3 P(x^2) below 0.625.
        let size = S::abs(x);
        let square = S::mul(x, x);
        let mut p = S::splat(-5.704_988_7e-3);
        p = S::mul_add(p, square, S::splat(2.063_908_8e-2));
        p = S::mul_add(p, square, S::splat(-5.373_971_6e-2));
        p = S::mul_add(p, square, S::splat(1.333_144_2e-1));
        p = S::mul_add(p, square, S::splat(-3.333_328e-1));
        let near = S::mul_add(S::mul(p, square), x, x);
        // (1 - t) / (1 + t) with t = exp(-2 |x|), and the sign of x.
        let t = exp2::<S>(S::mul(size, S::splat(-2.0 * std::f32::consts::LOG2_E)));
        let quotient = S::div(S::sub(S::splat(1.0), t), S::add(S::splat(1.0), t));
        let zero = S::splat(0.0);
        let far = S::select_less(x, zero, S::sub(zero, quotient), quotient);
        S::select_less(size, S::splat(0.625), near, far)
    }
}

/// Calls `$body` with `$name` as the type of `$activation`.
macro_rules! with_activation {
    ($activation:expr, $name:ident => $body:expr) => {
        match $activation {
            denoised_tensor::Activation::None => {
                type $name = $crate::simd::Identity;
                $body
            }
            denoised_tensor::Activation::Silu => {
                type $name = $crate::simd::Silu;
                $body
            }
            denoised_tensor::Activation::GeluTanh => {
                type $name = $crate::simd::GeluTanh;
                $body
            }
            denoised_tensor::Activation::GeluErf => {
                type $name = $crate::simd::GeluErf;
                $body
            }
            denoised_tensor::Activation::QuickGelu => {
                type $name = $crate::simd::QuickGelu;
                $body
            }
            denoised_tensor::Activation::Relu => {
                type $name = $crate::simd::Relu;
                $body
            }
            denoised_tensor::Activation::Tanh => {
                type $name = $crate::simd::Tanh;
                $body
            }
        }
    };
}
pub(crate) use with_activation;

/// Calls `$body` with `$name` as the [`Simd`] type of `$isa`.
macro_rules! with_isa {
    ($isa:expr, $name:ident => $body:expr) => {
        match $isa {
            $crate::Isa::Portable => {
                type $name = $crate::simd::Portable;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx2 => {
                type $name = $crate::simd::Avx2;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx512 => {
                type $name = $crate::simd::Avx512;
                $body
            }
        }
    };
}
pub(crate) use with_isa;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    /// Applies one function to a slice whose length is a multiple of 16.
    #[derive(Clone, Copy)]
    struct Map<'a> {
        function: Function,
        x: &'a [f32],
    }

    #[derive(Clone, Copy, PartialEq)]
    enum Function {
        Exp2,
        GeluErf,
        Silu,
        Tanh,
    }

    impl Kernel for Map<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        unsafe fn run<S: Simd>(self) -> Vec<f32> {
            let mut out = vec![0.0; self.x.len()];
            for i in (0..self.x.len()).step_by(S::LANES) {
                let x = S::load(self.x.as_ptr().add(i));
                let y = match self.function {
                    Function::Exp2 => exp2::<S>(x),
                    Function::GeluErf => GeluErf::apply::<S>(x),
                    Function::Silu => Silu::apply::<S>(x),
                    Function::Tanh => Tanh::apply::<S>(x),
                };
                S::store(out.as_mut_ptr().add(i), y);
            }
            out
        }
    }

    /// Largest relative error over `from..=to` on every available set.
    fn worst(function: Function, from: f64, to: f64, exact: impl Fn(f64) -> f64) -> f64 {
        const N: usize = 1 << 16;
        let x: Vec<f32> = (0..N)
            .map(|i| (from + (to - from) * i as f64 / (N - 1) as f64) as f32)
            .collect();
        let mut worst = 0.0f64;
        for isa in Isa::ALL.iter().filter(|isa| isa.is_available()) {
            // SAFETY: the set is available.
            let got = with_isa!(*isa, S => unsafe { S::vectorize(Map { function, x: &x }) });
            for (x, y) in x.iter().zip(got) {
                let exact = exact(f64::from(*x));
                let error = (f64::from(y) - exact).abs() / exact.abs().max(1e-30);
                assert!(!error.is_nan(), "{isa}: {y} at {x}");
                worst = worst.max(error);
            }
        }
        worst
    }

    #[test]
    fn exponentials_are_good_to_two_units_of_the_last_place() {
        let error = worst(Function::Exp2, -125.9, 127.9, f64::exp2);
        assert!(error < 2.4e-7, "{error:e}");
    }

    #[test]
    fn tanh_is_good_to_a_few_units_of_the_last_place_and_ends_in_one() {
        for (from, to) in [(-12.0, 12.0), (-1e-3, 1e-3), (-300.0, 300.0)] {
            let error = worst(Function::Tanh, from, to, f64::tanh);
            assert!(error < 4e-7, "{from} to {to}: {error:e}");
        }
        let x = [f32::NEG_INFINITY, f32::INFINITY, -0.0, f32::NAN].repeat(4);
        for isa in Isa::ALL.iter().filter(|isa| isa.is_available()) {
            // SAFETY: the set is available.
            let y = with_isa!(*isa, S => unsafe { S::vectorize(Map { function: Function::Tanh, x: &x }) });
            assert_eq!(y[..3], [-1.0, 1.0, 0.0], "{isa}");
            assert!(y[3].is_nan(), "{isa}");
        }
    }

    #[test]
    fn exponentials_end_in_zero_and_infinity() {
        let x: Vec<f32> = [
            f32::NEG_INFINITY,
            -1e9,
            -127.0,
            128.0,
            1e9,
            f32::INFINITY,
            f32::NAN,
            0.0,
        ]
        .repeat(2);
        for isa in Isa::ALL.iter().filter(|isa| isa.is_available()) {
            // SAFETY: the set is available.
            let y = with_isa!(*isa, S => unsafe { S::vectorize(Map { function: Function::Exp2, x: &x }) });
            assert_eq!(
                (&y[..3], &y[3..6], y[7]),
                (&[0.0; 3][..], &[f32::INFINITY; 3][..], 1.0),
                "{isa}"
            );
            assert!(y[6].is_nan(), "{isa}");
        }
    }

    /// `erfc` by its series and continued fraction (Abramowitz and Stegun 7.1.5 and 7.1.14).
    fn erfc(x: f64) -> f64 {
        if x < 0.0 {
            return 2.0 - erfc(-x);
        }
        if x < 2.0 {
            let (mut term, mut sum) = (x, x);
            for n in 1..100 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            return 1.0 - sum * 2.0 / std::f64::consts::PI.sqrt();
        }
        let fraction = (1..200)
            .rev()
            .fold(0.0, |fraction, n| f64::from(n) / 2.0 / (x + fraction));
        (-x * x).exp() / std::f64::consts::PI.sqrt() / (x + fraction)
    }

    #[test]
    fn the_exact_gelu_keeps_its_relative_error_in_the_negative_tail() {
        let exact = |x: f64| 0.5 * x * erfc(-x / 2f64.sqrt());
        for (from, to, limit) in [(0.0, 10.0, 5e-7), (-2.0, 0.0, 1e-6), (-6.0, -2.0, 3e-6)] {
            let error = worst(Function::GeluErf, from, to, exact);
            assert!(error < limit, "{from} to {to}: {error:e}");
        }
    }

    #[test]
    fn silu_keeps_its_relative_error() {
        let error = worst(Function::Silu, -20.0, 20.0, |x| x / (1.0 + (-x).exp()));
        assert!(error < 2e-6, "{error:e}");
    }
}
