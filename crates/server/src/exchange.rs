//! One request and its answers on the wire: the shape of objects and of the stream.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use engine::{Finish, Report};
use serde_json::{Map, Value as Json, json};

/// Which endpoint answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Text,
}

/// What all parts of an answer have in common.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    pub(crate) kind: Kind,
    id: String,
    created: u64,
    model: String,
}

impl Exchange {
    pub(crate) fn new(kind: Kind, model: &str) -> Exchange {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:x}{:04x}", now.as_micros(), COUNT.fetch_add(1, Ordering::Relaxed));
        Exchange { kind, id, created: now.as_secs(), model: model.to_owned() }
    }

    /// A short name for the log.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    fn object(&self, name: &str, choices: Vec<Json>) -> Json {
        json!({
            "id": self.id, "object": name, "created": self.created, "model": self.model,
            "system_fingerprint": concat!("redlite-", env!("CARGO_PKG_VERSION")), "choices": choices,
        })
    }

    /// The whole answer.
    pub(crate) fn whole(&self, choices: Vec<Json>) -> Json {
        self.object(if self.kind == Kind::Chat { "chat.completion" } else { "text_completion" }, choices)
    }

    /// A part of a stream.
    pub(crate) fn chunk(&self, choices: Vec<Json>) -> Json {
        self.object(
            if self.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" },
            choices,
        )
    }
}

/// Tokens of a request.
pub(crate) fn usage(prompt: usize, reports: &[Report]) -> Json {
    let written: usize = reports.iter().map(|report| report.written).sum();
    let cached = reports.first().map_or(0, |report| report.reuse.reused);
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": { "cached_tokens": cached },
    })
}

/// Where the time went, as llama.cpp names it.
pub(crate) fn timings(report: &Report) -> Json {
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let rate = |count: usize, time: Duration| count as f64 / time.as_secs_f64().max(1e-9);
    json!({
        "cache_n": report.reuse.reused,
        "prompt_n": report.reuse.read,
        "prompt_ms": milliseconds(report.reading),
        "prompt_per_second": rate(report.reuse.read, report.reading),
        "predicted_n": report.written,
        "predicted_ms": milliseconds(report.writing),
        "predicted_per_second": rate(report.written, report.writing),
    })
}

/// Why an answer ended, in the words of the dialect.
pub(crate) fn finish_reason(finish: Finish, calls: usize) -> &'static str {
    match finish {
        Finish::Stop | Finish::StopText(_) if calls > 0 => "tool_calls",
        Finish::Stop | Finish::StopText(_) => "stop",
        Finish::Length | Finish::Context => "length",
    }
}

/// A tool call that begins, with the id clients refer to it by: the call of this number in the choice of that.
pub(crate) fn call(exchange: &Exchange, (choice, index): (usize, usize), name: &str) -> Map<String, Json> {
    let tail = exchange.id.rsplit('-').next().unwrap_or_default();
    Map::from_iter([
        ("id".to_owned(), json!(format!("call_{tail}_{choice}_{index}"))),
        ("type".to_owned(), json!("function")),
        ("function".to_owned(), json!({ "name": name, "arguments": "" })),
    ])
}
