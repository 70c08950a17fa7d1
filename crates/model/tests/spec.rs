//! Shapes that cannot be right, or cannot be run, are refused by the name of the key.

mod common;

use common::Draft;
use gguf::{Array, Metadata, Strings, Value};
use model::{Error, LayerKind, Spec};
use testkit::TinyOptions;
use text::TokenKind;

const VOCAB: usize = 97;

fn tiny() -> Draft {
    Draft::tiny(TinyOptions::default())
}

fn spec(draft: &Draft) -> Result<Spec, Error> {
    Spec::from_metadata(&draft.metadata, VOCAB)
}

#[track_caller]
fn bad(draft: Draft, key: &str, found: &str) {
    let message = match spec(&draft) {
        Ok(_) => panic!("`{key}` = {found} was accepted"),
        Err(error @ Error::BadKey { .. }) => error.to_string(),
        Err(other) => panic!("`{key}` = {found}: {other}"),
    };
    let start = format!("metadata key `qwen3next.{key}` is {found}");
    assert!(message.starts_with(&start) && message.contains("expected"), "{message}");
}

fn kinds(draft: Draft) -> String {
    let letter = |kind: &LayerKind| if *kind == LayerKind::Delta { 'd' } else { 'a' };
    spec(&draft).unwrap_or_else(|error| panic!("{error}")).layers.iter().map(letter).collect()
}

#[test]
fn a_good_file_says_everything() {
    let spec = spec(&tiny()).unwrap();
    assert_eq!((spec.name.as_str(), spec.mtp_blocks, spec.hidden, spec.vocab), ("tiny", 0, 64, 97));
    assert_eq!((spec.context, spec.rms_eps), (4096, 1e-6));
    assert_eq!((spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim), (4, 2, 32));
    assert_eq!((spec.attention.rope_dims, spec.attention.rope_base), (16, 10_000.0));
    assert_eq!((spec.attention.query_dim(), spec.attention.kv_dim()), (128, 64));
    assert_eq!((spec.delta.key_heads, spec.delta.value_heads, spec.delta.head_dim), (2, 4, 32));
    assert_eq!((spec.delta.key_dim(), spec.delta.value_dim(), spec.delta.channels()), (64, 128, 256));
    assert_eq!((spec.delta.taps, spec.delta_layers(), spec.attention_layers()), (4, 4, 1));
    assert_eq!((spec.moe.experts, spec.moe.used, spec.moe.shared_width), (8, 3, 32));
    assert_eq!(spec.moe.widths, [32; 5]);
    assert_eq!([0, 2, 3, 4].map(|layer| spec.ordinal(layer)), [0, 2, 0, 3]);
}

#[test]
fn the_size_of_the_vocabulary_is_that_of_the_embedding() {
    let message = tiny().set("vocab_size", 98u32).refused().to_string();
    assert!(message.starts_with("metadata key `qwen3next.vocab_size` is 98; expected 97"), "{message}");
}

#[test]
fn other_architectures_are_named() {
    let mut draft = tiny();
    for name in ["llama", "qwen35moe"] {
        draft.metadata.set("general.architecture", name);
        let message = draft.refused().to_string();
        assert!(message.contains(&format!("architecture `{name}`")), "{message}");
    }
    draft.metadata.remove("general.architecture");
    assert!(draft.refused().to_string().contains("architecture `(none)`"));
    draft.metadata.set("general.architecture", "\u{1b}[2J".repeat(1000));
    let message = draft.refused().to_string();
    assert!(!message.contains('\u{1b}') && message.len() < 1000, "{message}");
}

