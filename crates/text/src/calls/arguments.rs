//! The arguments of a call as they are written: a JSON object that grows with the answer.
//!
//! Texts are given out as they come, other values when they are complete, since only then their type is certain. What
//! has been given out does not depend on how the answer is cut into pieces.

use serde_json::Value as Json;

use super::schema::{Types, coerce, typed};
use super::{CALLED, CallFormat, FUNCTION_END, PARAMETER, PARAMETER_END, unfinished};

/// Longest name of a parameter.
const NAME: usize = 512;

/// Where in the arguments the answer is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    /// Before a parameter or the end.
    Between,
    /// Behind the tag of a parameter: a new line there is no part of the value.
    Opened,
    /// In a text.
    Text,
    /// In another value; how far it has been looked through.
    Value(Scan),
    /// In something that is no JSON.
    Broken,
}

/// What a look at the text found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Something was decided: look again.
    Again,
    /// More text is needed.
    Wait,
    /// Text that belongs to no argument.
    Stray(String),
    /// The arguments are complete, or will never be.
    End,
}

/// The arguments of one call.
#[derive(Debug, Clone)]
pub(super) struct Arguments {
    notation: CallFormat,
    /// The schema of the tool's parameters.
    schema: Json,
    place: Place,
    /// Whether no argument has been given out.
    first: bool,
    /// The present parameter.
    key: String,
    types: Types,
}

impl Arguments {
    /// Arguments that begin behind `<function=NAME>`, or behind the brace that opens their object.
    pub(super) fn new(notation: CallFormat, schema: Json) -> Arguments {
        Arguments {
            notation,
            schema,
            place: Place::Between,
            first: true,
            key: String::new(),
            types: Types::default(),
        }
    }

    /// How the call is written.
    pub(super) fn notation(&self) -> CallFormat {
        self.notation
    }

    /// Takes what is certain from `held` and appends what it adds to the JSON object to `out`. `last` says that the
    /// answer ends here.
    pub(super) fn advance(&mut self, held: &mut String, out: &mut String, last: bool) -> Step {
        match (self.notation, &self.place) {
            (CallFormat::Xml, Place::Between) => self.tag(held, out, last),
            (CallFormat::Xml, _) => self.tagged(held, out, last),
            (CallFormat::Json, Place::Between) => self.member(held, out, last),
            (CallFormat::Json, Place::Text) => self.string(held, out, last),
            (CallFormat::Json, Place::Value(_)) => self.value(held, out, last),
            (CallFormat::Json, _) => broken(held, out, last),
        }
    }

    /// The object begins with its first argument.
    fn comma(&mut self, out: &mut String) {
        out.push(if self.first { '{' } else { ',' });
        self.first = false;
    }

    fn close(&mut self, out: &mut String) -> Step {
        if self.first {
            out.push('{');
        }
        out.push('}');
        Step::End
    }

    /// The present parameter's name, before its value.
    fn name(&mut self, out: &mut String) {
        self.comma(out);
        out.push_str(&Json::from(self.key.as_str()).to_string());
        out.push(':');
    }

    fn give(&mut self, value: &Json, out: &mut String) {
        self.name(out);
        out.push_str(&value.to_string());
    }

    /// Begins a text; its end follows.
    fn open_text(&mut self, out: &mut String) {
        self.name(out);
        out.push('"');
    }

    /// Ends without being complete: what is there stays as it is, so that nobody takes it for complete.
    fn cut(&mut self, out: &mut String) -> Step {
        if self.first {
            out.push('{');
        }
        Step::End
    }

