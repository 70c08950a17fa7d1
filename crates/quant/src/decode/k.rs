//! The K types: blocks of 256 weights in runs of 16 or 32, each run with a scale of its own.
//!
//! | type | bytes | offset: field                                                                       |
//! |------|-------|-------------------------------------------------------------------------------------|
//! | Q2_K | 84    | 0: run scales 16 × (4 bits scale, 4 bits min), 16: `q` 64 bytes, 80: `d` f16, 82: `m` f16 |
//! | Q3_K | 110   | 0: third bits 32 bytes, 32: low bits 64 bytes, 96: run scales 12 bytes, 108: `d` f16 |
//! | Q4_K | 144   | 0: `d` f16, 2: `m` f16, 4: run scales and mins 12 bytes, 16: `q` 128 bytes           |
//! | Q5_K | 176   | 0: `d` f16, 2: `m` f16, 4: run scales and mins 12 bytes, 16: fifth bits 32 bytes, 48: low bits 128 bytes |
//! | Q6_K | 210   | 0: low bits 128 bytes, 128: high bits 64 bytes, 192: run scales 16 × i8, 208: `d` f16 |
//!
//! Weights: `(d * scale) * q - (m * min)` for Q2_K, Q4_K and Q5_K, `(d * scale) * q` with a signed `q` for Q3_K
//! and Q6_K. Runs are 16 weights in Q2_K, Q3_K and Q6_K, 32 in Q4_K and Q5_K.
//!
//! Fields of bits are laid out so that neighbouring weights lie in neighbouring bytes at the same bit
//! position: a two-bit field serves 128 weights with 32 bytes (weights 0..32 in the lowest bits, 32..64 in
//! the next, …), a four-bit field 64 weights with 32 bytes, a one-bit field all 256 with 32 bytes. The low
//! bits of Q6_K are the exception: 64 bytes serve 128 weights, 0..64 in the low halves, 64..128 in the high.

use super::half_at;

/// Decodes a block of Q2_K: 2 bits with a minimum.
pub fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (d, m) = (half_at(block, 80), half_at(block, 82));
    for (run, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(block[run] & 15);
        let min = m * f32::from(block[run] >> 4);
        let (at, shift) = (16 + two_bit_byte(run), two_bit_shift(run));
        for (out, &byte) in out.iter_mut().zip(&block[at..at + 16]) {
            *out = scale * f32::from(byte >> shift & 3) - min;
        }
    }
}

/// Decodes a block of Q3_K: 3 bits, symmetric. A third bit that is *clear* stands for -4.
pub fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let d = half_at(block, 108);
    let scales = q3_k_scales(block);
    for (run, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[run]);
        let (low, shift) = (32 + two_bit_byte(run), two_bit_shift(run));
        let third = run % 2 * 16;
        let third_shift = run / 2;
        for (i, out) in out.iter_mut().enumerate() {
            let q = (block[low + i] >> shift & 3) | (block[third + i] >> third_shift & 1) << 2;
            *out = scale * (i32::from(q) - 4) as f32;
        }
    }
}

/// Decodes a block of Q4_K: 4 bits with a minimum.
pub fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let (scales, mins) = six_bit_scales(block, 4);
    for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[run]);
        let min = m * f32::from(mins[run]);
        let (at, shift) = (16 + run / 2 * 32, run % 2 * 4);
        for (out, &byte) in out.iter_mut().zip(&block[at..at + 32]) {
            *out = scale * f32::from(byte >> shift & 15) - min;
        }
    }
}

/// Decodes a block of Q5_K: 5 bits with a minimum.
pub fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let (scales, mins) = six_bit_scales(block, 4);
    for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[run]);
        let min = m * f32::from(mins[run]);
        let (at, shift) = (48 + run / 2 * 32, run % 2 * 4);
        for (i, out) in out.iter_mut().enumerate() {
            let q = (block[at + i] >> shift & 15) | (block[16 + i] >> run & 1) << 4;
            *out = scale * f32::from(q) - min;
        }
    }
}

/// Decodes a block of Q6_K: 6 bits, symmetric.
pub fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half_at(block, 208);
    for (run, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(block[192 + run] as i8);
        let (low, low_shift) = (run / 8 * 64 + run % 4 * 16, run % 8 / 4 * 4);
        let (high, high_shift) = (128 + two_bit_byte(run), two_bit_shift(run));
        for (i, out) in out.iter_mut().enumerate() {
            let q = (block[low + i] >> low_shift & 15) | (block[high + i] >> high_shift & 3) << 4;
            *out = scale * (i32::from(q) - 32) as f32;
        }
    }
}

/// Where in its field of two-bit numbers a run of 16 weights begins.
#[inline]
fn two_bit_byte(run: usize) -> usize {
    run / 8 * 32 + run % 2 * 16
}

/// The bit at which the two-bit numbers of a run of 16 weights lie in their bytes.
#[inline]
fn two_bit_shift(run: usize) -> usize {
    run % 8 / 2 * 2
}

/// The sixteen 6-bit run scales of Q3_K, less 32. Of the twelve bytes at 96, the first eight hold the low
/// halves of the scales 0..8 and 8..16, the last four the high pairs of bits, of 0..4 in the lowest.
#[inline]
pub fn q3_k_scales(block: &[u8; 110]) -> [i8; 16] {
    let mut scales = [0; 16];
    for (run, scale) in scales.iter_mut().enumerate() {
        let low = block[96 + run % 8] >> (run / 8 * 4) & 15;
        let high = block[104 + run % 4] >> (run / 4 * 2) & 3;
        *scale = (low | high << 4) as i8 - 32;
    }
    scales
}

/// The eight 6-bit scales and the eight 6-bit mins that Q4_K and Q5_K pack into the twelve bytes at `at`.
///
/// Runs 0..4: the low six bits of the bytes 0..4 (scales) and 4..8 (mins). Runs 4..8: low nibble (scales) and
/// high nibble (mins) of the bytes 8..12, with the two bits left over above the first ones on top.
#[inline]
pub fn six_bit_scales(block: &[u8], at: usize) -> ([u8; 8], [u8; 8]) {
    let packed = &block[at..at + 12];
    let (mut scales, mut mins) = ([0; 8], [0; 8]);
    for run in 0..4 {
        scales[run] = packed[run] & 63;
        mins[run] = packed[run + 4] & 63;
        scales[run + 4] = packed[run + 8] & 15 | packed[run] >> 6 << 4;
        mins[run + 4] = packed[run + 8] >> 4 | packed[run + 4] >> 6 << 4;
    }
    (scales, mins)
}
