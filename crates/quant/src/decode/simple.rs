//! Plain numbers, and blocks of 32 weights with one scale.
//!
//! | type  | bytes | offset: field                                                    | weight            |
//! |-------|-------|------------------------------------------------------------------|-------------------|
//! | Q8_0  | 34    | 0: `d` f16, 2: `q` 32 × i8                                       | `d * q`           |
//! | Q4_0  | 18    | 0: `d` f16, 2: nibbles 16 bytes                                  | `d * (q - 8)`     |
//! | Q4_1  | 20    | 0: `d` f16, 2: `m` f16, 4: nibbles 16 bytes                      | `d * q + m`       |
//! | Q5_0  | 22    | 0: `d` f16, 2: fifth bits u32, 6: nibbles 16 bytes               | `d * (q - 16)`    |
//! | Q5_1  | 24    | 0: `d` f16, 2: `m` f16, 4: fifth bits u32, 8: nibbles 16 bytes   | `d * q + m`       |
//! | MXFP4 | 17    | 0: `e` u8, 1: nibbles 16 bytes                                   | `2^(e-128) * v[q]`|
//!
//! Byte `i` of the nibbles holds weight `i` in its low half and weight `i + 16` in its high half; bit `i` of
//! the fifth bits belongs to weight `i`. `v` is [`MXFP4_VALUES`], twice the value, hence the halved scale.

use super::{f16_to_f32, half_at, word_at};
use crate::codebook::MXFP4_VALUES;

/// `f32`, stored as they are.
pub(super) fn f32s(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = f32::from_le_bytes(*bytes);
    }
}

/// IEEE binary16.
pub(super) fn f16s(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = f16_to_f32(u16::from_le_bytes(*bytes));
    }
}

/// The upper half of an `f32`.
pub(super) fn bf16s(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    }
}

/// Decodes a block of Q8_0: 8 bits, symmetric.
pub fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = d * f32::from(q as i8);
    }
}

/// Decodes a block of Q4_0: 4 bits, symmetric.
pub fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (i, &byte) in block[2..].iter().enumerate() {
        out[i] = d * (i32::from(byte & 15) - 8) as f32;
        out[i + 16] = d * (i32::from(byte >> 4) - 8) as f32;
    }
}

/// Decodes a block of Q4_1: 4 bits with a minimum.
pub fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (i, &byte) in block[4..].iter().enumerate() {
        out[i] = d * f32::from(byte & 15) + m;
        out[i + 16] = d * f32::from(byte >> 4) + m;
    }
}

/// Decodes a block of Q5_0: 5 bits, symmetric.
pub fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let fifth = word_at(block, 2);
    for (i, &byte) in block[6..].iter().enumerate() {
        out[i] = d * (five_bits(byte & 15, fifth, i) - 16) as f32;
        out[i + 16] = d * (five_bits(byte >> 4, fifth, i + 16) - 16) as f32;
    }
}

/// Decodes a block of Q5_1: 5 bits with a minimum.
pub fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let fifth = word_at(block, 4);
    for (i, &byte) in block[8..].iter().enumerate() {
        out[i] = d * five_bits(byte & 15, fifth, i) as f32 + m;
        out[i + 16] = d * five_bits(byte >> 4, fifth, i + 16) as f32 + m;
    }
}

/// Decodes a block of MXFP4: 4-bit floats with a power of two as scale.
pub fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    let d = half_power_of_two(block[0]);
    for (i, &byte) in block[1..].iter().enumerate() {
        out[i] = d * f32::from(MXFP4_VALUES[usize::from(byte & 15)]);
        out[i + 16] = d * f32::from(MXFP4_VALUES[usize::from(byte >> 4)]);
    }
}

/// Half of the E8M0 number `e`: 2^(e - 128). The lowest two are subnormal; 255, a NaN in E8M0, counts on.
fn half_power_of_two(e: u8) -> f32 {
    match e {
        0 | 1 => f32::from_bits(1 << (21 + e)),
        _ => f32::from_bits(u32::from(e - 1) << 23),
    }
}

#[inline]
fn five_bits(low: u8, fifth: u32, i: usize) -> i32 {
    i32::from(low) | ((fifth >> i & 1) << 4) as i32
}
