//! Conversion of a tiny checkpoint, against indices worked out here from the published layouts.

mod common;

use std::path::{Path, PathBuf};

use common::*;
use forge::{Control, ConvertOptions, Error, Layout, Mix, Summary, convert};
use gguf::Gguf;
use quant::Type;
use safetensors::Dtype;
use serde_json::json;

struct Converted {
    dir: tempfile::TempDir,
    summary: Summary,
}

impl Converted {
    fn path(&self) -> PathBuf {
        self.dir.path().join("out.gguf")
    }

    fn file(&self) -> Gguf {
        Gguf::open(&self.path()).unwrap()
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.path()).unwrap()
    }
}

fn options() -> ConvertOptions {
    ConvertOptions { name: Some("tiny".into()), ..ConvertOptions::default() }
}

fn f32_options() -> ConvertOptions {
    ConvertOptions { mix: Mix::new(Some(Type::F32), Some(Type::F32)), ..options() }
}

fn try_convert(write: impl Fn(&Path), options: &ConvertOptions) -> Result<Converted, Error> {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    let before = listing(dir.path());
    match convert(dir.path(), &dir.path().join("out.gguf"), options, &mut go_on) {
        Ok(summary) => Ok(Converted { dir, summary }),
        Err(error) => {
            assert_eq!(listing(dir.path()), before, "a failed conversion left something behind");
            Err(error)
        }
    }
}

fn converted(checkpoint: &Checkpoint, options: &ConvertOptions) -> Converted {
    try_convert(|dir| checkpoint.write(dir), options).unwrap()
}

/// What tensor `name` holds according to `element`, called with every flat index.
fn assert_elements(file: &Gguf, name: &str, dims: &[usize], element: impl Fn(usize) -> f32) {
    let info = file.tensor(name).unwrap_or_else(|| panic!("no {name}"));
    assert_eq!(info.dims, dims.iter().map(|&dim| dim as u64).collect::<Vec<_>>(), "{name}");
    for (index, found) in decoded(file, name).into_iter().enumerate() {
        assert_eq!(found, element(index), "{name}[{index}]");
    }
}

#[test]
fn tensors_that_are_copied_or_mapped_element_by_element() {
    let converted = converted(&Checkpoint::tiny(), &f32_options());
    let file = converted.file();
    let same = |name: &str, stored: &str, dims: &[usize]| {
        assert_elements(&file, name, dims, |index| value(stored, index));
    };
    let plus_one = |name: &str, stored: &str, len: usize| {
        assert_elements(&file, name, &[len], |index| value(stored, index) + 1.0);
    };
    same("token_embd.weight", "model.embed_tokens.weight", &[HIDDEN, VOCAB]);
    same("output.weight", "lm_head.weight", &[HIDDEN, VOCAB]);
    plus_one("output_norm.weight", "model.norm.weight", HIDDEN);
    for layer in 0..LAYERS {
        let (blk, hf) = (format!("blk.{layer}."), format!("model.layers.{layer}."));
        let same = |name: &str, stored: &str, dims: &[usize]| {
            same(&format!("{blk}{name}"), &format!("{hf}{stored}"), dims)
        };
        let plus_one =
            |name: &str, stored: &str, len| plus_one(&format!("{blk}{name}"), &format!("{hf}{stored}"), len);
        plus_one("attn_norm.weight", "input_layernorm.weight", HIDDEN);
        plus_one("post_attention_norm.weight", "post_attention_layernorm.weight", HIDDEN);
        same("ffn_gate_inp.weight", "mlp.gate.weight", &[HIDDEN, EXPERTS]);
        same("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight", &[HIDDEN, SHARED]);
        same("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight", &[HIDDEN, SHARED]);
        same("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight", &[SHARED, HIDDEN]);
        same("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", &[HIDDEN]);
        if layer == 3 {
            same("attn_q.weight", "self_attn.q_proj.weight", &[HIDDEN, 2 * HEADS * HEAD_DIM]);
            same("attn_k.weight", "self_attn.k_proj.weight", &[HIDDEN, KV_HEADS * HEAD_DIM]);
            same("attn_v.weight", "self_attn.v_proj.weight", &[HIDDEN, KV_HEADS * HEAD_DIM]);
            same("attn_output.weight", "self_attn.o_proj.weight", &[HEADS * HEAD_DIM, HIDDEN]);
            plus_one("attn_q_norm.weight", "self_attn.q_norm.weight", HEAD_DIM);
            plus_one("attn_k_norm.weight", "self_attn.k_norm.weight", HEAD_DIM);
        } else {
            let (key, val) = (KEY_HEADS * STATE, VALUE_HEADS * STATE);
            same("ssm_ba.weight", "linear_attn.in_proj_ba.weight", &[HIDDEN, 2 * VALUE_HEADS]);
            same("ssm_conv1d.weight", "linear_attn.conv1d.weight", &[4, 2 * key + val]);
            same("ssm_dt.bias", "linear_attn.dt_bias", &[VALUE_HEADS]);
            same("ssm_norm.weight", "linear_attn.norm.weight", &[STATE]);
            same("ssm_out.weight", "linear_attn.out_proj.weight", &[val, HIDDEN]);
            let stored = format!("{hf}linear_attn.A_log");
            assert_elements(&file, &format!("{blk}ssm_a"), &[VALUE_HEADS], |index| {
                -f64::from(value(&stored, index)).exp() as f32
            });
        }
    }
    assert_eq!(file.tensors().len(), 3 + 3 * 18 + 16);
    assert!(converted.summary.skipped.is_empty() && converted.summary.fallbacks.is_empty());
}

