//! Blocks of 256 weights that name rows of the codebooks of IQ2: eight magnitudes a row, signs apart.
//!
//! Codebooks are kept as bytes of two-bit codes; codes and signs together pick the weight.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use quant::codebook::{IQ2_MAGNITUDES, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID};

use super::super::int8::SHIFT;
use super::super::lanes::{
    Float, Int, Rows, Table, affine, bits, bytes, fields, half_byte, look, number, pairs, right, rotated,
    select, sum, times, to_float, zero,
};
use super::Sink;
use super::lookup::{EVEN_FIELDS, all_signs, bits_from, even_signs, look_256, look_512, look_1024, split};

/// Codes (0, 1, 2 for the magnitudes) of four weights of every codebook row, the first in the lowest bits.
const fn codes<const N: usize>(grid: &[[i8; 8]; N], first: usize) -> [u8; N] {
    let mut table = [0; N];
    let mut row = 0;
    while row < N {
        let mut j = 0;
        while j < 4 {
            let entry = grid[row][first + j];
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

static XXS_CODES: [Table<256>; 2] = [Table(codes(&IQ2_XXS_GRID, 0)), Table(codes(&IQ2_XXS_GRID, 4))];
static XS_CODES: [Table<512>; 2] = [Table(codes(&IQ2_XS_GRID, 0)), Table(codes(&IQ2_XS_GRID, 4))];
static S_CODES: [Table<1024>; 2] = [Table(codes(&IQ2_S_GRID, 0)), Table(codes(&IQ2_S_GRID, 4))];

/// Shifted weight by six bits, of which two at `code` say the magnitude and one at `sign` says whether it is
/// negative.
const fn values(code: usize, sign: usize) -> Table<64> {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        let which = i >> code & 3;
        let magnitude = if which < 3 { IQ2_MAGNITUDES[which] } else { 0 };
        let value = if i >> sign & 1 == 1 { -magnitude } else { magnitude };
        table[i] = (value as i32 + SHIFT) as u8;
        i += 1;
    }
    Table(table)
}

static VALUES: [Table<64>; 4] = [values(0, 2), values(2, 0), values(4, 3), values(2, 1)];

/// Which weight's sign stands at each bit: one that its code leaves free, see [`VALUES`].
const SIGN_ORDER: [usize; 4] = [1, 3, 0, 2];

/// Weights from the codes of four groups of eight, given for their first and second halves, and their signs in
/// [`SIGN_ORDER`].
#[inline(always)]
fn weights(low: Int, high: Int, signs: Int) -> [Int; 8] {
    let (codes, signs) = (split(low, rotated::<16>(high)), split(signs, rotated::<12>(signs)));
    let mut q = [zero(); 8];
    for half in 0..2 {
        let (code, sign) = (codes[half], signs[half]);
        // Code bits where the mask is set, sign bits elsewhere.
        let indices = [
            select(bytes(0x03), code, sign),
            select(bytes(0x0c), code, sign),
            select(bytes(0x30), code, sign),
            select(bytes(0x0c), right(code, 4), sign),
        ];
        for s in 0..4 {
            q[4 * half + s] = look(VALUES[s].piece(0), indices[s]);
        }
    }
    q
}

/// d · (0.5 + s). A quarter of a half-precision d is exact, and so are these products: the order is free.
#[inline(always)]
fn scale(d: Float, s: Float) -> Float {
    times(d, sum(s, number(0.5)))
}

/// A quarter of the half at `at`.
///
/// # Safety
/// The bytes must lie inside all rows.
#[inline(always)]
unsafe fn quarter(rows: &Rows, at: usize) -> Float {
    // SAFETY: the caller's promise.
    times(unsafe { rows.halves(at) }, number(0.25))
}

/// 16 words of every row.
///
/// # Safety
/// The bytes must lie inside all rows.
#[inline(always)]
unsafe fn plain_words(rows: &Rows, at: usize) -> [Int; 16] {
    let mut words = [zero(); 16];
    for (i, four) in words.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *four = unsafe { rows.four_words(at + 16 * i) };
    }
    words
}

/// The scales of two halves from half-bytes of pair `run`.
#[inline(always)]
fn half_scales(d: Float, four: Int, run: u32) -> [Float; 2] {
    [scale(d, half_byte(four, 2 * run)), scale(d, half_byte(four, 2 * run + 1))]
}

/// A half, then for each run four indices of a byte and a word: four times seven bits of signs, four bits of
/// scale.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn iq2_xxs(rows: &Rows, count: usize, sink: &mut impl Sink) {
    for at in (0..count).map(|block| block * 66) {
        // SAFETY: inside the block.
        let (d, words) = unsafe { (quarter(rows, at), plain_words(rows, at + 2)) };
        for run in 0..8 {
            let (index, field) = (words[2 * run], words[2 * run + 1]);
            let masks = [bits::<6>(index), bits::<7>(index)];
            let low = look_256(&XXS_CODES[0], 0, index, masks);
            let high = look_256(&XXS_CODES[1], 0, index, masks);
            let signs = affine::<0>(fields(field, pairs(EVEN_FIELDS)), even_signs(0, SIGN_ORDER));
            sink.full(weights(low, high, signs), scale(d, to_float(right(field, 28))), []);
        }
    }
}

