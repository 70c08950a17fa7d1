//! IQ1_M: weights are `scale · (row of a codebook of -1, 0, 1, plus or minus ⅛)`.
//!
//! Going through all 2048 rows with both offsets would be slow. A group is rounded to -1, 0, 1 at three scales
//! for each offset, and for every such pattern a list names the rows nearest to it; the rows of these six lists
//! are searched like a small codebook of the group's own.

use std::ops::Range;
use std::sync::LazyLock;

use super::block::{Block, dot};
use super::envelope::{Book, Envelopes, LANES};
use super::levels::{Levels, Plan, choose, free_scale};
use crate::codebook::{IQ1_DELTA, IQ1_GRID};

/// What the levels multiply the scale by.
const MULTIPLIERS: [f32; 8] = [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0];

/// First tries of the super-block's scale: the largest free scale over these.
const DIVISORS: [f32; 8] = [15.0, 14.5, 14.0, 13.4, 12.8, 12.2, 11.5, 15.5];

/// Patterns of eight values of -1, 0, 1.
const PATTERNS: usize = 6561;

/// Scales at which a group is rounded, as shares of the root mean square of its sub-block; the last is raised
/// to a share of the largest magnitude.
const SHARES: [f32; 3] = [0.9, 1.3, 1.8];
const PEAK_SHARE: f32 = 0.75;