#[test]
fn keys_that_must_be_there() {
    let counts = [
        "block_count",
        "embedding_length",
        "context_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "ssm.group_count",
        "ssm.time_step_rank",
        "ssm.state_size",
        "ssm.inner_size",
        "ssm.conv_kernel",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
    ];
    for key in counts {
        let missing = spec(&tiny().unset(key)).expect_err(key).to_string();
        assert!(missing.contains(&format!("`qwen3next.{key}` is missing")), "{missing}");
        bad(tiny().set(key, 0u32), key, "0");
        bad(tiny().set(key, u64::from(u32::MAX)), key, "4294967295");
        let negative = spec(&tiny().set(key, -1)).expect_err(key).to_string();
        assert!(negative.contains(key) && negative.contains("-1"), "{negative}");
        let text = spec(&tiny().set(key, "many")).expect_err(key).to_string();
        assert!(text.contains(key) && text.contains("string"), "{text}");
    }
    let key = "attention.layer_norm_rms_epsilon";
    assert!(spec(&tiny().unset(key)).unwrap_err().to_string().contains(key));
    for (eps, found) in [(0.0, "0"), (-1e-6, "-0.000001"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        bad(tiny().set(key, eps), key, found);
    }
}

#[test]
fn sizes_that_contradict_each_other() {
    bad(tiny().set("attention.head_count", 5u32), "attention.head_count", "5");
    bad(tiny().set("attention.value_length", 16u32), "attention.value_length", "16");
    for dims in [0u32, 15, 34] {
        bad(tiny().set("rope.dimension_count", dims), "rope.dimension_count", &dims.to_string());
    }
    for (base, found) in [(1.0, "1"), (0.0, "0"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        bad(tiny().set("rope.freq_base", base), "rope.freq_base", found);
    }
    bad(tiny().set("ssm.time_step_rank", 5u32), "ssm.time_step_rank", "5");
    bad(tiny().set("ssm.inner_size", 127u32), "ssm.inner_size", "127");
    bad(tiny().set("ssm.conv_kernel", 65u32), "ssm.conv_kernel", "65");
    bad(tiny().set("expert_used_count", 9u32), "expert_used_count", "9");
    bad(tiny().set("block_count", 4097u32), "block_count", "4097");
    bad(tiny().set("nextn_predict_layers", 5u32), "nextn_predict_layers", "5");
    bad(tiny().set("full_attention_interval", 0u32), "full_attention_interval", "0");
    // 2^28 · 2^28 · 2^28 would not fit anything.
    let large = 1u32 << 28;
    let huge = tiny().set("ssm.time_step_rank", large).set("ssm.state_size", large);
    bad(huge, "ssm.inner_size", "128");
}

#[test]
fn other_mathematics_is_refused() {
    let rope = |kind: &str| tiny().set("rope.scaling.type", kind);
    for draft in [rope("none"), rope("none").set("rope.scaling.factor", 4.0f32), rope("linear")] {
        spec(&draft).unwrap();
    }
    spec(&rope("yarn").set("rope.scaling.factor", 1.0f32)).unwrap();
    bad(rope("yarn").set("rope.scaling.factor", 4.0f32), "rope.scaling.factor", "4");
    // Without a type, other readers scale linearly.
    bad(tiny().set("rope.scaling.factor", 2.0f32), "rope.scaling.factor", "2");
    bad(rope("yarn").set("rope.scaling.attn_factor", 1.5f32), "rope.scaling.attn_factor", "1.5");
    bad(tiny().set("rope.scale_linear", 8.0f32), "rope.scale_linear", "8");
    bad(rope("longrope"), "rope.scaling.type", "`longrope`");

    spec(&tiny().set("expert_gating_func", 1u32)).unwrap();
    bad(tiny().set("expert_gating_func", 2u32), "expert_gating_func", "2");
    spec(&tiny().set("expert_weights_norm", true)).unwrap();
    bad(tiny().set("expert_weights_norm", false), "expert_weights_norm", "false");
    spec(&tiny().set("expert_weights_scale", 1.0f32)).unwrap();
    bad(tiny().set("expert_weights_scale", 2.5f32), "expert_weights_scale", "2.5");
    bad(tiny().set("expert_weights_scale", f32::NAN), "expert_weights_scale", "NaN");
    bad(tiny().set("expert_group_count", 8u32), "expert_group_count", "8");
}

#[test]
fn layers_by_interval_or_list() {
    let key = "attention.recurrent_layers";
    let bools = |flags: &[bool]| Value::Array(Array::Bool(flags.to_vec()));
    assert_eq!(kinds(tiny()), "dddad");
    assert_eq!(kinds(tiny().unset("full_attention_interval")), "dddad");
    assert_eq!(kinds(tiny().set("full_attention_interval", 2u32)), "dadad");
    assert_eq!(kinds(tiny().set("full_attention_interval", 1u32)), "aaaaa");
    // The list wins over the interval.
    assert_eq!(kinds(tiny().set(key, bools(&[true, false, true, true, false]))), "dadda");
    assert_eq!(kinds(tiny().set(key, vec![1u32, 0, 1, 1, 0])), "dadda");
    assert_eq!(kinds(tiny().set(key, vec![0u32, 2, 3])), "dadda");
    assert_eq!(kinds(tiny().set(key, vec![0u32, 1])), "ddaaa");
    assert_eq!(kinds(tiny().set(key, Vec::<u32>::new())), "aaaaa");
    // With an MTP block, flags may be for all blocks or for the trunk; numbers mean the same in both.
    let mtp = || tiny().set("nextn_predict_layers", 1u32);
    assert_eq!(kinds(mtp()), "ddda");
    assert_eq!(kinds(mtp().set(key, vec![1u32, 0, 1, 1, 0])), "dadd");
    assert_eq!(kinds(mtp().set(key, vec![1u32, 1, 1, 0])), "ddda");
    assert_eq!(kinds(mtp().set(key, bools(&[true, true, false, true]))), "ddad");
    assert_eq!(kinds(mtp().set(key, vec![0u32, 4])), "daaa");

    bad(tiny().set(key, bools(&[true; 4])), key, "4 flags");
    bad(tiny().set(key, bools(&[true; 6])), key, "6 flags");
    bad(tiny().set(key, vec![0u32, 5]), key, "a list with 5");
    bad(tiny().set(key, vec![-1, 2]), key, "a list with -1");
    bad(tiny().set(key, vec![0u32, 2, 2]), key, "neither");
    bad(tiny().set(key, vec![0u32; 4]), key, "neither");
    let text = spec(&tiny().set(key, "all")).unwrap_err().to_string();
    assert!(text.contains(key), "{text}");
}

#[test]
fn numbers_that_may_be_given_for_each_block() {
    let key = "expert_feed_forward_length";
    let widths = |list: Vec<u32>| spec(&tiny().set(key, list)).unwrap().moe.widths;
    assert_eq!(widths(vec![32, 64, 32, 96, 128]), [32, 64, 32, 96, 128]);
    let mtp = tiny().set("nextn_predict_layers", 1u32);
    assert_eq!(spec(&mtp.clone().set(key, vec![1u32, 2, 3, 4])).unwrap().moe.widths, [1, 2, 3, 4]);
    assert_eq!(spec(&mtp.set(key, vec![1u32, 2, 3, 4, 5])).unwrap().moe.widths, [1, 2, 3, 4]);
    bad(tiny().set(key, vec![32u32; 4]), key, "4 widths");
    bad(tiny().set(key, vec![32u32, 32, 0, 32, 32]), key, "0");
    bad(tiny().set(key, vec![32, 32, -7, 32, 32]), key, "-7");

    let key = "attention.head_count_kv";
    assert_eq!(spec(&tiny().set(key, vec![0u32, 0, 0, 4, 0])).unwrap().attention.kv_heads, 4);
    bad(tiny().set(key, vec![0u32; 5]), key, "an array of 5 numbers");
    bad(tiny().set(key, vec![2u32, 0, 0, 4, 0]), key, "an array of 5 numbers");
    bad(tiny().set(key, vec![-2, -2]), key, "an array of 2 numbers");
}

fn tokenizer_metadata() -> Metadata {
    let mut metadata = Metadata::new();
    let strings = |list: &[&str]| list.iter().collect::<Strings>();
    metadata.set("tokenizer.ggml.model", "gpt2");
    metadata.set("tokenizer.ggml.pre", "qwen2");
    metadata.set("tokenizer.ggml.tokens", strings(&["a", "b", "ab", "<end>"]));
    metadata.set("tokenizer.ggml.merges", strings(&["a b"]));
    metadata.set("tokenizer.ggml.token_type", vec![1, 1, 1, 3]);
    metadata.set("tokenizer.ggml.eos_token_id", 3u32);
    metadata.set("tokenizer.ggml.padding_token_id", 2u32);
    metadata.set("tokenizer.ggml.add_bos_token", false);
    metadata.set("tokenizer.chat_template", "{{ messages }}");
    metadata
}

#[test]
fn the_vocabulary_is_what_the_file_says() {
    let mut metadata = tokenizer_metadata();
    let vocabulary = model::vocabulary(&metadata).unwrap();
    assert_eq!(vocabulary.tokens, ["a", "b", "ab", "<end>"]);
    assert_eq!((vocabulary.merges.as_slice(), vocabulary.pre.as_str()), (&["a b".to_string()][..], "qwen2"));
    assert_eq!((vocabulary.kinds[2], vocabulary.kinds[3]), (TokenKind::Normal, TokenKind::Control));
    assert_eq!((vocabulary.eos, vocabulary.bos, vocabulary.pad), (Some(3), None, Some(2)));
    assert_eq!((vocabulary.add_bos, vocabulary.chat_template.as_deref()), (false, Some("{{ messages }}")));
    for key in ["token_type", "eos_token_id", "padding_token_id", "add_bos_token"] {
        metadata.remove(&format!("tokenizer.ggml.{key}")).unwrap();
    }
    assert_eq!(model::vocabulary(&metadata).unwrap().kinds, [TokenKind::Normal; 4]);
}

#[test]
fn a_vocabulary_that_cannot_be_read_is_refused_by_key() {
    for key in ["tokens", "merges", "pre"] {
        let mut metadata = tokenizer_metadata();
        metadata.remove(&format!("tokenizer.ggml.{key}"));
        let message = model::vocabulary(&metadata).unwrap_err().to_string();
        assert!(message.contains(&format!("`tokenizer.ggml.{key}` is missing")), "{message}");
        metadata.set(format!("tokenizer.ggml.{key}"), 7u32);
        let message = model::vocabulary(&metadata).unwrap_err().to_string();
        assert!(message.contains(key) && message.contains("u32"), "{message}");
    }
    let mut metadata = tokenizer_metadata();
    metadata.set("tokenizer.ggml.token_type", vec![1, 1, 9, 3]);
    let message = model::vocabulary(&metadata).unwrap_err().to_string();
    assert!(message.contains("token 2 has type 9"), "{message}");
    for kind in ["llama", "bert"] {
        metadata.set("tokenizer.ggml.model", kind);
        let message = model::vocabulary(&metadata).unwrap_err().to_string();
        assert!(message.contains("tokenizer.ggml.model") && message.contains(kind), "{message}");
    }
}
