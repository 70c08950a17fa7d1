//! Activations to integers, for AVX-512 with VNNI.
//!
//! The same results as the functions of [`super::int8`], bit for bit.

use std::arch::x86_64::*;

use super::finish;
use super::int8::{COLUMNS, Codes, GROUP, MAGIC, ORDER, SHIFT};
use super::x86::Avx512;

/// As [`super::int8::round`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
pub(super) fn round(x: &[f32], out: &mut [Codes]) {
    for (x, codes) in x.chunks(COLUMNS).zip(out) {
        for (group, x) in x.as_chunks::<GROUP>().0.iter().enumerate() {
            // SAFETY: the group lies in `codes`, which is borrowed mutably.
            unsafe { round_group(x, codes, group) };
        }
    }
}

/// As [`finish::gated`].
///
/// # Safety
/// As there; the processor must have AVX-512 with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
pub(super) unsafe fn gated(tile: &[f32], stride: usize, codes: &[*mut Codes], group: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let round = |x: &[f32; GROUP], codes, group| round_group(x, codes, group);
        finish::gated::<Avx512>((tile, stride), (codes, group), round);
    }
}

/// As [`super::int8::round_group`]: 32 numbers in two vectors, 32 integers in half a one.
///
/// # Safety
/// As there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
unsafe fn round_group(x: &[f32; GROUP], codes: *mut Codes, group: usize) {
    const INDEX: [u8; 16] = {
        let mut index = [0; 16];
        let mut i = 0;
        while i < 16 {
            index[i] = ORDER[i] as u8;
            i += 1;
        }
        index
    };
    // SAFETY: 32 numbers; the group's part of `codes`, by the caller's promise nobody else's.
    unsafe {
        let x = [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16))];
        let bits = x.map(|x| _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fff_ffff)));
        let largest = f32::from_bits(_mm512_reduce_max_epu32(_mm512_max_epu32(bits[0], bits[1])));
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        let q = x.map(|x| {
            let scaled = _mm512_mul_ps(x, _mm512_set1_ps(inverse));
            _mm512_cvtepi32_epi8(_mm512_castps_si512(_mm512_add_ps(scaled, _mm512_set1_ps(MAGIC))))
        });
        let q = _mm256_set_m128i(q[1], q[0]);
        // Sums of four, of eight, of sixteen: each half of the vector is a half of the group.
        let sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);
        let sums = _mm256_hadd_epi32(sums, sums);
        let sums = _mm256_hadd_epi32(sums, sums);
        let sums = [_mm256_extract_epi32::<0>(sums), _mm256_extract_epi32::<4>(sums)];
        let order = _mm256_broadcastsi128_si256(_mm_loadu_si128(INDEX.as_ptr().cast()));
        let ordered = _mm256_shuffle_epi8(q, order);
        let scale = largest / 127.0;
        let start = |sum: i32| MAGIC.to_bits() as i32 - SHIFT * sum;
        let all = sums[0] + sums[1];
        _mm256_storeu_si256((&raw mut (*codes).q).cast::<__m256i>().add(group), ordered);
        (&raw mut (*codes).scales[group]).write(scale);
        (&raw mut (*codes).starts[group]).write(start(all));
        (&raw mut (*codes).half_starts[group]).write(sums.map(start));
        (&raw mut (*codes).sums[group]).write(scale * all as f32);
        (&raw mut (*codes).half_sums[group]).write(sums.map(|sum| scale * sum as f32));
    }
}