    /// Between tags.
    fn tag(&mut self, held: &mut String, out: &mut String, last: bool) -> Step {
        drop_space(held);
        if held.starts_with(FUNCTION_END) {
            held.drain(..FUNCTION_END.len());
            return self.close(out);
        }
        if held.starts_with(CALLED) {
            return self.close(out);
        }
        if let Some(rest) = held.strip_prefix(PARAMETER) {
            match rest.find('>') {
                Some(end) if end <= NAME => {
                    self.key = rest[..end].trim().trim_matches('"').to_owned();
                    self.types = Types::of_parameter(&self.schema, &self.key);
                    self.place = Place::Opened;
                    held.drain(..PARAMETER.len() + end + 1);
                    return Step::Again;
                }
                None if rest.len() <= NAME && !last => return Step::Wait,
                _ => {}
            }
        } else if !last && begins(held, &[FUNCTION_END, CALLED, PARAMETER]) {
            return Step::Wait;
        }
        if held.is_empty() {
            return self.cut(out);
        }
        // As a whole, however it came: up to what may be a tag.
        let end = held.char_indices().skip(1).find(|(_, letter)| *letter == '<').map(|(at, _)| at);
        if end.is_none() && !last {
            return Step::Wait;
        }
        let stray: String = held.drain(..end.unwrap_or(held.len())).collect();
        Step::Stray(stray.trim_end().to_owned())
    }

    /// A value between tags.
    fn tagged(&mut self, held: &mut String, out: &mut String, last: bool) -> Step {
        if self.place == Place::Opened {
            if !last && (held.is_empty() || held == "\r") {
                return Step::Wait;
            }
            let line = ["\r\n", "\n"].into_iter().find(|line| held.starts_with(line));
            held.drain(..line.map_or(0, str::len));
            self.place = Place::Value(Scan::default());
            if self.types.is_text() {
                self.open_text(out);
                self.place = Place::Text;
            }
        }
        let text = self.place == Place::Text;
        let from = if let Place::Value(scan) = &self.place { scan.at } else { 0 };
        match end_of_value(held, from, last) {
            Some((at, len)) => {
                let value = held[..at].strip_suffix('\n').unwrap_or(&held[..at]);
                if text {
                    escape(value, out);
                    out.push('"');
                } else if let Some(value) = typed(value, &self.types) {
                    self.give(&value, out);
                }
                held.drain(..len);
                self.place = Place::Between;
                Step::Again
            }
            None if last => {
                if !text {
                    self.open_text(out);
                }
                escape(held, out);
                held.clear();
                self.cut(out)
            }
            None => {
                // What may be the end, and the new line before it, have to wait.
                let safe =
                    held.rfind(PARAMETER_END).filter(|&at| undecided(&held[at + PARAMETER_END.len()..]));
                let safe = safe.unwrap_or(held.len() - unfinished(held, &[PARAMETER_END]));
                let safe = held[..safe].strip_suffix('\n').map_or(safe, str::len);
                if text {
                    escape(&held[..safe], out);
                    held.drain(..safe);
                } else {
                    self.place = Place::Value(Scan { at: safe, ..Scan::default() });
                }
                Step::Wait
            }
        }
    }

    /// Between the members of an object.
    fn member(&mut self, held: &mut String, out: &mut String, last: bool) -> Step {
        drop_space(held);
        if held.starts_with('}') {
            held.drain(..1);
            return self.close(out);
        }
        let mut cursor = Cursor(held);
        let key = cursor.separator(self.first).and_then(|()| {
            let key = cursor.string()?;
            cursor.symbol(':')?;
            cursor.space();
            if cursor.0.is_empty() { Err(Missing::More) } else { Ok(key) }
        });
        match key {
            Ok(key) => {
                let used = held.len() - cursor.0.len();
                held.drain(..used);
                self.types = Types::of_parameter(&self.schema, &key);
                self.key = key;
                self.place = Place::Value(Scan::default());
                if held.starts_with('"') && self.types.may_be_text() {
                    held.drain(..1);
                    self.open_text(out);
                    self.place = Place::Text;
                }
                Step::Again
            }
            Err(Missing::More) if !last && !held.contains(CALLED) => Step::Wait,
            Err(Missing::More) if held.is_empty() => self.cut(out),
            Err(_) => self.break_off(out),
        }
    }

