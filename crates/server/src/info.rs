//! What the server says about itself: models, health, properties, slots, metrics; and tokens of a text.

use std::fmt::Write;

use engine::{Phase, SchedulerStats};
use serde_json::{Value as Json, json};

use crate::answer::spelled;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::service::Served;

/// A model as lists have it, with the limits clients look for.
pub(crate) fn model(served: &Served) -> Json {
    let mut capabilities = vec!["completion"];
    capabilities.extend(served.template.as_ref().map(|_| "chat"));
    capabilities.extend(served.calls().map(|_| "tools"));
    json!({
        "id": served.name, "object": "model", "created": served.since, "owned_by": "redlite",
        "context_length": served.context, "max_model_len": served.context, "capabilities": capabilities,
        "meta": {
            "n_ctx": served.context, "n_ctx_train": served.trained_context,
            "n_vocab": served.tokenizer.len(),
        },
    })
}

/// The list of models: the one that is served.
pub(crate) fn models(served: &Served) -> Json {
    json!({ "object": "list", "data": [model(served)] })
}

/// Settings as llama.cpp's clients look for them.
pub(crate) fn props(served: &Served) -> Json {
    let sampling = engine::Sampling::default();
    json!({
        "model_alias": served.name,
        "total_slots": served.parallel,
        "chat_template": served.template.as_ref().map(|(source, _)| source.as_str()).unwrap_or_default(),
        "build_info": concat!("redlite ", env!("CARGO_PKG_VERSION")),
        "default_generation_settings": {
            "n_ctx": served.context,
            "params": {
                "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
                "min_p": sampling.min_p,
            },
        },
        "modalities": { "vision": false, "audio": false },
    })
}

/// One entry for each request that may run at once.
pub(crate) fn slots(served: &Served, stats: &SchedulerStats) -> Json {
    let slot = |id: usize| {
        let (state, done, total, written) = match stats.running.get(id) {
            None => ("idle", 0, 0, 0),
            Some(&Phase::Reading(done, total)) => ("reading", done, total, 0),
            Some(&Phase::Writing(written)) => ("writing", 0, 0, written),
        };
        json!({
            "id": id, "n_ctx": served.context, "is_processing": state != "idle", "state": state,
            "prompt_tokens_done": done, "prompt_tokens": total, "tokens_written": written,
        })
    };
    (0..served.parallel.max(stats.running.len())).map(slot).collect()
}

/// Counters in the text format of Prometheus.
pub(crate) fn metrics(stats: &SchedulerStats) -> String {
    let mut out = String::new();
    let mut metric = |name: &str, kind: &str, help: &str, values: &[(&str, u64)]| {
        let _ = writeln!(out, "# HELP redlite_{name} {help}\n# TYPE redlite_{name} {kind}");
        for (labels, value) in values {
            let _ = writeln!(out, "redlite_{name}{labels} {value}");
        }
    };
    let reading = stats.running.iter().filter(|phase| matches!(phase, Phase::Reading(..))).count() as u64;
    let writing = stats.running.len() as u64 - reading;
    let prompt = [("{source=\"reused\"}", stats.reused), ("{source=\"read\"}", stats.read)];
    metric("prompt_tokens_total", "counter", "Prompt tokens, taken from checkpoints or read.", &prompt);
    metric("written_tokens_total", "counter", "Tokens of answers.", &[("", stats.written)]);
    let ends = [
        ("{end=\"finished\"}", stats.finished),
        ("{end=\"cancelled\"}", stats.cancelled),
        ("{end=\"failed\"}", stats.failed),
    ];
    metric("requests_total", "counter", "Requests that have ended.", &ends);
    let now = [
        ("{phase=\"waiting\"}", stats.waiting as u64),
        ("{phase=\"reading\"}", reading),
        ("{phase=\"writing\"}", writing),
    ];
    metric("requests", "gauge", "Requests now.", &now);
    let sessions = &stats.sessions;
    metric("checkpoints", "gauge", "Checkpoints in memory.", &[("", sessions.checkpoints as u64)]);
    metric("checkpoint_bytes", "gauge", "Bytes of checkpoints in memory.", &[("", sessions.bytes)]);
    metric(
        "checkpoints_evicted_total",
        "counter",
        "Checkpoints given up for memory.",
        &[("", sessions.evicted)],
    );
    out
}

/// Tokens of a text.
pub(crate) fn tokenize(served: &Served, body: &Json) -> Result<Json, ApiError> {
    let fields = Fields::of(body)?;
    let text = fields.get("content").and_then(Json::as_str);
    let text = text.ok_or_else(|| ApiError::field("content", "content is not a text"))?;
    let special = fields.get("parse_special").is_none() || fields.bool("parse_special")?;
    let tokenizer = &served.tokenizer;
    let mut tokens =
        if special { tokenizer.encode_raw_with_specials(text) } else { tokenizer.encode_text(text) };
    if fields.bool("add_special")?
        && let Some(bos) = tokenizer.bos_of_raw_prompt()
    {
        tokens.insert(0, bos);
    }
    if !fields.bool("with_pieces")? {
        return Ok(json!({ "tokens": tokens }));
    }
    let piece = |&id: &u32| json!({ "id": id, "piece": spelled(tokenizer, &[id]) });
    Ok(json!({ "tokens": tokens.iter().map(piece).collect::<Vec<_>>() }))
}

/// The text of tokens.
pub(crate) fn detokenize(served: &Served, body: &Json) -> Result<Json, ApiError> {
    let bad = || ApiError::field("tokens", "tokens is not a list of token ids");
    let ids = Fields::of(body)?.get("tokens").and_then(Json::as_array).ok_or_else(bad)?;
    let ids: Option<Vec<u32>> = ids.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect();
    Ok(json!({ "content": spelled(&served.tokenizer, &ids.ok_or_else(bad)?) }))
}
