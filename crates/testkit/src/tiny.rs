//! A random model small enough for every test.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gguf::{Metadata, TensorDecl, Writer};
use model::Model;
use quant::Type;

use crate::random::Random;

/// How a file lays out the DeltaNet projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `attn_qkv` and `attn_gate`.
    Split,
    /// `ssm_in`: q, k, v, z of each key head.
    Legacy,
}

/// How fast DeltaNet states decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// Some heads keep a state for hundreds of tokens, others for a few.
    Mixed,
    /// A factor of about 1e-12 for every token.
    Strong,
}

/// What a tiny model is like. The same options give the same weights; layouts differ only in where they are.
#[derive(Clone, Copy, Debug)]
pub struct TinyOptions {
    /// Other weights.
    pub seed: u64,
    /// Columns of a hidden row: whole blocks of `dense` and `experts`.
    pub hidden: usize,
    /// Inner width of routed and shared experts: whole blocks of `dense` and `experts`.
    pub width: usize,
    /// Numbers in a DeltaNet head and in an attention head; four of each, whole blocks of `dense`.
    pub head: usize,
    /// Numbers in an attention head, if not `head`.
    pub attention_head: Option<usize>,
    /// Layers; every fourth attends.
    pub layers: usize,
    /// Type of projections, shared expert, embedding and output.
    pub dense: Type,
    /// Type of routed experts.
    pub experts: Type,
    /// Layout of DeltaNet projections.
    pub layout: Layout,
    /// Decay of DeltaNet states.
    pub decay: Decay,
    /// Whether the output projection is the embedding.
    pub tied: bool,
    /// Whether gate and up matrices of the experts are one tensor.
    pub fused_experts: bool,
    /// Whether a block for the prediction of further tokens follows the trunk.
    pub mtp: bool,
}

impl Default for TinyOptions {
    fn default() -> Self {
        TinyOptions {
            seed: 1,
            hidden: 64,
            width: 32,
            head: 32,
            attention_head: None,
            layers: 5,
            dense: Type::F32,
            experts: Type::F32,
            layout: Layout::Split,
            decay: Decay::Mixed,
            tied: false,
            fused_experts: false,
            mtp: false,
        }
    }
}

impl TinyOptions {
    /// Attention heads.
    pub const HEADS: usize = 4;
    /// Key/value heads of attention.
    pub const KV_HEADS: usize = 2;
    /// Query/key heads of DeltaNet.
    pub const KEY_HEADS: usize = 2;
    /// Value heads of DeltaNet.
    pub const VALUE_HEADS: usize = 4;
    /// Taps of the convolution.
    pub const TAPS: usize = 4;
    /// Routed experts.
    pub const EXPERTS: usize = 8;
    /// Experts of a token.
    pub const USED: usize = 3;
    /// Token ids.
    pub const VOCAB: usize = 97;

    /// Numbers in an attention head.
    fn of_attention(&self) -> usize {
        self.attention_head.unwrap_or(self.head)
    }

    /// A model whose rows are whole blocks of every type: `dense` and `experts` may be any that `quant` can
    /// encode.
    pub fn quantised(dense: Type, experts: Type) -> TinyOptions {
        TinyOptions { hidden: 256, width: 256, head: 64, layers: 4, dense, experts, ..TinyOptions::default() }
    }
}

/// A random model and its file, which disappears with it.
#[derive(Debug)]
pub struct TinyModel {
    /// The model.
    pub model: Arc<Model>,
    path: PathBuf,
}

