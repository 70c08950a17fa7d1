//! Weights of half a byte each: low half-bytes are 16 columns, the upper ones the next 16.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use quant::codebook::{IQ4_NL_VALUES, MXFP4_VALUES};

use super::super::int8::SHIFT;
use super::super::lanes::{
    Int, Rows, Table, and, and_or, bytes, fields, half_power, half_to_float, look, number, right, select,
    sum, times, to_float, words, zero,
};
use super::lookup::bits_from;
use super::{ORDERED, Sink};

/// Shifted values, whatever the upper bits of the index.
const fn shifted<const N: usize>(values: [i8; N]) -> Table<64> {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = (values[i % N] as i32 + SHIFT) as u8;
        i += 1;
    }
    Table(table)
}

/// Whole numbers from `first` on.
const fn from<const N: usize>(first: i8) -> [i8; N] {
    let mut values = [0; N];
    let mut i = 0;
    while i < N {
        values[i] = first + i as i8;
        i += 1;
    }
    values
}

static IQ4: Table<64> = shifted(IQ4_NL_VALUES);
static MXFP4: Table<64> = shifted(MXFP4_VALUES);
static Q4_0: Table<64> = shifted(from::<16>(-8));
static Q4_1: Table<64> = shifted(from::<16>(0));
static Q5_0: Table<64> = shifted(from::<32>(-16));
static Q5_1: Table<64> = shifted(from::<32>(0));

/// 32 columns.
#[inline(always)]
fn look_up(values: &Table<64>, codes: &[Int]) -> [Int; 8] {
    let mut q = [zero(); 8];
    for s in 0..4 {
        q[s] = look(values.piece(0), codes[s]);
        q[4 + s] = look(values.piece(0), right(codes[s], 4));
    }
    q
}

/// What stands before the codes of a block of 32 weights.
#[derive(Clone, Copy, PartialEq)]
enum Head {
    /// A half.
    Scale,
    /// Two halves.
    ScaleAndOffset,
    /// The exponent of a power of two, doubled.
    Power,
}

impl Head {
    /// Its bytes.
    const fn len(self) -> usize {
        match self {
            Head::Scale => 2,
            Head::ScaleAndOffset => 4,
            Head::Power => 1,
        }
    }

    /// Hands the columns of the block at `at` to the sink.
    ///
    /// # Safety
    /// There must be a block in every row.
    #[inline(always)]
    unsafe fn put(self, rows: &Rows, at: usize, q: [Int; 8], sink: &mut impl Sink) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Head::Scale => sink.full(q, rows.halves(at), None),
                Head::Power => sink.full(q, half_power(rows.byte(at)), None),
                Head::ScaleAndOffset => {
                    let both = rows.word(at);
                    sink.full(q, half_to_float(both), Some(half_to_float(right(both, 16))));
                }
            }
        }
    }
}

/// Blocks of a head and 16 bytes of codes.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
unsafe fn four_bits(head: Head, values: &Table<64>, rows: &Rows, count: usize, sink: &mut impl Sink) {
    let len = head.len() + 16;
    for first in (0..count).step_by(4) {
        // SAFETY: inside the blocks.
        let codes = unsafe { four_blocks(rows, first, count, (len, head.len())) };
        for block in 0..(count - first).min(4) {
            let q = look_up(values, &codes[4 * block..][..4]);
            // SAFETY: there is a block.
            unsafe { head.put(rows, (first + block) * len, q, sink) };
        }
    }
}

/// The 16 bytes at `skip` of four blocks of `len` bytes; behind the last block, the last one again.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
unsafe fn four_blocks(rows: &Rows, first: usize, count: usize, (len, skip): (usize, usize)) -> [Int; 16] {
    let mut at = [0; 4];
    for block in 0..4 {
        at[block] = (first + block).min(count - 1) * len + skip;
    }
    // SAFETY: the caller's promise.
    unsafe { rows.four_pieces(at, &ORDERED) }
}

/// Blocks of a head, 32 fifth bits and 16 bytes of codes.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
unsafe fn five_bits(head: Head, values: &Table<64>, rows: &Rows, count: usize, sink: &mut impl Sink) {
    /// Brings the fifth bits of the columns of vector s to the fifth bits of bytes.
    const fn fifth(s: i32) -> Table<64> {
        let first = s / 4 * 16 + s % 4 - 4;
        bits_from([first, first + 8, first + 4, first + 12])
    }
    static FIFTH: [Table<64>; 8] =
        [fifth(0), fifth(1), fifth(2), fifth(3), fifth(4), fifth(5), fifth(6), fifth(7)];
    let len = head.len() + 20;
    for first in (0..count).step_by(4) {
        // SAFETY: inside the blocks.
        let codes = unsafe { four_blocks(rows, first, count, (len, head.len() + 4)) };
        for block in 0..(count - first).min(4) {
            let at = (first + block) * len;
            // SAFETY: there is a block.
            let bits = unsafe { rows.word(at + head.len()) };
            let mut q = [zero(); 8];
            for s in 0..8 {
                let code = codes[4 * block + s % 4];
                let code = if s < 4 { code } else { right(code, 4) };
                q[s] = look(values.piece(0), select(bytes(0x10), fields(bits, FIFTH[s].piece(0)), code));
            }
            // SAFETY: as above.
            unsafe { head.put(rows, at, q, sink) };
        }
    }
}

/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn q4_0(rows: &Rows, count: usize, sink: &mut impl Sink) {
    // SAFETY: the caller's promise.
    unsafe { four_bits(Head::Scale, &Q4_0, rows, count, sink) }
}

/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn q4_1(rows: &Rows, count: usize, sink: &mut impl Sink) {
    // SAFETY: the caller's promise.
    unsafe { four_bits(Head::ScaleAndOffset, &Q4_1, rows, count, sink) }
}

/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn q5_0(rows: &Rows, count: usize, sink: &mut impl Sink) {
    // SAFETY: the caller's promise.
    unsafe { five_bits(Head::Scale, &Q5_0, rows, count, sink) }
}

/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn q5_1(rows: &Rows, count: usize, sink: &mut impl Sink) {
    // SAFETY: the caller's promise.
    unsafe { five_bits(Head::ScaleAndOffset, &Q5_1, rows, count, sink) }
}

/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn iq4_nl(rows: &Rows, count: usize, sink: &mut impl Sink) {
    // SAFETY: the caller's promise.
    unsafe { four_bits(Head::Scale, &IQ4, rows, count, sink) }
}

/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn mxfp4(rows: &Rows, count: usize, sink: &mut impl Sink) {
    // SAFETY: the caller's promise.
    unsafe { four_bits(Head::Power, &MXFP4, rows, count, sink) }
}

/// 256 weights: a half; upper two bits of eight scales, then the lower four of each; for each run 16 bytes.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn iq4_xs(rows: &Rows, count: usize, sink: &mut impl Sink) {
    for at in (0..count).map(|block| block * 136) {
        // SAFETY: inside the block.
        let [head, low, ..] = unsafe { rows.four_words(at) };
        let d = half_to_float(head);
        for part in 0..2 {
            // SAFETY: inside the block.
            let codes = unsafe { rows.words(at + 8 + 64 * part, &ORDERED) };
            for run in 0..4 {
                let q = look_up(&IQ4, &codes[4 * run..][..4]);
                let run = (4 * part + run) as u32;
                let upper = right(head, 12 + 2 * run);
                let s = and_or(upper, words(0x30), and(right(low, 4 * run), words(15)));
                sink.full(q, times(d, sum(to_float(s), number(-32.0))), None);
            }
        }
    }
}
