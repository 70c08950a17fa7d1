//! Blocks of weights to integers and scales.
//!
//! weight = scale · integer + offset, with one scale (and offset) per run of 16 or 32 columns. The layouts of
//! the blocks are described in `quant::decode`. Integers are stored shifted by 128.

use quant::Type;
use quant::codebook as book;
use quant::decode::{f16_to_f32, q3_k_scales, six_bit_scales};

use super::int8::{Form, SHIFT};

/// Whether integers of a type exist: all types but those of plain numbers.
pub(crate) fn is_integer(ty: Type) -> bool {
    ty.block_len() > 1
}

/// The runs of a type.
pub(crate) fn form(ty: Type) -> Form {
    let halves = matches!(ty, Type::Q3_K | Type::Q6_K | Type::IQ2_XS | Type::IQ2_S | Type::IQ1_M);
    let offsets = match ty {
        Type::Q4_K | Type::Q5_K | Type::Q4_1 | Type::Q5_1 => 1,
        Type::Q2_K => 2,
        _ => 0,
    };
    debug_assert!(!halves || offsets == 0, "kernels take halves without offsets");
    let (lowest, span) = range(ty);
    Form { halves, offsets, lowest, span }
}

/// The smallest integer of a type, and how far above it the largest lies at most.
fn range(ty: Type) -> (i8, u8) {
    match ty {
        // Two bits times scales of four.
        Type::Q2_K => (0, 45),
        Type::Q3_K => (-4, 7),
        Type::Q4_1 | Type::Q4_K => (0, 15),
        Type::Q4_0 => (-8, 15),
        Type::Q5_1 | Type::Q5_K => (0, 31),
        Type::Q5_0 => (-16, 31),
        Type::Q6_K => (-32, 63),
        Type::IQ1_S | Type::IQ1_M => (-9, 18),
        Type::MXFP4 => (-12, 24),
        Type::IQ3_S => (-15, 30),
        Type::IQ2_XXS | Type::IQ2_XS | Type::IQ2_S => (-43, 86),
        Type::IQ3_XXS => (-62, 124),
        Type::IQ4_NL | Type::IQ4_XS => (-127, 254),
        Type::Q8_0 | Type::F32 | Type::F16 | Type::BF16 => (-128, 255),
    }
}

