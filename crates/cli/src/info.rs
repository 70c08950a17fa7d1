//! `redlite info`: what is in a model file and what running it takes.

use std::collections::BTreeMap;
use std::io::Write;

use gguf::TensorType;
use model::{KvType, Model, Spec, state::SnapshotShape};
use serde_json::{Value, json};

use crate::args::InfoArgs;
use crate::failure::{Failure, Outcome};
use crate::report;

/// Runs the command.
pub fn run(args: &InfoArgs) -> Result<Outcome, Failure> {
    let fail = |source| Failure::Model { path: args.model.clone(), source };
    let model = Model::open(&args.model).map_err(fail)?;
    let trained = model.spec.context;
    let context = args.context.unwrap_or(trained.min(4096));
    if context > trained {
        return Err(Failure::Usage(format!(
            "a context of {context} is more than the {trained} of the model"
        )));
    }
    let classes = classes(&model);
    let memory = Memory::of(&model, context, args.kv.into());
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", to_json(&model, &classes, &memory))?;
    } else {
        write!(out, "{}", to_text(&model, &classes, &memory, args))?;
    }
    Ok(Outcome::Success)
}

/// Tensors of one class and type.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    tensors: usize,
    weights: u64,
    bytes: u64,
}

/// Classes in the order they are shown, each with its types.
type Classes = BTreeMap<(usize, &'static str, &'static str), Tally>;

fn classes(model: &Model) -> Classes {
    let mut classes = Classes::new();
    for info in model.gguf.tensors() {
        let (order, class) = class(&info.name, &model.spec);
        let ty = match info.ty {
            TensorType::Known(ty) => ty.name(),
            TensorType::Unknown(_) => "unknown",
        };
        let tally = classes.entry((order, class, ty)).or_default();
        tally.tensors += 1;
        tally.weights += info.elements();
        tally.bytes += info.len;
    }
    classes
}

/// The class of a tensor by its name, and its place in the table.
fn class(name: &str, spec: &Spec) -> (usize, &'static str) {
    let block = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let Some((block, suffix)) = block else {
        return match name {
            "token_embd.weight" => (0, "embedding"),
            "output.weight" => (7, "output"),
            _ => (8, "norms and tables"),
        };
    };
    if block.parse::<usize>().is_ok_and(|block| block >= spec.layers.len()) {
        return (9, "MTP block");
    }
    match suffix.split('.').next().unwrap_or_default() {
        "ffn_gate_exps" | "ffn_up_exps" | "ffn_gate_up_exps" => (1, "experts gate, up"),
        "ffn_down_exps" => (2, "experts down"),
        "ffn_gate_shexp" | "ffn_up_shexp" | "ffn_down_shexp" => (3, "shared expert"),
        "ffn_gate_inp" => (4, "router"),
        "ssm_in" | "ssm_ba" | "ssm_out" | "attn_gate" => (5, "DeltaNet"),
        "attn_qkv" => {
            let layer = block.parse::<usize>().unwrap_or_default();
            let attends = spec.layers.get(layer) == Some(&model::LayerKind::Attention);
            if attends { (6, "attention") } else { (5, "DeltaNet") }
        }
        "attn_q" | "attn_k" | "attn_v" | "attn_output" => (6, "attention"),
        _ => (8, "norms and tables"),
    }
}

/// Expected memory of one session.
struct Memory {
    dense: u64,
    experts: u64,
    kv: u64,
    state: u64,
    context: usize,
}

impl Memory {
    fn of(model: &Model, context: usize, kv: KvType) -> Memory {
        let shape = SnapshotShape::new(&model.spec, kv);
        let positions = context.next_multiple_of(model::state::PAGE);
        Memory {
            dense: model.dense_bytes(),
            experts: model.expert_bytes(),
            kv: (positions * shape.position_len() * kv.bytes()) as u64,
            // A pass writes a new state beside the old one.
            state: 2 * (shape.slot_len() * size_of::<f32>()) as u64,
            context,
        }
    }

    fn without_experts(&self) -> u64 {
        self.dense + self.kv + self.state
    }
}

