//! Formats whose weights are `scale · code`: Q8_0, Q6_K, Q3_K with whole codes, IQ4_NL and IQ4_XS with a table
//! of sixteen.

use super::block::{Block, dot, round};
use super::levels::{Fit, Levels, Plan, choose, spaced, whole};
use crate::codebook::IQ4_NL_VALUES;

/// 32 weights: scale, 32 codes of 8 bits.
pub(super) fn q8_0(block: &Block<32>) -> [u8; 34] {
    let nearest = |v| round(v, -127.0, 127.0);
    let levels = single(block, &spaced::<5>(126.0, 0.5), nearest);
    let mut bytes = [0; 34];
    bytes[..2].copy_from_slice(&levels.stored.to_le_bytes());
    for (byte, q) in bytes[2..].iter_mut().zip(codes(&block.x, levels.d, nearest)) {
        *byte = (q as i8) as u8;
    }
    bytes
}

/// 32 weights: scale, 32 indices of 4 bits (the first sixteen in the low halves).
pub(super) fn iq4_nl(block: &Block<32>) -> [u8; 18] {
    let levels = single(block, &IQ4_DIVISORS, nearest_iq4);
    let mut bytes = [0; 18];
    bytes[..2].copy_from_slice(&levels.stored.to_le_bytes());
    pack_iq4(&block.x, levels.d, &mut bytes[2..]);
    bytes
}

/// 256 weights in 8 sub-blocks: scale, levels of 6 bits (the high 2 bits of all first), indices of 4 bits.
pub(super) fn iq4_xs(block: &Block<256>) -> [u8; 136] {
    const LEVELS: [f32; 64] = whole(-32);
    let plan = Plan { multipliers: &LEVELS, divisors: &[-32.0, -31.0, -30.0, -28.5, 31.0], reach: 1 };
    let levels = search::<32, 8>(block, &plan, &IQ4_DIVISORS, nearest_iq4);

    let mut bytes = [0; 136];
    bytes[..2].copy_from_slice(&levels.stored.to_le_bytes());
    let (x, _) = block.x.as_chunks::<32>();
    for (j, (&index, x)) in levels.index.iter().zip(x).enumerate() {
        bytes[2 + j / 4] |= (index as u8 >> 4) << (2 * (j % 4));
        bytes[4 + j / 2] |= (index as u8 & 15) << (4 * (j % 2));
        pack_iq4(x, levels.d * LEVELS[index], &mut bytes[8 + 16 * j..24 + 16 * j]);
    }
    bytes
}

/// 256 weights in 16 sub-blocks: codes of 6 bits (low 4, then high 2), levels of 8 bits, scale.
pub(super) fn q6_k(block: &Block<256>) -> [u8; 210] {
    const LEVELS: [f32; 256] = whole(-128);
    const FREE: [f32; 20] = both_signs(spaced::<10>(29.5, 0.4));
    let nearest = |v| round(v, -32.0, 31.0);
    let plan = Plan { multipliers: &LEVELS, divisors: &[-128.0, 127.0, -125.0], reach: 1 };
    let levels = search::<16, 16>(block, &plan, &FREE, nearest);

    let q = all_codes(block, &levels, &LEVELS, nearest).map(|q| (q + 32.0) as u8);
    let mut bytes = [0; 210];
    for (half, q) in q.as_chunks::<128>().0.iter().enumerate() {
        for l in 0..32 {
            let quarters = [q[l], q[l + 32], q[l + 64], q[l + 96]];
            bytes[64 * half + l] = quarters[0] & 15 | quarters[2] << 4;
            bytes[64 * half + 32 + l] = quarters[1] & 15 | quarters[3] << 4;
            bytes[128 + 32 * half + l] = high_bits(quarters);
        }
    }
    for (byte, &index) in bytes[192..208].iter_mut().zip(&levels.index) {
        *byte = (index as u8).wrapping_sub(128);
    }
    bytes[208..].copy_from_slice(&levels.stored.to_le_bytes());
    bytes
}

