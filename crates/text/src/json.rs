//! `tojson` as Hugging Face defines it for chat templates: Python's `json.dumps` without escaping for HTML.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use crate::guard::{ESCAPE, is_mark, unescape};

/// Nesting beyond which a value is refused.
const DEPTH: usize = 128;

/// `tojson(value, ensure_ascii=False, indent=None, *, separators=None, sort_keys=False)`.
pub(crate) fn tojson(
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let ensure_ascii = ensure_ascii.or(kwargs.get("ensure_ascii")?).unwrap_or(false);
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let indent = indent_of(indent.or(kwargs.get("indent")?))?;
    let (item, key) = match kwargs.get::<Option<Value>>("separators")?.filter(|value| !value.is_none()) {
        Some(pair) => separators_of(&pair)?,
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    kwargs.assert_all_used()?;
    let mut writer = Writer { out: String::new(), ensure_ascii, sort_keys, indent, item, key };
    writer.value(value, 0)?;
    Ok(writer.out)
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {}", message.into()))
}

/// One level of indentation: a number of spaces or a string.
fn indent_of(indent: Option<Value>) -> Result<Option<String>, Error> {
    let Some(indent) = indent.filter(|value| !value.is_none()) else { return Ok(None) };
    if let Some(text) = indent.as_str() {
        return Ok(Some(text.to_owned()));
    }
    let spaces = i64::try_from(indent).map_err(|_| invalid("indent is neither a number nor a string"))?;
    match usize::try_from(spaces.max(0)) {
        Ok(spaces) if spaces <= 64 => Ok(Some(" ".repeat(spaces))),
        _ => Err(invalid("indent is more than 64")),
    }
}

fn separators_of(pair: &Value) -> Result<(String, String), Error> {
    let parts: Vec<Value> = pair.try_iter()?.take(3).collect();
    match parts.as_slice() {
        [item, key] => match (item.as_str(), key.as_str()) {
            (Some(item), Some(key)) => Ok((item.to_owned(), key.to_owned())),
            _ => Err(invalid("separators are not strings")),
        },
        _ => Err(invalid("separators are not a pair")),
    }
}

struct Writer {
    out: String,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    /// Between items.
    item: String,
    /// Between key and value.
    key: String,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH {
            return Err(invalid(format!("more than {DEPTH} levels deep")));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            kind => return Err(invalid(format!("a value of type {kind} is not JSON"))),
        }
        Ok(())
    }

    fn number(&mut self, value: &Value) {
        match f64::try_from(value.clone()) {
            Ok(float) if !value.is_integer() => self.out.push_str(&python_float(float)),
            _ => self.out.push_str(&value.to_string()),
        }
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut empty = true;
        for item in value.try_iter()? {
            self.begin_item(empty, depth + 1);
            empty = false;
            self.value(&item, depth + 1)?;
        }
        self.end(']', empty, depth);
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort_keys {
            keys.sort_by(|a, b| a.as_str().cmp(&b.as_str()));
        }
        self.out.push('{');
        let empty = keys.is_empty();
        for (index, key) in keys.into_iter().enumerate() {
            self.begin_item(index == 0, depth + 1);
            self.key(&key)?;
            let separator = std::mem::take(&mut self.key);
            self.out.push_str(&separator);
            self.key = separator;
            self.value(&value.get_item(&key)?, depth + 1)?;
        }
        self.end('}', empty, depth);
        Ok(())
    }

    /// Keys that are not strings become strings.
    fn key(&mut self, key: &Value) -> Result<(), Error> {
        if let Some(text) = key.as_str() {
            self.string(text);
            return Ok(());
        }
        if !matches!(key.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number) {
            return Err(invalid(format!("a key of type {} is not JSON", key.kind())));
        }
        self.out.push('"');
        self.value(key, 0)?;
        self.out.push('"');
        Ok(())
    }

    fn begin_item(&mut self, first: bool, depth: usize) {
        if !first {
            self.out.push_str(&self.item);
        }
        self.new_line(depth);
    }

    fn end(&mut self, bracket: char, empty: bool, depth: usize) {
        if !empty {
            self.new_line(depth);
        }
        self.out.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        let mut chars = text.chars();
        while let Some(mut c) = chars.next() {
            if self.ensure_ascii && c == ESCAPE {
                c = chars.next().map_or(c, unescape);
            } else if is_mark(c) {
                self.out.push(c);
                continue;
            }
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(self.out, "\\u{unit:04x}").expect("writing to a string succeeds");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// A float as Python's `repr` prints it: shortest digits, exponent form from 1e16 and below 1e-4.
pub(crate) fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let magnitude = value.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{value:?}")
}