/// 256 weights in 16 sub-blocks of two groups: low 8 bits of 32 rows, their high 3 bits with the sign of the
/// offset, then four words with levels of 3 bits and, in their upper four bits, the scale.
pub(super) fn iq1_m(block: &Block<256>) -> [u8; 56] {
    let groups = Groups::new(block);
    let (x, w) = (block.x.as_chunks::<16>().0, block.w.as_chunks::<16>().0);
    let fit =
        |j: usize, s: f32| groups.envelopes.at(2 * j, s).fit(s) + groups.envelopes.at(2 * j + 1, s).fit(s);
    let free: [f32; 16] = std::array::from_fn(|j| free_scale(&scales(&x[j], &w[j]), |s| fit(j, s)));
    let plan = Plan { multipliers: &MULTIPLIERS, divisors: &DIVISORS, reach: 2 };
    let levels: Levels<16> = choose(block, &plan, &free, fit);

    let mut bytes = [0; 56];
    for i in 0..32 {
        let s = levels.d * MULTIPLIERS[levels.index[i / 2]];
        let candidate = groups.candidates[i][usize::from(groups.envelopes.at(i, s).row)];
        bytes[i] = candidate.row as u8;
        let high = (candidate.row >> 8) as u8 | u8::from(candidate.negative) << 3;
        bytes[32 + i / 2] |= high << (4 * (i % 2));
    }
    for (k, index) in levels.index.as_chunks::<4>().0.iter().enumerate() {
        let scale = levels.stored.to_bits() >> (4 * k) & 15;
        let word = index.iter().rev().fold(scale, |word, &index| word << 3 | index as u16);
        bytes[48 + 2 * k..50 + 2 * k].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// A row and the sign of the offset.
#[derive(Clone, Copy)]
struct Candidate {
    row: u16,
    negative: bool,
}

/// The groups of a super-block, each with the rows that come into question and their envelope.
struct Groups {
    envelopes: Envelopes,
    candidates: Vec<Vec<Candidate>>,
}

impl Groups {
    fn new(block: &Block<256>) -> Self {
        let (mut envelopes, mut candidates) = (Envelopes::default(), Vec::with_capacity(32));
        let floor = 0.05 * scales(&block.x, &block.w).end;
        for (x, w) in block.x.as_chunks::<16>().0.iter().zip(block.w.as_chunks::<16>().0) {
            let range = scales(x, w);
            let at = SHARES.map(|share| share * root_mean_square(x, w));
            let at = [at[0], at[1], at[2].max(PEAK_SHARE * range.end)];
            for (x, w) in x.as_chunks::<8>().0.iter().zip(w.as_chunks::<8>().0) {
                let (book, listed) = near(x, &at);
                envelopes.measure(&book, &std::array::from_fn(|i| w[i] * x[i]), w);
                envelopes.push(&(range.start..range.end.max(floor)), false);
                candidates.push(listed);
            }
        }
        Self { envelopes, candidates }
    }
}

fn root_mean_square<const N: usize>(x: &[f32; N], w: &[f32; N]) -> f32 {
    let wx = std::array::from_fn(|i| w[i] * x[i]);
    (dot(&wx, x) / w.iter().sum::<f32>()).sqrt()
}

/// The scales that may suit some weights: from a share of the root mean square to the largest magnitude.
fn scales<const N: usize>(x: &[f32; N], w: &[f32; N]) -> Range<f32> {
    let peak = x.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
    0.6 * root_mean_square(x, w)..peak
}

/// The rows near a group when it is rounded at each of these scales, with either offset.
fn near(x: &[f32; 8], scales: &[f32; 3]) -> (Book<8>, Vec<Candidate>) {
    let mut listed = Vec::with_capacity(6 * LANES);
    for s in scales {
        let inverse = if *s == 0.0 { 0.0 } else { 1.0 / s };
        for negative in [false, true] {
            let offset = if negative { -IQ1_DELTA } else { IQ1_DELTA };
            let list = &NEAREST[pattern(&x.map(|x| nearest(x * inverse - offset)))];
            listed.extend(list.iter().map(|&row| Candidate { row, negative }));
        }
    }
    let values = listed.iter().map(|candidate| {
        let offset = if candidate.negative { -IQ1_DELTA } else { IQ1_DELTA };
        IQ1_GRID[usize::from(candidate.row)].map(|g| f32::from(g) + offset)
    });
    (Book::new(values), listed)
}

/// -1, 0 or 1.
fn nearest(v: f32) -> i8 {
    i8::from(v > 0.5) - i8::from(v < -0.5)
}

/// The number of a pattern.
fn pattern(values: &[i8; 8]) -> usize {
    values.iter().fold(0, |number, &v| 3 * number + (v + 1) as usize)
}

/// For every pattern the nearest rows.
static NEAREST: LazyLock<Vec<[u16; LANES]>> = LazyLock::new(|| (0..PATTERNS).map(nearest_rows).collect());

fn nearest_rows(number: usize) -> [u16; LANES] {
    let wanted = Ternary::new(&std::array::from_fn(|i| (number / 3usize.pow(7 - i as u32) % 3) as i8 - 1));
    let mut by_distance: [Vec<u16>; 33] = std::array::from_fn(|_| Vec::new());
    for (row, values) in GRID_BITS.iter().enumerate() {
        by_distance[wanted.distance(values)].push(row as u16);
    }
    let mut nearest = by_distance.into_iter().flatten();
    std::array::from_fn(|_| nearest.next().expect("there are more rows than a list holds"))
}

static GRID_BITS: LazyLock<Vec<Ternary>> = LazyLock::new(|| IQ1_GRID.iter().map(Ternary::new).collect());

/// Eight values of -1, 0, 1 as two sets of bits.
struct Ternary {
    positive: u8,
    negative: u8,
}

impl Ternary {
    fn new(values: &[i8; 8]) -> Self {
        let bits = |value: i8| values.iter().enumerate().fold(0, |b, (i, &v)| b | u8::from(v == value) << i);
        Self { positive: bits(1), negative: bits(-1) }
    }

    /// The squared distance.
    fn distance(&self, other: &Self) -> usize {
        let opposite = self.positive & other.negative | self.negative & other.positive;
        let one_zero = (self.positive | self.negative) ^ (other.positive | other.negative);
        (4 * opposite.count_ones() + one_zero.count_ones()) as usize
    }
}
