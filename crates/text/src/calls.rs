//! What a model's answer is made of: reasoning, text, and tool calls in the two notations of the family.
//!
//! An [`AnswerParser`] takes the answer as it streams; its result does not depend on how the stream is cut. Nothing the
//! model wrote is dropped: what looks like a call and is none stays text. Once a declared tool's name and the beginning of
//! its arguments are there it is a call, and its arguments are given out as they come: what is wrong with them then, or
//! missing at the end of an answer that was cut off, is wrong or missing in them too.

mod arguments;
mod rules;
mod schema;

use serde_json::{Map, Value as Json};

use arguments::{Arguments, Missing, Step, json_head};
pub use rules::{BadTool, call_rules};
use schema::{Types, coerce};

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

/// A tool call, complete: the tool's name and its arguments as a JSON object.
type Call = (String, String);

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Thinking.
    Reasoning(String),
    /// Text for the user.
    Content(String),
    /// A call begins: the tool's name.
    Call(String),
    /// What comes next of the arguments of the last call. Together they are a JSON object, unless the answer was cut
    /// off or the model wrote something else.
    Arguments(String),
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
    /// In the arguments of a call.
    Arguments,
    /// After the arguments of a call in JSON.
    Closing,
    /// After a function block.
    After,
}

const THINK: &str = "<think>";
const THOUGHT: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALLED: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

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
    /// Whether a call without `</tool_call>` came last: a lone end tag is dropped.
    bare: bool,
    /// Those of the present call.
    arguments: Option<Arguments>,
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
            arguments: None,
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
            State::Arguments => self.arguments(out, last),
            State::Closing => self.closing(last),
            State::After => self.after(out, last),
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

    /// Whether `held` begins with a function block of a declared tool, or with the JSON of a call of one: its notation,
    /// the tool's name, and how long that head is.
    fn head(&self) -> Result<(CallFormat, String, usize), Missing> {
        let text = self.held.trim_start();
        let tag = text.strip_prefix(FUNCTION).filter(|_| self.format == Some(CallFormat::Xml));
        let (format, name, left) = match tag {
            Some(rest) => match rest.split_once('>') {
                Some((name, left)) => (CallFormat::Xml, name.trim().trim_matches('"').to_owned(), left.len()),
                None if rest.len() <= 256 => return Err(Missing::More),
                None => return Err(Missing::Other),
            },
            None if self.format == Some(CallFormat::Xml) && FUNCTION.starts_with(text) => {
                return Err(Missing::More);
            }
            None => {
                let (name, len) = json_head(text)?;
                (CallFormat::Json, name, text.len() - len)
            }
        };
        let declared = self.tools.contains_key(&name);
        if declared { Ok((format, name, self.held.len() - left)) } else { Err(Missing::Other) }
    }

    /// A call whose head is there.
    fn begin(&mut self, (format, name, len): (CallFormat, String, usize), out: &mut Vec<Piece>) {
        self.held.drain(..len);
        self.space.clear();
        (self.state, self.begun, self.started) = (State::Arguments, false, true);
        self.calls += 1;
        let schema = self.tools.get(&name).cloned().unwrap_or(Json::Null);
        self.arguments = Some(Arguments::new(format, schema));
        out.push(Piece::Call(name));
    }

    fn arguments(&mut self, out: &mut Vec<Piece>, last: bool) -> bool {
        let Some(mut arguments) = self.arguments.take() else {
            self.state = State::Content;
            return true;
        };
        let mut text = String::new();
        let step = arguments.advance(&mut self.held, &mut text, last);
        if !text.is_empty() {
            out.push(Piece::Arguments(text));
        }
        if step == Step::End {
            self.state = match arguments.notation() {
                CallFormat::Json => State::Closing,
                CallFormat::Xml => State::After,
            };
            return true;
        }
        self.arguments = Some(arguments);
        if let Step::Stray(text) = &step {
            self.text(text, out);
        }
        step != Step::Wait
    }

    /// Behind the arguments: what is left of the call's JSON says nothing more.
    fn closing(&mut self, last: bool) -> bool {
        let left = self.held.trim_start_matches([' ', '\t', '\r', '\n', '}']).len();
        self.held.drain(..self.held.len() - left);
        if !last && CALLED.starts_with(&self.held) {
            return false;
        }
        if self.held.starts_with(',') {
            match self.held.find(CALLED) {
                Some(at) => drop(self.held.drain(..at)),
                None if last => self.held.clear(),
                None => return false,
            }
        }
        self.end_tag()
    }

    /// The end tag, or text in its place.
    fn end_tag(&mut self) -> bool {
        self.state = State::Content;
        self.bare = !self.held.starts_with(CALLED);
        if !self.bare {
            self.held.drain(..CALLED.len());
        }
        true
    }

    /// Behind a function block: another one, the end tag, or text.
    fn after(&mut self, out: &mut Vec<Piece>, last: bool) -> bool {
        let space = self.held.len() - self.held.trim_start().len();
        self.held.drain(..space);
        if !last && (CALLED.starts_with(&self.held) || FUNCTION.starts_with(&self.held)) {
            return false;
        }
        if !self.held.starts_with(FUNCTION) {
            return self.end_tag();
        }
        match self.head() {
            Ok(head) => self.begin(head, out),
            Err(Missing::More) if !last => return false,
            Err(_) => return self.end_tag(),
        }
        true
    }

    /// Inside `<tool_call>`: a call of a declared tool, or whatever turns out to be one. Tries at every end tag, since one
    /// may be part of an argument.
    fn call(&mut self, out: &mut Vec<Piece>, last: bool) -> bool {
        match self.head() {
            Ok(head) => {
                self.begin(head, out);
                return true;
            }
            Err(Missing::More) if !last && !self.held.contains(CALLED) => return false,
            Err(_) => {}
        }
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
        match self.head() {
            Ok(head) => {
                self.begin(head, out);
                true
            }
            Err(Missing::More) if !last => false,
            Err(_) => self.give_up("", FUNCTION.len(), out),
        }
    }

    fn end_of_call(&mut self, calls: Vec<Call>, out: &mut Vec<Piece>) {
        self.space.clear();
        (self.state, self.begun, self.started) = (State::Content, false, true);
        self.calls += calls.len();
        let pieces = calls.into_iter().map(|(name, given)| [Piece::Call(name), Piece::Arguments(given)]);
        out.extend(pieces.flatten());
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
        let calls: Option<Vec<Call>> = items.into_iter().map(|item| self.json_call(item)).collect();
        calls.filter(|calls| !calls.is_empty()).map_or(Parsed::No, Parsed::Calls)
    }

    fn json_call(&self, item: Json) -> Option<Call> {
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
        Some((name, Json::Object(arguments).to_string()))
    }

    /// Function blocks of tools that are not declared, one or more.
    fn parse_xml(&self, body: &str) -> Parsed {
        let mut calls = Vec::new();
        let mut rest = body.trim();
        while !rest.is_empty() {
            let Some(after) = rest.strip_prefix(FUNCTION) else { return Parsed::No };
            let Some((name, after)) = after.split_once('>') else { return Parsed::Unfinished };
            let name = name.trim().trim_matches('"').to_owned();
            let mut arguments = Arguments::new(CallFormat::Xml, Json::Null);
            let (mut left, mut given) = (after.to_owned(), String::new());
            loop {
                match arguments.advance(&mut left, &mut given, false) {
                    Step::Again => {}
                    Step::Wait | Step::Stray(_) => return Parsed::Unfinished,
                    Step::End => break,
                }
            }
            calls.push((name, given));
            rest = after[after.len() - left.len()..].trim_start();
        }
        if calls.is_empty() { Parsed::No } else { Parsed::Calls(calls) }
    }
}

enum Parsed {
    Calls(Vec<Call>),
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
            | (Some(Piece::Reasoning(text)), Piece::Reasoning(more))
            | (Some(Piece::Arguments(text)), Piece::Arguments(more)) => text.push_str(&more),
            (_, piece) => out.push(piece),
        }
    }
    out
}