/// Rows of the fused projection: for key head g, q[8] k[8] v[3·8] z[3·8].
const FUSED_ROWS_PER_HEAD: usize = 2 * STATE + 2 * (VALUE_HEADS / KEY_HEADS) * STATE;

#[test]
fn the_fused_projection_is_taken_apart_by_key_head() {
    let file = converted(&Checkpoint::tiny(), &f32_options()).file();
    let stored = "model.layers.1.linear_attn.in_proj_qkvz.weight";
    let per_key_head = VALUE_HEADS / KEY_HEADS;
    let row_of_qkv = |row: usize| {
        let key = KEY_HEADS * STATE;
        if row < key {
            (row / STATE) * FUSED_ROWS_PER_HEAD + row % STATE
        } else if row < 2 * key {
            let row = row - key;
            (row / STATE) * FUSED_ROWS_PER_HEAD + STATE + row % STATE
        } else {
            // Value head h belongs to key head h / 3.
            let (head, channel) = ((row - 2 * key) / STATE, row % STATE);
            (head / per_key_head) * FUSED_ROWS_PER_HEAD + 2 * STATE + (head % per_key_head) * STATE + channel
        }
    };
    let row_of_z = |row: usize| row_of_qkv(row + 2 * KEY_HEADS * STATE) + per_key_head * STATE;
    let at = |row: usize, index: usize| value(stored, row * HIDDEN + index % HIDDEN);
    let (key, val) = (KEY_HEADS * STATE, VALUE_HEADS * STATE);
    assert_elements(&file, "blk.1.attn_qkv.weight", &[HIDDEN, 2 * key + val], |i| {
        at(row_of_qkv(i / HIDDEN), i)
    });
    assert_elements(&file, "blk.1.attn_gate.weight", &[HIDDEN, val], |i| at(row_of_z(i / HIDDEN), i));
    assert!(file.tensor("blk.1.ssm_in.weight").is_none());
}

#[test]
fn the_legacy_layout_keeps_the_fused_projection() {
    let options = ConvertOptions { layout: Layout::Legacy, ..f32_options() };
    let file = converted(&Checkpoint::tiny(), &options).file();
    let stored = "model.layers.1.linear_attn.in_proj_qkvz.weight";
    let rows = KEY_HEADS * FUSED_ROWS_PER_HEAD;
    assert_elements(&file, "blk.1.ssm_in.weight", &[HIDDEN, rows], |index| value(stored, index));
    assert!(
        file.tensor("blk.1.attn_qkv.weight").is_none() && file.tensor("blk.1.attn_gate.weight").is_none()
    );
}

