//! Finding tensors: every layout, every defect; what is loaded is what the file holds.

mod common;

use std::ops::Range;

use common::{Draft, Folder, open_bytes};
use gguf::Metadata;
use model::{Error, MappedExperts, Mixer, Model, Pass, ResidentMatrix, ResidentWeights, SequenceId};
use quant::Type;
use testkit::{Decay, Layout, TinyOptions};

type Options = TinyOptions;

fn tiny() -> Draft {
    Draft::tiny(Options::default())
}

/// The smallest model with both kinds of layers, for tests that open many files.
const SMALL: TinyOptions = TinyOptions {
    seed: 1,
    hidden: 16,
    width: 8,
    head: 8,
    attention_head: None,
    layers: 4,
    dense: Type::F32,
    experts: Type::F32,
    layout: Layout::Split,
    decay: Decay::Mixed,
    tied: false,
    fused_experts: false,
    mtp: false,
};

fn load(model: &Model) -> ResidentWeights {
    model.load(&mut |_, _| {}).expect("weights of our own")
}

/// The layers of the default tiny model: three DeltaNet layers, an attention layer, a DeltaNet layer.
const ATTENTION: usize = 3;

/// The rows of a tensor in the file, by their numbers.
fn rows(draft: &Draft, name: &str, wanted: impl IntoIterator<Item = usize>) -> Vec<u8> {
    let tensor = draft.tensor(name);
    let len = tensor.bytes.len() / tensor.shape[..tensor.shape.len() - 1].iter().product::<usize>();
    wanted.into_iter().flat_map(|row| tensor.bytes[row * len..(row + 1) * len].to_vec()).collect()
}

#[track_caller]
fn same(matrix: &ResidentMatrix, expected: &[u8], ty: Type) {
    assert_eq!(matrix.ty, ty, "{}", matrix.name);
    assert_eq!(matrix.bytes.len(), ty.bytes(matrix.rows * matrix.cols).unwrap(), "{}", matrix.name);
    assert!(*matrix.bytes == *expected, "bytes of {}", matrix.name);
}

