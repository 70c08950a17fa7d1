//! Finding the tensors a shape demands, whatever layout the file has them in.

use std::collections::HashMap;

use gguf::{Gguf, TensorInfo, TensorType};
use quant::Type;

use super::{Model, shape_text};
use crate::error::{Error, Result, list};
use crate::spec::{LayerKind, Spec};
use crate::weights::{
    AttentionWeights, DeltaWeights, ExpertLayout, ExpertTensor, Layer, MatrixInfo, Mixer, MoeWeights, Part,
    VectorInfo, Weights,
};

/// Finds, checks and names every tensor of the model in `gguf`.
pub(super) fn model(gguf: Gguf) -> Result<Model> {
    // The architecture first: a missing tensor of another kind of model would only confuse.
    let mut spec = Spec::from_metadata(gguf.metadata(), 0)?;
    refuse_unsupported(&gguf, &spec)?;
    spec.vocab = vocabulary_rows(&gguf, spec.hidden)?;
    let vocab = spec.vocab;
    let by_name = gguf.tensors().iter().enumerate().map(|(index, info)| (info.name.as_str(), index));
    let mut find =
        Finder { gguf: &gguf, by_name: by_name.collect(), used: vec![false; gguf.tensors().len()] };
    let embedding = find.matrix("token_embd.weight", vocab, spec.hidden)?;
    let tied = gguf.tensor("output.weight").is_none();
    let output = if tied { embedding.clone() } else { find.matrix("output.weight", vocab, spec.hidden)? };
    let output_norm = find.vector("output_norm.weight", spec.hidden)?;
    let mut layers = Vec::new();
    let mut experts = Vec::new();
    for layer in 0..spec.layers.len() {
        layers.push(find.layer(&spec, layer)?);
        experts.push(find.experts(&spec, layer)?);
    }
    let warnings = find.unused(&spec);
    let weights = Weights { layers, output_norm, output };
    Ok(Model { spec, embedding, weights, experts, tied, warnings, gguf: gguf.into() })
}

/// Rows of the token embedding, which decide; `vocab_size` is optional, but must not contradict.
fn vocabulary_rows(gguf: &Gguf, hidden: usize) -> Result<usize> {
    let (name, expected) = ("token_embd.weight".to_string(), format!("[vocabulary, {hidden}]"));
    match gguf.tensor(&name) {
        None => Err(Error::MissingTensor { name, expected }),
        Some(info) => match info.dims[..] {
            [_, rows] => {
                let key = format!("{}.vocab_size", Spec::ARCHITECTURE);
                match gguf.metadata().u64(&key)? {
                    Some(size) if size != rows => {
                        let expected = format!("{rows}, the rows of `{name}`");
                        Err(Error::BadKey { key, found: size.to_string(), expected })
                    }
                    _ => Ok(rows as usize),
                }
            }
            _ => Err(Error::TensorShape { name, found: shape_text(info), expected }),
        },
    }
}

/// One message for every tensor whose type cannot be decoded, one for those that would change the
/// mathematics. MTP blocks are skipped, as their declaration says.
fn refuse_unsupported(gguf: &Gguf, spec: &Spec) -> Result<()> {
    let trunk = || gguf.tensors().iter().filter(|info| !is_mtp(&info.name, spec));
    let types: Vec<(String, u32)> = trunk()
        .filter_map(|info| match info.ty {
            TensorType::Unknown(id) => Some((info.name.clone(), id)),
            TensorType::Known(_) => None,
        })
        .collect();
    if !types.is_empty() {
        return Err(Error::UnsupportedTypes { tensors: types });
    }
    let changes = |name: &str| {
        (name.ends_with(".bias") && !name.ends_with(".ssm_dt.bias"))
            || name.ends_with(".scale")
            || name.ends_with("_scale")
            || name.starts_with("rope_freqs.")
    };
    let names: Vec<String> = trunk().map(|info| info.name.clone()).filter(|name| changes(name)).collect();
    if names.is_empty() { Ok(()) } else { Err(Error::UnsupportedTensors { names }) }
}

/// Whether a tensor belongs to a block behind the trunk.
fn is_mtp(name: &str, spec: &Spec) -> bool {
    let block = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    block.is_some_and(|b| (spec.layers.len()..spec.layers.len() + spec.mtp_blocks).contains(&b))
}

struct Finder<'a> {
    gguf: &'a Gguf,
    /// Indices into [`Gguf::tensors`].
    by_name: HashMap<&'a str, usize>,
    used: Vec<bool>,
}

