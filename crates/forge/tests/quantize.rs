//! Requantisation against an error computed here, and what must not change.

mod common;

use std::path::Path;

use common::*;
use forge::{Class, Control, Error, Mix, QuantizeOptions, Shape, Summary, SynthOptions, quantize, synth};
use gguf::{Gguf, Metadata, TensorDecl, Writer};
use quant::Type;

/// Two layers (DeltaNet, attention) with rows of whole super-blocks, but for the shared expert's down matrix, and
/// an embedding that one thread encodes in several batches.
fn shape() -> Shape {
    Shape {
        layers: 2,
        hidden: 256,
        vocab: 1000,
        heads: 2,
        kv_heads: 1,
        head_dim: 128,
        rope_dims: 32,
        attention_interval: 2,
        key_heads: 1,
        value_heads: 2,
        experts: 2,
        experts_used: 1,
        expert_width: 256,
        shared_width: 96,
        ..Shape::default()
    }
}

/// An F32 model in `dir`.
fn source(dir: &Path) -> std::path::PathBuf {
    let path = dir.join("source.gguf");
    let mix = Mix::new(Some(Type::F32), Some(Type::F32));
    synth(&path, &SynthOptions { shape: shape(), mix, ..SynthOptions::default() }, &mut go_on).unwrap();
    path
}

fn options(mix: Mix, threads: usize) -> QuantizeOptions {
    QuantizeOptions { mix, threads }
}

fn run(input: &Path, out: &Path, mix: Mix) -> Result<Summary, Error> {
    quantize(input, out, &options(mix, 0), &mut go_on)
}

/// √(Σ(a − b)² / Σa²) over the tensors called `names`.
fn rms(a: &Gguf, b: &Gguf, names: &[&str]) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for name in names {
        for (x, y) in decoded(a, name).into_iter().zip(decoded(b, name)) {
            error += (f64::from(x) - f64::from(y)).powi(2);
            norm += f64::from(x).powi(2);
        }
    }
    f64::sqrt(error / norm)
}

#[test]
fn classes_get_their_types_and_the_error_is_true() {
    let dir = tempfile::tempdir().unwrap();
    let input = source(dir.path());
    let out = dir.path().join("out.gguf");
    let mix = Mix {
        down: Some(Type::Q3_K),
        output: Some(Type::Q6_K),
        attention: Some(Type::Q5_K),
        layers: vec!["gate_up:1=Q2_K".parse().unwrap()],
        ..Mix::new(Some(Type::IQ2_XXS), Some(Type::Q4_K))
    };
    let summary = run(&input, &out, mix).unwrap();
    let (before, after) = (Gguf::open(&input).unwrap(), Gguf::open(&out).unwrap());
    let ty = |name: &str| after.tensor(name).unwrap().ty.known().unwrap();
    assert_eq!(ty("token_embd.weight"), Type::Q4_K);
    assert_eq!(ty("output.weight"), Type::Q6_K);
    assert_eq!(ty("blk.0.attn_qkv.weight"), Type::Q4_K);
    assert_eq!(ty("blk.0.ssm_ba.weight"), Type::Q8_0);
    assert_eq!(ty("blk.1.attn_q.weight"), Type::Q5_K);
    assert_eq!(ty("blk.0.ffn_up_exps.weight"), Type::IQ2_XXS);
    assert_eq!(ty("blk.1.ffn_up_exps.weight"), Type::Q2_K);
    assert_eq!(ty("blk.1.ffn_down_exps.weight"), Type::Q3_K);
    assert_eq!(ty("blk.0.ffn_gate_shexp.weight"), Type::Q4_K);
    assert_eq!(ty("blk.0.ffn_down_shexp.weight"), Type::Q8_0, "rows of 96");
    for fixed in
        ["attn_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight", "ssm_a", "ffn_gate_inp_shexp.weight"]
    {
        let name = format!("blk.0.{fixed}");
        assert_eq!(ty(&name), Type::F32);
        assert_eq!(after.bytes(after.tensor(&name).unwrap()), before.bytes(before.tensor(&name).unwrap()));
    }
    assert_eq!(summary.fallbacks.len(), 2);

    let error = |class, ty| {
        let line = summary.lines.iter().find(|line| (line.class, line.ty) == (class, ty)).unwrap();
        line.rms_error.unwrap()
    };
    let experts = ["blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"];
    let down = ["blk.0.ffn_down_exps.weight", "blk.1.ffn_down_exps.weight"];
    let cases: [(Class, Type, &[&str], std::ops::Range<f64>); 4] = [
        (Class::GateUp, Type::IQ2_XXS, &experts, 0.25..0.45),
        (Class::Down, Type::Q3_K, &down, 0.08..0.18),
        (Class::Output, Type::Q6_K, &["output.weight"], 0.005..0.03),
        (Class::BetaAlpha, Type::Q8_0, &["blk.0.ssm_ba.weight"], 0.001..0.008),
    ];
    for (class, ty, names, range) in cases {
        let found = error(class, ty);
        assert!((found - rms(&before, &after, names)).abs() < 1e-9, "{ty}: {found}");
        assert!(range.contains(&found), "{ty}: {found}");
    }
    let bytes: u64 = summary.lines.iter().map(|line| line.bytes).sum();
    assert_eq!(bytes, summary.bytes);
    assert_eq!(bytes, after.tensors().iter().map(|info| info.len).sum::<u64>());
}

