//! Attention on integers of 16 bits.
//!
//! Query and key heads are rounded to integers with one scale each, so fine that a sum of products over a
//! head just fits 32 bits (2,895 steps for 256 dimensions: finer than half precision for all but small
//! numbers). Weights and values likewise, over the 64 positions of a block. So all sums of products are exact,
//! whatever is computed together.
//!
//! A block's softmax is its own: it is relative to the row's largest score in the block, and what is summed
//! before and in the block is joined by two factors. A weight is rounded after it took the scale of its
//! value, with one scale for the row and the block, so nothing depends on positions that the row does not see.
//!
//! Largest magnitudes are compared as bits, so that what is no number counts as the largest and spoils the
//! result instead of being lost.

use half::f16;
use half::slice::HalfFloatSliceExt;
use model::GRID;

use super::rows::exp;
use super::simd::Simd;

/// Columns of a tile of values; heads are padded with zeros to a multiple of it.
pub(crate) const TILE: usize = 64;

/// Dimensions of the widest head.
pub(crate) const WIDEST: usize = 512;

/// Largest rounded weight and value: their products, summed over a block, just fit 32 bits.
pub(super) const WEIGHT_STEPS: f32 = 8191.0;
pub(super) const VALUE_STEPS: f32 = 4095.0;

/// The functions of attention on integers.
pub(crate) struct IntAttention {
    /// Whether they are faster than single precision.
    pub(crate) is_fast: bool,
    /// A query head to integers, padded with zeros; returns its scale.
    pub(crate) round: fn(&[f32], &mut [i16]) -> f32,
    /// Rounds keys and values, [positions][dim] each.
    pub(crate) pack: fn(&[f16], &[f16], usize, &mut Block),
    /// Softmax of the block for every row: queries are [rows][width], weights become [rows][GRID].
    pub(crate) weigh: fn(&Block, &[i16], &mut [Row], &mut [i16]),
    /// Joins the block to the outputs, [rows][width]: out ← out · factor + factor · Σ weight · value.
    pub(crate) sum: fn(&Block, &[Row], &[i16], &mut [f32]),
}

/// Keys and values of up to [`GRID`] positions, rounded.
pub(crate) struct Block<'a> {
    /// Dimensions of a head, padded.
    pub(super) width: usize,
    /// Positions used; everything of those beyond is zero.
    pub(super) positions: usize,
    /// [width / 2][GRID][2]: two dimensions of every position.
    pub(super) keys: &'a mut [i16],
    /// [tiles][GRID / 2][TILE][2]: two positions of every column.
    pub(super) values: &'a mut [i16],
    /// What keys are multiplied by.
    pub(super) key_scales: [f32; GRID],
    /// What values are multiplied by.
    pub(super) value_scales: [f32; GRID],
}

impl<'a> Block<'a> {
    /// One for heads of `width` dimensions, in memory for GRID · `width` keys and as many values.
    pub(crate) fn new(width: usize, keys: &'a mut [i16], values: &'a mut [i16]) -> Block<'a> {
        assert!(width.is_multiple_of(TILE) && width <= WIDEST);
        assert!(keys.len() == GRID * width && values.len() == GRID * width);
        let none = [0.0; GRID];
        Block { width, positions: 0, keys, values, key_scales: none, value_scales: none }
    }

    /// Notes how many positions there are, before they are packed.
    pub(super) fn begin(&mut self, keys: &[f16], values: &[f16], dim: usize) {
        self.positions = keys.len() / dim;
        assert!(dim <= self.width && (1..=GRID).contains(&self.positions) && values.len() == keys.len());
        (self.key_scales, self.value_scales) = ([0.0; GRID], [0.0; GRID]);
    }
}

/// A query head of a row on its way through the blocks.
#[derive(Clone, Copy, Default)]
pub(crate) struct Row {
    /// What scores are multiplied by: the scale of the query, and that of the softmax.
    pub(super) scale: f32,
    /// The largest score so far, −∞ at first.
    pub(super) largest: f32,
    /// The sum of e^(score − largest).
    pub(crate) sum: f32,
    /// Positions of the block that it sees, at least one.
    pub(crate) seen: usize,
    /// What the output so far is multiplied by, and the block's part of it.
    pub(super) factors: [f32; 2],
}

impl Row {
    /// One that has seen nothing.
    pub(crate) fn new(scale: f32) -> Row {
        Row { scale, largest: f32::NEG_INFINITY, ..Row::default() }
    }

    /// Joins a block: its largest score, its sum relative to that, the scale of its weights.
    #[inline(always)]
    pub(super) fn join<S: Simd>(&mut self, most: f32, sum: f32, scale: f32) {
        let new = if most <= self.largest { self.largest } else { most };
        let (before, part) = (exp::<S>(self.largest - new), exp::<S>(most - new));
        self.factors = [before, part * scale];
        self.sum = self.sum * before + sum * part;
        self.largest = new;
    }
}