/// Decodes whole blocks.
///
/// # Panics
/// If the lengths do not fit, or the type has no integers.
#[inline(always)]
pub(super) fn unpack(ty: Type, bytes: &[u8], q: &mut [u8], scales: &mut [f32], offsets: &mut [f32]) {
    match ty {
        Type::Q8_0 => each::<34, 32, 1, 1>(bytes, q, scales, offsets, q8_0),
        Type::Q4_0 => each::<18, 32, 1, 1>(bytes, q, scales, offsets, |b, q, s, _| {
            s[0] = half_at(b, 0);
            nibbles(&b[2..], q, |n| i32::from(n) - 8);
        }),
        Type::Q4_1 => each::<20, 32, 1, 1>(bytes, q, scales, offsets, |b, q, s, o| {
            (s[0], o[0]) = (half_at(b, 0), half_at(b, 2));
            nibbles(&b[4..], q, i32::from);
        }),
        Type::Q5_0 => each::<22, 32, 1, 1>(bytes, q, scales, offsets, |b, q, s, _| {
            s[0] = half_at(b, 0);
            five_bits(word_at(b, 2), &b[6..], q, 16);
        }),
        Type::Q5_1 => each::<24, 32, 1, 1>(bytes, q, scales, offsets, |b, q, s, o| {
            (s[0], o[0]) = (half_at(b, 0), half_at(b, 2));
            five_bits(word_at(b, 4), &b[8..], q, 0);
        }),
        Type::MXFP4 => each::<17, 32, 1, 1>(bytes, q, scales, offsets, |b, q, s, _| {
            s[0] = half_power_of_two(b[0]);
            nibbles(&b[1..], q, |n| i32::from(book::MXFP4_VALUES[usize::from(n)]));
        }),
        Type::IQ4_NL => each::<18, 32, 1, 1>(bytes, q, scales, offsets, |b, q, s, _| {
            s[0] = half_at(b, 0);
            nibbles(&b[2..], q, |n| i32::from(book::IQ4_NL_VALUES[usize::from(n)]));
        }),
        Type::Q2_K => each::<84, 256, 8, 16>(bytes, q, scales, offsets, q2_k),
        Type::Q3_K => each::<110, 256, 16, 16>(bytes, q, scales, offsets, q3_k),
        Type::Q4_K => each::<144, 256, 8, 8>(bytes, q, scales, offsets, q4_k),
        Type::Q5_K => each::<176, 256, 8, 8>(bytes, q, scales, offsets, q5_k),
        Type::Q6_K => each::<210, 256, 16, 16>(bytes, q, scales, offsets, q6_k),
        Type::IQ1_S => each::<50, 256, 8, 8>(bytes, q, scales, offsets, iq1_s),
        Type::IQ1_M => each::<56, 256, 16, 16>(bytes, q, scales, offsets, iq1_m),
        Type::IQ2_XXS => each::<66, 256, 8, 8>(bytes, q, scales, offsets, iq2_xxs),
        Type::IQ2_XS => each::<74, 256, 16, 16>(bytes, q, scales, offsets, iq2_xs),
        Type::IQ2_S => each::<82, 256, 16, 16>(bytes, q, scales, offsets, iq2_s),
        Type::IQ3_XXS => each::<98, 256, 8, 8>(bytes, q, scales, offsets, iq3_xxs),
        Type::IQ3_S => each::<110, 256, 8, 8>(bytes, q, scales, offsets, iq3_s),
        Type::IQ4_XS => each::<136, 256, 8, 8>(bytes, q, scales, offsets, iq4_xs),
        Type::F32 | Type::F16 | Type::BF16 => unreachable!("plain numbers are multiplied as they are"),
    }
}

/// Calls `block` on every block with its integers, scales and offsets.
#[inline(always)]
pub(super) fn each<const BYTES: usize, const LEN: usize, const RUNS: usize, const OFFSETS: usize>(
    bytes: &[u8],
    q: &mut [u8],
    scales: &mut [f32],
    offsets: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [u8; LEN], &mut [f32; RUNS], &mut [f32; OFFSETS]),
) {
    assert_eq!(bytes.len() / BYTES * LEN, q.len());
    let runs = scales.as_chunks_mut().0.iter_mut().zip(offsets.as_chunks_mut().0);
    for ((bytes, q), (scales, offsets)) in bytes.as_chunks().0.iter().zip(q.as_chunks_mut().0).zip(runs) {
        block(bytes, q, scales, offsets);
    }
}

#[inline(always)]
fn shifted(value: i32) -> u8 {
    (value + SHIFT) as u8
}

#[inline(always)]
fn q8_0(block: &[u8; 34], q: &mut [u8; 32], scales: &mut [f32; 1], _: &mut [f32; 1]) {
    scales[0] = half_at(block, 0);
    let bytes: &[u8; 32] = block[2..].first_chunk().expect("in the block");
    *q = std::array::from_fn(|i| bytes[i] ^ 0x80);
}

#[inline(always)]
fn q2_k(block: &[u8; 84], q: &mut [u8; 256], scales: &mut [f32; 8], offsets: &mut [f32; 16]) {
    let (d, m) = (half_at(block, 80), half_at(block, 82));
    *scales = [d; 8];
    for (half, offset) in offsets.iter_mut().enumerate() {
        *offset = -(m * f32::from(block[half] >> 4));
    }
    for (i, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let bytes: &[u8; 32] = block[16 + i / 4 * 32..].first_chunk().expect("in the block");
        let mut factors = [block[2 * i] & 15; 32];
        factors[16..].fill(block[2 * i + 1] & 15);
        // A loop instead of `from_fn`, whose closure may be compiled without the features of the variant.
        for (j, q) in q.iter_mut().enumerate() {
            *q = (bytes[j] >> (i % 4 * 2) & 3).wrapping_mul(factors[j]) | 0x80;
        }
    }
}

