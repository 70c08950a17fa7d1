//! `redlite tokenize`: the tokens of a text.

use std::io::Write;

use crate::args::TokenizeArgs;
use crate::failure::{Failure, Outcome};
use crate::{open, prompt};

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
            writeln!(out, "{id:>7}  {:?}", String::from_utf8_lossy(bytes))?;
        }
        eprintln!("{} tokens from {} bytes", ids.len(), text.len());
    }
    Ok(Outcome::Success)
}
