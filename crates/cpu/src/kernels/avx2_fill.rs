//! Decoding blocks to panels of integers, for AVX2.
//!
//! The same results as the functions of [`super::int8`], bit for bit: rows are decoded in natural order, the
//! types with tables of magnitudes 32 columns at a time, and then transposed.

use std::arch::x86_64::*;

use quant::Type;
use quant::codebook as book;

use super::int8::{self, COLUMNS, ORDER, PANEL, Panel};
use super::unpack::{self, each, half_at, nibble, quarter_scales, u16_at, word_at};

/// As [`int8::fill`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fill(ty: Type, rows: &[&[u8]], columns: usize, panel: &mut Panel) {
    let unpack = |bytes: &[u8], q: &mut [u8], scales: &mut [f32], offsets: &mut [f32]| match ty {
        Type::IQ2_XXS => each::<66, 256, 8, 8>(bytes, q, scales, offsets, |b, q, s, _| iq2_xxs(b, q, s)),
        Type::IQ2_XS => each::<74, 256, 16, 16>(bytes, q, scales, offsets, |b, q, s, _| iq2_xs(b, q, s)),
        Type::IQ2_S => each::<82, 256, 16, 16>(bytes, q, scales, offsets, |b, q, s, _| iq2_s(b, q, s)),
        Type::IQ3_XXS => each::<98, 256, 8, 8>(bytes, q, scales, offsets, |b, q, s, _| iq3_xxs(b, q, s)),
        Type::IQ3_S => each::<110, 256, 8, 8>(bytes, q, scales, offsets, |b, q, s, _| iq3_s(b, q, s)),
        _ => unpack::unpack(ty, bytes, q, scales, offsets),
    };
    let transpose = |natural: &[[u8; COLUMNS]; PANEL], columns, panel: &mut Panel| {
        transpose(natural, columns, panel);
    };
    int8::fill_with(unpack::form(ty), rows, columns, panel, (unpack, transpose));
}

#[inline]
#[target_feature(enable = "avx2")]
fn iq2_xxs(block: &[u8; 66], q: &mut [u8; 256], scales: &mut [f32; 8]) {
    let d = half_at(block, 0);
    // SAFETY: two vectors of the 64 bytes behind the scale.
    let [a, b] = unsafe { [2, 34].map(|at| _mm256_loadu_ps(block.as_ptr().add(at).cast())) };
    // The second word of every two, in order.
    let fields = _mm256_castps_si256(_mm256_shuffle_ps::<0xdd>(a, b));
    let fields = _mm256_permute4x64_epi64::<0xd8>(fields);
    for (run, scale) in scales.iter_mut().enumerate() {
        *scale = d * (0.5 + (word_at(block, 6 + 8 * run) >> 28) as f32) * 0.25;
    }
    let row = |group: usize| {
        let index = block[2 + group / 4 * 8 + group % 4];
        eight(&book::IQ2_XXS_GRID[usize::from(index)])
    };
    signed(even(sevens(fields)), row, q);
}

#[inline]
#[target_feature(enable = "avx2")]
fn iq2_xs(block: &[u8; 74], q: &mut [u8; 256], scales: &mut [f32; 16]) {
    quarter_scales(half_at(block, 0), &block[66..74], scales);
    // SAFETY: two vectors of the 64 bytes behind the scale.
    let [a, b] = unsafe { [2, 34].map(|at| _mm256_loadu_si256(block.as_ptr().add(at).cast())) };
    let signs = _mm256_packus_epi16(_mm256_srli_epi16::<9>(a), _mm256_srli_epi16::<9>(b));
    let row = |group: usize| {
        let index = u16_at(block, 2 + 2 * group) & 511;
        eight(&book::IQ2_XS_GRID[usize::from(index)])
    };
    signed(even(_mm256_permute4x64_epi64::<0xd8>(signs)), row, q);
}

#[inline]
#[target_feature(enable = "avx2")]
fn iq2_s(block: &[u8; 82], q: &mut [u8; 256], scales: &mut [f32; 16]) {
    quarter_scales(half_at(block, 0), &block[74..82], scales);
    // SAFETY: 32 bytes of the block.
    let signs = unsafe { _mm256_loadu_si256(block.as_ptr().add(34).cast()) };
    let row = |group: usize| {
        let high = block[66 + group / 4] >> (group % 4 * 2) & 3;
        let index = usize::from(block[2 + group]) | usize::from(high) << 8;
        eight(&book::IQ2_S_GRID[index])
    };
    signed(signs, row, q);
}

