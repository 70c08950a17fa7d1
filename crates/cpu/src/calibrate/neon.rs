//! Products on the vector units of AArch64.
//!
//! Twelve sums stand side by side, at values the compiler cannot know, or it would see that they are one.

use std::arch::aarch64::*;
use std::arch::asm;
use std::arch::is_aarch64_feature_detected;
use std::hint::black_box;

use super::{Products, portable};

pub(super) use portable::sum;

const SUMS: usize = 12;

/// The fastest products of bytes that this processor has.
pub(super) fn integers() -> Products {
    if is_aarch64_feature_detected!("dotprod") {
        // SAFETY: the feature is there.
        Products { kernel: |rounds| unsafe { sdot(rounds) }, operations: 2 * 16 * SUMS as u64 }
    } else {
        portable::integers()
    }
}

/// Multiply-adds of numbers.
pub(super) fn numbers() -> Products {
    // SAFETY: every processor of this architecture has NEON.
    Products { kernel: |rounds| unsafe { fma(rounds) }, operations: 2 * 4 * SUMS as u64 }
}

#[target_feature(enable = "neon,dotprod")]
fn sdot(rounds: u64) -> u64 {
    let (a, b) = (black_box(vdupq_n_s8(3)), black_box(vdupq_n_s8(-5)));
    let mut sums = black_box([vdupq_n_s32(0); SUMS]);
    for _ in 0..rounds {
        for sum in &mut sums {
            // SAFETY: touches registers only.
            unsafe {
                asm!("sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) *sum, in(vreg) a, in(vreg) b,
                    options(pure, nomem, nostack, preserves_flags));
            }
        }
    }
    sums.into_iter().fold(0, |all, sum| all ^ vaddvq_s32(sum) as u64)
}

#[target_feature(enable = "neon")]
fn fma(rounds: u64) -> u64 {
    let (a, b) = (black_box(vdupq_n_f32(0.999)), black_box(vdupq_n_f32(1e-3)));
    let mut sums = black_box([vdupq_n_f32(1.0); SUMS]);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = vfmaq_f32(*sum, a, b);
        }
    }
    sums.into_iter().fold(0, |all, sum| all ^ u64::from(vaddvq_f32(sum).to_bits()))
}
