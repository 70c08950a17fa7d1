//! Attention on integers of 16 bits, for AVX-512 with VNNI: twice the rate of single precision.
//!
//! As the functions of [`super::int16`], but for the order in which a block's weights are added.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use std::arch::x86_64::*;

use half::f16;
use model::GRID;

use super::int16::{self, Block, IntAttention, Row, TILE, VALUE_STEPS, WEIGHT_STEPS, WIDEST, key_steps};
use super::lanes::transposed;
use super::rows::exps;
use super::simd::Simd;
use super::x86::Avx512;

/// Vectors of a tile, and of a block's scores.
const VECTORS: usize = TILE / 16;

/// The functions of this file. They may be called where the processor has the features of the variant.
// SAFETY (of every call): the table that refers to this is handed out only where the features are.
#[allow(clippy::undocumented_unsafe_blocks)]
pub(super) static FUNCTIONS: IntAttention = IntAttention {
    is_fast: true,
    round: |x, out| unsafe { round(x, out) },
    pack: |keys, values, dim, block| unsafe { pack(keys, values, dim, block) },
    weigh: |block, queries, rows, weights| unsafe { weigh(block, queries, rows, weights) },
    sum: |block, rows, weights, out| unsafe { sum(block, rows, weights, out) },
};

/// Largest magnitude, as bits, so that what is no number counts as the largest.
#[inline(always)]
fn magnitude(largest: __m512i, x: __m512) -> __m512i {
    // SAFETY: only reached from functions compiled with the features, chosen after detection.
    unsafe {
        let bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fff_ffff));
        _mm512_max_epi32(largest, bits)
    }
}

/// As [`int16::scale`].
#[inline(always)]
fn scale(largest: __m512i, steps: f32) -> (f32, f32) {
    // SAFETY: only reached from functions compiled with the features, chosen after detection.
    int16::scale(f32::from_bits(unsafe { _mm512_reduce_max_epi32(largest) } as u32), steps)
}

/// `x` as 16 integers.
#[inline(always)]
fn integers(x: __m512, factor: f32) -> __m256i {
    // SAFETY: only reached from functions compiled with the features, chosen after detection.
    unsafe { _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(factor)))) }
}

/// The lanes of a vector that lie below `len` when it begins at `first`.
#[inline(always)]
fn below(first: usize, len: usize) -> u16 {
    match len.saturating_sub(first) {
        left @ 0..16 => (1 << left) - 1,
        _ => u16::MAX,
    }
}

/// A query head to integers, padded with zeros; returns its scale.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn round(x: &[f32], out: &mut [i16]) -> f32 {
    assert!(out.len() >= x.len() && out.len().is_multiple_of(TILE));
    // SAFETY: lanes below the length are read, whole vectors of `out` written.
    unsafe {
        let load = |i: usize| _mm512_maskz_loadu_ps(below(i, x.len()), x.as_ptr().wrapping_add(i));
        let mut largest = _mm512_setzero_si512();
        for i in (0..x.len()).step_by(16) {
            largest = magnitude(largest, load(i));
        }
        let (scale, factor) = scale(largest, key_steps(out.len()));
        for i in (0..out.len()).step_by(16) {
            _mm256_storeu_si256(out.as_mut_ptr().add(i).cast(), integers(load(i), factor));
        }
        scale
    }
}

/// A key or value to integers; returns its scale.
///
/// # Safety
/// As for [`round`].
#[inline(always)]
unsafe fn round_half(x: &[f16], steps: f32, out: &mut [i16]) -> f32 {
    // SAFETY: lanes below the length are read, whole vectors of `out` written.
    unsafe {
        let mut largest = _mm512_setzero_si512();
        for i in (0..x.len()).step_by(16) {
            largest = magnitude(largest, widened(x, i));
        }
        let (scale, factor) = scale(largest, steps);
        for i in (0..out.len()).step_by(16) {
            _mm256_storeu_si256(out.as_mut_ptr().add(i).cast(), integers(widened(x, i), factor));
        }
        scale
    }
}

/// 16 numbers from `i` on, zero behind the last.
#[inline(always)]
unsafe fn widened(x: &[f16], i: usize) -> __m512 {
    // SAFETY: only reached from functions compiled with the features; lanes below the length are read.
    unsafe {
        let from: *const i16 = x.as_ptr().wrapping_add(i).cast();
        _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(below(i, x.len()), from))
    }
}

