//! One block on its way to bytes: weights brought to order one, their error weights, its scale in `f16`.

use half::f16;

/// Blocks whose largest magnitude is below this are stored as zeros: no `f16` scale reaches so low.
const SMALLEST: f32 = 1.0 / (1u64 << 40) as f32;

/// The weights of one call and the importance of their columns.
pub(super) struct Job<'a> {
    pub(super) weights: &'a [f32],
    pub(super) importance: Option<&'a [f32]>,
}

impl Job<'_> {
    /// Encodes block after block of `N` weights with `encode`, which sees zeros for a block that is too small
    /// to store.
    pub(super) fn each<const N: usize, const B: usize>(
        &self,
        out: &mut Vec<u8>,
        encode: impl Fn(&Block<N>) -> [u8; B],
    ) {
        let (blocks, rest) = self.weights.as_chunks::<N>();
        debug_assert!(rest.is_empty(), "the caller has checked the length");
        for (i, weights) in blocks.iter().enumerate() {
            let importance = self.importance.and_then(|importance| {
                let start = i * N % importance.len();
                importance[start..].first_chunk::<N>()
            });
            out.extend_from_slice(&encode(&Block::new(weights, importance)));
        }
    }
}

/// A block in units of its own: the largest magnitude lies in [1, 2), or all are zero.
pub(super) struct Block<const N: usize> {
    /// Weights, divided by `unit`.
    pub(super) x: [f32; N],
    /// What a squared error of each costs; the mean is 1.
    pub(super) w: [f32; N],
    /// A power of two, so that scaling is exact.
    unit: f32,
}

impl<const N: usize> Block<N> {
    fn new(weights: &[f32; N], importance: Option<&[f32; N]>) -> Self {
        let largest = weights.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
        if largest < SMALLEST {
            return Self { x: [0.0; N], w: [1.0; N], unit: 1.0 };
        }
        let unit = f32::from_bits(largest.to_bits() & 0x7f80_0000);
        let x = weights.map(|x| x / unit);
        let mean_square = dot(&x, &x) / N as f32;
        let mut w = x.map(|x| (2.0 * mean_square + x * x).sqrt());
        if let Some(importance) = importance {
            multiply(&mut w, importance);
        }
        let mean = w.iter().sum::<f32>() / N as f32;
        // Weights that are said not to matter still decide where nothing else does.
        w = w.map(|w| (w / mean).max(1e-5));
        Self { x, w, unit }
    }

    /// The `f16` nearest to the scale `d` of the block, and what it stands for in units of the block.
    pub(super) fn stored(&self, d: f32) -> (f16, f32) {
        let stored = f16::from_f32((d * self.unit).clamp(-65504.0, 65504.0));
        (stored, stored.to_f32() / self.unit)
    }
}

/// Multiplies error weights by the importance of their columns, brought to a mean of 1; an importance of
/// nothing but zeros says nothing.
fn multiply<const N: usize>(w: &mut [f32; N], importance: &[f32; N]) {
    let mean = importance.iter().map(|&v| f64::from(v)).sum::<f64>() / N as f64;
    if mean > 0.0 {
        for (w, &v) in w.iter_mut().zip(importance) {
            *w *= (f64::from(v) / mean) as f32;
        }
    }
}

/// Σ a·b, in eight running sums so that it vectorises with one fixed order of summation. `N` is a multiple
/// of 8.
#[inline(always)]
pub(super) fn dot<const N: usize>(a: &[f32; N], b: &[f32; N]) -> f32 {
    let mut sums = [0.0f32; 8];
    for (a, b) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let [a, b, c, d, e, f, g, h] = sums;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// `v` rounded to a whole number (ties to even) within `low..=high`.
#[inline(always)]
pub(super) fn round(v: f32, low: f32, high: f32) -> f32 {
    // Adding 1.5·2²³ leaves no room for a fraction: unlike `f32::round` this vectorises on every CPU.
    const NO_FRACTION: f32 = 12_582_912.0;
    (v.max(low).min(high) + NO_FRACTION) - NO_FRACTION
}
