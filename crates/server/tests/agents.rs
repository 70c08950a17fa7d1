//! What agents send, through the whole router to the small model: `data/agents` holds a request of each in the shape in
//! which it was seen, with texts of ours.

mod common;

use common::{Server, put_together, repository, template};
use serde_json::{Value as Json, json};

/// The recorded shapes: file name, template, path, request.
fn recorded() -> Vec<(String, String, String, Json)> {
    let folder = repository("crates/server/tests/data/agents");
    let mut all: Vec<_> = (std::fs::read_dir(folder).unwrap())
        .map(|entry| {
            let path = entry.unwrap().path();
            let shape: Json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            let text = |key: &str| shape[key].as_str().unwrap().to_owned();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            (name, text("template"), text("path"), shape["request"].clone())
        })
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// The same request with an answer of bounded length that does not depend on chance.
fn bounded(mut request: Json) -> Json {
    request["seed"] = json!(5);
    if request["max_tokens"] == -1 {
        request["stop"] = json!(["e", " ", "\n"]);
    } else {
        request["max_tokens"] = json!(12);
        request["max_completion_tokens"] = json!(12);
    }
    request
}

#[tokio::test]
async fn every_recorded_shape_is_answered_whole_and_streamed() {
    let recorded = recorded();
    let names: Vec<&str> = recorded.iter().map(|shape| shape.0.as_str()).collect();
    let expected =
        ["aider", "cline", "continue", "opencode", "opencode-title", "pi", "zed", "zed-prediction"];
    assert_eq!(names, expected);
    for file in ["tools_json.jinja", "tools_xml.jinja"] {
        let server = Server::new(&template(file));
        for (name, _, path, request) in recorded.iter().filter(|shape| shape.1 == file) {
            let mut request = bounded(request.clone());
            request.as_object_mut().unwrap().remove("stream");
            request.as_object_mut().unwrap().remove("stream_options");
            let (status, whole) = server.post(path, &request).await;
            assert_eq!(status, 200, "{name}: {whole}");
            request["stream_options"] = json!({"include_usage": true});
            let chunks = server.stream(path, &request).await;
            check(name, path == "/v1/chat/completions", &whole, &chunks);
        }
    }
}

/// The shapes of an answer, and that the stream adds up to the whole.
fn check(name: &str, chat: bool, whole: &Json, chunks: &[Json]) {
    let (kind, part) = if chat {
        ("chat.completion", "chat.completion.chunk")
    } else {
        ("text_completion", "text_completion")
    };
    assert_eq!((&whole["object"], &whole["model"]), (&json!(kind), &json!("pocket")), "{name}");
    assert!(chunks.iter().all(|chunk| chunk["object"] == part && chunk["id"] == chunks[0]["id"]), "{name}");
    let choice = &whole["choices"][0];
    assert!(["stop", "length", "tool_calls"].contains(&choice["finish_reason"].as_str().unwrap()), "{name}");
    if chat {
        let message = &choice["message"];
        assert_eq!(message["role"], "assistant", "{name}");
        let (streamed, reason) = put_together(chunks);
        assert_eq!(streamed["content"].as_str(), message["content"].as_str().or(Some("")), "{name}");
        assert_eq!(choice["finish_reason"], reason.as_str(), "{name}");
        let roles = chunks.iter().filter(|chunk| chunk["choices"][0]["delta"].get("role").is_some());
        assert_eq!(roles.count(), 1, "{name}: one role");
        assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant", "{name}");
    } else {
        let streamed: String =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
        assert_eq!(choice["text"], streamed.as_str(), "{name}");
    }
    let usages: Vec<&Json> =
        chunks.iter().filter_map(|chunk| chunk.get("usage").filter(|usage| !usage.is_null())).collect();
    assert_eq!(
        (usages.len(), &chunks.last().unwrap()["choices"]),
        (1, &json!([])),
        "{name}: usage once, at the end"
    );
    for usage in [usages[0], &whole["usage"]] {
        let count = |key: &str| usage[key].as_u64().unwrap();
        assert_eq!(count("total_tokens"), count("prompt_tokens") + count("completion_tokens"), "{name}");
        assert!(usage["prompt_tokens_details"]["cached_tokens"].is_u64(), "{name}");
    }
    // Checkpoints lie on a grid of 64.
    if chat && usages[0]["prompt_tokens"].as_u64() > Some(64) {
        let cached = &usages[0]["prompt_tokens_details"]["cached_tokens"];
        assert!(cached.as_u64() > Some(0), "{name}: read before");
    }
}

fn ask(fields: Json) -> Json {
    let mut body = json!({"messages": [{"role": "user", "content": "Write a Python function `is_sorted`."}],
        "temperature": 0, "max_tokens": 8});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

#[tokio::test]
async fn usage_comes_once_and_only_when_asked_for() {
    let server = Server::new(&template("chatml.jinja"));
    for (options, wanted) in [(Json::Null, 0), (json!({}), 0), (json!({"include_usage": true}), 1)] {
        let chunks = server.stream("/v1/chat/completions", &ask(json!({"stream_options": options}))).await;
        assert_eq!(chunks.iter().filter(|chunk| chunk.get("usage").is_some()).count(), wanted, "{options}");
    }
}

#[tokio::test]
async fn logprobs_are_the_same_streamed_and_whole_beside_tools_too() {
    let server = Server::new(&template("tools_json.jinja"));
    let tool = json!({"type": "function", "function": {"name": "now"}});
    for fields in [
        json!({}),
        json!({"tools": [tool]}),
        json!({"tools": [tool], "tool_choice": "required", "max_tokens": 60}),
    ] {
        let mut body = ask(json!({"logprobs": true, "top_logprobs": 3}));
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let whole = server.chat(&body).await;
        let entries = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
        let written = whole["usage"]["completion_tokens"].as_u64().unwrap() as usize;
        let ended = whole["choices"][0]["finish_reason"] != "length";
        assert_eq!(entries.len(), written - usize::from(ended), "one for each token but the last");
        let chunks = server.stream("/v1/chat/completions", &body).await;
        let streamed =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array());
        assert_eq!(streamed.flatten().cloned().collect::<Vec<_>>(), entries);
        for entry in &entries {
            let bytes: Vec<u8> = serde_json::from_value(entry["bytes"].clone()).unwrap();
            assert_eq!(entry["token"], String::from_utf8_lossy(&bytes).as_ref(), "text, not ids");
            assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 3);
            assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
        }
    }
}

