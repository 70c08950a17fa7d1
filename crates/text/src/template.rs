//! Chat templates.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, ErrorKind, Value, escape_formatter};
use serde_json::Value as Json;

use crate::guard::{Guard, Origin, Segment, has_mark};
use crate::{Tokenizer, json, shallow, time};

/// The only template in the environment.
const NAME: &str = "chat_template";
/// Steps (or pieces of 64 bytes written) that every rendering may take, and one more for each byte of input: a
/// template loops over the messages a few times, not without end. This bounds its output to 256 MiB and 64 times
/// the input.
const FUEL: u64 = 4_000_000;
/// Nesting of messages and tools beyond which a request is refused.
const DEPTH: usize = 100;

/// A template that cannot be compiled or rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template is not valid Jinja, or uses something that is not implemented.
    #[error("chat template, line {line}: {message}")]
    Syntax {
        /// Line of the template, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// The template refused the conversation with `raise_exception`: the request's fault, in the template's words.
    #[error("the chat template refuses this conversation: {message} (line {line})")]
    Refused {
        /// Line of the template.
        line: usize,
        /// The template's words.
        message: String,
    },
    /// The template does not come to an end.
    #[error("chat template, line {line}: stopped, it takes too many steps or writes too much")]
    Runaway {
        /// Line of the template.
        line: usize,
    },
    /// Rendering failed: a missing field, an operation on the wrong type.
    #[error("chat template, line {line}: {message}")]
    Render {
        /// Line of the template.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// The template's source uses one of the characters U+FDD0 to U+FDD3, which guard values.
    #[error("the chat template contains one of the characters U+FDD0 to U+FDD3, which are reserved")]
    ReservedCharacter,
    /// Messages, tools or variables are nested too deeply.
    #[error("{0} are nested more than {DEPTH} levels deep")]
    TooDeep(&'static str),
}

/// A compiled chat template with the special tokens of its tokenizer.
///
/// Renders as Hugging Face's `apply_chat_template` does (Jinja2 with `trim_blocks` and `lstrip_blocks`, Python's
/// printing, `tojson`, `raise_exception`, `strftime_now`), and keeps apart what the template wrote from what users,
/// tools and schemas did: see [`Rendered`].
pub struct ChatTemplate {
    environment: Environment<'static>,
    guard: Guard,
    /// `bos_token`, `eos_token`, `pad_token` as templates see them.
    named: Vec<(&'static str, String)>,
    now: Option<i64>,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("named", &self.named).finish_non_exhaustive()
    }
}

/// A rendered prompt: what to show, and what [`Tokenizer::encode_rendered`] encodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    segments: Vec<Segment>,
}

impl Rendered {
    /// Ordinary text and template tokens, in order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The prompt as text. It does not tell tokens from text that looks like them: never encode this.
    pub fn text(&self) -> String {
        let text = |segment: &Segment| match segment {
            Segment::Text(text) | Segment::Token { text, .. } => text.clone(),
        };
        self.segments.iter().map(text).collect()
    }
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] with its line, [`TemplateError::ReservedCharacter`].
    pub fn new(source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate, TemplateError> {
        if has_mark(source) {
            return Err(TemplateError::ReservedCharacter);
        }
        let mut environment = environment();
        let source = shallow::guard_assignments(source, environment.syntax().clone())
            .map_err(|error| describe(&error))?;
        environment.add_template_owned(NAME, source).map_err(|error| describe(&error))?;
        let named =
            [("bos_token", tokenizer.bos()), ("eos_token", tokenizer.eos()), ("pad_token", tokenizer.pad())];
        let text = |id| String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap_or_default()).into_owned();
        let named = named.into_iter().filter_map(|(name, id)| Some((name, text(id?)))).collect();
        Ok(ChatTemplate { environment, guard: Guard::new(tokenizer.specials()), named, now: None })
    }

    /// Fixes what `strftime_now` takes for now, in seconds since 1970, local time: prompts that do not change can be
    /// read from a cache. Without it, `strftime_now` is the present in UTC.
    pub fn with_time(mut self, seconds: i64) -> ChatTemplate {
        self.now = Some(seconds);
        self
    }

    /// Renders a conversation. `messages` is the array of a chat request, `tools` its tools, `variables` what else
    /// the template reads (`enable_thinking`).
    ///
    /// # Errors
    /// [`TemplateError::Refused`] for conversations that the template rejects, others for templates that fail, run
    /// away, or input nested too deeply.
    pub fn render(
        &self,
        messages: &Json,
        tools: Option<&Json>,
        add_generation_prompt: bool,
        variables: &serde_json::Map<String, Json>,
    ) -> Result<Rendered, TemplateError> {
        let mut context = vec![("add_generation_prompt".to_owned(), Value::from(add_generation_prompt))];
        context.push(("documents".to_owned(), Value::from(())));
        context
            .extend(self.named.iter().map(|(name, text)| ((*name).to_owned(), Value::from(text.as_str()))));
        let mut marker = Marker { guard: &self.guard, bytes: 0 };
        for (name, value) in variables {
            context.push((
                name.clone(),
                marker.value(value, Origin::Outside, DEPTH).ok_or(TemplateError::TooDeep("variables"))?,
            ));
        }
        let tools = tools.map_or(Some(Value::from(())), |tools| marker.value(tools, Origin::Outside, DEPTH));
        context.push(("tools".to_owned(), tools.ok_or(TemplateError::TooDeep("tools"))?));
        let messages = marker.messages(messages).ok_or(TemplateError::TooDeep("messages"))?;
        context.push(("messages".to_owned(), messages));

        let mut environment = self.environment.clone();
        environment.set_fuel(Some(FUEL.saturating_add(marker.bytes)));
        let now = self.now;
        environment.add_function("strftime_now", move |format: &str| strftime_now(now, format));
        let template = environment.get_template(NAME).map_err(|error| describe(&error))?;
        let context = Value::from_pairs(context);
        let marked = template.render(context).map_err(|error| describe(&error))?;
        Ok(Rendered { segments: self.guard.resolve(&marked) })
    }
}

