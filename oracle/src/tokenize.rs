//! `tokenize`: token ids of a text.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::llama::{Load, Model};

/// Print the token ids of a text as a JSON array.
///
/// No BOS or EOS is added.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// GGUF file; only its tokenizer is loaded
    model: PathBuf,
    /// File with the text, UTF-8; `-` reads standard input
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Recognise control tokens such as <|im_end|> in the text
    #[arg(long)]
    special: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), Error> {
    let model = Model::load(&args.model, Load::Vocabulary)?;
    let content = |what: &str| Error::Content { path: args.file.clone(), what: what.to_string() };
    // The library's own handling of malformed UTF-8 throws, so it never sees any.
    let text = String::from_utf8(bytes(&args.file)?).map_err(|_| content("the text is not UTF-8"))?;
    let ids = model.tokenize(&text, args.special).ok_or_else(|| content("llama.cpp cannot tokenize it"))?;
    let json = serde_json::Value::from(ids);
    writeln!(io::stdout().lock(), "{json}").map_err(Error::Stdout)
}

fn bytes(path: &Path) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    let read = if path == Path::new("-") {
        io::stdin().lock().read_to_end(&mut bytes).map(|_| bytes)
    } else {
        fs::read(path)
    };
    read.map_err(|source| Error::Read { path: path.to_path_buf(), source })
}
