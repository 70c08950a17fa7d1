//! Blocks of 256 weights in runs with scales of four or six bits.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use super::super::lanes::{
    Float, Int, Rows, Table, affine, and, and_or, byte, bytes, half_byte, half_to_float, left, look_near,
    matrix, minus, moving, number, or, right, signed_byte, sum, times, times_halves, words, zero,
};
use super::{ORDERED, Sink};

/// The upper half of a byte, moved down.
const UPPER: u64 = moving(4, 4, 0);

/// 256 weights of four bits: two halves (scale and offset), eight scales and eight offsets of six bits each in
/// 12 bytes, then for every 64 weights 32 bytes, low half-bytes first.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn q4_k(rows: &Rows, count: usize, sink: &mut impl Sink) {
    for at in (0..count).map(|block| block * 144) {
        // SAFETY: inside the block.
        let scales = unsafe { Scales::new(rows, at) };
        for part in 0..2 {
            // SAFETY: inside the block.
            let codes = unsafe { rows.words::<16>(at + 16 + 64 * part, &ORDERED) };
            for run in 0..4 {
                let mut q = [zero(); 8];
                for s in 0..8 {
                    let code = codes[run / 2 * 8 + s];
                    q[s] = match run % 2 {
                        0 => and_or(code, bytes(15), bytes(0x80)),
                        _ => affine::<0x80>(code, UPPER),
                    };
                }
                let (scale, offset) = scales.run(part, run as u32);
                sink.full(q, scale, [offset]);
            }
        }
    }
}

/// As [`q4_k`], with the fifth bits of all weights in 32 bytes before the others: bit i of a byte is that of
/// run i.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn q5_k(rows: &Rows, count: usize, sink: &mut impl Sink) {
    const FIFTH: [u64; 8] = {
        let mut matrices = [0; 8];
        let mut run = 0;
        while run < 8 {
            matrices[run] = moving(1, run, 4);
            run += 1;
        }
        matrices
    };
    for at in (0..count).map(|block| block * 176) {
        // SAFETY: inside the block.
        let (scales, fifths) = unsafe { (Scales::new(rows, at), rows.words::<8>(at + 16, &ORDERED)) };
        for part in 0..2 {
            // SAFETY: inside the block.
            let codes = unsafe { rows.words::<16>(at + 48 + 64 * part, &ORDERED) };
            for run in 0..4 {
                let mut q = [zero(); 8];
                for s in 0..8 {
                    let (code, fifth) =
                        (codes[run / 2 * 8 + s], affine::<0x80>(fifths[s], FIFTH[4 * part + run]));
                    q[s] = match run % 2 {
                        0 => and_or(code, bytes(15), fifth),
                        _ => or(affine::<0>(code, UPPER), fifth),
                    };
                }
                let (scale, offset) = scales.run(part, run as u32);
                sink.full(q, scale, [offset]);
            }
        }
    }
}

/// Scales and offsets of [`q4_k`] and [`q5_k`].
struct Scales {
    d: Float,
    m: Float,
    /// Bytes of four runs each.
    scales: [Int; 2],
    offsets: [Int; 2],
}

impl Scales {
    /// # Safety
    /// There must be blocks at `at`.
    #[inline(always)]
    unsafe fn new(rows: &Rows, at: usize) -> Scales {
        // SAFETY: the caller's promise.
        let [both, a, b, c] = unsafe { rows.four_words(at) };
        let (low, high, four) = (words(0x3f3f_3f3f), words(0x3030_3030), words(0x0f0f_0f0f));
        Scales {
            d: half_to_float(both),
            m: minus(half_to_float(right(both, 16))),
            scales: [and(a, low), and_or(right(a, 2), high, and(c, four))],
            offsets: [and(b, low), and_or(right(b, 2), high, and(right(c, 4), four))],
        }
    }