impl TinyModel {
    /// Writes and opens a model.
    ///
    /// # Panics
    /// On any error.
    pub fn new(options: TinyOptions) -> TinyModel {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("redlite-tiny-{}-{count}.gguf", std::process::id());
        let path = std::env::temp_dir().join(name);
        write(&path, &options);
        let model = Arc::new(Model::open(&path).expect("a model of our own"));
        TinyModel { model, path }
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TinyModel {
    fn drop(&mut self) {
        // A file left behind in the temporary folder does no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A tensor: its name, type, shape (row-major) and weights.
struct Tensor {
    name: String,
    ty: Type,
    shape: Vec<usize>,
    weights: Vec<f32>,
}

fn write(path: &Path, options: &TinyOptions) {
    let tensors = Builder { options, tensors: Vec::new() }.all();
    let decls: Vec<TensorDecl> = tensors
        .iter()
        .map(|t| TensorDecl {
            name: t.name.clone(),
            dims: t.shape.iter().rev().map(|&d| d as u64).collect(),
            ty: t.ty,
        })
        .collect();
    let mut writer =
        Writer::create(path, &metadata(options), &decls).expect("a file in the temporary folder");
    for tensor in &tensors {
        let mut bytes = Vec::new();
        quant::encode(tensor.ty, &tensor.weights, None, &mut bytes).expect("a type that can be encoded");
        writer.write(&bytes).expect("room in the temporary folder");
    }
    writer.finish().expect("all tensors are written");
}

fn metadata(options: &TinyOptions) -> Metadata {
    type O = TinyOptions;
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", "qwen3next");
    metadata.set("general.name", "tiny");
    let blocks = options.layers + usize::from(options.mtp);
    let numbers = [
        ("block_count", blocks),
        ("nextn_predict_layers", usize::from(options.mtp)),
        ("full_attention_interval", 4),
        ("context_length", 4096),
        ("embedding_length", options.hidden),
        ("attention.head_count", O::HEADS),
        ("attention.head_count_kv", O::KV_HEADS),
        ("attention.key_length", options.of_attention()),
        ("attention.value_length", options.of_attention()),
        ("rope.dimension_count", options.of_attention().min(128) / 2),
        ("ssm.group_count", O::KEY_HEADS),
        ("ssm.time_step_rank", O::VALUE_HEADS),
        ("ssm.state_size", options.head),
        ("ssm.inner_size", O::VALUE_HEADS * options.head),
        ("ssm.conv_kernel", O::TAPS),
        ("expert_count", O::EXPERTS),
        ("expert_used_count", O::USED),
        ("expert_feed_forward_length", options.width),
        ("expert_shared_feed_forward_length", options.width),
    ];
    for (key, number) in numbers {
        metadata.set(format!("qwen3next.{key}"), number as u32);
    }
    metadata.set("qwen3next.rope.freq_base", 10_000.0f32);
    metadata.set("qwen3next.attention.layer_norm_rms_epsilon", 1e-6f32);
    metadata
}

struct Builder<'a> {
    options: &'a TinyOptions,
    tensors: Vec<Tensor>,
}

impl Builder<'_> {
    fn all(mut self) -> Vec<Tensor> {
        let o = self.options;
        self.matrix("token_embd.weight", o.dense, &[TinyOptions::VOCAB, o.hidden], 1.0);
        for layer in 0..o.layers {
            self.vector(&format!("blk.{layer}.attn_norm.weight"), o.hidden);
            if layer % 4 == 3 {
                self.attention(layer)
            } else {
                self.delta(layer)
            }
            self.vector(&format!("blk.{layer}.post_attention_norm.weight"), o.hidden);
            self.moe(layer);
        }
        if o.mtp {
            // Enough of a block to be noticed if it were taken for a layer.
            let name = |suffix: &str| format!("blk.{}.nextn.{suffix}.weight", o.layers);
            self.matrix(&name("eh_proj"), o.dense, &[o.hidden, 2 * o.hidden], 1.0);
            self.vector(&name("enorm"), o.hidden);
            self.vector(&name("hnorm"), o.hidden);
        }
        self.vector("output_norm.weight", o.hidden);
        if !o.tied {
            self.projection("output.weight", o.dense, &[TinyOptions::VOCAB, o.hidden]);
        }
        self.tensors
    }

    fn delta(&mut self, layer: usize) {
        let o = self.options;
        let name = |suffix: &str| format!("blk.{layer}.{suffix}");
        let (keys, values) = (TinyOptions::KEY_HEADS * o.head, TinyOptions::VALUE_HEADS * o.head);
        let channels = 2 * keys + values;
        let qkv = self.random(&name("attn_qkv.weight"), channels * o.hidden, deviation(o.hidden));
        let z = self.random(&name("attn_gate.weight"), values * o.hidden, deviation(o.hidden));
        match o.layout {
            Layout::Split => {
                self.push(&name("attn_qkv.weight"), o.dense, &[channels, o.hidden], qkv);
                self.push(&name("attn_gate.weight"), o.dense, &[values, o.hidden], z);
            }
            Layout::Legacy => {
                let fused = fuse(o, &qkv, &z);
                self.push(&name("ssm_in.weight"), o.dense, &[channels + values, o.hidden], fused);
            }
        }
        let heads = TinyOptions::VALUE_HEADS;
        self.projection(&name("ssm_ba.weight"), o.dense, &[2 * heads, o.hidden]);
        self.matrix(&name("ssm_conv1d.weight"), Type::F32, &[channels, TinyOptions::TAPS], 0.5);
        let mut random = Random::new(o.seed, &name("ssm_a"));
        let (a, dt): (Vec<f32>, Vec<f32>) = (0..heads)
            .map(|_| match o.decay {
                Decay::Mixed => (-random.uniform(-3.0, 0.5).exp(), random.uniform(-3.0, 1.0)),
                Decay::Strong => (-1.4, 20.0), // exp(-1.4 · 20) = 7e-13
            })
            .unzip();
        self.push(&name("ssm_dt.bias"), Type::F32, &[heads], dt);
        self.push(&name("ssm_a"), Type::F32, &[heads], a);
        self.vector(&name("ssm_norm.weight"), o.head);
        self.projection(&name("ssm_out.weight"), o.dense, &[o.hidden, values]);
    }

    fn attention(&mut self, layer: usize) {
        let o = self.options;
        let name = |suffix: &str| format!("blk.{layer}.{suffix}");
        let head = o.of_attention();
        let (queries, kv) = (TinyOptions::HEADS * head, TinyOptions::KV_HEADS * head);
        self.projection(&name("attn_q.weight"), o.dense, &[2 * queries, o.hidden]);
        self.projection(&name("attn_k.weight"), o.dense, &[kv, o.hidden]);
        self.projection(&name("attn_v.weight"), o.dense, &[kv, o.hidden]);
        self.vector(&name("attn_q_norm.weight"), head);
        self.vector(&name("attn_k_norm.weight"), head);
        self.projection(&name("attn_output.weight"), o.dense, &[o.hidden, queries]);
    }

    fn moe(&mut self, layer: usize) {
        let o = self.options;
        let name = |suffix: &str| format!("blk.{layer}.{suffix}.weight");
        let experts = TinyOptions::EXPERTS;
        // Twice the usual deviation, for weights of experts that differ.
        let router = 2.0 * deviation(o.hidden);
        self.matrix(&name("ffn_gate_inp"), Type::F32, &[experts, o.hidden], router);
        let into = o.width * o.hidden;
        let gate = self.random(&name("ffn_gate_exps"), experts * into, deviation(o.hidden));
        let up = self.random(&name("ffn_up_exps"), experts * into, deviation(o.hidden));
        if o.fused_experts {
            let pairs = gate.chunks(into).zip(up.chunks(into));
            let both = pairs.flat_map(|(gate, up)| [gate, up].concat()).collect();
            self.push(&name("ffn_gate_up_exps"), o.experts, &[experts, 2 * o.width, o.hidden], both);
        } else {
            self.push(&name("ffn_gate_exps"), o.experts, &[experts, o.width, o.hidden], gate);
            self.push(&name("ffn_up_exps"), o.experts, &[experts, o.width, o.hidden], up);
        }
        self.projection(&name("ffn_down_exps"), o.experts, &[experts, o.hidden, o.width]);
        self.projection(&name("ffn_gate_shexp"), o.dense, &[o.width, o.hidden]);
        self.projection(&name("ffn_up_shexp"), o.dense, &[o.width, o.hidden]);
        self.projection(&name("ffn_down_shexp"), o.dense, &[o.hidden, o.width]);
        self.matrix(&name("ffn_gate_inp_shexp"), Type::F32, &[o.hidden], deviation(o.hidden));
    }

    /// A matrix that keeps the magnitude of what it multiplies.
    fn projection(&mut self, name: &str, ty: Type, shape: &[usize]) {
        self.matrix(name, ty, shape, deviation(shape[shape.len() - 1]));
    }

    fn matrix(&mut self, name: &str, ty: Type, shape: &[usize], deviation: f32) {
        let weights = self.random(name, shape.iter().product(), deviation);
        self.push(name, ty, shape, weights);
    }

    /// The weights of a norm, around 1.
    fn vector(&mut self, name: &str, len: usize) {
        let weights = self.random(name, len, 0.2).iter().map(|x| 1.0 + x).collect();
        self.push(name, Type::F32, &[len], weights);
    }

    fn random(&self, name: &str, len: usize, deviation: f32) -> Vec<f32> {
        Random::new(self.options.seed, name).normals(len, deviation)
    }

    fn push(&mut self, name: &str, ty: Type, shape: &[usize], weights: Vec<f32>) {
        self.tensors.push(Tensor { name: name.to_string(), ty, shape: shape.to_vec(), weights });
    }
}

fn deviation(cols: usize) -> f32 {
    1.0 / (cols as f32).sqrt()
}

/// The rows of q | k | v and z, regrouped by key head.
fn fuse(o: &TinyOptions, qkv: &[f32], z: &[f32]) -> Vec<f32> {
    let rows = |matrix: &[f32], first: usize, count: usize| {
        matrix[first * o.hidden..(first + count) * o.hidden].to_vec()
    };
    let keys = TinyOptions::KEY_HEADS * o.head;
    let group = TinyOptions::VALUE_HEADS / TinyOptions::KEY_HEADS * o.head;
    let head = |h: usize| {
        [
            rows(qkv, h * o.head, o.head),
            rows(qkv, keys + h * o.head, o.head),
            rows(qkv, 2 * keys + h * group, group),
            rows(z, h * group, group),
        ]
        .concat()
    };
    (0..TinyOptions::KEY_HEADS).flat_map(head).collect()
}
