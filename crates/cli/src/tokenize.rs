//! `redlite tokenize`: the tokens of a text.

use std::io::Write;

use crate::args::TokenizeArgs;
use crate::failure::{Failure, Outcome};
use crate::{open, prompt, report};

/// Runs the command.
pub fn run(args: &TokenizeArgs) -> Result<Outcome, Failure> {
    let text = prompt::text(&args.text)?;
    let tokenizer = open::model(&args.model)?.tokenizer;
    let ids =
        if args.special { tokenizer.encode_raw_with_specials(&text) } else { tokenizer.encode_text(&text) };
    let mut out = std::io::stdout().lock();
    if args.count {
        writeln!(out, "{}", ids.len())?;
    } else if args.json {
        writeln!(out, "{}", serde_json::json!(ids))?;
    } else {
        for &id in &ids {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            writeln!(out, "{id:>7}  {}", quoted(bytes))?;
        }
        report::say(format_args!("{} tokens from {} bytes", ids.len(), text.len()));
    }
    Ok(Outcome::Success)
}

/// Text as a string literal; bytes that are no whole character as `\xc3`.
fn quoted(bytes: &[u8]) -> String {
    let escape = |chunk: std::str::Utf8Chunk<'_>| {
        let text = format!("{:?}", chunk.valid());
        let invalid: String = chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")).collect();
        text[1..text.len() - 1].to_string() + &invalid
    };
    format!("\"{}\"", bytes.utf8_chunks().map(escape).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_characters_are_shown_as_bytes() {
        assert_eq!(quoted("a\n\"é".as_bytes()), r#""a\n\"é""#);
        assert_eq!(quoted(b"ab\xc3"), r#""ab\xc3""#);
    }
}
