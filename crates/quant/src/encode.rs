//! `f32` to blocks: the search for the blocks that lose least.
//!
//! Every encoder minimises the same sum, Σ w·(x − decoded)², over everything its format lets it choose. The
//! error weight w of a weight x is the importance of its column times √(2σ² + x²), σ² being the mean square of
//! the block: large weights matter more, in moderation.
//!
//! - [`block`] prepares a block: normalised weights, error weights, the rounding of its scale to `f16`;
//! - [`levels`] chooses the scale of a super-block together with the small integers that multiply it;
//! - [`symmetric`] encodes what is `scale · code` (Q8_0, Q6_K, Q3_K, IQ4_NL, IQ4_XS);
//! - [`affine`] encodes what is `scale · code − min` (Q2_K, Q4_K, Q5_K);
//! - [`envelope`] finds the best row of a codebook at every scale, and [`grid`] encodes what is
//!   `scale · sign · row` with it (IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S), [`iq1`] what has signed rows (IQ1_M).
//!
//! The result depends on the weights and the importance alone, and a block only on its own, so a caller may
//! cut a tensor at any row and encode the pieces in parallel.

mod affine;
mod block;
mod envelope;
mod grid;
mod iq1;
mod levels;
mod symmetric;

use half::{bf16, f16};

use crate::{Error, Type};

/// Whether [`encode`] can write this type.
pub fn can_encode(ty: Type) -> bool {
    largest(ty).is_some()
}

/// Appends `weights`, encoded as whole blocks of `ty`, to `out`.
///
/// `weights` are whole rows, one after the other. `importance` says how much an error in each column costs
/// (one value per column, finite, not negative; only ratios matter); without it all columns cost the same.
/// Types without blocks (F32, F16, BF16) ignore it and round to nearest, ties to even, keeping NaN and
/// infinity.
///
/// # Errors
///
/// [`Error::NoEncoder`] if the type cannot be written; [`Error::PartialBlock`] if the weights, or one row of
/// them, are not whole blocks; [`Error::Importance`] if the weights are not whole rows of the importance;
/// [`Error::BadImportance`] if a value of it is negative or not finite; [`Error::NotFinite`] for a NaN or
/// infinity in a type that has none; [`Error::TooLarge`] for a weight beyond the range of the type. `out` is
/// as it was in all of these cases.
pub fn encode(ty: Type, weights: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) -> Result<(), Error> {
    let largest = largest(ty).ok_or(Error::NoEncoder(ty))?;
    let bytes = ty.bytes(weights.len()).ok_or(Error::PartialBlock { ty, len: weights.len() })?;
    if let Some(importance) = importance {
        check_importance(ty, weights.len(), importance)?;
    }
    check_range(ty, weights, largest)?;

    out.reserve(bytes);
    let job = block::Job { weights, importance };
    match ty {
        Type::F32 => out.extend(weights.iter().flat_map(|x| x.to_le_bytes())),
        Type::F16 => out.extend(weights.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
        Type::BF16 => out.extend(weights.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
        Type::Q8_0 => job.each(out, symmetric::q8_0),
        Type::Q2_K => job.each(out, affine::q2_k),
        Type::Q3_K => job.each(out, symmetric::q3_k),
        Type::Q4_K => job.each(out, affine::q4_k),
        Type::Q5_K => job.each(out, affine::q5_k),
        Type::Q6_K => job.each(out, symmetric::q6_k),
        Type::IQ1_M => job.each(out, iq1::iq1_m),
        Type::IQ2_XXS => job.each(out, grid::iq2_xxs),
        Type::IQ2_XS => job.each(out, grid::iq2_xs),
        Type::IQ2_S => job.each(out, grid::iq2_s),
        Type::IQ3_XXS => job.each(out, grid::iq3_xxs),
        Type::IQ3_S => job.each(out, grid::iq3_s),
        Type::IQ4_NL => job.each(out, symmetric::iq4_nl),
        Type::IQ4_XS => job.each(out, symmetric::iq4_xs),
        _ => unreachable!("a type with a range has an encoder"),
    }
    Ok(())
}

/// The largest magnitude a type stands for with the largest scale an `f16` holds, or `None` if the type has
/// no encoder.
fn largest(ty: Type) -> Option<f32> {
    const F16: f32 = 65504.0;
    Some(match ty {
        Type::F32 => f32::MAX,
        // Half a step more than the largest value still rounds to it.
        Type::F16 => 65519.996,
        Type::BF16 => f32::from_bits(0x7f7f_7fff),
        Type::Q8_0 | Type::IQ4_NL => F16 * 127.0,
        Type::Q2_K => F16 * 15.0,
        Type::Q4_K | Type::Q5_K => F16 * 63.0,
        Type::Q3_K => F16 * 32.0 * 4.0,
        Type::Q6_K => F16 * 128.0 * 32.0,
        Type::IQ1_M => F16 * 15.0,
        Type::IQ2_XXS | Type::IQ2_XS | Type::IQ2_S => F16 * 15.5 * 0.25 * 43.0,
        Type::IQ3_XXS => F16 * 15.5 * 0.5 * 62.0,
        Type::IQ3_S => F16 * 31.0 * 15.0,
        Type::IQ4_XS => F16 * 32.0 * 127.0,
        _ => return None,
    })
}

fn check_importance(ty: Type, len: usize, importance: &[f32]) -> Result<(), Error> {
    let columns = importance.len();
    if columns == 0 || !len.is_multiple_of(columns) {
        return Err(Error::Importance { len, importance: columns });
    }
    if ty.bytes(columns).is_none() {
        return Err(Error::PartialBlock { ty, len: columns });
    }
    match importance.iter().position(|&v| !(v.is_finite() && v >= 0.0)) {
        Some(column) => Err(Error::BadImportance { column }),
        None => Ok(()),
    }
}

fn check_range(ty: Type, weights: &[f32], largest: f32) -> Result<(), Error> {
    // One cheap pass; which weight it was is only looked up when one is out of range.
    if weights.iter().all(|x| x.abs() <= largest) {
        return Ok(());
    }
    let keeps_non_finite = ty.block_len() == 1;
    for (index, x) in weights.iter().enumerate() {
        if !x.is_finite() && !keeps_non_finite {
            return Err(Error::NotFinite { ty, index });
        }
        if x.is_finite() && x.abs() > largest {
            return Err(Error::TooLarge { ty, index });
        }
    }
    Ok(())
}
