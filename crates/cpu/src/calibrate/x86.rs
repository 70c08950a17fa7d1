//! Products on the vector units of x86-64.
//!
//! Twelve sums stand side by side: more than latency times units asks for, few enough for sixteen registers. They
//! begin at values the compiler cannot know, or it would see that they are one.

use std::arch::x86_64::*;
use std::hint::black_box;

use super::{Products, portable};

const SUMS: usize = 12;

/// The fastest products of bytes that this processor has.
pub(super) fn integers() -> Products {
    if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni") {
        // SAFETY: the features are there.
        Products { kernel: |rounds| unsafe { vnni_512(rounds) }, operations: 2 * 64 * SUMS as u64 }
    } else if is_x86_feature_detected!("avxvnni") {
        // SAFETY: the feature is there.
        Products { kernel: |rounds| unsafe { vnni_256(rounds) }, operations: 2 * 32 * SUMS as u64 }
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: the feature is there.
        Products { kernel: |rounds| unsafe { avx2(rounds) }, operations: 2 * 32 * SUMS as u64 }
    } else {
        portable::integers()
    }
}

/// The fastest multiply-adds of numbers that this processor has.
pub(super) fn numbers() -> Products {
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature is there.
        Products { kernel: |rounds| unsafe { fma_512(rounds) }, operations: 2 * 16 * SUMS as u64 }
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the features are there.
        Products { kernel: |rounds| unsafe { fma_256(rounds) }, operations: 2 * 8 * SUMS as u64 }
    } else {
        portable::numbers()
    }
}

/// As [`portable::sum`].
pub(super) fn sum(numbers: &[u64]) -> u64 {
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature is there.
        unsafe { sum_512(numbers) }
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: the feature is there.
        unsafe { sum_256(numbers) }
    } else {
        portable::sum(numbers)
    }
}

#[target_feature(enable = "avx512f")]
fn sum_512(numbers: &[u64]) -> u64 {
    portable::streams(numbers, prefetch)
}

#[target_feature(enable = "avx2")]
fn sum_256(numbers: &[u64]) -> u64 {
    portable::streams(numbers, prefetch)
}

#[inline(always)]
fn prefetch(line: *const u64) {
    // SAFETY: a hint, harmless for any address; every processor of this architecture has it.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
}

#[target_feature(enable = "avx512f,avx512vnni")]
fn vnni_512(rounds: u64) -> u64 {
    let (a, b) = (black_box(_mm512_set1_epi8(3)), black_box(_mm512_set1_epi8(-5)));
    let mut sums = black_box([_mm512_setzero_si512(); SUMS]);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, a, b);
        }
    }
    let all = sums.into_iter().reduce(|a, b| _mm512_xor_si512(a, b));
    all.map_or(0, |all| _mm512_reduce_add_epi32(all) as u64)
}

#[target_feature(enable = "avxvnni,avx2")]
fn vnni_256(rounds: u64) -> u64 {
    let (a, b) = (black_box(_mm256_set1_epi8(3)), black_box(_mm256_set1_epi8(-5)));
    let mut sums = black_box([_mm256_setzero_si256(); SUMS]);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_dpbusd_avx_epi32(*sum, a, b);
        }
    }
    word(sums)
}

#[target_feature(enable = "avx2")]
fn avx2(rounds: u64) -> u64 {
    let a = black_box(_mm256_set1_epi8(3));
    let ones = _mm256_set1_epi16(1);
    let mut sums = black_box([_mm256_setzero_si256(); SUMS]);
    for _ in 0..rounds {
        for sum in &mut sums {
            // The sum as a factor, or there would be a single product for all of them.
            let pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(a, *sum), ones);
            *sum = _mm256_add_epi32(*sum, pairs);
        }
    }
    word(sums)
}

#[target_feature(enable = "avx2")]
fn word(sums: [__m256i; SUMS]) -> u64 {
    let all = sums.into_iter().reduce(|a, b| _mm256_xor_si256(a, b));
    all.map_or(0, |all| _mm256_extract_epi32::<0>(all) as u64)
}

#[target_feature(enable = "avx512f")]
fn fma_512(rounds: u64) -> u64 {
    let (a, b) = (black_box(_mm512_set1_ps(0.999)), black_box(_mm512_set1_ps(1e-3)));
    let mut sums = black_box([_mm512_set1_ps(1.0); SUMS]);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, a, b);
        }
    }
    let all = sums.into_iter().reduce(|a, b| _mm512_add_ps(a, b));
    all.map_or(0, |all| u64::from(_mm512_reduce_add_ps(all).to_bits()))
}

#[target_feature(enable = "avx2,fma")]
fn fma_256(rounds: u64) -> u64 {
    let (a, b) = (black_box(_mm256_set1_ps(0.999)), black_box(_mm256_set1_ps(1e-3)));
    let mut sums = black_box([_mm256_set1_ps(1.0); SUMS]);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, a, b);
        }
    }
    let all = sums.into_iter().reduce(|a, b| _mm256_add_ps(a, b));
    all.map_or(0, |all| u64::from(_mm256_cvtss_f32(all).to_bits()))
}
