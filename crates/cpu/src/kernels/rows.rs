//! Kernels over rows of numbers: norms, activations, softmax, the recurrent delta step.
//!
//! Loops without a sum are left to the compiler, which vectorises them with the features of the variant;
//! sums run in lanes of fixed number. No result depends on where a row lies.

use super::simd::Simd;

/// Below it e^x is taken for 0.
const LOW: f32 = -87.3;
/// The largest exponent.
const HIGH: f32 = 88.0;
/// 1.5 · 2^23: adding it rounds to an integer, which then lies in the low bits.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts, the first with few enough bits that n · LN2_HIGH is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// e^x within 2 units in the last place, 0 below the normal numbers, the largest power above them.
///
/// Without branches, so that loops over it vectorise; the same operations whatever the loop.
#[inline(always)]
pub(super) fn exp<S: Simd>(x: f32) -> f32 {
    // Comparisons instead of min and max: they let NaN through.
    let clamped = if x > HIGH { HIGH } else { x };
    let clamped = if clamped < LOW { LOW } else { clamped };
    let shifted = S::fma1(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = S::fma1(n, -LN2_HIGH, clamped);
    let r = S::fma1(n, -LN2_LOW, r);
    // Taylor's polynomial of degree 7: on |r| ≤ ln 2 / 2 it is off by less than 1e-8.
    let p = S::fma1(r, 1.0 / 5040.0, 1.0 / 720.0);
    let p = S::fma1(p, r, 1.0 / 120.0);
    let p = S::fma1(p, r, 1.0 / 24.0);
    let p = S::fma1(p, r, 1.0 / 6.0);
    let p = S::fma1(p, r, 0.5);
    let p = S::fma1(p, r, 1.0);
    let p = S::fma1(p, r, 1.0);
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < LOW { 0.0 } else { p * scale }
}

/// As [`exp`], of the lanes of a vector, to the same bits.
#[inline(always)]
pub(super) fn exps<S: Simd>(x: S::V) -> S::V {
    let round = S::splat(ROUND);
    let clamped = S::max(S::splat(LOW), S::min(S::splat(HIGH), x));
    let shifted = S::fma(clamped, S::splat(std::f32::consts::LOG2_E), round);
    let n = S::add(shifted, S::splat(-ROUND));
    let r = S::fma(n, S::splat(-LN2_HIGH), clamped);
    let r = S::fma(n, S::splat(-LN2_LOW), r);
    let p = S::fma(r, S::splat(1.0 / 5040.0), S::splat(1.0 / 720.0));
    let p = S::fma(p, r, S::splat(1.0 / 120.0));
    let p = S::fma(p, r, S::splat(1.0 / 24.0));
    let p = S::fma(p, r, S::splat(1.0 / 6.0));
    let p = S::fma(p, r, S::splat(0.5));
    let p = S::fma(p, r, S::splat(1.0));
    let p = S::fma(p, r, S::splat(1.0));
    S::unless_below(x, LOW, S::mul(p, S::power(shifted)))
}

/// x / (1 + e^-x) of the lanes of a vector.
#[inline(always)]
pub(super) fn silus<S: Simd>(x: S::V) -> S::V {
    let e = exps::<S>(S::mul(x, S::splat(-1.0)));
    S::mul(x, S::inverse(S::add(e, S::splat(1.0))))
}

/// ln(1 + e^x) of the lanes of a vector.
#[inline(always)]
pub(super) fn softpluses<S: Simd>(x: S::V) -> S::V {
    let zero = S::splat(0.0);
    let positive = S::max(x, zero);
    let e = exps::<S>(S::min(x, S::mul(x, S::splat(-1.0))));
    // ln(1 + e) = 2 artanh(s) with s = e / (2 + e) ≤ 1/3; the term of s^17 would be below 1e-9.
    let s = S::div(e, S::add(e, S::splat(2.0)));
    let square = S::mul(s, s);
    let terms = [1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0];
    let mut sum = S::splat(1.0 / 15.0);
    for term in terms {
        sum = S::fma(sum, square, S::splat(term));
    }
    S::fma(S::add(s, s), sum, positive)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub(super) fn sigmoid<S: Simd>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<S>(-x))
}

