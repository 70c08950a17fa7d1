//! What llama.cpp's CPU kernels make of the activations before a dot product.
//!
//! Its matrix products round the activations first, to a form that belongs to the weight type
//! ([`Type::activation`]), and then multiply integers. The functions here replace values by what the rounded
//! activations stand for, so that a plain `f32` product over decoded weights reproduces theirs up to the
//! order of the sum. They follow its x86 path with AVX2 or AVX-512:
//!
//! | form | block | scale                    | integer                                     | stands for       |
//! |------|-------|--------------------------|---------------------------------------------|------------------|
//! | Q8_0 | 32    | `max abs x / 127`, as f16 | `x * (127 / max abs x)`, ties to even       | `f16(scale) * q` |
//! | Q8_1 | 32    | the same                 | the same                                    | the same         |
//! | Q8_K | 256   | `1 / (-127 / extreme)`, f32 | `x * (-127 / extreme)`, ties to even      | `scale * q`      |
//!
//! `extreme` is the first value of the largest magnitude, with its sign: it becomes -127. The integers of
//! Q8_0 are made with the exact factor although the scale is stored rounded. The portable path of llama.cpp
//! (and the Python package `gguf`) differs in Q8_0 and Q8_1: it multiplies by `1 / (max abs x / 127)` and
//! rounds ties away from zero, which moves a value by one step once in a long while.
//!
//! Q8_1 also stores the sum of a block's integers times its scale, which multiplies the minimum of Q4_1 and
//! Q5_1 blocks. It is computed with the unrounded scale and then rounded to f16, so that it differs from the sum
//! of the rounded activations by up to 2^-10 of itself: [`q8_1_sum_errors`], to be multiplied with [`minima`].

use half::{bf16, f16};

use crate::Type;

/// The form to which activations are rounded before they meet the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // named like the types; described by the module
#[allow(non_camel_case_types)]
pub enum Activation {
    F32,
    F16,
    BF16,
    Q8_0,
    Q8_1,
    Q8_K,
}

impl Activation {
    /// Rounds `values` in place: whole rows, which share no block if their length is a multiple of it.
    pub fn round(self, values: &mut [f32]) {
        match self {
            Activation::F32 => {}
            Activation::F16 => values.iter_mut().for_each(|v| *v = f16::from_f32(*v).to_f32()),
            Activation::BF16 => values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32()),
            Activation::Q8_0 => round_q8_0(values),
            Activation::Q8_1 => round_q8_1(values),
            Activation::Q8_K => round_q8_k(values),
        }
    }
}

impl Type {
    /// The form to which llama.cpp rounds activations that meet weights of this type.
    pub fn activation(self) -> Activation {
        match self {
            Type::F32 => Activation::F32,
            Type::F16 => Activation::F16,
            Type::BF16 => Activation::BF16,
            Type::Q8_0 | Type::Q4_0 | Type::Q5_0 | Type::IQ4_NL | Type::MXFP4 => Activation::Q8_0,
            Type::Q4_1 | Type::Q5_1 => Activation::Q8_1,
            Type::Q2_K | Type::Q3_K | Type::Q4_K | Type::Q5_K | Type::Q6_K => Activation::Q8_K,
            Type::IQ1_S | Type::IQ1_M | Type::IQ2_XXS | Type::IQ2_XS | Type::IQ2_S => Activation::Q8_K,
            Type::IQ3_XXS | Type::IQ3_S | Type::IQ4_XS => Activation::Q8_K,
        }
    }
}

/// Rounds `values` to Q8_0, in blocks of 32.
///
/// A shorter last block is rounded as if it were filled up with zeros. A block with a value that is not
/// finite becomes NaN throughout; with values of 8.3 million, beyond the range of an f16 scale, it is infinite
/// or NaN.
pub fn round_q8_0(values: &mut [f32]) {
    for block in values.chunks_mut(32) {
        let largest = extreme(block).abs();
        let scale = f16::from_f32(largest / 127.0).to_f32();
        round_block(block, 127.0 / largest, scale);
    }
}

/// Rounds `values` to Q8_1, in blocks of 32: the same values as [`round_q8_0`]. [`q8_1_sum_errors`] says how far
/// the sums that Q8_1 stores are from those of the rounded values.
pub fn round_q8_1(values: &mut [f32]) {
    round_q8_0(values);
}

/// For each block of 32 of `values`, not yet rounded: the sum that Q8_1 stores minus the sum of the values that
/// [`round_q8_1`] makes.
pub fn q8_1_sum_errors(values: &[f32]) -> Vec<f32> {
    let error = |block: &[f32]| {
        let largest = extreme(block).abs();
        if largest == 0.0 {
            return 0.0;
        }
        let (scale, factor) = (largest / 127.0, 127.0 / largest);
        let sum: f32 = block.iter().map(|value| (value * factor).round_ties_even()).sum();
        f16::from_f32(scale * sum).to_f32() - f16::from_f32(scale).to_f32() * sum
    };
    values.chunks(32).map(error).collect()
}

/// What the blocks of a row add to all their weights, where activations are rounded to Q8_1 and their sums
/// multiply it: one number for each block of 32. Empty for other types.
pub fn minima(ty: Type, row: &[u8]) -> Vec<f32> {
    if ty.activation() != Activation::Q8_1 {
        return Vec::new();
    }
    // Both types begin with the scale and the minimum, each an f16.
    row.chunks_exact(ty.block_bytes())
        .map(|block| f16::from_le_bytes([block[2], block[3]]).to_f32())
        .collect()
}

/// Rounds `values` to Q8_K, in blocks of 256. Short and non-finite blocks: as in [`round_q8_0`].
pub fn round_q8_k(values: &mut [f32]) {
    for block in values.chunks_mut(256) {
        let factor = -127.0 / extreme(block);
        round_block(block, factor, 1.0 / factor);
    }
}

/// Replaces each value by the nearest multiple of `scale`, found by multiplying with `factor`.
fn round_block(block: &mut [f32], factor: f32, scale: f32) {
    if scale == 0.0 {
        // All zeros, or so small that the scale underflowed; `factor` may be infinite.
        return block.fill(0.0);
    }
    for value in block {
        *value = scale * (*value * factor).round_ties_even();
    }
}

/// The first value of the largest magnitude; NaN if any value is NaN.
fn extreme(block: &[f32]) -> f32 {
    let larger = |most: f32, &value: &f32| {
        let keep = most.is_nan() || value.abs() <= most.abs();
        if keep { most } else { value }
    };
    block.iter().fold(0.0, larger)
}
