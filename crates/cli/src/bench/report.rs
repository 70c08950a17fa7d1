//! What `bench` prints.

use std::io::Write;
use std::path::Path;

use engine::{Profile, StageProfile};
use model::{Cost, Peaks};
use serde_json::{Value, json};

use super::{Bench, Results, Row, Test};
use crate::report;

impl Results<'_> {
    /// Tables, or one JSON object.
    pub(super) fn print(&self) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        if self.args.json {
            return writeln!(out, "{:#}", self.json());
        }
        writeln!(out, "{}", self.bench.description(self.path))?;
        writeln!(out, "every row of a prompt in every layer; logits of the last row, as in use")?;
        for peaks in &self.bench.peaks {
            writeln!(out, "{}", peak_line(peaks))?;
        }
        write!(out, "\n{}", self.table())?;
        for row in &self.rows {
            if let Some((loads, time)) = &row.loads {
                let name = format!("{} {}", row.shape.test.name(), row.shape.tokens);
                loads.lines([(&name, *time)]).iter().try_for_each(|line| writeln!(out, "{line}"))?;
            }
        }
        for row in &self.rows {
            if let Some(profile) = &row.profile {
                let shape = row.shape;
                let per_token = profile.total().cost.operations() as f64 / shape.tokens as f64;
                writeln!(
                    out,
                    "\n{} {}: {:.1} ms, {:.2} GFLOP a token",
                    shape.test.name(),
                    shape.tokens,
                    row.seconds * 1e3,
                    per_token / 1e9
                )?;
                write!(out, "{}", stage_table(profile, row, self.bench.peaks.last()))?;
            }
        }
        Ok(())
    }

    fn table(&self) -> String {
        let line = |row: &Row| {
            let rates = &row.rates;
            let mut cells = vec![row.shape.test.name().to_string()];
            cells.extend([row.shape.tokens, self.args.depth].map(|n| n.to_string()));
            cells.extend([rates.median(), rates.min(), rates.max()].map(|rate| format!("{rate:.2}")));
            cells.push(format!("{:.1} %", 100.0 * rates.spread()));
            cells
        };
        let rows: Vec<Vec<String>> = self.rows.iter().map(line).collect();
        report::table(&["test", "tokens", "depth", "tokens/s", "min", "max", "spread"], &rows)
    }

    /// Everything, with every sample.
    pub(super) fn json(&self) -> Value {
        let (args, bench) = (self.args, self.bench);
        let results: Vec<Value> = self.rows.iter().map(|row| self.row_json(row)).collect();
        json!({
            "program": concat!("redlite ", env!("CARGO_PKG_VERSION")),
            "model": self.path.display().to_string(),
            "description": bench.model.spec.name,
            "bytes": bench.file_bytes(),
            "backend": bench.name, "kernels": bench.variant,
            "threads": bench.threads,
            "kv": if bench.kv().bytes() == 4 { "f32" } else { "f16" },
            "chunk": bench.plan.chunk, "exact": args.backend.exact,
            "route_bias": args.backend.cache.route_bias,
            "seed": args.seed, "repeat": args.repeat, "unit": "tokens/s",
            "peaks": bench.peaks.iter().map(peaks_json).collect::<Vec<_>>(),
            "results": results,
        })
    }

    fn row_json(&self, row: &Row) -> Value {
        let rates = &row.rates;
        let mut value = json!({
            "test": row.shape.test.name(), "tokens": row.shape.tokens, "depth": self.args.depth,
            "median": rates.median(), "min": rates.min(), "max": rates.max(), "samples": rates.all(),
            "seconds": row.seconds,
        });
        if let Some((loads, time)) = &row.loads {
            value["loads"] = loads.json().map_or(Value::Null, |mut phases| phases[0].take());
            value["loads"]["seconds"] = time.as_secs_f64().into();
        }
        if let Some(profile) = &row.profile {
            let peaks = self.bench.peaks.last();
            let stages = profile.stages().map(|(stage, profile)| {
                let mut line = stage_json(profile, row, peaks);
                line["stage"] = stage.name().into();
                line
            });
            value["stages"] = stages.collect();
            value["total"] = stage_json(&profile.total(), row, peaks);
        }
        value
    }
}

impl Bench<'_> {
    fn file_bytes(&self) -> u64 {
        self.model.gguf.shards().iter().map(|shard| shard.size()).sum()
    }

    fn description(&self, path: &Path) -> String {
        let mut text = format!(
            "{}: {}, {}; {} {}",
            path.display(),
            self.model.spec.name,
            report::size(self.file_bytes()),
            self.name,
            self.variant,
        );
        if let Some(threads) = self.threads {
            text += &format!(", {threads} {}", if threads == 1 { "thread" } else { "threads" });
        }
        text
    }
}

