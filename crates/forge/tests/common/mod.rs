//! A tiny checkpoint, written with the reference implementation of safetensors.

#![allow(dead_code)] // each test binary uses its part

use std::collections::HashMap;
use std::path::Path;

use forge::{Control, Progress};
use gguf::Gguf;
use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

pub const HIDDEN: usize = 32;
pub const VOCAB: usize = 270;
pub const LAYERS: usize = 4;
pub const HEADS: usize = 2;
pub const KV_HEADS: usize = 1;
pub const HEAD_DIM: usize = 16;
pub const KEY_HEADS: usize = 2;
pub const VALUE_HEADS: usize = 6;
pub const STATE: usize = 8;
pub const EXPERTS: usize = 3;
pub const WIDTH: usize = 24;
pub const SHARED: usize = 40;

/// The pre-tokenizer's pattern in the family's tokenizer.json.
const SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Element `index` of the stored tensor `name`: exact in BF16, different everywhere.
pub fn value(name: &str, index: usize) -> f32 {
    let hash = name.bytes().fold(index as u32 ^ 0x9e37, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193).rotate_left(9)
    });
    ((hash >> 8) % 255) as f32 / 64.0 - 127.0 / 64.0
}

/// The checkpoint as a table: names, shapes, elements as f32.
#[derive(Clone, Default)]
pub struct Checkpoint(pub Vec<(String, Vec<usize>, Vec<f32>)>);

impl Checkpoint {
    pub fn tiny() -> Checkpoint {
        let mut all = Checkpoint::default();
        all.push("model.embed_tokens.weight", &[VOCAB, HIDDEN]);
        all.push("model.norm.weight", &[HIDDEN]);
        all.push("lm_head.weight", &[VOCAB, HIDDEN]);
        for layer in 0..LAYERS {
            all.push_layer(&format!("model.layers.{layer}."), (layer + 1) % 4 == 0);
        }
        all
    }