    /// What follows is no JSON, and stays as it is.
    fn break_off(&mut self, out: &mut String) -> Step {
        self.cut(out);
        self.place = Place::Broken;
        Step::Again
    }

    /// In a JSON string.
    fn string(&mut self, held: &mut String, out: &mut String, last: bool) -> Step {
        let (used, ended) = mend_string(held, out, last);
        held.drain(..used);
        if ended {
            self.place = Place::Between;
            return Step::Again;
        }
        if last { Step::End } else { Step::Wait }
    }

    /// In another JSON value.
    fn value(&mut self, held: &mut String, out: &mut String, last: bool) -> Step {
        let Place::Value(scan) = &mut self.place else { return Step::Again };
        let Some(end) = scan.end(held) else {
            if !last {
                return Step::Wait;
            }
            self.name(out);
            return self.break_off(out);
        };
        let mut mended = String::new();
        let written = &held[..end];
        let value = serde_json::from_str(written).ok().or_else(|| {
            // Models forget to escape new lines.
            mend(written, &mut mended);
            serde_json::from_str(&mended).ok()
        });
        match value {
            Some(value) => {
                self.give(&coerce(value, &self.types), out);
                held.drain(..end);
                self.place = Place::Between;
                Step::Again
            }
            None => {
                self.name(out);
                self.break_off(out)
            }
        }
    }
}

/// No JSON: all of it up to the end tag, as it is.
fn broken(held: &mut String, out: &mut String, last: bool) -> Step {
    match held.find(CALLED) {
        Some(at) => {
            out.extend(held.drain(..at));
            Step::End
        }
        None => {
            let safe = held.len() - if last { 0 } else { unfinished(held, &[CALLED]) };
            out.extend(held.drain(..safe));
            if last { Step::End } else { Step::Wait }
        }
    }
}

fn drop_space(held: &mut String) {
    let space = held.len() - held.trim_start().len();
    held.drain(..space);
}

/// Whether one of `tags` begins with all of `text`.
fn begins(text: &str, tags: &[&str]) -> bool {
    tags.iter().any(|tag| tag.starts_with(text))
}

/// What may follow a value between tags.
const AFTER: [&str; 3] = [PARAMETER, FUNCTION_END, CALLED];

/// Whether what follows an end tag does not yet say if that was the end.
fn undecided(after: &str) -> bool {
    begins(after.trim_start(), &AFTER)
}

/// The end of a value between tags, and where what follows begins. An end tag inside a value is not followed by what
/// follows a value.
fn end_of_value(held: &str, from: usize, last: bool) -> Option<(usize, usize)> {
    let ends = held[from..].match_indices(PARAMETER_END).map(|(at, tag)| (from + at, from + at + tag.len()));
    ends.into_iter().find(|&(_, next)| {
        let after = held[next..].trim_start();
        AFTER.iter().any(|tag| after.starts_with(tag)) || (last && after.is_empty())
    })
}

/// Text as it stands in a JSON string.
fn escape(text: &str, out: &mut String) {
    let quoted = Json::from(text).to_string();
    out.push_str(&quoted[1..quoted.len() - 1]);
}

/// Copies the inside of a JSON string up to its end, and makes what JSON does not allow there what it was meant to be.
/// How much was copied, and whether the end was there.
fn mend_string(text: &str, out: &mut String, last: bool) -> (usize, bool) {
    let mut letters = text.char_indices().peekable();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => {
                out.push('"');
                return (at + 1, true);
            }
            '\\' => {
                let rest = &text[at + 1..];
                let Some(escaped) = rest.chars().next().filter(|&c| c != 'u' || rest.len() >= 5) else {
                    if last {
                        out.push_str(&text[at..]);
                        return (text.len(), false);
                    }
                    return (at, false);
                };
                let hex =
                    rest.as_bytes().get(1..5).is_some_and(|code| code.iter().all(u8::is_ascii_hexdigit));
                let good = "\"\\/bfnrt".contains(escaped) || (escaped == 'u' && hex);
                out.push_str(if good { "\\" } else { "\\\\" });
                // A quotation mark or backslash that is escaped must not be seen again.
                if good {
                    out.push(escaped);
                    letters.next();
                }
            }
            _ if letter < ' ' => escape(letter.encode_utf8(&mut [0; 4]), out),
            _ => out.push(letter),
        }
    }
    (text.len(), false)
}