fn to_text(model: &Model, classes: &Classes, memory: &Memory, args: &InfoArgs) -> String {
    let spec = &model.spec;
    let (a, d, m) = (&spec.attention, &spec.delta, &spec.moe);
    let tokens = model.gguf.metadata().strings("tokenizer.ggml.tokens").ok().flatten().map_or(0, |t| t.len());
    let shards = model.gguf.shards().len();
    let mut lines = vec![
        ("model", spec.name.clone()),
        ("file", format!("{} in {shards} {}", report::size(file_bytes(model)), plural(shards, "file"))),
        (
            "layers",
            format!(
                "{}: {} DeltaNet, {} attention",
                spec.layers.len(),
                spec.delta_layers(),
                spec.attention_layers()
            ),
        ),
        ("hidden", spec.hidden.to_string()),
        ("vocabulary", format!("{} rows, {tokens} tokens", spec.vocab)),
        ("context", spec.context.to_string()),
        (
            "attention",
            format!("{} heads, {} KV heads of {}, {} rotated", a.heads, a.kv_heads, a.head_dim, a.rope_dims),
        ),
        (
            "DeltaNet",
            format!(
                "{} key heads, {} value heads of {}, {} taps",
                d.key_heads, d.value_heads, d.head_dim, d.taps
            ),
        ),
        (
            "experts",
            format!(
                "{} a layer, {} a token, width {}, shared {}",
                m.experts,
                m.used,
                widths(m),
                m.shared_width
            ),
        ),
        ("triplet", format!("{} (gate + up + down of one expert)", triplets(model))),
    ];
    if spec.mtp_blocks > 0 {
        lines.push(("MTP blocks", format!("{} (not used)", spec.mtp_blocks)));
    }
    let mut out: String = lines.iter().map(|(name, value)| format!("{name:<11}{value}\n")).collect();
    out += "\n";
    out += &class_table(classes);
    out += &format!(
        "\nmemory for one session of {} positions ({:?} keys and values)\n",
        memory.context, args.kv
    );
    let rows = [
        ("dense weights", memory.dense),
        ("keys and values", memory.kv),
        ("DeltaNet state", memory.state),
        ("without experts, scratch", memory.without_experts()),
        ("experts, all resident", memory.experts),
    ];
    out += &rows.map(|(name, bytes)| format!("  {name:<26}{:>11}\n", report::size(bytes))).concat();
    for warning in &model.warnings {
        out += &format!("\nwarning: {warning}\n");
    }
    out
}

fn class_table(classes: &Classes) -> String {
    let row = |((_, class, ty), tally): (&(usize, &str, &str), &Tally)| {
        vec![
            (*class).to_string(),
            (*ty).to_string(),
            tally.tensors.to_string(),
            report::size(tally.bytes),
            format!("{:.2}", 8.0 * tally.bytes as f64 / tally.weights.max(1) as f64),
        ]
    };
    let rows: Vec<Vec<String>> = classes.iter().map(row).collect();
    report::table(&["weights", "type", "tensors", "size", "bits each"], &rows)
}

fn widths(moe: &model::MoeSpec) -> String {
    let (low, high) = (moe.widths.iter().min(), moe.widths.iter().max());
    match (low, high) {
        (Some(low), Some(high)) if low != high => format!("{low} to {high}"),
        (Some(low), _) => low.to_string(),
        (None, _) => String::new(),
    }
}

fn triplets(model: &Model) -> String {
    let mut sizes: Vec<u64> = model.experts.iter().map(|layer| layer.triplet_bytes() as u64).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes.iter().map(|&bytes| report::size(bytes)).collect::<Vec<_>>().join(", ")
}

fn plural(count: usize, what: &str) -> String {
    if count == 1 { what.to_string() } else { format!("{what}s") }
}

fn file_bytes(model: &Model) -> u64 {
    model.gguf.shards().iter().map(gguf::Shard::size).sum()
}

fn to_json(model: &Model, classes: &Classes, memory: &Memory) -> Value {
    let spec = &model.spec;
    let class = |((_, class, ty), tally): (&(usize, &str, &str), &Tally)| {
        json!({
            "class": class, "type": ty, "tensors": tally.tensors, "weights": tally.weights, "bytes": tally.bytes,
        })
    };
    json!({
        "name": spec.name,
        "architecture": Spec::ARCHITECTURE,
        "file_bytes": file_bytes(model),
        "shape": {
            "layers": spec.layers.len(),
            "delta_layers": spec.delta_layers(),
            "attention_layers": spec.attention_layers(),
            "mtp_blocks": spec.mtp_blocks,
            "hidden": spec.hidden,
            "vocabulary": spec.vocab,
            "context": spec.context,
            "heads": spec.attention.heads,
            "kv_heads": spec.attention.kv_heads,
            "head_dim": spec.attention.head_dim,
            "rope_dims": spec.attention.rope_dims,
            "delta_key_heads": spec.delta.key_heads,
            "delta_value_heads": spec.delta.value_heads,
            "delta_head_dim": spec.delta.head_dim,
            "experts": spec.moe.experts,
            "experts_used": spec.moe.used,
            "expert_widths": spec.moe.widths,
            "shared_width": spec.moe.shared_width,
            "tied": model.tied,
        },
        "triplet_bytes": model.experts.iter().map(model::ExpertLayout::triplet_bytes).collect::<Vec<_>>(),
        "classes": classes.iter().map(class).collect::<Vec<_>>(),
        "memory": {
            "context": memory.context,
            "dense_bytes": memory.dense,
            "kv_bytes": memory.kv,
            "state_bytes": memory.state,
            "without_experts_bytes": memory.without_experts(),
            "experts_bytes": memory.experts,
        },
        "warnings": model.warnings,
    })
}