/// Every dense weight of the default layout, compared with rows picked by hand.
fn check_all(draft: &Draft, model: &Model, ty: Type) {
    let weights = load(model);
    let spec = &model.spec;
    let all = |name: &str| draft.tensor(name).bytes.clone();
    let vector = |name: &str| -> Vec<f32> {
        all(name).chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    for (index, layer) in weights.layers.iter().enumerate() {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        assert_eq!(layer.norm, vector(&name("attn_norm.weight")));
        assert_eq!(layer.moe.norm, vector(&name("post_attention_norm.weight")));
        assert_eq!(layer.moe.shared_router, vector(&name("ffn_gate_inp_shexp.weight")));
        same(&layer.moe.router, &all(&name("ffn_gate_inp.weight")), Type::F32);
        same(&layer.moe.shared_gate, &all(&name("ffn_gate_shexp.weight")), ty);
        same(&layer.moe.shared_up, &all(&name("ffn_up_shexp.weight")), ty);
        same(&layer.moe.shared_down, &all(&name("ffn_down_shexp.weight")), ty);
        match &layer.mixer {
            Mixer::Delta(delta) => {
                same(&delta.qkv, &all(&name("attn_qkv.weight")), ty);
                same(&delta.z, &all(&name("attn_gate.weight")), ty);
                same(&delta.out, &all(&name("ssm_out.weight")), ty);
                // Per key head: beta of its two value heads, then alpha of both.
                let ba = rows(draft, &name("ssm_ba.weight"), [0, 1, 4, 5, 2, 3, 6, 7]);
                same(&delta.beta_alpha, &ba, ty);
                assert_eq!(delta.conv, vector(&name("ssm_conv1d.weight")));
                assert_eq!(delta.dt_bias, vector(&name("ssm_dt.bias")));
                assert_eq!(delta.a, vector(&name("ssm_a")));
                assert_eq!(delta.norm, vector(&name("ssm_norm.weight")));
            }
            Mixer::Attention(attention) => {
                let head = spec.attention.head_dim;
                // Per head: its query rows, then its gate rows.
                let half = |gate: usize| {
                    (0..Options::HEADS).flat_map(move |h| (0..head).map(move |i| (2 * h + gate) * head + i))
                };
                same(&attention.query, &rows(draft, &name("attn_q.weight"), half(0)), ty);
                same(&attention.gate, &rows(draft, &name("attn_q.weight"), half(1)), ty);
                same(&attention.key, &all(&name("attn_k.weight")), ty);
                same(&attention.value, &all(&name("attn_v.weight")), ty);
                same(&attention.out, &all(&name("attn_output.weight")), ty);
                assert_eq!(attention.query_norm, vector(&name("attn_q_norm.weight")));
                assert_eq!(attention.key_norm, vector(&name("attn_k_norm.weight")));
            }
        }
    }
    assert_eq!(weights.output_norm, vector("output_norm.weight"));
    same(&weights.output, &all("output.weight"), ty);
}

#[test]
fn everything_loaded_is_what_the_file_holds() {
    let quantised = Options { dense: Type::Q8_0, experts: Type::Q8_0, ..Options::default() };
    for options in [Options::default(), quantised] {
        let draft = Draft::tiny(options);
        let model = draft.open().unwrap();
        assert!(model.warnings.is_empty() && !model.tied);
        check_all(&draft, &model, options.dense);

        let mut seen = Vec::new();
        model.load(&mut |done, total| seen.push((done, total))).unwrap();
        assert!(seen.is_sorted() && seen.iter().all(|&(_, total)| total == model.dense_bytes()));
        assert_eq!(seen.last(), Some(&(model.dense_bytes(), model.dense_bytes())));

        let table = draft.tensor("token_embd.weight");
        let mut all = vec![0.0; Options::VOCAB * options.hidden];
        quant::decode(table.ty, &table.bytes, &mut all).unwrap();
        for token in [0, 1, Options::VOCAB - 1] {
            let mut row = vec![0.0; options.hidden];
            model.embed(token as u32, &mut row).unwrap();
            assert_eq!(row, all[token * options.hidden..(token + 1) * options.hidden]);
        }
    }
}

#[test]
fn small_tables_may_be_half_precision() {
    let mut draft = tiny();
    for (name, ty) in [("output_norm.weight", Type::F16), ("blk.0.ssm_conv1d.weight", Type::BF16)] {
        let tensor = draft.tensor_mut(name);
        let count = tensor.shape.iter().product();
        let values: Vec<f32> = (0..count).map(|i| (i % 64) as f32 * 0.25 - 4.0).collect();
        tensor.bytes.clear();
        tensor.ty = ty;
        quant::encode(ty, &values, None, &mut tensor.bytes).unwrap();
    }
    let weights = load(&draft.open().unwrap());
    let expected = |count: usize| -> Vec<f32> { (0..count).map(|i| (i % 64) as f32 * 0.25 - 4.0).collect() };
    assert_eq!(weights.output_norm, expected(64));
    let Mixer::Delta(delta) = &weights.layers[0].mixer else { panic!("layer 0 is a DeltaNet layer") };
    assert_eq!(delta.conv, expected(1024), "BF16 holds these exactly");
    // Norms carry precision that no block format keeps.
    let draft = tiny().replace("blk.2.attn_norm.weight", Type::Q8_0, &[64]);
    let error = draft.refused();
    assert!(matches!(error, Error::TensorType { found: Type::Q8_0, .. }), "{error}");
    assert!(error.to_string().contains("`blk.2.attn_norm.weight`"), "{error}");
}

/// The legacy layout, row by row: for each key head q[d] k[d] v[r·d] z[r·d].
#[test]
fn fused_delta_projections_are_taken_apart() {
    for dense in [Type::F32, Type::Q8_0] {
        let draft = Draft::tiny(Options { layout: Layout::Legacy, dense, ..Options::default() });
        let weights = load(&draft.open().unwrap());
        let (d, key_heads, per_key) = (32, 2, 2);
        let group = 2 * d + 2 * per_key * d;
        let row_of = |what: usize, value_head: usize, i: usize| {
            let key_head = value_head / per_key;
            let within = value_head % per_key * d + i;
            key_head * group
                + match what {
                    0 => i,                            // q of the key head
                    1 => d + i,                        // k
                    2 => 2 * d + within,               // v
                    _ => 2 * d + per_key * d + within, // z
                }
        };
        let mut qkv = Vec::new();
        for what in [0, 1] {
            (0..key_heads).for_each(|h| qkv.extend((0..d).map(|i| row_of(what, h * per_key, i))));
        }
        (0..4).for_each(|h| qkv.extend((0..d).map(|i| row_of(2, h, i))));
        let z: Vec<usize> =
            (0..4).flat_map(|h| (0..d).map(move |i| (h, i))).map(|(h, i)| row_of(3, h, i)).collect();
        for layer in [0, 1, 2, 4] {
            let name = format!("blk.{layer}.ssm_in.weight");
            let Mixer::Delta(delta) = &weights.layers[layer].mixer else { panic!("a DeltaNet layer") };
            same(&delta.qkv, &rows(&draft, &name, qkv.iter().copied()), dense);
            same(&delta.z, &rows(&draft, &name, z.iter().copied()), dense);
            assert_eq!((delta.qkv.rows, delta.z.rows, delta.z.cols), (256, 128, 64));
        }
    }
}

#[test]
fn fused_attention_projections_are_taken_apart() {
    let plain = tiny();
    let name = |suffix: &str| format!("blk.{ATTENTION}.{suffix}.weight");
    let names = [name("attn_q"), name("attn_k"), name("attn_v")];
    let fused: Vec<u8> = names.iter().flat_map(|n| plain.tensor(n).bytes.clone()).collect();
    let mut draft = names.iter().fold(plain.clone(), |draft, n| draft.drop(n));
    draft = draft.add(&name("attn_qkv"), Type::F32, &[256 + 64 + 64, 64]);
    draft.tensor_mut(&name("attn_qkv")).bytes = fused;
    let (fused, expected) = (load(&draft.open().unwrap()), load(&plain.open().unwrap()));
    let (Mixer::Attention(fused), Mixer::Attention(expected)) =
        (&fused.layers[ATTENTION].mixer, &expected.layers[ATTENTION].mixer)
    else {
        panic!("`attn_qkv` does not make it a DeltaNet layer");
    };
    for (a, b) in [
        (&fused.query, &expected.query),
        (&fused.gate, &expected.gate),
        (&fused.key, &expected.key),
        (&fused.value, &expected.value),
    ] {
        assert_eq!((a.rows, a.cols), (b.rows, b.cols));
        same(a, &b.bytes, Type::F32);
    }
}

#[test]
fn tied_models_have_one_table() {
    let draft = Draft::tiny(Options { tied: true, ..Options::default() });
    let model = draft.open().unwrap();
    assert!(model.tied && model.warnings.is_empty());
    same(&load(&model).output, &draft.tensor("token_embd.weight").bytes, Type::F32);
}

/// Bytes of one expert's matrix in the file: rows `rows` of its matrix in a tensor.
fn expert_bytes(draft: &Draft, name: &str, expert: usize, part: Range<usize>) -> Vec<u8> {
    let rows_each = draft.tensor(name).shape[1];
    rows(draft, name, part.map(|row| expert * rows_each + row))
}

fn check_experts(draft: &Draft, model: &Model, fused: bool) {
    for layer in 0..model.spec.layers.len() {
        let name = |what: &str| format!("blk.{layer}.ffn_{what}_exps.weight");
        let layout = &model.experts[layer];
        let (width, hidden) = (model.spec.moe.widths[layer], model.spec.hidden);
        let placed = model.mapped_experts(layer);
        assert_eq!(placed.len(), Options::EXPERTS);
        for (expert, place) in placed.iter().enumerate() {
            assert_eq!((place.expert as usize, place.slot.arena), (expert, 0));
            let [gate, up] = if fused {
                [0..width, width..2 * width].map(|part| expert_bytes(draft, &name("gate_up"), expert, part))
            } else {
                ["gate", "up"].map(|what| expert_bytes(draft, &name(what), expert, 0..width))
            };
            let down = expert_bytes(draft, &name("down"), expert, 0..hidden);
            assert!(model.file_bytes(place.slot.gate, layout.gate.bytes()) == gate, "gate of {expert}");
            assert!(model.file_bytes(place.slot.up, layout.up.bytes()) == up, "up of {expert}");
            assert!(model.file_bytes(place.slot.down, layout.down.bytes()) == down, "down of {expert}");
            assert_eq!(layout.triplet_bytes(), gate.len() + up.len() + down.len());
        }
    }
    let _ = MappedExperts::new(model);
}

#[test]
fn experts_are_where_their_slots_say() {
    let quantised = Options { experts: Type::Q8_0, ..Options::default() };
    for options in [Options::default(), Options { fused_experts: true, ..Options::default() }, quantised] {
        let draft = Draft::tiny(options);
        let model = draft.open().unwrap();
        check_experts(&draft, &model, options.fused_experts);
        let each = model.experts[0].triplet_bytes();
        assert_eq!(model.expert_bytes(), (options.layers * Options::EXPERTS * each) as u64);
    }
}

#[test]
fn layers_may_have_experts_of_their_own_width_and_type() {
    let mut draft = tiny().set("expert_feed_forward_length", vec![32u32, 64, 32, 32, 32]);
    for (what, shape) in [("gate", [8, 64, 64]), ("up", [8, 64, 64]), ("down", [8, 64, 64])] {
        let name = format!("blk.1.ffn_{what}_exps.weight");
        let ty = if what == "down" { Type::Q8_0 } else { Type::MXFP4 };
        draft = draft.replace(&name, ty, &shape);
        draft.tensor_mut(&name).bytes.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 7 % 251) as u8);
    }
    let model = draft.open().unwrap();
    assert_eq!((model.experts[1].gate.ty, model.experts[1].down.ty), (Type::MXFP4, Type::Q8_0));
    check_experts(&draft, &model, false);
}

