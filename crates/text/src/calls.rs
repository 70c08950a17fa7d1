//! What a model's answer is made of: reasoning, text, and tool calls in the two notations of the family.
//!
//! An [`AnswerParser`] takes the answer as it streams; its result does not depend on how the stream is cut. Nothing the
//! model wrote is dropped: what looks like a call and is none stays text.

mod schema;

use serde_json::{Map, Value as Json};

use schema::{Types, coerce, typed};

/// How a model writes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Qwen3).
    Json,
    /// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>` (Qwen3-Coder).
    Xml,
}

impl CallFormat {
    /// The notation a chat template asks the model for; `None` if it knows no tools.
    pub fn of_template(source: &str) -> Option<CallFormat> {
        if source.contains("<function=") {
            Some(CallFormat::Xml)
        } else {
            source.contains("<tool_call>").then_some(CallFormat::Json)
        }
    }
}

/// A tool call, complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The tool's name.
    pub name: String,
    /// Its arguments as a JSON object.
    pub arguments: String,
}

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Thinking.
    Reasoning(String),
    /// Text for the user.
    Content(String),
    /// A call.
    Call(ToolCall),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Between `<think>` and `</think>`.
    Reasoning,
    /// Text.
    Content,
    /// After `<tool_call>`.
    Call,
    /// After `<function=` without `<tool_call>`.
    Bare,
}

const THINK: &str = "<think>";
const THOUGHT: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALLED: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";

/// Takes an answer apart as it streams.
#[derive(Debug, Clone)]
pub struct AnswerParser {
    format: Option<CallFormat>,
    /// Parameters of the declared tools, by name.
    tools: Map<String, Json>,
    state: State,
    /// Text that is not decided yet.
    held: String,
    /// White space to give out before more text; dropped before a call.
    space: String,
    /// Whether text or reasoning has been given out in the present state: before that, new lines are dropped.
    begun: bool,
    /// Whether anything but white space has come: thinking may only begin an answer.
    started: bool,
    /// Whether a call without `<tool_call>` came last: its lone end tag is dropped.
    bare: bool,
    calls: usize,
}

impl AnswerParser {
    /// A parser for an answer. `format` is `None` where no calls are wanted: then their notation is text. `tools` are
    /// those of the request, whose schemas give values their types. `thinking` says that the prompt ended inside
    /// `<think>`.
    pub fn new(format: Option<CallFormat>, tools: Option<&Json>, thinking: bool) -> AnswerParser {
        let mut declared = Map::new();
        for tool in tools.and_then(Json::as_array).into_iter().flatten() {
            let function = tool.get("function").unwrap_or(tool);
            if let Some(name) = function.get("name").and_then(Json::as_str) {
                declared.insert(name.to_owned(), function.get("parameters").cloned().unwrap_or(Json::Null));
            }
        }
        AnswerParser {
            format,
            tools: declared,
            state: if thinking { State::Reasoning } else { State::Content },
            held: String::new(),
            space: String::new(),
            begun: !thinking,
            started: thinking,
            bare: false,
            calls: 0,
        }
    }

