//! `redlite experts`: which experts a text uses, and what caches of different sizes would find.

pub mod args;
mod picture;
mod record;

use std::io::Write;
use std::time::Instant;

use engine::{Cancel, Engine, Request, Session};
use experts::Layout;
use experts::simulate::{Found, Replacement, simulate};
use model::Model;
use serde_json::{Value, json};

use crate::cache::{Loads, Room};
use crate::calibration::{self, Calibration};
use crate::failure::{Failure, Outcome};
use crate::report::{self, Bar};
use crate::{interrupt, open, prompt};
use args::ExpertsArgs;
use record::Recorder;

/// Sizes of caches, in percent of all experts.
const SHARES: [u64; 12] = [2, 5, 8, 11, 16, 22, 30, 40, 50, 65, 80, 100];

/// Runs the command.
pub fn run(args: &ExpertsArgs) -> Result<Outcome, Failure> {
    let text = prompt::text(&args.text)?;
    let cancel = interrupt::on_ctrl_c()?;
    let opened = open::model(&args.model)?;
    let tokens = opened.tokenizer.encode_text(&text);
    if tokens.len() < 4 {
        return Err(Failure::Usage(
            "the text has fewer than four tokens: there is nothing to see".to_string(),
        ));
    }
    let steps = args.steps.clamp(1, tokens.len() / 2);
    let warm = tokens.len() - steps;
    let room = Room { context: tokens.len(), positions: tokens.len(), prompt: Some(warm), lasting: false };
    let started = open::start_for(&opened.model, &args.backend, room, args.json)?;
    let mut engine = started.engine;
    let mut loads = Loads::new(started.monitor);
    let mut recorder = Recorder::new(&opened.model.spec, args.backend.cache.look_ahead.0.unwrap_or(0));
    let mut session = engine.open();
    let logits = read(&mut engine, &mut session, &tokens[..warm], &mut recorder, &cancel, args.json)?;
    loads.mark();
    let began = Instant::now();
    let nats = step(&mut engine, &mut session, (&tokens[warm..], logits), &mut recorder, &cancel)?;
    let time = began.elapsed();
    loads.mark();
    let report = Report {
        budgets: budgets(&opened.model, &recorder, warm)?,
        recorder,
        model: &opened.model,
        warm,
        steps,
        nats: nats / steps as f64,
    };
    if args.backend.cache.route_bias.is_none() && steps >= calibration::ENOUGH_TOKENS {
        report.keep();
    }
    if let Some(path) = &args.svg {
        open::refuse_input(path, &opened.model.gguf)?;
        let fail = |source| Failure::File { path: path.clone(), source };
        std::fs::write(path, picture::draw(&report)).map_err(fail)?;
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut value = report.json();
        value["route_bias"] = json!(args.backend.cache.route_bias);
        if let Some(loads) = loads.json() {
            value["loads"] = loads;
        }
        writeln!(out, "{value}")?;
    } else {
        write!(out, "{}", report.text())?;
        for line in loads.lines([("read", time), ("write", time)]).iter().skip(1) {
            writeln!(out, "{line}")?;
        }
    }
    Ok(Outcome::Success)
}

/// Reads the first part of the text; logits behind it.
fn read(
    engine: &mut Engine,
    session: &mut Session,
    tokens: &[u32],
    recorder: &mut Recorder,
    cancel: &Cancel,
    quiet: bool,
) -> Result<Vec<f32>, Failure> {
    let bar = Bar::tokens("reading", tokens.len(), quiet);
    let mut progress = |done: f64, _| bar.set(done as u64);
    let mut request = Request {
        on_progress: Some(&mut progress),
        observer: Some(recorder),
        cancel: cancel.clone(),
        ..Request::default()
    };
    let read = engine.ingest(session, tokens, &mut request);
    bar.finish();
    Ok(read?.logits)
}

/// Reads the rest token by token, as if they had been generated. Returns the nats they cost.
fn step(
    engine: &mut Engine,
    session: &mut Session,
    (tokens, mut logits): (&[u32], Vec<f32>),
    recorder: &mut Recorder,
    cancel: &Cancel,
) -> Result<f64, Failure> {
    let mut nats = 0.0;
    for &token in tokens {
        nats += surprise(&logits, token);
        let mut request = Request { observer: Some(recorder), cancel: cancel.clone(), ..Request::default() };
        logits = engine.ingest(session, &[token], &mut request)?.logits;
    }
    Ok(nats)
}

/// Minus the logarithm of a token's probability.
fn surprise(logits: &[f32], token: u32) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - most).exp()).sum();
    sum.ln() - f64::from(logits[token as usize] - most)
}

/// A cache, and what it would have found while tokens were computed one by one.
struct Budget {
    bytes: u64,
    slots: usize,
    /// Least recently used, with look-ahead, clairvoyant.
    found: [Found; 3],
}