/// Rates in the unit of their time and cost.
struct Rates {
    /// Operations a second, in billions.
    operations: f64,
    /// Bytes a second, in billions.
    bytes: f64,
    /// What bounds it, and how near to that bound it is; with peaks only.
    peak: Option<(&'static str, f64)>,
}

impl Rates {
    fn new(cost: &Cost, seconds: f64, peaks: Option<&Peaks>) -> Rates {
        let seconds = seconds.max(1e-9);
        let peak = peaks.map(|peaks| {
            let (least, bound) = peaks.least_seconds(cost);
            (peaks.name(bound), least / seconds)
        });
        let giga = |count: u64| count as f64 / seconds / 1e9;
        Rates { operations: giga(cost.operations()), bytes: giga(cost.bytes), peak }
    }
}

/// The peaks in a line.
pub fn peak_line(peaks: &Peaks) -> String {
    let Peaks { workers, quantised, plain, bytes, link } = peaks;
    let mut text = format!("peak of {workers}: {:.0} GOP/s {}", quantised.rate / 1e9, quantised.unit);
    if plain.unit != quantised.unit {
        text += &format!(", {:.0} GFLOP/s {}", plain.rate / 1e9, plain.unit);
    }
    text += &format!(", {:.1} GB/s read", bytes / 1e9);
    text + &link.map_or(String::new(), |rate| format!(", {:.1} GB/s over the link", rate / 1e9))
}

/// The peaks as JSON.
pub fn peaks_json(peaks: &Peaks) -> Value {
    json!({
        "workers": peaks.workers,
        "quantised": { "unit": peaks.quantised.unit, "operations_per_second": peaks.quantised.rate },
        "plain": { "unit": peaks.plain.unit, "operations_per_second": peaks.plain.rate },
        "bytes_per_second": peaks.bytes,
        "link_bytes_per_second": peaks.link,
    })
}

/// Time and rates of every stage; `rest` is what lies between stages.
fn stage_table(profile: &Profile, row: &Row, peaks: Option<&Peaks>) -> String {
    let total = profile.total();
    let rest = (row.seconds - total.time.as_secs_f64()).max(0.0);
    let line = |name: &str, seconds: f64, cost: &Cost| {
        let mut cells = vec![
            name.to_string(),
            format!("{:.1}", seconds * 1e3),
            format!("{:.1} %", 100.0 * seconds / row.seconds.max(1e-9)),
            format!("{:.1}", seconds * 1e6 / row.shape.tokens as f64),
        ];
        let rates = Rates::new(cost, seconds, peaks);
        let some = |number: f64, text: String| if number > 0.0 { text } else { String::new() };
        cells.push(some(rates.operations, format!("{:.1}", rates.operations)));
        cells.push(some(rates.bytes, format!("{:.2}", rates.bytes)));
        let (bound, share) = rates.peak.filter(|peak| peak.1 > 0.0).unwrap_or_default();
        cells.extend([bound.to_string(), some(share, format!("{:.1} %", 100.0 * share))]);
        cells
    };
    let stages = profile.stages().map(|(stage, s)| line(stage.name(), s.time.as_secs_f64(), &s.cost));
    let mut lines: Vec<Vec<String>> = stages.collect();
    if row.shape.test == Test::Generate || rest > 0.0 {
        lines.push(line("rest", rest, &Cost::default()));
    }
    lines.push(line("total", row.seconds, &total.cost));
    report::table(&["stage", "ms", "share", "µs/token", "GFLOP/s", "GB/s", "bound", "of peak"], &lines)
}

fn stage_json(profile: &StageProfile, row: &Row, peaks: Option<&Peaks>) -> Value {
    let seconds = profile.time.as_secs_f64();
    let rates = Rates::new(&profile.cost, seconds, peaks);
    json!({
        "milliseconds": seconds * 1e3,
        "share": seconds / row.seconds.max(1e-9),
        "microseconds_per_token": seconds * 1e6 / row.shape.tokens as f64,
        "operations": profile.cost.operations(),
        "operations_quantised": profile.cost.quantised,
        "bytes": profile.cost.bytes,
        "gflops": rates.operations,
        "gbs": rates.bytes,
        "bound": rates.peak.map(|peak| peak.0),
        "of_peak": rates.peak.map(|peak| peak.1),
    })
}
