//! Formats whose weights are `scale · sign · row of a codebook`: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.
//!
//! Scale, rows and signs are searched together: [`envelope`](super::envelope) has the best row for every
//! scale. Three of the formats store seven signs for eight weights and make the number of negative ones even.
//! Where the weights have an odd number, one sign is stored wrong; what that costs depends on the row, so it is
//! part of the row's line.

use std::ops::Range;
use std::sync::LazyLock;

use super::block::Block;
use super::envelope::{Book, Envelopes, Line};
use super::levels::{Fit, Levels, Plan, choose, free_scale};
use crate::codebook::{IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID};

/// What the search has to know of a format.
struct Format<const D: usize> {
    book: LazyLock<Book<D>>,
    /// The smallest and largest value in the codebook.
    smallest: f32,
    largest: f32,
    /// Whether the number of negative weights in eight must be even.
    even: bool,
    /// What the levels multiply the scale by.
    multipliers: [f32; 16],
}

static IQ2_XXS: Format<8> = Format {
    book: LazyLock::new(|| Book::new(IQ2_XXS_GRID.iter().map(|row| row.map(f32::from)))),
    smallest: 8.0,
    largest: 43.0,
    even: true,
    multipliers: half_steps(0.25),
};

static IQ2_XS: Format<8> = Format {
    book: LazyLock::new(|| Book::new(IQ2_XS_GRID.iter().map(|row| row.map(f32::from)))),
    smallest: 8.0,
    largest: 43.0,
    even: true,
    multipliers: half_steps(0.25),
};

static IQ2_S: Format<8> = Format {
    book: LazyLock::new(|| Book::new(IQ2_S_GRID.iter().map(|row| row.map(f32::from)))),
    smallest: 8.0,
    largest: 43.0,
    even: false,
    multipliers: half_steps(0.25),
};

static IQ3_XXS: Format<4> = Format {
    book: LazyLock::new(|| Book::new(IQ3_XXS_GRID.iter().map(|row| row.map(f32::from)))),
    smallest: 4.0,
    largest: 62.0,
    even: true,
    multipliers: half_steps(0.5),
};

static IQ3_S: Format<4> = Format {
    book: LazyLock::new(|| Book::new(IQ3_S_GRID.iter().map(|row| row.map(f32::from)))),
    smallest: 1.0,
    largest: 15.0,
    even: false,
    multipliers: half_steps(2.0),
};

/// Multipliers of a level l of 4 bits: `(l + ½) · step`.
const fn half_steps(step: f32) -> [f32; 16] {
    let mut values = [0.0; 16];
    let mut l = 0;
    while l < 16 {
        values[l] = (l as f32 + 0.5) * step;
        l += 1;
    }
    values
}

/// Levels tried on either side of the free scale of a sub-block.
const REACH: usize = 2;

/// First tries of the super-block's scale: the largest free scale takes about these levels.
const TRIES: [f32; 10] = [15.5, 15.1, 14.6, 14.1, 13.6, 13.1, 12.5, 11.5, 10.5, 16.0];

