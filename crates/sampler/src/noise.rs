//! torch's CPU generator: mt19937 and `torch.randn` in float32.
//!
//! R1. Fewer than 16 values: pairs by Box-Muller in float64, the second of a pair is kept for the next draw.
//! R2. 16 values or more: all uniforms first, then Box-Muller in blocks of 16 (8 radii, 8 angles) in float32; if the number is no
//!     multiple of 16, the last 16 values are drawn again with fresh uniforms.
//! R3. R2 uses the polynomials that torch uses on x86 processors with AVX2 (from Cephes), with fused multiply-adds where its
//!     compiler puts them, so that the values are equal bit for bit there and on every other machine.
//!
//! Sources: `ATen/native/cpu/DistributionTemplates.h`, `ATen/core/MT19937RNGEngine.h`, `ATen/native/cpu/avx_mathfun.h`.

const STATE_LEN: usize = 624;
const BLOCK_LEN: usize = 16;

/// `torch.Generator("cpu")`.
#[derive(Clone, Debug)]
pub struct TorchGenerator {
    state: Box<[u32; STATE_LEN]>,
    next_idx: usize,
    next_normal: Option<f64>,
}

impl TorchGenerator {
    /// `torch.Generator("cpu").manual_seed(seed)`; like torch, only the low 32 bits of the seed count.
    pub fn new(seed: u64) -> Self {
        let mut state = Box::new([0; STATE_LEN]);
        state[0] = seed as u32;
        for i in 1..STATE_LEN {
            let previous = state[i - 1];
            state[i] = 1_812_433_253u32
                .wrapping_mul(previous ^ (previous >> 30))
                .wrapping_add(i as u32);
        }
        Self {
            state,
            next_idx: STATE_LEN,
            next_normal: None,
        }
    }

    /// `torch.randn(out.len(), generator=self, dtype=torch.float32)`.
    pub fn fill_normal(&mut self, out: &mut [f32]) {
        if out.len() < BLOCK_LEN {
            out.fill_with(|| self.normal() as f32);
            return;
        }
        out.fill_with(|| self.uniform_f32());
        for block in out.chunks_exact_mut(BLOCK_LEN) {
            normal_block(block);
        }
        if !out.len().is_multiple_of(BLOCK_LEN) {
            let start = out.len() - BLOCK_LEN;
            out[start..].fill_with(|| self.uniform_f32());
            normal_block(&mut out[start..]);
        }
    }

    /// The next 32 bits of mt19937.
    fn next_u32(&mut self) -> u32 {
        if self.next_idx == STATE_LEN {
            self.twist();
        }
        let mut y = self.state[self.next_idx];
        self.next_idx += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn twist(&mut self) {
        for i in 0..STATE_LEN {
            let low = self.state[(i + 1) % STATE_LEN];
            let mixed = (self.state[i] & 0x8000_0000) | (low & 0x7fff_ffff);
            let odd = if low & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + 397) % STATE_LEN] ^ (mixed >> 1) ^ odd;
        }
        self.next_idx = 0;
    }

    /// Uniform in `[0, 1)` with 24 bits.
    fn uniform_f32(&mut self) -> f32 {
        (self.next_u32() & 0x00ff_ffff) as f32 * (1.0 / 16_777_216.0)
    }

    /// Uniform in `[0, 1)` with 53 bits.
    fn uniform_f64(&mut self) -> f64 {
        let high = u64::from(self.next_u32());
        let bits = (high << 32) | u64::from(self.next_u32());
        (bits & ((1 << 53) - 1)) as f64 * (1.0 / 9_007_199_254_740_992.0)
    }

    fn normal(&mut self) -> f64 {
        if let Some(value) = self.next_normal.take() {
            return value;
        }
        let u1 = self.uniform_f64();
        let u2 = self.uniform_f64();
        let radius = (-2.0 * (-u2).ln_1p()).sqrt();
        let (sin, cos) = (2.0 * std::f64::consts::PI * u1).sin_cos();
        self.next_normal = Some(radius * sin);
        radius * cos
    }
}

/// Box-Muller over 16 uniforms: the first 8 give radii, the last 8 angles.
fn normal_block(block: &mut [f32]) {
    let (radii, angles) = block.split_at_mut(BLOCK_LEN / 2);
    for (radius_slot, angle_slot) in radii.iter_mut().zip(angles) {
        let radius = (-2.0 * ln(1.0 - *radius_slot)).sqrt();
        let (sin, cos) = sin_cos(std::f32::consts::TAU * *angle_slot);
        *radius_slot = radius * cos;
        *angle_slot = radius * sin;
    }
}

// Constants keep the digits of their source.
#[allow(clippy::excessive_precision, clippy::unreadable_literal)]
/// Natural logarithm of a positive normal number (Cephes' `logf`, Horner scheme with fused multiply-adds).
fn ln(x: f32) -> f32 {
    const POLYNOMIAL: [f32; 9] = [
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ];
    let bits = x.to_bits();
    let mut exponent = ((bits >> 23) as i32 - 0x7f) as f32 + 1.0;
    // The mantissa as a number in [0.5, 1).
    let mut m = f32::from_bits((bits & 0x807f_ffff) | 0x3f00_0000);
    if m < std::f32::consts::FRAC_1_SQRT_2 {
        exponent -= 1.0;
        m = (m - 1.0) + m;
    } else {
        m -= 1.0;
    }
    let z = m * m;
    let mut y = POLYNOMIAL[0];
    for &coefficient in &POLYNOMIAL[1..] {
        y = y.mul_add(m, coefficient);
    }
    y = (y * m).mul_add(z, exponent * -2.12194440e-4);
    y = z.mul_add(-0.5, y);
    exponent.mul_add(0.693_359_375, m + y)
}

#[allow(clippy::excessive_precision, clippy::unreadable_literal)]
/// Sine and cosine of a number in `[0, 8192)` (Cephes' `sinf` and `cosf`).
fn sin_cos(x: f32) -> (f32, f32) {
    // The octant, rounded up to an even number.
    let octant = ((x * (4.0 / std::f32::consts::PI)) as i32 + 1) & !1;
    let y = octant as f32;
    // x - octant pi / 4 in three parts.
    let x = y.mul_add(-0.785_156_25, x);
    let x = y.mul_add(-2.4187564849853515625e-4, x);
    let x = y.mul_add(-3.77489497744594108e-8, x);
    let z = x * x;
    let mut near_cos = 2.443315711809948e-5_f32.mul_add(z, -1.388731625493765e-3);
    near_cos = near_cos.mul_add(z, 4.166664568298827e-2);
    near_cos = (near_cos * z).mul_add(z, -(z * 0.5)) + 1.0;
    let mut near_sin = (-1.9515295891e-4_f32).mul_add(z, 8.3321608736e-3);
    near_sin = near_sin.mul_add(z, -1.6666654611e-1);
    near_sin = (near_sin * z).mul_add(x, x);
    let (sin, cos) = if octant & 2 == 0 {
        (near_sin, near_cos)
    } else {
        (near_cos, near_sin)
    };
    let flip = |value: f32, is_flipped: bool| if is_flipped { -value } else { value };
    (flip(sin, octant & 4 != 0), flip(cos, (octant - 2) & 4 == 0))
}
