//! Rounding of activations: against vectors made in numpy (see `make_golden.py`), and by hand where a rule shows.

use redlite_quant::activation::{round_q8_0, round_q8_1, round_q8_k};
use redlite_quant::{Activation, Type};

/// Activations, their Q8_0 rounding, their Q8_K rounding.
fn golden() -> [Vec<f32>; 3] {
    let bytes = include_bytes!("golden/activation.bin");
    let all: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let parts: Vec<_> = all.chunks(all.len() / 3).map(<[f32]>::to_vec).collect();
    parts.try_into().unwrap()
}

/// Equal values; zeros of either sign are equal.
#[track_caller]
fn assert_same(ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len());
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!(a == b, "value {i}: {a:e} instead of {b:e}");
    }
}

#[test]
fn rounding_gives_the_values_made_in_numpy() {
    let [values, q8_0, q8_k] = golden();
    for (round, expected) in [(round_q8_0 as fn(&mut [f32]), &q8_0), (round_q8_1, &q8_0), (round_q8_k, &q8_k)]
    {
        let mut ours = values.clone();
        round(&mut ours);
        assert_same(&ours, expected);
    }
}

#[test]
fn ties_go_to_the_even_integer() {
    let mut block = [0.5, 1.5, -0.5, -2.5, 127.0];
    round_q8_0(&mut block);
    assert_eq!(block, [0.0, 2.0, 0.0, -2.0, 127.0]);
    round_q8_k(&mut block);
    assert_eq!(block[4], 127.0);
}

#[test]
fn the_scale_of_q8_0_is_a_half() {
    // 1/127 in f16 is 0x2008: (1 + 8/1024) * 2^-7.
    let mut block = [1.0, -1.0, 0.0];
    round_q8_0(&mut block);
    let scale = (1.0 + 8.0 / 1024.0) / 128.0;
    assert_eq!(block, [127.0 * scale, -127.0 * scale, 0.0]);
}

#[test]
fn a_short_block_rounds_as_if_filled_with_zeros() {
    let [values, ..] = golden();
    for len in [1, 31, 33, 100, 257, 300] {
        for round in [round_q8_0, round_q8_k] {
            let mut short = values[..len].to_vec();
            let mut filled = short.clone();
            filled.resize(len.next_multiple_of(256), 0.0);
            round(&mut short);
            round(&mut filled);
            assert_eq!(short, filled[..len]);
        }
    }
}

#[test]
fn what_is_not_finite_does_not_hide() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for round in [round_q8_0, round_q8_k] {
            for at in [0, 7, 255] {
                let mut block = [1.0; 256];
                block[at] = bad;
                round(&mut block);
                assert!(block[at].is_nan());
            }
        }
    }
}

#[test]
fn each_type_has_the_form_of_its_kernel() {
    for ty in Type::all() {
        let form = ty.activation();
        assert_eq!(form == Activation::Q8_K, ty.block_len() == 256, "{ty}");
        let mut values: Vec<f32> = (0..256).map(|i| (i as f32 - 99.3) * 1.01).collect();
        let before = values.clone();
        form.round(&mut values);
        let step = match form {
            Activation::F32 => 0.0,
            Activation::F16 => 0.0625,
            Activation::BF16 => 0.5,
            Activation::Q8_0 | Activation::Q8_1 | Activation::Q8_K => 159.0 / 127.0 / 2.0 + 0.1,
        };
        let worst = values.iter().zip(&before).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= step && worst >= step / 4.0, "{ty}: {worst}");
    }
    assert_eq!(Type::Q4_1.activation(), Activation::Q8_1);
    assert_eq!(Type::MXFP4.activation(), Activation::Q8_0);
}