/// Steps of queries and keys.
pub(super) fn key_steps(width: usize) -> f32 {
    (i32::MAX as f32 / width as f32).sqrt().floor().min(32_000.0) - 1.0
}

/// The scale of numbers of a largest magnitude, and the factor that makes them integers.
#[inline(always)]
pub(super) fn scale(largest: f32, steps: f32) -> (f32, f32) {
    // Below that the factor might overflow; nothing in a model is as small.
    let factor = if largest < 1e-30 { 0.0 } else { steps / largest };
    (largest / steps, factor)
}

/// As [`IntAttention::round`].
#[inline(always)]
pub(super) fn round(x: &[f32], out: &mut [i16]) -> f32 {
    let steps = key_steps(out.len());
    round_to(x, steps, out)
}

#[inline(always)]
fn round_to(x: &[f32], steps: f32, out: &mut [i16]) -> f32 {
    let bits = x.iter().map(|x| x.to_bits() & 0x7fff_ffff).max();
    let (scale, factor) = scale(f32::from_bits(bits.unwrap_or(0)), steps);
    out.fill(0);
    out.iter_mut().zip(x).for_each(|(to, x)| *to = (x * factor).round_ties_even() as i16);
    scale
}

/// As [`IntAttention::pack`].
#[inline(always)]
pub(super) fn pack(keys: &[f16], values: &[f16], dim: usize, block: &mut Block) {
    block.begin(keys, values, dim);
    block.keys.fill(0);
    block.values.fill(0);
    let (mut numbers, mut rounded) = ([0.0; WIDEST], [0; WIDEST]);
    let (numbers, rounded, width) = (&mut numbers[..dim], &mut rounded[..block.width], block.width);
    for (at, (key, value)) in keys.chunks_exact(dim).zip(values.chunks_exact(dim)).enumerate() {
        key.convert_to_f32_slice(numbers);
        block.key_scales[at] = round_to(numbers, key_steps(width), rounded);
        for (i, &x) in rounded.iter().enumerate() {
            block.keys[(i / 2 * GRID + at) * 2 + i % 2] = x;
        }
        value.convert_to_f32_slice(numbers);
        block.value_scales[at] = round_to(numbers, VALUE_STEPS, rounded);
        for (i, &x) in rounded.iter().enumerate() {
            block.values[((i / TILE * GRID / 2 + at / 2) * TILE + i % TILE) * 2 + at % 2] = x;
        }
    }
}

/// As [`IntAttention::weigh`].
#[inline(always)]
pub(super) fn weigh<S: Simd>(block: &Block, queries: &[i16], rows: &mut [Row], weights: &mut [i16]) {
    let pairs = queries.chunks_exact(block.width).zip(weights.chunks_exact_mut(GRID));
    for (row, (query, weights)) in rows.iter_mut().zip(pairs) {
        let mut scores = [f32::NEG_INFINITY; GRID];
        for (at, score) in scores[..row.seen].iter_mut().enumerate() {
            let key = |i: usize| i32::from(block.keys[(i / 2 * GRID + at) * 2 + i % 2]);
            let product: i32 = query.iter().enumerate().map(|(i, &q)| i32::from(q) * key(i)).sum();
            *score = product as f32 * (block.key_scales[at] * row.scale);
        }
        let most = scores.iter().fold(f32::NEG_INFINITY, |most, &s| if s <= most { most } else { s });
        let (mut sum, mut scaled) = (0.0, [0.0; GRID]);
        for ((score, scale), to) in scores[..row.seen].iter().zip(&block.value_scales).zip(&mut scaled) {
            let e = exp::<S>(score - most);
            sum += e;
            *to = e * scale;
        }
        let scale = round_to(&scaled, WEIGHT_STEPS, weights);
        row.join::<S>(most, sum, scale);
    }
}

/// As [`IntAttention::sum`].
#[inline(always)]
pub(super) fn sum<S: Simd>(block: &Block, rows: &[Row], weights: &[i16], out: &mut [f32]) {
    let pairs = weights.chunks_exact(GRID).zip(out.chunks_exact_mut(block.width));
    for (row, (weights, out)) in rows.iter().zip(pairs) {
        let [before, part] = row.factors;
        for (i, out) in out.iter_mut().enumerate() {
            let value = |at: usize| {
                i32::from(block.values[((i / TILE * GRID / 2 + at / 2) * TILE + i % TILE) * 2 + at % 2])
            };
            let sum: i32 = weights.iter().enumerate().map(|(at, &w)| i32::from(w) * value(at)).sum();
            *out = S::fma1(sum as f32, part, *out * before);
        }
    }
}

#[cfg(test)]
mod tests;
