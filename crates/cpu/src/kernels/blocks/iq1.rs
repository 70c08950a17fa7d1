//! Blocks of 256 weights that name rows of the codebook of IQ1: ternary values, to which an eighth is added or
//! from which it is taken. Integers are eighths.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use quant::codebook::IQ1_GRID;

use super::super::int8::SHIFT;
use super::super::lanes::{
    Float, Int, Rows, Table, affine, and, and_or, bytes, fields, gather, half_to_float, left, look, matrix,
    number, or, right, select, sign_words, times, to_float, words, zero,
};
use super::Sink;
use super::lookup::bits_from;

/// Codes (0, 1, 2 for −1, 0, 1) of every codebook row: of the first four weights in the lowest byte, of the others
/// in the third.
static CODES: [u32; 2048] = {
    let mut table = [0; 2048];
    let mut row = 0;
    while row < 2048 {
        let mut j = 0;
        while j < 8 {
            table[row] |= ((IQ1_GRID[row][j] + 1) as u32) << (2 * (j % 4) + 16 * (j / 4));
            j += 1;
        }
        row += 1;
    }
    table
};

/// Shifted weight by a code at bit `code` and, at bit `negative`, whether an eighth is taken.
const fn values(code: usize, negative: usize) -> Table<64> {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        let delta = if i >> negative & 1 == 1 { -1 } else { 1 };
        table[i] = (SHIFT + 8 * ((i >> code & 3) as i32 - 1) + delta) as u8;
        i += 1;
    }
    Table(table)
}

static VALUES: [Table<64>; 4] = [values(0, 2), values(2, 0), values(4, 0), values(2, 0)];

/// 16 columns from two rows of the codebook; `negative` has bytes of ones for the first row, the second, the
/// first, the second.
#[inline(always)]
fn half(first: Int, second: Int, negative: Int) -> [Int; 4] {
    let code = or(gather(&CODES, first), left(gather(&CODES, second), 8));
    let code_4 = right(code, 4);
    [
        look(VALUES[0].piece(0), select(bytes(0x03), code, negative)),
        look(VALUES[1].piece(0), select(bytes(0x0c), code, negative)),
        look(VALUES[2].piece(0), select(bytes(0x30), code, negative)),
        look(VALUES[3].piece(0), select(bytes(0x0c), code_4, negative)),
    ]
}

/// Row number of a group: byte `group` of `low`, above it three bits of `high` from bit `from` on.
#[inline(always)]
fn index(low: Int, group: u32, high: Int, from: u32) -> Int {
    let high = if from < 8 { left(high, 8 - from) } else { right(high, from - 8) };
    and_or(high, words(0x700), and(right(low, 8 * group), words(0xff)))
}

/// d · (2s + 1) · 0.125, for three bits of `field` from bit `from` on.
#[inline(always)]
fn scale(d: Float, field: Int, from: u32) -> Float {
    // Twice the bits, and one.
    let doubled = if from == 0 { left(field, 1) } else { right(field, from - 1) };
    times(times(d, to_float(and_or(doubled, words(14), words(1)))), number(0.125))
}

/// A half; 32 lower bytes of indices; for each run a field of 16 bits: four times three upper bits of indices,
/// three bits of scale, whether eighths are taken.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn iq1_s(rows: &Rows, count: usize, sink: &mut impl Sink) {
    for at in (0..count).map(|block| block * 50) {
        // SAFETY: inside the block.
        let (d, low, more_low, high) = unsafe {
            (rows.halves(at), rows.four_words(at + 2), rows.four_words(at + 18), rows.four_words(at + 34))
        };
        for run in 0..8 {
            let low = if run < 4 { low[run] } else { more_low[run - 4] };
            let (field, from) = (high[run / 2], 16 * (run as u32 % 2));
            let negative = sign_words(left(field, 16 - from));
            let mut q = [zero(); 8];
            for h in 0..2 {
                let group = 2 * h as u32;
                let first = index(low, group, field, from + 3 * group);
                let second = index(low, group + 1, field, from + 3 * group + 3);
                q[4 * h..4 * h + 4].copy_from_slice(&half(first, second, negative));
            }
            sink.full(q, scale(d, field, from + 12), []);
        }
    }
}

/// 32 lower bytes of indices; for each group half a byte: three upper bits of the index, whether eighths are
/// taken; four fields of 16 bits: four scales of three bits, then four bits of a half.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn iq1_m(rows: &Rows, count: usize, sink: &mut impl Sink) {
    /// Of the first and second group of a half of a run, the bit that says whether eighths are taken.
    static NEGATIVE: [Table<64>; 4] = [
        bits_from([3, 7, 3, 7]),
        bits_from([11, 15, 11, 15]),
        bits_from([19, 23, 19, 23]),
        bits_from([27, 31, 27, 31]),
    ];
    for at in (0..count).map(|block| block * 56) {
        // SAFETY: inside the block.
        let (low, more_low, high, [.., a, b]) = unsafe {
            (
                rows.four_words(at),
                rows.four_words(at + 16),
                rows.four_words(at + 32),
                rows.four_words(at + 40),
            )
        };
        let d = or(
            or(and(right(a, 12), words(0xf)), and(right(a, 24), words(0xf0))),
            or(and(right(b, 4), words(0xf00)), and(right(b, 16), words(0xf000))),
        );
        let d = half_to_float(d);
        for run in 0..8 {
            let low = if run < 4 { low[run] } else { more_low[run - 4] };
            let (high, from) = (high[run / 2], 16 * (run as u32 % 2));
            let mut q = [zero(); 8];
            for h in 0..2 {
                let group = 2 * h as u32;
                let first = index(low, group, high, from + 4 * group);
                let second = index(low, group + 1, high, from + 4 * group + 4);
                let bits = fields(high, NEGATIVE[run % 2 * 2 + h].piece(0));
                let negative = affine::<0>(bits, matrix([1; 8]));
                q[4 * h..4 * h + 4].copy_from_slice(&half(first, second, negative));
            }
            // Fields of four runs of 16 columns.
            let (field, from) =
                (if run < 4 { a } else { b }, (run as u32 / 2 % 2) * 16 + (run as u32 % 2) * 6);
            sink.halves(q, [scale(d, field, from), scale(d, field, from + 3)]);
        }
    }
}
