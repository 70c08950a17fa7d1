//! How much each type loses on a normal distribution: bounds just above what the search achieves, so that a
//! search that got worse is noticed, beside what llama.cpp's quantiser loses on such weights.

use redlite_quant::{Type, decode, encode};

/// Relative RMS error on normally distributed weights without importance: our upper bound, and the error of
/// `ggml_quantize_chunk` (ggml of the llama.cpp in `oracle/`; where it insists on an importance, all ones).
const BOUNDS: [(Type, f64, f64); 14] = [
    (Type::Q8_0, 0.00505, 0.00537),
    (Type::Q6_K, 0.01693, 0.01781),
    (Type::Q5_K, 0.03413, 0.03621),
    (Type::Q4_K, 0.06967, 0.07171),
    (Type::IQ4_NL, 0.07406, 0.07621),
    (Type::IQ4_XS, 0.07459, 0.07679),
    (Type::IQ3_S, 0.13130, 0.16690),
    (Type::Q3_K, 0.14583, 0.15117),
    (Type::IQ3_XXS, 0.17815, 0.21314),
    (Type::IQ2_S, 0.24143, 0.26505),
    (Type::Q2_K, 0.26191, 0.29750),
    (Type::IQ2_XS, 0.28684, 0.29954),
    (Type::IQ2_XXS, 0.33184, 0.34348),
    (Type::IQ1_M, 0.41957, 0.45177),
];

/// Normally distributed numbers, the same in every run.
fn normal(len: usize) -> Vec<f32> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut uniform = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        ((state >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    };
    let mut one = || (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    (0..len).map(|_| one() as f32).collect()
}

#[test]
fn every_type_loses_no_more_than_its_bound() {
    let weights = normal(1 << 15);
    for (ty, bound, llama_cpp) in BOUNDS {
        let mut bytes = Vec::new();
        encode(ty, &weights, None, &mut bytes).unwrap();
        let mut decoded = vec![0.0; weights.len()];
        decode(ty, &bytes, &mut decoded).unwrap();
        let square = |x: f32| f64::from(x) * f64::from(x);
        let error: f64 = weights.iter().zip(&decoded).map(|(a, b)| square(a - b)).sum();
        let relative = (error / weights.iter().map(|&x| square(x)).sum::<f64>()).sqrt();
        assert!(relative < bound, "{ty}: {relative:.5}, bound {bound}");
        assert!(
            relative > 0.98 * bound,
            "{ty}: {relative:.5} is much better than {bound}: tighten the bound"
        );
        assert!(relative < llama_cpp, "{ty}: {relative:.5}, llama.cpp {llama_cpp}");
    }
}