/// Bits 4 and 5 of four codes, the first lowest.
fn high_bits(q: [u8; 4]) -> u8 {
    q[0] >> 4 | (q[1] >> 4) << 2 | (q[2] >> 4) << 4 | (q[3] >> 4) << 6
}

/// 256 weights in 16 sub-blocks: codes of 3 bits (high 1, then low 2), levels of 6 bits, scale.
pub(super) fn q3_k(block: &Block<256>) -> [u8; 110] {
    const LEVELS: [f32; 64] = whole(-32);
    const FREE: [f32; 28] = both_signs(spaced::<14>(2.3, 0.2));
    let nearest = |v| round(v, -4.0, 3.0);
    let plan = Plan { multipliers: &LEVELS, divisors: &[-32.0, 31.0, -31.0, -30.0, -28.5, -27.0], reach: 2 };
    let levels = search::<16, 16>(block, &plan, &FREE, nearest);

    let q = all_codes(block, &levels, &LEVELS, nearest).map(|q| (q + 4.0) as u8);
    let mut bytes = [0; 110];
    for (i, q) in q.into_iter().enumerate() {
        let (half, group, l) = (i / 128, i % 128 / 32, i % 32);
        bytes[l] |= (q >> 2) << (4 * half + group);
        bytes[32 + 32 * half + l] |= (q & 3) << (2 * group);
    }
    for (j, &index) in levels.index.iter().enumerate() {
        bytes[96 + j % 8] |= (index as u8 & 15) << (4 * (j / 8));
        bytes[104 + j % 4] |= (index as u8 >> 4) << (2 * (j / 4));
    }
    bytes[108..].copy_from_slice(&levels.stored.to_le_bytes());
    bytes
}

/// Scale and levels of a super-block of `S` sub-blocks of `L` weights.
fn search<const L: usize, const S: usize>(
    block: &Block<256>,
    plan: &Plan<'_>,
    free_divisors: &[f32],
    nearest: impl Fn(f32) -> f32 + Copy,
) -> Levels<S> {
    let _: () = const { assert!(L * S == 256, "sub-blocks cover the super-block") };
    let (x, w) = (block.x.as_chunks::<L>().0, block.w.as_chunks::<L>().0);
    let free = std::array::from_fn(|j| free_scale(&x[j], &w[j], free_divisors, nearest));
    choose(block, plan, &free, |j, s| fit(&x[j], &w[j], s, nearest))
}

/// Scale of a block that has no levels.
fn single(block: &Block<32>, divisors: &[f32], nearest: impl Fn(f32) -> f32 + Copy) -> Levels<1> {
    let plan = Plan { multipliers: &[1.0], divisors: &[1.0], reach: 1 };
    let free = [free_scale(&block.x, &block.w, divisors, nearest)];
    choose(block, &plan, &free, |_, s| fit(&block.x, &block.w, s, nearest))
}

/// The scale that serves a sub-block best: the best of its largest magnitude over each divisor, each refitted
/// once by least squares.
fn free_scale<const L: usize>(
    x: &[f32; L],
    w: &[f32; L],
    divisors: &[f32],
    nearest: impl Fn(f32) -> f32 + Copy,
) -> f32 {
    let largest = x.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
    let (mut best, mut cost) = (0.0, f32::INFINITY);
    if largest == 0.0 {
        return best;
    }
    for divisor in divisors {
        let first = fit(x, w, largest / divisor, nearest);
        let s = first.refit(largest / divisor);
        let next = fit(x, w, s, nearest);
        if next.cost < cost {
            (best, cost) = (s, next.cost);
        }
    }
    best
}

