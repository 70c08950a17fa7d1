//! A complete `qwen3next` model small enough to make in a test: one DeltaNet
//! and one attention layer, random weights, a byte-level vocabulary.

use std::fs;
use std::path::Path;

/// Number of tokens: 256 bytes and one control token.
pub const VOCABULARY: usize = 257;
/// The control token, the last id.
pub const END: &str = "<|end|>";

const HIDDEN: u64 = 256;
/// Columns of `ffn_down_exps`: too few for the types with blocks of 256.
pub const EXPERT: u64 = 64;
const EXPERTS: u64 = 4;

const U32: u32 = 4;
const F32: u32 = 6;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const I32: u32 = 5;

struct Builder {
    metadata: Vec<u8>,
    keys: u64,
    infos: Vec<u8>,
    tensors: u64,
    data: Vec<u8>,
    random: u64,
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Builder {
    fn key(&mut self, key: &str, ty: u32) {
        self.keys += 1;
        string(&mut self.metadata, key);
        self.metadata.extend(ty.to_le_bytes());
    }

    fn u32(&mut self, key: &str, value: u32) {
        self.key(key, U32);
        self.metadata.extend(value.to_le_bytes());
    }

    fn f32(&mut self, key: &str, value: f32) {
        self.key(key, F32);
        self.metadata.extend(value.to_le_bytes());
    }

    fn string(&mut self, key: &str, value: &str) {
        self.key(key, STRING);
        string(&mut self.metadata, value);
    }

    fn strings(&mut self, key: &str, values: &[String]) {
        self.key(key, ARRAY);
        self.metadata.extend(STRING.to_le_bytes());
        self.metadata.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| string(&mut self.metadata, value));
    }

    fn ints(&mut self, key: &str, values: &[i32]) {
        self.key(key, ARRAY);
        self.metadata.extend(I32.to_le_bytes());
        self.metadata.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| self.metadata.extend(value.to_le_bytes()));
    }

    /// An F32 tensor, dimensions fastest first, values in `center ± spread`.
    fn tensor(&mut self, name: &str, dims: &[u64], center: f32, spread: f32) {
        self.tensors += 1;
        string(&mut self.infos, name);
        self.infos.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| self.infos.extend(dim.to_le_bytes()));
        self.infos.extend(0u32.to_le_bytes());
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        self.infos.extend((self.data.len() as u64).to_le_bytes());
        for _ in 0..dims.iter().product::<u64>() {
            self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let unit = (self.random >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            self.data.extend((center + spread * unit).to_le_bytes());
        }
    }

    fn matrix(&mut self, name: &str, dims: &[u64]) {
        self.tensor(name, dims, 0.0, 1.5 / (dims[0] as f32).sqrt());
    }
}

/// Bytes as GPT-2 writes them: printable ones as themselves, the rest from U+0100 on.
fn byte_tokens() -> Vec<String> {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100;
    (0..256)
        .map(|byte| {
            let code = if printable(byte) {
                byte
            } else {
                next += 1;
                next - 1
            };
            char::from_u32(code).unwrap().to_string()
        })
        .collect()
}

fn metadata(file: &mut Builder) {
    file.string("general.architecture", "qwen3next");
    for (key, value) in [
        ("block_count", 2),
        ("context_length", 512),
        ("embedding_length", HIDDEN as u32),
        ("feed_forward_length", 64),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 64),
        ("attention.value_length", 64),
        ("rope.dimension_count", 16),
        ("expert_count", EXPERTS as u32),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", EXPERT as u32),
        ("expert_shared_feed_forward_length", EXPERT as u32),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 64),
        ("ssm.group_count", 1),
        ("ssm.time_step_rank", 2),
        ("ssm.inner_size", 128),
        ("full_attention_interval", 2),
    ] {
        file.u32(&format!("qwen3next.{key}"), value);
    }
    file.f32("qwen3next.rope.freq_base", 1e6);
    file.f32("qwen3next.attention.layer_norm_rms_epsilon", 1e-6);
    let mut tokens = byte_tokens();
    tokens.push(END.to_string());
    let mut kinds = vec![1; 256];
    kinds.push(3);
    file.string("tokenizer.ggml.model", "gpt2");
    file.string("tokenizer.ggml.pre", "qwen2");
    file.strings("tokenizer.ggml.tokens", &tokens);
    file.ints("tokenizer.ggml.token_type", &kinds);
    file.strings("tokenizer.ggml.merges", &[]);
    file.u32("tokenizer.ggml.eos_token_id", 256);
}

fn tensors(file: &mut Builder) {
    file.tensor("token_embd.weight", &[HIDDEN, VOCABULARY as u64], 0.0, 1.0);
    file.tensor("output_norm.weight", &[HIDDEN], 1.0, 0.2);
    file.matrix("output.weight", &[HIDDEN, VOCABULARY as u64]);
    for (name, dims) in [
        ("attn_qkv.weight", vec![HIDDEN, 256]),
        ("attn_gate.weight", vec![HIDDEN, 128]),
        ("ssm_ba.weight", vec![HIDDEN, 4]),
        ("ssm_conv1d.weight", vec![4, 256]),
        ("ssm_out.weight", vec![128, HIDDEN]),
    ] {
        file.matrix(&format!("blk.0.{name}"), &dims);
    }
    file.tensor("blk.0.ssm_dt.bias", &[2], 0.0, 0.5);
    file.tensor("blk.0.ssm_a", &[2], -1.0, 0.5);
    file.tensor("blk.0.ssm_norm.weight", &[64], 1.0, 0.2);
    for (name, dims) in [
        ("attn_q.weight", [HIDDEN, 256]),
        ("attn_k.weight", [HIDDEN, 64]),
        ("attn_v.weight", [HIDDEN, 64]),
        ("attn_output.weight", [128, HIDDEN]),
    ] {
        file.matrix(&format!("blk.1.{name}"), &dims);
    }
    file.tensor("blk.1.attn_q_norm.weight", &[64], 1.0, 0.2);
    file.tensor("blk.1.attn_k_norm.weight", &[64], 1.0, 0.2);
    for layer in 0..2 {
        for name in ["attn_norm", "post_attention_norm"] {
            file.tensor(&format!("blk.{layer}.{name}.weight"), &[HIDDEN], 1.0, 0.2);
        }
        for (name, dims) in [
            ("gate_inp", vec![HIDDEN, EXPERTS]),
            ("gate_inp_shexp", vec![HIDDEN]),
            ("gate_exps", vec![HIDDEN, EXPERT, EXPERTS]),
            ("up_exps", vec![HIDDEN, EXPERT, EXPERTS]),
            ("down_exps", vec![EXPERT, HIDDEN, EXPERTS]),
            ("gate_shexp", vec![HIDDEN, EXPERT]),
            ("up_shexp", vec![HIDDEN, EXPERT]),
            ("down_shexp", vec![EXPERT, HIDDEN]),
        ] {
            file.matrix(&format!("blk.{layer}.ffn_{name}.weight"), &dims);
        }
    }
}

/// Writes the model to `path`.
pub fn write(path: &Path) {
    let mut file =
        Builder { metadata: Vec::new(), keys: 0, infos: Vec::new(), tensors: 0, data: Vec::new(), random: 1 };
    metadata(&mut file);
    tensors(&mut file);
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(file.tensors.to_le_bytes());
    bytes.extend(file.keys.to_le_bytes());
    bytes.extend(file.metadata);
    bytes.extend(file.infos);
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.extend(file.data);
    fs::write(path, bytes).unwrap();
}