/// 256 weights in 8 sub-blocks: scale, then for each sub-block 4 rows of 8 bits, 4 × 7 signs, level of 4 bits.
pub(super) fn iq2_xxs(block: &Block<256>) -> [u8; 66] {
    let groups = Eights::new(block, &IQ2_XXS);
    let levels: Levels<8> = search(block, &IQ2_XXS, |i, s| groups.fit(i, s));
    let mut bytes = [0; 66];
    bytes[..2].copy_from_slice(&levels.stored.to_le_bytes());
    for (j, (&index, bytes)) in levels.index.iter().zip(bytes[2..].as_chunks_mut::<8>().0).enumerate() {
        let mut word = (index as u32) << 28;
        for (l, byte) in bytes[..4].iter_mut().enumerate() {
            let (row, signs) = groups.chosen(4 * j + l, levels.d * IQ2_XXS.multipliers[index]);
            *byte = row as u8;
            word |= u32::from(signs & 127) << (7 * l);
        }
        bytes[4..].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// 256 weights in 16 sub-blocks: scale, 32 × (row of 9 bits, 7 signs), levels of 4 bits.
pub(super) fn iq2_xs(block: &Block<256>) -> [u8; 74] {
    let groups = Eights::new(block, &IQ2_XS);
    let levels: Levels<16> = search(block, &IQ2_XS, |i, s| groups.fit(i, s));
    let mut bytes = [0; 74];
    bytes[..2].copy_from_slice(&levels.stored.to_le_bytes());
    for (j, &index) in levels.index.iter().enumerate() {
        for i in [2 * j, 2 * j + 1] {
            let (row, signs) = groups.chosen(i, levels.d * IQ2_XS.multipliers[index]);
            let word = row | u16::from(signs & 127) << 9;
            bytes[2 + 2 * i..4 + 2 * i].copy_from_slice(&word.to_le_bytes());
        }
        bytes[66 + j / 2] |= (index as u8) << (4 * (j % 2));
    }
    bytes
}

/// 256 weights in 16 sub-blocks: scale, 32 rows (low 8 bits), 32 × 8 signs, high 2 bits of the rows, levels of
/// 4 bits.
pub(super) fn iq2_s(block: &Block<256>) -> [u8; 82] {
    let groups = Eights::new(block, &IQ2_S);
    let levels: Levels<16> = search(block, &IQ2_S, |i, s| groups.fit(i, s));
    let mut bytes = [0; 82];
    bytes[..2].copy_from_slice(&levels.stored.to_le_bytes());
    for (j, &index) in levels.index.iter().enumerate() {
        for i in [2 * j, 2 * j + 1] {
            let (row, signs) = groups.chosen(i, levels.d * IQ2_S.multipliers[index]);
            bytes[2 + i] = row as u8;
            bytes[34 + i] = signs;
            bytes[66 + i / 4] |= ((row >> 8) as u8) << (2 * (i % 4));
        }
        bytes[74 + j / 2] |= (index as u8) << (4 * (j % 2));
    }
    bytes
}

/// 256 weights in 8 sub-blocks: scale, 64 rows of 8 bits, then for each sub-block 4 × 7 signs and a level of 4
/// bits.
pub(super) fn iq3_xxs(block: &Block<256>) -> [u8; 98] {
    let groups = Fours::new(block, &IQ3_XXS);
    let levels: Levels<8> = search(block, &IQ3_XXS, |i, s| groups.fit(i, s));
    let mut bytes = [0; 98];
    bytes[..2].copy_from_slice(&levels.stored.to_le_bytes());
    for (j, &index) in levels.index.iter().enumerate() {
        let mut word = (index as u32) << 28;
        for l in 0..4 {
            let i = 4 * j + l;
            let (rows, signs) = groups.chosen(i, levels.d * IQ3_XXS.multipliers[index]);
            bytes[2 + 2 * i..4 + 2 * i].copy_from_slice(&rows.map(|row| row as u8));
            word |= u32::from(signs & 127) << (7 * l);
        }
        bytes[66 + 4 * j..70 + 4 * j].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// 256 weights in 8 sub-blocks: scale, 64 rows (low 8 bits), their high bits, 32 × 8 signs, levels of 4 bits.
pub(super) fn iq3_s(block: &Block<256>) -> [u8; 110] {
    let groups = Fours::new(block, &IQ3_S);
    let levels: Levels<8> = search(block, &IQ3_S, |i, s| groups.fit(i, s));
    let mut bytes = [0; 110];
    bytes[..2].copy_from_slice(&levels.stored.to_le_bytes());
    for i in 0..32 {
        let (rows, signs) = groups.chosen(i, levels.d * IQ3_S.multipliers[levels.index[i / 4]]);
        for (k, row) in rows.into_iter().enumerate() {
            bytes[2 + 2 * i + k] = row as u8;
            bytes[66 + i / 4] |= ((row >> 8) as u8) << (2 * (i % 4) + k);
        }
        bytes[74 + i] = signs;
    }
    for (j, &index) in levels.index.iter().enumerate() {
        bytes[106 + j / 2] |= (index as u8) << (4 * (j % 2));
    }
    bytes
}

/// Scale and levels of a super-block. `fit(i, s)` are eight weights, the i-th of 32 groups, at scale `s`.
fn search<const S: usize, const D: usize>(
    block: &Block<256>,
    format: &Format<D>,
    fit: impl Fn(usize, f32) -> Fit,
) -> Levels<S> {
    let sub_block =
        |j: usize, s: f32| (32 / S * j..32 / S * (j + 1)).map(|i| fit(i, s)).fold(Fit::NOTHING, |a, b| a + b);
    let free = std::array::from_fn(|j| {
        let x = &block.x[256 / S * j..256 / S * (j + 1)];
        free_scale(&format.scales(x), |s| sub_block(j, s))
    });
    // Tries count levels; the step between two of them depends on the format.
    let step = format.multipliers[1] - format.multipliers[0];
    let divisors = TRIES.map(|level| step * level);
    let plan = Plan { multipliers: &format.multipliers, divisors: &divisors, reach: REACH };
    choose(block, &plan, &free, sub_block)
}

impl<const D: usize> Format<D> {
    /// The scales that may suit some weights: around the one that makes the largest value of the codebook the
    /// largest magnitude. Empty for zeros.
    fn scales(&self, x: &[f32]) -> Range<f32> {
        let peak = x.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
        let squares = x.iter().map(|x| x * x).sum::<f32>();
        // Where all magnitudes are about the same, small values of the codebook may serve them all.
        let flat = 2.0 * squares > peak * peak * x.len() as f32;
        let largest = if flat { 1.05 / self.smallest } else { 1.7 / self.largest };
        0.4 * peak / self.largest..largest * peak
    }

    /// The scales that matter to group `i` of eight: those of the 32 weights it belongs to, and up to the
    /// smallest that a sub-block can have beside the others of its super-block.
    fn group_scales(&self, block: &Block<256>, i: usize) -> Range<f32> {
        let Range { start, end } = self.scales(&block.x[i / 4 * 32..][..32]);
        start..end.max(0.04 * self.scales(&block.x).end)
    }
}

/// Groups of eight weights in a codebook of rows of eight.
struct Eights<'a> {
    block: &'a Block<256>,
    format: &'a Format<8>,
    envelopes: Envelopes,
}

impl<'a> Eights<'a> {
    fn new(block: &'a Block<256>, format: &'a Format<8>) -> Self {
        let mut envelopes = Envelopes::default();
        for (i, (x, w)) in block.x.as_chunks().0.iter().zip(block.w.as_chunks().0).enumerate() {
            envelopes.measure(&format.book, &magnitudes(x, w), w);
            envelopes.push(&format.group_scales(block, i), format.even && is_odd(x));
        }
        Self { block, format, envelopes }
    }

    fn fit(&self, i: usize, s: f32) -> Fit {
        self.envelopes.at(i, s).fit(s)
    }

    /// Row and signs of group `i` at scale `s`.
    fn chosen(&self, i: usize, s: f32) -> (u16, u8) {
        let (x, w) = (&self.block.x.as_chunks().0[i], &self.block.w.as_chunks().0[i]);
        let row = self.envelopes.at(i, s).row;
        let flip = self.format.even && is_odd(x);
        let wrong = cheapest_sign(&magnitudes(x, w), &self.format.book.row(row.into()));
        (row, signs(x) ^ u8::from(flip) << wrong)
    }
}

/// Groups of eight weights in a codebook of rows of four: two rows share the signs.
struct Fours<'a> {
    block: &'a Block<256>,
    format: &'a Format<4>,
    /// For each group the envelopes of its two rows without and, if one sign must be wrong, with the wrong
    /// sign in it.
    envelopes: Envelopes,
    /// The first envelope of each group.
    first: [usize; 32],
}

impl<'a> Fours<'a> {
    fn new(block: &'a Block<256>, format: &'a Format<4>) -> Self {
        let (mut envelopes, mut first) = (Envelopes::default(), [0; 32]);
        for (i, (x, w)) in block.x.as_chunks::<8>().0.iter().zip(block.w.as_chunks::<8>().0).enumerate() {
            first[i] = envelopes.len();
            let range = format.group_scales(block, i);
            for (x4, w4) in x.as_chunks().0.iter().zip(w.as_chunks().0) {
                envelopes.measure(&format.book, &magnitudes(x4, w4), w4);
                envelopes.push(&range, false);
                if format.even && is_odd(x) {
                    envelopes.push(&range, true);
                }
            }
        }
        Self { block, format, envelopes, first }
    }

    /// The lines of the two rows of group `i` at scale `s`, and which of them, if any, has the wrong sign.
    fn lines(&self, i: usize, s: f32) -> ([Line; 2], Option<usize>) {
        let at = |k: usize| *self.envelopes.at(self.first[i] + k, s);
        if !(self.format.even && is_odd(&self.block.x.as_chunks().0[i])) {
            return ([at(0), at(1)], None);
        }
        let [left, left_wrong, right, right_wrong] = std::array::from_fn(at);
        if left_wrong.fit(s).cost + right.fit(s).cost <= left.fit(s).cost + right_wrong.fit(s).cost {
            ([left_wrong, right], Some(0))
        } else {
            ([left, right_wrong], Some(1))
        }
    }

    fn fit(&self, i: usize, s: f32) -> Fit {
        let ([left, right], _) = self.lines(i, s);
        left.fit(s) + right.fit(s)
    }

    /// Both rows and the signs of group `i` at scale `s`.
    fn chosen(&self, i: usize, s: f32) -> ([u16; 2], u8) {
        let (x, w) = (&self.block.x.as_chunks::<8>().0[i], &self.block.w.as_chunks::<8>().0[i]);
        let (lines, wrong) = self.lines(i, s);
        let rows = lines.map(|line| line.row);
        let mut signs = signs(x);
        if let Some(half) = wrong {
            let a = magnitudes(&x.as_chunks::<4>().0[half], &w.as_chunks::<4>().0[half]);
            let at = cheapest_sign(&a, &self.format.book.row(rows[half].into()));
            signs ^= 1 << (4 * half + at);
        }
        (rows, signs)
    }
}

/// w·|x|
fn magnitudes<const D: usize>(x: &[f32; D], w: &[f32; D]) -> [f32; D] {
    std::array::from_fn(|i| w[i] * x[i].abs())
}

/// The weight whose wrong sign costs least in `row`.
fn cheapest_sign<const D: usize>(a: &[f32; D], row: &[f32; D]) -> usize {
    (1..D).fold(0, |best, i| if a[i] * row[i] < a[best] * row[best] { i } else { best })
}

/// Bit i set: weight i is negative.
fn signs(x: &[f32; 8]) -> u8 {
    x.iter().enumerate().fold(0, |signs, (i, &x)| signs | u8::from(x < 0.0) << i)
}

fn is_odd(x: &[f32; 8]) -> bool {
    signs(x).count_ones() % 2 == 1
}