/// A half; for each group of eight nine bits of index and seven of signs; four bits of scale for every 16
/// weights.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn iq2_xs(rows: &Rows, count: usize, sink: &mut impl Sink) {
    /// Of four groups the lower bytes, then the upper ones.
    static SPLIT: Table<64> = {
        let mut index = [0; 64];
        let mut i = 0;
        while i < 64 {
            index[i] = (i / 8 * 8 + i % 4 * 2 + i % 8 / 4) as u8;
            i += 1;
        }
        Table(index)
    };
    for at in (0..count).map(|block| block * 74) {
        // SAFETY: inside the block.
        let (d, words) = unsafe { (quarter(rows, at), rows.words::<16>(at + 2, &SPLIT)) };
        // SAFETY: as above; the scales are the last eight bytes.
        let [.., scales, more_scales] = unsafe { rows.four_words(at + 58) };
        for run in 0..8 {
            let (index, upper) = (words[2 * run], words[2 * run + 1]);
            let masks = [bits::<6>(index), bits::<7>(index), bits::<0>(upper)];
            let low = look_512(&XS_CODES[0], 0, index, masks);
            let high = look_512(&XS_CODES[1], 0, index, masks);
            let four = if run < 4 { scales } else { more_scales };
            let scales = half_scales(d, four, run as u32 % 4);
            sink.halves(weights(low, high, affine::<0>(upper, even_signs(1, SIGN_ORDER))), scales);
        }
    }
}

/// A half; for each group of eight the lower byte of an index; a sign for each weight; for each group two upper
/// bits of the index; four bits of scale for every 16 weights.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn iq2_s(rows: &Rows, count: usize, sink: &mut impl Sink) {
    /// Brings the upper bits of the groups of a run to the top of bytes.
    static UPPER: [Table<64>; 4] = [
        bits_from([-6, -4, -2, 0]),
        bits_from([2, 4, 6, 8]),
        bits_from([10, 12, 14, 16]),
        bits_from([18, 20, 22, 24]),
    ];
    for at in (0..count).map(|block| block * 82) {
        // SAFETY: inside the block.
        let (d, words, [a, b, scales, more_scales]) =
            unsafe { (quarter(rows, at), plain_words(rows, at + 2), rows.four_words(at + 66)) };
        for run in 0..8 {
            let (index, signs) = (words[run], words[8 + run]);
            let upper = fields(if run < 4 { a } else { b }, UPPER[run % 4].piece(0));
            let masks = [bits::<6>(index), bits::<7>(index), bits::<6>(upper), bits::<7>(upper)];
            let (low, high) = (look_1024(&S_CODES[0], index, masks), look_1024(&S_CODES[1], index, masks));
            let four = if run < 4 { scales } else { more_scales };
            sink.halves(
                weights(low, high, affine::<0>(signs, all_signs(SIGN_ORDER))),
                half_scales(d, four, run as u32 % 4),
            );
        }
    }
}