/// Σ a · b in lanes.
#[inline(always)]
pub(super) fn dot<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let whole = a.len() / S::LANES * S::LANES;
    let mut acc = S::splat(0.0);
    let mut i = 0;
    while i < whole {
        // SAFETY: LANES numbers at i lie inside both.
        acc = unsafe { S::fma(S::load(a.as_ptr().add(i)), S::load(b.as_ptr().add(i)), acc) };
        i += S::LANES;
    }
    let zero = S::splat(0.0);
    let mut sum = S::sums([acc, zero, zero, zero])[0];
    for i in whole..a.len() {
        sum = S::fma1(a[i], b[i], sum);
    }
    sum
}

/// out = x / sqrt(mean(x²) + eps) · weight.
#[inline(always)]
pub(super) fn rms_norm<S: Simd>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (dot::<S>(x, x) / x.len() as f32 + eps).sqrt();
    for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}

/// The same, times SiLU(gate).
#[inline(always)]
pub(super) fn gated_norm<S: Simd>(x: &[f32], weight: &[f32], eps: f32, gate: &[f32], out: &mut [f32]) {
    let len = x.len();
    assert!(weight.len() == len && gate.len() == len && out.len() == len);
    let scale = 1.0 / (dot::<S>(x, x) / len as f32 + eps).sqrt();
    let whole = len / S::LANES * S::LANES;
    for i in (0..whole).step_by(S::LANES) {
        // SAFETY: LANES numbers at i lie inside all four.
        unsafe {
            let normed = S::mul(S::load(x.as_ptr().add(i)), S::splat(scale));
            let weighted = S::mul(normed, S::load(weight.as_ptr().add(i)));
            let silu = silus::<S>(S::load(gate.as_ptr().add(i)));
            S::store(out.as_mut_ptr().add(i), S::mul(weighted, silu));
        }
    }
    for i in whole..len {
        out[i] = x[i] * scale * weight[i] * (gate[i] * sigmoid::<S>(gate[i]));
    }
}

/// gate ← SiLU(gate) · up.
#[inline(always)]
pub(super) fn swiglu<S: Simd>(gate: &mut [f32], up: &[f32]) {
    for (gate, &up) in gate.iter_mut().zip(up) {
        *gate = *gate * sigmoid::<S>(*gate) * up;
    }
}

/// x ← x · scale · sigmoid(gate).
#[inline(always)]
pub(super) fn gate<S: Simd>(x: &mut [f32], scale: f32, gate: &[f32]) {
    for (x, &gate) in x.iter_mut().zip(gate) {
        *x = *x * scale * sigmoid::<S>(gate);
    }
}

/// One block of an online softmax: given raw scores and the largest scaled score so far, replaces scores by
/// exp(score · scale − largest) and returns the new largest, the factor exp(old − new) for what was summed
/// before, and the sum.
#[inline(always)]
pub(super) fn softmax_block<S: Simd>(scores: &mut [f32], scale: f32, largest: f32) -> (f32, f32, f32) {
    const LANES: usize = 16;
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [largest; LANES];
    let (chunks, rest) = scores.as_chunks_mut::<LANES>();
    for chunk in chunks.iter_mut() {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x *= scale;
            *lane = larger(*lane, *x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest.iter_mut()) {
        *x *= scale;
        *lane = larger(*lane, *x);
    }
    let new = lanes.into_iter().fold(largest, larger);
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *x = exp::<S>(*x - new);
            *sum += *x;
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *x = exp::<S>(*x - new);
        *sum += *x;
    }
    (new, exp::<S>(largest - new), sums.into_iter().sum())
}

#[cfg(test)]
mod tests;
