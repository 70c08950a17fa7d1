//! From the engine's events to an answer, whole or streamed.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::Response;
use engine::{Event, Finish, Report, Token};
use serde_json::{Value as Json, json};
use text::{AnswerParser, Decoder, Piece, Tokenizer};
use tokio::time::Instant;

use crate::error::ApiError;
use crate::exchange::{Exchange, Kind, call, finish_reason, timings, usage};
use crate::service::{Running, Service};

/// A client hears something at least this often.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// What a client wants of an answer.
pub(crate) struct Wish {
    pub(crate) exchange: Exchange,
    /// Tokens of the prompt, of all prompts.
    pub(crate) prompt: usize,
    /// One for each answer: takes it apart, or leaves it as it is.
    pub(crate) parsers: Vec<Option<AnswerParser>>,
    /// Text before each answer.
    pub(crate) echo: Vec<String>,
    /// A last part of the stream says how many tokens it took.
    pub(crate) usage: bool,
    /// Parts of the stream say how much of the prompt has been read.
    pub(crate) progress: bool,
}

/// One answer in the making.
struct Choice {
    parser: Option<AnswerParser>,
    reasoning: String,
    content: String,
    calls: Vec<Json>,
    /// Probabilities of tokens that have come, and of those not yet given out.
    logprobs: Vec<Json>,
    wants_logprobs: bool,
    pending: usize,
    report: Option<Report>,
}

/// What a token or an end added to an answer.
#[derive(Default)]
struct Added {
    reasoning: String,
    content: String,
    /// Parts of calls as a stream has them: the first of a call with its id and name.
    calls: Vec<Json>,
}

impl Added {
    fn arguments(&mut self, index: usize, text: &str) {
        match self.calls.last_mut().filter(|part| part["index"] == index) {
            Some(part) => append(&mut part["function"]["arguments"], text),
            None => self.calls.push(json!({ "index": index, "function": { "arguments": text } })),
        }
    }
}

fn append(json: &mut Json, text: &str) {
    if let Json::String(whole) = json {
        whole.push_str(text);
    }
}

impl Choice {
    fn new(parser: Option<AnswerParser>, echo: String) -> Choice {
        Choice {
            parser,
            reasoning: String::new(),
            content: echo,
            calls: Vec::new(),
            logprobs: Vec::new(),
            wants_logprobs: false,
            pending: 0,
            report: None,
        }
    }

    fn token(&mut self, tokenizer: &Tokenizer, exchange: &Exchange, index: usize, token: &Token) -> Added {
        if let Some(logprobs) = &token.logprobs {
            self.wants_logprobs = true;
            // The token that ends an answer is no part of it.
            if token.finish != Some(Finish::Stop) {
                self.logprobs.push(logprob(tokenizer, token.id, logprobs));
            }
        }
        let mut pieces = match &mut self.parser {
            Some(parser) => parser.push(&token.text),
            None => vec![Piece::Content(token.text.clone())],
        };
        if token.finish.is_some()
            && let Some(parser) = &mut self.parser
        {
            pieces.extend(parser.finish());
        }
        let mut added = Added::default();
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => added.reasoning += &text,
                Piece::Content(text) => added.content += &text,
                Piece::Call(name) => {
                    let number = self.calls.len();
                    let call = call(exchange, (index, number), &name);
                    let mut part = call.clone();
                    part.insert("index".to_owned(), json!(number));
                    added.calls.push(part.into());
                    self.calls.push(call.into());
                }
                Piece::Arguments(text) => {
                    if let Some(call) = self.calls.last_mut() {
                        append(&mut call["function"]["arguments"], &text);
                        added.arguments(self.calls.len() - 1, &text);
                    }
                }
            }
        }
        self.reasoning += &added.reasoning;
        self.content += &added.content;
        added
    }

    fn reason(&self) -> Option<&'static str> {
        self.report.map(|report| finish_reason(report.finish, self.calls.len()))
    }

    /// Probabilities from `from` on, as the dialect has them.
    fn logprobs(&self, kind: Kind, from: usize) -> Json {
        let entries = &self.logprobs[from..];
        if !self.wants_logprobs {
            return Json::Null;
        }
        if kind == Kind::Chat {
            return json!({ "content": entries });
        }
        let each = |key: &str| entries.iter().map(|entry| entry[key].clone()).collect::<Vec<_>>();
        let top = |entry: &Json| -> Json {
            let top = entry["top_logprobs"].as_array().into_iter().flatten();
            top.map(|one| (one["token"].as_str().unwrap_or_default().to_owned(), one["logprob"].clone()))
                .collect::<serde_json::Map<_, _>>()
                .into()
        };
        let tops: Vec<Json> = entries.iter().map(top).collect();
        json!({ "tokens": each("token"), "token_logprobs": each("logprob"), "top_logprobs": tops })
    }

    /// The choice of a whole answer.
    fn whole(&self, kind: Kind, index: usize) -> Json {
        let (reason, logprobs) = (self.reason(), self.logprobs(kind, 0));
        if kind == Kind::Text {
            return json!({ "index": index, "text": self.content, "logprobs": logprobs, "finish_reason": reason });
        }
        let nothing = self.content.is_empty() && !self.calls.is_empty();
        let content = if nothing { Json::Null } else { json!(self.content) };
        let mut message = json!({ "role": "assistant", "content": content });
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = json!(self.reasoning);
        }
        if !self.calls.is_empty() {
            message["tool_calls"] = json!(self.calls);
        }
        json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": reason })
    }
}

