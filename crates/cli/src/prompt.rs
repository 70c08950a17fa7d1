//! Prompts and token lists, from arguments, files and standard input.

use std::io::{IsTerminal, Read};
use std::path::Path;

use serde_json::json;
use text::{ChatTemplate, Tokenizer};

use crate::args::{RunArgs, TextArgs, TokensArgs};
use crate::failure::Failure;
use crate::open::Opened;
use crate::report;

/// Most bytes of a text that are read.
const LONGEST: u64 = 256 << 20;

/// The text of `--prompt` or `--file`.
pub fn text(args: &TextArgs) -> Result<String, Failure> {
    source(args.prompt.as_deref(), args.file.as_deref())
}

/// The tokens of `--prompt`, `--file` or `--tokens`; text is read without control tokens.
pub fn tokens(args: &TokensArgs, tokenizer: &Tokenizer) -> Result<Vec<u32>, Failure> {
    let Some(path) = &args.tokens else {
        return Ok(tokenizer.encode_text(&source(args.prompt.as_deref(), args.file.as_deref())?));
    };
    let list = read(path)?;
    let words = list.split(|c: char| c.is_whitespace() || "[],".contains(c)).filter(|word| !word.is_empty());
    let parse = |word: &str| {
        word.parse().map_err(|_| Failure::Usage(format!("{}: `{word}` is not a token id", path.display())))
    };
    words.map(parse).collect()
}

/// The prompt of `run`: templated unless raw.
pub fn prompt(args: &RunArgs, opened: &Opened) -> Result<Vec<u32>, Failure> {
    let text = source(args.prompt.as_deref(), args.file.as_deref())?;
    let tokenizer = &opened.tokenizer;
    let Some(template) = opened.chat_template.as_ref().filter(|_| !args.raw) else {
        if args.system.is_some() {
            let reason = "the model has no chat template, so a system message has no place".to_string();
            return Err(Failure::Usage(reason));
        }
        let encode = if args.special { Tokenizer::encode_raw_with_specials } else { Tokenizer::encode_text };
        let bos = tokenizer.bos_of_raw_prompt();
        return Ok(bos.into_iter().chain(encode(tokenizer, &text)).collect());
    };
    let template = ChatTemplate::new(template, tokenizer)?;
    let system = args.system.iter().map(|text| json!({"role": "system", "content": text}));
    let messages: Vec<_> = system.chain([json!({"role": "user", "content": text})]).collect();
    let rendered = template.render(&messages.into(), None, true, &serde_json::Map::new())?;
    Ok(tokenizer.encode_rendered(&rendered))
}

fn source(prompt: Option<&str>, file: Option<&Path>) -> Result<String, Failure> {
    match (prompt, file) {
        (Some(prompt), _) => Ok(prompt.to_string()),
        (None, Some(path)) => read(path),
        (None, None) => {
            if std::io::stdin().is_terminal() {
                report::say("redlite: reading the prompt from the terminal; Ctrl-D ends it");
            }
            read(Path::new("-"))
        }
    }
}

/// The text of a file; `-` is standard input.
pub fn read(path: &Path) -> Result<String, Failure> {
    let fail = |source| Failure::File { path: path.to_path_buf(), source };
    let mut bytes = Vec::new();
    let read = if path.as_os_str() == "-" {
        std::io::stdin().take(LONGEST + 1).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(LONGEST + 1).read_to_end(&mut bytes))
    };
    if read.map_err(fail)? as u64 > LONGEST {
        let limit = report::size(LONGEST);
        return Err(Failure::Usage(format!(
            "{}: more than {limit} is no prompt for any model",
            path.display()
        )));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::Usage(format!("{}: not UTF-8 at byte {at}; convert the text first (iconv)", path.display()))
    })
}
