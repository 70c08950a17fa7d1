//! A GGUF file with other types.

use std::path::Path;

use gguf::{Gguf, TensorInfo, TensorType};
use quant::Type;

use crate::error::Error;
use crate::mix::{Mix, cannot_encode};
use crate::output::{Output, Planned, with_threads};
use crate::progress::OnProgress;
use crate::summary::Summary;
use crate::tensors::Class;

/// How to requantise.
#[derive(Clone, Debug, Default)]
pub struct QuantizeOptions {
    /// Types by tensor class; what is not chosen keeps its type.
    pub mix: Mix,
    /// Threads that encode; 0 for the ambient rayon pool.
    pub threads: usize,
}

/// Rewrites `input` (a file, any shard of a split model, or its folder) to the single file `out` with the types of
/// the mix. Metadata is kept; tensors that have their type already are copied byte for byte.
///
/// # Errors
///
/// A type without encoder, a tensor of unknown type, weights a type cannot hold, a failed read or write;
/// [`Error::Cancelled`].
pub fn quantize(
    input: &Path,
    out: &Path,
    options: &QuantizeOptions,
    progress: &mut OnProgress<'_>,
) -> Result<Summary, Error> {
    let model = Gguf::open(input)?;
    let plan = plan(&model, &options.mix)?;
    with_threads(options.threads, || {
        let mut output = Output::create(out, model.metadata().clone(), &plan, progress)?;
        for (planned, info) in plan.iter().zip(model.tensors()) {
            let bytes = model.bytes(info);
            match info.ty {
                TensorType::Known(ty) if ty != planned.ty => {
                    output.encode(planned, |first, rows| decode_rows(info, ty, bytes, first, rows))?;
                }
                _ => output.copy(planned, bytes)?,
            }
        }
        output.finish()
    })
}

/// The type of every tensor; refuses what cannot be done before anything is written.
fn plan(model: &Gguf, mix: &Mix) -> Result<Vec<Planned>, Error> {
    let mut plan = Vec::with_capacity(model.tensors().len());
    let mut blocks = 0;
    for info in model.tensors() {
        let source = match info.ty {
            TensorType::Known(ty) => ty,
            TensorType::Unknown(id) => return Err(Error::UnknownType { name: info.name.clone(), id }),
        };
        let (class, block) = classify(model, info);
        blocks = blocks.max(block.map_or(0, |block| block + 1));
        let wanted = mix.choose(class, block).unwrap_or(source);
        let planned = Planned::new(info.name.clone(), class, info.dims.clone(), wanted);
        if planned.ty != source && !quant::can_encode(planned.ty) {
            return Err(cannot_encode(planned.ty));
        }
        plan.push(planned);
    }
    mix.check_layers(blocks)?;
    Ok(plan)
}

/// Decodes whole rows of a tensor from row `first` on.
fn decode_rows(info: &TensorInfo, ty: Type, bytes: &[u8], first: u64, out: &mut [f32]) -> Result<(), Error> {
    let row_bytes = info.dims[0] as usize / ty.block_len() * ty.block_bytes();
    let rows = out.len() / info.dims[0] as usize;
    let start = first as usize * row_bytes;
    quant::decode(ty, &bytes[start..start + rows * row_bytes], out)
        .map_err(|source| Error::Quant { name: info.name.clone(), source })
}

/// The class of a tensor and the block it belongs to, from its name. Only its neighbours tell whether a fused
/// `attn_qkv` belongs to attention or to DeltaNet.
fn classify(model: &Gguf, info: &TensorInfo) -> (Class, Option<u32>) {
    let block = info.name.strip_prefix("blk.").and_then(|rest| {
        let (number, name) = rest.split_once('.')?;
        Some((number.parse().ok()?, name))
    });
    let Some((block, name)) = block else {
        let class = match info.name.as_str() {
            "token_embd.weight" => Class::Embedding,
            "output.weight" => Class::Output,
            _ if info.dims.len() < 2 => Class::Fixed,
            _ => Class::Other,
        };
        return (class, None);
    };
    let class = match name {
        _ if info.dims.len() < 2 => Class::Fixed,
        "attn_q.weight" | "attn_k.weight" | "attn_v.weight" | "attn_output.weight" => Class::Attention,
        "attn_qkv.weight" | "attn_gate.weight" => {
            let delta = model.tensor(&format!("blk.{block}.ssm_conv1d.weight")).is_some();
            if delta { Class::Delta } else { Class::Attention }
        }
        "ssm_in.weight" | "ssm_out.weight" => Class::Delta,
        "ssm_ba.weight" | "ssm_alpha.weight" | "ssm_beta.weight" => Class::BetaAlpha,
        "ffn_gate_shexp.weight" | "ffn_up_shexp.weight" | "ffn_down_shexp.weight" => Class::Shared,
        "ffn_gate_exps.weight" | "ffn_up_exps.weight" | "ffn_gate_up_exps.weight" => Class::GateUp,
        "ffn_down_exps.weight" => Class::Down,
        "nextn.embed_tokens.weight" => Class::Embedding,
        "nextn.shared_head_head.weight" => Class::Output,
        "ffn_gate_inp.weight" | "ffn_gate_inp_shexp.weight" | "ssm_conv1d.weight" => Class::Fixed,
        _ if name.ends_with("norm.weight") || !name.ends_with(".weight") => Class::Fixed,
        _ => Class::Other,
    };
    (class, Some(block))
}
