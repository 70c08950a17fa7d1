//! Kernels over rows of numbers: norms, activations, softmax, the recurrent delta step.
//!
//! Loops without a sum are left to the compiler, which vectorises them with the features of the variant;
//! sums run in lanes of fixed number. No result depends on where a row lies.

use super::simd::Simd;

/// e^x within 2 units in the last place, 0 below the normal numbers, the largest power above them.
///
/// Without branches, so that loops over it vectorise; the same operations whatever the loop.
#[inline(always)]
pub(super) fn exp<S: Simd>(x: f32) -> f32 {
    const LOW: f32 = -87.3;
    const HIGH: f32 = 88.0;
    /// 1.5 · 2^23: adding it rounds to an integer, which then lies in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first with few enough bits that n · LN2_HIGH is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
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

/// The same in place, times SiLU(gate).
#[inline(always)]
pub(super) fn gated_norm<S: Simd>(x: &mut [f32], weight: &[f32], eps: f32, gate: &[f32]) {
    let scale = 1.0 / (dot::<S>(x, x) / x.len() as f32 + eps).sqrt();
    for ((x, &weight), &gate) in x.iter_mut().zip(weight).zip(gate) {
        *x = *x * scale * weight * (gate * sigmoid::<S>(gate));
    }
}

/// x ← x / sqrt(Σ x² + eps) · factor.
#[inline(always)]
pub(super) fn l2_norm<S: Simd>(x: &mut [f32], eps: f32, factor: f32) {
    let scale = factor / (dot::<S>(x, x) + eps).sqrt();
    x.iter_mut().for_each(|x| *x *= scale);
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

/// out = SiLU(Σ_tap rows[tap] · weights[tap]).
#[inline(always)]
pub(super) fn convolve<S: Simd>(rows: &[&[f32]], weights: &[&[f32]], out: &mut [f32]) {
    for (tap, (row, weight)) in rows.iter().zip(weights).enumerate() {
        for ((out, &x), &w) in out.iter_mut().zip(*row).zip(*weight) {
            *out = if tap == 0 { x * w } else { S::fma1(x, w, *out) };
        }
    }
    out.iter_mut().for_each(|x| *x *= sigmoid::<S>(*x));
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

/// The delta rule for one row and head: S ← decay · S; d = beta (v − Sᵀk); S ← S + k dᵀ; out = Sᵀq.
///
/// `state` is [k.len()][v.len()]; `d` and `out` are as long as `v`.
#[inline(always)]
pub(super) fn delta_step<S: Simd>(
    state: &mut [f32],
    (q, k, v): (&[f32], &[f32], &[f32]),
    (decay, beta): (f32, f32),
    d: &mut [f32],
    out: &mut [f32],
) {
    d.fill(0.0);
    for (row, &k) in state.chunks_exact_mut(v.len()).zip(k) {
        for (s, d) in row.iter_mut().zip(d.iter_mut()) {
            *s *= decay;
            *d = S::fma1(*s, k, *d);
        }
    }
    for (d, &v) in d.iter_mut().zip(v) {
        *d = beta * (v - *d);
    }
    out.fill(0.0);
    for ((row, &k), &q) in state.chunks_exact_mut(v.len()).zip(k).zip(q) {
        for ((s, &d), out) in row.iter_mut().zip(d.iter()).zip(out.iter_mut()) {
            *s = S::fma1(k, d, *s);
            *out = S::fma1(q, *s, *out);
        }
    }
}

#[cfg(test)]
mod tests;
