//! Integers for aarch64 processors with dot products of bytes.

use std::arch::aarch64::*;
use std::arch::asm;

use super::int8::{Ahead, Codes, Form, MAGIC, MAGIC_BITS, PANEL, Panel, SHIFT};
use super::product::Target;
use super::tiles::{Dots, Lanes, product as tiled};

/// As [`super::int8::product`].
///
/// # Safety
/// As there; the processor must have dot products.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn product(
    x: &[*const Codes],
    panels: &[&Panel],
    out: Target,
    shape: (usize, Form),
    add: bool,
    ahead: Ahead,
) {
    (0..ahead.count()).for_each(|line| super::neon::prefetch(ahead.line(line), 1));
    // SAFETY: the caller's promise.
    unsafe { tiled::<Dotprod, 4>(x, panels, out, shape, add) }
}

/// Four lanes.
struct Four;

impl Lanes for Four {
    type Sums = int32x4_t;
    type X = int8x16_t;
    type Numbers = float32x4_t;
    const VECTORS: usize = 4;

    #[inline(always)]
    fn splat(sum: i32) -> int32x4_t {
        // SAFETY: every processor of the target has NEON.
        unsafe { vdupq_n_s32(sum) }
    }

    #[inline(always)]
    unsafe fn x(from: *const i8) -> int8x16_t {
        // SAFETY: features as above; memory by the caller's promise.
        unsafe { vld1q_s8(from) }
    }

    #[inline(always)]
    unsafe fn numbers(from: *const f32) -> float32x4_t {
        // SAFETY: features as above; memory by the caller's promise.
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    fn magic(scale: float32x4_t) -> float32x4_t {
        // SAFETY: every processor of the target has NEON.
        unsafe { vmulq_n_f32(scale, -MAGIC) }
    }

    #[inline(always)]
    unsafe fn join(sums: int32x4_t, (scale, magic): (float32x4_t, float32x4_t), factor: f32, to: *mut f32) {
        // SAFETY: features as above; memory by the caller's promise.
        unsafe {
            let products = vfmaq_f32(magic, vreinterpretq_f32_s32(sums), scale);
            vst1q_f32(to, vfmaq_n_f32(vld1q_f32(to), products, factor));
        }
    }

    #[inline(always)]
    unsafe fn shift(offset: float32x4_t, factor: f32, to: *mut f32) {
        // SAFETY: features as above; memory by the caller's promise.
        unsafe { vst1q_f32(to, vfmaq_n_f32(vld1q_f32(to), offset, factor)) };
    }
}

/// Four signed products summed in every lane by one instruction.
struct Dotprod;

impl Dots for Dotprod {
    type Lanes = Four;
    type Weights = [int8x16_t; 4];
    const ROWS: usize = 5;

    #[inline(always)]
    fn start(_: i32, _: Form) -> i32 {
        MAGIC_BITS
    }

    #[inline(always)]
    unsafe fn weights(from: *const u8, _: Form) -> [int8x16_t; 4] {
        // SAFETY: features as above; memory by the caller's promise.
        unsafe {
            let shift = vdupq_n_u8(SHIFT as u8);
            [0, 1, 2, 3]
                .map(|step| vreinterpretq_s8_u8(veorq_u8(vld1q_u8(from.add(step * 4 * PANEL)), shift)))
        }
    }

    #[inline(always)]
    fn add(sums: int32x4_t, w: [int8x16_t; 4], x: int8x16_t) -> int32x4_t {
        // SAFETY: only reached from functions compiled with dot products, chosen after detection.
        unsafe {
            let sums = dot::<0>(sums, w[0], x);
            let sums = dot::<1>(sums, w[1], x);
            let sums = dot::<2>(sums, w[2], x);
            dot::<3>(sums, w[3], x)
        }
    }
}

/// sums[n] + Σ w[4n + j] · x[4 I + j], an instruction whose function in the standard library is not stable yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot<const I: usize>(mut sums: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: registers only; the feature is that of this function.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {w:v}.16b, {x:v}.4b[{i}]",
            sums = inlateout(vreg) sums,
            w = in(vreg) w,
            x = in(vreg) x,
            i = const I,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}
