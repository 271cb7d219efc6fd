//! AVX2 with FMA: eight lanes, sixteen registers.

use super::{Kernel, Simd};
use std::arch::x86_64::*;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2;

#[target_feature(enable = "avx2,fma")]
unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

/// All bits of the first `n` lanes, for `n <= 8`.
#[inline(always)]
unsafe fn first(n: usize) -> __m256i {
    static EDGE: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    _mm256_loadu_si256(EDGE.as_ptr().add(8 - n).cast())
}

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const MR: usize = 6;
    const KC: usize = 384;
    const MC: usize = 144;

    #[inline(always)]
    unsafe fn vectorize<K: Kernel>(kernel: K) -> K::Output {
        enter(kernel)
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        _mm256_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> __m256 {
        _mm256_maskload_ps(from, first(n))
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m256) {
        _mm256_storeu_ps(to, x);
    }
    #[inline(always)]
    unsafe fn store_first(to: *mut f32, x: __m256, n: usize) {
        _mm256_maskstore_ps(to, first(n), x);
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        _mm256_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        _mm256_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        _mm256_min_ps(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        _mm256_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn abs(x: __m256) -> __m256 {
        _mm256_andnot_ps(_mm256_set1_ps(-0.0), x)
    }
    #[inline(always)]
    unsafe fn round(x: __m256) -> __m256 {
        _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x)
    }
    #[inline(always)]
    unsafe fn add_exponent(x: __m256, n: __m256) -> __m256 {
        let shifted = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), shifted))
    }
    #[inline(always)]
    unsafe fn select_less(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
        _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    unsafe fn sum(x: __m256) -> f32 {
        let quad = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let pair = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
        _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
    }
    #[inline(always)]
    unsafe fn prefetch(address: *const f32) {
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[inline(always)]
    unsafe fn transpose(rows: *const *const f32, n_rows: usize, offset: usize, to: *mut f32, stride: usize) {
        let mut r = [_mm256_setzero_ps(); 8];
        for (row_idx, row) in r.iter_mut().enumerate() {
            if row_idx < n_rows {
                *row = _mm256_loadu_ps((*rows.add(row_idx)).add(offset));
            }
        }
        let t0 = _mm256_unpacklo_ps(r[0], r[1]);
        let t1 = _mm256_unpackhi_ps(r[0], r[1]);
        let t2 = _mm256_unpacklo_ps(r[2], r[3]);
        let t3 = _mm256_unpackhi_ps(r[2], r[3]);
        let t4 = _mm256_unpacklo_ps(r[4], r[5]);
        let t5 = _mm256_unpackhi_ps(r[4], r[5]);
        let t6 = _mm256_unpacklo_ps(r[6], r[7]);
        let t7 = _mm256_unpackhi_ps(r[6], r[7]);
        let u0 = _mm256_shuffle_ps::<0x44>(t0, t2);
        let u1 = _mm256_shuffle_ps::<0xee>(t0, t2);
        let u2 = _mm256_shuffle_ps::<0x44>(t1, t3);
        let u3 = _mm256_shuffle_ps::<0xee>(t1, t3);
        let u4 = _mm256_shuffle_ps::<0x44>(t4, t6);
        let u5 = _mm256_shuffle_ps::<0xee>(t4, t6);
        let u6 = _mm256_shuffle_ps::<0x44>(t5, t7);
        let u7 = _mm256_shuffle_ps::<0xee>(t5, t7);
        _mm256_storeu_ps(to, _mm256_permute2f128_ps::<0x20>(u0, u4));
        _mm256_storeu_ps(to.add(stride), _mm256_permute2f128_ps::<0x20>(u1, u5));
        _mm256_storeu_ps(to.add(2 * stride), _mm256_permute2f128_ps::<0x20>(u2, u6));
        _mm256_storeu_ps(to.add(3 * stride), _mm256_permute2f128_ps::<0x20>(u3, u7));
        _mm256_storeu_ps(to.add(4 * stride), _mm256_permute2f128_ps::<0x31>(u0, u4));
        _mm256_storeu_ps(to.add(5 * stride), _mm256_permute2f128_ps::<0x31>(u1, u5));
        _mm256_storeu_ps(to.add(6 * stride), _mm256_permute2f128_ps::<0x31>(u2, u6));
        _mm256_storeu_ps(to.add(7 * stride), _mm256_permute2f128_ps::<0x31>(u3, u7));
    }
}
