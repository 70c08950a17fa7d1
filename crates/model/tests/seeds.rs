//! The files in `corpus`, from which the fuzzer starts: the smallest models of each layout, all weights zero.
//!
//! They are made here; `REDLITE_BLESS=1 cargo test -p redlite-model --test seeds` writes them anew.

mod common;

use std::path::Path;

use common::{Draft, Tensor, open_bytes};
use gguf::Strings;
use quant::Type;
use testkit::{Layout, TinyOptions};

/// A DeltaNet layer, an attention layer, three tokens, two experts.
fn seed(options: TinyOptions) -> Draft {
    let small = TinyOptions { hidden: 4, width: 2, head: 4, layers: 4, ..options };
    let mut draft = Draft::tiny(small).set("block_count", 2 + u32::from(options.mtp));
    draft =
        draft.set("full_attention_interval", 2u32).set("expert_count", 2u32).set("expert_used_count", 1u32);
    draft.metadata.set("general.alignment", 8u32);
    draft.tensors.retain(|t| !t.name.starts_with("blk.1.") && !t.name.starts_with("blk.2."));
    for tensor in &mut draft.tensors {
        let per_expert =
            tensor.name.ends_with("_exps.weight") || tensor.name.ends_with("ffn_gate_inp.weight");
        match tensor.shape[0] {
            TinyOptions::VOCAB => tensor.shape[0] = 3,
            TinyOptions::EXPERTS if per_expert => tensor.shape[0] = 2,
            _ => {}
        }
        let moved = tensor.name.replace("blk.3.", "blk.1.").replace("blk.4.", "blk.2.");
        let bytes = vec![0; tensor.ty.bytes(tensor.shape.iter().product()).expect("whole blocks")];
        *tensor = Tensor { name: moved, bytes, ..tensor.clone() };
    }
    draft
}

/// Attention projections in one tensor, a vocabulary, layers as a list.
fn odd() -> Draft {
    let options =
        TinyOptions { layout: Layout::Legacy, fused_experts: true, tied: true, ..Default::default() };
    let mut draft = seed(options).set("attention.recurrent_layers", vec![1u32, 0]);
    for name in ["attn_q", "attn_k", "attn_v"] {
        draft = draft.drop(&format!("blk.1.{name}.weight"));
    }
    draft = draft.add("blk.1.attn_qkv.weight", Type::F32, &[32 + 8 + 8, 4]);
    let strings = |list: &[&str]| list.iter().collect::<Strings>();
    draft.metadata.set("tokenizer.ggml.model", "gpt2");
    draft.metadata.set("tokenizer.ggml.pre", "qwen2");
    draft.metadata.set("tokenizer.ggml.tokens", strings(&["a", "b", "ab"]));
    draft.metadata.set("tokenizer.ggml.merges", strings(&["a b"]));
    draft.metadata.set("tokenizer.ggml.token_type", vec![1, 1, 3]);
    draft
}

#[test]
fn seeds_are_good_models() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let legacy = TinyOptions { layout: Layout::Legacy, ..Default::default() };
    let seeds = [
        ("split", seed(TinyOptions::default())),
        ("legacy", seed(legacy)),
        ("mtp", seed(TinyOptions { mtp: true, ..Default::default() })),
        ("odd", odd()),
    ];
    for (name, draft) in seeds {
        let (path, bytes) = (folder.join(format!("{name}.gguf")), draft.bytes());
        if std::env::var_os("REDLITE_BLESS").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        let model = open_bytes(bytes.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((model.spec.layers.len(), model.spec.vocab, model.spec.moe.experts), (2, 3, 2));
        assert!(std::fs::read(&path).unwrap() == bytes, "{name}: write the seeds anew");
    }
}
