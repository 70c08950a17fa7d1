//! Products of integers for processors with AVX2, with and without its integer dot products (AVX-VNNI).
//!
//! Without them, bytes are multiplied by an instruction that adds two products to sixteen bits and cuts off
//! what does not fit. Three ways around that, by how far the weights of a type lie apart: few bits leave room
//! to add up several of these sums; up to seven bits, from zero on, fit; of eight bits the magnitudes fit,
//! with the sign moved to the activations.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use std::arch::x86_64::*;

use super::int8::{Ahead, Codes, Form, MAGIC, MAGIC_BITS, PANEL, Panel, SHIFT};
use super::product::Target;
use super::tiles::{Dots, Lanes, product as tiled};

/// As [`super::int8::product`], with AVX-VNNI.
///
/// # Safety
/// As there; the processor must have AVX2 and AVX-VNNI.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) unsafe fn product_vnni(
    x: &[*const Codes],
    panels: &[&Panel],
    out: Target,
    shape: (usize, Form),
    add: bool,
    ahead: Ahead,
) {
    (0..ahead.count()).for_each(|line| super::vnni::prefetch(ahead.line(line), 1));
    // SAFETY: the caller's promise.
    unsafe { tiled::<Vnni, 2>(x, panels, out, shape, add) }
}

/// As [`super::int8::product`], with AVX2 alone.
///
/// # Safety
/// As there; the processor must have AVX2.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn product(
    x: &[*const Codes],
    panels: &[&Panel],
    out: Target,
    shape: (usize, Form),
    add: bool,
    ahead: Ahead,
) {
    (0..ahead.count()).for_each(|line| super::vnni::prefetch(ahead.line(line), 1));
    // SAFETY: the caller's promise.
    unsafe {
        match shape.1.pairs_in_sixteen_bits() {
            0 => tiled::<Signed, 2>(x, panels, out, shape, add),
            1 => tiled::<Narrow<1>, 2>(x, panels, out, shape, add),
            2..4 => tiled::<Narrow<2>, 2>(x, panels, out, shape, add),
            _ => tiled::<Narrow<4>, 2>(x, panels, out, shape, add),
        }
    }
}

/// Four steps of eight rows.
type Four = [__m256i; 4];

/// The vectors of [`Dots::weights`] as they lie.
#[inline(always)]
unsafe fn load(from: *const u8) -> Four {
    // SAFETY: memory by the caller's promise; only reached from functions compiled with AVX2.
    unsafe { [0, 1, 2, 3].map(|step| _mm256_load_si256(from.add(step * 4 * PANEL).cast())) }
}

/// Four activations, in every lane.
#[inline(always)]
unsafe fn spread(x: *const i8, step: usize) -> __m256i {
    // SAFETY: memory by the caller's promise; only reached from functions compiled with AVX2.
    unsafe { _mm256_set1_epi32(x.cast::<i32>().add(step).read_unaligned()) }
}

/// Eight lanes.
struct Eight;

impl Lanes for Eight {
    type Sums = __m256i;
    type X = *const i8;
    type Numbers = __m256;
    const VECTORS: usize = 2;

    #[inline(always)]
    fn splat(sum: i32) -> __m256i {
        // SAFETY: only reached from functions compiled with AVX2.
        unsafe { _mm256_set1_epi32(sum) }
    }

    #[inline(always)]
    unsafe fn x(from: *const i8) -> *const i8 {
        from
    }

    #[inline(always)]
    unsafe fn numbers(from: *const f32) -> __m256 {
        // SAFETY: memory by the caller's promise; only reached from functions compiled with AVX2.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    fn magic(scale: __m256) -> __m256 {
        // SAFETY: only reached from functions compiled with AVX2.
        unsafe { _mm256_mul_ps(scale, _mm256_set1_ps(-MAGIC)) }
    }

    #[inline(always)]
    unsafe fn join(sums: __m256i, (scale, magic): (__m256, __m256), factor: f32, to: *mut f32) {
        // SAFETY: memory by the caller's promise; only reached from functions compiled with AVX2.
        unsafe {
            let products = _mm256_fmadd_ps(_mm256_castsi256_ps(sums), scale, magic);
            let old = _mm256_loadu_ps(to);
            _mm256_storeu_ps(to, _mm256_fmadd_ps(products, _mm256_set1_ps(factor), old));
        }
    }

