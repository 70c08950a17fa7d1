//! What a request demands of its answer: JSON, or calls of tools. Demands are enforced or refused by name.

use std::fmt::Write;

use engine::Constraint;
use serde_json::{Map, Value as Json, json};
use text::{CallFormat, call_rules};

use crate::error::ApiError;
use crate::fields::Fields;
use crate::service::Service;

const FORMAT: &str = "response_format";
const CHOICE: &str = "tool_choice";

/// Most calls of an answer that has to call: small models would go on until their tokens are used up.
const CALLS: usize = 8;

/// Whether an answer may, must or must not call tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// As the model likes.
    Auto,
    /// No calls.
    None,
    /// One call or more.
    Required,
    /// One call of this tool.
    Named(String),
}

/// The tools of a request and what may become of them.
#[derive(Clone, Debug)]
pub(crate) struct Tools {
    /// Those the model is told of; `None` if it is told of none.
    pub(crate) declared: Option<Json>,
    pub(crate) choice: Choice,
    /// One call at most where calls are demanded.
    single: bool,
}

impl Tools {
    /// No tools at all.
    pub(crate) const NONE: Tools = Tools { declared: None, choice: Choice::Auto, single: false };

    /// The tools of a request. Entries of kinds other than functions are left out.
    pub(crate) fn of(fields: &Fields) -> Result<Tools, ApiError> {
        let bad = |message: String| ApiError::field("tools", message);
        let mut declared = Vec::new();
        match fields.get("tools") {
            None => {}
            Some(Json::Array(list)) => {
                for (index, tool) in list.iter().enumerate() {
                    let kind = tool.get("type").map_or(Some("function"), Json::as_str);
                    let function = tool.get("function").unwrap_or(tool);
                    match (kind, function.get("name")) {
                        (Some("function"), Some(Json::String(_))) => declared.push(tool.clone()),
                        (Some(kind), _) if kind != "function" => {}
                        _ => return Err(bad(format!("tools[{index}] is not a function with a name"))),
                    }
                }
            }
            Some(_) => return Err(bad("tools is not a list".to_owned())),
        }
        let choice = choice(fields)?;
        match &choice {
            Choice::Required if declared.is_empty() => {
                return Err(ApiError::field(CHOICE, "tool_choice demands a call, but there are no tools"));
            }
            Choice::Named(name) if !declared.iter().any(|tool| name_of(tool) == Some(name)) => {
                return Err(ApiError::field(
                    CHOICE,
                    format!("tool_choice names `{name}`, which is not in tools"),
                ));
            }
            _ => {}
        }
        let told = !declared.is_empty() && choice != Choice::None;
        let single = fields.get("parallel_tool_calls") == Some(&Json::Bool(false));
        Ok(Tools { declared: told.then(|| Json::from(declared)), choice, single })
    }

    fn list(&self) -> &[Json] {
        self.declared.as_ref().and_then(Json::as_array).map_or(&[], Vec::as_slice)
    }
}

fn name_of(tool: &Json) -> Option<&str> {
    tool.get("function").unwrap_or(tool).get("name").and_then(Json::as_str)
}

fn choice(fields: &Fields) -> Result<Choice, ApiError> {
    let bad = || ApiError::field(CHOICE, "tool_choice is `auto`, `none`, `required`, or names a function");
    match fields.get(CHOICE) {
        None => Ok(Choice::Auto),
        Some(Json::String(word)) => match word.as_str() {
            "auto" => Ok(Choice::Auto),
            "none" => Ok(Choice::None),
            "required" | "any" => Ok(Choice::Required),
            _ => Err(bad()),
        },
        Some(Json::Object(choice)) if choice.get("type").is_none_or(|kind| kind == "function") => {
            let name = choice.get("function").map_or(choice.get("name"), |function| function.get("name"));
            name.and_then(Json::as_str).map(|name| Choice::Named(name.to_owned())).ok_or_else(bad)
        }
        Some(_) => Err(bad()),
    }
}

/// How an answer begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    /// With what is demanded.
    Plain,
    /// Inside the thinking that the prompt has opened.
    Thinking,
    /// With thinking, or without.
    MayThink,
}

