//! A server with the small model and a template of ours, asked without a network.
#![allow(dead_code, reason = "each test file uses a part of this")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::Request;
use engine::{Engine, Options, Scheduler, SchedulerOptions, SessionOptions, Sessions};
use futures_util::future::join_all;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use model::{GRID, KvType, Limits, MappedExperts, Model};
use serde_json::{Value as Json, json};
use server::{Access, Config, Served, Service, router};
use text::{ChatTemplate, Tokenizer};

/// Context of a session.
pub const CONTEXT: usize = 4096;
/// Requests that run at once.
const PARALLEL: usize = 4;

/// A path relative to the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// One of the templates the text crate is tested with.
pub fn template(name: &str) -> String {
    std::fs::read_to_string(repository("crates/text/tests/data/templates").join(name)).unwrap()
}

/// A server.
pub struct Server(TowerToHyperService<Router>);

impl Server {
    /// The small model behind the whole router.
    pub fn new(template: &str) -> Server {
        let model = Arc::new(Model::open(&repository("models/pocket.gguf")).unwrap());
        let tokenizer = Arc::new(Tokenizer::new(model::vocabulary(model.gguf.metadata()).unwrap()).unwrap());
        let compiled = ChatTemplate::new(template, &tokenizer).unwrap();
        let kept = SessionOptions { budget: 64 << 20, spacing: 1024, kv: KvType::F32 };
        let positions = PARALLEL * (CONTEXT + 1024) + Sessions::positions(&model.spec, &kept);
        let limits = Limits { pass_rows: 512 + GRID, positions, kv: KvType::F32 };
        let weights = model.load(&mut |_, _| ()).unwrap();
        let backend = cpu::Cpu::new(model.clone(), weights, limits, cpu::Options::default()).unwrap();
        let options = Options { chunk: 512, context: CONTEXT };
        let experts = Box::new(MappedExperts::new(&model));
        let engine = Engine::new(model.clone(), Box::new(backend), experts, options);
        let sessions = Sessions::new(&engine, kept);
        let options = SchedulerOptions { parallel: PARALLEL, queue: 64, slice: Duration::from_millis(50) };
        let scheduler = Scheduler::new(engine, sessions, tokenizer.clone(), options);
        let served = Served {
            name: "pocket".into(),
            tokenizer,
            template: Some((template.to_owned(), compiled)),
            context: CONTEXT,
            trained_context: 65536,
            parallel: PARALLEL,
            since: 0,
        };
        let (service, _) = Service::start(scheduler, served, Config::default()).unwrap();
        Server(TowerToHyperService::new(router(service, Access::default())))
    }

    async fn send(&self, path: &str, body: &Json) -> (u16, String) {
        let request = Request::post(path).header("content-type", "application/json");
        let response = self.0.call(request.body(Body::from(body.to_string())).unwrap()).await.unwrap();
        let status = response.status().as_u16();
        let bytes = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, String::from_utf8(bytes.to_vec()).unwrap())
    }

    /// Status and JSON of an answer.
    pub async fn post(&self, path: &str, body: &Json) -> (u16, Json) {
        let (status, text) = self.send(path, body).await;
        (status, serde_json::from_str(&text).unwrap())
    }

    /// The answer to a conversation that is taken.
    pub async fn chat(&self, body: &Json) -> Json {
        let (status, answer) = self.post("/v1/chat/completions", body).await;
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// The answers to several conversations, asked together.
    pub async fn chats(&self, bodies: &[Json]) -> Vec<Json> {
        join_all(bodies.iter().map(|body| self.chat(body))).await
    }

    /// The refusal of a conversation: the field at fault and the message.
    pub async fn refused(&self, body: &Json) -> (String, String) {
        let (status, answer) = self.post("/v1/chat/completions", body).await;
        assert_eq!(status, 400, "{answer}");
        let text = |key: &str| answer["error"][key].as_str().unwrap_or_default().to_owned();
        (text("param"), text("message"))
    }

    /// The parts of a streamed answer.
    pub async fn stream(&self, path: &str, body: &Json) -> Vec<Json> {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let (status, text) = self.send(path, &body).await;
        assert_eq!(status, 200, "{text}");
        let mut frames: Vec<&str> =
            text.split("\n\n").filter(|f| !f.is_empty() && !f.starts_with(':')).collect();
        assert_eq!(frames.pop(), Some("data: [DONE]"), "{text}");
        frames
            .iter()
            .map(|frame| serde_json::from_str(frame.strip_prefix("data: ").unwrap()).unwrap())
            .collect()
    }
}

/// The message that the parts of a stream add up to, with the reason of its end, as clients put it together.
pub fn put_together(chunks: &[Json]) -> (Json, String) {
    let (mut content, mut reasoning, mut reason) = (String::new(), String::new(), String::new());
    let mut calls: Vec<Json> = Vec::new();
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)) {
        let delta = &choice["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
        reason += choice["finish_reason"].as_str().unwrap_or_default();
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = part["index"].as_u64().unwrap() as usize;
            let arguments = part["function"]["arguments"].as_str().unwrap_or_default();
            if index == calls.len() {
                assert!(part["id"].is_string() && part["type"] == "function", "{part}");
                calls.push(json!({ "name": part["function"]["name"], "arguments": "" }));
            } else {
                assert_eq!(index + 1, calls.len(), "parts of a call come in a row");
                assert!(part.get("id").is_none() && part["function"].get("name").is_none(), "{part}");
            }
            let whole = calls[index]["arguments"].as_str().unwrap().to_owned() + arguments;
            calls[index]["arguments"] = json!(whole);
        }
    }
    (json!({ "content": content, "reasoning": reasoning, "calls": calls }), reason)
}