/// Rounds keys and values, [positions][dim] each, and lays them out for [`weigh`] and [`sum`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn pack(keys: &[f16], values: &[f16], dim: usize, block: &mut Block) {
    block.begin(keys, values, dim);
    let (width, positions) = (block.width, block.positions);
    let mut rows = Rounded([0; 16 * WIDEST]);
    for first in (0..GRID).step_by(16) {
        if first >= positions {
            // Values of these positions are skipped, see `sum`; keys are not.
            rows.0[..16 * width].fill(0);
        }
        for (i, row) in rows.0.chunks_exact_mut(width).take(16).enumerate() {
            let at = first + i;
            if at < positions {
                // SAFETY: the features; a row as wide as a block.
                block.key_scales[at] =
                    unsafe { round_half(&keys[at * dim..(at + 1) * dim], key_steps(width), row) };
            } else {
                row.fill(0);
            }
        }
        // SAFETY: 16 rows of `width`; places of 16 positions in the block.
        unsafe { transpose_keys(&rows.0, width, block.keys[first * 2..].as_mut_ptr()) };
    }
    for first in (0..positions).step_by(2) {
        for (i, row) in rows.0.chunks_exact_mut(width).take(2).enumerate() {
            let at = first + i;
            if at < positions {
                // SAFETY: as above.
                block.value_scales[at] =
                    unsafe { round_half(&values[at * dim..(at + 1) * dim], VALUE_STEPS, row) };
            } else {
                row.fill(0);
            }
        }
        // SAFETY: two rows of `width`; places of a pair of positions in the block.
        unsafe { interleave_values(&rows.0, width, block.values[first * TILE..].as_mut_ptr()) };
    }
}

/// 16 rows of integers.
#[repr(C, align(64))]
struct Rounded([i16; 16 * WIDEST]);

/// 16 rows of keys to [width / 2][GRID][2], from the first of the positions on.
#[inline(always)]
unsafe fn transpose_keys(rows: &[i16], width: usize, to: *mut i16) {
    for column in (0..width).step_by(8) {
        // SAFETY: 8 integers of each row; 16 positions of four pairs of dimensions.
        unsafe {
            let quarter = |row: usize| _mm_loadu_si128(rows[row * width + column..].as_ptr().cast());
            let mut fours = [_mm512_setzero_si512(); 4];
            for i in 0..4 {
                let four = _mm512_zextsi128_si512(quarter(i));
                let four = _mm512_mask_broadcast_i32x4(four, 0x00f0, quarter(4 + i));
                let four = _mm512_mask_broadcast_i32x4(four, 0x0f00, quarter(8 + i));
                fours[i] = _mm512_mask_broadcast_i32x4(four, 0xf000, quarter(12 + i));
            }
            let pairs = transposed(fours);
            for i in 0..4 {
                _mm512_storeu_si512(to.add((column / 2 + i) * GRID * 2).cast(), pairs[i]);
            }
        }
    }
}

/// Two rows of values to [tiles][GRID / 2][TILE][2], from the pair's place in the first tile on.
#[inline(always)]
unsafe fn interleave_values(rows: &[i16], width: usize, to: *mut i16) {
    for column in (0..width).step_by(16) {
        // SAFETY: 16 integers of both rows; 16 columns of a pair of positions.
        unsafe {
            let word = |row: usize| {
                _mm512_cvtepu16_epi32(_mm256_loadu_si256(rows[row * width + column..].as_ptr().cast()))
            };
            let both = _mm512_or_si512(word(0), _mm512_slli_epi32::<16>(word(1)));
            let (tile, c) = (column / TILE, column % TILE);
            _mm512_storeu_si512(to.add(tile * GRID * TILE + c * 2).cast(), both);
        }
    }
}

/// acc[r][c] += products of pairs: those of row r of `left` (`stride` apart), the same in all lanes, with those of
/// vector c of `right`.
#[inline(always)]
unsafe fn accumulate<const R: usize>(
    pairs: usize,
    (left, stride): (*const i16, usize),
    right: *const i16,
) -> [[__m512i; VECTORS]; R] {
    // SAFETY: the caller's promise; only reached from functions compiled with the features.
    unsafe {
        let mut acc = [[_mm512_setzero_si512(); VECTORS]; R];
        for i in 0..pairs {
            let mut columns = [_mm512_setzero_si512(); VECTORS];
            for c in 0..VECTORS {
                columns[c] = _mm512_loadu_si512(right.add((i * VECTORS + c) * 32).cast());
            }
            for r in 0..R {
                let pair = left.add(r * stride + 2 * i).cast::<i32>().read_unaligned();
                let pair = _mm512_set1_epi32(pair);
                for c in 0..VECTORS {
                    acc[r][c] = _mm512_dpwssd_epi32(acc[r][c], pair, columns[c]);
                }
            }
        }
        acc
    }
}