#[inline(always)]
fn q3_k(block: &[u8; 110], q: &mut [u8; 256], scales: &mut [f32; 16], _: &mut [f32; 16]) {
    let d = half_at(block, 108);
    scales.iter_mut().zip(q3_k_scales(block)).for_each(|(scale, s)| *scale = d * f32::from(s));
    let third: &[u8; 32] = block.first_chunk().expect("in the block");
    for (i, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let bytes: &[u8; 32] = block[32 + i / 4 * 32..].first_chunk().expect("in the block");
        for (j, q) in q.iter_mut().enumerate() {
            let value = (bytes[j] >> (i % 4 * 2) & 3) | (third[j] >> i & 1) << 2;
            *q = value + 124;
        }
    }
}

#[inline(always)]
fn q4_k(block: &[u8; 144], q: &mut [u8; 256], scales: &mut [f32; 8], offsets: &mut [f32; 8]) {
    scales_and_mins(block, scales, offsets);
    for (i, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let bytes: &[u8; 32] = block[16 + i / 2 * 32..].first_chunk().expect("in the block");
        *q = std::array::from_fn(|j| (bytes[j] >> (i % 2 * 4) & 15) | 0x80);
    }
}

#[inline(always)]
fn q5_k(block: &[u8; 176], q: &mut [u8; 256], scales: &mut [f32; 8], offsets: &mut [f32; 8]) {
    scales_and_mins(block, scales, offsets);
    let fifth: &[u8; 32] = block[16..].first_chunk().expect("in the block");
    for (i, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let bytes: &[u8; 32] = block[48 + i / 2 * 32..].first_chunk().expect("in the block");
        for (j, q) in q.iter_mut().enumerate() {
            *q = (bytes[j] >> (i % 2 * 4) & 15) | (fifth[j] >> i & 1) << 4 | 0x80;
        }
    }
}

#[inline(always)]
fn scales_and_mins(block: &[u8], scales: &mut [f32; 8], offsets: &mut [f32; 8]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let (s, mins) = six_bit_scales(block, 4);
    for run in 0..8 {
        scales[run] = d * f32::from(s[run]);
        offsets[run] = -(m * f32::from(mins[run]));
    }
}

#[inline(always)]
fn q6_k(block: &[u8; 210], q: &mut [u8; 256], scales: &mut [f32; 16], _: &mut [f32; 16]) {
    let d = half_at(block, 208);
    for (run, scale) in scales.iter_mut().enumerate() {
        *scale = d * f32::from(block[192 + run] as i8);
    }
    for (i, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low: &[u8; 32] = block[i / 4 * 64 + i % 2 * 32..].first_chunk().expect("in the block");
        let high: &[u8; 32] = block[128 + i / 4 * 32..].first_chunk().expect("in the block");
        for (j, q) in q.iter_mut().enumerate() {
            let value = (low[j] >> (i % 4 / 2 * 4) & 15) | (high[j] >> (i % 4 * 2) & 3) << 4;
            *q = value + 96;
        }
    }
}

/// Ternary entries and eighths, as whole eighths.
#[inline(always)]
fn eighths(row: &[i8; 8], negative: bool, q: &mut [u8; 8]) {
    let delta = if negative { -1 } else { 1 };
    q.iter_mut().zip(row).for_each(|(q, &entry)| *q = shifted(8 * i32::from(entry) + delta));
}

#[inline(always)]
fn iq1_s(block: &[u8; 50], q: &mut [u8; 256], scales: &mut [f32; 8], _: &mut [f32; 8]) {
    let d = half_at(block, 0);
    for (run, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let field = u16_at(block, 34 + 2 * run);
        scales[run] = d * f32::from(2 * (field >> 12 & 7) + 1) * 0.125;
        for (group, q) in q.as_chunks_mut().0.iter_mut().enumerate() {
            let high = usize::from(field >> (3 * group) & 7);
            let row = usize::from(block[2 + 4 * run + group]) | high << 8;
            eighths(&book::IQ1_GRID[row], field & 0x8000 != 0, q);
        }
    }
}