#[tokio::test]
async fn without_a_choice_no_tool_is_told_of_and_no_call_is_parsed() {
    let server = Server::new(&template("tools_json.jinja"));
    let tools = json!([{"type": "function", "function": {"name": "now"}}]);
    let none = server.chat(&ask(json!({"tools": tools, "tool_choice": "none"}))).await;
    let without = server.chat(&ask(json!({}))).await;
    let auto = server.chat(&ask(json!({"tools": tools}))).await;
    let read = |answer: &Json| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(read(&none), read(&without));
    assert!(read(&auto) > read(&none) + 10);
    // An entry of a kind that this server does not have is skipped, not refused.
    let odd =
        server.chat(&ask(json!({"tools": [{"type": "web_search"}, {"type": "mcp", "name": "x"}]}))).await;
    assert_eq!(read(&odd), read(&without));
}

#[tokio::test]
async fn limits_and_answers_are_counted_as_clients_mean_them() {
    let server = Server::new(&template("chatml.jinja"));
    let written = |answer: &Json| answer["usage"]["completion_tokens"].as_u64().unwrap();
    assert_eq!(written(&server.chat(&ask(json!({"max_tokens": 3}))).await), 3);
    assert_eq!(
        written(&server.chat(&ask(json!({"max_completion_tokens": 2}))).await),
        2,
        "the newer name wins"
    );
    let endless = server.chat(&ask(json!({"max_tokens": -1, "stop": ["is_sorted("]}))).await;
    assert_eq!(endless["choices"][0]["finish_reason"], "stop");
    assert!(!endless["choices"][0]["message"]["content"].as_str().unwrap().contains("is_sorted("));
    let several = json!({"n": 3, "seed": 7, "temperature": 1.2, "max_tokens": 6});
    let several = server.chat(&ask(several)).await;
    let indexes: Vec<&Json> =
        several["choices"].as_array().unwrap().iter().map(|choice| &choice["index"]).collect();
    assert_eq!(indexes, [&json!(0), &json!(1), &json!(2)]);
    assert!(written(&several) <= 18);
    let text =
        json!({"prompt": ["import ", "def "], "n": 2, "max_tokens": 2, "echo": true, "temperature": 0});
    let (_, both) = server.post("/v1/completions", &text).await;
    let starts: Vec<&str> =
        both["choices"].as_array().unwrap().iter().map(|c| &c["text"].as_str().unwrap()[..4]).collect();
    assert_eq!(starts, ["impo", "impo", "def ", "def "]);
    let (_, short) =
        server.post("/v1/completions", &json!({"prompt": "import ", "temperature": 0, "logprobs": 2})).await;
    assert!(written(&short) <= 16, "the default of this endpoint everywhere");
    assert_eq!(short["choices"][0]["logprobs"]["top_logprobs"][0].as_object().unwrap().len(), 2);
    // Fields that nobody here knows, and some that change nothing.
    let ignored = json!({"store": false, "metadata": {"a": "b"}, "user": "me", "service_tier": "auto", "n": null,
        "cache_prompt": true, "prompt_cache_key": "k", "logit_bias": {}, "modalities": ["text"], "x": {"y": [1]}});
    server.chat(&ask(ignored)).await;
}