/// Jinja2 as Hugging Face sets it up.
fn environment() -> Environment<'static> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    let mut environment = Environment::new();
    environment.set_syntax(syntax.expect("the standard delimiters are valid"));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", json::tojson);
    environment.add_filter(shallow::FILTER, shallow::shallow);
    environment.add_filter("string", string);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.set_formatter(|out, state, value| match float(value) {
        Some(text) => out.write_str(&text).map_err(|_| ErrorKind::WriteFailure.into()),
        None => escape_formatter(out, state, value),
    });
    environment.add_function("raise_exception", raise_exception);
    environment
}

/// A float as Python prints it; `None` for other values, which the engine prints so itself.
fn float(value: &Value) -> Option<String> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    is_float.then(|| f64::try_from(value.clone()).ok().map(json::python_float))?
}

fn string(value: &Value) -> Value {
    match (value.as_str(), float(value)) {
        (Some(_), _) => value.clone(),
        (None, Some(text)) => Value::from(text),
        (None, None) => Value::from(value.to_string()),
    }
}

/// As in Python, where `none` is not iterable (templates test `tools` so) but an undefined value is.
fn is_iterable(value: &Value) -> bool {
    !matches!(value.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number)
}

/// As in Jinja2, where everything with a length and items is a sequence: strings, mappings, undefined values.
fn is_sequence(value: &Value) -> bool {
    is_iterable(value) && value.kind() != ValueKind::Iterable
}

/// Marks an error as raised by the template itself.
#[derive(Debug, thiserror::Error)]
#[error("raised by the template")]
struct Raised;

fn raise_exception(message: &Value) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.to_string()).with_source(Raised))
}

fn strftime_now(now: Option<i64>, format: &str) -> Result<String, minijinja::Error> {
    let present = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
    time::strftime(now.unwrap_or_else(present), format).ok_or_else(|| {
        minijinja::Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now: format `{format}` is not supported"),
        )
    })
}

fn describe(error: &minijinja::Error) -> TemplateError {
    let line = error.line().unwrap_or(0);
    let detail = error.detail().map(crate::guard::unmark);
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if error.is::<Raised>() {
            return TemplateError::Refused { line, message: detail.unwrap_or_default() };
        }
        source = error.source();
    }
    let message = match detail {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    match error.kind() {
        ErrorKind::SyntaxError | ErrorKind::BadEscape => TemplateError::Syntax { line, message },
        ErrorKind::OutOfFuel => TemplateError::Runaway { line },
        _ => TemplateError::Render { line, message },
    }
}

/// Turns JSON into template values, marked on the way.
struct Marker<'g> {
    guard: &'g Guard,
    /// Bytes of strings seen, and a little for every value.
    bytes: u64,
}

impl Marker<'_> {
    /// `None` if nested more than `depth` levels.
    fn value(&mut self, json: &Json, origin: Origin, depth: usize) -> Option<Value> {
        let depth = depth.checked_sub(1)?;
        self.bytes += 16;
        Some(match json {
            Json::Null => Value::from(()),
            Json::Bool(value) => Value::from(*value),
            Json::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(value), _) => Value::from(value),
                (None, Some(value)) => Value::from(value),
                (None, None) => Value::from(number.as_f64()?),
            },
            Json::String(text) => self.string(text, origin),
            Json::Array(items) => {
                let items: Option<Vec<Value>> =
                    items.iter().map(|item| self.value(item, origin, depth)).collect();
                Value::from(items?)
            }
            Json::Object(map) => {
                let mut pairs = Vec::with_capacity(map.len());
                for (key, value) in map {
                    pairs.push((self.string(key, Origin::Outside), self.value(value, origin, depth)?));
                }
                Value::from_pairs(pairs)
            }
        })
    }

    fn string(&mut self, text: &str, origin: Origin) -> Value {
        self.bytes += text.len() as u64;
        Value::from(self.guard.mark(text, origin))
    }

    fn messages(&mut self, messages: &Json) -> Option<Value> {
        let Json::Array(list) = messages else { return self.value(messages, Origin::Outside, DEPTH) };
        let list: Option<Vec<Value>> = list.iter().map(|message| self.message(message)).collect();
        Some(Value::from(list?))
    }

    /// What the assistant said before may hold `<think>` and the like; everything else is from outside.
    fn message(&mut self, message: &Json) -> Option<Value> {
        let Json::Object(map) = message else { return self.value(message, Origin::Outside, DEPTH) };
        let assistant = map.get("role").and_then(Json::as_str) == Some("assistant");
        let mut pairs = Vec::with_capacity(map.len());
        for (key, value) in map {
            let spoken = matches!(key.as_str(), "content" | "reasoning_content" | "reasoning" | "thinking");
            let origin = if assistant && spoken { Origin::Assistant } else { Origin::Outside };
            pairs.push((self.string(key, Origin::Outside), self.value(value, origin, DEPTH)?));
        }
        Some(Value::from_pairs(pairs))
    }
}
