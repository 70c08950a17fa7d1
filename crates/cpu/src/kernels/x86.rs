//! The vector units of x86-64.
//!
//! Every method is inlined into a function compiled with the features it uses; see [`super::table`].

use std::arch::x86_64::*;

use half::f16;

use super::simd::Simd;

/// 16 lanes.
pub(super) struct Avx512;

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const ROWS: usize = 4;

    #[inline(always)]
    fn splat(x: f32) -> __m512 {
        // SAFETY: only reached from functions compiled with AVX-512, chosen after detection.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: features as above; memory by the caller's promise.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_half(from: *const f16) -> __m512 {
        // SAFETY: features as above; memory by the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m512) {
        // SAFETY: features as above; memory by the caller's promise.
        unsafe { _mm512_storeu_ps(to, v) }
    }

    #[inline(always)]
    fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: only reached from functions compiled with AVX-512, chosen after detection.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn fma1(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn sums([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        // SAFETY: only reached from functions compiled with AVX-512, chosen after detection.
        unsafe {
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let four = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xee>(ab, cd));
            let high =
                _mm512_castpd_ps(_mm512_castpd256_pd512(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(four))));
            let two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_castps512_ps256(high));
            let one = _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps::<1>(two));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), one);
            out
        }
    }

    #[inline(always)]
    fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: only reached from functions compiled with AVX-512, chosen after detection.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: only reached from functions compiled with AVX-512, chosen after detection.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: only reached from functions compiled with AVX-512, chosen after detection.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn inverse(x: __m512) -> __m512 {
        // SAFETY: only reached from functions compiled with AVX-512, chosen after detection.
        unsafe {
            let y = _mm512_rcp14_ps(x);
            // One step of Newton's method: 28 bits.
            _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, _mm512_set1_ps(2.0)))
        }
    }

    #[inline(always)]
    fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: only reached from functions compiled with AVX-512, chosen after detection.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(a: __m512, b: __m512) -> __m512 {
        // SAFETY: only reached from functions compiled with AVX-512, chosen after detection.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn power(shifted: __m512) -> __m512 {
        // SAFETY: only reached from functions compiled with AVX-512, chosen after detection.
        unsafe {
            let bits = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
            _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(127 << 23)))
        }
    }

    #[inline(always)]
    fn unless_below(x: __m512, limit: f32, v: __m512) -> __m512 {
        // SAFETY: only reached from functions compiled with AVX-512, chosen after detection.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(limit)), v) }
    }

    #[inline(always)]
    fn prefetch(from: *const f32) {
        // SAFETY: a hint, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }
}

/// 8 lanes.
pub(super) struct Avx2;

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const ROWS: usize = 3;

    #[inline(always)]
    fn splat(x: f32) -> __m256 {
        // SAFETY: only reached from functions compiled with AVX2 and FMA, chosen after detection.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: features as above; memory by the caller's promise.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_half(from: *const f16) -> __m256 {
        // SAFETY: features as above; memory by the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m256) {
        // SAFETY: features as above; memory by the caller's promise.
        unsafe { _mm256_storeu_ps(to, v) }
    }

    #[inline(always)]
    fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: only reached from functions compiled with AVX2 and FMA, chosen after detection.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn fma1(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn sums([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        // SAFETY: only reached from functions compiled with AVX2 and FMA, chosen after detection.
        unsafe {
            let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let two = _mm256_add_ps(_mm256_shuffle_ps::<0x44>(ab, cd), _mm256_shuffle_ps::<0xee>(ab, cd));
            let one = _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps::<1>(two));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), one);
            out
        }
    }

    #[inline(always)]
    fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: only reached from functions compiled with AVX2 and FMA, chosen after detection.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: only reached from functions compiled with AVX2 and FMA, chosen after detection.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: only reached from functions compiled with AVX2 and FMA, chosen after detection.
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    fn inverse(x: __m256) -> __m256 {
        // SAFETY: only reached from functions compiled with AVX2 and FMA, chosen after detection.
        unsafe { _mm256_div_ps(_mm256_set1_ps(1.0), x) }
    }

    #[inline(always)]
    fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: only reached from functions compiled with AVX2 and FMA, chosen after detection.
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(a: __m256, b: __m256) -> __m256 {
        // SAFETY: only reached from functions compiled with AVX2 and FMA, chosen after detection.
        unsafe { _mm256_min_ps(a, b) }
    }

    #[inline(always)]
    fn power(shifted: __m256) -> __m256 {
        // SAFETY: only reached from functions compiled with AVX2 and FMA, chosen after detection.
        unsafe {
            let bits = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
            _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(127 << 23)))
        }
    }

    #[inline(always)]
    fn unless_below(x: __m256, limit: f32, v: __m256) -> __m256 {
        // SAFETY: only reached from functions compiled with AVX2 and FMA, chosen after detection.
        unsafe { _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(limit)), v) }
    }

    #[inline(always)]
    fn prefetch(from: *const f32) {
        // SAFETY: a hint, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }
}
