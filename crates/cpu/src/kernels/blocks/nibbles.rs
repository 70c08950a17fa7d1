//! Weights of half a byte each: low half-bytes are 16 columns, the upper ones the next 16.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use quant::codebook::{IQ4_NL_VALUES, MXFP4_VALUES};

use super::super::int8::SHIFT;
use super::super::lanes::{
    Int, Rows, Table, and, and_or, bytes, fields, half_power, half_to_float, high_low, look, number, right,
    select, sum, times, to_float, words, zero,
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

    /// Hands on a block's weights with its scale and offset, from its first word.
    #[inline(always)]
    fn hand_on(self, first: Int, q: [Int; 8], sink: &mut impl Sink) {
        match self {
            Head::Scale => sink.full(q, half_to_float(first), []),
            Head::ScaleAndOffset => {
                sink.full(q, half_to_float(first), [half_to_float(right(first, 16))]);
            }
            Head::Power => sink.full(q, half_power(and(first, words(0xff))), []),
        }
    }
}

/// Blocks of a head and 16 bytes of codes.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
unsafe fn four_bits(head: Head, values: &Table<64>, rows: &Rows, count: usize, sink: &mut impl Sink) {
    for at in (0..count).map(|block| block * (head.len() + 16)) {
        // SAFETY: inside the block.
        let ([first, ..], codes) =
            unsafe { (rows.four_words(at), rows.ordered_words(at + head.len(), &ORDERED)) };
        head.hand_on(first, look_up(values, &codes), sink);
    }
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
    for at in (0..count).map(|block| block * (head.len() + 20)) {
        // SAFETY: inside the block.
        let ([first, second, ..], codes) =
            unsafe { (rows.four_words(at), rows.ordered_words(at + head.len() + 4, &ORDERED)) };
        let fifths = if head.len() == 4 { second } else { high_low(first, second) };
        let mut q = [zero(); 8];
        for s in 0..8 {
            let code = if s < 4 { codes[s] } else { right(codes[s - 4], 4) };
            let fifth = fields(fifths, FIFTH[s].piece(0));
            q[s] = look(values.piece(0), select(bytes(0x10), fifth, code));
        }
        head.hand_on(first, q, sink);
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
            let codes = unsafe { rows.words::<16>(at + 8 + 64 * part, &ORDERED) };
            for run in 0..4 {
                let q = look_up(&IQ4, &codes[4 * run..][..4]);
                let run = (4 * part + run) as u32;
                let upper = right(head, 12 + 2 * run);
                let s = and_or(upper, words(0x30), and(right(low, 4 * run), words(15)));
                sink.full(q, times(d, sum(to_float(s), number(-32.0))), []);
            }
        }
    }
}