    /// Calls so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// The pieces that are certain now that `text` has come.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        let mut out = Vec::new();
        while self.advance(&mut out, false) {}
        merge(out)
    }

    /// What is left at the end of the answer.
    pub fn finish(&mut self) -> Vec<Piece> {
        let mut out = Vec::new();
        while self.advance(&mut out, true) {}
        if self.calls == 0 && self.state == State::Content && !self.space.is_empty() {
            let space = std::mem::take(&mut self.space);
            out.push(Piece::Content(space));
        }
        merge(out)
    }

    /// One decision; false if more text is needed.
    fn advance(&mut self, out: &mut Vec<Piece>, last: bool) -> bool {
        match self.state {
            State::Reasoning => self.reasoning(out, last),
            State::Content => self.content(out, last),
            State::Call => self.call(out, last),
            State::Bare => self.bare_call(out, last),
        }
    }

    fn reasoning(&mut self, out: &mut Vec<Piece>, last: bool) -> bool {
        if let Some(at) = self.held.find(THOUGHT) {
            let text: String = self.held.drain(..at + THOUGHT.len()).collect();
            self.give(&text[..at], out, Piece::Reasoning);
            self.space.clear();
            (self.state, self.begun) = (State::Content, false);
            return true;
        }
        let ready = self.held.len() - if last { 0 } else { unfinished(&self.held, &[THOUGHT]) };
        let text: String = self.held.drain(..ready).collect();
        self.give(&text, out, Piece::Reasoning);
        false
    }

    fn content(&mut self, out: &mut Vec<Piece>, last: bool) -> bool {
        let mut tags: Vec<&str> = Vec::new();
        if !self.started {
            tags.push(THINK);
        }
        match self.format {
            Some(CallFormat::Json) => tags.push(CALL),
            Some(CallFormat::Xml) => tags.extend([CALL, FUNCTION]),
            None => {}
        }
        if self.bare {
            tags.push(CALLED);
        }
        let found = tags.iter().filter_map(|tag| Some((self.held.find(tag)?, *tag))).min();
        let Some((at, tag)) = found else {
            let ready = self.held.len() - if last { 0 } else { unfinished(&self.held, &tags) };
            let text: String = self.held.drain(..ready).collect();
            self.text(&text, out);
            return false;
        };
        let before: String = self.held.drain(..at).collect();
        self.text(&before, out);
        if tag == THINK && self.started {
            // Text came first after all: this is no thinking.
            let tag: String = self.held.drain(..THINK.len()).collect();
            self.text(&tag, out);
            return true;
        }
        match tag {
            THINK => {
                self.held.drain(..THINK.len());
                self.space.clear();
                (self.state, self.begun, self.started) = (State::Reasoning, false, true);
            }
            CALL => {
                self.held.drain(..CALL.len());
                self.state = State::Call;
            }
            CALLED => {
                self.held.drain(..CALLED.len());
                self.bare = false;
            }
            _ => self.state = State::Bare,
        }
        true
    }

    /// Inside `<tool_call>`: tries at every end tag, since one may be part of an argument.
    fn call(&mut self, out: &mut Vec<Piece>, last: bool) -> bool {
        let mut from = 0;
        while let Some(at) = self.held[from..].find(CALLED).map(|at| at + from) {
            match self.parse(&self.held[..at]) {
                Parsed::Calls(calls) => {
                    self.held.drain(..at + CALLED.len());
                    self.end_of_call(calls, out);
                    return true;
                }
                Parsed::Unfinished => from = at + CALLED.len(),
                Parsed::No => return self.give_up(CALL, at + CALLED.len(), out),
            }
        }
        if !last {
            return false;
        }
        // The answer ends without the end tag.
        match self.parse(&self.held) {
            Parsed::Calls(calls) => {
                self.held.clear();
                self.end_of_call(calls, out);
                true
            }
            _ => self.give_up(CALL, self.held.len(), out),
        }
    }

    /// After a bare `<function=`: a call only if the tool is declared.
    fn bare_call(&mut self, out: &mut Vec<Piece>, last: bool) -> bool {
        let rest = &self.held[FUNCTION.len()..];
        match rest.find('>') {
            Some(end) if self.tools.contains_key(rest[..end].trim()) => {}
            Some(_) => return self.give_up("", FUNCTION.len(), out),
            None if last || rest.len() > 256 => return self.give_up("", FUNCTION.len(), out),
            None => return false,
        }
        let mut from = 0;
        while let Some(at) = self.held[from..].find(FUNCTION_END).map(|at| at + from + FUNCTION_END.len()) {
            if let Parsed::Calls(calls) = self.parse(&self.held[..at]) {
                self.held.drain(..at);
                self.end_of_call(calls, out);
                self.bare = true;
                return true;
            }
            from = at;
        }
        if last { self.give_up("", self.held.len(), out) } else { false }
    }

    fn end_of_call(&mut self, calls: Vec<ToolCall>, out: &mut Vec<Piece>) {
        self.space.clear();
        (self.state, self.begun, self.started) = (State::Content, false, true);
        self.calls += calls.len();
        out.extend(calls.into_iter().map(Piece::Call));
    }

    /// No call after all: `tag` and `len` bytes of what is held are text.
    fn give_up(&mut self, tag: &str, len: usize, out: &mut Vec<Piece>) -> bool {
        self.state = State::Content;
        let text: String = self.held.drain(..len).collect();
        self.text(tag, out);
        self.text(&text, out);
        true
    }

    fn text(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.started |= !text.trim().is_empty();
        self.give(text, out, Piece::Content);
    }

    /// Gives out text without new lines at its beginning where it follows a tag, and holds back white space at its end.
    fn give(&mut self, text: &str, out: &mut Vec<Piece>, piece: fn(String) -> Piece) {
        let text = if self.begun { text } else { text.trim_start_matches(['\n', '\r']) };
        let solid = text.trim_end().len();
        if solid > 0 {
            self.begun = true;
            let mut whole = std::mem::take(&mut self.space);
            whole.push_str(&text[..solid]);
            out.push(piece(whole));
        }
        self.space.push_str(&text[solid..]);
    }

    fn parse(&self, body: &str) -> Parsed {
        match self.format {
            Some(CallFormat::Xml) if body.contains(FUNCTION) => self.parse_xml(body),
            _ => self.parse_json(body),
        }
    }

    fn parse_json(&self, body: &str) -> Parsed {
        let value: Json = match serde_json::from_str(body.trim()) {
            Ok(value) => value,
            Err(error) if error.is_eof() => return Parsed::Unfinished,
            Err(_) => return Parsed::No,
        };
        let items = match value {
            Json::Array(items) => items,
            value => vec![value],
        };
        let calls: Option<Vec<ToolCall>> = items.into_iter().map(|item| self.json_call(item)).collect();
        calls.filter(|calls| !calls.is_empty()).map_or(Parsed::No, Parsed::Calls)
    }

    fn json_call(&self, item: Json) -> Option<ToolCall> {
        let Json::Object(mut item) = item else { return None };
        let Some(Json::String(name)) = item.remove("name") else { return None };
        let arguments = match item.remove("arguments").or_else(|| item.remove("parameters")) {
            None | Some(Json::Null) => Map::new(),
            Some(Json::Object(map)) => map,
            Some(Json::String(text)) => serde_json::from_str(&text).ok()?,
            Some(_) => return None,
        };
        let parameters = self.tools.get(&name).unwrap_or(&Json::Null);
        let typed = |(key, value): (String, Json)| {
            let types = Types::of_parameter(parameters, &key);
            (key, coerce(value, &types))
        };
        let arguments: Map<String, Json> = arguments.into_iter().map(typed).collect();
        Some(ToolCall { name, arguments: Json::Object(arguments).to_string() })
    }

    /// Function blocks, one or more.
    fn parse_xml(&self, body: &str) -> Parsed {
        let mut calls = Vec::new();
        let mut rest = body.trim();
        while !rest.is_empty() {
            let Some(after) = rest.strip_prefix(FUNCTION) else { return Parsed::No };
            let Some((name, after)) = after.split_once('>') else { return Parsed::Unfinished };
            let name = name.trim().trim_matches('"').to_owned();
            let Some((arguments, after)) = self.parameters(&name, after) else { return Parsed::Unfinished };
            calls.push(ToolCall { name, arguments: Json::Object(arguments).to_string() });
            rest = after.trim_start();
        }
        if calls.is_empty() { Parsed::No } else { Parsed::Calls(calls) }
    }

    /// Parameters up to the end of the function block, and what follows it; `None` if that has not come.
    fn parameters<'t>(&self, name: &str, text: &'t str) -> Option<(Map<String, Json>, &'t str)> {
        const PARAMETER: &str = "<parameter=";
        const PARAMETER_END: &str = "</parameter>";
        let schema = self.tools.get(name).unwrap_or(&Json::Null);
        let mut arguments = Map::new();
        let mut rest = text.trim_start();
        loop {
            if let Some(after) = rest.strip_prefix(FUNCTION_END) {
                return Some((arguments, after));
            }
            let (key, after) = rest.strip_prefix(PARAMETER)?.split_once('>')?;
            // An end tag inside a value is not followed by what follows a value.
            let ends = after
                .match_indices(PARAMETER_END)
                .map(|(at, tag)| (at, after[at + tag.len()..].trim_start()));
            let (at, next) = ends
                .into_iter()
                .find(|(_, next)| next.starts_with(PARAMETER) || next.starts_with(FUNCTION_END))?;
            let value = &after[..at];
            let value = value.strip_prefix("\r\n").or(value.strip_prefix('\n')).unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let key = key.trim().trim_matches('"');
            if let Some(value) = typed(value, &Types::of_parameter(schema, key)) {
                arguments.insert(key.to_owned(), value);
            }
            rest = next;
        }
    }
}

enum Parsed {
    Calls(Vec<ToolCall>),
    /// It may become a call with more text.
    Unfinished,
    No,
}

/// Length of the longest end of `text` that begins one of `tags`.
fn unfinished(text: &str, tags: &[&str]) -> usize {
    let begins = |end: &str| tags.iter().any(|tag| tag.len() > end.len() && tag.starts_with(end));
    let longest = tags.iter().map(|tag| tag.len()).max().unwrap_or(0);
    (1..longest.min(text.len() + 1))
        .rev()
        .find(|&len| text.get(text.len() - len..).is_some_and(begins))
        .unwrap_or(0)
}

/// Joins neighbours of one kind.
fn merge(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut out: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (out.last_mut(), piece) {
            (Some(Piece::Content(text)), Piece::Content(more))
            | (Some(Piece::Reasoning(text)), Piece::Reasoning(more)) => text.push_str(&more),
            (_, piece) => out.push(piece),
        }
    }
    out
}