#[test]
fn the_file_does_not_depend_on_threads() {
    let dir = tempfile::tempdir().unwrap();
    let input = source(dir.path());
    let mut files = [1, 2, 5].map(|threads| {
        let out = dir.path().join("out.gguf");
        let mix = Mix::new(Some(Type::Q4_K), Some(Type::Q6_K));
        let summary = quantize(&input, &out, &options(mix, threads), &mut go_on).unwrap();
        (std::fs::read(&out).unwrap(), summary)
    });
    let first = files[0].clone();
    assert!(files.iter_mut().all(|file| *file == first));
}

#[test]
fn what_is_not_chosen_is_copied() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (dir.path().join("first.gguf"), dir.path().join("second.gguf"));
    // IQ3_XXS is encoded here, and copied whether or not there is an encoder.
    let mix = Mix::new(Some(Type::IQ3_XXS), Some(Type::Q8_0));
    let shape = shape();
    synth(&first, &SynthOptions { shape, mix, ..SynthOptions::default() }, &mut go_on).unwrap();
    let summary = run(&first, &second, Mix::default()).unwrap();
    assert!(std::fs::read(&first).unwrap() == std::fs::read(&second).unwrap());
    assert!(summary.lines.iter().all(|line| line.rms_error.is_none()));
}

#[test]
fn a_split_model_becomes_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let whole = source(dir.path());
    let model = Gguf::open(&whole).unwrap();
    let shards = dir.path().join("shards");
    std::fs::create_dir(&shards).unwrap();
    let cut = model.tensors().len() / 2;
    for (no, part) in [&model.tensors()[..cut], &model.tensors()[cut..]].into_iter().enumerate() {
        let mut metadata = if no == 0 { model.metadata().clone() } else { Metadata::new() };
        metadata.set("split.no", gguf::Value::U16(no as u16));
        metadata.set("split.count", gguf::Value::U16(2));
        metadata.set("split.tensors.count", model.tensors().len() as i32);
        let decls: Vec<TensorDecl> = part
            .iter()
            .map(|info| TensorDecl { name: info.name.clone(), dims: info.dims.clone(), ty: Type::F32 })
            .collect();
        let mut writer =
            Writer::create(&shards.join(format!("m-0000{}-of-00002.gguf", no + 1)), &metadata, &decls)
                .unwrap();
        part.iter().for_each(|info| writer.write(model.bytes(info)).unwrap());
        writer.finish().unwrap();
    }
    let mix = Mix::new(Some(Type::Q8_0), Some(Type::Q8_0));
    let outs = [whole, shards.join("m-00002-of-00002.gguf"), shards].map(|input| {
        let out = dir.path().join("out.gguf");
        run(&input, &out, mix.clone()).unwrap();
        std::fs::read(out).unwrap()
    });
    assert!(outs[0] == outs[1] && outs[1] == outs[2]);
}

