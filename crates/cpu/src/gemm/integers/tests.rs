//! Integer products against f64 sums over the same rounded activations: every type, odd shapes, every
//! variant of this machine; all variants must agree to the bit.

use quant::Type;

use super::super::tests::{Case, numbers, variants};
use super::*;
use crate::Variant;
use crate::gemm::{GateUp, Inner, Product, Then, dense, gate_up};
use crate::kernels::Kernels;
use crate::pool::Pool;

fn team(variant: Variant, threads: usize) -> Team {
    Team::new(Pool::new(threads, false).unwrap(), Kernels::choose(Some(variant)).unwrap(), false)
}

/// The integer product of some rows.
fn product(case: &Case, team: &mut Team, rows: Range<usize>) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows.len() * case.n];
    let mut codes = Vec::new();
    let x = Rows::new(&case.x[rows.start * case.k..], case.k, rows.len());
    let x = Input::round(team, x, case.k, &mut codes);
    assert!(x.codes_for(&[case.weights()]).is_some());
    let target = Out::new(&mut out, case.n);
    dense(team, &[Product { weights: case.weights(), x, out: target, then: Then::Store }]);
    out
}

/// What activations are rounded to, written anew.
fn rounded(x: &[f32]) -> Vec<f64> {
    let group = |x: &[f32]| -> Vec<f64> {
        let largest = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        let integer = |x: &f32| (x * (127.0 / largest)).round_ties_even();
        x.iter().map(|x| f64::from(integer(x)) * f64::from(largest) / 127.0).collect()
    };
    x.chunks(32).flat_map(group).collect()
}

#[test]
fn products_of_every_type_and_odd_shapes() {
    for ty in Type::all().filter(|&ty| is_integer(ty)) {
        let mut lengths = vec![256, 768, 1024];
        if ty.block_len() == 32 {
            lengths.extend([32, 96, 544]);
        }
        for (i, &k) in lengths.iter().enumerate() {
            for (j, rows) in [1, 2, 3, 4, 5, 7, 49, 97].into_iter().enumerate() {
                let n = [1, 16, 33, 47, 18][(i + j) % 5];
                let mut case = Case::new(ty, rows, n, k);
                let mut first: Option<Vec<f32>> = None;
                let original = case.x.clone();
                for variant in variants() {
                    let found = product(&case, &mut team(variant, 2), 0..rows);
                    if first.is_none() {
                        case.x = rounded(&original).into_iter().map(|x| x as f32).collect();
                        case.check(&found, variant.name());
                        case.x.clone_from(&original);
                    }
                    let first = first.get_or_insert_with(|| found.clone());
                    let same = first.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{variant} {ty} {rows} × {n} × {k}");
                }
            }
        }
    }
}

#[test]
fn few_rows_meet_any_number_of_weight_rows() {
    for (i, ty) in Type::all().filter(|&ty| is_integer(ty)).enumerate() {
        for n in 1..=17 {
            let (rows, k) = (1 + (i + n) % 4, if ty.block_len() == 32 { 32 * n } else { 256 * (1 + n % 3) });
            let case = Case::new(ty, rows, n, k);
            let mut all = variants().map(|variant| product(&case, &mut team(variant, 1), 0..rows));
            let first = all.next().expect("the portable one at least");
            for found in all {
                let same = first.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{ty} {rows} × {n} × {k}");
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_among_any_others() {
    for variant in variants() {
        for ty in [Type::Q8_0, Type::Q5_K, Type::Q6_K, Type::IQ2_XXS, Type::Q2_K] {
            let case = Case::new(ty, 101, 37, 768);
            let all = product(&case, &mut team(variant, 1), 0..101);
            for threads in [1, 3] {
                let mut team = team(variant, threads);
                for rows in [0..1, 7..8, 100..101, 3..5, 1..4, 2..7, 40..101] {
                    let some = product(&case, &mut team, rows.clone());
                    let expected = &all[rows.start * case.n..rows.end * case.n];
                    let same = some.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{variant} {ty}, rows {rows:?}, {threads} threads");
                }
            }
        }
    }
}

/// First halves that are rounded where they are made must have the bits of those rounded afterwards.
#[test]
fn first_halves_are_rounded_on_the_way() {
    for (rows, width, k) in [(1, 32, 256), (5, 64, 768), (49, 544, 512), (97, 512, 256)] {
        let gate = Case::new(Type::IQ2_XXS, rows, width, k);
        let up = Case::new(Type::Q6_K, 1, width, k);
        for variant in variants() {
            let mut team = team(variant, 3);
            let mut codes = Vec::new();
            let x = Input::round(&mut team, Rows::new(&gate.x, k, rows), k, &mut codes);
            let groups = [GateUp { gate: gate.weights(), up: up.weights(), x, first: 1 }];
            let mut numbers = vec![f32::NAN; (rows + 1) * width];
            gate_up(&mut team, &groups, Inner::Numbers(Out::new(&mut numbers, width)));
            let mut expected = Vec::new();
            let inner = Rows::new(&numbers[width..], width, rows);
            Input::round(&mut team, inner, width, &mut expected);
            let per_row = Codes::per_row(width);
            let mut found = vec![Codes::ZERO; (rows + 1) * per_row];
            gate_up(&mut team, &groups, Inner::Codes(Out::new(&mut found, per_row)));
            assert!(found[per_row..] == expected, "{variant} {rows} × {width} × {k}");
        }
    }
}

#[test]
fn numbers_that_are_not_finite_are_not_hidden() {
    for variant in variants() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut case = Case::new(Type::Q8_0, 2, 20, 64);
            case.x[64 + 40] = odd;
            let found = product(&case, &mut team(variant, 1), 0..2);
            assert!(found[..20].iter().all(|x| x.is_finite()), "{variant}: the row before");
            assert!(found[20..].iter().all(|x| !x.is_finite()), "{variant}: the row itself");
        }
        let mut zeros = Case::new(Type::Q4_K, 1, 20, 256);
        zeros.x.fill(0.0);
        assert!(product(&zeros, &mut team(variant, 1), 0..1).iter().all(|&x| x == 0.0), "{variant}");
    }
}

#[test]
fn weights_of_plain_numbers_are_multiplied_as_they_are() {
    let mut team = team(Variant::Portable, 1);
    let mut codes = Vec::new();
    let x = numbers(64, 3);
    let input = Input::round(&mut team, Rows::new(&x, 64, 1), 64, &mut codes);
    for ty in [Type::F32, Type::F16, Type::BF16] {
        assert!(input.codes_for(&[Case::new(ty, 1, 4, 64).weights()]).is_none(), "{ty}");
    }
    assert!(Input::round(&mut team, Rows::new(&x, 60, 1), 60, &mut Vec::new()).codes.is_none());
}
