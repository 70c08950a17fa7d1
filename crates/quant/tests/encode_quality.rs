//! How much each type loses on a normal distribution: bounds just above what the search achieves, so that a
//! search that got worse is noticed.

use redlite_quant::{Type, decode, encode};

/// Upper bound of the relative RMS error on normally distributed weights.
const BOUNDS: [(Type, f64); 15] = [
    (Type::BF16, 0.0017),
    (Type::Q8_0, 0.0051),
    (Type::Q6_K, 0.0171),
    (Type::Q5_K, 0.0354),
    (Type::Q4_K, 0.0718),
    (Type::IQ4_XS, 0.0747),
    (Type::IQ4_NL, 0.0742),
    (Type::Q3_K, 0.1475),
    (Type::IQ3_S, 0.1320),
    (Type::IQ3_XXS, 0.1800),
    (Type::IQ2_S, 0.2450),
    (Type::Q2_K, 0.2680),
    (Type::IQ2_XS, 0.2920),
    (Type::IQ2_XXS, 0.3360),
    (Type::IQ1_M, 0.4250),
];

/// Sums of twelve uniform numbers, near enough to normal, the same in every run.
fn normal(len: usize) -> Vec<f32> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut uniform = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..len).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
}

#[test]
fn every_type_loses_no_more_than_its_bound() {
    let weights = normal(1 << 15);
    for (ty, bound) in BOUNDS {
        let mut bytes = Vec::new();
        encode(ty, &weights, None, &mut bytes).unwrap();
        let mut decoded = vec![0.0; weights.len()];
        decode(ty, &bytes, &mut decoded).unwrap();
        let square = |x: f32| f64::from(x) * f64::from(x);
        let error: f64 = weights.iter().zip(&decoded).map(|(a, b)| square(a - b)).sum();
        let relative = (error / weights.iter().map(|&x| square(x)).sum::<f64>()).sqrt();
        assert!(relative < bound, "{ty}: {relative:.5}, bound {bound}");
        assert!(relative > 0.9 * bound, "{ty}: {relative:.5} is far better than {bound}: tighten the bound");
    }
}