    /// Adds the multi-token prediction block.
    pub fn with_mtp(mut self) -> Checkpoint {
        self.push("mtp.fc.weight", &[HIDDEN, 2 * HIDDEN]);
        for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
            self.push(&format!("mtp.{name}.weight"), &[HIDDEN]);
        }
        self.push_layer("mtp.layers.0.", true);
        self
    }

    fn push_layer(&mut self, prefix: &str, attention: bool) {
        let mut push = |name: &str, shape: &[usize]| self.push(&format!("{prefix}{name}"), shape);
        push("input_layernorm.weight", &[HIDDEN]);
        push("post_attention_layernorm.weight", &[HIDDEN]);
        if attention {
            push("self_attn.q_proj.weight", &[2 * HEADS * HEAD_DIM, HIDDEN]);
            push("self_attn.k_proj.weight", &[KV_HEADS * HEAD_DIM, HIDDEN]);
            push("self_attn.v_proj.weight", &[KV_HEADS * HEAD_DIM, HIDDEN]);
            push("self_attn.o_proj.weight", &[HIDDEN, HEADS * HEAD_DIM]);
            push("self_attn.q_norm.weight", &[HEAD_DIM]);
            push("self_attn.k_norm.weight", &[HEAD_DIM]);
        } else {
            let (key, val) = (KEY_HEADS * STATE, VALUE_HEADS * STATE);
            push("linear_attn.in_proj_qkvz.weight", &[2 * key + 2 * val, HIDDEN]);
            push("linear_attn.in_proj_ba.weight", &[2 * VALUE_HEADS, HIDDEN]);
            push("linear_attn.conv1d.weight", &[2 * key + val, 1, 4]);
            push("linear_attn.dt_bias", &[VALUE_HEADS]);
            push("linear_attn.A_log", &[VALUE_HEADS]);
            push("linear_attn.norm.weight", &[STATE]);
            push("linear_attn.out_proj.weight", &[HIDDEN, val]);
        }
        push("mlp.gate.weight", &[EXPERTS, HIDDEN]);
        for expert in 0..EXPERTS {
            push(&format!("mlp.experts.{expert}.gate_proj.weight"), &[WIDTH, HIDDEN]);
            push(&format!("mlp.experts.{expert}.up_proj.weight"), &[WIDTH, HIDDEN]);
            push(&format!("mlp.experts.{expert}.down_proj.weight"), &[HIDDEN, WIDTH]);
        }
        push("mlp.shared_expert.gate_proj.weight", &[SHARED, HIDDEN]);
        push("mlp.shared_expert.up_proj.weight", &[SHARED, HIDDEN]);
        push("mlp.shared_expert.down_proj.weight", &[HIDDEN, SHARED]);
        push("mlp.shared_expert_gate.weight", &[1, HIDDEN]);
    }

    pub fn push(&mut self, name: &str, shape: &[usize]) {
        let elements = (0..shape.iter().product()).map(|index| value(name, index)).collect();
        self.0.push((name.to_owned(), shape.to_vec(), elements));
    }

    pub fn get(&self, name: &str) -> &(String, Vec<usize>, Vec<f32>) {
        self.0.iter().find(|tensor| tensor.0 == name).unwrap_or_else(|| panic!("no {name}"))
    }

    pub fn remove(&mut self, name: &str) {
        self.0.retain(|tensor| tensor.0 != name);
    }

    /// The same weights with experts stored as Transformers 5 does: gate over up of every expert in one tensor.
    pub fn fused(&self) -> Checkpoint {
        let mut fused = self.clone();
        fused.0.retain(|(name, ..)| !name.contains(".experts."));
        let prefixes: Vec<&str> = self.0.iter().filter_map(|t| t.0.strip_suffix("mlp.gate.weight")).collect();
        for prefix in prefixes {
            let (mut gate_up, mut down) = (Vec::new(), Vec::new());
            for expert in 0..EXPERTS {
                let get =
                    |part: &str| &self.get(&format!("{prefix}mlp.experts.{expert}.{part}_proj.weight")).2;
                gate_up.extend(get("gate"));
                gate_up.extend(get("up"));
                down.extend(get("down"));
            }
            let name = |part: &str| format!("{prefix}mlp.experts.{part}");
            fused.0.push((name("gate_up_proj"), vec![EXPERTS, 2 * WIDTH, HIDDEN], gate_up));
            fused.0.push((name("down_proj"), vec![EXPERTS, HIDDEN, WIDTH], down));
        }
        fused
    }

    /// Writes one file of these tensors in this element type.
    pub fn write_file(tensors: &[(String, Vec<usize>, Vec<f32>)], dtype: Dtype, path: &Path) {
        let bytes: Vec<Vec<u8>> = tensors
            .iter()
            .map(|(.., elements)| match dtype {
                Dtype::BF16 => elements.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
                Dtype::F16 => elements.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
                Dtype::F32 => elements.iter().flat_map(|x| x.to_le_bytes()).collect(),
                // A type the converter does not take; only the size matters.
                _ => vec![0; elements.len()],
            })
            .collect();
        let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
            (name.clone(), TensorView::new(dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    /// Writes the directory with one weight file.
    pub fn write(&self, dir: &Path) {
        write_config(dir, config());
        Checkpoint::write_file(&self.0, Dtype::BF16, &dir.join("model.safetensors"));
    }

    /// Writes the directory with `count` shards.
    pub fn write_shards(&self, dir: &Path, count: usize) {
        write_config(dir, config());
        let mut map = HashMap::new();
        for (index, part) in self.0.chunks(self.0.len().div_ceil(count)).enumerate() {
            let file = format!("model-{:05}-of-{count:05}.safetensors", index + 1);
            Checkpoint::write_file(part, Dtype::BF16, &dir.join(&file));
            map.extend(part.iter().map(|(name, ..)| (name.clone(), file.clone())));
        }
        let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
        std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }
}

pub fn config() -> Value {
    json!({
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 128,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "linear_key_head_dim": STATE, "linear_value_head_dim": STATE, "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS, "linear_conv_kernel_dim": 4, "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": SHARED,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "partial_rotary_factor": 0.25, "rope_scaling": null,
        "tie_word_embeddings": false, "full_attention_interval": 4, "bos_token_id": 257, "hidden_act": "silu"
    })
}

/// config.json and the tokenizer's files.
pub fn write_config(dir: &Path, config: Value) {
    let write = |name: &str, value: &Value| std::fs::write(dir.join(name), value.to_string()).unwrap();
    write("config.json", &config);
    let printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let characters = (0u32..256).filter(printable).chain(256..324);
    let mut vocab: serde_json::Map<String, Value> = characters
        .enumerate()
        .map(|(id, character)| (char::from_u32(character).unwrap().to_string(), json!(id)))
        .collect();
    vocab.insert("Ġt".into(), json!(256));
    let added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"];
    let added: Vec<Value> = (257..)
        .zip(added)
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": content.starts_with("<|")})
        })
        .collect();
    write(
        "tokenizer.json",
        &json!({
            "version": "1.0", "added_tokens": added, "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}
            ]},
            "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": vocab, "merges": [["Ġ", "t"]]}
        }),
    );
    write(
        "tokenizer_config.json",
        &json!({"add_bos_token": false, "bos_token": null, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                "chat_template": "from the configuration"}),
    );
}

/// A progress function that never stops.
pub fn go_on(_: Progress<'_>) -> Control {
    Control::Continue
}

/// A tensor of a file, decoded.
pub fn decoded(file: &Gguf, name: &str) -> Vec<f32> {
    let info = file.tensor(name).unwrap_or_else(|| panic!("no {name}"));
    let mut weights = vec![0.0; info.elements() as usize];
    quant::decode(info.ty.known().unwrap(), file.bytes(info), &mut weights).unwrap();
    weights
}

/// Names in a directory.
pub fn listing(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