#[test]
fn split_files_are_one_model() {
    let draft = tiny();
    let folder = Folder::new();
    let count = draft.tensors.len();
    let cuts = [0, 10, 11, count];
    for (no, cut) in cuts.windows(2).enumerate() {
        // Only the first shard describes the model.
        let mut metadata = if no == 0 { draft.metadata.clone() } else { Metadata::new() };
        metadata.set("split.no", no as u32);
        metadata.set("split.count", 3u32);
        metadata.set("split.tensors.count", count as u32);
        let path = folder.0.join(format!("m-{:05}-of-00003.gguf", no + 1));
        draft.write(&path, &metadata, &draft.tensors[cut[0]..cut[1]]);
    }
    for path in [folder.0.clone(), folder.0.join("m-00002-of-00003.gguf")] {
        let model = Model::open(&path).unwrap();
        assert_eq!(model.gguf.shards().len(), 3);
        check_all(&draft, &model, Type::F32);
        check_experts(&draft, &model, false);
    }
    let folder = folder.0.join("m-00003-of-00003.gguf");
    std::fs::remove_file(&folder).unwrap();
    let error = Model::open(&folder.with_file_name("m-00001-of-00003.gguf")).unwrap_err();
    assert!(matches!(error, Error::Gguf(_)), "{error}");
}

