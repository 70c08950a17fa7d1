//! What comes before the delta rule: causal convolution with SiLU and L2 norm, and the gates.

#![allow(clippy::needless_range_loop)] // indices into several rows at once

use super::product::Factor;
use super::rows::{dot, exps, sigmoid, silus, softpluses};
use super::simd::Simd;

/// How far ahead of the convolution samples are asked for: they lie a whole projected row apart, where the
/// processor expects nothing.
const AHEAD: usize = 4;

/// The convolution of one head.
#[derive(Clone, Copy)]
pub(crate) struct Convolution {
    /// Weights of the head's channels: [taps][dim].
    pub(crate) weights: Factor,
    /// Samples a row depends on, its own the last.
    pub(crate) taps: usize,
    /// Channels of the head.
    pub(crate) dim: usize,
    /// eps and factor of the L2 norm, for queries and keys: x ← x / sqrt(Σ x² + eps) · factor.
    pub(crate) norm: Option<(f32, f32)>,
}

/// out[r] = norm(SiLU(Σ_tap samples[r + tap] · weights[tap])), for every row of `out` that there are samples
/// for: as many as samples, less `taps` − 1.
///
/// # Safety
/// Samples and weights must point to `dim` numbers each; `out` to a row of `dim` for each result, which nobody
/// else uses.
#[inline(always)]
pub(super) unsafe fn convolve<S: Simd>(conv: &Convolution, samples: &[*const f32], out: (*mut f32, usize)) {
    // SAFETY: the caller's promise. Four taps, as all models have, without a loop.
    unsafe {
        match conv.taps {
            4 => convolve_with::<S>(conv, 4, samples, out),
            taps => convolve_with::<S>(conv, taps, samples, out),
        }
    }
}

#[inline(always)]
unsafe fn convolve_with<S: Simd>(
    conv: &Convolution,
    taps: usize,
    samples: &[*const f32],
    (out, out_stride): (*mut f32, usize),
) {
    let dim = conv.dim;
    let whole = dim / S::LANES * S::LANES;
    let (weights, weight_stride) = conv.weights;
    for (row, window) in samples.windows(taps).enumerate() {
        if let Some(&coming) = samples.get(row + taps - 1 + AHEAD) {
            (0..dim).step_by(16).for_each(|i| S::prefetch(coming.wrapping_add(i)));
        }
        // SAFETY: columns below dim of samples, weights and this row of the result.
        let out = unsafe {
            let out = std::slice::from_raw_parts_mut(out.add(row * out_stride), dim);
            for i in (0..whole).step_by(S::LANES) {
                let mut sum = S::mul(S::load(window[0].add(i)), S::load(weights.add(i)));
                for tap in 1..taps {
                    let weight = S::load(weights.add(tap * weight_stride + i));
                    sum = S::fma(S::load(window[tap].add(i)), weight, sum);
                }
                S::store(out.as_mut_ptr().add(i), silus::<S>(sum));
            }
            for i in whole..dim {
                let mut sum = *window[0].add(i) * *weights.add(i);
                for tap in 1..taps {
                    sum = S::fma1(*window[tap].add(i), *weights.add(tap * weight_stride + i), sum);
                }
                out[i] = sum * sigmoid::<S>(sum);
            }
            out
        };
        if let Some((eps, factor)) = conv.norm {
            let scale = factor / (dot::<S>(out, out) + eps).sqrt();
            out.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

/// Gates of some rows of one head: raw betas become sigmoid(beta), raw alphas log decays
/// a · softplus(alpha + bias). Lengths are a multiple of 16.
#[inline(always)]
pub(super) fn gates<S: Simd>(beta: &mut [f32], alpha: &mut [f32], (a, bias): (f32, f32)) {
    assert!(beta.len() == alpha.len() && beta.len().is_multiple_of(S::LANES));
    for i in (0..beta.len()).step_by(S::LANES) {
        // SAFETY: LANES numbers at i lie inside both.
        unsafe {
            let (beta, alpha) = (beta.as_mut_ptr().add(i), alpha.as_mut_ptr().add(i));
            let e = exps::<S>(S::mul(S::load(beta), S::splat(-1.0)));
            S::store(beta, S::div(S::splat(1.0), S::add(e, S::splat(1.0))));
            let softplus = softpluses::<S>(S::add(S::load(alpha), S::splat(bias)));
            S::store(alpha, S::mul(softplus, S::splat(a)));
        }
    }
}

#[cfg(test)]
mod tests;
