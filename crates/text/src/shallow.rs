//! Keeps what a template stores in a namespace shallow.
//!
//! A namespace is the only thing a template can change, and so the only way to nest values without end
//! (`set ns.v = [ns.v]` in a loop) or in a circle (`set ns.v = ns`). Printing, comparing or dropping such a value would
//! exhaust the stack and end the process. Every value assigned to a namespace therefore goes through a filter that
//! refuses deep ones; the filter is written into the template's source before it is compiled.

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

/// Name of the filter inside templates.
pub(crate) const FILTER: &str = "__shallow";
/// Most levels of lists and maps in a namespace; messages and tools may have as many.
const DEPTH: usize = 110;

/// The source with each `set NAMESPACE.NAME = VALUE` made `set NAMESPACE.NAME = (VALUE) | __shallow`. Lines stay.
pub(crate) fn guard_assignments(source: &str, syntax: SyntaxConfig) -> Result<String, Error> {
    let mut out = String::with_capacity(source.len() + 256);
    let mut copied = 0;
    let mut block = Block::Outside;
    for token in tokenize(source, false, syntax) {
        let (token, span) = token?;
        block = match (block, token) {
            (_, Token::BlockStart) => Block::Start,
            (Block::Start, Token::Ident("set")) => Block::Target { dotted: false },
            (Block::Target { .. }, Token::Dot) => Block::Target { dotted: true },
            (Block::Target { dotted: true }, Token::Assign) => {
                let end = span.end_offset as usize;
                out.push_str(&source[copied..end]);
                out.push_str(" (");
                copied = end;
                Block::Value
            }
            (Block::Value, Token::BlockEnd) => {
                let start = span.start_offset as usize;
                out.push_str(&source[copied..start]);
                out.push_str(&format!(") | {FILTER} "));
                copied = start;
                Block::Outside
            }
            // The name of an argument, inside the value.
            (Block::Value, Token::Assign) => Block::Value,
            (_, Token::BlockEnd | Token::Assign) | (Block::Start, _) => Block::Outside,
            (block, _) => block,
        };
    }
    out.push_str(&source[copied..]);
    Ok(out)
}

/// Where in a block the scan is.
enum Block {
    Outside,
    /// After `{%`.
    Start,
    /// In the target of a `set`; with a dot it is a namespace's.
    Target {
        dotted: bool,
    },
    /// In the value assigned to a namespace.
    Value,
}

/// The value itself, lazy sequences made lists.
pub(crate) fn shallow(state: &State, value: &Value) -> Result<Value, Error> {
    let lazy = value.as_object().is_some_and(|object| !is_plain(object.type_name()));
    let value = match value.kind() {
        ValueKind::Seq | ValueKind::Iterable if lazy => value.try_iter()?.collect(),
        _ => value.clone(),
    };
    check(state, &value, DEPTH)?;
    Ok(value)
}

/// Containers that hold their values and nothing else.
fn is_plain(type_name: &str) -> bool {
    ["Vec<", "Tuple", "IndexMap<"].iter().any(|plain| type_name.contains(plain))
}

fn check(state: &State, value: &Value, depth: usize) -> Result<(), Error> {
    state.consume_fuel(1)?;
    let Some(object) = value.as_object() else { return Ok(()) };
    let plain = is_plain(object.type_name());
    let Some(depth) = depth.checked_sub(1).filter(|_| plain) else {
        let message = "only plain values, nested less than 110 levels, can be assigned to a namespace";
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    };
    for item in value.try_iter()? {
        match value.kind() {
            ValueKind::Map => check(state, &value.get_item(&item)?, depth)?,
            _ => check(state, &item, depth)?,
        }
    }
    Ok(())
}