/// Copies a JSON value with its strings mended.
fn mend(text: &str, out: &mut String) {
    let mut rest = text;
    while let Some(quote) = rest.find('"') {
        out.push_str(&rest[..=quote]);
        rest = &rest[quote + 1..];
        let (used, _) = mend_string(rest, out, true);
        rest = &rest[used..];
    }
    out.push_str(rest);
}

/// A search for the end of a JSON value, which can go on where it stopped.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Scan {
    at: usize,
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Scan {
    /// Where the value ends that `text` begins with, if it does.
    fn end(&mut self, text: &str) -> Option<usize> {
        let bytes = text.as_bytes();
        while let Some(&byte) = bytes.get(self.at) {
            if self.in_string {
                (self.in_string, self.escaped) =
                    (self.escaped || byte != b'"', !self.escaped && byte == b'\\');
                if !self.in_string && self.depth == 0 {
                    return Some(self.at + 1);
                }
            } else {
                match byte {
                    b'"' => self.in_string = true,
                    b'{' | b'[' => self.depth += 1,
                    b'}' | b']' if self.depth > 0 => {
                        self.depth -= 1;
                        if self.depth == 0 {
                            return Some(self.at + 1);
                        }
                    }
                    b',' | b'}' | b']' | b' ' | b'\t' | b'\r' | b'\n' | b'<' if self.depth == 0 => {
                        return Some(self.at);
                    }
                    _ => {}
                }
            }
            self.at += 1;
        }
        None
    }
}

/// Why something is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    /// It may come with more text.
    More,
    /// Something else is there.
    Other,
}

/// Reads JSON step by step.
pub(super) struct Cursor<'t>(pub(super) &'t str);

impl Cursor<'_> {
    fn space(&mut self) {
        self.0 = self.0.trim_start();
    }

    /// A symbol with white space around it.
    pub(super) fn symbol(&mut self, symbol: char) -> Result<(), Missing> {
        self.space();
        self.0 = match self.0.strip_prefix(symbol) {
            Some(rest) => rest,
            None if self.0.is_empty() => return Err(Missing::More),
            None => return Err(Missing::Other),
        };
        Ok(())
    }

    fn separator(&mut self, first: bool) -> Result<(), Missing> {
        if first { Ok(()) } else { self.symbol(',') }
    }

    /// A string with white space before it.
    pub(super) fn string(&mut self) -> Result<String, Missing> {
        self.space();
        if !self.0.is_empty() && !self.0.starts_with('"') {
            return Err(Missing::Other);
        }
        let end = Scan::default().end(self.0).ok_or(Missing::More)?;
        let string = serde_json::from_str(&self.0[..end]).map_err(|_| Missing::Other)?;
        self.0 = &self.0[end..];
        Ok(string)
    }
}

/// The head of a call in JSON up to the brace that opens its arguments: the tool's name, and the head's length.
pub(super) fn json_head(text: &str) -> Result<(String, usize), Missing> {
    let mut cursor = Cursor(text);
    let key = |cursor: &mut Cursor, names: &[&str]| {
        let key = cursor.string()?;
        if names.contains(&key.as_str()) { cursor.symbol(':') } else { Err(Missing::Other) }
    };
    cursor.symbol('{')?;
    key(&mut cursor, &["name"])?;
    let name = cursor.string()?;
    cursor.symbol(',')?;
    key(&mut cursor, &["arguments", "parameters"])?;
    cursor.symbol('{')?;
    Ok((name, text.len() - cursor.0.len()))
}