/// A sub-block with the nearest code for every weight at scale `s`.
#[inline(always)]
fn fit<const L: usize>(x: &[f32; L], w: &[f32; L], s: f32, nearest: impl Fn(f32) -> f32) -> Fit {
    let q = codes(x, s, nearest);
    let (mut wq, mut wr, mut r) = ([0.0; L], [0.0; L], [0.0; L]);
    for i in 0..L {
        wq[i] = w[i] * q[i];
        r[i] = x[i] - s * q[i];
        wr[i] = w[i] * r[i];
    }
    Fit { cost: dot(&wr, &r), xq: dot(&wq, x), qq: dot(&wq, &q) }
}

/// The code of every weight at scale `s`.
#[inline(always)]
fn codes<const L: usize>(x: &[f32; L], s: f32, nearest: impl Fn(f32) -> f32) -> [f32; L] {
    let inverse = if s == 0.0 { 0.0 } else { 1.0 / s };
    x.map(|x| nearest(x * inverse))
}

/// The code of every weight of a super-block.
fn all_codes<const S: usize>(
    block: &Block<256>,
    levels: &Levels<S>,
    multipliers: &[f32],
    nearest: impl Fn(f32) -> f32 + Copy,
) -> [f32; 256] {
    let mut q = [0.0; 256];
    let len = 256 / S;
    for (j, &index) in levels.index.iter().enumerate() {
        let s = levels.d * multipliers[index];
        let inverse = if s == 0.0 { 0.0 } else { 1.0 / s };
        for (q, x) in q[len * j..][..len].iter_mut().zip(&block.x[len * j..]) {
            *q = nearest(x * inverse);
        }
    }
    q
}

/// Divisors of both signs: a range of codes that reaches further down than up prefers one of them.
const fn both_signs<const H: usize, const N: usize>(positive: [f32; H]) -> [f32; N] {
    assert!(N == 2 * H);
    let mut values = [0.0; N];
    let mut i = 0;
    while i < H {
        values[i] = positive[i];
        values[H + i] = -positive[i];
        i += 1;
    }
    values
}

/// The table of the IQ4 types reaches from -127 to 113.
const IQ4_DIVISORS: [f32; 28] = both_signs(spaced::<14>(84.0, 4.0));

/// Half steps of the table that finds the nearest of the sixteen values.
const IQ4_STEPS: usize = 512;

/// For every half step from -128 on, the index of the nearest value. The midpoints between values are whole
/// half steps, so that no step lies on both sides of one.
static IQ4_INDEX: [u8; IQ4_STEPS] = iq4_index();

const fn iq4_index() -> [u8; IQ4_STEPS] {
    let mut index = [0; IQ4_STEPS];
    let mut step = 0;
    while step < IQ4_STEPS {
        // Four times the middle of the step, to stay with whole numbers.
        let middle = 2 * (step as i32 - 256) + 1;
        let mut best = 0;
        let mut i = 1;
        while i < 16 {
            let distance = (4 * IQ4_NL_VALUES[i] as i32 - middle).abs();
            if distance < (4 * IQ4_NL_VALUES[best] as i32 - middle).abs() {
                best = i;
            }
            i += 1;
        }
        index[step] = best as u8;
        step += 1;
    }
    index
}

#[inline(always)]
fn iq4_code(v: f32) -> u8 {
    IQ4_INDEX[(2.0 * v + 256.0).clamp(0.0, 511.0) as usize]
}

#[inline(always)]
fn nearest_iq4(v: f32) -> f32 {
    f32::from(IQ4_NL_VALUES[usize::from(iq4_code(v))])
}

/// Sixteen bytes of indices: the first sixteen weights in the low halves, the others in the high ones.
fn pack_iq4(x: &[f32; 32], s: f32, bytes: &mut [u8]) {
    let inverse = if s == 0.0 { 0.0 } else { 1.0 / s };
    let q = x.map(|x| iq4_code(x * inverse));
    for (l, byte) in bytes.iter_mut().enumerate() {
        *byte = q[l] | q[l + 16] << 4;
    }
}
