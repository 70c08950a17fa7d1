//! Decoding blocks to integers in registers, for AVX-512 with VBMI, VBMI2 and GFNI.
//!
//! A decoder takes the blocks of 16 weight rows and hands run after run of columns to a [`Sink`]: one stores
//! them as a panel, another multiplies them where they are. The integers, scales and offsets are those of
//! [`super::unpack`], bit for bit.
//!
//! Lanes are rows: 64 bytes of every row are brought into a convenient order, then 16 × 16 words are transposed.

mod iq1;
mod iq2;
mod iq3;
mod k;
mod lookup;
mod nibbles;
mod simple;

use quant::Type;

use super::int8::ORDER;
use super::lanes::{Float, Int, Rows, Table};
pub(super) use k::Factored;

/// What becomes of decoded columns. Calls come in the order of columns.
pub(super) trait Sink {
    /// 32 columns with one scale and no offset, one, or one for each half. Vector `s` has the shifted weights of the
    /// columns at places 4s .. 4s + 4 of [`ORDER`], a lane for each row; from vector 4 on, of the next 16 columns.
    fn full<const N: usize>(&mut self, q: [Int; 8], scale: Float, offsets: [Float; N]);

    /// As [`Sink::full`], with a scale for each half and no offset.
    fn halves(&mut self, q: [Int; 8], scales: [Float; 2]);

    /// As [`Sink::full`], of weights that are integers times an integer factor for each half.
    fn factored(&mut self, weights: &Factored, scale: Float, offsets: [Float; 2]);
}

/// Decodes the blocks of up to 16 rows of equal length.
///
/// # Panics
/// If there is no row, rows differ in length, or the type is one of plain numbers.
#[inline(always)]
pub(super) fn decode(ty: Type, rows: &[&[u8]], sink: &mut impl Sink) {
    let len = rows[0].len();
    assert!(rows.iter().all(|row| row.len() == len), "rows of equal length");
    let (count, rows) = (len / ty.block_bytes(), Rows::new(rows));
    // SAFETY: every row has `count` blocks.
    unsafe {
        match ty {
            Type::Q8_0 => simple::q8_0(&rows, count, sink),
            Type::Q4_0 => nibbles::q4_0(&rows, count, sink),
            Type::Q4_1 => nibbles::q4_1(&rows, count, sink),
            Type::Q5_0 => nibbles::q5_0(&rows, count, sink),
            Type::Q5_1 => nibbles::q5_1(&rows, count, sink),
            Type::IQ4_NL => nibbles::iq4_nl(&rows, count, sink),
            Type::IQ4_XS => nibbles::iq4_xs(&rows, count, sink),
            Type::MXFP4 => nibbles::mxfp4(&rows, count, sink),
            Type::Q2_K => k::q2_k(&rows, count, sink),
            Type::Q3_K => k::q3_k(&rows, count, sink),
            Type::Q4_K => k::q4_k(&rows, count, sink),
            Type::Q5_K => k::q5_k(&rows, count, sink),
            Type::Q6_K => k::q6_k(&rows, count, sink),
            Type::IQ1_S => iq1::iq1_s(&rows, count, sink),
            Type::IQ1_M => iq1::iq1_m(&rows, count, sink),
            Type::IQ2_XXS => iq2::iq2_xxs(&rows, count, sink),
            Type::IQ2_XS => iq2::iq2_xs(&rows, count, sink),
            Type::IQ2_S => iq2::iq2_s(&rows, count, sink),
            Type::IQ3_XXS => iq3::iq3_xxs(&rows, count, sink),
            Type::IQ3_S => iq3::iq3_s(&rows, count, sink),
            Type::F32 | Type::F16 | Type::BF16 => unreachable!("plain numbers are multiplied as they are"),
        }
    }
}

/// Bytes of natural order to [`ORDER`].
static ORDERED: Table<64> = {
    let mut index = [0; 64];
    let mut i = 0;
    while i < 64 {
        index[i] = (i / 16 * 16 + ORDER[i % 16]) as u8;
        i += 1;
    }
    Table(index)
};