#[inline]
#[target_feature(enable = "avx2")]
fn iq3_xxs(block: &[u8; 98], q: &mut [u8; 256], scales: &mut [f32; 8]) {
    let d = half_at(block, 0);
    for (run, scale) in scales.iter_mut().enumerate() {
        *scale = d * (0.5 + (word_at(block, 66 + 4 * run) >> 28) as f32) * 0.5;
    }
    // SAFETY: 32 bytes of the block.
    let fields = unsafe { _mm256_loadu_si256(block.as_ptr().add(66).cast()) };
    let half = |at: usize| u64::from(u32::from_le_bytes(book::IQ3_XXS_GRID[usize::from(block[at])]));
    let row = |group: usize| half(2 + 2 * group) | half(3 + 2 * group) << 32;
    signed(even(sevens(fields)), row, q);
}

#[inline]
#[target_feature(enable = "avx2")]
fn iq3_s(block: &[u8; 110], q: &mut [u8; 256], scales: &mut [f32; 8]) {
    let d = half_at(block, 0);
    for (run, scale) in scales.iter_mut().enumerate() {
        *scale = d * f32::from(1 + 2 * nibble(&block[106..110], run));
    }
    // SAFETY: 32 bytes of the block.
    let signs = unsafe { _mm256_loadu_si256(block.as_ptr().add(74).cast()) };
    let row = |group: usize| {
        let ninth = usize::from(block[66 + group / 4]) >> (group % 4 * 2);
        let half = |i: usize| {
            let index = usize::from(block[2 + 2 * group + i]) | (ninth >> i & 1) << 8;
            u64::from(u32::from_le_bytes(book::IQ3_S_GRID[index]))
        };
        half(0) | half(1) << 32
    };
    signed(signs, row, q);
}

/// A row of a codebook.
#[inline(always)]
fn eight(row: &[i8; 8]) -> u64 {
    // SAFETY: eight bytes.
    unsafe { row.as_ptr().cast::<u64>().read_unaligned() }
}

/// The four fields of seven bits in every word, as bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn sevens(fields: __m256i) -> __m256i {
    let field =
        |shifted: __m256i, byte: i32| _mm256_and_si256(shifted, _mm256_set1_epi32(0x7f << (8 * byte)));
    let low = _mm256_or_si256(field(fields, 0), field(_mm256_slli_epi32::<1>(fields), 1));
    let high = (_mm256_slli_epi32::<2>(fields), _mm256_slli_epi32::<3>(fields));
    _mm256_or_si256(low, _mm256_or_si256(field(high.0, 2), field(high.1, 3)))
}

/// Seven signs of every byte with the eighth, which makes the number of set bits even.
#[inline]
#[target_feature(enable = "avx2")]
fn even(sevens: __m256i) -> __m256i {
    // 0x80 for the numbers below 16 with an odd number of set bits.
    let odd = _mm256_broadcastsi128_si256(_mm_set_epi64x(
        0x0080_8000_8000_0080_u64 as i64,
        0x8000_0080_0080_8000_u64 as i64,
    ));
    let low = _mm256_shuffle_epi8(odd, _mm256_and_si256(sevens, _mm256_set1_epi8(15)));
    let high = _mm256_srli_epi16::<4>(_mm256_and_si256(sevens, _mm256_set1_epi8(0x70)));
    let parity = _mm256_xor_si256(low, _mm256_shuffle_epi8(odd, high));
    _mm256_or_si256(sevens, parity)
}

/// Rows of eight magnitudes with signs, shifted: bit j of byte g of `signs` is that of weight 8g + j.
#[inline]
#[target_feature(enable = "avx2")]
fn signed(signs: __m256i, row: impl Fn(usize) -> u64, q: &mut [u8; 256]) {
    let mut words = [0i32; 8];
    // SAFETY: a vector of the array, however aligned.
    unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), signs) };
    let bytes = _mm256_set_epi64x(0x0303_0303_0303_0303, 0x0202_0202_0202_0202, 0x0101_0101_0101_0101, 0);
    let bits = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    for (run, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = _mm_set_epi64x(row(4 * run + 1) as i64, row(4 * run) as i64);
        let high = _mm_set_epi64x(row(4 * run + 3) as i64, row(4 * run + 2) as i64);
        let magnitudes = _mm256_set_m128i(high, low);
        let signs = _mm256_shuffle_epi8(_mm256_set1_epi32(words[run]), bytes);
        let negative = _mm256_cmpeq_epi8(_mm256_and_si256(signs, bits), bits);
        let weights = _mm256_sub_epi8(_mm256_xor_si256(magnitudes, negative), negative);
        let shifted = _mm256_xor_si256(weights, _mm256_set1_epi8(int8::SHIFT as i8));
        // SAFETY: 32 bytes, however aligned.
        unsafe { _mm256_storeu_si256(q.as_mut_ptr().cast(), shifted) };
    }
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