#[test]
fn every_tensor_is_missed_by_name() {
    for options in [SMALL, Options { layout: Layout::Legacy, fused_experts: true, ..SMALL }] {
        let draft = Draft::tiny(options);
        for tensor in &draft.tensors {
            let name = &tensor.name;
            if name == "output.weight" || name.contains(".1.") || name.contains(".2.") {
                continue; // tied without it; layers like the first
            }
            let message = draft.clone().drop(name).refused().to_string();
            assert!(message.contains("missing") && message.contains("should be ["), "{message}");
            // Without the fused tensor, its parts are missed.
            let missed = match name.rsplit('.').nth(1) {
                Some("ssm_in") => "blk.0.attn_qkv.weight",
                Some("ffn_gate_up_exps") => &name.replace("gate_up", "gate"),
                Some("attn_q") => "blk.3.attn_qkv.weight",
                _ => name,
            };
            assert!(message.contains(&format!("`{missed}`")), "without {name}: {message}");
        }
    }
}

#[test]
fn every_shape_is_checked_and_both_are_told() {
    let draft = Draft::tiny(SMALL);
    for tensor in &draft.tensors {
        let name = &tensor.name;
        if name.starts_with("blk.1.") || name.starts_with("blk.2.") {
            continue; // layers like the first
        }
        let mut shapes = vec![tensor.shape.clone(), [vec![2], tensor.shape.clone()].concat()];
        shapes[0][0] += 1;
        for shape in shapes {
            // Rows of the embedding say how large the vocabulary is: then the output does not fit.
            let blamed = if name == "token_embd.weight" && shape.len() == 2 { "output.weight" } else { name };
            let message = draft.clone().replace(name, tensor.ty, &shape).refused().to_string();
            assert!(message.contains(&format!("`{blamed}`")), "{name} as {shape:?}: {message}");
            if blamed == name {
                let expected = match name.as_str() {
                    "token_embd.weight" => "[vocabulary, 16]".to_string(),
                    _ => format!("{:?}", tensor.shape),
                };
                assert!(message.contains(&format!("{shape:?}")) && message.contains(&expected), "{message}");
            }
        }
    }
    // Another split of the same numbers is another matrix; a leading 1 is not.
    let message = draft.clone().replace("blk.0.ssm_out.weight", Type::F32, &[32, 16]).refused().to_string();
    assert!(message.contains("[32, 16]") && message.contains("[16, 32]"), "{message}");
    draft.clone().replace("blk.0.ffn_gate_inp_shexp.weight", Type::F32, &[1, 16]).open().unwrap();
}

