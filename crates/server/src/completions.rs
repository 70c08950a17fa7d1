//! `/v1/completions`: raw prompts, in which control tokens count, and filling in the middle.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use serde_json::Value as Json;
use text::Tokenizer;

use crate::answer::{Answers, Wish, spelled};
use crate::chat::{Prepared, repeat, room, wants_usage};
use crate::error::ApiError;
use crate::exchange::{Exchange, Kind};
use crate::fields::Fields;
use crate::service::Service;
use crate::structure::{Opening, Tools, constraint};

/// Most prompts of a request.
const PROMPTS: usize = 16;
/// Most alternatives to a token.
const TOP: i64 = 20;

/// Continues prompts.
pub(crate) async fn complete(service: Arc<Service>, body: Json) -> Result<Response, ApiError> {
    let worker = service.clone();
    let prepared = tokio::task::spawn_blocking(move || prepare(&worker, &body)).await;
    let Prepared { prompts, wish, stream } = prepared.map_err(|_| ApiError::stopped())??;
    let running = service.submit(prompts).await?;
    let answers = Answers::new(service, running, wish);
    if stream { Ok(answers.stream()) } else { Ok(axum::Json(answers.whole().await?).into_response()) }
}

fn prepare(service: &Service, body: &Json) -> Result<Prepared, ApiError> {
    let served = &service.served;
    let fields = Fields::of(body)?;
    let (answers, echo) = (fields.answers()?, fields.bool("echo")?);
    let logprobs = fields.integer("logprobs")?;
    if logprobs.is_some_and(|top| !(0..=TOP).contains(&top)) {
        return Err(ApiError::field("logprobs", format!("logprobs is a number from 0 to {TOP}")));
    }
    let constraint = constraint(service, &fields, &Tools::NONE, Opening::Plain)?;
    let (mut prompts, mut echoes, mut total) = (Vec::new(), Vec::new(), 0);
    for prompt in tokens(&served.tokenizer, &fields)? {
        let mut options = fields.generation(room(prompt.len(), served.context)?)?;
        options.logprobs = logprobs.map(|top| top as usize);
        options.constraint = constraint.clone();
        // The default of this endpoint everywhere.
        if fields.get("max_tokens").is_none() && fields.get("max_completion_tokens").is_none() {
            options.max_tokens = options.max_tokens.min(16);
        }
        total += prompt.len();
        let before = if echo { spelled(&served.tokenizer, &prompt) } else { String::new() };
        echoes.extend(vec![before; answers]);
        prompts.extend(repeat(prompt.into(), &options, answers));
    }
    let wish = Wish {
        exchange: Exchange::new(Kind::Text, &served.name),
        prompt: total,
        parsers: vec![None; prompts.len()],
        echo: echoes,
        usage: wants_usage(&fields)?,
        progress: fields.bool("return_progress")?,
    };
    Ok(Prepared { prompts, wish, stream: fields.bool("stream")? })
}

/// The prompts of a request: a text, a list of texts, a list of ids, or a list of such lists.
pub(crate) fn tokens(tokenizer: &Tokenizer, fields: &Fields) -> Result<Vec<Vec<u32>>, ApiError> {
    let bad = || {
        ApiError::field(
            "prompt",
            "prompt is a text, a list of texts, a list of token ids, or a list of such lists",
        )
    };
    let prompt = fields.get("prompt").ok_or_else(bad)?;
    let one = |prompt: &Json| match prompt {
        Json::String(text) => Ok(raw(tokenizer, text)),
        Json::Array(ids) => ids.iter().map(|id| known_id(tokenizer, id)).collect(),
        _ => Err(bad()),
    };
    let prompts: Vec<Vec<u32>> = match prompt {
        Json::Array(list) if list.iter().any(|item| !item.is_number()) => {
            list.iter().map(one).collect::<Result<_, _>>()?
        }
        prompt => vec![one(prompt)?],
    };
    if prompts.is_empty() || prompts.len() > PROMPTS || prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::field(
            "prompt",
            format!("prompt wants 1 to {PROMPTS} texts, none of them empty"),
        ));
    }
    match fields.get("suffix").and_then(Json::as_str).filter(|suffix| !suffix.is_empty()) {
        None => Ok(prompts),
        Some(suffix) => prompts.into_iter().map(|prefix| middle(tokenizer, prefix, suffix)).collect(),
    }
}

/// A prompt that asks for the text between a prefix and a suffix.
fn middle(tokenizer: &Tokenizer, prefix: Vec<u32>, suffix: &str) -> Result<Vec<u32>, ApiError> {
    let marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"].map(|text| tokenizer.special(text));
    let [Some(before), Some(after), Some(middle)] = marks else {
        return Err(ApiError::field("suffix", "suffix: the model has no tokens for filling in the middle"));
    };
    let mut tokens = vec![before];
    tokens.extend(prefix);
    tokens.push(after);
    tokens.extend(tokenizer.encode_text(suffix));
    tokens.push(middle);
    Ok(tokens)
}

fn raw(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let tokens = tokenizer.encode_raw_with_specials(text);
    tokenizer.bos_of_raw_prompt().into_iter().chain(tokens).collect()
}

/// An id of the vocabulary.
fn known_id(tokenizer: &Tokenizer, id: &Json) -> Result<u32, ApiError> {
    let known = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|&id| tokenizer.kind(id).is_some());
    known.ok_or_else(|| ApiError::field("prompt", format!("prompt: {id} is not a token id of this model")))
}
