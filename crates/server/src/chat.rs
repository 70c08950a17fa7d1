//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use serde_json::Value as Json;
use text::AnswerParser;

use crate::answer::{Answers, Wish};
use crate::error::ApiError;
use crate::exchange::{Exchange, Kind};
use crate::fields::Fields;
use crate::prompt::{Prompt, prompt};
use crate::service::Service;
use crate::structure::{Opening, Tools, constraint};

/// Most alternatives to a token.
const TOP: i64 = 20;

/// Answers a conversation.
pub(crate) async fn chat(service: Arc<Service>, body: Json) -> Result<Response, ApiError> {
    // Rendering and tokenizing a long conversation takes a while: not on the threads that serve connections.
    let worker = service.clone();
    let prepared = tokio::task::spawn_blocking(move || prepare(&worker, &body)).await;
    let Prepared { prompts, wish, stream } = prepared.map_err(|_| ApiError::stopped())??;
    let running = service.submit(prompts).await?;
    let answers = Answers::new(service, running, wish);
    if stream { Ok(answers.stream()) } else { Ok(axum::Json(answers.whole().await?).into_response()) }
}

/// A request, understood.
pub(crate) struct Prepared {
    pub(crate) prompts: Vec<(Arc<[u32]>, engine::GenerationOptions)>,
    pub(crate) wish: Wish,
    pub(crate) stream: bool,
}

fn prepare(service: &Service, body: &Json) -> Result<Prepared, ApiError> {
    let served = &service.served;
    let fields = Fields::of(body)?;
    let tools = Tools::of(&fields)?;
    let declared = tools.declared.as_ref();
    let Prompt { tokens, opening } = prompt(served, &fields, declared)?;
    let room = room(tokens.len(), served.context)?;
    let mut options = fields.generation(room)?;
    if fields.bool("logprobs")? {
        let top = fields.integer("top_logprobs")?.unwrap_or(0);
        if !(0..=TOP).contains(&top) {
            return Err(ApiError::field(
                "top_logprobs",
                format!("top_logprobs is {top}; expected 0 to {TOP}"),
            ));
        }
        options.logprobs = Some(top as usize);
    }
    options.constraint = constraint(service, &fields, &tools, opening)?;
    let answers = fields.answers()?;
    let format = declared.and(served.calls());
    let parser = AnswerParser::new(format, declared, opening == Opening::Thinking);
    let stream = fields.bool("stream")?;
    let wish = Wish {
        exchange: Exchange::new(Kind::Chat, &served.name),
        prompt: tokens.len(),
        parsers: vec![Some(parser); answers],
        echo: vec![String::new(); answers],
        usage: wants_usage(&fields)?,
        progress: fields.bool("return_progress")?,
    };
    Ok(Prepared { prompts: repeat(tokens.into(), &options, answers), wish, stream })
}

/// A prompt for each of the wanted answers, each with a seed of its own.
pub(crate) fn repeat(
    tokens: Arc<[u32]>,
    options: &engine::GenerationOptions,
    answers: usize,
) -> Vec<(Arc<[u32]>, engine::GenerationOptions)> {
    let one = |number: u64| {
        let mut options = options.clone();
        options.sampling.seed = options.sampling.seed.wrapping_add(number);
        (tokens.clone(), options)
    };
    (0..answers as u64).map(one).collect()
}

/// What the context has left behind a prompt.
pub(crate) fn room(prompt: usize, context: usize) -> Result<usize, ApiError> {
    match context.checked_sub(prompt) {
        // A prompt that fills the context leaves no room for an answer.
        None | Some(0) => Err(ApiError::overflow(prompt, context)),
        Some(room) => Ok(room),
    }
}

/// Whether a last part of the stream says how many tokens it took.
pub(crate) fn wants_usage(fields: &Fields) -> Result<bool, ApiError> {
    match fields.get("stream_options") {
        None => Ok(false),
        Some(Json::Object(options)) => Fields(options).bool("include_usage"),
        Some(_) => Err(ApiError::field("stream_options", "stream_options is not an object")),
    }
}