/// The constraint that a request demands; `None` if its answer is free. Blocks while it is compiled.
pub(crate) fn constraint(
    service: &Service,
    fields: &Fields,
    tools: &Tools,
    opening: Opening,
) -> Result<Option<Box<dyn Constraint>>, ApiError> {
    let answer = format(fields)?;
    let forced = matches!(tools.choice, Choice::Required | Choice::Named(_));
    if answer.is_none() && !forced {
        return Ok(None);
    }
    let notation = service.served.calls();
    if forced && notation.is_none() {
        return Err(ApiError::field(
            CHOICE,
            "tool_choice demands a call, but the model's template knows no tools",
        ));
    }
    let mut rules = String::new();
    let mut bodies = Vec::new();
    if let Some(schema) = &answer
        && !forced
    {
        let _ = writeln!(rules, "answer: %json {schema}");
        bodies.push("answer");
    }
    if let (false, Some(notation)) = (tools.list().is_empty(), notation) {
        rules += &calls(tools, notation)?;
        bodies.push("calls");
    }
    let _ = writeln!(rules, "body: {}\n{}", bodies.join(" | "), beginning(opening));
    let at = if forced { CHOICE } else { FORMAT };
    let grammars = service.grammars().map_err(|what| ApiError::field(at, format!("{at}: {what}")))?;
    let compiled = grammars.compile(rules);
    compiled.map(Some).map_err(|what| ApiError::field(at, format!("{at} cannot be enforced: {what}")))
}

/// Rules for one call or more.
fn calls(tools: &Tools, notation: CallFormat) -> Result<String, ApiError> {
    let may = |(_, tool): &(usize, &Json)| match &tools.choice {
        Choice::Named(name) => name_of(tool) == Some(name),
        _ => true,
    };
    let (indexes, callable): (Vec<usize>, Vec<&Json>) = tools.list().iter().enumerate().filter(may).unzip();
    let rules = call_rules(notation, &callable).map_err(|bad| {
        let at = format!("tools[{}].function.{}", indexes[bad.index], bad.at);
        ApiError::field("tools", format!("{at} {}", bad.what))
    })?;
    let single = tools.single || matches!(tools.choice, Choice::Named(_));
    let more = if single { String::new() } else { format!(" (\"\\n\" call){{0,{}}}", CALLS - 1) };
    Ok(format!("{rules}calls: call{more}\n"))
}

/// The first rule: what comes before the body.
pub(crate) fn beginning(opening: Opening) -> &'static str {
    match opening {
        Opening::Plain => "start: body\n",
        Opening::Thinking => {
            "start: thought gap body\nthought[suffix=\"</think>\"]: /(?s:.*)/\ngap: \"\" | \"\\n\" | \"\\n\\n\"\n"
        }
        Opening::MayThink => {
            "start: body | \"<think>\" thought gap body\nthought[suffix=\"</think>\"]: /(?s:.*)/\n\
             gap: \"\" | \"\\n\" | \"\\n\\n\"\n"
        }
    }
}

/// The schema that an answer has to satisfy.
fn format(fields: &Fields) -> Result<Option<Json>, ApiError> {
    if fields.get("grammar").is_some() {
        return Err(ApiError::field(
            "grammar",
            "grammar is not supported; describe the answer by response_format",
        ));
    }
    let Some(format) = fields.get(FORMAT) else {
        return fields.get("json_schema").map(|schema| answer(schema, "json_schema")).transpose();
    };
    let inner = format.get("json_schema").and_then(|named| named.get("schema"));
    let schema = inner.or(format.get("schema")).filter(|schema| !schema.is_null());
    match (format.get("type").and_then(Json::as_str), schema) {
        (Some("text"), _) => Ok(None),
        (Some("json_object"), None) => answer(&json!({ "type": "object" }), FORMAT).map(Some),
        (Some("json_object" | "json_schema"), Some(schema)) => answer(schema, FORMAT).map(Some),
        (Some("json_schema"), None) => {
            Err(ApiError::field(FORMAT, "response_format.json_schema.schema is missing"))
        }
        _ => Err(ApiError::field(FORMAT, "response_format.type is `text`, `json_object` or `json_schema`")),
    }
}

/// A schema with the white space that answers may have: some, but not without end.
fn answer(schema: &Json, field: &str) -> Result<Json, ApiError> {
    let mut schema = match schema {
        Json::Object(schema) => schema.clone(),
        Json::Bool(true) => Map::new(),
        _ => return Err(ApiError::field(field, format!("{field}: the schema is not an object"))),
    };
    schema
        .insert("x-guidance".to_owned(), json!({ "whitespace_pattern": "[ \\t]{1,8}|\\r?\\n[ \\t]{0,64}" }));
    Ok(Json::Object(schema))
}