#[tokio::test]
async fn the_limit_that_is_told_is_the_one_that_holds() {
    let server = Server::new(&template("chatml.jinja"));
    let long = |words: usize| ask(json!({"messages": [{"role": "user", "content": "word ".repeat(words)}]}));
    let (status, refusal) = server.post("/v1/chat/completions", &long(5000)).await;
    let error = &refusal["error"];
    assert_eq!((status, &error["type"]), (400, &json!("exceed_context_size_error")), "{refusal}");
    assert!(error["message"].as_str().unwrap().contains("exceeds the available context size"));
    assert_eq!(error["n_ctx"], common::CONTEXT);
    assert!(error["n_prompt_tokens"].as_u64() > Some(5000));
    // An answer that reaches the end of the context ends with `length`.
    let tokens = error["n_prompt_tokens"].as_u64().unwrap() as usize;
    let mut body = long(5000 * (common::CONTEXT - 60) / tokens);
    body["max_tokens"] = json!(-1);
    body["ignore_eos"] = json!(true);
    let answer = server.chat(&body).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let total = answer["usage"]["total_tokens"].as_u64().unwrap() as usize;
    assert!((common::CONTEXT..=common::CONTEXT + 1).contains(&total), "{total}");
}

#[tokio::test]
async fn a_stop_text_ends_thinking_and_json_too() {
    let server = Server::new(&template("thinking.jinja"));
    for letter in ["e", "a", "th"] {
        for format in [json!({"type": "text"}), json!({"type": "json_object"})] {
            let thinking = format["type"] == "text";
            let body = ask(json!({"stop": [letter], "max_tokens": 200, "temperature": 1.2, "seed": 3,
                "response_format": format, "chat_template_kwargs": {"enable_thinking": thinking}}));
            let message = server.chat(&body).await["choices"][0]["message"].clone();
            assert!(!message["content"].as_str().unwrap().contains(letter), "{message}");
            assert!(!message["reasoning_content"].as_str().unwrap_or_default().contains(letter), "{message}");
            let (streamed, _) = put_together(&server.stream("/v1/chat/completions", &body).await);
            assert_eq!(streamed["content"], message["content"]);
        }
    }
}

/// Six turns with calls: what an agent sends back is what was read and written before, so little is read again.
#[tokio::test]
async fn a_session_with_tools_is_read_once() {
    for file in ["tools_json.jinja", "tools_xml.jinja"] {
        let server = Server::new(&template(file));
        let tool = json!({"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {
            "path": {"type": "string", "maxLength": 20}, "line": {"type": "integer", "minimum": 1, "maximum": 9999}},
            "required": ["path", "line"]}}});
        let mut messages = vec![
            json!({"role": "system", "content": "You edit files. ".repeat(20)}),
            json!({"role": "user", "content": "Begin."}),
        ];
        let mut before = 0;
        for turn in 0..6 {
            let choice = if turn % 2 == 0 { "required" } else { "auto" };
            let body =
                ask(json!({"messages": messages, "tools": [tool], "tool_choice": choice, "max_tokens": 80,
                "parallel_tool_calls": false}));
            let answer = server.chat(&body).await;
            let usage = &answer["usage"];
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            // What was written comes back as the template writes it, perhaps from the last checkpoint on.
            assert!(cached + 64 > before, "{file}, turn {turn}: {cached} of {before}");
            before = usage["prompt_tokens"].as_u64().unwrap();
            let message = answer["choices"][0]["message"].clone();
            let call = message["tool_calls"][0]["id"].as_str().map(str::to_owned);
            messages.push(message);
            messages.push(match call {
                Some(id) => json!({"role": "tool", "tool_call_id": id, "content": format!("done {turn}")}),
                None => json!({"role": "user", "content": "Go on."}),
            });
        }
    }
}
