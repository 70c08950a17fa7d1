//! `encode` against going through everything IQ2_XXS can express, on a few blocks.

use redlite_quant::codebook::{EVEN_SIGNS, IQ2_XXS_GRID};
use redlite_quant::{Type, decode, encode};

/// Three blocks, one of them with a heavy tail.
fn blocks() -> Vec<[f32; 256]> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut uniform = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let mut normal = || (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
    (0..3)
        .map(|i| std::array::from_fn(|_| normal()).map(|x: f32| if i == 2 { 0.1 * x * x * x } else { x }))
        .collect()
}

/// What `encode` says an error costs.
fn error_weights(x: &[f32; 256]) -> [f32; 256] {
    let mean_square = x.iter().map(|x| x * x).sum::<f32>() / 256.0;
    x.map(|x| (2.0 * mean_square + x * x).sqrt())
}

fn cost(x: &[f32], w: &[f32], decoded: &[f32]) -> f64 {
    x.iter().zip(w).zip(decoded).map(|((x, w), y)| f64::from(w * (x - y) * (x - y))).sum()
}

fn encoded(x: &[f32; 256]) -> [f32; 256] {
    let mut bytes = Vec::new();
    encode(Type::IQ2_XXS, x, None, &mut bytes).unwrap();
    let mut decoded = [0.0; 256];
    decode(Type::IQ2_XXS, &bytes, &mut decoded).unwrap();
    decoded
}

/// The least a group of eight costs at scale `s`, over all rows and all signs.
fn least_over_rows_and_signs(x: &[f32], w: &[f32], s: f32) -> f64 {
    let mut least = f64::INFINITY;
    for row in &IQ2_XXS_GRID {
        for signs in &EVEN_SIGNS {
            let value =
                |i: usize| if signs >> i & 1 == 1 { -s * f32::from(row[i]) } else { s * f32::from(row[i]) };
            let decoded: [f32; 8] = std::array::from_fn(value);
            least = least.min(cost(x, w, &decoded));
        }
    }
    least
}

/// The same, faster: the signs of the weights, and if those are an odd number, each row with its cheapest
/// sign wrong.
fn least_over_rows(x: &[f32], w: &[f32], s: f32) -> f32 {
    let odd = x.iter().filter(|&&x| x < 0.0).count() % 2 == 1;
    let mut least = f32::INFINITY;
    for row in &IQ2_XXS_GRID {
        let (mut sum, mut wrong) = (0.0, f32::INFINITY);
        for i in 0..8 {
            let (magnitude, g) = (x[i].abs(), s * f32::from(row[i]));
            sum += w[i] * (magnitude - g) * (magnitude - g);
            wrong = wrong.min(4.0 * w[i] * magnitude * g);
        }
        least = least.min(if odd { sum + wrong } else { sum });
    }
    least
}

#[test]
fn rows_and_signs_are_the_best_at_the_chosen_scale() {
    for x in blocks() {
        let (w, decoded) = (error_weights(&x), encoded(&x));
        // The scale of a sub-block shows in its smallest magnitude, 8 times the scale: of 32 Gaussian weights
        // some are always small.
        for j in 0..8 {
            let range = 32 * j..32 * j + 32;
            let smallest = decoded[range.clone()].iter().fold(f32::INFINITY, |m, y| m.min(y.abs()));
            let s = smallest / 8.0;
            for i in range.step_by(8) {
                let (x, w) = (&x[i..i + 8], &w[i..i + 8]);
                let (ours, least) = (cost(x, w, &decoded[i..i + 8]), least_over_rows_and_signs(x, w, s));
                assert!(ours <= 1.0001 * least + 1e-6, "group at {i}: {ours} against {least}");
            }
        }
    }
}

#[test]
fn no_scale_and_no_levels_are_much_better() {
    for x in blocks() {
        let w = error_weights(&x);
        let ours = cost(&x, &w, &encoded(&x));
        let peak = x.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
        // The largest level times the scale times 43 is about the peak.
        let full = peak / (15.5 * 0.25 * 43.0);
        let mut least = f32::INFINITY;
        for step in 0..60 {
            let d = full * (0.6 + 0.02 * step as f32);
            let mut sum = 0.0;
            for j in 0..8 {
                let at = |level: usize| {
                    let s = d * (level as f32 + 0.5) * 0.25;
                    let groups = (32 * j..32 * j + 32).step_by(8);
                    groups.map(|i| least_over_rows(&x[i..i + 8], &w[i..i + 8], s)).sum::<f32>()
                };
                sum += (0..16).map(at).fold(f32::INFINITY, f32::min);
            }
            least = least.min(sum);
        }
        let ratio = ours / f64::from(least);
        assert!(ratio < 1.002, "{ours} against {least}: {ratio}");
    }
}