#[test]
fn experts_are_expert_major_however_they_are_stored() {
    let checkpoint = Checkpoint::tiny();
    let single = converted(&checkpoint, &f32_options());
    let file = single.file();
    for (name, part, dims) in [
        ("blk.2.ffn_gate_exps.weight", "gate", [HIDDEN, WIDTH, EXPERTS]),
        ("blk.2.ffn_up_exps.weight", "up", [HIDDEN, WIDTH, EXPERTS]),
        ("blk.2.ffn_down_exps.weight", "down", [WIDTH, HIDDEN, EXPERTS]),
    ] {
        assert_elements(&file, name, &dims, |index| {
            let (expert, index) = (index / (HIDDEN * WIDTH), index % (HIDDEN * WIDTH));
            value(&format!("model.layers.2.mlp.experts.{expert}.{part}_proj.weight"), index)
        });
    }
    assert!(single.bytes() == converted(&checkpoint.fused(), &f32_options()).bytes(), "fused experts differ");
}

#[test]
fn shards_give_the_file_that_one_file_gives() {
    let checkpoint = Checkpoint::tiny();
    let single = converted(&checkpoint, &options()).bytes();
    let sharded = try_convert(|dir| checkpoint.write_shards(dir, 3), &options()).unwrap().bytes();
    assert!(single == sharded);
}

#[test]
fn every_element_type_of_checkpoints_is_read() {
    let checkpoint = Checkpoint::tiny();
    let write = |dtype| {
        let checkpoint = checkpoint.clone();
        move |dir: &Path| {
            write_config(dir, config());
            Checkpoint::write_file(&checkpoint.0, dtype, &dir.join("model.safetensors"));
        }
    };
    let expected = converted(&checkpoint, &options()).bytes();
    for dtype in [Dtype::F32, Dtype::F16] {
        assert!(try_convert(write(dtype), &options()).unwrap().bytes() == expected, "{dtype:?}");
    }
    let error = try_convert(write(Dtype::F8_E4M3), &options()).err().unwrap();
    assert!(error.to_string().contains("F8_E4M3"), "{error}");
}