impl Finder<'_> {
    fn layer(&mut self, spec: &Spec, layer: usize) -> Result<Layer<MatrixInfo, VectorInfo>> {
        let name = |suffix: &str| format!("blk.{layer}.{suffix}");
        let norm = self.vector(&name("attn_norm.weight"), spec.hidden)?;
        let mixer = match spec.layers[layer] {
            LayerKind::Delta => Mixer::Delta(self.delta(spec, layer)?),
            LayerKind::Attention => Mixer::Attention(self.attention(spec, layer)?),
        };
        let (width, hidden) = (spec.moe.shared_width, spec.hidden);
        let moe = MoeWeights {
            norm: self.vector(&name("post_attention_norm.weight"), hidden)?,
            router: self.matrix(&name("ffn_gate_inp.weight"), spec.moe.experts, hidden)?,
            shared_gate: self.matrix(&name("ffn_gate_shexp.weight"), width, hidden)?,
            shared_up: self.matrix(&name("ffn_up_shexp.weight"), width, hidden)?,
            shared_down: self.matrix(&name("ffn_down_shexp.weight"), hidden, width)?,
            shared_router: self.vector(&name("ffn_gate_inp_shexp.weight"), hidden)?,
        };
        Ok(Layer { norm, mixer, moe })
    }

    fn delta(&mut self, spec: &Spec, layer: usize) -> Result<DeltaWeights<MatrixInfo, VectorInfo>> {
        let name = |suffix: &str| format!("blk.{layer}.{suffix}");
        let delta = &spec.delta;
        let (qkv, z) = match self.gguf.tensor(&name("ssm_in.weight")) {
            None => (
                self.matrix(&name("attn_qkv.weight"), delta.channels(), spec.hidden)?,
                self.matrix(&name("attn_gate.weight"), delta.value_dim(), spec.hidden)?,
            ),
            Some(_) => self.fused_delta(spec, &name("ssm_in.weight"))?,
        };
        let heads = delta.value_heads;
        let ba = self.matrix(&name("ssm_ba.weight"), 2 * heads, spec.hidden)?;
        let per_key = heads / delta.key_heads;
        let beta_alpha = ba.regroup(delta.key_heads, &[per_key, per_key]);
        Ok(DeltaWeights {
            qkv,
            z,
            beta_alpha,
            conv: self.table(&name("ssm_conv1d.weight"), &[delta.channels(), delta.taps])?,
            dt_bias: self.vector(&name("ssm_dt.bias"), heads)?,
            a: self.vector(&name("ssm_a"), heads)?,
            norm: self.vector(&name("ssm_norm.weight"), delta.head_dim)?,
            out: self.matrix(&name("ssm_out.weight"), spec.hidden, delta.value_dim())?,
        })
    }

    /// The legacy layout: per key head q, k, then v and z of its value heads.
    fn fused_delta(&mut self, spec: &Spec, name: &str) -> Result<(MatrixInfo, MatrixInfo)> {
        let delta = &spec.delta;
        let values = delta.value_dim() / delta.key_heads;
        let fused = self.matrix(name, delta.channels() + delta.value_dim(), spec.hidden)?;
        let all = fused.regroup(delta.key_heads, &[delta.head_dim, delta.head_dim, values, values]);
        // `regroup` gives a part for each key head and group: the last `key_heads` of them are z.
        let split = all.parts.len() - delta.key_heads;
        let take = |what: &str, rows: usize, parts: &[Part]| MatrixInfo {
            name: format!("{name} ({what})"),
            rows,
            parts: parts.to_vec(),
            ..fused.clone()
        };
        Ok((
            take("q, k, v", delta.channels(), &all.parts[..split]),
            take("z", delta.value_dim(), &all.parts[split..]),
        ))
    }

    fn attention(&mut self, spec: &Spec, layer: usize) -> Result<AttentionWeights<MatrixInfo, VectorInfo>> {
        let name = |suffix: &str| format!("blk.{layer}.{suffix}");
        let attention = &spec.attention;
        let (queries, kv, hidden) = (attention.query_dim(), attention.kv_dim(), spec.hidden);
        let (query_gate, key, value) = match self.gguf.tensor(&name("attn_q.weight")) {
            Some(_) => (
                self.matrix(&name("attn_q.weight"), 2 * queries, hidden)?,
                self.matrix(&name("attn_k.weight"), kv, hidden)?,
                self.matrix(&name("attn_v.weight"), kv, hidden)?,
            ),
            None => {
                let fused = self.matrix(&name("attn_qkv.weight"), 2 * queries + 2 * kv, hidden)?;
                (
                    fused.slice("q", 0, 2 * queries),
                    fused.slice("k", 2 * queries, kv),
                    fused.slice("v", 2 * queries + kv, kv),
                )
            }
        };
        // Per head: its query rows, then its gate rows.
        let split = query_gate.regroup(attention.heads, &[attention.head_dim, attention.head_dim]);
        let halves = [("query", 0), ("gate", attention.heads)].map(|(what, first)| MatrixInfo {
            name: format!("{} ({what})", query_gate.name),
            rows: queries,
            parts: split.parts[first..first + attention.heads].to_vec(),
            ..query_gate.clone()
        });
        let [query, gate] = halves;
        Ok(AttentionWeights {
            query,
            gate,
            key,
            value,
            query_norm: self.vector(&name("attn_q_norm.weight"), attention.head_dim)?,
            key_norm: self.vector(&name("attn_k_norm.weight"), attention.head_dim)?,
            out: self.matrix(&name("attn_output.weight"), hidden, queries)?,
        })
    }

    fn experts(&mut self, spec: &Spec, layer: usize) -> Result<ExpertLayout> {
        let name = |suffix: &str| format!("blk.{layer}.{suffix}");
        let (count, width, hidden) = (spec.moe.experts, spec.moe.widths[layer], spec.hidden);
        let down = self.expert(&name("ffn_down_exps.weight"), count, hidden, width)?;
        if self.gguf.tensor(&name("ffn_gate_up_exps.weight")).is_some() {
            let fused = self.expert(&name("ffn_gate_up_exps.weight"), count, 2 * width, hidden)?;
            let gate = ExpertTensor { rows: width, ..fused };
            let up = ExpertTensor { offset: gate.bytes() as u64, ..gate };
            return Ok(ExpertLayout { gate, up, down });
        }
        let gate = self.expert(&name("ffn_gate_exps.weight"), count, width, hidden)?;
        let up = self.expert(&name("ffn_up_exps.weight"), count, width, hidden)?;
        Ok(ExpertLayout { gate, up, down })
    }

    fn expert(&mut self, name: &str, count: usize, rows: usize, cols: usize) -> Result<ExpertTensor> {
        let (tensor, info) = self.tensor(name, &[count, rows, cols])?;
        let ty = known_type(info);
        Ok(ExpertTensor { ty, rows, cols, tensor, offset: 0, stride: info.len / count as u64 })
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<MatrixInfo> {
        let (tensor, info) = self.tensor(name, &[rows, cols])?;
        let parts = vec![Part { tensor, first: 0, rows }];
        Ok(MatrixInfo { name: name.to_string(), ty: known_type(info), rows, cols, parts })
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<VectorInfo> {
        self.table(name, &[len])
    }

    /// A small table of numbers that carry precision: norms, biases, the convolution.
    fn table(&mut self, name: &str, shape: &[usize]) -> Result<VectorInfo> {
        let (tensor, info) = self.tensor(name, shape)?;
        let found = known_type(info);
        if !matches!(found, Type::F32 | Type::F16 | Type::BF16) {
            return Err(Error::TensorType { name: name.to_string(), found, expected: "F32, F16 or BF16" });
        }
        Ok(VectorInfo { name: name.to_string(), tensor, len: shape.iter().product() })
    }

    /// The tensor `name`, which must have `shape` (row-major). Leading dimensions of 1 do not matter.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<(usize, &TensorInfo)> {
        let expected = || format!("{shape:?}");
        let Some(&index) = self.by_name.get(name) else {
            return Err(Error::MissingTensor { name: name.to_string(), expected: expected() });
        };
        let info = &self.gguf.tensors()[index];
        let significant = |dims: Vec<u64>| -> Vec<u64> { dims.into_iter().skip_while(|&d| d == 1).collect() };
        let found = significant(info.dims.iter().rev().copied().collect());
        if found != significant(shape.iter().map(|&d| d as u64).collect()) {
            let (name, found) = (name.to_string(), shape_text(info));
            return Err(Error::TensorShape { name, found, expected: expected() });
        }
        self.used[index] = true;
        Ok((index, info))
    }

    fn unused(&self, spec: &Spec) -> Vec<String> {
        let names: Vec<&str> = (self.gguf.tensors().iter().zip(&self.used))
            .filter(|(info, used)| !**used && !is_mtp(&info.name, spec))
            .map(|(info, _)| info.name.as_str())
            .collect();
        let mut warnings = Vec::new();
        if !names.is_empty() {
            warnings.push(format!(
                "{} tensors of the file are not used: {}",
                names.len(),
                list(names.iter())
            ));
        }
        warnings
    }
}

