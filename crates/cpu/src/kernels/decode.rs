//! Blocks of weights to numbers, compiled with the features of the variant.
//!
//! Types whose decoding vectorises are written out here; the others come from `quant`, whose code for them
//! gains nothing from wider vectors.

use half::f16;
use quant::Type;

/// Decodes `out.len()` weights, whole blocks, from `bytes`.
///
/// # Panics
/// If the lengths do not fit, which the shape of the model excludes.
#[inline(always)]
pub(super) fn decode(ty: Type, bytes: &[u8], out: &mut [f32]) {
    match ty {
        Type::F32 => plain(bytes, out, f32::from_le_bytes),
        Type::F16 => plain(bytes, out, |b| quant::decode::f16_to_f32(u16::from_le_bytes(b))),
        Type::BF16 => plain(bytes, out, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)),
        Type::Q8_0 => q8_0(bytes, out),
        _ => quant::decode(ty, bytes, out).expect("whole blocks of a checked matrix"),
    }
}

#[inline(always)]
fn plain<const N: usize>(bytes: &[u8], out: &mut [f32], number: impl Fn([u8; N]) -> f32) {
    assert_eq!(bytes.len(), out.len() * N);
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = number(*bytes);
    }
}

/// 32 signed bytes behind a scale.
#[inline(always)]
fn q8_0(bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len() * 32, out.len() * 34);
    for (block, out) in bytes.as_chunks::<34>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        let scale = quant::decode::f16_to_f32(u16::from_le_bytes([block[0], block[1]]));
        for (out, &q) in out.iter_mut().zip(&block[2..]) {
            *out = scale * f32::from(q as i8);
        }
    }
}

/// Halves to numbers.
#[inline(always)]
pub(super) fn widen(from: &[f16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    for (to, from) in to.iter_mut().zip(from) {
        *to = quant::decode::f16_to_f32(from.to_bits());
    }
}
