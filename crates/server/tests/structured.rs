//! Answers in the form that was demanded, whatever the model would rather write. Validated by somebody else's code.

mod common;

use common::{Server, template};
use futures_util::future::{join, join_all};
use serde_json::{Value as Json, json};

/// Nothing but the constraint makes sense of this.
fn wild(seed: u64) -> Json {
    json!({
        "messages": [{"role": "user", "content": "Describe a thing."}],
        "temperature": 1.5, "top_k": 0, "top_p": 1, "seed": seed, "max_tokens": 1500,
    })
}

fn with(mut body: Json, fields: Json) -> Json {
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn schemas() -> Vec<Json> {
    let address = json!({"type": "object", "properties": {"street": {"type": "string", "maxLength": 20},
        "number": {"type": "integer", "minimum": 1, "maximum": 999}}, "required": ["street", "number"],
        "additionalProperties": false});
    vec![
        json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
            "required": ["a", "b"], "additionalProperties": false}),
        json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "items": {"enum": ["x", "y", "z"]}, "minItems": 1, "maxItems": 3}},
            "required": ["name", "tags"], "additionalProperties": false}),
        json!({"type": "object", "properties": {"at": {"$ref": "#/$defs/address"}, "other": {"anyOf": [
            {"$ref": "#/$defs/address"}, {"type": "null"}]}}, "required": ["at", "other"],
            "additionalProperties": false, "$defs": {"address": address}}),
        json!({"type": "object", "properties": {"id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2,4}$"},
            "day": {"type": "string", "format": "date"}}, "required": ["id", "day"],
            "additionalProperties": false}),
        json!({"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "maxItems": 6}),
        json!({"anyOf": [{"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "boolean"}},
            "required": ["kind", "x"], "additionalProperties": false}, {"type": "object", "properties": {
            "kind": {"const": "b"}, "y": {"type": "null"}}, "required": ["kind", "y"], "additionalProperties": false}]}),
        json!({"type": "object", "properties": {"tree": {"$ref": "#/$defs/node"}}, "required": ["tree"],
            "additionalProperties": false, "$defs": {"node": {"type": "object", "properties": {
            "leaf": {"type": "boolean"}, "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["leaf", "left"], "additionalProperties": false}}}),
        json!({"enum": ["yes", "no", 3, null, {"k": [1]}]}),
        json!({"type": ["integer", "null"], "minimum": 10, "maximum": 99}),
        json!({"type": "object", "properties": {"r": {"type": "number", "minimum": 0, "maximum": 1}},
            "required": ["r"], "additionalProperties": false}),
    ]
}

#[tokio::test]
async fn answers_satisfy_their_schema_at_any_temperature() {
    let server = Server::new(&template("tools_json.jinja"));
    let mut complete = 0;
    for (number, schema) in schemas().iter().enumerate() {
        let validator = jsonschema::options().should_validate_formats(true).build(schema).unwrap();
        let demand = |seed: u64| {
            let strict = [json!(true), json!(false), Json::Null][seed as usize % 3].clone();
            let named = json!({"name": "thing", "strict": strict, "schema": schema});
            with(wild(seed), json!({"response_format": {"type": "json_schema", "json_schema": named}}))
        };
        let bodies: Vec<Json> = (0..6).map(demand).collect();
        for (seed, answer) in server.chats(&bodies).await.iter().enumerate() {
            let choice = &answer["choices"][0];
            let content = choice["message"]["content"].as_str().unwrap();
            if choice["finish_reason"] == "length" {
                continue;
            }
            complete += 1;
            let value: Json = serde_json::from_str(content)
                .unwrap_or_else(|error| panic!("schema {number}, seed {seed}: {error}: {content}"));
            assert!(validator.is_valid(&value), "schema {number}, seed {seed}: {content}");
        }
    }
    assert!(complete >= 54, "{complete} of 60 came to an end");
}

fn tools() -> Json {
    json!([
        {"type": "function", "function": {"name": "edit", "description": "Edits a file.", "parameters": {
            "type": "object", "properties": {
                "path": {"type": "string", "maxLength": 30}, "line": {"type": "integer", "minimum": 1, "maximum": 9999},
                "mode": {"enum": ["fast", "slow"]}, "force": {"type": "boolean"},
                "spans": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4}},
            "required": ["path", "line", "mode"]}}},
        {"type": "function", "function": {"name": "edit_all", "parameters": {"type": "object", "properties": {
            "where": {"$ref": "#/$defs/place"}, "text": {"type": "string", "maxLength": 40}},
            "required": ["where", "text"], "$defs": {"place": {"type": "object", "properties": {
            "row": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["row"],
            "additionalProperties": false}}}}},
        {"type": "function", "function": {"name": "now"}},
        {"type": "web_search"}
    ])
}

/// Calls of an answer that has come to its end: each names a tool, with arguments its schema allows.
fn check_calls(answer: &Json) -> Vec<String> {
    let tools = tools();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let name = |call: &Json| {
        let (name, arguments) = (&call["function"]["name"], call["function"]["arguments"].as_str().unwrap());
        let tool = tools.as_array().unwrap().iter().find(|tool| tool["function"]["name"] == *name).unwrap();
        let empty = json!({"type": "object", "additionalProperties": false});
        let schema = tool["function"].get("parameters").unwrap_or(&empty);
        let arguments: Json =
            serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{error}: {call}"));
        assert!(jsonschema::validator_for(schema).unwrap().is_valid(&arguments), "{call}");
        name.as_str().unwrap().to_owned()
    };
    calls.iter().map(name).collect()
}

#[tokio::test]
async fn demanded_calls_are_made_in_both_notations() {
    for file in ["tools_json.jinja", "tools_xml.jinja"] {
        let server = Server::new(&template(file));
        let mut seen = std::collections::BTreeSet::new();
        let bodies: Vec<Json> = (0..8)
            .map(|seed| with(wild(seed), json!({"tools": tools(), "tool_choice": "required"})))
            .collect();
        let streams = bodies.iter().map(|body| server.stream("/v1/chat/completions", body));
        let (answers, streams) = join(server.chats(&bodies), join_all(streams)).await;
        for (seed, (answer, stream)) in answers.iter().zip(&streams).enumerate() {
            if answer["choices"][0]["finish_reason"] == "length" {
                continue;
            }
            let message = &answer["choices"][0]["message"];
            assert_eq!(message["content"], Json::Null, "{file}, seed {seed}: {message}");
            seen.extend(check_calls(answer));
            // The stream adds up to the same.
            let (streamed, reason) = common::put_together(stream);
            let functions =
                message["tool_calls"].as_array().unwrap().iter().map(|call| call["function"].clone());
            assert_eq!((&streamed["calls"], reason.as_str()), (&functions.collect(), "tool_calls"), "{file}");
        }
        assert!(!seen.is_empty(), "{file}: some answers come to an end");
        for name in ["edit", "edit_all", "now"] {
            let choice = json!({"type": "function", "function": {"name": name}});
            let answer = server.chat(&with(wild(9), json!({"tools": tools(), "tool_choice": choice}))).await;
            assert_eq!(check_calls(&answer), [name], "{file}");
        }
        let one =
            with(wild(3), json!({"tools": tools(), "tool_choice": "required", "parallel_tool_calls": false}));
        assert_eq!(check_calls(&server.chat(&one).await).len(), 1, "{file}");
        let greedy = with(one, json!({"temperature": 0, "tool_choice": {"type": "function", "name": "now"}}));
        assert_eq!(check_calls(&server.chat(&greedy).await), ["now"], "{file}");
    }
}

#[tokio::test]
async fn what_is_demanded_follows_the_thinking() {
    let template = template("thinking.jinja") + "{#- <tool_call> -#}";
    let server = Server::new(&template);
    let format = json!({"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}});
    let (mut thought, mut ended) = (0, 0);
    let thinking = |seed: u64| seed.is_multiple_of(2);
    let demand = |seed| {
        let thinking = json!({"enable_thinking": thinking(seed)});
        with(
            wild(seed),
            json!({"max_tokens": 400, "response_format": format, "chat_template_kwargs": thinking}),
        )
    };
    let bodies: Vec<Json> = (0..12).map(demand).collect();
    for (seed, answer) in (0..).zip(&server.chats(&bodies).await) {
        let choice = &answer["choices"][0];
        if choice["finish_reason"] == "stop" {
            ended += 1;
            thought += usize::from(choice["message"]["reasoning_content"].is_string());
            let content = choice["message"]["content"].as_str().unwrap();
            assert!(["\"yes\"", "\"no\""].contains(&content), "{choice}");
        } else {
            assert!(thinking(seed) && choice["message"]["content"] == "", "{choice}");
        }
    }
    assert!(ended >= 6, "without thinking all answers end: {ended}");
    assert!(thought <= ended);
    let body = with(
        wild(1),
        json!({"tools": tools(), "tool_choice": "required",
        "chat_template_kwargs": {"enable_thinking": false}}),
    );
    check_calls(&server.chat(&body).await);
}

#[tokio::test]
async fn any_object_and_json_beside_tools() {
    let server = Server::new(&template("tools_json.jinja"));
    let mut ended = 0;
    let format = json!({"response_format": {"type": "json_object"}, "max_tokens": 600, "top_k": 40});
    let bodies: Vec<Json> = (0..8).map(|seed| with(wild(seed), format.clone())).collect();
    for answer in &server.chats(&bodies).await {
        let choice = &answer["choices"][0];
        if choice["finish_reason"] == "stop" {
            ended += 1;
            let value: Json = serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
            assert!(value.is_object(), "{value}");
        }
    }
    assert!(ended >= 4, "{ended} of 8");
    // Either an answer of the schema or calls, as the model likes.
    let (mut answers, mut calls) = (0, 0);
    let schema = json!({"schema": {"type": "integer", "minimum": 0, "maximum": 99}});
    let either = json!({"tools": tools(), "response_format": {"type": "json_schema", "json_schema": schema}});
    let bodies: Vec<Json> = (0..10).map(|seed| with(wild(seed), either.clone())).collect();
    for answer in &server.chats(&bodies).await {
        if answer["choices"][0]["message"]["tool_calls"].is_array() {
            calls += check_calls(answer).len();
        } else {
            let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
            assert!((0..100).contains(&content.parse::<i64>().unwrap()), "{content}");
            answers += 1;
        }
    }
    assert!(answers > 0 && calls > 0, "{answers} answers, {calls} calls");
    let raw = json!({"prompt": "import ", "max_tokens": 40, "temperature": 1.5, "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["one", "two"]}}}});
    let (_, raw) = server.post("/v1/completions", &raw).await;
    assert!(["\"one\"", "\"two\""].contains(&raw["choices"][0]["text"].as_str().unwrap()), "{raw}");
    let several = with(
        wild(1),
        json!({"n": 3, "response_format": {"type": "json_schema",
        "json_schema": {"schema": {"type": "integer", "minimum": 0, "maximum": 99}}}}),
    );
    let several = server.chat(&several).await;
    let contents = several["choices"].as_array().unwrap().iter().map(|choice| &choice["message"]["content"]);
    assert!(contents.into_iter().all(|text| text.as_str().unwrap().parse::<u8>().is_ok()), "{several}");
}

#[tokio::test]
async fn what_cannot_be_enforced_is_refused_by_name() {
    let server = Server::new(&template("tools_xml.jinja"));
    let schema =
        |schema: Json| json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}});
    let forced = |tool: Json| json!({"tools": [tool], "tool_choice": "required"});
    for (fields, param, words) in [
        (schema(json!({"type": "array", "uniqueItems": true})), "response_format", "uniqueItems"),
        (schema(json!({"not": {"type": "string"}})), "response_format", "not"),
        (schema(json!({"type": "string", "format": "color"})), "response_format", "color"),
        (schema(json!({"$ref": "#/$defs/nothing"})), "response_format", "nothing"),
        (schema(json!({"$ref": "https://example.com/schema"})), "response_format", "$ref"),
        (schema(json!({"type": "integer", "minimum": 5, "maximum": 4})), "response_format", "nsatisfiable"),
        (schema(json!({"type": "string", "pattern": "("})), "response_format", ""),
        (schema(json!(3)), "response_format", "not an object"),
        (json!({"response_format": {"type": "yaml"}}), "response_format", "json_schema"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format", "missing"),
        (json!({"grammar": "root ::= \"a\""}), "grammar", "response_format"),
        (json!({"tool_choice": "required"}), "tool_choice", "no tools"),
        (json!({"tool_choice": "perhaps"}), "tool_choice", "required"),
        (
            with(
                forced(json!({"type": "function", "function": {"name": "a"}})),
                json!({"tool_choice": {"type": "function", "function": {"name": "b"}}}),
            ),
            "tool_choice",
            "`b`",
        ),
        (forced(json!({"type": "function", "function": {"name": "a>b"}})), "tools", "tools[0].function.name"),
        (
            forced(
                json!({"type": "function", "function": {"name": "a", "strict": true, "parameters": {"type": "object",
            "properties": {"p": {"type": "string", "pattern": "^a+$"}}}}}),
            ),
            "tools",
            "properties.p.pattern",
        ),
        (json!({"tools": [{"type": "function", "function": {}}]}), "tools", "tools[0]"),
    ] {
        let (field, message) = server.refused(&with(wild(0), fields.clone())).await;
        assert!(field == param && message.contains(words), "{fields}: {field}: {message}");
    }
    let without = Server::new(&template("chatml.jinja"));
    let body = with(wild(0), forced(json!({"type": "function", "function": {"name": "a"}})));
    assert!(without.refused(&body).await.1.contains("template knows no tools"));
    // One odd schema among the tools takes nothing from the others, nor from its own call.
    let odd = json!({"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "properties": {
        "tags": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": true, "maxItems": 3},
        "name": {"type": "string", "pattern": "^\\d+$", "maxLength": 20}}, "required": ["tags"]}}});
    let answer = server.chat(&with(wild(2), forced(odd))).await;
    assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "odd");
}

/// Schemas made to hurt: each is taken or refused soon, and the server goes on.
#[tokio::test]
async fn hostile_schemas_cost_little() {
    let server = Server::new(&template("tools_json.jinja"));
    let chain: serde_json::Map<String, Json> = (0..1500)
        .map(|n| {
            (format!("d{n}"), json!({"anyOf": [{"$ref": format!("#/$defs/d{}", n + 1)}, {"type": "null"}]}))
        })
        .chain([("d1500".to_owned(), json!({"type": "null"}))])
        .collect();
    let mut nested = json!({"type": "string"});
    for level in 0..60 {
        nested = json!({"type": "object", "properties": {format!("p{level}"): nested}, "required": [format!("p{level}")]});
    }
    let product: Vec<Json> = (0..12)
        .map(|n| json!({"anyOf": (0..12).map(|m| json!({"properties": {format!("{n}.{m}"): {"type": "integer"}}})).collect::<Vec<_>>()}))
        .collect();
    let wide: serde_json::Map<String, Json> =
        (0..5000).map(|n| (format!("p{n}"), json!({"type": "integer"}))).collect();
    let hostile = [
        json!({"$ref": "#/$defs/d0", "$defs": chain}),
        nested,
        json!({"allOf": product}),
        json!({"type": "object", "properties": wide}),
        json!({"type": "string", "pattern": "(a{1,500}){1,500}"}),
        json!({"type": "string", "pattern": "((a*)*)*b|(x+x+)+y"}),
        json!({"type": "string", "minLength": 1_000_000, "maxLength": 2_000_000}),
        json!({"type": "array", "items": {"type": "array", "items": {"type": "string"}, "maxItems": 100_000}, "maxItems": 100_000}),
        json!({"enum": (0..20_000).map(|n| format!("value {n}")).collect::<Vec<_>>()}),
        json!({"$ref": "#"}),
        json!({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}),
        json!({"type": "number", "multipleOf": 1e-300}),
        json!({"type": "integer", "multipleOf": 982_451_653, "minimum": -1e300, "maximum": 1e300}),
        json!({"patternProperties": {".*": {"type": "string"}, "a+": {"type": "integer"}}}),
    ];
    for (number, schema) in hostile.iter().enumerate() {
        let body = with(
            wild(0),
            json!({"max_tokens": 3, "response_format": {"type": "json_schema",
            "json_schema": {"schema": schema}}}),
        );
        let (status, answer) = server.post("/v1/chat/completions", &body).await;
        assert!(status == 200 || status == 400, "schema {number}: {status}: {answer}");
    }
    // Still there, still right.
    let body = with(
        wild(0),
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}}),
    );
    assert_eq!(server.chat(&body).await["choices"][0]["message"]["content"], "7");
}
