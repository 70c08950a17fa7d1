//! The notations of calls as rules of a grammar, for answers that have to be calls.
//!
//! The rules are in the dialect of Lark that llguidance reads: `%json SCHEMA` stands for a value of that schema, and a
//! rule with `suffix` ends at the first place where that text comes.

use std::fmt::Write;

use serde_json::{Map, Value as Json, json};

use super::schema::Types;
use super::{CALL, CALLED, CallFormat, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END};

/// A tool whose calls cannot be described.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at} {what}")]
pub struct BadTool {
    /// The tool's number among those given.
    pub index: usize,
    /// Where in the tool, like `parameters.properties.path`.
    pub at: String,
    /// What is wrong with it.
    pub what: String,
}

/// One tool of a request.
struct Tool<'t> {
    index: usize,
    name: &'t str,
    /// Its parameters as the request has them.
    parameters: &'t Json,
    /// Whether the request wants nothing of its schema ignored.
    strict: bool,
}

impl Tool<'_> {
    fn bad(&self, at: &str, what: impl Into<String>) -> BadTool {
        BadTool { index: self.index, at: at.to_owned(), what: what.into() }
    }

    /// The schema of its arguments: an object, which has the declared properties alone unless it says otherwise.
    fn schema(&self) -> Result<Map<String, Json>, BadTool> {
        let mut schema = match self.parameters {
            Json::Null => Map::new(),
            Json::Object(schema) => schema.clone(),
            _ => return Err(self.bad("parameters", "is not a JSON schema")),
        };
        schema.entry("type").or_insert_with(|| json!("object"));
        let open = ["additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"];
        let closed = schema.get("properties").is_some_and(Json::is_object) || self.parameters.is_null();
        if closed && !open.iter().any(|keyword| schema.contains_key(*keyword)) {
            schema.insert("additionalProperties".to_owned(), json!(false));
        }
        Ok(schema)
    }

    /// `%json` for a schema, written as templates write values in a conversation. What a schema of a tool that is not
    /// strict says in words the grammar does not know is left out.
    fn json(&self, mut schema: Map<String, Json>) -> String {
        let options = json!({
            "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": false, "lenient": !self.strict,
        });
        schema.insert("x-guidance".to_owned(), options);
        format!("%json {}", Json::Object(schema))
    }
}

/// Rules for calls of `tools`, which are as a request declares them: `call` is one call of one of them. The schemas of
/// tools marked `strict` are followed in every word; of the others, what cannot be followed is left out.
///
/// # Errors
/// [`BadTool`]: a tool whose name cannot be written in the notation, or whose schema cannot be followed.
pub fn call_rules(format: CallFormat, tools: &[&Json]) -> Result<String, BadTool> {
    let mut rules = String::new();
    for (index, tool) in tools.iter().enumerate() {
        let function = tool.get("function").unwrap_or(tool);
        let Some(name) = function.get("name").and_then(Json::as_str) else {
            return Err(BadTool { index, at: "name".to_owned(), what: "is not a text".to_owned() });
        };
        let tool = Tool {
            index,
            name,
            parameters: function.get("parameters").unwrap_or(&Json::Null),
            strict: function.get("strict") == Some(&Json::Bool(true)),
        };
        match format {
            CallFormat::Json => json_rule(&tool, &mut rules)?,
            CallFormat::Xml => xml_rules(&tool, &mut rules)?,
        }
    }
    let each: Vec<String> = (0..tools.len()).map(|index| format!("call_{index}")).collect();
    let _ = writeln!(rules, "call: {}", each.join(" | "));
    Ok(rules)
}

/// A text as Lark writes it.
fn literal(text: &str) -> String {
    Json::from(text).to_string()
}

fn json_rule(tool: &Tool, rules: &mut String) -> Result<(), BadTool> {
    let before = format!("{CALL}\n{{\"name\": {}, \"arguments\": ", literal(tool.name));
    let after = format!("}}\n{CALLED}");
    let arguments = tool.json(tool.schema()?);
    let _ = writeln!(rules, "call_{}: {} {arguments} {}", tool.index, literal(&before), literal(&after));
    Ok(())
}