#[test]
fn unsupported_types_are_one_message() {
    let draft = tiny();
    let names = ["blk.0.attn_qkv.weight", "blk.3.ffn_up_exps.weight"];
    let error = open_bytes(draft.with_type_ids(&[(names[0], 4), (names[1], 9999)])).unwrap_err();
    let message = error.to_string();
    for part in ["`blk.0.attn_qkv.weight` (type id 4)", "`blk.3.ffn_up_exps.weight` (type id 9999)"] {
        assert!(message.contains(part), "{message}");
    }
    // Many are counted, not all listed.
    let ids: Vec<(&str, u32)> = draft.tensors.iter().map(|t| (t.name.as_str(), 77)).collect();
    let message = open_bytes(draft.with_type_ids(&ids)).unwrap_err().to_string();
    assert!(message.contains(&format!("and {} more", ids.len() - 8)), "{message}");
    // Every type of the format can be an expert's.
    let base = Draft::tiny(Options { layers: 1, ..Options::quantised(Type::F32, Type::F32) });
    for ty in Type::all() {
        let shapes = [("gate", [8, 256, 256]), ("up", [8, 256, 256]), ("down", [8, 256, 256])];
        let draft = shapes.iter().fold(base.clone(), |draft, (what, shape)| {
            draft.replace(&format!("blk.0.ffn_{what}_exps.weight"), ty, shape)
        });
        assert_eq!(draft.open().unwrap().experts[0].up.ty, ty);
    }
}

#[test]
fn tensors_that_would_change_the_result_are_refused() {
    for name in [
        "blk.0.attn_qkv.bias",
        "blk.3.attn_q.bias",
        "blk.3.ffn_gate_inp.bias",
        "output.bias",
        "output_norm.bias",
        "blk.1.ffn_down_exps.scale",
        "blk.1.ssm_out.scale",
        "rope_freqs.weight",
    ] {
        let error = tiny().add(name, Type::F32, &[64]).refused();
        assert!(matches!(error, Error::UnsupportedTensors { .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn tensors_nobody_uses_are_a_warning() {
    let model = tiny().add("blk.0.mystery.weight", Type::F32, &[3]).open().unwrap();
    assert_eq!(model.warnings.len(), 1);
    assert!(model.warnings[0].contains("1 tensors") && model.warnings[0].contains("blk.0.mystery.weight"));
    // A whole block that no key declares, with a name that would clear the screen.
    let mut draft = tiny().add("blk.9.\u{1b}[2J.weight", Type::F32, &[3]);
    for i in 0..40 {
        draft = draft.add(&format!("blk.5.part{i}.weight"), Type::F32, &[3]);
    }
    let model = draft.open().unwrap();
    assert_eq!(model.spec.layers.len(), 5);
    let warning = &model.warnings[0];
    assert!(warning.contains("41 tensors") && warning.contains("blk.5.part0"), "{warning}");
    assert!(!warning.contains('\u{1b}') && warning.len() < 400, "{warning}");
}

#[test]
fn the_block_for_further_tokens_is_skipped_by_declaration() {
    let plain = tiny();
    let draft = Draft::tiny(Options { mtp: true, ..Options::default() });
    let model = draft.open().unwrap();
    assert_eq!((model.spec.layers.len(), model.spec.mtp_blocks), (5, 1));
    assert!(model.warnings.is_empty(), "{:?}", model.warnings);
    check_all(&plain, &model, Type::F32);
    // Neither its types nor its extras matter.
    let mut odd =
        draft.clone().add("blk.5.attn_q.bias", Type::F32, &[3]).add("blk.5.what.weight", Type::F32, &[3]);
    assert!(odd.open().unwrap().warnings.is_empty());
    let bytes = odd.with_type_ids(&[("blk.5.nextn.eh_proj.weight", 4242)]);
    assert!(open_bytes(bytes).unwrap().warnings.is_empty());
    // Undeclared, the same tensors are nobody's.
    odd = draft.set("block_count", 5u32).set("nextn_predict_layers", 0u32);
    let model = odd.open().unwrap();
    assert_eq!((model.spec.layers.len(), model.spec.mtp_blocks), (5, 0));
    assert!(model.warnings[0].contains("blk.5.nextn.eh_proj.weight"), "{:?}", model.warnings);
}

#[test]
fn token_ids_reach_as_far_as_the_embedding() {
    let spec = tiny().open().unwrap().spec;
    let mut pass = Pass::new();
    pass.push(SequenceId(0), 0, &[96]);
    pass.check(spec.vocab).unwrap();
    pass.tokens[0] = 97;
    assert!(pass.check(spec.vocab).unwrap_err().to_string().contains("97"));
}
