//! From a conversation to tokens.

use serde_json::{Map, Value as Json, json};
use text::TemplateError;

use crate::error::ApiError;
use crate::fields::Fields;
use crate::service::Served;
use crate::structure::Opening;

/// Most messages of a conversation.
const MESSAGES: usize = 20_000;

/// A conversation, ready to read.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    /// Its tokens.
    pub(crate) tokens: Vec<u32>,
    /// How its answer may begin.
    pub(crate) opening: Opening,
}

/// Renders the conversation of a request as its model's template does. `tools` are those the model may know of.
pub(crate) fn prompt(served: &Served, fields: &Fields, tools: Option<&Json>) -> Result<Prompt, ApiError> {
    let Some((source, template)) = &served.template else {
        return Err(ApiError::request("the model has no chat template; use /v1/completions"));
    };
    let messages = messages(fields)?;
    let variables = variables(fields)?;
    let render = |messages: &[Json]| template.render(&Json::from(messages), tools, true, &variables);
    let rendered = match render(&messages) {
        // Strict templates want the system message first and nowhere else. One that comes later keeps its place, so
        // that what was read before it can be reused.
        Err(TemplateError::Refused { .. } | TemplateError::Render { .. }) if late_system(&messages) => {
            render(&without_late_system(&messages))
        }
        rendered => rendered,
    };
    let rendered = rendered.map_err(|error| ApiError::field("messages", error.to_string()))?;
    let text = rendered.text();
    let tail = text.trim_end();
    let opening = if tail.ends_with("<think>") {
        Opening::Thinking
    } else if source.contains("enable_thinking") && !tail.ends_with("</think>") {
        Opening::MayThink
    } else {
        Opening::Plain
    };
    Ok(Prompt { tokens: served.tokenizer.encode_rendered(&rendered), opening })
}

/// What else the template reads.
fn variables(fields: &Fields) -> Result<Map<String, Json>, ApiError> {
    const NAME: &str = "chat_template_kwargs";
    let mut variables = match fields.get(NAME) {
        None => Map::new(),
        Some(Json::Object(map)) => map.clone(),
        Some(_) => return Err(ApiError::field(NAME, format!("{NAME} is not an object"))),
    };
    for ours in ["messages", "tools", "add_generation_prompt"] {
        variables.remove(ours);
    }
    if fields.get("reasoning_effort").and_then(Json::as_str) == Some("none") {
        variables.entry("enable_thinking").or_insert(Json::Bool(false));
    }
    Ok(variables)
}

/// The messages of a request in the form templates are written for.
fn messages(fields: &Fields) -> Result<Vec<Json>, ApiError> {
    let bad = |message: &str| ApiError::field("messages", message);
    let list =
        fields.get("messages").and_then(Json::as_array).ok_or_else(|| bad("messages is not a list"))?;
    if list.is_empty() || list.len() > MESSAGES {
        return Err(bad(&format!("messages has {} entries; expected 1 to {MESSAGES}", list.len())));
    }
    let mut out: Vec<Json> = Vec::with_capacity(list.len());
    for (index, message) in list.iter().enumerate() {
        let fail = |what: &str| bad(&format!("messages[{index}]{what}"));
        let message = normal(message, &fail)?;
        // Several system messages at the beginning are one.
        match out.last_mut() {
            Some(first) if out_is_system(first) && out_is_system(&message) && index < 64 => {
                if out.len() == 1 {
                    let both = format!("{}\n\n{}", text_of(&out[0]), text_of(&message));
                    out[0]["content"] = Json::from(both);
                } else {
                    out.push(message);
                }
            }
            _ => out.push(message),
        }
    }
    Ok(out)
}

fn out_is_system(message: &Json) -> bool {
    message["role"] == "system"
}

fn text_of(message: &Json) -> &str {
    message["content"].as_str().unwrap_or_default()
}

/// One message: role and content as plain text, arguments of calls as objects, reasoning under the name templates use.
fn normal(message: &Json, fail: &dyn Fn(&str) -> ApiError) -> Result<Json, ApiError> {
    let Json::Object(message) = message else { return Err(fail(" is not an object")) };
    let mut message = message.clone();
    let role = message.get("role").and_then(Json::as_str).ok_or_else(|| fail(".role is not a text"))?;
    let role = match role {
        "developer" => "system",
        "function" => "tool",
        role => role,
    };
    if !["system", "user", "assistant", "tool"].contains(&role) {
        return Err(fail(&format!(".role is `{role}`; expected system, developer, user, assistant or tool")));
    }
    message.insert("role".to_owned(), Json::from(role));
    let content = content(message.get("content").unwrap_or(&Json::Null), fail)?;
    message.insert("content".to_owned(), Json::from(content));
    if let Some(reasoning) = message.remove("reasoning").filter(Json::is_string) {
        message.entry("reasoning_content").or_insert(reasoning);
    }
    message.retain(|_, value| !value.is_null());
    if let Some(calls) = message.get_mut("tool_calls") {
        let Json::Array(calls) = calls else { return Err(fail(".tool_calls is not a list")) };
        for (number, call) in calls.iter_mut().enumerate() {
            arguments(call).map_err(|what| fail(&format!(".tool_calls[{number}]{what}")))?;
        }
        if calls.is_empty() {
            message.remove("tool_calls");
        }
    }
    Ok(Json::Object(message))
}

/// Content as text: parts are joined, images are refused.
fn content(content: &Json, fail: &dyn Fn(&str) -> ApiError) -> Result<String, ApiError> {
    match content {
        Json::Null => Ok(String::new()),
        Json::String(text) => Ok(text.clone()),
        Json::Array(parts) => {
            let text = |part: &Json| {
                let text = part.as_str().or_else(|| part.get("text").and_then(Json::as_str));
                let kind = part.get("type").and_then(Json::as_str).unwrap_or("?");
                let text = text.or_else(|| part.get("refusal").and_then(Json::as_str));
                text.map(str::to_owned).ok_or_else(|| {
                    fail(&format!(".content has a part of type `{kind}`; this model reads text only"))
                })
            };
            Ok(parts.iter().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        _ => Err(fail(".content is neither a text nor a list of parts")),
    }
}

/// Arguments of a call as an object, which is what templates take: clients send them as a text of JSON.
fn arguments(call: &mut Json) -> Result<(), String> {
    let function = if call.get("function").is_some() { &mut call["function"] } else { call };
    let Json::Object(function) = function else { return Err(" is not an object".to_owned()) };
    if function.get("name").and_then(Json::as_str).is_none() {
        return Err(".function.name is not a text".to_owned());
    }
    let arguments = match function.get("arguments") {
        None | Some(Json::Null) => json!({}),
        Some(Json::String(text)) if text.trim().is_empty() => json!({}),
        Some(arguments @ Json::Object(_)) => arguments.clone(),
        // A call that was cut off or is no JSON is told to the model as what it is: an agent cannot take it back.
        Some(Json::String(text)) => {
            let parsed = serde_json::from_str(text).ok().filter(Json::is_object);
            parsed.unwrap_or_else(|| json!({ "arguments": text }))
        }
        Some(other) => json!({ "arguments": other }),
    };
    function.insert("arguments".to_owned(), arguments);
    Ok(())
}

fn late_system(messages: &[Json]) -> bool {
    messages.iter().skip(1).any(out_is_system)
}

/// System messages after the first position in the mouth of the user.
fn without_late_system(messages: &[Json]) -> Vec<Json> {
    let mut messages = messages.to_vec();
    for message in messages.iter_mut().skip(1).filter(|message| message["role"] == "system") {
        message["role"] = Json::from("user");
    }
    messages
}