impl MatrixInfo {
    /// The rows `first .. first + rows`.
    fn slice(&self, what: &str, first: usize, rows: usize) -> MatrixInfo {
        let [whole] = self.parts[..] else { unreachable!("slices are taken of whole tensors") };
        let parts = vec![Part { first: whole.first + first, rows, ..whole }];
        MatrixInfo { name: format!("{} ({what})", self.name), rows, parts, ..self.clone() }
    }

    /// Rows come as `heads` times a row of groups; returns them as each group of all heads, one group after
    /// the other.
    fn regroup(&self, heads: usize, groups: &[usize]) -> MatrixInfo {
        let [whole] = self.parts[..] else { unreachable!("regrouping is done to slices of whole tensors") };
        let per_head: usize = groups.iter().sum();
        let mut parts = Vec::with_capacity(heads * groups.len());
        let mut start = whole.first;
        for &rows in groups {
            parts.extend((0..heads).map(|head| Part { first: start + head * per_head, rows, ..whole }));
            start += rows;
        }
        MatrixInfo { parts, ..self.clone() }
    }
}

fn known_type(info: &TensorInfo) -> Type {
    match info.ty {
        TensorType::Known(ty) => ty,
        TensorType::Unknown(_) => unreachable!("unknown types were refused"),
    }
}
