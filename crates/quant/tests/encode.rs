//! What `encode` promises for every type: sizes, errors, edge cases, and that importance is heeded.

use redlite_quant::{Error, Type, can_encode, decode, encode};

/// Types with an encoder that store blocks.
fn block_types() -> impl Iterator<Item = Type> {
    Type::all().filter(|&ty| can_encode(ty) && ty.block_len() > 1)
}

/// Numbers of a normal distribution, the same in every run.
fn gaussian(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let mut normal = || (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    (0..len).map(|_| normal() as f32).collect()
}

fn round_trip(ty: Type, weights: &[f32], importance: Option<&[f32]>) -> Vec<f32> {
    let mut bytes = Vec::new();
    encode(ty, weights, importance, &mut bytes).unwrap();
    assert_eq!(Some(bytes.len()), ty.bytes(weights.len()), "{ty}");
    let mut decoded = vec![f32::NAN; weights.len()];
    decode(ty, &bytes, &mut decoded).unwrap();
    decoded
}

/// Root of (squared error over squared weights).
fn relative_error(weights: &[f32], decoded: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = weights.iter().zip(decoded).map(|(a, b)| square(a - b)).sum();
    (error / weights.iter().map(|&x| square(x)).sum::<f64>()).sqrt()
}

#[test]
fn floats_round_to_nearest_even_and_keep_what_is_not_finite() {
    let cases = [
        (1.0, 0x3c00, 0x3f80),
        // Half way between two neighbours: to the even one, downwards and upwards.
        (1.0 + 1.0 / 2048.0, 0x3c00, 0x3f80),
        (1.0 + 3.0 / 2048.0, 0x3c02, 0x3f80),
        (1.0 + 1.0 / 256.0, 0x3c04, 0x3f80),
        (1.0 + 3.0 / 256.0, 0x3c0c, 0x3f82),
        (-0.0, 0x8000, 0x8000),
        (6e-8, 0x0001, 0x3381),
        (65519.0, 0x7bff, 0x4780),
        (f32::NEG_INFINITY, 0xfc00, 0xff80),
    ];
    for (x, half, brain) in cases {
        for (ty, expected) in [(Type::F16, half), (Type::BF16, brain)] {
            let mut bytes = Vec::new();
            encode(ty, &[x], None, &mut bytes).unwrap();
            assert_eq!(u16::from_le_bytes([bytes[0], bytes[1]]), expected, "{x} as {ty}");
        }
    }
    for ty in [Type::F32, Type::F16, Type::BF16] {
        // A NaN whose payload lies in the bits that are cut off.
        let nan = f32::from_bits(0x7f80_0001);
        assert!(round_trip(ty, &[nan], None)[0].is_nan(), "{ty}");
    }
    assert_eq!(round_trip(Type::F32, &[f32::MAX, 1e-40], None), [f32::MAX, 1e-40]);
}

#[test]
fn what_does_not_fit_is_refused_by_name_and_leaves_the_output_alone() {
    for ty in block_types() {
        let len = ty.block_len();
        let mut out = vec![7];
        let mut refused = |weights: &[f32], importance: Option<&[f32]>| {
            let error = encode(ty, weights, importance, &mut out).unwrap_err();
            assert_eq!(out, [7], "{ty}");
            error
        };
        let ones = vec![1.0; 2 * len];
        assert_eq!(refused(&ones[1..], None), Error::PartialBlock { ty, len: 2 * len - 1 });

        let mut weights = ones.clone();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            weights[len + 3] = bad;
            assert_eq!(refused(&weights, None), Error::NotFinite { ty, index: len + 3 });
        }
        weights[len + 3] = -1e30;
        assert_eq!(refused(&weights, None), Error::TooLarge { ty, index: len + 3 });

        let lengths = Error::Importance { len: 2 * len, importance: 3 * len };
        assert_eq!(refused(&ones, Some(&vec![1.0; 3 * len])), lengths);
        assert_eq!(refused(&ones, Some(&[])), Error::Importance { len: 2 * len, importance: 0 });
        assert_eq!(refused(&ones, Some(&[1.0])), Error::PartialBlock { ty, len: 1 });
        for bad in [-1.0, f32::NAN, f32::INFINITY] {
            let mut importance = vec![1.0; len];
            importance[5] = bad;
            assert_eq!(refused(&ones, Some(&importance)), Error::BadImportance { column: 5 });
        }
    }
    let mut out = Vec::new();
    assert_eq!(
        encode(Type::F16, &[0.0, 70000.0], None, &mut out),
        Err(Error::TooLarge { ty: Type::F16, index: 1 })
    );
    assert!(!can_encode(Type::MXFP4));
    assert_eq!(encode(Type::MXFP4, &[0.0; 32], None, &mut out), Err(Error::NoEncoder(Type::MXFP4)));
}

#[test]
fn zeros_stay_zeros_and_nothing_appends_nothing() {
    for ty in Type::all().filter(|&ty| can_encode(ty)) {
        let zeros = vec![0.0; 3 * ty.block_len()];
        assert_eq!(round_trip(ty, &zeros, None), zeros, "{ty}");
        assert!(round_trip(ty, &[], None).is_empty());
        // A block of zeros between two others does not disturb them.
        let len = ty.block_len();
        let mut weights = gaussian(3 * len, 5);
        weights[len..2 * len].fill(0.0);
        let decoded = round_trip(ty, &weights, None);
        assert_eq!(decoded[len..2 * len], zeros[..len], "{ty}");
        assert_eq!(decoded[2 * len..], round_trip(ty, &weights[2 * len..], None), "{ty}");
    }
}

