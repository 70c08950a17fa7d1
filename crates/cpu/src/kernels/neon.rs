//! The vector unit of aarch64, which every such processor has.

use std::arch::aarch64::*;
use std::arch::asm;

use half::f16;
use quant::Type;

use super::int8::{self, COLUMNS, ORDER, PANEL, Panel};
use super::simd::Simd;
use super::unpack;

/// 4 lanes.
pub(super) struct Neon;

impl Simd for Neon {
    type V = float32x4_t;
    const LANES: usize = 4;
    const ROWS: usize = 4;

    #[inline(always)]
    fn splat(x: f32) -> float32x4_t {
        // SAFETY: every processor of the target has NEON.
        unsafe { vdupq_n_f32(x) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> float32x4_t {
        // SAFETY: features as above; memory by the caller's promise.
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    unsafe fn load_half(from: *const f16) -> float32x4_t {
        let out: float32x4_t;
        // SAFETY: memory by the caller's promise; touches registers only.
        unsafe {
            let four = vld1_u16(from.cast());
            asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) out, in(vreg) four,
                options(pure, nomem, nostack, preserves_flags));
        }
        out
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: float32x4_t) {
        // SAFETY: features as above; memory by the caller's promise.
        unsafe { vst1q_f32(to, v) }
    }

    #[inline(always)]
    fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: every processor of the target has NEON.
        unsafe { vfmaq_f32(c, a, b) }
    }

    #[inline(always)]
    fn fma1(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn sums([a, b, c, d]: [float32x4_t; 4]) -> [f32; 4] {
        let mut out = [0.0; 4];
        // SAFETY: every processor of the target has NEON; `out` has four numbers.
        unsafe { vst1q_f32(out.as_mut_ptr(), vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d))) };
        out
    }

    #[inline(always)]
    fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: every processor of the target has NEON.
        unsafe { vaddq_f32(a, b) }
    }

    #[inline(always)]
    fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: every processor of the target has NEON.
        unsafe { vmulq_f32(a, b) }
    }

    #[inline(always)]
    fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: every processor of the target has NEON.
        unsafe { vdivq_f32(a, b) }
    }

    #[inline(always)]
    fn inverse(x: float32x4_t) -> float32x4_t {
        Neon::div(Neon::splat(1.0), x)
    }

    #[inline(always)]
    fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // Not the instruction called so, which keeps what is no number.
        // SAFETY: every processor of the target has NEON.
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }

    #[inline(always)]
    fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: every processor of the target has NEON.
        unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
    }

    #[inline(always)]
    fn power(shifted: float32x4_t) -> float32x4_t {
        // SAFETY: every processor of the target has NEON.
        unsafe {
            let bits = vshlq_n_u32::<23>(vreinterpretq_u32_f32(shifted));
            vreinterpretq_f32_u32(vaddq_u32(bits, vdupq_n_u32(127 << 23)))
        }
    }

    #[inline(always)]
    fn unless_below(x: float32x4_t, limit: f32, v: float32x4_t) -> float32x4_t {
        // SAFETY: every processor of the target has NEON.
        unsafe {
            let below = vcltq_f32(x, vdupq_n_f32(limit));
            vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), below))
        }
    }

    #[inline(always)]
    fn prefetch(from: *const f32) {
        // SAFETY: a hint, harmless for any address.
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) from, options(nostack, readonly, preserves_flags)) };
    }
}

/// Asks for the cache lines of `len` bytes.
pub(super) fn prefetch(bytes: *const u8, len: usize) {
    for at in (0..len).step_by(64) {
        let line = bytes.wrapping_add(at);
        // SAFETY: a hint, harmless for any address.
        unsafe { asm!("prfm pldl2keep, [{}]", in(reg) line, options(nostack, readonly, preserves_flags)) };
    }
}

/// As [`int8::fill`].
pub(super) fn fill(ty: Type, rows: &[&[u8]], columns: usize, panel: &mut Panel) {
    int8::fill_with(unpack::form(ty), rows, columns, panel, (int8::by_type(ty), transpose));
}

/// As [`int8::transpose`]: 16 columns of four rows at a time.
#[inline(always)]
fn transpose(natural: &[[u8; COLUMNS]; PANEL], columns: usize, panel: &mut Panel) {
    const INDEX: [u8; 16] = {
        let mut index = [0; 16];
        let mut i = 0;
        while i < 16 {
            index[i] = ORDER[i] as u8;
            i += 1;
        }
        index
    };
    // SAFETY: 16 columns below COLUMNS of each row; four steps of the panel; every processor has NEON.
    unsafe {
        let index = vld1q_u8(INDEX.as_ptr());
        for first in (0..columns).step_by(16) {
            for four in 0..PANEL / 4 {
                let row = |r: usize| {
                    let bytes = vld1q_u8(natural[4 * four + r].as_ptr().add(first));
                    vreinterpretq_u32_u8(vqtbl1q_u8(bytes, index))
                };
                let (a, b, c, d) = (row(0), row(1), row(2), row(3));
                let long = |x| vreinterpretq_u64_u32(x);
                let (even_ab, odd_ab) = (long(vtrn1q_u32(a, b)), long(vtrn2q_u32(a, b)));
                let (even_cd, odd_cd) = (long(vtrn1q_u32(c, d)), long(vtrn2q_u32(c, d)));
                let words = [
                    vtrn1q_u64(even_ab, even_cd),
                    vtrn1q_u64(odd_ab, odd_cd),
                    vtrn2q_u64(even_ab, even_cd),
                    vtrn2q_u64(odd_ab, odd_cd),
                ];
                for (step, word) in words.into_iter().enumerate() {
                    let to = panel.q.as_mut_ptr().add(first / 4 + step).cast::<u8>().add(16 * four);
                    vst1q_u8(to, vreinterpretq_u8_u64(word));
                }
            }
        }
    }
}