    #[inline(always)]
    unsafe fn shift(offset: __m256, factor: f32, to: *mut f32) {
        // SAFETY: memory by the caller's promise; only reached from functions compiled with AVX2.
        unsafe {
            let old = _mm256_loadu_ps(to);
            _mm256_storeu_ps(to, _mm256_fmadd_ps(offset, _mm256_set1_ps(factor), old));
        }
    }
}

/// Products summed by one instruction.
struct Vnni;

impl Dots for Vnni {
    type Lanes = Eight;
    type Weights = Four;
    const ROWS: usize = 4;

    #[inline(always)]
    fn start(start: i32, _: Form) -> i32 {
        start
    }

    #[inline(always)]
    unsafe fn weights(from: *const u8, _: Form) -> Four {
        // SAFETY: the caller's promise.
        unsafe { load(from) }
    }

    #[inline(always)]
    fn add(mut sums: __m256i, weights: Four, x: *const i8) -> __m256i {
        for (step, weights) in weights.into_iter().enumerate() {
            // SAFETY: 16 readable activations, as `x` was promised; features of the caller.
            unsafe { sums = _mm256_dpbusd_avx_epi32(sums, weights, spread(x, step)) };
        }
        sums
    }
}

/// Weights from zero on, of so few bits that `MERGED` sums of two products fit into sixteen bits.
struct Narrow<const MERGED: usize>;

impl<const MERGED: usize> Dots for Narrow<MERGED> {
    type Lanes = Eight;
    type Weights = Four;
    const ROWS: usize = 4;

    #[inline(always)]
    fn start(start: i32, form: Form) -> i32 {
        form.start_from_zero(start)
    }

    #[inline(always)]
    unsafe fn weights(from: *const u8, form: Form) -> Four {
        // SAFETY: the caller's promise; only reached from functions compiled with AVX2.
        unsafe {
            let zero = _mm256_set1_epi8(form.zero() as i8);
            load(from).map(|weights| _mm256_sub_epi8(weights, zero))
        }
    }

    #[inline(always)]
    fn add(mut sums: __m256i, weights: Four, x: *const i8) -> __m256i {
        // SAFETY: 16 readable activations, as `x` was promised; only reached from functions compiled with AVX2.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            for first in (0..4).step_by(MERGED) {
                let mut pairs = _mm256_maddubs_epi16(weights[first], spread(x, first));
                for step in first + 1..first + MERGED {
                    let more = _mm256_maddubs_epi16(weights[step], spread(x, step));
                    pairs = _mm256_add_epi16(pairs, more);
                }
                sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, ones));
            }
        }
        sums
    }
}

/// Weights of eight bits: magnitudes, times activations with the signs of the weights. Two products are at most
/// 2 · 128 · 127.
struct Signed;

impl Dots for Signed {
    type Lanes = Eight;
    /// Weights and their magnitudes.
    type Weights = (Four, Four);
    const ROWS: usize = 4;

    #[inline(always)]
    fn start(_: i32, _: Form) -> i32 {
        MAGIC_BITS
    }

    #[inline(always)]
    unsafe fn weights(from: *const u8, _: Form) -> (Four, Four) {
        // SAFETY: the caller's promise; only reached from functions compiled with AVX2.
        unsafe {
            let shift = _mm256_set1_epi8(SHIFT as i8);
            let signed = load(from).map(|weights| _mm256_xor_si256(weights, shift));
            (signed, signed.map(|weights| _mm256_abs_epi8(weights)))
        }
    }

    #[inline(always)]
    fn add(mut sums: __m256i, (signed, magnitudes): (Four, Four), x: *const i8) -> __m256i {
        for step in 0..4 {
            // SAFETY: 16 readable activations, as `x` was promised; only reached from functions compiled with
            // AVX2.
            unsafe {
                let x = _mm256_sign_epi8(spread(x, step), signed[step]);
                let pairs = _mm256_maddubs_epi16(magnitudes[step], x);
                sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            }
        }
        sums
    }
}
