//! Traces of a run for Perfetto and chrome://tracing: a lane for computation, one for its waits, one for copies to a
//! GPU, one for each reader.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use experts::Monitor;
use model::Step;
use serde_json::{Value, json};

use crate::failure::Failure;

/// A step of a pass: experts include waiting for their bytes.
#[derive(Debug)]
pub struct Timed {
    /// The step.
    pub step: Step,
    /// When it ended.
    pub end: Instant,
    /// How long its calls took.
    pub elapsed: Duration,
}

/// Lanes before those of the readers.
const COMPUTE: usize = 0;
const WAIT: usize = 1;
const COPIES: usize = 2;
const READERS: usize = 3;

/// Writes the trace of a run.
pub fn write(path: &Path, steps: &[Timed], monitor: Option<&Monitor>) -> Result<(), Failure> {
    let fail = |source| Failure::File { path: path.to_path_buf(), source };
    let mut out = BufWriter::new(File::create(path).map_err(fail)?);
    serde_json::to_writer(&mut out, &events(steps, monitor)).map_err(|error| fail(error.into()))?;
    out.flush().map_err(fail)
}

/// Complete events ("X") in microseconds since the first one, and names of lanes.
fn events(steps: &[Timed], monitor: Option<&Monitor>) -> Value {
    let (spans, waits) = monitor.map(Monitor::spans).unwrap_or_default();
    let starts = steps.iter().filter_map(|timed| timed.end.checked_sub(timed.elapsed));
    let first = starts.chain(spans.iter().map(|span| span.start)).min();
    let Some(first) = first else { return json!([]) };
    let event = |lane: usize, name: String, start: Instant, end: Instant, args: Value| {
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        json!({
            "ph": "X", "pid": 1, "tid": lane, "name": name, "args": args,
            "ts": micros(start.saturating_duration_since(first)),
            "dur": micros(end.saturating_duration_since(start)),
        })
    };
    let copies = monitor.map(Monitor::copy_spans).unwrap_or_default();
    let mut events = vec![lane(COMPUTE, "compute".to_string()), lane(WAIT, "wait for experts".to_string())];
    let readers = spans.iter().map(|span| span.reader + 1).max().unwrap_or(0);
    events.extend((0..readers).map(|reader| lane(READERS + reader, format!("reader {reader}"))));
    events.extend(steps.iter().map(|Timed { step, end, elapsed }| {
        let start = end.checked_sub(*elapsed).unwrap_or(first);
        let args = json!({ "layer": step.layer, "rows": [step.rows.start, step.rows.end] });
        event(COMPUTE, step.stage.name().to_string(), start, *end, args)
    }));
    events.extend(
        waits.iter().map(|wait| {
            event(WAIT, "wait".to_string(), wait.start, wait.end, json!({ "layer": wait.layer }))
        }),
    );
    if !copies.is_empty() {
        events.push(lane(COPIES, "copies to the GPU".to_string()));
    }
    events.extend(
        copies.iter().map(|copy| {
            event(COPIES, "copy".to_string(), copy.start, copy.end, json!({ "bytes": copy.bytes }))
        }),
    );
    events.extend(spans.iter().map(|span| {
        let args =
            json!({ "experts": [span.expert, span.expert as usize + span.count], "bytes": span.bytes });
        let name = format!("{} layer {}", span.why, span.layer);
        event(READERS + span.reader, name, span.start, span.end, args)
    }));
    events.into()
}

fn lane(number: usize, name: String) -> Value {
    json!({ "ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": { "name": name } })
}
