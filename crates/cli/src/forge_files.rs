//! `redlite convert`, `quantize` and `synth`: making model files.

use std::io::Write;

use engine::Cancel;
use forge::{
    Control, ConvertOptions, Layout, Mix, Progress, QuantizeOptions, Recipe, Shape, Summary, SynthOptions,
};
use serde_json::json;

use crate::args::{ConvertArgs, QuantizeArgs, RecipeName, ShapeArgs, SynthArgs, WorkArgs};
use crate::failure::{Failure, Outcome};
use crate::report::{self, Bar};
use crate::{interrupt, open};

/// Runs `redlite convert`.
pub fn convert(args: &ConvertArgs) -> Result<Outcome, Failure> {
    let options = ConvertOptions {
        mix: args.mix.over(Mix::new(Some(args.ty), Some(args.ty))),
        layout: layout(args.legacy_layout),
        context_length: args.context_length,
        mtp: args.mtp,
        name: args.name.clone(),
        threads: args.work.threads.unwrap_or(0),
    };
    work(&args.work, "converting", |report| forge::convert(&args.source, &args.output, &options, report))
}

/// Runs `redlite quantize`.
pub fn quantize(args: &QuantizeArgs) -> Result<Outcome, Failure> {
    open::refuse_input(&args.output, &gguf::Gguf::open(&args.input).map_err(forge::Error::from)?)?;
    let options =
        QuantizeOptions { mix: args.mix.over(Mix::default()), threads: args.work.threads.unwrap_or(0) };
    work(&args.work, "encoding", |report| forge::quantize(&args.input, &args.output, &options, report))
}

/// Runs `redlite synth`.
pub fn synth(args: &SynthArgs) -> Result<Outcome, Failure> {
    let shape = shape(&args.shape);
    let base = match (args.ty, args.recipe) {
        (Some(ty), _) => Mix::new(Some(ty), Some(ty)),
        (None, RecipeName::Iq2xxs) => Recipe::Iq2Xxs.mix(shape.layers),
        (None, RecipeName::F2) => Recipe::F2.mix(shape.layers),
        (None, RecipeName::Iq3xxs) => Recipe::Iq3Xxs.mix(shape.layers),
        (None, RecipeName::F32) => Recipe::F32.mix(shape.layers),
    };
    let options = SynthOptions {
        mix: args.mix.over(base),
        shape,
        seed: args.seed,
        skew: args.skew,
        threads: args.work.threads.unwrap_or(0),
        ..SynthOptions::default()
    };
    work(&args.work, "writing", |report| forge::synth(&args.output, &options, report))
}

fn layout(legacy: bool) -> Layout {
    if legacy { Layout::Legacy } else { Layout::Split }
}

/// The 80B's numbers, where none are given.
fn shape(args: &ShapeArgs) -> Shape {
    let base = Shape::default();
    Shape {
        layers: args.layers.unwrap_or(base.layers),
        mtp_layers: u32::from(args.mtp),
        hidden: args.hidden.unwrap_or(base.hidden),
        vocab: args.vocab.unwrap_or(base.vocab),
        context: args.context.unwrap_or(base.context),
        heads: args.heads.unwrap_or(base.heads),
        kv_heads: args.kv_heads.unwrap_or(base.kv_heads),
        head_dim: args.head_dim.unwrap_or(base.head_dim),
        rope_dims: args.rope_dims.unwrap_or(base.rope_dims),
        attention_interval: args.attention_interval.unwrap_or(base.attention_interval),
        key_heads: args.key_heads.unwrap_or(base.key_heads),
        value_heads: args.value_heads.unwrap_or(base.value_heads),
        state_dim: args.state_dim.unwrap_or(base.state_dim),
        experts: args.expert_count.unwrap_or(base.experts),
        experts_used: args.experts_used.unwrap_or(base.experts_used),
        expert_width: args.expert_width.unwrap_or(base.expert_width),
        shared_width: args.shared_width.unwrap_or(base.shared_width),
        tied: args.tied,
        layout: layout(args.legacy_layout),
        ..base
    }
}

/// Runs `job` under a bar, stops it on Ctrl-C, and prints what it made.
fn work(
    args: &WorkArgs,
    what: &'static str,
    job: impl FnOnce(&mut forge::OnProgress<'_>) -> Result<Summary, forge::Error>,
) -> Result<Outcome, Failure> {
    let cancel: Cancel = interrupt::on_ctrl_c()?;
    let bar = Bar::bytes(what, 0, args.quiet || args.json);
    let mut report = |progress: Progress<'_>| {
        bar.set_total(progress.total);
        bar.set(progress.done);
        if cancel.is_cancelled() { Control::Cancel } else { Control::Continue }
    };
    let result = job(&mut report);
    bar.finish();
    print(&result?, args.json)?;
    Ok(Outcome::Success)
}

fn print(summary: &Summary, as_json: bool) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if as_json {
        let lines = summary.lines.iter().map(|line| {
            json!({
                "class": line.class.name(), "type": line.ty.name(), "tensors": line.tensors,
                "weights": line.weights, "bytes": line.bytes, "relative_rms_error": line.rms_error,
            })
        });
        let fallbacks = summary.fallbacks.iter().map(|f| {
            json!({ "tensor": f.tensor, "columns": f.columns, "wanted": f.wanted.name(), "used": f.used.name() })
        });
        let value = json!({
            "path": summary.path, "bytes": summary.bytes, "classes": lines.collect::<Vec<_>>(),
            "fallbacks": fallbacks.collect::<Vec<_>>(), "skipped": summary.skipped,
        });
        return writeln!(out, "{value}");
    }
    let rows: Vec<Vec<String>> = (summary.lines.iter())
        .map(|line| {
            vec![
                line.class.name().to_string(),
                line.ty.name().to_string(),
                line.tensors.to_string(),
                report::size(line.bytes),
                line.rms_error.map_or("-".to_string(), |error| format!("{error:.4}")),
            ]
        })
        .collect();
    write!(out, "{}", report::table(&["weights", "type", "tensors", "size", "rel. RMS error"], &rows))?;
    for f in &summary.fallbacks {
        writeln!(
            out,
            "{}: rows of {} do not divide into {} blocks; {} instead",
            f.tensor, f.columns, f.wanted, f.used
        )?;
    }
    if !summary.skipped.is_empty() {
        writeln!(
            out,
            "{} tensors of the source were left out: {} …",
            summary.skipped.len(),
            summary.skipped[0]
        )?;
    }
    writeln!(out, "\n{}  {}", summary.path.display(), report::size(summary.bytes))
}
