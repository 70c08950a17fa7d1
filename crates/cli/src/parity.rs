//! `redlite parity`: two backends, a backend and stored logits, or two sets of stored logits, side by side.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use clap::ValueEnum;
use engine::Cancel;
use engine::compare::Difference;
use engine::parity::{Parity, Side, parity};
use model::{Intermediate, Limits, MappedExperts, Stage};
use serde_json::{Value, json};

use crate::args::{BackendName, ParityArgs};
use crate::failure::{Failure, Outcome};
use crate::open::{self, Opened};
use crate::report::{self, Bar};
use crate::{interrupt, prompt, stored};

/// Runs the command.
pub fn run(args: &ParityArgs) -> Result<Outcome, Failure> {
    let cancel = interrupt::on_ctrl_c()?;
    let opened = open::model(&args.model)?;
    let mut tokens = prompt::tokens(&args.tokens, &opened.tokenizer)?;
    tokens.truncate(args.limit);
    if tokens.is_empty() {
        return Err(engine::Error::EmptyPrompt.into());
    }
    let result = match (Party::parse(&args.a)?, Party::parse(&args.b)?) {
        (Party::Backend(a), Party::Backend(b)) => backends(args, &opened, [a, b], &tokens, &cancel)?,
        (Party::Backend(backend), Party::Stored(path)) | (Party::Stored(path), Party::Backend(backend)) => {
            stored::with_backend(args, &opened, backend, path, &tokens, cancel)?
        }
        (Party::Stored(a), Party::Stored(b)) => stored::with_stored(&opened, a, b, tokens.len())?,
    };
    if [args.max_kl, args.min_top1, args.max_rms].iter().any(|limit| limit.is_nan()) {
        return Err(Failure::Usage("a limit that is not a number can neither hold nor fail".to_string()));
    }
    let passed = result.logits.kl_mean() <= args.max_kl
        && result.logits.top_share() >= args.min_top1
        && logits_rms(&result) <= args.max_rms;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", to_json(&result, passed))?;
    } else {
        write!(out, "{}", to_text(&result, passed))?;
    }
    Ok(if passed { Outcome::Success } else { Outcome::Negative })
}

/// One side of a comparison.
enum Party<'a> {
    Backend(BackendName),
    Stored(&'a Path),
}

impl Party<'_> {
    fn parse(name: &str) -> Result<Party<'_>, Failure> {
        match BackendName::from_str(name, true) {
            Ok(backend) => Ok(Party::Backend(backend)),
            Err(_) if name.ends_with(".npy") => Ok(Party::Stored(Path::new(name))),
            Err(_) => Err(Failure::Usage(format!("`{name}` is neither a backend nor an .npy file"))),
        }
    }
}

/// What the CPU is told.
pub fn options(args: &ParityArgs) -> cpu::Options {
    cpu::Options { threads: args.threads, exact: args.exact, ..cpu::Options::default() }
}

pub fn limits(args: &ParityArgs, positions: usize) -> Limits {
    Limits { pass_rows: engine::plan::pass_rows(args.chunk, positions), positions, kv: args.kv.into() }
}

fn backends(
    args: &ParityArgs,
    opened: &Opened,
    [a, b]: [BackendName; 2],
    tokens: &[u32],
    cancel: &Cancel,
) -> Result<Parity, Failure> {
    let limits = limits(args, tokens.len());
    let mut left = open::backend(&opened.model, a, options(args), limits, args.json)?;
    let mut right = open::backend(&opened.model, b, options(args), limits, args.json)?;
    let mut experts = MappedExperts::new(&opened.model);
    let mut other = experts.clone();
    let mut a = Side { backend: &mut *left, experts: &mut experts };
    let mut b = Side { backend: &mut *right, experts: &mut other };
    let bar = Bar::tokens("comparing", tokens.len(), args.json);
    let mut progress = |done: f64, _| bar.set(done as u64);
    let result = parity(&opened.model.spec, &mut a, &mut b, tokens, args.chunk, cancel, &mut progress);
    bar.finish();
    Ok(result?)
}

/// Relative RMS of the differences of the logits.
fn logits_rms(result: &Parity) -> f64 {
    let logits = result.stages.iter().find(|((.., what), _)| *what == Intermediate::Logits);
    logits.map_or(0.0, |(_, difference)| difference.relative_rms())
}

/// The layers of one intermediate, merged, and the worst of them.
struct Row {
    merged: Difference,
    worst_layer: usize,
    worst: f64,
}

fn rows(result: &Parity) -> BTreeMap<(Stage, Intermediate), Row> {
    let mut rows: BTreeMap<(Stage, Intermediate), Row> = BTreeMap::new();
    for (&(stage, layer, what), difference) in &result.stages {
        let start = Row { merged: Difference::default(), worst_layer: layer, worst: -1.0 };
        let row = rows.entry((stage, what)).or_insert(start);
        row.merged.max_error = row.merged.max_error.max(difference.max_error);
        row.merged.error_squares += difference.error_squares;
        row.merged.squares += difference.squares;
        if difference.relative_rms() > row.worst {
            (row.worst, row.worst_layer) = (difference.relative_rms(), layer);
        }
    }
    rows
}

fn to_text(result: &Parity, passed: bool) -> String {
    let mut out = String::new();
    let rows: Vec<Vec<String>> = rows(result)
        .into_iter()
        .map(|((_, what), row)| {
            vec![
                what.name().to_string(),
                format!("{:.2e}", row.merged.max_error),
                format!("{:.2e}", row.merged.relative_rms()),
                format!("{:.2e}", row.worst),
                row.worst_layer.to_string(),
            ]
        })
        .collect();
    if !rows.is_empty() {
        out += &report::table(&["stage", "max error", "rel. RMS", "worst layer's", "layer"], &rows);
        out.push('\n');
    }
    let (differ, compared) = result.routes;
    if compared > 0 {
        out += &format!("experts     {differ} of {compared} (row, layer) pairs chose others\n");
    }
    let l = &result.logits;
    out += &format!("positions   {}\n", l.positions);
    out += &format!("mean KL     {:.3e} nats (largest {:.3e})\n", l.kl_mean(), l.kl_max);
    out += &format!("same top-1  {:.3} %\n", 100.0 * l.top_share());
    out += &format!("max error   {:.3e} (logits)\n", l.max_error);
    out + if passed { "passed\n" } else { "FAILED\n" }
}

fn to_json(result: &Parity, passed: bool) -> Value {
    let stages: Vec<Value> = (result.stages.iter())
        .map(|(&(_, layer, what), d)| {
            json!({
                "name": what.name(), "layer": layer,
                "max_error": d.max_error, "relative_rms": d.relative_rms(),
            })
        })
        .collect();
    let l = &result.logits;
    json!({
        "passed": passed,
        "positions": l.positions,
        "kl_mean": l.kl_mean(),
        "kl_max": l.kl_max,
        "top1": l.top_share(),
        "logits_max_error": l.max_error,
        "logits_relative_rms": logits_rms(result),
        "routes_differ": result.routes.0,
        "routes_compared": result.routes.1,
        "stages": stages,
    })
}
