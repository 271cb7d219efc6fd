//! AVX-512 (F, VL, BW, DQ): sixteen lanes, thirty-two registers.

use super::{Kernel, Simd};
use std::arch::x86_64::*;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512;

#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

/// The first `n <= 16` lanes.
#[inline(always)]
unsafe fn first(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const MR: usize = 14;
    const KC: usize = 384;
    const MC: usize = 168;

    #[inline(always)]
    unsafe fn vectorize<K: Kernel>(kernel: K) -> K::Output {
        enter(kernel)
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        _mm512_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> __m512 {
        _mm512_maskz_loadu_ps(first(n), from)
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m512) {
        _mm512_storeu_ps(to, x);
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, x: __m512, n: usize) {
        _mm512_mask_storeu_ps(to, first(n), x);
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        _mm512_min_ps(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn abs(x: __m512) -> __m512 {
        _mm512_abs_ps(x)
    }
    #[inline(always)]
    unsafe fn round(x: __m512) -> __m512 {
        _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x)
    }
    #[inline(always)]
    unsafe fn add_exponent(x: __m512, n: __m512) -> __m512 {
        let shifted = _mm512_slli_epi32::<23>(_mm512_cvtps_epi32(n));
        _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), shifted))
    }
    #[inline(always)]
    unsafe fn select_less(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x)
    }
    #[inline(always)]
    unsafe fn sum(x: __m512) -> f32 {
        let half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
        let quad = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
        let pair = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
        _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
    }
    #[inline(always)]
    unsafe fn prefetch(address: *const f32) {
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[inline(always)]
    unsafe fn transpose(rows: *const *const f32, n_rows: usize, offset: usize, to: *mut f32, stride: usize) {
        let mut r = [_mm512_setzero_ps(); 16];
        for (row_idx, row) in r.iter_mut().enumerate() {
            if row_idx < n_rows {
                *row = _mm512_loadu_ps((*rows.add(row_idx)).add(offset));
            }
        }
        // 4x4 blocks inside the 128-bit parts: c[4 a + i] holds, in part j, column 4 j + i of rows 4 a .. 4 a + 4.
        let mut c = [_mm512_setzero_ps(); 16];
        for a in 0..4 {
            let low01 = _mm512_unpacklo_ps(r[4 * a], r[4 * a + 1]);
            let high01 = _mm512_unpackhi_ps(r[4 * a], r[4 * a + 1]);
            let low23 = _mm512_unpacklo_ps(r[4 * a + 2], r[4 * a + 3]);
            let high23 = _mm512_unpackhi_ps(r[4 * a + 2], r[4 * a + 3]);
            c[4 * a] = _mm512_shuffle_ps::<0x44>(low01, low23);
            c[4 * a + 1] = _mm512_shuffle_ps::<0xee>(low01, low23);
            c[4 * a + 2] = _mm512_shuffle_ps::<0x44>(high01, high23);
            c[4 * a + 3] = _mm512_shuffle_ps::<0xee>(high01, high23);
        }
        // Then the 4x4 matrix of the parts.
        for i in 0..4 {
            let even01 = _mm512_shuffle_f32x4::<0x88>(c[i], c[4 + i]);
            let odd01 = _mm512_shuffle_f32x4::<0xdd>(c[i], c[4 + i]);
            let even23 = _mm512_shuffle_f32x4::<0x88>(c[8 + i], c[12 + i]);
            let odd23 = _mm512_shuffle_f32x4::<0xdd>(c[8 + i], c[12 + i]);
            r[i] = _mm512_shuffle_f32x4::<0x88>(even01, even23);
            r[4 + i] = _mm512_shuffle_f32x4::<0x88>(odd01, odd23);
            r[8 + i] = _mm512_shuffle_f32x4::<0xdd>(even01, even23);
            r[12 + i] = _mm512_shuffle_f32x4::<0xdd>(odd01, odd23);
        }
        for (i, column) in r.into_iter().enumerate() {
            _mm512_storeu_ps(to.add(i * stride), column);
        }
    }
}
