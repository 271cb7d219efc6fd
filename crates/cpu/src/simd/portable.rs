//! The set without an instruction set: arrays of eight, left to the compiler. For other processors, and the judge of the rest.

use super::{Kernel, Simd};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

/// Two registers of the x86-64 and AArch64 base sets.
const LANES: usize = 8;

/// Fused where the base set of the target has it; a call into the C library otherwise, so then two roundings.
#[inline(always)]
fn mul_add_one(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

macro_rules! lane_wise {
    ($i:ident => $value:expr) => {{
        let mut out = [0.0; LANES];
        let mut $i = 0;
        while $i < LANES {
            out[$i] = $value;
            $i += 1;
        }
        out
    }};
}

impl Simd for Portable {
    type V = [f32; LANES];
    const LANES: usize = LANES;
    const MR: usize = 2;
    const KC: usize = 256;
    const MC: usize = 64;

    #[inline(always)]
    unsafe fn vectorize<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        from.cast::<[f32; LANES]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self::V {
        let mut out = [0.0; LANES];
        std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), n);
        out
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: Self::V) {
        to.cast::<[f32; LANES]>().write_unaligned(x);
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, x: Self::V, n: usize) {
        std::ptr::copy_nonoverlapping(x.as_ptr(), to, n);
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        lane_wise!(i => a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        lane_wise!(i => a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        lane_wise!(i => a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        lane_wise!(i => a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lane_wise!(i => mul_add_one(a[i], b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        lane_wise!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        lane_wise!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn abs(x: Self::V) -> Self::V {
        lane_wise!(i => f32::from_bits(x[i].to_bits() & 0x7fff_ffff))
    }
    #[inline(always)]
    unsafe fn round(x: Self::V) -> Self::V {
        // Above 2^23 the unit of the last place is one, so adding 1.5 * 2^23 rounds to an integer.
        const ROUNDER: f32 = 12_582_912.0;
        lane_wise!(i => (x[i] + ROUNDER) - ROUNDER)
    }
    #[inline(always)]
    unsafe fn add_exponent(x: Self::V, n: Self::V) -> Self::V {
        lane_wise!(i => f32::from_bits(x[i].to_bits().wrapping_add((n[i] as i32 as u32) << 23)))
    }
    #[inline(always)]
    unsafe fn select_less(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        lane_wise!(i => if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    unsafe fn sum(x: Self::V) -> f32 {
        ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    }
    #[inline(always)]
    unsafe fn prefetch(_address: *const f32) {}
    #[inline(always)]
    unsafe fn transpose(rows: *const *const f32, n_rows: usize, offset: usize, to: *mut f32, stride: usize) {
        let mut block = [[0.0; LANES]; LANES];
        let mut row_idx = 0;
        while row_idx < n_rows {
            let row = Self::load((*rows.add(row_idx)).add(offset));
            let mut i = 0;
            while i < LANES {
                block[i][row_idx] = row[i];
                i += 1;
            }
            row_idx += 1;
        }
        let mut i = 0;
        while i < LANES {
            Self::store(to.add(i * stride), block[i]);
            i += 1;
        }
    }
}
