//! Integers for processors with AVX2, with and without its integer dot products (AVX-VNNI).
//!
//! Without them, bytes are multiplied by an instruction that adds two products to sixteen bits and cuts off
//! what does not fit. Three ways around that, by how far the weights of a type lie apart: few bits leave room
//! to add up several of these sums; up to seven bits, from zero on, fit; of eight bits the magnitudes fit,
//! with the sign moved to the activations.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use std::arch::x86_64::*;

use quant::Type;

use super::int8::{self, COLUMNS, Codes, Form, MAGIC, MAGIC_BITS, ORDER, PANEL, Panel};
use super::product::Target;
use super::tiles::{Dots, Lanes, product as tiled};

/// As [`int8::product`], with AVX-VNNI.
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
) {
    // SAFETY: the caller's promise.
    unsafe { tiled::<Vnni, 2>(x, panels, out, shape, add) }
}

/// As [`int8::product`], with AVX2 alone.
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
) {
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
            let shift = _mm256_set1_epi8(int8::SHIFT as i8);
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

/// As [`int8::fill`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fill(ty: Type, rows: &[&[u8]], columns: usize, panel: &mut Panel) {
    int8::fill(ty, rows, columns, panel, |natural, columns, panel| transpose(natural, columns, panel));
}

/// As [`int8::transpose`]: 16 columns of eight rows at a time, four rows in each half of a vector.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(natural: &[[u8; COLUMNS]; PANEL], columns: usize, panel: &mut Panel) {
    const INDEX: [i8; 32] = {
        let mut index = [0; 32];
        let mut i = 0;
        while i < 32 {
            index[i] = ORDER[i % 16] as i8;
            i += 1;
        }
        index
    };
    // SAFETY: 16 columns below COLUMNS of each row; four steps of the panel.
    unsafe {
        let index = _mm256_loadu_si256(INDEX.as_ptr().cast());
        for first in (0..columns).step_by(16) {
            for half in 0..2 {
                let pair = |r: usize| {
                    let row = |r: usize| _mm_loadu_si128(natural[8 * half + r].as_ptr().add(first).cast());
                    _mm256_shuffle_epi8(_mm256_set_m128i(row(r + 4), row(r)), index)
                };
                let rows = [pair(0), pair(1), pair(2), pair(3)];
                let low = [_mm256_unpacklo_epi32(rows[0], rows[1]), _mm256_unpacklo_epi32(rows[2], rows[3])];
                let high = [_mm256_unpackhi_epi32(rows[0], rows[1]), _mm256_unpackhi_epi32(rows[2], rows[3])];
                let words = [
                    _mm256_unpacklo_epi64(low[0], low[1]),
                    _mm256_unpackhi_epi64(low[0], low[1]),
                    _mm256_unpacklo_epi64(high[0], high[1]),
                    _mm256_unpackhi_epi64(high[0], high[1]),
                ];
                for (step, word) in words.into_iter().enumerate() {
                    let to = panel.q.as_mut_ptr().add(first / 4 + step).cast::<__m256i>().add(half);
                    _mm256_store_si256(to, word);
                }
            }
        }
    }
}
