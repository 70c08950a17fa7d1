//! Values typed by the request's schema, never by their looks.

use serde_json::Value as Json;

/// The JSON types a parameter may have. None at all: the schema does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Types {
    string: bool,
    integer: bool,
    number: bool,
    boolean: bool,
    null: bool,
    array: bool,
    object: bool,
}

/// References and unions followed before giving up.
const DEPTH: usize = 16;

impl Types {
    /// What the schema of a tool's parameters says of one of them.
    pub(super) fn of_parameter(parameters: &Json, name: &str) -> Types {
        let mut types = Types::default();
        if let Some(schema) = parameters.get("properties").and_then(|all| all.get(name)) {
            types.add(schema, parameters, DEPTH);
        }
        types
    }

    fn add(&mut self, schema: &Json, root: &Json, depth: usize) {
        let Some(depth) = depth.checked_sub(1) else { return };
        match schema.get("type") {
            Some(Json::String(name)) => self.add_name(name),
            Some(Json::Array(names)) => {
                names.iter().filter_map(Json::as_str).for_each(|name| self.add_name(name));
            }
            _ => {}
        }
        for union in ["anyOf", "oneOf", "allOf"] {
            let options = schema.get(union).and_then(Json::as_array);
            options.into_iter().flatten().for_each(|option| self.add(option, root, depth));
        }
        let reference = schema.get("$ref").and_then(Json::as_str).and_then(|path| path.strip_prefix('#'));
        if let Some(target) = reference.and_then(|path| root.pointer(path)) {
            self.add(target, root, depth);
        }
        if schema.get("type").is_none() {
            let listed = schema.get("enum").and_then(Json::as_array);
            listed.into_iter().flatten().chain(schema.get("const")).for_each(|value| self.add_value(value));
        }
    }

    fn add_name(&mut self, name: &str) {
        match name {
            "string" => self.string = true,
            "integer" => self.integer = true,
            "number" => self.number = true,
            "boolean" => self.boolean = true,
            "null" => self.null = true,
            "array" => self.array = true,
            "object" => self.object = true,
            _ => {}
        }
    }

    fn add_value(&mut self, value: &Json) {
        match value {
            Json::Null => self.null = true,
            Json::Bool(_) => self.boolean = true,
            Json::Number(n) if n.is_f64() => self.number = true,
            Json::Number(_) => self.integer = true,
            Json::String(_) => self.string = true,
            Json::Array(_) => self.array = true,
            Json::Object(_) => self.object = true,
        }
    }

    fn is_unknown(&self) -> bool {
        *self == Types::default()
    }

    fn only_strings(&self) -> bool {
        self.string && *self == Types { string: true, null: self.null, ..Types::default() }
    }

    /// Whether what is written between tags is a string, whatever it is.
    pub(super) fn is_text(&self) -> bool {
        self.is_unknown() || (self.only_strings() && !self.null)
    }

    /// Whether a value may be a string, as far as the schema says.
    pub(super) fn may_be_text(&self) -> bool {
        self.string || self.is_unknown()
    }

    /// Whether a value that is no string has one of these types.
    fn allows(&self, value: &Json) -> bool {
        match value {
            Json::Null => self.null,
            Json::Bool(_) => self.boolean,
            Json::Number(n) => self.number || (self.integer && is_whole(n)),
            Json::String(_) => false,
            Json::Array(_) => self.array,
            Json::Object(_) => self.object,
        }
    }
}

fn is_whole(number: &serde_json::Number) -> bool {
    !number.is_f64() || number.as_f64().is_some_and(|x| x.fract() == 0.0 && x.abs() < 9e15)
}

/// A number as an integer where only integers are allowed.
fn normal(value: Json, types: &Types) -> Json {
    match &value {
        Json::Number(n) if n.is_f64() && !types.number => match n.as_f64() {
            Some(x) => Json::from(x as i64),
            None => value,
        },
        _ => value,
    }
}

/// A value written as text, in the type the schema gives it: `None` for an empty one that can be no string. One that
/// does not convert stays a string.
pub(super) fn typed(text: &str, types: &Types) -> Option<Json> {
    let trimmed = text.trim();
    if types.is_unknown() || (types.only_strings() && !(types.null && trimmed == "null")) {
        return Some(Json::from(text));
    }
    if trimmed.is_empty() && !types.string {
        return types.null.then_some(Json::Null);
    }
    let lower = trimmed.to_ascii_lowercase();
    if types.boolean && (lower == "true" || lower == "false") {
        return Some(Json::from(lower == "true"));
    }
    if types.null && (lower == "null" || trimmed == "None") {
        return Some(Json::Null);
    }
    let parsed = serde_json::from_str::<Json>(trimmed).ok().filter(|value| types.allows(value));
    Some(parsed.map_or_else(|| Json::from(text), |value| normal(value, types)))
}

/// A JSON value in the type the schema gives it, where it has another one that says the same.
pub(super) fn coerce(value: Json, types: &Types) -> Json {
    match value {
        Json::String(text) if !types.is_unknown() && !types.string => {
            typed(&text, types).unwrap_or(Json::String(text))
        }
        Json::String(text) => Json::String(text),
        value if types.only_strings() && !types.allows(&value) => Json::String(value.to_string()),
        value if types.allows(&value) => normal(value, types),
        value => value,
    }
}
