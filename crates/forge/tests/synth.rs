//! Synthetic models: they open, they are what the seed says, and their numbers are sane.

mod common;

use std::path::Path;

use common::*;
use forge::{Control, Error, Layout, Mix, Recipe, Shape, SynthOptions, synth};
use gguf::Gguf;
use quant::Type;

fn shape() -> Shape {
    Shape {
        layers: 4,
        hidden: 256,
        vocab: 512,
        heads: 2,
        kv_heads: 1,
        head_dim: 64,
        rope_dims: 16,
        key_heads: 2,
        value_heads: 4,
        state_dim: 64,
        experts: 8,
        experts_used: 2,
        expert_width: 256,
        shared_width: 256,
        ..Shape::default()
    }
}

fn options(shape: Shape, recipe: Recipe) -> SynthOptions {
    let mix = recipe.mix(shape.layers);
    SynthOptions { shape, mix, ..SynthOptions::default() }
}

fn made(dir: &Path, options: &SynthOptions) -> Vec<u8> {
    let path = dir.join("synth.gguf");
    synth(&path, options, &mut go_on).unwrap();
    std::fs::read(path).unwrap()
}

fn rms(weights: &[f32]) -> f64 {
    (weights.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>() / weights.len() as f64).sqrt()
}

#[test]
fn every_recipe_and_variant_opens_as_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("synth.gguf");
    let variants = [
        shape(),
        Shape { layout: Layout::Legacy, ..shape() },
        Shape { tied: true, ..shape() },
        Shape { mtp_layers: 1, ..shape() },
        Shape { attention_layers: Some(vec![true, false, false, true]), ..shape() },
    ];
    for recipe in Recipe::ALL {
        for shape in &variants {
            synth(&path, &options(shape.clone(), recipe), &mut go_on).unwrap();
            let model =
                model::Model::open(&path).unwrap_or_else(|error| panic!("{recipe:?} {shape:?}: {error}"));
            let spec = &model.spec;
            assert_eq!((spec.layers.len(), spec.mtp_blocks), (4, shape.mtp_layers as usize));
            assert!(model.warnings.is_empty(), "{:?}", model.warnings);
        }
    }
}

#[test]
fn recipes_choose_the_types_they_promise() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("synth.gguf");
    synth(&path, &options(Shape { layers: 12, ..shape() }, Recipe::F2), &mut go_on).unwrap();
    let file = Gguf::open(&path).unwrap();
    let ty = |name: &str| file.tensor(name).unwrap().ty.known().unwrap();
    assert_eq!(ty("blk.3.ffn_gate_exps.weight"), Type::IQ1_M);
    assert_eq!(ty("blk.3.ffn_down_exps.weight"), Type::IQ1_M);
    assert_eq!(ty("blk.4.ffn_down_exps.weight"), Type::IQ2_XS);
    assert_eq!(ty("blk.11.ffn_up_exps.weight"), Type::IQ2_XS);
    assert_eq!(ty("blk.0.attn_qkv.weight"), Type::Q4_K);
    assert_eq!(ty("blk.0.ssm_ba.weight"), Type::Q8_0);
    assert_eq!(ty("blk.0.ffn_gate_inp.weight"), Type::F32);
    assert_eq!("f2".parse::<Recipe>().unwrap(), Recipe::F2);
    assert!("f3".parse::<Recipe>().is_err());
}

#[test]
fn equal_seeds_make_equal_files_on_any_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let base = options(shape(), Recipe::Iq2Xxs);
    let first = made(dir.path(), &base);
    for threads in [1, 3] {
        assert!(made(dir.path(), &SynthOptions { threads, ..base.clone() }) == first);
    }
    assert!(made(dir.path(), &SynthOptions { seed: 2, ..base }) != first);
}

#[test]
fn weights_have_their_deviation_whatever_their_type() {
    let dir = tempfile::tempdir().unwrap();
    for recipe in [Recipe::F32, Recipe::Iq2Xxs] {
        made(dir.path(), &options(shape(), recipe));
        let file = Gguf::open(&dir.path().join("synth.gguf")).unwrap();
        let close = |name: &str, expected: f64| {
            let found = rms(&decoded(&file, name));
            assert!((found / expected - 1.0).abs() < 0.06, "{recipe:?} {name}: {found}, not {expected}");
        };
        close("token_embd.weight", 0.5);
        close("output.weight", 3.0 / 16.0);
        close("blk.0.attn_qkv.weight", 1.0 / 16.0);
        close("blk.3.attn_q.weight", 1.0 / 16.0);
        close("blk.0.ffn_up_exps.weight", 1.0 / 16.0);
        // Rows of 256 in, 4 blocks.
        close("blk.0.ffn_down_exps.weight", 1.0 / 16.0);
        close("blk.0.ssm_out.weight", 0.5 / 16.0);
        close("blk.0.ffn_gate_inp.weight", 1.5 / 16.0);
        close("blk.0.ssm_conv1d.weight", 0.5);

        let norm = decoded(&file, "blk.0.attn_norm.weight");
        assert!(norm.iter().all(|w| (0.6..1.4).contains(w)) && rms(&norm) > 0.95);
        assert!(decoded(&file, "blk.0.ssm_a").iter().all(|a| (-16.0..=-1.0).contains(a)));
        for bias in decoded(&file, "blk.0.ssm_dt.bias") {
            let step = f64::from(bias).exp().ln_1p();
            assert!((0.0009..0.11).contains(&step), "step {step}");
        }
    }
}