#[test]
fn the_error_does_not_depend_on_the_magnitude() {
    for ty in block_types() {
        let weights = gaussian(512, 11);
        let usual = relative_error(&weights, &round_trip(ty, &weights, None));
        // Where the scale is a full-precision f16.
        for factor in [1e-2, 1e4] {
            let scaled: Vec<f32> = weights.iter().map(|x| x * factor).collect();
            let error = relative_error(&scaled, &round_trip(ty, &scaled, None));
            assert!(error < 1.1 * usual + 1e-3, "{ty} × {factor}: {error} against {usual}");
        }
        // Far below the smallest f16 scale there is only zero, and no NaN on the way.
        for factor in [1e-12, 1e-30, 1e-42] {
            let scaled: Vec<f32> = weights.iter().map(|x| x * factor).collect();
            let decoded = round_trip(ty, &scaled, None);
            assert!(decoded.iter().all(|x| x.abs() < 1e-6), "{ty} × {factor}");
        }
    }
}

#[test]
fn scales_below_the_normal_f16_are_rounded_with_care() {
    for ty in block_types() {
        for factor in [1e-4, 1e-5, 1e-6, 1e-7, 1e-8] {
            let weights: Vec<f32> = gaussian(512, 13).iter().map(|x| x * factor).collect();
            let error = relative_error(&weights, &round_trip(ty, &weights, None));
            assert!(error < 1.01, "{ty} × {factor}: {error}, worse than zeros");
        }
    }
}

#[test]
fn wild_weights_and_importance_do_not_panic() {
    let normal = gaussian(4 * 1024, 17);
    let exponents = gaussian(4 * 1024, 19);
    for spread in [3.0, 12.0, 40.0] {
        let wild = |power: f32| {
            let value = |(x, e): (&f32, &f32)| x * (spread * e).exp2().clamp(1e-38, 1e4);
            normal.iter().zip(&exponents).map(value).map(|x| x * power).collect::<Vec<f32>>()
        };
        let weights = wild(1.0);
        let importance: Vec<f32> = wild(1e30).iter().rev().take(1024).map(|x| x.abs()).collect();
        for ty in block_types() {
            for importance in [None, Some(&importance[..])] {
                let decoded = round_trip(ty, &weights, importance);
                assert!(decoded.iter().all(|x| x.is_finite()), "{ty}");
            }
        }
    }
}

#[test]
fn one_outlier_or_one_sign_does_no_harm() {
    for ty in block_types() {
        let mut outlier = vec![0.0; 256];
        outlier[77] = -3.0;
        let positive: Vec<f32> = gaussian(256, 3).iter().map(|x| x.abs()).collect();
        let negative: Vec<f32> = positive.iter().map(|x| -x).collect();
        // IQ2 has no small magnitudes beside a large one: an outlier costs its neighbours, but less than
        // storing zeros would.
        let cases = [
            (outlier, 1.0),
            (vec![0.5; 256], 0.05),
            (vec![-0.5; 256], 0.05),
            (positive, 0.5),
            (negative, 0.5),
        ];
        for (weights, bound) in cases {
            let error = relative_error(&weights, &round_trip(ty, &weights, None));
            assert!(error < bound, "{ty}: {error}, bound {bound}");
        }
    }
}

#[test]
fn a_block_that_can_be_represented_is_found_again() {
    for ty in block_types() {
        let once = round_trip(ty, &gaussian(2048, 21), None);
        let error = relative_error(&once, &round_trip(ty, &once, None));
        // A scale and a min together are found with a little less certainty.
        let bound = if [Type::Q2_K, Type::Q4_K, Type::Q5_K].contains(&ty) { 0.008 } else { 0.0035 };
        assert!(error < bound, "{ty}: {error}");
    }
}

#[test]
fn importance_moves_the_error_to_the_columns_that_matter_less() {
    let columns = 512;
    let weights = gaussian(5 * columns, 31);
    let importance: Vec<f32> = (0..columns).map(|c| if c % 4 == 1 { 30.0 } else { 1.0 }).collect();
    let error_of_important = |decoded: &[f32]| {
        let pick = |v: &[f32]| v.iter().copied().skip(1).step_by(4).collect::<Vec<_>>();
        relative_error(&pick(&weights), &pick(decoded))
    };
    for ty in block_types() {
        let flat = error_of_important(&round_trip(ty, &weights, None));
        let heeded = error_of_important(&round_trip(ty, &weights, Some(&importance)));
        assert!(heeded < 0.95 * flat, "{ty}: {heeded} against {flat}");

        // Only ratios count, whatever their size, and columns of nothing but zeros are still encoded.
        let scaled: Vec<f32> = importance.iter().map(|v| v * 2f32.powi(90)).collect();
        let same = round_trip(ty, &weights, Some(&importance)) == round_trip(ty, &weights, Some(&scaled));
        assert!(same, "{ty}");
        assert_eq!(
            round_trip(ty, &weights, Some(&vec![0.0; columns])),
            round_trip(ty, &weights, None),
            "{ty}"
        );
    }
}

#[test]
fn rows_can_be_encoded_apart() {
    let columns = 256;
    let weights = gaussian(7 * columns, 41);
    let importance: Vec<f32> = gaussian(columns, 43).iter().map(|x| x * x).collect();
    for ty in block_types() {
        let (mut whole, mut parts) = (Vec::new(), Vec::new());
        encode(ty, &weights, Some(&importance), &mut whole).unwrap();
        for rows in [&weights[..3 * columns], &weights[3 * columns..4 * columns], &weights[4 * columns..]] {
            encode(ty, rows, Some(&importance), &mut parts).unwrap();
        }
        assert_eq!(whole, parts, "{ty}");
    }
}