fn budgets(model: &Model, recorder: &Recorder, warm: usize) -> Result<Vec<Budget>, Failure> {
    let all = Layout::new(model, None, 1).map_err(Failure::Experts)?.bytes();
    // What does not hold a token's experts is no cache.
    let layouts = SHARES.iter().filter_map(|share| Layout::new(model, Some(all * share / 100), 1).ok());
    let policies = [Replacement::LeastRecent, Replacement::LookAhead, Replacement::Clairvoyant];
    let budget = |layout: Layout| Budget {
        bytes: layout.bytes(),
        slots: layout.slots(),
        found: policies.map(|policy| simulate(&recorder.trace, &layout, warm, policy)),
    };
    Ok(layouts.map(budget).collect())
}

/// What was found out.
struct Report<'a> {
    model: &'a Model,
    recorder: Recorder,
    budgets: Vec<Budget>,
    /// Tokens read together, and one by one.
    warm: usize,
    steps: usize,
    nats: f64,
}

impl Report<'_> {
    /// The share of experts used at least once, and the share of choices that the most used tenth takes.
    fn spread(&self) -> (f64, f64) {
        let mut counts: Vec<u64> = self.recorder.counts.iter().flatten().copied().collect();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let used = counts.iter().filter(|&&count| count > 0).count();
        let all: u64 = counts.iter().sum();
        let tenth: u64 = counts[..counts.len().div_ceil(10)].iter().sum();
        (used as f64 / counts.len().max(1) as f64, tenth as f64 / all.max(1) as f64)
    }

    /// Has plans know what caches of this model find.
    fn keep(&self) {
        let (mut known, name) = (Calibration::load(), calibration::model_name(self.model));
        for budget in &self.budgets {
            known.note_hits(&name, self.share(budget), budget.found[0].rate(), self.steps);
        }
        known.store();
    }

    fn share(&self, budget: &Budget) -> f64 {
        budget.bytes as f64 / self.model.expert_bytes().max(1) as f64
    }

    fn text(&self) -> String {
        let moe = &self.model.spec.moe;
        let (used, tenth) = self.spread();
        let [top, more] = self.recorder.recall();
        let text = format!(
            "{} tokens read together, then {} one by one ({:.4} nats each); {} layers of {} experts, {} used\n\
             used at least once: {:.1} % of the experts; the most used tenth takes {:.1} % of the choices\n\
             look-ahead: the next layer's router names {:.1} % of its experts with {}, {:.1} % with {}\n\n",
            self.warm,
            self.steps,
            self.nats,
            self.model.spec.layers.len(),
            moe.experts,
            moe.used,
            100.0 * used,
            100.0 * tenth,
            100.0 * top,
            moe.used,
            100.0 * more,
            moe.used + self.recorder.margin,
        );
        let row = |budget: &Budget| {
            let percent = |found: &Found| format!("{:.1} %", 100.0 * found.rate());
            let each = |count: u64| format!("{:.1}", count as f64 / self.steps as f64);
            let [recent, ahead, clairvoyant] = &budget.found;
            vec![
                report::size(budget.bytes),
                format!("{:.0} %", 100.0 * self.share(budget)),
                budget.slots.to_string(),
                percent(recent),
                percent(ahead),
                percent(clairvoyant),
                each(recent.wanted - recent.found),
                each(ahead.wanted - ahead.found),
                each(clairvoyant.wanted - clairvoyant.found),
                each(ahead.loads),
            ]
        };
        let rows: Vec<Vec<String>> = self.budgets.iter().map(row).collect();
        let header = [
            "cache",
            "of all",
            "slots",
            "found",
            "look-ahead",
            "clairvoyant",
            "missed/token",
            "look-ahead",
            "clairvoyant",
            "read/token",
        ];
        text + &report::table(&header, &rows)
    }

    fn json(&self) -> Value {
        let [top, more] = self.recorder.recall();
        let found = |found: &Found| {
            json!({
                "hit_rate": found.rate(),
                "misses_per_token": (found.wanted - found.found) as f64 / self.steps as f64,
                "loads_per_token": found.loads as f64 / self.steps as f64,
            })
        };
        let budget = |budget: &Budget| {
            json!({
                "bytes": budget.bytes,
                "share": self.share(budget),
                "slots": budget.slots,
                "least_recent": found(&budget.found[0]),
                "look_ahead": found(&budget.found[1]),
                "clairvoyant": found(&budget.found[2]),
            })
        };
        json!({
            "tokens_together": self.warm,
            "tokens_stepped": self.steps,
            "nats_per_token": self.nats,
            "layers": self.model.spec.layers.len(),
            "experts": self.model.spec.moe.experts,
            "experts_used": self.model.spec.moe.used,
            "look_ahead": {
                "margin": self.recorder.margin,
                "recall": top,
                "recall_with_margin": more,
                "recall_by_layer": self.recorder.recall_by_layer(),
            },
            "budgets": self.budgets.iter().map(budget).collect::<Vec<_>>(),
            "counts": self.recorder.counts,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::surprise;

    #[test]
    fn surprise_is_the_logarithm_of_one_over_the_probability() {
        assert!((surprise(&[0.0, 0.0, 0.0, 0.0], 2) - 4f64.ln()).abs() < 1e-12);
        assert!(surprise(&[100.0, 0.0], 0).abs() < 1e-12);
        assert!((surprise(&[100.0, 0.0], 1) - 100.0).abs() < 1e-9);
    }
}