#[test]
fn skew_spreads_the_rows_of_the_router() {
    let dir = tempfile::tempdir().unwrap();
    let spread = |skew: f32| {
        let shape = Shape { experts: 64, ..shape() };
        made(dir.path(), &SynthOptions { skew, ..options(shape, Recipe::F2) });
        let file = Gguf::open(&dir.path().join("synth.gguf")).unwrap();
        let rows: Vec<f64> =
            decoded(&file, "blk.1.ffn_gate_inp.weight").chunks(256).map(|row| rms(row).ln()).collect();
        let mean = rows.iter().sum::<f64>() / rows.len() as f64;
        (rows.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / rows.len() as f64).sqrt()
    };
    assert!(spread(0.0) < 0.06);
    let half = spread(0.5);
    assert!((0.35..0.65).contains(&half), "{half}");
}

#[test]
fn every_expert_has_a_popularity_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    // A router drawn in more than one piece.
    let shape = Shape { experts: 600, expert_width: 32, layers: 1, ..shape() };
    let router = |skew: f32| {
        made(dir.path(), &SynthOptions { skew, ..options(shape.clone(), Recipe::F2) });
        decoded(&Gguf::open(&dir.path().join("synth.gguf")).unwrap(), "blk.0.ffn_gate_inp.weight")
    };
    let (even, skewed) = (router(0.0), router(0.5));
    let mut factors: Vec<f64> =
        even.chunks(256).zip(skewed.chunks(256)).map(|(a, b)| rms(b) / rms(a)).collect();
    factors.sort_by(f64::total_cmp);
    assert_eq!(factors.len(), 600);
    // A few of 600 numbers of 18 bits coincide.
    let shared = factors.windows(2).filter(|pair| pair[1] - pair[0] < 1e-6).count();
    assert!(shared < 20, "{shared} experts share their factor with another");
}

#[test]
fn what_makes_no_model_is_refused_by_option() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("vocab", Shape { vocab: 258, ..shape() }),
        ("hidden", Shape { hidden: 0, ..shape() }),
        ("experts-used", Shape { experts_used: 9, ..shape() }),
        ("value-heads", Shape { value_heads: 3, ..shape() }),
        ("rope-dims", Shape { rope_dims: 66, ..shape() }),
        ("heads × head-dim", Shape { heads: u32::MAX, ..shape() }),
        ("attention-layers", Shape { attention_layers: Some(vec![true]), ..shape() }),
    ];
    for (option, shape) in cases {
        let result = synth(&dir.path().join("x.gguf"), &options(shape, Recipe::F32), &mut go_on);
        assert!(
            matches!(&result, Err(Error::Option { option: found, .. }) if found == option),
            "{option}: {result:?}"
        );
    }
    let skew = SynthOptions { skew: f32::NAN, ..options(shape(), Recipe::F32) };
    assert!(synth(&dir.path().join("x.gguf"), &skew, &mut go_on).is_err());
    assert!(listing(dir.path()).is_empty());
}

#[test]
fn types_without_encoder_can_be_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    for ty in Type::all() {
        let mix = Mix::new(Some(ty), Some(ty));
        synth(
            &path,
            &SynthOptions { shape: Shape { layers: 1, ..shape() }, mix, ..SynthOptions::default() },
            &mut go_on,
        )
        .unwrap();
        let file = Gguf::open(&path).unwrap();
        assert_eq!(file.tensor("blk.0.ffn_up_exps.weight").unwrap().ty.known(), Some(ty));
        let found = rms(&decoded(&file, "blk.0.ffn_up_exps.weight"));
        assert!((found * 16.0 - 1.0).abs() < 0.06, "{ty}: {found}");
    }
}

#[test]
fn a_cancelled_model_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let result = synth(&dir.path().join("x.gguf"), &options(shape(), Recipe::F2), &mut |progress| {
        if progress.tensor.starts_with("blk.2.") { Control::Cancel } else { Control::Continue }
    });
    assert!(matches!(result, Err(Error::Cancelled)));
    assert!(listing(dir.path()).is_empty());
}