#[test]
fn metadata_states_shape_and_tokenizer() {
    let converted =
        converted(&Checkpoint::tiny(), &ConvertOptions { context_length: Some(65_536), ..options() });
    let file = converted.file();
    let metadata = file.metadata();
    let expected = [
        ("block_count", LAYERS),
        ("context_length", 65_536),
        ("embedding_length", HIDDEN),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("attention.key_length", HEAD_DIM),
        ("attention.value_length", HEAD_DIM),
        ("rope.dimension_count", 4),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", STATE),
        ("ssm.group_count", KEY_HEADS),
        ("ssm.time_step_rank", VALUE_HEADS),
        ("ssm.inner_size", VALUE_HEADS * STATE),
        ("expert_count", EXPERTS),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", WIDTH),
        ("expert_shared_feed_forward_length", SHARED),
        ("full_attention_interval", 4),
    ];
    for (key, number) in expected {
        assert_eq!(metadata.u32(&format!("qwen3next.{key}")).unwrap(), Some(number as u32), "{key}");
    }
    assert_eq!(metadata.f32("qwen3next.rope.freq_base").unwrap(), Some(1e6));
    assert_eq!(metadata.f32("qwen3next.attention.layer_norm_rms_epsilon").unwrap(), Some(1e-6));
    assert!(!metadata.contains("qwen3next.nextn_predict_layers"));
    assert_eq!(metadata.str("general.architecture").unwrap(), Some("qwen3next"));
    assert_eq!(metadata.str("general.name").unwrap(), Some("tiny"));
    assert_eq!(metadata.u32("general.file_type").unwrap(), Some(32));

    let tokens = metadata.strings("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!(tokens.len(), VOCAB);
    assert_eq!(
        (tokens.get(256), tokens.get(259), tokens.get(261)),
        (Some("Ġt"), Some("<|im_end|>"), Some("[PAD261]"))
    );
    let kinds = metadata.ints("tokenizer.ggml.token_type").unwrap().unwrap();
    assert_eq!(kinds[255..263], [1, 1, 3, 3, 3, 4, 5, 5]);
    assert_eq!(
        metadata.strings("tokenizer.ggml.merges").unwrap().unwrap().iter().collect::<Vec<_>>(),
        ["Ġ t"]
    );
    assert_eq!(metadata.str("tokenizer.ggml.model").unwrap(), Some("gpt2"));
    assert_eq!(metadata.str("tokenizer.ggml.pre").unwrap(), Some("qwen2"));
    assert_eq!(metadata.u32("tokenizer.ggml.eos_token_id").unwrap(), Some(259));
    assert_eq!(metadata.u32("tokenizer.ggml.bos_token_id").unwrap(), Some(257));
    assert_eq!(metadata.u32("tokenizer.ggml.padding_token_id").unwrap(), Some(257));
    assert_eq!(metadata.bool("tokenizer.ggml.add_bos_token").unwrap(), Some(false));
    assert_eq!(metadata.str("tokenizer.chat_template").unwrap(), Some("from the configuration"));
}

#[test]
fn a_template_of_its_own_file_wins() {
    let write = |dir: &Path| {
        Checkpoint::tiny().write(dir);
        std::fs::write(dir.join("chat_template.jinja"), "from the file").unwrap();
    };
    let file = try_convert(write, &options()).unwrap().file();
    assert_eq!(file.metadata().str("tokenizer.chat_template").unwrap(), Some("from the file"));
}

#[test]
fn a_tied_model_has_no_output() {
    let mut checkpoint = Checkpoint::tiny();
    checkpoint.remove("lm_head.weight");
    let mut tied = config();
    tied["tie_word_embeddings"] = json!(true);
    let write = |dir: &Path| {
        checkpoint.write(dir);
        write_config(dir, tied.clone());
    };
    assert!(try_convert(write, &options()).unwrap().file().tensor("output.weight").is_none());
    let error = try_convert(|dir| checkpoint.write(dir), &options()).err().unwrap();
    assert!(
        matches!(&error, Error::MissingTensors { count: 1, names } if names == "lm_head.weight"),
        "{error}"
    );
}

#[test]
fn the_mtp_block_is_skipped_aloud_or_taken() {
    let plain = converted(&Checkpoint::tiny(), &f32_options());
    let checkpoint = Checkpoint::tiny().with_mtp();
    let skipped = converted(&checkpoint, &f32_options());
    assert!(plain.bytes() == skipped.bytes());
    assert_eq!(skipped.summary.skipped.len(), 4 + 12 + 3 * EXPERTS + 1);
    assert!(skipped.summary.skipped.iter().all(|name| name.starts_with("mtp.")));

    let taken = converted(&checkpoint, &ConvertOptions { mtp: true, ..f32_options() });
    let file = taken.file();
    assert!(taken.summary.skipped.is_empty());
    assert_eq!(file.metadata().u32("qwen3next.block_count").unwrap(), Some(5));
    assert_eq!(file.metadata().u32("qwen3next.nextn_predict_layers").unwrap(), Some(1));
    assert_elements(&file, "blk.4.nextn.eh_proj.weight", &[2 * HIDDEN, HIDDEN], |i| {
        value("mtp.fc.weight", i)
    });
    assert_elements(&file, "blk.4.nextn.enorm.weight", &[HIDDEN], |i| {
        value("mtp.pre_fc_norm_embedding.weight", i) + 1.0
    });
    assert_elements(&file, "blk.4.nextn.hnorm.weight", &[HIDDEN], |i| {
        value("mtp.pre_fc_norm_hidden.weight", i) + 1.0
    });
    assert_elements(&file, "blk.4.nextn.shared_head_norm.weight", &[HIDDEN], |i| {
        value("mtp.norm.weight", i) + 1.0
    });
    let stored = "mtp.layers.0.self_attn.q_proj.weight";
    assert_elements(&file, "blk.4.attn_q.weight", &[HIDDEN, 2 * HEADS * HEAD_DIM], |i| value(stored, i));
}

#[test]
fn missing_unknown_and_misshapen_tensors_are_named() {
    let mut missing = Checkpoint::tiny();
    missing.remove("model.layers.3.self_attn.k_norm.weight");
    missing.remove("model.layers.0.mlp.experts.2.up_proj.weight");
    let error = try_convert(|dir| missing.write(dir), &options()).err().unwrap().to_string();
    assert!(error.contains("layers.3.self_attn.k_norm") && error.contains("experts.2.up_proj"), "{error}");

    let mut unknown = Checkpoint::tiny();
    unknown.push("model.layers.3.self_attn.q_proj.bias", &[64]);
    let error = try_convert(|dir| unknown.write(dir), &options()).err().unwrap().to_string();
    assert!(error.contains("unknown meaning: model.layers.3.self_attn.q_proj.bias"), "{error}");

    let mut misshapen = Checkpoint::tiny();
    misshapen.remove("model.layers.0.mlp.gate.weight");
    misshapen.push("model.layers.0.mlp.gate.weight", &[HIDDEN, EXPERTS]);
    let error = try_convert(|dir| misshapen.write(dir), &options()).err().unwrap();
    assert!(
        matches!(&error, Error::Shape { name, .. } if name == "model.layers.0.mlp.gate.weight"),
        "{error}"
    );
}

#[test]
fn a_vocabulary_larger_than_the_embedding_is_refused() {
    let mut small = config();
    small["vocab_size"] = json!(260);
    let write = |dir: &Path| {
        let mut checkpoint = Checkpoint::tiny();
        for name in ["lm_head.weight", "model.embed_tokens.weight"] {
            checkpoint.remove(name);
            checkpoint.push(name, &[260, HIDDEN]);
        }
        checkpoint.write(dir);
        write_config(dir, small.clone());
    };
    let error = try_convert(write, &options()).err().unwrap().to_string();
    assert!(error.contains("vocab_size") && error.contains("261 tokens"), "{error}");
}

#[test]
fn a_type_that_cannot_be_written_is_refused_first() {
    let Some(ty) = Type::all().find(|&ty| !quant::can_encode(ty)) else { return };
    let options = ConvertOptions { mix: Mix { down: Some(ty), ..Mix::default() }, ..options() };
    let error = try_convert(|_| (), &options).err().unwrap();
    assert!(matches!(error, Error::CannotEncode { ty: found, .. } if found == ty));
}

#[test]
fn rows_that_fit_no_block_fall_back_and_say_so() {
    let options = ConvertOptions { mix: Mix::new(Some(Type::Q4_K), Some(Type::Q8_0)), ..options() };
    let converted = converted(&Checkpoint::tiny(), &options);
    let file = converted.file();
    let ty = |name: &str| file.tensor(name).unwrap().ty.known().unwrap();
    // Rows of 32 are a block of Q8_0, rows of 24 and 40 are not.
    assert_eq!(ty("blk.0.ffn_gate_exps.weight"), Type::Q8_0);
    assert_eq!(ty("blk.0.ffn_down_exps.weight"), Type::F16);
    assert_eq!(ty("blk.0.ffn_down_shexp.weight"), Type::F16);
    assert_eq!(ty("blk.0.ffn_gate_inp.weight"), Type::F32);
    assert_eq!(ty("token_embd.weight"), Type::Q8_0);
    let text = converted.summary.to_string();
    assert!(
        text.contains("blk.0.ffn_down_exps.weight: F16, because rows of 24 are not whole Q4_K"),
        "{text}"
    );
}

#[test]
fn a_cancelled_conversion_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::tiny().write(dir.path());
    let before = listing(dir.path());
    let mut last = 0;
    let mut total = 0;
    convert(dir.path(), &dir.path().join("whole.gguf"), &options(), &mut |progress| {
        assert!(progress.done >= last && progress.done <= progress.total);
        (last, total) = (progress.done, progress.total);
        Control::Continue
    })
    .unwrap();
    assert_eq!(last, total, "progress ends at the total");
    std::fs::remove_file(dir.path().join("whole.gguf")).unwrap();

    for stop_at in [0, 1, total / 2, total] {
        let result = convert(dir.path(), &dir.path().join("out.gguf"), &options(), &mut |progress| {
            if progress.done >= stop_at { Control::Cancel } else { Control::Continue }
        });
        assert!(matches!(result, Err(Error::Cancelled)), "stopped at {stop_at}");
        assert_eq!(listing(dir.path()), before);
    }
}