#[inline(always)]
fn iq1_m(block: &[u8; 56], q: &mut [u8; 256], scales: &mut [f32; 16], _: &mut [f32; 16]) {
    let fields: [u16; 4] = std::array::from_fn(|i| u16_at(block, 48 + 2 * i));
    let d = f16_to_f32(fields[0] >> 12 | fields[1] >> 12 << 4 | fields[2] >> 12 << 8 | fields[3] >> 12 << 12);
    for (run, scale) in scales.iter_mut().enumerate() {
        *scale = d * f32::from(2 * (fields[run / 4] >> (3 * (run % 4)) & 7) + 1) * 0.125;
    }
    for (group, q) in q.as_chunks_mut().0.iter_mut().enumerate() {
        let high = nibble(&block[32..48], group);
        let row = usize::from(block[group]) | usize::from(high & 7) << 8;
        eighths(&book::IQ1_GRID[row], high & 8 != 0, q);
    }
}

/// Bytes that are all ones where a bit of the index is set.
static SPREAD: [u64; 256] = {
    let mut table = [0; 256];
    let mut bits = 0;
    while bits < 256 {
        let mut j = 0;
        while j < 8 {
            if bits >> j & 1 == 1 {
                table[bits] |= 0xff << (8 * j);
            }
            j += 1;
        }
        bits += 1;
    }
    table
};

/// Eight magnitudes with signs. None is zero, so that negating a byte carries into no other.
#[inline(always)]
fn signed(row: [u8; 8], signs: u8, q: &mut [u8; 8]) {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let mask = SPREAD[usize::from(signs)];
    let value = (u64::from_le_bytes(row) ^ mask) + (mask & ONES);
    *q = (value ^ (0x80 * ONES)).to_le_bytes();
}

#[inline(always)]
fn iq2_xxs(block: &[u8; 66], q: &mut [u8; 256], scales: &mut [f32; 8], _: &mut [f32; 8]) {
    let d = half_at(block, 0);
    for (run, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let at = 2 + 8 * run;
        let field = word_at(block, at + 4);
        scales[run] = d * (0.5 + (field >> 28) as f32) * 0.25;
        for (group, q) in q.as_chunks_mut().0.iter_mut().enumerate() {
            let signs = book::EVEN_SIGNS[(field >> (7 * group) & 127) as usize];
            signed(unsigned(&book::IQ2_XXS_GRID[usize::from(block[at + group])]), signs, q);
        }
    }
}

#[inline(always)]
fn iq2_xs(block: &[u8; 74], q: &mut [u8; 256], scales: &mut [f32; 16], _: &mut [f32; 16]) {
    quarter_scales(half_at(block, 0), &block[66..74], scales);
    for (group, q) in q.as_chunks_mut().0.iter_mut().enumerate() {
        let field = u16_at(block, 2 + 2 * group);
        let row = &book::IQ2_XS_GRID[usize::from(field & 511)];
        signed(unsigned(row), book::EVEN_SIGNS[usize::from(field >> 9)], q);
    }
}

#[inline(always)]
fn iq2_s(block: &[u8; 82], q: &mut [u8; 256], scales: &mut [f32; 16], _: &mut [f32; 16]) {
    quarter_scales(half_at(block, 0), &block[74..82], scales);
    for (group, q) in q.as_chunks_mut().0.iter_mut().enumerate() {
        let high = block[66 + group / 4] >> (group % 4 * 2) & 3;
        let row = &book::IQ2_S_GRID[usize::from(block[2 + group]) | usize::from(high) << 8];
        signed(unsigned(row), block[34 + group], q);
    }
}