/// A file with these F32 tensors, all of whose weights are 1.
fn write_ones(path: &Path, tensors: &[(&str, &[u64])]) {
    let decls: Vec<TensorDecl> = tensors
        .iter()
        .map(|(name, dims)| TensorDecl { name: name.to_string(), dims: dims.to_vec(), ty: Type::F32 })
        .collect();
    let mut writer = Writer::create(path, &Metadata::new(), &decls).unwrap();
    for (_, dims) in tensors {
        let count: u64 = dims.iter().product();
        writer.write(&1f32.to_le_bytes().repeat(count as usize)).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn a_fused_qkv_follows_the_kind_of_its_layer() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in.gguf"), dir.path().join("out.gguf"));
    let tensors: [(&str, &[u64]); 4] = [
        ("blk.0.attn_qkv.weight", &[32, 4]),
        ("blk.0.ssm_conv1d.weight", &[4, 8]),
        ("blk.1.attn_qkv.weight", &[32, 4]),
        ("blk.1.ffn_gate_up_exps.weight", &[32, 4, 2]),
    ];
    write_ones(&input, &tensors);
    let mix = Mix {
        attention: Some(Type::F16),
        delta: Some(Type::BF16),
        gate_up: Some(Type::Q8_0),
        ..Mix::default()
    };
    run(&input, &out, mix).unwrap();
    let file = Gguf::open(&out).unwrap();
    let types: Vec<Type> = file.tensors().iter().map(|info| info.ty.known().unwrap()).collect();
    assert_eq!(types, [Type::BF16, Type::F32, Type::F16, Type::Q8_0]);
}

#[test]
fn unknown_types_and_layers_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in.gguf"), dir.path().join("out.gguf"));
    write_ones(&input, &[("blk.0.ffn_down_exps.weight", &[32, 2])]);
    let mix = Mix { layers: vec!["down:0-1=Q8_0".parse().unwrap()], ..Mix::default() };
    let error = run(&input, &out, mix).unwrap_err().to_string();
    assert!(error.contains("0-1=Q8_0") && error.contains("1 blocks"), "{error}");

    let mut bytes = std::fs::read(&input).unwrap();
    let name = b"blk.0.ffn_down_exps.weight";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len();
    // The number of dimensions, two dimensions, the type.
    bytes[at + 4 + 16..][..4].copy_from_slice(&1000u32.to_le_bytes());
    std::fs::write(&input, bytes).unwrap();
    let error = run(&input, &out, Mix::default()).unwrap_err();
    assert!(
        matches!(&error, Error::UnknownType { name, id: 1000 } if name.contains("ffn_down_exps")),
        "{error}"
    );
    assert_eq!(listing(dir.path()), ["in.gguf"]);
}

#[test]
fn weights_that_no_block_can_hold_are_refused_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in.gguf"), dir.path().join("out.gguf"));
    write_ones(&input, &[("output.weight", &[32, 2])]);
    let mut bytes = std::fs::read(&input).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&input, bytes).unwrap();
    let error = run(&input, &out, Mix::new(None, Some(Type::Q8_0))).unwrap_err();
    assert!(matches!(&error, Error::Quant { name, .. } if name == "output.weight"), "{error}");
    assert_eq!(listing(dir.path()), ["in.gguf"]);
}

#[test]
fn a_cancelled_requantisation_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let input = source(dir.path());
    let result = quantize(
        &input,
        &dir.path().join("out.gguf"),
        &options(Mix::new(None, Some(Type::Q8_0)), 0),
        &mut |p| {
            if p.done > p.total / 2 { Control::Cancel } else { Control::Continue }
        },
    );
    assert!(matches!(result, Err(Error::Cancelled)));
    assert_eq!(listing(dir.path()), ["source.gguf"]);
}

#[test]
fn layer_rules_are_parsed_or_explained() {
    for bad in ["", "3", "3=", "3=Q9", "a=Q8_0", "5-3=Q8_0", "up:3=Q8_0", "-1=Q8_0"] {
        assert!(bad.parse::<forge::LayerType>().is_err(), "{bad:?}");
    }
    let rule: forge::LayerType = "down:40-47=iq2_xs".parse().unwrap();
    assert_eq!((rule.first, rule.last, rule.ty, rule.part), (40, 47, Type::IQ2_XS, forge::ExpertPart::Down));
}
