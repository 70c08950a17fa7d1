//! Sums and functions that stages share.

/// Σ a·b. Products of two `f32` are exact in `f64`; eight sums run side by side, always in the same order.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f64 {
    const LANES: usize = 8;
    let (a_lanes, a_rest) = a.as_chunks::<LANES>();
    let (b_lanes, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0f64; LANES];
    for (a, b) in a_lanes.iter().zip(b_lanes) {
        for lane in 0..LANES {
            sums[lane] += f64::from(a[lane]) * f64::from(b[lane]);
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    sums.iter().sum::<f64>() + rest
}

/// sum += factor · x.
pub(crate) fn add_scaled(sum: &mut [f64], factor: f64, x: impl IntoIterator<Item = f64>) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += factor * x;
    }
}

/// x / sqrt(mean(x²) + eps) · weight.
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(&x, &w)| (f64::from(x) * scale * f64::from(w)) as f32).collect()
}

/// [`rms_norm`] of every consecutive `weight.len()` numbers: of every row, or of every head of every row.
pub(crate) fn rms_norm_rows(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    x.chunks_exact(weight.len()).flat_map(|row| rms_norm(row, weight, eps)).collect()
}

/// x · factor / sqrt(Σx² + eps). (Older references divide by max(‖x‖, eps), which differs for tiny x only.)
pub(crate) fn l2_norm(x: &[f32], factor: f64, eps: f32) -> impl Iterator<Item = f32> {
    let scale = factor / (dot(x, x) + f64::from(eps)).sqrt();
    x.iter().map(move |&x| (f64::from(x) * scale) as f32)
}

/// 1 / (1 + exp(−x)).
pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// x · sigmoid(x).
pub(crate) fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// log(1 + exp(x)); from 20 on x itself, as the models were trained.
pub(crate) fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Replaces scores by exp(score) / Σ exp(score).
pub(crate) fn softmax(scores: &mut [f64]) {
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    scores.iter_mut().for_each(|score| *score = (*score - largest).exp());
    let sum: f64 = scores.iter().sum();
    scores.iter_mut().for_each(|score| *score /= sum);
}