#[inline(always)]
pub(super) fn quarter_scales(d: f32, field: &[u8], scales: &mut [f32; 16]) {
    for (run, scale) in scales.iter_mut().enumerate() {
        *scale = d * (0.5 + f32::from(nibble(field, run))) * 0.25;
    }
}

#[inline(always)]
fn iq3_xxs(block: &[u8; 98], q: &mut [u8; 256], scales: &mut [f32; 8], _: &mut [f32; 8]) {
    let d = half_at(block, 0);
    for (run, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let field = word_at(block, 66 + 4 * run);
        scales[run] = d * (0.5 + (field >> 28) as f32) * 0.5;
        for (group, q) in q.as_chunks_mut().0.iter_mut().enumerate() {
            let signs = book::EVEN_SIGNS[(field >> (7 * group) & 127) as usize];
            let row = |i: usize| book::IQ3_XXS_GRID[usize::from(block[2 + 8 * run + 2 * group + i])];
            signed(pair(row(0), row(1)), signs, q);
        }
    }
}

#[inline(always)]
fn iq3_s(block: &[u8; 110], q: &mut [u8; 256], scales: &mut [f32; 8], _: &mut [f32; 8]) {
    let d = half_at(block, 0);
    for (run, scale) in scales.iter_mut().enumerate() {
        *scale = d * f32::from(1 + 2 * nibble(&block[106..110], run));
    }
    for (group, q) in q.as_chunks_mut().0.iter_mut().enumerate() {
        let ninth = usize::from(block[66 + group / 4]) >> (group % 4 * 2);
        let row = |i: usize| book::IQ3_S_GRID[usize::from(block[2 + 2 * group + i]) | (ninth >> i & 1) << 8];
        signed(pair(row(0), row(1)), block[74 + group], q);
    }
}

#[inline(always)]
fn iq4_xs(block: &[u8; 136], q: &mut [u8; 256], scales: &mut [f32; 8], _: &mut [f32; 8]) {
    let (d, high) = (half_at(block, 0), u16_at(block, 2));
    for (run, q) in q.as_chunks_mut().0.iter_mut().enumerate() {
        let scale = nibble(&block[4..8], run) | ((high >> (2 * run) & 3) as u8) << 4;
        scales[run] = d * (i32::from(scale) - 32) as f32;
        let bytes = &block[8 + 16 * run..24 + 16 * run];
        nibbles(bytes, q, |n| i32::from(book::IQ4_NL_VALUES[usize::from(n)]));
    }
}

/// Sixteen bytes whose low halves stand for the first sixteen values, the high ones for the others.
#[inline(always)]
fn nibbles(bytes: &[u8], q: &mut [u8; 32], value: impl Fn(u8) -> i32) {
    let (low, high) = q.split_at_mut(16);
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (shifted(value(byte & 15)), shifted(value(byte >> 4)));
    }
}

#[inline(always)]
fn five_bits(fifth: u32, bytes: &[u8], q: &mut [u8; 32], less: i32) {
    nibbles(bytes, q, i32::from);
    for (i, q) in q.iter_mut().enumerate() {
        *q = (i32::from(*q) + ((fifth >> i & 1) << 4) as i32 - less) as u8;
    }
}

#[inline(always)]
fn unsigned(row: &[i8; 8]) -> [u8; 8] {
    row.map(|entry| entry as u8)
}

#[inline(always)]
fn pair(a: [u8; 4], b: [u8; 4]) -> [u8; 8] {
    [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
}

#[inline(always)]
pub(super) fn nibble(field: &[u8], i: usize) -> u8 {
    field[i / 2] >> (i % 2 * 4) & 15
}

#[inline(always)]
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16_at(block, at))
}

#[inline(always)]
pub(super) fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

#[inline(always)]
pub(super) fn word_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// 2^(e - 128); the lowest two are subnormal.
#[inline(always)]
fn half_power_of_two(e: u8) -> f32 {
    match e {
        0 | 1 => f32::from_bits(1 << (21 + e)),
        _ => f32::from_bits(u32::from(e - 1) << 23),
    }
}
