//! Blocks to `f32`.
//!
//! [`decode()`] takes whole blocks of any type. The functions named after a type decode one block of it; the
//! block layouts are described where they are decoded, in the files of the three families.
//!
//! Every function gives the `f32` that the format's definition gives, operation by operation: products are
//! taken in the order written, without contraction into multiply-adds. Any bytes decode: scales that are
//! infinite or NaN yield infinite or NaN weights, whose payload bits are unspecified (except for `F32` and
//! `BF16`, which are copied).

mod iq;
mod k;
mod simple;

pub use iq::{iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs, iq4_nl, iq4_xs};
pub use k::{q2_k, q3_k, q3_k_scales, q4_k, q5_k, q6_k, six_bit_scales};
pub use simple::{mxfp4, q4_0, q4_1, q5_0, q5_1, q8_0};

use crate::{Error, Type};

/// Decodes `out.len()` weights of type `ty` from `bytes`.
///
/// # Errors
///
/// [`Error::PartialBlock`] if `out` is not a whole number of blocks, [`Error::ByteLength`] if `bytes` is not
/// exactly what these blocks take. `out` is untouched then.
pub fn decode(ty: Type, bytes: &[u8], out: &mut [f32]) -> Result<(), Error> {
    let expected = ty.bytes(out.len()).ok_or(Error::PartialBlock { ty, len: out.len() })?;
    if bytes.len() != expected {
        return Err(Error::ByteLength { ty, len: out.len(), expected, actual: bytes.len() });
    }
    match ty {
        Type::F32 => simple::f32s(bytes, out),
        Type::F16 => simple::f16s(bytes, out),
        Type::BF16 => simple::bf16s(bytes, out),
        Type::Q8_0 => each(bytes, out, q8_0),
        Type::Q4_0 => each(bytes, out, q4_0),
        Type::Q4_1 => each(bytes, out, q4_1),
        Type::Q5_0 => each(bytes, out, q5_0),
        Type::Q5_1 => each(bytes, out, q5_1),
        Type::MXFP4 => each(bytes, out, mxfp4),
        Type::Q2_K => each(bytes, out, q2_k),
        Type::Q3_K => each(bytes, out, q3_k),
        Type::Q4_K => each(bytes, out, q4_k),
        Type::Q5_K => each(bytes, out, q5_k),
        Type::Q6_K => each(bytes, out, q6_k),
        Type::IQ1_S => each(bytes, out, iq1_s),
        Type::IQ1_M => each(bytes, out, iq1_m),
        Type::IQ2_XXS => each(bytes, out, iq2_xxs),
        Type::IQ2_XS => each(bytes, out, iq2_xs),
        Type::IQ2_S => each(bytes, out, iq2_s),
        Type::IQ3_XXS => each(bytes, out, iq3_xxs),
        Type::IQ3_S => each(bytes, out, iq3_s),
        Type::IQ4_NL => each(bytes, out, iq4_nl),
        Type::IQ4_XS => each(bytes, out, iq4_xs),
    }
    Ok(())
}

/// Calls `block` on every pair of block and decoded weights; the lengths have been checked.
#[inline]
fn each<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        block(bytes, out);
    }
}

/// The value of an IEEE binary16, given its bits; exact for every finite one.
///
/// Selections instead of branches, so that a loop over it vectorises, and no subnormal `f32` on the way, which
/// would cost some processors a hundred cycles.
#[inline]
pub fn f16_to_f32(bits: u16) -> f32 {
    /// The difference of the exponent biases, 127 - 15, in place.
    const REBIAS: u32 = 112 << 23;
    /// 2^-24, the unit of subnormal halves.
    const UNIT: f32 = 1.0 / (1 << 24) as f32;
    let magnitude = i32::from(bits & 0x7fff);
    let shifted = (magnitude as u32) << 13;
    let value = if magnitude < 0x0400 {
        (magnitude as f32 * UNIT).to_bits()
    } else if magnitude < 0x7c00 {
        shifted + REBIAS
    } else {
        shifted + 2 * REBIAS
    };
    f32::from_bits(value | u32::from(bits & 0x8000) << 16)
}

/// The binary16 stored at byte `at` of a block.
#[inline]
fn half_at(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// The little-endian `u32` stored at byte `at` of a block.
#[inline]
fn word_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_converts_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            let same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan());
            assert!(same, "{bits:#06x}: {ours} instead of {theirs}");
        }
    }
}
