//! Blocks of 256 weights that name rows of the codebooks of IQ3: four magnitudes a row, signs apart.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use quant::codebook::{IQ3_S_GRID, IQ3_S_MAGNITUDES, IQ3_XXS_GRID, IQ3_XXS_MAGNITUDES};

use super::super::int8::SHIFT;
use super::super::lanes::{
    Int, Rows, Table, affine, bits, bytes, fields, half_byte, left, look, number, pairs, right, rotated,
    select, sum, times, to_float, zero,
};
use super::Sink;
use super::lookup::{EVEN_FIELDS, bits_from, even_signs, look_256, look_512, split};

/// Codes (which of the magnitudes) of two weights of every codebook row, given by their number: three bits from
/// bit 0 on, three from bit 3 on.
const fn codes<const N: usize>(grid: &[[u8; 4]; N], magnitudes: [u8; 8], weights: [usize; 2]) -> Table<N> {
    let mut table = [0; N];
    let mut row = 0;
    while row < N {
        let mut j = 0;
        while j < 2 {
            let mut code = 0;
            while magnitudes[code as usize] != grid[row][weights[j]] {
                code += 1;
            }
            table[row] |= code << (3 * j);
            j += 1;
        }
        row += 1;
    }
    Table(table)
}

static XXS_CODES: [Table<256>; 2] =
    [codes(&IQ3_XXS_GRID, IQ3_XXS_MAGNITUDES, [0, 1]), codes(&IQ3_XXS_GRID, IQ3_XXS_MAGNITUDES, [3, 2])];
static S_CODES: [Table<512>; 2] =
    [codes(&IQ3_S_GRID, IQ3_S_MAGNITUDES, [0, 1]), codes(&IQ3_S_GRID, IQ3_S_MAGNITUDES, [3, 2])];

/// Shifted weight by a code at bit `code` and, at bit `sign`, whether it is negative.
const fn values(magnitudes: [u8; 8], code: usize, sign: usize) -> Table<64> {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        let magnitude = magnitudes[i >> code & 7] as i32;
        let value = if i >> sign & 1 == 1 { -magnitude } else { magnitude };
        table[i] = (value + SHIFT) as u8;
        i += 1;
    }
    Table(table)
}

/// By the codes as they lie in the tables and the signs as they lie in [`half`].
const fn all_values(magnitudes: [u8; 8]) -> [Table<64>; 4] {
    [values(magnitudes, 0, 3), values(magnitudes, 3, 1), values(magnitudes, 3, 2), values(magnitudes, 0, 3)]
}

static XXS_VALUES: [Table<64>; 4] = all_values(IQ3_XXS_MAGNITUDES);
static S_VALUES: [Table<64>; 4] = all_values(IQ3_S_MAGNITUDES);

/// The places of four groups of four weights in a lane.
static PLACES: Table<64> = {
    let mut index = [0; 64];
    let mut i = 0;
    while i < 64 {
        index[i] = (i / 4 * 4 + [0, 2, 1, 3][i % 4]) as u8;
        i += 1;
    }
    Table(index)
};

/// 16 columns from the codes of their groups' first two and last two weights and their signs: bytes are groups,
/// in the order of [`PLACES`], their signs the lower half-bytes.
#[inline(always)]
fn half([first, last]: [Int; 2], signs: Int, values: &[Table<64>; 4]) -> [Int; 4] {
    [
        look(values[0].piece(0), select(bytes(0x07), first, left(signs, 3))),
        look(values[1].piece(0), select(bytes(0x38), first, signs)),
        look(values[2].piece(0), select(bytes(0x38), last, signs)),
        look(values[3].piece(0), select(bytes(0x07), last, signs)),
    ]
}

/// A half; for each group of four weights an index; for each run a word: four times seven bits of signs, four
/// bits of scale.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn iq3_xxs(rows: &Rows, count: usize, sink: &mut impl Sink) {
    for at in (0..count).map(|block| block * 98) {
        // SAFETY: inside the block.
        let (d, indices, words, more_words) = unsafe {
            (
                rows.halves(at),
                rows.words::<16>(at + 2, &PLACES),
                rows.four_words(at + 66),
                rows.four_words(at + 82),
            )
        };
        for run in 0..8 {
            let field = if run < 4 { words[run] } else { more_words[run - 4] };
            let signs = affine::<0>(fields(field, pairs(EVEN_FIELDS)), even_signs(0, [0, 1, 2, 3]));
            let signs = split(signs, rotated::<12>(signs));
            let mut q = [zero(); 8];
            for h in 0..2 {
                let index = indices[2 * run + h];
                let masks = [bits::<6>(index), bits::<7>(index)];
                let first = look_256(&XXS_CODES[0], 0, index, masks);
                let last = look_256(&XXS_CODES[1], 0, index, masks);
                q[4 * h..4 * h + 4].copy_from_slice(&half([first, last], signs[h], &XXS_VALUES));
            }
            let scale = times(d, sum(to_float(right(field, 28)), number(0.5)));
            sink.full(q, times(scale, number(0.5)), []);
        }
    }
}

/// A half; for each group of four weights the lower byte of an index, then, for each, its ninth bit; a sign for
/// each weight; four bits of scale for each run.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn iq3_s(rows: &Rows, count: usize, sink: &mut impl Sink) {
    /// Brings the ninth bits of the groups of half h of a run to the top of bytes.
    const fn ninth(run: i32, h: i32) -> Table<64> {
        let bit = 8 * run + 4 * h - 7;
        bits_from([bit, bit + 2, bit + 1, bit + 3])
    }
    static NINTH: [[Table<64>; 2]; 4] = [
        [ninth(0, 0), ninth(0, 1)],
        [ninth(1, 0), ninth(1, 1)],
        [ninth(2, 0), ninth(2, 1)],
        [ninth(3, 0), ninth(3, 1)],
    ];
    for at in (0..count).map(|block| block * 110) {
        // SAFETY: inside the block.
        let (d, indices, first, second, third) = unsafe {
            (
                rows.halves(at),
                rows.words::<16>(at + 2, &PLACES),
                rows.four_words(at + 66),
                rows.four_words(at + 82),
                rows.four_words(at + 94),
            )
        };
        let ([a, b, s0, s1], [s2, s3, s4, s5], [_, s6, s7, scales]) = (first, second, third);
        let signs = [s0, s1, s2, s3, s4, s5, s6, s7];
        for run in 0..8 {
            let ninths = if run < 4 { a } else { b };
            let signs = split(signs[run], rotated::<12>(signs[run]));
            let mut q = [zero(); 8];
            for h in 0..2 {
                let index = indices[2 * run + h];
                let ninth = bits::<7>(fields(ninths, NINTH[run % 4][h].piece(0)));
                let masks = [bits::<6>(index), bits::<7>(index), ninth];
                let first = look_512(&S_CODES[0], 0, index, masks);
                let last = look_512(&S_CODES[1], 0, index, masks);
                q[4 * h..4 * h + 4].copy_from_slice(&half([first, last], signs[h], &S_VALUES));
            }
            let s = sum(half_byte(scales, run as u32), half_byte(scales, run as u32));
            sink.full(q, times(d, sum(s, number(1.0))), []);
        }
    }
}