fn xml_rules(tool: &Tool, rules: &mut String) -> Result<(), BadTool> {
    let writable = |name: &str| !name.is_empty() && !name.contains(['>', '<', '"', '\n', '\r']);
    if !writable(tool.name) {
        return Err(tool.bad("name", "cannot be written in this model's notation of calls"));
    }
    let schema = tool.schema()?;
    let required = schema.get("required").and_then(Json::as_array).map_or(&[][..], Vec::as_slice);
    let properties = schema.get("properties").and_then(Json::as_object).into_iter().flatten();
    let mut parts = String::new();
    for (number, (key, property)) in properties.enumerate() {
        if !writable(key.trim()) || key.trim() != key {
            let at = format!("parameters.properties.{key}");
            return Err(tool.bad(&at, "cannot be written in this model's notation of calls"));
        }
        let name = format!("p_{}_{number}", tool.index);
        let optional = if required.iter().any(|one| one == key) { "" } else { "?" };
        let _ = write!(parts, " {name}{optional}");
        let value = xml_value(tool, (&name, key), property, rules)?;
        let _ = writeln!(rules, "{name}: {} {value}", literal(&format!("{PARAMETER}{key}>\n")));
    }
    let before = literal(&format!("{CALL}\n{FUNCTION}{}>\n", tool.name));
    let after = literal(&format!("{FUNCTION_END}\n{CALLED}"));
    let _ = writeln!(rules, "call_{}: {before}{parts} {after}", tool.index);
    Ok(())
}

/// What follows the tag of a parameter, its end tag included. Values that may be texts are written as they are.
fn xml_value(
    tool: &Tool,
    (rule, key): (&str, &str),
    property: &Json,
    rules: &mut String,
) -> Result<String, BadTool> {
    let end = format!("\n{PARAMETER_END}\n");
    let types = Types::of_parameter(tool.parameters, key);
    let resolved = resolve(property, tool.parameters);
    if !types.may_be_text() {
        let mut schema = property.as_object().cloned().unwrap_or_default();
        for definitions in ["$defs", "definitions"] {
            if let Some(all) = tool.parameters.get(definitions) {
                schema.entry(definitions).or_insert_with(|| all.clone());
            }
        }
        return Ok(format!("{} {}", tool.json(schema), literal(&end)));
    }
    if let Some(values) = choices(resolved) {
        let written: Vec<String> = values.iter().map(|value| literal(&(spelled(value) + &end))).collect();
        return Ok(format!("({})", written.join(" | ")));
    }
    let unfollowed = ["pattern", "format", "anyOf", "oneOf", "allOf", "not"];
    if let Some(keyword) = unfollowed.iter().find(|keyword| tool.strict && resolved.get(**keyword).is_some())
    {
        let at = format!("parameters.properties.{key}.{keyword}");
        return Err(tool.bad(&at, "cannot be enforced in this model's notation of calls"));
    }
    let length = |name: &str| resolved.get(name).and_then(Json::as_u64);
    let body = match (length("minLength").unwrap_or(0), length("maxLength")) {
        (0, None) => "(?s:.*)".to_owned(),
        (least, None) => format!("(?s:.{{{least},}})"),
        (least, Some(most)) => format!("(?s:.{{{least},{most}}})"),
    };
    let _ = writeln!(rules, "{rule}_value[suffix={}]: /{body}/", literal(&end));
    Ok(format!("{rule}_value"))
}

/// The schema that a reference points to; others are what they are.
fn resolve<'s>(schema: &'s Json, root: &'s Json) -> &'s Json {
    let path = schema.get("$ref").and_then(Json::as_str).and_then(|path| path.strip_prefix('#'));
    path.and_then(|path| root.pointer(path)).unwrap_or(schema)
}

/// The only values a schema allows.
fn choices(schema: &Json) -> Option<Vec<&Json>> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(only), _) => Some(vec![only]),
        (None, Some(Json::Array(values))) if !values.is_empty() => Some(values.iter().collect()),
        _ => None,
    }
}

/// A value as it stands between tags.
fn spelled(value: &Json) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