    /// Those of a run of a half of the block.
    #[inline(always)]
    fn run(&self, part: usize, run: u32) -> (Float, Float) {
        (times(self.d, byte(self.scales[part], run)), times(self.m, byte(self.offsets[part], run)))
    }
}

/// 256 weights of six bits: for each half of the block 64 bytes of low half-bytes; then for each half 32 bytes
/// of upper bits, two for each run; 16 scales; a half.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn q6_k(rows: &Rows, count: usize, sink: &mut impl Sink) {
    // The weight less 32 plus 128: the sixth bit becomes the eighth or else the seventh and sixth.
    const HIGH: [u64; 4] = [high(0), high(2), high(4), high(6)];
    const fn high(from: usize) -> u64 {
        let (fifth, sixth) = (1 << from, 2 << from);
        matrix([0, 0, 0, 0, fifth, sixth, sixth, sixth])
    }
    for at in (0..count).map(|block| block * 210) {
        // SAFETY: inside the block.
        let (highs, scales, [.., last]) = unsafe {
            (rows.words::<16>(at + 128, &ORDERED), rows.four_words(at + 192), rows.four_words(at + 194))
        };
        let d = half_to_float(right(last, 16));
        for part in 0..2 {
            // SAFETY: inside the block.
            let lows = unsafe { rows.words::<16>(at + 64 * part, &ORDERED) };
            for run in 0..4 {
                let mut q = [zero(); 8];
                for s in 0..8 {
                    let low = lows[run % 2 * 8 + s];
                    let high = affine::<0x60>(highs[8 * part + s], HIGH[run]);
                    q[s] = match run / 2 {
                        0 => and_or(low, bytes(15), high),
                        _ => or(affine::<0>(low, UPPER), high),
                    };
                }
                let four = scales[2 * part + run / 2];
                let first = (run % 2 * 2) as u32;
                let scales = [times(d, signed_byte(four, first)), times(d, signed_byte(four, first + 1))];
                sink.halves(q, scales);
            }
        }
    }
}

/// Tables of two-bit numbers: four entries for each lane, in the four lanes of each quarter. An index is the number, plus
/// four times the lane in its quarter.
static LANES: Table<64> = {
    let mut lanes = [0; 64];
    let mut i = 0;
    while i < 64 {
        lanes[i] = (i / 4 % 4 * 4) as u8;
        i += 1;
    }
    Table(lanes)
};

/// For [`look_near`]: two bytes of every lane as its half-words.
const fn two_bytes(bytes: [u8; 2]) -> Table<64> {
    let mut index = [0x80; 64];
    let mut i = 0;
    while i < 64 {
        index[i] = (i / 4 % 4 * 4) as u8 + bytes[i / 2 % 2];
        i += 2;
    }
    Table(index)
}

/// A byte twice, by its number; and two neighbours, by half the number of the first.
static TWICE: [Table<64>; 4] = [two_bytes([0, 0]), two_bytes([1, 1]), two_bytes([2, 2]), two_bytes([3, 3])];
static NEIGHBOURS: [Table<64>; 2] = [two_bytes([0, 1]), two_bytes([2, 3])];

/// A run of weights of two bits, each half with a factor.
pub(in super::super) struct Factored<'a> {
    /// Eight vectors, of each byte two bits.
    codes: &'a [Int],
    /// Which two.
    pair: usize,
    /// Factors of the halves: the lower half-bytes of bytes `first` and `first + 1`.
    factors: Int,
    first: usize,
}