/// Softmax of the block for every row: `queries` are [rows][width], `weights` become [rows][GRID].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
fn weigh(block: &Block, queries: &[i16], rows: &mut [Row], weights: &mut [i16]) {
    let width = block.width;
    assert!(queries.len() >= rows.len() * width && weights.len() >= rows.len() * GRID);
    assert!(block.keys.len() >= width * GRID);
    let (mut queries, mut weights) = (queries.as_ptr(), weights.as_mut_ptr());
    let (fours, rest) = rows.as_chunks_mut::<4>();
    // SAFETY: as many rows of queries and weights.
    unsafe {
        for rows in fours {
            weigh_rows(block, queries, rows, weights);
            (queries, weights) = (queries.add(4 * width), weights.add(4 * GRID));
        }
        for row in rest {
            weigh_rows(block, queries, std::array::from_mut(row), weights);
            (queries, weights) = (queries.add(width), weights.add(GRID));
        }
    }
}

#[inline(always)]
unsafe fn weigh_rows<const R: usize>(
    block: &Block,
    queries: *const i16,
    rows: &mut [Row; R],
    weights: *mut i16,
) {
    let width = block.width;
    // SAFETY: the caller's promise; GRID numbers of every array of the block.
    unsafe {
        let products = accumulate::<R>(width / 2, (queries, width), block.keys.as_ptr());
        for r in 0..R {
            let row = &mut rows[r];
            let mut scores = [_mm512_setzero_ps(); VECTORS];
            for c in 0..VECTORS {
                let scale = _mm512_loadu_ps(block.key_scales.as_ptr().add(16 * c));
                let scale = _mm512_mul_ps(scale, _mm512_set1_ps(row.scale));
                let score = _mm512_mul_ps(_mm512_cvtepi32_ps(products[r][c]), scale);
                let unseen = _mm512_set1_ps(f32::NEG_INFINITY);
                scores[c] = _mm512_mask_mov_ps(unseen, below(16 * c, row.seen), score);
            }
            let most =
                _mm512_max_ps(_mm512_max_ps(scores[0], scores[1]), _mm512_max_ps(scores[2], scores[3]));
            let most = _mm512_reduce_max_ps(most);
            let (mut sum, mut largest) = (_mm512_setzero_ps(), _mm512_setzero_si512());
            for c in 0..VECTORS {
                let e = exps::<Avx512>(_mm512_sub_ps(scores[c], _mm512_set1_ps(most)));
                sum = _mm512_add_ps(sum, e);
                let seen = below(16 * c, row.seen);
                let scale = _mm512_maskz_loadu_ps(seen, block.value_scales.as_ptr().add(16 * c));
                scores[c] = _mm512_mul_ps(e, scale);
                largest = magnitude(largest, scores[c]);
            }
            let (scale, factor) = scale(largest, WEIGHT_STEPS);
            for c in 0..VECTORS {
                let to = weights.add(r * GRID + 16 * c);
                _mm256_storeu_si256(to.cast(), integers(scores[c], factor));
            }
            row.join::<Avx512>(most, _mm512_reduce_add_ps(sum), scale);
        }
    }
}

/// Joins the block to the outputs, [rows][width]: out ← out · factor + factor · Σ weight · value.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
fn sum(block: &Block, rows: &[Row], weights: &[i16], out: &mut [f32]) {
    let width = block.width;
    assert!(weights.len() >= rows.len() * GRID && out.len() >= rows.len() * width);
    assert!(block.values.len() >= width * GRID);
    let (mut weights, mut out) = (weights.as_ptr(), out.as_mut_ptr());
    let (fours, rest) = rows.as_chunks::<4>();
    // SAFETY: as many rows of weights and outputs.
    unsafe {
        for rows in fours {
            sum_rows(block, rows, weights, out);
            (weights, out) = (weights.add(4 * GRID), out.add(4 * width));
        }
        for row in rest {
            sum_rows(block, std::array::from_ref(row), weights, out);
            (weights, out) = (weights.add(GRID), out.add(width));
        }
    }
}

#[inline(always)]
unsafe fn sum_rows<const R: usize>(block: &Block, rows: &[Row; R], weights: *const i16, out: *mut f32) {
    let width = block.width;
    // SAFETY: the caller's promise.
    unsafe {
        for tile in 0..width / TILE {
            let out = out.add(tile * TILE);
            for r in 0..R {
                (0..VECTORS).for_each(|c| Avx512::prefetch(out.add(r * width + 16 * c)));
            }
            let values = block.values.as_ptr().add(tile * GRID * TILE);
            let products = accumulate::<R>(block.positions.div_ceil(2), (weights, GRID), values);
            for r in 0..R {
                let [before, part] = rows[r].factors;
                for c in 0..VECTORS {
                    let out = out.add(r * width + 16 * c);
                    let old = _mm512_mul_ps(_mm512_loadu_ps(out), _mm512_set1_ps(before));
                    let new = _mm512_cvtepi32_ps(products[r][c]);
                    _mm512_storeu_ps(out, _mm512_fmadd_ps(new, _mm512_set1_ps(part), old));
                }
            }
        }
    }
}
