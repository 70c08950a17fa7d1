//! Decoding blocks to panels of integers, for AVX-512 with VBMI.
//!
//! The same results as the functions of [`super::int8`], bit for bit.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use std::arch::x86_64::*;

use quant::Type;
use quant::codebook::{EVEN_SIGNS, IQ2_MAGNITUDES, IQ2_XXS_GRID};

use super::int8::{self, COLUMNS, ORDER, PANEL, Panel};

/// As [`int8::fill`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c")]
pub(super) fn fill(ty: Type, rows: &[&[u8]], columns: usize, panel: &mut Panel) {
    match ty {
        Type::IQ2_XXS => iq2_xxs(rows, panel),
        _ => fill_by_tables(ty, rows, columns, panel),
    }
}

/// As [`int8::fill`], for every type.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c")]
pub(super) fn fill_by_tables(ty: Type, rows: &[&[u8]], columns: usize, panel: &mut Panel) {
    int8::fill(ty, rows, columns, panel, |natural, columns, panel| transpose(natural, columns, panel));
}

/// As [`int8::transpose`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn transpose(natural: &[[u8; COLUMNS]; PANEL], columns: usize, panel: &mut Panel) {
    const INDEX: [u8; 64] = {
        let mut index = [0; 64];
        let mut i = 0;
        while i < 64 {
            index[i] = (i / 16 * 16 + ORDER[i % 16]) as u8;
            i += 1;
        }
        index
    };
    // SAFETY: 64 bytes; the last piece may be half a vector, whose other half lies inside the arrays too,
    // because they have a multiple of 64 columns.
    unsafe {
        let index = _mm512_loadu_si512(INDEX.as_ptr().cast());
        for first in (0..columns).step_by(64) {
            let mut rows = [_mm512_setzero_si512(); 16];
            for r in 0..16 {
                let row = _mm512_loadu_si512(natural[r].as_ptr().add(first).cast());
                rows[r] = _mm512_permutexvar_epi8(index, row);
            }
            let columns = transposed(rows);
            for c in 0..16 {
                _mm512_store_si512(panel.q.as_mut_ptr().add(first / 4 + c).cast(), columns[c]);
            }
        }
    }
}

/// 16 × 16 words, rows to columns.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = [_mm512_setzero_si512(); 16];
    for i in 0..8 {
        // Words c and c + 1 (of every four) of the rows 2i, 2i + 1.
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    let mut fours = [_mm512_setzero_si512(); 16];
    for i in 0..4 {
        // fours[4i + c]: word c of every four, of the rows 4i .. 4i + 4.
        fours[4 * i] = _mm512_unpacklo_epi64(pairs[4 * i], pairs[4 * i + 2]);
        fours[4 * i + 1] = _mm512_unpackhi_epi64(pairs[4 * i], pairs[4 * i + 2]);
        fours[4 * i + 2] = _mm512_unpacklo_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
        fours[4 * i + 3] = _mm512_unpackhi_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
    }
    let mut out = [_mm512_setzero_si512(); 16];
    for c in 0..4 {
        // Quarters: [quarter of the columns], each of four rows.
        let (a, b, d, e) = (fours[c], fours[4 + c], fours[8 + c], fours[12 + c]);
        let low = _mm512_shuffle_i32x4::<0x44>(a, b);
        let high = _mm512_shuffle_i32x4::<0xee>(a, b);
        let low2 = _mm512_shuffle_i32x4::<0x44>(d, e);
        let high2 = _mm512_shuffle_i32x4::<0xee>(d, e);
        out[c] = _mm512_shuffle_i32x4::<0x88>(low, low2);
        out[4 + c] = _mm512_shuffle_i32x4::<0xdd>(low, low2);
        out[8 + c] = _mm512_shuffle_i32x4::<0x88>(high, high2);
        out[12 + c] = _mm512_shuffle_i32x4::<0xdd>(high, high2);
    }
    out
}

/// Codes (0, 1, 2 for the magnitudes) of four weights of every codebook row, the first in the lowest bits.
const fn codes(first: usize) -> [u8; 256] {
    let mut table = [0; 256];
    let mut row = 0;
    while row < 256 {
        let mut j = 0;
        while j < 4 {
            let entry = IQ2_XXS_GRID[row][first + j];
            let code = if entry == IQ2_MAGNITUDES[0] {
                0
            } else if entry == IQ2_MAGNITUDES[1] {
                1
            } else {
                2
            };
            table[row] |= code << (2 * j);
            j += 1;
        }
        row += 1;
    }
    table
}

/// Bytes of a vector load.
#[repr(C, align(64))]
struct Table<const N: usize>([u8; N]);

static LOW_CODES: Table<256> = Table(codes(0));
static HIGH_CODES: Table<256> = Table(codes(4));
static SIGNS: Table<128> = Table(EVEN_SIGNS);