impl Factored<'_> {
    /// Weights times factors, shifted.
    #[inline(always)]
    pub(in super::super) fn products(&self) -> [Int; 8] {
        let mut q = [zero(); 8];
        for half in 0..2 {
            // 0, f, 2f and 3f, shifted.
            let factor = look_near(self.factors, TWICE[self.first + half].piece(0));
            let factor = and(factor, words(0x000f_000f));
            let table = or(times_halves(factor, words(0x0302_0100)), bytes(0x80));
            for s in 4 * half..4 * half + 4 {
                let bits = right(self.codes[s], 2 * self.pair as u32);
                q[s] = look_near(table, and_or(bits, bytes(3), LANES.piece(0)));
            }
        }
        q
    }

    /// Weights, and the factors of the first and second half in the lower and upper halves of words.
    #[inline(always)]
    pub(in super::super) fn parts(&self) -> ([Int; 8], Int) {
        let mut q = [zero(); 8];
        for s in 0..8 {
            q[s] = affine::<0>(self.codes[s], PAIR[self.pair]);
        }
        (q, and(look_near(self.factors, NEIGHBOURS[self.first / 2].piece(0)), words(0x000f_000f)))
    }
}

/// 256 weights of two bits: for every 16 of them four bits of scale and four of offset; 64 bytes, two bits of
/// each for a run; two halves (scale and offset).
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn q2_k(rows: &Rows, count: usize, sink: &mut impl Sink) {
    for at in (0..count).map(|block| block * 84) {
        // SAFETY: inside the block.
        let (scales, codes, [.., both]) =
            unsafe { (rows.four_words(at), rows.words::<16>(at + 16, &ORDERED), rows.four_words(at + 68)) };
        let (d, m) = (half_to_float(both), minus(half_to_float(right(both, 16))));
        for run in 0..8 {
            let (four, first) = (scales[run / 2], (run % 2 * 4) as u32);
            let offsets = [times(m, half_byte(four, first + 1)), times(m, half_byte(four, first + 3))];
            let codes = &codes[run / 4 * 8..][..8];
            let weights = Factored { codes, pair: run % 4, factors: four, first: run % 2 * 2 };
            sink.factored(&weights, d, offsets);
        }
    }
}

/// Two bits of a byte, moved down.
const PAIR: [u64; 4] = [moving(2, 0, 0), moving(2, 2, 0), moving(2, 4, 0), moving(2, 6, 0)];

/// 256 weights of three bits: 32 bytes of third bits, bit i for run i; 64 bytes, two bits of each for a run; 16
/// scales of six bits in 12 bytes; a half.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn q3_k(rows: &Rows, count: usize, sink: &mut impl Sink) {
    // The weight less 4 plus 128: the third bit becomes the eighth or else the five before.
    const fn third(run: usize) -> u64 {
        let bit = 1 << run;
        matrix([0, 0, bit, bit, bit, bit, bit, bit])
    }
    const THIRD: [u64; 8] = [third(0), third(1), third(2), third(3), third(4), third(5), third(6), third(7)];
    for at in (0..count).map(|block| block * 110) {
        // SAFETY: inside the block; scales and the half are its last 14 bytes.
        let (thirds, codes, [before, a, b, c]) = unsafe {
            (rows.words::<8>(at, &ORDERED), rows.words::<16>(at + 32, &ORDERED), rows.four_words(at + 94))
        };
        let d = half_to_float(right(c, 16));
        let a_word = or(right(before, 16), left(a, 16));
        let b_word = or(right(a, 16), left(b, 16));
        let high = or(right(b, 16), left(c, 16));
        let (four, two) = (words(0x0f0f_0f0f), words(0x3030_3030));
        let scales = [
            and_or(left(high, 4), two, and(a_word, four)),
            and_or(left(high, 2), two, and(b_word, four)),
            and_or(high, two, and(right(a_word, 4), four)),
            and_or(right(high, 2), two, and(right(b_word, 4), four)),
        ];
        for run in 0..8 {
            let mut q = [zero(); 8];
            for s in 0..8 {
                let third = affine::<0x7c>(thirds[s], THIRD[run]);
                q[s] = or(affine::<0>(codes[run / 4 * 8 + s], PAIR[run % 4]), third);
            }
            let (four, first) = (scales[run / 2], (run % 2 * 2) as u32);
            let less = number(-32.0);
            let scales = [times(d, sum(byte(four, first), less)), times(d, sum(byte(four, first + 1), less))];
            sink.halves(q, scales);
        }
    }
}