/// A token's probability with its text and bytes.
fn logprob(tokenizer: &Tokenizer, id: u32, logprobs: &engine::Logprobs) -> Json {
    let entry = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        json!({ "token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes })
    };
    let mut value = entry(id, logprobs.chosen);
    let top: Vec<Json> = logprobs.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
    value["top_logprobs"] = top.into();
    value
}

/// Answers in the making.
pub(crate) struct Answers {
    service: Arc<Service>,
    running: Running,
    exchange: Exchange,
    prompt: usize,
    choices: Vec<Choice>,
    wants_usage: bool,
    wants_progress: bool,
    /// Parts of the stream that wait to be sent.
    frames: VecDeque<Bytes>,
    started: Instant,
    /// Tokens of the first prompt that were there already.
    cached: usize,
    /// When a byte was sent last.
    sent: Instant,
    done: bool,
}

impl Answers {
    pub(crate) fn new(service: Arc<Service>, running: Running, wish: Wish) -> Answers {
        let choices = wish.parsers.into_iter().zip(wish.echo).map(|(parser, echo)| Choice::new(parser, echo));
        Answers {
            service,
            running,
            prompt: wish.prompt,
            choices: choices.collect(),
            wants_usage: wish.usage,
            wants_progress: wish.progress,
            exchange: wish.exchange,
            frames: VecDeque::new(),
            started: Instant::now(),
            cached: 0,
            sent: Instant::now(),
            done: false,
        }
    }

    /// Waits for the whole answer.
    pub(crate) async fn whole(mut self) -> Result<Json, ApiError> {
        while !self.ended() {
            let (index, event) = self.running.events.recv().await.ok_or_else(ApiError::stopped)?;
            match event {
                Event::Token(token) => drop(self.token(index, &token)),
                Event::Finished(report) => self.finished(index, report),
                Event::Failed(error) => return Err(error.into()),
                Event::Started(reuse) => self.begun(index, reuse),
                Event::Progress { .. } => {}
            }
        }
        let kind = self.exchange.kind;
        let choices = self.choices.iter().enumerate().map(|(index, choice)| choice.whole(kind, index));
        let mut whole = self.exchange.whole(choices.collect());
        self.add_totals(&mut whole, true);
        Ok(whole)
    }

    /// Sends the answer as it comes: server-sent events.
    pub(crate) fn stream(mut self) -> Response {
        for index in 0..self.choices.len() {
            match self.exchange.kind {
                Kind::Chat => {
                    self.chunk(index, json!({ "role": "assistant", "content": "" }), Json::Null, None)
                }
                Kind::Text if !self.choices[index].content.is_empty() => {
                    let text = json!(self.choices[index].content);
                    self.chunk(index, text, Json::Null, None);
                }
                Kind::Text => {}
            }
        }
        let frames = futures_util::stream::unfold(self, |mut answers| async move {
            let frame = answers.next_frame().await?;
            Some((Ok::<Bytes, Infallible>(frame), answers))
        });
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-cache"),
            // Proxies must not wait for more.
            (header::HeaderName::from_static("x-accel-buffering"), "no"),
        ];
        let mut response = Response::new(Body::from_stream(frames));
        for (name, value) in headers {
            response.headers_mut().insert(name, header::HeaderValue::from_static(value));
        }
        response
    }

    async fn next_frame(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.frames.pop_front() {
                self.sent = Instant::now();
                return Some(frame);
            }
            if self.done {
                return None;
            }
            // By wall clock, however many events come that a client does not see.
            let silence = KEEP_ALIVE.saturating_sub(self.sent.elapsed());
            match tokio::time::timeout(silence, self.running.events.recv()).await {
                Err(_) => self.frames.push_back(Bytes::from_static(b": keep-alive\n\n")),
                Ok(None) => self.fail(&ApiError::stopped()),
                Ok(Some((index, event))) => self.event(index, event),
            }
        }
    }

    fn event(&mut self, index: usize, event: Event) {
        match event {
            Event::Started(reuse) => self.begun(index, reuse),
            Event::Progress { done, total } if self.wants_progress && index == 0 => {
                self.progress(done, total)
            }
            Event::Progress { .. } => {}
            Event::Token(token) => {
                let added = self.token(index, &token);
                self.send_added(index, added);
            }
            Event::Finished(report) => {
                self.finished(index, report);
                let reason = self.choices[index].reason();
                let logprobs = self.take_logprobs(index);
                let empty = if self.exchange.kind == Kind::Chat { json!({}) } else { json!("") };
                self.chunk(index, empty, logprobs, reason);
                if self.ended() {
                    self.end();
                }
            }
            Event::Failed(error) => self.fail(&error.into()),
        }
    }

    fn token(&mut self, index: usize, token: &Token) -> Added {
        let service = self.service.clone();
        self.choices[index].token(&service.served.tokenizer, &self.exchange, index, token)
    }

    fn send_added(&mut self, index: usize, added: Added) {
        if self.exchange.kind == Kind::Text {
            if !added.content.is_empty() {
                let logprobs = self.take_logprobs(index);
                self.chunk(index, json!(added.content), logprobs, None);
            }
            return;
        }
        if !added.reasoning.is_empty() {
            let logprobs = self.take_logprobs(index);
            self.chunk(index, json!({ "reasoning_content": added.reasoning }), logprobs, None);
        }
        if !added.content.is_empty() {
            let logprobs = self.take_logprobs(index);
            self.chunk(index, json!({ "content": added.content }), logprobs, None);
        }
        for part in added.calls {
            self.chunk(index, json!({ "tool_calls": [part] }), Json::Null, None);
        }
    }

    /// Probabilities not given out yet.
    fn take_logprobs(&mut self, index: usize) -> Json {
        let choice = &mut self.choices[index];
        let from = std::mem::replace(&mut choice.pending, choice.logprobs.len());
        if from == choice.logprobs.len() { Json::Null } else { choice.logprobs(self.exchange.kind, from) }
    }

    fn chunk(&mut self, index: usize, delta: Json, logprobs: Json, reason: Option<&str>) {
        let key = if self.exchange.kind == Kind::Chat { "delta" } else { "text" };
        let choice = json!({ "index": index, key: delta, "logprobs": logprobs, "finish_reason": reason });
        let mut chunk = self.exchange.chunk(vec![choice]);
        if reason.is_some() && self.ended() {
            self.add_totals(&mut chunk, false);
        }
        self.send(&chunk);
    }

    /// In the shape of llama.cpp.
    fn progress(&mut self, done: usize, total: usize) {
        let mut chunk = self.exchange.chunk(vec![match self.exchange.kind {
            Kind::Chat => json!({ "index": 0, "delta": {}, "finish_reason": null }),
            Kind::Text => json!({ "index": 0, "text": "", "finish_reason": null }),
        }]);
        chunk["prompt_progress"] = json!({
            "total": total, "cache": self.cached, "processed": done,
            "time_ms": self.started.elapsed().as_millis() as u64,
        });
        self.send(&chunk);
    }

    fn end(&mut self) {
        if self.wants_usage {
            let mut chunk = self.exchange.chunk(Vec::new());
            self.add_totals(&mut chunk, true);
            self.send(&chunk);
        }
        self.frames.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.done = true;
    }

    fn fail(&mut self, error: &ApiError) {
        self.send(&error.json());
        self.done = true;
    }

    fn send(&mut self, value: &Json) {
        self.frames.push_back(Bytes::from(format!("data: {value}\n\n")));
    }

    fn ended(&self) -> bool {
        self.choices.iter().all(|choice| choice.report.is_some())
    }

    fn reports(&self) -> Vec<Report> {
        self.choices.iter().filter_map(|choice| choice.report).collect()
    }

    fn add_totals(&self, object: &mut Json, with_usage: bool) {
        let reports = self.reports();
        if with_usage {
            object["usage"] = usage(self.prompt, &reports);
        }
        if let Some(first) = reports.first() {
            object["timings"] = timings(first);
        }
    }

    fn begun(&mut self, index: usize, reuse: engine::Reuse) {
        if index == 0 {
            self.cached = reuse.reused;
        }
        self.service.log(format_args!("{}: {reuse}", self.exchange.id()));
    }

    fn finished(&mut self, index: usize, report: Report) {
        self.choices[index].report = Some(report);
        let (read, wrote) = (report.reading.as_secs_f64(), report.writing.as_secs_f64());
        self.service.log(format_args!(
            "{}: waited {:.2} s, read {} tokens in {read:.2} s, wrote {} in {wrote:.2} s ({})",
            self.exchange.id(),
            report.waited.as_secs_f64(),
            report.reuse.read,
            report.written,
            self.choices[index].reason().unwrap_or_default(),
        ));
    }
}

/// The text of tokens, control tokens as they are written.
pub(crate) fn spelled(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut decoder = Decoder::with_control_tokens();
    let mut text: String = ids.iter().map(|&id| decoder.push(tokenizer, id)).collect();
    text += &decoder.finish();
    text
}