/// Shifted weight by six bits, of which two at `code` say the magnitude and one at `sign` says whether it is
/// negative.
const fn values(code: usize, sign: usize) -> Table<64> {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        let which = i >> code & 3;
        let magnitude = if which < 3 { IQ2_MAGNITUDES[which] } else { 0 };
        let value = if i >> sign & 1 == 1 { -magnitude } else { magnitude };
        table[i] = (value as i32 + int8::SHIFT) as u8;
        i += 1;
    }
    Table(table)
}

static VALUES: [Table<64>; 4] = [values(0, 2), values(2, 1), values(4, 2), values(2, 5)];

/// IQ2_XXS in registers: a lane is a row, its four bytes the four codebook rows of 32 columns. Tables turn them
/// into two bits a weight; these and the signs pick the weight from a table.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,f16c")]
fn iq2_xxs(rows: &[&[u8]], panel: &mut Panel) {
    let last = rows.len() - 1;
    let blocks: [&[[u8; 66]]; PANEL] = std::array::from_fn(|r| rows[r.min(last)].as_chunks().0);
    // SAFETY: vectors of the tables, of the 64 bytes behind the scale of a block, and of the panel.
    unsafe {
        let load = |table: &[u8], at: usize| _mm512_load_si512(table.as_ptr().add(at).cast());
        let low: [__m512i; 4] = [0, 64, 128, 192].map(|at| load(&LOW_CODES.0, at));
        let high: [__m512i; 4] = [0, 64, 128, 192].map(|at| load(&HIGH_CODES.0, at));
        let signs = [load(&SIGNS.0, 0), load(&SIGNS.0, 64)];
        // The four fields of seven bits of both words of a pair.
        let fields = _mm512_set1_epi64(0x352e_2720_150e_0700);
        for block in 0..blocks[0].len() {
            let mut words = [_mm512_setzero_si512(); 16];
            let mut d = [0u16; PANEL];
            for r in 0..PANEL {
                let bytes = &blocks[r][block];
                words[r] = _mm512_loadu_si512(bytes[2..].as_ptr().cast());
                d[r] = u16::from_le_bytes([bytes[0], bytes[1]]);
            }
            let d = _mm512_cvtph_ps(_mm256_loadu_si256(d.as_ptr().cast()));
            let words = transposed(words);
            for run in 0..8 {
                let (index, field) = (words[2 * run], words[2 * run + 1]);
                let s = _mm512_cvtepi32_ps(_mm512_srli_epi32::<28>(field));
                let scale = _mm512_mul_ps(d, _mm512_add_ps(s, _mm512_set1_ps(0.5)));
                let scale = _mm512_mul_ps(scale, _mm512_set1_ps(0.25));
                _mm512_store_ps(panel.scales[8 * block + run].as_mut_ptr(), scale);

                let upper = _mm512_movepi8_mask(index);
                let look = |table: &[__m512i; 4]| {
                    let first = _mm512_permutex2var_epi8(table[0], index, table[1]);
                    let second = _mm512_permutex2var_epi8(table[2], index, table[3]);
                    _mm512_mask_mov_epi8(first, upper, second)
                };
                let (low, high) = (look(&low), look(&high));
                let sign = _mm512_multishift_epi64_epi8(fields, field);
                let sign = _mm512_permutex2var_epi8(signs[0], sign, signs[1]);
                // Each half of the columns: bytes of the codebook rows a, b: (a low, b low, a high, b high).
                let upper_words = 0xaaaa_aaaa;
                let sign_high = _mm512_srli_epi16::<4>(sign);
                let halves = [
                    (
                        _mm512_mask_mov_epi16(low, upper_words, _mm512_slli_epi32::<16>(high)),
                        _mm512_mask_mov_epi16(sign, upper_words, _mm512_slli_epi32::<16>(sign_high)),
                    ),
                    (
                        _mm512_mask_mov_epi16(_mm512_srli_epi32::<16>(low), upper_words, high),
                        _mm512_mask_mov_epi16(_mm512_srli_epi32::<16>(sign), upper_words, sign_high),
                    ),
                ];
                let to = panel.q.as_mut_ptr().add((8 * block + run) * 8);
                for (half, (code, sign)) in halves.into_iter().enumerate() {
                    let sign_2 = _mm512_slli_epi16::<2>(sign);
                    let code_4 = _mm512_srli_epi16::<4>(code);
                    // Code bits where the mask is set, sign bits elsewhere.
                    let merge = |code, sign, mask: i8| {
                        _mm512_ternarylogic_epi32::<0xd8>(sign, code, _mm512_set1_epi8(mask))
                    };
                    let indices = [
                        merge(code, sign_2, 0x03),
                        merge(code, sign, 0x0c),
                        merge(code, sign, 0x30),
                        merge(code_4, sign_2, 0x0c),
                    ];
                    for s in 0..4 {
                        let value = _mm512_permutexvar_epi8(indices[s], load(&VALUES[s].0, 0));
                        _mm512_store_si512(to.add(4 * half + s).cast(), value);
                    }
                }
            }
        }
    }
}
